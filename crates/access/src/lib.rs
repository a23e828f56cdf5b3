//! Which destinations a server relays TCP connections and UDP flows to. The rules count for packets, too: for
//! those the kernel applies them (`os::firewall::client_filter`), with other defaults.
//!
//! In: the `[[access]]` rules of the configuration, the tunnel's networks, a user and a destination address.
//! Out: whether the connection is allowed, or what forbids it. Always holds: the first matching rule of the
//! configuration decides; if none matches, the server's own addresses in the tunnel and public addresses are
//! allowed, and nothing else. An address of the server's machine, of a link of it, or of metadata is allowed
//! only by a rule that names this one address. The caller resolves names first and checks every address, so a
//! name that resolves to another address later (DNS rebinding) gains no access.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use mpvpn_packet::public::{MACHINE_ONLY_NETWORKS, embedded_ipv4, is_machine_only, is_public};
use schemars::JsonSchema;
use serde::Deserialize;

use mpvpn_input::{
    rules::{Ports, Prefix, UserName},
    values::Filled,
};

/// Whether these users reach these destinations: by packets, and by connections that the server relays. The
/// first table that matches decides. Where none does, packets reach everything but loopback and link-local
/// addresses, metadata of clouds and the addresses of the server's machine outside the tunnel; relayed
/// connections reach public addresses and the server's own in the tunnel. Those that packets do not reach
/// then are matched by a table with `allow = true` only if its `to` names the one address, as 127.0.0.1.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "access")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[access]]")]
pub struct AccessRule {
    /// Whether the destination may be reached. If not, packets are answered with ICMP "communication
    /// administratively prohibited", and requests with status 403
    pub allow: bool,
    /// Names of the users to whom the table applies [default: all]
    #[serde(default, with = "Filled::<UserName>")]
    pub users: Vec<String>,
    /// Destination networks or addresses; a name in a request counts as the addresses that it resolves to
    /// [default: all]
    #[serde(default, with = "Filled::<Prefix>")]
    pub to: Vec<IpNet>,
    /// Destination ports, or ranges of ports [default: all ports, and protocols without ports, as ping]
    #[serde(default, with = "Filled::<Ports>")]
    pub ports: Vec<Ports>,
}

impl AccessRule {
    /// Whether the rule is about this user and destination. `behind`: the IPv4 address that a translated IPv6
    /// destination stands for. `is_guarded`: whether only a rule that names the address allows it.
    fn matches(
        &self,
        user: &str,
        to: SocketAddr,
        behind: Option<IpAddr>,
        is_guarded: impl FnOnce() -> bool,
    ) -> bool {
        let has = |ip: IpAddr| self.to.iter().any(|net| net.contains(&ip));
        // A forbidden IPv4 address is forbidden in its IPv6 form, too; an allowed one is allowed only as
        // written.
        let is_there = self.to.is_empty() || has(to.ip()) || !self.allow && behind.is_some_and(has);
        (self.users.is_empty() || self.users.iter().any(|name| name == user))
            && (self.ports.is_empty() || self.ports.iter().any(|ports| ports.range().contains(&to.port())))
            && is_there
            && (!self.allow || self.to.contains(&to.ip().into()) || !is_guarded())
    }

    /// The first network of an allowing rule that allows nothing, because each address of it would have to
    /// be named alone.
    pub fn ineffective_network(&self) -> Option<&IpNet> {
        let is_ineffective = |net: &&IpNet| {
            net.prefix_len() < net.max_prefix_len()
                && MACHINE_ONLY_NETWORKS.iter().any(|guarded| guarded.contains(*net))
        };
        self.to.iter().filter(|_| self.allow).find(is_ineffective)
    }
}

