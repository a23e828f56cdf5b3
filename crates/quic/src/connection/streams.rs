//! The streams of a connection: those that say how it is used, which leave at once on any path and are read in order, and
//! bulk streams, whose bytes leave on the paths that they are granted to, are put in order here, and are kept until they
//! have arrived.
//!
//! Here the parts that know one thing each meet the library: what waits to be sent, what arrives, what may leave, and what
//! may be sent again.

use bytes::Bytes;
use mpvpn_types::{Duration, Instant, PathId};

use super::{
    Connection, Event,
    grants::StreamGrants,
    readers::Patience,
    receive::ReceiveStreams,
    reinjection::{DataAck, OverdueChunk, ReinjectionLog},
    send::{SendStreams, StreamWriter},
};
use crate::{
    Read, StreamError, StreamId,
    streams::{from_noq, to_noq},
};

/// Bytes of a bulk stream that are on their way on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamChunk {
    /// Which stream.
    pub stream: StreamId,
    /// Where in it they are.
    pub offset: u64,
    /// The bytes.
    pub data: Bytes,
    /// The stream ends after them.
    pub fin: bool,
}

/// What [`Connection::read_bulk`] stopped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadStatus {
    /// There may be more.
    More,
    /// There is no more for now.
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
    pub(super) grants: StreamGrants,
    pub(super) log: ReinjectionLog,
    /// The far end tells how far its readers have come, so streams are held back for those that do not read.
    pub(super) heeds_readers: bool,
    /// Bulk streams that are open in some direction.
    bulk: usize,
}

impl Streams {
    /// Packets with so many bytes were lost.
    pub(super) fn note_lost(&mut self, bytes: u64) {
        if bytes > 0 && self.bulk > 0 {
            self.grants.on_lost(bytes);
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
        // A stream that the peer stopped is as finished as it gets.
        let _ = self.send_stream(to_noq(id)).finish();
    }
}

impl Connection {
    /// Opens a stream that only this end writes.
    ///
    /// # Errors
    /// If the peer allows no more.
    pub fn open_uni(&mut self) -> Result<StreamId, StreamError> {
        self.inner.streams().open(noq_proto::Dir::Uni).map(from_noq).ok_or(StreamError::Limit)
    }

    /// Opens a stream that both ends write.
    ///
    /// # Errors
    /// If the peer allows no more; [`Event::StreamsAvailable`] follows.
    pub fn open_bi(&mut self) -> Result<StreamId, StreamError> {
        self.inner.streams().open(noq_proto::Dir::Bi).map(from_noq).ok_or(StreamError::Limit)
    }

    /// Makes a stream one whose bytes leave as paths are granted ([`Self::grant_quota`]), and are read by
    /// [`Self::read_bulk`]. Until [`Self::end_bulk`] says that it is over.
    pub fn make_bulk(&mut self, id: StreamId) {
        self.streams.bulk += usize::from(self.streams.send.make_bulk(id));
        // What was read before was read in order.
        let read = self.bytes_read(id);
        self.streams.receive.make_bulk(id, read);
    }

    /// Bytes of a stream that were read in order.
    fn bytes_read(&mut self, id: StreamId) -> u64 {
        self.inner.recv_stream(to_noq(id)).bytes_read().unwrap_or(0)
    }

    /// Nobody will read or write a bulk stream any more; what was written still leaves.
    pub fn end_bulk(&mut self, id: StreamId) {
        if self.streams.receive.end_bulk(id) {
            // What came another way may still come a second time, and nobody will read it.
            self.stop(id, 0);
        }
        self.streams.send.end_bulk(id);
        self.streams.bulk = self.streams.bulk.saturating_sub(1);
    }

    /// Whether streams are open whose bytes leave as paths are granted.
    pub fn has_bulk(&self) -> bool {
        self.streams.bulk > 0
    }

    /// Writes to a stream. What flow control holds back is sent later.
    pub fn write(&mut self, id: StreamId, data: Bytes) {
        self.streams.send.push(id, data);
        self.written(id);
    }

