//! The users of connections, by number.
//!
//! In: connections that come and go, with the names of their users. Out: a small number for each user. Always
//! holds: connections without a user are those of one user; a number is free when the last connection of its
//! user has gone.

use std::collections::BTreeMap;

/// A user, while it has connections; 0: connections without a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserNumber(pub(super) usize);

#[derive(Debug, Default)]
struct User {
    name: Option<String>,
    connections: usize,
}

#[derive(Debug)]
pub(super) struct Users {
    all: Vec<User>,
    numbers: BTreeMap<String, UserNumber>,
    free: Vec<UserNumber>,
}

impl Default for Users {
    fn default() -> Self {
        Self { all: vec![User::default()], numbers: BTreeMap::new(), free: Vec::new() }
    }
}

impl Users {
    /// Adds a connection of this user.
    pub(super) fn enter(&mut self, name: Option<&str>) -> UserNumber {
        let number = match name {
            None => UserNumber(0),
            Some(name) => match self.numbers.get(name) {
                Some(number) => *number,
                None => self.add(name),
            },
        };
        self.all[number.0].connections += 1;
        number
    }

    fn add(&mut self, name: &str) -> UserNumber {
        let number = self.free.pop().unwrap_or_else(|| {
            self.all.push(User::default());
            UserNumber(self.all.len() - 1)
        });
        self.all[number.0].name = Some(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// Removes a connection of this user.
    pub(super) fn leave(&mut self, number: UserNumber) {
        let user = &mut self.all[number.0];
        user.connections -= 1;
        if user.connections == 0
            && let Some(name) = user.name.take()
        {
            self.numbers.remove(&name);
            self.free.push(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_forgotten_with_its_last_connection() {
        let mut users = Users::default();
        let numbers = ["one", "many", "many"].map(|name| users.enter(Some(name)));
        assert_eq!(numbers[1], numbers[2]);
        numbers[..2].iter().for_each(|number| users.leave(*number));
        assert_eq!(users.numbers.keys().collect::<Vec<_>>(), ["many"]);
        users.leave(numbers[2]);
        let again = ["one", "two"].map(|name| users.enter(Some(name)));
        assert_eq!((again.map(|number| number.0), users.all.len()), ([2, 1], 3), "numbers are used again");
    }
}
