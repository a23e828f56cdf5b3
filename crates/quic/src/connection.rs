//! One multipath connection: noq's, with gates that decide which path sends next.

mod arrivals;
mod events;
pub(crate) mod fault;
mod lone_packet;
mod passes;
mod path;
mod qlog;
mod quotas;
mod readers;
mod receive;
mod reinjection;
mod send;
mod sending;
mod streams;
mod unread;
mod upkeep;

use std::{
    cmp::Reverse,
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

pub(crate) use self::path::Origin;
use self::{
    arrivals::Arrivals,
    fault::PanicGuard,
    lone_packet::LonePacket,
    passes::Passes,
    path::{Path, Paths},
    streams::Streams,
};
pub use self::{
    events::{Event, LostReason},
    reinjection::{DataAck, OverdueChunk},
    streams::{ReadStatus, StreamChunk},
};
use crate::{
    ConnectionHandle, LocalAddress, PathStats, QlogSink, ReceivedPackets,
    config::{OwnSockets, StreamLimits},
    gate::{GateState, PathLabel, gate_state_of},
    held::{CountedConnection, HeldBytes},
    qlog::ConnectionQlog,
    sent_datagrams::{Outcome, TrackedDatagram},
    strangers::StrangerId,
};

/// Received datagrams that are taken from noq at a time. Fewer: more calls; more: memory of each connection.
const RECEIVE_BATCH: usize = 12;

/// A timer that expires begins none that expires sooner than this (RFC 9002 §6.1.2).
const TIMER_GRANULARITY: Duration = Duration::from_millis(1);

/// The state that all gates of the connection share.
#[derive(Debug)]
struct GateDefaults {
    connection: ConnectionHandle,
    /// Whether gates are open without credit, as during the handshake.
    open: bool,
    /// The congestion controller, if it is not the configured one.
    cc: Option<CongestionControl>,
    /// The sink of qlog events, if they are recorded; not before the handshake is complete.
    qlog: Option<ConnectionQlog>,
}

impl GateDefaults {
    /// The handshake is complete.
    fn end_handshake(&mut self) {
        self.open = false;
    }

    /// Initialises a gate that noq has just created for this path.
    fn apply(&self, gate: &GateState, path: PathId) {
        gate.begin(PathLabel { connection: self.connection, path }, self.open, self.cc);
        self.apply_qlog(gate);
    }

    /// Sets whether a gate is open without credit.
    fn apply_open(&self, gate: &GateState) {
        gate.open.store(self.open, Relaxed);
    }
}

/// Values read from noq since it last changed. Each costs noq a walk over all paths, so it is read only once.
#[derive(Debug, Default)]
struct CachedReads {
    /// The MTU of all paths (bytes).
    mtu: Option<u16>,
    /// The largest payload of a datagram (bytes), if the peer takes datagrams.
    max_datagram: Option<Option<usize>>,
    /// It has no more events.
    has_no_events: bool,
}

/// One multipath connection.
#[derive(Debug)]
pub struct Connection {
    inner: noq_proto::Connection,
    guard: PanicGuard,
    id: ConnectionHandle,
    /// The local end of paths for which noq knows no local address.
    initial_local: Option<LocalAddress>,
    origin: Instant,
    paths: Paths,
    gates: GateDefaults,
    passes: Passes,
    cached: CachedReads,
    streams: Streams,
    events: VecDeque<Event>,
    arrivals: Arrivals,
    /// Empty places for received datagrams.
    batch: Vec<Bytes>,
    lone_packet: LonePacket,
    /// When the first of the packets arrived that were taken since this connection was asked for packets to
    /// send.
    taken_since: Option<Instant>,
    /// Whether nothing was sent since the handshake is complete at this end.
    handshake_unsent: bool,
    /// The free space of noq's datagram buffer while it is empty (bytes).
    empty_datagram_buffer: usize,
    /// The sink of qlog events, until the handshake is complete.
    qlog: Option<Arc<dyn QlogSink>>,
    /// The sockets of this process, at a server.
    pub(crate) own_sockets: Option<Arc<dyn OwnSockets>>,
    /// The peer's limits once it is authenticated, if they are lower until then.
    limits_when_trusted: Option<StreamLimits>,
    /// Its entry among the strangers, until the endpoint removes it.
    stranger: Option<StrangerId>,
    /// Memory beside the queues of streams; see [`Self::count_held`].
    held: HeldBytes,
    counted: Option<CountedConnection>,
}

impl Connection {
    pub(crate) fn new(
        now: Instant,
        id: ConnectionHandle,
        mut inner: noq_proto::Connection,
        initial_local: Option<LocalAddress>,
        qlog: Option<Arc<dyn QlogSink>>,
    ) -> Self {
        let mut connection = Self {
            empty_datagram_buffer: inner.datagrams().send_buffer_space(),
            inner,
            guard: PanicGuard::default(),
            id,
            initial_local,
            origin: now,
            paths: Paths::new(),
            gates: GateDefaults { connection: id, open: true, cc: None, qlog: None },
            passes: Passes::new(),
            cached: CachedReads::default(),
            streams: Streams::default(),
            events: VecDeque::new(),
            arrivals: Arrivals::default(),
            batch: Vec::new(),
            lone_packet: LonePacket::default(),
            taken_since: None,
            handshake_unsent: false,
            qlog,
            own_sockets: None,
            limits_when_trusted: None,
            stranger: None,
            held: HeldBytes::default(),
            counted: None,
        };
        connection.add_path(now, PathId(0));
        connection
    }

    /// Its peer is a stranger until [`Self::trust`], and has these limits from then on.
    pub(crate) fn set_stranger(&mut self, id: StrangerId, limits_when_trusted: StreamLimits) {
        (self.stranger, self.limits_when_trusted) = (Some(id), Some(limits_when_trusted));
    }

    /// Its entry among the strangers, once, when its peer is none any more or the connection has ended.
    pub(crate) fn take_stranger(&mut self, ended: bool) -> Option<StrangerId> {
        self.stranger.take_if(|_| ended || self.limits_when_trusted.is_none())
    }

    /// The peer has shown who it is: allows it the streams and the window of a user. The frames that say so
    /// leave with what is written next, so they arrive together with the answer to the peer's first
    /// request.
    pub fn trust(&mut self) {
        let Some(StreamLimits { requests, window, send_window }) = self.limits_when_trusted.take() else {
            return;
        };
        self.guarded(|inner| {
            inner.set_max_concurrent_streams(noq_proto::Dir::Bi, VarInt::from_u32(requests));
            inner.set_receive_window(VarInt::from_u32(window));
            inner.set_send_window(send_window);
        });
        self.set_receive_window(window);
    }

    /// The window of flow control that the peer has (bytes); out-of-order data takes a part of it.
    pub(crate) fn set_receive_window(&mut self, bytes: u32) {
        self.streams.receive.set_window(bytes);
    }

    /// Whether multipath was negotiated.
    pub fn is_multipath(&self) -> bool {
        self.ask(noq_proto::Connection::is_multipath_negotiated).unwrap_or(false)
    }

    /// Whether the connection has ended or is ending.
    pub fn is_closed(&self) -> bool {
        self.ask(noq_proto::Connection::is_closed).unwrap_or(true)
    }

    /// Sets the congestion controller of all paths, including future ones.
    pub fn set_cc(&mut self, cc: CongestionControl) {
        self.gates.cc = Some(cc);
        self.paths.iter().for_each(|path| path.gate.set_kind(cc));
    }

    /// Sets the DSCP (0 to 63) of a path's packets; 0 leaves the socket's.
    pub fn set_dscp(&mut self, id: PathId, dscp: u8) {
        if let Some(path) = self.paths.get_mut(id) {
            path.dscp = dscp;
        }
    }

    /// The DSCP of packets to this address. The paths of a connection with DSCPs have different remote
    /// addresses.
    fn dscp_towards(&self, remote: SocketAddr) -> u8 {
        let path = self.paths.iter().find(|path| path.dscp != 0 && path.activity.remote == Some(remote));
        path.map_or(0, |path| path.dscp)
    }

    /// noq may have more to send, events, and another MTU.
    fn note_change(&mut self) {
        self.cached = CachedReads::default();
        self.passes.note_change();
    }

    /// The largest UDP payload that every path can carry (bytes).
    fn mtu(&mut self) -> u16 {
        let Self { cached, inner, .. } = self;
        *cached.mtu.get_or_insert_with(|| inner.current_mtu())
    }

    /// Adds a path that noq has created, with its gate.
    fn add_path(&mut self, now: Instant, id: PathId) {
        if self.paths.get(id).is_some() {
            return;
        }
        let gate =
            self.ask(|inner| inner.congestion_state(noq_proto::PathId::from(id.0)).and_then(gate_state_of));
        let Some(gate) = gate.flatten() else { return };
        self.gates.apply(&gate, id);
        let _ = self.ask(|inner| self.gates.record_path(now, id, inner));
        let allowed = self.paths.insert(Path::new(now, id, gate));
        if let Some(count) = allowed.and_then(NonZeroU32::new) {
            // noq refuses this without multipath, where there is one path.
            self.guarded(|inner| inner.set_max_concurrent_paths(now, count).ok());
        }
    }

    /// The next event.
    pub fn poll_event(&mut self, now: Instant) -> Option<Event> {
        self.translate_all(now);
        self.guard.report(&mut self.events);
        self.events.pop_front()
    }

    /// Whether [`Self::poll_event`] returns an event without asking noq.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty() || self.guard.is_unreported()
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
        let opened = self.guarded(|inner| inner.open_path(tuple, status, now));
        // A connection that is lost has no path IDs.
        let id = path_id_of(opened.unwrap_or(Err(PathError::MaxPathIdReached))?);
        self.add_path(now, id);
        Ok(id)
    }

    /// Abandons a path; its path ID is never used again. The last path stays.
    pub fn close_path(&mut self, now: Instant, id: PathId) {
        // noq refuses this for the last path and for an abandoned one, which is fine.
        self.guarded(|inner| inner.close_path(now, noq_proto::PathId::from(id.0), VarInt::from_u32(0)).ok());
    }

    /// The paths that can carry data.
    pub fn paths(&self) -> impl Iterator<Item = PathId> + '_ {
        self.paths.iter().filter(|path| path.open).map(|path| path.id)
    }

    /// The measurements of a path.
    pub fn path_stats(&mut self, now: Instant, id: PathId) -> Option<PathStats> {
        let noq = noq_proto::PathId::from(id.0);
        let (stats, tuple, observed) = self.guarded_read(|inner| {
            let observed = inner.path_observed_address(noq).ok().flatten();
            Some((inner.path_stats(noq)?, inner.network_path(noq).ok()?, observed))
        })??;
        let second = now.saturating_duration_since(self.origin).as_secs();
        let head = self.paths.get(id).map_or(id, |path| path.head);
        let (initial_local, together) = (self.initial_local, self.paths.group(head).count().max(1) as u64);
        let path = self.paths.get_mut(id)?;
        path.activity.is_stale |= path.activity.is_behind(stats.udp_rx.datagrams);
        let dead = path.gate.ignore_losses.load(Relaxed);
        path.losses.window.update(second, (stats.sent_packets, stats.lost_packets), dead);
        Some(PathStats {
            id,
            local: tuple.local_ip().map(LocalAddress::from).or(initial_local),
            remote: tuple.remote(),
            inside_tcp: path.gate.inside_tcp.load(Relaxed),
            observed,
            rtt: stats.rtt,
            min_rtt: path.gate.min_rtt(),
            base_rtt: path.gate.base_rtt(),
            jitter: path.gate.jitter(),
            loss: path.losses.window.share(),
            recent_packets_sent: path.losses.window.sent(),
            random_loss: path.gate.random_loss(),
            cc: path.gate.kind_in_use(),
            congestion_window: path.gate.window() / together,
            in_flight: path.gate.in_flight(),
            delivery_rate: path.rate() / together,
            link_rate: path.limits.link_rate(),
            link_rate_measured: path.limits.link_rate_measured(),
            backlog_time: path.limits.backlog_time(now),
            mtu: stats.current_mtu,
            tx_bytes: stats.udp_tx.bytes,
            tx_packets: stats.udp_tx.datagrams,
            rx_bytes: stats.udp_rx.bytes,
            rx_packets: stats.udp_rx.datagrams,
            lost_packets: stats.lost_packets,
        })
    }

    /// The smoothed round-trip time of a path.
    pub fn rtt(&self, id: PathId) -> Option<Duration> {
        self.ask(|inner| inner.rtt(noq_proto::PathId::from(id.0)))?
    }

    /// The local end of a path.
    pub fn local_of(&self, id: PathId) -> Option<LocalAddress> {
        let tuple = self.ask(|inner| inner.network_path(noq_proto::PathId::from(id.0)).ok())??;
        tuple.local_ip().map(LocalAddress::from).or(self.initial_local)
    }

    /// The remote address of a path.
    pub fn remote_of(&self, id: PathId) -> Option<SocketAddr> {
        self.ask(|inner| inner.network_path(noq_proto::PathId::from(id.0)).ok())?.map(|tuple| tuple.remote())
    }

    /// The largest payload of a datagram that every path can carry (bytes); `None` before the
    /// handshake, or if the peer takes no datagrams.
    pub fn max_datagram_size(&mut self) -> Option<usize> {
        if self.cached.max_datagram.is_none() {
            self.cached.max_datagram = self.guarded_read(|inner| inner.datagrams().max_size());
        }
        self.cached.max_datagram?
    }

    /// Calls `each` for every outcome of a tracked datagram since the last call, with the path on which it
    /// was sent.
    pub fn drain_outcomes(&mut self, mut each: impl FnMut(PathId, Outcome)) {
        for path in self.paths.iter() {
            if let Some(mut sent) = path.gate.tracked().filter(|sent| sent.has_outcomes()) {
                sent.drain_outcomes(|outcome| each(path.id, outcome));
            }
        }
    }

    /// Takes the tracked datagrams of a path without a known outcome, because the path is dead: the oldest
    /// first.
    pub fn take_unacked(&mut self, id: PathId) -> Vec<TrackedDatagram> {
        self.paths
            .get(id)
            .and_then(|path| path.gate.tracked())
            .map_or(Vec::new(), |mut all| all.take_unacked())
    }

    /// When [`Self::handle_timeout`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.ask(noq_proto::Connection::poll_timeout)?
    }

    /// When a path that its pacer holds back may send again.
    pub fn pacer_timeout(&self, now: Instant) -> Option<Instant> {
        let waiting = self.paths.iter().map(|path| &path.limits).filter(|limits| limits.paced);
        waiting.map(|limits| limits.wake_at(now).unwrap_or(now)).min()
    }

    /// Handles the timers that expired first, and within a millisecond of that. The others are still due.
    ///
    /// A probe timeout begins the next one, which counts from when the last packet left. To an end that comes
    /// a second late, five have expired by that, each with two probes. So the next one has to wait until
    /// the probes of the first have left.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.translate_all(now);
        // The last handshake packets have to leave first. Otherwise noq finds nothing in flight, takes the
        // peer for blocked by the anti-amplification limit, and panics when it probes with keys that
        // it has discarded.
        if self.handshake_unsent {
            return;
        }
        let Some(first) = self.poll_timeout() else { return };
        self.guarded(|inner| inner.handle_timeout(now.min(first + TIMER_GRANULARITY)));
        // Packets may be lost now.
        self.paths.iter_mut().for_each(|path| path.activity.is_stale = true);
        self.note_losses();
    }

    /// Closes the connection with an application error code. Of the paths that are not dead, that on which
    /// the peer was heard last carries the CONNECTION_CLOSE frame.
    pub fn close(&mut self, now: Instant, code: u64, reason: &str) {
        let code = VarInt::from_u64(code).unwrap_or(VarInt::from_u32(0));
        // noq takes the first path that is not abandoned.
        let rank =
            |path: &&Path| (!path.gate.ignore_losses.load(Relaxed), path.activity.latest, Reverse(path.id));
        let open = self.paths.iter().filter(|path| path.open);
        let best = open.max_by_key(rank).map(|path| path.id);
        let others: Vec<_> = self.paths().filter(|id| Some(*id) != best).collect();
        others.into_iter().for_each(|id| self.close_path(now, id));
        self.record_close(now, reason);
        self.guarded(|inner| inner.close(now, code, Bytes::copy_from_slice(reason.as_bytes())));
        // Nothing that waits will leave any more.
        self.streams.send = Default::default();
    }

    /// Decrypts packets that the endpoint has received for this connection.
    pub fn take(&mut self, ReceivedPackets { at, origin, event }: ReceivedPackets) {
        let is_known = self.paths.note_arrival(origin);
        self.lone_packet.on_packet(at);
        self.taken_since.get_or_insert(at);
        if let Some(before) = self.arrivals.on_packet(at) {
            let mut arrivals = std::mem::take(&mut self.arrivals);
            self.take_held(|datagram| arrivals.push(before, datagram));
            self.arrivals = arrivals;
        }
        // A packet of a known path leaves the MTU as it is, unless a controller is told another one.
        let reads = std::mem::take(&mut self.cached);
        self.guarded(|inner| inner.handle_event(event));
        let is_same = self.paths.iter().fold(is_known, |is_same, path| !path.gate.take_new_mtu() && is_same);
        if is_same && !self.gates.open {
            self.cached = CachedReads { has_no_events: false, ..reads };
        }
    }

    /// Calls `each` for the received datagrams, in order of arrival, each with the time when its packet
    /// arrived.
    pub fn receive_datagrams(&mut self, mut each: impl FnMut(Instant, Bytes)) {
        let Some(last) = self.arrivals.take_last() else { return };
        for (at, datagram) in self.arrivals.take_earlier() {
            each(at, datagram);
        }
        self.take_held(|datagram| each(last, datagram));
    }

    /// Takes the datagrams that noq holds.
    fn take_held(&mut self, mut each: impl FnMut(Bytes)) {
        let mut batch = std::mem::take(&mut self.batch);
        batch.resize(RECEIVE_BATCH, Bytes::new());
        while let Some(count) = self.guarded_read(|inner| inner.datagrams().recv_many(&mut batch)) {
            for datagram in &mut batch[..count] {
                self.streams.receive.unread.taken += datagram.len() as u64;
                each(std::mem::take(datagram));
            }
            if count < RECEIVE_BATCH {
                break;
            }
        }
        self.batch = batch;
    }
}

/// The path ID on the wire, which noq exposes only in its encoding.
fn path_id_of(id: noq_proto::PathId) -> PathId {
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
            assert_eq!(path_id_of(noq_proto::PathId::from(id)), PathId(id));
        }
    }
}
