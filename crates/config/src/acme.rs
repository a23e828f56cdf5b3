//! Parses the table `[acme]`: certificates that a CA issues by ACME (RFC 8555).

use std::{net::SocketAddr, path::PathBuf};

use hyper::Uri;
use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::{Deserialize, de::Deserializer};

use super::Tcp;
use mpvpn_input::{
    Error,
    values::{Filled, One, Text, is_host_name},
};

/// Default of `directory`.
const LETS_ENCRYPT: &str = "https://acme-v02.api.letsencrypt.org/directory";
/// The port at which a CA looks for the answer to TLS-ALPN-01 (RFC 8737 §3).
const TLS_ALPN_PORT: u16 = 443;
/// Names in a certificate: the limit of Let's Encrypt.
const MAX_DOMAINS: usize = 100;

word_enum! {
    /// How a server proves to a CA that a name is its own.
    pub enum AcmeChallenge {
        /// TLS-ALPN-01 (RFC 8737): in a TLS handshake at the server's own TCP port, which has to be 443 for
        /// public CAs.
        #[default]
        TlsAlpn01 = "tls-alpn-01",
        /// HTTP-01 (RFC 8555 §8.3): by a page at port 80, which is open while the CA looks only.
        Http01 = "http-01",
    }
}

/// The certificates that a server orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acme {
    /// The names of the server, in lower case, at least one.
    pub domains: Vec<String>,
    /// Where the CA reaches a person.
    pub email: Option<String>,
    /// The URL of the CA's directory.
    pub directory: String,
    /// PEM file of the CAs that sign the directory's own certificate; `None`: those that this machine
    /// trusts.
    pub ca: Option<PathBuf>,
    /// How the server proves that the names are its own.
    pub challenge: AcmeChallenge,
}

/// Certificates for the server's names from a CA such as Let's Encrypt, by ACME (RFC 8555): ordered at the
/// first start, renewed after two thirds of their lifetime, and used for new connections at once. By this
/// table you agree to the terms of service of the CA. Clients that ask for another name, or for an address,
/// get the server's own certificate as without this table.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "acme")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [acme]")]
pub struct AcmeTable {
    /// Names of the server, which lead to this machine in the DNS; at least one
    #[serde(deserialize_with = "domains")]
    #[schemars(with = "Filled<DomainName>")]
    domains: Vec<String>,
    /// E-mail address at which the CA reaches a person [default: none]
    #[serde(default, with = "One::<Email>")]
    email: Option<Email>,
    /// URL of the CA's directory [default: that of Let's Encrypt]
    #[serde(default, with = "One::<DirectoryUrl>")]
    directory: Option<DirectoryUrl>,
    /// PEM file with the CA that signed the directory's own certificate, for a CA of your own or for tests
    /// [default: the CAs that this machine trusts]
    #[serde(default, with = "One::<PathBuf>")]
    ca: Option<PathBuf>,
    /// How the server proves that the names are its own [default: tls-alpn-01 if the server listens on TCP
    /// port 443, else http-01]
    #[serde(default, with = "One::<AcmeChallenge>")]
    challenge: Option<AcmeChallenge>,
}

struct DomainName(String);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Email(String);

#[derive(Clone, Debug, PartialEq, Eq)]
struct DirectoryUrl(String);

/// For serde: the table.
pub(super) fn acme_table<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AcmeTable>, D::Error> {
    AcmeTable::deserialize(from).map(Some)
}

fn domains<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let names: Vec<DomainName> = Filled::<DomainName>::deserialize(from)?;
    let mut names: Vec<String> = names.into_iter().map(|name| name.0).collect();
    if names.len() > MAX_DOMAINS {
        let error = format!("{} names, and a certificate has at most {MAX_DOMAINS}", names.len());
        return Err(serde::de::Error::custom(error));
    }
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    Ok(names)
}

impl AcmeTable {
    /// Resolves the table for a server that listens at these addresses.
    pub(super) fn resolve(self, listen: &[SocketAddr], tcp: Tcp) -> mpvpn_input::Result<Acme> {
        let at_443 = tcp == Tcp::On && listen.iter().any(|address| address.port() == TLS_ALPN_PORT);
        let default = if at_443 { AcmeChallenge::TlsAlpn01 } else { AcmeChallenge::Http01 };
        let challenge = self.challenge.unwrap_or(default);
        if challenge == AcmeChallenge::TlsAlpn01 && tcp == Tcp::Off {
            return Err(Error::usage(
                "challenge \"tls-alpn-01\" of [acme] needs TCP, which --tcp off turns off",
                "leave out one of the two, or use challenge = \"http-01\"",
            ));
        }
        Ok(Acme {
            domains: self.domains,
            email: self.email.map(|email| email.0),
            directory: self.directory.map_or_else(|| LETS_ENCRYPT.to_owned(), |url| url.0),
            ca: self.ca,
            challenge,
        })
    }
}

