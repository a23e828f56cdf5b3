//! Shows what a configuration file and a command line say.
//!
//! In: a file, and the arguments of a command line. Out: each key with its value and where that comes from.
//! Always holds: nothing is written; secrets are not shown.

use std::{collections::BTreeMap, path::Path};

use clap::Args;
use toml_edit::{Document, Item, TableLike};

use super::{ClientOptions, FileKind, ServerOptions, file::line_of};
use mpvpn_input::{Error, Result, files};
use mpvpn_status::reload_report::ConfigValue;
use mpvpn_types::most_similar;

impl FileKind {
    /// The command that a file is for: as given, else as its keys say, else its name.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn of(path: &Path, given: Option<Self>) -> Result<Self> {
        given.map_or_else(|| Ok(Self::guess(path, &files::read_text(path)?)), Ok)
    }

    fn guess(path: &Path, text: &str) -> Self {
        let keys = text.parse::<toml::Table>().unwrap_or_default();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let has = |some: &[&str]| some.iter().any(|key| keys.contains_key(*key));
        let resembles = |some: &[&str]| keys.keys().any(|key| most_similar(key, some).is_some());
        let client = ["server", "link", "class", "path", "pin", "lane", "token-file"];
        let server = ["listen", "access", "limit", "site", "subnet", "users"];
        match () {
            () if has(&["socks5", "http"]) => Self::Proxy,
            () if has(&client) => Self::Client,
            () if has(&server) => Self::Server,
            () if resembles(&client) => Self::Client,
            () if resembles(&server) => Self::Server,
            () if name.starts_with("client") => Self::Client,
            () if name.starts_with("proxy") => Self::Proxy,
            () => Self::Server,
        }
    }
}

/// The values of a command with this file and this command line (without the program's name), in the order of
/// their keys.
///
/// # Errors
/// If the file is no TOML.
pub fn values(kind: FileKind, file: Option<&Path>, args: &[String]) -> Result<Vec<ConfigValue>> {
    let command = clap::Command::new("options");
    let command = match kind {
        FileKind::Server => ServerOptions::augment_args(command),
        FileKind::Client | FileKind::Proxy => ClientOptions::augment_args(command),
    };
    let text = file.map_or(Ok(String::new()), files::read_text)?;
    let document = Document::parse(text.as_str())
        .map_err(|error| Error::content(file.unwrap_or(Path::new("")), "TOML", error))?;
    let mut values = Vec::new();
    let given = options_of(args);
    for arg in command.get_arguments() {
        let Some(key) = arg.get_long() else { continue };
        let in_file = document.get(key);
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let (value, origin) = match (given.get(key), in_file) {
            (Some(GivenOption::ByJoinLink), _) => ("as the join link says".to_owned(), "option".to_owned()),
            (Some(GivenOption::Values(given)), _) => {
                (without_secrets(key, given.join(", ")), "option".to_owned())
            }
            (None, Some(item)) => (without_secrets(key, text_of(item)), origin_of(file, &text, item)),
            (None, None) => (default_of(&help), "default".to_owned()),
        };
        values.push(ConfigValue { key: key.to_owned(), value, origin });
    }
    // Tables, which are no options.
    for (key, item) in
        document.iter().filter(|(key, _)| values.iter().all(|value| value.key != *key)).collect::<Vec<_>>()
    {
        let tables: Vec<&dyn TableLike> = match item {
            Item::ArrayOfTables(all) => all.iter().map(|table| table as &dyn TableLike).collect(),
            _ => Vec::new(),
        };
        if tables.is_empty() {
            let (value, origin) = (text_of(item), origin_of(file, &text, item));
            values.push(ConfigValue { key: key.to_owned(), value, origin });
        }
        if let Item::ArrayOfTables(all) = item {
            for table in all {
                let value = table.clone().into_inline_table().to_string().trim().to_owned();
                let origin = place(file, &text, table.span().map(|span| span.start));
                values.push(ConfigValue { key: key.to_owned(), value, origin });
            }
        }
    }
    values.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(values)
}

