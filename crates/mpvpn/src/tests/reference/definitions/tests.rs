use std::collections::BTreeSet;

use serde_json::{Map, json};

use super::*;

/// A value for TOML.
fn written(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}

/// The keys of a table of a schema that have a value rather than a table, each with a value.
fn values(schema: &Value, table: &Value) -> Vec<(String, String)> {
    let properties = table["properties"].as_object().unwrap();
    let values = properties.iter().filter(|(_, property)| tables_of(schema, property).is_none());
    values.map(|(key, property)| (key.clone(), value_of(key, property))).collect()
}

fn value_of(key: &str, property: &Value) -> String {
    match (&property["examples"][0], property["type"].as_str()) {
        (Value::Null, Some("boolean")) => "true".into(),
        (Value::Null, _) if property["format"].is_string() => "1".into(),
        (Value::Null, _) => panic!("no example of {key}: {property}"),
        (example, _) => written(example),
    }
}

/// The table that a key heads, and whether there may be several.
fn tables_of<'a>(schema: &'a Value, property: &'a Value) -> Option<(&'a Value, bool)> {
    let (table, several) = match property["items"].is_object() && property["type"] == "array" {
        true => (&property["items"], true),
        false => (property, false),
    };
    let name = table["$ref"].as_str()?.strip_prefix("#/$defs/")?;
    Some((&schema["$defs"][name], several))
}

/// Each table of a file: its head, or nothing for the keys above all tables.
fn tables(schema: &Value) -> Vec<(String, &Value)> {
    let mut found = vec![(String::new(), schema)];
    let mut at = 0;
    while let Some((head, table)) = found.get(at).cloned() {
        let outer = head.trim_matches(['[', ']']).to_owned();
        for (key, property) in table["properties"].as_object().unwrap() {
            let Some((inner, several)) = tables_of(schema, property) else { continue };
            let name = if outer.is_empty() { key.clone() } else { format!("{outer}.{key}") };
            found.push((if several { format!("[[{name}]]") } else { format!("[{name}]") }, inner));
        }
        at += 1;
    }
    found
}

/// A file with the keys that a table needs, this key, and the heads of the tables around.
fn file(schema: &Value, head: &str, table: &Value, key: &str, value: &str) -> String {
    let mut text = String::new();
    if let Some((outer, _)) = head.trim_matches(['[', ']']).split_once('.') {
        text += &format!("[[{outer}]]\nname = \"voice\"\n");
    }
    text += &format!("{head}\n");
    for (needed, other) in values(schema, table) {
        let is_needed = table["required"].as_array().is_some_and(|list| list.contains(&json!(needed)));
        if is_needed && needed != key {
            text += &format!("{needed} = {other}\n");
        }
    }
    text + &format!("{key} = {value}\n")
}

type Parse = fn(&str) -> Result<(), String>;

fn files() -> [(Value, Parse); 3] {
    [
        (server(), |text| ServerOptions::parse(text).map(drop).map_err(|error| error.to_string())),
        (client(), |text| ClientOptions::parse(text).map(drop).map_err(|error| error.to_string())),
        (users(), |text| {
            toml::from_str::<mpvpn_users::UserTables>(text).map(drop).map_err(|error| error.to_string())
        }),
    ]
}

#[test]
fn every_key_of_the_schemas_is_read_and_an_unknown_one_is_refused() {
    let mut heads = BTreeSet::new();
    for (schema, parse) in files() {
        for (head, table) in tables(&schema) {
            for (key, value) in values(&schema, table) {
                let text = file(&schema, &head, table, &key, &value);
                assert_eq!(parse(&text), Ok(()), "{text}");
                let text = file(&schema, &head, table, &format!("{key}-other"), &value);
                let error = parse(&text).unwrap_err();
                assert!(error.contains(&format!("{key}-other")), "{text}\n{error}");
            }
            assert_eq!(table["additionalProperties"], json!(false), "{head}");
            heads.insert(head);
        }
    }
    let expected = [
        "",
        "[[access]]",
        "[[bypass]]",
        "[[certificate]]",
        "[[class.match]]",
        "[[class]]",
        "[[dns-name]]",
        "[[forward]]",
        "[[lane-rule]]",
        "[[limit]]",
        "[[link]]",
        "[[route]]",
        "[[user]]",
        "[acme]",
        "[site]",
    ];
    assert_eq!(heads, expected.map(String::from).into());
}

