//! The structured field values (RFC 9651) that MASQUE uses, parsed and serialized by the crate `sfv`:
//! Booleans, Strings, a parameter of a List's members, and the members of the Dictionary of
//! [`crate::extensions`].
//!
//! In: the value of one field line, or a member. Out: a value of the type of the field, or nothing: a field
//! value that does not parse is ignored as a whole (RFC 9651 §4.2). Always holds: parameters are checked for
//! their grammar, and unknown ones are then ignored; the length of the field line bounds the memory.

use sfv::{Integer, Item, ItemSerializer, Key, List, Parser, StringRef, TokenRef};

pub use sfv::{BareItem, InnerList, ListEntry as Member, Parameters};

/// `text` as a String (RFC 9651 §3.3.3), without the characters that a String cannot hold.
pub fn encode_string(text: &str) -> String {
    let text: String = text.chars().filter(|char| matches!(char, ' '..='~')).collect();
    StringRef::from_str(&text)
        .map_or_else(|_| String::new(), |text| ItemSerializer::new().bare_item(text).finish())
}

/// The Token value of the parameter `key` in the last member of a List that has such a parameter; `None` if
/// the List is malformed (RFC 9651 §3.1).
pub fn last_token(value: &[u8], key: &str) -> Option<String> {
    last_parameter(value, key, BareItem::token)
}

/// The String value of the parameter `key`, found as by [`last_token`].
pub fn last_string(value: &[u8], key: &str) -> Option<String> {
    last_parameter(value, key, BareItem::string)
}

fn last_parameter(value: &[u8], key: &str, text: fn(&BareItem) -> Option<&str>) -> Option<String> {
    let members: List = Parser::new(value).parse().ok()?;
    members.iter().rev().find_map(|member| Some(text(parameters(member).get(key)?)?.to_owned()))
}

/// The value of a member or of a parameter, by its type.
pub trait Typed {
    /// The value, if it is an Item.
    fn bare_item(&self) -> Option<&BareItem>;

    /// An Integer that is not negative.
    fn integer(&self) -> Option<u64> {
        u64::try_from(self.bare_item()?.as_integer()?).ok()
    }

    /// An Integer from `min` to `max`.
    fn integer_in(&self, min: u8, max: u8) -> Option<u8> {
        u8::try_from(self.integer()?).ok().filter(|number| (min..=max).contains(number))
    }

    /// Whether it is the Boolean true.
    fn is_true(&self) -> bool {
        self.bare_item().and_then(BareItem::as_boolean) == Some(true)
    }

    /// A Token.
    fn token(&self) -> Option<&str> {
        Some(self.bare_item()?.as_token()?.as_str())
    }

    /// A String.
    fn string(&self) -> Option<&str> {
        Some(self.bare_item()?.as_string()?.as_str())
    }

    /// A Byte Sequence.
    fn bytes(&self) -> Option<&[u8]> {
        self.bare_item()?.as_byte_sequence()
    }
}

impl Typed for BareItem {
    fn bare_item(&self) -> Option<&BareItem> {
        Some(self)
    }
}

impl Typed for Member {
    fn bare_item(&self) -> Option<&BareItem> {
        match self {
            Self::Item(item) => Some(&item.bare_item),
            Self::InnerList(_) => None,
        }
    }
}

/// The parameters of a member.
pub fn parameters(member: &Member) -> &Parameters {
    let (Member::Item(Item { params, .. }) | Member::InnerList(InnerList { params, .. })) = member;
    params
}

/// The Strings in an Inner List; items of other types are skipped.
pub fn strings(member: &Member) -> impl Iterator<Item = &str> {
    let items = match member {
        Member::InnerList(list) => &list.items[..],
        Member::Item(_) => &[],
    };
    items.iter().filter_map(|item| item.bare_item.string())
}

/// An Integer; at most the largest one of RFC 9651 §3.3.1.
pub fn integer(number: u64) -> BareItem {
    Integer::try_from(number).unwrap_or(Integer::MAX).into()
}

/// A Token; `None` for a text that is none.
pub fn token_member(text: &str) -> Option<Member> {
    Some(TokenRef::from_str(text).ok()?.into())
}

/// A String; `None` for a text with other characters than those of ASCII.
pub fn string_member(text: &str) -> Option<Member> {
    Some(StringRef::from_str(text).ok()?.into())
}

