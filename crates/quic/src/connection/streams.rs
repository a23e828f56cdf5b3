//! The streams of a connection: ordinary ones (control and requests), whose data leaves at once on any path
//! and is read in order by noq; and bulk streams, whose data leaves by the send quotas of paths, is put in
//! order here, and is kept for reinjection until it has arrived.
//!
//! This module connects sending ([`SendStreams`]), receiving ([`ReceiveStreams`]), quotas ([`StreamQuotas`])
//! and reinjection ([`ReinjectionLog`]) with noq.

use bytes::Bytes;
use mpvpn_types::{Duration, Instant, PathId};

use super::{
    Connection, Event,
    quotas::StreamQuotas,
    readers::ReadAhead,
    receive::ReceiveStreams,
    reinjection::{DataAck, OverdueChunk, ReinjectionLog},
    send::{SendStreams, StreamWriter},
};
use crate::{
    Read, StreamError, StreamId,
    config::{MAX_REQUESTS, SPARE_REQUESTS},
    held::{CONNECTION_BYTES, CountedConnection},
    streams::{from_noq, to_noq},
};

/// Data of a bulk stream, as in a STREAM frame (RFC 9000 §19.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamChunk {
    /// The stream.
    pub stream: StreamId,
    /// The offset of the first byte in the stream.
    pub offset: u64,
    /// The bytes.
    pub data: Bytes,
    /// Whether the stream ends after these bytes.
    pub fin: bool,
}

/// Why [`Connection::read_bulk`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadStatus {
    /// There may be more data now.
    More,
    /// There is no more data now.
    Blocked,
    /// The peer has ended the stream.
    Finished,
    /// The peer has reset the stream with this code.
    Reset(u64),
}

/// All streams of a connection.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) send: SendStreams,
    pub(super) receive: ReceiveStreams,
    pub(super) quotas: StreamQuotas,
    pub(super) reinjection: ReinjectionLog,
    /// Whether the peer sends DataAck reports, so that streams are held back for readers that do not read.
    pub(super) limits_read_ahead: bool,
    /// The number of open bulk streams.
    open_bulk: usize,
    /// Bidirectional streams that the peer may have open, once set.
    max_requests: u32,
}

impl Streams {
    /// Packets with `bytes` bytes were lost.
    pub(super) fn note_lost(&mut self, bytes: u64) {
        if bytes > 0 && self.open_bulk > 0 {
            self.quotas.lost += bytes;
        }
    }
}

impl StreamWriter for noq_proto::Connection {
    fn write(&mut self, id: StreamId, bytes: &mut Bytes) -> Result<usize, noq_proto::WriteError> {
        let mut piece = [std::mem::take(bytes)];
        let taken = self.send_stream(to_noq(id)).write_chunks(&mut &mut piece[..]);
        [*bytes] = piece;
        taken
    }

    fn finish(&mut self, id: StreamId) {
        // A stream that the peer stopped needs no FIN.
        let _ = self.send_stream(to_noq(id)).finish();
    }
}

impl Connection {
    /// Opens a unidirectional stream.
    ///
    /// # Errors
    /// If the peer allows no more.
    pub fn open_uni(&mut self) -> Result<StreamId, StreamError> {
        self.open(noq_proto::Dir::Uni)
    }

    /// Opens a bidirectional stream.
    ///
    /// # Errors
    /// If the peer allows no more; [`Event::StreamsAvailable`] follows.
    pub fn open_bi(&mut self) -> Result<StreamId, StreamError> {
        self.open(noq_proto::Dir::Bi)
    }

    fn open(&mut self, dir: noq_proto::Dir) -> Result<StreamId, StreamError> {
        let opened = self.guarded(|inner| inner.streams().open(dir)).flatten();
        opened.map(from_noq).ok_or(StreamError::Limit)
    }

    /// Allows the peer a number of bidirectional streams beside the `granted` ones that it has open: at least
    /// 512, and a quarter of the granted ones, because noq announces a new limit only when an eighth of
    /// it is new.
    pub fn set_granted_requests(&mut self, granted: usize) {
        let granted = u32::try_from(granted).unwrap_or(u32::MAX).min(MAX_REQUESTS);
        let max = (granted + granted / 4 + SPARE_REQUESTS).min(MAX_REQUESTS);
        if std::mem::replace(&mut self.streams.max_requests, max) != max {
            let max = noq_proto::VarInt::from_u32(max);
            self.guarded(|inner| inner.set_max_concurrent_streams(noq_proto::Dir::Bi, max));
        }
    }

