//! The state of a server in one file, and configurations that are checked and shown.

use std::{fs, os::unix::fs::PermissionsExt, process::Output};

use mpvpn_tests::{
    ping::reaches,
    testbed::{Family, Host, SERVER, TUNNEL, Testbed},
};

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_server_that_was_lost_is_the_same_after_its_backup_is_restored() {
    let testbed = Testbed::two_links();
    let args = ["server", "--listen", "0.0.0.0:4433", "--auth", "token", "--state-dir", "state"];
    let mut server = testbed.start(Host::Server, &args).wait_until_up();
    let run = |args: &[&str]| testbed.mpvpn(Host::Server, &[args, &["--state-dir", "state"]].concat());
    let added = run(&["user", "add", "alice", "--json", "--host", SERVER]);
    let added: serde_json::Value = serde_json::from_slice(&added.stdout).expect("JSON");
    let link = added["link"].as_str().expect("a link").to_owned();
    let join = || {
        let socket = testbed.file("api", Host::Client);
        let args = ["client", &link, "--api-socket", socket.to_str().expect("ASCII")];
        testbed.start_as_is(Host::Client, &args, &socket).wait_until_up()
    };
    let client = join();
    let address = client.address(Family::V4);
    drop(client);

    let backup = testbed.dir().join("server.backup");
    let done = run(&["backup", "server.backup"]);
    assert!(done.status.success() && said(&done).contains("users.toml"), "{}", said(&done));
    assert_eq!(fs::metadata(&backup).expect("a file").permissions().mode() & 0o777, 0o600);
    let refused = run(&["restore", "server.backup"]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("a server runs with the state folder"), "{}", said(&refused));
    assert!(server.terminate().success());
    drop(server);

    fs::remove_dir_all(testbed.dir().join("state")).expect("a folder");
    let whole = fs::read(&backup).expect("a file");
    fs::write(&backup, &whole[..whole.len() - 100]).expect("a file");
    let refused = run(&["restore", "server.backup"]);
    assert!(!refused.status.success() && said(&refused).contains("cut short"), "{}", said(&refused));
    assert!(!testbed.dir().join("state/users.toml").exists());
    fs::write(&backup, &whole).expect("a file");
    let done = run(&["restore", "server.backup"]);
    assert!(done.status.success(), "{}", said(&done));

    // The link has the pin of the old certificate and a token of the old users.
    let _server = testbed.start(Host::Server, &args).wait_until_up();
    fs::remove_dir_all(testbed.state_dir(Host::Client)).expect("a folder");
    let client = join();
    assert_eq!(client.address(Family::V4), address);
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn a_configuration_is_checked_and_shown_with_the_origin_of_each_value() {
    let testbed = Testbed::two_links();
    let write = |name: &str, text: &str| fs::write(testbed.dir().join(name), text).expect("a file");
    write("server.toml", "dns = 'off'\n\n[[access]]\nallow = false\nports = '25'\n");
    write("client.toml", "server = '192.0.2.1'\ninsecure = true\nlan = 'auto'\n");
    let check = |file: &str| testbed.mpvpn(Host::Server, &["config", "check", file]);
    let good = check("server.toml");
    assert!(good.status.success() && said(&good).contains("`mpvpn server` would start"), "{}", said(&good));
    let bad = check("client.toml");
    assert_eq!(bad.status.code(), Some(2), "{}", said(&bad));
    assert!(said(&bad).contains("client.toml, line 3, column 1: unknown key `lan`"), "{}", said(&bad));

    let server = testbed.server(&["--config", "server.toml", "--state-dir", "state"]);
    let socket = server.socket().to_str().expect("ASCII").to_owned();
    let shown = testbed.mpvpn(Host::Server, &["config", "show", "--api-socket", &socket]);
    let shown = said(&shown);
    let line = |key: &str| {
        let line = shown.lines().find(|line| line.split_whitespace().next() == Some(key));
        line.unwrap_or_else(|| panic!("no {key}: {shown}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("dns"), "dns \"off\" server.toml, line 1");
    assert_eq!(line("auth"), "auth none option");
    assert_eq!(line("nat"), "nat on default");
    assert!(
        line("access").contains("allow = false") && line("access").ends_with("server.toml, line 3"),
        "{shown}"
    );
}
