//! Labels of numbered packets with resequencing and reassembly, and FEC groups.

use std::collections::BTreeMap;

use bytes::Bytes;
use mpvpn_flow::{
    Label, PartReassembler, ReorderBuffer,
    fec::{GroupDecoder, GroupEncoder, GroupPosition, Load, LossMonitor, Symbol},
};
use mpvpn_types::{Duration, Fec, Instant, PathId};

use crate::input::Input;

/// The most bytes of held packets: `MAX_HELD_BYTES` of the resequencer.
const MAX_HELD_BYTES: usize = 16 << 20;

/// Numbered packets that arrive in any order: `(time or label, payload)…`.
///
/// A label that starts with 0xff stands for time that passes.
pub fn labels(data: &[u8]) {
    let mut input = Input(data);
    let start = Instant::now();
    let mut now = start;
    let (mut parts, mut reorder) = (PartReassembler::new(), ReorderBuffer::new());
    let (mut pushed, mut delivered) = (0u64, 0u64);
    while !input.is_empty() {
        if input.0[0] == 0xff {
            input.byte();
            now += Duration::from_millis(u64::from(input.byte()) * 5);
            // Both ways to pass time must do: timers that are late, and timers on the dot.
            while input.bool()
                && let Some(at) = reorder.poll_timeout().filter(|at| *at <= now)
            {
                reorder.handle_timeout(at, |_| delivered += 1);
            }
            reorder.handle_timeout(now, |_| delivered += 1);
            assert!(reorder.poll_timeout().is_none_or(|at| at > now), "what is due was handled");
            continue;
        }
        let Ok((label, len)) = Label::decode(input.0) else {
            input.byte();
            continue;
        };
        let mut again = Vec::new();
        label.encode(&mut again);
        assert_eq!(Label::decode(&again), Ok((label, len)));
        input.take(len);
        let payload = Bytes::copy_from_slice(input.short());
        let Some(packet) = parts.push(label, payload) else { continue };
        pushed += 1;
        reorder.push(now, label, packet, |_| delivered += 1);
        assert!(reorder.held_bytes() <= MAX_HELD_BYTES);
        let stats = reorder.stats();
        assert!(delivered + stats.duplicates <= pushed, "nothing is delivered twice");
    }
    // No packet is held longer than its sender asked for, which is 1020 ms at most.
    now += Duration::from_millis(1020);
    reorder.handle_timeout(now, |_| delivered += 1);
    assert_eq!((reorder.held_bytes(), reorder.poll_timeout()), (0, None));
    assert_eq!(
        delivered + reorder.stats().duplicates,
        pushed,
        "each is delivered, or counted as a duplicate"
    );
    reorder.trim_memory();
}

/// FEC: groups that are lost, repeated and forged.
///
/// The first byte says whether a sender's groups are checked (its packets arrive, but for some) or positions
/// are forged.
pub fn fec(data: &[u8]) {
    let mut input = Input(data);
    if input.bool() { lossy_groups(&mut input) } else { forged_groups(&mut input) }
}

/// Packets that a sender protects are restored as they were, or not at all.
fn lossy_groups(input: &mut Input<'_>) {
    let (data, repair) = (input.byte() % Fec::MAX_DATA + 1, input.byte() % Fec::MAX_REPAIR + 1);
    let policy = if input.bool() { Fec::Auto } else { Fec::Fixed { data, repair } };
    let loss = f64::from(input.byte()) / 512.0;
    let (path, mut now) = (PathId(0), Instant::now());
    let mut encoder = GroupEncoder::new(b"");
    let mut monitor = LossMonitor::default();
    if let Some(plan) = monitor.update(policy, loss) {
        encoder.set_plan(path, plan);
    }
    let mut decoder = GroupDecoder::new();
    let (mut sent, mut restored): (BTreeMap<u16, Vec<Bytes>>, Vec<Bytes>) = Default::default();
    while !input.is_empty() {
        let flags = input.byte();
        let packet = Bytes::copy_from_slice(if flags & 1 == 0 { input.short() } else { input.long() });
        let position = encoder.assign_position(now, path, packet.len());
        if let Some(position) = position {
            sent.entry(position.group).or_default().push(packet.clone());
            let load = if flags & 2 == 0 { Load::Light } else { Load::Full };
            encoder.add_packet(now, path, packet.clone(), load);
            for _ in 0..2 - (flags >> 2 & 1) {
                if flags & 8 != 0 {
                    decoder.push(now, position, &packet, |packet| restored.push(packet));
                }
            }
        }
        if flags & 16 != 0 {
            now += Duration::from_millis(u64::from(flags >> 5) * 10);
            encoder.close_due(now, |_| {});
        }
        while let Some((group, datagram)) = encoder.next_repair(now, path) {
            let (position, len) = GroupPosition::decode(&datagram).expect("what was encoded");
            assert_eq!(position.group, group);
            if input.byte() & 3 != 0 {
                decoder.push(now, position, &datagram[len..], |packet| restored.push(packet));
            }
        }
    }
    // Groups of 2^16 packets repeat their numbers; no input is so long.
    let all: Vec<&Bytes> = sent.values().flatten().collect();
    assert!(restored.iter().all(|packet| all.contains(&packet)), "a restored packet is one that was sent");
    assert_eq!(decoder.stats().recovered as usize, restored.len());
    assert!(restored.len() <= all.len());
}

/// Positions and bytes that no sender made.
fn forged_groups(input: &mut Input<'_>) {
    let mut now = Instant::now();
    let mut decoder = GroupDecoder::new();
    let mut restored = 0u64;
    while !input.is_empty() {
        let Ok((position, len)) = GroupPosition::decode(input.0) else {
            now += Duration::from_millis(u64::from(input.byte()) * 20);
            continue;
        };
        let mut again = Vec::new();
        position.encode(&mut again);
        assert_eq!(GroupPosition::decode(&again), Ok((position, len)));
        if let Symbol::Repair { index, source_count } = position.symbol {
            assert!(index < Fec::MAX_REPAIR && (1..=Fec::MAX_DATA).contains(&source_count));
        }
        input.take(len);
        let bytes = if input.bool() { input.short() } else { input.long() };
        let mut came = 0;
        decoder.push(now, position, bytes, |packet| {
            // The length of a restored packet is coded in two bytes of the repair packet.
            assert!(packet.len() <= bytes.len().max(usize::from(u16::MAX)));
            came += 1;
        });
        assert!(came <= u64::from(Fec::MAX_REPAIR), "no more than a group has repair packets");
        restored += came;
        assert_eq!(decoder.stats().recovered, restored);
    }
    decoder.clear();
    assert_eq!(decoder.stats().recovered, restored);
}
