//! Tries the TCP transport once, for `mpvpn check`.

use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use mpvpn_os::tcp::{MptcpState, Protocol};
use mpvpn_sockets::bind_options::BindOptions;
use mpvpn_types::Duration;
use tokio::time::timeout;

use super::connection::{
    RequestError, TcpTransportConfig, await_response, drive_while, send_connect_udp, start_http2,
};
use crate::dial::{DialError, DialStep, dial};

/// The timeout of each step. Chosen.
const STEP_TIMEOUT: Duration = Duration::from_secs(4);

/// The results of a probe.
#[derive(Debug)]
pub struct TcpProbe {
    /// The duration of the TCP handshake with the server or the proxy.
    pub connect: Duration,
    /// The duration of the proxy's CONNECT, if there is a proxy.
    pub proxy: Option<Duration>,
    /// The duration of the TLS handshake.
    pub tls: Duration,
    /// The time from TLS to the server's HTTP/2 response.
    pub http2: Duration,
    /// The state of Multipath TCP then; `None` if only a second attempt with plain TCP succeeded.
    pub multipath: Option<MptcpState>,
    /// Whether the server accepts the credentials.
    pub authorized: bool,
    /// Why it refuses this client, which it knows, if it does.
    pub refusal: Option<String>,
}

/// Makes a TCP transport to one of the server's addresses `to`, and closes it.
///
/// # Errors
/// Why that failed.
pub async fn probe(
    config: &TcpTransportConfig,
    bind_options: BindOptions,
    to: Vec<SocketAddr>,
) -> Result<TcpProbe, DialError> {
    let first = config.dial(bind_options.clone(), to.clone(), Protocol::Mptcp, 0, STEP_TIMEOUT);
    let first = first.await.map_err(DialError::Other)?;
    let (dialled, is_first) = match dial(&first).await {
        Ok(dialled) => (dialled, true),
        // Some networks drop unknown TCP options.
        Err(DialError::TimedOut { step: DialStep::Connect, .. }) => {
            let second = config.dial(bind_options, to, Protocol::Tcp, 0, STEP_TIMEOUT);
            (dial(&second.await.map_err(DialError::Other)?).await?, false)
        }
        Err(error) => return Err(error),
    };
    let socket: OwnedFd = dialled.stream.get_ref().0.as_fd().try_clone_to_owned().map_err(DialError::Tls)?;
    let begun = Instant::now();
    let asking = async {
        let (mut requests, mut driver) = start_http2(dialled.stream).await?;
        match drive_while(&mut driver, async {
            await_response(send_connect_udp(&mut requests, config, 0).await?).await
        })
        .await?
        {
            Ok(_) => Ok((true, None)),
            Err(RequestError::Unauthorized) => Ok((false, None)),
            Err(RequestError::Refused(reason)) => Ok((false, Some(reason))),
            Err(other) => Err(other.to_string()),
        }
    };
    let answer = timeout(STEP_TIMEOUT, asking).await;
    let (authorized, refusal) = answer
        .unwrap_or_else(|_| Err("the server does not answer in HTTP/2".to_owned()))
        .map_err(DialError::Other)?;
    Ok(TcpProbe {
        connect: dialled.connect,
        proxy: dialled.proxy,
        tls: dialled.tls,
        http2: begun.elapsed(),
        // Bytes have come back, so a fallback to TCP is known.
        multipath: is_first.then(|| MptcpState::of(&socket).unwrap_or(MptcpState::NotUsed)),
        authorized,
        refusal,
    })
}