    /// Makes a stream a bulk stream until [`Self::end_bulk`]: its data leaves by send quotas
    /// ([`Self::grant_quota`]), and is read by [`Self::read_bulk`].
    pub fn make_bulk(&mut self, id: StreamId) {
        self.streams.open_bulk += usize::from(self.streams.send.make_bulk(id));
        // Until now noq delivered the stream in order.
        let read = self.bytes_read(id);
        self.streams.receive.make_bulk(id, read);
    }

    /// Bytes of a stream that were read in order.
    fn bytes_read(&mut self, id: StreamId) -> u64 {
        self.guarded(|inner| inner.recv_stream(to_noq(id)).bytes_read().ok()).flatten().unwrap_or(0)
    }

    /// Ends reading and writing of a bulk stream; written data still leaves.
    pub fn end_bulk(&mut self, id: StreamId) {
        if self.streams.receive.end_bulk(id) {
            // Reinjected data may still arrive a second time, by noq, and will not be read.
            self.stop(id, 0);
        }
        self.share_window();
        self.streams.send.end_bulk(id);
        self.streams.open_bulk = self.streams.open_bulk.saturating_sub(1);
    }

    /// Whether any bulk stream is open.
    pub fn has_bulk(&self) -> bool {
        self.streams.open_bulk > 0
    }

    /// Writes to a stream. Data beyond flow control waits.
    pub fn write(&mut self, id: StreamId, data: Bytes) {
        self.streams.send.push(id, data);
        self.written(id);
    }

    /// Ends a stream after the written data.
    pub fn finish(&mut self, id: StreamId) {
        self.streams.send.finish(id);
        self.written(id);
    }

    fn written(&mut self, id: StreamId) {
        let written = self.contained(|it| it.streams.send.written(&mut it.inner, id));
        if written.is_some_and(|written| written.dropped) {
            self.streams.reinjection.forget(id);
        }
    }

    /// Resets the sending side of a stream (RESET_STREAM).
    pub fn reset(&mut self, id: StreamId, code: u64) {
        self.drop_writes(id);
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        // A stream that is closed already needs no reset.
        self.guarded(|inner| inner.send_stream(to_noq(id)).reset(code).ok());
    }

    /// Asks the peer to stop sending on a stream (STOP_SENDING).
    pub fn stop(&mut self, id: StreamId, code: u64) {
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        self.guarded(|inner| inner.recv_stream(to_noq(id)).stop(code).ok());
        self.streams.receive.end_ordered(id);
        self.share_window();
    }

    /// Writes to a stream of this end without a quota. The first bytes of the stream were reinjected, and
    /// this data lets the peer's noq open the stream.
    pub fn write_past_quota(&mut self, id: StreamId, data: Bytes) {
        let write = |it: &mut Self| it.streams.send.write_past_quota(&mut it.inner, id, data);
        if self.contained(write).is_some_and(|written| written.dropped) {
            self.streams.reinjection.forget(id);
        }
    }

    /// Drops the waiting data of a stream.
    pub(super) fn drop_writes(&mut self, id: StreamId) {
        self.streams.send.remove(id);
        self.streams.reinjection.forget(id);
    }

    /// Flow control allows data of a stream again.
    pub(super) fn unblock(&mut self, id: StreamId) {
        if self.streams.send.unblock(id) {
            self.written(id);
            if self.streams.send.is_forgotten(id) {
                self.events.push_back(Event::StreamWritable(id));
            }
        }
    }

    /// How far ahead of their readers streams may be sent now.
    pub(super) fn read_ahead(&self) -> ReadAhead {
        let rtts = self.paths.iter().filter_map(|path| self.rtt(path.id));
        ReadAhead::new(rtts.max().unwrap_or_default(), self.streams.send.unread_streams)
    }

    /// Bytes that were written to streams other than bulk streams, and for which the peer has granted no
    /// credit yet.
    pub fn unsent_replies(&self) -> usize {
        self.streams.send.ordinary_bytes
    }

    /// Bytes that were written, but not passed to noq yet.
    pub fn unsent(&self, id: StreamId) -> usize {
        self.streams.send.unsent(id)
    }

    /// Counts the memory of the connection for a user, who may hold only so much.
    pub fn set_user(&mut self, counted: CountedConnection) {
        self.streams.send.queued.set_user(counted.user());
        self.held.set_user(counted.user());
        self.counted = Some(counted);
        self.count_held(0, 0);
    }

