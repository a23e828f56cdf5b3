//! Numbered packets and forward error correction in the status.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Numbered packets. Packets are numbered where flows use several paths or packets are lost: the receiver
/// restores the order, the sender retransmits lost packets. Counted since the session began or was resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Resequencing {
    /// Whether this end numbers its packets now.
    pub on: bool,
    /// Packets sent with a number.
    pub numbered: u64,
    /// Packets retransmitted because they were lost.
    pub resent: u64,
    /// Additional copies of packets sent (scheduler `redundant`, or `copies` of a class).
    pub copies: u64,
    /// Packets received early, held and then delivered in order.
    pub restored: u64,
    /// Packets received after the receiver had given them up, and delivered out of order.
    pub late: u64,
    /// Packets received a second time, and dropped.
    pub duplicates: u64,
    /// Packets that the receiver waited for and gave up.
    pub given_up: u64,
    /// Packets that wait now for those before them.
    #[serde(default)]
    pub waiting: u64,
    /// Time that packets have waited for those before them, summed up over all packets, in ms.
    #[serde(default)]
    pub wait_ms: u64,
    /// Forward error correction; left out if it was never used.
    #[serde(default, skip_serializing_if = "FecStats::is_none")]
    pub fec: FecStats,
}

/// Forward error correction: repair packets for groups of packets (`fec` of a class).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FecStats {
    /// Repair packets sent now per 100 packets, on the path with the most.
    pub percent: u8,
    /// Packets sent in groups that have repair packets.
    pub protected: u64,
    /// Repair packets sent.
    pub sent: u64,
    /// Bytes of repair packets sent.
    pub sent_bytes: u64,
    /// Packets sent by this end and lost, which the far end restored, so that they were not retransmitted.
    pub made_good: u64,
    /// Packets lost on the way to this end and restored.
    pub recovered: u64,
    /// Repair packets received and not needed.
    pub wasted: u64,
    /// Groups that lost more than could be restored; their lost packets were retransmitted.
    pub unrecoverable: u64,
}

impl FecStats {
    /// Whether FEC was never used.
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn add(&mut self, other: Self) {
        self.percent = self.percent.max(other.percent);
        self.protected += other.protected;
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.made_good += other.made_good;
        self.recovered += other.recovered;
        self.wasted += other.wasted;
        self.unrecoverable += other.unrecoverable;
    }
}

impl Resequencing {
    /// The counters of a connection that has ended.
    pub fn as_over(self) -> Self {
        Self { on: false, waiting: 0, fec: FecStats { percent: 0, ..self.fec }, ..self }
    }

    /// Adds the counters of another connection of the same session.
    pub fn add(&mut self, other: Self) {
        self.on |= other.on;
        self.numbered += other.numbered;
        self.resent += other.resent;
        self.copies += other.copies;
        self.restored += other.restored;
        self.late += other.late;
        self.duplicates += other.duplicates;
        self.given_up += other.given_up;
        self.waiting += other.waiting;
        self.wait_ms += other.wait_ms;
        self.fec.add(other.fec);
    }
}

/// Forward error correction on one path, for what this end sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PathFec {
    /// Repair packets sent now per 100 packets.
    pub percent: u8,
    /// Packets sent in groups that have repair packets.
    pub protected: u64,
    /// Repair packets sent.
    pub sent: u64,
    /// Bytes of repair packets sent.
    pub sent_bytes: u64,
    /// Packets lost on this path, which the far end restored, so that they were not retransmitted.
    pub made_good: u64,
    /// Repair packets that arrived at the far end and were not needed.
    pub wasted: u64,
}
