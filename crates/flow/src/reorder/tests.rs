use mpvpn_types::Duration;
use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A receiver of packets that hold their number.
struct Receiver {
    reorder: ReorderBuffer,
    now: Instant,
    got: Vec<u32>,
}

impl Receiver {
    fn new() -> Self {
        Self { reorder: ReorderBuffer::new(), now: Instant::now(), got: Vec::new() }
    }

    fn arrive(&mut self, number: u32) {
        self.arrive_as(number, true);
    }

    fn arrive_as(&mut self, number: u32, ordered: bool) {
        let label =
            Label { bucket: 5, ordered, reorder_timeout: 40 * MS, number: number % MODULUS, part: None };
        let packet = Bytes::copy_from_slice(&number.to_be_bytes());
        let got = &mut self.got;
        self.reorder.push(self.now, label, packet, |packet| got.push(number_of(&packet)));
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let got = &mut self.got;
        self.reorder.handle_timeout(self.now, |packet| got.push(number_of(&packet)));
    }
}

fn number_of(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet.try_into().unwrap())
}

#[test]
fn what_is_in_order_passes_at_once() {
    let mut receiver = Receiver::new();
    for number in 0..1000 {
        receiver.arrive(number);
        assert_eq!(receiver.got.len(), number as usize + 1);
    }
    assert_eq!(receiver.reorder.poll_timeout(), None);
    assert_eq!(receiver.reorder.stats(), ReorderStats::default());
}

#[test]
fn the_waits_of_held_packets_add_up() {
    let mut receiver = Receiver::new();
    receiver.arrive(0);
    receiver.arrive(2);
    receiver.pass(10 * MS);
    receiver.arrive(3);
    assert_eq!((receiver.reorder.stats().holding, receiver.reorder.stats().wait), (2, 10 * MS));
    receiver.pass(5 * MS);
    receiver.arrive(1);
    assert_eq!(receiver.got, [0, 1, 2, 3]);
    let stats = receiver.reorder.stats();
    assert_eq!((stats.held, stats.holding, stats.wait), (2, 0, (15 + 5) * MS));
    receiver.pass(100 * MS);
    receiver.arrive(5);
    receiver.pass(40 * MS);
    assert_eq!((receiver.reorder.stats().holding, receiver.reorder.stats().wait), (0, 60 * MS));
}

#[test]
fn a_packet_from_a_slower_path_is_waited_for() {
    let mut receiver = Receiver::new();
    for number in [0, 2, 3, 5] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.got, [0]);
    receiver.pass(30 * MS);
    receiver.arrive(1);
    assert_eq!(receiver.got, [0, 1, 2, 3]);
    receiver.arrive(4);
    assert_eq!(receiver.got, [0, 1, 2, 3, 4, 5]);
    assert_eq!((receiver.reorder.held_bytes(), receiver.reorder.poll_timeout()), (0, None));
}

#[test]
fn a_lost_packet_is_waited_for_no_longer_than_asked_and_still_welcome_later() {
    let mut receiver = Receiver::new();
    for number in [0, 2, 3] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.reorder.poll_timeout(), Some(receiver.now + 40 * MS));
    receiver.pass(39 * MS);
    assert_eq!(receiver.got, [0]);
    receiver.pass(MS);
    assert_eq!(receiver.got, [0, 2, 3]);
    receiver.arrive(4);
    receiver.arrive(1);
    receiver.arrive(1);
    assert_eq!(receiver.got, [0, 2, 3, 4, 1]);
    let stats = ReorderStats { held: 2, late: 1, duplicates: 1, given_up: 1, ..receiver.reorder.stats() };
    assert_eq!(receiver.reorder.stats(), stats);
}

#[test]
fn each_gap_has_a_deadline_of_its_own() {
    let mut receiver = Receiver::new();
    receiver.arrive(1);
    receiver.pass(20 * MS);
    receiver.arrive(3);
    receiver.pass(20 * MS);
    assert_eq!(receiver.got, [1]);
    receiver.pass(20 * MS);
    assert_eq!(receiver.got, [1, 3]);
}

#[test]
fn packets_that_need_no_order_are_never_held_and_never_doubled() {
    let mut receiver = Receiver::new();
    for number in [3, 1, 3, 0, 1, 2] {
        receiver.arrive_as(number, false);
    }
    assert_eq!(receiver.got, [3, 1, 0, 2]);
    assert_eq!(receiver.reorder.poll_timeout(), None);
}

#[test]
fn a_sender_that_jumps_far_ahead_is_followed() {
    let mut receiver = Receiver::new();
    for number in [0, 2, 2_000_000, 2_000_001] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.got, [0, 2, 2_000_000, 2_000_001]);
    assert_eq!((receiver.reorder.held_bytes(), receiver.reorder.poll_timeout()), (0, None));
}

