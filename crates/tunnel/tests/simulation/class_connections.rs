//! Stories of classes that change, sleep and wake while a client runs, in simulated time.

use std::net::SocketAddr;

use crate::world::{MS, SERVER, TOKEN, World, app::App, pipe_of};
use mpvpn_class::{BULK, CRITICAL, Rule, Rules};
use mpvpn_flow::rules::{FlowMode, Rules as FlowRules};
use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_packet::{ip, tcp_flags};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::{
    ClassConnections, ClassProfile, ClassSetup, ClientConfig, ClientState, PathReport, SessionReport,
    UserLimits,
};
use mpvpn_types::{ClassId, CongestionControl, Duration, Instant, LinkId};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
/// Packets to this port belong to `critical`, packets to the following ports to `bulk`; a connection to the
/// second of these travels as a stream whose destination sends nothing.
const CALL: u16 = 1;
const BACKUP: u16 = 2;
const UPLOAD: u16 = 61_000;
const CAMS: ClassId = ClassId(3);

/// A client with classes over one link.
struct Stage {
    world: World,
    client: usize,
}

/// Packets to this port belong to the class.
fn rule(port: u16, class: ClassId) -> Rule {
    Rule { ports: vec![port..=port], class, ..Rule::default() }
}

fn names(all: &[&str]) -> Vec<String> {
    all.iter().map(|name| name.to_string()).collect()
}

fn profile(name: &str) -> ClassProfile {
    ClassProfile { name: name.to_owned(), ..ClassProfile::default() }
}

impl Stage {
    /// All three classes are up.
    fn new() -> Self {
        let mut stage = Self::with(World::new());
        stage.world.wake_classes(stage.client, &[(4000, CALL), (4000, BACKUP)], 2 * SECOND);
        assert_eq!(stage.classes(), ["default", "critical", "bulk"], "all are there");
        stage
    }

    /// As a client starts.
    fn with(world: World) -> Self {
        Self::over(world, &[(100, 10 * MS)])
    }

    fn over(mut world: World, links: &[(u64, Duration)]) -> Self {
        world.classes = ["default", "critical", "bulk"].map(profile).to_vec();
        world.classes[1].share.first = true;
        world.class_rules = Rules::new(vec![rule(CALL, CRITICAL), rule(BACKUP, BULK), rule(UPLOAD, BULK)]);
        let client = world.add(TOKEN, Scheduler::Auto, links);
        world.up(client);
        world.run(2 * SECOND);
        Self { world, client }
    }

    /// All three classes are up, and nothing passes over the first link any more.
    fn with_silent_first_link(links: &[(u64, Duration)]) -> Self {
        let mut stage = Self::over(World::new(), links);
        stage.world.wake_classes(stage.client, &[(4000, CALL), (4000, BACKUP)], 2 * SECOND);
        stage.world.run(10 * SECOND);
        let link = stage.world.machines[stage.client].links.get_mut(&LinkId(0)).expect("a link");
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        stage
    }

    /// All links lose this share of all packets, both ways.
    fn all_links_lose(&mut self, loss: f64) {
        for link in self.world.machines[self.client].links.values_mut() {
            (link.up.loss, link.down.loss) = (loss, loss);
        }
    }

    /// A client without traffic for a long time.
    fn idle() -> Self {
        let mut stage = Self::new();
        stage.world.run(2 * MINUTE);
        assert_eq!(stage.classes(), ["default"]);
        stage
    }

    /// The ends of a flow to this port.
    fn ends(&self, port: u16) -> (SocketAddr, SocketAddr) {
        let own = SocketAddr::new(self.world.address(self.client, true), 4000);
        (own, SocketAddr::from(([203, 0, 113, 9], port)))
    }

    fn states(&mut self) -> Vec<ClientState> {
        let now = self.now();
        self.connections().reports(now).into_iter().map(|(_, report)| report.state).collect()
    }

    /// Whether the server is heard.
    fn hears_the_server(&mut self) -> bool {
        let now = self.now();
        let report = &self.connections().reports(now)[0].1;
        report.state == ClientState::Up && report.outage.is_none()
    }

    /// How many connections travel as streams of each class.
    fn stream_flows(&mut self) -> Vec<usize> {
        let now = self.now();
        self.connections().reports(now).iter().map(|(_, report)| report.stream_flows).collect()
    }

    /// Bytes of this class that left and came.
    fn moved(&mut self, class: ClassId) -> (u64, u64) {
        let now = self.now();
        let report = self.connections().reports(now).into_iter().find(|(id, _)| *id == class).unwrap().1;
        (report.counters.tx_bytes, report.counters.rx_bytes)
    }

