//! TCP connections of apps that travel as streams.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use mpvpn_flow::{
    rules::{FlowMode, FlowModeReason, Rules},
    split_tcp::{ConnectionSummary, Event, FlowId, ProxyLimits, Read, Refusal, SplitTcpProxy},
};
use mpvpn_masque::{
    connect::{self, Authority, ProxyError},
    h3::{self, H3Error},
};
use mpvpn_packet::{
    FlowKey, IpPacket, TunPacket,
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

/// Bytes that an app's connection hands over at a time.
const PIECE: usize = 64 << 10;
/// Destinations to which packets go although the rules say streams, at most.
const MOST_FORBIDDEN: usize = 1024;
/// The MTU of packets for apps until the tunnel's is known (bytes).
const FIRST_MTU: usize = 1280;

/// Where the server makes TCP connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach<'a> {
    /// It does so wherever it would translate packets.
    pub(super) translated: bool,
    /// Its networks, into which it translates nothing.
    pub(super) networks: &'a [IpNet],
}

impl Reach<'_> {
    fn translates(&self, ip: IpAddr) -> bool {
        self.translated && !self.networks.iter().any(|net| net.contains(&ip))
    }
}

/// The far end of the connection, for a moment.
pub(super) struct Far<'a> {
    pub(super) connection: &'a mut Connection,
    pub(super) http: &'a mut Http,
    pub(super) relays: &'a mut Relays,
    pub(super) multipath: &'a mut MultipathConnection,
    /// Where errors come from.
    pub(super) gateway: Gateway,
    /// For `proxy-authorization`.
    pub(super) credentials: Option<&'a str>,
    /// The server carries packets, too.
    pub(super) packets: bool,
}

#[derive(Clone, Copy, Debug)]
struct Flow {
    id: FlowId,
    to: SocketAddr,
    /// The server has agreed.
    opened: bool,
}

/// Ends the TCP connections of apps, and moves their bytes.
#[derive(Debug)]
pub(super) struct Lane {
    rules: Rules,
    split_tcp: SplitTcpProxy,
    streams: FxHashMap<FlowId, StreamId>,
    flows: BTreeMap<StreamId, Flow>,
    /// Connections that wait until the server allows another stream.
    waiting: VecDeque<(FlowId, SocketAddr)>,
    /// It does.
    may_open: bool,
    /// Streams that have something to read, or room to write.
    readable: VecDeque<StreamId>,
    writable: VecDeque<StreamId>,
    /// Destinations to which the server makes no connections, but carries packets.
    forbidden: BTreeSet<SocketAddr>,
}

impl Lane {
    pub(super) fn new(now: Instant, rules: Rules, secret: [u64; 2]) -> Self {
        Self {
            rules,
            split_tcp: SplitTcpProxy::new(now, ProxyLimits::default(), secret, FIRST_MTU),
            streams: FxHashMap::default(),
            flows: BTreeMap::new(),
            waiting: VecDeque::new(),
            may_open: true,
            readable: VecDeque::new(),
            writable: VecDeque::new(),
            forbidden: BTreeSet::new(),
        }
    }

    /// Other rules count for new connections.
    pub(super) fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Packets to apps fit so many bytes.
    pub(super) fn set_mtu(&mut self, mtu: usize) {
        self.split_tcp.set_mtu(mtu);
    }

    /// Connections now.
    pub(super) fn flows(&self) -> usize {
        self.split_tcp.flow_count()
    }

    /// All of them.
    pub(super) fn summaries(&self) -> impl Iterator<Item = ConnectionSummary> {
        self.split_tcp.summaries()
    }

    /// Why a flow travels as a stream, or as packets.
    pub(super) fn why(&self, key: &FlowKey, reach: Reach<'_>, streams: bool) -> FlowModeReason {
        if key.protocol != protocol::TCP {
            return FlowModeReason::NotTcp;
        }
        match self.rules.decide(key.destination(), |ip| reach.translates(ip)) {
            (wants, why) if wants == streams => why,
            _ if self.forbidden.contains(&key.destination()) => FlowModeReason::ServerRefused,
            _ => FlowModeReason::BeganAsPackets,
        }
    }

    /// A stream has something to read.
    pub(super) fn readable(&mut self, stream: StreamId) {
        self.readable.push_back(stream);
    }

    /// A stream has room again.
    pub(super) fn writable(&mut self, stream: StreamId) {
        self.writable.push_back(stream);
    }

