//! Labs, demonstrations, checks and clients of another name leave the state of the services of this machine
//! as it is: users, certificates, leases and sessions in `/var/lib/mpvpn`, journals in `/run/mpvpn`.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Host, TUNNEL, Testbed, binary},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Mode, owner, group and content of files, by their paths.
type Files = BTreeMap<PathBuf, (u32, u32, u32, Vec<u8>)>;

/// The files below these folders.
fn files(folders: &[PathBuf]) -> Files {
    let (mut found, mut waiting) = (BTreeMap::new(), folders.to_vec());
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("a folder of this test").path();
            let about = fs::symlink_metadata(&path).expect("nobody removes files");
            if about.is_dir() {
                waiting.push(path);
            } else {
                let content = fs::read(&path).unwrap_or_default();
                found.insert(path, (about.mode(), about.uid(), about.gid(), content));
            }
        }
    }
    found
}

/// Panics unless each file of `before` is still the same.
#[track_caller]
fn assert_untouched(before: &Files, folders: &[PathBuf], by: &str) {
    let after = files(folders);
    for (path, file) in before {
        assert_eq!(after.get(path), Some(file), "{by} has touched {}", path.display());
    }
    let new: Vec<_> = after.keys().filter(|path| !before.contains_key(*path)).collect();
    println!("{by}: {} files are the same, new are {new:?}", before.len());
}

#[test]
fn labs_checks_and_clients_of_other_names_leave_the_state_of_services_alone() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let sockets = testbed.default_sockets().to_owned();
    let state = [Host::Server, Host::Client].map(|host| testbed.state_dir(host));
    // Processes with the names and folders of services, which a power failure ends.
    let server = ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    let mut server =
        testbed.start_as_is(Host::Server, &server, &sockets.join("server-mpvpn0.sock")).wait_until_up();
    let add = |user: &str| {
        let program = binary();
        let words =
            [program.to_str().expect("ASCII"), "user", "add", user, "--json", "--host", "192.0.2.1:4433"];
        let added = testbed.run(Host::Server, &words);
        let added: serde_json::Value = serde_json::from_str(&added).expect("JSON");
        added["token"].as_str().expect("a token").to_owned()
    };
    let token = add("alice");
    let args = ["client", "--server", "192.0.2.1:4433", "--insecure", "--token", &token, "--dns", "off"];
    let args = [&args[..], &["--path", "eth1", "--path", "eth2"]].concat();
    let mut client =
        testbed.start_as_is(Host::Client, &args, &sockets.join("client-mpvpn0.sock")).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    let has = |folder: &Path, start: &str| {
        let mut names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().starts_with(start))
    };
    eventually(TIMEOUT, "a lease and users", || {
        let missing: Vec<_> =
            ["users.toml", "leases"].into_iter().filter(|file| !has(&state[0], file)).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("no {missing:?}")) }
    });
    client.kill();
    server.kill();
    let journals = fs::read_dir(&sockets).expect("it is there").flatten().map(|entry| entry.path());
    let journals = journals.filter(|path| path.to_string_lossy().contains("/netns-"));
    let folders: Vec<PathBuf> = state.iter().cloned().chain(journals).collect();
    let mut before = files(&folders);
    // Settings and numbers that several instances share are those of the instances that live.
    before
        .retain(|path, _| state.iter().any(|state| path.starts_with(state)) || path.ends_with("mpvpn0.json"));
    let is_there = |end: &str| before.keys().any(|path| path.ends_with(end));
    assert!(is_there("users.toml") && is_there("mpvpn0.json"), "{:?}", before.keys());

    // Another server and client in a terminal, and a check.
    let other = ["--name", "other", "--tun-name", "other0"];
    let server = ["server", "--listen", "0.0.0.0:4444", "--auth", "none", "--subnet", "10.9.0.0/24"];
    let own = ["--cert", "server.crt", "--key", "server.key", "--subnet6", "fd00:9::/64"];
    let socket = sockets.join("server-other.sock");
    let server = [&server[..], &own, &other].concat();
    let mut server = testbed.start_as_is(Host::Server, &server, &socket).wait_until_up();
    assert_untouched(&before, &folders, "a server of another name that runs");
    let program = binary();
    let program = program.to_str().expect("ASCII");
    let to = ["--server", "192.0.2.1:4444", "--insecure", "--path", "eth1", "--path", "eth2"];
    testbed.run(Host::Client, &[&[program, "check"][..], &to].concat());
    assert_untouched(&before, &folders, "a check beside a server that runs");
    let client = [&["client", "--dns", "off"][..], &to, &other].concat();
    let socket = sockets.join("client-other.sock");
    let mut client = testbed.start_as_is(Host::Client, &client, &socket).wait_until_up();
    assert_untouched(&before, &folders, "a client of another name that runs");
    assert!(client.terminate().success());
    assert!(server.terminate().success());
    assert_untouched(&before, &folders, "a server and a client of another name");

    // Labs make namespaces of their own, so they run beside the testbed, and find each state in turn.
    let output = tempfile::tempdir().expect("a folder");
    let output = output.path().to_str().expect("ASCII");
    for state in &state {
        for lab in [
            &["up", "--link", "100mbit,1ms", "--", "ping", "-n", "-c", "1", TUNNEL][..],
            &["demo", "--seconds", "12", "--output", output],
        ] {
            let script = r#"mount --bind "$0" /var/lib && exec timeout -k 2 120 "$@""#;
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "slave", "sh", "-c", script]);
            command.arg(state.parent().expect("it is below another one")).args([program, "lab"]).args(lab);
            let ran = command.stdin(Stdio::null()).output().expect("unshare runs");
            let said = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success(), "{lab:?}: {}{said}", String::from_utf8_lossy(&ran.stdout));
            assert_untouched(&before, &folders, &format!("mpvpn lab {}", lab[0]));
        }
    }
}
