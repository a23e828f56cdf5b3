//! The HTTPS client of ACME: a connection for each request.

use std::{error::Error as StdError, io, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    Request,
    header::{HOST, HeaderValue},
};
use http_body_util::{BodyExt, Limited};
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse};
use mpvpn_identity::tls::LastRefusal;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::TlsConnector;

/// Time for a request and its response. Longer: an order that hangs. Shorter: fails at a CA that is busy.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a TCP connection to one address of the CA.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Addresses of the CA that are tried.
const MAX_ADDRESSES: usize = 3;
/// Largest response (bytes): a certificate chain has some 6 kB. Larger ones fill memory.
const MAX_RESPONSE_BYTES: usize = 256 << 10;

/// The client.
pub(super) struct HttpClient {
    pub(super) tls: Arc<ClientConfig>,
    /// Where `tls` stores why it refused a certificate.
    pub(super) last_refusal: LastRefusal,
}

/// The CA did not answer.
#[derive(Debug, thiserror::Error)]
#[error("the CA {host} cannot be reached: {reason}")]
pub(super) struct Unreached {
    host: String,
    reason: String,
}

impl instant_acme::HttpClient for HttpClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, instant_acme::Error>> + Send>> {
        let (tls, refusal) = (Arc::clone(&self.tls), self.last_refusal.clone());
        Box::pin(async move {
            let host = request.uri().host().unwrap_or_default().to_owned();
            let answered = timeout(REQUEST_TIMEOUT, send(tls, request)).await;
            let failed = |reason| instant_acme::Error::Other(Box::new(Unreached { host, reason }));
            match answered {
                Ok(Ok(response)) => Ok(response),
                Ok(Err(error)) => {
                    let refused = refusal.take().map(|refusal| refusal.to_string());
                    Err(failed(refused.unwrap_or_else(|| error.to_string())))
                }
                Err(_) => Err(failed(format!("no answer in {} s", REQUEST_TIMEOUT.as_secs()))),
            }
        })
    }
}

async fn send(
    tls: Arc<ClientConfig>,
    mut request: Request<BodyWrapper<Bytes>>,
) -> Result<BytesResponse, Box<dyn StdError + Send + Sync>> {
    let uri = request.uri().clone();
    let (Some("https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(format!("{uri} is not a URL of HTTPS").into());
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned())?;
    let stream = connect(host, authority.port_u16().unwrap_or(443)).await?;
    let stream = TlsConnector::from(tls).connect(name, stream).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    request.headers_mut().insert(HOST, HeaderValue::from_str(authority.as_str())?);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse()?;
    let exchange = async {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await?.to_bytes();
        Ok(BytesResponse { parts, body: Box::new(body) })
    };
    tokio::pin!(exchange);
    tokio::select! {
        answered = &mut exchange => return answered,
        // The connection may end with its last response, which is read already.
        ended = connection => ended?,
    }
    exchange.await
}

/// A connection to the first address that answers.
async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in lookup_host((host, port)).await?.take(MAX_ADDRESSES) {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{address}: no answer")),
        }
    }
    Err(last)
}
