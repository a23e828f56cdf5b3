//! The connections of a client that are not in use: handshakes, and connections that are closing. In: links
//! to the server, results of handshakes, the time. Out: connections, and when to try again. Always holds: a
//! link has at most [`MAX_HANDSHAKES_PER_LINK`] handshakes, the oldest among them; the pause grows with each
//! failure; a closed connection is kept until its CONNECTION_CLOSE was sent.

use std::net::SocketAddr;

use mpvpn_quic::{ConnectionHandle, Endpoint, LocalAddress, Transmit};
use mpvpn_types::{Duration, Instant, LinkId};

use super::{ClientConfig, links::Links};
use crate::handshake::{Backoff, HANDSHAKE_TIMEOUT, Handshake, REPLACEMENT_DELAY};

/// A handshake without an answer for this long gets another one beside it on its link: the pause between
/// retransmissions doubles (RFC 9002 §6.2), and a link may work again at any moment. Chosen. Larger: slower
/// after an outage; smaller: more packets over dead links.
const ADDITIONAL_HANDSHAKE_AFTER: Duration = Duration::from_secs(1);
/// The same on a metered link, where each packet costs money. Chosen.
const ADDITIONAL_HANDSHAKE_AFTER_METERED: Duration = Duration::from_secs(4);
/// Handshakes on a link at a time: the oldest, for links with round trips of seconds, and the newest. Larger:
/// state and packets for each link; smaller: one of these two is missing.
const MAX_HANDSHAKES_PER_LINK: usize = 3;

/// Whether the client shall have a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DesiredState {
    Connected,
    /// None until [`Connector::wake`].
    Asleep,
    /// None any more.
    Closed,
}

/// Opens connections, and closes them.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) desired: DesiredState,
    pub(super) handshakes: Vec<Handshake>,
    pub(super) backoff: Backoff,
    closing: Vec<ConnectionHandle>,
    /// Whether nothing has happened since the connections that are closing had nothing to send.
    closing_is_sent: bool,
}

