//! Settings that nobody chose: links, load and changes are drawn at random and played in simulated time.
//!
//! In: a seed and a number of settings, from the environment (`SWEEP_SEED`, `SWEEP_FIRST`, `SWEEP_COUNT`).
//! Out: a line of JSON for each setting, which `./dev bench sweep` makes distributions of. The distributions
//! that settings are drawn from are those of [`Setting::draw`].

mod setting;
mod worlds;

use std::{
    env,
    net::{IpAddr, SocketAddr},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant as RealInstant,
};

use mpvpn_class::{Rule, Rules as ClassRules};
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_packet::ip;
use mpvpn_packets::Packet;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::ClientState;
use mpvpn_types::{ClassId, CongestionControl, Duration, Instant, LinkId};
use serde_json::json;

use self::setting::{Beside, Load, Loss, Setting, Step, rtt_of};
use crate::{
    classes,
    paths::negotiated_mtu,
    world::{MS, SharedBottleneck, TOKEN, World, app::App, tcp::Flow},
};

/// A setting lasts so many round trips, at least so long; it is counted from the second number on, and again
/// so many round trips and so much time after a change.
const RTTS: u32 = 50;
const LEAST: Duration = Duration::from_secs(3);
const RTTS_BEFORE: u32 = 20;
const RTTS_AFTER_CHANGE: u32 = 10;
const AFTER_CHANGE: Duration = Duration::from_millis(200);
/// The change comes after this share of the time.
const CHANGE_AT: f64 = 0.6;
/// A packet of the call each way.
const FRAME: Duration = Duration::from_millis(5);
const FRAME_BYTES: usize = 172;
/// The number of the packets with which the call's class is woken, before any of the call.
const WAKE: u32 = u32::MAX;
/// The bytes of a full IP packet on a link.
const LINK_MTU: u32 = 1500;
/// The bytes of a stream that it carries: without the headers of IP, UDP and QUIC, the frame's and the tag.
const STREAM_BYTES: f64 = 1436.0;
/// The payload of a full segment on a link.
const SEGMENT_BYTES: f64 = 1448.0;
/// How long a tunnel may take to come up.
const MAX_START: Duration = Duration::from_secs(60);
const CALL: u16 = 5060;
const FIRST_PORT: u16 = 40_000;
const FAR: ([u8; 4], u16) = ([203, 0, 113, 9], 5201);
/// The ends of the first foreign flow, which no tunnel sees.
const FOREIGN: [([u8; 4], u16); 2] = [([192, 0, 2, 200], 6000), ([192, 0, 2, 201], 5999)];

/// A phase of a run: before a change, and after it.
#[derive(Clone, Debug, Default)]
struct Phase {
    counted: Duration,
    /// Bytes that were delivered while it was counted.
    bytes: f64,
    /// Bytes of the tunnel and of the foreign flow on the first link.
    on_link: [f64; 2],
    /// Delays of the call, up and down, and how many packets were sent each way.
    delays: [Vec<Duration>; 2],
    sent: usize,
}

#[derive(Debug, Default)]
struct Run {
    phases: [Phase; 2],
    /// Delivered bytes after the change, with the time since then.
    after_change: Vec<(Duration, f64)>,
    mtu: usize,
}

/// The load: TCP as packets, or as streams.
enum Flows {
    Packets(Vec<Flow>),
    Streams(Vec<App>),
    Idle,
}

/// The purpose of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// The load runs, and the foreign flow if there is one.
    Loaded,
    /// The call alone.
    Idle,
    /// The load's flows over this link alone, outside of the tunnel.
    Plain(usize),
}

struct Played {
    setting: Setting,
    world: World,
    client: usize,
    flows: Flows,
    /// Flows outside of the tunnel, and their link.
    foreign: (LinkId, Vec<Flow>),
    /// When each packet of the call was sent.
    frames: Vec<Instant>,
    next_frame: Instant,
    mtu: usize,
}

