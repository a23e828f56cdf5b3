//! Builds the status for the local API from the reports of the tunnel and of the links.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use mpvpn_config::{ClientConfig, ServerConfig};
use mpvpn_input::role::Role;
use mpvpn_path::PathState as TunnelPathState;
use mpvpn_quic::HandshakeCounters;
use mpvpn_status::{
    Class, Client, FecStats, Handshakes, Link, LinkState, Path, PathFec, PathState, RefusedRequests,
    Resequencing, Session, State, Status,
};
use mpvpn_tunnel::{
    ClientReport, ClientState, ClosedConnection, ConnectionNumber, FecCounters, PathFecCounters, PathReport,
    ResequencingCounters, SecretSharing, ServerCounters, SessionReport, TrafficCounters,
};
use mpvpn_types::{BitRate, ByteSize, ClassId, CongestionControl, LinkId, PathId, SessionId, Tier, Weight};

use crate::{
    client::transports::LinkTransports,
    link_state::deciding_path,
    links::{Link as Uplink, Links},
    policies::{Direction, LinkPolicies},
    tcp_transport::connection::EstablishedConnection,
};

/// The class of clients and packets that have no other.
pub(crate) const DEFAULT_CLASS: &str = "default";

/// Classes that a server tells apart in its own figures. Clients choose the names, so the number is bounded.
/// More: memory, longer answers. Fewer: figures of different classes are added up. Chosen.
const MAX_CLASSES: usize = 32;

/// The client's note if the server carries no packets.
const NO_PACKETS_NOTE: &str =
    "the server carries no packets: TCP and UDP work, ping and other protocols do not";

/// Why a class has no connection.
const CLASS_NOT_USED_YET: &str = "not used yet";
const CLASS_NOT_USED: &str = "not used recently";
/// Why the paths of a class carry nothing.
const CLASS_ASLEEP: &str = "its class sleeps until it is used";

/// The note of a client about another machine that shows the secret of its session, if one does.
pub(crate) fn sharing_note(sharing: SecretSharing) -> Option<String> {
    let what = match sharing {
        SecretSharing::Alone => return None,
        SecretSharing::Kept => "this client keeps its addresses, the other one has its own",
        SecretSharing::Moved => "this client has addresses of its own since then",
    };
    Some(format!("another machine has a copy of this client's state folder: {what}"))
}

/// The note of a server about state folders of clients that were copied, if any was.
pub(crate) fn copies_note(shared_secrets: u64) -> Option<String> {
    (shared_secrets > 0).then(|| {
        format!(
            "two machines have shown the secret of one session {shared_secrets} times, as the state folder of a client was copied: \
             `mpvpn events` names the clients"
        )
    })
}

