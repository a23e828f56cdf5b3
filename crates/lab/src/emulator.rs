//! The thread that carries the frames of all emulated links of a lab.
//!
//! In: frames from TAP devices, and jobs that look at or change a link. Out: the same frames at the other end,
//! when [`Channel`] says so. Always holds: links are touched by this thread alone, so a job sees them at rest.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};

use crate::{
    emulation::Channel,
    error::LabError,
    shaper::UdpFlow,
    spec::LinkSpec,
    tap::{Carrier, ETHERNET_HEADER, Tap, VNET_HEADER},
};

/// Frames taken from one device before the others have their turn.
const FRAMES_A_TURN: usize = 64;
/// Shorter sleeps than this would cost more processor time than the precision is worth.
const SHORTEST_SLEEP: Duration = Duration::from_micros(40);
/// Buffers kept for the next frames.
const POOL: usize = 8192;
/// Room for a VLAN tag, which devices allow beyond their MTU.
const VLAN_TAG: usize = 4;

/// A frame with its virtio header.
struct Frame {
    buffer: Box<[u8]>,
    len: usize,
}

/// One emulated link, as the jobs see it.
pub(crate) struct Wire {
    client: Arc<Tap>,
    server: Arc<Tap>,
    up: Channel<Frame>,
    down: Channel<Frame>,
}

type Job = Box<dyn FnOnce(&mut [Wire]) + Send>;

/// The running thread; dropping it stops the thread and closes the devices.
pub(crate) struct Emulator {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A way to run jobs on the emulator's thread.
#[derive(Clone)]
pub(crate) struct Remote {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
}

impl Wire {
    /// Joins two devices by a link whose random draws follow from `seed`.
    pub(crate) fn new(client: Tap, server: Tap, spec: &LinkSpec, seed: u64) -> Self {
        let now = Instant::now();
        Self {
            client: Arc::new(client),
            server: Arc::new(server),
            up: Channel::new(spec.up.clone(), spec.count, seed.wrapping_mul(2), now),
            down: Channel::new(spec.down.clone(), spec.count, seed.wrapping_mul(2) + 1, now),
        }
    }

    /// Changes the settings of the direction from the client to the server.
    pub(crate) fn change_up(&mut self, change: impl FnOnce(&mut crate::ChannelParams)) {
        self.up.change(Instant::now(), change);
    }

    /// Changes the settings of the direction from the server to the client.
    pub(crate) fn change_down(&mut self, change: impl FnOnce(&mut crate::ChannelParams)) {
        self.down.change(Instant::now(), change);
    }

    /// Pulls the client's cable: the client sees it at once, the server does not.
    pub(crate) fn pull(&mut self) -> std::io::Result<()> {
        let now = Instant::now();
        self.up.cut(now);
        self.down.cut(now);
        self.client.set_carrier(Carrier::Off)
    }

    /// Makes both devices report that they are up: TAP devices say "unknown" until their carrier changes.
    pub(crate) fn toggle_carrier(&mut self) -> std::io::Result<()> {
        for tap in [&self.client, &self.server] {
            tap.set_carrier(Carrier::Off)?;
            tap.set_carrier(Carrier::On)?;
        }
        Ok(())
    }

    /// Plugs the client's cable in again.
    pub(crate) fn plug(&mut self) -> std::io::Result<()> {
        self.up.restore();
        self.down.restore();
        self.client.set_carrier(Carrier::On)
    }

    /// Whether the client's cable is pulled.
    pub(crate) fn is_pulled(&self) -> bool {
        self.up.is_cut()
    }

    /// Counters of both directions (up, down).
    pub(crate) fn stats(&self) -> crate::LinkStats {
        crate::LinkStats { up: self.up.counters(), down: self.down.counters() }
    }

