//! The HTTP/3 requests of a client: CONNECT-IP, or `connect-mpvpn` without packets.
//!
//! In: HTTP/3 events. Out: requests, the negotiated extensions, addresses and routes; the tunnel is up when
//! all of these are known. Always holds: one request for a tunnel a connection.

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

use super::{Client, ClientError, ClientEvent, TunnelMode, addresses, in_use, join::Membership};
use crate::{
    SecretSharing,
    events::ClientChange,
    multipath::{
        MultipathConnection, Role,
        extensions::{ClientNegotiation, ClientOffer, LocalEnd, NegotiatedExtensions},
    },
};

impl Client {
    pub(super) fn drive_http(&mut self, now: Instant) {
        loop {
            let Some(session) = &mut self.session else { return };
            let Some(connection) = self.endpoint.get(session.connection) else { break };
            let event = match session.http.poll_event(connection, &session.relays) {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(error) => return self.close_on_h3_error(now, &error),
            };
            match event {
                HttpEvent::Settings(_) if self.config.mode == TunnelMode::RelaysOnly => {
                    let has_extensions = session.http.masque_allowed();
                    self.start_without_packets(now, has_extensions);
                }
                HttpEvent::Settings(_) => {
                    if !session.http.masque_allowed() && self.may_run_per_flow(None) {
                        self.run_per_flow(now, false);
                        continue;
                    }
                    let Some(session) = &self.session else { return };
                    if !session.http.extended_connect_allowed() {
                        return self.fail(now, ClientError::Unsupported("extended CONNECT (RFC 9220)"));
                    }
                    if !session.http.datagrams_allowed() {
                        return self.fail(now, ClientError::Unsupported("HTTP datagrams (RFC 9297)"));
                    }
                    self.send_request(now);
                }
                HttpEvent::Headers { stream, .. }
                | HttpEvent::Data { stream, .. }
                | HttpEvent::Finished { stream }
                | HttpEvent::Reset { stream, .. }
                | HttpEvent::StreamError { stream, .. }
                    if session.udp.flows.has(stream) =>
                {
                    self.on_udp_stream_event(now, stream, event);
                }
                HttpEvent::Headers { stream, headers } if Some(stream) == session.request => {
                    self.on_response(now, &headers);
                }
                HttpEvent::Headers { stream, headers } if Some(stream) == session.mpvpn_request => {
                    self.on_mpvpn_response(now, &headers);
                }
                HttpEvent::Data { stream, data } if Some(stream) == session.request => {
                    self.on_capsules(now, &data);
                }
                HttpEvent::Finished { stream } if Some(stream) == session.request => {
                    match session.capsules.finish() {
                        Ok(()) => self.on_tunnel_lost(now, "the server has ended the tunnel".to_owned()),
                        Err(error) => self.on_malformed_capsule(now, &error),
                    }
                }
                HttpEvent::Reset { stream, code } if Some(stream) == session.request => {
                    self.on_tunnel_lost(
                        now,
                        format!("the server has reset the tunnel (HTTP/3 error {code:#x})"),
                    );
                }
                HttpEvent::StreamError { stream, code, reason } => {
                    if let Some(connection) = self.endpoint.get(session.connection) {
                        connection.reset(stream, code);
                        connection.stop(stream, code);
                    }
                    session.http.forget(stream);
                    let reason = format!("the server sent a malformed answer: {reason}");
                    if Some(stream) == session.request {
                        self.on_tunnel_lost(now, reason);
                    } else {
                        tracing::warn!(stream, code, reason);
                    }
                }
                HttpEvent::GoAway { .. } => {
                    self.reports.changes.push(ClientChange::Stopping(self.membership.role.class()))
                }
                _ => {}
            }
        }
        self.check_up();
    }

