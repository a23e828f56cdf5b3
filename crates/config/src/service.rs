//! Whether a server carries packets through a TUN device, or relays TCP and UDP only, and which defaults
//! follow from that.

use std::{net::SocketAddr, path::Path};

use super::{
    ServerOptions,
    file::{self, OrFallback, first_given},
};
use crate::{
    defaults::{DEFAULT_LISTEN, SERVER_FILE},
    resolve::ServerConfig,
};
use mpvpn_input::{Error, Result, dirs, role::Role};

/// Default of `--name` for a server without a TUN device.
const DEFAULT_NAME: &str = "server";
/// Default port of a server that may not listen on [`crate::defaults::DEFAULT_PORT`].
const UNPRIVILEGED_PORT: u16 = 4433;

/// The rights that the kernel gives to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Open a TUN device and change addresses and routes.
    pub network: bool,
    /// Listen on port 443.
    pub port_443: bool,
}

impl Rights {
    /// The rights of root.
    pub const ALL: Self = Self { network: true, port_443: true };
}

/// How a server serves its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerMode {
    /// It carries IP packets through a TUN device, and relays TCP and UDP.
    #[default]
    Packets,
    /// It relays TCP and UDP only, because of `--relay-only`.
    Relays,
    /// It relays TCP and UDP only, because it may not open a TUN device.
    Unprivileged,
}

impl ServerMode {
    pub(super) fn of(options: &ServerOptions, rights: Rights) -> Self {
        match (options.relay_only, rights.network) {
            (true, _) => Self::Relays,
            (false, true) => Self::Packets,
            (false, false) => Self::Unprivileged,
        }
    }

    /// Whether the server has a TUN device, and addresses for clients.
    pub fn has_tun(self) -> bool {
        self == Self::Packets
    }

    /// The limits of a server without a TUN device, and how to remove them.
    pub fn note(self) -> Option<&'static str> {
        match self {
            Self::Packets => None,
            Self::Relays => Some("relays TCP and UDP only, and no IP packets, as --relay-only says"),
            Self::Unprivileged => Some(
                "relays TCP and UDP only: run it as root (or with CAP_NET_ADMIN) to carry all IP packets",
            ),
        }
    }
}

impl ServerOptions {
    /// Reads the text of a configuration file.
    pub fn parse(text: &str) -> Result<Self> {
        file::parse(text, Path::new("configuration"))
    }
}

/// Merges the options `cli` with those of the file. The default file in `/etc` is for root: other users name
/// one.
pub(super) fn load(file: Option<&Path>, cli: ServerOptions, rights: Rights) -> Result<ServerConfig> {
    let tun_only_option = tun_only_option(&cli);
    let resolve = |cli: ServerOptions, from_file| {
        let options = cli.or_fallback(from_file);
        match (ServerMode::of(&options, rights), tun_only_option) {
            (ServerMode::Relays, Some(option)) => Err(Error::usage(
                format!("--{option} is about a TUN device, which a server with --relay-only does not have"),
                "leave out one of the two",
            )),
            (ServerMode::Unprivileged, Some(option)) => Err(Error::usage(
                format!("--{option} is about a TUN device, which needs root (or CAP_NET_ADMIN)"),
                format!("run this with sudo, or leave --{option} out to relay TCP and UDP only"),
            )),
            _ => ServerConfig::resolve(options, rights),
        }
    };
    match file {
        Some(named) => file::load_named(named)?.resolve(cli, resolve),
        None if rights.network || dirs::is_root() => {
            file::load(None, Path::new(SERVER_FILE))?.resolve(cli, resolve)
        }
        None => resolve(cli, ServerOptions::default()),
    }
}

/// Fills in the defaults that differ without a TUN device.
pub(super) fn without_tun(options: ServerOptions, rights: Rights) -> Result<ServerOptions> {
    let name = options.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned());
    let api_socket = options.api_socket.clone();
    let api_socket = api_socket.map_or_else(|| mpvpn_input::role::user_socket(Role::Server, &name), Ok)?;
    let mut listen = options.listen.clone();
    if listen.is_empty() && !rights.port_443 {
        listen = vec![SocketAddr::new(DEFAULT_LISTEN.ip(), UNPRIVILEGED_PORT)];
    }
    Ok(ServerOptions {
        listen,
        name: Some(name),
        api_socket: Some(api_socket),
        state_dir: Some(options.state_dir.clone().unwrap_or_else(dirs::state_dir)),
        ..options
    })
}

/// The first given option that only applies with a TUN device.
fn tun_only_option(options: &ServerOptions) -> Option<&'static str> {
    first_given!(options;
        subnet "subnet" subnet6 "subnet6" tun_name "tun-name" nat "nat" routes "routes" dns "dns"
        dns_domain "dns-domain" forward "forward" max_clients "max-clients" isolate "isolate" measure "measure"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: Rights = Rights { network: false, port_443: false };

    fn options() -> ServerOptions {
        ServerOptions { api_socket: Some("api.sock".into()), ..ServerOptions::default() }
    }

    #[test]
    fn an_ordinary_user_gets_a_server_that_relays_on_a_port_of_users() {
        let config = load(None, options(), USER).unwrap();
        assert_eq!((config.service, config.name.as_str()), (ServerMode::Unprivileged, "server"));
        assert_eq!(config.listen, ["0.0.0.0:4433".parse().unwrap()]);
        assert!(config.service.note().unwrap().contains("as root"));
        let may = Rights { port_443: true, ..USER };
        assert_eq!(load(None, options(), may).unwrap().listen, ServerConfig::default().listen);
        let listen = vec!["127.0.0.1:7".parse().unwrap()];
        let config = load(None, ServerOptions { listen: listen.clone(), ..options() }, USER).unwrap();
        assert_eq!(config.listen, listen);
    }

    #[test]
    fn root_has_a_tun_unless_it_is_told_otherwise() {
        let config = ServerConfig::resolve(options(), Rights::ALL).unwrap();
        assert_eq!((config.service, config.name.as_str()), (ServerMode::Packets, "mpvpn0"));
        assert_eq!(config.service.note(), None);
        let options = ServerOptions { relay_only: true, ..options() };
        let config = ServerConfig::resolve(options, Rights::ALL).unwrap();
        assert_eq!((config.service, config.listen[0].port()), (ServerMode::Relays, 443));
    }

    #[test]
    fn options_about_a_tun_are_refused_and_keys_of_a_file_are_not() {
        let with_nat = ServerOptions { nat: Some(super::super::Nat::Off), ..options() };
        let error = load(None, with_nat.clone(), USER).unwrap_err();
        assert!(error.to_string().contains("--nat is about a TUN device"), "{error}");
        assert!(error.next_step().contains("sudo"), "{}", error.next_step());
        let error = load(None, ServerOptions { relay_only: true, ..with_nat }, Rights::ALL).unwrap_err();
        assert!(error.to_string().contains("--relay-only"), "{error}");

        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("server.toml");
        std::fs::write(&file, "subnet = '10.9.0.0/16'\nmax-clients = 7\n").unwrap();
        assert_eq!(load(Some(&file), options(), USER).unwrap().service, ServerMode::Unprivileged);
    }
}
