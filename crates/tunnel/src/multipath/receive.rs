//! Receives datagrams of the peer: packets of the tunnel, UDP payloads, and the reports of extensions.
//!
//! In: payloads of QUIC DATAGRAM frames. Out: IP packets in order, UDP payloads; reports go to the parts that
//! they concern. Always holds: a malformed datagram of an extension is ignored.

use bytes::Bytes;
use mpvpn_flow::Label;
use mpvpn_masque::datagram::{self, DatagramError};
use mpvpn_quic::Connection;
use mpvpn_types::{Instant, LinkId, target::LIVENESS};

use super::{
    MultipathConnection,
    log_context::{enter_connection, enter_path},
};

/// The content of a received QUIC DATAGRAM frame.
#[derive(Debug)]
pub(crate) enum DecodedDatagram {
    /// An IP packet of the tunnel.
    Packet(ReceivedPacket),
    /// The payload of context 0 of another request stream, given by its ID.
    Payload(u64, Bytes),
    /// A report that was processed, a part of an incomplete packet, or an unknown context.
    Ignored,
}

/// An IP packet received through the tunnel.
#[derive(Debug)]
pub(crate) struct ReceivedPacket {
    label: Option<Label>,
    /// FEC recovered it: it did not arrive itself.
    is_recovered: bool,
    pub(crate) packet: Bytes,
}

/// Decodes the payload of a QUIC DATAGRAM frame on a connection without a tunnel.
///
/// # Errors
/// If it is malformed, which is a connection error (RFC 9297 §2.1).
pub(crate) fn decode_payload(datagram: &Bytes) -> Result<DecodedDatagram, DatagramError> {
    let parsed = datagram::parse(datagram)?;
    if parsed.context_id != datagram::CONTEXT_PAYLOAD {
        return Ok(DecodedDatagram::Ignored);
    }
    Ok(DecodedDatagram::Payload(parsed.stream_id, datagram.slice(parsed.payload_at..)))
}

impl MultipathConnection {
    /// Updates the liveness of the paths on which packets have arrived.
    pub(crate) fn note_path_arrivals(&mut self, now: Instant, connection: &mut Connection) {
        let (paths, log, may_be_due) = (&mut self.paths, &self.log, &mut self.may_be_due);
        connection.drain_paths_with_arrivals(now, |id| {
            let Some(path) = paths.get_mut(id) else { return };
            // Only on dead paths does an arrival lead to a logged decision.
            let _spans = (!path.liveness.is_alive()).then(|| {
                let connection = enter_connection!(log, DEBUG, [LIVENESS]);
                (connection, enter_path!(LIVENESS, log, id, path))
            });
            *may_be_due |= path.liveness.on_received(now);
        });
        let _spans = enter_connection!(&self.log, TRACE, [LIVENESS]);
        let moved = self.traffic.last_data_at;
        let fits = || connection.max_datagram_size().is_some();
        if let Some((id, report)) = self.heartbeats.steer_acks(now, &self.paths, moved, fits) {
            connection.queue_datagram(id, report);
        }
    }

    /// Decodes the payload of a received QUIC DATAGRAM frame, and processes it if it is a report. It has
    /// arrived at `at`.
    ///
    /// # Errors
    /// If it is malformed, which is a connection error (RFC 9297 §2.1).
    pub(crate) fn decode_datagram(
        &mut self,
        now: Instant,
        at: Instant,
        datagram: Bytes,
    ) -> Result<DecodedDatagram, DatagramError> {
        let prefix = self.packetizer.prefix.as_ref();
        if self.stream.is_some() && datagram.starts_with(prefix) {
            return Ok(DecodedDatagram::Packet(ReceivedPacket {
                label: None,
                is_recovered: false,
                packet: datagram.slice(prefix.len()..),
            }));
        }
        if let Some(sequencer) = &mut self.recovery.sequencer
            && sequencer.has_prefix(&datagram)
        {
            let opened = sequencer.open(now, datagram);
            return Ok(opened.map_or(DecodedDatagram::Ignored, |(label, packet)| {
                DecodedDatagram::Packet(ReceivedPacket { label: Some(label), is_recovered: false, packet })
            }));
        }
        self.may_be_due = true;
        if self.recovery.on_datagram(&datagram) {
            return Ok(DecodedDatagram::Ignored);
        }
        if self.heartbeats.is_report(&datagram) {
            let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
            if self.heartbeats.take_report(now, &datagram, &mut self.paths) {
                self.timer.judge_soon();
            }
            return Ok(DecodedDatagram::Ignored);
        }
        if let Some(clocks) = self.clocks.as_ref().filter(|clocks| clocks.is_report(&datagram)) {
            clocks.take_report(at, &datagram, &mut self.paths);
            return Ok(DecodedDatagram::Ignored);
        }
        Ok(match decode_payload(&datagram)? {
            // The prefix may be encoded in longer varints than ours (RFC 9000 §16).
            DecodedDatagram::Payload(stream, packet) if Some(stream) == self.stream => {
                DecodedDatagram::Packet(ReceivedPacket { label: None, is_recovered: false, packet })
            }
            opened => opened,
        })
    }

    /// Returns the next packet that FEC recovered; it is to be processed like a received packet.
    pub(crate) fn next_recovered(&mut self) -> Option<ReceivedPacket> {
        let (label, packet) = self.recovery.sequencer.as_mut()?.next_recovered()?;
        Some(ReceivedPacket { label: Some(label), is_recovered: true, packet })
    }

    /// Records the link on which a watched echo reply has arrived.
    #[inline]
    pub(crate) fn note_echo_reply(&self, now: Instant, received: &ReceivedPacket, link: Option<LinkId>) {
        if let Some(watch) = self.echo_watch.as_ref().filter(|watch| watch.is_active(now)) {
            watch.on_received(now, &received.packet, link.filter(|_| !received.is_recovered));
        }
    }

    /// Passes a received packet to `out` in its order, followed by packets that waited for it.
    pub(crate) fn resequence(&mut self, now: Instant, received: ReceivedPacket, mut out: impl FnMut(Bytes)) {
        match (&mut self.recovery.sequencer, received.label) {
            (Some(sequencer), Some(label)) => {
                sequencer.resequencer.reorder.push(now, label, received.packet, out)
            }
            _ => out(received.packet),
        }
    }

    /// Passes packets to `out` whose reorder timeout has expired.
    pub(crate) fn release_timed_out(&mut self, now: Instant, out: impl FnMut(Bytes)) {
        if let Some(sequencer) = &mut self.recovery.sequencer {
            sequencer.resequencer.reorder.handle_timeout(now, out);
        }
    }

    /// Passes reinjected bytes and DataAck reports of the peer to the QUIC connection.
    pub(crate) fn deliver_reinjected(&mut self, now: Instant, connection: &mut Connection) {
        self.recovery.deliver(now, connection);
    }

    /// Counts data received through the tunnel, and keeps heartbeats dense.
    pub(crate) fn on_data_received(&mut self, now: Instant, bytes: u64) {
        self.traffic.counters.rx_bytes += bytes;
        self.note_traffic(now);
    }
}
