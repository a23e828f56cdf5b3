//! Requests to a server: dispatch, authentication, and the admission of CONNECT-IP.
//!
//! In: HTTP/3 events. Out: responses, tunnels, events for relays. Always holds: without valid credentials a
//! peer sees only the site.

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
    AuthenticatedUser, Server,
    peer::{AuthenticatedPeer, MAX_UNSENT_REPLIES, Peer, PendingGrant, Tunnel},
};
use crate::{
    ConnectionNumber, SecretSharing, TunnelMode,
    events::{ClientTag, ServerChange},
    http::Http,
    multipath::extensions::{self, AdmittedClient, LocalEnd, ServerNegotiation},
    registry::{AdmissionError, AdmissionRequest},
};

impl Server {
    pub(super) fn drive_http(&mut self, now: Instant, id: ConnectionHandle) {
        loop {
            let Some(peer) = self.peers.get_mut(id) else { return };
            let (Some(http), Some(connection)) = (&mut peer.http, self.endpoint.get(id)) else { return };
            if connection.unsent_replies() > MAX_UNSENT_REPLIES {
                return self.close_peer(now, id, h3::code::EXCESSIVE_LOAD, "the client takes no answers");
            }
            let event = match http.poll_event(connection, &peer.relays) {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => return self.close_peer(now, id, error.code, &error.reason),
            };
            let request = peer.request_mut().map(|request| request.id);
            match event {
                HttpEvent::Headers { stream, headers }
                    if Some(stream) != request && !peer.relays.has(stream) =>
                {
                    if self.is_unauthenticated(id, &headers) {
                        if headers.method() == Some("CONNECT") {
                            // Such a client is refused, though it does not learn it.
                            self.count_refused(401);
                        }
                        self.visit(now, id, stream, headers);
                        continue;
                    }
                    match request::classify(&headers) {
                        Ok(RequestKind::ConnectTcp) => self.connect(now, id, stream, &headers),
                        Ok(RequestKind::ConnectUdp) => self.connect_udp(now, id, stream, &headers),
                        Ok(RequestKind::ConnectMpvpn) => self.connect_mpvpn(now, id, stream, &headers),
                        Ok(RequestKind::ConnectIp) if self.config.mode == TunnelMode::RelaysOnly => {
                            self.refuse_packets(now, id, stream, &headers);
                        }
                        _ => self.request(now, id, stream, &headers),
                    }
                }
                event if stream_of_event(&event).is_some_and(|stream| peer.udp.has(stream)) => {
                    if let Some(stream) = stream_of_event(&event) {
                        self.on_udp_stream_event(now, id, stream, event);
                    }
                }
                // Events of bytes that arrived together with the request of a relay.
                event if stream_of_event(&event).is_some_and(|stream| peer.relays.has(stream)) => {
                    peer.relays.handle(event);
                }
                event if request.is_some() && stream_of_event(&event) == request => {
                    self.on_request_stream_event(now, id, event);
                }
                HttpEvent::StreamError { stream, code, .. } => self.reset_stream(id, stream, code),
                // The request was not complete. Its stream keeps its place until both halves are closed.
                HttpEvent::Reset { stream, .. } => {
                    self.reset_stream(id, stream, h3::code::REQUEST_CANCELLED);
                }
                _ => {}
            }
        }
    }

    fn request(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, headers: &Headers) {
        if let Err(refusal) = self.admit(now, id, stream, headers) {
            self.refuse(id, stream, &refusal);
        }
    }

    /// Whether a request is answered with the site: it is no CONNECT, or its credentials are missing, or
    /// those of no user and `hide_wrong_credentials` is set.
    fn is_unauthenticated(&mut self, id: ConnectionHandle, headers: &Headers) -> bool {
        if headers.method() != Some("CONNECT") {
            return true;
        }
        let shown = connect::credentials(headers);
        let shows_nothing = shown.is_none()
            && self.endpoint.get(id).and_then(|connection| connection.peer_certificate()).is_none();
        (shows_nothing || self.config.hide_wrong_credentials)
            && self.authenticate(id, shown.as_deref()).is_err_and(|refusal| refusal.status == 401)
    }

