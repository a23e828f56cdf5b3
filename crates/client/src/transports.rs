//! Chooses between UDP and TCP for each link, and manages the TCP connections where the network blocks UDP.
//!
//! In: what the tunnel hears over the links, the kernel's view of them, events of TCP connections. Out: TCP
//! connections, and paths of the tunnel ([`LinkId::TCP_PATH_INDEX`]) that come and go with them. Always
//! holds: each shard decides for itself; nothing here blocks.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Instant,
};

use mpvpn_links::{Links, policies::LinkPolicies};
use mpvpn_os::poll::PollWaker;
use mpvpn_path::{LinkSigns, PathTransport as PrimaryTransport, TcpAction, TransportSelector};
use mpvpn_status::events::{self, Event, EventSender};
use mpvpn_tcp::connection::{
    CLOSE_LINGER, ConnectRequest, ConnectionEvent, EstablishedConnection, LoopbackSockets, RequestError,
    TcpConnection, TcpTransportConfig,
};
use mpvpn_threads::event_loop::EventLoop;
use mpvpn_tunnel::{ClassConnections, Heard, LinkPolicy};
use mpvpn_types::{Duration, LinkId, Tier, Transport};

/// The shortest interval of updates, except for due timers. Shorter: processor time in each iteration.
/// Longer: a silent UDP path is noticed later. Chosen; a tenth of the time after which TCP is tried.
const MIN_UPDATE_INTERVAL: Duration = Duration::from_millis(20);

/// The transports of all links of a shard.
pub(crate) struct LinkTransports {
    /// `None` if there is no slow thread, on which TCP would run.
    tcp_config: Option<Arc<TcpTransportConfig>>,
    links: BTreeMap<LinkId, LinkTransport>,
    event_sender: Sender<(LinkId, u64, ConnectionEvent)>,
    connection_events: Receiver<(LinkId, u64, ConnectionEvent)>,
    wake: PollWaker,
    shard: u8,
    events: EventSender,
    /// When the last update was, and when the next one is due.
    last_update: Instant,
    pub(super) next_update: Option<Instant>,
    /// Numbers the connection attempts.
    attempts: u64,
}

/// The transport of one link.
struct LinkTransport {
    judge: TransportSelector,
    /// The state last reported to the tunnel: the transport, and whether UDP is allowed.
    reported: Option<(PrimaryTransport, bool)>,
    connection: Option<(u64, TcpConnection)>,
    attempt: Option<(u64, TcpConnection)>,
    established: Option<EstablishedConnection>,
    /// The paths inside the TCP connection, in the order of its sockets.
    paths: Vec<LinkId>,
    sockets: LoopbackSockets,
    /// Whether the tunnel knows that the TCP paths are up.
    is_reported_up: bool,
    failures: u32,
}

/// A change that the tunnel must apply, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TransportChange {
    /// The policies of a link's paths have changed.
    PolicyChanged(LinkId),
    /// The path is up; its packets go to this address on the loopback.
    Up(LinkId, SocketAddr),
    /// The path is down.
    Down(LinkId),
    /// The path does not exist any more.
    Removed(LinkId),
    /// The server refuses this client, which it knows, for this reason.
    Refused(String),
}

/// How a link's paths of one transport are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathUse {
    /// As the link's tier says.
    Primary,
    /// As a backup for the other transport.
    Spare,
    /// Not at all.
    Never,
}

impl LinkTransport {
    fn new(now: Instant, policies: &LinkPolicies, name: &str) -> Self {
        Self {
            judge: TransportSelector::new(now, policies.transport(name)).with_link_name(name),
            reported: None,
            connection: None,
            attempt: None,
            established: None,
            paths: Vec::new(),
            sockets: LoopbackSockets::default(),
            is_reported_up: false,
            failures: 0,
        }
    }

    fn path_use(&self, id: LinkId) -> PathUse {
        match (id.is_tcp(), self.judge.preferred()) {
            (false, _) if !self.judge.allows_udp() => PathUse::Never,
            (true, PrimaryTransport::Tcp) | (false, PrimaryTransport::Udp) => PathUse::Primary,
            _ => PathUse::Spare,
        }
    }
}

