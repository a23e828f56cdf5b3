use std::{
    io::ErrorKind,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

use super::connect_nonblocking;
use mpvpn_input::dirs::SOCKET_DIR;
use mpvpn_input::{Error, Result, dirs, groups};

/// Time for a whole response. The server answers within its `DATA_PLANE_TIMEOUT` of 2 s: less than that would
/// fail while the data plane is busy; more lets a command hang at a stopped process.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest response (bytes): a client in the status of a server takes some 2 kB, 10,000 clients 20 MB. A
/// lower limit would refuse it; a higher one lets a wrong process fill memory.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Longest line of an event log (bytes): ten times the longest event. Without a limit a process that sends no
/// line end would fill memory.
const MAX_EVENT_LINE_BYTES: usize = 64 << 10;

/// The response of a process.
#[derive(Debug)]
pub(super) struct ApiResponse {
    path: PathBuf,
    code: StatusCode,
    body: Bytes,
}

impl ApiResponse {
    /// The body as JSON.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T> {
        if !self.code.is_success() {
            return Err(self.failure());
        }
        serde_json::from_slice(&self.body).map_err(|error| self.error(error.to_string()))
    }

    /// The body as text.
    pub(super) fn text(&self) -> Result<String> {
        if !self.code.is_success() {
            return Err(self.failure());
        }
        Ok(String::from_utf8_lossy(&self.body).into_owned())
    }

    fn failure(&self) -> Error {
        self.error(format!("{}: {}", self.code, excerpt(&self.body)))
    }

    /// The body as JSON. A response with one of the statuses `refusals` becomes a usage error with the reason
    /// in the body, and `next` as the next step.
    pub(super) fn json_or_usage_error<T: DeserializeOwned>(
        &self,
        refusals: &[StatusCode],
        next: &str,
    ) -> Result<T> {
        let text = serde_json::from_slice::<serde_json::Value>(&self.body).ok();
        match text.as_ref().and_then(|text| text["error"].as_str()) {
            Some(why) if refusals.contains(&self.code) => Err(Error::usage(why, next)),
            _ => self.json(),
        }
    }

    fn error(&self, why: String) -> Error {
        Error::BadAnswer { path: self.path.clone(), why }
    }
}

fn excerpt(body: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
    text.escape_debug().to_string()
}

/// Sends a request to the process at the socket `path` and waits for the response.
pub(super) fn request(path: &Path, method: Method, uri: &str, body: Bytes) -> Result<ApiResponse> {
    block_on(path, async {
        let response = with_timeout(path, send(path, method, uri, body)).await?;
        with_timeout(path, read_body(path, response)).await
    })
}

/// Calls `take` for each line of a response as it arrives. Returns when `take` breaks, or at the end of the
/// response.
pub(super) fn follow(path: &Path, uri: &str, take: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
    block_on(path, async {
        let mut response = with_timeout(path, send(path, Method::GET, uri, Bytes::new())).await?;
        if !response.status().is_success() {
            let response = with_timeout(path, read_body(path, response)).await?;
            return Err(response.failure());
        }
        let mut line_start = Vec::new();
        // The response of a process that is killed ends with an error: that is the end of the events, too.
        while let Some(Ok(frame)) = response.frame().await {
            line_start.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            while let Some(end) = line_start.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = line_start.drain(..=end).collect();
                if take(String::from_utf8_lossy(&line).trim_end()).is_break() {
                    return Ok(());
                }
            }
            if line_start.len() > MAX_EVENT_LINE_BYTES {
                let why = format!("a line of more than {MAX_EVENT_LINE_BYTES} bytes");
                return Err(Error::BadAnswer { path: path.into(), why });
            }
        }
        Ok(())
    })
}

fn block_on<T>(path: &Path, work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| Error::NoAnswer { path: path.into(), source })?.block_on(work)
}

async fn with_timeout<T>(path: &Path, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::NoAnswer { path: path.into(), source: ErrorKind::TimedOut.into() };
    tokio::time::timeout(RESPONSE_TIMEOUT, work).await.map_err(late)?
}

/// Sends a request and returns the head of the response. The body arrives while the runtime runs.
async fn send(path: &Path, method: Method, uri: &str, body: Bytes) -> Result<Response<Incoming>> {
    let bad = |why: String| Error::BadAnswer { path: path.into(), why };
    let stream = tokio::net::UnixStream::connect(path).await.map_err(|source| match source.kind() {
        ErrorKind::PermissionDenied => Error::denied(groups::JOIN_READERS),
        _ => Error::NoAnswer { path: path.into(), source },
    })?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| bad(error.to_string()))?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(header::HOST, "localhost")
        .body(Full::new(body))
        .map_err(|error| bad(error.to_string()))?;
    let response = requests.send_request(request).await.map_err(|error| bad(error.to_string()))?;
    // Strangers do not reach the socket, so this is a reader who asks for a change.
    let is_denied = response.status() == StatusCode::FORBIDDEN;
    if is_denied { Err(Error::denied(groups::JOIN_ADMINISTRATORS)) } else { Ok(response) }
}

async fn read_body(path: &Path, response: Response<Incoming>) -> Result<ApiResponse> {
    let code = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
    let body = body.map_err(|error| Error::BadAnswer { path: path.into(), why: error.to_string() })?;
    Ok(ApiResponse { path: path.into(), code, body: body.to_bytes() })
}

/// The sockets in [`SOCKET_DIR`] and in the folder of this user where a process listens, in the order of
/// their names.
pub fn list_sockets() -> Vec<PathBuf> {
    let common = Path::new(SOCKET_DIR);
    let own = dirs::runtime_dir().filter(|own| own != common);
    own.into_iter().flat_map(|own| sockets_in(&own)).chain(sockets_in(common)).collect()
}

/// Whether this user sees which sockets there are in [`SOCKET_DIR`].
///
/// # Errors
/// If the folder is closed to this user.
pub fn may_list() -> Result<()> {
    match std::fs::read_dir(SOCKET_DIR) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(Error::denied(groups::JOIN_READERS)),
        _ => Ok(()),
    }
}

pub(super) fn sockets_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut sockets: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        // A socket without permission belongs to a live process, too: a request to it reports the lack of
        // permission.
        .filter(|path| match connect_nonblocking(path) {
            Ok(_) => true,
            Err(error) => matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::WouldBlock),
        })
        .collect();
    sockets.sort();
    sockets
}
