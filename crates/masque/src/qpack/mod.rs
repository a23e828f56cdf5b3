//! QPACK (RFC 9204) without a dynamic table.
//!
//! In: header sections to send, or received field sections. Out: bytes, or fields. Always holds: no state is
//! kept between sections (SETTINGS_QPACK_MAX_TABLE_CAPACITY is 0), so sections never wait for each other; a
//! decoded section is never larger than the given limit.
//!
//! Most instructions on the peer's two QPACK streams are therefore errors: [`EncoderStream`] and
//! [`DecoderStream`] check this.

mod huffman;
mod static_table;
mod streams;

pub use streams::{DecoderStream, EncoderStream};

use crate::headers::{Field, Headers};
use bytes::Bytes;
use huffman::HuffmanError;
use static_table::ENTRIES;

/// Why a field section cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QpackError {
    /// The section ends inside a field line, or a number or string in it is broken.
    #[error("field section is cut short or a number or string in it is broken")]
    Malformed,
    /// The section needs a dynamic table, which was not granted.
    #[error("field section refers to the dynamic table, which has capacity 0")]
    DynamicReference,
    /// An index beyond the static table.
    #[error("static table index {index}, expected at most 98")]
    StaticIndex {
        /// The received index.
        index: u64,
    },
    /// The section is larger than SETTINGS_MAX_FIELD_SECTION_SIZE; the only error that does not close the
    /// connection.
    #[error("field section is larger than {max} bytes")]
    TooLarge {
        /// The limit in bytes.
        max: usize,
    },
}

/// Bytes that RFC 9114 §4.2.2 adds for each field when it counts the size of a section.
const FIELD_OVERHEAD: usize = 32;

/// Encodes a header section: with static table entries where possible, and with Huffman code where it is
/// shorter.
pub fn encode(headers: &Headers) -> Vec<u8> {
    // Required Insert Count 0 and Base 0 (RFC 9204 §4.5.1).
    let mut out = vec![0, 0];
    for field in headers.iter() {
        encode_field(field, &mut out);
    }
    out
}

/// Decodes a field section whose decoded size (RFC 9114 §4.2.2) must not exceed `max_size` bytes.
///
/// # Errors
/// See [`QpackError`]; all but [`QpackError::TooLarge`] are QPACK_DECOMPRESSION_FAILED.
pub fn decode(section: &[u8], max_size: usize) -> Result<Headers, QpackError> {
    let mut input = Input { left: section };
    input.section_prefix()?;
    let mut fields = Vec::new();
    let mut room = max_size;
    while !input.left.is_empty() {
        let field = input.field(room).map_err(|error| match error {
            QpackError::TooLarge { .. } => QpackError::TooLarge { max: max_size },
            error => error,
        })?;
        let size = field.name.len() + field.value.len() + FIELD_OVERHEAD;
        room = room.checked_sub(size).ok_or(QpackError::TooLarge { max: max_size })?;
        fields.push(field);
    }
    Ok(fields.into_iter().collect())
}

fn encode_field(field: &Field, out: &mut Vec<u8>) {
    let same_name = |(name, _): &&(&str, &str)| name.as_bytes() == field.name;
    let exact = ENTRIES.iter().position(|entry| same_name(&entry) && entry.1.as_bytes() == field.value);
    if let (Some(index), false) = (exact, field.is_secret()) {
        return encode_integer(0b1100_0000, 6, index as u64, out);
    }
    // The N bit keeps intermediaries from putting a secret into a dynamic table (RFC 9204 §7.1.3).
    let never = field.is_secret();
    match ENTRIES.iter().position(|entry| same_name(&entry)) {
        Some(index) => {
            encode_integer(if never { 0b0111_0000 } else { 0b0101_0000 }, 4, index as u64, out);
        }
        None => encode_string(if never { 0b0011_0000 } else { 0b0010_0000 }, 3, &field.name, out),
    }
    encode_string(0, 7, &field.value, out);
}

/// Appends a number with a prefix of `bits` bits in the first byte, below the bits of `first` (RFC 7541
/// §5.1).
fn encode_integer(first: u8, bits: u32, value: u64, out: &mut Vec<u8>) {
    let max_in_prefix = (1u64 << bits) - 1;
    if value < max_in_prefix {
        return out.push(first | value as u8);
    }
    out.push(first | max_in_prefix as u8);
    let mut left = value - max_in_prefix;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
}

