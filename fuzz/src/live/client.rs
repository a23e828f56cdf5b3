//! A whole client with a hostile server.

use std::{collections::BTreeSet, net::IpAddr};

use bytes::BytesMut;
use mpvpn_flow::rules::Rules;
use mpvpn_packet::{VNET_HDR_LEN, VnetHdr, ip};
use mpvpn_path::Scheduler;
use mpvpn_quic::LocalAddress;
use mpvpn_tunnel::{
    AddressesInUse, ClassProfile, Client, ClientConfig, ClientEvent, ClientState, RelayId, RelayRead,
    TunnelMode, UdpId,
};
use mpvpn_types::{Duration, Fec, FlowMode, Instant, LinkId};

use super::{Datagram, LINKS, SERVER, Subject, World, identity::SETUPS, peer::Peer};
use crate::input::Input;

/// The most relays and UDP flows of this edge.
const MAX_FLOWS: usize = 16;

/// `flags, operations…`; see `World::play`.
pub fn client(data: &[u8]) {
    play(established(super::first_flag(data)), data);
}

/// As [`client`], once, with a session that is set up before its input is known.
pub fn client_with_session() -> impl FnMut(&[u8]) {
    super::with_session(established, play)
}

fn play(mut world: World<ClientSubject>, data: &[u8]) {
    let mut input = Input(data);
    let flags = input.byte();
    world.play(&mut input);
    if flags & 6 == 6 && !world.subject.is_over {
        // A server that falls silent is noticed: the client connects anew.
        world.peer.vanish();
        world.run(Duration::from_secs(400));
        let report = world.subject.client.report(world.now);
        assert_eq!(report.state, ClientState::Connecting);
    }
}

/// A tunnel that is up on two paths, with every extension.
pub(super) fn established(streams: bool) -> World<ClientSubject> {
    let now = Instant::now();
    let mut world = World::new(now, ClientSubject::new(now, streams), Peer::server());
    for _ in 0..40 {
        world.run(Duration::from_millis(20));
        if !world.subject.addresses.is_empty() && world.peer.paths() == usize::from(LINKS) {
            break;
        }
    }
    assert!(!world.subject.addresses.is_empty(), "the client is not up");
    world.work = 0;
    world
}

pub(super) struct ClientSubject {
    pub(super) client: Client,
    /// All that the server ever assigned.
    pub(super) addresses: BTreeSet<ipnet::IpNet>,
    relays: Vec<RelayId>,
    flows: Vec<UdpId>,
    /// The client has given up, as after a refused token.
    is_over: bool,
}

impl ClientSubject {
    fn new(now: Instant, streams: bool) -> Self {
        let class = ClassProfile { name: "default".to_owned(), ..ClassProfile::default() };
        let mode = if streams { FlowMode::Stream } else { FlowMode::Datagram };
        let config = ClientConfig {
            mode: TunnelMode::Packets,
            setup: SETUPS.0.clone(),
            server_name: "mpvpn".to_owned(),
            authority: "mpvpn".to_owned(),
            path: "/.well-known/masque/ip/*/*/".to_owned(),
            token: Some("token".to_owned()),
            class: Some(class),
            instance: None,
            additional_addresses: 1,
            addresses_in_use: AddressesInUse::default(),
            scheduler: Scheduler::Auto,
            fec: Fec::Fixed { data: 4, repair: 2 },
            copies: 1,
            flow_rules: Rules { mode, rules: Vec::new() },
            isn_secret: [1, 2],
            disabled_extensions: &[],
        };
        let mut client = Client::new(now, config);
        for link in 0..LINKS {
            client.link_up(now, LinkId(link), SERVER);
        }
        Self { client, addresses: BTreeSet::new(), relays: Vec::new(), flows: Vec::new(), is_over: false }
    }

