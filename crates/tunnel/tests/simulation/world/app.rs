//! Both ends of a TCP connection that travels as a stream: an app with its kernel, behind a link that loses
//! nothing, and the destination behind the server.

use std::{net::SocketAddr, sync::LazyLock};

use bytes::Bytes;
use mpvpn_packet::{
    ip,
    tcp::Segment,
    tcp_flags::{ACK, FIN, RST, SYN},
};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_tunnel::{RelayId, RelayRead, Server};
use mpvpn_types::Instant;

/// The window scale of the app in bits, and its window in bytes.
const SCALE: u8 = 7;
const WINDOW: u32 = 1 << 20;
/// The segment size of the app in bytes.
const SEGMENT: u64 = 60_000;

/// After so many bytes senders begin anew.
const PERIOD: u8 = 251;
/// The bytes of senders, with room for what one sends at once from any offset on.
static PATTERN: LazyLock<Bytes> = LazyLock::new(|| (0..PERIOD).cycle().take(1 << 18).collect());

/// The bytes that all senders send: `len` of them, at most 200,000, from offset `at` on.
pub fn pattern(at: u64, len: usize) -> Bytes {
    let first = (at % u64::from(PERIOD)) as usize;
    PATTERN.slice(first..first + len)
}

/// Asserts that these bytes are those that a sender sends from offset `at` on.
pub fn check(at: u64, bytes: &[u8]) {
    for (at, bytes) in (at..).step_by(100_000).zip(bytes.chunks(100_000)) {
        let sent = pattern(at, bytes.len());
        if sent != bytes {
            let wrong = bytes.iter().zip(&sent).position(|(byte, sent)| byte != sent);
            panic!("byte {} is another one", at + wrong.expect("a byte that differs") as u64);
        }
    }
}

/// An app that sends some bytes, and reads all bytes that arrive.
pub struct App {
    packet: Packet,
    first: u32,
    theirs: Option<u32>,
    /// Bytes to send, sent bytes, and acknowledged bytes.
    pub sends: u64,
    sent: u64,
    acked: u64,
    window: u64,
    fin: bool,
    /// Received bytes.
    pub received_bytes: u64,
    pub ended: bool,
    pub reset: bool,
    out: Vec<Vec<u8>>,
}

impl App {
    pub fn new(from: SocketAddr, to: SocketAddr, sends: u64) -> Self {
        let mut app = Self {
            packet: Packet::between(from, to),
            first: 77,
            theirs: None,
            sends,
            sent: 0,
            acked: 0,
            window: 0,
            fin: false,
            received_bytes: 0,
            ended: false,
            reset: false,
            out: Vec::new(),
        };
        app.send(SYN, 77, &[2, 4, 5, 80, 1, 3, 3, SCALE], b"");
        app
    }

    /// The app's own port.
    pub fn port(&self) -> u16 {
        self.packet.src.port()
    }

    fn send(&mut self, flags: u8, seq: u32, options: &[u8], payload: &[u8]) {
        let ended = u32::from(self.ended);
        let ack = self.theirs.map_or(0, |theirs| theirs.wrapping_add(1 + self.received_bytes as u32 + ended));
        let window = (WINDOW >> SCALE) as u16;
        let tcp = Tcp { seq, ack, flags, window, options: options.to_vec() };
        self.out.push(self.packet.tcp_with(&tcp, payload));
    }

    fn seq(&self, at: u64) -> u32 {
        self.first.wrapping_add(1 + at as u32)
    }

    /// Handles a packet from the tunnel.
    pub fn take(&mut self, packet: &[u8]) {
        let view = ip::parse(packet).unwrap();
        let Some(segment) = Segment::of(&view).filter(|_| view.dst() == self.packet.src.ip()) else { return };
        if u16::from_be_bytes([view.transport()[2], view.transport()[3]]) != self.packet.src.port() {
            return;
        }
        if segment.has(RST) {
            self.reset = true;
            return;
        }
        if segment.has(SYN) {
            self.theirs = Some(segment.seq());
            self.window = u64::from(segment.window());
        } else {
            self.window = u64::from(segment.window()) << 4;
            let acked = segment.ack().wrapping_sub(self.seq(self.acked));
            self.acked += u64::from(acked).min(self.sent + u64::from(self.fin) - self.acked);
            if !segment.payload().is_empty() || segment.has(FIN) {
                let theirs = self.theirs.expect("a connection");
                assert_eq!(segment.seq(), theirs.wrapping_add(1 + self.received_bytes as u32), "in order");
                check(self.received_bytes, segment.payload());
                self.received_bytes += segment.payload().len() as u64;
                self.ended |= segment.has(FIN);
            }
        }
        while self.sent < self.sends.min(self.acked + self.window) {
            let len = SEGMENT.min(self.sends - self.sent).min(self.acked + self.window - self.sent);
            let payload = pattern(self.sent, len as usize);
            self.send(ACK, self.seq(self.sent), &[], &payload);
            self.sent += len;
        }
        if self.sent == self.sends && !self.fin {
            self.fin = true;
            self.send(ACK | FIN, self.seq(self.sent), &[], b"");
        } else if !segment.payload().is_empty() || segment.has(SYN | FIN) {
            self.send(ACK, self.seq(self.sent + u64::from(self.fin)), &[], b"");
        }
    }

    /// Resets the connection, as when the user ends the app.
    pub fn reset_connection(&mut self) {
        self.send(RST | ACK, self.seq(self.sent + u64::from(self.fin)), &[], b"");
    }

    /// Whether the connection has ended.
    pub fn is_over(&self) -> bool {
        self.reset || self.ended && self.acked > self.sends
    }

    /// Returns the packets to send.
    pub fn packets(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.out)
    }
}

/// The destination of a client's connection. It reads all bytes, and sends as many as its port says: the port
/// in MB, or for ports from 61,000 on the port minus 61,000 in kB.
pub struct Destination {
    pub relay: RelayId,
    pub port: u16,
    pub shard: usize,
    sends: u64,
    pub sent: u64,
    pub received_bytes: u64,
    pub ended: bool,
    pub closed: bool,
}

impl Destination {
    pub fn new(shard: usize, relay: RelayId, port: u16) -> Self {
        let sends = match u64::from(port) {
            port @ 61_000.. => (port - 61_000) * 1000,
            port => port * 1_000_000,
        };
        Self { relay, port, shard, sends, sent: 0, received_bytes: 0, ended: false, closed: false }
    }

    pub fn run(&mut self, now: Instant, server: &mut Server) {
        while !self.ended && !self.closed {
            match server.relay_read(now, self.relay) {
                RelayRead::Data(data) => {
                    check(self.received_bytes, &data);
                    self.received_bytes += data.len() as u64;
                }
                RelayRead::Finished => self.ended = true,
                RelayRead::Blocked => break,
                RelayRead::Broken => self.closed = true,
            }
        }
        while self.sent < self.sends && !self.closed {
            let room = server
                .relay_writable_bytes(now, self.relay)
                .min((self.sends - self.sent) as usize)
                .min(60_000);
            if room == 0 {
                break;
            }
            server.relay_write(now, self.relay, pattern(self.sent, room));
            self.sent += room as u64;
            if self.sent == self.sends {
                server.relay_finish(self.relay);
            }
        }
    }
}
