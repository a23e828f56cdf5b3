//! `mpvpn lab`: emulated networks from the command line.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    machine_share::{MachineShare, Share},
    testbed::binary,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

fn lab(args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "60"]).arg(binary()).arg("lab").args(args).stdin(Stdio::null());
    command.output().expect("timeout runs")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The network namespaces whose names begin with `prefix`.
fn namespaces(prefix: &str) -> Vec<String> {
    let output = Command::new("ip").args(["netns", "list"]).output().expect("ip runs");
    let listing = String::from_utf8_lossy(&output.stdout);
    let names = listing.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
}

#[test]
fn a_command_runs_in_a_lab_with_a_tunnel_and_its_exit_code_is_kept() {
    let _share = MachineShare::take(Share::LIGHT);
    let links = ["up", "--link", "100mbit,12ms", "--link", "50mbit,30ms,loss=1%", "--"];
    let run = |command: &str| {
        let command = format!("echo the lab is $MPVPN_LAB && ip netns list && {command}");
        lab(&[&links[..], &["sh", "-c", &command]].concat())
    };
    let pinged = run("ping -n -c 3 $MPVPN_SERVER && ping -n -c 3 $MPVPN_INET");
    assert!(pinged.status.success(), "{}", text(&pinged));
    assert_eq!(text(&pinged).matches(" bytes from ").count(), 6, "{}", text(&pinged));
    let failed = run("exit 7");
    assert_eq!(failed.status.code(), Some(7), "{}", text(&failed));
    for output in [pinged, failed] {
        let said = text(&output);
        let prefix = said.lines().find_map(|line| line.strip_prefix("the lab is ")).expect("its name");
        for role in ["client", "server", "inet"] {
            assert!(said.contains(&format!("\n{prefix}-{role}")), "no namespace for the {role}: {said}");
        }
        assert_eq!(namespaces(&format!("{prefix}-")), [""; 0], "namespaces left behind");
    }
}

#[test]
fn links_change_while_the_lab_runs() {
    let _share = MachineShare::take(Share::LIGHT);
    let name = format!("changing-{}", std::process::id());
    let args = ["lab", "up", "--name", &name, "--link", "100mbit,12ms", "--link", "100mbit,12ms", "--"];
    let mut running = Command::new("timeout")
        .args(["-k", "2", "60"])
        .arg(binary())
        .args(args)
        .args([
            "sh",
            "-c",
            "while [ \"$(cat /sys/class/net/eth2/carrier)\" = 1 ]; do sleep 0.1; done; exit 3",
        ])
        .stdin(Stdio::null())
        .spawn()
        .expect("timeout runs");
    eventually(Duration::from_secs(20), "the lab takes orders", || {
        let output = lab(&["link", "2", "down", "--lab", &name]);
        if output.status.success() { Ok(()) } else { Err(text(&output)) }
    });
    let status = running.wait().expect("our own child");
    assert_eq!(status.code(), Some(3), "the command saw the carrier go");
}

#[test]
fn bad_usage_is_refused_with_a_next_step() {
    for (args, cause, next) in [
        (&["up", "--link", "100mbit,fast", "--", "true"][..], "fast", "see `mpvpn lab --help`"),
        (&["up", "--lnik", "100mbit"], "--lnik", "did you mean `--link`?"),
        (&["teleport"], "teleport", "see `mpvpn lab --help`"),
        (&[], "a command is missing", "see `mpvpn lab --help`"),
    ] {
        let output = lab(args);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).starts_with("mpvpn-lab: bad usage: "), "{}", text(&output));
        assert!(text(&output).contains(cause), "{}", text(&output));
        assert!(text(&output).ends_with(&format!("\n  next: {next}\n")), "{}", text(&output));
    }
}

#[test]
fn the_help_names_the_commands_as_they_are_typed() {
    let help = text(&lab(&["--help"]));
    assert!(help.contains("Usage: mpvpn lab <COMMAND>"), "{help}");
    assert!(
        ["demo", "classes", "up", "link"].iter().all(|name| help.contains(&format!("\n  {name} "))),
        "{help}"
    );
    let help = text(&lab(&["link", "--help"]));
    assert!(help.contains("Usage: mpvpn lab link [OPTIONS] <LINK> <CHANGE>..."), "{help}");
}

/// The program `mpvpn` in a folder without `mpvpn-lab`.
fn mpvpn_alone() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(binary().parent().expect("a file")).expect("a folder");
    let program = folder.path().join("mpvpn");
    fs::hard_link(binary(), &program).expect("the same file system");
    (folder, program)
}

#[test]
fn without_the_program_of_the_lab_it_is_said_how_to_get_it() {
    let (_folder, program) = mpvpn_alone();
    let output =
        Command::new(program).args(["lab", "demo"]).env("PATH", "/nowhere").output().expect("mpvpn runs");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_eq!(
        text(&output),
        "mpvpn: the lab cannot start: the program mpvpn-lab is neither beside mpvpn nor in PATH\n  \
         next: install the package mpvpn-lab; in the source tree, ./dev demo builds and runs it\n"
    );
}

#[test]
fn the_program_of_the_lab_is_found_in_path_and_gets_all_arguments() {
    let (folder, program) = mpvpn_alone();
    let in_path = folder.path().join("bin");
    fs::create_dir(&in_path).expect("a folder");
    let script = in_path.join("mpvpn-lab");
    fs::write(&script, "#!/bin/sh\nprintf '<%s>' \"$@\"\nexit 7\n").expect("our own folder");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("our own file");
    for args in [&["up", "--link", "10mbit", "--", "sh", "-c", "a  b", "--mode", "y"][..], &["--help"], &[]] {
        let output = Command::new(&program).arg("lab").args(args).env("PATH", &in_path).output();
        let output = output.expect("mpvpn runs");
        assert_eq!(output.status.code(), Some(7), "{}", text(&output));
        let expected: String = match args {
            [] => "<>".to_owned(),
            _ => args.iter().map(|arg| format!("<{arg}>")).collect(),
        };
        assert_eq!(text(&output), expected);
    }
}

