//! Renders classes and rules as text tables for `mpvpn class list`.

use std::{fmt::Display, ops::RangeInclusive};

use mpvpn_class::Rule;

use crate::classes::{ClassConfig, RuleOrigin, table::Protocol};
use crate::resolve::ClientConfig;
use mpvpn_input::rules::Ports;
use mpvpn_status::{Table, fit, section};

/// Renders the classes, and the rules in the order of evaluation, in lines of at most `width` columns.
pub fn render_classes(config: &ClientConfig, width: usize) -> String {
    let mut text = String::new();
    section(&mut text, classes(config).without_empty_columns(), width);
    section(&mut text, rules(config).without_empty_columns(), width);
    section(&mut text, steering(config).without_empty_columns(), width);
    text.push_str("\nThe first rule that matches decides; packets that no rule matches belong to the class `default`.\n");
    if let Some(file) = file(config) {
        text.push_str(&format!("Line numbers are those of {file}.\n"));
    }
    fit(text.trim_start_matches('\n'), width)
}

fn classes(config: &ClientConfig) -> Table {
    let mut table = Table::new(
        "class|priority|>min|>max|>weight|lane|cc|scheduler|>copies|fec|>dscp|prefer|exclude|tun|pinned",
    );
    for class in &config.classes {
        let ClassConfig { min, max, tun, dscp, .. } = class;
        table.rows.push(vec![
            class.name.clone(),
            if class.priority { "yes" } else { "no" }.to_owned(),
            min.map(|min| min.to_string()).unwrap_or_default(),
            max.map(|max| max.to_string()).unwrap_or_default(),
            class.weight.to_string(),
            class.lane.unwrap_or(config.lane).to_string(),
            class.cc.unwrap_or(config.cc).to_string(),
            class.scheduler.unwrap_or(config.scheduler).to_string(),
            class.copies.to_string(),
            class.fec.to_string(),
            dscp.map_or_else(|| "link's".into(), |dscp| dscp.to_string()),
            class.prefer.join(" "),
            class.exclude.join(" "),
            tun.clone().unwrap_or_default(),
            if class.pinned { "yes" } else { "" }.to_owned(),
        ]);
    }
    table
}

fn rules(config: &ClientConfig) -> Table {
    let mut table = Table::new(">rule|class|protocol|from|from-ports|to|ports|dscp|domain|defined in");
    for (at, found) in config.class_rules.iter().enumerate() {
        let Rule { domains, class, .. } = &found.rule;
        let mut row = vec![(at + 1).to_string(), config.class_name(*class)];
        row.extend(packets(&found.rule));
        row.extend([list(domains), origin(&found.origin)]);
        table.rows.push(row);
    }
    table
}

/// The rules by which the kernel steers packets into the TUN devices of classes.
fn steering(config: &ClientConfig) -> Table {
    let mut table =
        Table::new("steered into|mark|vlan|ingress|protocol|from|from-ports|to|ports|dscp|defined in");
    for found in &config.class_steering {
        let tun = config.class(found.rule.class).and_then(|class| class.tun.clone());
        let kernel_match = &found.kernel_match;
        let mut row = vec![tun.unwrap_or_default()];
        row.extend([list(&kernel_match.marks), list(&kernel_match.vlans), kernel_match.ingress.join(" ")]);
        row.extend(packets(&found.rule));
        row.push(origin(&found.origin));
        table.rows.push(row);
    }
    table
}

fn packets(rule: &Rule) -> [String; 6] {
    let Rule { protocols, from, to, from_ports, ports: to_ports, dscp, .. } = rule;
    [Protocol::name(protocols), list(from), ports(from_ports), list(to), ports(to_ports), list(dscp)]
}

fn origin(origin: &RuleOrigin) -> String {
    match origin {
        RuleOrigin::File { line, .. } => format!("line {line}"),
        RuleOrigin::BuiltIn(name) => format!("built-in `{name}`"),
    }
}

fn file(config: &ClientConfig) -> Option<String> {
    let steering = config.class_steering.iter().map(|found| &found.origin);
    config.class_rules.iter().map(|found| &found.origin).chain(steering).find_map(|origin| match origin {
        RuleOrigin::File { file, .. } => Some(file.display().to_string()),
        RuleOrigin::BuiltIn(_) => None,
    })
}

fn list<T: Display>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn ports(ranges: &[RangeInclusive<u16>]) -> String {
    let ports = ranges.iter().filter_map(|range| Ports::new(*range.start(), *range.end()));
    list(&ports.collect::<Vec<_>>())
}
