//! Memory, descriptors and table entries of both ends, while links lose packets and come and go, and other
//! clients of the server reconnect all the time.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    crowd::{Crowd, CrowdPlan},
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, inet4},
};
use serde_json::Value;

/// 50 Mbit/s together without the losses: the last link loses a fifth of the packets in each direction.
const LINKS: [&str; 3] =
    ["17mbit,12ms,queue=60ms", "17mbit,12ms,queue=60ms", "20mbit,25ms,queue=60ms,loss=20%"];
/// The loss of the last link (0 to 1).
const LOSS: f64 = 0.2;
/// The clients that reconnect, whose links lose as much.
const CROWD: CrowdPlan =
    CrowdPlan { count: 50, at_once: 50, loss_percent: 20, stay: Some(Duration::from_secs(10)) };
/// The server's address for them, past the emulated links.
const CROWD_SERVER: &str = "198.51.100.1:4433";
/// How long a load lasts (s); the next one begins 2 s later.
const LOAD_SECONDS: u32 = 18;
/// When links are cut meanwhile, one in 10 s, and for how long (s).
const CUTS: [u64; 2] = [3, 13];
const CUT_SECONDS: u64 = 4;
/// How long connections that nothing uses may stay until both ends are at rest: those of clients whose
/// CONNECTION_CLOSE was lost until the server's idle timeout (180 s); TCP connections over links where UDP
/// works again, and that of a class, for a minute; and the longest interval of the server's tables (60 s).
const REST_LIMIT: Duration = Duration::from_secs(240);
/// How long the memory of both ends at rest is looked at: they give up the memory of packets and streams
/// after 2 s, and free pages within 15 s and a look in 5 s.
const LOOK: Duration = Duration::from_secs(30);
/// How often memory is looked at.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// The memory at the end may exceed that of the first rest by this, and by a hundredth.
const MAX_GROWTH_BYTES: u64 = 1 << 20;

/// The memory of both ends at a moment (bytes).
struct Sample {
    at: Duration,
    bytes: [u64; 4],
}

const FIGURES: [&str; 4] = ["client, heap", "client, RSS", "server, heap", "server, RSS"];

/// The entries of a process: the name of each table, and its entries.
type Entries = Vec<(&'static str, u64)>;

struct Soak<'a> {
    client: &'a MpvpnProcess,
    server: &'a MpvpnProcess,
    /// The entries of client and server at rest.
    at_rest: [Entries; 2],
    crowd: Crowd,
    began: Instant,
    samples: Vec<Sample>,
}

impl Soak<'_> {
    /// Looks at the memory until `until` after the start.
    fn watch(&mut self, until: Duration) {
        loop {
            let [client, server] =
                [self.client, self.server].map(|process| [heap_of(process), process.memory()]);
            let bytes = [client[0], client[1], server[0], server[1]];
            self.samples.push(Sample { at: self.began.elapsed(), bytes });
            let left = until.saturating_sub(self.began.elapsed());
            thread::sleep(left.min(SAMPLE_INTERVAL));
            if left <= SAMPLE_INTERVAL {
                return;
            }
        }
    }

    /// The least of each figure since a moment.
    fn least_since(&self, from: Duration) -> [u64; 4] {
        [0, 1, 2, 3].map(|figure| {
            let own = self.samples.iter().filter(|sample| sample.at >= from);
            own.map(|sample| sample.bytes[figure]).min().expect("a sample")
        })
    }

    /// The memory of both ends at rest: without traffic, and with the same connections, paths and streams
    /// each time. Under load it depends on how many packets wait, and on how many TCP connections stand in
    /// for UDP, each of which takes 1.8 MB.
    fn rest(&mut self) -> [u64; 4] {
        self.crowd.talk(false);
        let began = self.began.elapsed();
        wait_until_gone(self.client, &self.at_rest[0], "the client is at rest");
        wait_until_gone(self.server, &self.at_rest[1], "the server is at rest");
        let from = self.began.elapsed();
        self.watch(from + LOOK);
        self.crowd.talk(true);
        let least = self.least_since(from);
        println!("at rest {began:?} after the start: {FIGURES:?} {:?} KiB", least.map(|bytes| bytes >> 10));
        least
    }
}

fn status_of(process: &MpvpnProcess) -> Value {
    process.wait_for_status(Duration::from_secs(10), "a status", |_| Ok(()))
}

/// The heap memory that a process has in use (bytes).
fn heap_of(process: &MpvpnProcess) -> u64 {
    status_of(process)["memory"]["heap_bytes"].as_u64().expect("the program counts its heap with glibc")
}

/// The entries of a process in its tables, and its open files.
fn entries(process: &MpvpnProcess) -> Entries {
    let status = status_of(process);
    let length = |value: &Value| value.as_array().map_or(0, |all| all.len() as u64);
    let clients = status["clients"].as_array().map_or(&[][..], Vec::as_slice);
    let count = |value: &Value| value.as_u64().expect("a number");
    let files = fs::read_dir(format!("/proc/{}/fd", process.id())).expect("a running process");
    vec![
        ("sessions", length(&status["clients"])),
        ("paths of sessions", clients.iter().map(|client| length(&client["paths"])).sum()),
        ("paths", length(&status["paths"])),
        ("connections of users", status["budget"]["connections"].as_u64().unwrap_or_default()),
        ("streams", count(&status["flows"]["stream"])),
        ("UDP flows", count(&status["flows"]["udp"])),
        ("flows as packets", count(&status["flows"]["datagram"])),
        ("descriptors", files.count() as u64),
    ]
}

