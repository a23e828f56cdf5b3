//! The sockets of one shard of a client, one per link, class and pipe, and when the links must be rescanned.
//!
//! In: datagrams from the kernel and from the tunnel. Out: the same to the other side. Always holds: nothing
//! is sent through a link that is down.

use std::time::Instant;

use mpvpn_links::{Links, policies::Direction};
use mpvpn_os::poll::{Event, FIRST_SOCKET_TOKEN, Poller};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_sockets::packet_io::{DatagramBuffers, MAX_RECV_CALLS, ReceivedDatagram, SendOutcome};
use mpvpn_tunnel::{ClassConnections, OtherServers};
use mpvpn_types::{Duration, LinkId};

/// The delay of a second rescan after a kernel event: a new interface may get its addresses and routes only
/// after the event. Shorter: the rescan may come too early. Longer: a link is used later. Chosen.
const RESCAN_DELAY: Duration = Duration::from_millis(500);

/// The links of a shard with their sockets.
pub(super) struct LinkSockets {
    pub(super) links: Links,
    buffers: DatagramBuffers,
    rescan_at: Option<Instant>,
}

impl LinkSockets {
    pub(super) fn new(links: Links) -> Self {
        Self { links, buffers: DatagramBuffers::default(), rescan_at: None }
    }

    /// Sends what was queued for a socket that is writable again, and receives. Calls `after` at the end of
    /// each batch. Returns when the first datagram arrived, if there was one.
    pub(super) fn on_ready(
        &mut self,
        poller: &Poller,
        event: Event,
        connections: &mut ClassConnections,
        mut others: Option<&mut OtherServers>,
        now: Instant,
        mut after: impl FnMut(&mut ClassConnections),
    ) -> Option<Instant> {
        let Ok(number) = u16::try_from(event.token.wrapping_sub(FIRST_SOCKET_TOKEN)) else { return None };
        let id = LinkId(number);
        let link = self.links.links.get_mut(&id)?;
        let (meter, Some(socket)) = (&link.meter, link.socket.as_mut()) else { return None };
        if event.writable {
            socket.flush(poller, event.token, |_| None);
        }
        if !event.readable {
            return None;
        }
        let each = |connections: &mut ClassConnections, got: ReceivedDatagram| {
            meter.count(Direction::Received, got.data.len(), 1, got.remote.is_ipv4());
            match others.as_deref_mut().filter(|others| others.expects(got.remote)) {
                Some(others) => others.handle_datagram(got.arrived, id, got.remote, got.ecn, got.data),
                None => connections.handle_datagram(got.arrived, id, got.remote, got.ecn, got.data),
            }
        };
        let after = |connections: &mut ClassConnections| {
            connections.handle_batch(now, id.class());
            after(connections);
        };
        self.buffers.receive(&socket.socket, MAX_RECV_CALLS, connections, each, after).unwrap_or_else(
            |error| {
                tracing::debug!(%error, link = number, "cannot receive");
                None
            },
        )
    }

    /// Sends everything that `poll` returns.
    pub(super) fn transmit(
        &mut self,
        poller: &Poller,
        now: Instant,
        poll: impl FnMut(&mut Vec<u8>) -> Option<Transmit>,
    ) {
        let (links, rescan_at) = (&mut self.links.links, &mut self.rescan_at);
        self.buffers.transmit(poll, |transmit, data| {
            let Some(id) = link_id(transmit) else { return };
            // Over a link without carrier the kernel would only send neighbour solicitations in vain, and
            // then hold packets for up to a second after the link returns.
            let Some(link) = links.get_mut(&id).filter(|link| link.remote.is_some()) else { return };
            let Some(socket) = &mut link.socket else { return };
            let datagrams = transmit.segment_size.map_or(1, |size| transmit.size.div_ceil(size.max(1)));
            link.meter.count(Direction::Sent, transmit.size, datagrams, transmit.remote.is_ipv4());
            if socket.send(poller, FIRST_SOCKET_TOKEN + u64::from(id.0), transmit, data, None)
                == SendOutcome::LinkDown
            {
                // A kernel event should explain it; if none comes, rescan.
                rescan_at.get_or_insert(now + RESCAN_DELAY);
            }
        });
    }

    /// Sends without queueing, because this process is about to end.
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

    /// Schedules a rescan.
    pub(super) fn rescan_at(&mut self, at: Instant) {
        self.rescan_at = Some(at);
    }

    /// Schedules a rescan after [`RESCAN_DELAY`].
    pub(super) fn rescan_soon(&mut self, now: Instant) {
        self.rescan_at(now + RESCAN_DELAY);
    }

    /// When [`Self::is_rescan_due`] will be true.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.rescan_at
    }

    /// Whether a rescan is due; true once for each.
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
    use mpvpn_links::{LinkSocketOptions, policies::LinkMeters};

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
