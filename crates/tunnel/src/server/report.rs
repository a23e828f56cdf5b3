//! Status reports of a server's connections, and final reports of closed ones.

use std::collections::BTreeMap;

use mpvpn_quic::{Connection, HandshakeCounters};
use mpvpn_types::{CongestionControl, Duration, Instant, SessionId, catch_panic};

use super::Server;
use crate::{AddressSet, ConnectionNumber, PathReport, ResequencingCounters, TrafficCounters, TrafficRates};

/// Status of one connection of a client.
#[derive(Clone, Debug)]
pub struct SessionReport {
    /// Its session; a session with several connections has a report for each. `None` for a client that uses
    /// relays only.
    pub session: Option<SessionId>,
    /// The number of this connection in its session.
    pub connection: ConnectionNumber,
    /// The name of its class; empty where the client has none.
    pub class: String,
    /// The congestion controller of this end; `None` without a path, or if no paths are reported.
    pub cc: Option<CongestionControl>,
    /// The user.
    pub user: String,
    /// Its addresses.
    pub addresses: AddressSet,
    /// When it connected.
    pub since: Instant,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// Current rates.
    pub rates: TrafficRates,
    /// Packets dropped in its queues.
    pub drops: u64,
    /// Time that packets wait in its queues (CoDel's sojourn time).
    pub sojourn: Duration,
    /// Bytes of packets that wait in its queues.
    pub queued_bytes: usize,
    /// Counters of numbered packets; `None` where the two ends negotiated no numbers.
    pub resequencing: Option<ResequencingCounters>,
    /// Its paths; none if they were not asked for.
    pub paths: Vec<PathReport>,
}

/// The final report of a closed connection.
#[derive(Clone, Debug)]
pub struct ClosedConnection {
    /// The user.
    pub user: String,
    /// The name of its class; empty where the client had none.
    pub class: String,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// Packets dropped in its queues.
    pub drops: u64,
    /// Counters of numbered packets; `None` where the two ends negotiated no numbers.
    pub resequencing: Option<ResequencingCounters>,
}

/// Counters of a server since the start, beside those of its connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Handshakes.
    pub handshakes: HandshakeCounters,
    /// Refused requests by HTTP status. Requests without valid credentials that got the site count as 401.
    pub refused: BTreeMap<u16, u64>,
}

impl Server {
    /// The counters of the server itself.
    pub fn counters(&self) -> ServerCounters {
        ServerCounters { handshakes: self.endpoint.handshakes(), refused: self.refused.clone() }
    }

    pub(super) fn count_refused(&mut self, status: u16) {
        *self.refused.entry(status).or_default() += 1;
    }

    /// The status of all connections.
    pub fn report(&mut self, now: Instant) -> Vec<SessionReport> {
        self.report_with_paths_of(now, |_| true)
    }

    /// The status of all connections. Those that `wants_paths` declines are reported without paths, which are
    /// the largest part of a report.
    pub fn report_with_paths_of(
        &mut self,
        now: Instant,
        wants_paths: impl Fn(&SessionReport) -> bool,
    ) -> Vec<SessionReport> {
        let (mut reports, mut panicked) = (Vec::new(), Vec::new());
        for (id, peer) in self.peers.iter_mut() {
            let Some(authenticated) = &peer.authenticated else { continue };
            let (tunnel, multipath) = (authenticated.tunnel.as_ref(), &authenticated.multipath);
            let Some(connection): Option<&mut Connection> = self.endpoint.get(id) else { continue };
            let mut report = SessionReport {
                session: tunnel.map(|tunnel| tunnel.session),
                connection: tunnel.map_or(ConnectionNumber::INITIAL, |tunnel| tunnel.number),
                class: authenticated.class_name(),
                user: authenticated.user.clone(),
                addresses: tunnel.and_then(|tunnel| tunnel.addresses).unwrap_or_default(),
                since: tunnel.map_or(peer.since, |tunnel| tunnel.since),
                counters: multipath.traffic.counters,
                rates: multipath.traffic.rates(now),
                drops: multipath.drops(),
                sojourn: multipath.scheduler.sojourn(),
                queued_bytes: multipath.scheduler.dispatcher.bytes(),
                resequencing: multipath.resequencing(),
                cc: None,
                paths: Vec::new(),
            };
            if wants_paths(&report) {
                match catch_panic(|| multipath.report(now, connection)) {
                    Ok(paths) => report.paths = paths,
                    Err(reason) => {
                        panicked.push((id, reason));
                        continue;
                    }
                }
                report.cc = report.paths.first().map(|path| path.view.cc);
            }
            reports.push(report);
        }
        panicked.into_iter().for_each(|(id, reason)| self.on_panic(id, reason));
        reports
    }

    /// The final report of the next closed connection, once each. Totals are the sum of these and
    /// [`Self::report`].
    pub fn poll_closed_connection(&mut self) -> Option<ClosedConnection> {
        self.closed.pop_front()
    }
}
