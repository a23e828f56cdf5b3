//! Which names are known, and who waits for one.
//!
//! In: names that are wanted, and answers. Out: whether to ask, and who is to be told. Always holds: nobody asks for a
//! name that is being asked for; what was found counts for a short time only, because the system's resolver does not
//! tell for how long it would; the number of names is bounded.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use super::budget::Permit;

/// What was found counts for so long.
const FOUND: Duration = Duration::from_secs(30);
/// That nothing was found counts for so long.
const NOT_FOUND: Duration = Duration::from_secs(5);
/// Names that are remembered.
const REMEMBERED: usize = 4096;
/// Addresses of a name that are looked at.
const ADDRESSES: usize = 32;

/// Addresses in the order of the resolver, or why there is none.
pub(super) type Found = Result<Arc<[IpAddr]>, Arc<str>>;

/// The names of one shard. `W` is who waits.
pub(super) struct Names<W> {
    known: HashMap<Arc<str>, Known>,
    /// What is known, the oldest first.
    ages: VecDeque<(Arc<str>, Instant)>,
    asked: HashMap<Arc<str>, Asked<W>>,
}

struct Known {
    found: Found,
    until: Instant,
}

struct Asked<W> {
    waiting: BTreeSet<W>,
    /// The question counts for who caused it, until it is answered.
    _permit: Permit,
}

impl<W: Ord + Copy> Names<W> {
    pub(super) fn new() -> Self {
        Self { known: HashMap::new(), ages: VecDeque::new(), asked: HashMap::new() }
    }

    /// What is known of a name.
    pub(super) fn known(&self, now: Instant, name: &str) -> Option<Found> {
        self.known.get(name).filter(|known| now < known.until).map(|known| known.found.clone())
    }

    /// Lets `who` wait for a name that is being asked for; whether it is.
    pub(super) fn join(&mut self, name: &str, who: W) -> bool {
        self.asked.get_mut(name).is_some_and(|asked| asked.waiting.insert(who))
    }

    /// The name has been asked for, at the expense of `permit`; `who` waits for it.
    pub(super) fn asked(&mut self, name: &str, who: W, permit: Permit) {
        self.asked.insert(name.into(), Asked { waiting: BTreeSet::from([who]), _permit: permit });
    }

    /// `who` waits no longer. The answer is still of use to others.
    pub(super) fn leave(&mut self, name: &str, who: W) {
        if let Some(asked) = self.asked.get_mut(name) {
            asked.waiting.remove(&who);
        }
    }

    /// Takes an answer; who waits for it, and what they are to be told.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        name: &str,
        found: Result<Vec<IpAddr>, String>,
    ) -> (BTreeSet<W>, Found) {
        let found: Found = match found {
            Ok(list) => Ok(list.into_iter().take(ADDRESSES).collect()),
            Err(reason) => Err(reason.into()),
        };
        let until = now + if found.is_ok() { FOUND } else { NOT_FOUND };
        let key: Arc<str> = name.into();
        self.known.insert(key.clone(), Known { found: found.clone(), until });
        self.ages.push_back((key, until));
        while self.ages.len() > REMEMBERED {
            self.forget_oldest();
        }
        let waiting = self.asked.remove(name).map(|asked| asked.waiting).unwrap_or_default();
        (waiting, found)
    }

    fn forget_oldest(&mut self) {
        let Some((name, until)) = self.ages.pop_front() else { return };
        // It may have been found anew since.
        if self.known.get(&name).is_some_and(|known| known.until == until) {
            self.known.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::budget::Budget, *};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_name_is_asked_for_once_and_all_who_wait_are_told() {
        let (mut names, now) = (Names::new(), Instant::now());
        let budget = Budget::new(10, 10);
        assert!(!names.join("a", 1));
        names.asked("a", 1, budget.take("anna").unwrap());
        assert!(names.join("a", 2) && names.join("a", 3) && !names.join("b", 4));
        names.leave("a", 2);
        let (waiting, found) = names.answer(now, "a", Ok(vec![ip("192.0.2.1")]));
        assert_eq!(waiting, BTreeSet::from([1, 3]));
        assert_eq!(found.unwrap()[..], [ip("192.0.2.1")]);
        assert_eq!(budget.in_use(), 0, "the question is over");
        assert!(!names.join("a", 5), "nobody asks any more");
    }

    #[test]
    fn what_was_found_counts_for_a_while() {
        let (mut names, now) = (Names::<u8>::new(), Instant::now());
        drop(names.answer(now, "good", Ok(vec![ip("192.0.2.1")])));
        drop(names.answer(now, "bad", Err("no such name".into())));
        let at = |seconds| now + Duration::from_secs(seconds);
        assert!(names.known(at(29), "good").unwrap().is_ok());
        assert!(names.known(at(30), "good").is_none());
        assert_eq!(names.known(at(4), "bad").unwrap().unwrap_err().as_ref(), "no such name");
        assert!(names.known(at(5), "bad").is_none());
        assert!(names.known(now, "other").is_none());
        // An older answer that is forgotten takes nothing of a newer one along.
        drop(names.answer(at(31), "good", Ok(vec![])));
        names.forget_oldest();
        assert!(names.known(at(32), "good").is_some());
    }

    #[test]
    fn names_and_their_addresses_are_bounded() {
        let (mut names, now) = (Names::<u8>::new(), Instant::now());
        for n in 0..REMEMBERED + 10 {
            drop(names.answer(now, &n.to_string(), Ok(vec![ip("192.0.2.1"); 1000])));
        }
        assert_eq!((names.known.len(), names.ages.len()), (REMEMBERED, REMEMBERED));
        assert!(names.known(now, "9").is_none());
        assert_eq!(names.known(now, "10").unwrap().unwrap().len(), ADDRESSES);
    }
}
