//! Orders of requests over TCP and of changes of access, for users with tokens and users with certificates:
//! a connection that has shown credentials ends within a second of them, and no other ends.

use std::{path::Path, time::SystemTime};

use super::{
    access_ends::LIMIT,
    client_ca::{Ca, Issued},
    *,
};
use mpvpn_identity::client_ca::Revocations;
use mpvpn_users::{
    ExpiryOption, LockedUsers, SettingsChange, UserCredential, UserQuotas, UserSettings, Users,
    auth::Authenticator,
};
use proptest::prelude::*;

const USERS: [&str; 2] = ["alice", "bob"];
const QUOTA: u64 = 5_000_000;

/// The credentials of a user: the `authorization` field, or a certificate.
#[derive(Clone)]
enum Credential {
    Token(String),
    Certificate(Issued),
}

impl Credential {
    fn authorization(&self) -> Option<&str> {
        if let Self::Token(authorization) = self { Some(authorization) } else { None }
    }

    fn certificate(&self) -> Option<&Issued> {
        if let Self::Certificate(issued) = self { Some(issued) } else { None }
    }
}

enum Http {
    Two(h2::client::SendRequest<Bytes>, Vec<H2Stream>),
    One(Box<TlsStream<TcpStream>>),
}

struct Connection {
    http: Http,
    /// The owner, and the numbers of the owner's credentials that were shown while they were valid.
    owner: Option<usize>,
    shown: Vec<usize>,
    /// The certificate of the client.
    certificate: Option<(usize, usize)>,
}

struct World {
    server: TestServer,
    ca: Option<Ca>,
    quotas: UserQuotas,
    /// The credentials of each user, the newest last.
    credentials: [Vec<Credential>; 2],
    connections: Vec<Connection>,
}

impl World {
    fn new(by_certificate: bool) -> Self {
        let mut ca = by_certificate.then(Ca::new);
        let server = TestServer::start(|config| {
            if let Some(ca) = &ca {
                config.auth = mpvpn_config::AuthMode::Mtls;
                config.client_ca = Some(ca.certificate_file());
            }
        });
        let kind = if by_certificate { UserCredential::Certificate } else { UserCredential::Token };
        let mut users = LockedUsers::open(&users_file(server._state_dir.path())).unwrap();
        let credentials = USERS.map(|user| {
            let token = users.add_with_credential(user, &UserSettings::default(), kind).unwrap();
            let by_token = token.map(|token| Credential::Token(token.authorization()));
            vec![by_token.unwrap_or_else(|| Credential::Certificate(ca.as_mut().expect("a CA").issue(user)))]
        });
        drop(users);
        let (quotas, connections) = (UserQuotas::default(), Vec::new());
        let mut world = Self { server, ca, quotas, credentials, connections };
        world.change(|_| {});
        world
    }

    /// Changes the users' file, which the server reads.
    fn change(&mut self, change: impl FnOnce(&mut LockedUsers)) {
        let file = users_file(self.server._state_dir.path());
        change(&mut LockedUsers::open(&file).unwrap());
        let (users, clock) = (Users::load(&file).unwrap(), SystemTime::now());
        let used_up = self.quotas.used_up(clock, &users);
        let shared = self.server.credentials.authenticator.users().unwrap();
        shared.replace(users.with_used_up(Arc::new(used_up)));
        self.server.context.access_ends.send_replace(());
    }

    fn set(&mut self, user: usize, change: &SettingsChange) {
        self.change(|users| users.set(USERS[user], change).unwrap());
    }

