//! The table of clients behind connections that this process makes to its own QUIC socket.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use mpvpn_quic::OwnSockets;

/// Maps the address of each local socket to the address of the client that it serves. Only this process
/// writes it, so nobody outside can claim another client's address.
#[derive(Clone, Debug, Default)]
pub struct LoopbackClients(Arc<Mutex<BTreeMap<SocketAddr, SocketAddr>>>);

/// An entry of the table; removed when dropped.
#[derive(Debug)]
pub struct ClientEntry {
    table: LoopbackClients,
    loopback_addr: SocketAddr,
}

impl LoopbackClients {
    /// Packets from `loopback_addr` belong to `client`.
    pub fn insert(&self, loopback_addr: SocketAddr, client: SocketAddr) -> ClientEntry {
        self.with_table(|all| all.insert(loopback_addr, client));
        ClientEntry { table: self.clone(), loopback_addr }
    }

    /// The client that sends from `address`: the entry of the table, or `address` itself.
    pub fn client_address(&self, address: SocketAddr) -> SocketAddr {
        self.client(address).unwrap_or(address)
    }

    fn client(&self, address: SocketAddr) -> Option<SocketAddr> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        self.with_table(|all| all.get(&address).copied())
    }

    fn with_table<T>(&self, work: impl FnOnce(&mut BTreeMap<SocketAddr, SocketAddr>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl OwnSockets for LoopbackClients {
    fn contains(&self, address: SocketAddr) -> bool {
        self.client(address).is_some()
    }
}

impl Drop for ClientEntry {
    fn drop(&mut self) {
        self.table.with_table(|all| all.remove(&self.loopback_addr));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_while_it_is_there_and_others_are_who_they_are() {
        let table = LoopbackClients::default();
        let [loopback_addr, client]: [SocketAddr; 2] =
            ["127.0.0.1:4000".parse().unwrap(), "198.51.100.1:5".parse().unwrap()];
        let entry = table.insert(loopback_addr, client);
        assert_eq!(table.client_address(loopback_addr), client);
        assert_eq!(table.client_address(client), client);
        assert_eq!(table.client_address("[::ffff:127.0.0.1]:4000".parse().unwrap()), client);
        assert!(table.contains(loopback_addr) && !table.contains(client));
        drop(entry);
        assert!(!table.contains(loopback_addr));
        assert_eq!(table.client_address(loopback_addr), loopback_addr);
    }
}