    /// Refuses CONNECT-IP at a server without packets. The response announces streams; the connection stays
    /// open for them.
    fn refuse_packets(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, headers: &Headers) {
        let authorization = connect_ip::parse_request(headers);
        let user = authorization.and_then(|authorization| self.user_of(id, authorization.as_deref()));
        let user = match user {
            Ok(user) => user,
            Err(refusal) => return self.refuse(id, stream, &refusal),
        };
        if self.authenticate_peer(now, id, &user).is_some() {
            let announces =
                self.config.offers_streams && extensions::offered_to(&self.config, headers).is_some();
            let (refusal, answer) = no_packets(announces);
            self.respond_and_end(id, stream, &refusal, &answer);
        }
    }

    pub(super) fn refuse(&mut self, id: ConnectionHandle, stream: StreamId, refusal: &Rejection) {
        self.respond_and_end(id, stream, refusal, &refusal.headers());
    }

    fn respond_and_end(
        &mut self,
        id: ConnectionHandle,
        stream: StreamId,
        refusal: &Rejection,
        answer: &Headers,
    ) {
        self.count_refused(refusal.status);
        let Some(connection) = self.endpoint.get(id) else { return };
        self.changes.push(ServerChange::Refused(refusal.status, refusal.reason.to_string()));
        connection.write(stream, h3::encode_headers(answer));
        connection.finish(stream);
        connection.stop(stream, h3::code::NO_ERROR);
    }