/// The memory that the buffer has allocated (bytes), when a hostile peer sends one small packet in each of
/// many sequences.
fn allocated(reorder: &ReorderBuffer) -> usize {
    let places = reorder.entries + reorder.spare.as_ref().map_or(0, |spare| spare.capacity());
    places * size_of::<Entry>()
        + reorder.waiting.capacity() * size_of::<u16>()
        + reorder.given_up.ranges.capacity() * size_of::<GivenUpRange>()
        + reorder.sequences.capacity() * 8 / 7 * (size_of::<(u16, Sequence)>() + 1)
}

#[test]
fn far_numbers_in_all_sequences_take_bounded_memory() {
    for far in [1, 100, 5000, 16_383, MODULUS / 2 - 1] {
        let mut reorder = ReorderBuffer::new();
        let mut now = Instant::now();
        for round in 0..3 {
            for bucket in 0..crate::label::BUCKETS as u16 {
                let label = Label {
                    bucket,
                    ordered: true,
                    reorder_timeout: 1000 * MS,
                    number: (round + 1) * far,
                    part: None,
                };
                reorder.push(now, label, Bytes::from_static(&[0]), |_| {});
                assert!(reorder.entries <= MAX_ENTRIES, "{far}: {}", reorder.entries);
                assert!(reorder.waiting.len() <= MAX_WAITING_SEQUENCES);
            }
            assert!(allocated(&reorder) <= 512 << 10, "{far}: {} bytes", allocated(&reorder));
            now += 300 * MS;
        }
        let counted: usize =
            reorder.sequences.values().filter_map(|it| Some(it.entries.as_ref()?.capacity())).sum();
        assert_eq!(counted, reorder.entries, "{far}");
        reorder.handle_timeout(now + 2000 * MS, |_| {});
        assert_eq!((reorder.entries, reorder.waiting.len(), reorder.bytes), (0, 0, 0), "{far}");
    }
}

#[test]
fn a_sequence_that_uses_all_places_leaves_the_others_in_order_afterwards() {
    let mut receiver = Receiver::new();
    let hog = Label {
        bucket: 6,
        ordered: true,
        reorder_timeout: 40 * MS,
        number: MAX_ENTRIES as u32 - 1,
        part: None,
    };
    receiver.reorder.push(receiver.now, hog, Bytes::from_static(&[0; 4]), |_| {});
    for number in [0, 2, 1, 3] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.got, [0, 2, 3], "without room for a place nothing is waited for");
    receiver.pass(50 * MS);
    for number in [5, 4] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.got[receiver.got.len() - 2..], [4, 5]);
}

#[test]
fn memory_is_bounded_whatever_is_sent() {
    let mut reorder = ReorderBuffer::new();
    let now = Instant::now();
    let packet = Bytes::from(vec![0; 60_000]);
    let mut got = 0;
    for number in 1..5000 {
        let label = Label {
            bucket: (number % 3) as u16,
            ordered: true,
            reorder_timeout: 1000 * MS,
            number,
            part: None,
        };
        reorder.push(now, label, packet.clone(), |_| got += 1);
        assert!(reorder.held_bytes() <= MAX_HELD_BYTES);
    }
    assert!(got > 4000, "{got}");
}

#[test]
fn numbers_wrap_around() {
    let mut receiver = Receiver::new();
    receiver.reorder.sequences.entry(5).or_default().next = MODULUS - 2;
    for number in [MODULUS - 2, MODULUS, MODULUS - 1, MODULUS + 1] {
        receiver.arrive(number);
    }
    assert_eq!(receiver.got, [MODULUS - 2, MODULUS - 1, MODULUS, MODULUS + 1]);
}

proptest! {
    /// Arrivals in any order, with losses and repetitions: each that arrived comes out once, and those
    /// that were never overtaken by a deadline in order.
    #[test]
    fn whatever_arrives_is_delivered_once(
        mut arrivals in proptest::collection::vec(0..300u32, 1..400), pause in 0..30u64
    ) {
        let mut receiver = Receiver::new();
        for number in &arrivals {
            receiver.arrive(*number);
            receiver.pass(Duration::from_millis(pause % 7));
        }
        receiver.pass(1000 * MS);
        receiver.pass(1000 * MS);
        prop_assert_eq!(receiver.reorder.held_bytes(), 0);
        prop_assert_eq!(receiver.reorder.poll_timeout(), None);
        receiver.got.sort_unstable();
        arrivals.sort_unstable();
        arrivals.dedup();
        // The list of what was given up is bounded, so that a number may be taken for a repetition.
        prop_assert!(receiver.got.len() + MAX_GIVEN_UP_RANGES >= arrivals.len());
        let mut once = receiver.got.clone();
        once.dedup();
        prop_assert_eq!(&once, &receiver.got);
    }

    #[test]
    fn without_deadlines_order_is_perfect(
        swaps in proptest::collection::vec((0..200usize, 0..20usize), 0..200)
    ) {
        let mut numbers: Vec<u32> = (0..220).collect();
        for (at, by) in swaps {
            numbers.swap(at, at + by);
        }
        let mut receiver = Receiver::new();
        for number in numbers {
            receiver.arrive(number);
        }
        prop_assert_eq!(receiver.got, (0..220).collect::<Vec<u32>>());
    }
}
