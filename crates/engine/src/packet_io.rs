//! Sockets and the TUN device, with what to do when they are busy.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr},
};

use arrayvec::ArrayVec;
use bytes::BytesMut;
use mpvpn_os::{
    Outgoing, RecvBatch, Tun, UdpSocket, UndoJournal,
    poll::{Interest, Poller},
    udp::SendFailure,
};
use mpvpn_packet::{TunPacket, VNET_HDR_LEN, VnetHdr, gro::MAX_PARTS};
use mpvpn_quic::Transmit;

use crate::EngineError;

/// Receive calls a socket a turn: more keep other sockets waiting, fewer cost a turn each.
const MAX_RECV_CALLS: usize = 4;
/// Messages a receive call.
const MAX_MESSAGES_PER_RECV: usize = 16;

/// Sends that wait for a busy socket, at most: the congestion window bounds them long before.
const MAX_QUEUED_SENDS: usize = 256;

/// Bytes that the kernel should hold for a socket in each direction.
pub(crate) const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// Packets that wait in the kernel for us to read them. It is a plain FIFO, so it must be emptied at
/// every turn; it only has to last while this process waits for a processor.
pub(crate) const TUN_QUEUE_PACKETS: u32 = 1000;

/// Bytes read from the TUN a turn, so that what arrives meanwhile is not kept waiting.
const MAX_TUN_READ_BYTES: usize = 1 << 20;
/// Packets read from the TUN a turn. What is read together arrives together: a longer train of datagrams
/// would overflow the buffer of the socket at its end, which holds about 90 by default.
pub(crate) const MAX_TUN_READS: usize = 64;

/// A socket that keeps what the kernel could not take.
#[derive(Debug)]
pub(crate) struct BufferedUdpSocket {
    pub(crate) socket: UdpSocket,
    queued: VecDeque<(Transmit, Vec<u8>)>,
}

/// What became of a packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendOutcome {
    /// It is on its way, or waits for room.
    SentOrQueued,
    /// The link cannot carry anything now.
    LinkDown,
}

impl BufferedUdpSocket {
    pub(crate) fn new(socket: UdpSocket) -> Self {
        Self { socket, queued: VecDeque::new() }
    }

    /// Sends, or keeps for later.
    pub(crate) fn send(
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
                    // Without notice of room the packets would leave with the next ones.
                    let _ = poller.modify(&self.socket, token, Interest::ReadWrite);
                    SendOutcome::SentOrQueued
                }
                SendFailure::TooBig => SendOutcome::SentOrQueued,
                SendFailure::Lost => {
                    tracing::debug!(%error, "a packet could not be sent");
                    SendOutcome::SentOrQueued
                }
                SendFailure::LinkDown => {
                    tracing::debug!(%error, "a link cannot send");
                    SendOutcome::LinkDown
                }
            },
        }
    }

    /// Sends without keeping anything for later: this process is about to end.
    pub(crate) fn send_last(&self, transmit: &Transmit, data: &[u8], from: Option<IpAddr>) {
        // The far end finds out by itself if this is lost.
        let _ = self.socket.send(&outgoing(transmit, data, from));
    }

    fn queue(&mut self, transmit: &Transmit, data: &[u8]) {
        if self.queued.len() < MAX_QUEUED_SENDS {
            self.queued.push_back((*transmit, data.to_vec()));
        }
    }

    /// The kernel has room again.
    pub(crate) fn flush(&mut self, poller: &Poller, token: u64, from: impl Fn(&Transmit) -> Option<IpAddr>) {
        while let Some((transmit, data)) = self.queued.front() {
            match self.socket.send(&outgoing(transmit, data, from(transmit))) {
                Err(error) if SendFailure::of(&error) == SendFailure::Busy => return,
                _ => self.queued.pop_front(),
            };
        }
        let _ = poller.modify(&self.socket, token, Interest::Read);
    }
}

/// What the socket is to send; `from` where the kernel is not to choose the source.
pub(crate) fn outgoing<'a>(transmit: &Transmit, data: &'a [u8], from: Option<IpAddr>) -> Outgoing<'a> {
    Outgoing {
        to: transmit.remote,
        from,
        ecn: transmit.ecn,
        dscp: transmit.dscp,
        segment_size: transmit.segment_size.and_then(|size| u16::try_from(size).ok()),
        data: &data[..transmit.size],
    }
}

