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

/// Keys of configuration files whose values are names of machines or people. They may have a token, or a user
/// name and a password, before an `@`.
const NAME_KEYS: &[&str] = &["server", "public", "domains", "email", "via", "server-name"];

/// Collects the report about the processes at these sockets. `progress` is called before each part.
pub(crate) fn collect(sockets: &[PathBuf], progress: &mut dyn FnMut(&str)) -> String {
    let configs = configuration_files();
    let mut redactor = Redactor::default();
    for (_, text) in &configs {
        for name in names_in(text) {
            redactor.hide_name(name);
        }
        for secret in secrets_in(text) {
            redactor.hide_secret(secret);
        }
    }
    let mut report = format!("mpvpn {}\n", env!("CARGO_PKG_VERSION"));
    let mut add = |title: &str, text: &str| {
        progress(title);
        let _ = write!(report, "\n=== {title}\n{}\n", redactor.redact(end_of(text)).trim_end());
    };
    if sockets.is_empty() {
        add("processes", "no mpvpn answers here");
    }
    for socket in sockets {
        let status = mpvpn_api::fetch_status(socket)
            .map_err(|error| error.to_string())
            .and_then(|status| serde_json::to_string_pretty(&status).map_err(|error| error.to_string()));
        add(&format!("status of {}", socket.display()), &status.unwrap_or_else(|error| error));
        let events = mpvpn_api::fetch_events(socket).unwrap_or_else(|error| error.to_string());
        add(&format!("events of {}", socket.display()), &events);
    }
    for (path, text) in &configs {
        add(&path.display().to_string(), text);
    }
    for (program, arguments) in PROGRAMS {
        add(&format!("{program} {}", arguments.join(" ")), &output_of(program, arguments));
    }
    for path in FILES {
        add(path, &read(Path::new(path)));
    }
    report
}

/// The configuration files of this machine, but for those of users, with their texts.
fn configuration_files() -> Vec<(PathBuf, String)> {
    let Ok(entries) = std::fs::read_dir("/etc/mpvpn") else { return Vec::new() };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    paths.retain(|path| !path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("users")));
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// The values of keys that satisfy `is_wanted` in a configuration file, each without a scheme; no comments.
fn values_in(text: &str, is_wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = &str> {
    let lines = text.lines().filter_map(|line| line.split_once('='));
    let values = lines.filter(move |(key, _)| is_wanted(key.trim())).map(|(_, value)| value);
    let values = values.map(|value| value.split('#').next().unwrap_or_default());
    let words = values.flat_map(|value| value.split(['"', '\'', '[', ']', ',', ' ']));
    words.map(|word| word.split("://").last().unwrap_or_default()).filter(|word| !word.is_empty())
}

/// The names of machines and people in a configuration file, without ports.
fn names_in(text: &str) -> Vec<&str> {
    let words = values_in(text, |key| NAME_KEYS.contains(&key));
    let hosts = words.map(|word| word.rsplit_once('@').map_or(word, |(_, host)| host));
    hosts.map(|host| host.split([':', '/']).next().unwrap_or_default()).collect()
}

/// Tokens and passwords in a configuration file.
fn secrets_in(text: &str) -> Vec<&str> {
    let credentials = values_in(text, |key| NAME_KEYS.contains(&key))
        .filter_map(|word| Some(word.rsplit_once('@')?.0))
        .map(|before| before.split_once(':').map_or(before, |(_, password)| password));
    values_in(text, |key| key == "token").chain(credentials).collect()
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
        let text = "server = \"vpn.example.org:443\"\npublic='edge.example'\n[acme]\ndomains = [\"a.example\", \"b.example\"]\nname = \"x\"\n";
        assert_eq!(names_in(text), ["vpn.example.org", "edge.example", "a.example", "b.example"]);
    }

    #[test]
    fn tokens_and_passwords_are_found_in_configuration_files() {
        let text = "token = 'correct-horse' # of the office\nvia = ['http://anna:open%20sesame@proxy.example:3128']\n\
                    server = \"mpvpn://mpvpn_abc@vpn.example:443?pin=12\"\npin = '12'\n";
        assert_eq!(secrets_in(text), ["correct-horse", "open%20sesame", "mpvpn_abc"]);
        assert_eq!(names_in(text), ["proxy.example", "vpn.example"]);
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
