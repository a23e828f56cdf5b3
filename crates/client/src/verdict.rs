//! The state of a client in a word and a sentence, which every view of the client shows first.
//!
//! In: the report of the tunnel, the links, the time. Out: the state, and why. Always holds: a client works
//! only while packets of its server arrive, whatever is configured.

use std::time::{Duration, Instant};

use mpvpn_status::{Link, LinkState, State, format_duration};
use mpvpn_tunnel::{ClientReport, ClientState, Outage};

/// A connection that is being made counts as one without an answer after this time: longer than a handshake
/// takes of which one packet is lost (a probe timeout of 1 s, RFC 9002 §6.2.2). Longer: it is said later that
/// nothing answers; shorter: it is said of slow links. Chosen.
pub(crate) const NO_ANSWER_AFTER: Duration = Duration::from_secs(3);

/// The tunnel of a client, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TunnelInView<'a> {
    pub(crate) state: ClientState,
    pub(crate) outage: Option<Outage>,
    /// Why the tunnel is not up; empty if no reason is known.
    pub(crate) reason: &'a str,
    pub(crate) was_up: bool,
}

impl<'a> From<&'a ClientReport> for TunnelInView<'a> {
    fn from(report: &'a ClientReport) -> Self {
        let (state, outage, reason) = (report.state, report.outage, report.reason.as_str());
        Self { state, outage, reason, was_up: report.assignment.is_some() }
    }
}

/// The links of a client, as far as they matter here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinksInView<'a> {
    /// All of them, with their states.
    pub(crate) all: &'a [Link],
    /// Whether any of them may and can carry packets.
    pub(crate) any_usable: bool,
    /// Whether the server has an address.
    pub(crate) is_server_known: bool,
    /// The server's name.
    pub(crate) server: &'a str,
}

/// The state of a client, and the sentence about it.
pub(crate) fn verdict(now: Instant, tunnel: TunnelInView<'_>, links: LinksInView<'_>) -> (State, String) {
    let Some(outage) = tunnel.outage else {
        return match tunnel.state {
            ClientState::Asleep => (State::Asleep, "asleep".to_owned()),
            _ => working(links.all),
        };
    };
    if tunnel.state == ClientState::Refused {
        return (State::Refused, format!("refused: {}; ask who runs the server", tunnel.reason));
    }
    let silence = now.saturating_duration_since(outage.since);
    if tunnel.state != ClientState::Up && silence < NO_ANSWER_AFTER {
        let (state, doing) = match tunnel.was_up {
            true => (State::Reconnecting, "connecting again"),
            false => (State::Connecting, "connecting"),
        };
        return (state, with_reason(doing, tunnel.reason));
    }
    let cause = match (links.any_usable, links.is_server_known) {
        (true, _) => "server or all links".to_owned(),
        (false, false) => format!("the name {} does not resolve", links.server),
        (false, true) => format!("no link can be used: {}", failures(links.all)),
    };
    let wait =
        outage.next_try.and_then(|at| at.checked_duration_since(now)).map(|wait| wait.as_secs_f64().ceil());
    let next = match wait {
        _ if !links.any_usable => String::new(),
        Some(wait) if wait > 0.0 => format!(", trying again in {wait} s"),
        _ => ", trying again".to_owned(),
    };
    let silence = format_duration(silence.as_secs_f64());
    (State::NoAnswer, format!("no answer for {silence} ({cause}){next}"))
}

/// The state of a client that reaches its server.
fn working(links: &[Link]) -> (State, String) {
    match failures(links) {
        none if none.is_empty() => (State::Up, "up".to_owned()),
        failures => (State::Degraded, format!("degraded: {failures}")),
    }
}

/// The links that are down, since when, and why.
fn failures(links: &[Link]) -> String {
    let down = links.iter().filter(|link| link.state == LinkState::Down);
    let of = |link: &Link| {
        let time = link.down_s.map_or(String::new(), |time| format!(" for {}", format_duration(time)));
        let reason = if link.reason.is_empty() { String::new() } else { format!(" ({})", link.reason) };
        format!("{} down{time}{reason}", link.name)
    };
    down.map(of).collect::<Vec<_>>().join("; ")
}

