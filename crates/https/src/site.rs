//! The web site for clients without credentials: files, the pages of another server, or nothing.
//!
//! Always holds: all versions of HTTP answer alike, as far as they have pages; concurrent answers and their
//! memory are bounded; nothing in an answer reveals that there is a tunnel at this address; a site that
//! replaces another one while the server runs counts for the next request.

mod files;
mod upstream;

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, DATE, SERVER},
};
use mpvpn_config::SiteContent;
use mpvpn_error::RunError;
use mpvpn_input::shared::Shared;
use mpvpn_masque::headers::Headers;
use mpvpn_os::folder::Folder;
use tokio::sync::Semaphore;

use super::{Body, full_body};

/// Concurrent answers with content. More: memory and disk load for strangers. Fewer: 503. Chosen.
const MAX_ANSWERS_IN_PROGRESS: usize = 128;

/// The error type of bodies.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The site of a server. Clones see the same.
#[derive(Clone, Debug)]
pub struct Site {
    now: Shared<ConfiguredSite>,
    answer_slots: Arc<Semaphore>,
}

/// The site of a configuration.
#[derive(Debug)]
pub struct ConfiguredSite {
    content: Content,
    server: HeaderValue,
    /// Whether wrong credentials are answered like missing ones.
    hide: bool,
}

#[derive(Debug)]
enum Content {
    Nothing,
    Files(Folder),
    Upstream(String),
}

impl ConfiguredSite {
    /// The site of a configuration.
    ///
    /// # Errors
    /// If the folder does not exist.
    pub fn new(config: &mpvpn_config::Site) -> Result<Self, mpvpn_input::Error> {
        let content = match &config.content {
            SiteContent::Nothing => Content::Nothing,
            SiteContent::Root(root) => {
                let error = |source| mpvpn_input::Error::File { doing: "open", path: root.clone(), source };
                Content::Files(Folder::new(root).map_err(error)?)
            }
            SiteContent::Upstream(authority) => Content::Upstream(authority.clone()),
        };
        let server = HeaderValue::from_str(&config.server);
        let server = server.unwrap_or(HeaderValue::from_static("nginx"));
        Ok(Self { content, server, hide: config.hide })
    }
}

impl Site {
    /// The site of a configuration.
    ///
    /// # Errors
    /// If the folder does not exist.
    pub fn new(config: &mpvpn_config::Site) -> Result<Self, RunError> {
        let now = Shared::from(ConfiguredSite::new(config)?);
        Ok(Self { now, answer_slots: Arc::new(Semaphore::new(MAX_ANSWERS_IN_PROGRESS)) })
    }

    /// Answers like `site` from now on.
    pub fn replace(&self, site: ConfiguredSite) {
        self.now.replace(site);
    }

    /// Whether wrong credentials are answered like missing ones.
    pub(super) fn hides_credentials(&self) -> bool {
        self.now.now().hide
    }

    /// Answers a request from `peer`.
    pub(super) async fn answer<B>(&self, request: Request<B>, peer: SocketAddr) -> Response<Body>
    where
        B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let now = self.now.now();
        let mut response = match &now.content {
            _ if request.method() == Method::CONNECT => empty_site_answer(request.method()).map(full_body),
            Content::Nothing => empty_site_answer(request.method()).map(full_body),
            Content::Files(folder) => files::answer(folder, &request, &self.answer_slots).await,
            Content::Upstream(authority) => {
                upstream::answer(authority, request, peer, &self.answer_slots).await
            }
        };
        self.add_common_headers(response.headers_mut());
        response
    }

    /// Adds the Date and Server fields.
    pub(super) fn add_common_headers(&self, headers: &mut HeaderMap) {
        if let Ok(now) = HeaderValue::from_str(&httpdate::fmt_http_date(SystemTime::now())) {
            headers.entry(DATE).or_insert(now);
        }
        headers.entry(SERVER).or_insert_with(|| self.now.now().server.clone());
    }

    /// The response over HTTP/3, where the site has no pages.
    pub fn http3_answer(&self, method: &str) -> (Headers, Bytes) {
        let method = Method::from_bytes(method.as_bytes()).unwrap_or(Method::OPTIONS);
        let mut response = empty_site_answer(&method);
        self.add_common_headers(response.headers_mut());
        let mut headers = Headers::response(response.status().as_u16());
        for (name, value) in response.headers() {
            headers.push(name.as_str().to_owned(), value.as_bytes().to_vec());
        }
        (headers, response.into_body())
    }
}

/// The response of a site without content.
fn empty_site_answer(method: &Method) -> Response<Bytes> {
    match *method {
        Method::GET | Method::HEAD => status_page(method, StatusCode::NOT_FOUND),
        _ => {
            let mut response = status_page(method, StatusCode::METHOD_NOT_ALLOWED);
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        }
    }
}

/// A page with the status only, as nginx has it.
fn status_page(method: &Method, status: StatusCode) -> Response<Bytes> {
    let status_text = format!("{} {}", status.as_str(), status.canonical_reason().unwrap_or("Error"));
    let text = format!(
        "<html>\r\n<head><title>{status_text}</title></head>\r\n<body>\r\n<center><h1>{status_text}</h1></center>\r\n</body>\r\n</html>\r\n"
    );
    let length = HeaderValue::from(text.len());
    let mut response = Response::new(if method == Method::HEAD { Bytes::new() } else { text.into() });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html"));
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}
