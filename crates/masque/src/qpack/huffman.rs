//! The Huffman code of HPACK and QPACK strings (RFC 7541 §5.2 and appendix B).
//!
//! In: strings, or coded bytes. Out: coded bytes, or strings up to a maximum length. Always holds: wrong
//! padding and the end-of-string code are errors.
//!
//! The code is canonical: codes of one length increase with the symbol, and codes of the next length continue
//! where the shorter ones ended. So the code lengths determine all codes, and the tables are computed from
//! them at compile time.

/// Length of the longest code in bits.
const MAX_CODE_BITS: usize = 30;

/// Number of symbols: 256 bytes; the end-of-string code is the one after the last of them.
const SYMBOLS: usize = 256;

/// Code lengths in bits of all byte values (RFC 7541 appendix B).
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
     6, 10, 10, 12, 13,  6,  8, 11, 10, 10,  8, 11,  8,  6,  6,  6,
     5,  5,  5,  6,  6,  6,  6,  6,  6,  6,  7,  8, 15,  6, 12, 10,
    13,  6,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,
     7,  7,  7,  7,  7,  7,  7,  7,  8,  7,  8, 13, 19, 13, 14,  6,
    15,  5,  6,  5,  6,  5,  6,  6,  6,  5,  7,  7,  6,  6,  6,  5,
     6,  7,  6,  5,  5,  6,  7,  7,  7,  7,  7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];

static TABLE: Table = Table::new();

/// The code and its inverse, both from [`LENGTHS`].
struct Table {
    /// Code of each byte, in the low bits.
    codes: [u32; SYMBOLS],
    /// First code of each length.
    first_code: [u32; MAX_CODE_BITS + 1],
    /// Index in `symbols` of the first code of each length.
    first_index: [u16; MAX_CODE_BITS + 1],
    /// Number of codes of each length.
    count: [u16; MAX_CODE_BITS + 1],
    /// Bytes in the order of their codes.
    symbols: [u8; SYMBOLS],
}

impl Table {
    const fn new() -> Self {
        let mut table = Self {
            codes: [0; SYMBOLS],
            first_code: [0; MAX_CODE_BITS + 1],
            first_index: [0; MAX_CODE_BITS + 1],
            count: [0; MAX_CODE_BITS + 1],
            symbols: [0; SYMBOLS],
        };
        let (mut code, mut index, mut len) = (0u32, 0usize, 1usize);
        while len <= MAX_CODE_BITS {
            code <<= 1;
            table.first_code[len] = code;
            table.first_index[len] = index as u16;
            let mut symbol = 0;
            while symbol < SYMBOLS {
                if LENGTHS[symbol] as usize == len {
                    table.codes[symbol] = code;
                    table.symbols[index] = symbol as u8;
                    code += 1;
                    index += 1;
                }
                symbol += 1;
            }
            table.count[len] = index as u16 - table.first_index[len];
            len += 1;
        }
        table
    }
}

/// Bytes that [`encode`] appends for `text`.
pub(super) fn encoded_len(text: &[u8]) -> usize {
    let bits: usize = text.iter().map(|byte| usize::from(LENGTHS[usize::from(*byte)])).sum();
    bits.div_ceil(8)
}

/// Appends `text` in Huffman code, padded with ones.
pub(super) fn encode(text: &[u8], out: &mut Vec<u8>) {
    let (mut bits, mut held) = (0u64, 0u32);
    for byte in text {
        let symbol = usize::from(*byte);
        bits = bits << LENGTHS[symbol] | u64::from(TABLE.codes[symbol]);
        held += u32::from(LENGTHS[symbol]);
        while held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
        }
    }
    if held > 0 {
        out.push((bits << (8 - held)) as u8 | 0xff >> held);
    }
}

/// Why a string cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HuffmanError {
    /// Wrong padding, or the end-of-string code.
    Broken,
    /// More than `max` bytes.
    TooLong,
}

/// Decodes up to `max` bytes.
pub(super) fn decode(coded: &[u8], max: usize) -> Result<Vec<u8>, HuffmanError> {
    let mut text = Vec::with_capacity((coded.len() * 8 / 5).min(max));
    let mut next = coded.iter();
    let (mut bits, mut held) = (0u64, 0u32);
    loop {
        while held <= 32 {
            let Some(byte) = next.next() else { break };
            bits = bits << 8 | u64::from(*byte);
            held += 8;
        }
        let Some((symbol, len)) = symbol(bits, held) else {
            // "A padding strictly longer than 7 bits MUST be treated as a decoding error. A padding not
            // corresponding to the most significant bits of the code for the EOS symbol MUST be treated
            // as a decoding error" (RFC 7541 §5.2). Both also catch a coded EOS.
            let padding = bits & ((1 << held) - 1);
            let is_legal = held < 8 && padding == (1 << held) - 1;
            return if is_legal { Ok(text) } else { Err(HuffmanError::Broken) };
        };
        if text.len() == max {
            return Err(HuffmanError::TooLong);
        }
        text.push(symbol);
        held -= len;
    }
}