    /// Refuses a client that has not enabled HTTP datagrams.
    pub(super) fn require_datagrams(&self, id: ConnectionHandle) -> Result<(), Rejection> {
        let http = self.peers.get(id).and_then(|peer| peer.http.as_ref());
        match http.is_some_and(Http::datagrams_allowed) {
            true => Ok(()),
            false => {
                Err(Rejection::new(400, "the client has not enabled HTTP datagrams (SETTINGS_H3_DATAGRAM)"))
            }
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
        let authorization = connect_ip::parse_request(headers)?;
        let user = self.user_of(id, authorization.as_deref())?;
        self.require_datagrams(id)?;
        if self.peers.get(id).and_then(Peer::tunnel).is_some() {
            return Err(reject(409, "this connection has a tunnel already"));
        }
        let offered = extensions::offered_to(&self.config, headers);
        let Some(number) = extensions::number_of(offered.as_ref()) else {
            return Err(reject(400, "the number of the connection is none from 0 to 127"));
        };
        let secret = extensions::secret_of(offered.as_ref());
        let instance = extensions::instance_of(offered.as_ref());
        let limits = self.config.auth.limits(&user);
        let shard = self.shard.index();
        let admission =
            AdmissionRequest { user: &user, secret, instance, number, limits, shard, connection: id };
        let entry =
            self.registry.admit(&admission, || (self.config.new_secret)()).map_err(|error| match error {
                AdmissionError::ServerFull => reject(503, "the server is full"),
                AdmissionError::TooManySessions(count) => {
                    let reason =
                        format!("the user {user} has as many sessions as max-sessions allows: {count}");
                    Rejection::new(503, reason)
                }
                AdmissionError::UnknownSession => reject(409, "no such session to be a member of"),
                AdmissionError::TooManyClasses => {
                    Rejection::new(403, format!("too many classes: allowed are {}", limits.max_classes))
                }
            })?;
        for slot in entry.replaced {
            self.replace(now, slot);
        }
        let mut routes = BytesMut::new();
        self.routes.capsule().encode(&mut routes);
        let Some(connection) = self.endpoint.get(id) else {
            self.registry.remove(now, &entry.secret, number, entry.serial);
            return Err(reject(500, "the connection is gone"));
        };
        let mut authenticated = AuthenticatedPeer::new(now, connection, user, Some(stream));
        let mut answer = connect_ip::accept();
        authenticated.multipath.set_session(entry.session);
        let session = self.sessions.session(&entry.secret);
        session.flows = entry.flows;
        let shapers = session.shapers.clone();
        let server = ServerNegotiation {
            now,
            config: &self.config,
            connection,
            admitted: Some(AdmittedClient {
                secret: entry.secret,
                number,
                limits,
                shapers,
                networks: self.routes.networks(),
                sharing: entry.sharing,
            }),
            local: LocalEnd::new(&mut authenticated.multipath, stream, number.shard()),
            class: None,
        };
        let class = server.agree(offered.as_ref(), &mut answer);
        // The thread of the client that made the session is ready for packets.
        let downlink_ready = number == ConnectionNumber::INITIAL
            || number.shard() == 0 && class.as_ref().is_some_and(|class| class.pinned);
        connection.write(stream, h3::encode_headers(&answer));
        connection.write(stream, h3::encode_data(&routes));
        self.sessions.add(entry.secret, number, id);
        authenticated.tunnel = Some(Tunnel {
            session: entry.session,
            secret: entry.secret,
            number,
            class,
            serial: entry.serial,
            resumed: entry.addresses.is_some(),
            replaced: false,
            addresses: None,
            grant: PendingGrant::None,
            since: now,
            downlink_ready,
            takes_sites: extensions::takes_sites(offered.as_ref()),
            counted_mtu: None,
        });
        if let Some(peer) = self.peers.get_mut(id) {
            let before = peer.authenticated.replace(Box::new(authenticated));
            self.closed.extend(before.map(|before| before.closed_report()));
        }
        self.attach_account(now, id);
        if self.sites.networks().next().is_some() {
            self.send_sites(now, id);
        }
        if let Some(addresses) = entry.addresses {
            self.grant(id, addresses, &[]);
        }
        if entry.sharing == SecretSharing::Kept
            && let Some(authenticated) = self.peers.get(id).and_then(|peer| peer.authenticated.as_ref())
        {
            let address = entry.addresses.and_then(|addresses| addresses.iter().next());
            let client = ClientTag { address, ..authenticated.tag() };
            self.changes.push(ServerChange::SecretShared { client });
        }
        Ok(())
    }

    /// The user of the credentials, which are looked up for each request: access may have ended since the one
    /// before. A connection belongs to the first credentials that it shows, as it ends with them, and what it
    /// carries counts for one user; for others, the client takes another connection (421, RFC 9110 §15.5.20).
    pub(super) fn user_of(
        &mut self,
        id: ConnectionHandle,
        credentials: Option<&str>,
    ) -> Result<String, Rejection> {
        let user = self.authenticate(id, credentials)?;
        let name = user.name.clone();
        let Some(peer) = self.peers.get_mut(id) else { return Ok(name) };
        match &peer.owner {
            Some(owner) if *owner == user => {}
            Some(_) => {
                let why = "this connection belongs to other credentials: open one for these";
                return Err(Rejection::new(421, why));
            }
            None => {
                // One that is refused stays a stranger's.
                let most = self.config.auth.limits(&name).max_connections().unwrap_or(usize::MAX);
                let own = self.registry.memory_of(&name);
                let counted = own.connect(most).ok_or_else(|| {
                    let count = own.connections();
                    let reason = format!(
                        "the user {name} has {count} connections, and no more are allowed or have memory: close some"
                    );
                    Rejection::new(503, reason)
                })?;
                if let Some(peer) = self.peers.get_mut(id) {
                    peer.owner = Some(user);
                }
                self.peers.set_user(id, &name);
                if let Some(connection) = self.endpoint.get(id) {
                    connection.set_user(counted);
                }
            }
        }
        Ok(name)
    }

    fn authenticate(
        &mut self,
        id: ConnectionHandle,
        credentials: Option<&str>,
    ) -> Result<AuthenticatedUser, Rejection> {
        let certificate = self.endpoint.get(id).and_then(|connection| connection.peer_certificate());
        self.config.auth.authenticate(credentials, certificate.as_deref())
    }

    /// Whether a stream is the request stream of the tunnel.
    pub(super) fn is_tunnel(&self, id: ConnectionHandle, stream: StreamId) -> bool {
        self.peers.get(id).and_then(Peer::tunnel_stream) == Some(stream)
    }
}

/// The response of a server without packets to CONNECT-IP; `announces`: it says that it opens connections.
fn no_packets(announces: bool) -> (Rejection, Headers) {
    let refusal = Rejection::new(501, "this server carries no IP packets, only TCP and UDP by CONNECT");
    let mut answer = refusal.headers();
    if announces {
        extensions::announce_flow_requests(&mut answer);
    }
    (refusal, answer)
}

/// The stream of an event that may belong to a relay or a UDP flow.
pub(super) fn stream_of_event(event: &HttpEvent) -> Option<StreamId> {
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
    fn a_refused_connect_ip_request_announces_streams() {
        let (_, answer) = no_packets(true);
        assert_eq!((answer.status(), answer.text("mpvpn")), (Some(501), Some("v=1, streams, udp")));
        assert!(answer.text("proxy-status").unwrap().contains("no IP packets"));
        let error = connect_ip::check_response(&answer).unwrap_err();
        assert!(matches!(error, connect_ip::ResponseError::NotOffered { status: 501, .. }), "{error}");
        assert!(extensions::announces_flow_requests(&answer));
        assert!(!extensions::announces_flow_requests(&no_packets(false).1));
    }
}