fn text_of(item: &Item) -> String {
    let text = match item {
        Item::Table(table) => table.clone().into_inline_table().to_string(),
        other => other.to_string(),
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn origin_of(file: Option<&Path>, text: &str, item: &Item) -> String {
    place(file, text, item.span().map(|span| span.start))
}

fn place(file: Option<&Path>, text: &str, at: Option<usize>) -> String {
    let file = file.unwrap_or(Path::new("file")).display().to_string();
    at.map_or(file.clone(), |at| format!("{file}, line {}", line_of(text, at)))
}

/// The default that the help of an option names.
fn default_of(help: &str) -> String {
    let default = help.rsplit_once("[default: ").and_then(|(_, rest)| rest.rsplit_once(']'));
    default.map_or_else(
        || "not set".to_owned(),
        |(text, _)| text.split_whitespace().collect::<Vec<_>>().join(" "),
    )
}

/// The value that a command line has for an option.
enum GivenOption {
    /// The join link has its value.
    ByJoinLink,
    Values(Vec<String>),
}

/// The options of a command line.
fn options_of(args: &[String]) -> BTreeMap<String, GivenOption> {
    let mut options: BTreeMap<String, GivenOption> = BTreeMap::new();
    let mut args = args.iter().peekable();
    while let Some(arg) = args.next() {
        let Some(option) = arg.strip_prefix("--") else {
            if arg.starts_with("mpvpn://") {
                for key in ["server", "token", "pin"] {
                    options.entry(key.to_owned()).or_insert(GivenOption::ByJoinLink);
                }
            }
            continue;
        };
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, value.to_owned()),
            None => {
                let value = args.next_if(|next| !next.starts_with("--"));
                (option, value.map_or_else(|| "true".to_owned(), Clone::clone))
            }
        };
        match options.entry(key.to_owned()).or_insert(GivenOption::Values(Vec::new())) {
            GivenOption::Values(values) => values.push(value),
            by_join_link => *by_join_link = GivenOption::Values(vec![value]),
        }
    }
    options
}

/// A value of a file or command line, as everybody may see it.
fn without_secrets(key: &str, value: String) -> String {
    match key {
        "token" => "(hidden)".to_owned(),
        "via" => {
            match value.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?))) {
                Some((scheme, (_, host))) => format!("{scheme}://(hidden)@{host}"),
                None => value,
            }
        }
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn write(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join(name);
        std::fs::write(&file, text).unwrap();
        (home, file)
    }

    #[test]
    fn each_value_says_where_it_comes_from_and_secrets_are_hidden() {
        let text = "server = 'vpn.example'\ninsecure = true\ntoken = 'mpvpn_secret'\nvia = 'http://a:secret@proxy:3128'\n\
            [[link]]\nname = 'wwan0'\ntier = 'backup'\n[[link]]\nname = 'eth0'\n";
        let (_home, file) = write("client.toml", text);
        let args =
            ["--log-level", "debug", "--kill-switch", "--path=eth0", "--path", "eth1"].map(str::to_owned);
        let values = values(FileKind::Client, Some(&file), &args).unwrap();
        let of = |key: &str| -> Vec<(&str, &str)> {
            let all = values.iter().filter(|value| value.key == key);
            all.map(|value| (value.value.as_str(), value.origin.as_str())).collect()
        };
        let at = |line: usize| format!("{}, line {line}", file.display());
        assert_eq!(of("server"), [("\"vpn.example\"", at(1).as_str())]);
        assert_eq!(of("log-level"), [("debug", "option")]);
        assert_eq!(of("kill-switch"), [("true", "option")]);
        assert_eq!(of("path"), [("eth0, eth1", "option")]);
        assert_eq!(of("tun-name")[0].1, "default");
        assert_eq!(of("scheduler"), [("auto", "default")]);
        let links = of("link");
        assert_eq!((links.len(), links[0].1, links[1].1), (2, at(5).as_str(), at(8).as_str()));
        assert!(links[0].0.contains("tier = \"backup\""), "{links:?}");
        assert_eq!((of("token")[0].0, of("via")[0].0.contains("(hidden)@proxy:3128")), ("(hidden)", true));
        assert!(values.iter().all(|value| !value.value.contains("secret")), "{values:?}");
        assert!(values.is_sorted_by(|a, b| a.key <= b.key));
    }

    #[test]
    fn a_file_with_a_typing_error_is_for_the_command_whose_keys_it_resembles() {
        let kind = |text| FileKind::guess(Path::new("my.toml"), text);
        assert_eq!(kind("sever = 'vpn.example'\n"), FileKind::Client);
        assert_eq!(kind("token-file = 'x'\nsever = 'vpn.example'\n"), FileKind::Client);
        assert_eq!(kind("log-level = 'info'\n[[lnik]]\nname = 'eth0'\n"), FileKind::Client);
        assert_eq!(kind("lisen = '0.0.0.0:443'\n"), FileKind::Server);
        assert_eq!(kind("acces = 1\nlog-level = 'info'\n"), FileKind::Server);
        assert_eq!(kind("log-level = 'info'\nnat = 'off'\n"), FileKind::Server);
    }

    #[test]
    fn a_token_is_hidden_whatever_it_looks_like_and_beside_a_join_link() {
        let token_of = |args: &[&str]| {
            let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
            let values = values(FileKind::Client, None, &args).unwrap();
            values.into_iter().find(|value| value.key == "token").map(|value| value.value).unwrap()
        };
        assert_eq!(token_of(&[]), "not set");
        assert_eq!(token_of(&["mpvpn://vpn.example/#x"]), "as the join link says");
        assert_eq!(token_of(&["mpvpn://vpn.example/#x", "--token", "mpvpn_secret"]), "(hidden)");
        assert_eq!(token_of(&["--token", "as the secret"]), "(hidden)");
    }
}
