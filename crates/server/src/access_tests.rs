//! The end of a user's access: users in a file as a server reads it, with tokens or with certificates, shards
//! with their messages, and clients with real TLS and HTTP/3, in simulated time. A carrier is a QUIC
//! connection of a client, or the loopback connection by which the gateway forwards the requests of one TCP
//! connection: many over HTTP/2, one over HTTP/1.1. The TCP side of the latter is tested in `mpvpn-https`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::BytesMut;
use mpvpn_config::{AuthMode, ServerConfig};
use mpvpn_identity::{
    cert_files::CertFiles,
    tls::{self, LastRefusal},
    trust::Trust,
};
use mpvpn_input::shared::Shared;
use mpvpn_masque::{
    connect, connect_ip::ConnectIpRequest, connect_mpvpn, connect_udp, extensions::Extensions,
    headers::Headers, structured::Typed,
};
use mpvpn_quic::{ClientSetup, OwnSockets, ServerSetup, Shard, TransportOptions, shard_of};
use mpvpn_tunnel::{CertificateId, Forwarder, Registry, RelayId, ResponseStatus, Server, ServerEvent, UdpId};
use mpvpn_types::ByteSize;
use mpvpn_users::{
    Expiry, ExpiryOption, LockedUsers, SettingsChange, UserCredential, UserSettings, auth::Authenticator,
    client_certificates, credentials::Credentials, users_file,
};
use proptest::prelude::*;

// The CA of the tests of `https`, which makes certificates by `rcgen::CertificateParams`.
#[path = "../../https/src/tests/client_ca.rs"]
mod client_ca;

use client_ca::{Ca, Issued};

use crate::{
    store::FileStore,
    tunnel_config,
    users::{UserChecks, UserList},
};

const MS: Duration = Duration::from_millis(1);
/// The time after which nothing of a refused user lives.
const LIMIT: Duration = Duration::from_secs(1);
/// The delay of a message to each further shard.
const MESSAGE_DELAY: Duration = Duration::from_millis(25);
const SERVER: &str = "192.0.2.1:443";
/// A target whose connection stays pending at the edge.
const PENDING: &str = "pending.example:80";
const TARGET: &str = "target.example:80";
const USERS: [&str; 3] = ["alice", "bob", "carol"];
const QUOTA: u64 = 5_000_000;

/// Messages to shards: users without access, with the reasons, and certificates that were revoked.
type Ended = Arc<(BTreeMap<String, String>, BTreeSet<CertificateId>)>;

/// The credentials of a user: the `authorization` field, or a certificate. For that of a TCP connection the
/// TCP side vouches.
enum Credential {
    Token(String),
    Certificate(Issued),
}

/// The gateway has all ports of the loopback address.
#[derive(Debug)]
struct Gateway;

impl OwnSockets for Gateway {
    fn contains(&self, address: SocketAddr) -> bool {
        address.ip() == Ipv4Addr::LOCALHOST
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Quic,
    Http2,
    Http1,
}

/// A request, or one that is parked: refused after its credentials were checked, or pending at the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Session,
    Join,
    Tcp,
    Udp,
    Mpvpn,
    ParkedJoin,
    ParkedNumber,
    ParkedTcp,
}

const PARKED: [Kind; 3] = [Kind::ParkedJoin, Kind::ParkedNumber, Kind::ParkedTcp];

/// A connection of a client.
struct Connection {
    forwarder: Forwarder,
    carrier: Carrier,
    address: SocketAddr,
    /// The certificate that it has shown in its handshake, and which counts for all of its requests.
    certificate: Option<(usize, usize)>,
    requests: Vec<RelayId>,
    /// The credentials of its owner that were valid when they were shown: a user, and the number of the
    /// token.
    shown: BTreeSet<(usize, usize)>,
    /// Whether a request was accepted.
    is_used: bool,
}

