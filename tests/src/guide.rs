//! The notation in pages of the documentation that tells how their shell blocks are run.
//!
//! In: a page in Markdown. Out: the actions of the page in order, each with its line. Always holds: a shell
//! block that states neither where it runs nor why it is skipped is an error, and so is an unknown word.
//!
//! The first word after a fence is the language; renderers do not show the rest of the line:
//!
//! | block | meaning |
//! |---|---|
//! | `sh at=client` | it runs at the client, as root; `server`, `inet` (a host behind the server), `lan` (a host behind the client) |
//! | … `user` | it runs as a user without privileges |
//! | … `stays` | its one command goes on; it is ended by SIGINT when the same program starts there again, or at the page's end |
//! | … `fails=2` | it has to end with this exit code, and not with 0 |
//! | `sh skip="why"` | it does not run |
//! | `text output` | the block before prints these lines, in this order, perhaps among others: see [`prints`] |
//! | `toml at=client file=PATH` | this file is written at the client; `append=PATH` adds to it |
//! | `toml of=client` | a part of a client's file, which is read and checked; also `of=server` |
//!
//! HTML comments hold actions that readers do not need: `<!-- lab: --link 100mbit,12ms --lan -->` (the links
//! of the lab, as for `mpvpn lab up`), `<!-- link 1 down -->`, `<!-- link 1 up -->`, `<!-- copy server:FILE
//! client -->`, and blocks of shell (`<!-- sh at=server`, the lines, `-->`). The words `PIN`, `TOKEN` and
//! `LINK` stand for what a server printed last.

use crate::testbed::Host;

/// A parsed page.
#[derive(Debug)]
pub struct Page {
    /// The links, each as for `mpvpn lab up --link`.
    pub links: Vec<String>,
    /// Whether there is a LAN behind the client.
    pub lan: bool,
    /// The actions in order.
    pub steps: Vec<Step>,
}

impl Page {
    /// The hosts of all actions, each once.
    pub fn hosts(&self) -> Vec<Host> {
        let mut hosts = Vec::new();
        for step in &self.steps {
            let used = match &step.action {
                Action::Run(run) => vec![run.at.host],
                Action::Write { at, .. } => vec![at.host],
                Action::Copy { from, to, .. } => vec![*from, *to],
                Action::Check { .. } | Action::Cable { .. } => Vec::new(),
            };
            hosts.extend(used.into_iter().filter(|host| !hosts.contains(host)).collect::<Vec<_>>());
        }
        hosts
    }
}

/// An action and its line in the page.
#[derive(Debug)]
pub struct Step {
    /// Line number, from 1.
    pub line: usize,
    /// The action.
    pub action: Action,
}

/// An action of a page.
#[derive(Debug)]
pub enum Action {
    /// Runs a shell block.
    Run(Run),
    /// Writes a file, or appends to it.
    Write {
        /// Host and user.
        at: At,
        /// Path of the file; relative paths are below the user's home folder.
        path: String,
        /// Whether the text is appended.
        append: bool,
        /// The content.
        text: String,
    },
    /// Parses a part of a configuration file.
    Check {
        /// Whether it belongs to a server's file, not a client's.
        server: bool,
        /// The content.
        text: String,
    },
    /// Removes or restores the carrier of a link.
    Cable {
        /// Number of the link, from 1.
        link: usize,
        /// Whether the carrier is restored.
        up: bool,
    },
    /// Copies a file between the home folders of two hosts.
    Copy {
        /// Source host.
        from: Host,
        /// File name.
        file: String,
        /// Destination host.
        to: Host,
    },
}

/// A host and a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The host.
    pub host: Host,
    /// Whether the user is unprivileged; else root.
    pub user: bool,
}

/// A shell block that runs.
#[derive(Debug)]
pub struct Run {
    /// Host and user.
    pub at: At,
    /// Whether the command keeps running (`stays`).
    pub stays: bool,
    /// The required exit code.
    pub code: i32,
    /// The commands.
    pub script: String,
    /// The output that the page shows, with line numbers of the page.
    pub output: Vec<(usize, String)>,
}

