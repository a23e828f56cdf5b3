//! A testbed: an emulated network ([`mpvpn_lab::Lab`]) and the `mpvpn` processes on its hosts.
//!
//! In: descriptions of links, arguments of `mpvpn`. Out: running processes, their status, logs and exit
//! codes. Always holds: processes of one testbed see nothing of another one; every wait is bounded;
//! everything ends when it is dropped.

mod process;

use std::{
    cell::Cell,
    fs::{self, File},
    net::UdpSocket,
    os::unix::fs::PermissionsExt,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use mpvpn_input::dirs::SOCKET_DIR;
pub use mpvpn_lab::Direction;
use mpvpn_lab::{
    INET_V4, INET_V6, Lab, LabBuilder, LinkHandle, LinkSpec, Namespace, remove_labs_when_interrupted,
};
pub use process::{MpvpnProcess, path_of, paths_of};
use serde_json::Value;

use crate::{
    failure_logs,
    machine_share::{MachineShare, Share},
    private_folders::PrivateFolders,
    user_home::{USER, UserHome},
};

/// Address and port of the server, reachable over every link.
pub const SERVER: &str = "192.0.2.1:4433";
/// Arguments of a server with the testbed's certificate at port 4433 of all IPv4 addresses, without
/// authentication.
pub const SERVER_ARGS: [&str; 9] =
    ["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key", "--auth", "none"];
/// IPv6 address and port of the server.
pub const SERVER6: &str = "[2001:db8::1]:4433";
/// Address of the server inside the tunnel.
pub const TUNNEL: &str = "10.0.0.1";
/// The usual link: 100 Mbit/s, 12.5 ms each way, 60 ms of queue.
pub const LINK: &str = "100mbit,12.5ms,queue=60ms";
/// A slower link, so that several tests can fill such links at the same time: 40 Mbit/s.
pub const SLOW_LINK: &str = "40mbit,12.5ms,queue=60ms";
/// Filter of logs that tell why paths and links are used or not.
const DECISIONS: &str = "warn,mpvpn=info,mpvpn::liveness=debug,mpvpn::scheduler=debug";
/// How often a host is looked at, each 100 ms, while it tests addresses. The kernel takes a second and a
/// random part of another one; more only delays a failing test.
const ADDRESS_TEST_LOOKS: u32 = 50;
/// Ports that the built-in rules assign to a class.
const CLASS_PORTS: [(&str, u16); 2] = [("critical", 5060), ("bulk", 6881)];

/// The hosts of a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The client, with one interface per link: `eth1`, `eth2` …
    Client,
    /// The server.
    Server,
    /// A host behind the server that has no route to the tunnel's addresses.
    Inet,
    /// A host in a LAN behind the client, in testbeds with a LAN.
    Lan,
    /// A second client with one unlimited link, in testbeds with two clients.
    Other,
}

/// A lab with a certificate in its directory. Other testbeds may run at the same time, unless its thread
/// holds the whole machine.
pub struct Testbed {
    lab: Lab,
    folders: PrivateFolders,
    started: Cell<u32>,
    /// Filter of the logs of processes (`RUST_LOG`), if it is not theirs.
    log_filter: Option<&'static str>,
    _machine: MachineShare,
}

impl Testbed {
    /// One emulated link per text.
    pub fn new(links: &[&str]) -> Self {
        Self::build(Lab::builder().links(specs(links)))
    }

    /// One emulated link per specification.
    pub fn of(links: &[LinkSpec]) -> Self {
        Self::build(Lab::builder().links(links.iter().cloned()))
    }

    /// Two links [`LINK`].
    pub fn two_links() -> Self {
        Self::new(&[LINK, LINK])
    }

    /// Two links [`SLOW_LINK`], for tests that do not depend on the rate.
    pub fn two_slow_links() -> Self {
        Self::new(&[SLOW_LINK, SLOW_LINK])
    }

    /// Emulated links, and a LAN behind the client.
    pub fn with_lan(links: &[&str]) -> Self {
        Self::build(Lab::builder().links(specs(links)).lan(true))
    }

    /// Two links [`SLOW_LINK`], a LAN behind the client, and a second client.
    pub fn two_homes() -> Self {
        let links = specs(&[SLOW_LINK, SLOW_LINK]);
        Self::build(Lab::builder().links(links).lan(true).other_client(true))
    }

    /// Two links [`LINK`], and a second client.
    pub fn two_clients() -> Self {
        Self::build(Lab::builder().links(specs(&[LINK, LINK])).other_client(true))
    }

