//! Which path sends next: data passes, one path after the other, then a control pass for all, then reports.
//!
//! The library sends on the lowest path whose gate lets it. So a data pass opens the gate of one path, for as many bytes as
//! that path's queue holds; the control pass opens all gates a little, for acknowledgements, heartbeats, path challenges and
//! MTU probes. Reports leave after everything else, each on its path.

use std::num::NonZeroUsize;

use mpvpn_types::{Duration, Instant};

use super::Connection;
use crate::{DATAGRAM_OVERHEAD, LocalAddress, Transmit};

/// What a control pass may send on each path beyond acknowledgements, in packets.
const CONTROL_PACKETS: u64 = 4;
/// Room in a pass for the acknowledgements that ride along (bytes).
const RIDING: u64 = 1500;
/// The kernel's limits of one segmented send: segments, and bytes with headers (udp(7)).
const MAX_SEGMENTS: usize = 64;
const MAX_BATCH: usize = 65_000;
/// A path on which nothing arrives for so long while something does on others is the last choice for
/// acknowledgements.
const SILENT: Duration = Duration::from_millis(30);
/// The same for what else may leave on any path: on one that carries data, something arrives far more often.
const QUIET: Duration = Duration::from_millis(8);

/// What is sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Idle,
    /// The data of the path at this place.
    Data(usize),
    /// What the control pass would send on the first path, on those that are heard.
    Heard,
    Control,
    /// The report of the path at this place.
    Report(usize),
}

/// Which pass of a connection is under way.
#[derive(Debug)]
pub(super) struct Passes {
    pass: Pass,
    /// The credit that a data pass began with (bytes).
    credit: u64,
}

impl Passes {
    pub(super) fn new() -> Self {
        Self { pass: Pass::Idle, credit: 0 }
    }

    /// Begins anew: paths have changed their places.
    pub(super) fn reset(&mut self) {
        self.pass = Pass::Idle;
    }

    fn is_idle(&self) -> bool {
        self.pass == Pass::Idle
    }

    /// A data pass begins with so much credit.
    fn begin_data(&mut self, index: usize, credit: u64) {
        (self.pass, self.credit) = (Pass::Data(index), credit);
    }

    /// How many packets of `mtu` bytes may leave as one batch: they are no larger than the first of them. Where that may
    /// be a mere PING the library does not look whether all that it repeats of a lost packet fits the second.
    fn max_segments(&self, mtu: u16) -> NonZeroUsize {
        if !matches!(self.pass, Pass::Data(_)) {
            return NonZeroUsize::MIN;
        }
        NonZeroUsize::new((MAX_BATCH / usize::from(mtu.max(1200))).min(MAX_SEGMENTS))
            .unwrap_or(NonZeroUsize::MIN)
    }
}

impl Connection {
    /// Whether datagrams that are queued now would be the next to leave.
    pub fn is_between_passes(&self) -> bool {
        self.passes.is_idle()
    }

