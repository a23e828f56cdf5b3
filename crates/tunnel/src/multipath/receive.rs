//! What comes from the far end in datagrams: packets, and what both ends tell each other.

use bytes::Bytes;
use mpvpn_flow::Label;
use mpvpn_masque::datagram::{self, DatagramError};
use mpvpn_quic::Connection;
use mpvpn_types::{Instant, target::LIVENESS};

use super::{
    MultipathConnection,
    log_context::{enter_connection, enter_path},
};

/// What a received QUIC DATAGRAM frame holds.
#[derive(Debug)]
pub(crate) enum DecodedDatagram {
    /// An IP packet of the tunnel.
    Packet(ReceivedPacket),
    /// What is in context 0 of another request stream.
    Payload(u64, Bytes),
    /// Nothing that anybody waits for.
    Ignored,
}

/// An IP packet that came through the tunnel.
#[derive(Debug)]
pub(crate) struct ReceivedPacket {
    label: Option<Label>,
    pub(crate) packet: Bytes,
}

/// Takes the payload of a QUIC DATAGRAM frame apart where there is no tunnel.
///
/// # Errors
/// If it is malformed, which the peer must be told (RFC 9297 §2.1).
pub(crate) fn decode_payload(datagram: &Bytes) -> Result<DecodedDatagram, DatagramError> {
    let parsed = datagram::parse(datagram)?;
    if parsed.context_id != datagram::CONTEXT_PAYLOAD {
        return Ok(DecodedDatagram::Ignored);
    }
    Ok(DecodedDatagram::Payload(parsed.stream_id, datagram.slice(parsed.payload_at..)))
}

impl MultipathConnection {
    /// Notes on which paths something arrived.
    pub(crate) fn note_path_arrivals(&mut self, now: Instant, connection: &mut Connection) {
        let (paths, log) = (&mut self.paths, &self.log);
        connection.drain_paths_with_arrivals(now, |id| {
            let Some(path) = paths.get_mut(id) else { return };
            // On others it decides nothing.
            let _spans = (!path.liveness.is_alive()).then(|| {
                let connection = enter_connection!(log, DEBUG, [LIVENESS]);
                (connection, enter_path!(LIVENESS, log, id, path))
            });
            path.liveness.on_received(now);
        });
        let _spans = enter_connection!(&self.log, TRACE, [LIVENESS]);
        let moved = self.traffic.last_data_at();
        let fits = || connection.max_datagram_size().is_some();
        if let Some((id, report)) = self.heartbeats.steer_acks(now, &self.paths, moved, fits) {
            connection.queue_datagram(id, report);
        }
    }

    /// Takes the payload of a received QUIC DATAGRAM frame apart.
    ///
    /// # Errors
    /// If it is malformed, which the peer must be told (RFC 9297 §2.1).
    pub(crate) fn decode_datagram(
        &mut self,
        now: Instant,
        datagram: Bytes,
    ) -> Result<DecodedDatagram, DatagramError> {
        let prefix = self.packetizer.prefix().as_ref();
        if self.stream.is_some() && datagram.starts_with(prefix) {
            return Ok(DecodedDatagram::Packet(ReceivedPacket {
                label: None,
                packet: datagram.slice(prefix.len()..),
            }));
        }
        if let Some(sequencer) = &mut self.recovery.sequencer
            && sequencer.is_own(&datagram)
        {
            let opened = sequencer.open(now, datagram);
            return Ok(opened.map_or(DecodedDatagram::Ignored, |(label, packet)| {
                DecodedDatagram::Packet(ReceivedPacket { label: Some(label), packet })
            }));
        }
        if self.recovery.take(&datagram) {
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
            clocks.take_report(now, &datagram, &mut self.paths);
            return Ok(DecodedDatagram::Ignored);
        }
        Ok(match decode_payload(&datagram)? {
            // The same numbers may be written in longer varints (RFC 9000 §16).
            DecodedDatagram::Payload(stream, packet) if Some(stream) == self.stream => {
                DecodedDatagram::Packet(ReceivedPacket { label: None, packet })
            }
            opened => opened,
        })
    }

    /// The next packet that did not arrive and was restored. It is to be treated as one that did.
    pub(crate) fn next_recovered(&mut self) -> Option<ReceivedPacket> {
        let (label, packet) = self.recovery.sequencer.as_mut()?.next_recovered()?;
        Some(ReceivedPacket { label: Some(label), packet })
    }

    /// Hands out a packet that arrived, and those that waited for it.
    pub(crate) fn resequence(&mut self, now: Instant, arrived: ReceivedPacket, mut out: impl FnMut(Bytes)) {
        match (&mut self.recovery.sequencer, arrived.label) {
            (Some(sequencer), Some(label)) => sequencer.resequencer().push(now, label, arrived.packet, out),
            _ => out(arrived.packet),
        }
    }

    /// Hands out packets that have waited long enough for others.
    pub(crate) fn release_timed_out(&mut self, now: Instant, out: impl FnMut(Bytes)) {
        if let Some(sequencer) = &mut self.recovery.sequencer {
            sequencer.resequencer().handle_timeout(now, out);
        }
    }

    /// Gives streams the bytes of theirs that the far end has reinjected, and what it reported about others.
    pub(crate) fn deliver_reinjected(&mut self, now: Instant, connection: &mut Connection) {
        self.recovery.deliver(now, connection);
    }

    /// Data arrived through the tunnel.
    pub(crate) fn on_data_received(&mut self, now: Instant, bytes: u64) {
        self.traffic.count_received(bytes);
        self.note_traffic(now);
    }
}
