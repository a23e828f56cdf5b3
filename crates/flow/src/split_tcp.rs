//! The stream lane's end at the app: TCP connections end here, and their bytes travel as streams.
//!
//! In: TCP packets of apps, up to 64 KiB each, as a TUN device gives them; what the far side said to a request, and
//! the bytes that it sent; the time. Out: requests, bytes to send on streams, and packets for the apps.
//!
//! It is the half of TCP (RFC 9293) that a local link needs: the app's kernel always begins, nothing is lost but by a
//! full queue, and so there is neither a congestion window nor an estimate of round-trip times.
//!
//! Always holds:
//! - a connection is answered only when the far side has agreed, and refused as the far side refused it;
//! - every byte comes out once and in order, in both directions, and so do the ends of both directions;
//! - who does not read, app or stream, stops its own sender and nobody else;
//! - memory is bounded for each flow and for all of them.

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

/// Where memory is short, each flow may still hold so much (bytes).
const LEAST: usize = 4096;
/// A flow that is quiet for this time gives its memory back.
const REST: Duration = Duration::from_secs(1);
/// Pieces that wait for an app that does not read are copied into one when there are more.
const MOST_PIECES: usize = 64;

/// What flows may take.
#[derive(Clone, Copy, Debug)]
pub struct ProxyLimits {
    /// Connections at a time; further ones are not answered.
    pub max_flows: usize,
    /// Bytes that may wait in each direction of a flow.
    pub max_flow_bytes: usize,
    /// Bytes that may wait in all of them: beyond it, each may hold 4 KiB.
    pub max_total_bytes: usize,
    /// The far side must agree or refuse within this time.
    pub connect_timeout: Duration,
    /// A connection on which nothing moves ends after this time.
    pub idle_timeout: Duration,
    /// So does one of which one direction has ended.
    pub half_closed_timeout: Duration,
}

impl Default for ProxyLimits {
    /// Idle connections end no sooner than at a NAT (RFC 5382 §5), and unanswered ones when Linux gives up.
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

/// One connection of an app.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId {
    slot: u32,
    /// How many had this slot before.
    turn: u32,
}

/// Something that the stream of a flow must act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An app wants to talk to `to`: [`SplitTcpProxy::accept`] or [`SplitTcpProxy::refuse`] answers it.
    ConnectRequested {
        /// The new connection.
        id: FlowId,
        /// The app's address.
        from: SocketAddr,
        /// Where it wants to.
        to: SocketAddr,
    },
    /// [`SplitTcpProxy::read`] has something to say again.
    Readable(FlowId),
    /// [`SplitTcpProxy::writable_bytes`] is there again.
    Writable(FlowId),
    /// The app broke the connection off, or is gone; the flow is no more.
    Aborted(FlowId),
}

/// What an app sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// These bytes.
    Data(Bytes),
    /// Nothing now; [`Event::Readable`] follows.
    Blocked,
    /// It sends nothing more, and everything was read.
    Finished,
    /// There is no such flow.
    UnknownFlow,
}

/// Why an app gets no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Nobody listens there.
    Reset,
    /// Nothing leads there, says this address.
    Unreachable(Unreachable, IpAddr),
    /// There is no answer: the app finds out by itself.
    Silence,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The far side has not said yet whether it agrees, or the app has not heard.
    Opening,
    /// Bytes may move both ways.
    Open,
    /// The app sends nothing more.
    AppEnded,
    /// The far side sends nothing more.
    RemoteEnded,
    /// Neither does.
    Closing,
}

/// What there is to say about a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionSummary {
    /// From the app to where it wants.
    pub key: FlowKey,
    /// How far it is.
    pub state: ConnectionState,
    /// Bytes of the app that the stream has taken.
    pub up_bytes: u64,
    /// Bytes for the app that came on the stream.
    pub down_bytes: u64,
    /// When it began.
    pub started: Instant,
    /// When bytes moved, or the app was heard of, last.
    pub last_active: Instant,
}

