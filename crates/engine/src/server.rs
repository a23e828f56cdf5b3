//! A running server.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Instant,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_control::{
    api,
    auth::Authenticator,
    config::{Nat as NatOption, ServerConfig},
    credentials::{Credentials, first_start_message, guess_address},
    tls,
};
use mpvpn_os::{
    RecvBatch, Tun, TunConfig, UdpOptions, UdpSocket, Undo,
    poll::Interest,
    privilege,
    tun::READ_BUFFER,
    tunnel_net::{Nat, ServerNet, ServerNetConfig},
    undo::{self, Interface},
};
use mpvpn_quic::{Local, ServerSetup, Transmit, TransportOptions};
use mpvpn_tunnel::{Authenticate, Server, ServerConfig as TunnelConfig, ServerEvent};

use crate::{
    EngineError,
    client::random,
    slow::{Message, Slow},
    status,
    turn::{SIGNAL, SOCKETS, TUN, Turn, Turns, WAKE},
    wire::{SOCKET_BUFFER, TUN_QUEUE, Wire, datagrams, read_tun, serves, take_back, write_tun},
};

/// The MTU of the TUN until a client has told what the paths carry (bytes).
const FIRST_MTU: u32 = 1400;
/// Receive calls a socket a turn.
const SOCKET_READS: usize = 4;
/// Messages a receive call.
const BATCH: usize = 16;

/// Serves until told to stop.
///
/// # Errors
/// If it cannot be started.
pub fn run(config: ServerConfig) -> Result<(), EngineError> {
    if !privilege::has_net_admin() {
        return Err(EngineError::Privilege);
    }
    let mut turns = Turns::new()?;
    let credentials = Credentials::load(&config)?;
    let api = api::Server::bind(&config.api_socket)?;
    let undo = Undo::open(Path::new(undo::BASE), &config.tun_name)?;
    let sockets = listen(&config, &turns)?;
    let tun = Tun::open(TunConfig {
        name: Some(config.tun_name.clone()),
        mtu: Some(FIRST_MTU),
        queue_packets: Some(TUN_QUEUE),
        ..TunConfig::default()
    })?;
    let slow = Slow::start(api, turns.wake.clone())?;
    let guess = guess_address(&config.listen);
    let message = first_start_message(&config, &credentials, guess);
    let mut running = Running::new(config, &turns, credentials, undo, sockets, tun, slow)?;
    for socket in &running.sockets {
        tracing::info!(address = %socket.bound, "listening");
    }
    println!("{message}");
    let result = running.run(&mut turns);
    let end = running.end();
    result.and(end)
}

struct Listening {
    bound: SocketAddr,
    wire: Wire,
}

fn listen(config: &ServerConfig, turns: &Turns) -> Result<Vec<Listening>, EngineError> {
    let mut sockets: Vec<Listening> = Vec::new();
    let v4 = config.listen.iter().any(SocketAddr::is_ipv4);
    for address in &config.listen {
        let socket = UdpSocket::bind(&UdpOptions {
            v6only: v4,
            recv_buffer: Some(SOCKET_BUFFER),
            send_buffer: Some(SOCKET_BUFFER),
            ..UdpOptions::new(*address)
        })?;
        let token = SOCKETS + sockets.len() as u64;
        turns.poller.add(&socket, token, Interest::Read).map_err(EngineError::io("watch a socket"))?;
        let bound = socket.local_addr().map_err(EngineError::io("look at a socket"))?;
        sockets.push(Listening { bound, wire: Wire::new(socket) });
    }
    Ok(sockets)
}

struct Users(Authenticator);

impl Authenticate for Users {
    fn authenticate(&self, authorization: Option<&str>) -> Result<String, String> {
        self.0.check(authorization).map(|user| user.name).map_err(|denied| denied.to_string())
    }
}

struct Running {
    config: ServerConfig,
    server: Server,
    net: ServerNet,
    undo: Undo,
    sockets: Vec<Listening>,
    tun: Tun,
    slow: Slow,
    started: Instant,
    batch: RecvBatch,
    tun_buffer: Vec<u8>,
    out: Vec<u8>,
}

