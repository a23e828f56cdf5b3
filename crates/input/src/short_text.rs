//! Text in events: names, and reasons, which a peer may have chosen.

use std::fmt;

use derive_more::Display;
use schemars::JsonSchema;
use serde::Serialize;

/// Longest text, in characters: twice the longest reason of our own. The reason in a peer's CONNECTION_CLOSE
/// frame may be as long as a packet; a longer limit would let peers fill memory, a shorter one cuts our own
/// reasons.
const MAX_CHARS: usize = 240;

/// Text of at most 240 characters, without control characters.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize)]
#[schemars(inline)]
#[serde(transparent)]
pub struct ShortText(Box<str>);

impl ShortText {
    /// From anything that can be printed.
    pub fn of(text: &impl fmt::Display) -> Self {
        Self::from(text.to_string())
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ShortText {
    fn from(text: &str) -> Self {
        let shown = |c: char| if c.is_control() { '\u{fffd}' } else { c };
        let mut kept: String = text.chars().take(MAX_CHARS).map(shown).collect();
        if text.chars().nth(MAX_CHARS).is_some() {
            kept.pop();
            kept.push('…');
        }
        Self(kept.into_boxed_str())
    }
}

impl From<String> for ShortText {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_text_of_a_peer_is_shortened_and_has_no_escapes() {
        assert_eq!(ShortText::from("no answer").as_str(), "no answer");
        assert_eq!(ShortText::from("\x1b[2Jgone\r\n").as_str(), "\u{fffd}[2Jgone\u{fffd}\u{fffd}");
        let long = ShortText::from("é".repeat(5000));
        assert_eq!((long.as_str().chars().count(), long.as_str().ends_with("é…")), (MAX_CHARS, true));
        assert_eq!(ShortText::from("x".repeat(MAX_CHARS)).as_str(), "x".repeat(MAX_CHARS));
    }

    proptest! {
        #[test]
        fn any_text_is_bounded(text in "\\PC*|.{0,600}") {
            let kept = ShortText::from(text.as_str());
            prop_assert!(kept.as_str().chars().count() <= MAX_CHARS);
            prop_assert!(!kept.as_str().chars().any(char::is_control));
        }
    }
}
