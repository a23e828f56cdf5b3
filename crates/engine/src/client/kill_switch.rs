//! The kill switch of a client: what it lets past the tunnel, and the thread that puts it back when another program removes it.
//!
//! In: the addresses of the server, changes of interfaces, the end of the client. Out: the firewall table of
//! [`mpvpn_os::kill_switch`]. Always holds: it is in force before the client sends its first packet; only an orderly end lifts it.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_control::config::{self, ClientConfig};
use mpvpn_os::{
    dns::link_resolvers,
    kill_switch::{self, Exceptions, KillSwitch, TableMonitor},
    poll::{Events, Interest, PollWaker, Poller},
    undo::DEFAULT_FOLDER,
};

use crate::{EngineError, dns};

/// How soon nft is tried again after it failed to put the table back: packets may leave until then. Sooner: nft fails more often for
/// the same reason; later: packets leave for longer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MONITOR_TOKEN: u64 = 0;
const WAKE_TOKEN: u64 = 1;

/// A kill switch in force.
pub(super) struct ClientKillSwitch {
    switch: KillSwitch,
    allows_lan: bool,
    /// Asked for the server's name.
    resolvers: Vec<IpAddr>,
    /// The HTTP proxy in front of the server, if there is one.
    proxy: Option<SocketAddr>,
    /// The server's addresses.
    servers: Vec<SocketAddr>,
    restorer: Restorer,
}

impl ClientKillSwitch {
    /// Blocks everything but what the client needs to connect; or, where the configuration has no kill switch, lifts what an
    /// earlier process of this instance has left.
    ///
    /// # Errors
    /// If nft is missing or refuses the table.
    pub(super) fn arm(
        config: &ClientConfig,
        tunnels: Vec<String>,
        mark: u32,
    ) -> Result<Option<Self>, EngineError> {
        let base = Path::new(DEFAULT_FOLDER);
        let config::KillSwitch::On { allows_lan } = config.kill_switch else {
            if kill_switch::lift_left_over(base, &config.tun_name)? {
                tracing::warn!("the kill switch that an earlier process left in force is lifted");
            }
            return Ok(None);
        };
        let resolvers = if config.server.ip().is_none() { link_resolvers(base) } else { Vec::new() };
        let exceptions = Exceptions { devices: tunnels, mark, ..Exceptions::default() };
        let switch = KillSwitch::arm(base, &config.tun_name, exceptions)?;
        let restorer = Restorer::start()?;
        let proxy =
            config.via.as_ref().and_then(|via| Some(SocketAddr::new(via.proxy.ip()?, via.proxy.port)));
        let mut armed = Self { switch, allows_lan, resolvers, proxy, servers: Vec::new(), restorer };
        armed.update()?;
        Ok(Some(armed))
    }

    /// Lets the client's packets reach these addresses of its server, and no others.
    ///
    /// # Errors
    /// If nft refuses; then the addresses of before count.
    pub(super) fn set_servers(&mut self, servers: &[SocketAddr]) -> Result<(), EngineError> {
        servers.clone_into(&mut self.servers);
        self.update()
    }

    /// Lets the private networks pass that the links are in now.
    ///
    /// # Errors
    /// If nft refuses; then those of before count.
    pub(super) fn update(&mut self) -> Result<(), EngineError> {
        let before = self.switch.exceptions();
        let lan = match self.allows_lan {
            true => kill_switch::connected_private_networks(&before.devices)?,
            false => Vec::new(),
        };
        let resolvers = self.resolvers.iter().map(|ip| SocketAddr::new(*ip, dns::PORT));
        let remotes = self.servers.iter().copied().chain(self.proxy).chain(resolvers).collect();
        let exceptions = Exceptions { remotes, lan, ..before.clone() };
        self.switch.change(exceptions)?;
        Ok(())
    }

    /// How the server's name is resolved past the tunnel: by the resolvers of the links, with packets that the table lets pass.
    pub(super) fn server_name_resolver(&self) -> crate::slow_thread::Resolve {
        dns::marked_resolver(self.resolvers.clone(), self.switch.exceptions().mark)
    }

    /// Lets packets pass as before.
    ///
    /// # Errors
    /// If nft refuses.
    pub(super) fn lift(self) -> Result<(), EngineError> {
        drop(self.restorer);
        Ok(self.switch.lift()?)
    }
}

/// A thread that installs the table again when another program has changed it.
struct Restorer {
    stop: PollWaker,
    thread: Option<JoinHandle<()>>,
}

impl Restorer {
    fn start() -> Result<Self, EngineError> {
        let failed = EngineError::io("watch the firewall");
        let mut monitor = TableMonitor::open()?;
        let poller = Poller::new().map_err(failed)?;
        let stop = PollWaker::new().map_err(EngineError::io("watch the firewall"))?;
        let add = || {
            poller.add(&monitor, MONITOR_TOKEN, Interest::Read)?;
            poller.add(&stop, WAKE_TOKEN, Interest::Read)
        };
        add().map_err(EngineError::io("watch the firewall"))?;
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
                    Ok(true) => tracing::warn!(
                        "another program changed or removed the firewall table of the kill switch: it is installed again"
                    ),
                    Err(error) => {
                        tracing::error!(%error, "the kill switch cannot be put back");
                        retry = Some(RETRY_INTERVAL);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("kill-switch".to_owned());
        let thread = thread.spawn(run).map_err(EngineError::io("start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
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
