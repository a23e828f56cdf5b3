//! Shared by all WireGuard implementations: keys, and the setup of devices with `wg` and `ip`.

use std::{
    net::Ipv4Addr,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{Daemon, RunningSystem, SERVER_LINK_ADDRESS};
use crate::testbed::{Host, Testbed};

/// The devices at server and client. Their names differ because all namespaces share the folder of `wg`'s
/// sockets.
pub(super) const DEVICES: [(Host, &str); 2] = [(Host::Server, "wgs"), (Host::Client, "wgc")];
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];
const PORT: u16 = 51820;

/// Starts a process on each end that creates the device, and configures both devices.
pub(super) fn in_user_space(
    testbed: &Testbed,
    command: impl Fn(Host, &'static str) -> Command,
) -> Result<RunningSystem, String> {
    let start = |(host, device)| {
        let socket = format!("/var/run/wireguard/{device}.sock");
        // A socket that a killed process left would make the next process seem ready too early.
        let _ = std::fs::remove_file(&socket);
        let mut daemon = Daemon::start(testbed, host, command(host, device))?;
        await_socket(&mut daemon, Path::new(&socket))?;
        Ok::<_, String>(daemon)
    };
    let [server, client] = DEVICES.map(start);
    let running = RunningSystem::new(server?, client?, ADDRESSES[0], DEVICES[1].1);
    configure(testbed)?;
    Ok(running)
}

/// Sets keys, peers, addresses, and the MTU that `wg-quick` chooses on Ethernet.
pub(super) fn configure(testbed: &Testbed) -> Result<(), String> {
    for (host, device) in DEVICES {
        succeed(
            testbed,
            host,
            &format!("umask 077; wg genkey > {device}.key && wg pubkey < {device}.key > {device}.pub"),
        )?;
    }
    let (outside, [at_server, at_client]) = (SERVER_LINK_ADDRESS, ADDRESSES);
    let of_server = format!("listen-port {PORT} peer $(cat wgc.pub) allowed-ips {at_client}/32");
    let of_client = format!("peer $(cat wgs.pub) endpoint {outside}:{PORT} allowed-ips {at_server}/32");
    for ((host, device), (args, address)) in
        DEVICES.into_iter().zip([(of_server, at_server), (of_client, at_client)])
    {
        succeed(
            testbed,
            host,
            &format!(
                "wg set {device} private-key {device}.key {args} && \
                 ip address add {address}/24 dev {device} && ip link set {device} mtu 1420 up"
            ),
        )?;
    }
    Ok(())
}

fn await_socket(daemon: &mut Daemon, socket: &Path) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !socket.exists() {
        daemon.check()?;
        if Instant::now() > deadline {
            return Err(format!("no {} within 5 s\n{}", socket.display(), daemon.tail()));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn succeed(testbed: &Testbed, host: Host, script: &str) -> Result<(), String> {
    let output = testbed.output_of(host, Duration::from_secs(5), &["sh", "-c", script]);
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`{script}` at {host:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
