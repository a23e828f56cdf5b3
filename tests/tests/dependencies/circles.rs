//! Checks that few files of a crate use each other in circles: a file of a circle is understood only with all
//! others of it.
//!
//! In: the Rust files of each crate, without tests. A file uses another if its code has a path, or a name
//! that `use` binds, that leads to an item defined there. Re-exports are followed to the file that defines
//! the item; neither they nor `mod` are uses of their own. No use is counted of a file's own parents:
//! `connection/send.rs` is a part of `connection.rs`, of whose types it has methods. Methods have no path,
//! and are not followed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::{members, rust_below};

/// The maximum number of files in a circle: a reader holds about seven things in mind (Miller 1956). Fewer:
/// more items apart from their subject; more: files that cannot be read, tested or moved alone.
const MAX_FILES: usize = 8;

#[test]
fn few_files_of_a_crate_use_each_other_in_circles() {
    let mut large = Vec::new();
    for (name, folder) in members() {
        for circle in Crate::read(&folder.join("src")).circles() {
            if circle.len() > MAX_FILES {
                large.push(format!("{name}: {} files: {}", circle.len(), circle.join(", ")));
            }
        }
    }
    assert!(large.is_empty(), "circles of more than {MAX_FILES} files:\n  {}", large.join("\n  "));
}

#[test]
fn circles_are_found_through_re_exports_and_bound_names() {
    let files = [
        ("", "mod a; mod b; mod c; mod d; pub use a::A; pub fn root() {}"),
        ("a", "use super::b as other; pub struct A<'a>(&'a str); fn f() { other::B::new('\"'); }"),
        ("b", "pub use inner::B; mod inner; // crate::d::D\nuse crate::d::{self};"),
        ("b::inner", "use crate::{c::{C, self}, root}; pub struct B(C); const TEXT: &str = \"crate::d::D\";"),
        ("c", "use super::A; pub enum C { A(A) }"),
        ("d", "use crate::A; pub struct D; #[cfg(test)] mod tests { use crate::a; } mod below;"),
        ("d::below", "use super::D;"),
    ];
    let found = Crate::new(files.map(|(module, text)| (module.to_owned(), text.to_owned()))).circles();
    assert_eq!(found, [["a", "b::inner", "c"]]);
}

type Names = Vec<String>;

/// The files of a crate by their modules. The root is the empty module.
struct Crate(BTreeMap<Names, File>);

/// The code of a file without tests.
#[derive(Default)]
struct File {
    /// The names that `use` binds, and their paths.
    bound: BTreeMap<String, Names>,
    /// The modules of which `use` binds all names.
    globs: Vec<Names>,
    /// The names of items that the file defines.
    defined: BTreeSet<String>,
    /// The paths in code and in `use`, without those that are only re-exported.
    paths: Vec<Names>,
}

impl Crate {
    fn read(source: &Path) -> Self {
        // A program beside a library uses it as any other crate does.
        let root = if source.join("lib.rs").exists() { "lib" } else { "main" };
        let module = |file: &Path| {
            let path = file.strip_prefix(source).expect("below the folder").with_extension("");
            let path = path.to_str().expect("UTF-8").replace('/', "::");
            let path = path.strip_suffix("::mod").unwrap_or(&path);
            (if path == root { "" } else { path }).to_owned()
        };
        let text = |file: &Path| fs::read_to_string(file).expect("a file of this tree can be read");
        Self::new(rust_below(source).iter().map(|file| (module(file), text(file))))
    }

    fn new(files: impl IntoIterator<Item = (String, String)>) -> Self {
        let module =
            |path: &str| path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        Self(files.into_iter().map(|(path, text)| (module(&path), File::read(&tokens(&text)))).collect())
    }

    /// The sets of files in which each leads to all others.
    fn circles(&self) -> Vec<Names> {
        let used = self.0.iter().map(|(module, file)| {
            let used = file.paths.iter().filter_map(|path| self.file_of(module, path, 0));
            (module, used.filter(|used| !module.starts_with(used)).collect::<BTreeSet<_>>())
        });
        let used: BTreeMap<_, _> = used.collect();
        let reached = |from| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(module) = next.pop() {
                next.extend(used[module].iter().filter(|used| reached.insert((*used).clone())));
            }
            reached
        };
        let reached: BTreeMap<_, _> = used.keys().map(|module| (*module, reached(module))).collect();
        let circle = |module: &Names| -> Names {
            let back = reached[module].iter().filter(|other| reached[other].contains(module));
            back.map(|other| other.join("::")).collect()
        };
        let circles: BTreeSet<_> = self.0.keys().map(circle).filter(|circle| !circle.is_empty()).collect();
        circles.into_iter().collect()
    }

    /// The file that defines the item to which a path in a module leads.
    fn file_of(&self, module: &Names, path: &[String], depth: usize) -> Option<Names> {
        let (first, mut rest) = path.split_first()?;
        let child = |module: &Names, name: &String| {
            Some([&module[..], std::slice::from_ref(name)].concat())
                .filter(|child| self.0.contains_key(child))
        };
        let mut at = match first.as_str() {
            "crate" => Vec::new(),
            "self" => module.clone(),
            "super" => module.split_last()?.1.to_vec(),
            _ => match (child(module, first), self.0[module].bound.get(first)) {
                (Some(child), _) => child,
                // Bounded: a name may be bound to itself, as that of another crate.
                (None, Some(bound)) if bound[0] != *first && depth < 9 => {
                    return self.file_of(module, &[bound, rest].concat(), depth + 1);
                }
                _ => return None,
            },
        };
        while let Some((name, after)) = rest.split_first() {
            let file = self.0.get(&at)?;
            if name == "super" {
                at.pop();
            } else if let Some(child) = child(&at, name) {
                at = child;
            } else if file.defined.contains(name) || depth > 8 {
                return Some(at);
            } else if let Some(bound) = file.bound.get(name) {
                return self.file_of(&at, &[bound, after].concat(), depth + 1);
            } else {
                let mut globs = file.globs.iter().map(|glob| [glob, rest].concat());
                return globs.find_map(|path| self.file_of(&at, &path, depth + 1)).or(Some(at));
            }
            rest = after;
        }
        None
    }
}

