//! The users of a running server.
//!
//! In: the users' file and the list of revoked certificates, read again when they change, what users have
//! carried, and the time. Out: the users for all who check credentials, their rates, and who has no access
//! any more. Always holds: a file with a mistake changes nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use ipnet::IpNet;
use mpvpn_config::LimitRule;
use mpvpn_error::RunError;
use mpvpn_identity::client_ca::Revocations;
use mpvpn_input::{shared::Shared, short_text::ShortText};
use mpvpn_masque::request::Rejection;
use mpvpn_os::file_watch::FileWatch;
use mpvpn_status::{
    User,
    events::{Event, EventSender},
};
use mpvpn_tunnel::{
    Authenticate, AuthenticatedUser, CertificateId, SessionReport, TrafficCounters, UserLimits, UserRates,
};
use mpvpn_types::{BitRate, ByteSize, SessionId};
use mpvpn_users::{
    SharedUsers, UserEntry, UserQuotas, Users, auth::Authenticator, client_certificates::CertificateCheck,
};

use super::store::FileStore;

/// How often the clock is looked at while a user's access will end. Longer: sessions end late after the clock
/// was set; shorter: wake-ups. The event loop wakes up as often.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);

/// The longest time between two counts of the bytes of users with quotas; a count comes earlier where a user
/// may exceed its quota ([`UserQuotas::count_limits`]). Longer: `user show` is late. Shorter: wake-ups. As
/// for the quotas of links.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest interval of writing how much is used. Longer: a crash forgets more. Shorter: wear of flash
/// memory. As for links.
const MIN_SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// The effect of a change of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UserChange {
    /// Number of users now.
    pub(super) count: usize,
    /// Users that have no access any more, with the reason.
    pub(super) ended: BTreeMap<String, String>,
    /// The number of those that had access until now.
    pub(super) lost_access: usize,
    /// Certificates that are revoked since.
    pub(super) revoked: BTreeSet<CertificateId>,
}

/// The users' file of a server.
pub(super) struct UserList {
    store: FileStore,
    users: SharedUsers,
    /// The check of certificates, if these are what counts.
    certificates: Option<CertificateCheck>,
    watch: FileWatch,
    /// When the next access of a user ends by the clock.
    expiry: Option<SystemTime>,
    /// When to look at the clock for that, and for the ends of certificates.
    look_at: Option<Instant>,
    quotas: UserQuotas,
    /// When to count what users have carried; `None` if no user has a quota.
    count_at: Option<Instant>,
    last_save: Instant,
    save_failed: bool,
    events: EventSender,
}

impl UserList {
    /// The list of a server that has users.
    pub(super) fn open(store: FileStore, authenticator: &Authenticator) -> Result<Option<Self>, RunError> {
        let Some(users) = authenticator.users() else { return Ok(None) };
        let certificates = match authenticator {
            Authenticator::Certificates(check) => Some(check.clone()),
            Authenticator::None | Authenticator::Tokens(_) => None,
        };
        let watch = FileWatch::new(store.files_about_users());
        let watch = watch.map_err(RunError::io("watch the users' file"))?;
        let (now, clock) = (Instant::now(), SystemTime::now());
        let mut list = Self {
            quotas: store.quotas()?,
            store,
            users: users.clone(),
            certificates,
            watch,
            expiry: None,
            look_at: None,
            count_at: None,
            last_save: now,
            save_failed: false,
            events: EventSender::default(),
        };
        list.plan(now, clock);
        list.update_used_up(clock);
        // Reads changes written after the credentials were read, before the file was watched.
        if let Err(reason) = list.read(now, clock) {
            tracing::warn!(reason, "the users' file has changed and cannot be read now");
        }
        Ok(Some(list))
    }

    /// Reads the file if it has changed.
    pub(super) fn read_if_changed(
        &mut self,
        now: Instant,
        clock: SystemTime,
    ) -> Option<Result<UserChange, String>> {
        if self.watch.changed().is_empty() {
            return None;
        }
        self.read(now, clock).transpose()
    }

