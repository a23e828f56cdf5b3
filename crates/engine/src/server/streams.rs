//! What clients have asked for, as the egress sees it: streams whose bytes are those of TCP connections, and flows of UDP
//! payloads.

use std::time::Instant;

use bytes::Bytes;
use mpvpn_masque::connect::ProxyError;
use mpvpn_tunnel::{RelayId, Server, UdpId};

use crate::{
    egress::Relays,
    pipe::{ByteStreams, FromStream},
};

/// One thing that a client has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Asked {
    Tcp(RelayId),
    Udp(UdpId),
}

/// Those of a shard's clients.
pub(super) struct Streams<'a>(pub(super) &'a mut Server);

impl ByteStreams for Streams<'_> {
    type Id = Asked;

    fn read(&mut self, now: Instant, id: Asked) -> FromStream {
        match id {
            Asked::Tcp(id) => self.0.relay_read(now, id).into(),
            Asked::Udp(_) => FromStream::Blocked,
        }
    }

    fn room(&mut self, id: Asked) -> usize {
        match id {
            Asked::Tcp(id) => self.0.relay_room(id),
            Asked::Udp(_) => 0,
        }
    }

    fn write(&mut self, _: Instant, id: Asked, data: Bytes) {
        if let Asked::Tcp(id) = id {
            self.0.relay_write(id, data);
        }
    }

    fn finish(&mut self, _: Instant, id: Asked) {
        if let Asked::Tcp(id) = id {
            self.0.relay_finish(id);
        }
    }
}

impl Relays for Streams<'_> {
    fn opened(&mut self, _: Instant, id: Asked) {
        match id {
            Asked::Tcp(id) => self.0.relay_opened(id),
            Asked::Udp(id) => self.0.udp_opened(id),
        }
    }

    fn failed(&mut self, _: Instant, id: Asked, failure: ProxyError, reason: String) {
        match id {
            Asked::Tcp(id) => self.0.relay_failed(id, failure, reason),
            Asked::Udp(id) => self.0.udp_failed(id, failure, reason),
        }
    }

    fn abort(&mut self, _: Instant, id: Asked) {
        match id {
            Asked::Tcp(id) => self.0.relay_abort(id),
            Asked::Udp(id) => self.0.udp_close(id),
        }
    }

    fn payload(&mut self, now: Instant, id: Asked, payload: &[u8]) {
        if let Asked::Udp(id) = id {
            self.0.udp_send(now, id, payload);
        }
    }
}
