//! The report of `mpvpn bugreport`: what a developer asks for first.
//!
//! In: the processes that run here, files, and the answers of system programs. Out: text. Always holds: all
//! of it goes through the [`Redactor`]; each part is bounded; a part that cannot be had says why, and the
//! others follow.

mod redact;

use std::{
    fmt::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_input::dirs::STATE_DIR;
use mpvpn_os::program::{self, Ended};

use self::redact::Redactor;

/// Longest part (bytes): its end counts, as logs have the latest there. Longer ones make reports that nobody
/// can send.
const MAX_PART_BYTES: usize = 256 << 10;
/// Time that a system program may take. Shorter: a busy machine's answers are missing. Longer: people wait.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);

/// The system programs whose output is collected.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("uname", &["-srvm"]),
    ("systemctl", &["--no-pager", "--full", "status", "mpvpn*"]),
    ("journalctl", &["--no-pager", "-o", "short-iso-precise", "-n", "1000", "-u", "mpvpn*"]),
    ("ip", &["-details", "address"]),
    ("ip", &["rule"]),
    ("ip", &["-6", "rule"]),
    ("ip", &["route", "show", "table", "all"]),
    ("ip", &["-6", "route", "show", "table", "all"]),
    ("nft", &["list", "ruleset"]),
    ("resolvectl", &["status"]),
    ("ss", &["-lunpt"]),
];

/// Files that are read.
const FILES: &[&str] = &[
    "/etc/os-release",
    "/etc/resolv.conf",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv6/conf/all/forwarding",
    "/proc/sys/net/ipv4/conf/all/rp_filter",
    "/proc/sys/net/core/rmem_max",
    "/proc/sys/net/core/wmem_max",
    "/proc/sys/net/mptcp/enabled",
    "/proc/net/dev",
    "/proc/net/snmp",
];

/// Collects the report about the processes at these sockets. `progress` is called before each part.
pub(crate) fn collect(sockets: &[PathBuf], progress: &mut dyn FnMut(&str)) -> String {
    let mut redactor = Redactor::default();
    let mut parts = Vec::new();
    let mut add = |title: &str, text: &str| {
        progress(title);
        parts.push((title.to_owned(), end_of(text).to_owned()));
    };
    if sockets.is_empty() {
        add("processes", "no mpvpn answers here");
    }
    for socket in sockets {
        let status = mpvpn_api::fetch_status(socket).map_err(|error| error.to_string()).and_then(|status| {
            redactor.learn("status", &serde_json::to_value(&status).unwrap_or_default());
            serde_json::to_string_pretty(&status).map_err(|error| error.to_string())
        });
        add(&format!("status of {}", socket.display()), &status.unwrap_or_else(|error| error));
        let events = mpvpn_api::fetch_events(socket).unwrap_or_else(|error| error.to_string());
        add(&format!("events of {}", socket.display()), &events);
    }
    for path in toml_files() {
        let text = read(&path);
        redactor.learn_toml(&text);
        // The files of users are not for reports.
        if !path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("users")) {
            add(&path.display().to_string(), &text);
        }
    }
    for (program, arguments) in PROGRAMS {
        add(&format!("{program} {}", arguments.join(" ")), &output_of(program, arguments));
    }
    for path in FILES {
        add(path, &read(Path::new(path)));
    }
    parts.iter().for_each(|(_, text)| redactor.learn_text(text));
    let mut report = format!("mpvpn {}\n", env!("CARGO_PKG_VERSION"));
    for (title, text) in parts {
        let _ = write!(report, "\n=== {title}\n{}\n", redactor.redact(&text).trim_end());
    }
    report
}

/// The TOML files of this machine: configurations, and users.
fn toml_files() -> Vec<PathBuf> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let states = list(Path::new(STATE_DIR));
    let of_instances = states.iter().flat_map(|folder| list(folder));
    let mut paths: Vec<_> = list(Path::new("/etc/mpvpn")).into_iter().chain(of_instances).collect();
    paths.extend(states);
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    paths.sort();
    paths
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| format!("cannot be read: {error}"))
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    match program::run(program, &arguments, String::new(), Some(PROGRAM_TIMEOUT)) {
        Ended::Well(text) | Ended::Badly(text) => text,
        Ended::Missing => format!("{program} is not installed"),
        Ended::Late => format!("{program} did not end in {} s", PROGRAM_TIMEOUT.as_secs()),
    }
}

