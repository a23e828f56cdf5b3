//! Serves files by tower-http's `ServeDir`: GET and HEAD, `index.html` of folders, dates, entity tags, ranges
//! (RFC 9110).
//!
//! Always holds: names that start with a dot, and files outside of the folder, are not served; a response has
//! as many bytes as its Content-Length, even if the file changes; other threads wait for the disk.

use std::{
    fs::Metadata,
    future::{Ready, ready},
    io::{self, SeekFrom},
    path::{Component, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{self, Context, Poll},
    time::SystemTime,
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{
        ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH, IF_RANGE,
        LAST_MODIFIED, LOCATION, RANGE, VARY, X_CONTENT_TYPE_OPTIONS,
    },
};
use http_body_util::{BodyExt, Empty};
use hyper::ext::ReasonPhrase;
use mpvpn_os::folder::{Entry, Folder};
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt, AsyncSeek, ReadBuf, Take},
    sync::Semaphore,
    task::spawn_blocking,
};
use tower_http::services::{
    ServeDir,
    fs::{self, Backend, ServeFileSystemResponseBody},
};

use super::{method_not_allowed, reads, status_answer};
use crate::{Body, full_body};

/// The content of a response to a range that the file does not have.
const WRONG_RANGE: &str = "invalid range: failed to overlap\n";

/// Answers a request.
pub(super) async fn answer<B>(
    folder: &Folder,
    request: &Request<B>,
    answer_slots: &Arc<Semaphore>,
) -> Response<Body> {
    let method = request.method();
    let path = resolved(request.uri().path());
    if path.is_empty() {
        return redirect(method, "/");
    }
    if path.contains("%00") {
        return status_answer(StatusCode::BAD_REQUEST);
    }
    let Ok(permit) = Arc::clone(answer_slots).try_acquire_owned() else {
        return status_answer(StatusCode::SERVICE_UNAVAILABLE);
    };
    let reads = reads(method);
    let fields = if reads { conditions(request.headers()) } else { HeaderMap::new() };
    let asked = if reads { method } else { &Method::HEAD };
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let Some(found) = find(folder, asked, &path, fields).await else {
        let file = path.trim_end_matches('/');
        return match find(folder, &Method::HEAD, file, HeaderMap::new()).await {
            Some(found) if path.ends_with('/') && found.status() == StatusCode::OK => {
                redirect(method, &format!("/{}{query}", file.trim_start_matches('/')))
            }
            _ => status_answer(StatusCode::NOT_FOUND),
        };
    };
    let mut response = match found.status() {
        // With two slashes in front it would name another host (RFC 3986 §4.2).
        StatusCode::TEMPORARY_REDIRECT => {
            return redirect(method, &format!("/{}/{query}", path.trim_start_matches('/')));
        }
        _ if !reads => method_not_allowed(),
        StatusCode::RANGE_NOT_SATISFIABLE => {
            let mut response = text(method, found.status(), "text/plain; charset=utf-8", WRONG_RANGE.into());
            let range = found.headers().get(CONTENT_RANGE).cloned();
            response.headers_mut().extend(range.map(|range| (CONTENT_RANGE, range)));
            response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
            let reason = ReasonPhrase::from_static(b"Requested Range Not Satisfiable");
            response.extensions_mut().insert(reason);
            response
        }
        _ => page(found.map(|body| {
            let held = body.map_frame(move |frame| {
                // Holds the permit until the whole body has been read.
                let _held = &permit;
                frame
            });
            held.boxed_unsync()
        })),
    };
    response.headers_mut().insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    response
}

/// The response of `ServeDir`, unless there is no such file.
async fn find(
    folder: &Folder,
    method: &Method,
    path: &str,
    fields: HeaderMap,
) -> Option<Response<ServeFileSystemResponseBody>> {
    let mut asked = Request::new(Empty::<Bytes>::new());
    *asked.method_mut() = method.clone();
    *asked.headers_mut() = fields;
    *asked.uri_mut() = path.parse().ok()?;
    let found = ServeDir::with_backend("", VisibleFiles(folder.clone())).try_call(asked).await.ok()?;
    (found.status() != StatusCode::NOT_FOUND).then_some(found)
}

