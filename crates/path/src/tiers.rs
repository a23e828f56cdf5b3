use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier, target::SCHEDULER};

use crate::{Scheduler, Utilization};

/// How long all working primary paths have to be full before overflow links carry data. Shorter: bursts bring
/// paid links into use; longer: downloads are slow for longer. Chosen (docs/design/scheduler.md).
const FULL_FOR: Duration = Duration::from_millis(300);
/// How long a path counts as full after a measurement said so, because the next one may take as long (8 of 20
/// ms). Shorter: gaps between measurements count as spare; longer: spare capacity is noticed late.
const FULL_HOLD: Duration = Duration::from_millis(250);
/// How long, in sum, primary paths must have had spare capacity before overflow links are released. Shorter:
/// links come and go; longer: paid links carry data for longer. Chosen.
const SPARE_FOR: Duration = Duration::from_secs(5);
/// If overflow links are needed again this soon after their release, [`SPARE_FOR`] doubles, up to
/// [`MAX_SPARE_FOR`]. Chosen.
const EARLY_RELEASE: Duration = Duration::from_secs(20);
const MAX_SPARE_FOR: Duration = Duration::from_secs(80);

/// A path with what the tiers need to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TieredPath {
    /// The path's number in its connection.
    pub id: PathId,
    /// The link that it runs over; a smaller number comes first under [`Scheduler::Failover`].
    pub link: LinkId,
    /// The same number for all paths over the same link.
    pub group: u32,
    /// The link's tier.
    pub tier: Tier,
    /// Whether the link is metered: each byte costs.
    pub metered: bool,
    /// Whether it can carry data.
    pub works: bool,
    /// Its utilization since the last call.
    pub utilization: Utilization,
}

/// Whether the tiers let a path carry data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The path carries data, if it works.
    Active,
    /// The path waits: it is an overflow path, and the primary paths suffice.
    OverflowNotNeeded,
    /// The path waits: a path of a better tier works.
    BetterTierWorks,
    /// The path waits: an earlier link of its tier works, and the scheduler uses one link at a time.
    EarlierLinkWorks,
    /// The path is never used.
    Never,
}

impl Placement {
    /// Why the path waits; empty if it does not.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "",
            Self::OverflowNotNeeded => "overflow not needed",
            Self::BetterTierWorks => "a better link works",
            Self::EarlierLinkWorks => "another link comes first",
            Self::Never => "never to be used",
        }
    }
}

/// Decides which paths of a connection carry data, by the tiers of their links.
///
/// Overflow paths carry data while all working primary paths are full, and until those had spare capacity for
/// some seconds. Each end of a tunnel decides for the data that it sends.
#[derive(Clone, Debug)]
pub struct Tiers {
    last: Option<Instant>,
    /// When all primary paths were last full, and since when.
    full: Option<(Instant, Instant)>,
    overflowing: bool,
    /// How long, in sum, the primary paths had spare capacity since they were last full.
    spare: Duration,
    spare_for: Duration,
    released: Option<Instant>,
}

impl Default for Tiers {
    fn default() -> Self {
        Self {
            last: None,
            full: None,
            overflowing: false,
            spare: Duration::ZERO,
            spare_for: SPARE_FOR,
            released: None,
        }
    }
}

impl Tiers {
    /// Whether overflow paths carry data because the primary ones are full.
    pub fn is_overflowing(&self) -> bool {
        self.overflowing
    }

    /// The placement of each of `paths`. `links`: how many links carry each packet (copies); if fewer are
    /// active, links of later tiers are activated, but no metered ones. `measured`: the utilizations are
    /// new.
    pub fn placements(
        &mut self,
        now: Instant,
        scheduler: Scheduler,
        paths: &[TieredPath],
        links: usize,
        measured: bool,
    ) -> Vec<Placement> {
        if measured {
            self.measure(now, paths);
        }
        let works = |tier| paths.iter().any(|path| path.tier == tier && path.works);
        let best = Tier::ALL[..3].iter().copied().find(|tier| works(*tier)).unwrap_or(Tier::Primary);
        let one = scheduler.uses_one_link();
        let first = paths.iter().filter(|path| path.tier == best && path.works);
        let first = first.min_by_key(|path| (path.link, path.id)).map(|path| path.group);
        let place = |path: &TieredPath| match path.tier {
            Tier::Never => Placement::Never,
            tier if tier < best => Placement::Active,
            tier if tier == best && one && first.is_some_and(|first| first != path.group) => {
                Placement::EarlierLinkWorks
            }
            tier if tier == best => Placement::Active,
            Tier::Overflow if self.overflowing && !one => Placement::Active,
            Tier::Overflow => Placement::OverflowNotNeeded,
            _ => Placement::BetterTierWorks,
        };
        let mut places: Vec<_> = paths.iter().map(place).collect();
        if !one && links > 1 {
            activate_for_copies(paths, &mut places, links);
        }
        places
    }

