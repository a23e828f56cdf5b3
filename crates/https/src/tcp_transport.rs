//! The server's end of the TCP transport: a client's QUIC packets arrive inside HTTP (docs/protocol.md,
//! "Inside TCP") and are sent to this server's own QUIC socket over the loopback, as if they had arrived
//! there.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use mpvpn_error::RunError;
use mpvpn_http::limiter::Slot;
use mpvpn_masque::{
    connect::{Authority, Connect},
    connect_udp,
    extensions::{self, Extensions},
    headers::Headers,
    request::Rejection,
    structured::Typed,
};
use mpvpn_tcp::{
    DSCP_KEY,
    h2_stream::H2Stream,
    pump::{LoopbackSocket, PumpCounters, PumpError, pump},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::{Body, ClientConnection, full_body, http3_fields, loopback_clients::ClientEntry};

/// The port of `https` (RFC 9110 §4.2.2).
const HTTPS: u16 = 443;

/// Whether a valid request is CONNECT-UDP to the very server that received it.
pub(super) fn is_to_itself(headers: &Headers) -> bool {
    let Ok(Connect { target, .. }) = connect_udp::parse_request(headers) else { return false };
    headers.authority().and_then(authority_of) == Some(target)
}

/// The authority of a request, which may omit the scheme's port.
fn authority_of(text: &str) -> Option<Authority> {
    text.parse().ok().or_else(|| format!("{text}:{HTTPS}").parse().ok())
}

/// An accepted TCP transport.
struct TcpTransport {
    loopback: LoopbackSocket,
    /// Held while the transport exists: the user's slot, and the entry that names the client.
    _slot: Slot<String>,
    _entry: ClientEntry,
}

fn open(client: &ClientConnection, user: &str) -> Result<TcpTransport, Rejection> {
    let slot = client.context.tcp_transports.try_acquire(user.to_owned()).map_err(|limit| {
        tracing::debug!(user, %limit, "refused another TCP transport");
        Rejection::new(503, format!("too many TCP transports: {limit}"))
    })?;
    let connect = || {
        let loopback = LoopbackSocket::connect(client.quic)?;
        let inner = loopback.local_addr().map_err(RunError::io("look at a socket"))?;
        Ok::<_, RunError>((loopback, client.context.loopback_clients.insert(inner, client.peer)))
    };
    let (loopback, entry) = connect().map_err(|error| {
        tracing::warn!(%error, "cannot reach this server's QUIC socket for a client on TCP");
        Rejection::new(503, "this server cannot reach its own QUIC socket")
    })?;
    Ok(TcpTransport { loopback, _slot: slot, _entry: entry })
}

/// The DSCP that the client asks for, if it is valid.
fn dscp_of(fields: &HeaderMap) -> Option<u8> {
    let lines = fields.get_all(extensions::FIELD).iter().map(http::HeaderValue::as_bytes);
    Extensions::parse(lines)?.get(DSCP_KEY)?.integer_in(1, 63)
}

/// Accepts an HTTP/2 request and relays packets until it ends.
pub(super) async fn over_http2(
    client: &ClientConnection,
    user: &str,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let transport = match open(client, user) {
        Ok(transport) => transport,
        Err(refusal) => {
            // Fails only if the client has disconnected.
            let _ = respond.send_response(http3_fields::response_from(&refusal.headers()), true);
            return;
        }
    };
    if let Some(dscp) = dscp_of(request.headers()) {
        client.set_dscp(dscp);
    }
    let granted = http3_fields::response_from(&connect_udp::accept());
    let Ok(send) = respond.send_response(granted, false) else { return };
    let mut stream = H2Stream::new(send, request.into_body());
    match carry(client.peer, user, &transport, &mut stream).await {
        Ok(()) => drop(stream.shutdown().await),
        Err(PumpError::Stream(_)) => {}
        Err(PumpError::Socket(_)) => stream.reset(Reason::CONNECT_ERROR),
        Err(PumpError::Capsule(_) | PumpError::NoContext) => stream.reset(Reason::PROTOCOL_ERROR),
    }
}

/// Accepts an HTTP/1.1 request; packets are relayed once the connection has switched protocols.
pub(super) fn over_http1(
    client: &std::sync::Arc<ClientConnection>,
    user: &str,
    mut request: Request<Incoming>,
) -> Response<Body> {
    let transport = match open(client, user) {
        Ok(transport) => transport,
        Err(refusal) => return http3_fields::response_from(&refusal.headers()).map(|()| full_body("")),
    };
    let granted = http3_fields::http1_acceptance(&request, &connect_udp::accept());
    let upgrade = hyper::upgrade::on(&mut request);
    let (client, user) = (std::sync::Arc::clone(client), user.to_owned());
    tokio::spawn(async move {
        let _busy = client.begin_request();
        match upgrade.await {
            Ok(upgraded) => {
                let mut stream = TokioIo::new(upgraded);
                tokio::select! {
                    ended = carry(client.peer, &user, &transport, &mut stream) => if ended.is_ok() {
                        // The client may have disconnected already.
                        let _ = stream.shutdown().await;
                    },
                    // A connection that has switched protocols is served by this task alone.
                    () = client.access_ended() => {}
                }
            }
            Err(error) => {
                tracing::debug!(peer = %client.peer, %error, "a connection did not switch protocols")
            }
        }
    });
    granted.map(|()| full_body(""))
}

async fn carry(
    peer: SocketAddr,
    user: &str,
    transport: &TcpTransport,
    stream: impl AsyncRead + AsyncWrite + Unpin,
) -> Result<(), PumpError> {
    let counters = PumpCounters::default();
    tracing::debug!(%peer, user, "TCP transport opened");
    let ended = pump(&transport.loopback, stream, &counters).await;
    let (up, down) = (counters.received.bytes(), counters.sent.bytes());
    match &ended {
        Ok(()) => tracing::debug!(%peer, user, up, down, "TCP transport closed"),
        Err(error) => tracing::debug!(%peer, user, up, down, %error, "TCP transport failed"),
    }
    ended
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn vectors(file: &str) -> Vec<Value> {
        let mut file: Value = serde_json::from_str(file).unwrap();
        let Value::Array(vectors) = file["vectors"].take() else { panic!("no list of vectors") };
        assert!(!vectors.is_empty());
        vectors
    }

    #[test]
    fn a_mark_is_a_number_from_1_to_63() {
        for vector in vectors(include_str!("../../../docs/vectors/dscp.json")) {
            let value = format!("v=1, {}", vector["value"].as_str().unwrap()).parse().unwrap();
            let mark = dscp_of(&HeaderMap::from_iter([(extensions::FIELD.parse().unwrap(), value)]));
            let expected = vector["fields"]["dscp"].as_u64();
            assert_eq!(expected.is_none(), vector["error"] == "absent", "{}", vector["name"]);
            assert_eq!(mark.map(u64::from), expected, "{}", vector["name"]);
        }
        assert_eq!(dscp_of(&HeaderMap::new()), None);
    }

    #[test]
    fn only_a_target_that_is_the_authority_is_the_server_itself() {
        for vector in vectors(include_str!("../../../docs/vectors/inside-tcp.json")) {
            let text = |field: &str| vector[field].as_str().unwrap();
            let headers = connect_udp::request(text("authority"), text("path"), None);
            let is_own = is_to_itself(&headers);
            assert_eq!(Some(is_own), vector["to_the_server_itself"].as_bool(), "{}", vector["name"]);
        }
    }
}
