//! How many names a user may ask this server's own resolver for.
//!
//! In: queries, the time. Out: whether each may pass. Always holds: a user with many connections may ask as
//! much as one with one. Whatever is dropped here costs neither a packet in the kernel nor a task of the
//! resolver, which has one socket for all users: who floods it fills the socket for all.

use mpvpn_types::Instant;

use super::users::UserNumber;

/// Queries of a user at once, and in each second. Fewer: a LAN of hundreds of hosts waits for names. More: a
/// user takes more of the processor by asking. Chosen.
const MAX_QUERIES: f64 = 1000.0;

#[derive(Debug, Default)]
pub(super) struct Queries {
    /// How many queries each user has left, and when that was true.
    left: Vec<Option<(f64, Instant)>>,
}

/// The queries of one user.
pub(in crate::server) struct UserQueries<'a>(&'a mut Option<(f64, Instant)>);

impl Queries {
    pub(super) fn of(&mut self, number: UserNumber) -> UserQueries<'_> {
        if self.left.len() <= number.0 {
            self.left.resize(number.0 + 1, None);
        }
        UserQueries(&mut self.left[number.0])
    }
}

impl UserQueries<'_> {
    /// Whether one more may pass; it counts then.
    pub(in crate::server) fn admit(&mut self, now: Instant) -> bool {
        let (before, at) = self.0.unwrap_or((MAX_QUERIES, now));
        let grown = now.saturating_duration_since(at).as_secs_f64() * MAX_QUERIES;
        let left = (before + grown).min(MAX_QUERIES);
        let passes = left >= 1.0;
        *self.0 = Some((if passes { left - 1.0 } else { left }, now.max(at)));
        passes
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    #[test]
    fn a_user_who_floods_gets_a_thousand_queries_a_second_and_others_get_all_of_theirs() {
        let (mut queries, start) = (Queries::default(), Instant::now());
        let [flood, other] = [0, 1].map(UserNumber);
        let mut passed = 0;
        for number in 0..100_000 {
            let now = start + Duration::from_micros(20) * number;
            passed += u32::from(queries.of(flood).admit(now));
            if number % 1000 == 0 {
                assert!(queries.of(other).admit(now));
            }
        }
        // In two seconds, and at once in the beginning.
        assert!((2990..=3010).contains(&passed), "{passed}");
    }
}
