//! The sockets of one shard of a server, one per listening address.
//!
//! Always holds: a response leaves from the address to which the client sent.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use mpvpn_error::RunError;
use mpvpn_os::poll::{Event, FIRST_SOCKET_TOKEN, Interest, Poller};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_sockets::packet_io::{BufferedUdpSocket, DatagramBuffers, ReceivedDatagram};
use mpvpn_tunnel::Server;

/// A socket and its bound address.
pub(super) struct ListeningSocket {
    pub(super) bound: SocketAddr,
    pub(super) socket: BufferedUdpSocket,
}

/// The sockets of one shard.
pub(super) struct Sockets {
    all: Vec<ListeningSocket>,
    buffers: DatagramBuffers,
}

impl Sockets {
    /// Registers the sockets with the poller.
    pub(super) fn new(all: Vec<ListeningSocket>, poller: &Poller) -> Result<Self, RunError> {
        for (token, listening) in (FIRST_SOCKET_TOKEN..).zip(&all) {
            let socket = &listening.socket.socket;
            poller.add(socket, token, Interest::Read).map_err(RunError::io("watch a socket"))?;
        }
        Ok(Self { all, buffers: DatagramBuffers::default() })
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
        let number = usize::try_from(event.token.wrapping_sub(FIRST_SOCKET_TOKEN));
        let listening = number.ok().and_then(|number| self.all.get_mut(number))?;
        if event.writable {
            listening.socket.flush(poller, event.token, source_address);
        }
        if !event.readable {
            return None;
        }
        let each = |server: &mut Server, got: ReceivedDatagram| {
            server.handle_datagram(got.arrived, got.local, got.remote, got.ecn, got.data);
        };
        self.buffers.receive(&listening.socket.socket, server, each, after).unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot receive");
            None
        })
    }

    /// Sends everything that is due.
    pub(super) fn transmit(&mut self, poller: &Poller, now: Instant, server: &mut Server) {
        let poll = |out: &mut Vec<u8>| server.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let Some(number) = self.all.iter().position(|socket| serves(socket.bound, transmit)) else {
                return;
            };
            let socket = &mut self.all[number].socket;
            socket.send(poller, FIRST_SOCKET_TOKEN + number as u64, transmit, data, source_address(transmit));
        });
    }

    /// Sends without queueing, because this process is about to end.
    pub(super) fn transmit_last(&mut self, now: Instant, server: &mut Server) {
        let poll = |out: &mut Vec<u8>| server.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            if let Some(socket) = self.all.iter().find(|socket| serves(socket.bound, transmit)) {
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
