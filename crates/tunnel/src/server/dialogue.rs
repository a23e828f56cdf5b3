//! What a server answers on the request stream: whether a tunnel is granted, addresses and routes.

use std::net::IpAddr;

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule},
    connect, connect_ip,
    h3::{self, Event as HttpEvent},
    headers::Headers,
    request::{self, Kind, Rejection},
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{ConnectionId, StreamId};
use mpvpn_types::{Instant, PathId};

use super::{Departed, Server, ServerEvent, Tunnel, capsules::RequestStream};
use crate::{
    AddressSet, Carries, Member, Secret,
    carrier::{
        Carrier, Role,
        extensions::{self, Admitted, AtServer, Ends},
    },
    events::ServerChange,
    http::Http,
    registry::{Denial, Visitor},
};

impl Server {
    pub(super) fn drive_http(&mut self, now: Instant, id: ConnectionId) {
        loop {
            let Some(peer) = self.peers.get_mut(id) else { return };
            let (Some(http), Some(connection)) = (&mut peer.http, self.endpoint.get(id)) else { return };
            let event = match http.next(connection, &peer.relays) {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => return self.close_peer(now, id, error.code, &error.reason),
            };
            let request = peer.request_mut().map(|request| request.id);
            match event {
                HttpEvent::Headers { stream, headers } if Some(stream) != request => {
                    if self.is_stranger(id, &headers) {
                        self.show_site(id, stream, &headers);
                        continue;
                    }
                    match request::classify(&headers) {
                        Ok(Kind::ConnectTcp) => self.connect(now, id, stream, &headers),
                        Ok(Kind::ConnectUdp) => self.connect_udp(now, id, stream, &headers),
                        Ok(Kind::Paths) => self.paths_request(now, id, stream, &headers),
                        Ok(Kind::ConnectIp) if self.config.carries == Carries::Streams => {
                            self.refuse_packets(now, id, stream, &headers);
                        }
                        _ => self.request(now, id, stream, &headers),
                    }
                }
                event if stream_of(&event).is_some_and(|stream| peer.udp.has(stream)) => {
                    if let Some(stream) = stream_of(&event) {
                        self.udp_said(id, stream, event);
                    }
                }
                // Read together with the request.
                event if stream_of(&event).is_some_and(|stream| peer.relays.has(stream)) => {
                    peer.relays.handle(event);
                }
                event if request.is_some() && stream_of(&event) == request => {
                    self.request_said(now, id, event);
                }
                HttpEvent::StreamError { stream, code, .. } => self.break_off(id, stream, code),
                _ => {}
            }
        }
    }

    fn request(&mut self, now: Instant, id: ConnectionId, stream: StreamId, headers: &Headers) {
        if let Err(refusal) = self.admit(now, id, stream, headers) {
            self.refuse(id, stream, &refusal);
        }
    }

    /// Whether a request is answered as that of anybody: it is no CONNECT, or nothing shows that a user makes it.
    fn is_stranger(&mut self, id: ConnectionId, headers: &Headers) -> bool {
        if headers.method() != Some("CONNECT") {
            return true;
        }
        let shown = connect::credentials(headers);
        (shown.is_none() || self.config.hide) && self.user_of(id, shown.as_deref()).is_err()
    }

    fn show_site(&mut self, id: ConnectionId, stream: StreamId, headers: &Headers) {
        let Some(connection) = self.endpoint.get(id) else { return };
        let (answer, content) = (self.config.site)(headers.method().unwrap_or_default());
        connection.write(stream, h3::encode_headers(&answer));
        if !content.is_empty() {
            connection.write(stream, h3::encode_data(&content));
        }
        connection.finish(stream);
        connection.stop(stream, h3::code::NO_ERROR);
    }

    /// A client wants to send packets, which nobody takes here. It learns that streams would do, and its connection
    /// stays for them.
    fn refuse_packets(&mut self, now: Instant, id: ConnectionId, stream: StreamId, headers: &Headers) {
        let request = connect_ip::parse_request(headers, &self.template);
        let user = request.and_then(|request| self.user_of(id, request.authorization.as_deref()));
        let user = match user {
            Ok(user) => user,
            Err(refusal) => return self.refuse(id, stream, &refusal),
        };
        if self.watched(now, id, &user).is_some() {
            let (refusal, answer) = no_packets(self.config.streams);
            self.answer_and_end(id, stream, &refusal, &answer);
        }
    }

