//! Configuration of a client.

use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_path::Scheduler;
use mpvpn_quic::ClientSetup;
use mpvpn_types::Fec;

#[cfg(doc)]
use super::Client;
use super::addresses_in_use::AddressesInUse;
use crate::{ClassProfile, ClientInstance};

/// The traffic that the tunnels of a client or a server carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TunnelMode {
    /// IP packets of a TUN, by CONNECT-IP, and relays.
    #[default]
    Packets,
    /// Relays only: a client gets no addresses and is up once the server has sent its HTTP/3 SETTINGS; a
    /// server refuses CONNECT-IP.
    RelaysOnly,
}

/// Configuration of a [`Client`].
#[derive(Clone)]
pub struct ClientConfig {
    /// Packets and relays, or relays only.
    pub mode: TunnelMode,
    /// TLS and transport.
    pub setup: ClientSetup,
    /// The name that the server's certificate must have.
    pub server_name: String,
    /// Host and port for the `:authority` of the request.
    pub authority: String,
    /// The path of the request; `/.well-known/masque/ip/*/*/` at most servers.
    pub path: String,
    /// Bearer token.
    pub token: Option<String>,
    /// The class of this connection, if the client has several.
    pub class: Option<ClassProfile>,
    /// The random number of this process, which tells it from another one that has a copy of the secret of
    /// its session.
    pub instance: Option<ClientInstance>,
    /// How many addresses of each family to request beyond the first.
    pub additional_addresses: usize,
    /// Distributes packets over paths.
    pub scheduler: Scheduler,
    /// Forward error correction in both directions, if the server supports it.
    pub fec: Fec,
    /// Copies of each packet, each over another link, in both directions: 1 to 4. With more than 1, TCP
    /// connections that no rule names travel as packets: streams have no copies.
    pub copies: u8,
    /// Which TCP connections travel as streams.
    pub flow_rules: Rules,
    /// Random bits that make the initial sequence numbers of split TCP connections hard to guess (RFC 6528).
    pub isn_secret: [u64; 2],
    /// The addresses that the machine has already; the server cannot assign them.
    pub addresses_in_use: AddressesInUse,
    /// Keys of extensions that it does not know, for tests with ends that know fewer.
    pub disabled_extensions: &'static [&'static str],
}

impl ClientConfig {
    /// The value of `authorization` header fields.
    pub(super) fn authorization(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("Bearer {token}"))
    }

    /// The rules for TCP connections. With copies the mode `auto` means datagrams: streams have no copies.
    pub(super) fn flow_rules(&self) -> Rules {
        let mut rules = self.flow_rules.clone();
        if self.copies > 1 && rules.mode == FlowMode::Auto {
            rules.mode = FlowMode::Datagram;
        }
        rules
    }
}
