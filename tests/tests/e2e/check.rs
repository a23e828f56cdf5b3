//! `mpvpn check` over links with different restrictions.

use std::process::Output;

use mpvpn_tests::testbed::{Host, LINK, SERVER, Testbed};
use serde_json::Value;

fn check(testbed: &Testbed, more: &[&str]) -> (Output, Value) {
    let args = [&["check", "--json", "--server", SERVER, "--insecure"], more].concat();
    let output = testbed.mpvpn(Host::Client, &args);
    let said = String::from_utf8_lossy(&output.stderr);
    let json = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    println!("{json:#}");
    (output, json)
}

/// The client's firewall: `eth2` drops answers, `eth3` translates ports.
const FIREWALL_RULES: &str = "add table inet wall; \
    add chain inet wall out { type filter hook output priority 0; }; \
    add chain inet wall into { type filter hook input priority 0; }; \
    add rule inet wall into iifname eth2 udp sport 4433 drop; \
    add chain inet wall nat { type nat hook postrouting priority 100; }; \
    add rule inet wall nat oifname eth3 udp dport 4433 masquerade to :20000-20999";

fn link_of<'a>(check: &'a Value, link: &str) -> &'a Value {
    let links = check["links"].as_array().expect("a list");
    links.iter().find(|entry| entry["name"] == link).unwrap_or_else(|| panic!("{link}: {check:#}"))
}

#[test]
fn the_restrictions_of_each_link_are_reported() {
    let testbed = Testbed::new(&[LINK, LINK, LINK]);
    let _server = testbed.server(&[]);
    let before = testbed.network_state(Host::Client);
    let multipath = std::fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok();
    testbed.run(Host::Client, &["nft", FIREWALL_RULES]);
    let strips = testbed.output_of(
        Host::Client,
        std::time::Duration::from_secs(10),
        &["nft", "add", "rule", "inet", "wall", "out", "oifname", "eth3", "reset", "tcp", "option", "mptcp"],
    );
    let strips = strips.status.success();
    if !strips {
        println!("not tried: this nft cannot take options out of TCP");
    }
    let (output, found) = check(&testbed, &["--path", "eth1", "--path", "eth2", "--path", "eth3"]);
    assert_eq!(output.status.code(), Some(0));
    testbed.run(Host::Client, &["nft", "delete", "table", "inet", "wall"]);
    assert_eq!(testbed.network_state(Host::Client), before, "nothing is left");

    let open = link_of(&found, "eth1");
    assert_eq!((&open["use"], &open["credentials"]), (&"udp".into(), &"accepted".into()));
    let ms = open["udp"]["ms"].as_f64().expect("a time");
    assert!((25.0..1000.0).contains(&ms), "{ms} ms over 2 × 12.5 ms");
    assert_eq!((&open["udp"]["nat"], &open["udp"]["mtu"]), (&"none".into(), &1500.into()));
    let connect = open["tcp"]["connect_ms"].as_f64().expect("a time");
    assert!((25.0..1000.0).contains(&connect), "{connect} ms");
    assert!(open["addresses"][0].as_str().is_some_and(|address| address.starts_with("10.101.")), "{open:#}");

    let blocked = link_of(&found, "eth2");
    assert_eq!(blocked["udp"]["error"], "no answer in 5 s");
    assert_eq!(blocked["use"], if multipath { "mptcp" } else { "tcp" });
    assert_eq!(blocked["why"], "UDP fails: no answer in 5 s");
    assert_eq!(blocked["credentials"], "accepted", "TCP tells, too");

    let translated = link_of(&found, "eth3");
    assert_eq!(translated["udp"]["nat"], "changes-ports");
    if multipath {
        assert_eq!(open["tcp"]["mptcp"], "works");
        assert_eq!(translated["tcp"]["mptcp"], if strips { "fell-back" } else { "works" });
    }
}

#[test]
fn a_wrong_token_and_a_missing_server_are_reported() {
    let testbed = Testbed::new(&[LINK]);
    let (output, found) = check(&testbed, &["--path", "eth1"]);
    assert_eq!(output.status.code(), Some(1));
    let link = link_of(&found, "eth1");
    assert_eq!(link["use"], "nothing");
    let refused = link["tcp"]["error"].as_str().expect("an error");
    assert!(refused.contains("nobody listens there"), "{refused}");

    let _server = testbed.server(&["--auth", "token"]);
    let (output, found) = check(&testbed, &["--path", "eth1", "--token", "wrong"]);
    assert_eq!(output.status.code(), Some(1));
    let link = link_of(&found, "eth1");
    assert_eq!((&link["use"], &link["credentials"]), (&"nothing".into(), &"refused".into()));
    let args = ["check", "--server", SERVER, "--insecure", "--path", "eth1", "--token", "wrong"];
    let said = testbed.mpvpn(Host::Client, &args);
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(text.contains("eth1: nothing, because the server refuses the token"), "{text}");
    assert!(text.contains("next: give the token"), "{text}");
    assert!(String::from_utf8_lossy(&said.stderr).contains("eth1: "), "progress");
}

/// The exit code of `mpvpn check`, and the text for people; `args` name server, trust and links.
fn said(testbed: &Testbed, args: &[&str]) -> (Option<i32>, String) {
    let output = testbed.mpvpn(Host::Client, &[&["check"], args].concat());
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    println!("{args:?}:\n{}", text.concat());
    (output.status.code(), text.concat())
}

#[test]
fn a_wrong_pin_is_called_so_in_short_and_not_a_firewall() {
    let testbed = Testbed::new(&[LINK, LINK]);
    let _server = testbed.server(&[]);
    let wrong = "ab".repeat(32);
    let (code, text) =
        said(&testbed, &["--server", SERVER, "--pin", &wrong, "--path", "eth1", "--path", "eth2"]);
    assert_eq!(code, Some(1), "{text}");
    let pin = "because the server's certificate is not the pinned one: its SHA-256 begins with ";
    for link in ["eth1", "eth2"] {
        assert!(text.contains(&format!("{link}: nothing, {pin}")), "{text}");
    }
    assert!(text.contains("the pinned one with abababababababab\n"), "{text}");
    assert!(text.contains("next: ask the server's owner for its current fingerprint"), "{text}");
    assert_eq!(text.matches("next:").count(), 1, "{text}");
    assert!(!text.contains("firewall") && !text.contains(&wrong), "{text}");
}

#[test]
fn a_missing_interface_a_closed_port_an_unknown_name_and_a_kill_switch_have_their_own_next_steps() {
    let testbed = Testbed::new(&[LINK]);
    let _server = testbed.server(&[]);
    let check =
        |server: &str, link: &str| said(&testbed, &["--server", server, "--insecure", "--path", link]);
    for (server, link, why, next) in [
        (SERVER, "eth9", "eth9: nothing, because no such interface\n", "next: name with --path an interface"),
        ("192.0.2.1:4434", "eth1", "nobody listens there", "next: check the port in --server"),
        ("no-such-host.invalid", "eth1", "cannot be resolved", "next: check the name in --server"),
    ] {
        let (code, text) = check(server, link);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(why) && text.contains(next) && text.matches("next:").count() == 1, "{text}");
    }
    // The server of the client is excepted for programs of root.
    let mut client = testbed.client(&["--kill-switch"]);
    client.kill();
    let (code, text) = check("192.0.2.77:4433", "eth1");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("this machine sends nothing to the server"), "{text}");
    assert!(text.contains("next: `mpvpn status` shows whether a kill switch of mpvpn blocks"), "{text}");
}
