//! A client has its addresses again after it, its machine or the server was started again.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, SERVER, SERVER_ARGS, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);

fn addresses(client: &MpvpnProcess) -> [String; 2] {
    [Family::V4, Family::V6].map(|family| client.address(family))
}

/// A client on the second host, named as the one on the first.
fn other_client(testbed: &Testbed) -> MpvpnProcess {
    testbed.start(Host::Other, &["client", "--server", SERVER, "--insecure", "--path", "eth1"])
}

/// The file with the session of a client.
fn session_file(testbed: &Testbed, host: Host) -> PathBuf {
    testbed.state_dir(host).join("session-mpvpn0-192.0.2.1-4433.json")
}

/// Waits until the server has kept a lease of this address.
fn wait_for_lease(testbed: &Testbed, address: &str) {
    let file = testbed.state_dir(Host::Server).join("leases-mpvpn0.json");
    eventually(TIMEOUT, "the lease is kept", || {
        let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
        if text.contains(&format!("\"{address}\"")) { Ok(()) } else { Err(text) }
    });
    assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_client_that_is_started_again_has_its_addresses() {
    let testbed = Testbed::two_clients();
    let server = testbed.server(&[]);
    // The first address goes to another one, so that nobody gets the same by chance.
    let other = other_client(&testbed).wait_until_up();
    let mut client = testbed.client(&[]);
    let before = addresses(&client);
    let mode = fs::metadata(session_file(&testbed, Host::Client)).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(other);
    assert!(client.terminate().success());
    let mut client = testbed.client(&[]);
    assert_eq!(addresses(&client), before, "after a stop");
    assert_eq!(client.status()["session"]["resumed"], 1);
    client.kill();
    drop(client);
    let began = Instant::now();
    let client = testbed.client(&[]);
    println!("after SIGKILL the client is up again after {:.1?}", began.elapsed());
    assert_eq!(addresses(&client), before, "after SIGKILL");
    reaches(&testbed, Host::Client, TUNNEL);
    // Its server keeps one session, not one of each process.
    server.wait_for_status(TIMEOUT, "one session", |status| {
        match status["clients"].as_array().map(Vec::len) {
            Some(1) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
}

#[test]
fn addresses_survive_a_server_that_is_killed_while_their_clients_are_away() {
    let testbed = Testbed::two_clients();
    let mut server = testbed.server(&[]);
    let first = other_client(&testbed).wait_until_up();
    let client = testbed.client(&[]);
    let (of_first, before) = (addresses(&first), addresses(&client));
    wait_for_lease(&testbed, &before[0]);
    drop((first, client));
    // The memory of the clients is deleted: only the server's leases tell which client has which address.
    for host in [Host::Client, Host::Other] {
        let file = session_file(&testbed, host);
        let text = fs::read_to_string(&file).expect("a session");
        let forgotten =
            text.split("\"addresses\"").next().expect("the beginning").to_owned() + "\"addresses\":[]}";
        fs::write(&file, forgotten).expect("a file");
    }
    server.kill();
    drop(server);
    let _server = testbed.server(&[]);
    // In the other order.
    let client = testbed.client(&[]);
    let first = other_client(&testbed).wait_until_up();
    assert_eq!((addresses(&client), addresses(&first)), (before, of_first));
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn of_two_machines_with_one_state_folder_the_later_gets_addresses_of_its_own() {
    let testbed = Testbed::two_clients();
    let server = testbed.server(&[]);
    let first = testbed.client(&[]);
    let before = addresses(&first);
    fs::create_dir_all(testbed.state_dir(Host::Other)).expect("a folder");
    fs::copy(session_file(&testbed, Host::Client), session_file(&testbed, Host::Other)).expect("a copy");

    let later = other_client(&testbed);
    let told = |process: &MpvpnProcess, kept: bool| {
        eventually(TIMEOUT, "the copy is noticed", || {
            let events = process.events();
            let is_it =
                |event: &&serde_json::Value| event["event"] == "secret_shared" && event["kept"] == kept;
            events.iter().find(is_it).map(|_| ()).ok_or_else(|| process.log())
        });
    };
    told(&first, true);
    told(&later, false);
    told(&server, true);
    let later = later.wait_until_up();
    first.wait_for_status(TIMEOUT, "the first is up", |status| match status["state"] == "up" {
        true => Ok(()),
        false => Err(status["state"].to_string()),
    });
    let of_later = addresses(&later);
    assert_eq!(addresses(&first), before);
    assert_ne!(of_later, before);
    for (process, note) in
        [(&first, "keeps its addresses"), (&later, "addresses of its own"), (&server, "two machines")]
    {
        let notes = process.status()["notes"].to_string();
        assert!(notes.contains(note), "{notes}");
    }
    for host in [Host::Client, Host::Other] {
        reaches(&testbed, host, TUNNEL);
    }
    // From now on they are two clients.
    drop((first, later));
    let later = other_client(&testbed).wait_until_up();
    let first = testbed.client(&[]);
    assert_eq!((addresses(&first), addresses(&later)), (before, of_later));
    let shared =
        |process: &MpvpnProcess| process.events().iter().any(|event| event["event"] == "secret_shared");
    assert!(!shared(&first) && !shared(&later));
}

#[test]
fn broken_files_are_said_and_a_lease_of_a_removed_user_is_free() {
    let testbed = Testbed::two_clients();
    let args = ["--auth", "token", "--state-dir", "state"];
    let mut server = testbed.server(&args);
    let add = |name: &str| {
        let args = ["user", "add", name, "--json", "--host", SERVER, "--state-dir", "state"];
        let said = testbed.mpvpn(Host::Server, &args);
        let said: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
        said["token"].as_str().expect("a token").to_owned()
    };
    let (alice, bob) = (add("alice"), add("bob"));
    let client = testbed.client(&["--token", &alice]);
    let of_alice = client.address(Family::V4);
    drop(client);
    let leases = testbed.dir().join("state/leases-mpvpn0.json");
    eventually(TIMEOUT, "the lease is kept", || match fs::read_to_string(&leases) {
        Ok(text) if text.contains("alice") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert!(server.terminate().success());
    drop(server);
    let removed = testbed.mpvpn(Host::Server, &["user", "remove", "alice", "--state-dir", "state"]);
    assert!(removed.status.success(), "{removed:?}");
    let mut server = testbed.server(&args);
    assert!(server.log().contains("the address is free: its user was removed"), "{}", server.log());
    let client = testbed.client(&["--token", &bob]);
    assert_eq!(client.address(Family::V4), of_alice, "the lowest address that is free");
    drop(client);
    assert!(server.terminate().success());
    drop(server);

    fs::write(&leases, "{\"version\":1,\"lea").expect("a file");
    fs::write(session_file(&testbed, Host::Client), "{").expect("a file");
    let server = testbed.server(&args);
    let client = testbed.client(&["--token", &bob]);
    for (log, file) in
        [(server.log(), "leases-mpvpn0.json"), (client.log(), "session-mpvpn0-192.0.2.1-4433.json")]
    {
        assert!(log.contains(file) && log.contains("cannot be understood") && log.contains(".bad"), "{log}");
    }
    assert_eq!(
        fs::read_to_string(testbed.dir().join("state/leases-mpvpn0.json.bad")).expect("a file"),
        "{\"version\":1,\"lea"
    );
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn a_full_disk_ends_nothing_and_is_said_once() {
    let testbed = Testbed::two_links();
    for host in [Host::Server, Host::Client] {
        let dir = testbed.state_dir(host);
        fs::create_dir_all(dir.parent().expect("a folder above")).expect("a folder");
        // A folder on a file system without room.
        fs::create_dir_all(&dir).expect("a folder");
    }
    let full = r#"mount -t tmpfs -o size=4k none /var/lib/mpvpn && head -c 4096 /dev/zero >/var/lib/mpvpn/filler; exec "$0" "$@""#;
    let start = |host: Host, args: &[&str]| {
        let socket = testbed.file("api", host);
        let binary = mpvpn_tests::testbed::binary();
        let socket_text = socket.to_str().expect("ASCII");
        let all = [
            &["--mount", "sh", "-c", full, binary.to_str().expect("ASCII")],
            args,
            &["--api-socket", socket_text],
        ]
        .concat();
        testbed.start_program(host, "unshare", &all, &socket)
    };
    let server = start(Host::Server, &SERVER_ARGS);
    let server = server.wait_until_up();
    let client =
        start(Host::Client, &["client", "--server", SERVER, "--insecure", "--path", "eth1"]).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    eventually(TIMEOUT, "the full disk is said", || {
        let says =
            |log: &str, what: &str| log.matches(what).count() == 1 && log.contains("No space left on device");
        match says(&server.log(), "cannot keep the leases") && says(&client.log(), "cannot keep the session")
        {
            true => Ok(()),
            false => Err(format!("{}\n{}", server.log(), client.log())),
        }
    });
}