    /// Numbered packets both ways, so often, on one flow to this port; how long each was on its way, up and
    /// down.
    fn talk(&mut self, port: u16, every: Duration, time: Duration) -> [Vec<Duration>; 2] {
        let (own, their) = self.ends(port);
        let start = self.now();
        self.world.received_by_server.clear();
        self.world.machines[self.client].received.clear();
        let mut sent = Vec::new();
        while self.now() < start + time {
            let payload = (sent.len() as u32).to_be_bytes();
            sent.push(self.now());
            self.world.client_sends(self.client, Packet::between(own, their).udp(&payload));
            self.world.server_sends(Packet::between(their, own).udp(&payload));
            self.world.run(every);
        }
        self.world.run(SECOND);
        let delays = |arrived: Vec<(Instant, Vec<u8>)>| {
            let number = |packet: &[u8]| {
                let view = ip::parse(packet).unwrap();
                u32::from_be_bytes(view.transport()[8..12].try_into().unwrap()) as usize
            };
            let numbers: Vec<_> = arrived.iter().map(|(_, packet)| number(packet)).collect();
            assert_eq!(numbers, (0..sent.len()).collect::<Vec<_>>(), "all, in order, once");
            arrived.iter().zip(&sent).map(|((at, _), sent)| *at - *sent).collect()
        };
        let up = std::mem::take(&mut self.world.received_by_server);
        let down = std::mem::take(&mut self.world.machines[self.client].received);
        [delays(up), delays(down)]
    }

    /// Lets an app's connection talk.
    fn exchange(&mut self, app: &mut App, time: Duration) {
        let end = self.now() + time;
        while self.now() < end {
            for packet in app.packets() {
                self.world.client_sends(self.client, packet);
            }
            self.world.run(5 * MS);
            for (_, packet) in std::mem::take(&mut self.world.machines[self.client].received) {
                app.take(&packet);
            }
        }
    }

    fn setup(&self, id: ClassId, name: &str, scheduler: Scheduler) -> ClassSetup {
        let config = self.world.client_config(TOKEN, scheduler, CongestionControl::Bbr);
        ClassSetup {
            id,
            priority: false,
            connects_at_once: true,
            config: ClientConfig { class: Some(profile(name)), ..config },
        }
    }

    fn now(&self) -> Instant {
        self.world.now
    }

    fn connections(&mut self) -> &mut ClassConnections {
        &mut self.world.machines[self.client].client.0
    }

    fn set_class(&mut self, class: ClassSetup) {
        let now = self.now();
        self.connections().set_class(now, class);
    }

    fn remove_class(&mut self, id: ClassId) {
        let now = self.now();
        self.connections().remove_class(now, id);
    }

    fn plug(&mut self, id: ClassId) {
        let now = self.now();
        self.connections().link_up(now, LinkId(0).with_class(id), SERVER.parse().unwrap());
    }

    /// How often the client had no connection.
    fn down_count(&self) -> usize {
        self.world.machines[self.client].down_count
    }

    /// Sends a packet of one flow to a port; returns the class that carried it.
    fn carried_by(&mut self, port: u16) -> ClassId {
        let sent = |stage: &mut Self| {
            let now = stage.now();
            let reports = stage.connections().reports(now);
            reports.into_iter().map(|(id, report)| (id, report.counters.tx_bytes)).collect::<Vec<_>>()
        };
        let before = sent(self);
        let (own, to) = self.ends(port);
        self.world.client_sends(self.client, Packet::between(own, to).udp(&[7; 100]));
        let after = sent(self);
        self.world.run(100 * MS);
        after.iter().zip(before).find(|(after, before)| **after != *before).expect("some class").0.0
    }

    fn sessions(&mut self) -> Vec<SessionReport> {
        let mut sessions = self.world.servers[0].report(self.world.now);
        sessions.sort_by_key(|session| session.connection);
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
        self.connections().reports(now).iter().all(|(_, report)| report.state == ClientState::Up)
    }
}

#[test]
fn other_rules_count_for_the_next_packet_and_no_connection_notices() {
    let mut stage = Stage::new();
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    let before = stage.since();
    stage.connections().set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (ClassId::DEFAULT, BULK), "flows that were known");
    stage.world.run(SECOND);
    assert_eq!((stage.since(), stage.down_count()), (before, 0));
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
    assert!(stage.all_up() && stage.down_count() == 0);
    stage.connections().set_rules(Rules::new(vec![rule(9, BULK)]));
    assert_eq!(stage.carried_by(9), BULK);
}

