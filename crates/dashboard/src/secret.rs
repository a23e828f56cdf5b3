//! Random texts that nobody guesses. They never appear in logs.

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    rand::{SecureRandom, SystemRandom},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use mpvpn_input::{Error, Result};

/// 256 random bits as text.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
#[debug("Secret(…)")]
pub(crate) struct Secret(String);

impl Secret {
    /// A new one.
    pub(crate) fn generate() -> Result<Self> {
        let mut bits = [0; 32];
        SystemRandom::new().fill(&mut bits).map_err(|_| Error::Random)?;
        Ok(Self(URL_SAFE_NO_PAD.encode(bits)))
    }

    /// Whether it is this text; the time that it takes tells nothing about the secret.
    pub(crate) fn is(&self, text: &str) -> bool {
        verify_slices_are_equal(self.0.as_bytes(), text.as_bytes()).is_ok()
    }

    /// The text, for the place that sends it.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    #[cfg(test)]
    pub(crate) fn of(text: &str) -> Self {
        Self(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_are_hidden() {
        let (one, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert!(one.is(one.reveal()) && !one.is(other.reveal()) && !one.is(""));
        assert_eq!(one.reveal().len(), 43);
        assert!(!format!("{one:?}").contains(one.reveal()));
    }
}
