//! HTTP/3 on one QUIC connection.
//!
//! In: streams that are readable, and their bytes. Out: HTTP/3 events in the order of arrival. Always holds:
//! a request is not read before the peer's SETTINGS have arrived, and the streams of relays are never read
//! here.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use mpvpn_masque::h3::{Event, H3, H3Error, Settings, Side};
use mpvpn_quic::{Connection, Read, StreamError, StreamId};

use crate::relay::Relays;

/// Streams that the HTTP/3 layer keeps state of: more than the 16,384 requests that the transport allows a
/// peer. Smaller: requests within the limit of the transport fail; larger: no effect.
const MAX_TRACKED_STREAMS: usize = 20_000;

/// Moves bytes between the streams of a connection and the HTTP/3 framing.
#[derive(Debug)]
pub(crate) struct Http {
    h3: H3,
    /// Request streams that arrived before the peer's SETTINGS, which decide what may be answered. They are
    /// not read until then, so flow control bounds their bytes, and the transport's limit of streams
    /// bounds their number. A set, because a stream may become readable often.
    before_settings: BTreeSet<StreamId>,
    /// Readable streams. Each is read up to its next event only: bytes after it may belong to a relay, which
    /// reads at its own pace.
    unread: VecDeque<StreamId>,
}

impl Http {
    /// Opens the control and QPACK streams (RFC 9114 §6.2, RFC 9204 §4.2).
    pub(crate) fn start(side: Side, connection: &mut Connection) -> Result<Self, StreamError> {
        let h3 = H3::new(side, Settings { max_streams: MAX_TRACKED_STREAMS, ..Settings::default() });
        let [encoder, decoder] = h3.qpack_prefaces();
        for preface in [h3.control_preface(), encoder, decoder] {
            let stream = connection.open_uni()?;
            connection.write(stream, preface);
        }
        Ok(Self { h3, before_settings: BTreeSet::new(), unread: VecDeque::new() })
    }

    /// Bytes of incomplete frames.
    pub(crate) fn held_bytes(&self) -> usize {
        self.h3.buffered()
    }

    /// Marks a stream as readable.
    pub(crate) fn readable(&mut self, id: StreamId) {
        if self.h3.peer_settings().is_none() && id.is_multiple_of(4) {
            self.before_settings.insert(id);
        } else {
            self.unread.push_back(id);
        }
    }

    /// Reads streams up to the next HTTP/3 event.
    ///
    /// # Errors
    /// If the peer violates HTTP/3: the connection must be closed.
    pub(crate) fn poll_event(
        &mut self,
        connection: &mut Connection,
        relays: &Relays,
    ) -> Result<Option<Event>, H3Error> {
        loop {
            if let Some(event) = self.h3.poll() {
                return Ok(Some(event));
            }
            if !self.before_settings.is_empty() && self.h3.peer_settings().is_some() {
                self.unread.extend(std::mem::take(&mut self.before_settings));
            }
            let Some(id) = self.unread.front().copied() else { return Ok(None) };
            let read = if relays.has(id) { Read::Blocked } else { connection.read(id) };
            match read {
                Read::Data(data) => {
                    self.h3.handle_stream(id, data, false)?;
                    continue;
                }
                Read::Finished => self.h3.handle_stream(id, Bytes::new(), true)?,
                Read::Reset(code) => self.h3.handle_reset(id, code)?,
                Read::Blocked => {}
            }
            self.unread.pop_front();
        }
    }

    /// Takes bytes of a stream that a relay has read; [`Self::poll_pushed`] returns their events.
    pub(crate) fn push_stream_data(&mut self, id: StreamId, data: Bytes, fin: bool) -> Result<(), H3Error> {
        self.h3.handle_stream(id, data, fin)
    }

    /// The next event of the bytes from [`Self::push_stream_data`].
    pub(crate) fn poll_pushed(&mut self) -> Option<Event> {
        self.h3.poll()
    }

    /// Drops the state of a stream that was reset or ended early.
    pub(crate) fn forget(&mut self, id: StreamId) {
        self.h3.forget(id);
    }

    /// Whether the peer, a server, accepts extended CONNECT (RFC 9220 §3).
    pub(crate) fn extended_connect_allowed(&self) -> bool {
        self.h3.peer_settings().is_some_and(|settings| settings.enable_connect_protocol)
    }

    /// Whether MASQUE requests are possible: extended CONNECT (RFC 9220) with HTTP datagrams (RFC 9297).
    pub(crate) fn masque_allowed(&self) -> bool {
        self.extended_connect_allowed() && self.datagrams_allowed()
    }

    /// Whether HTTP datagrams may be sent: both ends have sent SETTINGS_H3_DATAGRAM (RFC 9297 §2.1.1).
    pub(crate) fn datagrams_allowed(&self) -> bool {
        self.h3.datagrams_allowed()
    }
}
