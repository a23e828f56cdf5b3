use std::{net::IpAddr, str::FromStr};

use derive_more::Display;

/// A pattern of DNS names: a domain with its subdomains (`example.com`), or only the subdomains
/// (`*.example.com`).
#[derive(Clone, Debug, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[display("{}{domain}", if *subdomains_only { "*." } else { "" })]
pub struct DomainPattern {
    /// In lower case, without trailing dot.
    domain: String,
    subdomains_only: bool,
}

impl DomainPattern {
    /// Whether the pattern matches this name, which has no dot at its end.
    pub fn matches(&self, name: &str) -> bool {
        self.matches_labels(&name.split('.').collect::<Vec<_>>())
    }

    /// Whether the pattern matches the name with these labels.
    pub(super) fn matches_labels<L: AsRef<[u8]>>(&self, labels: &[L]) -> bool {
        let mut rest = labels.iter().rev();
        let mut has = |label: &str| {
            rest.next().is_some_and(|other| other.as_ref().eq_ignore_ascii_case(label.as_bytes()))
        };
        self.domain.rsplit('.').all(&mut has) && (!self.subdomains_only || rest.next().is_some())
    }

    /// Whether the pattern matches every name that `other` matches.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let labels: Vec<&str> = other.domain.split('.').collect();
        self.matches_labels(&labels) || self.domain == other.domain && other.subdomains_only
    }
}

/// A text that is not a domain pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a domain: expected example.com (with its subdomains) or *.example.com (subdomains only), in ASCII letters"
)]
pub struct ParseDomainPatternError(String);

impl FromStr for DomainPattern {
    type Err = ParseDomainPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (subdomains_only, domain) = match text.strip_prefix("*.") {
            Some(domain) => (true, domain),
            None => (false, text),
        };
        let domain = domain.strip_suffix('.').unwrap_or(domain);
        let label_is_good = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        let good = domain.len() <= 253
            && domain.split('.').all(label_is_good)
            // An IP address is not a domain: rules have another key for addresses.
            && domain.parse::<IpAddr>().is_err();
        match good {
            true => Ok(Self { domain: domain.to_ascii_lowercase(), subdomains_only }),
            false => Err(ParseDomainPatternError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> DomainPattern {
        text.parse().unwrap()
    }

    fn fits(text: &str, name: &str) -> bool {
        pattern(text).matches_labels(&name.split('.').collect::<Vec<_>>())
    }

    #[test]
    fn a_domain_matches_itself_and_its_subdomains_and_a_star_only_the_subdomains() {
        for (text, name) in [
            ("example.com", "example.com"),
            ("example.com", "a.example.com"),
            ("Example.COM.", "A.b.eXample.com"),
            ("*.example.com", "a.example.com"),
            ("*.example.com", "a.b.example.com"),
            ("com", "example.com"),
        ] {
            assert!(fits(text, name), "{text} {name}");
        }
        for (text, name) in [
            ("example.com", "badexample.com"),
            ("example.com", "com"),
            ("example.com", "example.com.evil.net"),
            ("*.example.com", "example.com"),
            ("a.example.com", "example.com"),
        ] {
            assert!(!fits(text, name), "{text} {name}");
        }
    }

    #[test]
    fn one_pattern_covers_another_if_it_matches_all_its_names() {
        for (one, other) in [
            ("example.com", "example.com"),
            ("example.com", "*.example.com"),
            ("example.com", "a.example.com"),
            ("*.example.com", "*.example.com"),
            ("*.example.com", "a.example.com"),
            ("*.example.com", "*.a.example.com"),
        ] {
            assert!(pattern(one).covers(&pattern(other)), "{one} {other}");
        }
        for (one, other) in
            [("*.example.com", "example.com"), ("a.example.com", "*.example.com"), ("example.com", "com")]
        {
            assert!(!pattern(one).covers(&pattern(other)), "{one} {other}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_that_covers_another_matches_all_its_names(
            one in r"(\*\.)?(a|b)(\.(a|b)){0,2}",
            other in r"(\*\.)?(a|b)(\.(a|b)){0,2}",
            name in r"(a|b)(\.(a|b)){0,4}",
        ) {
            if pattern(&one).covers(&pattern(&other)) && fits(&other, &name) {
                prop_assert!(fits(&one, &name), "{} {} {}", one, other, name);
            }
        }
    }

    #[test]
    fn valid_patterns_are_printed_as_parsed_and_others_are_refused() {
        for text in ["example.com", "*.example.com", "xn--bcher-kva.example", "_sip.a-b.c", "1and1.com"] {
            assert_eq!(pattern(text).to_string(), text);
        }
        let long = ["a"; 128].join(".");
        for bad in ["", ".", "*", "*.", "a..b", "a.*.b", "*a.b", "bücher.example", "a b", "192.0.2.1", &long]
        {
            assert!(bad.parse::<DomainPattern>().unwrap_err().to_string().contains("*.example.com"), "{bad}");
        }
    }
}
