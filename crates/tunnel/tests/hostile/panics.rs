//! A panic while one peer is handled ends its connection and nothing else. Panics are those of the check of
//! credentials, which the server calls while it handles a request, and of a subscriber of the log.

use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use mpvpn_masque::{connect_ip::ConnectIpRequest, headers::Headers};
use mpvpn_path::Scheduler;
use mpvpn_quic::FlowControlWindows;
use mpvpn_types::Duration;
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::NoSubscriber,
};

use crate::{
    client::{label, packet},
    rogue::{Rogue, context, every_extension},
    rogue_server::RogueServer,
    server::packet_down,
    world::{MS, TOKEN, TOKEN_THAT_PANICS, World},
};

/// See `decisions.rs` of the simulation: with one subscriber only, an event may be off for everybody.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// Panics once at the first event of the log with this text, while it is armed.
struct PanicAt {
    text: &'static str,
    armed: Arc<AtomicBool>,
}

impl Visit for PanicAt {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message"
            && format!("{value:?}").contains(self.text)
            && self.armed.swap(false, Relaxed)
        {
            panic!("as the test says");
        }
    }
}

impl Subscriber for PanicAt {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("mpvpn")
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Self { text: self.text, armed: self.armed.clone() });
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Runs `work` with a switch; from when it is set, the first event with `text` panics.
fn with_panic_at(text: &'static str, work: impl FnOnce(&AtomicBool)) {
    LazyLock::force(&SECOND_SUBSCRIBER);
    let armed = Arc::new(AtomicBool::new(false));
    tracing::subscriber::with_default(PanicAt { text, armed: armed.clone() }, || work(&armed));
    assert!(!armed.load(Relaxed), "nothing said {text:?}");
}

/// A request in which the check of credentials panics.
fn fatal_request() -> Headers {
    let mut request = ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/");
    request.authorization = Some(format!("Bearer {TOKEN_THAT_PANICS}"));
    request.headers()
}

#[test]
fn a_panic_while_a_client_is_handled_ends_its_connection_only() {
    let mut world = World::new();
    world.unclaimed = Some(Vec::new());
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
    world.up(client);
    let mut rogue = Rogue::in_world(world, FlowControlWindows::default());
    let (doomed, other) = (rogue.connect(), rogue.connect());
    for at in [doomed, other] {
        rogue.ask_for_tunnel(at, every_extension("rogue", 0), None);
        rogue.connect_tcp(at).expect("a stream");
        rogue.connect_udp(at).expect("a stream");
    }
    rogue.run(50 * MS);
    let sessions = rogue.world.servers[0].sessions();
    assert_eq!(sessions, 3);
    assert_eq!(rogue.world.targets.iter().filter(|target| !target.closed).count(), 2);

    rogue.request(doomed, &fatal_request()).expect("a stream");
    rogue.run(100 * MS);
    assert_eq!(rogue.world.servers[0].sessions(), 2, "its session has ended");
    let gone = |gone: &[bool]| gone.iter().filter(|gone| **gone).count();
    assert_eq!(gone(&rogue.world.targets.iter().map(|target| target.closed).collect::<Vec<_>>()), 1);
    assert_eq!(gone(&rogue.world.destinations.iter().map(|target| target.closed).collect::<Vec<_>>()), 1);
    assert!(rogue.is_alive(other));
    let (out, back) = rogue.world.send_both_ways(client, Duration::from_secs(1));
    assert!(out < 30 * MS && back < 30 * MS, "the honest client waited for {out:?} and {back:?}");
    // Its next packet is answered by a stateless reset, and it may come again.
    rogue.connect_tcp(doomed);
    rogue.run(2000 * MS);
    assert!(!rogue.is_alive(doomed));
    let again = rogue.connect();
    rogue.ask_for_tunnel(again, every_extension("rogue", 0), None);
    assert_eq!(rogue.world.servers[0].sessions(), 3);
}

#[test]
fn a_panic_at_a_datagram_of_a_client_ends_its_connection_only() {
    with_panic_at("a number too far ahead", |armed| {
        let mut world = World::new();
        world.unclaimed = Some(Vec::new());
        let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS)]);
        world.up(client);
        let mut rogue = Rogue::in_world(world, FlowControlWindows::default());
        rogue.connect();
        rogue.ask_for_tunnel(0, every_extension("rogue", 0), None);
        rogue.run(100 * MS);
        assert_eq!(rogue.world.servers[0].sessions(), 2);
        armed.store(true, Relaxed);
        let packet = packet(&rogue);
        rogue.datagram(context::ORDER, &[label(1, 1 << 20, None), packet].concat());
        rogue.run(5 * MS);
        assert!(!armed.load(Relaxed));
        assert_eq!(rogue.world.servers[0].sessions(), 1);
        let (out, back) = rogue.world.send_both_ways(client, Duration::from_secs(1));
        assert!(out < 30 * MS && back < 30 * MS, "the honest client waited for {out:?} and {back:?}");
    });
}

#[test]
fn a_client_that_panics_while_it_handles_its_server_connects_anew() {
    with_panic_at("a number too far ahead", |armed| {
        let mut rogue = RogueServer::with_tunnel(FlowControlWindows::default());
        let before = (rogue.handshakes, rogue.tunnels);
        armed.store(true, Relaxed);
        rogue.datagram(context::ORDER, &[label(1, 1 << 20, None), packet_down()].concat());
        rogue.run(10 * MS);
        assert!(!armed.load(Relaxed) && !rogue.is_up());
        rogue.run(Duration::from_secs(5));
        assert!(rogue.is_up() && rogue.handshakes > before.0 && rogue.tunnels > before.1);
    });
}
