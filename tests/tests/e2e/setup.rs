//! `mpvpn setup` on hosts with firewalls that drop: what it adds lets clients in, and what it removes leaves
//! the host as it was.
//!
//! No systemd runs on these hosts, so the server is started by the command that setup prints.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::{PermissionsExt, symlink},
    process::{Child, Stdio},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    machine_folders::MachineFolders,
    ping::reaches,
    testbed::{Host, Testbed, binary, inet4},
};
use rustix::process::{Pid, Signal, kill_process};

/// The longest that a command may take.
const LIMIT: &str = "60";
const SOON: Duration = Duration::from_secs(15);
const PORT: u16 = 4433;
const SETUP: [&str; 7] = ["mpvpn", "setup", "server", "--port", "4433", "--host", "192.0.2.1"];

/// The input chain drops by its policy, the forward chain by its last rule.
const DROPPING: &str = "table inet filter {
  chain input {
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iifname lo accept
    meta l4proto { icmp, icmpv6 } accept
  }
  chain forward {
    type filter hook forward priority filter; policy accept;
    ct state established,related accept
    counter reject
  }
}
";

/// A server's host with its own folders, and a client.
struct Site {
    // Dropped in this order: processes before their testbed.
    running: Vec<Running>,
    folders: MachineFolders,
    testbed: Testbed,
}

/// A process on the server's host; ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::INT);
        let _ = self.0.wait();
    }
}

impl Site {
    fn new() -> Self {
        let testbed = Testbed::two_slow_links();
        let folder = testbed.public_folder("setup");
        let bin = folder.join("bin");
        fs::create_dir(&bin).expect("a folder");
        symlink(fs::canonicalize(binary()).expect("the binary"), bin.join("mpvpn")).expect("a link");
        Self { running: Vec::new(), folders: MachineFolders::new(folder.join("server")), testbed }
    }

    /// Runs a command on the server's host. Returns the exit code, and what it printed.
    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let limited = [&["timeout", "-k", "2", LIMIT], args].concat();
        let output =
            self.folders.command(&self.testbed, Host::Server, false, &limited).output().expect("sh runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[track_caller]
    fn must(&self, args: &[&str]) -> String {
        let (code, printed) = self.run(args);
        assert_eq!(code, Some(0), "{args:?}:\n{printed}");
        printed
    }

    #[track_caller]
    fn setup(&self, more: &[&str]) -> String {
        self.must(&[&SETUP[..], more].concat())
    }

    fn start(&mut self, args: &[&str]) {
        let log = fs::File::create(self.testbed.file("log", Host::Server)).expect("a log");
        let mut command = self.folders.command(&self.testbed, Host::Server, false, args);
        let child = command.stdin(Stdio::null()).stdout(log).spawn().expect("sh runs");
        self.running.push(Running(child));
    }

    fn start_server(&mut self) {
        self.start(&["mpvpn", "server"]);
        eventually(SOON, "the server is up", || match self.run(&["mpvpn", "status"]).1 {
            status if status.contains(": up, ") => Ok(()),
            status => Err(status),
        });
    }

    /// The rules of the host's firewall, without counters.
    fn rules(&self) -> String {
        self.must(&["nft", "--stateless", "list", "ruleset"])
    }

    /// A client by this link reaches the host behind the server, and the resolver at the server.
    #[track_caller]
    fn assert_serves(&self, link: &str) {
        let socket = self.testbed.file("api", Host::Client);
        let args = ["client", link, "--api-socket", socket.to_str().expect("ASCII")];
        let _client = self.testbed.start_as_is(Host::Client, &args, &socket).wait_until_up();
        reaches(&self.testbed, Host::Client, &inet4());
        let resolver = SocketAddr::new(self.tunnel_address().parse().expect("an address"), 53);
        let connect = || TcpStream::connect_timeout(&resolver, Duration::from_secs(5));
        self.testbed.in_namespace(Host::Client, connect).expect("the resolver at the server listens");
    }

    /// The address of the server in the tunnel: the first host of `subnet`.
    fn tunnel_address(&self) -> String {
        let text =
            fs::read_to_string(self.folders.file("/etc/mpvpn/server.toml")).expect("the server's file");
        let subnet = text.lines().find_map(|line| line.strip_prefix("subnet = \"")).expect("a subnet");
        subnet.split_once(".0/").expect("a network of 24 bits").0.to_owned() + ".1"
    }
}

/// The join link in what a command printed.
fn link_in(printed: &str) -> &str {
    let found = printed.lines().find_map(|line| line.trim().strip_prefix("mpvpn://").map(|_| line.trim()));
    found.unwrap_or_else(|| panic!("no link in\n{printed}"))
}

#[test]
fn chains_of_nftables_that_drop_let_clients_in_until_removal() {
    let mut site = Site::new();
    fs::write(site.folders.file("rules"), DROPPING).expect("a file");
    site.must(&["nft", "-f", "rules"]);
    let before = site.rules();

    let plan = site.setup(&["--dry-run"]);
    assert!(plan.contains("nft add rule inet filter input 'udp dport 4433 accept'"), "{plan}");
    assert!(plan.contains("nftables chain inet filter forward"), "{plan}");
    assert_eq!(site.rules(), before, "a dry run changes nothing");
    assert!(!site.folders.file("/etc/mpvpn").exists());

    let (code, refused) = site.run(&SETUP);
    assert_eq!(code, Some(2), "{refused}");
    assert!(refused.contains("next: add --yes"), "{refused}");

    let printed = site.setup(&["--yes", "--user", "anna"]);
    assert!(
        printed.contains("start it by `mpvpn server`") && printed.contains("anna joins with this link"),
        "{printed}"
    );
    let file = site.folders.file("/etc/mpvpn/server.toml");
    let mode = fs::metadata(&file).expect("the server's file").permissions().mode();
    assert_eq!(mode & 0o7027, 0, "{mode:o}");
    site.start_server();
    site.assert_serves(link_in(&printed));

    let after = site.rules();
    let again = site.setup(&["--yes", "--user", "anna"]);
    assert!(again.contains("nothing has to change"), "{again}");
    assert_eq!(site.rules(), after);

    // Another port takes the place of the one before.
    site.running.clear();
    let moved = site.must(&["mpvpn", "setup", "server", "--port", "4434", "--yes"]);
    assert!(moved.contains("nft delete the rule"), "{moved}");
    let rules = site.rules();
    assert!(rules.contains("udp dport 4434") && !rules.contains("dport 4433"), "{rules}");

    let removed = site.must(&["mpvpn", "setup", "remove", "--yes"]);
    assert!(removed.contains("stays: users and certificate in /var/lib/mpvpn"), "{removed}");
    assert_eq!(site.rules(), before);
    assert!(!file.exists() && site.folders.file("/var/lib/mpvpn/users.toml").exists());
    site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);
    let left = fs::read_dir(site.folders.file("/var/lib/mpvpn")).expect("the state folder");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_new_server_is_asked_for_its_site_and_shows_it() {
    let mut site = Site::new();
    let plan = site.setup(&["--yes"]);
    assert!(plan.contains("visitors without a token see no page"), "{plan}");
    let file = site.folders.file("/etc/mpvpn/server.toml");
    let text = || fs::read_to_string(&file).expect("the server's file");
    assert!(!text().contains("[site]"), "{}", text());
    site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);

