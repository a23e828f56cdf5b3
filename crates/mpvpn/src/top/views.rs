//! The views of `mpvpn top`: which rows and columns each has.
//!
//! In: a status, flows, and rates. Out: a [`Sheet`]. `down` is always towards the client, at a server too.

use mpvpn_input::role::Role;
use mpvpn_status::{
    Class, Client, Figure, FlowList, FlowState, Link, LinkState, Path, PathFigures, PathState, State, Status,
    User, UserState, format_bytes, format_duration, format_ms, format_rate,
    rates::{Rate, Rates, all_paths, class_key, client_key, client_name, link_key, path_key},
};

use super::sheet::{Cell, Column, Health, Row, Sheet, number, text};

/// A view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Links,
    Paths,
    Classes,
    Flows,
    Events,
    Clients,
    Users,
}

impl View {
    /// The views of a process, in the order of their keys.
    pub(super) fn of(role: Role) -> &'static [Self] {
        match role {
            Role::Client => &[Self::Links, Self::Paths, Self::Classes, Self::Flows, Self::Events],
            Role::Server => {
                &[Self::Clients, Self::Paths, Self::Classes, Self::Flows, Self::Users, Self::Events]
            }
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Links => "links",
            Self::Paths => "paths",
            Self::Classes => "classes",
            Self::Flows => "flows",
            Self::Events => "events",
            Self::Clients => "clients",
            Self::Users => "users",
        }
    }

    /// The rows of the view; none for events, which are no table.
    pub(super) fn sheet(self, status: &Status, flows: &FlowList, rates: &Rates) -> Sheet {
        match self {
            Self::Links => links(status, rates),
            Self::Paths => paths(status, rates),
            Self::Classes => classes(status, rates),
            Self::Flows => flow_rows(flows),
            Self::Clients => clients(status, rates),
            Self::Users => users(status),
            Self::Events => Sheet::default(),
        }
    }
}

/// The rates down and up.
fn rate_cells(rate: Option<Rate>) -> [Cell; 2] {
    [rate.map(|rate| rate.down), rate.map(|rate| rate.up)].map(|rate| optional(rate, rate_cell))
}

fn rate_cell(rate: f64) -> Cell {
    Cell::number(rate, format_rate(rate as u64))
}

fn milliseconds(value: f64) -> Cell {
    Cell::number(value, format_ms(value))
}

/// The round-trip time, with its age if it is old.
fn rtt_cell(figures: &PathFigures) -> Cell {
    optional(figures.rtt, |Figure { value, .. }| Cell::number(value, figures.rtt_text()))
}

fn percent(value: f64) -> Cell {
    Cell::number(value, format!("{value:.1} %"))
}

fn optional<T>(value: Option<T>, cell: impl FnOnce(T) -> Cell) -> Cell {
    value.map_or_else(Cell::unknown, cell)
}

/// The share of a rate in a sum.
fn share(rate: Option<Rate>, all: Option<Rate>) -> Cell {
    let sum = all.map(Rate::sum).filter(|sum| *sum > 0.0);
    let share = rate.zip(sum).map(|(rate, sum)| 100.0 * rate.sum() / sum);
    optional(share, |share| Cell::number(share, format!("{share:.0} %")))
}

/// How much of a quota is used; empty without one.
fn quota_text(quota: Option<u64>, used: Option<u64>) -> String {
    let text =
        |quota| format!("{} of {} of the month used", format_bytes(used.unwrap_or(0)), format_bytes(quota));
    quota.map_or_else(String::new, text)
}

/// Texts that are not empty, joined.
fn joined(parts: impl IntoIterator<Item = String>) -> String {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ")
}

/// Columns by kind, head and least width.
macro_rules! columns {
    ($($kind:ident $head:literal $width:literal;)+) => { &[$($kind($head, $width)),+] };
}

const LINKS: &[Column] = columns! {
    text "link" 8; text "state" 7; number "down" 12; number "up" 12; number "share" 5; number "rtt" 8;
    number "loss" 6; text "tier" 8;
};

