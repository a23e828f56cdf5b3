//! One multipath connection: the library's, behind gates that say which path sends next.

mod events;
mod fault;
mod grants;
mod passes;
mod path;
mod qlog;
mod readers;
mod receive;
mod reinjection;
mod send;
mod sending;
mod streams;
mod upkeep;

use std::{
    collections::VecDeque,
    net::SocketAddr,
    num::NonZeroU32,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use bytes::Bytes;
use mpvpn_types::{CongestionControl, Duration, Instant, PathId};
use noq_proto::{
    FourTuple, PathError, PathStatus, VarInt,
    coding::{Decodable, Encodable},
};

pub use self::{
    events::{Event, LostReason},
    reinjection::{DataAck, OverdueChunk},
    streams::{ReadStatus, StreamChunk},
};
use self::{
    fault::PanicGuard,
    passes::Passes,
    path::{Path, Paths},
    streams::Streams,
};
use crate::{
    ConnectionHandle, LocalAddress, PathStats, QlogSink,
    gate::{PathLabel, Shared, shared_of},
    qlog::ConnectionQlog,
    sent_datagrams::{Outcome, TrackedDatagram},
};

/// Datagrams that are taken from the library at a time.
const RECEIVE_BATCH: usize = 64;

/// What holds for the gates of all paths.
#[derive(Debug)]
struct GateDefaults {
    connection: ConnectionHandle,
    /// Always open: during the handshake.
    open: bool,
    /// The kind of controller that was asked for.
    cc: Option<CongestionControl>,
    /// Where events are recorded, if they are: not before the handshake is complete.
    qlog: Option<ConnectionQlog>,
}

impl GateDefaults {
    /// The handshake is complete.
    fn shut(&mut self) {
        self.open = false;
    }

    /// Tells a gate that the library has just made, for this path of the connection.
    fn apply(&self, gate: &Shared, path: PathId) {
        gate.begin(PathLabel { connection: self.connection, path }, self.open, self.cc);
        self.apply_qlog(gate);
    }

    /// Tells a gate whether it is always open.
    fn apply_open(&self, gate: &Shared) {
        gate.open.store(self.open, Relaxed);
    }
}

/// One multipath connection.
#[derive(Debug)]
pub struct Connection {
    inner: noq_proto::Connection,
    guard: PanicGuard,
    id: ConnectionHandle,
    /// Where packets of a path without a local address leave.
    home: Option<LocalAddress>,
    origin: Instant,
    paths: Paths,
    gates: GateDefaults,
    passes: Passes,
    streams: Streams,
    events: VecDeque<Event>,
    /// Nothing was sent since the handshake was complete here.
    handshake_unsent: bool,
    /// What the library tells of its buffer of datagrams while that is empty (bytes).
    buffer: usize,
    /// Where events are to be recorded once the handshake is complete, if anywhere.
    qlog: Option<Arc<dyn QlogSink>>,
}

impl Connection {
    pub(crate) fn new(
        now: Instant,
        id: ConnectionHandle,
        mut inner: noq_proto::Connection,
        home: Option<LocalAddress>,
        qlog: Option<Arc<dyn QlogSink>>,
    ) -> Self {
        let mut connection = Self {
            buffer: inner.datagrams().send_buffer_space(),
            inner,
            guard: PanicGuard::default(),
            id,
            home,
            origin: now,
            paths: Paths::new(),
            gates: GateDefaults { connection: id, open: true, cc: None, qlog: None },
            passes: Passes::new(),
            streams: Streams::default(),
            events: VecDeque::new(),
            handshake_unsent: false,
            qlog,
        };
        connection.adopt(now, PathId(0));
        connection
    }

    /// Its number at the endpoint.
    pub fn id(&self) -> ConnectionHandle {
        self.id
    }

    /// The place that the connection was started from.
    pub fn initial_local(&self) -> Option<LocalAddress> {
        self.home
    }

    /// Whether both ends can use several paths.
    pub fn is_multipath(&self) -> bool {
        self.inner.is_multipath_negotiated()
    }

    /// Whether the connection has ended or is ending.
    pub fn is_closed(&self) -> bool {
        self.guard.has_panicked() || self.inner.is_closed()
    }

    /// Lets controllers of this kind decide about all paths from now on, also those that come.
    pub fn set_cc(&mut self, cc: CongestionControl) {
        self.gates.cc = Some(cc);
        self.paths.iter().for_each(|path| path.gate.set_kind(cc));
    }

    /// Marks the packets of a path with this DSCP (0 to 63) from now on; 0 leaves them that of the socket.
    pub fn set_dscp(&mut self, id: PathId, dscp: u8) {
        if let Some(path) = self.paths.get_mut(id) {
            path.dscp = dscp;
        }
    }

    /// The mark of packets to this address. Paths of a connection that has marks have different ones there: the client's
    /// links have sockets of their own.
    fn dscp_towards(&self, remote: SocketAddr) -> u8 {
        let path = self.paths.iter().find(|path| path.dscp != 0 && path.activity.remote() == Some(remote));
        path.map_or(0, |path| path.dscp)
    }

    /// Takes the gate of a path that the library has made.
    fn adopt(&mut self, now: Instant, id: PathId) {
        if self.paths.get(id).is_some() {
            return;
        }
        let Some(gate) = self.inner.congestion_state(noq_proto::PathId::from(id.0)).and_then(shared_of)
        else {
            return;
        };
        self.gates.apply(&gate, id);
        self.gates.record_path(now, id, &self.inner);
        let allowed = self.paths.insert(Path::new(now, id, gate));
        if let Some(count) = allowed.and_then(NonZeroU32::new) {
            // Refused without multipath, where there are no more paths.
            let _ = self.inner.set_max_concurrent_paths(now, count);
        }
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self, now: Instant) -> Option<Event> {
        self.translate_all(now);
        self.events.pop_front()
    }

    /// Whether [`Self::poll_event`] has something that is known already.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Opens a path from `local` to `remote`; it can carry data after [`Event::PathOpened`].
    ///
    /// # Errors
    /// If the peer's limits do not allow it now; trying again a round trip later may succeed.
    pub fn open_path(
        &mut self,
        now: Instant,
        local: LocalAddress,
        remote: SocketAddr,
        status: PathStatus,
    ) -> Result<PathId, PathError> {
        let tuple = FourTuple::new(remote, Some(local.ip()));
        let id = number_of(self.inner.open_path(tuple, status, now)?);
        self.adopt(now, id);
        Ok(id)
    }

    /// Gives a path up; its number is never used again. The only path left stays.
    pub fn close_path(&mut self, now: Instant, id: PathId) {
        // Refused for the last path and for one that is gone already: both are fine.
        let _ = self.inner.close_path(now, noq_proto::PathId::from(id.0), VarInt::from_u32(0));
    }

    /// The paths that can carry data.
    pub fn paths(&self) -> impl Iterator<Item = PathId> + '_ {
        self.paths.iter().filter(|path| path.open).map(|path| path.id)
    }

    /// What is measured about a path.
    pub fn path_stats(&mut self, now: Instant, id: PathId) -> Option<PathStats> {
        let noq = noq_proto::PathId::from(id.0);
        let stats = self.inner.path_stats(noq)?;
        let tuple = self.inner.network_path(noq).ok()?;
        let observed = self.inner.path_observed_address(noq).ok().flatten();
        let second = now.saturating_duration_since(self.origin).as_secs();
        let head = self.paths.get(id).map_or(id, |path| path.head);
        let (home, together) = (self.home, self.paths.group(head).count().max(1) as u64);
        let path = self.paths.get_mut(id)?;
        let dead = path.gate.frozen.load(Relaxed);
        path.losses.update(second, (stats.sent_packets, stats.lost_packets), dead);
        path.gate.spare(path.losses.spared());
        Some(PathStats {
            id,
            local: tuple.local_ip().map(LocalAddress::from).or(home),
            remote: tuple.remote(),
            observed,
            rtt: stats.rtt,
            min_rtt: path.gate.min_rtt(),
            base_rtt: path.gate.base_rtt(),
            jitter: path.gate.jitter(),
            loss: path.losses.share(),
            recent_packets_sent: path.losses.packets_sent(),
            random_loss: path.gate.random_loss(),
            cc: path.gate.kind_in_use(),
            congestion_window: path.gate.window() / together,
            in_flight: path.gate.in_flight(),
            delivery_rate: path.rate() / together,
            link_rate: path.limits.link_rate(),
            mtu: stats.current_mtu,
            tx_bytes: stats.udp_tx.bytes,
            tx_packets: stats.udp_tx.datagrams,
            rx_bytes: stats.udp_rx.bytes,
            rx_packets: stats.udp_rx.datagrams,
            lost_packets: stats.lost_packets,
        })
    }

    /// Round-trip time of a path.
    pub fn rtt(&self, id: PathId) -> Option<Duration> {
        self.inner.rtt(noq_proto::PathId::from(id.0))
    }

    /// Where packets of a path leave.
    pub fn local_of(&self, id: PathId) -> Option<LocalAddress> {
        let tuple = self.inner.network_path(noq_proto::PathId::from(id.0)).ok()?;
        tuple.local_ip().map(LocalAddress::from).or(self.home)
    }

    /// The remote address of a path.
    pub fn remote_of(&self, id: PathId) -> Option<SocketAddr> {
        self.inner.network_path(noq_proto::PathId::from(id.0)).ok().map(|tuple| tuple.remote())
    }

    /// The largest payload of a datagram that every path can carry (bytes); `None` before the
    /// handshake, or if the peer takes no datagrams.
    pub fn max_datagram_size(&mut self) -> Option<usize> {
        self.inner.datagrams().max_size()
    }

    /// Calls `each` for every tracked datagram of which something was learned since the last call, with the path that it
    /// was sent on.
    pub fn drain_outcomes(&mut self, mut each: impl FnMut(PathId, Outcome)) {
        for path in self.paths.iter() {
            if let Some(mut ledger) = path.gate.fates().filter(|ledger| ledger.has_outcomes()) {
                ledger.drain_outcomes(|fate| each(path.id, fate));
            }
        }
    }

    /// Takes the tracked datagrams of a path that were neither acknowledged nor lost, because the path is
    /// dead: those that were sent first come first.
    pub fn take_unacked(&mut self, id: PathId) -> Vec<TrackedDatagram> {
        self.paths.get(id).and_then(|path| path.gate.fates()).map_or(Vec::new(), |mut all| all.take_unacked())
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.inner.poll_timeout().filter(|_| !self.guard.has_panicked())
    }

    /// When a path that is held back by its pacer may send again.
    pub fn pacer_timeout(&self, now: Instant) -> Option<Instant> {
        let waiting = self.paths.iter().map(|path| &path.limits).filter(|limits| limits.is_paced());
        waiting.map(|limits| limits.wake_at(now).unwrap_or(now)).min()
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.translate_all(now);
        // What ends the handshake has to leave first. Until it has, the library finds nothing in flight, takes that for a
        // peer that may not send any more, and panics as it would probe with keys that it has dropped.
        if self.handshake_unsent {
            return;
        }
        self.guarded(|inner| inner.handle_timeout(now));
        self.note_losses();
    }

    /// Closes the connection with an application error code.
    pub fn close(&mut self, now: Instant, code: u64, reason: &str) {
        let code = VarInt::from_u64(code).unwrap_or(VarInt::from_u32(0));
        self.record_close(now, reason);
        self.inner.close(now, code, Bytes::copy_from_slice(reason.as_bytes()));
    }

    /// Takes received datagrams, in the order of their arrival.
    pub fn receive_datagrams(&mut self, mut each: impl FnMut(Bytes)) {
        let mut received = [const { Bytes::new() }; RECEIVE_BATCH];
        loop {
            let count = self.inner.datagrams().recv_many(&mut received);
            for datagram in &mut received[..count] {
                each(std::mem::take(datagram));
            }
            if count < received.len() {
                return;
            }
        }
    }
}

/// A path's number on the wire, which the library shows only in its encoding.
fn number_of(id: noq_proto::PathId) -> PathId {
    let mut encoded = Vec::with_capacity(8);
    id.encode(&mut encoded);
    let value = VarInt::decode(&mut encoded.as_slice()).map_or(u64::MAX, VarInt::into_inner);
    PathId(u32::try_from(value).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_numbers_are_those_of_the_wire() {
        for id in [0, 1, 63, 64, 70_000, u32::MAX] {
            assert_eq!(number_of(noq_proto::PathId::from(id)), PathId(id));
        }
    }
}
