//! The few structured field values (RFC 9651) that MASQUE needs: an Item that is a Boolean, an Integer or
//! a Byte Sequence, a String with its parameters, and parameters of a List.
//!
//! In: the value of one field line. Out: what it says, or nothing: a value that does not parse is ignored
//! as a whole (RFC 9651 §4.2). Always holds: parameters are checked for their grammar, and those that nobody
//! asked for are then ignored.

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

/// Parameters of an Item: key, and value as it is written; none where it is the Boolean true.
pub type Parameters<'a> = Vec<(&'a str, Option<&'a str>)>;

/// An Item that is a String, and its parameters.
#[must_use]
pub fn string(value: &[u8]) -> Option<(String, Parameters<'_>)> {
    let quoted = trim(value).strip_prefix(b"\"")?;
    let mut rest = skip_string(quoted)?;
    let mut text = String::new();
    let mut chars = std::str::from_utf8(&quoted[..quoted.len() - rest.len() - 1]).ok()?.chars();
    while let Some(char) = chars.next() {
        text.push(if char == '\\' { chars.next()? } else { char });
    }
    let mut all = Vec::new();
    while !rest.is_empty() {
        let parameter = parameter(rest)?;
        let value = parameter.value.map(std::str::from_utf8).transpose().ok()?;
        all.push((std::str::from_utf8(parameter.key).ok()?, value));
        rest = parameter.rest;
    }
    Some((text, all))
}

/// The value of the parameter `key` where it is a Token, of the last member of a List of Items that has one; nothing if
/// the List is malformed (RFC 9651 §3.1).
#[must_use]
pub fn last_token<'a>(value: &'a [u8], key: &str) -> Option<&'a str> {
    let mut rest = trim(value);
    let mut found = None;
    loop {
        rest = skip_bare_item(rest)?;
        while rest.starts_with(b";") {
            let parameter = parameter(rest)?;
            if parameter.key == key.as_bytes()
                && let Some([b'a'..=b'z' | b'A'..=b'Z' | b'*', ..]) = parameter.value
            {
                found = parameter.value;
            }
            rest = parameter.rest;
        }
        rest = skip_space(rest);
        if rest.is_empty() {
            return std::str::from_utf8(found?).ok();
        }
        rest = skip_space(rest.strip_prefix(b",")?);
    }
}

/// Parameters up to the end (RFC 9651 §4.2.3.2): `*( ";" *SP key [ "=" bare-item ] )`.
fn only_parameters(mut rest: &[u8]) -> Option<()> {
    while !rest.is_empty() {
        rest = parameter(rest)?.rest;
    }
    Some(())
}

struct Parameter<'a> {
    key: &'a [u8],
    /// Without it, the parameter is the Boolean true.
    value: Option<&'a [u8]>,
    rest: &'a [u8],
}

fn parameter(input: &[u8]) -> Option<Parameter<'_>> {
    let input = trim_start(input.strip_prefix(b";")?);
    let behind = skip_key(input)?;
    let key = &input[..input.len() - behind.len()];
    match behind.strip_prefix(b"=") {
        None => Some(Parameter { key, value: None, rest: behind }),
        Some(value) => {
            let rest = skip_bare_item(value)?;
            Some(Parameter { key, value: Some(&value[..value.len() - rest.len()]), rest })
        }
    }
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

/// Spaces and tabs between members of a List.
fn skip_space(input: &[u8]) -> &[u8] {
    skip_while(input, |byte| byte == b' ' || byte == b'\t')
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
    fn strings_are_read_with_their_parameters() {
        let read = string(br#" "say \"a\\b\"";first;dscp=46;x="y;z" "#);
        let parameters = vec![("first", None), ("dscp", Some("46")), ("x", Some("\"y;z\""))];
        assert_eq!(read, Some((r#"say "a\b""#.to_owned(), parameters)));
        assert_eq!(string(b"\"\""), Some((String::new(), Vec::new())));
        for text in ["", "a", "\"a", "\"a\"b", "\"a\";", "\"a\";B", "\"\u{e9}\""] {
            assert_eq!(string(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_last_member_of_a_list_that_says_so_counts() {
        let error = |text: &'static str| last_token(text.as_bytes(), "error");
        assert_eq!(error("proxy; error=dns_error"), Some("dns_error"));
        assert_eq!(error("\"a;b\";x=\"error=c\";error=d ,\t b; error=e;y, c"), Some("e"));
        assert_eq!(error("a; error=\"d\", b; error"), None, "no token");
        for text in ["", ";error=a", "a; error=b,", "a; error=b x", "a error=b", "a, ;error=b", "a;error=b;"]
        {
            assert_eq!(error(text), None, "{text}");
        }
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
                prop_assert!(last_token(value, "a").is_none_or(|token| !token.is_empty()));
                prop_assert!(byte_sequence(value, 8).is_none_or(|bytes| bytes.len() <= 8));
            }
        }
    }
}