#[test]
fn a_sleeping_class_that_is_to_travel_in_another_way_sleeps_on() {
    let mut stage = Stage::with(World::new());
    let class = stage.setup(CRITICAL, "critical", Scheduler::Redundant);
    stage.set_class(ClassSetup { priority: true, ..class });
    stage.world.run(SECOND);
    assert_eq!((stage.classes(), stage.down_count()), (names(&["default"]), 0));
    assert_eq!(stage.carried_by(CALL), ClassId::DEFAULT, "the packet wakes it");
    stage.world.run(SECOND);
    assert_eq!((stage.classes(), stage.carried_by(CALL)), (names(&["default", "critical"]), CRITICAL));
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
    assert_eq!((stage.down_count(), got), (1, Some(addresses)));
}

#[test]
fn classes_come_and_go_while_others_stay() {
    let mut stage = Stage::new();
    let before = stage.since();
    let class = stage.setup(CAMS, "cams", Scheduler::Auto);
    stage.set_class(class);
    stage.connections().set_rules(Rules::new(vec![rule(9, CAMS)]));
    stage.plug(CAMS);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"], "nobody has used it");
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT, "it wakes");
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk", "cams"], "a packet was for it");
    assert_eq!(stage.carried_by(9), CAMS);
    stage.remove_class(CAMS);
    assert_eq!(stage.carried_by(9), ClassId::DEFAULT);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"], "the server was told");
    assert_eq!((stage.since(), stage.down_count()), (before, 0));
    stage.remove_class(ClassId::DEFAULT);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"], "the default class stays");
}

#[test]
fn a_class_too_many_is_carried_by_the_default_one_and_says_why() {
    let mut stage =
        Stage::with(World::with_limits(UserLimits { max_classes: 2, ..UserLimits::default() }, 1));
    stage.carried_by(CALL);
    stage.world.run(2 * SECOND);
    stage.carried_by(BACKUP);
    stage.world.run(2 * SECOND);
    assert_eq!(stage.classes(), ["default", "critical"]);
    let now = stage.now();
    let reports = stage.connections().reports(now);
    let reasons: Vec<_> = reports.iter().map(|(_, report)| report.reason.as_str()).collect();
    assert_eq!(reasons[..2], ["", ""]);
    assert!(reasons[2].contains("allowed are 2"), "{reasons:?}");
    stage.connections().set_rules(Rules::new(vec![rule(1, CRITICAL), rule(9, BULK)]));
    assert_eq!((stage.carried_by(1), stage.carried_by(9)), (CRITICAL, ClassId::DEFAULT));
    stage.remove_class(CRITICAL);
    for _ in 0..3 {
        stage.carried_by(9);
        stage.world.run(30 * SECOND);
    }
    assert_eq!(stage.classes(), ["default", "bulk"], "there is room now");
    assert!(stage.all_up() && stage.down_count() == 0);
}

#[test]
fn a_class_that_nobody_used_sleeps_until_its_first_packet_and_loses_none() {
    for (port, class, name) in [(BACKUP, BULK, "bulk"), (CALL, CRITICAL, "critical")] {
        let mut stage = Stage::with(World::new());
        assert_eq!(stage.states(), [ClientState::Up, ClientState::Asleep, ClientState::Asleep]);
        assert_eq!(stage.classes(), ["default"], "nobody has used another one");
        let [up, down] = stage.talk(port, MS, 2 * SECOND);
        assert!(up.iter().chain(&down).all(|delay| *delay < 15 * MS), "{name}: {up:?} {down:?}");
        assert_eq!((stage.classes(), stage.carried_by(port)), (names(&["default", name]), class));
        let [up, down] = stage.talk(port, 20 * MS, SECOND);
        let bytes = ((up.len() + 3) * 32, down.len() * 32);
        let before = stage.moved(class);
        assert!(before.0 >= bytes.0 as u64 && before.1 >= bytes.1 as u64, "{name}: {before:?} of {bytes:?}");
    }
}

