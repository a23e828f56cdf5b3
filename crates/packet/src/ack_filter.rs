//! The ACK filter: whether a TCP acknowledgement supersedes an earlier one.
//!
//! In: two packets of which one waits directly behind the other. Out: whether the earlier one may be dropped.
//! Always holds: only a *bare* acknowledgement is superseded, and only by another one of its connection. Bare
//! means: no payload, no flag but ACK, no option but timestamps in their usual layout, and no option or
//! extension header of IP. SACK blocks, ECE, AccECN bits, Multipath TCP and unknown options are thus never
//! dropped.
//!
//! The later one acknowledges more, from the same sequence number. So its window, which is not smaller,
//! replaces that of the earlier one (RFC 9293 §3.10.7.4), and its timestamps are not older (RFC 7323 §4.3,
//! §5.3): a sender that gets only the later one may send no less, and is in the state in which both would
//! leave it. A duplicate acknowledgement, which signals loss (RFC 5681 §2), supersedes none; one that
//! acknowledges more shows that the segment which seemed lost has arrived.

use crate::checksum;
use crate::ip::{self, IPV4_HEADER, IPV6_HEADER, IpPacket, Version};
use crate::tcp::TCP_HEADER;
use crate::{be16, be32, protocol, tcp_flags};

/// A TCP header with the timestamps option in its usual layout (RFC 7323, appendix A): the length of the
/// header, the bytes before the two timestamp values (two NOPs, kind 8, length 10), and the offsets of the
/// two values.
const TCP_HEADER_WITH_TIMESTAMPS: usize = 32;
const TIMESTAMP_OPTION_PREFIX: [u8; 4] = [1, 1, 8, 10];
const TIMESTAMP_VALUE_OFFSET: usize = 24;
const TIMESTAMP_ECHO_OFFSET: usize = 28;
/// Length of the longest bare acknowledgement, in bytes.
const MAX_LEN: usize = IPV6_HEADER + TCP_HEADER_WITH_TIMESTAMPS;

/// Whether `later` supersedes `earlier`, an acknowledgement that waits directly before it. Both are whole IP
/// packets with complete checksums.
pub fn supersedes(later: &[u8], earlier: &[u8]) -> bool {
    if earlier.len() > MAX_LEN {
        return false;
    }
    let (Ok(later), Ok(earlier)) = (ip::parse(later), ip::parse(earlier)) else { return false };
    later.version() == earlier.version()
        && later.total_len() == earlier.total_len()
        && is_bare_ack(&later)
        && is_bare_ack(&earlier)
        && later.addresses() == earlier.addresses()
        && later.transport()[..4] == earlier.transport()[..4]
        && acknowledges_more(later.bytes(), earlier.bytes(), later.transport_offset())
        // The scale of windows is not known, so a smaller one may permit less although it acknowledges more.
        && be16(later.transport(), 14) >= be16(earlier.transport(), 14)
        && checksum::is_intact(&later)
        && checksum::is_intact(&earlier)
}

/// Whether a packet is a bare acknowledgement behind a plain IP header.
fn is_bare_ack(packet: &IpPacket<'_>) -> bool {
    let plain = match packet.version() {
        Version::V4 => IPV4_HEADER,
        Version::V6 => IPV6_HEADER,
    };
    packet.protocol() == protocol::TCP
        && packet.transport_offset() == plain
        && packet.fragment().is_none()
        && is_bare_ack_segment(packet.transport())
}

/// Whether a TCP segment is a bare acknowledgement.
#[inline]
pub(crate) fn is_bare_ack_segment(segment: &[u8]) -> bool {
    // The low bits of byte 12 are reserved, or AE of AccECN.
    match segment.len() {
        TCP_HEADER => segment[12] == 5 << 4 && segment[13] == tcp_flags::ACK,
        TCP_HEADER_WITH_TIMESTAMPS => {
            segment[12] == 8 << 4
                && segment[13] == tcp_flags::ACK
                && segment[TCP_HEADER..TIMESTAMP_VALUE_OFFSET] == TIMESTAMP_OPTION_PREFIX
        }
        _ => false,
    }
}