struct World {
    _folder: tempfile::TempDir,
    config: ServerConfig,
    credentials: Credentials,
    list: UserList,
    client: ClientSetup,
    registry: Registry,
    shards: Vec<Server>,
    now: Instant,
    /// Messages to shards about the end of access, with the time at which they arrive.
    messages: Vec<(Instant, usize, Ended)>,
    connections: Vec<Connection>,
    /// The tokens or certificates of each user, the newest last.
    tokens: Vec<Vec<Credential>>,
    /// The CA of the certificates, if these are what counts.
    ca: Option<Ca>,
    /// The newest session of each user.
    secrets: BTreeMap<usize, Vec<u8>>,
    /// The field `proxy-status` of the last response.
    last_reason: Option<String>,
    /// Open relays and UDP flows at the edge, with their shard and user.
    relays: BTreeMap<(usize, RelayId), String>,
    flows: BTreeMap<(usize, UdpId), String>,
}

impl World {
    fn new(shards: u8) -> Self {
        Self::with(shards, None)
    }

    /// A server whose users have certificates of a CA, if there is one.
    fn with(shards: u8, mut ca: Option<Ca>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = ServerConfig {
            state_dir: folder.path().into(),
            auth: if ca.is_some() { AuthMode::Mtls } else { AuthMode::Token },
            users: Some(folder.path().join("users.toml")),
            client_ca: ca.as_ref().map(Ca::certificate_file),
            crl: ca.as_ref().map(Ca::revocations_file),
            ..ServerConfig::default()
        };
        let settings = UserSettings { quota: Some(ByteSize::from_bytes(QUOTA)), ..UserSettings::default() };
        let mut users = LockedUsers::open(&users_file(&config)).unwrap();
        let tokens = USERS.map(|name| {
            let token = users.add_with_credential(name, &settings, config.auth.into()).unwrap();
            let by_token = token.map(|token| Credential::Token(token.authorization()));
            vec![by_token.unwrap_or_else(|| Credential::Certificate(ca.as_mut().expect("a CA").issue(name)))]
        });
        drop(users);
        let credentials = Credentials::load(&config).unwrap();
        let client = client_setup(&credentials, None);
        let list = UserList::open(FileStore::new(&config), &credentials.authenticator).unwrap().unwrap();
        let registry = Registry::new(config.subnet, config.subnet6, 200);
        let mut world = Self {
            _folder: folder,
            config,
            credentials,
            list,
            client,
            registry,
            shards: Vec::new(),
            now: Instant::now(),
            messages: Vec::new(),
            connections: Vec::new(),
            tokens: tokens.into(),
            ca,
            secrets: BTreeMap::new(),
            last_reason: None,
            relays: BTreeMap::new(),
            flows: BTreeMap::new(),
        };
        world.start(shards);
        world
    }

    /// Starts the shards of a server that knows nothing of an earlier one but its files.
    fn start(&mut self, shards: u8) {
        let tls = Arc::new(self.credentials.server_tls(&[b"h3"]).unwrap());
        let setup = ServerSetup::new(tls, &TransportOptions::for_shards(shards), &[7; 32]).unwrap();
        let setup = setup.with_own_sockets(Arc::new(Gateway));
        let (config, credentials) = (&self.config, &self.credentials);
        self.registry = Registry::new(config.subnet, config.subnet6, 200);
        let registry = &self.registry;
        let server = |shard: Shard| {
            let users = UserChecks {
                authenticator: credentials.authenticator.clone(),
                limits: Shared::from(Vec::new()),
                has_rules_of_users: Arc::default(),
            };
            let config = tunnel_config(config, setup.clone(), (users, Vec::new()));
            Server::shard(config, registry.clone(), shard)
        };
        self.shards = Shard::all(shards).map(server).collect();
    }

    /// Ends the process and starts another one with the same files.
    fn restart(&mut self) {
        self.list.save(self.now);
        let shards = self.shards.len() as u8;
        self.credentials = Credentials::load(&self.config).unwrap();
        let list = UserList::open(FileStore::new(&self.config), &self.credentials.authenticator);
        self.list = list.unwrap().unwrap();
        self.connections.clear();
        self.relays.clear();
        self.flows.clear();
        self.messages.clear();
        self.start(shards);
    }

