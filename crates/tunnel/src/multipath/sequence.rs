//! What lets a flow take several paths: its packets are numbered, what is lost is sent again over another
//! path or restored from repair, and the far end puts them in order.
//!
//! In: packets that leave and datagrams that arrive. Out: datagrams and packets. The parts own the state:
//! [`Numbering`], [`Retransmissions`] and [`Resequencer`], and [`Protection`] where both ends know FEC
//! groups.

use bytes::{Buf, Bytes};
use mpvpn_class::QueuedPacket;
use mpvpn_flow::{Label, ReorderStats, fec::Load};
use mpvpn_masque::datagram::DatagramPrefix;
use mpvpn_quic::{Outcome, PathStats, TrackedDatagram};
use mpvpn_types::{Instant, PathId};

use super::{
    numbering::Numbering,
    protect::{FecCounters, Protection},
    resequencer::Resequencer,
    retransmissions::Retransmissions,
};

/// TrafficCounters of repair and order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResequencingCounters {
    /// Whether packets are numbered now.
    pub on: bool,
    /// Packets that got a number.
    pub numbered: u64,
    /// Packets sent again because they were lost.
    pub repairs: u64,
    /// Copies sent beside the first one.
    pub copies: u64,
    /// What became of the packets that arrived.
    pub arrived: ReorderStats,
    /// Repair without asking, where both ends agreed on that.
    pub fec: Option<FecCounters>,
}

/// Numbers, repairs and orders the packets of one tunnel.
#[derive(Debug)]
pub(super) struct Sequencer {
    numbering: Numbering,
    retransmissions: Retransmissions,
    resequencer: Resequencer,
    /// Where both ends know FEC groups.
    protection: Option<Box<Protection>>,
    /// Copies sent beside the first one.
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

    /// Whether what a path loses is made good by repair.
    pub(super) fn protects(&self, path: PathId) -> bool {
        self.protection.as_ref().is_some_and(|protection| protection.protects(path))
    }

    pub(super) fn protection(&mut self) -> Option<&mut Protection> {
        self.protection.as_deref_mut()
    }

    /// Bytes that a numbered datagram has beyond a plain one.
    pub(super) fn overhead(&self, plain: &DatagramPrefix) -> usize {
        let protected = self.protection.as_ref().and_then(|protection| protection.around()).unwrap_or(0);
        (self.numbering.prefix_len().max(protected) + Label::LEN).saturating_sub(plain.as_ref().len())
    }

    /// Whether packets are numbered now.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.numbering.is_on()
    }

    /// Takes over what was measured about the paths in use, of which `several` may carry one flow.
    pub(super) fn measure(&mut self, now: Instant, several: bool, views: &[PathStats]) {
        let mut protected = false;
        if let Some(protection) = &mut self.protection {
            protection.measure(views);
            protected = protection.is_on();
        }
        self.numbering.measure(now, several, protected, views);
    }

    /// The label of a packet that leaves; `payload` are its bytes without the prefix behind which it waited.
    #[inline]
    pub(super) fn label(&mut self, now: Instant, packet: &QueuedPacket, payload: &[u8]) -> Label {
        self.numbering.label(now, packet, payload)
    }

    /// The datagram of a packet that leaves on a path, and its mark; `load` is what it met.
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
            Some((data, mark)) => (data, Some(mark)),
            None => (self.numbering.datagram(label, payload), None),
        }
    }

    /// A packet that no path takes whole, as several datagrams of at most `max` bytes; none if it cannot be
    /// cut.
    #[cold]
    pub(super) fn in_parts(&mut self, label: Label, payload: &[u8], max: usize) -> Vec<Bytes> {
        let whole = self.numbering.datagram(label, payload);
        self.numbering.in_parts(&whole, max)
    }

    /// The same of a datagram that was lost.
    #[cold]
    pub(super) fn lost_in_parts(&mut self, datagram: &Bytes, max: usize) -> Vec<Bytes> {
        self.numbering.in_parts(datagram, max)
    }

    /// Takes a datagram that was lost, if it is worth sending again: outside of all groups.
    pub(super) fn keep(&mut self, now: Instant, lost: TrackedDatagram) {
        let lost = match &self.protection {
            Some(protection) if lost.ack_token.is_some() => match protection.bare(lost) {
                Some(lost) => self.numbering.reframe(lost),
                None => return,
            },
            _ => lost,
        };
        self.retransmissions.push(now, lost);
    }

    /// Takes what became of a datagram with a mark.
    pub(super) fn settle(&mut self, now: Instant, fate: Outcome) {
        match (fate, &mut self.protection) {
            (Outcome::Arrived(mark), Some(protection)) => protection.arrived(mark),
            (Outcome::Lost(datagram), Some(protection)) => protection.lost(now, datagram),
            (_, None) => {}
        }
    }

    /// Closes groups whose time has come, and takes what the far end will not restore.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        let Some(protection) = &mut self.protection else { return };
        protection.handle_timeout(now);
        while let Some(lost) = protection.next_lost() {
            self.retransmissions.push(now, self.numbering.reframe(lost));
        }
    }

    /// Whether anything that was lost waits to be sent again, or repair to be sent.
    pub(super) fn has_repairs(&self) -> bool {
        !self.retransmissions.is_empty()
            || self.protection.as_ref().is_some_and(|protection| protection.has_repair())
    }

    /// The next datagram to send again.
    pub(super) fn next_retransmission(&mut self) -> Option<TrackedDatagram> {
        self.retransmissions.pop()
    }

    pub(super) fn count_copy(&mut self) {
        self.copies += 1;
    }

    /// Whether a datagram has a numbered packet, or repair.
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        self.numbering.is_own(datagram)
            || self.protection.as_ref().is_some_and(|protection| protection.is_own(datagram))
    }

    /// The label and the packet of a numbered datagram; `None` if it is a part of a packet and others are
    /// missing, or repair.
    pub(super) fn open(&mut self, now: Instant, mut datagram: Bytes) -> Option<(Label, Bytes)> {
        match &mut self.protection {
            Some(protection) if protection.is_own(&datagram) => datagram = protection.take(now, datagram)?,
            _ => datagram.advance(self.numbering.prefix_len()),
        }
        self.resequencer.open(datagram)
    }

    /// The same of what was restored.
    pub(super) fn next_recovered(&mut self) -> Option<(Label, Bytes)> {
        let protection = self.protection.as_mut()?;
        loop {
            if let Some(opened) = self.resequencer.open(protection.next_recovered()?) {
                return Some(opened);
            }
        }
    }

    pub(super) fn resequencer(&mut self) -> &mut Resequencer {
        &mut self.resequencer
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.protection.as_ref().and_then(|protection| protection.poll_timeout());
        self.resequencer.poll_timeout().into_iter().chain(groups).min()
    }

    pub(super) fn counters(&self) -> ResequencingCounters {
        ResequencingCounters {
            on: self.numbering.is_on(),
            numbered: self.numbering.numbered(),
            repairs: self.retransmissions.sent(),
            copies: self.copies,
            arrived: self.resequencer.stats(),
            fec: self.protection.as_ref().map(|protection| protection.counters()),
        }
    }

    /// Gives back memory that is not in use; for when nothing has moved for some time.
    pub(super) fn trim(&mut self) {
        self.numbering.trim();
        self.resequencer.trim();
        if let Some(protection) = &mut self.protection {
            protection.rest();
        }
    }
}
