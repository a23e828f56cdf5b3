//! The extensions beyond the RFCs (docs/protocol.md, "Extensions"): two tables, [`OF_PACKETS`] and [`OF_ALL`], say of each one
//! what a client offers, what a server answers, and what either end switches on.
//!
//! In: the configurations of both ends, the header sections of a request and of its response. Out: the fields to send;
//! what both ends know is switched on at the [`MultipathConnection`], or noted in [`Agreed`]. Always holds: a field that is repeated
//! or does not parse counts as absent; a context ID stands for one extension of a connection at most.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_class::MAX_COPIES;
use mpvpn_masque::{headers::Headers, structured};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, StreamId};
use mpvpn_types::{ClassId, CongestionControl, Fec, Instant};

use super::{
    MultipathConnection, clocks::ClockReports, data_ack::DataAcks, protect::Protection,
    reinjection::Reinjection, sequence::Sequencer,
};
use crate::{
    ClassLimits, ClassProfile, ClientConfig, ConnectionNumber, ServerConfig, TunnelMode, client::Links,
    shapers::Shapers,
};

/// A Boolean of RFC 9651 that is true.
const TRUE: &str = "?1";
const MEMBER: &str = "mpvpn-member";
const STREAMS: &str = "mpvpn-streams";
const UDP: &str = "mpvpn-udp";
/// As many resolvers as a resolver asks (`MAXNS` of resolv.conf(5)).
const MAX_RESOLVERS: usize = 3;
/// As many networks of a server as its client keeps. It has two.
const MAX_NETWORKS: usize = 8;

/// One extension.
struct Extension {
    /// The header field, in requests and responses.
    field: &'static str,
    kind: Kind,
}

