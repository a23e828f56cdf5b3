//! Default values of options, and where configuration files are.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_types::ByteSize;

/// Where a server looks for its configuration unless `--config` names another file.
pub const SERVER_FILE: &str = "/etc/mpvpn/server.toml";
/// Where a client looks for its configuration unless `--config` names another file.
pub const CLIENT_FILE: &str = "/etc/mpvpn/client.toml";
/// All IPv4 and all IPv6 addresses.
pub(crate) const ALL_NETWORKS: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];
/// Default of `--tun-name`.
pub const TUN_NAME: &str = "mpvpn0";

/// Default of `--listen`: all IPv4 addresses of the machine.
pub(crate) const DEFAULT_LISTEN: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT);
/// Default of `--subnet`: 253 clients. A larger network collides with networks of clients more often.
pub(crate) const DEFAULT_SUBNET: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 24);
pub(crate) const DEFAULT_SUBNET6: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x6d70, 0x766e, 0, 0, 0, 0, 0), 64);
/// Default port of a server: that of HTTPS, which most firewalls allow.
pub(crate) const DEFAULT_PORT: u16 = 443;

/// Default of `--max-clients`, if the subnet has so many addresses. Chosen (open question in
/// docs/design/relay.md): more need more memory, fewer refuse clients.
pub(crate) const DEFAULT_MAX_CLIENTS: u32 = 4096;

/// Default of `--max-relays`. Chosen (open question in docs/design/relay.md): more need more memory and file
/// descriptors, fewer refuse connections of busy servers.
pub(crate) const DEFAULT_MAX_RELAYS: u32 = 32_768;
/// Default of `--max-user-relays`: a quarter of [`DEFAULT_MAX_RELAYS`], so that one user leaves most of them
/// to others. Fewer would refuse connections of busy machines, more would let one user take the place of
/// others.
pub(crate) const DEFAULT_MAX_USER_RELAYS: u32 = 8192;

/// Least of `--max-memory`: a server without clients has 16 MB. Less would leave nothing for clients; more
/// would exclude small machines. Chosen.
pub(crate) const MIN_MEMORY: ByteSize = ByteSize::from_bytes(64_000_000);

pub(crate) fn first_repeated<T: PartialEq>(items: &[T]) -> Option<&T> {
    items.iter().enumerate().find(|(at, item)| items[..*at].contains(item)).map(|(_, item)| item)
}