    // Answers at a terminal: one that is none, the page, and the consent.
    let command = SETUP.join(" ");
    let answered =
        format!("printf 'www\\npage\\ny\\n' | script --quiet --return --command '{command}' /dev/null");
    let printed = site.must(&["sh", "-c", &answered]);
    assert!(
        printed.contains("`www` is no site") && printed.contains("the files in /etc/mpvpn/site.d"),
        "{printed}"
    );
    let page = site.folders.file("/etc/mpvpn/site.d/index.html");
    assert!(page.exists() && text().contains("root = \"/etc/mpvpn/site.d\""), "{}", text());
    site.start_server();
    let curl = ["curl", "--silent", "--insecure", "--max-time", "10", "https://192.0.2.1:4433/"];
    let shown = site.testbed.run(Host::Client, &curl);
    assert_eq!(shown, fs::read_to_string(&page).expect("the page"));

    // A page of the user's own stays when setup runs again, and when it is removed.
    fs::write(&page, "<p>my own\n").expect("a file");
    site.setup(&["--yes", "--site", "page"]);
    assert_eq!(site.testbed.run(Host::Client, &curl), "<p>my own\n");
    site.running.clear();
    let removed = site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);
    assert!(removed.contains("/etc/mpvpn/site.d/index.html: it was changed") && !file.exists(), "{removed}");
    fs::remove_file(&page).expect("it stayed");
    site.setup(&["--yes", "--site", "page"]);
    assert!(page.exists());
    site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);
    assert!(!page.exists() && !file.exists());
}

#[test]
fn a_port_that_another_program_has_is_said_and_nothing_is_changed() {
    let site = Site::new();
    let address = SocketAddr::from(([0, 0, 0, 0], PORT));
    let _web = site.testbed.in_namespace(Host::Server, || TcpListener::bind(address)).expect("a free port");
    let (code, printed) = site.run(&[&SETUP[..], &["--yes"]].concat());
    assert_eq!(code, Some(1), "{printed}");
    assert!(
        printed.contains("has TCP port 4433") && printed.contains("next: take another port"),
        "{printed}"
    );
    assert!(!site.folders.file("/etc/mpvpn").exists());
}

#[test]
fn a_step_that_fails_takes_those_before_it_back() {
    let site = Site::new();
    fs::write(site.folders.file("rules"), DROPPING).expect("a file");
    site.must(&["nft", "-f", "rules"]);
    let before = site.rules();
    // nft works until it has to add the rule for TCP.
    let nft = "#!/bin/sh\ncase \"$*\" in *'add rule'*'tcp dport 4433'*) echo broken >&2; exit 1;; esac\nexec /usr/sbin/nft \"$@\"\n";
    let path = site.folders.path().join("../bin/nft");
    fs::write(&path, nft).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its owner may");
    let (code, printed) = site.run(&[&SETUP[..], &["--yes"]].concat());
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("broken") && printed.contains("everything was taken back"), "{printed}");
    assert_eq!(site.rules(), before);
    assert!(!site.folders.file("/etc/mpvpn/server.toml").exists());
    let users = fs::read_to_string(site.folders.file("/var/lib/mpvpn/users.toml")).expect("the users");
    assert!(!users.contains("[[user]]"), "{users}");
}

