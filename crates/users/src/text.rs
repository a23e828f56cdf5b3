//! The users as text for people.

use std::time::SystemTime;

use crate::{
    quotas::UserQuotas,
    users::{UserEntry, Users},
};
use mpvpn_status::{fit, section, used_of};

fn list<T: ToString>(values: &[T]) -> Option<String> {
    let all: Vec<_> = values.iter().map(ToString::to_string).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn quota_of(entry: &UserEntry, quotas: &UserQuotas, now: SystemTime) -> Option<String> {
    entry.quota.map(|quota| used_of(quotas.used(now, &entry.name), quota))
}

/// Renders the users as a table; limits that no user has are left out.
pub fn render_users(users: &Users, quotas: &UserQuotas, now: SystemTime, width: usize) -> String {
    if users.is_empty() {
        return "no users; `mpvpn user add NAME` adds one\n".to_owned();
    }
    type Cell<'a> = &'a dyn Fn(&UserEntry) -> Option<String>;
    let columns: [(&str, Cell<'_>); 9] = [
        ("user", &|entry| Some(entry.name.clone())),
        ("state", &|entry| Some(users.state(entry, now).to_string())),
        ("expires", &|entry| entry.expires.map(|expiry| expiry.to_string())),
        ("sessions", &|entry| entry.sessions.map(|sessions| sessions.to_string())),
        ("up", &|entry| entry.up.map(|rate| rate.to_string())),
        ("down", &|entry| entry.down.map(|rate| rate.to_string())),
        ("quota", &|entry| quota_of(entry, quotas, now)),
        ("address", &|entry| list(&entry.address)),
        ("route", &|entry| list(&entry.route)),
    ];
    let is_shown = |(title, cell): &(&str, Cell<'_>)| {
        !["up", "down", "quota", "route"].contains(title) || users.iter().any(|entry| cell(entry).is_some())
    };
    let columns: Vec<_> = columns.into_iter().filter(is_shown).collect();
    let titles: Vec<_> = columns.iter().map(|(title, _)| *title).collect();
    let mut table = mpvpn_status::Table::new(&titles.join("|"));
    let cells =
        |entry| columns.iter().map(|(_, cell)| cell(entry).unwrap_or_else(|| "–".to_owned())).collect();
    table.rows.extend(users.iter().map(cells));
    let mut text = String::new();
    section(&mut text, table, width);
    fit(text.trim_start_matches('\n'), width)
}

/// Renders a user, a setting a line.
pub fn render_user(
    users: &Users,
    entry: &UserEntry,
    quotas: &UserQuotas,
    now: SystemTime,
    width: usize,
) -> String {
    let lines = [
        ("user", Some(entry.name.clone())),
        ("state", Some(users.state(entry, now).to_string())),
        ("expires", entry.expires.map(|expiry| expiry.to_string())),
        ("address", list(&entry.address)),
        ("route", list(&entry.route)),
        ("sessions", entry.sessions.map(|sessions| format!("{sessions} at once"))),
        ("up", entry.up.map(|rate| rate.to_string())),
        ("down", entry.down.map(|rate| rate.to_string())),
        ("quota", quota_of(entry, quotas, now).map(|text| format!("{text} used this month (UTC)"))),
    ];
    let written = lines.into_iter().filter_map(|(key, value)| Some(format!("{key:<10}{}\n", value?)));
    fit(&written.collect::<String>(), width)
}
