//! The HTTPS server without TLS and without a listening socket, for fuzzers.
//!
//! In: the bytes that a client sends inside TLS. Out: the bytes that it gets. Requests of users go to a UDP
//! socket in place of the server's QUIC.

use std::{net::SocketAddr, os::unix::net::UnixStream, sync::Arc, time::Duration};

use mpvpn_config::ServerConfig;
use mpvpn_error::RunError;
use mpvpn_http::untrusted::exchange;
use mpvpn_users::credentials::Credentials;
use tokio::{io::DuplexStream, runtime::Runtime, sync::watch};

use super::{
    ClientConnection, ClientNetwork, Gateway, Listener, LoopbackClients, ServerContext, Site, http1, http2,
    masque_drafts,
};

/// How a connection is served, as TLS negotiates it by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainProtocol {
    /// `http/1.1`.
    Http1,
    /// `h2`.
    Http2,
    /// None, at a server for clients of early drafts.
    Drafts,
}

/// An HTTPS server whose clients are byte strings.
#[derive(Debug)]
pub struct PlainHttpsServer {
    runtime: Runtime,
    listener: Arc<Listener>,
}

impl PlainHttpsServer {
    /// A server with this configuration, whose addresses are not used. `quic` is the address of its QUIC.
    ///
    /// # Errors
    /// If TLS or the site cannot be set up, or the machine has no socket left.
    pub fn new(config: &ServerConfig, credentials: &Credentials, quic: SocketAddr) -> Result<Self, RunError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(RunError::io("start a runtime"))?;
        let clients = LoopbackClients::default();
        let (site, access_ends) = (Site::new(&config.site)?, watch::Sender::new(()));
        let context = ServerContext::new(config, credentials, site, &clients, &access_ends)?;
        let gateway = Gateway::new(quic, &credentials.certificates, clients)?;
        Ok(Self { runtime, listener: Arc::new(Listener { context, quic, gateway }) })
    }

    /// Serves a connection on which the client sends `sent`, and ends its side when nothing has come for
    /// `quiet`. Returns what the client gets, at most `max` bytes; `None` if the connection does not end in
    /// time.
    ///
    /// # Errors
    /// If the machine has no socket left.
    pub fn serve(
        &self,
        protocol: PlainProtocol,
        sent: &[u8],
        max: usize,
        quiet: Duration,
        time: Duration,
    ) -> Result<Option<Vec<u8>>, RunError> {
        // Options of the client's socket are set, but no byte passes it.
        let (socket, _other) = UnixStream::pair().map_err(RunError::io("open a socket"))?;
        let peer = SocketAddr::from(([192, 0, 2, 1], 1024));
        let slots = &self.listener.context.unauthenticated;
        let Ok(slot) = slots.acquire_evicting(ClientNetwork::of(peer.ip())) else { return Ok(None) };
        let client = Arc::new(ClientConnection::new(&self.listener, (socket.into(), None), peer, slot));
        let serve = |stream: DuplexStream| async move {
            match protocol {
                PlainProtocol::Http1 => http1::serve(stream, client).await,
                PlainProtocol::Http2 => http2::serve(stream, client).await,
                PlainProtocol::Drafts => masque_drafts::serve(stream, client).await,
            }
        };
        Ok(self.runtime.block_on(async { exchange(serve, sent, max, quiet, time).await }))
    }
}
