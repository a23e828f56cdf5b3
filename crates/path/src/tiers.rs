use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier, target::SCHEDULER};

use crate::{Load, Scheduler};

/// Primary links that are full for this long are too few.
const FULL_FOR: Duration = Duration::from_millis(300);
/// A path that was called full stays so for this long: the next verdict may need as much time.
const FULL_ECHO: Duration = Duration::from_millis(250);
/// Primary links that have room for this long, in all, are enough again.
const SPARE_FOR: Duration = Duration::from_secs(5);
/// An overflow link that is needed again this soon was given back too early; what is asked for doubles.
const TOO_EARLY: Duration = Duration::from_secs(20);
const SPARE_MAX: Duration = Duration::from_secs(80);

/// A path whose place is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number in its connection.
    pub id: PathId,
    /// The link that it runs over; a smaller number comes first under [`Scheduler::Failover`].
    pub link: LinkId,
    /// What it has in common with the other paths over the same link.
    pub bundle: u32,
    /// The link's tier.
    pub tier: Tier,
    /// Every packet costs.
    pub metered: bool,
    /// Whether it can carry data.
    pub works: bool,
    /// How busy it has been since it was asked last.
    pub load: Load,
}

/// Whether a path carries data, as far as the tiers have a say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It does, if it works.
    Active,
    /// It waits: the primary links are enough.
    NotNeeded,
    /// It waits: a link of a better tier works.
    BetterWorks,
    /// It waits: an earlier link of its tier works, and one at a time is used.
    NotFirst,
    /// It is not to be used at all.
    Never,
}

impl Place {
    /// Why a path waits; empty for one that does not.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "",
            Self::NotNeeded => "overflow not needed",
            Self::BetterWorks => "a better link works",
            Self::NotFirst => "another link comes first",
            Self::Never => "never to be used",
        }
    }
}

/// Gives the paths of a connection their places by the tiers of their links.
///
/// Overflow links come into use when all primary ones that work are full, and go out of use when
/// those had room for some seconds. Each end of a tunnel decides for what it sends.
#[derive(Clone, Debug)]
pub struct Tiers {
    last: Option<Instant>,
    /// When a primary path was called full last, and since when that goes on.
    full: Option<(Instant, Instant)>,
    overflowing: bool,
    /// How long the primary paths had room since they were full last.
    spare: Duration,
    spare_for: Duration,
    given_back: Option<Instant>,
}

impl Default for Tiers {
    fn default() -> Self {
        Self {
            last: None,
            full: None,
            overflowing: false,
            spare: Duration::ZERO,
            spare_for: SPARE_FOR,
            given_back: None,
        }
    }
}

impl Tiers {
    /// Whether overflow links are in use because the primary ones are full.
    pub fn is_overflowing(&self) -> bool {
        self.overflowing
    }

    /// The places of the paths, in their order. `links`: so many links carry each packet; where fewer would, others are
    /// taken along, but none that is metered. `measured`: the loads of the paths are new.
    pub fn places(
        &mut self,
        now: Instant,
        scheduler: Scheduler,
        paths: &[Candidate],
        links: usize,
        measured: bool,
    ) -> Vec<Place> {
        if measured {
            self.measure(now, paths);
        }
        let works = |tier| paths.iter().any(|path| path.tier == tier && path.works);
        let best = Tier::ALL[..3].iter().copied().find(|tier| works(*tier)).unwrap_or(Tier::Primary);
        let one = scheduler.policy().uses_one_link();
        let first = paths.iter().filter(|path| path.tier == best && path.works);
        let first = first.min_by_key(|path| (path.link, path.id)).map(|path| path.bundle);
        let place = |path: &Candidate| match path.tier {
            Tier::Never => Place::Never,
            tier if tier < best => Place::Active,
            tier if tier == best && one && first.is_some_and(|first| first != path.bundle) => Place::NotFirst,
            tier if tier == best => Place::Active,
            Tier::Overflow if self.overflowing && !one => Place::Active,
            Tier::Overflow => Place::NotNeeded,
            _ => Place::BetterWorks,
        };
        let mut places: Vec<_> = paths.iter().map(place).collect();
        if !one && links > 1 {
            take_along(paths, &mut places, links);
        }
        places
    }

