//! Traffic of the classes: numbered datagrams through the tunnel to an echo at the server and back.
//!
//! In: a lab with a running tunnel. Out: a record of each datagram with its send time and round-trip time.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{JoinHandle, sleep},
    time::{Duration, Instant},
};

use mpvpn_lab::{Lab, LabError};
use rustix::net::sockopt;

use crate::vpn::TUNNEL_SERVER_V4;

/// The port of the first echo; the others have the ports after it.
const FIRST_PORT: u16 = 7001;
/// Receive buffer of each socket, in bytes. In a smaller one datagrams are lost when this machine is busy,
/// which would count as loss of the link.
const RECV_BUFFER_BYTES: usize = 4 << 20;
/// How often a waiting thread checks whether to stop. Longer delays the end, shorter costs wake-ups.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of the number at the beginning of each datagram.
const NUMBER_LEN: usize = 8;

/// The flow of one class.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassFlow {
    /// The class that the client's default rules choose for this DSCP.
    pub(super) class: &'static str,
    dscp: u8,
    /// Bytes of payload.
    payload_bytes: usize,
    interval: Duration,
}

/// One flow for each class of the default configuration.
pub(super) const FLOWS: [ClassFlow; 3] = [
    // EF (RFC 3246): two calls.
    ClassFlow { class: "critical", dscp: 46, payload_bytes: 200, interval: Duration::from_millis(10) },
    ClassFlow { class: "default", dscp: 0, payload_bytes: 1000, interval: Duration::from_millis(2) },
    // LE (RFC 8622).
    ClassFlow { class: "bulk", dscp: 1, payload_bytes: 1200, interval: Duration::from_micros(800) },
];

impl ClassFlow {
    /// The offered rate, in Mbit/s of payload.
    pub(super) fn mbps(&self) -> f64 {
        self.payload_bytes as f64 * 8e-6 / self.interval.as_secs_f64()
    }
}

/// One datagram: when it was sent, since the start, and its round-trip time, `None` if no reply has arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Datagram {
    pub(super) at: Duration,
    pub(super) rtt: Option<Duration>,
}

/// Figures about the datagrams that were sent in an interval. Serialized into `classes.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Figures {
    /// Payload that was returned, in Mbit/s.
    pub(super) mbps: f64,
    /// Median round-trip time of the returned datagrams.
    pub(super) rtt_p50_ms: Option<f64>,
    /// 99th percentile of the round-trip time of the returned datagrams.
    pub(super) rtt_p99_ms: Option<f64>,
    pub(super) sent: usize,
    pub(super) lost: usize,
}

impl Figures {
    /// The figures about those of `all`, which is ordered by send time, that were sent in `time`.
    pub(super) fn of(flow: &ClassFlow, all: &[Datagram], time: Range<Duration>) -> Self {
        let from = all.partition_point(|sent| sent.at < time.start);
        let to = all.partition_point(|sent| sent.at < time.end);
        let selected = &all[from.min(to)..to];
        let mut rtts: Vec<Duration> = selected.iter().filter_map(|sent| sent.rtt).collect();
        rtts.sort_unstable();
        let at = |share: f64| {
            let index = ((rtts.len() as f64 * share) as usize).min(rtts.len().saturating_sub(1));
            rtts.get(index).map(|rtt| rtt.as_secs_f64() * 1e3)
        };
        let seconds = time.end.saturating_sub(time.start).as_secs_f64().max(0.001);
        Self {
            mbps: (rtts.len() * flow.payload_bytes) as f64 * 8e-6 / seconds,
            rtt_p50_ms: at(0.5),
            rtt_p99_ms: at(0.99),
            sent: selected.len(),
            lost: selected.len() - rtts.len(),
        }
    }
}

