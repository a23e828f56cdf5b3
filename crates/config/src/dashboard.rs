//! Where the dashboard is served. Always holds: only addresses of the loopback are served without TLS.

use std::{net::SocketAddr, path::PathBuf};

use mpvpn_identity::cert_files::CertFiles;
use mpvpn_input::{Error, Result};

use crate::site::cert_files;

/// The dashboard of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientDashboard {
    /// The TCP address.
    pub address: SocketAddr,
    /// The certificate for HTTPS; `None`: HTTP, at an address of the loopback.
    pub cert: Option<CertFiles>,
}

impl ClientDashboard {
    /// The dashboard by the keys `dashboard`, `dashboard-cert` and `dashboard-key`, if there is one.
    pub(super) fn of(
        address: Option<SocketAddr>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> Result<Option<Self>> {
        let cert = cert_files("dashboard-", cert, key)?;
        match address {
            None if cert.is_some() => Err(Error::usage(
                "--dashboard-cert is given without --dashboard",
                "add --dashboard ADDR:PORT",
            )),
            None => Ok(None),
            Some(address) if cert.is_none() && !address.ip().to_canonical().is_loopback() => {
                Err(Error::usage(
                    format!(
                        "--dashboard {address} is reached over the network, where others could read the log-in without TLS"
                    ),
                    format!(
                        "take 127.0.0.1:{0} and reach it by `ssh -L {0}:127.0.0.1:{0} HOST`, or give --dashboard-cert and \
                         --dashboard-key",
                        address.port()
                    ),
                ))
            }
            Some(address) => Ok(Some(Self { address, cert })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(address: Option<&str>, cert: Option<&str>, key: Option<&str>) -> Result<Option<ClientDashboard>> {
        let address = address.map(|address| address.parse().unwrap());
        ClientDashboard::of(address, cert.map(PathBuf::from), key.map(PathBuf::from))
    }

    #[test]
    fn an_address_that_others_reach_needs_a_certificate() {
        for address in ["0.0.0.0:9470", "192.0.2.1:9470", "[::]:9470", "[::ffff:192.0.2.1]:9470"] {
            let error = of(Some(address), None, None).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains("without TLS"), "{error}");
            assert!(error.next_step().contains("ssh -L 9470:127.0.0.1:9470"), "{}", error.next_step());
            assert!(of(Some(address), Some("crt"), Some("key")).unwrap().unwrap().cert.is_some());
        }
        for address in ["127.0.0.1:9470", "127.1.2.3:1", "[::1]:9470"] {
            assert_eq!(of(Some(address), None, None).unwrap().unwrap().cert, None, "{address}");
        }
        assert_eq!(of(None, None, None).unwrap(), None);
    }

    #[test]
    fn a_certificate_needs_a_key_and_a_dashboard() {
        let why = |address, cert, key| of(address, cert, key).unwrap_err().to_string();
        let at = Some("127.0.0.1:1");
        assert!(why(at, Some("crt"), None).contains("without --dashboard-key"));
        assert!(why(at, None, Some("key")).contains("without --dashboard-cert"));
        assert!(why(None, Some("crt"), Some("key")).contains("without --dashboard"));
    }
}
