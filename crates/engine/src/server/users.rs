//! The users of a running server.
//!
//! In: the users' file, read again when it changes, and the time. Out: the users for all who check credentials, and who has no
//! access any more. Always holds: a file with a mistake changes nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use mpvpn_control::{
    auth::{Authenticator, SharedUsers},
    config::LimitRule,
    shared::Shared,
    status::User,
    users::UserEntry,
};
use mpvpn_os::file_watch::FileWatch;
use mpvpn_tunnel::{Authenticate, SessionReport, UserLimits};
use mpvpn_types::SessionId;

use super::store::FileStore;
use crate::EngineError;

/// How often the clock is looked at while a user's access will end. Longer: sessions end late after the clock was set; shorter:
/// wake-ups. The event loop wakes up as often.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);

/// What a change of the file means.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UserChange {
    /// Number of users now.
    pub(super) count: usize,
    /// Users that have no access any more, with the reason.
    pub(super) ended: BTreeMap<String, String>,
}

/// The users' file of a server.
pub(super) struct UserList {
    store: FileStore,
    users: SharedUsers,
    watch: FileWatch,
    /// When the next access ends by the clock, and when to look at the clock for that.
    expiry: Option<(SystemTime, Instant)>,
}

impl UserList {
    /// The list of a server that has users.
    pub(super) fn open(store: FileStore, authenticator: &Authenticator) -> Result<Option<Self>, EngineError> {
        let Authenticator::Tokens(users) = authenticator else { return Ok(None) };
        let watch = store.watch_users().map_err(EngineError::io("watch the users' file"))?;
        let mut list = Self { store, users: users.clone(), watch, expiry: None };
        list.plan(Instant::now(), SystemTime::now());
        // What was written since the credentials were read, before anybody watched.
        if let Err(reason) = list.read(Instant::now()) {
            tracing::warn!(reason, "the users' file has changed and cannot be read now");
        }
        Ok(Some(list))
    }

    /// What the file says now, if it has changed.
    pub(super) fn read_if_changed(&mut self, now: Instant) -> Option<Result<UserChange, String>> {
        if self.watch.changed().is_empty() {
            return None;
        }
        self.read(now).transpose()
    }

    /// Reads the file, and tells what is different; `None` if nothing is.
    pub(super) fn read(&mut self, now: Instant) -> Result<Option<UserChange>, String> {
        let new = self.store.users().map_err(|error| error.to_string())?;
        let count = new.iter().count();
        let before = self.users.replace(new);
        let (users, clock) = (self.users.now(), SystemTime::now());
        self.plan(now, clock);
        Ok((users != before).then(|| UserChange { count, ended: users.ended_since(&before, clock) }))
    }

    /// The users whose access has ended by now, if there are any since the last call.
    pub(super) fn expire(&mut self, now: Instant) -> Option<BTreeMap<String, String>> {
        let (expiry, look_at) = self.expiry?;
        if now < look_at {
            return None;
        }
        let clock = SystemTime::now();
        self.plan(now, clock);
        (clock >= expiry).then(|| {
            let users = self.users.now();
            users.ended_since(&users, clock)
        })
    }

    /// When [`Self::expire`] has to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.expiry.map(|(_, look_at)| look_at)
    }

    /// The users for the status, with the number of sessions that each has.
    pub(super) fn status(&self, sessions: &[SessionReport]) -> Vec<User> {
        let mut open: BTreeMap<&str, BTreeSet<SessionId>> = BTreeMap::new();
        for report in sessions {
            open.entry(&report.user).or_default().extend(report.session);
        }
        let now = SystemTime::now();
        let user = |entry: &UserEntry| User {
            name: entry.name.clone(),
            state: entry.state(now),
            expires: entry.expires.map(|expiry| expiry.to_string()),
            sessions: open.get(entry.name.as_str()).map_or(0, |sessions| sessions.len() as u32),
            max_sessions: entry.sessions,
        };
        self.users.now().iter().map(user).collect()
    }

    /// Whether there is a user with this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.users.now().get(name).is_some()
    }

    /// The fixed addresses of all users.
    pub(super) fn fixed_addresses(&self) -> Vec<(IpAddr, String)> {
        self.users.now().fixed_addresses().collect()
    }

    fn plan(&mut self, now: Instant, clock: SystemTime) {
        let expiry = self.users.now().next_expiry(clock);
        self.expiry =
            expiry.map(|at| (at, now + at.duration_since(clock).unwrap_or_default().min(CLOCK_INTERVAL)));
    }
}

impl AsFd for UserList {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

/// Checks of the credentials and limits of users.
pub(super) struct UserChecks {
    pub(super) authenticator: Authenticator,
    pub(super) limits: Shared<Vec<LimitRule>>,
    /// Whether the rules for packets differ between users.
    pub(super) has_rules_of_users: Arc<AtomicBool>,
}

impl Authenticate for UserChecks {
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String> {
        let user = self.authenticator.check(authorization);
        user.map(|user| user.name).map_err(|denied| denied.to_string())
    }

    fn limits(&self, user: &str) -> UserLimits {
        let rules = self.limits.now();
        let rule = LimitRule::of(&rules, user);
        // Without authentication all clients are one user.
        let (default, own) = match &self.authenticator {
            Authenticator::None => (None, None),
            Authenticator::Tokens(users) => (
                Some(LimitRule::DEFAULT_MAX_SESSIONS),
                users.now().get(user).and_then(|entry| entry.sessions),
            ),
        };
        let mut limits = UserLimits::default();
        if let Some(rule) = rule {
            (limits.max_classes, limits.max_priority_share) = (rule.max_classes, rule.max_priority);
        }
        let of_rule = rule.and_then(|rule| rule.max_sessions);
        limits.max_sessions = own.into_iter().chain(of_rule).min().or(default);
        limits
    }

    fn has_rules_of_users(&self) -> bool {
        self.has_rules_of_users.load(Ordering::SeqCst)
    }
}
