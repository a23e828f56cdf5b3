//! A TCP way that is only tried out.

use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use mpvpn_os::tcp::{MptcpState, Protocol};
use mpvpn_types::Duration;
use tokio::time::timeout;

use super::carriage::{Denied, Stable, ask, begin, granted, with};
use crate::{
    dial::{DialError, Step, dial},
    links::Footing,
};

/// How long each step may take.
const LIMIT: Duration = Duration::from_secs(4);

/// What was measured.
#[derive(Debug)]
pub(crate) struct Trial {
    /// Until the connection to the server, or the proxy, stood.
    pub(crate) connect: Duration,
    /// Until the proxy had its own to the server.
    pub(crate) proxy: Option<Duration>,
    /// Until TLS stood.
    pub(crate) tls: Duration,
    /// Until the server answered.
    pub(crate) http2: Duration,
    /// What the connection was then; `None` if it had to be tried once more, as TCP.
    pub(crate) multipath: Option<MptcpState>,
    /// Whether the server accepts the credentials.
    pub(crate) authorized: bool,
}

/// Tries to get a TCP way to one of the server's addresses `to`, and gives it up again.
///
/// # Errors
/// Why there is none.
pub(crate) async fn try_out(stable: &Stable, footing: Footing, to: Vec<SocketAddr>) -> Result<Trial, String> {
    let first = stable.dial(footing.clone(), to.clone(), Protocol::Mptcp, 0, LIMIT).await?;
    let (dialled, is_first) = match dial(&first).await {
        Ok(dialled) => (dialled, true),
        // Some networks drop what they do not know.
        Err(DialError::TimedOut { step: Step::Connect, .. }) => {
            let second = stable.dial(footing, to, Protocol::Tcp, 0, LIMIT).await?;
            (dial(&second).await.map_err(|error| error.to_string())?, false)
        }
        Err(error) => return Err(error.to_string()),
    };
    let socket: OwnedFd =
        dialled.stream.get_ref().0.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    let begun = Instant::now();
    let asking = async {
        let (mut requests, mut driver) = begin(dialled.stream).await?;
        match with(&mut driver, async { granted(ask(&mut requests, stable, 0).await?).await }).await? {
            Ok(_) => Ok(true),
            Err(Denied::Unauthorized) => Ok(false),
            Err(other) => Err(other.to_string()),
        }
    };
    let authorized =
        timeout(LIMIT, asking).await.map_err(|_| "the server does not answer in HTTP/2".to_owned())??;
    Ok(Trial {
        connect: dialled.connect,
        proxy: dialled.proxy,
        tls: dialled.tls,
        http2: begun.elapsed(),
        // Only now have bytes come back, on which a fallback depends.
        multipath: is_first.then(|| MptcpState::of(&socket).unwrap_or(MptcpState::NotUsed)),
        authorized,
    })
}
