//! What a server tells about its connections, those that are over included.

use mpvpn_quic::Connection;
use mpvpn_types::{CongestionControl, Duration, Instant, SessionId};

use super::Server;
use crate::{AddressSet, ConnectionNumber, PathReport, ResequencingCounters, TrafficCounters, TrafficRates};

/// Figures of one connection of a client for status output.
#[derive(Clone, Debug)]
pub struct SessionReport {
    /// The number of its session; one with several connections has a report for each, with the same number. `None`
    /// for a client that sends no packets, only relays.
    pub session: Option<SessionId>,
    /// Which of its connections this is.
    pub member: ConnectionNumber,
    /// The name of its class; empty where the client has none.
    pub class: String,
    /// The congestion controller that this end uses on its paths; `None` where there is no path.
    pub cc: Option<CongestionControl>,
    /// Whose it is.
    pub user: String,
    /// Its addresses.
    pub addresses: AddressSet,
    /// Since when it is connected.
    pub since: Instant,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// How much moves now.
    pub rates: TrafficRates,
    /// Packets dropped in its queues.
    pub drops: u64,
    /// How long packets wait in its queues.
    pub sojourn: Duration,
    /// What became of numbered packets; `None` where the two ends agreed on no numbers.
    pub resequencing: Option<ResequencingCounters>,
    /// Its paths.
    pub paths: Vec<PathReport>,
}

/// What a connection that is over has come to.
#[derive(Clone, Debug)]
pub struct ClosedConnection {
    /// The name of its class; empty where the client had none.
    pub class: String,
    /// Bytes of inner packets.
    pub counters: TrafficCounters,
    /// Packets dropped in its queues.
    pub drops: u64,
    /// What became of numbered packets; `None` where the two ends agreed on no numbers.
    pub resequencing: Option<ResequencingCounters>,
}

impl Server {
    /// Figures for status output.
    pub fn report(&mut self, now: Instant) -> Vec<SessionReport> {
        let mut reports = Vec::new();
        for (id, peer) in self.peers.iter_mut() {
            let Some(granted) = &peer.granted else { continue };
            let (tunnel, multipath) = (granted.tunnel.as_ref(), &granted.multipath);
            let Some(connection): Option<&mut Connection> = self.endpoint.get(id) else { continue };
            let paths = multipath.report(now, connection);
            reports.push(SessionReport {
                session: tunnel.map(|tunnel| tunnel.session),
                member: tunnel.map_or(ConnectionNumber::INITIAL, |tunnel| tunnel.member),
                class: granted.class_name(),
                user: granted.user.clone(),
                addresses: tunnel.and_then(|tunnel| tunnel.addresses).unwrap_or_default(),
                since: tunnel.map_or(peer.since, |tunnel| tunnel.since),
                counters: multipath.counters(),
                rates: multipath.rates(now),
                drops: multipath.drops(),
                sojourn: multipath.sojourn(),
                resequencing: multipath.resequencing(),
                cc: paths.first().map(|path| path.view.cc),
                paths,
            });
        }
        reports
    }

    /// A connection that is over, told once each. [`Self::report`] tells of the others, so that both together count on
    /// whoever comes and goes.
    pub fn poll_closed_connection(&mut self) -> Option<ClosedConnection> {
        self.departed.pop_front()
    }
}