#[test]
fn ufw_lets_clients_in_until_removal() {
    let mut site = Site::new();
    if site.run(&["ufw", "version"]).0 != Some(0) {
        eprintln!("skipped: ufw is not installed");
        return;
    }
    site.must(&["ufw", "--force", "enable"]);
    site.must(&["ufw", "allow", "22/tcp"]);
    let before = site.must(&["ufw", "status", "verbose"]);
    let printed = site.setup(&["--yes"]);
    site.start_server();
    site.assert_serves(link_in(&printed));
    let again = site.setup(&["--yes"]);
    assert!(again.contains("nothing has to change"), "{again}");
    site.running.clear();
    site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);
    assert_eq!(site.must(&["ufw", "status", "verbose"]), before);
}

#[test]
fn chains_of_iptables_that_drop_let_clients_in_until_removal() {
    let mut site = Site::new();
    if site.run(&["iptables", "--version"]).0 != Some(0) {
        eprintln!("skipped: iptables is not installed");
        return;
    }
    // As Docker leaves the forward chain, and many guides the input chain.
    let rules = "iptables -P FORWARD DROP; iptables -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT; \
                 iptables -A INPUT -i lo -j ACCEPT; iptables -A INPUT -p icmp -j ACCEPT; iptables -A INPUT -j REJECT";
    site.must(&["sh", "-ec", rules]);
    let saved = || {
        let text = site.must(&["iptables-save", "-t", "filter"]);
        text.lines().filter(|line| line.starts_with("-A")).collect::<Vec<_>>().join("\n")
    };
    let before = saved();
    let printed = site.setup(&["--yes"]);
    let after = saved();
    assert!(after.ends_with("-m comment --comment mpvpn-server -j ACCEPT"), "{after}");
    let again = site.setup(&["--yes"]);
    assert!(again.contains("nothing has to change"), "{again}");
    site.start_server();
    site.assert_serves(link_in(&printed));
    site.running.clear();
    site.must(&["mpvpn", "setup", "remove", "--yes", "--users"]);
    let text = site.must(&["iptables-save", "-t", "filter"]);
    let rules: Vec<_> = text.lines().filter(|line| line.starts_with("-A")).collect();
    assert_eq!(rules.join("\n"), before);
}

/// Runs a command where the sockets of the host's own D-Bus and firewalld are.
const WITH_FIREWALLD: &str = r#"
    mkdir -p dbus firewalld /run/dbus /run/firewalld
    mount --bind dbus /run/dbus && mount --bind firewalld /run/firewalld || exit 125
    exec "$@""#;

#[test]
fn firewalld_lets_clients_in_until_removal() {
    let mut site = Site::new();
    if site.run(&["firewall-cmd", "--version"]).0 == Some(127)
        || site.run(&["sh", "-c", "command -v firewalld"]).0 != Some(0)
    {
        eprintln!("skipped: firewalld is not installed");
        return;
    }
    let inside = |args: &[&'static str]| [&["sh", "-c", WITH_FIREWALLD, "sh"], args].concat();
    site.start(&inside(&["dbus-daemon", "--system", "--nofork", "--nopidfile"]));
    site.start(&inside(&["firewalld", "--nofork", "--nopid"]));
    eventually(SOON, "firewalld runs", || match site.run(&inside(&["firewall-cmd", "--state"])) {
        (Some(0), _) => Ok(()),
        (_, said) => Err(said),
    });
    let look = |site: &Site| {
        let zones = ["--zone=public", "--zone=trusted"];
        let listing = |args: &[&'static str]| site.must(&inside(&[&["firewall-cmd"], args].concat()));
        zones
            .map(|zone| listing(&[zone, "--list-all"]) + &listing(&["--permanent", zone, "--list-all"]))
            .concat()
    };
    let before = look(&site);
    let setup: Vec<&'static str> = [&SETUP[..], &["--yes"]].concat();
    let printed = site.must(&inside(&setup));
    let again = site.must(&inside(&setup));
    assert!(again.contains("nothing has to change"), "{again}");
    site.start_server();
    site.assert_serves(link_in(&printed));
    // Permanent rules are in force after a reload.
    site.must(&inside(&["firewall-cmd", "--reload"]));
    let again = site.must(&inside(&setup));
    assert!(again.contains("nothing has to change"), "{again}");
    let link = site.must(&["mpvpn", "user", "add", "bob"]);
    site.assert_serves(link_in(&link));
    drop(site.running.pop());
    site.must(&inside(&["mpvpn", "setup", "remove", "--yes", "--users"]));
    assert_eq!(look(&site), before);
    let services = fs::read_dir(site.folders.file("/etc/firewalld/services")).expect("a folder");
    let left: Vec<_> = services.map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}
