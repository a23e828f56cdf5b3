//! Users come and go while a server runs.

use std::{
    fs,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    eventually,
    ping::{Ping, reaches},
    testbed::{Family, Host, MpvpnProcess, TUNNEL, Testbed, binary},
};
use serde_json::Value;

use crate::limits::said;

const SOON: Duration = Duration::from_secs(15);
const SERVER: &str = "192.0.2.1:4433";

/// A server with users, and a machine for each of two clients.
pub(crate) struct Site {
    pub(crate) server: MpvpnProcess,
    pub(crate) testbed: Testbed,
}

impl Site {
    pub(crate) fn new() -> Self {
        let testbed = Testbed::two_clients();
        let server = Self::start_server(&testbed);
        Self { server, testbed }
    }

    pub(crate) fn start_server(testbed: &Testbed) -> MpvpnProcess {
        testbed.server(&["--auth", "token", "--state-dir", "state"])
    }

    pub(crate) fn user(&self, args: &[&str]) -> std::process::Output {
        self.testbed.mpvpn(Host::Server, &[&["user"], args, &["--state-dir", "state"]].concat())
    }

    /// Adds a user; returns the join link.
    pub(crate) fn add(&self, name: &str, more: &[&str]) -> String {
        let output = self.user(&[&["add", name, "--json", "--host", SERVER], more].concat());
        assert!(output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(said["command"], format!("mpvpn client '{}'", said["link"].as_str().expect("a link")));
        said["link"].as_str().expect("a link").to_owned()
    }

    fn join(&self, host: Host, link: &str) -> MpvpnProcess {
        self.join_with(host, link, &[])
    }

    pub(crate) fn join_with(&self, host: Host, link: &str, more: &[&str]) -> MpvpnProcess {
        self.testbed.start(host, &[&["client", link], more].concat())
    }
}

#[test]
fn a_revoked_user_is_gone_within_a_second_and_others_feel_nothing() {
    let mut site = Site::new();
    let [alice, bob] = ["alice", "bob"].map(|name| site.add(name, &[]));
    let mut alice = site.join(Host::Client, &alice).wait_until_up();
    let bob = site.join(Host::Other, &bob).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);

    let pings = Ping::every(&site.testbed, Host::Other, Duration::from_millis(20), TUNNEL, 4);
    let revoked = Instant::now();
    assert!(site.user(&["revoke", "alice"]).status.success());
    eventually(Duration::from_secs(1), "the session is gone", || {
        match site.server.log().contains("disconnected: the access of this user was revoked") {
            true => Ok(()),
            false => Err(site.server.log()),
        }
    });
    let took = revoked.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    alice.wait_until_refused(SOON, "the access of this user was revoked");
    let socket = alice.socket().to_str().expect("ASCII").to_owned();
    let shown = site.testbed.mpvpn(Host::Client, &["status", "--api-socket", &socket]);
    assert_eq!(shown.status.code(), Some(3), "{shown:?}");
    assert!(alice.events().iter().any(|event| event["event"] == "refused"), "{}", alice.log());
    assert!(alice.interrupt().success());

    // A file with a mistake changes nothing.
    let file = site.testbed.dir().join("state/users.toml");
    let good = fs::read(&file).expect("the users");
    fs::write(&file, "[[user]]\nname = 'half").expect("a file to write");
    eventually(SOON, "the mistake is said", || {
        match site.server.log().contains("the users cannot be read, nothing changed") {
            true => Ok(()),
            false => Err(site.server.log()),
        }
    });
    fs::write(&file, good).expect("a file to write");

    let output = site.user(&["rotate", "alice", "--json", "--host", SERVER]);
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let _again = site.join(Host::Client, said["link"].as_str().expect("a link")).wait_until_up();
    let status = site.server.status();
    let clients = status["clients"].as_array().expect("clients is a list").iter();
    let mut users: Vec<_> = clients.filter_map(|client| client["user"].as_str()).collect();
    users.sort_unstable();
    assert_eq!(users, ["alice", "bob"], "{status:#}");
    let pings = pings.finish();
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    assert_eq!(bob.status()["session"]["resumed"], 0);
    assert!(site.server.is_running());
}

