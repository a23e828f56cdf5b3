//! What keeps paths going, and what tells whether they work.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use mpvpn_types::{Instant, PathId};
use noq_proto::PathStatus;

use super::Connection;
use crate::gate::shared_of;

impl Connection {
    /// Sets how this end means to use a path, and tells the peer.
    pub fn set_status(&mut self, id: PathId, status: PathStatus) {
        if let Some(path) = self.paths.get_mut(id) {
            path.stall.set_status(status);
        }
        // Refused without multipath, where there is nothing to choose.
        let _ = self.inner.set_path_status(noq_proto::PathId::from(id.0), status);
    }

    /// Sends a PING on a path with the next control pass.
    pub fn heartbeat(&mut self, id: PathId) {
        // A path that is gone needs none.
        let _ = self.inner.ping_path(noq_proto::PathId::from(id.0));
    }

    /// Takes losses on this path for the death of the path rather than for congestion.
    pub fn set_ignore_losses(&mut self, id: PathId, frozen: bool) {
        if let Some(path) = self.paths.get(id) {
            path.gate.frozen.store(frozen, Relaxed);
        }
    }

    /// Says whether what a path loses at all times is made good without being sent again. Then it does not count as
    /// congestion for a controller that cannot tell.
    pub fn set_losses_repaired(&mut self, id: PathId, made_good: bool) {
        if let Some(path) = self.paths.get_mut(id) {
            path.losses.set_made_good(made_good);
        }
    }

    /// Whether the far end of a path is on this machine, as it is where its packets came here inside TCP.
    pub fn is_loopback_peer(&self, id: PathId) -> bool {
        let tuple = self.inner.network_path(noq_proto::PathId::from(id.0));
        tuple.is_ok_and(|tuple| tuple.remote().ip().to_canonical().is_loopback())
    }

    /// Says that the packets of a path travel inside TCP, which controls congestion already.
    pub fn set_inside_tcp(&self, id: PathId) {
        if let Some(path) = self.paths.get(id) {
            path.gate.inside_tcp.store(true, Relaxed);
        }
    }

    /// When the newest acknowledged packet of a path was sent.
    pub fn last_acked_send_time(&self, id: PathId) -> Option<Instant> {
        self.paths.get(id).map(|path| path.gate.acked_sent())
    }

    /// Calls `each` for every path on which something arrived since the last call.
    pub fn drain_paths_with_arrivals(&mut self, now: Instant, mut each: impl FnMut(PathId)) {
        for path in self.paths.iter_mut() {
            let noq = noq_proto::PathId::from(path.id.0);
            let Some(stats) = self.inner.path_stats(noq) else { continue };
            self.streams.note_lost(path.losses.newly_lost(stats.lost_bytes));
            path.limits.count(now, (stats.udp_tx.bytes, stats.udp_tx.datagrams), &path.gate);
            if !path.activity.update(now, stats.udp_rx.datagrams) {
                continue;
            }
            path.settle_streams();
            each(path.id);
            let remote = self.inner.network_path(noq).ok().map(|tuple| tuple.remote());
            let is_known = path.activity.remote().is_some();
            if !path.activity.update_remote(remote) {
                continue;
            }
            if is_known {
                self.gates.record_path(now, path.id, &self.inner);
            }
            // A peer at another IP address gets a controller of its own from the library, behind a gate that
            // nobody holds yet.
            if let Some(gate) = self.inner.congestion_state(noq).and_then(shared_of)
                && !Arc::ptr_eq(&gate, &path.gate)
            {
                self.gates.apply(&gate, path.id);
                path.gate = gate;
            }
        }
    }

    /// Queues a datagram for a path that leaves after all else, whatever the path's window. One that still
    /// waits is replaced.
    pub fn queue_report(&mut self, id: PathId, datagram: Bytes) {
        if let Some(path) = self.paths.get_mut(id) {
            path.queue.set_report(datagram);
        }
    }

    /// After the data pass of a path: whether the library let its datagrams go.
    pub(super) fn check_stall(&mut self, now: Instant, index: usize) {
        let Some(path) = self.paths.at_mut(index) else { return };
        if self.inner.datagrams().send_buffer_space() >= self.buffer {
            path.stall.on_all_sent();
            return;
        }
        if path.stall.expects_datagrams()
            && let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0))
        {
            path.stall.on_left_over(now, stats.frame_tx.datagram);
        }
    }

    /// Since when no datagram has left on a path although it was given some; `None` if they leave. After a
    /// change of the client's address the library sends none until the new one is validated, and it tries
    /// that for three probe timeouts only.
    pub fn stalled_since(&self, id: PathId) -> Option<Instant> {
        self.paths.get(id).and_then(|path| path.stall.since())
    }
}
