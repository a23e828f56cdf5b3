//! The users of a server: the file `users.toml`.
//!
//! In: the file, and changes of `mpvpn user`. Out: the [`Users`], and the file with a change. Always holds:
//! the file has only the SHA-256 of a token; a change is made under a lock, is atomic, and leaves comments,
//! owner and mode of the file as they are.

use std::{collections::BTreeMap, fmt, net::IpAddr, path::Path, str::FromStr, sync::Arc, time::SystemTime};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use ipnet::IpNet;
use mpvpn_path::Day;
use mpvpn_types::{BitRate, ByteSize};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use crate::{
    denied::{Denied, User},
    expiry::Expiry,
};
use mpvpn_config::{
    ServerConfig,
    limits::{SessionCount, sessions},
};
use mpvpn_identity::{identity::Fingerprint, token::Token};
use mpvpn_input::{
    Error, Result, files,
    rules::{Prefix, UserName},
    shared::Shared,
    values::{Many, One, OneOrNumber, Text},
};
use mpvpn_status::UserState;

/// Users in a file. Chosen. More: a file that takes long to read and to write.
pub const MAX_USERS: usize = 10_000;
/// Fixed addresses of a user. Chosen. More: one user takes the addresses of others.
const MAX_ADDRESSES: usize = 16;
/// Shortest prefixes of networks of users, of IPv4 and of IPv6: clients use no shorter ones
/// (`tunnel::client::addresses`).
const MIN_PREFIX: (u8, u8) = (16, 32);
/// Networks that a user's clients may announce. Chosen: each is compared with each announced one.
const MAX_ROUTES: usize = 256;
/// The expected content of the file, for errors.
pub(crate) const EXPECTED: &str = "users, each with a name, and most with the SHA-256 of a token";
/// A user in the file.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "user")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[user]]")]
pub struct UserEntry {
    /// Name of the user, as in status and in `users` of `[[access]]` and `[[limit]]`
    #[schemars(with = "One<UserName>")]
    pub name: String,
    /// SHA-256 of the token, as in `printf %s "$TOKEN" | sha256sum`. The token itself is stored nowhere. A
    /// user without one has access by a certificate only [default: none]
    #[serde(default, deserialize_with = "hash")]
    #[schemars(with = "One<Fingerprint>")]
    pub token_sha256: Option<Fingerprint>,
    /// The user has no access any more: sessions end at once, and the token is refused [default: false]
    #[serde(default)]
    pub revoked: bool,
    /// The last day of the user's access in UTC, or the moment at which it ends, as in 2027-01-31T18:00:00Z
    /// [default: none]
    #[serde(default, with = "One::<Expiry>")]
    pub expires: Option<Expiry>,
    /// Addresses that this user has and nobody else. Each session has one in the tunnel: the next free one of
    /// these, which may be a public IPv4 address that is led to this machine. The first session also has the
    /// networks, as in "2001:db8:7::/64", and public IPv6 addresses, without translation [default: none]
    #[serde(default, with = "Many::<UserAddress>")]
    #[schemars(with = "Many<UserAddress>")]
    pub address: Vec<UserAddress>,
    /// Networks that the user's clients may announce, whole or in parts: then those behind the server and
    /// other clients reach them there [default: none]
    #[serde(default, with = "Many::<Prefix>")]
    #[schemars(with = "Many<Prefix>")]
    pub route: Vec<IpNet>,
    /// Number of sessions (connected clients) at once; `max-sessions` of a table `[[limit]]` counts, too,
    /// the smaller of both [default: 64]
    #[serde(default, deserialize_with = "sessions")]
    #[schemars(with = "OneOrNumber<SessionCount>")]
    pub sessions: Option<u32>,
    /// Limit of the rate at which the user's clients send, all together, in bit/s of data without headers,
    /// 64kbit to 1000gbit [default: none]
    #[serde(default, with = "One::<BitRate>")]
    pub up: Option<BitRate>,
    /// Limit of the rate at which the user's clients receive; it counts as `up` does [default: none]
    #[serde(default, with = "One::<BitRate>")]
    pub down: Option<BitRate>,
    /// Bytes that the user may carry in a calendar month (UTC), both directions together, at least 1MB. Then
    /// sessions end, and the user has no access until the next month begins [default: none]
    #[serde(default, with = "One::<ByteSize>")]
    pub quota: Option<ByteSize>,
}

/// The file of the users of a server, `users.toml`, at most 10,000 of them.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UserTables {
    /// Users: the tables `[[user]]`
    #[serde(default)]
    user: Vec<UserEntry>,
}

/// An address of a user, or a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UserAddress(IpNet);

impl Text for UserAddress {
    const EXPECTED: &'static str = "an address or a network in quotes";
    const EXAMPLE: &'static str = "10.0.0.7";

    fn read(text: &str) -> Result<Self, String> {
        Prefix::read(text).map(|prefix| Self(prefix.0))
    }
}

impl FromStr for UserAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(text)
    }
}

impl fmt::Display for UserAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_host() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
    }
}

impl Serialize for UserAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl UserAddress {
    fn is_host(&self) -> bool {
        self.0.prefix_len() == self.0.max_prefix_len()
    }

