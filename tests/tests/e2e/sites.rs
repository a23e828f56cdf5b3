//! Networks behind clients: who reaches them, who does not, and who has them.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    dns::{ANSWER, NameServer},
    eventually,
    http::{MB, TestPages},
    ping::{Ping, ping, reaches},
    tcpdump::Tcpdump,
    testbed::{Family, Host, MpvpnProcess, Testbed, inet, inet4},
};
use serde_json::Value;

use crate::users::Site;

const SOON: Duration = Duration::from_secs(15);
/// The LAN of the first home is that of the testbed, with the host 192.168.77.2. The second home has the same
/// network, and its host is the client's own machine.
const SECOND_HOST: &str = "192.168.77.9";
const SECOND_HOST_V6: &str = "fd00:78::9";
/// The far end of the client's second link, where a name server is.
const FAR_END: &str = "10.102.0.1";
/// The address of a server's metrics.
const METRICS: &str = "127.0.0.1:9464";

/// A client with a LAN, and one whose LAN has the same addresses.
fn machines() -> Testbed {
    let testbed = Testbed::two_homes();
    let other = |args: &[&str]| drop(testbed.run(Host::Other, args));
    other(&["ip", "link", "add", "lan0", "type", "veth", "peer", "name", "hosts"]);
    for device in ["lan0", "hosts"] {
        other(&["ip", "link", "set", device, "up"]);
    }
    other(&["ip", "address", "add", &format!("{SECOND_HOST}/24"), "dev", "lan0"]);
    other(&["ip", "address", "add", &format!("{SECOND_HOST_V6}/64"), "dev", "lan0"]);
    testbed
}

/// The same, and a server with users.
fn two_homes() -> Site {
    let testbed = machines();
    let server = Site::start_server(&testbed);
    Site { server, testbed }
}

/// The state of an announced network, and why.
fn state(process: &MpvpnProcess, network: &str) -> (String, String) {
    let status = process.status();
    let all = status["announced"].as_array().cloned().unwrap_or_default();
    let one = all.into_iter().find(|one| one["network"] == network).unwrap_or(Value::Null);
    let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("reason"))
}

fn wait_for_state(process: &MpvpnProcess, network: &str, wanted: &str) {
    eventually(SOON, &format!("{network} is {wanted}"), || {
        let (state, reason) = state(process, network);
        if state == wanted { Ok(()) } else { Err(format!("{state}: {reason}\n{}", process.log())) }
    });
}

fn is_silent(testbed: &Testbed, from: Host, to: &str) {
    let pings = ping(testbed, from, to, 4);
    assert!(pings.answers.is_empty(), "{from:?} reaches {to}");
}

