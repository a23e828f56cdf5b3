use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use bytes::BytesMut;
use mpvpn_types::{Instant, LinkId};
use noq_proto::{
    ConnectionHandle as NoqHandle, DatagramEvent, EcnCodepoint, EndpointConfig, EndpointEvent, FourTuple,
    Incoming,
};

use crate::{ClientSetup, Connection, QlogSink, ServerSetup, Transmit};

/// Handshakes in progress, in all shards together, from which on clients have to validate their address by a Retry packet
/// (RFC 9000 §8.1.2). Higher: more memory for spoofed clients; lower: one more round trip when many clients reconnect.
const RETRY_ABOVE: usize = 256;
/// Packets without a connection (Retry, Version Negotiation, stateless reset) that wait to be sent at most; they are sent after
/// each batch of received packets. More: memory; fewer: some clients have to repeat their first packet.
const MAX_STATELESS: usize = 64;

/// A connection's number at its endpoint; not a QUIC connection ID. It is reused some time after the connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionHandle(pub usize);

/// The local end of a path, as an IP address because noq has no other type for it.
///
/// At a server it is the local address. At a client it is a token for each link, which never reaches the wire and selects
/// the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalAddress(IpAddr);

/// fd6d:7076:706e::/112, unique local addresses (RFC 4193) that spell "mpvpn".
const LINK_TOKEN: [u16; 7] = [0xfd6d, 0x7076, 0x706e, 0, 0, 0, 0];

impl LocalAddress {
    /// The token of a client's link.
    pub fn link(link: LinkId) -> Self {
        let [a, b, c, d, e, f, g] = LINK_TOKEN;
        Self(IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, link.0)))
    }

    /// The link of this token; `None` for a real address.
    pub fn as_link(self) -> Option<LinkId> {
        let IpAddr::V6(ip) = self.0 else { return None };
        let [head @ .., link] = ip.segments();
        (head == LINK_TOKEN).then_some(LinkId(link))
    }

    /// The address or token.
    pub fn ip(self) -> IpAddr {
        self.0
    }
}

impl From<IpAddr> for LocalAddress {
    fn from(ip: IpAddr) -> Self {
        Self(ip)
    }
}

/// The destination of a received UDP payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// This connection, which may have events and packets to send now.
    Connection(ConnectionHandle),
    /// This new connection.
    New(ConnectionHandle),
    /// No connection; [`Endpoint::poll_stateless`] may have a packet to send.
    Nothing,
}

/// All connections that share sockets.
#[derive(Debug)]
pub struct Endpoint {
    inner: noq_proto::Endpoint,
    /// The configuration of accepted connections, at a server.
    server: Option<ServerSetup>,
    /// Each in its own allocation, which is freed when the connection ends.
    connections: Vec<Option<Box<Connection>>>,
    handshaking: usize,
    retry_above: usize,
    stateless: VecDeque<(Transmit, Vec<u8>)>,
    scratch: Vec<u8>,
}

impl Endpoint {
    /// An endpoint that opens connections.
    pub fn client(setup: &ClientSetup) -> Self {
        Self::new(setup.endpoint.clone(), None, RETRY_ABOVE)
    }

    /// An endpoint that accepts connections.
    pub fn server(setup: &ServerSetup) -> Self {
        let retry_above = RETRY_ABOVE / usize::from(setup.shard.count());
        Self::new(setup.endpoint.clone(), Some(setup.clone()), retry_above)
    }

    fn new(config: Arc<EndpointConfig>, server: Option<ServerSetup>, retry_above: usize) -> Self {
        let accepts = server.as_ref().map(|setup| setup.over_udp.clone());
        Self {
            inner: noq_proto::Endpoint::new(config, accepts, true),
            server,
            connections: Vec::new(),
            handshaking: 0,
            retry_above,
            stateless: VecDeque::new(),
            scratch: Vec::new(),
        }
    }

    /// Starts a connection from `local`.
    ///
    /// # Errors
    /// If the address or the name cannot be connected to.
    pub fn connect(
        &mut self,
        now: Instant,
        setup: &ClientSetup,
        local: LocalAddress,
        remote: SocketAddr,
        name: &str,
    ) -> Result<ConnectionHandle, noq_proto::ConnectError> {
        let (handle, inner) = self.inner.connect(now, setup.config(local).clone(), remote, name)?;
        Ok(self.insert(now, handle, inner, Some(local), setup.qlog.clone()))
    }

