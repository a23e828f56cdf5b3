//! By which way the packets of each link travel, and the TCP connections of those where UDP does not get through.
//!
//! In: what the tunnel hears over the links, what the kernel says about them, news of connections. Out: connections that are
//! made and given up, and links of the tunnel (the pipe [`LinkId::TCP_PATH_INDEX`]) that come and go with them. Always holds: each shard
//! decides for itself; nothing here waits.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Instant,
};

use mpvpn_control::events::{self, Event, EventSender};
use mpvpn_os::poll::PollWaker;
use mpvpn_path::{LinkSigns, PathTransport as PrimaryTransport, TcpAction, TransportSelector};
use mpvpn_tunnel::{ClassConnections, LinkPolicy};
use mpvpn_types::{Duration, LinkId, Tier, Transport};

use crate::{
    event_loop::EventLoop,
    links::Links,
    policies::LinkPolicies,
    tcp_transport::connection::{
        CLOSE_LINGER, ConnectRequest, ConnectionEvent, EstablishedConnection, LoopbackSockets, TcpConnection,
        TcpTransportConfig,
    },
};

/// Links are looked at no more often than this, unless it is time for something.
const MIN_UPDATE_INTERVAL: Duration = Duration::from_millis(20);

/// How the links of a shard travel.
pub(crate) struct LinkTransports {
    /// `None` where there is no thread for TCP.
    tcp_config: Option<Arc<TcpTransportConfig>>,
    links: BTreeMap<LinkId, LinkTransport>,
    event_sender: Sender<(LinkId, u64, ConnectionEvent)>,
    connection_events: Receiver<(LinkId, u64, ConnectionEvent)>,
    wake: PollWaker,
    shard: u8,
    events: EventSender,
    /// When they were looked at, and when they are to be.
    last_update: Instant,
    next_update: Option<Instant>,
    /// Numbers of attempts.
    attempts: u64,
}

/// One link.
struct LinkTransport {
    judge: TransportSelector,
    /// Which way it was when the tunnel was told.
    reported: Option<(PrimaryTransport, bool)>,
    connection: Option<(u64, TcpConnection)>,
    attempt: Option<(u64, TcpConnection)>,
    established: Option<EstablishedConnection>,
    /// The pipes of the connection, in the order of its sockets.
    pipes: Vec<LinkId>,
    sockets: LoopbackSockets,
    /// The tunnel knows that its packets can go there.
    is_reported_up: bool,
    failures: u32,
}

/// What the tunnel is to hear, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransportChange {
    /// The pipes of a link are used in another way.
    PolicyChanged(LinkId),
    /// Packets can go by this pipe, which they enter there.
    Up(LinkId, SocketAddr),
    /// They cannot.
    Down(LinkId),
    /// There is no such pipe any more.
    Removed(LinkId),
}

/// How a pipe is to be used compared with those of the other kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathUse {
    /// As its link.
    Primary,
    /// While the others do not work.
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
            pipes: Vec::new(),
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
    /// What the tunnel is to hear of the connection.
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
                let entries = self.pipes.iter().copied().zip(established.loopback_addrs.iter().copied());
                let up = |(pipe, entry)| {
                    links.set_tcp_entry(pipe, Some(entry));
                    TransportChange::Up(pipe, entry)
                };
                entries.map(up).collect()
            }
            established if self.is_reported_up && !(up && established.is_some()) => {
                self.is_reported_up = false;
                let pipes: Vec<LinkId> = links.tcp_pipes(id).collect();
                pipes.iter().for_each(|pipe| links.set_tcp_entry(*pipe, None));
                pipes.into_iter().map(TransportChange::Down).collect()
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

    /// What a pipe may be used for, if its link may be used so.
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

    /// A link is in another network, or has come back.
    pub(super) fn network_changed(&mut self, now: Instant, uplink: LinkId) {
        if let Some(transport) = self.links.get_mut(&uplink) {
            transport.judge.on_network_changed(now);
            self.next_update = Some(now);
        }
    }

    /// When [`Self::look`] wants to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next_update
    }

    /// Looks at all links, if it is time; what comes of it. To be called at every turn.
    pub(super) fn update(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        links: &mut Links,
        policies: &LinkPolicies,
        connections: &ClassConnections,
    ) -> Vec<TransportChange> {
        let any_event = self.handle_connection_events(now, links);
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
        let mut changes = Vec::new();
        for (id, name, up) in uplinks {
            let up = up && policies.tier(&name) != Tier::Never;
            let transport = self.links.entry(id).or_insert_with(|| LinkTransport::new(now, policies, &name));
            transport.judge.set_wanted(now, policies.transport(&name));
            let (udp, tcp) = connections.heard(id);
            let order = transport.judge.update(now, LinkSigns { carrier: up, udp, tcp });
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

    /// Through a proxy the server is reached also where nobody here knows its address.
    fn is_usable_through_proxy(&self, ready: bool) -> bool {
        ready && self.tcp_config.as_ref().is_some_and(|tcp_config| tcp_config.has_proxy())
    }

    /// Takes the news of connections; whether there are any.
    fn handle_connection_events(&mut self, now: Instant, links: &Links) -> bool {
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
                ConnectionEvent::Failed(reason) if is_attempt => {
                    self.events.report(Event::TcpFailed {
                        link: name.into(),
                        reason: reason.as_str().into(),
                        failures: transport.failures,
                        shard: self.shard,
                    });
                    transport.attempt = None;
                    transport.failures += 1;
                    transport.judge.on_tcp_failed(now, reason);
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
            (Err(error), _) => return transport.judge.on_tcp_failed(now, error.to_string()),
            (_, None) => return transport.judge.on_tcp_failed(now, "there is no such link".to_owned()),
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
        transport.pipes = sockets.into_iter().map(|(id, _)| id).collect();
        let (event_sender, wake) = (self.event_sender.clone(), self.wake.clone());
        let event_sender = move |connection_event| {
            // A data plane that has ended needs no news.
            let _ = event_sender.send((id, number, connection_event));
            wake.wake();
        };
        let previous = transport.connection.as_ref().map(|(_, connection)| connection.abort_handle());
        if previous.is_some() {
            // It has gone silent: what fails next may need plain TCP.
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

    /// Connections with other classes than there are now are made anew.
    pub(super) fn classes_changed(&mut self, now: Instant) {
        for transport in self.links.values_mut() {
            if transport.established.take().is_some() {
                transport.connection = None;
                transport.judge.on_tcp_closed(now, "the classes have changed".to_owned());
            }
        }
        self.next_update = Some(now);
    }

    /// The TCP connection of a link, if it stands.
    pub(crate) fn established(&self, uplink: LinkId) -> Option<&EstablishedConnection> {
        self.links.get(&uplink)?.established.as_ref()
    }

    /// What there is to say about the way of a link; empty where that is UDP, as it should.
    pub(crate) fn reason(&self, now: Instant, uplink: LinkId) -> String {
        self.links.get(&uplink).map_or(String::new(), |transport| transport.judge.explanation(now))
    }

    /// Good-byes have been sent: lets them leave.
    pub(super) fn end(&self) {
        if self.links.values().any(|transport| transport.established.is_some()) {
            std::thread::sleep(CLOSE_LINGER);
        }
    }
}
