//! Sending: one datagram or a train of equal ones (UDP_SEGMENT) a call.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    address::{Family, RawAddress},
    control::Control,
};

/// A train may have no more datagrams than this (UDP_MAX_SEGMENTS of Linux before 6.9).
pub const MAX_GSO_SEGMENTS: usize = 64;
/// A train may have no more bytes than this: 65,535 without IPv4 and UDP header.
pub const MAX_GSO_BYTES: usize = 65_507;

/// One message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The receiver; plain IPv4 addresses are fine on an IPv6 socket.
    pub to: SocketAddr,
    /// The source address, for sockets bound to a wildcard; else the kernel's choice.
    pub from: Option<IpAddr>,
    /// The two ECN bits (RFC 3168).
    pub ecn: Option<u8>,
    /// The DSCP (RFC 2474), 0 to 63; 0 is that of the socket.
    pub dscp: u8,
    /// Bytes of each datagram in `data`; `None` if it is only one.
    pub segment_size: Option<u16>,
    /// The bytes.
    pub data: &'a [u8],
}

impl Outgoing<'_> {
    fn is_train(&self) -> bool {
        self.segment_size.is_some_and(|size| size > 0 && self.data.len() > usize::from(size))
    }

    /// `dscp`: what the socket's packets are marked with, beside their ECN bits.
    fn control(&self, dscp: u8) -> Control {
        let dscp = if self.dscp > 0 { self.dscp & 0x3f } else { dscp };
        let mut control = Control::default();
        match self.from {
            Some(IpAddr::V4(ip)) => {
                // struct in_pktinfo: index, source address, unused.
                let mut info = [0_u8; 12];
                info[4..8].copy_from_slice(&ip.octets());
                control.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
            }
            Some(IpAddr::V6(ip)) => {
                let mut info = [0_u8; 20];
                info[..16].copy_from_slice(&ip.octets());
                control.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
            None => {}
        }
        // The kernel takes both fields in one: a socket's own value would be lost wherever ECN is set.
        if self.ecn.is_some() || dscp != 0 {
            let value = libc::c_int::from(dscp << 2 | self.ecn.unwrap_or(0) & 0b11).to_ne_bytes();
            match self.to {
                SocketAddr::V4(_) => control.push(libc::IPPROTO_IP, libc::IP_TOS, &value),
                SocketAddr::V6(_) => control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &value),
            }
        }
        if let (true, Some(size)) = (self.is_train(), self.segment_size) {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, &size.to_ne_bytes());
        }
        control
    }
}

/// What a failed send means for the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendFailure {
    /// The socket is full: keep the message and wait for room.
    Busy,
    /// The datagram is larger than the link takes.
    TooBig,
    /// This message is lost, the link may be fine.
    Lost,
    /// The link cannot carry anything now: no device, no route, no address, not allowed.
    LinkDown,
}

impl SendFailure {
    /// Sorts an error of [`super::UdpSocket::send`].
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Self::Busy,
            Some(libc::EMSGSIZE) => Self::TooBig,
            Some(
                libc::ENETUNREACH
                | libc::ENETDOWN
                | libc::ENODEV
                | libc::ENXIO
                | libc::EPERM
                | libc::EACCES
                | libc::EADDRNOTAVAIL
                | libc::EINVAL,
            ) => Self::LinkDown,
            _ => Self::Lost,
        }
    }
}

/// The sending half of a socket: its family, and whether its device takes trains.
#[derive(Debug)]
pub(super) struct Sender {
    family: Family,
    dscp: u8,
    trains: AtomicBool,
}

impl Sender {
    pub(super) fn new(family: Family, dscp: u8) -> Self {
        Self { family, dscp, trains: AtomicBool::new(true) }
    }

    /// What addresses the socket takes.
    pub(super) fn family(&self) -> Family {
        self.family
    }

    /// Whether trains leave in one call.
    fn sends_trains(&self) -> bool {
        self.trains.load(Ordering::Relaxed)
    }

    pub(super) fn send(&self, fd: BorrowedFd<'_>, out: &Outgoing<'_>) -> io::Result<()> {
        if !out.is_train() {
            return self.send_message(fd, out);
        }
        if self.sends_trains() && out.data.len() <= MAX_GSO_BYTES {
            match self.send_message(fd, out) {
                Err(error) if self.refuses_trains(&error) => {}
                result => return result,
            }
        }
        self.send_one_by_one(fd, out)
    }

