//! What a server answers on the request stream: whether a tunnel is granted, addresses and routes.

use bytes::BytesMut;
use mpvpn_masque::{
    connect, connect_ip,
    h3::{self, Event as HttpEvent},
    headers::Headers,
    request::{self, Rejection, RequestKind},
};
use mpvpn_quic::{ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{
    Server,
    peer::{Granted, Peer, Tunnel},
};
use crate::{
    ConnectionNumber, SessionSecret, TunnelMode,
    events::ServerChange,
    http::Http,
    multipath::extensions::{self, AdmittedClient, LocalEnd, ServerNegotiation},
    registry::{Denial, Visitor},
};

impl Server {
    pub(super) fn drive_http(&mut self, now: Instant, id: ConnectionHandle) {
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
                        Ok(RequestKind::ConnectTcp) => self.connect(now, id, stream, &headers),
                        Ok(RequestKind::ConnectUdp) => self.connect_udp(now, id, stream, &headers),
                        Ok(RequestKind::ConnectMpvpn) => self.paths_request(now, id, stream, &headers),
                        Ok(RequestKind::ConnectIp) if self.config.mode == TunnelMode::RelaysOnly => {
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

    fn request(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, headers: &Headers) {
        if let Err(refusal) = self.admit(now, id, stream, headers) {
            self.refuse(id, stream, &refusal);
        }
    }

    /// Whether a request is answered as that of anybody: it is no CONNECT, or nothing shows that a user makes it.
    fn is_stranger(&mut self, id: ConnectionHandle, headers: &Headers) -> bool {
        if headers.method() != Some("CONNECT") {
            return true;
        }
        let shown = connect::credentials(headers);
        (shown.is_none() || self.config.hide_wrong_credentials) && self.user_of(id, shown.as_deref()).is_err()
    }

    fn show_site(&mut self, id: ConnectionHandle, stream: StreamId, headers: &Headers) {
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
    fn refuse_packets(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, headers: &Headers) {
        let request = connect_ip::parse_request(headers, &self.template);
        let user = request.and_then(|request| self.user_of(id, request.authorization.as_deref()));
        let user = match user {
            Ok(user) => user,
            Err(refusal) => return self.refuse(id, stream, &refusal),
        };
        if self.watched(now, id, &user).is_some() {
            let (refusal, answer) = no_packets(self.config.offers_streams);
            self.answer_and_end(id, stream, &refusal, &answer);
        }
    }

    pub(super) fn refuse(&mut self, id: ConnectionHandle, stream: StreamId, refusal: &Rejection) {
        self.answer_and_end(id, stream, refusal, &refusal.headers());
    }

    fn answer_and_end(
        &mut self,
        id: ConnectionHandle,
        stream: StreamId,
        refusal: &Rejection,
        answer: &Headers,
    ) {
        let Some(connection) = self.endpoint.get(id) else { return };
        self.changes.push(ServerChange::Refused(refusal.status, refusal.reason.to_string()));
        connection.write(stream, h3::encode_headers(answer));
        connection.finish(stream);
        connection.stop(stream, h3::code::NO_ERROR);
    }

    /// Refuses a client to which no datagrams may be sent.
    pub(super) fn takes_datagrams(&self, id: ConnectionHandle) -> Result<(), Rejection> {
        let http = self.peers.get(id).and_then(|peer| peer.http.as_ref());
        match http.is_some_and(Http::datagrams_allowed) {
            true => Ok(()),
            false => Err(Rejection::new(400, "the client has not switched HTTP datagrams on")),
        }
    }

    fn admit(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let reject = |status, reason: &'static str| Rejection::new(status, reason);
        let request = connect_ip::parse_request(headers, &self.template)?;
        let user = self.user_of(id, request.authorization.as_deref())?;
        self.takes_datagrams(id)?;
        if self.peers.get(id).and_then(Peer::tunnel).is_some() {
            return Err(reject(409, "this connection has a tunnel already"));
        }
        let Some(member) = extensions::member_of(headers) else {
            return Err(reject(400, "mpvpn-member is no number from 0 to 127"));
        };
        let shown = request.session.and_then(|secret| SessionSecret::try_from(&secret[..]).ok());
        let limits = self.config.auth.limits(&user);
        let (shard, classes) = (self.shard.index(), limits.max_classes);
        let visitor = Visitor { user: &user, shown, member, classes, shard, connection: id };
        let entry =
            self.registry.enter(&visitor, || (self.config.new_secret)()).map_err(|denial| match denial {
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
        let mut granted = Granted::new(now, connection, user, Some(stream));
        let mut answer = connect_ip::accept(Some(&entry.secret));
        granted.multipath.set_session(entry.session);
        let shapers = self.sessions.group(&entry.secret).shapers.clone();
        let server = ServerNegotiation {
            now,
            config: &self.config,
            connection,
            admitted: Some(AdmittedClient { member, limits, shapers, networks: self.routes.networks() }),
            local: LocalEnd::at_server(&mut granted.multipath, stream, member),
            class: None,
        };
        let class = server.agree(headers, &mut answer);
        connection.write(stream, h3::encode_headers(&answer));
        connection.write(stream, h3::encode_data(&routes));
        self.sessions.enter(entry.secret, member, id);
        granted.tunnel = Some(Tunnel {
            session: entry.session,
            secret: entry.secret,
            member,
            class,
            serial: entry.serial,
            resumed: entry.addresses.is_some(),
            replaced: false,
            addresses: None,
            since: now,
            serves: member == ConnectionNumber::INITIAL,
            counted_mtu: None,
        });
        if let Some(peer) = self.peers.get_mut(id) {
            let before = peer.granted.replace(Box::new(granted));
            self.departed.extend(before.map(|before| before.departed()));
        }
        if let Some(addresses) = entry.addresses {
            self.grant(id, addresses, &[]);
        }
        Ok(())
    }

    /// Whose credentials these are. A client sends the same with every request.
    pub(super) fn user_of(
        &mut self,
        id: ConnectionHandle,
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

    /// Whether a stream is that of the tunnel.
    pub(super) fn is_tunnel(&self, id: ConnectionHandle, stream: StreamId) -> bool {
        self.peers.get(id).and_then(Peer::tunnel_stream) == Some(stream)
    }
}

/// What a server without packets answers to CONNECT-IP; `streams` says whether it makes TCP connections instead.
fn no_packets(streams: bool) -> (Rejection, Headers) {
    let refusal = Rejection::new(501, "this server carries no IP packets, only TCP and UDP by CONNECT");
    let mut answer = refusal.headers();
    if streams {
        extensions::announce_flow_requests(&mut answer);
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
