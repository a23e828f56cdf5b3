//! The certificates and users of a server, which the first start creates.
//!
//! In: a [`ServerConfig`]. Out: [`Credentials`], and the message with the complete client command.

use std::{
    io::IsTerminal,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use crate::{
    auth::Authenticator,
    client_certificates::{CertificateCheck, ClientCertificates},
    file::{LockedUsers, UserSettings},
    given_pins::{self, GivenPins},
    join::LinkTrust,
    paths::{LOCK, users_file},
    quotas::UserQuotas,
    users::Users,
};
use mpvpn_config::{AuthMode, ServerConfig};
use mpvpn_identity::{
    acme::{self, AcmeStore},
    cert_files::CertFiles,
    client_ca::ClientCa,
    identity::{Fingerprint, Identity},
    tls::{self, ServerCertificates},
    token::Token,
};
use mpvpn_input::{Error, Result, files, values::ServerAddr};

/// Name of the user that the first start creates.
pub const FIRST_USER: &str = "default";

/// The certificates of a server, and its check of clients' tokens.
#[derive(Debug)]
pub struct Credentials {
    /// The certificates and their keys.
    pub certificates: ServerCertificates,
    /// Where secrets come from that are the same after a restart.
    pub identity: Identity,
    /// The CAs that sign certificates of clients, if these count.
    pub client_ca: Option<ClientCa>,
    /// The check of a client's credentials.
    pub authenticator: Authenticator,
    /// The token of the user that the first start created, as long as the file `client-token` exists.
    pub token: Option<Token>,
}

impl Credentials {
    /// Reads the files that `config` names. Those that it does not name are read from the state folder, and
    /// created there at the first start.
    pub fn load(config: &ServerConfig) -> Result<Self> {
        let Certificates { first: identity, others } = Certificates::load(config)?;
        let clients = ClientCertificates::load(config)?;
        let client_ca = clients.as_ref().map(|clients| clients.ca.clone());
        let (authenticator, token) = match (config.auth, &config.users) {
            (AuthMode::None, _) => (Authenticator::None, None),
            (AuthMode::Mtls, _) => {
                let revoked = clients.map(|clients| clients.revoked).unwrap_or_default();
                let check = CertificateCheck::new(listed_users(config)?.into(), revoked)?;
                (Authenticator::Certificates(check), None)
            }
            (AuthMode::Token, Some(path)) => (Authenticator::Tokens(Users::load(path)?.into()), None),
            (AuthMode::Token, None) => {
                let (users, token) = first_user(&config.state_dir)?;
                (Authenticator::Tokens(users.into()), token)
            }
        };
        if matches!(authenticator, Authenticator::None) {
            tracing::warn!("--auth none: this server accepts every client, without a token");
        }
        if let Some(users) = authenticator.users() {
            if users.now().is_empty() {
                tracing::warn!(
                    "there are no users: every client is refused until `mpvpn user add NAME` adds one"
                );
            }
            let reachability = Reachability::new(config, &identity);
            if let Err(error) = reachability.save(&config.state_dir) {
                tracing::debug!(%error, "`mpvpn user add` will not know the options of this server");
            }
        }
        let certificates = ServerCertificates::new(identity.clone(), others);
        if let Some(acme) = &config.acme {
            certificates
                .set_issued(AcmeStore::new(&config.state_dir, &acme.directory, &acme.domains).certificate());
        }
        Ok(Self { certificates, identity, client_ca, authenticator, token })
    }

    /// Warns if the certificate locks out clients that were given another pin, and remembers the pin that
    /// [`first_start_message`] gives out.
    pub fn note_pins(&self, config: &ServerConfig, address: Option<IpAddr>) {
        let Some(users) = self.authenticator.users() else { return };
        let noted = GivenPins::load(&config.state_dir).and_then(|given| {
            if let Some(lockout) = given.lockout(self.identity.fingerprint(), &users.now()) {
                tracing::warn!("{}", lockout.at_start());
                GivenPins::accept(config, self.identity.fingerprint())?;
            }
            if self.token.is_some() && !given.has(FIRST_USER) {
                let trust = Reachability::new(config, &self.identity).trust(&shown_server(config, address));
                GivenPins::remember(config, FIRST_USER, &trust)?;
            }
            Ok(())
        });
        if let Err(error) = noted {
            tracing::warn!(%error, "nobody will be warned when another certificate locks clients out");
        }
    }

    /// The TLS of the server with the protocols `alpn`.
    ///
    /// # Errors
    /// If the TLS library refuses it.
    pub fn server_tls(&self, alpn: &[&[u8]]) -> Result<rustls::ServerConfig> {
        tls::server_config_for(&self.certificates, self.client_ca.as_ref(), alpn)
    }
}

/// The users that certificates may name. If the configuration names no file, an empty one is made in the
/// state folder.
fn listed_users(config: &ServerConfig) -> Result<Users> {
    let path = users_file(config);
    if config.users.is_none() && !path.exists() {
        LockedUsers::open(&path)?.create()?;
    }
    Users::load(&path)
}

/// The certificates that a configuration names, with their keys.
#[derive(Debug)]
pub struct Certificates {
    /// For clients that ask for no name or an unknown one, too.
    pub first: Identity,
    /// For further server names.
    pub others: Vec<Identity>,
}

impl Certificates {
    /// Reads the files that `config` names; without any the certificate in the state folder, which is made if
    /// there is none yet.
    ///
    /// # Errors
    /// If a file cannot be read, or a key does not belong to its certificate.
    pub fn load(config: &ServerConfig) -> Result<Self> {
        let load = |files: &CertFiles| Identity::load(&files.cert, &files.key);
        let others = config.more_certs.iter().map(load).collect::<Result<_>>()?;
        Ok(Self { first: identity(config)?, others })
    }

    /// Whether a server shows these already.
    pub fn are_shown_by(&self, shown: &ServerCertificates) -> bool {
        shown.are(&self.first, &self.others)
    }
}

/// The files in the state folder of a server by which its users are known, and it by them, whether they exist
/// or not; folders come after the files in them.
pub fn state_files(config: &ServerConfig) -> Vec<PathBuf> {
    let names =
        ["users.toml", "client-token", "server.crt", "server.key", LAST_START, given_pins::FILE, LOCK]
            .map(|name| config.state_dir.join(name));
    let quotas = UserQuotas::file(&config.state_dir, &config.name);
    names.into_iter().chain([leases_file(config), quotas]).chain(acme::files_in(&config.state_dir)).collect()
}

/// The file with the leases of a server.
pub fn leases_file(config: &ServerConfig) -> PathBuf {
    config.state_dir.join(format!("leases-{}.json", config.name))
}

/// The file with the token of the user that the first start created; nobody but its owner can read it.
fn token_file(state_dir: &Path) -> PathBuf {
    state_dir.join("client-token")
}

/// The users of `state_dir`; if there is no file yet, one user is created. With the token of that user if its
/// file exists.
fn first_user(state_dir: &Path) -> Result<(Users, Option<Token>)> {
    let (users_file, token_file) = (state_dir.join("users.toml"), token_file(state_dir));
    files::create_private_dir(state_dir)?;
    if !users_file.exists() {
        let mut users = LockedUsers::open(&users_file)?;
        // One of two processes that start together makes the user.
        if users.users().is_empty() {
            let token = users.add_with(FIRST_USER, &UserSettings::default(), |token| {
                // The token is written first: after a crash in between, its hash alone would lock everybody
                // out.
                files::write_secret(&token_file, format!("{}\n", token.reveal()).as_bytes())
            })?;
            return Ok((users.users().clone(), Some(token)));
        }
    }
    let users = Users::load(&users_file)?;
    if !token_file.exists() {
        return Ok((users, None));
    }
    let token: Token = files::read_text(&token_file)?.trim().parse().map_err(|error| Error::Content {
        path: token_file,
        expected: "one token on one line",
        found: format!("something else ({error})"),
    })?;
    let known = users.user_with(&token, SystemTime::now()).is_ok();
    Ok((users, known.then_some(token)))
}

/// How clients reach a server: what it said at its last start counts, as it may have been started with other
/// options than the command that asks.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Reachability {
    /// The SHA-256 of its certificate.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub pin: Fingerprint,
    /// Its port.
    pub port: u16,
    /// Whether clients show certificates instead of tokens.
    #[serde(default)]
    pub client_certificates: bool,
    /// Names for which a CA that machines trust signs its certificates, in lower case.
    #[serde(default)]
    pub public_names: Vec<String>,
}