#[test]
fn a_lab_leaves_the_state_of_the_machine_s_own_server_and_client_alone() {
    let _share = MachineShare::take(Share::LIGHT);
    let files = tempfile::tempdir().expect("a folder");
    // A folder of its own stands for that of the machine, with a file that a server would set aside as
    // unreadable.
    let script = "
        mount -t tmpfs state /var/lib
        mkdir /var/lib/mpvpn
        echo unreadable >/var/lib/mpvpn/leases-mpvpn0.json
        \"$1\" lab up --link 100mbit,1ms -- ping -n -c 1 10.0.0.1 || exit
        cp -r /var/lib/mpvpn \"$2\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "slave", "timeout", "-k", "2", "60", "sh", "-c", script, "sh"]);
    let output = command.arg(binary()).arg(files.path()).stdin(Stdio::null()).output().expect("unshare runs");
    assert!(output.status.success(), "{}", text(&output));
    let state = files.path().join("mpvpn");
    let names: Vec<_> = fs::read_dir(&state)
        .expect("it was copied")
        .map(|entry| entry.expect("our own folder").file_name())
        .collect();
    assert_eq!(names, ["leases-mpvpn0.json"]);
    assert_eq!(fs::read_to_string(state.join("leases-mpvpn0.json")).expect("text"), "unreadable\n");
}

#[test]
fn loss_in_one_class_does_not_affect_others() {
    let _share = MachineShare::take(Share::Percent(50));
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().to_str().expect("an ASCII path");
    let shown = lab(&["classes", "--seconds", "9", "--link", "30mbit,6.5ms,queue=60ms", "--output", output]);
    assert!(shown.status.success(), "{}", text(&shown));
    let file = |name: &str| fs::read_to_string(dir.path().join(name)).expect("it was written");
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
    // Lost packets are retransmitted, so loss shows as delay.
    let time = |part: &str| class("bulk")[part]["rtt_p99_ms"].as_f64().expect("a time");
    let lost = |part: &str| class("bulk")[part]["lost"].as_u64().expect("a number");
    let harmed = time("during") > time("before") + 5.0 || lost("during") > lost("before") + 20;
    assert!(harmed, "{}", text(&shown));
    assert!(file("classes.svg").starts_with("<svg "));
    assert!(text(&shown).contains("(30 % of the packets of bulk are lost)"), "{}", text(&shown));
}

/// A child process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_rig_that_is_interrupted_removes_its_lab() {
    const TIMEOUT: Duration = Duration::from_secs(20);
    let _share = MachineShare::take(Share::LIGHT);
    let dir = tempfile::tempdir().expect("a directory");
    let mut bench = Command::new(env!("CARGO_BIN_EXE_bench"));
    bench.arg("latency").env("MPVPN_BIN", binary());
    // With the shared lock folder it would wait until it has the whole machine.
    bench.env("TMPDIR", dir.path()).current_dir(dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut bench = Running(bench.spawn().expect("the rigs are built"));
    let prefix = format!("mplab-{}-", bench.0.id());
    eventually(TIMEOUT, "the rig has a lab", || match namespaces(&prefix).len() {
        0..3 => Err(format!("{:?}", namespaces(&prefix))),
        _ => Ok(()),
    });
    std::thread::sleep(Duration::from_secs(1));
    kill_process(Pid::from_child(&bench.0), Signal::INT).expect("it runs");
    let status = eventually(TIMEOUT, "its end", || match bench.0.try_wait().expect("our own child") {
        Some(status) => Ok(status),
        None => Err("it runs".to_owned()),
    });
    assert_eq!((status.code(), namespaces(&prefix)), (Some(130), Vec::new()));
}

#[test]
fn the_remains_of_a_killed_lab_are_removed_when_the_next_one_starts() {
    const TIMEOUT: Duration = Duration::from_secs(20);
    let _share = MachineShare::take(Share::LIGHT);
    let mut command = Command::new(binary());
    command.args(["lab", "up", "--link", "100mbit", "--", "sleep", "60"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut killed = Running(command.spawn().expect("mpvpn runs"));
    let prefix = format!("mplab-{}-", killed.0.id());
    let processes = || -> Vec<String> {
        let in_namespace = |namespace: &String| {
            let output = Command::new("ip").args(["netns", "pids", namespace]).output().expect("ip runs");
            String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
        };
        namespaces(&prefix).iter().flat_map(in_namespace).collect()
    };
    let started = eventually(TIMEOUT, "a server, a client and a command in its lab", || match processes() {
        all if all.len() >= 3 => Ok(all),
        some => Err(format!("{some:?}")),
    });
    killed.0.kill().expect("it runs");
    killed.0.wait().expect("our own child");
    let next = lab(&["up", "--no-vpn", "--link", "100mbit", "--", "true"]);
    assert!(next.status.success(), "{}", text(&next));
    let is_left = |process: &&String| fs::exists(format!("/proc/{process}")).expect("a proc file system");
    eventually(TIMEOUT, "nothing is left", || {
        let left: Vec<_> = started.iter().filter(is_left).collect();
        let files = fs::read_dir("/run/mpvpn/lab").expect("the labs' folder").flatten();
        let files = files.filter(|file| file.file_name().to_string_lossy().starts_with(&prefix)).count();
        match left.is_empty() && namespaces(&prefix).is_empty() && files == 0 {
            true => Ok(()),
            false => Err(format!("processes {left:?}, {:?}, {files} files", namespaces(&prefix))),
        }
    });
}
