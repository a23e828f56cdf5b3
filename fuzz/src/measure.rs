//! Bytes that clients of the tunnel send to the responder.

use mpvpn_status::measure::{Datagram, DatagramCounter, MAX_ORDER_BYTES, Order};

/// A line of an order, and a datagram: what is read is written back, and counters stand every header.
pub fn measure(data: &[u8]) {
    if let Ok(order) = Order::parse(data) {
        assert!(data.len() <= MAX_ORDER_BYTES);
        assert_eq!(Order::parse(order.line().trim_end().as_bytes()), Ok(order));
    }
    let Some(header) = Datagram::parse(data) else { return };
    assert_eq!(Datagram::parse(&header.encode()), Some(header));
    let mut counter = DatagramCounter::default();
    for now_us in [0, header.sent_us, u64::MAX] {
        counter.count(now_us, &header, data.len());
    }
    let report = counter.report();
    assert!(report.datagrams == 3 && report.reordered == 0 && report.jitter_us.is_finite());
}