impl Connector {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            desired: DesiredState::Connected,
            handshakes: Vec::new(),
            backoff: Backoff::new(now),
            closing: Vec::new(),
            closing_is_sent: true,
        }
    }

    /// Makes no connection until [`Self::wake`].
    pub(super) fn sleep(&mut self) {
        if self.desired == DesiredState::Connected {
            self.desired = DesiredState::Asleep;
        }
        self.backoff.cancel();
    }

    /// Makes connections again.
    pub(super) fn wake(&mut self, now: Instant) {
        if self.desired == DesiredState::Asleep {
            self.desired = DesiredState::Connected;
        }
        self.backoff.reset(now);
    }

    /// Makes connections again after [`Self::end`].
    pub(super) fn reopen(&mut self) {
        if self.desired == DesiredState::Closed {
            self.desired = DesiredState::Connected;
        }
    }

    /// Makes no connection any more.
    pub(super) fn end(&mut self) {
        self.desired = DesiredState::Closed;
        self.backoff.cancel();
    }

    /// The handshake of a connection.
    pub(super) fn handshake(&mut self, id: ConnectionHandle) -> Option<&mut Handshake> {
        self.handshakes.iter_mut().find(|handshake| handshake.connection == id)
    }

    /// A packet of the server has arrived for one of these connections.
    pub(super) fn on_received(&mut self, now: Instant, id: ConnectionHandle) {
        match self.handshake(id) {
            Some(handshake) => handshake.last_received = Some(now),
            None => self.closing_is_sent = false,
        }
    }

    /// Removes the handshake of a connection.
    pub(super) fn take(&mut self, id: ConnectionHandle) -> Option<Handshake> {
        self.handshakes.extract_if(.., |handshake| handshake.connection == id).next()
    }

    /// Begins a handshake over a link with the server at `remote`, unless the link has one that may still be
    /// answered. Returns whether one has begun.
    pub(super) fn connect(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        config: &ClientConfig,
        links: &Links,
        (id, remote): (LinkId, SocketAddr),
    ) -> bool {
        let own = self.handshakes.iter().filter(|handshake| handshake.link == id);
        if own.clone().any(|handshake| now < next_handshake_at(handshake, links)) {
            return false;
        }
        // Closes the second: the first has waited longest, the last is the newest.
        let superfluous = own.clone().nth(1).filter(|_| own.count() >= MAX_HANDSHAKES_PER_LINK);
        if let Some(connection) = superfluous.map(|handshake| handshake.connection) {
            self.take(connection);
            self.close(now, endpoint, connection, "tried anew");
        }
        let connected =
            endpoint.connect(now, &config.setup, LocalAddress::link(id), remote, &config.server_name);
        match &connected {
            Ok(connection) => {
                self.handshakes.push(Handshake {
                    connection: *connection,
                    link: id,
                    started_at: now,
                    last_received: None,
                    completed_at: None,
                });
                self.backoff.cancel();
            }
            Err(error) => {
                let class = config.class.as_ref().map(|class| class.name.as_str());
                tracing::warn!(class, %error, link = id.0, "cannot connect");
            }
        }
        connected.is_ok()
    }

    /// Schedules the next try if no handshake is left and no connection is `in_use`; nothing was heard since
    /// `since`.
    pub(super) fn back_off_if_all_failed(&mut self, now: Instant, in_use: bool, since: Instant) {
        if self.handshakes.is_empty() && !in_use && self.backoff.next_try.is_none() {
            self.backoff.failed(now, since);
        }
    }

    /// When a completed handshake becomes the connection in use.
    pub(super) fn replaces_at(handshake: &Handshake, in_use: bool) -> Option<Instant> {
        handshake.completed_at.map(|at| if in_use { at + REPLACEMENT_DELAY } else { at })
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
            self.closing_is_sent = false;
        }
    }

    /// Closes the handshakes over the links for which `on` holds.
    pub(super) fn abandon(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        on: impl Fn(LinkId) -> bool,
        reason: &str,
    ) {
        let lost: Vec<_> = self.handshakes.extract_if(.., |handshake| on(handshake.link)).collect();
        lost.into_iter().for_each(|handshake| self.close(now, endpoint, handshake.connection, reason));
    }

    /// Forgets all handshakes and connections that are closing; returns them.
    pub(super) fn take_all(&mut self) -> Vec<ConnectionHandle> {
        let handshakes =
            std::mem::take(&mut self.handshakes).into_iter().map(|handshake| handshake.connection);
        handshakes.chain(std::mem::take(&mut self.closing)).collect()
    }

    /// Lets the endpoint drop a connection that is over.
    pub(super) fn reap(&mut self, endpoint: &mut Endpoint, id: ConnectionHandle) {
        if !endpoint.process_endpoint_events(id) {
            self.closing.retain(|closing| *closing != id);
        }
    }

    /// Whether there are no such connections.
    fn is_idle(&self) -> bool {
        self.handshakes.is_empty() && self.closing.is_empty()
    }

    /// The next UDP payload of these connections.
    pub(super) fn poll_transmit(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        buf: &mut Vec<u8>,
    ) -> Option<Transmit> {
        if self.is_idle() {
            return None;
        }
        let handshakes = self.handshakes.iter().map(|handshake| handshake.connection);
        let closing = self.closing.iter().copied().filter(|_| !self.closing_is_sent);
        for id in handshakes.chain(closing).collect::<Vec<_>>() {
            let transmit = endpoint.get(id).and_then(|connection| connection.poll_transmit(now, buf));
            if transmit.is_some() {
                return transmit;
            }
            self.reap(endpoint, id);
        }
        self.closing_is_sent = true;
        None
    }

    /// The next deadline of these connections, and of further handshakes while no connection is `in_use`.
    pub(super) fn poll_timeout(
        &self,
        now: Instant,
        endpoint: &mut Endpoint,
        links: &Links,
        in_use: bool,
    ) -> Option<Instant> {
        if self.is_idle() {
            return None;
        }
        let closing = self.closing.iter().copied();
        let all = self.handshakes.iter().map(|handshake| handshake.connection).chain(closing);
        let connections = all.filter_map(|id| endpoint.get(id)?.poll_timeout()).min();
        let own = self.handshakes.iter().flat_map(|handshake| {
            let next = Some(next_handshake_at(handshake, links)).filter(|at| !in_use && *at > now);
            [Self::replaces_at(handshake, in_use), Some(handshake.started_at + HANDSHAKE_TIMEOUT), next]
        });
        own.flatten().chain(connections).min()
    }

    /// Handles timers of connections that are closing.
    pub(super) fn handle_timeout(&mut self, now: Instant, endpoint: &mut Endpoint) {
        self.closing_is_sent = false;
        for id in self.closing.clone() {
            if let Some(connection) = endpoint.get(id) {
                connection.handle_timeout(now);
                while connection.poll_event(now).is_some() {}
            }
            self.reap(endpoint, id);
        }
    }
}