    /// Why a server with these networks of the tunnel cannot give it to a user.
    fn mistake(&self, networks: &[IpNet]) -> Option<String> {
        let (address, is_v4) = (self.0.addr(), self.0.addr().is_ipv4());
        match networks.iter().find(|network| network.contains(&self.0) || self.0.contains(*network)) {
            Some(network) if !self.is_host() => Some(format!("overlaps the tunnel's network {network}")),
            Some(network) if network.hosts().next() == Some(address) => {
                Some("is the server's own".to_owned())
            }
            Some(network) if [network.network(), network.broadcast()].contains(&address) => {
                Some("is no address of a host".to_owned())
            }
            Some(_) => None,
            None if !is_public(self.0.network()) => {
                Some("is not in the networks of the tunnel, and not public".to_owned())
            }
            None if self.0.prefix_len() < if is_v4 { MIN_PREFIX.0 } else { MIN_PREFIX.1 } => {
                Some(format!("is larger than a /{}", if is_v4 { MIN_PREFIX.0 } else { MIN_PREFIX.1 }))
            }
            None if !is_v4 && !networks.iter().any(|net| net.addr().is_ipv6()) => {
                Some("needs IPv6 in the tunnel, and `subnet6` is off".to_owned())
            }
            None => None,
        }
    }
}

/// Whether an address may be that of a host in the internet.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let is_special =
                ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip.is_broadcast();
            !is_special && !ip.is_private() && !ip.is_link_local()
        }
        IpAddr::V6(ip) => {
            let is_special = ip.is_unspecified() || ip.is_loopback() || ip.is_multicast();
            !is_special && !ip.is_unique_local() && !ip.is_unicast_link_local()
        }
    }
}

/// Checks that no address belongs to two users, or twice to one.
fn check_overlaps(all: &[UserEntry]) -> Result<(), String> {
    let of_user = |entry: &UserEntry| -> Vec<(IpNet, String)> {
        entry.address.iter().map(|address| (address.0, entry.name.clone())).collect()
    };
    let mut owners: Vec<_> = all.iter().flat_map(of_user).collect();
    // Networks are apart or inside each other: one that overlaps another stands next to one that does.
    owners.sort_by_key(|(net, _)| *net);
    for pair in owners.windows(2) {
        let [(outer, other), (net, user)] = pair else { continue };
        let (shown, around) = (UserAddress(*net), UserAddress(*outer));
        if outer == net {
            return Err(format!("the address {shown} twice, of `{other}` and `{user}`"));
        }
        if outer.contains(net) {
            return Err(format!("the address {shown} of `{user}` inside {around} of `{other}`"));
        }
    }
    Ok(())
}

fn hash<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Fingerprint>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Users that have used up their quotas, each with the day on which the next month begins.
pub type UsedUpQuotas = BTreeMap<String, Day>;

/// The users of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// In the order of the file.
    all: Vec<UserEntry>,
    /// The place of a hash in `all`. With it a guess costs the same whether there is one user or 10,000.
    by_hash: BTreeMap<[u8; 32], usize>,
    /// The place of a name in `all`.
    by_name: BTreeMap<String, usize>,
    used_up: Arc<UsedUpQuotas>,
}

