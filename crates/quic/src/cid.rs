//! Connection IDs that encode the shard (thread) that owns the connection.
//!
//! In: the number of this shard, and of all shards. Out: connection IDs, and the shard of a received UDP
//! payload. Always holds: the low four bits of the first byte, modulo the number of shards, are the shard's
//! number; all other bits look random. So one byte selects the socket among those that share a port, whatever
//! addresses a connection's paths have.

use aws_lc_rs::hmac;
use noq_proto::{ConnectionId, ConnectionIdGenerator, InvalidCid, RandomConnectionIdGenerator};

/// Shards of one endpoint at most: four bits of a connection ID.
pub const MAX_SHARDS: u8 = 16;

/// The bits of a connection ID's first byte that encode the shard.
const SHARD_MASK: u8 = MAX_SHARDS - 1;
/// Bytes of a client's first Destination Connection ID: the most that QUIC allows; RFC 9000 §7.2 asks for 8
/// or more unpredictable ones.
const FIRST_CID_LEN: usize = 20;
/// Random bytes of a generated connection ID. noq chooses a server's answer in a Retry (RFC 9000 §17.2.5)
/// without a look at the IDs in use: with a million in use, one Retry in a million leads its client to a
/// connection of another, where it waits in vain until it gives up. Fewer: more such clients; more: fewer
/// bytes for the signature.
const RANDOM_LEN: usize = 5;
/// Bytes that show whose ID it is. More: fewer random ones; fewer: more stateless resets as answers to
/// packets with IDs that were never generated here.
const SIGNATURE_LEN: usize = 3;

/// One of the threads that share the work of a server or a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard {
    index: u8,
    count: u8,
}

impl Shard {
    /// The only shard.
    pub const ONLY: Self = Self { index: 0, count: 1 };

    /// All of `count` shards; `count` is brought into the range from 1 to [`MAX_SHARDS`].
    pub fn all(count: u8) -> impl ExactSizeIterator<Item = Self> {
        let count = count.clamp(1, MAX_SHARDS);
        (0..count).map(move |index| Self { index, count })
    }

    /// The number of the shard, from 0.
    pub fn index(self) -> u8 {
        self.index
    }

    /// The number of shards.
    pub fn count(self) -> u8 {
        self.count
    }

    fn owns(self, first_byte: u8) -> bool {
        (first_byte & SHARD_MASK) % self.count == self.index
    }
}

/// The number of the shard, of `shards`, that owns a received UDP payload; any number if it is no QUIC
/// packet.
pub fn shard_of(payload: &[u8], shards: u8) -> u8 {
    // The destination connection ID follows the first byte, or, in long headers, the version and
    // the ID's length (RFC 9000 §17).
    let at = if payload.first().is_some_and(|flags| flags & 0x80 != 0) { 6 } else { 1 };
    payload.get(at).map_or(0, |byte| (byte & SHARD_MASK) % shards.max(1))
}

/// Generates and validates the connection IDs of one shard.
///
/// IDs of other shards are invalid here: a packet that reaches the wrong shard is dropped, instead of being
/// answered with a stateless reset that would end a working connection.
pub(crate) struct ShardCids {
    shard: Shard,
    key: hmac::Key,
}

impl ShardCids {
    /// IDs that were generated with the same `key` stay valid after a restart.
    pub(crate) fn new(shard: Shard, key: u64) -> Self {
        Self { shard, key: hmac::Key::new(hmac::HMAC_SHA256, &key.to_be_bytes()) }
    }

    /// The last bytes of the ID with these random bytes.
    fn signature(&self, random: &[u8]) -> [u8; SIGNATURE_LEN] {
        let mut signature = [0; SIGNATURE_LEN];
        signature.copy_from_slice(&hmac::sign(&self.key, random).as_ref()[..SIGNATURE_LEN]);
        signature
    }
}

