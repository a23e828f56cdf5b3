use std::{fmt, net::IpAddr, str::FromStr};

/// Names of DNS: a domain with everything below it (`example.com`), or only what is below (`*.example.com`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainPattern {
    /// In lower case, without the last dot.
    domain: String,
    below_only: bool,
}

impl DomainPattern {
    /// Whether it stands for the name with these labels.
    pub(super) fn fits<L: AsRef<[u8]>>(&self, labels: &[L]) -> bool {
        let mut rest = labels.iter().rev();
        let mut has = |label: &str| {
            rest.next().is_some_and(|other| other.as_ref().eq_ignore_ascii_case(label.as_bytes()))
        };
        self.domain.rsplit('.').all(&mut has) && (!self.below_only || rest.next().is_some())
    }

    /// Whether it stands for every name that `other` stands for.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let labels: Vec<&str> = other.domain.split('.').collect();
        self.fits(&labels) || self.domain == other.domain && other.below_only
    }
}

impl fmt::Display for DomainPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below_only { "*." } else { "" }, self.domain)
    }
}

/// Something that is no pattern of names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a domain: expected one as in example.com (and all below it) or *.example.com (below only), in letters of \
     ASCII"
)]
pub struct ParseDomainPatternError(String);

impl FromStr for DomainPattern {
    type Err = ParseDomainPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (below_only, domain) = match text.strip_prefix("*.") {
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
            // Somebody who writes an address means the address.
            && domain.parse::<IpAddr>().is_err();
        match good {
            true => Ok(Self { domain: domain.to_ascii_lowercase(), below_only }),
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
        pattern(text).fits(&name.split('.').collect::<Vec<_>>())
    }

    #[test]
    fn a_domain_is_itself_and_all_below_it_and_a_star_only_what_is_below() {
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
    fn one_pattern_covers_another_if_it_stands_for_all_its_names() {
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
        fn who_covers_another_fits_all_that_it_fits(
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
    fn what_is_printed_is_read_back_and_the_rest_is_refused() {
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
