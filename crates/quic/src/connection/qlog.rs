//! The qlog events of a connection: its paths and its end. Gates record packets and congestion control.

use mpvpn_types::{Instant, PathId};

use super::{Connection, GateDefaults, LostReason};
use crate::{LocalAddress, QlogEvent, gate::GateState, qlog::ConnectionQlog};

/// The label of the TLS exporter (RFC 8446 §7.5) that gives both ends the same identifier of the connection.
const EXPORTER_LABEL: &[u8] = b"EXPORTER-mpvpn-qlog";

impl GateDefaults {
    /// Lets a gate record events, if they are recorded.
    pub(super) fn apply_qlog(&self, gate: &GateState) {
        if let Some(qlog) = &self.qlog {
            gate.set_qlog(qlog.clone());
        }
    }

    /// Records the addresses of a path.
    pub(super) fn record_path(&self, now: Instant, path: PathId, inner: &noq_proto::Connection) {
        let Some(qlog) = &self.qlog else { return };
        let Ok(tuple) = inner.network_path(noq_proto::PathId::from(path.0)) else { return };
        let local = tuple.local_ip().filter(|ip| LocalAddress::from(*ip).as_link().is_none());
        qlog.record(now, QlogEvent::PathAssigned { path, local, remote: tuple.remote() });
    }
}

impl Connection {
    /// Starts recording, if it is configured, when the handshake is complete: spoofed addresses cause no
    /// records.
    pub(super) fn start_qlog(&mut self, now: Instant) {
        let Some(sink) = self.qlog.take() else { return };
        let mut id = [0; 8];
        let exported = self.guarded(|inner| {
            inner.crypto_session().export_keying_material(&mut id, EXPORTER_LABEL, b"").is_ok()
        });
        if exported != Some(true) {
            return;
        }
        self.gates.qlog = Some(ConnectionQlog { sink, connection: u64::from_be_bytes(id) });
        for path in self.paths.iter() {
            self.gates.apply_qlog(&path.gate);
            self.gates.record_path(now, path.id, &self.inner);
        }
    }

    /// Records that this end closes the connection.
    pub(super) fn record_close(&self, now: Instant, reason: &str) {
        if let Some(qlog) = self.gates.qlog.as_ref().filter(|_| !self.is_closed()) {
            qlog.record(now, QlogEvent::Closed { local: true, reason: reason.to_owned() });
        }
    }

    /// Records that the connection was lost.
    pub(super) fn record_lost(&self, now: Instant, reason: &LostReason) {
        if let Some(qlog) = self.gates.qlog.as_ref().filter(|_| *reason != LostReason::LocallyClosed) {
            qlog.record(now, QlogEvent::Closed { local: false, reason: reason.to_string() });
        }
    }
}
