//! The kill switch of a client: what it lets past the tunnel, and the thread that puts it back when another
//! program removes it.
//!
//! In: the addresses of the server and of the proxy in front of it, changes of interfaces, the end of the
//! client. Out: the firewall table of [`mpvpn_os::kill_switch`], and events. Always holds: it is in force
//! before the client sends its first packet; only an orderly end lifts it; an address may be reached before
//! anybody learns that it was found.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_names::{dns, lookup::Resolve};
use mpvpn_os::{
    OsError,
    dns::link_resolvers,
    kill_switch::{self, Exceptions, KillSwitch, TableMonitor},
    poll::{Events, Interest, PollWaker, Poller},
    undo::DEFAULT_FOLDER,
};
use mpvpn_status::events::{Event, EventSender};

/// How soon nft is tried again after it failed to put the table back: packets may leave until then. Sooner:
/// nft fails more often for the same reason; later: packets leave for longer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MONITOR_TOKEN: u64 = 0;
const WAKE_TOKEN: u64 = 1;

/// A kill switch in force.
pub(super) struct ClientKillSwitch {
    mark: u32,
    shared: Arc<Mutex<Shared>>,
    restorer: Restorer,
}

/// The state that the thread that resolves the proxy's name changes as well.
struct Shared {
    /// `None` once it was lifted.
    switch: Option<KillSwitch>,
    allows_lan: bool,
    /// The addresses of the HTTP proxy in front of the server, if there is one.
    proxies: Vec<SocketAddr>,
    /// The server's addresses.
    servers: Vec<SocketAddr>,
    /// Asked for the names of the server and the proxy.
    resolvers: Vec<IpAddr>,
}

impl Shared {
    /// Makes the addresses that the client needs now the exceptions of the table.
    fn update(&mut self) -> Result<(), OsError> {
        let Some(switch) = &mut self.switch else { return Ok(()) };
        let before = switch.exceptions();
        let lan = match self.allows_lan {
            true => kill_switch::connected_private_networks(&before.devices)?,
            false => Vec::new(),
        };
        let resolvers = self.resolvers.iter().map(|ip| SocketAddr::new(*ip, dns::PORT));
        let remotes = self.servers.iter().chain(&self.proxies).copied().chain(resolvers).collect();
        let exceptions = Exceptions { remotes, lan, ..before.clone() };
        switch.change(exceptions)
    }
}

impl ClientKillSwitch {
    /// Blocks everything but what the client needs to connect; or, where the configuration has no kill
    /// switch, lifts what an earlier process of this instance has left.
    ///
    /// # Errors
    /// If nft is missing or refuses the table.
    pub(super) fn arm(
        config: &ClientConfig,
        tunnels: Vec<String>,
        mark: u32,
    ) -> Result<Option<Self>, RunError> {
        let base = Path::new(DEFAULT_FOLDER);
        let mpvpn_config::KillSwitch::On { allows_lan } = config.kill_switch else {
            if kill_switch::lift_left_over(base, &config.tun_name)? {
                tracing::warn!("the kill switch that an earlier process left in force is lifted");
            }
            return Ok(None);
        };
        let proxy = config.via.as_ref().map(|via| &via.proxy);
        let has_names = config.servers.iter().any(|server| server.address.ip().is_none())
            || proxy.is_some_and(|proxy| proxy.ip().is_none());
        let resolvers = if has_names { link_resolvers(base) } else { Vec::new() };
        let exceptions = Exceptions { devices: tunnels, mark, ..Exceptions::default() };
        let switch = KillSwitch::arm(base, &config.tun_name, exceptions)?;
        let mut shared = Shared {
            switch: Some(switch),
            allows_lan,
            proxies: proxy.and_then(|proxy| proxy.socket_addr()).into_iter().collect(),
            servers: Vec::new(),
            resolvers,
        };
        let restorer = Restorer::start()?;
        shared.update()?;
        Ok(Some(Self { mark, shared: Arc::new(Mutex::new(shared)), restorer }))
    }

    /// Where events are reported.
    pub(super) fn set_events(&self, events: EventSender) {
        events.report(Event::KillSwitchBlocking {});
        // It is called once.
        let _ = self.restorer.events.set(events);
    }

    /// Reports that the tunnel works, or that it does not any more.
    pub(super) fn set_up(&self, is_up: bool) {
        self.report(if is_up { Event::KillSwitchArmed {} } else { Event::KillSwitchBlocking {} });
    }

    fn report(&self, event: Event) {
        if let Some(events) = self.restorer.events.get() {
            events.report(event);
        }
    }