impl Played {
    fn new(setting: &Setting, seed: u64, purpose: Purpose) -> Option<Self> {
        let mut world = World::new();
        world.seed = seed;
        let mode = if setting.load == Load::Packets { FlowMode::Datagram } else { FlowMode::Auto };
        world.flow_rules = Rules { mode, rules: Vec::new() };
        let [default, critical, _] = classes::profiles();
        world.classes = vec![default, critical];
        let rule = Rule { from_ports: vec![CALL..=CALL], class: ClassId(1), ..Rule::default() };
        world.class_rules = ClassRules::new(vec![rule]);
        if let Beside::Bottleneck(spec) = &setting.beside {
            let links = vec![LinkId(0), LinkId(1)];
            world.bottleneck = Some(SharedBottleneck::new(links, spec, seed + 77, world.now));
        }
        let client = world.add_over(None, TOKEN, Scheduler::Auto, setting.cc, &setting.links);
        let mut played = Self {
            setting: setting.clone(),
            next_frame: world.now,
            world,
            client,
            flows: Flows::Idle,
            foreign: (LinkId(0), Vec::new()),
            frames: Vec::new(),
            mtu: 0,
        };
        played.start(purpose).then_some(played)
    }

    /// Waits until the tunnel is up, and both classes, and begins the load. Returns whether that worked.
    fn start(&mut self, purpose: Purpose) -> bool {
        let limit = self.world.now + MAX_START;
        let is_up = |world: &mut World, client: usize| {
            let reports = world.machines[client].client.0.reports(world.now);
            !reports.is_empty() && reports.iter().all(|(_, report)| report.state == ClientState::Up)
        };
        while self.world.machines[self.client].assignment.is_none() {
            self.world.run(10 * MS);
            if self.world.now > limit {
                return false;
            }
        }
        loop {
            self.frame_up(WAKE);
            self.world.run(100 * MS);
            if is_up(&mut self.world, self.client) {
                break;
            }
            if self.world.now > limit {
                return false;
            }
        }
        // All links are found.
        self.world.run(Duration::from_millis(500).max(6 * self.setting.rtt()));
        let near = self.world.address(self.client, true);
        if self.setting.load == Load::Packets {
            let ends = [SocketAddr::new(near, 39_999), SocketAddr::from(FAR)];
            self.mtu = negotiated_mtu(&mut self.world, self.client, ends);
        }
        self.next_frame = self.world.now;
        match purpose {
            Purpose::Loaded => self.begin(near),
            Purpose::Idle => {}
            Purpose::Plain(link) => self.begin_foreign(link, self.setting.flows, false),
        }
        true
    }

    fn begin(&mut self, near: IpAddr) {
        let Setting { load, flows, is_up, ref beside, .. } = self.setting;
        let own = |number: u16| SocketAddr::new(near, FIRST_PORT + number);
        let far = SocketAddr::from(FAR);
        self.flows = match load {
            Load::Packets => {
                let flow = |number| match is_up {
                    true => Flow::new(own(number), far, self.mtu),
                    false => Flow::new(far, own(number), self.mtu),
                };
                Flows::Packets((0..flows).map(flow).collect())
            }
            Load::Streams => {
                let sends = if is_up { 60_000_000_000 } else { 0 };
                // The destination sends as many megabytes as its port says, or kilobytes from 61,000 on.
                let port = if is_up { 61_000 } else { 60_000 };
                let app = |number| App::new(own(number), (FAR.0, port).into(), sends);
                Flows::Streams((0..flows).map(app).collect())
            }
        };
        match beside {
            Beside::Cubic => self.begin_foreign(0, 1, false),
            Beside::Bbr => self.begin_foreign(0, 1, true),
            Beside::Nothing | Beside::Bottleneck(_) => {}
        }
    }

    fn begin_foreign(&mut self, link: usize, count: u16, has_bbr: bool) {
        let [(from, port), to] = FOREIGN;
        let flow = |number: u16| {
            let flow = Flow::new((from, port + number).into(), to.into(), LINK_MTU as usize);
            if has_bbr { flow.with_bbr(self.world.now) } else { flow }
        };
        self.foreign = (LinkId(link as u16), (0..count).map(flow).collect());
    }

    fn frame_up(&mut self, number: u32) {
        let packet = self.frame(number, true);
        self.world.client_sends(self.client, packet);
    }

    /// A packet of the call.
    fn frame(&self, number: u32, is_up: bool) -> Vec<u8> {
        let ours = SocketAddr::new(self.world.address(self.client, true), CALL);
        let theirs = SocketAddr::from(([203, 0, 113, 7], CALL));
        let mut payload = [0; FRAME_BYTES];
        payload[..4].copy_from_slice(&number.to_be_bytes());
        let (from, to) = if is_up { (ours, theirs) } else { (theirs, ours) };
        Packet::between(from, to).udp(&payload)
    }

