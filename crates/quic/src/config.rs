use std::{fmt, net::SocketAddr, sync::Arc};

use aws_lc_rs::hmac;
use mpvpn_types::{CongestionControl, Duration, LinkId};
use noq_proto::{
    AckFrequencyConfig, EndpointConfig, MtuDiscoveryConfig, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};

use crate::{
    LocalAddress, QlogSink, Shard,
    cid::{ShardCids, first_cid},
    gate::GateFactory,
};

/// QUIC version 1 (RFC 9000 §15), the only one that is spoken.
pub(crate) const QUIC_VERSION: u32 = 1;

/// The largest overhead of a 1-RTT packet with one DATAGRAM frame (bytes): flags, connection ID, packet
/// number, AEAD tag, frame type and length (RFC 9000 §17.3.1, RFC 9221 §4).
pub const DATAGRAM_OVERHEAD: usize = 1 + 8 + 4 + 16 + 9;

/// The UDP payload that every path is assumed to carry before path MTU discovery (bytes): it holds a datagram
/// with an IP packet of 1280 bytes, the least MTU of IPv6 (RFC 8200 §5). Larger: paths with a small MTU fail;
/// smaller: the tunnel cannot carry IPv6 at first.
const INITIAL_MTU: u16 = 1328;

/// How long the peer may keep an acknowledgement, if it takes ACK_FREQUENCY frames. Shorter: more packets;
/// longer: rates and losses are known later.
pub(crate) const MAX_ACK_DELAY: Duration = Duration::from_millis(5);
/// How many ack-eliciting packets may arrive before the peer has to acknowledge them
/// (draft-ietf-quic-ack-frequency §4; RFC 9000 §13.2.2 recommends 2). Smaller: more packets back; larger:
/// acknowledgements come in larger bunches, and BBR takes more of what has arrived for what is in flight.
/// Chosen.
pub(crate) const ACK_ELICITING_THRESHOLD: u32 = 10;
/// How long after a detected MTU black hole the MTU is searched again. It is short because noq also takes an
/// overflowing queue for a black hole: when packets are lost that are a few bytes shorter than an earlier
/// acknowledged one. With much loss and many paths that happens every few seconds, and the smallest MTU of
/// all paths limits the datagrams. Longer: small packets for longer; shorter: more probes.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_millis(500);

/// The round-trip time before the first sample: a lost handshake packet is repeated after three of them. RFC
/// 9002 §6.2.2 recommends 333 ms, and so a second. Longer: slow handshakes on lossy links; shorter: needless
/// repeats on slow links.
const INITIAL_RTT: Duration = Duration::from_millis(150);

/// Paths that a connection may have at first; more are allowed when most of them are in use. Each allowed
/// path costs each end five connection IDs and 2 KB, whether it is opened or not. Fewer: the second link
/// waits a round trip; more: memory.
pub(crate) const INITIAL_MAX_PATHS: u32 = 4;
/// Paths that a connection may have at most: two transports of 16 links. More: memory that a peer can demand.
pub(crate) const MAX_PATHS: u32 = 32;

/// The buffers of datagrams inside noq (bytes): far more than one pass hands over, so that noq never drops
/// datagrams.
const DATAGRAM_BUFFER_BYTES: usize = 16 << 20;

/// Bidirectional streams (HTTP/3 requests, and so TCP connections) that a peer may have open at a time beside
/// those that were granted ([`Connection::set_granted_requests`](crate::Connection::set_granted_requests)).
/// One that is opened and left takes 0.6 KB. More: memory that a peer can demand; fewer: apps that open many
/// connections at once wait a round trip.
pub(crate) const SPARE_REQUESTS: u32 = 512;
/// Bidirectional streams that a peer may have open at a time.
pub(crate) const MAX_REQUESTS: u32 = 16_384;
/// The receive window of a stream (bytes): 1024 gaps of two packets with 1150 bytes of stream data each,
/// because noq closes a connection whose stream has more than 1024 gaps. It allows 31 Mbit/s a stream at a
/// round trip of 600 ms. Larger: connections end under loss; smaller: slow over satellites. An mpvpn peer
/// sends less to readers that do not read.
pub(crate) const STREAM_WINDOW: u32 = 2304 << 10;
/// Bidirectional streams that a client may have open at a server before it is authenticated. Chosen: a
/// browser asks a site for some files at a time. More: memory and work that a stranger can demand; fewer: a
/// slow site, and requests of a client's apps that wait one more round trip while it connects.
const MAX_STRANGER_REQUESTS: u32 = 8;
/// The receive window of a connection before its client is authenticated (bytes): some requests with the
/// largest header sections. Larger: memory that a stranger can demand; smaller: requests that wait for
/// credit.
const STRANGER_RECEIVE_WINDOW: u32 = 128 << 10;
/// Unacknowledged stream bytes of a connection before its client is authenticated at most: pages at 10 Mbit/s
/// over a round trip of 100 ms. Larger: memory that a stranger can demand; smaller: a slow site. Chosen, as
/// the receive window.
const STRANGER_SEND_WINDOW: u64 = 128 << 10;
/// Packets that are kept for an attempt to connect while it waits for its handshake (bytes), and for all that
/// wait: the rest of a ClientHello is one packet. More: memory that strangers can demand; less: clients
/// repeat that packet.
const WAITING_BYTES: u64 = 8 << 10;
const ALL_WAITING_BYTES: u64 = 2 << 20;
/// The receive window of a connection (bytes): 2 Gbit/s at 100 ms, and 10 unread streams do not stop the
/// others; of an mpvpn peer, which sends less to readers that do not read, 64. Larger: memory that a peer can
/// demand; smaller: unread streams stop others.
pub(crate) const RECEIVE_WINDOW: u32 = 24 << 20;
/// Unacknowledged stream bytes of a connection at most: 1.3 Gbit/s at 100 ms. Smaller: slow over fast and
/// long paths; larger: memory.
const SEND_WINDOW: u64 = 16 << 20;