/// The status of a client, from one shard.
pub(crate) fn client_status(
    config: &ClientConfig,
    links: &Links,
    policies: &LinkPolicies,
    transports: &LinkTransports,
    reports: &[(ClassId, ClientReport)],
    uptime: Duration,
    member: ConnectionNumber,
) -> Status {
    let mut status = Status::new(Role::Client);
    let Some((_, report)) = reports.first() else { return status };
    status.state = match (report.state, &report.assignment) {
        (ClientState::Up, _) => State::Up,
        (ClientState::Connecting, None) => State::Connecting,
        (ClientState::Connecting, Some(_)) => State::Reconnecting,
        (ClientState::Asleep, _) => State::Asleep,
    };
    status.uptime_s = uptime.as_secs_f64();
    status.addresses = report.assignment.iter().flat_map(|given| given.addresses.iter().copied()).collect();
    status.session = Some(Session {
        server: config.server.to_string(),
        user: String::new(),
        resumed: u64::from(report.resumed),
    });
    status.notes.extend(report.per_flow.then(|| NO_PACKETS_NOTE.to_owned()));
    let given =
        |at: usize| report.assignment.as_ref().map_or(Vec::new(), |all| all.additional_or_first(at).0);
    let with_tun = config.class_tuns().zip(0..);
    let tuns: Vec<(ClassId, Vec<IpNet>)> = with_tun.map(|((class, _), at)| (class.id, given(at))).collect();
    for (id, report) in reports {
        let Some(class) = config.class(*id) else { continue };
        status.classes.push(Class {
            flow_mode: class.lane.unwrap_or(config.lane).to_string(),
            cc: cc_of(&report.paths).unwrap_or_else(|| class.cc.unwrap_or(config.cc).to_string()),
            peer_cc: report.peer_cc.map(|cc| cc.to_string()),
            scheduler: class.scheduler.unwrap_or(config.scheduler).to_string(),
            queue_ms: milliseconds(report.sojourn),
            queue_bytes: report.queued_bytes as u64,
            drops: report.drops,
            tx_bps: Some(report.rates.tx.bps()),
            rx_bps: Some(report.rates.rx.bps()),
            state: Some(match report.state {
                ClientState::Up => State::Up,
                ClientState::Connecting => State::Connecting,
                ClientState::Asleep => State::Asleep,
            }),
            reason: match report.state {
                ClientState::Asleep if report.counters == TrafficCounters::default() => {
                    CLASS_NOT_USED_YET.to_owned()
                }
                ClientState::Asleep => CLASS_NOT_USED.to_owned(),
                ClientState::Up | ClientState::Connecting => report.reason.clone(),
            },
            rtt_ms: rtt_of(&report.paths),
            loss_pct: loss_of(&report.paths),
            resequencing: report.resequencing.map(resequencing_of),
            tun: class.tun.clone(),
            addresses: tuns.iter().find(|(tun, _)| tun == id).map_or(Vec::new(), |(_, own)| own.clone()),
            ..with_counters(Class::new(&class.name), report.counters)
        });
        add_resequencing(&mut status.resequencing, report.resequencing.map(resequencing_of));
        status.handshakes.get_or_insert_default().add(handshakes_of(report.handshakes));
        status.flows.stream += report.stream_flows as u64;
        status.flows.udp += report.udp_flows as u64;
        status.flows.datagram += report.datagram_flows as u64;
        for path in &report.paths {
            let link = path.link.map(|link| link.with_class(*id));
            let Some((id, link)) = link.and_then(|id| Some((id, links.links.get(&id)?))) else { continue };
            let local = local_of(link, path.view.remote);
            let several = links.links.get(&id.uplink()).is_some_and(|link| link.pipes > 1);
            let mut path_status = path_of(path, &class.name, &link.name, local, member);
            if id.is_tcp() {
                set_tcp_transport(&mut path_status, transports.established(id.uplink()));
                status.paths.push(path_status);
                continue;
            }
            path_status.pipe = several.then_some(id.path_index());
            if id.path_index() >= policies.pipes(&link.name).used && path_status.state == PathState::Standby {
                path_status.reason = "a pipe that is not used now".to_owned();
            }
            status.paths.push(path_status);
        }
        if report.state == ClientState::Asleep {
            let own = links.links.iter().filter(|(link, _)| link.class() == *id && !link.is_tcp());
            let usable = own.filter_map(|(_, link)| Some((link, link.remote?)));
            status.paths.extend(
                (0..)
                    .zip(usable)
                    .map(|(at, (link, remote))| asleep_path(at, &class.name, link, remote, member)),
            );
        }
    }
    let now = Instant::now();
    for (id, link) in links.uplinks() {
        let link_config = policies.of(&link.name);
        let all = reports.iter().flat_map(|(_, report)| &report.paths);
        let own: Vec<_> = all.filter(|path| path.link.map(LinkId::uplink) == Some(id)).collect();
        let (state, reason) = state_of(link, policies, &own, now);
        let transport_reason = transports.reason(now, id);
        let reason = if reason.is_empty() || state == LinkState::Up { transport_reason } else { reason };
        status.links.push(Link {
            state,
            tier: policies.tier(&link.name).to_string(),
            reason,
            addresses: link.addresses.clone(),
            tx_bytes: link.meter.payload_bytes(Direction::Sent),
            rx_bytes: link.meter.payload_bytes(Direction::Received),
            metered: link_config.metered,
            up_cap_bps: link_config.up.map(BitRate::bps),
            down_cap_bps: link_config.down.map(BitRate::bps),
            quota_bytes: link_config.quota.map(ByteSize::bytes),
            weight: Some(link_config.weight).filter(|weight| *weight != Weight::default()).map(Weight::get),
            pipes: (link.pipes > 1).then_some(link.pipes),
            ..Link::new(&link.name)
        });
    }
    status
}

