//! Stories of classes that change while a client runs, in simulated time.

#![allow(clippy::disallowed_methods, unreachable_pub)]

mod world;

use std::{collections::VecDeque, net::SocketAddr};

use bytes::BytesMut;
use mpvpn_class::{BULK, CRITICAL, Rule, Rules};
use mpvpn_packet::{VnetHdr, build};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Cc, Local};
use mpvpn_tunnel::{
    Assignment, ClassProfile, ClassSetup, ClientEvent, ClientState, Fleet, Limits, Server, SessionReport,
};
use mpvpn_types::{ClassId, Duration, Instant, LinkId};
use world::{MS, SERVER, TOKEN, World};

const SECOND: Duration = Duration::from_secs(1);
const DELAY: Duration = Duration::from_millis(10);
const CAMS: ClassId = ClassId(3);

/// A client with classes, a server, and a link that only takes time.
struct Stage {
    now: Instant,
    world: World,
    server: Server,
    fleet: Fleet,
    up: VecDeque<(Instant, LinkId, BytesMut)>,
    down: VecDeque<(Instant, LinkId, BytesMut)>,
    assignment: Option<Assignment>,
    downs: usize,
}

/// Where the packets of a class come from.
fn address_of(link: LinkId) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 1], 5000 + u16::from(link.class().0)))
}

/// What goes to this port is of the class.
fn rule(port: u16, class: ClassId) -> Rule {
    Rule { ports: vec![port..=port], class, ..Rule::default() }
}

fn setup(world: &World, id: ClassId, name: &str, scheduler: Scheduler) -> ClassSetup {
    let config = world.client_config(TOKEN, scheduler, Cc::Bbr);
    let class = Some(ClassProfile { name: name.to_owned(), ..ClassProfile::default() });
    ClassSetup { id, first: id == CRITICAL, config: mpvpn_tunnel::ClientConfig { class, ..config } }
}

impl Stage {
    /// All three classes are up; nothing but what goes to port 1 belongs to `critical`.
    fn new() -> Self {
        let mut stage = Self::with(World::new());
        assert_eq!(stage.classes(), ["default", "critical", "bulk"], "all are there");
        stage
    }

    /// The same, as far as the server lets them.
    fn with(mut world: World) -> Self {
        let (server, now) = (world.servers.remove(0), world.now);
        let class = |id, name| setup(&world, id, name, Scheduler::Auto);
        let all = vec![class(ClassId::DEFAULT, "default"), class(CRITICAL, "critical"), class(BULK, "bulk")];
        let fleet = Fleet::new(now, all, Rules::new(vec![rule(1, CRITICAL)]), 0, false);
        let mut stage = Self {
            now,
            world,
            server,
            fleet,
            up: VecDeque::new(),
            down: VecDeque::new(),
            assignment: None,
            downs: 0,
        };
        for id in [ClassId::DEFAULT, CRITICAL, BULK] {
            stage.plug(id);
        }
        stage.run(2 * SECOND);
        stage
    }

    fn plug(&mut self, id: ClassId) {
        self.fleet.link_up(self.now, LinkId(0).with_class(id), SERVER.parse().unwrap());
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.exchange();
            let queued = self.up.front().into_iter().chain(self.down.front()).map(|(at, ..)| *at);
            let timers = self.fleet.poll_timeout(self.now).into_iter().chain(self.server.poll_timeout());
            let next = queued.chain(timers).min().unwrap_or(end).max(self.now + Duration::from_micros(20));
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    fn exchange(&mut self) {
        let now = self.now;
        let server: SocketAddr = SERVER.parse().unwrap();
        while let Some((_, link, data)) = self.up.pop_front_if(|(at, ..)| *at <= now) {
            self.server.handle_datagram(now, Some(server.ip()), address_of(link), 0, data);
        }
        while let Some((_, link, data)) = self.down.pop_front_if(|(at, ..)| *at <= now) {
            self.fleet.handle_datagram(now, link, server, 0, data);
        }
        self.fleet.handle_batches(now);
        self.server.handle_batch(now);
        self.fleet.handle_timeout(now);
        self.server.handle_timeout(now);
        while self.server.poll_event().is_some() {}
        while let Some(joined) = self.server.poll_tun() {
            self.server.recycle(joined);
        }
        while let Some(event) = self.fleet.poll_event(now) {
            match event {
                ClientEvent::Up(assignment) => self.assignment = Some(assignment),
                ClientEvent::Down(_) => self.downs += 1,
                _ => {}
            }
        }
        let mut buf = Vec::new();
        while let Some(transmit) = self.fleet.poll_transmit(now, &mut buf) {
            let link = transmit.local.and_then(Local::as_link).expect("a client sends on links");
            for datagram in buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                self.up.push_back((now + DELAY, link, BytesMut::from(datagram)));
            }
            buf.clear();
        }
        while let Some(transmit) = self.server.poll_transmit(now, &mut buf) {
            let link = LinkId(0).with_class(ClassId((transmit.remote.port() - 5000) as u8));
            for datagram in buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                self.down.push_back((now + DELAY, link, BytesMut::from(datagram)));
            }
            buf.clear();
        }
    }

    /// Sends a packet of one flow to a port, and tells which class has carried it.
    fn carried_by(&mut self, port: u16) -> ClassId {
        let sent = |stage: &mut Self| {
            let reports = stage.fleet.reports(stage.now);
            reports.into_iter().map(|(id, report)| (id, report.counters.tx_bytes)).collect::<Vec<_>>()
        };
        let before = sent(self);
        let own = self.assignment.as_ref().expect("addresses").addresses[0].addr();
        let to = SocketAddr::from(([203, 0, 113, 9], port));
        let mut packet = build::Packet::between(SocketAddr::new(own, 4000), to).udp(&[7; 100]);
        self.fleet.handle_tun(self.now, None, VnetHdr::NONE, &mut packet);
        let after = sent(self);
        self.run(100 * MS);
        after.iter().zip(before).find(|(after, before)| **after != *before).expect("some class").0.0
    }

    fn sessions(&mut self) -> Vec<SessionReport> {
        let mut sessions = self.server.report(self.now);
        sessions.sort_by_key(|session| session.member);
        sessions
    }

    /// The classes of which the server has connections.
    fn classes(&mut self) -> Vec<String> {
        self.sessions().into_iter().map(|session| session.class).collect()
    }

    /// Since when they are there.
    fn since(&mut self) -> Vec<Instant> {
        self.sessions().into_iter().map(|session| session.since).collect()
    }

    fn all_up(&mut self) -> bool {
        self.fleet.reports(self.now).iter().all(|(_, report)| report.state == ClientState::Up)
    }
}

