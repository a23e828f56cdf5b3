//! A whole server with a hostile client that has a token.

use std::{collections::VecDeque, net::IpAddr};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::{connect::ProxyError, headers::Headers, request::Rejection};
use mpvpn_packet::{VNET_HDR_LEN, VnetHdr, ip};
use mpvpn_tunnel::{
    Authenticate, AuthenticatedUser, RelayId, RelayRead, Server, ServerConfig, ServerEvent, TunOutcome,
    TunnelMode, UdpId,
};
use mpvpn_types::{Duration, Instant, LinkId};

use super::{
    Datagram, SERVER, Subject, World,
    identity::SETUPS,
    is_icmp,
    peer::{Peer, client_address},
};
use crate::input::Input;

const SUBNET: &str = "10.0.0.0/24";
const SUBNET6: &str = "fd00::/64";
/// The most relays and UDP flows of the hostile client that this edge answers; the others wait.
const MAX_FLOWS: usize = 16;

/// `flags, operations…`; see `World::play`.
pub fn server(data: &[u8]) {
    play(established(super::first_flag(data)), data);
}

/// As [`server`], once, with a session that is set up before its input is known.
pub fn server_with_session() -> impl FnMut(&[u8]) {
    super::with_session(established, play)
}

fn play(mut world: World<ServerSubject>, data: &[u8]) {
    let mut input = Input(data);
    let flags = input.byte();
    world.play(&mut input);
    if flags & 6 == 6 {
        // A client that falls silent is forgotten, with everything that it opened.
        world.peer.vanish();
        world.run(Duration::from_secs(400));
        assert_eq!(world.subject.server.sessions(), 0, "its session has ended");
    }
}

/// A session on two paths, with every extension.
pub(super) fn established(relays_only: bool) -> World<ServerSubject> {
    let now = Instant::now();
    let mut world = World::new(now, ServerSubject::new(relays_only), Peer::client(now));
    for _ in 0..20 {
        world.run(Duration::from_millis(20));
        if world.peer.answered && world.peer.paths() == usize::from(super::LINKS) {
            break;
        }
    }
    assert!(world.peer.answered, "the server has not answered");
    world.work = 0;
    world
}

pub(super) struct ServerSubject {
    pub(super) server: Server,
    relays: VecDeque<RelayId>,
    flows: VecDeque<UdpId>,
}

struct OneToken;

impl Authenticate for OneToken {
    fn authenticate(
        &self,
        authorization: Option<&str>,
        _: Option<&[u8]>,
    ) -> Result<AuthenticatedUser, Rejection> {
        match authorization {
            Some("Bearer token") => Ok("user".into()),
            _ => Err(Rejection::unauthorized("another token")),
        }
    }
}

impl ServerSubject {
    fn new(relays_only: bool) -> Self {
        let mut secret = 0u8;
        let config = ServerConfig {
            setup: SETUPS.1.clone(),
            mode: if relays_only { TunnelMode::RelaysOnly } else { TunnelMode::Packets },
            subnet: SUBNET.parse().expect("a subnet"),
            subnet6: SUBNET6.parse().ok(),
            routes: ["0.0.0.0/0", "::/0"].map(|net| net.parse().expect("a network")).to_vec(),
            offers_streams: true,
            disabled_extensions: &[],
            dns: vec![IpAddr::from([10, 0, 0, 1])],
            dns_domain: None,
            auth: Box::new(OneToken),
            hide_wrong_credentials: false,
            max_clients: 4,
            new_secret: Box::new(move || {
                secret = secret.wrapping_add(1);
                [secret; 16]
            }),
        };
        let server = Server::new(config);
        Self { server, relays: VecDeque::new(), flows: VecDeque::new() }
    }

