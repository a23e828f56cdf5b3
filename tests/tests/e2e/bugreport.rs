//! `mpvpn bugreport`: the report of a running client has what it promises, and no secrets.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    process::{Child, Stdio},
};

use mpvpn_tests::{
    machine_folders::MachineFolders,
    testbed::{Host, MpvpnProcess, Testbed, binary},
};
use serde_json::Value;

/// Secrets and names that the configuration files of this machine have beside the ones of the running client:
/// a token without a digit, shorter than a hash, with signs of base64, and the password of a proxy.
const OFFICE: &str = "\
server = 'office.example.test:443'
token = 'correct.horse/+='
via = 'http://carol:open-sesame@proxy.example.test:3128'
";
const HIDDEN: [&str; 8] = [
    "vpn.example.test",
    "office.example.test",
    "correct.horse",
    "open-sesame",
    "proxy.example.test",
    "carol",
    "anna",
    "9.9.9.9",
];

/// The parts of a report of any machine, beside status, events and configuration.
const PARTS: [&str; 21] = [
    "uname -srvm",
    "systemctl --no-pager --full status mpvpn*",
    "journalctl --no-pager -o short-iso-precise -n 1000 -u mpvpn*",
    "ip -details address",
    "ip rule",
    "ip -6 rule",
    "ip route show table all",
    "ip -6 route show table all",
    "nft list ruleset",
    "resolvectl status",
    "ss -lunpt",
    "/etc/os-release",
    "/etc/resolv.conf",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv6/conf/all/forwarding",
    "/proc/sys/net/ipv4/conf/all/rp_filter",
    "/proc/sys/net/core/rmem_max",
    "/proc/sys/net/core/wmem_max",
    "/proc/sys/net/mptcp/enabled",
    "/proc/net/dev",
    "/proc/net/snmp",
];

/// A client with configuration files in a machine of its own, and its server.
struct Site {
    client: Child,
    folders: MachineFolders,
    /// Of the running client.
    token: String,
    pin: String,
    _server: MpvpnProcess,
    testbed: Testbed,
}

impl Site {
    fn new() -> Self {
        let testbed = Testbed::two_slow_links();
        let server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
        let add = ["user", "add", "anna", "--json", "--host", "192.0.2.1:4433", "--state-dir", "state"];
        let added = testbed.mpvpn(Host::Server, &add);
        let added: Value = serde_json::from_slice(&added.stdout).unwrap_or_else(|_| panic!("{added:?}"));
        let link = added["link"].as_str().expect("a link").trim_start_matches("mpvpn://").to_owned();
        let (token, rest) = link.split_once('@').expect("a token");
        let pin = rest.split_once("pin=").expect("a pin").1.split('&').next().unwrap_or_default();

        let folder = testbed.public_folder("machine");
        fs::create_dir(folder.join("bin")).expect("a folder");
        symlink(fs::canonicalize(binary()).expect("the program"), folder.join("bin/mpvpn")).expect("a link");
        let folders = MachineFolders::new(folder.join("client"));
        let write = |file: &str, text: &str| {
            let file: PathBuf = folders.file(file);
            fs::create_dir_all(file.parent().expect("a folder")).expect("our own folder");
            fs::write(&file, text).expect("our own folder");
        };
        let config = format!(
            "server = 'vpn.example.test:4433'\ntoken = '{token}'\npin = '{pin}'\npath = ['eth1', 'eth2']\n"
        );
        write("/etc/mpvpn/client.toml", &config);
        write("/etc/mpvpn/client-office.toml", OFFICE);
        write("/etc/mpvpn/users.toml", "not for reports");
        write("/etc/hosts", "192.0.2.1 vpn.example.test\n");
        testbed.run(Host::Client, &["ip", "address", "add", "9.9.9.9/32", "dev", "lo"]);
        let mut command = folders.command(&testbed, Host::Client, false, &["mpvpn", "client"]);
        command.args(["--config", "/etc/mpvpn/client.toml"]).stdin(Stdio::null());
        let log = fs::File::create(testbed.file("log", Host::Client)).expect("a log");
        let client = command.stdout(log).spawn().expect("sh runs");
        let (token, pin) = (token.to_owned(), pin.to_owned());
        let site = Self { client, folders, token, pin, _server: server, testbed };
        let (code, said) = site.run(&["mpvpn", "status", "--wait", "20"]);
        assert_eq!(code, Some(0), "{said}");
        site
    }

