//! Numbered packets: allow a flow to use several paths. Lost packets are retransmitted on another path or
//! recovered by FEC, and the peer restores the order.
//!
//! In: packets to send, received datagrams, outcomes of datagrams. Out: datagrams, and packets for the
//! resequencer. Always holds: the state belongs to the parts [`Numbering`], [`Retransmissions`],
//! [`Resequencer`] and, if FEC was negotiated, [`Protection`].

use bytes::{Buf, Bytes};
use mpvpn_class::QueuedPacket;
use mpvpn_flow::{Label, ReorderStats, fec::Load};
use mpvpn_masque::datagram::DatagramPrefix;
use mpvpn_quic::{Outcome, PathStats, TrackedDatagram};
use mpvpn_types::{Instant, PathId};

use super::{
    numbering::Numbering,
    protect::{FecCounters, PathFecCounters, Protection},
    resequencer::Resequencer,
    retransmissions::Retransmissions,
};

/// Counters of numbered packets in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResequencingCounters {
    /// Whether packets are numbered now.
    pub is_numbering: bool,
    /// Packets sent with a number.
    pub numbered: u64,
    /// Retransmitted packets.
    pub retransmissions: u64,
    /// Copies sent beside the first datagram of a packet (option `copies`).
    pub copies: u64,
    /// Counters of the resequencer for received packets.
    pub received: ReorderStats,
    /// Counters of FEC, if negotiated.
    pub fec: Option<FecCounters>,
}

/// Numbers, retransmits, protects and resequences the packets of one tunnel.
#[derive(Debug)]
pub(super) struct Sequencer {
    numbering: Numbering,
    retransmissions: Retransmissions,
    pub(super) resequencer: Resequencer,
    /// FEC, if negotiated.
    protection: Option<Box<Protection>>,
    /// Number of copies sent.
    copies: u64,
}

impl Sequencer {
    pub(super) fn new(stream: u64, context: u64) -> Self {
        Self {
            numbering: Numbering::new(stream, context),
            retransmissions: Retransmissions::default(),
            resequencer: Resequencer::new(),
            protection: None,
            copies: 0,
        }
    }

    pub(super) fn protect(&mut self, protection: Protection) {
        self.protection = Some(Box::new(protection));
    }

    pub(super) fn protection(&mut self) -> Option<&mut Protection> {
        self.protection.as_deref_mut()
    }

    /// Returns the bytes by which a numbered datagram is longer than one with the prefix `plain`.
    pub(super) fn overhead_bytes(&self, plain: &DatagramPrefix) -> usize {
        let protected =
            self.protection.as_ref().and_then(|protection| protection.overhead_bytes()).unwrap_or(0);
        (self.numbering.prefix_len().max(protected) + Label::LEN).saturating_sub(plain.as_ref().len())
    }

