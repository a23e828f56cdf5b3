//! A running client.
//!
//! Its first shard is the main thread: it makes the session, and has the signals, the local API and
//! what is changed on the machine. The others, if any, are threads with a connection, sockets and a
//! queue of the TUN of their own, and join the session.
//!
//! A client for proxies, or inside an app ([`embedded`]), has one shard and no TUN, changes nothing on the machine, and
//! needs no privilege.

mod apps;
pub mod check;
mod classes;
mod device;
pub mod embedded;
mod events;
mod forge;
mod machine;
pub(crate) mod member;
mod names;
mod pipes;
mod plane;
mod quotas;
pub(crate) mod ways;

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use mpvpn_control::{
    api,
    config::{ClientConfig, ClientOptions, LaneRule, LinkChange, Origin, Reloaded},
    events::{Event, EventSender, ShortText},
    metrics,
    status::{FlowList, Link, Role, Status},
    tls::{self, RefusalSlot},
};
use mpvpn_lane::rules::{Rule, Rules};
use mpvpn_os::privilege;
use mpvpn_quic::{ClientSetup, MAX_SHARDS, TransportOptions};
use mpvpn_tunnel::{
    Assignment, Carries, ClientConfig as TunnelConfig, ClientError, ClientEvent, Fleet, Member, RelayId,
    UdpId, UdpNews,
};
use mpvpn_types::{ClassId, Fec};

use crate::{
    EngineError, answers,
    asking::Asking,
    crew::Crew,
    exchange::{Inbox, exchange},
    flows,
    links::{Ground, Links},
    policies::{Meters, Policies},
    proxy::{PROXY, Proxy},
    slow::{Message, Offers, Slow},
    status,
    tcp_way::carriage::Stable,
    turn::{MONITOR, SIGNAL, Told, Turn, Turns, end_event, reload_event},
};
use apps::Apps;
use classes::Classes;
use device::Devices;
use embedded::Host;
use events::ShardEvents;
use forge::{Forge, Setups, lane_of};
use machine::Machine;
use member::{Joiner, Word};
use names::Names;
use pipes::AutoPipes;
use plane::{Plane, PlaneGear};
use quotas::Quotas;
use ways::Ways;

/// Where a server has its tunnels (RFC 9484 §3, both variables `*`).
const PATH: &str = "/.well-known/masque/ip/*/*/";
/// Inside TCP a larger UDP payload (bytes) costs less of a slow link, and makes what comes next wait there: this one for 5 ms
/// at 10 Mbit/s.
const INSIDE_TCP: u16 = 6144;
/// How often a turn looks again whether streams have something to send.
const ROUNDS: usize = 16;

/// Keeps a tunnel up until told to stop. What may change meanwhile is read from `origin` when asked to.
///
/// # Errors
/// If it cannot be started, or the server refuses it.
pub fn run(config: ClientConfig, origin: Origin<ClientOptions>) -> Result<(), EngineError> {
    let is_proxy = !config.proxies.is_empty();
    if !is_proxy && !privilege::has_net_admin() {
        return Err(EngineError::Privilege);
    }
    let mut turns = Turns::new()?;
    let slot = RefusalSlot::default();
    let tls = tls::client_config_reporting(&config.trust, &[b"h3"], &slot)?;
    let api = api::Server::bind(&config.api_socket)?;
    let metrics = config.metrics.map(metrics::Server::bind).transpose()?;
    let state_dir = Some(config.state_dir.clone());
    let gear = match is_proxy {
        true => {
            let proxy = Some(apps::listen(&config.proxies, &turns.poller)?);
            Gear { proxy, state_dir, ..Gear::default() }
        }
        false => {
            let (machine, queues) = Machine::open(&config)?;
            let tuns = machine.tuns().map(str::to_owned).collect();
            let ground = Ground { tuns, mark: Some(machine.mark), ..Ground::default() };
            Gear { machine: Some(machine), queues, ground, state_dir, ..Gear::default() }
        }
    };
    let slow = Slow::start(Offers { api: Some(api), metrics, front: None }, None, turns.wake.clone())?;
    let mut running = Running::new((config, origin), &turns, Arc::new(tls), gear, slow)?;
    let result = running.run(&mut turns);
    let end = running.end();
    result.map_err(|error| refusal(error, &slot)).and(end)
}