/// Why a connection is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// This `[[access]]` table forbids it, counted from 1.
    #[error("the table [[access]] number {0} of the server's file forbids it")]
    Rule(usize),
    /// The address belongs to the tunnel's network. Clients reach each other by packets, which show their
    /// source address; a relayed connection would hide it behind the server's.
    #[error("the address belongs to the network of the tunnel's clients")]
    Client,
    /// The address is not in the server's `routes`, and no rule allows it.
    #[error("the server's routes do not lead to the address")]
    NoRoute,
    /// The address is not public, and no rule allows it.
    #[error("the address is not public")]
    NotPublic,
    /// The address belongs to the server's machine, and no rule allows it.
    #[error("the address is the server's own")]
    Server,
}

/// The access rules of a server.
///
/// The first `[[access]]` that matches user, address and port decides. One that allows matches loopback and
/// link-local addresses, metadata ([`is_machine_only`]) and addresses of the server's machine outside the
/// tunnel only if it names the address alone. If none matches:
/// 1. the server's own addresses in the tunnel are allowed;
/// 2. the rest of the tunnel's networks is not;
/// 3. addresses that the server's routes do not have are not, if it has routes;
/// 4. addresses that are not public are not ([`is_public`]);
/// 5. addresses of the server's machine are not;
/// 6. everything else is allowed.
///
/// An IPv4 address that is written as an IPv6 one (`::ffff:192.0.2.1`) is the IPv4 address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    rules: Vec<AccessRule>,
    tunnel: Vec<IpNet>,
    /// Networks to which the server carries packets; `None`: everywhere.
    routes: Option<Vec<IpNet>>,
    is_isolated: bool,
}

impl Access {
    /// `rules`: those of the configuration, in order. `tunnel`: the server's addresses in the tunnel, each
    /// with the prefix length of the clients' network.
    pub fn new(rules: Vec<AccessRule>, tunnel: Vec<IpNet>) -> Self {
        Self { rules, tunnel, routes: None, is_isolated: false }
    }

    /// The same for a server that carries packets to these networks only.
    #[must_use]
    pub fn with_routes(self, routes: Vec<IpNet>) -> Self {
        Self { routes: Some(routes), ..self }
    }

    /// The same, and whatever the rules say no connection leads to a client if `is_isolated`.
    #[must_use]
    pub fn with_isolation(self, is_isolated: bool) -> Self {
        Self { is_isolated, ..self }
    }

    /// Whether an address is of the tunnel's networks and not the server's. `behind` as in
    /// [`AccessRule::matches`].
    fn is_client(&self, ip: IpAddr, behind: Option<IpAddr>) -> bool {
        let is_of = |net: &IpNet| net.contains(&ip) || behind.is_some_and(|ip| net.contains(&ip));
        self.tunnel.iter().all(|net| net.addr() != ip) && self.tunnel.iter().any(is_of)
    }

    fn has_route(&self, ip: IpAddr) -> bool {
        self.routes.as_ref().is_none_or(|routes| routes.iter().any(|net| net.contains(&ip)))
    }

