//! Reading and writing of UDP sockets and TUN queues, and a send queue for sockets whose buffer is full.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use arrayvec::ArrayVec;
use bytes::BytesMut;
use mpvpn_error::RunError;
use mpvpn_os::{
    Outgoing, RecvBatch, Tun, UdpSocket, UndoJournal,
    poll::{Interest, Poller},
    udp::{Received, SendFailure},
};
use mpvpn_packet::{TunPacket, VNET_HDR_LEN, VnetHdr, gro::MAX_PARTS};
use mpvpn_quic::Transmit;

/// Receive calls for one socket in an iteration. More: other sockets wait. Fewer: more iterations. One
/// instead of four was no faster for 16 flows (docs/design/threads.md).
pub const MAX_RECV_CALLS: usize = 4;
/// Messages that one `recvmmsg` call receives, each of up to 64 KiB (GRO). More: memory. Fewer: system calls.
const MAX_MESSAGES_PER_RECV: usize = 16;

/// Sends that are queued for a socket whose buffer is full. The congestion window limits them far below this;
/// more are dropped, which congestion control takes for losses.
const MAX_QUEUED_SENDS: usize = 256;

/// Socket buffer in each direction (bytes). Smaller: bursts are lost while this process waits for a
/// processor. Larger: memory, and older packets. Chosen (open question of docs/design/threads.md).
pub const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// Packets in the kernel's transmit queue of the TUN device. That queue is a plain FIFO without fairness, so
/// every iteration empties it; it has to last only while this process waits for a processor. Smaller: losses.
/// Larger: delay. Chosen (open question of docs/design/threads.md).
pub const TUN_QUEUE_PACKETS: u32 = 1000;

/// Bytes read from one TUN queue in an iteration. More: received packets wait while the loop reads. Fewer:
/// the TUN queue overflows.
const MAX_TUN_READ_BYTES: usize = 1 << 20;
/// Packets read from one TUN queue in an iteration. Packets read together arrive together: longer trains
/// overflow the receiver's socket buffer, which holds about 90 datagrams by default (0.84 instead of 0.74
/// Gbit/s arrive of 104,000 packets/s: docs/design/threads.md). Fewer: the TUN queue overflows.
pub const MAX_TUN_READS: usize = 64;

/// A UDP socket with a queue for sends that the kernel had no buffer for.
#[derive(Debug)]
pub struct BufferedUdpSocket {
    /// The socket.
    pub socket: UdpSocket,
    queued: VecDeque<(Transmit, Vec<u8>)>,
}

/// The outcome of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Sent, queued, or dropped as on any link.
    SentOrQueued,
    /// The link cannot send at all now.
    LinkDown,
}

impl BufferedUdpSocket {
    /// With an empty queue.
    pub fn new(socket: UdpSocket) -> Self {
        Self { socket, queued: VecDeque::new() }
    }

    /// Sends now, or queues if the socket's buffer is full.
    pub fn send(
        &mut self,
        poller: &Poller,
        token: u64,
        transmit: &Transmit,
        data: &[u8],
        from: Option<IpAddr>,
    ) -> SendOutcome {
        if !self.queued.is_empty() {
            self.queue(transmit, data);
            return SendOutcome::SentOrQueued;
        }
        match self.socket.send(&outgoing(transmit, data, from)) {
            Ok(()) => SendOutcome::SentOrQueued,
            Err(error) => match SendFailure::of(&error) {
                SendFailure::Busy => {
                    self.queue(transmit, data);
                    // Without an event for writability, queued packets would leave only with the next send.
                    let _ = poller.modify(&self.socket, token, Interest::ReadWrite);
                    SendOutcome::SentOrQueued
                }
                SendFailure::TooBig => SendOutcome::SentOrQueued,
                SendFailure::Lost => {
                    tracing::debug!(%error, "cannot send a packet");
                    SendOutcome::SentOrQueued
                }
                SendFailure::LinkDown => {
                    tracing::debug!(%error, "cannot send over a link");
                    SendOutcome::LinkDown
                }
            },
        }
    }