#[derive(Debug)]
struct Slot {
    turn: u32,
    flow: Option<Box<Flow>>,
    /// Its place in the queue of timers.
    armed: Option<Instant>,
    /// It is among those that have packets to send.
    queued: bool,
    /// The stream was told that it can read, and has not found the end of it since.
    told_readable: bool,
    /// The stream found no room.
    full: bool,
    /// What counts for it in the sum of all (bytes).
    held: usize,
}

/// Ends the TCP connections of apps.
#[derive(Debug)]
pub struct SplitTcpProxy {
    limits: ProxyLimits,
    secret: [u64; 2],
    born: Instant,
    mtu: usize,
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_key: FxHashMap<FlowKey, u32>,
    timers: BTreeSet<(Instant, u32)>,
    due: VecDeque<u32>,
    /// Packets that belong to no flow, or not any more.
    loose: VecDeque<TunPacket>,
    events: VecDeque<Event>,
    /// What waits in all flows (bytes).
    held: usize,
}

impl SplitTcpProxy {
    /// One without flows. `secret` is random and makes sequence numbers hard to guess (RFC 6528); packets to apps fit
    /// `mtu` bytes.
    pub fn new(now: Instant, limits: ProxyLimits, secret: [u64; 2], mtu: usize) -> Self {
        Self {
            limits,
            secret,
            born: now,
            mtu,
            slots: Vec::new(),
            free: Vec::new(),
            by_key: FxHashMap::default(),
            timers: BTreeSet::new(),
            due: VecDeque::new(),
            loose: VecDeque::new(),
            events: VecDeque::new(),
            held: 0,
        }
    }

    /// Packets to apps fit so many bytes from now on.
    pub fn set_mtu(&mut self, mtu: usize) {
        self.mtu = mtu;
    }