    /// The next UDP payload to send, written to the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.translate_all(now);
        self.handshake_unsent = false;
        loop {
            if self.passes.is_idle() {
                self.begin_pass(now);
            }
            let segments = self.passes.max_segments(self.inner.current_mtu());
            let Some(transmit) = self.guarded(|inner| inner.poll_transmit(now, segments, buf)) else {
                buf.clear();
                return None;
            };
            if let Some(transmit) = transmit {
                return Some(self.outgoing(&transmit));
            }
            if !self.end_pass(now) {
                return None;
            }
        }
    }

    /// The library has no more to send in this pass; returns whether another one has begun.
    fn end_pass(&mut self, now: Instant) -> bool {
        match self.passes.pass {
            Pass::Data(index) => {
                if !self.end_data_pass(index, now) {
                    self.check_stall(now, index);
                    self.begin_pass(now);
                }
                true
            }
            Pass::Heard => {
                self.begin_control(now, false);
                true
            }
            Pass::Control | Pass::Idle => {
                self.paths.iter().for_each(|path| path.gate.set_credit(0));
                self.begin_report(0)
            }
            Pass::Report(index) => {
                if let Some(path) = self.paths.at(index) {
                    path.gate.set_credit(0);
                }
                self.check_stall(now, index);
                self.begin_report(index + 1)
            }
        }
    }

    /// Shuts the gate of a data pass; returns whether the pass goes on with more credit.
    fn end_data_pass(&mut self, index: usize, now: Instant) -> bool {
        let Some((head, left)) = self.paths.at(index).map(|path| (path.head, path.gate.take_credit())) else {
            return false;
        };
        self.spend(head, self.passes.credit.saturating_sub(left));
        let Some(credit) = self.streams.grants.prolong(left, self.inner.current_mtu().into()) else {
            return false;
        };
        let Some(path) = self.paths.at_mut(index) else { return false };
        path.streams.note_retransmission(now);
        path.gate.set_credit(credit);
        self.passes.credit = credit;
        true
    }

    /// Starts the data pass of the next path that has data, or the control pass.
    fn begin_pass(&mut self, now: Instant) {
        while let Some(index) = self.paths.next_with_work(SILENT) {
            let Some(path) = self.paths.at_mut(index) else { break };
            let load = path.queue.begin_pass();
            if path.queue.has_tracked() {
                path.queue.track(&mut path.gate.follow());
            }
            let sent = match path.queue.datagrams() {
                [] => Ok(0),
                datagrams => self.inner.datagrams().send_many(datagrams, false),
            };
            path.queue.clear();
            if let Err(error) = &sent {
                if let Some(mut ledger) = path.gate.fates() {
                    ledger.lose_queued();
                }
                // They outgrew the path, if nothing worse has happened.
                tracing::debug!(%error, path = path.id.0, "datagrams were dropped");
            }
            if sent.is_ok() || load.stream_bytes > 0 {
                let credit = load.bytes + RIDING;
                path.gate.set_credit(credit);
                self.passes.begin_data(index, credit);
                self.write_granted(now, index, load.stream_bytes, load.lasting_since);
                return;
            }
        }
        self.begin_control(now, true);
    }

    /// Starts the control pass. Credit for streams, and what else is for the whole connection, leaves on the first path
    /// that the library may take, and lost there it is missed until the path is closed: so those that are silent come
    /// last, where they may.
    fn begin_control(&mut self, now: Instant, heard_first: bool) {
        let credit = u64::from(self.inner.current_mtu()) * CONTROL_PACKETS;
        let latest = self.paths.latest_activity().filter(|_| heard_first);
        self.passes.pass = Pass::Control;
        for path in self.paths.iter() {
            let later = path.activity.is_silent(latest, QUIET);
            path.gate.set_credit(if later { 0 } else { credit });
            if later {
                self.passes.pass = Pass::Heard;
            }
        }
        self.note_repeats(now);
    }

    /// Starts the pass of the first path from `from` on that has a report, after the control pass:
    /// acknowledgements that are due have left on their way, and do not ride along over a slow path.
    fn begin_report(&mut self, from: usize) -> bool {
        let mut index = from;
        while let Some(path) = self.paths.at_mut(index) {
            if let Some(report) = path.queue.take_report() {
                let bytes = (report.len() + DATAGRAM_OVERHEAD) as u64;
                if self.inner.datagrams().send_many(&[report], false).is_ok() {
                    path.gate.set_credit(bytes + RIDING);
                    self.passes.pass = Pass::Report(index);
                    return true;
                }
            }
            index += 1;
        }
        self.passes.reset();
        false
    }

    fn outgoing(&self, transmit: &noq_proto::Transmit) -> Transmit {
        Transmit {
            local: transmit.src_ip.map(LocalAddress::from).or(self.home),
            remote: transmit.destination,
            ecn: transmit.ecn.map(|ecn| ecn as u8),
            dscp: self.dscp_towards(transmit.destination),
            size: transmit.size,
            segment_size: transmit.segment_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_leaves_in_batches_and_no_larger_ones_than_the_kernel_takes() {
        let mut passes = Passes::new();
        assert!(passes.is_idle());
        assert_eq!(passes.max_segments(1472).get(), 1);
        passes.begin_data(0, 10_000);
        assert!(!passes.is_idle());
        assert_eq!(
            [1000, 1200, 1472, 9000, u16::MAX].map(|mtu| passes.max_segments(mtu).get()),
            [54, 54, 44, 7, 1]
        );
        passes.reset();
        assert!(passes.is_idle());
    }
}
