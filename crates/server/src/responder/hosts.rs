//! The hosts that measure now.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    rc::Rc,
    time::Instant,
};

use ipnet::IpNet;
use mpvpn_os::usage;
use mpvpn_status::measure::{Datagram, DatagramCounter, DatagramReport, ResponderReport};

/// Connections of one host: 8 flows, those of a flow that ends while the next begins, and one for orders.
/// More would let one host take more memory (some 100 KiB each), fewer refuse measurements.
const MAX_CONNECTIONS_OF_HOST: usize = 24;
/// Connections of all hosts: ten measurements at a time. Chosen.
const MAX_CONNECTIONS: usize = 240;
/// Runs of datagrams that are kept for a host: the one that is counted, and those that still arrive late.
const MAX_RUNS_OF_HOST: usize = 4;

/// The hosts with a connection.
pub(super) struct Hosts {
    /// Hosts outside of these networks are not served.
    networks: Vec<IpNet>,
    all: RefCell<HashMap<IpAddr, Rc<Host>>>,
    began: Instant,
}

/// The counters of a host, from its first connection until its last one ends.
#[derive(Default)]
pub(super) struct Host {
    connections: Cell<usize>,
    pub(super) received_bytes: Cell<u64>,
    pub(super) segments: Cell<u64>,
    pub(super) retransmitted: Cell<u64>,
    /// Whether datagrams are sent to it for an order.
    pub(super) is_sent_datagrams: Cell<bool>,
    runs: RefCell<BTreeMap<u32, DatagramCounter>>,
}

/// The place of a connection. It is free again when this is dropped.
pub(super) struct Place {
    hosts: Rc<Hosts>,
    pub(super) address: IpAddr,
    pub(super) host: Rc<Host>,
}

impl Hosts {
    pub(super) fn new(networks: Vec<IpNet>) -> Self {
        Self { networks, all: RefCell::default(), began: Instant::now() }
    }

    /// Time since the responder began (µs).
    pub(super) fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A host that has a connection.
    pub(super) fn get(&self, address: IpAddr) -> Option<Rc<Host>> {
        self.all.borrow().get(&address.to_canonical()).cloned()
    }

    /// Takes a place for a connection of a host; `None` if it is no host of the tunnel, or has too many.
    pub(super) fn enter(hosts: &Rc<Self>, address: IpAddr) -> Option<Place> {
        let address = address.to_canonical();
        if !hosts.networks.iter().any(|network| network.contains(&address)) {
            return None;
        }
        let mut all = hosts.all.borrow_mut();
        let in_use: usize = all.values().map(|host| host.connections.get()).sum();
        let own = all.get(&address).map_or(0, |host| host.connections.get());
        if in_use >= MAX_CONNECTIONS || own >= MAX_CONNECTIONS_OF_HOST {
            return None;
        }
        if own == 0 {
            tracing::info!(%address, "a client measures");
        }
        let host = Rc::clone(all.entry(address).or_default());
        host.connections.set(own + 1);
        Some(Place { hosts: Rc::clone(hosts), address, host })
    }
}

impl Host {
    /// Counts a datagram of a run.
    pub(super) fn count(&self, now_us: u64, header: &Datagram, length: usize) {
        let mut runs = self.runs.borrow_mut();
        if !runs.contains_key(&header.run) && runs.len() >= MAX_RUNS_OF_HOST {
            runs.pop_first();
        }
        runs.entry(header.run).or_default().count(now_us, header, length);
    }

    /// The counters of a run.
    pub(super) fn run(&self, run: u32) -> DatagramReport {
        self.runs.borrow().get(&run).map(DatagramCounter::report).unwrap_or_default()
    }
}

impl Place {
    /// The answer to an order for a report.
    pub(super) fn report(&self) -> ResponderReport {
        let own = std::process::id();
        let cpu = usage::processor_time(own).unwrap_or_default().saturating_sub(usage::thread_time());
        ResponderReport {
            at_us: self.hosts.now_us(),
            received_bytes: self.host.received_bytes.get(),
            segments: self.host.segments.get(),
            retransmitted: self.host.retransmitted.get(),
            cpu_us: u64::try_from(cpu.as_micros()).unwrap_or(u64::MAX),
            resident_bytes: usage::resident_memory(own).unwrap_or_default(),
        }
    }

    /// Time since the responder began (µs).
    pub(super) fn now_us(&self) -> u64 {
        self.hosts.now_us()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let left = self.host.connections.get().saturating_sub(1);
        self.host.connections.set(left);
        if left == 0 {
            self.hosts.all.borrow_mut().remove(&self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_status::measure::DatagramKind;

    use super::*;

    fn hosts() -> Rc<Hosts> {
        Rc::new(Hosts::new(vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()]))
    }

    #[test]
    fn hosts_outside_of_the_tunnel_get_no_place() {
        let hosts = hosts();
        for address in ["192.0.2.1", "10.0.1.1", "127.0.0.1", "2001:db8::1"] {
            assert!(Hosts::enter(&hosts, address.parse().unwrap()).is_none(), "{address}");
        }
        assert!(Hosts::enter(&hosts, "::ffff:10.0.0.7".parse().unwrap()).is_some());
    }

    #[test]
    fn connections_are_bounded_for_each_host_and_in_all_and_nothing_stays() {
        let hosts = hosts();
        let host = |number: u8| IpAddr::from([10, 0, 0, number]);
        let mut places: Vec<_> =
            (0..MAX_CONNECTIONS_OF_HOST).map(|_| Hosts::enter(&hosts, host(1))).collect();
        assert!(places.iter().all(Option::is_some) && Hosts::enter(&hosts, host(1)).is_none());
        for number in 2..=10 {
            places.extend((0..MAX_CONNECTIONS_OF_HOST).map(|_| Hosts::enter(&hosts, host(number))));
        }
        assert!(Hosts::enter(&hosts, host(11)).is_none(), "the server has enough to do");
        assert!(hosts.get(host(1)).is_some());
        drop(places);
        assert!(hosts.all.borrow().is_empty() && hosts.get(host(1)).is_none());
    }

    #[test]
    fn only_the_latest_runs_are_kept() {
        let host = Host::default();
        for run in 0..100 {
            let header = Datagram { kind: DatagramKind::Data, run, sequence: 0, sent_us: 0 };
            host.count(0, &header, 1200);
        }
        assert_eq!(host.runs.borrow().len(), MAX_RUNS_OF_HOST);
        assert_eq!((host.run(99).datagrams, host.run(0).datagrams), (1, 0));
    }
}
