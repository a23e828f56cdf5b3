//! Connections without packets: their paths are managed once a request is authenticated, and extensions are
//! negotiated by a request for nothing else ([`mpvpn_masque::connect_mpvpn`]).

use mpvpn_masque::{connect_ip, connect_mpvpn, h3, headers::Headers, request::Rejection};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{
    Server,
    peer::{AuthenticatedPeer, Peer},
};
use crate::multipath::extensions::{self, LocalEnd, ServerNegotiation};

impl Server {
    /// Handles a `connect-mpvpn` request: a client without packets negotiates extensions.
    pub(super) fn connect_mpvpn(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) {
        if let Err(refusal) = self.try_connect_mpvpn(now, id, stream, headers) {
            self.refuse(id, stream, &refusal);
        }
    }

    fn try_connect_mpvpn(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) -> Result<(), Rejection> {
        let credentials = connect_mpvpn::parse_request(headers)?;
        let user = self.user_of(id, credentials.as_deref())?;
        self.require_datagrams(id)?;
        let Some(peer) = self.peers.get(id) else { return Ok(()) };
        if peer.authenticated.as_ref().is_some_and(|authenticated| authenticated.request.is_some()) {
            return Err(Rejection::new(409, "this connection has negotiated its extensions already"));
        }
        let Some(connection) = self.endpoint.get(id) else { return Ok(()) };
        let mut authenticated = AuthenticatedPeer::new(now, connection, user, Some(stream));
        let mut answer = connect_ip::accept();
        let offered = extensions::offered_to(&self.config, headers);
        let local = LocalEnd::new(&mut authenticated.multipath, stream, 0);
        ServerNegotiation { now, config: &self.config, connection, admitted: None, local, class: None }
            .agree(offered.as_ref(), &mut answer);
        connection.write(stream, h3::encode_headers(&answer));
        if let Some(peer) = self.peers.get_mut(id) {
            if let Some(before) = &peer.authenticated {
                authenticated.multipath.traffic.continue_from(&before.multipath.traffic);
            }
            peer.authenticated = Some(Box::new(authenticated));
        }
        self.attach_account(now, id);
        Ok(())
    }

    /// Marks a connection as authenticated by its user: its paths are managed from now on. `None` if it is
    /// gone.
    pub(super) fn authenticate_peer(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        user: &str,
    ) -> Option<(&mut Peer, &mut Connection)> {
        let (peer, connection) = self.peers.get_mut(id).zip(self.endpoint.get(id))?;
        if peer.authenticated.is_none() {
            peer.authenticated =
                Some(Box::new(AuthenticatedPeer::new(now, connection, user.to_owned(), None)));
            self.attach_account(now, id);
        }
        self.peers.get_mut(id).zip(self.endpoint.get(id))
    }
}