#[test]
fn two_homes_with_the_same_network_reach_each_other_and_let_in_only_whom_they_name() {
    let site = two_homes();
    let testbed = &site.testbed;
    let anna = site.add("anna", &["--route", "10.77.1.0/24", "--route", "fd00:77::/64"]);
    let bob = site.add("bob", &["--route", "10.77.2.0/24"]);
    let file = testbed.dir().join("client.toml");
    let announce =
        "announce = [{ network = \"192.168.77.0/24\", as = \"10.77.1.0/24\" }, \"fd00:77::/64\"]\n";
    let accept = |networks: &str| {
        fs::write(&file, format!("{announce}accept-from = [{networks}]\n")).expect("a file to write");
    };
    accept("\"10.77.2.0/24\"");
    let mut anna = site.join_with(Host::Client, &anna, &["--config", "client.toml"]).wait_until_up();
    let maps = ["--announce", "192.168.77.0/24=10.77.2.0/24", "--accept-from", "10.77.0.0/16"];
    let mut bob = site.join_with(Host::Other, &bob, &maps).wait_until_up();
    for (process, network) in [(&anna, "10.77.1.0/24"), (&anna, "fd00:77::/64"), (&bob, "10.77.2.0/24")] {
        wait_for_state(process, network, "in use");
    }
    assert_eq!(state(&site.server, "10.77.2.0/24").0, "in use");

    // From each home into the other, though both have the same addresses.
    reaches(testbed, Host::Lan, "10.77.2.9");
    let from_home = ["ping", "-c", "5", "-i", "0.2", "-W", "1", "-I", SECOND_HOST, "10.77.1.2"];
    let output = testbed.output_of(Host::Other, SOON, &from_home);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    // To the internet with the server's address, as hosts of the tunnel.
    reaches(testbed, Host::Lan, &inet4());

    // From behind the server: as soon as the home lets it in, and not before.
    add_route_of_inet(testbed, "10.77.1.0/24");
    is_silent(testbed, Host::Inet, "10.77.1.2");
    let pings = Ping::every(testbed, Host::Other, Duration::from_millis(20), "10.77.1.2", 4);
    accept("\"10.77.2.0/24\", \"10.0.0.0/24\", \"198.51.100.0/24\"");
    anna.reload();
    reaches(testbed, Host::Inet, "10.77.1.2");
    // Those of bob's own tunnel address began before they were let in.
    assert!(!pings.finish().answers.is_empty());

    // Without the client, nobody reaches the network and nothing of it is left.
    assert!(bob.interrupt().success());
    eventually(SOON, "the route is taken back", || {
        let routes = testbed.run(Host::Server, &["ip", "route", "show", "10.77.2.0/24"]);
        if routes.trim().is_empty() { Ok(()) } else { Err(routes) }
    });
    is_silent(testbed, Host::Lan, "10.77.2.9");
    assert!(anna.interrupt().success());
    let rules = testbed.run(Host::Client, &["nft", "list", "ruleset"]);
    assert!(!rules.contains("mpvpn"), "{rules}");
}

#[test]
fn networks_that_a_user_may_not_have_are_refused_with_the_next_step() {
    let site = two_homes();
    let link_of_anna = site.add("anna", &["--route", "192.168.77.0/24"]);
    let bob = site.add("bob", &["--route", "192.168.0.0/16", "--route", "10.0.0.0/24"]);
    let announce = ["--announce", "192.168.77.0/24"];
    let anna = site.join_with(Host::Client, &link_of_anna, &announce).wait_until_up();
    wait_for_state(&anna, "192.168.77.0/24", "in use");
    let announce = ["192.168.77.0/24", "172.16.0.0/24", "10.0.0.128/25"];
    let args: Vec<_> = announce.iter().flat_map(|net| ["--announce", *net]).collect();
    let bob = site.join_with(Host::Other, &bob, &args).wait_until_up();
    for (network, why) in [
        ("192.168.77.0/24", "announce it as one that nobody has"),
        ("172.16.0.0/24", "mpvpn user set NAME --route NETWORK"),
        ("10.0.0.128/25", "overlaps a network of the server"),
    ] {
        wait_for_state(&bob, network, "refused");
        let (_, reason) = state(&bob, network);
        assert!(reason.contains(why), "{network}: {reason}");
    }
    assert!(bob.events().iter().any(|event| event["event"] == "network_changed"), "{}", bob.log());
    let shown =
        site.testbed.mpvpn(Host::Other, &["status", "--api-socket", bob.socket().to_str().expect("ASCII")]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("172.16.0.0/24") && shown.contains("refused"), "{shown}");

    // Leave that is given counts at once, and leave that is taken back, too.
    assert!(site.user(&["set", "bob", "--route", "172.16.0.0/24"]).status.success());
    wait_for_state(&bob, "172.16.0.0/24", "in use");
    assert!(site.user(&["set", "anna", "--route", "none"]).status.success());
    wait_for_state(&anna, "192.168.77.0/24", "refused");
    let routes = site.testbed.run(Host::Server, &["ip", "route"]);
    assert!(routes.contains("172.16.0.0/24") && !routes.contains("192.168.77.0/24"), "{routes}");
    // A mistake says what is missing, and ends the client at once.
    let mut mistaken = site.join_with(Host::Client, &link_of_anna, &["--masquerade"]);
    assert_eq!(mistaken.wait(SOON).code(), Some(2), "{}", mistaken.log());
    assert!(mistaken.log().contains("--announce"), "{}", mistaken.log());
}

