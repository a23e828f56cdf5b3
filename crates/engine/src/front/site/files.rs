//! A site of files (RFC 9110 §9.3.1, §9.3.2): GET and HEAD, `index.html` for a folder, dates.
//!
//! Always holds: no file or folder whose name starts with a dot is shown, and none outside of the folder; disks are waited for on
//! a few threads beside this one.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_TYPE, IF_MODIFIED_SINCE, LAST_MODIFIED, LOCATION},
};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use mpvpn_os::folder::{Entry, Folder};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinHandle, spawn_blocking},
};

use super::{nothing, page};
use crate::front::{Body, plain};

/// The file of a folder.
const INDEX: &str = "index.html";
/// Bytes read at a time.
const PIECE: u64 = 64 << 10;

/// What is found for a path.
enum Found {
    File {
        file: File,
        length: u64,
        modified: Option<SystemTime>,
        kind: &'static str,
    },
    /// A folder, which was asked for as if it were a file.
    Folder,
    Nothing,
}

/// Answers a request.
pub(super) async fn answer<B>(
    folder: &Folder,
    request: &Request<B>,
    room: &Arc<Semaphore>,
) -> Response<Body> {
    let (method, path) = (request.method(), request.uri().path());
    let relative = match method {
        &Method::GET | &Method::HEAD => relative(path),
        _ => return nothing(method).map(plain),
    };
    let Ok(permit) = Arc::clone(room).try_acquire_owned() else {
        return page(method, StatusCode::SERVICE_UNAVAILABLE).map(plain);
    };
    let Some(relative) = relative else { return nothing(method).map(plain) };
    let folder = folder.clone();
    let found = spawn_blocking(move || find(&folder, &relative)).await.unwrap_or(Found::Nothing);
    let (file, length, modified, kind) = match found {
        Found::File { file, length, modified, kind } => (file, length, modified, kind),
        Found::Folder => return moved(method, path),
        Found::Nothing => return nothing(method).map(plain),
    };
    let is_old = modified.is_some_and(|modified| is_known(request, modified));
    let status = if is_old { StatusCode::NOT_MODIFIED } else { StatusCode::OK };
    let body = match is_old || method == Method::HEAD {
        true => plain(""),
        false => {
            FileBody { file: Arc::new(file), at: 0, length, reading: None, _permit: permit }.boxed_unsync()
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    if !is_old {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(CONTENT_LENGTH, length.into());
    }
    let date = modified.map(httpdate::fmt_http_date);
    if let Some(date) = date.and_then(|date| HeaderValue::from_str(&date).ok()) {
        headers.insert(LAST_MODIFIED, date);
    }
    response
}

/// Whether the client has what was last modified then (RFC 9110 §13.1.3).
fn is_known<B>(request: &Request<B>, modified: SystemTime) -> bool {
    let given = request.headers().get(IF_MODIFIED_SINCE).and_then(|value| value.to_str().ok());
    let seconds =
        |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    given
        .and_then(|date| httpdate::parse_http_date(date).ok())
        .is_some_and(|date| seconds(modified) <= seconds(date))
}

/// The links of a folder's page are relative to the folder.
fn moved(method: &Method, path: &str) -> Response<Body> {
    let mut response = page(method, StatusCode::MOVED_PERMANENTLY).map(plain);
    match HeaderValue::from_str(&format!("{path}/")) {
        Ok(location) => drop(response.headers_mut().insert(LOCATION, location)),
        Err(_) => return nothing(method).map(plain),
    }
    response
}

/// The path of a file below the folder; `None` for what is never shown.
fn relative(path: &str) -> Option<PathBuf> {
    let mut relative = PathBuf::new();
    let decoded = decode(path)?;
    let rest = decoded.strip_prefix('/')?;
    for part in rest.split('/').filter(|part| !part.is_empty()) {
        if part.starts_with('.') || part.contains(['\0', '\\']) {
            return None;
        }
        relative.push(part);
    }
    if rest.is_empty() || rest.ends_with('/') {
        relative.push(INDEX);
    }
    Some(relative)
}

/// Takes percent-encoding off (RFC 3986 §2.1). An encoded slash would be one of a name, which no file has.
fn decode(path: &str) -> Option<String> {
    let mut parts = path.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        let byte = u8::from_str_radix(digits, 16).ok().filter(|byte| *byte != b'/')?;
        bytes.push(byte);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

fn find(folder: &Folder, relative: &Path) -> Found {
    match folder.entry(relative) {
        Ok(Entry::File(file, metadata)) => Found::File {
            file,
            length: metadata.len(),
            modified: metadata.modified().ok(),
            kind: kind(relative),
        },
        Ok(Entry::Folder) => Found::Folder,
        Err(_) => Found::Nothing,
    }
}

/// The media type of a file.
fn kind(path: &Path) -> &'static str {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match &extension.to_ascii_lowercase()[..] {
        "html" | "htm" => "text/html",
        "css" => "text/css",
        "js" | "mjs" => "text/javascript",
        "json" => "application/json",
        "txt" => "text/plain",
        "md" => "text/markdown",
        "xml" => "text/xml",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "avif" => "image/avif",
        "ico" => "image/x-icon",
        "woff" => "font/woff",
        "woff2" => "font/woff2",
        "ttf" => "font/ttf",
        "wasm" => "application/wasm",
        "pdf" => "application/pdf",
        "zip" => "application/zip",
        "gz" => "application/gzip",
        "mp3" => "audio/mpeg",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        _ => "application/octet-stream",
    }
}

/// The content of a file, read as it is sent.
struct FileBody {
    file: Arc<File>,
    at: u64,
    length: u64,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
    _permit: OwnedSemaphorePermit,
}

impl HttpBody for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        let (file, at, count) = (Arc::clone(&self.file), self.at, PIECE.min(self.length - self.at));
        let reading = self.reading.get_or_insert_with(|| spawn_blocking(move || read(&file, at, count)));
        let read = ready!(Pin::new(reading).poll(cx));
        self.reading = None;
        let data = read.unwrap_or_else(|panicked| Err(io::Error::other(panicked)))?;
        self.at += data.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.at >= self.length
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.length - self.at)
    }
}

fn read(file: &File, at: u64, count: u64) -> io::Result<Bytes> {
    // At most a piece.
    let mut data = vec![0; count as usize];
    // A file that has become shorter cannot be what was promised.
    file.read_exact_at(&mut data, at)?;
    Ok(data.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_to_files_that_may_be_shown() {
        let path = |path: &str| relative(path).map(|path| path.to_str().unwrap().to_owned());
        assert_eq!(path("/").as_deref(), Some("index.html"));
        assert_eq!(path("/a//b/").as_deref(), Some("a/b/index.html"));
        assert_eq!(path("/a%20b.png").as_deref(), Some("a b.png"));
        for never in [
            "",
            "*",
            "/.git/config",
            "/a/.htaccess",
            "/../etc/passwd",
            "/%2e%2e/etc/passwd",
            "/a%2f..%2fb",
            "/%",
            "/%2",
            "/%zz",
            "/%00",
            "/a\\..\\b",
            "/%ff",
            "/%+1",
        ] {
            assert_eq!(path(never), None, "{never}");
        }
    }
}
