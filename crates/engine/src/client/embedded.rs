//! A client inside an app: a thread of its own, which the app tells what to do from any other.
//!
//! In: a configuration, packets of the app, orders. Out: packets for the app, events, the status. Always holds: nothing is
//! changed on the machine, no signal is taken over, and when [`Handle::stop`] returns the thread and all its descriptors
//! are gone.

use std::{
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::{self, JoinHandle, ThreadId},
    time::Instant,
};

use ipnet::IpNet;
use mpvpn_control::{
    api,
    config::{ClientConfig, ClientOptions, ConfigSource, LinkConfig},
    metrics,
    status::Status,
    tls::{self, LastRefusal},
};
use mpvpn_os::{
    PacketFd,
    poll::{PollWaker, reduce_timer_slack},
};
use mpvpn_tunnel::Assignment;
use mpvpn_types::{Duration, Transport, panic_text};

pub use super::device::Out;
use super::{
    ClientKind, ClientParts, Running,
    device::{AppDevice, Device},
    refusal,
};
use crate::{
    EngineError,
    links::{GivenLink, Ground, Protect},
    slow::{Offers, Resolve, Slow},
    turn::Turns,
};

/// Packets of the app that may wait for the thread.
const WAITING: usize = 1024;
/// The largest packet of an app (bytes).
const LARGEST: usize = 65_535;
/// How long the thread may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// How packets come and go.
pub enum Packets {
    /// One packet a read and a write. The descriptor becomes nonblocking.
    Descriptor(OwnedFd),
    /// By [`Handle::push`], and by this function, which the tunnel's thread calls and which must not wait.
    Calls(Out),
    /// By a descriptor that [`Handle::set_descriptor`] brings, as there may be none before the addresses are known.
    Later,
}

/// What happens, told by the tunnel's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The tunnel works, with these addresses, or has got others.
    Up(Network),
    /// The connection is lost, for this reason; another is made by itself.
    Down(String),
    /// The tunnel has ended by itself, for this reason.
    Failed(String),
}

/// What the interface that has the packets needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its addresses, with the lengths of their prefixes.
    pub addresses: Vec<IpNet>,
    /// What the server offers to reach.
    pub routes: Vec<IpNet>,
    /// The largest packet (bytes).
    pub mtu: u32,
}

/// What an app gives to a client.
pub struct App {
    /// The configuration.
    pub options: ClientOptions,
    /// How packets come and go.
    pub packets: Packets,
    /// Takes what happens; it must not wait.
    pub events: Box<dyn FnMut(Event) + Send>,
    /// Asked about each socket before its first use.
    pub protect: Option<Protect>,
    /// Resolves the server's name in place of the system.
    pub resolve: Option<Resolve>,
    /// The links; `None` asks the kernel.
    pub links: Option<Vec<GivenLink>>,
    /// Where the log of the tunnel's thread goes, if not where that of the whole process does.
    pub log: Option<tracing::Dispatch>,
}

/// What the app wants.
enum Order {
    Stop,
    Look,
    Links(Vec<GivenLink>),
    Descriptor(PacketFd),
    Status(SyncSender<Status>),
}

/// The app, as the tunnel's thread sees it.
pub(super) struct Host {
    orders: Receiver<Order>,
    events: Box<dyn FnMut(Event) + Send>,
    pub(super) assignment: Option<Assignment>,
    told: Option<Network>,
}

impl Host {
    /// Tells addresses, routes and the MTU (bytes), once there are addresses, and whenever they change.
    pub(super) fn configure(&mut self, mtu: u32) {
        let Some(assignment) = &self.assignment else { return };
        let network = Network {
            addresses: assignment.addresses.clone(),
            routes: assignment.routes.iter().flat_map(|range| range.to_nets()).collect(),
            mtu,
        };
        if self.told.as_ref() != Some(&network) {
            self.told = Some(network.clone());
            (self.events)(Event::Up(network));
        }
    }

    /// The function that takes what happens; the app is told nothing by this value any more.
    fn take_events(&mut self) -> Box<dyn FnMut(Event) + Send> {
        std::mem::replace(&mut self.events, Box::new(drop))
    }