fn links(status: &Status, rates: &Rates) -> Sheet {
    let all = rates.of_process(status);
    let row = |link: &Link| {
        let key = link_key(&link.name);
        let (now, figures) = (rates.now(&key), status.figures_of(link));
        let [down, up] = rate_cells(now);
        let cells = vec![
            Cell::text(&link.name),
            Cell::text(link.state.as_str()),
            down,
            up,
            share(now, all),
            rtt_cell(&figures),
            optional(figures.loss_pct, percent),
            Cell::text(&link.tier),
        ];
        let quota = quota_text(link.quota_bytes, link.quota_used_bytes);
        let addresses: Vec<_> = link.addresses.iter().map(ToString::to_string).collect();
        Row {
            health: match link.state {
                LinkState::Up => Health::Works,
                LinkState::Standby | LinkState::Never => Health::Waits,
                LinkState::Down => Health::Fails,
            },
            history: rates.last(&key, HISTORY),
            detail: joined([
                link.reason.clone(),
                format!("capacity up {}", figures.capacity_text()),
                addresses.join(" "),
                quota,
            ]),
            key,
            cells,
        }
    };
    Sheet { columns: LINKS, rows: status.links.iter().map(row).collect() }
}

/// Samples of the bars at the end of a row, at most.
const HISTORY: usize = 120;

const PATHS: &[Column] = columns! {
    text "path" 16; text "state" 8; number "down" 12; number "up" 12; number "rtt" 8; number "jitter" 8;
    number "loss" 6;
};

fn paths(status: &Status, rates: &Rates) -> Sheet {
    let row = |(client, path): (String, &Path)| {
        let key = path_key(&client, path);
        let [down, up] = rate_cells(rates.now(&key));
        let measured = |value| path.is_measured().then_some(value);
        Row {
            cells: vec![
                Cell::text(format!("{client} {}", path.id).trim_start()),
                Cell::text(path.state.as_str()),
                down,
                up,
                rtt_cell(&PathFigures::of([path].into_iter())),
                optional(measured(path.jitter_ms), milliseconds),
                optional(path.loss(), percent),
            ],
            health: match path.state {
                PathState::Active => Health::Works,
                PathState::Standby => Health::Waits,
                PathState::Down => Health::Fails,
            },
            history: rates.last(&key, HISTORY),
            detail: joined([
                path.reason.clone(),
                format!("{} to {}", path.local, path.remote_text()),
                measured(path.min_rtt_ms)
                    .map_or_else(String::new, |ms| format!("lowest rtt {}", format_ms(ms))),
                format!("{} lost packets", path.lost_packets),
                format!("window {}", format_bytes(path.cwnd_bytes)),
                format!("mtu {}", path.mtu),
            ]),
            key,
        }
    };
    Sheet { columns: PATHS, rows: all_paths(status).map(row).collect() }
}

/// The health of a process or class in this state.
pub(super) fn health_of(state: State) -> Health {
    match state {
        State::Up => Health::Works,
        State::Reconnecting | State::Stopping | State::NoAnswer | State::Refused => Health::Fails,
        State::Starting | State::Connecting | State::Asleep | State::Degraded => Health::Waits,
    }
}

const CLASSES: &[Column] = columns! {
    text "class" 10; text "state" 10; number "down" 12; number "up" 12; number "rtt" 8; number "loss" 6;
    number "queue" 8; number "drops" 6;
};

fn classes(status: &Status, rates: &Rates) -> Sheet {
    let row = |class: &Class| {
        let key = class_key(&class.name);
        let [down, up] = rate_cells(rates.now(&key));
        Row {
            cells: vec![
                Cell::text(&class.name),
                Cell::text(class.state.map_or("", State::as_str)),
                down,
                up,
                optional(class.rtt_ms, milliseconds),
                optional(class.loss_pct, percent),
                milliseconds(class.queue_ms),
                Cell::number(class.drops as f64, class.drops.to_string()),
            ],
            health: class.state.map_or(Health::Works, health_of),
            history: rates.last(&key, HISTORY),
            detail: joined([
                class.reason.clone(),
                class.scheduler.clone(),
                class.cc.clone(),
                class.tun.clone().unwrap_or_default(),
            ]),
            key,
        }
    };
    Sheet { columns: CLASSES, rows: status.classes.iter().map(row).collect() }
}