/// Waits until no table of a process has more entries than before.
fn wait_until_gone(process: &MpvpnProcess, before: &[(&str, u64)], what: &str) {
    let began = Instant::now();
    eventually(REST_LIMIT, what, || {
        thread::sleep(SAMPLE_INTERVAL);
        let now = entries(process);
        let more = now.iter().zip(before).filter(|((_, now), (_, before))| now > before);
        let more: Vec<_> = more.collect();
        if more.is_empty() { Ok(()) } else { Err(format!("(now, before): {more:?}")) }
    });
    println!("{what}: after {:?}, {} KiB of heap in use", began.elapsed(), heap_of(process) >> 10);
}

#[test]
#[ignore = "ten minutes or more: ./dev soak --minutes 10"]
fn neither_end_grows_over_lossy_links_that_come_and_go_with_clients_that_reconnect() {
    // Of load; rests come on top.
    let minutes = std::env::var("MPVPN_SOAK_MINUTES").map_or(10, |text| text.parse().expect("minutes"));
    assert!(minutes >= 4, "caches and logs of events fill in the first two minutes");
    let _share = MachineShare::take(Share::Percent(120));
    let testbed = Testbed::new(&LINKS);
    let server = testbed.server(&[]);
    let alone = entries(&server);
    let mut client = testbed.client(&[]);
    for link in testbed.link_devices() {
        client.wait_for_path(&link, "active", Duration::from_secs(15));
    }
    server.wait_for_status(Duration::from_secs(15), "a path over each link", |status| {
        let paths = &status["clients"][0]["paths"];
        if paths.as_array().is_some_and(|all| all.len() == LINKS.len()) {
            Ok(())
        } else {
            Err(paths.to_string())
        }
    });
    let before = [&client, &server].map(entries);
    let [streams, packets] = [(Host::Inet, 5201), (Host::Server, 5202)]
        .map(|(host, port)| IperfServer::start(&testbed, host, port));
    let crowd = Crowd::start(&testbed, Host::Inet, CROWD_SERVER.parse().expect("an address"), CROWD);
    crowd.wait_until_up_within(CROWD.count, Duration::from_secs(60));
    let at_rest = [before[0].clone(), entries(&server)];
    println!("at rest: client {:?}, server {:?}", at_rest[0], at_rest[1]);
    crowd.talk(true);

    let began = Instant::now();
    let mut soak = Soak { client: &client, server: &server, at_rest, crowd, began, samples: Vec::new() };
    let mut end = Duration::from_secs(60 * minutes);
    let first_rest = Duration::from_secs(60 * if minutes < 60 { 2 } else { 5 });
    let (mut cuts, mut carried, mut first) = (0, 0.0, None);
    while soak.began.elapsed() < end {
        if first.is_none() && soak.began.elapsed() >= first_rest {
            let began = soak.began.elapsed();
            first = Some(soak.rest());
            end += soak.began.elapsed() - began;
        }
        let start = soak.began.elapsed();
        let loads = [
            streams.tcp(&testbed, Host::Client, &inet4(), 2, Direction::Down, LOAD_SECONDS),
            packets.tcp_at(&testbed, Host::Client, TUNNEL, 1, 10.0, Direction::Up, LOAD_SECONDS),
        ];
        for from in CUTS {
            soak.watch(start + Duration::from_secs(from));
            let number = cuts % LINKS.len() + 1;
            let (link, has_carrier) = (testbed.link(number), cuts / LINKS.len() % 2 == 1);
            if has_carrier {
                link.silence(Direction::Both)
            } else {
                link.cut()
            }
            soak.watch(start + Duration::from_secs(from + CUT_SECONDS));
            if has_carrier {
                link.end_silence()
            } else {
                link.restore()
            }
            if number == LINKS.len() {
                link.handle().loss(Direction::Both, LOSS).expect("a link of the lab");
            }
            cuts += 1;
        }
        soak.watch(start + Duration::from_secs(u64::from(LOAD_SECONDS) + 2));
        let rates = loads.map(|load| load.finish().megabits());
        assert!(rates.iter().all(|rate| *rate > 1.0), "{rates:?} Mbit/s");
        carried += rates.iter().sum::<f64>() * f64::from(LOAD_SECONDS) / 8.0;
        let least = soak.least_since(start).map(|bytes| bytes >> 10);
        println!("under load after {start:?}: at least {least:?} KiB, {rates:?} Mbit/s");
    }
    let (first, last) = (first.expect("a rest in between"), soak.rest());
    let returned = soak.crowd.returned();
    println!("{cuts} cuts; {carried:.0} MB carried; other clients came {returned} times again");
    assert!(returned > CROWD.count as u64 * minutes, "each comes again more than once a minute");

    soak.crowd.leave();
    wait_until_gone(&server, &before[1], "the entries of clients that have left are gone");
    wait_until_gone(&client, &before[0], "the entries of the client's load are gone");
    assert!(client.terminate().success(), "{}", client.log());
    wait_until_gone(&server, &alone, "the entries of the last client are gone");
    for ((figure, first), last) in FIGURES.into_iter().zip(first).zip(last) {
        let limit = first + MAX_GROWTH_BYTES + first / 100;
        assert!(last <= limit, "{figure}: {first} bytes have become {last}, at most {limit} are allowed");
    }
}
