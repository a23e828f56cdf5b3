//! The sockets of one shard of a client, one a link, and when the links are to be looked at anew.
//!
//! In: datagrams of the kernel and of the tunnel. Out: the same, to the other one. Always holds: nothing is sent through a
//! link that cannot carry packets.

use std::time::Instant;

use mpvpn_os::poll::{Event, Poller};
use mpvpn_quic::{Local, Transmit};
use mpvpn_tunnel::ClassConnections;
use mpvpn_types::{Duration, LinkId};

use crate::{
    links::Links,
    policies::Way,
    turn::SOCKETS,
    wire::{Datagram, DatagramBuffers, Sent},
};

/// The links are looked at anew this long after news that may not be complete: a new interface has its addresses and
/// routes by then, and a shorter time may come before them.
const RESCAN_AFTER: Duration = Duration::from_millis(500);

/// The links of a shard with their sockets.
pub(super) struct LinkSockets {
    pub(super) links: Links,
    buffers: DatagramBuffers,
    rescan_at: Option<Instant>,
}

impl LinkSockets {
    pub(super) fn new(links: Links) -> Self {
        Self { links, buffers: DatagramBuffers::new(), rescan_at: None }
    }

    /// Sends what waited for a socket that has room again, and receives what has come. `after` is called where a batch
    /// ends.
    pub(super) fn ready(
        &mut self,
        poller: &Poller,
        event: Event,
        connections: &mut ClassConnections,
        now: Instant,
        mut after: impl FnMut(&mut ClassConnections),
    ) {
        let Ok(number) = u16::try_from(event.token.wrapping_sub(SOCKETS)) else { return };
        let id = LinkId(number);
        let Some(link) = self.links.links.get_mut(&id) else { return };
        let (meter, Some(wire)) = (&link.meter, link.wire.as_mut()) else { return };
        if event.writable {
            wire.flush(poller, event.token, |_| None);
        }
        if !event.readable {
            return;
        }
        let each = |connections: &mut ClassConnections, got: Datagram| {
            meter.count(Way::Received, got.data.len(), 1, got.remote.is_ipv4());
            connections.handle_datagram(now, id, got.remote, got.ecn, got.data);
        };
        let after = |connections: &mut ClassConnections| {
            connections.handle_batch(now, id.class());
            after(connections);
        };
        if let Err(error) = self.buffers.receive(&wire.socket, connections, each, after) {
            tracing::debug!(%error, link = number, "cannot receive");
        }
    }

    /// Sends all that there is to send.
    pub(super) fn transmit(&mut self, poller: &Poller, now: Instant, connections: &mut ClassConnections) {
        let (links, rescan_at) = (&mut self.links.links, &mut self.rescan_at);
        let poll = |out: &mut Vec<u8>| connections.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let Some(id) = link_of(transmit) else { return };
            // Into a cable that is pulled the kernel would only ask for its neighbour in vain, and when the link is
            // back hold everything for up to a second, until it asks again.
            let Some(link) = links.get_mut(&id).filter(|link| link.remote.is_some()) else { return };
            let Some(wire) = &mut link.wire else { return };
            let datagrams = transmit.segment_size.map_or(1, |size| transmit.size.div_ceil(size.max(1)));
            link.meter.count(Way::Sent, transmit.size, datagrams, transmit.remote.is_ipv4());
            if wire.send(poller, SOCKETS + u64::from(id.0), transmit, data, None) == Sent::LinkDown {
                // The news will say why; if there is none, look.
                rescan_at.get_or_insert(now + RESCAN_AFTER);
            }
        });
    }

    /// Sends it without keeping anything for later: this process is about to end.
    pub(super) fn transmit_last(&mut self, now: Instant, connections: &mut ClassConnections) {
        let links = &self.links.links;
        let poll = |out: &mut Vec<u8>| connections.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let link = link_of(transmit).and_then(|id| links.get(&id));
            if let Some(wire) = link.and_then(|link| link.wire.as_ref()) {
                wire.send_last(transmit, data, None);
            }
        });
    }

    /// The links are to be looked at anew at this time, or a little later.
    pub(super) fn rescan_at(&mut self, at: Instant) {
        self.rescan_at = Some(at);
    }

    /// The news about links may not be complete: they are to be looked at again soon.
    pub(super) fn rescan_again(&mut self, now: Instant) {
        self.rescan_at(now + RESCAN_AFTER);
    }

    /// When [`Self::is_rescan_due`] will be true.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.rescan_at
    }

    /// Whether the links are to be looked at anew now; true once for each time.
    pub(super) fn is_rescan_due(&mut self, now: Instant) -> bool {
        self.rescan_at.take_if(|at| *at <= now).is_some()
    }
}

fn link_of(transmit: &Transmit) -> Option<LinkId> {
    transmit.local.and_then(Local::as_link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{links::Ground, policies::Meters};

    #[test]
    fn links_are_looked_at_again_once_after_news() {
        let ground = Ground { given: Some(Vec::new()), ..Ground::default() };
        let poller = Poller::new().unwrap();
        let links = Links::new(&[], Vec::new(), &Meters::default(), ground, &poller).unwrap();
        let (mut sockets, now) = (LinkSockets::new(links), Instant::now());
        assert!(!sockets.is_rescan_due(now) && sockets.poll_timeout().is_none());
        sockets.rescan_again(now);
        assert!(!sockets.is_rescan_due(now));
        let at = sockets.poll_timeout().unwrap();
        assert_eq!(at - now, RESCAN_AFTER);
        assert!(sockets.is_rescan_due(at) && !sockets.is_rescan_due(at));
        sockets.rescan_at(now);
        assert!(sockets.is_rescan_due(now));
    }
}
