//! The main thread of a running client: it moves events between the data plane, the other shards, the slow thread and what
//! the client is for.
//!
//! In: events of the tunnel, messages of the other shards and of the slow thread, signals, orders of an app, time. Out: calls of
//! these parts, each of which owns its state. Always holds: nothing here waits.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{
    config::{ClientConfig, ClientOptions, ConfigSource, LinkChange, ReloadReport},
    events::{Event, EventSender, ShortText},
    status::{FlowList, Link, Role, Status},
};
use mpvpn_tunnel::{Assignment, ClientEvent, ConnectionNumber, UdpFlowEvent};

use super::{
    apps::{self, Apps},
    kind::ClientKind,
    link_use::LinkUse,
    member::{ClientMessage, FirstShard},
    names::Names,
    plane::Plane,
    session::SessionState,
};
use crate::{
    EngineError, answers, flows,
    policies::Policies,
    proxy::{PROXY, Proxy},
    qlog::Qlog,
    shards::News,
    slow::{Message, Slow},
    status,
    turn::{MONITOR, Told, Turn, Turns, end_event, reload_event},
};

/// How often a turn looks again whether streams have something to send.
const ROUNDS: usize = 16;

/// The main thread.
pub(crate) struct Running {
    pub(super) config: ClientConfig,
    pub(super) origin: ConfigSource<ClientOptions>,
    pub(super) plane: Plane,
    pub(crate) shards: FirstShard,
    pub(super) kind: ClientKind,
    pub(super) slow: Slow,
    pub(super) events: EventSender,
    pub(super) link_use: LinkUse,
    /// `None` where the server is an address.
    pub(super) names: Option<Names>,
    pub(super) session: SessionState,
    /// Dropped last, so that the ends of connections are written.
    pub(super) _qlog: Option<Qlog>,
}

impl Running {
    /// Runs until it is told to end, or going on makes no sense.
    pub(super) fn run(&mut self, turns: &mut Turns) -> Result<(), EngineError> {
        let now = Instant::now();
        match self.config.server.ip() {
            Some(ip) => {
                self.set_remotes(turns, now, vec![SocketAddr::new(ip, self.config.server.port)])?;
            }
            None => self.set_remotes(turns, now, Vec::new())?,
        }
        for (_, link) in self.plane.sockets.links.uplinks().filter(|(_, link)| link.remote.is_none()) {
            let (link, reason) = (link.name.as_str().into(), link.reason.into());
            self.events.report(Event::LinkUnusable { link, reason });
        }
        if let Some(note) = self.config.note() {
            tracing::warn!("{note}");
        }
        self.events.report(Event::Connecting { server: self.config.server.to_string().into() });
        let mut turn = Turn::new();
        loop {
            let busy = self.transmit(turns, turn.now)?.then_some(turn.now);
            self.look_at_names(turn.now);
            let timeouts = [
                busy,
                self.plane.poll_timeout(turn.now),
                self.names.as_ref().and_then(Names::poll_timeout),
                self.shards.poll_timeout(),
                Some(self.link_use.poll_timeout()),
                self.kind.proxy().and_then(Proxy::poll_timeout),
            ];
            turns.next(timeouts.into_iter().flatten().min(), &mut turn)?;
            let kind = &mut self.kind;
            self.plane.take(turns, &turn, &mut |name| kind.prepare_link(name))?;
            self.serve_apps(turns, &turn);
            if turn.ready.iter().any(|event| event.token == MONITOR) {
                self.kind.look_at_links();
            }
            match turns.told(&turn) {
                Some(Told::End(signal)) => {
                    self.events.report(end_event(signal));
                    return Ok(());
                }
                Some(Told::Reload) => drop(self.reload(turns, turn.now)),
                None => {}
            }
            if self.obey(turns, turn.now)? {
                return Ok(());
            }
            if self.hear_shards(turns)? {
                // The reason comes out when the threads are joined.
                return Ok(());
            }
            self.messages(turns, turn.now)?;
            self.look_at_links(turn.now);
            self.answer(turn.now);
        }
    }

    /// Has the server's name resolved, again and again while the server is not reached.
    fn look_at_names(&mut self, now: Instant) {
        let reached = self.plane.connections.default_client().reaches_server();
        if self.names.as_mut().is_some_and(|names| names.look(now, reached)) {
            self.slow.resolve(&self.config.server);
        }
    }

    fn set_remotes(
        &mut self,
        turns: &Turns,
        now: Instant,
        remotes: Vec<SocketAddr>,
    ) -> Result<(), EngineError> {
        self.shards.tell(|| ClientMessage::Remotes(remotes.clone()));
        let kind = &mut self.kind;
        self.plane.set_remotes(turns, now, remotes, &mut |name| kind.prepare_link(name))
    }

