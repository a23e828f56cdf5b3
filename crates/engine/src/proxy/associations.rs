//! UDP for apps: what SOCKS5 calls an association (RFC 1928 §7).
//!
//! In: datagrams of an app, each with its target in front, and payloads that come from targets. Out: calls of
//! [`DatagramFlows`], and datagrams to the app. Always holds: an association serves one address of the app that asked for
//! it, has a bounded number of targets of which the one that was silent for longest makes room, and ends with the
//! connection that asked for it; fragments are dropped.

use std::{
    collections::HashMap,
    fmt,
    hash::Hash,
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mpvpn_masque::connect::{Authority, Host};
use mpvpn_os::{Outgoing, RecvBatch, UdpOptions, UdpSocket};

use super::socks5::{ATYP_NAME, ATYP_V4, ATYP_V6, ParsedAddress, parse_address};

/// Targets of an association.
const MAX_TARGETS: usize = 64;
/// A target that is silent for so long is given up.
const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// One that the server has refused is asked for again after so long.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Messages a receive call, and receive calls a turn.
const MAX_MESSAGES_PER_RECV: usize = 16;
const MAX_RECV_CALLS: usize = 4;

/// What carries the payloads of apps.
pub(crate) trait DatagramFlows {
    /// Names a flow.
    type Flow: Copy + Eq + Hash + fmt::Debug;

    /// Asks for a flow. `None` if there can be none now.
    fn open_flow(&mut self, now: Instant, to: &Authority) -> Option<Self::Flow>;

    /// Sends a payload.
    fn send(&mut self, now: Instant, flow: Self::Flow, payload: &[u8]);

    /// Ends a flow; nothing more is told about it.
    fn close(&mut self, flow: Self::Flow);
}

/// All associations, by the tokens of their sockets.
pub(super) struct Associations<Flow> {
    all: HashMap<u64, Association<Flow>>,
    /// Whose flow each is, and with whom.
    flows: HashMap<Flow, (u64, Authority)>,
    batch: RecvBatch,
}

struct Association<Flow> {
    socket: UdpSocket,
    /// Only datagrams from there are taken …
    app_ip: IpAddr,
    /// … and once one came, only from its port.
    app: Option<SocketAddr>,
    targets: HashMap<Authority, Target<Flow>>,
}

struct Target<Flow> {
    /// `None` after a refusal.
    flow: Option<Flow>,
    last_activity: Instant,
}

impl<Flow: Copy + Eq + Hash + fmt::Debug> Associations<Flow> {
    pub(super) fn new() -> Self {
        Self { all: HashMap::new(), flows: HashMap::new(), batch: RecvBatch::new(MAX_MESSAGES_PER_RECV) }
    }

    /// Makes a socket at `local`, with a port of its own, for the app at `from`; its address.
    ///
    /// # Errors
    /// If the kernel gives none.
    pub(super) fn open(
        &mut self,
        token: u64,
        local: IpAddr,
        app_ip: IpAddr,
        watch: impl FnOnce(&UdpSocket) -> io::Result<()>,
    ) -> io::Result<SocketAddr> {
        let options = UdpOptions::new(SocketAddr::new(local, 0));
        let socket = UdpSocket::bind(&options).map_err(io::Error::other)?;
        let bound = socket.local_addr()?;
        watch(&socket)?;
        self.all.insert(token, Association { socket, app_ip, app: None, targets: HashMap::new() });
        Ok(bound)
    }

    /// Whether a token is of one.
    pub(super) fn has(&self, token: u64) -> bool {
        self.all.contains_key(&token)
    }

    /// An app has sent something.
    pub(super) fn on_socket_ready<D: DatagramFlows<Flow = Flow>>(
        &mut self,
        now: Instant,
        tunnel: &mut D,
        token: u64,
    ) {
        for _ in 0..MAX_RECV_CALLS {
            let Some(association) = self.all.get_mut(&token) else { return };
            // Errors are about datagrams that did not reach the app.
            if !association.socket.recv_batch(&mut self.batch).is_ok_and(|count| count > 0) {
                return;
            }
            for received in self.batch.drain() {
                if received.remote.ip() != association.app_ip
                    || *association.app.get_or_insert(received.remote) != received.remote
                {
                    continue;
                }
                for datagram in received.payloads() {
                    let Some((to, payload)) = parse_datagram(datagram) else { continue };
                    if let Some(flow) = association.flow_to(now, tunnel, &mut self.flows, token, to) {
                        tunnel.send(now, flow, payload);
                    }
                }
            }
        }
    }

    /// A payload has come from a target.
    pub(super) fn deliver_payload(&mut self, now: Instant, flow: Flow, payload: &[u8]) {
        let Some((token, from)) = self.flows.get(&flow) else { return };
        let Some(association) = self.all.get_mut(token) else { return };
        let Some(app) = association.app else { return };
        if let Some(target) = association.targets.get_mut(from) {
            target.last_activity = now;
        }
        let datagram = encode_datagram(from, payload);
        let out = Outgoing { to: app, from: None, ecn: None, dscp: 0, segment_size: None, data: &datagram };
        if let Err(error) = association.socket.send(&out) {
            tracing::trace!(%error, "a payload did not reach its app");
        }
    }

    /// The server has refused a flow, or ended it.
    pub(super) fn on_flow_closed(&mut self, now: Instant, flow: Flow, refused: bool) {
        let Some((token, to)) = self.flows.remove(&flow) else { return };
        let Some(association) = self.all.get_mut(&token) else { return };
        match refused {
            true => drop(association.targets.insert(to, Target { flow: None, last_activity: now })),
            false => drop(association.targets.remove(&to)),
        }
    }

    /// Gives up targets that were silent for long.
    pub(super) fn close_idle_targets<D: DatagramFlows<Flow = Flow>>(
        &mut self,
        now: Instant,
        tunnel: &mut D,
        token: u64,
    ) {
        let Some(association) = self.all.get_mut(&token) else { return };
        let flows = &mut self.flows;
        association.targets.retain(|_, target| {
            let stays = now.saturating_duration_since(target.last_activity) < IDLE_TIMEOUT;
            if let Some(flow) = target.flow.filter(|_| !stays) {
                flows.remove(&flow);
                tunnel.close(flow);
            }
            stays
        });
    }

    /// Ends one.
    pub(super) fn close<D: DatagramFlows<Flow = Flow>>(&mut self, tunnel: &mut D, token: u64) {
        let Some(association) = self.all.remove(&token) else { return };
        for flow in association.targets.into_values().filter_map(|target| target.flow) {
            self.flows.remove(&flow);
            tunnel.close(flow);
        }
    }

    /// Ends all; nothing is told.
    pub(super) fn end(&mut self) {
        self.all.clear();
        self.flows.clear();
    }
}

impl<Flow: Copy + Eq + Hash + fmt::Debug> Association<Flow> {
    /// The flow to a target, which is new if need be.
    fn flow_to<D: DatagramFlows<Flow = Flow>>(
        &mut self,
        now: Instant,
        tunnel: &mut D,
        flows: &mut HashMap<Flow, (u64, Authority)>,
        token: u64,
        to: Authority,
    ) -> Option<Flow> {
        if let Some(target) = self.targets.get_mut(&to) {
            match target.flow {
                Some(_) => {
                    target.last_activity = now;
                    return target.flow;
                }
                None if now.saturating_duration_since(target.last_activity) < REFUSED_RETRY_DELAY => {
                    return None;
                }
                None => {}
            }
        } else if self.targets.len() >= MAX_TARGETS {
            let oldest =
                self.targets.iter().min_by_key(|(_, target)| target.last_activity).map(|(to, _)| to.clone());
            let flow = oldest.and_then(|oldest| self.targets.remove(&oldest)?.flow);
            if let Some(flow) = flow {
                flows.remove(&flow);
                tunnel.close(flow);
            }
        }
        let flow = tunnel.open_flow(now, &to)?;
        flows.insert(flow, (token, to.clone()));
        self.targets.insert(to, Target { flow: Some(flow), last_activity: now });
        Some(flow)
    }
}

/// The target and the payload of an app's datagram; `None` for fragments, and for what is malformed.
fn parse_datagram(datagram: &[u8]) -> Option<(Authority, &[u8])> {
    let (&[_, _, fragment, kind], rest) = datagram.split_first_chunk()?;
    if fragment != 0 {
        return None;
    }
    match parse_address(kind, rest) {
        ParsedAddress::Complete { host: Some(host), port, length } if port > 0 => {
            Some((Authority { host, port }, &rest[length..]))
        }
        _ => None,
    }
}

/// A datagram for the app.
fn encode_datagram(from: &Authority, payload: &[u8]) -> Bytes {
    let mut datagram = BytesMut::with_capacity(32 + payload.len());
    datagram.put_bytes(0, 3);
    match &from.host {
        Host::Addr(IpAddr::V4(ip)) => {
            datagram.put_u8(ATYP_V4);
            datagram.put(&ip.octets()[..]);
        }
        Host::Addr(IpAddr::V6(ip)) => {
            datagram.put_u8(ATYP_V6);
            datagram.put(&ip.octets()[..]);
        }
        Host::Name(name) => {
            // A name has at most 253 bytes.
            datagram.put_u8(ATYP_NAME);
            datagram.put_u8(name.len() as u8);
            datagram.put(name.as_bytes());
        }
    }
    datagram.put_u16(from.port);
    datagram.put(Buf::take(payload, payload.len()));
    datagram.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_name_their_target_in_front() {
        for to in ["192.0.2.1:53", "[2001:db8::1]:53", "dns.example:53"] {
            let to: Authority = to.parse().unwrap();
            assert_eq!(parse_datagram(&encode_datagram(&to, b"query")), Some((to.clone(), &b"query"[..])));
            assert_eq!(parse_datagram(&encode_datagram(&to, b"")), Some((to, &b""[..])));
        }
    }

    #[test]
    fn fragments_and_what_is_malformed_are_dropped() {
        let whole = encode_datagram(&"192.0.2.1:53".parse().unwrap(), b"");
        for length in 0..whole.len() {
            assert_eq!(parse_datagram(&whole[..length]), None, "{length}");
        }
        for (at, value) in [(2, 1), (3, 2), (8, 0)] {
            let mut bad = whole.to_vec();
            bad[at] = value;
            if at == 8 {
                bad[9] = 0;
            }
            assert_eq!(parse_datagram(&bad), None, "{at}");
        }
    }
}
