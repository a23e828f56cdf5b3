//! The header field `mpvpn`: the extensions that an end offers or accepts, in a Dictionary (RFC 9651 §3.2).
//!
//! In: header sections, or the members to send. Out: the members of a received field, or the value of one to
//! send. Always holds: a field that does not parse, is too large or has no version counts as absent; values
//! stay out of debug output, as the field has the secret of a session.

use sfv::{Dictionary, FieldType, Key, Parser};

use crate::{
    headers::Headers,
    structured::{Member, Typed, integer},
};

/// Name of the field.
pub const FIELD: &str = "mpvpn";
/// The version of this end. Both ends use the lower one of their versions.
pub const VERSION: u64 = 1;
/// The key of the version, which each field has.
pub const VERSION_KEY: &str = "v";
/// Maximum size of the value in bytes (docs/protocol.md, "Negotiation"); mpvpn sends 0.6 kB at most. Larger:
/// memory of what a peer makes up. Smaller: no room for later extensions.
pub const MAX_BYTES: usize = 4096;
/// Maximum number of keys; mpvpn sends 16 at most. The reasons are those of [`MAX_BYTES`].
pub const MAX_KEYS: usize = 64;

/// The extensions in a request or response.
#[derive(Clone, derive_more::Debug, PartialEq)]
#[debug("{:?}", self.keys().collect::<Vec<_>>())]
pub struct Extensions {
    members: Dictionary,
}

impl Default for Extensions {
    /// The version, and no extensions.
    fn default() -> Self {
        let mut extensions = Self { members: Dictionary::new() };
        extensions.set(VERSION_KEY, integer(VERSION).into());
        extensions
    }
}

impl Extensions {
    /// The extensions in a header section; `None` if it has no valid field.
    pub fn of(headers: &Headers) -> Option<Self> {
        Self::parse(headers.values(FIELD))
    }