/// Why an endpoint cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The TLS provider lacks the cipher of QUIC's Initial packets.
    #[error("the TLS configuration lacks TLS13_AES_128_GCM_SHA256, which QUIC needs (RFC 9001 §5.2)")]
    Tls,
}

/// The receive windows of flow control (RFC 9000 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowControlWindows {
    /// For each stream (bytes).
    pub stream: u32,
    /// For all streams of a connection together (bytes).
    pub connection: u32,
}

impl Default for FlowControlWindows {
    fn default() -> Self {
        Self { stream: STREAM_WINDOW, connection: RECEIVE_WINDOW }
    }
}

/// Limits on the streams of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamLimits {
    /// Bidirectional streams at a time.
    pub(crate) requests: u32,
    /// The receive window of the connection (bytes).
    pub(crate) window: u32,
    /// Unacknowledged stream bytes that this end may have sent (bytes).
    pub(crate) send_window: u64,
}

impl StreamLimits {
    /// For clients at a server before they are authenticated. The window of a single stream cannot be raised
    /// later, so it stays as it is: the connection's window is smaller.
    fn of_strangers(self) -> Self {
        Self {
            requests: self.requests.min(MAX_STRANGER_REQUESTS),
            window: self.window.min(STRANGER_RECEIVE_WINDOW),
            send_window: self.send_window.min(STRANGER_SEND_WINDOW),
        }
    }
}

/// The transport configuration of an endpoint's connections.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// The congestion controller of every path.
    pub cc: CongestionControl,
    /// The largest UDP payload to probe for (bytes).
    pub max_udp_payload: u16,
    /// The same for connections that begin inside TCP, where a datagram may be larger than a segment. All
    /// connections accept the larger of both.
    pub max_udp_payload_inside_tcp: u16,
    /// The idle timeout (RFC 9000 §10.1).
    pub idle_timeout: Duration,
    /// The receive windows of flow control.
    pub windows: FlowControlWindows,
    /// The sink of qlog events, if they are recorded.
    pub qlog: Option<Arc<dyn QlogSink>>,
    /// A fixed seed for noq's random numbers, for repeatable simulations.
    pub rng_seed: Option<[u8; 32]>,
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            cc: CongestionControl::default(),
            max_udp_payload: 1472,
            max_udp_payload_inside_tcp: 1472,
            idle_timeout: Duration::from_secs(180),
            windows: FlowControlWindows::default(),
            qlog: None,
            rng_seed: None,
        }
    }
}

impl TransportOptions {
    /// For a client with this many shards. With several, the idle timeout is 60 instead of 180 s, because the
    /// server sends flows to a dead connection that the others could carry.
    pub fn for_shards(shards: u8) -> Self {
        let default = Self::default();
        if shards == 1 { default } else { Self { idle_timeout: Duration::from_secs(60), ..default } }
    }

    /// The limits of streams for a peer that is trusted.
    fn stream_limits(&self) -> StreamLimits {
        StreamLimits { requests: SPARE_REQUESTS, window: self.windows.connection, send_window: SEND_WINDOW }
    }

