//! mpvpn inside an app: a process of an unprivileged user with its own TCP/IP stack.

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

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(60);
/// User ID of `nobody`.
const USER: &str = "65534";
const PAGE: &str = "page.example";

/// A folder that every user may read and run programs from.
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

    /// Copies a file that `cargo build -p mpvpn-embed --lib --examples` built into the folder.
    fn copy_built(&self, built: &str) -> PathBuf {
        let own = std::env::current_exe().expect("its own path");
        let from = own.parent().and_then(Path::parent).expect("a test lies in deps").join(built);
        let to = self.0.join(from.file_name().expect("a file"));
        // Copied by another process: a process that another thread starts meanwhile would inherit the file
        // open for writing, and such a file cannot be run (execve(2), ETXTBSY).
        let copied = Command::new("cp").arg(&from).arg(&to).status().expect("cp runs");
        assert!(
            copied.success(),
            "no {}: cargo build -p mpvpn-embed --lib --examples makes it",
            from.display()
        );
        to
    }
}

/// A process of an unprivileged user on the client, and its output.
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

    fn wait_for_output(&mut self, what: &str) {
        eventually(TIMEOUT, what, || match (self.log().contains(what), self.child.try_wait()) {
            (true, _) => Ok(()),
            (false, Ok(Some(status))) => panic!("it ended: {status}\n{}", self.log()),
            (false, _) => Err(self.log()),
        });
    }

    /// User ID and effective capabilities in `/proc`.
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

    fn wait_for_exit(&mut self) -> ExitStatus {
        eventually(TIMEOUT, "its end", || match self.child.try_wait().expect("our own child") {
            Some(status) => Ok(status),
            None => Err(self.log()),
        })
    }

    fn finish(mut self) -> String {
        let status = self.wait_for_exit();
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

/// The example `fetch` downloads a page while a link is cut.
fn fetch_page_during_cut(mode: &str, configuration: &str, streams: u64) {
    const SIZE: u64 = 40 * MB;
    const PAUSE: u64 = 5 * MB;
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let host: Ipv4Addr = inet4().parse().expect("an address");
    let names = NameServer::start(&testbed, Host::Inet, host, host);
    let site = HttpsPages::start(&testbed, Host::Inet, PAGE, PAUSE);
    let folder = Folder::new(&testbed, configuration);
    let program = folder.copy_built("examples/fetch");
    let file = |path: PathBuf| path.to_str().expect("an ASCII path").to_owned();
    let certificate = file(folder.write("page.pem", site.certificate()));
    let before = testbed.network_state(Host::Client);
    let carried = |link: &str| testbed.interface_bytes(Host::Client, link).0;

    let configuration = file(folder.0.join("client.toml"));
    let (asked, url) = (names.address().to_string(), site.url(SIZE));
    let mut app = App::start(&testbed, &program, &[mode, &configuration, &asked, &url, &certificate]);
    app.wait_for_output("resolved: ");
    let wait_for_sent_bytes = |bytes| {
        eventually(TIMEOUT, "a part of the page", || match site.sent() {
            sent if sent >= bytes => Ok(()),
            sent => Err(format!("{sent} bytes, {}", app.log())),
        });
    };
    wait_for_sent_bytes(PAUSE);
    assert_eq!(app.privileges(), (USER.to_owned(), "0000000000000000".to_owned()));
    assert_eq!(testbed.network_state(Host::Client), before, "something on the machine has changed");
    site.resume();
    wait_for_sent_bytes(4 * PAUSE);
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
    fetch_page_during_cut("calls", "", 1);
}

#[test]
fn a_page_is_fetched_by_a_descriptor_as_packets_while_a_link_is_cut() {
    fetch_page_during_cut("descriptor", "lane = 'datagram'\n", 0);
}

#[test]
fn an_app_gets_the_reason_why_its_token_is_refused() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let folder = Folder::new(&testbed, "token = '0123456789abcdef0123456789abcdef'\n");
    let program = folder.copy_built("examples/fetch");
    let configuration = folder.0.join("client.toml");
    let args =
        ["calls", configuration.to_str().expect("an ASCII path"), "192.0.2.1:53", "https://a/", "none"];
    let mut app = App::start(&testbed, &program, &args);
    assert_eq!(app.wait_for_exit().code(), Some(1));
    assert!(app.log().contains("Failed(") && app.log().contains("refuses the token"), "{}", app.log());
}

#[test]
fn a_program_in_c_has_two_tunnels_and_leaves_no_changes() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let folder = Folder::new(&testbed, "");
    folder.copy_built("libmpvpn.so");
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
    let args = [configuration, TUNNEL, "10.102.0.2"];
    // `./dev sanitize`: quiet, unless memory is misused or lost.
    let app = match std::env::var_os("MPVPN_VALGRIND") {
        None => App::start(&testbed, &program, &args),
        Some(_) => {
            let program = program.to_str().expect("an ASCII path");
            let checks = [
                "--quiet",
                "--error-exitcode=9",
                "--leak-check=full",
                "--show-leak-kinds=definite",
                "--errors-for-leak-kinds=definite",
            ];
            App::start(&testbed, Path::new("valgrind"), &[&checks[..], &[program], &args].concat())
        }
    };
    let output = app.output.clone();
    let said = app.finish();
    // Valgrind says which system calls it does not know.
    let of_library: Vec<_> =
        said.lines().filter(|line| !line.starts_with("--") && !line.starts_with("==")).collect();
    assert_eq!(of_library, [""; 0], "the library prints");
    let output = fs::read_to_string(output).expect("its output");
    assert!(output.ends_with("all is well\n"), "{output}");
    assert!(output.matches("\nevent 1 ").count() >= 2, "{output}");
    assert_eq!(testbed.network_state(Host::Client), before, "something is left on the machine");
}
