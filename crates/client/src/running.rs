//! The main thread of a client: it moves events between the data plane, the other shards, the slow thread,
//! and the machine, app or proxies.
//!
//! In: events of the tunnel, messages of other shards and of the slow thread, signals, commands of an app,
//! time. Out: calls of these parts, each of which owns its state. Always holds: nothing here blocks.

use std::{net::SocketAddr, time::Instant};

use ipnet::IpNet;
use mpvpn_config::{ClientConfig, ClientOptions, ConfigSource, SiteNetwork, log};
use mpvpn_confine as confine;
use mpvpn_error::RunError;
use mpvpn_input::{role::Role, short_text::ShortText, values::ServerAddr};
use mpvpn_links::policies::LinkPolicies;
use mpvpn_names::lookup::ReverseLookup;
use mpvpn_os::poll::MONITOR_TOKEN;
use mpvpn_proxy::FIRST_PROXY_TOKEN;
use mpvpn_qlog::Qlog;
use mpvpn_report::{flows, sites};
use mpvpn_sockets::splice::Context;
use mpvpn_status::{
    AnnouncedNetwork, FlowList, Link, NetworkState, State, Status,
    events::{Event, EventSender},
    link_change::LinkChange,
    reload_report::{ConfigValue, ReloadReport},
};
use mpvpn_threads::{
    event_loop::{self, EventLoop, Iteration, SignalRequest, reload_event, signal_event},
    service_manager::ServiceManager,
    shards::ShardEvent,
    slow_thread::{Message, SlowThread},
};
use mpvpn_tunnel::{Assignment, ClientEvent, ConnectionNumber, EchoWatch, OtherServers, UdpFlowEvent};
use mpvpn_types::{ClassId, Duration, target::LIVENESS};

use super::{
    auto_pipes::LookupScope,
    data_plane::DataPlane,
    kind::ClientKind,
    link_state,
    link_use::LinkUse,
    measured_flows::{self, MeasuredFlows},
    other_shard::{ClientMessage, FirstShard},
    proxy_streams::{ProxyStreams, stream_event},
    server_choice::{InUse, Order, Why},
    server_name::ServerName,
    servers::Servers,
    session::SessionState,
    session_keeper::SessionKeeper,
    silence_log::SilenceLog,
};
use crate::{answers, status};

/// Rounds of filling streams and sending in one iteration. More: longer iterations. Fewer: more iterations
/// for streams. Chosen.
const MAX_TRANSMIT_ROUNDS: usize = 16;

/// With `when-down = "direct"` packets leave past the tunnel after this silence. Shorter: a change of the
/// server shows them to the network; longer: people wait. Chosen.
const DIRECT_AFTER: Duration = Duration::from_secs(10);

/// The main thread's state.
pub(crate) struct Running {
    pub(super) config: ClientConfig,
    pub(super) origin: ConfigSource<ClientOptions>,
    pub(super) data_plane: DataPlane,
    pub(crate) shards: FirstShard,
    pub(super) kind: ClientKind,
    pub(super) slow: SlowThread,
    pub(super) events: EventSender,
    pub(super) link_use: LinkUse,
    /// `None` if there is only one server.
    pub(super) servers: Option<Servers>,
    /// `None` if the server is configured by address.
    pub(super) server_name: Option<ServerName>,
    pub(super) session: SessionState,
    pub(super) service_manager: ServiceManager,
    pub(super) keeper: SessionKeeper,
    pub(super) echo_watch: EchoWatch,
    pub(super) measured: Option<MeasuredFlows>,
    /// Whether something of the server arrives, as last told.
    pub(super) is_reached: bool,
    pub(super) silence_log: SilenceLog,
    /// When the server was last reached.
    pub(super) reached_at: Instant,
    /// Which TUN devices have a carrier, where that follows the tunnel, as last set.
    pub(super) carriers: Vec<bool>,
    /// The networks behind this machine, as last reported.
    pub(super) reported_networks: Vec<AnnouncedNetwork>,
    /// Dropped last, so that the last events of connections are written.
    pub(super) _qlog: Option<Qlog>,
}

