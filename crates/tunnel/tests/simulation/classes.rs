//! Classes of traffic that want more than their link carries, in simulated time.

use std::{net::SocketAddr, sync::OnceLock};

use crate::world::{MS, TOKEN, World, app::App, pipe_of};
use mpvpn_class::{Rule, Rules as ClassRules, Share};
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_lab::LinkSpec;
use mpvpn_packet::ip;
use mpvpn_packets::Packet;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClassProfile, ConnectionNumber, LinkPolicy};
use mpvpn_types::{BitRate, ClassId, CongestionControl, Duration, Instant, LinkId, Portion, Weight};

const CRITICAL: ClassId = ClassId(1);
const BULK: ClassId = ClassId(2);
/// The port of a call at both ends.
const CALL: u16 = 5060;
/// The first ports, at the client, of the connections of a backup, which is of the class `bulk`, and of
/// others.
const BACKUP: u16 = 11_000;
const WEB: u16 = 12_000;
/// One packet of a call every 20 ms, as G.711 has them.
const FRAME: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
    Both,
}

/// The packets of a call: lost ones and delays.
#[derive(Debug, Default)]
struct Call {
    sent: usize,
    /// On the way up, and on the way down.
    delays: [Vec<Duration>; 2],
}

impl Call {
    fn lost(&self) -> usize {
        2 * self.sent - self.delays[0].len() - self.delays[1].len()
    }

    /// The 99th percentile of the delays up and down together, as a round trip would see them.
    fn p99(&self) -> Duration {
        let one = |delays: &[Duration]| {
            let mut sorted = delays.to_vec();
            sorted.sort_unstable();
            sorted.get(sorted.len() * 99 / 100).copied().unwrap_or_default()
        };
        one(&self.delays[0]) + one(&self.delays[1])
    }
}

/// The classes that every client has: `default`, `critical` and `bulk`.
pub(crate) fn profiles() -> [ClassProfile; 3] {
    let weight = |number| Weight::new(number).unwrap();
    let class = |name: &str, share| ClassProfile { name: name.to_owned(), share, ..ClassProfile::default() };
    let half = Some(Portion::Percent(50));
    [
        class("default", Share { weight: weight(4), ..Share::default() }),
        class("critical", Share { first: true, weight: weight(4), max: half, ..Share::default() }),
        class("bulk", Share { weight: weight(1), ..Share::default() }),
    ]
}

struct Site {
    world: World,
    client: usize,
    apps: Vec<App>,
}

impl Site {
    /// A client with the classes that every client has, over links.
    fn new(links: &[&str], lane: FlowMode, given: Option<u64>) -> Self {
        Self::with_cc(links, lane, given, None)
    }

    /// The same, and the controller of the class `bulk`.
    fn with_cc(links: &[&str], lane: FlowMode, given: Option<u64>, cc: Option<CongestionControl>) -> Self {
        let mut world = World::new();
        world.class_cc.extend(cc.map(|cc| ("bulk", cc)));
        let mut site = Self::without_connections(world, links, lane, given);
        site.world.wake_classes(site.client, &[(CALL, 9), (BACKUP, 9)], 1000 * MS);
        site
    }

    /// A client that has used no class yet.
    fn without_connections(mut world: World, links: &[&str], lane: FlowMode, given: Option<u64>) -> Self {
        world.classes = profiles().into();
        world.flow_rules = Rules { mode: lane, rules: Vec::new() };
        let rule = |from, to, class| Rule { from_ports: vec![from..=to], class, ..Rule::default() };
        world.class_rules =
            ClassRules::new(vec![rule(CALL, CALL + 1, CRITICAL), rule(BACKUP, WEB - 1, BULK)]);
        let specs: Vec<LinkSpec> = links.iter().map(|text| text.parse().unwrap()).collect();
        let member: Option<(usize, ConnectionNumber)> = None;
        let client = world.add_over(member, TOKEN, Scheduler::Auto, CongestionControl::Bbr, &specs);
        if let Some(mbit) = given {
            let rate = Some(BitRate::from_bps(mbit * 1_000_000));
            let policy = LinkPolicy { up: rate, down: rate, ..LinkPolicy::default() };
            for (link, class) in
                (0..links.len() as u16).flat_map(|link| (0..3).map(move |class| (link, class)))
            {
                let path = LinkId(link).with_class(ClassId(class));
                world.machines[client].client.0.set_link(world.now, path, policy);
            }
        }
        world.up(client);
        Self { world, client, apps: Vec::new() }
    }

