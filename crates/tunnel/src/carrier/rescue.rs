//! Bytes of streams that were on their way on a path that is dead, sent again at once as datagrams over another one.
//!
//! The library sends them again, too, but only when the path is closed, and three probe timeouts later; until then all
//! that follows them in their streams would wait.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_path::{Offer, first_to_arrive};
use mpvpn_quic::{Connection, Piece, Tracked};
use mpvpn_types::{Duration, Instant, PathId};

use super::Carrier;

/// A path that is dead for this long is closed if streams wait for what only its end lets the library send again.
const CLOSE: Duration = Duration::from_millis(50);
/// The same if that is not known.
const CLOSE_ANYWAY: Duration = Duration::from_millis(400);
/// Bytes of a datagram beside prefix and data, at most: stream and offset.
const AROUND: usize = 16;

/// Paths that take no more than this are of no use (bytes).
const SMALLEST: usize = 256;

#[derive(Debug)]
pub(super) struct Rescue {
    prefix: DatagramPrefix,
    waiting: VecDeque<Tracked>,
    /// What the far end has rescued, for the streams here.
    arrived: Vec<Piece>,
}

impl Rescue {
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes a datagram of the far end; malformed ones are dropped.
    pub(super) fn take(&mut self, datagram: Bytes) {
        self.arrived.extend(self.read(datagram));
    }

    fn read(&self, mut datagram: Bytes) -> Option<Piece> {
        datagram.advance(self.prefix.as_ref().len());
        let mut number = || {
            let (value, len) = varint::decode(&datagram)?;
            datagram.advance(len);
            Some(value)
        };
        let (stream, at) = (number()?, number()?);
        Some(Piece { stream, at: at >> 1, bytes: datagram, ends: at & 1 == 1 })
    }

    /// Sends bytes as datagrams of at most `max` bytes.
    fn send(&mut self, now: Instant, piece: &Piece, max: usize) {
        let most = max.saturating_sub(self.prefix.as_ref().len() + AROUND).max(1);
        let mut at = 0;
        loop {
            let bytes = piece.bytes.slice(at..piece.bytes.len().min(at + most));
            let is_last = at + bytes.len() == piece.bytes.len();
            let mut data = BytesMut::with_capacity(self.prefix.as_ref().len() + AROUND + bytes.len());
            data.put_slice(self.prefix.as_ref());
            varint::encode(piece.stream, &mut data);
            varint::encode((piece.at + at as u64) << 1 | u64::from(piece.ends && is_last), &mut data);
            data.put_slice(&bytes);
            at += bytes.len();
            self.waiting.push_back(Tracked { data: data.freeze(), born: now, tries: 0, copied: false });
            if is_last {
                return;
            }
        }
    }
}

impl Carrier {
    /// The peer knows rescued bytes, in this context of the request stream.
    pub(crate) fn rescue_streams(&mut self, stream: u64, context: u64) {
        let prefix = datagram::prefix(stream, context);
        self.rescue = Some(Box::new(Rescue { prefix, waiting: VecDeque::new(), arrived: Vec::new() }));
    }

    /// Takes what was lost on all paths, to send it again.
    pub(super) fn collect(&mut self, now: Instant, connection: &mut Connection) {
        connection.drain_lost(|_, lost| self.keep(now, lost));
    }

    /// Takes all that is on its way on a path that is dead, and on no other.
    pub(super) fn rescue_from(&mut self, now: Instant, connection: &mut Connection, id: PathId) {
        for datagram in connection.take_unacked(id).into_iter().filter(|datagram| !datagram.copied) {
            self.keep(now, datagram);
        }
        let pieces = connection.take_unsettled(id);
        let mut stuck = connection.may_hold_repeated(id);
        match (&mut self.rescue, connection.max_datagram()) {
            (Some(rescue), Some(max)) => pieces.iter().for_each(|piece| rescue.send(now, piece, max)),
            _ => stuck |= !pieces.is_empty(),
        }
        let streams = connection.has_bulk();
        if let Some(path) = self.paths.get_mut(&id).filter(|_| streams) {
            path.close = Some(now + if stuck { CLOSE } else { CLOSE_ANYWAY });
        }
    }

    /// Closes paths that are dead while streams wait for what was sent there.
    pub(super) fn close_dead(&mut self, now: Instant, connection: &mut Connection) {
        let others = self.any_alive();
        for (id, path) in &mut self.paths {
            if path.close.is_some_and(|at| now >= at) {
                path.close = None;
                if others && !path.works() {
                    tracing::info!(path = id.0, "a dead path is closed: streams wait for what it holds");
                    connection.close_path(now, *id);
                }
            }
        }
    }

    fn keep(&mut self, now: Instant, lost: Tracked) {
        match (&mut self.rescue, &mut self.sequencer) {
            // Whatever happens to it, its stream waits for it.
            (Some(rescue), _) if rescue.is_own(&lost.data) => rescue.waiting.push_back(lost),
            (_, Some(sequencer)) => sequencer.keep(now, lost),
            _ => {}
        }
    }

    /// Sends rescued bytes on the paths where they arrive first. Returns whether there were any.
    pub(super) fn send_rescued(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        max: usize,
        offers: &mut [Offer],
    ) -> bool {
        let Some(rescue) = &mut self.rescue else { return false };
        let mut moved = false;
        while let Some(at) = first_to_arrive(offers) {
            let Some(datagram) = rescue.waiting.pop_front() else { break };
            if datagram.data.len() > max {
                // It outgrew the paths while it waited.
                if let Some(piece) = rescue.read(datagram.data).filter(|_| max > SMALLEST) {
                    rescue.send(now, &piece, max);
                }
                continue;
            }
            let offer = &mut offers[at];
            offer.take(connection.queue_tracked(offer.id, datagram));
            moved = true;
        }
        moved
    }

    /// Gives streams the bytes of theirs that the far end has rescued.
    pub(crate) fn deliver_rescued(&mut self, connection: &mut Connection) {
        if let Some(rescue) = &mut self.rescue {
            for piece in rescue.arrived.drain(..) {
                connection.rescue(piece);
            }
        }
    }
}
