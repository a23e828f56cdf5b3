//! What tests of several parts need.

use mpvpn_quic::PathView;
use mpvpn_types::{CongestionControl, Duration, Instant, LinkId, PathId};

use super::{
    path::PathEntry,
    policy::{PathPolicy, PolicyInForce},
};

/// What is measured about a path with this round-trip time and this share of lost packets (0 to 1), and
/// nothing else of note.
pub(super) fn view(id: u32, rtt: Duration, loss: f64) -> PathView {
    PathView {
        id: PathId(id),
        local: None,
        remote: ([192, 0, 2, 1], 443).into(),
        observed: None,
        rtt,
        min_rtt: Some(rtt),
        base_rtt: rtt,
        jitter: Duration::ZERO,
        loss,
        recent: 1000,
        random_loss: None,
        cc: CongestionControl::Bbr,
        window: 1 << 20,
        in_flight: 0,
        rate: 1_000_000,
        link_rate: None,
        mtu: 1400,
        tx_bytes: 0,
        tx_packets: 0,
        rx_bytes: 0,
        rx_packets: 0,
        lost_packets: 0,
    }
}

/// A path over a link that was just opened.
pub(super) fn path(now: Instant, link: u16) -> PathEntry {
    PathEntry::new(now, LinkId(link), false, PolicyInForce::new(PathPolicy::default(), false))
}
