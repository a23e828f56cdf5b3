use std::str::FromStr;

use derive_more::{Display, Into};
use serde::{Deserialize, Serialize};

/// The longest name and label in bytes (RFC 1035 §2.3.4).
const MAX: (usize, usize) = (253, 63);

/// A domain in lower case, without dots at its ends: labels of ASCII letters, digits, `-` and `_`.
#[derive(Clone, Debug, Display, Into, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Domain(String);

impl Domain {
    /// The domain as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A text that is not a domain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a domain, as in lan or home.arpa")]
pub struct ParseDomainError(String);

impl FromStr for Domain {
    type Err = ParseDomainError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let domain = text.trim_matches('.').to_ascii_lowercase();
        let is_label = |label: &str| {
            let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            (1..=MAX.1).contains(&label.len()) && label.bytes().all(good)
        };
        match domain.len() <= MAX.0 && domain.split('.').all(is_label) {
            true => Ok(Self(domain)),
            false => Err(ParseDomainError(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Domain {
    type Error = ParseDomainError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_read_in_any_case_and_bounded() {
        assert_eq!(".Home.ARPA.".parse(), Ok(Domain("home.arpa".into())));
        let too_long = ["a".repeat(64), ["abcdefgh"; 32].join(".")];
        for bad in ["", ".", "a..b", "a b", "~.", "--default=a/b", "ä.de"]
            .into_iter()
            .chain(too_long.iter().map(|text| &text[..]))
        {
            assert!(bad.parse::<Domain>().is_err(), "{bad} was taken");
        }
    }
}