/// Name of the file with the [`Reachability`] of the last start, in the state folder.
const LAST_START: &str = "last-start.json";

fn as_text<S: serde::Serializer>(pin: &Fingerprint, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(pin)
}

fn from_text<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Fingerprint, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

impl Reachability {
    /// Of the server with this configuration: as its last start said, else as the configuration says; a
    /// certificate is made if there is none yet.
    ///
    /// # Errors
    /// If the certificate cannot be read or made.
    pub fn of(config: &ServerConfig) -> Result<Self> {
        let last = files::read(&config.state_dir.join(LAST_START)).ok();
        if let Some(last) = last.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            return Ok(last);
        }
        Ok(Self::new(config, &identity(config)?))
    }

    fn new(config: &ServerConfig, identity: &Identity) -> Self {
        let ordered = config.acme.iter().flat_map(|acme| acme.domains.iter().cloned());
        let mut public_names: Vec<String> = ordered.collect();
        // A certificate that mpvpn made is signed by nobody.
        if config.cert.is_some() {
            public_names.extend(tls::publicly_trusted_names(identity.certs()));
        }
        let client_certificates = config.auth == AuthMode::Mtls;
        Self { pin: identity.fingerprint(), port: port(config), client_certificates, public_names }
    }

    /// How clients that connect to `server` know it: by its pin, unless a CA that machines trust signs its
    /// certificates for that name, and goes on doing so when a certificate is renewed.
    pub fn trust(&self, server: &ServerAddr) -> LinkTrust {
        let host = server.host.to_ascii_lowercase();
        let beside = || host.split_once('.').is_some_and(|(_, rest)| self.has(&format!("*.{rest}")));
        match server.ip().is_none() && (self.has(&host) || beside()) {
            true => LinkTrust::System,
            false => LinkTrust::Pins(vec![self.pin]),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.public_names.iter().any(|public| public == name)
    }

    /// Keeps what `mpvpn user add` has to know of a running server whose certificate was replaced.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn keep(config: &ServerConfig, identity: &Identity) -> Result<()> {
        match config.auth {
            AuthMode::Token | AuthMode::Mtls => Self::new(config, identity).save(&config.state_dir),
            AuthMode::None => Ok(()),
        }
    }

    /// Keeps it for [`Self::of`].
    fn save(&self, state_dir: &Path) -> Result<()> {
        files::create_private_dir(state_dir)?;
        let text = serde_json::to_string(self).unwrap_or_default();
        files::write_secret(&state_dir.join(LAST_START), text.as_bytes())
    }

    /// Name or address at which clients reach the server, as far as it is known.
    ///
    /// # Errors
    /// If no address of this machine is known.
    pub fn address(&self, config: &ServerConfig) -> Result<ServerAddr> {
        let guess =
            || guess_address(&config.listen).map(|ip| ServerAddr { host: ip.to_string(), port: self.port });
        configured_address(config).or_else(guess).ok_or_else(|| {
            Error::usage(
                "this machine has no address by which clients could reach the server",
                "say how they reach it by --host HOST:PORT, or by `public` in the server's file",
            )
        })
    }
}