    /// Sends without queueing, because this process is about to end.
    pub fn send_last(&self, transmit: &Transmit, data: &[u8], from: Option<IpAddr>) {
        // If this is lost, the peer notices by its idle timeout.
        let _ = self.socket.send(&outgoing(transmit, data, from));
    }

    fn queue(&mut self, transmit: &Transmit, data: &[u8]) {
        if self.queued.len() < MAX_QUEUED_SENDS {
            self.queued.push_back((*transmit, data.to_vec()));
        }
    }

    /// The socket is writable again: sends what is queued.
    pub fn flush(&mut self, poller: &Poller, token: u64, from: impl Fn(&Transmit) -> Option<IpAddr>) {
        while let Some((transmit, data)) = self.queued.front() {
            match self.socket.send(&outgoing(transmit, data, from(transmit))) {
                Err(error) if SendFailure::of(&error) == SendFailure::Busy => return,
                _ => self.queued.pop_front(),
            };
        }
        let _ = poller.modify(&self.socket, token, Interest::Read);
    }
}

/// The kernel's view of a transmit; `from` is the source address, `None` lets the kernel choose it.
pub fn outgoing<'a>(transmit: &Transmit, data: &'a [u8], from: Option<IpAddr>) -> Outgoing<'a> {
    Outgoing {
        to: transmit.remote,
        from,
        ecn: transmit.ecn,
        dscp: transmit.dscp,
        segment_size: transmit.segment_size.and_then(|size| u16::try_from(size).ok()),
        data: &data[..transmit.size],
    }
}

/// One received datagram.
pub struct ReceivedDatagram {
    /// When it arrived.
    pub arrived: Instant,
    /// Its sender.
    pub remote: SocketAddr,
    /// Our address that it was sent to.
    pub local: Option<IpAddr>,
    /// Its ECN bits.
    pub ecn: u8,
    /// Its bytes.
    pub data: BytesMut,
}

/// Calls `each` for every datagram of a batch, including those that the kernel had joined (GRO).
pub fn for_each_datagram(batch: &mut RecvBatch, mut each: impl FnMut(ReceivedDatagram)) {
    for received in batch.drain() {
        let Received { arrived, remote, local_ip: local, ecn, .. } = received;
        received.datagrams().for_each(|data| each(ReceivedDatagram { arrived, remote, local, ecn, data }));
    }
}

/// Buffers for datagrams between sockets and a tunnel, reused in each iteration.
pub struct DatagramBuffers {
    batch: RecvBatch,
    out: Vec<u8>,
}

impl Default for DatagramBuffers {
    fn default() -> Self {
        Self { batch: RecvBatch::new(MAX_MESSAGES_PER_RECV), out: Vec::with_capacity(64 << 10) }
    }
}

impl DatagramBuffers {
    /// Receives the datagrams that wait in a socket, in at most `max_calls` batches. Calls `each` for
    /// every datagram and `after` at the end of each batch. Returns the arrival time of the first datagram,
    /// if there was one.
    ///
    /// # Errors
    /// The kernel's error; `each` was called for all datagrams before it.
    pub fn receive<T>(
        &mut self,
        socket: &UdpSocket,
        max_calls: usize,
        tunnel: &mut T,
        mut each: impl FnMut(&mut T, ReceivedDatagram),
        mut after: impl FnMut(&mut T),
    ) -> io::Result<Option<Instant>> {
        let mut first = None;
        for _ in 0..max_calls {
            let count = socket.recv_batch(&mut self.batch)?;
            for_each_datagram(&mut self.batch, |datagram| {
                first.get_or_insert(datagram.arrived);
                each(tunnel, datagram);
            });
            if count > 0 {
                after(tunnel);
            }
            if count < MAX_MESSAGES_PER_RECV {
                break;
            }
        }
        Ok(first)
    }

