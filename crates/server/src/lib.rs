//! A running server.
//!
//! In: a checked configuration. Out: a server ([`run`]) that ends on SIGINT, SIGTERM, on SIGHUP in a
//! terminal, or on an error that it cannot recover from. Always holds: changes to the machine are undone
//! however the process ends; after SIGKILL, the next start undoes them.
//!
//! Its shards are threads that share nothing on a packet's way. Shard 0 is the main thread, which also
//! handles signals and the local API, and changes the machine.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

#[cfg(test)]
mod access_tests;
mod answers;
mod client_relays;
mod data_plane;
mod events;
mod forwards;
mod handover;
mod leases;
mod machine;
mod names;
mod overview;
mod packet_filter;
mod reload;
mod resolver;
mod responder;
mod sockets;
mod status;
mod store;
mod tun_queues;
mod users;
mod visits;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    pin::Pin,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime},
};

use mpvpn_config::{ConfigSource, Nat as NatOption, Rights, ServerConfig, ServerMode, ServerOptions, Tcp};
use mpvpn_confine as confine;
use mpvpn_dashboard::Dashboard;
use mpvpn_egress::{Egress, EgressSetup, local_address_reader, lookup_limiter, relay_limiter};
use mpvpn_error::RunError;
use mpvpn_https::{HttpsServer, Site, acme::Acme, loopback_clients::LoopbackClients};
use mpvpn_identity::random;
use mpvpn_input::{role::Role, shared::Shared, short_text::ShortText};
use mpvpn_os::{
    UdpOptions, UndoJournal, memory::heap_in_use, netlink::Netlink, poll, privilege,
    udp::bind_reuseport_group, undo, usage::available_memory,
};
use mpvpn_qlog::Qlog;
use mpvpn_quic::{ServerSetup, Shard, TransportOptions};
use mpvpn_report::sites;
use mpvpn_sockets::{
    packet_io::{BufferedUdpSocket, SOCKET_BUFFER_BYTES},
    payload::{IPV4_UDP_HEADER_BYTES, MAX_UDP_PAYLOAD, max_udp_payload},
};
use mpvpn_status::{
    AnnouncedNetwork, Class, Status,
    events::{Event, EventSender},
    reload_report::LockoutPolicy,
};
use mpvpn_threads::{
    event_loop::{self, EventLoop, Iteration, SignalRequest, signal_event},
    service_manager::ServiceManager,
    shards::ShardEvent,
    slow_thread::{Message, OwnServices, Services, SlowThread},
    watched_files::WatchedFiles,
};
use mpvpn_tunnel::{
    CertificateId, Registry, Server, ServerConfig as TunnelConfig, SessionReport, TunnelMode,
};
use mpvpn_types::ByteSize;
use mpvpn_users::{
    backup::RunningLock,
    client_certificates,
    credentials::{Credentials, Reader, first_start_message, guess_address},
};
use tokio::sync::watch;

use crate::overview::overview;
use data_plane::{DataPlane, FirstShard, ServerMessage, ShardReport};
use events::Refusals;
use forwards::ForwardTable;
use handover::handovers;
use leases::LeaseKeeper;
use machine::Machine;
use names::TunnelNames;
use packet_filter::UserProfiles;
use reload::Reloadable;
use sockets::{ListeningSocket, Sockets};
use store::FileStore;
use tun_queues::TunQueues;
use users::{UserChange, UserChecks, UserList};
use visits::Visits;

/// The share of the memory of a server that may be allocated: half. Larger: no memory is left for what the
/// allocator has freed, and for other sockets of the kernel; smaller: transfers of many clients over long
/// round trips are slower. Chosen.
const ALLOCATED_SHARE: u64 = 2;
/// How often the allocated memory is looked at. Longer: a client takes more of it before it is noticed;
/// shorter: processor time. Chosen.
const MEMORY_LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// A look takes at most this share (one of so many) of the time. Chosen.
const MEMORY_LOOK_SHARE: u32 = 100;

/// The rights of this process.
pub fn rights() -> Rights {
    Rights { network: privilege::has_net_admin(), port_443: privilege::may_bind(443) }
}

