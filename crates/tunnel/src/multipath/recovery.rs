//! Decides what is sent again: lost packets, stream bytes in flight on a dead path, and overdue stream bytes.
//!
//! In: outcomes of datagrams, paths that died, DataAck reports of the peer. Out: datagrams that wait for a
//! path, in [`Sequencer`], [`Reinjection`] and [`DataAcks`]. Always holds: no datagram of an extension is
//! sent that was not negotiated.

use bytes::Bytes;
use mpvpn_masque::h3;
use mpvpn_quic::{Connection, Outcome, OverdueChunk, StreamId, TrackedDatagram};
use mpvpn_types::{Duration, Instant, PathId, target::REORDER};

use super::{
    Role, data_ack::DataAcks, groups::PathGroups, path_table::PathTable, reinjection::Reinjection,
    sequence::Sequencer,
};

/// The parts that send lost data again.
#[derive(Debug)]
pub(super) struct Recovery {
    role: Role,
    /// Numbered packets, if negotiated.
    pub(super) sequencer: Option<Box<Sequencer>>,
    /// Reinjection of stream bytes, if negotiated.
    pub(super) reinjection: Option<Box<Reinjection>>,
    /// DataAck reports, if negotiated together with reinjection.
    pub(super) data_acks: Option<Box<DataAcks>>,
}

/// The result of [`Recovery::reinject_from`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reinjected {
    /// Number of datagrams that are sent again.
    pub(super) packets: usize,
    /// Stream bytes that are sent again.
    pub(super) bytes: u64,
    /// Whether noq has stream bytes in flight on the path that it sends again only when the path is closed.
    pub(super) stuck: bool,
}

impl Recovery {
    pub(super) fn new(role: Role) -> Self {
        Self { role, sequencer: None, reinjection: None, data_acks: None }
    }

    /// Takes a received datagram if it is of reinjection or DataAck; returns whether it was.
    pub(super) fn on_datagram(&mut self, datagram: &Bytes) -> bool {
        if let Some(reinjection) = self.reinjection.as_mut().filter(|parts| parts.has_prefix(datagram)) {
            reinjection.on_datagram(datagram.clone());
            return true;
        }
        let acks = self.data_acks.as_mut().filter(|acks| acks.has_prefix(datagram));
        acks.map(|acks| acks.on_report(datagram.clone())).is_some()
    }

    /// Passes reinjected bytes and DataAck reports of the peer to the QUIC connection.
    pub(super) fn deliver(&mut self, now: Instant, connection: &mut Connection) {
        if let Some(reinjection) = self.reinjection.as_mut().filter(|parts| parts.has_received()) {
            reinjection.drain_received().for_each(|chunk| connection.receive_reinjected(chunk));
        }
        if let Some(acks) = self.data_acks.as_mut().filter(|acks| acks.has_received()) {
            acks.drain_received().for_each(|data_ack| connection.on_data_ack(now, data_ack));
        }
    }

