//! The name servers that the programs of this machine ask.
//!
//! In: the name servers to use while a tunnel is up. Out: a machine that uses them: through systemd-resolved
//! if programs ask that, otherwise by `/etc/resolv.conf`. Always holds: the rewrite of the file, with its
//! previous content, is in the journal before the file is written; the file is restored only if no other
//! program has changed it; a process in a network namespace never changes the file of the whole machine. A
//! client of an ordinary user has a service of root do it.

mod file;
mod resolved;
mod service;

use std::{io, net::IpAddr, path::Path};

use ipnet::IpNet;
use mpvpn_types::Domain;

pub use file::FileRewrite;
pub(crate) use file::{apply, revert};
pub(crate) use service::{Request, STATE_OF_ROOT, carry_out, perform};
pub use service::{restore_after_service, serve as serve_clients};

use crate::{
    error::OsError,
    helper,
    netlink::Netlink,
    undo::{Step, UndoJournal},
};

/// The configuration of the stub resolver in the C library (resolv.conf(5)).
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The first line of that file while a tunnel is up.
const HEADER: &str = "# Made by mpvpn, which puts back what was here when the tunnel ends.";
/// The name servers that systemd-resolved itself asks (systemd-resolved.service(8)).
const RESOLVED_UPSTREAMS_FILE: &str = "/run/systemd/resolve/resolv.conf";
/// Name servers that the C library uses of a file: `MAXNS` of resolv.conf(5). Those beyond are not set.
const MAX_NAME_SERVERS: usize = 3;

/// The resolver configuration of this machine while a tunnel is up.
#[derive(Debug)]
pub struct ResolverConfig {
    tun: String,
    /// The servers and the domain of the last call of [`Self::apply`].
    wanted: (Vec<IpAddr>, Option<Domain>),
    applied: Option<Applied>,
}

/// The mechanism through which the tunnel's name servers were configured.
#[derive(Debug)]
enum Applied {
    /// By systemd-resolved, which forgets them when the TUN device disappears.
    Resolved,
    /// By `/etc/resolv.conf`.
    File(Step),
}

impl ResolverConfig {
    /// A configuration that has changed nothing yet. `tun` is the name of the TUN device.
    pub fn new(tun: &str) -> Self {
        Self { tun: tun.to_owned(), wanted: (Vec::new(), None), applied: None }
    }

    /// Makes programs ask `servers`; with an empty list restores the previous configuration. With a domain,
    /// systemd-resolved asks them for names below it only; the file cannot say that, so that servers which
    /// know what to do with other names have to be in it. Does nothing if the last call had the same, even if
    /// that call failed.
    ///
    /// # Errors
    /// If neither systemd-resolved nor the file can be changed. The previous configuration is in force then.
    pub fn apply(
        &mut self,
        undo: &mut UndoJournal,
        servers: &[IpAddr],
        domain: Option<&Domain>,
    ) -> Result<(), OsError> {
        let wanted = (servers.to_vec(), domain.cloned());
        if self.wanted == wanted {
            return Ok(());
        }
        self.wanted = wanted;
        let servers = &servers[..servers.len().min(MAX_NAME_SERVERS)];
        match self.applied.take() {
            Some(Applied::File(step)) => {
                for error in undo.revert(&[step]) {
                    tracing::warn!(%error, "cannot restore the name servers that were used before the tunnel");
                }
            }
            Some(Applied::Resolved) => drop(helper::change_name_servers(&Request::Forget(self.tun.clone()))),
            None => {}
        }
        if servers.is_empty() {
            return Ok(());
        }
        if resolved::is_listed(&nameservers(Path::new(RESOLV_CONF))) {
            let request = Request::Resolved(self.tun.clone(), servers.to_vec(), domain.cloned());
            match helper::change_name_servers(&request) {
                Ok(()) => {
                    self.applied = Some(Applied::Resolved);
                    return Ok(());
                }
                Err(reason) if domain.is_some() => {
                    return Err(OsError::kernel("tell", "systemd-resolved", io::Error::other(reason)));
                }
                Err(reason) => tracing::debug!(
                    reason,
                    "systemd-resolved refused the name servers; writing /etc/resolv.conf instead"
                ),
            }
        }
        let step = Step::Resolver(file::plan(Path::new(RESOLV_CONF), &text(servers))?);
        if let Err(error) = undo.apply(std::slice::from_ref(&step)) {
            drop(undo.revert(&[step]));
            return Err(error);
        }
        self.applied = Some(Applied::File(step));
        Ok(())
    }