    /// Whether `user` may connect to `to`. `is_own` says whether an address belongs to the server's machine;
    /// it is called only if no earlier rule decides, as it may have to read the kernel's addresses.
    ///
    /// # Errors
    /// The rule that forbids the connection.
    pub fn check(
        &self,
        user: &str,
        to: SocketAddr,
        mut is_own: impl FnMut(IpAddr) -> bool,
    ) -> Result<(), Denied> {
        let ip = to.ip().to_canonical();
        let to = SocketAddr::new(ip, to.port());
        let behind = embedded_ipv4(ip);
        let is_server = self.tunnel.iter().any(|net| net.addr() == ip);
        let mut is_guarded =
            || !is_server && (is_machine_only(ip) || is_own(ip) || behind.is_some_and(&mut is_own));
        if self.is_isolated && self.is_client(ip, behind) {
            return Err(Denied::Client);
        }
        if let Some(at) = self.rules.iter().position(|rule| rule.matches(user, to, behind, &mut is_guarded)) {
            return if self.rules[at].allow { Ok(()) } else { Err(Denied::Rule(at + 1)) };
        }
        if is_server {
            Ok(())
        } else if self.is_client(ip, behind) {
            Err(Denied::Client)
        } else if !self.has_route(ip) || behind.is_some_and(|ip| !self.has_route(ip)) {
            Err(Denied::NoRoute)
        } else if !is_public(ip) {
            Err(Denied::NotPublic)
        } else if is_guarded() {
            Err(Denied::Server)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allow: bool) -> AccessRule {
        AccessRule { allow, users: vec![], to: vec![], ports: vec![] }
    }

    fn nets(list: &[&str]) -> Vec<IpNet> {
        list.iter().map(|net| net.parse().unwrap()).collect()
    }

    fn check(access: &Access, user: &str, to: &str) -> Result<(), Denied> {
        let own: IpAddr = "203.0.113.7".parse().unwrap();
        access.check(user, to.parse().unwrap(), |ip| ip == own)
    }

    #[test]
    fn without_rules_the_internet_and_the_server_in_the_tunnel_are_reachable() {
        let access = Access::new(vec![], nets(&["10.9.0.1/24", "2001:db8:9::1/64"]));
        for to in ["1.1.1.1:443", "[2001:db8::1]:25", "10.9.0.1:53", "[2001:db8:9::1]:53"] {
            assert_eq!(check(&access, "anna", to), Ok(()), "{to}");
        }
        assert_eq!(check(&access, "anna", "[::ffff:10.9.0.1]:53"), Ok(()));
        assert_eq!(check(&access, "anna", "192.168.0.1:80"), Err(Denied::NotPublic));
        assert_eq!(check(&access, "anna", "[::ffff:127.0.0.1]:80"), Err(Denied::NotPublic));
        assert_eq!(check(&access, "anna", "203.0.113.7:22"), Err(Denied::Server));
        assert_eq!(check(&access, "anna", "[::ffff:203.0.113.7]:22"), Err(Denied::Server));
        for client in ["10.9.0.2:80", "[2001:db8:9::2]:80"] {
            assert_eq!(check(&access, "anna", client), Err(Denied::Client), "{client}");
        }
    }

    #[test]
    fn where_no_packets_go_no_connections_go_unless_a_rule_allows_them() {
        let web = AccessRule { to: nets(&["203.0.113.9/32"]), ..rule(true) };
        let access = Access::new(vec![web], nets(&["10.9.0.1/24"]));
        let access = access.with_routes(nets(&["198.51.100.0/24", "192.168.0.0/16", "64:ff9b::/96"]));
        for to in ["198.51.100.9:443", "10.9.0.1:53", "203.0.113.9:443", "[64:ff9b::198.51.100.9]:80"] {
            assert_eq!(check(&access, "anna", to), Ok(()), "{to}");
        }
        for to in ["1.1.1.1:443", "[2001:db8::1]:443", "[64:ff9b::1.1.1.1]:443"] {
            assert_eq!(check(&access, "anna", to), Err(Denied::NoRoute), "{to}");
        }
        assert_eq!(check(&access, "anna", "192.168.0.1:80"), Err(Denied::NotPublic));
        assert_eq!(check(&access, "anna", "10.9.0.2:80"), Err(Denied::Client));
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let smtp = AccessRule { ports: vec![Ports::new(25, 25).unwrap()], ..rule(false) };
        let lan = AccessRule { to: nets(&["192.168.0.0/16", "fd00::/8"]), ..rule(true) };
        let bob = AccessRule { users: vec!["bob".into()], to: nets(&["203.0.113.7/32"]), ..rule(true) };
        let access = Access::new(vec![smtp.clone(), lan.clone(), bob], vec![]);
        assert_eq!(check(&access, "anna", "192.168.0.1:25"), Err(Denied::Rule(1)));
        assert_eq!(check(&access, "anna", "[::ffff:192.168.0.1]:80"), Ok(()));
        assert_eq!(check(&access, "anna", "[fd00::1]:80"), Ok(()));
        assert_eq!(check(&access, "anna", "1.1.1.1:26"), Ok(()));
        assert_eq!(check(&access, "bob", "203.0.113.7:80"), Ok(()));
        assert_eq!(check(&access, "anna", "203.0.113.7:80"), Err(Denied::Server));
        let access = Access::new(vec![lan, smtp], vec![]);
        assert_eq!(check(&access, "anna", "192.168.0.1:25"), Ok(()), "another order means something else");
        assert_eq!(check(&access, "anna", "1.1.1.1:25"), Err(Denied::Rule(2)));
    }

    #[test]
    fn what_is_forbidden_cannot_be_had_through_a_translator() {
        let net = AccessRule { to: nets(&["198.51.100.0/24"]), ..rule(false) };
        let access = Access::new(vec![net.clone()], nets(&["192.0.2.1/24"]));
        for to in ["198.51.100.9:80", "[64:ff9b::198.51.100.9]:80", "[2002:c633:6409::1]:80"] {
            assert_eq!(check(&access, "anna", to), Err(Denied::Rule(1)), "{to}");
        }
        assert_eq!(check(&access, "anna", "[64:ff9b::203.0.113.7]:80"), Err(Denied::Server));
        assert_eq!(check(&access, "anna", "[64:ff9b::192.0.2.9]:80"), Err(Denied::Client));
        assert_eq!(check(&access, "anna", "[64:ff9b::1.1.1.1]:80"), Ok(()));
        let lan = AccessRule { to: nets(&["10.0.0.0/8"]), ..rule(true) };
        let access = Access::new(vec![lan], vec![]);
        assert_eq!(check(&access, "anna", "[64:ff9b::10.0.0.1]:80"), Err(Denied::NotPublic));
    }

    #[test]
    fn a_rule_about_nothing_in_particular_is_about_everything() {
        let only = AccessRule { ports: vec![Ports::new(8000, 8100).unwrap()], ..rule(true) };
        let access = Access::new(vec![only, rule(false)], nets(&["10.9.0.1/24"]));
        for to in ["1.1.1.1:7999", "1.1.1.1:8101", "10.9.0.1:53"] {
            assert_eq!(check(&access, "anna", to), Err(Denied::Rule(2)), "{to}");
        }
        for to in ["1.1.1.1:8000", "192.168.0.1:8100", "10.9.0.2:8050"] {
            assert_eq!(check(&access, "anna", to), Ok(()), "{to}");
        }
    }

    /// Destinations of the server's machine and of what only it may ask, each with the network that a
    /// careless rule names and with the address alone.
    const GUARDED: [(&str, &str, &str); 20] = [
        ("127.0.0.1", "127.0.0.0/8", "127.0.0.1/32"),
        ("127.0.0.53", "127.0.0.0/24", "127.0.0.53/32"),
        ("0.0.0.0", "0.0.0.0/8", "0.0.0.0/32"),
        ("[::1]", "::/127", "::1/128"),
        ("[::]", "::/0", "::/128"),
        ("[::127.0.0.1]", "::/96", "::7f00:1/128"),
        ("[::ffff:127.0.0.1]", "127.0.0.0/8", "127.0.0.1/32"),
        ("[64:ff9b::127.0.0.1]", "64:ff9b::/96", "64:ff9b::7f00:1/128"),
        ("[2002:7f00:1::1]", "2002::/16", "2002:7f00:1::1/128"),
        ("169.254.7.7", "169.254.0.0/16", "169.254.7.7/32"),
        ("[fe80::1]", "fe80::/10", "fe80::1/128"),
        ("169.254.169.254", "169.254.169.254/31", "169.254.169.254/32"),
        ("[64:ff9b::169.254.169.254]", "64:ff9b::/96", "64:ff9b::a9fe:a9fe/128"),
        ("168.63.129.16", "168.63.0.0/16", "168.63.129.16/32"),
        ("100.100.100.200", "100.64.0.0/10", "100.100.100.200/32"),
        ("[fd00:ec2::254]", "fd00::/8", "fd00:ec2::254/128"),
        ("[fd20:ce::254]", "fd00::/8", "fd20:ce::254/128"),
        ("224.0.0.251", "224.0.0.0/4", "224.0.0.251/32"),
        ("203.0.113.7", "203.0.113.0/24", "203.0.113.7/32"),
        ("[64:ff9b::203.0.113.7]", "64:ff9b::/96", "64:ff9b::cb00:7107/128"),
    ];

    #[test]
    fn the_machine_and_metadata_are_reached_only_where_a_rule_names_the_address() {
        let web = vec![Ports::new(80, 80).unwrap()];
        let check = |rules: &[AccessRule], to: &str| {
            check(&Access::new(rules.to_vec(), nets(&["10.9.0.1/24"])), "anna", &format!("{to}:80"))
        };
        let others = [("10.9.0.2", "10.9.0.0/24", "10.9.0.2/32"), ("10.9.0.1", "10.9.0.0/24", "10.9.0.1/32")];
        let guarded = GUARDED.iter().map(|row| (row, true));
        for ((to, network, address), is_guarded) in guarded.chain(others.iter().map(|row| (row, false))) {
            let careless = [
                rule(true),
                AccessRule { ports: web.clone(), ..rule(true) },
                AccessRule { to: nets(&["0.0.0.0/0", "::/0"]), ..rule(true) },
                AccessRule { to: nets(&[network]), ports: web.clone(), ..rule(true) },
                AccessRule { users: vec!["anna".into()], ..rule(true) },
            ];
            let named = AccessRule { to: nets(&[address]), ..rule(true) };
            assert_eq!(check(&[], to).is_ok(), *to == "10.9.0.1", "{to}");
            assert_eq!(check(&[rule(false)], to), Err(Denied::Rule(1)), "{to}");
            for broad in careless {
                assert_eq!(check(std::slice::from_ref(&broad), to).is_ok(), !is_guarded, "{to}: {broad:?}");
                assert_eq!(check(&[broad.clone(), named.clone()], to), Ok(()), "{to}: {broad:?}");
                let denied = check(&[broad, rule(false), named.clone()], to);
                assert_eq!(denied, if is_guarded { Err(Denied::Rule(2)) } else { Ok(()) }, "{to}");
            }
            assert_eq!(check(std::slice::from_ref(&named), to), Ok(()), "{to}");
            let far = AccessRule { ports: vec![Ports::new(81, 81).unwrap()], ..named };
            assert_eq!(check(&[far], to).is_ok(), *to == "10.9.0.1", "{to}");
        }
        let loopback = AccessRule { to: nets(&["127.0.0.1/32"]), ..rule(true) };
        assert_eq!(check(std::slice::from_ref(&loopback), "[64:ff9b::127.0.0.1]"), Err(Denied::NotPublic));
        assert_eq!(check(&[loopback], "127.0.0.2"), Err(Denied::NotPublic));
    }

    #[test]
    fn no_rule_leads_to_an_isolated_client() {
        let access = Access::new(vec![rule(true)], nets(&["10.9.0.1/24"]));
        for to in ["10.9.0.2:80", "[64:ff9b::10.9.0.2]:80"] {
            assert_eq!(check(&access, "anna", to), Ok(()), "{to}");
            assert_eq!(check(&access.clone().with_isolation(true), "anna", to), Err(Denied::Client), "{to}");
        }
        for to in ["10.9.0.1:53", "192.168.0.1:80"] {
            assert_eq!(check(&access.clone().with_isolation(true), "anna", to), Ok(()), "{to}");
        }
    }
}
