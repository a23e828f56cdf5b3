//! The sockets of one shard of a server, one per listening address.
//!
//! Always holds: a response leaves from the address and port to which the client sent.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use mpvpn_error::RunError;
use mpvpn_os::poll::{Event, FIRST_SOCKET_TOKEN, Interest, Poller};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_sockets::packet_io::{BufferedUdpSocket, DatagramBuffers, ReceivedDatagram};
use mpvpn_tunnel::Server;

/// How many addresses of clients at second ports are remembered, in each of two generations, some 100 bytes
/// each. Fewer: clients that are silent for long are answered from the first port, and find another path.
/// More: forged addresses take more memory.
const MAX_REMEMBERED: usize = 16_384;

/// Receive calls for one socket in an iteration. Packets beyond the time of an iteration are only assigned
/// to their connections. Fewer: those of users who send little are lost behind those of users who send much,
/// as the socket's buffer is full. More: a flood takes longer iterations.
const MAX_RECV_CALLS: usize = 64;

/// A socket and its bound address.
pub(super) struct ListeningSocket {
    pub(super) bound: SocketAddr,
    pub(super) socket: BufferedUdpSocket,
}

/// The sockets of one shard.
pub(super) struct Sockets {
    all: Vec<ListeningSocket>,
    buffers: DatagramBuffers,
    ports: SecondPorts,
}

/// The sockets to which clients send where another one serves the same address at another port: the packets
/// to send name no port of this end.
#[derive(Default)]
struct SecondPorts {
    recent: HashMap<SocketAddr, usize>,
    before: HashMap<SocketAddr, usize>,
}

impl SecondPorts {
    fn remember(&mut self, remote: SocketAddr, socket: usize) {
        if self.recent.len() >= MAX_REMEMBERED && !self.recent.contains_key(&remote) {
            self.before = std::mem::take(&mut self.recent);
        }
        self.recent.insert(remote, socket);
    }

    fn of(&self, remote: &SocketAddr) -> Option<usize> {
        self.recent.get(remote).or_else(|| self.before.get(remote)).copied()
    }
}

impl Sockets {
    /// Registers the sockets with the poller.
    pub(super) fn new(all: Vec<ListeningSocket>, poller: &Poller) -> Result<Self, RunError> {
        for (token, listening) in (FIRST_SOCKET_TOKEN..).zip(&all) {
            let socket = &listening.socket.socket;
            poller.add(socket, token, Interest::Read).map_err(RunError::io("watch a socket"))?;
        }
        let (buffers, ports) = Default::default();
        Ok(Self { all, buffers, ports })
    }

    /// The bound addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.all.iter().map(|socket| socket.bound)
    }

    /// Sends what was queued for a socket that is writable again, and receives. Calls `after` at the end of
    /// each batch. Returns when the first datagram arrived, if there was one.
    pub(super) fn on_ready(
        &mut self,
        poller: &Poller,
        event: Event,
        server: &mut Server,
        after: impl FnMut(&mut Server),
    ) -> Option<Instant> {
        let number = usize::try_from(event.token.wrapping_sub(FIRST_SOCKET_TOKEN)).ok()?;
        let bound = self.all.get(number)?.bound;
        let is_second = self.all[..number].iter().any(|first| {
            first.bound.ip().is_ipv4() == bound.ip().is_ipv4()
                && first.bound.port() != bound.port()
                && (first.bound.ip() == bound.ip() || first.bound.ip().is_unspecified())
        });
        let listening = self.all.get_mut(number)?;
        if event.writable {
            listening.socket.flush(poller, event.token, source_address);
        }
        if !event.readable {
            return None;
        }
        let ports = &mut self.ports;
        let each = |server: &mut Server, got: ReceivedDatagram| {
            if is_second {
                ports.remember(got.remote, number);
            }
            server.handle_datagram(got.arrived, got.local, got.remote, got.ecn, got.data);
        };
        self.buffers.receive(&listening.socket.socket, MAX_RECV_CALLS, server, each, after).unwrap_or_else(
            |error| {
                tracing::debug!(%error, "cannot receive");
                None
            },
        )
    }

    /// Sends everything that is due.
    pub(super) fn transmit(&mut self, poller: &Poller, now: Instant, server: &mut Server) {
        let poll = |out: &mut Vec<u8>| server.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let number = self.ports.of(&transmit.remote);
            let serving = || self.all.iter().position(|socket| serves(socket.bound, transmit));
            let Some(number) = number.or_else(serving) else { return };
            let socket = &mut self.all[number].socket;
            socket.send(poller, FIRST_SOCKET_TOKEN + number as u64, transmit, data, source_address(transmit));
        });
    }

    /// Sends without queueing, because this process is about to end.
    pub(super) fn transmit_last(&mut self, now: Instant, server: &mut Server) {
        let poll = |out: &mut Vec<u8>| server.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let number = self.ports.of(&transmit.remote);
            let serving = || self.all.iter().position(|socket| serves(socket.bound, transmit));
            if let Some(socket) = number.or_else(serving).and_then(|number| self.all.get(number)) {
                socket.socket.send_last(transmit, data, source_address(transmit));
            }
        });
    }
}

/// The source address of a response: the address to which the client sent.
fn source_address(transmit: &Transmit) -> Option<IpAddr> {
    transmit.local.map(LocalAddress::ip)
}

/// Whether a socket bound to `bound` serves this packet.
fn serves(bound: SocketAddr, transmit: &Transmit) -> bool {
    let remote = transmit.remote;
    if bound.ip().is_unspecified() {
        // A wildcard IPv6 socket is dual-stack unless there is an IPv4 socket.
        return bound.is_ipv6() || remote.is_ipv4();
    }
    bound.is_ipv4() == remote.is_ipv4() && source_address(transmit).is_none_or(|ip| ip == bound.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_clients_are_remembered_in_bounds() {
        let mut ports = SecondPorts::default();
        let remote = |number: u32| SocketAddr::new(std::net::Ipv4Addr::from_bits(number).into(), 9);
        for number in 0..100_000 {
            ports.remember(remote(number), 1);
            // One that sends all the time is never forgotten.
            ports.remember(remote(0), 2);
        }
        assert_eq!(
            (ports.of(&remote(0)), ports.of(&remote(99_999)), ports.of(&remote(7))),
            (Some(2), Some(1), None)
        );
        assert!(ports.recent.len() + ports.before.len() <= 2 * MAX_REMEMBERED);
    }

    #[test]
    fn an_answer_leaves_by_the_socket_of_the_address_that_was_asked() {
        let is_served = |bound: &str, local: Option<&str>, remote: &str| {
            let local = local.map(|ip| LocalAddress::from(ip.parse::<IpAddr>().unwrap()));
            let remote = remote.parse().unwrap();
            let transmit = Transmit { local, remote, ecn: None, dscp: 0, size: 0, segment_size: None };
            serves(bound.parse().unwrap(), &transmit)
        };
        assert!(is_served("192.0.2.1:443", Some("192.0.2.1"), "198.51.100.1:1"));
        assert!(!is_served("192.0.2.1:443", Some("192.0.2.2"), "198.51.100.1:1"));
        assert!(!is_served("192.0.2.1:443", None, "[2001:db8::1]:1"));
        assert!(is_served("[::]:443", None, "198.51.100.1:1"), "dual-stack");
        assert!(!is_served("0.0.0.0:443", None, "[2001:db8::1]:1"));
    }
}
