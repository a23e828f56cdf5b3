//! Events: what changed in a server or client, and why. One type is the line of the log, what `mpvpn events`
//! prints, and what the local API answers.
//!
//! In: events of all threads, reported where they happen ([`EventSender`]). Out: a log line each, and the
//! last 1,000 events of each kind ([`EventLog`]) as lines of JSON. Always holds: reporting never blocks; text
//! that a peer chose is bounded and contains no control characters ([`ShortText`]); names of kinds, events
//! and fields are added to, never renamed.

mod channel;
mod log;
mod outages;
mod text;

use std::net::{IpAddr, SocketAddr};

use derive_more::Display;
use ipnet::IpNet;
use mpvpn_types::word_enum;
use schemars::JsonSchema;
use serde::Serialize;

use crate::NetworkState;
pub use channel::{EventReader, EventReceiver, EventSender, SharedEventLog, event_channel};
pub use log::{Entry, EventLog, LoggedEvent, MAX_ENTRIES_PER_KIND};
use mpvpn_input::short_text::ShortText;
use text::*;

word_enum! {
    /// The subject of an event.
    #[derive(PartialOrd, Ord)]
    pub enum EventKind {
        /// A link of this machine.
        #[default]
        Link = "link",
        /// A QUIC path.
        Path = "path",
        /// Whether a link uses QUIC over UDP or TCP.
        Transport = "transport",
        /// The number of paths of a link.
        Pipes = "pipes",
        /// A class of traffic.
        Class = "class",
        /// The capacity of a link.
        Capacity = "capacity",
        /// The session of a client, or the clients of a server.
        Session = "session",
        /// The kill switch of a client.
        KillSwitch = "kill_switch",
        /// The certificates of a server.
        Certificate = "certificate",
        /// The configuration and signals to this process.
        Configuration = "configuration",
        /// Browsers at the dashboard.
        Dashboard = "dashboard",
        /// The event log.
        Log = "log",
    }
}

/// The name of a client at a server.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[display(
    "{}{}",
    if user.is_empty() { "a client" } else { user.as_str() },
    prefixed(" (", address.map(|address| format!("{address})")))
)]
pub struct ClientName {
    /// The user.
    pub user: ShortText,
    /// The first tunnel address of its session, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
}

/// The name of a QUIC path, as in the status.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[display("{}{}", client_prefix(client), path_of_link(link, path))]
pub struct PathName {
    /// The client; only at a server.
    #[serde(flatten)]
    pub client: Option<ClientName>,
    /// The class of traffic.
    pub class: ShortText,
    /// The link; left out at a server, which does not know it.
    #[serde(skip_serializing_if = "ShortText::is_empty")]
    pub link: ShortText,
    /// `class/link/number`, or `class/link/tcp`.
    pub path: ShortText,
}

/// Why a path failed.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum PathFailure {
    /// Nothing arrived on the path.
    #[display("nothing received for {silence_ms} ms, {} missed", counted(u64::from(*heartbeats), "heartbeat"))]
    Silent {
        /// Time since the last arrival (ms).
        silence_ms: u64,
        /// Heartbeats missed in that time.
        heartbeats: u32,
    },
    /// The kernel reports that the link cannot carry packets.
    #[display("no carrier")]
    NoCarrier,
    /// The far end reports that it receives nothing on the path.
    #[display("the far end receives nothing, reported {silence_ms} ms ago")]
    Unheard {
        /// Time since its first such report (ms).
        silence_ms: u64,
    },
}

/// Why the capacity of a link changed.
#[derive(Clone, Copy, Debug, Display, PartialEq, JsonSchema, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum CapacityReason {
    /// It was configured.
    #[display("as configured")]
    Given,
    /// First measurement: packets were queued and the delivery rate no longer grew.
    #[display("first measurement")]
    Measured,
    /// Probing: no queueing delay at this rate.
    #[display("no queueing delay")]
    NoQueue,
    /// Queueing delay on the way to the far end.
    #[display("queueing delay of {queue_ms:.1} ms")]
    Queue {
        /// The delay (ms).
        queue_ms: f64,
    },
}

/// The transport of a link.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// QUIC over UDP.
    #[display("QUIC over UDP")]
    Quic,
    /// QUIC inside HTTP/2 over TCP.
    #[display("QUIC inside TCP")]
    Tcp,
}