#[test]
fn a_session_has_one_connection_until_a_packet_of_another_class_which_does_not_wait_for_the_second() {
    let delay = 100 * MS;
    let mut stage = Stage::over(World::new(), &[(100, delay)]);
    for _ in 0..30 {
        assert_eq!(stage.carried_by(443), ClassId::DEFAULT);
        stage.world.run(SECOND);
        assert_eq!(stage.classes(), ["default"]);
    }
    stage.world.received_by_server.clear();
    let sent = stage.now();
    assert_eq!(stage.carried_by(CALL), ClassId::DEFAULT, "its class has no connection yet");
    stage.world.run(delay);
    let arrived: Vec<_> = stage.world.received_by_server.iter().map(|(at, _)| *at - sent).collect();
    assert!(arrived.len() == 1 && arrived[0] < delay + 5 * MS, "{arrived:?}");
    // The request that joins the session comes one and a half round trips after the packet that asked for it.
    assert_eq!(stage.classes(), ["default"], "its class is still connecting");
    stage.world.run(4 * SECOND);
    assert_eq!((stage.classes(), stage.carried_by(CALL)), (names(&["default", "critical"]), CRITICAL));
    let states = [ClientState::Up, ClientState::Up, ClientState::Asleep];
    assert_eq!(stage.states(), states, "no other class has woken");
}

#[test]
fn a_session_in_which_nothing_moves_has_one_connection_after_a_minute() {
    let mut stage = Stage::new();
    let mtu = stage.world.machines[stage.client].mtu;
    stage.world.run(50 * SECOND);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"]);
    stage.world.run(20 * SECOND);
    assert_eq!(stage.classes(), ["default"]);
    assert_eq!(stage.states(), [ClientState::Up, ClientState::Asleep, ClientState::Asleep]);
    stage.world.run(30 * MINUTE);
    assert_eq!(stage.classes(), ["default"], "they stay asleep");
    assert_eq!((stage.down_count(), stage.world.machines[stage.client].mtu), (0, mtu));
}

#[test]
fn a_class_that_nobody_uses_sleeps_after_ten_minutes_beside_others_that_are_used() {
    let mut stage = Stage::new();
    let use_for = |stage: &mut Stage, minutes: u32| {
        for _ in 0..minutes * 2 {
            assert_eq!(stage.carried_by(443), ClassId::DEFAULT);
            stage.world.run(30 * SECOND);
        }
    };
    use_for(&mut stage, 9);
    assert_eq!(stage.classes(), ["default", "critical", "bulk"]);
    assert_eq!(stage.carried_by(BACKUP), BULK, "which begins its ten minutes anew");
    use_for(&mut stage, 2);
    assert_eq!(stage.classes(), ["default", "bulk"]);
    use_for(&mut stage, 7);
    // Packets from the server keep it awake, too.
    let (own, their) = stage.ends(BACKUP);
    stage.world.server_sends(Packet::between(their, own).udp(b"still there"));
    use_for(&mut stage, 9);
    assert_eq!(stage.classes(), ["default", "bulk"]);
    use_for(&mut stage, 2);
    assert_eq!(stage.classes(), ["default"]);
}

#[test]
fn the_first_packets_of_a_call_overtake_what_waits_while_its_class_wakes() {
    let mut stage = Stage::over(World::new(), &[(10, 10 * MS)]);
    stage.world.run(2 * MINUTE);
    assert_eq!(stage.classes(), ["default"]);
    // Twice what the link carries, in flows that each begin anew.
    let mut port = 10_000;
    let load = |stage: &mut Stage, port: &mut u16| {
        for _ in 0..25 {
            *port += 1;
            let (own, their) = stage.ends(*port);
            stage.world.client_sends(stage.client, Packet::between(own, their).udp(&[7; 1000]));
        }
    };
    for _ in 0..100 {
        load(&mut stage, &mut port);
        stage.world.run(10 * MS);
    }
    stage.world.received_by_server.clear();
    let (own, their) = stage.ends(CALL);
    let sent = stage.now();
    stage.world.client_sends(stage.client, Packet::between(own, their).udp(b"hello"));
    for _ in 0..10 {
        load(&mut stage, &mut port);
        stage.world.run(10 * MS);
    }
    let is_call =
        |packet: &[u8]| ip::parse(packet).is_ok_and(|view| view.ports().is_some_and(|(_, to)| to == CALL));
    let arrived = stage.world.received_by_server.iter().find(|(_, packet)| is_call(packet));
    let delay = arrived.map(|(at, _)| *at - sent).expect("it arrives");
    assert!(delay < 30 * MS, "{delay:?}");
}

