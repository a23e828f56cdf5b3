//! Negotiation of the extensions beyond the RFCs, as members of the header field `mpvpn` (docs/protocol.md,
//! "Extensions"). The tables [`PACKET_EXTENSIONS`], [`PATH_EXTENSIONS`] and [`SERVER_EXTENSIONS`] define for
//! each extension its key, what a client offers, what a server answers, and what either end switches on.
//!
//! In: the configurations of both ends, the field of a request and that of its response. Out: the fields to
//! send; negotiated extensions are switched on in the [`MultipathConnection`] or noted in
//! [`NegotiatedExtensions`]. Always holds: unknown keys are ignored, and a member that is malformed counts as
//! absent, but for [`CONNECTION`]; a context ID belongs to at most one extension of a connection.

use std::{net::IpAddr, sync::Arc};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_class::MAX_COPIES;
use mpvpn_masque::{
    extensions::{Extensions, FIELD},
    headers::Headers,
    structured::{
        Member, Typed, integer, parameters, set_parameter, string_member, strings, strings_member,
        token_member,
    },
};
use mpvpn_path::Scheduler;
use mpvpn_quic::{Connection, StreamId};
use mpvpn_types::{ClassId, CongestionControl, Domain, Fec, Instant};

use super::{
    MultipathConnection, clocks::ClockReports, data_ack::DataAcks, protect::Protection,
    reinjection::Reinjection, sequence::Sequencer,
};
use crate::{
    ClassProfile, ClientConfig, ClientInstance, ConnectionNumber, SecretSharing, ServerConfig, SessionSecret,
    TunnelMode, UserLimits, client::Links, shapers::Shapers,
};

/// Keys that are read outside of the tables, too.
const SESSION: &str = "session";
const CONNECTION: &str = "connection";
const INSTANCE: &str = "instance";
const STREAMS: &str = "streams";
const UDP: &str = "udp";
const SITES: &str = "sites";
/// Lengths of a session's secret in bytes. Shorter than 128 bits could be guessed; longer takes memory of the
/// peer and adds no security.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=64;
/// Maximum number of DNS resolvers taken from a server: the C library asks no more (`MAXNS` of
/// resolv.conf(5)).
const MAX_RESOLVERS: usize = 3;
/// Maximum number of networks taken from a server, which bounds memory. A server of this project sends two.
const MAX_NETWORKS: usize = 8;

/// An extension and how it is negotiated.
struct Extension {
    /// The key of its member, in requests and responses.
    key: &'static str,
    negotiation: Negotiation,
}