    /// Tells that the connection is lost.
    pub(super) fn down(&mut self, reason: String) {
        (self.told, self.assignment) = (None, None);
        (self.events)(Event::Down(reason));
    }
}

/// A running client. Dropping it stops it.
pub struct Handle {
    orders: Sender<Order>,
    packets: Option<SyncSender<Vec<u8>>>,
    wake: PollWaker,
    id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Starts a client and returns when its thread runs; it connects from then on.
///
/// # Errors
/// If the configuration is not usable, or the system refuses something.
pub fn start(app: App) -> Result<Handle, EngineError> {
    let (orders, orders_in) = channel();
    let (sender, packets) = sync_channel(WAITING);
    let (ready, started) = sync_channel(1);
    let by_call = matches!(app.packets, Packets::Calls(_));
    let work = move || {
        let log = app.log.clone();
        let body = || live(app, orders_in, packets, &ready);
        match log {
            Some(log) => tracing::dispatcher::with_default(&log, body),
            None => body(),
        }
    };
    let thread = thread::Builder::new().name("mpvpn".to_owned()).spawn(work);
    let thread = thread.map_err(EngineError::io("start a thread"))?;
    let id = thread.thread().id();
    let wake = started.recv().unwrap_or_else(|_| {
        let panic = std::io::Error::other("it panicked");
        Err(EngineError::io("start the tunnel's thread")(panic))
    });
    match wake {
        Ok(wake) => {
            let packets = by_call.then_some(sender);
            Ok(Handle { orders, packets, wake, id, thread: Mutex::new(Some(thread)) })
        }
        Err(error) => {
            // What it panicked of was reported when it happened.
            let _ = thread.join();
            Err(error)
        }
    }
}

/// The tunnel's thread.
fn live(
    app: App,
    orders: Receiver<Order>,
    packets: Receiver<Vec<u8>>,
    ready: &SyncSender<Result<PollWaker, EngineError>>,
) {
    let slot = LastRefusal::default();
    let (mut running, mut turns) = match set_up(app, orders, packets, &slot) {
        Ok(both) => both,
        // Who starts it waits for this.
        Err(error) => return drop(ready.send(Err(error))),
    };
    let _ = ready.send(Ok(turns.wake.clone()));
    let result = catch_unwind(AssertUnwindSafe(|| running.run(&mut turns)));
    let events = match &mut running.kind {
        ClientKind::Embedded(host) => Some(host.take_events()),
        ClientKind::Machine(_) | ClientKind::Proxy(_) => None,
    };
    let ended = catch_unwind(AssertUnwindSafe(|| running.end()));
    let ran = match (result, ended) {
        (Ok(ran), Ok(ended)) => ran.map_err(|error| refusal(error, &slot)).and(ended),
        (Err(panic), _) | (_, Err(panic)) => {
            let reason = std::io::Error::other(format!("it panicked: {}", panic_text(&*panic)));
            Err(EngineError::io("go on")(reason))
        }
    };
    if let (Err(error), Some(mut events)) = (ran, events) {
        events(Event::Failed(error.to_string()));
    }
}

fn set_up(
    app: App,
    orders: Receiver<Order>,
    packets: Receiver<Vec<u8>>,
    slot: &LastRefusal,
) -> Result<(Running, Turns), EngineError> {
    reduce_timer_slack();
    let turns = Turns::without_signals()?;
    let origin = ConfigSource::of_app(app.options.clone());
    let config = origin.load()?;
    let tls = tls::client_config_reporting(&config.trust, &[b"h3"], slot)?;
    let device = match app.packets {
        Packets::Descriptor(fd) => AppDevice::descriptor(PacketFd::new(fd)?),
        Packets::Calls(out) => AppDevice::calls(packets, out),
        Packets::Later => AppDevice::nothing(),
    };
    let slow = slow(&config, app.options.api_socket.as_ref(), app.resolve, &turns)?;
    let ground = Ground { protect: app.protect, given: app.links, ..Ground::default() };
    let host = Host { orders, events: app.events, assignment: None, told: None };
    let parts = ClientParts {
        kind: ClientKind::Embedded(host),
        queues: vec![Device::App(device).into()],
        ground,
        state_dir: app.options.state_dir,
    };
    let running = Running::new((config, origin), &turns, Arc::new(tls), parts, slow)?;
    Ok((running, turns))
}

/// The thread for what is slow, if there is anything.
fn slow(
    config: &ClientConfig,
    api_socket: Option<&PathBuf>,
    resolve: Option<Resolve>,
    turns: &Turns,
) -> Result<Slow, EngineError> {
    let for_all = config.links.iter().find(|link| link.name == "*");
    let is_quic = |link: &LinkConfig| link.transport == Some(Transport::Quic);
    let no_tcp = for_all.is_some() && config.links.iter().all(is_quic);
    if api_socket.is_none() && config.metrics.is_none() && config.server.ip().is_some() && no_tcp {
        return Ok(Slow::idle());
    }
    let api = api_socket.map(|path| api::Server::bind(path)).transpose()?;
    let metrics = config.metrics.map(metrics::Server::bind).transpose()?;
    Slow::start(Offers { api, metrics, front: None }, resolve, turns.wake.clone())
}

impl Running {
    /// Does what the app wants; whether it is to end.
    pub(super) fn obey(&mut self, turns: &Turns, now: Instant) -> Result<bool, EngineError> {
        loop {
            let ClientKind::Embedded(host) = &self.kind else { return Ok(false) };
            match host.orders.try_recv() {
                Err(TryRecvError::Empty) => return Ok(false),
                // Nobody could stop it any more.
                Ok(Order::Stop) | Err(TryRecvError::Disconnected) => return Ok(true),
                Ok(Order::Look) => self.plane.rescan(turns, now, &mut |_| {})?,
                Ok(Order::Links(given)) => {
                    self.plane.sockets.links.give(&turns.poller, given)?;
                    self.plane.rescan(turns, now, &mut |_| {})?;
                }
                Ok(Order::Descriptor(fd)) => self.plane.set_descriptor(turns, fd)?,
                Ok(Order::Status(reply)) => {
                    // Who asked may be gone.
                    let _ = reply.try_send(self.status(now));
                }
            }
        }
    }
}

impl Handle {
    /// Hands over one packet of the app, from any thread, without waiting; whether it was taken. It is not where packets
    /// come by a descriptor, or too many wait, or it is larger than any, or the tunnel has ended.
    pub fn push(&self, packet: &[u8]) -> bool {
        let Some(packets) = self.packets.as_ref().filter(|_| packet.len() <= LARGEST) else { return false };
        let taken = packets.try_send(packet.to_vec()).is_ok();
        self.wake.wake();
        taken
    }

