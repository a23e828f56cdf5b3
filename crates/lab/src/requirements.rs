//! What a lab needs of the machine, and how to get it.

use std::path::Path;

use crate::error::LabError;

/// A program that the lab runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Ip,
    Openssl,
    Iperf3,
    Ping,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Openssl => "openssl",
            Self::Iperf3 => "iperf3",
            Self::Ping => "ping",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Self::Ip => "iproute2",
            Self::Openssl => "openssl",
            Self::Iperf3 => "iperf3",
            Self::Ping => "iputils-ping",
        }
    }
}

/// Says everything that is missing at once, each with its remedy.
pub(crate) fn check(programs: &[Program]) -> Result<(), LabError> {
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
    for program in programs {
        let found = std::env::split_paths(&path).any(|dir| dir.join(program.name()).is_file());
        if !found {
            missing.push(format!("{}: run `apt-get install {}`", program.name(), program.package()));
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(LabError::Missing(missing)) }
}
