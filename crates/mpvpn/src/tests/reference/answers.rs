//! The pages about the output of a running mpvpn: status, checks, events, metrics, errors.

use super::definitions as reference;
use serde_json::Value;

use super::{
    markdown::{GENERATED, Table, code, line, meanings, tidy},
    since::Since,
};
use crate::{
    failure::{EXIT_CODES, READ_THE_LOG},
    tests::errors::run_errors,
};

/// `status.md`.
pub(super) fn status(since: &mut Since) -> String {
    let mut text = format!("{GENERATED}{}", include_str!("text/status.txt"));
    text += "\n## `GET /v1/status`\n";
    text += &objects("status", &reference::status(), since);
    text += "\n## `GET /v1/flows`\n";
    text += &objects("flows", &reference::flows(), since);
    text += "\n## `POST /v1/echoes`\n";
    text += &objects("echoes", &reference::echoes(), since);
    tidy(&text)
}

/// `check.md`.
pub(super) fn check(since: &mut Since) -> String {
    let text = format!("{GENERATED}{}", include_str!("text/check.txt"));
    let text = text + &objects("check", &reference::check(), since);
    tidy(&text)
}

/// `measure.md`.
pub(super) fn measure(since: &mut Since) -> String {
    let text = format!("{GENERATED}{}", include_str!("text/measure.txt"));
    let text = text + &objects("measure", &reference::measure(), since);
    tidy(&text)
}

/// A table for the root of a schema and for each object below, in the order in which they are met.
fn objects(of: &str, schema: &Value, since: &mut Since) -> String {
    let mut found: Vec<(Vec<String>, &Value)> = vec![(Vec::new(), schema)];
    let mut texts = Vec::new();
    let mut at = 0;
    while let Some((paths, object)) = found.get(at).cloned() {
        let mut fields = Table::new(&["field", "type", "meaning"]);
        for (name, property) in fields_of(schema, object) {
            let inner = paths.first().map_or_else(|| name.clone(), |path| format!("{path}.{name}"));
            let (kind, below) = type_of(schema, property);
            if let Some(below) = below {
                let path = if kind.starts_with("list") { format!("{inner}[]") } else { inner.clone() };
                match found.iter_mut().find(|(_, other)| std::ptr::eq(*other, below)) {
                    Some((paths, _)) => paths.push(path),
                    None => found.push((vec![path], below)),
                }
            }
            let mark = since.mark(&format!("{of} {inner}"));
            let meaning = format!("{}{mark}{}", meaning(schema, property), words(schema, property));
            fields.row(&[code(name), kind, meaning]);
        }
        let about = line(object["description"].as_str().unwrap_or_default());
        texts.push(format!("{about}\n\n{}", fields.end()));
        at += 1;
    }
    let heads = found.iter().map(|(paths, _)| match paths.is_empty() {
        true => String::new(),
        false => format!("### {}", paths.iter().map(|path| code(path)).collect::<Vec<_>>().join(", ")),
    });
    heads.zip(texts).map(|(head, text)| format!("\n{head}\n\n{text}")).collect()
}

/// The fields of an object; where it is one of several, those of all.
fn fields_of<'a>(schema: &'a Value, object: &'a Value) -> impl Iterator<Item = (&'a String, &'a Value)> {
    let named = object["properties"].as_object().into_iter().flatten();
    let alternatives = object["anyOf"].as_array().into_iter().flatten().map(|one| resolved(schema, one));
    named.chain(alternatives.flat_map(|one| one["properties"].as_object().into_iter().flatten()))
}

fn resolved<'a>(schema: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
        Some(name) => &schema["$defs"][name],
        None => value,
    }
}

/// The schema of a field without what says that it may be null.
fn present<'a>(schema: &'a Value, property: &'a Value) -> &'a Value {
    let choices = property["anyOf"].as_array().into_iter().flatten();
    let present = choices.clone().find(|choice| choice["type"] != "null");
    match choices.count() == 2 && property["anyOf"][1]["type"] == "null" {
        true => resolved(schema, present.unwrap_or(property)),
        false => resolved(schema, property),
    }
}

/// The type of a field, and the object that it is or lists.
fn type_of<'a>(schema: &'a Value, property: &'a Value) -> (String, Option<&'a Value>) {
    let present = present(schema, property);
    let kind = match &present["type"] {
        Value::String(kind) => kind.as_str(),
        Value::Array(kinds) => kinds[0].as_str().unwrap_or_default(),
        _ => "",
    };
    let is_object = |value: &Value| value["properties"].is_object() || value["anyOf"].is_array();
    match kind {
        "array" => {
            let item = resolved(schema, &present["items"]);
            match is_object(item) {
                true => ("list of objects".into(), Some(item)),
                false if item["format"] == "ip" => ("list of IP addresses".into(), None),
                false => (format!("list of {}s", type_of(schema, item).0), None),
            }
        }
        _ if is_object(present) => ("object".into(), Some(present)),
        "boolean" => ("true or false".into(), None),
        "integer" => ("integer".into(), None),
        "number" => ("number".into(), None),
        _ if !choices(present).is_empty() => ("word".into(), None),
        _ if present["format"] == "ip" => ("IP address".into(), None),
        _ => ("text".into(), None),
    }
}

fn choices(value: &Value) -> Vec<(String, String)> {
    let of = |one: &Value| {
        let word = one["const"].as_str()?.to_owned();
        Some((word, one["description"].as_str().unwrap_or_default().to_owned()))
    };
    value["oneOf"].as_array().into_iter().flatten().filter_map(of).collect()
}