impl Text for DomainName {
    const EXPECTED: &'static str = "a DNS name in quotes, as in \"vpn.example.org\"";
    const EXAMPLE: &'static str = "vpn.example.org";

    fn read(text: &str) -> Result<Self, String> {
        if text.starts_with("*.") {
            return Err(format!(
                "`{text}` is a wildcard, for which CAs ask for a record in the DNS: name each host"
            ));
        }
        if text.parse::<std::net::IpAddr>().is_ok() {
            return Err(format!("`{text}` is an address: expected a DNS name, as in vpn.example.org"));
        }
        match is_host_name(text) && text.contains('.') {
            true => Ok(Self(text.trim_end_matches('.').to_ascii_lowercase())),
            false => Err(format!("`{text}` is not a DNS name, as in vpn.example.org")),
        }
    }
}

impl Text for Email {
    const EXPECTED: &'static str = "an e-mail address in quotes";
    const EXAMPLE: &'static str = "admin@example.org";

    fn read(text: &str) -> Result<Self, String> {
        let is_part = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_graphic() && !b"@,?&%<>\"".contains(&b))
        };
        match text.split_once('@') {
            Some((local, host)) if is_part(local) && is_part(host) && text.len() <= 254 => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(format!("`{text}` is not an e-mail address, as in admin@example.org")),
        }
    }
}

impl Text for DirectoryUrl {
    const EXPECTED: &'static str = "a URL in quotes";
    const EXAMPLE: &'static str = LETS_ENCRYPT;

    fn read(text: &str) -> Result<Self, String> {
        let uri = text.parse::<Uri>().ok();
        let is_https = |uri: &Uri| uri.scheme_str() == Some("https") && uri.host().is_some();
        match uri.as_ref().is_some_and(is_https) {
            true => Ok(Self(text.to_owned())),
            false => Err(format!("`{text}` is not the URL of a directory, as in {LETS_ENCRYPT}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(table: &str, listen: &str, tcp: Tcp) -> mpvpn_input::Result<Acme> {
        let table: AcmeTable = toml::from_str(table).unwrap();
        table.resolve(&[listen.parse().unwrap()], tcp)
    }

    #[test]
    fn the_challenge_is_the_one_that_can_work() {
        let of = |listen, tcp| resolve("domains = 'VPN.Example.org.'", listen, tcp).unwrap();
        let acme = of("0.0.0.0:443", Tcp::On);
        assert_eq!(acme.challenge, AcmeChallenge::TlsAlpn01);
        assert_eq!(
            (acme.domains.as_slice(), acme.directory.as_str()),
            (&["vpn.example.org".to_owned()][..], LETS_ENCRYPT)
        );
        assert_eq!(of("0.0.0.0:443", Tcp::Off).challenge, AcmeChallenge::Http01);
        assert_eq!(of("0.0.0.0:4433", Tcp::On).challenge, AcmeChallenge::Http01);
        let table = "domains = 'a.example'\nchallenge = 'tls-alpn-01'";
        assert_eq!(resolve(table, "0.0.0.0:4433", Tcp::On).unwrap().challenge, AcmeChallenge::TlsAlpn01);
        let error = resolve(table, "0.0.0.0:443", Tcp::Off).unwrap_err().to_string();
        assert!(error.contains("needs TCP"), "{error}");
    }

    #[test]
    fn mistakes_in_the_table_are_named() {
        for (table, said) in [
            ("email = 'a@b'", "missing field `domains`"),
            ("domains = []", "the list is empty"),
            ("domains = '*.example.org'", "is a wildcard"),
            ("domains = '192.0.2.1'", "is an address"),
            ("domains = 'localhost'", "is not a DNS name"),
            ("domains = 'a.example'\nemail = 'someone'", "is not an e-mail address"),
            ("domains = 'a.example'\ndirectory = 'http://ca.example/dir'", "is not the URL of a directory"),
            ("domains = 'a.example'\nchallenge = 'dns-01'", "is none of: tls-alpn-01, http-01"),
            ("domain = 'a.example'", "unknown field `domain`"),
        ] {
            let error = toml::from_str::<AcmeTable>(table).unwrap_err().to_string();
            assert!(error.contains(said), "{table}: {error}");
        }
        let many: Vec<_> = (0..101).map(|n| format!("'h{n}.example'")).collect();
        assert!(toml::from_str::<AcmeTable>(&format!("domains = [{}]", many.join(","))).is_err());
    }
}