    /// Gives a user new credentials; the ones before end.
    fn rotate(&mut self, user: usize) {
        if let (Some(ca), Authenticator::Certificates(check)) =
            (&mut self.ca, &self.server.credentials.authenticator)
        {
            ca.revoke(
                self.credentials[user].last().and_then(Credential::certificate).expect("a certificate"),
            );
            check.revoke(Revocations::load(&ca.revocations_file()).unwrap());
            self.credentials[user].push(Credential::Certificate(ca.issue(USERS[user])));
            // A user that was not revoked needs no other entry.
            return self.change(|users| drop(users.renew(USERS[user], UserCredential::Certificate)));
        }
        let mut token = None;
        self.change(|users| token = Some(users.rotate(USERS[user]).unwrap()));
        self.credentials[user].extend(token.map(|token| Credential::Token(token.authorization())));
    }

    /// Counts more for a user than the quota.
    fn use_up(&mut self, user: usize) {
        let quota = SettingsChange { quota: Some(Some("5MB".parse().unwrap())), ..Default::default() };
        self.set(user, &quota);
        let users = self.server.credentials.authenticator.users().unwrap().now();
        self.quotas.count(SystemTime::now(), &users, [(USERS[user], QUOTA)]);
        self.change(|_| {});
    }

    fn restore(&mut self, user: usize) {
        self.set(user, &SettingsChange { expires: Some(None), quota: Some(None), ..Default::default() });
        self.rotate(user);
    }

    fn is_valid(&self, user: usize, number: usize) -> bool {
        let shown = &self.credentials[user][number];
        let certificate = shown.certificate().map(|issued| &*issued.der);
        self.server.credentials.authenticator.authenticate(shown.authorization(), certificate).is_ok()
    }

    /// The status by which credentials are refused.
    fn refusal_status(&self, user: usize, number: usize) -> u16 {
        let shown = &self.credentials[user][number];
        let certificate = shown.certificate().map(|issued| &*issued.der);
        let authenticator = &self.server.credentials.authenticator;
        authenticator.authenticate(shown.authorization(), certificate).unwrap_err().status()
    }

    /// Opens a connection with the newest credentials of a user; one over HTTP/1.1 asks for its transport.
    async fn connect(&mut self, is_http2: bool, user: usize) {
        let number = self.credentials[user].len() - 1;
        let shown = self.credentials[user][number].clone();
        let own = shown.certificate().map(|issued| &issued.files);
        let certificate = own.map(|_| (user, number));
        let alpn: &[u8] = if is_http2 { b"h2" } else { b"http/1.1" };
        let tls = self.server.tls_with(own, alpn).await;
        let (mut owner, mut numbers) = (None, Vec::new());
        let http = if is_http2 {
            Http::Two(TestServer::http2_over(tls).await, Vec::new())
        } else {
            let head = format!(
                "GET {} HTTP/1.1\r\nhost: {}\r\nconnection: Upgrade\r\nupgrade: connect-udp\r\n\
                 capsule-protocol: ?1{}",
                self.server.self_target_path(),
                self.server.address,
                shown.authorization().map(|field| format!("\r\nauthorization: {field}")).unwrap_or_default()
            );
            let (answer, tls) = TestServer::http1_over(tls, &head).await;
            let is_valid = self.is_valid(user, number);
            assert_eq!(answer.starts_with("HTTP/1.1 101 "), is_valid, "{answer}");
            if is_valid {
                (owner, numbers) = (Some(user), vec![number]);
            }
            Http::One(Box::new(tls))
        };
        self.connections.push(Connection { http, owner, shown: numbers, certificate });
    }

    /// Asks for a transport, with the credentials of a user: the newest, or those before.
    async fn request(&mut self, at: usize, user: usize, is_newest: bool) {
        let Some(connection) = self.connections.get(at) else { return };
        let newest = self.credentials[user].len() - 1;
        let number = if is_newest { newest } else { newest.saturating_sub(1) };
        let (user, number) = connection.certificate.unwrap_or((user, number));
        let is_valid = self.is_valid(user, number);
        let request = self.server.self_target_request(self.credentials[user][number].authorization());
        let refusal = (!is_valid).then(|| self.refusal_status(user, number));
        let connection = &mut self.connections[at];
        let Http::Two(client, streams) = &mut connection.http else { return };
        // It may be closing, or be closed.
        let Ok((response, send)) = client.send_request(request, false) else { return };
        let Ok(response) = timeout(SOON, response).await.unwrap() else { return };
        let is_owner = connection.owner.is_none_or(|owner| owner == user);
        let expected = match (refusal, is_owner) {
            (Some(status), _) => StatusCode::from_u16(status).unwrap(),
            (None, false) => StatusCode::MISDIRECTED_REQUEST,
            (None, true) => StatusCode::OK,
        };
        assert_eq!(response.status(), expected);
        if expected == StatusCode::OK {
            connection.owner = Some(user);
            connection.shown.push(number);
            streams.push(H2Stream::new(send, response.into_body()));
        }
    }

