//! The data plane of one shard of a server: it moves packets and events between the sockets, the TUN queues,
//! the egress, the other shards and the tunnel's server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use mpvpn_access::Access;
use mpvpn_egress::{Egress, FIRST_EGRESS_TOKEN, Transport};
use mpvpn_error::RunError;
use mpvpn_input::role::Role;
use mpvpn_os::poll::{Event, TUN_TOKEN, WAKE_TOKEN};
use mpvpn_report::flows;
use mpvpn_sockets::splice::Context;
use mpvpn_status::{Class, FlowList, Status, events::EventSender};
use mpvpn_threads::{
    event_loop::{EventLoop, Iteration, has_waited_long},
    shards::{self, OtherShard, Outbox},
};
use mpvpn_tunnel::{
    CertificateId, ConnectionSlot, FilterRequest, Reconfiguration, Server, ServerChange, ServerCounters,
    ServerEvent, SessionReport, TrafficCounters, TunOutcome,
};

use super::{
    client_relays::{ClientRelays, RelayKey},
    events::{MAX_REFUSALS, Refusals, event_of},
    handover::Handover,
    packet_filter::FilterMessage,
    sockets::Sockets,
    tun_queues::TunQueues,
    visits::Visits,
};
use crate::overview::session_number;
use crate::status;

/// Rounds of filling streams and sending in one iteration. More: longer iterations. Fewer: more iterations
/// for streams. Chosen, as at the client.
const MAX_TRANSMIT_ROUNDS: usize = 16;

/// Messages between the shards of a server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ServerMessage {
    /// To the shard of a connection that another one replaced: close it.
    Replaced(ConnectionSlot),
    /// To the shard of a session whose packets are filtered now: it may use its addresses.
    Filtered(Box<FilterRequest>),
    /// To all shards: other networks behind clients are in force.
    SitesChanged,
    /// To shard 0: the clients' MTU has changed.
    MtuChanged,
    /// To shard 0: what users have carried is to be counted.
    CountDue,
    /// To shard 0: the rules for clients' packets were replaced, or why they stay.
    RulesReplaced(Result<(), String>),
    /// From shard 0: the settings have changed.
    Reconfigured(Arc<ShardSettings>),
    /// From shard 0: these users have no access any more, for these reasons.
    UsersEnded(Arc<BTreeMap<String, String>>),
    /// From shard 0: the rates of users have changed in the registry.
    AccountsChanged,
    /// From shard 0: these certificates of clients count no more, for this reason.
    CertificatesEnded(Arc<BTreeSet<CertificateId>>, &'static str),
}

/// Settings of a shard that change while the server runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ShardSettings {
    pub(super) tunnel: Reconfiguration,
    pub(super) access: Arc<Access>,
}

/// A message between shards of a server.
pub(crate) type ShardMessage = shards::ShardMessage<ServerMessage, ShardReport>;
/// Shard 0 of a server.
pub(crate) type FirstShard = shards::FirstShard<ServerMessage, ShardReport, Status>;

/// A shard's report for the status.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    /// Its connections.
    pub(super) sessions: Vec<SessionReport>,
    /// TCP connections made for clients.
    pub(super) tcp_connections: usize,
    /// UDP flows of clients.
    pub(super) udp_flows: usize,
    /// Packets lost on their way to or from another shard.
    pub(super) lost_packets: u64,
    /// The counters of closed connections, by class.
    pub(super) departed: Vec<Class>,
    /// The bytes that closed connections have carried, by user.
    pub(super) departed_users: BTreeMap<String, TrafficCounters>,
    /// Handshakes and refused requests.
    pub(super) counters: ServerCounters,
}