    /// Opens a connection to a shard.
    fn connect(&mut self, carrier: Carrier, shard: u8) -> usize {
        let at = self.connections.len();
        let ip = if carrier == Carrier::Quic { Ipv4Addr::new(198, 51, 100, 1) } else { Ipv4Addr::LOCALHOST };
        let address = SocketAddr::from((ip, 20_000 + at as u16));
        // Connections belong to the users in turn, and those with a certificate show it.
        let user = at % USERS.len();
        let shown = self.tokens[user].last().filter(|_| carrier == Carrier::Quic);
        let (certificate, setup) = match shown {
            Some(Credential::Certificate(issued)) => {
                (Some(self.newest(user)), client_setup(&self.credentials, Some(&issued.files)))
            }
            _ => (None, self.client.clone()),
        };
        let setup = setup.steered(shard);
        let remote = SERVER.parse().unwrap();
        let forwarder = Forwarder::connect(self.now, &setup, remote, "mpvpn").unwrap();
        let (requests, shown) = (Vec::new(), BTreeSet::new());
        let is_used = false;
        let connection = Connection { forwarder, carrier, address, certificate, requests, shown, is_used };
        self.connections.push(connection);
        self.run(5 * MS);
        at
    }

    fn headers(&self, kind: Kind, user: usize, authorization: &str) -> Headers {
        let session = |extensions: Option<Extensions>| {
            let mut request = ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/");
            request.authorization = Some(authorization.to_owned());
            request.extensions = extensions.map(|extensions| extensions.value());
            request.headers()
        };
        let join = |secret: Vec<u8>, number: usize| {
            let field = format!("v=1, connection={number}");
            let mut extensions = Extensions::parse([field.as_bytes()].into_iter()).unwrap();
            extensions.set("session", secret.into());
            session(Some(extensions))
        };
        let own = self.secrets.get(&user).cloned();
        match kind {
            Kind::Session => session(Extensions::parse([&b"v=1"[..]].into_iter())),
            // Each has a number of its own, so that none replaces another.
            Kind::Join => join(own.unwrap_or(vec![1; 16]), 1 + self.connections.len() % 120),
            Kind::Tcp => connect::request(&TARGET.parse().unwrap(), Some(authorization)),
            Kind::Udp => {
                let path = connect_udp::path(&"192.0.2.9:53".parse().unwrap());
                connect_udp::request(SERVER, &path, Some(authorization))
            }
            Kind::Mpvpn => connect_mpvpn::request(SERVER, Some(authorization), Some("v=1".to_owned())),
            Kind::ParkedJoin => join(vec![9; 16], 3),
            Kind::ParkedNumber => join(vec![9; 16], 200),
            Kind::ParkedTcp => connect::request(&PENDING.parse().unwrap(), Some(authorization)),
        }
    }

    /// Makes a request with a token of a user, and returns the status of the response. `None`: there is none
    /// yet, or the connection is closed.
    fn request(&mut self, at: usize, kind: Kind, shown: (usize, usize)) -> Option<u16> {
        let (user, token) = self.connections[at].certificate.unwrap_or(shown);
        let authorization = self.authorization((user, token));
        let is_valid = self.is_valid((user, token));
        let headers = self.headers(kind, user, &authorization);
        let connection = &mut self.connections[at];
        if connection.carrier == Carrier::Http1 && !connection.requests.is_empty() {
            return None;
        }
        let request = connection.forwarder.request(&headers)?;
        connection.requests.push(request);
        // A connection belongs to the user whose credentials it has shown first.
        if is_valid && connection.shown.iter().all(|(owner, _)| *owner == user) {
            connection.shown.insert((user, token));
        }
        self.run(5 * MS);
        let ResponseStatus::Received(answer) = self.connections[at].forwarder.answer(self.now, request)
        else {
            return None;
        };
        let status = answer.status().unwrap();
        self.last_reason = answer.text("proxy-status").map(str::to_owned);
        self.connections[at].is_used |= status == 200;
        if kind == Kind::Session && status == 200 {
            let secret = Extensions::of(&answer).unwrap().get("session").unwrap().bytes().unwrap().to_vec();
            self.secrets.insert(user, secret);
        }
        Some(status)
    }

