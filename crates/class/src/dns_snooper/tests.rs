use proptest::prelude::*;
use simple_dns::{
    QTYPE, Question as Asked, ResourceRecord, TYPE,
    rdata::{A, AAAA, CNAME},
};

use super::*;

/// Any instant will do: only differences matter.
#[allow(clippy::disallowed_methods)]
fn start() -> Instant {
    Instant::now()
}

fn client() -> SocketAddr {
    "10.0.0.5:40000".parse().unwrap()
}

fn resolver() -> SocketAddr {
    "192.0.2.53:53".parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn names(patterns: &[&str]) -> DnsSnooper {
    let patterns: Vec<DomainPattern> = patterns.iter().map(|text| text.parse().unwrap()).collect();
    DnsSnooper::new(&patterns)
}

fn name(text: &str) -> Name<'_> {
    Name::new_unchecked(text)
}

fn question(id: u16, asked: &str) -> Vec<u8> {
    let mut packet = Packet::new_query(id);
    packet.questions.push(of(asked));
    packet.build_bytes_vec_compressed().unwrap()
}

fn of(asked: &str) -> Asked<'_> {
    Asked::new(name(asked), QTYPE::TYPE(TYPE::A), QCLASS::CLASS(CLASS::IN), false)
}

fn answer<'a>(id: u16, asked: &'a str, records: Vec<ResourceRecord<'a>>) -> Vec<u8> {
    let mut packet = Packet::new_reply(id);
    packet.questions.push(of(asked));
    packet.answers = records;
    packet.build_bytes_vec_compressed().unwrap()
}

fn record<'a>(owner: &'a str, ttl: u32, data: RData<'a>) -> ResourceRecord<'a> {
    ResourceRecord::new(name(owner), CLASS::IN, ttl, data)
}

fn a(owner: &str, address: [u8; 4], ttl: u32) -> ResourceRecord<'_> {
    record(owner, ttl, RData::A(A { address: u32::from_be_bytes(address) }))
}

fn cname<'a>(owner: &'a str, target: &'a str) -> ResourceRecord<'a> {
    record(owner, 300, RData::CNAME(CNAME(name(target))))
}

/// Asks and is answered.
fn resolve(names: &mut DnsSnooper, now: Instant, asked: &str, records: Vec<ResourceRecord<'_>>) {
    names.on_query(now, client(), resolver(), &question(7, asked));
    names.on_response(now, resolver(), client(), &answer(7, asked, records));
}

fn knows(names: &DnsSnooper, now: Instant, address: &str, pattern: &str) -> bool {
    names.matches(now, ip(address), &pattern.parse().unwrap())
}

#[test]
fn a_response_maps_the_addresses_of_a_name_without_regard_to_case() {
    let now = start();
    let mut names = names(&["zoom.us", "*.webex.com"]);
    let v6: Ipv6Addr = "2001:db8::9".parse().unwrap();
    let aaaa = record("US02.zoom.us", 300, RData::AAAA(AAAA { address: v6.to_bits() }));
    resolve(&mut names, now, "us02.ZOOM.us", vec![a("us02.zoom.US", [198, 51, 100, 9], 300), aaaa]);
    assert!(knows(&names, now, "198.51.100.9", "zoom.us"));
    assert!(knows(&names, now, "2001:db8::9", "zoom.us"));
    assert!(!knows(&names, now, "198.51.100.9", "*.webex.com"));
    resolve(&mut names, now, "webex.com", vec![a("webex.com", [198, 51, 100, 10], 300)]);
    assert!(!knows(&names, now, "198.51.100.10", "*.webex.com"), "the domain itself was not asked for");
    resolve(&mut names, now, "example.com", vec![a("example.com", [198, 51, 100, 11], 300)]);
    assert_eq!(names.mappings.len(), 2, "names that no rule asks for are not kept");
}

#[test]
fn every_name_of_a_cname_chain_counts_in_any_record_order() {
    let now = start();
    for flip in [false, true] {
        let mut names = names(&["calls.example", "*.cdn.example", "elsewhere.example"]);
        let mut records = vec![
            cname("meet.calls.example", "x.cdn.example"),
            cname("x.cdn.example", "y.other.example"),
            a("y.other.example", [198, 51, 100, 9], 300),
            // This name is not in the chain of the question.
            a("meet.elsewhere.example", [203, 0, 113, 1], 300),
        ];
        if flip {
            records.reverse();
        }
        resolve(&mut names, now, "meet.calls.example", records);
        assert!(knows(&names, now, "198.51.100.9", "calls.example"));
        assert!(knows(&names, now, "198.51.100.9", "*.cdn.example"));
        assert_eq!(names.mappings.len(), 2, "{:?}", names.mappings);
    }
}

#[test]
fn a_cname_loop_ends() {
    let now = start();
    let mut names = names(&["a.example"]);
    let records = vec![cname("a.example", "b.example"), cname("b.example", "a.example")];
    resolve(&mut names, now, "a.example", records);
    assert!(names.mappings.is_empty());
}

