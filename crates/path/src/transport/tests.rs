use super::*;

const MS: u64 = 1;
const S: u64 = 1000;

/// A link with its server, in simulated time: what gets through, and what comes of it.
struct World {
    start: Instant,
    /// Milliseconds since the start.
    at: u64,
    judge: TransportSelector,
    up: bool,
    udp_open: bool,
    tcp_open: bool,
    /// One way takes so long (ms).
    delay: u64,
    /// Since when UDP gets through or not, at this end; the same of a connection.
    udp_since: u64,
    udp_path: bool,
    /// When the TCP connection stands that is being made.
    dialled_at: Option<u64>,
    /// When it gets through again, since it was cut.
    tcp: Option<Connection>,
    dials: Vec<u64>,
    closes: Vec<u64>,
    mains: Vec<(u64, PathTransport)>,
}

#[derive(Clone, Copy)]
struct Connection {
    since: u64,
    works: bool,
}

impl World {
    fn new(wanted: Transport) -> Self {
        let start = Instant::now();
        Self {
            start,
            at: 0,
            judge: TransportSelector::new(start, wanted),
            up: true,
            udp_open: true,
            tcp_open: true,
            delay: 10,
            udp_since: 0,
            udp_path: false,
            dialled_at: None,
            tcp: None,
            dials: Vec::new(),
            closes: Vec::new(),
            mains: Vec::new(),
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.at)
    }

    fn set_udp(&mut self, open: bool) {
        (self.udp_open, self.udp_since) = (open, self.at);
    }

    /// A path over UDP is judged after some heartbeats, one is opened after two round trips.
    fn udp(&mut self) -> TransportHealth {
        let passed = self.at - self.udp_since;
        match (self.udp_open, self.udp_path) {
            (true, _) if passed >= 4 * self.delay + 50 => {
                self.udp_path = true;
                TransportHealth::Working
            }
            (true, false) if passed >= 2 * self.delay => TransportHealth::Answering,
            (false, true) if passed < 200 => TransportHealth::Working,
            (_, true) => TransportHealth::Dead,
            _ => TransportHealth::Unknown,
        }
    }

    fn tcp(&self) -> TransportHealth {
        match self.tcp {
            None => TransportHealth::Unknown,
            Some(tcp) if !tcp.works => TransportHealth::Dead,
            Some(tcp) if self.at >= tcp.since + 2 * self.delay => TransportHealth::Working,
            Some(_) => TransportHealth::Answering,
        }
    }

    /// Lets time pass; it is looked at every 20 ms and when the judge wants it, as the client does.
    fn run(&mut self, ms: u64) {
        for _ in 0..ms {
            self.at += 1;
            let now = self.now();
            if self.dialled_at == Some(self.at) {
                self.dialled_at = None;
                if self.tcp_open {
                    self.judge.on_tcp_connected(now);
                    self.tcp = Some(Connection { since: self.at, works: true });
                } else {
                    self.judge.on_tcp_failed(now, "no answer".to_owned(), false);
                }
            }
            if self.at.is_multiple_of(20) || self.judge.poll_timeout().is_some_and(|at| at <= now) {
                self.look();
            }
        }
    }

    fn look(&mut self) {
        let now = self.now();
        let signs = LinkSigns { carrier: self.up, udp: self.udp(), tcp: self.tcp(), ..LinkSigns::default() };
        match self.judge.update(now, signs) {
            Some(TcpAction::Connect) => {
                self.dials.push(self.at);
                let time = if self.tcp_open { 8 * self.delay } else { 2 * S };
                self.dialled_at = Some(self.at + time);
            }
            Some(TcpAction::Close) => {
                self.closes.push(self.at);
                (self.tcp, self.dialled_at) = (None, None);
            }
            None => {}
        }
        let main = self.judge.preferred();
        if self.mains.last().map(|(_, way)| *way) != Some(main) {
            self.mains.push((self.at, main));
        }
        assert!(self.judge.poll_timeout().is_none_or(|at| at > now), "it would be looked at for ever");
    }
}

#[test]
fn where_udp_answers_in_time_tcp_is_never_tried() {
    let mut world = World::new(Transport::Auto);
    world.run(60 * S);
    assert_eq!((world.dials.len(), world.judge.preferred()), (0, PathTransport::Udp));
    assert!(world.judge.poll_timeout().is_none(), "it would keep an idle machine awake");
    assert_eq!(world.judge.explanation(world.now()), "");
}

