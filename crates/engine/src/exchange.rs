//! What the data-plane threads of a process give each other: packets that another one can carry, and
//! words about sessions.
//!
//! Always holds: nobody waits for anybody. Packets go into a bounded ring, and what does not fit is
//! lost, as in any queue; words are rare and never lost.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use mpvpn_os::poll::Wake;
use mpvpn_packet::VnetHdr;

/// Packets (of up to 64 KiB) that may wait for a thread, from all others together.
const PARCELS: usize = 256;

/// A packet read from the TUN by one thread, for another.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) hdr: VnetHdr,
    pub(crate) packet: Vec<u8>,
}

/// A thread's own end.
#[derive(Debug)]
pub(crate) struct Inbox<W> {
    words: Receiver<W>,
    parcels: Receiver<Parcel>,
}

/// The end of all others.
#[derive(Debug)]
pub(crate) struct Outbox<W> {
    words: Sender<W>,
    parcels: SyncSender<Parcel>,
    wake: Wake,
}

/// Both ends; `wake` is what the owner of the inbox waits for.
pub(crate) fn exchange<W>(wake: Wake) -> (Outbox<W>, Inbox<W>) {
    let (words, words_in) = channel();
    let (parcels, parcels_in) = sync_channel(PARCELS);
    (Outbox { words, parcels, wake }, Inbox { words: words_in, parcels: parcels_in })
}

impl<W> Inbox<W> {
    /// The next word.
    pub(crate) fn word(&self) -> Option<W> {
        self.words.try_recv().ok()
    }

    /// The next packet.
    pub(crate) fn parcel(&self) -> Option<Parcel> {
        self.parcels.try_recv().ok()
    }
}

impl<W> Outbox<W> {
    /// Says something, and wakes the other thread.
    pub(crate) fn tell(&self, word: W) {
        // A thread that has ended needs no words.
        let _ = self.words.send(word);
        self.wake.wake();
    }

    /// Hands a packet over; returns whether there was room. [`Self::wake`] is due after a batch.
    pub(crate) fn hand(&self, hdr: VnetHdr, packet: &[u8]) -> bool {
        self.parcels.try_send(Parcel { hdr, packet: packet.to_vec() }).is_ok()
    }

    /// Lets the other thread look at once.
    pub(crate) fn wake(&self) {
        self.wake.wake();
    }
}

impl<W> Clone for Outbox<W> {
    fn clone(&self) -> Self {
        Self { words: self.words.clone(), parcels: self.parcels.clone(), wake: self.wake.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_and_words_still_come_through() {
        let wake = Wake::new().unwrap();
        let (outbox, inbox) = exchange(wake.clone());
        let handed = (0..1000).filter(|n| outbox.hand(VnetHdr::NONE, &[*n as u8])).count();
        assert_eq!(handed, PARCELS);
        assert!(!wake.drain(), "woken before the batch was over");
        outbox.clone().tell("a word");
        assert!(wake.drain());
        assert_eq!(inbox.word(), Some("a word"));
        let got: Vec<u8> = std::iter::from_fn(|| inbox.parcel()).map(|parcel| parcel.packet[0]).collect();
        assert_eq!(got, (0..PARCELS).map(|n| n as u8).collect::<Vec<_>>(), "in order");
        assert!(outbox.hand(VnetHdr::NONE, &[1]));
    }
}
