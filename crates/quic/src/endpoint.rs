use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use bytes::BytesMut;
use mpvpn_types::{Duration, Instant};
use noq_proto::{
    ConnectionEvent, ConnectionHandle as NoqHandle, DatagramEvent, EcnCodepoint, EndpointConfig,
    EndpointEvent, FourTuple, Incoming,
};

use crate::{
    ClientSetup, Connection, ConnectionHandle, LocalAddress, QlogSink, ServerSetup, Transmit,
    config::QUIC_VERSION,
    connection::{Origin, fault::catch_panic},
    strangers::{Strangers, Verdict},
};

/// Handshakes in progress, in all shards together, from which on clients have to validate their address by a
/// Retry packet (RFC 9000 §8.1.2). Higher: more memory for spoofed clients; lower: one more round trip when
/// many clients reconnect.
const RETRY_ABOVE: usize = 256;
/// Iterations of the event loop with other work for each handshake that a server begins. A handshake takes
/// about as long as the batch of packets that an iteration handles, so while there is other work, handshakes
/// take at most a sixteenth of the time; the time in which the loop would sleep is theirs. More: nobody gets
/// in while the others use the processor; fewer: those who are connected feel a flood of handshakes.
const ITERATIONS_PER_HANDSHAKE: u32 = 16;
/// Attempts to connect that wait for their handshake, about 4 KB each; more are dropped, and clients repeat
/// them. More: memory, and clients that gave up before; fewer: many clients that connect at once come in
/// late.
const MAX_WAITING: usize = 512;
/// Packets without a connection (Retry, Version Negotiation, stateless reset) that wait to be sent at most;
/// they are sent after the received packets are handled, which may be several batches. More: memory; fewer:
/// when many clients connect at once, some have to repeat their first packet, after half a second.
const MAX_STATELESS: usize = 512;
/// The least size (bytes) of a UDP payload with a client's Initial packet (RFC 9000 §14.1). Smaller ones of
/// an unknown version get no Version Negotiation packet (RFC 9000 §6.1), so that the server sends strangers
/// no more bytes than it received.
const MIN_INITIAL_PAYLOAD: usize = 1200;

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeResult {
    /// Both ends have the keys.
    Completed,
    /// It failed, or was not answered in time.
    Failed,
}

/// Handshakes of an endpoint since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandshakeCounters {
    /// Completed handshakes.
    pub completed: u64,
    /// Failed handshakes.
    pub failed: u64,
    /// Attempts to connect that a server answered with a Retry packet (RFC 9000 §8.1.2).
    pub retried: u64,
    /// Attempts to connect that a server dropped, because there were too many.
    pub dropped: u64,
}

/// The destination of a received UDP payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// This connection, which may have events and packets to send now.
    Connection(ConnectionHandle),
    /// This new connection.
    New(ConnectionHandle),
    /// No connection; [`Endpoint::poll_stateless`] may have a packet to send.
    Nothing,
}

/// The packets of a received UDP payload, not decrypted yet.
#[derive(Debug)]
pub struct ReceivedPackets {
    pub(crate) at: Instant,
    pub(crate) origin: Origin,
    pub(crate) event: ConnectionEvent,
}

/// All connections that share sockets.
#[derive(Debug)]
pub struct Endpoint {
    inner: noq_proto::Endpoint,
    /// The configuration of accepted connections, at a server.
    server: Option<ServerSetup>,
    /// Each in its own allocation, which is freed when the connection ends.
    connections: Vec<Option<Box<Connection>>>,
    handshaking: usize,
    handshakes: HandshakeCounters,
    retry_above: usize,
    /// The limits of clients that are not authenticated, at a server.
    strangers: Option<Strangers>,
    /// Accepted attempts to connect that wait for their handshake, with the local address.
    waiting: VecDeque<(Option<LocalAddress>, Incoming)>,
    /// When a handshake began last.
    begun: Option<Instant>,
    /// Handshakes that may begin in this iteration of the event loop; `None`: no event loop has said
    /// anything, and all may.
    left: Option<u32>,
    /// Iterations with other work until a handshake may begin in one.
    pause: u32,
    stateless: VecDeque<(Transmit, Vec<u8>)>,
    scratch: Vec<u8>,
}