#[test]
fn where_udp_is_blocked_from_the_start_tcp_is_tried_after_the_head_start() {
    let mut world = World::new(Transport::Auto);
    world.set_udp(false);
    world.run(2 * S);
    assert!((250 * MS..=270).contains(&world.dials[0]), "{:?}", world.dials);
    assert_eq!((world.dials.len(), world.judge.preferred()), (1, PathTransport::Tcp));
    world.run(35 * S);
    assert_eq!(world.judge.explanation(world.now()), "UDP gets no answer for 37 s");
    assert_eq!(world.dials.len(), 1);
}

#[test]
fn a_link_with_a_long_delay_gives_up_tcp_when_udp_answers_late() {
    let mut world = World::new(Transport::Auto);
    world.delay = 300;
    world.run(20 * S);
    assert_eq!((world.dials.len(), world.closes.len(), world.judge.preferred()), (1, 1, PathTransport::Udp));
    assert!(world.tcp.is_none());
}

#[test]
fn when_udp_dies_tcp_is_tried_soon_and_udp_returns_soon_after_it_works_again() {
    let mut world = World::new(Transport::Auto);
    world.run(30 * S);
    world.set_udp(false);
    world.run(2 * S);
    assert!(world.dials[0] <= 30 * S + 600, "{:?}", world.dials);
    assert_eq!(world.judge.preferred(), PathTransport::Tcp);
    world.run(60 * S);
    world.set_udp(true);
    world.run(10 * S);
    let (back, way) = world.mains[world.mains.len() - 1];
    assert_eq!((way, world.tcp.is_none(), world.closes.len()), (PathTransport::Udp, true, 1));
    assert!(back <= 92 * S + 2 * S, "{back}");
    assert!(world.closes[0] >= back + 3 * S, "{} {back}", world.closes[0]);
}

#[test]
fn a_moment_without_udp_is_no_reason_to_dial() {
    let mut world = World::new(Transport::Auto);
    world.run(10 * S);
    for _ in 0..5 {
        world.set_udp(false);
        world.run(250);
        world.set_udp(true);
        world.run(2 * S);
    }
    assert!(world.dials.is_empty(), "{:?}", world.dials);
}

#[test]
fn udp_that_comes_and_goes_is_trusted_later_each_time_and_never_too_late() {
    let mut world = World::new(Transport::Auto);
    world.run(S);
    let mut waits = Vec::new();
    for _ in 0..8 {
        world.set_udp(false);
        world.run(3 * S);
        assert_eq!(world.judge.preferred(), PathTransport::Tcp);
        world.set_udp(true);
        let from = world.at;
        while world.judge.preferred() == PathTransport::Tcp {
            world.run(10);
        }
        waits.push(world.at - from);
        world.run(5 * S);
    }
    assert!(waits.windows(2).all(|pair| pair[0] <= pair[1] + 20), "{waits:?}");
    assert!(waits[0] <= 1200 && waits[7] >= 10 * S && waits[7] <= 20 * S, "{waits:?}");
    // Once the connection is kept, nothing is dialled any more.
    assert!(world.dials.len() <= 3, "{:?}", world.dials);
    world.run(120 * S);
    assert!(world.tcp.is_none());
    world.set_udp(false);
    world.run(3 * S);
    world.set_udp(true);
    world.run(2 * S);
    assert_eq!(world.judge.preferred(), PathTransport::Udp, "all is forgiven");
}

#[test]
fn attempts_that_fail_come_less_often_and_the_reason_is_kept() {
    let mut world = World::new(Transport::Auto);
    world.set_udp(false);
    world.tcp_open = false;
    world.run(300 * S);
    assert!((15..=30).contains(&world.dials.len()), "{:?}", world.dials);
    let why = world.judge.explanation(world.now());
    assert_eq!(why, "UDP gets no answer for 5 min, and TCP does not work: no answer");
    // Another network may let it through at once.
    world.tcp_open = true;
    world.run(S);
    let (dials, now) = (world.dials.len(), world.now());
    world.judge.on_network_changed(now);
    world.run(S);
    assert!(world.dials.len() > dials && world.judge.preferred() == PathTransport::Tcp);
}

