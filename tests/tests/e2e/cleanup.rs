//! What mpvpn changes in a system, it undoes.

use mpvpn_tests::{
    http::{Download, MB, Site},
    ping::reaches,
    stage::{Peer, Place, Stage, TUNNEL, inet4},
};

/// Both hosts' networks as text.
struct Networks(String, String);

impl Networks {
    fn of(stage: &Stage) -> Self {
        Self(stage.network_state(Place::Client), stage.network_state(Place::Server))
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

/// Both ends run with all that changes a system, and traffic has passed.
fn at_work(stage: &Stage) -> (Peer, Peer) {
    let server = stage.server(&[]);
    let client = stage.client(&["--share", "10.77.0.0/24"]);
    reaches(stage, Place::Client, TUNNEL);
    reaches(stage, Place::Client, &inet4());
    (server, client)
}

fn stopping_restores(stop: impl Fn(&mut Peer)) {
    let stage = Stage::two_links();
    let before = Networks::of(&stage);
    let (mut server, mut client) = at_work(&stage);
    let during = Networks::of(&stage);
    assert_ne!((&before.0, &before.1), (&during.0, &during.1), "the comparison sees nothing");
    stop(&mut client);
    stop(&mut server);
    before.assert_same(&Networks::of(&stage), "after the end");
}

#[test]
fn sigint_leaves_nothing_behind() {
    stopping_restores(|peer| assert!(peer.interrupt().success(), "{}", peer.log()));
}

#[test]
fn sigterm_leaves_nothing_behind() {
    stopping_restores(|peer| assert!(peer.terminate().success(), "{}", peer.log()));
}

#[test]
fn a_start_after_sigkill_cleans_up_works_and_leaves_nothing_behind() {
    let stage = Stage::two_links();
    let before = Networks::of(&stage);
    let (mut server, mut client) = at_work(&stage);
    client.kill();
    server.kill();
    let (mut server, mut client) = at_work(&stage);
    let site = Site::start(&stage, Place::Inet);
    let host = inet4();
    Download::start(&stage, &site, &host, 5 * MB, std::time::Duration::from_secs(20), &[]).finish();
    assert!(client.interrupt().success() && server.interrupt().success());
    before.assert_same(&Networks::of(&stage), "after SIGKILL, a second start and its end");
}

#[test]
fn a_client_that_never_got_through_leaves_nothing_behind() {
    let stage = Stage::two_links();
    let before = Networks::of(&stage);
    let mut client = stage.start_client(&[]);
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(client.interrupt().success(), "{}", client.log());
    before.assert_same(&Networks::of(&stage), "after waiting in vain");
}

#[test]
fn a_second_client_with_the_same_name_is_refused_and_harms_nothing() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let _client = stage.client(&[]);
    let mut second = stage.start_client(&[]);
    assert_eq!(second.wait(std::time::Duration::from_secs(10)).code(), Some(1), "{}", second.log());
    assert!(second.log().contains("mpvpn0"), "{}", second.log());
    reaches(&stage, Place::Client, TUNNEL);
}
