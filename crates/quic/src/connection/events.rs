//! The events of a connection, translated from noq's.

use mpvpn_types::{Instant, PathId};
use noq_proto::{ConnectionError, PathEvent, PathStatus, StreamEvent};

use super::{Connection, path_id_of};
use crate::{StreamId, streams::from_noq};

/// An event of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is complete.
    Connected,
    /// The connection has ended.
    Lost(LostReason),
    /// A path was validated and can carry data.
    PathOpened(PathId),
    /// A path was abandoned.
    PathClosed(PathId),
    /// The peer has set the status of a path (PATH_STATUS_AVAILABLE or PATH_STATUS_BACKUP).
    PeerStatus(PathId, PathStatus),
    /// The peer has opened a stream.
    StreamOpened(StreamId),
    /// A stream has data, a FIN or a reset to read.
    StreamReadable(StreamId),
    /// The peer has stopped a stream (STOP_SENDING), with this error code.
    StreamStopped(StreamId, u64),
    /// [`Connection::writable_bytes`] of a stream is above 0 again.
    StreamWritable(StreamId),
    /// The peer allows more streams (MAX_STREAMS).
    StreamsAvailable,
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    /// The peer sent a stateless reset: it has restarted.
    #[error("the peer has restarted and does not know this connection")]
    Reset,
    /// Nothing arrived for the idle timeout.
    #[error("nothing was heard from the peer")]
    TimedOut,
    /// The peer's application closed it.
    #[error("closed by the peer with code {code:#x}: {reason}")]
    Closed {
        /// Application error code.
        code: u64,
        /// The reason phrase of the peer.
        reason: String,
    },
    /// The TLS handshake failed, at this end or at the peer.
    #[error("{0}")]
    Tls(String),
    /// The peer refused the certificate of this end in the TLS handshake, for this reason.
    #[error("the peer refuses the certificate of this end: {0}")]
    CertificateRefused(&'static str),
    /// A QUIC transport error.
    #[error("{0}")]
    Transport(String),
    /// This end closed it.
    #[error("closed by this end")]
    LocallyClosed,
}

impl From<ConnectionError> for LostReason {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Reset => Self::Reset,
            ConnectionError::TimedOut => Self::TimedOut,
            ConnectionError::LocallyClosed => Self::LocallyClosed,
            ConnectionError::ApplicationClosed(close) => Self::Closed {
                code: close.error_code.into(),
                reason: String::from_utf8_lossy(&close.reason).into_owned(),
            },
            ConnectionError::TransportError(error) if is_tls(error.code) => {
                let cause = error.crypto.as_deref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
                Self::Tls(match cause {
                    // A verifier's own words.
                    Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(why))) => {
                        why.to_string()
                    }
                    _ if error.reason.is_empty() => error.to_string(),
                    _ => error.reason,
                })
            }
            ConnectionError::ConnectionClosed(close) if is_tls(close.error_code) => {
                refusal_of_certificate(close.error_code.into()).map_or_else(
                    || Self::Tls(format!("the peer refused it: {}", close.error_code)),
                    Self::CertificateRefused,
                )
            }
            other => Self::Transport(other.to_string()),
        }
    }
}

/// Codes 0x0100 to 0x01ff carry a TLS alert (RFC 9001 §4.8).
fn is_tls(code: noq_proto::TransportErrorCode) -> bool {
    (0x100..0x200).contains(&u64::from(code))
}

/// Why the peer refuses the certificate of this end, by the TLS alert in a code (RFC 8446 §6.2).
fn refusal_of_certificate(code: u64) -> Option<&'static str> {
    match code & 0xff {
        42 => Some("it is damaged, or not for clients"),
        43 => Some("it is of an unsupported type"),
        44 => Some("it was revoked"),
        45 => Some("it has expired, or is not valid yet"),
        46 => Some("it cannot be used"),
        48 => Some("no CA that the peer trusts signed it"),
        116 => Some("none was shown"),
        _ => None,
    }
}

impl Connection {
    /// The peer's certificate (DER), which the handshake has verified; `None` before its end and without one.
    pub fn peer_certificate(&mut self) -> Option<Vec<u8>> {
        let identity = self.guarded(|inner| inner.crypto_session().peer_identity()).flatten()?;
        let chain = identity.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>().ok()?;
        chain.first().map(|leaf| leaf.to_vec())
    }

    /// Translates all pending events of noq.
    pub(super) fn translate_all(&mut self, now: Instant) {
        if std::mem::replace(&mut self.cached.has_no_events, true) {
            return;
        }
        self.contained_read(|connection| {
            while let Some(event) = connection.inner.poll() {
                connection.translate(now, event);
            }
        });
    }

    fn translate(&mut self, now: Instant, event: noq_proto::Event) {
        use noq_proto::Event as Noq;
        match event {
            Noq::Connected => {
                self.gates.end_handshake();
                self.paths.iter().for_each(|path| self.gates.apply_open(&path.gate));
                self.handshake_unsent = true;
                self.start_qlog(now);
                self.events.push_back(Event::Connected);
            }
            Noq::ConnectionLost { reason } => {
                let reason = LostReason::from(reason);
                self.record_lost(now, &reason);
                self.events.push_back(Event::Lost(reason));
            }
            Noq::Path(event) => self.translate_path(now, event),
            Noq::Stream(event) => self.translate_stream(event),
            Noq::HandshakeDataReady
            | Noq::HandshakeConfirmed
            | Noq::DatagramReceived
            | Noq::DatagramsUnblocked
            | Noq::NatTraversal(_) => {}
        }
    }

    fn translate_path(&mut self, now: Instant, event: PathEvent) {
        (self.cached.mtu, self.cached.max_datagram) = (None, None);
        match event {
            PathEvent::Established { id, .. } => {
                let id = path_id_of(id);
                self.add_path(now, id);
                if let Some(path) = self.paths.get_mut(id) {
                    path.open = true;
                    self.events.push_back(Event::PathOpened(id));
                }
            }
            PathEvent::Abandoned { id, .. } => {
                let id = path_id_of(id);
                if let Some(path) = self.paths.remove(id) {
                    self.streams.quotas.forget(path.queue.stream_bytes);
                }
                self.passes.reset();
                self.events.push_back(Event::PathClosed(id));
            }
            PathEvent::RemoteStatus { id, status, .. } => {
                self.events.push_back(Event::PeerStatus(path_id_of(id), status));
            }
            _ => {}
        }
    }

    fn translate_stream(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Opened { dir } => {
                while let Some(id) = self.guarded(|inner| inner.streams().accept(dir)).flatten() {
                    self.streams.receive.note_opened(from_noq(id));
                    self.events.push_back(Event::StreamOpened(from_noq(id)));
                    self.events.push_back(Event::StreamReadable(from_noq(id)));
                }
            }
            StreamEvent::Readable { id } => {
                // noq reports this for every frame.
                let event = Event::StreamReadable(from_noq(id));
                if self.events.back() != Some(&event) {
                    self.streams.receive.note_readable(from_noq(id));
                    self.events.push_back(event);
                }
            }
            StreamEvent::Writable { id } => self.unblock(from_noq(id)),
            StreamEvent::Stopped { id, error_code } => {
                self.drop_writes(from_noq(id));
                self.events.push_back(Event::StreamStopped(from_noq(id), error_code.into()));
            }
            StreamEvent::Available { dir: noq_proto::Dir::Bi } => {
                self.events.push_back(Event::StreamsAvailable)
            }
            StreamEvent::Finished { id } => self.streams.reinjection.forget(from_noq(id)),
            StreamEvent::Available { .. } => {}
        }
    }
}