    /// The classes of which the server has connections.
    fn connected(&mut self) -> Vec<String> {
        let now = self.world.now;
        self.world.servers[0].report(now).into_iter().map(|report| report.class).collect()
    }

    /// Connections from these ports that take all they can get.
    fn begin(&mut self, count: u16, from: u16, direction: Direction) {
        let sends = if direction == Direction::Down { 0 } else { 60_000_000_000 };
        for number in 0..count {
            let own = SocketAddr::new(self.world.address(self.client, true), from + number);
            // The two are distinguished by the megabytes or kilobytes that they would send.
            let port = 60_000 + u16::from(from == WEB) + if direction == Direction::Up { 1000 } else { 0 };
            self.apps.push(App::new(own, ([203, 0, 113, 9], port).into(), sends));
        }
    }

    /// Bytes that connections from these ports have moved up and down so far.
    fn moved(&self, from: u16) -> [u64; 2] {
        let own = self.apps.iter().filter(|app| app.port() / 1000 == from / 1000);
        let theirs =
            self.world.destinations.iter().filter(|other| other.port % 1000 == u16::from(from == WEB));
        [theirs.map(|other| other.received_bytes).sum(), own.map(|app| app.received_bytes).sum()]
    }

    /// Lets all of them talk for so long, and a call beside them.
    fn play(&mut self, time: Duration) -> Call {
        let (end, mut next) = (self.world.now + time, self.world.now);
        let mut call = Call::default();
        let mut sent: Vec<Instant> = Vec::new();
        self.world.received_by_server.clear();
        // Packets in flight at the end arrive.
        while self.world.now < end + 500 * MS {
            if self.world.now >= next && self.world.now < end {
                self.speak(sent.len() as u32);
                sent.push(self.world.now);
                next += FRAME;
            }
            let received = std::mem::take(&mut self.world.machines[self.client].received);
            let heard = std::mem::take(&mut self.world.received_by_server);
            for (at, packet) in &received {
                match frame(packet) {
                    Some(number) => call.delays[1].push(*at - sent[number as usize]),
                    None => self.apps.iter_mut().for_each(|app| app.take(packet)),
                }
            }
            for (at, packet) in &heard {
                if let Some(number) = frame(packet) {
                    call.delays[0].push(*at - sent[number as usize]);
                }
            }
            let out: Vec<_> = self.apps.iter_mut().flat_map(App::packets).collect();
            let idle = out.is_empty();
            for packet in out {
                self.world.client_sends(self.client, packet);
            }
            self.world.run(if idle { MS } else { MS / 5 });
        }
        call.sent = sent.len();
        call
    }

    /// A packet of the call each way.
    fn speak(&mut self, number: u32) {
        let ours = SocketAddr::new(self.world.address(self.client, true), CALL);
        let theirs = SocketAddr::from(([203, 0, 113, 7], CALL));
        let mut payload = [0; 172];
        payload[..4].copy_from_slice(&number.to_be_bytes());
        self.world.client_sends(self.client, Packet::between(ours, theirs).udp(&payload));
        self.world.server_sends(Packet::between(theirs, ours).udp(&payload));
    }
}

/// The number of a packet of the call.
fn frame(packet: &[u8]) -> Option<u32> {
    let view = ip::parse(packet).ok().filter(|view| view.protocol() == 17)?;
    Some(u32::from_be_bytes(view.transport().get(8..12)?.try_into().ok()?))
}

fn mbit(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8e-6 / time.as_secs_f64()
}

const TIME: Duration = Duration::from_secs(10);
const LINK: &str = "50mbit,6.5ms,queue=60ms";

