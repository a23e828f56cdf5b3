//! The limits of a user on one connection: what waits for the rate of its user.
//!
//! In: packets and UDP payloads of the client, relays that want to move bytes, the time. Out: the packets and
//! payloads that may go on, the relay whose turn it is, and when to ask again. Always holds: relays that wait
//! take turns; what waits of packets is at most [`MAX_QUEUE_DURATION`] of the rate, and what does not fit is
//! dropped from the fattest flow.
//!
//! Packets to the client wait in the queue of its connection, where a pass takes no more than the limit
//! allows (`multipath/pass.rs`).

use std::collections::{BTreeSet, VecDeque};

use bytes::{BufMut, Bytes, BytesMut};
use mpvpn_class::{FqCodel, QueueConfig, QueuedPacket, RateLimitMember};
use mpvpn_packet::{FlowKey, ip};
use mpvpn_quic::StreamId;
use mpvpn_types::{BitRate, Duration, Instant};

use crate::accounts::{UserAccount, counted_bytes};

/// How long packets of the client wait at most at the rate. As for the queues towards paths
/// (`multipath/scheduling.rs`).
const MAX_QUEUE_DURATION: Duration = Duration::from_millis(150);
/// Bounds of the queue of packets from the client (bytes). Smaller: the window of a TCP connection does not
/// fit at a low rate. Larger: memory of a client that sends more than it may. Chosen.
const MIN_QUEUE_BYTES: usize = 64 << 10;
const MAX_QUEUE_BYTES: usize = 4 << 20;
/// CoDel's target and interval, as for the queues towards paths.
const TARGET: Duration = Duration::from_millis(40);
const INTERVAL: Duration = Duration::from_millis(300);
/// The amount that a relay may move before the next one has its turn: this time of the rate, within bounds.
/// Smaller: more turns. Larger: other relays wait for longer. Chosen.
const TURN_DURATION: Duration = Duration::from_millis(5);
const MIN_TURN_BYTES: u64 = 3000;
const MAX_TURN_BYTES: u64 = 64 << 10;
/// Bytes of the stream ID before a UDP payload in the queue.
const STREAM_ID_BYTES: usize = size_of::<StreamId>();

/// The limits of a connection's user.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    account: UserAccount,
    /// Packets and UDP payloads of the client.
    pub(super) uplink: Uplink,
    /// Relays with bytes of the client for targets.
    pub(super) reads: RelayTurns,
    /// Relays with bytes of targets for the client.
    pub(super) writes: RelayTurns,
}

impl ConnectionLimits {
    pub(super) fn new(account: UserAccount) -> Self {
        Self {
            uplink: Uplink::new(account.up()),
            reads: RelayTurns::new(account.up()),
            writes: RelayTurns::new(account.down()),
            account,
        }
    }

    /// Whether they are those of this account.
    pub(super) fn is_of(&self, account: &UserAccount) -> bool {
        self.account.is_same(account)
    }

    /// The packets and bytes that wait.
    pub(super) fn into_waiting(mut self, now: Instant) -> Unlimited {
        let queue = self.uplink.queue.take();
        let queued = queue.into_iter().flat_map(|mut queue| std::iter::from_fn(move || queue.pop(now)));
        Unlimited {
            released: queued.map(Released::from).collect(),
            readable: self.reads.waiting().collect(),
            writable: self.writes.waiting().collect(),
        }
    }

    /// When something that waits may go on.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let all =
            [self.uplink.poll_timeout(now), self.reads.poll_timeout(now), self.writes.poll_timeout(now)];
        all.into_iter().flatten().min()
    }
}

/// Packets and bytes that waited for a limit that is gone.
#[derive(Debug, Default)]
pub(super) struct Unlimited {
    pub(super) released: Vec<Released>,
    /// Relays with bytes of the client.
    pub(super) readable: Vec<StreamId>,
    /// Relays with bytes for the client.
    pub(super) writable: Vec<StreamId>,
}

/// Data of a client that may go on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Released {
    /// A packet.
    Packet(Bytes),
    /// The payload of a UDP flow.
    Payload(StreamId, Bytes),
}

impl From<QueuedPacket> for Released {
    fn from(queued: QueuedPacket) -> Self {
        let QueuedPacket { mut data, unnumbered, .. } = queued;
        if !unnumbered {
            return Self::Packet(data);
        }
        let id = data.split_to(STREAM_ID_BYTES.min(data.len()));
        Self::Payload(id.iter().fold(0, |id, byte| id << 8 | StreamId::from(*byte)), data)
    }
}

/// Packets and UDP payloads of a client that wait for the rate.
#[derive(Debug)]
pub(super) struct Uplink {
    member: RateLimitMember,
    /// `None` until something waits.
    queue: Option<Box<FqCodel>>,
}

impl Uplink {
    fn new(member: RateLimitMember) -> Self {
        Self { member, queue: None }
    }

    /// Whether packets have to wait in the queue for their turn; otherwise they are counted by
    /// [`Self::count`] only.
    pub(super) fn is_limited(&self) -> bool {
        self.member.is_limited() || !self.is_empty()
    }

