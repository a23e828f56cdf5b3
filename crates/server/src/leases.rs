//! Keeps the leases of a server across restarts.
//!
//! In: the leases that an earlier process kept; those of the registry as they change; time. Out: sessions
//! that clients resume, and the leases in the store. Always holds: they are written by a thread of their own,
//! for which no packet waits, after a change and at most once in [`MIN_INTERVAL`]; if they cannot be written,
//! that is said once, and tried again; leases that cannot be restored are said, and nothing else is lost.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_error::RunError;
use mpvpn_state::leases::KeptLease;
use mpvpn_tunnel::{LeaseRecord, Registry};

use super::store::FileStore;

/// The shortest time between two writes. Longer: a crash forgets more new sessions; shorter: wear of flash
/// memory while many clients come and go. Chosen.
const MIN_INTERVAL: Duration = Duration::from_secs(2);
/// How soon a write that failed is tried again. Chosen.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Leases that cannot be restored and are named in the log one by one.
const MAX_NAMED: usize = 10;

/// The keeper of a server's leases.
pub(super) struct LeaseKeeper {
    registry: Registry,
    is_dirty: bool,
    next_write: Instant,
    writer: Option<(Sender<Vec<KeptLease>>, JoinHandle<()>)>,
}

/// Restores the leases of the store. `is_known`: whether there is a user. Returns whether leases can be kept.
pub(super) fn restore(
    now: Instant,
    clock: SystemTime,
    store: &FileStore,
    registry: &Registry,
    is_known: impl Fn(&str) -> bool,
) -> bool {
    let kept = match store.leases() {
        Ok(kept) => kept,
        Err(error) => {
            tracing::warn!(%error, "leases are neither restored nor kept: after a restart clients may get other addresses");
            return false;
        }
    };
    let (known, removed): (Vec<_>, Vec<_>) = kept.into_iter().partition(|lease| is_known(&lease.user));
    for lease in removed.iter().take(MAX_NAMED) {
        let (user, address) = (&lease.user, lease.addresses.first());
        tracing::info!(user, ?address, "the address is free: its user was removed");
    }
    let count = known.len();
    let records = known.into_iter().filter_map(|lease| record(now, clock, lease));
    let refused = registry.restore_leases(now, records);
    for (record, reason) in refused.iter().take(MAX_NAMED) {
        tracing::warn!(user = record.user, %reason, "a lease is not restored: its client gets another address");
    }
    let (restored, refused, removed) = (count - refused.len(), refused.len(), removed.len());
    tracing::debug!(restored, refused, removed, "leases");
    true
}

fn record(now: Instant, clock: SystemTime, lease: KeptLease) -> Option<LeaseRecord> {
    let last_used = SystemTime::UNIX_EPOCH + Duration::from_secs(lease.last_used.min(u32::MAX.into()));
    // A clock that was set back makes it used now.
    let age = clock.duration_since(last_used).unwrap_or_default();
    Some(LeaseRecord {
        secret: lease.secret.try_into().ok()?,
        user: lease.user,
        addresses: lease.addresses,
        idle_since: Some(now.checked_sub(age).unwrap_or(now)),
    })
}

fn kept(now: Instant, clock: SystemTime, record: LeaseRecord) -> KeptLease {
    let age = record.idle_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    let last_used = clock.checked_sub(age).and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    KeptLease {
        secret: record.secret.to_vec(),
        user: record.user,
        addresses: record.addresses,
        last_used: last_used.map_or(0, |at| at.as_secs()),
    }
}

impl LeaseKeeper {
    /// Keeps the leases of `registry` in `store` from now on.
    pub(super) fn start(now: Instant, registry: Registry, store: FileStore) -> Result<Self, RunError> {
        let (sender, jobs) = channel();
        let thread = std::thread::Builder::new().name("leases".to_owned());
        let thread = thread.spawn(move || write(&jobs, &store)).map_err(RunError::io("start a thread"))?;
        Ok(Self { registry, is_dirty: false, next_write: now, writer: Some((sender, thread)) })
    }

    /// When [`Self::update`] has to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.is_dirty.then_some(self.next_write)
    }

    /// Has the leases written if they have changed.
    pub(super) fn update(&mut self, now: Instant) {
        self.is_dirty |= self.registry.take_leases_changed();
        if self.is_dirty && now >= self.next_write {
            self.is_dirty = false;
            self.next_write = now + MIN_INTERVAL;
            self.write(now);
        }
    }

    fn write(&self, now: Instant) {
        let clock = SystemTime::now();
        let leases = self.registry.leases().into_iter().map(|record| kept(now, clock, record)).collect();
        if let Some((writer, _)) = &self.writer {
            // The thread runs as long as this value exists.
            let _ = writer.send(leases);
        }
    }
}

