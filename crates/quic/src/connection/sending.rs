//! The available window of paths, and their queues.
//!
//! A path group is several paths over one link that the scheduler sees as one, under the path ID of the
//! first: they share a controller, a pacer and a rate cap, and data for the group goes to the path where it
//! waits least. With separate controllers, each path would take the packets of the others for a queue, and
//! the link's rate for its own.

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use mpvpn_class::ShaperHandle;
use mpvpn_path::PathCandidate;
use mpvpn_types::{BitRate, Duration, Instant, PathId};

use super::{
    Connection,
    path::{Allowance, Path, SentTotals},
};
use crate::sent_datagrams::TrackedDatagram;

impl Connection {
    /// Makes each list of paths a path group, under the path ID of the first in it; all other paths are
    /// alone. Controllers that were joined stay joined.
    pub fn set_path_groups(&mut self, lists: &[Vec<PathId>]) {
        self.paths.set_groups(lists);
    }

    /// The delivery rate of a path's group (bytes/s), at most its cap; 0 if unknown.
    pub fn delivery_rate(&self, id: PathId) -> u64 {
        self.paths.get(id).map_or(0, Path::rate)
    }

    /// Sets the rate cap of a path, in bits of IP packets; a path group shares it. Only data waits for it;
    /// acknowledgements and other frames count, but do not wait. A path with a shaper
    /// ([`Self::set_shaper`]) is limited by that instead.
    pub fn set_rate_cap(&mut self, now: Instant, id: PathId, rate: Option<BitRate>) {
        if self.paths.get_mut(id).is_some_and(|path| path.limits.set_rate(rate)) {
            self.apply_rate_cap(now, id);
        }
    }

    /// Sets or removes the shaper of a path's link. All paths of a connection over a link have the same
    /// handle.
    pub fn set_shaper(&mut self, now: Instant, id: PathId, handle: Option<ShaperHandle>) {
        let Some(path) = self.paths.get(id) else { return };
        let Some(handle) = handle else {
            if path.limits.has_shaper() {
                self.apply_rate_cap(now, id);
            }
            return;
        };
        if path.limits.has_this_shaper(&handle) {
            return;
        }
        let Some(sent) = self.sent(id) else { return };
        if let Some(path) = self.paths.get_mut(id) {
            path.limits.set_shaper(now, handle, sent);
        }
    }

    /// Limits a path by its configured rate, if it has one.
    fn apply_rate_cap(&mut self, now: Instant, id: PathId) {
        let Some(sent) = self.sent(id) else { return };
        let Some(path) = self.paths.get(id) else { return };
        let (head, rate) = (path.head, path.limits.rate);
        let same = |path: &&Path| {
            path.id != id && rate.is_some() && path.limits.cap.as_ref().is_some_and(|cap| cap.own == rate)
        };
        let other = self.paths.group(head).find(same).and_then(|path| path.limits.cap.clone());
        if let Some(path) = self.paths.get_mut(id) {
            path.limits.apply_rate(now, sent);
            path.limits.share_cap(other.as_ref());
        }
    }

    /// The totals of what a path has sent.
    fn sent(&mut self, id: PathId) -> Option<SentTotals> {
        let noq = noq_proto::PathId::from(id.0);
        let (sent, v4) = self.guarded_read(|inner| {
            let v4 = inner.network_path(noq).is_ok_and(|tuple| tuple.remote().is_ipv4());
            Some((inner.path_stats(noq)?.udp_tx, v4))
        })??;
        Some(SentTotals { v4, bytes: sent.bytes, datagrams: sent.datagrams })
    }

    /// The available window of a path's group: bytes of datagrams, framing included, that may be queued now.
    pub fn available_window(&mut self, now: Instant, id: PathId) -> u64 {
        self.contained_read(|connection| connection.window_of_group(now, id)).unwrap_or(0)
    }