#[test]
fn a_call_that_begins_while_its_class_sleeps_loses_nothing_and_is_never_late() {
    for links in [&[(100, 10 * MS)][..], &[(50, 10 * MS), (50, 15 * MS)]] {
        let mut stage = Stage::over(World::new(), links);
        stage.world.run(2 * MINUTE);
        assert_eq!(stage.classes(), ["default"]);
        for delays in stage.talk(CALL, 20 * MS, 3 * SECOND) {
            assert!(delays.iter().all(|delay| *delay < 20 * MS), "{delays:?}");
        }
        assert_eq!(stage.classes(), ["default", "critical"]);
        let before = stage.moved(CRITICAL);
        stage.talk(CALL, 20 * MS, SECOND);
        let after = stage.moved(CRITICAL);
        assert_eq!((after.0 - before.0, after.1 - before.1), (50 * 32, 50 * 32), "both ways in its class");
    }
}

#[test]
fn packets_for_a_sleeping_class_use_the_default_one_and_do_not_wake_it() {
    let mut stage = Stage::idle();
    let (own, their) = stage.ends(CALL);
    stage.world.machines[stage.client].received.clear();
    for _ in 0..10 {
        stage.world.server_sends(Packet::between(their, own).udp(b"ring"));
        stage.world.run(100 * MS);
    }
    assert_eq!(stage.world.machines[stage.client].received.len(), 10);
    assert_eq!(stage.classes(), ["default"]);
    assert_eq!(stage.carried_by(CALL), ClassId::DEFAULT, "the answer wakes it");
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical"]);
}

#[test]
fn packets_outside_the_routes_wake_no_class() {
    let mut stage = Stage::idle();
    stage.connections().set_rules(Rules::new(vec![rule(5353, CRITICAL)]));
    let group = SocketAddr::from(([224, 0, 0, 251], 5353));
    let (own, _) = stage.ends(CALL);
    let stranger = SocketAddr::from(([192, 168, 7, 7], 4000));
    for (from, to) in [(own, group), (stranger, stage.ends(5353).1)] {
        stage.world.client_sends(stage.client, Packet::between(from, to).udp(b"anybody?"));
        stage.world.run(SECOND);
        assert_eq!(stage.classes(), ["default"]);
    }
}

#[test]
fn a_connection_that_begins_while_its_class_wakes_travels_in_it_and_keeps_it_awake() {
    let mut stage = Stage::idle();
    let (own, their) = stage.ends(UPLOAD);
    let mut app = App::new(own, their, 1000);
    stage.world.client_sends(stage.client, app.packets().remove(0));
    // Packets that an event released are sent in the next iteration.
    (0..10).for_each(|_| stage.world.run(100 * MS));
    let received = std::mem::take(&mut stage.world.machines[stage.client].received);
    assert_eq!(received.len(), 1, "the connection stands");
    app.take(&received[0].1);
    let mut packets = app.packets();
    let end = packets.pop().unwrap();
    packets.into_iter().for_each(|packet| stage.world.client_sends(stage.client, packet));
    stage.world.run(25 * MINUTE);
    assert_eq!(stage.classes(), ["default", "bulk"], "its connection would end with it");
    assert_eq!(stage.stream_flows(), [0, 0, 1]);
    let moved = stage.moved(BULK);
    assert!(moved.0 >= 1000, "{moved:?}");
    stage.world.client_sends(stage.client, end);
    stage.exchange(&mut app, SECOND);
    let upload = &stage.world.destinations[0];
    assert!(upload.received_bytes == 1000 && upload.ended, "{} bytes", upload.received_bytes);
}

#[test]
fn a_connection_waits_for_its_class_only_if_it_travels_as_a_stream_and_only_until_the_class_is_connected() {
    let begin = |mode| {
        let mut world = World::new();
        world.flow_rules = FlowRules { mode, rules: Vec::new() };
        let mut stage = Stage::over(world, &[(100, 100 * MS)]);
        let (own, their) = stage.ends(CALL);
        let syn = Tcp { flags: tcp_flags::SYN, ack: 0, ..Tcp::default() };
        stage.world.client_sends(stage.client, Packet::between(own, their).tcp_with(&syn, &[]));
        stage
    };
    let mut packets = begin(FlowMode::Datagram);
    packets.world.run(110 * MS);
    assert_eq!(packets.world.received_by_server.len(), 1, "by the default class at once");
    let mut stream = begin(FlowMode::Stream);
    // The class connects and asks for its tunnel, and the far end answers, in four round trips.
    (0..85).for_each(|_| stream.world.run(10 * MS));
    assert_eq!(stream.world.machines[stream.client].received.len(), 1, "the far end has accepted");
    assert_eq!(stream.stream_flows(), [0, 1, 0], "in its class");
}

