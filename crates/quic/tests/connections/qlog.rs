//! The qlog records of a connection over two paths; recording changes nothing.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use mpvpn_quic::{
    ConnectionHandle, Endpoint, Handled, LocalAddress, PathStatus, QlogEvent, QlogSink, TransportOptions,
};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use crate::tls;

const MS: Duration = Duration::from_millis(1);
const SERVER: &str = "192.0.2.1:443";
/// The client's addresses, and how long packets take over the links behind them.
const LINKS: [(&str, Duration); 2] =
    [("198.51.100.1:5000", Duration::from_millis(10)), ("203.0.113.1:5000", Duration::from_millis(25))];
/// One in so many packets that the client sends over the second link is lost.
const LOST: usize = 40;
/// The bytes that a link carries in a millisecond: 20 Mbit/s. A packet that would wait for longer than this
/// is lost.
const RATE: u32 = 2500;
const QUEUE: Duration = Duration::from_millis(40);

/// Events in memory, with the connections that they are of.
#[derive(Debug, Default)]
struct Memory(Mutex<Vec<(u64, QlogEvent)>>);

impl QlogSink for Memory {
    fn record(&self, _: Instant, connection: u64, event: QlogEvent) {
        self.0.lock().unwrap().push((connection, event));
    }
}

/// A UDP datagram under way: when it arrives, at which end, over which link.
type Flying = (Instant, usize, usize, BytesMut);

/// A client and a server, joined by two links.
struct World {
    start: Instant,
    now: Instant,
    ends: [Endpoint; 2],
    ids: [Option<ConnectionHandle>; 2],
    flying: VecDeque<Flying>,
    /// Until when each link is busy, by the end that sends.
    busy: [[Instant; 2]; 2],
    /// Each datagram: when it left (µs), from which end, over which link, its size.
    sent: Vec<(u128, usize, usize, usize)>,
    second: Option<PathId>,
}

impl World {
    fn new(sinks: [Option<Arc<dyn QlogSink>>; 2]) -> Self {
        let options = |seed: u8| TransportOptions {
            qlog: sinks[usize::from(seed)].clone(),
            rng_seed: Some([seed; 32]),
            ..TransportOptions::default()
        };
        let (server, setup) = tls::pair(&options(1), &options(0));
        let mut client = Endpoint::client(&setup);
        let start = Instant::now();
        let id =
            client.connect(start, &setup, LocalAddress::link(LinkId(0)), SERVER.parse().unwrap(), "mpvpn");
        Self {
            start,
            now: start,
            ends: [client, server],
            ids: [Some(id.unwrap()), None],
            flying: VecDeque::new(),
            busy: [[start; 2]; 2],
            sent: Vec::new(),
            second: None,
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += MS;
            self.deliver();
            for end in 0..2 {
                if let Some(id) = self.ids[end] {
                    self.work(end, id);
                }
            }
        }
    }

    fn deliver(&mut self) {
        let due = self.flying.iter().filter(|(at, ..)| *at <= self.now).count();
        self.flying.make_contiguous().sort_by_key(|(at, ..)| *at);
        for (_, end, link, data) in self.flying.drain(..due).collect::<Vec<_>>() {
            let server: SocketAddr = SERVER.parse().unwrap();
            let (local, remote) = match end {
                0 => (LocalAddress::link(LinkId(link as u16)), server),
                _ => (LocalAddress::from(server.ip()), LINKS[link].0.parse().unwrap()),
            };
            if let Handled::New(id) = self.ends[end].handle(self.now, Some(local), remote, 0, data) {
                self.ids[end] = Some(id);
            }
        }
    }

    fn work(&mut self, end: usize, id: ConnectionHandle) {
        let now = self.now;
        let Some(connection) = self.ends[end].get(id) else { return };
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        while connection.poll_event(now).is_some() {}
        if end == 0 && self.second.is_none() {
            // Refused until the handshake is complete and the server has given connection IDs for it.
            let (local, remote) = (LocalAddress::link(LinkId(1)), SERVER.parse().unwrap());
            self.second = connection.open_path(now, local, remote, PathStatus::Available).ok();
        }
        connection.drain_paths_with_arrivals(now, |_| {});
        connection.receive_datagrams(|_, _| {});
        let mut buf = Vec::new();
        loop {
            if end == 0 && connection.is_between_passes() {
                let max = connection.max_datagram_size().unwrap_or(0).min(1200);
                for path in connection.paths().collect::<Vec<_>>() {
                    let mut room = connection.available_window(now, path).min(100_000);
                    while max > 0 && room > 0 {
                        room =
                            room.saturating_sub(connection.queue_datagram(path, Bytes::from(vec![0; max])));
                    }
                    connection.set_backlogged(path, true);
                }
            }
            buf.clear();
            let Some(transmit) = connection.poll_transmit(now, &mut buf) else { break };
            let link = match transmit.local.and_then(LocalAddress::as_link) {
                Some(link) => usize::from(link.0),
                None => {
                    LINKS.iter().position(|(address, _)| transmit.remote == address.parse().unwrap()).unwrap()
                }
            };
            for data in buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                self.sent.push(((now - self.start).as_micros(), end, link, data.len()));
                let busy = &mut self.busy[end][link];
                let leaves = now.max(*busy) + MS * data.len() as u32 / RATE;
                let is_lost = (end, link) == (0, 1) && self.sent.len().is_multiple_of(LOST);
                if leaves < now + QUEUE && !is_lost {
                    *busy = leaves;
                    self.flying.push_back((leaves + LINKS[link].1, 1 - end, link, BytesMut::from(data)));
                }
            }
        }
        if !self.ends[end].process_endpoint_events(id) {
            self.ids[end] = None;
        }
    }
}

