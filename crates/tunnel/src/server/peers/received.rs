//! Received packets that wait to be decrypted, and whose turn it is.
//!
//! Users take turns by the processor time that their packets take (deficit round robin, Shreedhar and
//! Varghese 1995): packets differ a hundredfold in what they cost, so a turn for each would give the
//! processor to whose packets cost most. In: connections with the sizes of their packets, the time that
//! turns took. Out: the connection whose turn it is. Always holds: of those who have packets waiting, each
//! user gets the same time; a user who has an equal share of [`MAX_WAITING`] waiting gets no more room, but
//! one datagram of each may always wait.

use mpvpn_quic::ConnectionHandle;
use mpvpn_types::Duration;

use super::{turns::Turns, users::UserNumber};

/// Bytes of UDP payloads that wait at most: as many as wait in the socket. Fewer: bursts are lost when the
/// processor is busy. More: memory, and older packets. Chosen.
const MAX_WAITING: usize = 8 << 20;
/// The time that a user gets before the next one is asked, and after which a connection takes no more
/// packets. Shorter: more changes between users. Longer: the others wait. Chosen: some packets' time.
pub(in crate::server) const TURN_TIME: Duration = Duration::from_micros(100);
/// The time that a user may have taken beyond its own at most, in turns, as when this process had no
/// processor during its turn.
const MAX_DEBT: i64 = 10;

#[derive(Debug, Default)]
struct Account {
    /// Bytes that wait.
    waiting: usize,
    /// The time that it still has (ns); negative: it took more.
    credit: i64,
}

#[derive(Debug, Default)]
pub(super) struct Received {
    turns: Turns,
    accounts: Vec<Account>,
}

const fn nanos(time: Duration) -> i64 {
    time.as_nanos() as i64
}

impl Received {
    fn account(&mut self, number: UserNumber) -> &mut Account {
        if self.accounts.len() <= number.0 {
            self.accounts.resize_with(number.0 + 1, Account::default);
        }
        &mut self.accounts[number.0]
    }

    /// Whether packets of this size may wait; they do then.
    pub(super) fn admit(&mut self, number: UserNumber, bytes: usize) -> bool {
        let share = MAX_WAITING / self.turns.users().max(1);
        let account = self.account(number);
        let has_room = account.waiting == 0 || account.waiting + bytes <= share;
        account.waiting += usize::from(has_room) * bytes;
        has_room
    }

    /// Packets of this size wait no more.
    pub(super) fn release(&mut self, number: UserNumber, bytes: usize) {
        self.account(number).waiting -= bytes;
    }

    /// Packets of this size belong to another user from now on.
    pub(super) fn transfer(&mut self, from: UserNumber, to: UserNumber, bytes: usize) {
        self.account(from).waiting -= bytes;
        self.account(to).waiting += bytes;
    }

    /// Adds a connection that received packets.
    pub(super) fn push(&mut self, number: UserNumber, id: ConnectionHandle) {
        self.turns.push(number, id);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.users() == 0
    }

    /// The connection whose turn it is, with its user.
    pub(super) fn next(&mut self) -> Option<(UserNumber, ConnectionHandle)> {
        loop {
            let (number, id) = self.turns.next()?;
            let account = self.account(number);
            if account.credit > 0 {
                return Some((number, id));
            }
            account.credit += nanos(TURN_TIME);
            self.turns.pass_user();
        }
    }

    /// The turn has ended, after so long; the connection gets none until it is added again.
    pub(super) fn end(&mut self, took: Duration) {
        let Some((number, _)) = self.turns.next() else { return };
        let account = self.account(number);
        let left = account.credit.saturating_sub(i64::try_from(took.as_nanos()).unwrap_or(i64::MAX));
        account.credit = left.max(-nanos(TURN_TIME) * MAX_DEBT);
        self.turns.skip();
    }

    /// The turn has ended, after so long; the connection gets another one.
    pub(super) fn pass(&mut self, took: Duration) {
        if let Some((number, id)) = self.turns.next() {
            // Added first, so that the user keeps its place while it has time.
            self.turns.push(number, id);
            self.end(took);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles what two users' connections receive without an end, for `turns` turns, each of which takes
    /// `costs` of its user; returns how long each was served.
    fn served(connections: [usize; 2], costs: [Duration; 2], turns: usize) -> [Duration; 2] {
        let (mut received, mut served) = (Received::default(), [Duration::ZERO; 2]);
        for (user, count) in connections.into_iter().enumerate() {
            (0..count).for_each(|number| received.push(UserNumber(user), ConnectionHandle(number)));
        }
        for _ in 0..turns {
            let (number, _) = received.next().expect("somebody");
            served[number.0] += costs[number.0];
            received.pass(costs[number.0]);
        }
        served
    }

    #[test]
    fn users_get_the_same_time_whatever_their_packets_cost_and_however_many_connections_they_have() {
        const MICROSECOND: Duration = Duration::from_micros(1);
        for (connections, costs) in
            [([1, 1], [10, 10]), ([1, 320], [10, 10]), ([1, 320], [10, 700]), ([50, 1], [300, 7])]
        {
            let times = served(connections, costs.map(|cost| MICROSECOND * cost), 100_000);
            let share = times[0].as_secs_f64() / (times[0] + times[1]).as_secs_f64();
            assert!((0.49..0.51).contains(&share), "{connections:?}, {costs:?}: {share}");
        }
    }

    #[test]
    fn a_turn_during_which_the_process_stood_still_delays_a_user_by_some_turns_only() {
        let mut received = Received::default();
        let [slow, other] = [0, 1].map(UserNumber);
        received.push(slow, ConnectionHandle(0));
        received.push(other, ConnectionHandle(1));
        assert_eq!(received.next(), Some((slow, ConnectionHandle(0))));
        received.pass(Duration::from_secs(5));
        let mut turns = 0;
        while received.next().is_some_and(|(number, _)| number == other) {
            received.pass(TURN_TIME);
            turns += 1;
        }
        assert_eq!(turns, MAX_DEBT + 1);
    }

    #[test]
    fn a_user_has_at_most_an_equal_share_of_what_waits() {
        const PACKET: usize = 1200;
        let mut received = Received::default();
        let users = [0, 1].map(UserNumber);
        let fill = |received: &mut Received, user| {
            let admitted = std::iter::from_fn(|| received.admit(user, PACKET).then_some(PACKET));
            admitted.sum::<usize>()
        };
        received.push(users[0], ConnectionHandle(0));
        assert_eq!(fill(&mut received, users[0]), MAX_WAITING / PACKET * PACKET, "alone");
        received.push(users[1], ConnectionHandle(1));
        let half = MAX_WAITING / 2 / PACKET * PACKET;
        assert_eq!(fill(&mut received, users[1]), half);
        received.release(users[0], half);
        assert_eq!(fill(&mut received, users[0]), 0, "it still has its share");
        received.transfer(users[1], users[0], half);
        assert_eq!(fill(&mut received, users[1]), half);
    }
}
