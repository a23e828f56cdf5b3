//! A bulk download over one QUIC connection: an inner flow that is not TCP and that a tunnel cannot inspect.
//!
//! In: an address, and a file for the server's certificate. Out: the received bytes per [`STEP`]. Both ends
//! use quinn with CUBIC and packets that fit into every tunnel. Both ends are separate processes in the
//! namespaces of a testbed.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use quinn::{ClientConfig, Endpoint, EndpointConfig, ServerConfig, TransportConfig, VarInt, congestion};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::time;

use crate::testbed::{Host, Testbed};

/// The argument that makes a binary of this crate run as one end:
/// `PROGRAM quic-bulk serve ADDRESS:PORT FILE` or `PROGRAM quic-bulk fetch ADDRESS:PORT FILE SECONDS`.
pub const SUBCOMMAND: &str = "quic-bulk";
/// Interval in which received bytes are counted.
pub const STEP: Duration = Duration::from_millis(100);

/// Name in the certificate of the server.
const SERVER_NAME: &str = "bulk";
const PORT: u16 = 5202;
/// UDP payload that fits the smallest tunnel MTU, 1280 bytes, with the headers of IPv4 and UDP.
const UDP_PAYLOAD_BYTES: u16 = 1252;
/// Flow control window of connection and stream, bytes: above the bandwidth-delay product of every scenario,
/// so that only congestion control limits the rate.
const FLOW_CONTROL_BYTES: u32 = 32 << 20;
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
const CHUNK_BYTES: usize = 64 << 10;
/// Idle timeout of the connection (RFC 9000 §10.1): longer than the outages in the scenarios.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Errors of both ends are only printed.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A QUIC server on the testbed's server; ended when dropped.
pub struct QuicServer {
    child: Child,
    certificate: PathBuf,
}

/// A running download; ended when dropped.
pub struct QuicDownload(Child);

impl QuicServer {
    /// Starts a server on every IPv4 address, and waits until it is ready.
    pub fn start(testbed: &Testbed) -> std::result::Result<Self, String> {
        let certificate = testbed.file("quic", Host::Server);
        let mut command = testbed.command(Host::Server, &program()?);
        command.args([SUBCOMMAND, "serve", &SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)).to_string()]);
        command.arg(&certificate);
        let child = command.spawn().map_err(|error| format!("the QUIC server does not start: {error}"))?;
        let mut server = Self { child, certificate };
        for _ in 0..250 {
            if server.certificate.exists() {
                return Ok(server);
            }
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("the QUIC server ended with {status}"));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err("the QUIC server is not ready after 5 s".to_owned())
    }

    /// Starts a download from `address` to the client that lasts `seconds`.
    pub fn fetch(
        &self,
        testbed: &Testbed,
        address: &str,
        seconds: u32,
    ) -> std::result::Result<QuicDownload, String> {
        let mut command = testbed.command(Host::Client, "timeout");
        command.args(["-k", "2", &(seconds + 15).to_string(), &program()?, SUBCOMMAND, "fetch"]);
        command.arg(format!("{address}:{PORT}")).arg(&self.certificate).arg(seconds.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| format!("the QUIC client does not start: {error}"))?;
        Ok(QuicDownload(child))
    }
}

impl Drop for QuicServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl QuicDownload {
    /// Waits for the end of the download, and returns the bytes of each [`STEP`].
    pub fn finish(mut self) -> std::result::Result<Vec<u64>, String> {
        let (mut out, mut complaint) = (String::new(), String::new());
        // The output is shorter than the pipes' buffers, so it can be read after the process has ended.
        let status = self.0.wait().map_err(|error| error.to_string())?;
        let pipes = (self.0.stdout.take(), self.0.stderr.take());
        if let (Some(mut stdout), Some(mut stderr)) = pipes {
            use std::io::Read;
            let read = stdout.read_to_string(&mut out).and(stderr.read_to_string(&mut complaint));
            read.map_err(|error| format!("the QUIC client's words: {error}"))?;
        }
        if !status.success() {
            return Err(format!("the QUIC client ended with {status}: {}", complaint.trim()));
        }
        out.lines().map(|line| line.parse().map_err(|_| format!("no number of bytes: {line}"))).collect()
    }
}

impl Drop for QuicDownload {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program() -> std::result::Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    program.into_os_string().into_string().map_err(|_| "this program's own path is not UTF-8".to_owned())
}

