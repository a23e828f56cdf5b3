//! Users who are not root, at a client and a server that are: members of the group `mpvpn` see what those do,
//! members of `mpvpn-admin` change it, and all others are told how to join.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use mpvpn_input::dirs::SOCKET_DIR;
use mpvpn_tests::{
    ping::reaches,
    terminal::Terminal,
    testbed::{Host, MpvpnProcess, SERVER, TUNNEL, Testbed, binary},
};

/// Limit of a command. Longer than on any busy machine; only a failing test takes that long.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A command that is refused does not wait: far less than the 30 s for which `--wait 30` may wait.
const AT_ONCE: Duration = Duration::from_secs(15);
/// The number of the user, which no other user and group has, and of the groups.
const USER: u32 = 61_000;
const READERS: u32 = 61_001;
const ADMINISTRATORS: u32 = 61_002;
const JOIN: &str = "permission denied: use sudo or join the group mpvpn \
                    (sudo usermod -aG mpvpn NAME, then log in again)";
const JOIN_BOTH: &str = "permission denied: use sudo or join the groups mpvpn and mpvpn-admin \
                         (sudo usermod -aG mpvpn,mpvpn-admin NAME, then log in again)";

/// A machine with the package's user and groups, on which root runs a client and a server.
struct Machine {
    /// Ended before the testbed.
    client: MpvpnProcess,
    _server: MpvpnProcess,
    accounts: PathBuf,
    testbed: Testbed,
}

impl Machine {
    fn new() -> Self {
        let testbed = Testbed::two_links();
        let accounts = testbed.public_folder("accounts");
        let add = |name: &str, lines: &str| {
            let before = fs::read_to_string(Path::new("/etc").join(name)).expect("every machine has it");
            fs::write(accounts.join(name), before + lines).expect("our own folder");
        };
        add("group", &format!("mpvpn:x:{READERS}:\nmpvpn-admin:x:{ADMINISTRATORS}:\n"));
        add("passwd", &format!("mpvpn:x:{READERS}:{READERS}::/var/lib/mpvpn:/usr/sbin/nologin\n"));
        // As tmpfiles.d of the package makes it.
        let sockets = testbed.default_sockets();
        fs::set_permissions(sockets, fs::Permissions::from_mode(0o750)).expect("its owner may");
        chown(sockets, Some(READERS), Some(READERS)).expect("root may give it away");
        let start = |host, args: &[&str], socket| {
            let [group, passwd] = ["group", "passwd"].map(|name| accounts.join(name));
            let files = [(group.as_path(), Path::new("/etc/group")), (&passwd, Path::new("/etc/passwd"))];
            testbed.start_with_files(host, &files, args, &sockets.join(socket))
        };
        let server =
            ["server", "--name", "office", "--listen", "0.0.0.0:4433", "--auth", "none", "--measure"];
        let server = [&server[..], &["--cert", "server.crt", "--key", "server.key"]].concat();
        let server = start(Host::Server, &server, "server-office.sock").wait_until_up();
        let client = ["client", "--name", "home", "--server", SERVER, "--insecure", "--dns", "off"];
        let client = [&client[..], &["--path", "eth1", "--path", "eth2"]].concat();
        let client = start(Host::Client, &client, "client-home.sock").wait_until_up();
        reaches(&testbed, Host::Client, TUNNEL);
        // As systemd sets it: users may send echo requests.
        testbed.run(Host::Client, &["sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647"]);
        Self { client, _server: server, accounts, testbed }
    }