impl ConnectionIdGenerator for ShardCids {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut random = RandomConnectionIdGenerator::new(RANDOM_LEN);
        loop {
            let id = random.generate_cid();
            if self.shard.owns(id[0]) {
                return ConnectionId::new(&[&id[..], &self.signature(&id)].concat());
            }
        }
    }

    fn validate(&self, id: ConnectionId) -> Result<(), InvalidCid> {
        let (random, signature) = id.split_at_checked(RANDOM_LEN).ok_or(InvalidCid)?;
        let valid = self.shard.owns(random[0]) && signature == self.signature(random);
        if valid { Ok(()) } else { Err(InvalidCid) }
    }

    fn cid_len(&self) -> usize {
        RANDOM_LEN + SIGNATURE_LEN
    }

    fn cid_lifetime(&self) -> Option<mpvpn_types::Duration> {
        None
    }
}

/// A random first Destination Connection ID, with `value` in the low four bits of its first byte.
pub(crate) fn first_cid(value: u8) -> ConnectionId {
    let mut bytes = [0; FIRST_CID_LEN];
    bytes.copy_from_slice(&RandomConnectionIdGenerator::new(FIRST_CID_LEN).generate_cid());
    bytes[0] = bytes[0] & !SHARD_MASK | value & SHARD_MASK;
    ConnectionId::new(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(id: &[u8]) -> Vec<u8> {
        [&[0x40], id, &[0; 20]].concat()
    }

    fn long(id: &[u8]) -> Vec<u8> {
        [&[0xc0, 0, 0, 0, 1, id.len() as u8], id, &[0; 20]].concat()
    }

    #[test]
    fn the_ids_of_a_shard_select_it_and_are_valid_only_there() {
        for count in 1..=MAX_SHARDS {
            for shard in Shard::all(count) {
                let mut ids = ShardCids::new(shard, 7);
                for _ in 0..50 {
                    let id = ids.generate_cid();
                    assert_eq!(shard_of(&short(&id), count), shard.index());
                    assert_eq!(shard_of(&long(&id), count), shard.index());
                    for other in Shard::all(count) {
                        let valid = ShardCids::new(other, 7).validate(id).is_ok();
                        assert_eq!(valid, other == shard, "{shard:?} {other:?}");
                    }
                    assert!(ShardCids::new(shard, 8).validate(id).is_err(), "another server's");
                }
            }
        }
    }

    #[test]
    fn ids_are_as_random_as_they_may_be() {
        let [_, second] = [0, 1].map(|index| Shard::all(2).nth(index).unwrap());
        let mut ids = ShardCids::new(second, 7);
        let firsts: std::collections::BTreeSet<u8> = (0..5000).map(|_| ids.generate_cid()[0]).collect();
        assert_eq!(firsts.len(), 128, "half of the values of a byte");
    }

    #[test]
    fn twenty_thousand_ids_differ() {
        let mut ids = ShardCids::new(Shard::ONLY, 7);
        let all: std::collections::BTreeSet<Vec<u8>> =
            (0..20_000).map(|_| ids.generate_cid().to_vec()).collect();
        assert_eq!(all.len(), 20_000);
    }

    #[test]
    fn a_restart_with_another_number_of_shards_recognises_old_ids() {
        let id = ShardCids::new(Shard::ONLY, 7).generate_cid();
        for count in 1..=MAX_SHARDS {
            let at = shard_of(&short(&id), count);
            let shard = Shard::all(count).nth(usize::from(at)).unwrap();
            assert!(ShardCids::new(shard, 7).validate(id).is_ok(), "{count} shards");
        }
    }

    #[test]
    fn a_client_chooses_the_shard_of_its_first_packet() {
        for value in 0..MAX_SHARDS {
            let (one, other) = (first_cid(value), first_cid(value));
            assert_ne!(one[..], other[..]);
            assert_eq!(shard_of(&long(&one), 16), value);
            assert_eq!(shard_of(&long(&one), 2), value % 2);
        }
    }

    #[test]
    fn payloads_that_are_too_short_select_some_shard() {
        for length in 0..7 {
            assert_eq!(shard_of(&[0xff; 7][..length], 4), 0, "{length} bytes");
        }
        assert_eq!(shard_of(&[0x40], 4), 0);
    }
}
