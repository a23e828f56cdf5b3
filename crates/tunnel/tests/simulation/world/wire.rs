//! Links between clients and the server: a channel for each direction, shared by the paths (pipes) of the
//! link.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use mpvpn_lab::{ByteCount, ChannelParams, LinkSpec, UdpFlow, emulation::Channel};
use mpvpn_types::{ClassId, Duration, Instant, LinkId};

/// Bytes of IPv4 and UDP headers.
pub(super) const HEADERS: u32 = 28;
/// Bytes of IPv4 and TCP headers with timestamps, and of the length before each QUIC packet.
const HEADERS_INSIDE_TCP: u32 = 54;
/// The number, in place of a pipe's, of packets of a foreign flow.
const FOREIGN: u8 = u8::MAX;
/// The queue in the buffers of a TCP connection, as time at its rate.
const QUEUE_INSIDE_TCP: Duration = Duration::from_millis(500);

/// A direction of a link.
pub struct Wire {
    /// Share of packets lost (0 to 1).
    pub loss: f64,
    pub passed: u64,
    /// Bytes of IP packets that passed.
    pub carried: u64,
    /// Bytes of IP packets that were sent over UDP, also those that did not pass.
    pub offered: u64,
    /// How many datagrams were sent with each mark (DSCP).
    pub marks: BTreeMap<u8, u64>,
    /// A pipe that loses all packets.
    pub silent: Option<u8>,
    /// A pipe, and the share (0 to 1) of its packets that are lost after they crossed the link.
    pub loss_behind_link: Option<(u8, f64)>,
    random_state: u32,
    /// Held packets with short headers, if such packets are held back; handshake packets pass.
    pub held: Option<Vec<(u8, Vec<u8>)>>,
    /// Whether UDP is blocked, so that only packets inside TCP pass.
    pub blocks_udp: bool,
    /// Packets of a foreign flow that crossed the link.
    pub foreign: Vec<Vec<u8>>,
    channel: Channel<(u8, Vec<u8>)>,
    /// TCP connections, which lose nothing and keep the order. They have the rate of the link once more.
    inside_tcp: Channel<(u8, Vec<u8>)>,
}

/// The parameters of a TCP connection over a link.
fn inside_tcp(params: &ChannelParams) -> ChannelParams {
    ChannelParams { loss: 0.0, mtu: None, queue: QUEUE_INSIDE_TCP, session_rate: None, ..params.clone() }
}

impl Wire {
    pub(super) fn new(params: &ChannelParams, count: ByteCount, seed: u64, now: Instant) -> Self {
        Self {
            loss: params.loss,
            passed: 0,
            carried: 0,
            offered: 0,
            marks: BTreeMap::new(),
            silent: None,
            loss_behind_link: None,
            random_state: seed as u32 | 1,
            held: None,
            blocks_udp: false,
            foreign: Vec::new(),
            channel: Channel::new(params.clone(), count, seed, now),
            inside_tcp: Channel::new(inside_tcp(params), count, seed, now),
        }
    }

    /// Changes some parameters.
    pub fn adjust(&mut self, now: Instant, change: impl FnOnce(&mut ChannelParams)) {
        self.channel.change(now, change);
        let params = inside_tcp(self.channel.params());
        self.inside_tcp.change(now, |own| *own = params);
    }

    /// Replaces all parameters.
    pub fn change(&mut self, now: Instant, params: &ChannelParams) {
        self.loss = params.loss;
        self.adjust(now, |own| *own = params.clone());
    }

    /// Drops IP packets of more than `bytes` from now on.
    pub fn limit_mtu(&mut self, now: Instant, bytes: u32) {
        self.channel.change(now, |own| own.mtu = Some(bytes));
    }

    /// Takes a UDP payload of one of the link's pipes.
    pub(super) fn push(&mut self, now: Instant, pipe: u8, data: &[u8], headers: u32) {
        self.follow(now);
        if pipe % 16 == LinkId::TCP_PATH_INDEX {
            // A TCP connection over a cut link stalls; its late packets would have no use.
            if self.loss < 1.0 {
                let bytes = data.len() as u32 + HEADERS_INSIDE_TCP;
                self.inside_tcp.push(now, bytes, (pipe, data.to_vec()));
                drop(self.inside_tcp.discarded());
            }
            return;
        }
        self.offered += data.len() as u64 + u64::from(headers);
        if self.silent == Some(pipe) || self.blocks_udp {
            return;
        }
        let is_short = data.first().is_some_and(|byte| byte & 0x80 == 0);
        if let Some(held) = self.held.as_mut().filter(|_| is_short) {
            return held.push((pipe, data.to_vec()));
        }
        self.push_into_channel(now, pipe, data.to_vec(), headers);
    }

    fn push_into_channel(&mut self, now: Instant, pipe: u8, data: Vec<u8>, headers: u32) {
        let session = UdpFlow::new(([0, 0, 0, 0], pipe.into()).into(), ([0, 0, 0, 0], 443).into());
        self.channel.push_with_flow(now, Some(session), data.len() as u32 + headers, (pipe, data));
        drop(self.channel.discarded());
    }