    /// `mpvpn` of a user in these groups, as after a login over the network without a session.
    fn command(&self, host: Host, groups: &[u32], words: &[&str]) -> Command {
        let script =
            r#"mount --bind "$0/group" /etc/group && mount --bind "$0/passwd" /etc/passwd && exec "$@""#;
        let mut command = self.testbed.command(host, "unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&self.accounts);
        command.args(["timeout", "-k", "2", &TIMEOUT.as_secs().to_string()]);
        let user = USER.to_string();
        let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
        command.args(["setpriv", "--no-new-privs", "--reuid", &user, "--regid", &user]);
        match groups.is_empty() {
            true => command.arg("--clear-groups"),
            false => command.args(["--groups", &groups.join(",")]),
        };
        command.arg(binary()).args(words).env_remove("XDG_RUNTIME_DIR").env_remove("XDG_STATE_HOME");
        command
    }

    fn run(&self, host: Host, groups: &[u32], words: &[&str]) -> Output {
        self.command(host, groups, words).output().expect("unshare runs")
    }

    #[track_caller]
    fn succeeds(&self, host: Host, groups: &[u32], words: &[&str]) -> String {
        let output = self.run(host, groups, words);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {out}{}", String::from_utf8_lossy(&output.stderr));
        out
    }

    #[track_caller]
    fn is_refused(&self, host: Host, groups: &[u32], words: &[&str], sentence: &str) {
        let began = Instant::now();
        let output = self.run(host, groups, words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.contains(&format!("{sentence}\n")) && output.stdout.is_empty(), "{words:?}: {said}");
        assert!(began.elapsed() < AT_ONCE, "{words:?} waited for {:?}", began.elapsed());
    }
}

/// Each host with the options that name its process, and the path of the socket.
const PROCESSES: [(Host, &str, &str); 2] =
    [(Host::Client, "home", "client-home.sock"), (Host::Server, "office", "server-office.sock")];
/// Changes at a client.
const CHANGES: [&[&str]; 3] =
    [&["link", "set", "eth2", "--tier", "backup"], &["config", "reload"], &["dashboard"]];

#[test]
fn members_of_the_group_see_all_and_change_nothing() {
    let machine = Machine::new();
    let member = [READERS];
    for (host, name, socket) in PROCESSES {
        for words in
            [&["status"][..], &["status", "--flows", "--json"], &["status", "--wait", "10"], &["events"]]
        {
            machine.succeeds(host, &member, &[words, &["--name", name]].concat());
        }
        let path = format!("{SOCKET_DIR}/{socket}");
        assert!(machine.succeeds(host, &member, &["status", "--api-socket", &path]).contains("up"));
        machine.is_refused(host, &member, &["config", "reload", "--name", name], JOIN_BOTH);
        machine.is_refused(host, &member, &["dashboard", "--name", name], JOIN_BOTH);
        let top = Terminal::start(machine.command(host, &member, &["top", "--name", name]));
        mpvpn_tests::eventually(TIMEOUT, "the screen of top", || {
            let lines = top.lines();
            if lines.iter().any(|line| line.contains("mpvpn")) { Ok(()) } else { Err(lines.join("\n")) }
        });
    }
    machine.succeeds(Host::Client, &member, &["ping", TUNNEL, "-c", "2", "-i", "0.1", "--name", "home"]);
    let measured = ["measure", "--link", "eth1", "--seconds", "1", "--yes", "--name", "home"];
    let measured = machine.succeeds(Host::Client, &member, &measured);
    assert!(measured.contains("eth1"), "{measured}");
    let before = machine.client.status()["links"].clone();
    for words in CHANGES {
        machine.is_refused(Host::Client, &member, &[words, &["--name", "home"]].concat(), JOIN_BOTH);
    }
    let tiers = |links: &serde_json::Value| {
        links.as_array().expect("a list").iter().map(|link| link["tier"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(tiers(&machine.client.status()["links"]), tiers(&before), "nothing changed");

    let administrator = [READERS, ADMINISTRATORS];
    machine.succeeds(Host::Client, &administrator, &[CHANGES[0], &["--name", "home"]].concat());
    machine.client.wait_for_status(TIMEOUT, "the tier that was set", |status| {
        match tiers(&status["links"]).iter().any(|tier| tier == "backup") {
            true => Ok(()),
            false => Err("no backup link".to_owned()),
        }
    });
    for (host, name, _) in PROCESSES {
        machine.succeeds(host, &administrator, &["config", "show", "--name", name]);
    }
}

#[test]
fn others_are_told_how_to_join_by_each_command() {
    let machine = Machine::new();
    for (host, name, socket) in PROCESSES {
        let path = format!("{SOCKET_DIR}/{socket}");
        for target in [&[][..], &["--name", name], &["--api-socket", &path]] {
            for words in [
                &["status"][..],
                &["status", "--flows"],
                &["status", "--wait", "30"],
                &["events"],
                &["events", "--follow"],
                &["ping", TUNNEL, "-c", "1"],
                &["measure", "--yes"],
            ] {
                machine.is_refused(host, &[], &[words, target].concat(), JOIN);
            }
            // It is for terminals, and this one cuts lines.
            let mut top = Terminal::start(machine.command(host, &[], &[&["top"], target].concat()));
            assert_eq!(top.wait_for_end(AT_ONCE).0.code(), Some(1), "{:?}", top.lines());
            let sentence = &JOIN[..JOIN.len() - " then log in again)".len()];
            top.wait_for(AT_ONCE, sentence, |lines| lines.iter().any(|line| line.contains(sentence)));
        }
        for words in CHANGES {
            machine.is_refused(host, &[], &[words, &["--api-socket", &path]].concat(), JOIN);
        }
        // Members of the other group alone do not reach the socket.
        machine.is_refused(host, &[ADMINISTRATORS], &["status", "--name", name], JOIN);
    }
    machine.is_refused(Host::Server, &[], &["user", "list"], "permission denied: use sudo");
    machine.is_refused(Host::Server, &[READERS], &["user", "list"], "permission denied: use sudo");
}

#[test]
fn the_folder_of_sockets_is_open_to_members_who_make_nothing_there() {
    let machine = Machine::new();
    let sockets = machine.testbed.default_sockets();
    let is_open = |path: &Path, mode: u32| {
        let found = fs::metadata(path).expect("it is there");
        assert_eq!((found.mode() & 0o777, found.gid()), (mode, READERS), "{}", path.display());
    };
    is_open(sockets, 0o750);
    PROCESSES.iter().for_each(|(.., socket)| is_open(&sockets.join(socket), 0o660));
    let user = USER.to_string();
    let groups = format!("{READERS},{ADMINISTRATORS}");
    let script = format!(
        "ls {SOCKET_DIR} && ! touch {SOCKET_DIR}/forged && ! mv {SOCKET_DIR}/client-home.sock {SOCKET_DIR}/other.sock \
         && ! cat {SOCKET_DIR}/netns-*/*"
    );
    let args = ["setpriv", "--reuid", &user, "--regid", &user, "--groups", &groups, "sh", "-c", &script];
    let listed = machine.testbed.run(Host::Client, &args);
    assert!(listed.contains("client-home.sock") && listed.contains("server-office.sock"), "{listed}");
}