    /// Lets the client's packets reach these addresses of its server, and no others.
    ///
    /// # Errors
    /// If nft refuses; then the addresses of before count.
    pub(super) fn set_servers(&mut self, servers: &[SocketAddr]) -> Result<(), RunError> {
        let mut shared = lock(&self.shared);
        servers.clone_into(&mut shared.servers);
        Ok(shared.update()?)
    }

    /// Lets the private networks pass that the links are in now.
    ///
    /// # Errors
    /// If nft refuses; then those of before count.
    pub(super) fn update(&mut self) -> Result<(), RunError> {
        Ok(lock(&self.shared).update()?)
    }

    /// How the server's name is resolved past the tunnel: by the resolvers of the links, with packets that
    /// the table lets pass.
    pub(super) fn server_name_resolver(&self) -> Resolve {
        dns::marked_resolver(lock(&self.shared).resolvers.clone(), self.mark)
    }

    /// The same for the proxy in front of the server at this port. The addresses may be reached when it
    /// returns them; where no resolver answers, those of before count.
    pub(super) fn proxy_resolver(&self, port: u16) -> Resolve {
        let resolve = self.server_name_resolver();
        let shared = Arc::clone(&self.shared);
        Arc::new(move |name| {
            let found = resolve(name);
            let mut shared = lock(&shared);
            match found {
                Ok(found) if !found.is_empty() => {
                    shared.proxies = found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
                    shared.update().map_err(|error| error.to_string())?;
                }
                Ok(_) => {}
                Err(reason) if shared.proxies.is_empty() => return Err(reason),
                Err(reason) => {
                    tracing::debug!(
                        name,
                        reason,
                        "the proxy's name is not resolved: its addresses of before count"
                    );
                }
            }
            Ok(shared.proxies.iter().map(SocketAddr::ip).collect())
        })
    }

    /// Lets packets pass as before.
    ///
    /// # Errors
    /// If nft refuses.
    pub(super) fn lift(self) -> Result<(), RunError> {
        let events = self.restorer.events.get().cloned();
        drop(self.restorer);
        let switch = lock(&self.shared).switch.take();
        let is_held = switch.map(KillSwitch::lift).transpose()?.unwrap_or(false);
        if is_held {
            tracing::warn!(
                "the block stays in force until the client runs again, or `mpvpn kill-switch release` ends it"
            );
        } else if let Some(events) = events {
            events.report(Event::KillSwitchLifted { reason: "the client was told to end".into() });
        }
        Ok(())
    }
}

/// A thread that panicked has left the exceptions as they were, or changed.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that installs the table again when another program has changed it.
struct Restorer {
    stop: PollWaker,
    /// Where events are reported, once it is known.
    events: Arc<OnceLock<EventSender>>,
    thread: Option<JoinHandle<()>>,
}

impl Restorer {
    fn start() -> Result<Self, RunError> {
        let failed = RunError::io("watch the firewall");
        let mut monitor = TableMonitor::open()?;
        let poller = Poller::new().map_err(failed)?;
        let stop = PollWaker::new().map_err(RunError::io("watch the firewall"))?;
        let add = || {
            poller.add(&monitor, MONITOR_TOKEN, Interest::Read)?;
            poller.add(&stop, WAKE_TOKEN, Interest::Read)
        };
        add().map_err(RunError::io("watch the firewall"))?;
        let sender: Arc<OnceLock<EventSender>> = Arc::default();
        let reported = Arc::clone(&sender);
        let run = move || {
            let mut events = Events::with_capacity(2);
            let mut retry = None;
            loop {
                let changed = poller.wait(&mut events, retry).and_then(|_| monitor.take_changed());
                if let Err(error) = changed {
                    tracing::error!(%error, "changes of the firewall table of the kill switch are not noticed any more");
                    return;
                }
                if events.iter().any(|event| event.token == WAKE_TOKEN) {
                    return;
                }
                // Without a change it is time to try again.
                retry = None;
                match kill_switch::repair(Path::new(DEFAULT_FOLDER)) {
                    Ok(false) => {}
                    Ok(true) => {
                        let event = Event::KillSwitchRestored {};
                        reported.get().unwrap_or(&EventSender::to_log_lines()).report(event);
                    }
                    Err(error) => {
                        tracing::error!(%error, "the kill switch cannot be put back");
                        retry = Some(RETRY_INTERVAL);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("kill-switch".to_owned());
        let thread = thread.spawn(run).map_err(RunError::io("start a thread"))?;
        Ok(Self { stop, events: sender, thread: Some(thread) })
    }
}

impl Drop for Restorer {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
