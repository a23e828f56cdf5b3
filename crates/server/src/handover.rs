//! Hands packets to another shard of the server, when one shard reads a packet from the TUN device for a
//! client whose connection belongs to another.
//!
//! Always holds: no shard waits for another; the ring of a shard is bounded, and packets that do not fit are
//! dropped and counted.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use mpvpn_os::poll::PollWaker;
use mpvpn_packet::VnetHdr;

/// Packets (of up to 64 KiB) in a shard's ring. Fewer: bursts are lost while that shard waits for a
/// processor. More: old packets, and up to 16 MiB of memory, for a shard that does not run. Chosen.
const MAX_HANDED_PACKETS: usize = 256;

/// A packet read by one shard for another.
#[derive(Debug)]
pub(super) struct HandedPacket {
    pub(super) hdr: VnetHdr,
    pub(super) packet: Vec<u8>,
}

/// A shard's own ring, and its access to the rings of all.
#[derive(Debug)]
pub(super) struct Handover {
    ring: Receiver<HandedPacket>,
    /// In the order of the shards.
    peers: Vec<Peer>,
    pub(super) lost_packets: u64,
}

#[derive(Clone, Debug)]
struct Peer {
    ring: SyncSender<HandedPacket>,
    wake: PollWaker,
    /// Whether it was handed packets since its last wake-up.
    needs_wakeup: bool,
}

/// One handover per shard, in order; `wakes` wake the shards.
pub(super) fn handovers(wakes: impl Iterator<Item = PollWaker>) -> Vec<Handover> {
    let end = |wake| {
        let (ring, receiver) = sync_channel(MAX_HANDED_PACKETS);
        (Peer { ring, wake, needs_wakeup: false }, receiver)
    };
    let (peers, rings): (Vec<_>, Vec<_>) = wakes.map(end).unzip();
    rings.into_iter().map(|ring| Handover { ring, peers: peers.clone(), lost_packets: 0 }).collect()
}

impl Handover {
    /// Hands a packet to a shard; [`Self::wake_peers`] must follow after the batch.
    pub(super) fn hand(&mut self, shard: u8, hdr: VnetHdr, packet: &[u8]) {
        let handed = HandedPacket { hdr, packet: packet.to_vec() };
        match self.peers.get_mut(usize::from(shard)) {
            Some(peer) if peer.ring.try_send(handed).is_ok() => peer.needs_wakeup = true,
            _ => self.lost_packets += 1,
        }
    }

    /// Wakes the shards that were handed packets.
    pub(super) fn wake_peers(&mut self) {
        for peer in &mut self.peers {
            if std::mem::take(&mut peer.needs_wakeup) {
                peer.wake.wake();
            }
        }
    }

    /// The next packet from another shard.
    pub(super) fn next(&self) -> Option<HandedPacket> {
        self.ring.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_in_order_and_what_does_not_fit_is_counted() {
        let wakes = [PollWaker::new().unwrap(), PollWaker::new().unwrap()];
        let mut all = handovers(wakes.iter().cloned());
        let (mut other, mut own) = (all.pop().unwrap(), all.pop().unwrap());
        for n in 0..1000_u32 {
            own.hand(1, VnetHdr::NONE, &[n as u8]);
        }
        assert_eq!(own.lost_packets, 1000 - MAX_HANDED_PACKETS as u64);
        assert!(!wakes[1].drain(), "woken before the batch was over");
        own.wake_peers();
        assert!(wakes[1].drain() && !wakes[0].drain());
        let got: Vec<u8> = std::iter::from_fn(|| other.next()).map(|handed| handed.packet[0]).collect();
        assert_eq!(got, (0..MAX_HANDED_PACKETS).map(|n| n as u8).collect::<Vec<_>>());
        own.hand(1, VnetHdr::NONE, &[1]);
        assert!(other.next().is_some(), "there is room again");
        own.hand(7, VnetHdr::NONE, &[1]);
        assert_eq!(own.lost_packets, 1001 - MAX_HANDED_PACKETS as u64, "there is no such shard");
        other.lost_packets += 1;
        assert_eq!(other.lost_packets, 1);
    }

    #[test]
    fn a_shard_without_news_is_not_woken() {
        let wake = PollWaker::new().unwrap();
        let mut all = handovers([wake.clone()].into_iter());
        all[0].wake_peers();
        assert!(!wake.drain());
    }
}
