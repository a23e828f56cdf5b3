//! Small datagrams there and back through the tunnel, each of which is accounted for.

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

use rustix::net::sockopt;

use crate::{error::LabError, lab::Lab, vpn::TUNNEL_SERVER_V4};

/// The echoes listen on this port and those after it.
const FIRST_PORT: u16 = 7001;
/// Datagrams wait here when this machine is busy, instead of being lost where nobody means it (bytes).
const BUFFER: usize = 4 << 20;
/// How often a thread that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);
/// The number of a datagram, in front.
const NUMBER: usize = 8;

/// What a class is given to carry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// The class to which the client's own rules give this mark.
    pub(super) class: &'static str,
    dscp: u8,
    /// Bytes of payload.
    size: usize,
    every: Duration,
}

/// One for each class that is there from the start.
pub(super) const LOADS: [Load; 3] = [
    // EF: two calls.
    Load { class: "critical", dscp: 46, size: 200, every: Duration::from_millis(10) },
    Load { class: "default", dscp: 0, size: 1000, every: Duration::from_millis(2) },
    // LE.
    Load { class: "bulk", dscp: 1, size: 1200, every: Duration::from_micros(800) },
];

impl Load {
    /// What is sent, in Mbit/s of payload.
    pub(super) fn mbps(&self) -> f64 {
        self.size as f64 * 8e-6 / self.every.as_secs_f64()
    }
}

/// One datagram: when it was sent, since the start, and how long it took there and back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sent {
    pub(super) at: Duration,
    pub(super) rtt: Option<Duration>,
}

/// What became of the datagrams that were sent in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Figures {
    /// Payload that came back.
    pub(super) mbps: f64,
    /// Half of the round trips were shorter, of those that ended.
    pub(super) rtt_p50_ms: Option<f64>,
    /// 99 % of them were shorter.
    pub(super) rtt_p99_ms: Option<f64>,
    pub(super) sent: usize,
    pub(super) lost: usize,
}

impl Figures {
    /// Of `all`, in the order in which they were sent, those that were sent in `time`.
    pub(super) fn of(load: &Load, all: &[Sent], time: Range<Duration>) -> Self {
        let from = all.partition_point(|sent| sent.at < time.start);
        let to = all.partition_point(|sent| sent.at < time.end);
        let some = &all[from.min(to)..to];
        let mut rtts: Vec<Duration> = some.iter().filter_map(|sent| sent.rtt).collect();
        rtts.sort_unstable();
        let at = |share: f64| {
            let index = ((rtts.len() as f64 * share) as usize).min(rtts.len().saturating_sub(1));
            rtts.get(index).map(|rtt| rtt.as_secs_f64() * 1e3)
        };
        let seconds = time.end.saturating_sub(time.start).as_secs_f64().max(0.001);
        Self {
            mbps: (rtts.len() * load.size) as f64 * 8e-6 / seconds,
            rtt_p50_ms: at(0.5),
            rtt_p99_ms: at(0.99),
            sent: some.len(),
            lost: some.len() - rtts.len(),
        }
    }
}

