//! Writes `docs/reference` from the definitions in the code, or reports where the two differ.
//!
//! In: the commands (clap), and what `definitions` gives: schemas of files and answers, metrics,
//! events, errors. Out: pages of Markdown and two JSON schemas. Always holds: all texts about options, keys,
//! fields, metrics, events and errors come from their definitions; only the introductions of the pages are in
//! the folder `text`.

mod answers;
mod commands;
mod definitions;
mod files;
mod markdown;
mod since;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use since::Since;

/// Environment variable: if it is set, the test writes the pages instead of comparing them.
const WRITE: &str = "MPVPN_WRITE_REFERENCE";
/// The next step after a difference.
const MEND: &str = "`./dev reference` writes docs/reference anew; commit it with the change";

/// The pages by their file names.
fn pages(since: &mut Since) -> BTreeMap<&'static str, String> {
    let mut pages = BTreeMap::from([
        ("README.md", include_str!("reference/text/index.txt").to_owned()),
        ("commands.md", commands::all(since)),
        ("proxy.md", commands::proxy()),
        ("server.md", files::server(since)),
        ("client.md", files::client(since)),
        ("users.md", files::users(since)),
        ("server.schema.json", files::schema(&definitions::server_for_editors())),
        ("client.schema.json", files::schema(&definitions::client_for_editors())),
        ("status.md", answers::status(since)),
        ("check.md", answers::check(since)),
        ("measure.md", answers::measure(since)),
        ("events.md", answers::events(since)),
        ("metrics.md", answers::metrics(since)),
        ("errors.md", answers::errors()),
    ]);
    pages.insert(since::FILE, since.written());
    pages
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference")
}

#[test]
fn the_reference_is_what_the_code_defines() {
    let folder = folder();
    let known = fs::read_to_string(folder.join(since::FILE)).unwrap_or_default();
    let pages = pages(&mut Since::read(&known));
    if std::env::var_os(WRITE).is_some() {
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in pages {
            fs::write(folder.join(name), text).unwrap();
        }
        return;
    }
    for (name, text) in &pages {
        let there = fs::read_to_string(folder.join(name)).unwrap_or_default();
        if let Some(difference) = first_difference(&there, text) {
            panic!("docs/reference/{name} is not as the code: {difference}\n{MEND}");
        }
    }
    for entry in fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(
            pages.contains_key(name.to_str().unwrap()),
            "docs/reference/{name:?} is no page of the reference"
        );
    }
}

/// The first line that differs, as it is and as it should be.
fn first_difference(there: &str, should_be: &str) -> Option<String> {
    let (mut old, mut new) = (there.split('\n'), should_be.split('\n'));
    let mut number = 1;
    loop {
        match (old.next(), new.next()) {
            (None, None) => return None,
            (a, b) if a == b => number += 1,
            (a, b) => {
                let [a, b] = [a, b].map(|line| line.unwrap_or("(end of the file)"));
                return Some(format!("line {number}\n- {a}\n+ {b}"));
            }
        }
    }
}

#[test]
fn a_difference_is_told_by_its_first_line() {
    assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
    assert_eq!(first_difference("a\nb\n", "a\nc\n").unwrap(), "line 2\n- b\n+ c");
    assert_eq!(first_difference("a\n", "a\nc\n").unwrap(), "line 2\n- \n+ c");
    assert!(first_difference("", "a").is_some());
}

#[test]
fn every_option_of_every_command_is_in_the_reference() {
    let page = commands::all(&mut Since::read(""));
    let mut count = 0;
    let mut look = |path: &str, command: &clap::Command| {
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("`{path}`\n")));
        let section = section.unwrap_or_else(|| panic!("`{path}` has no section"));
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let name = commands::name(arg);
            assert!(
                name == "--help" || name == "--version" || section.contains(&name),
                "`{path}` lacks {name}"
            );
            count += 1;
        }
    };
    commands::visit(&mut look);
    assert!(count > 100, "{count} options");
}

#[test]
fn what_is_newer_than_the_record_is_marked_with_the_version_of_today() {
    let mut since = Since::read("0.0.9\n  option mpvpn server --listen\n");
    let page = commands::all(&mut since);
    assert!(page.contains("(since 0.0.9)"), "an item of another version says so");
    assert!(since.written().contains(&format!("{}\n", env!("CARGO_PKG_VERSION"))));
    assert_eq!(Since::read(&since.written()).written(), since::HEAD, "what is not asked for is gone");
}
