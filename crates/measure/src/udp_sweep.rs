//! Datagrams at one rate, in one direction.

use std::{
    io::{self, ErrorKind},
    net::UdpSocket,
    thread,
    time::{Duration, Instant},
};

use mpvpn_status::measure::{
    DATAGRAM_BYTES, Datagram, DatagramCounter, DatagramKind, DatagramReport, LoadDirection, Order,
    SentDatagrams, UdpStep,
};

use super::{
    Interrupt,
    responder::{Orders, Responder},
};

/// Time after the last datagram in which others may still arrive: more than the longest queue of most links.
const LATE_ARRIVALS: Duration = Duration::from_millis(500);
/// Time between two bursts: shorter costs processor time, longer fills queues in bursts.
const BURST_INTERVAL: Duration = Duration::from_millis(1);
/// Time for which a call waits for a datagram.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(200);
/// Requests until a flow counts as not possible: 4 s.
const MAX_GREETINGS: u32 = 20;
/// Datagrams of one burst at most: after a stall of this process it does not catch up at once.
const MAX_BURST: u64 = 256;

/// Sends at `bits_per_second` of content for `time`, after half of it in which nothing is counted: the
/// congestion windows of the paths first grow to the rate.
pub(super) fn step(
    Responder { target, orders }: &Responder,
    direction: LoadDirection,
    (run, bits_per_second, time): (u32, f64, Duration),
    interrupt: &Interrupt,
) -> io::Result<UdpStep> {
    // The first datagram makes the flow known to the server, which answers it in the class in which it came.
    let socket = target.datagrams(RECEIVE_TIMEOUT)?;
    greet(&socket)?;
    let warm_up = (run, bits_per_second, time / 2);
    let (sent, received) = match direction {
        LoadDirection::Up => {
            send(&socket, warm_up, interrupt)?;
            let run = run + 1;
            let sent = send(&socket, (run, bits_per_second, time), interrupt)?;
            interrupt.sleep(LATE_ARRIVALS);
            (sent, orders.ask::<DatagramReport>(Order::UdpReceived { run })?)
        }
        LoadDirection::Down => {
            let port = socket.local_addr()?.port();
            orders.ask::<SentDatagrams>(send_order(port, warm_up))?;
            receive((&socket, orders), (run + 1, bits_per_second, time))?
        }
    };
    let rate =
        |datagrams: u64, time: Duration| (datagrams * DATAGRAM_BYTES as u64 * 8) as f64 / time.as_secs_f64();
    Ok(UdpStep {
        sent_bits_per_second: rate(sent, time),
        // Datagrams that waited in queues at the end of the step arrive after it: the links carried them in
        // the longer time.
        received_bits_per_second: rate(received.datagrams, time.max(Duration::from_micros(received.span_us))),
        loss_pct: 100.0 * sent.saturating_sub(received.datagrams) as f64 / sent.max(1) as f64,
        jitter_ms: received.jitter_us / 1000.0,
        reordered: received.reordered,
    })
}

/// Numbers of runs that a step uses.
pub(super) const RUNS_OF_STEP: u32 = 2;

fn send_order(port: u16, (run, bits_per_second, time): (u32, f64, Duration)) -> Order {
    Order::SendUdp {
        port,
        run,
        bits_per_second: bits_per_second.max(1.0) as u64,
        milliseconds: time.as_millis() as u32,
    }
}

/// Waits for the answer to an echo request.
fn greet(socket: &UdpSocket) -> io::Result<()> {
    let request = Datagram { kind: DatagramKind::EchoRequest, run: 0, sequence: 0, sent_us: 0 };
    let mut buffer = [0; 2048];
    for _ in 0..MAX_GREETINGS {
        socket.send(&request.encode())?;
        if socket.recv(&mut buffer).is_ok() {
            return Ok(());
        }
    }
    Err(io::Error::new(ErrorKind::TimedOut, "the server answers no datagrams"))
}

fn send(
    socket: &UdpSocket,
    (run, bits_per_second, time): (u32, f64, Duration),
    interrupt: &Interrupt,
) -> io::Result<u64> {
    let (began, mut sent) = (Instant::now(), 0u64);
    let mut buffer = [0; DATAGRAM_BYTES];
    loop {
        let passed = began.elapsed();
        if passed >= time || interrupt.is_set() {
            return Ok(sent);
        }
        let due = (bits_per_second * passed.as_secs_f64() / (DATAGRAM_BYTES * 8) as f64) as u64;
        for _ in 0..due.saturating_sub(sent).min(MAX_BURST) {
            let sent_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            let header = Datagram { kind: DatagramKind::Data, run, sequence: sent as u32, sent_us };
            buffer[..Datagram::HEADER_BYTES].copy_from_slice(&header.encode());
            // One that the kernel does not take is lost.
            let _ = socket.send(&buffer);
            sent += 1;
        }
        thread::sleep(BURST_INTERVAL);
    }
}

fn receive(
    (socket, orders): (&UdpSocket, &Orders),
    (run, bits_per_second, time): (u32, f64, Duration),
) -> io::Result<(u64, DatagramReport)> {
    let order = send_order(socket.local_addr()?.port(), (run, bits_per_second, time));
    thread::scope(|scope| {
        let answer = scope.spawn(move || orders.ask::<SentDatagrams>(order));
        let mut counter = DatagramCounter::default();
        let (began, mut buffer) = (Instant::now(), [0; 2048]);
        let mut ends = None;
        while ends.is_none_or(|at| Instant::now() < at) {
            if ends.is_none() && answer.is_finished() {
                ends = Some(Instant::now() + LATE_ARRIVALS);
            }
            match socket.recv(&mut buffer) {
                Ok(length) => {
                    let now_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                    let header = Datagram::parse(&buffer[..length]);
                    if let Some(header) = header.filter(|header| header.run == run) {
                        counter.count(now_us, &header, length);
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error),
            }
        }
        let sent = answer.join().unwrap_or_else(|_| Err(ErrorKind::Other.into()))?;
        Ok((sent.datagrams, counter.report()))
    })
}
