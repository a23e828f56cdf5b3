//! The subset of URI templates (RFC 6570) that MASQUE proxies may use (RFC 9484 §3, RFC 9298 §2).
//!
//! In: a template such as `https://example.org/.well-known/masque/ip/{target}/{ipproto}/`, or only its path.
//! Out: paths with expanded variables (client), or the variables of a received path (server). Always holds:
//! expressions are in path or query only, and have the form `{a}`, `{a,b}`, `{?a,b}` or `{&a,b}`; a variable
//! is followed by a character that no value contains, so that a path matches in only one way.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::borrow::Cow;

/// Maximum length in bytes of a template, and of a path to match: longer URIs are not in use (RFC 9110 §4.1
/// recommends support for 8000), and a bound limits the work for a hostile path.
const MAX_LEN: usize = 4096;

/// A checked template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    /// `{a,b}`: values separated by commas.
    Simple(Vec<String>),
    /// `{?a,b}` or `{&a,b}`: `name=value` pairs, the first after this character.
    Query(char, Vec<String>),
}

/// Why a text is not a template for a proxy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template is longer than 4096 bytes.
    #[error("template of {len} bytes, expected at most 4096")]
    TooLong {
        /// Bytes given.
        len: usize,
    },
    /// "The URI Template MUST NOT contain any non-ASCII Unicode characters and MUST only contain ASCII
    /// characters in the range 0x21-0x7E" (RFC 9484 §3).
    #[error("template holds a character outside of 0x21 to 0x7e")]
    Characters,
    /// Neither an absolute URI nor a path.
    #[error("template has no scheme, authority and path, and is no path that starts with a slash")]
    NotAbsolute,
    /// A variable before the path, or a fragment.
    #[error("template has a variable outside of path and query, or a fragment")]
    OutsidePath,
    /// An unbalanced brace.
    #[error("template has an unbalanced brace")]
    Braces,
    /// `{+a}`, `{#a}`, `{.a}`, `{/a}`, `{;a}` and what RFC 6570 reserves.
    #[error("template uses operator {operator:?}, expected none, '?' or '&'")]
    Operator {
        /// The operator.
        operator: char,
    },
    /// An invalid variable name, or a level 4 modifier (`{a:3}`, `{a*}`).
    #[error("template uses {name:?} as the name of a variable")]
    Variable {
        /// The text in place of the name.
        name: String,
    },
    /// A variable appears twice.
    #[error("template uses variable {name:?} twice")]
    Repeated {
        /// Name of the variable.
        name: String,
    },
    /// A variable that the protocol requires is missing.
    #[error("template has no variable {name:?}")]
    Missing {
        /// Name of the variable.
        name: &'static str,
    },
    /// Two adjacent expressions, or an expression followed by a literal that a value could contain.
    #[error("variable {name:?} is followed by something that could be part of its value")]
    Ambiguous {
        /// Name of the variable.
        name: String,
    },
}

/// The variables found in a path, by name.
pub type Variables = Vec<(String, String)>;

impl Template {
    /// Parses `text`, an absolute template or the path part of one.
    ///
    /// # Errors
    /// If the RFCs or this implementation do not allow such a template for a proxy.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if text.len() > MAX_LEN {
            return Err(TemplateError::TooLong { len: text.len() });
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TemplateError::Characters);
        }
        let parts = parse_parts(path_of(text)?)?;
        check_names(&parts)?;
        check_borders(&parts)?;
        Ok(Self { parts })
    }

    /// Whether the template has variable `name`.
    pub fn has_variable(&self, name: &str) -> bool {
        self.parts.iter().any(|part| part.names().iter().any(|known| known == name))
    }

    /// The path and query with `values` in place of the variables; variables without a value are empty.
    pub fn expand(&self, values: &[(&str, &str)]) -> String {
        let value_of = |name: &str| values.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let mut path = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(text) => path.push_str(text),
                Part::Simple(names) => {
                    let values: Vec<_> = names.iter().filter_map(|name| value_of(name)).map(escape).collect();
                    path.push_str(&values.join(","));
                }
                Part::Query(first, names) => {
                    let pairs = names.iter().filter_map(|name| Some((name, value_of(name)?)));
                    for (at, (name, value)) in pairs.enumerate() {
                        path.push(if at == 0 { *first } else { '&' });
                        path.extend([name, "=", &escape(value)]);
                    }
                }
            }
        }
        path
    }

    /// The percent-decoded variables of `path`; `None` if the path does not match the template.
    pub fn matches(&self, path: &str) -> Option<Variables> {
        if path.len() > MAX_LEN {
            return None;
        }
        let mut rest = path;
        let mut variables = Vec::new();
        for part in &self.parts {
            rest = match part {
                Part::Literal(text) => rest.strip_prefix(&text[..])?,
                Part::Simple(names) => match_simple(rest, names, &mut variables)?,
                Part::Query(first, names) => match_query(rest, *first, names, &mut variables)?,
            };
        }
        rest.is_empty().then_some(variables)
    }
}