    pub(super) fn refuse(&mut self, id: ConnectionId, stream: StreamId, refusal: &Rejection) {
        self.answer_and_end(id, stream, refusal, &refusal.headers());
    }

    fn answer_and_end(&mut self, id: ConnectionId, stream: StreamId, refusal: &Rejection, answer: &Headers) {
        let Some(connection) = self.endpoint.get(id) else { return };
        self.changes.push(ServerChange::Refused(refusal.status, refusal.reason.to_string()));
        connection.write(stream, h3::encode_headers(answer));
        connection.finish(stream);
        connection.stop(stream, h3::code::NO_ERROR);
    }

    /// Refuses a client to which no datagrams may be sent.
    pub(super) fn takes_datagrams(&self, id: ConnectionId) -> Result<(), Rejection> {
        let http = self.peers.get(id).and_then(|peer| peer.http.as_ref());
        match http.is_some_and(Http::datagrams_allowed) {
            true => Ok(()),
            false => Err(Rejection::new(400, "the client has not switched HTTP datagrams on")),
        }
    }

    fn admit(
        &mut self,
        now: Instant,
        id: ConnectionId,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let reject = |status, reason: &'static str| Rejection::new(status, reason);
        let request = connect_ip::parse_request(headers, &self.template)?;
        let user = self.user_of(id, request.authorization.as_deref())?;
        self.takes_datagrams(id)?;
        if self.tunnel_of(id).is_some() {
            return Err(reject(409, "this connection has a tunnel already"));
        }
        let Some(member) = extensions::member_of(headers) else {
            return Err(reject(400, "mpvpn-member is no number from 0 to 127"));
        };
        let shown = request.session.and_then(|secret| Secret::try_from(&secret[..]).ok());
        let limits = self.config.auth.limits(&user);
        let (shard, classes) = (self.shard.index(), limits.classes);
        let visitor = Visitor { user: &user, shown, member, classes, shard, connection: id };
        let entry =
            self.registry.enter(&visitor, || (self.config.secrets)()).map_err(|denial| match denial {
                Denial::Full => reject(503, "the server is full"),
                Denial::UnknownSession => reject(409, "no such session to be a member of"),
                Denial::Classes => Rejection::new(403, format!("too many classes: allowed are {classes}")),
            })?;
        if let Some(seat) = entry.replaced {
            self.replace(now, seat);
        }
        let mut routes = BytesMut::new();
        self.routes.capsule().encode(&mut routes);
        let Some(connection) = self.endpoint.get(id) else {
            self.registry.leave(now, &entry.secret, member, entry.serial);
            return Err(reject(500, "the connection is gone"));
        };
        let mut carrier = Carrier::new(now, Role::Server, Some(stream), Scheduler::default());
        for path in connection.paths().collect::<Vec<PathId>>() {
            carrier.path_opened(now, connection, path);
        }
        let mut answer = connect_ip::accept(Some(&entry.secret));
        carrier.set_session(entry.session);
        let shapers = self.groups.entry(entry.secret).or_default().shapers.clone();
        let server = AtServer {
            now,
            config: &self.config,
            connection,
            admitted: Some(Admitted { member, limits, shapers, networks: self.networks }),
            ends: Ends::at_server(&mut carrier, stream, member),
            class: None,
        };
        let class = server.agree(headers, &mut answer);
        connection.write(stream, h3::encode_headers(&answer));
        connection.write(stream, h3::encode_data(&routes));
        self.by_member.insert((entry.secret, member), id);
        let tunnel = Tunnel {
            request: RequestStream::new(stream),
            user,
            session: entry.session,
            secret: entry.secret,
            member,
            class: class.map(Box::new),
            serial: entry.serial,
            resumed: entry.addresses.is_some(),
            replaced: false,
            addresses: None,
            since: now,
            carrier,
            serves: member == Member::HOME,
            counted_mtu: None,
        };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.tunnel = Some(Box::new(tunnel));
            self.departed.extend(peer.bare.take().map(|bare| Departed::of(None, &bare.carrier)));
        }
        if let Some(addresses) = entry.addresses {
            self.grant(id, addresses, &[]);
        }
        Ok(())
    }

    /// Whose credentials these are. A client sends the same with every request.
    pub(super) fn user_of(
        &mut self,
        id: ConnectionId,
        credentials: Option<&str>,
    ) -> Result<String, Rejection> {
        let peer = self.peers.get_mut(id);
        let known = peer.as_ref().and_then(|peer| peer.known.as_ref());
        if let Some((_, user)) = known.filter(|(shown, _)| Some(shown.as_str()) == credentials) {
            return Ok(user.clone());
        }
        let user = self.config.auth.authenticate(credentials).map_err(Rejection::unauthorized)?;
        if let (Some(peer), Some(shown)) = (peer, credentials) {
            peer.known = Some((shown.to_owned(), user.clone()));
        }
        Ok(user)
    }

    /// Gives a session its addresses and tells the client, answering the requests of `asked`.
    fn grant(&mut self, id: ConnectionId, addresses: AddressSet, asked: &[(u64, IpNet)]) {
        let Some(tunnel) = self.peers.get_mut(id).and_then(|peer| peer.tunnel.as_mut()) else { return };
        if tunnel.addresses.replace(addresses).is_none() {
            self.changes.push(ServerChange::Joined { client: tunnel.tag(), resumed: tunnel.resumed });
        }
        let (stream, secret) = (tunnel.request.id, tunnel.secret);
        self.serve(&secret, addresses);
        let entries = answers(addresses, asked);
        let mut capsule = BytesMut::new();
        Capsule::AddressAssign(entries).encode(&mut capsule);
        if let Some(connection) = self.endpoint.get(id) {
            connection.write(stream, h3::encode_data(&capsule));
        }
    }

    pub(super) fn address(&mut self, now: Instant, id: ConnectionId, asked: &[(u64, IpNet)]) {
        let Some(tunnel) = self.peers.get(id).and_then(|peer| peer.tunnel.as_ref()) else { return };
        let (known, wishes) = (tunnel.addresses, wishes(asked));
        if let Some(addresses) = known.filter(|known| known.count() >= wishes.len()) {
            return self.grant(id, addresses, asked);
        }
        let secret = tunnel.secret;
        let addresses = match self.registry.assign(secret, &tunnel.user, &wishes) {
            Ok(addresses) => addresses,
            Err(error) => {
                tracing::warn!(%error, "a client got no address");
                return self.close_peer(now, id, h3::code::INTERNAL_ERROR, "no address is free");
            }
        };
        self.grant(id, addresses, asked);
        if known.is_some_and(|known| known != addresses) {
            self.tell_members(id, &secret, addresses);
        }
    }

    /// The session of this connection has more addresses than its others know.
    fn tell_members(&mut self, id: ConnectionId, secret: &Secret, addresses: AddressSet) {
        let here: Vec<_> =
            self.members(secret).map(|(_, other)| other).filter(|other| *other != id).collect();
        here.into_iter().for_each(|other| self.grant(other, addresses, &[]));
        let own = self.shard.index();
        // Those of other shards learn it when they come back.
        let elsewhere = self.registry.seats(secret).into_iter().filter(|seat| seat.shard != own);
        self.events.extend(elsewhere.map(ServerEvent::Replaced));
    }

    fn tunnel_of(&self, id: ConnectionId) -> Option<StreamId> {
        Some(self.peers.get(id)?.tunnel.as_ref()?.request.id)
    }

    /// Whether a stream is that of the tunnel.
    pub(super) fn is_tunnel(&self, id: ConnectionId, stream: StreamId) -> bool {
        self.tunnel_of(id) == Some(stream)
    }
}