    /// A plain veth pair for a link: no emulation, for speed.
    pub fn unlimited() -> Self {
        Self::build(Lab::builder().link(LinkSpec::unlimited()))
    }

    /// The same, and a second client.
    pub fn unlimited_with_other() -> Self {
        Self::build(Lab::builder().link(LinkSpec::unlimited()).other_client(true))
    }

    fn build(builder: LabBuilder) -> Self {
        remove_labs_when_interrupted();
        let machine = MachineShare::take(Share::LIGHT);
        let lab = builder.build().unwrap_or_else(|error| panic!("no lab: {error}"));
        let folders = PrivateFolders::new(lab.dir()).expect("folders in the lab's directory");
        let testbed = Self { lab, folders, started: Cell::new(0), log_filter: None, _machine: machine };
        testbed.make_certificate("server");
        testbed
    }

    /// Logs why paths and links are used or not, for failures that are explained from the logs.
    pub fn log_decisions(mut self) -> Self {
        self.log_filter = Some(DECISIONS);
        self
    }

    /// Creates `NAME.crt` and `NAME.key` in the lab's directory, as the guide does.
    pub fn make_certificate(&self, name: &str) {
        let (key, certificate) = (format!("{name}.key"), format!("{name}.crt"));
        let output = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
            .args(["-keyout", &key, "-out", &certificate, "-days", "365", "-nodes", "-subj", "/CN=mpvpn"])
            .current_dir(self.dir())
            .output()
            .expect("openssl runs");
        assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The client's devices of all links.
    pub fn link_devices(&self) -> Vec<String> {
        self.lab.links().iter().map(LinkHandle::client_device).collect()
    }

    /// A link by its number, from 1 as in its interface's name.
    pub fn link(&self, number: usize) -> Link<'_> {
        Link(self.lab.link(number - 1).unwrap_or_else(|error| panic!("{error}")))
    }

    /// Adds an interface with a default route to the client: a veth pair to the server.
    pub fn add_interface(&self, name: &str, net: u8) {
        let (client, server) = (self.lab.client().name(), self.lab.server().name());
        let far = format!("{name}-far");
        let status = Command::new("ip")
            .args([
                "link", "add", name, "netns", client, "type", "veth", "peer", "name", &far, "netns", server,
            ])
            .status()
            .expect("ip runs");
        assert!(status.success(), "no interface {name}");
        for (host, device, last_octet) in [(Host::Server, far.as_str(), 1), (Host::Client, name, 2)] {
            self.run(host, &["ip", "address", "add", &format!("10.{net}.0.{last_octet}/24"), "dev", device]);
            self.run(host, &["ip", "link", "set", device, "up"]);
        }
        let way = format!("10.{net}.0.1");
        self.run(Host::Client, &["ip", "route", "add", "default", "via", &way, "dev", name, "metric", "200"]);
    }

    /// Removes such an interface.
    pub fn remove_interface(&self, name: &str) {
        self.run(Host::Client, &["ip", "link", "delete", name]);
    }

    /// The lab's directory with certificates, logs and sockets. It is the working directory of the testbed's
    /// processes.
    pub fn dir(&self) -> &Path {
        self.lab.dir()
    }

    /// The folder that processes of the testbed see as [`mpvpn_input::dirs::SOCKET_DIR`], by its path
    /// outside of them.
    pub fn default_sockets(&self) -> &Path {
        self.folders.sockets()
    }

    /// The folder that processes of a host see as [`mpvpn_input::dirs::STATE_DIR`], by its path outside
    /// of them.
    pub fn state_dir(&self, host: Host) -> PathBuf {
        self.folders.state(host)
    }

    /// Creates a folder that every user may read. It is removed with the testbed.
    pub fn public_folder(&self, name: &str) -> PathBuf {
        let public = self.lab.public_dir().unwrap_or_else(|error| panic!("{error}"));
        let number = self.started.replace(self.started.get() + 1);
        let folder = public.join(format!("{number}-{name}"));
        fs::create_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("its owner may");
        folder
    }

    /// A new file name in the lab's directory.
    pub fn file(&self, kind: &str, host: Host) -> PathBuf {
        let number = self.started.replace(self.started.get() + 1);
        self.dir().join(format!("{number}-{host:?}.{kind}").to_lowercase())
    }

    fn namespace(&self, host: Host) -> &Namespace {
        match host {
            Host::Client => self.lab.client(),
            Host::Server => self.lab.server(),
            Host::Inet => self.lab.inet(),
            Host::Lan => self.lab.lan().expect("a stage made with_lan"),
            Host::Other => self.lab.other_client().expect("a stage of two_clients"),
        }
    }