    /// EIO: the device cannot compute checksums, for good. EINVAL, EMSGSIZE: this train is too long,
    /// or its datagrams exceed the MTU.
    fn refuses_trains(&self, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(libc::EIO) => {
                self.trains.store(false, Ordering::Relaxed);
                true
            }
            Some(libc::EINVAL | libc::EMSGSIZE) => true,
            _ => false,
        }
    }

    /// Sends all datagrams of a train and returns the first error. When even the first finds the
    /// socket full, nothing was sent; when a later one does, the rest of the train is lost.
    fn send_one_by_one(&self, fd: BorrowedFd<'_>, out: &Outgoing<'_>) -> io::Result<()> {
        let size = out.segment_size.map_or(out.data.len(), usize::from).max(1);
        let mut first_error = None;
        for (index, data) in out.data.chunks(size).enumerate() {
            match self.send_message(fd, &Outgoing { segment_size: None, data, ..*out }) {
                Ok(()) => {}
                Err(error) if SendFailure::of(&error) == SendFailure::Busy => {
                    return if index == 0 { Err(error) } else { Ok(()) };
                }
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// One `sendmsg`. An error left behind by an earlier datagram (as ECONNREFUSED) is reported by
    /// the kernel once and says nothing of this one, so further tries follow.
    fn send_message(&self, fd: BorrowedFd<'_>, out: &Outgoing<'_>) -> io::Result<()> {
        for _ in 0..3 {
            match send_once(fd, out, self.family, self.dscp) {
                Err(error) if is_stale(&error) => {}
                result => return result,
            }
        }
        send_once(fd, out, self.family, self.dscp)
    }
}

fn is_stale(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::ECONNREFUSED | libc::ECONNRESET | libc::EPROTO))
}

fn send_once(fd: BorrowedFd<'_>, out: &Outgoing<'_>, family: Family, dscp: u8) -> io::Result<()> {
    let (address, mut control) = (RawAddress::new(out.to, family), out.control(dscp));
    let mut piece = libc::iovec { iov_base: out.data.as_ptr().cast_mut().cast(), iov_len: out.data.len() };
    // SAFETY: an all-zero header is valid: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = address.pointer().cast_mut().cast();
    message.msg_namelen = address.length();
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    if control.used() > 0 {
        message.msg_control = control.pointer_mut();
        message.msg_controllen = control.used() as _;
    }
    // SAFETY: the header points to the address, the piece and the control messages in this frame, and to the bytes of `out`,
    // none of which moves before the call returns; the kernel only reads them.
    let result = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out(to: &str, data: &'static [u8]) -> Outgoing<'static> {
        Outgoing { to: to.parse().unwrap(), from: None, ecn: None, dscp: 0, segment_size: None, data }
    }

    #[test]
    fn a_plain_datagram_carries_no_control_message() {
        assert_eq!(out("192.0.2.1:1", b"x").control(0).used(), 0);
    }

    #[test]
    fn a_train_carries_size_source_and_ecn() {
        let message = Outgoing {
            segment_size: Some(2),
            ecn: Some(1),
            from: "192.0.2.9".parse().ok(),
            ..out("192.0.2.1:1", b"abcde")
        };
        let control = message.control(0);
        let list: Vec<_> = control.messages(control.used()).map(|(l, k, d)| (l, k, d.len())).collect();
        assert_eq!(
            list,
            [
                (libc::IPPROTO_IP, libc::IP_PKTINFO, 12),
                (libc::IPPROTO_IP, libc::IP_TOS, 4),
                (libc::SOL_UDP, libc::UDP_SEGMENT, 2)
            ]
        );
    }

    #[test]
    fn dscp_and_ecn_share_a_byte() {
        let byte = |ecn, dscp| {
            let control = Outgoing { ecn, ..out("[2001:db8::1]:1", b"x") }.control(dscp);
            let found = control.messages(control.used()).map(|(level, kind, data)| (level, kind, data[0]));
            found.collect::<Vec<_>>()
        };
        let class = |value| vec![(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, value)];
        assert_eq!(byte(Some(2), 46), class(0xba));
        assert_eq!(byte(None, 46), class(0xb8));
        assert_eq!(byte(Some(1), 0), class(1));
        assert_eq!(byte(None, 0), []);
    }

    #[test]
    fn one_datagram_is_no_train_whatever_the_segment_size() {
        for segment in [None, Some(0), Some(3), Some(9)] {
            assert!(!Outgoing { segment_size: segment, ..out("[::1]:1", b"abc") }.is_train(), "{segment:?}");
        }
    }

    #[test]
    fn failures_are_sorted_by_what_to_do() {
        let sort = |errno| SendFailure::of(&io::Error::from_raw_os_error(errno));
        assert_eq!(sort(libc::EAGAIN), SendFailure::Busy);
        assert_eq!(sort(libc::EMSGSIZE), SendFailure::TooBig);
        assert_eq!(sort(libc::ENETUNREACH), SendFailure::LinkDown);
        assert_eq!(sort(libc::ENODEV), SendFailure::LinkDown);
        assert_eq!(sort(libc::EPERM), SendFailure::LinkDown);
        assert_eq!(sort(libc::ENOBUFS), SendFailure::Lost);
        assert_eq!(sort(libc::ECONNREFUSED), SendFailure::Lost);
    }
}
