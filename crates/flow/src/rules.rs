//! Which TCP connections travel as streams (the split-TCP proxy), and which as IP packets.
//!
//! In: the destination of a connection, the configured rules and flow mode, and whether the server translates
//! addresses. Out: the flow mode of the connection, and why. Always holds: the first matching rule decides.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use ipnet::IpNet;
use mpvpn_packet::public::is_public;
pub use mpvpn_types::FlowMode;

/// A rule for connections to some destinations (`[[lane-rule]]` of a configuration file).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Destination networks; any if empty.
    pub to: Vec<IpNet>,
    /// Destination ports; any if empty.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Whether matching connections travel as streams.
    pub streams: bool,
}

impl Rule {
    fn matches(&self, to: SocketAddr) -> bool {
        (self.to.is_empty() || self.to.iter().any(|net| net.contains(&to.ip())))
            && (self.ports.is_empty() || self.ports.iter().any(|ports| ports.contains(&to.port())))
    }
}

/// Why a flow has its flow mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowModeReason {
    /// The rule with this number, counted from 1, matches.
    Rule(usize),
    /// No rule matches, and the configured flow mode is streams or packets for all.
    DefaultMode,
    /// [`FlowMode::Auto`]: a stream, as the server translates the addresses of packets to this
    /// destination anyway.
    Translated,
    /// [`FlowMode::Auto`]: packets, as the server does not translate addresses to this destination.
    Untranslated,
    /// [`FlowMode::Auto`]: packets, as the destination address is private.
    PrivateAddress,
    /// Packets, as the server refused to connect to this destination.
    ServerRefused,
    /// Packets, as streams carry only TCP.
    NotTcp,
    /// A stream, or UDP payloads, as the server carries no packets.
    ServerWithoutPackets,
    /// Packets, as the flow began so: before there was a tunnel, or with TCP options that streams cannot
    /// carry.
    BeganAsPackets,
}

/// The configured flow mode and its exceptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// The flow mode of connections that no rule matches.
    pub mode: FlowMode,
    /// The rules; the first matching one decides.
    pub rules: Vec<Rule>,
}

impl Rules {
    /// Whether a connection to `to` travels as a stream; `translated` says whether the server would translate
    /// the addresses of packets to an address.
    pub fn takes_stream(&self, to: SocketAddr, translated: impl FnOnce(IpAddr) -> bool) -> bool {
        self.decide(to, translated).0
    }

    /// As [`Self::takes_stream`], with the reason.
    pub fn decide(&self, to: SocketAddr, translated: impl FnOnce(IpAddr) -> bool) -> (bool, FlowModeReason) {
        match (self.rules.iter().position(|rule| rule.matches(to)), self.mode) {
            (Some(at), _) => (self.rules[at].streams, FlowModeReason::Rule(at + 1)),
            (None, FlowMode::Auto) if !is_public(to.ip()) => (false, FlowModeReason::PrivateAddress),
            (None, FlowMode::Auto) if translated(to.ip()) => (true, FlowModeReason::Translated),
            (None, FlowMode::Auto) => (false, FlowModeReason::Untranslated),
            (None, mode) => (mode == FlowMode::Stream, FlowModeReason::DefaultMode),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(mode: FlowMode, rules: &[Rule]) -> Rules {
        Rules { mode, rules: rules.to_vec() }
    }

    fn takes(rules: &Rules, to: &str) -> bool {
        rules.takes_stream(to.parse().unwrap(), |ip| ip != IpAddr::from([203, 0, 113, 9]))
    }

    #[test]
    fn auto_takes_streams_to_public_addresses_that_the_server_translates() {
        let auto = rules(FlowMode::Auto, &[]);
        for to in ["198.51.100.9:80", "8.8.8.8:443", "[2001:db8::1]:443", "[::ffff:8.8.8.8]:1"] {
            assert!(takes(&auto, to), "{to}");
        }
        for to in [
            "203.0.113.9:80",
            "10.0.0.1:80",
            "192.168.1.1:80",
            "100.64.0.1:80",
            "127.0.0.1:80",
            "0.0.0.0:80",
            "[fd00::1]:80",
            "[::ffff:10.0.0.1]:80",
            "[fe80::1]:80",
        ] {
            assert!(!takes(&auto, to), "{to}");
        }
        assert!(takes(&rules(FlowMode::Stream, &[]), "10.0.0.1:80"));
        assert!(!takes(&rules(FlowMode::Datagram, &[]), "8.8.8.8:443"));
    }

    #[test]
    fn what_decides_is_known() {
        let no_ssh = Rule { ports: vec![22..=22], streams: false, ..Rule::default() };
        let auto = rules(FlowMode::Auto, &[Rule { ports: vec![1..=1], ..Rule::default() }, no_ssh]);
        let why = |to: &str| auto.decide(to.parse().unwrap(), |ip| ip != IpAddr::from([203, 0, 113, 9]));
        assert_eq!(why("8.8.8.8:22"), (false, FlowModeReason::Rule(2)));
        assert_eq!(why("8.8.8.8:443"), (true, FlowModeReason::Translated));
        assert_eq!(why("203.0.113.9:443"), (false, FlowModeReason::Untranslated));
        assert_eq!(why("10.0.0.1:443"), (false, FlowModeReason::PrivateAddress));
        assert_eq!(
            rules(FlowMode::Stream, &[]).decide("10.0.0.1:443".parse().unwrap(), |_| true),
            (true, FlowModeReason::DefaultMode)
        );
    }

    #[test]
    fn the_first_rule_for_a_destination_counts() {
        let ssh = Rule { ports: vec![22..=22], streams: false, ..Rule::default() };
        let near = Rule { to: vec!["10.0.0.0/8".parse().unwrap()], streams: true, ..Rule::default() };
        let all = rules(FlowMode::Auto, &[ssh, near]);
        assert!(!takes(&all, "10.0.0.1:22"));
        assert!(takes(&all, "10.0.0.1:80"));
        assert!(!takes(&all, "192.168.0.1:80"), "no rule is for it");
    }
}