    fn send_request(&mut self, now: Instant) {
        let addresses = addresses::requested_addresses(
            self.reports.assignment.as_ref().or(self.membership.wanted.as_ref()),
            self.config.additional_addresses,
        );
        let offered = self.offered_extensions(TunnelMode::Packets);
        let Some(session) = &mut self.session else { return };
        if session.request.is_some() {
            return;
        }
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        let Ok(stream) = connection.open_bi() else { return };
        let mut request = ConnectIpRequest::new(&self.config.authority, &self.config.path);
        request.authorization.clone_from(&self.authorization);
        request.extensions = Some(offered);
        let headers = request.headers();
        connection.write(stream, h3::encode_headers(&headers));
        let mut capsule = BytesMut::new();
        Capsule::AddressRequest(addresses).encode(&mut capsule);
        connection.write(stream, h3::encode_data(&capsule));
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.request = Some(stream);
        let mut multipath = MultipathConnection::new(now, Role::Client, Some(stream), self.config.scheduler);
        multipath.set_class(self.config.class.as_ref());
        multipath.mtu.continue_from(self.mtu);
        multipath.echo_watch = self.echo_watch.clone();
        // Until the server agrees, all links count as not metered.
        self.links.apply_policies(now, &mut multipath, false);
        for path in connection.paths().collect::<Vec<_>>() {
            multipath.path_opened(now, connection, path);
        }
        self.links.apply_carriers(now, &mut multipath);
        session.multipath = multipath;
        session.notices_due = true;
    }

    /// The value of the field `mpvpn` for a request.
    fn offered_extensions(&self, of: TunnelMode) -> String {
        let Membership { role, secret, .. } = &self.membership;
        ClientOffer { config: &self.config, number: role.number(), secret: secret.as_deref() }.field(of)
    }

    /// Enables the extensions that were offered and that the response accepts.
    fn apply_extensions(&mut self, now: Instant, of: TunnelMode, headers: &Headers) {
        let Some(session) = &mut self.session else { return };
        let Some(stream) = session.request else { return };
        let client = ClientNegotiation {
            now,
            config: &self.config,
            links: &self.links,
            shapers: &self.membership.shapers,
            class: self.membership.role.class(),
            local: LocalEnd::new(&mut session.multipath, stream, 0),
            agreed: NegotiatedExtensions::default(),
        };
        let agreed = client.agree(of, headers);
        session.set_agreed(agreed);
    }

    /// Starts a tunnel without packets: relays need no more than HTTP/3. `has_extensions`: sends a
    /// `connect-mpvpn` request, which also shows the credentials before the first relay.
    pub(super) fn start_without_packets(&mut self, now: Instant, has_extensions: bool) {
        let offered = has_extensions.then(|| self.offered_extensions(TunnelMode::RelaysOnly));
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.accepted = true;
        self.links.apply_policies(now, &mut session.multipath, false);
        if offered.is_some()
            && let Ok(stream) = connection.open_bi()
        {
            let request =
                connect_mpvpn::request(&self.config.authority, self.authorization.as_deref(), offered);
            connection.write(stream, h3::encode_headers(&request));
            session.mpvpn_request = Some(stream);
        }
    }

    /// Handles the response to `connect-mpvpn`. Servers without it may respond with any status; only refused
    /// credentials are an error.
    fn on_mpvpn_response(&mut self, now: Instant, headers: &Headers) {
        let Some(session) = &mut self.session else { return };
        let Some(stream) = session.mpvpn_request.take() else { return };
        match connect_ip::check_response(headers) {
            Ok(()) => {
                session.request = Some(stream);
                self.apply_extensions(now, TunnelMode::RelaysOnly, headers);
                self.reassign();
            }
            Err(ResponseError::Unauthorized { status, detail }) => {
                self.unauthorized(now, status, detail);
            }
            Err(ResponseError::Forbidden { detail }) if !detail.text().is_empty() => {
                self.refused(now, detail.text().to_owned());
            }
            Err(error) => {
                tracing::debug!(%error, "the server does not support connect-mpvpn");
                if let Some(connection) = self.endpoint.get(session.connection) {
                    connection.finish(stream);
                }
            }
        }
    }