    /// The field by which a client shows a token, or the TCP side a certificate.
    fn authorization(&self, (user, token): (usize, usize)) -> String {
        match (&self.tokens[user][token], &self.credentials.authenticator) {
            (Credential::Token(authorization), _) => authorization.clone(),
            (Credential::Certificate(issued), Authenticator::Certificates(check)) => {
                check.forward(&issued.der).unwrap()
            }
            (Credential::Certificate(_), _) => panic!("a certificate at a server without a CA"),
        }
    }

    /// Whether the server accepts a token now.
    fn is_valid(&self, shown: (usize, usize)) -> bool {
        self.credentials.authenticator.check(Some(&self.authorization(shown))).is_ok()
    }

    fn newest(&self, user: usize) -> (usize, usize) {
        (user, self.tokens[user].len() - 1)
    }

    /// Changes the users' file, which the server reads.
    fn change(&mut self, change: impl FnOnce(&mut LockedUsers)) {
        change(&mut LockedUsers::open(&users_file(&self.config)).unwrap());
        self.reload();
    }

    fn reload(&mut self) {
        let read = self.list.read(self.now, SystemTime::now()).unwrap();
        let (ended, revoked) = read.map(|change| (change.ended, change.revoked)).unwrap_or_default();
        self.end(ended, revoked);
    }

    fn set(&mut self, user: usize, change: &SettingsChange) {
        self.change(|users| users.set(USERS[user], change).unwrap());
    }

    fn rotate(&mut self, user: usize) {
        if let (Some(ca), Some(Credential::Certificate(old))) = (&mut self.ca, self.tokens[user].last()) {
            ca.revoke(old);
            let new = ca.issue(USERS[user]);
            self.tokens[user].push(Credential::Certificate(new));
            // A user that was not revoked needs no other entry.
            return self.change(|users| drop(users.renew(USERS[user], UserCredential::Certificate)));
        }
        let mut token = None;
        self.change(|users| token = Some(users.rotate(USERS[user]).unwrap()));
        self.tokens[user].extend(token.map(|token| Credential::Token(token.authorization())));
    }

    /// Counts more for a user than the quota.
    fn use_up(&mut self, user: usize) {
        self.set(
            user,
            &SettingsChange { quota: Some(Some(ByteSize::from_bytes(QUOTA))), ..Default::default() },
        );
        let carried = [(USERS[user].to_owned(), QUOTA)];
        let ended = self.list.count(self.now, SystemTime::now(), &carried);
        self.end(ended.unwrap_or_default(), BTreeSet::new());
    }

    /// Gives a user the access back.
    fn restore(&mut self, user: usize) {
        self.set(user, &SettingsChange { expires: Some(None), quota: Some(None), ..Default::default() });
        self.rotate(user);
    }

    /// Ends access at the first shard now, and at the others when the message arrives.
    fn end(&mut self, users: BTreeMap<String, String>, certificates: BTreeSet<CertificateId>) {
        if users.is_empty() && certificates.is_empty() {
            return;
        }
        let ended = Arc::new((users, certificates));
        Self::tell(&mut self.shards[0], self.now, &ended);
        for shard in 1..self.shards.len() {
            self.messages.push((self.now + MESSAGE_DELAY * shard as u32, shard, Arc::clone(&ended)));
        }
    }

