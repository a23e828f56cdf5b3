//! Relays: request streams that carry the bytes of a TCP connection (CONNECT, RFC 9110 §9.3.6, RFC 9114
//! §4.4), at either end of the connection; and at a server the visits of its site, whose content moves in the
//! same way.
//!
//! In: bytes of QUIC streams and events of HTTP/3; bytes to send. Out: the content of DATA frames, and the
//! end of each direction. Always holds: content is read from QUIC only when the reader asks for it, so flow
//! control bounds memory.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    h3::{self, Event as HttpEvent, H3Error},
    headers::Headers,
};
use mpvpn_quic::{Connection, ConnectionHandle, Read, ReadStatus, StreamId};

use crate::http::Http;

/// Maximum bytes read from the QUIC stream at a time. Smaller: more calls. Larger: more memory for each
/// relay.
const MAX_READ_BYTES: usize = 64 << 10;

/// Contents of DATA frames below this size (bytes) are joined up to eight times this size, so that a place in
/// the list (32 bytes) costs little beside its bytes. Larger: copies; smaller: memory for hostile peers with
/// tiny frames.
const SMALL_CONTENT_BYTES: usize = 128;

/// Bytes of a page that are written at a time to the stream of a visit, once all before them have left.
/// Larger: memory that a stranger can demand; smaller: more calls. Chosen: the most content of a TLS record.
const VISIT_WRITE_BYTES: usize = 16 << 10;

/// Identifies a relay: a request stream that carries the bytes of a TCP connection, or a visit of the site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelayId {
    pub(crate) connection: ConnectionHandle,
    pub(crate) stream: StreamId,
}

impl RelayId {
    pub(crate) fn new(connection: ConnectionHandle, stream: StreamId) -> Self {
        Self { connection, stream }
    }
}

/// The result of reading from a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RelayRead {
    /// The next bytes.
    Data(Bytes),
    /// No bytes have arrived; an event follows when some have.
    Blocked,
    /// The peer has ended its direction, and everything was read.
    Finished,
    /// The peer has reset the stream, or the relay does not exist.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Broken,
}

#[derive(Debug, Default)]
struct Relay {
    /// Bytes of DATA frames that were not read yet.
    content: VecDeque<Bytes>,
    /// How the peer's direction ends after `content`, if it has ended.
    end: Option<End>,
    /// The header section of the final response, until it is taken.
    headers: Option<Headers>,
    /// The reader found nothing, and no event has been produced since.
    reader_waiting: bool,
    /// The reader has read the end of the peer's direction.
    read_ended: bool,
    /// This end has ended its direction.
    write_ended: bool,
    /// Bytes that the kernel holds for it, as of the last time that it waited.
    in_kernel: usize,
    /// It is a visit of the site. Its stream is an ordinary one: connections of strangers grant no quotas.
    is_visit: bool,
}

impl Relay {
    fn push_content(&mut self, data: Bytes) {
        match self.content.back_mut().filter(|last| last.len() < 8 * SMALL_CONTENT_BYTES) {
            Some(last) if data.len() < SMALL_CONTENT_BYTES => *last = [&last[..], &data].concat().into(),
            _ => self.content.push_back(data),
        }
    }
}

/// The relays of one connection.
#[derive(Debug, Default)]
pub(crate) struct Relays {
    relays: BTreeMap<StreamId, Relay>,
    /// Bytes of their contents that were not read yet.
    held_bytes: usize,
    /// Bytes that the kernel holds for them.
    in_kernel: usize,
    /// How many of them are visits of the site.
    visits: usize,
}

impl Relays {
    /// Makes a stream a relay.
    pub(crate) fn insert(&mut self, connection: &mut Connection, id: StreamId) {
        connection.make_bulk(id);
        self.relays.insert(id, Relay { reader_waiting: true, ..Relay::default() });
    }

    /// Makes a stream a visit of the site.
    pub(crate) fn insert_visit(&mut self, id: StreamId) {
        self.visits += 1;
        self.relays.insert(id, Relay { is_visit: true, ..Relay::default() });
    }