/// How both ends negotiate an extension.
enum Negotiation {
    /// The member is the context ID of the extension's datagrams (an Integer). A server that supports the
    /// extension repeats it.
    Context {
        /// The context ID that the client offers: even, as clients allocate those (RFC 9484 §6), and not 0.
        id: u64,
        /// Adds parameters to the client's member; `None`: the client does not offer the extension.
        offer: fn(&ClientConfig, Member) -> Option<Member>,
        /// Switches the extension on at either end, as the client's member says; returns false if that is
        /// malformed, or an extension that it needs is off.
        start: fn(&mut LocalEnd<'_>, u64, &Member) -> bool,
    },
    /// The member has a value whose meaning the functions define.
    Value { offer: Offer, answer: Answer, agree: Agree },
}

/// Returns the member that the client sends, if any.
type Offer = fn(&ClientOffer<'_>) -> Option<Member>;
/// Takes the client's member, if it sent one; returns the member that the server answers.
type Answer = fn(&mut ServerNegotiation<'_>, Option<&Member>) -> Option<Member>;
/// Takes the server's member.
type Agree = fn(&mut ClientNegotiation<'_>, &Member);

/// The extensions of CONNECT-IP requests, each after the extensions that it needs.
const PACKET_EXTENSIONS: &[Extension] = &[
    // The secret of the session (a Byte Sequence); that of a request is read by [`secret_of`].
    value(
        SESSION,
        |client| client.secret.filter(|secret| SECRET_BYTES.contains(&secret.len())).map(Member::from),
        |server, _| Some(server.admitted.as_ref()?.secret.to_vec().into()),
        |client, answer| client.agreed.secret = secret_in(answer).map(<[u8]>::to_vec),
    ),
    // The traffic class that the connection carries.
    value(
        "class",
        |client| client.config.class.as_ref()?.member(),
        |server, offer| {
            let class = offer.and_then(ClassProfile::parse)?;
            let admitted = server.admitted.as_ref()?;
            let (shapers, id) = (&admitted.shapers, admitted.number.class());
            shapers.set_share(server.now, id, admitted.limits.bound(class.share));
            server.local.multipath.set_class(Some(&class));
            server.local.multipath.share_links(shapers.clone(), id);
            server.local.classes = true;
            server.class = Some(class);
            Some(true.into())
        },
        |client, answer| {
            if answer.is_true() && client.config.class.is_some() {
                client.local.multipath.share_links(client.shapers.clone(), client.class);
                client.local.classes = true;
                client.agreed.classes = true;
            }
        },
    ),
    // Clock reports, for connections whose classes share links.
    context(
        "clocks",
        12,
        |config, member| config.class.is_some().then_some(member),
        |local, context, _| {
            let clocks = local.classes.then(|| ClockReports::new(local.stream, context, local.peer_clock));
            local.multipath.clocks = clocks;
            local.classes
        },
    ),
    // Numbered packets, and how often each is sent, each time over another link.
    context(
        "order",
        2,
        |config, mut member| {
            if config.copies > 1 {
                set_parameter(&mut member, "copies", config.copies);
            }
            Some(member)
        },
        |local, context, offer| {
            let Some(copies) = copies_of(offer) else { return false };
            local.multipath.recovery.sequencer = Some(Box::new(Sequencer::new(local.stream, context)));
            local.multipath.scheduler.set_copies(copies);
            local.multipath.timer.measure_soon();
            true
        },
    ),
    // FEC groups: numbered packets with repair packets, as many as the parameters say or the sender decides.
    context(
        "fec",
        10,
        |config, mut member| {
            if let Fec::Fixed { data, repair } = config.fec {
                set_parameter(&mut member, "source", data);
                set_parameter(&mut member, "repair", repair);
            }
            (config.fec != Fec::Off).then_some(member)
        },
        |local, context, offer| {
            let (Some(sequencer), Some(fec)) = (&mut local.multipath.recovery.sequencer, fec_of(offer))
            else {
                return false;
            };
            sequencer.protect(Protection::new(local.stream, context, fec));
            true
        },
    ),
    // The number of this connection within its session (an Integer); that of a request is read by
    // [`number_of`].
    value(
        CONNECTION,
        |client| Some(integer(client.number?.number().into()).into()),
        |server, offer| {
            offer?;
            Some(integer(server.admitted.as_ref()?.number.number().into()).into())
        },
        |client, answer| client.agreed.number = number_in(answer),
    ),
    // The process of the client (a Byte Sequence); see [`instance_of`].
    request_only(INSTANCE, |client| Some(client.config.instance?.to_vec().into()), |_, _| None),
    // Whether another machine shows the secret of the session (a Token); only to clients that say which
    // process they are.
    response_only(
        "shared",
        |server, _| token_member(sharing_name(server.admitted.as_ref()?.sharing)?),
        |client, answer| client.agreed.sharing = sharing_in(answer),
    ),
    // The prefixes of the server's tunnel network, in which other clients are (an Inner List of Strings).
    response_only(
        "networks",
        |server, _| {
            let (v4, v6) = server.admitted.as_ref()?.networks;
            Some(strings_member([IpNet::V4(v4)].into_iter().chain(v6.map(IpNet::V6))))
        },
        |client, answer| client.agreed.networks = networks_in(answer),
    ),
    // SITES capsules: the networks behind clients (a Boolean); that of a request is read by
    // [`takes_sites`].
    value(
        SITES,
        |_| Some(true.into()),
        |_, offer| offer.filter(|offer| offer.is_true()).cloned(),
        |client, answer| client.agreed.sites = answer.is_true(),
    ),
];

/// The extensions about the paths of a QUIC connection and its streams, each after the extensions that it
/// needs. They are processed after [`PACKET_EXTENSIONS`].
const PATH_EXTENSIONS: &[Extension] = &[
    // The congestion controller that the client asks the server to use on this connection (a Token).
    value(
        "cc",
        |client| token_member(&client.config.setup.cc().to_string()),
        |server, offer| {
            let cc = offer.and_then(cc_in)?;
            server.connection.set_cc(cc);
            token_member(&cc.to_string())
        },
        |client, answer| client.agreed.cc = cc_in(answer),
    ),
    // The packet scheduler of the client, which the server uses as well (a Token).
    request_only(
        "scheduler",
        |client| token_member(&client.config.scheduler.to_string()),
        |server, offer| {
            server.local.multipath.scheduler.set_kind(scheduler_in(offer));
            None
        },
    ),
    // Heartbeat reports.
    context(
        "heartbeats",
        4,
        |_, member| Some(member),
        |local, context, _| {
            local.multipath.heartbeats.set_reports(local.stream, context);
            true
        },
    ),
    // Reinjection: stream bytes that were in flight on a dead path are sent again as datagrams.
    context(
        "reinjection",
        6,
        |_, member| Some(member),
        |local, context, _| {
            local.multipath.recovery.reinjection = Some(Box::new(Reinjection::new(local.stream, context)));
            true
        },
    ),
    // DataAck reports; they need `reinjection`.
    context(
        "data-ack",
        8,
        |_, member| Some(member),
        |local, context, _| {
            let MultipathConnection { recovery, paths, .. } = &mut *local.multipath;
            if recovery.reinjection.is_some() {
                let acks = DataAcks::new(paths.empty_since, local.stream, context);
                recovery.data_acks = Some(Box::new(acks));
            }
            recovery.data_acks.is_some()
        },
    ),
    // LINK capsules, in which the client describes its links (a Boolean).
    value(
        "links",
        |_| Some(true.into()),
        |_, offer| offer.filter(|offer| offer.is_true()).cloned(),
        |client, answer| {
            client.agreed.links = answer.is_true();
            if client.agreed.links {
                client.links.apply_policies(client.now, client.local.multipath, true);
            }
        },
    ),
];

/// The extensions of all requests that say what else the server does.
const SERVER_EXTENSIONS: &[Extension] = &[
    // The server opens TCP connections by CONNECT to all destinations outside its own networks, where it
    // would translate addresses of packets (a Boolean). In a 501 response: CONNECT works, CONNECT-IP
    // does not.
    response_only(
        STREAMS,
        |server, _| server.config.offers_streams.then(|| true.into()),
        |client, answer| client.agreed.streams = answer.is_true(),
    ),
    // The same for UDP flows, by CONNECT-UDP.
    response_only(
        UDP,
        |server, _| server.config.offers_streams.then(|| true.into()),
        |client, answer| client.agreed.udp = answer.is_true(),
    ),
    // DNS resolvers that the server suggests, most preferred first (an Inner List of Strings).
    response_only(
        "dns",
        |server, _| (!server.config.dns.is_empty()).then(|| strings_member(&server.config.dns)),
        |client, answer| client.agreed.dns = plausible_resolvers(answer),
    ),
    // The domain below which these resolvers know names of their own (a String).
    response_only(
        "dns-domain",
        |server, _| string_member(server.config.dns_domain.as_ref()?.as_str()),
        |client, answer| client.agreed.dns_domain = domain_in(answer).map(Arc::new),
    ),
];

/// An extension that is negotiated by a context ID.
const fn context(
    key: &'static str,
    id: u64,
    offer: fn(&ClientConfig, Member) -> Option<Member>,
    start: fn(&mut LocalEnd<'_>, u64, &Member) -> bool,
) -> Extension {
    Extension { key, negotiation: Negotiation::Context { id, offer, start } }
}

/// An extension that is negotiated by values.
const fn value(key: &'static str, offer: Offer, answer: Answer, agree: Agree) -> Extension {
    Extension { key, negotiation: Negotiation::Value { offer, answer, agree } }
}

/// An extension whose member only the client sends.
const fn request_only(key: &'static str, offer: Offer, answer: Answer) -> Extension {
    value(key, offer, answer, |_, _| {})
}

/// An extension whose member only the server sends.
const fn response_only(key: &'static str, answer: Answer, agree: Agree) -> Extension {
    value(key, |_| None, answer, agree)
}

/// The state of this end, in which extensions are switched on.
pub(crate) struct LocalEnd<'a> {
    multipath: &'a mut MultipathConnection,
    /// The request stream to which the context IDs belong.
    stream: StreamId,
    /// Whether both ends negotiated classes.
    classes: bool,
    /// Number of the peer's clock within the session: connections to the same thread share a clock.
    peer_clock: u8,
}

impl<'a> LocalEnd<'a> {
    /// `peer_thread`: the number of the peer's thread that serves the connection. All classes of a client
    /// thread are served by the same thread of the server, which is number 0 to the client.
    pub(crate) fn new(multipath: &'a mut MultipathConnection, stream: StreamId, peer_thread: u8) -> Self {
        Self { multipath, stream, classes: false, peer_clock: peer_thread }
    }
}

/// The client's side of a negotiation, when it sends a request.
pub(crate) struct ClientOffer<'a> {
    pub(crate) config: &'a ClientConfig,
    /// The number of the connection within its session, if there may be several.
    pub(crate) number: Option<ConnectionNumber>,
    /// The secret of the session to resume or join.
    pub(crate) secret: Option<&'a [u8]>,
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
    /// The secret of the session, if the server keeps sessions.
    pub(crate) secret: Option<Vec<u8>>,
    /// The server supports classes.
    pub(crate) classes: bool,
    /// The number of this connection within its session, as the server confirms it.
    pub(crate) number: Option<ConnectionNumber>,
    /// The server takes LINK capsules.
    pub(crate) links: bool,
    /// The congestion controller that the server uses on this connection.
    pub(crate) cc: Option<CongestionControl>,
    /// The prefixes of the server's tunnel network; empty if the server sent none.
    pub(crate) networks: Vec<IpNet>,
    /// The DNS resolvers that the server suggests.
    pub(crate) dns: Vec<IpAddr>,
    /// The domain below which these know names of their own.
    pub(crate) dns_domain: Option<Arc<Domain>>,
    /// The server opens TCP connections (CONNECT) to destinations outside its networks.
    pub(crate) streams: bool,
    /// The server opens UDP flows (CONNECT-UDP) to destinations outside its networks.
    pub(crate) udp: bool,
    /// Whether another machine shows the secret of the session.
    pub(crate) sharing: SecretSharing,
    /// The server says which networks are behind clients.
    pub(crate) sites: bool,
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
    pub(crate) secret: SessionSecret,
    pub(crate) number: ConnectionNumber,
    pub(crate) limits: UserLimits,
    /// The shapers of the client's links.
    pub(crate) shapers: Shapers,
    /// The prefixes of the server's tunnel network.
    pub(crate) networks: (Ipv4Net, Option<Ipv6Net>),
    /// Whether another machine shows the secret of the session.
    pub(crate) sharing: SecretSharing,
}

/// The extensions of CONNECT-IP requests, or those of other requests, without those that are `disabled`.
fn all(of: TunnelMode, disabled: &[&str]) -> impl Iterator<Item = &'static Extension> {
    let of_packets = if of == TunnelMode::Packets { PACKET_EXTENSIONS } else { &[] };
    let all = of_packets.iter().chain(PATH_EXTENSIONS).chain(SERVER_EXTENSIONS);
    all.filter(move |extension| !disabled.contains(&extension.key))
}

/// Whether an extension works through a gateway, which makes a QUIC connection of its own to the server:
/// those about paths do not.
pub fn passes_gateways(key: &str) -> bool {
    PACKET_EXTENSIONS.iter().chain(SERVER_EXTENSIONS).any(|extension| extension.key == key)
}

impl ClientOffer<'_> {
    /// The value of the field of a request; `of` is what the request is for.
    pub(crate) fn field(&self, of: TunnelMode) -> String {
        let mut offered = Extensions::default();
        for extension in all(of, self.config.disabled_extensions) {
            let member = match &extension.negotiation {
                Negotiation::Context { id, offer, .. } => offer(self.config, integer(*id).into()),
                Negotiation::Value { offer, .. } => offer(self),
            };
            if let Some(member) = member {
                offered.set(extension.key, member);
            }
        }
        offered.value()
    }
}

impl<'a> ClientNegotiation<'a> {
    /// Switches on the extensions that the client offered and the server accepts; `of` is what the request
    /// was for.
    pub(crate) fn agree(mut self, of: TunnelMode, headers: &Headers) -> NegotiatedExtensions {
        let Some(answered) = Extensions::of(headers) else { return self.agreed };
        tracing::debug!(version = answered.version(), keys = ?answered, "the server accepts extensions");
        for extension in all(of, self.config.disabled_extensions) {
            let Some(answer) = answered.get(extension.key) else { continue };
            match &extension.negotiation {
                Negotiation::Context { id, offer, start } => {
                    if let Some(offered) = offer(self.config, integer(*id).into())
                        && answer.integer() == Some(*id)
                    {
                        start(&mut self.local, *id, &offered);
                    }
                }
                Negotiation::Value { agree, .. } => agree(&mut self, answer),
            }
        }
        self.agreed
    }
}

impl ServerNegotiation<'_> {
    /// Switches on the extensions that the client offers and adds the field to the response. A client that
    /// sent no field gets none. Returns the class of the connection, if the client sent one.
    pub(crate) fn agree(
        mut self,
        offered: Option<&Extensions>,
        response: &mut Headers,
    ) -> Option<ClassProfile> {
        let offered = offered?;
        let of = if self.admitted.is_some() { TunnelMode::Packets } else { TunnelMode::RelaysOnly };
        let mut contexts = Vec::new();
        let mut answered = Extensions::default();
        for extension in all(of, self.config.disabled_extensions) {
            let offer = offered.get(extension.key);
            let member = match &extension.negotiation {
                Negotiation::Context { start, .. } => {
                    let is_free = |context: &u64| !contexts.contains(context);
                    offer
                        .and_then(|offer| {
                            let context = client_context_id(offer).filter(is_free)?;
                            start(&mut self.local, context, offer).then_some(context)
                        })
                        .inspect(|context| contexts.push(*context))
                        .map(|context| integer(context).into())
                }
                Negotiation::Value { answer, .. } => answer(&mut self, offer),
            };
            if let Some(member) = member {
                answered.set(extension.key, member);
            }
        }
        tracing::debug!(version = offered.version(), ?offered, ?answered, "extensions of a client");
        response.push(FIELD, answered.value());
        self.class
    }
}