    fn measure(&mut self, now: Instant, paths: &[TieredPath]) {
        let passed = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last = Some(now);
        let primary = || paths.iter().filter(|path| path.tier == Tier::Primary && path.works);
        if primary().next().is_none() {
            // Without primary paths nothing can be said about their capacity.
            self.full = None;
            return;
        }
        if primary().all(|path| path.utilization == Utilization::Full) {
            let since = self.full.map_or(now, |(_, since)| since);
            self.full = Some((now, since));
            self.spare = Duration::ZERO;
        } else if self.full.is_some_and(|(last, _)| now.saturating_duration_since(last) > FULL_HOLD) {
            self.full = None;
        }
        if primary().any(|path| path.utilization == Utilization::Spare) && self.full.is_none() {
            self.spare += passed.min(FULL_HOLD);
        }
        let full_for = self.full.map_or(Duration::ZERO, |(last, since)| last - since);
        if !self.overflowing && full_for >= FULL_FOR {
            let early = self.released.is_some_and(|at| now.saturating_duration_since(at) < EARLY_RELEASE);
            self.spare_for = if early { (2 * self.spare_for).min(MAX_SPARE_FOR) } else { SPARE_FOR };
            self.overflowing = true;
            tracing::debug!(
                target: SCHEDULER,
                ?full_for,
                released = ?self.released.map(|at| now.saturating_duration_since(at)),
                kept_for = ?self.spare_for,
                "primary paths are full: overflow links carry data"
            );
        } else if self.overflowing && self.spare >= self.spare_for {
            self.overflowing = false;
            self.released = Some(now);
            tracing::debug!(
                target: SCHEDULER,
                spare = ?self.spare,
                "primary paths have spare capacity: overflow links are released"
            );
        }
    }
}

