//! Which class each flow is of.
//!
//! In: flows, by their hashes, and their classes. Out: the class that was noted. Always holds: no more than twice
//! [`MOST`] flows are kept, and one that was not asked for is forgotten after one to two times [`AGE`]; a step takes the
//! same time however many there are.

use mpvpn_types::{ClassId, Duration, Instant};
use rustc_hash::FxHashMap;

/// Flows of one age, at most.
const MOST: usize = 8192;
/// How long flows are of one age.
const AGE: Duration = Duration::from_secs(60);

/// The classes of flows.
#[derive(Clone, Debug, Default)]
pub struct FlowClasses {
    /// Those that were asked for since `since`, and of the others those that were in the time before.
    young: FxHashMap<u32, ClassId>,
    old: FxHashMap<u32, ClassId>,
    since: Option<Instant>,
}

impl FlowClasses {
    /// Whether nothing is known of any flow.
    pub fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }

    /// Notes the class of a flow.
    pub fn put(&mut self, now: Instant, flow: u32, class: ClassId) {
        let since = *self.since.get_or_insert(now);
        if self.young.len() >= MOST || now.saturating_duration_since(since) >= AGE {
            self.old = std::mem::take(&mut self.young);
            self.since = Some(now);
        }
        self.young.insert(flow, class);
    }

    /// The class that was noted last; the flow is in use.
    pub fn get(&mut self, now: Instant, flow: u32) -> Option<ClassId> {
        if let Some(class) = self.young.get(&flow).copied() {
            // An age ends also where nothing new comes.
            if self.since.is_some_and(|since| now.saturating_duration_since(since) >= AGE) {
                self.put(now, flow, class);
            }
            return Some(class);
        }
        let class = self.old.get(&flow).copied()?;
        self.put(now, flow, class);
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
        flows.put(start, 7, VOICE);
        flows.put(start, 8, BULK);
        for second in 1..600 {
            assert_eq!(flows.get(start + Duration::from_secs(second), 7), Some(VOICE));
        }
        assert_eq!(flows.get(start + Duration::from_secs(600), 8), None);
        flows.put(start + Duration::from_secs(600), 7, BULK);
        assert_eq!(flows.get(start + Duration::from_secs(601), 7), Some(BULK));
        flows.clear();
        assert!(flows.is_empty() && flows.get(start, 7).is_none());
    }

    #[test]
    fn very_many_flows_make_room_for_each_other() {
        let (mut flows, now) = (FlowClasses::default(), Instant::now());
        for flow in 0..100_000 {
            flows.put(now, flow, BULK);
            assert!(flows.young.len() + flows.old.len() <= 2 * MOST);
        }
        assert_eq!((flows.get(now, 99_999), flows.get(now, 0)), (Some(BULK), None));
    }
}
