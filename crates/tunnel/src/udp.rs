//! UDP flows, each on the stream of its CONNECT-UDP request, at either end of the connection (RFC 9298).
//!
//! In: UDP payloads to send, bytes of request streams. Out: datagrams, and payloads received in DATAGRAM
//! capsules. Payloads are sent in QUIC DATAGRAM frames only. Always holds: the number of received payloads
//! that wait is bounded.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader},
    datagram::{self, DatagramPrefix},
    h3::code,
    varint,
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use crate::multipath::{FlowMeter, MultipathConnection};

/// Maximum size of a DATAGRAM capsule that is read (bytes): a jumbo frame. Larger: memory, as each stream may
/// hold an incomplete capsule. Smaller: large payloads in capsules are errors.
const MAX_CAPSULE_BYTES: usize = 9216;
/// Maximum bytes of incomplete capsules of all flows of a connection; most clients send payloads in QUIC
/// DATAGRAM frames only. Smaller: clients with large payloads in capsules on many flows lose flows. Larger:
/// memory for hostile clients.
const MAX_INCOMPLETE_BYTES: usize = 1 << 20;
/// Maximum number of payloads that wait for the edge, which takes them once in each event-loop iteration.
/// Smaller: bursts are dropped. Larger: memory in a flood. Value: chosen.
const MAX_WAITING_PAYLOADS: usize = 16_384;
/// Maximum number of payloads kept that arrive before their request, and the maximum size of each (bytes).
/// Smaller: the first packets of a flow are lost. Larger: memory for hostile clients. Values: chosen.
const MAX_EARLY_PAYLOADS: usize = 16;
const MAX_EARLY_PAYLOAD_BYTES: usize = 2048;

/// Identifies a UDP flow between a client and one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpId {
    pub(crate) connection: ConnectionHandle,
    pub(crate) stream: StreamId,
}

impl UdpId {
    pub(crate) fn new(connection: ConnectionHandle, stream: StreamId) -> Self {
        Self { connection, stream }
    }
}

#[derive(Debug)]
struct Flow {
    prefix: DatagramPrefix,
    /// Hash that selects the queue of the flow in front of the paths.
    hash: u32,
    meter: FlowMeter,
    capsules: CapsuleReader,
}

impl Flow {
    fn take_capsules(&mut self, out: &mut impl FnMut(Bytes)) -> Result<(), u64> {
        while let Some(capsule) = self.capsules.next().map_err(|error| error.code())? {
            let Capsule::Datagram(value) = capsule else { continue };
            let (context, at) = varint::decode(&value).ok_or(code::DATAGRAM_ERROR)?;
            // Payloads of contexts that were not registered are dropped (RFC 9298 §4).
            if context == datagram::CONTEXT_PAYLOAD {
                out(value.slice(at..));
            }
        }
        Ok(())
    }
}

/// The UDP flows of one connection.
#[derive(Debug, Default)]
pub(crate) struct UdpFlows {
    flows: BTreeMap<StreamId, Flow>,
    /// Bytes of incomplete capsules.
    incomplete: usize,
}

impl UdpFlows {
    /// Makes a stream a UDP flow.
    pub(crate) fn insert(&mut self, now: Instant, stream: StreamId) {
        let flow = Flow {
            prefix: datagram::prefix(stream, datagram::CONTEXT_PAYLOAD),
            // Multiplicative hashing (Knuth): stream IDs are consecutive, and must not share queues.
            hash: ((stream / 4) as u32).wrapping_mul(0x9e37_79b1),
            meter: FlowMeter::new(now),
            capsules: CapsuleReader::datagrams(MAX_CAPSULE_BYTES),
        };
        self.flows.insert(stream, flow);
    }

    /// Whether a stream is a UDP flow.
    pub(crate) fn has(&self, stream: StreamId) -> bool {
        self.flows.contains_key(&stream)
    }

    /// Removes a flow; returns whether it existed.
    pub(crate) fn remove(&mut self, stream: StreamId) -> bool {
        let removed = self.flows.remove(&stream);
        self.incomplete -= removed.as_ref().map_or(0, |flow| flow.capsules.buffered());
        removed.is_some()
    }

    /// Returns the bytes of incomplete capsules.
    pub(crate) fn held_bytes(&self) -> usize {
        self.incomplete
    }