/// An Inner List of the texts that can be Strings.
pub fn strings_member<T: ToString>(texts: impl IntoIterator<Item = T>) -> Member {
    let item = |text: T| Some(Item::new(StringRef::from_str(&text.to_string()).ok()?));
    InnerList::new(texts.into_iter().filter_map(item).collect()).into()
}

/// Adds a parameter to a member. Does nothing for a key that RFC 9651 §3.1.2 does not allow.
pub fn set_parameter(member: &mut Member, key: &str, value: impl Into<BareItem>) {
    let (Member::Item(Item { params, .. }) | Member::InnerList(InnerList { params, .. })) = member;
    if let Ok(key) = Key::try_from(key.to_owned()) {
        params.insert(key, value.into());
    }
}

#[cfg(test)]
mod tests {
    use BareItem;
    use proptest::prelude::*;

    use super::*;

    fn member(text: &str) -> Option<Member> {
        Some(Parser::new(text).parse::<Item>().ok()?.into())
    }

    #[test]
    fn integers_are_read_with_their_parameters_ignored() {
        let parsed = |text: &str| member(text)?.integer();
        for (text, value) in
            [("2", Some(2)), (" 15;a=1", Some(15)), ("999999999999999", Some(999_999_999_999_999))]
        {
            assert_eq!(parsed(text), value, "{text}");
        }
        for text in ["", "-1", "1.5", "2 3", "x", "1234567890123456"] {
            assert_eq!(parsed(text), None, "{text}");
        }
        assert_eq!(integer(u64::MAX).integer(), Some(999_999_999_999_999));
        let in_range = |text: &str| member(text)?.integer_in(1, 63);
        assert_eq!(["0", "1", "63", "64", "256"].map(in_range), [None, Some(1), Some(63), None, None]);
    }

    #[test]
    fn tokens_are_read_with_their_parameters_ignored() {
        let token = |text: &str| Some(member(text)?.token()?.to_owned());
        for (text, value) in [("cubic", "cubic"), (" bbr;a=1 ", "bbr"), ("*", "*"), ("a/b:c", "a/b:c")] {
            assert_eq!(token(text).as_deref(), Some(value), "{text}");
        }
        for text in ["", "1", "\"bbr\"", "?1", "bbr, cubic", "bbr cubic", "bbr;"] {
            assert_eq!(token(text), None, "{text}");
        }
    }

    #[test]
    fn strings_are_read_with_their_parameters() {
        let found = member(r#" "say \"a\\b\"";first;dscp=46;x="y;z" "#).unwrap();
        assert_eq!(found.string(), Some(r#"say "a\b""#));
        let parameters: Vec<(&str, &BareItem)> =
            parameters(&found).iter().map(|(key, value)| (key.as_str(), value)).collect();
        let text = BareItem::String("y;z".to_owned().try_into().unwrap());
        assert_eq!(parameters, [("first", &true.into()), ("dscp", &46.into()), ("x", &text)]);
        assert_eq!(member("\"\"").unwrap().string(), Some(""));
        for text in ["", "a", "\"a", "\"a\"b", "\"a\";", "\"a\";B", "\"\u{e9}\""] {
            assert_eq!(member(text).and_then(|member| Some(member.string()?.to_owned())), None, "{text}");
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
    fn byte_sequences_are_read() {
        let bytes = |text: &str| Some(member(text)?.bytes()?.to_vec());
        assert_eq!(bytes(":aGVsbG8=:").as_deref(), Some(&b"hello"[..]));
        assert_eq!(bytes(":aGVsbG8:;a=1").as_deref(), Some(&b"hello"[..]), "padding may be missing");
        assert_eq!(bytes("::").as_deref(), Some(&b""[..]));
        for value in ["", ":", "aGVsbG8=", ":a b:", ":aGVsbG8=", ":aGVsbG8=:x", ":aGVs_G8=:"] {
            assert_eq!(bytes(value), None, "{value}");
        }
    }

    #[test]
    fn strings_escape_quotes_and_drop_characters_outside_of_ascii() {
        assert_eq!(encode_string("a \"b\" \\ \n é"), r#""a \"b\" \\  ""#);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(value in "[?:;=\"@a-c0-2 *\\\\-]{0,20}", raw in prop::collection::vec(any::<u8>(), 0..20)) {
            for value in [value.as_bytes(), &raw] {
                prop_assert!(last_token(value, "a").is_none_or(|token| !token.is_empty()));
            }
        }
    }
}
