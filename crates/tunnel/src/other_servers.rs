//! Asks servers other than the one in use whether they answer.
//!
//! In: which server to ask over which link, UDP payloads, the time. Out: UDP payloads, and for each probe
//! an answer: how long a whole handshake took, with the server's certificate checked, or why there was none.
//! Always holds: a connection is closed once its handshake is over; a server is asked once at a time over a
//! link, and for [`ANSWER_TIMEOUT`] at most.

use std::{collections::VecDeque, net::SocketAddr};

use bytes::BytesMut;
use mpvpn_quic::{
    ClientSetup, ConnectionHandle, Endpoint, Event as QuicEvent, Handled, LocalAddress, Transmit,
};
use mpvpn_types::{Duration, Instant, LinkId, earliest};

/// A probe without an answer for this long has none. Longer than three round trips over two satellites,
/// and a lost packet. Chosen. Smaller: slow links find no server; larger: memory for dead servers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How a server is asked.
#[derive(Clone)]
pub struct OtherServer {
    /// TLS and transport.
    pub setup: ClientSetup,
    /// The name that its certificate must have.
    pub name: String,
}

/// The answer to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAnswer {
    /// The number of the server.
    pub server: usize,
    /// When it was asked.
    pub probed_at: Instant,
    /// How long the handshake took, or why there was none.
    pub result: Result<Duration, String>,
}

struct Probe {
    connection: ConnectionHandle,
    server: usize,
    link: LinkId,
    remote: SocketAddr,
    probed_at: Instant,
    /// Whether the answer is known; the connection sends its last packets.
    is_over: bool,
}

/// The probes to other servers.
pub struct OtherServers {
    servers: Vec<OtherServer>,
    endpoint: Endpoint,
    probes: Vec<Probe>,
    answers: VecDeque<ServerAnswer>,
}

impl OtherServers {
    /// Nobody is asked yet; `None` if there are no servers.
    pub fn new(servers: Vec<OtherServer>) -> Option<Self> {
        let endpoint = Endpoint::client(&servers.first()?.setup);
        Some(Self { servers, endpoint, probes: Vec::new(), answers: VecDeque::new() })
    }

    /// Asks a server at `remote` over a link, unless it is asked there already.
    pub fn probe(&mut self, now: Instant, server: usize, link: LinkId, remote: SocketAddr) {
        let is_probed = |one: &Probe| one.server == server && one.link == link && !one.is_over;
        if self.probes.iter().any(is_probed) {
            return;
        }
        let Some(OtherServer { setup, name }) = self.servers.get(server) else { return };
        match self.endpoint.connect(now, setup, LocalAddress::link(link), remote, name) {
            Ok(connection) => {
                let probed_at = now;
                let probe = Probe { connection, server, link, remote, probed_at, is_over: false };
                self.probes.push(probe);
            }
            Err(error) => {
                let result = Err(error.to_string());
                self.answers.push_back(ServerAnswer { server, probed_at: now, result });
            }
        }
    }

    /// Whether a UDP payload from `remote` is for these probes.
    pub fn expects(&self, remote: SocketAddr) -> bool {
        self.probes.iter().any(|probe| probe.remote == remote)
    }

    /// Takes a UDP payload for which [`Self::expects`] holds.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        link: LinkId,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) {
        let local = Some(LocalAddress::link(link));
        if let Handled::Connection(id) = self.endpoint.handle(now, local, remote, ecn, data) {
            self.drive(now, id);
        }
    }

    /// Looks at the events of a connection.
    fn drive(&mut self, now: Instant, id: ConnectionHandle) {
        let probe = self.probes.iter_mut().find(|probe| probe.connection == id);
        let (Some(probe), Some(connection)) = (probe, self.endpoint.get(id)) else { return };
        while let Some(event) = connection.poll_event(now) {
            let result = match event {
                QuicEvent::Connected => Ok(now.saturating_duration_since(probe.probed_at)),
                QuicEvent::Lost(reason) => Err(reason.to_string()),
                _ => continue,
            };
            if std::mem::replace(&mut probe.is_over, true) {
                continue;
            }
            let (server, probed_at) = (probe.server, probe.probed_at);
            self.answers.push_back(ServerAnswer { server, probed_at, result });
            connection.close(now, mpvpn_masque::h3::code::NO_ERROR, "only asked");
        }
    }

    /// The next answer.
    pub fn poll_answer(&mut self) -> Option<ServerAnswer> {
        self.answers.pop_front()
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        for id in self.probes.iter().map(|probe| probe.connection).collect::<Vec<_>>() {
            let transmit = self.endpoint.get(id).and_then(|connection| connection.poll_transmit(now, buf));
            if transmit.is_some() {
                return transmit;
            }
            if !self.endpoint.process_endpoint_events(id) {
                self.probes.retain(|probe| probe.connection != id);
            }
        }
        None
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        let mut next = None;
        for probe in &self.probes {
            let own = self.endpoint.get(probe.connection).and_then(|connection| connection.poll_timeout());
            let given_up = (!probe.is_over).then_some(probe.probed_at + ANSWER_TIMEOUT);
            next = earliest(next, earliest(own, given_up));
        }
        next
    }

    /// Handles timers that have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        for at in (0..self.probes.len()).rev() {
            let Probe { connection: id, server, probed_at, is_over, .. } = self.probes[at];
            if let Some(connection) = self.endpoint.get(id) {
                connection.handle_timeout(now);
            }
            self.drive(now, id);
            if !is_over && now >= probed_at + ANSWER_TIMEOUT && !self.probes[at].is_over {
                self.probes[at].is_over = true;
                self.answers.push_back(ServerAnswer {
                    server,
                    probed_at,
                    result: Err("no answer".to_owned()),
                });
                if let Some(connection) = self.endpoint.get(id) {
                    connection.close(now, mpvpn_masque::h3::code::NO_ERROR, "took too long");
                }
            }
        }
    }
}
