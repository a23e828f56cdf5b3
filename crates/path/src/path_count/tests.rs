use super::*;

const S: Duration = Duration::from_secs(1);
const MBIT: f64 = 125_000.0;
const RTT: Duration = Duration::from_millis(40);

/// A link of which each session gets a part only, and what is asked of it downwards (Mbit/s).
struct Link {
    judge: PathCountController,
    now: Instant,
    rate: f64,
    session: f64,
    demand: f64,
    carried: LinkBytes,
    unused: Duration,
    trials: u32,
}

impl Link {
    fn new(rate: f64, session: f64, demand: f64) -> Self {
        let (judge, now) = (PathCountController::new(), Instant::now());
        let carried = LinkBytes::default();
        Self { judge, now, rate, session, demand, carried, unused: Duration::ZERO, trials: 0 }
    }

    /// Lets a second pass, with the demand times `factor`.
    fn second(&mut self, factor: f64) {
        let (before, trying) = (self.judge.count(), self.judge.is_testing());
        let carries = (self.demand * factor).min(self.rate).min(self.session * f64::from(before.used));
        self.carried.down += (carries * MBIT) as u64;
        self.carried.up += (carries * MBIT / 40.0) as u64;
        self.now += S;
        self.unused = if before.used < before.open { self.unused + S } else { Duration::ZERO };
        self.judge.update(self.now, self.carried, RTT, true);
        let after = self.judge.count();
        assert!((1..=after.open).contains(&after.used) && after.open <= MAX_PATHS, "{after:?}");
        assert!(
            after.open <= self.judge.chosen() + 1 && after.open + 1 >= before.open,
            "{before:?} {after:?}"
        );
        assert!(
            after.open >= before.open || self.unused >= DRAIN_TIME,
            "closed while in use: {before:?} {after:?}"
        );
        self.trials += u32::from(self.judge.is_testing() && !trying);
    }

    fn run(&mut self, seconds: u32) {
        (0..seconds).for_each(|_| self.second(1.0));
    }
}

#[test]
fn pipes_are_added_as_long_as_they_bring_more() {
    let mut link = Link::new(110.0, 30.0, 1000.0);
    assert_eq!(link.judge.count(), PathCount::all(1));
    link.run(60);
    assert!(link.judge.chosen() >= 3, "{:?}", link.judge);
    link.run(60);
    assert_eq!(link.judge.count(), PathCount::all(4));
    assert_eq!(link.judge.explanation(), "a fifth one brought nothing");
    let mut link = Link::new(1000.0, 30.0, 1000.0);
    (0..400).for_each(|_| link.run(u32::from(link.judge.chosen() < MAX_PATHS)));
    assert_eq!(
        (link.judge.count(), link.judge.explanation().as_str()),
        (PathCount::all(8), "the eighth one brought 14 %")
    );
}

#[test]
fn a_link_that_nobody_shapes_keeps_one_pipe_and_is_tried_seldom() {
    let mut link = Link::new(110.0, 1000.0, 1000.0);
    assert_eq!(link.judge.explanation(), "the link was not full for long enough to try a second one");
    link.run(10);
    assert!(link.judge.is_testing());
    assert_eq!(link.judge.explanation(), "whether a second one brings more is being tried");
    link.run(24 * 3600);
    assert_eq!(
        (link.judge.count(), link.judge.explanation().as_str()),
        (PathCount::all(1), "a second one brought nothing")
    );
    assert!((10..16).contains(&link.trials), "{} trials in a day", link.trials);
}

#[test]
fn a_demand_that_varies_is_no_reason_for_pipes() {
    let mut noise = 1u64;
    for round in 0..200 {
        let mut link = Link::new(300.0, 1000.0, 100.0);
        for _ in 0..1500 {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            link.second(0.7 + 0.6 * (noise >> 40) as f64 / (1u64 << 24) as f64);
        }
        assert_eq!(link.judge.chosen(), 1, "round {round}: {:?}", link.judge);
    }
}