/// The addresses that a client would like: those of each family in the order in which it asks for them, as many as a
/// session may have.
fn wishes(asked: &[(u64, IpNet)]) -> Vec<Vec<IpAddr>> {
    let mut wishes: Vec<Vec<IpAddr>> = Vec::new();
    for v4 in [true, false] {
        let family = asked.iter().map(|(_, net)| net.addr()).filter(|ip| ip.is_ipv4() == v4);
        for (at, ip) in family.take(AddressSet::MAX).enumerate() {
            match wishes.get_mut(at) {
                Some(wish) => wish.push(ip),
                None => wishes.push(vec![ip]),
            }
        }
    }
    wishes
}

/// All addresses of a session. Each answers the request for just that one, or else the next one of its family; a request
/// for which none is left is refused (RFC 9484 §4.7.2).
fn answers(addresses: AddressSet, asked: &[(u64, IpNet)]) -> Vec<AssignedAddress> {
    let (mut known, mut open): (Vec<_>, Vec<_>) =
        asked.iter().copied().partition(|(_, net)| addresses.contains(net.addr()));
    let mut entries = Vec::new();
    for ip in addresses.iter() {
        let exact = known.iter().position(|(_, net)| net.addr() == ip).map(|at| known.remove(at));
        let next = || open.iter().position(|(_, net)| net.addr().is_ipv4() == ip.is_ipv4());
        let request = match exact {
            Some(request) => Some(request),
            None => next().map(|at| open.remove(at)),
        };
        let request_id = request.map_or(0, |(request_id, _)| request_id);
        entries.push(AssignedAddress { request_id, net: IpNet::from(ip) });
    }
    for (request_id, net) in known.into_iter().chain(open) {
        let none: IpAddr = if net.addr().is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
        entries.push(AssignedAddress { request_id, net: IpNet::from(none) });
    }
    entries
}

