//! Runs the shell blocks of the guide's pages in order on the hosts of a testbed, and compares their output
//! with the pages. [`mpvpn_tests::guide`] describes the notation.
//!
//! Each host of a page has its own `/etc`, `/var/lib` and `/run/mpvpn`, an unprivileged user, and `sudo`. The
//! host behind the server has a web server at port 80.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    guide::{Action, At, Page, Run, parse, prints},
    machine_folders::MachineFolders,
    testbed::{Host, Testbed, binary},
    user_home::USER,
};
use rustix::process::{Pid, Signal, kill_process};

/// Maximum duration of a block.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a running block may take until it is up, and how long a block is repeated until its output
/// matches.
const MATCH_TIMEOUT: Duration = Duration::from_secs(15);

/// The pages in the order of the index.
const PAGES: [&str; 27] = [
    "README.md",
    "docs/guide/README.md",
    "docs/guide/two-lines-at-home.md",
    "docs/guide/router-for-a-lan.md",
    "docs/guide/three-satellite-links.md",
    "docs/guide/server-on-a-vps.md",
    "docs/guide/install.md",
    "docs/guide/proxy-without-root.md",
    "docs/guide/where-udp-is-blocked.md",
    "docs/guide/inside-an-app.md",
    "docs/guide/watching.md",
    "docs/guide/when-something-is-wrong.md",
    "docs/guide/links.md",
    "docs/guide/classes-of-traffic.md",
    "docs/guide/how-tcp-travels.md",
    "docs/guide/several-instances.md",
    "docs/guide/measuring.md",
    "docs/guide/users.md",
    "docs/guide/what-clients-reach.md",
    "docs/guide/server-certificates.md",
    "docs/guide/server-site.md",
    "docs/guide/server-without-root.md",
    "docs/guide/networks-behind-clients.md",
    "docs/guide/many-tunnels.md",
    "docs/guide/past-the-tunnel.md",
    "docs/guide/public-addresses.md",
    "docs/guide/several-servers.md",
];

#[test]
fn every_page_of_the_guide_is_played() {
    let folder = fs::read_dir(repository().join("docs/guide")).expect("the guide");
    for entry in folder {
        let host_name = entry.expect("an entry").file_name();
        let page = format!("docs/guide/{}", host_name.to_string_lossy());
        assert!(PAGES.contains(&page.as_str()), "{page} is not played: add it here");
    }
}

macro_rules! pages {
    ($($host_name:ident $number:literal)*) => {
        $(#[test]
        fn $host_name() {
            play(PAGES[$number]);
        })*
    };
}

pages! {
    the_readme 0
    the_index_of_the_guide 1
    two_lines_at_home 2
    a_router_for_a_lan 3
    three_satellite_links 4
    a_server_on_a_vps 5
    installing 6
    a_proxy_without_root 7
    where_udp_is_blocked 8
    inside_an_app 9
    see_it_at_work 10
    when_something_is_wrong 11
    links 12
    classes_of_traffic 13
    how_tcp_travels 14
    several_instances 15
    measuring 16
    users_of_a_server 17
    what_clients_reach 18
    certificates_of_a_server 19
    a_server_that_strangers_see 20
    a_server_without_root 21
    networks_behind_clients 22
    many_tunnels 23
    past_the_tunnel 24
    public_addresses_of_users 25
    several_servers 26
}

