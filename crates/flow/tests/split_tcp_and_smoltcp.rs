//! Connections of another TCP end at the split-TCP proxy, over a link that loses, repeats and reorders
//! packets: every byte comes out once and in order, in both directions, and so do both ends.
//!
//! 6 s of connections that are the same in every run by default; `MPVPN_FUZZ_SECONDS` and `MPVPN_FUZZ_SEED`
//! say otherwise, as `./dev soak` does.

#![allow(clippy::disallowed_methods)]

use std::{
    cell::Cell,
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use bytes::Bytes;
use mpvpn_flow::split_tcp::{Event, FlowId, ProxyLimits, Read, SplitTcpProxy};
use mpvpn_packet::{VNET_HDR_LEN, ip, split};
use mpvpn_types::{Duration, Instant};
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use smoltcp::{
    iface::{Config as IfaceConfig, Interface, SocketHandle, SocketSet},
    phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::tcp,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

const STEP: Duration = Duration::from_millis(1);
/// No more packets than this are lost one after the other in a direction: five answers to a SYN that are all
/// lost end a connection, and rightly.
const LOST_IN_A_ROW: u8 = 3;
/// A connection that is not over after this time is stuck: losses that follow each other double the waits.
const LONGEST: Duration = Duration::from_secs(3600);

/// One connection and its link.
#[derive(Clone, Debug)]
struct Story {
    v6: bool,
    mtu: usize,
    /// Bytes that the app and the far side send.
    up: usize,
    down: usize,
    /// The app's buffers, and what the split-TCP proxy may hold (bytes).
    buffers: usize,
    held: usize,
    /// How many bytes each side takes at a time, and how often it does nothing (of 8).
    bite: usize,
    idle: u8,
    /// How many packets of 100 are lost, sent twice, or overtaken.
    lost: u8,
    repeated: u8,
    overtaken: u8,
    seed: u64,
}

fn stories() -> impl Strategy<Value = Story> {
    let sizes = || prop_oneof![Just(0), 1usize..10, 1usize..200_000];
    let link = (any::<bool>(), 600usize..9000, 0u8..15, 0u8..10, 0u8..10, any::<u64>());
    let ends = (sizes(), sizes(), 500usize..100_000, 2000usize..300_000, 1usize..100_000, 0u8..8);
    (link, ends).prop_map(
        |((v6, mtu, lost, repeated, overtaken, seed), (up, down, buffers, held, bite, idle))| Story {
            v6,
            mtu: if v6 { mtu.max(1280) } else { mtu },
            up,
            down,
            // Each loss costs a small buffer a wait of a second and more.
            buffers: if lost > 0 { buffers.max(4000) } else { buffers },
            // smoltcp 0.14 never resends data that is in flight when a window closes, so no window closes
            // where packets are lost.
            held: if lost > 0 { held.max(up) } else { held },
            bite,
            idle,
            lost,
            repeated,
            overtaken,
            seed,
        },
    )
}

/// The link between the two, in which packets have accidents.
struct Link {
    story: Story,
    random: u64,
    /// Packets that were lost since one arrived, to the app and to the proxy.
    lost: [u8; 2],
    to_app: VecDeque<Vec<u8>>,
    to_proxy: VecDeque<Vec<u8>>,
}

impl Link {
    fn chance(&mut self, of: u64, percent: u8) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % of < u64::from(percent)
    }

    fn carry(&mut self, to_app: bool, packet: Vec<u8>) {
        let Story { lost, repeated, overtaken, .. } = self.story;
        let way = usize::from(to_app);
        if self.chance(100, lost) && self.lost[way] < LOST_IN_A_ROW {
            self.lost[way] += 1;
            return;
        }
        self.lost[way] = 0;
        let twice = self.chance(100, repeated);
        let early = self.chance(100, overtaken);
        let queue = if to_app { &mut self.to_app } else { &mut self.to_proxy };
        let at = queue.len() - usize::from(early && !queue.is_empty());
        queue.insert(at, packet.clone());
        if twice {
            queue.push_back(packet);
        }
    }
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

struct Sending<'a>(&'a mut Link);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut packet = vec![0; len];
        let result = fill(&mut packet);
        self.0.carry(false, packet);
        result
    }
}

