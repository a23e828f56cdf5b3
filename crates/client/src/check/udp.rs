//! Measures QUIC over a link: two clients, each from its own port, make a connection without a tunnel. The
//! second port shows how a NAT assigns ports.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    time::Instant,
};

use super::NEXT_IF_NOT_SENT;
use mpvpn_os::{
    OsError, RecvBatch, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
};
use mpvpn_sockets::{
    bind_options::BindOptions,
    packet_io::{BufferedUdpSocket, SendOutcome, for_each_datagram},
};
use mpvpn_status::check::{NatKind, UdpMeasurement};
use mpvpn_tunnel::{Client, ClientConfig as TunnelConfig, ClientError, ClientEvent};
use mpvpn_types::{Duration, LinkId};

/// How long the server may take to answer. Chosen.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest search for the path MTU, from the handshake on. Chosen.
const MAX_MTU_SEARCH: Duration = Duration::from_secs(4);
/// The path MTU is found when it has not changed for this long. Chosen.
const MTU_STABLE_TIME: Duration = Duration::from_millis(1500);
/// The text for a kernel that refuses to send.
const CANNOT_SEND: &str = "this machine sends nothing to the server over this link: there is no route, or its own firewall forbids it";
/// The only link of these clients.
const LINK: LinkId = LinkId(0);
/// Messages of one receive call.
const MAX_MESSAGES_PER_RECV: usize = 16;
/// The receive buffer of a socket (bytes).
const RECV_BUFFER_BYTES: usize = 256 << 10;

/// The result of a measurement.
pub(super) struct UdpOutcome {
    pub(super) found: Result<UdpMeasurement, String>,
    /// Whether the server accepts the credentials; `None` if it did not say.
    pub(super) authorized: Option<bool>,
    /// Why it refuses this client, which it knows, if it does.
    pub(super) refusal: Option<String>,
    /// The user's next step; empty if it works, or if the failure does not tell.
    pub(super) next: &'static str,
}

impl UdpOutcome {
    /// Nothing could be measured, for this reason.
    pub(super) fn failed(why: String) -> Self {
        Self { found: Err(why), authorized: None, refusal: None, next: "" }
    }
}

/// One client with its own port.
struct UdpProbe {
    client: Client,
    socket: BufferedUdpSocket,
    port: u16,
    up_at: Option<Instant>,
    mtu: (u16, Instant),
    /// This client's address and port, as the server sees them.
    observed: Option<SocketAddr>,
    authorized: Option<bool>,
    refusal: Option<String>,
    /// Why the connection has failed, and the user's next step, empty if that does not tell.
    failed: Option<(String, &'static str)>,
}

/// Measures a link to the server at `remote`.
pub(super) fn probe(bind_options: &BindOptions, remote: SocketAddr, config: &TunnelConfig) -> UdpOutcome {
    let poller = match Poller::new() {
        Ok(poller) => poller,
        Err(error) => return UdpOutcome::failed(error.to_string()),
    };
    let start = Instant::now();
    let probes =
        [0, 1].map(|token| UdpProbe::start(bind_options, remote, config.clone(), &poller, token, start));
    let mut probes = match probes {
        [Ok(first), Ok(second)] => [first, second],
        [Err(error), _] | [_, Err(error)] => return UdpOutcome::failed(error),
    };
    let mut events = Events::with_capacity(2);
    let mut batch = RecvBatch::new(MAX_MESSAGES_PER_RECV);
    let mut now = start;
    while !is_finished(&mut probes, start, now) {
        let wait = probes.iter_mut().filter_map(|probe| probe.poll(&poller, now)).min();
        let wait = wait
            .map_or(MTU_STABLE_TIME, |at| at.saturating_duration_since(now))
            .min(Duration::from_millis(100));
        if let Err(error) = poller.wait(&mut events, Some(wait)) {
            return UdpOutcome::failed(error.to_string());
        }
        now = Instant::now();
        probes.iter_mut().for_each(|probe| probe.receive(&mut batch, now));
    }
    outcome(probes, bind_options, remote, start, now)
}

/// Whether the first client, which provides the figures, has everything. The second one only needs its
/// observed address, which comes with the handshake.
fn is_finished(probes: &mut [UdpProbe; 2], start: Instant, now: Instant) -> bool {
    let first = &mut probes[0];
    let since = |at: Instant| now.saturating_duration_since(at);
    match (first.up_at, &first.failed) {
        (_, Some(_)) => true,
        (None, None) => since(start) >= RESPONSE_TIMEOUT,
        (Some(up), None) => {
            let mtu_is_stable = since(first.mtu.1) >= MTU_STABLE_TIME && first.authorized.is_some();
            since(up) >= MAX_MTU_SEARCH || mtu_is_stable && since(up) >= MTU_STABLE_TIME
        }
    }
}

fn outcome(
    mut probes: [UdpProbe; 2],
    bind_options: &BindOptions,
    remote: SocketAddr,
    start: Instant,
    now: Instant,
) -> UdpOutcome {
    let own = bind_options.addresses.iter().copied().find(|ip| ip.is_ipv4() == remote.is_ipv4());
    let seen = probes.each_ref().map(|probe| (own, probe.port, probe.observed));
    probes.iter_mut().for_each(|probe| probe.close(now));
    let [first, _] = probes;
    let next = first.failed.as_ref().map_or("", |(_, next)| *next);
    let found = match (first.up_at, first.failed) {
        (Some(up), None) => Ok(UdpMeasurement {
            ms: up.saturating_duration_since(start).as_secs_f64() * 1000.0,
            mtu: first.mtu.0 + if remote.is_ipv4() { 28 } else { 48 },
            nat: NatKind::of(&seen),
            observed: seen[0].2,
        }),
        (_, Some((reason, _))) => Err(reason),
        (None, None) => Err(format!("no answer in {} s", RESPONSE_TIMEOUT.as_secs())),
    };
    UdpOutcome { found, authorized: first.authorized, refusal: first.refusal, next }
}

impl UdpProbe {
    fn start(
        bind_options: &BindOptions,
        remote: SocketAddr,
        config: TunnelConfig,
        poller: &Poller,
        token: u64,
        now: Instant,
    ) -> Result<Self, String> {
        let any: IpAddr = if remote.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        let socket = |device: Option<&str>, local: Option<IpAddr>| {
            UdpSocket::bind(&UdpOptions {
                device: device.map(str::to_owned),
                recv_buffer: Some(RECV_BUFFER_BYTES),
                ..UdpOptions::new(SocketAddr::new(local.unwrap_or(any), 0))
            })
        };
        let (socket, _) =
            bind_options.bind_socket(remote, socket, OsError::errno).map_err(|error| error.to_string())?;
        let port = socket.local_addr().map_err(|error| error.to_string())?.port();
        poller.add(socket.as_fd(), token, Interest::Read).map_err(|error| error.to_string())?;
        let mut client = Client::new(now, config);
        client.link_up(now, LINK, remote);
        Ok(Self {
            client,
            socket: BufferedUdpSocket::new(socket),
            port,
            up_at: None,
            mtu: (0, now),
            observed: None,
            authorized: None,
            refusal: None,
            failed: None,
        })
    }