#[test]
fn access_ends_at_the_moment_that_was_set() {
    let site = Site::new();
    let end = SystemTime::now() + Duration::from_secs(6);
    let moment = time::OffsetDateTime::from(end)
        .format(&time::format_description::well_known::Rfc3339)
        .expect("a moment");
    let guest = site.add("guest", &["--expires", &moment]);
    let guest = site.join(Host::Client, &guest).wait_until_up();
    guest.wait_until_refused(SOON, "the access of this user ended on");
    let late = SystemTime::now().duration_since(end).expect("not before");
    assert!(late < Duration::from_secs(2), "{late:?} late");
    let output = site.user(&["list"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("guest") && said.contains("expired"), "{said}");
}

#[test]
fn an_expired_user_is_told_so_over_udp_and_over_tcp_and_a_stranger_is_not() {
    let site = Site::new();
    let past = said(&site.user(&["add", "guest", "--expires", "2020-01-01"]));
    assert!(past.contains("--expires 2020-01-01 has passed") && past.contains("next: name a day"), "{past}");
    let link = site.add("guest", &[]);
    let past = said(&site.user(&["set", "guest", "--expires", "2020-01-01"]));
    assert!(past.contains("--expires 2020-01-01 has passed"), "{past}");
    let file = site.testbed.dir().join("state/users.toml");
    let users = fs::read_to_string(&file).expect("the users");
    fs::write(&file, format!("{}\nexpires = \"2020-01-31\"\n", users.trim_end())).expect("a file");
    eventually(SOON, "the server has read it", || match site.server.log().contains("1 user lost access") {
        true => Ok(()),
        false => Err(site.server.log()),
    });
    let token = link.strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next()).expect("a token");
    let reason = "the access of this user ended on 2020-01-31";
    for transport in ["auto", "tcp"] {
        let mut client = site.join_with(Host::Client, &link, &["--transport", transport]);
        client.wait_until_refused(SOON, reason);
        assert!(client.is_running(), "{transport}");
        assert!(client.interrupt().success(), "{transport}");
    }
    let checked = said(
        &site.testbed.mpvpn(Host::Client, &["check", "--server", SERVER, "--insecure", "--token", token]),
    );
    assert!(checked.contains(&format!("because the server refuses this client: {reason}")), "{checked}");
    assert!(checked.contains("next: ask who runs the server"), "{checked}");
    let mut stranger = site.testbed.start_client(&["--token", &format!("mpvpn_{}", "A".repeat(43))]);
    assert_eq!(stranger.wait(SOON).code(), Some(1));
    assert!(!stranger.log().contains("ended on"), "{}", stranger.log());

    let waiting = site.join(Host::Client, &link);
    waiting.wait_until_refused(SOON, reason);
    assert!(site.user(&["set", "guest", "--expires", "none"]).status.success());
    let _back = waiting.wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
}

#[test]
fn a_token_is_in_no_arguments_of_a_process_that_runs_and_in_no_log() {
    let site = Site::new();
    let link = site.add("alice", &[]);
    let token = link.strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next()).expect("a token");
    let client = site.join(Host::Client, &link).wait_until_up();
    let arguments = fs::read(format!("/proc/{}/cmdline", client.id())).expect("a process");
    let arguments = String::from_utf8_lossy(&arguments).into_owned();
    assert!(arguments.contains("mpvpn://***") && arguments.contains("@192.0.2.1"), "{arguments}");
    for text in [&arguments, &client.log(), &site.server.log()] {
        assert!(!text.contains(&token[6..]), "{text}");
    }
}

