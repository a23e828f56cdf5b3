//! Connections without packets: their paths are watched as soon as something was granted, and what both ends know beyond
//! that is agreed on by a request of its own ([`mpvpn_masque::paths`]).

use mpvpn_masque::{connect_ip, connect_mpvpn, h3, headers::Headers, request::Rejection};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{
    Server,
    peer::{Granted, Peer},
};
use crate::{
    ConnectionNumber,
    multipath::extensions::{LocalEnd, ServerNegotiation},
};

impl Server {
    /// A client without packets wants to agree on how paths are used.
    pub(super) fn paths_request(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
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
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let credentials = connect_mpvpn::parse_request(headers)?;
        let user = self.user_of(id, credentials.as_deref())?;
        self.takes_datagrams(id)?;
        let Some(peer) = self.peers.get(id) else { return Ok(()) };
        if peer.granted.as_ref().is_some_and(|granted| granted.request.is_some()) {
            return Err(Rejection::new(409, "how paths are used was agreed on already"));
        }
        let Some(connection) = self.endpoint.get(id) else { return Ok(()) };
        let mut granted = Granted::new(now, connection, user, Some(stream));
        let mut answer = connect_ip::accept(None);
        let local = LocalEnd::at_server(&mut granted.multipath, stream, ConnectionNumber::INITIAL);
        ServerNegotiation { now, config: &self.config, connection, admitted: None, local, class: None }
            .agree(headers, &mut answer);
        connection.write(stream, h3::encode_headers(&answer));
        if let Some(peer) = self.peers.get_mut(id) {
            if let Some(before) = &peer.granted {
                granted.multipath.continue_counters_from(&before.multipath);
            }
            peer.granted = Some(Box::new(granted));
        }
        Ok(())
    }

    /// A client that was granted something: its paths are watched, if they are not yet.
    pub(super) fn watched(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        user: &str,
    ) -> Option<(&mut Peer, &mut Connection)> {
        let (peer, connection) = (self.peers.get_mut(id)?, self.endpoint.get(id)?);
        if peer.granted.is_none() {
            peer.granted = Some(Box::new(Granted::new(now, connection, user.to_owned(), None)));
        }
        Some((peer, connection))
    }
}
