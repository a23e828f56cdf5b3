//! A process that somebody has taken over: what it attempts is refused, however it was started.

use std::{
    ffi::OsStr,
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
use crate::leaks::table::documented;

/// The error numbers with which the kernel refuses an attempt. All others say that it was made.
const REFUSALS: [i32; 4] = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EAFNOSUPPORT];

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
        for name in ["open", "root", "run"] {
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
        let socket = self.folder.join("run/socket");
        let preload = format!("LD_PRELOAD={}", self.folder.join("breakout.so").display());
        let folder = format!("MPVPN_BREAKOUT={}", self.folder.display());
        let outside = format!("MPVPN_BREAKOUT_OUTSIDE={}", std::process::id());
        let binary = binary();
        let program: [&OsStr; 4] = [preload.as_ref(), folder.as_ref(), outside.as_ref(), binary.as_os_str()];
        let program = program.map(|word| word.to_str().expect("an ASCII path"));
        let api = ["--api-socket", socket.to_str().expect("an ASCII path")];
        let all = [prefix, &["env"], &program, args, &api].concat();
        self.testbed.start_program(host, all[0], &all[1..], &socket).wait_until_up()
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
        .map(|(victims, process)| victims.successes(process.id()));
    assert_eq!(made, <[Vec<String>; 3]>::default(), "server, client, proxy");
}

/// Checks a row of the table against what the kernel says of a process, and what it can do.
#[track_caller]
fn assert_as_documented(row: &[String], victims: &Victims<'_>, pid: u32) {
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
    for (attempt, allowed) in [
        ("make a file in /etc:", changes.contains("`/etc`")),
        ("make a UNIX socket:", sockets != "no"),
        ("run a program:", programs != "none"),
    ] {
        let can = successes.iter().any(|success| success.starts_with(attempt));
        assert_eq!(can, allowed, "{attempt} of the {name}: {successes:?}");
    }
}

#[test]
fn each_process_has_the_rights_that_the_table_says() {
    let testbed = Testbed::two_links();
    let listen = ["server", "--auth", "none", "--listen"];
    let relay = ["0.0.0.0:4434", "--relay-only", "--state-dir", "relays"];
    let proxy = ["proxy", "--server", SERVER, "--insecure", "--socks5", "127.0.0.1:1080"];
    let starts = [
        ("server", Host::Server, [&listen[..], &["0.0.0.0:4433"]].concat()),
        ("relay-only server", Host::Server, [&listen[..], &relay].concat()),
        ("client", Host::Client, vec!["client", "--server", SERVER, "--insecure"]),
        ("proxy", Host::Client, proxy.to_vec()),
    ];
    let rows = documented("Each process, as root starts it:");
    let mut processes = Vec::new();
    for (name, host, args) in starts {
        let victims = Victims::new(&testbed, host);
        let process = victims.start(host, &[], &args);
        let helper = helper_of(&process).expect("a helper");
        let helper_name = format!("helper of a {name}");
        for (name, pid) in [(name, process.id()), (&helper_name, helper)] {
            let row = rows.iter().find(|row| row[0].split(" or ").any(|part| part == name));
            assert_as_documented(row.unwrap_or_else(|| panic!("no row for the {name}")), &victims, pid);
        }
        processes.push(process);
    }
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
    assert_eq!(victims.successes(client.id()), [""; 0]);
}