/// Why the server's certificate was refused, if that is the reason.
fn refusal(error: EngineError, slot: &RefusalSlot) -> EngineError {
    match error {
        EngineError::Tunnel(ClientError::Tls(_)) => slot.take().map_or(error, EngineError::from),
        error => error,
    }
}

/// What a client is for: a TUN, the packets of an app, or proxies.
#[derive(Default)]
struct Gear {
    machine: Option<Machine>,
    queues: Vec<Devices>,
    ground: Ground,
    proxy: Option<Proxy<RelayId, UdpId>>,
    host: Option<Host>,
    /// For what has to survive a restart.
    state_dir: Option<PathBuf>,
}

/// What all shards are made of.
struct Parts {
    config: ClientConfig,
    ground: Ground,
    classes: Classes,
    forge: Forge,
    meters: Meters,
    /// `None` where there is no thread for TCP.
    tcp: Option<Arc<Stable>>,
    events: EventSender,
}

impl Parts {
    /// What a shard does with its packets.
    fn gear(&self, shard: u8, turns: &Turns) -> PlaneGear {
        let classes = self.classes.clone();
        let connections = self.forge.connections(&self.config, &classes, shard);
        let several = self.forge.shards > 1;
        let fleet = Fleet::new(Instant::now(), connections, classes.rules.clone(), shard, several);
        let ways = Ways::new(shard, self.tcp.clone(), turns.wake.clone(), self.events.clone());
        let events = ShardEvents::new(self.events.clone(), shard);
        PlaneGear { shard, fleet, classes, forge: self.forge.clone(), ways, events }
    }

    fn links(&self, turns: &Turns) -> Result<Links, EngineError> {
        let ground = self.ground.clone();
        Links::new(&self.config.paths, self.classes.sockets(), &self.meters, ground, &turns.poller)
    }

    /// The shards beside the first.
    fn crew(&self, turns: &Turns, queues: Vec<Devices>) -> Result<(Crew<Word>, Inbox<Word>), EngineError> {
        let (first, inbox) = exchange(turns.wake.clone());
        let mut crew = Crew::new(first.clone(), || Word::Ended);
        for (shard, devices) in (1..).zip(queues) {
            let Some(member) = Member::of(shard, ClassId::DEFAULT) else { break };
            let mut turns = Turns::without_signals()?;
            let links = self.links(&turns)?;
            let policies = Policies::new(&self.config.links);
            let plane = Plane::new(self.gear(shard, &turns), links, policies, Some(devices), &turns)?;
            let (outbox, inbox) = exchange(turns.wake.clone());
            let joiner = Joiner { member, config: self.config.clone(), plane, inbox, first: first.clone() };
            crew.start(format!("shard {shard}"), outbox, move || joiner.run(&mut turns))?;
        }
        Ok((crew, inbox))
    }
}

/// The main thread.
pub(crate) struct Running {
    config: ClientConfig,
    origin: Origin<ClientOptions>,
    plane: Plane,
    pub(crate) crew: Crew<Word>,
    inbox: Inbox<Word>,
    /// Members that carry packets, and the largest they can (bytes).
    carrying: BTreeMap<Member, usize>,
    machine: Option<Machine>,
    proxy: Option<Proxy<RelayId, UdpId>>,
    host: Option<Host>,
    slow: Slow,
    events: EventSender,
    quotas: Quotas,
    pipes: AutoPipes,
    /// `None` where the server is an address.
    names: Option<Names>,
    up: bool,
    /// How often the session was resumed, as last reported.
    resumed: u32,
    mtu: u32,
    /// Who asks for the status, and for the flows.
    pub(crate) asking: Asking<Status, Status>,
    pub(crate) listing: Asking<FlowList, FlowList>,
}

