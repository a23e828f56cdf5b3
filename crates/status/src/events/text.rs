//! Parts of the sentences of events, for the log and for `mpvpn events`.

use std::fmt::Display;

use super::ClientName;
use mpvpn_input::short_text::ShortText;

/// A value behind some text; nothing without the value.
pub(super) fn prefixed(prefix: &str, value: Option<impl Display>) -> String {
    value.map_or_else(String::new, |value| format!("{prefix}{value}"))
}

/// The client and a colon, at a server.
pub(super) fn client_prefix(client: &Option<ClientName>) -> String {
    client.as_ref().map_or_else(String::new, |client| format!("{client}: "))
}

/// A path, with its link if that is known.
pub(super) fn path_of_link(link: &ShortText, path: &ShortText) -> String {
    if link.is_empty() { format!("path {path}") } else { format!("{link} (path {path})") }
}

/// A colon and a reason, unless that is empty.
pub(super) fn reason_suffix(reason: &ShortText) -> String {
    prefixed(": ", (!reason.is_empty()).then_some(reason))
}

/// A thread, unless it is the first.
pub(super) fn thread_suffix(shard: u8) -> String {
    if shard == 0 { String::new() } else { format!(" (thread {shard})") }
}

pub(super) fn resumed_suffix(resumed: bool) -> &'static str {
    if resumed { ", session resumed" } else { "" }
}

pub(super) fn comma_separated<T: ToString>(items: &[T]) -> String {
    match items {
        [] => "no address".to_owned(),
        items => items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// A number of things whose plural takes an s.
pub(super) fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A size (bytes).
pub(super) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, "B")
}

/// A rate (bit/s).
pub(super) fn rate(bps: u64) -> String {
    scaled(bps as f64, "bit/s")
}

/// With an SI prefix and at most one decimal.
fn scaled(value: f64, unit: &str) -> String {
    match value {
        ..1e3 => format!("{value:.0} {unit}"),
        ..1e6 => format!("{:.1} k{unit}", value / 1e3),
        ..1e9 => format!("{:.1} M{unit}", value / 1e6),
        _ => format!("{:.1} G{unit}", value / 1e9),
    }
}

/// A time (ms).
pub(super) fn milliseconds(time: u64) -> String {
    match time {
        ..1000 => format!("{time} ms"),
        1000..120_000 => format!("{:.1} s", time as f64 / 1e3),
        120_000..7_200_000 => format!("{} min", time / 60_000),
        _ => format!("{} h", time / 3_600_000),
    }
}

pub(super) fn reinjected(packets: u64, stream_bytes: u64) -> String {
    let packets = (packets > 0).then(|| counted(packets, "packet"));
    let bytes = (stream_bytes > 0).then(|| format!("{} of streams", bytes(stream_bytes)));
    let parts: Vec<String> = packets.into_iter().chain(bytes).collect();
    if parts.is_empty() { String::new() } else { format!("{} reinjected; ", parts.join(" and ")) }
}

pub(super) fn other_paths(working: u64) -> String {
    match working {
        0 => "no other path works".to_owned(),
        1 => "1 other path works".to_owned(),
        paths => format!("{paths} other paths work"),
    }
}

pub(super) fn shard_change(connected: bool, reason: &ShortText) -> String {
    match connected {
        true => "is connected".to_owned(),
        false => format!("lost its connection{}; connecting again", reason_suffix(reason)),
    }
}

/// The effect on the client of a state folder of which another machine has a copy.
pub(super) fn shared_secret(client: Option<&ClientName>, kept: bool) -> String {
    match (client, kept) {
        (Some(client), _) => format!(
            "{client}: another machine has a copy of its state folder: this client keeps its addresses, the other gets its own"
        ),
        (None, true) => {
            "another machine has a copy of this client's state folder: this client keeps its addresses".to_owned()
        }
        (None, false) => {
            "another machine uses the session of this client's state folder, a copy: this client gets addresses of its own"
                .to_owned()
        }
    }
}

pub(super) fn certificate_in_use(until: Option<&ShortText>) -> String {
    match until {
        Some(until) => format!("the one in use is valid until {until}"),
        None => "clients that ask for these names get the server's own certificate".to_owned(),
    }
}

/// The parts of a configuration that changed, and those that need a restart.
pub(super) fn changes(links: bool, classes: bool, applied: &[String], restart: &[String]) -> String {
    let parts = [links.then_some("links"), classes.then_some("classes")].into_iter().flatten();
    let parts: Vec<&str> = parts.chain(applied.iter().map(String::as_str)).collect();
    let changed = match parts.is_empty() {
        true => "everything as before".to_owned(),
        false => format!("changed are {}", parts.join(", ")),
    };
    changed + &prefixed("; after a restart: ", (!restart.is_empty()).then(|| restart.join(", ")))
}