    fn is_empty(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| queue.is_empty())
    }

    /// Counts bytes that do not wait.
    pub(super) fn count(&mut self, now: Instant, bytes: u64) {
        self.member.on_carried(now, bytes);
    }

    /// Queues a copy of a packet: the receive buffer that it refers to may be much larger.
    pub(super) fn push_packet(&mut self, now: Instant, packet: &[u8]) {
        let flow = ip::parse(packet).map_or(0, |view| FlowKey::of(&view).hash32());
        self.push(now, flow, false, Bytes::copy_from_slice(packet));
    }

    /// Queues a copy of a UDP payload.
    pub(super) fn push_payload(&mut self, now: Instant, stream: StreamId, payload: &[u8]) {
        let mut data = BytesMut::with_capacity(STREAM_ID_BYTES + payload.len());
        data.put_u64(stream);
        data.put_slice(payload);
        // Streams of requests have numbers that are multiples of 4 (RFC 9000 §2.1).
        self.push(now, (stream >> 2) as u32, true, data.freeze());
    }

    fn push(&mut self, now: Instant, flow: u32, unnumbered: bool, data: Bytes) {
        let limit = queue_bytes(self.member.rate());
        let queue = self.queue.get_or_insert_with(|| {
            let config = QueueConfig { target: TARGET, interval: INTERVAL, ..QueueConfig::default() };
            Box::new(FqCodel::new(config))
        });
        queue.set_limit(limit);
        queue.push(now, QueuedPacket { data, flow, needs_order: true, unnumbered });
    }

    /// The next packet or payload that may go on.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Released> {
        let queue = self.queue.as_mut()?;
        let next = match self.member.available_bytes(now) {
            0 => None,
            _ => queue.pop(now),
        };
        match queue.is_empty() {
            true => self.queue = None,
            false if next.is_none() => self.member.set_waiting(true),
            false => {}
        }
        if self.queue.is_none() {
            self.member.set_waiting(false);
        }
        let next = Released::from(next?);
        let bytes = match &next {
            Released::Packet(packet) => counted_bytes(packet),
            Released::Payload(_, payload) => payload.len() as u64,
        };
        self.member.on_carried(now, bytes);
        Some(next)
    }

    fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        (!self.is_empty()).then(|| self.member.retry_at(now).unwrap_or(now))
    }
}

fn queue_bytes(rate: Option<BitRate>) -> usize {
    let bytes = rate.map_or(u64::MAX, |rate| rate.bytes_in(MAX_QUEUE_DURATION));
    usize::try_from(bytes).unwrap_or(usize::MAX).clamp(MIN_QUEUE_BYTES, MAX_QUEUE_BYTES)
}

/// The relays of a connection that move bytes in one direction, in turns.
#[derive(Debug)]
pub(super) struct RelayTurns {
    member: RateLimitMember,
    /// Relays that wait, each once, in their order.
    waiting: VecDeque<StreamId>,
    listed: BTreeSet<StreamId>,
    /// The relay whose turn it is, and the bytes that are left of it.
    turn: Option<(StreamId, u64)>,
}

impl RelayTurns {
    fn new(member: RateLimitMember) -> Self {
        Self { member, waiting: VecDeque::new(), listed: BTreeSet::new(), turn: None }
    }

    /// Bytes that a relay may move now. After 0 it waits until [`Self::next`] returns it.
    pub(super) fn available_bytes(&mut self, now: Instant, relay: StreamId) -> u64 {
        let available = self.member.available_bytes(now);
        if available == u64::MAX {
            return available;
        }
        let left = match self.turn {
            Some((of, left)) if of == relay && left > 0 => left,
            _ if self.waiting.is_empty() => self.begin_turn(relay),
            _ => 0,
        };
        let allowed = available.min(left);
        if allowed == 0 {
            self.wait(relay);
        }
        allowed
    }

    fn begin_turn(&mut self, relay: StreamId) -> u64 {
        let bytes = self.member.rate().map_or(MAX_TURN_BYTES, |rate| rate.bytes_in(TURN_DURATION));
        let bytes = bytes.clamp(MIN_TURN_BYTES, MAX_TURN_BYTES);
        self.turn = Some((relay, bytes));
        bytes
    }

    fn wait(&mut self, relay: StreamId) {
        self.turn.take_if(|(of, _)| *of == relay);
        if self.listed.insert(relay) {
            self.waiting.push_back(relay);
        }
        self.member.set_waiting(true);
    }

    /// Ends the turn of a relay that has nothing to move. Returns whether others wait.
    pub(super) fn give_up(&mut self, relay: StreamId) -> bool {
        self.turn.take_if(|(of, _)| *of == relay);
        !self.waiting.is_empty()
    }

    /// Counts bytes that a relay has moved.
    pub(super) fn on_moved(&mut self, now: Instant, relay: StreamId, bytes: u64) {
        self.member.on_carried(now, bytes);
        if let Some((_, left)) = self.turn.as_mut().filter(|(of, _)| *of == relay) {
            *left = left.saturating_sub(bytes);
        }
    }

    /// Ends the turn, which its relay has not used up.
    pub(super) fn end_turn(&mut self) {
        self.turn = None;
    }

    /// The relay whose turn begins now, if the rate allows one and no relay has its turn. Relays that no
    /// longer exist are skipped.
    pub(super) fn next(&mut self, now: Instant, exists: impl Fn(StreamId) -> bool) -> Option<StreamId> {
        if self.waiting.is_empty() || self.turn.is_some() || self.member.available_bytes(now) == 0 {
            return None;
        }
        let next = loop {
            let Some(relay) = self.waiting.pop_front() else { break None };
            self.listed.remove(&relay);
            if exists(relay) {
                self.begin_turn(relay);
                break Some(relay);
            }
        };
        if self.waiting.is_empty() {
            self.member.set_waiting(false);
        }
        next
    }

    /// The relays that wait.
    fn waiting(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.waiting.iter().copied()
    }

    fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| self.member.retry_at(now).unwrap_or(now))
    }
}