    /// Histories of both directions.
    pub(crate) fn history(&self) -> crate::History {
        let ((start, up), (_, down)) = (self.up.history(), self.down.history());
        crate::History { start, up, down }
    }
}

impl Emulator {
    /// Starts the thread. `device_mtu` is the largest MTU of all devices, in bytes.
    pub(crate) fn start(wires: Vec<Wire>, device_mtu: u32) -> Result<Self, LabError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LabError::sys("make an eventfd"))?;
        let wake = Arc::new(wake);
        let (jobs, inbox) = mpsc::channel();
        let frame_bytes = VNET_HEADER + ETHERNET_HEADER + VLAN_TAG + device_mtu as usize;
        let thread = std::thread::Builder::new()
            .name("lab-emulator".to_owned())
            .spawn({
                let wake = Arc::clone(&wake);
                move || run(wires, &inbox, &wake, frame_bytes)
            })
            .map_err(LabError::io("start the emulator's thread"))?;
        Ok(Self { jobs, wake, thread: Some(thread) })
    }

    /// A handle for jobs.
    pub(crate) fn remote(&self) -> Remote {
        Remote { jobs: self.jobs.clone(), wake: Arc::clone(&self.wake) }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // Handles elsewhere keep their senders, so the end of the channel cannot be the sign to stop.
        let _ = rustix::io::write(&self.wake, &STOP.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The eventfd adds up what is written: jobs add 1 each, and never reach this.
const STOP: u64 = 1 << 40;

impl Remote {
    /// Runs `job` on link `index` between two frames, and waits for its answer.
    pub(crate) fn with<R: Send + 'static>(
        &self,
        index: usize,
        job: impl FnOnce(&mut Wire) -> R + Send + 'static,
    ) -> Result<R, LabError> {
        let (answer, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |wires| {
            if let Some(wire) = wires.get_mut(index) {
                // The asker waits below; if it has gone nobody misses the answer.
                let _ = answer.send(job(wire));
            }
        });
        self.jobs.send(job).map_err(|_| LabError::EmulatorStopped)?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map_err(LabError::sys("wake the emulator"))?;
        result.recv().map_err(|_| LabError::EmulatorStopped)
    }
}

fn run(mut wires: Vec<Wire>, inbox: &Receiver<Job>, wake: &OwnedFd, frame_bytes: usize) {
    // Timers fire when they are due instead of up to 50 µs later, and frames do not wait behind the programs
    // under test. A refusal costs precision only.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -15);

    let mut buffers = Buffers { free: Vec::new(), frame_bytes };
    let taps: Vec<Arc<Tap>> =
        wires.iter().flat_map(|wire| [Arc::clone(&wire.client), Arc::clone(&wire.server)]).collect();
    let mut fds: Vec<PollFd<'_>> = std::iter::once(wake.as_fd())
        .chain(taps.iter().map(|tap| tap.as_fd()))
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    loop {
        let sleep = next_sleep(&wires);
        match poll(&mut fds, sleep.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !fds[0].revents().is_empty() && do_jobs(&mut wires, inbox, wake) == After::Stop {
            return;
        }
        for (wire, fds) in wires.iter_mut().zip(fds[1..].chunks_exact_mut(2)) {
            for (from, to, channel, fd) in [
                (&wire.client, &wire.server, &mut wire.up, 0),
                (&wire.server, &wire.client, &mut wire.down, 1),
            ] {
                let fd = &mut fds[fd];
                if !fd.revents().is_empty() && take(from, to, channel, &mut buffers) == After::Stop {
                    // Poll would report a device that is gone for ever: watch for nothing in its place.
                    *fd = PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::empty());
                }
            }
        }
        let now = Instant::now();
        for wire in &mut wires {
            deliver(&mut wire.up, &wire.server, now, &mut buffers);
            deliver(&mut wire.down, &wire.client, now, &mut buffers);
        }
    }
}

/// Whether there is more to come from where something came from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    GoOn,
    Stop,
}