    /// Ends a stream after what was written.
    pub fn finish(&mut self, id: StreamId) {
        self.streams.send.finish(id);
        self.written(id);
    }

    fn written(&mut self, id: StreamId) {
        if self.streams.send.written(&mut self.inner, id).dropped {
            self.streams.log.forget(id);
        }
    }

    /// Gives a stream up in the direction that this end writes.
    pub fn reset(&mut self, id: StreamId, code: u64) {
        self.drop_writes(id);
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        // A stream that is closed already needs no reset.
        let _ = self.inner.send_stream(to_noq(id)).reset(code);
    }

    /// Asks the peer to send nothing more on a stream.
    pub fn stop(&mut self, id: StreamId, code: u64) {
        let code = noq_proto::VarInt::from_u64(code).unwrap_or(noq_proto::VarInt::from_u32(0));
        let _ = self.inner.recv_stream(to_noq(id)).stop(code);
        self.streams.receive.end_ordered(id);
    }

    /// Writes to a stream of this end whose first bytes are on their way as [`Self::receive_reinjected`] takes them, past all
    /// grants: with these the peer learns that there is such a stream.
    pub fn write_past_quota(&mut self, id: StreamId, data: Bytes) {
        if self.streams.send.announce(&mut self.inner, id, data).dropped {
            self.streams.log.forget(id);
        }
    }

    /// Forgets what was to be sent on a stream.
    pub(super) fn drop_writes(&mut self, id: StreamId) {
        self.streams.send.remove(id);
        self.streams.log.forget(id);
    }

    /// The peer gives credit for a stream again.
    pub(super) fn unblock(&mut self, id: StreamId) {
        if self.streams.send.unblock(id) {
            self.written(id);
        }
    }

    /// How far ahead of their readers streams may be now.
    pub(super) fn patience(&self) -> Patience {
        let rtts = self.paths.iter().filter_map(|path| self.inner.rtt(noq_proto::PathId::from(path.id.0)));
        Patience::new(rtts.max().unwrap_or_default(), self.streams.send.owing())
    }

    /// Bytes written and not yet taken by the transport.
    pub fn unsent(&self, id: StreamId) -> usize {
        self.streams.send.unsent(id)
    }

    /// Bytes that a bulk stream takes now; after 0, [`Event::StreamWritable`] follows.
    pub fn writable_bytes(&mut self, id: StreamId) -> usize {
        self.streams.send.room(id)
    }

    /// Takes the bytes of bulk streams that are on their way on a path, which is dead. What the library had sent again
    /// there is not among them.
    pub fn take_unacked_chunks(&mut self, now: Instant, id: PathId) -> Vec<StreamChunk> {
        let Some(path) = self.paths.get_mut(id) else { return Vec::new() };
        path.settle_streams();
        let pieces = path.streams.take();
        pieces.iter().for_each(|piece| self.streams.log.note_again(now, piece));
        pieces
    }

    /// Whether bytes of streams may be on their way on a path that had been lost before: those are not among the
    /// unsettled, and the library repeats them only when they are lost again, or the path is closed.
    pub fn may_hold_retransmissions(&self, id: PathId) -> bool {
        self.paths.get(id).is_some_and(|path| path.streams.may_hold_retransmissions(path.gate.acked_sent()))
    }

