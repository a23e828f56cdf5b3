//! Demultiplexes a stream of capsules into DATAGRAM capsules and other bytes, for an intermediary that
//! forwards them.
//!
//! In: the bytes of a stream, in any pieces. Out: the values of DATAGRAM capsules, and all other bytes
//! unchanged. Always holds: no more than one capsule header or one datagram is buffered.

use super::{CapsuleError, DATAGRAM, MAX_DATAGRAM_LEN};
use crate::varint;
use bytes::{Buf, Bytes, BytesMut};

/// Length in bytes of the longest capsule header: two variable-length integers.
const MAX_HEADER: usize = 16;

/// A part of a stream of capsules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CapsulePart {
    /// The value of a DATAGRAM capsule: context ID and payload.
    Datagram(Bytes),
    /// Bytes of another capsule, unchanged.
    Other(Bytes),
}

/// Extracts DATAGRAM capsules from a stream of capsules and passes the others unchanged, whatever the pieces
/// in which the stream arrives: "intermediaries ... SHOULD forward Capsules of unknown types unmodified" (RFC
/// 9297 §3.2).
///
/// Call [`push`](Self::push) with each piece, then [`next`](Self::next) until it returns nothing. It buffers
/// the header of one capsule, or one datagram, and never the values of other capsules. After an error the
/// stream must be aborted.
#[derive(Debug, Default)]
pub struct CapsuleDemux {
    /// Pushed bytes that were not returned yet.
    input: Bytes,
    /// The beginning of a capsule that is incomplete.
    partial_capsule: BytesMut,
    /// Remaining bytes of a capsule that are passed through.
    passthrough_bytes: u64,
}

impl CapsuleDemux {
    /// A demultiplexer at the beginning of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the stream; all parts before must have been taken by [`next`](Self::next).
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "previous bytes must be taken by next() first");
        self.input = bytes;
    }

    /// The next part; `None` until more bytes come.
    ///
    /// # Errors
    /// If a datagram is longer than [`MAX_DATAGRAM_LEN`].
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would end at the first None; this does not"
    )]
    pub fn next(&mut self) -> Result<Option<CapsulePart>, CapsuleError> {
        if self.passthrough_bytes > 0 {
            return Ok(self.pass_through());
        }
        if self.input.is_empty() {
            return Ok(None);
        }
        if self.partial_capsule.is_empty() {
            return self.take_whole();
        }
        let Some((kind, len, header)) = self.complete_header() else { return Ok(None) };
        if kind != DATAGRAM {
            self.passthrough_bytes = len;
            return Ok(Some(CapsulePart::Other(self.partial_capsule.split().freeze())));
        }
        let missing = header + checked_len(len)? - self.partial_capsule.len();
        let some = self.input.split_to(missing.min(self.input.len()));
        self.partial_capsule.extend_from_slice(&some);
        if some.len() < missing {
            return Ok(None);
        }
        let mut capsule = self.partial_capsule.split().freeze();
        capsule.advance(header);
        Ok(Some(CapsulePart::Datagram(capsule)))
    }

    /// Whether the stream is between two capsules, so that another capsule may start here.
    pub fn is_at_boundary(&self) -> bool {
        self.passthrough_bytes == 0 && self.partial_capsule.is_empty() && self.input.is_empty()
    }

    /// Checks that the stream may end here, at its clean end.
    ///
    /// # Errors
    /// If it ends inside a capsule (RFC 9297 §3.3).
    pub fn finish(&self) -> Result<(), CapsuleError> {
        if self.is_at_boundary() { Ok(()) } else { Err(CapsuleError::Truncated) }
    }

    fn pass_through(&mut self) -> Option<CapsulePart> {
        let here = self.passthrough_bytes.min(self.input.len() as u64);
        self.passthrough_bytes -= here;
        (here > 0).then(|| CapsulePart::Other(self.input.split_to(here as usize)))
    }

    /// Reads a capsule from its start in `input`: usually it is complete, and not copied.
    fn take_whole(&mut self) -> Result<Option<CapsulePart>, CapsuleError> {
        let Some((kind, len, header)) = parse_header(&self.input) else {
            self.partial_capsule.extend_from_slice(&std::mem::take(&mut self.input));
            return Ok(None);
        };
        if kind != DATAGRAM {
            self.passthrough_bytes = (header as u64).saturating_add(len);
            return Ok(self.pass_through());
        }
        let whole = header + checked_len(len)?;
        if self.input.len() < whole {
            self.partial_capsule.extend_from_slice(&std::mem::take(&mut self.input));
            return Ok(None);
        }
        let mut capsule = self.input.split_to(whole);
        capsule.advance(header);
        Ok(Some(CapsulePart::Datagram(capsule)))
    }

    /// The header of the partial capsule: type, length of the value, length of the header.
    fn complete_header(&mut self) -> Option<(u64, u64, usize)> {
        while self.partial_capsule.len() < MAX_HEADER
            && parse_header(&self.partial_capsule).is_none()
            && !self.input.is_empty()
        {
            self.partial_capsule.extend_from_slice(&self.input.split_to(1));
        }
        parse_header(&self.partial_capsule)
    }
}

