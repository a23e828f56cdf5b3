//! CoDel's control law, for one flow (RFC 8289 section 5).
//!
//! In: for every packet that is taken from the flow, how long it waited and what is left behind it.
//! Out: send or drop it. Always holds: the last packet of a flow is never dropped.

/// What the law works with, the same for every flow. Times in ns.
#[derive(Debug)]
pub(super) struct Law {
    /// The acceptable waiting time.
    pub(super) target: u64,
    /// For how long it must be exceeded before the first drop.
    pub(super) interval: u64,
    /// Bytes of the largest packet. A flow with no more than this left behind the packet in hand has no
    /// standing queue, even if a slow path makes it wait longer than the target.
    pub(super) one_packet: usize,
}

impl Law {
    /// The time between drops shrinks with the square root of their number, which makes the rate of a
    /// TCP sender fall linearly.
    fn next_drop(&self, after: u64, count: u32) -> u64 {
        after.saturating_add((self.interval as f64 / f64::from(count.max(1)).sqrt()) as u64)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Send,
    Drop,
}

/// The law's state in one flow. Names as in the RFC, times in ns.
#[derive(Clone, Debug, Default)]
pub(super) struct Codel {
    /// When the waiting time will have been above the target for an interval, if it is above.
    first_above: Option<u64>,
    dropping: bool,
    memory: Memory,
}

/// What outlives a flow that runs empty, so that it need not be taught from the start when it returns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    /// When to drop next.
    drop_next: u64,
    /// Drops since dropping began.
    pub(super) count: u32,
    /// The count with which dropping began the last time.
    last_count: u32,
}

impl Codel {
    pub(super) fn with_memory(memory: Memory) -> Self {
        Self { memory, ..Self::default() }
    }

    pub(super) fn memory(&self) -> Memory {
        self.memory
    }

    /// Decides about the packet just taken out, which waited for `sojourn` ns and left `behind` bytes.
    pub(super) fn judge(&mut self, law: &Law, now: u64, sojourn: u64, behind: usize) -> Verdict {
        if !self.may_drop(law, now, sojourn, behind) {
            self.dropping = false;
            return Verdict::Send;
        }
        let memory = &mut self.memory;
        if !self.dropping {
            self.dropping = true;
            let delta = memory.count.saturating_sub(memory.last_count);
            let recent = now.saturating_sub(memory.drop_next) < law.interval.saturating_mul(16);
            memory.count = if delta > 1 && recent { delta } else { 1 };
            memory.last_count = memory.count;
            memory.drop_next = law.next_drop(now, memory.count);
            return Verdict::Drop;
        }
        if now < memory.drop_next {
            return Verdict::Send;
        }
        memory.count = memory.count.saturating_add(1);
        memory.drop_next = law.next_drop(memory.drop_next, memory.count);
        Verdict::Drop
    }

    /// The flow has no packet left.
    pub(super) fn ran_empty(&mut self) {
        self.first_above = None;
        self.dropping = false;
    }

    /// The RFC's `ok_to_drop`.
    fn may_drop(&mut self, law: &Law, now: u64, sojourn: u64, behind: usize) -> bool {
        if sojourn < law.target || behind <= law.one_packet {
            self.first_above = None;
            return false;
        }
        let since = *self.first_above.get_or_insert_with(|| now.saturating_add(law.interval));
        now >= since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const LAW: Law = Law { target: 5 * MS, interval: 100 * MS, one_packet: 1514 };

    /// Times in ms at which a queue that never gets shorter loses packets, one packet a ms.
    fn drop_times(codel: &mut Codel, from: u64, until: u64) -> Vec<u64> {
        (from..until).filter(|&t| codel.judge(&LAW, t * MS, 20 * MS, 30_000) == Verdict::Drop).collect()
    }

    #[test]
    fn drops_come_an_interval_late_and_then_ever_faster() {
        let times = drop_times(&mut Codel::default(), 1000, 1500);
        // 100 ms, then + 100/sqrt(1), + 100/sqrt(2), + 100/sqrt(3), ...
        assert_eq!(times, [1100, 1200, 1271, 1329, 1379, 1424, 1464]);
    }

    #[test]
    fn a_single_dip_below_the_target_starts_the_interval_again() {
        let mut codel = Codel::default();
        assert_eq!(drop_times(&mut codel, 1000, 1090), []);
        assert_eq!(codel.judge(&LAW, 1090 * MS, 4 * MS, 30_000), Verdict::Send);
        assert_eq!(drop_times(&mut codel, 1091, 1191), []);
        assert_eq!(drop_times(&mut codel, 1191, 1192), [1191]);
    }

    #[test]
    fn one_packet_left_behind_is_no_standing_queue() {
        let mut codel = Codel::default();
        for t in 0..10_000 {
            assert_eq!(codel.judge(&LAW, t * MS, 50 * MS, 1514), Verdict::Send);
        }
        let small = Law { one_packet: 0, ..LAW };
        for t in 0..10_000 {
            assert_eq!(codel.judge(&small, t * MS, 50 * MS, 0), Verdict::Send);
        }
    }

    #[test]
    fn a_flow_that_returns_soon_is_dropped_from_at_its_former_rate() {
        let mut codel = Codel::default();
        let before = drop_times(&mut codel, 1000, 3000).len();
        let remembered = codel.memory();
        assert_eq!(remembered.count as usize, before);
        let mut soon = Codel::with_memory(remembered);
        let mut late = Codel::with_memory(remembered);
        let soon = drop_times(&mut soon, 3100, 3500).len();
        let late = drop_times(&mut late, 10_000, 10_400).len();
        assert!(soon > 3 * late, "{soon} drops when it came back soon, {late} when late");
    }
}
