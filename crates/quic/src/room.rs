//! How much paths may take, and what they are given.
//!
//! Several paths over one link carry as one: they have one controller, one pacer and one cap, are offered together
//! under the name of the first of them, and what is queued for that goes to the one where it waits least. Each on its
//! own would take the others' packets for a queue and the link's rate for its own.

use bytes::Bytes;
use mpvpn_class::Seat;
use mpvpn_path::Offer;
use mpvpn_types::{BitRate, Duration, Instant, PathId};
use std::sync::atomic::Ordering::Relaxed;

use crate::{Connection, cap::Cap, config::DATAGRAM_OVERHEAD, connection::Path, ledger::Tracked};

/// Bytes that one of several paths takes before it is asked again which has the least before it: few enough to spread
/// a round trip's data, enough to make use of segmentation.
const TURN: u64 = 12 * 1024;

impl Connection {
    /// Lets the paths of each list carry as one from now on, under the name of the first in it; all others carry
    /// alone. Controllers that were joined stay so.
    pub fn set_together(&mut self, lists: &[Vec<PathId>]) {
        for at in 0..self.paths.len() {
            let id = self.paths[at].id;
            let head = lists.iter().find(|list| list.contains(&id)).and_then(|list| list.first());
            let head = head.copied().unwrap_or(id);
            if self.paths[at].head == head {
                continue;
            }
            let first = self.path(head).map(|first| (first.gate.clone(), first.cap.clone()));
            let path = &mut self.paths[at];
            (path.head, path.turn, path.paced) = (head, 0, path.paced && head == id);
            if let Some((gate, cap)) = first.filter(|_| head != id) {
                gate.join(&path.gate);
                path.share_cap(cap.as_ref());
            }
        }
    }

    /// The paths that carry as one under this name.
    pub(crate) fn together(&self, head: PathId) -> impl Iterator<Item = &Path> {
        self.paths.iter().filter(move |path| path.head == head)
    }

    /// Estimated delivery rate of a path and those that carry as one with it (bytes/s), at most its cap; 0 if
    /// unknown.
    pub fn rate(&self, id: PathId) -> u64 {
        self.path(id).map_or(0, Path::rate)
    }

    /// Sends no more than this on a path, in bits of IP packets; data waits, what keeps the
    /// connection going does not, and counts. Paths that carry as one share it. A path with a seat at the shaper of its
    /// link ([`Self::set_share`]) is held to that instead.
    pub fn set_rate_cap(&mut self, now: Instant, id: PathId, rate: Option<BitRate>) {
        let Some(path) = self.path_mut(id) else { return };
        path.limit = rate;
        if path.cap.as_ref().is_none_or(|cap| cap.own().is_some()) {
            self.limit(now, id);
        }
    }

    /// Gives a path its seat at the shaper of its link, or takes it away. What the shaper holds back waits as with a
    /// cap, and says nothing about the path. Of one connection, all paths over a link have the same seat.
    pub fn set_share(&mut self, now: Instant, id: PathId, seat: Option<Seat>) {
        let Some(path) = self.path(id) else { return };
        let Some(seat) = seat else {
            if path.cap.as_ref().is_some_and(|cap| cap.own().is_none()) {
                self.limit(now, id);
            }
            return;
        };
        if path.cap.as_ref().is_some_and(|cap| cap.seat().is_same(&seat)) {
            return;
        }
        let Some((v4, bytes, datagrams)) = self.sent(id) else { return };
        if let Some(path) = self.path_mut(id) {
            path.cap = Some(Cap::new(now, seat, v4, bytes, datagrams));
        }
    }

    /// Holds a path to its own limit, or to none.
    fn limit(&mut self, now: Instant, id: PathId) {
        let Some((v4, bytes, datagrams)) = self.sent(id) else { return };
        let Some(path) = self.path(id) else { return };
        let (head, rate) = (path.head, path.limit);
        let others = || self.together(head).filter(|path| path.id != id).filter_map(|path| path.cap.as_ref());
        let same = others().find(|cap| rate.is_some() && cap.own() == rate).cloned();
        let Some(path) = self.path_mut(id) else { return };
        path.cap = rate.map(|rate| Cap::limit(now, rate, v4, bytes, datagrams));
        path.share_cap(same.as_ref());
        path.capped &= rate.is_some();
    }

