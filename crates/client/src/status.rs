//! Builds the status of a client for the local API from the reports of the tunnel and of the links.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use ipnet::IpNet;
use mpvpn_config::ClientConfig;
use mpvpn_input::role::Role;
use mpvpn_links::{
    Link as Uplink, Links,
    policies::{Direction, LinkPolicies},
};
use mpvpn_path::PathState as TunnelPathState;
use mpvpn_report::paths::{
    add_resequencing, handshakes_of, id_of, loss_of, milliseconds, path_of, resequencing_of, rtt_of,
    with_counters,
};
use mpvpn_status::{Class, Link, LinkState, Path, PathState, Session, State, Status};
use mpvpn_tcp::connection::EstablishedConnection;
use mpvpn_tunnel::{ClientReport, ClientState, ConnectionNumber, PathReport, SecretSharing, TrafficCounters};
use mpvpn_types::{BitRate, ByteSize, ClassId, LinkId, Tier, Weight};

use crate::{
    link_state::deciding_path,
    transports::LinkTransports,
    verdict::{LinksInView, verdict},
};

/// The client's note if the server carries no packets.
const NO_PACKETS_NOTE: &str =
    "the server carries no packets: TCP and UDP work, ping and other protocols do not";

/// Why a class has no connection.
const CLASS_NOT_USED_YET: &str = "not used yet";

const CLASS_NOT_USED: &str = "not used recently";

const CLASS_NOT_NEEDED: &str = "default carries it, no link is full";

/// Why a link without a path is down.
const NO_ANSWER: &str = "no answer";

/// Why the paths of a class carry nothing.
const CLASS_ASLEEP: &str = "its class has no connection";

/// The note of a client about another machine that shows the secret of its session, if one does.
pub(crate) fn sharing_note(sharing: SecretSharing) -> Option<String> {
    let what = match sharing {
        SecretSharing::Alone => return None,
        SecretSharing::Kept => "this client keeps its addresses, the other one has its own",
        SecretSharing::Moved => "this client has addresses of its own since then",
    };
    Some(format!("another machine has a copy of this client's state folder: {what}"))
}

