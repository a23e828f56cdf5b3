//! The few structured field values (RFC 9651) that MASQUE needs: an Item that is a Boolean, an Integer or
//! a Byte Sequence.
//!
//! In: the value of one field line. Out: what it says, or nothing: a value that does not parse is ignored
//! as a whole (RFC 9651 §4.2). Always holds: parameters are checked for their grammar and
//! then ignored.

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// Parsers "SHOULD NOT fail" for missing padding or non-zero pad bits (RFC 9651 §4.2.7).
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// An Item that is a Boolean (`?1` or `?0`).
#[must_use]
pub fn boolean(value: &[u8]) -> Option<bool> {
    let (bare, rest) = match trim(value) {
        [b'?', b'1', rest @ ..] => (true, rest),
        [b'?', b'0', rest @ ..] => (false, rest),
        _ => return None,
    };
    only_parameters(rest)?;
    Some(bare)
}

/// An Item that is an Integer and not negative.
#[must_use]
pub fn integer(value: &[u8]) -> Option<u64> {
    let value = trim(value);
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (bare, rest) = value.split_at(digits);
    // "The range of Integers" has 15 digits (RFC 9651 §3.3.1).
    if digits > 15 {
        return None;
    }
    only_parameters(rest)?;
    std::str::from_utf8(bare).ok()?.parse().ok()
}

/// An Item that is a Byte Sequence (`:base64:`) of at most `max` bytes.
#[must_use]
pub fn byte_sequence(value: &[u8], max: usize) -> Option<Vec<u8>> {
    let rest = trim(value).strip_prefix(b":")?;
    let end = rest.iter().position(|byte| *byte == b':')?;
    let (coded, rest) = rest.split_at_checked(end)?;
    only_parameters(&rest[1..])?;
    if coded.len() > max.div_ceil(3) * 4 {
        return None;
    }
    let bytes = BASE64.decode(coded).ok()?;
    (bytes.len() <= max).then_some(bytes)
}

/// `bytes` as a Byte Sequence.
#[must_use]
pub fn encode_byte_sequence(bytes: &[u8]) -> String {
    format!(":{}:", BASE64.encode(bytes))
}

/// `text` as a String (RFC 9651 §3.3.3), without the characters that a String cannot hold.
#[must_use]
pub fn encode_string(text: &str) -> String {
    let mut quoted = String::from('"');
    for char in text.chars().filter(|char| matches!(char, ' '..='~')) {
        if matches!(char, '"' | '\\') {
            quoted.push('\\');
        }
        quoted.push(char);
    }
    quoted.push('"');
    quoted
}

/// Parameters up to the end (RFC 9651 §4.2.3.2): `*( ";" *SP key [ "=" bare-item ] )`.
fn only_parameters(mut rest: &[u8]) -> Option<()> {
    while !rest.is_empty() {
        rest = trim_start(rest.strip_prefix(b";")?);
        rest = skip_key(rest)?;
        if let Some(value) = rest.strip_prefix(b"=") {
            rest = skip_bare_item(value)?;
        }
    }
    Some(())
}

fn skip_key(input: &[u8]) -> Option<&[u8]> {
    let first = input.first()?;
    if !first.is_ascii_lowercase() && *first != b'*' {
        return None;
    }
    Some(skip_while(input, |byte| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte)
    }))
}

fn skip_bare_item(input: &[u8]) -> Option<&[u8]> {
    match input {
        [b'?', b'0' | b'1', rest @ ..] => Some(rest),
        [b'"', rest @ ..] => skip_string(rest),
        [b':', rest @ ..] => {
            let rest = skip_while(rest, |byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte));
            rest.strip_prefix(b":")
        }
        [b'-' | b'@', first, rest @ ..] if first.is_ascii_digit() || *first == b'-' => {
            Some(skip_while(rest, is_number_byte))
        }
        [first, rest @ ..] if first.is_ascii_digit() => Some(skip_while(rest, is_number_byte)),
        [first, rest @ ..] if first.is_ascii_alphabetic() || *first == b'*' => {
            Some(skip_while(rest, |byte| {
                byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte)
            }))
        }
        _ => None,
    }
}