    /// Whether packets are numbered now.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.numbering.is_on()
    }

    /// Takes the measurements of the paths in use; `several`: a flow may use several of them.
    pub(super) fn measure(&mut self, now: Instant, several: bool, views: &[PathStats]) {
        let mut protected = false;
        if let Some(protection) = &mut self.protection {
            protection.measure(views);
            protected = protection.is_on();
        }
        self.numbering.measure(now, several, protected, views);
    }

    /// Returns the label of a packet to send; `payload` is the IP packet without the prefix of its queue
    /// entry.
    #[inline]
    pub(super) fn label(&mut self, now: Instant, packet: &QueuedPacket, payload: &[u8]) -> Label {
        self.numbering.label(now, packet, payload)
    }

    /// Encodes the datagram of a packet for a path, and returns it with its ack token; `load` is the load of
    /// the path.
    pub(super) fn frame(
        &mut self,
        now: Instant,
        path: PathId,
        label: Label,
        payload: &[u8],
        load: Load,
    ) -> (Bytes, Option<u32>) {
        let protection = self.protection.as_mut();
        match protection.and_then(|protection| protection.frame(now, path, &label, payload, load)) {
            Some((data, ack_token)) => (data, Some(ack_token)),
            None => (self.numbering.datagram(label, payload), None),
        }
    }

    /// Splits a packet that does not fit into datagrams of at most `max` bytes; none if it cannot be split.
    #[cold]
    pub(super) fn split_into_parts(&mut self, label: Label, payload: &[u8], max: usize) -> Vec<Bytes> {
        let whole = self.numbering.datagram(label, payload);
        self.numbering.split_into_parts(&whole, max)
    }

    /// Splits a lost datagram likewise.
    #[cold]
    pub(super) fn split_lost_into_parts(&mut self, datagram: &Bytes, max: usize) -> Vec<Bytes> {
        self.numbering.split_into_parts(datagram, max)
    }

    /// Queues a lost datagram for retransmission outside of FEC groups.
    pub(super) fn on_lost(&mut self, now: Instant, lost: TrackedDatagram) {
        let lost = match &self.protection {
            Some(protection) if lost.ack_token.is_some() => match protection.unprotect(lost) {
                Some(lost) => self.numbering.reframe(lost),
                None => return,
            },
            _ => lost,
        };
        self.retransmissions.push(now, lost);
    }

    /// Takes the outcome of a datagram with an ack token.
    pub(super) fn on_outcome(&mut self, now: Instant, outcome: Outcome) {
        match (outcome, &mut self.protection) {
            (Outcome::Arrived(ack_token), Some(protection)) => protection.on_arrived(ack_token),
            (Outcome::Lost(datagram), Some(protection)) => protection.on_lost(now, datagram),
            (_, None) => {}
        }
    }

    /// Closes FEC groups whose wait has ended, and queues lost packets that the peer cannot recover.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        let Some(protection) = &mut self.protection else { return };
        protection.handle_timeout(now);
        while let Some(lost) = protection.next_lost() {
            self.retransmissions.push(now, self.numbering.reframe(lost));
        }
    }

    /// Whether retransmissions or repair packets wait to be sent.
    pub(super) fn has_repairs(&self) -> bool {
        !self.retransmissions.is_empty()
            || self.protection.as_ref().is_some_and(|protection| protection.has_repair())
    }

    /// Returns the next datagram to retransmit.
    pub(super) fn next_retransmission(&mut self) -> Option<TrackedDatagram> {
        self.retransmissions.pop()
    }

    pub(super) fn count_copy(&mut self) {
        self.copies += 1;
    }

    /// Returns the packet, or the part of one, in a numbered datagram of this end outside of FEC groups.
    pub(super) fn payload_of<'a>(&self, datagram: &'a [u8]) -> Option<&'a [u8]> {
        let labelled = datagram.get(self.numbering.prefix_len()..)?;
        let (label, length) = Label::decode(labelled).ok()?;
        labelled.get(length..).filter(|_| label.part.is_none())
    }

    /// Whether a datagram contains a numbered packet or a repair packet.
    pub(super) fn has_prefix(&self, datagram: &[u8]) -> bool {
        self.numbering.has_prefix(datagram)
            || self.protection.as_ref().is_some_and(|protection| protection.has_prefix(datagram))
    }

    /// Returns label and packet of a received datagram; `None` if it is a part of an incomplete packet, or a
    /// repair packet.
    pub(super) fn open(&mut self, now: Instant, mut datagram: Bytes) -> Option<(Label, Bytes)> {
        match &mut self.protection {
            Some(protection) if protection.has_prefix(&datagram) => {
                datagram = protection.take(now, datagram)?
            }
            _ => datagram.advance(self.numbering.prefix_len()),
        }
        self.resequencer.open(datagram)
    }

    /// Returns label and packet of the next recovered packet.
    pub(super) fn next_recovered(&mut self) -> Option<(Label, Bytes)> {
        let protection = self.protection.as_mut()?;
        loop {
            if let Some(opened) = self.resequencer.open(protection.next_recovered()?) {
                return Some(opened);
            }
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.protection.as_ref().and_then(|protection| protection.poll_timeout());
        self.resequencer.reorder.poll_timeout().into_iter().chain(groups).min()
    }

    pub(super) fn counters(&self) -> ResequencingCounters {
        ResequencingCounters {
            is_numbering: self.numbering.is_on(),
            numbered: self.numbering.numbered,
            retransmissions: self.retransmissions.sent,
            copies: self.copies,
            received: self.resequencer.reorder.stats(),
            fec: self.protection.as_ref().map(|protection| protection.counters()),
        }
    }

    /// The counters of FEC on a path; `None` if FEC was not negotiated.
    pub(super) fn path_fec(&self, path: PathId) -> Option<PathFecCounters> {
        self.protection.as_ref().map(|protection| protection.path_counters(path))
    }

    /// Forgets a closed path.
    pub(super) fn on_path_closed(&mut self, path: PathId) {
        if let Some(protection) = &mut self.protection {
            protection.on_path_closed(path);
        }
    }

    /// Releases unused memory, after an idle time.
    pub(super) fn trim(&mut self) {
        self.numbering.trim();
        self.resequencer.trim();
        if let Some(protection) = &mut self.protection {
            protection.trim();
        }
    }
}
