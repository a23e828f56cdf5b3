//! The split-TCP proxy (RFC 3135): terminates the TCP connections of apps, whose bytes travel as streams.
//!
//! In: TCP packets of apps, up to 64 KiB each, as a TUN device delivers them; the server's answers to
//! connection requests, and stream data; the time. Out: connection requests, stream data, and packets for the
//! apps.
//!
//! It implements the part of TCP (RFC 9293) that a local link needs: the app always opens the connection, and
//! packets are lost only in full queues, so there is neither a congestion window nor a round-trip time
//! estimator.
//!
//! Always holds:
//! - a SYN is answered only after the server has connected, and refused as the server refused it;
//! - every byte is delivered once and in order, in both directions, and so is the end of each direction;
//! - an app or stream that does not read stops its own sender and no other;
//! - memory is bounded for each connection and for all of them.

mod flow;
mod inbound;
mod outbound;
mod seq;

use std::{
    collections::{BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    net::{IpAddr, SocketAddr},
};

use bytes::Bytes;
use mpvpn_packet::{
    FlowKey, IpPacket, TunPacket,
    icmp::{self, Unreachable},
    tcp::{self, Segment, TcpHeader},
    tcp_flags::{ACK, RST, SYN},
};
use mpvpn_types::{Duration, Instant};
use rustc_hash::FxHashMap;

use flow::{Flow, Phase, Verdict};
use seq::Seq;

/// Bytes that a connection may hold in each direction when the memory of all connections is used up. Smaller:
/// connections stall; larger: memory.
const MIN_BUFFER: usize = 4096;
/// A connection that was idle for this time frees its buffers. Shorter: allocations; longer: memory of idle
/// connections.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(1);
/// Buffers that wait for an app before they are copied into one, because each may keep a whole receive buffer
/// alive. Fewer: copies; more: memory.
const MAX_BUFFERS: usize = 64;

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct ProxyLimits {
    /// Connections at a time; further SYNs are not answered.
    pub max_flows: usize,
    /// Bytes that may wait in each direction of a connection.
    pub max_flow_bytes: usize,
    /// Bytes that may wait in all connections; beyond that, each may hold 4 KiB.
    pub max_total_bytes: usize,
    /// How long the server may take to accept or refuse a connection.
    pub connect_timeout: Duration,
    /// How long a connection may be idle.
    pub idle_timeout: Duration,
    /// How long a connection may be idle after one direction has ended.
    pub half_closed_timeout: Duration,
}

impl Default for ProxyLimits {
    /// Idle connections live as long as at a NAT (RFC 5382 §5: 2 h 4 min); unanswered ones as long as Linux
    /// retries SYNs (127 s with tcp_syn_retries = 6).
    fn default() -> Self {
        Self {
            max_flows: 65_536,
            max_flow_bytes: 256 << 10,
            max_total_bytes: 32 << 20,
            connect_timeout: Duration::from_secs(130),
            idle_timeout: Duration::from_secs(2 * 3600 + 4 * 60),
            half_closed_timeout: Duration::from_secs(600),
        }
    }
}

/// Identifies one connection of an app.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId {
    slot: u32,
    /// How many connections used this slot before.
    generation: u32,
}

/// Something that the owner of the stream has to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An app connects to `to`; [`SplitTcpProxy::accept`] or [`SplitTcpProxy::refuse`] answers it.
    ConnectRequested {
        /// The new connection.
        id: FlowId,
        /// The app's address.
        from: SocketAddr,
        /// The destination.
        to: SocketAddr,
    },
    /// [`SplitTcpProxy::read`] returns data or the end again.
    Readable(FlowId),
    /// [`SplitTcpProxy::writable_bytes`] is above 0 again.
    Writable(FlowId),
    /// The app reset the connection or does not answer any more; the connection is removed.
    Aborted(FlowId),
}

/// The result of reading the bytes of an app.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// These bytes.
    Data(Bytes),
    /// Nothing now; [`Event::Readable`] follows.
    Blocked,
    /// The app has ended its direction, and everything was read.
    Finished,
    /// There is no such connection.
    UnknownFlow,
}

/// How a connection of an app is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// By RST: the destination does not listen.
    Reset,
    /// By an ICMP error from this address.
    Unreachable(Unreachable, IpAddr),
    /// Without an answer: the app times out.
    Silence,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The server has not answered yet, or the app has not acknowledged the SYN-ACK.
    Opening,
    /// Both directions are open.
    Open,
    /// The app has ended its direction.
    AppEnded,
    /// The server has ended its direction.
    RemoteEnded,
    /// Both directions have ended.
    Closing,
}

