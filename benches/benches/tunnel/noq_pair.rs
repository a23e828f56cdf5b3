//! The floor of what a tunnel can cost: two connections of the QUIC library alone, with the same paths and
//! cryptography.

use std::{
    any::Any,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use mpvpn_types::{Duration, Instant};
use noq_proto::{
    AckFrequencyConfig, ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig,
    FourTuple, PathStatus, ServerConfig, TransportConfig, VarInt,
    congestion::{Controller, ControllerFactory},
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};

use crate::{
    bench_tunnel::{PACKETS, PAYLOAD_BYTES, SERVER, WARM_UP_ROUNDS},
    identity::Identity,
};

/// One-way delay of every path.
const DELAY: Duration = Duration::from_millis(5);
/// Bytes of the DATAGRAM frames: a packet as it travels in a tunnel, with its prefix.
const DATAGRAM_BYTES: usize = PAYLOAD_BYTES + 28 + 2;

/// A UDP payload in flight: the number of its path at the client, and the bytes.
type InFlight = Vec<(u16, Vec<u8>)>;

struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    buf: Vec<u8>,
}

/// A client and a server with one connection, and a network without loss between them.
pub(crate) struct NoqPair {
    now: Instant,
    client: End,
    server: End,
    up: InFlight,
    down: InFlight,
    datagram: Bytes,
}

impl NoqPair {
    /// A connection with `paths` validated paths.
    pub(crate) fn new(paths: u16) -> Self {
        let identity = Identity::new();
        let crypto = QuicServerConfig::try_from(Arc::new(identity.server_tls())).expect("TLS for QUIC");
        let mut server = ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(Arc::new(transport()));
        let crypto = QuicClientConfig::try_from(identity.client_tls()).expect("TLS for QUIC");
        let mut config = ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));

        let now = Instant::now();
        let mut client = End::new(None, 1);
        let connection = client.endpoint.connect(now, config, SERVER, "mpvpn").expect("a connection");
        client.connection = Some(connection);
        let mut pair = Self {
            now,
            client,
            server: End::new(Some(Arc::new(server)), 2),
            up: Vec::new(),
            down: Vec::new(),
            datagram: Bytes::from(vec![7; DATAGRAM_BYTES]),
        };
        pair.run(20);
        for path in 1..paths {
            let (_, connection) = pair.client.connection.as_mut().expect("a connection");
            let tuple = FourTuple::new(SERVER, Some(token(path)));
            connection.open_path(tuple, PathStatus::Available, pair.now).expect("a path");
            pair.run(10);
        }
        for _ in 0..WARM_UP_ROUNDS {
            pair.client_sends();
            pair.server_sends();
            pair.run(1);
        }
        pair.run(4);
        pair
    }

    /// Delivers all UDP payloads, `rounds` times.
    fn run(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.now += DELAY;
            for (path, data) in std::mem::take(&mut self.up) {
                self.server.receive(self.now, path, data);
            }
            for (path, data) in std::mem::take(&mut self.down) {
                self.client.receive(self.now, path, data);
            }
            for end in [&mut self.client, &mut self.server] {
                end.handle_timeout(self.now);
                end.take_datagrams();
            }
            self.client.transmit(self.now, &mut self.up);
            self.server.transmit(self.now, &mut self.down);
        }
    }
}

/// The counted operations and their preparation.
impl NoqPair {
    /// The client sends datagrams one by one. Returns the number of UDP payloads.
    pub(crate) fn client_sends(&mut self) -> usize {
        let before = self.up.len();
        for _ in 0..PACKETS {
            self.client.send(self.datagram.clone());
            self.client.transmit(self.now, &mut self.up);
        }
        self.up.len() - before
    }

    /// Prepares what a client's event loop does when packets arrive one at a time.
    pub(crate) fn turns(&mut self) {
        self.server_sends();
        self.datagram.truncate(42);
    }

    fn server_sends(&mut self) {
        for _ in 0..PACKETS {
            self.server.send(self.datagram.clone());
            self.server.transmit(self.now, &mut self.down);
        }
    }

