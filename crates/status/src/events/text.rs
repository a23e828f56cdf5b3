//! Events as sentences, for the log and for `mpvpn events`.

use std::fmt::{self, Display, Formatter};

use super::{CapacityReason, ClientName, Event, PathFailure, PathName, Transport};
use mpvpn_input::short_text::ShortText;

impl Display for Event {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::LinkUp { link, addresses } => write!(f, "{link} is up: {}", CommaSeparated(addresses)),
            Self::LinkDown { link, reason } => write!(f, "{link} is down: {reason}"),
            Self::LinkUnusable { link, reason } => {
                write!(f, "{link} cannot be used yet: {reason}")
            }
            Self::LinkSet { link, change } => write!(f, "{link} was changed: {change}"),
            Self::QuotaReached { link, quota_bytes, until } => {
                write!(f, "{link} reached its quota of {}; not used until {until}", Bytes(*quota_bytes))
            }
            Self::QuotaRenewed { link } => write!(f, "{link} is below its quota again"),
            Self::PathOpened { path, remote } => {
                write!(f, "{path} opened")?;
                remote.map_or(Ok(()), |remote| write!(f, " to {remote}"))
            }
            Self::PathFailed {
                path,
                failure,
                reinjected_packets,
                reinjected_stream_bytes,
                working_paths,
            } => {
                write!(f, "{path} failed: {failure}; ")?;
                match (reinjected_packets, reinjected_stream_bytes) {
                    (0, 0) => {}
                    (packets, 0) => write!(f, "{} reinjected; ", Counted(*packets, "packet"))?,
                    (0, bytes) => write!(f, "{} of streams reinjected; ", Bytes(*bytes))?,
                    (packets, bytes) => {
                        let packets = Counted(*packets, "packet");
                        write!(f, "{packets} and {} of streams reinjected; ", Bytes(*bytes))?;
                    }
                }
                match working_paths {
                    0 => f.write_str("no other path works"),
                    1 => f.write_str("1 other path works"),
                    paths => write!(f, "{paths} other paths work"),
                }
            }
            Self::PathRecovered { path, failed_ms } => {
                write!(f, "{path} recovered after {}", Milliseconds(*failed_ms))
            }
            Self::PathActive { path } => write!(f, "{path} carries data"),
            Self::PathStandby { path, reason } => write!(f, "{path} on standby: {reason}"),
            Self::PathClosed { path } => write!(f, "{path} closed"),
            Self::TransportChanged { link, transport, reason, shard } => {
                let transport = match transport {
                    Transport::Quic => "QUIC over UDP",
                    Transport::Tcp => "QUIC inside TCP",
                };
                write!(f, "{link}: transport {transport}{}{}", ReasonSuffix(reason), ThreadSuffix(*shard))
            }
            Self::TcpConnected { link, local, remote, multipath, shard } => {
                let kind = if *multipath { "Multipath TCP" } else { "TCP" };
                write!(
                    f,
                    "{link}: {kind} connection established, {local} to {remote}{}",
                    ThreadSuffix(*shard)
                )
            }
            Self::TcpFailed { link, reason, failures: _, shard } => {
                write!(f, "{link}: no TCP connection: {reason}{}", ThreadSuffix(*shard))
            }
            Self::TcpClosed { link, reason, shard } => {
                write!(f, "{link}: TCP connection closed: {reason}{}", ThreadSuffix(*shard))
            }
            Self::PipesChanged { link, pipes, reason } => {
                write!(f, "{link} has {}: {reason}", Counted(u64::from(*pipes), "pipe"))
            }
            Self::ClassUsed { class } => write!(f, "class {class} is used: connecting"),
            Self::ClassConnected { client, class } => {
                write!(f, "{}class {class} is connected", ClientPrefix(client))
            }
            Self::ClassIdle { class } => write!(f, "class {class} is idle: connection closed"),
            Self::ClassDisconnected { client, class, reason } => {
                write!(f, "{}class {class} lost its connection: {reason}", ClientPrefix(client))
            }
            Self::ClassRefused { class, reason } => {
                write!(f, "class {class} gets no connection of its own, the default one carries it: {reason}")
            }
            Self::CapacityChanged { client, link, before_bps, bps, reason } => {
                write!(f, "{}{link}: capacity {}", ClientPrefix(client), Rate(*bps))?;
                before_bps.map_or(Ok(()), |before| write!(f, ", before {}", Rate(before)))?;
                write!(f, ": {reason}")
            }
            Self::Connecting { server } => write!(f, "connecting to {server}"),
            Self::ConnectFailed { link, class, reason } => {
                write!(f, "could not connect over {link} (class {class}): {reason}")
            }
            Self::Connected { server, addresses, resumed } => {
                let session = if *resumed { ", session resumed" } else { "" };
                write!(f, "connected to {server}: {}{session}", CommaSeparated(addresses))
            }
            Self::AddressesChanged { addresses } => {
                write!(f, "addresses or routes changed: {}", CommaSeparated(addresses))
            }
            Self::MtuChanged { mtu } => write!(f, "tunnel MTU {mtu}"),
            Self::Disconnected { reason } => write!(f, "connection lost: {reason}; connecting again"),
            Self::ServerStopping { class } => {
                write!(f, "the server is about to stop (class {class})")
            }
            Self::ServerResolved { server, addresses } => {
                write!(f, "{server} has the addresses {}", CommaSeparated(addresses))
            }
            Self::ResolveFailed { server, reason } => write!(f, "cannot resolve {server}: {reason}"),
            Self::ShardChanged { shard, connected: true, .. } => {
                write!(f, "thread {shard} is connected")
            }
            Self::ShardChanged { shard, connected: false, reason } => {
                write!(f, "thread {shard} lost its connection{}; connecting again", ReasonSuffix(reason))
            }
            Self::ClientConnected { client, resumed: false } => write!(f, "{client} connected"),
            Self::ClientConnected { client, resumed: true } => {
                write!(f, "{client} connected, session resumed")
            }
            Self::ClientDisconnected { client, reason } => write!(f, "{client} disconnected: {reason}"),
            Self::RequestRefused { status, reason } => {
                write!(f, "request refused with status {status}: {reason}")
            }
            Self::SecretShared { client: Some(client), .. } => write!(
                f,
                "{client}: another machine has a copy of its state folder: this client keeps its addresses, the other gets its own"
            ),
            Self::SecretShared { client: None, kept: true } => {
                f.write_str("another machine has a copy of this client's state folder: this client keeps its addresses")
            }
            Self::SecretShared { client: None, kept: false } => f.write_str(
                "another machine uses the session of this client's state folder, a copy: this client gets addresses of its own",
            ),
            Self::KillSwitchBlocking {} => {
                f.write_str("the kill switch blocks: there is no tunnel, and nothing leaves past it")
            }
            Self::KillSwitchArmed {} => {
                f.write_str("the kill switch is armed: traffic leaves through the tunnel only")
            }
            Self::KillSwitchLifted { reason } => write!(f, "the kill switch is lifted: {reason}"),
            Self::KillSwitchRestored {} => f.write_str(
                "another program changed or removed the firewall table of the kill switch: it is installed again",
            ),
            Self::CertificateIssued { names, until } => {
                write!(f, "new certificate for {}, valid until {until}", names.join(", "))
            }
            Self::CertificateFailed { reason, retry_s, until } => {
                write!(f, "no new certificate: {reason}; next try in {}", Milliseconds(retry_s * 1000))?;
                match until {
                    Some(until) => write!(f, "; the one in use is valid until {until}"),
                    None => f.write_str("; clients that ask for these names get the server's own certificate"),
                }
            }
            Self::ConfigurationRead { links, classes, applied, restart } => {
                let parts = [(*links, "links"), (*classes, "classes")].into_iter().filter(|(changed, _)| *changed);
                let parts = parts.map(|(_, part)| part).chain(applied.iter().map(String::as_str));
                let parts: Vec<&str> = parts.collect();
                match parts.is_empty() {
                    true => f.write_str("configuration read again: everything as before")?,
                    false => write!(f, "configuration read again: changed are {}", parts.join(", "))?,
                }
                if restart.is_empty() {
                    return Ok(());
                }
                write!(f, "; after a restart: {}", restart.join(", "))
            }
            Self::ConfigurationRefused { reason } => {
                write!(f, "the configuration cannot be read, nothing changed: {reason}")
            }
            Self::CertificatesRead { pin } => {
                write!(f, "certificates read again: new handshakes show the one with the pin {pin}")
            }
            Self::CertificatesRefused { reason } => {
                write!(f, "the certificates are not taken, those before stay: {reason}")
            }
            Self::UsersRead { users, ended } => {
                write!(f, "users read again: {}", Counted(*users, "user"))?;
                match ended {
                    0 => Ok(()),
                    ended => write!(f, "; {} lost access", Counted(*ended, "user")),
                }
            }
            Self::UserQuotaReached { user, quota_bytes, until } => {
                write!(f, "{user} used up the quota of {}; no access until {until}", Bytes(*quota_bytes))
            }
            Self::UserQuotaRenewed { user } => write!(f, "{user} is below the quota again"),
            Self::UsersRefused { reason } => {
                write!(f, "the users cannot be read, nothing changed: {reason}")
            }
            Self::DashboardLogin { network } => write!(f, "a browser in {network} logged in at the dashboard"),
            Self::DashboardLoginRefused { network, before } => {
                write!(f, "a log-in at the dashboard from {network} was refused: the link is wrong, was used, or has expired")?;
                match before {
                    0 => Ok(()),
                    before => write!(f, "; {before} more since the last such event"),
                }
            }
            Self::Ending { signal } => write!(f, "ending on {signal}"),
            Self::EventsDropped { count } => {
                write!(f, "{} dropped: the queue of the event log was full", Counted(*count, "event"))
            }
        }
    }
}

