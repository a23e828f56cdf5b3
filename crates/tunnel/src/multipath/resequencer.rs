//! Restores the order of received numbered packets, and joins parts of packets.
//!
//! In: labelled packets or parts of packets, and the time. Out: whole packets in the order of their flow,
//! none delayed for longer than the reorder timeout of its label. Always holds: memory is bounded, whatever
//! the peer sends.

use bytes::{Buf, Bytes};
use mpvpn_flow::{Label, PartReassembler, ReorderBuffer};

/// Joins parts and resequences packets.
#[derive(Debug)]
pub(super) struct Resequencer {
    join: PartReassembler,
    pub(super) reorder: ReorderBuffer,
}

impl Resequencer {
    pub(super) fn new() -> Self {
        Self { join: PartReassembler::new(), reorder: ReorderBuffer::new() }
    }

    /// Returns label and packet of a numbered datagram without its prefix; `None` if it is malformed or a
    /// part of an incomplete packet.
    pub(super) fn open(&mut self, labelled: Bytes) -> Option<(Label, Bytes)> {
        let (label, payload) = split_label(labelled)?;
        self.join.push(label, payload).map(|packet| (label, packet))
    }

    /// Releases unused memory, after an idle time.
    pub(super) fn trim(&mut self) {
        self.reorder.trim_memory();
        // Incomplete packets this old will not be completed, and their numbers will be used again.
        self.join = PartReassembler::new();
    }
}

/// Splits a numbered datagram without its prefix into label and payload; `None` if it is malformed.
pub(super) fn split_label(mut labelled: Bytes) -> Option<(Label, Bytes)> {
    let (label, len) = Label::decode(&labelled).ok()?;
    labelled.advance(len);
    Some((label, labelled))
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use mpvpn_flow::Part;
    use mpvpn_types::{Duration, Instant};
    use serde_json::json;

    use super::*;
    use crate::vectors::{number, vectors};

    fn label(number: u32, part: Option<Part>) -> Label {
        Label { bucket: 5, ordered: true, reorder_timeout: Duration::from_millis(40), number, part }
    }

    fn labelled(label: Label, payload: &[u8]) -> Bytes {
        let mut out = BytesMut::new();
        label.encode(&mut out);
        out.extend_from_slice(payload);
        out.freeze()
    }

    fn arrive(resequencer: &mut Resequencer, now: Instant, number: u32) -> Vec<u8> {
        let opened = resequencer.open(labelled(label(number, None), &[number as u8]));
        let (label, packet) = opened.expect("a whole packet");
        let mut out = Vec::new();
        resequencer.reorder.push(now, label, packet, |packet| out.push(packet[0]));
        out
    }

    #[test]
    fn packets_that_overtook_others_wait_for_them_but_no_longer_than_asked() {
        let (mut resequencer, start) = (Resequencer::new(), Instant::now());
        assert_eq!(arrive(&mut resequencer, start, 0), [0]);
        assert!(arrive(&mut resequencer, start, 2).is_empty());
        assert_eq!(arrive(&mut resequencer, start, 1), [1, 2]);
        assert!(arrive(&mut resequencer, start, 4).is_empty());
        let due = resequencer.reorder.poll_timeout().expect("a packet waits");
        assert_eq!(due, start + Duration::from_millis(40));
        let mut late = Vec::new();
        resequencer.reorder.handle_timeout(due, |packet| late.push(packet[0]));
        assert_eq!((late, resequencer.reorder.poll_timeout()), (vec![4], None));
    }

    #[test]
    fn packets_are_delivered_as_the_vectors_say() {
        for vector in vectors(include_str!("../../../../docs/vectors/resequencing.json")) {
            let (mut resequencer, start) = (Resequencer::new(), Instant::now());
            for step in vector["steps"].as_array().unwrap() {
                let now = start + Duration::from_millis(number(&step["at_ms"]));
                let mut delivered = Vec::new();
                let mut out =
                    |packet: Bytes| delivered.push(u32::from_be_bytes(packet[..].try_into().unwrap()));
                resequencer.reorder.handle_timeout(now, &mut out);
                if let Some(packet) = step["packet"].as_object() {
                    let label = Label {
                        bucket: 5,
                        ordered: packet["ordered"].as_bool().unwrap(),
                        reorder_timeout: Duration::from_millis(number(&packet["reorder_timeout_ms"])),
                        number: number(&packet["number"]) as u32,
                        part: None,
                    };
                    resequencer.reorder.push(
                        now,
                        label,
                        Bytes::copy_from_slice(&label.number.to_be_bytes()),
                        out,
                    );
                }
                assert_eq!(json!(delivered), step["delivered"], "{} at {}", vector["name"], step["at_ms"]);
            }
        }
    }

    #[test]
    fn parts_become_a_packet_when_all_are_there() {
        let mut resequencer = Resequencer::new();
        let part = |index| Some(Part { index, last: 1 });
        assert!(resequencer.open(labelled(label(7, part(1)), b"cd")).is_none());
        let (opened, packet) = resequencer.open(labelled(label(7, part(0)), b"ab")).expect("both are there");
        assert_eq!((opened.number, &packet[..]), (7, &b"abcd"[..]));
        assert!(resequencer.open(Bytes::from_static(&[1, 2])).is_none(), "cut short");
    }

    #[test]
    fn trimming_forgets_parts_of_packets_that_nobody_waits_for() {
        let mut resequencer = Resequencer::new();
        let part = |index| Some(Part { index, last: 1 });
        assert!(resequencer.open(labelled(label(7, part(0)), b"ab")).is_none());
        resequencer.trim();
        assert!(resequencer.open(labelled(label(7, part(1)), b"cd")).is_none());
    }
}