    fn insert(
        &mut self,
        now: Instant,
        handle: NoqHandle,
        inner: noq_proto::Connection,
        home: Option<LocalAddress>,
        qlog: Option<Arc<dyn QlogSink>>,
    ) -> ConnectionHandle {
        if self.connections.len() <= handle.0 {
            self.connections.resize_with(handle.0 + 1, || None);
        }
        let id = ConnectionHandle(handle.0);
        self.connections[handle.0] = Some(Box::new(Connection::new(now, id, inner, home, qlog)));
        id
    }

    /// Takes a UDP payload that arrived at `local` from `remote`.
    pub fn handle(
        &mut self,
        now: Instant,
        local: Option<LocalAddress>,
        remote: SocketAddr,
        ecn: u8,
        data: BytesMut,
    ) -> Handled {
        let tuple = FourTuple::new(remote, local.map(LocalAddress::ip));
        self.scratch.clear();
        let ecn = EcnCodepoint::from_bits(ecn);
        match self.inner.handle(now, tuple, ecn, data, &mut self.scratch) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                let Some(Some(connection)) = self.connections.get_mut(handle.0) else {
                    return Handled::Nothing;
                };
                connection.guarded(|inner| inner.handle_event(event));
                Handled::Connection(ConnectionHandle(handle.0))
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.accept(now, local, incoming),
            Some(DatagramEvent::Response(transmit)) => {
                self.answer(local, &transmit);
                Handled::Nothing
            }
            None => Handled::Nothing,
        }
    }

    fn accept(&mut self, now: Instant, local: Option<LocalAddress>, incoming: Incoming) -> Handled {
        if self.handshaking >= self.retry_above && incoming.may_retry() {
            if let Ok(transmit) = self.inner.retry(incoming, &mut self.scratch) {
                self.answer(local, &transmit);
            }
            return Handled::Nothing;
        }
        let config = self.server.as_ref().map(|setup| setup.config(incoming.remote_address()).clone());
        match self.inner.accept(incoming, now, &mut self.scratch, config) {
            Ok((handle, inner)) => {
                self.handshaking += 1;
                let qlog = self.server.as_ref().and_then(|setup| setup.qlog.clone());
                Handled::New(self.insert(now, handle, inner, local, qlog))
            }
            Err(error) => {
                tracing::debug!(cause = %error.cause, "a connection attempt was refused");
                if let Some(transmit) = &error.response {
                    self.answer(local, transmit);
                }
                Handled::Nothing
            }
        }
    }

    fn answer(&mut self, local: Option<LocalAddress>, transmit: &noq_proto::Transmit) {
        if self.stateless.len() >= MAX_STATELESS {
            return;
        }
        let outgoing = Transmit {
            local: transmit.src_ip.map(LocalAddress::from).or(local),
            remote: transmit.destination,
            ecn: None,
            dscp: 0,
            size: transmit.size,
            segment_size: None,
        };
        self.stateless.push_back((outgoing, self.scratch[..transmit.size].to_vec()));
    }

    /// The next packet to send that belongs to no connection.
    pub fn poll_stateless(&mut self) -> Option<(Transmit, Vec<u8>)> {
        self.stateless.pop_front()
    }

    /// A connection.
    pub fn get(&mut self, id: ConnectionHandle) -> Option<&mut Connection> {
        self.connections.get_mut(id.0)?.as_deref_mut()
    }

    /// Notes that a handshake has ended, successfully or not.
    pub fn on_handshake_ended(&mut self) {
        self.handshaking = self.handshaking.saturating_sub(1);
    }

    /// Exchanges events between a connection and the endpoint, and removes a drained connection; to be called after every use
    /// of the connection. Returns whether the connection still exists.
    pub fn process_endpoint_events(&mut self, id: ConnectionHandle) -> bool {
        loop {
            let Some(Some(connection)) = self.connections.get_mut(id.0) else { return false };
            let next = connection.guarded(noq_proto::Connection::poll_endpoint_events);
            let Some(event) = next.unwrap_or_else(|| Some(EndpointEvent::drained())) else { return true };
            let drained = event.is_drained();
            if let Some(event) = self.inner.handle_event(NoqHandle(id.0), event)
                && let Some(Some(connection)) = self.connections.get_mut(id.0)
            {
                connection.guarded(|inner| inner.handle_event(event));
            }
            if drained {
                self.connections[id.0] = None;
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_tokens_are_told_from_addresses() {
        assert_eq!(LocalAddress::link(LinkId(7)).as_link(), Some(LinkId(7)));
        assert_eq!(LocalAddress::from(IpAddr::from([192, 0, 2, 1])).as_link(), None);
        assert_eq!(LocalAddress::from(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])).as_link(), None);
    }
}