/// How both ends agree on an extension.
enum Kind {
    /// By the context ID of its datagrams (an Integer of RFC 9651). The server repeats the field if it takes them.
    Context {
        /// The one that the client offers. Clients allocate even ones (RFC 9484 §6), and 0 is taken.
        id: u64,
        /// Whether the client offers it.
        wanted: fn(&ClientConfig) -> bool,
        /// Switches it on at either end, unless something that it needs is off.
        start: fn(&mut Ends<'_>, u64) -> bool,
    },
    /// By values of its own.
    Value { offer: Offer, answer: Answer, agree: Agree },
}

/// What the client offers.
type Offer = fn(&ClientConfig, Option<ConnectionNumber>) -> Option<String>;
/// Takes what the client offers, if it does, and says what the server answers.
type Answer = fn(&mut AtServer<'_>, Option<&[u8]>) -> Option<String>;
/// Takes the answer.
type Agree = fn(&mut AtClient<'_>, &[u8]);

/// The extensions of requests for packets, each after those that it needs.
const OF_PACKETS: &[Extension] = &[
    // The class of traffic that the connection carries.
    value(
        "mpvpn-class",
        |config, _| config.class.as_ref().map(ClassProfile::header),
        |server, offer| {
            let class = offer.and_then(ClassProfile::parse)?;
            let admitted = server.admitted.as_ref()?;
            let (shapers, id) = (&admitted.shapers, admitted.member.class());
            shapers.set_share(server.now, id, admitted.limits.bound(class.share));
            server.ends.multipath.set_class(Some(&class));
            server.ends.multipath.share_links(shapers.clone(), id);
            server.ends.classes = true;
            server.class = Some(class);
            Some(TRUE.to_owned())
        },
        |client, answer| {
            if is_true(answer) && client.config.class.is_some() {
                client.ends.multipath.share_links(client.shapers.clone(), client.class);
                client.ends.classes = true;
                client.agreed.classes = true;
            }
        },
    ),
    // What the clocks of both ends say, as their classes share links.
    context(
        "mpvpn-clocks",
        12,
        |config| config.class.is_some(),
        |ends, context| {
            let clocks = ends.classes.then(|| ClockReports::new(ends.stream, context, ends.far_clock));
            ends.multipath.clocks = clocks;
            ends.classes
        },
    ),
    // How often each packet is sent, each time over another link (an Integer).
    asked(
        "mpvpn-copies",
        |config, _| (config.copies > 1).then(|| config.copies.to_string()),
        |server, offer| {
            server.ends.copies = copies_of(offer);
            None
        },
    ),
    // Numbered packets.
    context(
        "mpvpn-order",
        2,
        |_| true,
        |ends, context| {
            ends.multipath.recovery.sequencer = Some(Box::new(Sequencer::new(ends.stream, context)));
            ends.multipath.scheduler.set_copies(ends.copies);
            ends.multipath.timer.measure_soon();
            true
        },
    ),
    // How much repair either end sends: `auto`, or packets and packets of repair as in `10+2`.
    asked(
        "mpvpn-fec-policy",
        |config, _| (config.fec != Fec::Off).then(|| config.fec.to_string()),
        |server, offer| {
            server.ends.fec = fec_of(offer);
            None
        },
    ),
    // Groups of numbered packets with repair.
    context(
        "mpvpn-fec",
        10,
        |config| config.fec != Fec::Off,
        |ends, context| {
            let Some(sequencer) = &mut ends.multipath.recovery.sequencer else { return false };
            sequencer.protect(Protection::new(ends.stream, context, ends.fec));
            true
        },
    ),
    // Which of several connections of a session this is (an Integer). What a server does not understand it refuses:
    // see [`member_of`].
    value(
        MEMBER,
        |_, member| member.map(|member| member.number().to_string()),
        |server, offer| offer.and(server.admitted.as_ref()).map(|all| all.member.number().to_string()),
        |client, answer| {
            client.agreed.member = text(answer).and_then(|text| text.trim().parse().ok());
        },
    ),
    // The server's networks, by which clients know who their neighbours are: prefixes as in `10.0.0.0/24, fd00::/64`.
    said(
        "mpvpn-networks",
        |server, _| {
            let (v4, v6) = server.admitted.as_ref()?.networks;
            Some(listed([IpNet::V4(v4)].into_iter().chain(v6.map(IpNet::V6))))
        },
        |client, answer| client.agreed.networks = networks_of(answer),
    ),
];

/// The extensions of any request, likewise. With packets they come after those of packets.
const OF_ALL: &[Extension] = &[
    // The congestion controller that the server is to use on this connection's paths (a Token).
    value(
        "mpvpn-cc",
        |config, _| Some(config.setup.cc().to_string()),
        |server, offer| {
            // The class comes first: it is all that older clients send.
            let of_class = server.class.as_ref().and_then(|class| class.cc);
            let cc = of_class.or_else(|| offer.and_then(cc_of))?;
            server.connection.set_cc(cc);
            Some(cc.to_string())
        },
        |client, answer| client.agreed.cc = cc_of(answer),
    ),
    // How the client spreads packets over paths, and the server is to.
    asked(
        "mpvpn-scheduler",
        |config, _| Some(config.scheduler.to_string()),
        |server, offer| {
            server.ends.multipath.scheduler.set_kind(scheduler_of(offer));
            None
        },
    ),
    // Heartbeats that report what is heard.
    context(
        "mpvpn-heartbeats",
        4,
        |_| true,
        |ends, context| {
            ends.multipath.heartbeats.set_reports(ends.stream, context);
            true
        },
    ),
    // Bytes of streams that were on their way on a path that died come as datagrams.
    context(
        "mpvpn-rescue",
        6,
        |_| true,
        |ends, context| {
            ends.multipath.recovery.reinjection = Some(Box::new(Reinjection::new(ends.stream, context)));
            true
        },
    ),
    // How far streams have come; needs `mpvpn-rescue`.
    context(
        "mpvpn-progress",
        8,
        |_| true,
        |ends, context| {
            let MultipathConnection { recovery, paths, .. } = &mut *ends.multipath;
            if recovery.reinjection.is_some() {
                let acks = DataAcks::new(paths.empty_since(), ends.stream, context);
                recovery.data_acks = Some(Box::new(acks));
            }
            recovery.data_acks.is_some()
        },
    ),
    // LINK capsules, in which the client tells about its links (a Boolean).
    value(
        "mpvpn-links",
        |_, _| Some(TRUE.to_owned()),
        |_, offer| offer.filter(|offer| is_true(offer)).map(|_| TRUE.to_owned()),
        |client, answer| {
            client.agreed.links = is_true(answer);
            if client.agreed.links {
                client.links.apply_policies(client.now, client.ends.multipath, true);
            }
        },
    ),
    // The server makes TCP connections by CONNECT wherever it would translate packets' addresses, which is everywhere
    // but in its networks (a Boolean). With a 501 it means that there are no packets, but such connections.
    said(
        STREAMS,
        |server, _| server.config.offers_streams.then(|| TRUE.to_owned()),
        |client, answer| client.agreed.streams = is_true(answer),
    ),
    // The same of UDP payloads, by CONNECT-UDP.
    said(
        UDP,
        |server, _| server.config.offers_streams.then(|| TRUE.to_owned()),
        |client, answer| client.agreed.udp = is_true(answer),
    ),
    // Resolvers that the server suggests: addresses, the best first, as in `10.0.0.1, fd00::1`.
    said(
        "mpvpn-dns",
        |server, _| Some(listed(server.config.dns.iter())).filter(|dns| !dns.is_empty()),
        |client, answer| client.agreed.dns = suggested(text(answer).unwrap_or_default()),
    ),
];

/// One by a context ID: whether a client offers this one, and what starts it.
const fn context(
    field: &'static str,
    id: u64,
    wanted: fn(&ClientConfig) -> bool,
    start: fn(&mut Ends<'_>, u64) -> bool,
) -> Extension {
    Extension { field, kind: Kind::Context { id, wanted, start } }
}

/// One by values.
const fn value(field: &'static str, offer: Offer, answer: Answer, agree: Agree) -> Extension {
    Extension { field, kind: Kind::Value { offer, answer, agree } }
}

/// One that only the client says.
const fn asked(field: &'static str, offer: Offer, answer: Answer) -> Extension {
    value(field, offer, answer, |_, _| {})
}

/// One that only the server says.
const fn said(field: &'static str, answer: Answer, agree: Agree) -> Extension {
    value(field, |_, _| None, answer, agree)
}

/// What either end switches extensions on with.
pub(crate) struct Ends<'a> {
    multipath: &'a mut MultipathConnection,
    /// The request stream, which the contexts are those of.
    stream: StreamId,
    /// How often this end sends each numbered packet.
    copies: u8,
    /// The repair that this end sends.
    fec: Fec,
    /// Both ends know classes.
    classes: bool,
    /// The number of the far end's clock; it is the same for connections of a session where the clock is.
    far_clock: u8,
}

impl<'a> Ends<'a> {
    pub(crate) fn at_client(
        config: &ClientConfig,
        multipath: &'a mut MultipathConnection,
        stream: StreamId,
    ) -> Self {
        // All classes are at the same thread of the server.
        Self { multipath, stream, copies: config.copies, fec: config.fec, classes: false, far_clock: 0 }
    }

    pub(crate) fn at_server(
        multipath: &'a mut MultipathConnection,
        stream: StreamId,
        member: ConnectionNumber,
    ) -> Self {
        let far_clock = member.shard();
        Self { multipath, stream, copies: 1, fec: Fec::Off, classes: false, far_clock }
    }
}

/// A client that has got an answer.
pub(crate) struct AtClient<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a ClientConfig,
    pub(crate) links: &'a Links,
    pub(crate) shapers: &'a Shapers,
    /// The class that the connection carries.
    pub(crate) class: ClassId,
    pub(crate) ends: Ends<'a>,
    pub(crate) agreed: Agreed,
}

/// What a client knows of its server by the answer.
#[derive(Debug, Default)]
pub(crate) struct Agreed {
    /// It knows classes.
    pub(crate) classes: bool,
    /// Which of a session's connections the server says that this is.
    pub(crate) member: Option<u8>,
    /// It wants to know about the links under the paths.
    pub(crate) links: bool,
    /// The congestion controller that it says it uses on this connection's paths.
    pub(crate) cc: Option<CongestionControl>,
    /// Its networks, if it told.
    pub(crate) networks: Vec<IpNet>,
    /// Resolvers that it suggests.
    pub(crate) dns: Vec<IpAddr>,
    /// It makes TCP connections wherever it would translate packets.
    pub(crate) streams: bool,
    /// It carries UDP payloads there, too.
    pub(crate) udp: bool,
}

/// A server that answers a request.
pub(crate) struct AtServer<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a ServerConfig,
    pub(crate) connection: &'a mut Connection,
    /// What a client is that sends packets.
    pub(crate) admitted: Option<Admitted>,
    pub(crate) ends: Ends<'a>,
    /// The class of the connection, if the client says.
    pub(crate) class: Option<ClassProfile>,
}

/// What a server knows of a client whose packets it takes.
pub(crate) struct Admitted {
    pub(crate) member: ConnectionNumber,
    pub(crate) limits: ClassLimits,
    /// Those of the client's links.
    pub(crate) shapers: Shapers,
    /// The server's.
    pub(crate) networks: (Ipv4Net, Option<Ipv6Net>),
}

/// The extensions of requests for packets, or without them.
fn all(of: TunnelMode) -> impl Iterator<Item = &'static Extension> {
    let of_packets = if of == TunnelMode::Packets { OF_PACKETS } else { &[] };
    of_packets.iter().chain(OF_ALL)
}

