//! UDP associations of SOCKS5 (RFC 1928 §7).
//!
//! In: datagrams of an app, each with its target in front, and payloads from targets. Out: calls of
//! [`DatagramFlows`], and datagrams to the app. Always holds: an association serves one address and port of
//! the app that opened it; its targets are bounded, and the one idle for longest makes room; it ends with the
//! TCP connection that opened it; fragments are dropped.

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

/// Targets of one association. More: flows at the server. Fewer: apps with many peers lose flows. Chosen.
const MAX_TARGETS: usize = 64;
/// A target without payloads for this long is closed; as at the server (RFC 9298 §3.1 asks for at least two
/// minutes).
const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// A refused target is requested again after this time. Shorter: load at the server. Longer: a permitted
/// target works later. Chosen.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Messages of one receive call, and receive calls in an iteration. Chosen, as for QUIC's sockets.
const MAX_MESSAGES_PER_RECV: usize = 16;
const MAX_RECV_CALLS: usize = 4;

/// The tunnel's UDP flows for apps.
pub trait DatagramFlows {
    /// Identifies a flow.
    type Flow: Copy + Eq + Hash + fmt::Debug;

    /// Opens a flow to a target. Returns `None` if none can be opened now.
    fn open_flow(&mut self, now: Instant, to: &Authority) -> Option<Self::Flow>;

    /// Sends a payload.
    fn send(&mut self, now: Instant, flow: Self::Flow, payload: &[u8]);

    /// Closes a flow; no events of it follow.
    fn close(&mut self, flow: Self::Flow);
}

/// All associations, by the poller tokens of their sockets.
pub(super) struct Associations<Flow> {
    all: HashMap<u64, Association<Flow>>,
    /// The association and the target of each flow.
    flows: HashMap<Flow, (u64, Authority)>,
    batch: RecvBatch,
}

struct Association<Flow> {
    socket: UdpSocket,
    /// Only datagrams from this address are accepted …
    app_ip: IpAddr,
    /// … and after the first one only from its port.
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

    /// Opens a socket at `local` for the app at `app_ip`; returns the socket's address.
    ///
    /// # Errors
    /// If the kernel refuses.
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

    /// Whether this is the token of an association.
    pub(super) fn has(&self, token: u64) -> bool {
        self.all.contains_key(&token)
    }

    /// Handles datagrams of an app.
    pub(super) fn on_socket_ready<D: DatagramFlows<Flow = Flow>>(
        &mut self,
        now: Instant,
        tunnel: &mut D,
        token: u64,
    ) {
        for _ in 0..MAX_RECV_CALLS {
            let Some(association) = self.all.get_mut(&token) else { return };
            // Errors concern datagrams that did not reach the app.
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

    /// Delivers a payload from a target to its app.
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
            tracing::trace!(%error, "cannot send a payload to its app");
        }
    }

    /// The server has refused or closed a flow.
    pub(super) fn on_flow_closed(&mut self, now: Instant, flow: Flow, refused: bool) {
        let Some((token, to)) = self.flows.remove(&flow) else { return };
        let Some(association) = self.all.get_mut(&token) else { return };
        match refused {
            true => drop(association.targets.insert(to, Target { flow: None, last_activity: now })),
            false => drop(association.targets.remove(&to)),
        }
    }

    /// Closes targets that were idle for too long.
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

    /// Closes an association.
    pub(super) fn close<D: DatagramFlows<Flow = Flow>>(&mut self, tunnel: &mut D, token: u64) {
        let Some(association) = self.all.remove(&token) else { return };
        for flow in association.targets.into_values().filter_map(|target| target.flow) {
            self.flows.remove(&flow);
            tunnel.close(flow);
        }
    }

    /// Closes all associations.
    pub(super) fn end(&mut self) {
        self.all.clear();
        self.flows.clear();
    }
}

impl<Flow: Copy + Eq + Hash + fmt::Debug> Association<Flow> {
    /// The flow to a target, opened if necessary.
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

/// The target and the payload of an app's datagram; `None` for fragments and malformed datagrams.
pub fn parse_datagram(datagram: &[u8]) -> Option<(Authority, &[u8])> {
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

/// A datagram to the app, with its source in front.
pub fn encode_datagram(from: &Authority, payload: &[u8]) -> Bytes {
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
            // Names have at most 253 bytes.
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