impl Display for ClientName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(if self.user.is_empty() { "a client" } else { self.user.as_str() })?;
        self.address.map_or(Ok(()), |address| write!(f, " ({address})"))
    }
}

impl Display for PathName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.link.is_empty() {
            true => write!(f, "{}path {}", ClientPrefix(&self.client), self.path),
            false => write!(f, "{}{} (path {})", ClientPrefix(&self.client), self.link, self.path),
        }
    }
}

impl Display for PathFailure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent { silence_ms, heartbeats } => {
                write!(
                    f,
                    "nothing received for {silence_ms} ms, {} missed",
                    Counted(u64::from(*heartbeats), "heartbeat")
                )
            }
            Self::NoCarrier => f.write_str("no carrier"),
            Self::Unheard { silence_ms } => {
                write!(f, "the far end receives nothing, reported {silence_ms} ms ago")
            }
        }
    }
}

impl Display for CapacityReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("as configured"),
            Self::Measured => f.write_str("first measurement"),
            Self::NoQueue => f.write_str("no queueing delay"),
            Self::Queue { queue_ms } => write!(f, "queueing delay of {queue_ms:.1} ms"),
        }
    }
}

/// A comma-separated list.
struct CommaSeparated<'a, T>(&'a [T]);

impl<T: Display> Display for CommaSeparated<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no address");
        }
        for (at, item) in self.0.iter().enumerate() {
            write!(f, "{}{item}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// A colon and a reason, unless that is empty.
struct ReasonSuffix<'a>(&'a ShortText);

impl Display for ReasonSuffix<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

/// The client and a colon, at a server.
struct ClientPrefix<'a>(&'a Option<ClientName>);

