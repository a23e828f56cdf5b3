//! Makes a client: the links, the connections, and the other shards.

use std::{path::PathBuf, sync::Arc, time::Instant};

use mpvpn_config::{ClientConfig, ClientOptions, ConfigSource, LaneRule};
use mpvpn_error::RunError;
use mpvpn_flow::rules::{FlowMode, Rule, Rules};
use mpvpn_identity::{random, token::Token};
use mpvpn_input::role::Role;
use mpvpn_links::{
    LinkSocketOptions, Links,
    policies::{LinkMeters, LinkPolicies},
};
use mpvpn_path::Scheduler;
use mpvpn_qlog::Qlog;
use mpvpn_quic::{ClientSetup, MAX_SHARDS, TransportOptions};
use mpvpn_status::events::EventSender;
use mpvpn_tcp::connection::TcpTransportConfig;
use mpvpn_threads::{event_loop::EventLoop, service_manager::ServiceManager, slow_thread::SlowThread};
use mpvpn_tunnel::{ClassConnections, ClientConfig as TunnelConfig, ConnectionNumber, EchoWatch, TunnelMode};
use mpvpn_types::{ClassId, Fec};

use super::{
    Running,
    auto_pipes::AutoPipes,
    classes::Classes,
    connection_factory::{ClientSetups, ConnectionFactory, flow_mode},
    data_plane::DataPlane,
    device::Devices,
    events::ShardEvents,
    kind::ClientKind,
    link_use::LinkUse,
    other_shard::{FirstShard, JoinedShard},
    quotas::Quotas,
    server_name::ServerName,
    servers::{Credentials, ServerAccess, Servers},
    session::SessionState,
    session_keeper::SessionKeeper,
    silence_log::SilenceLog,
    sockets::LinkSockets,
    transports::LinkTransports,
};

/// The path of CONNECT-IP requests (RFC 9484 §3, both variables `*`).
const CONNECT_IP_PATH: &str = "/.well-known/masque/ip/*/*/";
/// The largest UDP payload inside TCP (bytes). Larger: fewer TLS records and headers, but the packet behind
/// waits longer: 5 ms at 10 Mbit/s for this value.
const MAX_UDP_PAYLOAD_IN_TCP: u16 = 6144;

/// The parts that differ between the kinds of clients.
pub(super) struct ClientParts {
    pub(super) kind: ClientKind,
    /// The packet devices, one per shard; none for proxies.
    pub(super) queues: Vec<Devices>,
    pub(super) socket_options: LinkSocketOptions,
    /// The folder for state that survives restarts.
    pub(super) state_dir: Option<PathBuf>,
    /// TLS and tokens of the servers, in their order.
    pub(super) credentials: Vec<Credentials>,
}

/// The parts that all shards share.
struct ShardParts {
    config: ClientConfig,
    socket_options: LinkSocketOptions,
    classes: Classes,
    meters: LinkMeters,
    access: ServerAccess,
    events: EventSender,
    echo_watch: EchoWatch,
}

impl ShardParts {
    /// The data plane of one shard. Its device is registered with the poller; a TUN queue must be attached.
    fn data_plane(
        &self,
        shard: u8,
        links: Links,
        devices: Option<Devices>,
        event_loop: &EventLoop,
    ) -> Result<DataPlane, RunError> {
        let classes = self.classes.clone();
        let ServerAccess { connection_factory, tcp, .. } = self.access.clone();
        let setups = connection_factory.connections(&self.config, &classes, shard);
        let several = connection_factory.shards > 1;
        let mut connections =
            ClassConnections::new(Instant::now(), setups, classes.rules.clone(), shard, several);
        connections.watch_echoes(self.echo_watch.clone());
        let transports = LinkTransports::new(shard, tcp, event_loop.wake.clone(), self.events.clone());
        if let Some(devices) = &devices {
            devices.watch(&event_loop.poller)?;
        }
        Ok(DataPlane {
            shard,
            connections,
            classes,
            connection_factory,
            other_servers: None,
            sockets: LinkSockets::new(links),
            policies: LinkPolicies::new(&self.config.links),
            transports,
            events: ShardEvents::new(self.events.clone(), shard),
            devices,
            started: Instant::now(),
        })
    }

