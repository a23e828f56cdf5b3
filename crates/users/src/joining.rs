//! How a user of a server joins: what a join link has beside the token.

use crate::file::UserCredential;
use crate::{
    credentials::Reachability,
    given_pins::GivenPins,
    host::HostOption,
    join::{JoinLink, LinkTrust},
};
use mpvpn_config::ServerConfig;
use mpvpn_identity::token::Token;
use mpvpn_input::{Result, values::ServerAddr};

/// The content of a server's join links beside the token.
#[derive(Clone, Debug)]
pub struct Joining {
    config: ServerConfig,
    /// How clients reach the server.
    pub server: ServerAddr,
    trust: LinkTrust,
    /// Whether nobody said how clients reach it.
    pub is_guess: bool,
    /// The kind of credential by which the server knows users.
    pub credential: UserCredential,
}

impl Joining {
    /// The join links of the server with this configuration; `host` says how clients reach it.
    ///
    /// # Errors
    /// If neither its certificate nor an address is known.
    pub fn new(config: &ServerConfig, host: Option<HostOption>) -> Result<Self> {
        let is_guess = host.is_none() && config.public.is_none();
        let reachability = Reachability::of(config)?;
        let server =
            host.map_or_else(|| reachability.address(config), |host| Ok(host.or_port(reachability.port)))?;
        let trust = reachability.trust(&server);
        let credential = match reachability.client_certificates {
            true => UserCredential::Certificate,
            false => UserCredential::Token,
        };
        Ok(Self { config: config.clone(), server, trust, is_guess, credential })
    }

    /// Remembers the pin that is given out to a user, so that a certificate that would lock the user out is
    /// noticed.
    ///
    /// # Errors
    /// If the file with the pins cannot be read or written.
    pub fn remember_pin_of(&self, user: &str) -> Result<()> {
        GivenPins::remember(&self.config, user, &self.trust)
    }

    /// The link with this token.
    pub fn link(&self, token: Token) -> JoinLink {
        JoinLink { server: self.server.clone(), token, trust: self.trust.clone() }
    }

    /// The command that runs a client with a certificate.
    pub fn certificate_command(&self) -> String {
        let options = self.trust.options();
        format!("mpvpn client --server {} {options} --cert CERT.pem --key KEY.pem", self.server)
    }
}
