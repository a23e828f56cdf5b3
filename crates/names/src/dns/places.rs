//! Places for queries and connections in progress, of which there are only so many.
//!
//! In: work for a host. Out: the work runs, until its place is needed. Always holds: where all places are
//! taken, the host that holds most loses its oldest one, so no host keeps the others from being answered.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::AbortHandle;

/// The places of one kind.
pub(super) struct Places {
    most: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    /// Tasks in progress, by host; the oldest first.
    tasks: HashMap<IpAddr, VecDeque<(u64, AbortHandle)>>,
    count: usize,
    next: u64,
}

impl Held {
    fn remove(&mut self, host: IpAddr, number: u64) {
        let Some(tasks) = self.tasks.get_mut(&host) else { return };
        let before = tasks.len();
        tasks.retain(|(other, _)| *other != number);
        self.count -= before - tasks.len();
        if tasks.is_empty() {
            self.tasks.remove(&host);
        }
    }

    /// Takes the place of the oldest task of the host that holds most, if it holds more than `host`.
    /// Returns the task, which has to be ended.
    fn end_oldest(&mut self, host: IpAddr) -> Option<AbortHandle> {
        let (largest, tasks) = self.tasks.iter().max_by_key(|(_, tasks)| tasks.len())?;
        let own = self.tasks.get(&host).map_or(0, VecDeque::len);
        let (number, oldest) = tasks.front().filter(|_| tasks.len() > own)?.clone();
        tracing::debug!(%largest, held = tasks.len(), %host, own, "the host that holds most loses a query");
        self.remove(*largest, number);
        Some(oldest)
    }
}

/// The place of one task; it is free when this is dropped.
struct Place {
    places: Arc<Places>,
    host: IpAddr,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().remove(self.host, self.number);
    }
}

impl Places {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` for a host in a task of its own, if there is a place. It ends when another host needs the
    /// place. Returns whether it runs.
    pub(super) fn spawn(
        self: &Arc<Self>,
        host: IpAddr,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> bool {
        let mut held = self.lock();
        let ended = if held.count < self.most { None } else { held.end_oldest(host) };
        if held.count >= self.most {
            return false;
        }
        let number = held.next;
        held.next += 1;
        let place = Place { places: Arc::clone(self), host, number };
        let task = tokio::spawn(async move {
            work.await;
            drop(place);
        });
        held.tasks.entry(host).or_default().push_back((number, task.abort_handle()));
        held.count += 1;
        drop(held);
        ended.iter().for_each(AbortHandle::abort);
        true
    }

    /// How many tasks of a host are in progress.
    #[cfg(test)]
    pub(super) fn held_by(&self, host: IpAddr) -> usize {
        self.lock().tasks.get(&host).map_or(0, VecDeque::len)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn host(number: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, number])
    }

    #[tokio::test]
    async fn who_holds_most_loses_its_oldest_task() {
        let places = Places::new(8);
        assert!((0..8).all(|_| places.spawn(host(1), pending())));
        assert!(!places.spawn(host(1), pending()), "it would lose one of its own");
        let held = |places: &Places| [1, 2, 3].map(|number| places.held_by(host(number)));
        assert!((0..4).all(|_| places.spawn(host(2), pending())), "as many as the other one");
        assert!(!places.spawn(host(2), pending()));
        assert_eq!(held(&places), [4, 4, 0]);
        assert!(places.spawn(host(3), pending()) && places.spawn(host(3), pending()));
        tokio::task::yield_now().await;
        assert_eq!(held(&places), [3, 3, 2]);
    }

    #[tokio::test]
    async fn a_place_is_free_when_its_task_has_ended() {
        let places = Places::new(2);
        for _ in 0..10 {
            assert!(places.spawn(host(1), async {}) && places.spawn(host(2), async {}));
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
        }
        assert!(places.lock().tasks.is_empty(), "hosts are forgotten with their last task");
    }
}