impl Running {
    /// Runs until a signal or a command ends it, or an error that it cannot recover from.
    pub(super) fn run(&mut self, event_loop: &mut EventLoop) -> Result<(), RunError> {
        let now = Instant::now();
        let server = &self.config.server;
        let known = server.socket_addr().into_iter().collect();
        self.set_remotes(event_loop, now, known)?;
        for (_, link) in self.data_plane.sockets.links.uplinks().filter(|(_, link)| link.remote.is_none()) {
            let (link, reason) = (link.name.as_str().into(), link.reason.into());
            self.events.report(Event::LinkUnusable { link, reason });
        }
        if let Some(note) = self.config.note() {
            tracing::warn!("{note}");
        }
        self.events.report(Event::Connecting { server: self.config.server.to_string().into() });
        self.service_manager.set_status(|| format!("connecting to {}", self.config.server));
        self.service_manager.ready();
        let mut iteration = Iteration::first();
        loop {
            let busy = self.transmit(event_loop, iteration.now)?.then_some(iteration.now);
            self.resolve_server_name(iteration.now);
            let timeouts = [
                busy,
                self.data_plane.poll_timeout(iteration.now),
                self.server_name.as_ref().and_then(ServerName::poll_timeout),
                self.shards.poll_timeout(),
                self.link_use.poll_timeout(),
                self.kind.poll_timeout(),
                self.service_manager.poll_timeout(),
                self.measured.as_ref().map(MeasuredFlows::until),
                self.silence_log.next,
                self.servers.as_ref().map(|servers| servers.choice.poll_timeout()),
            ];
            let max_delay = self.data_plane.connections.max_coalescing_delay(iteration.now);
            event_loop.wait(timeouts.into_iter().flatten().min(), max_delay, &mut iteration)?;
            let kind = &mut self.kind;
            self.data_plane.handle_ready(event_loop, &iteration, &mut |name| kind.prepare_link(name))?;
            self.serve_proxy_clients(event_loop, &iteration);
            if iteration.ready.iter().any(|event| event.token == MONITOR_TOKEN) {
                self.kind.interfaces_changed(iteration.now);
            }
            self.kind.refresh_routes(iteration.now);
            match event_loop.signal_request(&iteration) {
                Some(SignalRequest::End(signal)) => {
                    self.events.report(signal_event(signal));
                    return Ok(());
                }
                Some(SignalRequest::Reload) => {
                    self.service_manager.reloading();
                    drop(self.reload(event_loop, iteration.now));
                    self.service_manager.ready();
                }
                None => {}
            }
            if self.run_app_commands(event_loop, iteration.now)? {
                return Ok(());
            }
            if self.handle_shard_events(event_loop)? {
                // `end` returns the reason when it joins the threads.
                return Ok(());
            }
            self.handle_slow_thread_messages(event_loop, iteration.now)?;
            self.note_answers(iteration.now);
            self.choose_server(event_loop, iteration.now)?;
            self.set_carriers(iteration.now);
            self.log_silence(iteration.now);
            self.update_link_use(iteration.now);
            self.expire_measurement(event_loop, iteration.now);
            self.answer_api(iteration.now);
            self.service_manager.update(iteration.now);
        }
    }

    /// Tells the service manager, and the event log, when nothing of the server arrives any more, and when
    /// something does again.
    fn note_answers(&mut self, now: Instant) {
        let client = self.data_plane.connections.default_client();
        // The end of a connection is an event of its own.
        if !self.session.is_up() || !client.is_authenticated() {
            return;
        }
        let is_reached = client.reaches_server();
        if std::mem::replace(&mut self.is_reached, is_reached) == is_reached {
            return;
        }
        self.events.report(if is_reached { Event::AnswersAgain {} } else { Event::NoAnswer {} });
        let verdict = self.status(now).verdict;
        self.service_manager.set_status(|| verdict);
    }