#[test]
fn tcp_waits_for_a_moment_where_udp_works_for_some_connections_again() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut judge = TransportSelector::new(start, Transport::Auto);
    let (dead, working) = (TransportHealth::Dead, TransportHealth::Working);
    let signs = |udp, udp_heard_by_any, tcp| LinkSigns {
        carrier: true,
        udp,
        udp_heard_by_any,
        tcp,
        ..LinkSigns::default()
    };
    judge.update(at(0), signs(working, true, TransportHealth::Unknown));
    judge.update(at(60_000), signs(working, true, TransportHealth::Unknown));
    judge.update(at(61_000), signs(dead, false, TransportHealth::Unknown));
    judge.on_tcp_connected(at(64_000));
    judge.update(at(64_010), signs(dead, true, working));
    assert_eq!(judge.preferred(), PathTransport::Udp);
    assert_eq!(judge.poll_timeout(), Some(at(64_510)));
    let mut other = judge.clone();
    other.update(at(64_100), signs(working, true, working));
    other.update(at(64_600), signs(working, true, working));
    assert_eq!(other.preferred(), PathTransport::Udp, "it works for all");
    judge.update(at(64_510), signs(dead, true, working));
    assert_eq!(judge.preferred(), PathTransport::Tcp, "a connection gets no answer over UDP");
}

#[test]
fn an_attempt_that_takes_long_to_fail_is_followed_at_once() {
    let start = Instant::now();
    let mut judge = TransportSelector::new(start, Transport::Tcp);
    let signs = LinkSigns { carrier: true, ..LinkSigns::default() };
    assert_eq!(judge.update(start, signs), Some(TcpAction::Connect));
    let late = start + Duration::from_secs(2);
    judge.on_tcp_failed(late, "no answer".to_owned(), false);
    assert_eq!(judge.update(late, signs), Some(TcpAction::Connect));
    let soon = late + Duration::from_millis(1);
    judge.on_tcp_failed(soon, "refused".to_owned(), false);
    assert_eq!((judge.update(soon, signs), judge.poll_timeout()), (None, Some(late + ATTEMPT_INTERVAL * 2)));
}

#[test]
fn a_silent_connection_is_made_anew_but_not_again_and_again() {
    let mut world = World::new(Transport::Tcp);
    world.set_udp(false);
    world.run(20 * S);
    assert_eq!(world.dials.len(), 1);
    world.tcp.as_mut().unwrap().works = false;
    let from = world.at;
    world.run(2 * S);
    assert!((from + S..from + 1100).contains(&world.dials[1]), "{:?}", world.dials);
    for _ in 0..60 {
        if let Some(tcp) = &mut world.tcp {
            tcp.works = false;
        }
        world.run(S);
    }
    assert!(world.dials.len() <= 14, "{:?}", world.dials);
    let dials = world.dials.len();
    world.run(30 * S);
    assert!(world.dials.len() <= dials + 1, "{:?}", world.dials);
}

#[test]
fn a_connection_that_ends_is_made_anew_at_once_if_it_had_worked() {
    let mut world = World::new(Transport::Tcp);
    world.run(20 * S);
    world.tcp = None;
    let now = world.now();
    world.judge.on_tcp_closed(now, "the server has ended it".to_owned());
    world.run(200);
    assert_eq!(world.dials.len(), 2);
    assert!(world.dials[1] <= 20 * S + 20, "{:?}", world.dials);
    assert!(!world.judge.allows_udp());
}

#[test]
fn a_cut_that_ends_soon_neither_tears_the_connection_nor_dials_while_the_link_is_down() {
    for wanted in [Transport::Auto, Transport::Tcp] {
        let mut world = World::new(wanted);
        world.set_udp(false);
        world.run(20 * S);
        let dials = world.dials.len();
        world.up = false;
        world.tcp.as_mut().unwrap().works = false;
        world.run(5 * S);
        world.up = true;
        world.run(300);
        world.tcp.as_mut().unwrap().works = true;
        world.run(10 * S);
        assert_eq!(
            (world.dials.len(), world.closes.len(), world.judge.preferred()),
            (dials, 0, PathTransport::Tcp)
        );
        // One that does not come back is made anew sooner than one that falls silent.
        world.up = false;
        world.tcp.as_mut().unwrap().works = false;
        world.run(5 * S);
        world.up = true;
        let from = world.at;
        world.run(S);
        assert_eq!(world.dials.len(), dials + 1);
        assert!(world.dials[dials] <= from + 450, "{:?} {from}", world.dials);
    }
}