    fn tell(shard: &mut Server, now: Instant, ended: &Ended) {
        shard.end_users(now, &ended.0);
        shard.end_certificates(now, &ended.1, client_certificates::REVOKED);
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            // Without delay on the way, a handshake ends within the step.
            let mut moved = true;
            for _ in 0..8 {
                if !std::mem::take(&mut moved) {
                    break;
                }
                moved = self.step();
            }
            self.now += MS.max((end - self.now) / 20);
        }
    }

    /// Returns whether datagrams were sent.
    fn step(&mut self) -> bool {
        let (now, count) = (self.now, self.shards.len());
        let mut moved = false;
        for (_, shard, ended) in self.messages.extract_if(.., |(at, ..)| *at <= now) {
            Self::tell(&mut self.shards[shard], now, &ended);
        }
        let mut buffer = Vec::new();
        for connection in &mut self.connections {
            connection.forwarder.handle_timeout(now);
            while let Some(transmit) = connection.forwarder.poll_transmit(now, &mut buffer) {
                moved = true;
                for datagram in buffer.chunks(transmit.segment_size.unwrap_or(buffer.len()).max(1)) {
                    let shard = usize::from(shard_of(datagram, count as u8));
                    let local = SERVER.parse::<SocketAddr>().unwrap().ip();
                    let data = BytesMut::from(datagram);
                    self.shards[shard].handle_datagram(now, Some(local), connection.address, 0, data);
                }
                buffer.clear();
            }
        }
        for shard in 0..count {
            self.shards[shard].handle_batch(now);
            self.shards[shard].handle_timeout(now);
            self.serve(shard);
            let server = &mut self.shards[shard];
            while let Some(transmit) = server.poll_transmit(now, &mut buffer) {
                moved = true;
                let to = self.connections.iter_mut().find(|connection| connection.address == transmit.remote);
                let forwarder = to.map(|connection| &mut connection.forwarder);
                if let Some(forwarder) = forwarder {
                    for datagram in buffer.chunks(transmit.segment_size.unwrap_or(buffer.len()).max(1)) {
                        let data = BytesMut::from(datagram);
                        forwarder.handle_datagram(now, SERVER.parse().unwrap(), 0, data);
                    }
                }
                buffer.clear();
            }
        }
        for connection in &mut self.connections {
            connection.forwarder.handle_batch(now);
            while connection.forwarder.poll_event().is_some() {}
        }
        moved
    }

    /// The edge of a shard.
    fn serve(&mut self, shard: usize) {
        let server = &mut self.shards[shard];
        while let Some(event) = server.poll_event() {
            match event {
                ServerEvent::Connect { relay, user, to } => {
                    self.relays.insert((shard, relay), user);
                    if to.to_string() != PENDING {
                        server.relay_opened(relay);
                    }
                }
                ServerEvent::ConnectUdp { udp, user, .. } => {
                    self.flows.insert((shard, udp), user);
                    server.udp_opened(udp);
                }
                ServerEvent::Visit { visit, .. } => {
                    server.visit_respond(visit, &Headers::response(404));
                    server.visit_finish(self.now, visit);
                }
                ServerEvent::RelayGone(relay) => drop(self.relays.remove(&(shard, relay))),
                ServerEvent::UdpGone(udp) => drop(self.flows.remove(&(shard, udp))),
                _ => {}
            }
        }
        while server.poll_change().is_some() {}
        while server.poll_closed_connection().is_some() {}
        while server.poll_udp().is_some() {}
    }

    /// The users of whom something lives.
    fn living(&mut self) -> BTreeSet<String> {
        let now = self.now;
        let connected =
            self.shards.iter_mut().flat_map(|server| server.report(now)).map(|report| report.user);
        let relayed = self.relays.values().chain(self.flows.values()).cloned();
        let sessions = self.registry.addresses_by_user().into_iter().map(|(user, _)| user);
        connected.chain(relayed).chain(sessions).collect()
    }

    /// Checks that nothing of users without access lives, no connection that has shown credentials which are
    /// refused now, and every connection in use of other users.
    fn check(&mut self) {
        let living = self.living();
        for (user, name) in USERS.iter().enumerate() {
            let has_access = self.is_valid(self.newest(user));
            assert!(has_access || !living.contains(*name), "something of {name} lives");
        }
        for (at, connection) in self.connections.iter().enumerate() {
            let is_open = !connection.forwarder.is_over();
            match connection.shown.iter().find(|shown| !self.is_valid(**shown)) {
                Some(refused) => assert!(!is_open, "connection {at} has shown {refused:?}, and lives"),
                None => {
                    assert!(is_open || !connection.is_used, "connection {at} of a user with access is closed")
                }
            }
        }
    }
}

