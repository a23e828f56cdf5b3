//! The connection of a client that is in use, and what was negotiated on it.
//!
//! In: capsules of the server, policies of links, networks behind this client. Out: addresses, routes, LINK
//! capsules and announcements. Always holds: a session belongs to one connection; the next connection has
//! another one.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, CapsuleError, CapsuleReader, IpRange, LinkNotice, Site, SiteState},
    h3,
};
use mpvpn_packet::ip;
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::{Instant, PathId, Tier};

use super::{
    Assignment,
    addresses::{assigned_networks, places, with_network},
    addresses_in_use::{AddressesInUse, FurtherRequests},
    app_tcp::{StreamContext, StreamTargets},
    is_link_local,
    links::Links,
    udp::ConnectionUdp,
};
use crate::{
    http::Http,
    multipath::{Gateway, MultipathConnection, extensions::NegotiatedExtensions},
    relay::Relays,
    sites::ranges_of,
};

/// The MTU of the TUN where the server accepts no datagrams (bytes): that of Ethernet. Only streams work
/// there, so the value does not matter.
const MTU_WITHOUT_DATAGRAMS: usize = 1500;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: ConnectionHandle,
    pub(super) http: Http,
    /// The stream of CONNECT-IP; without packets that of `connect-mpvpn`, once the server accepted it.
    pub(super) request: Option<StreamId>,
    /// The stream of `connect-mpvpn`, until the server responds.
    pub(super) mpvpn_request: Option<StreamId>,
    /// Streams of CONNECT requests.
    pub(super) relays: Relays,
    /// Flows of CONNECT-UDP requests.
    pub(super) udp: ConnectionUdp,
    pub(super) since: Instant,
    pub(super) accepted: bool,
    pub(super) up: bool,
    pub(super) capsules: CapsuleReader,
    pub(super) addresses: Vec<AssignedAddress>,
    /// Addresses that the server assigned last and that are not used.
    pub(super) refused: Vec<IpAddr>,
    pub(super) further: FurtherRequests,
    pub(super) routes: Vec<IpRange>,
    /// The networks behind clients, if the server says which.
    sites: Option<Arc<[Site]>>,
    /// Those behind this client that are in use, and those that the server assigned.
    pub(super) behind: Vec<IpNet>,
    /// Those that the server assigned.
    assigned_networks: Arc<Vec<IpNet>>,
    /// Whether streams would hide an address of this client behind that of the server.
    has_own_address: bool,
    /// The networks of the server, and those behind other clients: addresses there are not translated.
    untranslated: Vec<IpNet>,
    /// Extensions that the server agreed to.
    pub(super) agreed: NegotiatedExtensions,
    /// Whether the server has no CONNECT-IP: the addresses are made up, and each flow has a request of its
    /// own.
    pub(super) per_flow: bool,
    /// The LINK capsule sent last for each path.
    sent_notices: BTreeMap<PathId, LinkNotice>,
    /// Whether paths or policies have changed since these were sent.
    pub(super) notices_due: bool,
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
            mpvpn_request: None,
            relays: Relays::default(),
            udp: ConnectionUdp::default(),
            since: now,
            accepted: false,
            up: false,
            capsules: CapsuleReader::lenient(),
            addresses: Vec::new(),
            refused: Vec::new(),
            further: FurtherRequests::default(),
            routes: Vec::new(),
            sites: None,
            behind: Vec::new(),
            assigned_networks: Arc::default(),
            has_own_address: false,
            untranslated: Vec::new(),
            agreed: NegotiatedExtensions::default(),
            per_flow: false,
            sent_notices: BTreeMap::new(),
            notices_due: true,
            multipath,
        }
    }

    /// The server has answered the request.
    pub(super) fn set_agreed(&mut self, agreed: NegotiatedExtensions) {
        self.untranslated.clone_from(&agreed.networks);
        self.agreed = agreed;
    }

    /// Whether a packet of the TUN may enter the tunnel: its source is assigned or behind this client, and
    /// its destination is not link-local.
    pub(super) fn may_send(&self, packet: &ip::IpPacket<'_>) -> bool {
        let src = packet.src();
        (self.is_assigned(src) || self.is_behind(src)) && !is_link_local(packet.dst())
    }

    /// Whether the address is in a prefix that the server assigned.
    pub(super) fn is_assigned(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|entry| entry.net.contains(&ip))
    }

    /// Whether a stream may carry a segment of TCP that may enter the tunnel: it would have the server's
    /// address instead of that of a host behind this client.
    #[inline]
    pub(super) fn may_stream(&self, packet: &ip::IpPacket<'_>) -> bool {
        // Most clients have neither networks nor an address of their own.
        self.behind.is_empty() && !self.has_own_address || self.is_translated(packet.src())
    }

    /// Whether the server translates this source.
    fn is_translated(&self, src: IpAddr) -> bool {
        (self.behind.is_empty() || self.is_assigned(src))
            && (!self.has_own_address || self.agreed.networks.iter().any(|net| net.contains(&src)))
    }

    fn is_behind(&self, ip: IpAddr) -> bool {
        self.behind.iter().any(|net| net.contains(&ip))
    }

    /// Whether an advertised route contains the address.
    pub(super) fn has_route_to(&self, ip: IpAddr) -> bool {
        self.routes.iter().any(|range| range.contains(ip))
    }

    /// The assignment, if `more` additional addresses of each family were requested.
    pub(super) fn assignment(&self, more: usize) -> Assignment {
        let in_network = |net: IpNet| with_network(net, &self.agreed.networks);
        let mut addresses = Vec::new();
        let mut beyond = vec![Vec::new(); more];
        for (place, net) in places(&self.addresses, more) {
            match place.checked_sub(1).and_then(|at| beyond.get_mut(at)) {
                Some(list) => list.push(net),
                None => addresses.push(in_network(net)),
            }
        }
        Assignment {
            addresses,
            additional: beyond,
            routes: self.routes.as_slice().into(),
            dns: self.agreed.dns.as_slice().into(),
            dns_domain: self.agreed.dns_domain.clone(),
            sites: self.sites.clone(),
            networks: Arc::clone(&self.assigned_networks),
        }
    }

    /// The targets of TCP connections that the server opens.
    pub(super) fn stream_targets(&self) -> StreamTargets<'_> {
        StreamTargets { is_supported: self.agreed.streams, networks: &self.untranslated }
    }

    /// The source addresses of ICMP errors.
    pub(super) fn gateway(&self) -> Gateway {
        let first = |v4: bool| -> Option<IpAddr> {
            self.addresses.iter().map(|entry| entry.net.addr()).find(|ip| ip.is_ipv4() == v4)
        };
        Gateway { v4: first(true), v6: first(false) }
    }

    /// The parts of the session that streams of apps need; `credentials` are the value of
    /// `proxy-authorization`.
    pub(super) fn stream_context<'a>(
        &'a mut self,
        connection: &'a mut Connection,
        credentials: Option<&'a str>,
    ) -> StreamContext<'a> {
        StreamContext {
            gateway: self.gateway(),
            connection,
            http: &mut self.http,
            relays: &mut self.relays,
            multipath: &mut self.multipath,
            credentials,
            packets: !self.per_flow,
        }
    }

    /// The MTU of the TUN (bytes), once it is known.
    pub(super) fn known_mtu(&mut self) -> Option<usize> {
        self.multipath
            .mtu
            .take_change()
            .or_else(|| (!self.http.datagrams_allowed()).then_some(MTU_WITHOUT_DATAGRAMS))
    }

    /// Takes bytes of the request stream: capsules.
    ///
    /// # Errors
    /// If a capsule is malformed: the connection must be closed.
    pub(super) fn take_capsules(&mut self, data: &[u8], in_use: &AddressesInUse) -> Result<(), CapsuleError> {
        self.capsules.push(data);
        while let Some(capsule) = self.capsules.next()? {
            match capsule {
                Capsule::AddressAssign(assigned) if !self.per_flow => self.take_addresses(assigned, in_use),
                Capsule::RouteAdvertisement(routes) if !self.per_flow => self.routes = routes,
                Capsule::Sites(sites) if self.agreed.sites => self.take_sites(sites),
                _ => {}
            }
        }
        Ok(())
    }

    fn take_sites(&mut self, sites: Vec<Site>) {
        let in_state = |state| sites.iter().filter(move |site| site.state == state).map(|site| site.net);
        self.behind = in_state(SiteState::InUse).chain(self.assigned_networks.iter().copied()).collect();
        self.untranslated =
            self.agreed.networks.iter().copied().chain(in_state(SiteState::OfAnother)).collect();
        self.sites = Some(sites.into());
    }

    /// Announces the networks behind this client (RFC 9484 §4.7.3).
    pub(super) fn announce(&mut self, connection: &mut Connection, networks: &[IpNet]) {
        let Some(stream) = self.request.filter(|_| self.accepted && !self.per_flow) else { return };
        // Other servers say nothing about them.
        if !self.agreed.sites {
            self.behind = [networks, &self.assigned_networks].concat();
        }
        let capsule = Capsule::RouteAdvertisement(ranges_of(networks));
        connection.write(stream, h3::encode_data(&capsule.to_bytes()));
    }

    fn take_addresses(&mut self, assigned: Vec<AssignedAddress>, in_use: &AddressesInUse) {
        // Some servers send an ADDRESS_ASSIGN capsule for each family.
        let mut fresh: Vec<_> = assigned.into_iter().filter(|entry| !entry.is_refusal()).collect();
        let networks = assigned_networks(&mut fresh);
        if networks != *self.assigned_networks {
            self.behind.retain(|net| !self.assigned_networks.contains(net));
            self.behind.extend(&networks);
            self.assigned_networks = networks.into();
        }
        self.refused = in_use.take_refused(&mut fresh);
        let families = |v4| fresh.iter().any(|entry| entry.net.addr().is_ipv4() == v4);
        if !self.up {
            let kept = self.addresses.extract_if(.., |old| !families(old.net.addr().is_ipv4()));
            self.addresses = kept.chain(fresh.iter().copied()).collect();
        } else {
            self.addresses = fresh;
        }
        // Servers that have streams say which addresses are theirs to translate.
        let known = &self.agreed.networks;
        let is_own = |entry: &AssignedAddress| !known.iter().any(|net| net.contains(&entry.net.addr()));
        self.has_own_address = !known.is_empty() && self.addresses.iter().any(is_own);
    }

    /// Sends a LINK capsule for each path whose link changed; with the number of the link if there are other
    /// connections `beside` this one.
    pub(super) fn send_link_notices(&mut self, connection: &mut Connection, links: &Links, beside: bool) {
        let Some(stream) = self.request.filter(|_| self.agreed.links) else { return };
        if !std::mem::take(&mut self.notices_due) {
            return;
        }
        let (sent, multipath) = (&mut self.sent_notices, &self.multipath);
        sent.retain(|path, _| multipath.paths.contains(*path));
        for (path, link) in multipath.links() {
            let is_same = |other: mpvpn_types::LinkId| {
                other.uplink() == link.uplink() && other.is_tcp() == link.is_tcp()
            };
            let mut same = multipath.links().filter(|(_, other)| is_same(*other));
            let with =
                same.next().map(|(first, _)| first).filter(|first| *first != path || same.next().is_some());
            let policy = links.policy(link);
            let number = beside.then_some(link.uplink().0);
            let notice = LinkNotice { path, policy: policy.for_peer(), first_path: with, link: number };
            let known = sent.get(&path).copied().unwrap_or(LinkNotice::with_defaults(path));
            if policy.tier == Tier::Never || known == notice {
                continue;
            }
            sent.insert(path, notice);
            let mut capsule = BytesMut::new();
            Capsule::Link(notice).encode(&mut capsule);
            connection.write(stream, h3::encode_data(&capsule));
        }
    }
}