/// Parses a page.
pub fn parse(page: &str) -> Result<Page, String> {
    let mut parsed = Page { links: Vec::new(), lan: false, steps: Vec::new() };
    let mut lines = (1..).zip(page.lines());
    while let Some((line, text)) = lines.next() {
        if let Some(info) = text.strip_prefix("```") {
            let body = take(&mut lines, line, |text| text == "```")?;
            block(&mut parsed, line, &words(info), body).map_err(|why| format!("line {line}: {why}"))?;
        } else if let Some(start) = text.strip_prefix("<!--") {
            let (head, body) = match start.strip_suffix("-->") {
                Some(whole) => (whole, Vec::new()),
                None => (start, take(&mut lines, line, |text| text == "-->")?),
            };
            comment(&mut parsed, line, &words(head), body).map_err(|why| format!("line {line}: {why}"))?;
        }
    }
    Ok(parsed)
}

/// The lines up to the end of a block.
fn take<'a>(
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
    line: usize,
    is_end: impl Fn(&str) -> bool,
) -> Result<Vec<(usize, &'a str)>, String> {
    let mut body = Vec::new();
    for (number, text) in lines {
        if is_end(text) {
            return Ok(body);
        }
        body.push((number, text));
    }
    Err(format!("line {line}: this block has no end"))
}

/// The words of an info string; values in quotes may contain spaces.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for character in text.chars() {
        match character {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            _ => word.push(character),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

fn block(page: &mut Page, line: usize, words: &[String], body: Vec<(usize, &str)>) -> Result<(), String> {
    match words.first().map(String::as_str) {
        Some("sh") => shell(page, line, &words[1..], &body),
        Some("toml") => toml(page, line, &words[1..], &body),
        Some("text") if words.len() == 2 && words[1] == "output" => {
            let shown = body.iter().filter(|(_, text)| !text.trim().is_empty());
            let shown = shown.map(|(line, text)| (*line, (*text).to_owned())).collect();
            match page.steps.last_mut() {
                Some(Step { action: Action::Run(run), .. }) => run.output = shown,
                _ => return Err("`output` follows a block that runs".to_owned()),
            }
            Ok(())
        }
        Some("bash" | "shell" | "console") => Err("a block of shell is one of `sh`".to_owned()),
        _ if words.len() < 2 => Ok(()),
        _ => Err(format!("`{}` has no meaning", words.join(" "))),
    }
}

fn comment(page: &mut Page, line: usize, words: &[String], body: Vec<(usize, &str)>) -> Result<(), String> {
    let all: Vec<&str> = words.iter().map(String::as_str).collect();
    let action = match all.as_slice() {
        ["lab:", options @ ..] => return lab(page, options),
        ["sh", ..] => return shell(page, line, &words[1..], &body),
        ["link", number, state @ ("up" | "down")] => Action::Cable {
            link: number.parse().map_err(|_| format!("`{number}` is no number of a link"))?,
            up: *state == "up",
        },
        ["copy", from, to] => {
            let (from, file) = from.split_once(':').ok_or("copy PLACE:FILE PLACE")?;
            Action::Copy { from: host(from)?, file: file.to_owned(), to: host(to)? }
        }
        _ => return Err(format!("`{}` has no meaning", words.join(" "))),
    };
    page.steps.push(Step { line, action });
    Ok(())
}

fn lab(page: &mut Page, options: &[&str]) -> Result<(), String> {
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match *option {
            "--lan" => page.lan = true,
            "--link" => page.links.push((*options.next().ok_or("--link needs a value")?).to_owned()),
            other => return Err(format!("`{other}` is no option of a lab here")),
        }
    }
    Ok(())
}