/// A connection, for status output.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionSummary {
    /// The 5-tuple of the app's packets.
    pub key: FlowKey,
    /// The state of the connection.
    pub state: ConnectionState,
    /// Bytes from the app that were read.
    pub up_bytes: u64,
    /// Bytes for the app that were written.
    pub down_bytes: u64,
    /// When the SYN arrived.
    pub started: Instant,
    /// When bytes last moved, or the app last sent a segment.
    pub last_active: Instant,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    flow: Option<Box<Flow>>,
    /// Its deadline in the queue of timers.
    armed: Option<Instant>,
    /// Whether it is in the queue of connections that have packets to send.
    queued: bool,
    /// [`Event::Readable`] was reported, and the stream has not read everything since.
    readable_reported: bool,
    /// [`SplitTcpProxy::writable_bytes`] was 0, so [`Event::Writable`] has to follow.
    writable_awaited: bool,
    /// Its bytes in the sum of all connections.
    held: usize,
}

/// Terminates the TCP connections of apps.
#[derive(Debug)]
pub struct SplitTcpProxy {
    limits: ProxyLimits,
    secret: [u64; 2],
    created: Instant,
    mtu: usize,
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_key: FxHashMap<FlowKey, u32>,
    timers: BTreeSet<(Instant, u32)>,
    due: VecDeque<u32>,
    /// Packets to send that belong to no connection any more.
    detached_packets: VecDeque<TunPacket>,
    events: VecDeque<Event>,
    /// Bytes that wait in all connections.
    held: usize,
}

impl SplitTcpProxy {
    /// A proxy without connections. `secret` is random and makes sequence numbers unpredictable (RFC 6528);
    /// packets to apps have at most `mtu` bytes.
    pub fn new(now: Instant, limits: ProxyLimits, secret: [u64; 2], mtu: usize) -> Self {
        Self {
            limits,
            secret,
            created: now,
            mtu,
            slots: Vec::new(),
            free: Vec::new(),
            by_key: FxHashMap::default(),
            timers: BTreeSet::new(),
            due: VecDeque::new(),
            detached_packets: VecDeque::new(),
            events: VecDeque::new(),
            held: 0,
        }
    }

    /// Sets the largest size of packets to apps (bytes).
    pub fn set_mtu(&mut self, mtu: usize) {
        self.mtu = mtu;
    }

