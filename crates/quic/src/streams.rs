use bytes::Bytes;

/// A stream's number on the wire (RFC 9000 §2.1).
pub type StreamId = u64;

/// The result of reading a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// Bytes, in order.
    Data(Bytes),
    /// The peer has ended the stream.
    Finished,
    /// The peer has reset the stream with this code.
    Reset(u64),
    /// No more data now.
    Blocked,
}

/// Why a stream cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The peer allows no more streams now.
    #[error("the peer allows no more streams")]
    Limit,
}

/// noq's type of a stream ID.
pub(crate) fn to_noq(id: StreamId) -> noq_proto::StreamId {
    let side = if id & 1 == 0 { noq_proto::Side::Client } else { noq_proto::Side::Server };
    let dir = if id & 2 == 0 { noq_proto::Dir::Bi } else { noq_proto::Dir::Uni };
    noq_proto::StreamId::new(side, dir, id >> 2)
}

/// The stream ID on the wire.
pub(crate) fn from_noq(id: noq_proto::StreamId) -> StreamId {
    let side = u64::from(id.initiator().is_server());
    let dir = match id.dir() {
        noq_proto::Dir::Bi => 0,
        noq_proto::Dir::Uni => 2,
    };
    id.index() << 2 | dir | side
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_wire() {
        for id in [0, 1, 2, 3, 4, 7, 1 << 40] {
            assert_eq!(from_noq(to_noq(id)), id);
        }
    }
}
