//! UDP sockets for QUIC, with segmentation offload (GSO, GRO).
//!
//! In: datagrams to send, alone or as a train: several datagrams of the same size to one receiver, which the
//! kernel or the device cuts apart (UDP_SEGMENT). Out: datagrams received, with sender, local address, ECN
//! bits and time of arrival. Always holds: sockets are nonblocking; datagrams are never fragmented, and the
//! kernel's path MTU is ignored (IP_PMTUDISC_PROBE), because QUIC discovers it (RFC 9000, 14.3); once buffers
//! exist, receiving neither allocates nor zero-fills memory for each datagram; IPv4-mapped addresses never
//! leave this module.

pub(crate) mod address;
mod arrival;
mod connected;
mod control;
mod receive;
mod send;
mod steer;

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use address::{Family, RawAddress};
pub use connected::ConnectedUdp;
pub use receive::{Received, RecvBatch};
use send::Sender;
pub use send::{MAX_GSO_BYTES, MAX_GSO_SEGMENTS, Outgoing, SendFailure};
pub use steer::bind_reuseport_group;

use crate::{
    error::OsError,
    option::{check, set_buffer, set_bytes, set_int},
};

/// Options of a UDP socket.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The address to bind; port 0 lets the kernel choose.
    pub local: SocketAddr,
    /// The device to bind to (SO_BINDTODEVICE): packets leave and arrive only there.
    pub device: Option<String>,
    /// The firewall mark of all packets sent (SO_MARK); needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// Whether other sockets may bind the same port.
    pub reuse: PortReuse,
    /// For an IPv6 address: whether the socket carries no IPv4 (IPV6_V6ONLY).
    pub v6only: bool,
    /// Bytes of the receive buffer: with CAP_NET_ADMIN beyond net.core.rmem_max, else up to it.
    pub recv_buffer: Option<usize>,
    /// Bytes of the send buffer: with CAP_NET_ADMIN beyond net.core.wmem_max, else up to it.
    pub send_buffer: Option<usize>,
    /// The DSCP of all packets sent (RFC 2474), 0 to 63.
    pub dscp: u8,
}

impl UdpOptions {
    /// Options for the address `local`, with the kernel's defaults for the rest.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            device: None,
            mark: None,
            reuse: PortReuse::Exclusive,
            v6only: false,
            recv_buffer: None,
            send_buffer: None,
            dscp: 0,
        }
    }
}

/// Whether several sockets can bind the same port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortReuse {
    /// Only this socket can bind the port.
    #[default]
    Exclusive,
    /// SO_REUSEPORT: the kernel spreads datagrams over the sockets of the same user.
    Shared,
}

/// A bound socket.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    sender: Sender,
}

impl UdpSocket {
    /// Creates and binds a socket.
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
        rustix::net::bind(&fd, &options.local)?;
        Ok(Self { fd, sender: Sender::new(family, options.dscp & 0x3f) })
    }

    /// The socket as the standard library has it, which waits in its calls and receives one datagram at a
    /// time.
    ///
    /// # Errors
    /// If the kernel does not make it wait.
    pub fn into_blocking(self) -> io::Result<std::net::UdpSocket> {
        // The standard library does not report the boundaries of joined datagrams. A kernel without the
        // option joins none.
        let _ = set_int(&self.fd, libc::SOL_UDP, libc::UDP_GRO, 0);
        let socket = std::net::UdpSocket::from(self.fd);
        socket.set_nonblocking(false)?;
        Ok(socket)
    }

    /// Connects the socket to `to`: from now on it receives from that address only. Datagrams of other
    /// senders that wait already are still received.
    ///
    /// # Errors
    /// If the kernel has no route to `to`.
    pub fn connect(&self, to: SocketAddr) -> io::Result<()> {
        let address = RawAddress::new(to, self.sender.family);
        // SAFETY: `address` outlives the call and has `length` valid bytes.
        check(unsafe { libc::connect(self.fd.as_raw_fd(), address.pointer(), address.length()) })
    }

    /// Sets the size of the receive buffer in bytes; with its own overhead the kernel uses about twice as
    /// many. Without CAP_NET_ADMIN at most net.core.rmem_max. Datagrams that wait already stay.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_recv_buffer(&self, bytes: usize) -> io::Result<()> {
        set_buffer(&self.fd, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, bytes)
    }

    /// Receives the messages that wait, at most one batch, and returns their number; 0 if none waits. Take
    /// them with [`RecvBatch::drain`].
    pub fn recv_batch(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        receive_batch(self.fd.as_fd(), batch)
    }

    /// Sends one message. If the device does not support segmentation offload, the datagrams of a train are
    /// sent one by one. [`SendFailure::of`] classifies errors.
    pub fn send(&self, out: &Outgoing<'_>) -> io::Result<()> {
        self.sender.send(self.fd.as_fd(), out)
    }

    /// The address that the socket is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = SocketAddr::try_from(rustix::net::getsockname(&self.fd)?)?;
        let ip = address.ip().to_canonical();
        Ok(if ip.is_ipv4() { SocketAddr::new(ip, address.port()) } else { address })
    }
}

crate::as_fd!(UdpSocket, fd);

/// How many transient errors of earlier datagrams one receive call skips. Each wakes the poller again, so a
/// limit only bounds the time that one socket takes from the others.
const MAX_TRANSIENT_ERRORS: usize = 8;

fn receive_batch(fd: BorrowedFd<'_>, batch: &mut RecvBatch) -> io::Result<usize> {
    for _ in 0..MAX_TRANSIENT_ERRORS {
        match batch.receive(fd) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) if is_transient(&error) => {}
            result => return result,
        }
    }
    Ok(0)
}

/// Whether an error reports the fate of an earlier datagram (by ICMP) and not a failure of this call.
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
    let domain = if family == Family::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(domain, SocketType::DGRAM, flags, None)?)
}

fn configure(fd: &OwnedFd, family: Family, options: &UdpOptions) -> io::Result<()> {
    if let Some(device) = &options.device {
        set_bytes(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())?;
    }
    if let Some(mark) = options.mark {
        set_int(fd, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())?;
    }
    if options.reuse == PortReuse::Shared {
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
    // Linux before 5.0 has no GRO for UDP sockets: every datagram is then received alone.
    let _ = set_int(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    set_int(fd, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    Ok(())
}