    fn on_response(&mut self, now: Instant, headers: &Headers) {
        let error = match connect_ip::check_response(headers) {
            Ok(()) => {
                self.apply_extensions(now, TunnelMode::Packets, headers);
                let Some(session) = &mut self.session else { return };
                session.accepted = true;
                let sharing = session.agreed.sharing;
                match self.membership.accepted(&session.agreed) {
                    Some(resumed) => {
                        self.reports.resumed += u32::from(resumed);
                        if sharing != SecretSharing::Alone {
                            self.reports.sharing = sharing;
                            self.reports.changes.push(ClientChange::SecretShared(sharing));
                        }
                        if !self.announced.is_empty() {
                            self.send_announcement();
                        }
                    }
                    None => {
                        let reason = "the server lets no further connection join the session".to_owned();
                        self.on_lost(now, &LostReason::Transport(reason));
                    }
                }
                return;
            }
            Err(error) => error,
        };
        if self.may_run_per_flow(Some((&error, headers))) {
            return self.run_per_flow(now, true);
        }
        match error {
            // A server error may be temporary (RFC 9110 §15.6).
            ResponseError::Busy { .. } | ResponseError::Refused { status: 500 | 502 | 504, .. } => {
                self.on_tunnel_lost(now, error.to_string());
                self.reports.refused_at = Some(now);
            }
            ResponseError::Forbidden { detail }
                if !detail.text().is_empty() && !self.membership.role.is_joined() =>
            {
                self.refused(now, detail.text().to_owned());
            }
            ResponseError::Unauthorized { status, detail } => {
                let error = self.refusal_of_credentials(status, detail);
                self.fail(now, error);
            }
            ResponseError::NotOffered { .. } if self.authorization.is_none() => {
                let advice = "a server that requires a token or a certificate answers like this without one: set it with `--token`, \
                     or with `--cert` and `--key`";
                self.fail(now, ClientError::Refused(format!("{error}; {advice}")));
            }
            ResponseError::NotOffered { .. } if self.config.flow_rules.mode == FlowMode::Auto => {
                let advice = "if the server is a proxy for single connections, use `--lane stream`";
                self.fail(now, ClientError::Refused(format!("{error}; {advice}")));
            }
            other => self.fail(now, ClientError::Refused(other.to_string())),
        }
    }

    fn on_capsules(&mut self, now: Instant, data: &[u8]) {
        let Some(session) = &mut self.session else { return };
        match session.take_capsules(data, &self.config.addresses_in_use) {
            Ok(()) => {
                self.request_other_addresses(now);
                self.reassign();
            }
            Err(error) => self.on_malformed_capsule(now, &error),
        }
    }

    /// Reports an assignment that changed.
    fn reassign(&mut self) {
        if let Some(session) = self.session.as_ref().filter(|session| session.up) {
            self.reports.reassign(session.assignment(self.config.additional_addresses));
        }
    }

    fn on_malformed_capsule(&mut self, now: Instant, error: &CapsuleError) {
        let reason = format!("the server sent a malformed capsule: {error}");
        if let Some(session) = &self.session
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            connection.close(now, error.code(), &reason);
        }
        self.on_tunnel_lost(now, reason);
    }

    /// The tunnel is lost, though the QUIC connection may work.
    pub(super) fn on_tunnel_lost(&mut self, now: Instant, reason: String) {
        self.on_lost(now, &LostReason::Transport(reason));
    }

    /// The TUN gets another MTU (bytes).
    pub(super) fn set_mtu(&mut self, mtu: usize) {
        self.mtu = Some(mtu);
        self.apps.tcp.split_tcp.set_mtu(mtu);
        self.reports.events.push_back(ClientEvent::Mtu(mtu));
    }

    pub(super) fn check_up(&mut self) {
        let Some(session) = &mut self.session else { return };
        // A client that was refused waits for the answer before its relays do.
        let awaits_answer = session.mpvpn_request.is_some() && self.reports.refused_at.is_some();
        if session.up || !session.accepted || awaits_answer {
            return;
        }
        if self.config.mode == TunnelMode::Packets {
            if session.addresses.is_empty() {
                return;
            }
            let Some(mtu) = session.known_mtu() else { return };
            self.set_mtu(mtu);
        }
        let Some(session) = &mut self.session else { return };
        session.up = true;
        self.was_up = true;
        self.connector.backoff.succeeded();
        self.reports.up(session.assignment(self.config.additional_addresses));
        self.edge_relays.notify_if_waiting(&mut self.reports.events);
        if self.membership.role.allows_joins()
            && let Some(secret) = &self.membership.secret
        {
            let classes = self.membership.role.allows_class_joins();
            self.reports
                .events
                .push_back(ClientEvent::JoinsAllowed { secret: secret.clone(), other_classes: classes });
        }
    }
}
