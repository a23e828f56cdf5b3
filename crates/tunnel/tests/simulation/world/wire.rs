//! Links between clients and the server: a channel a direction, with the pipes that share it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use mpvpn_lab::{ByteCount, ChannelParams, UdpFlow, emulation::Channel};
use mpvpn_types::{ClassId, Duration, Instant, LinkId};

/// IPv4 and UDP, bytes.
pub(super) const HEADERS: u32 = 28;
/// IPv4, TCP with timestamps, and the length before each QUIC packet, bytes.
const HEADERS_INSIDE_TCP: u32 = 54;
/// What waits in the buffers of a TCP connection, as time at its rate.
const QUEUE_INSIDE_TCP: Duration = Duration::from_millis(500);

/// A direction of a link.
pub struct Wire {
    /// Share of packets lost (0 to 1).
    pub loss: f64,
    pub passed: u64,
    /// Bytes of IP packets that passed.
    pub carried: u64,
    /// How many datagrams were sent with each mark (DSCP).
    pub marks: BTreeMap<u8, u64>,
    /// A pipe of which nothing passes.
    pub silent: Option<u8>,
    /// A pipe, and the share (0 to 1) of what has crossed the link on it that is lost behind it.
    pub loses: Option<(u8, f64)>,
    dice: u32,
    /// Packets of connections that are established, where those are held back: what belongs to handshakes passes.
    pub held: Option<Vec<(u8, Vec<u8>)>>,
    /// Whether nothing passes but what is inside TCP.
    pub blocks_udp: bool,
    channel: Channel<(u8, Vec<u8>)>,
    /// TCP connections, which lose nothing and keep the order. They have the rate of the link once more.
    inside_tcp: Channel<(u8, Vec<u8>)>,
}

/// What a TCP connection over a link is like.
fn inside_tcp(params: &ChannelParams) -> ChannelParams {
    ChannelParams { loss: 0.0, mtu: None, queue: QUEUE_INSIDE_TCP, session_rate: None, ..params.clone() }
}

impl Wire {
    pub(super) fn new(params: &ChannelParams, count: ByteCount, seed: u64, now: Instant) -> Self {
        Self {
            loss: params.loss,
            passed: 0,
            carried: 0,
            marks: BTreeMap::new(),
            silent: None,
            loses: None,
            dice: seed as u32 | 1,
            held: None,
            blocks_udp: false,
            channel: Channel::new(params.clone(), count, seed, now),
            inside_tcp: Channel::new(inside_tcp(params), count, seed, now),
        }
    }

    /// Changes some of it.
    pub fn adjust(&mut self, now: Instant, change: impl FnOnce(&mut ChannelParams)) {
        self.channel.change(now, change);
        let params = inside_tcp(self.channel.params());
        self.inside_tcp.change(now, |own| *own = params);
    }

    /// Changes everything at once.
    pub fn change(&mut self, now: Instant, params: &ChannelParams) {
        self.loss = params.loss;
        self.adjust(now, |own| *own = params.clone());
    }

    /// Swallows IP packets of more than `bytes` from now on.
    pub fn limit_mtu(&mut self, now: Instant, bytes: u32) {
        self.channel.change(now, |own| own.mtu = Some(bytes));
    }

    /// Takes a UDP payload of one of the link's pipes.
    pub(super) fn push(&mut self, now: Instant, pipe: u8, data: &[u8], headers: u32) {
        self.follow(now);
        if pipe % 16 == LinkId::TCP_PATH_INDEX {
            // A connection over a link that is cut waits; what it would bring later is of no use to anybody.
            if self.loss < 1.0 {
                let bytes = data.len() as u32 + HEADERS_INSIDE_TCP;
                self.inside_tcp.push(now, bytes, (pipe, data.to_vec()));
                drop(self.inside_tcp.discarded());
            }
            return;
        }
        if self.silent == Some(pipe) || self.blocks_udp {
            return;
        }
        let is_short = data.first().is_some_and(|byte| byte & 0x80 == 0);
        if let Some(held) = self.held.as_mut().filter(|_| is_short) {
            return held.push((pipe, data.to_vec()));
        }
        let session = UdpFlow::new(([0, 0, 0, 0], pipe.into()).into(), ([0, 0, 0, 0], 443).into());
        self.channel.push_with_flow(now, Some(session), data.len() as u32 + headers, (pipe, data.to_vec()));
        drop(self.channel.discarded());
    }

    /// Whether the next packet of a pipe is lost behind the link.
    fn is_lost(&mut self, pipe: u8) -> bool {
        self.dice = self.dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.loses
            .is_some_and(|(own, share)| own == pipe && f64::from(self.dice >> 8) < share * f64::from(1 << 24))
    }

    /// Lets go what was held back.
    pub fn let_go(&mut self, now: Instant) {
        for (pipe, data) in self.held.take().into_iter().flatten() {
            self.push(now, pipe, &data, HEADERS);
        }
    }

    pub(super) fn pop(&mut self, now: Instant) -> Option<(u8, Vec<u8>)> {
        self.follow(now);
        let (pipe, data) = loop {
            let popped = self.channel.pop(now).map_or((0, None), |(pipe, data)| (pipe, Some(data)));
            if popped.1.is_none() || !self.is_lost(popped.0) {
                break popped;
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

/// What is between a client and the server.
pub struct Link {
    pub up: Wire,
    pub down: Wire,
    /// That of its first pipe; the others have other ports.
    pub address: SocketAddr,
}

impl Link {
    /// Between the ports of a link's pipes.
    const PIPE_PORTS: u16 = 100;

    pub(super) fn address_of(&self, pipe: u8) -> SocketAddr {
        let port = self.address.port() + u16::from(pipe) * Self::PIPE_PORTS;
        let ip = if pipe % 16 == LinkId::TCP_PATH_INDEX { self.relay() } else { self.address.ip() };
        SocketAddr::new(ip, port)
    }

    /// Where what comes inside TCP comes from: the server's machine itself, which takes the connections.
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

/// The number of a pipe on its link, those of each class apart.
pub fn pipe_of(way: LinkId) -> u8 {
    way.class().0 * 16 + way.path_index()
}

/// The way over a link whose pipe has this number.
pub(super) fn way_of(link: LinkId, pipe: u8) -> LinkId {
    link.with_path_index(pipe % 16).with_class(ClassId(pipe / 16))
}
