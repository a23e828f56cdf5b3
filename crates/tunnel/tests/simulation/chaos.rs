//! Hours of a client whose links are harmed at random: never stuck, and memory that does not grow.
//!
//! Two simulated hours and one seed by default; `MPVPN_SOAK_HOURS` and `MPVPN_SOAK_SEEDS` say otherwise, as
//! `./dev soak` does. A failure names its seed, which `MPVPN_SOAK_FIRST` starts with, and when it came.

use std::{net::SocketAddr, process::Command};

use crate::world::{MS, SERVER, TOKEN, World};
use mpvpn_lab::{ChannelParams, LinkSpec};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::ClientState;
use mpvpn_types::{BitRate, CongestionControl, Duration, Instant, LinkId};

const LINKS: usize = 3;
const SECOND: Duration = Duration::from_secs(1);
/// So long after any single link is healthy, packets flow.
const RECOVER_WITHIN: Duration = Duration::from_secs(2);
/// The same where the connection had timed out and must be made anew: the next handshake begins within a
/// second, takes four round trips of up to 400 ms, and one packet in ten of it may be lost.
const RECONNECT_WITHIN: Duration = Duration::from_secs(4);
/// How long packets are sent after each event; then the tunnel is idle until the next.
const BUSY: Duration = Duration::from_secs(4);
/// Between two pings.
const STEP: Duration = Duration::from_millis(100);
/// The round trip at a delay of at most 200 ms and a queue of 60 ms.
const ANSWER: Duration = Duration::from_millis(600);
/// Until then everything has been as large as it gets, histories of the links included.
const WARM: Duration = Duration::from_secs(5400);
/// Growth of the process beyond that, bytes.
const GROWTH: u64 = 8 << 20;
/// Set in the process that runs the story.
const ALONE: &str = "MPVPN_CHAOS_ALONE";

/// A link, as it was harmed last.
#[derive(Clone, Debug)]
struct Health {
    spec: LinkSpec,
    carrier: bool,
    /// Since when it can carry packets both ways, if it can.
    healthy: Option<Instant>,
}

struct Chaos {
    seed: u64,
    /// The longest time without an answer although a link was healthy.
    latest: Duration,
    random: u64,
    world: World,
    client: usize,
    health: Vec<Health>,
    start: Instant,
    addresses: u16,
    sent: u32,
    /// When there was no connection last.
    apart: Option<Instant>,
    /// When the last ping was answered.
    answered: Instant,
    events: Vec<String>,
}