const FLOWS: &[Column] = columns! {
    text "flow" 5; text "from" 21; text "to" 24; text "lane" 8; text "state" 10; number "down" 10;
    number "up" 10; number "age" 11; number "idle" 8;
};

fn flow_rows(list: &FlowList) -> Sheet {
    let rows = list.flows.iter().map(|flow| {
        let from = if flow.from.is_empty() { &flow.user } else { &flow.from };
        Row {
            key: format!("{} {from} {}", flow.protocol, flow.to),
            cells: vec![
                Cell::text(&flow.protocol),
                Cell::text(from),
                Cell::text(&flow.to),
                Cell::text(flow.mode.as_str()),
                Cell::text(flow.state.map_or("", FlowState::as_str)),
                Cell::number(flow.down_bytes as f64, format_bytes(flow.down_bytes)),
                Cell::number(flow.up_bytes as f64, format_bytes(flow.up_bytes)),
                Cell::number(flow.age_s, format_duration(flow.age_s)),
                Cell::number(flow.idle_s, format_duration(flow.idle_s)),
            ],
            health: if flow.idle_s < 10.0 { Health::Works } else { Health::Waits },
            history: Vec::new(),
            detail: joined([flow.class.clone(), flow.why.clone()]),
        }
    });
    Sheet { columns: FLOWS, rows: rows.collect() }
}

const CLIENTS: &[Column] = columns! {
    text "client" 22; number "down" 12; number "up" 12; number "share" 5; number "rtt" 8; number "loss" 6;
    number "paths" 5;
};

fn clients(status: &Status, rates: &Rates) -> Sheet {
    let all = rates.of_process(status);
    let row = |client: &Client| {
        let key = client_key(client);
        let (now, figures) = (rates.now(&key), PathFigures::of(client.paths.iter()));
        let [down, up] = rate_cells(now);
        let working = || client.paths.iter().filter(|path| path.state != PathState::Down);
        let addresses: Vec<_> = client.addresses.iter().map(ToString::to_string).collect();
        Row {
            cells: vec![
                Cell::text(client_name(client)),
                down,
                up,
                share(now, all),
                rtt_cell(&figures),
                optional(figures.loss_pct, percent),
                Cell::number(working().count() as f64, working().count().to_string()),
            ],
            health: if working().next().is_some() { Health::Works } else { Health::Fails },
            history: rates.last(&key, HISTORY),
            detail: joined([
                format!("connected for {}", format_duration(client.connected_s)),
                addresses.join(" "),
                format!("sent {}", format_bytes(client.tx_bytes)),
                format!("received {}", format_bytes(client.rx_bytes)),
            ]),
            key,
        }
    };
    Sheet { columns: CLIENTS, rows: status.clients.iter().map(row).collect() }
}

const USERS: &[Column] = columns! {
    text "user" 16; text "state" 8; number "sessions" 8; number "down at most" 12; number "up at most" 12;
    text "expires" 10;
};

fn users(status: &Status) -> Sheet {
    let cap = |cap: Option<u64>| cap.map_or_else(Cell::unknown, |cap| rate_cell(cap as f64));
    let row = |user: &User| {
        let quota = quota_text(user.quota_bytes, user.quota_used_bytes);
        let sessions = user.max_sessions.map_or_else(String::new, |most| format!("at most {most} sessions"));
        Row {
            key: user.name.clone(),
            cells: vec![
                Cell::text(&user.name),
                Cell::text(user.state.as_str()),
                Cell::number(user.sessions.into(), user.sessions.to_string()),
                cap(user.down_cap_bps),
                cap(user.up_cap_bps),
                Cell::text(user.expires.clone().unwrap_or_default()),
            ],
            health: match user.state {
                UserState::Active if user.sessions > 0 => Health::Works,
                UserState::Active => Health::Waits,
                UserState::Revoked | UserState::Expired | UserState::QuotaUsedUp => Health::Fails,
            },
            history: Vec::new(),
            detail: joined([quota, sessions]),
        }
    };
    Sheet { columns: USERS, rows: status.users.iter().map(row).collect() }
}
