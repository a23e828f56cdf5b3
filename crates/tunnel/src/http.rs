use bytes::Bytes;
use mpvpn_masque::h3::{Event, H3, H3Error, Settings, Side};
use mpvpn_quic::{Connection, Read, StreamError, StreamId};

/// HTTP/3 on one connection: moves bytes between its streams and the framing.
#[derive(Debug)]
pub(crate) struct Http {
    h3: H3,
    /// Request streams that came before the peer's SETTINGS, which decide what may be answered. They are
    /// not read until then, so that flow control bounds what waits.
    early: Vec<StreamId>,
}

impl Http {
    /// Opens the control and QPACK streams (RFC 9114 §6.2, RFC 9204 §4.2).
    pub(crate) fn start(side: Side, connection: &mut Connection) -> Result<Self, StreamError> {
        let h3 = H3::new(side, Settings::default());
        let [encoder, decoder] = h3.qpack_prefaces();
        for preface in [h3.control_preface(), encoder, decoder] {
            let stream = connection.open_uni()?;
            connection.write(stream, preface);
        }
        Ok(Self { h3, early: Vec::new() })
    }

    /// Reads all that a stream has.
    pub(crate) fn readable(&mut self, connection: &mut Connection, id: StreamId) -> Result<(), H3Error> {
        if self.h3.peer_settings().is_none() && id.is_multiple_of(4) {
            if !self.early.contains(&id) {
                self.early.push(id);
            }
            return Ok(());
        }
        self.read(connection, id)?;
        if self.h3.peer_settings().is_some() {
            for id in std::mem::take(&mut self.early) {
                self.read(connection, id)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, connection: &mut Connection, id: StreamId) -> Result<(), H3Error> {
        loop {
            match connection.read(id) {
                Read::Data(data) => self.h3.handle_stream(id, data, false)?,
                Read::Finished => return self.h3.handle_stream(id, Bytes::new(), true),
                Read::Reset(code) => return self.h3.handle_reset(id, code),
                Read::Blocked => return Ok(()),
            }
        }
    }

    /// The next thing that the peer said.
    pub(crate) fn poll(&mut self) -> Option<Event> {
        self.h3.poll()
    }

    /// Drops what is known of a stream that was given up.
    pub(crate) fn forget(&mut self, id: StreamId) {
        self.h3.forget(id);
    }

    /// Whether HTTP datagrams may be sent: both ends have said so (RFC 9297 §2.1.1).
    pub(crate) fn datagrams_allowed(&self) -> bool {
        self.h3.datagrams_allowed()
    }
}
