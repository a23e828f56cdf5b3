//! Heartbeats, path status, and observations of each path: arrivals, losses, changes of address.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use mpvpn_types::{Instant, PathId};
use noq_proto::PathStatus;

use super::{Connection, path::Origin};
use crate::{LocalAddress, gate::gate_state_of};

impl Connection {
    /// Sets the status of a path at this end, and reports it to the peer.
    pub fn set_status(&mut self, id: PathId, status: PathStatus) {
        if let Some(path) = self.paths.get_mut(id) {
            path.stall.set_status(status);
        }
        // noq refuses this without multipath.
        self.guarded(|inner| inner.set_path_status(noq_proto::PathId::from(id.0), status).ok());
    }

    /// Sends a PING on a path with the next control pass.
    pub fn heartbeat(&mut self, id: PathId) {
        // An abandoned path needs none.
        self.guarded(|inner| inner.ping_path(noq_proto::PathId::from(id.0)).ok());
    }

    /// Sets whether losses on this path are ignored as signs of congestion, because the path is dead.
    pub fn set_ignore_losses(&mut self, id: PathId, frozen: bool) {
        if let Some(path) = self.paths.get(id) {
            path.gate.ignore_losses.store(frozen, Relaxed);
        }
    }

    /// Whether the peer is behind a socket of this process, as on paths inside TCP at a server.
    pub fn is_own_peer(&self, id: PathId) -> bool {
        let own = self.own_sockets.as_ref();
        own.zip(self.remote_of(id)).is_some_and(|(own, remote)| own.contains(remote))
    }

    /// Marks a path as one inside TCP, which controls congestion itself.
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
    pub fn drain_paths_with_arrivals(&mut self, now: Instant, each: impl FnMut(PathId)) {
        self.contained_read(|connection| connection.note_arrivals(now, each));
    }

    fn note_arrivals(&mut self, now: Instant, mut each: impl FnMut(PathId)) {
        let has_new_origin = self.paths.take_new_origin();
        for path in self.paths.iter_mut() {
            // To read a path costs hundreds of instructions: noq copies all of its counters.
            let is_stale = std::mem::take(&mut path.activity.is_stale) | path.gate.take_acked();
            if !is_stale && path.limits.cap.is_none() {
                continue;
            }
            let noq = noq_proto::PathId::from(path.id.0);
            let Some(stats) = self.inner.path_stats(noq) else { continue };
            self.streams.note_lost(path.losses.newly_lost(stats.lost_bytes));
            path.limits.count(now, (stats.udp_tx.bytes, stats.udp_tx.datagrams), &path.gate);
            if !path.activity.update(now, stats.udp_rx.datagrams) {
                continue;
            }
            path.drop_acked_streams();
            each(path.id);
            if !has_new_origin {
                continue;
            }
            let tuple = self.inner.network_path(noq).ok();
            let remote = tuple.map(|tuple| tuple.remote());
            let local = tuple.and_then(|tuple| tuple.local_ip()).map(LocalAddress::from);
            path.activity.origin = remote.map(|remote| Origin::new(local.or(self.initial_local), remote));
            let is_known = path.activity.remote.is_some();
            if !path.activity.update_remote(remote) {
                continue;
            }
            if is_known {
                self.gates.record_path(now, path.id, &self.inner);
            }
            // For a peer at another IP address noq creates a new controller, with a new gate.
            if let Some(gate) = self.inner.congestion_state(noq).and_then(gate_state_of)
                && !Arc::ptr_eq(&gate, &path.gate)
            {
                self.gates.apply(&gate, path.id);
                path.gate = gate;
            }
        }
    }

    /// Queues a report for a path: a datagram that leaves after everything else, whatever the path's window.
    /// One that still waits is replaced.
    pub fn queue_report(&mut self, id: PathId, datagram: Bytes) {
        if let Some(path) = self.paths.get_mut(id) {
            path.queue.set_report(datagram);
        }
    }

    /// Checks after a pass whether noq has sent the datagrams of the path; it still holds `bytes_left`.
    pub(super) fn check_stall(&mut self, now: Instant, index: usize, bytes_left: usize) {
        let Some(path) = self.paths.at_mut(index) else { return };
        if bytes_left == 0 {
            path.stall.on_all_sent();
            return;
        }
        if path.stall.expects_datagrams()
            && let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0))
        {
            path.stall.on_left_over(now, stats.frame_tx.datagram);
        }
    }

    /// Since when noq has not sent the path's datagrams; `None` if it sends them. After a change of the
    /// client's address noq sends none until the new address is validated, for which it tries only three
    /// probe timeouts.
    pub fn stalled_since(&self, id: PathId) -> Option<Instant> {
        self.paths.get(id).and_then(|path| path.stall.since())
    }
}
