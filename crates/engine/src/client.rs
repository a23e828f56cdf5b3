//! A running client.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Instant};

use mpvpn_control::{
    api,
    config::{ClientConfig, CongestionControl, Routes, Scheduler as SchedulerOption},
    tls::{self, RefusalSlot},
};
use mpvpn_os::{
    RecvBatch, Tun, TunConfig, Undo,
    poll::Interest,
    privilege,
    tun::READ_BUFFER,
    tunnel_net::{self, ClientNet, ClientNetConfig, ShareNet, ShareSource, Wanted},
    undo::{self, Interface},
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Cc, ClientSetup, Local, TransportOptions};
use mpvpn_tunnel::{Assignment, Client, ClientConfig as TunnelConfig, ClientError, ClientEvent};
use mpvpn_types::{Duration, LinkId};

use crate::{
    EngineError,
    links::{LinkChange, Links},
    slow::{Message, Slow},
    status,
    turn::{MONITOR, SIGNAL, SOCKETS, TUN, Turn, Turns, WAKE},
    wire::{Sent, TUN_QUEUE, datagrams, read_tun, take_back, write_tun},
};

/// Where a server has its tunnels (RFC 9484 §3, both variables `*`).
const PATH: &str = "/.well-known/masque/ip/*/*/";
/// Receive calls a socket a turn.
const SOCKET_READS: usize = 4;
/// A name is resolved again after this time when that failed.
const RESOLVE_AGAIN: Duration = Duration::from_secs(2);
/// The links are looked at anew this long after news that may not be complete.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Keeps a tunnel up until told to stop.
///
/// # Errors
/// If it cannot be started, or the server refuses it.
pub fn run(config: ClientConfig) -> Result<(), EngineError> {
    if !privilege::has_net_admin() {
        return Err(EngineError::Privilege);
    }
    let mut turns = Turns::new()?;
    let slot = RefusalSlot::default();
    let tls = tls::client_config_reporting(&config.trust, &[b"h3"], &slot)?;
    let api = api::Server::bind(&config.api_socket)?;
    let undo = Undo::open(Path::new(undo::BASE), &config.tun_name)?;
    let tun = Tun::open(TunConfig {
        name: Some(config.tun_name.clone()),
        queue_packets: Some(TUN_QUEUE),
        ..TunConfig::default()
    })?;
    let slow = Slow::start(api, turns.wake.clone())?;
    let mut running = Running::new(config, &turns, Arc::new(tls), undo, tun, slow)?;
    let result = running.run(&mut turns);
    let end = running.end();
    match result {
        Err(EngineError::Tunnel(ClientError::Tls(reason))) => {
            Err(slot.take().map_or(EngineError::Tunnel(ClientError::Tls(reason)), EngineError::from))
        }
        Err(error) => Err(error),
        Ok(()) => end,
    }
}

struct Running {
    config: ClientConfig,
    client: Client,
    links: Links,
    net: ClientNet,
    net_config: ClientNetConfig,
    share: Option<ShareNet>,
    undo: Undo,
    tun: Tun,
    slow: Slow,
    started: Instant,
    batch: RecvBatch,
    tun_buffer: Vec<u8>,
    out: Vec<u8>,
    resolve_at: Option<Instant>,
    look_at: Option<Instant>,
    assignment: Option<Assignment>,
    mtu: u32,
}

impl Running {
    fn new(
        config: ClientConfig,
        turns: &Turns,
        tls: Arc<rustls::ClientConfig>,
        undo: Undo,
        tun: Tun,
        slow: Slow,
    ) -> Result<Self, EngineError> {
        let net_config =
            ClientNetConfig::new(Interface { name: tun.name().to_owned(), index: tun.ifindex() });
        let mut links = Links::new(&config.paths, tun.name(), net_config.mark, &turns.poller)?;
        let cc = match config.cc {
            CongestionControl::Bbr => Cc::Bbr,
            CongestionControl::Cubic => Cc::Cubic,
        };
        let options =
            TransportOptions { cc, max_udp_payload: links.max_payload(), ..TransportOptions::default() };
        let setup = ClientSetup::new(tls, &options, &random::<32>()?)?;
        let token = config.bearer()?.map(|token| token.reveal().to_owned());
        let client = Client::new(
            Instant::now(),
            TunnelConfig {
                setup,
                server_name: config.server.host.clone(),
                authority: config.server.to_string(),
                path: PATH.to_owned(),
                token,
                scheduler: scheduler_of(config.scheduler),
            },
        );
        turns.poller.add(&tun, TUN, Interest::Read).map_err(EngineError::io("watch the TUN"))?;
        Ok(Self {
            net: ClientNet::new(net_config.clone())?,
            net_config,
            client,
            links,
            share: None,
            undo,
            tun,
            slow,
            started: Instant::now(),
            batch: RecvBatch::new(16),
            tun_buffer: vec![0; READ_BUFFER],
            out: Vec::with_capacity(64 << 10),
            resolve_at: None,
            look_at: None,
            assignment: None,
            mtu: 1280,
            config,
        })
    }

