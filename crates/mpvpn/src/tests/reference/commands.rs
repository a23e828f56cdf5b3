//! The pages about commands and their options.

use clap::{Arg, Command};

use super::{
    markdown::{GENERATED, Table, code, line, meanings, split_default, tidy},
    since::Since,
};
use crate::commands::ALL;

/// Every command and subcommand with options of its own, by what is typed. The commands of the lab are those
/// of the program that `mpvpn lab` starts.
pub(super) fn visit(act: &mut impl FnMut(&str, &Command)) {
    fn go(path: &str, command: &Command, act: &mut impl FnMut(&str, &Command)) {
        let path = format!("{path} {}", command.get_name());
        act(&path, command);
        let is_shown = |inner: &&Command| inner.get_name() != "help" && !inner.is_hide_set();
        for inner in command.get_subcommands().filter(is_shown) {
            go(&path, inner, act);
        }
    }
    let own = ALL.iter().map(|entry| (entry.define)()).filter(|command| !command.is_hide_set());
    let own = own.filter(|command| command.get_name() != "lab");
    for mut command in own.chain([mpvpn_lab_cli::define().name("lab")]) {
        command.build();
        go("mpvpn", &command, act);
    }
}

/// `commands.md`.
pub(super) fn all(since: &mut Since) -> String {
    let mut page = format!("{GENERATED}{}", include_str!("text/commands.txt"));
    visit(&mut |path, command| page += &section(path, command, since));
    tidy(&page)
}

fn section(path: &str, command: &Command, since: &mut Since) -> String {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mark = since.mark(&format!("command {path}"));
    let mut text = format!("\n## `{path}`\n\n{about}{mark}.\n\n");
    let mut table = Table::new(&["option", "value", "default", "meaning"]);
    let mut options = 0;
    for arg in visible(command) {
        let mark = since.mark(&format!("option {path} {}", name(arg)));
        table.row(&row(arg, &mark));
        options += 1;
    }
    if options > 0 {
        text += &table.end();
    }
    if let Some(help) = command.get_after_help() {
        text += &format!("```text\n{help}\n```\n");
    }
    text
}

fn visible(command: &Command) -> impl Iterator<Item = &Arg> {
    let has_meaning = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_long(), Some("help" | "version"));
    command.get_arguments().filter(has_meaning)
}

/// The text to type: an option, or the name of a value without one.
pub(super) fn name(arg: &Arg) -> String {
    match arg.get_long() {
        Some(long) => format!("--{long}"),
        None => value(arg),
    }
}

fn value(arg: &Arg) -> String {
    let names: Vec<_> = arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    if arg.get_action().takes_values() { names.join(" ") } else { String::new() }
}

fn row(arg: &Arg, mark: &str) -> [String; 4] {
    let (meaning, said) = split_default(&arg.get_help().map(ToString::to_string).unwrap_or_default());
    let given: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match arg.get_action().takes_values() && !given.is_empty() {
        true => given.join(" "),
        false => said,
    };
    let words = arg.get_possible_values();
    let words = words
        .iter()
        .filter(|_| arg.get_action().takes_values())
        .filter_map(|word| Some((word.get_name().to_owned(), word.get_help()?.to_string())));
    let value = value(arg);
    [
        code(&name(arg)),
        if value.is_empty() || arg.get_long().is_none() { String::new() } else { code(&value) },
        default,
        format!("{meaning}{mark}{}", meanings(words)),
    ]
}

/// `proxy.md`: how the options and keys of a proxy differ from those of a client.
pub(super) fn proxy() -> String {
    let of = |name: &str| {
        let found = ALL.iter().map(|entry| (entry.define)()).find(|command| command.get_name() == name);
        found.unwrap()
    };
    let (client, proxy) = (of("client"), of("proxy"));
    let find = |command: &Command, long: Option<&str>| {
        visible(command).find(|arg| arg.get_long() == long).map(|arg| row(arg, ""))
    };
    let (mut only, mut other) = (
        Table::new(&["option", "value", "default", "meaning"]),
        Table::new(&["option", "value", "default", "meaning"]),
    );
    for arg in visible(&proxy) {
        match find(&client, arg.get_long()) {
            None => only.row(&row(arg, "")),
            Some(same) if same == row(arg, "") => {}
            Some(_) => other.row(&row(arg, "")),
        }
    }
    let without: Vec<_> = visible(&client)
        .filter(|arg| find(&proxy, arg.get_long()).is_none())
        .map(|arg| format!("`{}`", name(arg)))
        .collect();
    format!(
        "{GENERATED}{}\n## Only for a proxy\n\n{}## Other defaults\n\n{}## Without meaning for a proxy\n\n{}: options are \
         refused, keys of a file are ignored, so that one file may serve a client and a proxy.\n",
        include_str!("text/proxy.txt"),
        only.end(),
        other.end(),
        line(&without.join(", "))
    )
}
