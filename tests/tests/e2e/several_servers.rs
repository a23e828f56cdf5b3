//! A client with several servers: the first is dead, refuses, dies while data moves, or comes back.

use std::{
    fs,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    ping::{Ping, reaches},
    testbed::{Host, MpvpnProcess, Testbed, inet4},
};
use serde_json::Value;

/// For what has no bar of its own.
const SOON: Duration = Duration::from_secs(15);

/// Server `number`, at a port and with networks of its own.
fn server(testbed: &Testbed, number: u8, more: &[&str]) -> MpvpnProcess {
    let [listen, name, subnet, subnet6] = [
        format!("0.0.0.0:443{number}"),
        format!("srv{number}"),
        format!("10.{number}.0.0/24"),
        format!("fd00:{number}::/64"),
    ];
    let args = ["server", "--listen", &listen, "--cert", "server.crt", "--key", "server.key"];
    let of_its_own = ["--tun-name", &name, "--subnet", &subnet, "--subnet6", &subnet6];
    testbed.start(Host::Server, &[&args[..], &of_its_own, more].concat()).wait_until_up()
}

fn open_server(testbed: &Testbed, number: u8) -> MpvpnProcess {
    server(testbed, number, &["--auth", "none"])
}

/// A client of the servers 1 and 2, in this order.
fn client(testbed: &Testbed, more: &[&str]) -> MpvpnProcess {
    let servers = ["--server", "192.0.2.1:4431", "--server", "192.0.2.1:4432"];
    testbed.start_client(&[&servers[..], more].concat())
}

/// The port of the server in use, and why it is used.
fn in_use(status: &Value) -> (&str, &str) {
    let of = |key: &str| status["server"][key].as_str().expect("the server in use");
    (of("address"), of("why"))
}

/// Waits until the client is up at this server.
#[track_caller]
fn wait_for_server(client: &MpvpnProcess, number: u8, limit: Duration) {
    let address = format!("192.0.2.1:443{number}");
    client.wait_for_status(limit, &format!("it is up at server {number}"), |status| {
        let is_there = in_use(status).0 == address && status["state"] == "up";
        if is_there { Ok(()) } else { Err(format!("{} {}", status["state"], status["server"])) }
    });
}

#[test]
fn a_dead_first_server_does_not_keep_the_tunnel_from_coming_up() {
    let testbed = Testbed::two_links();
    let _second = open_server(&testbed, 2);
    let mut client = client(&testbed, &[]);
    let time = client.wait_until_up_within(Duration::from_secs(5));
    println!("up after {time:?}");
    let status = client.status();
    let (address, why) = in_use(&status);
    assert_eq!(address, "192.0.2.1:4432");
    assert!(why.contains("192.0.2.1:4431 has been silent for"), "{why}");
    assert_eq!(status["server"]["others"], serde_json::json!(["192.0.2.1:4431"]));
    reaches(&testbed, Host::Client, "10.2.0.1");
    reaches(&testbed, Host::Client, &inet4());
}

#[test]
fn a_server_that_dies_while_data_moves_is_left_and_used_again_after_a_minute_of_health() {
    for shards in ["1", "2"] {
        let testbed = Testbed::two_links();
        let mut first = open_server(&testbed, 1);
        let _second = open_server(&testbed, 2);
        let client = client(&testbed, &["--return", "now", "--shards", shards]).wait_until_up();
        let pings = Ping::dense(&testbed, Host::Client, &inet4(), 25);
        std::thread::sleep(Duration::from_secs(2));
        let (died, since) = (SystemTime::now(), Instant::now());
        first.kill();
        wait_for_server(&client, 2, Duration::from_secs(8));
        println!("{shards} shards: at the other server after {:?}", since.elapsed());
        reaches(&testbed, Host::Client, "10.2.0.1");
        let gap = pings.finish().longest_gap(died, died + Duration::from_secs(15));
        println!("{shards} shards: {gap:?} without an answer");
        assert!(gap <= Duration::from_secs(6), "{gap:?} without an answer");
        let events = client.events();
        let change = events.iter().find(|event| event["event"] == "server_changed").expect("an event");
        assert_eq!((&change["from"], &change["to"]), (&"192.0.2.1:4431".into(), &"192.0.2.1:4432".into()));
        if shards == "1" {
            let _first = open_server(&testbed, 1);
            wait_for_server(&client, 1, Duration::from_secs(95));
            reaches(&testbed, Host::Client, "10.1.0.1");
        }
    }
}

