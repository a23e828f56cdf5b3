//! `mpvpn lab` builds the same stages from the command line.

use std::{
    process::{Command, Output, Stdio},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    stage::{Alone, binary},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn lab(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "60"]).arg(binary()).arg("lab").args(words).stdin(Stdio::null());
    command.output().expect("timeout runs")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn namespaces() -> Vec<String> {
    let output = Command::new("ip").args(["netns", "list"]).output().expect("ip runs");
    let listing = String::from_utf8_lossy(&output.stdout);
    listing.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[test]
fn a_command_runs_in_a_lab_with_a_tunnel_and_its_exit_code_is_kept() {
    let _alone = Alone::wait();
    let before = namespaces();
    let links = ["up", "--link", "100mbit,12ms", "--link", "50mbit,30ms,loss=1%", "--"];
    let pinged =
        lab(&[&links[..], &["sh", "-c", "ping -n -c 3 $MPVPN_SERVER && ping -n -c 3 $MPVPN_INET"]].concat());
    assert!(pinged.status.success(), "{}", text(&pinged));
    assert_eq!(text(&pinged).matches(" bytes from ").count(), 6, "{}", text(&pinged));
    let failed = lab(&[&links[..], &["sh", "-c", "exit 7"]].concat());
    assert_eq!(failed.status.code(), Some(7), "{}", text(&failed));
    assert_eq!(namespaces(), before, "namespaces left behind");
}

#[test]
fn links_change_while_the_lab_runs() {
    let _alone = Alone::wait();
    let words = ["lab", "up", "--name", "changing", "--link", "100mbit,12ms", "--link", "100mbit,12ms", "--"];
    let mut running = Command::new("timeout")
        .args(["-k", "2", "60"])
        .arg(binary())
        .args(words)
        .args([
            "sh",
            "-c",
            "while [ \"$(cat /sys/class/net/eth2/carrier)\" = 1 ]; do sleep 0.1; done; exit 3",
        ])
        .stdin(Stdio::null())
        .spawn()
        .expect("timeout runs");
    eventually(Duration::from_secs(20), "the lab takes orders", || {
        let output = lab(&["link", "2", "down", "--lab", "changing"]);
        if output.status.success() { Ok(()) } else { Err(text(&output)) }
    });
    let status = running.wait().expect("our own child");
    assert_eq!(status.code(), Some(3), "the command saw the carrier go");
}

#[test]
fn a_link_that_makes_no_sense_is_refused() {
    let output = lab(&["up", "--link", "100mbit,fast", "--", "true"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert!(text(&output).contains("fast"), "{}", text(&output));
}

#[test]
fn classes_feel_nothing_of_the_losses_of_another() {
    let _alone = Alone::wait();
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().to_str().expect("an ASCII path");
    let shown = lab(&["classes", "--seconds", "9", "--link", "30mbit,6.5ms,queue=60ms", "--output", output]);
    assert!(shown.status.success(), "{}", text(&shown));
    let file = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("it was written");
    let figures: Value = serde_json::from_str(&file("classes.json")).expect("JSON");
    let class = |name: &str| {
        let all = figures["classes"].as_array().expect("a list");
        all.iter().find(|class| class["name"] == name).expect("a class").clone()
    };
    for name in ["critical", "default"] {
        for part in ["before", "during", "after"] {
            let found = &class(name)[part];
            assert_eq!(found["lost"], 0, "{name} {part}: {}", text(&shown));
            assert!(found["sent"].as_u64() > Some(100), "{name} {part}: {}", text(&shown));
        }
    }
    // What is lost is sent again, so it shows as time.
    let time = |part: &str| class("bulk")[part]["rtt_p99_ms"].as_f64().expect("a time");
    let lost = |part: &str| class("bulk")[part]["lost"].as_u64().expect("a number");
    let harmed = time("during") > time("before") + 5.0 || lost("during") > lost("before") + 20;
    assert!(harmed, "{}", text(&shown));
    assert!(file("classes.svg").starts_with("<svg "));
    assert!(text(&shown).contains("(30 % of the packets of bulk are lost)"), "{}", text(&shown));
}

#[test]
fn a_rig_that_is_interrupted_removes_its_lab() {
    let _alone = Alone::wait();
    let before = namespaces();
    let dir = tempfile::tempdir().expect("a directory");
    let mut bench = Command::new("timeout");
    bench.args(["-k", "2", "60", env!("CARGO_BIN_EXE_bench"), "latency"]).env("MPVPN_BIN", binary());
    // It would wait for its turn on the machine, which is ours.
    bench.env("TMPDIR", dir.path()).current_dir(dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut bench = bench.spawn().expect("timeout runs");
    eventually(Duration::from_secs(20), "the rig has a lab", || {
        if namespaces().len() > before.len() { Ok(()) } else { Err("no namespace".to_owned()) }
    });
    std::thread::sleep(Duration::from_secs(1));
    kill_process(Pid::from_child(&bench), Signal::INT).expect("it runs");
    let code = bench.wait().expect("it ends").code();
    assert_eq!((code, namespaces()), (Some(130), before));
}