#[test]
fn a_client_that_has_joined_needs_no_options() {
    let site = Site::new();
    let link = site.add("alice", &[]);
    // In a folder /etc of its own.
    let script = r#"mount -t tmpfs none /etc && "$0" join "$1" && cat /etc/mpvpn/client.toml"#;
    let binary = binary();
    let args = ["unshare", "--mount", "sh", "-c", script, binary.to_str().expect("ASCII"), &link];
    let said = site.testbed.run(Host::Client, &args);
    let (done, file) = said.split_once("start it by").expect("what comes next");
    assert!(done.contains("wrote /etc/mpvpn/client.toml"), "{said}");
    let (_, file) = file.split_once('\n').expect("the file");
    let path = site.testbed.file("client.toml", Host::Client);
    fs::write(&path, file).expect("a file to write");
    let socket = site.testbed.file("api", Host::Client);
    let [path, api] = [&path, &socket].map(|path| path.to_str().expect("ASCII"));
    let args = ["client", "--config", path, "--api-socket", api];
    let _client = site.testbed.start_as_is(Host::Client, &args, &socket).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
}

#[test]
fn a_fixed_address_belongs_to_its_user() {
    let site = Site::new();
    let alice = site.add("alice", &["--address", "10.0.0.2"]);
    let bob = site.add("bob", &[]);
    let bob = site.join(Host::Other, &bob).wait_until_up();
    assert_eq!(bob.address(Family::V4), "10.0.0.3");
    for _ in 0..2 {
        // It has no memory of its last session.
        let alice = site.join(Host::Client, &alice).wait_until_up();
        assert_eq!(alice.address(Family::V4), "10.0.0.2");
    }
    let output = site.user(&["add", "carol", "--address", "10.0.0.2"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("the address 10.0.0.2 twice, of `alice` and `carol`"), "{said}");
    let output = site.user(&["add", "carol", "--address", "192.168.1.1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is not in the networks of the tunnel"), "{said}");
}

#[test]
fn a_full_disk_is_said_and_loses_nothing() {
    let site = Site::new();
    // A folder of its own that holds hardly more than the users.
    let script = r#"
        set -e; mkdir full; mount -t tmpfs -o size=12k none full; cd full
        add() { "$0" user add "$1" --users users.toml --state-dir ../state --host 192.0.2.1 > ../link; }
        add alice
        dd if=/dev/zero of=filler bs=1k count=100 2>/dev/null || true
        if add bob 2>../said; then exit 3; fi
        "$0" user list --users users.toml --state-dir ../state > ../listed
        ls > ../files; rm filler
        add bob; "$0" user list --users users.toml --state-dir ../state >> ../listed"#;
    let binary = fs::canonicalize(binary()).expect("the binary");
    let args = ["unshare", "--mount", "sh", "-c", script, binary.to_str().expect("ASCII")];
    site.testbed.run(Host::Server, &args);
    let text = |name: &str| fs::read_to_string(site.testbed.dir().join(name)).expect("a file");
    let said = text("said");
    assert!(said.contains("cannot add the user") && said.contains("No space left on device"), "{said}");
    assert!(said.contains("users.toml") && said.contains("next:"), "{said}");
    assert_eq!(text("files"), "filler\nusers.toml\n", "nothing is left behind");
    let listed = text("listed");
    let names: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["user", "alice", "user", "alice", "bob"], "{listed}");
}

#[test]
fn commands_that_add_users_at_once_all_succeed() {
    let site = Site::new();
    let script = r#"
        for number in 1 2 3 4 5 6; do "$0" user add user$number --state-dir state --host 192.0.2.1 > /dev/null & done
        wait; "$0" user list --state-dir state"#;
    let binary = binary();
    let listed = site.testbed.run(Host::Server, &["sh", "-c", script, binary.to_str().expect("ASCII")]);
    let added = listed.lines().filter(|line| line.starts_with("user") && line.contains("active")).count();
    assert_eq!(added, 6, "{listed}");
}

#[test]
fn a_broken_link_says_what_is_wrong() {
    let site = Site::new();
    let link = site.add("alice", &[]);
    let output = site.testbed.mpvpn(Host::Client, &["client", &link[..link.len() - 10]]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("its pin has 54 of 64 digits") && said.contains("next: copy the whole link"),
        "{said}"
    );
}
