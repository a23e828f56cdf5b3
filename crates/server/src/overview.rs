//! Builds the overview of a server for its dashboard.
//!
//! In: the reports of all connections, those of shown sessions with paths. Out: the status with the shown
//! sessions, and all sessions in short. Always holds: a session that is not shown costs a few sums.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use mpvpn_config::ServerConfig;
use mpvpn_report::paths::{DEFAULT_CLASS, with_counters};
use mpvpn_status::{Class, Overview, SessionSummary};
use mpvpn_tunnel::{SessionReport, TrafficCounters};
use mpvpn_types::SessionId;

use crate::status::{add_to_class, server_status};

/// The first number of sessions of clients that use relays only: above those of other sessions.
const FIRST_RELAY_NUMBER: u64 = 1 << 32;

/// The number of a report's session, which stays while the session lives. Clients that use relays only have
/// no session: the time of their connection, in µs since `started`, tells them apart.
pub(crate) fn session_number(report: &SessionReport, started: Instant) -> u64 {
    match report.session {
        Some(SessionId(number)) => u64::from(number),
        None => {
            let since = report.since.saturating_duration_since(started);
            FIRST_RELAY_NUMBER + u64::try_from(since.as_micros()).unwrap_or_default()
        }
    }
}

/// Sums over the connections of a class.
#[derive(Default)]
struct ClassSum {
    counters: TrafficCounters,
    tx_bps: u64,
    rx_bps: u64,
    drops: u64,
    queue: Duration,
}

/// The overview of a server. Reports with paths are those of shown sessions.
pub(crate) fn overview(
    config: &ServerConfig,
    addresses: &[IpNet],
    reports: Vec<SessionReport>,
    departed: &[Class],
    now: Instant,
    started: Instant,
) -> Overview {
    let mut sessions: BTreeMap<u64, SessionSummary> = BTreeMap::new();
    for report in &reports {
        let id = session_number(report, started);
        let session = sessions.entry(id).or_insert_with(|| SessionSummary {
            id,
            user: report.user.clone(),
            address: report.addresses.iter().next(),
            ..SessionSummary::default()
        });
        session.connected_s =
            session.connected_s.max(now.saturating_duration_since(report.since).as_secs_f64());
        session.tx_bytes += report.counters.tx_bytes;
        session.rx_bytes += report.counters.rx_bytes;
    }
    let (shown, others): (Vec<_>, Vec<_>) = reports.into_iter().partition(|report| !report.paths.is_empty());
    // In the order of the clients in the status.
    let keys = shown.iter().enumerate().map(|(at, report)| {
        let key = (report.session, if report.session.is_some() { 0 } else { at });
        (key, session_number(report, started))
    });
    let keys: BTreeMap<(Option<SessionId>, usize), u64> = keys.collect();
    let mut status = server_status(config, addresses, &[], &shown, departed, now, started);
    for (name, sum) in sums_of_classes(&others) {
        let class = Class {
            tx_bps: Some(sum.tx_bps),
            rx_bps: Some(sum.rx_bps),
            drops: sum.drops,
            queue_ms: sum.queue.as_secs_f64() * 1000.0,
            ..with_counters(Class::default(), sum.counters)
        };
        add_to_class(&mut status.classes, name, &class);
    }
    Overview { status, shown: keys.into_values().collect(), sessions: sessions.into_values().collect() }
}

fn sums_of_classes(reports: &[SessionReport]) -> BTreeMap<&str, ClassSum> {
    let mut sums: BTreeMap<&str, ClassSum> = BTreeMap::new();
    for report in reports {
        let name = if report.class.is_empty() { DEFAULT_CLASS } else { &report.class };
        let sum = sums.entry(name).or_default();
        sum.counters += report.counters;
        sum.tx_bps += report.rates.tx.bps();
        sum.rx_bps += report.rates.rx.bps();
        sum.drops += report.drops;
        sum.queue = sum.queue.max(report.sojourn);
    }
    sums
}