impl Display for ClientPrefix<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |client| write!(f, "{client}: "))
    }
}

/// A thread, unless it is the first.
struct ThreadSuffix(u8);

impl Display for ThreadSuffix {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " (thread {})", self.0) }
    }
}

/// A number of things whose plural takes an s.
struct Counted(u64, &'static str);

impl Display for Counted {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// A size (bytes).
struct Bytes(u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        scaled(f, self.0 as f64, "B")
    }
}

/// A rate (bit/s).
struct Rate(u64);

impl Display for Rate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        scaled(f, self.0 as f64, "bit/s")
    }
}

/// With an SI prefix and at most one decimal.
fn scaled(f: &mut Formatter<'_>, value: f64, unit: &str) -> fmt::Result {
    match value {
        ..1e3 => write!(f, "{value:.0} {unit}"),
        ..1e6 => write!(f, "{:.1} k{unit}", value / 1e3),
        ..1e9 => write!(f, "{:.1} M{unit}", value / 1e6),
        _ => write!(f, "{:.1} G{unit}", value / 1e9),
    }
}

/// A time (ms).
struct Milliseconds(u64);

impl Display for Milliseconds {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            ms @ ..1000 => write!(f, "{ms} ms"),
            ms @ ..120_000 => write!(f, "{:.1} s", ms as f64 / 1e3),
            ms @ ..7_200_000 => write!(f, "{} min", ms / 60_000),
            ms => write!(f, "{} h", ms / 3_600_000),
        }
    }
}