    /// Asks other servers, and uses another one, when due.
    fn choose_server(&mut self, event_loop: &EventLoop, now: Instant) -> Result<(), RunError> {
        let Some(servers) = &mut self.servers else { return Ok(()) };
        while let Some(answer) = self.data_plane.other_servers.as_mut().and_then(OtherServers::poll_answer) {
            tracing::debug!(target: LIVENESS, ?answer, "a server was asked");
            servers.choice.on_answer(&answer);
        }
        let is_reached = self.data_plane.connections.default_client().reaches_server();
        if !servers.choice.is_due(now, is_reached) {
            return Ok(());
        }
        let report = self.data_plane.connections.default_client_mut().report(now);
        let heard = report.outage.map_or(now, |outage| outage.since);
        let rtt = report.paths.iter().map(|path| path.view.rtt).min().unwrap_or_default();
        let carried = report.counters.tx_bytes + report.counters.rx_bytes;
        let asks_since = self.data_plane.connections.default_client().probes_restarted_at();
        match servers.choice.update(now, InUse { is_reached, heard, asks_since, rtt, carried }) {
            Some(Order::Probe { whom, over_all }) => {
                for number in whom {
                    let (addresses, name) = servers.addresses_of(now, number);
                    self.data_plane.probe_server(now, number, addresses, over_all);
                    if let Some(name) = name {
                        self.slow.resolve(name);
                    }
                }
                Ok(())
            }
            Some(Order::Use(number, why)) => self.use_server(event_loop, now, number, &why),
            None => Ok(()),
        }
    }

    /// Uses another server: all connections are made anew, for another session.
    fn use_server(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        number: usize,
        why: &Why,
    ) -> Result<(), RunError> {
        let flows = self.flows(now).flows.len() as u64;
        let Some(servers) = &mut self.servers else { return Ok(()) };
        let (access, addresses) = servers.access(number);
        let state_dir = servers.state_dir.clone();
        let from = self.config.server.to_string().into();
        self.config.use_server(number);
        let (to, reason) = (self.config.server.to_string().into(), ShortText::of(why));
        self.events.report(Event::ServerChanged { from, to, reason, flows });
        self.data_plane.use_server(event_loop, now, &access, &self.config);
        self.shards.send(|| ClientMessage::Server(Box::new(access.clone())));
        self.keeper = SessionKeeper::load(&self.config, state_dir.as_deref())?;
        self.keeper.resume(self.data_plane.connections.default_client_mut());
        self.server_name = self.config.server.ip().is_none().then(ServerName::default);
        self.set_remotes(event_loop, now, addresses)
    }

    /// Gives each TUN device a carrier while its packets reach the server, where the configuration says so.
    fn set_carriers(&mut self, now: Instant) {
        let follows = self.config.has_carrier_of_tunnel();
        let Some(devices) = self.data_plane.devices.as_ref().filter(|_| follows) else {
            return;
        };
        let of_all = std::iter::once(ClassId::DEFAULT).chain(devices.classes());
        let connections = &self.data_plane.connections;
        if connections.reaches_server(ClassId::DEFAULT) {
            self.reached_at = now;
        }
        // Another server may answer meanwhile.
        let waits = !self.config.tun_carrier && now < self.reached_at + DIRECT_AFTER;
        let carriers: Vec<_> = of_all.map(|class| waits || connections.reaches_server(class)).collect();
        if self.carriers == carriers {
            return;
        }
        match devices.set_carriers(&carriers) {
            Ok(()) => {
                tracing::debug!(target: LIVENESS, ?carriers, "the carrier of TUN devices follows the tunnel")
            }
            Err(error) => tracing::warn!(%error, "the carrier of the TUN device stays as it is"),
        }
        self.carriers = carriers;
    }