/// A client that shows a certificate in its handshakes, if it has one.
fn client_setup(credentials: &Credentials, own: Option<&CertFiles>) -> ClientSetup {
    let trust = Trust::Pin(vec![credentials.identity.fingerprint()]);
    let tls = tls::client_config_reporting(&trust, own, &[b"h3"], &LastRefusal::default()).unwrap();
    ClientSetup::new(Arc::new(tls), &TransportOptions::default(), &[3; 32]).unwrap()
}

fn past() -> Expiry {
    "2020-01-01".parse::<ExpiryOption>().unwrap().resolve(SystemTime::now())
}

#[test]
fn a_connection_with_a_refused_request_ends_with_the_access_of_its_user() {
    for kind in PARKED {
        let mut world = World::new(1);
        let [parked, other] = [0, 1].map(|_| world.connect(Carrier::Quic, 0));
        let status = world.request(parked, kind, (0, 0));
        assert!(status.is_none_or(|status| [400, 409].contains(&status)), "{kind:?}: {status:?}");
        assert_eq!(world.request(other, Kind::Tcp, (1, 0)), Some(200));
        world.change(|users| users.revoke("alice").unwrap());
        world.run(LIMIT);
        assert!(world.connections[parked].forwarder.is_over(), "{kind:?}: the connection lives");
        assert!(!world.connections[other].forwarder.is_over(), "that of another user is closed");
        world.check();
    }
}

#[test]
fn credentials_count_no_more_where_a_shard_has_not_heard_yet_that_access_has_ended() {
    for kind in [Kind::Session, Kind::Tcp, Kind::Udp, Kind::Mpvpn] {
        let mut world = World::new(16);
        let parked = world.connect(Carrier::Quic, 15);
        assert_eq!(world.request(parked, Kind::ParkedJoin, (0, 0)), Some(409));
        world.use_up(0);
        assert_eq!(world.request(parked, kind, (0, 0)), Some(403), "{kind:?} past the quota");
        world.run(LIMIT);
        world.check();
    }
}

#[test]
fn a_user_without_access_is_told_why_where_a_stranger_sees_the_site_and_stays_a_stranger() {
    for kind in [Kind::Session, Kind::Join, Kind::Tcp, Kind::Udp, Kind::Mpvpn] {
        let mut world = World::new(1);
        world.config.site.hide = true;
        world.start(1);
        world.change(|users| users.revoke("alice").unwrap());
        let stranger = world.connect(Carrier::Quic, 0);
        world.tokens[1].push(Credential::Token("Bearer nobody".to_owned()));
        assert_eq!(world.request(stranger, kind, (1, 1)), Some(404), "{kind:?}: a stranger");
        assert_eq!(world.last_reason, None, "{kind:?}: a stranger");
        let known = world.connect(Carrier::Quic, 0);
        assert_eq!(world.request(known, kind, (0, 0)), Some(403), "{kind:?}");
        let reason = "proxy; details=\"the access of this user was revoked\"";
        assert_eq!(world.last_reason.as_deref(), Some(reason), "{kind:?}");
        assert_eq!(world.registry.held_by_user(), BTreeMap::new(), "a connection counts for a user");
    }
}

#[test]
fn what_a_user_opens_with_a_newer_token_outlives_a_late_message_about_the_older_one() {
    let mut world = World::new(16);
    let before = world.connect(Carrier::Quic, 15);
    assert_eq!(world.request(before, Kind::Tcp, (0, 0)), Some(200));
    world.change(|users| users.revoke("alice").unwrap());
    world.restore(0);
    let after = world.connect(Carrier::Quic, 15);
    assert_eq!(world.request(after, Kind::Tcp, world.newest(0)), Some(200));
    assert!(!world.messages.is_empty(), "the last shard knows already");
    world.run(LIMIT);
    let is_over = [before, after].map(|at| world.connections[at].forwarder.is_over());
    assert_eq!(is_over, [true, false], "that of the older token, and that of the newer one");
    world.check();
}