    /// Parses the lines of the field, which together are one value (RFC 9651 §4.2).
    pub fn parse<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        let mut value = Vec::new();
        for line in lines {
            value.extend(if value.is_empty() { &b""[..] } else { b", " });
            value.extend(line);
            if value.len() > MAX_BYTES {
                return None;
            }
        }
        let extensions = Self { members: Parser::new(&value).parse().ok()? };
        let is_valid = extensions.members.len() <= MAX_KEYS && extensions.peer_version() > Some(0);
        is_valid.then_some(extensions)
    }

    fn peer_version(&self) -> Option<u64> {
        self.get(VERSION_KEY)?.integer()
    }

    /// The version that both ends know: the lower one of the sender's and [`VERSION`].
    pub fn version(&self) -> u64 {
        self.peer_version().map_or(VERSION, |version| version.min(VERSION))
    }

    /// The member with this key.
    pub fn get(&self, key: &str) -> Option<&Member> {
        self.members.get(key)
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.members.keys().map(|key| key.as_str())
    }

    /// Sets a member. Does nothing for a key that RFC 9651 §3.2 does not allow.
    pub fn set(&mut self, key: &str, member: Member) {
        if let Ok(key) = Key::try_from(key.to_owned()) {
            self.members.insert(key, member);
        }
    }

    /// Keeps the version, and the members whose keys `keep` accepts.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.members.retain(|key, _| key.as_str() == VERSION_KEY || keep(key.as_str()));
    }

    /// The value of the field.
    pub fn value(&self) -> String {
        self.members.serialize().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        headers::Headers,
        structured::{parameters, set_parameter, string_member, strings, strings_member, token_member},
    };

    fn parse(value: &str) -> Option<Extensions> {
        Extensions::parse([value.as_bytes()].into_iter())
    }

    #[test]
    fn a_field_that_was_written_is_read_back() {
        let mut extensions = Extensions::default();
        extensions.set("session", vec![7; 16].into());
        let mut order = integer(2).into();
        set_parameter(&mut order, "copies", 3);
        extensions.set("order", order);
        extensions.set("cc", token_member("bbr").unwrap());
        extensions.set("class", string_member("bulk").unwrap());
        extensions.set("links", true.into());
        extensions.set("dns", strings_member(["10.0.0.1", "fd00::1"]));
        extensions.set("Not a key", true.into());
        let value = extensions.value();
        let expected = "v=1, session=:BwcHBwcHBwcHBwcHBwcHBw==:, order=2;copies=3, cc=bbr, class=\"bulk\", \
                        links, dns=(\"10.0.0.1\" \"fd00::1\")";
        assert_eq!(value, expected);
        let read = parse(&value).unwrap();
        assert_eq!(read, extensions);
        let member = |key| read.get(key).unwrap();
        assert_eq!(member("session").bytes(), Some(&[7; 16][..]));
        assert_eq!(
            (member("order").integer(), parameters(member("order"))["copies"].integer()),
            (Some(2), Some(3))
        );
        assert_eq!((member("cc").token(), member("class").string()), (Some("bbr"), Some("bulk")));
        assert!(member("links").is_true() && !member("cc").is_true());
        assert_eq!(strings(member("dns")).collect::<Vec<_>>(), ["10.0.0.1", "fd00::1"]);
        assert_eq!(strings(member("cc")).count(), 0);
    }

    #[test]
    fn both_ends_use_the_lower_version_and_unknown_keys_do_no_harm() {
        for (value, version) in [
            ("v=1", Some(1)),
            ("v=999999999999999, warp=(1 2);a", Some(1)),
            ("order=2, v=2;from=1", Some(1)),
            ("v=0", None),
            ("v=-1", None),
            ("v=1.0", None),
            ("v", None),
            ("v=(1)", None),
            ("order=2", None),
            ("", None),
        ] {
            assert_eq!(parse(value).map(|extensions| extensions.version()), version, "{value}");
        }
    }

    /// RFC 9651 §4.2: lines are joined, the last one of equal keys counts, and a part that does not parse
    /// makes the whole field count as absent.
    #[test]
    fn lines_are_one_value_which_is_valid_or_absent_as_a_whole() {
        let mut headers = Headers::new();
        headers.push(FIELD, "v=1, order=2");
        headers.push(FIELD, "links,order=4");
        let extensions = Extensions::of(&headers).unwrap();
        assert_eq!(extensions.value(), "v=1, order=4, links");
        headers.push(FIELD, "Order=2");
        assert_eq!(Extensions::of(&headers), None);
        for value in ["v=1,", "v=1 order=2", "v=1, =2", "v=1, session=:a b:", "v=1, x=(1", "v=1;", "1"] {
            assert_eq!(parse(value), None, "{value}");
        }
        assert_eq!(Extensions::of(&Headers::new()), None);
    }

    #[test]
    fn size_and_number_of_keys_are_bounded() {
        let keys = |count: usize| (1..count).fold("v=1".to_owned(), |value, key| format!("{value}, k{key}"));
        assert!(parse(&keys(MAX_KEYS)).is_some());
        assert_eq!(parse(&keys(MAX_KEYS + 1)), None);
        let padded = |bytes: usize| format!("v=1, x=\"{}\"", "y".repeat(bytes - 9));
        assert_eq!(padded(MAX_BYTES).len(), MAX_BYTES);
        assert!(parse(&padded(MAX_BYTES)).is_some());
        assert_eq!(parse(&padded(MAX_BYTES + 1)), None);
        let lines = vec![&b"v=1"[..]; MAX_BYTES];
        assert_eq!(Extensions::parse(lines.into_iter()), None);
    }

    #[test]
    fn values_stay_out_of_debug_output() {
        let extensions = parse("v=1, session=:BwcHBwcHBwcHBwcHBwcHBw==:, links").unwrap();
        assert_eq!(format!("{extensions:?}"), r#"["v", "session", "links"]"#);
    }

    #[test]
    fn a_gateway_keeps_the_version_and_what_it_knows() {
        let mut extensions = parse("order=2, v=1, links, dns=()").unwrap();
        extensions.retain(|key| key == "dns");
        assert_eq!(extensions.value(), "v=1, dns=()");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(value in "(v=1, )?([a-z]{1,2}(=[0-9:?\"(a-c;) ]{0,6})?,? ?){0,8}",
                                  raw in prop::collection::vec(any::<u8>(), 0..60)) {
            for value in [value.as_bytes(), &raw] {
                if let Some(extensions) = Extensions::parse([value].into_iter()) {
                    prop_assert_eq!(extensions.version(), VERSION);
                    prop_assert_eq!(parse(&extensions.value()), Some(extensions));
                }
            }
        }
    }
}
