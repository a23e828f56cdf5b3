//! Chooses among the servers of a client.
//!
//! In: whether the server in use is heard, what moves, answers of the others, the time. Out: whom to ask, and
//! which server to use, and why. Always holds: a server whose session stands is left only when another one
//! has answered a question since it was heard last, over links on which it was asked at the same time, or
//! when a preferred one has answered for [`HEALTHY_AFTER`].

use std::time::Instant;

use derive_more::Display;
use mpvpn_config::{Choose, Return, Server};
use mpvpn_path::next_probe_at;
use mpvpn_status::ServerInUse;
use mpvpn_tunnel::ServerAnswer;
use mpvpn_types::Duration;

/// A server with a session is left after this silence, or five round trips if these are longer. Shorter: an
/// outage of the links ends connections; longer: people wait. Given by the design.
const LEAVE_AFTER: Duration = Duration::from_secs(3);
/// Round trips of silence after which a server is left, where these are longer. Fewer: one lost packet may
/// do; more: slow links wait.
const LEAVE_AFTER_RTTS: u32 = 5;
/// A server that has not answered yet is left after this time, if another one answers. Longer: a dead first
/// server delays the start; shorter: slow links begin at another server. Chosen; a handshake takes two round
/// trips.
const START_AFTER: Duration = Duration::from_secs(1);
/// Without any answer the next server is tried after this time, as questions may not reach what a connection
/// reaches (by TCP, by another address family). Shorter: a slow connection by TCP is given up; longer: a dead
/// first server delays the start there. Chosen.
const NEXT_SERVER_AFTER: Duration = Duration::from_secs(8);
/// The shortest pause between questions while nothing is heard; it grows with the silence, as that of other
/// probes (docs/design/liveness.md). Shorter: more handshakes; longer: a server that is back is found later.
/// Chosen.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// The silence after which the others are asked. Shorter: short gaps cost handshakes; longer than
/// [`LEAVE_AFTER`] less a handshake: the change waits for the answer. Chosen.
const ASK_AFTER: Duration = Duration::from_millis(500);
/// The pause between questions to preferred servers. Shorter: more handshakes at servers; longer: an outage
/// in between is not seen. Chosen; three questions in [`HEALTHY_AFTER`].
const HEALTH_INTERVAL: Duration = Duration::from_secs(20);
/// A preferred server is used again after it has answered for this long. Shorter: a server that fails again
/// and again ends connections; longer: a worse server is used for longer. Given by the design.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// The most doublings of that. Fewer: a server that fails each hour is used each hour; more: it is never used
/// again. Chosen.
const MAX_DOUBLINGS: u32 = 6;
/// A server that refused this client is not chosen for this long, unless it is the next in order. Shorter: it
/// is asked in vain; longer: a new token counts later. Chosen.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// The client is idle when nothing has moved for this long. Shorter: pauses of people end their connections;
/// longer: chatty machines never return. Given by the design.
const IDLE_AFTER: Duration = Duration::from_secs(30);
/// The pause until the next look where there is nobody to prefer. Longer or shorter: nothing changes.
const NOTHING_TO_DO: Duration = Duration::from_secs(3600);
/// The nearest server has to have less than this part of the round trip: numerator and denominator. More:
/// noise changes the server; less: a worse one is used for longer. Chosen.
const NEARER_PARTS: (u32, u32) = (3, 4);

/// The server in use, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub(super) struct InUse {
    /// Whether its packets arrive.
    pub(super) is_reached: bool,
    /// When something of it last arrived, or it was chosen.
    pub(super) heard: Instant,
    /// The last reason to ask anew for servers that are not heard.
    pub(super) asks_since: Instant,
    /// Its round-trip time over the best path.
    pub(super) rtt: Duration,
    /// Bytes that the tunnel has carried in all.
    pub(super) carried: u64,
}

