//! The built-in rules, which follow the configured rules of every client.
//!
//! They put interactive traffic, whose delay users notice, into the class `critical`, and background traffic
//! into the class `bulk`. They match DSCP marks (RFC 4594, RFC 8622) and registered ports that are rarely
//! used for anything else. Web traffic stays in the default class, because calls and downloads cannot be
//! distinguished there; so does SSH without a mark, because backups use it too.

use std::ops::RangeInclusive;

use mpvpn_types::ClassId;

use super::Rule;

/// The class of interactive traffic.
pub const CRITICAL: ClassId = ClassId(1);
/// The class of background traffic.
pub const BULK: ClassId = ClassId(2);

const TCP: &[u8] = &[6];
const UDP: &[u8] = &[17];
const TCP_UDP: &[u8] = &[6, 17];
/// ICMP and ICMPv6.
const ICMP: &[u8] = &[1, 58];

/// A built-in rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltInRule {
    /// Name of the rule, as shown to users.
    pub name: &'static str,
    protocols: &'static [u8],
    ports: &'static [RangeInclusive<u16>],
    dscp: &'static [u8],
    class: ClassId,
}

impl BuiltInRule {
    const fn by_dscp(name: &'static str, dscp: &'static [u8], class: ClassId) -> Self {
        Self { name, protocols: &[], ports: &[], dscp, class }
    }

    const fn by_ports(
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

/// All built-in rules in order. DSCP marks come first, because the application that sets one knows its
/// traffic.
pub const BUILT_IN_RULES: &[BuiltInRule] = &[
    // LE (RFC 8622) and CS1, which meant the same before (RFC 4594 §4.10).
    BuiltInRule::by_dscp("low-effort", &[1, 8], BULK),
    // EF (RFC 3246), VOICE-ADMIT (RFC 5865), CS4 and AF4x for video calls, CS5 for signalling, CS6 and CS7
    // for network control (RFC 4594 §3).
    BuiltInRule::by_dscp("real-time", &[46, 44, 32, 34, 36, 38, 40, 48, 56], CRITICAL),
    // Users judge a line by its ping time.
    BuiltInRule::by_ports("ping", ICMP, &[], CRITICAL),
    // Every new connection waits for DNS; also over TLS and QUIC (RFC 7858, RFC 9250).
    BuiltInRule::by_ports("dns", TCP_UDP, &[53..=53, 853..=853], CRITICAL),
    // Queueing delay becomes an error of the clock (RFC 5905).
    BuiltInRule::by_ports("ntp", UDP, &[123..=123], CRITICAL),
    // Signalling of calls (RFC 3261 §19.1.2).
    BuiltInRule::by_ports("sip", TCP_UDP, &[5060..=5061], CRITICAL),
    // The media of calls behind address translation (RFC 8489, RFC 8656). Microsoft Teams uses 3478 to 3481
    // for all.
    BuiltInRule::by_ports("stun", TCP_UDP, &[3478..=3481, 5349..=5349], CRITICAL),
    // Media: RTP's own ports (RFC 3551 §8), Zoom, Google Meet, and IAX2 (RFC 5456).
    BuiltInRule::by_ports("calls", UDP, &[5004..=5005, 8801..=8810, 19302..=19309, 4569..=4569], CRITICAL),
    // An interactive session by its mark: AF21 of OpenSSH 7.8 to 10.0, low delay (RFC 1349) before that.
    // Newer ones mark it EF; copies of files get another mark, or none.
    BuiltInRule { name: "ssh", protocols: TCP, ports: &[22..=22], dscp: &[18, 4], class: CRITICAL },
    BuiltInRule::by_ports("bittorrent", TCP_UDP, &[6881..=6999], BULK),
    BuiltInRule::by_ports("rsync", TCP, &[873..=873], BULK),
    // Active mode: the server's end of the connection.
    BuiltInRule::by_ports("ftp-data", TCP, &[20..=20], BULK),
    // NNTP, in clear and over TLS (RFC 3977, RFC 8143).
    BuiltInRule::by_ports("news", TCP, &[119..=119, 563..=563], BULK),
    // Between mail servers, which store and forward (RFC 5321); mail clients use port 587 or 465.
    BuiltInRule::by_ports("mail", TCP, &[25..=25], BULK),
    // As registered at IANA: Bacula, Amanda, NetBackup.
    BuiltInRule::by_ports(
        "backup",
        TCP,
        &[9101..=9103, 10080..=10080, 13720..=13720, 13724..=13724, 13782..=13782],
        BULK,
    ),
];