/// Serves until a signal ends the process.
///
/// # Errors
/// If the server cannot start.
pub fn run(config: ServerConfig, origin: ConfigSource<ServerOptions>) -> Result<(), RunError> {
    let mut event_loop = EventLoop::new()?;
    let mut service_manager = ServiceManager::of_process();
    let credentials = Credentials::load(&config)?;
    let api = mpvpn_api::Server::bind(&config.api_socket)?;
    let metrics = config
        .metrics
        .map(|address| mpvpn_api::metrics::Server::bind(address, config.metrics_users))
        .transpose()?;
    let dashboard = Dashboard::of_server(&config, &credentials.certificates)?;
    // First: the journal may have changes of a killed process to undo, and another server may own this TUN
    // name.
    let open = || UndoJournal::open(Path::new(undo::DEFAULT_FOLDER), &config.tun_name);
    let undo = config.service.has_tun().then(open).transpose()?;
    let shards = config.shards.count(default_shard_count());
    let sockets = bind_sockets(&config, shards)?;
    let (site, loopback_clients) = (Site::new(&config.site)?, LoopbackClients::default());
    let access_ends = watch::Sender::new(());
    let https_server =
        || HttpsServer::bind(&config, &credentials, site.clone(), &loopback_clients, &access_ends);
    let https_server = (config.tcp == Tcp::On).then(https_server).transpose()?;
    let acme = Acme::of(&config, &credentials.certificates)?;
    // Nothing is restored while it is held. A folder that cannot be used is said where it is needed.
    let running_lock = RunningLock::hold(&config.state_dir).ok();
    let store = FileStore::new(&config);
    let user_list = UserList::open(store.clone(), &credentials.authenticator)?;
    // Where a folder does not exist yet, files in it are read again by command only.
    let files = WatchedFiles::new(reload::files_to_watch(&config, origin.file_to_watch())).ok();
    let memory = config.max_memory.map_or_else(available_memory, ByteSize::bytes);
    forwards::check(&config.forwards)?;
    confine::server(&config, origin.file())?;
    let slow = SlowThread::start(
        Services { api: Some(api), metrics, dashboard, own: Some(own_services(https_server, acme)) },
        None,
        event_loop.wake.clone(),
    )?;
    let address = guess_address(&config.listen);
    credentials.note_pins(&config, address);
    let message = first_start_message(&config, &credentials, address, Reader::of_stdout());
    let registry = Registry::new(config.subnet, config.subnet6, config.max_clients as usize);
    registry.set_max_held(usize::try_from(memory / ALLOCATED_SHARE).unwrap_or(usize::MAX));
    let leases = keep_leases(&config, store, &registry, user_list.as_ref())?;
    // Dropped after everything that records events, so that the last events are written.
    let qlog = Qlog::start_if(config.qlog.as_ref(), Role::Server, &config.name)?;
    let setup = quic_setup(&credentials, qlog.as_ref())?.with_own_sockets(Arc::new(loopback_clients.clone()));
    let users = UserProfiles::new(&config.access);
    let has_rules_of_users = Arc::new(AtomicBool::new(config.service.has_tun() && users.differ()));
    let limits = Shared::from(config.limits.clone());
    let machine = undo.map(|undo| Machine::up(&config, &users.profiles, undo, shards)).transpose()?;
    let (mut machine, queues) =
        machine.map_or((None, Vec::new()), |(machine, queues)| (Some(machine), queues));
    // A broken random generator must be an error at the start.
    random::<16>().map_err(RunError::io("get random numbers"))?;

    let mut other_loops = vec![];
    for _ in 1..shards {
        other_loops.push(EventLoop::without_signals()?);
    }
    let mut first_shard = FirstShard::new(Role::Server, event_loop.wake.clone());
    let others: Vec<_> =
        other_loops.iter().map(|event_loop| first_shard.add(event_loop.wake.clone())).collect();
    let handovers =
        handovers(std::iter::once(&event_loop).chain(&other_loops).map(|event_loop| event_loop.wake.clone()));
    let forwards = ForwardTable::new(&config.tun_name, &config.forwards);
    registry.set_forwarded_users(forwards::users(&config.forwards));
    let start_filter = |machine: &mut Machine| {
        machine.start_filter((users, forwards.clone()), &registry, first_shard.outboxes())
    };
    let filter = machine.as_mut().map(start_filter).transpose()?;
    let queues: Vec<_> = queues.into_iter().map(Arc::new).collect();
    let tunnel = machine.as_ref().map_or(Vec::new(), |machine| machine.addresses().to_vec());
    let names = TunnelNames::new(&config, &registry);
    let own_resolver = resolver::start(&config.dns, &tunnel, (&registry, names.as_ref()), slow.runtime());
    let resolvers = resolver::suggested(&config.dns, &own_resolver);
    let access = Arc::new(reload::access(&config, tunnel));
    let relays = relay_limiter(config.max_relays, config.max_user_relays);
    let lookups = lookup_limiter();
    let started = Instant::now();
    let mut data_planes = Vec::new();
    for ((shard, sockets), handover) in Shard::all(shards).zip(sockets).zip(handovers) {
        let users = UserChecks {
            authenticator: credentials.authenticator.clone(),
            limits: limits.clone(),
            has_rules_of_users: Arc::clone(&has_rules_of_users),
        };
        let tunnel = tunnel_config(&config, setup.clone(), (users, resolvers.clone()));
        let server = Server::shard(tunnel, registry.clone(), shard);
        let event_loop = match shard.index() {
            0 => &event_loop,
            index => &other_loops[usize::from(index) - 1],
        };
        let egress = Egress::new(
            Instant::now(),
            EgressSetup {
                access: access.clone(),
                addresses: local_address_reader()?,
                resolver: slow.resolver().client(event_loop.wake.clone()),
                relays: relays.clone(),
                lookups: lookups.clone(),
            },
        );
        let egress = egress.map_err(RunError::Addresses)?;
        data_planes.push(DataPlane {
            server,
            sockets: Sockets::new(sockets, &event_loop.poller)?,
            tun: TunQueues::new(queues.clone(), shard.index(), &event_loop.poller)?,
            egress,
            visits: Visits::new(site.clone(), slow.runtime().cloned(), event_loop.wake.clone()),
            handover,
            filter: filter.clone(),
            shards: first_shard.outboxes(),
            departed: Vec::new(),
            departed_users: BTreeMap::new(),
            started,
            refusals: Refusals::default(),
            events: slow.events(),
        });
    }
    let first = data_planes.remove(0);
    for address in first.sockets.addresses() {
        tracing::info!(%address, shards, tcp = %config.tcp, "listening");
    }
    if let (ServerMode::Unprivileged, Some(note)) = (config.service, config.service.note()) {
        tracing::warn!("this server {note}");
    }
    for (((shard, data_plane), mut event_loop), other) in (1..).zip(data_planes).zip(other_loops).zip(others)
    {
        first_shard
            .start(shard, event_loop.activity.clone(), move || data_plane.run(&other, &mut event_loop))?;
    }
    println!("{message}");
    service_manager.watch("slow", || slow.show_activity());
    for (name, activity) in &first_shard.activities {
        service_manager.watch(name, || activity.clone());
    }
    let reloadable = Reloadable {
        certificates: credentials.certificates,
        client_ca: credentials.client_ca,
        site,
        limits,
        has_rules_of_users,
        responder: reload::responder(&config, machine.as_ref()),
        own_resolver,
        names,
        forwards,
        files,
        pending: None,
        later: Vec::new(),
    };
    let mut running = Running {
        config,
        origin,
        data_plane: first,
        shards: first_shard,
        registry,
        machine,
        events: slow.events(),
        slow,
        loopback_clients,
        access_ends,
        user_list: None,
        leases,
        reloadable,
        started,
        service_manager,
        next_memory_look: started,
        networks: Vec::new(),
    };
    running.watch_users(user_list, &event_loop)?;
    running.watch_configuration(&event_loop);
    let result = running.run(&mut event_loop);
    let end = running.end();
    drop(running_lock);
    result.and(end)
}