/// The certificate that the configuration names, else that of the state folder, which is made if there is
/// none yet.
fn identity(config: &ServerConfig) -> Result<Identity> {
    match &config.cert {
        Some(files) => Identity::load(&files.cert, &files.key),
        None => Identity::load_or_create(&config.state_dir),
    }
}

/// The first of the names for which the server orders a certificate.
fn ordered_address(config: &ServerConfig) -> Option<ServerAddr> {
    let name = config.acme.as_ref()?.domains.first()?;
    Some(ServerAddr { host: name.clone(), port: port(config) })
}

fn port(config: &ServerConfig) -> u16 {
    config.listen.first().map_or(443, SocketAddr::port)
}

/// How clients reach the server, for [`first_start_message`].
fn shown_server(config: &ServerConfig, address: Option<IpAddr>) -> ServerAddr {
    let host = address.map_or_else(|| "SERVER-ADDRESS".to_owned(), |address| address.to_string());
    configured_address(config).unwrap_or(ServerAddr { host, port: port(config) })
}

/// The output to which the message of the start is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A terminal, which shows the token.
    Terminal,
    /// A log or a file, which names the file with the token.
    Log,
}

impl Reader {
    /// The reader of the standard output.
    pub fn of_stdout() -> Self {
        if std::io::stdout().is_terminal() { Self::Terminal } else { Self::Log }
    }
}

