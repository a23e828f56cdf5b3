use std::sync::atomic::{AtomicUsize, Ordering};

use mpvpn_status::{Client, Link, Overview, SessionSummary, Status};

use super::*;
use crate::{logins::Logins, secret::Secret, view::query_pairs};

/// A server with sessions, which counts its requests.
struct FakeServer {
    requests: Arc<AtomicUsize>,
    /// Sessions of which the last request wanted details.
    detailed: Arc<AtomicUsize>,
}

impl FakeServer {
    fn new(sessions: u64) -> (Self, RequestHandler) {
        let (requests, detailed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let server = Self { requests: Arc::clone(&requests), detailed: Arc::clone(&detailed) };
        let handler: RequestHandler = Arc::new(move |question| {
            let ControlRequest::Overview { shown, reply } = question else { panic!("another request") };
            let number = requests.fetch_add(1, Ordering::Relaxed) as u64;
            detailed.store(shown.len(), Ordering::Relaxed);
            let session = |id: u64| SessionSummary {
                id,
                user: format!("user{id:04}"),
                address: None,
                connected_s: 1.0,
                tx_bytes: number * id * 1000,
                rx_bytes: 0,
            };
            let client = |id: &u64| Client {
                user: format!("user{id:04}"),
                addresses: Vec::new(),
                connected_s: 1.0,
                tx_bytes: 0,
                rx_bytes: 0,
                classes: Vec::new(),
                resequencing: None,
                paths: Vec::new(),
            };
            let shown: Vec<u64> = shown.iter().copied().filter(|id| *id < sessions).collect();
            let mut status = Status::new(Role::Server);
            status.uptime_s = number as f64;
            status.clients = shown.iter().map(client).collect();
            drop(reply.send(Overview { status, shown, sessions: (0..sessions).map(session).collect() }));
        });
        (server, handler)
    }
}

fn session(number: usize) -> SessionId {
    let (now, mut logins) = (Instant::now(), Logins::default());
    let mut id = None;
    for at in 0..=number {
        logins.add_code(now, Secret::of("code"));
        let new = crate::logins::NewSession {
            cookie: Secret::of(&format!("cookie{at}")),
            token: Secret::of("token"),
        };
        let network = mpvpn_http::limiter::ClientNetwork::of([127, 0, 0, 1].into());
        logins.log_in(now, network, "code", &new).unwrap();
        id = logins.session(now, &format!("cookie{at}"), "token");
    }
    id.unwrap()
}

fn view(query: &str) -> View {
    View::parse(query_pairs(query)).unwrap()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn text(stream: &Stream) -> String {
    let message = stream.messages.borrow().clone().unwrap();
    String::from_utf8(message.to_vec()).unwrap()
}

fn json(stream: &Stream) -> serde_json::Value {
    let text = text(stream);
    let data = text.strip_prefix("event: status\ndata: ").and_then(|text| text.strip_suffix("\n\n"));
    serde_json::from_str(data.unwrap_or_else(|| panic!("{text}"))).unwrap()
}

/// Only the sessions that streams show are reported in detail, once for all streams.
#[test]
fn a_server_is_asked_once_for_all_streams_and_only_for_what_they_show() {
    block_on(async {
        let (server, handler) = FakeServer::new(1000);
        let live = Live::new(Role::Server, handler);
        let mut feeder = Feeder::new();
        let now = Instant::now();
        feeder.feed(&live, now).await.unwrap();
        assert_eq!(
            (server.requests.load(Ordering::Relaxed), server.detailed.load(Ordering::Relaxed)),
            (1, 0)
        );
        let one = live.stream(session(0), view("sort=user&count=10")).ok().unwrap();
        let other = live.stream(session(1), view("sort=-user&count=10&offset=5")).ok().unwrap();
        let same = live.stream(session(1), view("sort=user&count=10")).ok().unwrap();
        feeder.feed(&live, now + SAMPLE_INTERVAL).await.unwrap();
        assert_eq!(server.detailed.load(Ordering::Relaxed), 20);
        assert_eq!(
            server.requests.load(Ordering::Relaxed),
            3,
            "the second question is about what is shown now"
        );
        feeder.feed(&live, now + SAMPLE_INTERVAL * 2).await.unwrap();
        assert_eq!(server.requests.load(Ordering::Relaxed), 4, "what is shown stays the same");
        let shown = json(&one);
        assert_eq!(
            (shown["sessions_total"].as_u64(), shown["clients"].as_array().unwrap().len()),
            (Some(1000), 10)
        );
        assert_eq!(
            (&shown["clients"][9]["user"], &shown["clients"][9]["id"]),
            (&"user0009".into(), &"9".into())
        );
        assert_eq!(shown["clients"][9]["tx_bps"], 72_000);
        assert_eq!(json(&other)["clients"][0]["user"], "user0994");
        assert!(
            one.messages.borrow().as_ref().unwrap().as_ptr()
                == same.messages.borrow().as_ref().unwrap().as_ptr()
        );
        drop((one, other, same));
        feeder.feed(&live, now + SAMPLE_INTERVAL * 3).await.unwrap();
        assert_eq!(server.detailed.load(Ordering::Relaxed), 0, "nobody looks at a session");
        assert!(lock(&live.feeds).is_empty());
    });
}

#[test]
fn sessions_that_were_shown_are_sampled_for_five_minutes() {
    block_on(async {
        let (_server, handler) = FakeServer::new(1000);
        let live = Live::new(Role::Server, handler);
        let mut feeder = Feeder::new();
        let now = Instant::now();
        let stream = live.stream(session(0), view("sort=user&count=2")).ok().unwrap();
        let first = feeder.feed(&live, now).await.unwrap();
        assert_eq!(first.sessions.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [0, 1]);
        drop(stream);
        let later = feeder.feed(&live, now + SESSION_HISTORY - SAMPLE_INTERVAL).await.unwrap();
        assert_eq!(later.sessions.len(), 2);
        let after = feeder.feed(&live, now + SESSION_HISTORY + SAMPLE_INTERVAL).await.unwrap();
        assert!(after.sessions.is_empty());
    });
}

/// A page that opens between two samples has its frames between them from then on.
#[test]
fn sessions_are_sampled_whose_page_is_never_due_together_with_a_sample() {
    block_on(async {
        let (server, handler) = FakeServer::new(1000);
        let live = Live::new(Role::Server, handler);
        let mut feeder = Feeder::new();
        let now = Instant::now();
        feeder.feed(&live, now).await.unwrap();
        let stream = live.stream(session(0), view("sort=user&count=2&hz=2")).ok().unwrap();
        let mut frames = stream.messages.clone();
        for step in 1..=12 {
            let sample = feeder.feed(&live, now + SHORTEST_INTERVAL * step).await;
            let has_frame = frames.has_changed().unwrap();
            frames.borrow_and_update();
            assert_eq!((has_frame, sample.is_some()), (step % 2 == 1, step % 4 == 0), "step {step}");
            if let Some(sample) = sample {
                assert_eq!(sample.sessions.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [0, 1]);
            }
        }
        // One question at the start, one more for what the page shows, and one for each frame and sample.
        assert_eq!(server.requests.load(Ordering::Relaxed), 1 + 1 + 6 + 3);
    });
}

#[test]
fn a_client_has_its_links_with_rates_and_each_view_its_own_pace() {
    block_on(async {
        let requests = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&requests);
        let live = Live::new(
            Role::Client,
            Arc::new(move |question| {
                let ControlRequest::Status(reply) = question else { panic!("another request") };
                let number = counter.fetch_add(1, Ordering::Relaxed) as u64;
                let mut status = Status::new(Role::Client);
                status.uptime_s = number as f64;
                status.links = vec![Link { rx_bytes: number * 1000, ..Link::new("wwan0") }];
                drop(reply.send(status));
            }),
        );
        let (fast, slow) = (
            live.stream(session(0), view("hz=4")).ok().unwrap(),
            live.stream(session(0), view("hz=1")).ok().unwrap(),
        );
        let mut feeder = Feeder::new();
        let now = Instant::now();
        let mut frames = (0, 0);
        let (mut fast_frames, mut slow_frames) = (fast.messages.clone(), slow.messages.clone());
        for step in 0..8 {
            let sample = feeder.feed(&live, now + SHORTEST_INTERVAL * step).await;
            assert_eq!(sample.is_some(), step % 4 == 0);
            frames.0 += u32::from(fast_frames.has_changed().unwrap());
            frames.1 += u32::from(slow_frames.has_changed().unwrap());
            fast_frames.borrow_and_update();
            slow_frames.borrow_and_update();
        }
        assert_eq!((frames, requests.load(Ordering::Relaxed)), ((8, 2), 8));
        let shown = json(&fast);
        assert_eq!(
            (&shown["links"][0]["name"], &shown["links"][0]["rx_bps"]),
            (&"wwan0".into(), &8000.into())
        );
        assert_eq!((&shown["total"]["down_bps"], &shown["role"]), (&8000.into(), &"client".into()));
        assert!(shown.get("sessions_total").is_none());
    });
}

#[test]
fn streams_are_limited_in_all_and_for_each_session_and_their_places_are_free_again() {
    let (_server, handler) = FakeServer::new(0);
    let live = Live::new(Role::Server, handler);
    let of = |number| live.stream(session(number), View::default());
    let first: Vec<_> = (0..MAX_STREAMS_PER_SESSION).map(|_| of(0).ok().unwrap()).collect();
    assert!(of(0).err().unwrap().contains("6 pages"));
    let others: Vec<_> = (1..20).filter_map(|number| of(number).ok()).collect();
    assert_eq!(first.len() + others.len(), MAX_STREAMS);
    drop(first);
    assert!(of(0).is_ok());
    drop(others);
    assert!(live.places.in_use() == 0 && lock(&live.feeds).is_empty());
}