    /// Reads the file, and tells what is different; `None` if nothing is.
    pub(super) fn read(&mut self, now: Instant, clock: SystemTime) -> Result<Option<UserChange>, String> {
        let new = self.store.users().map_err(|error| error.to_string())?;
        let revoked = self.store.revocations().map_err(|error| error.to_string())?;
        let count = new.iter().count();
        // Access that has ended by the clock since the last call of [`Self::expire`], which does not see it
        // then.
        let has_expired = self.expiry.is_some_and(|expiry| clock >= expiry);
        let last_look = self.expiry.map_or(clock, |expiry| clock.min(expiry - Duration::from_nanos(1)));
        let used_up = Arc::clone(self.users.now().used_up());
        let before = self.users.replace(new.with_used_up(used_up));
        self.plan(now, clock);
        self.quotas.count(clock, &self.users.now(), []);
        self.update_used_up(clock);
        let users = self.users.now();
        let revoked = self.certificates.as_ref().zip(revoked).map(|(check, revoked)| check.revoke(revoked));
        let revoked = revoked.unwrap_or_default();
        let is_new = users != before || has_expired || !revoked.is_empty();
        let (ended, ended_before) =
            (users.ended_since(&before, clock), before.ended_since(&before, last_look));
        let lost_access = ended.keys().filter(|name| !ended_before.contains_key(*name)).count();
        Ok(is_new.then_some(UserChange { count, ended, lost_access, revoked }))
    }

    /// Reads the revocations in `crl` from now on, of which these are the first; returns the certificates
    /// that are revoked since.
    pub(super) fn replace_revocations(
        &mut self,
        crl: Option<PathBuf>,
        revoked: Revocations,
    ) -> BTreeSet<CertificateId> {
        self.store.set_crl(crl);
        if let Err(error) = self.watch.replace(self.store.files_about_users()) {
            tracing::warn!(%error, "changes of `crl` are not noticed: run `mpvpn config reload` after each");
        }
        self.certificates.as_ref().map(|check| check.revoke(revoked)).unwrap_or_default()
    }

    /// The certificates whose validity has ended since the last call.
    pub(super) fn take_expired_certificates(&self, clock: SystemTime) -> BTreeSet<CertificateId> {
        self.certificates.as_ref().map(|check| check.take_expired(clock)).unwrap_or_default()
    }

    /// The users whose access has ended by now, if there are any since the last call.
    pub(super) fn expire(&mut self, now: Instant, clock: SystemTime) -> Option<BTreeMap<String, String>> {
        if self.look_at.is_none_or(|look_at| now < look_at) {
            return None;
        }
        let expiry = self.expiry;
        self.plan(now, clock);
        expiry.filter(|expiry| clock >= *expiry).map(|_| {
            let users = self.users.now();
            users.ended_since(&users, clock)
        })
    }