    /// Logs the state now and then while nothing of the server arrives.
    fn log_silence(&mut self, now: Instant) {
        let is_reached = self.data_plane.connections.default_client().reaches_server();
        if !self.silence_log.is_due(now, is_reached, self.session.is_up()) {
            return;
        }
        let Status { state, verdict, .. } = self.status(now);
        if state != State::Asleep {
            tracing::warn!("{verdict}");
            self.service_manager.set_status(|| verdict);
        }
    }

    /// Resolves the server's name when due, while the server is not reached.
    fn resolve_server_name(&mut self, now: Instant) {
        let client = self.data_plane.connections.default_client();
        let (reached, restarted_at) = (client.reaches_server(), client.probes_restarted_at());
        if self.server_name.as_mut().is_some_and(|name| name.update(now, reached, restarted_at)) {
            self.slow.resolve(&self.config.server);
        }
    }

    /// The addresses of the server in use, and of all others that may be asked.
    fn all_servers(&self, remotes: &[SocketAddr]) -> Vec<SocketAddr> {
        let mut all = self.config.servers(remotes);
        all.extend(self.servers.iter().flat_map(Servers::addresses));
        all
    }

    fn set_remotes(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        remotes: Vec<SocketAddr>,
    ) -> Result<(), RunError> {
        self.kind.set_servers(&self.all_servers(&remotes))?;
        self.shards.send(|| ClientMessage::ServerAddresses(remotes.clone()));
        let kind = &mut self.kind;
        self.data_plane.set_remotes(event_loop, now, remotes, &mut |name| kind.prepare_link(name))?;
        self.announce(now)
    }

