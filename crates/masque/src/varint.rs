//! Variable-length integers (RFC 9000 §16).
//!
//! In: numbers below 2^62, or received bytes. Out: 1, 2, 4 or 8 bytes, or the encoded number. Always holds:
//! decoding reads only as many bytes as the first byte announces, and accepts encodings that are longer than
//! needed, as RFC 9000 requires.

use bytes::{Buf, BufMut};

/// Length in bytes of the encoding that [`encode`] writes: 1, 2, 4 or 8.
pub use mpvpn_types::varint_len as len;

/// The largest number that a variable-length integer can hold (2^62 − 1).
pub const MAX: u64 = (1 << 62) - 1;

/// Appends `value` in its shortest form.
///
/// # Panics
/// If `value` is larger than [`MAX`]: such a number has no encoding, and [`decode`] never returns one.
#[inline]
pub fn encode(value: u64, out: &mut impl BufMut) {
    assert!(value <= MAX, "{value} does not fit a variable-length integer");
    encode_in(value, len(value), out);
}

/// Appends `value` as an encoding of exactly `bytes` bytes; returns false and appends nothing if there is
/// none.
#[inline]
pub fn encode_in(value: u64, bytes: usize, out: &mut impl BufMut) -> bool {
    if value > MAX || bytes < len(value) {
        return false;
    }
    match bytes {
        1 => out.put_u8(value as u8),
        2 => out.put_u16(value as u16 | 0x4000),
        4 => out.put_u32(value as u32 | 0x8000_0000),
        8 => out.put_u64(value | 0xc000_0000_0000_0000),
        _ => return false,
    }
    true
}

/// The number at the start of `bytes` and the length of its encoding; `None` if more bytes are needed.
#[inline]
pub fn decode(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let len = 1usize << (first >> 6);
    let rest = bytes.get(1..len)?;
    let value = rest.iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some((value, len))
}

/// Takes the number at the start of contiguous `bytes`; takes nothing and returns `None` if more are needed.
#[inline]
pub fn take(bytes: &mut impl Buf) -> Option<u64> {
    let (value, len) = decode(bytes.chunk())?;
    bytes.advance(len);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 9000 appendix A.1.
    #[test]
    fn the_examples_of_rfc_9000_decode() {
        let examples: [(&[u8], u64); 5] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ];
        for (bytes, value) in examples {
            assert_eq!(decode(bytes), Some((value, bytes.len())));
        }
    }

    #[test]
    fn a_truncated_number_needs_more_bytes() {
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[0x40]), None);
        assert_eq!(decode(&[0x80, 0, 0]), None);
        assert_eq!(decode(&[0xc0, 0, 0, 0, 0, 0, 0]), None);
    }

    proptest! {
        #[test]
        fn encode_then_decode_is_identity(value in 0..=MAX, shift in 0u32..62) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            encode(value, &mut bytes);
            prop_assert_eq!(bytes.len(), len(value));
            prop_assert_eq!(decode(&bytes), Some((value, bytes.len())));
        }
    }
}