fn do_jobs(wires: &mut [Wire], inbox: &Receiver<Job>, wake: &OwnedFd) -> After {
    let mut count = [0; 8];
    let _ = rustix::io::read(wake, &mut count);
    while let Ok(job) = inbox.try_recv() {
        job(wires);
    }
    if u64::from_ne_bytes(count) >= STOP { After::Stop } else { After::GoOn }
}

/// Moves the frames that wait in `from` into `channel`, which leads to the device `to`.
fn take(from: &Tap, to: &Tap, channel: &mut Channel<Frame>, buffers: &mut Buffers) -> After {
    let now = Instant::now();
    for _ in 0..FRAMES_A_TURN {
        let mut buffer = buffers.take();
        let len = match from.read(&mut buffer) {
            Ok(len) => len,
            Err(error) => {
                buffers.give(buffer);
                let empty = error.kind() == std::io::ErrorKind::WouldBlock;
                return if empty { After::GoOn } else { After::Stop };
            }
        };
        let frame = Frame { buffer, len };
        let Some(ip_bytes) = len.checked_sub(VNET_HEADER + ETHERNET_HEADER) else {
            buffers.give(frame.buffer);
            continue;
        };
        if is_neighbour_discovery(&frame.buffer[VNET_HEADER..len]) && !channel.is_cut() {
            let _ = to.write(&frame.buffer[..len]);
            buffers.give(frame.buffer);
            continue;
        }
        let packet = &frame.buffer[VNET_HEADER + ETHERNET_HEADER..len];
        let params = channel.params();
        let matters = params.session_rate.is_some() || !params.port_loss.is_empty();
        let session = matters.then(|| UdpFlow::of_packet(packet)).flatten();
        channel.push_with_flow(now, session, ip_bytes as u32, frame);
    }
    After::GoOn
}

/// Whether an Ethernet frame only asks for, or tells, a hardware address (ARP, RFC 826; RFC 4861 section 4).
///
/// These pass at once: where a real link loses packets silently, that happens behind the modem, and the hop
/// to the modem stays as it is. Otherwise a silent loss would be announced by failing neighbours.
fn is_neighbour_discovery(frame: &[u8]) -> bool {
    const ARP: [u8; 2] = [0x08, 0x06];
    const IPV6: [u8; 2] = [0x86, 0xdd];
    const ICMPV6: u8 = 58;
    match frame.get(12..14) {
        Some(kind) if kind == ARP => true,
        Some(kind) if kind == IPV6 => {
            frame.get(20) == Some(&ICMPV6) && frame.get(54).is_some_and(|kind| (133..=137).contains(kind))
        }
        _ => false,
    }
}

/// Hands all frames of `channel` whose time has come to `tap`.
fn deliver(channel: &mut Channel<Frame>, tap: &Tap, now: Instant, buffers: &mut Buffers) {
    while let Some(frame) = channel.pop(now) {
        // A device that is administratively down takes nothing, as a real one.
        let _ = tap.write(&frame.buffer[..frame.len]);
        buffers.give(frame.buffer);
    }
    for frame in channel.discarded() {
        buffers.give(frame.buffer);
    }
}

/// How long nothing is due; `None` when only a frame or a job can bring work.
fn next_sleep(wires: &[Wire]) -> Option<Timespec> {
    let next = wires.iter().flat_map(|wire| [wire.up.next_wake(), wire.down.next_wake()]).flatten().min()?;
    let wait = next.saturating_duration_since(Instant::now());
    let wait = if wait.is_zero() { wait } else { wait.max(SHORTEST_SLEEP) };
    Some(Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) })
}

/// Frame buffers that go round, so that carrying a frame allocates nothing.
struct Buffers {
    free: Vec<Box<[u8]>>,
    frame_bytes: usize,
}

impl Buffers {
    fn take(&mut self) -> Box<[u8]> {
        self.free.pop().unwrap_or_else(|| vec![0; self.frame_bytes].into_boxed_slice())
    }

    fn give(&mut self, buffer: Box<[u8]>) {
        if self.free.len() < POOL {
            self.free.push(buffer);
        }
    }
}