    fn on_event(&mut self, now: Instant, event: ServerEvent) {
        match event {
            ServerEvent::Connect { relay, user, .. } => {
                assert_eq!(user, "user", "only users open connections");
                if self.relays.len() < MAX_FLOWS {
                    self.relays.push_back(relay);
                } else {
                    self.server.relay_failed(relay, ProxyError::Busy, "enough".to_owned());
                }
            }
            ServerEvent::ConnectUdp { udp, user, .. } => {
                assert_eq!(user, "user", "only users open flows");
                if self.flows.len() < MAX_FLOWS {
                    self.flows.push_back(udp);
                } else {
                    self.server.udp_failed(udp, ProxyError::Busy, "enough".to_owned());
                }
            }
            ServerEvent::RelayReadable(relay) => {
                // Bounded by flow control: a reader that reads everything ends.
                for _ in 0..10_000 {
                    if !matches!(self.server.relay_read(now, relay), RelayRead::Data(_)) {
                        break;
                    }
                }
            }
            ServerEvent::Visit { visit, .. } => {
                self.server.visit_respond(visit, &Headers::response(404));
                self.server.relay_write(now, visit, Bytes::from_static(b"nothing"));
                self.server.visit_finish(now, visit);
            }
            ServerEvent::RelayGone(relay) => self.relays.retain(|other| *other != relay),
            ServerEvent::UdpGone(udp) => self.flows.retain(|other| *other != udp),
            ServerEvent::Mtu(mtu) => assert!((576..=65_535).contains(&mtu), "an MTU of {mtu}"),
            ServerEvent::Replaced(_) => panic!("there is one shard"),
            ServerEvent::Filter(_) => panic!("no user has rules for packets"),
            ServerEvent::RelayWritable(_) => {}
        }
    }

    /// BCP 38: a client sends only from addresses that it was given.
    fn check_packet(&self, packet: &[u8]) {
        let view = ip::parse(packet).expect("a packet for the TUN device");
        let subnet: ipnet::IpNet =
            if view.src().is_ipv4() { SUBNET } else { SUBNET6 }.parse().expect("a subnet");
        let in_subnet = subnet.contains(&view.src());
        // The server's own address is the first one of each subnet.
        let is_own = subnet.hosts().next() == Some(view.src());
        assert!(in_subnet && (!is_own || is_icmp(&view)), "a packet from {}", view.src());
    }
}

impl Subject for ServerSubject {
    fn receive(&mut self, now: Instant, link: LinkId, data: BytesMut) {
        self.server.handle_datagram(now, Some(SERVER.ip()), client_address(link), 0, data);
    }

    fn after_batch(&mut self, now: Instant) {
        self.server.handle_batch(now);
        while let Some(event) = self.server.poll_event() {
            self.on_event(now, event);
        }
        while let Some(packet) = self.server.poll_tun() {
            self.check_packet(&packet.to_vec()[VNET_HDR_LEN..]);
            self.server.recycle(packet);
        }
        while self.server.poll_udp().is_some() {}
        while self.server.poll_change().is_some() {}
        while self.server.poll_closed_connection().is_some() {}
        assert!(self.server.sessions() <= 4);
    }

    fn transmit(&mut self, now: Instant, out: &mut Vec<Datagram>) {
        let mut buf = Vec::new();
        while let Some(transmit) = self.server.poll_transmit(now, &mut buf) {
            let size = transmit.segment_size.unwrap_or(transmit.size).max(1);
            let link = LinkId(transmit.remote.port().wrapping_sub(5000));
            out.extend(buf[..transmit.size].chunks(size).map(|data| (link, data.to_vec())));
            buf.clear();
            if out.len() > super::MAX_BURST {
                break;
            }
        }
    }

    fn poll_timeout(&mut self, _: Instant) -> Option<Instant> {
        self.server.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.server.handle_timeout(now);
    }

    fn tun(&mut self, now: Instant, mut packet: Vec<u8>) {
        let outcome = self.server.handle_tun(now, VnetHdr::NONE, &mut packet);
        assert_eq!(outcome, TunOutcome::Consumed);
    }

    fn act(&mut self, now: Instant, input: &mut Input<'_>) {
        let (what, at) = (input.byte(), input.below(MAX_FLOWS));
        if let Some(relay) = self.relays.get(at).copied() {
            match what % 6 {
                0 => self.server.relay_opened(relay),
                1 => self.server.relay_failed(relay, ProxyError::Refused, "refused".to_owned()),
                2 => {
                    let room = self.server.relay_writable_bytes(now, relay);
                    let bytes = vec![what; usize::from(input.u16()).min(room)];
                    self.server.relay_write(now, relay, bytes.into());
                }
                3 => self.server.relay_finish(relay),
                4 => self.server.relay_abort(relay),
                _ => drop(self.server.relay_read(now, relay)),
            }
        }
        if let Some(udp) = self.flows.get(at).copied() {
            match what % 4 {
                0 => self.server.udp_opened(udp),
                1 => self.server.udp_failed(udp, ProxyError::Dns, "no such name".to_owned()),
                2 => self.server.udp_send(now, udp, input.short()),
                _ => self.server.udp_close(udp),
            }
        }
        if what == 0xff {
            self.server.on_local_stall(now);
        }
        let reports = self.server.report(now);
        assert!(reports.len() <= 64, "{} connections", reports.len());
    }
}