#[test]
fn a_client_without_any_way_out_keeps_its_server_and_its_connections() {
    let testbed = Testbed::two_links();
    let _servers = [1, 2].map(|number| open_server(&testbed, number));
    let client = client(&testbed, &[]).wait_until_up();
    let _pings = Ping::dense(&testbed, Host::Client, &inet4(), 30);
    let address = client.status()["addresses"].clone();
    [1, 2].iter().for_each(|link| testbed.link(*link).silence(Direction::Both));
    std::thread::sleep(Duration::from_secs(12));
    [1, 2].iter().for_each(|link| testbed.link(*link).end_silence());
    wait_for_server(&client, 1, SOON);
    reaches(&testbed, Host::Client, "10.1.0.1");
    assert_eq!(client.status()["addresses"], address);
    assert!(!client.log().contains("the server is 192.0.2.1:4432 now"), "{}", client.log());
}

#[test]
fn a_server_that_refuses_the_token_is_left_for_one_with_a_token_of_its_own() {
    let testbed = Testbed::two_links();
    let [own, state] = ["one", "two"];
    let _first = server(&testbed, 1, &["--state-dir", own]);
    let add = ["user", "add", "alice", "--json", "--host", "192.0.2.1:4432", "--state-dir", state];
    let added: Value = serde_json::from_slice(&testbed.mpvpn(Host::Server, &add).stdout).expect("JSON");
    let token = added["token"].as_str().expect("a token");
    let _second = server(&testbed, 2, &["--state-dir", state]);
    let (file, token_file) = (testbed.dir().join("client.toml"), testbed.dir().join("token"));
    fs::write(&token_file, token).expect("a file in the testbed's directory");
    let text = format!(
        "server = ['192.0.2.1:4431', {{ address = '192.0.2.1:4432', token-file = '{}' }}]\n\
         token = 'of-nobody'\ninsecure = true\npath = ['eth1', 'eth2']\n",
        token_file.display()
    );
    fs::write(&file, text).expect("a file in the testbed's directory");
    let args = ["client", "--config", file.to_str().expect("ASCII")];
    let client = testbed.start(Host::Client, &args).wait_until_up();
    wait_for_server(&client, 2, SOON);
    let status = client.status();
    let (_, why) = in_use(&status);
    assert!(why.contains("192.0.2.1:4431 refuses this client"), "{why}");
    reaches(&testbed, Host::Client, "10.2.0.1");
}

#[test]
fn packets_leave_past_the_tunnel_only_while_no_server_answers_and_only_where_it_is_wanted() {
    for direct in [true, false] {
        let testbed = Testbed::two_links();
        let mut servers = [1, 2].map(|number| open_server(&testbed, number));
        let when_down = if direct { "direct" } else { "block" };
        let client = client(&testbed, &["--when-down", when_down]).wait_until_up();
        let leaves_directly = || {
            let route = testbed.run(Host::Client, &["ip", "route", "get", &inet4()]);
            !route.contains("mpvpn0")
        };
        assert!(!leaves_directly());
        let _pings = Ping::dense(&testbed, Host::Client, &inet4(), 60);
        servers.iter_mut().for_each(MpvpnProcess::kill);
        std::thread::sleep(Duration::from_secs(13));
        assert_eq!(leaves_directly(), direct, "{}", client.log());
        let _again = open_server(&testbed, 2);
        wait_for_server(&client, 2, Duration::from_secs(20));
        assert!(!leaves_directly(), "{}", client.log());
    }
}

#[test]
fn a_server_with_another_certificate_than_the_pinned_one_is_not_used_and_the_client_goes_on() {
    let testbed = Testbed::two_links();
    let _second = open_server(&testbed, 2);
    let file = testbed.dir().join("client.toml");
    let text = format!(
        "server = ['192.0.2.1:4431', {{ address = '192.0.2.1:4432', pin = '{}' }}]\ninsecure = true\n\
         path = ['eth1', 'eth2']\n",
        "00".repeat(32)
    );
    fs::write(&file, text).expect("a file in the testbed's directory");
    let args = ["client", "--config", file.to_str().expect("ASCII")];
    let mut client = testbed.start(Host::Client, &args);
    std::thread::sleep(Duration::from_secs(12));
    assert!(client.is_running(), "{}", client.log());
    // It had its turn, as nobody else answers.
    assert!(client.log().contains("192.0.2.1:4432 refuses this client"), "{}", client.log());
    let _first = open_server(&testbed, 1);
    wait_for_server(&client, 1, SOON);
    reaches(&testbed, Host::Client, "10.1.0.1");
}
