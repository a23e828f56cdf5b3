mod events;
mod fault;
mod grants;
mod kept;
mod readers;
mod streams;
mod upkeep;

use std::{
    collections::VecDeque,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use bytes::Bytes;
use mpvpn_path::Pacer;
use mpvpn_types::{BitRate, Duration, Instant, PathId};
use noq_proto::{
    FourTuple, PathError, PathStatus, VarInt,
    coding::{Decodable, Encodable},
};

use crate::{
    Cc, ConnectionId, Local, PathView, Transmit,
    cap::Cap,
    config::{FIRST_PATHS, MAX_PATHS},
    gate::{Shared, shared_of},
    ledger::{Fate, Tracked},
    view::LossWindow,
};
pub use events::{Event, LostReason};
pub use kept::{Overdue, Progress};
use streams::Streams;
pub use streams::{Piece, ReadEnd};

/// What a control pass may send on each path beyond acknowledgements, in packets.
const CONTROL_PACKETS: u64 = 4;
/// The kernel's limits of one segmented send: segments, and bytes with headers (udp(7)).
const MAX_SEGMENTS: usize = 64;
const MAX_BATCH: usize = 65_000;
/// A path on which nothing arrives for so long while something does on others is the last choice for
/// acknowledgements.
const SILENT: Duration = Duration::from_millis(30);
/// The same for what else may leave on any path: on one that carries data, something arrives far more often.
const QUIET: Duration = Duration::from_millis(8);
/// Paths that are allowed beyond those in use, so that one that is opened need not wait.
const SPARE_PATHS: u32 = 2;
/// A congestion controller is spared this multiple of the losses that there are at all times, as they come in bunches.
const SPARED: f64 = 1.25;
/// Datagrams that are taken from the library at a time.
const RECEIVE_BATCH: usize = 64;

#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    /// The first of the paths that carry as one with it; itself for most.
    pub(crate) head: PathId,
    pub(crate) gate: Arc<Shared>,
    /// That of the head counts for all.
    pub(crate) pacer: Pacer,
    pub(crate) cap: Option<Cap>,
    /// Its limit where it has no seat at the shaper of its link.
    pub(crate) limit: Option<BitRate>,
    /// The mark (DSCP) of its packets, 0 to 63.
    dscp: u8,
    /// Packets wait for it, whatever holds them back.
    pub(crate) wanted: bool,
    /// Waits for its cap, or for the shaper of its link, rather than for the path.
    pub(crate) capped: bool,
    /// Datagrams that the next data pass sends here.
    pub(crate) batch: Vec<Bytes>,
    /// Those of them that are followed, with their places.
    pub(crate) followed: Vec<(usize, Tracked)>,
    /// Bytes of bulk streams that are on their way here, with the time when they left.
    sent: VecDeque<(Instant, Piece)>,
    /// When bytes of streams may have been sent here that had been lost elsewhere, last.
    repeated: Option<Instant>,
    /// Bytes of bulk streams that the next data pass sends here, lost ones first.
    pub(crate) grant: u64,
    /// Those are only of streams whose owners have had more than there was room for since then.
    late: Option<Instant>,
    /// Size of all that with framing.
    pub(crate) batch_bytes: u64,
    /// Bytes that it takes before another path that carries as one with it has its turn.
    pub(crate) turn: u64,
    /// Waits for the pacer rather than for acknowledgements.
    pub(crate) paced: bool,
    seen: u64,
    /// Bytes of lost packets, when that was asked last.
    lost: u64,
    /// When it was found last that something had arrived here.
    heard: Option<Instant>,
    /// Where its packets went when it was looked at last.
    remote: Option<SocketAddr>,
    loss: LossWindow,
    /// What it loses is made good without being sent again.
    made_good: bool,
    open: bool,
    /// Since when the library sends no datagrams here although the gate lets it.
    mute: Option<Instant>,
    /// That was found since the path's status was set last.
    mute_now: bool,
    /// A datagram that leaves after everything else.
    report: Option<Bytes>,
    /// Datagrams that have left here, when that was asked last.
    left: u64,
    status: PathStatus,
}

impl Path {
    pub(crate) fn rate(&self) -> u64 {
        self.allowed(self.gate.delivery_rate())
    }

    /// Bytes/s that all classes together may send over its link, if that is known.
    fn link_rate(&self) -> Option<u64> {
        let seat = self.cap.as_ref().filter(|cap| cap.own().is_none())?.seat();
        Some(seat.shaper().capacity()?.bps() / 8)
    }

    /// What is left of a rate (bytes/s) under the cap.
    pub(crate) fn allowed(&self, rate: u64) -> u64 {
        self.cap.as_ref().and_then(Cap::bytes_per_second).map_or(rate, |most| rate.min(most))
    }

