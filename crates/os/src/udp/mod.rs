//! UDP sockets of the links.
//!
//! In: datagrams to send, alone or as trains of equal ones. Out: datagrams received, with sender, own
//! address and ECN bits. Always holds: nonblocking; fragments are never sent and the kernel's idea of
//! the path MTU is ignored (IP_PMTUDISC_PROBE), because QUIC discovers it (RFC 9000, 14.3); no
//! allocation and no zero-filling a datagram once buffers are warm; IPv4-mapped addresses never
//! leave this module.

pub(crate) mod address;
mod connected;
mod control;
mod receive;
mod send;
mod steer;

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use address::{Family, RawAddress};
pub use connected::ConnectedUdp;
pub use receive::{Received, RecvBatch};
use send::Sender;
pub use send::{MAX_GSO_BYTES, MAX_GSO_SEGMENTS, Outgoing, SendFailure};
pub use steer::bind_reuseport_group;

use crate::{
    error::OsError,
    option::{check, set_bytes, set_int},
};

/// How to make a socket.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The address to bind; port 0 lets the kernel choose.
    pub local: SocketAddr,
    /// The device to bind to: what is sent leaves there, what is received came in there.
    pub device: Option<String>,
    /// The firewall mark of everything sent; needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// Whether other sockets may have the same port.
    pub reuse: Reuse,
    /// For an IPv6 address: whether IPv4 is left to other sockets.
    pub v6only: bool,
    /// Bytes of the receive buffer, beyond the system's limit where allowed.
    pub recv_buffer: Option<usize>,
    /// Bytes of the send buffer, beyond the system's limit where allowed.
    pub send_buffer: Option<usize>,
    /// The DSCP of everything sent (RFC 2474), 0 to 63.
    pub dscp: u8,
}

impl UdpOptions {
    /// Options for `local`, everything else as the kernel has it.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            device: None,
            mark: None,
            reuse: Reuse::No,
            v6only: false,
            recv_buffer: None,
            send_buffer: None,
            dscp: 0,
        }
    }
}

/// Sharing of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// The port is ours alone.
    #[default]
    No,
    /// SO_REUSEPORT: the kernel spreads datagrams over the sockets of the same user.
    Port,
}

/// A bound socket.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    sender: Sender,
}

impl UdpSocket {
    /// Makes and binds a socket.
    pub fn bind(options: &UdpOptions) -> Result<Self, OsError> {
        Self::try_bind(options).map_err(|source| OsError::Bind {
            local: options.local,
            device: options.device.clone(),
            source,
        })
    }

    fn try_bind(options: &UdpOptions) -> io::Result<Self> {
        let family = Family::of(options.local);
        let fd = new_socket(family)?;
        configure(&fd, family, options)?;
        let address = RawAddress::new(options.local, family);
        // SAFETY: `address` outlives the call and has `length` valid bytes.
        check(unsafe { libc::bind(fd.as_raw_fd(), address.pointer(), address.length()) })?;
        Ok(Self { fd, sender: Sender::new(family, options.dscp & 0x3f) })
    }

    /// Receives from `to` alone from now on. What has come from others before stays.
    ///
    /// # Errors
    /// If the kernel knows no way there.
    pub fn connect(&self, to: SocketAddr) -> io::Result<()> {
        let address = RawAddress::new(to, self.sender.family());
        // SAFETY: `address` outlives the call and has `length` valid bytes.
        check(unsafe { libc::connect(self.fd.as_raw_fd(), address.pointer(), address.length()) })
    }

    /// Room for what is received and not taken yet (bytes), about twice as many with what the kernel needs to keep them; no
    /// more than net.core.rmem_max without CAP_NET_ADMIN. What waits already stays.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_recv_buffer(&self, bytes: usize) -> io::Result<()> {
        set_buffer(&self.fd, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, bytes)
    }

    /// Receives what is there, at most one batch, and returns how many messages came; 0 if nothing
    /// waits. Take them with [`RecvBatch::drain`].
    pub fn recv_batch(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        receive_batch(self.fd.as_fd(), batch)
    }

    /// Sends one message. A train that the device cannot take is sent one datagram a call.
    /// [`SendFailure::of`] tells what an error means.
    pub fn send(&self, out: &Outgoing<'_>) -> io::Result<()> {
        self.sender.send(self.fd.as_fd(), out)
    }

    /// The address that the socket is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let mut address = RawAddress::default();
        let mut length = RawAddress::ROOM;
        // SAFETY: `address` has `length` bytes of room, and both outlive the call.
        check(unsafe {
            libc::getsockname(self.fd.as_raw_fd(), address.pointer_mut().cast(), &raw mut length)
        })?;
        address.parse(length).ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn receive_batch(fd: BorrowedFd<'_>, batch: &mut RecvBatch) -> io::Result<usize> {
    for _ in 0..8 {
        match batch.receive(fd) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) if is_transient(&error) => {}
            result => return result,
        }
    }
    Ok(0)
}

/// Errors that tell of an earlier datagram (by ICMP), not of this socket.
fn is_transient(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(
        code,
        Some(
            libc::EINTR
                | libc::ECONNREFUSED
                | libc::ECONNRESET
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EPROTO
                | libc::EMSGSIZE
        )
    )
}

fn new_socket(family: Family) -> io::Result<OwnedFd> {
    let domain = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes no pointer; the result is checked before use.
    let fd = unsafe { libc::socket(domain, kind, 0) };
    check(fd)?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn configure(fd: &OwnedFd, family: Family, options: &UdpOptions) -> io::Result<()> {
    if let Some(device) = &options.device {
        set_bytes(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())?;
    }
    if let Some(mark) = options.mark {
        set_int(fd, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())?;
    }
    if options.reuse == Reuse::Port {
        set_int(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    }
    if let Some(bytes) = options.recv_buffer {
        set_buffer(fd, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, bytes)?;
    }
    if let Some(bytes) = options.send_buffer {
        set_buffer(fd, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, bytes)?;
    }
    if family == Family::V6 {
        set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, options.v6only.into())?;
        set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
        set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
    }
    if family == Family::V4 || !options.v6only {
        set_int(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        set_int(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    }
    if family == Family::V4 {
        set_int(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    // Linux before 5.0 does not join: then every datagram comes alone.
    let _ = set_int(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    Ok(())
}

/// Beyond the system's limit where we may, else up to it.
fn set_buffer(fd: &OwnedFd, force: libc::c_int, plain: libc::c_int, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::SOL_SOCKET, force, bytes).or_else(|_| set_int(fd, libc::SOL_SOCKET, plain, bytes))
}
