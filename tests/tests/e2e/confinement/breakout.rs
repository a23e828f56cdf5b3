//! A process that somebody has taken over: what it attempts is refused, however it was started.

use std::{
    fs,
    os::{linux::net::SocketAddrExt, unix::fs::PermissionsExt, unix::fs::symlink, unix::net},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    testbed::{Host, MpvpnProcess, SERVER, Testbed, binary},
};
use rustix::process::{Pid, Signal};

use super::{assert_confined, helper_of, line};
use crate::{leaks::table::documented, mtls::Ca};

/// The error numbers with which the kernel refuses an attempt. All others say that it was made.
const REFUSALS: [i32; 4] = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EAFNOSUPPORT];

/// The kinds of folders in the columns "reads files in" and "changes files in", and the names of such folders
/// here.
const KINDS: [&str; 8] =
    ["configuration", "certificates", "users", "revocations", "site", "state", "qlog", "socket"];
/// The folders that the column "changes files in" names, but `/etc`, which is one of those at the top, and
/// the kernel's parameters.
const FOLDERS: [&str; 4] = ["/run/mpvpn", "/run/mpvpn-resolv.conf", "/run/mpvpn-dns", "/var/lib/mpvpn-dns"];
/// File systems of the kernel, in which nobody makes files.
const OF_KERNEL: [&str; 2] = ["/proc", "/sys"];

/// Files and sockets of others, and the attempts to get at them.
struct Victims<'a> {
    testbed: &'a Testbed,
    folder: PathBuf,
    _sockets: [net::UnixListener; 2],
}

