//! Negotiation of the extensions beyond the RFCs (docs/protocol.md, "Extensions"). The tables
//! [`PACKET_EXTENSIONS`] and [`COMMON_EXTENSIONS`] define for each extension what a client offers, what a
//! server answers, and what either end switches on.
//!
//! In: the configurations of both ends, the header sections of a request and of its response. Out: the header
//! fields to send; negotiated extensions are switched on in the [`MultipathConnection`] or noted in
//! [`NegotiatedExtensions`]. Always holds: a field that is repeated or malformed counts as absent; a context
//! ID belongs to at most one extension of a connection.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_class::MAX_COPIES;
use mpvpn_masque::{headers::Headers, session_header, structured};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, StreamId};
use mpvpn_types::{ClassId, CongestionControl, Fec, Instant};

use super::{
    MultipathConnection, clocks::ClockReports, data_ack::DataAcks, protect::Protection,
    reinjection::Reinjection, sequence::Sequencer,
};
use crate::{
    ClassProfile, ClientConfig, ClientInstance, ConnectionNumber, SecretSharing, ServerConfig, TunnelMode,
    UserLimits, client::Links, shapers::Shapers,
};

/// The Structured Fields Boolean "true" (RFC 9651 §3.3.6).
const SF_TRUE: &str = "?1";
const MEMBER_FIELD: &str = "mpvpn-member";
const INSTANCE_FIELD: &str = "mpvpn-instance";
const SHARED_FIELD: &str = "mpvpn-shared";
/// Values of [`SHARED_FIELD`].
const KEPT: &str = "kept";
const MOVED: &str = "moved";
const STREAMS_FIELD: &str = "mpvpn-streams";
const UDP_FIELD: &str = "mpvpn-udp";
/// Maximum number of DNS resolvers taken from a server: the C library asks no more (`MAXNS` of
/// resolv.conf(5)).
const MAX_RESOLVERS: usize = 3;
/// Maximum number of networks taken from a server, which bounds memory. A server of this project sends two.
const MAX_NETWORKS: usize = 8;

/// An extension and how it is negotiated.
struct Extension {
    /// The header field, in requests and responses.
    field: &'static str,
    negotiation: Negotiation,
}