impl Endpoint {
    /// An endpoint that opens connections.
    pub fn client(setup: &ClientSetup) -> Self {
        Self::new(setup.endpoint.clone(), None, RETRY_ABOVE)
    }

    /// An endpoint that accepts connections.
    pub fn server(setup: &ServerSetup) -> Self {
        let retry_above = RETRY_ABOVE / usize::from(setup.shard.count());
        Self::new(setup.endpoint.clone(), Some(setup.clone()), retry_above)
    }

    fn new(config: Arc<EndpointConfig>, server: Option<ServerSetup>, retry_above: usize) -> Self {
        let accepts = server.as_ref().map(|setup| setup.over_udp.clone());
        let strangers = server.as_ref().map(|setup| Strangers::new(setup.source_key(), setup.shard.count()));
        Self {
            inner: noq_proto::Endpoint::new(config, accepts, true),
            server,
            connections: Vec::new(),
            handshaking: 0,
            handshakes: HandshakeCounters::default(),
            retry_above,
            strangers,
            waiting: VecDeque::new(),
            begun: None,
            left: None,
            pause: 0,
            stateless: VecDeque::new(),
            scratch: Vec::new(),
        }
    }

    /// Starts a connection from `local`.
    ///
    /// # Errors
    /// If the address or the name cannot be connected to.
    pub fn connect(
        &mut self,
        now: Instant,
        setup: &ClientSetup,
        local: LocalAddress,
        remote: SocketAddr,
        name: &str,
    ) -> Result<ConnectionHandle, noq_proto::ConnectError> {
        let (handle, inner) = self.inner.connect(now, setup.config(local).clone(), remote, name)?;
        let id = self.insert(now, handle, inner, Some(local), setup.qlog.clone());
        if let Some(connection) = self.get(id) {
            connection.set_receive_window(setup.receive_window);
        }
        Ok(id)
    }

    fn insert(
        &mut self,
        now: Instant,
        handle: NoqHandle,
        inner: noq_proto::Connection,
        home: Option<LocalAddress>,
        qlog: Option<Arc<dyn QlogSink>>,
    ) -> ConnectionHandle {
        if self.connections.len() <= handle.0 {
            self.connections.resize_with(handle.0 + 1, || None);
        }
        let id = ConnectionHandle(handle.0);
        self.connections[handle.0] = Some(Box::new(Connection::new(now, id, inner, home, qlog)));
        id
    }

    /// Calls noq. If it panics, the packet from `remote` that caused it is lost, and nothing else.
    fn guarded<T>(
        &mut self,
        remote: SocketAddr,
        work: impl FnOnce(&mut noq_proto::Endpoint, &mut Vec<u8>) -> T,
    ) -> Option<T> {
        let (inner, scratch) = (&mut self.inner, &mut self.scratch);
        let done = catch_panic(|| work(inner, scratch));
        done.inspect_err(|reason| {
            tracing::error!(%remote, reason, "noq panicked: this packet is dropped, all connections continue");
        })
        .ok()
    }

    /// Takes a UDP payload that arrived at `local` from `remote`, at `now` by the kernel's account if it
    /// gives one.
    pub fn handle(
        &mut self,
        now: Instant,
        local: Option<LocalAddress>,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) -> Handled {
        let (handled, packets) = self.route(now, local, remote, ecn, data);
        if let (Handled::Connection(id), Some(packets)) = (handled, packets) {
            let Some(connection) = self.get(id) else { return Handled::Nothing };
            connection.take(packets);
        }
        handled
    }