    /// Returns the bytes that were taken from streams and wait for the reader.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Sets how many bytes the kernel holds for a relay.
    pub(crate) fn set_in_kernel(&mut self, id: StreamId, bytes: usize) {
        if let Some(relay) = self.relays.get_mut(&id) {
            self.in_kernel = self.in_kernel - std::mem::replace(&mut relay.in_kernel, bytes) + bytes;
        }
    }

    /// Returns the bytes that the kernel holds for all relays.
    pub(crate) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Returns the number of visits of the site.
    pub(crate) fn visits(&self) -> usize {
        self.visits
    }

    /// Bytes that may be written to a relay now; after 0, [`mpvpn_quic::Event::StreamWritable`] follows.
    pub(crate) fn writable_bytes(&self, connection: &mut Connection, id: StreamId) -> usize {
        match self.is_visit(id) {
            true if connection.unsent(id) > 0 => 0,
            true => VISIT_WRITE_BYTES,
            false => connection.writable_bytes(id),
        }
    }

    fn is_visit(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_some_and(|relay| relay.is_visit)
    }

    /// Whether a stream is a relay.
    pub(crate) fn has(&self, id: StreamId) -> bool {
        self.relays.contains_key(&id)
    }

    /// Returns the number of relays.
    pub(crate) fn len(&self) -> usize {
        self.relays.len()
    }

    /// Whether the peer has reset a stream.
    pub(crate) fn is_broken(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_some_and(|relay| relay.end == Some(End::Broken))
    }

    /// Whether the peer has ended or reset a stream, or it is not a relay.
    pub(crate) fn is_broken_or_over(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_none_or(|relay| relay.end.is_some())
    }

    /// Whether a STOP_SENDING of the peer breaks the relay, because this end has not ended its direction.
    pub(crate) fn breaks_when_stopped(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_some_and(|relay| !relay.write_ended)
    }

    /// Returns the streams of all relays.
    pub(crate) fn ids(&self) -> Vec<StreamId> {
        self.relays.keys().copied().collect()
    }

    /// The QUIC stream of a relay has become readable; returns whether an event for the reader is due.
    pub(crate) fn wake(&mut self, id: StreamId) -> bool {
        self.relays.get_mut(&id).is_some_and(|relay| std::mem::take(&mut relay.reader_waiting))
    }

    /// Takes an HTTP/3 event of a relay.
    pub(crate) fn handle(&mut self, event: HttpEvent) {
        match event {
            HttpEvent::Data { stream, data } => {
                if let Some(relay) = self.relays.get_mut(&stream) {
                    self.held_bytes += data.len();
                    relay.push_content(data);
                }
            }
            HttpEvent::Headers { stream, headers } => {
                if let Some(relay) = self.relays.get_mut(&stream) {
                    relay.headers = Some(headers);
                }
            }
            HttpEvent::Finished { stream } => self.end(stream, End::Finished),
            HttpEvent::Reset { stream, .. } | HttpEvent::StreamError { stream, .. } => {
                self.end(stream, End::Broken);
            }
            _ => {}
        }
    }

    fn end(&mut self, id: StreamId, end: End) {
        if let Some(relay) = self.relays.get_mut(&id) {
            if end == End::Broken {
                self.held_bytes -= relay.content.drain(..).map(|data| data.len()).sum::<usize>();
            }
            relay.end.get_or_insert(end);
        }
    }

    /// Reads from the QUIC stream of a relay until there is something for the reader, unless there already
    /// is.
    fn read_transport(
        &mut self,
        connection: &mut Connection,
        http: &mut Http,
        id: StreamId,
    ) -> Result<(), H3Error> {
        let idle = |relay: &Relay| relay.content.is_empty() && relay.end.is_none() && relay.headers.is_none();
        let is_visit = self.is_visit(id);
        while self.relays.get(&id).is_some_and(idle) {
            let mut problem = None;
            let mut push = |bytes| {
                problem = problem.take().or(http.push_stream_data(id, bytes, false).err());
                while let Some(event) = http.poll_pushed() {
                    self.handle(event);
                }
            };
            let end = match is_visit {
                true => read_in_order(connection, id, &mut push),
                false => connection.read_bulk(id, MAX_READ_BYTES, push),
            };
            if let Some(error) = problem {
                return Err(error);
            }
            match end {
                ReadStatus::More => continue,
                ReadStatus::Blocked => break,
                ReadStatus::Finished => {
                    http.push_stream_data(id, Bytes::new(), true)?;
                    while let Some(event) = http.poll_pushed() {
                        self.handle(event);
                    }
                }
                ReadStatus::Reset(_) => self.end(id, End::Broken),
            }
        }
        Ok(())
    }

