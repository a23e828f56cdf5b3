use std::{net::SocketAddr, sync::Arc};

use aws_lc_rs::hmac;
use mpvpn_types::{CongestionControl, Duration, LinkId};
use noq_proto::{
    AckFrequencyConfig, EndpointConfig, MtuDiscoveryConfig, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};

use crate::{
    QlogSink, Shard,
    cid::{ShardCids, first_cid},
    endpoint::LocalAddress,
    gate::GateFactory,
};

/// Bytes that a 1-RTT packet and its DATAGRAM frame put around a payload, at most: flags,
/// connection ID, packet number, AEAD tag, frame type and length.
pub const DATAGRAM_OVERHEAD: usize = 1 + 8 + 4 + 16 + 9;

/// The UDP payload that every path is trusted with before it was probed (bytes). With the framing
/// above it leaves room for the 1280 bytes that IPv6 asks of a link (RFC 8200 §5).
const INITIAL_MTU: u16 = 1328;

/// The largest packet that passes is searched anew this long after large packets were found to be lost. It
/// is short because the library also takes the overflow of a queue for that, when it loses packets that are
/// a few bytes shorter than one with an acknowledgement in it that arrived before. Where much is lost that happens on one
/// of many paths every few seconds, and the smallest packet that fits any of them counts for all.
const BLACK_HOLE: Duration = Duration::from_millis(500);

/// What a round trip is taken for before one was measured: a packet that is lost in the handshake is repeated
/// after three of them. RFC 9002 §6.2.2 recommends 333 ms, which makes a second of it; what is repeated too
/// early on a slow link is a packet or two.
const INITIAL_RTT: Duration = Duration::from_millis(150);

/// Paths that a connection may have at first. Each path that is allowed costs either end five connection
/// IDs and 2 KB, whether it is opened or not. More are allowed when most of them are in use.
pub(crate) const FIRST_PATHS: u32 = 4;
/// Paths that a connection may have at last.
pub(crate) const MAX_PATHS: u32 = 32;

/// Room for datagrams that one pass hands to the library (bytes).
const DATAGRAM_BUFFER: usize = 16 << 20;

/// Requests, and so TCP connections, that may be open at a time. They cost nothing until they are.
const MAX_REQUESTS: u32 = 16_384;
/// Bytes of a stream that nobody reads yet: a round trip's data of 31 Mbit/s over a satellite at 600 ms. Our own end sends
/// less to readers that do not read. The library ends a connection if more than 1024 parts of a stream are missing, so
/// there must be no room for more packets than two for each, also where packets are as small as any path's (1200 bytes,
/// of which 1150 are the stream's).
const STREAM_WINDOW: u32 = 2304 << 10;
/// Those of all streams: many that nobody reads must not keep others from being read.
const RECEIVE_WINDOW: u32 = 96 << 20;
/// Bytes of streams that are sent and not acknowledged.
const SEND_WINDOW: u64 = 16 << 20;

/// Why an endpoint could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The TLS provider lacks what QUIC needs for its first packets.
    #[error("the TLS configuration lacks TLS13_AES_128_GCM_SHA256, which QUIC needs (RFC 9001 §5.2)")]
    Tls,
}

/// How much a peer may send that nobody reads yet (RFC 9000 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowControlWindows {
    /// On one stream (bytes).
    pub stream: u32,
    /// On all streams of a connection (bytes).
    pub connection: u32,
}

impl Default for FlowControlWindows {
    fn default() -> Self {
        Self { stream: STREAM_WINDOW, connection: RECEIVE_WINDOW }
    }
}

