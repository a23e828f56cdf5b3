//! The binary as a person meets it: what it prints, where, and with which exit code.
// Tests start processes and threads.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::{
    fs::File,
    io::Read,
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use mpvpn_api::{ControlRequest, DashboardLink, RequestHandler, Server};
use mpvpn_input::role::Role;
use mpvpn_status::{
    FlowList, Link, LinkState, State, Status,
    events::{Event, PathName, SharedEventLog},
    measure::{EchoReport, MeasureState},
    reload_report::ReloadReport,
};

fn mpvpn(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mpvpn")).args(args).env_remove("RUST_LOG").output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A process with a local API, played by a thread of this one.
fn with_api(path: &Path, ask: impl FnOnce()) {
    with_events(path, SharedEventLog::default(), ask);
}

fn with_events(path: &Path, events: SharedEventLog, ask: impl FnOnce()) {
    let server = Server::bind(path).unwrap();
    let source: RequestHandler = Arc::new(|question| match question {
        ControlRequest::Status(reply) => {
            let links = vec![Link { state: LinkState::Up, ..Link::new("eth0") }];
            let _ = reply.send(Status { state: State::Up, links, ..Status::new(Role::Client) });
        }
        ControlRequest::Flows(reply) => {
            drop(reply.send(FlowList { left_out: 7, ..FlowList::new(Role::Client) }))
        }
        ControlRequest::Config(reply) => drop(reply.send(Ok(Vec::new()))),
        ControlRequest::DashboardLink(reply) => {
            let url = "http://127.0.0.1:9470/#login=abc".to_owned();
            let _ = reply.send(Ok(DashboardLink { url, expires_s: 600 }));
        }
        ControlRequest::Overview { .. } => {}
        ControlRequest::Reload(_, reply) => {
            let _ = reply.send(Ok(ReloadReport {
                links: true,
                restart: vec!["cc".to_owned()],
                ..ReloadReport::default()
            }));
        }
        ControlRequest::Echoes(_, reply) => drop(reply.send(Ok(EchoReport::default()))),
        ControlRequest::Measure(_, reply) => drop(reply.send(Ok(MeasureState::default()))),
        ControlRequest::Link(name, change, reply) => {
            let _ = reply.send(match name.as_str() {
                "eth0" => Ok(Link { tier: change.tier.unwrap_or_default().to_string(), ..Link::new(&name) }),
                _ => Err(format!("there is no link `{name}`: known are eth0")),
            });
        }
    });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    result = server.serve(source, events) => result.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        // Moved in, so that the thread is told to stop even when `ask` panics.
        let _stop = stop;
        ask();
    });
}