/// Whether `later` acknowledges more than `earlier`, is not older, and is forwarded alike. Both are bare
/// acknowledgements of one connection, of the same length, with IP headers of `ip_header` bytes.
#[inline]
pub(crate) fn acknowledges_more(later: &[u8], earlier: &[u8], ip_header: usize) -> bool {
    if !ip::same_service(earlier, later, ip_header) {
        return false;
    }
    let (earlier, later) = (&earlier[ip_header..], &later[ip_header..]);
    // Sequence numbers and timestamps wrap.
    let ahead = |at: usize| be32(later, at).wrapping_sub(be32(earlier, at)) as i32;
    later[4..8] == earlier[4..8]
        && ahead(8) > 0
        && (later.len() == TCP_HEADER
            || ahead(TIMESTAMP_VALUE_OFFSET) >= 0 && ahead(TIMESTAMP_ECHO_OFFSET) >= 0)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use mpvpn_packets::{Packet, Tcp};
    use proptest::prelude::*;

    use super::*;
    use crate::FlowKey;
    use crate::tcp::Segment;

    /// The timestamps option in its usual layout.
    fn timestamps(value: u32, echo: u32) -> Vec<u8> {
        [&TIMESTAMP_OPTION_PREFIX[..], &value.to_be_bytes(), &echo.to_be_bytes()].concat()
    }

    /// A bare acknowledgement of everything before `ack`.
    fn ack(base: &Packet, ack: u32, options: &[u8]) -> Vec<u8> {
        base.tcp_with(&Tcp { ack, options: options.to_vec(), ..Tcp::default() }, b"")
    }

    #[test]
    fn a_later_acknowledgement_supersedes_an_earlier_one_also_where_numbers_wrap() {
        for base in [Packet::v4(), Packet::v6()] {
            assert!(supersedes(&ack(&base, 200, &[]), &ack(&base, 100, &[])));
            let earlier = ack(&base, u32::MAX - 10, &timestamps(u32::MAX, u32::MAX));
            assert!(supersedes(&ack(&base, 10, &timestamps(3, 4)), &earlier));
            assert!(!supersedes(&earlier, &ack(&base, 10, &timestamps(3, 4))));
            let window = |ack, window| base.tcp_with(&Tcp { ack, window, ..Tcp::default() }, b"");
            assert!(supersedes(&window(200, 70), &window(100, 60)), "the reader has caught up");
            assert!(!supersedes(&window(200, 59), &window(100, 60)), "it may withdraw some");
            assert!(!supersedes(&window(100, 70), &window(100, 60)), "an update of the window only");
        }
    }

    /// A change to a packet before it is built.
    type Change = fn(&mut Packet, &mut Tcp);

    /// Changes that make one of two acknowledgements more than a bare one, or one of something else.
    const CHANGES: [(&str, Change); 19] = [
        ("SYN", |_, tcp| tcp.flags |= tcp_flags::SYN),
        ("FIN", |_, tcp| tcp.flags |= tcp_flags::FIN),
        ("RST", |_, tcp| tcp.flags |= tcp_flags::RST),
        ("PSH", |_, tcp| tcp.flags |= tcp_flags::PSH),
        ("URG", |_, tcp| tcp.flags |= tcp_flags::URG),
        ("ECE", |_, tcp| tcp.flags |= tcp_flags::ECE),
        ("CWR", |_, tcp| tcp.flags |= tcp_flags::CWR),
        ("no ACK", |_, tcp| tcp.flags = 0),
        ("a SACK block", |_, tcp| tcp.options = vec![1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2]),
        ("Multipath TCP", |_, tcp| tcp.options = vec![30, 12, 0x20, 1, 0, 0, 0, 1, 0, 0, 0, 2]),
        ("an unknown option", |_, tcp| tcp.options = vec![253, 4, 1, 2]),
        ("no timestamps", |_, tcp| tcp.options.clear()),
        ("a keep-alive probe", |_, tcp| tcp.seq -= 1),
        ("another port", |packet, _| packet.src.set_port(9)),
        ("another host", |packet, _| packet.dst = SocketAddr::new(packet.src.ip(), packet.dst.port())),
        ("another DSCP", |packet, _| packet.tos = 0xb8),
        ("an ECN mark", |packet, _| packet.tos |= 1),
        ("another TTL", |packet, _| packet.ttl -= 1),
        ("IP options", |packet, _| packet.ip_options = vec![1; 4]),
    ];

    #[test]
    fn an_acknowledgement_that_says_more_is_kept_and_drops_none() {
        for base in [Packet::v4(), Packet::v6()] {
            let build = |number, change: Change| {
                let tcp = Tcp { seq: 7, ack: number, options: timestamps(5, 5), ..Tcp::default() };
                let (mut packet, mut tcp) = (base.clone(), tcp);
                change(&mut packet, &mut tcp);
                packet.tcp_with(&tcp, b"")
            };
            let plain: Change = |_, _| {};
            assert!(supersedes(&build(200, plain), &build(100, plain)));
            for (what, change) in CHANGES {
                if what == "IP options" && base.src.is_ipv6() {
                    continue;
                }
                assert!(!supersedes(&build(200, change), &build(100, plain)), "{what} in the later one");
                assert!(!supersedes(&build(200, plain), &build(100, change)), "{what} in the earlier one");
            }
            let payload = base.tcp_with(&Tcp { ack: 200, ..Tcp::default() }, b"data");
            assert!(!supersedes(&payload, &ack(&base, 100, &[])));
            assert!(!supersedes(&ack(&base, 200, &[]), &payload));
        }
    }

    #[test]
    fn duplicates_and_older_acknowledgements_supersede_none() {
        let base = Packet::v4();
        let earlier = ack(&base, 100, &timestamps(50, 50));
        for (what, later) in [
            ("a duplicate", ack(&base, 100, &timestamps(60, 60))),
            ("an older one", ack(&base, 99, &timestamps(60, 60))),
            ("one half of the sequence numbers ahead", ack(&base, 100 + (1 << 31), &timestamps(60, 60))),
            ("an older timestamp", ack(&base, 200, &timestamps(49, 60))),
            ("an older echo", ack(&base, 200, &timestamps(60, 49))),
        ] {
            assert!(!supersedes(&later, &earlier), "{what}");
        }
    }

    #[test]
    fn bits_of_accurate_ecn_and_damage_are_kept() {
        let (earlier, later) = (ack(&Packet::v4(), 100, &[]), ack(&Packet::v4(), 200, &[]));
        let accurate = |packet: &[u8]| {
            let mut packet = packet.to_vec();
            packet[32] |= 1;
            packet[36..38].fill(0);
            let view = ip::parse(&packet).unwrap();
            let pseudo = checksum::pseudo(view.addresses(), protocol::TCP, 20);
            let check = !checksum::add(pseudo, checksum::sum(view.transport()));
            crate::put16(&mut packet, 36, check);
            assert!(checksum::is_intact(&ip::parse(&packet).unwrap()));
            packet
        };
        assert!(supersedes(&later, &earlier));
        assert!(!supersedes(&accurate(&later), &earlier) && !supersedes(&later, &accurate(&earlier)));
        assert!(!supersedes(&accurate(&later), &accurate(&earlier)));
        for at in [10, 36] {
            let damaged = |packet: &[u8]| {
                let mut packet = packet.to_vec();
                packet[at] ^= 1;
                packet
            };
            assert!(!supersedes(&damaged(&later), &earlier) && !supersedes(&later, &damaged(&earlier)));
        }
    }

    /// The sender of data as far as bare acknowledgements change it (RFC 9293 §3.10.7.4, RFC 7323 §4.3),
    /// without scaling.
    #[derive(Clone, Debug, PartialEq)]
    struct Sender {
        unacknowledged: u32,
        /// The sequence number that it may send up to, and the segment that said so: SND.WL1 and SND.WL2.
        right_edge: u32,
        window_update: Option<(u32, u32)>,
        recent_timestamp: Option<u32>,
        duplicates: u32,
    }

    impl Sender {
        fn take(&mut self, packet: &[u8]) {
            let view = ip::parse(packet).unwrap();
            let segment = Segment::of(&view).unwrap();
            let ahead = segment.ack().wrapping_sub(self.unacknowledged) as i32;
            if ahead == 0 {
                self.duplicates += 1;
            } else if ahead > 0 {
                (self.unacknowledged, self.duplicates) = (segment.ack(), 0);
            }
            let is_update = self.window_update.is_none_or(|(seq, ack)| {
                let newer = segment.seq().wrapping_sub(seq) as i32;
                newer > 0 || newer == 0 && segment.ack().wrapping_sub(ack) as i32 >= 0
            });
            if ahead >= 0 && is_update {
                self.window_update = Some((segment.seq(), segment.ack()));
                self.right_edge = segment.ack().wrapping_add(segment.window().into());
            }
            if let Some(value) = view.transport().get(TIMESTAMP_VALUE_OFFSET..TIMESTAMP_ECHO_OFFSET) {
                let value = be32(value, 0);
                let is_newer =
                    self.recent_timestamp.is_none_or(|recent| value.wrapping_sub(recent) as i32 >= 0);
                self.recent_timestamp = if is_newer { Some(value) } else { self.recent_timestamp };
            }
        }
    }

    fn acknowledgement() -> impl Strategy<Value = Vec<u8>> {
        let flags = prop_oneof![20 => Just(tcp_flags::ACK), 1 => any::<u8>()];
        let options = prop_oneof![
            4 => Just(Vec::new()),
            4 => (0u32..4, 0u32..4).prop_map(|(value, echo)| timestamps(value, echo)),
            1 => prop::collection::vec(prop::collection::vec(0u8..12, 4), 1..4)
                .prop_map(|words| words.concat()),
        ];
        let payload = prop_oneof![10 => Just(Vec::new()), 1 => Just(vec![0; 4])];
        let service = prop_oneof![10 => Just(0u8), 1 => any::<u8>()];
        (any::<bool>(), service, 0u16..2, 0u32..2, 1000u32..1004, flags, 0u16..4, options, payload).prop_map(
            |(v4, tos, port, seq, ack, flags, window, options, payload)| {
                let mut packet = Packet { tos, ..if v4 { Packet::v4() } else { Packet::v6() } };
                packet.src.set_port(5000 + port / 2);
                packet.tcp_with(&Tcp { seq, ack, flags, window, options }, &payload)
            },
        )
    }

    proptest! {
        #[test]
        fn a_superseded_acknowledgement_says_nothing_that_the_later_one_lacks(
            earlier in acknowledgement(), later in acknowledgement(), una in 990u32..1004,
        ) {
            if supersedes(&later, &earlier) {
                let (first, second) = (ip::parse(&earlier).unwrap(), ip::parse(&later).unwrap());
                prop_assert_eq!(FlowKey::of(&first), FlowKey::of(&second));
                prop_assert_eq!(first.tos(), second.tos());
                for view in [&first, &second] {
                    let segment = Segment::of(view).unwrap();
                    prop_assert!(segment.payload().is_empty() && segment.flags() == tcp_flags::ACK);
                }
                let before = Sender {
                    unacknowledged: una,
                    right_edge: una,
                    window_update: None,
                    recent_timestamp: None,
                    duplicates: 0,
                };
                let (mut both, mut only) = (before.clone(), before);
                both.take(&earlier);
                both.take(&later);
                only.take(&later);
                // Where the later one acknowledges something, a duplicate before it no longer counts.
                if Segment::of(&second).unwrap().ack() > una {
                    prop_assert_eq!(both, only);
                }
                let edge = |view| {
                    let segment = Segment::of(view).unwrap();
                    segment.ack() + u32::from(segment.window())
                };
                prop_assert!(edge(&second) > edge(&first));
            }
        }

        #[test]
        fn of_a_run_the_filter_keeps_the_order_the_last_and_the_highest(
            acks in prop::collection::vec(0u32..50, 1..40),
        ) {
            let mut kept: Vec<Vec<u8>> = Vec::new();
            for number in &acks {
                let packet = ack(&Packet::v4(), *number, &[]);
                match kept.last_mut() {
                    Some(last) if supersedes(&packet, last) => *last = packet,
                    _ => kept.push(packet),
                }
            }
            let numbers: Vec<u32> =
                kept.iter().map(|packet| Segment::of(&ip::parse(packet).unwrap()).unwrap().ack()).collect();
            prop_assert_eq!(numbers.last(), acks.last());
            let mut all = acks.iter();
            prop_assert!(numbers.iter().all(|kept| all.any(|number| number == kept)), "{:?}", numbers);
            prop_assert_eq!(numbers.iter().max(), acks.iter().max());
        }

        #[test]
        fn no_bytes_cause_a_panic(
            mut later in acknowledgement(), mut earlier in acknowledgement(),
            changes in prop::collection::vec(
                (any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 0..6,
            ),
            cut in any::<prop::sample::Index>(),
        ) {
            for (of_later, at, byte) in changes {
                let packet = if of_later { &mut later } else { &mut earlier };
                let at = at.index(packet.len());
                packet[at] = byte;
            }
            supersedes(&later, &earlier);
            earlier.truncate(cut.index(earlier.len() + 1));
            supersedes(&later, &earlier);
            supersedes(&earlier, &later);
        }
    }
}
