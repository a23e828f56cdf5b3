//! The wire format of heartbeat reports (docs/protocol.md, "Heartbeat reports").
//!
//! In and out: reports, and the bytes of a datagram after its prefix. Always holds: a report has at most
//! [`MAX_PATHS`] entries, whatever the peer sends.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{datagram::DatagramPrefix, varint};
use mpvpn_types::PathId;

/// Flag of a report: data has moved at the sender.
const FLAG_ACTIVE: u8 = 1;
/// Flag of a report: the sender asks for a report and for heartbeats.
const FLAG_ASK: u8 = 2;
/// Flag of a report: a path of the sender is full or loses packets.
const FLAG_CROWDED: u8 = 4;
/// Flag of a path's entry: packets arrive at the sender of the report.
const PATH_HEARD: u64 = 1;
/// Flag of a path's entry: the sender wants no data on the path while other paths work.
const PATH_LATER: u64 = 2;
/// Maximum number of paths in a report; a connection has at most 32. Larger: more memory for hostile peers.
pub(super) const MAX_PATHS: usize = 64;

/// Whether packets of the receiver of a report arrive at its sender on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reception {
    /// Packets arrive.
    Heard,
    /// No packets arrive.
    Silent,
}

/// The entry of one path in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportedPath {
    pub(crate) id: PathId,
    pub(crate) reception: Reception,
    /// The sender of the report wants no data on the path while other paths work.
    pub(crate) later: bool,
}

/// A heartbeat report: on which paths its sender receives, and whether data moves there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HeartbeatReport {
    /// Data has moved at the sender within the last 1.5 s.
    pub(crate) active: bool,
    /// The sender asks for a report, and for a heartbeat on each path on which it receives nothing.
    pub(crate) ask: bool,
    /// A path of the sender was full lately, or lost packets, so that one class delays others.
    pub(crate) crowded: bool,
    /// Grows with every report, modulo 2^32.
    pub(crate) number: u32,
    pub(crate) paths: Vec<ReportedPath>,
}

impl HeartbeatReport {
    /// Encodes the report after its prefix; entries beyond [`MAX_PATHS`] are left out.
    pub(super) fn encode(&self, prefix: &DatagramPrefix) -> Bytes {
        let mut out = BytesMut::from(prefix.as_ref());
        let flags = [(self.active, FLAG_ACTIVE), (self.ask, FLAG_ASK), (self.crowded, FLAG_CROWDED)];
        let flags = flags.iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag);
        out.extend_from_slice(&[flags]);
        out.extend_from_slice(&self.number.to_be_bytes());
        for ReportedPath { id, reception, later } in self.paths.iter().take(MAX_PATHS) {
            let heard = if *reception == Reception::Heard { PATH_HEARD } else { 0 };
            let later = if *later { PATH_LATER } else { 0 };
            varint::encode(u64::from(id.0) << 2 | later | heard, &mut out);
        }
        out.freeze()
    }

    /// Decodes a report; `None` if it is truncated. Entries beyond [`MAX_PATHS`] are left out.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let (flags, number) = (bytes.try_get_u8().ok()?, bytes.try_get_u32().ok()?);
        let mut paths = Vec::new();
        while !bytes.is_empty() && paths.len() < MAX_PATHS {
            let entry = varint::take(&mut bytes)?;
            let id = PathId(u32::try_from(entry >> 2).ok()?);
            let reception = if entry & PATH_HEARD != 0 { Reception::Heard } else { Reception::Silent };
            paths.push(ReportedPath { id, reception, later: entry & PATH_LATER != 0 });
        }
        let has = |flag| flags & flag != 0;
        let (active, ask, crowded) = (has(FLAG_ACTIVE), has(FLAG_ASK), has(FLAG_CROWDED));
        Some(Self { active, ask, crowded, number, paths })
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_masque::datagram;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        multipath::tests::{Received, check_datagrams, prefix},
        vectors::number,
    };

    #[test]
    fn reports_are_read_as_they_were_written() {
        let entry = |id, reception, later| ReportedPath { id: PathId(id), reception, later };
        let paths = vec![
            entry(0, Reception::Heard, false),
            entry(5, Reception::Silent, true),
            entry(u32::MAX, Reception::Heard, true),
        ];
        let report = HeartbeatReport { active: true, ask: false, crowded: true, number: 0xfedc_ba98, paths };
        let prefix = datagram::prefix(4, 4);
        let bytes = report.encode(&prefix);
        let start = prefix.as_ref().len();
        assert_eq!(bytes[..start], *prefix.as_ref());
        assert_eq!(HeartbeatReport::decode(&bytes[start..]), Some(report));
        for len in 0..5 {
            assert_eq!(HeartbeatReport::decode(&bytes[start..start + len]), None, "{len} bytes");
        }
        let cut = &bytes[start..bytes.len() - 1];
        assert_eq!(HeartbeatReport::decode(cut), None, "cut inside a path");
    }

    #[test]
    fn reports_are_those_of_the_vectors() {
        let path_of = |path: &ReportedPath| {
            let heard = path.reception == Reception::Heard;
            json!({ "path_id": path.id.0, "heard": heard, "later": path.later })
        };
        let parse = |received: Received<'_>| {
            let HeartbeatReport { active, ask, crowded, number, paths } =
                HeartbeatReport::decode(received.payload)?;
            let paths: Vec<_> = paths.iter().map(path_of).collect();
            Some(json!({
                "active": active, "ask": ask, "crowded": crowded, "number": number, "paths": paths
            }))
        };
        let flag = |value: &Value, name| value[name].as_bool().unwrap();
        let path = |value: &Value| ReportedPath {
            id: PathId(number(&value["path_id"]) as u32),
            reception: if flag(value, "heard") { Reception::Heard } else { Reception::Silent },
            later: flag(value, "later"),
        };
        let encode = |_, _, fields: &Value| {
            let report = HeartbeatReport {
                active: flag(fields, "active"),
                ask: flag(fields, "ask"),
                crowded: flag(fields, "crowded"),
                number: number(&fields["number"]) as u32,
                paths: fields["paths"].as_array().unwrap().iter().map(path).collect(),
            };
            report.encode(&prefix(fields)).to_vec()
        };
        check_datagrams(include_str!("../../../../../docs/vectors/heartbeats.json"), parse, encode);
    }

    #[test]
    fn a_report_of_endless_paths_is_bounded() {
        let bytes = [vec![0; 5], vec![1; 500]].concat();
        let paths = HeartbeatReport::decode(&bytes).map(|report| report.paths.len());
        assert_eq!(paths, Some(MAX_PATHS));
    }
}
