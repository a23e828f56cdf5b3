//! The paths of the dashboard.
//!
//! In: a request. Out: its response. Always holds: each request names a host of the dashboard; all but the
//! page's files and the log-in have a session; what is read of a body is bounded.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use http_body_util::{BodyExt, Limited};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::Incoming,
    header::{self, HeaderName, HeaderValue},
};
use mpvpn_api::{ControlRequest, ask_data_plane};
use mpvpn_http::{HttpResponse, NoTimeLimit};
use mpvpn_input::role::Role;
use mpvpn_status::{
    events::{Entry, Event},
    link_change::LinkChange,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::{
    Ends, Site, actions, event_stream,
    history::{Answer, Span},
    logins::{LoginRefusal, NewSession, SessionId},
    origin::Host,
    page, response,
    secret::Secret,
    view::{View, query_pairs, word},
};

/// Longest body of a request (bytes): many times the longest of the page. Longer: memory for strangers.
const MAX_BODY_BYTES: usize = 4096;
/// Events in a history: what a time axis can show. More: larger answers; fewer: the beginning of a span has
/// none.
const MAX_HISTORY_EVENTS: usize = 500;
/// The token of a session in a request.
const TOKEN_FIELD: HeaderName = HeaderName::from_static("x-csrf-token");

/// Why a request is refused.
type Refusal = (StatusCode, String);

fn refuse<T>(code: StatusCode, why: impl Into<String>) -> Result<T, Refusal> {
    Err((code, why.into()))
}

/// Answers a request that came over a connection with these ends.
pub(crate) async fn answer(site: Arc<Site>, ends: Ends, request: Request<Incoming>) -> HttpResponse {
    let answered = route(site, ends, request).await;
    answered.unwrap_or_else(|(code, why)| response::error(code, &why))
}

async fn route(site: Arc<Site>, ends: Ends, request: Request<Incoming>) -> Result<HttpResponse, Refusal> {
    let (path, method) = (request.uri().path().to_owned(), request.method().clone());
    let is_own_name = |name: &str| site.tls.as_ref().is_some_and(|tls| tls.certificates.has_name(name));
    let host = Host::of(request.headers(), ends.local, is_own_name)
        .or_else(|why| refuse(StatusCode::MISDIRECTED_REQUEST, why))?;
    if let Some((content, media_type)) = page::file(&path) {
        return match method {
            Method::GET => Ok(response::file(content, media_type)),
            _ => refuse(StatusCode::METHOD_NOT_ALLOWED, "only GET works here"),
        };
    }
    let is_post = method == Method::POST;
    host.check_origin(request.headers(), site.scheme(), is_post)
        .or_else(|why| refuse(StatusCode::FORBIDDEN, why))?;
    if (is_post, path.as_str()) == (true, "/api/login") {
        return site.log_in(ends, request).await;
    }
    let session = site.session(&request)?;
    match (method.as_str(), path.as_str()) {
        ("GET", "/api/session") => Ok(response::json(&site.about())),
        ("GET", "/api/live") => site.live(session, &request),
        ("GET", "/api/history") => site.history_of(&request),
        ("GET", "/api/flows") => reply(ask_data_plane(&site.source, ControlRequest::Flows).await),
        ("GET", "/api/users") => {
            let config = site.server_with_users()?;
            let connected = site.live.sessions_of_users().await;
            outcome(actions::blocking(move || actions::list(&config, &connected)).await)
        }
        ("POST", "/api/logout") => {
            site.shared.logins().log_out(session);
            Ok(response::json(&json!({})))
        }
        ("POST", "/api/link") => {
            let LinkRequest { link, set } = body(request).await?;
            if set.is_empty() {
                return refuse(
                    StatusCode::BAD_REQUEST,
                    "`set` names no setting: see `mpvpn link set --help`",
                );
            }
            let ask = |reply| ControlRequest::Link(link, set, reply);
            match ask_data_plane(&site.source, ask).await {
                Some(Err(why)) => refuse(StatusCode::BAD_REQUEST, why),
                found => reply(found.and_then(Result::ok)),
            }
        }
        ("POST", path) => match path.strip_prefix("/api/user/").and_then(word::<actions::UserAction>) {
            Some(action) => {
                let (config, given) = (site.server_with_users()?, body(request).await?);
                outcome(actions::blocking(move || action.perform(&config, given)).await)
            }
            None => refuse(StatusCode::NOT_FOUND, "there is no such path"),
        },
        _ => refuse(StatusCode::NOT_FOUND, "there is no such path, or not for this method"),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkRequest {
    link: String,
    set: LinkChange,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoginRequest {
    code: String,
}

/// The answer of `GET /api/session`.
#[derive(Serialize)]
struct About<'a> {
    role: Role,
    name: &'a str,
    version: &'static str,
    /// Whether there are users, whom `/api/users` tells.
    users: bool,
}

/// The answer of `GET /api/history`.
#[derive(Serialize)]
struct HistoryAnswer<'a> {
    #[serde(flatten)]
    answer: Answer<'a>,
    events: Vec<ListedEvent>,
}

/// An event at the time axis: as `mpvpn events --json` prints it, and what the axis needs.
#[derive(Serialize)]
struct ListedEvent {
    #[serde(flatten)]
    entry: Entry,
    /// When it happened last (Unix time, ms).
    time_ms: u64,
    level: &'static str,
}

impl From<Entry> for ListedEvent {
    fn from(entry: Entry) -> Self {
        let since = entry.last.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let level = entry.sentence.event.level_name();
        Self { entry, time_ms: since.as_millis() as u64, level }
    }
}

impl Site {
    async fn log_in(&self, ends: Ends, request: Request<Incoming>) -> Result<HttpResponse, Refusal> {
        let LoginRequest { code } = body(request).await?;
        let secret = || {
            Secret::generate().or_else(|error| refuse(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
        };
        let new = NewSession { cookie: secret()?, token: secret()? };
        let (now, network) = (Instant::now(), ends.network);
        let logged_in = self.shared.logins().log_in(now, network, &code, &new);
        if let Err(refusal) = logged_in {
            if let Some(before) = self.refusals.on_refused(now, network) {
                let network = network.to_string().into();
                self.reporter.report(Event::DashboardLoginRefused { network, before });
            }
            return match refusal {
                LoginRefusal::Unknown => refuse(
                    StatusCode::FORBIDDEN,
                    "this link was used already, or has expired: `mpvpn dashboard` prints another one",
                ),
                LoginRefusal::TooMany => refuse(
                    StatusCode::TOO_MANY_REQUESTS,
                    "too many wrong links: open the one that `mpvpn dashboard` prints, or wait a minute",
                ),
            };
        }
        self.reporter.report(Event::DashboardLogin { network: network.to_string().into() });
        let attributes = if self.tls.is_some() { "; Secure" } else { "" };
        let cookie = format!(
            "{}={}; Path=/; HttpOnly; SameSite=Strict{attributes}",
            self.cookie_name(),
            new.cookie.reveal()
        );
        let mut response = response::json(&json!({ "csrf": new.token.reveal() }));
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            response.headers_mut().insert(header::SET_COOKIE, cookie);
        }
        Ok(response)
    }

    /// The session of a request.
    fn session(&self, request: &Request<Incoming>) -> Result<SessionId, Refusal> {
        let cookie = cookie(request.headers(), &self.cookie_name());
        // `EventSource` of browsers sends no fields of its own.
        let in_query = || {
            let query = request.uri().query().filter(|_| request.uri().path() == "/api/live")?;
            query_pairs(query).find(|(key, _)| *key == "csrf").map(|(_, value)| value)
        };
        let field = request.headers().get(TOKEN_FIELD).and_then(|value| value.to_str().ok());
        let token = field.map(str::to_owned).or_else(in_query);
        let session = cookie
            .zip(token)
            .and_then(|(cookie, token)| self.shared.logins().session(Instant::now(), cookie, &token));
        session.ok_or_else(|| {
            let why = "nobody is logged in here: `mpvpn dashboard`, as the user that runs mpvpn, prints a link that logs in";
            (StatusCode::UNAUTHORIZED, why.to_owned())
        })
    }

    fn about(&self) -> About<'_> {
        About {
            role: self.role,
            name: &self.shared.name,
            version: env!("CARGO_PKG_VERSION"),
            users: self.server_with_users().is_ok(),
        }
    }

    fn live(&self, session: SessionId, request: &Request<Incoming>) -> Result<HttpResponse, Refusal> {
        let view = View::parse(query_pairs(request.uri().query().unwrap_or_default()))
            .or_else(|why| refuse(StatusCode::BAD_REQUEST, why))?;
        let stream =
            self.live.stream(session, view).or_else(|why| refuse(StatusCode::TOO_MANY_REQUESTS, why))?;
        let messages = event_stream::messages(stream, self.events.follow(), Arc::clone(&self.shared));
        let mut response = response::events(messages);
        response.extensions_mut().insert(NoTimeLimit);
        Ok(response)
    }

    fn history_of(&self, request: &Request<Incoming>) -> Result<HttpResponse, Refusal> {
        let query = request.uri().query().unwrap_or_default();
        let span = match query_pairs(query).find(|(key, _)| *key == "span") {
            None => Span::Minutes,
            Some((_, value)) => match value.as_str() {
                "300" => Span::Minutes,
                "86400" => Span::Day,
                other => {
                    let why = format!("`span` is {other:?}, and neither 300 nor 86400");
                    return refuse(StatusCode::BAD_REQUEST, why);
                }
            },
        };
        let now = SystemTime::now();
        let length = if span == Span::Day { Duration::from_secs(86_400) } else { Duration::from_secs(300) };
        let since = now.checked_sub(length).unwrap_or(now);
        let events =
            self.events.latest(since, MAX_HISTORY_EVENTS).into_iter().map(ListedEvent::from).collect();
        let history = self.history();
        let answer = history.answer(span, self.live.age(), now);
        Ok(response::json(&HistoryAnswer { answer, events }))
    }

    /// The configuration of a server that has users.
    fn server_with_users(&self) -> Result<actions::Config, Refusal> {
        match &self.shared.server {
            None => refuse(StatusCode::NOT_FOUND, "this is a client: users are a server's"),
            Some(config) => actions::Config::of(config).ok_or_else(|| {
                let why = "this server accepts every client (auth = \"none\"), so it has no users";
                (StatusCode::NOT_FOUND, why.to_owned())
            }),
        }
    }
}

/// The value of a cookie.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let fields = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = fields.flat_map(|field| field.split(';'));
    pairs.filter_map(|pair| pair.trim().split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// The body of a request as JSON. Pages of other origins cannot send this media type without asking first.
async fn body<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Refusal> {
    let media_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type.and_then(|text| text.split(';').next()).map(str::trim) != Some("application/json") {
        return refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body has to be application/json");
    }
    let bytes = Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await;
    let bytes = bytes.or_else(|error| refuse(StatusCode::PAYLOAD_TOO_LARGE, error.to_string()))?.to_bytes();
    serde_json::from_slice(&bytes).or_else(|error| refuse(StatusCode::BAD_REQUEST, error.to_string()))
}

fn reply(found: Option<impl Serialize>) -> Result<HttpResponse, Refusal> {
    match found {
        Some(found) => Ok(response::json(&found)),
        None => {
            let why = "mpvpn did not answer within 2 s, as it is busy: try it again";
            refuse(StatusCode::SERVICE_UNAVAILABLE, why)
        }
    }
}

fn outcome(done: Result<serde_json::Value, actions::ActionError>) -> Result<HttpResponse, Refusal> {
    match done {
        Ok(value) => Ok(response::json(&value)),
        Err(error) => {
            let code =
                if error.is_mistake { StatusCode::BAD_REQUEST } else { StatusCode::INTERNAL_SERVER_ERROR };
            refuse(code, error.why)
        }
    }
}
