//! The socket of a flow of UDP payloads (CONNECT-UDP, RFC 9298), and what waits while there is none.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use mpvpn_masque::connect::ProxyError;
use mpvpn_os::{
    ConnectedUdp, RecvBatch,
    poll::{Interest, Poller},
};

use crate::pipe::Moved;

/// A flow in which nothing moves for so long ends. RFC 9298 §3.1 asks for two minutes at least, as RFC 4787 does.
const IDLE: Duration = Duration::from_secs(180);
/// Payloads that wait for the socket, and the bytes of each.
const MOST_EARLY: usize = 16;
const EARLY_BYTES: usize = 2048;
/// Receive calls a socket a turn.
const READS: usize = 4;

/// Payloads of a flow whose target's name is not known yet. What is too much is lost, as on any path.
#[derive(Debug, Default)]
pub(super) struct Early(VecDeque<Bytes>);

impl Early {
    /// Keeps a payload, as a copy: what came with it may be large.
    pub(super) fn keep(&mut self, payload: &[u8]) {
        if self.0.len() < MOST_EARLY && payload.len() <= EARLY_BYTES {
            self.0.push_back(Bytes::copy_from_slice(payload));
        }
    }
}

/// A socket that is connected to a flow's target, so that nobody else's datagrams arrive.
pub(super) struct Port {
    socket: ConnectedUdp,
    moved: Instant,
    /// Bytes of payloads to the target, and from it.
    sent: u64,
    received: u64,
}

impl Port {
    /// Takes the first of `addresses` to which there is a route, and sends what waited.
    pub(super) fn open(
        now: Instant,
        poller: &Poller,
        token: u64,
        addresses: &[SocketAddr],
        early: Early,
    ) -> Result<Self, (ProxyError, io::Error)> {
        let mut error = io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            match ConnectedUdp::connect(*address) {
                Ok(socket) => {
                    poller.add(&socket, token, Interest::Read).map_err(|error| (ProxyError::Busy, error))?;
                    let mut port = Self { socket, moved: now, sent: 0, received: 0 };
                    early.0.iter().for_each(|payload| port.send(now, payload));
                    return Ok(port);
                }
                Err(other) => error = other,
            }
        }
        let failure = match error.kind() {
            io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::AddrNotAvailable => ProxyError::Unroutable,
            _ => ProxyError::Busy,
        };
        Err((failure, error))
    }

    /// Sends a payload. That it is too large for the path, or that nobody listens, is for the app to find out.
    pub(super) fn send(&mut self, now: Instant, payload: &[u8]) {
        self.moved = now;
        match self.socket.send(payload) {
            Ok(_) => self.sent += payload.len() as u64,
            Err(error) => tracing::trace!(%error, bytes = payload.len(), "a payload was not sent"),
        }
    }

    /// Hands out what has arrived. ICMP errors are no news: a port that is closed now may be open soon.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        batch: &mut RecvBatch,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        for _ in 0..READS {
            if self.socket.recv_batch(batch)? == 0 {
                return Ok(());
            }
            self.moved = now;
            for received in batch.drain() {
                self.received += received.data.len() as u64;
                received.payloads().for_each(&mut each);
            }
        }
        Ok(())
    }

    /// What has become of it so far.
    pub(super) fn moved(&self) -> Moved {
        Moved {
            to_socket: self.sent,
            from_socket: self.received,
            active: self.moved,
            stream_ended: false,
            socket_ended: false,
        }
    }

    /// When it ends, if nothing moves.
    pub(super) fn expires(&self) -> Instant {
        self.moved + IDLE
    }
}
