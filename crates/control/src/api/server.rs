use std::{
    io::ErrorKind,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
};
use serde::Serialize;
use tokio::sync::oneshot;

use super::connect_at_once;
use crate::{
    Error, Result,
    config::{LinkChange, Reloaded},
    files,
    http::{self, Answer, ask},
    status::{FlowList, Link, Status},
};

/// What the data plane is asked. Dropping a sender means that it cannot answer.
#[derive(Debug)]
pub enum Question {
    /// How things are.
    Status(oneshot::Sender<Status>),
    /// Which flows there are.
    Flows(oneshot::Sender<FlowList>),
    /// To use a link in another way.
    Link {
        /// The interface.
        name: String,
        /// What is to change.
        change: LinkChange,
        /// How the link is now, or why nothing has changed.
        reply: oneshot::Sender<std::result::Result<Link, String>>,
    },
    /// To read the configuration again: what came of it, or why nothing has changed.
    Reload(oneshot::Sender<std::result::Result<Reloaded, String>>),
}

/// Asks the data plane.
pub type Source = Arc<dyn Fn(Question) + Send + Sync>;

/// Longest path of a socket that leaves room for the draft's name, in bytes (`sun_path` has 108).
const LONGEST_PATH: usize = 100;
/// Longest body of a request, in bytes.
const LONGEST_BODY: usize = 4096;

/// A bound socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Listens at `path`, with mode 0600. A socket file that nobody listens at is replaced; one that a
    /// live process listens at is an error that names it.
    pub fn bind(path: &Path) -> Result<Self> {
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > LONGEST_PATH {
            return Err(Error::SocketPath { path: path.into(), bytes });
        }
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        files::create_private_dir(dir)?;
        let _lock = files::lock_dir(dir)?;
        refuse_if_taken(path)?;

        // Made under another name and renamed: at its own name it never has a wider mode.
        let draft = dir.join(format!(".{}", std::process::id()));
        let _ = std::fs::remove_file(&draft);
        let listener = UnixListener::bind(&draft).map_err(Error::file("create", path))?;
        let ready = std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| std::fs::rename(&draft, path))
            .and_then(|()| std::fs::metadata(path));
        match ready {
            Ok(meta) => {
                Ok(Self { listener, file: SocketFile { path: path.into(), id: (meta.dev(), meta.ino()) } })
            }
            Err(error) => {
                let _ = std::fs::remove_file(&draft);
                Err(Error::file("create", path)(error))
            }
        }
    }

    /// Answers requests until dropped; inside a tokio runtime with I/O and time.
    pub async fn serve(self, source: Source) -> Result<()> {
        let Self { listener, file } = self;
        let listener =
            tokio::net::UnixListener::from_std(listener).map_err(Error::file("listen at", &file.path))?;
        let answer = move |request| {
            let source = Arc::clone(&source);
            async move { answer(request, &source).await }
        };
        http::serve("local API", async || Ok(listener.accept().await?.0), answer).await;
        Ok(())
    }
}

async fn answer(request: Request<Incoming>, source: &Source) -> Answer {
    let path = request.uri().path().to_owned();
    if path == "/v1/status" {
        return match request.method() {
            &Method::GET => look(source, Question::Status).await,
            _ => not_allowed("GET"),
        };
    }
    if path == "/v1/flows" {
        return match request.method() {
            &Method::GET => look(source, Question::Flows).await,
            _ => not_allowed("GET"),
        };
    }
    if path == "/v1/reload" {
        return match request.method() {
            &Method::POST => reload(source).await,
            _ => not_allowed("POST"),
        };
    }
    match path.strip_prefix("/v1/links/") {
        Some(name) if request.method() == Method::POST => link(name, request, source).await,
        Some(_) => not_allowed("POST"),
        None => problem(
            StatusCode::NOT_FOUND,
            "there are only /v1/status, /v1/flows, /v1/links/NAME and /v1/reload here",
        ),
    }
}

async fn look<T: Serialize>(
    source: &Source,
    question: impl FnOnce(oneshot::Sender<T>) -> Question,
) -> Answer {
    ask(source, question).await.map_or_else(no_answer, |found| serialized(&found))
}

async fn link(name: &str, request: Request<Incoming>, source: &Source) -> Answer {
    let bad = |why: String| problem(StatusCode::BAD_REQUEST, &why);
    let body = match Limited::new(request.into_body(), LONGEST_BODY).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return bad(error.to_string()),
    };
    let change: LinkChange = match serde_json::from_slice(&body) {
        Ok(change) => change,
        Err(error) => return bad(error.to_string()),
    };
    match ask(source, |reply| Question::Link { name: name.to_owned(), change, reply }).await {
        Some(Ok(link)) => serialized(&link),
        Some(Err(why)) => problem(StatusCode::NOT_FOUND, &why),
        None => no_answer(),
    }
}

async fn reload(source: &Source) -> Answer {
    match ask(source, Question::Reload).await {
        Some(Ok(reloaded)) => serialized(&reloaded),
        Some(Err(why)) => problem(StatusCode::BAD_REQUEST, &why),
        None => no_answer(),
    }
}

fn no_answer() -> Answer {
    problem(StatusCode::SERVICE_UNAVAILABLE, "the data plane does not answer")
}

fn serialized(value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => json(StatusCode::OK, body),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn not_allowed(method: &'static str) -> Answer {
    let mut response = problem(StatusCode::METHOD_NOT_ALLOWED, &format!("only {method} works here"));
    response.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(method));
    response
}

fn problem(code: StatusCode, why: &str) -> Answer {
    json(code, serde_json::json!({ "error": why }).to_string().into_bytes())
}

fn json(code: StatusCode, body: Vec<u8>) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

/// Clears the way at `path` if nothing lives there.
fn refuse_if_taken(path: &Path) -> Result<()> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::file("create", path)(error)),
    };
    if !meta.file_type().is_socket() {
        return Err(Error::Content {
            path: path.into(),
            expected: "nothing or a unix socket",
            found: "another kind of file".into(),
        });
    }
    match connect_at_once(path) {
        Ok(stream) => {
            let pid = rustix::net::sockopt::socket_peercred(&stream).ok();
            Err(Error::SocketInUse {
                path: path.into(),
                pid: pid.map(|peer| peer.pid.as_raw_nonzero().get()),
            })
        }
        // Nobody listens: a leftover, which the rename will replace.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        // A full backlog belongs to a live process too.
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            Err(Error::SocketInUse { path: path.into(), pid: None })
        }
        Err(error) => Err(Error::file("create", path)(error)),
    }
}

/// Removes the socket's file when dropped, unless another process has put its own there.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.id);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