/// The extensions that a client offers to this server.
pub(crate) fn offered_to(config: &ServerConfig, headers: &Headers) -> Option<Extensions> {
    let mut offered = Extensions::of(headers)?;
    offered.retain(|key| !config.disabled_extensions.contains(&key));
    Some(offered)
}

/// The secret of the session that a client shows.
pub(crate) fn secret_of(offered: Option<&Extensions>) -> Option<SessionSecret> {
    secret_in(offered?.get(SESSION)?)?.try_into().ok()
}

fn secret_in(member: &Member) -> Option<&[u8]> {
    member.bytes().filter(|secret| SECRET_BYTES.contains(&secret.len()))
}

/// Returns the number of a connection within its session; `None` if its member is malformed. A malformed one
/// must not count as absent, or the connection would replace the session's initial connection.
pub(crate) fn number_of(offered: Option<&Extensions>) -> Option<ConnectionNumber> {
    match offered.and_then(|offered| offered.get(CONNECTION)) {
        Some(member) => number_in(member),
        None => Some(ConnectionNumber::INITIAL),
    }
}

fn number_in(member: &Member) -> Option<ConnectionNumber> {
    ConnectionNumber::new(u8::try_from(member.integer()?).ok()?)
}

/// Returns the process of a client, if it says which.
pub(crate) fn instance_of(offered: Option<&Extensions>) -> Option<ClientInstance> {
    offered?.get(INSTANCE)?.bytes()?.try_into().ok()
}

