//! The field `mpvpn` of requests and responses: docs/vectors/negotiation.json, ends that know different
//! extensions, and the secrecy of its values.

use std::{
    io,
    sync::{Arc, Mutex},
};

use mpvpn_class::{Rule, Rules as ClassRules};
use mpvpn_masque::{
    connect_ip::ConnectIpRequest,
    connect_mpvpn,
    extensions::{Extensions, FIELD},
};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClassProfile, ClientState};
use mpvpn_types::{ClassId, Duration, Fec, Instant, LinkId};
use serde_json::Value;

use crate::{
    forward::{Inside, bearer},
    world::{MS, SERVER, TOKEN, World},
};

const LINKS: [(u64, Duration); 2] = [(20, Duration::from_millis(10)), (20, Duration::from_millis(15))];
/// Each extension of the tunnel by itself, none, and all of them.
const SETS: [&[&str]; 22] = [
    &["session"],
    &["class"],
    &["clocks"],
    &["order"],
    &["fec"],
    &["connection"],
    &["instance"],
    &["shared"],
    &["networks"],
    &["cc"],
    &["scheduler"],
    &["heartbeats"],
    &["reinjection"],
    &["data-ack"],
    &["links"],
    &["streams"],
    &["udp"],
    &["dns"],
    &["dns-domain"],
    &["heartbeats", "reinjection", "order"],
    &["class", "session", "links", "data-ack"],
    &[
        "session",
        "class",
        "clocks",
        "order",
        "fec",
        "connection",
        "instance",
        "shared",
        "networks",
        "cc",
        "scheduler",
        "heartbeats",
        "reinjection",
        "data-ack",
        "links",
        "streams",
        "udp",
        "dns",
        "dns-domain",
    ],
];

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

#[test]
fn a_server_answers_extensions_as_the_vectors_say() {
    let file: Value =
        serde_json::from_str(include_str!("../../../../docs/vectors/negotiation.json")).unwrap();
    for vector in file["vectors"].as_array().unwrap() {
        let name = &vector["name"];
        let mut request = match &*text(&vector["protocol"]) {
            "connect-ip" => ConnectIpRequest {
                authorization: Some(bearer()),
                ..ConnectIpRequest::new(SERVER, "/.well-known/masque/ip/*/*/")
            }
            .headers(),
            _ => connect_mpvpn::request(SERVER, Some(&bearer()), None),
        };
        for line in vector["request"].as_array().unwrap() {
            request.push(FIELD, text(line));
        }
        let mut inside = Inside::new();
        let request = inside.ask(&request);
        let answer = inside.answer(request);
        assert_eq!(answer.status().map(u64::from), vector["status"].as_u64(), "status of {name}");
        let answered = answer.single(FIELD).map(|_| Extensions::of(&answer).expect("a valid field"));
        if let Some(answered) = &answered
            && vector["protocol"] == "connect-ip"
        {
            assert!(answered.get("session").is_some(), "{name}");
        }
        let answered = answered.map(|mut answered| {
            answered.retain(|key| key != "session");
            answered.value()
        });
        assert_eq!(answered.as_deref(), vector["response"].as_str(), "the answer to {name}");
    }
}

/// A client that uses every extension: two classes, FEC, copies, over two links.
fn with_every_extension(world: &mut World) -> usize {
    world.fec = Fec::Fixed { data: 4, repair: 1 };
    world.copies = 2;
    let class = |name: &str| ClassProfile { name: name.to_owned(), ..ClassProfile::default() };
    world.classes = vec![class("default"), class("critical")];
    world.class_rules =
        ClassRules::new(vec![Rule { from_ports: vec![4000..=4001], class: ClassId(1), ..Rule::default() }]);
    let client = world.add(TOKEN, Scheduler::Auto, &LINKS);
    world.up(client);
    // Both links have paths, and the class has its connection.
    world.send_both_ways(client, 300 * MS);
    world.run(200 * MS);
    client
}

/// Packets arrive in both directions, before and after a link is cut without a word.
fn assert_works(world: &mut World, client: usize, what: &str) {
    for phase in ["both links", "one link"] {
        world.send_both_ways(client, 400 * MS);
        world.run(100 * MS);
        // UDP GRO joins packets that arrive together: each has 100 bytes behind the headers of the first.
        let packets = |all: &[(Instant, Vec<u8>)]| -> usize {
            all.iter().map(|(_, packet)| (packet.len() - 28) / 100).sum()
        };
        let received = (packets(&world.machines[client].received), packets(&world.received_by_server));
        if phase == "both links" {
            assert_eq!(received, (400, 400), "{what}: {phase}");
            let link = world.machines[client].links.get_mut(&LinkId(1)).unwrap();
            (link.up.loss, link.down.loss) = (1.0, 1.0);
            world.send_both_ways(client, 1000 * MS);
        } else {
            assert!(received.0 >= 396 && received.1 >= 396, "{what}: {phase}: {received:?}");
        }
    }
    assert_eq!(world.machines[client].client.report(world.now).state, ClientState::Up, "{what}");
    assert_eq!(world.machines[client].fatal, None, "{what}");
}

#[test]
fn a_client_that_knows_fewer_extensions_than_its_server_gets_a_tunnel() {
    for without in SETS {
        let mut world = World::new();
        world.disabled_at_client = without;
        let client = with_every_extension(&mut world);
        assert_works(&mut world, client, &format!("a client without {without:?}"));
    }
}

#[test]
fn a_server_that_knows_fewer_extensions_than_its_client_gives_it_a_tunnel() {
    for without in SETS {
        let mut world = World::new();
        world.disabled_at_server = without;
        world.restart_server();
        let client = with_every_extension(&mut world);
        assert_works(&mut world, client, &format!("a server without {without:?}"));
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_logs_name_extensions_and_hold_no_secret() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut world = World::new();
        let client = with_every_extension(&mut world);
        world.wake_classes(client, &[(4000, 9)], 500 * MS);
        assert_eq!(world.machines[client].session_secret.as_deref(), Some(&[1; 16][..]));
    });
    let log = String::from_utf8(std::mem::take(&mut *log.0.lock().unwrap())).unwrap();
    for named in ["the server accepts extensions version=1 keys=[\"v\", \"session\", ", "offered=[\"v\", "] {
        assert!(log.contains(named), "{named}");
    }
    // The secret in base64, hexadecimal, and as Rust prints bytes; the token.
    for secret in ["AQEBAQEB", "01010101", "1, 1, 1, 1, 1", "\\x01\\x01\\x01", TOKEN] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(secret)).take(3).collect();
        assert_eq!(lines, [""; 0], "{secret}");
    }
}