/// The fields of a request that decide about the content, as `ServeDir` understands them. It ignores
/// If-Range, and would send a part of another version of the file (RFC 9110 §13.1.5).
fn conditions(headers: &HeaderMap) -> HeaderMap {
    let mut conditions = headers.clone();
    if conditions.remove(IF_RANGE).is_some() {
        conditions.remove(RANGE);
    }
    for name in [IF_MATCH, IF_NONE_MATCH] {
        if let Some(value) = conditions.get_mut(&name)
            && let Some(tags) = value.to_str().ok().map(|tags| {
                let tags: Vec<_> = tags.split(',').map(|tag| served_tag(tag.trim())).collect();
                tags.join(", ")
            })
            && let Ok(tags) = tags.parse()
        {
            *value = tags;
        }
    }
    conditions
}

/// The entity tag of Caddy (time of the change in nanoseconds, length) for that of `ServeDir` (seconds,
/// nanoseconds, length).
fn shown_tag(tag: &str) -> Option<String> {
    let (time, length) = tag.trim_matches('"').split_once('-')?;
    let (seconds, nanoseconds) = time.split_once('.')?;
    let [seconds, nanoseconds, length] =
        [seconds, nanoseconds, length].map(|digits| u64::from_str_radix(digits, 16));
    let time = seconds.ok()?.checked_mul(1_000_000_000)?.checked_add(nanoseconds.ok()?)?;
    Some(format!("\"{}-{}\"", base36(time), base36(length.ok()?)))
}

/// The reverse of [`shown_tag`]; other tags stay as they are.
fn served_tag(tag: &str) -> String {
    let served = || {
        let (weak, tag) = tag.strip_prefix("W/").map_or(("", tag), |tag| ("W/", tag));
        let (time, length) = tag.strip_prefix('"')?.strip_suffix('"')?.split_once('-')?;
        let [time, length] = [time, length].map(|digits| u64::from_str_radix(digits, 36));
        let (time, length) = (time.ok()?, length.ok()?);
        Some(format!("{weak}\"{:x}.{:08x}-{length:x}\"", time / 1_000_000_000, time % 1_000_000_000))
    };
    served().unwrap_or_else(|| tag.to_owned())
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    while number > 0 || digits.is_empty() {
        digits.push(char::from_digit((number % 36) as u32, 36).unwrap_or_default());
        number /= 36;
    }
    digits.iter().rev().collect()
}

/// The fields of a file as Caddy has them.
fn page(mut found: Response<Body>) -> Response<Body> {
    let status = found.status();
    let headers = found.headers_mut();
    let tag = headers.get(ETAG).and_then(|tag| shown_tag(tag.to_str().ok()?)?.parse().ok());
    if let Some(tag) = tag {
        headers.insert(ETAG, tag);
    }
    if let Some(kind) = headers.get_mut(CONTENT_TYPE)
        && kind.as_bytes().starts_with(b"text/")
        && let Ok(with_charset) = [kind.as_bytes(), b"; charset=utf-8"].concat().try_into()
    {
        *kind = with_charset;
    }
    if status == StatusCode::NOT_MODIFIED {
        for name in [LAST_MODIFIED, CONTENT_TYPE, CONTENT_LENGTH, ACCEPT_RANGES] {
            headers.remove(name);
        }
    }
    found
}

/// The path without the segments `.` and `..` (RFC 3986 §5.2.4).
fn resolved(path: &str) -> String {
    let mut segments = Vec::new();
    for segment in path.split('/') {
        match segment.to_ascii_lowercase().replace("%2e", ".").as_str() {
            "." => {}
            ".." if segments.len() > 1 => drop(segments.pop()),
            ".." => {}
            _ => segments.push(segment),
        }
    }
    segments.join("/")
}

/// Redirects to the name of a file without a slash, or to that of a folder with one, to which the relative
/// links of its page refer.
fn redirect(method: &Method, to: &str) -> Response<Body> {
    let Ok(location) = HeaderValue::from_str(to) else { return status_answer(StatusCode::NOT_FOUND) };
    let shown = to.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;");
    let link = format!("<a href=\"{}\">Permanent Redirect</a>.\n\n", shown.replace('\'', "&#39;"));
    let status = StatusCode::PERMANENT_REDIRECT;
    let mut response = match *method {
        Method::GET | Method::HEAD => text(method, status, "text/html; charset=utf-8", link),
        _ => status_answer(status),
    };
    response.headers_mut().insert(LOCATION, location);
    response
}

