//! The result of `mpvpn check`: measurements over each link, and the transport that a client would use there.
//!
//! In: measurements over each link. Out: the transport of a client and the reason ([`LinkCheck::judge`]), as
//! text ([`render`]) and in JSON. Always holds: the result has measured values only, no guesses.

use std::{
    collections::BTreeSet,
    fmt::Write,
    net::{IpAddr, SocketAddr},
};

use derive_more::Display;
use mpvpn_types::{Tier, Transport};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{Table, fit, section};

/// The result of `mpvpn check --json`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize)]
pub struct CheckReport {
    /// Name or address of the server, and port.
    pub server: String,
    /// HTTP proxy for TCP connections to the server, or `null`.
    pub via: Option<String>,
    /// Links of this machine.
    pub links: Vec<LinkCheck>,
    /// By what this kernel can confine a server or client.
    pub kernel: KernelCheck,
}

/// The means of this machine's kernel to confine a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct KernelCheck {
    /// Whether it filters system calls (seccomp).
    pub system_calls: bool,
    /// Version of Landlock, which restricts files, or `null`.
    pub landlock: Option<u32>,
}

impl KernelCheck {
    /// It in words, for people.
    pub fn sentence(&self) -> String {
        let system_calls =
            if self.system_calls { "filters system calls" } else { "does not filter system calls" };
        match self.landlock {
            Some(version) => format!("this kernel {system_calls}, and restricts files by Landlock {version}"),
            None => format!("this kernel {system_calls}, and has no Landlock to restrict files"),
        }
    }
}

/// The result for one link.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize)]
pub struct LinkCheck {
    /// Name of the interface.
    pub name: String,
    /// Addresses of the interface.
    pub addresses: Vec<IpAddr>,
    /// Address of the server that was tried over UDP.
    pub remote: Option<SocketAddr>,
    /// Result for QUIC over UDP.
    pub udp: TransportCheck<UdpMeasurement>,
    /// Result for TLS and HTTP/2 over TCP.
    pub tcp: TransportCheck<TcpMeasurement>,
    /// Whether the server accepts the token.
    pub credentials: TokenCheck,
    /// Why the server refuses this client, which it knows; left out if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// Transport that a client would use on the link.
    #[serde(rename = "use")]
    pub chosen: ChosenTransport,
    /// Why the client would use this transport.
    pub why: String,
    /// The next step of the user if the client would use none; else empty.
    pub next: &'static str,
}

/// Measurements if a transport works, else only `error`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize)]
#[serde(untagged)]
pub enum TransportCheck<T> {
    /// It works.
    Works(T),
    /// It does not work.
    Fails {
        /// Why it does not work.
        error: String,
    },
}

impl<T> TransportCheck<T> {
    /// The measurements, if the transport works.
    pub fn works(&self) -> Option<&T> {
        match self {
            Self::Works(found) => Some(found),
            Self::Fails { .. } => None,
        }
    }

    fn error(&self) -> &str {
        match self {
            Self::Works(_) => "works",
            Self::Fails { error } => error,
        }
    }
}

impl<T, E: ToString> From<Result<T, E>> for TransportCheck<T> {
    fn from(result: Result<T, E>) -> Self {
        result.map_or_else(|error| Self::Fails { error: error.to_string() }, Self::Works)
    }
}

/// Measurements over UDP.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize)]
pub struct UdpMeasurement {
    /// Time until the server sent HTTP/3, in ms.
    pub ms: f64,
    /// Largest IP packet that arrived at the server, in bytes; searched for up to 4 s, up to the MTU of the
    /// interface.
    pub mtu: u16,
    /// Network address translation on the way to the server, from two source ports.
    pub nat: NatKind,
    /// Address and port of this end as seen by the server, or `null`.
    pub observed: Option<SocketAddr>,
}

/// Measurements over TCP: how long each step took.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize)]
pub struct TcpMeasurement {
    /// TCP handshake with the server or the proxy, in ms.
    pub connect_ms: f64,
    /// CONNECT request to the proxy, in ms; left out without a proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_ms: Option<f64>,
    /// TLS handshake, in ms.
    pub tls_ms: f64,
    /// Request and response in HTTP/2, in ms.
    pub http2_ms: f64,
    /// Whether Multipath TCP works; with a proxy, on the connection to the proxy.
    pub mptcp: Mptcp,
}

impl TcpMeasurement {
    fn ms(&self) -> f64 {
        self.connect_ms + self.proxy_ms.unwrap_or_default() + self.tls_ms + self.http2_ms
    }
}