impl Running {
    fn new(
        config: ServerConfig,
        turns: &Turns,
        credentials: Credentials,
        mut undo: Undo,
        sockets: Vec<Listening>,
        tun: Tun,
        slow: Slow,
    ) -> Result<Self, EngineError> {
        let identity = &credentials.identity;
        let tls = Arc::new(tls::server_config(identity, &[b"h3"])?);
        // A server does not know its clients' links: each client says what it can take.
        let options = TransportOptions { max_udp_payload: 65_000, ..TransportOptions::default() };
        let secret: [u8; 32] = identity.derive_secret("quic connections");
        let setup = ServerSetup::new(tls, &options, &secret)?;
        let v6 = config.subnet6.map(IpNet::V6);
        let nat = match config.nat {
            NatOption::On => Nat::Masquerade,
            NatOption::Off => Nat::None,
        };
        let net = ServerNet::up(
            &mut undo,
            &ServerNetConfig {
                tun: Interface { name: tun.name().to_owned(), index: tun.ifindex() },
                subnets: std::iter::once(IpNet::V4(config.subnet)).chain(v6).collect(),
                mtu: FIRST_MTU,
                nat,
            },
        )?;
        turns.poller.add(&tun, TUN, Interest::Read).map_err(EngineError::io("watch the TUN"))?;
        // Checked once here, so that a broken generator is an error at the start.
        random::<16>()?;
        let server = Server::new(TunnelConfig {
            setup,
            subnet: config.subnet,
            subnet6: config.subnet6,
            routes: vec![IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())],
            auth: Box::new(Users(credentials.authenticator)),
            max_clients: config.max_clients as usize,
            secrets: Box::new(|| random::<16>().unwrap_or_else(|error| panic!("{error}"))),
        })?;
        Ok(Self {
            config,
            server,
            net,
            undo,
            sockets,
            tun,
            slow,
            started: Instant::now(),
            batch: RecvBatch::new(BATCH),
            tun_buffer: vec![0; READ_BUFFER],
            out: Vec::with_capacity(64 << 10),
        })
    }

    fn run(&mut self, turns: &mut Turns) -> Result<(), EngineError> {
        let mut turn = Turn::new();
        loop {
            self.transmit(turns, turn.now);
            self.apply_events();
            turns.next(self.server.poll_timeout(), &mut turn)?;
            let now = turn.now;
            if turn.overslept {
                self.server.forgive(now);
            }
            let mut tun_ready = false;
            for event in &turn.ready {
                match event.token {
                    TUN => tun_ready = true,
                    WAKE => self.messages(turns, now),
                    SIGNAL => {
                        if let Some(signal) = turns.signal() {
                            tracing::info!(?signal, "ending");
                            return Ok(());
                        }
                    }
                    token => self.socket(turns, now, token, event.readable, event.writable),
                }
            }
            if tun_ready {
                self.read_tun(now);
            }
            if self.server.poll_timeout().is_some_and(|at| at <= now) {
                self.server.handle_timeout(now);
            }
        }
    }

    fn socket(&mut self, turns: &Turns, now: Instant, token: u64, readable: bool, writable: bool) {
        let Ok(number) = usize::try_from(token.wrapping_sub(SOCKETS)) else { return };
        let Some(listening) = self.sockets.get_mut(number) else { return };
        if writable {
            listening.wire.flush(&turns.poller, token, source_of);
        }
        if !readable {
            return;
        }
        for _ in 0..SOCKET_READS {
            let Some(listening) = self.sockets.get_mut(number) else { return };
            let count = match listening.wire.socket.recv_batch(&mut self.batch) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!(%error, "cannot receive");
                    return;
                }
            };
            let server = &mut self.server;
            datagrams(&mut self.batch, |got| {
                server.handle_datagram(now, got.local, got.remote, got.ecn, got.data);
            });
            self.server.handle_batch(now);
            self.write_tun();
            if count < BATCH {
                return;
            }
        }
    }

    fn write_tun(&mut self) {
        while let Some(joined) = self.server.poll_tun() {
            write_tun(&self.tun, &joined);
            self.server.recycle(joined);
        }
    }

    fn read_tun(&mut self, now: Instant) {
        let server = &mut self.server;
        read_tun(&self.tun, &mut self.tun_buffer, |hdr, packet| server.handle_tun(now, hdr, packet));
    }

    fn transmit(&mut self, turns: &Turns, now: Instant) {
        loop {
            self.out.clear();
            let Some(transmit) = self.server.poll_transmit(now, &mut self.out) else { break };
            let local = transmit.local.map(Local::ip);
            let Some(number) =
                self.sockets.iter().position(|socket| serves(socket.bound, local, transmit.remote))
            else {
                continue;
            };
            let token = SOCKETS + number as u64;
            let wire = &mut self.sockets[number].wire;
            wire.send(&turns.poller, token, &transmit, &self.out, source_of(&transmit));
        }
        self.write_tun();
    }

    fn messages(&mut self, turns: &Turns, now: Instant) {
        turns.wake.drain();
        while let Some(message) = self.slow.next() {
            match message {
                Message::Status(reply) => {
                    let report = self.server.report(now);
                    let listen: Vec<_> = self.sockets.iter().map(|socket| socket.bound).collect();
                    let status = status::of_server(
                        &self.config,
                        self.net.addresses(),
                        &listen,
                        &report,
                        now,
                        self.started,
                    );
                    // Who asked may be gone.
                    let _ = reply.send(status);
                }
                Message::Resolved(_) => {}
            }
        }
    }

    fn apply_events(&mut self) {
        while let Some(ServerEvent::Mtu(mtu)) = self.server.poll_event() {
            match self.net.set_mtu(mtu as u32) {
                Ok(()) => tracing::info!(mtu, "tunnel MTU"),
                Err(error) => tracing::warn!(mtu, %error, "cannot set the MTU of the TUN"),
            }
        }
    }

    /// Says good-bye to the clients and takes back what was changed.
    fn end(mut self) -> Result<(), EngineError> {
        let now = Instant::now();
        self.server.close(now, "the server ends");
        loop {
            self.out.clear();
            let Some(transmit) = self.server.poll_transmit(now, &mut self.out) else { break };
            let local = transmit.local.map(Local::ip);
            let socket = self.sockets.iter().find(|socket| serves(socket.bound, local, transmit.remote));
            if let Some(socket) = socket {
                socket.wire.send_last(&transmit, &self.out, source_of(&transmit));
            }
        }
        take_back(&mut self.undo)
    }
}

/// The address that an answer must come from: the one that was asked.
fn source_of(transmit: &Transmit) -> Option<IpAddr> {
    transmit.local.map(Local::ip)
}