    /// The name servers that are reached outside of the tunnel although the default route leads into it:
    /// those on a link's own network, and those that systemd-resolved asks over their link.
    ///
    /// # Errors
    /// If the addresses of this machine cannot be listed.
    pub fn name_servers_outside_tunnel(&self) -> Result<Vec<IpAddr>, OsError> {
        let asked = match &self.applied {
            Some(_) => self.wanted.0.clone(),
            None => nameservers(Path::new(RESOLV_CONF)),
        };
        if self.applied.is_none() && resolved::is_listed(&asked) {
            return Ok(nameservers(Path::new(RESOLVED_UPSTREAMS_FILE)));
        }
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let is_tun = |index| links.iter().any(|link| link.index == index && link.name == self.tun);
        let networks = netlink.addresses()?.into_iter().filter(|info| !is_tun(info.index));
        let networks: Vec<IpNet> = networks.map(|info| info.address.trunc()).collect();
        Ok(on_links(&asked, &networks))
    }
}

/// The name servers that are inside one of the networks, or link-local.
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

/// The name servers that programs of this machine ask; its own address where the file names none
/// (resolv.conf(5)).
pub fn system_resolvers() -> Vec<IpAddr> {
    let listed = nameservers(Path::new(RESOLV_CONF));
    if listed.is_empty() { vec![IpAddr::from([127, 0, 0, 1])] } else { listed }
}

/// Whether programs of this machine ask systemd-resolved.
pub fn uses_systemd_resolved() -> bool {
    resolved::is_listed(&nameservers(Path::new(RESOLV_CONF)))
}

/// The name servers that this machine asks without a tunnel, as the links' networks gave them: those of
/// systemd-resolved where programs ask that, else those of `/etc/resolv.conf`, as it was before instances of
/// mpvpn rewrote it.
///
/// `base` is the folder for state, [`DEFAULT_FOLDER`](crate::undo::DEFAULT_FOLDER) but in tests.
pub fn link_resolvers(base: &Path) -> Vec<IpAddr> {
    let mut text = file::read(Path::new(RESOLV_CONF)).unwrap_or_default();
    if text.starts_with(HEADER) {
        text = file::text_before_instances(base, Path::new(RESOLV_CONF)).unwrap_or_default();
    }
    let listed = parse(&text);
    if resolved::is_listed(&listed) { nameservers(Path::new(RESOLVED_UPSTREAMS_FILE)) } else { listed }
}

/// The name servers in a file; empty if it cannot be read.
fn nameservers(path: &Path) -> Vec<IpAddr> {
    file::read(path).map(|text| parse(&text)).unwrap_or_default()
}

/// The addresses on `nameserver` lines, at most [`MAX_NAME_SERVERS`]; a zone (`%eth0` of `fe80::1%eth0`) is
/// ignored.
fn parse(text: &str) -> Vec<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let word = words.next().filter(|word| *word == "nameserver").and_then(|_| words.next())?;
        word.split('%').next()?.parse().ok()
    };
    text.lines().filter_map(address).take(MAX_NAME_SERVERS).collect()
}

/// A file with these name servers only: previous search lists and options belong to the previous name
/// servers.
fn text(servers: &[IpAddr]) -> String {
    let mut text = format!("{HEADER}\n");
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
        assert_eq!(parse(&"nameserver 192.0.2.1\n".repeat(9)).len(), MAX_NAME_SERVERS);
    }

    #[test]
    fn name_servers_on_a_link_are_found() {
        let networks: Vec<IpNet> = ["192.168.1.0/24", "127.0.0.0/8"].map(|net| net.parse().unwrap()).into();
        let servers = ips(&["192.168.1.1", "127.0.0.1", "9.9.9.9", "fe80::1"]);
        assert_eq!(on_links(&servers, &networks), ips(&["192.168.1.1", "fe80::1"]));
    }
}