/// The services that the slow thread runs for a server alone: HTTPS over TCP, and orders of certificates.
fn own_services(https_server: Option<HttpsServer>, acme: Option<Acme>) -> OwnServices {
    let wait_for_close_frames = https_server.as_ref().map(HttpsServer::wait_for_close_frames);
    let run = |events| {
        let https_server = async move {
            if let Some(https_server) = https_server
                && let Err(error) = https_server.serve().await
            {
                tracing::warn!(%error, "the HTTPS server has ended");
            }
        };
        let acme = async move {
            if let Some(acme) = acme {
                acme.run(events).await;
            }
        };
        let both = async {
            tokio::join!(https_server, acme);
        };
        Box::pin(both) as Pin<Box<dyn Future<Output = ()>>>
    };
    let last = async move {
        if let Some(wait_for_close_frames) = wait_for_close_frames {
            wait_for_close_frames.await;
        }
    };
    OwnServices { run: Box::new(run), last: Box::pin(last) }
}

/// Restores the leases of earlier processes, and keeps them from now on; `None` where there are none.
fn keep_leases(
    config: &ServerConfig,
    store: FileStore,
    registry: &Registry,
    users: Option<&UserList>,
) -> Result<Option<LeaseKeeper>, RunError> {
    let now = Instant::now();
    if let Some(users) = users {
        // Leases of addresses outside of the pool are restored only where these belong to users.
        registry.set_fixed_addresses(users.fixed_addresses());
    }
    let is_known = |user: &str| users.is_none_or(|users| users.has(user));
    let is_kept =
        config.service.has_tun() && leases::restore(now, SystemTime::now(), &store, registry, is_known);
    is_kept.then(|| LeaseKeeper::start(now, registry.clone(), store)).transpose()
}

