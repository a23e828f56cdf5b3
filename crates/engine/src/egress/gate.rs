//! What is forbidden, by the rules of the configuration and because an address is this machine's.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use mpvpn_control::access::{Access, Denied};
use mpvpn_os::{OsError, netlink::Netlink};

/// The addresses of this machine are read again after so long, if anybody wants to connect.
const REFRESH: Duration = Duration::from_secs(5);

/// Reads the addresses of this machine.
pub(crate) type ReadAddresses = Box<dyn FnMut() -> Result<Vec<IpAddr>, String> + Send>;

/// Reads the addresses of this machine as the network namespace of the calling thread has them, by netlink.
pub(crate) fn addresses_of_this_machine() -> Result<ReadAddresses, OsError> {
    let mut netlink = Netlink::open()?;
    Ok(Box::new(move || {
        let all = netlink.addresses().map_err(|error| error.to_string())?;
        Ok(all.into_iter().map(|info| info.address.addr()).collect())
    }))
}

/// The rules, with what they need to know of this machine.
pub(super) struct Gate {
    access: Arc<Access>,
    read: ReadAddresses,
    own: HashSet<IpAddr>,
    read_at: Instant,
}

impl Gate {
    /// Without the addresses of this machine there is no gate: it would let clients in where they must not.
    pub(super) fn new(now: Instant, access: Arc<Access>, mut read: ReadAddresses) -> Result<Self, String> {
        let own = read()?.into_iter().map(|ip| ip.to_canonical()).collect();
        Ok(Self { access, read, own, read_at: now })
    }

    /// Whether `user` may connect to `to`.
    pub(super) fn check(&mut self, now: Instant, user: &str, to: SocketAddr) -> Result<(), Denied> {
        let Self { access, read, own, read_at } = self;
        access.check(user, to, |ip| {
            if now.saturating_duration_since(*read_at) >= REFRESH {
                *read_at = now;
                match read() {
                    Ok(list) => *own = list.into_iter().map(|ip| ip.to_canonical()).collect(),
                    Err(reason) => {
                        tracing::warn!(
                            reason,
                            "cannot read this machine's addresses: those known before count"
                        );
                    }
                }
            }
            own.contains(&ip)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_read_again_but_not_for_each_connection() {
        let now = Instant::now();
        let (tell, told) = std::sync::mpsc::channel::<Result<Vec<IpAddr>, String>>();
        tell.send(Ok(vec!["203.0.113.7".parse().unwrap()])).unwrap();
        let read: ReadAddresses = Box::new(move || told.try_recv().expect("read too often"));
        let mut gate = Gate::new(now, Arc::default(), read).unwrap();
        let mut check =
            |seconds, to: &str| gate.check(now + Duration::from_secs(seconds), "anna", to.parse().unwrap());
        assert_eq!(check(0, "203.0.113.7:22"), Err(Denied::Server));
        assert_eq!(check(4, "203.0.113.8:22"), Ok(()));
        assert_eq!(check(60, "10.0.0.1:22"), Err(Denied::NotPublic), "asks for no addresses");
        tell.send(Ok(vec!["203.0.113.8".parse().unwrap()])).unwrap();
        assert_eq!(check(60, "203.0.113.8:22"), Err(Denied::Server));
        assert_eq!(check(64, "203.0.113.7:22"), Ok(()));
        tell.send(Err("no memory".into())).unwrap();
        assert_eq!(check(65, "203.0.113.8:22"), Err(Denied::Server), "what was known counts");
        assert!(Gate::new(now, Arc::default(), Box::new(|| Err("no".into()))).is_err());
    }
}
