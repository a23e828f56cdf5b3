//! A running server.
//!
//! Its shards are threads that share nothing on the way of a packet. The first is the main thread,
//! which also has the signals, the local API and what is changed on the machine.

mod events;
mod handover;
mod machine;
mod plane;
mod sockets;
mod streams;
mod tun_queues;

use std::{path::Path, sync::Arc, time::Instant};

use mpvpn_control::{
    access::Access,
    api,
    auth::Authenticator,
    config::{
        ConfigSource, LimitRule, Nat as NatOption, ReloadReport, Rights, ServerConfig, ServerMode,
        ServerOptions, Tcp,
    },
    credentials::{Credentials, first_start_message, guess_address},
    events::{Event, EventSender},
    metrics,
    status::Role,
    tls,
};
use mpvpn_os::{UdpOptions, UndoJournal, netlink::Netlink, privilege, udp::bind_reuseport_group, undo};
use mpvpn_quic::{ServerSetup, Shard, TransportOptions};
use mpvpn_tunnel::{Authenticate, ClassLimits, Registry, Server, ServerConfig as TunnelConfig, TunnelMode};

use crate::{
    EngineError, answers,
    client::random,
    egress::{Budget, Egress, EgressSetup, addresses_of_this_machine},
    front::{Front, Site, fronted::Fronted},
    links::{IPV4_UDP, LARGEST_PAYLOAD, largest_payload},
    qlog::Qlog,
    shards::News,
    slow::{Message, Offers, Slow},
    status,
    turn::{Told, Turn, Turns, end_event, reload_event},
    wire::{SOCKET_BUFFER, Wire},
};
use handover::handovers;
use machine::Machine;
use plane::{FirstShard, Plane, ServerMessage};
use sockets::{Listening, Sockets};
use tun_queues::TunQueues;

/// What this process may do.
pub fn rights() -> Rights {
    Rights { network: privilege::has_net_admin(), port_443: privilege::may_bind(443) }
}

/// Serves until told to stop.
///
/// # Errors
/// If it cannot be started.
pub fn run(config: ServerConfig, origin: ConfigSource<ServerOptions>) -> Result<(), EngineError> {
    let mut turns = Turns::new()?;
    let credentials = Credentials::load(&config)?;
    let api = api::Server::bind(&config.api_socket)?;
    let metrics = config.metrics.map(metrics::Server::bind).transpose()?;
    // A TUN of that name, or what a killed process left of it, matters before anything else is tried.
    let open = || UndoJournal::open(Path::new(undo::DEFAULT_FOLDER), &config.tun_name);
    let undo = config.service.has_tun().then(open).transpose()?;
    let shards = config.shards.count(auto_shards());
    let sockets = listen(&config, shards)?;
    let (site, fronted) = (Site::new(&config.site)?, Fronted::default());
    let front = || Front::bind(&config, &credentials, site.clone(), &fronted);
    let front = (config.tcp == Tcp::On).then(front).transpose()?;
    let slow = Slow::start(Offers { api: Some(api), metrics, front }, None, turns.wake.clone())?;
    let guess = guess_address(&config.listen);
    let message = first_start_message(&config, &credentials, guess);
    let registry = Registry::new(config.subnet, config.subnet6, config.max_clients as usize);
    // Dropped after all that records, so that the ends of connections are written.
    let qlog = Qlog::start_if(config.qlog.as_ref(), Role::Server, &config.name)?;
    let setup = setup(&credentials, qlog.as_ref())?;
    let machine = undo.map(|undo| Machine::up(&config, undo, shards)).transpose()?;
    let (machine, queues) = machine.map_or((None, Vec::new()), |(machine, queues)| (Some(machine), queues));
    // Checked once here, so that a broken generator is an error at the start.
    random::<16>()?;

    let mut all_turns = vec![];
    for _ in 1..shards {
        all_turns.push(Turns::without_signals()?);
    }
    let mut all = FirstShard::new(Role::Server, turns.wake.clone());
    let others: Vec<_> = all_turns.iter().map(|turns| all.add(turns.wake.clone())).collect();
    let handovers = handovers(std::iter::once(&turns).chain(&all_turns).map(|turns| turns.wake.clone()));
    let queues: Vec<_> = queues.into_iter().map(Arc::new).collect();
    let tunnel = machine.as_ref().map_or(Vec::new(), |machine| machine.addresses().to_vec());
    let access = Access::new(config.access.clone(), tunnel);
    let has_tun = config.service.has_tun();
    let access = Arc::new(if has_tun { access.with_routes(config.routes.clone()) } else { access });
    let relays = Budget::for_relays(config.max_relays, config.max_user_relays);
    let names = Budget::for_names();
    let mut planes = Vec::new();
    for ((shard, sockets), handover) in Shard::all(shards).zip(sockets).zip(handovers) {
        let users = credentials.authenticator.clone();
        let tunnel = tunnel_config(&config, setup.clone(), users, site.clone());
        let server = Server::shard(tunnel, registry.clone(), shard)?;
        let turns = match shard.index() {
            0 => &turns,
            index => &all_turns[usize::from(index) - 1],
        };
        let egress = Egress::new(
            Instant::now(),
            EgressSetup {
                access: access.clone(),
                addresses: addresses_of_this_machine()?,
                asker: slow.names().asker(turns.wake.clone()),
                relays: relays.clone(),
                names: names.clone(),
            },
        );
        let egress = egress.map_err(EngineError::Addresses)?;
        planes.push(Plane {
            server,
            sockets: Sockets::new(sockets, &turns.poller)?,
            tun: TunQueues::new(queues.clone(), shard.index(), &turns.poller)?,
            egress,
            handover,
            shards: all.outboxes(),
            departed: Vec::new(),
            events: slow.events(),
        });
    }
    let first = planes.remove(0);
    for address in first.sockets.addresses() {
        tracing::info!(%address, shards, tcp = %config.tcp, "listening");
    }
    if let (ServerMode::Unprivileged, Some(note)) = (config.service, config.service.note()) {
        tracing::warn!("this server {note}");
    }
    for (((shard, plane), mut turns), other) in (1..).zip(planes).zip(all_turns).zip(others) {
        all.start(shard, move || plane.run(&other, &mut turns))?;
    }
    println!("{message}");
    let mut running = Running::new((config, origin), (first, all), registry, machine, (slow, fronted));
    let result = running.run(&mut turns);
    let end = running.end();
    result.and(end)
}