/// Whether a client takes SITES capsules.
pub(crate) fn takes_sites(offered: Option<&Extensions>) -> bool {
    offered.and_then(|offered| offered.get(SITES)).is_some_and(Member::is_true)
}

/// The Token for a secret that another machine shows, too.
fn sharing_name(sharing: SecretSharing) -> Option<&'static str> {
    match sharing {
        SecretSharing::Alone => None,
        SecretSharing::Kept => Some("kept"),
        SecretSharing::Moved => Some("moved"),
    }
}

fn sharing_in(answer: &Member) -> SecretSharing {
    let known = [SecretSharing::Kept, SecretSharing::Moved];
    known.into_iter().find(|sharing| sharing_name(*sharing) == answer.token()).unwrap_or_default()
}

/// The field of a response that refuses CONNECT-IP and says that CONNECT and CONNECT-UDP work.
pub(crate) fn announce_flow_requests(response: &mut Headers) {
    let mut answered = Extensions::default();
    [STREAMS, UDP].into_iter().for_each(|key| answered.set(key, true.into()));
    response.push(FIELD, answered.value());
}

/// Whether a response that refuses CONNECT-IP says that CONNECT works.
pub(crate) fn announces_flow_requests(headers: &Headers) -> bool {
    Extensions::of(headers).is_some_and(|answered| answered.get(STREAMS).is_some_and(Member::is_true))
}