    fn delivered(&self) -> f64 {
        match &self.flows {
            Flows::Idle => 0.0,
            Flows::Packets(flows) => {
                let of =
                    |flow: &Flow| flow.delivered() as f64 / flow.segment_bytes() as f64 * self.mtu as f64;
                flows.iter().map(of).sum()
            }
            Flows::Streams(_) if self.setting.is_up => {
                self.world.destinations.iter().map(|other| other.received_bytes as f64).sum()
            }
            Flows::Streams(apps) => apps.iter().map(|app| app.received_bytes as f64).sum(),
        }
    }

    /// Bytes on the link of foreign flows so far: the tunnel's, and theirs.
    fn on_link(&self) -> [f64; 2] {
        let (link, flows) = &self.foreign;
        let link = &self.world.machines[self.client].links[link];
        let ours = if self.setting.is_up { link.up.carried } else { link.down.carried };
        [ours as f64, flows.iter().map(|flow| flow.delivered() as f64).sum()]
    }

    /// Answers the packets that have arrived, sends those that are due, and lets `step` pass.
    fn advance(&mut self, step: Duration, phase: &mut Phase) {
        let now = self.world.now;
        if self.setting.has_call && now >= self.next_frame {
            let number = self.frames.len() as u32;
            self.frame_up(number);
            let packet = self.frame(number, false);
            self.world.server_sends(packet);
            self.frames.push(now);
            self.next_frame += FRAME;
            phase.sent += 1;
        }
        let at_client = std::mem::take(&mut self.world.machines[self.client].received);
        let at_server = std::mem::take(&mut self.world.received_by_server);
        let (mut up, mut down) = (Vec::new(), Vec::new());
        for (direction, arrived) in [(0, at_server), (1, at_client)] {
            for (at, packet) in arrived {
                if let Some(numbers) = frame_numbers(&packet) {
                    let sent = numbers.filter_map(|number| self.frames.get(number as usize));
                    phase.delays[direction].extend(sent.map(|sent| at - *sent));
                    continue;
                }
                match &mut self.flows {
                    Flows::Idle => {}
                    Flows::Streams(apps) if direction == 1 => {
                        apps.iter_mut().for_each(|app| app.take(&packet))
                    }
                    Flows::Streams(_) => {}
                    Flows::Packets(flows) => {
                        let found = flows.iter_mut().find_map(|flow| Some((flow.is_mine(&packet)?, flow)));
                        match found {
                            Some((true, flow)) => {
                                let back = if direction == 0 { &mut down } else { &mut up };
                                back.extend(flow.receive(&packet));
                            }
                            Some((false, flow)) => flow.acknowledged(now, &packet),
                            None => {}
                        }
                    }
                }
            }
        }
        match &mut self.flows {
            Flows::Idle => {}
            Flows::Streams(apps) => up.extend(apps.iter_mut().flat_map(App::packets)),
            Flows::Packets(flows) => {
                let out = if self.setting.is_up { &mut up } else { &mut down };
                out.extend(flows.iter_mut().flat_map(|flow| flow.send(now)));
            }
        }
        up.into_iter().for_each(|packet| self.world.client_sends(self.client, packet));
        down.into_iter().for_each(|packet| self.world.server_sends(packet));
        self.advance_foreign(now);
        self.world.run(step);
    }

    fn advance_foreign(&mut self, now: Instant) {
        let (link, flows) = &mut self.foreign;
        let link = self.world.machines[self.client].links.get_mut(link).expect("their link");
        let (there, back) =
            if self.setting.is_up { (&mut link.up, &mut link.down) } else { (&mut link.down, &mut link.up) };
        let mut arrived = std::mem::take(&mut there.foreign);
        arrived.append(&mut back.foreign);
        for packet in arrived {
            match flows.iter_mut().find_map(|flow| Some((flow.is_mine(&packet)?, flow))) {
                Some((true, flow)) => {
                    if let Some(answer) = flow.receive(&packet) {
                        back.push_foreign(now, answer);
                    }
                }
                Some((false, flow)) => flow.acknowledged(now, &packet),
                None => {}
            }
        }
        for packet in flows.iter_mut().flat_map(|flow| flow.send(now)) {
            there.push_foreign(now, packet);
        }
    }