impl Running {
    fn new(
        (config, origin): (ClientConfig, Origin<ClientOptions>),
        turns: &Turns,
        tls: Arc<rustls::ClientConfig>,
        Gear { machine, queues, ground, proxy, host, state_dir }: Gear,
        slow: Slow,
    ) -> Result<Self, EngineError> {
        let shards = queues.len().max(1) as u8;
        let mut queues = queues.into_iter();
        let devices = queues.next();
        let meters = Meters::default();
        let events = slow.events();
        let ground = Ground { events: events.clone(), ..ground };
        let classes = Classes::of(&config, devices.is_some());
        let mut links = Links::new(&config.paths, classes.sockets(), &meters, ground.clone(), &turns.poller)?;
        let quotas =
            Quotas::load(Instant::now(), state_dir.as_deref(), &config.name, meters.clone(), events.clone())?;
        let policies = Policies::new(&config.links);
        let max_udp_payload = links.max_payload();
        let secret = random::<32>()?;
        let setup = |cc| {
            let options = TransportOptions {
                cc,
                max_udp_payload,
                max_inside_tcp: INSIDE_TCP.max(max_udp_payload),
                ..TransportOptions::of_shards(shards)
            };
            ClientSetup::new(tls.clone(), &options, &secret)
        };
        let setups = Setups::try_new(setup)?;
        let [spread] = random::<1>()?;
        let tcp =
            slow.runtime().map(|runtime| Stable::new(&config, runtime.clone()).map(Arc::new)).transpose()?;
        let parts = Parts {
            ground,
            forge: Forge {
                tunnel: TunnelConfig {
                    carries: if devices.is_some() { Carries::Packets } else { Carries::Streams },
                    setup: setups.of(config.cc).clone(),
                    server_name: config.server.host.clone(),
                    authority: config.server.to_string(),
                    path: PATH.to_owned(),
                    token: config.bearer()?.map(|token| token.reveal().to_owned()),
                    class: None,
                    more_addresses: config.class_tuns().count(),
                    scheduler: config.scheduler,
                    fec: Fec::Off,
                    copies: 1,
                    lane: Rules {
                        mode: lane_of(config.lane, shards),
                        rules: config.lane_rules.iter().map(rule_of).collect(),
                    },
                    lane_secret: [u64::from_le_bytes(random::<8>()?), u64::from_le_bytes(random::<8>()?)],
                },
                setups,
                shards,
                steer: spread % (MAX_SHARDS - shards + 1),
            },
            classes,
            meters,
            config,
            tcp,
            events: events.clone(),
        };
        let gear = parts.gear(0, turns);
        let (crew, inbox) = parts.crew(turns, queues.collect())?;
        Ok(Self {
            plane: Plane::new(gear, links, policies, devices, turns)?,
            quotas,
            pipes: AutoPipes::new(Instant::now(), events.clone()),
            crew,
            inbox,
            carrying: BTreeMap::new(),
            machine,
            proxy,
            host,
            slow,
            events,
            names: parts.config.server.ip().is_none().then(Names::default),
            up: false,
            resumed: 0,
            mtu: 1280,
            asking: Asking::default(),
            listing: Asking::default(),
            config: parts.config,
            origin,
        })
    }

