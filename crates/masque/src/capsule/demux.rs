//! Parts a stream of capsules into datagrams and everything else, for who passes it on.

use super::{CapsuleError, DATAGRAM, MAX_DATAGRAM_LEN};
use crate::varint;
use bytes::{Buf, Bytes, BytesMut};

/// Bytes of the longest header: two variable-length integers.
const MAX_HEADER: usize = 16;

/// What comes out of a [`CapsuleDemux`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CapsulePart {
    /// The value of a DATAGRAM capsule: context ID and payload.
    Datagram(Bytes),
    /// Bytes of another capsule, as they came.
    Other(Bytes),
}

/// Takes DATAGRAM capsules out of a stream of capsules and leaves the others as they are, whatever the pieces it arrives
/// in: "intermediaries ... SHOULD forward Capsules of unknown types unmodified" (RFC 9297 §3.2).
///
/// Call [`push`](Self::push) with each piece, then [`next`](Self::next) until it returns nothing. It holds the header of
/// one capsule, or one datagram, and never what is in other capsules, however long they say they are. After an error the
/// stream is to be aborted.
#[derive(Debug, Default)]
pub struct CapsuleDemux {
    /// What was pushed and not handed out.
    input: Bytes,
    /// The beginning of a capsule of which more has to come.
    begun: BytesMut,
    /// Bytes of a capsule that are passed as they come.
    passing: u64,
}

impl CapsuleDemux {
    /// A sieve at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the stream; everything before must have been taken out.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "what was pushed before is taken first");
        self.input = bytes;
    }

    /// The next part; `None` until more bytes come.
    ///
    /// # Errors
    /// If a datagram is larger than any may be.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would end at the first None; this does not"
    )]
    pub fn next(&mut self) -> Result<Option<CapsulePart>, CapsuleError> {
        if self.passing > 0 {
            return Ok(self.pass());
        }
        if self.input.is_empty() {
            return Ok(None);
        }
        if self.begun.is_empty() {
            return self.take_whole();
        }
        let Some((kind, len, header)) = self.complete_header() else { return Ok(None) };
        if kind != DATAGRAM {
            self.passing = len;
            return Ok(Some(CapsulePart::Other(self.begun.split().freeze())));
        }
        let missing = header + checked(len)? - self.begun.len();
        let some = self.input.split_to(missing.min(self.input.len()));
        self.begun.extend_from_slice(&some);
        if some.len() < missing {
            return Ok(None);
        }
        let mut capsule = self.begun.split().freeze();
        capsule.advance(header);
        Ok(Some(CapsulePart::Datagram(capsule)))
    }

    /// Whether what came so far ends with a capsule, so that another one could follow here.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.passing == 0 && self.begun.is_empty() && self.input.is_empty()
    }

    /// Says whether the stream may end here, at its clean end.
    ///
    /// # Errors
    /// If it ends inside a capsule (RFC 9297 §3.3).
    pub fn finish(&self) -> Result<(), CapsuleError> {
        if self.is_at_boundary() { Ok(()) } else { Err(CapsuleError::Truncated) }
    }

    fn pass(&mut self) -> Option<CapsulePart> {
        let here = self.passing.min(self.input.len() as u64);
        self.passing -= here;
        (here > 0).then(|| CapsulePart::Other(self.input.split_to(here as usize)))
    }

    /// A capsule begins where nothing of it waits: mostly all of it is there, and not copied.
    fn take_whole(&mut self) -> Result<Option<CapsulePart>, CapsuleError> {
        let Some((kind, len, header)) = header_of(&self.input) else {
            self.begun.extend_from_slice(&std::mem::take(&mut self.input));
            return Ok(None);
        };
        if kind != DATAGRAM {
            self.passing = (header as u64).saturating_add(len);
            return Ok(self.pass());
        }
        let whole = header + checked(len)?;
        if self.input.len() < whole {
            self.begun.extend_from_slice(&std::mem::take(&mut self.input));
            return Ok(None);
        }
        let mut capsule = self.input.split_to(whole);
        capsule.advance(header);
        Ok(Some(CapsulePart::Datagram(capsule)))
    }

    /// The header of the capsule that has begun: its type, the length of its value, and its own.
    fn complete_header(&mut self) -> Option<(u64, u64, usize)> {
        while self.begun.len() < MAX_HEADER && header_of(&self.begun).is_none() && !self.input.is_empty() {
            self.begun.extend_from_slice(&self.input.split_to(1));
        }
        header_of(&self.begun)
    }
}

