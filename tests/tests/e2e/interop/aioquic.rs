//! aioquic: valid and hostile HTTP/3 clients and servers.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    interop_peer::{InteropPeer, Program},
    machine_share::{MachineShare, Share},
    ping::Ping,
    testbed::{Family, Host, TUNNEL, Testbed, inet},
};

use super::{echo, listen_behind_server};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(60);
const MAX_GROWTH_BYTES: u64 = 16 << 20;
const SERVER_ADDRESS: [&str; 2] = ["192.0.2.1", "4433"];

/// Runs aioquic's client with these arguments, and waits until it is done.
fn run_client(testbed: &Testbed, args: &[&str]) -> String {
    let output = InteropPeer::start(
        testbed,
        Host::Client,
        Program::Python("tcp.py"),
        &[&SERVER_ADDRESS, args].concat(),
    )
    .wait_for_success(TIMEOUT);
    assert!(output.ends_with("done\n"), "{output}");
    output
}

#[test]
fn bytes_travel_in_both_directions_and_each_direction_ends_separately() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    for family in [Family::V4, Family::V6] {
        let (authority, _) = listen_behind_server(&testbed, family, 1, echo);
        run_client(&testbed, &["both_ways", &authority]);
    }
    let (authority, heard) = listen_behind_server(&testbed, Family::V4, 1, |mut stream| {
        stream.write_all(b"greeting").expect("a greeting");
        stream.shutdown(Shutdown::Write).expect("an end");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("what comes after the end");
        text
    });
    run_client(&testbed, &["far_end_first", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), "late answer");
}

#[test]
fn resets_are_forwarded_in_both_directions() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    // Closing a socket with unread data sends a RST.
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 1, |stream| {
        stream.peek(&mut [0]).expect("bytes");
    });
    run_client(&testbed, &["far_end_breaks", &authority]);
    let (authority, heard) = listen_behind_server(&testbed, Family::V4, 1, |mut stream| {
        let mut data = [0; 6];
        stream.read_exact(&mut data).expect("bytes");
        stream.write_all(&data).expect("room for bytes");
        stream.read(&mut data).map_err(|error| error.kind())
    });
    run_client(&testbed, &["breaks", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), Err(ErrorKind::ConnectionReset));
}

#[test]
fn refusals_have_a_reason() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let closed = format!("{}:9", inet(Family::V4));
    let mut args = vec!["refusals", &closed, "502/connection_refused"];
    for private in ["127.0.0.1:80", "[::1]:80", "192.168.77.1:80", "169.254.169.254:80", "[fe80::1]:80"] {
        args.extend([private, "403/destination_ip_prohibited"]);
    }
    args.extend(["198.51.100.2:0", "400"]);
    run_client(&testbed, &args);
}

#[test]
fn a_connection_needs_a_token_where_tunnels_do() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 2, echo);
    run_client(&testbed, &["credentials", &authority, token.trim()]);
}

#[test]
fn sixty_four_mebibytes_are_echoed_unchanged() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::unlimited();
    let server = testbed.server(&[]);
    let memory = server.memory();
    let (authority, _) = listen_behind_server(&testbed, Family::V4, 1, echo);
    run_client(&testbed, &["much", &authority, "64"]);
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < 2 * MAX_GROWTH_BYTES, "grew by {grown} bytes");
}

#[test]
fn protocol_violations_of_a_client_get_the_right_error_and_affect_no_other_client() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let memory = server.memory();
    let pings = Ping::every(&testbed, Host::Client, Duration::from_millis(100), TUNNEL, 10);
    let output = InteropPeer::start(
        &testbed,
        Host::Inet,
        Program::Python("hostile_client.py"),
        &["198.51.100.1", "4433"],
    )
    .wait_for_success(TIMEOUT);
    println!("{output}");
    assert!(output.contains(" 0 wrong"), "{output}");
    let pings = pings.finish();
    assert!(pings.missing() <= 2, "{} of {} pings are missing", pings.missing(), pings.sent);
    let log = server.log();
    assert!(server.is_running() && !log.contains("panicked"), "{log}");
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < MAX_GROWTH_BYTES, "grew by {grown} bytes");
}

