//! Receiving in batches: `recvmmsg` into buffers that are handed out and reused.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
};

use bytes::{Buf, BytesMut};

use super::{
    address::{RawAddress, plain},
    control::{self, Control},
};

/// Bytes that the largest datagram, or train of datagrams joined by the kernel, can have.
const LARGEST: usize = 65_535;
/// Bytes a buffer is made with. Small datagrams are cut off its front one after the other; when less
/// than [`LARGEST`] is left, all of it is reclaimed, if what was handed out has been dropped.
const BUFFER: usize = 128 * 1024;
/// A few bytes that somebody keeps for long keep the whole buffer. While there are more buffers than this of which
/// something is kept, datagrams are copied out of theirs.
const MOST_KEPT: usize = 16;
/// Of those buffers, so many are looked at for one that is free again before another is made.
const LOOKS: usize = 4;

/// One datagram, or several of the same sender joined by the kernel (UDP_GRO).
#[derive(Debug)]
pub struct Received {
    /// The bytes; a datagram may be empty.
    pub data: BytesMut,
    /// The sender; never a mapped address.
    pub remote: SocketAddr,
    /// The address of ours that it was sent to.
    pub local_ip: Option<IpAddr>,
    /// The two ECN bits (RFC 3168).
    pub ecn: u8,
    /// Bytes of each datagram in `data`, the last may be shorter; all of `data` if it is only one.
    pub segment_size: usize,
    crowded: bool,
}

impl Received {
    /// The datagrams one by one. They share the memory of what was received, unless too much of such memory is kept.
    pub fn datagrams(mut self) -> impl Iterator<Item = BytesMut> {
        let empty = self.data.is_empty().then(BytesMut::new);
        let pieces = std::iter::from_fn(move || {
            let len = self.segment_size.min(self.data.len());
            let datagram = match self.crowded {
                true => {
                    let copy = BytesMut::from(&self.data[..len]);
                    self.data.advance(len);
                    copy
                }
                false => self.data.split_to(len),
            };
            (len > 0).then_some(datagram)
        });
        empty.into_iter().chain(pieces)
    }

    /// The same where they are.
    pub fn payloads(&self) -> impl Iterator<Item = &[u8]> {
        let empty = self.data.is_empty().then_some(&[][..]);
        empty.into_iter().chain(self.data.chunks(self.segment_size.max(1)))
    }
}

/// Buffers that were full while something of them was kept.
#[derive(Default)]
struct Kept(VecDeque<BytesMut>);

impl Kept {
    /// Takes a full buffer for one with room.
    fn exchange(&mut self, full: BytesMut) -> BytesMut {
        let looks = LOOKS.min(self.0.len());
        // The first of all has no memory.
        if full.capacity() > 0 {
            self.0.push_back(full);
        }
        for _ in 0..looks {
            let Some(mut buffer) = self.0.pop_front() else { break };
            if buffer.try_reclaim(LARGEST) {
                return buffer;
            }
            self.0.push_back(buffer);
        }
        BytesMut::with_capacity(BUFFER)
    }

    /// Gives the memory of one back of which nothing is kept any more, if the next one is that.
    fn look(&mut self) {
        if let Some(mut buffer) = self.0.pop_front()
            && !buffer.try_reclaim(LARGEST)
        {
            self.0.push_back(buffer);
        }
    }

    fn are_many(&self) -> bool {
        self.0.len() > MOST_KEPT
    }
}

/// Room for the datagrams of one receive call, reused for ever.
pub struct RecvBatch {
    slots: Vec<Slot>,
    headers: Vec<libc::mmsghdr>,
    pieces: Vec<libc::iovec>,
    filled: usize,
    kept: Kept,
}

// SAFETY: the raw pointers in `headers` and `pieces` are rewritten before every system call and read by
// nobody afterwards; between calls they are plain numbers.
unsafe impl Send for RecvBatch {}

#[derive(Default)]
struct Slot {
    buffer: BytesMut,
    remote: RawAddress,
    control: Control,
    remote_length: u32,
    control_length: usize,
    truncated: bool,
}

