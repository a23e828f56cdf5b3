/// Defines an enum whose values are words: the same word in configuration, on the command line, in status and
/// on the wire.
///
/// The enum gets `ALL`, `WORDS`, `as_str`, `EXPECTED`, [`Display`](std::fmt::Display),
/// [`FromStr`](std::str::FromStr) with an error that lists the valid words, and serialization as the word.
#[macro_export]
macro_rules! word_enum {
    (
        $(#[$doc:meta])*
        $visibility:vis enum $name:ident {
            $($(#[doc = $variant_doc:literal])+ $(#[default $($never:tt)?])? $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $visibility enum $name { $($(#[doc = $variant_doc])+ $(#[default $($never)?])? $variant,)+ }

        impl $name {
            /// All values, in the order of help texts.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Each word with the doc comment of its variant, for help texts and generated documentation.
            pub const WORDS: &'static [(&'static str, &'static str)] =
                &[$(($word, concat!($($variant_doc, "\n"),+))),+];

            /// The word for the value.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// All words, as in `"on" or "off"`, for error messages.
            pub const EXPECTED: &'static str = $crate::alternatives!($($word),+);
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $crate::UnknownWord;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.iter().copied().find(|value| value.as_str() == text);
                found.ok_or_else(|| $crate::UnknownWord::new(text, &[$($word),+]))
            }
        }

        impl $crate::serde::Serialize for $name {
            fn serialize<S: $crate::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.as_str())
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $name {
            fn deserialize<D: $crate::serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <String as $crate::serde::Deserialize>::deserialize(from)?;
                text.parse().map_err($crate::serde::de::Error::custom)
            }
        }
    };
}

/// A word that is none of an enum's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is none of: {words}{}", .similar.map_or(String::new(), |word| format!("; did you mean `{word}`?")))]
pub struct UnknownWord {
    text: String,
    words: String,
    similar: Option<&'static str>,
}

impl UnknownWord {
    /// `text` was found where one of `words` was expected.
    pub fn new(text: &str, words: &[&'static str]) -> Self {
        Self { text: text.to_owned(), words: words.join(", "), similar: most_similar(text, words) }
    }
}

/// The least similarity (Jaro, 0 to 1) of a word that is proposed. Lower: words that nobody meant, as `path`
/// for `nat` at 0.72; higher: typing errors without a proposal, as `lnik` for `link` at 0.92.
const MIN_SIMILARITY: f64 = 0.8;

/// The word that was probably meant, if any is similar enough.
pub fn most_similar<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    let similar = words.iter().map(|word| (strsim::jaro(text, word), *word));
    let similar = similar.filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, word)| word)
}

/// The words as in `"a", "b" or "c"`.
#[doc(hidden)]
#[macro_export]
macro_rules! alternatives {
    ($word:literal) => {
        concat!('"', $word, '"')
    };
    ($first:literal, $last:literal) => {
        concat!('"', $first, '"', " or ", $crate::alternatives!($last))
    };
    ($first:literal, $($others:literal),+) => {
        concat!('"', $first, '"', ", ", $crate::alternatives!($($others),+))
    };
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "the macro generates public items")]
mod tests {
    word_enum! {
        /// For the tests.
        pub enum Switch {
            /// One.
            #[default]
            On = "on",
            /// Other.
            Off = "off",
        }
    }

    #[test]
    fn every_word_is_read_back() {
        for value in Switch::ALL {
            assert_eq!(value.as_str().parse(), Ok(*value));
            assert_eq!(value.to_string(), value.as_str());
        }
        assert_eq!(Switch::default(), Switch::On);
    }

    #[test]
    fn every_word_has_the_meaning_that_its_comment_says() {
        assert_eq!(Switch::WORDS, [("on", " One.\n"), ("off", " Other.\n")]);
    }

    #[test]
    fn the_error_for_an_unknown_word_lists_the_valid_ones() {
        let error = "maybe".parse::<Switch>().unwrap_err();
        assert_eq!(error.to_string(), "`maybe` is none of: on, off");
        assert_eq!(Switch::EXPECTED, r#""on" or "off""#);
        let error = "of".parse::<Switch>().unwrap_err();
        assert_eq!(error.to_string(), "`of` is none of: on, off; did you mean `off`?");
    }
}
