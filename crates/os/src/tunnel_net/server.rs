//! The network configuration of a server: its addresses, forwarding, the filter of its clients' packets, and
//! source NAT for those to other networks.

use ipnet::IpNet;

use super::{Families, SiteNet, enable_forwarding, prepare_device};
use crate::{
    error::OsError,
    firewall::{ClientFilter, Exit, Masquerade, Origin, Profile, Rules, SessionProfiles},
    netlink::Interface,
    netlink::Netlink,
    undo::{Step, UndoJournal},
};

/// The configuration that a server needs.
#[derive(Clone, Debug)]
pub struct ServerNetConfig {
    /// The TUN device.
    pub tun: Interface,
    /// The networks of the clients, at most one for each IP version. The server gets the first address of
    /// each.
    pub subnets: Vec<IpNet>,
    /// The MTU of the TUN device, in bytes.
    pub mtu: u32,
    /// Translation of the clients' addresses.
    pub nat: Nat,
    /// Which packets of clients the machine forwards and takes.
    pub access: PacketAccess,
}

/// Which packets of clients a server's machine forwards and takes.
#[derive(Clone, Debug, Default)]
pub struct PacketAccess {
    /// Whether clients reach each other.
    pub is_isolated: bool,
    /// Networks that packets do not reach, unless a rule names one address of them.
    pub blocked: Vec<IpNet>,
    /// Ports of the machine that lead to clients: see [`ClientFilter::forwarded`].
    pub forwarded: Vec<(u8, u16, u16)>,
    /// The rules of kinds of users; the first counts for sessions without a profile of their own.
    pub profiles: Vec<Profile>,
}

/// Address translation at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nat {
    /// Packets of clients leave with the server's address.
    Masquerade,
    /// Packets of clients keep their addresses: the network behind the server needs a route back to them.
    None,
}

/// The network configuration of a server, applied.
#[derive(Debug)]
pub struct ServerNet {
    tun: Interface,
    netlink: Netlink,
    addresses: Vec<IpNet>,
    filter: ClientFilter,
    nat_rules: Option<Rules>,
}

impl ServerNet {
    /// Applies the configuration.
    pub fn configure(undo: &mut UndoJournal, config: &ServerNetConfig) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        check_subnets_are_free(&mut netlink, config)?;
        prepare_device(&config.tun.name);
        netlink.set_mtu(config.tun.index, config.mtu)?;
        netlink.set_up(config.tun.index)?;

        let addresses: Vec<IpNet> = config.subnets.iter().copied().map(first_address).collect();
        let filter = ClientFilter {
            tun: config.tun.name.clone(),
            addresses: addresses.clone(),
            // Clients whose addresses are translated have none beyond the server.
            accepts_inbound: config.nat == Nat::None,
            is_isolated: config.access.is_isolated,
            blocked: config.access.blocked.clone(),
            forwarded: config.access.forwarded.clone(),
            profiles: config.access.profiles.clone(),
        };
        let mut steps = vec![Step::ClientFilter(filter.clone())];
        steps.extend(
            addresses.iter().map(|&address| Step::Address { interface: config.tun.clone(), address }),
        );
        let nat_rules = (config.nat == Nat::Masquerade).then(|| nat_rules(config));
        steps.extend(nat_rules.clone().map(|rules| Step::Firewall { rules }));
        undo.apply(&steps)?;
        // The table of forwards, which is made later, is removed by this name.
        let name = format!("{} forwards", config.tun.name);
        undo.record(Step::Firewall { rules: Rules { name, ..Rules::default() } })?;
        let families = Families {
            v4: config.subnets.iter().any(|subnet| matches!(subnet, IpNet::V4(_))),
            v6: config.subnets.iter().any(|subnet| matches!(subnet, IpNet::V6(_))),
        };
        enable_forwarding(undo, &mut netlink, families)?;
        Ok(Self { tun: config.tun.clone(), netlink, addresses, filter, nat_rules })
    }

    /// The profiles of sessions; all have the first one.
    pub fn session_profiles(&self) -> SessionProfiles {
        SessionProfiles::new(self.filter.clone())
    }

    /// The server's addresses in the tunnel, with the prefix lengths of the subnets.
    pub fn addresses(&self) -> &[IpNet] {
        &self.addresses
    }

    /// The networks behind clients; there are none yet.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn sites(&self) -> Result<SiteNet, OsError> {
        SiteNet::new(self.tun.clone(), self.nat_rules.clone())
    }

    /// Changes the MTU of the TUN device, in bytes.
    pub fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        self.netlink.set_mtu(self.tun.index, mtu)
    }
}

/// The first address of a subnet that a host can have: for IPv4 the one after the network address, for IPv6
/// the one after the subnet-router anycast address (RFC 4291, section 2.6.1).
pub fn first_address(subnet: IpNet) -> IpNet {
    let first = match subnet {
        IpNet::V4(v4) if v4.prefix_len() <= 30 => {
            IpNet::new((u32::from(v4.network()) + 1).to_be_bytes().into(), v4.prefix_len())
        }
        IpNet::V6(v6) if v6.prefix_len() <= 126 => {
            IpNet::new((u128::from(v6.network()) + 1).to_be_bytes().into(), v6.prefix_len())
        }
        small => IpNet::new(small.network(), small.prefix_len()),
    };
    first.unwrap_or(subnet)
}

/// Fails if another interface has an address in one of the subnets: of two interfaces in one network the
/// kernel would use the one that was configured first.
fn check_subnets_are_free(netlink: &mut Netlink, config: &ServerNetConfig) -> Result<(), OsError> {
    for info in netlink.addresses()? {
        let inside = config.subnets.iter().find(|subnet| subnet.contains(&info.address.addr()));
        let Some(&subnet) = inside else { continue };
        if info.index == config.tun.index {
            continue;
        }
        let links = netlink.links()?;
        let interface = links.into_iter().find(|link| link.index == info.index).map(|link| link.name);
        let interface = interface.unwrap_or_else(|| info.index.to_string());
        return Err(OsError::SubnetInUse { subnet, address: info.address, interface });
    }
    Ok(())
}

fn nat_rules(config: &ServerNetConfig) -> Rules {
    let masquerade = config.subnets.iter().map(|subnet| Masquerade {
        from: Origin::Network(subnet.trunc()),
        exit: Exit::AnyBut(config.tun.name.clone()),
    });
    Rules { name: config.tun.name.clone(), masquerade: masquerade.collect(), ..Rules::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_has_the_first_address() {
        let first = |text: &str| first_address(text.parse().unwrap()).to_string();
        assert_eq!(first("10.0.0.0/24"), "10.0.0.1/24");
        assert_eq!(first("10.0.0.77/24"), "10.0.0.1/24");
        assert_eq!(first("fd00::/64"), "fd00::1/64");
        assert_eq!(first("10.0.0.4/31"), "10.0.0.4/31");
        assert_eq!(first("10.0.0.4/32"), "10.0.0.4/32");
        assert_eq!(first("255.255.255.252/30"), "255.255.255.253/30");
    }
}
