//! The compared systems: mpvpn, other VPNs, and upper bounds (the bare link, and plain copying of packets).
//!
//! In: a testbed with one link, and the binaries that `./dev bench` installs. Out: a running tunnel, checked
//! to carry packets through its own device, with the server's address in the tunnel. Always holds: all
//! processes of a system end when it is dropped, and a system that cannot run gives the reason.

mod boringtun;
mod daemon;
mod kernel_wireguard;
mod mpvpn;
mod openvpn;
mod wireguard;
mod wireguard_go;

use std::{
    fs,
    net::Ipv4Addr,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

pub use daemon::Daemon;

use crate::{
    testbed::{Host, Testbed, binary},
    tun_copy,
};

/// How long a system may take to carry its first packet: more than any of them takes on a busy machine.
const FIRST_PACKET_TIMEOUT: Duration = Duration::from_secs(15);
/// The server's address on the link, where the systems listen.
const SERVER_LINK_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 101, 0, 1);

/// The systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// The link without a tunnel.
    Raw,
    /// Plain copying between TUN and UDP: see [`crate::tun_copy`].
    TunCopy,
    /// The same without offloads, packet by packet.
    PlainCopy,
    /// This project.
    Mpvpn,
    /// This project with TCP on streams.
    MpvpnStream,
    /// This project inside HTTP/2 over TCP.
    MpvpnTcp,
    /// This project inside HTTP/2 over TCP, with inner TCP on streams.
    MpvpnTcpStream,
    /// WireGuard in Go, from the module `golang.zx2c4.com/wireguard`.
    WireguardGo,
    /// OpenVPN from Debian.
    Openvpn,
    /// OpenVPN from Debian, over TCP.
    OpenvpnTcp,
    /// WireGuard in Rust, from crates.io.
    Boringtun,
    /// WireGuard in the kernel.
    KernelWireguard,
}

/// A system that has been started.
pub(crate) struct RunningSystem {
    server: Option<Daemon>,
    client: Option<Daemon>,
    /// The server's address inside the tunnel.
    address: Ipv4Addr,
    /// The client's tunnel device.
    device: &'static str,
}

impl RunningSystem {
    pub(crate) fn new(server: Daemon, client: Daemon, address: Ipv4Addr, device: &'static str) -> Self {
        Self { server: Some(server), client: Some(client), address, device }
    }
}

/// A system that carries packets.
pub struct Tunnel {
    running: RunningSystem,
    system: System,
}

impl System {
    /// All systems, in the order of tables.
    pub const ALL: [Self; 12] = [
        Self::Raw,
        Self::TunCopy,
        Self::PlainCopy,
        Self::Mpvpn,
        Self::MpvpnStream,
        Self::MpvpnTcp,
        Self::MpvpnTcpStream,
        Self::WireguardGo,
        Self::Openvpn,
        Self::OpenvpnTcp,
        Self::Boringtun,
        Self::KernelWireguard,
    ];

    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::TunCopy => tun_copy::SUBCOMMAND,
            Self::PlainCopy => tun_copy::PLAIN_SUBCOMMAND,
            Self::Mpvpn => "mpvpn",
            Self::MpvpnStream => "mpvpn-stream",
            Self::MpvpnTcp => "mpvpn-tcp",
            Self::MpvpnTcpStream => "mpvpn-tcp-stream",
            Self::WireguardGo => "wireguard-go",
            Self::Openvpn => "openvpn",
            Self::OpenvpnTcp => "openvpn-tcp",
            Self::Boringtun => "boringtun",
            Self::KernelWireguard => "kernel-wireguard",
        }
    }

    /// Whether the rig `peers` measures the system by default; other rigs measure the rest.
    pub fn is_default(self) -> bool {
        !matches!(
            self,
            Self::PlainCopy | Self::MpvpnStream | Self::MpvpnTcp | Self::MpvpnTcpStream | Self::OpenvpnTcp
        )
    }

    /// Whether it is there for comparison only: a bound, and no VPN.
    pub fn is_reference(self) -> bool {
        matches!(self, Self::Raw | Self::TunCopy | Self::PlainCopy)
    }

    /// How it is set up, for reports.
    pub fn settings(self) -> &'static str {
        match self {
            Self::Raw => "no tunnel: the bare link",
            Self::TunCopy => {
                "TUN and UDP with all offloads, packets split and joined as mpvpn does, no cryptography"
            }
            Self::PlainCopy => {
                "TUN and UDP without offloads, one read and one send a packet, no cryptography"
            }
            Self::Mpvpn => "defaults, --auth none, --insecure",
            Self::MpvpnStream => "defaults, --auth none, --insecure, --lane stream",
            Self::MpvpnTcp => "defaults, --auth none, --insecure, --transport tcp",
            Self::MpvpnTcpStream => "defaults, --auth none, --insecure, --transport tcp, --lane stream",
            Self::WireguardGo => wireguard_go::SETTINGS,
            Self::Openvpn => openvpn::SETTINGS,
            Self::OpenvpnTcp => openvpn::TCP_SETTINGS,
            Self::Boringtun => boringtun::SETTINGS,
            Self::KernelWireguard => kernel_wireguard::SETTINGS,
        }
    }

    /// The installed version, or the reason why the system cannot run.
    pub fn version(self) -> Result<String, String> {
        match self {
            Self::Raw | Self::TunCopy | Self::PlainCopy => {
                let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
                Ok(format!("Linux {}", kernel.trim()))
            }
            Self::Mpvpn | Self::MpvpnStream | Self::MpvpnTcp | Self::MpvpnTcpStream => {
                first_line(Command::new(binary()).arg("--version"))
            }
            Self::WireguardGo | Self::Boringtun => {
                tool("wg")?;
                installed(self.name()).map(|(_, version)| version)
            }
            Self::Openvpn | Self::OpenvpnTcp => {
                tool("openvpn")?;
                // `openvpn --version` exits with 1.
                first_line(Command::new("openvpn").arg("--version"))
            }
            Self::KernelWireguard => {
                tool("wg")?;
                kernel_wireguard::version()
            }
        }
    }

    /// Starts the system over the first link of a testbed, and waits until a ping is answered.
    pub fn start(self, testbed: &Testbed) -> Result<Tunnel, String> {
        let running = match self {
            Self::Raw => {
                RunningSystem { server: None, client: None, address: SERVER_LINK_ADDRESS, device: "eth1" }
            }
            Self::TunCopy => tun_copy::start(testbed, tun_copy::SUBCOMMAND)?,
            Self::PlainCopy => tun_copy::start(testbed, tun_copy::PLAIN_SUBCOMMAND)?,
            Self::Mpvpn => mpvpn::start(testbed, &[])?,
            Self::MpvpnStream => mpvpn::start(testbed, &["--lane", "stream"])?,
            Self::MpvpnTcp => mpvpn::start(testbed, &["--transport", "tcp"])?,
            Self::MpvpnTcpStream => mpvpn::start(testbed, &["--transport", "tcp", "--lane", "stream"])?,
            Self::WireguardGo => wireguard_go::start(testbed)?,
            Self::Openvpn => openvpn::start(testbed, &openvpn::UDP)?,
            Self::OpenvpnTcp => openvpn::start(testbed, &openvpn::TCP)?,
            Self::Boringtun => boringtun::start(testbed)?,
            Self::KernelWireguard => kernel_wireguard::start(testbed)?,
        };
        let mut tunnel = Tunnel { running, system: self };
        tunnel.await_packets(testbed)?;
        Ok(tunnel)
    }
}