    /// As [`Self::handle`], but does not decrypt the packets of a connection: they are returned, and it takes
    /// them with [`Connection::take`].
    pub fn route(
        &mut self,
        now: Instant,
        local: Option<LocalAddress>,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) -> (Handled, Option<ReceivedPackets>) {
        if self.server.is_some() && is_short_of_unknown_version(&data) {
            return (Handled::Nothing, None);
        }
        let tuple = FourTuple::new(remote, local.map(LocalAddress::ip));
        self.scratch.clear();
        let ecn = EcnCodepoint::from_bits(ecn);
        let handled = self.guarded(remote, |inner, scratch| inner.handle(now, tuple, ecn, data, scratch));
        let handled = match handled.flatten() {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                let packets = ReceivedPackets { at: now, origin: Origin::new(local, remote), event };
                return (Handled::Connection(ConnectionHandle(handle.0)), Some(packets));
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                self.admit(now, local, incoming).map_or(Handled::Nothing, Handled::New)
            }
            Some(DatagramEvent::Response(transmit)) => {
                self.answer(local, &transmit);
                Handled::Nothing
            }
            None => Handled::Nothing,
        };
        (handled, None)
    }

    /// Decides about an attempt to connect.
    fn admit(
        &mut self,
        now: Instant,
        local: Option<LocalAddress>,
        incoming: Incoming,
    ) -> Option<ConnectionHandle> {
        let (remote, validated) = (incoming.remote_address(), incoming.remote_address_validated());
        let busy = self.handshaking + self.waiting.len() >= self.retry_above;
        let is_own = self.server.as_ref().is_some_and(|setup| setup.is_own(remote));
        let verdict = match &mut self.strangers {
            Some(strangers) if !is_own => strangers.judge(now, remote.ip(), validated, busy),
            _ if busy && !validated => Verdict::Retry,
            _ => Verdict::Accept,
        };
        tracing::trace!(%remote, validated, busy, waiting = self.waiting.len(), ?verdict, "a connection attempt");
        match verdict {
            Verdict::Retry => {
                self.handshakes.retried += 1;
                let retried = self.guarded(remote, |inner, scratch| inner.retry(incoming, scratch));
                if let Some(Ok(transmit)) = retried {
                    self.answer(local, &transmit);
                }
            }
            Verdict::Accept if self.waiting.is_empty() && self.left != Some(0) => {
                return self.accept(now, local, incoming);
            }
            Verdict::Accept if self.waiting.len() < MAX_WAITING => self.waiting.push_back((local, incoming)),
            Verdict::Accept | Verdict::Drop => {
                self.handshakes.dropped += 1;
                self.guarded(remote, |inner, _| inner.ignore(incoming));
            }
        }
        None
    }

    /// An iteration of the event loop begins. `is_busy`: it has other work than handshakes that wait.
    pub fn begin_iteration(&mut self, is_busy: bool) {
        self.pause = self.pause.saturating_sub(u32::from(is_busy));
        self.left = Some(u32::from(!is_busy || self.pause == 0));
    }

    /// Begins handshakes that had to wait: returns the next new connection.
    pub fn accept_waiting(&mut self, now: Instant) -> Option<ConnectionHandle> {
        while self.left != Some(0) {
            let (local, incoming) = self.waiting.pop_front()?;
            if let Some(id) = self.accept(now, local, incoming) {
                return Some(id);
            }
        }
        None
    }

    /// When [`Self::accept_waiting`] has to be called: in the next iteration, at once, if any wait.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.begun.filter(|_| !self.waiting.is_empty()).map(|at| at + Duration::from_nanos(1))
    }

    /// The next connection to close because too many are not authenticated.
    pub fn excess_stranger(&mut self) -> Option<ConnectionHandle> {
        self.strangers.as_mut()?.excess()
    }

    fn accept(
        &mut self,
        now: Instant,
        local: Option<LocalAddress>,
        incoming: Incoming,
    ) -> Option<ConnectionHandle> {
        (self.begun, self.pause) = (Some(now), ITERATIONS_PER_HANDSHAKE);
        self.left = self.left.map(|left| left.saturating_sub(1));
        let validated = incoming.remote_address_validated();
        let remote = incoming.remote_address();
        let (config, limits) = match self.server.as_ref().map(|setup| setup.config(remote)) {
            Some((config, limits)) => (Some(config.clone()), limits),
            None => (None, None),
        };
        let accepted = self.guarded(remote, |inner, scratch| inner.accept(incoming, now, scratch, config));
        match accepted? {
            Ok((handle, inner)) => {
                self.handshaking += 1;
                let qlog = self.server.as_ref().and_then(|setup| setup.qlog.clone());
                let id = self.insert(now, handle, inner, local, qlog);
                let own_sockets = self.server.as_ref().and_then(|setup| setup.own_sockets.clone());
                if let Some(connection) = self.get(id) {
                    connection.own_sockets = own_sockets;
                }
                if let (Some(strangers), Some(limits)) = (&mut self.strangers, limits) {
                    let stranger = strangers.insert(now, id, remote.ip(), validated);
                    if let Some(connection) = self.get(id) {
                        connection.set_stranger(stranger, limits);
                    }
                }
                Some(id)
            }
            Err(error) => {
                self.handshakes.failed += 1;
                tracing::debug!(cause = %error.cause, "a connection attempt was refused");
                if let Some(transmit) = &error.response {
                    self.answer(local, transmit);
                }
                None
            }
        }
    }

    fn answer(&mut self, local: Option<LocalAddress>, transmit: &noq_proto::Transmit) {
        if self.stateless.len() >= MAX_STATELESS {
            return;
        }
        let outgoing = Transmit {
            local: transmit.src_ip.map(LocalAddress::from).or(local),
            remote: transmit.destination,
            ecn: None,
            dscp: 0,
            size: transmit.size,
            segment_size: None,
        };
        self.stateless.push_back((outgoing, self.scratch[..transmit.size].to_vec()));
    }

    /// The next packet to send that belongs to no connection.
    pub fn poll_stateless(&mut self) -> Option<(Transmit, Vec<u8>)> {
        self.stateless.pop_front()
    }

    /// A connection.
    pub fn get(&mut self, id: ConnectionHandle) -> Option<&mut Connection> {
        self.connections.get_mut(id.0)?.as_deref_mut()
    }

    /// Notes that a handshake has ended.
    pub fn on_handshake_ended(&mut self, result: HandshakeResult) {
        self.handshaking = self.handshaking.saturating_sub(1);
        match result {
            HandshakeResult::Completed => self.handshakes.completed += 1,
            HandshakeResult::Failed => self.handshakes.failed += 1,
        }
    }

    /// The handshakes since the start.
    pub fn handshakes(&self) -> HandshakeCounters {
        self.handshakes
    }

    /// Exchanges events between a connection and the endpoint, and removes a drained connection; to be called
    /// after every use of the connection. Returns whether the connection still exists.
    pub fn process_endpoint_events(&mut self, id: ConnectionHandle) -> bool {
        loop {
            let Some(Some(connection)) = self.connections.get_mut(id.0) else { return false };
            if let (Some(strangers), Some(stranger)) = (&mut self.strangers, connection.take_stranger(false))
            {
                strangers.remove(stranger);
            }
            let next = connection.guarded_read(noq_proto::Connection::poll_endpoint_events);
            let Some(event) = next.unwrap_or_else(|| Some(EndpointEvent::drained())) else { return true };
            let drained = event.is_drained();
            let inner = &mut self.inner;
            match catch_panic(|| inner.handle_event(NoqHandle(id.0), event)) {
                Ok(Some(event)) => {
                    connection.guarded(|inner| inner.handle_event(event));
                }
                Ok(None) => {}
                // The next iteration removes the connection.
                Err(reason) => connection.on_panic(reason),
            }
            if drained {
                if let (Some(strangers), Some(stranger)) =
                    (&mut self.strangers, connection.take_stranger(true))
                {
                    strangers.remove(stranger);
                }
                self.connections[id.0] = None;
                return false;
            }
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // noq warns about attempts that are dropped without a word.
        for (_, incoming) in std::mem::take(&mut self.waiting) {
            self.guarded(incoming.remote_address(), |inner, _| inner.ignore(incoming));
        }
    }
}

