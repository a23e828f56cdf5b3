//! Checks the language of the code as far as a program can (CONTRIBUTING.md, "Language"): names, the
//! beginning of comments, the width of lines.
//!
//! In: all Rust files of the repository, and the words in `tests/words.toml`. Out: the places that break a
//! rule.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The maximum width of a line in characters, that of `rustfmt.toml`: two files fit beside each other on a
/// screen. Narrower: more lines; wider: lines are cut in reviews.
const MAX_WIDTH: usize = 110;
/// Words that are no subject of a comment: the comment states what the item is.
const NO_SUBJECTS: [&str; 4] = ["What", "Who", "Whoever", "Whatever"];

#[test]
fn names_avoid_words_that_have_a_better_term() {
    let rules = Rules::read();
    let mut found = Vec::new();
    let mut allowed = BTreeSet::new();
    for (file, text) in sources() {
        for (line, name) in names(&file, &without_literals(&text)) {
            let Some((word, rule)) = rules.broken_by(&name) else { continue };
            if rule.allow.contains(&name) {
                allowed.insert((word, name));
            } else {
                found.push(format!(
                    "{}:{line}: {name}: instead of \"{word}\" {}",
                    file.display(),
                    rule.instead
                ));
            }
        }
    }
    let unused = rules.words.iter().flat_map(|(word, rule)| rule.allow.iter().map(move |name| (word, name)));
    let unused = unused.filter(|(word, name)| !allowed.contains(&((*word).clone(), (*name).clone())));
    found.extend(unused.map(|(word, name)| format!("tests/words.toml: {word} allows {name}, which is gone")));
    assert!(
        found.is_empty(),
        "{} names (the words: tests/words.toml):\n  {}",
        found.len(),
        found.join("\n  ")
    );
}

#[test]
fn comments_begin_with_their_subject() {
    let begins = |comment: &&str| {
        NO_SUBJECTS.iter().any(|word| {
            comment.strip_prefix(word).is_some_and(|rest| rest.starts_with([' ', ',', ':', '\'']))
        })
    };
    let mut found = Vec::new();
    for (file, text) in sources() {
        for (line, comment) in (1..).zip(text.lines().map(comment)) {
            if let Some(comment) = comment.filter(begins) {
                found.push(format!("{}:{line}: {comment}", file.display()));
            }
        }
    }
    assert!(found.is_empty(), "{} comments begin with no subject:\n  {}", found.len(), found.join("\n  "));
}

#[test]
fn lines_are_not_wider_than_the_format_allows() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        let code = without_literals(&text);
        assert_eq!(code.lines().count(), text.lines().count(), "{}", file.display());
        for ((number, line), code) in (1..).zip(text.lines()).zip(code.lines()) {
            let width = line.chars().count();
            // A row of a table cannot be broken.
            let is_row = comment(line).is_some_and(|text| text.starts_with("| "));
            if width > MAX_WIDTH && code.chars().count() > MAX_WIDTH && !is_row {
                found.push(format!("{}:{number}: {width} columns", file.display()));
            }
        }
    }
    assert!(
        found.is_empty(),
        "{} lines are wider than {MAX_WIDTH} columns without their string literals:\n  {}",
        found.len(),
        found.join("\n  ")
    );
}

#[test]
fn names_and_literals_are_found_in_code() {
    let text = "pub(crate) struct OneWay<T> {\n    /// A.\n    pub told: T,\n    late_by: u8,\n}\n#[test]\n\
                fn a_told_test() {}\nconst fn sure() {}\nenum Fate {\n    Lost,\n}\nconst LIMIT: u8 = 1;\n";
    let found: Vec<_> = names(Path::new("a/told.rs"), text).into_iter().map(|(_, name)| name).collect();
    assert_eq!(found, ["told", "OneWay", "told", "late_by", "sure", "Fate", "Lost", "LIMIT"]);
    assert_eq!(words("OneWay_DELAY2x"), ["one", "way", "delay", "x"]);
    let text = "a(\"b\\\"c\", r#\"d\"\ne\"#, '\"', 'x'); // \"f\"\nlet l: &'static str = b\"\";\n";
    assert_eq!(
        without_literals(text),
        "a(\"\", \"\n\", '\"', 'x'); // \"f\"\nlet l: &'static str = b\"\";\n"
    );
}

/// The words that names avoid.
struct Rules {
    words: BTreeMap<String, Rule>,
}

/// A word that names avoid.
struct Rule {
    /// The better term.
    instead: String,
    /// Whether only a name that is the word alone breaks the rule.
    is_whole_name: bool,
    /// Names in which the word is the term of its field, or that users wrote down.
    allow: BTreeSet<String>,
}

impl Rules {
    fn read() -> Self {
        let table: toml::Table =
            read(&root().join("tests/words.toml")).parse().expect("tests/words.toml is TOML");
        let text = |value: &toml::Value| value.as_str().expect("a text").to_owned();
        let rule = |(word, value): (&String, &toml::Value)| {
            let known = ["use", "whole-name", "allow", "why"];
            let table = value.as_table().expect("a table for each word");
            assert!(table.keys().all(|key| known.contains(&key.as_str())), "{word}: keys are {known:?}");
            let allow: BTreeSet<_> = table
                .get("allow")
                .and_then(|names| names.as_array())
                .into_iter()
                .flatten()
                .map(text)
                .collect();
            assert_eq!(
                allow.is_empty(),
                !table.contains_key("why"),
                "{word}: names are allowed for a reason"
            );
            let rule = Rule {
                instead: text(&table["use"]),
                is_whole_name: table.get("whole-name").is_some_and(|value| value.as_bool() == Some(true)),
                allow,
            };
            (word.clone(), rule)
        };
        Self { words: table.iter().map(rule).collect() }
    }

