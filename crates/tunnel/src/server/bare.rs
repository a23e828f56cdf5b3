//! Connections without packets: their paths are watched as soon as something was granted, and what both ends know beyond
//! that is agreed on by a request of its own ([`mpvpn_masque::paths`]).

use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader},
    connect_ip,
    h3::{self, Event as HttpEvent},
    headers::Headers,
    paths,
    request::Rejection,
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, ConnectionId, StreamId};
use mpvpn_types::{Instant, PathId};

use super::{
    Peer, Server,
    dialogue::{agree_cc, scheduler_of, stream_of},
};
use crate::{
    carrier::{Carrier, Role},
    http::Http,
};

/// What watches and uses the paths of a connection without packets.
#[derive(Debug)]
pub(super) struct Bare {
    /// Whose connection it is.
    pub(super) user: String,
    pub(super) carrier: Carrier,
    /// The stream on which the two ends agreed on more than the RFCs say, and what comes there.
    agreed: Option<(StreamId, CapsuleReader)>,
}

impl Bare {
    fn new(
        now: Instant,
        connection: &Connection,
        user: String,
        stream: Option<StreamId>,
        scheduler: Scheduler,
    ) -> Self {
        let mut carrier = Carrier::new(now, Role::Server, stream, scheduler);
        for path in connection.paths().collect::<Vec<PathId>>() {
            carrier.path_opened(now, connection, path);
        }
        Self { user, carrier, agreed: None }
    }

    /// Whether an event is one of the stream on which was agreed.
    pub(super) fn concerns(&self, event: &HttpEvent) -> bool {
        self.agreed.as_ref().is_some_and(|(own, _)| stream_of(event) == Some(*own))
    }

    /// Takes what the client says on that stream. With its end everything that was agreed on there ends.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        http: &mut Http,
        event: HttpEvent,
    ) {
        let Some((stream, capsules)) = &mut self.agreed else { return };
        let stream = *stream;
        match event {
            HttpEvent::Data { data, .. } => {
                capsules.push(&data);
                loop {
                    match capsules.next() {
                        Ok(None) => return,
                        Ok(Some(Capsule::Link(notice))) => {
                            self.carrier.set_path(now, notice);
                        }
                        Ok(Some(_)) => {}
                        Err(error) => {
                            tracing::info!(%error, "a client sent a malformed capsule");
                            connection.reset(stream, h3::code::MESSAGE_ERROR);
                            connection.stop(stream, h3::code::MESSAGE_ERROR);
                            break;
                        }
                    }
                }
            }
            HttpEvent::Finished { .. } => connection.finish(stream),
            HttpEvent::Reset { .. } => connection.reset(stream, h3::code::REQUEST_CANCELLED),
            HttpEvent::StreamError { code, .. } => {
                connection.reset(stream, code);
                connection.stop(stream, code);
            }
            _ => return,
        }
        http.forget(stream);
        let user = std::mem::take(&mut self.user);
        let before = std::mem::replace(self, Self::new(now, connection, user, None, Scheduler::default()));
        self.carrier.count_on(&before.carrier);
    }
}

impl Server {
    /// A client without packets wants to agree on how paths are used.
    pub(super) fn paths_request(
        &mut self,
        now: Instant,
        id: ConnectionId,
        stream: StreamId,
        headers: &Headers,
    ) {
        if let Err(refusal) = self.try_agree(now, id, stream, headers) {
            self.refuse(id, stream, &refusal);
        }
    }

    fn try_agree(
        &mut self,
        now: Instant,
        id: ConnectionId,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let credentials = paths::parse_request(headers)?;
        let user = self.user_of(id, credentials.as_deref())?;
        self.takes_datagrams(id)?;
        let Some(peer) = self.peers.get(id) else { return Ok(()) };
        let agreed = peer.bare.as_ref().is_some_and(|bare| bare.agreed.is_some());
        if agreed || peer.tunnel.is_some() {
            return Err(Rejection::new(409, "how paths are used was agreed on already"));
        }
        let Some(connection) = self.endpoint.get(id) else { return Ok(()) };
        let mut bare = Bare::new(now, connection, user, Some(stream), scheduler_of(headers));
        bare.agreed = Some((stream, CapsuleReader::new()));
        let mut answer = connect_ip::accept(None);
        self.agree(headers, stream, None, &mut bare.carrier, &mut answer);
        if let Some(connection) = self.endpoint.get(id) {
            agree_cc(headers, None, connection, &mut answer);
            connection.write(stream, h3::encode_headers(&answer));
        }
        if let Some(peer) = self.peers.get_mut(id) {
            if let Some(before) = &peer.bare {
                bare.carrier.count_on(&before.carrier);
            }
            peer.bare = Some(Box::new(bare));
        }
        Ok(())
    }

    /// A client that was granted something: its paths are watched, if they are not yet.
    pub(super) fn watched(
        &mut self,
        now: Instant,
        id: ConnectionId,
        user: &str,
    ) -> Option<(&mut Peer, &mut Connection)> {
        let (peer, connection) = (self.peers.get_mut(id)?, self.endpoint.get(id)?);
        if peer.carrier().is_none() {
            peer.bare =
                Some(Box::new(Bare::new(now, connection, user.to_owned(), None, Scheduler::default())));
        }
        Some((peer, connection))
    }
}
