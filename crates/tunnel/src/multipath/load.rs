//! Measures the load of a path by whether packets wait for it.
//!
//! In: at every measurement, whether more data waited for the path than its available window. Out: whether
//! the path is full, has capacity to spare, or neither. Always holds: a single measurement never changes the
//! result.

use mpvpn_path::Utilization;

/// Consecutive measurements (20 ms apart) with the same result after which a path counts as full or spare.
/// Smaller: a burst counts as a full path, and overflow links are used without need. Larger: a full path gets
/// help later.
const CONSECUTIVE_MEASUREMENTS: i32 = 8;

/// The load of one path.
#[derive(Debug)]
pub(super) struct PathLoad {
    /// Consecutive measurements in which packets waited for the path (positive) or none did (negative).
    run: i32,
    pub(super) now: Utilization,
}

impl PathLoad {
    pub(super) fn new() -> Self {
        Self { run: 0, now: Utilization::Partial }
    }

    /// Takes a measurement if one is `due`, else returns [`Utilization::Partial`]. `limited`: more data
    /// waited than the path could take.
    pub(super) fn measure(&mut self, due: bool, limited: bool) -> Utilization {
        self.now = if due { self.step(limited) } else { Utilization::Partial };
        self.now
    }

    fn step(&mut self, limited: bool) -> Utilization {
        self.run = if limited { self.run.max(0) + 1 } else { self.run.min(0) - 1 };
        match self.run {
            run if run <= -CONSECUTIVE_MEASUREMENTS => Utilization::Spare,
            // The next result "full" takes half as many measurements: moving traffic takes time to show an
            // effect.
            CONSECUTIVE_MEASUREMENTS.. => {
                self.run = CONSECUTIVE_MEASUREMENTS / 2;
                Utilization::Full
            }
            _ => Utilization::Partial,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(load: &mut PathLoad, limited: bool, measurements: usize) -> Vec<Utilization> {
        (0..measurements).map(|_| load.measure(true, limited)).collect()
    }

    #[test]
    fn a_path_is_full_after_eight_measurements_and_again_after_four_more() {
        let mut load = PathLoad::new();
        assert_eq!(run(&mut load, true, 7), [Utilization::Partial; 7]);
        assert_eq!(
            run(&mut load, true, 5),
            [
                Utilization::Full,
                Utilization::Partial,
                Utilization::Partial,
                Utilization::Partial,
                Utilization::Full
            ]
        );
    }

    #[test]
    fn one_measurement_of_the_other_kind_starts_the_count_again() {
        let mut load = PathLoad::new();
        run(&mut load, true, 7);
        assert_eq!(run(&mut load, false, 8)[..7], [Utilization::Partial; 7]);
        assert_eq!(load.now, Utilization::Spare);
        assert_eq!(load.measure(true, false), Utilization::Spare, "for as long as nothing waits");
        assert_eq!(run(&mut load, true, 8)[7], Utilization::Full);
    }

    #[test]
    fn between_measurements_nothing_is_known_and_nothing_is_counted() {
        let mut load = PathLoad::new();
        run(&mut load, true, 7);
        assert_eq!((load.measure(false, false), load.now), (Utilization::Partial, Utilization::Partial));
        assert_eq!(load.measure(true, true), Utilization::Full);
    }
}
