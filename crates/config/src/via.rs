//! The option `via`: an HTTP proxy for TCP connections to the server.

use std::{env, net::IpAddr, str::FromStr};

use base64::{Engine, engine::general_purpose::STANDARD};
use ipnet::IpNet;

use mpvpn_input::values::{ServerAddr, Text};
use mpvpn_masque::template::unescape;

/// Default port of an `http` URI (RFC 9110 §4.2.1).
const DEFAULT_PORT: u16 = 80;
/// Longest user name and password together (bytes), as percent-encoded. The value of the header field has to
/// fit into a request header that proxies accept, mostly 8 kB; a shorter limit would refuse tokens used as
/// passwords.
const MAX_CREDENTIALS_BYTES: usize = 512;

/// Environment variables that name a proxy for HTTPS, as curl and other programs use them, in the order of
/// precedence.
const PROXY_VARIABLES: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];
/// Environment variables that name hosts to reach without a proxy.
const NO_PROXY_VARIABLES: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// An HTTP proxy that supports CONNECT (RFC 9110 §9.3.6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViaProxy {
    /// Its name or address, and its TCP port.
    pub proxy: ServerAddr,
    /// User name and password for the proxy, if it needs them.
    pub credentials: Option<ProxyCredentials>,
}

/// A name and a password for a proxy. They never appear in logs.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
#[debug("ProxyCredentials(…)")]
pub struct ProxyCredentials {
    user: String,
    password: String,
}

impl ProxyCredentials {
    /// The value of the `proxy-authorization` field with them (RFC 7617 §2).
    pub fn authorization(&self) -> String {
        format!("Basic {}", STANDARD.encode(format!("{}:{}", self.user, self.password)))
    }
}

/// The value of `--via`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViaOption {
    /// No proxy, whatever the environment variables say.
    None,
    /// This proxy.
    Proxy(ViaProxy),
}

impl FromStr for ViaProxy {
    type Err = String;

    /// Parses `http://[USER[:PASSWORD]@]HOST[:PORT]`; the scheme may be missing. Errors do not repeat the
    /// password.
    fn from_str(text: &str) -> Result<Self, String> {
        let rest = match text.split_once("://") {
            None => text,
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => {
                return Err(format!(
                    "proxies of the kind {scheme}:// are not supported: expected http://HOST:PORT"
                ));
            }
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (credentials, host) = match rest.rsplit_once('@') {
            Some((credentials, host)) => (Some(credentials), host),
            None => (None, rest),
        };
        // `ServerAddr` fills in the port of an mpvpn server, which is not that of a proxy.
        let has_port = match host.strip_prefix('[') {
            Some(rest) => rest.contains("]:"),
            None => host.matches(':').count() == 1,
        };
        let mut proxy: ServerAddr = host.parse()?;
        if !has_port {
            proxy.port = DEFAULT_PORT;
        }
        Ok(Self { proxy, credentials: credentials.map(read_credentials).transpose()? })
    }
}

fn read_credentials(text: &str) -> Result<ProxyCredentials, String> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let read = |part| unescape(part).filter(|part| !part.chars().any(char::is_control));
    match (read(user), read(password)) {
        // The name must have no colon (RFC 7617, section 2).
        (Some(user), Some(password)) if !user.contains(':') && text.len() <= MAX_CREDENTIALS_BYTES => {
            Ok(ProxyCredentials { user, password })
        }
        _ => {
            Err("the part before the @ is not USER:PASSWORD; encode special characters, as in %40 for @"
                .into())
        }
    }
}

impl Text for ViaOption {
    const EXPECTED: &'static str = "\"http://HOST:PORT\" or \"none\"";
    const EXAMPLE: &'static str = "http://proxy.example:3128";

    fn read(text: &str) -> Result<Self, String> {
        if text == "none" { Ok(Self::None) } else { text.parse().map(Self::Proxy) }
    }
}

/// The given proxy, else the one that the environment variables name for `server`.
pub(super) fn or_from_environment(
    given: Option<ViaOption>,
    server: Option<&ServerAddr>,
) -> Option<ViaOption> {
    given.or_else(|| {
        let variable = |name: &&str| env::var(name).ok().filter(|value| !value.is_empty());
        let named = PROXY_VARIABLES.iter().find_map(|name| Some((*name, variable(name)?)));
        let exceptions = NO_PROXY_VARIABLES.iter().find_map(variable).unwrap_or_default();
        from_environment(named, &exceptions, server?).map(ViaOption::Proxy)
    })
}

