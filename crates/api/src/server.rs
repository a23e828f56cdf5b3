use std::{
    io::ErrorKind,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
};

use http_body_util::{BodyExt, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    ControlRequest, access, ask_data_plane, connect_nonblocking,
    requests::{PATH_PARAMETER, ROUTES},
};
use access::Access;
use mpvpn_http::{HttpResponse, NoTimeLimit, complete, pulled_body};
use mpvpn_input::{Error, Result, files};
use mpvpn_os::undo::Lock;
use mpvpn_status::events::{EventReader, SharedEventLog};

/// Hands a request to the data plane.
pub type RequestHandler = Arc<dyn Fn(ControlRequest) + Send + Sync>;

/// Longest path of a socket (bytes): `sun_path` of unix(7) has 108, and the temporary name beside the socket
/// may be some bytes longer than the socket's own. A longer limit would let binding fail later; a shorter one
/// refuses usable paths.
const MAX_SOCKET_PATH_BYTES: usize = 100;
/// Longest body of a request (bytes): many times the longest
/// [`LinkChange`](mpvpn_status::link_change::LinkChange). A longer limit lets programs occupy memory; a
/// shorter one would refuse valid requests.
const MAX_REQUEST_BODY_BYTES: usize = 4096;
/// Programs that may follow the event log at a time. Each occupies one of the 32 connections of `http` for as
/// long as it likes: with more, followers could leave none for requests; with fewer, monitoring programs are
/// refused.
const MAX_FOLLOWERS: usize = 8;

/// The state from which requests are answered.
#[derive(Clone)]
pub(super) struct ApiState {
    source: RequestHandler,
    events: SharedEventLog,
    followers: Arc<Semaphore>,
}

impl ApiState {
    pub(super) fn new(source: RequestHandler, events: SharedEventLog) -> Self {
        Self { source, events, followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)) }
    }
}

/// A bound socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Listens at `path`, with mode 0600; in the folder of root and of the services, members of the group
    /// `mpvpn` connect, too. A socket file that no process listens at is replaced; if a process listens
    /// there, the error names it.
    pub fn bind(path: &Path) -> Result<Self> {
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > MAX_SOCKET_PATH_BYTES {
            return Err(Error::SocketPath { path: path.into(), bytes });
        }
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        files::create_private_dir(dir)?;
        let _lock = Lock::wait_for(dir, "api").map_err(Error::file("lock", dir))?;
        check_socket_unused(path)?;

        // Bound under a temporary name and renamed after chmod: at `path` it never has a wider mode.
        let temporary = dir.join(format!(".{}", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        let listener = UnixListener::bind(&temporary).map_err(Error::file("create", path))?;
        let ready = access::admit(&temporary, access::readers_in(dir))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| std::fs::rename(&temporary, path))
            .and_then(|()| std::fs::metadata(path));
        match ready {
            Ok(meta) => {
                Ok(Self { listener, file: SocketFile { path: path.into(), id: (meta.dev(), meta.ino()) } })
            }
            Err(error) => {
                let _ = std::fs::remove_file(&temporary);
                Err(Error::file("create", path)(error))
            }
        }
    }

    /// Answers requests until dropped; inside a tokio runtime with I/O and time.
    pub async fn serve(self, source: RequestHandler, events: SharedEventLog) -> Result<()> {
        let Self { listener, file } = self;
        let state = ApiState::new(source, events);
        let listener =
            tokio::net::UnixListener::from_std(listener).map_err(Error::file("listen at", &file.path))?;
        let accept = async || listener.accept().await.map(|(stream, _)| (access::of_peer(&stream), stream));
        let answer = move |request, may| answer(request, may, state.clone());
        mpvpn_http::serve("local API", accept, answer).await;
        Ok(())
    }
}

/// A request of a program.
pub(super) struct ApiRequest {
    request: Request<Incoming>,
    /// The word of the path in place of [`PATH_PARAMETER`]; empty for routes without it.
    name: String,
    state: ApiState,
}

type ResponseFuture = Pin<Box<dyn Future<Output = HttpResponse> + Send>>;

