use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;

use super::{SOCKET_DIR, connect_at_once};
use crate::{Error, Result, status::Status};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer, in bytes: a server with thousands of clients.
const LONGEST: usize = 64 << 20;

/// Asks the process at the socket `path`, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_status(path: &Path) -> Result<Status> {
    let no_answer = |source| Error::NoAnswer { path: path.into(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_answer)?;
    runtime.block_on(async {
        match tokio::time::timeout(PATIENCE, get(path)).await {
            Ok(answer) => answer,
            Err(_) => Err(no_answer(ErrorKind::TimedOut.into())),
        }
    })
}

async fn get(path: &Path) -> Result<Status> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let stream = tokio::net::UnixStream::connect(path)
        .await
        .map_err(|source| Error::NoAnswer { path: path.into(), source })?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| bad(error.to_string()))?;
    let driver = tokio::spawn(connection);
    let request = Request::get("/v1/status")
        .header(header::HOST, "localhost")
        .body(Empty::<Bytes>::new())
        .map_err(|error| bad(error.to_string()))?;
    let response = requests.send_request(request).await.map_err(|error| bad(error.to_string()))?;
    let code = response.status();
    let body = Limited::new(response.into_body(), LONGEST);
    let body = body.collect().await.map_err(|error| bad(error.to_string()))?.to_bytes();
    driver.abort();
    if !code.is_success() {
        let said: String = String::from_utf8_lossy(&body).chars().take(200).collect();
        return Err(bad(format!("{code}: {}", said.escape_debug())));
    }
    serde_json::from_slice(&body).map_err(|error| bad(error.to_string()))
}

/// The sockets in [`SOCKET_DIR`] where a process listens, in the order of their names.
pub fn list_sockets() -> Vec<PathBuf> {
    sockets_in(Path::new(SOCKET_DIR))
}

pub(super) fn sockets_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut sockets: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        // One that we may not open is alive too: asking it will say why.
        .filter(|path| match connect_at_once(path) {
            Ok(_) => true,
            Err(error) => matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::WouldBlock),
        })
        .collect();
    sockets.sort();
    sockets
}