fn shell(page: &mut Page, line: usize, words: &[String], body: &[(usize, &str)]) -> Result<(), String> {
    let (mut at, mut user, mut stays, mut code, mut skip) = (None, false, false, 0, false);
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("at", name) => at = Some(host(name)?),
            ("user", "") => user = true,
            ("stays", "") => stays = true,
            ("fails", number) => code = number.parse().map_err(|_| format!("`{number}` is no exit code"))?,
            ("skip", why) if !why.is_empty() => skip = true,
            _ => return Err(format!("`{word}` has no meaning for a block of shell")),
        }
    }
    match (at, skip) {
        (None, true) => Ok(()),
        (Some(host), false) => {
            let at = At { host, user };
            let run = Run { at, stays, code, script: joined(body), output: Vec::new() };
            page.steps.push(Step { line, action: Action::Run(run) });
            Ok(())
        }
        (Some(_), true) => Err("a block that is skipped runs nowhere".to_owned()),
        (None, false) => Err("say where it runs (at=client), or why it does not (skip=\"…\")".to_owned()),
    }
}

fn toml(page: &mut Page, line: usize, words: &[String], body: &[(usize, &str)]) -> Result<(), String> {
    let (mut at, mut user, mut file, mut of) = (None, false, None, None);
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("at", name) => at = Some(host(name)?),
            ("user", "") => user = true,
            ("file", path) => file = Some((path.to_owned(), false)),
            ("append", path) => file = Some((path.to_owned(), true)),
            ("of", "client") => of = Some(false),
            ("of", "server") => of = Some(true),
            _ => return Err(format!("`{word}` has no meaning for a block of TOML")),
        }
    }
    let text = joined(body);
    let action = match (at, file, of) {
        (Some(host), Some((path, append)), None) => {
            Action::Write { at: At { host, user }, path, append, text }
        }
        (None, None, Some(server)) => Action::Check { server, text },
        _ => return Err("say where it is written (at= and file=), or whose it is (of=)".to_owned()),
    };
    page.steps.push(Step { line, action });
    Ok(())
}

fn joined(body: &[(usize, &str)]) -> String {
    body.iter().map(|(_, text)| format!("{text}\n")).collect()
}

fn host(name: &str) -> Result<Host, String> {
    match name {
        "client" => Ok(Host::Client),
        "server" => Ok(Host::Server),
        "inet" => Ok(Host::Inet),
        "lan" => Ok(Host::Lan),
        _ => Err(format!("`{name}` is none of: client, server, inet, lan")),
    }
}

/// Whether `printed` contains all lines of `shown` in this order, perhaps among others; else the first
/// missing line.
///
/// Words are compared without the white space between them. All numbers are equal, and so are all units of
/// bytes, rates and time. `…` in a word stands for any characters, and alone for any words.
pub fn prints<'a>(printed: &str, shown: &'a [(usize, String)]) -> Result<(), (usize, &'a str)> {
    let mut printed = printed.lines().map(tokens);
    for (line, text) in shown {
        let wanted = tokens(text);
        if !printed.any(|found| fits(&wanted, &found)) {
            return Err((*line, text));
        }
    }
    Ok(())
}

/// Units that count as equal in outputs.
const UNITS: [&str; 15] = [
    "B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "ms", "s", "min", "h",
];

fn tokens(line: &str) -> Vec<String> {
    line.split_whitespace().map(token).collect()
}

/// A word with `#` for each number.
fn token(word: &str) -> String {
    let bare = word.trim_end_matches([',', ';', ')']);
    if UNITS.contains(&bare) {
        return word.replace(bare, "unit");
    }
    let is_digit = |character: Option<char>| character.is_some_and(|character| character.is_ascii_digit());
    let (mut text, mut rest) = (String::new(), word.chars());
    while let Some(character) = rest.next() {
        // A decimal point between digits is a part of the number.
        let is_point = character == '.' && text.ends_with('#') && is_digit(rest.clone().next());
        if !character.is_ascii_digit() && !is_point {
            text.push(character);
        } else if !text.ends_with('#') {
            text.push('#');
        }
    }
    text
}

fn fits(wanted: &[String], found: &[String]) -> bool {
    match wanted.split_first() {
        None => found.is_empty(),
        Some((any, rest)) if any == "…" => (0..=found.len()).any(|from| fits(rest, &found[from..])),
        Some((word, rest)) => {
            found.split_first().is_some_and(|(first, others)| is_like(word, first) && fits(rest, others))
        }
    }
}