    /// Whether a packet from an app belongs to a connection that ends here.
    pub fn has_flow(&self, key: &FlowKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Connections now.
    pub fn flow_count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All of them.
    pub fn summaries(&self) -> impl Iterator<Item = ConnectionSummary> {
        self.slots.iter().filter_map(|slot| Some(slot.flow.as_ref()?.summary()))
    }

    /// Bytes that wait in all of them.
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// Whether [`Self::poll_event`] has something.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// What happened since.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes a packet of an app. What is not TCP is ignored; a segment of no connection is answered with a reset.
    pub fn handle_packet(&mut self, now: Instant, packet: &IpPacket<'_>) {
        let Some(segment) = Segment::of(packet) else { return };
        let key = FlowKey::of(packet);
        let fresh = segment.has(SYN) && !segment.has(ACK | RST);
        if let Some(&at) = self.by_key.get(&key) {
            let Some(flow) = self.slots[at as usize].flow.as_mut() else { return };
            if !(fresh && flow.gives_way_to(&segment)) {
                let verdict = flow.handle(now, &segment);
                return self.conclude(now, at, verdict, Some((&key, &segment)));
            }
            let over = matches!(flow.phase, Phase::Over { .. });
            let verdict = if over { Verdict::Ended } else { Verdict::Broken };
            self.conclude(now, at, verdict, None);
        }
        if fresh {
            self.open(now, key, &segment, packet);
        } else {
            self.disown(&key, &segment);
        }
    }

    fn open(&mut self, now: Instant, key: FlowKey, syn: &Segment<'_>, packet: &IpPacket<'_>) {
        if self.flow_count() >= self.limits.max_flows {
            return;
        }
        let first = self.first_number(now, &key);
        let flow = Flow::new(now, key, syn, packet.bytes(), first, self.limit());
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                turn: 0,
                flow: None,
                armed: None,
                queued: false,
                told_readable: false,
                full: false,
                held: 0,
            });
            (self.slots.len() - 1) as u32
        });
        self.slots[at as usize].flow = Some(Box::new(flow));
        self.by_key.insert(key, at);
        self.events.push_back(Event::ConnectRequested {
            id: self.id(at),
            from: key.source(),
            to: key.destination(),
        });
        self.settle(now, at);
    }

    /// The number of the SYN of a connection: nobody else can guess it, and it grows with time (RFC 6528 §3).
    fn first_number(&self, now: Instant, key: &FlowKey) -> Seq {
        let mut hasher = DefaultHasher::new();
        (self.secret, key).hash(&mut hasher);
        let ticks = now.saturating_duration_since(self.born).as_micros() / 4;
        Seq((hasher.finish() as u32).wrapping_add(ticks as u32))
    }

    fn id(&self, at: u32) -> FlowId {
        FlowId { slot: at, turn: self.slots[at as usize].turn }
    }

    fn at(&self, id: FlowId) -> Option<u32> {
        let slot = self.slots.get(id.slot as usize)?;
        (slot.turn == id.turn && slot.flow.is_some()).then_some(id.slot)
    }

    fn flow(&mut self, id: FlowId) -> Option<&mut Flow> {
        let at = self.at(id)?;
        self.slots[at as usize].flow.as_deref_mut()
    }

    /// Bytes that may wait in one direction of a flow.
    fn limit(&self) -> usize {
        match self.held {
            held if held < self.limits.max_total_bytes / 2 => self.limits.max_flow_bytes,
            held if held < self.limits.max_total_bytes => self.limits.max_flow_bytes / 4,
            _ => LEAST,
        }
    }

    /// Answers a segment that belongs to no connection (RFC 9293 §3.10.7.1).
    fn disown(&mut self, key: &FlowKey, segment: &Segment<'_>) {
        if segment.has(RST) {
            return;
        }
        let (from, to) = (key.destination(), key.source());
        let (seq, ack, flags) = match segment.has(ACK) {
            true => (segment.ack(), 0, RST),
            false => (0, Seq(segment.seq()).plus(segment.seq_len()).0, RST | ACK),
        };
        let head = TcpHeader { from, to, seq, ack, flags, window: 0, mss: None, window_scale: None };
        self.loose.extend(tcp::build_packet(&head, Vec::new(), u16::MAX));
    }

    /// Acts on what a segment or time meant for the flow at `at`.
    fn conclude(&mut self, now: Instant, at: u32, verdict: Verdict, cause: Option<(&FlowKey, &Segment<'_>)>) {
        match verdict {
            Verdict::Goes => self.settle(now, at),
            Verdict::Ended => self.remove(at),
            Verdict::Broken => {
                self.events.push_back(Event::Aborted(self.id(at)));
                self.remove(at);
            }
            Verdict::Strange => {
                if let Some((key, segment)) = cause {
                    self.disown(key, segment);
                }
                self.settle(now, at);
            }
        }
    }

    /// Sees to it that what a flow has to send, to say and to wait for is not forgotten.
    fn settle(&mut self, now: Instant, at: u32) {
        let (limit, id) = (self.limit(), self.id(at));
        let limits = self.limits;
        let slot = &mut self.slots[at as usize];
        let Some(flow) = slot.flow.as_mut() else { return };
        let held = flow.inbound.held() + flow.outbound.held();
        self.held = self.held + held - slot.held;
        slot.held = held;
        let readable = flow.inbound.len() > 0 || flow.inbound.has_ended();
        if readable && !slot.told_readable {
            slot.told_readable = true;
            self.events.push_back(Event::Readable(id));
        }
        if slot.full && flow.outbound.held() <= limit / 2 {
            slot.full = false;
            self.events.push_back(Event::Writable(id));
        }
        if flow.is_due() && !slot.queued {
            slot.queued = true;
            self.due.push_back(at);
        }
        let rests = flow.has_spare().then_some(now + REST);
        let deadline = [flow.ends_at(&limits), rests, flow.poll_timeout()].into_iter().flatten().min();
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
        slot.turn = slot.turn.wrapping_add(1);
        (slot.told_readable, slot.full) = (false, false);
        self.free.push(at);
    }

    /// The far side has agreed to a connection.
    pub fn accept(&mut self, now: Instant, id: FlowId) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.answer();
        }
        self.settle(now, at);
    }

    /// The far side has not.
    pub fn refuse(&mut self, id: FlowId, refusal: Refusal) {
        let Some(at) = self.at(id) else { return };
        let Some(flow) = self.flow(id) else { return };
        let error = match (&flow.phase, refusal) {
            (Phase::Asked { syn }, Refusal::Unreachable(reason, from)) => {
                icmp::unreachable(syn, reason, from).map(|packet| TunPacket::single(packet.into()))
            }
            _ => None,
        };
        let answer = match refusal {
            Refusal::Silence => None,
            _ => error.or_else(|| flow.reset()),
        };
        self.loose.extend(answer);
        self.remove(at);
    }

    /// The stream was broken off: so is the app's connection.
    pub fn abort(&mut self, id: FlowId) {
        self.refuse(id, Refusal::Reset);
    }

    /// Takes up to `most` bytes that the app sent.
    pub fn read(&mut self, now: Instant, id: FlowId, most: usize) -> Read {
        let limit = self.limit();
        let Some(at) = self.at(id) else { return Read::UnknownFlow };
        let slot = &mut self.slots[at as usize];
        let Some(flow) = slot.flow.as_mut() else { return Read::UnknownFlow };
        if flow.inbound.len() > 0 {
            let data = flow.inbound.read(most);
            flow.up += data.len() as u64;
            flow.active = now;
            flow.ack_due |= flow.inbound.is_worth_telling(limit, flow.outbound.mss());
            self.settle(now, at);
            return Read::Data(data);
        }
        if flow.inbound.read_end() {
            if flow.verdict(now) == Verdict::Ended {
                self.remove(at);
            } else {
                self.settle(now, at);
            }
            return Read::Finished;
        }
        slot.told_readable = false;
        Read::Blocked
    }

    /// How many bytes for the app can be taken; 0 if there is no such flow. After 0, [`Event::Writable`] follows.
    pub fn writable_bytes(&mut self, id: FlowId) -> usize {
        let limit = self.limit();
        let Some(at) = self.at(id) else { return 0 };
        let slot = &mut self.slots[at as usize];
        let room = slot.flow.as_ref().map_or(0, |flow| limit.saturating_sub(flow.outbound.held()));
        slot.full |= room == 0;
        room
    }

    /// Takes bytes for the app, not more than there is [`Self::writable_bytes`].
    pub fn write(&mut self, now: Instant, id: FlowId, bytes: Bytes) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.down += bytes.len() as u64;
            flow.active = now;
            flow.outbound.write(bytes);
            if flow.outbound.pieces() > MOST_PIECES && !flow.outbound.is_due() {
                flow.outbound.compact();
            }
            flow.outbound.arm(now);
        }
        self.settle(now, at);
    }

    /// Nothing more comes for the app.
    pub fn finish(&mut self, now: Instant, id: FlowId) {
        let Some(at) = self.at(id) else { return };
        if let Some(flow) = self.flow(id) {
            flow.outbound.finish();
        }
        self.settle(now, at);
    }

    /// The next packet for an app.
    pub fn poll_packet(&mut self, now: Instant) -> Option<TunPacket> {
        if let Some(packet) = self.loose.pop_front() {
            return Some(packet);
        }
        while let Some(at) = self.due.pop_front() {
            let (mtu, limit) = (self.mtu, self.limit());
            let slot = &mut self.slots[at as usize];
            slot.queued = false;
            let Some(flow) = slot.flow.as_mut() else { continue };
            let packet = flow.poll_packet(now, mtu, limit);
            let verdict = flow.verdict(now);
            self.conclude(now, at, verdict, None);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        let due: Vec<_> = self.timers.range(..=(now, u32::MAX)).copied().collect();
        for (when, at) in due {
            self.timers.remove(&(when, at));
            let limits = self.limits;
            let slot = &mut self.slots[at as usize];
            slot.armed = None;
            let Some(flow) = slot.flow.as_mut() else { continue };
            if flow.ends_at(&limits).is_some_and(|at| now >= at) {
                if matches!(flow.phase, Phase::Open) {
                    self.loose.extend(flow.reset());
                }
                self.conclude(now, at, Verdict::Broken, None);
                continue;
            }
            if now >= flow.heard + REST {
                flow.rest();
            }
            let verdict = flow.handle_timeout(now);
            if verdict == Verdict::Broken {
                self.loose.extend(flow.reset());
            }
            self.conclude(now, at, verdict, None);
        }
    }
}

#[cfg(test)]
mod tests;