/// The symbol at the top of the low `held` bits of `bits`, and its length; `None` if no whole code of
/// a byte is there.
fn symbol(bits: u64, held: u32) -> Option<(u8, u32)> {
    (5..=held.min(MAX_CODE_BITS as u32)).find_map(|len| {
        let code = (bits >> (held - len)) as u32 & ((1 << len) - 1);
        let at = usize::try_from(len).ok()?;
        let offset = code.checked_sub(TABLE.first_code[at])?;
        if offset >= u32::from(TABLE.count[at]) {
            return None;
        }
        Some((TABLE.symbols[usize::from(TABLE.first_index[at]) + offset as usize], len))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    /// RFC 7541 appendix C.4 and C.6.
    #[test]
    fn the_examples_of_rfc_7541_encode_and_decode() {
        let examples = [
            ("www.example.com", "f1e3c2e5f23a6ba0ab90f4ff"),
            ("no-cache", "a8eb10649cbf"),
            ("custom-key", "25a849e95ba97d7f"),
            ("custom-value", "25a849e95bb8e8b4bf"),
            ("302", "6402"),
            ("private", "aec3771a4b"),
            ("Mon, 21 Oct 2013 20:13:21 GMT", "d07abe941054d444a8200595040b8166e082a62d1bff"),
            ("https://www.example.com", "9d29ad171863c78f0b97c8e9ae82ae43d3"),
        ];
        for (text, coded) in examples {
            let mut out = Vec::new();
            encode(text.as_bytes(), &mut out);
            assert_eq!(out, hex(coded), "{text}");
            assert_eq!(decode(&out, 100).as_deref(), Ok(text.as_bytes()));
        }
    }

    /// RFC 7541 appendix B: first, some middle and the last codes.
    #[test]
    fn computed_codes_match_the_table_of_the_rfc() {
        let codes =
            [(0u8, 0x1ff8), (b'0', 0x0), (b'a', 0x3), (b'z', 0x7b), (b'~', 0x1ffd), (255, 0x03ff_ffee)];
        for (symbol, code) in codes {
            assert_eq!(TABLE.codes[usize::from(symbol)], code, "{symbol}");
        }
        let longest = [(10u8, 0x3fff_fffc), (13, 0x3fff_fffd), (22, 0x3fff_fffe)];
        for (symbol, code) in longest {
            assert_eq!(TABLE.codes[usize::from(symbol)], code, "{symbol}");
        }
    }

    #[test]
    fn long_or_wrong_padding_and_the_end_of_string_code_are_errors() {
        assert_eq!(decode(&[0xff], 10), Err(HuffmanError::Broken), "eight bits of padding");
        assert_eq!(decode(&[0b0000_0000], 10), Err(HuffmanError::Broken), "padding of zeros after '0'");
        assert_eq!(decode(&[0b0000_0111], 10).as_deref(), Ok(&b"0"[..]));
        assert_eq!(decode(&[0xff, 0xff, 0xff, 0xff], 10), Err(HuffmanError::Broken), "EOS");
        assert_eq!(decode(&[], 10).as_deref(), Ok(&b""[..]));
    }

    #[test]
    fn output_is_bounded() {
        let mut coded = Vec::new();
        encode(&[b'0'; 11], &mut coded);
        assert_eq!(decode(&coded, 10), Err(HuffmanError::TooLong));
        assert_eq!(decode(&coded, 11).map(|text| text.len()), Ok(11));
    }

    proptest! {
        #[test]
        fn decode_undoes_encode(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut coded = Vec::new();
            encode(&text, &mut coded);
            prop_assert_eq!(coded.len(), encoded_len(&text));
            prop_assert_eq!(decode(&coded, text.len()), Ok(text));
        }

        #[test]
        fn whatever_decodes_encodes_back(coded in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(text) = decode(&coded, 1000) {
                let mut again = Vec::new();
                encode(&text, &mut again);
                prop_assert_eq!(again, coded);
            }
        }
    }
}