/// The status of a client, from one shard, without the time since the start. `is_heard`: whether something of
/// the server arrives over a link.
pub(crate) fn client_status(
    config: &ClientConfig,
    links: &Links,
    policies: &LinkPolicies,
    transports: &LinkTransports,
    is_heard: &dyn Fn(LinkId) -> bool,
    reports: &[(ClassId, ClientReport)],
    member: ConnectionNumber,
) -> Status {
    let now = Instant::now();
    let mut status = Status::new(Role::Client);
    let Some((_, report)) = reports.first() else { return status };
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
            cc: report
                .paths
                .first()
                .map_or_else(|| class.cc.unwrap_or(config.cc), |path| path.view.cc)
                .to_string(),
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
                ClientState::Refused => State::Refused,
                ClientState::Asleep => State::Asleep,
            }),
            reason: match report.state {
                ClientState::Asleep
                    if class.connects_at_once && report.counters == TrafficCounters::default() =>
                {
                    CLASS_NOT_USED_YET.to_owned()
                }
                ClientState::Asleep if class.connects_at_once => CLASS_NOT_USED.to_owned(),
                ClientState::Asleep => CLASS_NOT_NEEDED.to_owned(),
                ClientState::Up | ClientState::Connecting | ClientState::Refused => report.reason.clone(),
            },
            rtt_ms: rtt_of(&report.paths),
            loss_pct: loss_of(&report.paths),
            resequencing: report.resequencing.map(resequencing_of),
            tun: class.tun.clone(),
            addresses: tuns.iter().find(|(tun, _)| tun == id).map_or(Vec::new(), |(_, own)| own.clone()),
            ..with_counters(Class::new(&class.name), report.counters)
        });
        add_resequencing(&mut status.resequencing, report.resequencing.map(resequencing_of));
        *status.handshakes.get_or_insert_default() += handshakes_of(report.handshakes);
        status.flows.stream += report.stream_flows as u64;
        status.flows.udp += report.udp_flows as u64;
        status.flows.datagram += report.datagram_flows as u64;
        for path in &report.paths {
            let link = path.link.map(|link| link.with_class(*id));
            let Some((id, link)) = link.and_then(|id| Some((id, links.links.get(&id)?))) else { continue };
            let local = local_of(link, path.view.remote);
            let several = links.links.get(&id.uplink()).is_some_and(|link| link.pipes > 1);
            let mut path_status = path_of(now, path, &class.name, &link.name, local, member);
            if id.is_tcp() {
                set_tcp_transport(&mut path_status, transports.established(id.uplink()));
                status.paths.push(path_status);
                continue;
            }
            path_status.pipe = several.then_some(id.path_index());
            if id.path_index() >= policies.path_count(&link.name).used
                && path_status.state == PathState::Standby
            {
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
    for (id, link) in links.uplinks() {
        let link_config = policies.of(&link.name);
        let all = reports.iter().flat_map(|(_, report)| &report.paths);
        let own: Vec<_> = all.filter(|path| path.link.map(LinkId::uplink) == Some(id)).collect();
        let (state, reason, down_since) = state_of(link, policies, (&own, is_heard(id)), now);
        let transport_reason = transports.reason(now, id);
        let reason = if reason.is_empty() || state == LinkState::Up { transport_reason } else { reason };
        status.links.push(Link {
            state,
            down_s: down_since.map(|since| now.saturating_duration_since(since).as_secs_f64()),
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
    let may_be_used = |link: &Uplink| link.remote.is_some() && policies.tier(&link.name) != Tier::Never;
    let in_view = LinksInView {
        all: &status.links,
        any_usable: links.uplinks().any(|(_, link)| may_be_used(link)),
        is_server_known: !links.remotes().is_empty(),
        server: &config.server.host,
    };
    (status.state, status.verdict) = verdict(now, report.into(), in_view);
    status
}

/// The state of a link, why, and since when if it is down. `paths` are those of all classes over the link;
/// `is_heard`: the server answers over it.
fn state_of(
    link: &Uplink,
    policies: &LinkPolicies,
    (paths, is_heard): (&[&PathReport], bool),
    now: Instant,
) -> (LinkState, String, Option<Instant>) {
    let down = |reason: &str, since| (LinkState::Down, reason.to_owned(), Some(since));
    if link.remote.is_none() {
        return down(link.reason, link.reason_since);
    }
    if policies.tier(&link.name) == Tier::Never {
        return (LinkState::Never, policies.never_reason(&link.name), None);
    }
    let arrivals: Vec<_> = paths.iter().map(|path| (path.state, path.last_arrival)).collect();
    match deciding_path(&arrivals, now).map(|at| paths[at]) {
        Some(path) if path.state == TunnelPathState::Down => down(&path.reason, path.last_arrival),
        Some(path) if path.state == TunnelPathState::Standby => {
            (LinkState::Standby, path.reason.clone(), None)
        }
        None if !is_heard => down(NO_ANSWER, link.reason_since),
        _ => (LinkState::Up, link.reason.to_owned(), None),
    }
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
        *status.handshakes.get_or_insert_default() += handshakes;
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
        heard_s: None,
        rtt_ms: 0.0,
        min_rtt_ms: 0.0,
        base_rtt_ms: None,
        jitter_ms: 0.0,
        loss_pct: 0.0,
        recent_packets: 0,
        cc: None,
        cwnd_bytes: 0,
        in_flight_bytes: 0,
        rate_bps: 0,
        link_rate_bps: None,
        link_rate_age_s: None,
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

/// Marks a path as one whose packets travel in a TCP connection.
fn set_tcp_transport(path: &mut Path, connection: Option<&EstablishedConnection>) {
    let is_multipath = connection.is_some_and(|established| established.multipath);
    path.transport = Some(if is_multipath { "mptcp" } else { "tcp" }.to_owned());
    if let Some(established) = connection {
        (path.local, path.remote) = (established.local, established.remote);
    }
}