impl File {
    fn read(tokens: &[&str]) -> Self {
        let mut file = Self::default();
        let mut rest = tokens;
        let mut before = "";
        while let Some((token, after)) = rest.split_first() {
            if rest.starts_with(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                rest = after_item(rest);
            } else if *token == "use" && after.first() != Some(&"<") {
                // `pub(super) use`, too.
                let is_re_export = ["pub", ")"].contains(&before);
                let end = after.iter().position(|token| *token == ";").expect("`use` ends");
                file.bind(&mut &after[..end], &[], is_re_export);
                rest = &after[end..];
            } else if is_name(token) {
                let length = 1 + 2 * rest[1..].chunks_exact(2).take_while(|pair| is_joined(pair)).count();
                let path: Names = rest[..length].iter().step_by(2).map(ToString::to_string).collect();
                if DEFINING.contains(&before) {
                    file.defined.insert(path[0].clone());
                } else if before != "." {
                    file.paths.push(path);
                }
                rest = &rest[length..];
            } else {
                rest = after;
            }
            before = token;
        }
        file
    }

    /// Takes a tree of `use` below a path.
    fn bind(&mut self, tokens: &mut &[&str], above: &[String], is_re_export: bool) {
        let mut path = above.to_vec();
        let mut name = None;
        while let Some((token, after)) = tokens.split_first() {
            match *token {
                "{" => {
                    *tokens = after;
                    while tokens.first().is_some_and(|token| *token != "}") {
                        self.bind(tokens, &path, is_re_export);
                        *tokens = &tokens[usize::from(tokens.first() == Some(&","))..];
                    }
                    *tokens = &tokens[1..];
                    return;
                }
                "," | "}" => break,
                "as" => {
                    name = Some(after[0].to_owned());
                    *tokens = &after[1..];
                    break;
                }
                "self" if !path.is_empty() => {}
                "::" => {}
                part => path.push(part.to_owned()),
            }
            *tokens = after;
        }
        if path.last().is_some_and(|name| name == "*") {
            self.globs.push(path[..path.len() - 1].to_vec());
        }
        self.bound.insert(name.or(path.last().cloned()).expect("`use` has a name"), path.clone());
        if !is_re_export {
            self.paths.push(path);
        }
    }
}

/// The words before the name of an item.
const DEFINING: [&str; 9] = ["fn", "struct", "enum", "union", "trait", "type", "const", "static", "mod"];

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

fn is_joined(pair: &[&str]) -> bool {
    pair[0] == "::" && is_name(pair[1])
}

/// The tokens after an item that an attribute begins.
fn after_item<'a, 'b>(tokens: &'a [&'b str]) -> &'a [&'b str] {
    let mut depth = 0;
    let end = tokens.iter().position(|token| {
        match *token {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        depth <= 0 && ["}", ";"].contains(token)
    });
    &tokens[end.map_or(tokens.len(), |end| end + 1)..]
}

/// The words and signs of code without its comments and literals.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let inside = rest.trim_start_matches(['b', 'r']).trim_start_matches('#');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if inside.starts_with('"') && first != '#' {
            literal(rest, inside)
        } else if let Some(escaped) = rest.strip_prefix("'\\") {
            4 + escaped[1..].find('\'').expect("a character ends")
        } else if first == '\'' && rest[1..].chars().nth(1) == Some('\'') {
            rest[1..].find('\'').expect("a character ends") + 2
        } else {
            let is_part = |next: char| next.is_alphanumeric() || next == '_';
            let length = match rest.find(|next| !is_part(next)).unwrap_or(rest.len()) {
                0 if rest.starts_with("::") => 2,
                0 => first.len_utf8(),
                word => word,
            };
            tokens.extend(Some(&rest[..length]).filter(|token| !token.trim().is_empty()));
            length
        };
        rest = &rest[length..];
    }
    tokens
}

/// The length of a string literal; `inside` begins with its first quote.
fn literal(text: &str, inside: &str) -> usize {
    let prefix = &text[..text.len() - inside.len()];
    let body = &inside[1..];
    if prefix.contains('r') {
        let end = format!("\"{}", "#".repeat(prefix.matches('#').count()));
        return prefix.len() + 1 + body.find(&end).expect("a literal ends") + end.len();
    }
    let mut is_escaped = false;
    let end = body.find(|next| {
        let ends = next == '"' && !is_escaped;
        is_escaped = next == '\\' && !is_escaped;
        ends
    });
    prefix.len() + end.expect("a literal ends") + 2
}
