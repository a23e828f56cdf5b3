//! Networks that let not everything through: no UDP to and from the server, or TCP without the options of Multipath TCP.
//!
//! In: which links, counted from 1. Out: rules of nftables that both ends apply to what arrives from these links, so that to
//! either end it looks as if it had been the network. Always holds: there is one wall at a time, and raising another one takes
//! its place at once.

use std::{fs, time::Duration};

use serde_json::Value;

use crate::stage::{Peer, Place, Stage, paths_of};

/// The table of nftables.
const TABLE: &str = "netdev wall";
/// The comment of rules that strip.
const STRIPPED: &str = "stripped";

/// What does not get through.
#[derive(Clone, Copy, Debug)]
pub struct Wall<'a> {
    /// Links that let no UDP through to the server's port or from it.
    pub no_udp: &'a [usize],
    /// Links on which TCP loses the options of Multipath TCP (RFC 8684), in both directions.
    pub no_mptcp: &'a [usize],
}

impl Wall<'_> {
    /// Everything gets through.
    pub const NONE: Self = Wall { no_udp: &[], no_mptcp: &[] };

    /// Raises it in place of what was there.
    pub fn raise(&self, stage: &Stage) {
        for (place, side) in [(Place::Server, "dport"), (Place::Client, "sport")] {
            let mut links = [self.no_udp, self.no_mptcp].concat();
            links.sort_unstable();
            links.dedup();
            let chains: String = links.iter().map(|link| self.chain(stage, place, side, *link)).collect();
            let file = stage.file("nft", place);
            fs::write(&file, format!("table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n{chains}}}\n"))
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            stage.run(place, &["nft", "-f", file.to_str().expect("an ASCII path")]);
        }
    }

    /// What arrives over one link.
    fn chain(&self, stage: &Stage, place: Place, side: &str, link: usize) -> String {
        let handle = stage.link(link);
        let handle = handle.handle();
        let device = if place == Place::Server { handle.server_device() } else { handle.client_device() };
        let mut rules = String::new();
        if self.no_udp.contains(&link) {
            rules += &format!("    udp {side} 4433 counter drop\n");
        }
        if self.no_mptcp.contains(&link) {
            rules += &format!(
                "    tcp option mptcp exists counter reset tcp option mptcp comment \"{STRIPPED}\"\n"
            );
        }
        format!(
            "  chain {device} {{\n    type filter hook ingress device \"{device}\" priority 0\n{rules}  }}\n"
        )
    }
}

/// How many segments have lost options of Multipath TCP since the wall stands.
pub fn stripped(stage: &Stage) -> u64 {
    [Place::Server, Place::Client].map(|place| stage.counted(place, STRIPPED)).iter().sum()
}

/// How the packets of a link travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Travel {
    /// In UDP.
    Quic,
    /// Inside HTTP/2 over TCP or Multipath TCP.
    Tcp,
}

/// How the paths of the default class over a link travel, those that carry data: `quic`, `tcp` or `mptcp`.
pub fn transports<'a>(status: &'a Value, link: &str) -> Vec<&'a str> {
    let of_link = paths_of(status, "default").into_iter().filter(|path| path["link"] == link);
    let active = of_link.filter(|path| path["state"] == "active");
    active.filter_map(|path| path["transport"].as_str()).collect()
}

/// Complains unless a link is used in this way only.
pub fn travels(status: &Value, link: &str, how: Travel) -> Result<(), String> {
    match transports(status, link)[..] {
        [transport] if ["tcp", "mptcp"].contains(&transport) == (how == Travel::Tcp) => Ok(()),
        ref others => Err(format!("{link} is used by {others:?}")),
    }
}

/// Waits until a link is used in this way only.
pub fn until_travels(client: &Peer, link: &str, how: Travel, limit: Duration) -> Value {
    client.until(limit, &format!("{link} travels by {how:?}"), |status| travels(status, link, how))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_paths_that_carry_data_say_how_a_link_travels() {
        let path = |link: &str, state: &str, transport: &str| json!({ "class": "default", "link": link, "state": state, "transport": transport });
        let status = json!({ "paths": [
            path("eth1", "down", "quic"), path("eth1", "active", "mptcp"), path("eth2", "active", "quic"),
            path("eth2", "standby", "tcp"), path("eth3", "active", "quic"), path("eth3", "active", "tcp"),
        ] });
        assert_eq!((transports(&status, "eth1"), transports(&status, "eth2")), (vec!["mptcp"], vec!["quic"]));
        let is = |link, how| travels(&status, link, how).is_ok();
        assert!(is("eth1", Travel::Tcp) && !is("eth1", Travel::Quic));
        assert!(is("eth2", Travel::Quic) && !is("eth2", Travel::Tcp));
        for nothing in ["eth3", "eth4"] {
            assert!(!is(nothing, Travel::Tcp) && !is(nothing, Travel::Quic), "{nothing}");
        }
    }
}
