//! TCP connections of apps that travel as streams.
//!
//! In: TCP packets of apps, events of streams. Out: CONNECT requests, stream bytes, TCP packets for apps.
//! Always holds: a connection has at most one stream; bytes are read from either side only if the other has
//! room for them.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use mpvpn_flow::{
    rules::{FlowMode, FlowModeReason, Rules},
    split_tcp::{Event, FlowId, ProxyLimits, Read, Refusal, SplitTcpProxy},
};
use mpvpn_masque::{
    connect::{self, Authority, ProxyError},
    h3::{self, H3Error},
};
use mpvpn_packet::{
    FlowKey, IpPacket,
    icmp::Unreachable,
    protocol,
    tcp::{self, Segment},
    tcp_flags::{ACK, SYN},
};
use mpvpn_quic::{Connection, StreamId};
use mpvpn_types::Instant;
use rustc_hash::FxHashMap;

use super::Client;
use crate::{
    RelayRead,
    http::Http,
    multipath::{Gateway, MultipathConnection},
    relay::Relays,
};

/// Bytes read from a connection of an app at a time. Chosen: the size of a GSO packet. Larger: others wait
/// longer; smaller: more calls.
const UPLOAD_CHUNK: usize = 64 << 10;
/// Destinations kept for which the server refused a stream, so that packets are used; when full, the set is
/// cleared. Chosen. Larger: memory; smaller: connections to forbidden targets are refused again first.
const MAX_FORBIDDEN_TARGETS: usize = 1024;
/// The MTU of packets for apps until the tunnel's is known (bytes): what IPv6 requires (RFC 8200 §5).
const INITIAL_MTU: usize = 1280;

/// The targets of TCP connections that the server opens.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamTargets<'a> {
    /// The server opens connections to every target for which it would translate addresses (extension
    /// `streams`).
    pub(super) is_supported: bool,
    /// The networks of the server, and those behind clients, into which it does not translate addresses.
    pub(super) networks: &'a [IpNet],
}

impl StreamTargets<'_> {
    fn contains(&self, ip: IpAddr) -> bool {
        self.is_supported && !self.networks.iter().any(|net| net.contains(&ip))
    }
}

/// The parts of a session that a stream needs, borrowed for one call.
pub(super) struct StreamContext<'a> {
    pub(super) connection: &'a mut Connection,
    pub(super) http: &'a mut Http,
    pub(super) relays: &'a mut Relays,
    pub(super) multipath: &'a mut MultipathConnection,
    /// Source addresses of ICMP errors.
    pub(super) gateway: Gateway,
    /// The value of `proxy-authorization`.
    pub(super) credentials: Option<&'a str>,
    /// Whether the server carries packets, too.
    pub(super) packets: bool,
}

#[derive(Clone, Copy, Debug)]
struct Flow {
    id: FlowId,
    to: SocketAddr,
    /// Whether the server has accepted the request.
    opened: bool,
}

/// Terminates the TCP connections of apps, and moves their bytes over streams.
#[derive(Debug)]
pub(super) struct AppTcp {
    /// The rules for new connections.
    pub(super) rules: Rules,
    pub(super) split_tcp: SplitTcpProxy,
    streams: FxHashMap<FlowId, StreamId>,
    flows: BTreeMap<StreamId, Flow>,
    /// Connections that wait for a stream (MAX_STREAMS, RFC 9000 §4.6).
    waiting: VecDeque<(FlowId, SocketAddr)>,
    /// Whether a stream may be opened.
    pub(super) may_open: bool,
    /// Streams that are readable, and those that are writable.
    pub(super) readable: VecDeque<StreamId>,
    pub(super) writable: VecDeque<StreamId>,
    /// Destinations to which the server refused a stream; their connections travel as packets.
    forbidden: BTreeSet<SocketAddr>,
}

impl AppTcp {
    pub(super) fn new(now: Instant, rules: Rules, secret: [u64; 2]) -> Self {
        Self {
            rules,
            split_tcp: SplitTcpProxy::new(now, ProxyLimits::default(), secret, INITIAL_MTU),
            streams: FxHashMap::default(),
            flows: BTreeMap::new(),
            waiting: VecDeque::new(),
            may_open: true,
            readable: VecDeque::new(),
            writable: VecDeque::new(),
            forbidden: BTreeSet::new(),
        }
    }

    /// Why a flow travels as a stream (`streams`), or as packets.
    pub(super) fn why(&self, key: &FlowKey, targets: StreamTargets<'_>, streams: bool) -> FlowModeReason {
        if key.protocol != protocol::TCP {
            return FlowModeReason::NotTcp;
        }
        match self.rules.decide(key.destination(), |ip| targets.contains(ip)) {
            (wants, why) if wants == streams => why,
            _ if self.forbidden.contains(&key.destination()) => FlowModeReason::ServerRefused,
            _ => FlowModeReason::BeganAsPackets,
        }
    }

