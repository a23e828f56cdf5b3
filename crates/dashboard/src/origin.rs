//! Whether a request comes from the dashboard's own page, and not from a page of another server.
//!
//! In: the header fields of a request, and the address at which it came. Out: why it is refused, if it is.
//! Always holds: a name that the dashboard does not know is refused, so that a server whose name is made to
//! lead here (DNS rebinding) gets nothing; a request that changes something names the page's own origin.

use std::net::{IpAddr, SocketAddr};

use hyper::{
    HeaderMap,
    header::{self, HeaderName},
    http::uri::Authority,
};

/// Where browsers say how the page of a request is related to its target (Fetch Metadata).
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The host of a request, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host(String);

impl Host {
    /// The host that the fields name, if it is `local`, the address at which the request came, or a name of
    /// the dashboard. `is_own_name` tells the names of its certificate. Ports are not compared: behind
    /// `ssh -L` the browser's is another one.
    pub(crate) fn of(
        headers: &HeaderMap,
        local: SocketAddr,
        is_own_name: impl Fn(&str) -> bool,
    ) -> Result<Self, String> {
        let text = match one(headers, &header::HOST) {
            Ok(Some(text)) => text,
            Ok(None) | Err(()) => return Err("the request does not name one host".to_owned()),
        };
        let authority: Authority =
            text.parse().map_err(|_| "the host of the request cannot be understood".to_owned())?;
        let name = authority.host().trim_start_matches('[').trim_end_matches(']');
        let own = local.ip().to_canonical();
        let is_own = match name.parse::<IpAddr>() {
            Ok(ip) => {
                let ip = ip.to_canonical();
                ip == own || ip.is_loopback() && own.is_loopback()
            }
            Err(_) => name.eq_ignore_ascii_case("localhost") || is_own_name(&name.to_ascii_lowercase()),
        };
        match is_own && !text.contains('@') {
            true => Ok(Self(text.to_ascii_lowercase())),
            false => Err(
                "the dashboard does not know the host that the request names: open it by the address that `mpvpn dashboard` \
                 prints, by localhost, or by a name of its certificate"
                    .to_owned(),
            ),
        }
    }

    /// Refuses requests of other pages. Browsers name the origin in each POST; in other requests of the page
    /// itself they may leave it out.
    pub(crate) fn check_origin(
        &self,
        headers: &HeaderMap,
        scheme: &str,
        is_post: bool,
    ) -> Result<(), String> {
        let own = format!("{scheme}://{}", self.0);
        let from_own_page = match one(headers, &header::ORIGIN) {
            Ok(Some(origin)) => origin.eq_ignore_ascii_case(&own),
            Ok(None) => !is_post,
            Err(()) => false,
        };
        let is_same_site = match one(headers, &FETCH_SITE) {
            Ok(site) => site.is_none_or(|site| site == "same-origin"),
            Err(()) => false,
        };
        match from_own_page && is_same_site {
            true => Ok(()),
            false => Err("the request comes from another page than the dashboard's own".to_owned()),
        }
    }
}

/// The text of a field; an error if it is there several times or is no text.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, ()> {
    let mut all = headers.get_all(name).iter();
    match (all.next(), all.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(drop),
        (Some(_), Some(_)) => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    fn host(text: &str, local: &str) -> Result<Host, String> {
        Host::of(&headers(&[(header::HOST, text)]), local.parse().unwrap(), |name| name == "vpn.example")
    }

    #[test]
    fn only_hosts_that_are_the_dashboards_own_are_served() {
        for own in
            ["127.0.0.1:9470", "localhost:9470", "LocalHost", "127.0.0.1", "localhost:8080", "[::1]:9470"]
        {
            assert!(host(own, "127.0.0.1:9470").is_ok(), "{own}");
        }
        for own in ["192.0.2.1", "192.0.2.1:9470", "[::ffff:192.0.2.1]:9470", "VPN.example:9470"] {
            assert!(host(own, "192.0.2.1:9470").is_ok(), "{own}");
        }
        for other in [
            "evil.example:9470",
            "192.0.2.1:9470",
            "127.0.0.1.evil.example",
            "user@localhost",
            "localhost.evil.example",
            "",
            "[::2]:9470",
            "local host",
            "vpn.example.evil",
        ] {
            assert!(host(other, "127.0.0.1:9470").is_err(), "{other}");
        }
        assert!(host("127.0.0.1:9470", "192.0.2.1:9470").is_err());
        assert!(Host::of(&HeaderMap::new(), "127.0.0.1:1".parse().unwrap(), |_| true).is_err());
        let twice = headers(&[(header::HOST, "localhost"), (header::HOST, "evil.example")]);
        assert!(Host::of(&twice, "127.0.0.1:1".parse().unwrap(), |_| true).is_err());
    }

    #[test]
    fn only_the_own_page_changes_anything() {
        let host = host("127.0.0.1:9470", "127.0.0.1:9470").unwrap();
        let check = |fields: &[(HeaderName, &str)], is_post| {
            host.check_origin(&headers(fields), "http", is_post).is_ok()
        };
        let own = (header::ORIGIN, "http://127.0.0.1:9470");
        assert!(check(std::slice::from_ref(&own), true));
        assert!(check(&[own.clone(), (FETCH_SITE, "same-origin")], true));
        assert!(check(&[], false) && !check(&[], true), "a POST names its origin");
        for other in [
            "null",
            "http://evil.example",
            "https://127.0.0.1:9470",
            "http://127.0.0.1:9471",
            "http://127.0.0.1",
            "http://localhost:9470",
            "http://127.0.0.1:9470.evil.example",
        ] {
            assert!(!check(&[(header::ORIGIN, other)], true), "{other}");
            assert!(!check(&[(header::ORIGIN, other)], false), "{other}");
        }
        assert!(!check(&[own.clone(), own.clone()], true));
        for site in ["cross-site", "same-site", "none"] {
            assert!(!check(&[own.clone(), (FETCH_SITE, site)], true), "{site}");
        }
    }
}