/// What connections of an endpoint have in common.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// The congestion controller of every path.
    pub cc: CongestionControl,
    /// The largest UDP payload to probe for (bytes).
    pub max_udp_payload: u16,
    /// The same for connections that begin inside TCP, which cuts what is too large for a segment. The larger of both is
    /// accepted by all.
    pub max_udp_payload_inside_tcp: u16,
    /// A connection on which nothing arrives for this long is given up.
    pub idle_timeout: Duration,
    /// Bytes that may come on a stream, and on all of them, while nobody reads.
    pub windows: FlowControlWindows,
    /// Where events of connections are recorded, if anywhere.
    pub qlog: Option<Arc<dyn QlogSink>>,
    /// A fixed seed for the endpoint's random numbers, for tests that must repeat.
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
    /// For a client with so many connections. Of several, one that is silent is soon no loss but in the way: the far
    /// end sends flows to it that the others could carry.
    #[must_use]
    pub fn for_shards(shards: u8) -> Self {
        let default = Self::default();
        if shards == 1 { default } else { Self { idle_timeout: Duration::from_secs(60), ..default } }
    }

    /// For connections on whose paths UDP payloads of at most `largest` bytes are sent.
    fn transport(&self, largest: u16) -> TransportConfig {
        let mut mtu = MtuDiscoveryConfig::default();
        mtu.upper_bound(largest).minimum_change(2).black_hole_cooldown(BLACK_HOLE);
        let mut acks = AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(VarInt::from_u32(10)).max_ack_delay(Some(Duration::from_millis(5)));
        let mut config = TransportConfig::default();
        config
            .congestion_controller_factory(Arc::new(GateFactory(self.cc)))
            .initial_mtu(INITIAL_MTU.min(largest))
            .mtu_discovery_config(Some(mtu))
            .ack_frequency_config(Some(acks))
            .initial_rtt(INITIAL_RTT)
            .max_idle_timeout(self.idle_timeout.try_into().ok())
            .keep_alive_interval(None)
            // Liveness is ours (mpvpn-path): the library would give up healthy paths.
            .default_path_max_idle_timeout(None)
            .default_path_keep_alive_interval(None)
            .max_concurrent_multipath_paths(FIRST_PATHS)
            .max_concurrent_bidi_streams(VarInt::from_u32(MAX_REQUESTS))
            .max_concurrent_uni_streams(VarInt::from_u32(16))
            .stream_receive_window(VarInt::from_u32(self.windows.stream))
            .receive_window(VarInt::from_u32(self.windows.connection))
            .send_window(SEND_WINDOW)
            .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER))
            .datagram_send_buffer_size(DATAGRAM_BUFFER);
        config
    }

    fn endpoint(&self, secret: &[u8]) -> EndpointConfig {
        let mut config = EndpointConfig::new(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)));
        set_cids(&mut config, Shard::ONLY, cid_key(secret));
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
    over_udp: noq_proto::ClientConfig,
    inside_tcp: noq_proto::ClientConfig,
    pub(crate) endpoint: Arc<EndpointConfig>,
    pub(crate) qlog: Option<Arc<dyn QlogSink>>,
}

impl ClientSetup {
    /// `secret` is any random bytes; they protect this process's connection IDs.
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
            // What address translation makes of its own a client learns on each path
            // (draft-seemann-quic-address-discovery).
            let mut transport = options.transport(largest);
            transport.receive_observed_address_reports(true);
            config.transport_config(Arc::new(transport)).clone()
        };
        Ok(Self {
            cc: options.cc,
            over_udp: config(options.max_udp_payload),
            inside_tcp: config(options.max_udp_payload_inside_tcp),
            endpoint: Arc::new(options.endpoint(secret)),
            qlog: options.qlog.clone(),
        })
    }

    /// The kind of congestion controller that its connections have.
    #[must_use]
    pub fn cc(&self) -> CongestionControl {
        self.cc
    }

    /// The same for connections that go to one shard of the server: the one with the number
    /// `value` (0 to 15) modulo its shards.
    #[must_use]
    pub fn steered(mut self, value: u8) -> Self {
        for config in [&mut self.over_udp, &mut self.inside_tcp] {
            config.initial_dst_cid_provider(Arc::new(move || first_cid(value)));
        }
        self
    }

    /// For a connection from `local`.
    pub(crate) fn config(&self, local: LocalAddress) -> &noq_proto::ClientConfig {
        if local.as_link().is_some_and(LinkId::is_tcp) { &self.inside_tcp } else { &self.over_udp }
    }
}

/// TLS and transport of a server.
#[derive(Clone, Debug)]
pub struct ServerSetup {
    pub(crate) over_udp: Arc<noq_proto::ServerConfig>,
    inside_tcp: Arc<noq_proto::ServerConfig>,
    pub(crate) endpoint: Arc<EndpointConfig>,
    pub(crate) shard: Shard,
    pub(crate) qlog: Option<Arc<dyn QlogSink>>,
    cid_key: u64,
}

impl ServerSetup {
    /// `secret` should stay the same across restarts: with it a restarted server tells the clients
    /// of its predecessor at once that their connections are gone (RFC 9000 §10.3).
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
        let mut config = |largest| {
            let mut transport = options.transport(largest);
            transport.send_observed_address_reports(true);
            Arc::new(config.transport_config(Arc::new(transport)).clone())
        };
        Ok(Self {
            over_udp: config(options.max_udp_payload),
            inside_tcp: config(options.max_udp_payload_inside_tcp),
            endpoint: Arc::new(options.endpoint(secret)),
            shard: Shard::ONLY,
            qlog: options.qlog.clone(),
            cid_key: cid_key(secret),
        })
    }

    /// The same for one of several shards, whose connection IDs name it.
    #[must_use]
    pub fn for_shard(&self, shard: Shard) -> Self {
        let mut endpoint = EndpointConfig::clone(&self.endpoint);
        set_cids(&mut endpoint, shard, self.cid_key);
        Self { endpoint: Arc::new(endpoint), shard, ..self.clone() }
    }

    /// For a connection from `remote`. One from this machine came here inside TCP.
    pub(crate) fn config(&self, remote: SocketAddr) -> &Arc<noq_proto::ServerConfig> {
        if remote.ip().to_canonical().is_loopback() { &self.inside_tcp } else { &self.over_udp }
    }
}