/// The state of a link, and why. `paths` are those of all classes over the link.
fn state_of(
    link: &Uplink,
    policies: &LinkPolicies,
    paths: &[&PathReport],
    now: Instant,
) -> (LinkState, String) {
    if link.remote.is_none() {
        return (LinkState::Down, link.reason.to_owned());
    }
    if policies.tier(&link.name) == Tier::Never {
        return (LinkState::Never, policies.never_reason(&link.name));
    }
    let arrivals: Vec<_> = paths.iter().map(|path| (path.state, path.last_arrival)).collect();
    match deciding_path(&arrivals, now).map(|at| paths[at]) {
        Some(path) if path.state == TunnelPathState::Down => (LinkState::Down, path.reason.clone()),
        Some(path) if path.state == TunnelPathState::Standby => (LinkState::Standby, path.reason.clone()),
        _ => (LinkState::Up, link.reason.to_owned()),
    }
}

/// The smallest smoothed round-trip time of the active paths (ms).
fn rtt_of(paths: &[PathReport]) -> Option<f64> {
    let active = paths.iter().filter(|path| path.state == TunnelPathState::Active);
    active.map(|path| path.view.rtt).min().map(milliseconds)
}

/// The congestion controller of the connection; `None` where it has no path.
fn cc_of(paths: &[PathReport]) -> Option<String> {
    paths.first().map(|path| path.view.cc.to_string())
}

/// The loss on all paths in the last 10 s (percent).
fn loss_of(paths: &[PathReport]) -> Option<f64> {
    let sent: u64 = paths.iter().map(|path| path.view.recent_packets_sent).sum();
    let lost: f64 = paths.iter().map(|path| path.view.loss * path.view.recent_packets_sent as f64).sum();
    (!paths.is_empty()).then(|| 100.0 * lost / sent.max(1) as f64)
}

/// Adds the status of another shard of a client. The links' counters already include all shards.
pub(crate) fn add_shard_status(status: &mut Status, member: Status) {
    for (class, other) in status.classes.iter_mut().zip(member.classes) {
        class.add(&other);
    }
    status.paths.extend(member.paths);
    status.flows.stream += member.flows.stream;
    status.flows.datagram += member.flows.datagram;
    add_resequencing(&mut status.resequencing, member.resequencing);
    if let Some(handshakes) = member.handshakes {
        status.handshakes.get_or_insert_default().add(handshakes);
    }
}

fn add_resequencing(sum: &mut Option<Resequencing>, other: Option<Resequencing>) {
    if let Some(other) = other {
        sum.get_or_insert_default().add(other);
    }
}

fn resequencing_of(counters: ResequencingCounters) -> Resequencing {
    Resequencing {
        on: counters.is_numbering,
        numbered: counters.numbered,
        resent: counters.retransmissions,
        copies: counters.copies,
        restored: counters.received.held,
        late: counters.received.late,
        duplicates: counters.received.duplicates,
        given_up: counters.received.given_up,
        waiting: counters.received.holding,
        wait_ms: counters.received.wait.as_millis() as u64,
        fec: counters.fec.map(repair_of).unwrap_or_default(),
    }
}