/// The name or address at which clients reach the server, as far as its configuration says it.
fn configured_address(config: &ServerConfig) -> Option<ServerAddr> {
    config.public.clone().or_else(|| ordered_address(config))
}

/// The message that a server prints at its start: the complete command of a client. `address` is the server's
/// public address, as found by [`guess_address`].
pub fn first_start_message(
    config: &ServerConfig,
    credentials: &Credentials,
    address: Option<IpAddr>,
    reader: Reader,
) -> String {
    let is_unknown = address.is_none() && configured_address(config).is_none();
    let server = shown_server(config, address);
    let trust = Reachability::new(config, &credentials.identity).trust(&server).options();
    let mut options = format!("--server {server} {trust}");
    let shown_token = credentials.token.as_ref().filter(|_| reader == Reader::Terminal);
    if let Some(token) = shown_token {
        options.push_str(&format!(" --token {}", token.reveal()));
    } else if config.auth == AuthMode::Token {
        options.push_str(" --token-file FILE");
    } else if config.auth == AuthMode::Mtls {
        options.push_str(" --cert CERT.pem --key KEY.pem");
    }
    let mut message = format!("A client connects with\n  mpvpn client {options}\n");
    if let Some(note) = config.service.note() {
        message.push_str(&format!("or, without root,\n  mpvpn proxy --socks5 127.0.0.1:1080 {options}\n"));
        message.insert_str(0, &format!("This server {note}.\n"));
    }
    if is_unknown {
        message.push_str("with this machine's address for SERVER-ADDRESS.\n");
    }
    if credentials.token.is_some() && shown_token.is_none() {
        let file = token_file(&config.state_dir);
        message.push_str(&format!("A token, for FILE, is in {} on this machine.\n", file.display()));
    } else if credentials.token.is_none() && config.auth == AuthMode::Token {
        message.push_str("FILE has the token of a user: `mpvpn user add NAME` on this machine adds one, and prints a link instead.\n");
    }
    message
}

