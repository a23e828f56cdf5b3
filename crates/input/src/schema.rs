//! JSON schemas of the values of a configuration file.
//!
//! Always holds: each schema is made from the [`Text`] of its type. `title` describes the expected value,
//! `examples` holds an accepted text, and `oneOf` lists the words with their meanings. Only the generator of
//! `docs/reference` uses this module.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::values::{Many, One, Text};

/// A whole number that `T` reads, too.
pub fn number<T: Text>(_: &mut SchemaGenerator) -> Schema {
    item::<T>("integer".into())
}

impl<T: Text, const NUMBERS: bool> JsonSchema for One<T, NUMBERS> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        T::EXPECTED.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        item::<T>(if NUMBERS { json!(["string", "integer"]) } else { "string".into() })
    }
}

impl<T: Text, const NUMBERS: bool, const FILLED: bool> JsonSchema for Many<T, NUMBERS, FILLED> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        T::EXPECTED.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        list(One::<T, NUMBERS>::json_schema(generator), FILLED.into())
    }
}

fn item<T: Text>(kind: Value) -> Schema {
    let example = match T::EXAMPLE.parse::<u64>() {
        Ok(number) if kind != "string" => json!(number),
        _ => json!(T::EXAMPLE),
    };
    if T::WORDS.is_empty() {
        return json_schema!({ "type": kind, "title": T::EXPECTED, "examples": [example] });
    }
    words(T::EXPECTED, T::WORDS)
}

/// One of these words.
pub fn words(expected: &str, words: &[(&str, &str)]) -> Schema {
    let meaning = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let values: Vec<_> =
        words.iter().map(|(word, text)| json!({ "const": word, "description": meaning(text) })).collect();
    json_schema!({ "type": "string", "title": expected, "examples": [words[0].0], "oneOf": values })
}

fn list(item: Schema, least: u64) -> Schema {
    let (title, examples) = (item.get("title").cloned(), item.get("examples").cloned());
    json_schema!({
        "title": title.unwrap_or_default(),
        "examples": examples.unwrap_or_default(),
        "anyOf": [item, { "type": "array", "items": item, "minItems": least }],
    })
}

/// Schemas of enums whose values are words.
#[macro_export]
macro_rules! word_schemas {
    ($($name:ty),+) => {$(
        impl ::schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> ::std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut ::schemars::SchemaGenerator) -> ::schemars::Schema {
                $crate::schema::words(Self::EXPECTED, Self::WORDS)
            }
        }
    )+};
}
