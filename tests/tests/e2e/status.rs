//! `mpvpn status` has the fields on which programs rely, at both ends.

use std::time::Duration;

use mpvpn_tests::{
    ping::{Ping, reaches},
    testbed::{Host, LINK, MpvpnProcess, SERVER, TUNNEL, Testbed},
};
use serde_json::Value;

use crate::metrics::{METRICS_ADDRESS, scrape};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

const NUMBER: &str = "number";
const STRING: &str = "string";
const LIST: &str = "list";
const OBJECT: &str = "object";

/// Fields of a path.
const PATH_FIELDS: &[(&str, &str)] = &[
    ("id", STRING),
    ("class", STRING),
    ("link", STRING),
    ("local", STRING),
    ("transport", STRING),
    ("remote", STRING),
    ("state", STRING),
    ("reason", STRING),
    ("rtt_ms", NUMBER),
    ("min_rtt_ms", NUMBER),
    ("jitter_ms", NUMBER),
    ("loss_pct", NUMBER),
    ("cwnd_bytes", NUMBER),
    ("in_flight_bytes", NUMBER),
    ("rate_bps", NUMBER),
    ("tx_bytes", NUMBER),
    ("rx_bytes", NUMBER),
    ("tx_packets", NUMBER),
    ("rx_packets", NUMBER),
    ("lost_packets", NUMBER),
    ("mtu", NUMBER),
];

/// Fields of resequencing and retransmission.
const ORDER_FIELDS: &[(&str, &str)] = &[
    ("numbered", NUMBER),
    ("resent", NUMBER),
    ("copies", NUMBER),
    ("restored", NUMBER),
    ("late", NUMBER),
    ("duplicates", NUMBER),
    ("given_up", NUMBER),
];

fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => LIST,
        Value::Object(_) => OBJECT,
        Value::Null | Value::Bool(_) => "something else",
    }
}

fn check_fields(object: &Value, what: &str, fields: &[(&str, &str)]) {
    for (name, expected) in fields {
        let found = object.get(*name).map_or("nothing", json_type);
        assert_eq!(found, *expected, "{what}.{name} in {object:#}");
    }
}

/// Checks that a list is not empty and that each element has these fields.
fn check_list(status: &Value, list: &str, fields: &[(&str, &str)]) {
    let items = status[list].as_array().unwrap_or_else(|| panic!("{list} is no list in {status:#}"));
    assert!(!items.is_empty(), "no {list} in {status:#}");
    items.iter().for_each(|item| check_fields(item, list, fields));
}

fn check_common_fields(process: &MpvpnProcess, role: &str) -> Value {
    let status = process.status();
    check_fields(
        &status,
        "status",
        &[
            ("role", STRING),
            ("version", STRING),
            ("state", STRING),
            ("uptime_s", NUMBER),
            ("addresses", LIST),
            ("classes", LIST),
            ("links", LIST),
            ("paths", LIST),
            ("flows", OBJECT),
            ("clients", LIST),
        ],
    );
    assert_eq!(status["role"], role);
    check_fields(&status["flows"], "flows", &[("stream", NUMBER), ("datagram", NUMBER), ("udp", NUMBER)]);
    status
}

#[test]
fn the_clients_status_has_session_links_and_paths() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    reaches(&testbed, Host::Client, TUNNEL);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", Duration::from_secs(5));
    }
    let status = check_common_fields(&client, "client");
    check_fields(&status["session"], "session", &[("server", STRING), ("user", STRING), ("resumed", NUMBER)]);
    check_list(
        &status,
        "classes",
        &[
            ("name", STRING),
            ("lane", STRING),
            ("cc", STRING),
            ("scheduler", STRING),
            ("tx_bytes", NUMBER),
            ("rx_bytes", NUMBER),
            ("queue_ms", NUMBER),
            ("drops", NUMBER),
            ("tx_bps", NUMBER),
            ("rx_bps", NUMBER),
            ("state", STRING),
        ],
    );
    let default = &status["classes"][0];
    check_fields(default, "classes", &[("rtt_ms", NUMBER), ("loss_pct", NUMBER)]);
    check_fields(&default["order"], "classes.order", ORDER_FIELDS);
    check_fields(&default["order"], "classes.order", &[("copies", NUMBER)]);
    check_list(
        &status,
        "links",
        &[
            ("name", STRING),
            ("state", STRING),
            ("tier", STRING),
            ("reason", STRING),
            ("addresses", LIST),
            ("tx_bytes", NUMBER),
            ("rx_bytes", NUMBER),
        ],
    );
    check_list(&status, "paths", PATH_FIELDS);
    check_fields(&status["lane"], "lane", ORDER_FIELDS);
    assert_eq!(status["lane"]["on"], true, "two paths may carry one flow: {:#}", status["lane"]);
    assert_eq!(status["session"]["server"], "192.0.2.1:4433");
    let addresses = status["addresses"].as_array().expect("checked above");
    assert!(addresses.iter().any(|address| address == "10.0.0.2/24"), "{addresses:?}");
    assert!(addresses.len() >= 2, "one address a family: {addresses:?}");
    let path = mpvpn_tests::testbed::path_of(&status, "eth1").expect("a path over eth1");
    check_fields(path, "paths", &[("base_rtt_ms", NUMBER)]);
    let id = path["id"].as_str().expect("checked above");
    assert!(
        ["default/eth1/0", "default/eth1/1"].contains(&id),
        "either link may be the first to connect: {id}"
    );
    assert_eq!(path["remote"], "192.0.2.1:4433");
    let rtt = path["rtt_ms"].as_f64().expect("checked above");
    assert!((20.0..60.0).contains(&rtt), "{rtt} ms over a link of 25 ms");
}

