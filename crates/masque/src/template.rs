//! The default URI templates of MASQUE proxies (RFC 9484 §3, RFC 9298 §3): a prefix, and two values between
//! slashes.
//!
//! In: two values (client), or the path of a request (server). Out: the path, or its values. Always holds:
//! in a path, values are percent-encoded, so that a path matches in only one way.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::borrow::Cow;

/// Maximum length in bytes of a path to match: longer URIs are not in use (RFC 9110 §4.1 recommends support
/// for 8000), and a bound limits the work for a hostile path.
const MAX_LEN: usize = 4096;

/// A template, by the text before its first value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template(&'static str);

impl Template {
    /// `/.well-known/masque/ip/{target}/{ipproto}/`.
    pub const CONNECT_IP: Self = Self("/.well-known/masque/ip/");
    /// `/.well-known/masque/udp/{target_host}/{target_port}/`.
    pub const CONNECT_UDP: Self = Self("/.well-known/masque/udp/");

    /// The path with these values.
    pub fn expand(self, values: [&str; 2]) -> String {
        let [first, second] = values.map(escape);
        format!("{}{first}/{second}/", self.0)
    }

    /// The percent-decoded values of a path; `None` if it does not match.
    pub fn matches(self, path: &str) -> Option<[String; 2]> {
        if path.len() > MAX_LEN {
            return None;
        }
        let (first, second) = path.strip_prefix(self.0)?.strip_suffix('/')?.split_once('/')?;
        let is_value = |text: &str| !text.contains(is_border);
        if is_value(first) && is_value(second) { Some([unescape(first)?, unescape(second)?]) } else { None }
    }
}

/// Whether a character ends a value. Inside a value such characters are percent-encoded.
fn is_border(char: char) -> bool {
    matches!(char, '/' | '?' | '&' | '=' | '#' | ',' | ';')
}

/// Percent-encodes all characters except unreserved ones (RFC 6570 §3.2.1) and `*`, which a path may contain
/// (RFC 3986 §3.3): deployed servers compare `/*/*/` literally.
fn escape(value: &str) -> Cow<'_, str> {
    const ESCAPED: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'*');
    utf8_percent_encode(value, ESCAPED).into()
}

/// Percent-decodes a value (RFC 3986 §2.1); `None` if an escape is malformed or the result is not UTF-8.
pub fn unescape(value: &str) -> Option<String> {
    let is_escape = |text: &str| {
        text.as_bytes().first_chunk::<2>().is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let decoded = value.split('%').skip(1).all(is_escape).then(|| percent_decode_str(value))?;
    decoded.decode_utf8().ok().map(Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PREFIX: &str = "/.well-known/masque/ip/";

    fn matches(rest: &str) -> Option<[String; 2]> {
        Template::CONNECT_IP.matches(&format!("{PREFIX}{rest}"))
    }

    fn owned(values: [&str; 2]) -> Option<[String; 2]> {
        Some(values.map(str::to_owned))
    }

    /// RFC 9484 §3, figure 1.
    #[test]
    fn the_example_of_rfc_9484_expands_and_matches() {
        let values = ["2001:db8::/32", "17"];
        let path = Template::CONNECT_IP.expand(values);
        assert_eq!(path, "/.well-known/masque/ip/2001%3Adb8%3A%3A%2F32/17/");
        assert_eq!(Template::CONNECT_IP.matches(&path), owned(values));
        assert_eq!(Template::CONNECT_UDP.matches(&path), None);
    }

    #[test]
    fn asterisks_are_sent_unencoded_and_read_in_both_forms() {
        let path = Template::CONNECT_IP.expand(["*", "*"]);
        assert_eq!(path, "/.well-known/masque/ip/*/*/");
        assert_eq!(matches("%2A/%2a/"), Template::CONNECT_IP.matches(&path));
    }

    #[test]
    fn other_paths_do_not_match() {
        assert_eq!(matches("//"), owned(["", ""]));
        for rest in ["", "/", "a", "a/", "a/b", "a/b/c/", "a/b//", "a?b/c/", "a/b,c/", "a/b/?c", "a/b#/"] {
            assert_eq!(matches(rest), None, "{rest}");
        }
        assert_eq!(Template::CONNECT_IP.matches("/.well-known/masque/a/b/"), None);
        let long = "a".repeat(MAX_LEN - PREFIX.len() - "/b/".len());
        assert_eq!(matches(&format!("{long}/b/")), owned([&long, "b"]));
        assert_eq!(matches(&format!("{long}a/b/")), None);
    }

    #[test]
    fn broken_escapes_do_not_match() {
        for value in ["%", "%2", "%zz", "%ff", "%+1"] {
            assert_eq!(matches(&format!("{value}/b/")), None, "{value}");
            assert_eq!(matches(&format!("b/{value}/")), None, "{value}");
        }
    }

    proptest! {
        #[test]
        fn matching_undoes_expansion(first in "\\PC{0,40}", second in "\\PC{0,10}") {
            let path = Template::CONNECT_UDP.expand([&first, &second]);
            prop_assert_eq!(Template::CONNECT_UDP.matches(&path), owned([&first, &second]));
        }

        #[test]
        fn no_path_makes_it_panic(rest in "[/?&=%,a-z0-9é]{0,40}") {
            let _ = matches(&rest);
        }
    }
}
