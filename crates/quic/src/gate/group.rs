//! Paths that have one controller together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{Model, Shared};

/// Paths that one controller decides about, because each of its own would count the others' packets as a queue.
pub(super) struct Group {
    /// That of the first path, as soon as something happens to it.
    pub(super) model: Mutex<Option<Model>>,
    first: Weak<Shared>,
    members: Mutex<Vec<Weak<Shared>>>,
}

impl Group {
    pub(super) fn of(first: &Arc<Shared>) -> Self {
        let first = Arc::downgrade(first);
        Self { model: Mutex::new(None), first: first.clone(), members: Mutex::new(vec![first]) }
    }

    /// Whether the group goes on with what this path has learned, if it has no model yet.
    pub(super) fn begins_with(&self, path: &Arc<Shared>) -> bool {
        std::ptr::eq(self.first.as_ptr(), Arc::as_ptr(path)) || self.first.strong_count() == 0
    }

    pub(super) fn members(&self) -> MutexGuard<'_, Vec<Weak<Shared>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, path: &Arc<Shared>) {
        let mut members = self.members();
        if !members.iter().any(|member| std::ptr::eq(member.as_ptr(), Arc::as_ptr(path))) {
            members.retain(|member| member.strong_count() > 0);
            members.push(Arc::downgrade(path));
        }
    }
}
