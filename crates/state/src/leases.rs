//! The file with the leases of a server, `leases.json`: which user and session has which addresses, so that a
//! client has its addresses again after the server was started again.
//!
//! In: leases, in any order. Out: the same, the last used first. Always holds: the file is written atomically
//! and has mode 0600; a file that cannot be understood is moved away; the number of leases is bounded, and
//! the last used are kept.

use std::{net::IpAddr, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use crate::file;
use mpvpn_input::Result;

/// Leases in a file: more than the default limit of clients, and with eight addresses each below the largest
/// file that is read. More: a file that takes long to write; fewer: clients that were away for long get other
/// addresses.
pub const MAX_LEASES: usize = 10_000;
/// The version of the format.
const VERSION: u32 = 1;

/// The lease of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptLease {
    /// The secret of the session.
    pub secret: Vec<u8>,
    /// The user.
    pub user: String,
    /// One address of each pair of an IPv4 and an IPv6 address.
    pub addresses: Vec<IpAddr>,
    /// When a client used it last, in seconds since 1970.
    pub last_used: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct LeaseFile {
    version: u32,
    leases: Vec<Entry>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    secret: String,
    user: String,
    addresses: Vec<IpAddr>,
    last_used: u64,
}

/// Reads the file `path`. Empty if there is none, or if it cannot be understood: then it is renamed to
/// `*.json.bad`.
///
/// # Errors
/// If the file is there and cannot be read or moved away.
pub fn load(path: &Path) -> Result<Vec<KeptLease>> {
    let effect =
        "sessions of clients that are away are forgotten: clients ask for the addresses that they had";
    file::load(path, parse, effect).map(Option::unwrap_or_default)
}

/// Writes the file `path`.
///
/// # Errors
/// If the file or its folder cannot be made.
pub fn save(path: &Path, mut leases: Vec<KeptLease>) -> Result<()> {
    leases.sort_by_key(|lease| std::cmp::Reverse(lease.last_used));
    leases.truncate(MAX_LEASES);
    let entry = |lease: KeptLease| Entry {
        secret: STANDARD.encode(lease.secret),
        user: lease.user,
        addresses: lease.addresses,
        last_used: lease.last_used,
    };
    let content = LeaseFile { version: VERSION, leases: leases.into_iter().map(entry).collect() };
    file::save(path, &content)
}

/// Checks the content of such a file.
///
/// # Errors
/// Why it cannot be understood.
pub fn check(content: &[u8]) -> Result<usize, String> {
    parse(content).map(|leases| leases.len())
}

fn parse(bytes: &[u8]) -> Result<Vec<KeptLease>, String> {
    let file: LeaseFile = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if file.version != VERSION {
        return Err(format!("it has the version {}, and this program knows {VERSION}", file.version));
    }
    if file.leases.len() > MAX_LEASES {
        return Err(format!("it has {} leases, at most {MAX_LEASES} work", file.leases.len()));
    }
    let lease = |entry: Entry| {
        let secret = STANDARD.decode(&entry.secret).map_err(|error| format!("a secret: {error}"))?;
        let Entry { user, addresses, last_used, .. } = entry;
        Ok(KeptLease { secret, user, addresses, last_used })
    };
    file.leases.into_iter().map(lease).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(number: u16, last_used: u64) -> KeptLease {
        let [high, low] = number.to_be_bytes();
        let secret = [number.to_be_bytes(); 8].concat();
        let addresses = (0..8).map(|place| IpAddr::from([10, place, high, low])).collect();
        KeptLease { secret, user: format!("user-{number}-{}", "x".repeat(50)), addresses, last_used }
    }

    #[test]
    fn leases_are_kept_and_of_too_many_the_last_used() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("state/leases.json");
        assert_eq!(load(&path).unwrap(), []);
        save(&path, vec![lease(1, 5), lease(2, 9)]).unwrap();
        assert_eq!(load(&path).unwrap(), [lease(2, 9), lease(1, 5)]);
        save(&path, (0..20_000).map(|number| lease(number, number.into())).collect()).unwrap();
        let kept = load(&path).unwrap();
        assert_eq!((kept.len(), &kept[0]), (MAX_LEASES, &lease(19_999, 19_999)));
        assert!(std::fs::metadata(&path).unwrap().len() < 4 << 20);
    }

    #[test]
    fn a_broken_file_is_moved_away_and_nothing_of_it_is_lost() {
        for broken in [
            "",
            "{",
            r#"{"version":2,"leases":[]}"#,
            r#"{"version":1,"leases":[{"secret":"?","user":"a","addresses":[],"last_used":0}]}"#,
        ] {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("leases.json");
            std::fs::write(&path, broken).unwrap();
            assert_eq!(load(&path).unwrap(), [], "{broken:?}");
            assert!(!path.exists() && check(broken.as_bytes()).is_err());
            assert_eq!(std::fs::read_to_string(home.path().join("leases.json.bad")).unwrap(), broken);
        }
    }
}