    /// Sends what is to be sent, and acts on what has happened; whether there is more of that.
    fn transmit(&mut self, turns: &Turns, now: Instant) -> Result<bool, EngineError> {
        for _ in 0..ROUNDS {
            self.plane.transmit(turns, now);
            // Streams that have room again are filled, as long as the paths take it.
            if !self.apply_events(turns, now)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Handles the sockets of apps that have become ready, and time that has passed.
    fn serve_apps(&mut self, turns: &Turns, turn: &Turn) {
        let Some(proxy) = self.kind.proxy_mut() else { return };
        let apps = &mut Apps(self.plane.connections.default_client_mut());
        for event in turn.ready.iter().filter(|event| event.token >= PROXY) {
            proxy.ready(turn.now, &turns.poller, apps, *event);
        }
        if proxy.poll_timeout().is_some_and(|at| at <= turn.now) {
            proxy.handle_timeout(turn.now, &turns.poller, apps);
        }
    }

    /// Acts on what the other shards say; whether one of them has ended.
    fn hear_shards(&mut self, turns: &Turns) -> Result<bool, EngineError> {
        let mut ended = false;
        while let Some(news) = self.shards.next() {
            match news {
                News::Specific(ClientMessage::Carries(member, mtu)) => {
                    self.session.set_carried(member, mtu);
                    if mtu.is_some() {
                        let (shard, reason) = (member.shard(), "".into());
                        self.events.report(Event::ShardChanged { shard, connected: true, reason });
                    }
                    self.attach(turns)?;
                    self.configure()?;
                    self.share_links();
                }
                News::Ended => ended = true,
                // Only the first shard says so.
                News::Specific(_) => {}
            }
        }
        Ok(ended)
    }

    /// Has the kernel put packets into this shard's queue, or only into those of others.
    fn attach(&mut self, turns: &Turns) -> Result<(), EngineError> {
        self.plane.attach(turns, self.session.takes_packets())
    }

    fn messages(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        while let Some(message) = self.slow.next() {
            match message {
                Message::Asked(question) => answers::of_client(self, turns, now, question)?,
                Message::Named(address, name) => {
                    if let Some(name) = name {
                        self.link_use.pipes.named(now, address, &name);
                    }
                }
                Message::Resolved(found) => {
                    let server = self.config.server.to_string().into();
                    let found = found.and_then(|all| match all.is_empty() {
                        true => Err("it has no address".to_owned()),
                        false => Ok(all),
                    });
                    if let Err(reason) = &found {
                        let reason = reason.as_str().into();
                        self.events.report(Event::ResolveFailed { server, reason });
                    }
                    let names = self.names.as_mut();
                    if let Some(addresses) = names.and_then(|names| names.resolved(now, found.ok())) {
                        let server = self.config.server.to_string().into();
                        self.events.report(Event::ServerResolved { server, addresses: addresses.clone() });
                        self.set_remotes(turns, now, addresses)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the configuration again: how links are used and the classes count at once, and what was said at run time no
    /// more.
    pub(crate) fn reload(&mut self, turns: &Turns, now: Instant) -> Result<ReloadReport, String> {
        let new = self.origin.load().map_err(|error| error.to_string());
        let reloaded = new.map(|new| self.config.apply_reload(new));
        self.events.report(reload_event(&reloaded));
        let mut policies = self.plane.policies.clone();
        if reloaded.is_ok() && policies.configure(&self.config.links) {
            self.set_policies(now, policies);
            self.count_quotas(now);
        }
        if reloaded.as_ref().is_ok_and(|reloaded| reloaded.classes) {
            self.shards.tell(|| ClientMessage::Classes(Box::new(self.config.clone())));
            self.plane.set_classes(turns, now, &self.config);
        }
        reloaded
    }

    /// Has a link used in another way, until this process ends.
    pub(crate) fn change_link(
        &mut self,
        now: Instant,
        name: &str,
        change: &LinkChange,
    ) -> Result<Link, String> {
        let known = || self.plane.sockets.links.uplinks().map(|(_, link)| link.name.as_str());
        if !known().any(|link| link == name) {
            let names = known().collect::<Vec<_>>();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(format!("there is no link `{name}`: known are {names}"));
        }
        let mut policies = self.plane.policies.clone();
        let mut link = policies.of(name);
        link.change(change);
        self.events.report(Event::LinkSet { link: name.into(), change: ShortText::of(change) });
        policies.change(name, link);
        if change.quota_reset {
            self.link_use.quotas.reset(name);
        }
        self.set_policies(now, policies);
        self.count_quotas(now);
        let status = self.status(now);
        status.links.into_iter().find(|link| link.name == name).ok_or_else(|| format!("`{name}` is gone"))
    }

    fn set_policies(&mut self, now: Instant, policies: Policies) {
        self.shards.tell(|| ClientMessage::Policies(Box::new(policies.clone())));
        self.plane.set_policies(now, policies);
    }

    /// Looks what the links carry, where it is time.
    fn look_at_links(&mut self, now: Instant) {
        let Plane { connections, policies, sockets, .. } = &mut self.plane;
        let home = connections.default_client_mut();
        let news = self.link_use.look(now, policies, &sockets.links, || home.report(now).paths);
        news.wanted_names.into_iter().for_each(|address| self.slow.name(address));
        if let Some(policies) = news.policies {
            self.set_policies(now, policies);
        }
    }

    /// Other quotas may count now.
    fn count_quotas(&mut self, now: Instant) {
        let mut policies = self.plane.policies.clone();
        if self.link_use.count(now, &mut policies, &self.plane.sockets.links) {
            self.set_policies(now, policies);
        }
    }

    /// What a link may carry is for all connections together.
    fn share_links(&mut self) {
        let mut policies = self.plane.policies.clone();
        if policies.set_shares(self.session.connections()) {
            self.set_policies(Instant::now(), policies);
        }
    }

    /// What this shard alone knows.
    pub(crate) fn status(&mut self, now: Instant) -> Status {
        let mut status = self.plane.status(now, &self.config, ConnectionNumber::INITIAL);
        for link in &mut status.links {
            self.link_use.explain(link);
        }
        status.notes.extend(self.config.note());
        status.notes.extend(self.kind.leak());
        status
    }

    /// The flows of this shard alone: those of the TUN or of the proxies.
    pub(crate) fn flows(&self, now: Instant) -> FlowList {
        match self.kind.proxy() {
            Some(proxy) => flows::of_connections(now, Role::Client, proxy.flows()),
            None => self.plane.flows(now, &self.config),
        }
    }

    /// Answers who asked, once every shard has reported.
    fn answer(&mut self, now: Instant) {
        self.shards.answer(now, |mut reports| {
            // This shard has reported first.
            let members = reports.split_off(1);
            let mut status = reports.remove(0);
            for report in members {
                status::add_member(&mut status, report);
            }
            status
        });
    }

    /// Acts on what has happened; whether anything has to streams, which then may have something to send.
    pub(crate) fn apply_events(&mut self, turns: &Turns, now: Instant) -> Result<bool, EngineError> {
        let mut streams = false;
        while let Some((flow, payload)) = self.plane.connections.default_client_mut().poll_udp() {
            if let Some(proxy) = self.kind.proxy_mut() {
                proxy.payload(now, flow, &payload);
            }
        }
        while let Some(event) = self.plane.connections.poll_event(now) {
            let event = match apps::news(event) {
                Ok(news) => {
                    streams = true;
                    if let Some(proxy) = self.kind.proxy_mut() {
                        proxy.handle(
                            now,
                            &turns.poller,
                            &mut Apps(self.plane.connections.default_client_mut()),
                            news,
                        );
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
                    self.session.set_up(true);
                    self.attach(turns)?;
                    self.assign(assignment);
                    self.configure()?;
                    self.kind.share(&self.config)?;
                }
                ClientEvent::AssignmentChanged(assignment) => {
                    let addresses = assignment.addresses.clone();
                    self.events.report(Event::AddressesChanged { addresses });
                    self.assign(assignment);
                    self.configure()?;
                }
                ClientEvent::Udp(flow, news) => {
                    if let (Some(proxy), UdpFlowEvent::Refused(_) | UdpFlowEvent::Closed) =
                        (self.kind.proxy_mut(), news)
                    {
                        proxy.flow_over(now, flow, news != UdpFlowEvent::Closed);
                    }
                }
                ClientEvent::JoinsAllowed { secret, .. } => {
                    self.shards.tell(|| ClientMessage::Join(secret.clone()))
                }
                ClientEvent::Down(reason) => {
                    self.events.report(Event::Disconnected { reason: reason.as_str().into() });
                    self.session.set_up(false);
                    self.attach(turns)?;
                    self.kind.connection_lost(reason);
                }
                ClientEvent::Fatal(error) => {
                    self.plane.transmit(turns, now);
                    return Err(error.into());
                }
                // Told above.
                _ => {}
            }
        }
        Ok(streams)
    }

    fn report_connected(&mut self, assignment: &Assignment) {
        let is_resumed = self.session.is_resumed(self.plane.connections.default_client().resumed());
        self.events.report(Event::Connected {
            server: self.config.server.to_string().into(),
            addresses: assignment.addresses.clone(),
            resumed: is_resumed,
        });
    }

    fn assign(&mut self, assignment: Assignment) {
        self.plane.assign(&assignment);
        self.kind.assign(&self.config, assignment);
    }

    fn configure(&mut self) -> Result<(), EngineError> {
        self.kind.configure(&self.config, self.session.mtu())
    }

    /// Says good-bye to the server and takes back what was changed.
    pub(super) fn end(mut self) -> Result<(), EngineError> {
        let shards = self.shards.end();
        if let Some(proxy) = self.kind.proxy_mut() {
            proxy.end();
        }
        self.plane.end();
        let mut policies = self.plane.policies.clone();
        self.link_use.count(Instant::now(), &mut policies, &self.plane.sockets.links);
        self.link_use.quotas.save();
        self.kind.end().and(shards)
    }
}
