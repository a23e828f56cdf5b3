//! The streams of clients whose bytes are those of TCP connections, as the egress sees them.

use std::time::Instant;

use bytes::Bytes;
use mpvpn_masque::connect::Failure;
use mpvpn_tunnel::{RelayId, Server};

use crate::{
    egress::Relays,
    pipe::{ByteStreams, FromStream},
};

/// Those of a shard's clients.
pub(super) struct Streams<'a>(pub(super) &'a mut Server);

impl ByteStreams for Streams<'_> {
    type Id = RelayId;

    fn read(&mut self, now: Instant, id: RelayId) -> FromStream {
        self.0.relay_read(now, id).into()
    }

    fn room(&mut self, id: RelayId) -> usize {
        self.0.relay_room(id)
    }

    fn write(&mut self, _: Instant, id: RelayId, data: Bytes) {
        self.0.relay_write(id, data);
    }

    fn finish(&mut self, _: Instant, id: RelayId) {
        self.0.relay_finish(id);
    }
}

impl Relays for Streams<'_> {
    fn opened(&mut self, _: Instant, id: RelayId) {
        self.0.relay_opened(id);
    }

    fn failed(&mut self, _: Instant, id: RelayId, failure: Failure, reason: String) {
        self.0.relay_failed(id, failure, reason);
    }

    fn abort(&mut self, _: Instant, id: RelayId) {
        self.0.relay_abort(id);
    }
}
