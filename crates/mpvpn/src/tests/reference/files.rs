//! The pages and schemas of configuration files.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    markdown::{GENERATED, Table, code, line, meanings, split_default, tidy as tidy_page},
    since::Since,
};

/// `server.md`.
pub(super) fn server(since: &mut Since) -> String {
    page(include_str!("text/server.txt"), "server", &super::definitions::server(), since)
}

/// `client.md`.
pub(super) fn client(since: &mut Since) -> String {
    page(include_str!("text/client.txt"), "client", &super::definitions::client(), since)
}

/// `users.md`.
pub(super) fn users(since: &mut Since) -> String {
    page(include_str!("text/users.txt"), "users", &super::definitions::users(), since)
}

fn page(intro: &str, file: &str, schema: &Value, since: &mut Since) -> String {
    let mut text = format!("{GENERATED}{intro}");
    let mut tables = vec![(String::new(), schema)];
    let mut listed = BTreeSet::new();
    let mut at = 0;
    while let Some((path, table)) = tables.get(at).cloned() {
        let mut keys = Table::new(&["key", "value", "default", "meaning"]);
        let mut count = 0;
        for (key, property) in table["properties"].as_object().into_iter().flatten() {
            let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if let Some(table) = headed(schema, property) {
                tables.push((inner, table));
                continue;
            }
            let is_required =
                table["required"].as_array().is_some_and(|list| list.contains(&key.as_str().into()));
            let mark = since.mark(&format!("key {file} {inner}"));
            // The possible values of a key are listed where it occurs first.
            let is_new = listed.insert(property["title"].to_string());
            keys.row(&row(key, property, is_required, is_new, &mark));
            count += 1;
        }
        text += &match path.as_str() {
            "" => String::new(),
            path => {
                let mark = since.mark(&format!("key {file} {path}"));
                format!("\n## `{}`\n\n{}{mark}\n\n", head(schema, path), line(&described(table)))
            }
        };
        if count > 0 {
            text += &keys.end();
        }
        at += 1;
    }
    tidy_page(&text)
}

/// The table that a key heads, if it is no value.
fn headed<'a>(schema: &'a Value, property: &'a Value) -> Option<&'a Value> {
    let table = if property["type"] == "array" { &property["items"] } else { property };
    let name = table["$ref"].as_str()?.strip_prefix("#/$defs/")?;
    Some(&schema["$defs"][name])
}

/// The head of a table as it is written in a file.
fn head(schema: &Value, path: &str) -> String {
    let is_one = schema["properties"][path]["$ref"].is_string();
    if is_one { format!("[{path}]") } else { format!("[[{path}]]") }
}

fn described(value: &Value) -> String {
    value["description"].as_str().unwrap_or_default().to_owned()
}

fn row(key: &str, property: &Value, is_required: bool, is_new: bool, mark: &str) -> [String; 4] {
    let (meaning, default) = split_default(&described(property));
    let words = property["oneOf"].as_array().into_iter().flatten().filter(|_| is_new).filter_map(|word| {
        Some((word["const"].as_str()?.to_owned(), word["description"].as_str()?.to_owned()))
    });
    let default = match (is_required, default.is_empty(), property["type"] == "boolean") {
        (true, ..) => "(required)".to_owned(),
        (false, true, true) => "false".to_owned(),
        _ => default,
    };
    [code(key), value(property), default, format!("{meaning}{mark}{}", meanings(words))]
}

/// The value behind the equals sign.
fn value(property: &Value) -> String {
    let list = if property["anyOf"].is_array() { ", or a list of such" } else { "" };
    match (property["title"].as_str(), property["type"].as_str()) {
        (Some(expected), _) => format!("{}{list}", line(expected)),
        (None, Some("boolean")) => "`true` or `false`".into(),
        _ => match (property["minimum"].as_u64(), property["maximum"].as_u64()) {
            (Some(least), Some(most)) => format!("a whole number from {least} to {most}"),
            _ => "a whole number".into(),
        },
    }
}

/// A schema for editors, with the defaults that are plain values.
pub(super) fn schema(schema: &Value) -> String {
    let mut schema = schema.clone();
    with_defaults(&mut schema);
    serde_json::to_string_pretty(&schema).unwrap() + "\n"
}

fn with_defaults(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(with_defaults),
        Value::Object(fields) => {
            fields.values_mut().for_each(with_defaults);
            let Some(text) = fields.get("description").and_then(Value::as_str).map(line) else { return };
            let (_, default) = split_default(&text);
            let words = fields.get("oneOf").and_then(Value::as_array).into_iter().flatten();
            let is_word = words.clone().any(|word| word["const"] == *default);
            // The library's own, which has `null` and empty lists for what is not given.
            fields.remove("default");
            if is_word {
                fields.insert("default".into(), default.into());
            } else if let Ok(number @ (Value::Number(_) | Value::Bool(_))) = default.parse() {
                fields.insert("default".into(), number);
            }
            fields.insert("description".into(), text.into());
        }
        _ => {}
    }
}