    fn on_event(&mut self, now: Instant, event: ClientEvent) {
        match event {
            ClientEvent::Up(assignment) | ClientEvent::AssignmentChanged(assignment) => {
                assert!(assignment.dns.len() <= 3);
                self.addresses.extend(assignment.addresses);
                self.addresses.extend(assignment.additional.into_iter().flatten());
            }
            ClientEvent::RelayReadable(relay) => {
                for _ in 0..10_000 {
                    if !matches!(self.client.relay_read(now, relay), RelayRead::Data(_)) {
                        break;
                    }
                }
            }
            ClientEvent::RelayFailed(relay, _) | ClientEvent::RelayGone(relay) => {
                self.relays.retain(|other| *other != relay);
            }
            ClientEvent::Mtu(mtu) => assert!((576..=65_535).contains(&mtu), "an MTU of {mtu}"),
            ClientEvent::Fatal(error) => {
                assert!(!error.to_string().is_empty());
                self.is_over = true;
            }
            _ => {}
        }
    }

    /// A server reaches only the addresses that it assigned.
    fn check_packet(&self, packet: &[u8]) {
        let to: IpAddr = ip::parse(packet).expect("a packet for the TUN device").dst();
        assert!(self.addresses.iter().any(|net| net.contains(&to)), "a packet to {to}: {:?}", self.addresses);
    }
}

impl Subject for ClientSubject {
    fn receive(&mut self, now: Instant, link: LinkId, data: BytesMut) {
        self.client.handle_datagram(now, link, SERVER, 0, data);
    }

    fn after_batch(&mut self, now: Instant) {
        self.client.handle_batch(now);
        while let Some(event) = self.client.poll_event() {
            self.on_event(now, event);
        }
        while let Some(packet) = self.client.poll_tun(now) {
            self.check_packet(&packet.to_vec()[VNET_HDR_LEN..]);
            self.client.recycle(packet);
        }
        while self.client.poll_udp().is_some() {}
        while self.client.poll_change().is_some() {}
    }

    fn transmit(&mut self, now: Instant, out: &mut Vec<Datagram>) {
        let mut buf = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(now, &mut buf) {
            let size = transmit.segment_size.unwrap_or(transmit.size).max(1);
            let link = transmit.local.and_then(LocalAddress::as_link).expect("a client sends on links");
            out.extend(buf[..transmit.size].chunks(size).map(|data| (link, data.to_vec())));
            buf.clear();
            if out.len() > super::MAX_BURST {
                break;
            }
        }
    }

    fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        self.client.poll_timeout(now)
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.client.handle_timeout(now);
    }

    fn tun(&mut self, now: Instant, mut packet: Vec<u8>) {
        self.client.handle_tun(now, VnetHdr::NONE, &mut packet);
    }

    fn act(&mut self, now: Instant, input: &mut Input<'_>) {
        let (what, at) = (input.byte(), input.below(MAX_FLOWS));
        let target = ["192.0.2.7:80", "example.com:443", "[2001:db8::7]:53"][usize::from(what) % 3];
        let target = target.parse().expect("an authority");
        match what >> 2 & 7 {
            0 if self.relays.len() < MAX_FLOWS => self.relays.extend(self.client.relay_open(&target)),
            1 if self.flows.len() < MAX_FLOWS => self.flows.extend(self.client.udp_open(now, &target)),
            2 => {
                if let Some(relay) = self.relays.get(at).copied() {
                    let room = self.client.relay_writable_bytes(relay);
                    let bytes = vec![what; usize::from(input.u16()).min(room)];
                    self.client.relay_write(relay, bytes.into());
                }
            }
            3 => {
                if let Some(relay) = self.relays.get(at).copied() {
                    if what & 32 == 0 {
                        self.client.relay_finish(relay)
                    } else {
                        self.client.relay_abort(relay)
                    }
                }
            }
            4 => {
                if let Some(flow) = self.flows.get(at).copied() {
                    self.client.udp_send(now, flow, input.short());
                }
            }
            5 if !self.flows.is_empty() => {
                let flow = self.flows.remove(at % self.flows.len());
                self.client.udp_close(flow);
            }
            6 if what & 32 == 0 => self.client.link_down(now, LinkId(1)),
            6 => self.client.link_up(now, LinkId(1), SERVER),
            _ => {
                let report = self.client.report(now);
                assert!(report.paths.len() <= 64 && report.mtu <= 65_535);
            }
        }
    }
}