    /// Whether a path runs over IPv4, and the UDP payload bytes and datagrams that it has sent.
    fn sent(&mut self, id: PathId) -> Option<(bool, u64, u64)> {
        let noq = noq_proto::PathId::from(id.0);
        let sent = self.inner.path_stats(noq)?.udp_tx;
        let v4 = self.inner.network_path(noq).is_ok_and(|tuple| tuple.remote().is_ipv4());
        Some((v4, sent.bytes, sent.datagrams))
    }

    /// Bytes of datagrams, framing included, that `id` and the paths that carry as one with it may take now.
    pub fn room(&mut self, now: Instant, id: PathId) -> u64 {
        let mtu = self.inner.current_mtu();
        let (mut in_flight, mut queued, mut left) = (0, 0, None);
        for path in self.paths.iter_mut().filter(|path| path.head == id) {
            in_flight += path.gate.in_flight();
            queued += path.batch_bytes;
            if let Some(cap) = &mut path.cap {
                if let Some(stats) = self.inner.path_stats(noq_proto::PathId::from(path.id.0)) {
                    cap.count(now, (stats.udp_tx.bytes, stats.udp_tx.datagrams), &path.gate);
                }
                left = Some(cap.left(now));
            }
        }
        let Some(path) = self.paths.iter_mut().find(|path| path.id == id) else { return 0 };
        let window = path.gate.window().saturating_sub(in_flight);
        path.pacer.set_lumps(path.gate.inside_tcp.load(Relaxed));
        path.pacer.refill(now, path.gate.pacing_rate(), mtu);
        let mut budget = path.pacer.budget();
        path.capped = left.is_some_and(|left| left < budget.min(window));
        budget = budget.min(left.unwrap_or(u64::MAX));
        path.paced = budget < window;
        window.min(budget).saturating_sub(queued)
    }

    /// What a path, with those that carry as one with it, can do for packets that are queued now; it takes at most
    /// `most` bytes.
    pub fn offer(&mut self, now: Instant, id: PathId, most: u64) -> Offer {
        let room = self.room(now, id).min(most);
        let ahead = self.together(id).map(|path| path.gate.in_flight() + path.batch_bytes).sum();
        let Some(path) = self.path(id) else {
            return Offer { id, room: 0, delay: Duration::MAX, ahead: 0, rate: 0, weight: 1 };
        };
        let (delay, rate) = (path.gate.base_rtt() / 2, path.allowed(path.gate.rate()));
        Offer { id, room, delay, ahead, rate, weight: 1 }
    }

    /// Says whether more waited for a path, and those that carry as one with it, than they could take.
    /// Congestion controllers learn capacity only while that is so.
    pub fn set_limited(&mut self, id: PathId, limited: bool) {
        let Some((capped, paced)) = self.path(id).map(|path| (path.capped, path.paced)) else { return };
        for path in self.paths.iter_mut().filter(|path| path.head == id) {
            path.wanted = limited;
            // What a cap or a shaper holds back says nothing about the path.
            path.gate.limited.store(limited && !capped, Relaxed);
            path.gate.window_limited.store(limited && !paced, Relaxed);
            path.paced &= limited;
            if let Some(cap) = &mut path.cap {
                cap.note(limited, limited && capped);
            }
        }
        self.tell_wanting(id);
    }

    /// Tells the shaper of a path's link whether there is more for any path of its seat.
    fn tell_wanting(&self, id: PathId) {
        let Some(cap) = self.path(id).and_then(|path| path.cap.as_ref()) else { return };
        let same = |path: &Path| path.cap.as_ref().is_some_and(|other| other.seat().is_same(cap.seat()));
        cap.set_wanting(self.paths.iter().any(|path| path.wanted && same(path)));
    }