    /// The server stopped reading a stream (STOP_SENDING). Returns whether the stream is one of these. Before
    /// the response nothing is done: the response says why the request was refused.
    pub(super) fn on_stopped(&mut self, relays: &Relays, stream: StreamId) -> bool {
        let Some(flow) = self.flows.get(&stream).copied() else { return false };
        if flow.opened && relays.breaks_when_stopped(stream) {
            self.split_tcp.abort(flow.id);
            self.streams.remove(&flow.id);
            self.flows.remove(&stream);
            self.readable.push_back(stream);
        }
        true
    }

    /// Takes a packet of an app if its connection travels as a stream, and returns whether it does.
    pub(super) fn take_if_stream(
        &mut self,
        now: Instant,
        packet: &IpPacket<'_>,
        targets: StreamTargets<'_>,
    ) -> bool {
        if packet.protocol() != protocol::TCP || !packet.has_transport_header() {
            return false;
        }
        let key = FlowKey::of(packet);
        if self.split_tcp.has_flow(&key) {
            self.split_tcp.handle_packet(now, packet);
            return true;
        }
        let begins = Segment::of(packet).is_some_and(|segment| segment.has(SYN) && !segment.has(ACK));
        if !begins || !self.wants(packet, key.destination(), targets) {
            return false;
        }
        self.split_tcp.handle_packet(now, packet);
        true
    }

    /// Whether a connection that `packet` begins would travel as a stream to `to`.
    pub(super) fn wants(&self, packet: &IpPacket<'_>, to: SocketAddr, targets: StreamTargets<'_>) -> bool {
        self.rules.takes_stream(to, |ip| targets.contains(ip))
            && (self.rules.mode == FlowMode::Stream
                || !self.forbidden.contains(&to) && !tcp::wants_multipath(packet))
    }

