//! Builds the status of a server for the local API from the reports of the tunnel.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use ipnet::IpNet;
use mpvpn_config::ServerConfig;
use mpvpn_input::role::Role;
use mpvpn_report::paths::{
    DEFAULT_CLASS, add_resequencing, handshakes_of, loss_of, milliseconds, path_of, resequencing_of, rtt_of,
    with_counters,
};
use mpvpn_status::{Budget, Class, Client, Handshakes, RefusedRequests, State, Status};
use mpvpn_tunnel::{ClosedConnection, ProcessBytes, ServerCounters, SessionReport, TrafficCounters};
use mpvpn_types::{CongestionControl, SessionId};

/// Classes that a server tells apart in its own figures. Clients choose the names, so the number is bounded.
/// More: memory, longer answers. Fewer: figures of different classes are added up. Chosen.
const MAX_CLASSES: usize = 32;

/// The note of a server about state folders of clients that were copied, if any was.
pub(crate) fn copies_note(shared_secrets: u64) -> Option<String> {
    (shared_secrets > 0).then(|| {
        format!(
            "two machines have shown the secret of one session {shared_secrets} times, as the state folder of a client was copied: \
             `mpvpn events` names the clients"
        )
    })
}

/// Adds the handshakes and refused requests of the shards of a server.
pub(crate) fn add_server_counters(status: &mut Status, shards: &[ServerCounters]) {
    let mut handshakes = Handshakes::default();
    let mut refused: BTreeMap<u16, u64> = BTreeMap::new();
    for counters in shards {
        handshakes += handshakes_of(counters.handshakes);
        counters.refused.iter().for_each(|(status, count)| *refused.entry(*status).or_default() += count);
    }
    status.handshakes = Some(handshakes);
    status.refused = refused.into_iter().map(|(status, count)| RefusedRequests { status, count }).collect();
}

/// Adds what the process and its users hold: bytes and connections.
pub(crate) fn add_budget(
    status: &mut Status,
    process: &ProcessBytes,
    users: &BTreeMap<String, (usize, usize)>,
) {
    for user in &mut status.users {
        let (bytes, connections) = users.get(&user.name).copied().unwrap_or_default();
        (user.held_bytes, user.connections) = (bytes as u64, connections as u64);
    }
    status.budget = Some(Budget {
        used_bytes: process.used() as u64,
        max_bytes: process.most() as u64,
        connections: users.values().map(|(_, connections)| *connections as u64).sum(),
    });
}

/// Adds what a connection has carried to the sum of its user.
pub(crate) fn add_traffic(
    users: &mut BTreeMap<String, TrafficCounters>,
    user: String,
    carried: TrafficCounters,
) {
    *users.entry(user).or_default() += carried;
}

fn class_of_server(name: &str) -> Class {
    // Flow mode, scheduler and congestion controller belong to each client.
    Class { cc: String::new(), ..Class::new(name) }
}

/// The entry of this class; the last entry if the limit of classes is reached.
fn class_entry<'a>(classes: &'a mut Vec<Class>, name: &str) -> &'a mut Class {
    let at = classes.iter().position(|class| class.name == name).unwrap_or_else(|| {
        // Clients choose the names of their classes.
        if classes.len() < MAX_CLASSES {
            classes.push(class_of_server(name));
        }
        classes.len() - 1
    });
    &mut classes[at]
}

fn class_of(name: &str, report: &SessionReport) -> Class {
    Class {
        queue_ms: milliseconds(report.sojourn),
        queue_bytes: report.queued_bytes as u64,
        drops: report.drops,
        tx_bps: Some(report.rates.tx.bps()),
        rx_bps: Some(report.rates.rx.bps()),
        rtt_ms: rtt_of(&report.paths),
        loss_pct: loss_of(&report.paths),
        resequencing: report.resequencing.map(resequencing_of),
        cc: report.cc.map_or(String::new(), |cc| cc.to_string()),
        ..with_counters(class_of_server(name), report.counters)
    }
}

/// Adds the counters of a closed connection to its class.
pub(crate) fn add_departed(classes: &mut Vec<Class>, departed: ClosedConnection) {
    let name = if departed.class.is_empty() { DEFAULT_CLASS } else { &departed.class };
    // A closed connection counts in totals, not in present values.
    let resequencing = departed.resequencing.map(|counters| resequencing_of(counters).as_over());
    class_entry(classes, name).add(&Class {
        drops: departed.drops,
        resequencing,
        ..with_counters(class_of_server(name), departed.counters)
    });
}

/// Adds the values of a class to the entry with its name.
pub(crate) fn add_to_class(classes: &mut Vec<Class>, name: &str, class: &Class) {
    class_entry(classes, name).add(class);
}

/// The status of a server.
pub(crate) fn server_status(
    config: &ServerConfig,
    addresses: &[IpNet],
    listen: &[SocketAddr],
    reports: &[SessionReport],
    departed: &[Class],
    now: Instant,
    started: Instant,
) -> Status {
    let mut status = Status::new(Role::Server);
    status.state = State::Up;
    status.uptime_s = now.saturating_duration_since(started).as_secs_f64();
    status.addresses = addresses.to_vec();
    status.notes.extend(config.service.note().map(str::to_owned));
    let mut classes = vec![class_of_server(DEFAULT_CLASS)];
    for class in departed {
        class_entry(&mut classes, &class.name).add(class);
    }
    // A client that only relays has no session: each of its connections is an entry.
    let mut clients: BTreeMap<(Option<SessionId>, usize), Client> = BTreeMap::new();
    let port = listen.first().map_or(0, SocketAddr::port);
    let prefix = |ip: IpAddr| match ip {
        IpAddr::V4(_) => IpNet::new(ip, config.subnet.prefix_len()),
        IpAddr::V6(_) => IpNet::new(ip, config.subnet6.map_or(128, |net| net.prefix_len())),
    };
    for (at, report) in reports.iter().enumerate() {
        let name = if report.class.is_empty() { DEFAULT_CLASS } else { &report.class };
        let class = class_of(name, report);
        // A round-trip time of all clients together means nothing.
        class_entry(&mut classes, name).add(&Class { rtt_ms: None, ..class.clone() });
        let key = (report.session, if report.session.is_some() { 0 } else { at });
        let new = || Client { user: report.user.clone(), ..Client::default() };
        let client = clients.entry(key).or_insert_with(new);
        if !report.class.is_empty() {
            class_entry(&mut client.classes, name).add(&class);
        }
        if client.addresses.is_empty() {
            client.addresses = report.addresses.iter().filter_map(|ip| prefix(ip).ok()).collect();
        }
        let connected = now.saturating_duration_since(report.since).as_secs_f64();
        client.connected_s = client.connected_s.max(connected);
        client.tx_bytes += report.counters.tx_bytes;
        client.rx_bytes += report.counters.rx_bytes;
        add_resequencing(&mut client.resequencing, report.resequencing.map(resequencing_of));
        for path in &report.paths {
            let ip = path.view.local.map_or(IpAddr::from([0, 0, 0, 0]), |local| local.ip());
            client.paths.push(path_of(now, path, name, "", SocketAddr::new(ip, port), report.connection));
        }
    }
    status.clients = clients.into_values().collect();
    let without_connection = classes.iter_mut().filter(|class| class.cc.is_empty());
    without_connection.for_each(|class| class.cc = CongestionControl::default().to_string());
    status.classes = classes;
    status
}

/// Adds packets lost between shards to the dropped packets.
pub(crate) fn add_lost_packets(status: &mut Status, lost: u64) {
    if let Some(class) = status.classes.first_mut() {
        class.drops += lost;
    }
}