    /// Datagrams arrive at the client one at a time, and each is answered by a short one. Returns the number
    /// of UDP payloads.
    pub(crate) fn client_turns(&mut self) -> usize {
        let before = self.up.len();
        for (path, data) in std::mem::take(&mut self.down) {
            self.client.receive(self.now, path, data);
            self.client.take_datagrams();
            self.client.send(self.datagram.clone());
            self.client.transmit(self.now, &mut self.up);
            let (_, connection) = self.client.connection.as_mut().expect("a connection");
            let _ = connection.poll_timeout();
        }
        self.up.len() - before
    }
}

impl End {
    fn new(server: Option<Arc<ServerConfig>>, seed: u8) -> Self {
        let mut config = EndpointConfig::default();
        config.rng_seed(Some([seed; 32]));
        Self { endpoint: Endpoint::new(Arc::new(config), server, true), connection: None, buf: Vec::new() }
    }

    fn receive(&mut self, now: Instant, path: u16, data: Vec<u8>) {
        let is_client = self.connection.as_ref().is_some_and(|(_, connection)| connection.side().is_client());
        let tuple = match is_client {
            true => FourTuple::new(SERVER, Some(token(path))),
            false => FourTuple::new(address(path), Some(SERVER.ip())),
        };
        self.buf.clear();
        match self.endpoint.handle(now, tuple, None, BytesMut::from(&data[..]), &mut self.buf) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                if let Some((_, connection)) = &mut self.connection {
                    connection.handle_event(event);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let accepted = self.endpoint.accept(incoming, now, &mut self.buf, None);
                self.connection = Some(accepted.expect("a connection"));
            }
            _ => {}
        }
        self.exchange();
    }

    /// Exchanges events between the connection and its endpoint.
    fn exchange(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while connection.poll().is_some() {}
    }

    fn send(&mut self, datagram: Bytes) {
        let (_, connection) = self.connection.as_mut().expect("a connection");
        connection.datagrams().send(datagram, false).expect("a datagram that fits");
    }

    fn take_datagrams(&mut self) {
        let Some((_, connection)) = &mut self.connection else { return };
        while connection.datagrams().recv().is_some() {}
    }

    fn handle_timeout(&mut self, now: Instant) {
        if let Some((_, connection)) = &mut self.connection
            && connection.poll_timeout().is_some_and(|at| at <= now)
        {
            connection.handle_timeout(now);
        }
        self.exchange();
    }

    fn transmit(&mut self, now: Instant, out: &mut InFlight) {
        let Some((_, connection)) = &mut self.connection else { return };
        self.buf.clear();
        while let Some(transmit) = connection.poll_transmit(now, std::num::NonZeroUsize::MIN, &mut self.buf) {
            // At a client the local address is the path, at a server the port of the peer.
            let path = match transmit.src_ip {
                Some(IpAddr::V6(token)) => token.segments()[7],
                _ => transmit.destination.port().saturating_sub(FIRST_PORT),
            };
            out.push((path, self.buf[..transmit.size].to_vec()));
            self.buf.clear();
        }
    }
}

/// The port of path 0 at the client.
const FIRST_PORT: u16 = 5000;

/// The local end of a path, as the client names it.
fn token(path: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd6d, 0x7076, 0x706e, 0, 0, 0, 0, path))
}

/// The client's address on a path.
fn address(path: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(198, 18, 0, 0), FIRST_PORT + path))
}

/// Lets everything pass, unpaced, as the gates of a tunnel do: the cost of a congestion controller is not the
/// library's.
#[derive(Clone, Debug)]
struct Open;

impl ControllerFactory for Open {
    fn build(self: Arc<Self>, _: Instant, _: u16) -> Box<dyn Controller> {
        Box::new(Self)
    }
}

impl Controller for Open {
    fn on_congestion_event(&mut self, _: Instant, _: Instant, _: bool, _: bool, _: u64, _: u64) {}

    fn on_mtu_update(&mut self, _: u16) {}

    fn window(&self) -> u64 {
        u64::MAX / 4
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self)
    }

    fn initial_window(&self) -> u64 {
        u64::MAX / 4
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// As that of a tunnel.
fn transport() -> TransportConfig {
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(10)).max_ack_delay(Some(Duration::from_millis(5)));
    let mut config = TransportConfig::default();
    config
        .congestion_controller_factory(Arc::new(Open))
        .ack_frequency_config(Some(acks))
        .max_concurrent_multipath_paths(8)
        .datagram_receive_buffer_size(Some(1 << 20))
        .datagram_send_buffer_size(1 << 20);
    config
}
