//! The requests of the local API. Each has a [`ControlRequest`] for the data plane, a route, and a function
//! that sends it. Client and server answer in their `answers.rs`.
//!
//! In: HTTP requests of programs on this machine. Out: responses in JSON. Always holds: a request with a
//! malformed body does not reach the data plane.

use std::{collections::BTreeSet, ops::ControlFlow, path::Path, sync::Arc};

use hyper::{Method, StatusCode, body::Bytes};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::oneshot;

use super::{
    client::{follow, request},
    server::Route,
};
use mpvpn_input::{Error, Result};
use mpvpn_status::{
    FlowList, Link, Overview, Status,
    link_change::LinkChange,
    measure::{EchoReport, EchoRequest, MeasureRequest, MeasureState},
    reload_report::{ConfigValue, LockoutPolicy, ReloadReport},
};

/// A link to the dashboard: the answer of `POST /v1/dashboard/link`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct DashboardLink {
    /// The address for a browser, which logs in once.
    pub url: String,
    /// How long it works, in s.
    pub expires_s: u64,
}

/// A request to the data plane, with the sender for its reply. Dropping the sender means that there is no
/// reply.
#[derive(Debug)]
pub enum ControlRequest {
    /// The status.
    Status(oneshot::Sender<Status>),
    /// The flows inside the tunnel.
    Flows(oneshot::Sender<FlowList>),
    /// Change the settings of the link of this interface until the client ends. The reply is the status of
    /// the link after the change, or why nothing changed.
    Link(String, LinkChange, oneshot::Sender<Result<Link, String>>),
    /// The links of ICMP echoes, or why they are not known.
    Echoes(EchoRequest, oneshot::Sender<Result<EchoReport, String>>),
    /// Change how measured flows use the links. The reply is the state that the measurement needs, or the
    /// reason why it cannot be given.
    Measure(MeasureRequest, oneshot::Sender<Result<MeasureState, String>>),
    /// The values of the configuration. The reply says where each comes from, or why the file cannot be read.
    Config(oneshot::Sender<Result<Vec<ConfigValue>, String>>),
    /// The content of the dashboard: totals, all sessions in short, and the `shown` ones with all details.
    /// Only a server answers.
    Overview {
        /// [Identifiers](mpvpn_status::SessionSummary::id) of sessions.
        shown: Arc<BTreeSet<u64>>,
        /// Takes the answer.
        reply: oneshot::Sender<Overview>,
    },
    /// A link that logs in at the dashboard once, or why there is none.
    DashboardLink(oneshot::Sender<Result<DashboardLink, String>>),
    /// Read the configuration again. The reply says what changed, or why nothing did.
    Reload(LockoutPolicy, oneshot::Sender<Result<ReloadReport, String>>),
}

/// A route that ends with this word matches any word in its place.
pub(super) const PATH_PARAMETER: &str = "NAME";

/// Each request with its path and method. Those that are not marked are for root, the own user and
/// administrators only.
pub(super) const ROUTES: &[Route] = &[
    Route::get("/v1/status", |request| request.query(ControlRequest::Status)).for_readers(),
    Route::get("/v1/flows", |request| request.query(ControlRequest::Flows)).for_readers(),
    Route::get("/v1/events", |request| request.events()).for_readers(),
    Route::post("/v1/links/NAME", |request| {
        request.command_with_body(StatusCode::NOT_FOUND, ControlRequest::Link)
    }),
    Route::post("/v1/echoes", |request| {
        request.command_with_body(StatusCode::CONFLICT, |_, asked, to| ControlRequest::Echoes(asked, to))
    })
    .for_readers(),
    Route::post("/v1/measure", |request| {
        request.command_with_body(StatusCode::CONFLICT, |_, asked, to| ControlRequest::Measure(asked, to))
    })
    .for_readers(),
    Route::get("/v1/config", |request| request.command(StatusCode::BAD_REQUEST, ControlRequest::Config)),
    Route::post("/v1/dashboard/link", |request| {
        request.command(StatusCode::CONFLICT, ControlRequest::DashboardLink)
    }),
    Route::post("/v1/reload", |request| match request.has_flag("force") {
        Ok(true) => request
            .command(StatusCode::BAD_REQUEST, |reply| ControlRequest::Reload(LockoutPolicy::Allow, reply)),
        Ok(false) => request
            .command(StatusCode::BAD_REQUEST, |reply| ControlRequest::Reload(LockoutPolicy::Refuse, reply)),
        Err(response) => response,
    }),
];

