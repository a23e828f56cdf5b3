//! Connections without packets: their paths are watched as soon as something was granted, and what both ends know beyond
//! that is agreed on by a request of its own ([`mpvpn_masque::paths`]).

use mpvpn_masque::{connect_ip, h3, headers::Headers, paths, request::Rejection};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, ConnectionId, StreamId};
use mpvpn_types::{Instant, PathId};

use super::{Peer, Server, capsules::RequestStream};
use crate::{
    Member,
    carrier::{
        Carrier, Role,
        extensions::{AtServer, Ends},
    },
};

/// What watches and uses the paths of a connection without packets.
#[derive(Debug)]
pub(super) struct Bare {
    /// Whose connection it is.
    pub(super) user: String,
    pub(super) carrier: Carrier,
    /// The stream on which the two ends agreed on more than the RFCs say.
    pub(super) request: Option<RequestStream>,
}

impl Bare {
    fn new(now: Instant, connection: &Connection, user: String, stream: Option<StreamId>) -> Self {
        let mut carrier = Carrier::new(now, Role::Server, stream, Scheduler::default());
        for path in connection.paths().collect::<Vec<PathId>>() {
            carrier.path_opened(now, connection, path);
        }
        Self { user, carrier, request: stream.map(RequestStream::new) }
    }

    /// Forgets what was agreed on.
    pub(super) fn restart(&mut self, now: Instant, connection: &Connection) {
        let user = std::mem::take(&mut self.user);
        let before = std::mem::replace(self, Self::new(now, connection, user, None));
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
        let agreed = peer.bare.as_ref().is_some_and(|bare| bare.request.is_some());
        if agreed || peer.tunnel.is_some() {
            return Err(Rejection::new(409, "how paths are used was agreed on already"));
        }
        let Some(connection) = self.endpoint.get(id) else { return Ok(()) };
        let mut bare = Bare::new(now, connection, user, Some(stream));
        let mut answer = connect_ip::accept(None);
        let ends = Ends::at_server(&mut bare.carrier, stream, Member::HOME);
        AtServer { now, config: &self.config, connection, admitted: None, ends, class: None }
            .agree(headers, &mut answer);
        connection.write(stream, h3::encode_headers(&answer));
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
            peer.bare = Some(Box::new(Bare::new(now, connection, user.to_owned(), None)));
        }
        Some((peer, connection))
    }
}