/// Whether a UDP payload begins with a long header of another QUIC version and is too short for an Initial
/// packet. The version follows the first byte (RFC 8999 §5.1).
fn is_short_of_unknown_version(payload: &[u8]) -> bool {
    let [flags, version @ ..] = payload else { return false };
    let version = version.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    flags & 0x80 != 0 && version != Some(QUIC_VERSION) && payload.len() < MIN_INITIAL_PAYLOAD
}

#[cfg(test)]
mod tests {
    use std::{
        net::IpAddr,
        sync::atomic::{AtomicU8, Ordering::Relaxed},
    };

    use mpvpn_types::LinkId;
    use noq_proto::{ConnectionId, ConnectionIdGenerator, InvalidCid};

    use super::*;
    use crate::{Event, LostReason, Shard, TransportOptions, cid::ShardCids};

    const LINK: LinkId = LinkId(0);
    const SERVER: &str = "192.0.2.1:443";

    /// In which call the connection ID generator of the server panics: in none, to generate, to validate.
    const NO_FAULT: u8 = 0;
    const GENERATE: u8 = 1;
    const VALIDATE: u8 = 2;

    /// Connection IDs that panic inside noq when the test wants it.
    struct FaultyCids(ShardCids, Arc<AtomicU8>);

    impl ConnectionIdGenerator for FaultyCids {
        fn generate_cid(&mut self) -> ConnectionId {
            assert_ne!(self.1.load(Relaxed), GENERATE, "no connection ID today");
            self.0.generate_cid()
        }