#[test]
fn the_schemas_have_every_key_that_the_parser_knows() {
    for (schema, parse) in files() {
        for (head, table) in tables(&schema) {
            let error = parse(&file(&schema, &head, table, "no-such-key", "1")).unwrap_err();
            let known: BTreeSet<_> = match error.split_once("known are: ") {
                Some((_, list)) => list.lines().next().unwrap().split(", ").collect(),
                None => error.split_once("expected").unwrap().1.split('`').skip(1).step_by(2).collect(),
            };
            let keys = table["properties"].as_object().unwrap().keys().map(String::as_str);
            // `quota_day` is `quota-day` as it was written before.
            let keys: BTreeSet<_> = keys.chain(known.get("quota_day").copied()).collect();
            assert_eq!(keys, known, "{head}");
        }
    }
}

#[test]
fn every_value_of_a_list_of_words_is_read() {
    for (schema, parse) in files() {
        for (head, table) in tables(&schema) {
            for (key, property) in table["properties"].as_object().unwrap() {
                for word in property["oneOf"].as_array().into_iter().flatten() {
                    let text = file(&schema, &head, table, key, &written(&word["const"]));
                    assert_eq!(parse(&text), Ok(()), "{text}");
                }
            }
        }
    }
}

#[test]
fn everything_that_is_told_is_described() {
    fn check(at: &str, value: &Value) {
        for (name, property) in value["properties"].as_object().into_iter().flatten() {
            let told = property["description"].is_string() || property["$ref"].is_string();
            assert!(told, "{at}.{name} has no description: {property}");
        }
    }
    for schema in [server(), client(), users(), status(), flows(), self::check()] {
        let nothing = Map::new();
        check("", &schema);
        for (name, definition) in schema["$defs"].as_object().unwrap_or(&nothing) {
            check(name, definition);
        }
    }
}

#[test]
fn every_series_of_the_metrics_is_in_the_list_with_its_type_and_labels() {
    let status: Status =
        serde_json::from_str(include_str!("../../../../../status/src/example.json")).unwrap();
    let known = all_metrics();
    let mut found = 0;
    for role in [mpvpn_input::role::Role::Client, mpvpn_input::role::Role::Server] {
        let text = metrics::exposition(&Status { role, ..status.clone() }, &Default::default());
        for line in text.lines() {
            if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|typed| typed.split_once(' ')) {
                assert!(known.iter().any(|one| one.name == name && one.kind == kind), "{line}");
            } else if let Some((name, labels)) = line.split_once('{') {
                let names: Vec<_> =
                    labels.split(',').filter_map(|label| Some(label.split_once('=')?.0)).collect();
                let metric = known.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("{line}"));
                assert_eq!(names, metric.labels, "{line}");
                found += 1;
            }
        }
    }
    assert!(found > 20, "{found} samples");
    let names: BTreeSet<_> = known.iter().map(|one| &one.name).collect();
    assert_eq!(names.len(), known.len(), "no name is there twice");
}

#[test]
fn every_event_has_a_subject_and_a_description() {
    let event = event();
    let variants = event["oneOf"].as_array().unwrap();
    let names: BTreeSet<_> =
        variants.iter().map(|one| one["properties"]["event"]["const"].as_str().unwrap()).collect();
    let kinds = event_kinds();
    assert_eq!(names, kinds.iter().map(|(name, ..)| name.as_str()).collect());
    assert!(variants.iter().all(|one| one["description"].is_string()));
}