    fn run(&mut self, turns: &mut Turns) -> Result<(), EngineError> {
        match self.config.server.ip() {
            Some(ip) => self.links.set_remotes(vec![SocketAddr::new(ip, self.config.server.port)]),
            None => self.slow.resolve(&self.config.server),
        }
        let now = Instant::now();
        self.rescan(turns, now)?;
        for link in self.links.links.values().filter(|link| link.remote.is_none()) {
            tracing::warn!(link = %link.name, reason = link.reason, "a link cannot be used yet, waiting for it");
        }
        tracing::info!(server = %self.config.server, "connecting");
        let mut turn = Turn::new();
        loop {
            self.transmit(turns, turn.now);
            self.apply_events(turns, turn.now)?;
            let deadline = [self.client.poll_timeout(turn.now), self.resolve_at, self.look_at];
            turns.next(deadline.into_iter().flatten().min(), &mut turn)?;
            let now = turn.now;
            if turn.overslept {
                self.client.forgive(now);
            }
            let mut tun_ready = false;
            for event in &turn.ready {
                match event.token {
                    TUN => tun_ready = true,
                    WAKE => self.messages(turns, now)?,
                    SIGNAL => {
                        if let Some(signal) = turns.signal() {
                            tracing::info!(?signal, "ending");
                            return Ok(());
                        }
                    }
                    MONITOR => {
                        if self.links.news() {
                            self.rescan(turns, now)?;
                            self.look_at = Some(now + LOOK_AGAIN);
                        }
                    }
                    token => self.socket(turns, now, token, event.readable, event.writable),
                }
            }
            self.client.handle_batch(now);
            self.write_tun();
            if tun_ready {
                self.read_tun(now);
            }
            self.timers(turns, now)?;
        }
    }

