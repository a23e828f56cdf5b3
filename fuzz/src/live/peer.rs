//! The hostile end: QUIC by the library, everything above by the input.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use mpvpn_flow::{
    Label, Part,
    fec::{GroupPosition, Symbol},
};
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, Family, IpRange, RequestedAddress},
    connect_ip::{self, ConnectIpRequest},
    datagram, extensions,
    h3::{H3, Settings, Side, encode_data, encode_headers},
    headers::Headers,
};
use mpvpn_quic::{
    Connection, ConnectionHandle, Endpoint, Event, Handled, HandshakeResult, LocalAddress, PathStatus, Read,
    StreamId,
};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use super::{Datagram, LINKS, SERVER, capsule, identity::SETUPS, packet, request};
use crate::input::Input;

/// The field `mpvpn` of a client of this project in a request for packets, and of a server in its response.
const OFFERED: &str = "v=1, class=\"default\";weight=2, clocks=12, order=2, fec=10;source=4;repair=2, \
                       connection=0, cc=bbr, scheduler=auto, heartbeats=4, reinjection=6, data-ack=8, links";
pub(crate) const ACCEPTED: &str = "v=1, session=:BwcHBwcHBwcHBwcHBwcHBw==:, class, clocks=12, order=2, fec=10, \
                                   connection=0, networks=(\"10.0.0.0/24\" \"fd00::/64\"), cc=bbr, \
                                   heartbeats=4, reinjection=6, data-ack=8, links, streams, udp, \
                                   dns=(\"10.0.0.1\")";

/// Context IDs of datagrams: plain packets, those of the extensions, and one of nobody.
const CONTEXTS: &[u64] = &[0, 2, 4, 6, 8, 10, 12, 14, 3];

/// Limits of the peer itself, which is no subject: streams that it opens, and bytes that it queues at once.
const MAX_STREAMS: usize = 64;
const MAX_QUEUED: usize = 1 << 20;

pub(super) struct Peer {
    side: Side,
    endpoint: Endpoint,
    id: Option<ConnectionHandle>,
    /// Whether the session was set up, as far as this end is concerned.
    started: bool,
    /// Whether the answer to the request has come.
    pub(super) answered: bool,
    /// The header section of the answer.
    pub(super) answer: Option<Headers>,
    h3: H3,
    /// Streams that it may write to: its own, and those that the subject opened.
    streams: Vec<StreamId>,
    connect_ip: Headers,
    queued: usize,
    second_path_opened: bool,
    /// It neither hears nor says anything any more.
    vanished: bool,
}

impl Peer {
    /// A client that connects to a server.
    pub(super) fn client(now: Instant) -> Self {
        let setup = &SETUPS.0;
        let mut endpoint = Endpoint::client(setup);
        let id = endpoint.connect(now, setup, LocalAddress::link(LinkId(0)), SERVER, "mpvpn").ok();
        Self::new(Side::Client, endpoint, id)
    }

    /// A server that waits for a client.
    pub(super) fn server() -> Self {
        Self::new(Side::Server, Endpoint::server(&SETUPS.1), None)
    }

    fn new(side: Side, endpoint: Endpoint, id: Option<ConnectionHandle>) -> Self {
        let mut request = ConnectIpRequest::new("mpvpn", "/.well-known/masque/ip/*/*/");
        request.authorization = Some("Bearer token".to_owned());
        request.extensions = Some(OFFERED.to_owned());
        Self {
            side,
            endpoint,
            id,
            started: false,
            answered: false,
            answer: None,
            h3: H3::new(side, Settings::default()),
            streams: Vec::new(),
            connect_ip: request.headers(),
            queued: 0,
            second_path_opened: false,
            vanished: false,
        }
    }