#[test]
fn nothing_is_tried_while_there_is_little_to_carry_or_it_comes_in_bursts() {
    let mut idle = Link::new(110.0, 30.0, 0.9);
    idle.run(3600);
    let mut bursts = Link::new(110.0, 30.0, 100.0);
    (0..3600).for_each(|second| bursts.second(if second % 4 == 0 { 0.01 } else { 1.0 }));
    assert_eq!((idle.trials, bursts.trials), (0, 0));
    assert_eq!(bursts.judge.count(), PathCount::all(1));
}

#[test]
fn a_hint_is_worth_a_second_pipe_until_it_proves_useless() {
    let name = "customer.sttlwax1.pop.starlinkisp.net.";
    let mut link = Link::new(110.0, 1000.0, 1000.0);
    link.judge.set_hint(SessionLimitHint::from_dns_name(name).unwrap());
    link.judge.set_hint(SessionLimitHint::CarrierGradeNat);
    assert_eq!(link.judge.count(), PathCount::all(2));
    assert_eq!(link.judge.explanation(), "the operator's name is customer.sttlwax1.pop.starlinkisp.net");
    link.run(60);
    assert_eq!(
        (link.judge.count(), link.judge.explanation().as_str()),
        (PathCount::all(1), "a second one brought nothing")
    );
    link.judge.set_hint(SessionLimitHint::CarrierGradeNat);
    assert_eq!(link.judge.count(), PathCount::all(1), "what was measured counts more");

    let mut link = Link::new(110.0, 30.0, 1000.0);
    link.judge.set_hint(SessionLimitHint::CarrierGradeNat);
    link.run(120);
    assert_eq!(link.judge.chosen(), 4, "{:?}", link.judge);
}

#[test]
fn a_trial_without_traffic_says_nothing() {
    let mut link = Link::new(110.0, 30.0, 1000.0);
    link.run(14);
    assert!(link.judge.is_testing() && link.judge.count() == PathCount { open: 2, used: 2 });
    link.demand = 0.0;
    link.run(30);
    assert_eq!(link.judge.count(), PathCount::all(1));
    assert_eq!(link.judge.explanation(), "the link was not full for long enough to try a second one");
    link.demand = 1000.0;
    link.run(120);
    assert!(link.judge.chosen() >= 3, "it is tried again soon: {:?}", link.judge);
}

#[test]
fn pipes_that_bring_nothing_any_more_are_closed() {
    let mut link = Link::new(110.0, 30.0, 1000.0);
    link.run(200);
    assert_eq!(link.judge.chosen(), 4);
    link.session = 1000.0;
    link.run(2 * 3600);
    assert_eq!(
        (link.judge.count(), link.judge.explanation().as_str()),
        (PathCount::all(1), "a second one brought nothing")
    );
}

#[test]
fn what_was_found_while_little_was_asked_for_does_not_count_for_more() {
    let mut link = Link::new(110.0, 30.0, 10.0);
    link.run(60);
    assert_eq!((link.judge.chosen(), link.trials), (1, 1));
    link.demand = 1000.0;
    link.run(180);
    assert!(link.judge.chosen() >= 3, "{:?}", link.judge);
}

#[test]
fn addresses_and_names_suggest_what_is_known_of_them() {
    let of_address = |text: &str| SessionLimitHint::from_address(text.parse().unwrap());
    for shared in ["100.64.0.1", "100.127.255.254"] {
        assert_eq!(of_address(shared), Some(SessionLimitHint::CarrierGradeNat), "{shared}");
    }
    for own in ["100.63.255.255", "100.128.0.1", "192.168.1.2", "203.0.113.7", "2001:db8::1"] {
        assert_eq!(of_address(own), None, "{own}");
    }
    for operator in ["customer.lndngbr1.pop.starlinkisp.net", "STARLINKISP.NET."] {
        assert!(SessionLimitHint::from_dns_name(operator).is_some(), "{operator}");
    }
    let control = "a\u{1b}[2J.starlinkisp.net";
    for other in ["", "notstarlinkisp.net", "starlinkisp.net.example.org", "host.example.net", control] {
        assert_eq!(SessionLimitHint::from_dns_name(other), None, "{other}");
    }
}
