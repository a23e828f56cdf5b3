//! Which path sends next: a data pass for each path, then a control pass for all, then the reports.
//!
//! noq sends on the path with the lowest number whose gate is open. So a data pass opens the gate of one
//! path, with credit for the bytes in that path's queue; the control pass opens all gates a little, for
//! acknowledgements, heartbeats, path challenges and MTU probes. Reports (datagrams about the path) leave
//! last, each on its path.
//!
//! noq looks at every path at each call, so it is called only for what it may have to send: a pass ends when
//! its datagrams have left, and there is a control pass only if something has reached noq since the last one,
//! else it has nothing to say.
//!
//! In: queued datagrams and send quotas. Out: UDP payloads. Always holds: a data pass sends on one path only.

use std::num::NonZeroUsize;

use mpvpn_types::{Duration, Instant};

use super::Connection;
use crate::{DATAGRAM_OVERHEAD, LocalAddress, Transmit};

/// The credit of a control pass for each path, in packets: an acknowledgement, a heartbeat, a path challenge
/// and an MTU probe. Fewer: one of them waits; more: the path exceeds its window by more.
const CONTROL_PACKETS: u64 = 4;
/// Extra credit of a pass for acknowledgements in the same packets (bytes). Smaller: the last data needs a
/// second pass.
const ACK_CREDIT: u64 = 1500;
/// The kernel's limits of one segmented send: segments, and bytes with headers (udp(7)).
const MAX_SEGMENTS: usize = 64;
const MAX_BATCH_BYTES: usize = 65_000;
/// A path on which nothing arrived for this long, while something did on others, sends its data pass last,
/// because acknowledgements leave with the first. Shorter: they leave on slow paths; longer: on dead ones.
const SILENT_PATH: Duration = Duration::from_millis(30);
/// The same for control frames such as flow control credit; on a path that carries data something arrives far
/// more often. Shorter: they leave on slow paths; longer: on dead ones.
const QUIET_PATH: Duration = Duration::from_millis(8);

/// The current pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PassKind {
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
    pass: PassKind,
    /// The initial credit of the data pass (bytes).
    credit: u64,
    /// Whether the data pass has stream data, too.
    has_streams: bool,
    /// Whether all datagrams of the pass have left, so that noq has no more to send in it.
    is_done: bool,
    /// Whether noq may have something for a control pass.
    control_due: bool,
}

impl Passes {
    pub(super) fn new() -> Self {
        Self { pass: PassKind::Idle, credit: 0, has_streams: false, is_done: false, control_due: true }
    }

    /// noq may have something for a control pass.
    pub(super) fn note_change(&mut self) {
        self.control_due = true;
    }

    /// Restarts, because the indices of paths have changed.
    pub(super) fn reset(&mut self) {
        self.pass = PassKind::Idle;
    }

    fn is_idle(&self) -> bool {
        self.pass == PassKind::Idle
    }

    fn begin(&mut self, pass: PassKind) {
        (self.pass, self.is_done) = (pass, false);
    }

    /// Begins a data pass with this credit (bytes).
    fn begin_data(&mut self, index: usize, credit: u64, has_streams: bool) {
        self.begin(PassKind::Data(index));
        (self.credit, self.has_streams) = (credit, has_streams);
    }

    /// noq has written a UDP payload; `datagrams_left`: it holds datagrams that it has not written yet.
    fn on_written(&mut self, datagrams_left: bool) {
        self.is_done = !datagrams_left
            && match self.pass {
                PassKind::Data(_) => !self.has_streams,
                PassKind::Report(_) => true,
                PassKind::Idle | PassKind::ActiveControl | PassKind::Control => false,
            };
    }

