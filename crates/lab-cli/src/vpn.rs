//! Runs the `mpvpn` binary in a lab: a server, and a client over all links.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::{Duration, Instant},
};

use mpvpn_lab::{Lab, LabError, Process, SERVER_V4, process::run, requirements, signals};
use rustix::process::Signal;

/// The server's UDP port.
const SERVER_PORT: u16 = 4433;
/// The server's address in the tunnel, in the subnet that [`start_server`] sets.
pub(crate) const TUNNEL_SERVER_V4: &str = "10.0.0.1";
/// Time in which each side must report the state `up`. It takes a second; longer delays an error, shorter
/// fails on a busy machine.
const UP_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines of each log that an error shows. More hide the error, fewer may lack its cause.
const LOG_TAIL_LINES: usize = 30;
/// Time in which a process must end after SIGINT. It reverts its changes, which takes less than a second;
/// longer delays an error, shorter kills it on a busy machine.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// One end of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The server.
    Server,
    /// The client.
    Client,
}

/// Options of server and client.
#[derive(Clone, Debug, Default)]
pub(crate) struct VpnOptions {
    /// Further arguments of the server.
    pub(crate) server_args: Vec<String>,
    /// Further arguments of the client.
    pub(crate) client_args: Vec<String>,
    /// The client's scheduler; `None`: the default.
    pub(crate) scheduler: Option<String>,
}