/// The number of shards for `auto`: one per processor of this process. With two processors one shard, because
/// the traffic's own programs and the kernel keep both busy.
fn default_shard_count() -> usize {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 | 2 => 1,
        cores => cores,
    }
}

/// The sockets of each shard, one per listening address.
fn bind_sockets(config: &ServerConfig, shards: u8) -> Result<Vec<Vec<ListeningSocket>>, RunError> {
    let mut all: Vec<Vec<ListeningSocket>> = (0..shards).map(|_| Vec::new()).collect();
    let v4 = config.listen.iter().any(std::net::SocketAddr::is_ipv4);
    for address in &config.listen {
        let options = UdpOptions {
            v6only: v4,
            recv_buffer: Some(SOCKET_BUFFER_BYTES),
            send_buffer: Some(SOCKET_BUFFER_BYTES),
            ..UdpOptions::new(*address)
        };
        for (sockets, socket) in all.iter_mut().zip(bind_reuseport_group(&options, shards)?) {
            let bound = socket.local_addr().map_err(RunError::io("look at a socket"))?;
            sockets.push(ListeningSocket { bound, socket: BufferedUdpSocket::new(socket) });
        }
    }
    Ok(all)
}

fn quic_setup(credentials: &Credentials, qlog: Option<&Qlog>) -> Result<ServerSetup, RunError> {
    let tls = Arc::new(credentials.server_tls(&[b"h3"])?);
    // The server does not know the clients' links; each client's transport parameter limits what it is sent.
    // Inside TCP that may be the maximum.
    let links = Netlink::open()?.links()?.into_iter().filter(|link| link.up && !link.loopback);
    let options = TransportOptions {
        max_udp_payload: links
            .map(|link| max_udp_payload(link.mtu, IPV4_UDP_HEADER_BYTES))
            .max()
            .unwrap_or(MAX_UDP_PAYLOAD),
        max_udp_payload_inside_tcp: MAX_UDP_PAYLOAD,
        qlog: qlog.map(Qlog::sink),
        ..TransportOptions::default()
    };
    let secret: [u8; 32] = credentials.identity.derive_secret("quic connections");
    Ok(ServerSetup::new(tls, &options, &secret)?)
}

fn tunnel_config(
    config: &ServerConfig,
    setup: ServerSetup,
    (users, resolvers): (UserChecks, Vec<IpAddr>),
) -> TunnelConfig {
    TunnelConfig {
        setup,
        mode: if config.service.has_tun() { TunnelMode::Packets } else { TunnelMode::RelaysOnly },
        subnet: config.subnet,
        subnet6: config.subnet6,
        routes: config.routes.clone(),
        dns: resolvers,
        dns_domain: config.dns_names.domain.clone(),
        offers_streams: !config.service.has_tun() || config.nat == NatOption::On,
        disabled_extensions: &[],
        hide_wrong_credentials: config.site.hide,
        auth: Box::new(users),
        max_clients: config.max_clients as usize,
        new_secret: Box::new(|| {
            random::<16>().unwrap_or_else(|error| panic!("cannot get random numbers: {error}"))
        }),
    }
}

