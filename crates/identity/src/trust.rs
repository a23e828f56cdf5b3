//! How a client knows the server: the options `ca`, `pin` and `insecure`.

use std::path::PathBuf;

use crate::identity::Fingerprint;
use mpvpn_input::values::Text;
use mpvpn_input::{Error, Result};

/// Pins of a client. Chosen: two are enough for a change of the certificate. More: lines that nobody can
/// read.
pub const MAX_PINS: usize = 16;

/// How a client verifies the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The certificate is in this PEM file, or a CA in it signed it for the name asked for.
    Ca(PathBuf),
    /// A CA that this machine trusts signed it for the name asked for.
    System,
    /// The certificate's SHA-256 is one of these.
    Pin(Vec<Fingerprint>),
    /// Any certificate.
    Insecure,
}

impl Trust {
    /// Reads the trust from the options.
    ///
    /// # Errors
    /// If they say nothing, or contradict each other.
    pub fn of(ca: Option<Ca>, pins: Vec<Fingerprint>, insecure: bool) -> Result<Self> {
        let next = "give one of --ca PEM, --ca system, --pin SHA256 (the server prints it) and, for tests only, --insecure";
        match (ca, pins.len(), insecure) {
            (Some(Ca::File(file)), 0, false) => Ok(Self::Ca(file)),
            (Some(Ca::System), 0, false) => Ok(Self::System),
            (None, 1..=MAX_PINS, false) => Ok(Self::Pin(pins)),
            (None, 0, true) => Ok(Self::Insecure),
            (None, 0, false) => Err(Error::usage("no option says how to verify the server", next)),
            (None, count, false) => Err(Error::usage(
                format!("--pin is given {count} times, and at most {MAX_PINS} work"),
                "leave out the pins of certificates that the server does not have any more",
            )),
            (ca, pins, insecure) => {
                let given = [("--ca", ca.is_some()), ("--pin", pins > 0), ("--insecure", insecure)];
                let given: Vec<_> = given.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
                Err(Error::usage(format!("{} contradict each other", given.join(" and ")), next))
            }
        }
    }
}

/// The value of `ca`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ca {
    /// The CAs that this machine trusts.
    System,
    /// A PEM file.
    File(PathBuf),
}

impl Text for Ca {
    const EXPECTED: &'static str = "the path of a PEM file, or \"system\"";
    const EXAMPLE: &'static str = "system";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "system" => Ok(Self::System),
            path => PathBuf::read(path).map(Self::File),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_option_says_which_server_to_trust() {
        let pin = |n| Fingerprint([n; 32]);
        let of = |ca: Option<&str>, pins: &[u8], insecure| {
            let ca = ca.map(|ca| Ca::read(ca).unwrap());
            Trust::of(ca, pins.iter().map(|n| pin(*n)).collect(), insecure)
        };
        assert_eq!(of(Some("system"), &[], false).unwrap(), Trust::System);
        assert_eq!(of(Some("./system"), &[], false).unwrap(), Trust::Ca("./system".into()));
        assert_eq!(of(None, &[1, 2], false).unwrap(), Trust::Pin(vec![pin(1), pin(2)]));
        for (ca, pins, insecure, said) in [
            (None, &[][..], false, "no option says"),
            (Some("system"), &[1], false, "--ca and --pin contradict each other"),
            (None, &[1, 2], true, "--pin and --insecure contradict"),
            (None, &[0; 17], false, "--pin is given 17 times"),
        ] {
            let error = of(ca, pins, insecure).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
