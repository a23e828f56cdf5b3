//! An ordinary user's server has no TUN, but relays.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    time::Duration,
};

use mpvpn_tests::{
    home::{Home, USER},
    http::{Download, MB, Site},
    machine_share::{MachineShare, Share},
    stage::{Family, Peer, Place, SERVER, Stage, inet},
};

const LIMIT: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(15);
const SOCKS5: &str = "127.0.0.1:1080";
/// Of its local API.
const SOCKET: &str = "server-server.sock";

/// A server of an ordinary user, without waiting for it.
fn start(stage: &Stage, home: &Home, more: &[&str]) -> Peer {
    let words = [&["server"], more].concat();
    stage.start_as_user(Place::Server, home, &words, &home.file(SOCKET))
}

/// What it prints for its clients, once it is up: the words after `--server` of the command for a proxy.
fn printed(server: &Peer) -> Vec<String> {
    let log = server.log();
    let line = log.lines().find(|line| line.trim().starts_with("mpvpn proxy --socks5"));
    let line = line.unwrap_or_else(|| panic!("no command in:\n{log}"));
    line.split_whitespace().skip_while(|word| *word != "--server").skip(1).map(str::to_owned).collect()
}

/// An app's proxy that knows the server by what it prints.
fn proxy(stage: &Stage, printed: &[String]) -> Peer {
    let mut words = vec!["proxy", "--socks5", SOCKS5, "--server", SERVER, "--state-dir", "proxy-state"];
    words.extend(printed[1..].iter().map(String::as_str));
    stage.start(Place::Client, &words).up()
}

fn download(stage: &Stage, site: &Site, family: Family) {
    Download::start(stage, site, &inet(family), 10 * MB, LIMIT, &["--socks5-hostname", SOCKS5]).finish();
}

fn is_private(path: &Path, mode: u32) {
    let found = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!((found.permissions().mode() & 0o777, found.uid()), (mode, USER), "{}", path.display());
}

#[test]
fn apps_of_another_machine_reach_the_internet_through_it() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_links();
    let home = Home::new(&stage);
    let before = stage.network_state(Place::Server);
    let mut server = start(&stage, &home, &[]).up();
    assert!(server.log().contains("relays TCP and UDP only: run it as root"), "{}", server.log());
    assert_eq!(stage.network_state(Place::Server), before);
    is_private(&home.file(""), 0o700);
    let kept = ["server.crt", "server.key", "users.toml", "client-token"];
    for file in [&kept[..], &[SOCKET]].concat() {
        is_private(&home.file(file), 0o600);
    }
    let command = printed(&server);
    assert!(command[0].ends_with(":4433"), "{command:?}");

    let mut client = proxy(&stage, &command);
    client.until_path("eth2", "active", SOON);
    let site = Site::start(&stage, Place::Inet);
    download(&stage, &site, Family::V4);
    download(&stage, &site, Family::V6);
    let status = server.until(SOON, "the paths of one client", |status| {
        let paths = status["clients"][0]["paths"].as_array().map(Vec::len);
        if paths == Some(2) { Ok(()) } else { Err(format!("{paths:?} paths")) }
    });
    let [of_proxy] = &status["clients"].as_array().expect("a list")[..] else { panic!("{status:#}") };
    assert_eq!(of_proxy["user"], "default");
    assert!(of_proxy["tx_bytes"].as_u64() > Some(20 * MB), "{status:#}");
    let socket = home.file(SOCKET);
    let shown = stage.mpvpn(Place::Server, &["status", "--api-socket", &socket.to_string_lossy()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("relays TCP and UDP only"), "{shown}");
    assert!(client.terminate().success());

    assert!(server.terminate().success());
    assert!(!home.file(SOCKET).exists());
    assert_eq!(stage.network_state(Place::Server), before);
    let again = start(&stage, &home, &["--shards", "2"]).up();
    assert_eq!(printed(&again), command, "the certificate and the token are kept");
    let _client = proxy(&stage, &command);
    download(&stage, &site, Family::V4);
}

#[test]
fn what_needs_root_is_told_and_what_to_do() {
    let stage = Stage::two_links();
    let home = Home::new(&stage);
    let fails = |more: &[&str], code: i32, said: &[&str]| {
        let mut server = start(&stage, &home, more);
        assert_eq!(server.wait(SOON).code(), Some(code), "{}", server.log());
        let log = server.log();
        for words in said {
            assert!(log.contains(words), "no {words:?} in:\n{log}");
        }
    };
    fails(&["--listen", "0.0.0.0:443"], 1, &["cannot bind UDP 0.0.0.0:443", "CAP_NET_BIND_SERVICE"]);
    fails(&["--subnet", "10.9.0.0/24"], 2, &["--subnet is about a TUN device", "sudo"]);
    fails(&["--state-dir", "/var/lib/mpvpn-of-root"], 1, &["/var/lib/mpvpn-of-root", "Permission denied"]);
    let _first = start(&stage, &home, &[]).up();
    fails(&["--name", "second"], 1, &["cannot bind UDP 0.0.0.0:4433", "ss -ulpn"]);
}

#[test]
fn root_may_ask_for_relays_only() {
    let stage = Stage::two_links();
    let before = stage.network_state(Place::Server);
    let words = ["server", "--relay-only", "--listen", "0.0.0.0:4433", "--state-dir", "relays"];
    let server = stage.start(Place::Server, &words).up();
    assert_eq!(stage.network_state(Place::Server), before);
    assert!(server.status()["notes"][0].as_str().is_some_and(|note| note.contains("--relay-only")));
    let _client = proxy(&stage, &printed(&server));
    download(&stage, &Site::start(&stage, Place::Inet), Family::V4);
    let mut second = stage.start(Place::Server, &["server", "--relay-only", "--subnet", "10.9.0.0/24"]);
    assert_eq!(second.wait(SOON).code(), Some(2), "{}", second.log());
}
