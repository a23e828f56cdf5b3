//! A client inside an app: its own thread, controlled from any other thread.
//!
//! In: a configuration, packets of the app, commands. Out: packets for the app, events, the status. Always
//! holds: nothing on the machine changes, no signal handler is installed, and when [`Tunnel::stop`] returns,
//! the thread and its descriptors are gone.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    thread::{self, JoinHandle, ThreadId},
    time::Instant,
};

use ipnet::IpNet;
use mpvpn_config::{ClientConfig, ClientOptions, ConfigSource, LinkConfig};
use mpvpn_error::RunError;
use mpvpn_identity::tls::LastRefusal;
use mpvpn_links::{GivenLink, LinkSocketOptions};
use mpvpn_names::lookup::Resolve;
use mpvpn_os::{
    PacketFd,
    poll::{PollWaker, reduce_timer_slack},
};
use mpvpn_sockets::bind_options::Protect;
use mpvpn_status::Status;
use mpvpn_threads::{
    event_loop::EventLoop,
    slow_thread::{Services, SlowThread},
};
use mpvpn_tunnel::Assignment;
use mpvpn_types::{Duration, Transport, catch_panic};

pub use super::device::Out;
use super::{
    ClientKind, ClientParts, Running,
    device::{AppDevice, AppPackets, Device},
    refusal,
    servers::Credentials,
};

/// Packets of the app queued to the thread. More: old packets. Fewer: losses in bursts. Chosen.
const MAX_QUEUED_PACKETS: usize = 1024;
/// The largest packet of an app (bytes).
const MAX_PACKET_BYTES: usize = 65_535;
/// How long [`Tunnel::status`] waits. Longer: the caller hangs if the thread is stalled. Chosen.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// How the app exchanges packets with the tunnel.
pub enum Packets {
    /// A descriptor with one packet per read and write. It becomes nonblocking.
    Descriptor(OwnedFd),
    /// [`Tunnel::push`] for packets of the app, and this function for packets to the app. The tunnel's thread
    /// calls it, so it must not block.
    Calls(Out),
    /// A descriptor that [`Tunnel::set_descriptor`] provides later, because some systems need the addresses
    /// first.
    Later,
}

/// An event, reported by the tunnel's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The tunnel works with this configuration, or its configuration has changed.
    Up(Network),
    /// The connection is lost, for this reason; the client reconnects by itself.
    Down(String),
    /// The client has ended by itself, for this reason.
    Failed(String),
}

/// The configuration of the app's network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// The interface's addresses, with prefix lengths.
    pub addresses: Vec<IpNet>,
    /// The destinations that the server routes.
    pub routes: Vec<IpNet>,
    /// The MTU (bytes).
    pub mtu: u32,
}

/// The parts that an app provides to start a client.
pub struct App {
    /// The configuration.
    pub options: ClientOptions,
    /// How packets are exchanged.
    pub packets: Packets,
    /// Called with each event; it must not block.
    pub events: Box<dyn FnMut(Event) + Send>,
    /// Called with each socket before its first use.
    pub protect: Option<Protect>,
    /// Resolves the server's name; `None` uses the system's resolver.
    pub resolve: Option<Resolve>,
    /// The links; `None` lists the kernel's interfaces.
    pub links: Option<Vec<GivenLink>>,
    /// The log of the tunnel's thread; `None` uses the process's.
    pub log: Option<tracing::Dispatch>,
}

/// A command of the app.
enum AppCommand {
    Stop,
    Rescan,
    Links(Vec<GivenLink>),
    Descriptor(PacketFd),
    Status(SyncSender<Status>),
}

/// The tunnel's thread's connection to the app.
pub(super) struct AppHost {
    commands: Receiver<AppCommand>,
    events: Box<dyn FnMut(Event) + Send>,
    pub(super) assignment: Option<Assignment>,
    reported: Option<Network>,
}

impl AppHost {
    /// Reports the configuration of the interface once there are addresses, and whenever it changes. `mtu` is
    /// in bytes.
    pub(super) fn configure(&mut self, mtu: u32) {
        let Some(assignment) = &self.assignment else { return };
        let network = Network {
            addresses: assignment.addresses.clone(),
            routes: assignment.routes.iter().flat_map(|range| range.to_nets()).collect(),
            mtu,
        };
        if self.reported.as_ref() != Some(&network) {
            self.reported = Some(network.clone());
            (self.events)(Event::Up(network));
        }
    }

    /// Takes the event function; this value reports nothing any more.
    fn take_events(&mut self) -> Box<dyn FnMut(Event) + Send> {
        std::mem::replace(&mut self.events, Box::new(drop))
    }