/// Runs one end: the server forever, the client until its time is over.
pub fn run(args: &[String]) -> std::result::Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("{SUBCOMMAND}: no runtime: {error}"))?;
    let address = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["serve", at, file] => runtime.block_on(serve(address(at)?, Path::new(file))),
        ["fetch", from, file, seconds] => {
            let seconds = seconds.parse().map_err(|error| format!("{seconds}: {error}"))?;
            runtime.block_on(fetch(address(from)?, Path::new(file), Duration::from_secs(seconds)))
        }
        _ => return Err(format!("{SUBCOMMAND} takes serve ADDRESS FILE or fetch ADDRESS FILE SECONDS")),
    };
    result.map_err(|error| format!("{SUBCOMMAND}: {error}"))
}

async fn serve(at: SocketAddr, file: &Path) -> Result<()> {
    let certificate_and_key = rcgen::generate_simple_self_signed(vec![SERVER_NAME.to_owned()])?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(certificate_and_key.signing_key.serialize_der()));
    let mut config = ServerConfig::with_single_cert(vec![certificate_and_key.cert.der().clone()], key)?;
    config.transport_config(Arc::new(transport()?));
    let endpoint = endpoint(at, Some(config))?;
    // The file is renamed into place when it is complete and the server listens.
    let draft = file.with_extension("draft");
    fs::write(&draft, certificate_and_key.cert.der())?;
    fs::rename(draft, file)?;
    while let Some(incoming) = endpoint.accept().await {
        tokio::spawn(async move {
            let Ok(connection) = incoming.await else { return };
            let Ok(mut stream) = connection.open_uni().await else { return };
            // Until the client closes the connection.
            while stream.write_all(&[0; CHUNK_BYTES]).await.is_ok() {}
        });
    }
    Ok(())
}

async fn fetch(from: SocketAddr, file: &Path, length: Duration) -> Result<()> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from(fs::read(file)?))?;
    let mut config = ClientConfig::with_root_certificates(Arc::new(roots))?;
    config.transport_config(Arc::new(transport()?));
    let endpoint = endpoint(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), None)?;
    let began = Instant::now();
    let connection = endpoint.connect_with(config, from, SERVER_NAME)?.await?;
    let mut stream = connection.accept_uni().await?;
    let mut steps = vec![0u64; length.as_millis().div_ceil(STEP.as_millis()) as usize];
    let mut buffer = vec![0; CHUNK_BYTES];
    while began.elapsed() < length {
        let left = length.saturating_sub(began.elapsed());
        let Ok(read) = time::timeout(left, stream.read(&mut buffer)).await else { break };
        let bytes = read?.ok_or("the server has ended the stream")?;
        let step = (began.elapsed().as_millis() / STEP.as_millis()) as usize;
        if let Some(step) = steps.get_mut(step) {
            *step += bytes as u64;
        }
    }
    connection.close(VarInt::from_u32(0), b"enough");
    steps.iter().for_each(|bytes| println!("{bytes}"));
    let _ = time::timeout(Duration::from_secs(1), endpoint.wait_idle()).await;
    Ok(())
}

fn transport() -> Result<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .congestion_controller_factory(Arc::new(congestion::CubicConfig::default()))
        .initial_mtu(UDP_PAYLOAD_BYTES)
        .min_mtu(UDP_PAYLOAD_BYTES)
        .mtu_discovery_config(None)
        .stream_receive_window(VarInt::from_u32(FLOW_CONTROL_BYTES))
        .receive_window(VarInt::from_u32(FLOW_CONTROL_BYTES))
        .send_window(FLOW_CONTROL_BYTES.into())
        .max_idle_timeout(Some(IDLE_TIMEOUT.try_into()?));
    Ok(transport)
}

/// An endpoint whose socket has a receive buffer of [`SOCKET_BUFFER_BYTES`], as bulk transfers use.
fn endpoint(at: SocketAddr, server: Option<ServerConfig>) -> Result<Endpoint> {
    let socket = UdpSocket::bind(at)?;
    // Without the privilege the system's default buffer remains.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER_BYTES);
    let runtime = quinn::default_runtime().ok_or("no runtime")?;
    Ok(Endpoint::new(EndpointConfig::default(), server, socket, runtime)?)
}