    /// The server allows more streams.
    pub(super) fn streams_available(&mut self) {
        self.may_open = true;
    }

    /// The server reads a stream no more; whether it is one of these. The answer to a request says why it was refused.
    pub(super) fn stopped(&mut self, relays: &Relays, stream: StreamId) -> bool {
        let Some(flow) = self.flows.get(&stream).copied() else { return false };
        if flow.opened && relays.breaks_when_stopped(stream) {
            self.split_tcp.abort(flow.id);
            self.streams.remove(&flow.id);
            self.flows.remove(&stream);
            self.readable.push_back(stream);
        }
        true
    }

    /// Whether a connection of an app ends here.
    pub(super) fn ends(&self, flow: &FlowKey) -> bool {
        self.split_tcp.has_flow(flow)
    }

    /// Takes a packet of an app, if it is of a connection that travels as a stream.
    pub(super) fn takes(&mut self, now: Instant, packet: &IpPacket<'_>, reach: Reach<'_>) -> bool {
        if packet.protocol() != protocol::TCP || !packet.has_transport_header() {
            return false;
        }
        let key = FlowKey::of(packet);
        if self.split_tcp.has_flow(&key) {
            self.split_tcp.handle_packet(now, packet);
            return true;
        }
        let begins = Segment::of(packet).is_some_and(|segment| segment.has(SYN) && !segment.has(ACK));
        if !begins || !self.wants(packet, key.destination(), reach) {
            return false;
        }
        self.split_tcp.handle_packet(now, packet);
        true
    }

    /// Takes a TCP packet of an app, where all its connections travel as streams.
    pub(super) fn take(&mut self, now: Instant, packet: &IpPacket<'_>) {
        self.split_tcp.handle_packet(now, packet);
    }

    fn wants(&self, packet: &IpPacket<'_>, to: SocketAddr, reach: Reach<'_>) -> bool {
        self.rules.takes_stream(to, |ip| reach.translates(ip))
            && (self.rules.mode == FlowMode::Stream
                || !self.forbidden.contains(&to) && !tcp::wants_multipath(packet))
    }

    /// The next packet for an app.
    pub(super) fn poll_packet(&mut self, now: Instant) -> Option<TunPacket> {
        self.split_tcp.poll_packet(now)
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.split_tcp.poll_timeout()
    }