#[test]
fn only_responses_to_seen_queries_count_and_only_once() {
    let now = start();
    let told = || answer(7, "zoom.us", vec![a("zoom.us", [198, 51, 100, 9], 300)]);
    let known_after = |play: &dyn Fn(&mut DnsSnooper)| {
        let mut names = names(&["zoom.us"]);
        play(&mut names);
        names.mappings.len()
    };
    let ask = |names: &mut DnsSnooper| names.on_query(now, client(), resolver(), &question(7, "zoom.us"));
    let other: SocketAddr = "192.0.2.54:53".parse().unwrap();
    let late = now + QUERY_TIMEOUT;
    assert_eq!(
        known_after(&|names| (ask(names), names.on_response(now, resolver(), client(), &told())).1),
        1
    );
    assert_eq!(known_after(&|names| names.on_response(now, resolver(), client(), &told())), 0, "not asked");
    assert_eq!(known_after(&|names| (ask(names), names.on_response(now, other, client(), &told())).1), 0);
    assert_eq!(
        known_after(&|names| (ask(names), names.on_response(late, resolver(), client(), &told())).1),
        0
    );
    let other_id = answer(8, "zoom.us", vec![a("zoom.us", [198, 51, 100, 9], 300)]);
    assert_eq!(
        known_after(&|names| (ask(names), names.on_response(now, resolver(), client(), &other_id)).1),
        0
    );

    let mut names = names(&["zoom.us"]);
    ask(&mut names);
    names.on_response(now, resolver(), client(), &told());
    let second = answer(7, "zoom.us", vec![a("zoom.us", [198, 51, 100, 10], 300)]);
    names.on_response(now, resolver(), client(), &second);
    assert!(!knows(&names, now, "198.51.100.10", "zoom.us"));
}

#[test]
fn mappings_expire_by_their_time_to_live_within_bounds() {
    let now = start();
    let seconds = |n| now + Duration::from_secs(n);
    for (ttl, lasts) in [(0, 60), (120, 120), (86_400, 3600)] {
        let mut names = names(&["zoom.us"]);
        resolve(&mut names, now, "zoom.us", vec![a("zoom.us", [198, 51, 100, 9], ttl)]);
        assert!(knows(&names, seconds(lasts - 1), "198.51.100.9", "zoom.us"), "{ttl}");
        assert!(!knows(&names, seconds(lasts), "198.51.100.9", "zoom.us"), "{ttl}");
    }
}

#[test]
fn mappings_of_patterns_that_remain_survive_new_rules() {
    let now = start();
    let mut names = names(&["a.example", "z.example"]);
    for (domain, last) in [("a.example", 1), ("z.example", 2)] {
        resolve(&mut names, now, domain, vec![a(domain, [198, 51, 100, last], 300)]);
    }
    let patterns: Vec<DomainPattern> =
        ["b.example", "z.example"].iter().map(|text| text.parse().unwrap()).collect();
    names.set_patterns(&patterns);
    assert!(knows(&names, now, "198.51.100.2", "z.example"));
    assert_eq!((names.mappings.len(), names.by_expiry.len()), (1, 1));
}

#[test]
fn memory_is_bounded_and_the_oldest_mappings_are_removed() {
    let now = start();
    let mut names = names(&["zoom.us"]);
    for round in 0..300u32 {
        let records = (0..100).map(|at| {
            let [_, b, c, d] = (round * 100 + at).to_be_bytes();
            a("zoom.us", [10, b, c, d], 300 + round)
        });
        resolve(&mut names, now, "zoom.us", records.collect());
    }
    assert_eq!((names.mappings.len(), names.by_expiry.len()), (MAX_MAPPINGS, MAX_MAPPINGS));
    assert!(!knows(&names, now, "10.0.0.1", "zoom.us"));
    let [_, b, c, d] = (299u32 * 100).to_be_bytes();
    assert!(names.matches(now, IpAddr::from([10, b, c, d]), &"zoom.us".parse().unwrap()));
    for id in 0..5000 {
        names.on_query(now, client(), resolver(), &question(id, "zoom.us"));
    }
    assert!(
        names.pending_queries.len() <= MAX_PENDING_QUERIES && names.query_queue.len() <= MAX_PENDING_QUERIES
    );
}

#[test]
fn a_header_with_too_large_counts_allocates_nothing() {
    let mut message = vec![0; 12];
    message[2] = 0x80;
    message[4..12].fill(0xff);
    assert!(!has_plausible_counts(&message));
    assert!(has_plausible_counts(&answer(1, "a.example", vec![a("a.example", [1, 2, 3, 4], 5)])));
    assert!(!has_plausible_counts(&[]) && !has_plausible_counts(&[0; 11]));
}

proptest! {
    #[test]
    fn no_message_causes_a_panic(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..8),
    ) {
        let now = start();
        let mut names = names(&["com", "zoom.us"]);
        for message in &messages {
            names.on_query(now, client(), resolver(), message);
            // As if it had been asked.
            if let Some(id) = message.first_chunk() {
                names.pending_queries.insert((client(), resolver(), u16::from_be_bytes(*id)), now);
            }
            names.on_response(now, resolver(), client(), message);
        }
        prop_assert_eq!(names.mappings.len(), names.by_expiry.len());
    }

    /// Near what is right, damage goes deeper.
    #[test]
    fn no_damaged_response_causes_a_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let now = start();
        let mut names = names(&["com", "zoom.us"]);
        let records = vec![cname("a.zoom.us", "b.zoom.us"), a("b.zoom.us", [198, 51, 100, 9], 300)];
        let mut message = answer(7, "a.zoom.us", records);
        for (at, byte) in damage {
            let at = at.index(message.len());
            message[at] = byte;
        }
        message.truncate(1 + cut.index(2 * message.len()));
        names.on_query(now, client(), resolver(), &question(7, "a.zoom.us"));
        names.on_response(now, resolver(), client(), &message);
        prop_assert!(names.mappings.len() <= MAX_ADDRESSES_PER_RESPONSE * 2);
    }
}