    /// Reports that the connection is lost.
    pub(super) fn report_down(&mut self, reason: String) {
        (self.reported, self.assignment) = (None, None);
        (self.events)(Event::Down(reason));
    }
}

/// A running tunnel, for any thread. Dropping it stops it.
pub struct Tunnel {
    commands: Sender<AppCommand>,
    packets: Option<SyncSender<Vec<u8>>>,
    wake: PollWaker,
    id: ThreadId,
    thread: Option<JoinHandle<()>>,
}

/// Starts a client, and returns when its thread runs; it connects after that.
///
/// # Errors
/// If the configuration is not usable, or the system refuses something.
pub fn start(app: App) -> Result<Tunnel, RunError> {
    let (commands, command_receiver) = channel();
    let (sender, packets) = sync_channel(MAX_QUEUED_PACKETS);
    let (ready, started) = sync_channel(1);
    let uses_callback = matches!(app.packets, Packets::Calls(_));
    let work = move || {
        let log = app.log.clone();
        let body = || run_thread(app, command_receiver, packets, &ready);
        match log {
            Some(log) => tracing::dispatcher::with_default(&log, body),
            None => body(),
        }
    };
    let thread = thread::Builder::new().name("mpvpn".to_owned()).spawn(work);
    let thread = thread.map_err(RunError::io("start a thread"))?;
    let id = thread.thread().id();
    let wake = started.recv().unwrap_or_else(|_| {
        let panic = std::io::Error::other("it panicked");
        Err(RunError::io("start the tunnel's thread")(panic))
    });
    match wake {
        Ok(wake) => {
            let packets = uses_callback.then_some(sender);
            Ok(Tunnel { commands, packets, wake, id, thread: Some(thread) })
        }
        Err(error) => {
            // A panic was logged when it happened.
            let _ = thread.join();
            Err(error)
        }
    }
}

/// The main function of the tunnel's thread.
fn run_thread(
    app: App,
    commands: Receiver<AppCommand>,
    packets: Receiver<Vec<u8>>,
    ready: &SyncSender<Result<PollWaker, RunError>>,
) {
    let refusal_slot = LastRefusal::default();
    let (mut running, mut event_loop) = match set_up(app, commands, packets, &refusal_slot) {
        Ok(both) => both,
        // `start` waits for this result.
        Err(error) => return drop(ready.send(Err(error))),
    };
    let _ = ready.send(Ok(event_loop.wake.clone()));
    let result = catch_panic(|| running.run(&mut event_loop));
    let events = match &mut running.kind {
        ClientKind::Embedded(host) => Some(host.take_events()),
        ClientKind::Machine(_) | ClientKind::Proxy(_) => None,
    };
    let ended = catch_panic(|| running.end(true));
    let ran = match (result, ended) {
        (Ok(ran), Ok(ended)) => ran.map_err(|error| refusal(error, &refusal_slot)).and(ended),
        (Err(reason), _) | (_, Err(reason)) => {
            let reason = std::io::Error::other(format!("it panicked: {reason}"));
            Err(RunError::io("go on")(reason))
        }
    };
    if let (Err(error), Some(mut events)) = (ran, events) {
        events(Event::Failed(error.to_string()));
    }
}

fn set_up(
    app: App,
    commands: Receiver<AppCommand>,
    packets: Receiver<Vec<u8>>,
    refusal_slot: &LastRefusal,
) -> Result<(Running, EventLoop), RunError> {
    reduce_timer_slack();
    let event_loop = EventLoop::without_signals()?;
    let origin = ConfigSource::of_app(app.options.clone());
    let config = origin.load()?;
    let device = match app.packets {
        Packets::Descriptor(fd) => AppDevice::descriptor(PacketFd::new(fd)?),
        Packets::Calls(out) => AppDevice::new(AppPackets::Callback { packets, out }),
        Packets::Later => AppDevice::new(AppPackets::NotConnected),
    };
    let slow = start_slow_thread(&config, app.options.api_socket.as_ref(), app.resolve, &event_loop)?;
    let socket_options =
        LinkSocketOptions { protect: app.protect, given: app.links, ..LinkSocketOptions::default() };
    let host = AppHost { commands, events: app.events, assignment: None, reported: None };
    let parts = ClientParts {
        kind: ClientKind::Embedded(host),
        queues: vec![Device::App(device).into()],
        socket_options,
        state_dir: app.options.state_dir,
        credentials: Credentials::load(&config, refusal_slot)?,
    };
    let running = Running::new((config, origin), &event_loop, parts, slow)?;
    Ok((running, event_loop))
}