/// The traffic of all classes; it ends when this is dropped.
pub(super) struct Traffic {
    pub(super) start: Instant,
    records: Vec<Arc<Mutex<Vec<Sent>>>>,
    stop: Arc<AtomicBool>,
    quiet: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Traffic {
    /// Starts to send from the client to the server, through the tunnel, and back.
    pub(super) fn start(lab: &Lab) -> Result<Self, LabError> {
        let mut traffic = Self {
            start: Instant::now(),
            records: Vec::new(),
            stop: Arc::default(),
            quiet: Arc::default(),
            threads: Vec::new(),
        };
        for (port, load) in (FIRST_PORT..).zip(LOADS) {
            let far = SocketAddr::new(TUNNEL_SERVER_V4.parse().map_err(address)?, port);
            let echo = lab.server().enter(|| open(far, 0))?.map_err(LabError::io("open the echo"))?;
            let any = SocketAddr::from(([0, 0, 0, 0], 0));
            let near = lab.client().enter(|| open(any, load.dscp))?.map_err(LabError::io("open a socket"))?;
            near.connect(far).map_err(LabError::io("reach the echo"))?;
            traffic.carry(load, near, echo)?;
        }
        Ok(traffic)
    }

    fn carry(&mut self, load: Load, near: UdpSocket, echo: UdpSocket) -> Result<(), LabError> {
        let record = Arc::new(Mutex::new(Vec::new()));
        let (start, socket) = (self.start, near.try_clone().map_err(LabError::io("share a socket"))?);
        let (stop, quiet, sent) = (self.stop.clone(), self.quiet.clone(), record.clone());
        self.spawn("send", move || {
            let mut buffer = vec![0; load.size];
            let mut due = start.elapsed();
            while !stop.load(Relaxed) && !quiet.load(Relaxed) {
                sleep(due.saturating_sub(start.elapsed()));
                // What could not be sent in time, this machine being busy, follows at once.
                let at = start.elapsed();
                let number = {
                    let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
                    sent.push(Sent { at, rtt: None });
                    sent.len() - 1
                };
                buffer[..NUMBER].copy_from_slice(&(number as u64).to_be_bytes());
                // What the kernel refuses is lost.
                let _ = socket.send(&buffer);
                due += load.every;
            }
        })?;
        let (stop, received) = (self.stop.clone(), record.clone());
        self.spawn("receive", move || {
            let mut buffer = [0; 2048];
            while !stop.load(Relaxed) {
                let Ok(length) = near.recv(&mut buffer) else { continue };
                let Some(number) = buffer[..length].first_chunk::<NUMBER>() else { continue };
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
        self.records.push(record);
        Ok(())
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), LabError> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(LabError::io("start a thread"))?);
        Ok(())
    }

    /// Sends no more; what is on the way still arrives.
    pub(super) fn quiet(&self) {
        self.quiet.store(true, Relaxed);
    }

    /// What became of everything until now, class by class in the order of [`LOADS`].
    pub(super) fn records(&self) -> Vec<Vec<Sent>> {
        self.records
            .iter()
            .map(|record| record.lock().unwrap_or_else(PoisonError::into_inner).clone())
            .collect()
    }

    /// What became of what was sent in this time.
    pub(super) fn figures(&self, time: Range<Duration>) -> Vec<Figures> {
        let of = |(load, record): (&Load, &Arc<Mutex<Vec<Sent>>>)| {
            Figures::of(load, &record.lock().unwrap_or_else(PoisonError::into_inner), time.clone())
        };
        LOADS.iter().zip(&self.records).map(of).collect()
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

fn address(error: std::net::AddrParseError) -> LabError {
    LabError::io("read the server's address")(io::Error::other(error))
}

fn open(local: SocketAddr, dscp: u8) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)?;
    sockopt::set_ip_tos(&socket, dscp << 2)?;
    // A machine that grants less may lose some when it is busy.
    let _ = sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER);
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_what_was_sent_in_their_time() {
        let ms = Duration::from_millis;
        let sent = |at: u64| Sent { at: ms(at), rtt: (at % 10 != 9).then(|| ms(10 + at % 100)) };
        let all: Vec<Sent> = (0..1000).map(sent).collect();
        let figures = Figures::of(&LOADS[1], &all, ms(100)..ms(300));
        assert_eq!((figures.sent, figures.lost), (200, 20));
        assert_eq!((figures.rtt_p50_ms, figures.rtt_p99_ms), (Some(60.0), Some(108.0)));
        assert!((figures.mbps - 180.0 * 8e-3 / 0.2).abs() < 1e-9, "{}", figures.mbps);
        let none = Figures::of(&LOADS[1], &all, ms(5000)..ms(6000));
        assert_eq!((none.sent, none.lost, none.rtt_p99_ms), (0, 0, None));
    }

    #[test]
    fn the_loads_are_what_they_are_said_to_be() {
        let rates = LOADS.map(|load| (load.mbps() * 100.0).round() / 100.0);
        assert_eq!(rates, [0.16, 4.0, 12.0]);
    }
}