/// The main thread's state.
pub(crate) struct Running {
    config: ServerConfig,
    origin: ConfigSource<ServerOptions>,
    pub(crate) data_plane: DataPlane,
    pub(crate) shards: FirstShard,
    registry: Registry,
    /// `None` without a TUN device.
    machine: Option<Machine>,
    slow: SlowThread,
    events: EventSender,
    /// The clients behind connections from this process.
    loopback_clients: LoopbackClients,
    /// Tells the TCP side that access of users or certificates has ended.
    access_ends: watch::Sender<()>,
    /// `None` without authentication.
    user_list: Option<UserList>,
    /// `None` without a TUN device.
    leases: Option<LeaseKeeper>,
    reloadable: Reloadable,
    started: Instant,
    service_manager: ServiceManager,
    next_memory_look: Instant,
    /// The networks behind clients, as last reported.
    networks: Vec<AnnouncedNetwork>,
}

impl Running {
    /// Acts on changes of these users from now on.
    fn watch_users(&mut self, mut list: Option<UserList>, event_loop: &EventLoop) -> Result<(), RunError> {
        if let Some(list) = &mut list {
            list.report_to(self.events.clone());
            let added = event_loop.poller.add(&*list, poll::FILES_TOKEN, poll::Interest::Read);
            added.map_err(RunError::io("watch a descriptor"))?;
        }
        self.user_list = list;
        self.update_addresses_of_users();
        self.update_accounts(Instant::now());
        Ok(())
    }

    /// Reads the users' file if it has changed, and ends what users without access have.
    fn update_users(&mut self, now: Instant, iteration: &Iteration) {
        let Some(list) = &mut self.user_list else { return };
        if iteration.ready.iter().any(|event| event.token == poll::FILES_TOKEN)
            && let Some(read) = list.read_if_changed(now, SystemTime::now())
        {
            self.on_users_read(now, read);
        }
        let expired = self.user_list.as_mut().and_then(|list| list.expire(now, SystemTime::now()));
        expired.into_iter().for_each(|ended| self.end_users(now, ended));
        let expired = self.user_list.as_ref().map(|list| list.take_expired_certificates(SystemTime::now()));
        self.end_certificates(now, expired.unwrap_or_default(), client_certificates::EXPIRED);
        let is_due = self.user_list.as_ref().is_some_and(|list| list.is_count_due(now));
        if is_due || self.registry.take_count_due() {
            self.count_quotas(now);
        }
    }

    /// Counts what users with quotas have carried, and ends what those have who used theirs up.
    fn count_quotas(&mut self, now: Instant) {
        let Some(list) = &mut self.user_list else { return };
        let ended = list.count(now, SystemTime::now(), &self.registry.take_carried());
        self.registry.set_count_limits(&list.count_limits(SystemTime::now()));
        ended.into_iter().for_each(|ended| self.end_users(now, ended));
    }

    /// Applies the rates of users, at all shards.
    fn update_accounts(&mut self, now: Instant) {
        let Some(list) = &self.user_list else { return };
        self.registry.set_accounts(now, &list.rates());
        self.registry.set_count_limits(&list.count_limits(SystemTime::now()));
        self.data_plane.server.update_accounts(now);
        self.shards.send(|| ServerMessage::AccountsChanged);
    }

    fn on_users_read(&mut self, now: Instant, read: Result<UserChange, String>) {
        match read {
            Ok(UserChange { count, ended, lost_access, revoked }) => {
                self.events.report(Event::UsersRead { users: count as u64, ended: lost_access as u64 });
                self.end_users(now, ended);
                self.end_certificates(now, revoked, client_certificates::REVOKED);
                self.update_addresses_of_users();
                if let Some(list) = &self.user_list {
                    self.registry.end_leases_of_unknown(|user| list.has(user));
                }
                self.update_accounts(now);
            }
            Err(reason) => self.events.report(Event::UsersRefused { reason: reason.as_str().into() }),
        }
    }

    /// Applies the fixed addresses of users, and the networks that may be behind their clients.
    fn update_addresses_of_users(&self) {
        if let Some(list) = &self.user_list {
            self.registry.set_fixed_addresses(list.fixed_addresses());
            let users = list.now();
            self.registry.allow_networks(|user| users.site_networks(user));
        }
    }

    /// Ends everything of users that have no access any more.
    fn end_users(&mut self, now: Instant, ended: BTreeMap<String, String>) {
        if ended.is_empty() {
            return;
        }
        let ended = Arc::new(ended);
        self.data_plane.server.end_users(now, &ended);
        self.shards.send(|| ServerMessage::UsersEnded(Arc::clone(&ended)));
        self.access_ends.send_replace(());
    }