/// Starts the slow thread if the configuration needs it: for the local API, metrics, name resolution, or TCP.
fn start_slow_thread(
    config: &ClientConfig,
    api_socket: Option<&PathBuf>,
    resolve: Option<Resolve>,
    event_loop: &EventLoop,
) -> Result<SlowThread, RunError> {
    let default_link = config.links.iter().find(|link| link.name == "*");
    let is_quic = |link: &LinkConfig| link.transport == Some(Transport::Quic);
    let no_tcp = default_link.is_some() && config.links.iter().all(is_quic);
    if api_socket.is_none() && config.metrics.is_none() && config.server.ip().is_some() && no_tcp {
        return Ok(SlowThread::disabled());
    }
    let api = api_socket.map(|path| mpvpn_api::Server::bind(path)).transpose()?;
    let metrics = config.metrics.map(|address| mpvpn_api::metrics::Server::bind(address, 0)).transpose()?;
    SlowThread::start(Services { api, metrics, ..Services::default() }, resolve, event_loop.wake.clone())
}

impl Running {
    /// Runs the app's commands. Returns whether the client must end.
    pub(super) fn run_app_commands(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
    ) -> Result<bool, RunError> {
        loop {
            let ClientKind::Embedded(host) = &self.kind else { return Ok(false) };
            match host.commands.try_recv() {
                Err(TryRecvError::Empty) => return Ok(false),
                // Without the handle nobody could stop the client any more.
                Ok(AppCommand::Stop) | Err(TryRecvError::Disconnected) => return Ok(true),
                Ok(AppCommand::Rescan) => self.data_plane.rescan(event_loop, now, &mut |_| {})?,
                Ok(AppCommand::Links(given)) => {
                    self.data_plane.sockets.links.set_app_links(&event_loop.poller, given)?;
                    self.data_plane.rescan(event_loop, now, &mut |_| {})?;
                }
                Ok(AppCommand::Descriptor(fd)) => self.data_plane.set_descriptor(event_loop, fd)?,
                Ok(AppCommand::Status(reply)) => {
                    // The caller may have given up.
                    let _ = reply.try_send(self.status(now));
                }
            }
        }
    }
}

impl Tunnel {
    /// Sends one packet of the app into the tunnel, from any thread, without blocking. Returns `false` if the
    /// queue is full (1024 packets), the packet is too large, the tunnel has ended, or packets come by a
    /// descriptor. Without a connection, packets are accepted and lost.
    pub fn push(&self, packet: &[u8]) -> bool {
        let Some(packets) = self.packets.as_ref().filter(|_| packet.len() <= MAX_PACKET_BYTES) else {
            return false;
        };
        let taken = packets.try_send(packet.to_vec()).is_ok();
        self.wake.wake();
        taken
    }

    /// Reads the links and their addresses from the kernel again. Linux reports changes by itself, so this is
    /// for systems that do not. An app that provides the links calls [`Self::set_links`] instead.
    pub fn network_changed(&self) {
        self.command(AppCommand::Rescan);
    }

    /// Replaces the list of links, and the kernel as their source if necessary. A link that stays with the
    /// same address keeps its socket.
    pub fn set_links(&self, links: Vec<GivenLink>) {
        self.command(AppCommand::Links(links));
    }

    /// Uses this descriptor for packets from now on, in both directions; see [`Packets::Descriptor`]. A
    /// previous descriptor is closed.
    ///
    /// # Errors
    /// If it cannot carry packets.
    pub fn set_descriptor(&self, packets: OwnedFd) -> Result<(), RunError> {
        self.command(AppCommand::Descriptor(PacketFd::new(packets)?));
        Ok(())
    }

    /// The status, as of `mpvpn status`; `None` if the tunnel has ended, or in a callback of its own thread.
    pub fn status(&self) -> Option<Status> {
        if thread::current().id() == self.id {
            return None;
        }
        let (reply, answer) = sync_channel(1);
        self.command(AppCommand::Status(reply));
        answer.recv_timeout(STATUS_TIMEOUT).ok()
    }

    /// The same in JSON, as of `mpvpn status --json`.
    pub fn status_json(&self) -> Option<String> {
        serde_json::to_string(&self.status()?).ok()
    }

    /// Whether the tunnel has not ended by itself.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Closes the connection and waits until the tunnel's threads have ended: no callback is called after
    /// this. Called from a callback, it returns at once, and the tunnel ends after that callback.
    pub fn stop(self) {
        drop(self);
    }

    fn command(&self, command: AppCommand) {
        // A thread that has ended takes no commands.
        let _ = self.commands.send(command);
        self.wake.wake();
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.command(AppCommand::Stop);
        let Some(thread) = self.thread.take() else { return };
        if thread::current().id() != self.id {
            // A panic was reported as an event.
            let _ = thread.join();
        }
    }
}