    /// Updates the bytes that the connection holds beside the queues of its streams: its own, those of its
    /// path IDs, data of bulk streams that was sent and is not confirmed, data that arrived out of order,
    /// those of the caller, and data that nobody has read, of all packets that have `arrived` (bytes).
    pub fn count_held(&mut self, arrived: u64, by_caller: usize) {
        let in_flight: usize = self.paths.iter().map(|path| path.streams.bytes()).sum();
        // Both share the bytes.
        let unconfirmed = in_flight.max(self.streams.reinjection.bytes);
        let own = CONNECTION_BYTES + self.paths.id_bytes();
        self.held.set(own + unconfirmed + self.streams.receive.held() + by_caller);
        self.held.set_estimated(self.streams.receive.unread.bytes(arrived));
    }

    /// Counts what the kernel holds for the relays of this connection (bytes).
    pub fn count_in_kernel(&mut self, bytes: usize) {
        self.held.set_in_kernel(bytes);
    }

    /// Bytes that can be written to a bulk stream now; after 0, [`Event::StreamWritable`] follows.
    pub fn writable_bytes(&mut self, id: StreamId) -> usize {
        self.streams.send.writable_bytes(id)
    }

    /// Takes the unacknowledged data of bulk streams on a path, because the path is dead. Data that noq had
    /// retransmitted there is not included.
    pub fn take_unacked_chunks(&mut self, now: Instant, id: PathId) -> Vec<StreamChunk> {
        let Some(path) = self.paths.get_mut(id) else { return Vec::new() };
        path.drop_acked_streams();
        let pieces = path.streams.take();
        pieces.iter().for_each(|piece| self.streams.reinjection.note_reinjected(now, piece));
        pieces
    }

    /// Whether noq may have retransmitted data on a path that is still unacknowledged: it is not among the
    /// unacknowledged chunks, and noq retransmits it only when it is lost again or the path is closed.
    pub fn may_hold_retransmissions(&self, id: PathId) -> bool {
        self.paths.get(id).is_some_and(|path| path.streams.may_hold_retransmissions(path.gate.acked_sent()))
    }

    /// Looks for lost packets, whose stream data noq retransmits.
    pub(super) fn note_losses(&mut self) {
        if self.streams.open_bulk == 0 {
            return;
        }
        self.contained_read(|connection| {
            for path in connection.paths.iter_mut() {
                let Some(stats) = connection.inner.path_stats(noq_proto::PathId::from(path.id.0)) else {
                    continue;
                };
                connection.streams.note_lost(path.losses.newly_lost(stats.lost_bytes));
            }
        });
    }

    /// Takes reinjected data of a bulk stream. It is dropped if too much is kept, because noq delivers it as
    /// well.
    pub fn receive_reinjected(&mut self, piece: StreamChunk) {
        self.contained(|connection| connection.take_reinjected(&piece));
    }

    fn take_reinjected(&mut self, piece: &StreamChunk) {
        let id = piece.stream;
        let own = self.inner.side().is_client() == id.is_multiple_of(2);
        let inner = &mut self.inner;
        let read = || inner.recv_stream(to_noq(id)).bytes_read().unwrap_or(0);
        if self.streams.receive.take_reinjected(piece, own, read) {
            self.events.push_back(Event::StreamReadable(id));
        }
        self.share_window();
    }

    /// Out-of-order data takes its bytes from the window of the connection, and gives them back.
    fn share_window(&mut self) {
        if let Some(bytes) = self.streams.receive.changed_window() {
            self.guarded(|inner| inner.set_receive_window(noq_proto::VarInt::from_u32(bytes)));
        }
    }

    /// Reads the next bytes of a stream that is not a bulk stream.
    pub fn read(&mut self, id: StreamId) -> Read {
        let is_early = self.streams.receive.is_early(id);
        let read = match is_early {
            true => self.read_early(id),
            false => self.guarded(|inner| read_in_order(inner, id)).unwrap_or(Read::Blocked),
        };
        match &read {
            Read::Data(_) if is_early => {}
            Read::Data(data) => self.streams.receive.unread.taken += data.len() as u64,
            Read::Blocked => self.streams.receive.unread.remove(id),
            Read::Finished | Read::Reset(_) => self.streams.receive.end_ordered(id),
        }
        self.share_window();
        read
    }

    /// As [`Self::read`], for a stream with reinjected data.
    fn read_early(&mut self, id: StreamId) -> Read {
        let mut read = Vec::new();
        let end = self.read_bulk(id, 1, |bytes| read.push(bytes));
        match end {
            _ if !read.is_empty() => Read::Data(read.concat().into()),
            ReadStatus::More | ReadStatus::Blocked => Read::Blocked,
            ReadStatus::Finished => Read::Finished,
            ReadStatus::Reset(code) => Read::Reset(code),
        }
    }