    /// The first rule that a name breaks, with its word.
    fn broken_by(&self, name: &str) -> Option<(String, &Rule)> {
        let parts = words(name);
        let word = parts
            .iter()
            .find(|word| self.words.get(*word).is_some_and(|rule| !rule.is_whole_name || parts.len() == 1))?;
        Some((word.clone(), &self.words[word]))
    }
}

/// The words of a name, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for character in name.chars() {
        let begins = character.is_uppercase() && before.is_lowercase();
        if begins || !character.is_alphabetic() {
            words.push(String::new());
        }
        if character.is_alphabetic() {
            words.last_mut().expect("not empty").extend(character.to_lowercase());
        }
        before = character;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The names that a file defines, with their lines: its own, those of items but tests, of fields and
/// variants.
fn names(file: &Path, text: &str) -> Vec<(usize, String)> {
    let stem = file.file_stem().expect("a file").to_string_lossy().into_owned();
    let mut found = vec![(0, stem)];
    // The indentation of the fields or variants of the definition that is open.
    let mut fields = None;
    let mut is_test = false;
    for (number, line) in (1..).zip(text.lines()) {
        let indent = line.len() - line.trim_start().len();
        let code = without_visibility(line.trim_start());
        if fields == Some(indent) {
            let name: String =
                code.chars().take_while(|next| next.is_alphanumeric() || *next == '_').collect();
            let ends = code[name.len()..].trim_start();
            if !name.is_empty() && (ends.starts_with([':', ',', '(', '{', '=']) || ends.is_empty()) {
                found.push((number, name));
            }
        }
        if let Some((kind, name)) = item(code) {
            if !(kind == "fn" && is_test) {
                found.push((number, name));
            }
            if ["struct", "enum", "union"].contains(&kind) && line.ends_with('{') {
                fields = Some(indent + 4);
            }
        }
        if fields.is_some_and(|fields| indent < fields && line.trim_start().starts_with('}')) {
            fields = None;
        }
        is_test = match code {
            attribute if attribute.starts_with("#[") => is_test || attribute.contains("test]"),
            _ => false,
        };
    }
    found
}

/// The kind and the name of the item that a line defines.
fn item(code: &str) -> Option<(&str, String)> {
    let mut code = code;
    loop {
        let (word, rest) = code.split_once(' ')?;
        let name: String = rest.chars().take_while(|next| next.is_alphanumeric() || *next == '_').collect();
        match word {
            "const" if !rest[name.len()..].starts_with(':') => code = rest,
            "async" | "unsafe" | "default" | "extern" | "\"C\"" => code = rest,
            "fn" | "struct" | "enum" | "union" | "trait" | "type" | "mod" | "static" | "const" => {
                return (!name.is_empty()).then_some((word, name));
            }
            _ => return None,
        }
    }
}

fn without_visibility(code: &str) -> &str {
    let Some(rest) = code.strip_prefix("pub") else { return code };
    let rest = match rest.strip_prefix('(') {
        Some(inside) => inside.split_once(')').map_or(rest, |(_, rest)| rest),
        None => rest,
    };
    rest.strip_prefix(' ').unwrap_or(code)
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim_start())
}

/// The code with empty string literals.
fn without_literals(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(literal) = literal(rest, kept.chars().next_back()) {
            kept.push('"');
            kept.extend(rest[..literal].chars().filter(|inside| *inside == '\n'));
            kept.push('"');
            rest = &rest[literal..];
            continue;
        } else if rest.starts_with("'\"'") {
            3
        } else if let Some(escaped) = rest.strip_prefix("'\\") {
            2 + escaped.chars().next().map_or(0, char::len_utf8)
        } else {
            next.len_utf8()
        };
        kept.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    kept
}

/// The length of the string literal with which the text begins; `before`: the character before it.
fn literal(text: &str, before: Option<char>) -> Option<usize> {
    if let Some(inside) = text.strip_prefix('"') {
        let mut is_escaped = false;
        let end = inside.find(|next| {
            let ends = next == '"' && !is_escaped;
            is_escaped = next == '\\' && !is_escaped;
            ends
        });
        return Some(end.map_or(text.len(), |end| end + 2));
    }
    let raw = text.strip_prefix('r').filter(|_| before.is_none_or(|before| !before.is_alphanumeric()))?;
    let hashes = raw.len() - raw.trim_start_matches('#').len();
    let inside = raw[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(inside.find(&end).map_or(text.len(), |at| 1 + hashes + 1 + at + end.len()))
}

/// All Rust files of the repository, by their paths in it.
fn sources() -> Vec<(PathBuf, String)> {
    let words = ["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"];
    let output = Command::new("git").args(words).current_dir(root()).output().expect("git runs");
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    let files = listing.lines().map(PathBuf::from).filter(|file| root().join(file).exists());
    let found: Vec<_> = files.map(|file| (file.clone(), read(&root().join(file)))).collect();
    assert!(found.len() > 500, "git ls-files finds {} files", found.len());
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository").to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
