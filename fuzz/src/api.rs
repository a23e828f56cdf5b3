//! The local API: requests of programs, and what a process answers a command.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use mpvpn_api::{ControlRequest, DashboardLink, RequestHandler, untrusted::PlainApi};
use mpvpn_input::role::Role;
use mpvpn_status::{
    FlowList, Link, Sections, Status,
    events::SharedEventLog,
    measure::{EchoReport, MeasureState},
    rates::Rates,
    reload_report::{LockoutPolicy, ReloadReport},
    render, render_flows, render_links,
};

use crate::input::Input;

/// Columns of a terminal.
const WIDTH: usize = 80;

/// `which end, bytes`: requests, the status that a process answers, or its flows.
pub fn control_api(data: &[u8]) {
    let mut input = Input(data);
    match input.below(3) {
        0 => requests(input.0),
        1 => {
            let Ok(status) = serde_json::from_slice::<Status>(input.0) else { return };
            let sections = Sections { paths: true, details: true };
            is_bounded(&render(&status, &Rates::new(1), sections, WIDTH), input.0);
            is_bounded(&render_links(&status.links, WIDTH), input.0);
        }
        _ => {
            let Ok(flows) = serde_json::from_slice::<FlowList>(input.0) else { return };
            is_bounded(&render_flows(&flows, WIDTH), input.0);
        }
    }
}

/// A page for people has no wider lines than the terminal, and not many more than there is to show.
fn is_bounded(page: &str, shown: &[u8]) {
    let widest = page.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    assert!(widest <= WIDTH, "{widest} columns: {page}");
    assert!(page.lines().count() <= 64 + shown.len(), "{page}");
}

fn requests(sent: &[u8]) {
    /// The answer to one request; the connection ends after it.
    const MAX_ANSWER: usize = 64 << 10;
    /// A program that has ended its side is waited for no longer than this; the machine may be busy.
    const LONGEST: Duration = Duration::from_secs(20);
    /// The same for a program that follows the events. The HTTP library looks for the end of a program only
    /// while nothing that it sent is unread, so that one which sent more than its request is followed until
    /// the next event.
    const LONGEST_OF_FOLLOWER: Duration = Duration::from_millis(200);
    static API: LazyLock<PlainApi> = LazyLock::new(|| {
        PlainApi::new(Arc::new(answer) as RequestHandler, SharedEventLog::default()).expect("a runtime")
    });
    let follows = sent.windows(6).any(|word| word == b"follow");
    let got = API.serve(sent, MAX_ANSWER, if follows { LONGEST_OF_FOLLOWER } else { LONGEST });
    let Some(got) = got else {
        assert!(follows, "a connection ends after its program has ended it");
        return;
    };
    assert!(got.len() < MAX_ANSWER, "{} bytes", got.len());
    assert!(got.is_empty() || got.starts_with(b"HTTP/1."), "{}", got.escape_ascii());
}

/// Answers as a client does.
fn answer(request: ControlRequest) {
    match request {
        ControlRequest::Status(reply) => drop(reply.send(Status::new(Role::Client))),
        ControlRequest::Flows(reply) => drop(reply.send(FlowList::new(Role::Client))),
        ControlRequest::Link(name, change, reply) => {
            assert!(!change.to_string().is_empty());
            let known = Ok(Link::new(&name));
            let _ = reply.send(if name == "eth0" { known } else { Err("there is no such link".to_owned()) });
        }
        ControlRequest::Echoes(_, reply) => drop(reply.send(Ok(EchoReport::default()))),
        ControlRequest::Measure(_, reply) => drop(reply.send(Ok(MeasureState::default()))),
        ControlRequest::Config(reply) => drop(reply.send(Ok(Vec::new()))),
        ControlRequest::Overview { .. } => {}
        ControlRequest::DashboardLink(reply) => {
            let _ = reply.send(Ok(DashboardLink { url: "http://127.0.0.1/".to_owned(), expires_s: 60 }));
        }
        ControlRequest::Reload(LockoutPolicy::Allow, reply) => drop(reply.send(Ok(ReloadReport::default()))),
        ControlRequest::Reload(_, reply) => {
            let _ = reply.send(Err("it would lock users out".to_owned()));
        }
    }
}
