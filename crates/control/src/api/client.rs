use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

use super::{SOCKET_DIR, connect_at_once};
use crate::{
    Error, Result,
    config::{LinkChange, Reloaded},
    places,
    status::{FlowList, Link, Status},
};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer, in bytes: a server with thousands of clients.
const LONGEST: usize = 64 << 20;

/// Asks the process at the socket `path`, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_status(path: &Path) -> Result<Status> {
    fetch(path, "/v1/status")
}

/// Asks the process at the socket `path` for its flows, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_flows(path: &Path) -> Result<FlowList> {
    fetch(path, "/v1/flows")
}

fn fetch<T: DeserializeOwned>(path: &Path, uri: &str) -> Result<T> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let (code, body) = ask(path, Method::GET, uri, Bytes::new())?;
    if !code.is_success() {
        return Err(bad(format!("{code}: {}", excerpt(&body))));
    }
    serde_json::from_slice(&body).map_err(|error| bad(error.to_string()))
}

/// Has the client at the socket `path` use the link `name` in another way; how the link is then. Waits for
/// up to 5 s. Not for use inside an asynchronous runtime.
pub fn change_link(path: &Path, name: &str, change: &LinkChange) -> Result<Link> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let body = serde_json::to_vec(change).map_err(|error| bad(error.to_string()))?;
    let (code, body) = ask(path, Method::POST, &format!("/v1/links/{name}"), body.into())?;
    if code.is_success() {
        return serde_json::from_slice(&body).map_err(|error| bad(error.to_string()));
    }
    let said = serde_json::from_slice::<serde_json::Value>(&body).ok();
    match said.as_ref().and_then(|said| said["error"].as_str()) {
        Some(why) if matches!(code, StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST) => {
            Err(Error::usage(why, "see `mpvpn link show`"))
        }
        _ => Err(bad(format!("{code}: {}", excerpt(&body)))),
    }
}

/// Has the process at the socket `path` read its configuration again. Waits for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn reload(path: &Path) -> Result<Reloaded> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let (code, body) = ask(path, Method::POST, "/v1/reload", Bytes::new())?;
    if code.is_success() {
        return serde_json::from_slice(&body).map_err(|error| bad(error.to_string()));
    }
    let said = serde_json::from_slice::<serde_json::Value>(&body).ok();
    match said.as_ref().and_then(|said| said["error"].as_str()) {
        Some(why) if code == StatusCode::BAD_REQUEST => {
            Err(Error::usage(why, "correct the file and reload again; until then all stays as it is"))
        }
        _ => Err(bad(format!("{code}: {}", excerpt(&body)))),
    }
}

fn excerpt(body: &[u8]) -> String {
    let said: String = String::from_utf8_lossy(body).chars().take(200).collect();
    said.escape_debug().to_string()
}

fn ask(path: &Path, method: Method, uri: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
    let no_answer = |source| Error::NoAnswer { path: path.into(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_answer)?;
    runtime.block_on(async {
        match tokio::time::timeout(PATIENCE, exchange(path, method, uri, body)).await {
            Ok(answer) => answer,
            Err(_) => Err(no_answer(ErrorKind::TimedOut.into())),
        }
    })
}

async fn exchange(path: &Path, method: Method, uri: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let stream = tokio::net::UnixStream::connect(path)
        .await
        .map_err(|source| Error::NoAnswer { path: path.into(), source })?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| bad(error.to_string()))?;
    let driver = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(header::HOST, "localhost")
        .body(Full::new(body))
        .map_err(|error| bad(error.to_string()))?;
    let response = requests.send_request(request).await.map_err(|error| bad(error.to_string()))?;
    let code = response.status();
    let body = Limited::new(response.into_body(), LONGEST);
    let body = body.collect().await.map_err(|error| bad(error.to_string()))?.to_bytes();
    driver.abort();
    Ok((code, body))
}

/// The sockets in [`SOCKET_DIR`] and in the folder of this user where a process listens, in the order of their names.
pub fn list_sockets() -> Vec<PathBuf> {
    let common = Path::new(SOCKET_DIR);
    let own = places::runtime_dir().filter(|own| own != common);
    own.into_iter().flat_map(|own| sockets_in(&own)).chain(sockets_in(common)).collect()
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
