//! QUIC over a link, tried out: a client of streams from each of two ports, which does no more than say hello.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    time::Instant,
};

use mpvpn_control::check::{NatKind, UdpMeasurement};
use mpvpn_os::{
    OsError, RecvBatch, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
};
use mpvpn_tunnel::{Client, ClientConfig as TunnelConfig, ClientError, ClientEvent};
use mpvpn_types::{Duration, LinkId};

use crate::{
    links::Footing,
    wire::{Sent, Wire, datagrams},
};

/// The server answers within this time, or not at all.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the path MTU is searched at most once it has.
const SEARCH: Duration = Duration::from_secs(4);
/// A path MTU that has stayed the same for so long is found.
const STEADY: Duration = Duration::from_millis(1500);
/// What the kernel means that refuses to send.
const SHUT: &str = "this machine sends nothing to the server over this link: there is no route, or its own firewall forbids it";
/// The only link that these clients have.
const LINK: LinkId = LinkId(0);
/// Datagrams that are received at once.
const BATCH: usize = 16;
/// Bytes that the kernel holds for a socket.
const BUFFER: usize = 256 << 10;

/// What came of it.
pub(super) struct Outcome {
    pub(super) found: Result<UdpMeasurement, String>,
    /// Whether the server accepts the credentials, if it said so.
    pub(super) authorized: Option<bool>,
}

/// One client, from a port of its own.
struct Trial {
    client: Client,
    wire: Wire,
    port: u16,
    up: Option<Instant>,
    mtu: (u16, Instant),
    /// This end, as the server sees it.
    observed: Option<SocketAddr>,
    authorized: Option<bool>,
    failed: Option<String>,
}

/// Tries it out. `remote` is the server.
pub(super) fn try_out(footing: &Footing, remote: SocketAddr, config: &TunnelConfig) -> Outcome {
    let poller = match Poller::new() {
        Ok(poller) => poller,
        Err(error) => return Outcome { found: Err(error.to_string()), authorized: None },
    };
    let begun = Instant::now();
    let both = [0, 1].map(|token| Trial::start(footing, remote, config.clone(), &poller, token, begun));
    let mut both = match both {
        [Ok(first), Ok(second)] => [first, second],
        [Err(error), _] | [_, Err(error)] => return Outcome { found: Err(error), authorized: None },
    };
    let mut events = Events::with_capacity(2);
    let mut batch = RecvBatch::new(BATCH);
    let mut now = begun;
    while !is_over(&mut both, begun, now) {
        let wait = both.iter_mut().filter_map(|trial| trial.turn(&poller, now)).min();
        let wait =
            wait.map_or(STEADY, |at| at.saturating_duration_since(now)).min(Duration::from_millis(100));
        if let Err(error) = poller.wait(&mut events, Some(wait)) {
            return Outcome { found: Err(error.to_string()), authorized: None };
        }
        now = Instant::now();
        both.iter_mut().for_each(|trial| trial.take(&mut batch, now));
    }
    outcome(both, footing, remote, begun, now)
}

/// Nothing more can be learnt from the first one, which has the figures; the second one has its chance meanwhile.
fn is_over(both: &mut [Trial; 2], begun: Instant, now: Instant) -> bool {
    let first = &mut both[0];
    let since = |at: Instant| now.saturating_duration_since(at);
    match (first.up, &first.failed) {
        (_, Some(_)) => true,
        (None, None) => since(begun) >= ANSWER,
        (Some(up), None) => {
            let steady = since(first.mtu.1) >= STEADY && first.authorized.is_some();
            since(up) >= SEARCH || steady && since(up) >= STEADY
        }
    }
}

fn outcome(
    mut both: [Trial; 2],
    footing: &Footing,
    remote: SocketAddr,
    begun: Instant,
    now: Instant,
) -> Outcome {
    let own = footing.addresses.iter().copied().find(|ip| ip.is_ipv4() == remote.is_ipv4());
    let seen = both.each_ref().map(|trial| (own, trial.port, trial.observed));
    both.iter_mut().for_each(|trial| trial.end(now));
    let [first, _] = both;
    let found = match (first.up, first.failed) {
        (Some(up), None) => Ok(UdpMeasurement {
            ms: up.saturating_duration_since(begun).as_secs_f64() * 1000.0,
            mtu: first.mtu.0 + headers(remote.ip()),
            nat: NatKind::of(&seen),
            observed: seen[0].2,
        }),
        (_, Some(reason)) => Err(reason),
        (None, None) => Err(format!("no answer in {} s", ANSWER.as_secs())),
    };
    Outcome { found, authorized: first.authorized }
}

/// Bytes of IP and UDP headers.
fn headers(remote: IpAddr) -> u16 {
    if remote.is_ipv4() { 28 } else { 48 }
}

impl Trial {
    fn start(
        footing: &Footing,
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
                recv_buffer: Some(BUFFER),
                ..UdpOptions::new(SocketAddr::new(local.unwrap_or(any), 0))
            })
        };
        let (socket, _) = footing.stand(remote, socket, OsError::errno).map_err(|error| error.to_string())?;
        let port = socket.local_addr().map_err(|error| error.to_string())?.port();
        poller.add(socket.as_fd(), token, Interest::Read).map_err(|error| error.to_string())?;
        let mut client = Client::new(now, config);
        client.link_up(now, LINK, remote);
        Ok(Self {
            client,
            wire: Wire::new(socket),
            port,
            up: None,
            mtu: (0, now),
            observed: None,
            authorized: None,
            failed: None,
        })
    }

    /// Sends what there is; when it wants to be called again.
    fn turn(&mut self, poller: &Poller, now: Instant) -> Option<Instant> {
        self.client.handle_timeout(now);
        let mut buffer = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(now, &mut buffer) {
            if self.wire.send(poller, 0, &transmit, &buffer, None) == Sent::LinkDown && self.up.is_none() {
                self.failed = Some(SHUT.to_owned());
            }
            buffer.clear();
        }
        while let Some(event) = self.client.poll_event() {
            match event {
                ClientEvent::Up(_) => self.up = self.up.or(Some(now)),
                ClientEvent::Down(reason) => self.failed = Some(reason),
                ClientEvent::Fatal(ClientError::Unauthorized(_)) => self.authorized = Some(false),
                ClientEvent::Fatal(error) => self.failed = Some(error.to_string()),
                _ => {}
            }
        }
        if self.client.is_authenticated() {
            self.authorized = Some(true);
        }
        // There is none any more where the credentials were refused.
        if let Some(path) = self.client.report(now).paths.first() {
            if path.view.mtu != self.mtu.0 {
                self.mtu = (path.view.mtu, now);
            }
            let plain = |seen: SocketAddr| SocketAddr::new(seen.ip().to_canonical(), seen.port());
            self.observed = path.view.observed.map(plain).or(self.observed);
        }
        self.client.poll_timeout(now)
    }

    fn take(&mut self, batch: &mut RecvBatch, now: Instant) {
        // What an earlier packet met on its way is no answer.
        while matches!(self.wire.socket.recv_batch(batch), Ok(1..)) {
            datagrams(batch, |got| {
                self.client.handle_datagram(now, LINK, got.remote, got.ecn, got.data);
            });
            self.client.handle_batch(now);
        }
    }

    /// Takes leave of the server.
    fn end(&mut self, now: Instant) {
        self.client.close(now, "checked");
        let mut buffer = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(now, &mut buffer) {
            self.wire.send_last(&transmit, &buffer, None);
            buffer.clear();
        }
    }
}