/// Threads that `auto` means: one a processor that this process may use. With two, both are busy already: with
/// the traffic's own programs and the kernel.
fn auto_shards() -> usize {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 | 2 => 1,
        cores => cores,
    }
}

/// The sockets of each shard, one an address.
fn listen(config: &ServerConfig, shards: u8) -> Result<Vec<Vec<Listening>>, EngineError> {
    let mut all: Vec<Vec<Listening>> = (0..shards).map(|_| Vec::new()).collect();
    let v4 = config.listen.iter().any(std::net::SocketAddr::is_ipv4);
    for address in &config.listen {
        let options = UdpOptions {
            v6only: v4,
            recv_buffer: Some(SOCKET_BUFFER),
            send_buffer: Some(SOCKET_BUFFER),
            ..UdpOptions::new(*address)
        };
        for (sockets, socket) in all.iter_mut().zip(bind_reuseport_group(&options, shards)?) {
            let bound = socket.local_addr().map_err(EngineError::io("look at a socket"))?;
            sockets.push(Listening { bound, wire: Wire::new(socket) });
        }
    }
    Ok(all)
}

fn setup(credentials: &Credentials, qlog: Option<&Qlog>) -> Result<ServerSetup, EngineError> {
    let tls = Arc::new(tls::server_config(&credentials.identity, &credentials.others, &[b"h3"])?);
    // A server does not know its clients' links: each client says what it can take. That may be what it takes inside TCP.
    let links = Netlink::open()?.links()?.into_iter().filter(|link| link.up && !link.loopback);
    let options = TransportOptions {
        max_udp_payload: links
            .map(|link| largest_payload(link.mtu, IPV4_UDP))
            .max()
            .unwrap_or(LARGEST_PAYLOAD),
        max_inside_tcp: LARGEST_PAYLOAD,
        qlog: qlog.map(Qlog::sink),
        ..TransportOptions::default()
    };
    let secret: [u8; 32] = credentials.identity.derive_secret("quic connections");
    Ok(ServerSetup::new(tls, &options, &secret)?)
}

struct Users {
    authenticator: Authenticator,
    limits: Vec<LimitRule>,
}

impl Authenticate for Users {
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String> {
        let user = self.authenticator.check(authorization);
        user.map(|user| user.name).map_err(|denied| denied.to_string())
    }

    fn limits(&self, user: &str) -> ClassLimits {
        let of = |rule: &LimitRule| ClassLimits {
            max_classes: rule.max_classes,
            max_priority_share: rule.max_priority,
        };
        LimitRule::of(&self.limits, user).map_or_else(ClassLimits::default, of)
    }
}

fn tunnel_config(
    config: &ServerConfig,
    setup: ServerSetup,
    users: Authenticator,
    site: Site,
) -> TunnelConfig {
    TunnelConfig {
        setup,
        mode: if config.service.has_tun() { TunnelMode::Packets } else { TunnelMode::RelaysOnly },
        subnet: config.subnet,
        subnet6: config.subnet6,
        routes: config.routes.clone(),
        dns: config.dns.clone(),
        offers_streams: !config.service.has_tun() || config.nat == NatOption::On,
        site: Box::new(move |method| site.over_http3(method)),
        hide_wrong_credentials: config.site.hide,
        auth: Box::new(Users { authenticator: users, limits: config.limits.clone() }),
        max_clients: config.max_clients as usize,
        new_secret: Box::new(|| random::<16>().unwrap_or_else(|error| panic!("{error}"))),
    }
}

