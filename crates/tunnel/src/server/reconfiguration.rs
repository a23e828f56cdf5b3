//! Settings of a server that change while it runs.
//!
//! In: the new settings. Out: what connected clients have to be told. Always holds: no connection is closed;
//! routes and limits count for running sessions, too, and resolvers for sessions that begin later, as their
//! header field comes with the response.

use std::net::IpAddr;

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::h3;
use mpvpn_types::Instant;

use super::{Server, peer::Peer};

/// Settings that may change while a server runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconfiguration {
    /// See [`super::ServerConfig::routes`].
    pub routes: Vec<IpNet>,
    /// See [`super::ServerConfig::dns`].
    pub dns: Vec<IpAddr>,
    /// See [`super::ServerConfig::hide_wrong_credentials`].
    pub hide_wrong_credentials: bool,
}

impl Server {
    /// Changes the settings, and applies the limits of users as [`super::Authenticate::limits`] has them now.
    pub fn reconfigure(&mut self, now: Instant, new: &Reconfiguration) {
        self.config.dns.clone_from(&new.dns);
        self.config.hide_wrong_credentials = new.hide_wrong_credentials;
        self.config.routes.clone_from(&new.routes);
        self.update_routes(now);
        self.limit_shares(now);
    }

    /// Takes the routes as settings and networks behind clients are now.
    pub(super) fn update_routes(&mut self, now: Instant) {
        let routes = self.present_routes();
        if routes != self.routes {
            self.routes = routes;
            self.advertise_routes(now);
        }
    }

    /// Sends the routes to all clients (RFC 9484 §4.7.3: each ROUTE_ADVERTISEMENT replaces the one before).
    fn advertise_routes(&mut self, now: Instant) {
        let mut capsule = BytesMut::new();
        self.routes.capsule().encode(&mut capsule);
        let data = h3::encode_data(&capsule);
        for id in self.peers.ids() {
            let Some(stream) = self.peers.get(id).and_then(Peer::tunnel_stream) else { continue };
            let data = data.clone();
            self.isolated(id, |server| {
                if let Some(connection) = server.endpoint.get(id) {
                    connection.write(stream, data);
                }
                server.drive(now, id);
            });
        }
    }

    /// Limits the shares of all classes as the limits of their users say.
    fn limit_shares(&mut self, now: Instant) {
        for id in self.peers.ids() {
            let Some(authenticated) = self.peers.get(id).and_then(|peer| peer.authenticated.as_ref()) else {
                continue;
            };
            let Some(tunnel) = &authenticated.tunnel else { continue };
            let Some(class) = &tunnel.class else { continue };
            let share = self.config.auth.limits(&authenticated.user).bound(class.share);
            self.sessions.session(&tunnel.secret).shapers.set_share(now, tunnel.number.class(), share);
        }
    }
}
