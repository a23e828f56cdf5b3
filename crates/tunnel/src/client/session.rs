//! The connection of a client that is in use, and what the server said on it.

use std::{collections::BTreeMap, net::IpAddr};

use bytes::BytesMut;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, CapsuleError, CapsuleReader, IpRange, LinkNotice},
    h3,
};
use mpvpn_packet::ip;
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::{Instant, PathId, Tier};

use super::{
    is_link_local,
    lane::{Far, Reach},
    links::Links,
    udp::Udp,
};
use crate::{
    http::Http,
    multipath::{Gateway, MultipathConnection, extensions::NegotiatedExtensions},
    relay::Relays,
};

/// The MTU where no datagram travels (bytes): that of most links.
const STREAMS_MTU: usize = 1500;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: ConnectionHandle,
    pub(super) http: Http,
    /// The tunnel's request, or without packets the one on which was agreed what both ends know.
    pub(super) request: Option<StreamId>,
    /// Without packets: where the server was asked whether it knows more than the RFCs, until it answers.
    pub(super) asked: Option<StreamId>,
    /// Streams that carry the bytes of connections.
    pub(super) relays: Relays,
    /// Flows of UDP payloads.
    pub(super) udp: Udp,
    pub(super) since: Instant,
    pub(super) accepted: bool,
    pub(super) up: bool,
    pub(super) capsules: CapsuleReader,
    pub(super) addresses: Vec<AssignedAddress>,
    pub(super) routes: Vec<IpRange>,
    /// What the server has said it knows.
    pub(super) agreed: NegotiatedExtensions,
    /// It carries no packets: the addresses are made up, and each flow travels by itself.
    pub(super) by_flows: bool,
    /// What the server was told about the links under the paths.
    told: BTreeMap<PathId, LinkNotice>,
    pub(super) multipath: MultipathConnection,
}

impl Session {
    pub(super) fn new(
        now: Instant,
        connection: ConnectionHandle,
        http: Http,
        multipath: MultipathConnection,
    ) -> Self {
        Self {
            connection,
            http,
            request: None,
            asked: None,
            relays: Relays::default(),
            udp: Udp::default(),
            since: now,
            accepted: false,
            up: false,
            capsules: CapsuleReader::lenient(),
            addresses: Vec::new(),
            routes: Vec::new(),
            agreed: NegotiatedExtensions::default(),
            by_flows: false,
            told: BTreeMap::new(),
            multipath,
        }
    }

    /// Whether the sender has an address of this client, and the receiver may be beyond this link.
    pub(super) fn may_send(&self, packet: &ip::IpPacket<'_>) -> bool {
        let src = packet.src();
        self.addresses.iter().any(|entry| entry.net.contains(&src)) && !is_link_local(packet.dst())
    }

    /// Whether the server leads there.
    pub(super) fn reaches(&self, ip: IpAddr) -> bool {
        self.routes.iter().any(|range| range.contains(ip))
    }

    /// Where the server makes TCP connections.
    pub(super) fn reach(&self) -> Reach<'_> {
        Reach { translated: self.agreed.streams, networks: &self.agreed.networks }
    }

    /// The addresses that errors of the tunnel come from.
    pub(super) fn gateway(&self) -> Gateway {
        let first = |v4: bool| -> Option<IpAddr> {
            self.addresses.iter().map(|entry| entry.net.addr()).find(|ip| ip.is_ipv4() == v4)
        };
        Gateway { v4: first(true), v6: first(false) }
    }

    /// The far end of its connection, for streams of apps; `credentials` are for `proxy-authorization`.
    pub(super) fn far<'a>(
        &'a mut self,
        connection: &'a mut Connection,
        credentials: Option<&'a str>,
    ) -> Far<'a> {
        Far {
            gateway: self.gateway(),
            connection,
            http: &mut self.http,
            relays: &mut self.relays,
            multipath: &mut self.multipath,
            credentials,
            packets: !self.by_flows,
        }
    }

    /// What packets of apps may have (bytes), once it is known. Where only streams work it does not matter.
    pub(super) fn known_mtu(&mut self) -> Option<usize> {
        self.multipath.take_mtu_change().or_else(|| (!self.http.datagrams_allowed()).then_some(STREAMS_MTU))
    }

    /// Takes what came on the stream of its request.
    ///
    /// # Errors
    /// If it is malformed: the connection is to be closed.
    pub(super) fn take_capsules(&mut self, data: &[u8]) -> Result<(), CapsuleError> {
        self.capsules.push(data);
        while let Some(capsule) = self.capsules.next()? {
            match capsule {
                Capsule::AddressAssign(assigned) if !self.by_flows => self.take_addresses(assigned),
                Capsule::RouteAdvertisement(routes) if !self.by_flows => self.routes = routes,
                _ => {}
            }
        }
        Ok(())
    }

    fn take_addresses(&mut self, assigned: Vec<AssignedAddress>) {
        // Two capsules, one a family, is how some servers send what belongs together.
        let fresh: Vec<_> = assigned.into_iter().filter(|entry| !entry.is_refusal()).collect();
        let families = |v4| fresh.iter().any(|entry| entry.net.addr().is_ipv4() == v4);
        if !self.up {
            let kept = self.addresses.extract_if(.., |old| !families(old.net.addr().is_ipv4()));
            self.addresses = kept.chain(fresh.iter().copied()).collect();
        } else {
            self.addresses = fresh;
        }
    }

    /// Tells the server what it does not know yet about the links under the paths, with the numbers of links where other
    /// connections are `beside` this one.
    pub(super) fn tell_links(&mut self, connection: &mut Connection, links: &Links, beside: bool) {
        let Some(stream) = self.request.filter(|_| self.agreed.links) else { return };
        let (told, multipath) = (&mut self.told, &self.multipath);
        told.retain(|path, _| multipath.has_path(*path));
        for (path, link) in multipath.links() {
            let is_same = |other: mpvpn_types::LinkId| {
                other.uplink() == link.uplink() && other.is_tcp() == link.is_tcp()
            };
            let mut same = multipath.links().filter(|(_, other)| is_same(*other));
            let with =
                same.next().map(|(first, _)| first).filter(|first| *first != path || same.next().is_some());
            let policy = links.policy(link);
            let number = beside.then_some(link.uplink().0);
            let notice = LinkNotice { path, policy: policy.for_peer(), with, link: number };
            let known = told.get(&path).copied().unwrap_or(LinkNotice::with_defaults(path));
            if policy.tier == Tier::Never || known == notice {
                continue;
            }
            told.insert(path, notice);
            let mut capsule = BytesMut::new();
            Capsule::Link(notice).encode(&mut capsule);
            connection.write(stream, h3::encode_data(&capsule));
        }
    }
}
