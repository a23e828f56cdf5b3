//! Limits of users' sessions and classes of traffic: the tables `[[limit]]` of a server's file.

use mpvpn_types::{ClassId, Portion};
use schemars::JsonSchema;
use serde::{Deserialize, de::Deserializer};

use mpvpn_input::{
    rules::UserName,
    values::{Filled, One, OneOrNumber, Text},
};

/// Limits of users, whatever their clients ask for. The first table that names a user counts.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "limit")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[limit]]")]
pub struct LimitRule {
    /// Names of the users to whom the table applies [default: all]
    #[serde(default, with = "Filled::<UserName>")]
    pub users: Vec<String>,
    /// Number of sessions (connected clients) that each of these users may have at once; a further one is
    /// refused until another ends [default: 64; none with --auth none]
    #[serde(default, deserialize_with = "sessions")]
    #[schemars(with = "OneOrNumber<SessionCount>")]
    pub max_sessions: Option<u32>,
    /// Number of classes of traffic that a session may have, 1 to 8; the class `default` is one [default: 8]
    #[serde(default = "all_classes", deserialize_with = "classes")]
    #[schemars(with = "OneOrNumber<ClassCount>")]
    pub max_classes: u8,
    /// Limit of the rate at which the server sends for each class with priority, in bit/s or as a part of a
    /// link, whatever the client asks for [default: none]
    #[serde(default, with = "One::<Portion>")]
    pub max_priority: Option<Portion>,
}

impl LimitRule {
    /// Limit of a user's sessions where no table sets one. Chosen: more let one token take most addresses of
    /// the default subnet (253), fewer refuse users with many machines.
    pub const DEFAULT_MAX_SESSIONS: u32 = 64;

    /// The limits of a user: the first table that names the user, or names nobody.
    pub fn of<'a>(rules: &'a [Self], user: &str) -> Option<&'a Self> {
        rules.iter().find(|rule| rule.users.is_empty() || rule.users.iter().any(|name| name == user))
    }
}

struct ClassCount(u8);

/// A number of sessions.
pub struct SessionCount(u32);

/// For serde: a number of sessions.
pub fn sessions<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    Ok(OneOrNumber::<SessionCount>::deserialize(from)?.map(|count| count.0))
}

impl Text for SessionCount {
    const EXPECTED: &'static str = "a number of at least 1";
    const EXAMPLE: &'static str = "10";

    fn read(text: &str) -> Result<Self, String> {
        let count = text.parse().ok().filter(|count| *count > 0);
        count.map(Self).ok_or_else(|| format!("`{text}` is not a number of sessions: expected 1 or more"))
    }
}

fn all_classes() -> u8 {
    ClassId::MAX
}

fn classes<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    Ok(OneOrNumber::<ClassCount>::deserialize(from)?.map_or(ClassId::MAX, |count| count.0))
}

impl Text for ClassCount {
    const EXPECTED: &'static str = "a number from 1 to 8";
    const EXAMPLE: &'static str = "3";

    fn read(text: &str) -> Result<Self, String> {
        let count = text.parse().ok().filter(|count| (1..=ClassId::MAX).contains(count));
        count.map(Self).ok_or_else(|| {
            format!(
                "`{text}` is not a number of classes: expected 1 (no others beside `default`) to {}",
                ClassId::MAX
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_limit_that_fits_a_user_counts() {
        let rule = |users: &[&str], max_classes| LimitRule {
            users: users.iter().map(ToString::to_string).collect(),
            max_sessions: None,
            max_classes,
            max_priority: None,
        };
        let rules = [rule(&["anna"], 8), rule(&["anna", "bob"], 3), rule(&[], 2)];
        let of = |user| LimitRule::of(&rules, user).map(|rule| rule.max_classes);
        assert_eq!((of("anna"), of("bob"), of("eve")), (Some(8), Some(3), Some(2)));
        assert_eq!(LimitRule::of(&rules[..2], "eve"), None);
    }
}
