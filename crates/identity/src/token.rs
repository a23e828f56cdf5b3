//! Tokens: the secrets by which users are known.

use std::str::FromStr;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::identity::Fingerprint;
use mpvpn_input::{Error, Result};

/// Longest token (bytes). Own tokens have 49; other identity providers use up to a few hundred. A longer
/// limit makes each refused request cost more hashing; a shorter one refuses such tokens.
pub const MAX_TOKEN_BYTES: usize = 512;
/// Prefix of the tokens that mpvpn makes, so that people and secret scanners recognise them.
const TOKEN_PREFIX: &str = "mpvpn_";

/// A secret that identifies a user. It never appears in logs.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
#[debug("Token(…)")]
pub struct Token(String);

impl Token {
    /// A new token with 256 random bits.
    pub fn generate() -> Result<Self> {
        let mut bits = [0; 32];
        SystemRandom::new().fill(&mut bits).map_err(|_| Error::Random)?;
        Ok(Self(format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// The secret text, for the place that sends or shows it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The value of the `authorization` field with this token (RFC 6750 §2.1).
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Its SHA-256, as it stands in the users' file.
    pub fn hash(&self) -> [u8; 32] {
        Fingerprint::of(self.0.as_bytes()).0
    }
}

/// A text that is not a token. The message does not repeat the text, which may be a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a token: expected 1 to {MAX_TOKEN_BYTES} letters, digits and - . _ ~ + / =")]
pub struct ParseTokenError;

impl FromStr for Token {
    type Err = ParseTokenError;

    /// `b64token` of RFC 6750, section 2.1.
    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-._~+/=".contains(&b);
        match (1..=MAX_TOKEN_BYTES).contains(&text.len()) && text.bytes().all(allowed) {
            true => Ok(Self(text.into())),
            false => Err(ParseTokenError),
        }
    }
}

mpvpn_input::text_of_parsed! {
    Token: "a token in quotes", as in "mpvpn_secret";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_256_bits_and_is_never_logged() {
        let token = Token::generate().unwrap();
        assert_eq!(token.reveal().len(), TOKEN_PREFIX.len() + 43);
        assert_ne!(token, Token::generate().unwrap());
        assert!(!format!("{token:?}").contains(&token.reveal()[6..]));
    }
}