    /// Ends everything that these certificates authenticated, which count no more.
    fn end_certificates(&mut self, now: Instant, ended: BTreeSet<CertificateId>, reason: &'static str) {
        if ended.is_empty() {
            return;
        }
        let ended = Arc::new(ended);
        self.data_plane.server.end_certificates(now, &ended, reason);
        self.shards.send(|| ServerMessage::CertificatesEnded(Arc::clone(&ended), reason));
        self.access_ends.send_replace(());
    }

    fn run(&mut self, event_loop: &mut EventLoop) -> Result<(), RunError> {
        self.service_manager.ready();
        let mut iteration = Iteration::first();
        loop {
            if self.data_plane.transmit(event_loop).is_some() {
                self.update_tun_mtu();
            }
            let files = self.reloadable.files.as_ref().and_then(WatchedFiles::poll_timeout);
            let deadlines = [
                self.data_plane.poll_timeout(),
                self.shards.poll_timeout(),
                self.user_list.as_ref().and_then(UserList::poll_timeout),
                files,
                self.leases.as_ref().and_then(LeaseKeeper::poll_timeout),
                self.service_manager.poll_timeout(),
            ];
            let max_delay = self.data_plane.server.max_coalescing_delay(iteration.now);
            event_loop.wait(deadlines.into_iter().flatten().min(), max_delay, &mut iteration)?;
            self.data_plane.handle_ready(event_loop, &iteration);
            match event_loop.signal_request(&iteration) {
                Some(SignalRequest::End(signal)) => {
                    self.events.report(signal_event(signal));
                    return Ok(());
                }
                Some(SignalRequest::Reload) => self.reload(iteration.now, LockoutPolicy::Keep, None),
                None => {}
            }
            if self.handle_shard_events(iteration.now) {
                // `end` returns the reason when it joins the threads.
                return Ok(());
            }
            if iteration.now >= self.next_memory_look {
                let begun = Instant::now();
                let allocated = usize::try_from(heap_in_use().unwrap_or(0)).unwrap_or(usize::MAX);
                // The allocator counts its free blocks one by one.
                let pause = MEMORY_LOOK_INTERVAL.max(begun.elapsed() * MEMORY_LOOK_SHARE);
                self.next_memory_look = iteration.now + pause;
                self.registry.process_bytes().on_measured(allocated);
            }
            self.update_users(iteration.now, &iteration);
            self.read_changed_files(iteration.now, &iteration);
            if let Some(leases) = &mut self.leases {
                leases.update(iteration.now);
            }
            self.handle_slow_thread_messages(iteration.now);
            self.answer_api(iteration.now);
            self.tell_service_manager(iteration.now);
        }
    }

    fn tell_service_manager(&mut self, now: Instant) {
        if self.service_manager.is_status_due(now) {
            let sessions = self.registry.sessions();
            self.service_manager.set_status(|| match sessions {
                0 => "no session".to_owned(),
                1 => "1 session".to_owned(),
                sessions => format!("{sessions} sessions"),
            });
        }
        self.service_manager.update(now);
    }

    /// Handles messages of the other shards. Returns whether a shard has ended.
    fn handle_shard_events(&mut self, now: Instant) -> bool {
        let mut ended = false;
        while let Some(news) = self.shards.next_event() {
            match news {
                ShardEvent::Specific(message) => match message {
                    ServerMessage::MtuChanged => self.update_tun_mtu(),
                    ServerMessage::CountDue => self.count_quotas(now),
                    ServerMessage::Replaced(seat) => self.data_plane.server.close_replaced(now, seat),
                    ServerMessage::Filtered(request) => self.data_plane.server.on_filtered(&request),
                    ServerMessage::RulesReplaced(replaced) => self.on_rules_replaced(now, replaced),
                    ServerMessage::SitesChanged => self.on_sites_changed(now),
                    // Sent by this shard, to the others.
                    ServerMessage::UsersEnded(_)
                    | ServerMessage::CertificatesEnded(..)
                    | ServerMessage::Reconfigured(_)
                    | ServerMessage::AccountsChanged => {}
                },
                ShardEvent::Ended => ended = true,
            }
        }
        ended
    }