/// What a client offers with a request for packets, or without them: fields and values.
pub(crate) fn offers(
    of: TunnelMode,
    config: &ClientConfig,
    member: Option<ConnectionNumber>,
) -> Vec<(String, String)> {
    let offered = all(of).filter_map(|extension| {
        let value = match &extension.kind {
            Kind::Context { id, wanted, .. } => wanted(config).then(|| id.to_string()),
            Kind::Value { offer, .. } => offer(config, member),
        };
        Some((extension.field.to_owned(), value?))
    });
    offered.collect()
}

impl<'a> AtClient<'a> {
    /// Switches on what was offered and the server takes; `of` is what the request was for.
    pub(crate) fn agree(mut self, of: TunnelMode, headers: &Headers) -> Agreed {
        for extension in all(of) {
            let Some(answer) = headers.single(extension.field) else { continue };
            match &extension.kind {
                Kind::Context { id, wanted, start } => {
                    if wanted(self.config) && structured::integer(answer) == Some(*id) {
                        start(&mut self.ends, *id);
                    }
                }
                Kind::Value { agree, .. } => agree(&mut self, answer),
            }
        }
        self.agreed
    }
}

impl AtServer<'_> {
    /// Switches on what a client offers, and puts it into the answer. Returns its class, if it has classes.
    pub(crate) fn agree(mut self, headers: &Headers, answer: &mut Headers) -> Option<ClassProfile> {
        let of = if self.admitted.is_some() { TunnelMode::Packets } else { TunnelMode::RelaysOnly };
        let mut contexts = Vec::new();
        for extension in all(of) {
            let offer = headers.single(extension.field);
            let value = match &extension.kind {
                Kind::Context { start, .. } => {
                    let context = offer.and_then(own_context).filter(|context| !contexts.contains(context));
                    let started = context.filter(|context| start(&mut self.ends, *context));
                    contexts.extend(started);
                    started.map(|context| context.to_string())
                }
                Kind::Value { answer, .. } => answer(&mut self, offer),
            };
            if let Some(value) = value {
                answer.push(extension.field, value);
            }
        }
        self.class
    }
}

