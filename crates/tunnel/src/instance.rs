//! Which process of a client has a session.
//!
//! In: the random numbers of processes that show the secret of a session. Out: whether a process has the
//! session, takes it over, or has to leave it. Always holds: a process that comes back after another one has
//! taken its session over proves that two machines have the secret, as a process that was started again has
//! another number; then the one that came later has to leave. What is kept is bounded, and ends with the
//! session.

/// A random number that a client makes at its start and keeps in memory only.
pub type ClientInstance = [u8; 16];

/// Processes that are remembered for a session, in each list. More: memory of a client that makes numbers up;
/// fewer: of many machines with one secret some take the session over again and again.
const MAX_REMEMBERED: usize = 8;

/// The process that has a session, and others that showed its secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionHolder {
    now: Option<ClientInstance>,
    /// Those that had it before: they were ended, or another machine has taken it over.
    before: Vec<ClientInstance>,
    /// Those that came later and have to leave it.
    later: Vec<ClientInstance>,
}

/// The rights of a process that shows the secret of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// It has the session, or does not say which process it is.
    Holder,
    /// It takes the session over: the process before it was ended, as far as is known.
    New,
    /// It had the session before, and takes it back from a copy.
    Earlier,
    /// It is a copy.
    Later,
}

impl SessionHolder {
    pub(crate) fn new(instance: Option<ClientInstance>) -> Self {
        Self { now: instance, ..Self::default() }
    }

    /// The rights of a process that shows the secret.
    pub(crate) fn claim(&self, instance: Option<ClientInstance>) -> Claim {
        match instance {
            None => Claim::Holder,
            Some(_) if instance == self.now => Claim::Holder,
            Some(instance) if self.later.contains(&instance) => Claim::Later,
            Some(instance) if self.before.contains(&instance) => Claim::Earlier,
            Some(_) => Claim::New,
        }
    }

    /// A process takes the session over.
    pub(crate) fn take_over(&mut self, instance: Option<ClientInstance>) {
        let claim = self.claim(instance);
        let previous = std::mem::replace(&mut self.now, instance);
        self.before.retain(|other| Some(*other) != instance);
        let list = if claim == Claim::Earlier { &mut self.later } else { &mut self.before };
        list.extend(previous);
        if list.len() > MAX_REMEMBERED {
            list.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(number: u8) -> Option<ClientInstance> {
        Some([number; 16])
    }

    #[test]
    fn a_process_that_is_started_again_takes_over_and_one_that_comes_back_proves_a_copy() {
        let mut holder = SessionHolder::new(of(1));
        assert_eq!(
            (holder.claim(of(1)), holder.claim(None), holder.claim(of(2))),
            (Claim::Holder, Claim::Holder, Claim::New)
        );
        holder.take_over(of(2));
        holder.take_over(of(3));
        assert_eq!(
            (holder.claim(of(3)), holder.claim(of(2)), holder.claim(of(1))),
            (Claim::Holder, Claim::Earlier, Claim::Earlier)
        );
        holder.take_over(of(2));
        assert_eq!((holder.claim(of(2)), holder.claim(of(3))), (Claim::Holder, Claim::Later));
    }

    #[test]
    fn a_client_that_makes_numbers_up_takes_little_memory() {
        let mut holder = SessionHolder::new(of(0));
        for number in 1..=100 {
            holder.take_over(of(number));
            holder.take_over(of(number - 1));
        }
        assert!(holder.before.len() <= MAX_REMEMBERED && holder.later.len() <= MAX_REMEMBERED);
    }
}
