//! Checks the rules of `deny.toml` offline for all crates of a Linux build: licences, sources, one version
//! per crate. `cargo deny` checks more, but has to be installed. Also checks that
//! `docs/design/dependencies.md` lists all direct dependencies of the manifests with the packages that use
//! them, that those of the dashboard's page are pinned, and looks for advisories about quinn, of which the
//! QUIC library is a fork. Between the crates: `layers.rs`; between the files of a crate: `circles.rs`.

mod circles;
mod layers;

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
fn there_is_one_version_of_each_crate_except_the_listed_ones() {
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
    assert!(stale.is_empty(), "bans.skip in deny.toml lists crates that have only one version: {stale:?}");
    let double: Vec<String> = versions
        .iter()
        .filter(|(_, all)| all.len() > 1)
        .map(|(name, all)| {
            format!("{name}: {all:?} (cargo tree --workspace --invert {name}@… shows its users)")
        })
        .collect();
    assert!(double.is_empty(), "crates in several versions:\n  {}", double.join("\n  "));
}

#[test]
fn every_direct_dependency_is_documented_with_the_packages_that_use_it() {
    assert_eq!(differences(&documented(DOCUMENT), &manifests()), Vec::<String>::new(), "{DOCUMENT}");
}

#[test]
fn every_direct_dependency_is_named_in_the_code_of_its_package() {
    let sources: BTreeMap<String, String> =
        members().into_iter().map(|(package, folder)| (package, rust_in(&folder))).collect();
    let mut unused = Vec::new();
    for (dependency, packages) in manifests() {
        let name = dependency.replace('-', "_");
        let paths = [format!("{name}::"), format!("use {name}"), format!("{name}!")];
        let is_named = |package: &&String| paths.iter().any(|path| sources[*package].contains(path.as_str()));
        unused.extend(
            packages
                .iter()
                .filter(|package| !is_named(package))
                .map(|package| format!("{dependency} in {package}")),
        );
    }
    assert!(unused.is_empty(), "in a Cargo.toml, and in no source file beside it: {unused:?}");
}

#[test]
fn packages_of_the_page_are_pinned_documented_and_from_the_registry() {
    let manifest = json("web/package.json");
    let lock = json("web/package-lock.json");
    let page = std::fs::read_to_string(root().join(DOCUMENT)).expect("the page can be read");
    let allowed: BTreeSet<String> = strings(&rules()["licenses"]["allow"]).collect();
    let mut wrong = Vec::new();
    for (kind, dependencies) in ["dependencies", "devDependencies"].map(|kind| (kind, &manifest[kind])) {
        for (name, version) in dependencies.as_object().expect("a table of packages") {
            if !version
                .as_str()
                .is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit()))
            {
                wrong.push(format!("{name} {version} in {kind}: not one exact version"));
            }
            if !page.lines().any(|line| line.starts_with(&format!("| [{name}]"))) {
                wrong.push(format!("{name} in {kind}: not in {DOCUMENT}"));
            }
        }
    }
    let packages = lock["packages"].as_object().expect("the lock file lists packages");
    for (folder, package) in packages.iter().filter(|(folder, _)| !folder.is_empty()) {
        // Only packages of the registry have a hash and no address.
        if package["integrity"].as_str().is_none() || package.get("resolved").is_some() {
            wrong.push(format!("{folder}: not from the registry, or without a hash"));
        }
        // A package that is not only for building and testing is in the page.
        let licence = package["license"].as_str().unwrap_or_default();
        if package["dev"].as_bool() != Some(true) && !licence_is_allowed(licence, &allowed) {
            wrong.push(format!("{folder}: the licence {licence:?}"));
        }
    }
    assert!(
        packages.len() > 5 && wrong.is_empty(),
        "web/package.json and its lock file:\n  {}",
        wrong.join("\n  ")
    );
}

#[test]
fn a_table_of_dependencies_is_compared_with_the_manifests_in_both_directions() {
    let table = "| `a-b` | why, `not_this` | `x`, tests of `y` |\n| crate | what | used by |\n| `gone` | why | `x` |\n\n\
                 | `c` | why | `x` |\ntext with `d` | and | `x` |";
    let documented = rows(table);
    let used = |list: &[(&str, &[&str])]| -> Uses {
        list.iter()
            .map(|(name, by)| ((*name).to_owned(), by.iter().map(ToString::to_string).collect()))
            .collect()
    };
    assert_eq!(documented, used(&[("a-b", &["x", "y"]), ("gone", &["x"]), ("c", &["x"])]));
    let found = differences(&documented, &used(&[("a-b", &["x", "y"]), ("c", &["x", "y"]), ("new", &["x"])]));
    let count_of = |part: &str| found.iter().filter(|line| line.contains(part)).count();
    assert_eq!((found.len(), count_of("gone"), count_of("new"), count_of("`c`")), (3, 1, 1, 1), "{found:?}");
}

