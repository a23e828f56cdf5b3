//! The servers of a client: the options `server`, `choose`, `return` and `when-down`.
//!
//! In: values of the file or the command line. Out: [`Server`]s in the order in which they are given. Always
//! holds: there is at least one, and each is there once.

use std::path::PathBuf;

use mpvpn_identity::{
    identity::Fingerprint,
    token::Token,
    trust::{Ca, Trust},
};
use mpvpn_input::{
    Error, Result,
    values::{Many, One, ServerAddr, Text},
};
use mpvpn_types::word_enum;
use serde::Deserialize;

use crate::{defaults::first_repeated, text_or_table::TextOrTable};

/// The most servers. Each is asked while none answers: more would be packets without use. Chosen.
const MAX_SERVERS: usize = 16;

word_enum! {
    /// Which of several servers a client prefers.
    pub enum Choose {
        /// The first that works, in the order in which they are given.
        #[default]
        Order = "order",
        /// The one that answers first.
        Nearest = "nearest",
        /// One by chance, by the `weight` of each; the others follow in the same way.
        Weighted = "weighted",
    }
}

word_enum! {
    /// When a client returns to a server that it prefers, once that has worked for a minute.
    pub enum Return {
        /// Once nothing has moved for 30 seconds: a change ends the connections in the tunnel.
        #[default]
        Idle = "idle",
        /// At once.
        Now = "now",
        /// Never.
        Never = "never",
    }
}

word_enum! {
    /// The way of packets for the tunnel while no server answers.
    pub enum WhenDown {
        /// They wait, and are dropped.
        #[default]
        Block = "block",
        /// They leave past the tunnel, readable for everybody there.
        Direct = "direct",
    }
}

/// A server as the options name it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServerOption {
    #[serde(with = "One::<ServerAddr>")]
    address: Option<ServerAddr>,
    #[serde(with = "Many::<Fingerprint>")]
    pin: Vec<Fingerprint>,
    #[serde(with = "One::<Ca>")]
    ca: Option<Ca>,
    #[serde(with = "One::<PathBuf>")]
    token_file: Option<PathBuf>,
    weight: Option<u16>,
}

impl From<ServerAddr> for ServerOption {
    fn from(address: ServerAddr) -> Self {
        Self { address: Some(address), ..Self::default() }
    }
}

impl Text for ServerOption {
    const EXPECTED: &'static str = "a name or address in quotes, as in \"vpn.example:4433\", or a table: \
         { address = \"vpn.example\", pin = \"SHA256\", token-file = \"FILE\", weight = 2 }";
    const EXAMPLE: &'static str = "vpn.example:4433";

    fn read(text: &str) -> std::result::Result<Self, String> {
        text.parse::<ServerAddr>().map(Self::from)
    }
}

impl TextOrTable for ServerOption {
    type Table = Self;

    fn of_table(table: Self) -> std::result::Result<Self, String> {
        if table.address.is_some() { Ok(table) } else { Err("a server has no `address`".to_owned()) }
    }
}

/// A server of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its name or address, and UDP port.
    pub address: ServerAddr,
    /// How its certificate is judged.
    pub trust: Trust,
    /// The bearer token, if given directly.
    pub token: Option<Token>,
    /// The file with the bearer token.
    pub token_file: Option<PathBuf>,
    /// How often it is drawn, beside the weights of the others; 0: only if no other is left.
    pub weight: u16,
}

/// The options for servers that say nothing themselves.
pub(super) struct Access {
    pub(super) ca: Option<Ca>,
    pub(super) pin: Vec<Fingerprint>,
    pub(super) insecure: bool,
    pub(super) token: Option<Token>,
    pub(super) token_file: Option<PathBuf>,
}

/// Fills in what servers do not say themselves.
pub(super) fn resolve(given: Vec<ServerOption>, general: &Access) -> Result<Vec<Server>> {
    let addresses: Vec<ServerAddr> = given.iter().filter_map(|server| server.address.clone()).collect();
    if addresses.is_empty() {
        return Err(Error::usage("no server is given", "add --server HOST:PORT"));
    }
    if let Some(twice) = first_repeated(&addresses) {
        return Err(Error::usage(format!("the server {twice} is given twice"), "give every server once"));
    }
    if addresses.len() > MAX_SERVERS {
        return Err(Error::usage(
            format!("{} servers are given, and at most {MAX_SERVERS} are possible", addresses.len()),
            "leave some out",
        ));
    }
    if general.token.is_some() && general.token_file.is_some() {
        return Err(Error::usage("--token and --token-file are given together", "leave out one of the two"));
    }
    let one = |(server, address): (ServerOption, ServerAddr)| {
        let has_trust = server.ca.is_some() || !server.pin.is_empty();
        let trust = match has_trust {
            true => Trust::of(server.ca, server.pin, false)?,
            false => Trust::of(general.ca.clone(), general.pin.clone(), general.insecure)?,
        };
        let (token, token_file) = match server.token_file {
            Some(file) => (None, Some(file)),
            None => (general.token.clone(), general.token_file.clone()),
        };
        Ok(Server { address, trust, token, token_file, weight: server.weight.unwrap_or(1) })
    };
    given.into_iter().zip(addresses).map(one).collect()
}

/// The address of the first server.
pub(super) fn first(given: &[ServerOption]) -> Option<&ServerAddr> {
    given.first()?.address.as_ref()
}
