//! Who is behind connections that come from this process itself.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

/// Clients that are served through sockets of this process to its own listener: the address of each such socket, and the
/// one that its client comes from. Only this process writes it, so nobody outside can say to be somebody else.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fronted(Arc<Mutex<BTreeMap<SocketAddr, SocketAddr>>>);

/// A client in the table, as long as this is there.
#[derive(Debug)]
pub(crate) struct Entry {
    table: Fronted,
    inner: SocketAddr,
}

impl Fronted {
    /// What comes from `inner` is of `client`.
    pub(crate) fn enter(&self, inner: SocketAddr, client: SocketAddr) -> Entry {
        self.with(|all| all.insert(inner, client));
        Entry { table: self.clone(), inner }
    }

    /// Who sends from `address`: a client in the table, or whoever has that address.
    pub(crate) fn client_of(&self, address: SocketAddr) -> SocketAddr {
        self.with(|all| all.get(&address).copied()).unwrap_or(address)
    }

    fn with<T>(&self, work: impl FnOnce(&mut BTreeMap<SocketAddr, SocketAddr>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.table.with(|all| all.remove(&self.inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_while_it_is_there_and_others_are_who_they_are() {
        let table = Fronted::default();
        let [inner, client]: [SocketAddr; 2] =
            ["127.0.0.1:4000".parse().unwrap(), "198.51.100.1:5".parse().unwrap()];
        let entry = table.enter(inner, client);
        assert_eq!(table.client_of(inner), client);
        assert_eq!(table.client_of(client), client);
        drop(entry);
        assert_eq!(table.client_of(inner), inner);
    }
}