    fn measure(&mut self, now: Instant, paths: &[Candidate]) {
        let passed = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last = Some(now);
        let primary = || paths.iter().filter(|path| path.tier == Tier::Primary && path.works);
        if primary().next().is_none() {
            // Whether they are enough shows when they are back.
            self.full = None;
            return;
        }
        if primary().all(|path| path.load == Load::Full) {
            let since = self.full.map_or(now, |(_, since)| since);
            self.full = Some((now, since));
            self.spare = Duration::ZERO;
        } else if self.full.is_some_and(|(last, _)| now.saturating_duration_since(last) > FULL_ECHO) {
            self.full = None;
        }
        if primary().any(|path| path.load == Load::Spare) && self.full.is_none() {
            self.spare += passed.min(FULL_ECHO);
        }
        let full_for = self.full.map_or(Duration::ZERO, |(last, since)| last - since);
        if !self.overflowing && full_for >= FULL_FOR {
            let early = self.given_back.is_some_and(|at| now.saturating_duration_since(at) < TOO_EARLY);
            self.spare_for = if early { (2 * self.spare_for).min(SPARE_MAX) } else { SPARE_FOR };
            self.overflowing = true;
            tracing::debug!(
                target: SCHEDULER,
                ?full_for,
                given_back = ?self.given_back.map(|at| now.saturating_duration_since(at)),
                kept_for = ?self.spare_for,
                "primary links are full: overflow links come into use"
            );
        } else if self.overflowing && self.spare >= self.spare_for {
            self.overflowing = false;
            self.given_back = Some(now);
            tracing::debug!(
                target: SCHEDULER,
                spare = ?self.spare,
                "primary links have room: overflow links are not needed any more"
            );
        }
    }
}