/// The data plane of one shard.
pub(crate) struct DataPlane {
    pub(super) server: Server,
    pub(super) sockets: Sockets,
    pub(super) tun: TunQueues,
    /// The clients' TCP connections and UDP flows.
    pub(super) egress: Egress<RelayKey>,
    /// The visitors of the site over HTTP/3.
    pub(super) visits: Visits,
    /// Hands packets to the shards of other clients.
    pub(super) handover: Handover,
    /// Takes sessions whose packets are to be filtered; `None` without a TUN device.
    pub(super) filter: Option<Outbox<FilterMessage>>,
    /// The mailboxes of all shards, in order.
    pub(super) shards: Vec<Outbox<ShardMessage>>,
    /// The counters of closed connections, by class.
    pub(super) departed: Vec<Class>,
    /// The bytes that closed connections have carried, by user. As many entries as there were users.
    pub(super) departed_users: BTreeMap<String, TrafficCounters>,
    /// When the process started.
    pub(super) started: Instant,
    /// Which refused requests are reported.
    pub(super) refusals: Refusals,
    pub(super) events: EventSender,
}

impl DataPlane {
    /// Runs until shard 0 ends it.
    pub(super) fn run(
        mut self,
        first: &OtherShard<ServerMessage, ShardReport>,
        event_loop: &mut EventLoop,
    ) -> Result<(), RunError> {
        let mut iteration = Iteration::first();
        loop {
            if self.transmit(event_loop).is_some() {
                first.send(ServerMessage::MtuChanged);
            }
            if self.server.take_count_due() {
                first.send(ServerMessage::CountDue);
            }
            let max_delay = self.server.max_coalescing_delay(iteration.now);
            event_loop.wait(self.poll_timeout(), max_delay, &mut iteration)?;
            self.handle_ready(event_loop, &iteration);
            while let Some(message) = first.next() {
                match message {
                    ShardMessage::Specific(message) => match message {
                        ServerMessage::Replaced(seat) => self.server.close_replaced(iteration.now, seat),
                        ServerMessage::Filtered(request) => self.server.on_filtered(&request),
                        ServerMessage::UsersEnded(users) => self.server.end_users(iteration.now, &users),
                        ServerMessage::AccountsChanged => self.server.update_accounts(iteration.now),
                        ServerMessage::SitesChanged => self.server.update_sites(iteration.now),
                        ServerMessage::CertificatesEnded(ended, reason) => {
                            self.server.end_certificates(iteration.now, &ended, reason);
                        }
                        ServerMessage::Reconfigured(settings) => self.reconfigure(iteration.now, &settings),
                        // For the first shard.
                        ServerMessage::MtuChanged
                        | ServerMessage::CountDue
                        | ServerMessage::RulesReplaced(_) => {}
                    },
                    ShardMessage::ReportStatus(round) => {
                        first.report_status(round, self.report(iteration.now))
                    }
                    ShardMessage::ReportOverview(round, shown) => {
                        first.report_overview(round, self.report_overview(iteration.now, &shown));
                    }
                    ShardMessage::ReportFlows(round) => first.report_flows(round, self.flows(iteration.now)),
                    ShardMessage::End => {
                        self.end();
                        return Ok(());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Changes the settings.
    pub(super) fn reconfigure(&mut self, now: Instant, settings: &ShardSettings) {
        self.server.reconfigure(now, &settings.tunnel);
        self.egress.set_access(Arc::clone(&settings.access));
    }

    /// When [`Self::handle_ready`] must be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.server.poll_timeout().into_iter().chain(self.egress.poll_timeout()).min()
    }

    /// Handles ready sockets and expired timers.
    pub(super) fn handle_ready(&mut self, event_loop: &EventLoop, iteration: &Iteration) {
        let (now, poller) = (iteration.now, &event_loop.poller);
        let is_other = |event: &Event| event.token == TUN_TOKEN || event.token >= FIRST_EGRESS_TOKEN;
        let others_wait = iteration.ready.iter().any(is_other);
        self.server.begin_iteration(!iteration.ready.is_empty(), others_wait, Instant::now);
        let (mut stalled, mut tun_ready, mut written) = (iteration.stalled, false, false);
        for event in &iteration.ready {
            match event.token {
                TUN_TOKEN => tun_ready = true,
                WAKE_TOKEN => {
                    event_loop.wake.drain();
                    self.receive_handed_packets(now);
                    let streams = &mut ClientRelays(&mut self.server);
                    self.egress.poll_resolver(&mut Context { now, poller, streams });
                    self.visits.poll(now, &mut self.server);
                }
                FIRST_EGRESS_TOKEN.. => {
                    let streams = &mut ClientRelays(&mut self.server);
                    self.egress.on_socket_ready(&mut Context { now, poller, streams }, *event);
                }
                _ => {
                    let (server, tun) = (&mut self.server, &self.tun);
                    let arrived = self.sockets.on_ready(poller, *event, server, |server| {
                        server.handle_batch_and(now, |server| written |= write_received_packets(server, tun));
                    });
                    stalled |= arrived.is_some_and(|at| has_waited_long(at, now));
                }
            }
        }
        if stalled {
            self.server.on_local_stall(now);
        }
        // Packets that wait since the last iteration.
        let tun = &self.tun;
        self.server.handle_batch_and(now, |server| written |= write_received_packets(server, tun));
        // The kernel of this machine may have answered while a packet was written.
        if tun_ready || written {
            self.read_tun(now);
        }
        if self.server.poll_timeout().is_some_and(|at| at <= now) {
            self.server.handle_timeout(now);
        }
        if self.egress.poll_timeout().is_some_and(|at| at <= now) {
            let streams = &mut ClientRelays(&mut self.server);
            self.egress.handle_timeout(&mut Context { now, poller, streams });
        }
    }

    /// Handles the tunnel's events. Returns whether there were any; stores a changed MTU in `mtu`.
    fn handle_events(&mut self, event_loop: &EventLoop, now: Instant, mtu: &mut Option<usize>) -> bool {
        let (egress, poller) = (&mut self.egress, &event_loop.poller);
        let mut any = false;
        while let Some(event) = self.server.poll_event() {
            any = true;
            let streams = &mut ClientRelays(&mut self.server);
            let cx = &mut Context { now, poller, streams };
            match event {
                ServerEvent::Mtu(new) => *mtu = Some(new),
                ServerEvent::Filter(request) => {
                    if let Some(filter) = &self.filter {
                        filter.send(FilterMessage::Filter(request));
                    }
                }
                ServerEvent::Replaced(seat) => {
                    if let Some(shard) = self.shards.get(usize::from(seat.shard)) {
                        shard.send(ShardMessage::Specific(ServerMessage::Replaced(seat)));
                    }
                }
                ServerEvent::Connect { relay, user, to } => {
                    egress.connect(cx, RelayKey::Tcp(relay), (&user, to, Transport::Tcp));
                }
                ServerEvent::Visit { visit, headers, from } => {
                    self.visits.begin(now, &mut self.server, visit, (headers, from));
                }
                ServerEvent::RelayReadable(relay) if self.visits.has(relay) => {
                    self.visits.read(now, &mut self.server, relay);
                }
                ServerEvent::RelayWritable(relay) if self.visits.has(relay) => {
                    self.visits.write(now, &mut self.server, relay);
                }
                ServerEvent::RelayGone(relay) if self.visits.has(relay) => self.visits.end(relay),
                ServerEvent::RelayReadable(relay) => egress.on_stream_readable(cx, RelayKey::Tcp(relay)),
                ServerEvent::RelayWritable(relay) => egress.on_stream_writable(cx, RelayKey::Tcp(relay)),
                ServerEvent::RelayGone(relay) => egress.on_client_gone(RelayKey::Tcp(relay)),
                ServerEvent::ConnectUdp { udp, user, to } => {
                    egress.connect(cx, RelayKey::Udp(udp), (&user, to, Transport::Udp));
                }
                ServerEvent::UdpGone(udp) => egress.on_client_gone(RelayKey::Udp(udp)),
            }
        }
        while let Some(departed) = self.server.poll_closed_connection() {
            status::add_traffic(&mut self.departed_users, departed.user.clone(), departed.counters);
            status::add_departed(&mut self.departed, departed);
        }
        while let Some((udp, payload)) = self.server.poll_udp() {
            egress.send_payload(now, RelayKey::Udp(udp), &payload);
        }
        any
    }

    fn read_tun(&mut self, now: Instant) {
        let (server, handover) = (&mut self.server, &mut self.handover);
        self.tun.read(|hdr, packet| {
            if let TunOutcome::ForShard(shard) = server.handle_tun(now, hdr, packet) {
                handover.hand(shard, hdr, packet);
            }
        });
        handover.wake_peers();
    }

    /// Takes packets that other shards read for this shard's clients.
    fn receive_handed_packets(&mut self, now: Instant) {
        while let Some(mut handed) = self.handover.next() {
            if !self.server.handle_handed_over(now, handed.hdr, &mut handed.packet) {
                self.handover.lost_packets += 1;
            }
        }
    }

    /// Sends what is due and handles events; returns the clients' MTU if it changed.
    pub(super) fn transmit(&mut self, event_loop: &EventLoop) -> Option<usize> {
        // Packets leave now, and not when the iteration began: what it took to receive others is no time on
        // the way.
        let (now, mut mtu) = (Instant::now(), None);
        for round in 0..MAX_TRANSMIT_ROUNDS {
            // Streams that accept bytes again are filled, as long as the paths send.
            if !self.handle_events(event_loop, now, &mut mtu) && round > 0 {
                break;
            }
            self.sockets.transmit(&event_loop.poller, now, &mut self.server);
        }
        write_received_packets(&mut self.server, &self.tun);
        if let Some(filter) = &self.filter {
            if self.server.take_sites_due() {
                filter.send(FilterMessage::Sites);
            }
            if self.server.take_forwards_due() {
                filter.send(FilterMessage::Forwards);
            }
        }
        while let Some(change) = self.server.poll_change() {
            if matches!(change, ServerChange::Refused(..)) && !self.refusals.is_reported(now) {
                continue;
            }
            event_of(change).into_iter().for_each(|event| self.events.report(event));
        }
        if let Some(count) = self.refusals.take_summary(now) {
            tracing::info!(
                count,
                "more requests were refused; in each minute the first {MAX_REFUSALS} are reported"
            );
        }
        mtu
    }

    /// This shard's report for the status.
    pub(crate) fn report(&mut self, now: Instant) -> ShardReport {
        let sessions = self.server.report(now);
        self.report_of(sessions)
    }

    /// This shard's report for an overview: only the sessions in `shown` have paths.
    pub(crate) fn report_overview(&mut self, now: Instant, shown: &BTreeSet<u64>) -> ShardReport {
        let started = self.started;
        let is_shown = |report: &SessionReport| shown.contains(&session_number(report, started));
        let sessions = self.server.report_with_paths_of(now, is_shown);
        self.report_of(sessions)
    }

    fn report_of(&self, sessions: Vec<SessionReport>) -> ShardReport {
        ShardReport {
            sessions,
            tcp_connections: self.egress.open_connections,
            udp_flows: self.egress.open_udp_flows,
            lost_packets: self.handover.lost_packets,
            departed: self.departed.clone(),
            departed_users: self.departed_users.clone(),
            counters: self.server.counters(),
        }
    }

    /// The connections made for clients.
    pub(crate) fn flows(&self, now: Instant) -> FlowList {
        flows::connection_flows(now, Role::Server, self.egress.flows())
    }

    /// Closes the clients' connections.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.egress.end();
        self.server.close(now, "the server ends");
        self.sockets.transmit_last(now, &mut self.server);
    }
}

/// Returns whether there were any.
fn write_received_packets(server: &mut Server, tun: &TunQueues) -> bool {
    let mut written = false;
    while let Some(joined) = server.poll_tun() {
        tun.write(&joined, |src, dst| server.are_clients(src, dst));
        server.recycle(joined);
        written = true;
    }
    written
}