    /// Sends everything that `poll` returns; `poll` appends the bytes to the given buffer.
    pub fn transmit(
        &mut self,
        mut poll: impl FnMut(&mut Vec<u8>) -> Option<Transmit>,
        mut send: impl FnMut(&Transmit, &[u8]),
    ) {
        loop {
            self.out.clear();
            let Some(transmit) = poll(&mut self.out) else { return };
            send(&transmit, &self.out);
        }
    }
}

/// Undoes all changes to the machine; returns the last error.
pub fn undo_changes(undo: &mut UndoJournal) -> Result<(), RunError> {
    let mut errors = undo.revert_all_steps();
    for error in &errors {
        tracing::warn!(%error, "cannot undo a change to the machine");
    }
    errors.pop().map_or(Ok(()), |error| Err(error.into()))
}

/// Reads what waits in a TUN queue, whether or not the tunnel can send it: the tunnel's queues know the flows
/// and choose what to drop.
pub fn read_tun(tun: &Tun, buffer: &mut [u8], mut each: impl FnMut(VnetHdr, &mut [u8])) {
    let mut bytes = 0;
    for _ in 0..MAX_TUN_READS {
        let Ok(length) = tun.read(buffer) else { return };
        let Some((head, packet)) = buffer[..length].split_at_mut_checked(VNET_HDR_LEN) else { continue };
        if let Some(hdr) = VnetHdr::parse(head) {
            each(hdr, packet);
        }
        bytes += length;
        if bytes >= MAX_TUN_READ_BYTES {
            return;
        }
    }
}

/// Writes one packet to the TUN device. A packet that the kernel refuses is lost, as on any link.
pub fn write_tun(tun: &Tun, joined: &TunPacket) {
    let pieces: ArrayVec<IoSlice<'_>, MAX_PARTS> = joined.io_slices().collect();
    if let Err(error) = tun.write_vectored(&pieces)
        && error.kind() != io::ErrorKind::WouldBlock
    {
        tracing::debug!(%error, bytes = joined.len(), "the TUN device refused a packet");
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_os::UdpOptions;

    use super::*;

    fn socket() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind(&UdpOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    #[test]
    fn what_is_sent_is_received_in_order_and_batches_are_bounded() {
        let ((from, source), (to, target)) = (socket(), socket());
        let mut buffers = DatagramBuffers::default();
        let mut numbers = 0..(MAX_RECV_CALLS * MAX_MESSAGES_PER_RECV + 10) as u8;
        let poll = |out: &mut Vec<u8>| {
            out.push(numbers.next()?);
            let transmit =
                Transmit { local: None, remote: target, ecn: None, dscp: 0, size: 1, segment_size: None };
            Some(transmit)
        };
        buffers.transmit(poll, |transmit, data| from.send(&outgoing(transmit, data, None)).unwrap());
        let mut got = (Vec::new(), 0);
        let each = |got: &mut (Vec<u8>, usize), datagram: ReceivedDatagram| {
            assert_eq!(datagram.remote, source);
            got.0.extend_from_slice(&datagram.data);
        };
        let first = buffers.receive(&to, MAX_RECV_CALLS, &mut got, each, |got| got.1 += 1).unwrap();
        assert!(first.is_some_and(|at| at <= Instant::now()), "{first:?}");
        assert_eq!(got, ((0..(MAX_RECV_CALLS * MAX_MESSAGES_PER_RECV) as u8).collect(), MAX_RECV_CALLS));
        buffers.receive(&to, MAX_RECV_CALLS, &mut got, each, |got| got.1 += 1).unwrap();
        assert_eq!((got.0.len(), got.1), (MAX_RECV_CALLS * MAX_MESSAGES_PER_RECV + 10, MAX_RECV_CALLS + 1));
        let first = buffers.receive(&to, MAX_RECV_CALLS, &mut got, each, |got| got.1 += 1).unwrap();
        assert_eq!((got.1, first), (MAX_RECV_CALLS + 1, None), "nothing waited");
    }
}
