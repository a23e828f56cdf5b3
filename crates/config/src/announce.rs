//! The networks behind a client: `announce`, `accept-from` and `masquerade`.
//!
//! In: values of the file or the command line. Out: a [`SiteConfig`]. Always holds: networks do not overlap,
//! neither as they are nor as they are announced; one that is announced as another has its length.

use std::{fmt, net::IpAddr};

use super::{
    forward::{Forward, ForwardHost},
    servers::Server,
    text_or_table::TextOrTable,
};
use ipnet::IpNet;
use mpvpn_input::{
    Error, Result,
    rules::Prefix,
    values::{One, Text},
};
use serde::Deserialize;

/// The most networks: as many as a server takes of one session.
const MAX_NETWORKS: usize = 256;

/// A network behind a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteNetwork {
    /// As its hosts have it.
    pub network: IpNet,
    /// As others know it.
    pub announced: IpNet,
}

impl fmt::Display for SiteNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.network == self.announced {
            true => write!(f, "{}", self.network),
            false => write!(f, "{} as {}", self.network, self.announced),
        }
    }
}

impl Text for SiteNetwork {
    const EXPECTED: &'static str = "a network in quotes, as in \"192.168.7.0/24\", or one that is announced as another: \
         { network = \"192.168.1.0/24\", as = \"10.77.1.0/24\" }";
    const EXAMPLE: &'static str = "192.168.7.0/24";

    fn read(text: &str) -> Result<Self, String> {
        let (network, announced) = text.split_once('=').unwrap_or((text, text));
        Ok(Self { network: Prefix::read(network)?.0, announced: Prefix::read(announced)?.0 })
    }
}

/// A network that is announced as another.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mapped {
    #[serde(with = "One::<Prefix>")]
    network: Option<Prefix>,
    #[serde(with = "One::<Prefix>", rename = "as")]
    announced: Option<Prefix>,
}

impl TextOrTable for SiteNetwork {
    type Table = Mapped;

    fn of_table(Mapped { network, announced }: Mapped) -> Result<Self, String> {
        let (network, announced) = network.zip(announced).ok_or(Self::EXPECTED)?;
        Ok(Self { network: network.0, announced: announced.0 })
    }
}

/// The networks behind a client, and who reaches them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteConfig {
    /// The networks.
    pub networks: Vec<SiteNetwork>,
    /// Sources from which connections may come in from the tunnel.
    pub accept_from: Vec<IpNet>,
    /// Whether these have the client's address in the network.
    pub masquerade: bool,
    /// Ports of the client's address in the tunnel that lead to hosts behind it.
    pub forwards: Vec<Forward>,
}

impl SiteConfig {
    /// Checks the networks; `servers` are where the client connects to. `is_shared`: hosts of a LAN use the
    /// tunnel, and so networks that the server assigns.
    pub(super) fn resolve(self, servers: &[Server], is_shared: bool) -> Result<Self> {
        let Self { networks, accept_from, masquerade, forwards } = &self;
        for Forward { ports, to, .. } in forwards {
            if let ForwardHost::User(user) = &to.host {
                return Err(Error::usage(
                    format!("[[forward]] {ports} leads to the user {user}, whom only a server knows"),
                    "give the address of a host behind this machine, as in 192.168.7.9:443",
                ));
            }
        }
        let is_given = *masquerade && forwards.is_empty() || !accept_from.is_empty() && !is_shared;
        if networks.is_empty() && is_given {
            let option = if *masquerade { "masquerade" } else { "accept-from" };
            return Err(Error::usage(
                format!("--{option} is given, and no network is announced"),
                "name the network behind this machine: --announce 192.168.7.0/24",
            ));
        }
        if networks.len() > MAX_NETWORKS {
            return Err(Error::usage(
                format!(
                    "--announce names {} networks, and a server takes {MAX_NETWORKS} of a client",
                    networks.len()
                ),
                "announce networks that contain several of them",
            ));
        }
        let next = "name the networks behind this machine";
        for (at, one) in networks.iter().enumerate() {
            let wrong = |why: String, next: &str| Err(Error::usage(format!("--announce {one} {why}"), next));
            let (a, b) = (one.network, one.announced);
            if a.prefix_len() == 0 || b.prefix_len() == 0 {
                return wrong("means every address".to_owned(), next);
            }
            if (a.addr().is_ipv4(), a.prefix_len()) != (b.addr().is_ipv4(), b.prefix_len()) {
                let next = "each host has the same last bits in both: give a network of the same length";
                return wrong(format!("maps a network to one that is not /{}", a.prefix_len()), next);
            }
            if let Some(server) = servers.iter().find(|server| one.contains_server(server.address.ip())) {
                return wrong(format!("contains the server, {}", server.address.host), next);
            }
            for other in &networks[..at] {
                let overlap = |a: IpNet, b: IpNet| a.contains(&b) || b.contains(&a);
                if overlap(a, other.network) || overlap(b, other.announced) {
                    return wrong(format!("overlaps --announce {other}"), "announce each address once");
                }
            }
        }
        Ok(self)
    }
}

