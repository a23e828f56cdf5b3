//! Bytes that a client puts on its links while nothing answers: the figures of docs/performance.md.

use std::{
    fs,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    firewall::Firewall,
    ping::Ping,
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How long an idle client may take to notice that nothing answers: a pause between heartbeats, and the time
/// until one counts as lost.
const NOTICED: Duration = Duration::from_secs(30);
/// When the figures of the beginning end.
const FIRST: Duration = Duration::from_secs(60);
/// When the later figures end: three of the longest pauses on a metered link.
const LAST: Duration = Duration::from_secs(510);
/// Bars for each link after a minute (kbit/s): an unmetered and a metered one.
const BARS: [f64; 2] = [1.0, 0.2];
/// The same for a link that works beside one that does not, without the packets of apps.
const BESIDE: f64 = 1.0;
/// The cost of a packet of ping a second and of its answer on the only link (kbit/s), with Ethernet headers:
/// two datagrams and two acknowledgements.
const KBIT_PER_PACKET: f64 = 4.0;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    ServerKilled,
    NeverThere,
    LinksSilent,
    UdpBlocked,
    FirstLinkSilent,
    SecondLinkSilent,
    CaptivePortal,
}

/// Ended when dropped.
struct Portal(Child);

impl Drop for Portal {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes of both links, in both directions.
fn bytes(testbed: &Testbed) -> [u64; 2] {
    ["eth1", "eth2"].map(|link| {
        let (rx, tx) = testbed.interface_bytes(Host::Client, link);
        rx + tx
    })
}

/// The rates of both links (kbit/s) in the first minute of the trouble, and later.
fn rates(trouble: Trouble, packets: u32) -> [[f64; 2]; 2] {
    let testbed = Testbed::two_slow_links();
    fs::write(testbed.dir().join("client.toml"), "[[link]]\nname = \"*2\"\nmetered = true\n")
        .expect("a file");
    let args = ["--config", "client.toml", "--state-dir", "state", "--ca", "server.crt"];
    let is_there = !matches!(trouble, Trouble::NeverThere | Trouble::CaptivePortal);
    let mut server = is_there.then(|| testbed.server(&[]));
    let silence =
        |links: &[usize]| links.iter().for_each(|link| testbed.link(*link).silence(Direction::Both));
    let block_udp = || Firewall { no_udp: &[1, 2], ..Firewall::OPEN }.apply(&testbed);
    let _portal = (trouble == Trouble::CaptivePortal).then(|| {
        block_udp();
        testbed.make_certificate("portal");
        let mut command = testbed.command(Host::Server, "openssl");
        command.args(["s_server", "-accept", "4433", "-cert", "portal.crt", "-key", "portal.key", "-quiet"]);
        Portal(command.spawn().expect("openssl runs"))
    });
    let client = if is_there { testbed.client(&args) } else { testbed.start_client(&args) };
    if is_there {
        ["eth1", "eth2"].iter().for_each(|link| drop(client.wait_for_path(link, "active", TIMEOUT)));
    }
    let seconds = LAST.as_secs() as u32 + 10;
    let _ping = (packets > 0)
        .then(|| Ping::every(&testbed, Host::Client, Duration::from_secs(1) / packets, TUNNEL, seconds));
    thread::sleep(Duration::from_secs(2));
    match trouble {
        Trouble::ServerKilled => server.as_mut().map_or((), MpvpnProcess::kill),
        Trouble::LinksSilent => silence(&[1, 2]),
        Trouble::FirstLinkSilent => silence(&[1]),
        Trouble::SecondLinkSilent => silence(&[2]),
        Trouble::UdpBlocked => block_udp(),
        Trouble::NeverThere | Trouble::CaptivePortal => {}
    }
    if matches!(trouble, Trouble::ServerKilled | Trouble::LinksSilent) {
        // An idle client asks every 25 s: its minute begins when it notices.
        client.wait_for_status(NOTICED, "no answer", |status| match &status["state"] {
            state if state == "no-answer" => Ok(()),
            state => Err(state.to_string()),
        });
    }
    let begun = Instant::now();
    let start = bytes(&testbed);
    thread::sleep(FIRST);
    let (first, minute) = (begun.elapsed(), bytes(&testbed));
    thread::sleep(LAST.saturating_sub(begun.elapsed()));
    let (last, end) = (begun.elapsed() - first, bytes(&testbed));
    let rate = |from: u64, to: u64, time: Duration| (to - from) as f64 * 8e-3 / time.as_secs_f64();
    let pair = |from: [u64; 2], to: [u64; 2], time| [0, 1].map(|link| rate(from[link], to[link], time));
    [pair(start, minute, first), pair(minute, end, last)]
}

/// Checks the rates of the links that nobody answers, and that the other one carries no more than its packets
/// need: two datagrams and two acknowledgements for each packet and its answer.
fn check(trouble: Trouble, loads: &[u32]) {
    // As many at a time as have a share of the machine.
    let run = |packets| {
        thread::spawn(move || {
            let [minute, later] = rates(trouble, packets);
            let hour = later.map(|rate| rate * 450.0);
            println!("{trouble:?}, {packets}: {minute:.1?}, {later:.2?}, {hour:.0?}");
            later
        })
    };
    println!(
        "trouble, packets/s: kbit/s in the first minute, later, kB an hour; of two links, the second metered"
    );
    let running: Vec<_> = loads.iter().copied().map(run).collect();
    let mut failures = Vec::new();
    for (packets, rates) in loads.iter().copied().zip(running) {
        let later = rates.join().expect("figures");
        let beside = BESIDE + f64::from(packets) * KBIT_PER_PACKET;
        let bars = match trouble {
            // Data and its heartbeats move on links that work.
            Trouble::UdpBlocked => [f64::INFINITY; 2],
            Trouble::FirstLinkSilent => [BARS[0], beside],
            Trouble::SecondLinkSilent => [beside, BARS[1]],
            _ => BARS,
        };
        if later.iter().zip(bars).any(|(rate, bar)| *rate > bar) {
            failures.push((packets, later, bars));
        }
    }
    assert!(failures.is_empty(), "{trouble:?}: packets/s, kbit/s, bars: {failures:?}");
}

/// Makes a test for each kind of trouble.
macro_rules! each_is_a_test {
    ($($name:ident: $trouble:ident, $loads:expr;)*) => {
        $(
            #[test]
            #[ignore = "ten minutes: ./dev test e2e -- --ignored unanswered"]
            fn $name() {
                check(Trouble::$trouble, $loads);
            }
        )*
    };
}

each_is_a_test! {
    the_server_is_killed: ServerKilled, &[0, 1, 100];
    the_server_was_never_there: NeverThere, &[0];
    both_links_are_silent: LinksSilent, &[0, 1, 100];
    the_first_link_is_silent: FirstLinkSilent, &[0, 1, 100];
    the_second_link_is_silent: SecondLinkSilent, &[0, 1, 100];
    udp_is_blocked: UdpBlocked, &[0];
    a_portal_answers: CaptivePortal, &[0];
}