/// Whether a word matches, where `…` stands for any characters.
fn is_like(wanted: &str, found: &str) -> bool {
    match wanted.split_once('…') {
        None => wanted == found,
        Some((start, end)) => found.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lines: &[&str]) -> Vec<(usize, String)> {
        (1..).zip(lines).map(|(line, text)| (line, (*text).to_owned())).collect()
    }

    #[test]
    fn a_page_is_parsed_in_order_with_line_numbers() {
        let page = "<!-- lab: --link 10mbit,1ms --lan -->\n# A\n```sh at=server stays\nsudo x\n```\n\n```text output\nup 1\n```\n\
                    <!-- link 1 down -->\n<!-- sh at=lan\na\nb\n-->\n```toml at=client user file=a.toml\nb = 1\n```\n\
                    ```sh skip=\"it is not there\"\nz\n```\n```json\n{}\n```\n<!-- copy server:a client -->\n";
        let page = parse(page).expect("a page");
        assert_eq!((page.links.as_slice(), page.lan), (&["10mbit,1ms".to_owned()][..], true));
        let lines: Vec<usize> = page.steps.iter().map(|step| step.line).collect();
        assert_eq!(lines, [3, 10, 11, 15, 24], "{page:#?}");
        let Action::Run(run) = &page.steps[0].action else { panic!("{page:#?}") };
        assert_eq!((run.script.as_str(), run.stays, run.code), ("sudo x\n", true, 0));
        assert_eq!(run.output, [(8, "up 1".to_owned())]);
        let Action::Run(run) = &page.steps[2].action else { panic!("{page:#?}") };
        assert_eq!((run.at, run.script.as_str()), (At { host: Host::Lan, user: false }, "a\nb\n"));
        let Action::Write { at, append, .. } = &page.steps[3].action else { panic!("{page:#?}") };
        assert!(at.user && !append);
        assert_eq!(page.hosts(), [Host::Server, Host::Lan, Host::Client]);
    }

    #[test]
    fn blocks_without_notation_or_with_unknown_words_are_errors_with_the_line() {
        for (page, why) in [
            ("\n```sh\nx\n```\n", "line 2: say where it runs"),
            ("```sh at=moon\n```\n", "line 1: `moon` is none of"),
            ("```sh at=client fast\n```\n", "line 1: `fast` has no meaning"),
            ("```bash\n```\n", "line 1: a block of shell is one of `sh`"),
            ("```sh at=client skip=\"x\"\n```\n", "line 1: a block that is skipped"),
            ("```toml\n```\n", "line 1: say where it is written"),
            ("```text output\n```\n", "line 1: `output` follows"),
            ("<!-- TODO -->\n", "line 1: `TODO` has no meaning"),
            ("\n\n```sh at=client\n", "line 3: this block has no end"),
        ] {
            let error = parse(page).expect_err(page);
            assert!(error.starts_with(why), "{page:?}: {error}");
        }
    }

    #[test]
    fn output_is_compared_by_words_and_not_by_numbers() {
        let printed = "first\nlink  state  sent\neth1  up  29.1 KiB\n2026-11-26T04:33:05Z  INFO eth1: pin 5f3ce1 (pid 7)\n";
        for fitting in [
            &["link state sent", "eth2 up 1 MiB"][..],
            &["… INFO eth1: pin 5f…e1 (pid 19750)"],
            &["first", "… eth1: …"],
            &[],
        ] {
            assert_eq!(prints(printed, &shown(fitting)), Ok(()), "{fitting:?}");
        }
        for (other, line) in [
            (&["eth1 down 29.1 KiB"][..], 1),
            (&["eth1 up 29.1 KiB", "link state sent"], 2),
            (&["eth1 up 29.1"], 1),
            (&["first", "… WARN …"], 2),
        ] {
            assert_eq!(prints(printed, &shown(other)).map_err(|(line, _)| line), Err(line), "{other:?}");
        }
    }
}
