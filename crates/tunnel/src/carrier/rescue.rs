//! Bytes of streams that were on their way on a path that is dead, sent again at once as datagrams over another one.
//!
//! The library sends them again, too, but only when the path is closed, and three probe timeouts later; until then all
//! that follows them in their streams would wait.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    h3, varint,
};
use mpvpn_path::{Offer, first_of};
use mpvpn_quic::{Connection, Fate, Piece, StreamId, Tracked};
use mpvpn_types::{Duration, Instant, PathId};

use super::{Carrier, Role, progress::Progresses};

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
    /// What waits for a path, and the one that it is not to take.
    waiting: VecDeque<(Option<PathId>, Tracked)>,
    /// What the far end has rescued, for the streams here.
    arrived: Vec<Piece>,
    /// Where both ends tell each other how far streams have come.
    pub(super) progress: Option<Progresses>,
}

impl Rescue {
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a datagram of the far end, if it is for streams.
    pub(super) fn takes(&mut self, datagram: &Bytes) -> bool {
        if self.is_own(datagram) {
            // Malformed ones are dropped.
            self.arrived.extend(self.read(datagram.clone()));
            return true;
        }
        let progress = self.progress.as_mut().filter(|progress| progress.is_own(datagram));
        progress.is_some_and(|progress| {
            progress.take(datagram.clone());
            true
        })
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.progress.as_ref().is_some_and(Progresses::has_waiting)
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
    pub(super) fn send(&mut self, now: Instant, piece: &Piece, max: usize, not: Option<PathId>) {
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
            let data = Tracked { data: data.freeze(), born: now, tries: 0, copied: false, mark: None };
            self.waiting.push_back((not, data));
            if is_last {
                return;
            }
        }
    }
}

/// Lets the server know of a request of which it may have nothing: by an empty DATA frame.
pub(super) fn announce(connection: &mut Connection, stream: StreamId) {
    connection.announce(stream, h3::encode_data(&[]));
}

impl Carrier {
    /// The peer knows rescued bytes, in this context of the request stream.
    pub(crate) fn rescue_streams(&mut self, stream: u64, context: u64) {
        let prefix = datagram::prefix(stream, context);
        let (waiting, arrived) = (VecDeque::new(), Vec::new());
        self.rescue = Some(Box::new(Rescue { prefix, waiting, arrived, progress: None }));
    }

    /// Takes what became of datagrams on all paths, to send again what was lost.
    pub(super) fn collect(&mut self, now: Instant, connection: &mut Connection) {
        connection.drain_fates(|_, fate| match (fate, &mut self.sequencer) {
            (Fate::Lost(lost), _) if lost.mark.is_none() => self.keep(now, lost),
            (fate, Some(sequencer)) => sequencer.settle(now, fate),
            _ => {}
        });
        if let Some(sequencer) = &mut self.sequencer {
            sequencer.handle_timeout(now);
        }
    }

    /// Takes all that is on its way on a path that is dead, and on no other.
    pub(super) fn rescue_from(&mut self, now: Instant, connection: &mut Connection, id: PathId) {
        for datagram in connection.take_unacked(id).into_iter().filter(|datagram| !datagram.copied) {
            self.keep(now, datagram);
        }
        let pieces = connection.take_unsettled(now, id);
        let mut stuck = connection.may_hold_repeated(id);
        match (&mut self.rescue, connection.max_datagram()) {
            (Some(rescue), Some(max)) => {
                for piece in &pieces {
                    self.traffic.count_reinjected(piece.bytes.len() as u64);
                    rescue.send(now, piece, max, None);
                    if piece.at == 0 && self.role == Role::Client {
                        announce(connection, piece.stream);
                    }
                }
            }
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
                    tracing::info!(
                        class = self.class.as_deref(),
                        path = id.0,
                        "a dead path is closed: streams wait for what it holds"
                    );
                    connection.close_path(now, *id);
                }
            }
        }
    }

    fn keep(&mut self, now: Instant, lost: Tracked) {
        match (self.rescue.as_deref_mut(), &mut self.sequencer) {
            (Some(Rescue { progress: Some(progress), .. }), _) if progress.is_own(&lost.data) => {
                progress.lose(lost.data);
            }
            // Whatever happens to it, its stream waits for it.
            (Some(rescue), _) if rescue.is_own(&lost.data) => rescue.waiting.push_back((None, lost)),
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
        if let Some(progress) = &mut rescue.progress {
            moved |= progress.send(now, connection, offers);
        }
        while let Some((not, _)) = rescue.waiting.front() {
            let others = offers.iter().any(|offer| Some(offer.id) != *not);
            let may = |offer: &Offer| !(others && Some(offer.id) == *not);
            let Some(at) = first_of(offers, may) else { break };
            let Some((not, datagram)) = rescue.waiting.pop_front() else { break };
            if datagram.data.len() > max {
                // It outgrew the paths while it waited.
                if let Some(piece) = rescue.read(datagram.data).filter(|_| max > SMALLEST) {
                    rescue.send(now, &piece, max, not);
                }
                continue;
            }
            let offer = &mut offers[at];
            offer.take(connection.queue_tracked(offer.id, datagram));
            moved = true;
        }
        moved
    }

    /// Gives streams the bytes of theirs that the far end has rescued, and what it said about others.
    pub(crate) fn deliver_rescued(&mut self, now: Instant, connection: &mut Connection) {
        if let Some(rescue) = &mut self.rescue {
            for piece in rescue.arrived.drain(..) {
                connection.rescue(piece);
            }
            if let Some(progress) = &mut rescue.progress {
                progress.deliver(now, connection);
            }
        }
    }
}