impl Part {
    fn names(&self) -> &[String] {
        match self {
            Self::Literal(_) => &[],
            Self::Simple(names) | Self::Query(_, names) => names,
        }
    }
}

/// Returns the path and query of a template, which may begin with scheme and authority.
fn path_of(text: &str) -> Result<&str, TemplateError> {
    if text.starts_with('/') {
        return Ok(text);
    }
    let (scheme, rest) = text.split_once("://").ok_or(TemplateError::NotAbsolute)?;
    let path_at = rest.find(['/', '?', '#']).ok_or(TemplateError::NotAbsolute)?;
    let (authority, path) = rest.split_at(path_at);
    if scheme.contains(['{', '}']) || authority.contains(['{', '}']) {
        return Err(TemplateError::OutsidePath);
    }
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    if !is_scheme || authority.is_empty() || !path.starts_with('/') {
        return Err(TemplateError::NotAbsolute);
    }
    Ok(path)
}

fn parse_parts(path: &str) -> Result<Vec<Part>, TemplateError> {
    let mut parts = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        let literal_len = rest.find('{').unwrap_or(rest.len());
        let (literal, after) = rest.split_at(literal_len);
        if literal.contains('}') {
            return Err(TemplateError::Braces);
        }
        if literal.contains('#') {
            return Err(TemplateError::OutsidePath);
        }
        if !literal.is_empty() {
            parts.push(Part::Literal(literal.to_owned()));
        }
        let Some(after) = after.strip_prefix('{') else { break };
        let (expression, after) = after.split_once('}').ok_or(TemplateError::Braces)?;
        parts.push(parse_expression(expression)?);
        rest = after;
    }
    Ok(parts)
}

fn parse_expression(expression: &str) -> Result<Part, TemplateError> {
    let operator = expression.chars().next().ok_or(TemplateError::Braces)?;
    match operator {
        '?' | '&' => Ok(Part::Query(operator, parse_names(&expression[1..])?)),
        operator if operator.is_ascii_alphanumeric() || matches!(operator, '_' | '%') => {
            Ok(Part::Simple(parse_names(expression)?))
        }
        operator => Err(TemplateError::Operator { operator }),
    }
}

/// RFC 6570 §2.3: letters, digits, `_`, percent-escapes, and dots within.
fn parse_names(list: &str) -> Result<Vec<String>, TemplateError> {
    let is_name = |name: &str| {
        name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.%".contains(&byte))
            && !name.is_empty()
            && !name.starts_with('.')
            && !name.ends_with('.')
    };
    let check = |name: &str| match is_name(name) {
        true => Ok(name.to_owned()),
        false => Err(TemplateError::Variable { name: name.to_owned() }),
    };
    list.split(',').map(check).collect()
}

fn check_names(parts: &[Part]) -> Result<(), TemplateError> {
    let names: Vec<_> = parts.iter().flat_map(Part::names).collect();
    let repeated = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name));
    match repeated {
        Some((_, name)) => Err(TemplateError::Repeated { name: (*name).clone() }),
        None => Ok(()),
    }
}