    /// Lets time pass.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if self.split_tcp.poll_timeout().is_some_and(|at| now >= at) {
            self.split_tcp.handle_timeout(now);
        }
    }

    /// All streams are gone, and the connections of the apps with them.
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

    /// Whether there is anything to move.
    fn has_work(&self) -> bool {
        self.split_tcp.has_events()
            || !self.readable.is_empty()
            || !self.writable.is_empty()
            || self.may_open && !self.waiting.is_empty()
    }

    /// Nothing can be reached now.
    pub(super) fn idle(&mut self) {
        while let Some(event) = self.split_tcp.poll_event() {
            if let Event::ConnectRequested { id, .. } = event {
                self.split_tcp.refuse(id, Refusal::Silence);
            }
        }
    }

    /// Moves bytes between apps and streams.
    ///
    /// # Errors
    /// If the server breaks HTTP/3: the connection is to be closed.
    pub(super) fn drive(&mut self, now: Instant, mut far: Far<'_>) -> Result<(), H3Error> {
        loop {
            if self.may_open
                && let Some((id, to)) = self.waiting.pop_front()
            {
                self.open(&mut far, id, to);
            } else if let Some(event) = self.split_tcp.poll_event() {
                self.handle(now, &mut far, event)?;
            } else if let Some(stream) = self.readable.pop_front() {
                self.download(now, &mut far, stream)?;
            } else if let Some(stream) = self.writable.pop_front() {
                self.upload(now, &mut far, stream);
            } else {
                return Ok(());
            }
        }
    }

    fn handle(&mut self, now: Instant, far: &mut Far<'_>, event: Event) -> Result<(), H3Error> {
        match event {
            Event::ConnectRequested { id, to, .. } => self.waiting.push_back((id, to)),
            Event::Readable(id) => {
                if let Some(stream) = self.streams.get(&id).copied() {
                    self.upload(now, far, stream);
                }
            }
            Event::Writable(id) => {
                if let Some(stream) = self.streams.get(&id).copied() {
                    self.download(now, far, stream)?;
                }
            }
            Event::Aborted(id) => {
                self.waiting.retain(|(waiting, _)| *waiting != id);
                if let Some(stream) = self.streams.remove(&id) {
                    self.flows.remove(&stream);
                    far.relays.abort(far.connection, far.http, stream, h3::code::REQUEST_CANCELLED);
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, far: &mut Far<'_>, id: FlowId, to: SocketAddr) {
        let Ok(stream) = far.connection.open_bi() else {
            self.waiting.push_front((id, to));
            self.may_open = false;
            return;
        };
        far.relays.insert(far.connection, stream);
        let request = connect::request(&Authority::from(to), far.credentials);
        far.connection.write(stream, h3::encode_headers(&request));
        self.streams.insert(id, stream);
        self.flows.insert(stream, Flow { id, to, opened: false });
    }

    /// From the app to the server.
    fn upload(&mut self, now: Instant, far: &mut Far<'_>, stream: StreamId) {
        let Some(flow) = self.flows.get(&stream).copied() else { return };
        while far.connection.writable_bytes(stream) > 0 {
            match self.split_tcp.read(now, flow.id, PIECE) {
                Read::Data(data) => {
                    far.multipath.count_sent(data.len() as u64);
                    far.relays.write(far.connection, stream, data);
                }
                Read::Blocked => return,
                Read::Finished => {
                    far.relays.finish(far.connection, far.http, stream);
                    return self.forget_if_over(far.relays, stream);
                }
                Read::UnknownFlow => return,
            }
        }
    }

    /// From the server to the app.
    fn download(&mut self, now: Instant, far: &mut Far<'_>, stream: StreamId) -> Result<(), H3Error> {
        let Some(flow) = self.flows.get_mut(&stream) else {
            // The server has stopped it.
            far.relays.abort(far.connection, far.http, stream, h3::code::REQUEST_CANCELLED);
            return Ok(());
        };
        let id = flow.id;
        if !flow.opened {
            match far.relays.answer(far.connection, far.http, stream)?.as_ref().map(connect::check_response) {
                Some(Ok(())) => {
                    flow.opened = true;
                    self.split_tcp.accept(now, id);
                }
                Some(Err(failure)) => {
                    let to = flow.to;
                    self.refused(far, stream, id, to, failure);
                    return Ok(());
                }
                // An end without an answer is found below.
                None => {}
            }
        }
        loop {
            let opened = self.flows.get(&stream).is_some_and(|flow| flow.opened);
            if opened && self.split_tcp.writable_bytes(id) == 0 {
                return Ok(());
            }
            match far.relays.read(far.connection, far.http, stream)? {
                RelayRead::Data(data) => {
                    far.multipath.on_data_received(now, data.len() as u64);
                    self.split_tcp.write(now, id, data);
                }
                RelayRead::Blocked => return Ok(()),
                RelayRead::Finished if opened => {
                    self.split_tcp.finish(now, id);
                    self.forget_if_over(far.relays, stream);
                    return Ok(());
                }
                RelayRead::Finished | RelayRead::Broken => {
                    self.split_tcp.abort(id);
                    self.give_up(far, stream, id);
                    return Ok(());
                }
            }
        }
    }

    fn refused(
        &mut self,
        far: &mut Far<'_>,
        stream: StreamId,
        id: FlowId,
        to: SocketAddr,
        failure: ProxyError,
    ) {
        let from = far.gateway.for_source(to.ip());
        let unreachable = |reason: Unreachable| match from {
            Some(from) => Refusal::Unreachable(reason, from),
            None => Refusal::Reset,
        };
        let refusal = match failure {
            // What it forbids itself it may still carry as packets: the app asks again.
            ProxyError::Prohibited if far.packets && self.rules.mode == FlowMode::Auto => {
                if self.forbidden.len() >= MOST_FORBIDDEN {
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
        self.give_up(far, stream, id);
    }

    fn give_up(&mut self, far: &mut Far<'_>, stream: StreamId, id: FlowId) {
        self.streams.remove(&id);
        self.flows.remove(&stream);
        far.relays.abort(far.connection, far.http, stream, h3::code::REQUEST_CANCELLED);
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
    pub(super) fn drive_lane(&mut self, now: Instant) {
        let lane = &mut self.apps.lane;
        if !lane.has_work() {
            return;
        }
        let Some(session) = self.session.as_mut().filter(|session| session.up) else {
            return lane.idle();
        };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        if let Err(error) = lane.drive(now, session.far(connection, self.authorization.as_deref())) {
            self.broken(now, &error);
        }
    }
}