fn header_of(bytes: &[u8]) -> Option<(u64, u64, usize)> {
    let (kind, at) = varint::decode(bytes)?;
    let (len, len_len) = varint::decode(&bytes[at..])?;
    Some((kind, len, at + len_len))
}

/// The length of a datagram's value.
fn checked(len: u64) -> Result<usize, CapsuleError> {
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

    /// All that comes out of `stream` in pieces of these sizes: datagrams, and the other bytes.
    fn sift(stream: &[u8], sizes: &[usize]) -> Result<(Vec<Bytes>, Vec<u8>, CapsuleDemux), CapsuleError> {
        let (mut sieve, mut datagrams, mut others) = (CapsuleDemux::new(), Vec::new(), Vec::new());
        let (mut left, mut sizes) = (stream, sizes.iter().cycle());
        while !left.is_empty() {
            let piece = left.len().min(*sizes.next().unwrap_or(&left.len()));
            sieve.push(Bytes::copy_from_slice(&left[..piece]));
            left = &left[piece..];
            while let Some(sifted) = sieve.next()? {
                match sifted {
                    CapsulePart::Datagram(value) => datagrams.push(value),
                    CapsulePart::Other(bytes) => others.extend(bytes),
                }
            }
        }
        Ok((datagrams, others, sieve))
    }

    #[test]
    fn a_datagram_that_nobody_could_hold_is_an_error_and_another_capsule_of_that_length_is_not() {
        let mut endless = Vec::new();
        varint::encode(DATAGRAM, &mut endless);
        varint::encode(varint::MAX, &mut endless);
        for sizes in [&[1][..], &[100]] {
            assert!(matches!(sift(&endless, sizes), Err(CapsuleError::TooLarge { .. })));
        }
        endless[0] = 0x17;
        endless.extend([1; 1000]);
        let (datagrams, others, sieve) = sift(&endless, &[7]).unwrap();
        assert_eq!((datagrams.len(), &others), (0, &endless));
        assert_eq!(sieve.finish(), Err(CapsuleError::Truncated));
        assert!(sieve.begun.capacity() <= 64, "nothing of it is kept");
    }

    #[test]
    fn only_between_capsules_another_one_fits() {
        let mut stream = Vec::new();
        put(DATAGRAM, b"\0payload", &mut stream);
        put(0x1234, b"unknown", &mut stream);
        let whole = [stream.len() - 10, stream.len()];
        for end in 0..=stream.len() {
            let sieve = sift(&stream[..end], &[3]).unwrap().2;
            let between = end == 0 || whole.contains(&end);
            assert_eq!((sieve.is_at_boundary(), sieve.finish().is_ok()), (between, between), "{end}");
        }
    }

    proptest! {
        #[test]
        fn datagrams_come_out_and_the_rest_stays_as_it_is(
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
            let (found, passed, sieve) = sift(&stream, &sizes).unwrap();
            prop_assert_eq!(found, datagrams);
            prop_assert_eq!(passed, others);
            prop_assert!(sieve.is_at_boundary());
        }

        #[test]
        fn no_bytes_make_it_panic_or_keep_more_than_a_datagram(
            stream in prop::collection::vec(any::<u8>(), 0..2000),
            sizes in prop::collection::vec(1usize..200, 1..10),
        ) {
            if let Ok((_, _, sieve)) = sift(&stream, &sizes) {
                prop_assert!(sieve.begun.len() <= MAX_HEADER + MAX_DATAGRAM_LEN);
            }
        }
    }
}
