use std::net::SocketAddr;

use mpvpn_types::{CongestionControl, Duration, Instant, PathId};

use crate::LocalAddress;

/// Measurements of a path. Rates are in bytes/s, sizes in bytes of UDP payload.
#[derive(Clone, Debug)]
pub struct PathStats {
    /// The path ID.
    pub id: PathId,
    /// The local end: at a client the token of a link, at a server the local address.
    pub local: Option<LocalAddress>,
    /// The peer's address.
    pub remote: SocketAddr,
    /// Whether the packets travel inside TCP.
    pub inside_tcp: bool,
    /// The address of this end as the peer reported it (draft-seemann-quic-address-discovery).
    pub observed: Option<SocketAddr>,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// The shortest round-trip time, if there was a sample.
    pub min_rtt: Option<Duration>,
    /// The round-trip time of a packet in a busy stream without a queue; longer than `min_rtt` where delay
    /// varies.
    pub base_rtt: Duration,
    /// Variation of the round-trip time.
    pub jitter: Duration,
    /// Share of the packets sent in the last 10 s that were lost (0 to 1).
    pub loss: f64,
    /// Packets sent in the last 10 s.
    pub recent_packets_sent: u64,
    /// Share of packets that are lost at any rate (0 to 1), once measured.
    pub random_loss: Option<f64>,
    /// The congestion controller in use.
    pub cc: CongestionControl,
    /// The congestion window; of a path group, this path's part.
    pub congestion_window: u64,
    /// Bytes in flight.
    pub in_flight: u64,
    /// The delivery rate, 0 if unknown; of a path group, this path's part.
    pub delivery_rate: u64,
    /// The rate of the link for all classes together, configured or measured, if it is known.
    pub link_rate: Option<u64>,
    /// When packets last waited for the link, so that its rate was measured; `None` if the rate is configured
    /// or unknown.
    pub link_rate_measured: Option<Instant>,
    /// For how long the class has had more data than it could send over the link, on all its paths; `None`
    /// without a shaper.
    pub backlog_time: Option<Duration>,
    /// The largest UDP payload that the path is known to carry.
    pub mtu: u16,
    /// UDP payload sent, since the path was opened.
    pub tx_bytes: u64,
    /// UDP datagrams sent.
    pub tx_packets: u64,
    /// UDP payload received.
    pub rx_bytes: u64,
    /// UDP datagrams received.
    pub rx_packets: u64,
    /// QUIC packets declared lost.
    pub lost_packets: u64,
}

/// Packets sent and lost in the last 10 s, in buckets of a second.
#[derive(Clone, Debug, Default)]
pub(crate) struct LossWindow {
    buckets: [(u64, u64); 10],
    second: u64,
    last: (u64, u64),
}

impl LossWindow {
    /// Takes the total of packets sent and lost until `second`. Losses of a `dead` path are not counted, as
    /// they do not show what the path loses when it works.
    pub(crate) fn update(&mut self, second: u64, (sent, lost): (u64, u64), dead: bool) {
        for passed in 1..=second.saturating_sub(self.second).min(10) {
            self.buckets[((self.second + passed) % 10) as usize] = (0, 0);
        }
        self.second = self.second.max(second);
        if !dead {
            let bucket = &mut self.buckets[(self.second % 10) as usize];
            bucket.0 += sent.saturating_sub(self.last.0);
            bucket.1 += lost.saturating_sub(self.last.1);
        }
        self.last = (sent, lost);
    }

    /// Packets sent.
    pub(crate) fn sent(&self) -> u64 {
        self.buckets.iter().map(|(sent, _)| sent).sum()
    }

    /// The share of packets lost (0 to 1).
    pub(crate) fn share(&self) -> f64 {
        let (sent, lost): (u64, u64) = (self.sent(), self.buckets.iter().map(|(_, lost)| lost).sum());
        if sent == 0 { 0.0 } else { (lost as f64 / sent as f64).min(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_forgotten_after_ten_seconds() {
        let mut window = LossWindow::default();
        window.update(0, (100, 10), false);
        assert!((window.share() - 0.1).abs() < 1e-9);
        window.update(5, (200, 10), false);
        assert!((window.share() - 0.05).abs() < 1e-9);
        assert_eq!(window.sent(), 200);
        window.update(12, (300, 10), false);
        assert_eq!(window.share(), 0.0);
        window.update(400, (300, 10), false);
        assert_eq!(window.share(), 0.0);
        window.update(401, (350, 60), true);
        window.update(402, (450, 65), false);
        assert!((window.share() - 0.05).abs() < 1e-9);
    }
}