/// The records of a path.
#[derive(Debug, Default)]
struct Recorded {
    sent: usize,
    acked: usize,
    lost: usize,
    windows: Vec<u64>,
    rates: Vec<u64>,
}

fn recorded(memory: &Memory) -> BTreeMap<PathId, Recorded> {
    let mut paths: BTreeMap<PathId, Recorded> = BTreeMap::new();
    for (_, event) in memory.0.lock().unwrap().iter() {
        match event {
            QlogEvent::PacketSent { path, .. } => paths.entry(*path).or_default().sent += 1,
            QlogEvent::PacketsAcked { path, numbers } => {
                paths.entry(*path).or_default().acked += numbers.len();
            }
            QlogEvent::PacketLost { path, .. } => paths.entry(*path).or_default().lost += 1,
            QlogEvent::Metrics(metrics) => {
                let path = paths.entry(metrics.path).or_default();
                path.windows.push(metrics.congestion_window);
                path.rates.extend(metrics.pacing_rate);
            }
            QlogEvent::PathAssigned { .. } | QlogEvent::Closed { .. } => {}
        }
    }
    paths
}

#[test]
fn each_path_is_recorded_with_the_windows_of_the_controller_inside_its_gate() {
    let memories = [0, 1].map(|_| Arc::new(Memory::default()));
    let mut world = World::new(memories.clone().map(|memory| Some(memory as Arc<dyn QlogSink>)));
    world.run(1500 * MS);
    let second = world.second.expect("a second path");
    let connection = world.ends[0].get(world.ids[0].unwrap()).unwrap();
    let (paths, now) = (recorded(&memories[0]), world.now);
    for path in [PathId(0), second] {
        let recorded = &paths[&path];
        assert!(recorded.sent > 500 && recorded.acked > 500, "{path:?}: {recorded:?}");
        assert!(recorded.acked + recorded.lost <= recorded.sent, "{path:?}: {recorded:?}");
        // The gate shows the library 2^62 bytes, or none at all.
        let (windows, rates) = (&recorded.windows, &recorded.rates);
        assert!(windows.iter().all(|window| (4_000..100_000_000).contains(window)), "{windows:?}");
        assert!(rates.iter().all(|rate| (10_000..1_000_000_000).contains(rate)), "{rates:?}");
        assert_eq!(
            windows.last(),
            connection.path_stats(now, path).map(|view| view.congestion_window).as_ref()
        );
    }
    assert_ne!(paths[&PathId(0)].windows.last(), paths[&second].windows.last());
    assert!(paths[&second].lost > 10, "{:?}", paths[&second]);
    connection.close(now, 0, "done");

    let events = memories.map(|memory| memory.0.lock().unwrap().clone());
    let id = events[0][0].0;
    assert!(events.iter().flatten().all(|(connection, _)| *connection == id), "one identifier at both ends");
    let is_assigned = |(_, event): &(u64, QlogEvent)| {
        let QlogEvent::PathAssigned { path, .. } = event else { return false };
        *path == second
    };
    assert!(events.iter().all(|events| events.iter().any(is_assigned)));
    let last = events[0].last().map(|(_, event)| event.clone());
    assert_eq!(last, Some(QlogEvent::Closed { local: true, reason: "done".into() }));
}

#[test]
fn a_connection_that_is_recorded_sends_the_same_datagrams_at_the_same_times() {
    let run = |sink: Option<Arc<dyn QlogSink>>| {
        let mut world = World::new([sink.clone(), sink]);
        world.run(600 * MS);
        world.sent
    };
    let (recorded, other) = (run(Some(Arc::new(Memory::default()))), run(None));
    assert!(recorded.len() > 1000, "{}", recorded.len());
    let differs = recorded.iter().zip(&other).position(|(one, other)| one != other);
    assert_eq!((differs, recorded.len()), (None, other.len()));
}
