//! What is sent again, and when: packets that were lost, bytes of streams from a path that is dead, and bytes
//! that the far end waits for in vain.
//!
//! In: what became of datagrams, paths that died, reports of the far end. Out: datagrams that wait for a
//! path, in [`Sequencer`], [`Reinjection`] and [`DataAcks`]. Always holds: what both ends have not agreed on
//! is not sent.

use bytes::Bytes;
use mpvpn_masque::h3;
use mpvpn_quic::{Connection, Outcome, OverdueChunk, StreamId, TrackedDatagram};
use mpvpn_types::{Duration, Instant, PathId, target::REORDER};

use super::{
    Role, data_ack::DataAcks, groups::PathGroups, path_table::PathTable, reinjection::Reinjection,
    sequence::Sequencer,
};

/// The parts that know what was lost.
#[derive(Debug)]
pub(super) struct Recovery {
    role: Role,
    /// Where both ends know how to number packets.
    pub(super) sequencer: Option<Box<Sequencer>>,
    /// Where both ends can send bytes of streams as datagrams.
    pub(super) reinjection: Option<Box<Reinjection>>,
    /// Where both ends, knowing reinjection, report how far streams have come.
    pub(super) data_acks: Option<Box<DataAcks>>,
}

/// What came of [`Recovery::reinject_from`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reinjected {
    /// Datagrams that are sent again.
    pub(super) packets: usize,
    /// Bytes of streams that are sent again.
    pub(super) bytes: u64,
    /// The library has bytes on the path that it sends again only when the path is closed.
    pub(super) stuck: bool,
}

impl Recovery {
    pub(super) fn new(role: Role) -> Self {
        Self { role, sequencer: None, reinjection: None, data_acks: None }
    }

    /// Takes a datagram of the far end, if it is about streams.
    pub(super) fn take(&mut self, datagram: &Bytes) -> bool {
        if let Some(reinjection) = self.reinjection.as_mut().filter(|parts| parts.is_own(datagram)) {
            reinjection.take(datagram.clone());
            return true;
        }
        let acks = self.data_acks.as_mut().filter(|acks| acks.is_own(datagram));
        acks.map(|acks| acks.take(datagram.clone())).is_some()
    }

    /// Gives streams the bytes of theirs that the far end has reinjected, and what it reported about others.
    pub(super) fn deliver(&mut self, now: Instant, connection: &mut Connection) {
        if let Some(reinjection) = &mut self.reinjection {
            reinjection.drain_arrived().for_each(|piece| connection.receive_reinjected(piece));
        }
        if let Some(acks) = &mut self.data_acks {
            acks.drain_arrived().for_each(|progress| connection.on_data_ack(now, progress));
        }
    }