/// How both ends negotiate an extension.
enum Negotiation {
    /// The field holds the context ID of the extension's datagrams (Structured Fields Integer). A server that
    /// supports the extension repeats the field.
    Context {
        /// The context ID that the client offers: even, as clients allocate those (RFC 9484 §6), and not 0.
        id: u64,
        /// Whether the client offers the extension.
        wanted: fn(&ClientConfig) -> bool,
        /// Switches the extension on at either end; returns false if an extension that it needs is off.
        start: fn(&mut LocalEnd<'_>, u64) -> bool,
    },
    /// The field holds a value whose meaning the functions define.
    Value { offer: Offer, answer: Answer, agree: Agree },
}

/// Returns the field value that the client sends, if any.
type Offer = fn(&ClientConfig, Option<ConnectionNumber>) -> Option<String>;
/// Takes the client's field value, if it sent one; returns the field value that the server answers.
type Answer = fn(&mut ServerNegotiation<'_>, Option<&[u8]>) -> Option<String>;
/// Takes the server's field value.
type Agree = fn(&mut ClientNegotiation<'_>, &[u8]);

/// The extensions of CONNECT-IP requests, each after the extensions that it needs.
const PACKET_EXTENSIONS: &[Extension] = &[
    // The traffic class that the connection carries.
    value(
        "mpvpn-class",
        |config, _| config.class.as_ref().map(ClassProfile::header),
        |server, offer| {
            let class = offer.and_then(ClassProfile::parse)?;
            let admitted = server.admitted.as_ref()?;
            let (shapers, id) = (&admitted.shapers, admitted.member.class());
            shapers.set_share(server.now, id, admitted.limits.bound(class.share));
            server.local.multipath.set_class(Some(&class));
            server.local.multipath.share_links(shapers.clone(), id);
            server.local.classes = true;
            server.class = Some(class);
            Some(SF_TRUE.to_owned())
        },
        |client, answer| {
            if is_true(answer) && client.config.class.is_some() {
                client.local.multipath.share_links(client.shapers.clone(), client.class);
                client.local.classes = true;
                client.agreed.classes = true;
            }
        },
    ),
    // Clock reports, for connections whose classes share links.
    context(
        "mpvpn-clocks",
        12,
        |config| config.class.is_some(),
        |local, context| {
            let clocks = local.classes.then(|| ClockReports::new(local.stream, context, local.peer_clock));
            local.multipath.clocks = clocks;
            local.classes
        },
    ),
    // How often the server sends each packet, each time over another link (an Integer).
    request_only(
        "mpvpn-copies",
        |config, _| (config.copies > 1).then(|| config.copies.to_string()),
        |server, offer| {
            server.local.copies = copies_of(offer);
            None
        },
    ),
    // Numbered packets.
    context(
        "mpvpn-order",
        2,
        |_| true,
        |local, context| {
            local.multipath.recovery.sequencer = Some(Box::new(Sequencer::new(local.stream, context)));
            local.multipath.scheduler.set_copies(local.copies);
            local.multipath.timer.measure_soon();
            true
        },
    ),
    // How many FEC repair packets the server sends: `auto`, or data and repair packets as in `10+2`.
    request_only(
        "mpvpn-fec-policy",
        |config, _| (config.fec != Fec::Off).then(|| config.fec.to_string()),
        |server, offer| {
            server.local.fec = fec_of(offer);
            None
        },
    ),
    // FEC groups: numbered packets with repair packets.
    context(
        "mpvpn-fec",
        10,
        |config| config.fec != Fec::Off,
        |local, context| {
            let Some(sequencer) = &mut local.multipath.recovery.sequencer else { return false };
            sequencer.protect(Protection::new(local.stream, context, local.fec));
            true
        },
    ),
    // The number of this connection within its session (an Integer). A server refuses a malformed one: see
    // [`member_of`].
    value(
        MEMBER_FIELD,
        |_, member| member.map(|member| member.number().to_string()),
        |server, offer| offer.and(server.admitted.as_ref()).map(|all| all.member.number().to_string()),
        |client, answer| {
            client.agreed.member = text(answer).and_then(|text| text.trim().parse().ok());
        },
    ),
    // The process of the client: see [`instance_of`].
    request_only(
        INSTANCE_FIELD,
        |config, _| config.instance.as_ref().and_then(|instance| session_header::encode(instance)),
        |_, _| None,
    ),
    // Whether another machine shows the secret of the session (a Token); only to clients that say which
    // process they are.
    response_only(
        SHARED_FIELD,
        |server, _| match server.admitted.as_ref()?.sharing {
            SecretSharing::Alone => None,
            SecretSharing::Kept => Some(KEPT.to_owned()),
            SecretSharing::Moved => Some(MOVED.to_owned()),
        },
        |client, answer| client.agreed.sharing = sharing_of(answer).unwrap_or_default(),
    ),
    // The prefixes of the server's tunnel network, in which other clients are, as in `10.0.0.0/24,
    // fd00::/64`.
    response_only(
        "mpvpn-networks",
        |server, _| {
            let (v4, v6) = server.admitted.as_ref()?.networks;
            Some(join_list([IpNet::V4(v4)].into_iter().chain(v6.map(IpNet::V6))))
        },
        |client, answer| client.agreed.networks = networks_of(answer),
    ),
];

/// The extensions of all requests, each after the extensions that it needs. In CONNECT-IP requests they are
/// processed after [`PACKET_EXTENSIONS`].
const COMMON_EXTENSIONS: &[Extension] = &[
    // The congestion controller that the client asks the server to use on this connection (a Token).
    value(
        "mpvpn-cc",
        |config, _| Some(config.setup.cc().to_string()),
        |server, offer| {
            // The controller of the class takes precedence: older clients send no other.
            let of_class = server.class.as_ref().and_then(|class| class.cc);
            let cc = of_class.or_else(|| offer.and_then(cc_of))?;
            server.connection.set_cc(cc);
            Some(cc.to_string())
        },
        |client, answer| client.agreed.cc = cc_of(answer),
    ),
    // The packet scheduler of the client, which the server uses as well.
    request_only(
        "mpvpn-scheduler",
        |config, _| Some(config.scheduler.to_string()),
        |server, offer| {
            server.local.multipath.scheduler.set_kind(scheduler_of(offer));
            None
        },
    ),
    // Heartbeat reports.
    context(
        "mpvpn-heartbeats",
        4,
        |_| true,
        |local, context| {
            local.multipath.heartbeats.set_reports(local.stream, context);
            true
        },
    ),
    // Reinjection: stream bytes that were in flight on a dead path are sent again as datagrams.
    context(
        "mpvpn-rescue",
        6,
        |_| true,
        |local, context| {
            local.multipath.recovery.reinjection = Some(Box::new(Reinjection::new(local.stream, context)));
            true
        },
    ),
    // DataAck reports; they need `mpvpn-rescue`.
    context(
        "mpvpn-progress",
        8,
        |_| true,
        |local, context| {
            let MultipathConnection { recovery, paths, .. } = &mut *local.multipath;
            if recovery.reinjection.is_some() {
                let acks = DataAcks::new(paths.empty_since(), local.stream, context);
                recovery.data_acks = Some(Box::new(acks));
            }
            recovery.data_acks.is_some()
        },
    ),
    // LINK capsules, in which the client describes its links (a Boolean).
    value(
        "mpvpn-links",
        |_, _| Some(SF_TRUE.to_owned()),
        |_, offer| offer.filter(|offer| is_true(offer)).map(|_| SF_TRUE.to_owned()),
        |client, answer| {
            client.agreed.links = is_true(answer);
            if client.agreed.links {
                client.links.apply_policies(client.now, client.local.multipath, true);
            }
        },
    ),
    // The server opens TCP connections by CONNECT to all destinations outside its own networks, where it
    // would translate addresses of packets (a Boolean). In a 501 response: CONNECT works, CONNECT-IP
    // does not.
    response_only(
        STREAMS_FIELD,
        |server, _| server.config.offers_streams.then(|| SF_TRUE.to_owned()),
        |client, answer| client.agreed.streams = is_true(answer),
    ),
    // The same for UDP flows, by CONNECT-UDP.
    response_only(
        UDP_FIELD,
        |server, _| server.config.offers_streams.then(|| SF_TRUE.to_owned()),
        |client, answer| client.agreed.udp = is_true(answer),
    ),
    // DNS resolvers that the server suggests, most preferred first, as in `10.0.0.1, fd00::1`.
    response_only(
        "mpvpn-dns",
        |server, _| Some(join_list(server.config.dns.iter())).filter(|dns| !dns.is_empty()),
        |client, answer| client.agreed.dns = plausible_resolvers(text(answer).unwrap_or_default()),
    ),
];

/// An extension that is negotiated by a context ID.
const fn context(
    field: &'static str,
    id: u64,
    wanted: fn(&ClientConfig) -> bool,
    start: fn(&mut LocalEnd<'_>, u64) -> bool,
) -> Extension {
    Extension { field, negotiation: Negotiation::Context { id, wanted, start } }
}

/// An extension that is negotiated by values.
const fn value(field: &'static str, offer: Offer, answer: Answer, agree: Agree) -> Extension {
    Extension { field, negotiation: Negotiation::Value { offer, answer, agree } }
}

/// An extension whose field only the client sends.
const fn request_only(field: &'static str, offer: Offer, answer: Answer) -> Extension {
    value(field, offer, answer, |_, _| {})
}

/// An extension whose field only the server sends.
const fn response_only(field: &'static str, answer: Answer, agree: Agree) -> Extension {
    value(field, |_, _| None, answer, agree)
}

/// The state of this end, in which extensions are switched on.
pub(crate) struct LocalEnd<'a> {
    multipath: &'a mut MultipathConnection,
    /// The request stream to which the context IDs belong.
    stream: StreamId,
    /// How often this end sends each numbered packet.
    copies: u8,
    /// The FEC policy of this end.
    fec: Fec,
    /// Whether both ends negotiated classes.
    classes: bool,
    /// Number of the peer's clock within the session: connections to the same thread share a clock.
    peer_clock: u8,
}

impl<'a> LocalEnd<'a> {
    pub(crate) fn at_client(
        config: &ClientConfig,
        multipath: &'a mut MultipathConnection,
        stream: StreamId,
    ) -> Self {
        // All classes of a client thread are served by the same thread of the server, so its clock is number
        // 0.
        Self { multipath, stream, copies: config.copies, fec: config.fec, classes: false, peer_clock: 0 }
    }

    pub(crate) fn at_server(
        multipath: &'a mut MultipathConnection,
        stream: StreamId,
        member: ConnectionNumber,
    ) -> Self {
        let peer_clock = member.shard();
        Self { multipath, stream, copies: 1, fec: Fec::Off, classes: false, peer_clock }
    }
}

/// The client's side of a negotiation, when the response has arrived.
pub(crate) struct ClientNegotiation<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a ClientConfig,
    pub(crate) links: &'a Links,
    pub(crate) shapers: &'a Shapers,
    /// The class that the connection carries.
    pub(crate) class: ClassId,
    pub(crate) local: LocalEnd<'a>,
    pub(crate) agreed: NegotiatedExtensions,
}

/// The extensions that a client learned from the response of the server.
#[derive(Debug, Default)]
pub(crate) struct NegotiatedExtensions {
    /// The server supports classes.
    pub(crate) classes: bool,
    /// The number of this connection within its session, as the server confirms it.
    pub(crate) member: Option<u8>,
    /// The server takes LINK capsules.
    pub(crate) links: bool,
    /// The congestion controller that the server uses on this connection.
    pub(crate) cc: Option<CongestionControl>,
    /// The prefixes of the server's tunnel network; empty if the server sent none.
    pub(crate) networks: Vec<IpNet>,
    /// The DNS resolvers that the server suggests.
    pub(crate) dns: Vec<IpAddr>,
    /// The server opens TCP connections (CONNECT) to destinations outside its networks.
    pub(crate) streams: bool,
    /// The server opens UDP flows (CONNECT-UDP) to destinations outside its networks.
    pub(crate) udp: bool,
    /// Whether another machine shows the secret of the session.
    pub(crate) sharing: SecretSharing,
}

/// The server's side of a negotiation, while it answers a request.
pub(crate) struct ServerNegotiation<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a ServerConfig,
    pub(crate) connection: &'a mut Connection,
    /// The client, if the request is a CONNECT-IP request that was admitted.
    pub(crate) admitted: Option<AdmittedClient>,
    pub(crate) local: LocalEnd<'a>,
    /// The class of the connection, if the client sent one.
    pub(crate) class: Option<ClassProfile>,
}

/// The parameters of a client that the server admitted to CONNECT-IP.
pub(crate) struct AdmittedClient {
    pub(crate) member: ConnectionNumber,
    pub(crate) limits: UserLimits,
    /// The shapers of the client's links.
    pub(crate) shapers: Shapers,
    /// The prefixes of the server's tunnel network.
    pub(crate) networks: (Ipv4Net, Option<Ipv6Net>),
    /// Whether another machine shows the secret of the session.
    pub(crate) sharing: SecretSharing,
}

/// Returns the extensions of CONNECT-IP requests, or those of other requests.
fn all(of: TunnelMode) -> impl Iterator<Item = &'static Extension> {
    let of_packets = if of == TunnelMode::Packets { PACKET_EXTENSIONS } else { &[] };
    of_packets.iter().chain(COMMON_EXTENSIONS)
}