/// Why a server is used.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub(super) enum Why {
    /// It is the preferred one.
    #[display("it is the preferred server")]
    Preferred,
    /// The nearest is wanted.
    #[display("it answered first")]
    First,
    /// The one before is silent, and this one answers.
    #[display("{_0} has been silent for {_1} s, and this server answers")]
    Answers(String, u64),
    /// None answers; each has its turn.
    #[display("{_0} does not answer")]
    NoAnswer(String),
    /// The one before refuses this client.
    #[display("{_0} refuses this client: {_1}")]
    Refused(String, String),
    /// A preferred one works again.
    #[display("it is preferred, and answers again")]
    Healthy,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Ask these servers: over all links, together with the one in use, or over the link that costs least.
    Probe { whom: Vec<usize>, over_all: bool },
    /// Use this server.
    Use(usize, Why),
}

/// The knowledge about a server.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The last answer: when it was asked, and how long it took.
    answered: Option<(Instant, Duration)>,
    /// Since when each question was answered.
    healthy_since: Option<Instant>,
    /// How often it was left because it was silent; each doubles the time of health that it needs.
    lapses: u32,
    /// When it refused this client for good.
    refused_at: Option<Instant>,
}

/// The servers of a client, and which of them it uses.
#[derive(Debug)]
pub(super) struct ServerChoice {
    names: Vec<String>,
    /// The servers, the preferred ones first; those that are equally good by their numbers.
    by_preference: Vec<usize>,
    choose: Choose,
    return_when: Return,
    known: Vec<Known>,
    in_use: usize,
    chosen_at: Instant,
    why: Why,
    /// Whether it has had a session of this client since it was chosen.
    has_session: bool,
    /// The bytes that the tunnel has carried, and when that number was last seen to change.
    carried: (u64, Instant),
    /// When others were asked last, since the server in use was chosen.
    probed_at: Option<Instant>,
    next_check: Instant,
    was_reached: bool,
}

impl ServerChoice {
    /// The choice among several servers; `chance` draws numbers below its argument.
    pub(super) fn new(
        now: Instant,
        servers: &[Server],
        choose: Choose,
        return_when: Return,
        chance: impl FnMut(u32) -> u32,
    ) -> Self {
        let by_preference = match choose {
            Choose::Order | Choose::Nearest => (0..servers.len()).collect(),
            Choose::Weighted => drawn(servers, chance),
        };
        Self {
            names: servers.iter().map(|server| server.address.to_string()).collect(),
            in_use: by_preference[0],
            by_preference,
            choose,
            return_when,
            known: vec![Known::default(); servers.len()],
            chosen_at: now,
            why: Why::Preferred,
            has_session: false,
            carried: (0, now),
            probed_at: None,
            next_check: now,
            was_reached: false,
        }
    }

    /// The number of the server in use.
    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    /// The server in use, for the status.
    pub(super) fn status(&self) -> ServerInUse {
        let others = self.names.iter().enumerate().filter(|(at, _)| *at != self.in_use);
        ServerInUse {
            address: self.names[self.in_use].clone(),
            why: self.why.to_string(),
            others: others.map(|(_, name)| name.clone()).collect(),
        }
    }

    /// A server was asked, and has answered or not: [`Self::update`] is due.
    pub(super) fn on_answer(&mut self, answer: &ServerAnswer) {
        self.next_check = answer.probed_at;
        let known = &mut self.known[answer.server];
        match answer.result {
            Ok(rtt) => {
                known.answered = known.answered.max(Some((answer.probed_at, rtt)));
                known.healthy_since = known.healthy_since.or(Some(answer.probed_at));
            }
            // Another link may have answered the same question.
            Err(_) if known.answered.is_some_and(|(probed_at, _)| probed_at >= answer.probed_at) => {}
            Err(_) => known.healthy_since = None,
        }
    }

    /// The server in use refuses this client for good. Returns the next one, unless all do.
    pub(super) fn on_refused(&mut self, now: Instant, reason: &str) -> Option<Order> {
        self.known[self.in_use].refused_at = Some(now);
        let next = self.next_in_order();
        let all = self.known.iter().all(|known| known.refused_at.is_some());
        (!all).then(|| {
            self.use_server(now, next, Why::Refused(self.names[self.in_use].clone(), reason.to_owned()))
        })
    }

