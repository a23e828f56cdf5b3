//! Parses the table `[site]`, the web site for visitors without credentials, and the tables
//! `[[certificate]]`.

use std::path::{Path, PathBuf};

use hyper::{Uri, header::HeaderValue};
use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, de::Deserializer};

use mpvpn_identity::cert_files::CertFiles;
use mpvpn_input::{
    Error,
    rules::Prefix,
    values::{One, Text},
};

/// Default value of the header field `server` of responses: the web server whose responses those of the site
/// are like.
pub const DEFAULT_SERVER_FIELD: &str = "Caddy";

/// The web site of a server for visitors without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The source of its pages.
    pub content: SiteContent,
    /// The value of the header field `server` of its responses.
    pub server: String,
    /// Whether requests with wrong credentials are answered like those without, instead of with 401.
    pub hide: bool,
}

impl Site {
    /// The folder with its pages, if they are files.
    pub fn folder(&self) -> Option<&Path> {
        match &self.content {
            SiteContent::Root(folder) => Some(folder),
            SiteContent::Nothing | SiteContent::Upstream(_) => None,
        }
    }
}

/// The source of the pages of a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SiteContent {
    /// No pages.
    Nothing,
    /// The files of this folder.
    Root(PathBuf),
    /// The HTTP server at this `HOST:PORT`.
    Upstream(String),
}

impl Default for Site {
    fn default() -> Self {
        Self { content: SiteContent::Nothing, server: DEFAULT_SERVER_FIELD.into(), hide: false }
    }
}

/// The web site that visitors without credentials see.
#[derive(Default, Deserialize, JsonSchema)]
#[schemars(rename = "site")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [site]")]
pub(super) struct SiteTable {
    /// Folder whose files are the pages of the site; not together with `upstream` [default: no pages]
    #[serde(with = "One::<PathBuf>")]
    root: Option<PathBuf>,
    /// Address of the HTTP server to which requests for pages are passed on; not together with `root`
    /// [default: no pages]
    #[serde(with = "One::<Upstream>")]
    upstream: Option<Upstream>,
    /// Value of the header field `server` of responses, as which the site appears; the other
    /// fields are those of Caddy [default: Caddy]
    #[serde(with = "One::<ServerName>")]
    server: Option<ServerName>,
    /// Answer requests with wrong credentials like requests without credentials, instead of with 401, so
    /// that visitors cannot find out that this is a proxy [default: true with `root` or `upstream`]
    #[schemars(with = "bool")]
    hide: Option<bool>,
}

struct Upstream(String);

struct ServerName(String);

/// For serde: the table.
pub(super) fn site_table<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Site>, D::Error> {
    let table = SiteTable::deserialize(from)?;
    let content = match (table.root, table.upstream) {
        (None, None) => SiteContent::Nothing,
        (Some(root), None) => SiteContent::Root(root),
        (None, Some(upstream)) => SiteContent::Upstream(upstream.0),
        (Some(_), Some(_)) => {
            return Err(serde::de::Error::custom("`root` and `upstream` exclude each other: leave out one"));
        }
    };
    let server = table.server.map_or_else(|| DEFAULT_SERVER_FIELD.into(), |name| name.0);
    let hide = table.hide.unwrap_or(content != SiteContent::Nothing);
    Ok(Some(Site { content, server, hide }))
}

impl Text for Upstream {
    const EXPECTED: &'static str = "the address of an HTTP server in quotes, as in \"http://127.0.0.1:8080\"";
    const EXAMPLE: &'static str = "http://127.0.0.1:8080";

    fn read(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not an address of an HTTP server, as in http://127.0.0.1:8080");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http")).ok_or_else(wrong)?;
        if uri.path() != "/" || uri.query().is_some() || authority.as_str().contains('@') {
            return Err(format!(
                "`{text}` is more than scheme, host and port: requests keep the path that the visitor asked for"
            ));
        }
        let port = authority.port_u16().unwrap_or(80);
        Ok(Self(format!("{}:{port}", authority.host())))
    }
}

impl Text for ServerName {
    const EXPECTED: &'static str = "a name in quotes";
    const EXAMPLE: &'static str = "Caddy";

    fn read(text: &str) -> Result<Self, String> {
        match HeaderValue::from_str(text) {
            Ok(_) if !text.is_empty() && text.is_ascii() => Ok(Self(text.into())),
            _ => Err(format!("`{text}` cannot stand in a header field")),
        }
    }
}

/// A further certificate, which the server shows to clients that ask for one of its names (SNI, RFC 6066).
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "certificate")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[certificate]]")]
pub(super) struct CertificateTable {
    /// Certificate chain (PEM), leaf first
    #[schemars(with = "One<PathBuf>")]
    cert: PathBuf,
    /// Private key of the certificate (PEM)
    #[schemars(with = "One<PathBuf>")]
    key: PathBuf,
}

/// For serde: the certificates in order.
pub(super) fn certificates<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<CertFiles>, D::Error> {
    let files = |table: CertificateTable| CertFiles { cert: table.cert, key: table.key };
    Ok(Vec::<CertificateTable>::deserialize(from)?.into_iter().map(files).collect())
}

/// A certificate and its key by the options `cert` and `key`, whose names have a prefix.
pub(super) fn cert_files(
    prefix: &str,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> mpvpn_input::Result<Option<CertFiles>> {
    let missing = |given: &str, other: &str| {
        let why = format!("--{prefix}{given} is given without --{prefix}{other}");
        Err(Error::usage(why, format!("add --{prefix}{other} PEM")))
    };
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(CertFiles { cert, key })),
        (None, None) => Ok(None),
        (Some(_), None) => missing("cert", "key"),
        (None, Some(_)) => missing("key", "cert"),
    }
}

/// For clap: a network.
pub(super) fn network(text: &str) -> Result<IpNet, String> {
    Prefix::read(text).map(|prefix| prefix.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_scheme_host_and_port() {
        let read = |text| Upstream::read(text).map(|upstream| upstream.0);
        assert_eq!(read("http://127.0.0.1:8080").unwrap(), "127.0.0.1:8080");
        assert_eq!(read("http://[::1]:8080/").unwrap(), "[::1]:8080");
        assert_eq!(read("http://web.example").unwrap(), "web.example:80");
        for bad in ["https://127.0.0.1", "127.0.0.1:80", "http://a/b", "http://u@a/", "http://a/?q", ""] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