impl RecvBatch {
    /// Room for `slots` datagrams or joined trains a call (1 to 64), each up to 64 KiB. Memory is
    /// taken when first used, 128 KiB a slot.
    pub fn new(slots: usize) -> Self {
        let slots = slots.clamp(1, 64);
        // SAFETY: all-zero headers and pieces are valid: null pointers and zero lengths.
        let (headers, pieces) = unsafe { (vec![std::mem::zeroed(); slots], vec![std::mem::zeroed(); slots]) };
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            headers,
            pieces,
            filled: 0,
            kept: Kept::default(),
        }
    }

    /// Hands out what the last receive call brought, in order. What is not taken is lost.
    pub fn drain(&mut self) -> impl Iterator<Item = Received> + '_ {
        let filled = std::mem::take(&mut self.filled);
        let crowded = self.kept.are_many();
        self.slots[..filled].iter_mut().filter_map(move |slot| slot.take(crowded))
    }

    pub(super) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.filled = 0;
        self.kept.look();
        self.prepare();
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: `prepare` has just made every header point to memory of this batch, with its size;
        // none of it moves before the call returns. No timeout.
        let result = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let filled = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
        for (slot, header) in self.slots.iter_mut().zip(&self.headers).take(filled) {
            slot.finish(header);
        }
        self.filled = filled;
        Ok(filled)
    }

    fn prepare(&mut self) {
        for ((slot, header), piece) in self.slots.iter_mut().zip(&mut self.headers).zip(&mut self.pieces) {
            slot.make_room(&mut self.kept);
            let spare = slot.buffer.spare_capacity_mut();
            piece.iov_base = spare.as_mut_ptr().cast();
            piece.iov_len = LARGEST;
            let message = &mut header.msg_hdr;
            message.msg_name = slot.remote.pointer_mut();
            message.msg_namelen = RawAddress::ROOM;
            message.msg_iov = piece;
            message.msg_iovlen = 1;
            message.msg_control = slot.control.pointer_mut();
            message.msg_controllen = control::ROOM as _;
            message.msg_flags = 0;
        }
    }
}

impl Slot {
    /// Makes at least [`LARGEST`] spare bytes, of the same memory where nobody else uses it.
    fn make_room(&mut self, kept: &mut Kept) {
        self.buffer.clear();
        if self.buffer.capacity() < LARGEST && !self.buffer.try_reclaim(LARGEST) {
            self.buffer = kept.exchange(std::mem::take(&mut self.buffer));
        }
    }

    #[allow(clippy::unnecessary_cast, reason = "the field has 32 bits with other C libraries")]
    fn finish(&mut self, header: &libc::mmsghdr) {
        let length = (header.msg_len as usize).min(LARGEST);
        // SAFETY: the kernel wrote `msg_len` bytes, at most the `LARGEST` that it was given, to the
        // start of the spare capacity of the empty buffer.
        unsafe { self.buffer.set_len(length) };
        self.remote_length = header.msg_hdr.msg_namelen;
        self.control_length = header.msg_hdr.msg_controllen as usize;
        self.truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
    }

    /// `None` for what cannot be used: cut short or without a sender.
    fn take(&mut self, crowded: bool) -> Option<Received> {
        let remote = self.remote.parse(self.remote_length)?;
        if self.truncated {
            return None;
        }
        let data = self.buffer.split();
        let meta = Meta::parse(&self.control, self.control_length);
        let segment_size =
            meta.segment_size.filter(|&size| size > 0 && size < data.len()).unwrap_or(data.len());
        Some(Received { remote, local_ip: meta.local_ip, ecn: meta.ecn, segment_size, data, crowded })
    }
}

/// What the control messages of a datagram say.
#[derive(Debug, Default, PartialEq, Eq)]
struct Meta {
    local_ip: Option<IpAddr>,
    ecn: u8,
    segment_size: Option<usize>,
}

impl Meta {
    fn parse(control: &Control, length: usize) -> Self {
        let mut meta = Self::default();
        for (level, kind, data) in control.messages(length) {
            match (level, kind) {
                // struct in_pktinfo: index, routing address, destination address of the header.
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    meta.local_ip = octets::<4>(data, 8).map(|b| IpAddr::V4(Ipv4Addr::from(b)));
                }
                // struct in6_pktinfo: destination address, index.
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    meta.local_ip = octets::<16>(data, 0).map(|b| plain(Ipv6Addr::from(b)));
                }
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    meta.ecn = control::integer(data).unwrap_or(0) as u8 & 0b11;
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    meta.segment_size = control::integer(data).and_then(|size| usize::try_from(size).ok());
                }
                _ => {}
            }
        }
        meta
    }
}

