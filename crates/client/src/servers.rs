//! The servers of a client that has several.
//!
//! In: the addresses of their names, the state of the tunnel, answers of servers. Out: orders
//! ([`ServerChoice`]), with addresses where one is needed. Always holds: names of servers that are not in use
//! are resolved only when they are to be asked.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_identity::{
    random,
    tls::{self, LastRefusal},
    token::Token,
};
use mpvpn_input::values::ServerAddr;
use mpvpn_tcp::connection::TcpTransportConfig;
use mpvpn_tunnel::{OtherServer, OtherServers};
use mpvpn_types::{CongestionControl, Duration};

use super::{connection_factory::ConnectionFactory, server_choice::ServerChoice};

/// The addresses of a name are looked up again after this time. Shorter: load on name servers; longer: a
/// server that moved is found later. Chosen.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(30);

/// TLS and token of a server.
pub(super) struct Credentials {
    pub(super) tls: Arc<rustls::ClientConfig>,
    pub(super) token: Option<Token>,
}

impl Credentials {
    /// Reads those of all servers, before the process gives up its rights.
    pub(super) fn load(config: &ClientConfig, refusal: &LastRefusal) -> Result<Vec<Self>, RunError> {
        let one = |at| {
            let mut config = config.clone();
            config.use_server(at);
            let tls = tls::client_config_reporting(&config.trust, config.cert.as_ref(), &[b"h3"], refusal)?;
            Ok(Self { tls: Arc::new(tls), token: config.load_token()? })
        };
        (0..config.servers.len()).map(one).collect()
    }
}

/// The parts that connect to one server.
#[derive(Clone, derive_more::Debug)]
#[debug("access to server {number}")]
pub(super) struct ServerAccess {
    /// Its number in the configuration.
    pub(super) number: usize,
    pub(super) connection_factory: ConnectionFactory,
    /// `None` if there is no slow thread, on which TCP would run.
    pub(super) tcp: Option<Arc<TcpTransportConfig>>,
}

impl ServerAccess {
    /// How the server is asked whether it answers.
    fn other_server(&self, cc: CongestionControl) -> OtherServer {
        let ConnectionFactory { setups, tunnel, .. } = &self.connection_factory;
        OtherServer { setup: setups.of(cc).clone(), name: tunnel.server_name.clone() }
    }
}

/// The servers of a client that has several.
pub(super) struct Servers {
    pub(super) choice: ServerChoice,
    access: Vec<ServerAccess>,
    names: Vec<ServerAddr>,
    addresses: Vec<Vec<SocketAddr>>,
    resolved_at: Vec<Option<Instant>>,
    pub(super) state_dir: Option<PathBuf>,
}

impl Servers {
    /// `None` if there is only one server.
    pub(super) fn new(
        now: Instant,
        config: &ClientConfig,
        access: Vec<ServerAccess>,
        state_dir: Option<PathBuf>,
    ) -> Result<Option<Self>, RunError> {
        if access.len() < 2 {
            return Ok(None);
        }
        let draws = random::<64>().map_err(RunError::io("get random numbers"))?;
        let mut draws =
            draws.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        let chance = |below: u32| draws.next().unwrap_or(0) % below;
        let names: Vec<ServerAddr> = config.servers.iter().map(|server| server.address.clone()).collect();
        Ok(Some(Self {
            choice: ServerChoice::new(now, &config.servers, config.choose, config.return_when, chance),
            access,
            addresses: names.iter().map(|name| name.socket_addr().into_iter().collect()).collect(),
            resolved_at: vec![None; names.len()],
            names,
            state_dir,
        }))
    }

    /// Asks the servers.
    pub(super) fn to_others(&self, cc: CongestionControl) -> Option<OtherServers> {
        OtherServers::new(self.access.iter().map(|access| access.other_server(cc)).collect())
    }

    /// The parts that connect to a server, and its addresses, if they are known.
    pub(super) fn access(&self, number: usize) -> (ServerAccess, Vec<SocketAddr>) {
        (self.access[number].clone(), self.addresses[number].clone())
    }

    /// All known addresses of all servers.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().flatten().copied()
    }

    /// The addresses of a server that is to be asked, and its name, if that is to be resolved.
    pub(super) fn addresses_of(
        &mut self,
        now: Instant,
        number: usize,
    ) -> (&[SocketAddr], Option<&ServerAddr>) {
        let name = &self.names[number];
        let is_fresh = self.resolved_at[number].is_some_and(|at| now < at + RESOLVE_INTERVAL);
        let wanted = name.ip().is_none() && !is_fresh;
        if wanted {
            self.resolved_at[number] = Some(now);
        }
        (&self.addresses[number], wanted.then_some(name))
    }

    /// A name was resolved. Returns whether the addresses are other ones.
    pub(super) fn on_resolved(&mut self, name: &ServerAddr, found: &[SocketAddr]) -> bool {
        let Some(at) = self.names.iter().position(|other| other == name) else { return false };
        let is_new = !found.is_empty() && self.addresses[at] != found;
        if is_new {
            self.addresses[at] = found.to_vec();
        }
        is_new
    }
}
