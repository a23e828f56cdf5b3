//! The rules of `deny.toml`, applied offline to what a build on Linux compiles: licences, sources, one version of each
//! crate. `cargo deny` does the same and more; this one needs nothing installed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

#[test]
fn every_licence_is_allowed() {
    let allowed: BTreeSet<String> = strings(&rules()["licenses"]["allow"]).collect();
    let refused: Vec<String> = packages()
        .iter()
        .filter(|package| !licence_is_allowed(&package.licence, &allowed))
        .map(|package| format!("{} {}: {:?}", package.name, package.version, package.licence))
        .collect();
    assert!(refused.is_empty(), "licences that deny.toml does not allow:\n  {}", refused.join("\n  "));
}

#[test]
fn everything_comes_from_the_allowed_registry() {
    let registries: BTreeSet<String> =
        strings(&rules()["sources"]["allow-registry"]).map(|url| format!("registry+{url}")).collect();
    let lock = table("Cargo.lock");
    let packages = lock["package"].as_array().expect("Cargo.lock lists packages");
    let foreign: Vec<String> = packages
        .iter()
        .filter(|package| {
            package
                .get("source")
                .is_some_and(|source| !registries.contains(source.as_str().unwrap_or_default()))
        })
        .map(|package| format!("{} from {}", package["name"], package["source"]))
        .collect();
    assert!(foreign.is_empty(), "sources that deny.toml does not allow:\n  {}", foreign.join("\n  "));
}

#[test]
fn there_is_one_version_of_each_crate_but_for_the_listed_ones() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages() {
        versions.entry(package.name).or_default().insert(package.version);
    }
    let mut stale = Vec::new();
    for skip in rules()["bans"]["skip"].as_array().expect("bans.skip is a list") {
        let crate_id = skip["crate"].as_str().and_then(|id| id.split_once('@'));
        let (name, version) = crate_id.expect("skip = [{ crate = \"name@version\", … }]");
        let listed = versions.get_mut(name).is_some_and(|all| all.len() > 1 && all.remove(version));
        if !listed {
            stale.push(format!("{name}@{version}"));
        }
    }
    assert!(stale.is_empty(), "bans.skip in deny.toml lists what is not there twice any more: {stale:?}");
    let double: Vec<String> = versions
        .iter()
        .filter(|(_, all)| all.len() > 1)
        .map(|(name, all)| {
            format!("{name}: {all:?} (cargo tree --workspace --invert {name}@… tells who needs it)")
        })
        .collect();
    assert!(double.is_empty(), "crates in several versions:\n  {}", double.join("\n  "));
}

#[test]
fn licence_expressions_are_read_as_spdx_means_them() {
    let allowed = BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(String::from));
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0 or MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("ISC AND (GPL-3.0 OR MIT)", true),
        ("ISC AND (GPL-3.0 OR BSD-2-Clause)", false),
        ("MIT OR ISC AND GPL-3.0", true),
        ("Apache-2.0 WITH LLVM-exception AND ISC", true),
        ("Apache-2.0", false),
        ("", false),
        ("(MIT", false),
        ("MIT MIT", false),
    ] {
        assert_eq!(licence_is_allowed(expression, &allowed), expected, "{expression:?}");
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

fn table(file: &str) -> toml::Table {
    let path = root().join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rules() -> toml::Table {
    table("deny.toml")
}

struct Package {
    name: String,
    version: String,
    licence: String,
}

/// Every package that a build on x86-64 Linux compiles, for tests and build scripts too.
fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--workspace",
            "--locked",
            "--target=x86_64-unknown-linux-gnu",
            "--edges=normal,build,dev",
        ])
        .args(["--prefix=none", "--format={p};{l}"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let listing = String::from_utf8_lossy(&output.stdout);
    let packages: Vec<Package> =
        listing.lines().filter(|line| !line.trim().is_empty()).map(package).collect();
    assert!(packages.len() > 50, "cargo tree lists only {} packages", packages.len());
    packages
}

/// `name v1.2.3 (path);licence (*)`
fn package(line: &str) -> Package {
    let (id, licence) = line.split_once(';').unwrap_or_else(|| panic!("no licence in {line:?}"));
    let mut words = id.split_whitespace();
    let mut word = || words.next().unwrap_or_default().to_owned();
    let (name, version) = (word(), word().trim_start_matches('v').to_owned());
    Package { name, version, licence: licence.trim_end_matches("(*)").trim().to_owned() }
}

fn strings(list: &toml::Value) -> impl Iterator<Item = String> {
    list.as_array().expect("a list of strings").iter().map(|item| item.as_str().expect("a string").to_owned())
}

/// SPDX: AND binds tighter than OR; `A/B` and `A or B` are how some crates write `A OR B`.
fn licence_is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced =
        expression.replace('/', " OR ").replace(" or ", " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = tokens.as_slice();
    any_of(&mut rest, allowed).is_some_and(|verdict| verdict && rest.is_empty())
}

/// `None`: not an expression.
fn any_of(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut verdict = all_of(tokens, allowed)?;
    while take(tokens, "OR") {
        verdict |= all_of(tokens, allowed)?;
    }
    Some(verdict)
}

fn all_of(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut verdict = one(tokens, allowed)?;
    while take(tokens, "AND") {
        verdict &= one(tokens, allowed)?;
    }
    Some(verdict)
}

fn one(tokens: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    if take(tokens, "(") {
        let verdict = any_of(tokens, allowed)?;
        return take(tokens, ")").then_some(verdict);
    }
    let (name, rest) = tokens.split_first()?;
    *tokens = rest;
    if !take(tokens, "WITH") {
        return Some(allowed.contains(*name));
    }
    let (exception, rest) = tokens.split_first()?;
    *tokens = rest;
    Some(allowed.contains(&format!("{name} WITH {exception}")))
}

fn take(tokens: &mut &[&str], word: &str) -> bool {
    let found = tokens.first() == Some(&word);
    if found {
        *tokens = &tokens[1..];
    }
    found
}