impl SiteNetwork {
    /// Whether the way to the server would lead into the tunnel of others.
    pub fn contains_server(&self, server: Option<IpAddr>) -> bool {
        server.is_some_and(|ip| self.announced.contains(&ip.to_canonical()))
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_identity::trust::Trust;

    use super::*;
    use crate::ClientConfig;

    fn read(list: &str) -> Result<Vec<SiteNetwork>, String> {
        #[derive(Deserialize)]
        struct File {
            #[serde(deserialize_with = "crate::text_or_table::list")]
            announce: Vec<SiteNetwork>,
        }
        toml::from_str::<File>(&format!("announce = {list}"))
            .map(|file| file.announce)
            .map_err(|error| error.to_string())
    }

    fn resolve(networks: &[&str], accept_from: &[&str]) -> Result<SiteConfig, String> {
        let config = SiteConfig {
            networks: networks.iter().map(|text| SiteNetwork::read(text).unwrap()).collect(),
            accept_from: accept_from.iter().map(|net| net.parse().unwrap()).collect(),
            ..SiteConfig::default()
        };
        let client = ClientConfig::new("203.0.113.1:443".parse().unwrap(), Trust::Insecure);
        config.resolve(&client.servers, false).map_err(|error| error.to_string())
    }

    #[test]
    fn a_network_is_a_text_or_a_table_and_several_are_a_list() {
        let mapped = r#"{ network = "192.168.1.0/24", as = "10.77.1.0/24" }"#;
        let expected = ["192.168.7.0/24", "192.168.1.0/24=10.77.1.0/24"];
        let expected = expected.map(|text| SiteNetwork::read(text).unwrap());
        assert_eq!(read(&format!(r#"["192.168.7.0/24", {mapped}]"#)).unwrap(), expected);
        assert_eq!(read(mapped).unwrap(), expected[1..]);
        assert_eq!(read("\"192.168.7.0/24\"").unwrap(), expected[..1]);
        assert_eq!(expected[1].to_string(), "192.168.1.0/24 as 10.77.1.0/24");
        for (bad, why) in [
            ("7", "a network in quotes"),
            ("\"192.168.7.1/24\"", "192.168.7.0/24"),
            (r#"{ network = "192.168.1.0/24" }"#, "missing field `as`"),
            (r#"{ network = "192.168.1.0/24", to = "10.0.0.0/24" }"#, "unknown field `to`"),
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.contains(why) && error.contains("line 1"), "{bad}: {error}");
        }
    }

    #[test]
    fn networks_that_contradict_each_other_or_the_server_are_refused() {
        assert!(
            resolve(&["192.168.1.0/24=10.77.1.0/24", "192.168.2.0/24=10.77.2.0/24"], &["0.0.0.0/0"]).is_ok()
        );
        for (networks, accept_from, why) in [
            (&[][..], &["10.0.0.0/8"][..], "no network is announced"),
            (&["0.0.0.0/0"], &[], "means every address"),
            (&["192.168.1.0/24=10.77.1.0/25"], &[], "is not /24"),
            (&["192.168.1.0/24=fd00::/24"], &[], "is not /24"),
            (&["203.0.113.0/24"], &[], "contains the server, 203.0.113.1"),
            (&["192.168.0.0/16", "192.168.1.0/24"], &[], "overlaps --announce 192.168.0.0/16"),
            (&["192.168.1.0/24=10.77.1.0/24", "192.168.2.0/24=10.77.1.0/24"], &[], "overlaps"),
        ] {
            let error = resolve(networks, accept_from).unwrap_err();
            assert!(error.contains(why), "{networks:?}: {error}");
        }
    }
}