    /// Whether anything waits to be sent again, or repair or a report to be sent.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.sequencer.as_ref().is_some_and(|sequencer| sequencer.has_repairs())
            || self.reinjection.as_ref().is_some_and(|reinjection| reinjection.has_waiting())
            || self.data_acks.as_ref().is_some_and(|acks| acks.has_waiting())
    }

    /// Takes what became of datagrams on all paths, to send again what was lost.
    pub(super) fn collect(&mut self, now: Instant, connection: &mut Connection) {
        connection.drain_outcomes(|_, fate| match (fate, &mut self.sequencer) {
            (Outcome::Lost(lost), _) if lost.ack_token.is_none() => self.keep(now, lost),
            (fate, Some(sequencer)) => sequencer.settle(now, fate),
            _ => {}
        });
        if let Some(sequencer) = &mut self.sequencer {
            sequencer.handle_timeout(now);
        }
    }

    fn keep(&mut self, now: Instant, lost: TrackedDatagram) {
        if let Some(acks) = self.data_acks.as_mut().filter(|acks| acks.is_own(&lost.data)) {
            acks.push_lost(lost.data);
        } else if let Some(reinjection) = self.reinjection.as_mut().filter(|parts| parts.is_own(&lost.data)) {
            reinjection.push_lost(lost);
        } else if let Some(sequencer) = &mut self.sequencer {
            sequencer.keep(now, lost);
        }
    }

    /// Takes all that is on its way on a path that is dead, and on no other.
    pub(super) fn reinject_from(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        id: PathId,
    ) -> Reinjected {
        let mut packets = 0;
        for datagram in connection.take_unacked(id).into_iter().filter(|datagram| !datagram.has_copy) {
            packets += 1;
            self.keep(now, datagram);
        }
        let pieces = connection.take_unacked_chunks(now, id);
        let stuck = connection.may_hold_retransmissions(id);
        tracing::debug!(
            target: REORDER,
            path = id.0,
            packets,
            pieces = pieces.len(),
            stuck,
            "what is on its way on a dead path is sent again on others"
        );
        let (Some(reinjection), Some(max)) = (&mut self.reinjection, connection.max_datagram_size()) else {
            return Reinjected { packets, bytes: 0, stuck: stuck || !pieces.is_empty() };
        };
        for piece in &pieces {
            reinjection.push(now, piece, max, None);
            if piece.offset == 0 && self.role == Role::Client {
                announce(connection, piece.stream);
            }
        }
        let bytes = pieces.iter().map(|piece| piece.data.len() as u64).sum();
        Reinjected { packets, bytes, stuck }
    }

    /// When there is something to report about streams.
    pub(super) fn data_ack_timeout(&self, connection: &Connection) -> Option<Instant> {
        let acks = self.data_acks.as_ref()?;
        (connection.pending_data_acks() > 0).then(|| acks.due(connection.is_data_ack_urgent()))
    }

    /// Whether [`Self::acknowledge_data`] has something to do.
    #[inline]
    pub(super) fn owes_data_ack(&self, now: Instant, connection: &Connection) -> bool {
        self.data_acks.as_ref().is_some_and(|acks| now >= acks.due(connection.is_data_ack_urgent()))
    }

    /// Reports how far streams have come, and reinjects what the far end waits for in vain; returns the bytes
    /// of that.
    pub(super) fn acknowledge_data(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        paths: &mut PathTable,
        groups: &PathGroups,
    ) -> u64 {
        let Some(acks) = &mut self.data_acks else { return 0 };
        connection.enable_data_acks();
        acks.take_lost().into_iter().for_each(|stream| connection.requeue_data_ack(stream));
        let count = connection.pending_data_acks();
        if !acks.has_waiting() && count > 0 {
            connection.clear_data_ack_urgency();
            acks.write(count, || connection.next_data_ack());
        }
        match acks.begin_period(now).filter(|_| paths.len() > 1) {
            Some(passed) => self.reinject_overdue(now, connection, paths, groups, passed),
            None => 0,
        }
    }

    /// Reinjects what the far end waits for and should have; a period of `passed` is over. Returns the bytes.
    fn reinject_overdue(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        paths: &mut PathTable,
        groups: &PathGroups,
        passed: Duration,
    ) -> u64 {
        let (Some(acks), Some(reinjection)) = (&mut self.data_acks, &mut self.reinjection) else { return 0 };
        connection.enable_reinjection();
        let budget = acks.earn(passed, connection.stream_bytes_sent());
        let Some(max) = connection.max_datagram_size().filter(|_| budget > 0) else { return 0 };
        for (id, path) in paths.iter_mut() {
            path.typical_rtt.update(connection.rtt(id).unwrap_or_default());
        }
        let working = paths.values().filter(|path| path.works());
        let slowest = working.map(|path| path.typical_rtt.get()).max().unwrap_or_default();
        let overdue_after = paths.iter().map(|(id, path)| (id, path.typical_rtt.overdue_after(slowest)));
        let overdue_after: Vec<(PathId, Duration)> = overdue_after.collect();
        let mut reinjected = 0;
        let mut unknown = Vec::new();
        let most = usize::try_from(budget).unwrap_or(usize::MAX);
        connection.take_overdue_chunks(
            now,
            &overdue_after,
            most,
            |OverdueChunk { chunk: piece, path, path_stalled: stalls }| {
                reinjected += piece.data.len() as u64;
                if piece.offset == 0 && self.role == Role::Client {
                    unknown.push(piece.stream);
                }
                tracing::debug!(
                    target: REORDER,
                    stream = piece.stream,
                    at = piece.offset,
                    bytes = piece.data.len(),
                    path = path.0,
                    stalls,
                    ?overdue_after,
                    "the far end waits for bytes of a stream: reinjected on another path"
                );
                reinjection.push(now, &piece, max, groups.head_of(path));
                if let Some(path) = paths.get_mut(path).filter(|_| stalls) {
                    path.stall.note(now);
                }
            },
        );
        unknown.into_iter().for_each(|stream| announce(connection, stream));
        acks.spend(reinjected);
        reinjected
    }
}

/// Lets the server know of a request of which it may have nothing: by an empty DATA frame.
fn announce(connection: &mut Connection, stream: StreamId) {
    connection.write_past_quota(stream, h3::encode_data(&[]));
}
