//! Moves UDP payloads between a loopback socket and a stream of DATAGRAM capsules (RFC 9297 §3.5) with
//! context 0 (RFC 9298 §5).
//!
//! In: datagrams of one peer, and bytes of a stream. Out: the same in the other direction. Always holds:
//! datagrams that wait are moved together; order is kept; what the stream does not accept waits in the
//! socket's receive buffer, which holds `MAX_QUEUE_DELAY` of the stream's rate, so that the kernel drops
//! the excess instead of delaying it for seconds; besides, one buffer per direction.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use bytes::{BufMut, BytesMut};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleError, CapsuleReader, MAX_DATAGRAM_LEN, encode_datagram_header},
    datagram::CONTEXT_PAYLOAD,
    varint,
};
use mpvpn_os::{
    OsError, Outgoing, RecvBatch, UdpOptions, UdpSocket,
    udp::{MAX_GSO_BYTES, MAX_GSO_SEGMENTS},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};

/// The bounds of the socket's receive buffer (bytes), the queueing delay that it holds at the stream's rate,
/// and the time over which that rate is measured. At first a quarter of all packets overflowed the 256 KiB,
/// which a fast stream takes in 0.7 ms (docs/design/transport.md). Smaller: losses. Larger: delay.
const MIN_RECV_BUFFER: usize = 256 << 10;
const MAX_RECV_BUFFER: usize = 4 << 20;
const MAX_QUEUE_DELAY: Duration = Duration::from_millis(50);
const RATE_SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// A slower stream lowers the buffer by at most this fraction (its inverse) per sample, so that a short pause
/// does not cause losses. No measurement is recorded (open question of docs/design/transport.md).
const SHRINK_DIVISOR: usize = 8;
/// Messages of one receive call, each of up to 64 KiB (GRO). No measurement is recorded (open question of
/// docs/design/transport.md).
const MAX_MESSAGES_PER_RECV: usize = 4;
/// Received bytes that trigger a write even if more wait. No measurement is recorded (open question of
/// docs/design/transport.md).
const MAX_BATCH_BYTES: usize = 32 << 10;
/// The size of one read from the stream. No measurement is recorded (open question of
/// docs/design/transport.md).
const STREAM_READ_BYTES: usize = 128 << 10;

/// The amount that a pump has moved: UDP payloads without headers.
#[derive(Debug, Default)]
pub struct PumpCounters {
    /// From the socket to the stream.
    pub sent: DatagramCounter,
    /// From the stream to the socket.
    pub received: DatagramCounter,
}

/// Datagrams and their payload bytes.
#[derive(Debug, Default)]
pub struct DatagramCounter {
    packets: AtomicU64,
    bytes: AtomicU64,
}

