//! The queues of a server's TUN device; each shard reads its own.
//!
//! In: packets that the kernel routes to clients. Out: packets of clients. Always holds: all packets of a
//! flow are written to one queue, because the kernel delivers the flow's other direction to the queue that
//! was written last.

use std::{net::IpAddr, sync::Arc};

use mpvpn_error::RunError;
use mpvpn_os::{
    Tun,
    poll::{Interest, Poller, TUN_TOKEN},
    tun::READ_BUFFER_LEN,
};
use mpvpn_packet::{TunPacket, VnetHdr, ip};
use mpvpn_sockets::packet_io::{read_tun, write_tun};

/// The queues, as one shard uses them.
pub(super) struct TunQueues {
    /// One queue per shard, in order; empty without a TUN device.
    queues: Vec<Arc<Tun>>,
    own_index: usize,
    buffer: Vec<u8>,
}

impl TunQueues {
    /// The queues of shard `shard`; registers its own queue with the poller.
    pub(super) fn new(queues: Vec<Arc<Tun>>, shard: u8, poller: &Poller) -> Result<Self, RunError> {
        let own_index = usize::from(shard);
        if let Some(queue) = queues.get(own_index) {
            poller.add(queue, TUN_TOKEN, Interest::Read).map_err(RunError::io("watch the TUN"))?;
        }
        Ok(Self { queues, own_index, buffer: vec![0; READ_BUFFER_LEN] })
    }

    /// Reads packets of this shard's queue, within bounds.
    pub(super) fn read(&mut self, each: impl FnMut(VnetHdr, &mut [u8])) {
        if let Some(tun) = self.queues.get(self.own_index) {
            read_tun(tun, &mut self.buffer, each);
        }
    }

    /// Writes a packet. `are_clients` returns whether both addresses belong to clients.
    pub(super) fn write(&self, joined: &TunPacket, are_clients: impl Fn(IpAddr, IpAddr) -> bool) {
        let number = queue_index(joined.leading_bytes(), self.own_index, self.queues.len(), are_clients);
        if let Some(queue) = self.queues.get(number) {
            write_tun(queue, joined);
        }
    }
}

/// The queue to which a packet is written: normally this shard's own, to which the kernel then delivers the
/// other direction. Packets between two clients come back through the TUN device; if both clients' shards
/// wrote to their own queues, the kernel would move the flow between them and reorder it. So both directions
/// use the queue that the two addresses choose.
fn queue_index(
    packet: &[u8],
    own_index: usize,
    queues: usize,
    are_clients: impl Fn(IpAddr, IpAddr) -> bool,
) -> usize {
    if queues < 2 {
        return own_index;
    }
    match (ip::src_of(packet), ip::dst_of(packet)) {
        (Some(src), Some(dst)) if are_clients(src, dst) => (last_byte(src) + last_byte(dst)) % queues,
        _ => own_index,
    }
}

fn last_byte(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]),
        IpAddr::V6(ip) => usize::from(ip.octets()[15]),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use mpvpn_packets::Packet;

    use super::*;

    fn packet(from: u8, to: u8) -> Vec<u8> {
        let address = |last| SocketAddr::from(([10, 0, 0, last], 7));
        Packet::between(address(from), address(to)).udp(b"x")
    }

    #[test]
    fn both_directions_between_two_clients_go_through_one_queue() {
        for (a, b) in [(2, 3), (2, 9), (200, 7)] {
            let of = |own_index, from, to| queue_index(&packet(from, to), own_index, 4, |_, _| true);
            assert_eq!(of(0, a, b), of(3, b, a));
        }
    }

    #[test]
    fn all_else_goes_through_the_shards_own_queue() {
        assert_eq!(queue_index(&packet(2, 3), 3, 4, |_, _| false), 3);
        assert_eq!(queue_index(&packet(2, 3), 0, 1, |_, _| true), 0);
        assert_eq!(queue_index(b"no packet", 2, 4, |_, _| true), 2);
    }
}