/// Checks that every expression is followed by the end, a query expression, or a literal that no value can
/// contain.
fn check_borders(parts: &[Part]) -> Result<(), TemplateError> {
    for (part, next) in parts.iter().zip(parts.iter().skip(1)) {
        let Some(name) = part.names().last() else { continue };
        let is_clear = match next {
            Part::Literal(text) => text.starts_with(is_border),
            Part::Query(..) => true,
            Part::Simple(_) => false,
        };
        if !is_clear {
            return Err(TemplateError::Ambiguous { name: name.clone() });
        }
    }
    Ok(())
}

/// Whether a character ends a value. Inside a value such characters are percent-encoded.
fn is_border(char: char) -> bool {
    matches!(char, '/' | '?' | '&' | '=' | '#' | ',' | ';')
}

fn match_simple<'p>(path: &'p str, names: &[String], out: &mut Variables) -> Option<&'p str> {
    let mut rest = path;
    for (at, name) in names.iter().enumerate() {
        if at > 0 {
            rest = rest.strip_prefix(',')?;
        }
        let (value, after) = split_value(rest);
        out.push((name.clone(), unescape(value)?));
        rest = after;
    }
    Some(rest)
}

/// Matches pairs in any order; a missing pair leaves its variable undefined.
fn match_query<'p>(path: &'p str, first: char, names: &[String], out: &mut Variables) -> Option<&'p str> {
    let mut rest = path;
    let mut separator = first;
    while let Some(pair) = rest.strip_prefix(separator) {
        let Some((key, value)) = pair.split_once('=') else { break };
        let Some(name) = names.iter().find(|name| *name == key) else { break };
        if out.iter().any(|(known, _)| known == name) {
            return None;
        }
        let (value, after) = split_value(value);
        out.push((name.clone(), unescape(value)?));
        rest = after;
        separator = '&';
    }
    Some(rest)
}

