//! Keeps secrets of the command line from other users of the machine.

use std::ops::Range;

use mpvpn_os::arguments;

/// How join links begin.
const LINK: &[u8] = b"mpvpn://";
/// The option with a token.
const OPTION: &[u8] = b"--token";

/// Hides tokens in the arguments of this process: those of `--token` and of join links.
pub fn hide_tokens() {
    if let Err(error) = arguments::hide(token_in) {
        tracing::warn!(%error, "other users of this machine can read the token in the arguments of this process");
    }
}

/// The token in an argument that follows `before`.
fn token_in(before: Option<&[u8]>, argument: &[u8]) -> Option<Range<usize>> {
    let end = argument.len();
    if before == Some(OPTION) {
        return Some(0..end);
    }
    if argument.starts_with(LINK) {
        let token_end = argument.iter().position(|byte| *byte == b'@').unwrap_or(end);
        return Some(LINK.len()..token_end.max(LINK.len()));
    }
    let is_option = argument.strip_prefix(OPTION).is_some_and(|rest| rest.starts_with(b"="));
    is_option.then_some(OPTION.len() + 1..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_each_form() {
        let token = |before: &[u8], argument: &str| {
            token_in(Some(before), argument.as_bytes()).map(|range| argument[range].to_owned())
        };
        assert_eq!(token(b"--token", "secret"), Some("secret".to_owned()));
        assert_eq!(token(b"client", "--token=secret"), Some("secret".to_owned()));
        assert_eq!(token(b"client", "mpvpn://secret@vpn.example/?pin=00"), Some("secret".to_owned()));
        assert_eq!(token(b"client", "mpvpn://cut-secret"), Some("cut-secret".to_owned()));
        for (before, argument) in
            [("--server", "vpn.example"), ("client", "--token-file"), ("--token-file", "token")]
        {
            assert_eq!(token(before.as_bytes(), argument), None, "{argument}");
        }
    }
}
