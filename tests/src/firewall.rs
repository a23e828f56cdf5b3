//! Emulates restrictive networks: no UDP to and from the server, or TCP without the options of Multipath TCP.
//!
//! In: numbers of links, from 1. Out: nftables rules on both ends for packets that arrive from these links,
//! so that the loss looks like one in the network. Always holds: one set of rules is active at a time, and is
//! replaced atomically.

use std::{fs, time::Duration};

use serde_json::Value;

use crate::testbed::{Host, MpvpnProcess, Testbed, paths_of};

/// The nftables table.
const TABLE: &str = "netdev wall";
/// Comment of the rules that strip options.
const STRIPPED_COMMENT: &str = "stripped";

/// The ports and protocols that the links block.
#[derive(Clone, Copy, Debug)]
pub struct Firewall<'a> {
    /// Links that drop UDP to and from the server's port.
    pub no_udp: &'a [usize],
    /// Links that strip the options of Multipath TCP (RFC 8684) in both directions.
    pub no_mptcp: &'a [usize],
}

impl Firewall<'_> {
    /// Nothing is blocked.
    pub const OPEN: Self = Firewall { no_udp: &[], no_mptcp: &[] };

    /// Raises it in place of what was there.
    pub fn apply(&self, testbed: &Testbed) {
        for (host, side) in [(Host::Server, "dport"), (Host::Client, "sport")] {
            let mut links = [self.no_udp, self.no_mptcp].concat();
            links.sort_unstable();
            links.dedup();
            let chains: String = links.iter().map(|link| self.chain(testbed, host, side, *link)).collect();
            let file = testbed.file("nft", host);
            fs::write(&file, format!("table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n{chains}}}\n"))
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            testbed.run(host, &["nft", "-f", file.to_str().expect("an ASCII path")]);
        }
    }

    /// The nftables chain for packets that arrive over one link.
    fn chain(&self, testbed: &Testbed, host: Host, side: &str, link: usize) -> String {
        let handle = testbed.link(link);
        let handle = handle.handle();
        let device = if host == Host::Server { handle.server_device() } else { handle.client_device() };
        let mut rules = String::new();
        if self.no_udp.contains(&link) {
            rules += &format!("    udp {side} 4433 counter drop\n");
        }
        if self.no_mptcp.contains(&link) {
            rules += &format!(
                "    tcp option mptcp exists counter reset tcp option mptcp comment \"{STRIPPED_COMMENT}\"\n"
            );
        }
        format!(
            "  chain {device} {{\n    type filter hook ingress device \"{device}\" priority 0\n{rules}  }}\n"
        )
    }
}

/// How many segments have lost options of Multipath TCP since the wall stands.
pub fn count_stripped_segments(testbed: &Testbed) -> u64 {
    [Host::Server, Host::Client].map(|host| testbed.count_nft_packets(host, STRIPPED_COMMENT)).iter().sum()
}

/// The transport of a link's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// QUIC over UDP.
    Quic,
    /// Inside HTTP/2 over TCP or Multipath TCP.
    Tcp,
}

/// Transports of the active paths of the default class over a link: `quic`, `tcp` or `mptcp`.
pub fn transports<'a>(status: &'a Value, link: &str) -> Vec<&'a str> {
    let of_link = paths_of(status, "default").into_iter().filter(|path| path["link"] == link);
    let active = of_link.filter(|path| path["state"] == "active");
    active.filter_map(|path| path["transport"].as_str()).collect()
}

/// Fails unless the link has exactly one active path and that uses this transport.
pub fn check_transport(status: &Value, link: &str, how: Transport) -> Result<(), String> {
    match transports(status, link)[..] {
        [transport] if ["tcp", "mptcp"].contains(&transport) == (how == Transport::Tcp) => Ok(()),
        ref others => Err(format!("{link} is used by {others:?}")),
    }
}

/// Waits until [`check_transport`] succeeds.
pub fn wait_for_transport(client: &MpvpnProcess, link: &str, how: Transport, limit: Duration) -> Value {
    client.wait_for_status(limit, &format!("{link} travels by {how:?}"), |status| {
        check_transport(status, link, how)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_active_paths_determine_the_transport_of_a_link() {
        let path = |link: &str, state: &str, transport: &str| {
            let class = "default";
            json!({ "class": class, "link": link, "state": state, "transport": transport })
        };
        let status = json!({ "paths": [
            path("eth1", "down", "quic"), path("eth1", "active", "mptcp"), path("eth2", "active", "quic"),
            path("eth2", "standby", "tcp"), path("eth3", "active", "quic"), path("eth3", "active", "tcp"),
        ] });
        assert_eq!((transports(&status, "eth1"), transports(&status, "eth2")), (vec!["mptcp"], vec!["quic"]));
        let is = |link, how| check_transport(&status, link, how).is_ok();
        assert!(is("eth1", Transport::Tcp) && !is("eth1", Transport::Quic));
        assert!(is("eth2", Transport::Quic) && !is("eth2", Transport::Tcp));
        for nothing in ["eth3", "eth4"] {
            assert!(!is(nothing, Transport::Tcp) && !is(nothing, Transport::Quic), "{nothing}");
        }
    }
}