/// Network address translation towards this server. Translation towards other destinations is not measured.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[display(rename_all = "lowercase")]
#[serde(rename_all = "kebab-case")]
pub enum NatKind {
    /// The server sees the address and ports of this machine.
    None,
    /// The server sees another address with the same ports.
    #[display("keeps ports")]
    KeepsPorts,
    /// The server sees another address with other ports.
    #[display("changes ports")]
    ChangesPorts,
    /// The server does not report what it sees.
    Unknown,
}

impl NatKind {
    /// The kind of translation, from pairs of an own address (if known) and port and the address that the
    /// server saw.
    pub fn of(seen: &[(Option<IpAddr>, u16, Option<SocketAddr>)]) -> Self {
        let known: Option<Vec<_>> = seen.iter().map(|(ip, port, far)| Some((*ip, *port, (*far)?))).collect();
        let Some(known) = known.filter(|known| !known.is_empty()) else { return Self::Unknown };
        if known.iter().any(|(_, port, far)| far.port() != *port) {
            return Self::ChangesPorts;
        }
        match known.iter().all(|(ip, _, far)| *ip == Some(far.ip().to_canonical())) {
            true => Self::None,
            false => Self::KeepsPorts,
        }
    }
}

/// Result of the attempt to connect by Multipath TCP (RFC 8684).
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mptcp {
    /// Multipath TCP works.
    Works,
    /// The connection fell back to TCP: the far end does not support Multipath TCP, or a middlebox removed
    /// the option. Another link with `works` shows that the far end supports it.
    FellBack,
    /// The Multipath TCP handshake got no answer; a TCP handshake did.
    NoAnswer,
    /// This kernel does not support Multipath TCP.
    Missing,
}

/// The server's answer to the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenCheck {
    /// The server accepts the token.
    Accepted,
    /// The server refuses the token.
    Refused,
    /// The server could not be reached.
    Unknown,
}

/// Transport of a link.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[display(rename_all = "UPPERCASE")]
#[serde(rename_all = "kebab-case")]
pub enum ChosenTransport {
    /// QUIC over UDP.
    Udp,
    /// QUIC inside HTTP/2 over TCP.
    Tcp,
    /// QUIC inside HTTP/2 over Multipath TCP.
    Mptcp,
    /// No transport works.
    #[display("nothing")]
    Nothing,
}

impl LinkCheck {
    /// The result for a link over which nothing could be tried, for this reason.
    pub fn unusable(name: &str, addresses: Vec<IpAddr>, why: &str) -> Self {
        let error = || TransportCheck::Fails { error: why.to_owned() };
        Self {
            name: name.to_owned(),
            addresses,
            remote: None,
            udp: TransportCheck::Fails { error: why.to_owned() },
            tcp: error(),
            credentials: TokenCheck::Unknown,
            refusal: None,
            chosen: ChosenTransport::Nothing,
            why: why.to_owned(),
            next: "name with --path an interface that exists, is up and has an address: `ip address` lists them",
        }
    }

    /// Fills in the transport that a client with these settings of the link would use.
    #[must_use]
    pub fn judge(mut self, tier: Tier, transport: Transport) -> Self {
        (self.chosen, self.why) = self.choose_transport(tier, transport);
        self.next = match (self.chosen, self.credentials) {
            (ChosenTransport::Nothing, TokenCheck::Refused) if self.refusal.is_some() => {
                "ask who runs the server"
            }
            (ChosenTransport::Nothing, TokenCheck::Refused) => {
                "give the token of a user of that server with --token-file"
            }
            (ChosenTransport::Nothing, _) if self.next.is_empty() => {
                "check that the server runs (`mpvpn status` there) and that no firewall blocks its port; where only a proxy \
                 leads out, give it with --via"
            }
            (ChosenTransport::Nothing, _) => self.next,
            _ => "",
        };
        self
    }