    /// An address inside of the tunnel at the client, and one beyond the server.
    pub(super) fn inner(&self) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 2], 4000))
    }

    pub(super) fn beyond(&self) -> SocketAddr {
        SocketAddr::from(([203, 0, 113, 9], 443))
    }

    /// The paths that work.
    pub(super) fn paths(&mut self) -> usize {
        self.connection().map_or(0, |connection| connection.paths().count())
    }

    fn connection(&mut self) -> Option<&mut Connection> {
        self.endpoint.get(self.id?)
    }

    pub(super) fn receive(&mut self, now: Instant, link: LinkId, data: BytesMut) {
        if self.vanished {
            return;
        }
        let (local, remote) = match self.side {
            Side::Client => (LocalAddress::link(link), SERVER),
            Side::Server => (LocalAddress::from(SERVER.ip()), client_address(link)),
        };
        if let Handled::New(id) = self.endpoint.handle(now, Some(local), remote, 0, data) {
            // A subject that lost its connection comes back.
            if self.id.replace(id).is_some() {
                (self.started, self.streams) = (false, Vec::new());
                self.h3 = H3::new(self.side, Settings::default());
            }
        }
    }

    pub(super) fn poll_timeout(&mut self) -> Option<Instant> {
        self.connection().and_then(|connection| connection.poll_timeout())
    }

    pub(super) fn drive(&mut self, now: Instant, out: &mut Vec<Datagram>) {
        let Some(id) = self.id else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        let (mut readable, mut connected) = (Vec::new(), false);
        while let Some(event) = connection.poll_event(now) {
            match event {
                Event::Connected => connected = true,
                Event::StreamReadable(stream) => readable.push(stream),
                Event::StreamOpened(stream) if stream % 4 < 2 && self.streams.len() < MAX_STREAMS => {
                    self.streams.push(stream);
                }
                _ => {}
            }
        }
        connection.receive_datagrams(|_, _| ());
        if connected {
            self.endpoint.on_handshake_ended(HandshakeResult::Completed);
            self.open_control_streams();
        }
        self.open_second_path(now);
        readable.into_iter().for_each(|stream| self.read(stream));
        let mut buf = Vec::new();
        for _ in 0..2000 {
            buf.clear();
            let Some(connection) = self.endpoint.get(id) else { break };
            let Some(transmit) = connection.poll_transmit(now, &mut buf) else { break };
            let link = match self.side {
                Side::Client => transmit.local.and_then(LocalAddress::as_link).unwrap_or(LinkId(0)),
                Side::Server => LinkId(transmit.remote.port().wrapping_sub(5000)),
            };
            let size = transmit.segment_size.unwrap_or(transmit.size).max(1);
            out.extend(buf[..transmit.size].chunks(size).map(|data| (link, data.to_vec())));
        }
        while let Some((transmit, data)) = self.endpoint.poll_stateless() {
            let link = LinkId(transmit.remote.port().wrapping_sub(5000));
            out.push((if self.side == Side::Server { link } else { LinkId(0) }, data));
        }
        self.endpoint.process_endpoint_events(id);
        self.queued = 0;
    }

    /// The streams that a well-behaved end opens first.
    fn open_control_streams(&mut self) {
        let [encoder, decoder] = self.h3.qpack_prefaces();
        let prefaces = [self.h3.control_preface(), encoder, decoder];
        let (side, head) = (self.side, encode_headers(&self.connect_ip));
        let Some(id) = self.id else { return };
        let Some(connection) = self.endpoint.get(id) else { return };
        for preface in prefaces {
            let Ok(stream) = connection.open_uni() else { return };
            connection.write(stream, preface);
            self.streams.push(stream);
        }
        if side == Side::Client {
            let Ok(stream) = connection.open_bi() else { return };
            connection.write(stream, head);
            let requests = [Family::V4, Family::V6].iter().zip(1..);
            let requests = requests.map(|(family, id)| RequestedAddress::any(id, *family)).collect();
            connection.write(stream, encode_data(&Capsule::AddressRequest(requests).to_bytes()));
            self.streams.push(stream);
        }
    }

    /// A client uses all links, as soon as connection IDs for another path have come.
    fn open_second_path(&mut self, now: Instant) {
        if self.side == Side::Client && !self.second_path_opened {
            let local = LocalAddress::link(LinkId(LINKS - 1));
            let connection =
                self.id.and_then(|id| self.endpoint.get(id)).filter(|connection| connection.is_multipath());
            let opened =
                connection.map(|connection| connection.open_path(now, local, SERVER, PathStatus::Available));
            self.second_path_opened = matches!(opened, Some(Ok(_)));
        }
    }

    /// Reads what came on a stream; the answer and the request are noticed.
    fn read(&mut self, stream: StreamId) {
        let Some(id) = self.id else { return };
        loop {
            let Some(connection) = self.endpoint.get(id) else { return };
            match connection.read(stream) {
                Read::Data(data) => drop(self.h3.handle_stream(stream, data, false)),
                _ => break,
            }
        }
        while let Some(event) = self.h3.poll() {
            let mpvpn_masque::h3::Event::Headers { stream: of, headers } = event else { continue };
            match self.side {
                Side::Client if !self.answered => (self.answered, self.answer) = (true, Some(headers)),
                Side::Server if !self.started && headers.text(":protocol") == Some("connect-ip") => {
                    self.accept(of)
                }
                _ => {}
            }
        }
    }

    /// Accepts a client as a server of this project does.
    fn accept(&mut self, stream: StreamId) {
        self.started = true;
        let mut answer = connect_ip::accept();
        answer.push(extensions::FIELD, ACCEPTED);
        let assigned = ["10.0.0.2/32", "fd00::2/128"].iter().zip(1..);
        let assigned = assigned
            .map(|(net, request_id)| AssignedAddress { request_id, net: net.parse().expect("a network") });
        let routes = ["0.0.0.0/0", "::/0"];
        let routes = routes.map(|net| IpRange::from_net(net.parse().expect("a network"), 0)).to_vec();
        let capsules = [Capsule::AddressAssign(assigned.collect()), Capsule::RouteAdvertisement(routes)];
        let capsules: Vec<u8> = capsules.iter().flat_map(|capsule| capsule.to_bytes()).collect();
        let Some(connection) = self.connection() else { return };
        connection.write(stream, encode_headers(&answer));
        connection.write(stream, encode_data(&capsules));
        self.streams.retain(|other| *other != stream);
        // The request stream is where it is at a client, too.
        self.streams.insert(self.streams.len().min(3), stream);
    }

    /// Does what the input says.
    pub(super) fn act(&mut self, now: Instant, input: &mut Input<'_>) {
        let (inner, beyond) = (self.inner(), self.beyond());
        let (ours, theirs) = if self.side == Side::Client { (inner, beyond) } else { (beyond, inner) };
        let stream = match self.streams.as_slice() {
            [] => 0,
            streams => streams[input.below(streams.len())],
        };
        let request_stream = self.streams.get(3).copied().unwrap_or(0);
        let connect_ip = self.connect_ip.clone();
        let (queued, streams, side) = (self.queued, self.streams.len(), self.side);
        let Some(connection) = self.id.and_then(|id| self.endpoint.get(id)) else { return };
        let path = PathId(input.below(3) as u32);
        let mut opened = None;
        let mut bytes = 0;
        let mut send = |connection: &mut Connection, context: u64, payload: &[u8]| {
            let whole = [datagram::prefix(0, context).as_ref(), payload].concat();
            if whole.len() <= connection.max_datagram_size().unwrap_or(0) && queued < MAX_QUEUED {
                bytes += whole.len();
                connection.queue_datagram_on_path(path, Bytes::from(whole));
            }
        };
        match input.byte() % 14 {
            0 => {
                let whole = input.long();
                if whole.len() <= connection.max_datagram_size().unwrap_or(0) && queued < MAX_QUEUED {
                    bytes = whole.len();
                    connection.queue_datagram_on_path(path, Bytes::copy_from_slice(whole));
                }
            }
            1 => send(connection, CONTEXTS[input.below(CONTEXTS.len())], input.short()),
            2 => {
                let packet = packet(input, ours, theirs);
                send(connection, 0, &packet);
            }
            3 | 4 => {
                let fec = input.bool();
                let numbered = numbered(input, |input| packet(input, ours, theirs), fec);
                send(connection, if fec { 10 } else { 2 }, &numbered);
            }
            5 => {
                let capsule = capsule(input);
                connection.write(request_stream, encode_data(&capsule));
                bytes = capsule.len();
            }
            6 if queued < MAX_QUEUED => {
                let data = if input.bool() { input.short() } else { input.long() };
                connection.write(stream, Bytes::copy_from_slice(data));
                bytes = data.len();
            }
            7 if streams < MAX_STREAMS => {
                let head = request(input, &connect_ip);
                let to = if side == Side::Client { connection.open_bi().ok() } else { Some(stream) };
                if let Some(to) = to {
                    connection.write(to, encode_headers(&head));
                    connection.write(to, encode_data(input.short()));
                    opened = Some(to);
                }
            }
            8 if streams < MAX_STREAMS => {
                let to = if input.bool() { connection.open_uni() } else { connection.open_bi() };
                if let Ok(to) = to {
                    connection.write(to, Bytes::copy_from_slice(input.short()));
                    opened = Some(to);
                }
            }
            9 => match input.below(3) {
                0 => connection.finish(stream),
                1 => connection.reset(stream, input.u16().into()),
                // A unidirectional stream of its own is not received here (RFC 9000 §2.1).
                _ if stream & 0b10 == 0 => connection.stop(stream, input.u16().into()),
                _ => {}
            },
            10 => {
                let local = LocalAddress::link(LinkId(input.byte().into()));
                if side == Side::Client {
                    let _ = connection.open_path(now, local, SERVER, PathStatus::Available);
                }
            }
            11 => connection.close_path(now, path),
            12 if input.byte() == 0xcc => connection.close(now, input.u16().into(), "enough"),
            _ => {
                // DATA frames in a tunnel or relay.
                let data = input.short();
                connection.write(stream, encode_data(data));
                bytes = data.len();
            }
        }
        self.queued += bytes;
        self.streams.extend(opened.filter(|to| !self.streams.contains(to)));
    }

    /// Ends the connection without a word.
    pub(super) fn vanish(&mut self) {
        (self.id, self.vanished) = (None, true);
    }
}

/// A numbered packet, perhaps a part of one, with or without a place in an FEC group.
fn numbered(input: &mut Input<'_>, packet: impl FnOnce(&mut Input<'_>) -> Vec<u8>, fec: bool) -> Vec<u8> {
    let flags = input.byte();
    let label = Label {
        bucket: u16::from(input.byte() % 4),
        ordered: flags & 1 == 0,
        reorder_timeout: Duration::from_millis(u64::from(flags >> 5) * 100),
        number: if flags & 2 == 0 { input.byte().into() } else { input.u32() },
        part: (flags & 4 != 0).then(|| Part { index: input.byte() % 3, last: 2 }),
    };
    let mut bytes = Vec::new();
    if fec {
        let symbol = match flags & 8 {
            0 => Symbol::Source(input.byte() % 8),
            _ => Symbol::Repair { index: input.byte() % 4, source_count: input.byte() % 8 + 1 },
        };
        GroupPosition { group: u16::from(input.byte() % 4), symbol }.encode(&mut bytes);
    }
    label.encode(&mut bytes);
    bytes.extend(packet(input));
    bytes
}

/// The address of a client on a link.
pub(super) fn client_address(link: LinkId) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 1], 5000 + link.0))
}
