//! Values of a configuration, and what reading it again changed, as the local API tells them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A key and its value.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
pub struct ConfigValue {
    /// The key of the file, which is also the option.
    pub key: String,
    /// Its value; a default as the help describes it.
    pub value: String,
    /// Where it comes from: `default`, `option`, or the file with the line.
    pub origin: String,
}

/// The result of reading a configuration again.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReloadReport {
    /// Whether settings of links changed.
    pub links: bool,
    /// Whether classes or their rules changed.
    #[serde(default)]
    pub classes: bool,
    /// Keys whose values apply from now on, beside those of links and classes.
    #[serde(default)]
    pub applied: Vec<String>,
    /// Keys whose values differ from those at the start, and take effect after a restart.
    pub restart: Vec<String>,
}

/// The action of a server on a certificate that would lock clients out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LockoutPolicy {
    /// The certificate before stays, and all else counts: nobody is there to ask.
    Keep,
    /// Nothing changes.
    Refuse,
    /// The certificate counts.
    Allow,
}