/// A change, and why it happened. `link` is the name of an interface, `shard` the number of a thread from 0.
#[derive(Clone, Debug, Display, PartialEq, JsonSchema, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the variant describes its fields; types and names say the rest")]
pub enum Event {
    /// A link can carry packets, or its addresses changed.
    #[display("{link} is up: {}", comma_separated(addresses))]
    LinkUp { link: ShortText, addresses: Vec<IpAddr> },
    /// A link cannot carry packets any more.
    #[display("{link} is down: {reason}")]
    LinkDown { link: ShortText, reason: ShortText },
    /// A link cannot be used yet.
    #[display("{link} cannot be used yet: {reason}")]
    LinkUnusable { link: ShortText, reason: ShortText },
    /// `mpvpn link set` changed a link.
    #[display("{link} was changed: {change}")]
    LinkSet { link: ShortText, change: ShortText },
    /// A link reached its monthly quota (bytes) and is not used until this day.
    #[display("{link} reached its quota of {}; not used until {until}", bytes(*quota_bytes))]
    QuotaReached { link: ShortText, quota_bytes: u64, until: ShortText },
    /// A link is below its quota again.
    #[display("{link} is below its quota again")]
    QuotaRenewed { link: ShortText },
    /// A path was validated.
    #[display("{path} opened{}", prefixed(" to ", *remote))]
    PathOpened {
        #[serde(flatten)]
        path: PathName,
        #[serde(skip_serializing_if = "Option::is_none")]
        remote: Option<SocketAddr>,
    },
    /// A path failed. Its data in flight is reinjected on other paths: `reinjected_packets` packets and
    /// `reinjected_stream_bytes` bytes of streams. `working_paths` is the number of other paths that work.
    #[display("{path} failed: {failure}; {}{}", reinjected(*reinjected_packets, *reinjected_stream_bytes),
        other_paths(*working_paths))]
    PathFailed {
        #[serde(flatten)]
        path: PathName,
        #[serde(flatten)]
        failure: PathFailure,
        reinjected_packets: u64,
        reinjected_stream_bytes: u64,
        working_paths: u64,
    },
    /// A path works again, `failed_ms` ms after it failed.
    #[display("{path} recovered after {}", milliseconds(*failed_ms))]
    PathRecovered {
        #[serde(flatten)]
        path: PathName,
        failed_ms: u64,
    },
    /// A path left standby and carries data.
    #[display("{path} carries data")]
    PathActive {
        #[serde(flatten)]
        path: PathName,
    },
    /// A path that works went to standby.
    #[display("{path} on standby: {reason}")]
    PathStandby {
        #[serde(flatten)]
        path: PathName,
        reason: ShortText,
    },
    /// A path was closed while it worked.
    #[display("{path} closed")]
    PathClosed {
        #[serde(flatten)]
        path: PathName,
    },
    /// A link uses another transport. The reason is empty where UDP works as it should.
    #[display("{link}: transport {transport}{}{}", reason_suffix(reason), thread_suffix(*shard))]
    TransportChanged { link: ShortText, transport: Transport, reason: ShortText, shard: u8 },
    /// A TCP connection over a link was established.
    #[display("{link}: {} connection established, {local} to {remote}{}",
        if *multipath { "Multipath TCP" } else { "TCP" }, thread_suffix(*shard))]
    TcpConnected { link: ShortText, local: SocketAddr, remote: SocketAddr, multipath: bool, shard: u8 },
    /// A TCP connection over a link could not be established. `failures` is the number of failures before it;
    /// after the first, the level is DEBUG.
    #[display("{link}: no TCP connection: {reason}{}", thread_suffix(*shard))]
    TcpFailed { link: ShortText, reason: ShortText, failures: u32, shard: u8 },
    /// A TCP connection over a link was closed.
    #[display("{link}: TCP connection closed: {reason}{}", thread_suffix(*shard))]
    TcpClosed { link: ShortText, reason: ShortText, shard: u8 },
    /// The number of paths of a link changed.
    #[display("{link} has {}: {reason}", counted(u64::from(*pipes), "pipe"))]
    PipesChanged { link: ShortText, pipes: u8, reason: ShortText },
    /// A packet belongs to a class without a connection, so one is established.
    #[display("class {class} is used: connecting")]
    ClassUsed { class: ShortText },
    /// The connection of a class is established; at a server, that of this client.
    #[display("{}class {class} is connected", client_prefix(client))]
    ClassConnected {
        #[serde(flatten)]
        client: Option<ClientName>,
        class: ShortText,
    },
    /// A class had no traffic for ten minutes, or no class had for a minute, so its connection was closed.
    #[display("class {class} is idle: connection closed")]
    ClassIdle { class: ShortText },
    /// The connection of a class was lost. The class `default` carries its traffic meanwhile. At a server the
    /// level is INFO.
    #[display("{}class {class} lost its connection: {reason}", client_prefix(client))]
    ClassDisconnected {
        #[serde(flatten)]
        client: Option<ClientName>,
        class: ShortText,
        reason: ShortText,
    },
    /// The server refuses a connection for a class. The class `default` carries its traffic.
    #[display("class {class} gets no connection of its own, the default one carries it: {reason}")]
    ClassRefused { class: ShortText, reason: ShortText },
    /// The capacity of a link changed; at a server, of the link under the path `link` of this client.
    /// Reported when it differs by a factor of 1.3 from the last reported capacity.
    #[display("{}{link}: capacity {}{}: {reason}", client_prefix(client), rate(*bps),
        prefixed(", before ", before_bps.map(rate)))]
    CapacityChanged {
        #[serde(flatten)]
        client: Option<ClientName>,
        link: ShortText,
        #[serde(skip_serializing_if = "Option::is_none")]
        before_bps: Option<u64>,
        bps: u64,
        #[serde(flatten)]
        reason: CapacityReason,
    },
    /// A client starts to connect.
    #[display("connecting to {server}")]
    Connecting { server: ShortText },
    /// A handshake over a link failed.
    #[display("could not connect over {link} (class {class}): {reason}")]
    ConnectFailed { link: ShortText, class: ShortText, reason: ShortText },
    /// The tunnel works, with these addresses. `resumed`: the server resumed the session.
    #[display("connected to {server}: {}{}", comma_separated(addresses), resumed_suffix(*resumed))]
    Connected {
        server: ShortText,
        #[schemars(with = "Vec<String>")]
        addresses: Vec<IpNet>,
        resumed: bool,
    },
    /// The server assigned other addresses or advertised other routes.
    #[display("addresses or routes changed: {}", comma_separated(addresses))]
    AddressesChanged {
        #[schemars(with = "Vec<String>")]
        addresses: Vec<IpNet>,
    },
    /// Whether a network behind a client is reached there has changed; at a server, behind a client of this
    /// user. If it is refused, the level is WARN.
    #[display("{}network {network} {}: {state}{}", prefixed("", user.as_ref().map(|user| format!("{user}: "))),
        if user.is_some() { "behind a client" } else { "behind this machine" }, reason_suffix(reason))]
    NetworkChanged {
        #[serde(skip_serializing_if = "Option::is_none")]
        user: Option<ShortText>,
        #[schemars(with = "String")]
        network: IpNet,
        state: NetworkState,
        reason: ShortText,
    },
    /// The MTU of the tunnel (bytes) changed.
    #[display("tunnel MTU {mtu}")]
    MtuChanged { mtu: u64 },
    /// A client lost its connection; it connects again.
    #[display("connection lost: {reason}; connecting again")]
    Disconnected { reason: ShortText },
    /// The server knows a client and refuses it; the client asks again.
    #[display("the server refuses this client: {reason}; ask who runs the server")]
    Refused { reason: ShortText },
    /// Nothing of the server arrives at a client any more, on any link.
    #[display("no answer from the server on any link")]
    NoAnswer {},
    /// Something of the server arrives at a client again.
    #[display("the server answers again")]
    AnswersAgain {},
    /// The server sent GOAWAY on the connection of this class.
    #[display("the server is about to stop (class {class})")]
    ServerStopping { class: ShortText },
    /// A client with several servers uses another one; connections in the tunnel end.
    #[display("the server is {to} now, no longer {from}: {reason}; this ends {}", counted(*flows, "connection"))]
    ServerChanged { from: ShortText, to: ShortText, reason: ShortText, flows: u64 },
    /// The name of the server was resolved.
    #[display("{server} has the addresses {}", comma_separated(addresses))]
    ServerResolved { server: ShortText, addresses: Vec<SocketAddr> },
    /// The name of the server could not be resolved.
    #[display("cannot resolve {server}: {reason}")]
    ResolveFailed { server: ShortText, reason: ShortText },
    /// The connection of a further thread of a client was established or lost.
    #[display("thread {shard} {}", shard_change(*connected, reason))]
    ShardChanged {
        shard: u8,
        connected: bool,
        #[serde(skip_serializing_if = "ShortText::is_empty")]
        reason: ShortText,
    },
    /// A client connected to this server. `resumed`: it resumed a session.
    #[display("{client} connected{}", resumed_suffix(*resumed))]
    ClientConnected {
        #[serde(flatten)]
        client: ClientName,
        resumed: bool,
    },
    /// A client disconnected from this server.
    #[display("{client} disconnected: {reason}")]
    ClientDisconnected {
        #[serde(flatten)]
        client: ClientName,
        reason: ShortText,
    },
    /// This server refused a request with this HTTP status.
    #[display("request refused with status {status}: {reason}")]
    RequestRefused { status: u16, reason: ShortText },
    /// Two machines show the secret of one session, because the state folder of a client was copied: the
    /// later gets a session and addresses of its own. `kept`: this client, or at a server the client, is
    /// the one that keeps its addresses.
    #[display("{}", shared_secret(client.as_ref(), *kept))]
    SecretShared {
        #[serde(flatten)]
        client: Option<ClientName>,
        kept: bool,
    },
    /// The kill switch is in force and there is no tunnel: nothing leaves but what it excepts.
    #[display("the kill switch blocks: there is no tunnel, and nothing leaves past it")]
    KillSwitchBlocking {},
    /// The kill switch is in force and the tunnel works: the rest leaves through the tunnel.
    #[display("the kill switch is armed: traffic leaves through the tunnel only")]
    KillSwitchArmed {},
    /// The kill switch is not in force any more.
    #[display("the kill switch is lifted: {reason}")]
    KillSwitchLifted { reason: ShortText },
    /// Another program changed or removed the firewall table of the kill switch, and it was installed again.
    #[display(
        "another program changed or removed the firewall table of the kill switch: it is installed again"
    )]
    KillSwitchRestored {},
    /// A CA issued a certificate for these names by ACME, valid until this moment. New connections get it.
    #[display("new certificate for {}, valid until {until}", names.join(", "))]
    CertificateIssued { names: Vec<String>, until: ShortText },
    /// A CA issued no certificate. It is asked again after `retry_s` seconds; until then the certificate of
    /// an earlier order, valid until the moment `until`, stays in use, if there is one.
    #[display("no new certificate: {reason}; next try in {}; {}", milliseconds(retry_s * 1000),
        certificate_in_use(until.as_ref()))]
    CertificateFailed {
        reason: ShortText,
        retry_s: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        until: Option<ShortText>,
    },
    /// The configuration was read again. `applied` lists the keys that count from now on, beside those of
    /// links and classes, `restart` those that take effect after a restart; if there are any of these,
    /// the level is WARN.
    #[display("configuration read again: {}", changes(*links, *classes, applied, restart))]
    ConfigurationRead {
        links: bool,
        classes: bool,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        applied: Vec<String>,
        restart: Vec<String>,
    },
    /// The configuration could not be read again; nothing changed.
    #[display("the configuration cannot be read, nothing changed: {reason}")]
    ConfigurationRefused { reason: ShortText },
    /// The server's certificates were read again, and are shown in new handshakes. `pin` is the SHA-256 of
    /// the first one.
    #[display("certificates read again: new handshakes show the one with the pin {pin}")]
    CertificatesRead { pin: ShortText },
    /// The server's certificates could not be read again, or would lock clients out; those before stay.
    #[display("the certificates are not taken, those before stay: {reason}")]
    CertificatesRefused { reason: ShortText },
    /// The users' file was read again. `ended` users lost access since then, and their sessions ended.
    #[display("users read again: {}{}", counted(*users, "user"), prefixed("; ", (*ended > 0).then(|| counted(*ended, "user") + " lost access")))]
    UsersRead { users: u64, ended: u64 },
    /// A user of this server has used up the monthly quota (bytes) and has no access until this day; sessions
    /// end.
    #[display("{user} used up the quota of {}; no access until {until}", bytes(*quota_bytes))]
    UserQuotaReached { user: ShortText, quota_bytes: u64, until: ShortText },
    /// A user of this server is below the quota again.
    #[display("{user} is below the quota again")]
    UserQuotaRenewed { user: ShortText },
    /// The users' file could not be read again; nothing changed.
    #[display("the users cannot be read, nothing changed: {reason}")]
    UsersRefused { reason: ShortText },
    /// A browser in this network logged in at the dashboard.
    #[display("a browser in {network} logged in at the dashboard")]
    DashboardLogin { network: ShortText },
    /// The dashboard refused a log-in from this network, because the code in the link is wrong, was used, or
    /// has expired. `before` were refused there since the last such event.
    #[display("a log-in at the dashboard from {network} was refused: the link is wrong, was used, or has expired{}",
        prefixed("; ", (*before > 0).then(|| format!("{before} more since the last such event"))))]
    DashboardLoginRefused { network: ShortText, before: u64 },
    /// A signal ends this process.
    #[display("ending on {signal}")]
    Ending { signal: ShortText },
    /// Events were dropped because too many waited for the log.
    #[display("{} dropped: the queue of the event log was full", counted(*count, "event"))]
    EventsDropped { count: u64 },
}