fn parse_header(bytes: &[u8]) -> Option<(u64, u64, usize)> {
    let (kind, at) = varint::decode(bytes)?;
    let (len, len_len) = varint::decode(&bytes[at..])?;
    Some((kind, len, at + len_len))
}

/// The length of a datagram's value, checked against [`MAX_DATAGRAM_LEN`].
fn checked_len(len: u64) -> Result<usize, CapsuleError> {
    usize::try_from(len).ok().filter(|len| *len <= MAX_DATAGRAM_LEN).ok_or(CapsuleError::TooLarge {
        kind: DATAGRAM,
        len,
        max: MAX_DATAGRAM_LEN,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(kind: u64, value: &[u8], out: &mut Vec<u8>) {
        varint::encode(kind, out);
        varint::encode(value.len() as u64, out);
        out.extend(value);
    }

    /// Demultiplexes `stream` in pieces of these sizes: datagrams, and the other bytes.
    fn demultiplex(
        stream: &[u8],
        sizes: &[usize],
    ) -> Result<(Vec<Bytes>, Vec<u8>, CapsuleDemux), CapsuleError> {
        let (mut demux, mut datagrams, mut others) = (CapsuleDemux::new(), Vec::new(), Vec::new());
        let (mut left, mut sizes) = (stream, sizes.iter().cycle());
        while !left.is_empty() {
            let piece = left.len().min(*sizes.next().unwrap_or(&left.len()));
            demux.push(Bytes::copy_from_slice(&left[..piece]));
            left = &left[piece..];
            while let Some(part) = demux.next()? {
                match part {
                    CapsulePart::Datagram(value) => datagrams.push(value),
                    CapsulePart::Other(bytes) => others.extend(bytes),
                }
            }
        }
        Ok((datagrams, others, demux))
    }

    #[test]
    fn a_too_long_datagram_is_an_error_and_another_capsule_of_that_length_is_not() {
        let mut endless = Vec::new();
        varint::encode(DATAGRAM, &mut endless);
        varint::encode(varint::MAX, &mut endless);
        for sizes in [&[1][..], &[100]] {
            assert!(matches!(demultiplex(&endless, sizes), Err(CapsuleError::TooLarge { .. })));
        }
        endless[0] = 0x17;
        endless.extend([1; 1000]);
        let (datagrams, others, demux) = demultiplex(&endless, &[7]).unwrap();
        assert_eq!((datagrams.len(), &others), (0, &endless));
        assert_eq!(demux.finish(), Err(CapsuleError::Truncated));
        assert!(demux.partial_capsule.capacity() <= 64, "nothing of it is kept");
    }

    #[test]
    fn a_capsule_boundary_is_only_between_capsules() {
        let mut stream = Vec::new();
        put(DATAGRAM, b"\0payload", &mut stream);
        put(0x1234, b"unknown", &mut stream);
        let whole = [stream.len() - 10, stream.len()];
        for end in 0..=stream.len() {
            let demux = demultiplex(&stream[..end], &[3]).unwrap().2;
            let between = end == 0 || whole.contains(&end);
            assert_eq!((demux.is_at_boundary(), demux.finish().is_ok()), (between, between), "{end}");
        }
    }

    proptest! {
        #[test]
        fn datagrams_are_extracted_and_the_rest_is_unchanged(
            capsules in prop::collection::vec((0u64..3, prop::collection::vec(any::<u8>(), 0..300)), 0..20),
            sizes in prop::collection::vec(1usize..200, 1..10),
        ) {
            let (mut stream, mut datagrams, mut others) = (Vec::new(), Vec::new(), Vec::new());
            for (kind, value) in &capsules {
                put(*kind, value, &mut stream);
                match *kind {
                    DATAGRAM => datagrams.push(value.clone()),
                    _ => put(*kind, value, &mut others),
                }
            }
            let (found, passed, demux) = demultiplex(&stream, &sizes).unwrap();
            prop_assert_eq!(found, datagrams);
            prop_assert_eq!(passed, others);
            prop_assert!(demux.is_at_boundary());
        }

        #[test]
        fn no_bytes_make_it_panic_or_keep_more_than_a_datagram(
            stream in prop::collection::vec(any::<u8>(), 0..2000),
            sizes in prop::collection::vec(1usize..200, 1..10),
        ) {
            if let Ok((_, _, demux)) = demultiplex(&stream, &sizes) {
                prop_assert!(demux.partial_capsule.len() <= MAX_HEADER + MAX_DATAGRAM_LEN);
            }
        }
    }
}
