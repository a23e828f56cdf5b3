//! Tokens of clients and certificates of servers.

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed, binary},
};
use rustix::process::{Pid, Signal, kill_process};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Checks that the client ends with exit code 1 and that its log contains all of `said` and advice. Returns
/// the log.
fn check_refused(mut client: MpvpnProcess, said: &[&str]) -> String {
    let status = client.wait(TIMEOUT);
    let log = client.log();
    assert_eq!(status.code(), Some(1), "{log}");
    for expected in said {
        assert!(log.contains(expected), "no {expected:?} in:\n{log}");
    }
    assert!(log.contains("next:"), "no advice in:\n{log}");
    log
}

fn fingerprint(testbed: &Testbed, name: &str) -> String {
    let file = testbed.dir().join(format!("{name}.crt"));
    let output = Command::new("openssl")
        .args(["x509", "-noout", "-fingerprint", "-sha256", "-in"])
        .arg(file)
        .output()
        .expect("openssl runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.trim().split_once('=').expect("openssl prints NAME=FINGERPRINT").1.to_owned()
}

#[test]
fn a_wrong_token_gets_401_and_the_client_says_so() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&["--auth", "token", "--state-dir", "server-state"]);
    let made_up = format!("mpvpn_{}", "A".repeat(43));
    check_refused(testbed.start_client(&["--token", &made_up]), &["401"]);
    // A request without a token gets no hint from the server; the client knows what that may mean.
    check_refused(testbed.start_client(&[]), &["405", "--token"]);
    assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(0));
}

#[test]
fn the_right_token_is_accepted() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "server-state"]);
    let token = fs::read_to_string(testbed.dir().join("server-state/client-token")).expect("a token");
    fs::write(testbed.dir().join("token"), &token).expect("a file");
    let mut client = testbed.client(&["--token", token.trim()]);
    assert!(client.interrupt().success());
    let _again = testbed.client(&["--token-file", "token"]);
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn the_first_start_prints_a_client_command_that_works_and_only_a_terminal_shows_the_token() {
    let testbed = Testbed::two_links();
    let args = ["server", "--listen", "0.0.0.0:4433", "--state-dir", "first-start"];
    let server = testbed.start(Host::Server, &args).wait_until_up();
    let log = server.log();
    let token_file = testbed.dir().join("first-start/client-token");
    let token = fs::read_to_string(&token_file).expect("a token");
    assert!(!log.contains(&token.trim()["mpvpn_".len()..]), "{log}");
    assert!(log.contains("A token, for FILE, is in first-start/client-token on this machine."), "{log}");
    assert!(!log.contains("open files"), "{log}");
    let command = log
        .lines()
        .find_map(|line| line.find("mpvpn client ").map(|at| &line[at + "mpvpn ".len()..]))
        .unwrap_or_else(|| panic!("no client command in:\n{log}"));
    for option in ["--server", "--pin", "--token-file FILE"] {
        assert!(command.contains(option), "no {option} in {command}");
    }
    let file = token_file.to_str().expect("ASCII");
    let mut args: Vec<&str> =
        command.split_whitespace().map(|word| if word == "FILE" { file } else { word }).collect();
    // The server can only guess which of its addresses a client can reach.
    let at = args.iter().position(|word| *word == "--server").expect("checked above") + 1;
    args[at] = mpvpn_tests::testbed::SERVER;
    let client = testbed.start(Host::Client, &args).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    drop((client, server));

    // A terminal shows the whole command.
    let path = testbed.file("terminal", Host::Server);
    let shown = fs::File::create(&path).expect("a file");
    fs::write(testbed.dir().join("public.toml"), "public = 'vpn.example:8443'\n").expect("a file");
    let options = "--config public.toml --listen 0.0.0.0:4433 --state-dir first-start";
    let script = format!("exec {} server {options}", binary().display());
    let mut on_terminal = testbed.command(Host::Server, "script");
    on_terminal.args(["-qefc", &script, "/dev/null"]).stdin(Stdio::null()).stdout(shown);
    let mut on_terminal = on_terminal.spawn().expect("script runs");
    eventually(Duration::from_secs(15), "the token is shown", || {
        let text = fs::read_to_string(&path).unwrap_or_default();
        match text.contains("mpvpn client --server vpn.example:8443 ")
            && text.contains(&format!("--token {}", token.trim()))
        {
            true => Ok(()),
            false => Err(text),
        }
    });
    kill_process(Pid::from_child(&on_terminal), Signal::INT).expect("our own child");
    on_terminal.wait().expect("our own child");
}

#[test]
fn the_servers_certificate_is_accepted_as_ca() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&["--ca", "server.crt"]);
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn the_fingerprint_is_accepted() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&["--pin", &fingerprint(&testbed, "server")]);
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn another_certificate_is_refused() {
    let testbed = Testbed::two_links();
    testbed.make_certificate("other");
    let _server = testbed.server(&[]);
    check_refused(testbed.start_client(&["--ca", "other.crt"]), &["certificate"]);
    let other = testbed.start_client(&["--pin", &fingerprint(&testbed, "other")]);
    let log = check_refused(other, &["certificate is not the pinned one: its SHA-256 begins with"]);
    assert!(!log.contains("OtherError") && !log.contains("OtherFingerprint"), "{log}");
}

#[test]
fn an_unchecked_certificate_causes_a_warning() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let log = client.log();
    assert!(log.contains("WARN") && log.contains("insecure"), "no warning in:\n{log}");
}