    /// Whether a packet from an app belongs to a connection of this proxy.
    pub fn has_flow(&self, key: &FlowKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// The number of connections.
    pub fn flow_count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All connections.
    pub fn summaries(&self) -> impl Iterator<Item = ConnectionSummary> {
        self.slots.iter().filter_map(|slot| Some(slot.flow.as_ref()?.summary()))
    }

    /// Bytes that wait in all connections.
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// Whether [`Self::poll_event`] returns an event.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes a packet of an app. Packets other than TCP are ignored; a segment of no connection is answered
    /// with a RST.
    pub fn handle_packet(&mut self, now: Instant, packet: &IpPacket<'_>) {
        let Some(segment) = Segment::of(packet) else { return };
        let key = FlowKey::of(packet);
        let fresh = segment.has(SYN) && !segment.has(ACK | RST);
        if let Some(&at) = self.by_key.get(&key) {
            let Some(flow) = self.slots[at as usize].flow.as_mut() else { return };
            if !(fresh && flow.is_replaced_by(&segment)) {
                let verdict = flow.handle(now, &segment);
                return self.apply_verdict(now, at, verdict, Some((&key, &segment)));
            }
            let over = matches!(flow.phase, Phase::Over { .. });
            let verdict = if over { Verdict::Ended } else { Verdict::Broken };
            self.apply_verdict(now, at, verdict, None);
        }
        if fresh {
            self.open(now, key, &segment, packet);
        } else {
            self.answer_unknown(&key, &segment);
        }
    }

    fn open(&mut self, now: Instant, key: FlowKey, syn: &Segment<'_>, packet: &IpPacket<'_>) {
        if self.flow_count() >= self.limits.max_flows {
            return;
        }
        let first = self.initial_sequence_number(now, &key);
        let flow = Flow::new(now, key, syn, packet.bytes(), first, self.limit());
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        self.slots[at as usize].flow = Some(Box::new(flow));
        self.by_key.insert(key, at);
        self.events.push_back(Event::ConnectRequested {
            id: self.id(at),
            from: key.source(),
            to: key.destination(),
        });
        self.update(now, at);
    }

    /// The initial sequence number of a connection: unpredictable, and growing with time (RFC 6528 §3).
    fn initial_sequence_number(&self, now: Instant, key: &FlowKey) -> Seq {
        let mut hasher = DefaultHasher::new();
        (self.secret, key).hash(&mut hasher);
        let ticks = now.saturating_duration_since(self.created).as_micros() / 4;
        Seq((hasher.finish() as u32).wrapping_add(ticks as u32))
    }

    fn id(&self, at: u32) -> FlowId {
        FlowId { slot: at, generation: self.slots[at as usize].generation }
    }

    fn at(&self, id: FlowId) -> Option<u32> {
        let slot = self.slots.get(id.slot as usize)?;
        (slot.generation == id.generation && slot.flow.is_some()).then_some(id.slot)
    }

    fn flow(&mut self, id: FlowId) -> Option<&mut Flow> {
        let at = self.at(id)?;
        self.slots[at as usize].flow.as_deref_mut()
    }

    /// Bytes that may wait in one direction of a connection now, which depends on the bytes of all.
    fn limit(&self) -> usize {
        match self.held {
            held if held < self.limits.max_total_bytes / 2 => self.limits.max_flow_bytes,
            held if held < self.limits.max_total_bytes => self.limits.max_flow_bytes / 4,
            _ => MIN_BUFFER,
        }
    }

    /// Answers a segment that belongs to no connection (RFC 9293 §3.10.7.1).
    fn answer_unknown(&mut self, key: &FlowKey, segment: &Segment<'_>) {
        if segment.has(RST) {
            return;
        }
        let (from, to) = (key.destination(), key.source());
        let (seq, ack, flags) = match segment.has(ACK) {
            true => (segment.ack(), 0, RST),
            false => (0, Seq(segment.seq()).plus(segment.seq_len()).0, RST | ACK),
        };
        let head = TcpHeader { from, to, seq, ack, flags, window: 0, mss: None, window_scale: None };
        self.detached_packets.extend(tcp::build_packet(&head, Vec::new(), u16::MAX));
    }

    /// Acts on the outcome of a segment or timeout for the connection at `at`.
    fn apply_verdict(
        &mut self,
        now: Instant,
        at: u32,
        verdict: Verdict,
        cause: Option<(&FlowKey, &Segment<'_>)>,
    ) {
        match verdict {
            Verdict::Continue => self.update(now, at),
            Verdict::Ended => self.remove(at),
            Verdict::Broken => {
                self.events.push_back(Event::Aborted(self.id(at)));
                self.remove(at);
            }
            Verdict::WrongConnection => {
                if let Some((key, segment)) = cause {
                    self.answer_unknown(key, segment);
                }
                self.update(now, at);
            }
        }
    }

    /// Updates the byte counts, events, send queue and timer of a connection after a change.
    fn update(&mut self, now: Instant, at: u32) {
        let (limit, id) = (self.limit(), self.id(at));
        let limits = self.limits;
        let slot = &mut self.slots[at as usize];
        let Some(flow) = slot.flow.as_mut() else { return };
        let held = flow.inbound.held() + flow.outbound.held;
        self.held = self.held + held - slot.held;
        slot.held = held;
        let readable = flow.inbound.waiting > 0 || flow.inbound.ended;
        if readable && !slot.readable_reported {
            slot.readable_reported = true;
            self.events.push_back(Event::Readable(id));
        }
        if slot.writable_awaited && flow.outbound.held <= limit / 2 {
            slot.writable_awaited = false;
            self.events.push_back(Event::Writable(id));
        }
        if flow.is_due() && !slot.queued {
            slot.queued = true;
            self.due.push_back(at);
        }
        let trims_at = flow.has_spare().then_some(now + IDLE_BEFORE_TRIM);
        let deadline = [flow.expires_at(&limits), trims_at, flow.poll_timeout()].into_iter().flatten().min();
        if let Some(deadline) = deadline
            && slot.armed.is_none_or(|armed| deadline < armed)
        {
            if let Some(armed) = slot.armed {
                self.timers.remove(&(armed, at));
            }
            slot.armed = Some(deadline);
            self.timers.insert((deadline, at));
        }
    }

    fn remove(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        let Some(flow) = slot.flow.take() else { return };
        self.by_key.remove(&flow.key);
        self.held -= std::mem::take(&mut slot.held);
        if let Some(armed) = slot.armed.take() {
            self.timers.remove(&(armed, at));
        }
        slot.generation = slot.generation.wrapping_add(1);
        (slot.readable_reported, slot.writable_awaited) = (false, false);
        self.free.push(at);
    }

    /// The server has accepted a connection: answers the app's SYN.
    pub fn accept(&mut self, now: Instant, id: FlowId) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.answer();
        }
        self.update(now, at);
    }

