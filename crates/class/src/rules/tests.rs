use proptest::prelude::*;

use super::*;
use crate::{BUILT_IN_RULES, BULK, CRITICAL};

/// Any instant will do: only differences matter.
#[allow(clippy::disallowed_methods)]
fn start() -> Instant {
    Instant::now()
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

fn patterns(list: &[&str]) -> Vec<DomainPattern> {
    list.iter().map(|pattern| pattern.parse().unwrap()).collect()
}

fn udp(from: &str, to: &str) -> PacketFields {
    let (from, to): (std::net::SocketAddr, std::net::SocketAddr) =
        (from.parse().unwrap(), to.parse().unwrap());
    PacketFields {
        protocol: 17,
        src: from.ip(),
        dst: to.ip(),
        ports: Some((from.port(), to.port())),
        dscp: 0,
    }
}

fn of_rule(rule: &Rule, facts: PacketFields) -> bool {
    let rules = Rules::new(vec![Rule { class: ClassId(7), ..rule.clone() }]);
    let verdict = rules.classify(start(), &facts, &DnsSnooper::default());
    assert_eq!(verdict.rule.is_some(), verdict.class == ClassId(7));
    verdict.rule.is_some()
}

/// The class of a packet by the built-in rules, and the name of the matching rule.
fn built_in(facts: PacketFields) -> (ClassId, Option<&'static str>) {
    let rules = Rules::new(BUILT_IN_RULES.iter().map(BuiltInRule::rule).collect());
    let Classification { class, rule } = rules.classify(start(), &facts, &DnsSnooper::default());
    (class, rule.map(|at| BUILT_IN_RULES[at].name))
}

#[test]
fn every_condition_and_one_entry_of_each_list_must_match() {
    let rule = Rule {
        protocols: vec![17, 6],
        from: nets(&["10.0.0.0/24", "fd00::/8"]),
        to: nets(&["198.51.100.0/24", "192.0.2.1/32", "2001:db8::/32"]),
        from_ports: vec![1000..=2000],
        ports: vec![53..=53, 5060..=5061],
        dscp: vec![0, 46],
        domains: vec![],
        class: CRITICAL,
    };
    let good = udp("10.0.0.5:1000", "198.51.100.9:5061");
    for facts in [
        good,
        PacketFields { protocol: 6, dscp: 46, ..good },
        udp("10.0.0.5:2000", "192.0.2.1:53"),
        udp("[fd00::1]:1500", "[2001:db8::1]:5060"),
        udp("[::ffff:10.0.0.5]:1500", "192.0.2.1:5060"),
    ] {
        assert!(of_rule(&rule, facts), "{facts:?}");
    }
    for facts in [
        PacketFields { protocol: 132, ..good },
        PacketFields { dscp: 45, ..good },
        PacketFields { ports: None, ..good },
        udp("10.0.1.5:1000", "198.51.100.9:5061"),
        udp("10.0.0.5:1000", "192.0.2.2:5061"),
        udp("10.0.0.5:999", "198.51.100.9:5061"),
        udp("10.0.0.5:1000", "198.51.100.9:5062"),
        udp("198.51.100.9:5061", "10.0.0.5:1000"),
    ] {
        assert!(!of_rule(&rule, facts), "{facts:?}");
    }
    assert!(
        of_rule(&Rule::default(), PacketFields { ports: None, ..good }),
        "a rule without conditions matches everything"
    );
}

#[test]
fn the_first_matching_rule_decides_and_none_means_the_default() {
    let rules = Rules::new(vec![
        Rule { ports: vec![5060..=5060], class: CRITICAL, ..Rule::default() },
        Rule { to: nets(&["192.0.2.0/24"]), class: BULK, ..Rule::default() },
    ]);
    let classify = |to: &str| rules.classify(start(), &udp("10.0.0.1:1", to), &DnsSnooper::default());
    assert_eq!(classify("192.0.2.1:5060"), Classification { class: CRITICAL, rule: Some(0) });
    assert_eq!(classify("192.0.2.1:5061"), Classification { class: BULK, rule: Some(1) });
    assert_eq!(classify("192.0.3.1:5061"), Classification { class: ClassId::DEFAULT, rule: None });
}

#[test]
fn a_domain_matches_addresses_of_its_names() {
    let rules = Rules::new(vec![Rule { domains: patterns(&["zoom.us", "*.webex.com"]), ..Rule::default() }]);
    let now = start();
    let mut names = DnsSnooper::new(rules.patterns());
    let facts = udp("10.0.0.1:1", "198.51.100.9:443");
    assert_eq!(rules.classify(now, &facts, &names).rule, None);
    names.add_mapping(now, facts.dst, "Us02web.Zoom.us");
    assert_eq!(rules.classify(now, &facts, &names).rule, Some(0));
    let other = udp("10.0.0.1:1", "198.51.100.10:443");
    names.add_mapping(now, other.dst, "webex.com");
    assert_eq!(rules.classify(now, &other, &names).rule, None);
}

#[test]
fn interactive_traffic_is_critical_and_background_traffic_is_bulk() {
    let far = |port: u16| udp("10.0.0.5:40000", &format!("198.51.100.9:{port}"));
    let tcp = |port| PacketFields { protocol: 6, ..far(port) };
    let ping = PacketFields { protocol: 1, ports: None, ..far(0) };
    for (facts, class, name) in [
        (far(5060), CRITICAL, "sip"),
        (tcp(53), CRITICAL, "dns"),
        (far(3479), CRITICAL, "stun"),
        (far(8801), CRITICAL, "calls"),
        (ping, CRITICAL, "ping"),
        (PacketFields { protocol: 58, ..ping }, CRITICAL, "ping"),
        (PacketFields { dscp: 46, ..far(443) }, CRITICAL, "real-time"),
        (PacketFields { dscp: 40, ..tcp(443) }, CRITICAL, "real-time"),
        (PacketFields { dscp: 18, ..tcp(22) }, CRITICAL, "ssh"),
        (PacketFields { dscp: 8, ..tcp(22) }, BULK, "low-effort"),
        (PacketFields { dscp: 1, ..far(5060) }, BULK, "low-effort"),
        (tcp(873), BULK, "rsync"),
        (far(6881), BULK, "bittorrent"),
        (tcp(9103), BULK, "backup"),
        (tcp(25), BULK, "mail"),
    ] {
        assert_eq!(built_in(facts), (class, Some(name)), "{facts:?}");
    }
    // The web, SSH without a mark, WireGuard, and the far end's answers.
    for facts in [tcp(443), far(443), tcp(80), tcp(22), far(51820), udp("10.0.0.5:5060", "198.51.100.9:9")] {
        assert_eq!(built_in(facts), (ClassId::DEFAULT, None), "{facts:?}");
    }
}

#[test]
fn every_built_in_rule_can_match() {
    let rules = Rules::new(BUILT_IN_RULES.iter().map(BuiltInRule::rule).collect());
    assert_eq!(rules.unreachable(), []);
    for (at, one) in BUILT_IN_RULES.iter().enumerate() {
        assert!(BUILT_IN_RULES[..at].iter().all(|other| other.name != one.name), "{}", one.name);
    }
}

/// Why the later of two rules can never match.
fn of_two(first: Rule, later: Rule) -> Option<UnreachableReason> {
    match Rules::new(vec![first, later]).unreachable().as_slice() {
        [] => None,
        [UnreachableRule { rule: 1, reason }] => Some(*reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rule_covered_by_an_earlier_one_is_found() {
    let base = Rule::default;
    let from = |list: &[&str]| Rule { from: nets(list), ..base() };
    let to = |list: &[&str]| Rule { to: nets(list), ..base() };
    let ports = |list: &[RangeInclusive<u16>]| Rule { ports: list.to_vec(), ..base() };
    let dscp = |list: &[u8]| Rule { dscp: list.to_vec(), ..base() };
    let protocols = |list: &[u8]| Rule { protocols: list.to_vec(), ..base() };
    let domains = |list: &[&str]| Rule { domains: patterns(list), ..base() };
    for (first, later) in [
        (base(), ports(&[1..=9])),
        (ports(&[1..=5, 6..=9]), ports(&[2..=8])),
        (ports(&[1..=3, 2..=9]), Rule { protocols: vec![17], ..ports(&[1..=1, 9..=9]) }),
        (to(&["10.0.0.0/8"]), to(&["10.1.0.0/16", "10.2.0.1/32"])),
        (to(&["0.0.0.0/1", "128.0.0.0/1"]), to(&["10.0.0.0/8"])),
        (to(&["0.0.0.0/1", "128.0.0.0/1", "::/0"]), base()),
        // IPv4 sources imply IPv4 destinations.
        (to(&["0.0.0.0/0"]), from(&["10.0.0.0/8"])),
        (to(&["0.0.0.0/0"]), Rule { to: nets(&["::/0", "10.0.0.0/8"]), ..from(&["10.0.0.0/8"]) }),
        (dscp(&[46, 40]), dscp(&[40])),
        (protocols(&[6, 17]), Rule { ports: vec![1..=1], ..protocols(&[6]) }),
        (domains(&["zoom.us"]), domains(&["*.zoom.us", "a.zoom.us"])),
        (base(), base()),
    ] {
        assert_eq!(
            of_two(first.clone(), later.clone()),
            Some(UnreachableReason::Covered(0)),
            "{first:?} {later:?}"
        );
    }
    for (first, later) in [
        (ports(&[1..=9]), base()),
        (ports(&[0..=u16::MAX]), base()),
        (ports(&[1..=4, 6..=9]), ports(&[3..=7])),
        (to(&["10.0.0.0/8"]), to(&["10.0.0.0/7"])),
        (to(&["0.0.0.0/0"]), base()),
        (to(&["0.0.0.0/0"]), to(&["10.0.0.0/8", "fd00::/8"])),
        (Rule { dscp: vec![46], ..to(&["10.0.0.0/8"]) }, to(&["10.0.0.0/8"])),
        (protocols(&[6]), protocols(&[6, 17])),
        (domains(&["*.zoom.us"]), domains(&["zoom.us"])),
        (domains(&["zoom.us"]), base()),
        (Rule { from_ports: vec![1..=9], ..base() }, ports(&[1..=9])),
    ] {
        assert_eq!(of_two(first.clone(), later.clone()), None, "{first:?} {later:?}");
    }
}

#[test]
fn a_rule_that_contradicts_itself_is_found() {
    let base = Rule::default;
    let icmp = Rule { protocols: vec![1, 58], ports: vec![1..=1], ..base() };
    assert_eq!(
        Rules::new(vec![icmp.clone()]).unreachable(),
        [UnreachableRule { rule: 0, reason: UnreachableReason::NoPorts }]
    );
    assert_eq!(Rules::new(vec![Rule { protocols: vec![1, 6], ..icmp }]).unreachable(), []);
    let mixed = Rule { from: nets(&["10.0.0.0/8"]), to: nets(&["fd00::/8", "::/0"]), ..base() };
    assert_eq!(of_two(base(), mixed.clone()), Some(UnreachableReason::MixedIpVersions));
    assert_eq!(Rules::new(vec![Rule { from: nets(&["10.0.0.0/8", "fd00::/8"]), ..mixed }]).unreachable(), []);
}

fn some_net() -> impl Strategy<Value = IpNet> {
    let v4 = (0u32..4, 0u8..=4).prop_map(|(bits, length)| format!("{}.0.0.0/{length}", bits * 64));
    let v6 = (0u32..4, 0u8..=4).prop_map(|(bits, length)| format!("{:x}00::/{length}", bits * 64));
    prop_oneof![v4, v6].prop_map(|text| text.parse::<IpNet>().unwrap().trunc())
}

fn some_rule() -> impl Strategy<Value = Rule> {
    let nets = || prop::collection::vec(some_net(), 0..3);
    let ports =
        || prop::collection::vec((0u16..6, 0u16..4).prop_map(|(from, more)| from..=from + more), 0..3);
    let protocols = prop::collection::vec(prop::sample::select(vec![1u8, 6, 17, 58]), 0..3);
    (protocols, nets(), nets(), ports(), ports(), prop::collection::vec(0u8..3, 0..3)).prop_map(
        |(protocols, from, to, from_ports, ports, dscp)| Rule {
            protocols,
            from,
            to,
            from_ports,
            ports,
            dscp,
            ..Rule::default()
        },
    )
}

fn some_facts() -> impl Strategy<Value = PacketFields> {
    let address = || (any::<bool>(), 0u8..4, any::<u8>());
    let protocol = prop::sample::select(vec![1u8, 6, 17, 58, 47]);
    (protocol, any::<bool>(), address(), address(), 0u16..9, 0u16..9, 0u8..3).prop_map(
        |(protocol, shows, (v6, from, low), (_, to, high), from_port, port, dscp)| {
            let ip = |first: u8, last: u8| -> IpAddr {
                match v6 {
                    false => [first * 64, 0, 0, last].into(),
                    true => [u16::from(first) << 14, 0, 0, 0, 0, 0, 0, last.into()].into(),
                }
            };
            let ports = (shows && has_ports(protocol)).then_some((from_port, port));
            PacketFields { protocol, src: ip(from, low), dst: ip(to, high), ports, dscp }
        },
    )
}

proptest! {
    /// A rule reported as unreachable never matches.
    #[test]
    fn no_packet_reaches_an_unreachable_rule(
        rules in prop::collection::vec(some_rule(), 1..6),
        facts in prop::collection::vec(some_facts(), 1..64),
    ) {
        let rules = Rules::new(rules);
        let dead: Vec<usize> = rules.unreachable().iter().map(|found| found.rule).collect();
        for facts in facts {
            let verdict = rules.classify(start(), &facts, &DnsSnooper::default());
            prop_assert!(verdict.rule.is_none_or(|rule| !dead.contains(&rule)), "{:?} {:?}", facts, verdict);
        }
    }
}
