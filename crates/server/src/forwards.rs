//! Ports of this machine that lead to clients, and to hosts behind them: the tables `[[forward]]`.
//!
//! In: the tables, and the sessions of users. Out: the translation of the kernel, and what the status says.
//! Always holds: of several sessions of a user, that with a fixed address has the ports, else the oldest; the
//! kernel has no translation to a host that is not there.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use mpvpn_config::{Forward, ForwardHost};
use mpvpn_input::{Error, Result};
use mpvpn_os::{
    OsError,
    firewall::{ForwardCounters, PortForward, set_forwards},
    port_holders::holders,
};
use mpvpn_status::ForwardedPort;
use mpvpn_tunnel::Registry;

/// The protocol numbers and ports of forwards, for the filter of packets.
pub(super) fn ports(forwards: &[Forward]) -> Vec<(u8, u16, u16)> {
    let port = |forward: &Forward| {
        let (first, last) = forward.ports.range;
        (forward.ports.protocol_number(), first, last)
    };
    forwards.iter().map(port).collect()
}

/// The users to whose clients ports lead.
pub(super) fn users(forwards: &[Forward]) -> BTreeSet<String> {
    let user = |forward: &Forward| match &forward.to.host {
        ForwardHost::User(user) => Some(user.to_ascii_lowercase()),
        ForwardHost::Address(_) => None,
    };
    forwards.iter().filter_map(user).collect()
}

/// Checks that no program of this machine has a port that is to be forwarded.
///
/// # Errors
/// If one has; it names the program.
pub(super) fn check(forwards: &[Forward]) -> Result<()> {
    let forward_of = |protocol, port| {
        forwards.iter().find(|forward| {
            let (first, last) = forward.ports.range;
            forward.ports.protocol == protocol && (first..=last).contains(&port)
        })
    };
    let holders = holders(|protocol, port| forward_of(protocol, port).is_some());
    let mut reachable = holders.iter().filter(|holder| !holder.address.ip().is_loopback());
    let taken =
        reachable.find_map(|holder| Some((holder, forward_of(holder.protocol, holder.address.port())?)));
    let Some((holder, forward)) = taken else { return Ok(()) };
    let program = holder.program.as_deref().unwrap_or("a program");
    Err(Error::usage(
        format!("[[forward]] {}: {program} of this machine listens at {}", forward.ports, holder.address),
        "choose another port, or end that program",
    ))
}

/// A forward, and the addresses to which it leads now.
type Led = (Forward, Vec<IpAddr>);

/// The forwards, and to which addresses they lead now. Clones share them.
#[derive(Clone)]
pub(super) struct ForwardTable {
    tun: String,
    forwards: Arc<Mutex<Vec<Led>>>,
    counters: Arc<Mutex<ForwardCounters>>,
}

impl ForwardTable {
    /// Forwards of the server with this TUN device, none of which is in force.
    pub(super) fn new(tun: &str, forwards: &[Forward]) -> Self {
        let counters = Arc::new(Mutex::new(ForwardCounters::of_server(tun)));
        let table = Self { tun: tun.to_owned(), forwards: Arc::default(), counters };
        table.replace(forwards);
        table
    }

    /// Takes other forwards; [`Self::update`] puts them in force.
    pub(super) fn replace(&self, forwards: &[Forward]) {
        let all = forwards.iter().map(|forward| (forward.clone(), Vec::new())).collect();
        *self.forwards.lock().unwrap_or_else(PoisonError::into_inner) = all;
    }

    /// Puts the forwards in force as sessions are now.
    ///
    /// # Errors
    /// If nft refuses.
    pub(super) fn update(&self, registry: &Registry) -> std::result::Result<(), OsError> {
        let in_force = self.led_now(registry);
        drop(self.read_counters());
        let result = set_forwards(&self.tun, &in_force);
        // The counters of a new table begin at 0.
        drop(self.read_counters());
        result
    }

    fn read_counters(&self) -> MutexGuard<'_, ForwardCounters> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.read();
        counters
    }

    /// Takes note of where each port leads now. The lock is not held while nft works, as the status waits for
    /// it.
    fn led_now(&self, registry: &Registry) -> Vec<PortForward> {
        let mut forwards = self.forwards.lock().unwrap_or_else(PoisonError::into_inner);
        let mut in_force = Vec::new();
        for (forward, target) in forwards.iter_mut() {
            *target = match &forward.to.host {
                ForwardHost::Address(ip) => vec![*ip],
                ForwardHost::User(user) => registry.forward_target(&user.to_ascii_lowercase()),
            };
            tracing::debug!(ports = %forward.ports, to = %forward.to, ?target, "where a port leads");
            if !target.is_empty() {
                in_force.push(PortForward {
                    protocol: forward.ports.protocol_number(),
                    ports: forward.ports.range,
                    from: forward.from.clone(),
                    to: target.clone(),
                    to_port: forward.to.port,
                });
            }
        }
        in_force
    }

    /// The forwards as the status has them.
    pub(super) fn status(&self) -> Vec<ForwardedPort> {
        let forwards = self.forwards.lock().unwrap_or_else(PoisonError::into_inner);
        if forwards.is_empty() {
            return Vec::new();
        }
        let counters = self.read_counters();
        let of = |(forward, target): &Led| {
            let bytes = counters.of(forward.ports.protocol_number(), forward.ports.range.0);
            ForwardedPort {
                port: forward.ports.to_string(),
                to: forward.to.to_string(),
                addresses: target.clone(),
                from: forward.from.clone(),
                tx_bytes: bytes.to_host,
                rx_bytes: bytes.from_host,
            }
        };
        forwards.iter().map(of).collect()
    }
}