/// The running traffic of all classes; dropping it ends the traffic.
pub(super) struct Traffic {
    pub(super) start: Instant,
    records: Vec<Arc<Mutex<Vec<Datagram>>>>,
    stop: Arc<AtomicBool>,
    stop_sending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Traffic {
    /// Starts to send from the client to the server, through the tunnel, and back.
    pub(super) fn start(lab: &Lab) -> Result<Self, LabError> {
        let mut traffic = Self {
            start: Instant::now(),
            records: Vec::new(),
            stop: Arc::default(),
            stop_sending: Arc::default(),
            threads: Vec::new(),
        };
        for (port, flow) in (FIRST_PORT..).zip(FLOWS) {
            let echo_address = SocketAddr::new(TUNNEL_SERVER_V4.parse().map_err(parse_failed)?, port);
            let echo =
                lab.server().enter(|| open(echo_address, 0))?.map_err(LabError::io("open the echo"))?;
            let any = SocketAddr::from(([0, 0, 0, 0], 0));
            let client_socket =
                lab.client().enter(|| open(any, flow.dscp))?.map_err(LabError::io("open a socket"))?;
            client_socket.connect(echo_address).map_err(LabError::io("reach the echo"))?;
            traffic.start_flow(flow, client_socket, echo)?;
        }
        Ok(traffic)
    }

    fn start_flow(
        &mut self,
        flow: ClassFlow,
        client_socket: UdpSocket,
        echo: UdpSocket,
    ) -> Result<(), LabError> {
        let datagrams = Arc::new(Mutex::new(Vec::new()));
        let (start, socket) =
            (self.start, client_socket.try_clone().map_err(LabError::io("share a socket"))?);
        let (stop, stop_sending, sent) = (self.stop.clone(), self.stop_sending.clone(), datagrams.clone());
        self.spawn("send", move || {
            let mut buffer = vec![0; flow.payload_bytes];
            let mut due = start.elapsed();
            while !stop.load(Relaxed) && !stop_sending.load(Relaxed) {
                sleep(due.saturating_sub(start.elapsed()));
                // After a delay of this thread on a busy machine, the datagrams that are due follow at once.
                let at = start.elapsed();
                let number = {
                    let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
                    sent.push(Datagram { at, rtt: None });
                    sent.len() - 1
                };
                buffer[..NUMBER_LEN].copy_from_slice(&(number as u64).to_be_bytes());
                // A datagram that the kernel refuses counts as lost.
                let _ = socket.send(&buffer);
                due += flow.interval;
            }
        })?;
        let (stop, received) = (self.stop.clone(), datagrams.clone());
        self.spawn("receive", move || {
            let mut buffer = [0; 2048];
            while !stop.load(Relaxed) {
                let Ok(length) = client_socket.recv(&mut buffer) else { continue };
                let Some(number) = buffer[..length].first_chunk::<NUMBER_LEN>() else { continue };
                let (number, now) = (u64::from_be_bytes(*number) as usize, start.elapsed());
                let mut all = received.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(sent) = all.get_mut(number) {
                    sent.rtt.get_or_insert(now.saturating_sub(sent.at));
                }
            }
        })?;
        let stop = self.stop.clone();
        self.spawn("echo", move || {
            let mut buffer = [0; 2048];
            while !stop.load(Relaxed) {
                let Ok((length, from)) = echo.recv_from(&mut buffer) else { continue };
                let _ = echo.send_to(&buffer[..length], from);
            }
        })?;
        self.records.push(datagrams);
        Ok(())
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), LabError> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(LabError::io("start a thread"))?);
        Ok(())
    }

    /// Stops sending; datagrams in flight are still received.
    pub(super) fn stop_sending(&self) {
        self.stop_sending.store(true, Relaxed);
    }

    /// The records of all datagrams until now, in the order of [`FLOWS`].
    pub(super) fn records(&self) -> Vec<Vec<Datagram>> {
        self.records
            .iter()
            .map(|datagrams| datagrams.lock().unwrap_or_else(PoisonError::into_inner).clone())
            .collect()
    }

    /// The figures of each flow for the datagrams sent in `time`, in the order of [`FLOWS`].
    pub(super) fn figures(&self, time: Range<Duration>) -> Vec<Figures> {
        let of = |(flow, datagrams): (&ClassFlow, &Arc<Mutex<Vec<Datagram>>>)| {
            Figures::of(flow, &datagrams.lock().unwrap_or_else(PoisonError::into_inner), time.clone())
        };
        FLOWS.iter().zip(&self.records).map(of).collect()
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn parse_failed(error: std::net::AddrParseError) -> LabError {
    LabError::io("parse the server's address")(io::Error::other(error))
}

fn open(local: SocketAddr, dscp: u8) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)?;
    sockopt::set_ip_tos(&socket, dscp << 2)?;
    // Without privilege the buffer stays smaller, and datagrams may be lost on a busy machine.
    let _ = sockopt::set_socket_recv_buffer_size_force(&socket, RECV_BUFFER_BYTES);
    socket.set_read_timeout(Some(STOP_CHECK_INTERVAL))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_count_the_datagrams_sent_in_their_interval() {
        let ms = Duration::from_millis;
        let sent = |at: u64| Datagram { at: ms(at), rtt: (at % 10 != 9).then(|| ms(10 + at % 100)) };
        let all: Vec<Datagram> = (0..1000).map(sent).collect();
        let figures = Figures::of(&FLOWS[1], &all, ms(100)..ms(300));
        assert_eq!((figures.sent, figures.lost), (200, 20));
        assert_eq!((figures.rtt_p50_ms, figures.rtt_p99_ms), (Some(60.0), Some(108.0)));
        assert!((figures.mbps - 180.0 * 8e-3 / 0.2).abs() < 1e-9, "{}", figures.mbps);
        let none = Figures::of(&FLOWS[1], &all, ms(5000)..ms(6000));
        assert_eq!((none.sent, none.lost, none.rtt_p99_ms), (0, 0, None));
    }

    #[test]
    fn the_flows_have_their_documented_rates() {
        let rates = FLOWS.map(|flow| (flow.mbps() * 100.0).round() / 100.0);
        assert_eq!(rates, [0.16, 4.0, 12.0]);
    }
}