/// Appends a string whose Huffman flag is the bit above the `bits` bits of its length (RFC 9204 §4.1.2).
fn encode_string(first: u8, bits: u32, text: &[u8], out: &mut Vec<u8>) {
    let coded = huffman::encoded_len(text);
    if coded < text.len() {
        encode_integer(first | 1 << bits, bits, coded as u64, out);
        huffman::encode(text, out);
    } else {
        encode_integer(first, bits, text.len() as u64, out);
        out.extend_from_slice(text);
    }
}

/// Reads a field section from its start.
struct Input<'a> {
    left: &'a [u8],
}

impl Input<'_> {
    /// RFC 9204 §4.5.1: with no dynamic table the Required Insert Count is 0, and a Sign bit of 1 would make
    /// the Base negative, which §4.5.1.2 forbids.
    fn section_prefix(&mut self) -> Result<(), QpackError> {
        if self.integer(8)? != 0 {
            return Err(QpackError::DynamicReference);
        }
        let is_negative = self.peek()? & 0x80 != 0;
        self.integer(7)?;
        if is_negative { Err(QpackError::Malformed) } else { Ok(()) }
    }

    fn field(&mut self, room: usize) -> Result<Field, QpackError> {
        let first = self.peek()?;
        match first {
            // Indexed field line (§4.5.2) and its post-base form (§4.5.3).
            0b1100_0000.. => {
                let (name, value) = self.static_entry(6)?;
                Ok(Field { name, value })
            }
            // Literal with name reference (§4.5.4).
            0b0100_0000..=0b0111_1111 if first & 0b0001_0000 != 0 => {
                let (name, _) = self.static_entry(4)?;
                Ok(Field { name, value: self.string(7, room)? })
            }
            // Literal with literal name (§4.5.6).
            0b0010_0000..=0b0011_1111 => {
                Ok(Field { name: self.string(3, room)?, value: self.string(7, room)? })
            }
            _ => Err(QpackError::DynamicReference),
        }
    }

    fn static_entry(&mut self, bits: u32) -> Result<(Bytes, Bytes), QpackError> {
        let index = self.integer(bits)?;
        let entry = usize::try_from(index).ok().and_then(|index| ENTRIES.get(index));
        let (name, value) = entry.ok_or(QpackError::StaticIndex { index })?;
        Ok((Bytes::from_static(name.as_bytes()), Bytes::from_static(value.as_bytes())))
    }

    fn string(&mut self, bits: u32, room: usize) -> Result<Bytes, QpackError> {
        let is_huffman = self.peek()? >> bits & 1 == 1;
        let len = usize::try_from(self.integer(bits)?).map_err(|_| QpackError::Malformed)?;
        let (text, left) = self.left.split_at_checked(len).ok_or(QpackError::Malformed)?;
        self.left = left;
        if !is_huffman {
            let fits = text.len() <= room;
            return if fits {
                Ok(Bytes::copy_from_slice(text))
            } else {
                Err(QpackError::TooLarge { max: room })
            };
        }
        match huffman::decode(text, room) {
            Ok(text) => Ok(text.into()),
            Err(HuffmanError::TooLong) => Err(QpackError::TooLarge { max: room }),
            Err(HuffmanError::Broken) => Err(QpackError::Malformed),
        }
    }

    fn integer(&mut self, bits: u32) -> Result<u64, QpackError> {
        let max_in_prefix = (1u64 << bits) - 1;
        let first = u64::from(self.take()?) & max_in_prefix;
        if first < max_in_prefix {
            return Ok(first);
        }
        let mut value = max_in_prefix;
        // Nine groups of seven bits are 63 bits: enough for the 62 that must work (RFC 9204 §4.1.1).
        for shift in (0..63).step_by(7) {
            let byte = self.take()?;
            value += u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(QpackError::Malformed)
    }

    fn peek(&self) -> Result<u8, QpackError> {
        self.left.first().copied().ok_or(QpackError::Malformed)
    }

    fn take(&mut self) -> Result<u8, QpackError> {
        let (first, left) = self.left.split_first().ok_or(QpackError::Malformed)?;
        self.left = left;
        Ok(*first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: usize = 16 * 1024;

    fn decoded(section: &[u8]) -> Result<Vec<(String, String)>, QpackError> {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        Ok(decode(section, MAX)?.iter().map(|field| (text(&field.name), text(&field.value))).collect())
    }

    /// RFC 9204 appendix B.1: literal field line with name reference.
    #[test]
    fn the_static_example_of_rfc_9204_decodes() {
        let section = b"\x00\x00\x51\x0b/index.html";
        assert_eq!(decoded(section).unwrap(), [(":path".to_owned(), "/index.html".to_owned())]);
    }

    #[test]
    fn static_entries_take_one_byte_or_two() {
        let mut headers = Headers::response(200);
        headers.push("x-frame-options", "sameorigin");
        assert_eq!(encode(&headers), [0, 0, 0xc0 | 25, 0xff, 98 - 63]);
        assert_eq!(decode(&encode(&headers), MAX).unwrap(), headers);
    }

    #[test]
    fn secrets_are_marked_never_to_be_indexed() {
        let mut headers = Headers::new();
        headers.push("authorization", "Bearer x");
        assert_eq!(encode(&headers)[2] & 0b1111_0000, 0b0111_0000);
        let mut headers = Headers::new();
        headers.push(crate::extensions::FIELD, "v=1, session=:AAAA:");
        assert_eq!(encode(&headers)[2] & 0b1111_0000, 0b0011_0000);
    }

    /// RFC 9204 §2.2.3 and §4.5.1.1: references that reach beyond the Required Insert Count, and counts that
    /// the table cannot have, are QPACK_DECOMPRESSION_FAILED.
    #[test]
    fn every_kind_of_dynamic_reference_is_refused() {
        let sections: [&[u8]; 5] = [
            &[1, 0, 0xd9],           // Required Insert Count 1
            &[0, 0, 0b1000_0000],    // indexed, dynamic
            &[0, 0, 0b0001_0000],    // indexed, post-base
            &[0, 0, 0b0100_0000, 0], // name reference, dynamic
            &[0, 0, 0, 0],           // name reference, post-base
        ];
        for section in sections {
            assert_eq!(decode(section, MAX), Err(QpackError::DynamicReference), "{section:?}");
        }
    }

    #[test]
    fn broken_sections_are_refused() {
        let sections: [&[u8]; 7] = [
            &[],
            &[0],
            &[0, 0x80, 0xd9],                 // negative base
            &[0, 0, 0x51],                    // no value
            &[0, 0, 0x51, 5, b'a'],           // value too short
            &[0, 0, 0x51, 0x81, 0b0000_0000], // Huffman padding of zeros
            // An endless number.
            &[0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0],
        ];
        for section in sections {
            assert_eq!(decode(section, MAX), Err(QpackError::Malformed), "{section:?}");
        }
        assert_eq!(decode(&[0, 0, 0xff, 99 - 63], MAX), Err(QpackError::StaticIndex { index: 99 }));
    }

    #[test]
    fn sections_over_the_limit_are_refused_whatever_makes_them_large() {
        let many = [&[0, 0][..], &[0xd9; 100]].concat();
        assert_eq!(decode(&many, 100 * 42), decode(&many, MAX), ":status 200 counts 42 bytes");
        assert!(decode(&many, 100 * 42).is_ok());
        assert_eq!(decode(&many, 100 * 42 - 1), Err(QpackError::TooLarge { max: 100 * 42 - 1 }));
        for value in ["0".repeat(200), "\u{1}".repeat(200)] {
            let mut headers = Headers::new();
            headers.push("a", value);
            assert_eq!(decode(&encode(&headers), 150), Err(QpackError::TooLarge { max: 150 }));
        }
    }

    proptest! {
        #[test]
        fn decode_undoes_encode(fields in prop::collection::vec(
            (prop_oneof!["[a-z-]{1,20}", Just(":path".to_owned()), Just("cookie".to_owned())],
             prop::collection::vec(any::<u8>(), 0..300)), 0..10)
        ) {
            let mut headers = Headers::new();
            for (name, value) in fields {
                headers.push(name, value);
            }
            prop_assert_eq!(decode(&encode(&headers), MAX), Ok(headers));
        }

        #[test]
        fn no_bytes_make_it_panic_or_exceed_the_limit(
            section in prop::collection::vec(any::<u8>(), 0..200), max in 0usize..400
        ) {
            let section = [&[0, 0][..], &section].concat();
            if let Ok(headers) = decode(&section, max) {
                prop_assert!(headers.section_size() <= max);
            }
        }

        #[test]
        fn numbers_of_any_prefix_survive(
            value in 0..=crate::varint::MAX, shift in 0u32..62, bits in 3u32..=8
        ) {
            let mut bytes = Vec::new();
            encode_integer(0, bits, value >> shift, &mut bytes);
            let mut input = Input { left: &bytes };
            prop_assert_eq!(input.integer(bits), Ok(value >> shift));
            prop_assert!(input.left.is_empty());
        }
    }
}