impl Tunnel {
    /// The server's address inside the tunnel.
    pub fn address(&self) -> Ipv4Addr {
        self.running.address
    }

    /// Process ID at the server, if the system has a process there.
    pub fn server(&self) -> Option<u32> {
        self.running.server.as_ref().map(Daemon::id)
    }

    /// Process ID at the client, if the system has a process there.
    pub fn client(&self) -> Option<u32> {
        self.running.client.as_ref().map(Daemon::id)
    }

    fn await_packets(&mut self, testbed: &Testbed) -> Result<(), String> {
        let deadline = Instant::now() + FIRST_PACKET_TIMEOUT;
        loop {
            for daemon in [&mut self.running.server, &mut self.running.client].into_iter().flatten() {
                daemon.check()?;
            }
            let Err(complaint) = self.carries_packets(testbed) else { return Ok(()) };
            if Instant::now() > deadline {
                let tails =
                    [&self.running.server, &self.running.client].into_iter().flatten().map(Daemon::tail);
                let tails = tails.collect::<Vec<_>>().join("\n");
                return Err(format!(
                    "{} not ready within {FIRST_PACKET_TIMEOUT:?}: {complaint}\n{tails}",
                    self.system.name()
                ));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks the route and a ping. The route is needed because the server answers to its tunnel address on
    /// the bare link, too.
    fn carries_packets(&self, testbed: &Testbed) -> Result<(), String> {
        let (target, limit) = (self.running.address.to_string(), Duration::from_secs(2));
        let route = testbed.run(Host::Client, &["ip", "route", "get", &target]);
        if !route.contains(&format!("dev {} ", self.running.device)) {
            return Err(format!("its packets would go elsewhere: {}", route.trim()));
        }
        let ping = testbed.output_of(Host::Client, limit, &["ping", "-n", "-c", "1", "-W", "0.2", &target]);
        if ping.status.success() { Ok(()) } else { Err(format!("no ping to {target} is answered")) }
    }
}

/// Path and version of a VPN that `./dev bench` has installed, or the reason why it is missing.
fn installed(name: &str) -> Result<(PathBuf, String), String> {
    let peers = crate::target_dir().join("bench/peers");
    let (program, version) = (peers.join(name), peers.join(format!("{name}.version")));
    if let (true, Ok(version)) = (program.exists(), fs::read_to_string(version)) {
        return Ok((program, version.trim().to_owned()));
    }
    let why = fs::read_to_string(peers.join(format!("{name}.why")));
    Err(why.map_or_else(|_| "./dev bench has not installed it".to_owned(), |text| text.trim().to_owned()))
}

/// Checks that a program is installed; else the reason.
fn tool(name: &str) -> Result<(), String> {
    let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).output();
    match found {
        Ok(output) if output.status.success() => Ok(()),
        _ => {
            let why = fs::read_to_string(crate::target_dir().join(format!("bench/peers/{name}.why")));
            Err(why.map_or_else(|_| format!("there is no {name}"), |text| text.trim().to_owned()))
        }
    }
}

fn first_line(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{name}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(str::to_owned).ok_or_else(|| format!("{name} does not tell its version"))
}