    /// Returns the header section of the response once, when it has arrived.
    ///
    /// # Errors
    /// If the peer violates HTTP/3: the connection has to be closed.
    pub(crate) fn answer(
        &mut self,
        connection: &mut Connection,
        http: &mut Http,
        id: StreamId,
    ) -> Result<Option<Headers>, H3Error> {
        self.read_transport(connection, http, id)?;
        let Some(relay) = self.relays.get_mut(&id) else { return Ok(None) };
        relay.reader_waiting = relay.headers.is_none() && relay.end.is_none();
        Ok(relay.headers.take())
    }

    /// Returns the next bytes from the peer.
    ///
    /// # Errors
    /// If the peer violates HTTP/3: the connection has to be closed.
    pub(crate) fn read(
        &mut self,
        connection: &mut Connection,
        http: &mut Http,
        id: StreamId,
    ) -> Result<RelayRead, H3Error> {
        self.read_transport(connection, http, id)?;
        let Some(relay) = self.relays.get_mut(&id) else { return Ok(RelayRead::Broken) };
        if let Some(data) = relay.content.pop_front() {
            self.held_bytes -= data.len();
            return Ok(RelayRead::Data(data));
        }
        Ok(match relay.end {
            Some(End::Finished) => {
                relay.read_ended = true;
                self.forget_if_over(connection, http, id);
                RelayRead::Finished
            }
            Some(End::Broken) => RelayRead::Broken,
            None => {
                relay.reader_waiting = true;
                RelayRead::Blocked
            }
        })
    }

    /// Sends bytes to the peer as the content of one DATA frame.
    pub(crate) fn write(&mut self, connection: &mut Connection, id: StreamId, data: Bytes) {
        if self.has(id) && !data.is_empty() {
            let header = h3::encode_data_header(data.len());
            connection.write(id, Bytes::copy_from_slice(header.as_ref()));
            connection.write(id, data);
        }
    }

    /// Ends the direction to the peer.
    pub(crate) fn finish(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if let Some(relay) = self.relays.get_mut(&id) {
            relay.write_ended = true;
            connection.finish(id);
            self.forget_if_over(connection, http, id);
        }
    }

    /// Resets both directions with an HTTP/3 error code.
    pub(crate) fn abort(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId, code: u64) {
        if self.has(id) {
            self.remove(connection, http, id);
            connection.reset(id, code);
            connection.stop(id, code);
        }
    }

    /// Ends the direction to the peer after what was written, and stops reading (H3_NO_ERROR).
    pub(crate) fn refuse(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if self.has(id) {
            connection.finish(id);
            connection.stop(id, h3::code::NO_ERROR);
            self.remove(connection, http, id);
        }
    }

    fn forget_if_over(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if self.relays.get(&id).is_some_and(|relay| relay.read_ended && relay.write_ended) {
            self.remove(connection, http, id);
        }
    }

    fn remove(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        let removed = self.relays.remove(&id).unwrap_or_default();
        self.held_bytes -= removed.content.iter().map(Bytes::len).sum::<usize>();
        self.in_kernel -= removed.in_kernel;
        match removed.is_visit {
            true => self.visits -= 1,
            false => connection.end_bulk(id),
        }
        http.forget(id);
    }
}

/// Reads an ordinary stream; as [`Connection::read_bulk`].
fn read_in_order(connection: &mut Connection, id: StreamId, mut out: impl FnMut(Bytes)) -> ReadStatus {
    match connection.read(id) {
        Read::Data(data) => {
            out(data);
            ReadStatus::More
        }
        Read::Finished => ReadStatus::Finished,
        Read::Reset(code) => ReadStatus::Reset(code),
        Read::Blocked => ReadStatus::Blocked,
    }
}