    fn change(&mut self) {
        let now = self.world.now;
        for (number, spec) in self.setting.changed().iter().enumerate() {
            let link =
                self.world.machines[self.client].links.get_mut(&LinkId(number as u16)).expect("a link");
            link.up.change(now, &spec.up);
            link.down.change(now, &spec.down);
        }
    }

    fn play(self) -> Run {
        self.play_for(LEAST)
    }

    /// The same, for at least so long.
    fn play_for(mut self, least: Duration) -> Run {
        let mut run = Run { mtu: self.mtu, ..Run::default() };
        let setting = self.setting.clone();
        let rtt = setting.rtt();
        let (start, time) = (self.world.now, (RTTS * rtt).max(least));
        let changes_at = setting.step.map(|_| start + time.mul_f64(CHANGE_AT));
        let shortest = setting.links.iter().map(rtt_of).min().unwrap_or_default();
        let step = (shortest / 8).clamp(MS / 5, MS);
        let mut is_changed = false;
        let mut unused = Phase::default();
        while self.world.now < start + time {
            let now = self.world.now;
            if !is_changed && changes_at.is_some_and(|at| now >= at) {
                is_changed = true;
                self.change();
            }
            let resumes_at = changes_at.map(|at| at + RTTS_AFTER_CHANGE * rtt + AFTER_CHANGE);
            let is_counted = now >= start + RTTS_BEFORE * rtt
                && !(is_changed && resumes_at.is_some_and(|resumes| now < resumes));
            let (bytes, on_link) = (self.delivered(), self.on_link());
            let phase = if is_counted { &mut run.phases[usize::from(is_changed)] } else { &mut unused };
            self.advance(step, phase);
            phase.counted += self.world.now - now;
            phase.bytes += self.delivered() - bytes;
            for (sum, (after, before)) in phase.on_link.iter_mut().zip(self.on_link().iter().zip(on_link)) {
                *sum += after - before;
            }
            if let Some(at) = changes_at.filter(|_| is_changed) {
                run.after_change.push((self.world.now - at, self.delivered()));
            }
        }
        run
    }
}

/// The numbers of packets of the call: those that arrive together may be joined.
fn frame_numbers(packet: &[u8]) -> Option<impl Iterator<Item = u32>> {
    let view = ip::parse(packet).ok().filter(|view| view.protocol() == 17)?;
    if view.ports().is_none_or(|(from, _)| from != CALL) {
        return None;
    }
    let numbers = view.transport().get(8..)?.chunks(FRAME_BYTES).filter_map(|payload| payload.first_chunk());
    Some(numbers.map(|number| u32::from_be_bytes(*number)))
}

/// A percentile of the delays of packets that arrived, ms.
fn percentile_ms(delays: &[Duration], percent: usize) -> Option<f64> {
    let mut sorted = delays.to_vec();
    sorted.sort_unstable();
    let place = (sorted.len() * percent / 100).min(sorted.len().checked_sub(1)?);
    Some(sorted[place].as_secs_f64() * 1e3)
}

/// How much later the call's packets came than without load, p99 in ms: the worse of both ways and phases.
fn added_ms(loaded: &Run, idle: &Run) -> Option<f64> {
    let of_way = |way: usize| {
        loaded.phases.iter().zip(&idle.phases).filter_map(move |(loaded, idle)| {
            Some(percentile_ms(&loaded.delays[way], 99)? - percentile_ms(&idle.delays[way], 99)?)
        })
    };
    (0..2).flat_map(of_way).reduce(f64::max)
}

