//! Messages to the helper, and journals: a process that was taken over may have written them.

use std::{fs, path::PathBuf};

use mpvpn_os::untrusted::{HelperAction, SettingChange, UndoAction, change_setting, helper_task, undo};

use crate::{input::Input, users::folder};

/// The text that root found in the file with the name servers.
const BEFORE: &str = "nameserver 192.0.2.53\n";
/// The only file that the helper may read, as the tests see it.
const READABLE: &[u8] = include_bytes!("../pages/a/b.txt");
/// The most bytes of a script for each byte of a message and for each mark in it.
const MAX_SCRIPT_PER_BYTE: usize = 256;

/// Messages, as they come from the process that the helper serves.
pub fn helper(data: &[u8]) {
    let home = folder();
    let file = home.path().join("resolv.conf");
    fs::write(&file, BEFORE).expect("a file");
    let readable: [PathBuf; 1] = [std::path::absolute("pages/a/b.txt").expect("a path")];
    let mut messages = data;
    loop {
        let length = messages.len();
        let Ok(Some(action)) = helper_task(&mut messages, &readable, home.path()) else { break };
        match action {
            HelperAction::Firewall(Ok(script)) => {
                let read = &data[data.len() - length..data.len() - messages.len()];
                // A rule has its conditions again for each mark.
                let marks = read.windows(6).filter(|word| word == b"\"mask\"").count();
                let max = 4096 + MAX_SCRIPT_PER_BYTE * read.len() * (1 + marks);
                assert!(script.len() <= max, "{} bytes of {}", script.len(), read.len());
                changes_own_tables(&script);
            }
            HelperAction::Firewall(Err(why)) => assert!(!why.is_empty()),
            HelperAction::ShowTable(_) | HelperAction::Resolved(..) => {}
            HelperAction::NameServers(_) => has_name_servers(&fs::read_to_string(&file).expect("a file")),
            HelperAction::Read(Ok(bytes)) => assert_eq!(bytes, READABLE),
            HelperAction::Read(Err(error)) => assert!(!error.to_string().is_empty()),
        }
    }
}

/// Outside of braces and quotation marks a script of nft has statements about tables of mpvpn alone.
fn changes_own_tables(script: &str) {
    let (mut depth, mut is_quoted, mut statement) = (0usize, false, String::new());
    for c in script.chars() {
        match c {
            '"' => is_quoted = !is_quoted,
            '\n' if is_quoted => panic!("a line ends inside of quotation marks: {script}"),
            _ if is_quoted => {}
            '{' => depth += 1,
            '}' => depth = depth.checked_sub(1).unwrap_or_else(|| panic!("a brace too much: {script}")),
            '\n' if depth == 0 => {
                let words: Vec<&str> = statement.split_whitespace().collect();
                let table = match words.as_slice() {
                    ["table", "inet", table] | ["delete" | "flush", "table", "inet", table] => table,
                    ["add" | "delete", "element", "inet", table, _set]
                    | ["flush", "map", "inet", table, _set] => table,
                    other => panic!("{other:?}: {script}"),
                };
                assert!(table.starts_with("mpvpn_"), "{table}: {script}");
                statement.clear();
            }
            // Comments, further statements and files.
            '#' | '`' | '$' => panic!("{c}: {script}"),
            _ if depth == 0 => statement.push(c),
            _ => assert!(c == '\n' || !c.is_control()),
        }
    }
    assert!(depth == 0 && !is_quoted && statement.is_empty(), "{script}");
    assert!(!script.lines().any(|line| line.trim_start().starts_with("include")), "{script}");
}

/// The file is as it was, or has a comment and one to three addresses.
fn has_name_servers(text: &str) {
    if text == BEFORE {
        return;
    }
    let mut lines = text.lines();
    assert!(lines.next().is_some_and(|line| line.starts_with("# Made by mpvpn")), "{text}");
    let servers: Vec<&str> = lines.collect();
    let is_server = |line: &&str| {
        line.strip_prefix("nameserver ").is_some_and(|ip| ip.parse::<std::net::IpAddr>().is_ok())
    };
    assert!((1..=3).contains(&servers.len()) && servers.iter().all(is_server), "{text}");
}

/// `0, a journal`, or `1, changes of a setting, the record of it`.
pub fn journal(data: &[u8]) {
    let mut input = Input(data);
    if input.below(2) == 1 {
        return setting(&mut input);
    }
    let Some((actions, again)) = undo(input.0) else { return };
    assert_eq!(undo(&again).map(|(_, same)| same), Some(again), "what is written is read");
    for action in actions {
        match action {
            UndoAction::Kernel(Ok(message)) => {
                let length = message.first_chunk().map(|length| u32::from_ne_bytes(*length));
                assert_eq!(length.map(|length| length as usize), Some(message.len()));
            }
            UndoAction::Firewall(script) => changes_own_tables(&script.expect("the table of a tunnel")),
            UndoAction::Setting(Ok(path)) => {
                assert!(path.starts_with("/proc/sys/net") && !path.iter().any(|part| part == ".."));
            }
            UndoAction::Kernel(Err(_)) | UndoAction::Setting(Err(_)) | UndoAction::NameServers => {}
        }
    }
}

/// The values in a record.
fn texts_in(record: &serde_json::Value) -> Vec<String> {
    use serde_json::Value;
    match record {
        Value::String(text) => vec![text.clone()],
        Value::Array(all) => all.iter().flat_map(texts_in).collect(),
        Value::Object(all) => all.values().flat_map(texts_in).collect(),
        _ => Vec::new(),
    }
}

/// Instances change a setting and end, after a record that somebody has left.
fn setting(input: &mut Input<'_>) {
    const KEY: &str = "sysctl net/ipv4/ip_forward";
    let home = folder();
    let settings = home.path().join("settings");
    let count = input.below(8);
    let mut changes = Input(input.take(2 * count));
    fs::create_dir_all(&settings).expect("a folder");
    fs::write(settings.join("sysctl net%2Fipv4%2Fip_forward.json"), input.0).expect("a file");
    let forged = texts_in(&serde_json::from_slice(input.0).unwrap_or_default());
    let mut now = "0".to_owned();
    for _ in 0..count {
        let (who, what) = (changes.byte(), changes.byte());
        let value = ["1", "2", "3"][usize::from(what >> 1) % 3].to_owned();
        let change = if what & 1 == 0 { SettingChange::Claim(value) } else { SettingChange::Release(value) };
        let name = ["a", "b", "c"][usize::from(who) % 3];
        let written = change_setting(home.path(), (name, KEY), &now, &change).expect("a folder to write to");
        match (written, &change) {
            (Some(written), SettingChange::Claim(value)) => {
                assert_eq!(written, *value);
                now = written;
            }
            (Some(written), SettingChange::Release(_)) => {
                let is_known = ["0", "1", "2", "3"].contains(&written.as_str());
                assert!(is_known || forged.contains(&written), "{written}");
                now = written;
            }
            (None, SettingChange::Claim(_)) => panic!("a claim is carried out"),
            (None, SettingChange::Release(_)) => {}
        }
    }
}