impl DatagramCounter {
    fn add(&self, bytes: usize) {
        self.packets.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// The number of datagrams.
    #[cfg(test)]
    pub fn packets(&self) -> u64 {
        self.packets.load(Relaxed)
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

/// Why a pump has ended.
#[derive(Debug, thiserror::Error)]
pub enum PumpError {
    /// The stream broke.
    #[error("the stream broke: {0}")]
    Stream(io::Error),
    /// A loopback socket failed.
    #[error("a socket on this machine failed: {0}")]
    Socket(io::Error),
    /// The stream is not a sequence of capsules, or ended inside a capsule.
    #[error("malformed capsules: {0}")]
    Capsule(#[from] CapsuleError),
    /// "HTTP Datagrams ... too short to contain a Context ID" are malformed (RFC 9298 §4).
    #[error("a datagram without a context ID")]
    NoContext,
}

/// A UDP socket on the loopback, connected to one peer.
#[derive(Debug)]
pub struct LoopbackSocket {
    socket: UdpSocket,
    /// A duplicate, registered with the runtime.
    ready: tokio::net::UdpSocket,
    peer: SocketAddr,
}

impl LoopbackSocket {
    /// Opens a socket connected to `peer`, a socket of this machine.
    ///
    /// # Errors
    /// If the kernel refuses, or outside of a tokio runtime.
    pub fn connect(peer: SocketAddr) -> Result<Self, OsError> {
        let local = match peer.ip() {
            ip if ip.is_loopback() => ip,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let options =
            UdpOptions { recv_buffer: Some(MIN_RECV_BUFFER), ..UdpOptions::new(SocketAddr::new(local, 0)) };
        let socket = UdpSocket::bind(&options)?;
        let connect = || {
            socket.connect(peer)?;
            tokio::net::UdpSocket::from_std(socket.as_fd().try_clone_to_owned()?.into())
        };
        match connect() {
            Ok(ready) => Ok(Self { socket, ready, peer }),
            Err(source) => Err(OsError::Bind { local: peer, device: None, source }),
        }
    }

    /// The local address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    async fn receive(&self, batch: &mut RecvBatch) -> io::Result<()> {
        let receive = || match self.receive_now(batch) {
            Ok(false) => Err(io::ErrorKind::WouldBlock.into()),
            result => result.map(drop),
        };
        self.ready.async_io(Interest::READABLE, receive).await
    }

    /// Receives what already waits. Returns whether there was anything.
    fn receive_now(&self, batch: &mut RecvBatch) -> io::Result<bool> {
        Ok(self.socket.recv_batch(batch)? > 0)
    }

    /// Sends datagrams of `segment` bytes each; the last may be shorter.
    async fn send(&self, segment: usize, data: &[u8]) {
        let segment = u16::try_from(segment).ok();
        let out = Outgoing { to: self.peer, from: None, ecn: None, dscp: 0, segment_size: segment, data };
        let sent = self.ready.async_io(Interest::WRITABLE, || self.socket.send(&out)).await;
        if let Err(error) = sent {
            // Lost as on any link; the peer may be restarting.
            tracing::trace!(%error, "cannot send datagrams to the loopback");
        }
    }
}

/// Moves datagrams until the stream ends. A clean end between capsules is no error.
///
/// # Errors
/// Why the pump ended; the stream must then be aborted.
pub async fn pump<S>(socket: &LoopbackSocket, stream: S, counters: &PumpCounters) -> Result<(), PumpError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (reader, writer) = tokio::io::split(stream);
    tokio::select! {
        ended = to_stream(socket, writer, &counters.sent) => ended,
        ended = from_stream(socket, reader, &counters.received) => ended,
    }
}

async fn to_stream(
    socket: &LoopbackSocket,
    mut stream: impl AsyncWrite + Unpin,
    sent: &DatagramCounter,
) -> Result<(), PumpError> {
    let mut batch = RecvBatch::new(MAX_MESSAGES_PER_RECV);
    let mut out = BytesMut::with_capacity(2 * MAX_BATCH_BYTES);
    let mut sizer = RecvBufferSizer::new(Instant::now());
    loop {
        socket.receive(&mut batch).await.map_err(PumpError::Socket)?;
        loop {
            for datagram in batch.drain().flat_map(|received| received.datagrams()) {
                sent.add(datagram.len());
                encode_datagram_header(varint::len(CONTEXT_PAYLOAD) + datagram.len(), &mut out);
                varint::encode(CONTEXT_PAYLOAD, &mut out);
                out.put_slice(&datagram);
            }
            if out.len() >= MAX_BATCH_BYTES || !socket.receive_now(&mut batch).map_err(PumpError::Socket)? {
                break;
            }
        }
        stream.write_all(&out).await.map_err(PumpError::Stream)?;
        stream.flush().await.map_err(PumpError::Stream)?;
        if let Some(bytes) = sizer.on_written(Instant::now(), out.len()) {
            socket.socket.set_recv_buffer(bytes).map_err(PumpError::Socket)?;
        }
        out.clear();
    }
}

/// Computes the size of the receive buffer.
struct RecvBufferSizer {
    bytes: usize,
    /// The start of the sample, and the bytes that the stream accepted in it.
    since: Instant,
    taken: usize,
}

impl RecvBufferSizer {
    fn new(now: Instant) -> Self {
        Self { bytes: MIN_RECV_BUFFER, since: now, taken: 0 }
    }

    /// Counts bytes that the stream accepted. Returns the new buffer size if it changed.
    fn on_written(&mut self, now: Instant, bytes: usize) -> Option<usize> {
        self.taken += bytes;
        let passed = now.saturating_duration_since(self.since);
        if passed < RATE_SAMPLE_INTERVAL {
            return None;
        }
        let bytes_per_delay = self.taken as f64 * MAX_QUEUE_DELAY.as_secs_f64() / passed.as_secs_f64();
        (self.since, self.taken) = (now, 0);
        let room = (bytes_per_delay as usize)
            .max(self.bytes - self.bytes / SHRINK_DIVISOR)
            .clamp(MIN_RECV_BUFFER, MAX_RECV_BUFFER);
        (room != self.bytes).then(|| {
            self.bytes = room;
            room
        })
    }
}

async fn from_stream(
    socket: &LoopbackSocket,
    mut stream: impl AsyncRead + Unpin,
    received: &DatagramCounter,
) -> Result<(), PumpError> {
    let mut buffer = BytesMut::with_capacity(STREAM_READ_BYTES);
    let mut capsules = CapsuleReader::datagrams(MAX_DATAGRAM_LEN);
    let mut gso_batch = GsoBatch::default();
    loop {
        buffer.clear();
        if stream.read_buf(&mut buffer).await.map_err(PumpError::Stream)? == 0 {
            return Ok(capsules.finish()?);
        }
        capsules.push(&buffer);
        while let Some(capsule) = capsules.next()? {
            let Capsule::Datagram(value) = capsule else { continue };
            let (context, at) = varint::decode(&value).ok_or(PumpError::NoContext)?;
            let payload = &value[at..];
            if context != CONTEXT_PAYLOAD || payload.is_empty() || payload.len() > MAX_GSO_BYTES {
                continue;
            }
            received.add(payload.len());
            if !gso_batch.fits(payload.len()) {
                gso_batch.send(socket).await;
            }
            gso_batch.push(payload);
        }
        gso_batch.send(socket).await;
    }
}

/// Datagrams sent in one call (GSO): all of one size, except that the last may be shorter.
#[derive(Default)]
struct GsoBatch {
    data: Vec<u8>,
    segment: usize,
    count: usize,
}

impl GsoBatch {
    fn fits(&self, len: usize) -> bool {
        let is_even = self.count * self.segment == self.data.len();
        self.count == 0
            || is_even
                && len <= self.segment
                && self.count < MAX_GSO_SEGMENTS
                && self.data.len() + len <= MAX_GSO_BYTES
    }

    fn push(&mut self, payload: &[u8]) {
        if self.count == 0 {
            self.segment = payload.len();
        }
        self.data.extend_from_slice(payload);
        self.count += 1;
    }

    async fn send(&mut self, socket: &LoopbackSocket) {
        if self.count > 0 {
            socket.send(self.segment, &self.data).await;
            self.data.clear();
            self.count = 0;
        }
    }
}

#[cfg(test)]
mod tests;
