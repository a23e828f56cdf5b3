//! The connections of a client beside the one in use: handshakes, and those that are closing.
//!
//! In: links that lead to the server, what comes of handshakes, the time. Out: connections, and when to try again. Always
//! holds: a link has a few handshakes at a time, the oldest among them; after failures it is waited ever longer; a
//! connection that was closed is kept until it has told the server.

use std::net::SocketAddr;

use mpvpn_quic::{ConnectionHandle, Endpoint, LocalAddress, Transmit};
use mpvpn_types::{Duration, Instant, LinkId};

use super::{ClientConfig, links::Links};
use crate::attempt::{ATTEMPT, Attempt, Backoff, GRACE};

/// A handshake that is not answered within this time gets another one beside it: the library repeats lost
/// packets ever less often, and a link may work again at any moment.
const RENEW: Duration = Duration::from_secs(1);
/// The same where every packet costs.
const RENEW_METERED: Duration = Duration::from_secs(4);
/// Handshakes on one link at a time: the oldest, for links on which answers take long, and the newest.
const MOST_ATTEMPTS: usize = 3;

/// Whether the client is to have a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Yes,
    /// Not until it is woken.
    Asleep,
    /// Never again.
    Ended,
}

/// Makes connections, and closes them.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) wanted: Wanted,
    attempts: Vec<Attempt>,
    pub(super) backoff: Backoff,
    closing: Vec<ConnectionHandle>,
}

impl Connector {
    pub(super) fn new(now: Instant) -> Self {
        Self { wanted: Wanted::Yes, attempts: Vec::new(), backoff: Backoff::new(now), closing: Vec::new() }
    }

    /// No connection is wanted until [`Self::wake`].
    pub(super) fn sleep(&mut self) {
        if self.wanted == Wanted::Yes {
            self.wanted = Wanted::Asleep;
        }
        self.backoff.trying();
    }

    /// A connection is wanted again.
    pub(super) fn wake(&mut self, now: Instant) {
        if self.wanted == Wanted::Asleep {
            self.wanted = Wanted::Yes;
        }
        self.backoff.now(now);
    }

    /// No connection is wanted any more.
    pub(super) fn end(&mut self) {
        self.wanted = Wanted::Ended;
        self.backoff.trying();
    }

    /// Handshakes now.
    pub(super) fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// The handshake of a connection, if it is one.
    pub(super) fn attempt(&mut self, id: ConnectionHandle) -> Option<&mut Attempt> {
        self.attempts.iter_mut().find(|attempt| attempt.connection == id)
    }

    /// The same; it is over.
    pub(super) fn take(&mut self, id: ConnectionHandle) -> Option<Attempt> {
        self.attempts.extract_if(.., |attempt| attempt.connection == id).next()
    }

    /// Begins a handshake over a link that leads to `remote`, unless one is there that may still be answered.
    pub(super) fn connect(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        config: &ClientConfig,
        links: &Links,
        (id, remote): (LinkId, SocketAddr),
    ) {
        let own = self.attempts.iter().filter(|attempt| attempt.link == id);
        if own.clone().any(|attempt| now < renewal(attempt, links)) {
            return;
        }
        // Neither the first, which has waited longest, nor the last.
        let superfluous = own.clone().nth(1).filter(|_| own.count() >= MOST_ATTEMPTS);
        if let Some(connection) = superfluous.map(|attempt| attempt.connection) {
            self.take(connection);
            self.close(now, endpoint, connection, "tried anew");
        }
        match endpoint.connect(now, &config.setup, LocalAddress::link(id), remote, &config.server_name) {
            Ok(connection) => {
                self.attempts.push(Attempt { connection, link: id, since: now, heard: None, ready: None });
                self.backoff.trying();
            }
            Err(error) => {
                let class = config.class.as_ref().map(|class| class.name.as_str());
                tracing::warn!(class, %error, link = id.0, "cannot connect");
            }
        }
    }