/// When another handshake may start beside this one on its link.
fn next_handshake_at(handshake: &Handshake, links: &Links) -> Instant {
    let metered = links.policy(handshake.link).metered;
    handshake.last_received.unwrap_or(handshake.started_at)
        + if metered { ADDITIONAL_HANDSHAKE_AFTER_METERED } else { ADDITIONAL_HANDSHAKE_AFTER }
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
                instance: None,
                additional_addresses: 0,
                addresses_in_use: Default::default(),
                scheduler: Scheduler::default(),
                fec: Fec::Off,
                copies: 1,
                flow_rules: Rules::default(),
                isn_secret: [1, 2],
                disabled_extensions: &[],
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
            let own = self.connector.handshakes.iter().filter(|handshake| handshake.link == link);
            own.map(|handshake| handshake.started_at - self.now).collect()
        }
    }

    #[test]
    fn a_link_has_the_oldest_handshake_and_the_newest_ones() {
        let mut stage = Stage::new();
        let second = |number: u32| ADDITIONAL_HANDSHAKE_AFTER * number;
        stage.connect(Duration::ZERO, LINK);
        stage.connect(ADDITIONAL_HANDSHAKE_AFTER / 2, LINK);
        assert_eq!(stage.since(LINK), [Duration::ZERO], "the first may still be answered");
        for number in 1..=4 {
            stage.connect(second(number), LINK);
        }
        assert_eq!(stage.since(LINK), [second(0), second(3), second(4)]);
        assert_eq!(stage.connector.closing.len(), 2);
        let policy = mpvpn_masque::capsule::LinkPolicy { metered: true, ..Default::default() };
        stage.links.set_policy(LINK, policy);
        stage.connect(second(6), LINK);
        assert_eq!(stage.since(LINK).len(), MAX_HANDSHAKES_PER_LINK, "every packet costs");
        assert_eq!(stage.since(LINK)[2], second(4));
    }

    #[test]
    fn handshakes_of_one_link_are_abandoned_and_others_go_on() {
        let mut stage = Stage::new();
        stage.connect(Duration::ZERO, LINK);
        stage.connect(Duration::ZERO, OTHER);
        let Stage { now, endpoint, connector, .. } = &mut stage;
        connector.abandon(*now, endpoint, |link| link == LINK, "the link is down");
        assert_eq!((connector.handshakes.len(), connector.closing.len()), (1, 1));
        connector.back_off_if_all_failed(*now, false, *now);
        assert_eq!(connector.backoff.next_try, None, "one is left");
        connector.abandon(*now, endpoint, |_| true, "none is wanted");
        connector.back_off_if_all_failed(*now, true, *now);
        assert_eq!(connector.backoff.next_try, None, "a connection is in use");
        connector.back_off_if_all_failed(*now, false, *now);
        assert!(connector.backoff.next_try.is_some_and(|at| at > *now));
    }

    #[test]
    fn a_connector_that_has_ended_is_not_woken() {
        let mut connector = Connector::new(Instant::now());
        connector.sleep();
        assert_eq!(connector.desired, DesiredState::Asleep);
        connector.wake(Instant::now());
        assert_eq!(connector.desired, DesiredState::Connected);
        connector.end();
        connector.sleep();
        connector.wake(Instant::now());
        assert_eq!(connector.desired, DesiredState::Closed);
    }
}