#[test]
fn a_connection_does_not_wait_for_a_class_that_does_not_wake() {
    let mut stage =
        Stage::with(World::with_limits(UserLimits { max_classes: 2, ..UserLimits::default() }, 1));
    stage.carried_by(CALL);
    stage.world.run(SECOND);
    assert_eq!(stage.classes(), ["default", "critical"], "all that are allowed");
    let (own, their) = stage.ends(UPLOAD);
    let mut app = App::new(own, their, 1000);
    stage.exchange(&mut app, SECOND);
    assert_eq!(stage.world.destinations[0].received_bytes, 1000, "by the default class");
    // One whose connection gets nowhere takes a second.
    let mut stage = Stage::with(World::new());
    for link in stage.world.machines[stage.client].links.values_mut() {
        link.up.silent = Some(pipe_of(LinkId(0).with_class(BULK)));
    }
    let mut app = App::new(own, their, 1000);
    stage.exchange(&mut app, 800 * MS);
    assert!(stage.world.destinations.is_empty());
    stage.exchange(&mut app, 400 * MS);
    assert_eq!(stage.world.destinations[0].received_bytes, 1000);
    assert_eq!(stage.classes(), ["default"]);
}

#[test]
fn a_class_that_wakes_over_a_slow_link_changes_no_mtu() {
    let mut stage = Stage::over(World::new(), &[(10, 300 * MS)]);
    stage.world.run(11 * MINUTE);
    let mtu = stage.world.machines[stage.client].mtu;
    assert_eq!(stage.classes(), ["default"]);
    for _ in 0..100 {
        for port in [CALL, BACKUP] {
            stage.carried_by(port);
            assert_eq!(stage.world.machines[stage.client].mtu, mtu);
        }
    }
    assert_eq!(stage.classes(), ["default", "critical", "bulk"]);
    assert_eq!((stage.carried_by(CALL), stage.carried_by(BACKUP)), (CRITICAL, BULK));
}

#[test]
fn classes_of_several_shards_sleep_and_wake_each_for_itself() {
    let mut world = World::with_shards(2);
    world.classes = ["default", "bulk"].map(profile).to_vec();
    world.class_rules = Rules::new(vec![rule(BACKUP, ClassId(1))]);
    let initial = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS)]);
    let joined = world.add_joined(initial, 1, &[(100, 10 * MS)]);
    world.run(3 * SECOND);
    let theirs = |world: &mut World| {
        let now = world.now;
        let all = world.servers.iter_mut().flat_map(|server| server.report(now));
        let mut all: Vec<_> = all.map(|session| (session.connection.number(), session.class)).collect();
        all.sort();
        all
    };
    let is = |all: &[(u8, &str)]| {
        all.iter().map(|(number, class)| (*number, class.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(theirs(&mut world), is(&[(0, "default"), (1, "default")]));
    let own = SocketAddr::new(world.address(initial, true), 4000);
    let backup = Packet::between(own, ([203, 0, 113, 9], BACKUP).into()).udp(&[7; 100]);
    world.client_sends(joined, backup);
    world.run(SECOND);
    assert_eq!(theirs(&mut world), is(&[(0, "default"), (1, "default"), (17, "bulk")]));
    world.run(2 * MINUTE);
    assert_eq!(theirs(&mut world), is(&[(0, "default"), (1, "default")]));
}

/// The server's kernel may read the answer to a flow through the queue of another shard than the one at which
/// the flow arrived: it learns the queue of a packet only after it has delivered it, and forgets it.
#[test]
fn a_flow_is_answered_in_its_class_through_any_queue_of_the_server() {
    let mut world = World::with_shards(2);
    world.classes = ["default", "critical"].map(profile).to_vec();
    world.class_rules = Rules::new(vec![rule(CALL, CRITICAL)]);
    let initial = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS)]);
    let joined = world.add_joined(initial, 1, &[(100, 10 * MS)]);
    world.run(2 * SECOND);
    let address = world.address(initial, true);
    let mut port = 5000;
    // Sends a packet of a new flow by `machine`, and its answer through each queue. Returns how many packets
    // the classes of both machines have received: `default`, then `critical`.
    let mut call = |world: &mut World, machine: usize| {
        port += 1;
        let (own, their) = (SocketAddr::new(address, port), SocketAddr::from(([203, 0, 113, 9], CALL)));
        let received = |world: &mut World| {
            let now = world.now;
            let of = |at: usize, world: &mut World| {
                let reports = world.machines[at].client.0.reports(now);
                [0, 1].map(|class: usize| reports[class].1.counters.rx_bytes)
            };
            let all = [initial, joined].map(|at| of(at, world));
            all.map(|of_classes| of_classes.map(|bytes| bytes / 32))
        };
        let before = received(world);
        world.client_sends(machine, Packet::between(own, their).udp(b"ping"));
        world.run(100 * MS);
        for queue in [0, 1] {
            world.server_sends_through(queue, Packet::between(their, own).udp(b"pong"));
            world.run(100 * MS);
        }
        let after = received(world);
        [0, 1].map(|at: usize| [0, 1].map(|class: usize| after[at][class] - before[at][class]))
    };
    // The class of shard 1 wakes.
    call(&mut world, joined);
    world.run(2 * SECOND);
    assert_eq!(call(&mut world, joined), [[0, 0], [0, 2]], "in the class, by the connection of the flow");
    assert_eq!(world.handed_over, 1);
    // A shard of the client whose connections end takes its flows along.
    let now = world.now;
    world.machines[joined].client.0.close(now, "gone");
    world.run(SECOND);
    let (own, their) = (SocketAddr::new(address, port), SocketAddr::from(([203, 0, 113, 9], CALL)));
    world.machines[initial].received.clear();
    world.server_sends_through(0, Packet::between(their, own).udp(b"still there?"));
    world.run(100 * MS);
    assert_eq!(world.machines[initial].received.len(), 1, "by the default class of the other shard");
}