    /// Where no handshake is left, and no connection is `in_use`, it is tried again later.
    pub(super) fn wait_if_all_failed(&mut self, now: Instant, in_use: bool) {
        if self.attempts.is_empty() && !in_use && self.backoff.next.is_none() {
            self.backoff.failed(now);
        }
    }

    /// When a handshake that succeeded takes the place of the connection in use, or becomes that.
    pub(super) fn replaces_at(attempt: &Attempt, in_use: bool) -> Option<Instant> {
        attempt.ready.map(|at| if in_use { at + GRACE } else { at })
    }

    /// Closes a connection.
    pub(super) fn close(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        id: ConnectionHandle,
        reason: &str,
    ) {
        if let Some(connection) = endpoint.get(id) {
            connection.close(now, mpvpn_masque::h3::code::NO_ERROR, reason);
            self.closing.push(id);
        }
    }

    /// Gives up the handshakes over the links that `of` says.
    pub(super) fn give_up(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        of: impl Fn(LinkId) -> bool,
        reason: &str,
    ) {
        let lost: Vec<_> = self.attempts.extract_if(.., |attempt| of(attempt.link)).collect();
        lost.into_iter().for_each(|attempt| self.close(now, endpoint, attempt.connection, reason));
    }

    /// Lets the endpoint know what changed about a connection.
    pub(super) fn settle(&mut self, endpoint: &mut Endpoint, id: ConnectionHandle) {
        if !endpoint.process_endpoint_events(id) {
            self.closing.retain(|closing| *closing != id);
        }
    }

    /// The next UDP payload of one of these connections.
    pub(super) fn poll_transmit(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        buf: &mut Vec<u8>,
    ) -> Option<Transmit> {
        let attempts = self.attempts.iter().map(|attempt| attempt.connection);
        for id in attempts.chain(self.closing.iter().copied()).collect::<Vec<_>>() {
            let transmit = endpoint.get(id).and_then(|connection| connection.poll_transmit(now, buf));
            if transmit.is_some() {
                return transmit;
            }
            self.settle(endpoint, id);
        }
        None
    }

    /// When something is to be done: for these connections, or to get one that is `in_use` where there is none.
    pub(super) fn poll_timeout(
        &self,
        now: Instant,
        endpoint: &mut Endpoint,
        links: &Links,
        in_use: bool,
    ) -> Option<Instant> {
        let closing = self.closing.iter().copied();
        let all = self.attempts.iter().map(|attempt| attempt.connection).chain(closing);
        let connections = all.filter_map(|id| endpoint.get(id)?.poll_timeout()).min();
        let own = self.attempts.iter().flat_map(|attempt| {
            let renewal = Some(renewal(attempt, links)).filter(|at| !in_use && *at > now);
            [Self::replaces_at(attempt, in_use), Some(attempt.since + ATTEMPT), renewal]
        });
        own.flatten().chain(connections).min()
    }

    /// Lets time pass for connections that are closing.
    pub(super) fn handle_timeout(&mut self, now: Instant, endpoint: &mut Endpoint) {
        for id in self.closing.clone() {
            if let Some(connection) = endpoint.get(id) {
                connection.handle_timeout(now);
                while connection.poll_event(now).is_some() {}
            }
            self.settle(endpoint, id);
        }
    }
}

