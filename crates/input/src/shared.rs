//! A value that may be replaced while a process runs.

use std::sync::{Arc, PoisonError, RwLock};

/// A value of which all clones see the same state. A reader keeps what it got; a value that replaces it
/// counts for later reads.
#[derive(Debug, Default)]
pub struct Shared<T>(Arc<RwLock<Arc<T>>>);

impl<T> Shared<T> {
    /// The value now.
    pub fn now(&self) -> Arc<T> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the value; returns the previous one.
    pub fn replace(&self, value: T) -> Arc<T> {
        std::mem::replace(&mut self.0.write().unwrap_or_else(PoisonError::into_inner), Arc::new(value))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> From<T> for Shared<T> {
    fn from(value: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(value))))
    }
}
