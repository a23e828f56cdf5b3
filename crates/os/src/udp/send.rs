//! Sending: one datagram, or one train of datagrams of the same size (UDP_SEGMENT), a call.

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

/// Most datagrams in a train: UDP_MAX_SEGMENTS of Linux before 6.9, which refuses longer ones. Shorter ones
/// cost system calls.
pub const MAX_GSO_SEGMENTS: usize = 64;
/// Most bytes in a train: 65,535 of an IPv4 packet without IPv4 and UDP header (20 + 8). The kernel refuses
/// longer ones.
pub const MAX_GSO_BYTES: usize = 65_507;

/// Errors of earlier datagrams that one send skips. The kernel keeps one pending error of a socket, so more
/// come only if ICMP errors arrive meanwhile; with fewer a message would be lost, and without a limit the
/// loop could run on.
const MAX_STALE_ERRORS: usize = 3;

/// One message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The receiver. On an IPv6 socket IPv4 addresses are mapped.
    pub to: SocketAddr,
    /// The source address, for a socket bound to the unspecified address; `None`: the kernel's choice.
    pub from: Option<IpAddr>,
    /// The two ECN bits (RFC 3168).
    pub ecn: Option<u8>,
    /// The DSCP (RFC 2474), 0 to 63; 0 means the DSCP of the socket.
    pub dscp: u8,
    /// Bytes of each datagram in `data`, of which the last may be shorter; `None` for a single datagram.
    pub segment_size: Option<u16>,
    /// The payloads.
    pub data: &'a [u8],
}

impl Outgoing<'_> {
    fn is_train(&self) -> bool {
        self.segment_size.is_some_and(|size| size > 0 && self.data.len() > usize::from(size))
    }

    /// The control messages. `dscp` is the DSCP of the socket.
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
        // The kernel takes DSCP and ECN as one byte: a message with ECN only would reset the DSCP of the
        // socket.
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

/// The consequence of a failed send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendFailure {
    /// The send buffer is full: keep the message and wait until the socket is writable.
    Busy,
    /// The datagram is larger than the MTU of the link.
    TooBig,
    /// This message is lost; the link may work.
    Lost,
    /// The link cannot carry packets now: no device, no route, no address, or not permitted.
    LinkDown,
}

impl SendFailure {
    /// Classifies an error of [`super::UdpSocket::send`].
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

/// The state for sending on a socket: its address family, its DSCP, and whether its device supports trains.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) family: Family,
    dscp: u8,
    supports_trains: AtomicBool,
}

impl Sender {
    pub(super) fn new(family: Family, dscp: u8) -> Self {
        Self { family, dscp, supports_trains: AtomicBool::new(true) }
    }

    /// Whether trains are sent in one call.
    fn sends_trains(&self) -> bool {
        self.supports_trains.load(Ordering::Relaxed)
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

    /// Whether an error means that this train has to be sent one datagram at a time. EIO: the device cannot
    /// compute checksums, so no train is tried again. EINVAL, EMSGSIZE: this train is too long, or its
    /// datagrams exceed the MTU.
    fn refuses_trains(&self, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(libc::EIO) => {
                self.supports_trains.store(false, Ordering::Relaxed);
                true
            }
            Some(libc::EINVAL | libc::EMSGSIZE) => true,
            _ => false,
        }
    }

    /// Sends the datagrams of a train one by one and returns the first error. If the send buffer is full for
    /// the first datagram, that error is returned and nothing was sent; if it is full for a later one,
    /// the rest of the train is lost.
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

    /// Sends with one sendmsg(2), repeated after errors of earlier datagrams (as ECONNREFUSED), each of which
    /// the kernel reports once in place of sending.
    fn send_message(&self, fd: BorrowedFd<'_>, out: &Outgoing<'_>) -> io::Result<()> {
        for _ in 0..MAX_STALE_ERRORS {
            match send_once(fd, out, self.family, self.dscp) {
                Err(error) if is_stale(&error) => {}
                result => return result,
            }
        }
        send_once(fd, out, self.family, self.dscp)
    }
}

/// Whether an error belongs to an earlier datagram, or a signal interrupted the call.
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
    // SAFETY: the header points to the address, the piece and the control messages in this frame, and to the
    // bytes of `out`, none of which moves before the call returns; the kernel only reads them.
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
    fn a_single_datagram_is_no_train_whatever_the_segment_size() {
        for segment in [None, Some(0), Some(3), Some(9)] {
            assert!(!Outgoing { segment_size: segment, ..out("[::1]:1", b"abc") }.is_train(), "{segment:?}");
        }
    }

    #[test]
    fn failures_are_classified_by_their_consequence() {
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