#[test]
fn no_advisory_for_quinn_is_unread() {
    let databases = advisory_databases();
    if databases.is_empty() {
        eprintln!(
            "no database of advisories is here: set MPVPN_ADVISORY_DB to a clone of rustsec/advisory-db"
        );
    }
    let unread: Vec<PathBuf> = databases.iter().flat_map(|database| unread_advisories(database)).collect();
    assert!(
        unread.is_empty(),
        "read them: do they hold for noq-proto, too? Then say so in READ_ADVISORIES: {unread:#?}"
    );
}

#[test]
fn an_advisory_is_unread_until_it_is_listed() {
    let database = tempfile::tempdir().expect("a folder");
    let write = |package: &str, id: &str| {
        let folder = database.path().join("crates").join(package);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join(format!("{id}.md")), "```toml\n[advisory]\n```").expect("a file");
    };
    write("rustls", "RUSTSEC-2099-0001");
    write("quinn-proto", READ_ADVISORIES[0].0);
    assert_eq!(unread_advisories(database.path()), Vec::<PathBuf>::new());
    write("quinn-proto", "RUSTSEC-2099-0002");
    write("quinn-udp", "RUSTSEC-2099-0003");
    let unread = unread_advisories(database.path());
    let ids: Vec<_> = unread.iter().filter_map(|path| path.file_stem()?.to_str()).collect();
    assert_eq!(ids, ["RUSTSEC-2099-0002", "RUSTSEC-2099-0003"]);
}