/// One received datagram: who sent it, to which of our addresses, its ECN bits, its bytes.
pub(crate) struct ReceivedDatagram {
    pub(crate) remote: SocketAddr,
    pub(crate) local: Option<IpAddr>,
    pub(crate) ecn: u8,
    pub(crate) data: BytesMut,
}

/// Takes the datagrams of a batch apart, those that the kernel joined (GRO) too.
pub(crate) fn for_each_datagram(batch: &mut RecvBatch, mut each: impl FnMut(ReceivedDatagram)) {
    for received in batch.drain() {
        let (remote, local, ecn) = (received.remote, received.local_ip, received.ecn);
        received.datagrams().for_each(|data| each(ReceivedDatagram { remote, local, ecn, data }));
    }
}

/// Memory for datagrams on their way between sockets and a tunnel, used again in each turn.
pub(crate) struct DatagramBuffers {
    batch: RecvBatch,
    out: Vec<u8>,
}

impl DatagramBuffers {
    pub(crate) fn new() -> Self {
        Self { batch: RecvBatch::new(MAX_MESSAGES_PER_RECV), out: Vec::with_capacity(64 << 10) }
    }

    /// Receives what waits in a socket, within bounds. `tunnel` takes each datagram, those that the kernel joined (GRO) one
    /// by one, by `each`, and is told by `after` where a batch ends.
    ///
    /// # Errors
    /// If the kernel reports one; what came before it was handed out.
    pub(crate) fn receive<T>(
        &mut self,
        socket: &UdpSocket,
        tunnel: &mut T,
        mut each: impl FnMut(&mut T, ReceivedDatagram),
        mut after: impl FnMut(&mut T),
    ) -> io::Result<()> {
        for _ in 0..MAX_RECV_CALLS {
            let count = socket.recv_batch(&mut self.batch)?;
            if count == 0 {
                return Ok(());
            }
            for_each_datagram(&mut self.batch, |datagram| each(tunnel, datagram));
            after(tunnel);
            if count < MAX_MESSAGES_PER_RECV {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sends all that `poll`, which appends the bytes to the given buffer, has to send.
    pub(crate) fn transmit(
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

/// Takes back what was changed on the machine.
pub(crate) fn undo_changes(undo: &mut UndoJournal) -> Result<(), EngineError> {
    let mut errors = undo.revert_all_steps();
    for error in &errors {
        tracing::warn!(%error, "could not take back a change");
    }
    errors.pop().map_or(Ok(()), |error| Err(error.into()))
}

/// Reads what waits in the TUN, whether there is room for it or not: what to drop is a choice of the
/// queues, which know the flows.
pub(crate) fn read_tun(tun: &Tun, buffer: &mut [u8], mut each: impl FnMut(VnetHdr, &mut [u8])) {
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

/// Writes one packet to the TUN. What the kernel refuses is lost, as on any link.
pub(crate) fn write_tun(tun: &Tun, joined: &TunPacket) {
    let pieces: ArrayVec<IoSlice<'_>, MAX_PARTS> = joined.io_slices().collect();
    if let Err(error) = tun.write_vectored(&pieces)
        && error.kind() != io::ErrorKind::WouldBlock
    {
        tracing::debug!(%error, bytes = joined.len(), "the TUN did not take a packet");
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
        let mut buffers = DatagramBuffers::new();
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
        buffers.receive(&to, &mut got, each, |got| got.1 += 1).unwrap();
        assert_eq!(got, ((0..(MAX_RECV_CALLS * MAX_MESSAGES_PER_RECV) as u8).collect(), MAX_RECV_CALLS));
        buffers.receive(&to, &mut got, each, |got| got.1 += 1).unwrap();
        assert_eq!((got.0.len(), got.1), (MAX_RECV_CALLS * MAX_MESSAGES_PER_RECV + 10, MAX_RECV_CALLS + 1));
        buffers.receive(&to, &mut got, each, |got| got.1 += 1).unwrap();
        assert_eq!(got.1, MAX_RECV_CALLS + 1, "nothing waited");
    }
}
