//! Names that are asked for in the tunnel beside names that the resolver of the local network answers: of a
//! tunnel for all packets all but those of the option `dns-local`, of another those below the domain of the
//! server. Names of `[[bypass]]` are asked for over the link of their rule.
//!
//! In: queries of programs of this machine, the resolvers in the tunnel and those of the links. Out: the
//! responses of the one or the other, by the name. Always holds: with a tunnel for all packets only names
//! below the domains that the user named are asked for past it; a link cannot add domains, although DHCP has
//! search domains, because it could name any.
//!
//! `/etc/resolv.conf` cannot say which resolver to ask for which name, so it names a forwarding resolver on a
//! loopback address of its own.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use ipnet::IpNet;
use mpvpn_class::DomainPattern;
use mpvpn_names::dns::{Forwarder, Lookup, PORT, addresses, part_below};
use mpvpn_os::tunnel_net::BypassNames;
use mpvpn_types::Domain;
use tokio::{runtime::Handle, task::JoinHandle};

/// Loopback addresses to listen at, one for each client of the machine: "mp" in ASCII, and a number.
const ADDRESSES: [Ipv4Addr; 4] = [
    Ipv4Addr::new(127, 109, 112, 1),
    Ipv4Addr::new(127, 109, 112, 2),
    Ipv4Addr::new(127, 109, 112, 3),
    Ipv4Addr::new(127, 109, 112, 4),
];

/// Where names are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NameSplit {
    /// Names below these domains at the links, all others in the tunnel.
    AtLinks(Vec<String>),
    /// Names below this domain in the tunnel, all others at the links.
    InTunnel(Domain),
}

/// The names of a rule past the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BypassedNames {
    /// The number of the rule.
    pub rule: usize,
    pub domains: Vec<DomainPattern>,
    /// The resolvers to ask over the link of the rule.
    pub resolvers: Vec<IpAddr>,
}

/// The resolvers to ask.
#[derive(Clone, Debug)]
struct Resolvers {
    split: NameSplit,
    in_tunnel: Vec<IpAddr>,
    /// Empty where the kill switch blocks them.
    of_links: Vec<IpAddr>,
    bypassed: Vec<BypassedNames>,
    bypass: BypassNames,
}

impl Resolvers {
    fn for_name(&self, name: &str) -> Lookup {
        if let Some(found) = self.bypassed.iter().find(|it| it.domains.iter().any(|one| one.matches(name))) {
            return self.past_tunnel(found);
        }
        let in_tunnel = match &self.split {
            NameSplit::AtLinks(domains) => !domains.iter().any(|domain| part_below(name, domain).is_some()),
            NameSplit::InTunnel(domain) => part_below(name, domain.as_str()).is_some(),
        };
        let resolvers = if in_tunnel { &self.in_tunnel } else { &self.of_links };
        resolvers.iter().map(|ip| SocketAddr::new(*ip, PORT)).collect::<Vec<_>>().into()
    }

    /// Asks over the link of a rule; the answer waits until the rule has its addresses. Without a link
    /// nobody is asked.
    fn past_tunnel(&self, BypassedNames { rule, resolvers, .. }: &BypassedNames) -> Lookup {
        let Some(mark) = self.bypass.mark_of(*rule) else { return Lookup::default() };
        let (bypass, rule) = (self.bypass.clone(), *rule);
        let add = move |response: &[u8]| {
            let added = bypass.add(rule, &addresses(response));
            added.inspect_err(|error| tracing::warn!(%error, "a name of [[bypass]] stays unknown")).is_ok()
        };
        Lookup {
            resolvers: resolvers.iter().map(|ip| SocketAddr::new(*ip, PORT)).collect(),
            mark: Some(mark),
            before_answer: Some(Box::new(add)),
        }
    }
}

/// The forwarding resolver; dropping it ends it.
pub(super) struct LocalNames {
    split: NameSplit,
    address: IpAddr,
    resolvers: Arc<Mutex<Resolvers>>,
    task: JoinHandle<()>,
}

