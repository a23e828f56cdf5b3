//! What client and server say to each other on the request stream: settings, the request and its
//! answer, addresses and routes.

use bytes::BytesMut;
use mpvpn_flow::rules::FlowMode;
use mpvpn_masque::{
    capsule::{Capsule, CapsuleError},
    connect_ip::{self, ConnectIpRequest, ResponseError},
    connect_mpvpn,
    h3::{self, Event as HttpEvent},
    headers::Headers,
};
use mpvpn_quic::LostReason;
use mpvpn_types::Instant;

use super::{Client, ClientError, ClientEvent, TunnelMode, addresses, in_use};
use crate::{
    events::ClientChange,
    multipath::{
        MultipathConnection, Role,
        extensions::{self, ClientNegotiation, LocalEnd, NegotiatedExtensions},
    },
};

impl Client {
    pub(super) fn drive_http(&mut self, now: Instant) {
        loop {
            let Some(session) = &mut self.session else { return };
            let Some(connection) = self.endpoint.get(session.connection) else { break };
            let event = match session.http.next(connection, &session.relays) {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(error) => return self.broken(now, &error),
            };
            match event {
                HttpEvent::Settings(_) if self.config.mode == TunnelMode::RelaysOnly => {
                    let asks = session.http.masque_allowed();
                    self.begin_streams(now, asks);
                }
                HttpEvent::Settings(_) => {
                    if !session.http.masque_allowed() && self.may_go_by_flows(None) {
                        self.go_by_flows(now, false);
                        continue;
                    }
                    let Some(session) = &self.session else { return };
                    if !session.http.extended_connect_allowed() {
                        return self.fail(now, ClientError::Unsupported("extended CONNECT (RFC 9220)"));
                    }
                    if !session.http.datagrams_allowed() {
                        return self.fail(now, ClientError::Unsupported("HTTP datagrams (RFC 9297)"));
                    }
                    self.request(now);
                }
                HttpEvent::Headers { stream, .. }
                | HttpEvent::Data { stream, .. }
                | HttpEvent::Finished { stream }
                | HttpEvent::Reset { stream, .. }
                | HttpEvent::StreamError { stream, .. }
                    if session.udp.flows.has(stream) =>
                {
                    self.udp_said(now, stream, event);
                }
                HttpEvent::Headers { stream, headers } if Some(stream) == session.request => {
                    self.response(now, &headers);
                }
                HttpEvent::Headers { stream, headers } if Some(stream) == session.asked => {
                    self.paths_response(now, &headers);
                }
                HttpEvent::Data { stream, data } if Some(stream) == session.request => {
                    self.capsules(now, &data);
                }
                HttpEvent::Finished { stream } if Some(stream) == session.request => {
                    match session.capsules.finish() {
                        Ok(()) => self.gone(now, "the server has ended the tunnel".to_owned()),
                        Err(error) => self.malformed(now, &error),
                    }
                }
                HttpEvent::Reset { stream, code } if Some(stream) == session.request => {
                    self.gone(now, format!("the server has reset the tunnel (HTTP/3 error {code:#x})"));
                }
                HttpEvent::StreamError { stream, code, reason } => {
                    if let Some(connection) = self.endpoint.get(session.connection) {
                        connection.reset(stream, code);
                        connection.stop(stream, code);
                    }
                    session.http.forget(stream);
                    let reason = format!("the server sent a malformed answer: {reason}");
                    if Some(stream) == session.request {
                        self.gone(now, reason);
                    } else {
                        tracing::warn!(stream, code, reason);
                    }
                }
                HttpEvent::GoAway { .. } => {
                    self.reports.changes.push(ClientChange::Stopping(self.membership.part.class()))
                }
                _ => {}
            }
        }
        self.check_up();
    }

    fn request(&mut self, now: Instant) {
        let wishes = addresses::wishes(self.reports.assignment.as_ref(), self.config.additional_addresses);
        let offers =
            extensions::request_fields(TunnelMode::Packets, &self.config, self.membership.part.member());
        let Some(session) = &mut self.session else { return };
        if session.request.is_some() {
            return;
        }
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        let Ok(stream) = connection.open_bi() else { return };
        let mut request = ConnectIpRequest::new(&self.config.authority, &self.config.path);
        request.authorization.clone_from(&self.authorization);
        request.session = self.membership.secret.clone();
        request.extra = offers;
        let headers = request.headers();
        connection.write(stream, h3::encode_headers(&headers));
        let mut capsule = BytesMut::new();
        Capsule::AddressRequest(wishes).encode(&mut capsule);
        connection.write(stream, h3::encode_data(&capsule));
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.request = Some(stream);
        let mut multipath = MultipathConnection::new(now, Role::Client, Some(stream), self.config.scheduler);
        multipath.set_class(self.config.class.as_ref());
        // Until the server agrees its heartbeats are those of any link.
        self.links.apply_policies(now, &mut multipath, false);
        for path in connection.paths().collect::<Vec<_>>() {
            multipath.path_opened(now, connection, path);
        }
        session.multipath = multipath;
    }