#[test]
fn packets_flow_2_s_after_any_link_is_healthy_whatever_happens() {
    if std::env::var_os(ALONE).is_none() {
        // The growth of memory is that of a process, in which no other story may run.
        let story = std::thread::current().name().expect("the name of the story").to_owned();
        let program = std::env::current_exe().expect("this program");
        let ended = Command::new(program).args(["--exact", &story, "--nocapture"]).env(ALONE, "1").status();
        assert!(ended.expect("it starts").success(), "see above");
        return;
    }
    let number =
        |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (hours, seeds) = (number("MPVPN_SOAK_HOURS", 2), number("MPVPN_SOAK_SEEDS", 1));
    let first = number("MPVPN_SOAK_FIRST", 1);
    for seed in first..first + seeds {
        Chaos::new(seed).run(SECOND * u32::try_from(hours * 3600).expect("hours"));
    }
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let mut world = World::new();
        let spec = |index: usize| {
            let (rate, delay) = [(50, 10), (20, 25), (100, 5)][index % 3];
            let rate = Some(BitRate::from_bps(rate * 1_000_000));
            let params =
                ChannelParams { rate, delay: delay * MS, mtu: Some(1500), ..ChannelParams::default() };
            LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() }
        };
        let specs: Vec<LinkSpec> = (0..LINKS).map(spec).collect();
        let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Bbr, &specs);
        world.up(client);
        world.run(SECOND);
        let now = world.now;
        let health =
            specs.into_iter().map(|spec| Health { spec, carrier: true, healthy: Some(now) }).collect();
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self {
            seed,
            latest: Duration::ZERO,
            random,
            world,
            client,
            health,
            start: now,
            addresses: 0,
            sent: 0,
            apart: None,
            answered: now,
            events: Vec::new(),
        }
    }

    fn run(mut self, time: Duration) {
        let end = self.start + time;
        let mut warm = None;
        while self.world.now < end {
            self.impair();
            let idle = match self.below(4) {
                0 => Duration::from_millis(self.below(1000)),
                1..=2 => SECOND * self.below(15) as u32,
                _ => SECOND * self.below(60) as u32,
            };
            self.send_both_ways(BUSY.min(idle.max(STEP)));
            self.world.run(idle.saturating_sub(BUSY));
            self.forget();
            if self.world.now > self.start + WARM {
                warm.get_or_insert_with(resident);
            }
        }
        // Everything heals, and everything works.
        for index in 0..LINKS {
            self.heal(index);
        }
        self.send_both_ways(RECOVER_WITHIN + SECOND);
        let grown = resident().saturating_sub(warm.unwrap_or_else(resident));
        assert!(grown < GROWTH, "seed {}: {grown} bytes more than after {WARM:?}", self.seed);
        println!(
            "seed {}: {time:?}, {} pings, at most {:?} without an answer beside a healthy link, {grown} bytes more",
            self.seed, self.sent, self.latest
        );
    }

    fn below(&mut self, limit: u64) -> u64 {
        // xorshift: the seed determines all numbers.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % limit
    }

    /// Something happens to one link.
    fn impair(&mut self) {
        let index = self.below(LINKS as u64) as usize;
        let usual = [(50, 10), (20, 25), (100, 5)][index];
        match self.below(10) {
            0..=2 => return self.heal(index),
            3 => self.set_carrier(index, false),
            4 => self.health[index].spec.up.loss = 1.0,
            5 => self.health[index].spec.down.loss = 1.0,
            6 if self.below(2) == 0 => {
                let spec = &mut self.health[index].spec;
                (spec.up.loss, spec.down.loss) = (1.0, 1.0);
            }
            6 => {
                let loss = self.below(10) as f64 / 100.0;
                (self.health[index].spec.up.loss, self.health[index].spec.down.loss) = (loss, loss);
            }
            7 => {
                let delay = MS * (usual.1 + self.below(150) as u32);
                (self.health[index].spec.up.delay, self.health[index].spec.down.delay) = (delay, delay);
            }
            8 => {
                // The NAT on the way gives the link another address and port, without notice.
                self.addresses += 1;
                let (number, other_ip) = (self.addresses, self.below(2) == 0);
                let link = self.link(index);
                let [high, low] = number.to_be_bytes();
                if other_ip {
                    link.address.set_ip([203, 0, high, low].into());
                }
                link.address.set_port(5000 + number % 50_000);
            }
            _ => {
                // A flap: away and back at once.
                self.set_carrier(index, false);
                let short = Duration::from_millis(self.below(300));
                self.world.run(short);
                self.set_carrier(index, true);
            }
        }
        self.apply(index);
    }

    fn heal(&mut self, index: usize) {
        let spec = &mut self.health[index].spec;
        (spec.up.loss, spec.down.loss) = (0.0, 0.0);
        let delay = [10, 25, 5][index] * MS;
        (spec.up.delay, spec.down.delay) = (delay, delay);
        if !self.health[index].carrier {
            self.set_carrier(index, true);
        }
        self.apply(index);
    }

    fn set_carrier(&mut self, index: usize, on: bool) {
        let (now, id) = (self.world.now, LinkId(index as u16));
        let client = &mut self.world.machines[self.client].client;
        if on {
            client.link_up(now, id, SERVER.parse().unwrap());
        } else {
            client.link_down(now, id);
        }
        self.health[index].carrier = on;
        self.apply(index);
    }

    fn apply(&mut self, index: usize) {
        let now = self.world.now;
        let Health { spec, carrier, healthy } = self.health[index].clone();
        let (mut up, mut down) = (spec.up, spec.down);
        if !carrier {
            (up.loss, down.loss) = (1.0, 1.0);
        }
        let is_healthy = up.loss.max(down.loss) < 0.1;
        // A change of address or of a link restarts the measurement.
        self.health[index].healthy =
            is_healthy.then_some(now).filter(|_| is_healthy).or(healthy.filter(|_| is_healthy));
        let link = self.link(index);
        link.up.change(now, &up);
        link.down.change(now, &down);
        let state: Vec<String> = self
            .health
            .iter()
            .map(|h| {
                format!("{}/{:.2}/{:.2}/{:?}", h.carrier, h.spec.up.loss, h.spec.down.loss, h.spec.up.delay)
            })
            .collect();
        self.events.push(format!("{:?} link {index}: {}", now - self.start, state.join("  ")));
    }

    fn link(&mut self, index: usize) -> &mut crate::world::Link {
        let machine = &mut self.world.machines[self.client];
        machine.links.get_mut(&LinkId(index as u16)).expect("a link that exists")
    }

    /// Pings for `time`, now and then with a burst of data, and holds the tunnel to its promise.
    fn send_both_ways(&mut self, time: Duration) {
        let began = self.world.now;
        let burst = self.below(4) == 0;
        let mut first_unanswered: Option<Instant> = None;
        // A silence that has begun is measured to its end.
        while self.world.now < began + time || first_unanswered.is_some() && self.is_any_healthy() {
            self.sent += 1;
            let ping = self.world.packet_to_target(self.client, &self.sent.to_be_bytes());
            self.world.client_sends(self.client, ping);
            for _ in 0..if burst { 20 } else { 0 } {
                let data = self.world.packet_to_client(self.client, &[7; 1200]);
                self.world.server_sends(data);
            }
            first_unanswered.get_or_insert(self.world.now);
            self.world.run(STEP / 2);
            let arrived = !std::mem::take(&mut self.world.received_by_server).is_empty();
            if arrived {
                // Another flow than the burst, which may wait for its turn.
                let to = SocketAddr::new(self.world.address(self.client, true), 4000);
                let answer =
                    mpvpn_packets::Packet::between("203.0.113.9:7".parse().unwrap(), to).udp(b"answer");
                self.world.server_sends(answer);
            }
            self.world.run(STEP / 2);
            let answers = std::mem::take(&mut self.world.machines[self.client].received);
            if answers.iter().any(|(_, packet)| packet.ends_with(b"answer")) {
                self.answered = self.world.now;
                first_unanswered = None;
            }
            self.check(first_unanswered);
        }
    }

    fn is_any_healthy(&self) -> bool {
        self.health.iter().any(|health| health.healthy.is_some())
    }

    /// Nothing was answered since `since`, although a link has been healthy for long enough?
    fn check(&mut self, since: Option<Instant>) {
        let now = self.world.now;
        let Some(since) = since else { return };
        let healthy = self.health.iter().filter_map(|health| health.healthy).min();
        let Some(healthy) = healthy else { return };
        let late = now.saturating_duration_since(since).min(now.saturating_duration_since(healthy));
        self.latest = self.latest.max(late);
        if self.world.machines[self.client].client.report(now).state != ClientState::Up {
            self.apart = Some(now);
        }
        let anew = self.apart.is_some_and(|at| at >= since.max(healthy));
        if late <= if anew { RECONNECT_WITHIN } else { RECOVER_WITHIN } + ANSWER {
            return;
        }
        let fatal = self.world.machines[self.client].fatal.clone();
        let report = self.world.machines[self.client].client.report(now);
        let paths: Vec<_> =
            report.paths.iter().map(|path| (path.link, path.state, path.reason.as_str())).collect();
        let sessions = self.world.servers[0].report(now);
        let there = sessions.iter().flat_map(|session| &session.paths);
        let there: Vec<_> = there.map(|path| (path.view.id, path.state, path.reason.as_str())).collect();
        panic!(
            "seed {}: stuck at {:?}, no answer for {:?}, {:?} {fatal:?}, paths {paths:?}, at the server {there:?}; the \
             last events:\n{}",
            self.seed,
            now - self.start,
            now - self.answered,
            report.state,
            self.events[self.events.len().saturating_sub(12)..].join("\n")
        );
    }

    /// Clears the lists that the world keeps for other tests, which would grow.
    fn forget(&mut self) {
        self.world.received_by_server.clear();
        self.world.machines[self.client].received.clear();
        if self.events.len() > 100 {
            self.events.drain(..50);
        }
    }
}

/// Resident memory of this process, bytes.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
