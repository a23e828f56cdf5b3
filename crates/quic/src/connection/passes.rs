//! Which path sends next: a data pass for each path, then a control pass for all, then the reports.
//!
//! noq sends on the path with the lowest number whose gate is open. So a data pass opens the gate of one path, with credit for
//! the bytes in that path's queue; the control pass opens all gates a little, for acknowledgements, heartbeats, path
//! challenges and MTU probes. Reports (datagrams about the path) leave last, each on its path.
//!
//! In: queued datagrams and send quotas. Out: UDP payloads. Always holds: a data pass sends on one path only.

use std::num::NonZeroUsize;

use mpvpn_types::{Duration, Instant};

use super::Connection;
use crate::{DATAGRAM_OVERHEAD, LocalAddress, Transmit};

/// The credit of a control pass for each path, in packets: an acknowledgement, a heartbeat, a path challenge and an MTU probe.
/// Fewer: one of them waits; more: the path exceeds its window by more.
const CONTROL_PACKETS: u64 = 4;
/// Extra credit of a pass for acknowledgements in the same packets (bytes). Smaller: the last data needs a second pass.
const ACK_CREDIT: u64 = 1500;
/// The kernel's limits of one segmented send: segments, and bytes with headers (udp(7)).
const MAX_SEGMENTS: usize = 64;
const MAX_BATCH_BYTES: usize = 65_000;
/// A path on which nothing arrived for this long, while something did on others, sends its data pass last, because
/// acknowledgements leave with the first. Shorter: they leave on slow paths; longer: on dead ones.
const SILENT_PATH: Duration = Duration::from_millis(30);
/// The same for control frames such as flow control credit; on a path that carries data something arrives far more often.
/// Shorter: they leave on slow paths; longer: on dead ones.
const QUIET_PATH: Duration = Duration::from_millis(8);

/// The current pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Idle,
    /// The data pass of the path at this index.
    Data(usize),
    /// The control pass of the paths on which something arrived lately.
    ActiveControl,
    Control,
    /// The report of the path at this index.
    Report(usize),
}

/// The passes of a connection.
#[derive(Debug)]
pub(super) struct Passes {
    pass: Pass,
    /// The initial credit of the data pass (bytes).
    credit: u64,
}

impl Passes {
    pub(super) fn new() -> Self {
        Self { pass: Pass::Idle, credit: 0 }
    }

    /// Restarts, because the indices of paths have changed.
    pub(super) fn reset(&mut self) {
        self.pass = Pass::Idle;
    }

    fn is_idle(&self) -> bool {
        self.pass == Pass::Idle
    }

    /// Begins a data pass with this credit (bytes).
    fn begin_data(&mut self, index: usize, credit: u64) {
        (self.pass, self.credit) = (Pass::Data(index), credit);
    }

    /// How many packets of `mtu` bytes may leave as one GSO batch; none is larger than the first. Only data passes batch: if the
    /// first packet is only a PING, noq does not check that retransmitted frames fit into the second.
    fn max_segments(&self, mtu: u16) -> NonZeroUsize {
        if !matches!(self.pass, Pass::Data(_)) {
            return NonZeroUsize::MIN;
        }
        NonZeroUsize::new((MAX_BATCH_BYTES / usize::from(mtu.max(1200))).min(MAX_SEGMENTS))
            .unwrap_or(NonZeroUsize::MIN)
    }
}

impl Connection {
    /// Whether no pass is running, so that datagrams that are queued now leave next.
    pub fn is_between_passes(&self) -> bool {
        self.passes.is_idle()
    }

    /// The next UDP payload to send, written to the end of `buf`, which must be empty.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        match self.contained(|connection| connection.next_transmit(now, buf)) {
            Some(transmit) => transmit,
            None => {
                buf.clear();
                None
            }
        }
    }

    fn next_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        self.translate_all(now);
        self.handshake_unsent = false;
        loop {
            if self.passes.is_idle() {
                self.begin_pass(now);
            }
            let segments = self.passes.max_segments(self.inner.current_mtu());
            let transmit = self.inner.poll_transmit(now, segments, buf);
            if let Some(transmit) = transmit {
                return Some(self.outgoing(&transmit));
            }
            if !self.end_pass(now) {
                return None;
            }
        }
    }

    /// noq has no more to send in this pass; returns whether another one has begun.
    fn end_pass(&mut self, now: Instant) -> bool {
        match self.passes.pass {
            Pass::Data(index) => {
                if !self.end_data_pass(index, now) {
                    self.check_stall(now, index);
                    self.begin_pass(now);
                }
                true
            }
            Pass::ActiveControl => {
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

    /// Shuts the gate of a data pass; returns whether the pass is extended.
    fn end_data_pass(&mut self, index: usize, now: Instant) -> bool {
        let Some((head, left)) = self.paths.at(index).map(|path| (path.head, path.gate.take_credit())) else {
            return false;
        };
        self.spend(head, self.passes.credit.saturating_sub(left));
        let Some(credit) = self.streams.quotas.extend_pass(left, self.inner.current_mtu().into()) else {
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
        while let Some(index) = self.paths.next_with_work(SILENT_PATH) {
            let Some(path) = self.paths.at_mut(index) else { break };
            let load = path.queue.begin_pass();
            if path.queue.has_tracked() {
                path.queue.track(&mut path.gate.track());
            }
            let sent = match path.queue.datagrams() {
                [] => Ok(0),
                datagrams => self.inner.datagrams().send_many(datagrams, false),
            };
            path.queue.clear();
            if let Err(error) = &sent {
                if let Some(mut ledger) = path.gate.tracked() {
                    ledger.lose_queued();
                }
                // Mostly because the path's MTU has become smaller.
                tracing::debug!(%error, path = path.id.0, "noq refused datagrams: they are dropped");
            }
            if sent.is_ok() || load.stream_bytes > 0 {
                let credit = load.bytes + ACK_CREDIT;
                path.gate.set_credit(credit);
                self.passes.begin_data(index, credit);
                self.write_quota(now, index, load.stream_bytes, load.long_since);
                return;
            }
        }
        self.begin_control(now, true);
    }

    /// Starts the control pass. Frames for the whole connection, such as flow control credit, leave on the first open path, and
    /// if that is dead they are missing until it is closed: so silent paths come last.
    fn begin_control(&mut self, now: Instant, active_first: bool) {
        let credit = u64::from(self.inner.current_mtu()) * CONTROL_PACKETS;
        let latest = self.paths.latest_activity().filter(|_| active_first);
        self.passes.pass = Pass::Control;
        for path in self.paths.iter() {
            let later = path.activity.is_silent(latest, QUIET_PATH);
            path.gate.set_credit(if later { 0 } else { credit });
            if later {
                self.passes.pass = Pass::ActiveControl;
            }
        }
        self.note_retransmissions(now);
    }

    /// Starts the pass of the first path from `from` on that has a report. It is after the control pass so that pending
    /// acknowledgements do not leave with a report on a slow path.
    fn begin_report(&mut self, from: usize) -> bool {
        let mut index = from;
        while let Some(path) = self.paths.at_mut(index) {
            if let Some(report) = path.queue.take_report() {
                let bytes = (report.len() + DATAGRAM_OVERHEAD) as u64;
                if self.inner.datagrams().send_many(&[report], false).is_ok() {
                    path.gate.set_credit(bytes + ACK_CREDIT);
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
            local: transmit.src_ip.map(LocalAddress::from).or(self.initial_local),
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
    fn only_data_passes_batch_and_within_the_limits_of_the_kernel() {
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
