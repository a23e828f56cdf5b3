use std::{
    io::{Read, Write},
    ops::ControlFlow,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::sync::oneshot;

use mpvpn_types::Tier;

use super::{access::Access, *};
use mpvpn_input::Error;
use mpvpn_input::role::Role;
use mpvpn_status::{
    FlowList, Link, State, Status,
    events::{Event, MAX_ENTRIES_PER_KIND, SharedEventLog},
    link_change::LinkChange,
    measure::{EchoPaths, EchoReport, EchoRequest, MeasureRequest, MeasureState},
    reload_report::{ConfigValue, LockoutPolicy, ReloadReport},
};

/// An API that runs in a thread of its own until dropped.
struct Running {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn start(path: &Path, source: RequestHandler) -> Self {
        Self::with_events(path, source, SharedEventLog::default())
    }

    fn with_events(path: &Path, source: RequestHandler, events: SharedEventLog) -> Self {
        let server = Server::bind(path).unwrap();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    result = server.serve(source, events) => result.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn up() -> RequestHandler {
    Arc::new(|question| match question {
        ControlRequest::Status(reply) => {
            let _ = reply.send(Status { state: State::Up, ..Status::new(Role::Server) });
        }
        ControlRequest::Flows(reply) => {
            let _ = reply.send(FlowList { left_out: 7, ..FlowList::new(Role::Server) });
        }
        ControlRequest::Link(name, change, reply) if name == "wwan0" => {
            let _ = reply
                .send(Ok(Link { tier: change.tier.unwrap_or_default().to_string(), ..Link::new(&name) }));
        }
        ControlRequest::Link(name, _, reply) => {
            let _ = reply.send(Err(format!("there is no link `{name}`: known are wwan0")));
        }
        ControlRequest::Echoes(request, reply) => {
            let echo = EchoPaths { sequence: request.identifier, ..EchoPaths::default() };
            let _ = reply.send(Ok(EchoReport { device: "mpvpn0".into(), echoes: vec![echo] }));
        }
        ControlRequest::Measure(request, reply) => {
            let _ = reply.send(match request.end {
                true => Ok(MeasureState { device: "mpvpn0".into(), ..MeasureState::default() }),
                false => Err(format!("there is no link `{}`: known are wwan0", request.only.join(" "))),
            });
        }
        ControlRequest::Config(reply) => {
            let _ = reply.send(Ok(vec![dns_off()]));
        }
        ControlRequest::DashboardLink(reply) => {
            let url = "http://127.0.0.1:9470/#login=abc".to_owned();
            let _ = reply.send(Ok(DashboardLink { url, expires_s: 600 }));
        }
        ControlRequest::Overview { .. } => {}
        ControlRequest::Reload(_, reply) => {
            let _ = reply.send(Ok(ReloadReport {
                links: true,
                classes: true,
                applied: vec!["dns".into()],
                restart: vec!["routes".into()],
            }));
        }
    })
}

#[test]
fn pings_and_measurements_are_asked_for_in_json() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("m.sock");
    let _server = Running::start(&path, up());
    let echoes = fetch_echoes(&path, EchoRequest { identifier: 7 }).unwrap();
    assert_eq!((echoes.device.as_str(), echoes.echoes[0].sequence), ("mpvpn0", 7));
    let end = MeasureRequest { end: true, ..MeasureRequest::default() };
    assert_eq!(measure(&path, &end).unwrap().device, "mpvpn0");
    let only = MeasureRequest { only: vec!["eth9".into()], ..MeasureRequest::default() };
    let error = measure(&path, &only).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("no link `eth9`"), "{error}");
    let odd = raw(&path, b"POST /v1/measure HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{\"on\": 1}");
    assert!(odd.starts_with("HTTP/1.1 400"), "{odd}");
}

/// The requests in the table of `docs/security.md`, with those who may make them.
fn documented_requests() -> Vec<(String, String)> {
    let page = include_str!("../../../docs/security.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let rows = rows.filter_map(|row| row.strip_suffix(" |")?.split_once("` | "));
    let rows = rows.filter(|(request, _)| request.contains(" /v1/"));
    rows.map(|(request, who)| (request.to_owned(), who.to_owned())).collect()
}

#[test]
fn each_request_is_classified_as_the_page_about_security_says() {
    let classified: Vec<(String, String)> = ROUTES
        .iter()
        .map(|route| {
            let who = match route.access {
                Access::Read => "`mpvpn`, `mpvpn-admin`",
                Access::Change => "`mpvpn-admin`",
                Access::Nothing => "nobody",
            };
            (format!("{} {}", route.method, route.path), who.to_owned())
        })
        .collect();
    assert_eq!(classified, documented_requests());
}

#[test]
fn a_request_that_is_not_marked_is_a_change() {
    let unmarked = server::Route::get("/v1/new", |request| request.query(ControlRequest::Status));
    assert_eq!(unmarked.access, Access::Change);
}

/// The status of the answers to all requests of the table, for a program with this access.
fn answers(access: Access) -> Vec<(String, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let state = server::ApiState::new(up(), SharedEventLog::default());
    let status = |route: &server::Route| {
        let (name, body) = (format!("{} {}", route.method, route.path), "{}");
        let head = format!("{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n");
        let serve = |stream| {
            let answer = |request| server::answer(request, access, state.clone());
            mpvpn_http::serve_connection(stream, answer, || ())
        };
        let sent = format!("{head}\r\n{body}");
        let (quiet, time) = (Duration::ZERO, Duration::from_secs(20));
        let got =
            runtime.block_on(mpvpn_http::untrusted::exchange(serve, sent.as_bytes(), 4096, quiet, time));
        let got = String::from_utf8(got.unwrap()).unwrap();
        (name, got.split(' ').nth(1).unwrap_or_default().to_owned())
    };
    ROUTES.iter().map(status).collect()
}

#[test]
fn a_request_beyond_the_access_of_the_program_is_refused_before_it_reaches_the_data_plane() {
    let refused = |access| {
        let all = answers(access).into_iter().filter(|(_, status)| status == "403");
        all.map(|(request, _)| request).collect::<Vec<_>>()
    };
    let changes: Vec<String> = documented_requests()
        .into_iter()
        .filter(|(_, who)| who == "`mpvpn-admin`")
        .map(|(request, _)| request)
        .collect();
    assert!(changes.len() > 2 && refused(Access::Change).is_empty());
    assert_eq!(refused(Access::Read), changes);
    assert_eq!(refused(Access::Nothing).len(), ROUTES.len());
}

/// Sends `request` as it is and returns everything that comes back.
fn raw(path: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn dns_off() -> ConfigValue {
    ConfigValue { key: "dns".into(), value: "off".into(), origin: "option".into() }
}

#[test]
fn the_values_of_a_configuration_come_over_the_socket() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let _running = Running::start(&path, up());
    assert_eq!(fetch_config(&path).unwrap(), [dns_off()]);
}

#[test]
fn a_link_to_the_dashboard_comes_over_the_socket() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let running = Running::start(&path, up());
    let DashboardLink { url, expires_s } = dashboard_link(&path).unwrap();
    assert_eq!((url.as_str(), expires_s), ("http://127.0.0.1:9470/#login=abc", 600));
    assert!(raw(&path, b"GET /v1/dashboard/link HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 405"));
    drop(running);
    let refuses: RequestHandler = Arc::new(|question| {
        if let ControlRequest::DashboardLink(reply) = question {
            let _ = reply.send(Err("this process serves no dashboard".to_owned()));
        }
    });
    let _running = Running::start(&path, refuses);
    let error = dashboard_link(&path).unwrap_err();
    assert!(error.is_usage() && error.next_step().contains("--dashboard 127.0.0.1:9470"), "{error}");
}

#[test]
fn a_configuration_is_reloaded_over_the_socket() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let running = Running::start(&path, up());
    assert_eq!(
        reload(&path, LockoutPolicy::Refuse).unwrap(),
        ReloadReport {
            links: true,
            classes: true,
            applied: vec!["dns".into()],
            restart: vec!["routes".into()]
        }
    );
    assert!(raw(&path, b"GET /v1/reload HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 405"));
    drop(running);
    let refuses: RequestHandler = Arc::new(|question| {
        if let ControlRequest::Reload(policy, reply) = question {
            let _ = reply.send(Err(format!("line 3, column 1: {policy:?}")));
        }
    });
    let _running = Running::start(&path, refuses);
    for policy in [LockoutPolicy::Refuse, LockoutPolicy::Allow] {
        let error = reload(&path, policy).unwrap_err();
        assert!(
            error.is_usage() && error.to_string().contains(&format!("line 3, column 1: {policy:?}")),
            "{error}"
        );
    }
    let unknown = raw(&path, b"POST /v1/reload?forse HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    assert!(unknown.starts_with("HTTP/1.1 400") && unknown.contains("only `?force`"), "{unknown}");
}

#[test]
fn a_link_is_changed_over_the_socket() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let _running = Running::start(&path, up());
    let change = LinkChange { tier: Some(Tier::Backup), ..LinkChange::default() };
    assert_eq!(change_link(&path, "wwan0", &change).unwrap().tier, "backup");
    let error = change_link(&path, "wlan0", &change).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("known are wwan0"), "{error}");
    for (body, code) in [("{}", "200"), ("{\"tier\":\"best\"}", "400"), ("nonsense", "400")] {
        let length = body.len();
        let request =
            format!("POST /v1/links/wwan0 HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}");
        let answer = raw(&path, request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{body}: {answer}");
    }
    let long = format!(
        "POST /v1/links/wwan0 HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n{}",
        " ".repeat(9000)
    );
    assert!(raw(&path, long.as_bytes()).starts_with("HTTP/1.1 400"));
    let get = raw(&path, b"GET /v1/links/wwan0 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(get.starts_with("HTTP/1.1 405") && get.contains("POST"), "{get}");
}

#[test]
fn the_status_arrives_over_the_socket() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("run/server-a.sock");
    let running = Running::start(&path, up());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for _ in 0..50 {
        assert_eq!(fetch_status(&path).unwrap().state, State::Up);
    }
    assert_eq!(fetch_flows(&path).unwrap().left_out, 7);
    drop(running);
    assert!(!path.exists(), "the socket's file outlives the server");
    let error = fetch_status(&path).unwrap_err();
    assert!(matches!(error, Error::NoAnswer { .. }), "{error}");
}

fn link(number: usize) -> Event {
    Event::LinkDown { link: format!("eth{number}").into(), reason: "no carrier".into() }
}

#[test]
fn events_are_read_over_the_socket_and_followed() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let events = SharedEventLog::default();
    let running = Running::with_events(&path, up(), events.clone());
    assert_eq!(fetch_events(&path).unwrap(), "");
    (0..200).for_each(|number| events.record(SystemTime::now(), link(number)));
    let kept = fetch_events(&path).unwrap();
    assert_eq!(kept.lines().count(), 200);
    assert!(kept.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{kept}");
    let mut followed = Vec::new();
    follow_events(&path, |line| {
        followed.push(line.to_owned());
        match followed.len() {
            ..200 => ControlFlow::Continue(()),
            200 => {
                events.record(SystemTime::now(), link(200));
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Break(()),
        }
    })
    .unwrap();
    assert!(followed[200].contains(r#""link":"eth200""#), "{}", followed[200]);
    let get = raw(&path, b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(get.starts_with("HTTP/1.1 200 OK\r\n") && get.contains("application/x-ndjson"), "{get}");
    let other = raw(&path, b"GET /v1/events?since=1 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(other.starts_with("HTTP/1.1 400 ") && other.contains("only `?follow`"), "{other}");
    // The end of the process is the end of the events.
    let ender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(running);
    });
    follow_events(&path, |_| ControlFlow::Continue(())).unwrap();
    ender.join().unwrap();
}

#[test]
fn who_follows_and_does_not_read_holds_up_nobody() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let events = SharedEventLog::default();
    let _running = Running::with_events(&path, up(), events.clone());
    let follow = || {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"GET /v1/events?follow HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream
    };
    let mut sleepers: Vec<_> = (0..8).map(|_| follow()).collect();
    for sleeper in &mut sleepers {
        sleeper.read_exact(&mut [0; 12]).unwrap();
    }
    (0..50_000).for_each(|number| events.record(SystemTime::now(), link(number)));
    // The ninth is told, and others are answered at once.
    let refused = raw(&path, b"GET /v1/events?follow HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("8 programs follow"), "{refused}");
    assert_eq!(fetch_status(&path).unwrap().state, State::Up);
    assert_eq!(fetch_events(&path).unwrap().lines().count(), MAX_ENTRIES_PER_KIND);
    // One that wakes up learns that it has missed some, and goes on with what is kept.
    let mut sleeper = sleepers.pop().unwrap();
    sleeper.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let (mut seen, mut part) = (Vec::new(), [0; 65_536]);
    while !String::from_utf8_lossy(&seen).contains("eth49999") {
        let count = sleeper.read(&mut part).unwrap();
        seen.extend_from_slice(&part[..count]);
    }
    assert!(String::from_utf8_lossy(&seen).contains(r#""event":"missed""#));
}

#[test]
fn other_paths_and_methods_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let _running = Running::start(&path, up());
    let get = raw(&path, b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(get.starts_with("HTTP/1.1 200 OK\r\n") && get.contains("application/json"), "{get}");
    let other = raw(&path, b"GET /v2/status HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(other.starts_with("HTTP/1.1 404 "), "{other}");
    let post = raw(&path, b"POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc");
    assert!(post.starts_with("HTTP/1.1 405 ") && post.contains("allow: GET"), "{post}");
}

#[test]
fn hostile_requests_end_and_others_are_served_meanwhile() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let _running = Running::start(&path, up());
    let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let endless = [b"GET /".as_slice(), &vec![b'a'; 1 << 20]].concat();
    let answer = raw(&path, &endless);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(!raw(&path, b"\x16\x03\x01\x00\xff\r\n\r\n").contains("200"));
    assert_eq!(fetch_status(&path).unwrap().state, State::Up);
    drop(silent);
}

#[test]
fn a_data_plane_that_is_gone_is_told() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let _running = Running::start(&path, Arc::new(drop));
    let error = fetch_status(&path).unwrap_err().to_string();
    assert!(error.contains("503") && error.contains("the data plane did not answer"), "{error}");
}

#[test]
fn a_socket_in_use_is_not_taken_away() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let _running = Running::start(&path, up());
    let error = Server::bind(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} is in use by a running process (pid {})", path.display(), std::process::id())
    );
    assert_eq!(fetch_status(&path).unwrap().state, State::Up);
}

#[test]
fn a_lock_on_the_folder_delays_nobody() {
    let home = tempfile::tempdir().unwrap();
    // Everybody who may read the folder can do that.
    let _locked = mpvpn_input::files::lock_dir(home.path()).unwrap();
    let (sender, bound) = std::sync::mpsc::channel();
    let path = home.path().join("a.sock");
    std::thread::spawn(move || sender.send(Server::bind(&path)));
    assert!(bound.recv_timeout(Duration::from_secs(20)).expect("it does not wait").is_ok());
    assert!(!home.path().join("api.lock").exists(), "a lock was left behind");
}

#[test]
fn a_leftover_socket_is_replaced() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let _running = Running::start(&path, up());
    assert_eq!(fetch_status(&path).unwrap().state, State::Up);
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "a draft was left behind");
}

#[test]
fn another_kind_of_file_is_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    std::fs::write(&path, "precious").unwrap();
    assert!(Server::bind(&path).is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_path_too_long_for_a_socket_is_explained() {
    let path = Path::new("/tmp").join("x".repeat(120));
    let error = Server::bind(&path).unwrap_err();
    assert!(matches!(error, Error::SocketPath { bytes: 125, .. }), "{error}");
}

#[test]
fn a_successors_socket_is_not_removed() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let first = Server::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Server::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

#[test]
fn only_sockets_with_a_live_process_are_listed() {
    let home = tempfile::tempdir().unwrap();
    let live = home.path().join("b.sock");
    let other = home.path().join("a.sock");
    let _servers = [&live, &other].map(|path| Server::bind(path).unwrap());
    drop(UnixListener::bind(home.path().join("stale.sock")).unwrap());
    std::fs::write(home.path().join("notes.txt"), "").unwrap();
    assert_eq!(client::sockets_in(home.path()), [other, live]);
    assert!(client::sockets_in(&home.path().join("absent")).is_empty());
}

#[test]
fn somebody_else_at_the_socket_is_no_status() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let talker = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 64];
        let _ = stream.read(&mut request);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
    });
    let error = fetch_status(&path).unwrap_err();
    assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
    talker.join().unwrap();
}
