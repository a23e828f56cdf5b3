use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_masque::h3::{Event, H3, H3Error, Settings, Side};
use mpvpn_quic::{Connection, Read, StreamError, StreamId};

use crate::relay::Relays;

/// Streams with state: more than the transport allows.
const MAX_STREAMS: usize = 20_000;

/// HTTP/3 on one connection: moves bytes between its streams and the framing.
#[derive(Debug)]
pub(crate) struct Http {
    h3: H3,
    /// Request streams that came before the peer's SETTINGS, which decide what may be answered. They are
    /// not read until then, so that flow control bounds what waits.
    early: Vec<StreamId>,
    /// Streams that have something to read. One is read only until it says something: what follows may be for a
    /// relay, which reads at its own pace.
    unread: VecDeque<StreamId>,
}

impl Http {
    /// Opens the control and QPACK streams (RFC 9114 §6.2, RFC 9204 §4.2).
    pub(crate) fn start(side: Side, connection: &mut Connection) -> Result<Self, StreamError> {
        let h3 = H3::new(side, Settings { max_streams: MAX_STREAMS, ..Settings::default() });
        let [encoder, decoder] = h3.qpack_prefaces();
        for preface in [h3.control_preface(), encoder, decoder] {
            let stream = connection.open_uni()?;
            connection.write(stream, preface);
        }
        Ok(Self { h3, early: Vec::new(), unread: VecDeque::new() })
    }

    /// A stream has something to read.
    pub(crate) fn readable(&mut self, id: StreamId) {
        let waits = self.h3.peer_settings().is_none() && id.is_multiple_of(4);
        if !waits {
            self.unread.push_back(id);
        } else if !self.early.contains(&id) {
            self.early.push(id);
        }
    }

    /// The next thing that the peer said.
    ///
    /// # Errors
    /// If it breaks HTTP/3: the connection is to be closed.
    pub(crate) fn next(
        &mut self,
        connection: &mut Connection,
        relays: &Relays,
    ) -> Result<Option<Event>, H3Error> {
        loop {
            if let Some(event) = self.h3.poll() {
                return Ok(Some(event));
            }
            if self.h3.peer_settings().is_some() {
                self.unread.extend(self.early.drain(..));
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

    /// Takes bytes of a stream that somebody else has read; what they say comes out of [`Self::poll`].
    pub(crate) fn take(&mut self, id: StreamId, data: Bytes, fin: bool) -> Result<(), H3Error> {
        self.h3.handle_stream(id, data, fin)
    }

    /// What bytes that were taken said.
    pub(crate) fn poll(&mut self) -> Option<Event> {
        self.h3.poll()
    }

    /// Drops what is known of a stream that was given up.
    pub(crate) fn forget(&mut self, id: StreamId) {
        self.h3.forget(id);
    }

    /// Whether the peer, a server, takes extended CONNECT (RFC 9220 §3).
    pub(crate) fn extended_connect_allowed(&self) -> bool {
        self.h3.peer_settings().is_some_and(|settings| settings.enable_connect_protocol)
    }

    /// Whether requests with datagrams can be made: by extended CONNECT (RFC 9220), and with HTTP datagrams (RFC 9297).
    pub(crate) fn masque_allowed(&self) -> bool {
        self.extended_connect_allowed() && self.datagrams_allowed()
    }

    /// Whether HTTP datagrams may be sent: both ends have said so (RFC 9297 §2.1.1).
    pub(crate) fn datagrams_allowed(&self) -> bool {
        self.h3.datagrams_allowed()
    }
}