#[test]
fn the_servers_status_lists_clients() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    assert_eq!(check_common_fields(&server, "server")["clients"].as_array().map(Vec::len), Some(0));
    let _client = testbed.client(&[]);
    reaches(&testbed, Host::Client, TUNNEL);
    let status = check_common_fields(&server, "server");
    let session = &status["clients"][0];
    check_fields(
        session,
        "clients",
        &[
            ("user", STRING),
            ("addresses", LIST),
            ("connected_s", NUMBER),
            ("tx_bytes", NUMBER),
            ("rx_bytes", NUMBER),
            ("paths", LIST),
        ],
    );
    check_list(session, "paths", PATH_FIELDS);
    check_fields(&session["lane"], "clients.lane", ORDER_FIELDS);
}

#[test]
fn the_text_output_has_the_essentials() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.start_as_is(
        Host::Client,
        &[
            "client",
            "--server",
            "192.0.2.1:4433",
            "--insecure",
            "--path",
            "eth1",
            "--api-socket",
            "here.sock",
        ],
        &testbed.dir().join("here.sock"),
    );
    let _client = client.wait_until_up();
    let output = testbed.mpvpn(Host::Client, &["status", "--paths", "--api-socket", "here.sock"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for word in ["eth1", "10.0.0.2", "192.0.2.1:4433", "active"] {
        assert!(text.contains(word), "no {word:?} in:\n{text}");
    }
}

#[test]
fn status_without_a_process_fails_with_the_socket_path() {
    let testbed = Testbed::new(&["100mbit"]);
    let output = testbed.mpvpn(Host::Client, &["status", "--api-socket", "nobody.sock"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nobody.sock"), "{said}");
}

#[test]
fn the_socket_is_only_for_its_owner_and_is_removed_with_the_process() {
    use std::os::unix::fs::PermissionsExt;
    let testbed = Testbed::two_links();
    // In a folder of its own; in one of root's it stays, as the process has left root, and the next one
    // replaces it.
    let path = testbed.dir().join("state/mine.sock");
    let args = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    let more = ["--auth", "none", "--state-dir", "state", "--api-socket", "state/mine.sock"];
    let mut server = testbed.start_as_is(Host::Server, &[&args[..], &more].concat(), &path).wait_until_up();
    let mode = std::fs::metadata(&path).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(server.interrupt().success());
    assert!(!path.exists(), "the socket outlived its process");
}

#[test]
fn a_socket_that_stays_in_a_folder_of_root_is_no_process_and_the_next_process_replaces_it() {
    let testbed = Testbed::two_links();
    let path = testbed.dir().join("mine.sock");
    let args = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    let args = [&args[..], &["--auth", "none", "--api-socket", "mine.sock"]].concat();
    for _ in 0..2 {
        let mut server = testbed.start_as_is(Host::Server, &args, &path).wait_until_up();
        assert!(server.interrupt().success());
        let output = testbed.mpvpn(Host::Server, &["status", "--api-socket", "mine.sock"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("mine.sock") && said.contains("next: "), "{said}");
    }
}

/// The state of a client and the sentence about it, once the state is the expected one.
fn verdict_of(client: &MpvpnProcess, expected: &str, limit: Duration) -> String {
    let status = client.wait_for_status(limit, expected, |status| match status["state"] == expected {
        true => Ok(()),
        false => Err(format!("{} ({})", status["state"], status["verdict"])),
    });
    status["verdict"].as_str().expect("a sentence").to_owned()
}

#[test]
fn a_server_that_is_dead_is_called_so_and_a_link_that_is_cut_is_named() {
    let testbed = Testbed::two_links();
    let mut server = testbed.server(&[]);
    let client = testbed.client(&["--metrics", METRICS_ADDRESS]);
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let code_of = |more: &[&str]| {
        let args = [&["status", "--api-socket", &socket], more].concat();
        testbed.mpvpn(Host::Client, &args).status.code()
    };
    reaches(&testbed, Host::Client, TUNNEL);
    assert_eq!(verdict_of(&client, "up", TIMEOUT), "up");

    // While data moves, the verdict follows within three seconds.
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 60);
    testbed.link(2).cut();
    let said = verdict_of(&client, "degraded", Duration::from_secs(3));
    assert!(said.starts_with("degraded: eth2 down for ") && said.ends_with(" s (no carrier)"), "{said}");
    assert_eq!((code_of(&[]), code_of(&["--wait", "1"])), (Some(0), Some(0)));
    testbed.link(2).restore();
    verdict_of(&client, "up", TIMEOUT);

    server.kill();
    let said = verdict_of(&client, "no-answer", Duration::from_secs(3));
    let is_said = said.starts_with("no answer for ") && said.contains(" (server or all links), trying again");
    assert!(is_said, "{said}");
    assert_eq!((code_of(&[]), code_of(&["--wait", "1"])), (Some(3), Some(1)));
    assert_eq!(scrape(&testbed, Host::Client)["mpvpn_up"], 0.0);
    let _server = testbed.server(&[]);
    verdict_of(&client, "up", Duration::from_secs(5));
    drop(pings);

    let events = client.events();
    let has = |name: &str| events.iter().any(|event| event["event"] == name);
    assert!(has("no_answer") && (has("answers_again") || has("connected")), "{events:#?}");
}

#[test]
fn a_refused_class_shows_the_reason_and_its_packets_use_the_default_class() {
    let testbed = Testbed::two_links();
    std::fs::write(testbed.dir().join("server.toml"), "[[limit]]\nmax-classes = 1\n").expect("a file");
    let _server = testbed.server(&["--config", "server.toml"]);
    let file = "[[class]]\nname = 'critical'\n[[class]]\nname = 'bulk'\n";
    std::fs::write(testbed.dir().join("client.toml"), file).expect("a file");
    let client = testbed.client(&["--config", "client.toml"]);
    client.wait_for_status(Duration::from_secs(10), "classes that are refused", |status| {
        ["critical", "bulk"].iter().for_each(|class| testbed.wake_class(class));
        let refused = |class: &Value| {
            class["state"] == "connecting"
                && class["reason"].as_str().is_some_and(|why| why.contains("allowed are 1"))
        };
        let classes = status["classes"].as_array().cloned().unwrap_or_default();
        match classes.len() == 3 && classes[0]["state"] == "up" && classes[1..].iter().all(refused) {
            true => Ok(()),
            false => Err(format!("{:#}", status["classes"])),
        }
    });
    // A ping belongs to `critical`.
    reaches(&testbed, Host::Client, TUNNEL);
    assert!(client.log().contains("the default one carries it"), "{}", client.log());
}

/// The congestion controllers of all paths in a list.
fn controllers(paths: &Value) -> Vec<&str> {
    paths.as_array().into_iter().flatten().filter_map(|path| path["cc"].as_str()).collect()
}

#[test]
fn both_ends_use_the_congestion_controller_of_the_client() {
    let testbed = Testbed::new(&[LINK]);
    let server = testbed.server(&[]);
    let with_classes = ["client", "--path", "eth1"];
    let without = ["proxy", "--path", "eth1", "--socks5", "127.0.0.1:1080"];
    for args in [&with_classes[..], &without] {
        for cc in ["cubic", "bbr"] {
            let args = [args, &["--server", SERVER, "--insecure", "--cc", cc]].concat();
            let mut client = testbed.start(Host::Client, &args).wait_until_up();
            client.wait_for_status(TIMEOUT, &format!("{cc} at the client"), |status| {
                let class = &status["classes"][0];
                let is_right =
                    class["cc"] == cc && class["peer_cc"] == cc && controllers(&status["paths"])[0] == cc;
                if is_right { Ok(()) } else { Err(format!("{:#}", status["classes"])) }
            });
            server.wait_for_status(TIMEOUT, &format!("{cc} at the server"), |status| {
                let all = controllers(&status["clients"][0]["paths"]);
                let is_right = !all.is_empty() && all.iter().all(|found| *found == cc);
                if is_right && status["classes"][0]["cc"] == cc { Ok(()) } else { Err(format!("{status:#}")) }
            });
            assert!(client.terminate().success());
        }
    }
}