/// Activates waiting paths until `links` links carry data, or no more links may.
fn activate_for_copies(paths: &[TieredPath], places: &mut [Placement], links: usize) {
    let mut active: Vec<u32> = Vec::new();
    for (path, _) in
        paths.iter().zip(&*places).filter(|(path, place)| path.works && **place == Placement::Active)
    {
        if !active.contains(&path.group) {
            active.push(path.group);
        }
    }
    while active.len() < links {
        let waits = |path: &&TieredPath| {
            path.works && path.tier != Tier::Never && !path.metered && !active.contains(&path.group)
        };
        let next = paths.iter().filter(waits).min_by_key(|path| (path.tier, path.link, path.id));
        let Some(bundle) = next.map(|path| path.group) else { return };
        active.push(bundle);
        let all = paths.iter().zip(&mut *places);
        let own = all.filter(|(path, _)| path.group == bundle && path.works && path.tier != Tier::Never);
        own.for_each(|(_, place)| *place = Placement::Active);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    fn path(id: u32, tier: Tier) -> TieredPath {
        TieredPath {
            id: PathId(id),
            link: LinkId(id as u16),
            group: id,
            tier,
            metered: false,
            works: true,
            utilization: Utilization::Partial,
        }
    }

    fn once(paths: &[TieredPath], scheduler: Scheduler) -> Vec<Placement> {
        Tiers::default().placements(Instant::now(), scheduler, paths, 1, true)
    }

    /// Lets `time` pass with this utilization of the first path; returns how long the overflow path carried
    /// data.
    fn run(tiers: &mut Tiers, now: &mut Instant, time: Duration, load: Utilization) -> Duration {
        let paths = [
            TieredPath { utilization: load, ..path(0, Tier::Primary) },
            path(1, Tier::Overflow),
            path(2, Tier::Backup),
        ];
        let end = *now + time;
        let mut used = Duration::ZERO;
        while *now < end {
            *now += STEP;
            let places = tiers.placements(*now, Scheduler::Auto, &paths, 1, true);
            assert_eq!((places[0], places[2]), (Placement::Active, Placement::BetterTierWorks));
            if places[1] == Placement::Active {
                used += STEP;
            }
        }
        used
    }

    #[test]
    fn each_tier_waits_for_the_ones_before_it() {
        let mut paths =
            [path(0, Tier::Primary), path(1, Tier::Overflow), path(2, Tier::Backup), path(3, Tier::Never)];
        assert_eq!(
            once(&paths, Scheduler::Auto),
            [Placement::Active, Placement::OverflowNotNeeded, Placement::BetterTierWorks, Placement::Never]
        );
        paths[0].works = false;
        assert_eq!(
            once(&paths, Scheduler::Auto),
            [Placement::Active, Placement::Active, Placement::BetterTierWorks, Placement::Never]
        );
        paths[1].works = false;
        assert_eq!(
            once(&paths, Scheduler::Auto),
            [Placement::Active, Placement::Active, Placement::Active, Placement::Never]
        );
        paths[2].works = false;
        let places = once(&paths, Scheduler::Auto);
        assert_eq!(places[3], Placement::Never, "never means never");
        assert_eq!(places[0], Placement::Active, "a dead primary path is tried again when all are dead");
    }

    #[test]
    fn copies_activate_links_of_later_tiers() {
        let mut paths =
            [path(0, Tier::Primary), path(1, Tier::Backup), path(2, Tier::Overflow), path(3, Tier::Never)];
        let copied = |paths: &[TieredPath], links| {
            Tiers::default().placements(Instant::now(), Scheduler::Auto, paths, links, true)
        };
        use Placement::{Active, BetterTierWorks, Never, OverflowNotNeeded};
        assert_eq!(copied(&paths, 1), [Active, BetterTierWorks, OverflowNotNeeded, Never]);
        assert_eq!(copied(&paths, 2), [Active, BetterTierWorks, Active, Never]);
        assert_eq!(copied(&paths, 4), [Active, Active, Active, Never], "never means never");
        paths[2].metered = true;
        assert_eq!(copied(&paths, 2), [Active, Active, OverflowNotNeeded, Never]);
        // Two paths over one link do not make two links.
        (paths[1].group, paths[1].tier) = (0, Tier::Primary);
        assert_eq!(copied(&paths, 2), [Active, Active, OverflowNotNeeded, Never]);
    }

    #[test]
    fn failover_uses_one_path_of_the_best_tier_that_works() {
        let mut paths = [path(0, Tier::Backup), path(1, Tier::Primary), path(2, Tier::Primary)];
        assert_eq!(
            once(&paths, Scheduler::Failover),
            [Placement::BetterTierWorks, Placement::Active, Placement::EarlierLinkWorks]
        );
        paths[1].works = false;
        assert_eq!(
            once(&paths, Scheduler::Failover),
            [Placement::BetterTierWorks, Placement::EarlierLinkWorks, Placement::Active]
        );
        paths[2].works = false;
        assert_eq!(once(&paths, Scheduler::Failover)[0], Placement::Active);
        for path in &mut paths {
            (path.works, path.group, path.tier) = (true, path.id.0 / 2, Tier::Primary);
        }
        let places = once(&paths, Scheduler::Failover);
        assert_eq!(
            places,
            [Placement::Active, Placement::Active, Placement::EarlierLinkWorks],
            "all paths of one link"
        );
    }

    #[test]
    fn overflow_is_used_soon_when_needed_and_released_after_seconds_of_spare_capacity() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        assert_eq!(run(&mut tiers, &mut now, Duration::from_secs(10), Utilization::Partial), Duration::ZERO);
        assert_eq!(run(&mut tiers, &mut now, Duration::from_millis(200), Utilization::Full), Duration::ZERO);
        assert_eq!(run(&mut tiers, &mut now, Duration::from_secs(2), Utilization::Spare), Duration::ZERO);
        assert!(
            run(&mut tiers, &mut now, Duration::from_secs(1), Utilization::Full)
                >= Duration::from_millis(600)
        );
        let used = run(&mut tiers, &mut now, Duration::from_secs(20), Utilization::Spare);
        assert!((SPARE_FOR..SPARE_FOR + Duration::from_secs(1)).contains(&used), "{used:?}");
    }

    #[test]
    fn a_link_needed_again_and_again_is_kept_longer() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        let mut kept = Vec::new();
        for _ in 0..4 {
            run(&mut tiers, &mut now, Duration::from_secs(1), Utilization::Full);
            let before = now;
            while tiers.is_overflowing() {
                run(&mut tiers, &mut now, STEP, Utilization::Spare);
                assert!(now - before < 2 * MAX_SPARE_FOR, "never given back");
            }
            kept.push(now - before);
        }
        assert!(kept.windows(2).all(|pair| pair[1] > pair[0] * 3 / 2), "{kept:?}");
    }

    #[test]
    fn full_primary_paths_beside_spare_ones_suffice() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        let paths = [
            TieredPath { utilization: Utilization::Full, ..path(0, Tier::Primary) },
            TieredPath { utilization: Utilization::Spare, ..path(1, Tier::Primary) },
            path(2, Tier::Overflow),
        ];
        for _ in 0..500 {
            now += STEP;
            let places = tiers.placements(now, Scheduler::Auto, &paths, 1, true);
            assert_eq!(places[2], Placement::OverflowNotNeeded);
        }
    }
}