/// A call beside a backup, and beside others: what it loses, how much later its packets come than on an idle
/// link, and the rates (Mbit/s) of the backup and of the others; the least of both ways.
fn beside_a_backup(
    link: &str,
    given: Option<u64>,
    others: u16,
    direction: Direction,
) -> (usize, Duration, f64, f64) {
    let mut site = Site::new(&[link], FlowMode::Auto, given);
    let idle = site.play(4000 * MS);
    assert_eq!(idle.lost(), 0);
    site.begin(16, BACKUP, direction);
    site.begin(others, WEB, direction);
    site.play(4000 * MS);
    let before = [BACKUP, WEB].map(|from| site.moved(from));
    let call = site.play(TIME);
    let after = [BACKUP, WEB].map(|from| site.moved(from));
    let rates =
        [0, 1].map(|class| [0, 1].map(|at| mbit(after[class][at] - before[class][at], TIME + 500 * MS)));
    println!(
        "{link}, {given:?} {direction:?}: {} lost, p99 {:?} and {:?}, backup {:.1?}, others {:.1?}",
        call.lost(),
        idle.p99(),
        call.p99(),
        rates[0],
        rates[1]
    );
    let [backup, others] = rates.map(|rates| match direction {
        Direction::Up => rates[0],
        Direction::Down => rates[1],
        Direction::Both => rates[0].min(rates[1]),
    });
    (call.lost(), call.p99().saturating_sub(idle.p99()), backup, others)
}

/// By how much a call may be later beside others than alone.
const MAX_ADDED_DELAY: Duration = Duration::from_millis(5);

#[test]
fn a_call_does_not_feel_a_backup() {
    for direction in [Direction::Up, Direction::Down, Direction::Both] {
        assert_unfelt(LINK, None, direction);
    }
}

