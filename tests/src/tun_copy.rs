//! Copies packets between a TUN device and a UDP socket and does nothing else: the minimum cost of a tunnel
//! in user space.
//!
//! In: a device name and two addresses. Out: each packet of the device in one datagram to the other end, and
//! back. Always holds: one thread per end, and no cryptography, acknowledgement or queue. Either packets are
//! split and joined by the code of mpvpn ([`SUBCOMMAND`]), or there is one read and one send for each,
//! without offloads ([`PLAIN_SUBCOMMAND`]): what a tunnel costs where packets come one by one. It runs as a
//! separate process, so that its processor time is measured like that of other systems.

use std::{
    io::{self, IoSlice},
    net::{Ipv4Addr, SocketAddr},
    ops::Range,
};

use bytes::{Buf, BytesMut};
use mpvpn_os::{
    Outgoing, RecvBatch, Tun, TunConfig, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
    tun::{READ_BUFFER_LEN, VNET_HEADER_LEN},
    udp::{MAX_GSO_BYTES, MAX_GSO_SEGMENTS, SendFailure},
};
use mpvpn_packet::{GroCoalescer, VnetHdr, split::split};

use crate::{
    system::{Daemon, RunningSystem},
    testbed::{Host, Testbed},
};

/// The argument that makes a binary of this crate run as one end: `PROGRAM tun-copy DEVICE LOCAL REMOTE`.
pub const SUBCOMMAND: &str = "tun-copy";
/// The same without offloads.
pub const PLAIN_SUBCOMMAND: &str = "plain-copy";

/// MTU of the TUN device, bytes: 1500 of Ethernet less the headers of IPv4 and UDP.
const MTU: u32 = 1472;
const PORT: u16 = 5600;
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// Host, device, address on the link, and address in the tunnel, of server and client.
const ENDS: [(Host, &str, Ipv4Addr, &str); 2] = [
    (Host::Server, "copys", Ipv4Addr::new(10, 101, 0, 1), "10.79.0.1/24"),
    (Host::Client, "copyc", Ipv4Addr::new(10, 101, 0, 2), "10.79.0.2/24"),
];

/// Starts both ends as processes of this binary, with this subcommand.
pub(crate) fn start(testbed: &Testbed, subcommand: &str) -> Result<RunningSystem, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let program = program.to_str().ok_or("this program's own path is not UTF-8")?;
    let start = |own: usize| {
        let ((host, device, local, in_namespace), (_, _, remote, _)) = (ENDS[own], ENDS[1 - own]);
        let mut command = testbed.command(host, program);
        command.args([subcommand, device, &format!("{local}:{PORT}"), &format!("{remote}:{PORT}")]);
        let daemon = Daemon::start(testbed, host, command)?;
        crate::eventually(std::time::Duration::from_secs(5), "a TUN device", || {
            let readable = testbed.output_of(
                host,
                std::time::Duration::from_secs(2),
                &[
                    "sh",
                    "-c",
                    &format!("ip address add {in_namespace} dev {device} && ip link set {device} up"),
                ],
            );
            if readable.status.success() { Ok(()) } else { Err(daemon.tail()) }
        });
        Ok::<_, String>(daemon)
    };
    let (server, client) = (start(0)?, start(1)?);
    Ok(RunningSystem::new(server, client, Ipv4Addr::new(10, 79, 0, 1), ENDS[1].1))
}

/// Runs one end forever. `args` are SUBCOMMAND DEVICE LOCAL REMOTE.
pub fn run(args: &[String]) -> Result<(), String> {
    let [subcommand, device, local, remote] = args else {
        return Err(format!(
            "{SUBCOMMAND} takes a device, the own address and the other end's, ADDRESS:PORT each"
        ));
    };
    let without_offloads = subcommand == PLAIN_SUBCOMMAND;
    let address = |text: &str| text.parse::<SocketAddr>().map_err(|error| format!("{text}: {error}"));
    let (local, remote) = (address(local)?, address(remote)?);
    let name = Some(device.clone());
    let tun = Tun::open(TunConfig { name, mtu: Some(MTU), without_offloads, ..TunConfig::default() });
    let tun = tun.map_err(|error| error.to_string())?;
    if without_offloads {
        return copy_one_by_one(&tun, local, remote).map_err(|error| format!("{subcommand}: {error}"));
    }
    let options = UdpOptions {
        recv_buffer: Some(SOCKET_BUFFER_BYTES),
        send_buffer: Some(SOCKET_BUFFER_BYTES),
        ..UdpOptions::new(local)
    };
    let udp = UdpSocket::bind(&options).map_err(|error| error.to_string())?;
    let mut copier = Copier::new(tun, udp, remote).map_err(|error| format!("epoll: {error}"))?;
    copier.copy().map_err(|error| format!("{subcommand}: {error}"))
}

