//! Turns: users take turns, and the connections of a user take those of the user.
//!
//! In: connections for which there is something to do, with their users. Out: the connection whose turn it
//! is. Always holds: a user with many connections gets as many turns as one with one.

use std::collections::VecDeque;

use mpvpn_quic::ConnectionHandle;

use super::users::UserNumber;

#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The connections of each user for which there is something to do.
    queues: Vec<VecDeque<ConnectionHandle>>,
    /// Users with such connections, each once.
    order: VecDeque<UserNumber>,
}

impl Turns {
    /// Adds a connection for which there is something to do.
    pub(super) fn push(&mut self, number: UserNumber, id: ConnectionHandle) {
        if self.queues.len() <= number.0 {
            self.queues.resize_with(number.0 + 1, VecDeque::new);
        }
        let queue = &mut self.queues[number.0];
        if queue.is_empty() {
            self.order.push_back(number);
        }
        queue.push_back(id);
    }

    /// How many users have such connections.
    pub(super) fn users(&self) -> usize {
        self.order.len()
    }

    /// The connection whose turn it is, and its user.
    pub(super) fn next(&self) -> Option<(UserNumber, ConnectionHandle)> {
        let number = *self.order.front()?;
        Some((number, *self.queues[number.0].front()?))
    }

    /// Passes the turn of the user on; its next connection is as before.
    pub(super) fn pass_user(&mut self) {
        if !self.order.is_empty() {
            self.order.rotate_left(1);
        }
    }

    /// Passes the turn on; the connection gets another one.
    pub(super) fn pass(&mut self) {
        if let Some(number) = self.order.front() {
            self.queues[number.0].rotate_left(1);
            self.order.rotate_left(1);
        }
    }

    /// Takes the connection whose turn it is from the queue; its user keeps the turn.
    pub(super) fn skip(&mut self) -> Option<ConnectionHandle> {
        let number = *self.order.front()?;
        let queue = &mut self.queues[number.0];
        let id = queue.pop_front();
        if queue.is_empty() {
            self.order.pop_front();
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