    /// Sends an empty UDP datagram from that host.
    pub fn send_empty_udp(&self, from: Host, to: (&str, u16)) {
        let sent =
            self.in_namespace(from, || UdpSocket::bind("0.0.0.0:0").and_then(|it| it.send_to(&[], to)));
        sent.unwrap_or_else(|error| panic!("a datagram from {from:?} to {to:?}: {error}"));
    }

    /// Sends a packet of a built-in class through the tunnel of the client. A class that sleeps connects
    /// then, and `default` carries the packet.
    pub fn wake_class(&self, class: &str) {
        let known = CLASS_PORTS.iter().find(|(name, _)| *name == class);
        let (_, port) = known.unwrap_or_else(|| panic!("no port belongs to the class {class}"));
        self.send_empty_udp(Host::Client, (TUNNEL, *port));
    }

    /// Runs `task` in a thread inside the host's network namespace. Sockets that it opens stay in the
    /// namespace.
    pub fn in_namespace<T: Send>(&self, host: Host, task: impl FnOnce() -> T + Send) -> T {
        self.namespace(host).enter(task).unwrap_or_else(|error| panic!("cannot enter {host:?}: {error}"))
    }

    /// A command on that host; its process ends with the thread that starts it.
    pub fn command(&self, host: Host, program: &str) -> Command {
        let mut command = self.namespace(host).command(program);
        self.folders.apply(host, &mut command);
        command.current_dir(self.dir()).stdin(Stdio::null());
        // The proxy settings of the machine do not apply inside a testbed.
        for name in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs a command on that host to its end, for at most `limit`; it may fail.
    pub fn output_of(&self, host: Host, limit: Duration, args: &[&str]) -> Output {
        self.command(host, "timeout")
            .args(["-k", "2", &limit.as_secs().max(1).to_string()])
            .args(args)
            .output()
            .unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Runs a command on that host, and panics unless it succeeds. Returns its standard output.
    pub fn run(&self, host: Host, args: &[&str]) -> String {
        let output = self.output_of(host, Duration::from_secs(30), args);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{args:?} at {host:?} ended with {}:\n{out}\n{err}", output.status);
        out.into_owned()
    }

    /// Packets counted by the nftables rules of a host that have this comment.
    pub fn count_nft_packets(&self, host: Host, comment: &str) -> u64 {
        let rules: Value = serde_json::from_str(&self.run(host, &["nft", "-j", "list", "ruleset"]))
            .expect("nft prints JSON");
        let rules = rules["nftables"].as_array().expect("a list").iter();
        let rules = rules.filter(|item| item["rule"]["comment"] == comment);
        let exprs = rules.flat_map(|rule| rule["rule"]["expr"].as_array().into_iter().flatten());
        exprs.filter_map(|expr| expr["counter"]["packets"].as_u64()).sum()
    }

    /// Bytes that an interface has received and sent.
    pub fn interface_bytes(&self, host: Host, interface: &str) -> (u64, u64) {
        let listing = self.run(host, &["ip", "-j", "-s", "link", "show", "dev", interface]);
        let stats: Value = serde_json::from_str(&listing).expect("ip prints JSON");
        let count = |way: &str| stats[0]["stats64"][way]["bytes"].as_u64().expect("a counter");
        (count("rx"), count("tx"))
    }

    /// Starts a server without authentication, and waits until it is up.
    pub fn server(&self, more_args: &[&str]) -> MpvpnProcess {
        self.server_with("server", more_args)
    }

    /// Starts such a server with another certificate.
    pub fn server_with(&self, certificate: &str, more_args: &[&str]) -> MpvpnProcess {
        let (cert, key) = (format!("{certificate}.crt"), format!("{certificate}.key"));
        let mut args = vec!["server", "--listen", "0.0.0.0:4433", "--listen", "[::]:4433", "--cert", &cert];
        args.extend(["--key", &key]);
        if !more_args.contains(&"--subnet") {
            args.extend(["--subnet", "10.0.0.0/24"]);
        }
        if !more_args.contains(&"--auth") {
            args.extend(["--auth", "none"]);
        }
        args.extend(more_args);
        self.start(Host::Server, &args).wait_until_up()
    }

    /// Starts a client over all links that checks no certificate, and waits until it is up.
    pub fn client(&self, more_args: &[&str]) -> MpvpnProcess {
        self.start_client(more_args).wait_until_up()
    }

    /// Starts such a client without waiting. `--server`, `--ca`, `--pin` and `--path` in `more_args` replace
    /// the defaults.
    pub fn start_client(&self, more_args: &[&str]) -> MpvpnProcess {
        let links = self.link_devices();
        let mut args = vec!["client"];
        if !more_args.contains(&"--server") {
            args.extend(["--server", SERVER]);
        }
        if !more_args.contains(&"--ca") && !more_args.contains(&"--pin") {
            args.push("--insecure");
        }
        if !more_args.contains(&"--path") {
            args.extend(links.iter().flat_map(|link| ["--path", link.as_str()]));
        }
        args.extend(more_args);
        self.start(Host::Client, &args)
    }

    /// Starts `mpvpn` with these arguments and its own API socket.
    pub fn start(&self, host: Host, args: &[&str]) -> MpvpnProcess {
        let socket = self.file("api", host);
        let mut args = args.to_vec();
        let path = socket.to_str().expect("an ASCII path");
        args.extend(["--api-socket", path]);
        self.start_as_is(host, &args, &socket)
    }

    /// Starts `mpvpn` with exactly these arguments; `socket` is the path of its API socket.
    pub fn start_as_is(&self, host: Host, args: &[&str], socket: &Path) -> MpvpnProcess {
        self.start_program(host, binary().to_str().expect("an ASCII path"), args, socket)
    }

    /// Starts a program that becomes `mpvpn` with the API socket `socket`.
    pub fn start_program(&self, host: Host, program: &str, args: &[&str], socket: &Path) -> MpvpnProcess {
        self.spawn(self.command(host, program), host, args, socket)
    }

    /// Starts `mpvpn` in a mount namespace where the file `own` is mounted at `path`. The process sees later
    /// changes of `own`.
    pub fn start_with_file(
        &self,
        host: Host,
        own: &Path,
        path: &Path,
        args: &[&str],
        socket: &Path,
    ) -> MpvpnProcess {
        self.start_with_files(host, &[(own, path)], args, socket)
    }

    /// The same with several files.
    pub fn start_with_files(
        &self,
        host: Host,
        files: &[(&Path, &Path)],
        args: &[&str],
        socket: &Path,
    ) -> MpvpnProcess {
        let mut command = self.command(host, "unshare");
        let script =
            r#"while [ "$1" != -- ]; do mount --bind "$1" "$2" && shift 2 || exit; done; shift; exec "$@""#;
        command.args(["--mount", "sh", "-c", script, "sh"]);
        for (own, path) in files {
            command.arg(own).arg(path);
        }
        command.arg("--").arg(binary());
        self.spawn(command, host, args, socket)
    }

    /// Starts `mpvpn` as a service manager does that listens at `notify`, and wants a sign of life within
    /// `watchdog` each time.
    pub fn start_as_service(
        &self,
        host: Host,
        notify: &Path,
        watchdog: Duration,
        args: &[&str],
    ) -> MpvpnProcess {
        let socket = self.file("api", host);
        let mut command = self.command(host, binary().to_str().expect("an ASCII path"));
        command.env("NOTIFY_SOCKET", notify).env("WATCHDOG_USEC", watchdog.as_micros().to_string());
        let args = [args, &["--api-socket", socket.to_str().expect("an ASCII path")]].concat();
        self.spawn(command, host, &args, &socket)
    }

    /// Starts `mpvpn` as an unprivileged user.
    pub fn start_as_user(&self, host: Host, home: &UserHome, args: &[&str], socket: &Path) -> MpvpnProcess {
        let mut command = self.command(host, "setpriv");
        let user = USER.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
        command.arg(binary()).env("XDG_RUNTIME_DIR", home.path()).env("XDG_STATE_HOME", home.path());
        self.spawn(command, host, args, socket)
    }

    /// Starts `mpvpn` as an unprivileged user with the capability CAP_NET_ADMIN, as a service manager does.
    /// The folder of journals and sockets becomes the user's.
    pub fn start_with_net_admin(&self, host: Host, args: &[&str]) -> MpvpnProcess {
        chown(self.default_sockets(), Some(USER), Some(USER)).expect("root");
        let socket = self.default_sockets().join("user.sock");
        let mut command = self.command(host, "unshare");
        // The device of most machines, which every user may open; here it may be root's.
        let script = r#"mount -t tmpfs tun /dev/net && mknod -m 666 /dev/net/tun c 10 200 && exec "$@""#;
        let user = USER.to_string();
        command.args(["--mount", "sh", "-c", script, "sh"]);
        command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
        command.args(["--inh-caps", "+net_admin", "--ambient-caps", "+net_admin"]).arg(binary());
        let inside = Path::new(SOCKET_DIR).join("user.sock");
        let args = [args, &["--api-socket", inside.to_str().expect("an ASCII path")]].concat();
        self.spawn(command, host, &args, &socket)
    }

    fn spawn(&self, mut command: Command, host: Host, args: &[&str], socket: &Path) -> MpvpnProcess {
        let log = self.file("log", host);
        let output = File::create(&log).unwrap_or_else(|error| panic!("{}: {error}", log.display()));
        let child = command
            .args(args)
            .envs(self.log_filter.map(|filter| ("RUST_LOG", filter)))
            .stdout(output.try_clone().expect("a second handle"))
            .stderr(output)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", binary().display()));
        MpvpnProcess { args: args.join(" "), child, log, socket: socket.to_owned(), ended: None }
    }

    /// Runs `mpvpn` to its end, for at most 20 s.
    pub fn mpvpn(&self, host: Host, args: &[&str]) -> Output {
        let binary = binary();
        let mut all = vec![binary.to_str().expect("an ASCII path")];
        all.extend(args);
        self.output_of(host, Duration::from_secs(20), &all)
    }

    /// Copies the logs of the testbed to a folder that remains, and prints its path. Done automatically if a
    /// test panics.
    pub fn keep_logs(&self) {
        let thread = thread::current();
        // With one test thread, tests run in the thread `main`.
        let test = thread.name().filter(|name| *name != "main").unwrap_or(self.lab.prefix());
        match failure_logs::copy_logs(self.dir(), test) {
            Ok(folder) => eprintln!("the complete logs: {}", folder.display()),
            Err(error) => eprintln!("the logs cannot be kept: {error}"),
        }
    }

    /// All network settings of a host that mpvpn may change, as text for comparison: once the kernel has
    /// tested new IPv6 addresses (RFC 4862 §5.4), as it changes them and their routes then.
    pub fn network_state(&self, host: Host) -> String {
        const LOOK: &str = "ip -o link | sed 's/^[0-9]*: //' | cut -d' ' -f1-5; ip -o addr | sed 's/^[0-9]*: //'; \
            ip rule; ip -6 rule; ip route show table all; ip -6 route show table all; nft list ruleset; \
            grep -rs . /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf | sort";
        let look = || self.run(host, &["sh", "-c", LOOK]);
        let mut state = look();
        for _ in 0..ADDRESS_TEST_LOOKS {
            if !state.contains(" tentative ") {
                break;
            }
            thread::sleep(Duration::from_millis(100));
            state = look();
        }
        state
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if thread::panicking() {
            self.keep_logs();
        }
    }
}

/// Address of the host behind the server.
pub fn inet(family: Family) -> String {
    match family {
        Family::V4 => INET_V4.to_string(),
        Family::V6 => INET_V6.to_string(),
    }
}

/// IPv4 address of the host behind the server.
pub fn inet4() -> String {
    inet(Family::V4)
}

fn specs(links: &[&str]) -> Vec<LinkSpec> {
    links.iter().map(|text| text.parse().unwrap_or_else(|error| panic!("link {text}: {error}"))).collect()
}

/// A link of the testbed that can be impaired and restored.
#[derive(Clone, Copy)]
pub struct Link<'a>(&'a LinkHandle);

impl Link<'_> {
    /// The lab's handle of the link, for its counters and all other changes.
    pub fn handle(&self) -> &LinkHandle {
        self.0
    }

    /// Takes the carrier from the client's interface.
    pub fn cut(self) {
        self.0.down().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Returns the carrier.
    pub fn restore(self) {
        self.0.up().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Drops all packets in a direction; the carrier stays on.
    pub fn silence(self, direction: Direction) {
        self.0.loss(direction, 1.0).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Stops dropping packets.
    pub fn end_silence(self) {
        self.0.loss(Direction::Both, 0.0).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The binary under test: `MPVPN_BIN`, or the one that cargo built with the same profile as this program.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("MPVPN_BIN") {
        return path.into();
    }
    let own = std::env::current_exe().expect("its own path");
    // The rigs are in the folder of the binary, tests in a folder below.
    let found =
        own.ancestors().skip(1).take(2).map(|folder| folder.join("mpvpn")).find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "no mpvpn beside {}: run cargo build -p mpvpn with the same profile, or set MPVPN_BIN",
            own.display()
        )
    })
}

/// Address families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}
