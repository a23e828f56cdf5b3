//! Flows of UDP payloads, each on the stream of its request, at either end (RFC 9298).
//!
//! Payloads travel in QUIC DATAGRAM frames; those that come in DATAGRAM capsules of the stream count as well.

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

/// Bytes of the largest value of a DATAGRAM capsule that is read: no path of the Internet takes more at once, and each
/// stream may hold as much of one that is not whole yet.
const MOST_CAPSULE: usize = 9216;
/// Payloads that wait for whom they are for. Between two looks of the edge fewer come, unless someone floods it.
const MOST_WAITING: usize = 16_384;
/// Payloads that came before their request and are kept, and the bytes of each.
const MOST_EARLY: usize = 16;
const EARLY_BYTES: usize = 2048;

/// A flow of UDP payloads to one target and back.
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
    /// Names its queue in front of the paths.
    hash: u32,
    meter: FlowMeter,
    capsules: CapsuleReader,
}

/// The flows of one connection.
#[derive(Debug, Default)]
pub(crate) struct UdpFlows {
    flows: BTreeMap<StreamId, Flow>,
}

impl UdpFlows {
    /// The stream is one from now on.
    pub(crate) fn insert(&mut self, now: Instant, stream: StreamId) {
        let flow = Flow {
            prefix: datagram::prefix(stream, datagram::CONTEXT_PAYLOAD),
            // Spread over all queues, as those of one client come one after the other (Knuth's multiplier).
            hash: ((stream / 4) as u32).wrapping_mul(0x9e37_79b1),
            meter: FlowMeter::new(now),
            capsules: CapsuleReader::datagrams(MOST_CAPSULE),
        };
        self.flows.insert(stream, flow);
    }

    /// Whether a stream is one.
    pub(crate) fn has(&self, stream: StreamId) -> bool {
        self.flows.contains_key(&stream)
    }

    /// The stream is one no more; whether it was.
    pub(crate) fn remove(&mut self, stream: StreamId) -> bool {
        self.flows.remove(&stream).is_some()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    /// All of them.
    pub(crate) fn ids(&self) -> Vec<StreamId> {
        self.flows.keys().copied().collect()
    }

    /// Bytes of the largest payload that fits a datagram now.
    pub(crate) fn room(&self, connection: &mut Connection, stream: StreamId) -> usize {
        let Some(flow) = self.flows.get(&stream) else { return 0 };
        connection.max_datagram_size().map_or(0, |max| max.saturating_sub(flow.prefix.as_ref().len()))
    }

    /// Sends a payload. One that is too large is dropped and counted: in a capsule it would arrive as if the path were
    /// larger than it is (RFC 9298 §5).
    pub(crate) fn send(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        multipath: &mut MultipathConnection,
        stream: StreamId,
        payload: &[u8],
    ) {
        if payload.len() > self.room(connection, stream) {
            return multipath.count_oversized();
        }
        let Some(flow) = self.flows.get_mut(&stream) else { return };
        let ordered = flow.meter.wants_order(now, payload);
        multipath.send_payload(now, &flow.prefix, payload, flow.hash, ordered);
    }

    /// Takes bytes of a stream, and hands out the payloads that come in capsules.
    ///
    /// # Errors
    /// The code to abort the stream with, if they are malformed.
    pub(crate) fn take_capsules(
        &mut self,
        stream: StreamId,
        data: &[u8],
        mut out: impl FnMut(Bytes),
    ) -> Result<(), u64> {
        let Some(flow) = self.flows.get_mut(&stream) else { return Ok(()) };
        flow.capsules.push(data);
        while let Some(capsule) = flow.capsules.next().map_err(|error| error.code())? {
            let Capsule::Datagram(value) = capsule else { continue };
            let (context, at) = varint::decode(&value).ok_or(code::DATAGRAM_ERROR)?;
            // Nobody has agreed on other contexts: "drop" is what RFC 9298 §4 allows.
            if context == datagram::CONTEXT_PAYLOAD {
                out(value.slice(at..));
            }
        }
        Ok(())
    }

    /// Whether a stream may end here.
    ///
    /// # Errors
    /// The code to abort the stream with, if it ends inside a capsule (RFC 9297 §3.3).
    pub(crate) fn finish(&self, stream: StreamId) -> Result<(), u64> {
        self.flows.get(&stream).map_or(Ok(()), |flow| flow.capsules.finish().map_err(|error| error.code()))
    }
}

/// Payloads that arrived, until the edge takes them.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    payloads: VecDeque<(UdpId, Bytes)>,
}

impl Inbox {
    /// Keeps a payload, or drops it as a full queue of a router would.
    pub(crate) fn push(&mut self, id: UdpId, payload: Bytes) {
        if self.payloads.len() < MOST_WAITING {
            self.payloads.push_back((id, payload));
        }
    }

    /// The next one.
    pub(crate) fn pop(&mut self) -> Option<(UdpId, Bytes)> {
        self.payloads.pop_front()
    }
}

/// Payloads that came before the request that they belong to, as another path may be quicker (RFC 9298 §5). The oldest
/// make room for new ones.
#[derive(Debug, Default)]
pub(crate) struct Early {
    payloads: VecDeque<(StreamId, Bytes)>,
}

impl Early {
    /// Keeps a payload, as a copy: what came with it may be large.
    pub(crate) fn keep(&mut self, stream: StreamId, payload: &[u8]) {
        if payload.len() > EARLY_BYTES {
            return;
        }
        if self.payloads.len() == MOST_EARLY {
            self.payloads.pop_front();
        }
        self.payloads.push_back((stream, Bytes::copy_from_slice(payload)));
    }

    /// Those of a stream, in order.
    pub(crate) fn take(&mut self, stream: StreamId) -> Vec<Bytes> {
        let (own, others) = std::mem::take(&mut self.payloads).into_iter().partition(|(of, _)| *of == stream);
        self.payloads = others;
        let own: VecDeque<(StreamId, Bytes)> = own;
        own.into_iter().map(|(_, payload)| payload).collect()
    }
}
