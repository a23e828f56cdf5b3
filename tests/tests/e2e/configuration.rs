//! Bad usage and bad configuration: exit code 2 and a sentence that helps.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    testbed::{Host, Testbed},
};

/// It must end with 2 and say all of this on stderr.
fn rejected(testbed: &Testbed, args: &[&str], said: &[&str]) {
    let output = testbed.mpvpn(Host::Client, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "mpvpn {args:?}:\n{stderr}");
    for expected in said {
        assert!(stderr.contains(expected), "mpvpn {args:?}: no {expected:?} in:\n{stderr}");
    }
}

#[test]
fn mistakes_in_a_file_are_told_with_line_and_column() {
    let testbed = Testbed::new(&["100mbit"]);
    for (text, said) in [
        ("server = \"192.0.2.1:4433\"\ninsecure = true\nshedluer = \"flow\"\n", &["3", "shedluer"][..]),
        ("server = \"192.0.2.1:4433\"\n  insecure = \"yes\"\n", &["2", "insecure"]),
        ("server = \n", &["1"]),
        ("server = \"192.0.2.1:4433\"\nscheduler = \"fastest\"\n", &["2", "fastest", "minrtt"]),
    ] {
        fs::write(testbed.dir().join("bad.toml"), text).expect("a file");
        rejected(&testbed, &["client", "--config", "bad.toml"], &[said, &["bad.toml"]].concat());
    }
    fs::write(testbed.dir().join("bad.toml"), "subnet = \"10.0.0.7/24\"\n").expect("a file");
    rejected(&testbed, &["server", "--config", "bad.toml"], &["10.0.0.7/24"]);
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    let testbed = Testbed::new(&["100mbit"]);
    let output = testbed.mpvpn(Host::Client, &["client", "--config", "nowhere.toml"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("nowhere.toml"), "{}: {stderr}", output.status);
}

#[test]
fn contradictions_are_refused() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = ["client", "--server", "192.0.2.1:4433"];
    for (more, said) in [
        (&["--insecure", "--ca", "server.crt"][..], &["--insecure", "--ca"][..]),
        (&[], &["--ca", "--pin", "--insecure"]),
        (&["--insecure", "--path", "eth1", "--path", "eth1"], &["eth1"]),
        (&["--insecure", "--no-such-option"], &["--no-such-option"]),
    ] {
        rejected(&testbed, &[&server[..], more].concat(), said);
    }
    rejected(&testbed, &["client", "--insecure"], &["--server"]);
    rejected(&testbed, &["server", "--cert", "server.crt"], &["--key"]);
    rejected(&testbed, &["dance"], &["dance"]);
}

#[test]
fn what_does_not_work_yet_says_so_and_is_not_offered() {
    let testbed = Testbed::new(&["100mbit"]);
    rejected(&testbed, &["server", "--auth", "mtls"], &["not available in this version yet"]);
    rejected(&testbed, &["top"], &["not available in this version yet"]);
    for side in ["client", "server"] {
        let output = testbed.mpvpn(Host::Client, &[side, "--help"]);
        let help = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && help.contains("--log-level"), "{help}");
        assert!(!help.contains("mtls"), "mpvpn {side} --help offers mtls");
    }
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