/// What a server without packets answers to CONNECT-IP; `streams` says whether it makes TCP connections instead.
fn no_packets(streams: bool) -> (Rejection, Headers) {
    let refusal = Rejection::new(501, "this server carries no IP packets, only TCP and UDP by CONNECT");
    let mut answer = refusal.headers();
    if streams {
        extensions::announce_flows(&mut answer);
    }
    (refusal, answer)
}

/// The stream of an event that may be of a relay or a flow.
pub(super) fn stream_of(event: &HttpEvent) -> Option<StreamId> {
    match event {
        HttpEvent::Data { stream, .. }
        | HttpEvent::Finished { stream }
        | HttpEvent::Reset { stream, .. }
        | HttpEvent::StreamError { stream, .. } => Some(*stream),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_for_an_address_gets_one_answer() {
        let mut pool = crate::Pool::new("10.0.0.0/24".parse().unwrap(), Some("fd00::/64".parse().unwrap()));
        pool.assign([1; 16], "a", &[]).unwrap();
        assert!(pool.add(&[1; 16], &[]));
        let addresses = pool.addresses(&[1; 16]).unwrap();
        let net = |text: &str| text.parse::<IpAddr>().map(IpNet::from).unwrap();
        let answered = |asked: &[(u64, &str)]| {
            let asked: Vec<_> = asked.iter().map(|(id, ip)| (*id, net(ip))).collect();
            let of = |entry: AssignedAddress| (entry.request_id, entry.net.addr().to_string());
            answers(addresses, &asked).into_iter().map(of).collect::<Vec<_>>()
        };
        let line = |expected: &[(u64, &str)]| {
            expected.iter().map(|(id, ip)| (*id, (*ip).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(answered(&[]), line(&[(0, "10.0.0.2"), (0, "fd00::2"), (0, "10.0.0.3"), (0, "fd00::3")]));
        assert_eq!(
            answered(&[
                (1, "0.0.0.0"),
                (2, "::"),
                (3, "10.0.0.2"),
                (4, "::"),
                (5, "0.0.0.0"),
                (6, "10.0.0.2")
            ]),
            line(&[
                (3, "10.0.0.2"),
                (2, "fd00::2"),
                (1, "10.0.0.3"),
                (4, "fd00::3"),
                (6, "0.0.0.0"),
                (5, "0.0.0.0"),
            ])
        );
        let many: Vec<_> = (1..100).map(|id| (id, net("0.0.0.0"))).chain([(100, net("fd00::7"))]).collect();
        assert_eq!(wishes(&many).len(), AddressSet::MAX);
        assert_eq!(wishes(&many)[0], ["0.0.0.0", "fd00::7"].map(|ip| ip.parse::<IpAddr>().unwrap()));
        assert_eq!(wishes(&[]), Vec::<Vec<IpAddr>>::new());
    }

    #[test]
    fn who_asks_for_packets_in_vain_learns_of_streams() {
        let (_, answer) = no_packets(true);
        assert_eq!((answer.status(), answer.text("mpvpn-streams")), (Some(501), Some("?1")));
        assert!(answer.text("proxy-status").unwrap().contains("no IP packets"));
        let error = connect_ip::check_response(&answer).unwrap_err();
        assert!(matches!(error, connect_ip::ResponseError::NotOffered { status: 501, .. }), "{error}");
        assert_eq!(answer.text("mpvpn-udp"), Some("?1"));
        assert_eq!(no_packets(false).1.text("mpvpn-streams"), None);
    }
}