/// Parses a context ID that a client may allocate: even (RFC 9484 §6), and not 0, the context of plain
/// packets.
fn client_context_id(offer: &Member) -> Option<u64> {
    offer.integer().filter(|context| *context > 0 && context.is_multiple_of(2))
}

fn cc_in(member: &Member) -> Option<CongestionControl> {
    member.token()?.parse().ok()
}

/// Parses the scheduler of a client; unknown and missing ones mean the default.
fn scheduler_in(offer: Option<&Member>) -> Scheduler {
    offer.and_then(Member::token).and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// How often each numbered packet is sent, at most [`MAX_COPIES`]. Once without the parameter; `None` if it
/// is malformed.
fn copies_of(offer: &Member) -> Option<u8> {
    let Some(copies) = parameters(offer).get("copies") else { return Some(1) };
    let copies = copies.integer().filter(|copies| *copies > 0)?;
    Some(u8::try_from(copies).unwrap_or(MAX_COPIES).min(MAX_COPIES))
}

/// How much repair both ends send. Without parameters each end decides; `None` if they are malformed.
fn fec_of(offer: &Member) -> Option<Fec> {
    let number = |key: &str, max| parameters(offer).get(key).map(|value| value.integer_in(1, max));
    match (number("source", Fec::MAX_DATA), number("repair", Fec::MAX_REPAIR)) {
        (None, None) => Some(Fec::Auto),
        (source, repair) => Some(Fec::Fixed { data: source??, repair: repair?? }),
    }
}

/// Parses the networks of a server, at most [`MAX_NETWORKS`]; malformed prefixes are skipped.
fn networks_in(answer: &Member) -> Vec<IpNet> {
    strings(answer).filter_map(|net| net.parse().ok()).take(MAX_NETWORKS).collect()
}

/// Parses resolvers and keeps those that can be behind a server: no loopback, link-local, multicast or
/// unspecified addresses.
fn plausible_resolvers(answer: &Member) -> Vec<IpAddr> {
    let may_be = |ip: &IpAddr| {
        let is_on_link = match ip {
            IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_on_link)
    };
    let all = strings(answer).filter_map(|ip| Some(ip.parse::<IpAddr>().ok()?.to_canonical()));
    all.filter(may_be).take(MAX_RESOLVERS).collect()
}

/// Parses a domain; one that names a whole top-level domain would take the names of others.
fn domain_in(answer: &Member) -> Option<Domain> {
    answer.string()?.parse().ok().filter(|domain: &Domain| domain.as_str().contains('.'))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{field_of, only_member};