/// One read, and one send or write, for each packet.
fn copy_one_by_one(tun: &Tun, local: SocketAddr, remote: SocketAddr) -> io::Result<()> {
    const MOST_AT_ONCE: usize = 64;
    let udp = std::net::UdpSocket::bind(local)?;
    udp.connect(remote)?;
    udp.set_nonblocking(true)?;
    let readable = Poller::new()?;
    readable.add(tun, 0, Interest::Read)?;
    readable.add(&udp, 1, Interest::Read)?;
    let mut events = Events::with_capacity(2);
    let mut packet = vec![0; READ_BUFFER_LEN];
    loop {
        readable.wait(&mut events, None)?;
        for _ in 0..MOST_AT_ONCE {
            let Ok(length) = tun.read(&mut packet) else { break };
            // A packet for which the kernel has no buffer is lost.
            let _ = udp.send(packet.get(VNET_HEADER_LEN..length).unwrap_or_default());
        }
        for _ in 0..MOST_AT_ONCE {
            let Ok(length) = udp.recv(&mut packet) else { break };
            let pieces = [IoSlice::new(&[0; VNET_HEADER_LEN]), IoSlice::new(&packet[..length])];
            // A device that is not up yet refuses packets.
            let _ = tun.write_vectored(&pieces);
        }
    }
}

struct Copier {
    tun: Tun,
    udp: UdpSocket,
    remote: SocketAddr,
    readable: Poller,
    writable: Poller,
    batch: RecvBatch,
    joiner: GroCoalescer,
    read: Vec<u8>,
    out: BytesMut,
    ranges: Vec<Range<usize>>,
}

impl Copier {
    /// Reads of the TUN per event before the other direction is served. Larger: the other direction waits
    /// longer. Smaller: more epoll calls.
    const READS_PER_TURN: usize = 16;

    fn new(tun: Tun, udp: UdpSocket, remote: SocketAddr) -> io::Result<Self> {
        let (readable, writable) = (Poller::new()?, Poller::new()?);
        readable.add(&tun, 0, Interest::Read)?;
        readable.add(&udp, 1, Interest::Read)?;
        writable.add(&udp, 0, Interest::Write)?;
        Ok(Self {
            tun,
            udp,
            remote,
            readable,
            writable,
            batch: RecvBatch::new(32),
            joiner: GroCoalescer::new(),
            read: vec![0; READ_BUFFER_LEN],
            out: BytesMut::new(),
            ranges: Vec::new(),
        })
    }

    fn copy(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(2);
        loop {
            self.readable.wait(&mut events, None)?;
            for event in events.iter().collect::<Vec<_>>() {
                if event.token == 0 { self.read_tun()? } else { self.write_tun()? }
            }
        }
    }

    fn read_tun(&mut self) -> io::Result<()> {
        for _ in 0..Self::READS_PER_TURN {
            let length = match self.tun.read(&mut self.read) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let Some(header) = VnetHdr::parse(&self.read[..length]) else { continue };
            self.out.clear();
            self.ranges.clear();
            let packet = &self.read[VNET_HEADER_LEN..length];
            // Measurements send no packets that cannot be split.
            if split(header, packet, MTU as usize, &[], &mut self.out, &mut self.ranges).is_ok() {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Sends the packets of one read as GSO trains of packets of equal size.
    fn send(&self) -> io::Result<()> {
        let mut rest = self.ranges.as_slice();
        while let Some(first) = rest.first() {
            let size = first.len();
            let most = (MAX_GSO_BYTES / size).min(MAX_GSO_SEGMENTS);
            let equal = rest.iter().take(most).take_while(|range| range.len() == size).count();
            // The last of a train may be shorter.
            let count = match rest.get(equal) {
                Some(last) if equal < most && last.len() < size => equal + 1,
                _ => equal,
            };
            let data = &self.out[first.start..rest[count - 1].end];
            let segment = u16::try_from(size).ok();
            let train =
                Outgoing { to: self.remote, from: None, ecn: None, dscp: 0, segment_size: segment, data };
            rest = &rest[count..];
            while let Err(error) = self.udp.send(&train) {
                match SendFailure::of(&error) {
                    SendFailure::Busy => self.wait_until_writable()?,
                    _ => break,
                }
            }
        }
        Ok(())
    }

    fn wait_until_writable(&self) -> io::Result<()> {
        self.writable.wait(&mut Events::with_capacity(1), None).map(drop)
    }

    fn write_tun(&mut self) -> io::Result<()> {
        self.udp.recv_batch(&mut self.batch)?;
        for mut received in self.batch.drain() {
            let mut data = received.data.split().freeze();
            while data.has_remaining() {
                self.joiner.push(data.split_to(received.segment_size.clamp(1, data.len())));
            }
        }
        self.joiner.flush();
        while let Some(joined) = self.joiner.pop() {
            let pieces: Vec<IoSlice<'_>> = joined.io_slices().collect();
            // A device that is not up yet refuses packets.
            let _ = self.tun.write_vectored(&pieces);
            drop(pieces);
            self.joiner.recycle(joined);
        }
        Ok(())
    }
}
