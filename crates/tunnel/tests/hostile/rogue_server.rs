//! A rogue server beside a real client, without delay on the way.

use std::net::{IpAddr, SocketAddr};

use bytes::{Bytes, BytesMut};
use mpvpn_class::Rules;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, IpRange},
    connect_ip, datagram, extensions,
    h3::{self, Event as HttpEvent, H3, Settings, Side},
    structured::strings_member,
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    Connection, ConnectionHandle, Endpoint, Event, FlowControlWindows, Handled, LocalAddress, Read, StreamId,
};
use mpvpn_tunnel::{ClassConnections, ClassProfile, ClassSetup, ClientEvent, ClientState};
use mpvpn_types::{ClassId, CongestionControl, Duration, Fec, Instant, LinkId, PathId};

use crate::{
    heap,
    rogue::every_extension,
    world::{MS, SERVER, TOKEN, World},
};

pub struct RogueServer {
    pub now: Instant,
    pub client: ClassConnections,
    endpoint: Endpoint,
    http: H3,
    id: Option<ConnectionHandle>,
    extensions: Option<String>,
    pub request: Option<StreamId>,
    /// Tunnels that the client has asked for, and connections that it has opened.
    pub tunnels: usize,
    pub handshakes: usize,
    /// The most that the client held at the end of a millisecond, bytes.
    pub peak: usize,
    sent: u64,
    buffer: Vec<u8>,
}

fn address_of(link: LinkId) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 7], 5000 + link.0))
}

impl RogueServer {
    /// With a client that has a tunnel with every extension over two links. The server grants these windows.
    pub fn with_tunnel(windows: FlowControlWindows) -> Self {
        Self::with_answer(windows, None)
    }

    /// The same, and the value of the field `mpvpn` in its response, if it is another one.
    pub fn with_answer(windows: FlowControlWindows, extensions: Option<String>) -> Self {
        let mut world = World::new();
        world.fec = Fec::Auto;
        world.copies = 4;
        let config = world.client_config(TOKEN, Scheduler::Auto, CongestionControl::Bbr);
        let class = ClassProfile { name: "default".to_owned(), ..ClassProfile::default() };
        let config = mpvpn_tunnel::ClientConfig { class: Some(class), ..config };
        let setup = ClassSetup { id: ClassId(0), priority: false, connects_at_once: true, config };
        let now = world.now;
        let mut rogue = Self {
            now,
            client: heap::counted(|| ClassConnections::new(now, vec![setup], Rules::default(), 0, true)),
            endpoint: Endpoint::server(&world.server_setup(windows)),
            http: H3::new(Side::Server, Settings::default()),
            id: None,
            extensions,
            request: None,
            tunnels: 0,
            handshakes: 0,
            peak: 0,
            sent: 0,
            buffer: Vec::with_capacity(1 << 17),
        };
        for link in 0..2 {
            heap::counted(|| rogue.client.link_up(now, LinkId(link), SERVER.parse().unwrap()));
        }
        rogue.run(500 * MS);
        assert!(rogue.is_up(), "the tunnel is not up");
        rogue.peak = heap::held();
        rogue
    }

    pub fn is_up(&mut self) -> bool {
        self.client.default_client_mut().report(self.now).state == ClientState::Up
    }

    fn connection(&mut self) -> Option<&mut Connection> {
        self.endpoint.get(self.id?)
    }

    /// Writes on the stream of the tunnel.
    pub fn write(&mut self, bytes: Bytes) {
        let Some(stream) = self.request else { return };
        if let Some(connection) = self.connection() {
            connection.write(stream, bytes);
        }
    }

    pub fn capsule(&mut self, bytes: &[u8]) {
        self.write(h3::encode_data(bytes));
    }

    /// Queues a datagram of the tunnel.
    pub fn datagram(&mut self, context: u64, payload: &[u8]) {
        let Some(stream) = self.request else { return };
        let bytes = Bytes::from([datagram::prefix(stream, context).as_ref(), payload].concat());
        if let Some(connection) = self.connection() {
            connection.queue_datagram_on_path(PathId(0), bytes);
        }
        self.sent += 1;
        if self.sent.is_multiple_of(100) {
            self.run(MS);
        }
    }

    /// Opens unidirectional streams as far as the client allows, and leaves them.
    pub fn open_streams(&mut self, beginning: &'static [u8]) {
        let Some(connection) = self.connection() else { return };
        while let Ok(stream) = connection.open_uni() {
            connection.write(stream, Bytes::from_static(beginning));
        }
    }