#[test]
fn a_class_that_sleeps_belongs_to_the_next_session_as_well() {
    let mut stage = Stage::idle();
    stage.world.restart_server();
    stage.world.run(30 * SECOND);
    assert_eq!(stage.classes(), ["default"], "a new session wakes nobody");
    stage.carried_by(CALL);
    stage.world.run(SECOND);
    assert_eq!((stage.classes(), stage.carried_by(CALL)), (names(&["default", "critical"]), CRITICAL));
}

#[test]
fn a_class_in_which_nothing_moves_learns_from_the_others_that_a_link_is_silent() {
    let mut stage = Stage::with_silent_first_link(&[(100, 10 * MS), (100, 12 * MS)]);
    let (own, to) = stage.ends(9);
    for _ in 0..100 {
        stage.world.client_sends(stage.client, Packet::between(own, to).udp(b"default"));
        stage.world.run(10 * MS);
    }
    let now = stage.now();
    for (class, report) in stage.connections().reports(now) {
        let down = report.paths.iter().filter(|path| path.state == PathState::Down).count();
        assert_eq!((report.paths.len(), down), (2, 1), "{class:?}");
    }
    stage.world.run(MINUTE);
    let asleep = [ClientState::Up, ClientState::Asleep, ClientState::Asleep];
    assert_eq!(stage.states(), asleep, "being asked is no use of a class");
}

#[test]
fn a_class_that_looks_after_its_links_takes_none_that_works_for_silent() {
    let mut stage = Stage::with_silent_first_link(&[(100, 10 * MS), (100, 12 * MS), (100, 14 * MS)]);
    let (own, to) = stage.ends(9);
    for round in 0..1000 {
        if round < 10 {
            stage.world.client_sends(stage.client, Packet::between(own, to).udp(b"default"));
        }
        stage.world.run(10 * MS);
        let now = stage.now();
        for (class, report) in stage.connections().reports(now) {
            let works = |path: &PathReport| {
                path.link.is_some_and(|link| link.uplink() == LinkId(0)) || path.state != PathState::Down
            };
            assert!(report.paths.iter().all(works), "{class:?}, after {round} × 10 ms: {:?}", report.paths);
        }
    }
}

#[test]
fn a_device_loses_its_carrier_once_while_its_only_link_is_silent() {
    for phase in 0..150 {
        let mut stage = Stage::over(World::new(), &[(100, 12 * MS)]);
        stage.talk(CALL, 20 * MS, 3 * SECOND);
        let (own, to) = stage.ends(CALL);
        let mut changes = vec![(stage.now(), true)];
        // Packets pass up again before they do down.
        let silence = (1400 + 3 * phase) * MS;
        for (up, down, time) in [(1.0, 1.0, silence), (0.0, 1.0, phase % 8 * 7 * MS), (0.0, 0.0, SECOND)] {
            let link = stage.world.machines[stage.client].links.get_mut(&LinkId(0)).expect("a link");
            (link.up.loss, link.down.loss) = (up, down);
            let begin = stage.now();
            while stage.now() < begin + time {
                if (stage.now() - begin).as_millis().is_multiple_of(20) {
                    stage.world.client_sends(stage.client, Packet::between(own, to).udp(b"call"));
                }
                stage.world.run(MS);
                let reached = stage.connections().reaches_server(ClassId::DEFAULT);
                if changes.last().is_some_and(|(_, before)| *before != reached) {
                    changes.push((stage.now(), reached));
                }
            }
        }
        let times: Vec<_> = changes.iter().map(|(at, reached)| (*at - changes[0].0, *reached)).collect();
        assert!(matches!(times[..], [_, (_, false), (_, true)]), "phase {phase}: {times:?}");
    }
}

