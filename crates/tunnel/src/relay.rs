//! Streams that carry the bytes of TCP connections (RFC 9110 §9.3.6, RFC 9114 §4.4), at either end.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    h3::{self, Event as HttpEvent, H3Error},
    headers::Headers,
};
use mpvpn_quic::{Connection, ConnectionHandle, ReadStatus, StreamId};

use crate::http::Http;

/// Bytes of a stream that are taken out of the transport at a time.
const PULL: usize = 64 << 10;

/// A stream that carries the bytes of a TCP connection.
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

/// What a relay has for whom its bytes are for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RelayRead {
    /// These bytes.
    Data(Bytes),
    /// Nothing for now.
    Blocked,
    /// The other side sends nothing more, and everything was read.
    Finished,
    /// The other side has broken it off, or there is no such relay.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Broken,
}

#[derive(Debug, Default)]
struct Relay {
    /// The bytes of DATA frames, not yet read.
    content: VecDeque<Bytes>,
    /// What comes after them.
    end: Option<End>,
    /// A final response, or whatever else came in a HEADERS frame first.
    headers: Option<Headers>,
    /// The reader found nothing, and has not been told that there is something since.
    starved: bool,
    /// Each direction has ended.
    read_ended: bool,
    write_ended: bool,
}

/// The relays of one connection.
#[derive(Debug, Default)]
pub(crate) struct Relays {
    relays: BTreeMap<StreamId, Relay>,
}

impl Relays {
    /// The stream is a relay from now on.
    pub(crate) fn insert(&mut self, connection: &mut Connection, id: StreamId) {
        connection.make_bulk(id);
        self.relays.insert(id, Relay { starved: true, ..Relay::default() });
    }

    /// Whether a stream is one.
    pub(crate) fn has(&self, id: StreamId) -> bool {
        self.relays.contains_key(&id)
    }

    /// Whether the other side has broken a stream off.
    pub(crate) fn is_broken(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_some_and(|relay| relay.end == Some(End::Broken))
    }

    /// Whether nothing more comes on a stream that nobody has read yet.
    pub(crate) fn is_broken_or_over(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_none_or(|relay| relay.end.is_some())
    }

    /// Whether more is to be written to a stream that the other side reads no more, so that it is broken.
    pub(crate) fn breaks_when_stopped(&self, id: StreamId) -> bool {
        self.relays.get(&id).is_some_and(|relay| !relay.write_ended)
    }

    /// All of them.
    pub(crate) fn ids(&self) -> Vec<StreamId> {
        self.relays.keys().copied().collect()
    }

    /// The transport has something for a relay; whether its reader is to be told.
    pub(crate) fn wake(&mut self, id: StreamId) -> bool {
        self.relays.get_mut(&id).is_some_and(|relay| std::mem::take(&mut relay.starved))
    }

    /// Takes what HTTP read of a stream before, or as it became a relay.
    pub(crate) fn handle(&mut self, event: HttpEvent) {
        match event {
            HttpEvent::Data { stream, data } => {
                if let Some(relay) = self.relays.get_mut(&stream) {
                    relay.content.push_back(data);
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
                relay.content.clear();
            }
            relay.end.get_or_insert(end);
        }
    }

    /// Takes what the transport has for a relay, if nothing waits here.
    fn pull(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) -> Result<(), H3Error> {
        let idle = |relay: &Relay| relay.content.is_empty() && relay.end.is_none() && relay.headers.is_none();
        while self.relays.get(&id).is_some_and(idle) {
            let mut problem = None;
            let end = connection.read_bulk(id, PULL, |bytes| {
                problem = problem.take().or(http.take(id, bytes, false).err());
                while let Some(event) = http.poll() {
                    self.handle(event);
                }
            });
            if let Some(error) = problem {
                return Err(error);
            }
            match end {
                ReadStatus::More => continue,
                ReadStatus::Blocked => break,
                ReadStatus::Finished => {
                    http.take(id, Bytes::new(), true)?;
                    while let Some(event) = http.poll() {
                        self.handle(event);
                    }
                }
                ReadStatus::Reset(_) => self.end(id, End::Broken),
            }
        }
        Ok(())
    }

    /// The headers of the answer, once they are there.
    ///
    /// # Errors
    /// If the peer breaks HTTP/3: the connection is to be closed.
    pub(crate) fn answer(
        &mut self,
        connection: &mut Connection,
        http: &mut Http,
        id: StreamId,
    ) -> Result<Option<Headers>, H3Error> {
        self.pull(connection, http, id)?;
        let Some(relay) = self.relays.get_mut(&id) else { return Ok(None) };
        relay.starved = relay.headers.is_none() && relay.end.is_none();
        Ok(relay.headers.take())
    }

    /// The next bytes from the other side.
    ///
    /// # Errors
    /// If the peer breaks HTTP/3: the connection is to be closed.
    pub(crate) fn read(
        &mut self,
        connection: &mut Connection,
        http: &mut Http,
        id: StreamId,
    ) -> Result<RelayRead, H3Error> {
        self.pull(connection, http, id)?;
        let Some(relay) = self.relays.get_mut(&id) else { return Ok(RelayRead::Broken) };
        if let Some(data) = relay.content.pop_front() {
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
                relay.starved = true;
                RelayRead::Blocked
            }
        })
    }

    /// Sends bytes to the other side, as the content of one DATA frame.
    pub(crate) fn write(&mut self, connection: &mut Connection, id: StreamId, data: Bytes) {
        if self.has(id) && !data.is_empty() {
            let header = h3::encode_data_header(data.len());
            connection.write(id, Bytes::copy_from_slice(header.as_ref()));
            connection.write(id, data);
        }
    }

    /// Sends nothing more to the other side.
    pub(crate) fn finish(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if let Some(relay) = self.relays.get_mut(&id) {
            relay.write_ended = true;
            connection.finish(id);
            self.forget_if_over(connection, http, id);
        }
    }

    /// Breaks it off in both directions.
    pub(crate) fn abort(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId, code: u64) {
        if self.relays.remove(&id).is_some() {
            connection.end_bulk(id);
            connection.reset(id, code);
            connection.stop(id, code);
            http.forget(id);
        }
    }

    /// What was written is the last of it, and nothing is read any more.
    pub(crate) fn refuse(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if self.relays.remove(&id).is_some() {
            connection.finish(id);
            connection.stop(id, h3::code::NO_ERROR);
            connection.end_bulk(id);
            http.forget(id);
        }
    }

    fn forget_if_over(&mut self, connection: &mut Connection, http: &mut Http, id: StreamId) {
        if self.relays.get(&id).is_some_and(|relay| relay.read_ended && relay.write_ended) {
            self.relays.remove(&id);
            connection.end_bulk(id);
            http.forget(id);
        }
    }
}
