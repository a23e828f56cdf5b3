//! A record of a world: one line for each datagram that a machine sends, and for each delivery to an
//! application.
//!
//! In: who sends to whom, when, over which path, how many bytes. Out: the lines, in the order of events.
//! Always holds: a line has nothing in it that depends on keys, connection IDs or other random bytes, so the
//! same world has the same lines in every run.

use std::fmt;

use mpvpn_quic::Transmit;
use mpvpn_types::{Duration, Instant, LinkId};

/// The first line of a record that is written down.
pub const HEADER: &str = "# microseconds, sender, receiver, path (link.class.pipe), UDP payload (bytes), ECN, DSCP; \
                          for deliveries the interface instead of the path, and bytes";

/// A client by its number in the world, or a server by its shard; packets to the server are recorded before
/// it is known which shard they reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    Client(usize),
    Server,
    Shard(usize),
    /// An address that no link has, such as one that a link had before.
    Unknown,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(number) => write!(f, "client{number}"),
            Self::Server => f.write_str("server"),
            Self::Shard(number) => write!(f, "server{number}"),
            Self::Unknown => f.write_str("nobody"),
        }
    }
}

/// The kind of a line, with the properties of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineKind {
    /// A UDP payload was sent over a path of a client.
    Datagram { from: Host, to: Host, path: LinkId, ecn: u8, dscp: u8 },
    /// An application, or the kernel for it, got bytes through this interface.
    Delivery { to: Host, interface: &'static str },
}

/// A line of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLine {
    /// Time since the world began.
    at: Duration,
    bytes: usize,
    kind: LineKind,
}

impl fmt::Display for RecordLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, bytes) = (self.at.as_micros(), self.bytes);
        match self.kind {
            LineKind::Datagram { from, to, path, ecn, dscp } => {
                let (link, class, pipe) = (path.uplink().0, path.class().0, path.path_index());
                write!(f, "{at} {from} {to} {link}.{class}.{pipe} {bytes} {ecn} {dscp}")
            }
            LineKind::Delivery { to, interface } => write!(f, "{at} {to} - {interface} {bytes}"),
        }
    }
}

/// The lines of a world so far.
#[derive(Debug)]
pub struct Record {
    began: Instant,
    pub lines: Vec<RecordLine>,
}

impl Record {
    /// The record of a world that begins at `began`.
    pub fn new(began: Instant) -> Self {
        Self { began, lines: Vec::new() }
    }

    /// A UDP payload of `bytes` leaves `from` for `to`.
    pub(super) fn datagram(
        &mut self,
        now: Instant,
        (from, to): (Host, Host),
        path: LinkId,
        transmit: &Transmit,
        bytes: usize,
    ) {
        let (ecn, dscp) = (transmit.ecn.unwrap_or(0), transmit.dscp);
        let kind = LineKind::Datagram { from, to, path, ecn, dscp };
        self.lines.push(RecordLine { at: now - self.began, bytes, kind });
    }

    /// Bytes come out of the tunnel.
    pub(super) fn delivery(&mut self, now: Instant, to: Host, interface: &'static str, bytes: usize) {
        self.lines.push(RecordLine {
            at: now - self.began,
            bytes,
            kind: LineKind::Delivery { to, interface },
        });
    }

    /// How many of the lines are datagrams.
    pub fn datagrams(&self) -> usize {
        self.lines.iter().filter(|line| matches!(line.kind, LineKind::Datagram { .. })).count()
    }

    /// As it is written to a file.
    pub fn text(&self) -> String {
        let lines = self.lines.iter().map(|line| format!("{line}\n"));
        [format!("{HEADER}\n")].into_iter().chain(lines).collect()
    }
}