    fn links(&self, event_loop: &EventLoop) -> Result<Links, RunError> {
        let socket_options = self.socket_options.clone();
        Links::new(
            &self.config.paths,
            self.classes.link_classes(),
            &self.meters,
            socket_options,
            &event_loop.poller,
        )
    }

    /// Starts the shards 1 and up.
    fn start_others(&self, first: &mut FirstShard, queues: Vec<Devices>) -> Result<(), RunError> {
        for (shard, devices) in (1..).zip(queues) {
            let Some(member) = ConnectionNumber::of(shard, ClassId::DEFAULT) else { break };
            let mut event_loop = EventLoop::without_signals()?;
            let links = self.links(&event_loop)?;
            let data_plane = self.data_plane(shard, links, Some(devices), &event_loop)?;
            let first_shard = first.add(event_loop.wake.clone());
            let joined_shard =
                JoinedShard { member, config: self.config.clone(), data_plane, first: first_shard };
            first.start(shard, event_loop.activity.clone(), move || joined_shard.run(&mut event_loop))?;
        }
        Ok(())
    }
}

impl Running {
    /// A client that has not connected yet.
    pub(super) fn new(
        (mut config, origin): (ClientConfig, ConfigSource<ClientOptions>),
        event_loop: &EventLoop,
        ClientParts { kind, queues, socket_options, state_dir, credentials }: ClientParts,
        slow: SlowThread,
    ) -> Result<Self, RunError> {
        let shards = queues.len().max(1) as u8;
        let mut queues = queues.into_iter();
        let devices = queues.next();
        let meters = LinkMeters::default();
        let events = slow.events();
        let socket_options = LinkSocketOptions { events: events.clone(), ..socket_options };
        let classes = Classes::from_config(&config, devices.is_some());
        let mut links = Links::new(
            &config.paths,
            classes.link_classes(),
            &meters,
            socket_options.clone(),
            &event_loop.poller,
        )?;
        let quotas =
            Quotas::load(Instant::now(), state_dir.as_deref(), &config.name, meters.clone(), events.clone())?;
        let max_udp_payload = links.max_udp_payload();
        let secret = random::<32>().map_err(RunError::io("get random numbers"))?;
        let qlog = Qlog::start_if(config.qlog.as_ref(), Role::Client, &config.name)?;
        let setup = |tls: &Arc<rustls::ClientConfig>, cc| {
            let options = TransportOptions {
                cc,
                max_udp_payload,
                max_udp_payload_inside_tcp: MAX_UDP_PAYLOAD_IN_TCP.max(max_udp_payload),
                qlog: qlog.as_ref().map(Qlog::sink),
                ..TransportOptions::for_shards(shards)
            };
            ClientSetup::new(tls.clone(), &options, &secret)
        };
        let [random_shard] = random::<1>().map_err(RunError::io("get random numbers"))?;
        let instance = random().map_err(RunError::io("get random numbers"))?;
        let access = |(number, Credentials { tls, token }): (usize, Credentials)| {
            let mut config = config.clone();
            config.use_server(number);
            let tcp = slow
                .runtime()
                .map(|runtime| {
                    let proxy_resolver = config
                        .via
                        .as_ref()
                        .and_then(|via| Some(kind.kill_switch()?.proxy_resolver(via.proxy.port)));
                    TcpTransportConfig::new(&config, token.as_ref(), runtime.clone(), proxy_resolver)
                        .map(Arc::new)
                })
                .transpose()?;
            let setups = ClientSetups::try_new(|cc| setup(&tls, cc))?;
            let tunnel = TunnelConfig {
                mode: if devices.is_some() { TunnelMode::Packets } else { TunnelMode::RelaysOnly },
                instance: Some(instance),
                additional_addresses: config.class_tuns().count(),
                addresses_in_use: kind.addresses_in_use(),
                scheduler: config.scheduler,
                flow_rules: Rules {
                    mode: flow_mode(config.lane, shards),
                    rules: config.lane_rules.iter().map(lane_rule).collect(),
                },
                ..tunnel_config(&config, setups.of(config.cc).clone(), token)?
            };
            let first_steering_bits = random_shard % (MAX_SHARDS - shards + 1);
            let connection_factory = ConnectionFactory { setups, tunnel, shards, first_steering_bits };
            Ok::<_, RunError>(ServerAccess { number, connection_factory, tcp })
        };
        let access: Vec<_> = credentials.into_iter().enumerate().map(access).collect::<Result<_, _>>()?;
        if let Some(kill_switch) = kind.kill_switch() {
            kill_switch.set_events(events.clone());
        }
        let servers = Servers::new(Instant::now(), &config, access.clone(), state_dir.clone())?;
        let number = servers.as_ref().map_or(0, |servers| servers.choice.in_use());
        config.use_server(number);
        let parts = ShardParts {
            socket_options,
            access: access[number].clone(),
            classes,
            meters,
            config,
            events: events.clone(),
            echo_watch: EchoWatch::new(Instant::now()),
        };
        let mut data_plane = parts.data_plane(0, links, devices, event_loop)?;
        data_plane.other_servers = servers.as_ref().and_then(|servers| servers.to_others(parts.config.cc));
        let keeper = SessionKeeper::load(&parts.config, state_dir.as_deref())?;
        keeper.resume(data_plane.connections.default_client_mut());
        let mut shards = FirstShard::new(Role::Client, event_loop.wake.clone());
        parts.start_others(&mut shards, queues.collect())?;
        Ok(Self {
            data_plane,
            link_use: LinkUse::new(quotas, AutoPipes::new(Instant::now(), events.clone())),
            shards,
            kind,
            slow,
            events,
            servers,
            server_name: parts.config.server.ip().is_none().then(ServerName::default),
            session: SessionState::default(),
            service_manager: ServiceManager::none(),
            keeper,
            echo_watch: parts.echo_watch,
            measured: None,
            is_reached: true,
            silence_log: SilenceLog::default(),
            reached_at: Instant::now(),
            carriers: Vec::new(),
            reported_networks: Vec::new(),
            _qlog: qlog,
            config: parts.config,
            origin,
        })
    }
}

/// Returns the configuration of a connection to the server that carries relays alone.
pub(super) fn tunnel_config(
    config: &ClientConfig,
    setup: ClientSetup,
    token: Option<Token>,
) -> Result<TunnelConfig, RunError> {
    let random_u64 =
        || Ok::<_, RunError>(u64::from_le_bytes(random().map_err(RunError::io("get random numbers"))?));
    Ok(TunnelConfig {
        mode: TunnelMode::RelaysOnly,
        setup,
        server_name: config.server.host.clone(),
        authority: config.server.to_string(),
        path: CONNECT_IP_PATH.to_owned(),
        token: token.map(|token| token.reveal().to_owned()),
        class: None,
        instance: None,
        additional_addresses: 0,
        addresses_in_use: Default::default(),
        scheduler: Scheduler::Auto,
        fec: Fec::Off,
        copies: 1,
        flow_rules: Rules { mode: FlowMode::Stream, rules: Vec::new() },
        isn_secret: [random_u64()?, random_u64()?],
        disabled_extensions: &[],
    })
}

fn lane_rule(rule: &LaneRule) -> Rule {
    let ports = rule.ports.iter().map(|ports| ports.range());
    Rule { to: rule.to.clone(), ports: ports.collect(), streams: rule.streams }
}