/// Returns the header fields that a client adds to a request: names and values.
pub(crate) fn request_fields(
    of: TunnelMode,
    config: &ClientConfig,
    member: Option<ConnectionNumber>,
) -> Vec<(String, String)> {
    let offered = all(of).filter_map(|extension| {
        let value = match &extension.negotiation {
            Negotiation::Context { id, wanted, .. } => wanted(config).then(|| id.to_string()),
            Negotiation::Value { offer, .. } => offer(config, member),
        };
        Some((extension.field.to_owned(), value?))
    });
    offered.collect()
}

impl<'a> ClientNegotiation<'a> {
    /// Switches on the extensions that the client offered and the server accepts; `of` is what the request
    /// was for.
    pub(crate) fn agree(mut self, of: TunnelMode, headers: &Headers) -> NegotiatedExtensions {
        for extension in all(of) {
            let Some(answer) = headers.single(extension.field) else { continue };
            match &extension.negotiation {
                Negotiation::Context { id, wanted, start } => {
                    if wanted(self.config) && structured::integer(answer) == Some(*id) {
                        start(&mut self.local, *id);
                    }
                }
                Negotiation::Value { agree, .. } => agree(&mut self, answer),
            }
        }
        self.agreed
    }
}

impl ServerNegotiation<'_> {
    /// Switches on the extensions that the client offers and adds their fields to the response. Returns the
    /// class of the connection, if the client sent one.
    pub(crate) fn agree(mut self, headers: &Headers, answer: &mut Headers) -> Option<ClassProfile> {
        let of = if self.admitted.is_some() { TunnelMode::Packets } else { TunnelMode::RelaysOnly };
        let mut contexts = Vec::new();
        for extension in all(of) {
            let offer = headers.single(extension.field);
            let value = match &extension.negotiation {
                Negotiation::Context { start, .. } => {
                    let context =
                        offer.and_then(client_context_id).filter(|context| !contexts.contains(context));
                    let started = context.filter(|context| start(&mut self.local, *context));
                    contexts.extend(started);
                    started.map(|context| context.to_string())
                }
                Negotiation::Value { answer, .. } => answer(&mut self, offer),
            };
            if let Some(value) = value {
                answer.push(extension.field, value);
            }
        }
        self.class
    }
}