    /// Switches on what was offered and the server takes.
    fn agree(&mut self, now: Instant, of: TunnelMode, headers: &Headers) {
        let Some(session) = &mut self.session else { return };
        let Some(stream) = session.request else { return };
        let client = ClientNegotiation {
            now,
            config: &self.config,
            links: &self.links,
            shapers: &self.membership.shapers,
            class: self.membership.part.class(),
            local: LocalEnd::at_client(&self.config, &mut session.multipath, stream),
            agreed: NegotiatedExtensions::default(),
        };
        session.agreed = client.agree(of, headers);
    }

    /// The server speaks HTTP/3: that is all that streams need. `asks`: the server may know more than that, and is
    /// asked; it sees the credentials then, rather than with the first stream.
    pub(super) fn begin_streams(&mut self, now: Instant, asks: bool) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.accepted = true;
        self.links.apply_policies(now, &mut session.multipath, false);
        if asks && let Ok(stream) = connection.open_bi() {
            let offers = extensions::request_fields(
                TunnelMode::RelaysOnly,
                &self.config,
                self.membership.part.member(),
            );
            let request =
                connect_mpvpn::request(&self.config.authority, self.authorization.as_deref(), offers);
            connection.write(stream, h3::encode_headers(&request));
            session.asked = Some(stream);
        }
    }

    /// A server that does not know what it was asked for may answer what it likes, unless it refuses the credentials.
    fn paths_response(&mut self, now: Instant, headers: &Headers) {
        let Some(session) = &mut self.session else { return };
        let Some(stream) = session.asked.take() else { return };
        match connect_ip::check_response(headers) {
            Ok(_) => {
                session.request = Some(stream);
                self.agree(now, TunnelMode::RelaysOnly, headers);
                self.reassign();
            }
            Err(ResponseError::Unauthorized { status, .. }) => self.unauthorized(now, status),
            Err(error) => {
                tracing::debug!(%error, "the server is none of ours");
                if let Some(connection) = self.endpoint.get(session.connection) {
                    connection.finish(stream);
                }
            }
        }
    }

    fn response(&mut self, now: Instant, headers: &Headers) {
        let error = match connect_ip::check_response(headers) {
            Ok(accepted) => {
                self.agree(now, TunnelMode::Packets, headers);
                let Some(session) = &mut self.session else { return };
                session.accepted = true;
                match self.membership.accepted(&session.agreed, accepted.session) {
                    Some(resumed) => self.reports.resumed += u32::from(resumed),
                    None => {
                        let reason = "the server takes no second connection of a session".to_owned();
                        self.lost(now, &LostReason::Transport(reason));
                    }
                }
                return;
            }
            Err(error) => error,
        };
        if self.may_go_by_flows(Some((&error, headers))) {
            return self.go_by_flows(now, true);
        }
        match error {
            // What a server cannot do now, it may be able to do later (RFC 9110 §15.6).
            ResponseError::Busy { .. } | ResponseError::Refused { status: 500 | 502 | 504, .. } => {
                self.gone(now, error.to_string());
            }
            ResponseError::Unauthorized { status, .. } => self.fail(now, ClientError::Unauthorized(status)),
            ResponseError::NotOffered { .. } if self.authorization.is_none() => {
                let advice = "one that wants a token answers like this to who has none: `--token` gives it";
                self.fail(now, ClientError::Refused(format!("{error}; {advice}")));
            }
            ResponseError::NotOffered { .. } if self.config.flow_rules.mode == FlowMode::Auto => {
                let advice = "if it is a proxy for single connections, `--lane stream` uses it as one";
                self.fail(now, ClientError::Refused(format!("{error}; {advice}")));
            }
            other => self.fail(now, ClientError::Refused(other.to_string())),
        }
    }

    fn capsules(&mut self, now: Instant, data: &[u8]) {
        let Some(session) = &mut self.session else { return };
        match session.take_capsules(data) {
            Ok(()) => self.reassign(),
            Err(error) => self.malformed(now, &error),
        }
    }

    /// Tells what has changed of what the server gave.
    fn reassign(&mut self) {
        if let Some(session) = self.session.as_ref().filter(|session| session.up) {
            self.reports.reassign(addresses::assignment(session, self.config.additional_addresses));
        }
    }

    fn malformed(&mut self, now: Instant, error: &CapsuleError) {
        let reason = format!("the server sent a malformed capsule: {error}");
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            connection.close(now, error.code(), &reason);
        }
        self.gone(now, reason);
    }

    /// The tunnel is lost, though the connection may stand.
    pub(super) fn gone(&mut self, now: Instant, reason: String) {
        self.lost(now, &LostReason::Transport(reason));
    }

    pub(super) fn check_up(&mut self) {
        let Some(session) = &mut self.session else { return };
        if session.up || !session.accepted {
            return;
        }
        if self.config.mode == TunnelMode::Packets {
            if session.addresses.is_empty() {
                return;
            }
            let Some(mtu) = session.known_mtu() else { return };
            self.apps.lane.set_mtu(mtu);
            self.reports.events.push_back(ClientEvent::Mtu(mtu));
        }
        session.up = true;
        self.was_up = true;
        self.connector.backoff.succeeded();
        self.reports.up(addresses::assignment(session, self.config.additional_addresses));
        self.own.allowed(&mut self.reports.events);
        if self.membership.part.has_members()
            && let Some(secret) = &self.membership.secret
        {
            let classes = self.membership.part.knows_classes();
            self.reports
                .events
                .push_back(ClientEvent::JoinsAllowed { secret: secret.clone(), other_classes: classes });
        }
    }
}
