//! The largest MTU of the clients of a shard.
//!
//! In: the MTU of each client, as it changes. Out: the largest, when it changes. The MTU of the server's TUN
//! follows it.

use std::collections::BTreeMap;

/// The number of clients with each MTU (bytes).
#[derive(Debug, Default)]
pub(super) struct ClientMtus {
    clients: BTreeMap<usize, u32>,
    largest: Option<usize>,
}

impl ClientMtus {
    /// Counts a client with its MTU `after` instead of `before`. Returns the largest MTU if it has changed;
    /// that is `None` if no client is left.
    pub(super) fn count(&mut self, before: Option<usize>, after: Option<usize>) -> Option<Option<usize>> {
        if before == after {
            return None;
        }
        if let Some(count) = before.and_then(|before| self.clients.get_mut(&before)) {
            *count -= 1;
        }
        self.clients.retain(|_, count| *count > 0);
        if let Some(after) = after {
            *self.clients.entry(after).or_default() += 1;
        }
        let largest = self.clients.last_key_value().map(|(mtu, _)| *mtu);
        (std::mem::replace(&mut self.largest, largest) != largest).then_some(largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_lasts_as_long_as_a_client_that_takes_it() {
        let mut mtus = ClientMtus::default();
        let steps = [
            (None, Some(1400), Some(Some(1400))),
            (None, Some(1400), None),
            (None, Some(1300), None),
            (Some(1400), Some(1200), None),
            (Some(1400), None, Some(Some(1300))),
            (Some(1300), Some(1300), None),
            (Some(1300), None, Some(Some(1200))),
            (Some(1200), None, Some(None)),
        ];
        for (before, after, changed) in steps {
            assert_eq!(mtus.count(before, after), changed, "{before:?} {after:?}");
        }
    }
}