    /// The server in use has a session of this client.
    pub(super) fn on_up(&mut self) {
        self.known[self.in_use].refused_at = None;
        self.has_session = true;
    }

    /// Whether [`Self::update`] has something to do.
    pub(super) fn is_due(&self, now: Instant, is_reached: bool) -> bool {
        is_reached != self.was_reached || now >= self.next_check
    }

    /// When it has something to do, unless the server falls silent before.
    pub(super) fn poll_timeout(&self) -> Instant {
        self.next_check
    }

    /// Decides; to be called again and again while it gives orders.
    pub(super) fn update(&mut self, now: Instant, server: InUse) -> Option<Order> {
        self.was_reached = server.is_reached;
        if self.carried.0 != server.carried {
            self.carried = (server.carried, now);
        }
        if server.is_reached { self.while_reached(now, server) } else { self.while_silent(now, server) }
    }

    fn while_silent(&mut self, now: Instant, server: InUse) -> Option<Order> {
        let heard = server.heard.max(self.chosen_at);
        let silence = now.saturating_duration_since(heard);
        let (limit, first) = match (self.has_session, self.choose) {
            (true, _) => (LEAVE_AFTER.max(server.rtt * LEAVE_AFTER_RTTS), ASK_AFTER),
            // The first answer wins.
            (false, Choose::Nearest) => (Duration::ZERO, Duration::ZERO),
            (false, Choose::Order | Choose::Weighted) => (START_AFTER, ASK_AFTER),
        };
        // The server in use was asked at the same time, and had as long for its answer.
        let answers_at = |at: &usize| {
            let known = &self.known[*at];
            let refuses = known.refused_at.is_some_and(|refused| now < refused + REFUSED_FOR);
            let (probed_at, rtt) = known.answered.filter(|(probed_at, _)| *probed_at > heard && !refuses)?;
            (*at != self.in_use).then(|| (probed_at + rtt.max(server.rtt) * 2).max(heard + limit))
        };
        let answers = |at: &usize| answers_at(at).is_some_and(|at| at <= now);
        if let Some(at) = self.by_preference.iter().copied().find(answers) {
            let why = match limit.is_zero() {
                true => Why::First,
                false => Why::Answers(self.names[self.in_use].clone(), silence.as_secs()),
            };
            self.known[self.in_use].lapses += u32::from(self.has_session);
            return Some(self.use_server(now, at, why));
        }
        let next_server_at = (!self.has_session).then_some(heard + NEXT_SERVER_AFTER);
        if next_server_at.is_some_and(|next_server_at| next_server_at <= now) {
            let why = Why::NoAnswer(self.names[self.in_use].clone());
            return Some(self.use_server(now, self.next_in_order(), why));
        }
        let eligible = self.by_preference.iter().filter_map(answers_at).min();
        let since = heard.max(server.asks_since);
        let next = self.probed_at.filter(|at| *at > heard);
        let next = next.map_or(heard + first, |at| next_probe_at(at, since, ASK_INTERVAL, false));
        let order = if now >= next { self.probe(now, true, |_| true) } else { None };
        let next = if order.is_some() { now + ASK_INTERVAL } else { next };
        self.next_check = [Some(next), next_server_at, eligible].into_iter().flatten().min().unwrap_or(next);
        order
    }