    /// Checks that exactly the connections are closed that have shown credentials which are refused now.
    async fn check(&mut self) {
        sleep(LIMIT).await;
        for at in 0..self.connections.len() {
            let Connection { owner, shown, .. } = &self.connections[at];
            let Some(owner) = *owner else { continue };
            let shown = shown.clone();
            let may_live = shown.iter().all(|number| self.is_valid(owner, *number));
            let is_open = match &mut self.connections[at].http {
                Http::Two(client, _) => client.clone().ready().await.is_ok(),
                Http::One(tls) => timeout(Duration::from_millis(5), tls.read_u8()).await.is_err(),
            };
            assert_eq!(is_open, may_live, "connection {at} of {}, which has shown {shown:?}", USERS[owner]);
        }
    }
}

fn users_file(state_dir: &Path) -> std::path::PathBuf {
    state_dir.join("users.toml")
}

/// A step of an order. Numbers that are too large count modulo what there is.
#[derive(Clone, Debug)]
enum Op {
    Connect(bool, usize),
    Request(usize, usize, bool),
    /// Ends the requests of a connection, which stays.
    EndRequests(usize),
    Revoke(usize),
    Rotate(usize),
    Expire(usize),
    UseUp(usize),
    Restore(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (any::<bool>(), 0..2usize).prop_map(|(is_http2, user)| Op::Connect(is_http2, user)),
        8 => (any::<usize>(), 0..2usize, prop::bool::weighted(0.9))
            .prop_map(|(at, user, is_newest)| Op::Request(at, user, is_newest)),
        1 => any::<usize>().prop_map(Op::EndRequests),
        1 => (0..2usize).prop_map(Op::Revoke),
        1 => (0..2usize).prop_map(Op::Rotate),
        1 => (0..2usize).prop_map(Op::Expire),
        1 => (0..2usize).prop_map(Op::UseUp),
        2 => (0..2usize).prop_map(Op::Restore),
    ]
}

async fn play(by_certificate: bool, ops: Vec<Op>) {
    let mut world = World::new(by_certificate);
    for op in ops {
        let count = world.connections.len().max(1);
        match op {
            Op::Connect(is_http2, user) => world.connect(is_http2, user).await,
            Op::Request(at, user, is_newest) => world.request(at % count, user, is_newest).await,
            Op::EndRequests(at) => {
                if let Some(Connection { http: Http::Two(_, streams), .. }) =
                    world.connections.get_mut(at % count)
                {
                    streams.clear();
                }
            }
            Op::Revoke(user) => world.change(|users| users.revoke(USERS[user]).unwrap()),
            Op::Rotate(user) => world.rotate(user),
            Op::Expire(user) => {
                let expired = "2020-01-01".parse::<ExpiryOption>().unwrap().resolve(SystemTime::now());
                world.set(user, &SettingsChange { expires: Some(Some(expired)), ..Default::default() });
            }
            Op::UseUp(user) => world.use_up(user),
            Op::Restore(user) => world.restore(user),
        }
    }
    world.check().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn over_tcp_exactly_the_connections_of_refused_credentials_end_within_a_second(
        by_certificate in any::<bool>(),
        ops in prop::collection::vec(op(), 4..24),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(play(by_certificate, ops));
    }
}