fn split_value(path: &str) -> (&str, &str) {
    path.split_at(path.find(is_border).unwrap_or(path.len()))
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

    fn parse(text: &str) -> Result<Template, TemplateError> {
        Template::parse(text)
    }

    fn owned(pairs: &[(&str, &str)]) -> Option<Variables> {
        Some(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// RFC 9484 §3, figure 1.
    #[test]
    fn the_examples_of_rfc_9484_expand_and_match() {
        let examples = [
            (
                "https://example.org/.well-known/masque/ip/{target}/{ipproto}/",
                "/.well-known/masque/ip/2001%3Adb8%3A%3A%2F32/17/",
            ),
            (
                "https://proxy.example.org:4443/masque/ip?t={target}&i={ipproto}",
                "/masque/ip?t=2001%3Adb8%3A%3A%2F32&i=17",
            ),
            (
                "https://proxy.example.org:4443/masque/ip{?target,ipproto}",
                "/masque/ip?target=2001%3Adb8%3A%3A%2F32&ipproto=17",
            ),
        ];
        let values = [("target", "2001:db8::/32"), ("ipproto", "17")];
        for (template, path) in examples {
            let template = parse(template).unwrap();
            assert_eq!(template.expand(&values), path);
            assert_eq!(template.matches(path), owned(&values));
        }
    }

    #[test]
    fn a_literal_template_matches_only_itself() {
        let template = parse("https://masque.example.org/?user=bob").unwrap();
        assert_eq!(template.expand(&[("target", "x")]), "/?user=bob");
        assert_eq!(template.matches("/?user=bob"), Some(vec![]));
        assert_eq!(template.matches("/?user=eve"), None);
    }

    #[test]
    fn asterisks_are_sent_unencoded_and_read_in_both_forms() {
        let template = parse("/.well-known/masque/ip/{target}/{ipproto}/").unwrap();
        let path = template.expand(&[("target", "*"), ("ipproto", "*")]);
        assert_eq!(path, "/.well-known/masque/ip/*/*/");
        assert_eq!(template.matches("/.well-known/masque/ip/%2A/%2a/"), template.matches(&path));
    }

    #[test]
    fn query_pairs_come_in_any_order_but_once() {
        let template = parse("/ip{?target,ipproto}").unwrap();
        assert_eq!(template.matches("/ip?ipproto=6&target=a"), owned(&[("ipproto", "6"), ("target", "a")]));
        assert_eq!(template.matches("/ip?ipproto=6"), owned(&[("ipproto", "6")]));
        assert_eq!(template.matches("/ip"), owned(&[]));
        assert_eq!(template.matches("/ip?target=a&target=b"), None);
        assert_eq!(template.matches("/ip?other=a"), None);
    }

    /// RFC 9484 §3: no operators but the two of form-style queries, variables in path and query only,
    /// absolute, ASCII.
    #[test]
    fn templates_that_proxies_must_not_use_are_refused() {
        for operator in ['+', '#', '.', '/', ';', '=', '!', '@', '|'] {
            let error = parse(&format!("/ip/{{{operator}target}}/")).unwrap_err();
            assert_eq!(error, TemplateError::Operator { operator });
        }
        assert_eq!(parse("https://{target}/"), Err(TemplateError::OutsidePath));
        assert_eq!(parse("https://a/#{target}"), Err(TemplateError::OutsidePath));
        for text in ["ip/{target}", "https:///a", "https://a", "https://a?b", "://a/", ""] {
            assert_eq!(parse(text), Err(TemplateError::NotAbsolute), "{text}");
        }
        assert_eq!(parse("/é"), Err(TemplateError::Characters));
        assert_eq!(parse("/a b"), Err(TemplateError::Characters));
        for text in ["/{target", "/target}", "/{}"] {
            assert_eq!(parse(text), Err(TemplateError::Braces), "{text}");
        }
        for text in ["/{target:3}", "/{target*}", "/{a..b.}", "/{target,}", "/{?}"] {
            assert!(matches!(parse(text), Err(TemplateError::Variable { .. })), "{text}");
        }
        assert_eq!(parse("/{target}/{target}"), Err(TemplateError::Repeated { name: "target".to_owned() }));
        assert_eq!(parse("/{target}x"), Err(TemplateError::Ambiguous { name: "target".to_owned() }));
        assert_eq!(parse("/{target}{ipproto}"), Err(TemplateError::Ambiguous { name: "target".to_owned() }));
    }

    /// RFC 9484 §3: a template "MAY contain other variables".
    #[test]
    fn other_variables_stay_empty() {
        let template = parse("/{user}/{target}{?ipproto,debug}").unwrap();
        assert_eq!(template.expand(&[("target", "*"), ("ipproto", "6")]), "//*?ipproto=6");
        assert!(template.has_variable("user") && !template.has_variable("name"));
    }

    #[test]
    fn broken_escapes_do_not_match() {
        let template = parse("/{target}").unwrap();
        for path in ["/%", "/%2", "/%zz", "/%ff", "/%+1", "/a/b"] {
            assert_eq!(template.matches(path), None, "{path}");
        }
    }

    proptest! {
        #[test]
        fn matching_undoes_expansion(target in "\\PC{0,40}", ipproto in "\\PC{0,10}", which in 0usize..3) {
            let text = ["/{target}/{ipproto}/", "/{target,ipproto}", "/ip{?target,ipproto}"][which];
            let template = parse(text).unwrap();
            let path = template.expand(&[("target", &target), ("ipproto", &ipproto)]);
            prop_assert_eq!(template.matches(&path), owned(&[("target", &target), ("ipproto", &ipproto)]));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[/{}?&=%,a-z#+é]{0,30}", path in "[/?&=%,a-z0-9é]{0,40}") {
            for text in [&text[..], "/{target}/{ipproto}/", "/a{?target,ipproto}"] {
                if let Ok(template) = parse(text) {
                    let expanded = template.expand(&[("target", &path)]);
                    prop_assert!(expanded.starts_with(['/', '?', '&']) || text.is_empty());
                    let found = template.matches(&path).unwrap_or_default();
                    prop_assert!(found.iter().all(|(name, _)| template.has_variable(name)));
                }
            }
        }
    }
}