fn octets<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(messages: &[(libc::c_int, libc::c_int, &[u8])]) -> Meta {
        let mut control = Control::default();
        for (level, kind, data) in messages {
            control.push(*level, *kind, data);
        }
        Meta::parse(&control, control.used())
    }

    #[test]
    fn address_ecn_and_segment_size_are_read() {
        let mut info = [0_u8; 12];
        info[8..].copy_from_slice(&[192, 0, 2, 1]);
        let meta = parse(&[
            (libc::IPPROTO_IP, libc::IP_PKTINFO, &info),
            (libc::IPPROTO_IP, libc::IP_TOS, &[0b1011_1001]),
            (libc::SOL_UDP, libc::UDP_GRO, &1200_i32.to_ne_bytes()),
        ]);
        assert_eq!(meta, Meta { local_ip: "192.0.2.1".parse().ok(), ecn: 1, segment_size: Some(1200) });
    }

    #[test]
    fn a_mapped_local_address_is_plain() {
        let mut info = [0_u8; 20];
        info[..16].copy_from_slice(&"::ffff:192.0.2.1".parse::<Ipv6Addr>().unwrap().octets());
        let meta = parse(&[
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &3_i32.to_ne_bytes()),
        ]);
        assert_eq!(meta, Meta { local_ip: "192.0.2.1".parse().ok(), ecn: 3, segment_size: None });
    }

    #[test]
    fn short_and_negative_values_are_ignored() {
        let meta = parse(&[
            (libc::IPPROTO_IP, libc::IP_PKTINFO, &[0; 4]),
            (libc::SOL_UDP, libc::UDP_GRO, &(-1_i32).to_ne_bytes()),
        ]);
        assert_eq!(meta, Meta::default());
    }

    #[test]
    fn a_slot_keeps_its_memory_while_what_it_gave_is_dropped() {
        let (mut slot, mut kept) = (Slot::default(), Kept::default());
        slot.make_room(&mut kept);
        let base = slot.buffer.as_ptr() as usize;
        for _ in 0..1000 {
            slot.buffer.extend_from_slice(&[7; 1200]);
            drop(slot.buffer.split());
            slot.make_room(&mut kept);
            assert!(slot.buffer.capacity() >= LARGEST);
            assert!((base..base + BUFFER).contains(&(slot.buffer.as_ptr() as usize)), "moved");
        }
    }

    #[test]
    fn a_slot_takes_new_memory_while_the_old_is_kept() {
        let (mut slot, mut kept) = (Slot::default(), Kept::default());
        slot.make_room(&mut kept);
        slot.buffer.resize(LARGEST, 1);
        let first = slot.buffer.split();
        slot.make_room(&mut kept);
        slot.buffer.resize(LARGEST, 2);
        let second = slot.buffer.split();
        slot.make_room(&mut kept);
        assert!(slot.buffer.capacity() >= LARGEST);
        assert!(first.iter().all(|&b| b == 1) && second.iter().all(|&b| b == 2));
    }

    /// Fills a buffer, and returns one datagram of it.
    fn one_of(slot: &mut Slot, kept: &mut Kept) -> BytesMut {
        slot.make_room(kept);
        slot.buffer.resize(slot.buffer.capacity() - 1000, 3);
        slot.buffer.split().split_to(100)
    }

    #[test]
    fn a_buffer_that_was_kept_is_used_again_once_it_is_not() {
        let (mut slot, mut kept) = (Slot::default(), Kept::default());
        let first = one_of(&mut slot, &mut kept);
        let place = first.as_ptr();
        let _second = one_of(&mut slot, &mut kept);
        drop(first);
        assert_eq!(one_of(&mut slot, &mut kept).as_ptr(), place);
    }

    #[test]
    fn few_bytes_of_many_buffers_do_not_keep_more_and_more_of_them() {
        let (mut slot, mut kept) = (Slot::default(), Kept::default());
        let mut all = Vec::new();
        while !kept.are_many() {
            assert!(all.len() <= MOST_KEPT + 1);
            all.push(one_of(&mut slot, &mut kept));
        }
        // What is received from now on has its own memory.
        let data = BytesMut::from_iter((0..=255).cycle().take(2500));
        let received = Received {
            data: data.clone(),
            remote: "192.0.2.1:1".parse().unwrap(),
            local_ip: None,
            ecn: 0,
            segment_size: 1200,
            crowded: true,
        };
        let datagrams: Vec<_> = received.datagrams().collect();
        assert_eq!(datagrams.iter().map(BytesMut::len).collect::<Vec<_>>(), [1200, 1200, 100]);
        assert_eq!(datagrams.concat(), data);
        assert!(datagrams.iter().all(|datagram| datagram.capacity() < 2 * 1200));
        // Until others are given back.
        all.truncate(MOST_KEPT);
        for _ in 0..=MOST_KEPT {
            kept.look();
        }
        assert!(!kept.are_many());
    }
}