impl Device for Link {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sending<'_>)> {
        let packet = self.to_app.pop_front()?;
        Some((Received(packet), Sending(self)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sending<'_>> {
        Some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.story.mtu;
        capabilities
    }
}

/// The byte at a place of what one side sends.
fn byte(seed: u64, at: usize) -> u8 {
    (seed.wrapping_add(at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// How much of the whole transfer one side has sent and received.
#[derive(Debug, Default)]
struct Progress {
    sent: usize,
    received: usize,
    closed: bool,
    ended: bool,
}

impl Progress {
    fn check(&mut self, seed: u64, bytes: &[u8]) {
        for got in bytes {
            assert_eq!(*got, byte(seed, self.received), "byte {} of {:?}", self.received, self);
            self.received += 1;
        }
    }
}

struct Play {
    story: Story,
    start: Instant,
    now: Instant,
    link: Link,
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    proxy: SplitTcpProxy,
    flow: Option<FlowId>,
    app: Progress,
    far: Progress,
}

impl Play {
    fn new(story: &Story) -> Self {
        let now = Instant::now();
        let zero = smoltcp::time::Instant::from_millis(0);
        let (own, peer): (IpAddr, IpAddr) = match story.v6 {
            true => ([0xfd00, 0, 0, 0, 0, 0, 0, 2].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 9].into()),
            false => ([10, 0, 0, 2].into(), [10, 0, 0, 9].into()),
        };
        let mut link = Link {
            story: story.clone(),
            random: story.seed | 1,
            lost: [0; 2],
            to_app: VecDeque::new(),
            to_proxy: VecDeque::new(),
        };
        let mut config = IfaceConfig::new(HardwareAddress::Ip);
        config.random_seed = story.seed;
        let mut interface = Interface::new(config, &mut link, zero);
        interface.update_ip_addrs(|addresses| {
            let _ = addresses.push(IpCidr::new(own.into(), 24));
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; story.buffers]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        let remote: (IpAddress, u16) = (peer.into(), 80);
        socket.connect(interface.context(), remote, 40_000).expect("a fresh socket");
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(socket);
        let limits = ProxyLimits { max_flow_bytes: story.held, ..ProxyLimits::default() };
        Self {
            story: story.clone(),
            start: now,
            now,
            link,
            interface,
            sockets,
            socket,
            proxy: SplitTcpProxy::new(now, limits, [story.seed, 7], story.mtu),
            flow: None,
            app: Progress::default(),
            far: Progress::default(),
        }
    }

    fn app_acts(&mut self) {
        let Story { seed, up, bite, .. } = self.story;
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        if socket.may_send() && socket.can_send() && self.app.sent < up {
            let some = bite.min(up - self.app.sent);
            let bytes: Vec<u8> = (self.app.sent..self.app.sent + some).map(|at| byte(seed, at)).collect();
            self.app.sent += socket.send_slice(&bytes).expect("it may send");
        }
        if self.app.sent == up && !self.app.closed && socket.may_send() {
            socket.close();
            self.app.closed = true;
        }
        let mut buffer = vec![0; bite];
        if let Ok(some) = socket.recv_slice(&mut buffer) {
            self.app.check(!seed, &buffer[..some]);
        } else if self.app.received == self.story.down && self.far.closed && !socket.may_recv() {
            self.app.ended = true;
        }
    }

    fn far_side_acts(&mut self) {
        while let Some(event) = self.proxy.poll_event() {
            match event {
                Event::ConnectRequested { id, to, .. } => {
                    assert_eq!((to.port(), self.flow), (80, None));
                    let _: SocketAddr = to;
                    self.flow = Some(id);
                    self.proxy.accept(self.now, id);
                }
                Event::Aborted(_) => panic!("the connection broke: {:?} {:?}", self.app, self.far),
                Event::Readable(_) | Event::Writable(_) => {}
            }
        }
        let Some(flow) = self.flow else { return };
        let Story { seed, down, bite, held, .. } = self.story;
        assert!(self.proxy.held_bytes() <= 3 * held + 64, "{} bytes", self.proxy.held_bytes());
        match self.proxy.read(self.now, flow, bite) {
            Read::Data(bytes) => self.far.check(seed, &bytes),
            Read::Finished => self.far.ended = true,
            Read::Blocked | Read::UnknownFlow => {}
        }
        let room = self.proxy.writable_bytes(flow).min(bite).min(down - self.far.sent);
        if room > 0 {
            let bytes: Vec<u8> = (self.far.sent..self.far.sent + room).map(|at| byte(!seed, at)).collect();
            self.proxy.write(self.now, flow, Bytes::from(bytes));
            self.far.sent += room;
        }
        if self.far.sent == down && !self.far.closed {
            self.proxy.finish(self.now, flow);
            self.far.closed = true;
        }
    }

    fn deliver(&mut self) {
        while let Some(bytes) = self.link.to_proxy.pop_front() {
            let view = ip::parse(&bytes).expect("a packet");
            self.proxy.handle_packet(self.now, &view);
        }
        self.proxy.handle_timeout(self.now);
        while let Some(joined) = self.proxy.poll_packet(self.now) {
            let whole = joined.to_vec().split_off(VNET_HDR_LEN);
            let (mut out, mut ranges) = (Default::default(), Vec::new());
            split::split(joined.vnet(), &whole, self.story.mtu, &[], &mut out, &mut ranges)
                .expect("segments that fit");
            for range in ranges {
                self.link.carry(true, out[range].to_vec());
            }
        }
    }

    fn is_over(&self) -> bool {
        self.app.ended && self.far.ended && self.proxy.flow_count() == 0
    }

    fn run(mut self) {
        while !self.is_over() {
            let time = self.now.saturating_duration_since(self.start);
            assert!(time < LONGEST, "stuck: app {:?}, far side {:?}", self.app, self.far);
            let clock = smoltcp::time::Instant::from_micros(time.as_micros() as i64);
            self.interface.poll(clock, &mut self.link, &mut self.sockets);
            let idle = self.story.idle;
            if !self.link.chance(8, idle) {
                self.app_acts();
            }
            if !self.link.chance(8, idle) {
                self.far_side_acts();
            }
            self.deliver();
            self.now += STEP;
        }
        assert_eq!((self.far.received, self.app.received), (self.story.up, self.story.down));
        assert_eq!(self.proxy.held_bytes(), 0);
    }
}

#[test]
fn what_one_tcp_sends_the_other_gets_whatever_happens_to_packets() {
    let number =
        |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (seconds, first) = (number("MPVPN_FUZZ_SECONDS", 6), number("MPVPN_FUZZ_SEED", 1));
    let start = Instant::now();
    let played = Cell::new(0);
    for seed in first.. {
        if start.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config { cases: 8, failure_persistence: None, ..Config::default() };
        let outcome = TestRunner::new_with_rng(config, random).run(&stories(), |story| {
            Play::new(&story).run();
            played.set(played.get() + 1);
            Ok(())
        });
        outcome.unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    }
    println!("{} connections", played.get());
    assert!(played.get() >= 8);
}
