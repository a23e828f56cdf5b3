//! Which name servers the programs of this machine ask.
//!
//! In: the name servers that are wanted while a tunnel is up. Out: a machine that asks them: through systemd-resolved
//! where programs ask that, else by `/etc/resolv.conf`. Always holds: what is written into the file is in the journal
//! first, with what was there; it is put back only while the file is as we left it; and a network namespace never
//! changes the file of the whole machine.

mod file;
mod resolved;

use std::{net::IpAddr, path::Path};

use ipnet::IpNet;

pub use file::Rewrite;
pub(crate) use file::{make, revert};

use crate::{
    error::OsError,
    netlink::Netlink,
    undo::{Step, UndoJournal},
};

/// The file that programs' resolvers read (resolv.conf(5)).
const FILE: &str = "/etc/resolv.conf";
/// The program that tells systemd-resolved.
const RESOLVECTL: &str = "resolvectl";
/// The name servers of the links, as systemd-resolved knows them.
const OF_RESOLVED: &str = "/run/systemd/resolve/resolv.conf";
/// Name servers that a resolver asks at most: `MAXNS` of resolv.conf(5).
const MOST: usize = 3;

/// The resolver of this machine while a tunnel is up.
#[derive(Debug)]
pub struct ResolverConfig {
    tun: String,
    servers: Vec<IpAddr>,
    way: Option<Way>,
}

/// How programs learned of our name servers.
#[derive(Debug)]
enum Way {
    /// From systemd-resolved, which forgets them with the TUN device.
    Resolved,
    /// From a file.
    File(Step),
}

impl ResolverConfig {
    /// Changes nothing yet. `tun` is the name of the TUN device.
    pub fn new(tun: &str) -> Self {
        Self { tun: tun.to_owned(), servers: Vec::new(), way: None }
    }

    /// Lets programs ask these name servers, or with none those of before. Does nothing if it was asked for the same
    /// the last time, whatever came of it.
    ///
    /// # Errors
    /// If neither systemd-resolved nor the file takes them. Then the machine is as it was.
    pub fn apply(&mut self, undo: &mut UndoJournal, servers: &[IpAddr]) -> Result<(), OsError> {
        if self.servers == servers {
            return Ok(());
        }
        servers.clone_into(&mut self.servers);
        match self.way.take() {
            Some(Way::File(step)) => {
                for error in undo.revert(&[step]) {
                    tracing::warn!(%error, "the name servers of before are not back");
                }
            }
            Some(Way::Resolved) => resolved::revert(Path::new(RESOLVECTL), &self.tun),
            None => {}
        }
        if servers.is_empty() {
            return Ok(());
        }
        if resolved::is_asked(&nameservers(Path::new(FILE))) {
            match resolved::apply(Path::new(RESOLVECTL), &self.tun, servers) {
                Ok(()) => {
                    self.way = Some(Way::Resolved);
                    return Ok(());
                }
                Err(reason) => tracing::debug!(reason, "systemd-resolved does not take name servers"),
            }
        }
        let step = Step::Resolver(file::plan(Path::new(FILE), &text(servers))?);
        if let Err(error) = undo.make(std::slice::from_ref(&step)) {
            drop(undo.revert(&[step]));
            return Err(error);
        }
        self.way = Some(Way::File(step));
        Ok(())
    }

    /// Name servers that are asked past the tunnel although everything goes into it: they are on a link's own network,
    /// or systemd-resolved asks them over their link.
    ///
    /// # Errors
    /// If the kernel does not tell its addresses.
    pub fn name_servers_outside_tunnel(&self) -> Result<Vec<IpAddr>, OsError> {
        let asked = match &self.way {
            Some(_) => self.servers.clone(),
            None => nameservers(Path::new(FILE)),
        };
        if self.way.is_none() && resolved::is_asked(&asked) {
            return Ok(nameservers(Path::new(OF_RESOLVED)));
        }
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let is_tun = |index| links.iter().any(|link| link.index == index && link.name == self.tun);
        let networks = netlink.addresses()?.into_iter().filter(|info| !is_tun(info.index));
        let networks: Vec<IpNet> = networks.map(|info| info.address.trunc()).collect();
        Ok(on_links(&asked, &networks))
    }
}

fn on_links(servers: &[IpAddr], networks: &[IpNet]) -> Vec<IpAddr> {
    let is_on_link = |ip: &&IpAddr| {
        !ip.is_loopback() && networks.iter().any(|net| net.contains(*ip) || is_link_local(**ip))
    };
    servers.iter().filter(is_on_link).copied().collect()
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The name servers of a file, none if it cannot be read.
fn nameservers(path: &Path) -> Vec<IpAddr> {
    file::read(path).map(|text| parse(&text)).unwrap_or_default()
}

/// The first words after `nameserver` that are addresses; a zone (`fe80::1%eth0`) is left out.
fn parse(text: &str) -> Vec<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let word = words.next().filter(|word| *word == "nameserver").and_then(|_| words.next())?;
        word.split('%').next()?.parse().ok()
    };
    text.lines().filter_map(address).take(MOST).collect()
}

/// A file with these name servers and nothing else: search lists and options are about those of before.
fn text(servers: &[IpAddr]) -> String {
    let mut text = "# Made by mpvpn, which puts back what was here when the tunnel ends.\n".to_owned();
    servers.iter().for_each(|server| text += &format!("nameserver {server}\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let servers = ips(&["10.0.0.1", "fd00::1"]);
        assert_eq!(parse(&text(&servers)), servers);
        let strange = "; nameserver 1.1.1.1\n#nameserver 9.9.9.9\nnameserver\nnameserver x\n \
                       nameserver\tfe80::1%eth0 \nsearch a.example\nnameserver 192.0.2.1 # the second\n";
        assert_eq!(parse(strange), ips(&["fe80::1", "192.0.2.1"]));
        assert_eq!(parse(&"nameserver 192.0.2.1\n".repeat(9)).len(), MOST);
    }

    #[test]
    fn name_servers_on_a_link_are_found() {
        let networks: Vec<IpNet> = ["192.168.1.0/24", "127.0.0.0/8"].map(|net| net.parse().unwrap()).into();
        let servers = ips(&["192.168.1.1", "127.0.0.1", "9.9.9.9", "fe80::1"]);
        assert_eq!(on_links(&servers, &networks), ips(&["192.168.1.1", "fe80::1"]));
    }
}
