//! The sockets of one shard of a client, one a link, and when the links are to be looked at anew.
//!
//! In: datagrams of the kernel and of the tunnel. Out: the same, to the other one. Always holds: nothing is sent through a
//! link that cannot carry packets.

use std::time::Instant;

use mpvpn_os::poll::{Event, Poller};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_tunnel::ClassConnections;
use mpvpn_types::{Duration, LinkId};

use crate::{
    event_loop::FIRST_SOCKET_TOKEN,
    links::Links,
    packet_io::{DatagramBuffers, ReceivedDatagram, SendOutcome},
    policies::Direction,
};

/// The links are looked at anew this long after news that may not be complete: a new interface has its addresses and
/// routes by then, and a shorter time may come before them.
const RESCAN_DELAY: Duration = Duration::from_millis(500);

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
    pub(super) fn on_ready(
        &mut self,
        poller: &Poller,
        event: Event,
        connections: &mut ClassConnections,
        now: Instant,
        mut after: impl FnMut(&mut ClassConnections),
    ) {
        let Ok(number) = u16::try_from(event.token.wrapping_sub(FIRST_SOCKET_TOKEN)) else { return };
        let id = LinkId(number);
        let Some(link) = self.links.links.get_mut(&id) else { return };
        let (meter, Some(socket)) = (&link.meter, link.socket.as_mut()) else { return };
        if event.writable {
            socket.flush(poller, event.token, |_| None);
        }
        if !event.readable {
            return;
        }
        let each = |connections: &mut ClassConnections, got: ReceivedDatagram| {
            meter.count(Direction::Received, got.data.len(), 1, got.remote.is_ipv4());
            connections.handle_datagram(now, id, got.remote, got.ecn, got.data);
        };
        let after = |connections: &mut ClassConnections| {
            connections.handle_batch(now, id.class());
            after(connections);
        };
        if let Err(error) = self.buffers.receive(&socket.socket, connections, each, after) {
            tracing::debug!(%error, link = number, "cannot receive");
        }
    }

    /// Sends all that there is to send.
    pub(super) fn transmit(&mut self, poller: &Poller, now: Instant, connections: &mut ClassConnections) {
        let (links, rescan_at) = (&mut self.links.links, &mut self.rescan_at);
        let poll = |out: &mut Vec<u8>| connections.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let Some(id) = link_id(transmit) else { return };
            // Into a cable that is pulled the kernel would only ask for its neighbour in vain, and when the link is
            // back hold everything for up to a second, until it asks again.
            let Some(link) = links.get_mut(&id).filter(|link| link.remote.is_some()) else { return };
            let Some(socket) = &mut link.socket else { return };
            let datagrams = transmit.segment_size.map_or(1, |size| transmit.size.div_ceil(size.max(1)));
            link.meter.count(Direction::Sent, transmit.size, datagrams, transmit.remote.is_ipv4());
            if socket.send(poller, FIRST_SOCKET_TOKEN + u64::from(id.0), transmit, data, None)
                == SendOutcome::LinkDown
            {
                // The news will say why; if there is none, look.
                rescan_at.get_or_insert(now + RESCAN_DELAY);
            }
        });
    }

    /// Sends it without keeping anything for later: this process is about to end.
    pub(super) fn transmit_last(&mut self, now: Instant, connections: &mut ClassConnections) {
        let links = &self.links.links;
        let poll = |out: &mut Vec<u8>| connections.poll_transmit(now, out);
        self.buffers.transmit(poll, |transmit, data| {
            let link = link_id(transmit).and_then(|id| links.get(&id));
            if let Some(socket) = link.and_then(|link| link.socket.as_ref()) {
                socket.send_last(transmit, data, None);
            }
        });
    }

    /// The links are to be looked at anew at this time, or a little later.
    pub(super) fn rescan_at(&mut self, at: Instant) {
        self.rescan_at = Some(at);
    }

    /// The news about links may not be complete: they are to be looked at again soon.
    pub(super) fn rescan_soon(&mut self, now: Instant) {
        self.rescan_at(now + RESCAN_DELAY);
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

fn link_id(transmit: &Transmit) -> Option<LinkId> {
    transmit.local.and_then(LocalAddress::as_link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{links::LinkSocketOptions, policies::LinkMeters};

    #[test]
    fn links_are_looked_at_again_once_after_news() {
        let socket_options = LinkSocketOptions { given: Some(Vec::new()), ..LinkSocketOptions::default() };
        let poller = Poller::new().unwrap();
        let links = Links::new(&[], Vec::new(), &LinkMeters::default(), socket_options, &poller).unwrap();
        let (mut sockets, now) = (LinkSockets::new(links), Instant::now());
        assert!(!sockets.is_rescan_due(now) && sockets.poll_timeout().is_none());
        sockets.rescan_soon(now);
        assert!(!sockets.is_rescan_due(now));
        let at = sockets.poll_timeout().unwrap();
        assert_eq!(at - now, RESCAN_DELAY);
        assert!(sockets.is_rescan_due(at) && !sockets.is_rescan_due(at));
        sockets.rescan_at(now);
        assert!(sockets.is_rescan_due(now));
    }
}