/// The last [`MAX_PART_BYTES`] of a text, from the beginning of a line.
fn end_of(text: &str) -> &str {
    let Some(start) = text.len().checked_sub(MAX_PART_BYTES).filter(|start| *start > 0) else { return text };
    let after = text.as_bytes()[start..].iter().position(|byte| *byte == b'\n');
    after.map_or("", |after| &text[start + after + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_servers_are_found_in_configuration_files() {
        let text = "server = \"vpn.example.org:443\"\npublic='edge.example'\nname = \"x\"\n[acme]\ndomains = [\"a.example\", \"b.example\"]\n";
        let names = "vpn.example.org edge.example a.example b.example";
        assert!(report(&[text], &[], &[names]).ends_with("\n[server] [server] [server] [server]\n"));
        let text = "server = ['vpn.example.org', { address = 'edge.example:4433', weight = 2 }]\n";
        let shown = report(&[text], &[], &["vpn.example.org edge.example"]);
        assert!(shown.ends_with("\n[server] [server]\n"), "{shown}");
    }

    #[test]
    fn tokens_and_passwords_are_found_in_configuration_files() {
        let text = "token = 'correct-horse' # of the office\nvia = ['http://anna:open%20sesame@proxy.example:3128']\n\
                    server = \"mpvpn://mpvpn_abc@vpn.example:443?pin=12\"\npin = '12'\n";
        let shown =
            report(&[text], &[], &["correct-horse open%20sesame mpvpn_abc proxy.example vpn.example"]);
        assert!(shown.ends_with("\n[key 1] [key 2] [key 3] [server] [server]\n"), "{shown}");
    }

    /// A report about configuration files, files of users, and other texts.
    fn report(configs: &[&str], users: &[&str], texts: &[&str]) -> String {
        let mut redactor = Redactor::default();
        configs.iter().chain(users).for_each(|text| redactor.learn_toml(text));
        configs.iter().chain(texts).for_each(|text| redactor.learn_text(text));
        configs.iter().chain(texts).map(|text| redactor.redact(text) + "\n").collect()
    }

    #[test]
    fn secrets_are_found_by_their_keys_whatever_they_look_like() {
        let client = "server = 'vpn.example:443'\ntoken = 'a.b+c/d='\nvia = [\n  \"http://carol:p#w'd@proxy.example:3128\",\n]\n\
                      link = [{ name = 'wwan0', via = \"dave:s3cr3t word@proxy2.example\" }]\n";
        let logs = "123 /usr/bin/mpvpn client --token x.Y/z= --via http://erin:hunter2@proxy3.example\n\
                    Environment: https_proxy=http://frank:pa55@proxy4.example:80 token=t0~k3n.\n\
                    mpvpn client mpvpn://e+f/g=.h@192.0.2.1/?pin=1, and e+f/g=.h again\n\
                    {\"token\": \"a b\", \"name\": \"wwan0\"}\n";
        let shown = report(&[client], &[], &[logs]);
        for secret in
            ["a.b+c/d=", "p#w'd", "s3cr3t", "x.Y/z=", "hunter2", "pa55", "t0~k3n", "e+f/g=.h", "a b"]
        {
            assert!(!shown.contains(secret), "{secret}: {shown}");
        }
        for kept in ["wwan0", "/usr/bin/mpvpn client", "192.0.2.1", "\"name\""] {
            assert!(shown.contains(kept), "{kept}: {shown}");
        }
        let wrong = "this is not a token: expected 1 to 4096 letters\ndefault via 192.0.2.1 dev eth0\n";
        assert_eq!(report(&[], &[], &[wrong]), format!("{wrong}\n"));
    }

    #[test]
    fn users_have_the_same_number_instead_of_a_name_in_the_whole_report() {
        let server = "users = '/etc/mpvpn/users.toml'\n[[access]]\nallow = true\nusers = [\n  'anna',\n  'bob@example.org',\n]\n\
                      [acme]\nemail = 'root-of-all@example.net'\n";
        let users = "[[user]]\nname = 'default'\n[[user]]\nname = 'zoe'\ntoken-sha256 = '12'\n";
        let logs = "ts INFO anna (192.0.2.9) connected\nDEBUG user=\"eve\" refused\nzoe lost access, eve too; annalena not\n\
                    {\"users\": [{\"name\": \"mallory\"}], \"user\": \"anna\"}\ndefault via 192.0.2.1\n";
        let shown = report(&[server], &[users], &[logs]);
        for name in ["'anna'", "bob@", "zoe", "eve", "root-of-all", "user=\"eve\""] {
            assert!(!shown.contains(name), "{name}: {shown}");
        }
        let of = |name: &str| shown.lines().find(|line| line.contains(name)).unwrap().to_owned();
        let anna = of("connected").split_whitespace().nth(2).unwrap().to_owned();
        assert!(anna.starts_with("user-"), "{shown}");
        assert!(of("\"user\"").contains(&format!("\"user\": \"{anna}\"")), "{shown}");
        assert!(shown.contains("annalena") && shown.contains("default via"), "{shown}");
        assert!(shown.contains("/etc/mpvpn/users.toml"), "{shown}");
    }

    #[test]
    fn of_a_long_part_the_end_is_kept_from_the_beginning_of_a_line() {
        let text = "0123456789é\n".repeat(MAX_PART_BYTES / 10);
        let kept = end_of(&text);
        assert!(kept.len() <= MAX_PART_BYTES && kept.starts_with("0123456789é\n"));
        assert_eq!(end_of("short"), "short");
    }

    #[test]
    fn a_program_that_is_missing_is_said_and_the_rest_follows() {
        let said = output_of("no-such-program", &[]);
        assert!(said.contains("no-such-program"), "{said}");
        let mut parts = Vec::new();
        let report = collect(&[], &mut |part| parts.push(part.to_owned()));
        assert!(report.contains("no mpvpn answers here") && report.contains("=== /proc/net/dev"), "{report}");
        assert_eq!(parts.last().map(String::as_str), FILES.last().copied());
    }
}