    fn while_reached(&mut self, now: Instant, server: InUse) -> Option<Order> {
        let preferred: Vec<usize> =
            self.by_preference.iter().copied().filter(|at| self.is_preferred(*at, server.rtt)).collect();
        let nearest = self.choose == Choose::Nearest;
        if self.return_when == Return::Never || preferred.is_empty() && !nearest {
            self.next_check = now + NOTHING_TO_DO;
            return None;
        }
        let is_idle = now.saturating_duration_since(self.carried.1) >= IDLE_AFTER;
        let is_healthy = |at: &usize| {
            let Known { healthy_since, lapses, answered, .. } = &self.known[*at];
            let needed = HEALTHY_AFTER * (1 << lapses.saturating_sub(1).min(MAX_DOUBLINGS));
            // Where no link leads to it any more, it is not asked, and has no answer that is missing.
            let is_new = answered.is_some_and(|(probed_at, _)| now < probed_at + 2 * HEALTH_INTERVAL);
            is_new && healthy_since.is_some_and(|since| now.saturating_duration_since(since) >= needed)
        };
        if (is_idle || self.return_when == Return::Now)
            && let Some(at) = preferred.iter().copied().find(is_healthy)
        {
            return Some(self.use_server(now, at, Why::Healthy));
        }
        let next = self.probed_at.map_or(now, |at| at + HEALTH_INTERVAL);
        if now < next {
            self.next_check = next;
            return None;
        }
        self.next_check = now + HEALTH_INTERVAL;
        self.probe(now, false, |at| nearest || preferred.contains(&at))
    }

    /// Whether a server is preferred to the one in use, whose round-trip time is `rtt`.
    fn is_preferred(&self, at: usize, rtt: Duration) -> bool {
        let place = |of: usize| self.by_preference.iter().position(|at| *at == of);
        match self.choose {
            Choose::Order | Choose::Weighted => place(at) < place(self.in_use),
            // A handshake takes a round trip and the time for its cryptography.
            Choose::Nearest => {
                let (parts, of) = NEARER_PARTS;
                at != self.in_use && self.known[at].answered.is_some_and(|(_, own)| own * of < rtt * parts)
            }
        }
    }

    fn next_in_order(&self) -> usize {
        let own = self.by_preference.iter().position(|at| *at == self.in_use).unwrap_or(0);
        self.by_preference[(own + 1) % self.by_preference.len()]
    }

    fn probe(&mut self, now: Instant, over_all: bool, wanted: impl Fn(usize) -> bool) -> Option<Order> {
        self.probed_at = Some(now);
        let whom: Vec<usize> = (0..self.names.len()).filter(|at| *at != self.in_use && wanted(*at)).collect();
        (!whom.is_empty()).then_some(Order::Probe { whom, over_all })
    }

    fn use_server(&mut self, now: Instant, at: usize, why: Why) -> Order {
        (self.in_use, self.chosen_at, self.why) = (at, now, why.clone());
        (self.has_session, self.probed_at, self.next_check) = (false, None, now);
        self.known.iter_mut().for_each(|known| known.healthy_since = None);
        Order::Use(at, why)
    }
}

/// The servers in an order by chance, in which each comes before the others as often as its weight says.
fn drawn(servers: &[Server], mut chance: impl FnMut(u32) -> u32) -> Vec<usize> {
    let mut left: Vec<usize> = (0..servers.len()).collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let weight = |at: usize| u32::from(servers[at].weight);
        let sum: u32 = left.iter().map(|at| weight(*at)).sum();
        let mut drawn = chance(sum.max(1));
        let at = left.iter().position(|at| {
            let is_here = drawn < weight(*at);
            drawn = drawn.saturating_sub(weight(*at));
            is_here
        });
        order.push(left.remove(at.unwrap_or(0)));
    }
    order
}

#[cfg(test)]
mod tests {
    use mpvpn_identity::trust::Trust;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const S: Duration = Duration::from_secs(1);
    const RTT: Duration = Duration::from_millis(40);

    fn servers(weights: &[u16]) -> Vec<Server> {
        let one = |(number, weight): (usize, &u16)| Server {
            address: format!("{number}.example").parse().unwrap(),
            trust: Trust::System,
            token: None,
            token_file: None,
            weight: *weight,
        };
        weights.iter().enumerate().map(one).collect()
    }