impl Side {
    fn role(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

/// A running server or client.
#[derive(Debug)]
pub(crate) struct Endpoint {
    side: Side,
    process: Process,
    socket: PathBuf,
}

/// A running tunnel; dropping it kills both ends.
#[derive(Debug)]
pub(crate) struct Vpn {
    /// The client, dropped first.
    pub(crate) client: Endpoint,
    /// The server.
    pub(crate) server: Endpoint,
}

/// Starts server and client, and waits until both report the state `up`.
pub(crate) fn start(lab: &Lab, options: &VpnOptions) -> Result<Vpn, LabError> {
    let mut server = start_server(lab, options)?;
    server.wait_up(None)?;
    let mut client = start_client(lab, options)?;
    client.wait_up(Some(&server))?;
    Ok(Vpn { client, server })
}

/// Starts a server without waiting for it.
fn start_server(lab: &Lab, options: &VpnOptions) -> Result<Endpoint, LabError> {
    let (cert, key) = self_signed_certificate(lab.dir())?;
    let mut command = Command::new(binary()?);
    command.args(["server", "--listen", &format!("0.0.0.0:{SERVER_PORT}"), "--cert"]).arg(cert);
    command.arg("--key").arg(key).args(["--subnet", "10.0.0.0/24", "--auth", "none"]);
    start_side(lab, Side::Server, command, &options.server_args)
}

/// Starts a client over all links without waiting for it.
fn start_client(lab: &Lab, options: &VpnOptions) -> Result<Endpoint, LabError> {
    let mut command = Command::new(binary()?);
    command.args(["client", "--server", &format!("{SERVER_V4}:{SERVER_PORT}")]);
    if !["--insecure", "--ca", "--pin"].iter().any(|trust| is_given(&options.client_args, trust)) {
        command.arg("--insecure");
    }
    for link in lab.links() {
        command.args(["--path", &link.client_device()]);
    }
    if let Some(scheduler) = &options.scheduler {
        command.args(["--scheduler", scheduler]);
    }
    start_side(lab, Side::Client, command, &options.client_args)
}

/// Starts `command` with a socket and a state directory of its own in the lab's directory: the state of the
/// machine's own server and client is in `/var/lib/mpvpn`, under the same names.
fn start_side(lab: &Lab, side: Side, mut command: Command, more: &[String]) -> Result<Endpoint, LabError> {
    let namespace = match side {
        Side::Server => lab.server(),
        Side::Client => lab.client(),
    };
    let role = side.role();
    let socket = lab.dir().join(format!("{role}.sock"));
    command.arg("--api-socket").arg(&socket);
    if !is_given(more, "--state-dir") {
        command.arg("--state-dir").arg(lab.dir().join(format!("{role}-state")));
    }
    command.args(more);
    let process = lab.spawn(namespace, command)?;
    Ok(Endpoint { side, process, socket })
}

/// Whether an option is among the arguments, with or without `=`.
fn is_given(args: &[String], option: &str) -> bool {
    args.iter().any(|arg| arg.split('=').next() == Some(option))
}

/// Creates a self-signed certificate and its key in `dir`, by the command that the guide shows, and returns
/// their paths.
fn self_signed_certificate(dir: &Path) -> Result<(PathBuf, PathBuf), LabError> {
    requirements::check(&[requirements::OPENSSL])?;
    let (cert, key) = (dir.join("server.crt"), dir.join("server.key"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout"]);
    command.arg(&key).arg("-out").arg(&cert).args(["-days", "365", "-nodes", "-subj", "/CN=mpvpn"]);
    run(&mut command)?;
    Ok((cert, key))
}

/// The program `mpvpn`: `MPVPN_BIN`, else the file beside this program, else the one in `PATH`.
pub(crate) fn binary() -> Result<PathBuf, LabError> {
    let named = std::env::var_os("MPVPN_BIN").map(PathBuf::from);
    let own = std::env::current_exe().ok();
    let beside = own.map(|own| own.with_file_name("mpvpn")).filter(|path| path.is_file());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut in_path = std::env::split_paths(&path).map(|dir| dir.join("mpvpn"));
    named.or(beside).or_else(|| in_path.find(|path| path.is_file())).ok_or(LabError::NoBinary)
}

impl Vpn {
    /// The output of `mpvpn status --json` of one side.
    pub(crate) fn status(&self, side: Side) -> Result<serde_json::Value, LabError> {
        match side {
            Side::Server => self.server.status(),
            Side::Client => self.client.status(),
        }
    }

    /// Ends the client, then the server, by SIGINT, and returns their exit statuses.
    pub(crate) fn stop(&mut self) -> Result<(ExitStatus, ExitStatus), LabError> {
        Ok((self.client.stop()?, self.server.stop()?))
    }

    /// The last lines of both logs.
    pub(crate) fn logs(&self) -> String {
        self.client.log() + &self.server.log()
    }
}

/// Whether a status says that packets get through.
pub(crate) fn works(status: &serde_json::Value) -> bool {
    status["state"] == "up" || status["state"] == "degraded"
}

impl Endpoint {
    /// The output of `mpvpn status --json`.
    pub(crate) fn status(&self) -> Result<serde_json::Value, LabError> {
        let mut command = Command::new(binary()?);
        let text = run(command.args(["status", "--json", "--api-socket"]).arg(&self.socket))?;
        serde_json::from_str(&text).map_err(|_| LabError::Unexpected {
            what: "mpvpn status --json".to_owned(),
            expected: "JSON",
            got: text.chars().take(200).collect(),
        })
    }

    /// Waits until the status says that the tunnel works, for `UP_TIMEOUT` at most. The error shows the logs
    /// of this side and of `peer`.
    fn wait_up(&mut self, peer: Option<&Self>) -> Result<(), LabError> {
        let start = Instant::now();
        loop {
            signals::check_interrupted()?;
            let ended = self.process.exited()?;
            let reason = match (ended, self.status()) {
                (Some(status), _) => format!("it ended: {status}"),
                (None, Ok(status)) if works(&status) => return Ok(()),
                (None, Ok(status)) => format!("its state is {}", status["state"]),
                (None, Err(error)) => error.to_string(),
            };
            if ended.is_some() || start.elapsed() > UP_TIMEOUT {
                return Err(LabError::VpnNotUp {
                    role: self.side.role().to_owned(),
                    waited: start.elapsed(),
                    reason,
                    logs: self.log() + &peer.map(Self::log).unwrap_or_default(),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The path of the socket of its local API.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends the process by SIGINT and returns its exit status. If it takes longer than `STOP_TIMEOUT`, it is
    /// killed, which is an error.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus, LabError> {
        self.process.signal(Signal::INT)?;
        if let Some(status) = self.process.wait(STOP_TIMEOUT)? {
            return Ok(status);
        }
        self.process.kill();
        Err(LabError::Unexpected {
            what: format!("the {} after SIGINT", self.side.role()),
            expected: "an end within 5 s",
            got: self.log(),
        })
    }

    fn log(&self) -> String {
        format!("--- end of the {}'s log ---\n{}\n", self.side.role(), self.process.log_tail(LOG_TAIL_LINES))
    }
}