/// Returns the number of a connection within its session; `None` if the field is malformed. A malformed field
/// must not count as absent, or the connection would replace the session's initial connection.
pub(crate) fn member_of(headers: &Headers) -> Option<ConnectionNumber> {
    if headers.value(MEMBER_FIELD).is_none() {
        return Some(ConnectionNumber::INITIAL);
    }
    let number = structured::integer(headers.single(MEMBER_FIELD)?)?;
    ConnectionNumber::new(u8::try_from(number).ok()?)
}

/// Returns the process of a client, if it says which; a malformed field counts as absent.
pub(crate) fn instance_of(headers: &Headers) -> Option<ClientInstance> {
    parse_instance(headers.single(INSTANCE_FIELD)?)
}

fn parse_instance(value: &[u8]) -> Option<ClientInstance> {
    session_header::parse(value)?.try_into().ok()
}

/// Parses whether another machine shows the secret of the session.
fn sharing_of(answer: &[u8]) -> Option<SecretSharing> {
    match structured::token(answer)?.as_ref() {
        KEPT => Some(SecretSharing::Kept),
        MOVED => Some(SecretSharing::Moved),
        _ => None,
    }
}

/// Adds to a response that refuses CONNECT-IP the fields which say that CONNECT and CONNECT-UDP work.
pub(crate) fn announce_flow_requests(answer: &mut Headers) {
    answer.push(STREAMS_FIELD, SF_TRUE);
    answer.push(UDP_FIELD, SF_TRUE);
}