/// The address by which clients most probably reach this machine: the first specific address of `listen`,
/// else the source address of the default route. Sends no packet.
pub fn guess_address(listen: &[SocketAddr]) -> Option<IpAddr> {
    if let Some(named) = listen.iter().find(|address| !address.ip().is_unspecified()) {
        return Some(named.ip());
    }
    // Connecting a UDP socket only asks the routing table. The destinations are for documentation
    // (RFC 5737, RFC 3849): any address beyond the default route gives the same answer.
    let v4 = (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)));
    let v6 = (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)));
    [v4, v6].into_iter().find_map(|(from, to)| {
        let socket = UdpSocket::bind((from, 0)).ok()?;
        socket.connect((to, 443)).ok()?;
        socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_unspecified())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denied::Denied;

    fn config(state_dir: &Path) -> ServerConfig {
        ServerConfig {
            state_dir: state_dir.into(),
            listen: vec!["203.0.113.1:4433".parse().unwrap()],
            ..ServerConfig::default()
        }
    }

    #[test]
    fn the_first_start_prints_a_command_that_later_starts_repeat() {
        let home = tempfile::tempdir().unwrap();
        let config = config(&home.path().join("deep/state"));
        let first = Credentials::load(&config).unwrap();
        let message = |credentials: &Credentials, reader| {
            first_start_message(&config, credentials, guess_address(&config.listen), reader)
        };
        let token = first.token.clone().unwrap();
        assert_eq!(
            message(&first, Reader::Terminal),
            format!(
                "A client connects with\n  mpvpn client --server 203.0.113.1:4433 --pin {} --token {}\n",
                first.identity.fingerprint(),
                token.reveal()
            )
        );
        // A log shows nobody the token.
        assert_eq!(
            message(&first, Reader::Log),
            format!(
                "A client connects with\n  mpvpn client --server 203.0.113.1:4433 --pin {} --token-file FILE\n\
                 A token, for FILE, is in {} on this machine.\n",
                first.identity.fingerprint(),
                home.path().join("deep/state/client-token").display()
            )
        );
        assert_eq!(first.authenticator.check(Some(&token.authorization())).unwrap().name, "default");

        let second = Credentials::load(&config).unwrap();
        assert_eq!(message(&second, Reader::Terminal), message(&first, Reader::Terminal));
        assert_eq!(second.authenticator.check(None), Err(Denied::Missing));
    }

    #[test]
    fn a_token_that_is_no_longer_valid_is_not_printed() {
        let home = tempfile::tempdir().unwrap();
        let config = config(home.path());
        Credentials::load(&config).unwrap();
        LockedUsers::open(&home.path().join("users.toml")).unwrap().rotate("default").unwrap();
        let later = Credentials::load(&config).unwrap();
        assert_eq!(later.token, None);
        let message = first_start_message(&config, &later, None, Reader::Terminal);
        assert!(message.contains("--server SERVER-ADDRESS:4433"), "{message}");
        assert!(message.contains("--token-file FILE"), "{message}");
        assert!(message.contains("`mpvpn user add NAME` on this machine adds one"), "{message}");
    }

    #[test]
    fn the_printed_command_has_the_address_of_the_configuration() {
        let home = tempfile::tempdir().unwrap();
        let public = Some("vpn.example:8443".parse().unwrap());
        let config = ServerConfig { public, ..config(home.path()) };
        let credentials = Credentials::load(&config).unwrap();
        let message = first_start_message(&config, &credentials, None, Reader::Terminal);
        assert!(message.contains("mpvpn client --server vpn.example:8443 --pin "), "{message}");
        assert!(!message.contains("SERVER-ADDRESS"), "{message}");
    }

    #[test]
    fn a_users_file_that_is_named_must_be_there() {
        let home = tempfile::tempdir().unwrap();
        let users = Some(home.path().join("nobody.toml"));
        let config = ServerConfig { users, ..config(home.path()) };
        let error = Credentials::load(&config).unwrap_err().to_string();
        assert!(error.contains("nobody.toml"), "{error}");
    }

    #[test]
    fn what_the_last_start_said_counts_for_who_does_not_know_its_options() {
        let home = tempfile::tempdir().unwrap();
        let without_options = ServerConfig { state_dir: home.path().into(), ..ServerConfig::default() };
        let before = Reachability::of(&without_options).unwrap();
        assert_eq!(before.port, 443);
        let started = Credentials::load(&config(home.path())).unwrap();
        let after = Reachability::of(&without_options).unwrap();
        assert_eq!((after.pin, after.port), (started.identity.fingerprint(), 4433));
        let named = ServerConfig { public: Some("vpn.example:1".parse().unwrap()), ..without_options };
        assert_eq!(after.address(&named).unwrap().to_string(), "vpn.example:1");
    }

    #[test]
    fn who_reaches_a_server_by_a_name_of_its_certificate_of_a_ca_trusts_the_cas_and_others_the_pin() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("server.toml");
        std::fs::write(&file, "[acme]\ndomains = ['vpn.example.org', 'www.example.org']\n").unwrap();
        let options = mpvpn_config::ServerOptions {
            state_dir: Some(home.path().join("state")),
            api_socket: Some(home.path().join("api")),
            ..Default::default()
        };
        let config = ServerConfig::load(Some(&file), options, mpvpn_config::Rights::ALL).unwrap();
        let credentials = Credentials::load(&config).unwrap();
        let message =
            first_start_message(&config, &credentials, guess_address(&config.listen), Reader::Terminal);
        assert!(message.contains("--server vpn.example.org:443 --ca system --token"), "{message}");
        let reachability = Reachability::of(&config).unwrap();
        assert_eq!(reachability.address(&config).unwrap().to_string(), "vpn.example.org:443");
        let pins = LinkTrust::Pins(vec![credentials.identity.fingerprint()]);
        for (host, trust) in [
            ("vpn.example.org", LinkTrust::System),
            ("WWW.Example.org:4433", LinkTrust::System),
            ("other.example.org", pins.clone()),
            ("192.0.2.1", pins),
        ] {
            assert_eq!(reachability.trust(&host.parse().unwrap()), trust, "{host}");
        }
    }

    #[test]
    fn without_auth_no_users_are_made_and_no_token_is_printed() {
        let home = tempfile::tempdir().unwrap();
        let config = ServerConfig { auth: AuthMode::None, ..config(home.path()) };
        let credentials = Credentials::load(&config).unwrap();
        assert!(!home.path().join("users.toml").exists());
        assert!(!first_start_message(&config, &credentials, None, Reader::Log).contains("token"));
    }
}