#[test]
fn a_cut_of_a_link_over_udp_alone_dials_nothing() {
    let mut world = World::new(Transport::Auto);
    world.run(20 * S);
    world.up = false;
    world.set_udp(false);
    world.run(5 * S);
    (world.up, world.udp_since) = (true, world.at);
    world.udp_open = true;
    world.run(20 * S);
    assert!(world.dials.is_empty(), "{:?}", world.dials);
}

#[test]
fn a_connection_that_is_established_after_udp_returned_is_not_kept() {
    let mut world = World::new(Transport::Auto);
    world.run(20 * S);
    world.up = false;
    world.set_udp(false);
    world.run(2 * S);
    // UDP is tried alone for 250 ms. Its path works 30 ms after that, and TCP takes 80 ms.
    world.up = true;
    let from = world.at;
    world.run(190);
    world.set_udp(true);
    world.run(S);
    assert_eq!((world.dials.len(), world.mains.len()), (1, 1), "{:?} {:?}", world.dials, world.mains);
    assert!(world.tcp.is_none() && world.closes[0] <= from + S, "{:?} {from}", world.closes);
}

#[test]
fn a_cut_says_nothing_against_udp_while_a_connection_is_kept_beside_it() {
    let mut world = World::new(Transport::Auto);
    world.run(10 * S);
    world.set_udp(false);
    world.run(3 * S);
    world.set_udp(true);
    world.run(2 * S);
    assert_eq!((world.judge.preferred(), world.tcp.is_some()), (PathTransport::Udp, true));
    let (dials, mains) = (world.dials.len(), world.mains.len());
    for _ in 0..3 {
        let set = |world: &mut World, works| world.tcp.iter_mut().for_each(|tcp| tcp.works = works);
        world.up = false;
        set(&mut world, false);
        world.run(1500);
        (world.up, world.udp_since) = (true, world.at);
        world.run(200);
        set(&mut world, true);
        world.run(800);
    }
    assert_eq!((world.dials.len(), world.mains.len()), (dials, mains), "{:?}", world.mains);
    world.run(3 * S);
    assert!(world.tcp.is_none(), "kept for longer because of the cuts");
}

#[test]
fn a_link_that_comes_back_in_a_network_without_udp_goes_over_tcp_after_the_head_start() {
    let mut world = World::new(Transport::Auto);
    world.run(20 * S);
    world.up = false;
    world.run(2 * S);
    world.set_udp(false);
    // Nothing of what was there before is heard any more.
    world.udp_since = 0;
    world.up = true;
    let from = world.at;
    world.run(2 * S);
    assert_eq!((world.dials.len(), world.judge.preferred()), (1, PathTransport::Tcp));
    assert!(world.dials[0] <= from + 280, "{:?} {from}", world.dials);
}

#[test]
fn what_is_wanted_counts_at_once() {
    let mut world = World::new(Transport::Quic);
    world.set_udp(false);
    world.run(60 * S);
    assert!(world.dials.is_empty());
    let now = world.now();
    world.judge.set_wanted(now, Transport::Tcp);
    world.run(S);
    assert_eq!((world.dials.len(), world.judge.preferred()), (1, PathTransport::Tcp));
    assert_eq!(world.judge.explanation(world.now()), "TCP as configured");
    world.set_udp(true);
    let now = world.now();
    world.judge.set_wanted(now, Transport::Quic);
    world.run(S);
    assert!(world.tcp.is_none() && world.judge.allows_udp());
}

#[test]
fn a_link_on_which_both_fall_silent_stays_with_udp() {
    let mut world = World::new(Transport::Auto);
    world.run(S);
    world.set_udp(false);
    world.run(2 * S);
    world.set_udp(true);
    world.run(2 * S);
    assert_eq!(world.judge.preferred(), PathTransport::Udp);
    let before = world.mains.len();
    world.set_udp(false);
    world.tcp.as_mut().expect("it is kept").works = false;
    world.run(700);
    world.set_udp(true);
    world.run(S);
    assert_eq!(world.mains.len(), before, "{:?}", world.mains);
}