fn with_reason(doing: &str, reason: &str) -> String {
    if reason.is_empty() { doing.to_owned() } else { format!("{doing}: {reason}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKS: TunnelInView<'_> =
        TunnelInView { state: ClientState::Up, outage: None, reason: "", was_up: true };

    fn link(name: &str, state: LinkState, down_s: Option<f64>, reason: &str) -> Link {
        Link { state, down_s, reason: reason.to_owned(), ..Link::new(name) }
    }

    fn said(
        tunnel: TunnelInView<'_>,
        all: &[Link],
        any_usable: bool,
        is_server_known: bool,
    ) -> (State, String) {
        verdict(
            Instant::now(),
            tunnel,
            LinksInView { all, any_usable, is_server_known, server: "vpn.example" },
        )
    }

    /// The tunnel of a client that has heard nothing for so many seconds and tries again in so many.
    fn silent(state: ClientState, since_s: u64, next_s: Option<u64>) -> TunnelInView<'static> {
        let now = Instant::now();
        let next_try = next_s.map(|wait| now + Duration::from_secs(wait));
        TunnelInView {
            state,
            outage: Some(Outage { since: now - Duration::from_secs(since_s), next_try }),
            ..WORKS
        }
    }

    #[test]
    fn links_that_are_down_are_named_with_time_and_reason() {
        let all = [
            link("eth1", LinkState::Up, None, ""),
            link("eth2", LinkState::Down, Some(62.0), "no carrier"),
            link("eth3", LinkState::Standby, None, "backup"),
            link("eth4", LinkState::Never, None, "as configured"),
        ];
        let degraded = "degraded: eth2 down for 1 min 2 s (no carrier)";
        assert_eq!(said(WORKS, &all, true, true), (State::Degraded, degraded.to_owned()));
        assert_eq!(said(WORKS, &all[..1], true, true), (State::Up, "up".to_owned()));
    }

    #[test]
    fn a_client_that_hears_nothing_is_not_up() {
        let all =
            [link("eth1", LinkState::Up, None, ""), link("eth2", LinkState::Down, Some(9.0), "no carrier")];
        let (state, words) = said(silent(ClientState::Up, 1, None), &all, true, true);
        assert_eq!(
            (state, &*words),
            (State::NoAnswer, "no answer for 1.0 s (server or all links), trying again")
        );
        let (state, words) = said(silent(ClientState::Connecting, 61, Some(4)), &all, true, true);
        let expected = "no answer for 1 min 1 s (server or all links), trying again in 4 s";
        assert_eq!((state, &*words), (State::NoAnswer, expected));
        let (_, words) = said(silent(ClientState::Connecting, 5, Some(4)), &all[1..], false, true);
        assert_eq!(words, "no answer for 5.0 s (no link can be used: eth2 down for 9.0 s (no carrier))");
        let (_, words) = said(silent(ClientState::Connecting, 5, None), &all, false, false);
        assert_eq!(words, "no answer for 5.0 s (the name vpn.example does not resolve)");
    }

    #[test]
    fn a_refusal_is_said_with_its_reason_however_long_ago_it_was() {
        let reason = "the access of this user ended on 2026-01-31";
        let refused = TunnelInView { reason, ..silent(ClientState::Refused, 59, Some(1)) };
        let expected = format!("refused: {reason}; ask who runs the server");
        assert_eq!(said(refused, &[], true, true), (State::Refused, expected));
        assert!(!State::Refused.works());
    }

    #[test]
    fn a_connection_that_is_being_made_is_no_outage_yet() {
        let first = TunnelInView { was_up: false, ..silent(ClientState::Connecting, 1, None) };
        assert_eq!(said(first, &[], true, true), (State::Connecting, "connecting".to_owned()));
        let again = TunnelInView { reason: "the server ends", ..silent(ClientState::Connecting, 1, None) };
        let expected = (State::Reconnecting, "connecting again: the server ends".to_owned());
        assert_eq!(said(again, &[], true, true), expected);
    }
}
