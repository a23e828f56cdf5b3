//! Values that a file gives as texts or as tables, one or a list of both.

use std::{fmt, marker::PhantomData};

use mpvpn_input::values::Text;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

/// A value that a table may give, too. [`Text::EXPECTED`] describes both.
pub(super) trait TextOrTable: Text {
    /// The table.
    type Table: DeserializeOwned;

    /// The value of a table, or the mistake in it.
    fn of_table(table: Self::Table) -> Result<Self, String>;
}

/// For serde, as in `#[serde(deserialize_with = "text_or_table::list")]`: one text or table, or a list.
pub(super) fn list<'de, T: TextOrTable, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    TextsOrTables::deserialize(from).map(|all| all.0)
}

struct TextsOrTables<T>(Vec<T>);

impl<'de, T: TextOrTable> Deserialize<'de> for TextsOrTables<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ListVisitor(PhantomData)).map(Self)
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: TextOrTable> Visitor<'de> for ListVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Vec<T>, E> {
        T::read(text).map(|value| vec![value]).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Vec<T>, A::Error> {
        let table = T::Table::deserialize(MapAccessDeserializer::new(fields))?;
        T::of_table(table).map(|value| vec![value]).map_err(A::Error::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut all = Vec::new();
        while let Some(TextsOrTables(some)) = list.next_element()? {
            all.extend::<Vec<T>>(some);
        }
        Ok(all)
    }
}
