//! Stories of classes that change while a client runs, in simulated time.

#![allow(clippy::disallowed_methods, unreachable_pub)]

mod world;

use std::net::SocketAddr;

use mpvpn_class::{BULK, CRITICAL, Rule, Rules};
use mpvpn_packet::build;
use mpvpn_path::Scheduler;
use mpvpn_quic::Cc;
use mpvpn_tunnel::{ClassProfile, ClassSetup, ClientConfig, ClientState, Fleet, Limits, SessionReport};
use mpvpn_types::{ClassId, Duration, Instant, LinkId};
use world::{MS, SERVER, TOKEN, World};

const SECOND: Duration = Duration::from_secs(1);
const CAMS: ClassId = ClassId(3);

/// A client with classes over one link.
struct Stage {
    world: World,
    client: usize,
}

/// What goes to this port is of the class.
fn rule(port: u16, class: ClassId) -> Rule {
    Rule { ports: vec![port..=port], class, ..Rule::default() }
}

fn profile(name: &str) -> ClassProfile {
    ClassProfile { name: name.to_owned(), ..ClassProfile::default() }
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
        world.classes = ["default", "critical", "bulk"].map(profile).to_vec();
        world.classes[1].share.first = true;
        world.class_rules = Rules::new(vec![rule(1, CRITICAL)]);
        let client = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS)]);
        world.run(2 * SECOND);
        Self { world, client }
    }

    fn setup(&self, id: ClassId, name: &str, scheduler: Scheduler) -> ClassSetup {
        let config = self.world.client_config(TOKEN, scheduler, Cc::Bbr);
        ClassSetup { id, first: false, config: ClientConfig { class: Some(profile(name)), ..config } }
    }

    fn now(&self) -> Instant {
        self.world.now
    }

    fn fleet(&mut self) -> &mut Fleet {
        &mut self.world.machines[self.client].client.0
    }

    fn set_class(&mut self, class: ClassSetup) {
        let now = self.now();
        self.fleet().set_class(now, class);
    }

    fn remove_class(&mut self, id: ClassId) {
        let now = self.now();
        self.fleet().remove_class(now, id);
    }

    fn plug(&mut self, id: ClassId) {
        let now = self.now();
        self.fleet().link_up(now, LinkId(0).with_class(id), SERVER.parse().unwrap());
    }

    /// How often the client had no connection.
    fn downs(&self) -> usize {
        self.world.machines[self.client].downs
    }

    /// Sends a packet of one flow to a port, and tells which class has carried it.
    fn carried_by(&mut self, port: u16) -> ClassId {
        let sent = |stage: &mut Self| {
            let now = stage.now();
            let reports = stage.fleet().reports(now);
            reports.into_iter().map(|(id, report)| (id, report.counters.tx_bytes)).collect::<Vec<_>>()
        };
        let before = sent(self);
        let own = SocketAddr::new(self.world.address(self.client, true), 4000);
        let to = SocketAddr::from(([203, 0, 113, 9], port));
        self.world.client_sends(self.client, build::Packet::between(own, to).udp(&[7; 100]));
        let after = sent(self);
        self.world.run(100 * MS);
        after.iter().zip(before).find(|(after, before)| **after != *before).expect("some class").0.0
    }

    fn sessions(&mut self) -> Vec<SessionReport> {
        let mut sessions = self.world.servers[0].report(self.world.now);
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
        let now = self.now();
        self.fleet().reports(now).iter().all(|(_, report)| report.state == ClientState::Up)
    }
}

#[test]
fn other_rules_count_for_the_next_packet_and_no_connection_notices() {
    let mut stage = Stage::new();
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    let before = stage.since();
    stage.fleet().set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (ClassId::DEFAULT, BULK), "flows that were known");
    stage.world.run(SECOND);
    assert_eq!((stage.since(), stage.downs()), (before, 0));
}

#[test]
fn a_class_that_is_to_travel_in_another_way_is_made_anew_alone() {
    let mut stage = Stage::new();
    let before = stage.since();
    let class = stage.setup(BULK, "bulk", Scheduler::Redundant);
    stage.set_class(class);
    stage.world.run(SECOND);
    let after = stage.since();
    assert_eq!((after[0], after[1]), (before[0], before[1]), "the others notice nothing");
    assert!(after.len() == 3 && after[2] > before[2], "{before:?} {after:?}");
    assert!(stage.all_up() && stage.downs() == 0);
    stage.fleet().set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!(stage.carried_by(9), BULK);
}

#[test]
fn the_default_class_is_made_anew_with_its_addresses_and_the_others_stay() {
    let mut stage = Stage::new();
    let before = stage.since();
    let addresses = stage.world.machines[stage.client].assignment.take().unwrap().addresses;
    let class = stage.setup(ClassId::DEFAULT, "default", Scheduler::MinRtt);
    stage.set_class(class);
    stage.world.run(SECOND);
    let after = stage.since();
    assert_eq!(after[1..], before[1..]);
    assert!(after[0] > before[0] && stage.all_up());
    let got = stage.world.machines[stage.client].assignment.as_ref().map(|got| got.addresses.clone());
    assert_eq!((stage.downs(), got), (1, Some(addresses)));
}

#[test]
fn classes_come_and_go_while_others_stay() {
    let mut stage = Stage::new();
    let before = stage.since();
    let class = stage.setup(CAMS, "cams", Scheduler::Auto);
    stage.set_class(class);
    stage.fleet().set_rules(Rules::new(vec![rule(9, CAMS)]));
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT, "it has no link yet");
    stage.plug(CAMS);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk", "cams"]);
    assert_eq!(stage.carried_by(9), CAMS);
    stage.remove_class(CAMS);
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"], "the server was told");
    assert_eq!((stage.since(), stage.downs(), stage.fleet().len()), (before, 0, 3));
    stage.remove_class(ClassId::DEFAULT);
    assert_eq!(stage.fleet().len(), 3, "the default class stays");
}

#[test]
fn a_class_too_many_is_carried_by_the_default_one_and_says_why() {
    let mut stage = Stage::with(World::with_limits(Limits { classes: 2, ..Limits::default() }));
    assert_eq!(stage.classes(), ["default", "critical"]);
    let now = stage.now();
    let reports = stage.fleet().reports(now);
    let reasons: Vec<_> = reports.iter().map(|(_, report)| report.reason.as_str()).collect();
    assert_eq!(reasons[..2], ["", ""]);
    assert!(reasons[2].contains("allowed are 2"), "{reasons:?}");
    stage.fleet().set_rules(Rules::new(vec![rule(1, CRITICAL), rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    stage.remove_class(CRITICAL);
    stage.world.run(90 * SECOND);
    assert_eq!(stage.classes(), ["default", "bulk"], "there is room now");
    assert!(stage.all_up() && stage.downs() == 0);
}