/// Plays a setting and returns its line.
fn line(seed: u64, number: u64) -> String {
    if let Some(number) = number.checked_sub(worlds::FIRST) {
        return worlds::line(seed, number);
    }
    let began = RealInstant::now();
    let setting = Setting::draw(seed, number);
    let run_seed = seed.wrapping_mul(1000).wrapping_add(number);
    let run = |purpose| Played::new(&setting, run_seed, purpose).map(Played::play);
    let loaded = run(Purpose::Loaded);
    let idle = if setting.has_call { run(Purpose::Idle) } else { None };
    // The inner TCP over each link alone. A bottleneck is only behind the tunnel's links.
    let is_compared = setting.load == Load::Packets && setting.beside == Beside::Nothing;
    let plain = (0..if is_compared { setting.links.len() } else { 0 }).filter_map(|link| {
        let run = run(Purpose::Plain(link))?;
        let segments = run.phases.iter().map(|phase| phase.on_link[1] / SEGMENT_BYTES).sum::<f64>();
        Some(segments * f64::from(LINK_MTU))
    });
    let plain = plain.reduce(f64::max);
    let ceilings = [setting.ceiling(&setting.links), setting.ceiling(&setting.changed())];
    let (mut bytes, mut most, mut best, mut counted) = (0.0, 0.0, 0.0, Duration::ZERO);
    let (mut share, mut of_plain) = (None, None);
    let (mut added, mut lost, mut settled_ms) = (None, None, None);
    if let Some(run) = &loaded {
        let of_wire = match setting.load {
            Load::Packets => run.mtu as f64,
            Load::Streams => STREAM_BYTES,
        } / f64::from(LINK_MTU);
        for (phase, (all, one)) in run.phases.iter().zip(ceilings) {
            let seconds = phase.counted.as_secs_f64();
            bytes += phase.bytes;
            most += all * of_wire / 8.0 * seconds;
            best += one * of_wire / 8.0 * seconds;
            counted += phase.counted;
        }
        of_plain = plain.map(|plain| bytes / of_wire / plain.max(1.0));
        let on_link = [0, 1].map(|of| run.phases.iter().map(|phase| phase.on_link[of]).sum::<f64>());
        if matches!(setting.beside, Beside::Cubic | Beside::Bbr) {
            share = Some(on_link[0] / (on_link[0] + on_link[1]).max(1.0));
        }
        added = idle.as_ref().and_then(|idle| added_ms(run, idle));
        if setting.has_call {
            let sent: usize = run.phases.iter().map(|phase| phase.sent).sum();
            let arrived: usize = run.phases.iter().flat_map(|phase| &phase.delays).map(Vec::len).sum();
            lost = Some(1.0 - (arrived as f64 / (2 * sent).max(1) as f64).min(1.0));
        }
        let wanted = 0.9 * ceilings[1].0 * of_wire / 8.0;
        let window = (2 * setting.rtt()).max(100 * MS);
        let mut since = 0;
        for (at, delivered) in &run.after_change {
            while run.after_change[since].0 + window < *at {
                since += 1;
            }
            let (from, before) = run.after_change[since];
            if *at > window && delivered - before >= wanted * (*at - from).as_secs_f64() {
                settled_ms = Some((*at - window).as_secs_f64() * 1e3);
                break;
            }
        }
    }
    let slowest = setting.links.iter().chain(&setting.changed()).filter_map(|link| link.up.rate).min();
    let packet_ms = slowest.map_or(0.0, |rate| 8e3 * f64::from(LINK_MTU) / rate.bps() as f64);
    let beside = match setting.beside {
        Beside::Nothing => "nothing",
        Beside::Bottleneck(_) => "bottleneck",
        Beside::Cubic => "cubic",
        Beside::Bbr => "bbr",
    };
    let step = match setting.step {
        None => "none",
        Some(Step::Rate(_, factor)) if factor > 1.0 => "rate up",
        Some(Step::Rate(..)) => "rate down",
        Some(Step::Rtt(..)) => "rtt",
    };
    json!({
        "seed": seed,
        "number": number,
        "setting": setting.to_string(),
        "load": format!("{:?}", setting.load).to_lowercase(),
        "flows": setting.flows,
        "links": setting.links.len(),
        "loss": format!("{:?}", setting.loss).to_lowercase(),
        "beside": beside,
        "step": step,
        "call": setting.has_call,
        "is_up": loaded.is_some(),
        "utilisation": if most > 0.0 { bytes / most } else { 0.0 },
        "of_best_link": if best > 0.0 { bytes / best } else { 0.0 },
        "of_plain": of_plain,
        "counted_s": counted.as_secs_f64(),
        "call_added_ms": added,
        "call_lost": lost,
        "packet_ms": packet_ms,
        "buffer_bdp": setting.links[0].up.queue.as_secs_f64() / rtt_of(&setting.links[0]).as_secs_f64(),
        "settled_ms": settled_ms,
        "share": share,
        "took_s": began.elapsed().as_secs_f64(),
    })
    .to_string()
}