    /// Whether a data pass would send something here.
    fn has_work(&self) -> bool {
        !self.batch.is_empty() || self.grant > 0
    }

    /// Whether nothing had arrived here for so long when something did elsewhere, at `latest`.
    fn is_silent(&self, latest: Option<Instant>, time: Duration) -> bool {
        latest > self.heard.map(|heard| heard + time)
    }

    /// When pacer and cap let something pass again; `None` if they do now.
    fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.pacer.wake_at(now).max(self.cap.as_ref().and_then(|cap| cap.wake_at(now)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Idle,
    Data(usize),
    /// What the control pass would send on the first path, on those that are heard.
    Heard,
    Control,
    Report(usize),
}

/// One multipath connection.
#[derive(Debug)]
pub struct Connection {
    pub(crate) inner: noq_proto::Connection,
    id: ConnectionId,
    /// Where packets of a path without a local address leave.
    home: Option<Local>,
    origin: Instant,
    pub(crate) paths: Vec<Path>,
    events: VecDeque<Event>,
    streams: Streams,
    /// How many there may be.
    allowed_paths: u32,
    pass: Pass,
    /// The credit that a data pass began with (bytes).
    granted: u64,
    connected: bool,
    /// Nothing was sent since the handshake was complete here.
    untold: bool,
    /// The kind of controller that was asked for.
    cc: Option<Cc>,
    /// The library failed in it.
    broken: bool,
    /// What the library tells of its buffer of datagrams while that is empty (bytes).
    buffer: usize,
}

impl Connection {
    pub(crate) fn new(
        now: Instant,
        id: ConnectionId,
        mut inner: noq_proto::Connection,
        home: Option<Local>,
    ) -> Self {
        let mut connection = Self {
            buffer: inner.datagrams().send_buffer_space(),
            inner,
            id,
            home,
            origin: now,
            // Most clients have one link.
            paths: Vec::with_capacity(1),
            events: VecDeque::new(),
            streams: Streams::default(),
            allowed_paths: FIRST_PATHS,
            pass: Pass::Idle,
            granted: 0,
            connected: false,
            untold: false,
            cc: None,
            broken: false,
        };
        connection.adopt(now, PathId(0));
        connection
    }

    /// Its number at the endpoint.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// The place that the connection was started from.
    pub fn home(&self) -> Option<Local> {
        self.home
    }

    /// Whether both ends can use several paths.
    pub fn is_multipath(&self) -> bool {
        self.inner.is_multipath_negotiated()
    }

    /// Whether the connection has ended or is ending.
    pub fn is_closed(&self) -> bool {
        self.broken || self.inner.is_closed()
    }

    /// Lets controllers of this kind decide about all paths from now on, also those that come.
    pub fn set_cc(&mut self, cc: Cc) {
        self.cc = Some(cc);
        self.paths.iter().for_each(|path| path.gate.set_kind(cc));
    }

    /// Marks the packets of a path with this DSCP (0 to 63) from now on; 0 leaves them that of the socket.
    pub fn set_dscp(&mut self, id: PathId, dscp: u8) {
        if let Some(path) = self.path_mut(id) {
            path.dscp = dscp;
        }
    }

    /// The mark of packets to this address. Paths of a connection that has marks have different ones there: the client's
    /// links have sockets of their own.
    fn dscp_towards(&self, remote: SocketAddr) -> u8 {
        let path = self.paths.iter().find(|path| path.dscp != 0 && path.remote == Some(remote));
        path.map_or(0, |path| path.dscp)
    }

    /// Takes the gate of a path that the library has made.
    fn adopt(&mut self, now: Instant, id: PathId) {
        if self.paths.iter().any(|path| path.id == id) {
            return;
        }
        let Some(gate) = self.inner.congestion_state(noq_proto::PathId::from(id.0)).and_then(shared_of)
        else {
            return;
        };
        gate.begin(!self.connected, self.cc);
        self.paths.push(Path {
            id,
            head: id,
            gate,
            pacer: Pacer::new(now, 1200),
            cap: None,
            limit: None,
            dscp: 0,
            wanted: false,
            capped: false,
            batch: Vec::new(),
            followed: Vec::new(),
            sent: VecDeque::new(),
            repeated: None,
            grant: 0,
            late: None,
            batch_bytes: 0,
            turn: 0,
            paced: false,
            seen: 0,
            lost: 0,
            heard: None,
            remote: None,
            loss: LossWindow::default(),
            made_good: false,
            open: id == PathId(0),
            mute: None,
            mute_now: false,
            report: None,
            left: 0,
            status: PathStatus::Available,
        });
        self.paths.sort_by_key(|path| path.id);
        self.allow_more_paths(now);
    }

    /// Allows the peer and this end to open more paths when few more than those in use are allowed.
    fn allow_more_paths(&mut self, now: Instant) {
        if self.paths.len() as u32 + SPARE_PATHS <= self.allowed_paths || self.allowed_paths >= MAX_PATHS {
            return;
        }
        self.allowed_paths = (2 * self.allowed_paths).min(MAX_PATHS);
        if let Some(count) = NonZeroU32::new(self.allowed_paths) {
            // Refused without multipath, where there are no more paths.
            let _ = self.inner.set_max_concurrent_paths(now, count);
        }
    }

    pub(crate) fn path(&self, id: PathId) -> Option<&Path> {
        self.paths.iter().find(|path| path.id == id)
    }

    pub(crate) fn path_mut(&mut self, id: PathId) -> Option<&mut Path> {
        self.paths.iter_mut().find(|path| path.id == id)
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
        local: Local,
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
    pub fn view(&mut self, now: Instant, id: PathId) -> Option<PathView> {
        let noq = noq_proto::PathId::from(id.0);
        let stats = self.inner.path_stats(noq)?;
        let tuple = self.inner.network_path(noq).ok()?;
        let observed = self.inner.path_observed_address(noq).ok().flatten();
        let second = now.saturating_duration_since(self.origin).as_secs();
        let head = self.path(id).map_or(id, |path| path.head);
        let (home, together) = (self.home, self.together(head).count().max(1) as u64);
        let path = self.path_mut(id)?;
        let dead = path.gate.frozen.load(Relaxed);
        path.loss.update(second, (stats.sent_packets, stats.lost_packets), dead);
        path.gate.spare(if path.made_good { path.loss.floor() * SPARED } else { 0.0 });
        Some(PathView {
            id,
            local: tuple.local_ip().map(Local::from).or(home),
            remote: tuple.remote(),
            observed,
            rtt: stats.rtt,
            min_rtt: path.gate.min_rtt(),
            base_rtt: path.gate.base_rtt(),
            jitter: path.gate.jitter(),
            loss: path.loss.share(),
            recent: path.loss.sent(),
            random_loss: path.gate.random_loss(),
            cc: path.gate.kind_in_use(),
            window: path.gate.window() / together,
            in_flight: path.gate.in_flight(),
            rate: path.rate() / together,
            link_rate: path.link_rate(),
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
    pub fn local_of(&self, id: PathId) -> Option<Local> {
        let tuple = self.inner.network_path(noq_proto::PathId::from(id.0)).ok()?;
        tuple.local_ip().map(Local::from).or(self.home)
    }

    /// The largest payload of a datagram that every path can carry (bytes); `None` before the
    /// handshake, or if the peer takes no datagrams.
    pub fn max_datagram(&mut self) -> Option<usize> {
        self.inner.datagrams().max_size()
    }

    /// Calls `each` for every tracked datagram of which something was learned since the last call, with the path that it
    /// was sent on.
    pub fn drain_fates(&mut self, mut each: impl FnMut(PathId, Fate)) {
        for path in &self.paths {
            if let Some(mut ledger) = path.gate.fates().filter(|ledger| ledger.has_news()) {
                ledger.take_news(|fate| each(path.id, fate));
            }
        }
    }

    /// Takes the tracked datagrams of a path that were neither acknowledged nor lost, because the path is
    /// dead: those that were sent first come first.
    pub fn take_unacked(&mut self, id: PathId) -> Vec<Tracked> {
        self.path(id).and_then(|path| path.gate.fates()).map_or(Vec::new(), |mut all| all.take_unacked())
    }

    /// Whether datagrams that are queued now would be the next to leave.
    pub fn is_between_passes(&self) -> bool {
        self.pass == Pass::Idle
    }

    /// The next UDP payload to send, written to the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.translate_all(now);
        self.untold = false;
        loop {
            if self.pass == Pass::Idle {
                self.begin_pass(now);
            }
            let segments = self.max_segments();
            let Some(transmit) = self.guarded(|inner| inner.poll_transmit(now, segments, buf)) else {
                buf.clear();
                return None;
            };
            if let Some(transmit) = transmit {
                return Some(self.outgoing(&transmit));
            }
            match self.pass {
                Pass::Data(index) => {
                    if let Some((head, left)) =
                        self.paths.get(index).map(|path| (path.head, path.gate.take_credit()))
                    {
                        self.spend(head, self.granted.saturating_sub(left));
                        if self.prolongs_pass(now, index, left) {
                            continue;
                        }
                    }
                    self.look_whether_mute(now, index);
                    self.begin_pass(now);
                }
                Pass::Heard => self.begin_control(now, false),
                Pass::Control | Pass::Idle => {
                    for path in &self.paths {
                        path.gate.set_credit(0);
                    }
                    if !self.begin_report(0) {
                        return None;
                    }
                }
                Pass::Report(index) => {
                    if let Some(path) = self.paths.get(index) {
                        path.gate.set_credit(0);
                    }
                    self.look_whether_mute(now, index);
                    if !self.begin_report(index + 1) {
                        return None;
                    }
                }
            }
        }
    }

    /// The path whose datagrams are next. Acknowledgements, those for other paths too, ride along with the first,
    /// which should work and be quick.
    fn next_batch(&self) -> Option<usize> {
        let latest = self.heard_last();
        let waiting = self.paths.iter().enumerate().filter(|(_, path)| path.has_work());
        let rank = |path: &Path| (path.is_silent(latest, SILENT), path.gate.base_rtt());
        waiting.min_by_key(|(_, path)| rank(path)).map(|(index, _)| index)
    }

    /// When something arrived last, on any path.
    fn heard_last(&self) -> Option<Instant> {
        self.paths.iter().filter_map(|path| path.heard).max()
    }

    /// Starts the data pass of the next path that has datagrams, or the control pass.
    fn begin_pass(&mut self, now: Instant) {
        while let Some(index) = self.next_batch() {
            let path = &mut self.paths[index];
            let bytes = std::mem::take(&mut path.batch_bytes);
            let grant = std::mem::take(&mut path.grant);
            if let Some(mut ledger) = (!path.followed.is_empty()).then(|| path.gate.follow()) {
                let mut followed = path.followed.drain(..).peekable();
                for (at, data) in path.batch.iter().enumerate() {
                    let tracked = followed.next_if(|(place, _)| *place == at).map(|(_, tracked)| tracked);
                    ledger.queue(data.len(), tracked);
                }
            }
            let sent = match path.batch.is_empty() {
                true => Ok(0),
                false => self.inner.datagrams().send_many(&path.batch, false),
            };
            path.batch.clear();
            if sent.is_err()
                && let Some(mut ledger) = path.gate.fates()
            {
                ledger.lose_queued();
            }
            if let Err(error) = &sent {
                // They outgrew the path, if nothing worse has happened.
                tracing::debug!(%error, path = path.id.0, "datagrams were dropped");
            }
            if sent.is_ok() || grant > 0 {
                // Room for the acknowledgements that ride along.
                self.granted = bytes + 1500;
                path.gate.set_credit(self.granted);
                self.pass = Pass::Data(index);
                self.write_granted(now, index, grant);
                return;
            }
        }
        self.begin_control(now, true);
    }

    /// Starts the control pass. Credit for streams, and what else is for the whole connection, leaves on the first path
    /// that the library may take, and lost there it is missed until the path is closed: so those that are silent come
    /// last, where they may.
    fn begin_control(&mut self, now: Instant, heard_first: bool) {
        let credit = u64::from(self.inner.current_mtu()) * CONTROL_PACKETS;
        let latest = self.heard_last().filter(|_| heard_first);
        self.pass = Pass::Control;
        for path in &self.paths {
            let later = path.is_silent(latest, QUIET);
            path.gate.set_credit(if later { 0 } else { credit });
            if later {
                self.pass = Pass::Heard;
            }
        }
        self.note_repeats(now);
    }

    /// How many packets may leave as one batch: they are no larger than the first of them. Where that may be
    /// a mere PING the library does not look whether all that it repeats of a lost packet fits the second.
    fn max_segments(&self) -> NonZeroUsize {
        if !matches!(self.pass, Pass::Data(_)) {
            return NonZeroUsize::MIN;
        }
        let mtu = usize::from(self.inner.current_mtu()).max(1200);
        NonZeroUsize::new((MAX_BATCH / mtu).min(MAX_SEGMENTS)).unwrap_or(NonZeroUsize::MIN)
    }

    fn outgoing(&self, transmit: &noq_proto::Transmit) -> Transmit {
        Transmit {
            local: transmit.src_ip.map(Local::from).or(self.home),
            remote: transmit.destination,
            ecn: transmit.ecn.map(|ecn| ecn as u8),
            dscp: self.dscp_towards(transmit.destination),
            size: transmit.size,
            segment_size: transmit.segment_size,
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.inner.poll_timeout().filter(|_| !self.broken)
    }

    /// When a path that is held back by its pacer may send again.
    pub fn pacer_timeout(&self, now: Instant) -> Option<Instant> {
        let waiting = self.paths.iter().filter(|path| path.paced);
        waiting.map(|path| path.wake_at(now).unwrap_or(now)).min()
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.translate_all(now);
        // What ends the handshake has to leave first. Until it has, the library finds nothing in flight, takes that for a
        // peer that may not send any more, and panics as it would probe with keys that it has dropped.
        if self.untold {
            return;
        }
        self.guarded(|inner| inner.handle_timeout(now));
        self.note_losses();
    }

    /// Closes the connection with an application error code.
    pub fn close(&mut self, now: Instant, code: u64, reason: &str) {
        let code = VarInt::from_u64(code).unwrap_or(VarInt::from_u32(0));
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
