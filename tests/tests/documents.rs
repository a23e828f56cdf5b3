//! Checks the documents of this repository offline: links have a target, shell blocks of the guide state
//! where they run or why they are skipped, files, functions, commands of `./dev` and tests named in documents
//! exist, and parts of configuration files are valid.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use mpvpn_config::{ClientConfig, Rights, ServerConfig, ServerOptions};
use mpvpn_tests::guide::{Action, parse};

#[test]
fn every_link_leads_to_an_existing_file_and_heading() {
    let mut missing = Vec::new();
    let mut anchors: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for document in documents() {
        let folder = document.parent().expect("a folder");
        for (line, link) in links(&read(&document)) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { document.clone() } else { folder.join(file) };
            let place = format!("{}:{line}: {link}", document.strip_prefix(root()).expect("below").display());
            let Ok(target) = target.canonicalize() else {
                missing.push(format!("{place}: no such file"));
                continue;
            };
            let headings = || headings(&read(&target));
            if !anchor.is_empty()
                && !anchors.entry(target.clone()).or_insert_with(headings).contains(&anchor.to_owned())
            {
                missing.push(format!("{place}: no such heading"));
            }
        }
    }
    assert!(missing.is_empty(), "links without a target:\n  {}", missing.join("\n  "));
}

#[test]
fn every_shell_block_of_the_guide_states_where_it_runs_or_why_it_is_skipped() {
    for page in pages() {
        if let Err(why) = parse(&read(&page)) {
            panic!("{}: {why} (the notation: tests/src/guide.rs)", page.display());
        }
    }
}

#[test]
fn every_part_of_a_configuration_file_in_the_guide_is_valid() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("part.toml");
    let mut checked = 0;
    for page in pages() {
        let parsed = parse(&read(&page)).expect("a page");
        for step in parsed.steps {
            let Action::Check { server, text } = step.action else { continue };
            fs::write(&file, text).expect("a file");
            let taken = if server {
                ServerConfig::load(Some(&file), ServerOptions::default(), Rights::ALL).map(drop)
            } else {
                ClientConfig::load_without_server(Some(&file)).map(drop)
            };
            taken.unwrap_or_else(|error| panic!("{}:{}: {error}", page.display(), step.line));
            checked += 1;
        }
    }
    assert!(checked > 3, "only {checked} parts were found");
}

#[test]
fn every_file_and_function_named_in_the_architecture_exists() {
    let architecture = read(&root().join("docs/architecture.md"));
    let (_, table) = architecture.split_once("## Where to change what").expect("the table of places");
    let mut missing = Vec::new();
    let mut checked = 0;
    for row in table.lines().filter_map(|line| line.split('|').nth(2)) {
        let mut code = String::new();
        for word in row.split('`').skip(1).step_by(2) {
            checked += 1;
            if word.contains('/') {
                let below_crates = root().join("crates").join(word);
                let file = if below_crates.exists() { below_crates } else { root().join(word) };
                code = if file.is_file() { read(&file) } else { String::new() };
                if !file.exists() {
                    missing.push(format!("{word}: no such file"));
                }
            } else if !defines(&code, word.rsplit("::").next().unwrap_or(word)) {
                missing.push(format!("{word}: not defined in the file before it"));
            }
        }
    }
    assert!(missing.is_empty(), "docs/architecture.md is out of date:\n  {}", missing.join("\n  "));
    assert!(checked > 100, "only {checked} names were found in the table");
}

