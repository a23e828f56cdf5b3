//! mpvpn inside an app: an ordinary user's process whose packets come from a TCP/IP stack of its own.

use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    thread,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    http::{self, MB},
    https::{HttpsPages, NameServer},
    machine_share::{MachineShare, Share},
    testbed::{Host, SERVER, TUNNEL, Testbed, inet4},
};

const LIMIT: Duration = Duration::from_secs(60);
/// `nobody`.
const USER: &str = "65534";
const PAGE: &str = "page.example";

/// A folder from which every user may read and run things.
struct Folder(PathBuf);

impl Folder {
    fn new(testbed: &Testbed, configuration: &str) -> Self {
        let folder = Self(testbed.public_folder("app"));
        folder.write("client.toml", &format!("server = '{SERVER}'\ninsecure = true\n{configuration}"));
        folder
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path
    }

    /// What `cargo build -p mpvpn-embed --lib --examples` made, where this test was made, too.
    fn take(&self, built: &str) -> PathBuf {
        let own = std::env::current_exe().expect("its own path");
        let from = own.parent().and_then(Path::parent).expect("a test lies in deps").join(built);
        let to = self.0.join(from.file_name().expect("a file"));
        // Not by this process: what another thread starts meanwhile would have the file open for writing for a moment,
        // and nobody can run such a file (execve(2), ETXTBSY).
        let copied = Command::new("cp").arg(&from).arg(&to).status().expect("cp runs");
        assert!(
            copied.success(),
            "no {}: cargo build -p mpvpn-embed --lib --examples makes it",
            from.display()
        );
        to
    }
}

/// A process of an ordinary user on the client, and what it writes.
struct App {
    child: Child,
    output: PathBuf,
    log: PathBuf,
}

