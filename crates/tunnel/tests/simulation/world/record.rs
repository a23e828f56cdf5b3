//! A record of a world: one line for each datagram that a machine sends, and for each delivery to an application.
//!
//! In: who sends to whom, when, over which path, how many bytes. Out: the lines, in the order of events. Always holds: a
//! line has nothing in it that depends on keys, connection IDs or other random bytes, so the same world has the same
//! lines in every run.

use std::fmt;

use mpvpn_quic::Transmit;
use mpvpn_types::{Duration, Instant, LinkId};

/// The first line of a record that is written down.
pub const HEADER: &str = "# microseconds, sender, receiver, path (link.class.pipe), UDP payload (bytes), ECN, DSCP; \
                          for deliveries the interface instead of the path, and bytes";

/// A client by its number in the world, or a server by its shard; packets to the server are recorded before it is known
/// which shard they reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Client(usize),
    Server,
    Shard(usize),
    /// An address that no link has, such as one that a link had before.
    Nobody,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(number) => write!(f, "client{number}"),
            Self::Server => f.write_str("server"),
            Self::Shard(number) => write!(f, "server{number}"),
            Self::Nobody => f.write_str("nobody"),
        }
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// A UDP payload was sent over a path of a client.
    Datagram { from: End, to: End, path: LinkId, ecn: u8, dscp: u8 },
    /// An application, or the kernel for it, got bytes through this interface.
    Delivery { to: End, interface: &'static str },
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Since the world began.
    at: Duration,
    bytes: usize,
    what: What,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, bytes) = (self.at.as_micros(), self.bytes);
        match self.what {
            What::Datagram { from, to, path, ecn, dscp } => {
                let (link, class, pipe) = (path.uplink().0, path.class().0, path.path_index());
                write!(f, "{at} {from} {to} {link}.{class}.{pipe} {bytes} {ecn} {dscp}")
            }
            What::Delivery { to, interface } => write!(f, "{at} {to} - {interface} {bytes}"),
        }
    }
}

/// The lines of a world so far.
#[derive(Debug)]
pub struct Record {
    began: Instant,
    pub lines: Vec<Line>,
}

impl Record {
    /// Of a world that begins at `began`.
    pub fn new(began: Instant) -> Self {
        Self { began, lines: Vec::new() }
    }

    /// A UDP payload of `bytes` leaves `from` for `to`.
    pub(super) fn datagram(
        &mut self,
        now: Instant,
        (from, to): (End, End),
        path: LinkId,
        transmit: &Transmit,
        bytes: usize,
    ) {
        let (ecn, dscp) = (transmit.ecn.unwrap_or(0), transmit.dscp);
        let what = What::Datagram { from, to, path, ecn, dscp };
        self.lines.push(Line { at: now - self.began, bytes, what });
    }

    /// Bytes come out of the tunnel.
    pub(super) fn delivery(&mut self, now: Instant, to: End, interface: &'static str, bytes: usize) {
        self.lines.push(Line { at: now - self.began, bytes, what: What::Delivery { to, interface } });
    }

    /// How many of the lines are datagrams.
    pub fn datagrams(&self) -> usize {
        self.lines.iter().filter(|line| matches!(line.what, What::Datagram { .. })).count()
    }

    /// As it is written to a file.
    pub fn text(&self) -> String {
        let lines = self.lines.iter().map(|line| format!("{line}\n"));
        [format!("{HEADER}\n")].into_iter().chain(lines).collect()
    }
}