    /// Returns the number of flows.
    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    /// Returns the streams of all flows.
    pub(crate) fn ids(&self) -> Vec<StreamId> {
        self.flows.keys().copied().collect()
    }

    /// Returns the size of the largest payload that fits a datagram now (bytes).
    pub(crate) fn max_payload_bytes(&self, connection: &mut Connection, stream: StreamId) -> usize {
        let Some(flow) = self.flows.get(&stream) else { return 0 };
        connection.max_datagram_size().map_or(0, |max| max.saturating_sub(flow.prefix.as_ref().len()))
    }

    /// Sends a payload. A payload that is too large is dropped and counted: sent in a capsule, it would make
    /// the path MTU look larger than it is (RFC 9298 §5).
    pub(crate) fn send(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        multipath: &mut MultipathConnection,
        stream: StreamId,
        payload: &[u8],
    ) {
        if payload.len() > self.max_payload_bytes(connection, stream) {
            multipath.traffic.oversized += 1;
            return;
        }
        let Some(flow) = self.flows.get_mut(&stream) else { return };
        let ordered = flow.meter.wants_order(now, payload);
        multipath.send_payload(now, &flow.prefix, payload, flow.hash, ordered);
    }

    /// Takes bytes of a stream, and passes the payloads of DATAGRAM capsules to `out`.
    ///
    /// # Errors
    /// The HTTP/3 error code to abort the stream with, if a capsule is malformed, or too many are incomplete.
    pub(crate) fn take_capsules(
        &mut self,
        stream: StreamId,
        data: &[u8],
        mut out: impl FnMut(Bytes),
    ) -> Result<(), u64> {
        let Some(flow) = self.flows.get_mut(&stream) else { return Ok(()) };
        let others = self.incomplete - flow.capsules.buffered();
        flow.capsules.push(data);
        let taken = flow.take_capsules(&mut out);
        self.incomplete = others + flow.capsules.buffered();
        if self.incomplete > MAX_INCOMPLETE_BYTES { taken.and(Err(code::EXCESSIVE_LOAD)) } else { taken }
    }

    /// Checks whether a stream may end now.
    ///
    /// # Errors
    /// The HTTP/3 error code to abort the stream with, if it ends within a capsule (RFC 9297 §3.3).
    pub(crate) fn finish(&self, stream: StreamId) -> Result<(), u64> {
        self.flows.get(&stream).map_or(Ok(()), |flow| flow.capsules.finish().map_err(|error| error.code()))
    }
}

/// Received payloads that wait for the edge.
#[derive(Debug, Default)]
pub(crate) struct PayloadInbox {
    payloads: VecDeque<(UdpId, Bytes)>,
}

impl PayloadInbox {
    /// Queues a payload, or drops it if the queue is full (tail drop).
    pub(crate) fn push(&mut self, id: UdpId, payload: Bytes) {
        if self.payloads.len() < MAX_WAITING_PAYLOADS {
            self.payloads.push_back((id, payload));
        }
    }

    /// Returns the next payload.
    pub(crate) fn pop(&mut self) -> Option<(UdpId, Bytes)> {
        self.payloads.pop_front()
    }
}

/// Payloads that arrived before their request, which happens if they use a quicker path (RFC 9298 §5). A new
/// payload replaces the oldest one if there are [`MAX_EARLY_PAYLOADS`].
#[derive(Debug, Default)]
pub(crate) struct EarlyPayloads {
    payloads: VecDeque<(StreamId, Bytes)>,
}

impl EarlyPayloads {
    /// Keeps a copy of a payload; the receive buffer that it refers to may be large.
    pub(crate) fn push(&mut self, stream: StreamId, payload: &[u8]) {
        if payload.len() > MAX_EARLY_PAYLOAD_BYTES {
            return;
        }
        if self.payloads.len() == MAX_EARLY_PAYLOADS {
            self.payloads.pop_front();
        }
        self.payloads.push_back((stream, Bytes::copy_from_slice(payload)));
    }

    /// Takes the payloads of a stream, in order of arrival.
    pub(crate) fn take(&mut self, stream: StreamId) -> Vec<Bytes> {
        let (own, others) = std::mem::take(&mut self.payloads).into_iter().partition(|(of, _)| *of == stream);
        self.payloads = others;
        let own: VecDeque<(StreamId, Bytes)> = own;
        own.into_iter().map(|(_, payload)| payload).collect()
    }
}