    /// A packet of an app of the client.
    pub fn client_sends(&mut self, bytes: usize) {
        let from = SocketAddr::new("10.0.0.2".parse().unwrap(), 4000);
        let packet =
            mpvpn_packets::Packet::between(from, "203.0.113.9:53".parse().unwrap()).udp(&vec![7; bytes]);
        let (now, client) = (self.now, &mut self.client);
        heap::counted(|| client.handle_tun(now, None, mpvpn_packet::VnetHdr::NONE, &mut packet.clone()));
    }

    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += MS;
            for _ in 0..3 {
                self.client_turn();
                self.serve();
            }
            self.peak = self.peak.max(heap::held());
        }
    }

    fn client_turn(&mut self) {
        let (now, client, buffer) = (self.now, &mut self.client, &mut self.buffer);
        let (endpoint, handshakes) = (&mut self.endpoint, &mut self.handshakes);
        let mut news = Vec::with_capacity(64);
        heap::counted(|| {
            client.handle_timeout(now);
            while let Some(event) = client.poll_event(now) {
                assert!(!matches!(event, ClientEvent::Fatal(_)), "{event:?}");
            }
            while client.poll_change(now).is_some() {}
            while let Some(packet) = client.poll_tun(now) {
                client.recycle(packet);
            }
            while let Some(transmit) = client.poll_transmit(now, buffer) {
                heap::uncounted(|| {
                    let from =
                        address_of(transmit.local.and_then(LocalAddress::as_link).unwrap_or(LinkId(0)));
                    let local = Some(LocalAddress::from(IpAddr::from([192, 0, 2, 1])));
                    for data in buffer.chunks(transmit.segment_size.unwrap_or(buffer.len()).max(1)) {
                        if let Handled::New(id) = endpoint.handle(now, local, from, 0, BytesMut::from(data)) {
                            news.push(id);
                            *handshakes += 1;
                        }
                    }
                });
                buffer.clear();
            }
        });
        for id in news {
            self.id = Some(id);
            self.request = None;
            self.http = H3::new(Side::Server, Settings::default());
        }
    }

    fn serve(&mut self) {
        let now = self.now;
        let mut out = Vec::new();
        while let Some((transmit, data)) = self.endpoint.poll_stateless() {
            out.push((transmit.remote, data));
        }
        let mut asked = None;
        if let Some(id) = self.id
            && let Some(connection) = self.endpoint.get(id)
        {
            if connection.poll_timeout().is_some_and(|at| at <= now) {
                connection.handle_timeout(now);
            }
            while let Some(event) = connection.poll_event(now) {
                match event {
                    Event::Connected => {
                        let control = connection.open_uni().unwrap();
                        connection.write(control, self.http.control_preface());
                    }
                    Event::StreamReadable(stream) => {
                        while let Read::Data(data) = connection.read(stream) {
                            _ = self.http.handle_stream(stream, data, false);
                        }
                    }
                    _ => {}
                }
            }
            connection.receive_datagrams(|_, _| ());
            while let Some(event) = self.http.poll() {
                if let HttpEvent::Headers { stream, headers } = event
                    && headers.value(":protocol").is_some_and(|protocol| protocol == b"connect-ip")
                {
                    asked = Some(stream);
                }
            }
        }
        if let Some(stream) = asked {
            self.accept(stream);
        }
        self.endpoint_sends(&mut out);
        let (client, server) = (&mut self.client, SERVER.parse().unwrap());
        for (to, data) in out {
            let link = LinkId(to.port() - 5000);
            heap::counted(|| client.handle_datagram(now, link, server, 0, BytesMut::from(&data[..])));
        }
        heap::counted(|| client.handle_batches(now));
    }

    fn endpoint_sends(&mut self, out: &mut Vec<(SocketAddr, Vec<u8>)>) {
        let Some(id) = self.id else { return };
        if let Some(connection) = self.endpoint.get(id) {
            let mut buffer = Vec::new();
            while let Some(transmit) = connection.poll_transmit(self.now, &mut buffer) {
                let size = transmit.segment_size.unwrap_or(buffer.len()).max(1);
                out.extend(buffer.chunks(size).map(|data| (transmit.remote, data.to_vec())));
                buffer.clear();
            }
        }
        self.endpoint.process_endpoint_events(id);
    }

    /// Accepts a tunnel with all that the client asks for.
    fn accept(&mut self, stream: StreamId) {
        self.tunnels += 1;
        self.request = Some(stream);
        let mut accepted = every_extension("default", 0);
        accepted.set("session", vec![9; 16].into());
        accepted.set("networks", strings_member(["10.0.0.0/24", "fd00::/64"]));
        ["class", "streams", "udp"].into_iter().for_each(|key| accepted.set(key, true.into()));
        let mut answer = connect_ip::accept();
        answer.push(extensions::FIELD, self.extensions.clone().unwrap_or_else(|| accepted.value()));
        self.write(h3::encode_headers(&answer));
        let assigned = |request_id, net: &str| AssignedAddress { request_id, net: net.parse().unwrap() };
        let assigned = Capsule::AddressAssign(vec![assigned(1, "10.0.0.2/32"), assigned(2, "fd00::2/128")]);
        self.capsule(&assigned.to_bytes());
        let range =
            |from: &str, to: &str| IpRange::new(from.parse().unwrap(), to.parse().unwrap(), 0).unwrap();
        let routes = Capsule::RouteAdvertisement(vec![range("0.0.0.0", "255.255.255.255")]);
        self.capsule(&routes.to_bytes());
    }
}