    /// Delivers the next bytes of a bulk stream in order, about `max`.
    pub fn read_bulk(&mut self, id: StreamId, max: usize, out: impl FnMut(Bytes)) -> ReadStatus {
        self.contained(|connection| connection.read_unordered(id, max, out)).unwrap_or(ReadStatus::Blocked)
    }

    fn read_unordered(&mut self, id: StreamId, max: usize, out: impl FnMut(Bytes)) -> ReadStatus {
        if !self.streams.receive.contains(id) {
            return ReadStatus::Blocked;
        }
        let mut stream = self.inner.recv_stream(to_noq(id));
        let mut chunks = match stream.read(false) {
            Ok(chunks) => chunks,
            Err(_) => return ReadStatus::Blocked,
        };
        let end = self.streams.receive.read(id, max, &mut chunks, out);
        // Credit that reading gives back to the peer leaves with the next control pass.
        let _ = chunks.finalize();
        self.share_window();
        end
    }

    /// Enables DataAck reports of bulk streams in both directions: [`Self::next_data_ack`] makes them,
    /// [`Self::on_data_ack`] takes them.
    pub fn enable_data_acks(&mut self) {
        self.streams.limits_read_ahead = true;
        self.streams.receive.sends_data_acks = true;
    }

    /// Keeps the sent data of bulk streams from now on until [`Self::on_data_ack`] confirms it.
    pub fn enable_reinjection(&mut self) {
        self.streams.reinjection.on = true;
    }

    /// Queues the DataAck of a stream again, because the last one was lost.
    pub fn requeue_data_ack(&mut self, id: StreamId) {
        self.streams.receive.queue_data_ack(id);
    }

    /// Whether a DataAck is urgent, because the peer waits for it to send more.
    pub fn is_data_ack_urgent(&self) -> bool {
        self.streams.receive.urgent
    }

    /// The number of pending DataAcks.
    pub fn pending_data_acks(&self) -> usize {
        self.streams.receive.pending_acks.len()
    }

    /// The urgent DataAcks are being sent.
    pub fn clear_data_ack_urgency(&mut self) {
        self.streams.receive.urgent = false;
    }

    /// The DataAck of the next stream that has changed since its last one, or that has gaps; `None` if the
    /// stream is gone.
    pub fn next_data_ack(&mut self) -> Option<DataAck> {
        self.streams.receive.next_data_ack()
    }

    /// Takes the peer's DataAck of a stream that this end writes.
    pub fn on_data_ack(&mut self, now: Instant, ack: DataAck) {
        if self.streams.send.on_read(now, ack.stream, ack.next_offset) {
            self.unblock(ack.stream);
        }
        self.streams.reinjection.on_data_ack(ack);
    }

    /// Calls `each` for data that the peer misses, and that was sent longer ago than the timeout of its path,
    /// up to about `max` bytes. It counts as sent now.
    pub fn take_overdue_chunks(
        &mut self,
        now: Instant,
        read_ahead: &[(PathId, Duration)],
        max: usize,
        each: impl FnMut(OverdueChunk),
    ) {
        let paths = &self.paths;
        let stalls = |id, at| paths.get(id).is_some_and(|path| path.gate.acked_sent() < at);
        self.streams.reinjection.take_overdue(now, read_ahead, max, stalls, each);
    }

    /// Bytes that were ever sent on bulk streams, without retransmissions.
    pub fn stream_bytes_sent(&self) -> u64 {
        self.streams.reinjection.sent
    }
}

/// Reads the next bytes of a stream that noq puts in order.
fn read_in_order(inner: &mut noq_proto::Connection, id: StreamId) -> Read {
    let mut stream = inner.recv_stream(to_noq(id));
    let mut chunks = match stream.read(true) {
        Ok(chunks) => chunks,
        Err(_) => return Read::Blocked,
    };
    let read = match chunks.next(64 << 10) {
        Ok(Some(chunk)) => Read::Data(chunk.bytes),
        Ok(None) => Read::Finished,
        Err(noq_proto::ReadError::Blocked) => Read::Blocked,
        Err(noq_proto::ReadError::Reset(code)) => Read::Reset(code.into()),
    };
    // Flow control credit for the peer leaves with the next control pass.
    let _ = chunks.finalize();
    read
}
