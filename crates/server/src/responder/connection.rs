//! One TCP connection of a measuring client: orders, and the bytes of flows.

use std::{io, net::SocketAddr, time::Duration};

use mpvpn_os::tcp::SegmentCounters;
use mpvpn_status::measure::{DATAGRAM_BYTES, Datagram, DatagramKind, MAX_ORDER_BYTES, Order, SentDatagrams};
use serde::Serialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::{Instant, sleep, timeout},
};

use super::hosts::{Host, Place};

/// Time without any order or byte after which a connection ends: a client asks for a report each second.
/// Longer keeps the places of clients that are gone, shorter ends measurements over links that are away for a
/// moment.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are written or read at a time. Larger costs memory for each flow, smaller costs system calls.
const CHUNK_BYTES: usize = 128 << 10;
/// How often the counters of a flow are read: a report is that old at most.
const COUNTERS_INTERVAL: Duration = Duration::from_millis(200);
/// Time between two bursts of datagrams: the resolution of the runtime's timer.
const BURST_INTERVAL: Duration = Duration::from_millis(1);
/// Datagrams of one burst at most, which is 2.5 Gbit/s: after a stall of this process it does not catch up at
/// once.
const MAX_BURST: u64 = 256;

static ZEROES: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

/// Serves a connection until it ends.
pub(super) async fn serve(mut stream: TcpStream, udp: &UdpSocket, place: &Place) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut line = Vec::with_capacity(MAX_ORDER_BYTES);
    while timeout(IDLE_TIMEOUT, read_line(&mut stream, &mut line)).await?? {
        let order = Order::parse(&line).map_err(io::Error::other)?;
        tracing::trace!(host = %place.address, ?order, "an order of a measurement");
        match order {
            Order::Report => answer(&mut stream, &place.report()).await?,
            Order::Send => return send(stream, &place.host).await,
            Order::Receive => return receive(stream, &place.host).await,
            Order::SendUdp { port, run, bits_per_second, milliseconds } => {
                let plan = Burst { run, bits_per_second, time: Duration::from_millis(milliseconds.into()) };
                let sent = plan.send(udp, SocketAddr::new(place.address, port), place).await?;
                answer(&mut stream, &sent).await?;
            }
            Order::UdpReceived { run } => answer(&mut stream, &place.host.run(run)).await?,
        }
    }
    Ok(())
}

/// Reads a line without its end; false at the end of the connection.
async fn read_line(stream: &mut TcpStream, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    loop {
        match stream.read_u8().await {
            Ok(b'\n') => return Ok(true),
            Ok(_) if line.len() == MAX_ORDER_BYTES => return Err(io::Error::other("an order is too long")),
            Ok(byte) => line.push(byte),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

async fn answer(stream: &mut TcpStream, answer: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    timeout(IDLE_TIMEOUT, stream.write_all(&line)).await?
}

/// Sends until the client closes the connection.
async fn send(mut stream: TcpStream, host: &Host) -> io::Result<()> {
    let mut counted = SegmentCounters::default();
    let mut next_count = Instant::now() + COUNTERS_INTERVAL;
    loop {
        let written = timeout(IDLE_TIMEOUT, stream.write(&ZEROES)).await;
        let is_over = !matches!(written, Ok(Ok(_)));
        if is_over || Instant::now() >= next_count {
            next_count = Instant::now() + COUNTERS_INTERVAL;
            count_segments(&stream, host, &mut counted);
        }
        match written {
            Ok(Ok(_)) => {}
            // A client ends the connection in this way.
            Ok(Err(error)) if is_closed(&error) => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Err(late) => return Err(late.into()),
        }
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Adds what a flow has sent since the last call.
fn count_segments(stream: &TcpStream, host: &Host, counted: &mut SegmentCounters) {
    let Ok(now) = SegmentCounters::of(stream) else { return };
    let since = |now: u32, before: u32| u64::from(now.wrapping_sub(before));
    host.segments.set(host.segments.get() + since(now.segments, counted.segments));
    host.retransmitted.set(host.retransmitted.get() + since(now.retransmitted, counted.retransmitted));
    *counted = now;
}

/// Reads until the client closes the connection.
async fn receive(mut stream: TcpStream, host: &Host) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match timeout(IDLE_TIMEOUT, stream.read(&mut buffer)).await? {
            Ok(0) => return Ok(()),
            Ok(length) => host.received_bytes.set(host.received_bytes.get() + length as u64),
            Err(error) if is_closed(&error) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Datagrams at a rate.
struct Burst {
    run: u32,
    bits_per_second: u64,
    time: Duration,
}

impl Burst {
    async fn send(&self, udp: &UdpSocket, to: SocketAddr, place: &Place) -> io::Result<SentDatagrams> {
        if place.host.is_sent_datagrams.replace(true) {
            return Err(io::Error::other("datagrams are sent to this host already"));
        }
        // Also if this future is dropped.
        let _sending = Sending(&place.host);
        let bits = DATAGRAM_BYTES as u64 * 8;
        let (began, mut sent) = (Instant::now(), 0u64);
        let mut buffer = [0; DATAGRAM_BYTES];
        loop {
            let passed = began.elapsed();
            if passed >= self.time {
                return Ok(SentDatagrams { datagrams: sent });
            }
            let due = u128::from(self.bits_per_second) * passed.as_micros() / 1_000_000 / u128::from(bits);
            let due = u64::try_from(due).unwrap_or(u64::MAX).saturating_sub(sent).min(MAX_BURST);
            for _ in 0..due {
                let sequence = sent as u32;
                let header =
                    Datagram { kind: DatagramKind::Data, run: self.run, sequence, sent_us: place.now_us() };
                buffer[..Datagram::HEADER_BYTES].copy_from_slice(&header.encode());
                match udp.send_to(&buffer, to).await {
                    Ok(_) => sent += 1,
                    // An ICMP error about an earlier one.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => return Err(error),
                }
            }
            sleep(BURST_INTERVAL).await;
        }
    }
}

/// The mark that datagrams are sent to a host, which goes with this.
struct Sending<'a>(&'a Host);

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.is_sent_datagrams.set(false);
    }
}