impl<'a> Victims<'a> {
    fn new(testbed: &'a Testbed, host: Host) -> Self {
        let folder = testbed.public_folder("victims");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its owner may");
        };
        for name in ["open", "root", "run"].iter().chain(&KINDS) {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        for name in ["secret", "root/removed"] {
            fs::write(folder.join(name), "of root").expect("a file");
            mode(&folder.join(name), 0o600);
        }
        symlink(format!("/proc/{}/mem", std::process::id()), folder.join("memory")).expect("a link");
        let socket = folder.join("open/socket");
        let sockets = testbed.in_namespace(host, || {
            let name = net::SocketAddr::from_abstract_name(folder.as_os_str().as_encoded_bytes());
            let name = name.expect("a short name");
            [net::UnixListener::bind(&socket), net::UnixListener::bind_addr(&name)].map(Result::unwrap)
        });
        for path in [&socket, &folder.join("open"), &folder.join("run"), &folder] {
            mode(path, 0o777);
        }
        // All users may do all there, so that nothing but the confinement refuses it.
        KINDS.iter().for_each(|kind| mode(&folder.join(kind), 0o777));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/confinement/breakout.c");
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
            .args([&folder.join("breakout.so"), &source])
            .output()
            .expect("cc runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { testbed, folder, _sockets: sockets }
    }

    /// Starts `mpvpn` with the attempts loaded, after `prefix`, and waits until it is up.
    fn start(&self, host: Host, prefix: &[&str], args: &[&str]) -> MpvpnProcess {
        let socket = self.folder.join("socket/api");
        let api = ["--api-socket", socket.to_str().expect("an ASCII path")];
        self.start_as_is(host, prefix, &[args, &api].concat(), &socket).wait_until_up()
    }

    /// The same without a socket of its own, and without waiting.
    fn start_as_is(&self, host: Host, prefix: &[&str], args: &[&str], socket: &Path) -> MpvpnProcess {
        let folders: Vec<String> = self.folders().iter().map(|path| path.display().to_string()).collect();
        let environment = [
            format!("LD_PRELOAD={}", self.folder.join("breakout.so").display()),
            format!("MPVPN_BREAKOUT={}", self.folder.display()),
            format!("MPVPN_BREAKOUT_OUTSIDE={}", std::process::id()),
            format!("MPVPN_BREAKOUT_FOLDERS={}", folders.join(":")),
        ];
        let (environment, binary) = (environment.each_ref().map(String::as_str), binary());
        let program = [binary.to_str().expect("an ASCII path")];
        let all = [prefix, &["env"], &environment, &program, args].concat();
        self.testbed.start_program(host, all[0], &all[1..], socket)
    }

    /// The folders in which a process attempts to read and to make files: one of each kind in the table,
    /// those that the table names, and all at the top.
    fn folders(&self) -> Vec<PathBuf> {
        let top = fs::read_dir("/").expect("it is there").flatten();
        let top = top.filter_map(|entry| fs::canonicalize(entry.path()).ok()).filter(|path| path.is_dir());
        let named = FOLDERS.iter().map(PathBuf::from);
        KINDS.iter().map(|kind| self.folder.join(kind)).chain(named).chain(top).collect()
    }

    /// The path of a file in the folder of a kind.
    fn file(&self, kind_and_name: &str) -> String {
        self.folder.join(kind_and_name).to_str().expect("an ASCII path").to_owned()
    }

    /// The attempts of a process that were not refused, with the kernel's answers.
    fn successes(&self, pid: u32) -> Vec<String> {
        rustix::process::kill_process(Pid::from_raw(pid.cast_signed()).expect("a process"), Signal::USR2)
            .expect("it runs");
        let report = self.folder.join(pid.to_string());
        let text = eventually(Duration::from_secs(10), "the attempts", || {
            let text = fs::read_to_string(&report).map_err(|error| error.to_string())?;
            if text.ends_with("end\n") { Ok(text) } else { Err(text) }
        });
        let answers = text.lines().filter_map(|line| line.rsplit_once(": "));
        let answers: Vec<(&str, i32)> =
            answers.map(|(name, error)| (name, error.parse().expect("a number"))).collect();
        assert!(answers.len() > 30, "{text}");
        let made = answers.into_iter().filter(|(_, error)| !REFUSALS.contains(error));
        made.map(|(name, error)| format!("{name}: {error}")).collect()
    }
}

#[test]
fn a_process_of_root_that_was_taken_over_does_no_harm() {
    let testbed = Testbed::two_links();
    let at_server = Victims::new(&testbed, Host::Server);
    let server = ["server", "--listen", "0.0.0.0:4433", "--auth", "none", "--state-dir", "state"];
    let server = at_server.start(Host::Server, &[], &server);
    let at_client = Victims::new(&testbed, Host::Client);
    let client = at_client.start(Host::Client, &[], &["client", "--server", SERVER, "--insecure"]);
    let at_proxy = Victims::new(&testbed, Host::Client);
    let proxy = ["proxy", "--server", SERVER, "--insecure", "--socks5", "127.0.0.1:1080"];
    let proxy = at_proxy.start(Host::Client, &[], &proxy);
    let made = [(&at_server, &server), (&at_client, &client), (&at_proxy, &proxy)]
        .map(|(victims, process)| harm(victims, process));
    assert_eq!(made, <[Vec<String>; 3]>::default(), "server, client, proxy");
}

/// The attempts of a process that were not refused, without those in folders and at kernel parameters, some
/// of which it may change: the table says which.
fn harm(victims: &Victims<'_>, process: &MpvpnProcess) -> Vec<String> {
    let is_in_table = |made: &String| made.starts_with("read in ") || made.starts_with("change in ");
    victims.successes(process.id()).into_iter().filter(|made| !is_in_table(made)).collect()
}

/// Checks a row of the table against what the kernel says of a process, and what it can do. `reads` is the
/// cell of the row about reading, with the words in place of which it says "the same".
#[track_caller]
fn assert_as_documented(row: &[String], reads: &str, victims: &Victims<'_>, pid: u32) {
    let [name, user, capabilities, _, changes, sockets, programs] = row else { panic!("{row:?}") };
    for number in line(pid, "Uid:").split_whitespace().chain(line(pid, "Gid:").split_whitespace()) {
        assert_eq!(number == "0", user == "root", "the user of the {name}");
    }
    let bit = |capability: &str| match capability {
        "none" => 0,
        "NET_ADMIN" => super::NET_ADMIN,
        "NET_BIND_SERVICE" => super::LOW_PORTS,
        "DAC_READ_SEARCH" => super::READ_ALL,
        other => panic!("{other} of the {name}"),
    };
    assert_confined(pid, capabilities.split(", ").map(bit).sum());
    let successes = victims.successes(pid);
    let mut attempts = vec![
        ("make a UNIX socket".to_owned(), sockets != "no"),
        ("run a program".to_owned(), programs != "none"),
        ("change in /proc/sys/net".to_owned(), changes.contains("`/proc/sys/net`")),
    ];
    let system = system_folders();
    for folder in victims.folders() {
        let path = folder.display().to_string();
        let kind = folder.strip_prefix(&victims.folder).ok().and_then(Path::to_str);
        let word = kind.map_or_else(|| format!("`{path}`"), str::to_owned);
        let changed = changes.contains(&word);
        let read = changed
            || kind.map_or_else(
                || system.iter().any(|top| folder.starts_with(top)),
                |kind| reads.contains(kind),
            );
        // Modes and owners count as well in the named folders.
        if kind.is_some() || !FOLDERS.contains(&path.as_str()) {
            attempts.push((format!("read in {path}"), read));
        }
        // One that does not exist is changed by nobody.
        let exists = Path::new(&format!("/proc/{pid}/root{path}")).exists();
        if exists && !OF_KERNEL.contains(&path.as_str()) {
            attempts.push((format!("change in {path}"), changed));
        }
    }
    let can = |attempt: &str| successes.iter().any(|success| success.starts_with(&format!("{attempt}:")));
    let wrong: Vec<_> = attempts.iter().filter(|(attempt, allowed)| can(attempt) != *allowed).collect();
    assert!(wrong.is_empty(), "{name}: the table says the opposite of {wrong:#?}; made: {successes:?}");
}

/// The folders of the system that every process may read, as the page about the confinement lists them.
fn system_folders() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/design/confinement.md");
    let text = fs::read_to_string(page).expect("the page is in the tree");
    let sentence = text.split_once("System folders are ").and_then(|(_, rest)| rest.split_once(". "));
    let names = sentence.expect("a list").0.split(", ").map(|name| name.trim_matches('`').to_owned());
    names.collect()
}