/// Flows up over these links, alone.
fn flows_up(links: &[&str], load: Load, flows: u16) -> Setting {
    Setting {
        links: links.iter().map(|link| link.parse().expect("a link")).collect(),
        loss: Loss::Random,
        beside: Beside::Nothing,
        step: None,
        load,
        flows,
        is_up: true,
        has_call: false,
        cc: CongestionControl::Bbr,
    }
}

/// The rate of a setting over at least so long (Mbit/s, with the tunnel's headers).
fn rate_of(setting: &Setting, least: Duration) -> f64 {
    let run = Played::new(setting, 1, Purpose::Loaded).expect("a tunnel").play_for(least);
    let phase = &run.phases[0];
    let of_wire = match setting.load {
        Load::Packets => run.mtu as f64,
        Load::Streams => STREAM_BYTES,
    } / f64::from(LINK_MTU);
    phase.bytes / of_wire * 8e-6 / phase.counted.as_secs_f64()
}

#[test]
fn a_lossy_link_of_half_a_second_adds_to_a_quick_one() {
    let [late, quick] = ["20mbit,280ms,loss=0.3%,queue=600ms", "8mbit,30ms,loss=1%,queue=100ms"];
    for (flows, least) in [(1, 0.6), (8, 0.9)] {
        let rate = rate_of(&flows_up(&[late, quick], Load::Packets, flows), LEAST);
        println!("{flows} flows: {rate:.1} Mbit/s");
        assert!(rate >= least * (20.0 * 0.997 + 8.0 * 0.99), "{flows} flows: {rate}");
    }
}

#[test]
fn cubic_takes_no_loss_of_the_medium_for_congestion() {
    let cases = [(Load::Streams, 3, 50.0), (Load::Streams, 10, 41.0), (Load::Streams, 30, 15.0)];
    // Here the TCP inside takes what is lost for congestion, too.
    for (load, loss, least) in cases.into_iter().chain([(Load::Packets, 10, 20.0)]) {
        let link = format!("60mbit,15ms,loss={loss}%,queue=60ms");
        let setting = Setting { cc: CongestionControl::Cubic, ..flows_up(&[&link], load, 1) };
        let rate = rate_of(&setting, Duration::from_secs(10));
        println!("{loss} %, {load:?}: {rate:.1} Mbit/s");
        assert!(rate >= least, "{loss} %, {load:?}: {rate}");
    }
}

#[test]
fn cubic_shares_a_link_with_a_flow_of_the_kernels_cubic() {
    for queue_ms in [30, 60, 120] {
        let link = format!("20mbit,15ms,queue={queue_ms}ms");
        let setting = Setting {
            cc: CongestionControl::Cubic,
            beside: Beside::Cubic,
            ..flows_up(&[&link], Load::Streams, 1)
        };
        let run =
            Played::new(&setting, 1, Purpose::Loaded).expect("a tunnel").play_for(Duration::from_secs(40));
        let [ours, theirs] = run.phases[0].on_link;
        let share = ours / (ours + theirs);
        println!("queue of {queue_ms} ms: {share:.2}");
        assert!((0.35..=0.65).contains(&share), "queue of {queue_ms} ms: {share}");
    }
}

#[test]
#[ignore = "hundreds of settings: ./dev bench sweep plays them"]
fn sweep() {
    let number = |name: &str, usual: u64| {
        env::var(name)
            .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
    };
    let (seed, count) = (number("SWEEP_SEED", 1), number("SWEEP_COUNT", 4));
    let first = number("SWEEP_FIRST", 0);
    let next = AtomicU64::new(first);
    let lines = Mutex::new(());
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= first + count {
                        return;
                    }
                    let played = catch_unwind(AssertUnwindSafe(|| line(seed, number)));
                    let _one_at_a_time = lines.lock().expect("nobody panics while printing");
                    match played {
                        Ok(line) => println!("SWEEP {line}"),
                        Err(_) => {
                            println!("SWEEP {}", json!({ "seed": seed, "number": number, "panicked": true }))
                        }
                    }
                }
            });
        }
    });
}
