//! aioquic: HTTP/3 of another hand, well behaved and not.

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

use super::{echo, far_end};

const LIMIT: Duration = Duration::from_secs(60);
const MEMORY: u64 = 16 << 20;
const HOST: [&str; 2] = ["192.0.2.1", "4433"];

/// Says what aioquic's client is to do with a connection, and waits until it has.
fn tcp(testbed: &Testbed, args: &[&str]) -> String {
    let said = InteropPeer::start(testbed, Host::Client, Program::Python("tcp.py"), &[&HOST, args].concat())
        .wait_for_success(LIMIT);
    assert!(said.ends_with("done\n"), "{said}");
    said
}

#[test]
fn bytes_travel_both_ways_and_each_direction_ends_by_itself() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    for family in [Family::V4, Family::V6] {
        let (authority, _) = far_end(&testbed, family, 1, echo);
        tcp(&testbed, &["both_ways", &authority]);
    }
    let (authority, heard) = far_end(&testbed, Family::V4, 1, |mut stream| {
        stream.write_all(b"greeting").expect("a greeting");
        stream.shutdown(Shutdown::Write).expect("an end");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("what comes after the end");
        text
    });
    tcp(&testbed, &["far_end_first", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), "late answer");
}

#[test]
fn a_reset_travels_both_ways() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    // What is not read when it is closed makes a RST of it.
    let (authority, _) = far_end(&testbed, Family::V4, 1, |stream| {
        stream.peek(&mut [0]).expect("bytes");
    });
    tcp(&testbed, &["far_end_breaks", &authority]);
    let (authority, heard) = far_end(&testbed, Family::V4, 1, |mut stream| {
        let mut data = [0; 6];
        stream.read_exact(&mut data).expect("bytes");
        stream.write_all(&data).expect("room for bytes");
        stream.read(&mut data).map_err(|error| error.kind())
    });
    tcp(&testbed, &["breaks", &authority]);
    assert_eq!(heard.join().expect("a host that does not panic"), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_refusal_says_why() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let closed = format!("{}:9", inet(Family::V4));
    let mut args = vec!["refusals", &closed, "502/connection_refused"];
    for private in ["127.0.0.1:80", "[::1]:80", "192.168.77.1:80", "169.254.169.254:80", "[fe80::1]:80"] {
        args.extend([private, "403/destination_ip_prohibited"]);
    }
    args.extend(["198.51.100.2:0", "400"]);
    tcp(&testbed, &args);
}

#[test]
fn a_connection_needs_a_token_where_tunnels_do() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    let (authority, _) = far_end(&testbed, Family::V4, 2, echo);
    tcp(&testbed, &["credentials", &authority, token.trim()]);
}

#[test]
fn sixty_four_mebibytes_come_back_right() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::unlimited();
    let server = testbed.server(&[]);
    let memory = server.memory();
    let (authority, _) = far_end(&testbed, Family::V4, 1, echo);
    tcp(&testbed, &["much", &authority, "64"]);
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < 2 * MEMORY, "grew by {grown} bytes");
}

#[test]
fn a_client_that_breaks_the_rules_is_told_which_one_and_disturbs_nobody() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let memory = server.memory();
    let pings = Ping::every(&testbed, Host::Client, Duration::from_millis(100), TUNNEL, 10);
    let said = InteropPeer::start(&testbed, Host::Client, Program::Python("hostile_client.py"), &HOST)
        .wait_for_success(LIMIT);
    println!("{said}");
    assert!(said.contains(" 0 wrong"), "{said}");
    let pings = pings.finish();
    assert!(pings.missing() <= 2, "{} of {} pings are missing", pings.missing(), pings.sent);
    let log = server.log();
    assert!(server.is_running() && !log.contains("panicked"), "{log}");
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < MEMORY, "grew by {grown} bytes");
}

/// Ways of the hostile server, the HTTP/3 code with which the client must close, and what it must say.
const WAYS: [(&str, u64, &str); 23] = [
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
/// How often at least each of these is tried.
const TRIES: usize = 2;

#[test]
fn servers_that_break_the_rules_are_survived_with_a_reason_and_tried_again() {
    let testbed = Testbed::two_links();
    let args = ["192.0.2.1", "server.crt", "server.key"];
    let mut server = InteropPeer::start(&testbed, Host::Server, Program::Python("hostile_server.py"), &args);
    server.wait_for_line("up");
    let ports = server.log();
    let port_of = |way: &str| {
        let found = ports.lines().filter_map(|line| line.split_once(' ')).find(|(_, name)| *name == way);
        found.unwrap_or_else(|| panic!("no port for {way} in {ports}")).0.to_owned()
    };
    let start = |way: &str| {
        let port = port_of(way);
        let (address, tun) = (format!("192.0.2.1:{port}"), format!("tun{port}"));
        testbed.start_client(&["--server", &address, "--routes", "none", "--tun-name", &tun])
    };
    for some in WAYS.chunks(12) {
        let clients: Vec<_> = some.iter().map(|way| (way, start(way.0))).collect();
        for ((way, code, reason), mut client) in clients {
            let closed = format!("{way} closed {code}");
            eventually(LIMIT, &format!("{way} is given up with {code:#x} and tried again"), || {
                let (said, log) = (server.log(), client.log());
                let tries = said.lines().filter(|line| **line == closed).count();
                if tries >= TRIES && log.matches(reason).count() >= TRIES {
                    return Ok(());
                }
                Err(format!("{said}\n{log}"))
            });
            let log = client.log();
            assert!(client.is_running() && !log.contains("panicked"), "{way}: {log}");
            assert!(client.memory() < 64 << 20, "{way}: {} bytes", client.memory());
            assert!(client.interrupt().success(), "{way}: {}", client.log());
        }
    }
    // What some servers send for an address and the length of its network.
    let mut lenient = start("host_bits");
    lenient.wait_until_up_within(LIMIT);
    assert!(lenient.interrupt().success(), "{}", lenient.log());
}
