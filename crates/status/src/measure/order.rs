//! The orders that a measuring client sends to the responder by TCP: one line of JSON an order.

use serde::{Deserialize, Serialize};

/// Longest line of an order (bytes): twice the longest one. A longer one is refused.
pub const MAX_ORDER_BYTES: usize = 256;
/// Longest time for which datagrams are sent for one order: twice that of a step of the sweep. Chosen.
pub const MAX_UDP_SEND_MILLISECONDS: u32 = 10_000;

/// An order.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Answer with a [`ResponderReport`].
    Report,
    /// Send bytes on this connection until the client closes it.
    Send,
    /// Read the bytes of this connection until the client closes it.
    Receive,
    /// Send datagrams to the address of the client, and then answer with [`SentDatagrams`].
    SendUdp {
        /// The port of the client.
        port: u16,
        /// The number of the run, in the datagrams.
        run: u32,
        /// Rate of their content.
        bits_per_second: u64,
        /// For how long, at most [`MAX_UDP_SEND_MILLISECONDS`].
        milliseconds: u32,
    },
    /// Answer with the [`DatagramReport`](super::DatagramReport) of the datagrams of this run.
    UdpReceived {
        /// The number of the run.
        run: u32,
    },
}

/// The counters of the responder. They count for all connections of the client's address, closed ones
/// included, as long as one is open.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ResponderReport {
    /// Time of the server's clock since the responder began (µs).
    pub at_us: u64,
    /// Bytes read from connections with [`Order::Receive`].
    pub received_bytes: u64,
    /// TCP segments with data sent on connections with [`Order::Send`].
    pub segments: u64,
    /// Those that were retransmitted.
    pub retransmitted: u64,
    /// Processor time of the server without that of the responder (µs).
    pub cpu_us: u64,
    /// Resident memory of the server (bytes).
    pub resident_bytes: u64,
}

/// The answer to [`Order::SendUdp`].
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct SentDatagrams {
    /// Datagrams sent.
    pub datagrams: u64,
}

impl Order {
    /// Parses a line without its end; an error in words.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        if line.len() > MAX_ORDER_BYTES {
            return Err(format!("an order of {} bytes: expected at most {MAX_ORDER_BYTES}", line.len()));
        }
        let order = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        match order {
            Self::SendUdp { port: 0, .. } => Err("port 0".to_owned()),
            Self::SendUdp { bits_per_second: 0, .. } => Err("a rate of 0".to_owned()),
            Self::SendUdp { milliseconds, .. } if milliseconds > MAX_UDP_SEND_MILLISECONDS => {
                Err(format!("{milliseconds} ms: expected at most {MAX_UDP_SEND_MILLISECONDS}"))
            }
            order => Ok(order),
        }
    }

    /// The order as a line.
    pub fn line(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_back() {
        let udp = Order::SendUdp {
            port: u16::MAX,
            run: u32::MAX,
            bits_per_second: u64::MAX,
            milliseconds: MAX_UDP_SEND_MILLISECONDS,
        };
        for order in [Order::Report, Order::Send, Order::Receive, udp, Order::UdpReceived { run: 7 }] {
            let line = order.line();
            assert!(line.len() <= MAX_ORDER_BYTES / 2 && line.ends_with('\n'), "{line}");
            assert_eq!(Order::parse(line.trim_end().as_bytes()), Ok(order));
        }
    }

    #[test]
    fn other_lines_are_refused() {
        let long = vec![b' '; MAX_ORDER_BYTES + 1];
        let bad: [&[u8]; 8] = [
            b"",
            b"{}",
            b"GET / HTTP/1.1",
            b"{\"do\":\"udp-received\",\"run\":1,\"to\":\"192.0.2.1\"}",
            b"{\"do\":\"send-udp\",\"port\":0,\"run\":1,\"bits_per_second\":1,\"milliseconds\":1}",
            b"{\"do\":\"send-udp\",\"port\":1,\"run\":1,\"bits_per_second\":0,\"milliseconds\":1}",
            b"{\"do\":\"send-udp\",\"port\":1,\"run\":1,\"bits_per_second\":1,\"milliseconds\":10001}",
            &long,
        ];
        for line in bad {
            assert!(Order::parse(line).is_err(), "{}", String::from_utf8_lossy(line));
        }
    }
}