impl LocalNames {
    /// Starts it. `of_links` are the resolvers of the links.
    ///
    /// # Errors
    /// If no loopback address is free.
    pub(super) fn start(
        runtime: &Handle,
        split: NameSplit,
        of_links: Vec<IpAddr>,
        bypass: BypassNames,
    ) -> io::Result<Self> {
        let (in_tunnel, bypassed) = Default::default();
        let resolvers = Resolvers { split: split.clone(), in_tunnel, of_links, bypassed, bypass };
        let resolvers = Arc::new(Mutex::new(resolvers));
        let shared = Arc::clone(&resolvers);
        let upstreams =
            Arc::new(move |name: &str| shared.lock().unwrap_or_else(PoisonError::into_inner).for_name(name));
        let own_machine = [IpNet::new_assert(Ipv4Addr::LOCALHOST.into(), 8)];
        let mut failure = None;
        for address in ADDRESSES.map(IpAddr::from) {
            let user_of = Arc::new(|host: IpAddr| host.to_string());
            match Forwarder::bind(&[address], PORT, &own_machine, user_of, upstreams.clone()) {
                Ok(forwarder) => {
                    let task = runtime.spawn(forwarder.serve());
                    return Ok(Self { split, address, resolvers, task });
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    /// Where names are asked for.
    pub(super) fn split(&self) -> &NameSplit {
        &self.split
    }

    /// The address that programs ask.
    pub(super) fn address(&self) -> IpAddr {
        self.address
    }

    /// Replaces the resolvers in the tunnel, and the names that are asked for past it.
    pub(super) fn set_resolvers(&self, in_tunnel: &[IpAddr], bypassed: Vec<BypassedNames>) {
        let mut shared = self.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        in_tunnel.clone_into(&mut shared.in_tunnel);
        shared.bypassed = bypassed;
    }
}

impl Drop for LocalNames {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_a_domain_are_asked_for_at_the_links_and_others_in_the_tunnel() {
        let ip = |text: &str| vec![text.parse::<IpAddr>().unwrap()];
        let resolvers = Resolvers {
            split: NameSplit::AtLinks(vec!["lan".into(), "home.arpa".into()]),
            in_tunnel: ip("10.0.0.1"),
            of_links: ip("192.168.1.1"),
            bypassed: Vec::new(),
            bypass: BypassNames::default(),
        };
        for name in ["lan", "printer.lan", "a.b.home.arpa"] {
            assert_eq!(resolvers.for_name(name).resolvers, ["192.168.1.1:53".parse().unwrap()], "{name}");
        }
        for name in ["", "wlan", "lan.example", "arpa", "myhome.arpa"] {
            assert_eq!(resolvers.for_name(name).resolvers, ["10.0.0.1:53".parse().unwrap()], "{name}");
        }
        // Under the kill switch.
        let blocked = Resolvers { of_links: Vec::new(), ..resolvers.clone() };
        assert!(blocked.for_name("printer.lan").resolvers.is_empty());
        // No link that a rule past the tunnel could use.
        let bypassed =
            BypassedNames { rule: 0, domains: vec!["tv.example".parse().unwrap()], resolvers: ip("9.9.9.9") };
        let past = Resolvers { bypassed: vec![bypassed], ..resolvers.clone() };
        assert!(past.for_name("live.tv.example").resolvers.is_empty());
        assert_eq!(past.for_name("mytv.example").resolvers.len(), 1);
        // Of a tunnel that does not take all packets.
        let split = NameSplit::InTunnel("vpn.internal".parse().unwrap());
        let advertised = Resolvers { split, ..resolvers };
        for (name, address) in [("anna.vpn.internal", "10.0.0.1:53"), ("a.example", "192.168.1.1:53")] {
            assert_eq!(advertised.for_name(name).resolvers, [address.parse().unwrap()], "{name}");
        }
    }
}