impl Users {
    /// Reads a users' file.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(&files::read_secret(path)?, path)
    }

    /// Parses the content of the users' file `path`.
    pub fn parse(content: &[u8], path: &Path) -> Result<Self> {
        let bad = |found: String| Error::Content { path: path.into(), expected: EXPECTED, found };
        let text = str::from_utf8(content).map_err(|_| bad("bytes that are no UTF-8".into()))?;
        let file: UserTables = toml::from_str(text).map_err(|error| bad(error.to_string()))?;
        Self::new(file.user).map_err(bad)
    }

    /// These users, if they do not contradict each other.
    fn new(all: Vec<UserEntry>) -> Result<Self, String> {
        if all.len() > MAX_USERS {
            return Err(format!("{} users, at most {MAX_USERS} work", all.len()));
        }
        let (mut by_hash, mut by_name) = (BTreeMap::new(), BTreeMap::new());
        for (place, entry) in all.iter().enumerate() {
            if by_name.insert(entry.name.clone(), place).is_some() {
                return Err(format!("user `{}` twice", entry.name));
            }
            if let Some(hash) = &entry.token_sha256
                && let Some(other) = by_hash.insert(hash.0, place)
            {
                let other: &UserEntry = &all[other];
                return Err(format!("users `{}` and `{}` with the same token", other.name, entry.name));
            }
            if entry.address.len() > MAX_ADDRESSES {
                return Err(format!(
                    "user `{}` with {} addresses, at most {MAX_ADDRESSES} work",
                    entry.name,
                    entry.address.len()
                ));
            }
            if entry.route.len() > MAX_ROUTES {
                return Err(format!(
                    "user `{}` with {} networks in `route`, at most {MAX_ROUTES} work",
                    entry.name,
                    entry.route.len()
                ));
            }
        }
        check_overlaps(&all)?;
        Ok(Self { all, by_hash, by_name, used_up: Arc::default() })
    }

    /// All users, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &UserEntry> {
        self.all.iter()
    }

    /// The user with this name.
    pub fn get(&self, name: &str) -> Option<&UserEntry> {
        self.all.get(*self.by_name.get(name)?)
    }

    /// The same users, of which these have used up their quotas.
    #[must_use]
    pub fn with_used_up(self, used_up: Arc<UsedUpQuotas>) -> Self {
        Self { used_up, ..self }
    }

    /// The users that have used up their quotas.
    pub fn used_up(&self) -> &Arc<UsedUpQuotas> {
        &self.used_up
    }

    /// Whether a user has access at `now`.
    pub fn state(&self, entry: &UserEntry, now: SystemTime) -> UserState {
        match self.refusal(entry, now) {
            None => UserState::Active,
            Some(Denied::Expired(_)) => UserState::Expired,
            Some(Denied::QuotaUsedUp(..)) => UserState::QuotaUsedUp,
            Some(_) => UserState::Revoked,
        }
    }

    /// Why a user has no access at `now`.
    fn refusal(&self, entry: &UserEntry, now: SystemTime) -> Option<Denied> {
        match entry.expires {
            _ if entry.revoked => return Some(Denied::Revoked),
            Some(expiry) if expiry.at() <= now => return Some(Denied::Expired(expiry)),
            _ => {}
        }
        let until = self.used_up.get(&entry.name)?;
        Some(Denied::QuotaUsedUp(entry.quota?, *until))
    }

    /// The fixed addresses and networks of all users.
    pub fn fixed_addresses(&self) -> impl Iterator<Item = (IpNet, String)> {
        self.all.iter().flat_map(|entry| entry.address.iter().map(|address| (address.0, entry.name.clone())))
    }

    /// The networks that a user's clients may announce.
    pub fn site_networks(&self, name: &str) -> Vec<IpNet> {
        self.get(name).map_or(Vec::new(), |entry| entry.route.clone())
    }

    /// Whether there are no users, so that every request is refused.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The user with this token.
    pub(crate) fn user_with(&self, token: &Token, now: SystemTime) -> Result<User, Denied> {
        self.user_by_hash(&token.hash(), now)
    }

    /// The user whose token has this SHA-256.
    pub(crate) fn user_by_hash(&self, hash: &[u8; 32], now: SystemTime) -> Result<User, Denied> {
        let entry = self.by_hash.get(hash).and_then(|place| self.all.get(*place)).ok_or(Denied::Unknown)?;
        let own = entry.token_sha256.as_ref().ok_or(Denied::Unknown)?;
        verify_slices_are_equal(&own.0, hash).map_err(|_| Denied::Unknown)?;
        self.refusal(entry, now).map_or_else(|| Ok(User { name: entry.name.clone() }), Err)
    }

    /// The user with this name, which a certificate has.
    pub(crate) fn listed(&self, name: &str, now: SystemTime) -> Result<User, Denied> {
        let entry = self.get(name).ok_or_else(|| Denied::Unlisted(name.into()))?;
        self.refusal(entry, now).map_or_else(|| Ok(User { name: entry.name.clone() }), Err)
    }

    /// The next moment after `now` at which the access of a user ends.
    pub fn next_expiry(&self, now: SystemTime) -> Option<SystemTime> {
        let moments = self.all.iter().filter(|entry| !entry.revoked).filter_map(|entry| entry.expires);
        moments.map(Expiry::at).filter(|at| *at > now).min()
    }

    /// The users of `before` whose sessions have to end because of what `self` says, with the reason.
    pub fn ended_since(&self, before: &Self, now: SystemTime) -> BTreeMap<String, String> {
        let ended = before.all.iter().filter_map(|old| {
            let reason = match self.get(&old.name) {
                None => "the user was removed".to_owned(),
                Some(new) => match self.refusal(new, now) {
                    Some(denied) => denied.to_string(),
                    None if new.token_sha256 != old.token_sha256 => "the user has a new token".to_owned(),
                    None => return None,
                },
            };
            Some((old.name.clone(), reason))
        });
        ended.collect()
    }
}

/// Whether a server with this configuration can give these addresses to a user.
///
/// # Errors
/// If one is neither in the tunnel's networks nor public, or is the server's own.
pub fn check_addresses(config: &ServerConfig, addresses: &[UserAddress]) -> Result<()> {
    let networks = [Some(IpNet::V4(config.subnet)), config.subnet6.map(IpNet::V6)];
    let networks: Vec<IpNet> = networks.into_iter().flatten().collect();
    for address in addresses {
        let Some(wrong) = address.mistake(&networks) else { continue };
        let names: Vec<_> = networks.iter().map(ToString::to_string).collect();
        return Err(Error::usage(
            format!("--address {address} {wrong}"),
            format!(
                "take another address of {}, or a public one that is led to this machine",
                names.join(" or ")
            ),
        ));
    }
    Ok(())
}

/// Users that may change while a server runs: all clones see the same.
pub type SharedUsers = Shared<Users>;

#[cfg(test)]
mod tests;