fn from_environment(
    named: Option<(&str, String)>,
    exceptions: &str,
    server: &ServerAddr,
) -> Option<ViaProxy> {
    let (variable, value) = named?;
    if exceptions.split(',').any(|entry| is_excepted(entry.trim(), server)) {
        return None;
    }
    match value.parse() {
        Ok(via) => Some(via),
        Err(why) => {
            // Not an error: the variable may be meant for programs that support other kinds of proxies.
            tracing::warn!(
                variable, %why,
                "the proxy of this environment variable is not used; name another one with --via, or --via none"
            );
            None
        }
    }
}

/// Whether an entry of `no_proxy` matches this server: `*`, a domain and its subdomains, an address or a
/// network.
fn is_excepted(entry: &str, server: &ServerAddr) -> bool {
    if entry == "*" {
        return true;
    }
    if let Some(ip) = server.ip() {
        let entry_ip = entry.trim_matches(['[', ']']).parse::<IpAddr>();
        return entry_ip == Ok(ip) || entry.parse::<IpNet>().is_ok_and(|net| net.contains(&ip));
    }
    let name =
        entry.trim_start_matches("*.").trim_start_matches('.').trim_end_matches('.').to_ascii_lowercase();
    let host = server.host.trim_end_matches('.').to_ascii_lowercase();
    !name.is_empty() && host.strip_suffix(&name).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> ViaProxy {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_proxy_is_an_address_and_perhaps_credentials() {
        assert_eq!(read("http://proxy:3128").proxy, "proxy:3128".parse().unwrap());
        assert_eq!(read("http://proxy.example/").proxy, "proxy.example:80".parse().unwrap());
        assert_eq!(read("proxy:8080").proxy.port, 8080);
        assert_eq!(read("http://[2001:db8::1]:3128").proxy.host, "2001:db8::1");
        assert_eq!(read("http://[2001:db8::1]").proxy.port, 80);
        let via = read("HTTP://anna:p%40ss%3Aw%c3%b6rd@proxy:3128");
        let credentials = via.credentials.clone().unwrap();
        assert_eq!(credentials, ProxyCredentials { user: "anna".into(), password: "p@ss:wörd".into() });
        assert!(!format!("{via:?}").contains("p@ss"));
        // The example of RFC 7617, section 2.
        let via = read("http://Aladdin:open%20sesame@proxy:3128");
        assert_eq!(via.credentials.unwrap().authorization(), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    }

    #[test]
    fn what_is_no_proxy_is_said_without_the_password() {
        let error = |text: &str| text.parse::<ViaProxy>().unwrap_err();
        assert!(error("socks5://proxy:1080").contains("socks5://"));
        assert!(error("https://proxy:443").contains("expected http://"));
        assert!(error("http://").contains("neither a host name"));
        for text in ["http://anna:%zz@proxy", "http://anna:secret%0a@proxy", "http://a%3ab:secret@proxy"] {
            assert!(!error(text).contains("secret") && error(text).contains("USER:PASSWORD"), "{text}");
        }
        assert_eq!(ViaOption::read("none"), Ok(ViaOption::None));
    }

    #[test]
    fn the_environment_names_a_proxy_but_not_for_all() {
        let server: ServerAddr = "vpn.example:443".parse().unwrap();
        let ask = |value: &str, exceptions: &str, server: &ServerAddr| {
            from_environment(Some(("https_proxy", value.to_owned())), exceptions, server).is_some()
        };
        assert!(ask("http://proxy:3128", "", &server));
        assert!(!ask("socks5://proxy:1080", "", &server), "one that cannot be used is no mistake");
        for exceptions in ["*", "localhost, vpn.example", ".example", "*.example", "EXAMPLE."] {
            assert!(!ask("http://proxy:3128", exceptions, &server), "{exceptions}");
        }
        for exceptions in ["pn.example", "other.example", "10.0.0.0/8", ","] {
            assert!(ask("http://proxy:3128", exceptions, &server), "{exceptions}");
        }
        let by_address: ServerAddr = "192.0.2.7".parse().unwrap();
        for exceptions in ["192.0.2.7", "192.0.2.0/24"] {
            assert!(!ask("http://proxy:3128", exceptions, &by_address), "{exceptions}");
        }
        assert!(ask("http://proxy:3128", "192.0.2.70,2.7", &by_address));
        assert_eq!(from_environment(None, "", &server), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,80}") {
            let _ = text.parse::<ViaProxy>();
            is_excepted(&text, &ServerAddr { host: "vpn.example".into(), port: 443 });
        }
    }
}
