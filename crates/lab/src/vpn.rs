//! Runs the `mpvpn` binary in a lab: a server, and a client over all links.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{
    error::LabError,
    lab::{Lab, SERVER_V4, SERVER_V6},
    namespace::Namespace,
    process::{Process, run},
    requirements, signals,
};

/// The server's UDP port.
pub const SERVER_PORT: u16 = 4433;
/// The server's address in the tunnel, in the subnet that [`start_server`] sets.
pub const TUNNEL_SERVER_V4: &str = "10.0.0.1";
/// Lines of each log that an error shows. More hide the error, fewer may lack its cause.
const LOG_TAIL_LINES: usize = 30;
/// Time in which a process must end after SIGINT. It reverts its changes, which takes less than a second;
/// longer delays an error, shorter kills it on a busy machine.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The IP version outside of the tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OuterIpVersion {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

/// One end of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The server.
    Server,
    /// The client.
    Client,
}

/// Options of server and client.
#[derive(Clone, Debug)]
pub struct VpnOptions {
    /// Further arguments of the server.
    pub server_args: Vec<String>,
    /// Further arguments of the client.
    pub client_args: Vec<String>,
    /// The client's scheduler; `None`: the default.
    pub scheduler: Option<String>,
    /// The interfaces that the client uses; empty: those of all links.
    pub paths: Vec<String>,
    /// The IP version outside of the tunnel.
    pub outer: OuterIpVersion,
    /// The value of the server's `--auth`.
    pub auth: String,
    /// Time in which each of them must report the state `up`.
    pub limit: Duration,
}

impl Default for VpnOptions {
    fn default() -> Self {
        Self {
            server_args: Vec::new(),
            client_args: Vec::new(),
            scheduler: None,
            paths: Vec::new(),
            outer: OuterIpVersion::V4,
            auth: "none".to_owned(),
            limit: Duration::from_secs(10),
        }
    }
}

/// A self-signed certificate, created by the command that the guide shows.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate, PEM.
    pub cert: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
}

impl Certificate {
    /// Creates a certificate and its key in `dir`.
    pub fn self_signed(dir: &Path) -> Result<Self, LabError> {
        requirements::check(&[requirements::OPENSSL])?;
        let (cert, key) = (dir.join("server.crt"), dir.join("server.key"));
        let mut command = Command::new("openssl");
        command.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-keyout",
        ]);
        command.arg(&key).arg("-out").arg(&cert).args(["-days", "365", "-nodes", "-subj", "/CN=mpvpn"]);
        run(&mut command)?;
        Ok(Self { cert, key })
    }
}

/// A running server or client.
#[derive(Debug)]
pub struct Endpoint {
    side: Side,
    process: Process,
    socket: PathBuf,
}

/// A running `mpvpn server`.
pub type Server = Endpoint;
/// A running `mpvpn client`.
pub type Client = Endpoint;

/// A running tunnel; dropping it kills both ends.
#[derive(Debug)]
pub struct Vpn {
    /// The client, dropped first.
    pub client: Client,
    /// The server.
    pub server: Server,
}

/// Starts server and client, and waits until both report the state `up`.
pub fn start(lab: &Lab, options: VpnOptions) -> Result<Vpn, LabError> {
    let certificate = Certificate::self_signed(lab.dir())?;
    let mut server = start_server(lab, &certificate, &options)?;
    server.wait_up(options.limit, None)?;
    let mut client = start_client(lab, lab.client(), "client", &options)?;
    client.wait_up(options.limit, Some(&server))?;
    Ok(Vpn { client, server })
}

/// Starts a server without waiting for it; its API socket is `server.sock` in the lab's directory.
pub fn start_server(lab: &Lab, certificate: &Certificate, options: &VpnOptions) -> Result<Server, LabError> {
    let socket = lab.dir().join("server.sock");
    let listen = match options.outer {
        OuterIpVersion::V4 => format!("0.0.0.0:{SERVER_PORT}"),
        OuterIpVersion::V6 => format!("[::]:{SERVER_PORT}"),
    };
    let mut command = Command::new(binary()?);
    command.args(["--mode", "server", "--listen", &listen, "--cert"]).arg(&certificate.cert);
    command.arg("--key").arg(&certificate.key).args(["--subnet", "10.0.0.0/24", "--auth", &options.auth]);
    command.arg("--api-socket").arg(&socket).args(&options.server_args);
    let process = lab.spawn(lab.server(), command)?;
    Ok(Endpoint { side: Side::Server, process, socket })
}