    /// When [`Self::expire`] or [`Self::count`] has to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.look_at.into_iter().chain(self.count_at).min()
    }

    /// Whether it is time for [`Self::count`].
    pub(super) fn is_count_due(&self, now: Instant) -> bool {
        self.count_at.is_some_and(|at| at <= now)
    }

    /// Counts what users have carried since the last call. Returns the users that have no access any more, if
    /// that changed.
    pub(super) fn count(
        &mut self,
        now: Instant,
        clock: SystemTime,
        carried: &[(String, u64)],
    ) -> Option<BTreeMap<String, String>> {
        self.count_at = self.count_at.map(|_| now + COUNT_INTERVAL);
        let users = self.users.now();
        self.quotas.count(clock, &users, carried.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
        let changed = self.update_used_up(clock);
        // A crash must not give back a quota that is used up.
        if changed || now.saturating_duration_since(self.last_save) >= MIN_SAVE_INTERVAL {
            self.save(now);
        }
        changed.then(|| {
            let users = self.users.now();
            users.ended_since(&users, clock)
        })
    }

    /// The bytes that each user may carry in one direction until [`Self::count`] is due.
    pub(super) fn count_limits(&self, clock: SystemTime) -> BTreeMap<String, u64> {
        self.quotas.count_limits(clock, &self.users.now())
    }

    /// Writes how much is used, if that changed.
    pub(super) fn save(&mut self, now: Instant) {
        if !self.quotas.is_changed() {
            return;
        }
        self.last_save = now;
        match self.quotas.save() {
            Ok(()) => self.save_failed = false,
            Err(error) if !self.save_failed => {
                self.save_failed = true;
                tracing::warn!(
                    %error,
                    "cannot save how much of their quotas users have used: after a restart they count from the last saved value"
                );
            }
            Err(_) => {}
        }
    }

    /// Determines whose quotas are used up, and reports changes. Returns whether there are any.
    fn update_used_up(&mut self, clock: SystemTime) -> bool {
        let users = self.users.now();
        let (before, after) = (users.used_up().clone(), self.quotas.used_up(clock, &users));
        if *before == after {
            return false;
        }
        self.users.replace(Users::clone(&users).with_used_up(Arc::new(after.clone())));
        for (name, until) in after.iter().filter(|(name, _)| !before.contains_key(*name)) {
            let quota_bytes = users.get(name).and_then(|entry| entry.quota).map_or(0, |quota| quota.bytes());
            let (user, until) = (ShortText::of(name), ShortText::of(until));
            self.events.report(Event::UserQuotaReached { user, quota_bytes, until });
        }
        for name in before.keys().filter(|name| !after.contains_key(*name)) {
            self.events.report(Event::UserQuotaRenewed { user: ShortText::of(name) });
        }
        true
    }

    /// Reports events to `events` from now on.
    pub(super) fn report_to(&mut self, events: EventSender) {
        self.events = events;
    }

    /// The rates of all users that have limits or are counted.
    pub(super) fn rates(&self) -> BTreeMap<String, UserRates> {
        let users = self.users.now();
        let has_any = |entry: &&UserEntry| entry.up.or(entry.down).is_some() || entry.quota.is_some();
        let rates = |entry: &UserEntry| UserRates { up: entry.up, down: entry.down };
        users.iter().filter(has_any).map(|entry| (entry.name.clone(), rates(entry))).collect()
    }

    /// The users for the status, with the number of sessions that each has, and what each has carried;
    /// `departed`: by connections that are closed.
    pub(super) fn status(
        &self,
        sessions: &[SessionReport],
        departed: &BTreeMap<String, TrafficCounters>,
    ) -> Vec<User> {
        let mut open: BTreeMap<&str, (BTreeSet<SessionId>, TrafficCounters)> = BTreeMap::new();
        for report in sessions {
            let (sessions, carried) = open.entry(&report.user).or_default();
            sessions.extend(report.session);
            *carried += report.counters;
        }
        let carried = |name: &str| {
            let mut all = departed.get(name).copied().unwrap_or_default();
            all += open.get(name).map(|(_, carried)| *carried).unwrap_or_default();
            all
        };
        let (now, users) = (SystemTime::now(), self.users.now());
        let user = |entry: &UserEntry| User {
            name: entry.name.clone(),
            state: users.state(entry, now),
            expires: entry.expires.map(|expiry| expiry.to_string()),
            sessions: open.get(entry.name.as_str()).map_or(0, |(sessions, _)| sessions.len() as u32),
            max_sessions: entry.sessions,
            // The shards do not know them: `status::add_budget`.
            connections: 0,
            held_bytes: 0,
            up_cap_bps: entry.up.map(BitRate::bps),
            down_cap_bps: entry.down.map(BitRate::bps),
            quota_bytes: entry.quota.map(ByteSize::bytes),
            quota_used_bytes: entry.quota.map(|_| self.quotas.used(now, &entry.name)),
            tx_bytes: carried(&entry.name).tx_bytes,
            rx_bytes: carried(&entry.name).rx_bytes,
        };
        users.iter().map(user).collect()
    }

    /// The users as they are now.
    pub(super) fn now(&self) -> Arc<Users> {
        self.users.now()
    }

    /// Whether there is a user with this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.users.now().get(name).is_some()
    }

    /// The fixed addresses and networks of all users.
    pub(super) fn fixed_addresses(&self) -> Vec<(IpNet, String)> {
        self.users.now().fixed_addresses().collect()
    }

    fn plan(&mut self, now: Instant, clock: SystemTime) {
        let users = self.users.now();
        let has_quotas = users.iter().any(|entry| entry.quota.is_some());
        self.count_at = has_quotas.then(|| self.count_at.unwrap_or(now + COUNT_INTERVAL));
        self.expiry = users.next_expiry(clock);
        // Any shard may accept a certificate that expires first.
        let certificates =
            self.certificates.as_ref().map(|check| check.next_expiry().unwrap_or(clock + CLOCK_INTERVAL));
        let next = self.expiry.into_iter().chain(certificates).min();
        self.look_at = next.map(|at| now + at.duration_since(clock).unwrap_or_default().min(CLOCK_INTERVAL));
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
    fn authenticate(
        &self,
        authorization: Option<&str>,
        certificate: Option<&[u8]>,
    ) -> Result<AuthenticatedUser, Rejection> {
        let checked = self.authenticator.authenticate(authorization, certificate);
        checked
            .map(|(user, credential)| AuthenticatedUser { name: user.name, credential })
            .map_err(|denied| Rejection::new(denied.status(), denied.to_string()))
    }

    fn has_access(&self, user: &AuthenticatedUser) -> bool {
        user.credential.is_none_or(|credential| self.authenticator.has_access(&user.name, &credential))
    }

    fn limits(&self, user: &str) -> UserLimits {
        let rules = self.limits.now();
        let rule = LimitRule::of(&rules, user);
        // Without authentication all clients are one user.
        let (default, own) = match self.authenticator.users() {
            None => (None, None),
            Some(users) => (
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

    fn site_networks(&self, user: &str) -> Vec<IpNet> {
        self.authenticator.users().map_or(Vec::new(), |users| users.now().site_networks(user))
    }

    fn has_rules_of_users(&self) -> bool {
        self.has_rules_of_users.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_config::ServerConfig;
    use mpvpn_users::{Expiry, LockedUsers, UserSettings, users_file};

    use super::*;

    struct Fixture {
        list: UserList,
        config: ServerConfig,
        authenticator: Authenticator,
        _folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new(settings: UserSettings) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let config = ServerConfig { state_dir: folder.path().into(), ..ServerConfig::default() };
            let mut users = LockedUsers::open(&users_file(&config)).unwrap();
            users.add("alice", &settings).unwrap();
            let authenticator = Authenticator::Tokens(users.users().clone().into());
            let list = UserList::open(FileStore::new(&config), &authenticator).unwrap().unwrap();
            Self { list, config, authenticator, _folder: folder }
        }

        fn limits(&self, rules: &[Option<u32>]) -> Option<u32> {
            let rule = |max_sessions: &Option<u32>| LimitRule {
                users: vec![],
                max_sessions: *max_sessions,
                max_classes: 8,
                max_priority: None,
            };
            let checks = UserChecks {
                authenticator: self.authenticator.clone(),
                limits: Shared::from(rules.iter().map(rule).collect::<Vec<_>>()),
                has_rules_of_users: Arc::default(),
            };
            checks.limits("alice").max_sessions
        }
    }

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn the_smaller_of_the_limits_of_sessions_counts() {
        let of_user = |sessions| Fixture::new(UserSettings { sessions, ..UserSettings::default() });
        let three = of_user(Some(3));
        assert_eq!(
            [three.limits(&[]), three.limits(&[Some(2)]), three.limits(&[Some(5)])],
            [3, 2, 3].map(Some)
        );
        assert_eq!(three.limits(&[None]), Some(3));
        let many = of_user(Some(100));
        assert_eq!(many.limits(&[]), Some(100), "more than the default");
        let none = of_user(None);
        let default = LimitRule::DEFAULT_MAX_SESSIONS;
        assert_eq!(
            [none.limits(&[]), none.limits(&[None]), none.limits(&[Some(100)])],
            [default, default, 100].map(Some)
        );
    }

    #[test]
    fn access_ends_also_where_the_clock_jumps_past_its_end() {
        let clock = SystemTime::now();
        let expires = Some(Expiry::in_days(clock, 10));
        let mut fixture = Fixture::new(UserSettings { expires, ..UserSettings::default() });
        let (list, now) = (&mut fixture.list, Instant::now());
        assert!(
            list.poll_timeout().unwrap() <= Instant::now() + CLOCK_INTERVAL,
            "the clock is looked at soon"
        );
        assert_eq!(list.expire(now, clock + 30 * DAY), None, "it is not yet time to look");
        let ended = list.expire(now + CLOCK_INTERVAL, clock + 30 * DAY).unwrap();
        assert!(ended["alice"].contains("the access of this user ended on"), "{ended:?}");
        assert_eq!(list.expire(now + 2 * CLOCK_INTERVAL, clock + 30 * DAY), None, "said once");
        // After the clock was set right, access ends at its time again.
        list.read(now, clock).unwrap();
        let look_at = list.poll_timeout().unwrap();
        assert_eq!(list.expire(look_at, clock), None);
        let look_at = list.poll_timeout().unwrap();
        assert!(list.expire(look_at, clock + 11 * DAY).is_some());
    }

    #[test]
    fn access_ends_also_where_the_file_is_read_at_that_moment() {
        let clock = SystemTime::now();
        let expires = Some(Expiry::in_days(clock, 10));
        let mut fixture = Fixture::new(UserSettings { expires, ..UserSettings::default() });
        let (list, now) = (&mut fixture.list, Instant::now());
        let change = list.read(now, clock + 11 * DAY).unwrap();
        let (ended, lost_access) =
            change.map(|change| (change.ended, change.lost_access)).unwrap_or_default();
        assert_eq!(lost_access, 1);
        assert!(
            ended.contains_key("alice"),
            "the file says nothing new, but the access has ended: {ended:?}"
        );
        assert_eq!(list.read(now, clock + 11 * DAY), Ok(None), "said once");
    }

    #[test]
    fn users_without_access_before_a_change_have_not_lost_it_by_the_change() {
        let clock = SystemTime::now();
        let expires = Some(Expiry::in_days(clock, 10));
        let mut fixture = Fixture::new(UserSettings { expires, ..UserSettings::default() });
        let later = clock + 11 * DAY;
        fixture.list.read(Instant::now(), later).unwrap();
        let mut users = LockedUsers::open(&users_file(&fixture.config)).unwrap();
        users.add("bob", &UserSettings::default()).unwrap();
        drop(users);
        let change = fixture.list.read(Instant::now(), later).unwrap().unwrap();
        assert_eq!((change.count, change.lost_access), (2, 0));
        assert!(change.ended.contains_key("alice"), "sessions that began meanwhile end, too");
        let mut users = LockedUsers::open(&users_file(&fixture.config)).unwrap();
        users.revoke("bob").unwrap();
        drop(users);
        let change = fixture.list.read(Instant::now(), later).unwrap().unwrap();
        assert_eq!((change.count, change.lost_access), (2, 1));
    }

    #[test]
    fn a_quota_ends_access_counts_on_after_a_restart_and_is_renewed_by_the_month() {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let quota = Some(ByteSize::from_bytes(5_000_000));
        let mut fixture = Fixture::new(UserSettings { quota, ..UserSettings::default() });
        let carried = |bytes| [("alice".to_owned(), bytes), ("bob".to_owned(), bytes)];
        assert!(fixture.list.is_count_due(Instant::now() + COUNT_INTERVAL));
        assert_eq!(fixture.list.count(now, clock, &carried(3_000_000)), None);
        fixture.list.save(now);
        let reopen = |fixture: &Fixture| {
            UserList::open(FileStore::new(&fixture.config), &fixture.authenticator).unwrap().unwrap()
        };
        fixture.list = reopen(&fixture);
        let ended = fixture.list.count(now, clock, &carried(2_000_000)).unwrap();
        let reason = &ended["alice"];
        assert!(
            reason.contains("the quota of this user, 5 MB, is used up; it begins anew on 1 "),
            "{reason}"
        );
        assert_eq!(fixture.list.count(now, clock, &[]), None, "said once");
        // It was written at once.
        fixture.list = reopen(&fixture);
        assert_eq!(fixture.list.status(&[], &BTreeMap::new())[0].quota_used_bytes, Some(5_000_000));
        let ended = fixture.list.count(now, clock + 31 * DAY, &[]).unwrap();
        assert!(ended.is_empty(), "{ended:?}");
        assert_eq!(fixture.list.rates().keys().collect::<Vec<_>>(), ["alice"]);
    }
}
