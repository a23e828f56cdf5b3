//! Paths that share one congestion controller.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{GateState, Model};

/// Paths that share one controller, because separate ones would take the packets of the other paths for a
/// queue.
pub(super) struct Group {
    /// The controller; that of the first path, from its first event on.
    pub(super) model: Mutex<Option<Model>>,
    first: Weak<GateState>,
    members: Mutex<Vec<Weak<GateState>>>,
}

impl Group {
    pub(super) fn of(first: &Arc<GateState>) -> Self {
        let first = Arc::downgrade(first);
        Self { model: Mutex::new(None), first: first.clone(), members: Mutex::new(vec![first]) }
    }

    /// Whether the group takes over the controller of this path, if it has none yet.
    pub(super) fn begins_with(&self, path: &Arc<GateState>) -> bool {
        std::ptr::eq(self.first.as_ptr(), Arc::as_ptr(path)) || self.first.strong_count() == 0
    }

    pub(super) fn members(&self) -> MutexGuard<'_, Vec<Weak<GateState>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, path: &Arc<GateState>) {
        let mut members = self.members();
        if !members.iter().any(|member| std::ptr::eq(member.as_ptr(), Arc::as_ptr(path))) {
            members.retain(|member| member.strong_count() > 0);
            members.push(Arc::downgrade(path));
        }
    }
}