/// The subject of each event, and the level of its log line: WARN if something was lost or refused, DEBUG if
/// it is frequent, else INFO.
macro_rules! kinds {
    ($($kind:ident: $($event:ident $level:ident)+;)+) => {
        impl Event {
            /// Every event by its name here, its subject, and the level of its log line but for the
            /// exceptions that [`level`](Self::level) makes.
            pub const ALL: &[(&str, EventKind, tracing::Level)] =
                &[$($((stringify!($event), EventKind::$kind, tracing::Level::$level),)+)+];

            /// Its subject.
            pub const fn kind(&self) -> EventKind {
                match self { $($(Self::$event { .. })|+ => EventKind::$kind,)+ }
            }

            const fn default_level(&self) -> tracing::Level {
                match self { $($(Self::$event { .. } => tracing::Level::$level,)+)+ }
            }
        }
    };
}

kinds! {
    Link: LinkUp INFO LinkDown INFO LinkUnusable WARN LinkSet INFO QuotaReached WARN QuotaRenewed INFO;
    Path: PathOpened INFO PathFailed INFO PathRecovered INFO PathActive DEBUG
    PathStandby DEBUG PathClosed INFO;
    Transport: TransportChanged INFO TcpConnected INFO TcpFailed INFO TcpClosed INFO;
    Pipes: PipesChanged INFO;
    Class: ClassUsed DEBUG ClassConnected INFO ClassIdle DEBUG ClassDisconnected DEBUG ClassRefused WARN;
    Capacity: CapacityChanged DEBUG;
    Session: Connecting INFO ConnectFailed INFO Connected INFO AddressesChanged INFO NetworkChanged INFO
    MtuChanged INFO
    Disconnected WARN Refused WARN NoAnswer WARN AnswersAgain INFO
        ServerStopping INFO ServerChanged WARN ServerResolved INFO ResolveFailed WARN ShardChanged INFO
        ClientConnected INFO ClientDisconnected INFO RequestRefused INFO SecretShared WARN;
    KillSwitch: KillSwitchBlocking INFO KillSwitchArmed INFO KillSwitchLifted INFO KillSwitchRestored WARN;
    Certificate: CertificateIssued INFO CertificateFailed WARN;
    Configuration: ConfigurationRead INFO ConfigurationRefused WARN CertificatesRead INFO
    CertificatesRefused WARN
        UsersRead INFO UserQuotaReached INFO UserQuotaRenewed INFO UsersRefused WARN Ending INFO;
    Dashboard: DashboardLogin INFO DashboardLoginRefused WARN;
    Log: EventsDropped WARN;
}