/// Asks the process at the socket `path`, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_status(path: &Path) -> Result<Status> {
    request(path, Method::GET, "/v1/status", Bytes::new())?.json()
}

/// Asks the process at the socket `path` for its flows, and waits for its answer for up to 5 s. Not for use
/// inside an asynchronous runtime.
pub fn fetch_flows(path: &Path) -> Result<FlowList> {
    request(path, Method::GET, "/v1/flows", Bytes::new())?.json()
}

/// Fetches the event log of the process at the socket `path`: lines of JSON, the latest at the end. Waits for
/// up to 5 s. Not for use inside an asynchronous runtime.
pub fn fetch_events(path: &Path) -> Result<String> {
    request(path, Method::GET, "/v1/events", Bytes::new())?.text()
}

/// Calls `take` for each line of the event log of the process at the socket `path`, and then for each new
/// event. Returns when `take` breaks, or when the process ends. Not for use inside an asynchronous runtime.
pub fn follow_events(path: &Path, mut take: impl FnMut(&str) -> ControlFlow<()>) -> Result<()> {
    follow(path, "/v1/events?follow", &mut take)
}

/// Changes the settings of the link `name` of the client at the socket `path`, and returns the status of the
/// link after the change. Waits for up to 5 s. Not for use inside an asynchronous runtime.
pub fn change_link(path: &Path, name: &str, change: &LinkChange) -> Result<Link> {
    post(path, &format!("/v1/links/{name}"), change, "see `mpvpn link show`")
}

/// Asks the client at the socket `path` on which paths ICMP echoes travelled. Waits for up to 5 s. Not for
/// use inside an asynchronous runtime.
pub fn fetch_echoes(path: &Path, question: EchoRequest) -> Result<EchoReport> {
    post(path, "/v1/echoes", &question, "`mpvpn status` shows what runs")
}

/// Tells the client at the socket `path` how measured flows use the links. Waits for up to 5 s. Not for use
/// inside an asynchronous runtime.
pub fn measure(path: &Path, request: &MeasureRequest) -> Result<MeasureState> {
    post(path, "/v1/measure", request, "`mpvpn link show` shows the links")
}

/// Sends a request with a body in JSON; `next` is the next step where the process refuses it.
fn post<B: Serialize, T: DeserializeOwned>(path: &Path, uri: &str, body: &B, next: &str) -> Result<T> {
    let body = serde_json::to_vec(body)
        .map_err(|error| Error::BadAnswer { path: path.into(), why: error.to_string() })?;
    let answer = request(path, Method::POST, uri, body.into())?;
    answer.json_or_usage_error(&[StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST, StatusCode::CONFLICT], next)
}

/// Has the process at the socket `path` read its configuration again. Waits for up to 5 s. Not for use inside
/// an asynchronous runtime.
pub fn reload(path: &Path, policy: LockoutPolicy) -> Result<ReloadReport> {
    let next =
        "remove the cause and run `mpvpn config reload` again; until then the running configuration stays";
    let uri = if policy == LockoutPolicy::Allow { "/v1/reload?force" } else { "/v1/reload" };
    request(path, Method::POST, uri, Bytes::new())?.json_or_usage_error(&[StatusCode::BAD_REQUEST], next)
}

/// Asks the process at the socket `path` for the values of its configuration. Waits for up to 5 s. Not for
/// use inside an asynchronous runtime.
pub fn fetch_config(path: &Path) -> Result<Vec<ConfigValue>> {
    let next = "correct the file, as `mpvpn config check FILE` says";
    request(path, Method::GET, "/v1/config", Bytes::new())?
        .json_or_usage_error(&[StatusCode::BAD_REQUEST], next)
}

/// Asks the process at the socket `path` for a link to its dashboard. Waits for up to 5 s. Not for use inside
/// an asynchronous runtime.
pub fn dashboard_link(path: &Path) -> Result<DashboardLink> {
    let next = "start it with --dashboard 127.0.0.1:9470, or with the key `dashboard` in its file";
    request(path, Method::POST, "/v1/dashboard/link", Bytes::new())?
        .json_or_usage_error(&[StatusCode::CONFLICT], next)
}