/// When the handshake is old enough for another one on its link.
fn renewal(attempt: &Attempt, links: &Links) -> Instant {
    let metered = links.policy(attempt.link).metered;
    attempt.heard.unwrap_or(attempt.since) + if metered { RENEW_METERED } else { RENEW }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mpvpn_flow::rules::Rules;
    use mpvpn_path::Scheduler;
    use mpvpn_quic::{ClientSetup, TransportOptions};
    use mpvpn_types::Fec;

    use super::*;
    use crate::TunnelMode;

    const LINK: LinkId = LinkId(1);
    const OTHER: LinkId = LinkId(2);

    struct Stage {
        now: Instant,
        config: ClientConfig,
        endpoint: Endpoint,
        links: Links,
        connector: Connector,
    }

    impl Stage {
        fn new() -> Self {
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let mut tls = rustls::ClientConfig::builder_with_provider(provider)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            tls.alpn_protocols = vec![b"h3".to_vec()];
            let setup = ClientSetup::new(Arc::new(tls), &TransportOptions::default(), &[7; 32]).unwrap();
            let config = ClientConfig {
                mode: TunnelMode::Packets,
                setup,
                server_name: "mpvpn".to_owned(),
                authority: "mpvpn".to_owned(),
                path: "/".to_owned(),
                token: None,
                class: None,
                additional_addresses: 0,
                scheduler: Scheduler::default(),
                fec: Fec::Off,
                copies: 1,
                flow_rules: Rules::default(),
                isn_secret: [1, 2],
            };
            let (now, endpoint) = (Instant::now(), Endpoint::client(&config.setup));
            Self { now, config, endpoint, links: Links::default(), connector: Connector::new(now) }
        }

        fn connect(&mut self, after: Duration, link: LinkId) {
            let to = (link, ([192, 0, 2, 1], 443).into());
            let Self { endpoint, config, links, .. } = self;
            self.connector.connect(self.now + after, endpoint, config, links, to);
        }

        fn since(&self, link: LinkId) -> Vec<Duration> {
            let own = self.connector.attempts().iter().filter(|attempt| attempt.link == link);
            own.map(|attempt| attempt.since - self.now).collect()
        }
    }

    #[test]
    fn a_link_has_the_oldest_handshake_and_the_newest_ones() {
        let mut stage = Stage::new();
        let second = |number: u32| RENEW * number;
        stage.connect(Duration::ZERO, LINK);
        stage.connect(RENEW / 2, LINK);
        assert_eq!(stage.since(LINK), [Duration::ZERO], "the first may still be answered");
        for number in 1..=4 {
            stage.connect(second(number), LINK);
        }
        assert_eq!(stage.since(LINK), [second(0), second(3), second(4)]);
        assert_eq!(stage.connector.closing.len(), 2);
        let policy = mpvpn_masque::capsule::LinkPolicy { metered: true, ..Default::default() };
        stage.links.set_policy(LINK, policy);
        stage.connect(second(6), LINK);
        assert_eq!(stage.since(LINK).len(), MOST_ATTEMPTS, "every packet costs");
        assert_eq!(stage.since(LINK)[2], second(4));
    }

    #[test]
    fn handshakes_that_are_given_up_close_and_those_of_other_links_go_on() {
        let mut stage = Stage::new();
        stage.connect(Duration::ZERO, LINK);
        stage.connect(Duration::ZERO, OTHER);
        let Stage { now, endpoint, connector, .. } = &mut stage;
        connector.give_up(*now, endpoint, |link| link == LINK, "the link is down");
        assert_eq!((connector.attempts().len(), connector.closing.len()), (1, 1));
        connector.wait_if_all_failed(*now, false);
        assert_eq!(connector.backoff.next, None, "one is left");
        connector.give_up(*now, endpoint, |_| true, "none is wanted");
        connector.wait_if_all_failed(*now, true);
        assert_eq!(connector.backoff.next, None, "a connection is in use");
        connector.wait_if_all_failed(*now, false);
        assert!(connector.backoff.next.is_some_and(|at| at > *now));
    }

    #[test]
    fn one_that_has_ended_is_not_woken() {
        let mut connector = Connector::new(Instant::now());
        connector.sleep();
        assert_eq!(connector.wanted, Wanted::Asleep);
        connector.wake(Instant::now());
        assert_eq!(connector.wanted, Wanted::Yes);
        connector.end();
        connector.sleep();
        connector.wake(Instant::now());
        assert_eq!(connector.wanted, Wanted::Ended);
    }
}