impl Event {
    /// The level of its log line: `WARN`, `INFO` or `DEBUG`.
    pub fn level_name(&self) -> &'static str {
        self.level().as_str()
    }

    /// The level of its log line.
    pub const fn level(&self) -> tracing::Level {
        match self {
            Self::ConfigurationRead { restart, .. } if !restart.is_empty() => tracing::Level::WARN,
            Self::ClassDisconnected { client: Some(_), .. } => tracing::Level::INFO,
            Self::NetworkChanged { state: NetworkState::Refused, .. } => tracing::Level::WARN,
            Self::TcpFailed { failures: 1.., .. } => tracing::Level::DEBUG,
            _ => self.default_level(),
        }
    }

    /// Whether it equals another event apart from measured figures.
    pub fn is_repetition_of(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.clone().without_measurements() == other.clone().without_measurements()
    }

    fn without_measurements(mut self) -> Self {
        match &mut self {
            Self::PathFailed { failure, reinjected_packets, reinjected_stream_bytes, .. } => {
                (*reinjected_packets, *reinjected_stream_bytes) = (0, 0);
                match failure {
                    PathFailure::Silent { silence_ms, heartbeats } => (*silence_ms, *heartbeats) = (0, 0),
                    PathFailure::Unheard { silence_ms } => *silence_ms = 0,
                    PathFailure::NoCarrier => {}
                }
            }
            Self::PathRecovered { failed_ms, .. } => *failed_ms = 0,
            Self::TcpFailed { failures, .. } => *failures = 0,
            Self::TcpConnected { local, .. } => local.set_port(0),
            Self::CapacityChanged { before_bps, bps, reason, .. } => {
                (*before_bps, *bps) = (before_bps.map(|_| 0), 0);
                if let CapacityReason::Queue { queue_ms } = reason {
                    *queue_ms = 0.0;
                }
            }
            Self::EventsDropped { count } => *count = 0,
            Self::CertificateFailed { retry_s, .. } => *retry_s = 0,
            _ => {}
        }
        self
    }
}
