//! The thread that carries the frames of all emulated links of a lab.
//!
//! In: frames from TAP devices, and jobs that read or change a link. Out: the same frames at the other
//! device, at the time that [`Channel`] determines. Always holds: only this thread accesses the links, so a
//! job runs between two frames.

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
    tap::{Carrier, ETHERNET_HEADER_LEN, Tap, VNET_HEADER_LEN},
};

/// Frames read from one device before the other devices are served. With more, a busy link delays the others;
/// with fewer, the thread polls more often.
const MAX_FRAMES_PER_DEVICE: usize = 64;
/// Shortest sleep of the thread. A shorter one costs processor time for wake-ups; a longer one delivers
/// frames late by up to this time. Chosen (`docs/design/lab.md`, open questions).
const MIN_SLEEP: Duration = Duration::from_micros(40);
/// Unused frame buffers that are kept, at most: 13 MB of frames of 1500 bytes. More retain memory after a
/// burst; with fewer, bursts allocate.
const MAX_FREE_BUFFERS: usize = 8192;
/// Bytes of a VLAN tag (IEEE 802.1Q), which devices accept beyond their MTU.
const VLAN_TAG_LEN: usize = 4;

/// An Ethernet frame behind its virtio-net header.
struct Frame {
    buffer: Box<[u8]>,
    len: usize,
}

/// One emulated link: two TAP devices and both directions between them.
pub(crate) struct EmulatedLink {
    client: Arc<Tap>,
    server: Arc<Tap>,
    up: Channel<Frame>,
    down: Channel<Frame>,
}

type Job = Box<dyn FnOnce(&mut [EmulatedLink]) + Send>;

/// The running thread; dropping this value stops the thread and closes the devices.
pub(crate) struct Emulator {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A handle that runs jobs on the emulator's thread.
#[derive(Clone)]
pub(crate) struct EmulatorHandle {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
}

impl EmulatedLink {
    /// A link between two devices. `seed` determines its random draws.
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

    /// Cuts both directions and removes the carrier of the client's device; the server's device keeps its
    /// carrier.
    pub(crate) fn pull(&mut self) -> std::io::Result<()> {
        let now = Instant::now();
        self.up.cut(now);
        self.down.cut(now);
        self.client.set_carrier(Carrier::Off)
    }

    /// Makes both devices report the operational state "up": that of a TAP device is "unknown" until its
    /// carrier changes.
    pub(crate) fn toggle_carrier(&mut self) -> std::io::Result<()> {
        for tap in [&self.client, &self.server] {
            tap.set_carrier(Carrier::Off)?;
            tap.set_carrier(Carrier::On)?;
        }
        Ok(())
    }

    /// Ends the cut and restores the carrier of the client's device.
    pub(crate) fn plug(&mut self) -> std::io::Result<()> {
        self.up.restore();
        self.down.restore();
        self.client.set_carrier(Carrier::On)
    }

