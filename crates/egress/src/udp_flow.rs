//! The socket of a UDP flow (CONNECT-UDP, RFC 9298), and the payloads that wait until it is open.

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
use mpvpn_sockets::splice::TransferState;

/// A flow without payloads for this long closes. RFC 9298 §3.1 and RFC 4787 ask for at least two minutes.
/// Shorter: flows break. Longer: sockets.
const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// Payloads that wait for the socket, and the size of each. More: memory. Fewer: the first packets of a flow
/// are lost. Chosen.
const MAX_EARLY_PAYLOADS: usize = 16;
const MAX_EARLY_PAYLOAD_BYTES: usize = 2048;
/// Receive calls for one socket in an iteration. Chosen, as for QUIC's sockets.
const MAX_RECV_CALLS: usize = 4;

/// Payloads of a flow whose target is being resolved. Excess payloads are lost, as on any path.
#[derive(Debug, Default)]
pub(super) struct EarlyPayloads(VecDeque<Bytes>);

impl EarlyPayloads {
    /// Stores a copy of a payload, so that its large receive buffer can be reused.
    pub(super) fn keep(&mut self, payload: &[u8]) {
        if self.0.len() < MAX_EARLY_PAYLOADS && payload.len() <= MAX_EARLY_PAYLOAD_BYTES {
            self.0.push_back(Bytes::copy_from_slice(payload));
        }
    }
}

/// A socket connected to the flow's target, so that the kernel drops datagrams from others.
pub(super) struct UdpFlow {
    socket: ConnectedUdp,
    last_activity: Instant,
    /// Payload bytes to the target, and from it.
    sent: u64,
    received: u64,
}

impl UdpFlow {
    /// Opens a socket to the first of `addresses` to which there is a route, and sends the waiting payloads.
    pub(super) fn open(
        now: Instant,
        poller: &Poller,
        token: u64,
        addresses: &[SocketAddr],
        early: EarlyPayloads,
    ) -> Result<Self, (ProxyError, io::Error)> {
        let mut error = io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            match ConnectedUdp::connect(*address) {
                Ok(socket) => {
                    poller.add(&socket, token, Interest::Read).map_err(|error| (ProxyError::Busy, error))?;
                    let mut flow = Self { socket, last_activity: now, sent: 0, received: 0 };
                    early.0.iter().for_each(|payload| flow.send(now, payload));
                    return Ok(flow);
                }
                Err(next_error) => error = next_error,
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

    /// Sends a payload. Errors such as a too large payload or a closed port are left to the app.
    pub(super) fn send(&mut self, now: Instant, payload: &[u8]) {
        self.last_activity = now;
        match self.socket.send(payload) {
            Ok(_) => self.sent += payload.len() as u64,
            Err(error) => tracing::trace!(%error, bytes = payload.len(), "cannot send a UDP payload"),
        }
    }

    /// Calls `each` with the payloads that have arrived. ICMP errors are ignored: a closed port may open.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        batch: &mut RecvBatch,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        for _ in 0..MAX_RECV_CALLS {
            if self.socket.recv_batch(batch)? == 0 {
                return Ok(());
            }
            self.last_activity = now;
            for received in batch.drain() {
                self.received += received.data.len() as u64;
                received.payloads().for_each(&mut each);
            }
        }
        Ok(())
    }

    /// The present counters.
    pub(super) fn transfer_state(&self) -> TransferState {
        TransferState {
            to_socket: self.sent,
            from_socket: self.received,
            last_activity: self.last_activity,
            stream_ended: false,
            socket_ended: false,
        }
    }

    /// When the flow closes if no payload moves.
    pub(super) fn expires(&self) -> Instant {
        self.last_activity + IDLE_TIMEOUT
    }
}
