//! Acknowledgements that leave together with an answer.
//!
//! noq acknowledges once enough packets have arrived, or its timer has run out: in a packet of its own, as it
//! writes no acknowledgement into data that leaves before. Where a packet comes now and then and is answered
//! at once, both ends send and receive twice as much. So this end lets the timer run out when the answer
//! leaves.
//!
//! In: when packets arrive. Out: when noq's timer runs out, if it runs for one packet alone. Always holds:
//! where packets follow one another within the time of the timer, nothing is said: one acknowledgement is for
//! many of them then, and is no more expensive in a packet of its own than in each packet that leaves.

use mpvpn_types::Instant;

use crate::config::MAX_ACK_DELAY;

/// The last packet that has arrived.
#[derive(Debug, Default)]
pub(super) struct LonePacket {
    last: Option<Instant>,
    /// Whether none arrived within [`MAX_ACK_DELAY`] before it.
    is_lone: bool,
}

impl LonePacket {
    /// A packet has arrived at `at`.
    pub(super) fn on_packet(&mut self, at: Instant) {
        let before = self.last.replace(at);
        self.is_lone = before.is_none_or(|before| at.saturating_duration_since(before) >= MAX_ACK_DELAY);
    }

    /// When noq acknowledges the last packet, if that arrived alone and nothing else makes noq do so earlier.
    pub(super) fn acknowledged_at(&self) -> Option<Instant> {
        self.last.filter(|_| self.is_lone).map(|at| at + MAX_ACK_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_packet_without_another_just_before_is_lone() {
        let (mut packet, start) = (LonePacket::default(), Instant::now());
        assert_eq!(packet.acknowledged_at(), None);
        let mut after = |ms| {
            let at = start + Duration::from_millis(ms);
            packet.on_packet(at);
            packet.acknowledged_at().map(|due| due - at)
        };
        let alone = Some(MAX_ACK_DELAY);
        assert_eq!([0, 0, 5, 9, 20, 24, 29].map(&mut after), [alone, None, alone, None, alone, None, alone]);
    }
}
