//! Connections that came in over a link, as those of SSH, stay on that link whatever the client does, and
//! also if they are older than the client.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    tcpdump::Tcpdump,
    testbed::{Family, Host, Testbed, inet},
};

const SOON: Duration = Duration::from_secs(15);
/// The port of the machine's own service.
pub(crate) const PORT: u16 = 2222;
/// A port of the machine that is forwarded to a host in the LAN behind it.
const FORWARDED: u16 = 8080;
/// How long an answer may take on a busy machine. A lost packet is sent again meanwhile.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Answers each byte by the same byte, until the test ends.
pub(crate) fn serve(testbed: &Testbed, host: Host) {
    let listener = testbed.in_namespace(host, || TcpListener::bind(("::", PORT)).expect("a free port"));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            thread::spawn(move || {
                let mut byte = [0];
                while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
            });
        }
    });
}

/// A connection from the internet to the machine.
struct Session {
    stream: TcpStream,
    sent: u8,
}

impl Session {
    fn open(testbed: &Testbed, to: &str) -> Self {
        let to: SocketAddr = to.parse().expect("an address");
        let stream = testbed.in_namespace(Host::Inet, || TcpStream::connect_timeout(&to, ANSWER_TIMEOUT));
        let stream = stream.unwrap_or_else(|error| panic!("{to}: {error}"));
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).expect("a socket can wait for a while");
        stream.set_nodelay(true).expect("a TCP socket");
        Self { stream, sent: 0 }
    }

    #[track_caller]
    fn assert_answers(&mut self, state: &str) {
        for _ in 0..5 {
            self.sent = self.sent.wrapping_add(1);
            self.stream.write_all(&[self.sent]).unwrap_or_else(|error| panic!("{state}: {error}"));
            let mut answer = [0];
            self.stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("{state}: {error}"));
            assert_eq!(answer, [self.sent], "{state}");
        }
    }
}

/// tcpdump of what the machine sends from its service, at all its interfaces.
struct Capture(RefCell<Tcpdump>);

impl Capture {
    fn start(testbed: &Testbed) -> Self {
        let filter = format!("tcp and (src port {PORT} or src port {FORWARDED})");
        Self(RefCell::new(Tcpdump::start(testbed, Host::Client, &filter)))
    }

    /// The packets that have left since the last call: interface and source address.
    fn sent(&self) -> BTreeSet<(String, String)> {
        let lines = self.0.borrow_mut().new_lines();
        // As in `1700000000.000000 eth2  Out IP 10.102.0.2.2222 > 198.51.100.2.40000: Flags [P.]`.
        let parts = lines.iter().filter(|line| line.contains(" Out ")).filter_map(|line| {
            let interface = line.split_whitespace().nth(1)?;
            let from = line.split_once(" > ")?.0.split_whitespace().last()?;
            Some((interface.to_owned(), from.rsplit_once('.')?.0.to_owned()))
        });
        parts.collect()
    }

    /// Everything has left by [`LINK`], with these addresses.
    #[track_caller]
    fn assert_sent_by_link(&self, addresses: &[&str], state: &str) {
        let expected = addresses.iter().map(|address| (LINK.to_owned(), (*address).to_owned()));
        assert_eq!(self.sent(), expected.collect(), "{state}");
    }
}