    fn socket(&mut self, turns: &Turns, now: Instant, token: u64, readable: bool, writable: bool) {
        let Ok(number) = u16::try_from(token.wrapping_sub(SOCKETS)) else { return };
        let id = LinkId(number);
        let Some(wire) = self.links.links.get_mut(&id).and_then(|link| link.wire.as_mut()) else { return };
        if writable {
            wire.flush(&turns.poller, token, |_| None);
        }
        if !readable {
            return;
        }
        for _ in 0..SOCKET_READS {
            let count = match wire.socket.recv_batch(&mut self.batch) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!(%error, link = number, "cannot receive");
                    return;
                }
            };
            let client = &mut self.client;
            datagrams(&mut self.batch, |got| {
                client.handle_datagram(now, id, got.remote, got.ecn, got.data);
            });
            self.client.handle_batch(now);
            while let Some(joined) = self.client.poll_tun() {
                write_tun(&self.tun, &joined);
                self.client.recycle(joined);
            }
            if count < 16 {
                return;
            }
        }
    }

    fn write_tun(&mut self) {
        while let Some(joined) = self.client.poll_tun() {
            write_tun(&self.tun, &joined);
            self.client.recycle(joined);
        }
    }

    fn read_tun(&mut self, now: Instant) {
        let client = &mut self.client;
        read_tun(&self.tun, &mut self.tun_buffer, |hdr, packet| client.handle_tun(now, hdr, packet));
    }

    fn transmit(&mut self, turns: &Turns, now: Instant) {
        loop {
            self.out.clear();
            let Some(transmit) = self.client.poll_transmit(now, &mut self.out) else { break };
            let Some(id) = transmit.local.and_then(Local::as_link) else { continue };
            let Some(link) = self.links.links.get_mut(&id) else { continue };
            let Some(wire) = &mut link.wire else { continue };
            let token = SOCKETS + u64::from(id.0);
            if wire.send(&turns.poller, token, &transmit, &self.out, None) == Sent::LinkDown {
                // The news will say why; if there is none, look.
                self.look_at.get_or_insert(now + LOOK_AGAIN);
            }
        }
        self.write_tun();
    }

    fn timers(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        if self.client.poll_timeout(now).is_some_and(|at| at <= now) {
            self.client.handle_timeout(now);
        }
        if self.resolve_at.is_some_and(|at| at <= now) {
            self.resolve_at = None;
            self.slow.resolve(&self.config.server);
        }
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.rescan(turns, now)?;
        }
        Ok(())
    }

    fn rescan(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        for change in self.links.rescan(&turns.poller)? {
            match change {
                LinkChange::Up(id, remote) => {
                    let name = &self.links.links[&id].name;
                    tracing::info!(link = %name, "link up");
                    if let Err(error) = self.net.prepare_link(&mut self.undo, name) {
                        tracing::warn!(link = %name, %error, "cannot prepare a link");
                    }
                    self.client.link_up(now, id, remote);
                }
                LinkChange::Down(id) => {
                    let link = &self.links.links[&id];
                    tracing::info!(link = %link.name, reason = link.reason, "link down");
                    self.client.link_down(now, id);
                }
            }
        }
        Ok(())
    }

    fn messages(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        turns.wake.drain();
        while let Some(message) = self.slow.next() {
            match message {
                Message::Status(reply) => {
                    let report = self.client.report(now);
                    let uptime = now.saturating_duration_since(self.started);
                    // Who asked may be gone.
                    let _ = reply.send(status::of_client(&self.config, &self.links, &report, uptime));
                }
                Message::Resolved(Ok(addresses)) if !addresses.is_empty() => {
                    self.links.set_remotes(addresses);
                    self.rescan(turns, now)?;
                }
                Message::Resolved(result) => {
                    let reason = result.err().unwrap_or_else(|| "no address".to_owned());
                    tracing::warn!(server = %self.config.server, reason, "cannot resolve the server's name");
                    self.resolve_at = Some(now + RESOLVE_AGAIN);
                }
            }
        }
        Ok(())
    }

    fn apply_events(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        while let Some(event) = self.client.poll_event() {
            match event {
                ClientEvent::Mtu(mtu) => {
                    self.mtu = mtu as u32;
                    tracing::info!(mtu, "tunnel MTU");
                    self.configure()?;
                }
                ClientEvent::Up(assignment) => {
                    tracing::info!(addresses = ?assignment.addresses, "tunnel up");
                    self.assignment = Some(assignment);
                    self.configure()?;
                    self.share()?;
                }
                ClientEvent::Changed(assignment) => {
                    tracing::info!(addresses = ?assignment.addresses, "addresses or routes changed");
                    self.assignment = Some(assignment);
                    self.configure()?;
                }
                ClientEvent::Down(reason) => {
                    tracing::warn!(reason, "connection lost, connecting again");
                    if self.config.server.ip().is_none() {
                        self.slow.resolve(&self.config.server);
                    }
                }
                ClientEvent::Fatal(error) => {
                    self.transmit(turns, now);
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn configure(&mut self) -> Result<(), EngineError> {
        let Some(assignment) = &self.assignment else { return Ok(()) };
        let routes = match self.config.routes {
            Routes::All => tunnel_net::Routes::All,
            Routes::None => tunnel_net::Routes::None,
            Routes::Advertised => tunnel_net::Routes::Advertised(
                assignment.routes.iter().flat_map(|range| range.to_nets()).collect(),
            ),
        };
        let wanted = Wanted { addresses: assignment.addresses.clone(), routes, mtu: self.mtu };
        self.net.apply(&mut self.undo, &wanted)?;
        Ok(())
    }

    fn share(&mut self) -> Result<(), EngineError> {
        if self.config.share.is_empty() || self.share.is_some() {
            return Ok(());
        }
        let sources =
            self.config.share.iter().map(|text| text.parse()).collect::<Result<Vec<ShareSource>, _>>()?;
        self.share = Some(ShareNet::up(&mut self.undo, &self.net_config.tun.name, &sources)?);
        Ok(())
    }

    /// Says good-bye to the server and takes back what was changed.
    fn end(mut self) -> Result<(), EngineError> {
        let now = Instant::now();
        self.client.close(now, "the client ends");
        loop {
            self.out.clear();
            let Some(transmit) = self.client.poll_transmit(now, &mut self.out) else { break };
            let link = transmit.local.and_then(Local::as_link).and_then(|id| self.links.links.get_mut(&id));
            if let Some(wire) = link.and_then(|link| link.wire.as_mut()) {
                wire.send_last(&transmit, &self.out, None);
            }
        }
        take_back(&mut self.undo)
    }
}

fn scheduler_of(option: SchedulerOption) -> Scheduler {
    match option {
        SchedulerOption::Auto => Scheduler::Auto,
        SchedulerOption::MinRtt => Scheduler::MinRtt,
        SchedulerOption::Flow => Scheduler::Flow,
        SchedulerOption::Failover => Scheduler::Failover,
    }
}

/// Random bytes for secrets.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], EngineError> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| EngineError::io("get random numbers")(std::io::Error::other("the generator failed")))?;
    Ok(bytes)
}
