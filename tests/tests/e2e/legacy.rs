//! The old spelling of the commands with `--mode` still works.

use mpvpn_tests::{
    ping::reaches,
    testbed::{Host, TUNNEL, Testbed},
};

fn args(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn the_old_spelling_with_mode_works() {
    let testbed = Testbed::two_links();
    let server = args(
        "--mode server --listen 0.0.0.0:4433 --cert server.crt --key server.key --subnet 10.0.0.0/24 --auth none",
    );
    let client = args("--mode client --server 192.0.2.1:4433 --insecure --path eth1 --path eth2");
    // The default names in /run/mpvpn, which both hosts of the testbed share.
    let at = |name: &str| testbed.default_sockets().join(name);
    let server = testbed.start_as_is(Host::Server, &server, &at("server-mpvpn0.sock")).wait_until_up();
    let client = testbed.start_as_is(Host::Client, &client, &at("client-mpvpn0.sock")).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    assert_eq!(server.status()["role"], "server");
    assert_eq!(client.status()["role"], "client");

    // With two processes and no socket path, `status` lists both.
    let output = testbed.mpvpn(Host::Client, &["status"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for name in ["server-mpvpn0.sock", "client-mpvpn0.sock"] {
        assert!(said.contains(name), "{name} is not named in: {said}");
    }
}

#[test]
fn other_names_and_levels_can_be_given() {
    let testbed = Testbed::two_links();
    let server = "--mode server --listen 0.0.0.0:4433 --cert server.crt --key server.key --subnet 10.0.0.0/24 \
                  --auth none --tun-name up0 --log-level debug";
    let client =
        "--mode client --server 192.0.2.1:4433 --insecure --path eth1 --tun-name down0 --log-level warn";
    let _server = testbed.start(Host::Server, &args(server)).wait_until_up();
    let _client = testbed.start(Host::Client, &args(client)).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    testbed.run(Host::Client, &["ip", "link", "show", "dev", "down0"]);
    testbed.run(Host::Server, &["ip", "link", "show", "dev", "up0"]);
}