    /// Whether retransmissions, repair packets, reinjected bytes or a DataAck report wait to be sent.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.sequencer.as_ref().is_some_and(|sequencer| sequencer.has_repairs())
            || self.reinjection.as_ref().is_some_and(|reinjection| reinjection.has_waiting())
            || self.data_acks.as_ref().is_some_and(|acks| acks.has_waiting())
    }

    /// Takes the outcomes of datagrams on all paths, and schedules lost ones for retransmission.
    pub(super) fn collect(&mut self, now: Instant, connection: &mut Connection) {
        connection.drain_outcomes(|_, outcome| match (outcome, &mut self.sequencer) {
            (Outcome::Lost(lost), _) if lost.ack_token.is_none() => self.on_lost(now, lost),
            (outcome, Some(sequencer)) => sequencer.on_outcome(now, outcome),
            _ => {}
        });
        if let Some(sequencer) = &mut self.sequencer {
            sequencer.handle_timeout(now);
        }
    }

    fn on_lost(&mut self, now: Instant, lost: TrackedDatagram) {
        if let Some(acks) = self.data_acks.as_mut().filter(|acks| acks.has_prefix(&lost.data)) {
            acks.on_report_lost(lost.data);
        } else if let Some(reinjection) =
            self.reinjection.as_mut().filter(|parts| parts.has_prefix(&lost.data))
        {
            reinjection.on_lost(lost);
        } else if let Some(sequencer) = &mut self.sequencer {
            sequencer.on_lost(now, lost);
        }
    }

    /// Sends datagrams and stream bytes again that are in flight on a dead path, except packets that have a
    /// copy on another path.
    pub(super) fn reinject_from(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        id: PathId,
    ) -> Reinjected {
        let mut packets = 0;
        for datagram in connection.take_unacked(id).into_iter().filter(|datagram| !datagram.has_copy) {
            packets += 1;
            self.on_lost(now, datagram);
        }
        let chunks = connection.take_unacked_chunks(now, id);
        let stuck = connection.may_hold_retransmissions(id);
        tracing::debug!(
            target: REORDER,
            path = id.0,
            packets,
            chunks = chunks.len(),
            stuck,
            "data in flight on a dead path is sent again on other paths"
        );
        let (Some(reinjection), Some(max)) = (&mut self.reinjection, connection.max_datagram_size()) else {
            return Reinjected { packets, bytes: 0, stuck: stuck || !chunks.is_empty() };
        };
        for chunk in &chunks {
            reinjection.push(now, chunk, max, None);
            if chunk.offset == 0 && self.role == Role::Client {
                announce_stream(connection, chunk.stream);
            }
        }
        let bytes = chunks.iter().map(|chunk| chunk.data.len() as u64).sum();
        Reinjected { packets, bytes, stuck }
    }

    /// Returns when [`Self::acknowledge_data`] is due.
    pub(super) fn data_ack_timeout(&self, connection: &Connection) -> Option<Instant> {
        let acks = self.data_acks.as_ref()?;
        (connection.pending_data_acks() > 0).then(|| acks.next_due(connection.is_data_ack_urgent()))
    }

    /// Whether [`Self::acknowledge_data`] is due.
    #[inline]
    pub(super) fn is_data_ack_due(&self, now: Instant, connection: &Connection) -> bool {
        self.data_acks.as_ref().is_some_and(|acks| now >= acks.next_due(connection.is_data_ack_urgent()))
    }

    /// Writes a DataAck report if one is due, and reinjects overdue stream bytes; returns the number of bytes
    /// reinjected.
    pub(super) fn acknowledge_data(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        paths: &mut PathTable,
        groups: &PathGroups,
    ) -> u64 {
        let Some(acks) = &mut self.data_acks else { return 0 };
        connection.enable_data_acks();
        acks.take_lost_streams().into_iter().for_each(|stream| connection.requeue_data_ack(stream));
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

    /// Reinjects overdue stream bytes after a report interval of `passed`; returns the number of bytes.
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
        // Data that waits for a path is not queued again and again, while the peer takes nothing and reports
        // that it waits.
        let budget = acks.refill_budget(passed, connection.stream_bytes_sent());
        let budget = budget.saturating_sub(reinjection.waiting_bytes);
        let Some(max) = connection.max_datagram_size().filter(|_| budget > 0) else { return 0 };
        for (id, path) in paths.iter_mut() {
            path.typical_rtt.update(connection.rtt(id).unwrap_or_default());
        }
        let working = paths.values().filter(|path| path.works());
        let slowest = working.map(|path| path.typical_rtt.get()).max().unwrap_or_default();
        let overdue_after = paths.iter().map(|(id, path)| (id, path.typical_rtt.overdue_after(slowest)));
        let overdue_after: Vec<(PathId, Duration)> = overdue_after.collect();
        let mut reinjected = 0;
        let mut new_streams = Vec::new();
        let max_bytes = usize::try_from(budget).unwrap_or(usize::MAX);
        connection.take_overdue_chunks(
            now,
            &overdue_after,
            max_bytes,
            |OverdueChunk { chunk, path, path_stalled: stalls }| {
                reinjected += chunk.data.len() as u64;
                if chunk.offset == 0 && self.role == Role::Client {
                    new_streams.push(chunk.stream);
                }
                tracing::debug!(
                    target: REORDER,
                    stream = chunk.stream,
                    at = chunk.offset,
                    bytes = chunk.data.len(),
                    path = path.0,
                    stalls,
                    ?overdue_after,
                    "overdue bytes of a stream are reinjected on another path"
                );
                reinjection.push(now, &chunk, max, groups.head_of(path));
                if let Some(path) = paths.get_mut(path).filter(|_| stalls) {
                    path.stall.note(now);
                }
            },
        );
        new_streams.into_iter().for_each(|stream| announce_stream(connection, stream));
        acks.spend_budget(reinjected);
        reinjected
    }
}

/// Makes the server aware of a request whose first bytes may be lost, by sending an empty DATA frame on its
/// stream.
fn announce_stream(connection: &mut Connection, stream: StreamId) {
    connection.write_past_quota(stream, h3::encode_data(&[]));
}