    /// Sends, handles events, and returns the next deadline.
    fn poll(&mut self, poller: &Poller, now: Instant) -> Option<Instant> {
        self.client.handle_timeout(now);
        let mut buffer = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(now, &mut buffer) {
            if self.socket.send(poller, 0, &transmit, &buffer, None) == SendOutcome::LinkDown
                && self.up_at.is_none()
            {
                self.failed = Some((CANNOT_SEND.to_owned(), NEXT_IF_NOT_SENT));
            }
            buffer.clear();
        }
        while let Some(event) = self.client.poll_event() {
            match event {
                ClientEvent::Up(_) => self.up_at = self.up_at.or(Some(now)),
                ClientEvent::Down(reason) if self.client.is_refused(now) => {
                    (self.authorized, self.refusal) = (Some(false), Some(reason));
                }
                ClientEvent::Down(reason) => self.failed = Some((reason, "")),
                ClientEvent::Fatal(ClientError::Unauthorized(_)) => self.authorized = Some(false),
                ClientEvent::Fatal(error) => self.failed = Some((error.to_string(), "")),
                _ => {}
            }
        }
        if self.client.is_authenticated() {
            self.authorized = Some(true);
        }
        // After refused credentials there is no path any more.
        if let Some(path) = self.client.report(now).paths.first() {
            if path.view.mtu != self.mtu.0 {
                self.mtu = (path.view.mtu, now);
            }
            let plain = |seen: SocketAddr| SocketAddr::new(seen.ip().to_canonical(), seen.port());
            self.observed = path.view.observed.map(plain).or(self.observed);
        }
        self.client.poll_timeout(now)
    }

    fn receive(&mut self, batch: &mut RecvBatch, now: Instant) {
        // Ignore ICMP errors of earlier packets.
        while matches!(self.socket.socket.recv_batch(batch), Ok(1..)) {
            for_each_datagram(batch, |got| {
                self.client.handle_datagram(now, LINK, got.remote, got.ecn, got.data);
            });
            self.client.handle_batch(now);
        }
    }

    /// Closes the connection to the server.
    fn close(&mut self, now: Instant) {
        self.client.close(now, "checked");
        let mut buffer = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(now, &mut buffer) {
            self.socket.send_last(&transmit, &buffer, None);
            buffer.clear();
        }
    }
}