#[test]
fn every_rust_file_named_in_a_document_exists() {
    let files = listed("*.rs");
    let exists = |name: &str| files.iter().any(|file| file == name || file.ends_with(&format!("/{name}")));
    let (mut missing, mut checked) = (Vec::new(), 0);
    for document in documents() {
        for (line, word) in code_words(&read(&document)) {
            if word.ends_with(".rs") && !word.contains(char::is_whitespace) {
                checked += 1;
                if !exists(&word) {
                    missing.push(format!("{}:{line}: {word}", document.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "no file of the tree ends with these paths:\n  {}", missing.join("\n  "));
    assert!(checked > 150, "only {checked} files were found in the documents");
}

/// A page of docs/design names the modules of its code: "Code: crate `x`, modules `a`, `b::c` (…); crate …".
#[test]
fn every_module_named_by_a_design_page_exists() {
    let files = listed("*.rs");
    let (mut missing, mut checked) = (Vec::new(), 0);
    for document in documents().into_iter().filter(|page| page.starts_with(root().join("docs/design"))) {
        let text = read(&document);
        let Some((_, modules)) = text.lines().find_map(|line| line.split_once("Code: ")) else { continue };
        for part in modules.split("; ").filter_map(|part| part.strip_prefix("crate `")) {
            let Some((name, rest)) = part.split_once('`') else { continue };
            let rest = rest.split(". ").next().unwrap_or_default();
            let modules =
                rest.split('`').skip(1).step_by(2).filter(|word| !word.contains(['(', ')', '.', '/']));
            for module in modules.filter(|word| word.chars().all(|next| !next.is_uppercase())) {
                checked += 1;
                let path = module.replace("::", "/");
                let is_file = |file: &String| {
                    file.starts_with(&format!("crates/{name}/"))
                        && (file.ends_with(&format!("/{path}.rs")) || file.contains(&format!("/{path}/")))
                };
                if !files.iter().any(is_file) {
                    missing.push(format!("{}: crate {name} has no module {module}", document.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "docs/design names modules that are gone:\n  {}", missing.join("\n  "));
    assert!(checked > 100, "only {checked} modules were found in docs/design");
}

/// Names of types, constants, functions and tests: those that are more than a word.
#[test]
fn every_name_of_the_code_in_a_document_exists() {
    let code: BTreeSet<String> = ["*.rs", "*.ts", "*.toml", "*.py"]
        .iter()
        .flat_map(|kind| listed(kind))
        .fold(BTreeSet::new(), |mut known, file| {
            let text = read(&root().join(file));
            known.extend(text.split(|next: char| !is_of_name(next)).map(str::to_owned));
            known
        });
    let about_code = |document: &PathBuf| {
        let name = document.strip_prefix(root()).expect("below").to_string_lossy().into_owned();
        let pages = ["CONTRIBUTING.md", "docs/architecture.md", "docs/security.md", "docs/performance.md"];
        pages.contains(&&*name) || name.starts_with("docs/design/") || name.starts_with("docs/vectors/")
    };
    let (mut missing, mut checked) = (Vec::new(), 0);
    for document in documents().into_iter().filter(about_code) {
        for (line, word) in code_words(&read(&document)) {
            if is_name_of_code(&word) {
                checked += 1;
                let parts = word.split("::");
                missing.extend(
                    parts
                        .filter(|part| !code.contains(*part))
                        .map(|part| format!("{}:{line}: {part}", document.display())),
                );
            }
        }
    }
    assert!(missing.is_empty(), "these names are not in the code:\n  {}", missing.join("\n  "));
    assert!(checked > 500, "only {checked} names were found in the documents");
}

#[test]
fn every_command_of_dev_in_a_document_exists() {
    let dev = read(&root().join("dev"));
    let (_, cases) = dev.split_once("\ncase $command in\n").expect("the commands of ./dev");
    let labels = cases.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let labels = labels.filter_map(|line| line.split_once(')')).flat_map(|(names, _)| names.split('|'));
    let known: BTreeSet<&str> = labels.map(str::trim).chain(["help"]).collect();
    let (mut missing, mut checked) = (Vec::new(), 0);
    for document in documents() {
        for (line, text) in (1..).zip(read(&document).lines()) {
            for rest in text.split("./dev ").skip(1) {
                let name: String = rest.chars().take_while(|next| next.is_ascii_lowercase()).collect();
                checked += usize::from(!name.is_empty());
                if !name.is_empty() && !known.contains(&*name) {
                    missing.push(format!("{}:{line}: ./dev {name}", document.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "commands that ./dev does not have:\n  {}", missing.join("\n  "));
    assert!(checked > 100, "only {checked} commands were found in the documents");
}

#[test]
fn the_architecture_is_short() {
    let text = read(&root().join("docs/architecture.md"));
    let size: usize = text.split("```").step_by(2).map(str::len).sum();
    assert!(
        size <= 15_000,
        "docs/architecture.md has {size} bytes beside its pictures, at most 15000 are allowed: move details to docs/design"
    );
}

#[test]
fn the_readme_is_short() {
    let size = read(&root().join("README.md")).len();
    assert!(
        size <= 9000,
        "README.md has {size} bytes, at most 9000 are allowed: move what only some readers need to docs/guide"
    );
}

#[test]
fn links_and_headings_are_found_as_a_renderer_finds_them() {
    let page = "# A `b` – c!\n[x](y.md#z) ![p](q.svg)\n```\n[no](no.md)\n# no\n```\n`[no](no.md)` [w](https://x/)\n## A b c\n## A b c\n\
                [r]: z.md\n[s]: https://x/\n";
    assert_eq!(links(page), [(2, "y.md#z".to_owned()), (2, "q.svg".to_owned()), (10, "z.md".to_owned())]);
    assert_eq!(headings(page), ["a-b--c", "a-b-c", "a-b-c-1"]);
}

/// Whether Rust code defines an item of this name.
fn defines(code: &str, name: &str) -> bool {
    let kinds = ["fn", "const", "struct", "enum", "trait", "static", "mod", "type"];
    let ends = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_');
    kinds.iter().any(|kind| code.split(&format!("{kind} {name}")).skip(1).any(ends))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository").to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All Markdown files of the repository.
fn documents() -> Vec<PathBuf> {
    listed("*.md").iter().map(|name| root().join(name)).collect()
}

/// The files of the repository that a pattern matches, by their paths in it.
fn listed(pattern: &str) -> Vec<String> {
    let words = ["ls-files", "--cached", "--others", "--exclude-standard", pattern];
    let output = Command::new("git").args(words).current_dir(root()).output().expect("git runs");
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    let exists = |name: &&str| root().join(name).exists();
    let found: Vec<_> = listing.lines().filter(exists).map(str::to_owned).collect();
    assert!(!found.is_empty(), "git ls-files finds no {pattern}");
    found
}

/// The texts between backticks in the prose of a document, with their lines.
fn code_words(text: &str) -> Vec<(usize, String)> {
    let words = |(number, line): (usize, &str)| {
        let words: Vec<_> =
            line.split('`').skip(1).step_by(2).map(|word| (number, word.to_owned())).collect();
        words
    };
    prose(text).into_iter().flat_map(words).collect()
}

fn is_of_name(next: char) -> bool {
    next.is_ascii_alphanumeric() || next == '_'
}

/// Whether a word can only be a name of the code: a path of names, a constant or type of several words, a
/// sentence.
fn is_name_of_code(word: &str) -> bool {
    let is_name = |part: &str| !part.is_empty() && part.chars().all(is_of_name);
    let is_path = word.contains("::") && word.split("::").all(is_name);
    let is_constant = word.contains('_')
        && !word.ends_with('_')
        && word.chars().all(|next| next.is_ascii_uppercase() || next == '_');
    let humps = word.chars().filter(char::is_ascii_uppercase).count();
    let is_type = word.chars().all(|next| next.is_ascii_alphanumeric())
        && word.starts_with(|first: char| first.is_ascii_uppercase())
        && (2..word.len() / 2).contains(&humps);
    let is_sentence = is_name(word) && word.matches('_').count() > 2;
    is_path || is_constant || is_type || is_sentence
}

/// The README and the guide.
fn pages() -> Vec<PathBuf> {
    let guide = documents().into_iter().filter(|path| path.starts_with(root().join("docs/guide")));
    guide.chain([root().join("README.md")]).collect()
}

/// The lines of a document outside of blocks of code, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !inside && !fence
    });
    lines.collect()
}

/// Relative links, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // Text between backticks is code.
        let line: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let reference = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        let targets = inline.chain(reference.map(|(_, target)| target.trim()));
        let relative = targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:"));
        found.extend(relative.map(|target| (number, target.to_owned())));
    }
    found
}

/// The anchors of the headings of a document, as GitHub makes them.
fn headings(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for (_, line) in prose(text) {
        let Some((_, title)) = line
            .split_once(' ')
            .filter(|(marks, _)| !marks.is_empty() && marks.chars().all(|mark| mark == '#'))
        else {
            continue;
        };
        let kept = title.trim().to_lowercase();
        let kept = kept.chars().filter(|character| character.is_alphanumeric() || "-_ ".contains(*character));
        let anchor: String = kept.map(|character| if character == ' ' { '-' } else { character }).collect();
        let count = times.entry(anchor.clone()).or_insert(0);
        found.push(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    found
}