    fn window_of_group(&mut self, now: Instant, id: PathId) -> u64 {
        let mtu = self.mtu();
        let (mut in_flight, mut queued, mut cap_budget) = (0, 0, None);
        for path in self.paths.group_mut(id) {
            in_flight += path.gate.in_flight();
            queued += path.queue.bytes;
            if path.limits.cap.is_none() {
                continue;
            }
            if let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0)) {
                path.limits.count(now, (stats.udp_tx.bytes, stats.udp_tx.datagrams), &path.gate);
            }
            cap_budget = path.limits.cap.as_mut().map(|cap| cap.left(now));
        }
        let Some(path) = self.paths.get_mut(id) else { return 0 };
        let allowed = Allowance {
            window: path.gate.window().saturating_sub(in_flight),
            pacing_rate: path.gate.pacing_rate(),
            mtu,
            batching: path.gate.inside_tcp.load(Relaxed),
        };
        let budget = path.limits.budget(now, allowed, cap_budget);
        if path.limits.late {
            self.paths.group(id).for_each(|path| path.gate.on_late(now));
        }
        budget.saturating_sub(queued)
    }

    /// A path's group as a candidate of the scheduler, with at most `max` bytes of available window. Its
    /// one-way delay follows from the round trips of all paths.
    pub fn path_candidate(&mut self, now: Instant, id: PathId, max: u64) -> PathCandidate {
        let room = self.available_window(now, id).min(max);
        let ahead = self.paths.group(id).map(Path::outstanding).sum();
        let (round_trip, rate) = self.paths.get(id).map_or((Duration::MAX, 0), |path| {
            (path.gate.base_rtt(), path.limits.under_cap(path.gate.rate()))
        });
        let (available_window, outstanding, one_way_delay) = (room, ahead, Duration::ZERO);
        PathCandidate { id, available_window, one_way_delay, round_trip, outstanding, rate, weight: 1 }
    }

    /// Sets whether more data waited for a path's group than its available window. Congestion controllers
    /// learn the capacity only while that is so.
    pub fn set_backlogged(&mut self, id: PathId, limited: bool) {
        let Some(first) = self.paths.get(id) else { return };
        let (capped, paced) = (first.limits.capped, first.limits.paced);
        self.paths.group_mut(id).for_each(|path| path.set_backlogged(limited, capped, paced));
        self.tell_wanting(id);
    }

    /// Sets that no data waits for any path.
    pub fn set_none_backlogged(&mut self) {
        self.paths.iter_mut().for_each(|path| path.set_backlogged(false, false, false));
        self.paths
            .iter()
            .filter_map(|path| path.limits.cap.as_ref())
            .for_each(|cap| cap.set_backlogged(false));
    }

    /// Tells the shaper of a path's link whether more data waits for any path with the same handle.
    fn tell_wanting(&self, id: PathId) {
        let Some(cap) = self.paths.get(id).and_then(|path| path.limits.cap.as_ref()) else { return };
        let wants = |path: &Path| path.limits.backlogged && path.limits.has_this_shaper(&cap.handle);
        cap.set_backlogged(self.paths.iter().any(wants));
    }

    /// Whether more data waits for a path's group than its available window.
    pub fn is_backlogged(&self, id: PathId) -> bool {
        self.paths.get(id).is_some_and(|path| path.limits.backlogged)
    }

    /// Whether ack-eliciting packets of a path are neither acknowledged nor lost.
    pub fn has_in_flight(&self, id: PathId) -> bool {
        self.paths.get(id).is_some_and(|path| path.gate.in_flight() > 0)
    }

    /// Queues a datagram for a path's group; returns the bytes of available window that it takes.
    pub fn queue_datagram(&mut self, id: PathId, datagram: Bytes) -> u64 {
        self.next_of_group(id).map_or(0, |path| path.queue.push(datagram))
    }

    /// As [`Self::queue_datagram`], for a datagram whose outcome [`Self::drain_outcomes`] reports.
    pub fn queue_tracked(&mut self, id: PathId, datagram: TrackedDatagram) -> u64 {
        self.next_of_group(id).map_or(0, |path| path.queue.push_tracked(datagram))
    }

    /// As [`Self::queue_tracked`], for this path itself, not its group.
    pub fn queue_tracked_on_path(&mut self, id: PathId, datagram: TrackedDatagram) -> u64 {
        self.paths.get_mut(id).map_or(0, |path| path.queue.push_tracked(datagram))
    }

    /// Queues a datagram for this path itself, whatever its available window.
    pub fn queue_datagram_on_path(&mut self, id: PathId, datagram: Bytes) {
        if let Some(path) = self.paths.get_mut(id) {
            path.queue.push(datagram);
        }
    }

    /// Bytes of UDP payloads that a path has sent and received.
    pub fn udp_bytes_carried(&mut self, id: PathId) -> u64 {
        let stats = self.guarded_read(|inner| inner.path_stats(noq_proto::PathId::from(id.0))).flatten();
        stats.map_or(0, |stats| stats.udp_tx.bytes + stats.udp_rx.bytes)
    }

    /// The path of the group `head` on which a datagram that is queued now leaves.
    pub fn next_path_in_group(&mut self, head: PathId) -> Option<PathId> {
        self.next_of_group(head).map(|path| path.id)
    }

    /// The path of a group whose turn it is.
    pub(super) fn next_of_group(&mut self, head: PathId) -> Option<&mut Path> {
        let Self { inner, guard, id: own, paths, .. } = self;
        let rtt = |id: PathId| guard.ask(*own, || inner.rtt(noq_proto::PathId::from(id.0))).flatten();
        paths.next_of_group(head, |id| rtt(id).unwrap_or_default())
    }

    /// Takes the bytes that a path group has sent out of its pacer. Small datagrams share packets, so this is
    /// less than was queued; a pacer that counted more than is acknowledged would lower the rate more and
    /// more.
    pub(super) fn spend(&mut self, head: PathId, bytes: u64) {
        if let Some(path) = self.paths.get_mut(head) {
            path.limits.pacer.spend(bytes);
        }
    }
}