fn skip_string(mut input: &[u8]) -> Option<&[u8]> {
    loop {
        match input {
            [b'"', rest @ ..] => return Some(rest),
            [b'\\', b'"' | b'\\', rest @ ..] => input = rest,
            [b'\\', ..] | [] => return None,
            [b' '..=b'~', rest @ ..] => input = rest,
            _ => return None,
        }
    }
}

fn is_number_byte(byte: u8) -> bool {
    byte.is_ascii_digit() || byte == b'.'
}

fn skip_while(input: &[u8], accept: impl Fn(u8) -> bool) -> &[u8] {
    let end = input.iter().position(|byte| !accept(*byte)).unwrap_or(input.len());
    &input[end..]
}

fn trim_start(input: &[u8]) -> &[u8] {
    skip_while(input, |byte| byte == b' ')
}

fn trim(input: &[u8]) -> &[u8] {
    let input = trim_start(input);
    let end = input.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1);
    &input[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn integers_are_read_with_their_parameters_ignored() {
        for (text, value) in
            [("2", Some(2)), (" 15;a=1", Some(15)), ("999999999999999", Some(999_999_999_999_999))]
        {
            assert_eq!(integer(text.as_bytes()), value, "{text}");
        }
        for text in ["", "-1", "1.5", "2 3", "x", "1234567890123456"] {
            assert_eq!(integer(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn booleans_with_any_parameters_are_read() {
        assert_eq!(boolean(b"?1"), Some(true));
        assert_eq!(boolean(b" ?0 "), Some(false));
        assert_eq!(boolean(br#"?1;a;b=2;c="x\"y"; d=tok/en;e=:AA==:;f=?0;g=-1.5;h=@99"#), Some(true));
    }

    #[test]
    fn anything_else_is_no_boolean() {
        for value in
            ["", "?", "?2", "1", "true", "?1, ?1", "?1 ;a", "?1;", "?1;A", "?1;a=", "?1x", "?1;a=\"x"]
        {
            assert_eq!(boolean(value.as_bytes()), None, "{value}");
        }
    }

    #[test]
    fn byte_sequences_are_read_and_bounded() {
        assert_eq!(byte_sequence(b":aGVsbG8=:", 10).as_deref(), Some(&b"hello"[..]));
        assert_eq!(
            byte_sequence(b":aGVsbG8:;a=1", 10).as_deref(),
            Some(&b"hello"[..]),
            "padding may be missing"
        );
        assert_eq!(byte_sequence(b"::", 10).as_deref(), Some(&b""[..]));
        assert_eq!(byte_sequence(b":aGVsbG8=:", 4), None, "too long");
        for value in ["", ":", "aGVsbG8=", ":a b:", ":aGVsbG8=", ":aGVsbG8=:x", ":aGVs_G8=:"] {
            assert_eq!(byte_sequence(value.as_bytes(), 10), None, "{value}");
        }
    }

    #[test]
    fn strings_escape_quotes_and_drop_what_cannot_be_said() {
        assert_eq!(encode_string("a \"b\" \\ \n é"), r#""a \"b\" \\  ""#);
    }

    proptest! {
        #[test]
        fn byte_sequences_survive(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            prop_assert_eq!(byte_sequence(encode_byte_sequence(&bytes).as_bytes(), 80), Some(bytes));
        }

        #[test]
        fn no_bytes_make_it_panic(value in "[?:;=\"@a-c0-2 *\\\\-]{0,20}", raw in prop::collection::vec(any::<u8>(), 0..20)) {
            for value in [value.as_bytes(), &raw] {
                prop_assert!(boolean(value).is_none() || value.contains(&b'?'));
                prop_assert!(byte_sequence(value, 8).is_none_or(|bytes| bytes.len() <= 8));
            }
        }
    }
}
