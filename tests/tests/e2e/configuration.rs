//! Invalid arguments and configuration files: exit code 2 and a helpful message.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    testbed::{Host, Testbed},
};

/// Checks that `mpvpn` exits with 2 and prints all of `expected_texts` to stderr.
fn check_rejected(testbed: &Testbed, args: &[&str], expected_texts: &[&str]) {
    let output = testbed.mpvpn(Host::Client, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "mpvpn {args:?}:\n{stderr}");
    for expected in expected_texts {
        assert!(stderr.contains(expected), "mpvpn {args:?}: no {expected:?} in:\n{stderr}");
    }
}

#[test]
fn errors_in_a_file_are_reported_with_line_and_column() {
    let testbed = Testbed::new(&["100mbit"]);
    for (text, expected_texts) in [
        ("server = \"192.0.2.1:4433\"\ninsecure = true\nshedluer = \"flow\"\n", &["3", "shedluer"][..]),
        ("server = \"192.0.2.1:4433\"\n  insecure = \"yes\"\n", &["2", "insecure"]),
        ("server = \n", &["1"]),
        ("server = \"192.0.2.1:4433\"\nscheduler = \"fastest\"\n", &["2", "fastest", "minrtt"]),
    ] {
        fs::write(testbed.dir().join("bad.toml"), text).expect("a file");
        check_rejected(
            &testbed,
            &["client", "--config", "bad.toml"],
            &[expected_texts, &["bad.toml"]].concat(),
        );
    }
    fs::write(testbed.dir().join("bad.toml"), "subnet = \"10.0.0.7/24\"\n").expect("a file");
    check_rejected(&testbed, &["server", "--config", "bad.toml"], &["10.0.0.7/24"]);
}

#[test]
fn a_missing_configuration_file_is_named() {
    let testbed = Testbed::new(&["100mbit"]);
    let output = testbed.mpvpn(Host::Client, &["client", "--config", "nowhere.toml"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("nowhere.toml"), "{}: {stderr}", output.status);
}

#[test]
fn contradictions_are_refused() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = ["client", "--server", "192.0.2.1:4433"];
    for (more, expected_texts) in [
        (&["--insecure", "--ca", "server.crt"][..], &["--insecure", "--ca"][..]),
        (&[], &["--ca", "--pin", "--insecure"]),
        (&["--insecure", "--path", "eth1", "--path", "eth1"], &["eth1"]),
        (&["--insecure", "--no-such-option"], &["--no-such-option"]),
    ] {
        check_rejected(&testbed, &[&server[..], more].concat(), expected_texts);
    }
    check_rejected(&testbed, &["client", "--insecure"], &["--server"]);
    check_rejected(&testbed, &["server", "--cert", "server.crt"], &["--key"]);
    check_rejected(&testbed, &["dance"], &["dance"]);
}

#[test]
fn a_link_that_does_not_exist_is_named() {
    let testbed = Testbed::new(&["100mbit"]);
    let client = testbed.start_client(&["--path", "wlan7"]);
    eventually(Duration::from_secs(5), "a word about the link", || match client.log() {
        log if log.contains("wlan7") => Ok(()),
        log => Err(log),
    });
}