    fn choose_transport(&self, tier: Tier, transport: Transport) -> (ChosenTransport, String) {
        if self.credentials == TokenCheck::Refused {
            let why = self.refusal.as_ref().map(|reason| format!("the server refuses this client: {reason}"));
            return (
                ChosenTransport::Nothing,
                why.unwrap_or_else(|| "the server refuses the token".to_owned()),
            );
        }
        if tier == Tier::Never {
            return (ChosenTransport::Nothing, "the tier of the link is `never`".to_owned());
        }
        let tcp = self.tcp.works().map(|found| match found.mptcp {
            Mptcp::Works => ChosenTransport::Mptcp,
            Mptcp::FellBack | Mptcp::NoAnswer | Mptcp::Missing => ChosenTransport::Tcp,
        });
        match (self.udp.works(), tcp, transport) {
            (Some(_), _, Transport::Auto) => (ChosenTransport::Udp, "UDP gets through".to_owned()),
            (Some(_), _, Transport::Quic) => (ChosenTransport::Udp, "transport is quic".to_owned()),
            (None, _, Transport::Quic) => {
                (ChosenTransport::Nothing, format!("transport is quic, and UDP fails: {}", self.udp.error()))
            }
            (_, Some(chosen), Transport::Tcp) => (chosen, "transport is tcp".to_owned()),
            (_, None, Transport::Tcp) => {
                (ChosenTransport::Nothing, format!("transport is tcp, and TCP fails: {}", self.tcp.error()))
            }
            (None, Some(chosen), Transport::Auto) => (chosen, format!("UDP fails: {}", self.udp.error())),
            (None, None, Transport::Auto) => (
                ChosenTransport::Nothing,
                match self.udp.error() {
                    both if both == self.tcp.error() => both.to_owned(),
                    _ => "neither UDP nor TCP gets through".to_owned(),
                },
            ),
        }
    }
}

impl CheckReport {
    /// Whether a client could use at least one link.
    pub fn works(&self) -> bool {
        self.links.iter().any(|link| link.chosen != ChosenTransport::Nothing)
    }

    /// The user's next steps if no link works, each once.
    fn next_steps(&self) -> BTreeSet<&'static str> {
        let of_links = self.links.iter().map(|link| link.next);
        match self.links.is_empty() {
            true => ["bring up an interface with a default route, or name one with --path"].into(),
            false => of_links.filter(|next| !next.is_empty() && !self.works()).collect(),
        }
    }

    /// The result for Multipath TCP over a link, in words. If it works over another link, the server supports
    /// it.
    fn mptcp(&self, found: &TcpMeasurement) -> &'static str {
        let works = |link: &LinkCheck| link.tcp.works().is_some_and(|found| found.mptcp == Mptcp::Works);
        match found.mptcp {
            Mptcp::Works => "works",
            Mptcp::FellBack if self.via.is_some() => "proxy lacks it",
            Mptcp::FellBack if self.links.iter().any(works) => "option removed on the way",
            Mptcp::FellBack => "removed on the way, or server lacks it",
            Mptcp::NoAnswer => "dropped on the way",
            Mptcp::Missing => "kernel lacks it",
        }
    }
}