    /// The server has refused a connection: answers the app accordingly, and removes the connection.
    pub fn refuse(&mut self, id: FlowId, refusal: Refusal) {
        let Some(at) = self.at(id) else { return };
        let Some(flow) = self.flow(id) else { return };
        let error = match (&flow.phase, refusal) {
            (Phase::SynReceived { syn }, Refusal::Unreachable(reason, from)) => {
                icmp::unreachable(syn, reason, from).map(|packet| TunPacket::single(packet.into()))
            }
            _ => None,
        };
        let answer = match refusal {
            Refusal::Silence => None,
            _ => error.or_else(|| flow.reset()),
        };
        self.detached_packets.extend(answer);
        self.remove(at);
    }

    /// The stream was reset: resets the app's connection.
    pub fn abort(&mut self, id: FlowId) {
        self.refuse(id, Refusal::Reset);
    }

    /// Reads up to `max` bytes that the app sent.
    pub fn read(&mut self, now: Instant, id: FlowId, max: usize) -> Read {
        let limit = self.limit();
        let Some(at) = self.at(id) else { return Read::UnknownFlow };
        let slot = &mut self.slots[at as usize];
        let Some(flow) = slot.flow.as_mut() else { return Read::UnknownFlow };
        if flow.inbound.waiting > 0 {
            let data = flow.inbound.read(max);
            flow.up += data.len() as u64;
            flow.active = now;
            flow.ack_due |= flow.inbound.needs_window_update(limit, flow.outbound.mss);
            self.update(now, at);
            return Read::Data(data);
        }
        if flow.inbound.read_end() {
            if flow.verdict(now) == Verdict::Ended {
                self.remove(at);
            } else {
                self.update(now, at);
            }
            return Read::Finished;
        }
        slot.readable_reported = false;
        Read::Blocked
    }

    /// How many bytes for the app can be written now; 0 if there is no such connection. After 0,
    /// [`Event::Writable`] follows.
    pub fn writable_bytes(&mut self, id: FlowId) -> usize {
        let limit = self.limit();
        let Some(at) = self.at(id) else { return 0 };
        let slot = &mut self.slots[at as usize];
        let writable = slot.flow.as_ref().map_or(0, |flow| limit.saturating_sub(flow.outbound.held));
        slot.writable_awaited |= writable == 0;
        writable
    }

    /// Writes bytes for the app, at most [`Self::writable_bytes`].
    pub fn write(&mut self, now: Instant, id: FlowId, bytes: Bytes) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.down += bytes.len() as u64;
            flow.active = now;
            flow.outbound.write(bytes);
            if flow.outbound.buffers() > MAX_BUFFERS && !flow.outbound.is_due() {
                flow.outbound.compact();
            }
            flow.outbound.arm(now);
        }
        self.update(now, at);
    }

    /// Ends the direction to the app after what was written.
    pub fn finish(&mut self, now: Instant, id: FlowId) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.outbound.finish();
        }
        self.update(now, at);
    }

    /// The next packet for an app.
    pub fn poll_packet(&mut self, now: Instant) -> Option<TunPacket> {
        if let Some(packet) = self.detached_packets.pop_front() {
            return Some(packet);
        }
        while let Some(at) = self.due.pop_front() {
            let (mtu, limit) = (self.mtu, self.limit());
            let slot = &mut self.slots[at as usize];
            slot.queued = false;
            let Some(flow) = slot.flow.as_mut() else { continue };
            let packet = flow.poll_packet(now, mtu, limit);
            let verdict = flow.verdict(now);
            self.apply_verdict(now, at, verdict, None);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }

    /// When [`Self::handle_timeout`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Handles the timers that have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        let due: Vec<_> = self.timers.range(..=(now, u32::MAX)).copied().collect();
        for (when, at) in due {
            self.timers.remove(&(when, at));
            let limits = self.limits;
            let slot = &mut self.slots[at as usize];
            slot.armed = None;
            let Some(flow) = slot.flow.as_mut() else { continue };
            if flow.expires_at(&limits).is_some_and(|at| now >= at) {
                if matches!(flow.phase, Phase::Open) {
                    self.detached_packets.extend(flow.reset());
                }
                self.apply_verdict(now, at, Verdict::Broken, None);
                continue;
            }
            if now >= flow.last_segment + IDLE_BEFORE_TRIM {
                flow.trim_memory();
            }
            let verdict = flow.handle_timeout(now);
            if verdict == Verdict::Broken {
                self.detached_packets.extend(flow.reset());
            }
            self.apply_verdict(now, at, verdict, None);
        }
    }
}

#[cfg(test)]
mod tests;
