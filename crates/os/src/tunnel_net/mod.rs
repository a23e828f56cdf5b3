//! A machine set up for a tunnel: the client's end with the TUN devices of its classes, the server's end, and a LAN
//! behind a client.
//!
//! In: a TUN device, addresses, routes and an MTU, now and whenever they change. Out: a machine that
//! sends its packets accordingly. Always holds: every change is in the journal before it is made;
//! what stays the same over a change is not touched, so connections survive it; new things are
//! made before old ones are taken away.

mod classes;
mod client;
mod server;
mod share;

use std::collections::BTreeSet;

pub use classes::{ClassNet, ClassSteering, ClassTun, DeviceAddresses};
pub use client::{ClientNet, ClientNetConfig, ClientNetState, Routes};
pub use server::{Nat, ServerNet, ServerNetConfig, first_address};
pub use share::{ShareNet, ShareSource};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    error::OsError,
    netlink::{Family, Netlink},
    sysctl,
    undo::{Step, UndoJournal},
};

/// The steps that are in force.
#[derive(Debug, Default)]
struct InForce(Vec<Step>);

impl InForce {
    /// Makes what is wanted and not there, in order, then takes back what is there and not wanted, in
    /// reverse order. If something cannot be made, everything stays as it was before the call.
    fn change_to(&mut self, undo: &mut UndoJournal, wanted: Vec<Step>) -> Result<(), OsError> {
        let now: BTreeSet<&Step> = self.0.iter().collect();
        let missing: Vec<Step> = wanted.iter().filter(|step| !now.contains(step)).cloned().collect();
        if let Err(error) = undo.make(&missing) {
            warn_of(undo.revert(&missing));
            return Err(error);
        }
        let wanted: BTreeSet<Step> = wanted.into_iter().collect();
        self.0.extend(missing);
        let (kept, old): (Vec<Step>, Vec<Step>) = self.0.drain(..).partition(|step| wanted.contains(step));
        self.0 = kept;
        warn_of(undo.revert(&old));
        Ok(())
    }
}

fn warn_of(errors: Vec<OsError>) {
    for error in errors {
        tracing::warn!(%error, "could not take back what is no longer wanted");
    }
}

/// Prepares a TUN device before it comes up. These settings go when the device goes; where one does
/// not exist (no IPv6), nothing is lost.
fn prepare_device(name: &str) {
    let settings = [
        // No link-local address: nobody on the other side would answer for it.
        ("ipv6", "addr_gen_mode", "1"),
        ("ipv6", "accept_ra", "0"),
        // When the first of two addresses goes, the second stays.
        ("ipv4", "promote_secondaries", "1"),
        // ICMP errors about what the tunnel cannot carry come from our own address.
        ("ipv4", "accept_local", "1"),
        ("ipv4", "rp_filter", "0"),
        // Clients reach each other through us only: there is no better way to redirect to.
        ("ipv4", "send_redirects", "0"),
    ];
    for (family, setting, value) in settings {
        let _ = sysctl::write(&sysctl::interface(family, name, setting), value);
    }
}

/// Lets the machine pass packets on between interfaces.
///
/// An interface that learns its IPv6 routes by router advertisement would lose them, because routers
/// ignore such advertisements, unless told otherwise (accept_ra = 2, kernel's ip-sysctl.rst) first.
fn enable_forwarding(
    undo: &mut UndoJournal,
    netlink: &mut Netlink,
    families: Families,
) -> Result<(), OsError> {
    if families.v4 {
        sysctl::set(undo, "net/ipv4/ip_forward", "1")?;
    }
    const ALL_V6: &str = "net/ipv6/conf/all/forwarding";
    if !families.v6 || sysctl::read(ALL_V6)? == "1" {
        return Ok(());
    }
    for link in netlink.links()? {
        let key = sysctl::interface("ipv6", &link.name, "accept_ra");
        if sysctl::read(&key).is_ok_and(|value| value == "1") {
            sysctl::set(undo, &key, "2")?;
        }
    }
    sysctl::set(undo, ALL_V6, "1")
}

/// Which protocols something is about.
#[derive(Clone, Copy, Debug)]
struct Families {
    v4: bool,
    v6: bool,
}

fn family_of(network: IpNet) -> Family {
    match network {
        IpNet::V4(_) => Family::V4,
        IpNet::V6(_) => Family::V6,
    }
}

fn everything(family: Family) -> IpNet {
    match family {
        Family::V4 => Ipv4Net::default().into(),
        Family::V6 => Ipv6Net::default().into(),
    }
}