    /// Handles timers that have expired.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if self.split_tcp.poll_timeout().is_some_and(|at| now >= at) {
            self.split_tcp.handle_timeout(now);
        }
    }

    /// The connection to the server is lost: ends all streams and the connections of the apps.
    pub(super) fn end_streams(&mut self) {
        for flow in std::mem::take(&mut self.flows).into_values() {
            self.split_tcp.refuse(flow.id, if flow.opened { Refusal::Reset } else { Refusal::Silence });
        }
        for (id, _) in self.waiting.drain(..) {
            self.split_tcp.refuse(id, Refusal::Silence);
        }
        self.streams.clear();
        self.readable.clear();
        self.writable.clear();
        self.may_open = true;
    }

    /// Whether [`Self::drive`] has something to do.
    fn has_work(&self) -> bool {
        self.split_tcp.has_events()
            || !self.readable.is_empty()
            || !self.writable.is_empty()
            || self.may_open && !self.waiting.is_empty()
    }

    /// Refuses new connections while there is no session: their SYN stays unanswered, and the app retransmits
    /// it.
    pub(super) fn refuse_new(&mut self) {
        while let Some(event) = self.split_tcp.poll_event() {
            if let Event::ConnectRequested { id, .. } = event {
                self.split_tcp.refuse(id, Refusal::Silence);
            }
        }
    }

    /// Moves bytes between apps and streams.
    ///
    /// # Errors
    /// If the server violates HTTP/3: the connection must be closed.
    pub(super) fn drive(&mut self, now: Instant, mut context: StreamContext<'_>) -> Result<(), H3Error> {
        loop {
            if self.may_open
                && let Some((id, to)) = self.waiting.pop_front()
            {
                self.open(&mut context, id, to);
            } else if let Some(event) = self.split_tcp.poll_event() {
                self.on_event(now, &mut context, event)?;
            } else if let Some(stream) = self.readable.pop_front() {
                self.download(now, &mut context, stream)?;
            } else if let Some(stream) = self.writable.pop_front() {
                self.upload(now, &mut context, stream);
            } else {
                return Ok(());
            }
        }
    }

    fn on_event(
        &mut self,
        now: Instant,
        context: &mut StreamContext<'_>,
        event: Event,
    ) -> Result<(), H3Error> {
        match event {
            Event::ConnectRequested { id, to, .. } => self.waiting.push_back((id, to)),
            Event::Readable(id) => {
                if let Some(stream) = self.streams.get(&id).copied() {
                    self.upload(now, context, stream);
                }
            }
            Event::Writable(id) => {
                if let Some(stream) = self.streams.get(&id).copied() {
                    self.download(now, context, stream)?;
                }
            }
            Event::Aborted(id) => {
                self.waiting.retain(|(waiting, _)| *waiting != id);
                if let Some(stream) = self.streams.remove(&id) {
                    self.flows.remove(&stream);
                    context.relays.abort(
                        context.connection,
                        context.http,
                        stream,
                        h3::code::REQUEST_CANCELLED,
                    );
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, context: &mut StreamContext<'_>, id: FlowId, to: SocketAddr) {
        let Ok(stream) = context.connection.open_bi() else {
            self.waiting.push_front((id, to));
            self.may_open = false;
            return;
        };
        context.relays.insert(context.connection, stream);
        let request = connect::request(&Authority::from(to), context.credentials);
        context.connection.write(stream, h3::encode_headers(&request));
        self.streams.insert(id, stream);
        self.flows.insert(stream, Flow { id, to, opened: false });
    }

    /// Moves bytes from the app to the server.
    fn upload(&mut self, now: Instant, context: &mut StreamContext<'_>, stream: StreamId) {
        let Some(flow) = self.flows.get(&stream).copied() else { return };
        while context.connection.writable_bytes(stream) > 0 {
            match self.split_tcp.read(now, flow.id, UPLOAD_CHUNK) {
                Read::Data(data) => {
                    context.multipath.traffic.counters.tx_bytes += data.len() as u64;
                    context.relays.write(context.connection, stream, data);
                }
                Read::Blocked => return,
                Read::Finished => {
                    context.relays.finish(context.connection, context.http, stream);
                    return self.forget_if_over(context.relays, stream);
                }
                Read::UnknownFlow => return,
            }
        }
    }

    /// Moves bytes from the server to the app.
    fn download(
        &mut self,
        now: Instant,
        context: &mut StreamContext<'_>,
        stream: StreamId,
    ) -> Result<(), H3Error> {
        let Some(flow) = self.flows.get_mut(&stream) else {
            // The server sent STOP_SENDING.
            context.relays.abort(context.connection, context.http, stream, h3::code::REQUEST_CANCELLED);
            return Ok(());
        };
        let id = flow.id;
        if !flow.opened {
            match context
                .relays
                .answer(context.connection, context.http, stream)?
                .as_ref()
                .map(connect::check_response)
            {
                Some(Ok(())) => {
                    flow.opened = true;
                    self.split_tcp.accept(now, id);
                }
                Some(Err(failure)) => {
                    let to = flow.to;
                    self.on_refused(context, stream, id, to, failure);
                    return Ok(());
                }
                // A stream that ends without a response is handled below.
                None => {}
            }
        }
        loop {
            let opened = self.flows.get(&stream).is_some_and(|flow| flow.opened);
            if opened && self.split_tcp.writable_bytes(id) == 0 {
                return Ok(());
            }
            match context.relays.read(context.connection, context.http, stream)? {
                RelayRead::Data(data) => {
                    context.multipath.on_data_received(now, data.len() as u64);
                    self.split_tcp.write(now, id, data);
                }
                RelayRead::Blocked => return Ok(()),
                RelayRead::Finished if opened => {
                    self.split_tcp.finish(now, id);
                    self.forget_if_over(context.relays, stream);
                    return Ok(());
                }
                RelayRead::Finished | RelayRead::Broken => {
                    self.split_tcp.abort(id);
                    self.give_up(context, stream, id);
                    return Ok(());
                }
            }
        }
    }

    fn on_refused(
        &mut self,
        context: &mut StreamContext<'_>,
        stream: StreamId,
        id: FlowId,
        to: SocketAddr,
        failure: ProxyError,
    ) {
        let from = context.gateway.for_source(to.ip());
        let unreachable = |reason: Unreachable| match from {
            Some(from) => Refusal::Unreachable(reason, from),
            None => Refusal::Reset,
        };
        let refusal = match failure {
            // The server may still carry packets to this target: the app retransmits its SYN, which then
            // travels as a packet.
            ProxyError::Prohibited if context.packets && self.rules.mode == FlowMode::Auto => {
                if self.forbidden.len() >= MAX_FORBIDDEN_TARGETS {
                    self.forbidden.clear();
                }
                self.forbidden.insert(to);
                Refusal::Silence
            }
            ProxyError::Prohibited => unreachable(Unreachable::Prohibited),
            ProxyError::Dns | ProxyError::Unroutable => unreachable(Unreachable::AddressUnreachable),
            ProxyError::TimedOut => Refusal::Silence,
            ProxyError::Refused | ProxyError::Busy | ProxyError::Other => Refusal::Reset,
        };
        tracing::debug!(%to, ?failure, "no connection");
        self.split_tcp.refuse(id, refusal);
        self.give_up(context, stream, id);
    }

    fn give_up(&mut self, context: &mut StreamContext<'_>, stream: StreamId, id: FlowId) {
        self.streams.remove(&id);
        self.flows.remove(&stream);
        context.relays.abort(context.connection, context.http, stream, h3::code::REQUEST_CANCELLED);
    }

    fn forget_if_over(&mut self, relays: &Relays, stream: StreamId) {
        if !relays.has(stream)
            && let Some(flow) = self.flows.remove(&stream)
        {
            self.streams.remove(&flow.id);
        }
    }
}

impl Client {
    /// Moves bytes between apps and streams.
    pub(super) fn drive_app_tcp(&mut self, now: Instant) {
        let tcp = &mut self.apps.tcp;
        if !tcp.has_work() {
            return;
        }
        let Some(session) = self.session.as_mut().filter(|session| session.up) else {
            return tcp.refuse_new();
        };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        if let Err(error) = tcp.drive(now, session.stream_context(connection, self.authorization.as_deref()))
        {
            self.close_on_h3_error(now, &error);
        }
    }
}