    /// What was said last with [`Self::set_limited`].
    pub fn is_limited(&self, id: PathId) -> bool {
        self.path(id).is_some_and(|path| path.wanted)
    }

    /// Queues a datagram for a path, or one that carries as one with it; returns the bytes of room that it takes.
    pub fn queue(&mut self, id: PathId, datagram: Bytes) -> u64 {
        self.least_loaded(id).map_or(0, |path| path.queue(datagram))
    }

    /// The same for a datagram whose fate is told by [`Self::drain_fates`].
    pub fn queue_tracked(&mut self, id: PathId, datagram: Tracked) -> u64 {
        self.least_loaded(id).map_or(0, |path| path.queue_tracked(datagram))
    }

    /// The same for a datagram that has to leave on this path, whichever carry as one with it.
    pub fn queue_tracked_on(&mut self, id: PathId, datagram: Tracked) -> u64 {
        self.path_mut(id).map_or(0, |path| path.queue_tracked(datagram))
    }

    /// Queues a datagram for this path and no other, whatever its room.
    pub fn queue_on(&mut self, id: PathId, datagram: Bytes) {
        if let Some(path) = self.path_mut(id) {
            path.queue(datagram);
        }
    }

    /// Bytes of UDP payloads that a path has carried, either way.
    pub fn moved(&mut self, id: PathId) -> u64 {
        let stats = self.inner.path_stats(noq_proto::PathId::from(id.0));
        stats.map_or(0, |stats| stats.udp_tx.bytes + stats.udp_rx.bytes)
    }

    /// The path on which a datagram leaves that is queued now under the name `head`.
    pub fn carrier_of(&mut self, head: PathId) -> Option<PathId> {
        self.least_loaded(head).map(|path| path.id)
    }

    /// Of the paths that carry as one, the one whose turn it is.
    pub(crate) fn least_loaded(&mut self, head: PathId) -> Option<&mut Path> {
        let mut indices = (0..self.paths.len()).filter(|at| self.paths[*at].head == head);
        let first = indices.next()?;
        if indices.next().is_none() {
            return self.paths.get_mut(first);
        }
        let members = || self.paths.iter().enumerate().filter(|(_, path)| path.head == head);
        let current = members().find(|(_, path)| path.turn > 0).map(|(at, _)| at);
        let at = current.or_else(|| {
            // A path that has become slow has as much before it with fewer bytes.
            let load = |path: &Path| {
                let rtt = self.inner.rtt(noq_proto::PathId::from(path.id.0)).unwrap_or_default();
                u128::from(path.gate.in_flight() + path.batch_bytes) * rtt.as_nanos()
            };
            members().min_by_key(|(_, path)| load(path)).map(|(at, _)| at)
        })?;
        let path = self.paths.get_mut(at)?;
        if path.turn == 0 {
            path.turn = TURN;
        }
        Some(path)
    }

    /// Takes what has left on paths that carry as one out of their pacer: small datagrams share packets, so that is
    /// less than was reckoned, and a pacer that counted more than is acknowledged would hold the rate down for good.
    pub(crate) fn spend(&mut self, head: PathId, bytes: u64) {
        if let Some(path) = self.path_mut(head) {
            path.pacer.spend(bytes);
        }
    }
}

impl Path {
    fn queue(&mut self, datagram: Bytes) -> u64 {
        let cost = (datagram.len() + DATAGRAM_OVERHEAD) as u64;
        self.load(cost);
        self.batch.push(datagram);
        cost
    }

    fn queue_tracked(&mut self, datagram: Tracked) -> u64 {
        let data = datagram.data.clone();
        self.followed.push((self.batch.len(), datagram));
        self.queue(data)
    }

    /// Its next pass will take so much room.
    pub(crate) fn load(&mut self, cost: u64) {
        self.batch_bytes += cost;
        self.turn = self.turn.saturating_sub(cost);
    }

    fn share_cap(&mut self, other: Option<&Cap>) {
        if let (Some(own), Some(other)) = (&mut self.cap, other) {
            own.share(other);
        }
    }
}
