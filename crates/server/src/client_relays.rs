//! The clients' relay requests, as the egress sees them: streams for TCP connections, and flows of UDP
//! payloads.

use std::time::Instant;

use bytes::Bytes;
use mpvpn_egress::Relays;
use mpvpn_masque::connect::ProxyError;
use mpvpn_sockets::splice::{ByteStreams, RelayRead};
use mpvpn_tunnel::{RelayId, Server, UdpId};

/// One relay request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RelayKey {
    Tcp(RelayId),
    Udp(UdpId),
}

/// The relays of a shard's clients.
pub(super) struct ClientRelays<'a>(pub(super) &'a mut Server);

impl ByteStreams for ClientRelays<'_> {
    type Id = RelayKey;

    fn read(&mut self, now: Instant, id: RelayKey) -> RelayRead {
        match id {
            RelayKey::Tcp(id) => self.0.relay_read(now, id),
            RelayKey::Udp(_) => RelayRead::Blocked,
        }
    }

    fn writable_bytes(&mut self, now: Instant, id: RelayKey) -> usize {
        match id {
            RelayKey::Tcp(id) => self.0.relay_writable_bytes(now, id),
            RelayKey::Udp(_) => 0,
        }
    }

    fn write(&mut self, now: Instant, id: RelayKey, data: Bytes) {
        if let RelayKey::Tcp(id) = id {
            self.0.relay_write(now, id, data);
        }
    }

    fn finish(&mut self, _: Instant, id: RelayKey) {
        if let RelayKey::Tcp(id) = id {
            self.0.relay_finish(id);
        }
    }
}

impl Relays for ClientRelays<'_> {
    fn opened(&mut self, _: Instant, id: RelayKey) {
        match id {
            RelayKey::Tcp(id) => self.0.relay_opened(id),
            RelayKey::Udp(id) => self.0.udp_opened(id),
        }
    }

    fn failed(&mut self, _: Instant, id: RelayKey, failure: ProxyError, reason: String) {
        match id {
            RelayKey::Tcp(id) => self.0.relay_failed(id, failure, reason),
            RelayKey::Udp(id) => self.0.udp_failed(id, failure, reason),
        }
    }

    fn abort(&mut self, _: Instant, id: RelayKey) {
        match id {
            RelayKey::Tcp(id) => self.0.relay_abort(id),
            RelayKey::Udp(id) => self.0.udp_close(id),
        }
    }

    fn in_kernel(&mut self, now: Instant, id: RelayKey, bytes: usize) {
        if let RelayKey::Tcp(id) = id {
            self.0.relay_in_kernel(now, id, bytes);
        }
    }

    fn payload(&mut self, now: Instant, id: RelayKey, payload: &[u8]) {
        if let RelayKey::Udp(id) = id {
            self.0.udp_send(now, id, payload);
        }
    }
}
