//! A network that only allows connections through an HTTP proxy.

use std::{fs, path::Path, time::Duration};

use mpvpn_tests::{
    dns::{ANSWER, NameServer},
    eventually,
    ping::reaches,
    proxy::HttpProxy,
    testbed::{Host, SERVER, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The client's own firewall.
const FIREWALL_RULES: &str = "add table inet wall; add chain inet wall out { type filter hook output priority 0; }; \
    add rule inet wall out udp dport 4433 counter reject; add rule inet wall out tcp dport 4433 counter reject";

/// A testbed where the client reaches only the proxy.
fn testbed_behind_proxy() -> (Testbed, HttpProxy) {
    let testbed = Testbed::two_links();
    let proxy = HttpProxy::start(&testbed);
    testbed.run(Host::Client, &["nft", FIREWALL_RULES]);
    (testbed, proxy)
}

#[test]
fn a_tunnel_goes_through_a_proxy_over_both_links() {
    let (testbed, proxy) = testbed_behind_proxy();
    let _server = testbed.server(&[]);
    let mut client = testbed.start_client(&["--via", &proxy.url("anna", "secret")]);
    let took = client.wait_until_up_within(TIMEOUT);
    println!("up after {took:?}");
    reaches(&testbed, Host::Client, TUNNEL);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    client.interrupt();

    let args = ["check", "--json", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2"];
    let via = proxy.url("anna", "secret");
    let output = testbed.mpvpn(Host::Client, &[&args[..], &["--via", &via]].concat());
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("{found:#}");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(found["via"], proxy.address());
    for link in found["links"].as_array().expect("a list") {
        let udp = link["udp"]["error"].as_str().expect("an error");
        assert!(udp.contains("its own firewall"), "{udp}");
        assert_ne!(link["use"], "nothing", "{link:#}");
        assert!(link["tcp"]["proxy_ms"].as_f64() > Some(0.0), "{link:#}");
    }
}

#[test]
fn the_name_of_a_proxy_is_resolved_past_a_kill_switch() {
    let (testbed, _proxy) = testbed_behind_proxy();
    let _server = testbed.server(&["--dns", "off"]);
    let names = NameServer::start(&testbed, Host::Server);
    // The address that the name server gives to every name leads to the proxy.
    let script = format!(
        "nft add table ip fw && nft add chain ip fw pre '{{ type nat hook prerouting priority dstnat; }}' && \
         nft add rule ip fw pre ip daddr {ANSWER} dnat to 192.0.2.1"
    );
    testbed.run(Host::Server, &["sh", "-c", &script]);
    let file = testbed.dir().join("resolv.conf");
    fs::write(&file, "nameserver 10.101.0.1\n").expect("a file in the testbed's directory");
    let socket = testbed.file("api", Host::Client);
    let args =
        ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2", "--kill-switch"];
    let via = "http://anna:secret@proxy.example:3128";
    let more = ["--via", via, "--api-socket", socket.to_str().expect("ASCII")];
    let args = [&args[..], &more].concat();
    let mut client =
        testbed.start_with_file(Host::Client, &file, Path::new("/etc/resolv.conf"), &args, &socket);
    client.wait_until_up_within(Duration::from_secs(30));
    reaches(&testbed, Host::Client, TUNNEL);
    assert!(!names.client_addresses().is_empty(), "{}", client.log());
    let rules = testbed.run(Host::Client, &["nft", "list", "table", "inet", "mpvpn_kill_switch"]);
    assert!(rules.contains(&format!("{ANSWER} . 3128")), "{rules}");
}

#[test]
fn refusals_of_the_proxy_are_reported() {
    let (testbed, proxy) = testbed_behind_proxy();
    let _server = testbed.server(&[]);
    let why = |via: &str, server: &str| {
        let args = ["check", "--json", "--server", server, "--insecure", "--path", "eth1", "--via", via];
        let output = testbed.mpvpn(Host::Client, &args);
        assert_eq!(output.status.code(), Some(1));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        found["links"][0]["tcp"]["error"].as_str().expect("an error").to_owned()
    };
    let error = why(&proxy.url("anna", "wrong"), SERVER);
    assert!(error.contains("does not accept this name and password"), "{error}");
    let error = why(&format!("http://{}", proxy.address()), SERVER);
    assert!(error.contains("requires credentials (407)"), "{error}");
    let error = why(&proxy.url("anna", "secret"), "192.0.2.1:4434");
    assert!(error.contains("forbids connections to 192.0.2.1:4434 (403)"), "{error}");

    let client = testbed.start_client(&["--via", &proxy.url("anna", "wrong")]);
    eventually(TIMEOUT, "the client says why", || {
        let log = client.log();
        if log.contains("does not accept this name and password") { Ok(()) } else { Err(log) }
    });
}
