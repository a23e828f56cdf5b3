//! Counts what links use of their quotas, and keeps the counts in a file across restarts.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use mpvpn_input::short_text::ShortText;
use mpvpn_links::policies::{LinkMeters, LinkPolicies};
use mpvpn_path::Month;
use mpvpn_state::quota_usage::{self, QuotaHolders, QuotaUsage};
use mpvpn_status::events::{Event, EventSender};
use mpvpn_types::Duration;

/// The interval of counting. Longer: a quota is exceeded by more. Shorter: wake-ups. Chosen.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest interval of writing the file. Longer: a crash forgets more. Shorter: wear of flash memory.
/// Chosen.
const MIN_SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// The usage of all links.
pub(super) struct Quotas {
    /// `None`: counts are not kept across restarts.
    file: Option<PathBuf>,
    used: BTreeMap<String, QuotaUsage>,
    meters: LinkMeters,
    events: EventSender,
    /// The meter readings that are already in `used`.
    counted: BTreeMap<String, u64>,
    pub(super) next_update: Instant,
    last_save: Instant,
    dirty: bool,
    save_failed: bool,
}

impl Quotas {
    /// Loads the counts of the client `name` from `state_dir`, if there is one.
    pub(super) fn load(
        now: Instant,
        state_dir: Option<&Path>,
        name: &str,
        meters: LinkMeters,
        events: EventSender,
    ) -> Result<Self, mpvpn_input::Error> {
        let file = state_dir.map(|dir| quota_usage::links_file(dir, name));
        Ok(Self {
            used: match &file {
                Some(file) => quota_usage::load(file, QuotaHolders::Links)?,
                None => BTreeMap::new(),
            },
            file,
            meters,
            events,
            counted: BTreeMap::new(),
            next_update: now,
            last_save: now,
            dirty: false,
            save_failed: false,
        })
    }

    /// Counts, and sets in `policies` which quotas are exhausted. Returns whether that changed. `names` are
    /// the present links.
    pub(super) fn update<'a>(
        &mut self,
        now: Instant,
        policies: &mut LinkPolicies,
        names: impl Iterator<Item = &'a str>,
    ) -> bool {
        self.next_update = now + UPDATE_INTERVAL;
        // A clock before 1970 counts as 1970.
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut changed = false;
        for name in names {
            changed |= self.count(unix, policies, name);
        }
        if self.dirty && now.saturating_duration_since(self.last_save) >= MIN_SAVE_INTERVAL {
            self.last_save = now;
            self.save();
        }
        changed
    }

    fn count(&mut self, unix: u64, policies: &mut LinkPolicies, name: &str) -> bool {
        let link = policies.of(name);
        let carried = self.meters.of(name).ip_bytes();
        let before = self.counted.insert(name.to_owned(), carried).unwrap_or(0);
        let Some(quota) = link.quota else { return policies.set_quota_exhausted(name, None) };
        let month = Month::of(unix, link.quota_day);
        let since = month.first.unix();
        let used = self.used.entry(name.to_owned()).or_insert(QuotaUsage { since, ..QuotaUsage::default() });
        let old = *used;
        used.count(since, carried - before);
        self.dirty |= *used != old;
        let exhausted = (used.bytes >= quota.bytes()).then_some((quota, month.next));
        let changed = policies.set_quota_exhausted(name, exhausted);
        if changed {
            let link = name.into();
            self.events.report(match exhausted {
                Some((quota, until)) => {
                    let (quota_bytes, until) = (quota.bytes(), ShortText::of(&until));
                    Event::QuotaReached { link, quota_bytes, until }
                }
                None => Event::QuotaRenewed { link },
            });
        }
        changed
    }

    /// Bytes that a link has used in the current period.
    pub(super) fn used(&self, name: &str) -> u64 {
        self.used.get(name).map_or(0, |used| used.bytes)
    }

    /// Resets a link's count.
    pub(super) fn reset(&mut self, name: &str) {
        if let Some(used) = self.used.get_mut(name) {
            used.bytes = 0;
            self.dirty = true;
        }
    }

    /// Writes the counts if they changed.
    pub(super) fn save(&mut self) {
        let Some(file) = self.file.as_deref().filter(|_| self.dirty) else { return };
        match quota_usage::save(file, QuotaHolders::Links, &self.used) {
            Ok(()) => (self.dirty, self.save_failed) = (false, false),
            Err(error) if !self.save_failed => {
                self.save_failed = true;
                tracing::warn!(
                    %error,
                    "cannot save the usage of links: after a restart quotas count from the last saved value; \
                     choose another folder with --state-dir"
                );
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_config::LinkConfig;
    use mpvpn_links::policies::Direction;
    use mpvpn_types::{ByteSize, Tier};

    const NOVEMBER: u64 = 1_793_491_200;
    const DECEMBER: u64 = 1_796_083_200;

    #[test]
    fn a_quota_is_used_up_kept_and_over_with_the_month() {
        let state_dir = tempfile::tempdir().unwrap();
        let link = LinkConfig { quota: Some(ByteSize::from_bytes(1_000_000)), ..LinkConfig::default() };
        let now = Instant::now();
        let start = || {
            let meters = LinkMeters::default();
            (
                Quotas::load(now, Some(state_dir.path()), "a", meters.clone(), EventSender::default())
                    .unwrap(),
                LinkPolicies::new(std::slice::from_ref(&link)),
                meters,
            )
        };
        let (mut quotas, mut policies, meters) = start();
        meters.of("wwan0").count(Direction::Sent, 700_000, 0, true);
        assert!(!quotas.count(NOVEMBER, &mut policies, "wwan0"));
        quotas.save();

        let (mut quotas, mut policies, meters) = start();
        meters.of("wwan0").count(Direction::Sent, 299_972 + 28, 0, true);
        assert!(quotas.count(NOVEMBER + 86_400, &mut policies, "wwan0"), "used up over two runs");
        assert_eq!((policies.tier("wwan0"), quotas.used("wwan0")), (Tier::Never, 1_000_000));
        assert!(!quotas.count(DECEMBER - 1, &mut policies, "wwan0"));
        assert!(quotas.count(DECEMBER, &mut policies, "wwan0"));
        assert_eq!((policies.tier("wwan0"), quotas.used("wwan0")), (Tier::Primary, 0));

        meters.of("wwan0").count(Direction::Sent, 2_000_000, 0, true);
        assert!(quotas.count(DECEMBER, &mut policies, "wwan0"));
        quotas.reset("wwan0");
        assert!(quotas.count(DECEMBER, &mut policies, "wwan0"));
        assert_eq!(policies.tier("wwan0"), Tier::Primary);
    }

    #[test]
    fn without_a_quota_no_file_is_made() {
        let state_dir = tempfile::tempdir().unwrap();
        let meters = LinkMeters::default();
        let mut quotas =
            Quotas::load(Instant::now(), Some(state_dir.path()), "a", meters.clone(), EventSender::default())
                .unwrap();
        meters.of("eth0").count(Direction::Sent, 5000, 4, false);
        assert!(!quotas.count(NOVEMBER, &mut LinkPolicies::new(&[]), "eth0"));
        quotas.save();
        assert_eq!(std::fs::read_dir(state_dir.path()).unwrap().count(), 0);
    }
}