/// A class with two links whose first one falls silent; nobody uses the class until it sleeps. `traffic`:
/// packets of another class tell that the link is silent.
fn sleeps_over_a_silent_first_link(traffic: bool) -> Stage {
    let mut stage = Stage::with_silent_first_link(&[(100, 10 * MS), (100, 12 * MS)]);
    let (own, to) = stage.ends(9);
    for _ in 0..if traffic { 100 } else { 0 } {
        stage.world.client_sends(stage.client, Packet::between(own, to).udp(b"default"));
        stage.world.run(10 * MS);
    }
    stage.world.run(MINUTE + 5 * SECOND);
    let asleep = [ClientState::Up, ClientState::Asleep, ClientState::Asleep];
    assert_eq!(stage.states(), asleep);
    stage
}

#[test]
fn a_class_that_falls_asleep_tells_the_server_over_a_link_that_works() {
    for traffic in [true, false] {
        let mut stage = sleeps_over_a_silent_first_link(traffic);
        assert_eq!(stage.classes(), ["default"], "the server keeps the others; traffic: {traffic}");
    }
}

#[test]
fn traffic_of_a_class_that_goes_on_is_no_new_reason_to_ask_a_server_that_is_gone() {
    let mut stage = Stage::over(World::new(), &[(100, 10 * MS), (100, 12 * MS)]);
    stage.talk(CALL, 100 * MS, 10 * SECOND);
    stage.all_links_lose(1.0);
    let (own, to) = stage.ends(CALL);
    let call = |stage: &mut Stage, seconds: u32| {
        for _ in 0..seconds {
            stage.world.client_sends(stage.client, Packet::between(own, to).udp(b"call"));
            stage.world.run(SECOND);
        }
        [0, 1].map(|link| stage.world.machines[stage.client].links[&LinkId(link)].up.offered)
    };
    // The session ends after three minutes; then packets of the class are those of `default`.
    let before = call(&mut stage, 170);
    let after = call(&mut stage, 150);
    let rates = [0, 1].map(|link| (after[link] - before[link]) as f64 * 8e-3 / 150.0);
    println!("{rates:.2?} kbit/s");
    assert!(rates.iter().all(|rate| *rate <= 1.0), "{rates:?} kbit/s");
}

#[test]
fn a_class_has_no_connection_while_its_server_is_silent_and_one_again_with_the_first_answers() {
    for pause in [SECOND, 10 * MS] {
        let mut stage = Stage::over(World::new(), &[(100, 10 * MS), (100, 12 * MS)]);
        let (now, client) = (stage.now(), stage.client);
        let metered = LinkPolicy { metered: true, ..LinkPolicy::default() };
        stage.world.machines[client].client.set_link(now, LinkId(1), metered);
        stage.talk(CALL, 100 * MS, 10 * SECOND);
        stage.all_links_lose(1.0);
        let (own, to) = stage.ends(CALL);
        let call = |stage: &mut Stage, time: Duration| {
            let end = stage.now() + time;
            while stage.now() < end {
                stage.world.client_sends(client, Packet::between(own, to).udp(b"call"));
                stage.world.run(pause);
            }
            [0, 1].map(|link| stage.world.machines[client].links[&LinkId(link)].up.offered)
        };
        let before = call(&mut stage, 65 * SECOND);
        assert_eq!(stage.states(), [ClientState::Up, ClientState::Asleep, ClientState::Asleep]);
        let after = call(&mut stage, 90 * SECOND);
        assert_eq!(stage.states(), [ClientState::Up, ClientState::Asleep, ClientState::Asleep]);
        let rates = [0, 1].map(|link| (after[link] - before[link]) as f64 * 8e-3 / 90.0);
        println!("a packet every {pause:?}: {rates:.2?} kbit/s");
        assert!(rates[0] <= 1.0 && rates[1] <= 0.2, "{rates:?} kbit/s");
        stage.all_links_lose(0.0);
        let returned = stage.now();
        while !stage.hears_the_server() {
            assert!(stage.now() < returned + 30 * SECOND, "the server is back");
            call(&mut stage, 100 * MS);
        }
        call(&mut stage, 2 * SECOND);
        assert_eq!(stage.carried_by(CALL), CRITICAL);
    }
}