/// The row of a process, and its cell about reading.
fn row_of(name: &str) -> (Vec<String>, String) {
    let rows = documented("Each process, as root starts it:");
    let at = rows.iter().position(|row| row[0].split(" or ").any(|part| part.trim_matches('`') == name));
    let at = at.unwrap_or_else(|| panic!("no row for the {name}"));
    let same = rows[..=at].iter().rfind(|row| row[3] != "the same").expect("a row that says it").clone();
    (rows[at].clone(), same[3].clone())
}

#[test]
fn each_process_has_the_rights_that_the_table_says() {
    let testbed = Testbed::two_links();
    let ca = Ca::new(&testbed, "clients.crt");
    ca.revoke(&testbed, &[]);
    testbed.make_certificate("own");
    for (name, host, first) in [
        ("server", Host::Server, &["server"][..]),
        ("relay-only server", Host::Server, &["server", "--relay-only"]),
        ("client", Host::Client, &["client"]),
        ("proxy", Host::Client, &["proxy", "--socks5", "127.0.0.1:1080"]),
    ] {
        let victims = Victims::new(&testbed, host);
        for (from, to) in [
            ("own.crt", "certificates/own.crt"),
            ("own.key", "certificates/own.key"),
            ("clients.crt", "certificates/clients.crt"),
            ("crl.pem", "revocations/crl.pem"),
        ] {
            fs::copy(testbed.dir().join(from), victims.file(to)).expect("a file to copy");
        }
        fs::write(victims.file("users/users.toml"), "").expect("a file");
        let is_server = host == Host::Server;
        let text =
            if is_server { format!("[site]\nroot = '{}'\n", victims.file("site")) } else { String::new() };
        fs::write(victims.file("configuration/file.toml"), text).expect("a file");
        let mut args: Vec<String> = first.iter().map(|word| (*word).to_owned()).collect();
        let mut options = vec![
            ("--config", "configuration/file.toml"),
            ("--cert", "certificates/own.crt"),
            ("--key", "certificates/own.key"),
            ("--state-dir", "state"),
            ("--qlog", "qlog"),
        ];
        let other = if is_server {
            options.extend([
                ("--client-ca", "certificates/clients.crt"),
                ("--crl", "revocations/crl.pem"),
                ("--users", "users/users.toml"),
            ]);
            &["--listen", "0.0.0.0:4434", "--auth", "mtls"][..]
        } else {
            &["--server", SERVER, "--insecure"]
        };
        for (option, path) in options {
            args.extend([option.to_owned(), victims.file(path)]);
        }
        args.extend(other.iter().map(|word| (*word).to_owned()));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let _server = (!is_server).then(|| testbed.server(&[]));
        let process = victims.start(host, &[], &args);
        let helper = helper_of(&process).expect("a helper");
        let (row, reads) = row_of(name);
        assert_as_documented(&row, &reads, &victims, process.id());
        let (row, of_helper) = row_of(&format!("helper of a {name}"));
        assert_eq!(of_helper, "system folders, those of its process except the site");
        // It takes no task before; the process does not wait for it.
        eventually(Duration::from_secs(10), "the helper is confined", || {
            match line(helper, "Seccomp:").as_str() {
                "2" => Ok(()),
                mode => Err(format!("mode {mode}")),
            }
        });
        assert_as_documented(&row, &reads.replace("site", ""), &victims, helper);
    }
}

