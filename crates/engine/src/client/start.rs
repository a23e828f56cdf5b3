//! Makes a client of its parts: the links, the connections, and the shards beside the first.

use std::{path::PathBuf, sync::Arc, time::Instant};

use mpvpn_control::{
    config::{ClientConfig, ClientOptions, ConfigSource, LaneRule},
    events::EventSender,
    status::Role,
};
use mpvpn_flow::rules::{Rule, Rules};
use mpvpn_quic::{ClientSetup, MAX_SHARDS, TransportOptions};
use mpvpn_tunnel::{ClassConnections, ClientConfig as TunnelConfig, ConnectionNumber, TunnelMode};
use mpvpn_types::{ClassId, Fec};

use super::{
    Running,
    classes::Classes,
    device::Devices,
    events::ShardEvents,
    forge::{Forge, Setups, lane_of},
    kind::ClientKind,
    link_use::LinkUse,
    member::{FirstShard, GroCoalescer},
    names::Names,
    pipes::AutoPipes,
    plane::{Plane, PlaneGear},
    quotas::Quotas,
    random,
    session::SessionState,
    ways::Ways,
};
use crate::{
    EngineError,
    links::{Ground, Links},
    policies::{Meters, Policies},
    qlog::Qlog,
    slow::Slow,
    tcp_way::carriage::Stable,
    turn::Turns,
};

/// Where a server has its tunnels (RFC 9484 §3, both variables `*`).
pub(super) const PATH: &str = "/.well-known/masque/ip/*/*/";
/// Inside TCP a larger UDP payload (bytes) costs less of a slow link, and makes what comes next wait there: this one for 5 ms
/// at 10 Mbit/s.
const INSIDE_TCP: u16 = 6144;

/// What is different between the kinds of a client.
pub(super) struct ClientParts {
    pub(super) kind: ClientKind,
    /// Where packets come from, one a shard; none at a client for proxies.
    pub(super) queues: Vec<Devices>,
    pub(super) ground: Ground,
    /// For what has to survive a restart.
    pub(super) state_dir: Option<PathBuf>,
}

/// What all shards are made of.
struct ShardParts {
    config: ClientConfig,
    ground: Ground,
    classes: Classes,
    forge: Forge,
    meters: Meters,
    /// `None` where there is no thread for TCP.
    tcp: Option<Arc<Stable>>,
    events: EventSender,
}

impl ShardParts {
    /// What a shard does with its packets.
    fn gear(&self, shard: u8, turns: &Turns) -> PlaneGear {
        let classes = self.classes.clone();
        let setups = self.forge.connections(&self.config, &classes, shard);
        let several = self.forge.shards > 1;
        let connections =
            ClassConnections::new(Instant::now(), setups, classes.rules.clone(), shard, several);
        let ways = Ways::new(shard, self.tcp.clone(), turns.wake.clone(), self.events.clone());
        let events = ShardEvents::new(self.events.clone(), shard);
        PlaneGear { shard, connections, classes, forge: self.forge.clone(), ways, events }
    }

    fn links(&self, turns: &Turns) -> Result<Links, EngineError> {
        let ground = self.ground.clone();
        Links::new(&self.config.paths, self.classes.sockets(), &self.meters, ground, &turns.poller)
    }

    /// Starts the shards beside the first.
    fn start_others(&self, first: &mut FirstShard, queues: Vec<Devices>) -> Result<(), EngineError> {
        for (shard, devices) in (1..).zip(queues) {
            let Some(member) = ConnectionNumber::of(shard, ClassId::DEFAULT) else { break };
            let mut turns = Turns::without_signals()?;
            let links = self.links(&turns)?;
            let policies = Policies::new(&self.config.links);
            let plane = Plane::new(self.gear(shard, &turns), links, policies, Some(devices), &turns)?;
            let first_end = first.add(turns.wake.clone());
            let joiner = GroCoalescer { member, config: self.config.clone(), plane, first: first_end };
            first.start(shard, move || joiner.run(&mut turns))?;
        }
        Ok(())
    }
}

impl Running {
    /// A client that has not begun to connect.
    pub(super) fn new(
        (config, origin): (ClientConfig, ConfigSource<ClientOptions>),
        turns: &Turns,
        tls: Arc<rustls::ClientConfig>,
        ClientParts { kind, queues, ground, state_dir }: ClientParts,
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
        let qlog = Qlog::start_if(config.qlog.as_ref(), Role::Client, &config.name)?;
        let setup = |cc| {
            let options = TransportOptions {
                cc,
                max_udp_payload,
                max_inside_tcp: INSIDE_TCP.max(max_udp_payload),
                qlog: qlog.as_ref().map(Qlog::sink),
                ..TransportOptions::of_shards(shards)
            };
            ClientSetup::new(tls.clone(), &options, &secret)
        };
        let setups = Setups::try_new(setup)?;
        let [spread] = random::<1>()?;
        let tcp =
            slow.runtime().map(|runtime| Stable::new(&config, runtime.clone()).map(Arc::new)).transpose()?;
        let parts = ShardParts {
            ground,
            forge: Forge {
                tunnel: TunnelConfig {
                    mode: if devices.is_some() { TunnelMode::Packets } else { TunnelMode::RelaysOnly },
                    setup: setups.of(config.cc).clone(),
                    server_name: config.server.host.clone(),
                    authority: config.server.to_string(),
                    path: PATH.to_owned(),
                    token: config.load_token()?.map(|token| token.reveal().to_owned()),
                    class: None,
                    additional_addresses: config.class_tuns().count(),
                    scheduler: config.scheduler,
                    fec: Fec::Off,
                    copies: 1,
                    flow_rules: Rules {
                        mode: lane_of(config.lane, shards),
                        rules: config.lane_rules.iter().map(rule_of).collect(),
                    },
                    isn_secret: [u64::from_le_bytes(random::<8>()?), u64::from_le_bytes(random::<8>()?)],
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
        let mut shards = FirstShard::new(Role::Client, turns.wake.clone());
        parts.start_others(&mut shards, queues.collect())?;
        Ok(Self {
            plane: Plane::new(gear, links, policies, devices, turns)?,
            link_use: LinkUse { quotas, pipes: AutoPipes::new(Instant::now(), events.clone()) },
            shards,
            kind,
            slow,
            events,
            names: parts.config.server.ip().is_none().then(Names::default),
            session: SessionState::default(),
            _qlog: qlog,
            config: parts.config,
            origin,
        })
    }
}

fn rule_of(rule: &LaneRule) -> Rule {
    let ports = rule.ports.iter().map(|ports| ports.range());
    Rule { to: rule.to.clone(), ports: ports.collect(), streams: rule.streams }
}