#[test]
fn a_call_has_a_connection_of_its_own_while_a_link_is_full_and_shares_one_otherwise() {
    for direction in [Direction::Up, Direction::Down] {
        let mut world = World::new();
        world.classes_connect_at_once = false;
        let mut site = Site::without_connections(world, &[LINK], FlowMode::Auto, None);
        let idle = site.play(4000 * MS);
        assert_eq!((idle.lost(), site.connected().len()), (0, 1), "{direction:?}");
        // Connections of the class that carries the call. It never pauses, and moves all the same.
        site.begin(16, WEB, direction);
        let first = site.play(1000 * MS);
        assert_eq!(site.connected(), ["default", "critical"], "{direction:?}");
        let call = site.play(4000 * MS);
        let later = call.p99().saturating_sub(idle.p99());
        println!("{direction:?}: {:?} later in the first second, then {later:?}", first.p99() - idle.p99());
        assert!(first.lost() + call.lost() == 0 && later <= MAX_ADDED_DELAY, "{direction:?}: {later:?}");
        site.apps.clear();
        site.world.run(Duration::from_secs(120));
        site.play(1000 * MS);
        assert_eq!(site.connected(), ["default"], "{direction:?}");
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_call_does_not_feel_a_backup_where_the_rate_is_given() {
    for direction in [Direction::Up, Direction::Down, Direction::Both] {
        assert_unfelt(LINK, Some(50), direction);
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_queue_that_drains_does_not_show_a_rate_that_is_too_high() {
    // Acknowledgements of what had queued came close together. On one of eight links the queue that followed
    // from that was taken for none, and calls had 10 to 12 ms more.
    for delay in ["5ms", "5.4ms", "7.3ms"] {
        assert_unfelt(&format!("50mbit,{delay},queue=60ms"), None, Direction::Both);
    }
}

fn assert_unfelt(link: &str, given: Option<u64>, direction: Direction) {
    let (lost, later, rate, _) = beside_a_backup(link, given, 0, direction);
    assert_eq!(lost, 0);
    assert!(later <= MAX_ADDED_DELAY, "{later:?}");
    assert!(rate > 0.92 * 0.95 * 50.0, "{rate:.1}");
}

/// Two classes, one of weight 4 and one of weight 1, fill a link of 50 Mbit/s beside a call.
fn assert_shared(link: &str, given: Option<u64>, direction: Direction) {
    let (lost, later, backup, others) = beside_a_backup(link, given, 8, direction);
    assert_eq!(lost, 0);
    assert!(later <= MAX_ADDED_DELAY, "{later:?}");
    let share = others / (others + backup);
    assert!((0.75..0.85).contains(&share), "{share:.2}");
    assert!(backup + others > 0.95 * 0.95 * 50.0, "{backup:.1} + {others:.1}");
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn classes_share_a_link_by_their_weights() {
    for given in [Some(50), None] {
        for direction in [Direction::Up, Direction::Down, Direction::Both] {
            assert_shared(LINK, given, direction);
        }
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_link_that_is_full_both_ways_is_used_whatever_its_delay() {
    for link in ["50mbit,3ms,queue=60ms", "50mbit,6.63ms,queue=60ms", "50mbit,11ms,queue=60ms"] {
        assert_shared(link, None, Direction::Both);
    }
}

/// The results on a link of 150 Mbit/s that three classes share.
struct Shared {
    /// The delays of a call's packets on their way down, sorted.
    delays: Vec<Duration>,
    /// Received rate of the class `bulk`, Mbit/s.
    bulk: f64,
}

impl Shared {
    fn percentile(&self, part: usize) -> Duration {
        self.delays[self.delays.len() * part / 100]
    }
}

/// A time in which all is alike.
#[derive(Clone, Copy)]
struct Phase {
    time: Duration,
    /// Class `bulk`: loss in both directions in per cent, and the offered rate in Mbit/s.
    loss: u32,
    offered: u128,
    /// The offered rate in each of the two other classes, Mbit/s.
    others: u128,
}

/// Packets of 1,200 bytes in three classes down a link of 150 Mbit/s. Returns the results of the last phase,
/// without its first `unmeasured`.
fn down_beside_losses(phases: &[Phase], unmeasured: Duration) -> Shared {
    let mut site = Site::new(&["150mbit,6.5ms,queue=60ms"], FlowMode::Datagram, None);
    let ours = |site: &Site, port| SocketAddr::new(site.world.address(site.client, true), port);
    let theirs = SocketAddr::from(([203, 0, 113, 9], 9));
    let ports = [WEB, CALL + 1, BACKUP];
    // The way back follows.
    for port in ports {
        let packet = Packet::between(ours(&site, port), theirs).udp(&[0; 100]);
        site.world.client_sends(site.client, packet);
    }
    let (mut sent, mut delays, mut bulk) = (Vec::<Instant>::new(), Vec::new(), 0);
    let mut seen = 0;
    for (number, phase) in (1..).zip(phases) {
        let start = site.world.now;
        let link = site.world.machines[site.client].links.get_mut(&LinkId(0)).unwrap();
        for wire in [&mut link.up, &mut link.down] {
            wire.loss_behind_link =
                Some((pipe_of(LinkId(0).with_class(BULK)), f64::from(phase.loss) / 100.0));
        }
        let mut counts = [0; 3];
        while site.world.now < start + phase.time {
            let now = site.world.now;
            let elapsed = now - start;
            let counts_now = number == phases.len() && elapsed >= unmeasured;
            if !counts_now {
                seen = sent.len();
            }
            if sent.last().is_none_or(|last| now >= *last + FRAME) {
                site.speak(sent.len() as u32);
                sent.push(now);
            }
            for ((port, rate), count) in
                ports.iter().zip([phase.others, phase.others, phase.offered]).zip(&mut counts)
            {
                while *count < elapsed.as_micros() * rate / (1228 * 8) {
                    site.world.server_sends(Packet::between(theirs, ours(&site, *port)).udp(&[0; 1200]));
                    *count += 1;
                }
            }
            site.world.run(MS / 2);
            for (at, packet) in std::mem::take(&mut site.world.machines[site.client].received) {
                match frame(&packet).filter(|_| packet.len() == 200) {
                    Some(number) if number as usize >= seen => delays.push(at - sent[number as usize]),
                    None if counts_now && packet[22..24] == BACKUP.to_be_bytes() => {
                        bulk += packet.len() as u64;
                    }
                    _ => {}
                }
            }
            site.world.received_by_server.clear();
        }
    }
    let meant = sent.len() - seen;
    assert!(delays.len() + 2 >= meant, "{} of {meant}", delays.len());
    delays.sort_unstable();
    Shared { delays, bulk: mbit(bulk, phases.last().unwrap().time - unmeasured) }
}

const STEADY: Phase = Phase { time: TIME, loss: 0, offered: 40, others: 40 };
const BEFORE: Phase = Phase { time: Duration::from_secs(2), ..STEADY };

/// Whether a call is as quick as when nothing is lost, and `bulk` gets so much.
fn assert_unharmed(what: &str, found: &Shared, most: [(usize, Duration); 2], bulk: f64) {
    static LOSSLESS: OnceLock<Shared> = OnceLock::new();
    let lossless = LOSSLESS.get_or_init(|| down_beside_losses(&[BEFORE, BEFORE], Duration::ZERO));
    println!("{what}: {:?}, {:?}, bulk {:.1}", found.percentile(50), found.percentile(99), found.bulk);
    for (part, most) in most {
        let (with, without) = (found.percentile(part), lossless.percentile(part));
        assert!(with <= without + most, "{what}: {with:?} instead of {without:?} at {part} %");
    }
    assert!(found.bulk > bulk, "{what}: {:.1} of {bulk:.1} Mbit/s", found.bulk);
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn losses_of_a_class_do_not_affect_others() {
    for loss in [10, 30] {
        let found = down_beside_losses(&[BEFORE, Phase { loss, ..STEADY }], Duration::ZERO);
        let most = [(50, MS / 2), (99, 3 * MS)];
        assert_unharmed(&format!("{loss} % lost"), &found, most, 0.9 * 40.0);
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn retransmissions_of_a_class_that_fill_the_link_do_not_affect_others() {
    // With retransmissions it is 1 to 3 % more than the link carries.
    for rate in [42, 43] {
        let phase = Phase { loss: 30, offered: rate, others: rate, ..STEADY };
        let lossless = Phase { time: BEFORE.time, loss: 0, ..phase };
        let found = down_beside_losses(&[lossless, phase], Duration::ZERO);
        let most = [(50, MS / 2), (99, 5 * MS)];
        assert_unharmed(&format!("30 % lost of {rate} Mbit/s"), &found, most, 34.0);
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn no_class_feels_that_another_wants_more_than_there_is() {
    for loss in [0, 10, 30] {
        let found = down_beside_losses(&[BEFORE, Phase { loss, offered: 120, ..STEADY }], BEFORE.time);
        // 1,228 bytes make about 1,290 on the link.
        let left = (150.0 - 2.0 * 42.0) * 0.95 * f64::from(100 - loss) / 100.0;
        let most = [(50, 3 * MS), (99, 5 * MS)];
        assert_unharmed(&format!("{loss} % lost of too much"), &found, most, 0.9 * left);
    }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_class_on_a_lossy_link_is_as_quick_after_a_pause() {
    for (before, loss) in [(10, 10), (10, 30), (0, 30)] {
        let pause = Phase { time: Duration::from_secs(4), loss: before, offered: 0, others: 0 };
        let phases = [Phase { time: TIME, loss: before, ..STEADY }, pause, Phase { loss, ..STEADY }];
        let found = down_beside_losses(&phases, Duration::ZERO);
        let most = [(50, MS / 2), (99, 3 * MS)];
        assert_unharmed(&format!("{loss} % lost after a pause and {before} %"), &found, most, 0.9 * 40.0);
    }
}

#[test]
fn a_class_says_which_controller_the_server_uses_for_it() {
    let used = |cc| {
        let mut site = Site::with_cc(&["50mbit,15ms,loss=3%"], FlowMode::Auto, None, cc);
        site.begin(1, BACKUP, Direction::Down);
        site.play(2000 * MS);
        let before = site.moved(BACKUP)[1];
        site.play(4000 * MS);
        let rate = mbit(site.moved(BACKUP)[1] - before, 4500 * MS);
        assert!(rate > 40.0, "{cc:?}: {rate:.1} Mbit/s");
        let now = site.world.now;
        let mut reports = site.world.servers[0].report(now);
        reports.retain(|report| report.class == "bulk");
        reports[0].cc
    };
    assert_eq!(used(None), Some(CongestionControl::Bbr));
    for cc in CongestionControl::ALL {
        assert_eq!(used(Some(*cc)), Some(*cc));
    }
}
