//! The rights of a running process: capabilities, system calls, files. Read from the kernel, under load.

mod breakout;

use std::{fs, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    testbed::{Host, MpvpnProcess, SERVER, Testbed, inet4},
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// CAP_NET_ADMIN in a set of capabilities (linux/capability.h).
const NET_ADMIN: u64 = 1 << 12;
/// CAP_NET_BIND_SERVICE, for the resolver of a server.
const LOW_PORTS: u64 = 1 << 10;
/// CAP_DAC_READ_SEARCH.
const READ_ALL: u64 = 1 << 2;

/// The value of a line of `/proc/PID/status`.
pub(crate) fn line(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a running process");
    let found = status.lines().find_map(|line| line.strip_prefix(key)).expect("a known key");
    found.trim().to_owned()
}

fn capabilities(pid: u32, key: &str) -> u64 {
    u64::from_str_radix(&line(pid, key), 16).expect("a set")
}

/// Checks that every thread has these capabilities, cannot get others, and has its system calls filtered.
#[track_caller]
fn assert_confined(pid: u32, allowed: u64) {
    let threads: Vec<u32> = fs::read_dir(format!("/proc/{pid}/task"))
        .expect("a running process")
        .map(|entry| {
            entry.expect("a thread").file_name().to_str().expect("a number").parse().expect("a number")
        })
        .collect();
    for thread in threads {
        for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(capabilities(thread, set), allowed, "{set} of {}", line(thread, "Name:"));
        }
        assert_eq!(line(thread, "NoNewPrivs:"), "1");
        assert_eq!(line(thread, "Seccomp:"), "2");
    }
}

/// The process that a server or client has started.
fn helper_of(process: &MpvpnProcess) -> Option<u32> {
    let pid = process.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("a running process");
    children.split_whitespace().next().map(|child| child.parse().expect("a number"))
}

#[test]
fn under_load_both_ends_keep_what_they_need_only() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let client = testbed.client(&["--kill-switch"]);
    let site = TestPages::start(&testbed, Host::Inet);
    Download::start(&testbed, &site, &inet4(), 5 * MB, TIMEOUT, &[]).finish();
    for (process, allowed) in [(&server, NET_ADMIN | LOW_PORTS), (&client, NET_ADMIN)] {
        assert_confined(process.id(), allowed);
        let helper = helper_of(process).expect("a helper");
        assert_confined(helper, NET_ADMIN | READ_ALL);
        let confinement = &process.status()["confinement"];
        let kept = confinement["capabilities"].as_array().expect("a list").len();
        assert_eq!(kept, allowed.count_ones() as usize, "{confinement}");
        assert_eq!(confinement["system_calls"], true);
        assert!(confinement["landlock"].is_number(), "{confinement}");
        assert!(!process.log().contains("is not allowed to this process"), "{}", process.log());
    }
}

#[test]
fn relays_and_proxies_keep_no_capability_and_their_helper_reads_only() {
    let testbed = Testbed::two_links();
    let relay =
        ["server", "--relay-only", "--auth", "none", "--listen", "0.0.0.0:4433", "--state-dir", "relays"];
    let server = testbed.start(Host::Server, &relay).wait_until_up();
    let proxy = testbed
        .start(Host::Client, &["proxy", "--server", SERVER, "--insecure", "--socks5", "127.0.0.1:1080"]);
    let proxy = proxy.wait_until_up();
    let site = TestPages::start(&testbed, Host::Inet);
    let url = site.url(&inet4(), "1000000");
    let fetch =
        ["curl", "-sS", "--max-time", "10", "-o", "/dev/null", "--socks5-hostname", "127.0.0.1:1080", &url];
    testbed.run(Host::Client, &fetch);
    for process in [&server, &proxy] {
        assert_confined(process.id(), 0);
        let helper = helper_of(process).expect("a helper, for files of root");
        assert_confined(helper, READ_ALL);
    }
}

#[test]
fn an_ordinary_user_with_the_capability_runs_a_client() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let links = ["--path", "eth1", "--path", "eth2"];
    let client =
        ["client", "--server", SERVER, "--insecure", "--dns", "off", "--state-dir", "/run/mpvpn/state"];
    let client = testbed.start_with_net_admin(Host::Client, &[&client[..], &links].concat());
    let client = client.wait_until_up();
    let site = TestPages::start(&testbed, Host::Inet);
    Download::start(&testbed, &site, &inet4(), MB, TIMEOUT, &[]).finish();
    assert_eq!(line(client.id(), "Uid:").split_whitespace().next(), Some("65534"));
    for set in ["CapEff:", "CapPrm:"] {
        assert_eq!(capabilities(client.id(), set), NET_ADMIN);
    }
}

#[test]
fn with_confine_off_the_process_stays_as_it_was_started() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&["--confine", "off"]);
    assert_eq!(line(server.id(), "Seccomp:"), "0");
    assert!(capabilities(server.id(), "CapEff:") & READ_ALL != 0);
    assert!(server.status()["confinement"].is_null());
}