#[test]
fn a_second_client_of_the_user_takes_the_network_over_within_a_second() {
    let site = two_homes();
    let testbed = &site.testbed;
    // The host that both homes have, at the second one.
    testbed.run(Host::Other, &["ip", "address", "add", "192.168.77.2/24", "dev", "lan0"]);
    let link = site.add("anna", &["--route", "192.168.77.0/24"]);
    let announce = ["--announce", "192.168.77.0/24", "--accept-from", "10.0.0.0/24"];
    let mut first = site.join_with(Host::Client, &link, &announce).wait_until_up();
    wait_for_state(&first, "192.168.77.0/24", "in use");
    let second = site.join_with(Host::Other, &link, &announce).wait_until_up();
    wait_for_state(&second, "192.168.77.0/24", "standby");
    let pings = Ping::every(testbed, Host::Server, Duration::from_millis(20), "192.168.77.2", 8);
    thread::sleep(Duration::from_secs(2));
    let ended = SystemTime::now();
    assert!(first.interrupt().success());
    wait_for_state(&second, "192.168.77.0/24", "in use");
    thread::sleep(Duration::from_secs(2));
    let until = SystemTime::now();
    let gap = pings.stop().longest_gap(ended, until);
    assert!(gap < Duration::from_secs(1), "{gap:?} without an answer");
}

#[test]
fn the_rules_of_a_user_count_for_the_networks_behind_its_clients() {
    let Site { server, testbed } = two_homes();
    drop(server);
    let rules = "[[access]]\nallow = false\nusers = [\"anna\"]\nto = [\"198.51.100.0/24\"]\n";
    fs::write(testbed.dir().join("server.toml"), rules).expect("a file to write");
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml"];
    let site = Site { server: testbed.server(&args), testbed };
    let anna = site.add("anna", &["--route", "192.168.77.0/24"]);
    let bob = site.add("bob", &[]);
    let announce = ["--announce", "192.168.77.0/24", "--accept-from", "10.0.0.0/24"];
    let anna = site.join_with(Host::Client, &anna, &announce).wait_until_up();
    wait_for_state(&anna, "192.168.77.0/24", "in use");
    let _bob = site.join_with(Host::Other, &bob, &["--routes", "none"]).wait_until_up();
    reaches(&site.testbed, Host::Lan, "10.0.0.1");
    is_silent(&site.testbed, Host::Lan, &inet4());
    reaches(&site.testbed, Host::Server, "192.168.77.2");
}

#[test]
fn users_and_the_hosts_behind_them_have_names() {
    let Site { server, testbed } = two_homes();
    drop(server);
    let file = testbed.dir().join("server.toml");
    let names = "dns-domain = \"vpn.internal\"\n[[dns-name]]\nname = \"camera\"\naddress = [\"192.168.77.2\", \"fd00:77::2\"]\n";
    fs::write(&file, names).expect("a file to write");
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml"];
    let site = Site { server: testbed.server(&args), testbed };
    let [anna, bob] = ["Anna", "bob"].map(|name| site.add(name, &[]));
    let anna = site.join_with(Host::Client, &anna, &[]).wait_until_up();
    let bob = site.join_with(Host::Other, &bob, &[]).wait_until_up();
    let resolvers = site.testbed.dir().join("resolv.conf");
    fs::write(&resolvers, "nameserver 10.0.0.1\n").expect("a file to write");
    let getent = |host, args: &str| getent(&site.testbed, host, &resolvers, args);
    let of_anna = anna.address(Family::V4);
    assert!(getent(Host::Other, "ahostsv4 anna.vpn.internal").contains(&of_anna));
    assert!(getent(Host::Other, "ahostsv6 ANNA.vpn.internal").contains(&anna.address(Family::V6)));
    assert!(getent(Host::Other, &format!("hosts {of_anna}")).contains("anna.vpn.internal"));
    assert!(getent(Host::Client, "ahostsv4 camera.vpn.internal").contains("192.168.77.2"));
    assert_eq!(getent(Host::Client, "ahostsv4 nobody.vpn.internal"), "");
    // Where clients are kept from each other, each knows its own name and those that are for all.
    fs::write(&file, format!("isolate = true\n{names}")).expect("a file to write");
    let socket = site.server.socket().to_str().expect("ASCII").to_owned();
    let reload = site.testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    assert!(reload.status.success(), "{reload:?}");
    assert_eq!(getent(Host::Other, "ahostsv4 anna.vpn.internal"), "");
    assert!(getent(Host::Other, "ahostsv4 bob.vpn.internal").contains(&bob.address(Family::V4)));
    assert!(getent(Host::Other, "ahostsv4 camera.vpn.internal").contains("192.168.77.2"));
}

