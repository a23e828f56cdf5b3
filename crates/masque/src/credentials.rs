//! What clients prove themselves with: the secret of a session.

/// The `mpvpn-session` header field: `:base64:` of a secret that names a session.
///
/// The server sends one in its 2xx response; a client that comes back with it gets the same addresses.
/// Peers that do not know the field ignore it.
pub mod session_header {
    use crate::structured;

    /// Name of the field.
    pub const NAME: &str = "mpvpn-session";
    /// Shortest secret in bytes (128 bits).
    pub const MIN: usize = 16;
    /// Longest secret in bytes.
    pub const MAX: usize = 64;

    /// The value that carries `secret`; `None` unless it has [`MIN`] to [`MAX`] bytes.
    #[must_use]
    pub fn encode(secret: &[u8]) -> Option<String> {
        (MIN..=MAX).contains(&secret.len()).then(|| structured::encode_byte_sequence(secret))
    }

    /// The secret in a field value; `None` unless it has [`MIN`] to [`MAX`] bytes.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Vec<u8>> {
        structured::byte_sequence(value, MAX).filter(|secret| secret.len() >= MIN)
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