/// Whether a response that refuses CONNECT-IP says that CONNECT works.
pub(crate) fn announces_flow_requests(headers: &Headers) -> bool {
    headers.single(STREAMS_FIELD).is_some_and(is_true)
}

/// Parses a context ID that a client may allocate: even (RFC 9484 §6), and not 0, the context of plain
/// packets.
fn client_context_id(value: &[u8]) -> Option<u64> {
    structured::integer(value).filter(|context| *context > 0 && context.is_multiple_of(2))
}

fn cc_of(value: &[u8]) -> Option<CongestionControl> {
    structured::token(value)?.parse().ok()
}

/// Parses the scheduler of a client; unknown and missing ones mean the default.
fn scheduler_of(offer: Option<&[u8]>) -> Scheduler {
    offer.and_then(text).and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// How often a client wants to get each packet, at most [`MAX_COPIES`]. Once without a number.
fn copies_of(offer: Option<&[u8]>) -> u8 {
    let copies = offer.and_then(structured::integer).unwrap_or(1);
    u8::try_from(copies).unwrap_or(MAX_COPIES).clamp(1, MAX_COPIES)
}

/// Parses the FEC policy that a client asks for; off if it is malformed.
fn fec_of(offer: Option<&[u8]>) -> Fec {
    offer.and_then(text).and_then(|policy| policy.parse().ok()).unwrap_or_default()
}

/// Parses the networks of a server, at most [`MAX_NETWORKS`]; malformed prefixes are skipped.
fn networks_of(answer: &[u8]) -> Vec<IpNet> {
    let nets = text(answer).unwrap_or_default().split(',');
    nets.filter_map(|net| net.trim().parse().ok()).take(MAX_NETWORKS).collect()
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok()
}

fn is_true(value: &[u8]) -> bool {
    value == SF_TRUE.as_bytes()
}

fn join_list(values: impl Iterator<Item = impl ToString>) -> String {
    values.map(|value| value.to_string()).collect::<Vec<_>>().join(", ")
}

/// Parses a list of resolvers and keeps those that can be behind a server: no loopback, link-local, multicast
/// or unspecified addresses.
fn plausible_resolvers(list: &str) -> Vec<IpAddr> {
    let may_be = |ip: &IpAddr| {
        let is_on_link = match ip {
            IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_on_link)
    };
    let all = list.split(',').filter_map(|ip| Some(ip.trim().parse::<IpAddr>().ok()?.to_canonical()));
    all.filter(may_be).take(MAX_RESOLVERS).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::vectors::{bytes, check_one, hex, number, vectors};

    #[test]
    fn each_extension_has_a_field_and_a_context_of_its_own() {
        let mut fields: Vec<_> = all(TunnelMode::Packets).map(|extension| extension.field).collect();
        fields.sort_unstable();
        fields.dedup();
        assert_eq!(fields.len(), PACKET_EXTENSIONS.len() + COMMON_EXTENSIONS.len());
        assert!(fields.iter().all(|field| field.starts_with("mpvpn-")), "{fields:?}");
        let mut contexts: Vec<_> = all(TunnelMode::Packets)
            .filter_map(|extension| match extension.negotiation {
                Negotiation::Context { id, .. } => Some(id),
                Negotiation::Value { .. } => None,
            })
            .collect();
        contexts.sort_unstable();
        assert_eq!(contexts, [2, 4, 6, 8, 10, 12], "clients allocate even ones, and 0 is taken");
    }

    #[test]
    fn a_server_takes_only_contexts_that_clients_allocate() {
        for (value, context) in
            [("2", Some(2)), ("6;a", Some(6)), ("0", None), ("3", None), ("-2", None), ("x", None)]
        {
            assert_eq!(client_context_id(value.as_bytes()), context, "{value}");
        }
    }

    #[test]
    fn values_of_fields_are_those_of_the_vectors() {
        for vector in vectors(include_str!("../../../../docs/vectors/fields.json")) {
            let field = vector["field"].as_str().unwrap();
            check_one(&vector, |value| parse(field, value), |fields| encode(field, fields));
        }
    }

    fn parse(field: &str, value: &[u8]) -> Result<Value, Value> {
        let absent = json!("absent");
        let list = |list: Vec<String>| Ok(json!(list));
        let (name, value) = match field {
            "mpvpn-session" => {
                ("secret", session_header::parse(value).map(|secret| json!(hex(&secret))).ok_or(absent))
            }
            INSTANCE_FIELD => {
                ("instance", parse_instance(value).map(|instance| json!(hex(&instance))).ok_or(absent))
            }
            SHARED_FIELD => (
                "shared",
                sharing_of(value).map(|sharing| json!(format!("{sharing:?}").to_lowercase())).ok_or(absent),
            ),
            "mpvpn-cc" => ("controller", cc_of(value).map(|cc| json!(cc.to_string())).ok_or(absent)),
            "mpvpn-scheduler" => ("scheduler", Ok(json!(scheduler_of(Some(value)).to_string()))),
            "mpvpn-copies" => ("copies", Ok(json!(copies_of(Some(value))))),
            "mpvpn-fec-policy" => ("policy", Ok(json!(fec_of(Some(value)).to_string()))),
            "mpvpn-links" | STREAMS_FIELD | UDP_FIELD => {
                ("value", is_true(value).then_some(json!(true)).ok_or(absent))
            }
            "mpvpn-networks" => {
                ("networks", list(networks_of(value).iter().map(ToString::to_string).collect()))
            }
            "mpvpn-dns" => (
                "resolvers",
                list(plausible_resolvers(text(value).unwrap()).iter().map(ToString::to_string).collect()),
            ),
            MEMBER_FIELD => {
                let mut headers = Headers::new();
                headers.push(MEMBER_FIELD, value.to_vec());
                let member = member_of(&headers).ok_or(json!({ "status": 400 }))?;
                let (number, class, thread) = (member.number(), member.class().0, member.shard());
                return Ok(json!({ "number": number, "class": class, "thread": thread }));
            }
            _ => ("context_id", client_context_id(value).map(|context| json!(context)).ok_or(absent)),
        };
        value.map(|value| json!({ name: value }))
    }

    fn encode(field: &str, fields: &Value) -> Vec<u8> {
        let text = |name: &str| fields[name].as_str().unwrap().to_owned();
        let list = |name: &str| {
            let list = fields[name].as_array().unwrap();
            join_list(list.iter().map(|value| value.as_str().unwrap()))
        };
        let value = match field {
            "mpvpn-session" => session_header::encode(&bytes(&fields["secret"])).unwrap(),
            INSTANCE_FIELD => session_header::encode(&bytes(&fields["instance"])).unwrap(),
            SHARED_FIELD => text("shared"),
            "mpvpn-cc" => text("controller").parse::<CongestionControl>().unwrap().to_string(),
            "mpvpn-scheduler" => text("scheduler").parse::<Scheduler>().unwrap().to_string(),
            "mpvpn-copies" => fields["copies"].to_string(),
            "mpvpn-fec-policy" => text("policy").parse::<Fec>().unwrap().to_string(),
            "mpvpn-links" | STREAMS_FIELD | UDP_FIELD => SF_TRUE.to_owned(),
            "mpvpn-networks" => list("networks"),
            "mpvpn-dns" => list("resolvers"),
            MEMBER_FIELD => {
                let (shard, class) =
                    (number(&fields["thread"]) as u8, ClassId(number(&fields["class"]) as u8));
                ConnectionNumber::of(shard, class).unwrap().number().to_string()
            }
            context => {
                let kind = all(TunnelMode::Packets)
                    .find(|extension| extension.field == context)
                    .map(|found| &found.negotiation);
                let Some(Negotiation::Context { id, .. }) = kind else { panic!("{context} has no context") };
                id.to_string()
            }
        };
        value.into_bytes()
    }

    #[test]
    fn each_extension_has_a_vector_of_its_field() {
        let fields = vectors(include_str!("../../../../docs/vectors/fields.json"));
        let has =
            |field: &str| field == "mpvpn-class" || fields.iter().any(|vector| vector["field"] == field);
        let missing: Vec<_> =
            all(TunnelMode::Packets).map(|extension| extension.field).filter(|field| !has(field)).collect();
        assert_eq!(missing, [""; 0], "docs/vectors/fields.json; that of classes are in class.json");
    }

    #[test]
    fn a_malformed_connection_number_does_not_count_as_absent() {
        let member = |values: &[&str]| {
            let mut headers = Headers::new();
            values.iter().for_each(|value| headers.push(MEMBER_FIELD, (*value).to_owned()));
            member_of(&headers)
        };
        assert_eq!(member(&[]), Some(ConnectionNumber::INITIAL));
        assert_eq!(member(&["17"]).map(ConnectionNumber::number), Some(17));
        for values in [&["x"][..], &["128"], &["-1"], &["1", "1"]] {
            assert_eq!(member(values), None, "{values:?}");
        }
    }

    #[test]
    fn a_resolver_that_cannot_be_behind_the_server_is_not_believed() {
        let list = "10.0.0.1, fd00::1,127.0.0.53,::1, ::ffff:127.0.0.1,0.0.0.0,224.0.0.1,fe80::1,169.254.1.1,x,9.9.9.9";
        let expected: Vec<IpAddr> = ["10.0.0.1", "fd00::1", "9.9.9.9"].map(|ip| ip.parse().unwrap()).into();
        assert_eq!(plausible_resolvers(list), expected);
        assert_eq!(plausible_resolvers(""), Vec::<IpAddr>::new());
        assert_eq!(plausible_resolvers(&"9.9.9.9,".repeat(1000)).len(), MAX_RESOLVERS);
    }
}