    fn run(&mut self, turns: &mut Turns) -> Result<(), EngineError> {
        let now = Instant::now();
        match self.config.server.ip() {
            Some(ip) => {
                self.set_remotes(turns, now, vec![SocketAddr::new(ip, self.config.server.port)])?;
            }
            None => self.set_remotes(turns, now, Vec::new())?,
        }
        for (_, link) in self.plane.links.uplinks().filter(|(_, link)| link.remote.is_none()) {
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
            let asking = self.asking.poll_timeout().into_iter().chain(self.listing.poll_timeout()).min();
            let names = self.names.as_ref().and_then(Names::poll_timeout);
            let quotas = Some(self.quotas.poll_timeout());
            let pipes = Some(self.pipes.poll_timeout());
            let proxy = self.proxy.as_ref().and_then(Proxy::poll_timeout);
            let deadline = [busy, self.plane.poll_timeout(turn.now), names, asking, quotas, pipes, proxy];
            turns.next(deadline.into_iter().flatten().min(), &mut turn)?;
            let machine = &mut self.machine;
            self.plane.take(turns, &turn, &mut |name| prepare(machine, name))?;
            self.serve_apps(turns, &turn);
            if let Some(machine) = self.machine.as_mut()
                && turn.ready.iter().any(|event| event.token == MONITOR)
            {
                machine.look_at_links();
            }
            if turn.ready.iter().any(|event| event.token == SIGNAL)
                && let Some(told) = turns.told()
            {
                match told {
                    Told::End(signal) => {
                        self.events.report(end_event(signal));
                        return Ok(());
                    }
                    Told::Reload => drop(self.reload(turns, turn.now)),
                }
            }
            if self.obey(turns, turn.now)? {
                return Ok(());
            }
            if self.words(turns)? {
                // The reason comes out when the threads are joined.
                return Ok(());
            }
            self.messages(turns, turn.now)?;
            if turn.now >= self.quotas.poll_timeout() {
                self.look_at_quotas(turn.now);
            }
            if turn.now >= self.pipes.poll_timeout() {
                self.look_at_pipes(turn.now);
            }
            self.answer(turn.now);
        }
    }

    /// Has the server's name resolved, again and again while the server is not reached.
    fn look_at_names(&mut self, now: Instant) {
        let reached = self.plane.fleet.home_ref().reaches_server();
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
        self.crew.tell(|| Word::Remotes(remotes.clone()));
        let machine = &mut self.machine;
        self.plane.set_remotes(turns, now, remotes, &mut |name| prepare(machine, name))
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
        let Some(proxy) = &mut self.proxy else { return };
        let apps = &mut Apps(self.plane.fleet.home());
        for event in turn.ready.iter().filter(|event| event.token >= PROXY) {
            proxy.ready(turn.now, &turns.poller, apps, *event);
        }
        if proxy.poll_timeout().is_some_and(|at| at <= turn.now) {
            proxy.handle_timeout(turn.now, &turns.poller, apps);
        }
    }

    /// What the other shards say; whether one of them has ended.
    fn words(&mut self, turns: &Turns) -> Result<bool, EngineError> {
        let mut ended = false;
        while let Some(word) = self.inbox.word() {
            match word {
                Word::Carries(member, mtu) => {
                    match mtu {
                        Some(mtu) => self.carrying.insert(member, mtu),
                        None => self.carrying.remove(&member),
                    };
                    if mtu.is_some() {
                        let (shard, reason) = (member.shard(), "".into());
                        self.events.report(Event::ShardChanged { shard, connected: true, reason });
                    }
                    self.attach(turns)?;
                    self.configure()?;
                    self.share_links();
                }
                Word::Reported(round, report) => self.asking.report(round, *report),
                Word::Listed(round, list) => self.listing.report(round, list),
                Word::Ended => ended = true,
                Word::Remotes(_)
                | Word::Join(_)
                | Word::Policies(_)
                | Word::Classes(_)
                | Word::Report(_)
                | Word::List(_)
                | Word::End => {}
            }
        }
        Ok(ended)
    }

    /// While this shard has no connection and another has, all flows go there.
    fn attach(&mut self, turns: &Turns) -> Result<(), EngineError> {
        self.plane.attach(turns, self.up || self.carrying.is_empty())
    }

