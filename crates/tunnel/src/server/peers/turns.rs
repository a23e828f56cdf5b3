//! Turns to send: users take turns, and the connections of a user take those of the user.
//!
//! In: connections that have something to send, with their users. Out: the connection whose turn it is.
//! Always holds: a user with many connections gets as many turns as one with one; connections without a user
//! are those of one user.

use std::collections::{BTreeMap, VecDeque};

use mpvpn_quic::ConnectionHandle;

/// A user, while it has connections; 0: connections without a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserNumber(usize);

#[derive(Debug, Default)]
struct User {
    name: Option<String>,
    connections: usize,
    /// Its connections with something to send.
    sending: VecDeque<ConnectionHandle>,
}

#[derive(Debug)]
pub(super) struct Turns {
    users: Vec<User>,
    numbers: BTreeMap<String, UserNumber>,
    free: Vec<UserNumber>,
    /// Users with something to send, each once.
    order: VecDeque<UserNumber>,
}

impl Default for Turns {
    fn default() -> Self {
        let users = vec![User::default()];
        Self { users, numbers: BTreeMap::new(), free: Vec::new(), order: VecDeque::new() }
    }
}

impl Turns {
    /// Adds a connection of this user.
    pub(super) fn enter(&mut self, name: Option<&str>) -> UserNumber {
        let number = match name {
            None => UserNumber(0),
            Some(name) => match self.numbers.get(name) {
                Some(number) => *number,
                None => self.add(name),
            },
        };
        self.users[number.0].connections += 1;
        number
    }

    fn add(&mut self, name: &str) -> UserNumber {
        let number = self.free.pop().unwrap_or_else(|| {
            self.users.push(User::default());
            UserNumber(self.users.len() - 1)
        });
        self.users[number.0].name = Some(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// Removes a connection of this user.
    pub(super) fn leave(&mut self, number: UserNumber) {
        self.users[number.0].connections -= 1;
        self.forget_if_gone(number);
    }

    /// Frees the number of a user without connections, once nothing waits under it.
    fn forget_if_gone(&mut self, number: UserNumber) {
        let user = &mut self.users[number.0];
        if user.connections == 0
            && user.sending.is_empty()
            && let Some(name) = user.name.take()
        {
            self.numbers.remove(&name);
            self.free.push(number);
        }
    }

    /// Adds a connection that has something to send.
    pub(super) fn push(&mut self, number: UserNumber, id: ConnectionHandle) {
        let sending = &mut self.users[number.0].sending;
        if sending.is_empty() {
            self.order.push_back(number);
        }
        sending.push_back(id);
    }

    /// The connection whose turn it is, and its user.
    pub(super) fn next(&self) -> Option<(UserNumber, ConnectionHandle)> {
        let number = *self.order.front()?;
        Some((number, *self.users[number.0].sending.front()?))
    }

    /// Passes the turn on; the connection gets another one.
    pub(super) fn pass(&mut self) {
        if let Some(number) = self.order.front() {
            self.users[number.0].sending.rotate_left(1);
            self.order.rotate_left(1);
        }
    }

    /// Takes the connection whose turn it is from the queue; its user keeps the turn.
    pub(super) fn skip(&mut self) -> Option<ConnectionHandle> {
        let number = *self.order.front()?;
        let sending = &mut self.users[number.0].sending;
        let id = sending.pop_front();
        if sending.is_empty() {
            self.order.pop_front();
            self.forget_if_gone(number);
        }
        id
    }

    /// Passes the turn on; the connection, which is returned, gets none until it is added again.
    pub(super) fn end(&mut self) -> Option<ConnectionHandle> {
        let number = *self.order.front()?;
        let id = self.skip();
        if self.order.front() == Some(&number) {
            self.order.rotate_left(1);
        }
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_forgotten_with_its_last_connection_once_nothing_waits_under_its_number() {
        let mut turns = Turns::default();
        let numbers = ["one", "many", "many"].map(|name| turns.enter(Some(name)));
        assert_eq!(numbers[1], numbers[2]);
        turns.push(numbers[1], ConnectionHandle(1));
        numbers.into_iter().for_each(|number| turns.leave(number));
        assert_eq!(turns.numbers.keys().collect::<Vec<_>>(), ["many"], "one of its connections is queued");
        assert_eq!(turns.skip(), Some(ConnectionHandle(1)));
        assert!(turns.numbers.is_empty());
        let again = ["one", "two"].map(|name| turns.enter(Some(name)));
        assert_eq!((again.map(|number| number.0), turns.users.len()), ([2, 1], 3), "numbers are used again");
    }
}
