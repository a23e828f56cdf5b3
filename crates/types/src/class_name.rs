use std::str::FromStr;

use derive_more::Display;

/// The name of a traffic class: 1 to 16 lowercase ASCII letters, digits, `-` and `_`.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub struct ClassName(String);

impl ClassName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A text that is not a valid class name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a class name: expected 1 to 16 lowercase letters, digits, - or _")]
pub struct ParseClassNameError(String);

impl FromStr for ClassName {
    type Err = ParseClassNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_allowed =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
        match (1..=16).contains(&text.len()) && text.bytes().all(is_allowed) {
            true => Ok(Self(text.to_owned())),
            false => Err(ParseClassNameError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_names_have_1_to_16_lowercase_letters_digits_and_dashes() {
        for text in ["a", "a-b_2", "sixteen-letters-"] {
            assert_eq!(text.parse::<ClassName>().map(|name| name.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "Calls", "a b", "ä", "seventeen-letters"] {
            assert!(text.parse::<ClassName>().unwrap_err().to_string().contains("1 to 16"), "{text}");
        }
    }
}