/// Runs `getent` on a machine with these resolvers, and returns what it prints.
fn getent(testbed: &Testbed, host: Host, resolvers: &Path, args: &str) -> String {
    let script = format!("mount --bind {} /etc/resolv.conf && exec getent {args}", resolvers.display());
    let output = testbed.output_of(host, SOON, &["unshare", "--mount", "sh", "-c", &script]);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A download from the internet through a port of the server lives through a cut of the first link.
fn downloads_across_a_cut(testbed: &Testbed, port: u16) {
    let url = format!("http://198.51.100.1:{port}/{}", 4 * MB);
    let args = ["-sS", "--limit-rate", "1M", "--max-time", "20", "-o", "/dev/null", &url];
    let mut download = testbed.command(Host::Inet, "curl");
    let mut download = download.args(args).spawn().expect("curl runs");
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).cut();
    assert!(download.wait().expect("curl ends").success());
}

/// Lets the network behind the server reach a network behind clients.
fn add_route_of_inet(testbed: &Testbed, network: &str) {
    let there = testbed.run(Host::Server, &["ip", "-o", "-4", "addr"]);
    let there = there.split_whitespace().find(|word| word.starts_with("198.51.100."));
    let there = there.and_then(|net| net.split('/').next()).expect("the server's address");
    testbed.run(Host::Inet, &["ip", "route", "add", network, "via", there]);
}

