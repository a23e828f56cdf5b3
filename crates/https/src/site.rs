//! The web site for clients without credentials: files, the pages of another server, or nothing.
//!
//! Files are answered as Caddy answers them, field by field, so that a server with a site is one of many
//! (docs/security.md says what differs, and the test `visitors` compares).
//!
//! Always holds: all versions of HTTP answer alike; concurrent answers and their memory are bounded; nothing
//! in an answer reveals that there is a tunnel at this address; a site that replaces another one while the
//! server runs counts for the next request.

mod files;
mod http3;
mod upstream;

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{ALLOW, ALT_SVC, CONTENT_LENGTH, DATE, LAST_MODIFIED, SERVER},
};
use hyper::body::Body as _;
use mpvpn_config::SiteContent;
use mpvpn_error::RunError;
use mpvpn_input::shared::Shared;
use mpvpn_os::folder::Folder;
use tokio::sync::Semaphore;

use super::{Body, full_body};
pub use http3::{Deliver, ResponsePart};

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
        let server = server.unwrap_or(HeaderValue::from_static(mpvpn_config::DEFAULT_SERVER_FIELD));
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

    /// Answers a request from `peer`. `quic_port`: where HTTP/3 is offered, if the request came by TCP.
    pub(super) async fn answer<B>(
        &self,
        request: Request<B>,
        peer: SocketAddr,
        quic_port: Option<u16>,
    ) -> Response<Body>
    where
        B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let (now, version) = (self.now.now(), request.version());
        let is_head = request.method() == Method::HEAD;
        let mut response = match &now.content {
            Content::Files(folder) => files::answer(folder, &request, &self.answer_slots).await,
            Content::Upstream(authority) if request.method() != Method::CONNECT => {
                upstream::answer(authority, request, peer, &self.answer_slots).await
            }
            Content::Nothing | Content::Upstream(_) if reads(request.method()) => {
                status_answer(StatusCode::NOT_FOUND)
            }
            Content::Nothing | Content::Upstream(_) => method_not_allowed(),
        };
        // Caddy says the length of nothing over HTTP/3, but not over TCP.
        let has_no_content = is_head || response.status() == StatusCode::NOT_MODIFIED;
        if (version == Version::HTTP_3 || !has_no_content) && response.body().is_end_stream() {
            response.headers_mut().entry(CONTENT_LENGTH).or_insert(HeaderValue::from_static("0"));
        }
        self.complete_headers(response.headers_mut(), version, quic_port);
        response
    }

    /// Adds the fields that all responses have, and puts the fields into the order in which Caddy sends them:
    /// sorted by name, and behind them those that its HTTP library adds.
    pub(super) fn complete_headers(&self, headers: &mut HeaderMap, version: Version, quic_port: Option<u16>) {
        headers.entry(DATE).or_insert_with(date);
        headers.entry(SERVER).or_insert_with(|| self.now.now().server.clone());
        let http3 =
            quic_port.and_then(|port| HeaderValue::from_str(&format!("h3=\":{port}\"; ma=2592000")).ok());
        headers.extend(http3.map(|http3| (ALT_SVC, http3)));
        let is_page = headers.contains_key(LAST_MODIFIED);
        let place = |name: &HeaderName| match (version, name) {
            (Version::HTTP_3, _) => 0,
            (Version::HTTP_2, name) if *name == CONTENT_LENGTH => 1,
            (Version::HTTP_2, name) if *name == DATE => 2,
            (_, name) if *name == DATE => 1,
            (_, name) if *name == CONTENT_LENGTH && !is_page => 2,
            _ => 0,
        };
        let mut fields: Vec<_> = headers.iter().collect();
        fields.sort_by_key(|(name, _)| (place(name), name.as_str()));
        *headers = fields.into_iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    }
}

/// The value of the field `date` now.
pub(super) fn date() -> HeaderValue {
    let now = httpdate::fmt_http_date(SystemTime::now());
    HeaderValue::from_str(&now).unwrap_or(HeaderValue::from_static(""))
}

/// Whether a request reads a page.
fn reads(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

fn method_not_allowed() -> Response<Body> {
    let mut response = status_answer(StatusCode::METHOD_NOT_ALLOWED);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

/// A response with the status only.
fn status_answer(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(full_body(""));
    *response.status_mut() = status;
    response
}