/// The main thread.
pub(crate) struct Running {
    config: ServerConfig,
    origin: ConfigSource<ServerOptions>,
    pub(crate) plane: Plane,
    pub(crate) shards: FirstShard,
    registry: Registry,
    /// `None` without a TUN.
    machine: Option<Machine>,
    slow: Slow,
    events: EventSender,
    /// Who is behind connections that come from this process.
    fronted: Fronted,
    started: Instant,
}

impl Running {
    fn new(
        (config, origin): (ServerConfig, ConfigSource<ServerOptions>),
        (plane, shards): (Plane, FirstShard),
        registry: Registry,
        machine: Option<Machine>,
        (slow, fronted): (Slow, Fronted),
    ) -> Self {
        let (started, events) = (Instant::now(), slow.events());
        Self { config, origin, plane, shards, registry, machine, slow, events, fronted, started }
    }

    fn run(&mut self, turns: &mut Turns) -> Result<(), EngineError> {
        let mut turn = Turn::new();
        loop {
            if self.plane.transmit(turns, turn.now).is_some() {
                self.follow_mtu();
            }
            let deadline = [self.plane.poll_timeout(), self.shards.poll_timeout()];
            turns.next(deadline.into_iter().flatten().min(), &mut turn)?;
            self.plane.take(turns, &turn);
            match turns.told(&turn) {
                Some(Told::End(signal)) => {
                    self.events.report(end_event(signal));
                    return Ok(());
                }
                Some(Told::Reload) => drop(self.reload()),
                None => {}
            }
            if self.hear_shards(turn.now) {
                // The reason comes out when the threads are joined.
                return Ok(());
            }
            self.messages(turn.now);
            self.answer(turn.now);
        }
    }

    /// Acts on what the other shards say; whether one of them has ended.
    fn hear_shards(&mut self, now: Instant) -> bool {
        let mut ended = false;
        while let Some(news) = self.shards.next() {
            match news {
                News::Specific(ServerMessage::MtuChanged) => self.follow_mtu(),
                News::Specific(ServerMessage::Replaced(seat)) => self.plane.server.close_replaced(now, seat),
                News::Ended => ended = true,
            }
        }
        ended
    }

    /// Reads the configuration again, and says what of it counts after a restart.
    pub(crate) fn reload(&self) -> Result<ReloadReport, String> {
        let reloaded =
            self.origin.load().map(|new| self.config.compare(&new)).map_err(|error| error.to_string());
        self.events.report(reload_event(&reloaded));
        reloaded
    }

    fn messages(&mut self, now: Instant) {
        while let Some(message) = self.slow.next() {
            match message {
                Message::Asked(question) => answers::of_server(self, now, question),
                Message::Resolved(_) | Message::Named(..) => {}
            }
        }
    }

    /// Answers who asked, once every shard has reported.
    fn answer(&mut self, now: Instant) {
        let (config, plane, started, fronted) = (&self.config, &self.plane, self.started, &self.fronted);
        let addresses = self.machine.as_ref().map_or(&[][..], Machine::addresses);
        self.shards.answer(now, |reports| {
            let listen: Vec<_> = plane.sockets.addresses().collect();
            let lost = reports.iter().map(|report| report.lost).sum();
            let streams: usize = reports.iter().map(|report| report.streams).sum();
            let udp: usize = reports.iter().map(|report| report.udp).sum();
            let (sessions, departed): (Vec<_>, Vec<_>) =
                reports.into_iter().map(|report| (report.sessions, report.departed)).unzip();
            let (sessions, departed) = (sessions.concat(), departed.concat());
            let mut status =
                status::of_server(config, addresses, &listen, &sessions, &departed, now, started);
            status::count_lost(&mut status, lost);
            for path in status.clients.iter_mut().flat_map(|client| &mut client.paths) {
                path.remote = fronted.client_of(path.remote);
            }
            (status.flows.stream, status.flows.udp) = (streams as u64, udp as u64);
            status
        });
    }

    fn follow_mtu(&mut self) {
        if let (Some(mtu), Some(machine)) = (self.registry.mtu(), &mut self.machine) {
            match machine.set_mtu(mtu) {
                Ok(()) => self.events.report(Event::MtuChanged { mtu: mtu as u64 }),
                Err(error) => tracing::warn!(mtu, %error, "cannot set the MTU of the TUN"),
            }
        }
    }

    /// Says good-bye to the clients and takes back what was changed.
    fn end(mut self) -> Result<(), EngineError> {
        self.plane.end();
        let shards = self.shards.end();
        self.machine.map_or(Ok(()), Machine::end).and(shards)
    }
}