    /// Looks for lost packets, whose bytes of streams are to be sent again.
    pub(super) fn note_losses(&mut self) {
        if self.streams.bulk == 0 {
            return;
        }
        for path in self.paths.iter_mut() {
            let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0)) else { continue };
            self.streams.note_lost(path.losses.newly_lost(stats.lost_bytes));
        }
    }

    /// Bytes of a bulk stream have come on another way than in the stream. They are dropped where too much is held:
    /// they come in the stream as well.
    pub fn receive_reinjected(&mut self, piece: StreamChunk) {
        let id = piece.stream;
        let own = self.inner.side().is_client() == id.is_multiple_of(2);
        let inner = &mut self.inner;
        let read = || inner.recv_stream(to_noq(id)).bytes_read().unwrap_or(0);
        if self.streams.receive.take_reinjected(&piece, own, read) {
            self.events.push_back(Event::StreamReadable(id));
        }
    }

    /// Reads the next bytes of a stream that is not a bulk stream.
    pub fn read(&mut self, id: StreamId) -> Read {
        let read = match self.streams.receive.is_early(id) {
            true => self.read_early(id),
            false => self.read_in_order(id),
        };
        if matches!(read, Read::Finished | Read::Reset(_)) {
            self.streams.receive.end_ordered(id);
        }
        read
    }

    fn read_in_order(&mut self, id: StreamId) -> Read {
        let mut stream = self.inner.recv_stream(to_noq(id));
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
        // Credit that reading gives back to the peer leaves with the next control pass.
        let _ = chunks.finalize();
        read
    }

    /// The same for one of which bytes came another way.
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

    /// Hands out the next bytes of a bulk stream, in order: about `most`.
    pub fn read_bulk(&mut self, id: StreamId, most: usize, out: impl FnMut(Bytes)) -> ReadStatus {
        if !self.streams.receive.contains(id) {
            return ReadStatus::Blocked;
        }
        let mut stream = self.inner.recv_stream(to_noq(id));
        let mut chunks = match stream.read(false) {
            Ok(chunks) => chunks,
            Err(_) => return ReadStatus::Blocked,
        };
        let end = self.streams.receive.read(id, most, &mut chunks, out);
        // Credit that reading gives back to the peer leaves with the next control pass.
        let _ = chunks.finalize();
        end
    }

    /// Both ends tell each other how far bulk streams have come from now on: [`Self::next_data_ack`] says it,
    /// [`Self::on_data_ack`] takes it.
    pub fn enable_data_acks(&mut self) {
        self.streams.heeds_readers = true;
        self.streams.receive.tell_progress();
    }

    /// What is sent on bulk streams is kept from now on until [`Self::on_data_ack`] is told that it arrived.
    pub fn enable_reinjection(&mut self) {
        self.streams.log.start();
    }

    /// What was said about a stream did not arrive.
    pub fn requeue_data_ack(&mut self, id: StreamId) {
        self.streams.receive.tell(id);
    }

    /// Whether the far end waits for what [`Self::next_data_ack`] has to say.
    pub fn is_data_ack_urgent(&self) -> bool {
        self.streams.receive.is_urgent()
    }

    /// How many streams [`Self::next_data_ack`] may have something to say about.
    pub fn pending_data_acks(&self) -> usize {
        self.streams.receive.progresses()
    }

    /// What is urgent is being told.
    pub fn clear_data_ack_urgency(&mut self) {
        self.streams.receive.clear_urgent();
    }

    /// The progress of the next stream on which something has changed since it was told last, or bytes are missing;
    /// `None` if the stream is gone.
    pub fn next_data_ack(&mut self) -> Option<DataAck> {
        self.streams.receive.take_progress()
    }

    /// Takes what the far end said about a stream that this one writes.
    pub fn on_data_ack(&mut self, now: Instant, progress: DataAck) {
        if self.streams.send.note_read(now, progress.stream, progress.next_offset) {
            self.unblock(progress.stream);
        }
        self.streams.log.confirm(progress);
    }

    /// Hands out bytes that the far end waits for, which were sent longer ago than `patience` says for their path: at
    /// most about `most` bytes. They count as sent now.
    pub fn take_overdue_chunks(
        &mut self,
        now: Instant,
        patience: &[(PathId, Duration)],
        most: usize,
        each: impl FnMut(OverdueChunk),
    ) {
        let paths = &self.paths;
        let stalls = |id, at| paths.get(id).is_some_and(|path| path.gate.acked_sent() < at);
        self.streams.log.take_overdue(now, patience, most, stalls, each);
    }

    /// Bytes that were ever sent on bulk streams, but for repetitions.
    pub fn stream_bytes_sent(&self) -> u64 {
        self.streams.log.bytes_sent()
    }
}