    /// How many packets of `mtu` bytes may leave as one GSO batch; none is larger than the first. Only data
    /// passes batch: if the first packet is only a PING, noq does not check that retransmitted frames fit
    /// into the second.
    fn max_segments(&self, mtu: u16) -> NonZeroUsize {
        if !matches!(self.pass, PassKind::Data(_)) {
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
        match self.contained_read(|connection| connection.next_transmit(now, buf)) {
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
        if let Some(at) = self.taken_since.take() {
            let late = now.saturating_duration_since(at);
            self.paths.iter().for_each(|path| path.gate.on_answered(late));
        }
        let mut sends = !self.passes.is_idle() || self.begin_pass(now);
        while sends {
            if !self.passes.is_done {
                let mtu = self.mtu();
                let segments = self.passes.max_segments(mtu);
                if let Some(transmit) = self.inner.poll_transmit(now, segments, buf) {
                    self.cached.has_no_events = false;
                    let left = self.datagram_bytes_left();
                    self.passes.on_written(left > 0);
                    return Some(self.outgoing(&transmit));
                }
            }
            sends = self.end_pass(now);
        }
        None
    }

    /// noq has no more to send in this pass; returns whether another one has begun.
    fn end_pass(&mut self, now: Instant) -> bool {
        match self.passes.pass {
            PassKind::Data(index) => {
                let bytes_left = self.datagram_bytes_left_of_pass();
                if self.end_data_pass(now, index, bytes_left) {
                    return true;
                }
                self.check_stall(now, index, bytes_left);
                self.begin_pass(now)
            }
            PassKind::ActiveControl => {
                self.begin_control(now, false);
                true
            }
            PassKind::Control => {
                // Where the credit was not enough, there is more to say.
                let mut is_spent = false;
                self.paths.iter().for_each(|path| is_spent |= path.gate.take_credit() == 0);
                self.passes.control_due = is_spent;
                self.begin_report(0)
            }
            PassKind::Idle => self.begin_report(0),
            PassKind::Report(index) => {
                if let Some(path) = self.paths.at(index) {
                    path.gate.set_credit(0);
                }
                let bytes_left = self.datagram_bytes_left_of_pass();
                self.check_stall(now, index, bytes_left);
                self.begin_report(index + 1)
            }
        }
    }

    /// Bytes of datagrams that noq holds, as it has not written them.
    pub(super) fn datagram_bytes_left(&mut self) -> usize {
        self.empty_datagram_buffer.saturating_sub(self.inner.datagrams().send_buffer_space())
    }

    /// The same at the end of a pass: none, if it ended because all have left.
    fn datagram_bytes_left_of_pass(&mut self) -> usize {
        if self.passes.is_done { 0 } else { self.datagram_bytes_left() }
    }

    /// Shuts the gate of a data pass, of whose datagrams noq still holds `bytes_left`; returns whether the
    /// pass is extended.
    fn end_data_pass(&mut self, now: Instant, index: usize, bytes_left: usize) -> bool {
        let Some(path) = self.paths.at(index) else { return false };
        let (head, left) = (path.head, path.gate.take_credit());
        if let Some(mut sent) = path.gate.tracked() {
            sent.on_pass_end(bytes_left);
        }
        self.spend(head, self.passes.credit.saturating_sub(left));
        let mtu = self.mtu();
        let Some(credit) = self.streams.quotas.extend_pass(left, mtu.into()) else {
            if left == 0 || bytes_left > 0 {
                self.passes.note_change();
            }
            return false;
        };
        let Some(path) = self.paths.at_mut(index) else { return false };
        path.streams.note_retransmission(now);
        path.gate.set_credit(credit);
        self.passes.credit = credit;
        true
    }

    /// Starts the data pass of the next path that has data, else the control pass, else that of a report.
    /// Returns whether there is one.
    fn begin_pass(&mut self, now: Instant) -> bool {
        while let Some(index) = self.paths.next_with_work(SILENT_PATH) {
            self.acknowledge_along(now);
            let left = self.datagram_bytes_left();
            let Some(path) = self.paths.at_mut(index) else { break };
            let load = path.queue.begin_pass();
            if !path.queue.tracked.is_empty() {
                let mut sent = path.gate.track();
                sent.forget_written_elsewhere(left);
                path.queue.track(&mut sent);
            }
            let sent = match &path.queue.datagrams[..] {
                [] => Ok(0),
                datagrams => self.inner.datagrams().send_many(datagrams, false),
            };
            path.queue.datagrams.clear();
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
                self.passes.begin_data(index, credit, load.stream_bytes > 0);
                self.write_quota(now, index, load.stream_bytes, load.long_since);
                return true;
            }
        }
        if !self.passes.control_due {
            return self.begin_report(0);
        }
        self.begin_control(now, true);
        true
    }

    /// Lets noq write the acknowledgement of a lone packet into the packet that leaves next.
    fn acknowledge_along(&mut self, now: Instant) {
        if let Some(at) = self.lone_packet.acknowledged_at()
            && now < at
            && self.inner.poll_timeout() == Some(at)
        {
            // No other timer is as early, so this one alone runs out.
            self.inner.handle_timeout(at);
        }
    }

    /// Starts the control pass. Frames for the whole connection, such as flow control credit, leave on the
    /// first open path, and if that is dead they are missing until it is closed: so silent paths come
    /// last.
    fn begin_control(&mut self, now: Instant, active_first: bool) {
        let credit = u64::from(self.mtu()) * CONTROL_PACKETS;
        let latest = self.paths.latest_activity().filter(|_| active_first);
        self.passes.begin(PassKind::Control);
        for path in self.paths.iter() {
            let later = path.activity.is_silent(latest, QUIET_PATH);
            path.gate.set_credit(if later { 0 } else { credit });
            if later {
                self.passes.pass = PassKind::ActiveControl;
            }
        }
        self.note_retransmissions(now);
    }

    /// Starts the pass of the first path from `from` on that has a report. It is after the control pass so
    /// that pending acknowledgements do not leave with a report on a slow path.
    fn begin_report(&mut self, from: usize) -> bool {
        let mut index = from;
        while let Some(path) = self.paths.at_mut(index) {
            if let Some(report) = path.queue.take_report() {
                let bytes = (report.len() + DATAGRAM_OVERHEAD) as u64;
                if self.inner.datagrams().send_many(&[report], false).is_ok() {
                    path.gate.set_credit(bytes + ACK_CREDIT);
                    self.passes.begin(PassKind::Report(index));
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
        passes.begin_data(0, 10_000, false);
        assert!(!passes.is_idle());
        assert_eq!(
            [1000, 1200, 1472, 9000, u16::MAX].map(|mtu| passes.max_segments(mtu).get()),
            [54, 54, 44, 7, 1]
        );
        passes.reset();
        assert!(passes.is_idle());
    }

    #[test]
    fn a_pass_is_done_when_its_datagrams_have_left_and_streams_have_no_more() {
        let mut passes = Passes::new();
        let mut is_done = |has_streams, datagrams_left| {
            passes.begin_data(0, 10_000, has_streams);
            assert!(!passes.is_done, "a new pass");
            passes.on_written(datagrams_left);
            passes.is_done
        };
        assert_eq!([is_done(false, false), is_done(false, true), is_done(true, false)], [true, false, false]);
        passes.begin(PassKind::Control);
        passes.on_written(false);
        assert!(!passes.is_done, "noq may have more control frames");
    }
}