    /// Takes an IP packet of a flow that shares the link with the tunnel.
    pub fn push_foreign(&mut self, now: Instant, packet: Vec<u8>) {
        self.follow(now);
        self.push_into_channel(now, FOREIGN, packet, 0);
    }

    /// Whether the next packet of a pipe is lost behind the link.
    fn is_lost(&mut self, pipe: u8) -> bool {
        self.random_state = self.random_state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.loss_behind_link.is_some_and(|(own, share)| {
            own == pipe && f64::from(self.random_state >> 8) < share * f64::from(1 << 24)
        })
    }

    /// Sends the held packets.
    pub fn release_held(&mut self, now: Instant) {
        for (pipe, data) in self.held.take().into_iter().flatten() {
            self.push(now, pipe, &data, HEADERS);
        }
    }

    pub(super) fn pop(&mut self, now: Instant) -> Option<(u8, Vec<u8>)> {
        self.follow(now);
        let (pipe, data) = loop {
            let popped = self.channel.pop(now).map_or((0, None), |(pipe, data)| (pipe, Some(data)));
            match popped {
                (FOREIGN, Some(packet)) => self.foreign.push(packet),
                (pipe, data) if data.is_none() || !self.is_lost(pipe) => break (pipe, data),
                _ => {}
            }
        };
        let (pipe, data) = match data {
            None => self.inside_tcp.pop(now).map_or((0, None), |(pipe, data)| (pipe, Some(data))),
            data => (pipe, data),
        };
        drop(self.channel.discarded());
        self.passed += u64::from(data.is_some());
        self.carried += data.as_ref().map_or(0, |data| data.len() as u64 + 28);
        data.map(|data| (pipe, data))
    }

    fn follow(&mut self, now: Instant) {
        let loss = self.loss;
        if self.channel.params().loss != loss {
            self.channel.change(now, |params| params.loss = loss);
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        [self.channel.next_wake(), self.inside_tcp.next_wake()].into_iter().flatten().min()
    }
}

/// A bottleneck behind links of the first client: packets that crossed these links queue there.
pub struct SharedBottleneck {
    links: Vec<LinkId>,
    /// Up and down.
    pub(super) channels: [Channel<(LinkId, u8, Vec<u8>)>; 2],
}

impl SharedBottleneck {
    pub fn new(links: Vec<LinkId>, spec: &LinkSpec, seed: u64, now: Instant) -> Self {
        let channel = |params: &ChannelParams, seed| Channel::new(params.clone(), spec.count, seed, now);
        Self { links, channels: [channel(&spec.up, seed), channel(&spec.down, seed + 1)] }
    }

    /// Takes what has crossed a link, unless that does not lead here.
    pub(super) fn take(
        &mut self,
        now: Instant,
        direction: usize,
        link: LinkId,
        (pipe, data): (u8, Vec<u8>),
    ) -> Option<(u8, Vec<u8>)> {
        if !self.links.contains(&link) {
            return Some((pipe, data));
        }
        let flow = UdpFlow::new(([0, 0, 0, link.0 as u8], pipe.into()).into(), ([0, 0, 0, 0], 443).into());
        let channel = &mut self.channels[direction];
        channel.push_with_flow(now, Some(flow), data.len() as u32 + HEADERS, (link, pipe, data));
        drop(channel.discarded());
        None
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.channels.iter().filter_map(Channel::next_wake).min()
    }
}

/// A link between a client and the server.
pub struct Link {
    pub up: Wire,
    pub down: Wire,
    /// The address of the first pipe; the others have other ports.
    pub address: SocketAddr,
}

impl Link {
    /// Distance between the ports of a link's pipes.
    const PIPE_PORTS: u16 = 100;

    pub(super) fn address_of(&self, pipe: u8) -> SocketAddr {
        let port = self.address.port() + u16::from(pipe) * Self::PIPE_PORTS;
        let ip = if pipe % 16 == LinkId::TCP_PATH_INDEX { self.relay() } else { self.address.ip() };
        SocketAddr::new(ip, port)
    }

    /// The source address of packets inside TCP: the server's own machine, which accepts the TCP connections.
    fn relay(&self) -> IpAddr {
        match self.address.ip() {
            IpAddr::V4(ip) => {
                let [_, b, c, d] = ip.octets();
                IpAddr::from([127, b, c, d])
            }
            ip @ IpAddr::V6(_) => ip,
        }
    }

    pub(super) fn pipe_at(&self, address: SocketAddr) -> Option<u8> {
        let offset = address.port().checked_sub(self.address.port())?;
        let pipe = (offset / Self::PIPE_PORTS) as u8;
        (self.address_of(pipe) == address).then_some(pipe)
    }
}

/// The number of a path on its link: 16 for each class.
pub fn pipe_of(path: LinkId) -> u8 {
    path.class().0 * 16 + path.path_index()
}

/// The path over a link with this number.
pub(super) fn path_of(link: LinkId, pipe: u8) -> LinkId {
    link.with_path_index(pipe % 16).with_class(ClassId(pipe / 16))
}
