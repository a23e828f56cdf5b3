//! Remembers the class of each flow.
//!
//! In: hashes of flows, and their classes, alone or with more that belongs to a flow. Out: what is stored for
//! a flow. Always holds: no more than twice [`MAX_FLOWS_PER_GENERATION`] flows are kept; a flow that is not
//! looked up is forgotten after one to two times [`GENERATION_DURATION`]; each operation takes constant time.

use mpvpn_types::{ClassId, Duration, Instant};
use rustc_hash::FxHashMap;

/// Maximum number of flows in one generation. With fewer, a busy client asks its rules again for live flows;
/// with more, a client with many flows holds more memory (8 bytes a flow). The number is chosen
/// (docs/design/shaper.md, open questions).
const MAX_FLOWS_PER_GENERATION: usize = 8192;
/// Duration of a generation. A flow that is idle for one to two of them is forgotten: shorter, and a flow
/// that pauses may change its class when rules or DNS mappings changed; longer, and dead flows hold memory.
/// Chosen, like the number.
const GENERATION_DURATION: Duration = Duration::from_secs(60);

/// The classes of flows.
#[derive(Clone, Debug)]
pub struct FlowClasses<C = ClassId> {
    /// Flows used since `generation_start`; `previous` holds the other flows used in the generation before.
    current: FxHashMap<u32, C>,
    previous: FxHashMap<u32, C>,
    generation_start: Option<Instant>,
}

impl<C> Default for FlowClasses<C> {
    fn default() -> Self {
        Self { current: FxHashMap::default(), previous: FxHashMap::default(), generation_start: None }
    }
}

impl<C: Copy> FlowClasses<C> {
    /// Whether no flow is known.
    pub fn is_empty(&self) -> bool {
        self.current.is_empty() && self.previous.is_empty()
    }

    /// Stores the class of a flow, identified by its hash.
    pub fn insert(&mut self, now: Instant, flow: u32, class: C) {
        let since = *self.generation_start.get_or_insert(now);
        if self.current.len() >= MAX_FLOWS_PER_GENERATION
            || now.saturating_duration_since(since) >= GENERATION_DURATION
        {
            self.previous = std::mem::take(&mut self.current);
            self.generation_start = Some(now);
        }
        self.current.insert(flow, class);
    }

    /// The class of a flow, if it is known; the lookup counts as use of the flow.
    pub fn get(&mut self, now: Instant, flow: u32) -> Option<C> {
        if let Some(class) = self.current.get(&flow).copied() {
            // A generation also ends if no new flow is inserted.
            if self
                .generation_start
                .is_some_and(|since| now.saturating_duration_since(since) >= GENERATION_DURATION)
            {
                self.insert(now, flow, class);
            }
            return Some(class);
        }
        let class = self.previous.get(&flow).copied()?;
        self.insert(now, flow, class);
        Some(class)
    }

    /// Forgets all flows.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    const VOICE: ClassId = ClassId(1);
    const BULK: ClassId = ClassId(2);

    #[test]
    fn a_flow_keeps_its_class_while_it_is_in_use_and_is_forgotten_later() {
        let (mut flows, start) = (FlowClasses::default(), Instant::now());
        flows.insert(start, 7, VOICE);
        flows.insert(start, 8, BULK);
        for second in 1..600 {
            assert_eq!(flows.get(start + Duration::from_secs(second), 7), Some(VOICE));
        }
        assert_eq!(flows.get(start + Duration::from_secs(600), 8), None);
        flows.insert(start + Duration::from_secs(600), 7, BULK);
        assert_eq!(flows.get(start + Duration::from_secs(601), 7), Some(BULK));
        flows.clear();
        assert!(flows.is_empty() && flows.get(start, 7).is_none());
    }

    #[test]
    fn the_number_of_flows_is_bounded_and_the_oldest_are_forgotten() {
        let (mut flows, now) = (FlowClasses::default(), Instant::now());
        for flow in 0..100_000 {
            flows.insert(now, flow, BULK);
            assert!(flows.current.len() + flows.previous.len() <= 2 * MAX_FLOWS_PER_GENERATION);
        }
        assert_eq!((flows.get(now, 99_999), flows.get(now, 0)), (Some(BULK), None));
    }
}