/// A step of an order that is tested. Numbers that are too large count modulo what there is.
#[derive(Clone, Debug)]
enum Op {
    Connect(Carrier, u8),
    /// A request of a kind on a connection with a token of a user: the newest, or the one before.
    Request(usize, Kind, usize, bool),
    Revoke(usize),
    Rotate(usize),
    Expire(usize),
    UseUp(usize),
    Restore(usize),
    Reload,
    Restart,
    Wait,
}

fn op() -> impl Strategy<Value = Op> {
    use Kind::{Join, Mpvpn, Session, Tcp, Udp};
    let carriers = prop::sample::select(vec![Carrier::Quic, Carrier::Http2, Carrier::Http1]);
    let request = |kinds: Vec<Kind>| {
        let request =
            (any::<usize>(), prop::sample::select(kinds), any::<usize>(), prop::bool::weighted(0.9));
        request.prop_map(|(at, kind, user, is_newest)| Op::Request(at, kind, user, is_newest))
    };
    prop_oneof![
        6 => (carriers, 0..16u8).prop_map(|(carrier, shard)| Op::Connect(carrier, shard)),
        5 => request(PARKED.to_vec()),
        8 => request(vec![Session, Join, Tcp, Udp, Mpvpn]),
        2 => any::<usize>().prop_map(Op::Revoke),
        1 => any::<usize>().prop_map(Op::Rotate),
        1 => any::<usize>().prop_map(Op::Expire),
        1 => any::<usize>().prop_map(Op::UseUp),
        2 => any::<usize>().prop_map(Op::Restore),
        1 => Just(Op::Reload),
        1 => Just(Op::Restart),
        1 => Just(Op::Wait),
    ]
}

/// Without a CA, users have tokens.
fn play(shards: u8, ca: Option<Ca>, ops: &[Op]) {
    let mut world = World::with(shards, ca);
    world.connect(Carrier::Quic, shards - 1);
    for op in ops {
        let user = |number: usize| number % USERS.len();
        match *op {
            Op::Connect(carrier, shard) => _ = world.connect(carrier, shard),
            Op::Request(..) if world.connections.is_empty() => {}
            Op::Request(at, kind, number, is_newest) => {
                let at = at % world.connections.len();
                let (user, newest) = world.newest(user(number));
                let token = if is_newest { newest } else { newest.saturating_sub(1) };
                let is_valid = world.is_valid(world.connections[at].certificate.unwrap_or((user, token)));
                match world.request(at, kind, (user, token)) {
                    Some(401 | 403) => assert!(!is_valid, "{op:?}: valid credentials are refused"),
                    Some(status) => {
                        assert!(is_valid, "{op:?}: refused credentials are answered with {status}")
                    }
                    None => {}
                }
            }
            Op::Revoke(number) => world.change(|users| users.revoke(USERS[user(number)]).unwrap()),
            Op::Rotate(number) => world.rotate(user(number)),
            Op::Expire(number) => {
                let change = SettingsChange { expires: Some(Some(past())), ..Default::default() };
                world.set(user(number), &change);
            }
            Op::UseUp(number) => world.use_up(user(number)),
            Op::Restore(number) => world.restore(user(number)),
            Op::Reload => world.reload(),
            Op::Restart => world.restart(),
            Op::Wait => {
                world.run(LIMIT);
                world.check();
            }
        }
    }
    world.run(LIMIT);
    world.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn nothing_of_a_refused_user_lives_after_a_second(
        shards in 1..=16u8,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        play(shards, None, &ops);
    }

    #[test]
    fn nothing_of_a_refused_user_with_a_certificate_lives_after_a_second(
        shards in 1..=16u8,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        play(shards, Some(Ca::new()), &ops);
    }
}