/// Renders the result as text: a table in lines of at most `width` columns, the reason for each link, and the
/// next step if no link works.
pub fn render(check: &CheckReport, width: usize) -> String {
    let via = check.via.as_ref().map(|via| format!(", by TCP through the proxy {via}")).unwrap_or_default();
    let mut text = format!("server {}{via}\n", check.server);
    let mut table = Table::new("link|>UDP|>MTU|NAT|>TCP|MPTCP|token|uses|addresses");
    for link in &check.links {
        let (udp, tcp) = (link.udp.works(), link.tcp.works());
        let none = || "-".to_owned();
        table.rows.push(vec![
            link.name.clone(),
            udp.map_or_else(none, |found| format!("{:.1} ms", found.ms)),
            udp.map_or_else(none, |found| found.mtu.to_string()),
            udp.map_or_else(none, |found| found.nat.to_string()),
            tcp.map_or_else(none, |found| format!("{:.1} ms", found.ms())),
            tcp.map_or_else(none, |found| check.mptcp(found).to_owned()),
            match link.credentials {
                TokenCheck::Accepted => "accepted".to_owned(),
                TokenCheck::Refused => "refused".to_owned(),
                TokenCheck::Unknown => none(),
            },
            link.chosen.to_string(),
            link.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        ]);
    }
    section(&mut text, table, width);
    let table = fit(&text, width);
    text = "\n".to_owned();
    for link in &check.links {
        let _ = writeln!(text, "{}: {}, because {}", link.name, link.chosen, link.why);
        for (what, error) in [
            ("UDP", link.udp.works().is_none().then(|| link.udp.error())),
            ("TCP", link.tcp.works().is_none().then(|| link.tcp.error())),
        ] {
            if let Some(error) = error.filter(|error| !link.why.contains(error)) {
                let _ = writeln!(text, "  {what} fails: {error}");
            }
        }
        if let Some(observed) = link.udp.works().and_then(|found| found.observed) {
            let _ = writeln!(text, "  the server sees {observed}");
        }
        if let Some(TcpMeasurement { connect_ms, proxy_ms, tls_ms, http2_ms, .. }) = link.tcp.works() {
            let proxy = proxy_ms.map(|ms| format!("proxy {ms:.1} ms, ")).unwrap_or_default();
            let _ = writeln!(
                text,
                "  TCP {connect_ms:.1} ms, {proxy}TLS {tls_ms:.1} ms, HTTP/2 {http2_ms:.1} ms"
            );
        }
    }
    let _ = writeln!(text, "{}", check.kernel.sentence());
    for next in check.next_steps() {
        let _ = writeln!(text, "next: {next}");
    }
    table + &fit(&text, usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp() -> TransportCheck<UdpMeasurement> {
        TransportCheck::Works(UdpMeasurement {
            ms: 41.26,
            mtu: 1500,
            nat: NatKind::KeepsPorts,
            observed: Some("203.0.113.9:40001".parse().unwrap()),
        })
    }

    fn tcp(mptcp: Mptcp) -> TransportCheck<TcpMeasurement> {
        TransportCheck::Works(TcpMeasurement {
            connect_ms: 20.0,
            proxy_ms: None,
            tls_ms: 22.0,
            http2_ms: 21.0,
            mptcp,
        })
    }

    fn fails<T>(why: &str) -> TransportCheck<T> {
        TransportCheck::Fails { error: why.to_owned() }
    }

    fn link(
        name: &str,
        udp: TransportCheck<UdpMeasurement>,
        tcp: TransportCheck<TcpMeasurement>,
    ) -> LinkCheck {
        let credentials = match udp.works().is_some() || tcp.works().is_some() {
            true => TokenCheck::Accepted,
            false => TokenCheck::Unknown,
        };
        LinkCheck { udp, tcp, credentials, next: "", ..LinkCheck::unusable(name, Vec::new(), "") }
    }

    fn choose_transport(link: &LinkCheck, transport: Transport) -> (ChosenTransport, String) {
        link.choose_transport(Tier::Primary, transport)
    }

    #[test]
    fn udp_is_used_where_it_gets_through_and_tcp_where_it_does_not() {
        let both = link("a", udp(), tcp(Mptcp::Works));
        assert_eq!(choose_transport(&both, Transport::Auto).0, ChosenTransport::Udp);
        assert_eq!(choose_transport(&both, Transport::Tcp).0, ChosenTransport::Mptcp);
        let blocked = link("b", fails("no answer"), tcp(Mptcp::FellBack));
        assert_eq!(
            choose_transport(&blocked, Transport::Auto),
            (ChosenTransport::Tcp, "UDP fails: no answer".to_owned())
        );
        let (chosen, why) = choose_transport(&blocked, Transport::Quic);
        assert_eq!(chosen, ChosenTransport::Nothing);
        assert!(why.contains("transport is quic"), "{why}");
        let dead = link("c", fails("no answer"), fails("refused"));
        for transport in Transport::ALL {
            assert_eq!(choose_transport(&dead, *transport).0, ChosenTransport::Nothing);
        }
    }

    #[test]
    fn nothing_is_used_without_a_token_or_where_nothing_may_be() {
        let both = link("a", udp(), tcp(Mptcp::Works));
        assert_eq!(both.choose_transport(Tier::Never, Transport::Auto).0, ChosenTransport::Nothing);
        assert_eq!(both.choose_transport(Tier::Backup, Transport::Auto).0, ChosenTransport::Udp);
        let refused = LinkCheck { credentials: TokenCheck::Refused, ..both };
        let refused = refused.judge(Tier::Primary, Transport::Auto);
        assert_eq!(refused.chosen, ChosenTransport::Nothing);
        let check = CheckReport {
            server: "vpn.example:443".into(),
            via: None,
            links: vec![refused],
            kernel: KernelCheck::default(),
        };
        assert!(!check.works());
        assert!(render(&check, 200).contains("next: give the token"), "{}", render(&check, 200));
    }

    #[test]
    fn each_reason_that_nothing_works_has_its_own_next_step() {
        let text_of = |links: Vec<LinkCheck>| {
            let links = links.into_iter().map(|link| link.judge(Tier::Primary, Transport::Auto)).collect();
            let check = CheckReport {
                server: "vpn.example:443".into(),
                via: None,
                links,
                kernel: KernelCheck::default(),
            };
            render(&check, 40)
        };
        let silent = || link("eth1", fails("no answer in 5 s"), fails("connecting took longer than 4 s"));
        let text = text_of(vec![silent()]);
        assert!(text.contains("eth1: nothing, because neither UDP nor TCP gets through\n"), "{text}");
        assert!(text.contains("next: check that the server runs"), "{text}");

        let pin = "the server's certificate is not the pinned one";
        let refused = |name| LinkCheck { next: "ask its owner", ..link(name, fails(pin), fails(pin)) };
        let text = text_of(vec![refused("eth1"), refused("eth2")]);
        assert!(
            text.contains(&format!("eth1: nothing, because {pin}\neth2: nothing, because {pin}\n")),
            "{text}"
        );
        assert!(text.ends_with("\nnext: ask its owner\n") && text.matches("next:").count() == 1, "{text}");

        let text = text_of(vec![LinkCheck::unusable("eth9", Vec::new(), "no such interface")]);
        assert!(text.contains("eth9: nothing, because no such interface\n"), "{text}");
        assert!(text.contains("next: name with --path an interface that exists"), "{text}");
        let works = link("eth1", udp(), tcp(Mptcp::Works));
        let text = text_of(vec![works, LinkCheck::unusable("eth9", Vec::new(), "no such interface")]);
        assert!(!text.contains("next:"), "{text}");
    }

    #[test]
    fn what_translation_does_to_ports_is_told_only_as_far_as_it_is_known() {
        let own: IpAddr = "192.168.1.7".parse().unwrap();
        let far = |text: &str| Some(text.parse().unwrap());
        let two = |a, b| NatKind::of(&[(Some(own), 40_001, a), (Some(own), 40_002, b)]);
        assert_eq!(two(far("192.168.1.7:40001"), far("[::ffff:192.168.1.7]:40002")), NatKind::None);
        assert_eq!(two(far("203.0.113.9:40001"), far("203.0.113.9:40002")), NatKind::KeepsPorts);
        assert_eq!(two(far("203.0.113.9:40001"), far("203.0.113.9:1025")), NatKind::ChangesPorts);
        assert_eq!(two(far("203.0.113.9:40001"), None), NatKind::Unknown);
        assert_eq!(NatKind::of(&[]), NatKind::Unknown);
    }

    #[test]
    fn multipath_that_works_over_another_link_is_stripped_on_the_way() {
        let links = |first| vec![link("a", udp(), tcp(first)), link("b", udp(), tcp(Mptcp::FellBack))];
        let check = |first| CheckReport {
            server: "vpn.example:443".into(),
            via: None,
            links: links(first),
            kernel: KernelCheck::default(),
        };
        let text = render(&check(Mptcp::Works), 200);
        assert!(text.contains("option removed on the way"), "{text}");
        let text = render(&check(Mptcp::FellBack), 200);
        assert!(text.contains("removed on the way, or server lacks it"), "{text}");
    }

    #[test]
    fn people_and_programs_are_told_the_same() {
        let judged = |link: LinkCheck| link.judge(Tier::Primary, Transport::Auto);
        let check = CheckReport {
            server: "vpn.example:443".into(),
            via: Some("proxy:3128".into()),
            links: vec![
                judged(link("eth0", udp(), fails("the proxy forbids it"))),
                judged(link("wwan0", fails("no answer in 5 s"), tcp(Mptcp::Missing))),
                LinkCheck::unusable("lan0", Vec::new(), "no carrier"),
            ],
            kernel: KernelCheck { system_calls: true, landlock: Some(7) },
        };
        let text = render(&check, 200);
        assert!(
            text.contains("this kernel filters system calls, and restricts files by Landlock 7"),
            "{text}"
        );
        for part in [
            "server vpn.example:443, by TCP through the proxy proxy:3128",
            "keeps ports",
            "eth0: UDP, because UDP gets through\n  TCP fails: the proxy forbids it",
            "wwan0: TCP, because UDP fails: no answer in 5 s\n  TCP 20.0 ms, TLS 22.0 ms",
            "lan0: nothing, because no carrier\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("next:"), "{text}");
        let json = serde_json::to_value(&check).unwrap();
        assert_eq!(json["links"][0]["use"], "udp");
        assert_eq!(json["links"][0]["udp"]["nat"], "keeps-ports");
        assert_eq!(json["links"][0]["tcp"]["error"], "the proxy forbids it");
        assert_eq!(json["links"][1]["tcp"]["mptcp"], "missing");
        assert_eq!(json["links"][1]["credentials"], "accepted");
    }
}