/// Behaviours of the hostile server, the HTTP/3 error code with which the client must close, and a part of
/// its log message.
const BEHAVIOURS: [(&str, u64, &str); 23] = [
    ("unknown_frames_and_noise", 0x100, "the server has not answered the request"),
    ("cut_capsule", 0x10e, "capsule of type 0x1 ends inside an entry"),
    ("prefix_of_33_bits", 0x10e, "prefix length 33"),
    ("routes_out_of_order", 0x10e, "must not follow"),
    ("endless_capsule", 0x107, "has 4611686018427387903 bytes"),
    ("malformed_once_it_is_up", 0x10e, "IP version 5"),
    ("ended_inside_a_capsule", 0x10e, "the stream ended inside a capsule"),
    ("reset", 0x100, "reset the tunnel (HTTP/3 error 0x102)"),
    ("rejected", 0x100, "reset the tunnel (HTTP/3 error 0x10b)"),
    ("goaway_for_no_request", 0x108, "GOAWAY for stream 1"),
    ("malformed_answer", 0x100, "malformed answer: field name"),
    ("answer_without_status", 0x100, "malformed answer: :status"),
    ("oversize_answer", 0x100, "malformed answer: field section is larger than 16384"),
    ("endless_answer", 0x100, "malformed answer: header section of 4611686018427387903 bytes"),
    ("endless_interim_answers", 0x100, "malformed answer: too many interim responses"),
    ("no_answer_but_data", 0x105, "DATA before HEADERS"),
    ("push", 0x108, "push"),
    ("stream_of_the_server", 0x103, "server opened a bidirectional stream"),
    ("settings_twice", 0x105, "second SETTINGS"),
    ("datagrams_before_the_answer", 0x33, "malformed datagram"),
    ("goaway", 0x100, "code 0x100: bye"),
    ("status_500", 0x100, "on fire"),
    ("status_503", 0x100, "the server is busy (status 503)"),
];
/// Minimum number of connections of the client for each behaviour.
const MIN_ATTEMPTS: usize = 2;

#[test]
fn clients_report_protocol_violations_of_servers_and_reconnect() {
    let testbed = Testbed::two_links();
    let args = ["192.0.2.1", "server.crt", "server.key"];
    let mut server = InteropPeer::start(&testbed, Host::Server, Program::Python("hostile_server.py"), &args);
    server.wait_for_line("up");
    let ports = server.log();
    let port_of = |behaviour: &str| {
        let found =
            ports.lines().filter_map(|line| line.split_once(' ')).find(|(_, name)| *name == behaviour);
        found.unwrap_or_else(|| panic!("no port for {behaviour} in {ports}")).0.to_owned()
    };
    let start = |behaviour: &str| {
        let port = port_of(behaviour);
        let (address, tun) = (format!("192.0.2.1:{port}"), format!("tun{port}"));
        testbed.start_client(&["--server", &address, "--routes", "none", "--tun-name", &tun])
    };
    for batch in BEHAVIOURS.chunks(12) {
        let clients: Vec<_> = batch.iter().map(|behaviour| (behaviour, start(behaviour.0))).collect();
        for ((behaviour, code, reason), mut client) in clients {
            let closed = format!("{behaviour} closed {code}");
            eventually(TIMEOUT, &format!("{behaviour} is given up with {code:#x} and tried again"), || {
                let (output, log) = (server.log(), client.log());
                let tries = output.lines().filter(|line| **line == closed).count();
                if tries >= MIN_ATTEMPTS && log.matches(reason).count() >= MIN_ATTEMPTS {
                    return Ok(());
                }
                Err(format!("{output}\n{log}"))
            });
            let log = client.log();
            assert!(client.is_running() && !log.contains("panicked"), "{behaviour}: {log}");
            assert!(client.memory() < 64 << 20, "{behaviour}: {} bytes", client.memory());
            assert!(client.interrupt().success(), "{behaviour}: {}", client.log());
        }
    }
    // Some servers send an address with the prefix length of its network.
    let mut lenient = start("host_bits");
    lenient.wait_until_up_within(TIMEOUT);
    assert!(lenient.interrupt().success(), "{}", lenient.log());
}
