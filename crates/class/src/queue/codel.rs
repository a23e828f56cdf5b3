//! CoDel's control law for one flow (RFC 8289 §5).
//!
//! In: for every dequeued packet, its queueing delay and the bytes left in the flow. Out: send or drop the
//! packet. Always holds: the last packet of a flow is never dropped.

/// CoDel's parameters, the same for every flow. Times in ns.
#[derive(Debug)]
pub(super) struct ControlParameters {
    /// The acceptable standing queue delay.
    pub(super) target_ns: u64,
    /// How long the target must be exceeded before the first drop.
    pub(super) interval_ns: u64,
    /// Size of the largest packet in bytes. A flow with no more than this left has no standing queue, even
    /// if a slow path makes a packet wait longer than the target.
    pub(super) max_packet_bytes: usize,
}

impl ControlParameters {
    /// The time between drops shrinks with the square root of their number, so that the rate of a TCP sender
    /// falls linearly.
    fn next_drop(&self, after: u64, count: u32) -> u64 {
        after.saturating_add((self.interval_ns as f64 / f64::from(count.max(1)).sqrt()) as u64)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DropDecision {
    Send,
    Drop,
}

/// CoDel's state of one flow. Names as in RFC 8289, times in ns.
#[derive(Clone, Debug, Default)]
pub(super) struct Codel {
    /// If the delay is above the target: when it will have been above it for one interval.
    first_above_time: Option<u64>,
    dropping: bool,
    pub(super) drop_state: DropState,
}

/// The part of the state that outlives an empty flow, so that a flow that returns soon is not unrestricted
/// again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DropState {
    /// Time of the next drop.
    drop_next: u64,
    /// Drops since dropping began.
    pub(super) count: u32,
    /// The `count` with which dropping began the last time.
    lastcount: u32,
}

impl Codel {
    pub(super) fn with_drop_state(drop_state: DropState) -> Self {
        Self { drop_state, ..Self::default() }
    }

    /// Decides about a dequeued packet with this queueing delay, which left `behind` bytes in the flow.
    pub(super) fn decide(
        &mut self,
        parameters: &ControlParameters,
        now: u64,
        sojourn_ns: u64,
        behind: usize,
    ) -> DropDecision {
        if !self.ok_to_drop(parameters, now, sojourn_ns, behind) {
            self.dropping = false;
            return DropDecision::Send;
        }
        let drop_state = &mut self.drop_state;
        if !self.dropping {
            self.dropping = true;
            let delta = drop_state.count.saturating_sub(drop_state.lastcount);
            let recent = now.saturating_sub(drop_state.drop_next) < parameters.interval_ns.saturating_mul(16);
            drop_state.count = if delta > 1 && recent { delta } else { 1 };
            drop_state.lastcount = drop_state.count;
            drop_state.drop_next = parameters.next_drop(now, drop_state.count);
            return DropDecision::Drop;
        }
        if now < drop_state.drop_next {
            return DropDecision::Send;
        }
        drop_state.count = drop_state.count.saturating_add(1);
        drop_state.drop_next = parameters.next_drop(drop_state.drop_next, drop_state.count);
        DropDecision::Drop
    }

    /// Called when the flow has no packet left.
    pub(super) fn ran_empty(&mut self) {
        self.first_above_time = None;
        self.dropping = false;
    }

    /// The RFC's `ok_to_drop`.
    fn ok_to_drop(
        &mut self,
        parameters: &ControlParameters,
        now: u64,
        sojourn_ns: u64,
        behind: usize,
    ) -> bool {
        if sojourn_ns < parameters.target_ns || behind <= parameters.max_packet_bytes {
            self.first_above_time = None;
            return false;
        }
        let since = *self.first_above_time.get_or_insert_with(|| now.saturating_add(parameters.interval_ns));
        now >= since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const PARAMETERS: ControlParameters =
        ControlParameters { target_ns: 5 * MS, interval_ns: 100 * MS, max_packet_bytes: 1514 };

    /// Times in ms of the drops in a queue that never gets shorter, with one packet per ms.
    fn drop_times(codel: &mut Codel, from: u64, until: u64) -> Vec<u64> {
        (from..until)
            .filter(|&t| codel.decide(&PARAMETERS, t * MS, 20 * MS, 30_000) == DropDecision::Drop)
            .collect()
    }

    #[test]
    fn the_first_drop_comes_after_an_interval_and_later_ones_ever_faster() {
        let times = drop_times(&mut Codel::default(), 1000, 1500);
        // 100 ms, then + 100/sqrt(1), + 100/sqrt(2), + 100/sqrt(3), ...
        assert_eq!(times, [1100, 1200, 1271, 1329, 1379, 1424, 1464]);
    }

    #[test]
    fn a_single_dip_below_the_target_starts_the_interval_again() {
        let mut codel = Codel::default();
        assert_eq!(drop_times(&mut codel, 1000, 1090), []);
        assert_eq!(codel.decide(&PARAMETERS, 1090 * MS, 4 * MS, 30_000), DropDecision::Send);
        assert_eq!(drop_times(&mut codel, 1091, 1191), []);
        assert_eq!(drop_times(&mut codel, 1191, 1192), [1191]);
    }

    #[test]
    fn one_remaining_packet_is_no_standing_queue() {
        let mut codel = Codel::default();
        for t in 0..10_000 {
            assert_eq!(codel.decide(&PARAMETERS, t * MS, 50 * MS, 1514), DropDecision::Send);
        }
        let small = ControlParameters { max_packet_bytes: 0, ..PARAMETERS };
        for t in 0..10_000 {
            assert_eq!(codel.decide(&small, t * MS, 50 * MS, 0), DropDecision::Send);
        }
    }

    #[test]
    fn a_flow_that_returns_soon_loses_packets_at_its_former_rate() {
        let mut codel = Codel::default();
        let before = drop_times(&mut codel, 1000, 3000).len();
        let remembered = codel.drop_state;
        assert_eq!(remembered.count as usize, before);
        let mut soon = Codel::with_drop_state(remembered);
        let mut late = Codel::with_drop_state(remembered);
        let soon = drop_times(&mut soon, 3100, 3500).len();
        let late = drop_times(&mut late, 10_000, 10_400).len();
        assert!(soon > 3 * late, "{soon} drops when it came back soon, {late} when late");
    }
}