#[test]
fn other_rules_count_for_the_next_packet_and_no_connection_notices() {
    let mut stage = Stage::new();
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    let before = stage.since();
    stage.fleet.set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (ClassId::DEFAULT, BULK), "flows that were known");
    stage.run(SECOND);
    assert_eq!((stage.since(), stage.downs), (before, 0));
}

#[test]
fn a_class_that_is_to_travel_in_another_way_is_made_anew_alone() {
    let mut stage = Stage::new();
    let before = stage.since();
    let class = setup(&stage.world, BULK, "bulk", Scheduler::Redundant);
    stage.fleet.set_class(stage.now, class);
    stage.run(SECOND);
    let after = stage.since();
    assert_eq!((after[0], after[1]), (before[0], before[1]), "the others notice nothing");
    assert!(after.len() == 3 && after[2] > before[2], "{before:?} {after:?}");
    assert!(stage.all_up() && stage.downs == 0);
    stage.fleet.set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!(stage.carried_by(9), BULK);
}

#[test]
fn the_default_class_is_made_anew_with_its_addresses_and_the_others_stay() {
    let mut stage = Stage::new();
    let (before, addresses) = (stage.since(), stage.assignment.take().unwrap().addresses);
    let class = setup(&stage.world, ClassId::DEFAULT, "default", Scheduler::MinRtt);
    stage.fleet.set_class(stage.now, class);
    stage.run(SECOND);
    let after = stage.since();
    assert_eq!(after[1..], before[1..]);
    assert!(after[0] > before[0] && stage.all_up());
    assert_eq!(
        (stage.downs, stage.assignment.as_ref().map(|got| got.addresses.clone())),
        (1, Some(addresses))
    );
}

#[test]
fn classes_come_and_go_while_others_stay() {
    let mut stage = Stage::new();
    let before = stage.since();
    let class = setup(&stage.world, CAMS, "cams", Scheduler::Auto);
    stage.fleet.set_class(stage.now, class);
    stage.fleet.set_rules(Rules::new(vec![rule(9, CAMS)]));
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT, "it has no link yet");
    stage.plug(CAMS);
    stage.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk", "cams"]);
    assert_eq!(stage.carried_by(9), CAMS);
    stage.fleet.remove_class(stage.now, CAMS);
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT);
    stage.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"], "the server was told");
    assert_eq!((stage.since(), stage.downs, stage.fleet.len()), (before, 0, 3));
    stage.fleet.remove_class(stage.now, ClassId::DEFAULT);
    assert_eq!(stage.fleet.len(), 3, "the default class stays");
}

#[test]
fn a_class_too_many_is_carried_by_the_default_one_and_says_why() {
    let mut stage = Stage::with(World::with_limits(Limits { classes: 2, ..Limits::default() }));
    assert_eq!(stage.classes(), ["default", "critical"]);
    let reports = stage.fleet.reports(stage.now);
    let reasons: Vec<_> = reports.iter().map(|(_, report)| report.reason.as_str()).collect();
    assert_eq!(reasons[..2], ["", ""]);
    assert!(reasons[2].contains("allowed are 2"), "{reasons:?}");
    stage.fleet.set_rules(Rules::new(vec![rule(1, CRITICAL), rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    stage.fleet.remove_class(stage.now, CRITICAL);
    stage.run(90 * SECOND);
    assert_eq!(stage.classes(), ["default", "bulk"], "there is room now");
    assert!(stage.all_up() && stage.downs == 0);
}
