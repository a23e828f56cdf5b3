//! The networks behind a client: who may come in from the tunnel, and one-to-one translation.
//!
//! In: the networks as they are and as they are announced, and sources. Out: chains. Always holds: a packet
//! from the tunnel to such a network passes if its source is accepted or it answers a connection from there,
//! else its sender is told by ICMP; hosts behind the client keep their addresses, or have those of the
//! announced network with the same host bits, even where the tunnel is shared with them.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    PortForward, SOURCE_NAT_PRIORITY, forward,
    script::{ANSWERS, REJECT, any_of, hook_chain, protocol_of, quoted},
};

/// After connection tracking (-200), before destination translation: sources are accepted for the network as
/// it is announced.
const FILTER_PRIORITY: i32 = -150;
/// `dstnat` of nft(8).
const DESTINATION_NAT_PRIORITY: i32 = -100;

/// The networks behind a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SiteRules {
    /// The TUN device.
    pub tun: String,
    /// The networks.
    pub networks: Vec<SiteNetwork>,
    /// Sources in the tunnel from which connections may come in.
    pub accept_from: Vec<IpNet>,
    /// Whether these have the client's address in the network, because its hosts do not send their answers to
    /// the client otherwise.
    pub masquerade: bool,
    /// Ports of the client's address in the tunnel that lead to hosts behind it.
    #[serde(default)]
    pub forwards: Vec<PortForward>,
}

/// A network behind a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SiteNetwork {
    /// As its hosts have it.
    pub network: IpNet,
    /// As it is announced: of the same length.
    pub announced: IpNet,
}

impl SiteRules {
    pub(super) fn chains(&self) -> Vec<String> {
        let chain = |(name, kind, hook), priority, rules: Vec<String>| {
            (!rules.is_empty()).then(|| hook_chain((name, kind, hook), priority, "accept", rules))
        };
        let chains = [
            chain(("site_filter", "filter", "prerouting"), FILTER_PRIORITY, self.filter()),
            chain(("site_in", "nat", "prerouting"), DESTINATION_NAT_PRIORITY, self.inward()),
            // Before that of a shared tunnel: the first translation of a connection counts.
            chain(("site_out", "nat", "postrouting"), SOURCE_NAT_PRIORITY - 1, self.outward()),
        ];
        self.counting().into_iter().chain(chains.into_iter().flatten()).collect()
    }

    fn counting(&self) -> Vec<String> {
        if self.forwards.is_empty() {
            return Vec::new();
        }
        let mapped = self.networks.iter().filter(|one| one.network != one.announced);
        let mapped: Vec<IpNet> = mapped.map(|one| one.announced).collect();
        let others = [true, false].into_iter().filter_map(|is_v4| {
            let protocol = if is_v4 { "ip" } else { "ip6" };
            Some(format!("{protocol} daddr {}", nets(is_v4, mapped.iter().copied())?))
        });
        forward::counting(&self.tun, &self.forwards, false, &others.collect::<Vec<_>>())
    }

    fn filter(&self) -> Vec<String> {
        let from_tunnel = format!("iifname {}", quoted(&self.tun));
        let mut rules = ANSWERS.map(|answers| format!("{from_tunnel} {answers}")).to_vec();
        for is_v4 in [true, false] {
            let protocol = if is_v4 { "ip" } else { "ip6" };
            let Some(announced) = nets(is_v4, self.networks.iter().map(|one| one.announced)) else {
                continue;
            };
            let to = format!("{from_tunnel} {protocol} daddr {announced}");
            if let Some(sources) = nets(is_v4, self.accept_from.iter().copied()) {
                rules.push(format!("{to} {protocol} saddr {sources} accept"));
            }
            rules.push(format!("{to} {REJECT}"));
        }
        rules
    }

    fn inward(&self) -> Vec<String> {
        let mapped = self.networks.iter().filter(|one| one.network != one.announced);
        let mapped: Vec<_> = mapped.map(|one| (one.announced, one.network)).collect();
        let rule = |map, protocol| {
            format!("iifname {} dnat {protocol} prefix to {protocol} daddr map {map}", quoted(&self.tun))
        };
        let forwards = self.forwards.iter().flat_map(|forward| forward.rules(Some(&self.tun)));
        maps(&mapped, rule).into_iter().chain(forwards).collect()
    }

