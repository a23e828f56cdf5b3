//! Receiving in batches: recvmmsg(2) into buffers whose parts are handed out without a copy.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};

use super::{
    address::{RawAddress, unmapped},
    arrival::{ArrivalClock, kernel_time},
    control::{self, Control},
};

/// Bytes of the largest datagram, or of the largest train of datagrams that the kernel joins (UDP_GRO): the
/// limit of IP.
const MAX_DATAGRAM_BYTES: usize = 65_535;
/// Bytes of a new buffer. Datagrams are split off its front; when less than [`MAX_DATAGRAM_BYTES`] is left,
/// the whole buffer is reclaimed, provided that all parts handed out have been dropped. A smaller buffer is
/// reclaimed more often; a larger one holds more memory while one of its parts is in use.
const BUFFER_BYTES: usize = 128 * 1024;
/// Full buffers of which parts are still in use, at most, before datagrams are copied out of their buffer: a
/// few bytes in use retain the whole buffer. Chosen (`docs/design/memory.md`): fewer copy sooner, more let a
/// peer retain more memory (2 MiB here).
const MAX_RETAINED_BUFFERS: usize = 16;
/// Retained buffers that are checked for one that is free again before a new one is allocated. More cost time
/// for each buffer, fewer allocate although a buffer is free.
const RECLAIM_ATTEMPTS: usize = 4;

/// One datagram, or a train: several datagrams of the same sender that the kernel joined (UDP_GRO).
#[derive(Debug)]
pub struct Received {
    /// The payload; that of a single datagram may be empty.
    pub data: BytesMut,
    /// The sender; never a mapped address.
    pub remote: SocketAddr,
    /// The local address that it was sent to.
    pub local_ip: Option<IpAddr>,
    /// The two ECN bits (RFC 3168).
    pub ecn: u8,
    /// When it arrived at this machine, or the first one of the train. It may have waited in the socket
    /// since.
    pub arrived: Instant,
    /// Bytes of each datagram in `data`, of which the last may be shorter; the length of `data` if it is a
    /// single datagram.
    pub segment_size: usize,
    copies_datagrams: bool,
}

impl Received {
    /// The datagrams one by one. They share the memory of the receive buffer, unless too many buffers are
    /// retained already.
    pub fn datagrams(mut self) -> impl Iterator<Item = BytesMut> {
        let empty = self.data.is_empty().then(BytesMut::new);
        let pieces = std::iter::from_fn(move || {
            let len = self.segment_size.min(self.data.len());
            let datagram = match self.copies_datagrams {
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

    /// The payloads of the datagrams, borrowed.
    pub fn payloads(&self) -> impl Iterator<Item = &[u8]> {
        let empty = self.data.is_empty().then_some(&[][..]);
        empty.into_iter().chain(self.data.chunks(self.segment_size.max(1)))
    }
}

/// Full buffers of which parts were still in use when they were replaced.
#[derive(Default)]
struct RetainedBuffers(VecDeque<BytesMut>);

impl RetainedBuffers {
    /// Takes a full buffer, and returns one with at least [`MAX_DATAGRAM_BYTES`] free.
    fn exchange(&mut self, full: BytesMut) -> BytesMut {
        let attempts = RECLAIM_ATTEMPTS.min(self.0.len());
        // The first buffer of a slot has no memory yet.
        if full.capacity() > 0 {
            self.0.push_back(full);
        }
        for _ in 0..attempts {
            let Some(mut buffer) = self.0.pop_front() else { break };
            if buffer.try_reclaim(MAX_DATAGRAM_BYTES) {
                return buffer;
            }
            self.0.push_back(buffer);
        }
        BytesMut::with_capacity(BUFFER_BYTES)
    }

    /// Frees the next buffer if none of its parts is in use any more.
    fn release_one(&mut self) {
        if let Some(mut buffer) = self.0.pop_front()
            && !buffer.try_reclaim(MAX_DATAGRAM_BYTES)
        {
            self.0.push_back(buffer);
        }
    }

    fn exceed_limit(&self) -> bool {
        self.0.len() > MAX_RETAINED_BUFFERS
    }
}

/// The buffers for the datagrams of one receive call; they are reused.
pub struct RecvBatch {
    slots: Vec<Slot>,
    headers: Vec<libc::mmsghdr>,
    pieces: Vec<libc::iovec>,
    /// The first slots, which the last receive call used or may have used: only these are prepared again.
    used: usize,
    filled: usize,
    retained: RetainedBuffers,
    clock: ArrivalClock,
}

// SAFETY: the raw pointers in `headers` and `pieces` are read only by system calls. They point to memory on
// the heap that the same batch owns, and that stays where it is when the batch moves.
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
    /// Buffers for `slots` datagrams or trains a call (1 to 64), each of up to 64 KiB. Memory is allocated at
    /// the first use, 128 KiB a slot.
    pub fn new(slots: usize) -> Self {
        let slots = slots.clamp(1, 64);
        // SAFETY: all-zero headers and pieces are valid: null pointers and zero lengths.
        let (headers, pieces) = unsafe { (vec![std::mem::zeroed(); slots], vec![std::mem::zeroed(); slots]) };
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            headers,
            pieces,
            used: slots,
            filled: 0,
            retained: RetainedBuffers::default(),
            clock: ArrivalClock::default(),
        }
    }

    /// The messages of the last receive call, in order. Those that are not taken before the next call are
    /// lost.
    pub fn drain(&mut self) -> impl Iterator<Item = Received> + '_ {
        let filled = std::mem::take(&mut self.filled);
        let (copies_datagrams, clock) = (self.retained.exceed_limit(), &self.clock);
        self.slots[..filled].iter_mut().filter_map(move |slot| slot.take(copies_datagrams, clock))
    }

    pub(super) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.filled = 0;
        self.retained.release_one();
        self.prepare();
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: `prepare` has made every header point to memory of this batch, with its size, again if a
        // call has used it since. None of that memory has moved since then or moves before the call returns:
        // a slot changes only when it is filled. The timeout pointer may be null.
        let result = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let filled = usize::try_from(result);
        // The kernel has looked at one more.
        self.used = (filled.unwrap_or(0) + 1).min(self.slots.len());
        let filled = filled.map_err(|_| io::Error::last_os_error())?;
        self.clock.read();
        for (slot, header) in self.slots.iter_mut().zip(&self.headers).take(filled) {
            slot.finish(header);
        }
        self.filled = filled;
        Ok(filled)
    }