    /// A client in simulated time, by milliseconds.
    struct World {
        begin: Instant,
        now: Instant,
        choice: ServerChoice,
        /// Which servers answer, and after which time.
        alive: Vec<Option<Duration>>,
        heard: Instant,
        /// Something moves at all times until then.
        busy_until: Instant,
        carried: u64,
        probes: usize,
        changes: Vec<(u64, usize)>,
    }

    impl World {
        fn new(alive: &[Option<Duration>], choose: Choose, return_when: Return) -> Self {
            let now = Instant::now();
            let choice = ServerChoice::new(now, &servers(&vec![1; alive.len()]), choose, return_when, |_| 0);
            Self {
                begin: now,
                now,
                choice,
                alive: alive.to_vec(),
                heard: now,
                busy_until: now,
                carried: 0,
                probes: 0,
                changes: Vec::new(),
            }
        }

        fn run(&mut self, time: Duration) -> &[(u64, usize)] {
            self.changes.clear();
            let end = self.now + time;
            let mut coming: Vec<ServerAnswer> = Vec::new();
            while self.now < end {
                self.now += 10 * MS;
                let now = self.now;
                let used = self.choice.in_use();
                self.carried += u64::from(now < self.busy_until);
                let connected_at = |rtt: Duration| self.choice.chosen_at + rtt * 2;
                let is_reached = self.alive[used].is_some_and(|rtt| now >= connected_at(rtt));
                if is_reached {
                    self.choice.on_up();
                    self.heard = now;
                }
                let due = |answer: &ServerAnswer| answer.probed_at + *answer.result.as_ref().unwrap() <= now;
                for answer in coming.extract_if(.., |answer| due(answer)) {
                    self.choice.on_answer(&answer);
                }
                let in_use = InUse {
                    is_reached,
                    heard: self.heard,
                    asks_since: self.heard,
                    rtt: RTT,
                    carried: self.carried,
                };
                while self.choice.is_due(now, is_reached)
                    && let Some(order) = self.choice.update(now, in_use)
                {
                    match order {
                        Order::Probe { whom, over_all } => {
                            assert_eq!(over_all, !is_reached);
                            self.probes += whom.len();
                            for server in whom {
                                match self.alive[server] {
                                    Some(rtt) => {
                                        coming.push(ServerAnswer { server, probed_at: now, result: Ok(rtt) })
                                    }
                                    None => self.choice.on_answer(&ServerAnswer {
                                        server,
                                        probed_at: now,
                                        result: Err("no answer".into()),
                                    }),
                                }
                            }
                        }
                        Order::Use(at, _) => {
                            self.changes.push(((now - self.begin).as_millis() as u64, at));
                            break;
                        }
                    }
                }
            }
            &self.changes
        }
    }

    #[test]
    fn a_dead_first_server_delays_the_start_by_a_second() {
        let mut world = World::new(&[None, Some(RTT)], Choose::Order, Return::Idle);
        let changes = world.run(10 * S).to_vec();
        assert!(matches!(changes[..], [(1000..1100, 1)]), "{changes:?}");
    }

    #[test]
    fn the_first_server_is_used_while_it_answers_and_nobody_else_is_asked() {
        let mut world = World::new(&[Some(100 * MS), Some(RTT)], Choose::Order, Return::Idle);
        assert_eq!(world.run(600 * S), []);
        assert_eq!(world.probes, 0);
    }

    #[test]
    fn a_server_is_left_after_three_seconds_of_silence() {
        let mut world = World::new(&[Some(RTT), Some(RTT), Some(RTT)], Choose::Order, Return::Never);
        world.run(10 * S);
        world.alive[0] = None;
        let changes = world.run(10 * S).to_vec();
        assert!(matches!(changes[..], [(13_000..13_100, 1)]), "{changes:?}");
    }

    #[test]
    fn a_client_without_any_answer_keeps_its_server() {
        let mut world = World::new(&[Some(RTT), Some(RTT)], Choose::Order, Return::Idle);
        world.run(10 * S);
        world.alive = vec![None, None];
        assert_eq!(world.run(600 * S), []);
        world.alive = vec![Some(RTT), Some(RTT)];
        assert_eq!(world.run(600 * S), []);
    }