    fn outward(&self) -> Vec<String> {
        let all: Vec<_> = self.networks.iter().map(|one| (one.network, one.announced)).collect();
        let tun = quoted(&self.tun);
        let mut rules = maps(&all, |map, protocol| {
            format!("oifname {tun} snat {protocol} prefix to {protocol} saddr map {map}")
        });
        if self.masquerade {
            rules.extend([true, false].into_iter().filter_map(|is_v4| {
                let forwarded =
                    self.forwards.iter().flat_map(|forward| &forward.to).map(|ip| IpNet::from(*ip));
                let to = nets(is_v4, self.networks.iter().map(|one| one.network).chain(forwarded))?;
                let protocol = if is_v4 { "ip" } else { "ip6" };
                Some(format!("iifname {tun} oifname != {tun} {protocol} daddr {to} masquerade"))
            }));
        }
        rules
    }
}

/// The networks of one family as a set, without overlaps, which nft refuses; `None` if there are none.
pub(super) fn nets(is_v4: bool, nets: impl Iterator<Item = IpNet>) -> Option<String> {
    let of_family: Vec<IpNet> = nets.filter(|net| net.addr().is_ipv4() == is_v4).collect();
    (!of_family.is_empty()).then(|| any_of(IpNet::aggregate(&of_family)))
}

/// A rule for each family, with the map of its networks.
fn maps(pairs: &[(IpNet, IpNet)], rule: impl Fn(String, &'static str) -> String) -> Vec<String> {
    let (v4, v6): (Vec<_>, Vec<_>) = pairs.iter().copied().partition(|(net, _)| net.addr().is_ipv4());
    let families = [v4, v6].into_iter().filter(|pairs| !pairs.is_empty());
    let of_family = families.map(|pairs: Vec<(IpNet, IpNet)>| {
        let map = any_of(pairs.iter().map(|(from, to)| format!("{} : {}", from.trunc(), to.trunc())));
        rule(map, protocol_of(&pairs[0].0))
    });
    of_family.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(network: &str, announced: &str) -> SiteNetwork {
        SiteNetwork { network: network.parse().unwrap(), announced: announced.parse().unwrap() }
    }

    #[test]
    fn nobody_comes_in_where_nobody_is_named() {
        let rules = SiteRules {
            tun: "t0".into(),
            networks: vec![network("192.168.7.0/24", "192.168.7.0/24"), network("fd07::/64", "fd07::/64")],
            ..SiteRules::default()
        };
        let filter = rules.filter();
        assert_eq!(
            filter[ANSWERS.len()..],
            [
                format!("iifname \"t0\" ip daddr {{ 192.168.7.0/24 }} {REJECT}"),
                format!("iifname \"t0\" ip6 daddr {{ fd07::/64 }} {REJECT}"),
            ]
        );
        assert_eq!(rules.inward(), [""; 0], "nothing is translated");
        assert_eq!(
            rules.outward(),
            [
                "oifname \"t0\" snat ip prefix to ip saddr map { 192.168.7.0/24 : 192.168.7.0/24 }",
                "oifname \"t0\" snat ip6 prefix to ip6 saddr map { fd07::/64 : fd07::/64 }",
            ]
        );
    }

    #[test]
    fn a_mapped_network_is_translated_in_both_directions_and_accepts_by_its_announced_addresses() {
        let rules = SiteRules {
            tun: "t0".into(),
            networks: vec![network("192.168.1.0/24", "10.77.1.0/24")],
            accept_from: vec!["10.77.0.0/16".parse().unwrap(), "fd00::/8".parse().unwrap()],
            masquerade: true,
            forwards: Vec::new(),
        };
        let filter = rules.filter();
        let to = "iifname \"t0\" ip daddr { 10.77.1.0/24 }";
        assert_eq!(
            filter[ANSWERS.len()..],
            [format!("{to} ip saddr {{ 10.77.0.0/16 }} accept"), format!("{to} {REJECT}")]
        );
        assert_eq!(
            rules.inward(),
            ["iifname \"t0\" dnat ip prefix to ip daddr map { 10.77.1.0/24 : 192.168.1.0/24 }"]
        );
        assert_eq!(
            rules.outward(),
            [
                "oifname \"t0\" snat ip prefix to ip saddr map { 192.168.1.0/24 : 10.77.1.0/24 }",
                "iifname \"t0\" oifname != \"t0\" ip daddr { 192.168.1.0/24 } masquerade",
            ]
        );
        assert_eq!(rules.chains().len(), 3);
    }
}
