//! The tunnel's streams and UDP flows, as the proxies use them.

use std::time::Instant;

use bytes::Bytes;
use mpvpn_config::Proxies;
use mpvpn_error::RunError;
use mpvpn_masque::connect::Authority;
use mpvpn_os::poll::Poller;
use mpvpn_proxy::{DatagramFlows, Protocol, Proxy, ProxyTunnel, StreamEvent};
use mpvpn_sockets::splice::{ByteStreams, RelayRead};
use mpvpn_tunnel::{Client, ClientEvent, RelayId, UdpId};

/// The streams of one connection.
pub(super) struct ProxyStreams<'a>(pub(super) &'a mut Client);

impl ByteStreams for ProxyStreams<'_> {
    type Id = RelayId;

    fn read(&mut self, now: Instant, id: RelayId) -> RelayRead {
        self.0.relay_read(now, id)
    }

    fn writable_bytes(&mut self, _: Instant, id: RelayId) -> usize {
        self.0.relay_writable_bytes(id)
    }

    fn write(&mut self, _: Instant, id: RelayId, data: Bytes) {
        self.0.relay_write(id, data);
    }

    fn finish(&mut self, _: Instant, id: RelayId) {
        self.0.relay_finish(id);
    }
}

impl DatagramFlows for ProxyStreams<'_> {
    type Flow = UdpId;

    fn open_flow(&mut self, now: Instant, to: &Authority) -> Option<UdpId> {
        self.0.on_wanted(now);
        self.0.udp_open(now, to)
    }

    fn send(&mut self, now: Instant, flow: UdpId, payload: &[u8]) {
        self.0.udp_send(now, flow, payload);
    }

    fn close(&mut self, flow: UdpId) {
        self.0.udp_close(flow);
    }
}

impl ProxyTunnel for ProxyStreams<'_> {
    fn open(&mut self, to: &Authority) -> Option<RelayId> {
        self.0.on_wanted(Instant::now());
        self.0.relay_open(to)
    }

    fn abort(&mut self, id: RelayId) {
        self.0.relay_abort(id);
    }
}

/// Opens the configured listeners.
pub(super) fn listen(proxies: &Proxies, poller: &Poller) -> Result<Proxy<RelayId, UdpId>, RunError> {
    let socks5 = proxies.socks5.iter().map(|local| (Protocol::Socks5, *local));
    let http = proxies.http.iter().map(|local| (Protocol::Http, *local));
    Proxy::bind(&socks5.chain(http).collect::<Vec<_>>(), poller)
}

/// The stream event in an event of the tunnel; other events are returned.
pub(super) fn stream_event(event: ClientEvent) -> Result<StreamEvent<RelayId>, ClientEvent> {
    Ok(match event {
        ClientEvent::RelaysAllowed => StreamEvent::Allowed,
        ClientEvent::RelayOpened(id) => StreamEvent::Opened(id),
        ClientEvent::RelayFailed(id, failure) => StreamEvent::Failed(id, failure),
        ClientEvent::RelayReadable(id) => StreamEvent::Readable(id),
        ClientEvent::RelayWritable(id) => StreamEvent::Writable(id),
        ClientEvent::RelayGone(id) => StreamEvent::Gone(id),
        other => return Err(other),
    })
}
