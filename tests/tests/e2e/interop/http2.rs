//! MASQUE over HTTP/2 and HTTP/1.1: curl through a proxy, and h2 (Python) with capsules.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    http::{Download, MB, TestPages},
    interop_peer::{InteropPeer, Program},
    machine_share::{MachineShare, Share},
    testbed::{Family, Host, MpvpnProcess, TUNNEL, Testbed, inet, inet4},
};

use super::{echo, echo_udp_behind_server, listen_behind_server};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(60);
const SERVER_ADDRESS: [&str; 2] = ["192.0.2.1", "4433"];
const PROXY: &str = "https://192.0.2.1:4433";
const MAX_GROWTH_BYTES: u64 = 32 << 20;

/// Runs the h2 client with these arguments, and waits until it is done.
fn client(testbed: &Testbed, token: &str, args: &[&str]) -> String {
    let output = start(testbed, token, args).wait_for_success(TIMEOUT);
    assert!(output.ends_with("done\n"), "{output}");
    output
}

fn start(testbed: &Testbed, token: &str, args: &[&str]) -> InteropPeer {
    let args = [&SERVER_ADDRESS[..], &[token], args].concat();
    InteropPeer::start(testbed, Host::Client, Program::Python("http2.py"), &args)
}

/// Starts a server with token authentication; returns the token.
fn server(testbed: &Testbed) -> (MpvpnProcess, String) {
    server_with(testbed, &[])
}

fn server_with(testbed: &Testbed, more: &[&str]) -> (MpvpnProcess, String) {
    let server = testbed.server(&[&["--auth", "token", "--state-dir", "state"], more].concat());
    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    (server, token.trim().to_owned())
}

#[test]
fn curl_fetches_through_the_server_as_through_any_https_proxy() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let (_server, token) = server(&testbed);
    let site = TestPages::start(&testbed, Host::Inet);
    let (name, bearer) = (format!("default:{token}"), format!("Proxy-Authorization: Bearer {token}"));
    let knows_http2 = testbed.run(Host::Client, &["curl", "--help", "all"]).contains("--proxy-http2");
    let proxy = ["-x", PROXY, "--proxy-insecure", "--proxytunnel"];
    for credentials in [["-U", &name], ["--proxy-header", &bearer]] {
        for family in [Family::V4, Family::V6] {
            let args = [&proxy[..], &credentials].concat();
            Download::start(&testbed, &site, &inet(family), 5 * MB, TIMEOUT, &args).finish();
            if knows_http2 {
                let args = [&args[..], &["--proxy-http2"]].concat();
                Download::start(&testbed, &site, &inet(family), 5 * MB, TIMEOUT, &args).finish();
            }
        }
    }
    if !knows_http2 {
        println!("this curl does not speak HTTP/2 to proxies: only HTTP/1.1 was tried with it");
    }
}

#[test]
fn bytes_travel_in_both_directions_and_each_direction_ends_separately() {
    let testbed = Testbed::two_links();
    let (_server, token) = server(&testbed);
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 1, echo);
    client(&testbed, &token, &["both_ways", &authority]);
    let (authority, heard) = listen_behind_server(&testbed, Family::V4, 1, |mut stream| {
        stream.write_all(b"greeting").expect("a greeting");
        stream.shutdown(Shutdown::Write).expect("an end");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("what comes after the end");
        text
    });
    client(&testbed, &token, &["far_end_first", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), "late answer");
}

#[test]
fn resets_are_forwarded_in_both_directions() {
    let testbed = Testbed::two_links();
    let (_server, token) = server(&testbed);
    // Closing a socket with unread data sends a RST.
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 1, |stream| {
        stream.peek(&mut [0]).expect("bytes");
    });
    client(&testbed, &token, &["far_end_breaks", &authority]);
    let (authority, heard) = listen_behind_server(&testbed, Family::V4, 1, |mut stream| {
        let mut data = [0; 6];
        stream.read_exact(&mut data).expect("bytes");
        stream.write_all(&data).expect("room for bytes");
        stream.read(&mut data).map_err(|error| error.kind())
    });
    client(&testbed, &token, &["breaks", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), Err(ErrorKind::ConnectionReset));
}

#[test]
fn refusals_have_a_reason() {
    let testbed = Testbed::two_links();
    let (_server, token) = server(&testbed);
    let closed = format!("{}:9", inet4());
    let mut args = vec!["refusals", &closed, "502/connection_refused"];
    for private in ["127.0.0.1:80", "[::1]:80", "192.168.77.1:80", "169.254.169.254:80"] {
        args.extend([private, "403/destination_ip_prohibited"]);
    }
    args.extend(["198.51.100.2:0", "400"]);
    client(&testbed, &token, &args);
}

#[test]
fn large_transfers_are_echoed_unchanged_with_little_memory() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::unlimited();
    let (server, token) = server(&testbed);
    let memory = server.memory();
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 2, echo);
    client(&testbed, &token, &["much", &authority, "32"]);
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < MAX_GROWTH_BYTES, "grew by {grown} bytes");
}

#[test]
fn udp_payloads_travel_in_capsules_and_invalid_capsules_end_only_their_request() {
    let testbed = Testbed::two_links();
    let (mut server, token) = server(&testbed);
    let [v4, v6] =
        [Family::V4, Family::V6].map(|family| echo_udp_behind_server(&testbed, family).to_string());
    client(&testbed, &token, &["payloads", &v4, &v6]);
    let memory = server.memory();
    println!("{}", client(&testbed, &token, &["hostile", &v4]));
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < MAX_GROWTH_BYTES, "grew by {grown} bytes");
    client(&testbed, &token, &["upgrades", &v4, TUNNEL]);
    assert!(server.is_running() && !server.log().contains("panicked"), "{}", server.log());
}

#[test]
fn packets_travel_in_capsules_and_the_status_has_the_clients_address() {
    let testbed = Testbed::two_links();
    let (server, token) = server(&testbed);
    let mut client = start(&testbed, &token, &["packets", TUNNEL, &inet4()]);
    client.wait_for_line("answered");
    let status = server.status();
    let clients = status["clients"].as_array().expect("a list");
    let remote = clients.first().and_then(|client| client["paths"][0]["remote"].as_str());
    let remote: SocketAddr =
        remote.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{status:#}"));
    assert!(!remote.ip().is_loopback(), "the client is at {remote}");
    client.wait_for_success(TIMEOUT);
    eventually(Duration::from_secs(10), "the session ends", || match server.status()["clients"].as_array() {
        Some(left) if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

#[test]
fn clients_of_early_drafts_are_served_with_old_clients() {
    let testbed = Testbed::two_links();
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 1, echo);
    let udp = echo_udp_behind_server(&testbed, Family::V4).to_string();
    for (more, story) in [(&["--old-clients"][..], "old"), (&[], "not_old")] {
        let (_server, token) = server_with(&testbed, more);
        client(&testbed, &token, &[story, &authority, &udp]);
    }
}