    /// For connections that send UDP payloads of at most `largest` bytes.
    fn transport(&self, largest: u16) -> TransportConfig {
        let mut mtu = MtuDiscoveryConfig::default();
        mtu.upper_bound(largest).minimum_change(2).black_hole_cooldown(BLACK_HOLE_COOLDOWN);
        let mut acks = AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(VarInt::from_u32(ACK_ELICITING_THRESHOLD))
            .max_ack_delay(Some(MAX_ACK_DELAY));
        let mut config = TransportConfig::default();
        config
            .congestion_controller_factory(Arc::new(GateFactory(self.cc)))
            .initial_mtu(INITIAL_MTU.min(largest))
            .mtu_discovery_config(Some(mtu))
            .ack_frequency_config(Some(acks))
            .initial_rtt(INITIAL_RTT)
            .max_idle_timeout(self.idle_timeout.try_into().ok())
            .keep_alive_interval(None)
            // Liveness is decided in mpvpn-path: noq would abandon healthy paths.
            .default_path_max_idle_timeout(None)
            .default_path_keep_alive_interval(None)
            .max_concurrent_multipath_paths(INITIAL_MAX_PATHS)
            .max_concurrent_bidi_streams(VarInt::from_u32(SPARE_REQUESTS))
            .max_concurrent_uni_streams(VarInt::from_u32(16))
            .stream_receive_window(VarInt::from_u32(self.windows.stream))
            .receive_window(VarInt::from_u32(self.windows.connection))
            .send_window(SEND_WINDOW)
            .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
            .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES);
        config
    }

    fn endpoint(&self, secret: &[u8]) -> EndpointConfig {
        let mut config = EndpointConfig::new(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)));
        set_cids(&mut config, Shard::ONLY, cid_key(secret));
        config.supported_versions(vec![QUIC_VERSION]);
        config.rng_seed(self.rng_seed);
        let largest = self.max_udp_payload.max(self.max_udp_payload_inside_tcp).clamp(1200, 65_527);
        if config.max_udp_payload_size(largest).is_err() {
            unreachable!("clamped to what RFC 9000 §18.2 allows");
        }
        config
    }
}

fn cid_key(secret: &[u8]) -> u64 {
    let key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), b"connection id");
    key.as_ref().first_chunk().copied().map_or(0, u64::from_le_bytes)
}

fn set_cids(config: &mut EndpointConfig, shard: Shard, key: u64) {
    config.cid_generator(Arc::new(move || Box::new(ShardCids::new(shard, key))));
}

/// TLS and transport of a client.
#[derive(Clone)]
pub struct ClientSetup {
    cc: CongestionControl,
    /// The key from which those of endpoints are derived.
    secret: Arc<hmac::Key>,
    /// The receive window of a connection (bytes).
    pub(crate) receive_window: u32,
    over_udp: noq_proto::ClientConfig,
    inside_tcp: noq_proto::ClientConfig,
    pub(crate) endpoint: Arc<EndpointConfig>,
    pub(crate) qlog: Option<Arc<dyn QlogSink>>,
}

impl ClientSetup {
    /// `secret`: random bytes, which protect the connection IDs of this process.
    ///
    /// # Errors
    /// If the TLS configuration cannot do QUIC.
    pub fn new(
        tls: Arc<rustls::ClientConfig>,
        options: &TransportOptions,
        secret: &[u8],
    ) -> Result<Self, SetupError> {
        let crypto = QuicClientConfig::try_from(tls).map_err(|_| SetupError::Tls)?;
        let mut config = noq_proto::ClientConfig::new(Arc::new(crypto));
        let mut config = |largest| {
            // A client learns its translated address on each path (draft-seemann-quic-address-discovery).
            let mut transport = options.transport(largest);
            transport.receive_observed_address_reports(true);
            config.transport_config(Arc::new(transport)).clone()
        };
        Ok(Self {
            cc: options.cc,
            secret: Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)),
            receive_window: options.windows.connection,
            over_udp: config(options.max_udp_payload),
            inside_tcp: config(options.max_udp_payload_inside_tcp),
            endpoint: Arc::new(options.endpoint(secret)),
            qlog: options.qlog.clone(),
        })
    }

    /// The congestion controller of its connections.
    pub fn cc(&self) -> CongestionControl {
        self.cc
    }

    /// The same configuration for one of several endpoints of a process, each with sockets of its own. Its
    /// key for stateless resets is its own: an endpoint answers a packet with an unknown connection ID by
    /// the reset token of that ID, and with a shared key anybody could get the token of another
    /// endpoint's connection so, and end it (RFC 9000 §21.11).
    #[must_use]
    pub fn for_endpoint(mut self, number: u8) -> Self {
        let key = hmac::sign(&self.secret, &[b"stateless reset".as_slice(), &[number]].concat());
        let mut endpoint = EndpointConfig::clone(&self.endpoint);
        endpoint.reset_key(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, key.as_ref())));
        self.endpoint = Arc::new(endpoint);
        self
    }

    /// The same configuration for connections to one shard of the server: number `value` (0 to 15) modulo its
    /// shards.
    #[must_use]
    pub fn steered(mut self, value: u8) -> Self {
        for config in [&mut self.over_udp, &mut self.inside_tcp] {
            config.initial_dst_cid_provider(Arc::new(move || first_cid(value)));
        }
        self
    }

    /// The configuration of a connection from `local`.
    pub(crate) fn config(&self, local: LocalAddress) -> &noq_proto::ClientConfig {
        if local.as_link().is_some_and(LinkId::is_tcp) { &self.inside_tcp } else { &self.over_udp }
    }
}

