//! An ordinary user's server has no TUN, but relays.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    time::Duration,
};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    machine_share::{MachineShare, Share},
    testbed::{Family, Host, MpvpnProcess, SERVER, Testbed, inet},
    user_home::{USER, UserHome},
};

const LIMIT: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(15);
const SOCKS5: &str = "127.0.0.1:1080";
/// Of its local API.
const SOCKET: &str = "server-server.sock";

/// A server of an ordinary user, without waiting for it.
fn start(testbed: &Testbed, home: &UserHome, more: &[&str]) -> MpvpnProcess {
    let args = [&["server"], more].concat();
    testbed.start_as_user(Host::Server, home, &args, &home.file(SOCKET))
}

/// What it prints for its clients, once it is up: the words after `--server` of the command for a proxy.
fn printed(server: &MpvpnProcess) -> Vec<String> {
    let log = server.log();
    let line = log.lines().find(|line| line.trim().starts_with("mpvpn proxy --socks5"));
    let line = line.unwrap_or_else(|| panic!("no command in:\n{log}"));
    line.split_whitespace().skip_while(|word| *word != "--server").skip(1).map(str::to_owned).collect()
}

/// An app's proxy that knows the server by what it prints.
fn proxy(testbed: &Testbed, printed: &[String]) -> MpvpnProcess {
    let mut args = vec!["proxy", "--socks5", SOCKS5, "--server", SERVER, "--state-dir", "proxy-state"];
    args.extend(printed[1..].iter().map(String::as_str));
    testbed.start(Host::Client, &args).wait_until_up()
}

fn download(testbed: &Testbed, site: &TestPages, family: Family) {
    Download::start(testbed, site, &inet(family), 10 * MB, LIMIT, &["--socks5-hostname", SOCKS5]).finish();
}

fn is_private(path: &Path, mode: u32) {
    let found = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!((found.permissions().mode() & 0o777, found.uid()), (mode, USER), "{}", path.display());
}

#[test]
fn apps_of_another_machine_reach_the_internet_through_it() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let before = testbed.network_state(Host::Server);
    let mut server = start(&testbed, &home, &[]).wait_until_up();
    assert!(server.log().contains("relays TCP and UDP only: run it as root"), "{}", server.log());
    assert_eq!(testbed.network_state(Host::Server), before);
    is_private(&home.file(""), 0o700);
    let kept = ["server.crt", "server.key", "users.toml", "client-token"];
    for file in [&kept[..], &[SOCKET]].concat() {
        is_private(&home.file(file), 0o600);
    }
    let command = printed(&server);
    assert!(command[0].ends_with(":4433"), "{command:?}");

    let mut client = proxy(&testbed, &command);
    client.wait_for_path("eth2", "active", SOON);
    let site = TestPages::start(&testbed, Host::Inet);
    download(&testbed, &site, Family::V4);
    download(&testbed, &site, Family::V6);
    let status = server.wait_for_status(SOON, "the paths of one client", |status| {
        let paths = status["clients"][0]["paths"].as_array().map(Vec::len);
        if paths == Some(2) { Ok(()) } else { Err(format!("{paths:?} paths")) }
    });
    let [of_proxy] = &status["clients"].as_array().expect("a list")[..] else { panic!("{status:#}") };
    assert_eq!(of_proxy["user"], "default");
    assert!(of_proxy["tx_bytes"].as_u64() > Some(20 * MB), "{status:#}");
    let socket = home.file(SOCKET);
    let shown = testbed.mpvpn(Host::Server, &["status", "--api-socket", &socket.to_string_lossy()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("relays TCP and UDP only"), "{shown}");
    assert!(client.terminate().success());

    assert!(server.terminate().success());
    assert!(!home.file(SOCKET).exists());
    assert_eq!(testbed.network_state(Host::Server), before);
    let again = start(&testbed, &home, &["--shards", "2"]).wait_until_up();
    assert_eq!(printed(&again), command, "the certificate and the token are kept");
    let _client = proxy(&testbed, &command);
    download(&testbed, &site, Family::V4);
}

#[test]
fn what_needs_root_is_told_and_what_to_do() {
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let fails = |more: &[&str], code: i32, said: &[&str]| {
        let mut server = start(&testbed, &home, more);
        assert_eq!(server.wait(SOON).code(), Some(code), "{}", server.log());
        let log = server.log();
        for expected in said {
            assert!(log.contains(expected), "no {expected:?} in:\n{log}");
        }
    };
    fails(&["--listen", "0.0.0.0:443"], 1, &["cannot bind UDP 0.0.0.0:443", "CAP_NET_BIND_SERVICE"]);
    fails(&["--subnet", "10.9.0.0/24"], 2, &["--subnet is about a TUN device", "sudo"]);
    fails(&["--state-dir", "/var/lib/mpvpn-of-root"], 1, &["/var/lib/mpvpn-of-root", "Permission denied"]);
    let _first = start(&testbed, &home, &[]).wait_until_up();
    fails(&["--name", "second"], 1, &["cannot bind UDP 0.0.0.0:4433", "ss -ulpn"]);
}

#[test]
fn root_may_ask_for_relays_only() {
    let testbed = Testbed::two_links();
    let before = testbed.network_state(Host::Server);
    let args = ["server", "--relay-only", "--listen", "0.0.0.0:4433", "--state-dir", "relays"];
    let server = testbed.start(Host::Server, &args).wait_until_up();
    assert_eq!(testbed.network_state(Host::Server), before);
    assert!(server.status()["notes"][0].as_str().is_some_and(|note| note.contains("--relay-only")));
    let _client = proxy(&testbed, &printed(&server));
    download(&testbed, &TestPages::start(&testbed, Host::Inet), Family::V4);
    let mut second = testbed.start(Host::Server, &["server", "--relay-only", "--subnet", "10.9.0.0/24"]);
    assert_eq!(second.wait(SOON).code(), Some(2), "{}", second.log());
}