        fn validate(&self, id: ConnectionId) -> Result<(), InvalidCid> {
            assert_ne!(self.1.load(Relaxed), VALIDATE, "an ID that cannot be");
            self.0.validate(id)
        }

        fn cid_len(&self) -> usize {
            self.0.cid_len()
        }

        fn cid_lifetime(&self) -> Option<Duration> {
            self.0.cid_lifetime()
        }
    }

    /// A server with [`FaultyCids`], and what its clients need.
    fn server(fault: &Arc<AtomicU8>) -> (Endpoint, ClientSetup) {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let cert =
            rcgen::CertificateParams::new(vec!["mpvpn".to_owned()]).unwrap().self_signed(&key).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(cert.der().clone()).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut accepts = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key)
            .unwrap();
        let mut connects = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let alpn = vec![b"mpvpn".to_vec()];
        (accepts.alpn_protocols, connects.alpn_protocols) = (alpn.clone(), alpn);
        let options = TransportOptions::default();
        let mut setup = ServerSetup::new(Arc::new(accepts), &options, &[7; 32]).unwrap();
        let mut config = EndpointConfig::clone(&setup.endpoint);
        let fault = fault.clone();
        config.cid_generator(Arc::new(move || {
            Box::new(FaultyCids(ShardCids::new(Shard::ONLY, 7), fault.clone()))
        }));
        setup.endpoint = Arc::new(config);
        (Endpoint::server(&setup), ClientSetup::new(Arc::new(connects), &options, &[8; 32]).unwrap())
    }

    /// A client with one connection, and its connection at the server.
    struct Client {
        endpoint: Endpoint,
        id: ConnectionHandle,
        address: SocketAddr,
        at_server: Option<ConnectionHandle>,
        connected: bool,
        /// Why the server lost the connection.
        lost: Option<LostReason>,
    }

    impl Client {
        fn new(now: Instant, setup: &ClientSetup, host: u8) -> Self {
            let mut endpoint = Endpoint::client(setup);
            let id = endpoint
                .connect(now, setup, LocalAddress::link(LINK), SERVER.parse().unwrap(), "mpvpn")
                .unwrap();
            let address = SocketAddr::from(([198, 51, 100, host], 5000));
            Self { endpoint, id, address, at_server: None, connected: false, lost: None }
        }

        /// Exchanges packets with the server for `rounds` milliseconds.
        fn exchange(&mut self, now: &mut Instant, server: &mut Endpoint, rounds: u32) {
            for _ in 0..rounds {
                *now += Duration::from_millis(1);
                let local = Some(LocalAddress::from(SERVER.parse::<SocketAddr>().unwrap().ip()));
                for packet in self.sent_by_client(*now) {
                    if let Handled::New(id) = server.handle(*now, local, self.address, 0, packet) {
                        self.at_server = Some(id);
                    }
                }
                let mut packets: Vec<BytesMut> = Vec::new();
                while let Some((_, data)) = server.poll_stateless() {
                    packets.push(BytesMut::from(&data[..]));
                }
                if let Some(connection) = self.at_server.and_then(|id| server.get(id)) {
                    packets.extend(sent_by(*now, connection));
                    while let Some(event) = connection.poll_event(*now) {
                        if let Event::Lost(reason) = event {
                            self.lost = Some(reason);
                        }
                    }
                }
                if self.at_server.is_some_and(|id| !server.process_endpoint_events(id)) {
                    self.at_server = None;
                }
                for packet in packets {
                    let server = SERVER.parse().unwrap();
                    self.endpoint.handle(*now, Some(LocalAddress::link(LINK)), server, 0, packet);
                }
            }
        }

        fn sent_by_client(&mut self, now: Instant) -> Vec<BytesMut> {
            let Some(connection) = self.endpoint.get(self.id) else { return Vec::new() };
            while let Some(event) = connection.poll_event(now) {
                self.connected |= matches!(event, Event::Connected);
            }
            let packets = sent_by(now, connection);
            self.endpoint.process_endpoint_events(self.id);
            packets
        }
    }

    /// The packets of a connection, after its timers.
    fn sent_by(now: Instant, connection: &mut Connection) -> Vec<BytesMut> {
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        let (mut packets, mut buf) = (Vec::new(), Vec::new());
        while let Some(transmit) = connection.poll_transmit(now, &mut buf) {
            packets.extend(buf.chunks(transmit.segment_size.unwrap_or(transmit.size)).map(BytesMut::from));
            buf.clear();
        }
        packets
    }

    /// The answer of a server to a long header of version 0x0a0a0a0a without connection IDs, padded to `size`
    /// bytes.
    fn answer_to_unknown_version(size: usize) -> Option<Vec<u8>> {
        let (mut server, _) = server(&Arc::default());
        let mut packet = BytesMut::from(&[0xc0, 0x0a, 0x0a, 0x0a, 0x0a, 0, 0][..]);
        packet.resize(size, 0);
        let handled = server.handle(Instant::now(), None, "198.51.100.9:9".parse().unwrap(), 0, packet);
        assert_eq!(handled, Handled::Nothing);
        server.poll_stateless().map(|(_, data)| data)
    }

    #[test]
    fn only_a_packet_of_full_size_gets_version_negotiation() {
        for size in [7, 39, 1199] {
            assert_eq!(answer_to_unknown_version(size), None, "{size} bytes");
        }
        let answer = answer_to_unknown_version(1200).expect("an answer");
        // First byte, version 0, two empty connection IDs, a reserved version (RFC 9000 §15), version 1.
        assert_eq!((&answer[1..7], answer.len()), (&[0; 6][..], 15));
        assert_eq!((answer[7] & 0xf, &answer[11..]), (0xa, &[0, 0, 0, 1][..]));
    }

    /// As behind a proxy for UDP on the same machine, from which all clients come.
    #[test]
    fn sources_on_the_loopback_are_limited_like_others() {
        let (mut server, setup) = server(&Arc::default());
        let now = Instant::now();
        for number in 0..20 {
            let initial = Client::new(now, &setup, number).sent_by_client(now).remove(0);
            let remote = SocketAddr::from(([127, 0, 0, 1], 5000 + u16::from(number)));
            server.handle(now, None, remote, 0, initial);
        }
        assert_eq!(server.handshakes().retried, 4, "{:?}", server.handshakes());
    }

    #[test]
    fn a_server_speaks_version_1_only() {
        let fault = Arc::default();
        let (mut server, setup) = server(&fault);
        let mut now = Instant::now();
        let initial = Client::new(now, &setup, 1).sent_by_client(now).remove(0);
        // Drafts 29 and 34, and the versions that noq offers if nobody asks, are not known here.
        for version in [0xff00_001d_u32, 0xff00_0022, 0x6b33_43cf, 2] {
            let mut other = initial.clone();
            other[1..5].copy_from_slice(&version.to_be_bytes());
            let remote = "198.51.100.9:9".parse().unwrap();
            assert_eq!(server.handle(now, None, remote, 0, other), Handled::Nothing, "{version:#x}");
            let (_, answer) = server.poll_stateless().expect("Version Negotiation");
            assert_eq!(answer[1..5], [0; 4], "{version:#x}");
        }
        let mut client = Client::new(now, &setup, 1);
        client.exchange(&mut now, &mut server, 20);
        assert!(client.connected);
    }

    #[test]
    fn a_panic_while_a_stranger_is_handled_drops_that_packet_only() {
        let fault = Arc::<AtomicU8>::default();
        let (mut server, setup) = server(&fault);
        let mut now = Instant::now();
        let mut first = Client::new(now, &setup, 1);
        first.exchange(&mut now, &mut server, 20);
        assert!(first.connected);

        // In `Endpoint::handle` of noq: a short header of an unknown connection.
        fault.store(VALIDATE, Relaxed);
        let short = BytesMut::from(&[0x40; 40][..]);
        assert_eq!(server.handle(now, None, "198.51.100.9:9".parse().unwrap(), 0, short), Handled::Nothing);

        // In `Endpoint::accept`, and in `Endpoint::retry`.
        fault.store(GENERATE, Relaxed);
        for retry_above in [RETRY_ABOVE, 0] {
            server.retry_above = retry_above;
            let initial = Client::new(now, &setup, 2).sent_by_client(now).remove(0);
            let remote = "198.51.100.2:5000".parse().unwrap();
            assert_eq!(server.handle(now, None, remote, 0, initial), Handled::Nothing);
            assert!(server.poll_stateless().is_none());
        }
        server.retry_above = RETRY_ABOVE;
        assert_eq!(server.handshaking, 1, "only the first client's, which nobody counted down");

        fault.store(NO_FAULT, Relaxed);
        first.exchange(&mut now, &mut server, 20);
        assert!(first.at_server.is_some() && first.lost.is_none());
        let mut later = Client::new(now, &setup, 3);
        later.exchange(&mut now, &mut server, 20);
        assert!(later.connected);
    }

    #[test]
    fn endpoints_of_a_client_do_not_tell_reset_tokens_of_each_other() {
        let (_, setup) = server(&Arc::default());
        // The answer of an endpoint that knows no connection to a short header with this ID: the token is at
        // the end.
        let token = |number: u8, id: &[u8]| {
            let mut endpoint = Endpoint::client(&setup.clone().for_endpoint(number));
            let mut packet = BytesMut::from(&[0x40][..]);
            packet.extend_from_slice(id);
            packet.resize(100, 7);
            let remote = "192.0.2.9:9".parse().unwrap();
            assert_eq!(endpoint.handle(Instant::now(), None, remote, 0, packet), Handled::Nothing);
            let (_, reset) = endpoint.poll_stateless().expect("a stateless reset");
            reset[reset.len() - 16..].to_vec()
        };
        let now = Instant::now();
        let initial = Client::new(now, &setup.clone().for_endpoint(0), 1).sent_by_client(now).remove(0);
        // First byte, version, destination and source connection ID (RFC 8999 §5.1).
        let source_at = 6 + usize::from(initial[5]);
        let id = &initial[source_at + 1..][..usize::from(initial[source_at])];
        assert_eq!(token(0, id), token(0, id));
        assert_ne!(token(0, id), token(1, id), "of another class or thread");
    }

    #[test]
    fn a_handshake_begins_in_each_iteration_or_in_one_of_sixteen_with_other_work() {
        let (mut server, setup) = server(&Arc::default());
        let now = Instant::now();
        let handled = |server: &mut Endpoint, host| {
            let mut client = Client::new(now, &setup, host);
            let packets = client.sent_by_client(now);
            let handled = packets.into_iter().map(|data| server.handle(now, None, client.address, 0, data));
            handled.filter(|handled| matches!(handled, Handled::New(_))).count()
        };
        let accepted = |server: &mut Endpoint, now| std::iter::from_fn(|| server.accept_waiting(now)).count();
        let tick = Duration::from_nanos(1);
        // Without an event loop none waits.
        assert_eq!((handled(&mut server, 9), handled(&mut server, 10)), (1, 1));
        server.begin_iteration(false);
        assert_eq!((1..=4).map(|host| handled(&mut server, host)).sum::<usize>(), 1);
        assert_eq!((accepted(&mut server, now), server.poll_timeout()), (0, Some(now + tick)));
        let later = now + Duration::from_micros(10);
        server.begin_iteration(false);
        assert_eq!((accepted(&mut server, later), server.poll_timeout()), (1, Some(later + tick)));
        // Those that come now do not overtake those that wait.
        assert_eq!(handled(&mut server, 11), 0);
        // While there is other work, one in sixteen iterations begins one.
        let later = later + Duration::from_micros(10);
        let mut begins = |is_busy: bool, count: u32| -> Vec<usize> {
            let mut iteration = |number| {
                server.begin_iteration(is_busy);
                accepted(&mut server, later + Duration::from_micros(1) * number)
            };
            (0..count).map(&mut iteration).collect()
        };
        assert_eq!(begins(true, 32), [&[0; 15][..], &[1], &[0; 15], &[1]].concat());
        let later = later + Duration::from_millis(1);
        server.begin_iteration(false);
        assert_eq!((accepted(&mut server, later), server.poll_timeout()), (1, None));
        assert_eq!(server.handshaking, 7);
        // The queue has an end.
        server.retry_above = usize::MAX;
        (0..MAX_WAITING + 10)
            .for_each(|number| assert_eq!(handled(&mut server, (number % 100 + 20) as u8), 0));
        assert_eq!(server.waiting.len(), MAX_WAITING);
    }

    #[test]
    fn a_panic_for_an_event_of_a_connection_ends_that_connection_only() {
        let fault = Arc::<AtomicU8>::default();
        let (mut server, setup) = server(&fault);
        let mut now = Instant::now();
        let [mut other, mut doomed] = [1, 2].map(|host| Client::new(now, &setup, host));
        other.exchange(&mut now, &mut server, 20);
        // One millisecond is enough for noq to accept. It asks for more connection IDs when the handshake
        // ends.
        doomed.exchange(&mut now, &mut server, 1);
        let id = doomed.at_server.expect("accepted");
        fault.store(GENERATE, Relaxed);
        doomed.exchange(&mut now, &mut server, 20);
        assert!(server.get(id).is_none() && doomed.at_server.is_none());

        fault.store(NO_FAULT, Relaxed);
        other.exchange(&mut now, &mut server, 20);
        assert!(other.connected && other.at_server.is_some() && other.lost.is_none());
    }

    #[test]
    fn link_tokens_are_told_from_addresses() {
        assert_eq!(LocalAddress::link(LinkId(7)).as_link(), Some(LinkId(7)));
        assert_eq!(LocalAddress::from(IpAddr::from([192, 0, 2, 1])).as_link(), None);
        assert_eq!(LocalAddress::from(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])).as_link(), None);
    }
}
