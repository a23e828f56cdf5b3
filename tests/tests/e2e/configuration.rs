//! Bad usage and bad configuration: exit code 2 and a sentence that helps.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    stage::{Place, Stage},
};

/// It must end with 2 and say all of this on stderr.
fn rejected(stage: &Stage, words: &[&str], said: &[&str]) {
    let output = stage.mpvpn(Place::Client, words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "mpvpn {words:?}:\n{stderr}");
    for expected in said {
        assert!(stderr.contains(expected), "mpvpn {words:?}: no {expected:?} in:\n{stderr}");
    }
}

#[test]
fn mistakes_in_a_file_are_told_with_line_and_column() {
    let stage = Stage::new(&["100mbit"]);
    for (text, said) in [
        ("server = \"192.0.2.1:4433\"\ninsecure = true\nshedluer = \"flow\"\n", &["3", "shedluer"][..]),
        ("server = \"192.0.2.1:4433\"\n  insecure = \"yes\"\n", &["2", "insecure"]),
        ("server = \n", &["1"]),
        ("server = \"192.0.2.1:4433\"\nscheduler = \"fastest\"\n", &["2", "fastest", "minrtt"]),
    ] {
        fs::write(stage.dir().join("bad.toml"), text).expect("a file");
        rejected(&stage, &["client", "--config", "bad.toml"], &[said, &["bad.toml"]].concat());
    }
    fs::write(stage.dir().join("bad.toml"), "subnet = \"10.0.0.7/24\"\n").expect("a file");
    rejected(&stage, &["server", "--config", "bad.toml"], &["10.0.0.7/24"]);
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    let stage = Stage::new(&["100mbit"]);
    let output = stage.mpvpn(Place::Client, &["client", "--config", "nowhere.toml"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("nowhere.toml"), "{}: {stderr}", output.status);
}

#[test]
fn contradictions_are_refused() {
    let stage = Stage::new(&["100mbit"]);
    let server = ["client", "--server", "192.0.2.1:4433"];
    for (more, said) in [
        (&["--insecure", "--ca", "server.crt"][..], &["--insecure", "--ca"][..]),
        (&[], &["--ca", "--pin", "--insecure"]),
        (&["--insecure", "--path", "eth1", "--path", "eth1"], &["eth1"]),
        (&["--insecure", "--no-such-option"], &["--no-such-option"]),
    ] {
        rejected(&stage, &[&server[..], more].concat(), said);
    }
    rejected(&stage, &["client", "--insecure"], &["--server"]);
    rejected(&stage, &["server", "--cert", "server.crt"], &["--key"]);
    rejected(&stage, &["dance"], &["dance"]);
}

#[test]
fn what_does_not_work_yet_says_so_and_is_not_offered() {
    let stage = Stage::new(&["100mbit"]);
    rejected(&stage, &["server", "--auth", "mtls"], &["not available in this version yet"]);
    rejected(&stage, &["top"], &["not available in this version yet"]);
    for side in ["client", "server"] {
        let output = stage.mpvpn(Place::Client, &[side, "--help"]);
        let help = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && help.contains("--log-level"), "{help}");
        assert!(!help.contains("mtls"), "mpvpn {side} --help offers mtls");
    }
}

#[test]
fn a_link_that_does_not_exist_is_named() {
    let stage = Stage::new(&["100mbit"]);
    let client = stage.start_client(&["--path", "wlan7"]);
    eventually(Duration::from_secs(5), "a word about the link", || match client.log() {
        log if log.contains("wlan7") => Ok(()),
        log => Err(log),
    });
}