/// Gives paths that wait a place among the active ones until so many links carry data, or no more can.
fn take_along(paths: &[Candidate], places: &mut [Place], links: usize) {
    let mut active: Vec<u32> = Vec::new();
    for (path, _) in paths.iter().zip(&*places).filter(|(path, place)| path.works && **place == Place::Active)
    {
        if !active.contains(&path.bundle) {
            active.push(path.bundle);
        }
    }
    while active.len() < links {
        let waits = |path: &&Candidate| {
            path.works && path.tier != Tier::Never && !path.metered && !active.contains(&path.bundle)
        };
        let next = paths.iter().filter(waits).min_by_key(|path| (path.tier, path.link, path.id));
        let Some(bundle) = next.map(|path| path.bundle) else { return };
        active.push(bundle);
        let all = paths.iter().zip(&mut *places);
        let own = all.filter(|(path, _)| path.bundle == bundle && path.works && path.tier != Tier::Never);
        own.for_each(|(_, place)| *place = Place::Active);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    fn path(id: u32, tier: Tier) -> Candidate {
        Candidate {
            id: PathId(id),
            link: LinkId(id as u16),
            bundle: id,
            tier,
            metered: false,
            works: true,
            load: Load::Some,
        }
    }

    fn once(paths: &[Candidate], scheduler: Scheduler) -> Vec<Place> {
        Tiers::default().places(Instant::now(), scheduler, paths, 1, true)
    }

    /// Lets `time` pass with the first path this busy; how long the overflow link was in use.
    fn run(tiers: &mut Tiers, now: &mut Instant, time: Duration, load: Load) -> Duration {
        let paths =
            [Candidate { load, ..path(0, Tier::Primary) }, path(1, Tier::Overflow), path(2, Tier::Backup)];
        let end = *now + time;
        let mut used = Duration::ZERO;
        while *now < end {
            *now += STEP;
            let places = tiers.places(*now, Scheduler::Auto, &paths, 1, true);
            assert_eq!((places[0], places[2]), (Place::Active, Place::BetterWorks));
            if places[1] == Place::Active {
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
            [Place::Active, Place::NotNeeded, Place::BetterWorks, Place::Never]
        );
        paths[0].works = false;
        assert_eq!(
            once(&paths, Scheduler::Auto),
            [Place::Active, Place::Active, Place::BetterWorks, Place::Never]
        );
        paths[1].works = false;
        assert_eq!(
            once(&paths, Scheduler::Auto),
            [Place::Active, Place::Active, Place::Active, Place::Never]
        );
        paths[2].works = false;
        let places = once(&paths, Scheduler::Auto);
        assert_eq!(places[3], Place::Never, "never means never");
        assert_eq!(places[0], Place::Active, "a dead primary path is tried again when all are dead");
    }

    #[test]
    fn copies_take_links_of_later_tiers_along() {
        let mut paths =
            [path(0, Tier::Primary), path(1, Tier::Backup), path(2, Tier::Overflow), path(3, Tier::Never)];
        let copied = |paths: &[Candidate], links| {
            Tiers::default().places(Instant::now(), Scheduler::Auto, paths, links, true)
        };
        use Place::{Active, BetterWorks, Never, NotNeeded};
        assert_eq!(copied(&paths, 1), [Active, BetterWorks, NotNeeded, Never]);
        assert_eq!(copied(&paths, 2), [Active, BetterWorks, Active, Never]);
        assert_eq!(copied(&paths, 4), [Active, Active, Active, Never], "never means never");
        paths[2].metered = true;
        assert_eq!(copied(&paths, 2), [Active, Active, NotNeeded, Never]);
        // Two paths over one link do not make two links.
        (paths[1].bundle, paths[1].tier) = (0, Tier::Primary);
        assert_eq!(copied(&paths, 2), [Active, Active, NotNeeded, Never]);
    }

    #[test]
    fn failover_uses_one_path_of_the_best_tier_that_works() {
        let mut paths = [path(0, Tier::Backup), path(1, Tier::Primary), path(2, Tier::Primary)];
        assert_eq!(once(&paths, Scheduler::Failover), [Place::BetterWorks, Place::Active, Place::NotFirst]);
        paths[1].works = false;
        assert_eq!(once(&paths, Scheduler::Failover), [Place::BetterWorks, Place::NotFirst, Place::Active]);
        paths[2].works = false;
        assert_eq!(once(&paths, Scheduler::Failover)[0], Place::Active);
        for path in &mut paths {
            (path.works, path.bundle, path.tier) = (true, path.id.0 / 2, Tier::Primary);
        }
        let places = once(&paths, Scheduler::Failover);
        assert_eq!(places, [Place::Active, Place::Active, Place::NotFirst], "all paths of one link");
    }

    #[test]
    fn overflow_is_used_soon_when_needed_and_given_back_after_seconds_of_room() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        assert_eq!(run(&mut tiers, &mut now, Duration::from_secs(10), Load::Some), Duration::ZERO);
        assert_eq!(run(&mut tiers, &mut now, Duration::from_millis(200), Load::Full), Duration::ZERO);
        assert_eq!(run(&mut tiers, &mut now, Duration::from_secs(2), Load::Spare), Duration::ZERO);
        assert!(run(&mut tiers, &mut now, Duration::from_secs(1), Load::Full) >= Duration::from_millis(600));
        let used = run(&mut tiers, &mut now, Duration::from_secs(20), Load::Spare);
        assert!((SPARE_FOR..SPARE_FOR + Duration::from_secs(1)).contains(&used), "{used:?}");
    }

    #[test]
    fn a_link_needed_again_and_again_is_kept_longer() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        let mut kept = Vec::new();
        for _ in 0..4 {
            run(&mut tiers, &mut now, Duration::from_secs(1), Load::Full);
            let before = now;
            while tiers.is_overflowing() {
                run(&mut tiers, &mut now, STEP, Load::Spare);
                assert!(now - before < 2 * SPARE_MAX, "never given back");
            }
            kept.push(now - before);
        }
        assert!(kept.windows(2).all(|pair| pair[1] > pair[0] * 3 / 2), "{kept:?}");
    }

    #[test]
    fn full_primaries_among_ones_with_room_are_enough() {
        let (mut tiers, mut now) = (Tiers::default(), Instant::now());
        let paths = [
            Candidate { load: Load::Full, ..path(0, Tier::Primary) },
            Candidate { load: Load::Spare, ..path(1, Tier::Primary) },
            path(2, Tier::Overflow),
        ];
        for _ in 0..500 {
            now += STEP;
            let places = tiers.places(now, Scheduler::Auto, &paths, 1, true);
            assert_eq!(places[2], Place::NotNeeded);
        }
    }
}