/// Starts a client in `namespace` without waiting for it; its API socket is `<name>.sock` in the lab's
/// directory.
pub fn start_client(
    lab: &Lab,
    namespace: &Namespace,
    name: &str,
    options: &VpnOptions,
) -> Result<Client, LabError> {
    let socket = lab.dir().join(format!("{name}.sock"));
    let mut command = Command::new(binary()?);
    command.args(["client", "--server", &server_address(options.outer)]);
    let trust = ["--insecure", "--ca", "--pin"];
    if !options.client_args.iter().any(|arg| trust.iter().any(|option| arg.starts_with(option))) {
        command.arg("--insecure");
    }
    let all = || lab.links().iter().map(|link| link.client_device()).collect();
    let paths: Vec<String> = if options.paths.is_empty() { all() } else { options.paths.clone() };
    for path in &paths {
        command.args(["--path", path]);
    }
    if let Some(scheduler) = &options.scheduler {
        command.args(["--scheduler", scheduler]);
    }
    command.arg("--api-socket").arg(&socket).args(&options.client_args);
    let process = lab.spawn(namespace, command)?;
    Ok(Endpoint { side: Side::Client, process, socket })
}

/// The value of the client's `--server`.
pub fn server_address(outer: OuterIpVersion) -> String {
    let ip: IpAddr = match outer {
        OuterIpVersion::V4 => SERVER_V4.into(),
        OuterIpVersion::V6 => SERVER_V6.into(),
    };
    std::net::SocketAddr::new(ip, SERVER_PORT).to_string()
}

/// The binary under test: `MPVPN_BIN`, else beside this program, else `target/release/mpvpn`.
pub fn binary() -> Result<PathBuf, LabError> {
    if let Some(path) = std::env::var_os("MPVPN_BIN") {
        return Ok(path.into());
    }
    let mut candidates = Vec::new();
    if let Ok(own) = std::env::current_exe() {
        // Test programs are one folder below the binaries.
        candidates.extend(own.ancestors().skip(1).take(2).map(|dir| dir.join("mpvpn")));
    }
    candidates.push(PathBuf::from("target/release/mpvpn"));
    if let Some(found) = candidates.iter().find(|path| path.is_file()) {
        return found.canonicalize().map_err(LabError::io(format!("find {}", found.display())));
    }
    Err(LabError::NoBinary(candidates))
}

impl Vpn {
    /// The output of `mpvpn status --json` of one side.
    pub fn status(&self, side: Side) -> Result<serde_json::Value, LabError> {
        match side {
            Side::Server => self.server.status(),
            Side::Client => self.client.status(),
        }
    }

    /// Ends the client, then the server, by SIGINT, and returns their exit statuses.
    pub fn stop(&mut self) -> Result<(ExitStatus, ExitStatus), LabError> {
        Ok((self.client.stop()?, self.server.stop()?))
    }

    /// Kills both (SIGKILL).
    pub fn kill(&mut self) {
        self.client.kill();
        self.server.kill();
    }

    /// The last lines of both logs.
    pub fn logs(&self) -> String {
        self.client.log() + &self.server.log()
    }
}

impl Endpoint {
    /// The output of `mpvpn status --json`.
    pub fn status(&self) -> Result<serde_json::Value, LabError> {
        let mut command = Command::new(binary()?);
        let text = run(command.args(["status", "--json", "--api-socket"]).arg(&self.socket))?;
        serde_json::from_str(&text).map_err(|_| LabError::Unexpected {
            what: "mpvpn status --json".to_owned(),
            expected: "JSON",
            got: text.chars().take(200).collect(),
        })
    }

    /// Waits until the status reports the state `up`. The error shows the logs of this side and of `peer`.
    pub fn wait_up(&mut self, limit: Duration, peer: Option<&Self>) -> Result<(), LabError> {
        let start = Instant::now();
        loop {
            signals::check_interrupted()?;
            let ended = self.process.exited()?;
            let reason = match (ended, self.status()) {
                (Some(status), _) => format!("it ended: {status}"),
                (None, Ok(status)) if status["state"] == "up" => return Ok(()),
                (None, Ok(status)) => format!("its state is {}", status["state"]),
                (None, Err(error)) => error.to_string(),
            };
            if ended.is_some() || start.elapsed() > limit {
                return Err(LabError::VpnNotUp {
                    role: self.role().to_owned(),
                    waited: start.elapsed(),
                    reason,
                    logs: self.log() + &peer.map(Self::log).unwrap_or_default(),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process, for signals and exit codes.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// The path of the socket of its local API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends the process by SIGINT and returns its exit status. If it takes longer than `STOP_TIMEOUT`, it is
    /// killed, which is an error.
    pub fn stop(&mut self) -> Result<ExitStatus, LabError> {
        self.process.signal(Signal::INT)?;
        if let Some(status) = self.process.wait(STOP_TIMEOUT)? {
            return Ok(status);
        }
        self.process.kill();
        Err(LabError::Unexpected {
            what: format!("the {} after SIGINT", self.role()),
            expected: "an end within 5 s",
            got: self.log(),
        })
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        self.process.kill();
    }

    fn role(&self) -> &'static str {
        match self.side {
            Side::Server => "server",
            Side::Client => "client",
        }
    }

    fn log(&self) -> String {
        format!("--- end of the {}'s log ---\n{}\n", self.role(), self.process.log_tail(LOG_TAIL_LINES))
    }
}
