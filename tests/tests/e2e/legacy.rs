//! The commands as they have always been spelled, word for word, with nothing added.

use mpvpn_tests::{
    ping::reaches,
    stage::{Place, Stage, TUNNEL},
};

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn the_spelling_with_mode_works_word_for_word() {
    let stage = Stage::two_links();
    let server = words(
        "--mode server --listen 0.0.0.0:4433 --cert server.crt --key server.key --subnet 10.0.0.0/24 --auth none",
    );
    let client = words("--mode client --server 192.0.2.1:4433 --insecure --path eth1 --path eth2");
    // The default names, in /run/mpvpn, which both hosts of the stage share.
    let at = |name: &str| stage.default_sockets().join(name);
    let server = stage.start_as_is(Place::Server, &server, &at("server-mpvpn0.sock")).up();
    let client = stage.start_as_is(Place::Client, &client, &at("client-mpvpn0.sock")).up();
    reaches(&stage, Place::Client, TUNNEL);
    assert_eq!(server.status()["role"], "server");
    assert_eq!(client.status()["role"], "client");

    // With two of them and none named, status says which there are.
    let output = stage.mpvpn(Place::Client, &["status"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for name in ["server-mpvpn0.sock", "client-mpvpn0.sock"] {
        assert!(said.contains(name), "{name} is not named in: {said}");
    }
}

#[test]
fn other_names_and_levels_can_be_given() {
    let stage = Stage::two_links();
    let server = "--mode server --listen 0.0.0.0:4433 --cert server.crt --key server.key --subnet 10.0.0.0/24 \
                  --auth none --tun-name up0 --log-level debug";
    let client =
        "--mode client --server 192.0.2.1:4433 --insecure --path eth1 --tun-name down0 --log-level warn";
    let _server = stage.start(Place::Server, &words(server)).up();
    let _client = stage.start(Place::Client, &words(client)).up();
    reaches(&stage, Place::Client, TUNNEL);
    stage.run(Place::Client, &["ip", "link", "show", "dev", "down0"]);
    stage.run(Place::Server, &["ip", "link", "show", "dev", "up0"]);
}