fn play(path: &str) {
    let text = fs::read_to_string(repository().join(path)).expect("a page");
    let page = parse(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
    if page.steps.iter().all(|step| matches!(step.action, Action::Check { .. })) {
        return;
    }
    let began = Instant::now();
    let mut hosts = PageHosts::new(&page);
    println!("{path}: a lab in {:.1} s", began.elapsed().as_secs_f64());
    for step in &page.steps {
        let began = Instant::now();
        let done = match &step.action {
            Action::Run(run) if run.stays => hosts.start(run),
            Action::Run(run) => hosts.run(run),
            Action::Write { at, path, append, text } => hosts.write(*at, path, *append, text),
            Action::Cable { link, up } => hosts.set_carrier(*link, *up),
            Action::Copy { from, file, to } => hosts.copy(*from, file, *to),
            // tests/documents.rs reads these.
            Action::Check { .. } => Ok(()),
        };
        if let Err(why) = done {
            panic!("{path}:{}: {why}", step.line);
        }
        println!("{path}:{}: {:.1} s", step.line, began.elapsed().as_secs_f64());
    }
    hosts.end().unwrap_or_else(|why| panic!("{path}: {why}"));
}

/// The hosts of a page.
struct PageHosts {
    // Dropped in this order: processes before their testbed.
    running: Vec<Running>,
    _web_server: HelloServer,
    testbed: Testbed,
    hosts: Vec<(Host, MachineFolders)>,
    folder: PathBuf,
    /// Fingerprint and token that a server printed last.
    secrets: Option<(String, String)>,
    /// The join link that was printed last.
    link: Option<String>,
}

/// The running command of a block.
struct Running {
    at: At,
    program: String,
    has_terminal: bool,
    child: Child,
    log: PathBuf,
}

impl PageHosts {
    fn new(page: &Page) -> Self {
        let links: Vec<&str> = match page.links.len() {
            0 => vec!["100mbit,12ms", "40mbit,25ms"],
            _ => page.links.iter().map(String::as_str).collect(),
        };
        let testbed = if page.lan { Testbed::with_lan(&links) } else { Testbed::new(&links) };
        let folder = testbed.public_folder("guide");
        let bin = folder.join("bin");
        fs::create_dir(&bin).expect("a folder");
        symlink(fs::canonicalize(binary()).expect("the binary"), bin.join("mpvpn")).expect("a link");
        fs::write(bin.join("sudo"), "#!/bin/sh\nexec \"$@\"\n").expect("a file");
        fs::set_permissions(bin.join("sudo"), fs::Permissions::from_mode(0o755)).expect("its owner may");
        let folders = |host| (host, MachineFolders::new(folder.join(host_name(host))));
        let hosts = page.hosts().into_iter().map(folders).collect();
        let web_server = HelloServer::start(&testbed);
        Self {
            running: Vec::new(),
            _web_server: web_server,
            testbed,
            hosts,
            folder,
            secrets: None,
            link: None,
        }
    }

    /// A command on a host with the host's own folders.
    fn command(&self, at: At, args: &[&str]) -> Command {
        self.folders_of(at.host).command(&self.testbed, at.host, at.user, args)
    }

    fn folders_of(&self, host: Host) -> &MachineFolders {
        let found = self.hosts.iter().find(|(other, _)| *other == host);
        found.map(|(_, folders)| folders).expect("every host of the page has folders")
    }

    fn output(&self, at: At, args: &[&str]) -> (Option<i32>, String) {
        let limit = BLOCK_TIMEOUT.as_secs().to_string();
        let limited = [&["timeout", "-k", "2", &limit][..], args].concat();
        let output = self.command(at, &limited).output().expect("sh runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a block, and repeats it until its output matches the page.
    fn run(&mut self, run: &Run) -> Result<(), String> {
        let script = self.with_secrets(&run.script)?;
        let began = Instant::now();
        loop {
            let (code, printed) = self.output(run.at, &["sh", "-e", "-c", &script]);
            if code != Some(run.code) {
                return Err(format!("exit code {code:?} instead of {}:\n{printed}{}", run.code, self.logs()));
            }
            let link = printed.lines().map(str::trim).find(|line| line.starts_with("mpvpn://"));
            self.link = link.map(str::to_owned).or(self.link.take());
            match prints(&printed, &run.output) {
                Ok(()) => return Ok(()),
                Err((line, text)) if began.elapsed() > MATCH_TIMEOUT => {
                    return Err(format!(
                        "what is printed lacks line {line} of the page:\n{text}\n--- it is\n{printed}{}",
                        self.logs()
                    ));
                }
                Err(_) => thread::sleep(Duration::from_millis(300)),
            }
        }
    }

    /// Ends the same program on the same host, starts the block's command, and waits until it is up.
    fn start(&mut self, run: &Run) -> Result<(), String> {
        let script = self.with_secrets(&run.script)?;
        let program =
            script.trim_start_matches("sudo ").split_whitespace().next().unwrap_or_default().to_owned();
        let same = |other: &Running| other.at.host == run.at.host && other.program == program;
        while let Some(index) = self.running.iter().position(same) {
            self.running.remove(index).end()?;
        }
        let log = self.folder.join(format!("{}-{program}.log", host_name(run.at.host)));
        let output = fs::File::create(&log).expect("a log");
        let script = format!("exec {script}");
        // A reader of the page has a terminal, where a server shows the token.
        let has_terminal = run.script.contains("mpvpn server");
        let args: &[&str] = match has_terminal {
            true => &["script", "-qefc", &script, "/dev/null"],
            false => &["sh", "-c", &script],
        };
        let mut command = self.command(run.at, args);
        command.env("NO_COLOR", "1").stdin(Stdio::null());
        let child = command.stdout(output).spawn().expect("sh runs");
        self.running.push(Running { at: run.at, program, has_terminal, child, log });
        self.wait_up(run)?;
        let log = self.running.last().map(Running::log).unwrap_or_default();
        let mut args = log.split_whitespace().skip_while(|word| *word != "--pin").skip(1);
        if let Some(pin) = args.next() {
            let token = args.nth(1).unwrap_or_default();
            self.secrets = Some((pin.to_owned(), token.to_owned()));
        }
        Ok(())
    }

    fn wait_up(&mut self, run: &Run) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let running = self.running.last_mut().expect("it was started");
            let ended = running.child.try_wait().expect("our own child");
            let (log, id, is_ours) = (running.log(), running.child.id(), running.program == "mpvpn");
            if let Some(status) = ended {
                return Err(format!("it ended with {status}:\n{log}"));
            }
            let is_up = if is_ours {
                // A server answers before it says, in a terminal, how a client connects.
                let is_told =
                    !running.has_terminal || log.contains("A client connects with") && log.ends_with('\n');
                is_told && self.output(run.at, &["mpvpn", "status"]).1.contains(": up, ")
            } else {
                let listening = self.output(At { user: false, ..run.at }, &["ss", "-Hltnp"]).1;
                listening.contains(&format!("pid={id},"))
            };
            let lacking = match prints(&log, &run.output) {
                Ok(()) if is_up => return Ok(()),
                Ok(()) => "it is not up".to_owned(),
                Err((line, text)) => format!("its output lacks line {line} of the page: {text}"),
            };
            if began.elapsed() > MATCH_TIMEOUT {
                return Err(format!("{lacking}\n{log}"));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn write(&self, at: At, path: &str, append: bool, text: &str) -> Result<(), String> {
        let folders = self.folders_of(at.host);
        let path = match path.starts_with('/') {
            true if !path.starts_with("/etc/") => return Err(format!("{path} is not below /etc")),
            false if at.user => folders.path().join("user").join(path),
            _ => folders.file(path),
        };
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        let before = if append { fs::read_to_string(&path).unwrap_or_default() } else { String::new() };
        fs::write(&path, before + &self.with_secrets(text)?).expect("a file");
        if at.user {
            chown(&path, Some(USER), Some(USER)).expect("root may give it away");
        }
        Ok(())
    }

    fn copy(&self, from: Host, file: &str, to: Host) -> Result<(), String> {
        let home = |host| self.folders_of(host).file(file);
        fs::copy(home(from), home(to)).map(drop).map_err(|error| format!("{file}: {error}"))
    }

    fn set_carrier(&self, link: usize, up: bool) -> Result<(), String> {
        let link = self.testbed.link(link);
        if up {
            link.restore()
        } else {
            link.cut()
        }
        Ok(())
    }

    /// Replaces `PIN`, `TOKEN` and `LINK` by the values that the server printed.
    fn with_secrets(&self, text: &str) -> Result<String, String> {
        let (pin, token) = match &self.secrets {
            Some((pin, token)) => (pin.as_str(), token.as_str()),
            None => ("", ""),
        };
        let (text, pins) = replace_word(text, "PIN", pin);
        let (text, tokens) = replace_word(&text, "TOKEN", token);
        let (text, links) = replace_word(&text, "LINK", self.link.as_deref().unwrap_or_default());
        match (pins || tokens, &self.secrets) {
            (true, None) => Err("PIN and TOKEN are not known: no server has started".to_owned()),
            _ if links && self.link.is_none() => Err("LINK is not known: no link was printed".to_owned()),
            _ => Ok(text),
        }
    }

    fn logs(&self) -> String {
        let of = |running: &Running| {
            let log = running.log();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            format!("\n--- {} at the {}\n{end}", running.program, host_name(running.at.host))
        };
        self.running.iter().map(of).collect()
    }

    /// Ends all running commands; fails if one has ended by itself.
    fn end(mut self) -> Result<(), String> {
        while let Some(running) = self.running.pop() {
            running.end()?;
        }
        Ok(())
    }
}

impl Running {
    fn log(&self) -> String {
        // A terminal ends lines by CR LF.
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).replace("\r\n", "\n")
    }

    fn end(mut self) -> Result<(), String> {
        if let Some(status) = self.child.try_wait().expect("our own child") {
            return Err(format!("{} ended with {status} by itself:\n{}", self.program, self.log()));
        }
        self.interrupt();
        Ok(())
    }

    /// The program's own process, which is the child of the one that makes the terminal.
    fn process(&self) -> Pid {
        let own = Pid::from_child(&self.child);
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        let on_terminal = children.split_whitespace().next().filter(|_| self.has_terminal);
        on_terminal.and_then(|id| Pid::from_raw(id.parse().ok()?)).unwrap_or(own)
    }

    /// Sends SIGINT, and waits.
    fn interrupt(&mut self) {
        let began = Instant::now();
        let _ = kill_process(self.process(), Signal::INT);
        while began.elapsed() < Duration::from_secs(5) {
            if self.child.try_wait().expect("our own child").is_some() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.interrupt();
        }
    }
}

/// Replaces the word `host_name` in `text`; the flag is whether it was found.
fn replace_word(text: &str, host_name: &str, value: &str) -> (String, bool) {
    let is_part = |character: char| character.is_ascii_alphanumeric() || "_$".contains(character);
    let (mut done, mut rest, mut found) = (String::new(), text, false);
    while let Some((before, after)) = rest.split_once(host_name) {
        let is_word = !before.ends_with(is_part) && !after.starts_with(is_part);
        found |= is_word;
        done += before;
        done += if is_word { value } else { host_name };
        rest = after;
    }
    (done + rest, found)
}

fn host_name(host: Host) -> &'static str {
    match host {
        Host::Client => "client",
        Host::Server => "server",
        Host::Inet => "inet",
        Host::Lan => "lan",
        Host::Other => "other",
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository").to_owned()
}

/// A web server on the host behind the server that answers `hello`.
struct HelloServer {
    stop: Arc<AtomicBool>,
    server: Option<thread::JoinHandle<()>>,
}

impl HelloServer {
    fn start(testbed: &Testbed) -> Self {
        let listener =
            testbed.in_namespace(Host::Inet, || TcpListener::bind("0.0.0.0:80").expect("a free port"));
        listener.set_nonblocking(true).expect("a socket can be nonblocking");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let server = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((mut stream, _)) => {
                        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
                        let _ = stream.read(&mut [0; 4096]);
                        let _ = stream.write_all(
                            b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n",
                        );
                    }
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        Self { stop, server: Some(server) }
    }
}

impl Drop for HelloServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}
