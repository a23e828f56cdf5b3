//! The options of `mpvpn user add` and `mpvpn user set` that limit a user.

use std::{fmt::Display, num::NonZeroU32, str::FromStr, time::SystemTime};

use clap::Args;
use ipnet::IpNet;
use mpvpn_types::{BitRate, ByteSize};

use crate::{UserAddress, expiry::ExpiryOption, file::SettingsChange};
use mpvpn_input::{
    Result,
    rules::Prefix,
    values::{Text, text},
};
use mpvpn_status::link_change::Limit;

/// The limits of a new user.
#[derive(Args, Clone, Copy, Debug)]
pub struct LimitOptions {
    /// Limit of the rate at which the user's clients send, all together, in bit/s of data without headers,
    /// as in 5mbit [default: none]
    #[arg(long, value_name = "RATE", value_parser = text::<BitRate>)]
    pub up: Option<BitRate>,
    /// Limit of the rate at which they receive [default: none]
    #[arg(long, value_name = "RATE", value_parser = text::<BitRate>)]
    pub down: Option<BitRate>,
    /// Bytes in a calendar month (UTC), both directions together, as in 50GB; after these there is no access
    /// until the next month [default: none]
    #[arg(long, value_name = "SIZE", value_parser = text::<ByteSize>)]
    pub quota: Option<ByteSize>,
}

/// The changes to an existing user.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = true)]
pub struct ChangeOptions {
    /// When the access ends: a number of days from now, or the last day; none: never
    #[arg(long, value_name = "90d|2027-01-31|none")]
    pub expires: Option<OrNone<ExpiryOption>>,
    /// Address that this user has and nobody else, or network, instead of those before; repeatable; none: no
    /// address
    #[arg(long, value_name = "IP|CIDR|none")]
    pub address: Vec<OrNone<UserAddress>>,
    /// Network that the user's clients may announce, whole or in parts, instead of those before; repeatable;
    /// none: no network
    #[arg(long, value_name = "CIDR|none", value_parser = site_network_or_none)]
    pub route: Vec<OrNone<IpNet>>,
    /// Number of sessions (connected clients) at once; none: 64
    #[arg(long, value_name = "N|none")]
    pub sessions: Option<OrNone<NonZeroU32>>,
    /// Limit of the rate at which the user's clients send, all together, in bit/s of data without headers;
    /// none: no limit
    #[arg(long, value_name = "RATE|none", value_parser = text::<Limit<BitRate>>)]
    pub up: Option<Limit<BitRate>>,
    /// Limit of the rate at which they receive; none: no limit
    #[arg(long, value_name = "RATE|none", value_parser = text::<Limit<BitRate>>)]
    pub down: Option<Limit<BitRate>>,
    /// Bytes in a calendar month (UTC), both directions together, as in 50GB; none: no limit
    #[arg(long, value_name = "SIZE|none", value_parser = text::<Limit<ByteSize>>)]
    pub quota: Option<Limit<ByteSize>>,
}

/// A value, or the word `none`.
#[derive(Clone, Copy, Debug)]
pub struct OrNone<T>(pub Option<T>);

impl<T: FromStr<Err: Display>> FromStr for OrNone<T> {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            text => text.parse().map(|value| Self(Some(value))).map_err(|error| format!("{error}")),
        }
    }
}

/// A network that clients may announce.
///
/// # Errors
/// If it is none, or has bits after its prefix.
pub fn site_network(text: &str) -> Result<IpNet, String> {
    Prefix::read(text).map(|prefix| prefix.0)
}

fn site_network_or_none(text: &str) -> Result<OrNone<IpNet>, String> {
    if text == "none" { Ok(OrNone(None)) } else { site_network(text).map(|net| OrNone(Some(net))) }
}

impl ChangeOptions {
    /// The change, for dates at `now`.
    ///
    /// # Errors
    /// If a date has passed.
    pub fn resolve(self, now: SystemTime) -> Result<SettingsChange> {
        let Self { expires, address, route, sessions, up, down, quota } = self;
        let ahead = |option: ExpiryOption| option.resolve_ahead(now);
        Ok(SettingsChange {
            expires: expires.map(|wanted| wanted.0.map(ahead).transpose()).transpose()?,
            address: (!address.is_empty())
                .then(|| address.into_iter().filter_map(|wanted| wanted.0).collect()),
            route: (!route.is_empty()).then(|| route.into_iter().filter_map(|wanted| wanted.0).collect()),
            sessions: sessions.map(|wanted| wanted.0.map(NonZeroU32::get)),
            up: up.map(|limit| limit.0),
            down: down.map(|limit| limit.0),
            quota: quota.map(|limit| limit.0),
        })
    }
}