    /// Takes the networks behind clients that are in force now.
    fn on_sites_changed(&mut self, now: Instant) {
        self.data_plane.server.update_sites(now);
        let networks = sites::of_server(&self.registry.sites());
        for one in networks.iter().filter(|one| !self.networks.contains(one)) {
            let (user, reason) = (one.user.as_deref().map(Into::into), ShortText::of(&one.reason));
            let (network, state) = (one.network, one.state);
            self.events.report(Event::NetworkChanged { user, network, state, reason });
        }
        self.networks = networks;
    }

    fn handle_slow_thread_messages(&mut self, now: Instant) {
        while let Some(message) = self.slow.next() {
            match message {
                Message::ApiRequest(question) => answers::answer_server_request(self, now, question),
                Message::Resolved(..) | Message::ReverseResolved(..) => {}
            }
        }
    }

    /// Answers requests for which all shards have reported.
    fn answer_api(&mut self, now: Instant) {
        let (config, data_plane, started, loopback_clients) =
            (&self.config, &self.data_plane, self.started, &self.loopback_clients);
        let (users, registry) = (self.user_list.as_ref(), &self.registry);
        let forwards = &self.reloadable.forwards;
        let addresses = self.machine.as_ref().map_or(&[][..], Machine::addresses);
        let take = |reports: &mut [ShardReport]| -> (Vec<SessionReport>, Vec<Class>) {
            let sessions =
                reports.iter_mut().flat_map(|report| std::mem::take(&mut report.sessions)).collect();
            (sessions, reports.iter_mut().flat_map(|report| std::mem::take(&mut report.departed)).collect())
        };
        let complete = |status: &mut Status, reports: &[ShardReport]| {
            status::add_lost_packets(status, reports.iter().map(|report| report.lost_packets).sum());
            status.flows.stream = reports.iter().map(|report| report.tcp_connections as u64).sum();
            status.flows.udp = reports.iter().map(|report| report.udp_flows as u64).sum();
            for path in status.clients.iter_mut().flat_map(|client| &mut client.paths) {
                path.remote = loopback_clients.client_address(path.remote);
            }
            (status.confinement, status.memory) = (confine::status(), event_loop::memory());
            status.notes.extend(status::copies_note(registry.shared_secrets()));
            status.announced = sites::of_server(&registry.sites());
            status.forwards = forwards.status();
        };
        self.shards.answer_overviews(now, |mut reports| {
            let (sessions, departed) = take(&mut reports);
            let mut overview = overview(config, addresses, sessions, &departed, now, started);
            complete(&mut overview.status, &reports);
            overview
        });
        self.shards.answer(now, |mut reports| {
            let listen: Vec<_> = data_plane.sockets.addresses().collect();
            let (sessions, departed) = take(&mut reports);
            let counters: Vec<_> = reports.iter().map(|report| report.counters.clone()).collect();
            let mut departed_users = BTreeMap::new();
            for (user, bytes) in
                reports.iter_mut().flat_map(|report| std::mem::take(&mut report.departed_users))
            {
                status::add_traffic(&mut departed_users, user, bytes);
            }
            let mut status =
                status::server_status(config, addresses, &listen, &sessions, &departed, now, started);
            complete(&mut status, &reports);
            status::add_server_counters(&mut status, &counters);
            status.users = users.map(|users| users.status(&sessions, &departed_users)).unwrap_or_default();
            status::add_budget(&mut status, &registry.process_bytes(), &registry.held_by_user());
            status
        });
    }

    fn update_tun_mtu(&mut self) {
        if let (Some(mtu), Some(machine)) = (self.registry.mtu(), &mut self.machine) {
            match machine.set_mtu(mtu) {
                Ok(()) => self.events.report(Event::MtuChanged { mtu: mtu as u64 }),
                Err(error) => tracing::warn!(mtu, %error, "cannot set the MTU of the TUN"),
            }
        }
    }

    /// Closes the clients' connections and undoes changes to the machine.
    fn end(mut self) -> Result<(), RunError> {
        self.service_manager.stopping();
        self.data_plane.end();
        let shards = self.shards.end();
        if let Some(list) = &mut self.user_list {
            let now = Instant::now();
            list.count(now, SystemTime::now(), &self.registry.take_carried());
            list.save(now);
        }
        // After the sessions, whose addresses were used until now.
        drop(self.leases.take());
        self.machine.map_or(Ok(()), Machine::end).and(shards)
    }
}