#[test]
fn a_release_is_refused_where_its_advisories_cannot_be_checked() {
    let home = tempfile::tempdir().expect("a folder");
    let dev = |args: &[&str]| {
        let mut dev = Command::new(root().join("dev"));
        // Nothing of cargo is found here.
        dev.args(args).env("HOME", home.path()).env("CARGO_HOME", home.path()).env("PATH", "/usr/bin:/bin");
        let ended = dev.env_remove("SUDO_USER").output().expect("a shell");
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    let (code, said) = dev(&["package", "--version", "9.9.9"]);
    assert!(code == Some(1) && said.contains("--without-advisories"), "{code:?}: {said}");
    assert_eq!(dev(&["advisories"]).0, Some(3), "`./dev test all` says that they are not checked");
    assert!(dev(&["advisories"]).1.contains("advisories: not checked"));
}

#[test]
fn each_crate_with_unsafe_code_says_what_checks_its_memory() {
    let crates = members().into_iter().filter(|(_, folder)| folder.starts_with(root().join("crates")));
    let is_unsafe = |text: &str| {
        let kinds = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"];
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        text.lines().filter(is_code).any(|line| kinds.iter().any(|kind| line.contains(kind)))
    };
    let unsafe_crates: BTreeSet<String> = crates
        .filter(|(_, folder)| is_unsafe(&rust_in(&folder.join("src"))))
        .map(|(package, _)| package)
        .collect();
    let page = std::fs::read_to_string(root().join("docs/security.md")).expect("the page can be read");
    let table = page.lines().skip_while(|line| !line.starts_with("| crate with `unsafe` |")).skip(2);
    let rows: Vec<Vec<&str>> = table
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let listed: BTreeSet<String> = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    assert_eq!(listed, unsafe_crates, "crates in the table, and crates with unsafe code");
    let dev = std::fs::read_to_string(root().join("dev")).expect("the script can be read");
    for (column, function) in [(1, "with_address_sanitizer() {"), (2, "with_miri() {")] {
        let (_, body) = dev.split_once(function).expect("a function of the script");
        let body = body.split_once("\n}").map_or(body, |(body, _)| body);
        for row in &rows {
            let is_run = body.contains(&format!("-p mpvpn-{} ", row[0].trim_matches('`')));
            assert_eq!(is_run, row[column] != "–", "{row:?}: {body}");
        }
    }
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

/// Advisories about quinn that were read, and what they mean for noq-proto 1.4.0, a fork of quinn-proto:
/// databases have none under its own name.
const READ_ADVISORIES: &[(&str, &str)] = &[
    ("RUSTSEC-2021-0035", "quinn's sockets: noq-proto has none"),
    ("RUSTSEC-2023-0063", "unknown frames: an error in `frame.rs`, as in quinn-proto 0.10.5"),
    ("RUSTSEC-2024-0373", "Retry: mended before the fork (quinn-proto 0.11.7)"),
    ("RUSTSEC-2026-0037", "transport parameters: none is unwrapped when it is read"),
    ("RUSTSEC-2026-0185", "gaps in streams: `Assembler::insert` ends the connection after MAX_CHUNKS"),
];

/// Clones of <https://github.com/rustsec/advisory-db>: the one that is named, and those of cargo-audit and
/// cargo-deny.
fn advisory_databases() -> Vec<PathBuf> {
    let named = std::env::var_os("MPVPN_ADVISORY_DB").map(PathBuf::from);
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let of_deny = home.iter().filter_map(|home| std::fs::read_dir(home.join("advisory-dbs")).ok()).flatten();
    let of_deny = of_deny.filter_map(|entry| Some(entry.ok()?.path()));
    let of_audit = home.iter().map(|home| home.join("advisory-db"));
    let all = named.into_iter().chain(of_audit).chain(of_deny);
    all.filter(|database| database.join("crates").is_dir()).collect()
}

/// The advisories of a database about quinn's crates that are not in [`READ_ADVISORIES`].
fn unread_advisories(database: &Path) -> Vec<PathBuf> {
    let folders = ["quinn", "quinn-proto", "quinn-udp"].map(|package| database.join("crates").join(package));
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| {
        let id = path.file_stem().unwrap_or_default().to_string_lossy();
        id.starts_with("RUSTSEC-") && !READ_ADVISORIES.iter().any(|(read, _)| *read == id)
    });
    paths.sort();
    paths
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

fn table(file: &str) -> toml::Table {
    let path = root().join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(file: &str) -> serde_json::Value {
    let path = root().join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rules() -> toml::Table {
    table("deny.toml")
}

/// The page with every direct dependency.
const DOCUMENT: &str = "docs/design/dependencies.md";

/// Crates of the registry, each with the packages of this workspace that name it in their manifest.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// The packages of this workspace without their common prefix, and their folders.
fn members() -> BTreeMap<String, PathBuf> {
    let folders = std::fs::read_dir(root().join("crates")).expect("crates/ can be read");
    let folders = folders.map(|entry| entry.expect("crates/ can be read").path());
    let folders = folders.chain(
        ["tests", "tests/packets", "tests/scenarios", "benches", "fuzz"].map(|folder| root().join(folder)),
    );
    let named =
        |folder: PathBuf| (folder.file_name().expect("a name").to_string_lossy().into_owned(), folder);
    folders.filter(|folder| folder.join("Cargo.toml").exists()).map(named).collect()
}

/// The dependencies in all manifests, including those of tests.
fn manifests() -> Uses {
    let mut uses = Uses::new();
    for (package, folder) in members() {
        let manifest = table(
            folder.join("Cargo.toml").strip_prefix(root()).expect("below the root").to_str().expect("UTF-8"),
        );
        let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
        let named =
            tables.iter().filter_map(|name| manifest.get(*name)?.as_table()).flat_map(toml::Table::keys);
        for dependency in named.filter(|name| !name.starts_with("mpvpn-")) {
            uses.entry(dependency.clone()).or_default().insert(package.clone());
        }
    }
    let shared = table("Cargo.toml");
    let shared = shared["workspace"]["dependencies"].as_table().expect("workspace.dependencies is a table");
    for dependency in shared.keys().filter(|name| !name.starts_with("mpvpn-")) {
        uses.entry(dependency.clone()).or_default();
    }
    uses
}

fn documented(file: &str) -> Uses {
    let path = root().join(file);
    rows(&std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

/// The rows of tables that begin with a crate: `` | `crate` | … | `package`, tests of `package` | ``.
fn rows(page: &str) -> Uses {
    let row = |line: &str| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ").collect();
        let (first, last) = (cells.first()?.strip_suffix('`')?, cells.last()?);
        Some((first.to_owned(), last.split('`').skip(1).step_by(2).map(str::to_owned).collect()))
    };
    page.lines().filter_map(row).collect()
}

fn differences(documented: &Uses, used: &Uses) -> Vec<String> {
    let names: BTreeSet<&String> = documented.keys().chain(used.keys()).collect();
    let of = |name: &String| match (documented.get(name), used.get(name)) {
        (None, Some(_)) => Some(format!(
            "`{name}` is a dependency, and is missing in the page: say what for, and why this one"
        )),
        (Some(_), None) => Some(format!("`{name}` is in the page, and is no dependency: remove the row")),
        (_, Some(by)) if by.is_empty() => {
            Some(format!("`{name}` is in the root Cargo.toml, and no package uses it"))
        }
        (Some(documented), Some(by)) if documented != by => {
            Some(format!("`{name}` is used by {by:?}, the page says {documented:?}"))
        }
        _ => None,
    };
    names.into_iter().filter_map(of).collect()
}

/// All Rust below a folder.
fn rust_in(folder: &Path) -> String {
    let read = |path: PathBuf| std::fs::read_to_string(path).expect("a file of this tree can be read");
    rust_below(folder).into_iter().map(read).collect()
}

/// The Rust files below a folder.
fn rust_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("a folder of this tree can be read").path();
        if path.is_dir() && !path.ends_with("target") {
            files.extend(rust_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
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
