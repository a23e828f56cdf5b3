//! The structured field values (RFC 9651) that MASQUE uses, parsed and serialized by the crate `sfv`: an Item
//! of one type, a String with its parameters, and a parameter of a List's members.
//!
//! In: the value of one field line. Out: a value of the type of the field, or nothing: a field value that
//! does not parse is ignored as a whole (RFC 9651 §4.2). Always holds: parameters are checked for their
//! grammar, and unknown ones are then ignored; the length of the field line bounds the memory.

use sfv::{InnerList, Integer, Item, ItemSerializer, List, ListEntry, Parser, StringRef};

pub use sfv::Parameters;

/// An Item that is a Boolean (`?1` or `?0`).
#[must_use]
pub fn boolean(value: &[u8]) -> Option<bool> {
    Parser::new(value).parse_item::<bool>().ok()
}

/// An Item that is an Integer and not negative.
#[must_use]
pub fn integer(value: &[u8]) -> Option<u64> {
    Parser::new(value).parse_item::<Integer>().ok()?.try_into().ok()
}

/// An Item that is a Token (RFC 9651 §3.3.4).
#[must_use]
pub fn token(value: &[u8]) -> Option<String> {
    let item: Item = Parser::new(value).parse().ok()?;
    Some(item.bare_item.as_token()?.as_str().to_owned())
}

/// An Item that is a Byte Sequence (`:base64:`) of at most `max` bytes.
#[must_use]
pub fn byte_sequence(value: &[u8], max: usize) -> Option<Vec<u8>> {
    Parser::new(value).parse_item::<Vec<u8>>().ok().filter(|bytes| bytes.len() <= max)
}

/// `bytes` as a Byte Sequence.
#[must_use]
pub fn encode_byte_sequence(bytes: &[u8]) -> String {
    ItemSerializer::new().bare_item(bytes).finish()
}

/// `text` as a String (RFC 9651 §3.3.3), without the characters that a String cannot hold.
#[must_use]
pub fn encode_string(text: &str) -> String {
    let text: String = text.chars().filter(|char| matches!(char, ' '..='~')).collect();
    StringRef::from_str(&text)
        .map_or_else(|_| String::new(), |text| ItemSerializer::new().bare_item(text).finish())
}

/// An Item that is a String, and its parameters.
#[must_use]
pub fn string(value: &[u8]) -> Option<(String, Parameters)> {
    let Item { bare_item, params } = Parser::new(value).parse().ok()?;
    Some((bare_item.as_string()?.as_str().to_owned(), params))
}

/// The Token value of the parameter `key` in the last member of a List that has such a parameter; `None` if
/// the List is malformed (RFC 9651 §3.1).
#[must_use]
pub fn last_token(value: &[u8], key: &str) -> Option<String> {
    let members: List = Parser::new(value).parse().ok()?;
    members.iter().rev().find_map(|member| {
        let (ListEntry::Item(Item { params, .. }) | ListEntry::InnerList(InnerList { params, .. })) = member;
        Some(params.get(key)?.as_token()?.as_str().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sfv::BareItem;

    use super::*;

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
    fn tokens_are_read_with_their_parameters_ignored() {
        for (text, value) in [("cubic", "cubic"), (" bbr;a=1 ", "bbr"), ("*", "*"), ("a/b:c", "a/b:c")] {
            assert_eq!(token(text.as_bytes()).as_deref(), Some(value), "{text}");
        }
        for text in ["", "1", "\"bbr\"", "?1", "bbr, cubic", "bbr cubic", "bbr;"] {
            assert_eq!(token(text.as_bytes()), None, "{text}");
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
        let (text, parameters) = string(br#" "say \"a\\b\"";first;dscp=46;x="y;z" "#).unwrap();
        assert_eq!(text, r#"say "a\b""#);
        let parameters: Vec<(&str, &BareItem)> =
            parameters.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let text = BareItem::String("y;z".to_owned().try_into().unwrap());
        assert_eq!(parameters, [("first", &true.into()), ("dscp", &46.into()), ("x", &text)]);
        assert_eq!(string(b"\"\""), Some((String::new(), Parameters::new())));
        for text in ["", "a", "\"a", "\"a\"b", "\"a\";", "\"a\";B", "\"\u{e9}\""] {
            assert_eq!(string(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_parameter_of_the_last_member_that_has_it_counts() {
        let error = |text: &str| last_token(text.as_bytes(), "error");
        assert_eq!(error("proxy; error=dns_error").as_deref(), Some("dns_error"));
        assert_eq!(error("\"a;b\";x=\"error=c\";error=d ,\t b; error=e;y, c").as_deref(), Some("e"));
        assert_eq!(error("(a;error=b c);error=d").as_deref(), Some("d"), "an Inner List");
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
    fn strings_escape_quotes_and_drop_characters_outside_of_ascii() {
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
                prop_assert!(token(value).is_none_or(|token| !token.is_empty()));
                prop_assert!(last_token(value, "a").is_none_or(|token| !token.is_empty()));
                prop_assert!(byte_sequence(value, 8).is_none_or(|bytes| bytes.len() <= 8));
            }
        }
    }
}
