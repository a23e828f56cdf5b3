//! mpvpn undoes all its changes of the system.

use std::time::Duration;

use mpvpn_tests::{
    eventually,
    http::{Download, MB, TestPages},
    ping::reaches,
    testbed::{Host, MpvpnProcess, SERVER, TUNNEL, Testbed, binary, inet4},
};

/// The network settings of both hosts as text.
struct Networks(String, String);

impl Networks {
    fn of(testbed: &Testbed) -> Self {
        Self(testbed.network_state(Host::Client), testbed.network_state(Host::Server))
    }

    fn assert_same(&self, then: &Self, when: &str) {
        for (side, before, after) in [("client", &self.0, &then.0), ("server", &self.1, &then.1)] {
            let left: Vec<&str> =
                after.lines().filter(|line| !before.lines().any(|known| known == *line)).collect();
            let lost: Vec<&str> =
                before.lines().filter(|line| !after.lines().any(|known| known == *line)).collect();
            assert!(
                left.is_empty() && lost.is_empty(),
                "{side} {when}:\nleft behind {left:#?}\nlost {lost:#?}"
            );
        }
    }
}

/// Starts both ends with settings that change the system, and sends traffic.
fn start_both_ends(testbed: &Testbed) -> (MpvpnProcess, MpvpnProcess) {
    let server = testbed.server(&[]);
    let client = testbed.client(&["--share", "10.77.0.0/24"]);
    reaches(testbed, Host::Client, TUNNEL);
    reaches(testbed, Host::Client, &inet4());
    (server, client)
}

fn check_changes_undone(stop: impl Fn(&mut MpvpnProcess)) {
    let testbed = Testbed::two_links();
    let before = Networks::of(&testbed);
    let (mut server, mut client) = start_both_ends(&testbed);
    let during = Networks::of(&testbed);
    assert_ne!((&before.0, &before.1), (&during.0, &during.1), "the comparison sees nothing");
    stop(&mut client);
    stop(&mut server);
    before.assert_same(&Networks::of(&testbed), "after the end");
}

#[test]
fn sigint_leaves_nothing_behind() {
    check_changes_undone(|process| assert!(process.interrupt().success(), "{}", process.log()));
}

#[test]
fn sigterm_leaves_nothing_behind() {
    check_changes_undone(|process| assert!(process.terminate().success(), "{}", process.log()));
}

#[test]
fn a_terminal_that_is_closed_leaves_nothing_behind() {
    let testbed = Testbed::two_links();
    let before = Networks::of(&testbed);
    let mut server = testbed.server(&[]);
    let socket = testbed.file("api", Host::Client);
    let command = format!(
        "exec {} client --server {SERVER} --insecure --path eth1 --path eth2 --api-socket {}",
        binary().display(),
        socket.display()
    );
    let terminal = ["-qefc", &command, "/dev/null"];
    let mut terminal = testbed.start_program(Host::Client, "script", &terminal, &socket).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    terminal.kill();
    assert!(server.interrupt().success(), "{}", server.log());
    eventually(Duration::from_secs(10), "the client's network as before", || {
        let now = testbed.network_state(Host::Client);
        if now == before.0 { Ok(()) } else { Err(now) }
    });
    before.assert_same(&Networks::of(&testbed), "after the terminal was closed");
}

#[test]
fn a_start_after_sigkill_cleans_up_and_works_and_leaves_nothing_behind() {
    let testbed = Testbed::two_links();
    let before = Networks::of(&testbed);
    let (mut server, mut client) = start_both_ends(&testbed);
    client.kill();
    server.kill();
    let (mut server, mut client) = start_both_ends(&testbed);
    let site = TestPages::start(&testbed, Host::Inet);
    let host = inet4();
    Download::start(&testbed, &site, &host, 5 * MB, Duration::from_secs(20), &[]).finish();
    assert!(client.interrupt().success() && server.interrupt().success());
    before.assert_same(&Networks::of(&testbed), "after SIGKILL, a second start and its end");
}

#[test]
fn a_client_that_never_connected_leaves_nothing_behind() {
    let testbed = Testbed::two_links();
    let before = Networks::of(&testbed);
    let mut client = testbed.start_client(&[]);
    std::thread::sleep(Duration::from_secs(2));
    assert!(client.interrupt().success(), "{}", client.log());
    before.assert_same(&Networks::of(&testbed), "after waiting in vain");
}

#[test]
fn a_second_client_with_the_same_name_is_refused_and_does_not_affect_the_first() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let mut second = testbed.start_client(&[]);
    assert_eq!(second.wait(Duration::from_secs(10)).code(), Some(1), "{}", second.log());
    assert!(second.log().contains("mpvpn0"), "{}", second.log());
    assert!(second.log().contains("another name with --tun-name"), "{}", second.log());
    reaches(&testbed, Host::Client, TUNNEL);
}
