//! The rules that every client has after its own.
//!
//! They are about what people notice when it is late, and about what nobody waits for. They go by marks that senders set
//! on purpose (RFC 4594, RFC 8622) and by registered ports of which hardly anything else is known. The web stays in the
//! default class, because nobody can tell a call from a download there; so does SSH that shows no mark, as backups come
//! by it, too.

use std::ops::RangeInclusive;

use mpvpn_types::ClassId;

use super::Rule;

/// The class of what must not be late.
pub const CRITICAL: ClassId = ClassId(1);
/// The class of what nobody waits for.
pub const BULK: ClassId = ClassId(2);

const TCP: &[u8] = &[6];
const UDP: &[u8] = &[17];
const TCP_UDP: &[u8] = &[6, 17];
/// Of both versions of IP.
const ICMP: &[u8] = &[1, 58];

/// A rule that every client has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltInRule {
    /// What it is called.
    pub name: &'static str,
    protocols: &'static [u8],
    ports: &'static [RangeInclusive<u16>],
    dscp: &'static [u8],
    class: ClassId,
}

impl BuiltInRule {
    const fn marks(name: &'static str, dscp: &'static [u8], class: ClassId) -> Self {
        Self { name, protocols: &[], ports: &[], dscp, class }
    }

    const fn ports(
        name: &'static str,
        protocols: &'static [u8],
        ports: &'static [RangeInclusive<u16>],
        class: ClassId,
    ) -> Self {
        Self { name, protocols, ports, dscp: &[], class }
    }

    /// The rule itself.
    pub fn rule(&self) -> Rule {
        Rule {
            protocols: self.protocols.to_vec(),
            ports: self.ports.to_vec(),
            dscp: self.dscp.to_vec(),
            class: self.class,
            ..Rule::default()
        }
    }
}

/// All of them in order. Marks come first: who marks packets knows what they are.
pub const BUILT_IN_RULES: &[BuiltInRule] = &[
    // LE (RFC 8622) and CS1, which meant the same before (RFC 4594 §4.10).
    BuiltInRule::marks("low-effort", &[1, 8], BULK),
    // EF (RFC 3246), VOICE-ADMIT (RFC 5865), CS4 and AF4x for video calls, CS5 for signalling, CS6 and CS7 for what
    // keeps the network going (RFC 4594 §3).
    BuiltInRule::marks("real-time", &[46, 44, 32, 34, 36, 38, 40, 48, 56], CRITICAL),
    // What people judge a line by.
    BuiltInRule::ports("ping", ICMP, &[], CRITICAL),
    // Everything else waits for it; over TLS and QUIC, too (RFC 7858, RFC 9250).
    BuiltInRule::ports("dns", TCP_UDP, &[53..=53, 853..=853], CRITICAL),
    // A delay becomes an error of the clock (RFC 5905).
    BuiltInRule::ports("ntp", UDP, &[123..=123], CRITICAL),
    // Calls are set up by it (RFC 3261 §19.1.2).
    BuiltInRule::ports("sip", TCP_UDP, &[5060..=5061], CRITICAL),
    // The media of calls behind address translation (RFC 8489, RFC 8656). Microsoft Teams uses 3478 to 3481 for all.
    BuiltInRule::ports("stun", TCP_UDP, &[3478..=3481, 5349..=5349], CRITICAL),
    // Media: RTP's own ports (RFC 3551 §8), Zoom, Google Meet, and IAX2 (RFC 5456).
    BuiltInRule::ports("calls", UDP, &[5004..=5005, 8801..=8810, 19302..=19309, 4569..=4569], CRITICAL),
    // An interactive session by its mark: AF21 of OpenSSH 7.8 to 10.0, low delay (RFC 1349) before that. Newer ones
    // mark it EF; copies of files get another mark, or none.
    BuiltInRule { name: "ssh", protocols: TCP, ports: &[22..=22], dscp: &[18, 4], class: CRITICAL },
    BuiltInRule::ports("bittorrent", TCP_UDP, &[6881..=6999], BULK),
    BuiltInRule::ports("rsync", TCP, &[873..=873], BULK),
    // Active mode: the server's end of the connection.
    BuiltInRule::ports("ftp-data", TCP, &[20..=20], BULK),
    // NNTP, in clear and over TLS (RFC 3977, RFC 8143).
    BuiltInRule::ports("news", TCP, &[119..=119, 563..=563], BULK),
    // Between mail servers, which store and forward (RFC 5321); what people send goes by port 587 or 465.
    BuiltInRule::ports("mail", TCP, &[25..=25], BULK),
    // As registered at IANA: Bacula, Amanda, NetBackup.
    BuiltInRule::ports(
        "backup",
        TCP,
        &[9101..=9103, 10080..=10080, 13720..=13720, 13724..=13724, 13782..=13782],
        BULK,
    ),
];