    fn prepare(&mut self) {
        let all = self.slots.iter_mut().zip(&mut self.headers).zip(&mut self.pieces);
        for ((slot, header), piece) in all.take(self.used) {
            slot.reserve(&mut self.retained);
            let spare = slot.buffer.spare_capacity_mut();
            piece.iov_base = spare.as_mut_ptr().cast();
            piece.iov_len = MAX_DATAGRAM_BYTES;
            let message = &mut header.msg_hdr;
            message.msg_name = slot.remote.pointer_mut();
            message.msg_namelen = RawAddress::MAX_LEN;
            message.msg_iov = piece;
            message.msg_iovlen = 1;
            message.msg_control = slot.control.pointer_mut();
            message.msg_controllen = control::CAPACITY as _;
            message.msg_flags = 0;
        }
    }
}

impl Slot {
    /// Makes at least [`MAX_DATAGRAM_BYTES`] spare, in the same memory if no part of it is in use.
    fn reserve(&mut self, retained: &mut RetainedBuffers) {
        self.buffer.clear();
        if self.buffer.capacity() < MAX_DATAGRAM_BYTES && !self.buffer.try_reclaim(MAX_DATAGRAM_BYTES) {
            self.buffer = retained.exchange(std::mem::take(&mut self.buffer));
        }
    }

    #[allow(clippy::unnecessary_cast, reason = "the field has 32 bits with other C libraries")]
    fn finish(&mut self, header: &libc::mmsghdr) {
        let length = (header.msg_len as usize).min(MAX_DATAGRAM_BYTES);
        // SAFETY: the kernel wrote `msg_len` bytes, at most the `MAX_DATAGRAM_BYTES` that it was given, to
        // the start of the spare capacity of the empty buffer.
        unsafe { self.buffer.set_len(length) };
        self.remote_length = header.msg_hdr.msg_namelen;
        self.control_length = header.msg_hdr.msg_controllen as usize;
        self.truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
    }

    /// The message in this slot; `None` if it was truncated or has no valid sender.
    fn take(&mut self, copies_datagrams: bool, clock: &ArrivalClock) -> Option<Received> {
        let remote = self.remote.parse(self.remote_length)?;
        if self.truncated {
            return None;
        }
        let data = self.buffer.split();
        let meta = ControlData::parse(&self.control, self.control_length);
        let segment_size =
            meta.segment_size.filter(|&size| size > 0 && size < data.len()).unwrap_or(data.len());
        Some(Received {
            remote,
            local_ip: meta.local_ip,
            ecn: meta.ecn,
            arrived: clock.arrival(meta.kernel_time),
            segment_size,
            data,
            copies_datagrams,
        })
    }
}

/// The data in the control messages of a datagram.
#[derive(Debug, Default, PartialEq, Eq)]
struct ControlData {
    local_ip: Option<IpAddr>,
    ecn: u8,
    segment_size: Option<usize>,
    /// When it arrived, by the wall clock since 1970.
    kernel_time: Option<Duration>,
}