    /// Runs a command on the client's machine. Returns the exit code, and what it printed.
    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let args = [&["timeout", "-k", "2", "60"], args].concat();
        let output =
            self.folders.command(&self.testbed, Host::Client, false, &args).output().expect("sh runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// The text below a title.
fn part<'a>(report: &'a str, title: &str) -> &'a str {
    let (_, rest) = report
        .split_once(&format!("\n=== {title}\n"))
        .unwrap_or_else(|| panic!("the report has no part `{title}`:\n{report}"));
    rest.split_once("\n=== ").map_or(rest, |(text, _)| text)
}

#[test]
fn the_report_has_what_it_promises_and_no_secret_of_the_configuration() {
    let site = Site::new();
    let (code, said) = site.run(&["mpvpn", "bugreport", "--yes", "--output", "report.txt"]);
    assert_eq!((code, said.as_str()), (Some(0), "written to report.txt: read it before you send it\n"));
    let file = site.folders.file("report.txt");
    assert_eq!(fs::metadata(&file).expect("it was written").permissions().mode() & 0o777, 0o600);
    let report = fs::read_to_string(&file).expect("text");

    assert!(report.starts_with("mpvpn "), "{report}");
    let status = part(&report, "status of /run/mpvpn/client-mpvpn0.sock");
    let status: Value = serde_json::from_str(status).unwrap_or_else(|error| panic!("{error}:\n{status}"));
    assert_eq!((&status["state"], status["links"].as_array().map(Vec::len)), (&Value::from("up"), Some(2)));
    let events = part(&report, "events of /run/mpvpn/client-mpvpn0.sock");
    assert!(events.contains("eth1") && events.contains("eth2"), "{events}");
    assert!(part(&report, "/etc/mpvpn/client.toml").contains("path = ['eth1', 'eth2']"), "{report}");
    assert!(part(&report, "/etc/mpvpn/client-office.toml").contains("via = "), "{report}");
    PARTS.iter().for_each(|title| assert!(!part(&report, title).is_empty(), "{title}"));
    assert!(part(&report, "ip -details address").contains("mpvpn0"), "{report}");
    assert!(part(&report, "nft list ruleset").contains("mpvpn"), "{report}");
    assert!(part(&report, "ip rule").contains("lookup"), "{report}");
    assert!(part(&report, "ss -lunpt").contains("mpvpn"), "{report}");

    for secret in HIDDEN.iter().copied().chain([site.token.as_str(), &site.pin, "not for reports"]) {
        assert!(!report.contains(secret), "{secret} is in the report:\n{report}");
    }
    for link in ["eth1", "eth2"] {
        let address = site.testbed.run(Host::Client, &["cat", &format!("/sys/class/net/{link}/address")]);
        assert!(!report.contains(address.trim()), "{link}: {address} is in the report:\n{report}");
    }

    let (code, said) = site.run(&["mpvpn", "bugreport", "--yes", "--output", "report.txt"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("report.txt: File exists") && said.contains("next: choose another file"), "{said}");
}

#[test]
fn without_yes_and_without_a_terminal_the_report_is_shown_and_not_written() {
    let site = Site::new();
    let (code, said) = site.run(&["mpvpn", "bugreport"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(part(&said, "/proc/net/snmp").contains("Tcp:"), "{said}");
    assert!(!site.folders.file("mpvpn-bugreport.txt").exists());
}
