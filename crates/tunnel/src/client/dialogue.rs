//! What client and server say to each other on the request stream: settings, the request and its
//! answer, addresses and routes.

use std::collections::BTreeSet;

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_lane::rules::FlowMode;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, CapsuleError, Family, RequestedAddress},
    connect_ip::{self, ConnectIpRequest, ResponseError},
    h3::{self, Event as HttpEvent},
    headers::Headers,
    paths,
};
use mpvpn_quic::LostReason;
use mpvpn_types::Instant;

use super::{Assignment, Carries, Client, ClientError, ClientEvent, links::at_this_end};
use crate::{
    carrier::{
        Carrier, Role,
        extensions::{self, Agreed, AtClient, Ends},
    },
    events::ClientChange,
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
                HttpEvent::Settings(_) if self.config.carries == Carries::Streams => {
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
                HttpEvent::GoAway { .. } => self.changes.push(ClientChange::Stopping(self.part.class())),
                _ => {}
            }
        }
        self.check_up(now);
    }

    fn request(&mut self, now: Instant) {
        let wishes = self.wishes();
        let offers = extensions::offers(Carries::Packets, &self.config, self.part.member());
        let Some(session) = &mut self.session else { return };
        if session.request.is_some() {
            return;
        }
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        let Ok(stream) = connection.open_bi() else { return };
        let mut request = ConnectIpRequest::new(&self.config.authority, &self.config.path);
        request.authorization.clone_from(&self.authorization);
        request.session = self.secret.clone();
        request.extra = offers;
        let headers = request.headers();
        connection.write(stream, h3::encode_headers(&headers));
        let mut capsule = BytesMut::new();
        Capsule::AddressRequest(wishes).encode(&mut capsule);
        connection.write(stream, h3::encode_data(&capsule));
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        session.request = Some(stream);
        let mut carrier = Carrier::new(now, Role::Client, Some(stream), self.config.scheduler);
        carrier.set_class(self.config.class.as_ref());
        for (link, policy) in &self.policies {
            // Until the server agrees its heartbeats are those of any link.
            carrier.set_link(now, *link, at_this_end(policy, false));
        }
        for path in connection.paths().collect::<Vec<_>>() {
            carrier.path_opened(now, connection, path);
        }
        session.carrier = carrier;
    }

    /// Switches on what was offered and the server takes.
    fn agree(&mut self, now: Instant, of: Carries, headers: &Headers) {
        let Some(session) = &mut self.session else { return };
        let Some(stream) = session.request else { return };
        let client = AtClient {
            now,
            config: &self.config,
            policies: &self.policies,
            shapers: &self.shapers,
            class: self.part.class(),
            ends: Ends::at_client(&self.config, &mut session.carrier, stream),
            agreed: Agreed::default(),
        };
        session.agreed = client.agree(of, headers);
    }

    /// The server speaks HTTP/3: that is all that streams need. `asks`: the server may know more than that, and is
    /// asked; it sees the credentials then, rather than with the first stream.
    pub(super) fn begin_streams(&mut self, now: Instant, asks: bool) {
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        session.accepted = true;
        for (link, policy) in &self.policies {
            session.carrier.set_link(now, *link, at_this_end(policy, false));
        }
        if asks && let Ok(stream) = connection.open_bi() {
            let offers = extensions::offers(Carries::Streams, &self.config, self.part.member());
            let request = paths::request(&self.config.authority, self.authorization.as_deref(), offers);
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
                self.agree(now, Carries::Streams, headers);
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

    /// The addresses of before, or any (RFC 9484 §4.7.2: all zero means "no preference").
    fn wishes(&self) -> Vec<RequestedAddress> {
        let known = self.assignment.as_ref();
        let place = |place: usize| {
            let before = match place.checked_sub(1) {
                None => known.map(|known| &known.addresses),
                Some(more) => known.and_then(|known| known.more.get(more)),
            };
            [Family::V4, Family::V6].map(|family| {
                let request_id = request_id(place, family);
                let before = before.into_iter().flatten().find(|net| Family::of(net.addr()) == family);
                before.map_or(RequestedAddress::any(request_id, family), |net| RequestedAddress {
                    request_id,
                    net: IpNet::from(net.addr()),
                })
            })
        };
        (0..=self.config.more_addresses).flat_map(place).collect()
    }

    fn response(&mut self, now: Instant, headers: &Headers) {
        let error = match connect_ip::check_response(headers) {
            Ok(accepted) => {
                self.agree(now, Carries::Packets, headers);
                let Some(session) = &mut self.session else { return };
                session.accepted = true;
                let (got, asked) = (accepted.session.as_deref(), self.secret.as_deref());
                if !self.part.agreed(&session.agreed, got, asked) {
                    let reason = "the server takes no second connection of a session".to_owned();
                    return self.lost(now, &LostReason::Transport(reason));
                }
                if accepted.session.is_some() {
                    self.resumed += u32::from(accepted.session == self.secret);
                    self.secret = accepted.session;
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
            ResponseError::NotOffered { .. } if self.config.lane.mode == FlowMode::Auto => {
                let advice = "if it is a proxy for single connections, `--lane stream` uses it as one";
                self.fail(now, ClientError::Refused(format!("{error}; {advice}")));
            }
            other => self.fail(now, ClientError::Refused(other.to_string())),
        }
    }

    fn capsules(&mut self, now: Instant, data: &[u8]) {
        let Some(session) = &mut self.session else { return };
        session.capsules.push(data);
        loop {
            match session.capsules.next() {
                Ok(None) => break,
                Ok(Some(Capsule::AddressAssign(assigned))) if !session.by_flows => {
                    // Two capsules, one a family, is how some servers send what belongs together.
                    let fresh: Vec<_> = assigned.into_iter().filter(|entry| !entry.is_refusal()).collect();
                    let families = |v4| fresh.iter().any(|entry| entry.net.addr().is_ipv4() == v4);
                    if !session.up {
                        let kept =
                            session.addresses.extract_if(.., |old| !families(old.net.addr().is_ipv4()));
                        session.addresses = kept.chain(fresh.iter().copied()).collect();
                    } else {
                        session.addresses = fresh;
                    }
                }
                Ok(Some(Capsule::RouteAdvertisement(routes))) if !session.by_flows => session.routes = routes,
                Ok(Some(_)) => {}
                Err(error) => return self.malformed(now, &error),
            }
        }
        self.reassign();
    }

    /// Tells what has changed of what the server gave.
    fn reassign(&mut self) {
        if self.session.as_ref().is_some_and(|session| session.up)
            && let assignment = self.current_assignment()
            && assignment != self.assignment
            && let Some(assignment) = assignment
        {
            self.assignment = Some(assignment.clone());
            self.events.push_back(ClientEvent::Changed(assignment));
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

    fn current_assignment(&self) -> Option<Assignment> {
        let session = self.session.as_ref()?;
        // A host address with the length of the network that it is in: the kernel then knows the
        // neighbours.
        let in_network = |net: IpNet| {
            let network = session.agreed.networks.iter().find(|network| network.contains(&net.addr()));
            network.and_then(|network| IpNet::new(net.addr(), network.prefix_len()).ok()).unwrap_or(net)
        };
        let mut addresses = Vec::new();
        let mut more = vec![Vec::new(); self.config.more_addresses];
        for (place, net) in places(&session.addresses, self.config.more_addresses) {
            match place.checked_sub(1).and_then(|at| more.get_mut(at)) {
                Some(list) => list.push(net),
                None => addresses.push(in_network(net)),
            }
        }
        Some(Assignment { addresses, more, routes: session.routes.clone(), dns: session.agreed.dns.clone() })
    }

    pub(super) fn check_up(&mut self, _now: Instant) {
        let Some(session) = &mut self.session else { return };
        if session.up || !session.accepted {
            return;
        }
        if self.config.carries == Carries::Packets {
            if session.addresses.is_empty() {
                return;
            }
            let Some(mtu) = session.known_mtu() else { return };
            self.lane.set_mtu(mtu);
            self.events.push_back(ClientEvent::Mtu(mtu));
        }
        session.up = true;
        self.was_up = true;
        self.backoff.succeeded();
        let Some(assignment) = self.current_assignment() else { return };
        self.assignment = Some(assignment.clone());
        self.events.push_back(ClientEvent::Up(assignment));
        self.own.allowed(&mut self.events);
        if self.part.has_members()
            && let Some(secret) = &self.secret
        {
            let classes = self.part.knows_classes();
            self.events.push_back(ClientEvent::Members { secret: secret.clone(), classes });
        }
    }
}

/// The number of the request for the address of a family at this place: 0 for the first.
fn request_id(place: usize, family: Family) -> u64 {
    2 * place as u64 + if family == Family::V4 { 1 } else { 2 }
}

/// The places of addresses where `more` were asked for beyond the first of each family. One that answers a request has
/// the place of that, and another the next one that is left: servers name all that a session has in the same order. What
/// no place is left for goes with the first.
fn places(assigned: &[AssignedAddress], more: usize) -> Vec<(usize, IpNet)> {
    let family = |entry: &AssignedAddress| Family::of(entry.net.addr());
    let answered = |entry: &AssignedAddress| {
        (0..=more).find(|place| request_id(*place, family(entry)) == entry.request_id)
    };
    let mut taken: BTreeSet<(usize, Family)> =
        assigned.iter().filter_map(|entry| Some((answered(entry)?, family(entry)))).collect();
    let place = |entry: &AssignedAddress| {
        let place = answered(entry).unwrap_or_else(|| {
            let free = (0..=more).find(|place| !taken.contains(&(*place, family(entry))));
            taken.extend(free.map(|place| (place, family(entry))));
            free.unwrap_or(0)
        });
        (place, entry.net)
    };
    assigned.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn an_address_has_the_place_of_the_request_that_it_answers() {
        let entry = |(request_id, net): &(u64, &str)| AssignedAddress {
            request_id: *request_id,
            net: net.parse::<IpAddr>().map(IpNet::from).unwrap(),
        };
        let placed = |more, list: &[(u64, &str)]| {
            let list: Vec<_> = list.iter().map(entry).collect();
            places(&list, more).into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(
            placed(1, &[(0, "10.0.0.2"), (0, "fd00::2"), (0, "10.0.0.3"), (0, "fd00::3")]),
            [0, 0, 1, 1]
        );
        assert_eq!(placed(1, &[(3, "10.0.0.2"), (1, "10.0.0.3"), (2, "fd00::3")]), [1, 0, 0]);
        assert_eq!(placed(2, &[(0, "10.0.0.2"), (1, "10.0.0.3"), (9, "10.0.0.4")]), [1, 0, 2]);
        assert_eq!(placed(0, &[(1, "10.0.0.2"), (0, "10.0.0.3"), (7, "fd00::3")]), [0, 0, 0]);
        assert_eq!(placed(1, &[(0, "fd00::1"), (0, "10.0.0.2"), (0, "fd00::2")]), [0, 0, 1]);
    }
}
