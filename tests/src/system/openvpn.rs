//! OpenVPN between two hosts: TLS with pinned certificates, AES-256-GCM over UDP or TCP.

use std::{net::Ipv4Addr, process::Command};

use super::{Daemon, RunningSystem, SERVER_LINK_ADDRESS};
use crate::testbed::{Host, Testbed};

pub(super) const SETTINGS: &str = "point to point, TLS with pinned certificates, AES-256-GCM, UDP, --fast-io, \
    socket buffers 4 MB, TUN queue 1000, default MTU and mssfix";
pub(super) const TCP_SETTINGS: &str = "point to point, TLS with pinned certificates, AES-256-GCM, TCP without delay, \
    socket buffers of the system, TUN queue 1000, default MTU and mssfix";

/// The outer transport: values of `--proto` at server and client, and arguments for both.
pub(super) struct OuterTransport {
    server: &'static str,
    client: &'static str,
    both: &'static [&'static str],
}

pub(super) const UDP: OuterTransport = OuterTransport {
    server: "udp",
    client: "udp",
    both: &["--fast-io", "--sndbuf", "4194304", "--rcvbuf", "4194304"],
};
pub(super) const TCP: OuterTransport = OuterTransport {
    server: "tcp-server",
    client: "tcp-client",
    // A fixed buffer size would disable the kernel's buffer tuning.
    both: &["--socket-flags", "TCP_NODELAY"],
};

/// Name of the client's certificate; the testbed makes the server's.
const CLIENT_CERTIFICATE: &str = "client";
const PORT: &str = "1194";
const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

pub(super) fn start(testbed: &Testbed, outer: &OuterTransport) -> Result<RunningSystem, String> {
    testbed.make_certificate(CLIENT_CERTIFICATE);
    let prints = [fingerprint(testbed, "server")?, fingerprint(testbed, CLIENT_CERTIFICATE)?];
    let outside = SERVER_LINK_ADDRESS.to_string();
    let run = |host, own: &str, print: &str, args: &[&str]| {
        let mut command = testbed.command(host, "openvpn");
        command.args(["--dev-type", "tun", "--verb", "2", "--txqueuelen", "1000"]).args(outer.both);
        command.args(["--cipher", "AES-256-GCM", "--data-ciphers", "AES-256-GCM"]);
        command.args([
            "--cert",
            &format!("{own}.crt"),
            "--key",
            &format!("{own}.key"),
            "--peer-fingerprint",
            print,
        ]);
        command.args(args);
        Daemon::start(testbed, host, command)
    };
    let [at_server, at_client] = ADDRESSES;
    let server = run(
        Host::Server,
        "server",
        &prints[1],
        &[
            "--proto",
            outer.server,
            "--dev",
            "ovs",
            "--local",
            &outside,
            "--lport",
            PORT,
            "--tls-server",
            "--dh",
            "none",
            "--ifconfig",
            at_server,
            at_client,
        ],
    )?;
    let client = run(
        Host::Client,
        CLIENT_CERTIFICATE,
        &prints[0],
        &[
            "--proto",
            outer.client,
            "--dev",
            "ovc",
            "--nobind",
            "--remote",
            &outside,
            PORT,
            "--tls-client",
            "--ifconfig",
            at_client,
            at_server,
        ],
    )?;
    let address = Ipv4Addr::new(10, 78, 0, 1);
    Ok(RunningSystem::new(server, client, address, "ovc"))
}

/// SHA-256 fingerprint of a certificate in OpenVPN's format: pairs of hexadecimal digits with colons.
fn fingerprint(testbed: &Testbed, name: &str) -> Result<String, String> {
    let mut command = Command::new("openssl");
    command.args(["x509", "-noout", "-fingerprint", "-sha256", "-in", &format!("{name}.crt")]);
    let output = command.current_dir(testbed.dir()).output().map_err(|error| format!("openssl: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let print = text.split_once('=').map(|(_, print)| print.trim().to_owned());
    print
        .ok_or_else(|| format!("openssl printed no fingerprint: {}", String::from_utf8_lossy(&output.stderr)))
}
