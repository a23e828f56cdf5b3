//! Divides an amount among classes with different claims.
//!
//! In: an amount (bytes, or bytes/s) and the claims of the classes. Out: the share of each class. Always
//! holds: no class gets more than its demand, and all together get the whole amount or all they demand.

/// Number of classes that can share a link.
pub(super) const CLASSES: usize = mpvpn_types::ClassId::MAX as usize;

/// The claim of a class, in bytes or in bytes/s.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claim {
    /// The most that the class can use.
    pub(super) demand: f64,
    /// The part of the demand that is served before all other classes.
    pub(super) first_limit: f64,
    /// The part of the demand that is guaranteed: it is served before the rest is divided by weight.
    pub(super) min_limit: f64,
    /// Relative weight for the rest.
    pub(super) weight: f64,
}

/// The share that a class gets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Allocation {
    /// All of it.
    pub(super) total: f64,
    /// The part served before all other classes.
    pub(super) first: f64,
    /// The guaranteed part.
    pub(super) min: f64,
}

/// Divides `pool`: first the classes that go first, then the guaranteed minimums, then the rest by weight.
pub(super) fn divide(mut pool: f64, claims: &[Claim; CLASSES]) -> [Allocation; CLASSES] {
    let first = fill(&mut pool, |at| (claims[at].demand.min(claims[at].first_limit), claims[at].weight));
    let open = |at: usize| (claims[at].demand - first[at]).max(0.0);
    let least = fill(&mut pool, |at| (open(at).min(claims[at].min_limit), claims[at].min_limit));
    let rest = fill(&mut pool, |at| ((open(at) - least[at]).max(0.0), claims[at].weight));
    std::array::from_fn(|at| Allocation {
        total: first[at] + least[at] + rest[at],
        first: first[at],
        min: least[at],
    })
}

/// Divides `pool` by weight (weighted max-min fairness): `want` gives the maximum and the weight of each
/// class. Ends when the pool is empty or no class wants more.
fn fill(pool: &mut f64, want: impl Fn(usize) -> (f64, f64)) -> [f64; CLASSES] {
    let wants: [(f64, f64); CLASSES] = std::array::from_fn(want);
    let mut given = [0.0; CLASSES];
    let mut open: [bool; CLASSES] = std::array::from_fn(|at| wants[at].0 > 0.0 && wants[at].1 > 0.0);
    while *pool > 0.0 {
        let weights: f64 = (0..CLASSES).filter(|at| open[*at]).map(|at| wants[at].1).sum();
        if weights <= 0.0 {
            break;
        }
        let each = *pool / weights;
        let before = open;
        for at in (0..CLASSES).filter(|at| before[*at]) {
            if wants[at].0 <= each * wants[at].1 {
                (given[at], open[at]) = (wants[at].0, false);
                *pool -= wants[at].0;
            }
        }
        if open == before {
            (0..CLASSES).filter(|at| open[*at]).for_each(|at| given[at] = each * wants[at].1);
            *pool = 0.0;
        }
    }
    *pool = pool.max(0.0);
    given
}
