//! Checks the requirements of a lab: privilege, devices and programs.

use std::path::Path;

use crate::error::LabError;

/// The name of a program that a lab runs, and the Debian package that contains it.
#[derive(Clone, Copy, Debug)]
pub struct Program(&'static str, &'static str);

/// For namespaces, devices and addresses.
pub const IP: Program = Program("ip", "iproute2");
/// For certificates.
pub const OPENSSL: Program = Program("openssl", "openssl");
/// For namespaces, devices and addresses.
/// For TCP flows.
pub const IPERF3: Program = Program("iperf3", "iperf3");
/// For round-trip times.
pub const PING: Program = Program("ping", "iputils-ping");

/// Fails with a list of all missing requirements, each with its remedy.
pub fn check(programs: &[Program]) -> Result<(), LabError> {
    let mut missing = Vec::new();
    if !rustix::process::geteuid().is_root() {
        missing.push("root: namespaces and devices need it; run this with sudo".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        missing.push(
            "/dev/net/tun: run `modprobe tun`; in a container, pass the device in (--device /dev/net/tun)"
                .to_owned(),
        );
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    for Program(name, package) in programs {
        let found = std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
        if !found {
            missing.push(format!("{name}: run `apt-get install {package}`"));
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(LabError::MissingRequirements(missing)) }
}
