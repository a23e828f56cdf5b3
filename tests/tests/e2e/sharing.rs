//! A LAN behind the client uses the tunnel.

use std::time::Duration;

use mpvpn_tests::{
    ping::{ping, reaches},
    testbed::{Host, Testbed, inet4},
};

#[test]
fn a_lan_behind_the_client_reaches_the_network_behind_the_server() {
    let testbed = Testbed::with_lan(&["100mbit,5ms", "100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let host = inet4();

    let without = testbed.client(&[]);
    assert!(ping(&testbed, Host::Lan, &host, 3).answers.is_empty(), "the LAN got out without --share");
    drop(without);

    for share in ["lan0", "192.168.77.0/24"] {
        let mut client = testbed.client(&["--share", share]);
        reaches(&testbed, Host::Lan, &host);
        // Through the tunnel: beside it, the host behind the server has no route to the LAN's addresses.
        let status = client.status();
        let mut paths = status["paths"].as_array().expect("paths is a list").iter();
        assert!(paths.any(|path| path["tx_packets"].as_u64() > Some(0)), "{status:#}");
        assert!(client.interrupt().success());
        std::thread::sleep(Duration::from_millis(100));
        assert!(
            ping(&testbed, Host::Lan, &host, 3).answers.is_empty(),
            "--share {share} outlived the client"
        );
    }
}

#[test]
fn a_missing_lan_interface_is_named() {
    let testbed = Testbed::new(&["100mbit"]);
    let _server = testbed.server(&[]);
    let mut client = testbed.start_client(&["--share", "lan9"]);
    assert!(!client.wait(Duration::from_secs(10)).success());
    assert!(client.log().contains("lan9"), "{}", client.log());
}
