//! Queues and dispatchers with many flows.

use bytes::Bytes;
use mpvpn_class::{FqCodel, QueueConfig, QueuedPacket};
use mpvpn_path::{Dispatcher, EligiblePackets, PathInfo, PathState, Scheduler, Utilization};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

/// Number of packets that are pushed or popped while instructions are counted.
const BATCH: usize = 100;
/// Length of every packet, bytes.
const PACKET_BYTES: usize = 1400;
/// Packets in the queue before counting: at least one of each flow, and more than a batch removes.
const WAITING_PACKETS: usize = 10_000 + 2 * BATCH;

/// A queue with waiting packets, and a batch of packets to push.
pub(crate) struct FilledQueue {
    now: Instant,
    queue: FqCodel,
    next: Vec<QueuedPacket>,
}

impl FilledQueue {
    /// A queue whose packets are spread over `flows` flows, with so many buckets that flows do not collide.
    pub(crate) fn new(flows: u32) -> Self {
        let config = QueueConfig {
            limit_bytes: 1 << 30,
            limit_packets: 1 << 20,
            flows: 1 << 30,
            // No packet is dropped.
            target: Duration::from_secs(3600),
            ..QueueConfig::default()
        };
        Self::with_config(config, flows)
    }

    /// A queue with the limits of a tunnel: each pushed packet drops another one.
    pub(crate) fn full(flows: u32) -> Self {
        Self::with_config(QueueConfig::default(), flows)
    }

    fn with_config(config: QueueConfig, flows: u32) -> Self {
        let now = Instant::now();
        let mut queue = FqCodel::new(config);
        for n in 0..WAITING_PACKETS as u32 {
            queue.push(now, packet(n % flows));
        }
        let next = (0..BATCH as u32).map(|n| packet(n * 97 % flows)).collect();
        Self { now, queue, next }
    }

    /// Pushes a batch; returns the number of dropped bytes.
    pub(crate) fn push(&mut self) -> usize {
        let (now, queue) = (self.now, &mut self.queue);
        self.next.drain(..).map(|packet| queue.push(now, packet)).sum()
    }

    /// Pops a batch; returns the number of bytes.
    pub(crate) fn pop(&mut self) -> usize {
        (0..BATCH).map(|_| self.queue.pop(self.now).map_or(0, |packet| packet.data.len())).sum()
    }
}

/// A dispatcher with known flows, and a batch of packets to push.
pub(crate) struct Dispatch {
    now: Instant,
    dispatcher: Dispatcher,
    paths: u32,
    next: Vec<QueuedPacket>,
}

impl Dispatch {
    /// A dispatcher with `flows` flows over `paths` paths.
    pub(crate) fn new(scheduler: Scheduler, ordered: bool, paths: u32, flows: u32) -> Self {
        let now = Instant::now();
        let mut dispatcher = Dispatcher::new(scheduler, QueueConfig::default());
        let infos: Vec<PathInfo> = (0..paths).map(path).collect();
        dispatcher.set_paths(now, &infos);
        // All flows are in the flow table, and few packets wait, as in a tunnel that is not congested.
        for flow in 0..flows {
            dispatcher.push(now, QueuedPacket { needs_order: ordered, ..packet(flow) });
            (0..paths).for_each(|id| drop(dispatcher.pop(now, PathId(id), EligiblePackets::Any)));
        }
        let next = (0..BATCH as u32).map(|n| flows - 1 - n * 37 % flows.min(4000));
        let next = next.map(|flow| QueuedPacket { needs_order: ordered, ..packet(flow) }).collect();
        Self { now, dispatcher, paths, next }
    }

    /// Pushes a batch and pops it path by path; returns the number of packets.
    pub(crate) fn pass(&mut self) -> usize {
        for packet in self.next.drain(..) {
            self.dispatcher.push(self.now, packet);
        }
        let mut count = 0;
        for id in (0..self.paths).map(PathId) {
            while self.dispatcher.pop(self.now, id, EligiblePackets::Any).is_some() {
                count += 1;
            }
        }
        count
    }
}

fn path(id: u32) -> PathInfo {
    PathInfo {
        id: PathId(id),
        link: LinkId(id as u16),
        state: PathState::Active,
        rtt: Duration::from_millis(u64::from(10 + id)),
        rate: 10_000_000,
        utilization: Utilization::Partial,
    }
}

fn packet(flow: u32) -> QueuedPacket {
    static DATA: [u8; PACKET_BYTES] = [0; PACKET_BYTES];
    QueuedPacket {
        data: Bytes::from_static(&DATA),
        flow: flow.wrapping_mul(0x85eb_ca6b),
        needs_order: false,
        unnumbered: false,
    }
}
