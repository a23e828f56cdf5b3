//! The server of an unprivileged user has no TUN device, and relays TCP and UDP.

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

/// Limit of a transfer. Longer than on any busy machine; only a failing test takes that long.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
const SOCKS5: &str = "127.0.0.1:1080";
/// File name of the API socket.
const SOCKET_FILE: &str = "server-server.sock";

/// Starts a server of an unprivileged user without waiting.
fn start(testbed: &Testbed, home: &UserHome, more: &[&str]) -> MpvpnProcess {
    let args = [&["server"], more].concat();
    testbed.start_as_user(Host::Server, home, &args, &home.file(SOCKET_FILE))
}

/// The arguments after `--server` in the command for a proxy that the server prints, with `token` for its
/// FILE.
fn printed_arguments(server: &MpvpnProcess, token: &Path) -> Vec<String> {
    let log = server.log();
    let line = log.lines().find(|line| line.trim().starts_with("mpvpn proxy --socks5"));
    let line = line.unwrap_or_else(|| panic!("no command in:\n{log}"));
    let token = token.to_str().expect("ASCII");
    let words = line.split_whitespace().skip_while(|word| *word != "--server").skip(1);
    words.map(|word| if word == "FILE" { token } else { word }.to_owned()).collect()
}

/// Starts a proxy with the arguments that the server printed.
fn proxy(testbed: &Testbed, printed_arguments: &[String]) -> MpvpnProcess {
    let mut args = vec!["proxy", "--socks5", SOCKS5, "--server", SERVER, "--state-dir", "proxy-state"];
    args.extend(printed_arguments[1..].iter().map(String::as_str));
    testbed.start(Host::Client, &args).wait_until_up()
}

fn download(testbed: &Testbed, site: &TestPages, family: Family) {
    Download::start(testbed, site, &inet(family), 10 * MB, TRANSFER_TIMEOUT, &["--socks5-hostname", SOCKS5])
        .finish();
}

fn check_private(path: &Path, mode: u32) {
    let found = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!((found.permissions().mode() & 0o777, found.uid()), (mode, USER), "{}", path.display());
}

#[test]
fn apps_of_another_machine_reach_the_internet_through_a_server_without_root() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let before = testbed.network_state(Host::Server);
    let mut server = start(&testbed, &home, &[]).wait_until_up();
    assert!(server.log().contains("relays TCP and UDP only: run it as root"), "{}", server.log());
    assert_eq!(testbed.network_state(Host::Server), before);
    check_private(&home.file(""), 0o700);
    let kept = ["server.crt", "server.key", "users.toml", "client-token"];
    for file in [&kept[..], &[SOCKET_FILE]].concat() {
        check_private(&home.file(file), 0o600);
    }
    let command = printed_arguments(&server, &home.file("client-token"));
    assert!(command[0].ends_with(":4433"), "{command:?}");

    let mut client = proxy(&testbed, &command);
    client.wait_for_path("eth2", "active", TIMEOUT);
    let site = TestPages::start(&testbed, Host::Inet);
    download(&testbed, &site, Family::V4);
    download(&testbed, &site, Family::V6);
    let status = server.wait_for_status(TIMEOUT, "the paths of one client", |status| {
        let paths = status["clients"][0]["paths"].as_array().map(Vec::len);
        if paths == Some(2) { Ok(()) } else { Err(format!("{paths:?} paths")) }
    });
    let [proxy_client] = &status["clients"].as_array().expect("a list")[..] else { panic!("{status:#}") };
    assert_eq!(proxy_client["user"], "default");
    assert!(proxy_client["tx_bytes"].as_u64() > Some(20 * MB), "{status:#}");
    let socket = home.file(SOCKET_FILE);
    let shown = testbed.mpvpn(Host::Server, &["status", "--api-socket", &socket.to_string_lossy()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("relays TCP and UDP only"), "{shown}");
    assert!(client.terminate().success());

    assert!(server.terminate().success());
    assert!(!home.file(SOCKET_FILE).exists());
    assert_eq!(testbed.network_state(Host::Server), before);
    let again = start(&testbed, &home, &["--shards", "2"]).wait_until_up();
    assert_eq!(
        printed_arguments(&again, &home.file("client-token")),
        command,
        "the certificate and the token are kept"
    );
    let _client = proxy(&testbed, &command);
    download(&testbed, &site, Family::V4);
}

#[test]
fn options_that_need_root_fail_with_advice() {
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let fails = |more: &[&str], code: i32, expected_texts: &[&str]| {
        let mut server = start(&testbed, &home, more);
        assert_eq!(server.wait(TIMEOUT).code(), Some(code), "{}", server.log());
        let log = server.log();
        for expected in expected_texts {
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
    let token = testbed.dir().join("relays/client-token");
    let _client = proxy(&testbed, &printed_arguments(&server, &token));
    download(&testbed, &TestPages::start(&testbed, Host::Inet), Family::V4);
    let mut second = testbed.start(Host::Server, &["server", "--relay-only", "--subnet", "10.9.0.0/24"]);
    assert_eq!(second.wait(TIMEOUT).code(), Some(2), "{}", second.log());
}