    /// Links may have come or gone, or have other addresses: they are looked at anew. Where the kernel tells of them this
    /// is not needed, where the app gave them it is [`Self::set_links`].
    pub fn network_changed(&self) {
        self.order(Order::Look);
    }

    /// The links are these now, whoever told before.
    pub fn set_links(&self, links: Vec<GivenLink>) {
        self.order(Order::Links(links));
    }

    /// Packets come and go by this descriptor from now on, whatever they did before. It becomes nonblocking.
    ///
    /// # Errors
    /// If it cannot carry packets.
    pub fn set_descriptor(&self, fd: OwnedFd) -> Result<(), EngineError> {
        self.order(Order::Descriptor(PacketFd::new(fd)?));
        Ok(())
    }

    /// How things are; `None` if the tunnel has ended, or in a call of its own thread.
    pub fn status(&self) -> Option<Status> {
        if thread::current().id() == self.id {
            return None;
        }
        let (reply, answer) = sync_channel(1);
        self.order(Order::Status(reply));
        answer.recv_timeout(ANSWER).ok()
    }

    /// Whether the tunnel has not ended by itself.
    pub fn is_running(&self) -> bool {
        self.thread().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Says good-bye to the server, and waits until the thread has ended; in a call of that thread it ends after the call.
    /// Later calls do nothing.
    pub fn stop(&self) {
        self.order(Order::Stop);
        let Some(thread) = self.thread().take() else { return };
        if thread::current().id() != self.id {
            // A panic there was told as an event.
            let _ = thread.join();
        }
    }

    fn thread(&self) -> std::sync::MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: Order) {
        // A thread that has ended needs no orders.
        let _ = self.orders.send(order);
        self.wake.wake();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop();
    }
}