impl LinkTransport {
    /// The changes that a link's TCP connection causes.
    fn report_connection(
        &mut self,
        now: Instant,
        id: LinkId,
        up: bool,
        links: &mut Links,
    ) -> Vec<TransportChange> {
        let own = links.links.get(&id).map_or(&[][..], |link| &link.addresses);
        let address_is_gone = |established: &EstablishedConnection| {
            up && !own.is_empty() && !own.contains(&established.local.ip())
        };
        if self.established.as_ref().is_some_and(address_is_gone) {
            (self.connection, self.established) = (None, None);
            self.judge.on_tcp_closed(now, "its address is gone".to_owned());
        }
        match &self.established {
            Some(established) if up && !self.is_reported_up => {
                self.is_reported_up = true;
                let entries = self.paths.iter().copied().zip(established.loopback_addrs.iter().copied());
                let up = |(path, entry)| {
                    links.set_tcp_entry(path, Some(entry));
                    TransportChange::Up(path, entry)
                };
                entries.map(up).collect()
            }
            established if self.is_reported_up && !(up && established.is_some()) => {
                self.is_reported_up = false;
                let paths: Vec<LinkId> = links.tcp_paths(id).collect();
                paths.iter().for_each(|path| links.set_tcp_entry(*path, None));
                paths.into_iter().map(TransportChange::Down).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl LinkTransports {
    pub(super) fn new(
        shard: u8,
        tcp_config: Option<Arc<TcpTransportConfig>>,
        wake: PollWaker,
        events: EventSender,
    ) -> Self {
        let (event_sender, connection_events) = channel();
        let now = Instant::now();
        Self {
            tcp_config,
            links: BTreeMap::new(),
            event_sender,
            connection_events,
            wake,
            shard,
            events,
            last_update: now,
            next_update: Some(now),
            attempts: 0,
        }
    }

    /// The policy of a path, from the policy of its link.
    pub(super) fn policy(&self, id: LinkId, link: LinkPolicy, wanted: Transport) -> LinkPolicy {
        let first = if wanted == Transport::Tcp && !id.is_tcp() { PathUse::Never } else { PathUse::Primary };
        let tier =
            match (self.links.get(&id.uplink()).map_or(first, |transport| transport.path_use(id)), link.tier)
            {
                (_, Tier::Never) | (PathUse::Never, _) => Tier::Never,
                (PathUse::Primary, tier) => tier,
                (PathUse::Spare, _) => Tier::Backup,
            };
        LinkPolicy { tier, ..link }
    }

    /// A link has changed its network, or has come back.
    pub(super) fn network_changed(&mut self, now: Instant, uplink: LinkId) {
        if let Some(transport) = self.links.get_mut(&uplink) {
            transport.judge.on_network_changed(now);
            self.next_update = Some(now);
        }
    }

    /// Updates all links that are due; returns the changes. Called in every iteration.
    pub(super) fn update(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        links: &mut Links,
        policies: &LinkPolicies,
        connections: &ClassConnections,
    ) -> Vec<TransportChange> {
        let mut changes = Vec::new();
        let any_event = self.handle_connection_events(now, links, &mut changes);
        if !any_event
            && now < self.last_update + MIN_UPDATE_INTERVAL
            && self.next_update.is_none_or(|at| now < at)
        {
            self.next_update = Some(self.last_update + MIN_UPDATE_INTERVAL);
            return Vec::new();
        }
        (self.last_update, self.next_update) = (now, None);
        let uplinks: Vec<(LinkId, String, bool)> = links
            .uplinks()
            .map(|(id, link)| {
                (
                    id,
                    link.name.clone(),
                    link.remote.is_some() || self.is_usable_through_proxy(link.has_carrier),
                )
            })
            .collect();
        let restarted_at = connections.default_client().probes_restarted_at();
        for (id, name, up) in uplinks {
            let up = up && policies.tier(&name) != Tier::Never;
            let transport = self.links.entry(id).or_insert_with(|| LinkTransport::new(now, policies, &name));
            transport.judge.set_wanted(now, policies.transport(&name));
            let Heard { udp, udp_heard_by_any, tcp } = connections.heard(id);
            let (metered, restarted_at) = (policies.of(&name).metered, Some(restarted_at));
            let signs = LinkSigns { carrier: up, udp, udp_heard_by_any, tcp, metered, restarted_at };
            let order = transport.judge.update(now, signs);
            match order.filter(|_| self.tcp_config.is_some()) {
                Some(TcpAction::Connect) => self.dial(event_loop, now, id, links, policies),
                Some(TcpAction::Close) => changes.extend(self.close(id, links)),
                None => {}
            }
            let Some(transport) = self.links.get_mut(&id) else { continue };
            let reported = (transport.judge.preferred(), transport.judge.allows_udp());
            if transport.reported != Some(reported) {
                if transport.reported.is_some_and(|(main, _)| main != reported.0)
                    || reported.0 == PrimaryTransport::Tcp
                {
                    self.events.report(Event::TransportChanged {
                        link: name.as_str().into(),
                        transport: if reported.0 == PrimaryTransport::Tcp {
                            events::Transport::Tcp
                        } else {
                            events::Transport::Quic
                        },
                        reason: transport.judge.explanation(now).into(),
                        shard: self.shard,
                    });
                }
                transport.reported = Some(reported);
                changes.push(TransportChange::PolicyChanged(id));
            }
            changes.extend(transport.report_connection(now, id, up, links));
            self.next_update = self.next_update.into_iter().chain(transport.judge.poll_timeout()).min();
        }
        changes
    }

    /// Whether a link is usable without a known server address: through a proxy, which resolves the name.
    fn is_usable_through_proxy(&self, ready: bool) -> bool {
        ready && self.tcp_config.as_ref().is_some_and(|tcp_config| tcp_config.has_proxy())
    }

    /// Handles events of TCP connections. Returns whether there were any; adds refusals to `changes`.
    fn handle_connection_events(
        &mut self,
        now: Instant,
        links: &Links,
        changes: &mut Vec<TransportChange>,
    ) -> bool {
        let mut any = false;
        while let Ok((id, number, connection_event)) = self.connection_events.try_recv() {
            let Some(transport) = self.links.get_mut(&id) else { continue };
            let name = links.links.get(&id).map_or("", |link| link.name.as_str());
            let is_attempt = transport.attempt.as_ref().is_some_and(|(attempt, _)| *attempt == number);
            let is_current = transport.connection.as_ref().is_some_and(|(there, _)| *there == number);
            match connection_event {
                ConnectionEvent::Established(established) if is_attempt => {
                    let EstablishedConnection { local, remote, multipath, .. } = established;
                    let (link, shard) = (name.into(), self.shard);
                    self.events.report(Event::TcpConnected { link, local, remote, multipath, shard });
                    transport.connection = transport.attempt.take();
                    (transport.established, transport.is_reported_up, transport.failures) =
                        (Some(established), false, 0);
                    transport.judge.on_tcp_connected(now);
                }
                ConnectionEvent::Failed(error, is_answered) if is_attempt => {
                    let reason = error.to_string();
                    if let RequestError::Refused(why) = error {
                        changes.push(TransportChange::Refused(why));
                    }
                    self.events.report(Event::TcpFailed {
                        link: name.into(),
                        reason: reason.as_str().into(),
                        failures: transport.failures,
                        shard: self.shard,
                    });
                    transport.attempt = None;
                    transport.failures += 1;
                    transport.judge.on_tcp_failed(now, reason, is_answered);
                }
                ConnectionEvent::Closed(reason) if is_current => {
                    let (link, shard) = (name.into(), self.shard);
                    self.events.report(Event::TcpClosed { link, reason: reason.as_str().into(), shard });
                    (transport.connection, transport.established) = (None, None);
                    transport.judge.on_tcp_closed(now, reason);
                }
                _ => continue,
            }
            any = true;
        }
        any
    }

    fn dial(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        id: LinkId,
        links: &mut Links,
        policies: &LinkPolicies,
    ) {
        let (Some(tcp_config), Some(transport)) = (&self.tcp_config, self.links.get_mut(&id)) else { return };
        let (opened, bind_options) = (links.open_tcp_sockets(id, &event_loop.poller), links.bind_options(id));
        let (sockets, bind_options) = match (opened, bind_options) {
            (Ok(sockets), Some(bind_options)) => (sockets, bind_options),
            (Err(error), _) => return transport.judge.on_tcp_failed(now, error.to_string(), false),
            (_, None) => {
                return transport.judge.on_tcp_failed(now, "there is no such link".to_owned(), false);
            }
        };
        tracing::debug!(link = bind_options.name, shard = self.shard, "trying TCP");
        self.attempts += 1;
        let number = self.attempts;
        let request = ConnectRequest {
            dscp: policies.of(&bind_options.name).dscp,
            bind_options,
            to: links.remotes().to_vec(),
            data_plane_addrs: sockets.iter().map(|(_, address)| *address).collect(),
            sockets: Arc::clone(&transport.sockets),
            failures: transport.failures,
        };
        transport.paths = sockets.into_iter().map(|(id, _)| id).collect();
        let (event_sender, wake) = (self.event_sender.clone(), self.wake.clone());
        let event_sender = move |connection_event| {
            // A data plane that has ended needs no events.
            let _ = event_sender.send((id, number, connection_event));
            wake.wake();
        };
        let previous = transport.connection.as_ref().map(|(_, connection)| connection.abort_handle());
        if previous.is_some() {
            // The old connection is silent, so the network may have a problem with Multipath TCP: a failure
            // counts as a second attempt.
            transport.failures += 1;
        }
        transport.attempt = Some((number, TcpConnection::start(tcp_config, request, previous, event_sender)));
    }

    fn close(&mut self, id: LinkId, links: &mut Links) -> Vec<TransportChange> {
        let Some(transport) = self.links.get_mut(&id) else { return Vec::new() };
        (transport.connection, transport.attempt, transport.established, transport.is_reported_up) =
            (None, None, None, false);
        transport.sockets = LoopbackSockets::default();
        links.close_tcp_sockets(id).into_iter().map(TransportChange::Removed).collect()
    }

    /// Closes connections made for other classes; they are made anew.
    pub(super) fn classes_changed(&mut self, now: Instant) {
        self.close_all(now, "the classes have changed");
    }

    /// Closes connections to the server before; where TCP is needed, it is tried with the new one.
    pub(super) fn use_server(&mut self, now: Instant, tcp_config: Option<Arc<TcpTransportConfig>>) {
        self.tcp_config = tcp_config;
        for transport in self.links.values_mut() {
            if transport.attempt.take().is_some() {
                transport.judge.on_tcp_failed(now, "another server is used".to_owned(), false);
            }
            transport.failures = 0;
            transport.judge.on_network_changed(now);
        }
        self.close_all(now, "another server is used");
    }

    fn close_all(&mut self, now: Instant, reason: &str) {
        for transport in self.links.values_mut() {
            if transport.established.take().is_some() {
                transport.connection = None;
                transport.judge.on_tcp_closed(now, reason.to_owned());
            }
        }
        self.next_update = Some(now);
    }

    /// The TCP connection of a link, if it is established.
    pub(crate) fn established(&self, uplink: LinkId) -> Option<&EstablishedConnection> {
        self.links.get(&uplink)?.established.as_ref()
    }

    /// Why a link uses its transport; empty for UDP by default.
    pub(crate) fn reason(&self, now: Instant, uplink: LinkId) -> String {
        self.links.get(&uplink).map_or(String::new(), |transport| transport.judge.explanation(now))
    }

    /// Waits until the last packets have left through TCP connections.
    pub(super) fn end(&self) {
        if self.links.values().any(|transport| transport.established.is_some()) {
            std::thread::sleep(CLOSE_LINGER);
        }
    }
}