#[test]
fn links_are_shown_and_changed() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let socket = path.to_str().unwrap();
    with_api(&path, || {
        let output = mpvpn(&["link", "show", "--api-socket", socket]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(stdout(&output).lines().nth(1).is_some_and(|line| line.starts_with("eth0  up")));
        let output = mpvpn(&["link", "set", "eth0", "--tier", "backup", "--api-socket", socket]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(stdout(&output).contains("backup"), "{}", stdout(&output));
        let output = mpvpn(&["link", "set", "wlan0", "--up", "5mbit", "--api-socket", socket]);
        assert_eq!(code(&output), 2);
        assert!(stderr(&output).contains("there is no link `wlan0`: known are eth0"), "{}", stderr(&output));
        let output = mpvpn(&["link", "set", "eth0", "--api-socket", socket]);
        assert_eq!(code(&output), 2);
        assert!(stderr(&output).contains("no option says what to change"), "{}", stderr(&output));
    });
}

#[test]
fn packets_are_told_their_class_and_the_rule_that_says_so() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client.toml");
    std::fs::write(
        &path,
        "[[class]]\nname = 'cams'\n\n[[class.match]]\nto = '198.51.100.0/24'\nports = 554\n\n\
         [[bypass]]\ndomain = 'tv.example'\nlink = 'eth2'\n[[bypass]]\nuid = 1000\nalways = true\n",
    )
    .unwrap();
    let file = path.to_str().unwrap();
    let packet = "tcp 10.0.0.5:4000 -> 198.51.100.9:554";
    let output = mpvpn(&["route", "test", "--config", file, packet]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(
        stdout(&output),
        format!("in the tunnel, TCP as auto: class cams, by rule 1: {file}, line 4\n")
    );
    let output = mpvpn(&["route", "test", "--config", file, "udp [::1]:5 -> [::2]:6 dscp ef"]);
    assert_eq!(stdout(&output), "in the tunnel: class critical, by rule 3: built-in `real-time`\n");
    let output =
        mpvpn(&["route", "test", "--json", "--config", file, "tcp 10.0.0.5:4000 -> 203.0.113.9:443"]);
    assert_eq!(
        stdout(&output),
        "{\"lane\":\"auto\",\"packet\":\"tcp 10.0.0.5:4000 -> 203.0.113.9:443\",\"class\":\"default\",\"rule\":null,\
         \"file\":null,\"line\":null,\"built_in\":null}\n"
    );
    let past = |packet: &str| stdout(&mpvpn(&["route", "test", "--config", file, packet]));
    let by = |line| format!("by the [[bypass]] of {file}, line {line}");
    assert_eq!(
        past("tcp 10.0.7.5 -> live.tv.example:443"),
        format!("past the tunnel over eth2, {}\n", by(8))
    );
    assert_eq!(
        past("icmp 10.0.0.5 -> 9.9.9.9 uid 1000"),
        format!("past the tunnel over the best link, {}, also while the kill switch blocks\n", by(11))
    );
    let output = mpvpn(&["class", "list", "--config", file]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).lines().any(|line| line.starts_with("cams ")), "{}", stdout(&output));
    // Without quotes the shell takes the rest for the name of a file.
    let output = mpvpn(&["route", "test", "--config", file, "tcp", "10.0.0.5:4000", "-"]);
    assert_eq!(code(&output), 2);
    assert_eq!(
        stderr(&output),
        "mpvpn: cannot test the packet: `tcp 10.0.0.5:4000 -` is not a packet: expected a protocol and two ends in \
         quotes, as in \"udp 10.0.0.5:5060 -> 198.51.100.9:5060\"\n  next: see `mpvpn route test --help`\n"
    );
    std::fs::write(&path, "[[class]]\nname = 'a'\nmin = '60%'\nmax = '50%'\n").unwrap();
    let output = mpvpn(&["class", "list", "--config", file]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("line 3, column 7: `min` of the class `a` is 60%"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn flows_are_listed_for_people_and_programs() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let words = ["status", "--flows", "--api-socket", path.to_str().unwrap()];
    with_api(&path, || {
        assert_eq!(stdout(&mpvpn(&words)), "no flows\n");
        let output = mpvpn(&[&words[..], &["--json"]].concat());
        assert_eq!(stdout(&output), "{\"role\":\"client\",\"flows\":[],\"left_out\":7}\n");
    });
}

#[test]
fn the_link_to_the_dashboard_is_printed_and_nothing_else() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    with_api(&path, || {
        let output = mpvpn(&["dashboard", "--api-socket", path.to_str().unwrap()]);
        assert_eq!(stdout(&output), "http://127.0.0.1:9470/#login=abc\n", "{}", stderr(&output));
    });
}

#[test]
fn a_reload_says_what_counts_from_when_on() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    with_api(&path, || {
        let output = mpvpn(&["config", "reload", "--api-socket", path.to_str().unwrap()]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert_eq!(stdout(&output), "links are used as the file says now\ncounts after a restart: cc\n");
    });
}

#[test]
fn events_are_told_for_people_and_programs_and_followed_until_the_end() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client-a.sock");
    let socket = path.to_str().unwrap();
    let events = SharedEventLog::default();
    let at = UNIX_EPOCH + Duration::from_millis(1_790_000_000_120);
    let down = Event::LinkDown { link: "eth1".into(), reason: "no carrier".into() };
    events.record(at, down.clone());
    events.record(at + Duration::from_secs(1), Event::PathClosed { path: PathName::default() });
    events.record(at + Duration::from_secs(2), down);
    let mut follower = None;
    with_events(&path, events, || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpvpn"));
        command.args(["events", "--api-socket", socket, "--kind", "link"]).env("TZ", "UTC");
        let output = command.output().unwrap();
        assert_eq!(
            stdout(&output),
            "2026-09-21 14:13:22.120  link           eth1 is down: no carrier (2 times since 14:13:20.120)\n"
        );
        let elsewhere = command.env("TZ", "CET-1CEST,M3.5.0,M10.5.0/3").output().unwrap();
        assert!(stdout(&elsewhere).starts_with("2026-09-21 16:13:22.120  link "), "{elsewhere:?}");
        let json = mpvpn(&["events", "--json", "--until", "2026-09-21T14:13:21Z", "--api-socket", socket]);
        let line: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!((&line["count"], &line["last"]), (&2.into(), &"2026-09-21T14:13:22.120Z".into()));
        let child = command.arg("--follow").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let child = follower.insert(child);
        // The recorded event is read, so the command is connected.
        let mut first = [0; 4];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"2026");
    });
    let output = follower.unwrap().wait_with_output().unwrap();
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains("has ended\n  next: "), "{}", stderr(&output));
    let output = mpvpn(&["events", "--since", "noon", "--api-socket", socket]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("--since <TIME>: `noon` is not a time: expected"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn help_and_version_go_to_stdout_with_code_0() {
    for args in [
        &["--help"][..],
        &["server", "--help"],
        &["client", "--help"],
        &["status", "--help"],
        &["events", "--help"],
        &["class", "--help"],
    ] {
        let output = mpvpn(args);
        assert_eq!((code(&output), stderr(&output).as_str()), (0, ""), "{args:?}");
        assert!(stdout(&output).contains("Examples:"), "{args:?}");
    }
    assert_eq!(stdout(&mpvpn(&["--version"])), format!("mpvpn {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn bad_usage_goes_to_stderr_with_code_2() {
    for args in [
        &[][..],
        &["--mode", "gateway"],
        &["server", "--lane", "auto"],
        &["top"],
        &["client", "--server", "203.0.113.1", "--ca", "x", "--insecure"],
        &["server", "--cert", "server.crt"],
    ] {
        let output = mpvpn(args);
        assert_eq!((code(&output), stdout(&output).as_str()), (2, ""), "{args:?}");
        let text = stderr(&output);
        assert!(text.starts_with("mpvpn: ") && text.contains("\n  next: "), "{args:?}: {text}");
    }
}

#[test]
fn typing_errors_are_answered_with_the_word_that_was_meant() {
    for (args, meant) in [
        (&["sttaus"][..], "did you mean `status`?"),
        (&["user", "lst"], "did you mean `list`?"),
        (&["client", "--sever", "a"], "did you mean `--server`?"),
        (&["client", "--scheduler", "minrt"], "did you mean `minrtt`?"),
        (&["server", "--auth", "tokn"], "did you mean `token`?"),
        (&["link", "set", "eth0", "--tier", "primry"], "did you mean `primary`?"),
        (&["config", "check", "x", "--for", "sever"], "did you mean `server`?"),
        (&["measure", "--lane", "strem"], "did you mean `stream`?"),
        (&["setup", "remove", "clint"], "did you mean `client`?"),
        (&["proxy", "--socks5", "1080", "--server", "a"], "127.0.0.1:1080 is for programs of this machine"),
    ] {
        let output = mpvpn(args);
        assert_eq!(code(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(meant), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_file_that_the_command_would_not_start_with_does_not_pass_the_check() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("my.toml");
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let output = mpvpn(&["config", "check", file.to_str().unwrap()]);
        (code(&output), stdout(&output) + &stderr(&output))
    };
    let token = home.path().join("token");
    let text = format!("server = 'vpn.example'\ninsecure = true\ntoken-file = '{}'\n", token.display());
    let (code, said) = check(&text);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains(&format!("cannot read {}: No such file", token.display())), "{said}");
    assert!(said.contains("next: check that the path is right"), "{said}");
    std::fs::write(&token, "mpvpn_secret").unwrap();
    assert_eq!(check(&text).0, 0);
    let (code, said) = check("sever = 'vpn.example'\ninsecure = true\n");
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("unknown key `sever`: did you mean `server`?"), "{said}");
}

#[test]
fn a_full_disk_under_the_log_changes_no_exit_code() {
    // It logs a warning, and fails: nobody has this address (RFC 5737).
    let args = ["proxy", "--server", "127.0.0.1:4433", "--insecure", "--socks5", "192.0.2.77:1080"];
    let usual = mpvpn(&args);
    assert!(stderr(&usual).contains("WARN --insecure") && code(&usual) != 0, "{usual:?}");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_mpvpn")).args(args).stderr(full).status().unwrap();
    assert_eq!(status.code(), usual.status.code());
}

#[test]
fn a_mistake_in_the_configuration_is_shown_with_code_2() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("client.toml");
    std::fs::write(&file, "server = \"a\"\nscheduler = \"fastest\"\n").unwrap();
    let output = mpvpn(&["client", "--config", file.to_str().unwrap()]);
    assert_eq!(code(&output), 2);
    assert_eq!(
        stderr(&output),
        format!(
            "mpvpn: cannot start the client: {0}, line 2, column 13: `fastest` is none of: auto, minrtt, \
             balanced, weighted, redundant, flow, failover\n 2 | scheduler = \"fastest\"\n   |             \
             ^^^^^^^^^\n  next: correct {0} and start again\n",
            file.display()
        )
    );
}

#[test]
fn a_configuration_that_does_not_exist_has_code_2() {
    let output = mpvpn(&["server", "--config", "/nonexistent/server.toml"]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("--config names /nonexistent/server.toml, which does not exist"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn the_status_is_printed_in_both_forms() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("a.sock");
    with_api(&socket, || {
        let path = socket.to_str().unwrap();
        let json = mpvpn(&["status", "--json", "--api-socket", path]);
        assert_eq!(code(&json), 0, "{}", stderr(&json));
        let status: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!((&status["role"], &status["state"]), (&"client".into(), &"up".into()));
        let text = mpvpn(&["status", "--api-socket", path]);
        assert!(stdout(&text).starts_with("mpvpn client "), "{}", stdout(&text));
    });
    let output = mpvpn(&["status", "--api-socket", socket.to_str().unwrap()]);
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains("nothing answers at "), "{}", stderr(&output));
}