#[test]
fn the_service_for_name_servers_has_the_rights_that_the_table_says() {
    let testbed = Testbed::two_links();
    let victims = Victims::new(&testbed, Host::Client);
    let script =
        r#"mount -t tmpfs none /run && mkdir /run/mpvpn-dns && mkdir -p /var/lib/mpvpn-dns && exec "$@""#;
    let prefix = ["unshare", "--mount", "sh", "-c", script, "sh"];
    let service = victims.start_as_is(Host::Client, &prefix, &["dns-service"], Path::new("/nowhere"));
    let socket = format!("/proc/{}/root/run/mpvpn-dns/socket", service.id());
    eventually(Duration::from_secs(10), "it listens", || match Path::new(&socket).exists() {
        true => Ok(()),
        false => Err(service.log()),
    });
    let (row, reads) = row_of("mpvpn-dns.service");
    assert_as_documented(&row, &reads, &victims, service.id());
}

#[test]
fn a_process_of_the_service_that_was_taken_over_does_no_harm() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let victims = Victims::new(&testbed, Host::Client);
    // As systemd starts it: a user with ambient capabilities. Name servers need a service of root.
    let as_service = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--inh-caps",
        "+net_admin",
        "--ambient-caps",
        "+net_admin",
        "--bounding-set",
        "-all,+net_admin",
    ];
    let script = r#"mount -t tmpfs tun /dev/net && mknod -m 666 /dev/net/tun c 10 200 && chown 65534 /run/mpvpn && exec "$@""#;
    let state = victims.folder.join("run/state").display().to_string();
    let client = ["client", "--server", SERVER, "--insecure", "--dns", "off", "--state-dir", &state];
    let prefix = [&["unshare", "--mount", "sh", "-c", script, "sh"][..], &as_service].concat();
    let client = victims.start(Host::Client, &prefix, &client);
    assert_eq!(harm(&victims, &client), [""; 0]);
}
