//! The session secret with which a client resumes its session.

/// The `mpvpn-session` header field: a Byte Sequence (`:base64:`) with the secret that identifies a session.
///
/// The server sends it in its 2xx response; a client that reconnects with it keeps its addresses. Peers that
/// do not know the field ignore it.
pub mod session_header {
    use crate::structured;

    /// Name of the field.
    pub const NAME: &str = "mpvpn-session";
    /// Minimum length of a secret in bytes: 128 bits cannot be guessed.
    pub const MIN_LEN: usize = 16;
    /// Maximum length of a secret in bytes: bounds memory of the peer; more adds no security.
    pub const MAX_LEN: usize = 64;

    /// The field value for `secret`; `None` unless it has [`MIN_LEN`] to [`MAX_LEN`] bytes.
    #[must_use]
    pub fn encode(secret: &[u8]) -> Option<String> {
        (MIN_LEN..=MAX_LEN).contains(&secret.len()).then(|| structured::encode_byte_sequence(secret))
    }

    /// The secret in a field value; `None` unless it has [`MIN_LEN`] to [`MAX_LEN`] bytes.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Vec<u8>> {
        structured::byte_sequence(value, MAX_LEN).filter(|secret| secret.len() >= MIN_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn session_secrets_have_16_to_64_bytes() {
        for (len, legal) in [(0, false), (15, false), (16, true), (64, true), (65, false)] {
            let secret = vec![7; len];
            assert_eq!(session_header::encode(&secret).is_some(), legal, "{len}");
            let value = crate::structured::encode_byte_sequence(&secret);
            assert_eq!(session_header::parse(value.as_bytes()).is_some(), legal, "{len}");
        }
    }

    proptest! {
        #[test]
        fn session_secrets_survive(secret in prop::collection::vec(any::<u8>(), 16..=64)) {
            let value = session_header::encode(&secret).unwrap();
            prop_assert_eq!(session_header::parse(value.as_bytes()), Some(secret));
        }
    }
}