/// The sockets by which this process relays packets of clients, whose credentials it has checked, to its own
/// server.
pub trait OwnSockets: fmt::Debug + Send + Sync {
    /// Whether one of them has this address.
    fn contains(&self, address: SocketAddr) -> bool;
}

/// TLS and transport of a server.
#[derive(Clone, Debug)]
pub struct ServerSetup {
    pub(crate) over_udp: Arc<noq_proto::ServerConfig>,
    inside_tcp: Arc<noq_proto::ServerConfig>,
    pub(crate) endpoint: Arc<EndpointConfig>,
    /// The limits of authenticated clients.
    pub(crate) limits: StreamLimits,
    pub(crate) shard: Shard,
    pub(crate) qlog: Option<Arc<dyn QlogSink>>,
    pub(crate) own_sockets: Option<Arc<dyn OwnSockets>>,
    cid_key: u64,
}

impl ServerSetup {
    /// `secret` should stay the same across restarts: a restarted server then ends the connections of its
    /// predecessor by stateless resets (RFC 9000 §10.3).
    ///
    /// # Errors
    /// If the TLS configuration cannot do QUIC.
    pub fn new(
        tls: Arc<rustls::ServerConfig>,
        options: &TransportOptions,
        secret: &[u8],
    ) -> Result<Self, SetupError> {
        let crypto = QuicServerConfig::try_from(tls).map_err(|_| SetupError::Tls)?;
        let mut config = noq_proto::ServerConfig::with_crypto(Arc::new(crypto));
        config.incoming_buffer_size(WAITING_BYTES).incoming_buffer_size_total(ALL_WAITING_BYTES);
        let limits = options.stream_limits();
        let mut config = |largest, limits: StreamLimits| {
            let mut transport = options.transport(largest);
            transport
                .send_observed_address_reports(true)
                .max_concurrent_bidi_streams(VarInt::from_u32(limits.requests))
                .receive_window(VarInt::from_u32(limits.window))
                .send_window(limits.send_window);
            Arc::new(config.transport_config(Arc::new(transport)).clone())
        };
        Ok(Self {
            over_udp: config(options.max_udp_payload, limits.of_strangers()),
            inside_tcp: config(options.max_udp_payload_inside_tcp, limits),
            endpoint: Arc::new(options.endpoint(secret)),
            limits,
            shard: Shard::ONLY,
            qlog: options.qlog.clone(),
            own_sockets: None,
            cid_key: cid_key(secret),
        })
    }

    /// The same configuration for a process that relays by these sockets: their clients are no strangers.
    #[must_use]
    pub fn with_own_sockets(self, own_sockets: Arc<dyn OwnSockets>) -> Self {
        Self { own_sockets: Some(own_sockets), ..self }
    }

    /// The same configuration for one of several shards, which is encoded in its connection IDs.
    pub fn for_shard(&self, shard: Shard) -> Self {
        let mut endpoint = EndpointConfig::clone(&self.endpoint);
        set_cids(&mut endpoint, shard, self.cid_key);
        Self { endpoint: Arc::new(endpoint), shard, ..self.clone() }
    }

    /// The secret that makes unpredictable which sources share their limits.
    pub(crate) fn source_key(&self) -> u64 {
        self.cid_key
    }

    /// The configuration of a connection from `remote`, and its limits for streams once the client is
    /// authenticated, if they are lower until then.
    pub(crate) fn config(&self, remote: SocketAddr) -> (&Arc<noq_proto::ServerConfig>, Option<StreamLimits>) {
        if self.is_own(remote) { (&self.inside_tcp, None) } else { (&self.over_udp, Some(self.limits)) }
    }

    /// Whether a client is behind one of this process's own sockets.
    pub(crate) fn is_own(&self, remote: SocketAddr) -> bool {
        self.own_sockets.as_ref().is_some_and(|own| own.contains(remote))
    }
}