/// A path and method, the access that they take, and the function that answers their requests.
pub(super) struct Route {
    pub(super) method: Method,
    pub(super) path: &'static str,
    pub(super) access: Access,
    answer: fn(ApiRequest) -> ResponseFuture,
}

impl Route {
    pub(super) const fn get(path: &'static str, answer: fn(ApiRequest) -> ResponseFuture) -> Self {
        Self { method: Method::GET, path, access: Access::Change, answer }
    }

    pub(super) const fn post(path: &'static str, answer: fn(ApiRequest) -> ResponseFuture) -> Self {
        Self { method: Method::POST, path, access: Access::Change, answer }
    }

    /// The same route for members of the group `mpvpn`, too.
    pub(super) const fn for_readers(mut self) -> Self {
        self.access = Access::Read;
        self
    }

    /// If the route matches `path`, the word in place of [`PATH_PARAMETER`].
    fn parameter_in<'a>(&self, path: &'a str) -> Option<&'a str> {
        match self.path.strip_suffix(PATH_PARAMETER) {
            Some(before) => path.strip_prefix(before),
            None => (path == self.path).then_some(""),
        }
    }
}

impl ApiRequest {
    /// Responds with the reply of the data plane.
    pub(super) fn query<T: Serialize + Send + 'static>(
        self,
        request: fn(oneshot::Sender<T>) -> ControlRequest,
    ) -> ResponseFuture {
        Box::pin(async move {
            ask_data_plane(&self.state.source, request)
                .await
                .map_or_else(data_plane_timeout, |found| json_value(&found))
        })
    }

    /// Responds with the result of an action of the data plane, or with the status `refused` and the reason.
    pub(super) fn command<T: Serialize + Send + 'static>(
        self,
        refused: StatusCode,
        request: fn(oneshot::Sender<Result<T, String>>) -> ControlRequest,
    ) -> ResponseFuture {
        Box::pin(async move { command_response(ask_data_plane(&self.state.source, request).await, refused) })
    }

    /// As [`command`](Self::command), for an action whose arguments are the name in the path and the JSON
    /// body.
    pub(super) fn command_with_body<C: DeserializeOwned + Send + 'static, T: Serialize + Send + 'static>(
        self,
        refused: StatusCode,
        request: fn(String, C, oneshot::Sender<Result<T, String>>) -> ControlRequest,
    ) -> ResponseFuture {
        Box::pin(async move {
            let bad = |why: String| error_response(StatusCode::BAD_REQUEST, &why);
            let body = match Limited::new(self.request.into_body(), MAX_REQUEST_BODY_BYTES).collect().await {
                Ok(body) => body.to_bytes(),
                Err(error) => return bad(error.to_string()),
            };
            let change = match serde_json::from_slice(&body) {
                Ok(change) => change,
                Err(error) => return bad(error.to_string()),
            };
            command_response(
                ask_data_plane(&self.state.source, |reply| request(self.name, change, reply)).await,
                refused,
            )
        })
    }

    /// Whether the query is this flag; the response if it is another one.
    pub(super) fn has_flag(&self, flag: &str) -> Result<bool, ResponseFuture> {
        match self.request.uri().query() {
            None => Ok(false),
            Some(query) if query == flag => Ok(true),
            Some(other) => {
                let why = format!("the query `?{other}` is unknown: only `?{flag}` is possible here");
                Err(Box::pin(async move { error_response(StatusCode::BAD_REQUEST, &why) }))
            }
        }
    }

    /// Responds with the event log in lines of JSON; with `?follow`, new events follow until the client
    /// disconnects.
    pub(super) fn events(self) -> ResponseFuture {
        let follows = match self.has_flag("follow") {
            Ok(follows) => follows,
            Err(response) => return response,
        };
        let permit = follows.then(|| Arc::clone(&self.state.followers).try_acquire_owned());
        let Ok(permit) = permit.transpose() else {
            let why = format!(
                "{MAX_FOLLOWERS} programs follow the events already, which is the limit: end one of them"
            );
            return Box::pin(async move { error_response(StatusCode::SERVICE_UNAVAILABLE, &why) });
        };
        let reader = self.state.events.read(follows);
        let mut response = Response::new(pulled_body((reader, permit), next_lines));
        if follows {
            response.extensions_mut().insert(NoTimeLimit);
        }
        Box::pin(async move { with_content_type(response, "application/x-ndjson") })
    }
}

