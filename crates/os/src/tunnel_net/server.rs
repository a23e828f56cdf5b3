//! The server's end: its addresses, forwarding, and address translation for what clients send beyond.

use ipnet::IpNet;

use super::{Families, InForce, enable_forwarding, prepare_device};
use crate::{
    error::OsError,
    firewall::{Exit, Masquerade, Origin, Rules},
    netlink::Netlink,
    undo::{Interface, Step, UndoJournal},
};

/// What a server wants.
#[derive(Clone, Debug)]
pub struct ServerNetConfig {
    /// The TUN device.
    pub tun: Interface,
    /// The clients' networks, one a family. The server gets the first address of each.
    pub subnets: Vec<IpNet>,
    /// Largest packet that the tunnel takes, in bytes.
    pub mtu: u32,
    /// What happens to the addresses of clients.
    pub nat: Nat,
}

/// Address translation at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nat {
    /// Clients appear with the server's address.
    Masquerade,
    /// Clients appear with their own: the network behind must know the way back.
    None,
}

/// A server's machine.
#[derive(Debug)]
pub struct ServerNet {
    tun: Interface,
    netlink: Netlink,
    addresses: Vec<IpNet>,
    _in_force: InForce,
}

impl ServerNet {
    /// Sets everything up.
    pub fn up(undo: &mut UndoJournal, config: &ServerNetConfig) -> Result<Self, OsError> {
        let mut netlink = Netlink::open()?;
        check_free(&mut netlink, config)?;
        prepare_device(&config.tun.name);
        netlink.set_mtu(config.tun.index, config.mtu)?;
        netlink.set_up(config.tun.index)?;

        let addresses: Vec<IpNet> = config.subnets.iter().copied().map(first_address).collect();
        let mut steps: Vec<Step> = addresses
            .iter()
            .map(|&address| Step::Address { interface: config.tun.clone(), address })
            .collect();
        if config.nat == Nat::Masquerade {
            steps.push(Step::Firewall { rules: rules(config) });
        }
        let mut in_force = InForce::default();
        in_force.change_to(undo, steps)?;
        let families = Families {
            v4: config.subnets.iter().any(|subnet| matches!(subnet, IpNet::V4(_))),
            v6: config.subnets.iter().any(|subnet| matches!(subnet, IpNet::V6(_))),
        };
        enable_forwarding(undo, &mut netlink, families)?;
        Ok(Self { tun: config.tun.clone(), netlink, addresses, _in_force: in_force })
    }

    /// The server's addresses in the tunnel, with the lengths of the subnets' prefixes.
    pub fn addresses(&self) -> &[IpNet] {
        &self.addresses
    }

    /// Changes the largest packet that the tunnel takes, in bytes.
    pub fn set_mtu(&mut self, mtu: u32) -> Result<(), OsError> {
        self.netlink.set_mtu(self.tun.index, mtu)
    }
}

/// The first address of a subnet that a host can have: for IPv4 the one behind the network's own,
/// for IPv6 the one behind the routers' anycast address (RFC 4291, section 2.6.1).
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

/// With two interfaces in one network the kernel would send to the one that came first.
fn check_free(netlink: &mut Netlink, config: &ServerNetConfig) -> Result<(), OsError> {
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

fn rules(config: &ServerNetConfig) -> Rules {
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