impl Drop for LeaseKeeper {
    /// Writes the leases as they are at the end.
    fn drop(&mut self) {
        self.write(Instant::now());
        if let Some((writer, thread)) = self.writer.take() {
            drop(writer);
            let _ = thread.join();
        }
    }
}

/// The life of the thread.
fn write(jobs: &Receiver<Vec<KeptLease>>, store: &FileStore) {
    let mut failed: Option<Vec<KeptLease>> = None;
    loop {
        let next = match failed {
            Some(_) => jobs.recv_timeout(RETRY_INTERVAL),
            None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let leases = match next {
            Ok(leases) => jobs.try_iter().last().unwrap_or(leases),
            Err(RecvTimeoutError::Timeout) => failed.take().unwrap_or_default(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let has_failed = failed.is_some();
        failed = match store.keep_leases(leases.clone()) {
            Ok(()) if has_failed => {
                tracing::info!("leases are kept again");
                None
            }
            Ok(()) => None,
            Err(error) => {
                if !has_failed {
                    tracing::warn!(
                        %error,
                        "cannot keep the leases: after a restart of the server clients may get other addresses; it is tried again"
                    );
                }
                Some(leases)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use mpvpn_config::ServerConfig;

    use super::*;

    fn registry() -> Registry {
        Registry::new("10.0.0.0/24".parse().unwrap(), None, 100)
    }

    fn lease(number: u8, user: &str, last_used: u64) -> KeptLease {
        KeptLease {
            secret: vec![number; 16],
            user: user.to_owned(),
            addresses: vec![[10, 0, 0, number].into()],
            last_used,
        }
    }

    #[test]
    fn leases_come_back_but_those_of_removed_users_and_of_other_networks() {
        let home = tempfile::tempdir().unwrap();
        let config = ServerConfig { state_dir: home.path().into(), ..ServerConfig::default() };
        let store = FileStore::new(&config);
        let (now, clock) = (Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000));
        let mut other_net = lease(9, "anna", 5);
        other_net.addresses = vec![[192, 0, 2, 9].into()];
        store.keep_leases(vec![lease(7, "anna", 1_000_000), lease(8, "bob", 5), other_net]).unwrap();
        let registry = registry();
        assert!(restore(now, clock, &store, &registry, |user| user == "anna"));
        let restored = registry.leases();
        assert_eq!(restored.len(), 1);
        assert_eq!(kept(now, clock, restored[0].clone()), lease(7, "anna", 1_000_000));
    }

    #[test]
    fn changes_are_written_and_the_end_is_too() {
        let home = tempfile::tempdir().unwrap();
        let config = ServerConfig { state_dir: home.path().join("state"), ..ServerConfig::default() };
        let store = FileStore::new(&config);
        let (registry, now) = (registry(), Instant::now());
        let mut keeper = LeaseKeeper::start(now, registry.clone(), store.clone()).unwrap();
        keeper.update(now);
        assert_eq!(keeper.poll_timeout(), None);
        let record = record(now, SystemTime::now(), lease(7, "anna", 1)).unwrap();
        assert_eq!(registry.restore_leases(now, [record]), []);
        registry.set_fixed_addresses([]);
        keeper.update(now);
        keeper.update(now);
        assert_eq!(keeper.poll_timeout(), None, "written");
        registry.set_fixed_addresses([]);
        keeper.update(now);
        assert_eq!(keeper.poll_timeout(), Some(now + MIN_INTERVAL), "not on every change");
        drop(keeper);
        assert_eq!(store.leases().unwrap().len(), 1);
    }

    #[test]
    fn a_full_disk_loses_nothing_and_is_tried_again() {
        let home = tempfile::tempdir().unwrap();
        let state_dir = home.path().join("state");
        let config = ServerConfig { state_dir: state_dir.clone(), ..ServerConfig::default() };
        let store = FileStore::new(&config);
        // No folder can be made below a file.
        fs::write(&state_dir, "").unwrap();
        let keeper = LeaseKeeper::start(Instant::now(), registry(), store.clone()).unwrap();
        keeper.write(Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        fs::remove_file(&state_dir).unwrap();
        drop(keeper);
        assert_eq!(store.leases().unwrap(), []);
        assert!(state_dir.join("leases-mpvpn0.json").exists());
    }
}