/// Which member of its session a connection is; `None` if it cannot be understood. Here a field that
/// does not parse must not count as absent: the connection would take the place of the home.
pub(crate) fn member_of(headers: &Headers) -> Option<ConnectionNumber> {
    if headers.value(MEMBER).is_none() {
        return Some(ConnectionNumber::INITIAL);
    }
    let number = structured::integer(headers.single(MEMBER)?)?;
    ConnectionNumber::new(u8::try_from(number).ok()?)
}

/// Says in an answer without packets that there are TCP connections and UDP payloads instead.
pub(crate) fn announce_flows(answer: &mut Headers) {
    answer.push(STREAMS, TRUE);
    answer.push(UDP, TRUE);
}

/// Whether an answer without packets says so.
pub(crate) fn announces_flows(headers: &Headers) -> bool {
    headers.single(STREAMS).is_some_and(is_true)
}

/// A context that a client may offer: one of its own, and not that of plain packets.
fn own_context(value: &[u8]) -> Option<u64> {
    structured::integer(value).filter(|context| *context > 0 && context.is_multiple_of(2))
}

fn cc_of(value: &[u8]) -> Option<CongestionControl> {
    structured::token(value)?.parse().ok()
}

/// The scheduler of a client; an unknown one and none mean the default.
fn scheduler_of(offer: Option<&[u8]>) -> Scheduler {
    offer.and_then(text).and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// How often a client wants to get each packet, at most [`MAX_COPIES`]. Once without a number.
fn copies_of(offer: Option<&[u8]>) -> u8 {
    let copies = offer.and_then(structured::integer).unwrap_or(1);
    u8::try_from(copies).unwrap_or(MAX_COPIES).clamp(1, MAX_COPIES)
}

/// The repair that a client wants; none if it does not parse.
fn fec_of(offer: Option<&[u8]>) -> Fec {
    offer.and_then(text).and_then(|policy| policy.parse().ok()).unwrap_or_default()
}

/// The networks of a server, at most [`MAX_NETWORKS`]; what is no prefix is skipped.
fn networks_of(answer: &[u8]) -> Vec<IpNet> {
    let nets = text(answer).unwrap_or_default().split(',');
    nets.filter_map(|net| net.trim().parse().ok()).take(MAX_NETWORKS).collect()
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok()
}

fn is_true(value: &[u8]) -> bool {
    value == TRUE.as_bytes()
}

fn listed(values: impl Iterator<Item = impl ToString>) -> String {
    values.map(|value| value.to_string()).collect::<Vec<_>>().join(", ")
}

/// The resolvers of a list that may be somewhere behind a server: none that is this machine, or on one of its links.
fn suggested(list: &str) -> Vec<IpAddr> {
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
    use mpvpn_masque::session_header;
    use serde_json::{Value, json};

    use super::*;
    use crate::vectors::{bytes, check_one, hex, number, vectors};

    #[test]
    fn each_extension_has_a_field_and_a_context_of_its_own() {
        let mut fields: Vec<_> = all(TunnelMode::Packets).map(|extension| extension.field).collect();
        fields.sort_unstable();
        fields.dedup();
        assert_eq!(fields.len(), OF_PACKETS.len() + OF_ALL.len());
        assert!(fields.iter().all(|field| field.starts_with("mpvpn-")), "{fields:?}");
        let mut contexts: Vec<_> = all(TunnelMode::Packets)
            .filter_map(|extension| match extension.kind {
                Kind::Context { id, .. } => Some(id),
                Kind::Value { .. } => None,
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
            assert_eq!(own_context(value.as_bytes()), context, "{value}");
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
            "mpvpn-cc" => ("controller", cc_of(value).map(|cc| json!(cc.to_string())).ok_or(absent)),
            "mpvpn-scheduler" => ("scheduler", Ok(json!(scheduler_of(Some(value)).to_string()))),
            "mpvpn-copies" => ("copies", Ok(json!(copies_of(Some(value))))),
            "mpvpn-fec-policy" => ("policy", Ok(json!(fec_of(Some(value)).to_string()))),
            "mpvpn-links" | STREAMS | UDP => ("value", is_true(value).then_some(json!(true)).ok_or(absent)),
            "mpvpn-networks" => {
                ("networks", list(networks_of(value).iter().map(ToString::to_string).collect()))
            }
            "mpvpn-dns" => {
                ("resolvers", list(suggested(text(value).unwrap()).iter().map(ToString::to_string).collect()))
            }
            MEMBER => {
                let mut headers = Headers::new();
                headers.push(MEMBER, value.to_vec());
                let member = member_of(&headers).ok_or(json!({ "status": 400 }))?;
                let (number, class, thread) = (member.number(), member.class().0, member.shard());
                return Ok(json!({ "number": number, "class": class, "thread": thread }));
            }
            _ => ("context_id", own_context(value).map(|context| json!(context)).ok_or(absent)),
        };
        value.map(|value| json!({ name: value }))
    }

    fn encode(field: &str, fields: &Value) -> Vec<u8> {
        let text = |name: &str| fields[name].as_str().unwrap().to_owned();
        let list = |name: &str| {
            let list = fields[name].as_array().unwrap();
            listed(list.iter().map(|value| value.as_str().unwrap()))
        };
        let value = match field {
            "mpvpn-session" => session_header::encode(&bytes(&fields["secret"])).unwrap(),
            "mpvpn-cc" => text("controller").parse::<CongestionControl>().unwrap().to_string(),
            "mpvpn-scheduler" => text("scheduler").parse::<Scheduler>().unwrap().to_string(),
            "mpvpn-copies" => fields["copies"].to_string(),
            "mpvpn-fec-policy" => text("policy").parse::<Fec>().unwrap().to_string(),
            "mpvpn-links" | STREAMS | UDP => TRUE.to_owned(),
            "mpvpn-networks" => list("networks"),
            "mpvpn-dns" => list("resolvers"),
            MEMBER => {
                let (shard, class) =
                    (number(&fields["thread"]) as u8, ClassId(number(&fields["class"]) as u8));
                ConnectionNumber::of(shard, class).unwrap().number().to_string()
            }
            context => {
                let kind = all(TunnelMode::Packets)
                    .find(|extension| extension.field == context)
                    .map(|found| &found.kind);
                let Some(Kind::Context { id, .. }) = kind else { panic!("{context} has no context") };
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
    fn a_number_of_a_connection_that_is_not_understood_does_not_count_as_absent() {
        let member = |values: &[&str]| {
            let mut headers = Headers::new();
            values.iter().for_each(|value| headers.push(MEMBER, (*value).to_owned()));
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
        assert_eq!(suggested(list), expected);
        assert_eq!(suggested(""), Vec::<IpAddr>::new());
        assert_eq!(suggested(&"9.9.9.9,".repeat(1000)).len(), MAX_RESOLVERS);
    }
}