    #[test]
    fn each_server_has_its_turn_where_questions_have_no_answer() {
        let mut world = World::new(&[None, None, None], Choose::Order, Return::Idle);
        let used: Vec<usize> = world.run(30 * S).iter().map(|(_, at)| *at).collect();
        assert_eq!(used, [1, 2, 0]);
    }

    #[test]
    fn a_client_returns_after_a_minute_of_health_once_it_is_idle() {
        for (return_when, idle, expected) in [
            (Return::Now, false, true),
            (Return::Idle, false, false),
            (Return::Idle, true, true),
            (Return::Never, true, false),
        ] {
            let mut world = World::new(&[None, Some(RTT)], Choose::Order, return_when);
            world.run(20 * S);
            let back = world.now;
            world.alive[0] = Some(RTT);
            world.busy_until = if idle { world.now } else { world.now + 1000 * S };
            let changes = world.run(100 * S).to_vec();
            assert_eq!(!changes.is_empty(), expected, "{return_when:?} {idle} {changes:?}");
            for (at, server) in changes {
                let after = at - (back - world.begin).as_millis() as u64;
                assert!(server == 0 && (60_000..=81_000).contains(&after), "after {after} ms");
            }
        }
    }

    #[test]
    fn a_server_that_cannot_be_asked_any_more_is_not_returned_to() {
        let mut world = World::new(&[None, Some(RTT)], Choose::Order, Return::Idle);
        world.run(20 * S);
        world.alive[0] = Some(RTT);
        world.busy_until = world.now + 1000 * S;
        assert_eq!(world.run(100 * S), []);
        // It has answered for a minute; since then it is neither asked nor used.
        (world.choice.probed_at, world.busy_until) = (Some(world.now + 1000 * S), world.now);
        world.choice.carried = (world.carried, world.now);
        world.now += 50 * S;
        assert_eq!(world.run(60 * S), []);
    }

    #[test]
    fn a_server_that_fails_each_three_minutes_is_soon_left_alone() {
        let mut world = World::new(&[Some(RTT), Some(RTT)], Choose::Order, Return::Now);
        world.run(10 * S);
        let mut changes = 0;
        for _ in 0..20 {
            world.alive[0] = None;
            changes += world.run(30 * S).len();
            world.alive[0] = Some(RTT);
            changes += world.run(150 * S).len();
        }
        assert!((3..=7).contains(&changes), "{changes} changes in an hour");
    }

    #[test]
    fn a_server_that_refuses_has_its_turn_only_until_all_do() {
        let now = Instant::now();
        let mut choice = ServerChoice::new(now, &servers(&[1, 1]), Choose::Order, Return::Idle, |_| 0);
        let reason = || Why::Refused("0.example:443".into(), "no such user".into());
        assert_eq!(choice.on_refused(now, "no such user"), Some(Order::Use(1, reason())));
        choice.on_up();
        assert!(choice.on_refused(now, "revoked").is_none(), "both refuse");
    }

    #[test]
    fn the_nearest_server_is_the_one_that_answers_first() {
        let mut world = World::new(&[Some(200 * MS), Some(30 * MS)], Choose::Nearest, Return::Now);
        let used: Vec<usize> = world.run(10 * S).iter().map(|(_, at)| *at).collect();
        assert_eq!(used, [1]);
        assert_eq!(world.run(600 * S), []);
    }

    #[test]
    fn servers_are_drawn_by_their_weights() {
        let (mut seed, mut first) = (1_u32, [0; 3]);
        for _ in 0..9000 {
            let order = drawn(&servers(&[1, 2, 0]), |below| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 16) % below
            });
            assert_eq!((order.len(), order[2]), (3, 2), "without weight it comes last");
            first[order[0]] += 1;
        }
        assert!((2600..3400).contains(&first[0]), "{first:?}");
    }
}
