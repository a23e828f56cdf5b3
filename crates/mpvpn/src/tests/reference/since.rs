//! The version in which each item of the reference appeared: a record beside the pages, which the generator
//! reads and updates.
//!
//! Always holds: a new item gets the current version; an item that no longer exists is removed.

use std::collections::{BTreeMap, BTreeSet};

/// The record among the pages.
pub(super) const FILE: &str = "since.txt";
/// How the record begins.
pub(super) const HEAD: &str = "\
# The version in which each item of the reference appeared. `./dev reference` adds new items with the version of
# Cargo.toml, and removes items that are gone.
";
/// Items that have existed since this version are not marked.
const FIRST: &str = "0.1.0";

/// The record.
pub(super) struct Since {
    known: BTreeMap<String, String>,
    used: BTreeSet<String>,
}

impl Since {
    /// Reads a record: versions, each with its items indented below.
    pub(super) fn read(text: &str) -> Self {
        let mut known = BTreeMap::new();
        let mut version = FIRST;
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            match line.strip_prefix("  ") {
                Some(item) => drop(known.insert(item.to_owned(), version.to_owned())),
                None => version = line,
            }
        }
        Self { known, used: BTreeSet::new() }
    }

    /// The text behind the description of this item.
    pub(super) fn mark(&mut self, item: &str) -> String {
        self.used.insert(item.to_owned());
        match self.version(item) {
            FIRST => String::new(),
            version => format!(" (since {version})"),
        }
    }

    fn version(&self, item: &str) -> &str {
        self.known.get(item).map_or(env!("CARGO_PKG_VERSION"), String::as_str)
    }

    /// The record with the items that are in use.
    pub(super) fn written(&self) -> String {
        let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for item in &self.used {
            versions.entry(self.version(item)).or_default().push(item);
        }
        let mut text = HEAD.to_owned();
        for (version, items) in versions {
            text += &format!("{version}\n");
            for item in items {
                text += &format!("  {item}\n");
            }
        }
        text
    }
}