    fn messages(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        while let Some(message) = self.slow.next() {
            match message {
                Message::Asked(question) => answers::of_client(self, turns, now, question)?,
                Message::Named(address, name) => {
                    if let Some(name) = name {
                        self.pipes.named(now, address, &name);
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
    pub(crate) fn reload(&mut self, turns: &Turns, now: Instant) -> Result<Reloaded, String> {
        let new = self.origin.load().map_err(|error| error.to_string());
        let reloaded = new.map(|new| self.config.take_over(new));
        self.events.report(reload_event(&reloaded));
        let mut policies = self.plane.policies.clone();
        if reloaded.is_ok() && policies.configure(&self.config.links) {
            self.set_policies(now, policies);
            self.look_at_quotas(now);
        }
        if reloaded.as_ref().is_ok_and(|reloaded| reloaded.classes) {
            self.crew.tell(|| Word::Classes(Box::new(self.config.clone())));
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
        let known = || self.plane.links.uplinks().map(|(_, link)| link.name.as_str());
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
            self.quotas.reset(name);
        }
        self.set_policies(now, policies);
        self.look_at_quotas(now);
        let status = self.status(now);
        status.links.into_iter().find(|link| link.name == name).ok_or_else(|| format!("`{name}` is gone"))
    }

    fn set_policies(&mut self, now: Instant, policies: Policies) {
        self.crew.tell(|| Word::Policies(Box::new(policies.clone())));
        self.plane.set_policies(now, policies);
    }

    fn look_at_quotas(&mut self, now: Instant) {
        let mut policies = self.plane.policies.clone();
        let names = self.plane.links.uplinks().map(|(_, link)| link.name.as_str());
        if self.quotas.look(now, &mut policies, names) {
            self.set_policies(now, policies);
        }
    }

    fn look_at_pipes(&mut self, now: Instant) {
        let mut policies = self.plane.policies.clone();
        let home = self.plane.fleet.home();
        let paths = || home.report(now).paths;
        let (news, wanted) = self.pipes.look(now, &mut policies, &self.plane.links, paths);
        wanted.into_iter().for_each(|address| self.slow.name(address));
        if news {
            self.set_policies(now, policies);
        }
    }

    /// What a link may carry is for all connections together.
    fn share_links(&mut self) {
        let mut policies = self.plane.policies.clone();
        if policies.set_shares(1 + self.carrying.len()) {
            self.set_policies(Instant::now(), policies);
        }
    }

    /// What this shard alone knows.
    pub(crate) fn status(&mut self, now: Instant) -> Status {
        let mut status = self.plane.status(now, &self.config, Member::HOME);
        for link in &mut status.links {
            link.quota_used_bytes = link.quota_bytes.map(|_| self.quotas.used(&link.name));
            self.pipes.explain(link);
        }
        status.notes.extend(self.config.note());
        status.notes.extend(self.machine.as_ref().and_then(|machine| machine.leak.clone()));
        status
    }

    /// The flows of this shard alone: those of the TUN or of the proxies.
    pub(crate) fn flows(&self, now: Instant) -> FlowList {
        match &self.proxy {
            Some(proxy) => flows::of_connections(now, Role::Client, proxy.flows()),
            None => self.plane.flows(now, &self.config),
        }
    }

    /// Answers who asked, once every shard has reported.
    fn answer(&mut self, now: Instant) {
        let all = self.crew.len() + 1;
        self.asking.answer(now, all, |mut reports| {
            // This shard has reported first.
            let members = reports.split_off(1);
            let mut status = reports.remove(0);
            for report in members {
                status::add_member(&mut status, report);
            }
            status
        });
        self.listing.answer(now, all, |lists| {
            let mut all = FlowList::new(Role::Client);
            for list in lists {
                all.add(list);
            }
            all
        });
    }

    /// Acts on what has happened; whether anything has to streams, which then may have something to send.
    pub(crate) fn apply_events(&mut self, turns: &Turns, now: Instant) -> Result<bool, EngineError> {
        let mut streams = false;
        while let Some((flow, payload)) = self.plane.fleet.home().poll_udp() {
            if let Some(proxy) = &mut self.proxy {
                proxy.payload(now, flow, &payload);
            }
        }
        while let Some(event) = self.plane.fleet.poll_event(now) {
            let event = match apps::news(event) {
                Ok(news) => {
                    streams = true;
                    if let Some(proxy) = &mut self.proxy {
                        proxy.handle(now, &turns.poller, &mut Apps(self.plane.fleet.home()), news);
                    }
                    continue;
                }
                Err(event) => event,
            };
            match event {
                ClientEvent::Mtu(mtu) => {
                    self.mtu = mtu as u32;
                    self.events.report(Event::MtuChanged { mtu: mtu as u64 });
                    self.configure()?;
                }
                ClientEvent::Up(assignment) => {
                    self.report_connected(&assignment);
                    self.up = true;
                    self.attach(turns)?;
                    self.assign(assignment);
                    self.configure()?;
                    if let Some(machine) = &mut self.machine {
                        machine.share(&self.config)?;
                    }
                }
                ClientEvent::Changed(assignment) => {
                    let addresses = assignment.addresses.clone();
                    self.events.report(Event::AddressesChanged { addresses });
                    self.assign(assignment);
                    self.configure()?;
                }
                ClientEvent::Udp(flow, news) => {
                    if let (Some(proxy), UdpNews::Refused(_) | UdpNews::Closed) = (&mut self.proxy, news) {
                        proxy.flow_over(now, flow, news != UdpNews::Closed);
                    }
                }
                ClientEvent::Members { secret, .. } => self.crew.tell(|| Word::Join(secret.clone())),
                ClientEvent::Down(reason) => {
                    self.events.report(Event::Disconnected { reason: reason.as_str().into() });
                    self.up = false;
                    self.attach(turns)?;
                    if let Some(host) = &mut self.host {
                        host.down(reason);
                    }
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
        let resumed = self.plane.fleet.home_ref().resumed();
        let is_resumed = std::mem::replace(&mut self.resumed, resumed) != resumed;
        self.events.report(Event::Connected {
            server: self.config.server.to_string().into(),
            addresses: assignment.addresses.clone(),
            resumed: is_resumed,
        });
    }

    fn assign(&mut self, assignment: Assignment) {
        self.plane.assign(&assignment);
        if let Some(machine) = &mut self.machine {
            machine.assign(&self.config, assignment);
        } else if let Some(host) = &mut self.host {
            host.assignment = Some(assignment);
        }
    }

    fn configure(&mut self) -> Result<(), EngineError> {
        // Any packet may meet any shard.
        let mtu = self.carrying.values().fold(self.mtu, |mtu, other| mtu.min(*other as u32));
        if let Some(host) = &mut self.host {
            host.configure(mtu);
        }
        self.machine.as_mut().map_or(Ok(()), |machine| machine.configure(&self.config, mtu))
    }

    /// Says good-bye to the server and takes back what was changed.
    fn end(mut self) -> Result<(), EngineError> {
        let crew = self.crew.end(|| Word::End);
        if let Some(proxy) = &mut self.proxy {
            proxy.end();
        }
        self.plane.end();
        let mut policies = self.plane.policies.clone();
        let names = self.plane.links.uplinks().map(|(_, link)| link.name.as_str());
        self.quotas.look(Instant::now(), &mut policies, names);
        self.quotas.save();
        self.machine.map_or(Ok(()), Machine::end).and(crew)
    }
}

fn prepare(machine: &mut Option<Machine>, name: &str) {
    if let Some(machine) = machine {
        machine.prepare_link(name);
    }
}

fn rule_of(rule: &LaneRule) -> Rule {
    let ports = rule.ports.iter().map(|ports| ports.range());
    Rule { to: rule.to.clone(), ports: ports.collect(), streams: rule.streams }
}

/// Random bytes for secrets.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], EngineError> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| EngineError::io("get random numbers")(std::io::Error::other("the generator failed")))?;
    Ok(bytes)
}
