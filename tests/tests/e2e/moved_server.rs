//! The server's address changes, and its name resolves to the new one: the client reconnects by itself.

use std::{fs, path::Path, time::Duration};

use mpvpn_lab::SERVER_V4;
use mpvpn_tests::{
    ping::{Ping, reaches},
    testbed::{Family, Host, TUNNEL, Testbed, paths_of},
};

/// The new address of the server.
const NEW_ADDRESS: &str = "192.0.2.77";
/// Time for the client to look up the name again: it does so after 2, 4, 8 and 16 s without the server.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn a_client_follows_its_servers_name() {
    let testbed = Testbed::two_links();
    let hosts = testbed.dir().join("hosts");
    let write_hosts = |address: &str| {
        let text = format!("127.0.0.1 localhost\n{address} vpn.example\n");
        fs::write(&hosts, text).expect("a file in the stage's directory");
    };
    write_hosts(&SERVER_V4.to_string());
    let server = testbed.server(&[]);
    let socket = testbed.dir().join("named.sock");
    let args = ["client", "--server", "vpn.example:4433", "--insecure", "--path", "eth1", "--path", "eth2"];
    let more = ["--api-socket", "named.sock"];
    let (path, args) = (Path::new("/etc/hosts"), [&args[..], &more].concat());
    let client = testbed.start_with_file(Host::Client, &hosts, path, &args, &socket).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    let before = client.address(Family::V4);

    // Without traffic, silence would not be noticed.
    let _pings = Ping::dense(&testbed, Host::Client, TUNNEL, 40);
    testbed.run(Host::Server, &["ip", "address", "add", &format!("{NEW_ADDRESS}/32"), "dev", "lo"]);
    testbed.run(Host::Server, &["ip", "address", "del", &format!("{SERVER_V4}/32"), "dev", "lo"]);
    client.wait_for_status(Duration::from_secs(10), "the old address is found dead", |status| {
        let paths = paths_of(status, "default");
        let dead = paths.iter().all(|path| path["state"] != "active");
        if dead { Ok(()) } else { Err("a path is active".to_owned()) }
    });
    write_hosts(NEW_ADDRESS);
    client.wait_for_status(LOOKUP_TIMEOUT, "both links lead to the new address", |status| {
        let paths = paths_of(status, "default");
        let there = |path: &&&serde_json::Value| {
            path["remote"] == format!("{NEW_ADDRESS}:4433") && path["state"] == "active"
        };
        if paths.iter().filter(there).count() == 2 { Ok(()) } else { Err("not yet".to_owned()) }
    });
    reaches(&testbed, Host::Client, TUNNEL);
    assert_eq!(client.address(Family::V4), before, "the session goes on");
    assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
}