impl App {
    fn start(testbed: &Testbed, program: &Path, args: &[&str]) -> Self {
        let (output, log) = (testbed.file("out", Host::Client), testbed.file("log", Host::Client));
        let child = testbed
            .command(Host::Client, "setpriv")
            .args(["--reuid", USER, "--regid", USER, "--clear-groups", "--no-new-privs"])
            .arg(program)
            .args(args)
            .stdout(File::create(&output).expect("a file"))
            .stderr(File::create(&log).expect("a file"))
            .spawn()
            .expect("setpriv runs");
        Self { child, output, log }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn until(&mut self, what: &str) {
        eventually(LIMIT, what, || match (self.log().contains(what), self.child.try_wait()) {
            (true, _) => Ok(()),
            (false, Ok(Some(status))) => panic!("it ended: {status}\n{}", self.log()),
            (false, _) => Err(self.log()),
        });
    }

    /// The user and the capabilities in effect, as the kernel has them.
    fn privileges(&self) -> (String, String) {
        let path = format!("/proc/{}/status", self.child.id());
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let field = |name: &str| {
            let line =
                text.lines().find_map(|line| line.strip_prefix(name)).expect("a field of every process");
            line.split_whitespace().next().unwrap_or_default().to_owned()
        };
        (field("Uid:"), field("CapEff:"))
    }

    fn end(&mut self) -> ExitStatus {
        eventually(LIMIT, "its end", || match self.child.try_wait().expect("our own child") {
            Some(status) => Ok(status),
            None => Err(self.log()),
        })
    }

    fn finish(mut self) -> String {
        let status = self.end();
        assert!(status.success(), "{status}\n{}", self.log());
        self.log()
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The example fetches a page while a link is cut.
fn fetches(way: &str, configuration: &str, streams: u64) {
    const SIZE: u64 = 40 * MB;
    const PAUSE: u64 = 5 * MB;
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let host: Ipv4Addr = inet4().parse().expect("an address");
    let names = NameServer::start(&testbed, Host::Inet, host, host);
    let site = HttpsPages::start(&testbed, Host::Inet, PAGE, PAUSE);
    let folder = Folder::new(&testbed, configuration);
    let program = folder.take("examples/fetch");
    let file = |path: PathBuf| path.to_str().expect("an ASCII path").to_owned();
    let certificate = file(folder.write("page.pem", site.certificate()));
    let before = testbed.network_state(Host::Client);
    let carried = |link: &str| testbed.interface_bytes(Host::Client, link).0;

    let configuration = file(folder.0.join("client.toml"));
    let (asked, url) = (names.address().to_string(), site.url(SIZE));
    let mut app = App::start(&testbed, &program, &[way, &configuration, &asked, &url, &certificate]);
    app.until("resolved: ");
    let passed = |bytes| {
        eventually(LIMIT, "a part of the page", || match site.sent() {
            sent if sent >= bytes => Ok(()),
            sent => Err(format!("{sent} bytes, {}", app.log())),
        });
    };
    passed(PAUSE);
    assert_eq!(app.privileges(), (USER.to_owned(), "0000000000000000".to_owned()));
    assert_eq!(testbed.network_state(Host::Client), before, "something on the machine has changed");
    site.resume();
    passed(4 * PAUSE);
    testbed.link(1).cut();
    assert!(site.sent() < SIZE, "all was sent already");
    let both = (carried("eth1"), carried("eth2"));
    assert!(both.0 > MB && both.1 > MB, "not both links carry the page: {both:?}");
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).restore();

    let body = app.output.clone();
    let log = app.finish();
    http::compare(&mut File::open(&body).expect("its output"), SIZE).expect("the page, byte by byte");
    assert!(names.question_count() > 0);
    assert!(log.contains("a socket of eth1 is used") && log.contains("a socket of eth2 is used"), "{log}");
    let status = log.lines().find_map(|line| line.strip_prefix("status: ")).expect("a status");
    let status: serde_json::Value = serde_json::from_str(status).expect("JSON");
    assert_eq!((&status["state"], status["links"].as_array().map(Vec::len)), (&"up".into(), Some(2)));
    assert_eq!(status["flows"]["stream"].as_u64(), Some(streams), "{status:#}");
    assert!(log.ends_with("stopped\n"), "{log}");
    assert_eq!(testbed.network_state(Host::Client), before, "something is left on the machine");
}

#[test]
fn a_page_is_fetched_by_calls_as_a_stream_while_a_link_is_cut() {
    fetches("calls", "", 1);
}

#[test]
fn a_page_is_fetched_by_a_descriptor_as_packets_while_a_link_is_cut() {
    fetches("descriptor", "lane = 'datagram'\n", 0);
}

#[test]
fn an_app_is_told_why_its_token_is_refused() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let folder = Folder::new(&testbed, "token = '0123456789abcdef0123456789abcdef'\n");
    let program = folder.take("examples/fetch");
    let configuration = folder.0.join("client.toml");
    let args =
        ["calls", configuration.to_str().expect("an ASCII path"), "192.0.2.1:53", "https://a/", "none"];
    let mut app = App::start(&testbed, &program, &args);
    assert_eq!(app.end().code(), Some(1));
    assert!(app.log().contains("Failed(") && app.log().contains("refuses the token"), "{}", app.log());
}

#[test]
fn a_program_in_c_has_two_tunnels_and_leaves_nothing() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let folder = Folder::new(&testbed, "");
    folder.take("libmpvpn.so");
    let program = folder.0.join("echo");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace");
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(root.join("tests/embed/echo.c"))
        .arg("-I")
        .arg(root.join("crates/embed/include"))
        .arg("-L")
        .arg(&folder.0)
        .args(["-lmpvpn", "-Wl,-rpath,$ORIGIN"])
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let before = testbed.network_state(Host::Client);
    let configuration = folder.0.join("client.toml");
    let configuration = configuration.to_str().expect("an ASCII path");
    let app = App::start(&testbed, &program, &[configuration, TUNNEL, "10.102.0.2"]);
    let said = app.output.clone();
    assert_eq!(app.finish(), "", "the library prints");
    let said = fs::read_to_string(said).expect("its output");
    assert!(said.ends_with("all is well\n"), "{said}");
    assert!(said.matches("\nevent 1 ").count() >= 2, "{said}");
    assert_eq!(testbed.network_state(Host::Client), before, "something is left on the machine");
}