/// Two sites with the same network and a network behind the server, all at once: each host reaches each other
/// one whom it may, by address and by name; a camera is seen from outside while a link is cut; the names of a
/// bypass leave over its link; with the kill switch nothing else does.
#[test]
fn two_sites_and_the_network_of_the_server_have_all_they_need_at_once() {
    let testbed = machines();
    let camera = TestPages::start(&testbed, Host::Lan);
    let _at_link = NameServer::start_at(&testbed, Host::Server, FAR_END.parse().expect("an address"));
    let write = |file: &str, text: &str| fs::write(testbed.dir().join(file), text).expect("a file to write");
    write(
        "server.toml",
        &format!(
            "dns-domain = 'vpn.internal'\n[[dns-name]]\nname = 'camera'\naddress = ['10.77.1.2', 'fd00:77::2']\n\
             [[forward]]\nport = 'tcp/8443'\nto = '10.77.1.2:{}'\n",
            camera.port()
        ),
    );
    write(
        "client.toml",
        &format!(
            "kill-switch = true\naccept-from = ['10.77.2.0/24', 'fd00:78::/64', '198.51.100.0/24']\n\
             announce = [{{ network = '192.168.77.0/24', as = '10.77.1.0/24' }}, 'fd00:77::/64']\n\
             [[bypass]]\ndomain = 'tv.example'\nlink = 'eth2'\ndns = '{FAR_END}'\n"
        ),
    );
    let server = testbed.server(&["--auth", "token", "--state-dir", "state", "--config", "server.toml"]);
    let site = Site { server, testbed };
    let testbed = &site.testbed;
    let anna = site.add("anna", &["--route", "10.77.1.0/24", "--route", "fd00:77::/64"]);
    let bob = site.add("bob", &["--route", "10.77.2.0/24", "--route", "fd00:78::/64"]);
    let resolvers = testbed.dir().join("resolv.conf");
    fs::write(&resolvers, "nameserver 10.101.0.1\n").expect("a file to write");
    let mut capture = Tcpdump::start(testbed, Host::Client, "udp or tcp or icmp");
    let socket = testbed.file("api", Host::Client);
    let path = socket.to_str().expect("ASCII");
    let links = ["--path", "eth1", "--path", "eth2", "--api-socket", path];
    let args = [&["client", &anna, "--config", "client.toml"], &links[..]].concat();
    let resolv_conf = Path::new("/etc/resolv.conf");
    let anna = testbed.start_with_file(Host::Client, &resolvers, resolv_conf, &args, &socket).wait_until_up();
    let maps = ["--announce", "192.168.77.0/24=10.77.2.0/24", "--announce", "fd00:78::/64"];
    let accepts = ["--accept-from", "10.77.1.0/24", "--accept-from", "fd00:77::/64"];
    let bob = site.join_with(Host::Other, &bob, &[maps, accepts].concat()).wait_until_up();
    for (process, network) in
        [(&anna, "10.77.1.0/24"), (&anna, "fd00:77::/64"), (&bob, "10.77.2.0/24"), (&bob, "fd00:78::/64")]
    {
        wait_for_state(process, network, "in use");
    }
    add_route_of_inet(testbed, "10.77.1.0/24");

    for (from, to) in [
        (Host::Lan, "10.77.2.9"),
        (Host::Lan, SECOND_HOST_V6),
        (Host::Lan, &inet4()),
        (Host::Lan, &inet(Family::V6)),
        (Host::Inet, "10.77.1.2"),
    ] {
        reaches(testbed, from, to);
    }
    for (source, to) in [(SECOND_HOST, "10.77.1.2"), (SECOND_HOST_V6, "fd00:77::2")] {
        let args = ["ping", "-c", "5", "-i", "0.2", "-W", "1", "-I", source, to];
        let output = testbed.output_of(Host::Other, SOON, &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    // The tunnel address of the second client is not among those that the first site lets in.
    is_silent(testbed, Host::Other, "10.77.1.2");
    let getent = |host, resolvers: &Path, args: &str| getent(testbed, host, resolvers, args);
    let of_server = testbed.dir().join("other.conf");
    fs::write(&of_server, "nameserver 10.0.0.1\n").expect("a file to write");
    assert!(getent(Host::Other, &of_server, "ahostsv4 camera.vpn.internal").contains("10.77.1.2"));
    assert!(getent(Host::Other, &of_server, "ahostsv6 camera.vpn.internal").contains("fd00:77::2"));
    assert!(getent(Host::Client, &resolvers, "ahostsv4 bob.vpn.internal").contains(&bob.address(Family::V4)));

    downloads_across_a_cut(testbed, 8443);

    assert!(getent(Host::Client, &resolvers, "ahostsv4 live.tv.example").contains(&ANSWER.to_string()));
    testbed.send_empty_udp(Host::Client, (&ANSWER.to_string(), 9));
    testbed.send_empty_udp(Host::Client, ("203.0.113.7", 9));
    let lines = capture.new_lines();
    let leaves = |line: &&String| {
        let on = |link: &str| line.split_whitespace().nth(1) == Some(link);
        line.contains(" Out ") && (on("eth1") || on("eth2"))
    };
    let (of_tunnel, others): (Vec<_>, Vec<_>) =
        lines.iter().filter(leaves).partition(|line| line.contains("> 192.0.2.1."));
    assert!(of_tunnel.len() > 1000, "{} packets of the tunnel", of_tunnel.len());
    let bypassed = |line: &&&String| {
        line.contains(&format!("> {FAR_END}.53")) || line.contains(&format!("> {ANSWER}.9:"))
    };
    assert!(others.iter().any(|line| line.contains(&format!("> {ANSWER}.9:"))), "{others:#?}");
    let wrong: Vec<_> = others.iter().filter(|line| !bypassed(line) || !line.contains(" eth2 ")).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether a page of 1000 bytes arrives.
fn gets(testbed: &Testbed, from: Host, url: &str) -> bool {
    let args = ["curl", "-sS", "--max-time", "5", "-o", "/dev/null", "-w", "%{size_download}", url];
    let output = testbed.output_of(from, SOON, &args);
    output.status.success() && output.stdout == b"1000"
}

/// The bytes that forwarded ports have carried: to the host, and back.
fn forwarded_bytes<const N: usize>(process: &MpvpnProcess, ports: [&str; N]) -> [(u64, u64); N] {
    let status = process.status();
    ports.map(|port| {
        let all = status["forwards"].as_array().expect("forwards");
        let one = all.iter().find(|one| one["port"] == port).expect("the forward");
        let bytes = |key: &str| one[key].as_u64().expect("a number");
        (bytes("tx_bytes"), bytes("rx_bytes"))
    })
}

#[test]
fn ports_of_the_server_lead_to_a_client_and_to_a_host_behind_it() {
    let Site { server, testbed } = two_homes();
    drop(server);
    let pages = [Host::Client, Host::Lan, Host::Server].map(|host| TestPages::start(&testbed, host));
    let [client, lan, taken] = [0, 1, 2].map(|at: usize| pages[at].port());
    let file = testbed.dir().join("server.toml");
    let forward = |port: &str, to: &str| format!("[[forward]]\nport = \"{port}\"\nto = \"{to}\"\n");
    let forwards = forward("tcp/8080", &format!("anna:{client}"))
        + &forward("tcp/8081", &format!("192.168.77.2:{lan}"))
        + "from = [\"198.51.100.0/24\", \"10.0.0.0/24\"]\n";
    fs::write(&file, &forwards).expect("a file to write");
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml", "--metrics", METRICS];
    let site = Site { server: testbed.server(&args), testbed };
    let testbed = &site.testbed;
    let at = |port: u16| format!("http://{}:{port}/1000", "198.51.100.1");
    let [anna, bob] = [("anna", "192.168.77.0/24"), ("bob", "10.9.9.0/24")]
        .map(|(name, net)| site.add(name, &["--route", net]));
    assert!(!gets(testbed, Host::Inet, &at(8080)), "nobody is there");
    let file_of_client = testbed.dir().join("client.toml");
    let own = forward("tcp/9000", &format!("192.168.77.2:{lan}"));
    let announce = "announce = \"192.168.77.0/24\"\naccept-from = \"0.0.0.0/0\"\n";
    fs::write(file_of_client, format!("{announce}{own}")).expect("a file to write");
    let mut client = site.join_with(Host::Client, &anna, &["--config", "client.toml"]).wait_until_up();
    wait_for_state(&client, "192.168.77.0/24", "in use");
    let _bob = site.join_with(Host::Other, &bob, &[]).wait_until_up();
    for (from, port) in [(Host::Inet, 8080), (Host::Inet, 8081), (Host::Other, 8080), (Host::Other, 8081)] {
        eventually(SOON, &format!("{from:?} reaches port {port}"), || {
            if gets(testbed, from, &at(port)) { Ok(()) } else { Err(site.server.log()) }
        });
    }
    let own_port = format!("http://{}:9000/1000", client.address(Family::V4));
    assert!(gets(testbed, Host::Other, &own_port), "a port of the client leads on to its LAN");
    let status = site.server.status();
    assert_eq!(status["forwards"][0]["addresses"][0], client.address(Family::V4).as_str(), "{status:#}");

    downloads_across_a_cut(testbed, 8081);

    // Each forward shows what it has carried, to the host and back.
    let [_, of_lan] = forwarded_bytes(&site.server, ["tcp/8080", "tcp/8081"]);
    assert!((4 * MB..5 * MB).contains(&of_lan.1), "{of_lan:?} came back");
    assert!((10_000..MB).contains(&of_lan.0), "{of_lan:?} went there");
    let [own] = forwarded_bytes(&client, ["tcp/9000"]);
    assert!((1000..5000).contains(&own.1) && (200..5000).contains(&own.0), "{own:?}");
    let metrics = testbed.run(Host::Server, &["curl", "-sSf", &format!("http://{METRICS}/metrics")]);
    let metric = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or_else(|| panic!("{name}: {metrics}"))
    };
    let receive = metric("mpvpn_forward_receive_bytes_total{port=\"tcp/8081\"}") as u64;
    let transmit = metric("mpvpn_forward_transmit_bytes_total{port=\"tcp/8081\"}") as u64;
    // The last packets of a connection may come in between.
    let is_about = |figure: u64, wanted: u64| (wanted..wanted + 1000).contains(&figure);
    assert!(is_about(receive, of_lan.1) && is_about(transmit, of_lan.0), "{receive} {transmit} {of_lan:?}");

    // A port that a program has is refused by its name, and nothing changes.
    fs::write(&file, forwards.clone() + &forward(&format!("tcp/{taken}"), "anna")).expect("a file to write");
    let socket = site.server.socket().to_str().expect("ASCII").to_owned();
    let reload = testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    let said = String::from_utf8_lossy(&reload.stderr).into_owned();
    assert!(!reload.status.success() && said.contains("of this machine listens at"), "{said}");
    assert!(gets(testbed, Host::Inet, &at(8080)));

    // Without the client, and without the table, the port leads nowhere.
    assert!(client.interrupt().success());
    assert!(!gets(testbed, Host::Inet, &at(8080)));
    fs::write(&file, forward("tcp/8081", "bob")).expect("a file to write");
    let reload = testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    assert!(reload.status.success(), "{reload:?}");
    eventually(SOON, "the table is in force", || {
        let args = ["nft", "list", "table", "inet", "mpvpn_mpvpn0_forwards"];
        let table = testbed.run(Host::Server, &args);
        let is_there = |port: &str| table.contains(&format!("dport {port} dnat"));
        if is_there("8081") && !is_there("8080") { Ok(()) } else { Err(table) }
    });
    let [after] = forwarded_bytes(&site.server, ["tcp/8081"]);
    assert!(is_about(after.1, of_lan.1) && is_about(after.0, of_lan.0), "a change loses nothing: {after:?}");
}

#[test]
fn a_thousand_forwards_and_hundreds_of_networks_are_in_use_within_two_seconds() {
    let Site { server, testbed } = two_homes();
    drop(server);
    let forward =
        |at: u16| format!("[[forward]]\nport = \"tcp/{}\"\nto = \"anna:{}\"\n", 20_000 + at, 1 + at);
    let forwards = |count: u16| (0..count).map(forward).collect::<String>();
    let file = testbed.dir().join("server.toml");
    fs::write(&file, forwards(1000)).expect("a file to write");
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml"];
    let began = Instant::now();
    let site = Site { server: testbed.server(&args), testbed };
    let started = began.elapsed();
    let testbed = &site.testbed;
    let anna = site.add("anna", &["--route", "10.64.0.0/10"]);
    let network = |at: u32| format!("\"10.64.{at}.0/24\"");
    let announce = |count: u32| {
        let networks: Vec<String> = (0..count).map(network).collect();
        let text = format!("announce = [{}]\n", networks.join(", "));
        fs::write(testbed.dir().join("client.toml"), text).expect("a file to write");
    };
    announce(256);
    let client = site.join_with(Host::Client, &anna, &["--config", "client.toml"]).wait_until_up();
    let began = Instant::now();
    wait_for_state(&client, "10.64.255.0/24", "in use");
    let announced = began.elapsed();
    announce(255);
    let began = Instant::now();
    client.reload();
    eventually(SOON, "the last network is not routed any more", || {
        let routes = testbed.run(Host::Server, &["ip", "route", "show", "10.64.255.0/24"]);
        if routes.trim().is_empty() { Ok(()) } else { Err(routes) }
    });
    let reloaded = began.elapsed();
    fs::write(&file, forwards(999)).expect("a file to write");
    let socket = site.server.socket().to_str().expect("ASCII").to_owned();
    let began = Instant::now();
    let reload = testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    assert!(reload.status.success(), "{reload:?}");
    let forwarded = began.elapsed();
    println!("server {started:?}, networks {announced:?} and {reloaded:?}, forwards again {forwarded:?}");
    for took in [started, announced, reloaded, forwarded] {
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}
