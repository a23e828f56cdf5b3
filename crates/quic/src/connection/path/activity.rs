//! When something last arrived on a path, and from which address.

use std::net::{IpAddr, SocketAddr};

use mpvpn_types::{Duration, Instant};

use crate::LocalAddress;

/// A hash of the addresses of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin(u64);

impl Origin {
    /// That of packets that arrive at `local` from `remote`.
    #[inline]
    pub(crate) fn new(local: Option<LocalAddress>, remote: SocketAddr) -> Self {
        let bits = |ip| match ip {
            IpAddr::V4(ip) => u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let local = local.map_or(0, |local| bits(local.ip()));
        let all = bits(remote.ip()).rotate_left(64) ^ local ^ u128::from(remote.port()) << 40;
        // Odd numbers without a pattern: those of xxHash.
        let (high, low) = ((all >> 64) as u64, all as u64);
        Self(high.wrapping_mul(0x9e37_79b1_85eb_ca87) ^ low.wrapping_mul(0xc2b2_ae3d_27d4_eb4f))
    }
}

/// The receiving side of one path.
#[derive(Debug, Default)]
pub(crate) struct ReceiveActivity {
    /// Whether noq may know more about the path than was read from it.
    pub(crate) is_stale: bool,
    /// That of the packets of the path, once something has arrived.
    pub(crate) origin: Option<Origin>,
    /// UDP datagrams at the last update.
    datagrams: u64,
    /// When something last arrived.
    pub(crate) latest: Option<Instant>,
    /// The remote address at the last update.
    pub(crate) remote: Option<SocketAddr>,
}

impl ReceiveActivity {
    /// Takes the total of received UDP datagrams; returns whether there are new ones.
    pub(crate) fn update(&mut self, now: Instant, datagrams: u64) -> bool {
        let new = self.is_behind(datagrams);
        if new {
            (self.datagrams, self.latest) = (datagrams, Some(now));
        }
        new
    }

    /// Whether the total of received UDP datagrams has changed since the last update.
    pub(crate) fn is_behind(&self, datagrams: u64) -> bool {
        datagrams != self.datagrams
    }

    /// Takes the current remote address; returns whether it has changed.
    pub(crate) fn update_remote(&mut self, remote: Option<SocketAddr>) -> bool {
        std::mem::replace(&mut self.remote, remote) != remote
    }

    /// Whether nothing had arrived here for `time` when something arrived on another path, at `elsewhere`.
    pub(crate) fn is_silent(&self, elsewhere: Option<Instant>, time: Duration) -> bool {
        elsewhere > self.latest.map(|latest| latest + time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_path_is_silent_once_others_hear_for_longer() {
        let (mut path, start) = (ReceiveActivity::default(), Instant::now());
        assert!(!path.is_silent(None, 30 * MS), "nothing arrives anywhere");
        assert!(path.is_silent(Some(start), 30 * MS));
        assert!(path.update(start, 1) && !path.update(start + 40 * MS, 1));
        assert_eq!(path.latest, Some(start));
        assert!(!path.is_silent(Some(start + 30 * MS), 30 * MS));
        assert!(path.is_silent(Some(start + 31 * MS), 30 * MS));
    }

    #[test]
    fn another_remote_address_is_noticed_once() {
        let mut path = ReceiveActivity::default();
        let remote = Some("192.0.2.1:443".parse().unwrap());
        assert_eq!([remote, remote, None].map(|remote| path.update_remote(remote)), [true, false, true]);
    }
}