fn text(method: &Method, status: StatusCode, kind: &'static str, content: String) -> Response<Body> {
    let mut response = status_answer(status);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if *method != Method::HEAD {
        response.headers_mut().insert(CONTENT_LENGTH, content.len().into());
        *response.body_mut() = full_body(content);
    }
    response
}

/// The backend of `ServeDir`: files beneath the folder that are not hidden.
#[derive(Clone, Debug)]
struct VisibleFiles(Folder);

impl VisibleFiles {
    async fn entry(self, path: PathBuf) -> io::Result<Entry> {
        let is_hidden =
            |part| matches!(part, Component::Normal(name) if name.as_encoded_bytes().starts_with(b"."));
        if path.components().any(is_hidden) {
            return Err(io::ErrorKind::NotFound.into());
        }
        spawn_blocking(move || self.0.entry(&path)).await?.map_err(|_| io::ErrorKind::NotFound.into())
    }
}

impl Backend for VisibleFiles {
    type File = OpenFile;
    type Metadata = EntryMetadata;
    type OpenFuture = Pin<Box<dyn Future<Output = io::Result<OpenFile>> + Send>>;
    type MetadataFuture = Pin<Box<dyn Future<Output = io::Result<EntryMetadata>> + Send>>;

    fn open(&self, path: PathBuf) -> Self::OpenFuture {
        let entry = self.clone().entry(path);
        Box::pin(async {
            match entry.await? {
                Entry::File(file, metadata) => {
                    Ok(OpenFile { file: File::from_std(file).take(metadata.len()), metadata })
                }
                Entry::Folder => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    fn metadata(&self, path: PathBuf) -> Self::MetadataFuture {
        let entry = self.clone().entry(path);
        Box::pin(async {
            match entry.await? {
                Entry::File(_, metadata) => Ok(EntryMetadata(Some(metadata))),
                Entry::Folder => Ok(EntryMetadata(None)),
            }
        })
    }
}

/// The metadata of a file, or `None` for a folder.
struct EntryMetadata(Option<Metadata>);

impl fs::Metadata for EntryMetadata {
    fn is_dir(&self) -> bool {
        self.0.is_none()
    }

    fn modified(&self) -> io::Result<SystemTime> {
        self.0.as_ref().map_or(Err(io::ErrorKind::IsADirectory.into()), Metadata::modified)
    }

    fn len(&self) -> u64 {
        self.0.as_ref().map_or(0, Metadata::len)
    }
}

/// An open file, read up to the length it had when it was opened.
struct OpenFile {
    file: Take<File>,
    metadata: Metadata,
}

impl fs::File for OpenFile {
    type Metadata = EntryMetadata;
    type MetadataFuture<'a> = Ready<io::Result<EntryMetadata>>;

    fn metadata(&self) -> Self::MetadataFuture<'_> {
        ready(Ok(EntryMetadata(Some(self.metadata.clone()))))
    }
}

impl AsyncRead for OpenFile {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        task::ready!(Pin::new(&mut self.file).poll_read(cx, buf))?;
        match buf.filled().len() == before && self.file.limit() > 0 && buf.remaining() > 0 {
            // The file has become shorter than its Content-Length.
            true => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
            false => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncSeek for OpenFile {
    fn start_seek(mut self: Pin<&mut Self>, position: SeekFrom) -> io::Result<()> {
        Pin::new(self.file.get_mut()).start_seek(position)
    }

    fn poll_complete(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        let at = task::ready!(Pin::new(self.file.get_mut()).poll_complete(cx))?;
        let left = self.metadata.len().saturating_sub(at);
        self.file.set_limit(left);
        Poll::Ready(Ok(at))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, time::Duration};

    use http::Uri;
    use tempfile::TempDir;

    use super::*;

    /// A folder with a page, hidden files, and a file outside of it.
    fn site() -> (TempDir, Folder) {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("www");
        for folder in ["sub", "a", ".git", "\u{e9}"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["index.html", "page", ".git/config", "a/.htaccess", "../secret"] {
            fs::write(root.join(file), "<p>hello").unwrap();
        }
        symlink("../secret", root.join("out")).unwrap();
        let folder = Folder::new(&root).unwrap();
        (home, folder)
    }

    async fn get(folder: &Folder, path: &str, fields: &[(&'static str, &str)]) -> Response<Bytes> {
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_maybe_shared(path.to_owned().into_bytes()).unwrap();
        for (name, value) in fields {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let (head, body) = answer(folder, &request, &Arc::new(Semaphore::new(1))).await.into_parts();
        Response::from_parts(head, body.collect().await.unwrap().to_bytes())
    }

    #[tokio::test]
    async fn paths_lead_to_files_that_may_be_shown_and_to_no_others() {
        let (_home, folder) = site();
        for path in ["/", "/page", "//page", "/%70age", "/a/../page"] {
            let is_shown = get(&folder, path, &[]).await.status() == 200;
            assert!(is_shown, "{path}");
        }
        for never in [
            "/.git/config",
            "/.git/",
            "/.git",
            "/a/.htaccess",
            "/../secret",
            "/%2e%2e/secret",
            "/a%2f..%2f..%2fsecret",
            "/out",
            "/%",
            "/%2",
            "/%zz",
            "/%ff",
            "/%+1",
            "/sub/",
            "*",
        ] {
            assert_eq!(get(&folder, never, &[]).await.status(), 404, "{never}");
        }
    }

    #[tokio::test]
    async fn a_folder_is_named_with_a_slash_and_never_as_another_host() {
        let (_home, folder) = site();
        for path in ["/sub", "//sub", "///sub"] {
            let moved = get(&folder, path, &[]).await;
            assert_eq!(
                (moved.status().as_u16(), &moved.headers()["location"]),
                (308, &"/sub/".parse().unwrap()),
                "{path}"
            );
        }
        assert_eq!(get(&folder, "/\u{e9}", &[]).await.status(), 308, "not ASCII");
        assert_eq!(get(&folder, "/%C3%A9", &[]).await.headers()["location"], "/%C3%A9/");
    }

    #[tokio::test]
    async fn a_part_of_a_file_is_sent_and_what_the_client_has_is_not() {
        let (_home, folder) = site();
        let part = get(&folder, "/page", &[("range", "bytes=3-5")]).await;
        assert_eq!(
            (part.status().as_u16(), &part.headers()["content-range"]),
            (206, &"bytes 3-5/8".parse().unwrap())
        );
        assert_eq!(part.body(), "hel");
        assert_eq!(get(&folder, "/page", &[("range", "bytes=9-")]).await.status(), 416);
        let conditional = [("range", "bytes=3-5"), ("if-range", "\"of another version\"")];
        assert_eq!(get(&folder, "/page", &conditional).await.status(), 200);
        let whole = get(&folder, "/page", &[]).await;
        assert_eq!((whole.status().as_u16(), &whole.body()[..]), (200, &b"<p>hello"[..]));
        let tag = whole.headers()["etag"].to_str().unwrap();
        assert_eq!(get(&folder, "/page", &[("if-none-match", tag)]).await.status(), 304);
    }

    #[tokio::test]
    async fn as_much_is_sent_as_was_promised_or_an_error() {
        let (home, folder) = site();
        let answer_slots = Arc::new(Semaphore::new(1));
        let path = home.path().join("www/page");
        for (now, sent) in [("<p>hello and more", Some("<p>hello")), ("<p>", None)] {
            fs::write(&path, "<p>hello").unwrap();
            let mut request = Request::new(());
            *request.uri_mut() = Uri::from_static("/page");
            let answer = answer(&folder, &request, &answer_slots).await;
            assert_eq!(answer.headers()["content-length"], "8");
            fs::OpenOptions::new().write(true).truncate(true).open(&path).unwrap();
            fs::write(&path, now).unwrap();
            assert_eq!(answer_slots.available_permits(), 0);
            let body = answer.into_body().collect().await.ok().map(|body| body.to_bytes());
            assert_eq!(body.as_deref(), sent.map(str::as_bytes), "{now}");
            tokio::time::timeout(Duration::from_secs(5), answer_slots.acquire())
                .await
                .unwrap()
                .unwrap()
                .forget();
            answer_slots.add_permits(1);
        }
    }
}