/// A host on the internet reaches the addresses of the machine's links, by the server's machine.
pub(crate) fn let_inet_reach_links(testbed: &Testbed) {
    testbed.run(Host::Server, &["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]);
    for (network, router) in [("10.0.0.0/8", "198.51.100.1"), ("fd00::/16", "2001:db8:1::1")] {
        testbed.run(Host::Inet, &["ip", "route", "add", network, "via", router]);
    }
}

/// The links' addresses that sessions use: the link that is not the first, by IPv4 and IPv6.
const LINK: &str = "eth2";
pub(crate) const ADDRESS: &str = "10.102.0.2";
const ADDRESS6: &str = "fd00:102::2";

fn check_sessions_survive(more: &[&str]) {
    let testbed = Testbed::two_links();
    let_inet_reach_links(&testbed);
    serve(&testbed, Host::Client);
    let [v4, v6] = [format!("{ADDRESS}:{PORT}"), format!("[{ADDRESS6}]:{PORT}")];
    let mut older = [&v4, &v6].map(|to| Session::open(&testbed, to));
    older.iter_mut().for_each(|session| session.assert_answers("before the client"));
    let before = testbed.network_state(Host::Client);

    let capture = Capture::start(&testbed);
    let mut sessions: Vec<Session> = older.into();
    let mut check = |state: &str| {
        let new = [&v4, &v6].map(|to| Session::open(&testbed, to));
        sessions.extend(new);
        sessions.iter_mut().for_each(|session| session.assert_answers(state));
        capture.assert_sent_by_link(&[ADDRESS, ADDRESS6], state);
    };
    let mut client = testbed.start_client(more);
    eventually(SOON, "it connects", || match client.log().contains("connecting to") {
        true => Ok(()),
        false => Err(client.log()),
    });
    capture.sent();
    check("connecting, without a server");
    let mut server = testbed.server(&[]);
    client.wait_until_up_within(Duration::from_secs(30));
    check("up");
    testbed.link(1).cut();
    check("the other link is cut");
    testbed.link(1).restore();
    server.kill();
    drop(server);
    check("the server is gone");
    let _server = testbed.server(&[]);
    // Until the client finds its server dead, it is up with the connection to that one. A path over a link is
    // made only while the link has a carrier, so each must be there before one is cut.
    client.wait_for_status(Duration::from_secs(60), "it resumes its session", |status| {
        let resumed = &status["session"]["resumed"];
        if resumed == 1 { Ok(()) } else { Err(format!("resumed {resumed} times")) }
    });
    client.wait_for_path(LINK, "active", SOON);
    check("up again");
    testbed.link(2).cut();
    client.wait_for_path(LINK, "down", SOON);
    testbed.link(2).restore();
    client.wait_for_path(LINK, "active", Duration::from_secs(30));
    check("the link was cut for a while");
    assert!(client.terminate().success(), "{}", client.log());
    sessions.iter_mut().for_each(|session| session.assert_answers("after SIGTERM"));
    assert_eq!(testbed.network_state(Host::Client), before, "after SIGTERM");
}

#[test]
fn sessions_from_outside_survive_all_states_of_a_client() {
    check_sessions_survive(&[]);
}

#[test]
fn sessions_from_outside_survive_the_kill_switch() {
    check_sessions_survive(&["--kill-switch"]);
}

#[test]
fn a_session_in_which_only_the_machine_speaks_is_found_when_the_client_starts() {
    let testbed = Testbed::two_links();
    let_inet_reach_links(&testbed);
    let listener =
        testbed.in_namespace(Host::Client, || TcpListener::bind(("0.0.0.0", PORT)).expect("a free port"));
    let mut session = Session::open(&testbed, &format!("{ADDRESS}:{PORT}"));
    let (mut speaker, _) = listener.accept().expect("it has connected");
    // A connection of the machine itself, as old as the session, is none that came in.
    let own = testbed.in_namespace(Host::Inet, || TcpListener::bind(("0.0.0.0", PORT)).expect("a free port"));
    let to: SocketAddr = format!("{}:{PORT}", inet(Family::V4)).parse().expect("an address");
    let mut outgoing = testbed.in_namespace(Host::Client, || TcpStream::connect(to).expect("it listens"));
    let (_accepted, _) = own.accept().expect("it has connected");
    let local = outgoing.local_addr().expect("it has an address").ip().to_string();

    let _server = testbed.server(&[]);
    let _client = testbed.client(&["--kill-switch"]);
    let capture = Capture::start(&testbed);
    for byte in 1..=5 {
        speaker.write_all(&[byte]).expect("the connection stands");
        let mut heard = [0];
        session.stream.read_exact(&mut heard).expect("the machine's words arrive");
        assert_eq!(heard, [byte]);
    }
    capture.assert_sent_by_link(&[ADDRESS], "only the machine speaks");
    let mut tcpdump = Tcpdump::start(&testbed, Host::Client, "tcp and dst port 2222");
    // It may be refused at once; what matters is where it goes.
    let _ = outgoing.write_all(b"in clear");
    thread::sleep(Duration::from_millis(700));
    let lines = tcpdump.new_lines();
    let leaked =
        lines.iter().find(|line| line.contains(" eth") && line.contains(" Out ") && line.contains(&local));
    assert_eq!(leaked, None, "{lines:#?}");
}

#[test]
fn a_port_forwarded_to_the_lan_keeps_its_link() {
    let testbed = Testbed::with_lan(&["100mbit,5ms", "100mbit,5ms"]);
    let_inet_reach_links(&testbed);
    serve(&testbed, Host::Lan);
    testbed.run(Host::Client, &["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
    let script = format!(
        "nft add table ip fw && nft add chain ip fw pre '{{ type nat hook prerouting priority dstnat; }}' && \
         nft add rule ip fw pre iifname {LINK} tcp dport {FORWARDED} dnat to 192.168.77.2:{PORT}"
    );
    testbed.run(Host::Client, &["sh", "-c", &script]);
    let to = format!("{ADDRESS}:{FORWARDED}");
    let mut older = Session::open(&testbed, &to);
    older.assert_answers("before the client");
    let _server = testbed.server(&[]);
    let capture = Capture::start(&testbed);
    for more in [&[][..], &["--kill-switch"]] {
        let mut client = testbed.client(more);
        capture.sent();
        older.assert_answers(&format!("older than the client, {more:?}"));
        Session::open(&testbed, &to).assert_answers(&format!("newer than the client, {more:?}"));
        capture.assert_sent_by_link(&[ADDRESS], &format!("{more:?}"));
        assert!(client.terminate().success(), "{}", client.log());
    }
}
