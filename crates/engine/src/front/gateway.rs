//! What clients ask for over TCP that is not this server's own QUIC.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{Request, Response};
use hyper::body::Incoming;
use mpvpn_control::identity::Fingerprint;
use mpvpn_masque::request::Rejection;

use super::{Body, fields::response_of, plain};

/// The way to the server's own HTTP/3, for all connections that came to one address.
#[derive(Debug)]
pub(super) struct Gateway;

impl Gateway {
    /// `quic` is where the server's QUIC is reached on this machine, `pin` its certificate's.
    pub(super) fn new(_quic: SocketAddr, _pin: Fingerprint) -> Arc<Self> {
        Arc::new(Self)
    }

    /// That of one connection, from `peer`.
    pub(super) fn guest(self: &Arc<Self>, _peer: SocketAddr) -> Guest {
        Guest
    }
}

/// One connection of a client.
#[derive(Debug)]
pub(super) struct Guest;

impl Guest {
    /// Answers a request of HTTP/2, of a client whose credentials are good.
    pub(super) async fn h2(&self, _request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        // A client that is gone misses nothing.
        let _ = respond.send_response(response_of(&not_offered().headers()), true);
    }

    /// Answers a request of HTTP/1.1, of a client whose credentials are good.
    pub(super) async fn h1(&self, _request: Request<Incoming>) -> Response<Body> {
        response_of(&not_offered().headers()).map(|()| plain(""))
    }
}

fn not_offered() -> Rejection {
    Rejection::new(501, "over TCP there is only the way to this server's own QUIC")
}