impl ControlData {
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
                    meta.local_ip = octets::<16>(data, 0).map(|b| unmapped(Ipv6Addr::from(b)));
                }
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    meta.ecn = control::integer(data).unwrap_or(0) as u8 & 0b11;
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    meta.segment_size = control::integer(data).and_then(|size| usize::try_from(size).ok());
                }
                (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS) => meta.kernel_time = kernel_time(data),
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

    fn parse(messages: &[(libc::c_int, libc::c_int, &[u8])]) -> ControlData {
        let mut control = Control::default();
        for (level, kind, data) in messages {
            control.push(*level, *kind, data);
        }
        ControlData::parse(&control, control.used())
    }

    #[test]
    fn address_ecn_segment_size_and_time_are_read() {
        let mut info = [0_u8; 12];
        info[8..].copy_from_slice(&[192, 0, 2, 1]);
        let meta = parse(&[
            (libc::IPPROTO_IP, libc::IP_PKTINFO, &info),
            (libc::IPPROTO_IP, libc::IP_TOS, &[0b1011_1001]),
            (libc::SOL_UDP, libc::UDP_GRO, &1200_i32.to_ne_bytes()),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, &[7_i64.to_ne_bytes(), 9_i64.to_ne_bytes()].concat()),
        ]);
        assert_eq!(
            meta,
            ControlData {
                local_ip: "192.0.2.1".parse().ok(),
                ecn: 1,
                segment_size: Some(1200),
                kernel_time: Some(Duration::new(7, 9)),
            }
        );
    }

    #[test]
    fn a_mapped_local_address_is_returned_as_ipv4() {
        let mut info = [0_u8; 20];
        info[..16].copy_from_slice(&"::ffff:192.0.2.1".parse::<Ipv6Addr>().unwrap().octets());
        let meta = parse(&[
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &3_i32.to_ne_bytes()),
        ]);
        let local_ip = "192.0.2.1".parse().ok();
        assert_eq!(meta, ControlData { local_ip, ecn: 3, ..ControlData::default() });
    }

    #[test]
    fn short_and_negative_values_are_ignored() {
        let meta = parse(&[
            (libc::IPPROTO_IP, libc::IP_PKTINFO, &[0; 4]),
            (libc::SOL_UDP, libc::UDP_GRO, &(-1_i32).to_ne_bytes()),
        ]);
        assert_eq!(meta, ControlData::default());
    }

    #[test]
    fn a_slot_reuses_its_memory_if_all_parts_have_been_dropped() {
        let (mut slot, mut retained) = (Slot::default(), RetainedBuffers::default());
        slot.reserve(&mut retained);
        let base = slot.buffer.as_ptr() as usize;
        for _ in 0..1000 {
            slot.buffer.extend_from_slice(&[7; 1200]);
            drop(slot.buffer.split());
            slot.reserve(&mut retained);
            assert!(slot.buffer.capacity() >= MAX_DATAGRAM_BYTES);
            assert!((base..base + BUFFER_BYTES).contains(&(slot.buffer.as_ptr() as usize)), "moved");
        }
    }

    #[test]
    fn a_slot_takes_new_memory_while_parts_of_the_old_are_in_use() {
        let (mut slot, mut retained) = (Slot::default(), RetainedBuffers::default());
        slot.reserve(&mut retained);
        slot.buffer.resize(MAX_DATAGRAM_BYTES, 1);
        let first = slot.buffer.split();
        slot.reserve(&mut retained);
        slot.buffer.resize(MAX_DATAGRAM_BYTES, 2);
        let second = slot.buffer.split();
        slot.reserve(&mut retained);
        assert!(slot.buffer.capacity() >= MAX_DATAGRAM_BYTES);
        assert!(first.iter().all(|&b| b == 1) && second.iter().all(|&b| b == 2));
    }

    /// Fills the buffer of a slot, and returns one datagram of it.
    fn one_of(slot: &mut Slot, retained: &mut RetainedBuffers) -> BytesMut {
        slot.reserve(retained);
        slot.buffer.resize(slot.buffer.capacity() - 1000, 3);
        slot.buffer.split().split_to(100)
    }

    #[test]
    fn a_retained_buffer_is_used_again_once_its_parts_are_dropped() {
        let (mut slot, mut retained) = (Slot::default(), RetainedBuffers::default());
        let first = one_of(&mut slot, &mut retained);
        let place = first.as_ptr();
        let _second = one_of(&mut slot, &mut retained);
        drop(first);
        assert_eq!(one_of(&mut slot, &mut retained).as_ptr(), place);
    }

    #[test]
    fn datagrams_are_copied_when_too_many_buffers_are_retained() {
        let (mut slot, mut retained) = (Slot::default(), RetainedBuffers::default());
        let mut all = Vec::new();
        while !retained.exceed_limit() {
            assert!(all.len() <= MAX_RETAINED_BUFFERS + 1);
            all.push(one_of(&mut slot, &mut retained));
        }
        // Datagrams received from now on are copied into memory of their own.
        let data = BytesMut::from_iter((0..=255).cycle().take(2500));
        let received = Received {
            data: data.clone(),
            remote: "192.0.2.1:1".parse().unwrap(),
            local_ip: None,
            ecn: 0,
            arrived: Instant::now(),
            segment_size: 1200,
            copies_datagrams: true,
        };
        let datagrams: Vec<_> = received.datagrams().collect();
        assert_eq!(datagrams.iter().map(BytesMut::len).collect::<Vec<_>>(), [1200, 1200, 100]);
        assert_eq!(datagrams.concat(), data);
        assert!(datagrams.iter().all(|datagram| datagram.capacity() < 2 * 1200));
        // This ends when retained buffers are free again.
        all.truncate(MAX_RETAINED_BUFFERS);
        for _ in 0..=MAX_RETAINED_BUFFERS {
            retained.release_one();
        }
        assert!(!retained.exceed_limit());
    }
}
