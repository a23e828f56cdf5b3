//! The networks behind clients, at one shard of a server.
//!
//! In: ROUTE_ADVERTISEMENT capsules of clients, the networks that are in force. Out: SITES capsules, and
//! routes. Always holds: a client that takes SITES capsules has had one with the networks in force.

use std::{mem, sync::Arc};

use mpvpn_masque::{
    capsule::{Capsule, IpRange},
    h3,
};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::Instant;

use super::{
    Server,
    peer::{MAX_UNSENT_REPLIES, Peer},
    routes::Routes,
};
use crate::sites::announced_networks;

impl Server {
    /// A client announces the networks behind it (RFC 9484 §4.7.3).
    pub(super) fn on_announcement(&mut self, now: Instant, id: ConnectionHandle, ranges: &[IpRange]) {
        let Some(authenticated) = self.peers.get(id).and_then(|peer| peer.authenticated.as_ref()) else {
            return;
        };
        let Some(tunnel) = &authenticated.tunnel else { return };
        let (secret, user) = (tunnel.secret, authenticated.user.clone());
        let Some(connection) = self.endpoint.get(id) else { return };
        let paths: Vec<_> = connection.paths().collect();
        let links = paths.into_iter().filter_map(|path| Some(connection.remote_of(path)?.ip()));
        let links = links.map(|ip| ip.to_canonical()).collect();
        let (networks, allowed) = (announced_networks(ranges), self.config.auth.site_networks(&user));
        tracing::debug!(%user, ?networks, ?allowed, "a client announces networks behind it");
        // Else it gets the answer once they are in force.
        if !self.registry.announce(secret, &user, networks, (allowed, links)) {
            self.send_sites(now, id);
        }
    }

    /// Takes the networks behind clients that are in force now.
    pub fn update_sites(&mut self, now: Instant) {
        let before = mem::replace(&mut self.sites, self.registry.sites());
        self.update_routes(now);
        let after = Arc::clone(&self.sites);
        for id in self.peers.ids() {
            let Some(tunnel) = self.peers.get(id).and_then(Peer::tunnel) else { continue };
            let own = tunnel.addresses.filter(|_| after.own(&tunnel.secret) != before.own(&tunnel.secret));
            let sites = tunnel.takes_sites && !after.is_same_for(&tunnel.secret, &before);
            if sites || own.is_some() {
                self.isolated(id, |server| {
                    if let Some(addresses) = own {
                        server.send_assignment(id, addresses, &[]);
                    }
                    if sites {
                        server.send_sites(now, id);
                    }
                    server.drive(now, id);
                });
            }
        }
    }

    /// Sends the networks behind clients to one of them.
    pub(super) fn send_sites(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get(id) else { return };
        let Some((tunnel, stream)) = peer.tunnel().zip(peer.tunnel_stream()) else { return };
        let Some(connection) = self.endpoint.get(id).filter(|_| tunnel.takes_sites) else { return };
        if connection.unsent_replies() > MAX_UNSENT_REPLIES {
            return self.close_peer(now, id, h3::code::EXCESSIVE_LOAD, "the client takes no capsules");
        }
        let capsule = Capsule::Sites(self.sites.sites_for(&tunnel.secret));
        connection.write(stream, h3::encode_data(&capsule.to_bytes()));
    }

    /// The routes as settings and sites are now.
    pub(super) fn present_routes(&self) -> Routes {
        let sites = self.sites.networks().map(|(net, _)| net);
        let all: Vec<_> = self.config.routes.iter().copied().chain(sites).collect();
        Routes::new(&all, self.registry.server_addresses(), self.registry.networks())
    }
}
