//! The requests of the local API. Each has a [`ControlRequest`] for the data plane, a route, and a function that sends it. The
//! engine answers in its `answers.rs`.
//!
//! In: requests of programs. Out: answers in JSON. Always holds: a request with a malformed body does not reach the data
//! plane.

use std::{ops::ControlFlow, path::Path};

use hyper::{Method, StatusCode, body::Bytes};
use tokio::sync::oneshot;

use super::{
    client::{follow, request},
    server::Route,
};
use crate::{
    Error, Result,
    config::{LinkChange, ReloadReport},
    status::{FlowList, Link, Status},
};

/// What the data plane is asked. Dropping a sender means that it cannot answer.
#[derive(Debug)]
pub enum ControlRequest {
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
    Reload(oneshot::Sender<std::result::Result<ReloadReport, String>>),
}

/// The last word of a route that matches any word.
pub(super) const PATH_PARAMETER: &str = "NAME";

pub(super) const ROUTES: &[Route] = &[
    Route::get("/v1/status", |request| request.query(ControlRequest::Status)),
    Route::get("/v1/flows", |request| request.query(ControlRequest::Flows)),
    Route::get("/v1/events", |request| request.events()),
    Route::post("/v1/links/NAME", |request| {
        request.command_with_body(StatusCode::NOT_FOUND, |name, change, reply| ControlRequest::Link {
            name,
            change,
            reply,
        })
    }),
    Route::post("/v1/reload", |request| request.command(StatusCode::BAD_REQUEST, ControlRequest::Reload)),
];

/// Asks the process at the socket `path`, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_status(path: &Path) -> Result<Status> {
    request(path, Method::GET, "/v1/status", Bytes::new())?.json()
}

/// Asks the process at the socket `path` for its flows, and waits for its answer for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn fetch_flows(path: &Path) -> Result<FlowList> {
    request(path, Method::GET, "/v1/flows", Bytes::new())?.json()
}

/// Fetches the event log of the process at the socket `path`: lines of JSON, the latest at the end. Waits for up to 5 s.
/// Not for use inside an asynchronous runtime.
pub fn fetch_events(path: &Path) -> Result<String> {
    request(path, Method::GET, "/v1/events", Bytes::new())?.text()
}

/// Calls `take` for each line of the event log of the process at the socket `path`, and then for each new event. Returns
/// when `take` breaks, or when the process ends. Not for use inside an asynchronous runtime.
pub fn follow_events(path: &Path, mut take: impl FnMut(&str) -> ControlFlow<()>) -> Result<()> {
    follow(path, "/v1/events?follow", &mut take)
}

/// Has the client at the socket `path` use the link `name` in another way; how the link is then. Waits for
/// up to 5 s. Not for use inside an asynchronous runtime.
pub fn change_link(path: &Path, name: &str, change: &LinkChange) -> Result<Link> {
    let body = serde_json::to_vec(change)
        .map_err(|error| Error::BadAnswer { path: path.into(), why: error.to_string() })?;
    let answer = request(path, Method::POST, &format!("/v1/links/{name}"), body.into())?;
    answer.json_or_usage_error(&[StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST], "see `mpvpn link show`")
}

/// Has the process at the socket `path` read its configuration again. Waits for up to 5 s. Not for use inside an
/// asynchronous runtime.
pub fn reload(path: &Path) -> Result<ReloadReport> {
    let next = "correct the file and reload again; until then all stays as it is";
    request(path, Method::POST, "/v1/reload", Bytes::new())?
        .json_or_usage_error(&[StatusCode::BAD_REQUEST], next)
}