    /// Sends what is due and handles events, alternately. Returns whether there is more to do.
    fn transmit(&mut self, event_loop: &EventLoop, now: Instant) -> Result<bool, RunError> {
        for _ in 0..MAX_TRANSMIT_ROUNDS {
            self.data_plane.transmit(event_loop, now);
            // Streams that accept bytes again are filled, as long as the paths send.
            if !self.apply_events(event_loop, now)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Handles ready sockets of the proxies' apps, and their timers.
    fn serve_proxy_clients(&mut self, event_loop: &EventLoop, iteration: &Iteration) {
        let Some(proxy) = self.kind.proxy_mut() else { return };
        let streams = &mut ProxyStreams(self.data_plane.connections.default_client_mut());
        let cx = &mut Context { now: iteration.now, poller: &event_loop.poller, streams };
        for event in iteration.ready.iter().filter(|event| event.token >= FIRST_PROXY_TOKEN) {
            proxy.on_socket_ready(cx, *event);
        }
        if proxy.poll_timeout().is_some_and(|at| at <= iteration.now) {
            proxy.handle_timeout(cx);
        }
    }

    /// Handles messages of the other shards. Returns whether a shard has ended.
    fn handle_shard_events(&mut self, event_loop: &EventLoop) -> Result<bool, RunError> {
        let mut ended = false;
        while let Some(news) = self.shards.next_event() {
            match news {
                ShardEvent::Specific(ClientMessage::CarriedMtu(member, mtu)) => {
                    self.session.set_carried(member, mtu);
                    if mtu.is_some() {
                        let (shard, reason) = (member.shard(), "".into());
                        self.events.report(Event::ShardChanged { shard, connected: true, reason });
                    }
                    self.attach(event_loop)?;
                    self.configure()?;
                    self.divide_link_rates();
                }
                ShardEvent::Ended => ended = true,
                // Only shard 0 sends the other messages.
                ShardEvent::Specific(_) => {}
            }
        }
        Ok(ended)
    }

    /// Attaches or detaches this shard's TUN queue.
    fn attach(&mut self, event_loop: &EventLoop) -> Result<(), RunError> {
        self.data_plane.attach(event_loop, self.session.accepts_packets())
    }

    fn handle_slow_thread_messages(&mut self, event_loop: &EventLoop, now: Instant) -> Result<(), RunError> {
        while let Some(message) = self.slow.next() {
            match message {
                Message::ApiRequest(question) => {
                    answers::answer_client_request(self, event_loop, now, question)?
                }
                Message::ReverseResolved(address, name) => {
                    if let Some(name) = name {
                        self.link_use.pipes.on_reverse_resolved(now, address, &name);
                    }
                }
                Message::Resolved(name, found) => {
                    if let (Some(servers), Ok(found)) = (&mut self.servers, &found)
                        && servers.on_resolved(&name, found)
                    {
                        let remotes = self.all_servers(self.data_plane.sockets.links.remotes());
                        self.kind.set_servers(&remotes)?;
                    }
                    if name != self.config.server {
                        continue;
                    }
                    let server = self.config.server.to_string().into();
                    let found = found.and_then(|all| match all.is_empty() {
                        true => Err("it has no address".to_owned()),
                        false => Ok(all),
                    });
                    if let Err(reason) = &found {
                        let reason = reason.as_str().into();
                        self.events.report(Event::ResolveFailed { server, reason });
                    }
                    let server_name = self.server_name.as_mut();
                    if let Some(addresses) = server_name.and_then(|name| name.on_resolved(now, found.ok())) {
                        let server = self.config.server.to_string().into();
                        self.events.report(Event::ServerResolved { server, addresses: addresses.clone() });
                        self.set_remotes(event_loop, now, addresses)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The values of the configuration, and where each comes from.
    pub(crate) fn config_values(&self) -> Result<Vec<ConfigValue>, mpvpn_input::Error> {
        self.origin.values()
    }

    /// Reads the configuration again. Link settings and classes apply at once; run-time changes are dropped.
    pub(crate) fn reload(&mut self, event_loop: &EventLoop, now: Instant) -> Result<ReloadReport, String> {
        let new = self.origin.load().map_err(|error| error.to_string());
        measured_flows::remove_from(&mut self.config);
        let (site, bypass) = (self.config.site.clone(), self.config.bypass.clone());
        let mut reloaded = new.map(|new| self.config.apply_reload(new));
        if self.config.bypass != bypass
            && let Err(error) = self.kind.set_bypass(&self.config).and_then(|()| self.configure())
        {
            self.config.bypass = bypass;
            let restored = self.kind.set_bypass(&self.config);
            reloaded = Err(format!("[[bypass]] stays as it was: {error}"));
            restored.unwrap_or_else(|error| tracing::warn!(%error, "[[bypass]] is not in force"));
        }
        if self.config.site != site
            && let Err(error) = self.announce(now)
        {
            self.config.site = site;
            reloaded = Err(format!("the networks behind this machine stay as they were: {error}"));
        }
        if let Some(Err(reason)) = self.measured.as_ref().map(|flows| flows.add_to(&mut self.config)) {
            tracing::warn!(reason, "the measurement ends");
            self.measured = None;
        }
        log::set_level(self.config.log_level);
        self.events.report(reload_event(&reloaded));
        let mut policies = self.data_plane.policies.clone();
        if reloaded.is_ok() && policies.configure(&self.config.links) {
            let remotes = self.all_servers(self.data_plane.sockets.links.remotes());
            self.kind.set_servers(&remotes).map_err(|error| error.to_string())?;
            self.set_policies(now, policies);
            self.update_quotas(now);
        }
        if reloaded.as_ref().is_ok_and(|reloaded| reloaded.classes) {
            self.set_class_config(event_loop, now, self.config.clone());
        }
        reloaded
    }

    /// Changes how a link is used, until the process ends or reloads.
    pub(crate) fn change_link(
        &mut self,
        now: Instant,
        name: &str,
        change: &LinkChange,
    ) -> Result<Link, String> {
        let links = || self.data_plane.sockets.links.uplinks().map(|(_, link)| link.name.as_str());
        if !links().any(|link| link == name) {
            let names = links().collect::<Vec<_>>();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(format!("there is no link `{name}`: known are {names}"));
        }
        let mut policies = self.data_plane.policies.clone();
        let mut link = policies.of(name);
        link.change(change);
        self.events.report(Event::LinkSet { link: name.into(), change: ShortText::of(change) });
        policies.change(name, link);
        if change.quota_reset {
            self.link_use.quotas.reset(name);
        }
        self.set_policies(now, policies);
        self.update_quotas(now);
        let status = self.status(now);
        status.links.into_iter().find(|link| link.name == name).ok_or_else(|| format!("`{name}` is gone"))
    }

    fn set_policies(&mut self, now: Instant, policies: LinkPolicies) {
        self.shards.send(|| ClientMessage::Policies(Box::new(policies.clone())));
        self.data_plane.set_policies(now, policies);
    }

    /// Updates quotas and pipes that are due, and the link for packets past the tunnel.
    fn update_link_use(&mut self, now: Instant) {
        if now < self.link_use.next_update() {
            return;
        }
        let (home, links) =
            (self.data_plane.connections.default_client_mut(), &self.data_plane.sockets.links);
        self.kind.set_working_links(|| link_state::working_links(&home.report(now).paths, links));
        let DataPlane { connections, policies, sockets, .. } = &mut self.data_plane;
        let home = connections.default_client_mut();
        let resolvers =
            self.kind.machine().map_or(Vec::new(), |machine| machine.tunnel_resolvers(&self.config));
        let update = self
            .link_use
            .update(now, policies, &sockets.links, !resolvers.is_empty(), || home.report(now).paths);
        for (address, scope) in update.wanted_names {
            self.slow.reverse_resolve(match scope {
                LookupScope::System => ReverseLookup::BySystem(address),
                LookupScope::Tunnel => ReverseLookup::InTunnel {
                    address,
                    resolvers: resolvers.clone(),
                    device: self.config.tun_name.clone(),
                },
            });
        }
        if let Some(policies) = update.policies {
            self.set_policies(now, policies);
        }
    }

    /// Checks quotas again, after settings changed.
    fn update_quotas(&mut self, now: Instant) {
        let mut policies = self.data_plane.policies.clone();
        if self.link_use.update_quotas(now, &mut policies, &self.data_plane.sockets.links) {
            self.set_policies(now, policies);
        }
    }

    /// Divides the configured rates among the connections.
    fn divide_link_rates(&mut self) {
        let mut policies = self.data_plane.policies.clone();
        if policies.set_connection_count(self.session.connections()) {
            self.set_policies(Instant::now(), policies);
        }
    }

    /// Shard 0's part of the status.
    pub(crate) fn status(&mut self, now: Instant) -> Status {
        let mut status = self.data_plane.status(now, &self.config, ConnectionNumber::INITIAL);
        for link in &mut status.links {
            self.link_use.add_to_status(&self.data_plane.policies, link);
        }
        status.server = self.servers.as_ref().map(|servers| servers.choice.status());
        status.proxy = self.kind.proxy().is_some();
        status.notes.extend(self.config.note());
        status.announced = self.networks();
        status.forwards = self.kind.forwards(&self.config);
        (status.confinement, status.memory) = (confine::status(), event_loop::memory());
        status.kill_switch =
            self.kind.machine().map(|machine| machine.kill_switch_state(self.session.is_up()));
        status.notes.extend(self.kind.machine().and_then(|machine| machine.dns_leak.clone()));
        status.notes.extend(self.kind.machine().and_then(|machine| machine.local_names_fail.clone()));
        status
            .notes
            .extend(status::sharing_note(self.data_plane.connections.default_client().secret_sharing()));
        status
    }

    /// Shard 0's flows: those of its TUN queue, or of the proxies.
    pub(crate) fn flows(&self, now: Instant) -> FlowList {
        match self.kind.proxy() {
            Some(proxy) => flows::connection_flows(now, Role::Client, proxy.flows()),
            None => self.data_plane.flows(now, &self.config),
        }
    }

    /// Answers requests for which all shards have reported.
    fn answer_api(&mut self, now: Instant) {
        self.shards.answer(now, |mut reports| {
            // Shard 0's report comes first.
            let members = reports.split_off(1);
            let mut status = reports.remove(0);
            for report in members {
                status::add_shard_status(&mut status, report);
            }
            status
        });
    }

    /// Handles the tunnel's events. Returns whether any concerned streams, which may then have bytes to send.
    pub(crate) fn apply_events(&mut self, event_loop: &EventLoop, now: Instant) -> Result<bool, RunError> {
        let mut has_stream_events = false;
        while let Some((flow, payload)) = self.data_plane.connections.poll_udp() {
            if let Some(proxy) = self.kind.proxy_mut() {
                proxy.deliver_payload(now, flow, &payload);
            }
        }
        while let Some(event) = self.data_plane.connections.poll_event(now) {
            let event = match stream_event(event) {
                Ok(event) => {
                    has_stream_events = true;
                    if let Some(proxy) = self.kind.proxy_mut() {
                        let client = self.data_plane.connections.default_client_mut();
                        let streams = &mut ProxyStreams(client);
                        let cx = &mut Context { now, poller: &event_loop.poller, streams };
                        proxy.on_stream_event(cx, event);
                    }
                    continue;
                }
                Err(event) => event,
            };
            match event {
                ClientEvent::Mtu(mtu) => {
                    self.session.set_mtu(mtu as u32);
                    self.events.report(Event::MtuChanged { mtu: mtu as u64 });
                    self.configure()?;
                }
                ClientEvent::Up(assignment) => {
                    self.report_connected(&assignment);
                    if let Some(servers) = &mut self.servers {
                        servers.choice.on_up();
                    }
                    self.kind.set_up(true);
                    self.session.set_up(true);
                    self.set_carriers(now);
                    self.attach(event_loop)?;
                    self.assign(assignment);
                    self.configure()?;
                    self.kind.share(&self.config)?;
                }
                ClientEvent::AssignmentChanged(assignment) => {
                    if self.kind.differs(&assignment) {
                        let addresses = assignment.addresses.clone();
                        self.service_manager.set_status(|| connected_text(&self.config.server, &addresses));
                        self.events.report(Event::AddressesChanged { addresses });
                    }
                    self.assign(assignment);
                    self.configure()?;
                }
                ClientEvent::Udp(flow, news) => {
                    if let (Some(proxy), UdpFlowEvent::Refused(_) | UdpFlowEvent::Closed) =
                        (self.kind.proxy_mut(), news)
                    {
                        proxy.on_flow_closed(now, flow, news != UdpFlowEvent::Closed);
                    }
                }
                ClientEvent::JoinsAllowed { secret, .. } => {
                    self.shards.send(|| ClientMessage::Join(secret.clone()))
                }
                ClientEvent::Down(reason) => {
                    let (why, server) = (reason.as_str().into(), &self.config.server);
                    let (event, doing) = match self.data_plane.connections.default_client().is_refused(now) {
                        true => (Event::Refused { reason: why }, format!("refused by {server}")),
                        false => {
                            (Event::Disconnected { reason: why }, format!("connecting to {server} again"))
                        }
                    };
                    self.events.report(event);
                    self.service_manager.set_status(|| format!("{doing}: {reason}"));
                    self.session.set_up(false);
                    self.attach(event_loop)?;
                    self.kind.connection_lost(reason);
                }
                ClientEvent::Fatal(error) => {
                    self.data_plane.transmit(event_loop, now);
                    let servers = self.servers.as_mut();
                    let reason = ShortText::of(&error).to_string();
                    match servers.and_then(|servers| servers.choice.on_refused(now, &reason)) {
                        Some(Order::Use(number, why)) => self.use_server(event_loop, now, number, &why)?,
                        _ => return Err(error.into()),
                    }
                }
                // Stream events were handled above.
                _ => {}
            }
        }
        Ok(has_stream_events)
    }

    fn report_connected(&mut self, assignment: &Assignment) {
        self.service_manager.set_status(|| connected_text(&self.config.server, &assignment.addresses));
        let is_resumed = self.session.is_resumed(self.data_plane.connections.default_client().resumed());
        self.events.report(Event::Connected {
            server: self.config.server.to_string().into(),
            addresses: assignment.addresses.clone(),
            resumed: is_resumed,
        });
    }

    /// Announces the networks behind this machine, which lets in only whom the configuration names.
    pub(super) fn announce(&mut self, now: Instant) -> Result<(), RunError> {
        self.kind.set_site(&self.config)?;
        let servers = self.data_plane.sockets.links.remotes();
        let networks = self.config.site.networks.iter();
        let networks = networks.filter(|one| !contains_any(one, servers)).map(|one| one.announced);
        self.data_plane.connections.default_client_mut().announce(now, networks.collect());
        self.report_networks();
        Ok(())
    }

    /// The networks behind this machine.
    fn networks(&self) -> Vec<AnnouncedNetwork> {
        let assignment = self.kind.assignment().filter(|_| self.session.is_up());
        let servers = self.data_plane.sockets.links.remotes();
        let given = assignment.and_then(|given| given.sites.as_deref());
        let contains_server = |one: &SiteNetwork| contains_any(one, servers);
        let of_lan = assignment.map(|given| sites::assigned(given, !self.config.share.is_empty()));
        let mut all = sites::of_client(&self.config.site, given, assignment.is_some(), contains_server);
        all.extend(of_lan.into_iter().flatten());
        all
    }

    /// Reports networks behind this machine whose states have changed. That nothing is known meanwhile is no
    /// change.
    fn report_networks(&mut self) {
        let known = self.networks().into_iter().filter(|one| one.state != NetworkState::Waiting);
        for one in known {
            self.reported_networks.retain(|before| before.network != one.network || *before == one);
            if !self.reported_networks.contains(&one) {
                let (network, state, reason) = (one.network, one.state, ShortText::of(&one.reason));
                self.events.report(Event::NetworkChanged { user: None, network, state, reason });
                self.reported_networks.push(one);
            }
        }
    }

    fn assign(&mut self, assignment: Assignment) {
        self.keeper.keep(self.data_plane.connections.default_client().session_secret(), &assignment);
        self.data_plane.assign(&assignment);
        self.kind.assign(&self.config, assignment);
        self.report_networks();
    }

    fn configure(&mut self) -> Result<(), RunError> {
        self.kind.configure(&self.config, self.session.mtu())
    }

    /// Says good-bye to the server and takes back what was changed. `is_orderly`: the client was told to end,
    /// so that its kill switch is lifted.
    pub(super) fn end(mut self, is_orderly: bool) -> Result<(), RunError> {
        self.service_manager.stopping();
        let shards = self.shards.end();
        if let Some(proxy) = self.kind.proxy_mut() {
            proxy.end();
        }
        self.data_plane.end();
        let mut policies = self.data_plane.policies.clone();
        self.link_use.update_quotas(Instant::now(), &mut policies, &self.data_plane.sockets.links);
        self.link_use.quotas.save();
        self.kind.end(is_orderly && shards.is_ok()).and(shards)
    }
}

/// The state of a tunnel that works, in words.
fn connected_text(server: &ServerAddr, addresses: &[IpNet]) -> String {
    let addresses: Vec<_> = addresses.iter().map(|net| net.addr().to_string()).collect();
    format!("connected to {server} as {}", addresses.join(" and "))
}

/// Whether a network contains one of these addresses of the server.
fn contains_any(network: &SiteNetwork, servers: &[SocketAddr]) -> bool {
    servers.iter().any(|server| network.contains_server(Some(server.ip())))
}
