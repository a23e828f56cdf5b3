//! Who gets how much of what there is to divide.

/// How many classes share a link.
pub(super) const CLASSES: usize = mpvpn_types::ClassId::MAX as usize;

/// What a class asks for, in bytes or in bytes/s.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claim {
    /// No more than this.
    pub(super) need: f64,
    /// So much of that before anybody else.
    pub(super) first: f64,
    /// So much of that before anything goes by weight.
    pub(super) least: f64,
    /// How much of the rest, compared with others.
    pub(super) weight: f64,
}

/// What a class is given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Given {
    /// In all.
    pub(super) all: f64,
    /// As one that goes first.
    pub(super) first: f64,
    /// As the least that it is owed.
    pub(super) least: f64,
}

/// Divides `pool`: those that go first, then what each is owed at least, then the rest by weight.
pub(super) fn divide(mut pool: f64, claims: &[Claim; CLASSES]) -> [Given; CLASSES] {
    let first = fill(&mut pool, |at| (claims[at].need.min(claims[at].first), claims[at].weight));
    let open = |at: usize| (claims[at].need - first[at]).max(0.0);
    let least = fill(&mut pool, |at| (open(at).min(claims[at].least), claims[at].least));
    let rest = fill(&mut pool, |at| ((open(at) - least[at]).max(0.0), claims[at].weight));
    std::array::from_fn(|at| Given {
        all: first[at] + least[at] + rest[at],
        first: first[at],
        least: least[at],
    })
}

/// Pours `pool` into what `want` says (how much at most, and the weight) until it is empty or nobody wants more.
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
