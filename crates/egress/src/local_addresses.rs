//! The addresses of this machine, to which clients may not connect.

use std::{
    collections::HashSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use mpvpn_os::{OsError, netlink::Netlink};

/// How long the addresses are cached. Longer: a new address is unprotected for longer. Shorter: netlink
/// requests. Chosen.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Reads the addresses of this machine.
pub type ReadLocalAddresses = Box<dyn FnMut() -> Result<Vec<IpAddr>, String> + Send>;

/// A reader for the network namespace of the calling thread, by netlink.
pub fn local_address_reader() -> Result<ReadLocalAddresses, OsError> {
    let mut netlink = Netlink::open()?;
    Ok(Box::new(move || {
        let all = netlink.addresses().map_err(|error| error.to_string())?;
        Ok(all.into_iter().map(|info| info.address.addr()).collect())
    }))
}

/// The cached addresses of this machine.
pub(super) struct LocalAddresses {
    read: ReadLocalAddresses,
    known: HashSet<IpAddr>,
    read_at: Instant,
}

impl LocalAddresses {
    /// # Errors
    /// If they cannot be read: without them clients could reach this machine's own services.
    pub(super) fn new(now: Instant, mut read: ReadLocalAddresses) -> Result<Self, String> {
        let known = read()?.into_iter().map(|ip| ip.to_canonical()).collect();
        Ok(Self { read, known, read_at: now })
    }

    /// Whether an address belongs to this machine. Reads the addresses again if they are old.
    pub(super) fn contains(&mut self, now: Instant, ip: IpAddr) -> bool {
        if now.saturating_duration_since(self.read_at) >= REFRESH_INTERVAL {
            self.read_at = now;
            match (self.read)() {
                Ok(list) => self.known = list.into_iter().map(|ip| ip.to_canonical()).collect(),
                Err(reason) => {
                    tracing::warn!(reason, "cannot read this machine's addresses, uses those read before");
                }
            }
        }
        self.known.contains(&ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_address_reader_are_read_again_but_not_for_each_connection() {
        let now = Instant::now();
        let (tell, told) = std::sync::mpsc::channel::<Result<Vec<IpAddr>, String>>();
        tell.send(Ok(vec!["203.0.113.7".parse().unwrap()])).unwrap();
        let read: ReadLocalAddresses = Box::new(move || told.try_recv().expect("read too often"));
        let mut own = LocalAddresses::new(now, read).unwrap();
        let mut has =
            |seconds, ip: &str| own.contains(now + Duration::from_secs(seconds), ip.parse().unwrap());
        assert!(has(0, "203.0.113.7") && !has(4, "203.0.113.8"));
        tell.send(Ok(vec!["::ffff:203.0.113.8".parse().unwrap()])).unwrap();
        assert!(has(60, "203.0.113.8") && !has(64, "203.0.113.7"));
        tell.send(Err("no memory".into())).unwrap();
        assert!(has(65, "203.0.113.8"), "what was known counts");
        assert!(LocalAddresses::new(now, Box::new(|| Err("no".into()))).is_err());
    }
}
