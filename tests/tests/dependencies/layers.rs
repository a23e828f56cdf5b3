//! Checks that crates build on one another as the tables of `docs/architecture.md` say: the pure crates
//! first, in the order in which a packet meets them, then the edge.
//!
//! In: the tables, the manifests. Out: differences. A crate may use the crates that its row names, which
//! stand above it, and those that they may use; so a pure crate uses only pure ones. Crates for tests alone
//! (`[dev-dependencies]`) are not checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{members, root, table};

const DOCUMENT: &str = "docs/architecture.md";

#[test]
fn crates_use_only_the_crates_that_the_architecture_names() {
    let page = std::fs::read_to_string(root().join(DOCUMENT)).expect("the page can be read");
    // Helpers of tests and fuzz targets stand below the tables.
    let members = members()
        .into_iter()
        .filter(|(name, folder)| folder.ends_with(format!("crates/{name}")) || name == "tests");
    let members: BTreeMap<String, PathBuf> = members.collect();
    let used = members.iter().map(|(name, folder)| {
        let mut used = used_by(folder);
        used.retain(|used| members.contains_key(used));
        (name.clone(), used)
    });
    let used = used.collect();
    assert_eq!(differences(&page, &used), Vec::<String>::new(), "{DOCUMENT}");
}

#[test]
fn a_crate_that_uses_one_beside_its_row_is_found() {
    let page = "| pure | may use | … |\n|---|---|---|\n| `a` | – | … |\n| `b` | `a` | … |\n\n\
                | `c` | `b` | … |\n| `d` | `a`, `e` | … |\n| `e` | all of these but `b`, `d` | … |\n";
    let used = [
        ("a", vec!["b"]),
        ("b", vec!["a"]),
        ("c", vec!["a", "b"]),
        ("d", vec![]),
        ("e", vec!["a", "d"]),
        ("f", vec![]),
    ];
    let used = used.map(|(name, used)| (name.to_owned(), used.into_iter().map(str::to_owned).collect()));
    assert_eq!(
        differences(page, &BTreeMap::from(used)),
        [
            "`a` uses `b`",
            "`d` may use `a`, and does not",
            "`d` may use `e`, which is not above it",
            "`d` may use `e`, and does not",
            "`e` uses `d`",
            "`f` has no row"
        ]
    );
}

/// The breaches of the tables of the page.
fn differences(page: &str, used: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut wrong = Vec::new();
    // The crates that each crate may use, and those that these may use.
    let mut reach: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split(" | ").collect();
        let names = |text: &str| -> Vec<String> {
            text.split('`')
                .skip(1)
                .step_by(2)
                .filter(|name| used.contains_key(*name))
                .map(str::to_owned)
                .collect()
        };
        let (Some(name), Some(cell)) = (names(cells[0]).pop(), cells.get(1)) else { continue };
        let (is_all, listed) = (cell.starts_with("all of these"), names(cell));
        let mut may_use: BTreeSet<String> =
            reach.keys().filter(|above| is_all && !listed.contains(above)).cloned().collect();
        for other in listed.iter().filter(|_| !is_all) {
            match reach.get(other) {
                Some(further) => may_use.extend(further.iter().chain([other]).cloned()),
                None => wrong.push(format!("`{name}` may use `{other}`, which is not above it")),
            }
            if !used[&name].contains(other) {
                wrong.push(format!("`{name}` may use `{other}`, and does not"));
            }
        }
        wrong.extend(used[&name].difference(&may_use).map(|other| format!("`{name}` uses `{other}`")));
        reach.insert(name, may_use);
    }
    wrong.extend(
        used.keys().filter(|name| !reach.contains_key(*name)).map(|name| format!("`{name}` has no row")),
    );
    wrong
}

/// The packages of this workspace in the manifest of a crate.
fn used_by(folder: &Path) -> BTreeSet<String> {
    let manifest = table(folder.join("Cargo.toml").to_str().expect("UTF-8"));
    let tables =
        ["dependencies", "build-dependencies"].into_iter().filter_map(|kind| manifest.get(kind)?.as_table());
    tables
        .flat_map(toml::Table::keys)
        .filter_map(|name| name.strip_prefix("mpvpn-").map(str::to_owned))
        .collect()
}