/// The next lines of the event log. The permit is one of the [`MAX_FOLLOWERS`].
async fn next_lines(
    (mut reader, permit): (EventReader, Option<OwnedSemaphorePermit>),
) -> Option<(Bytes, (EventReader, Option<OwnedSemaphorePermit>))> {
    Some((reader.next().await?.into(), (reader, permit)))
}

pub(super) async fn answer(request: Request<Incoming>, may: Access, state: ApiState) -> HttpResponse {
    let path = request.uri().path();
    let found = ROUTES.iter().find_map(|route| Some((route, route.parameter_in(path)?)));
    let Some((route, name)) = found else {
        return error_response(
            StatusCode::NOT_FOUND,
            &format!("there is no such path; the paths are {}", all_paths()),
        );
    };
    if request.method() != route.method {
        return not_allowed(&route.method);
    }
    if may < route.access {
        return error_response(StatusCode::FORBIDDEN, "this user may not make this request");
    }
    let name = name.to_owned();
    (route.answer)(ApiRequest { request, name, state }).await
}

fn all_paths() -> String {
    let paths: Vec<_> = ROUTES.iter().map(|route| route.path).collect();
    let (last, others) = paths.split_last().expect("there are routes");
    format!("{} and {last}", others.join(", "))
}

fn command_response<T: Serialize>(found: Option<Result<T, String>>, refused: StatusCode) -> HttpResponse {
    match found {
        Some(Ok(found)) => json_value(&found),
        Some(Err(why)) => error_response(refused, &why),
        None => data_plane_timeout(),
    }
}

fn data_plane_timeout() -> HttpResponse {
    error_response(StatusCode::SERVICE_UNAVAILABLE, "the data plane did not answer within 2 s: ask again")
}

fn json_value(value: &impl Serialize) -> HttpResponse {
    match serde_json::to_vec(value) {
        Ok(body) => json(StatusCode::OK, body),
        Err(error) => error_response(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn not_allowed(method: &Method) -> HttpResponse {
    let mut response = error_response(StatusCode::METHOD_NOT_ALLOWED, &format!("only {method} works here"));
    if let Ok(method) = header::HeaderValue::from_str(method.as_str()) {
        response.headers_mut().insert(header::ALLOW, method);
    }
    response
}

fn error_response(code: StatusCode, why: &str) -> HttpResponse {
    json(code, serde_json::json!({ "error": why }).to_string().into_bytes())
}

fn json(code: StatusCode, body: Vec<u8>) -> HttpResponse {
    let mut response = complete(body);
    *response.status_mut() = code;
    with_content_type(response, "application/json")
}

fn with_content_type(mut response: HttpResponse, content: &'static str) -> HttpResponse {
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

/// An error if `path` is in use: a socket with a listening process, or any other kind of file.
fn check_socket_unused(path: &Path) -> Result<()> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::file("create", path)(error)),
    };
    if !meta.file_type().is_socket() {
        return Err(Error::content(path, "nothing or a unix socket", "another kind of file"));
    }
    match connect_nonblocking(path) {
        Ok(stream) => {
            let pid = rustix::net::sockopt::socket_peercred(&stream).ok();
            Err(Error::SocketInUse {
                path: path.into(),
                pid: pid.map(|peer| peer.pid.as_raw_nonzero().get()),
            })
        }
        // No process listens: a leftover, which the rename replaces.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        // A full backlog belongs to a live process too.
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            Err(Error::SocketInUse { path: path.into(), pid: None })
        }
        Err(error) => Err(Error::file("create", path)(error)),
    }
}

/// Removes the socket's file when dropped, unless another process has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode, which tell this file from a later one at the same path.
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own_file =
            std::fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.id);
        if is_own_file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