fn repair_of(counters: FecCounters) -> FecStats {
    FecStats {
        percent: counters.max_repair_percent,
        protected: counters.protected,
        sent: counters.repair_packets,
        sent_bytes: counters.repair_bytes,
        made_good: counters.recovered_by_peer,
        recovered: counters.recovered,
        wasted: counters.unneeded_repairs,
        unrecoverable: counters.unrecoverable,
    }
}

/// The counters of FEC on a path; `None` if it was never used there.
fn path_fec_of(counters: PathFecCounters) -> Option<PathFec> {
    (counters != PathFecCounters::default()).then_some(PathFec {
        percent: counters.repair_percent,
        protected: counters.protected,
        sent: counters.repair_packets,
        sent_bytes: counters.repair_bytes,
        made_good: counters.recovered_by_peer,
        wasted: counters.unneeded_repairs,
    })
}

fn handshakes_of(counters: HandshakeCounters) -> Handshakes {
    let HandshakeCounters { completed, failed, retried, dropped } = counters;
    Handshakes { completed, failed, retried, dropped }
}

/// Adds the handshakes and refused requests of the shards of a server.
pub(crate) fn add_server_counters(status: &mut Status, shards: &[ServerCounters]) {
    let mut handshakes = Handshakes::default();
    let mut refused: BTreeMap<u16, u64> = BTreeMap::new();
    for counters in shards {
        handshakes.add(handshakes_of(counters.handshakes));
        counters.refused.iter().for_each(|(status, count)| *refused.entry(*status).or_default() += count);
    }
    status.handshakes = Some(handshakes);
    status.refused = refused.into_iter().map(|(status, count)| RefusedRequests { status, count }).collect();
}

/// Adds what a connection has carried to the sum of its user.
pub(crate) fn add_traffic(
    users: &mut BTreeMap<String, TrafficCounters>,
    user: String,
    carried: TrafficCounters,
) {
    users.entry(user).or_default().add(carried);
}

fn class_of_server(name: &str) -> Class {
    // Flow mode, scheduler and congestion controller belong to each client.
    Class { cc: String::new(), ..Class::new(name) }
}