fn words(schema: &Value, property: &Value) -> String {
    meanings(choices(present(schema, property)))
}

fn meaning(schema: &Value, property: &Value) -> String {
    let own = property["description"].as_str();
    line(own.or_else(|| present(schema, property)["description"].as_str()).unwrap_or_default())
}

/// `events.md`.
pub(super) fn events(since: &mut Since) -> String {
    let schema = reference::event();
    let mut table = Table::new(&["kind", "event", "level", "further fields", "meaning"]);
    let mut last = String::new();
    for (name, kind, level) in reference::event_kinds() {
        let variants = schema["oneOf"].as_array().into_iter().flatten();
        let mut found = variants.filter(|one| one["properties"]["event"]["const"] == *name);
        let variant = found.next().expect("a variant of each name");
        let mut fields = Vec::new();
        collect(&schema, variant, &mut fields);
        let mark = since.mark(&format!("event {name}"));
        for field in &fields {
            since.mark(&format!("event {name}.{}", field.trim_matches('`')));
        }
        let kind = kind.to_string();
        let shown = if kind == last { String::new() } else { code(&kind) };
        last = kind;
        let meaning = line(variant["description"].as_str().unwrap_or_default());
        table.row(&[shown, code(&name), level, fields.join(", "), format!("{meaning}{mark}")]);
    }
    let mut reasons = Table::new(&["`event`", "`reason`", "further fields", "meaning"]);
    for variant in schema["oneOf"].as_array().into_iter().flatten() {
        let event = variant["properties"]["event"]["const"].as_str().unwrap_or_default();
        for one in reasons_of(&schema, variant) {
            let mut fields = Vec::new();
            collect(&schema, one, &mut fields);
            fields.retain(|field| field != "`reason`");
            let word = one["properties"]["reason"]["const"].as_str().unwrap_or_default();
            let below = one["properties"].as_object().into_iter().flatten();
            let units = below
                .filter_map(|(name, field)| Some((name.clone(), field["description"].as_str()?.to_owned())));
            let meaning = line(one["description"].as_str().unwrap_or_default());
            reasons.row(&[
                code(event),
                code(word),
                fields.join(", "),
                format!("{meaning}{}", meanings(units)),
            ]);
        }
    }
    tidy(&format!(
        "{GENERATED}{}\n## Events\n\n{}## Reasons\n\n{}",
        include_str!("text/events.txt"),
        table.end(),
        reasons.end()
    ))
}

/// The alternatives of an event that has further fields for each reason.
fn reasons_of<'a>(schema: &'a Value, variant: &'a Value) -> impl Iterator<Item = &'a Value> {
    let flattened = variant["allOf"].as_array().into_iter().flatten().map(|part| resolved(schema, part));
    let parts = std::iter::once(variant).chain([resolved(schema, variant)]).chain(flattened);
    let all = parts.flat_map(|part| part["oneOf"].as_array().into_iter().flatten());
    let mut seen = Vec::new();
    all.filter(move |one| {
        let word = &one["properties"]["reason"]["const"];
        let is_new = word.is_string() && !seen.contains(word);
        seen.push(word.clone());
        is_new
    })
}

/// The names of the fields of an object and of what is flattened into it, without that of the event.
fn collect(schema: &Value, value: &Value, fields: &mut Vec<String>) {
    let value = resolved(schema, value);
    for name in value["properties"].as_object().into_iter().flatten().map(|(name, _)| name) {
        let name = code(name);
        if name != "`event`" && !fields.contains(&name) {
            fields.push(name);
        }
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        for part in value[key].as_array().into_iter().flatten() {
            collect(schema, part, fields);
        }
    }
}

/// `metrics.md`.
pub(super) fn metrics(since: &mut Since) -> String {
    let mut table = Table::new(&["metric", "type", "labels", "meaning"]);
    for metric in reference::all_metrics() {
        let labels: Vec<_> = metric.labels.iter().map(|label| code(label)).collect();
        let mark = since.mark(&format!("metric {}", metric.name));
        table.row(&[
            code(&metric.name),
            metric.kind.to_owned(),
            labels.join(", "),
            format!("{}{mark}", metric.help),
        ]);
    }
    tidy(&format!("{GENERATED}{}\n## All metrics\n\n{}", include_str!("text/metrics.txt"), table.end()))
}

/// `errors.md`.
pub(super) fn errors() -> String {
    let mut codes = Table::new(&["exit code", "meaning"]);
    for (code, meaning) in EXIT_CODES {
        codes.row(&[code.to_string(), meaning.to_owned()]);
    }
    let mut errors = Table::new(&["what is printed", "next step"]);
    for (error, next) in reference::errors() {
        errors.row(&[code(error.lines().next().unwrap_or_default()), next]);
    }
    let mut others = Table::new(&["what is printed"]);
    for error in run_errors() {
        others.row(&[code(&error.to_string())]);
    }
    tidy(&format!(
        "{GENERATED}{}\n## Exit codes\n\n{}## Errors of options, files, certificates and the local API\n\n{}## Errors of the tunnel \
         and the system\n\nMany of these contain what to do. The next step that is printed for all of them: {READ_THE_LOG}.\n\n{}",
        include_str!("text/errors.txt"),
        codes.end(),
        errors.end(),
        others.end()
    ))
}