    /// Whether the link is cut.
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
    pub(crate) fn start(links: Vec<EmulatedLink>, device_mtu: u32) -> Result<Self, LabError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LabError::sys("make an eventfd"))?;
        let wake = Arc::new(wake);
        let (jobs, inbox) = mpsc::channel();
        let frame_bytes = VNET_HEADER_LEN + ETHERNET_HEADER_LEN + VLAN_TAG_LEN + device_mtu as usize;
        let thread = std::thread::Builder::new()
            .name("lab-emulator".to_owned())
            .spawn({
                let wake = Arc::clone(&wake);
                move || run(links, &inbox, &wake, frame_bytes)
            })
            .map_err(LabError::io("start the emulator's thread"))?;
        Ok(Self { jobs, wake, thread: Some(thread) })
    }

    /// A handle for jobs.
    pub(crate) fn handle(&self) -> EmulatorHandle {
        EmulatorHandle { jobs: self.jobs.clone(), wake: Arc::clone(&self.wake) }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // Handles keep senders of the job channel, so its end cannot tell the thread to stop.
        let _ = rustix::io::write(&self.wake, &STOP.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The nice value of the emulator's thread: before the programs under test (0), and not the highest priority,
/// so that the machine stays usable.
const NICE: i32 = -15;

/// The value that tells the thread to stop. The eventfd adds up the written values; jobs add 1 each and never
/// reach this.
const STOP: u64 = 1 << 40;

impl EmulatorHandle {
    /// Runs `job` on link `index` between two frames, and waits for its result.
    pub(crate) fn with<R: Send + 'static>(
        &self,
        index: usize,
        job: impl FnOnce(&mut EmulatedLink) -> R + Send + 'static,
    ) -> Result<R, LabError> {
        let (answer, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |links| {
            if let Some(link) = links.get_mut(index) {
                // The caller waits below; if it has ended, the result is not needed.
                let _ = answer.send(job(link));
            }
        });
        self.jobs.send(job).map_err(|_| LabError::EmulatorStopped)?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map_err(LabError::sys("wake the emulator"))?;
        result.recv().map_err(|_| LabError::EmulatorStopped)
    }
}

fn run(mut links: Vec<EmulatedLink>, inbox: &Receiver<Job>, wake: &OwnedFd, frame_bytes: usize) {
    // Without timer slack timers fire when they are due instead of up to 50 µs later; with a high priority
    // frames do not wait for the programs under test. If the kernel refuses, only precision is lost.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);

    let mut buffers = BufferPool { free: Vec::new(), frame_bytes };
    let taps: Vec<Arc<Tap>> =
        links.iter().flat_map(|link| [Arc::clone(&link.client), Arc::clone(&link.server)]).collect();
    let mut fds: Vec<PollFd<'_>> = std::iter::once(wake.as_fd())
        .chain(taps.iter().map(|tap| tap.as_fd()))
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    loop {
        let sleep = next_sleep(&links);
        match poll(&mut fds, sleep.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !fds[0].revents().is_empty() && run_jobs(&mut links, inbox, wake) == Next::Stop {
            return;
        }
        for (link, fds) in links.iter_mut().zip(fds[1..].chunks_exact_mut(2)) {
            for (from, to, channel, fd) in [
                (&link.client, &link.server, &mut link.up, 0),
                (&link.server, &link.client, &mut link.down, 1),
            ] {
                let fd = &mut fds[fd];
                if !fd.revents().is_empty() && read_frames(from, to, channel, &mut buffers) == Next::Stop {
                    // poll(2) would report a removed device in every call: watch for nothing in its place.
                    *fd = PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::empty());
                }
            }
        }
        let now = Instant::now();
        for link in &mut links {
            deliver(&mut link.up, &link.server, now, &mut buffers);
            deliver(&mut link.down, &link.client, now, &mut buffers);
        }
    }
}

/// Whether to continue with a source of frames or jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

fn run_jobs(links: &mut [EmulatedLink], inbox: &Receiver<Job>, wake: &OwnedFd) -> Next {
    let mut count = [0; 8];
    let _ = rustix::io::read(wake, &mut count);
    while let Ok(job) = inbox.try_recv() {
        job(links);
    }
    if u64::from_ne_bytes(count) >= STOP { Next::Stop } else { Next::Continue }
}

/// Reads the frames that wait in `from` and pushes them into `channel`, which leads to the device `to`.
fn read_frames(from: &Tap, to: &Tap, channel: &mut Channel<Frame>, buffers: &mut BufferPool) -> Next {
    let now = Instant::now();
    for _ in 0..MAX_FRAMES_PER_DEVICE {
        let mut buffer = buffers.take();
        let len = match from.read(&mut buffer) {
            Ok(len) => len,
            Err(error) => {
                buffers.give(buffer);
                let empty = error.kind() == std::io::ErrorKind::WouldBlock;
                return if empty { Next::Continue } else { Next::Stop };
            }
        };
        let frame = Frame { buffer, len };
        let Some(ip_bytes) = len.checked_sub(VNET_HEADER_LEN + ETHERNET_HEADER_LEN) else {
            buffers.give(frame.buffer);
            continue;
        };
        if is_neighbour_discovery(&frame.buffer[VNET_HEADER_LEN..len]) && !channel.is_cut() {
            let _ = to.write(&frame.buffer[..len]);
            buffers.give(frame.buffer);
            continue;
        }
        let packet = &frame.buffer[VNET_HEADER_LEN + ETHERNET_HEADER_LEN..len];
        let params = channel.params();
        let needs_flow = params.session_rate.is_some() || !params.port_loss.is_empty();
        let flow = needs_flow.then(|| UdpFlow::of_packet(packet)).flatten();
        channel.push_with_flow(now, flow, ip_bytes as u32, frame);
    }
    Next::Continue
}

/// Whether an Ethernet frame belongs to neighbour discovery (ARP, RFC 826; RFC 4861 section 4).
///
/// Such frames bypass the emulation: a real link that loses packets silently loses them behind the modem, and
/// the hop to the modem keeps working. With the loss applied to them, failing neighbour resolution would
/// reveal it to the client.
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

/// Writes all frames of `channel` that are due to `tap`.
fn deliver(channel: &mut Channel<Frame>, tap: &Tap, now: Instant, buffers: &mut BufferPool) {
    while let Some(frame) = channel.pop(now) {
        // A device that is administratively down refuses frames, as a real one does.
        let _ = tap.write(&frame.buffer[..frame.len]);
        buffers.give(frame.buffer);
    }
    for frame in channel.discarded() {
        buffers.give(frame.buffer);
    }
}

/// Time until the next frame is due; `None` if no frame is queued or in flight.
fn next_sleep(links: &[EmulatedLink]) -> Option<Timespec> {
    let next = links.iter().flat_map(|link| [link.up.next_wake(), link.down.next_wake()]).flatten().min()?;
    let wait = next.saturating_duration_since(Instant::now());
    let wait = if wait.is_zero() { wait } else { wait.max(MIN_SLEEP) };
    Some(Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) })
}

/// Frame buffers that are reused, so that forwarding a frame does not allocate.
struct BufferPool {
    free: Vec<Box<[u8]>>,
    frame_bytes: usize,
}

impl BufferPool {
    fn take(&mut self) -> Box<[u8]> {
        self.free.pop().unwrap_or_else(|| vec![0; self.frame_bytes].into_boxed_slice())
    }

    fn give(&mut self, buffer: Box<[u8]>) {
        if self.free.len() < MAX_FREE_BUFFERS {
            self.free.push(buffer);
        }
    }
}