/// The class with the counters of a connection.
pub(crate) fn with_counters(class: Class, counters: TrafficCounters) -> Class {
    Class {
        tx_bytes: counters.tx_bytes,
        rx_bytes: counters.rx_bytes,
        superseded_acks: counters.superseded_acks,
        reinjected_bytes: counters.reinjected_bytes,
        ..class
    }
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
        let client = clients.entry(key).or_insert_with(|| Client {
            user: report.user.clone(),
            addresses: Vec::new(),
            connected_s: 0.0,
            tx_bytes: 0,
            rx_bytes: 0,
            classes: Vec::new(),
            resequencing: None,
            paths: Vec::new(),
        });
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
            client.paths.push(path_of(path, name, "", SocketAddr::new(ip, port), report.connection));
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

/// The local address of a link for packets to the server.
fn local_of(link: &Uplink, remote: SocketAddr) -> SocketAddr {
    let port =
        link.socket.as_ref().and_then(|socket| socket.socket.local_addr().ok()).map_or(0, |a| a.port());
    let own = link.addresses.iter().find(|ip| ip.is_ipv4() == remote.is_ipv4());
    SocketAddr::new(own.copied().unwrap_or(IpAddr::from([0, 0, 0, 0])), port)
}

/// The path over a link that a sleeping class will use when it wakes. Its socket exists already.
fn asleep_path(at: u32, class: &str, link: &Uplink, remote: SocketAddr, member: ConnectionNumber) -> Path {
    Path {
        id: id_of(at, class, &link.name, member),
        class: class.to_owned(),
        link: link.name.clone(),
        pipe: None,
        transport: Some("quic".to_owned()),
        local: local_of(link, remote),
        remote,
        state: PathState::Standby,
        reason: CLASS_ASLEEP.to_owned(),
        rtt_ms: 0.0,
        min_rtt_ms: 0.0,
        base_rtt_ms: None,
        jitter_ms: 0.0,
        loss_pct: 0.0,
        cc: None,
        cwnd_bytes: 0,
        in_flight_bytes: 0,
        rate_bps: 0,
        link_rate_bps: None,
        backlog_ms: None,
        tx_bytes: 0,
        rx_bytes: 0,
        tx_packets: 0,
        rx_packets: 0,
        lost_packets: 0,
        mtu: 0,
        fec: None,
    }
}

/// Path IDs count from 0 in each connection of a session.
fn id_of(number: u32, class: &str, link: &str, member: ConnectionNumber) -> String {
    format!("{class}/{link}/{number}{}", shard_of(member))
}

/// The name of a path: class, link, and its number or `tcp` for a path inside TCP. A server does not know the
/// link.
pub(crate) fn path_name(
    path: PathId,
    class: &str,
    name: &str,
    link: Option<LinkId>,
    member: ConnectionNumber,
) -> String {
    match link.is_some_and(LinkId::is_tcp) {
        true => tcp_id(class, name, member),
        false => id_of(path.0, class, if name.is_empty() { UNKNOWN_LINK } else { name }, member),
    }
}

/// Stands for an unknown link.
const UNKNOWN_LINK: &str = "path";

fn tcp_id(class: &str, link: &str, member: ConnectionNumber) -> String {
    format!("{class}/{link}/tcp{}", shard_of(member))
}

fn shard_of(member: ConnectionNumber) -> String {
    if member.shard() == 0 { String::new() } else { format!("@{}", member.shard()) }
}

fn path_of(
    report: &PathReport,
    class: &str,
    link: &str,
    local: SocketAddr,
    member: ConnectionNumber,
) -> Path {
    let view = &report.view;
    Path {
        id: path_name(view.id, class, link, report.link, member),
        class: class.to_owned(),
        link: link.to_owned(),
        pipe: None,
        transport: Some("quic".to_owned()),
        local,
        remote: view.remote,
        state: match report.state {
            TunnelPathState::Active => PathState::Active,
            TunnelPathState::Standby => PathState::Standby,
            TunnelPathState::Down => PathState::Down,
        },
        reason: report.reason.clone(),
        rtt_ms: milliseconds(view.rtt),
        min_rtt_ms: milliseconds(view.min_rtt.unwrap_or_default()),
        // It is 0 before the first measurement.
        base_rtt_ms: (!view.base_rtt.is_zero()).then(|| milliseconds(view.base_rtt)),
        jitter_ms: milliseconds(view.jitter),
        loss_pct: view.loss * 100.0,
        cc: Some(view.cc.to_string()),
        cwnd_bytes: view.congestion_window,
        in_flight_bytes: view.in_flight,
        rate_bps: view.delivery_rate.saturating_mul(8),
        link_rate_bps: view.link_rate.map(|rate| rate.saturating_mul(8)),
        backlog_ms: view.backlog_time.map(|time| time.as_millis() as u64),
        tx_bytes: view.tx_bytes,
        rx_bytes: view.rx_bytes,
        tx_packets: view.tx_packets,
        rx_packets: view.rx_packets,
        lost_packets: view.lost_packets,
        mtu: view.mtu,
        fec: report.fec.and_then(path_fec_of),
    }
}

/// Marks a path as one whose packets travel in a TCP connection.
fn set_tcp_transport(path: &mut Path, connection: Option<&EstablishedConnection>) {
    let is_multipath = connection.is_some_and(|established| established.multipath);
    path.transport = Some(if is_multipath { "mptcp" } else { "tcp" }.to_owned());
    if let Some(established) = connection {
        (path.local, path.remote) = (established.local, established.remote);
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
