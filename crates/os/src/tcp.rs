//! TCP connections that this process opens or accepts.
//!
//! In: an address to connect to or to listen on, bytes to write. Out: the result of connecting, bytes
//! received. Always holds: sockets are nonblocking; Nagle's algorithm is off (TCP_NODELAY); a peer that has
//! disappeared is detected by keep-alives; writing never raises SIGPIPE; reads go into memory that was not
//! zeroed first. Where Multipath TCP (RFC 8684) is asked for and the kernel has none, the connection is plain
//! TCP.

mod counters;
mod mptcp;
mod options;

use std::{
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    time::Duration,
};

use bytes::BytesMut;
use derive_more::Into;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType, ipproto,
        sockopt,
    },
};

pub use counters::{SegmentCounters, set_congestion_control};
pub use mptcp::MptcpState;
pub use options::{KeepAlive, ListenOptions, Protocol, TcpOptions, Tuning};

use crate::{
    error::OsError,
    option::{number, read_bytes},
};

/// Most connections that wait to be accepted: the default of net.core.somaxconn since Linux 5.4, which caps
/// it. With fewer, SYNs of a burst of clients are dropped and repeated after a second; with more, clients
/// wait longer in the queue.
const BACKLOG: i32 = 4096;

/// A TCP connection, or one that is being established.
#[derive(Debug, Into)]
#[into(TcpStream)]
pub struct TcpSocket(OwnedFd);

impl TcpSocket {
    /// The address of this end.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(rustix::net::getsockname(&self.0)?.try_into()?)
    }

    /// The address of the peer.
    ///
    /// # Errors
    /// If the socket is not connected (any more).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let peer = rustix::net::getpeername(&self.0)?.ok_or(io::ErrorKind::NotConnected)?;
        Ok(peer.try_into()?)
    }

    /// The memory that the kernel uses for bytes that were not read yet, and for written bytes that were not
    /// acknowledged yet (SO_MEMINFO; bytes). 0 where the kernel does not say (Linux before 4.12).
    pub fn memory(&self) -> usize {
        // SK_MEMINFO_RMEM_ALLOC and SK_MEMINFO_WMEM_QUEUED of nine numbers (linux/sock_diag.h).
        let mut numbers = [0; 9 * 4];
        let found = read_bytes(&self.0, libc::SOL_SOCKET, libc::SO_MEMINFO, &mut numbers).unwrap_or_default();
        [0, 5].into_iter().filter_map(|at| number(found, at * 4)).map(|bytes| bytes as usize).sum()
    }

    /// Starts to connect with default options. The socket becomes writable when the attempt has ended; then
    /// [`Self::connect_result`] has its result.
    ///
    /// # Errors
    /// If the attempt fails at once: no route, no descriptors, or forbidden on this machine.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        let socket = Self::open(to, &TcpOptions::default())?;
        socket.start_connect(to)?;
        Ok(socket)
    }

    /// Creates a socket for the address family of `to` that does not connect yet.
    ///
    /// # Errors
    /// If the device does not exist or must not be bound to ([`io::ErrorKind::PermissionDenied`]: kernels
    /// before 5.7 allow it to root only), the mark must not be set, the local address is not one of this
    /// machine, or no descriptors are left.
    pub fn open(to: SocketAddr, options: &TcpOptions) -> io::Result<Self> {
        let fd = new_socket(to.ip(), options.protocol)?;
        options.apply(&fd)?;
        if let Some(local) = options.local {
            rustix::net::bind(&fd, &SocketAddr::new(local, 0))?;
        }
        Ok(Self(fd))
    }

    /// Starts to connect a socket from [`open`](Self::open). The socket becomes writable when the attempt has
    /// ended; then [`Self::connect_result`] has its result.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn start_connect(&self, to: SocketAddr) -> io::Result<()> {
        match rustix::net::connect(&self.0, &to) {
            // An interrupted connect(2) continues in the background.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Connects, and waits for up to `limit`. The connection is one of the standard library, which waits in
    /// its calls.
    ///
    /// # Errors
    /// Those of [`Self::open`], and why the connection was not established.
    pub fn connect_within(to: SocketAddr, options: &TcpOptions, limit: Duration) -> io::Result<TcpStream> {
        let socket = Self::open(to, options)?;
        socket.start_connect(to)?;
        let limit = Timespec::try_from(limit).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ready = poll(&mut [PollFd::new(&socket.0, PollFlags::OUT)], Some(&limit))?;
        if ready == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.connect_result()?;
        let stream = TcpStream::from(socket.0);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// The result of connecting; call it once the socket is writable.
    ///
    /// # Errors
    /// Why the connection was not established.
    pub fn connect_result(&self) -> io::Result<()> {
        self.take_error().map_or(Ok(()), Err)
    }

    /// Takes the pending error of the connection, if any (SO_ERROR). Each error is reported once, here or by
    /// the next read or write.
    pub fn take_error(&self) -> Option<io::Error> {
        match sockopt::socket_error(&self.0) {
            Ok(Ok(())) => None,
            Ok(Err(error)) | Err(error) => Some(error.into()),
        }
    }

    /// Appends up to `limit` bytes to `buffer`, within its spare capacity, and returns their number; 0 if the
    /// peer has ended its half (FIN).
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if no bytes wait, [`io::ErrorKind::InvalidInput`] if `buffer` has no
    /// spare capacity, or the error that ended the connection.
    pub fn read(&self, buffer: &mut BytesMut, limit: usize) -> io::Result<usize> {
        let spare = buffer.spare_capacity_mut();
        let room = spare.len().min(limit);
        if room == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let count = retry_on_intr(|| {
            rustix::net::recv(&self.0, &mut spare[..room], RecvFlags::empty()).map(|(_, count)| count)
        })?;
        let count = count.min(room);
        // SAFETY: the kernel wrote `count` bytes, at most the `room` that it was given, to the start of the
        // spare capacity.
        unsafe { buffer.set_len(buffer.len() + count) };
        Ok(count)
    }

    /// Writes the pieces in order and returns the number of bytes that the kernel took: at least one unless
    /// all pieces are empty.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the send buffer is full, or the error that ended the connection.
    pub fn write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        Ok(retry_on_intr(|| rustix::net::sendmsg(&self.0, pieces, &mut control, SendFlags::NOSIGNAL))?)
    }

    /// Ends this direction (FIN): the peer reads all that was written, then the end.
    pub fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.0, Shutdown::Write)?)
    }

    /// Closes the connection with RST: the peer sees an error, and bytes in flight are lost.
    pub fn reset(self) {
        // If the kernel refuses, the peer sees a FIN instead.
        let _ = sockopt::set_socket_linger(&self.0, Some(Duration::ZERO));
    }
}

fn new_socket(ip: IpAddr, protocol: Protocol) -> io::Result<OwnedFd> {
    let family = match ip {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let new = |protocol| rustix::net::socket_with(family, SocketType::STREAM, flags, protocol);
    let fd = match protocol {
        Protocol::Tcp => new(None),
        // A kernel without Multipath TCP, or with it disabled, refuses with various errors.
        Protocol::Mptcp => new(Some(ipproto::MPTCP)).or_else(|_| new(None)),
    };
    Ok(fd?)
}

/// A listening socket.
#[derive(Debug, Into)]
pub struct TcpAcceptor(TcpListener);

impl TcpAcceptor {
    /// Listens on `local`; port 0 lets the kernel choose.
    ///
    /// # Errors
    /// If the address is not one of this machine, or in use.
    pub fn bind(local: SocketAddr) -> Result<Self, OsError> {
        Self::listen(local, ListenOptions::default())
    }

    /// As [`Self::bind`], with options.
    ///
    /// # Errors
    /// Those of [`Self::bind`].
    pub fn listen(local: SocketAddr, options: ListenOptions) -> Result<Self, OsError> {
        let bind = || -> io::Result<_> {
            let fd = new_socket(local.ip(), options.protocol)?;
            // Connections of an earlier process in TIME_WAIT do not keep the port.
            sockopt::set_socket_reuseaddr(&fd, true)?;
            if local.is_ipv6() {
                sockopt::set_ipv6_v6only(&fd, options.v6only)?;
            }
            rustix::net::bind(&fd, &local)?;
            rustix::net::listen(&fd, BACKLOG)?;
            Ok(TcpListener::from(fd))
        };
        bind().map(Self).map_err(|source| OsError::Listen { local, source })
    }

    /// The address that the socket listens on.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Accepts the next connection; `None` if none waits.
    ///
    /// # Errors
    /// If this machine has no descriptors or no memory left.
    pub fn accept(&self) -> io::Result<Option<TcpSocket>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            match rustix::net::accept_with(&self.0, flags) {
                Ok(fd) => {
                    // A connection that is closed already cannot be configured; the next read reports its
                    // end.
                    let _ = Tuning::default().apply(&fd);
                    return Ok(Some(TcpSocket(fd)));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // The peer gave up before its connection was accepted: take the next one.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

crate::as_fd!(TcpAcceptor, 0);

/// The cause of a failed attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The target has no listener on that port (RST).
    Refused,
    /// No route, or the host is down.
    Unroutable,
    /// No answer.
    TimedOut,
    /// A firewall of this machine forbids it.
    Forbidden,
    /// This machine has no descriptors or no memory left.
    Exhausted,
    /// Something else.
    Other,
}

impl ConnectFailure {
    /// Classifies an error of connecting.
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ECONNREFUSED | libc::ECONNRESET) => Self::Refused,
            Some(
                libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EADDRNOTAVAIL
                | libc::EHOSTDOWN
                | libc::ENETDOWN
                | libc::EAFNOSUPPORT
                | libc::EINVAL,
            ) => Self::Unroutable,
            Some(libc::ETIMEDOUT) => Self::TimedOut,
            Some(libc::EACCES | libc::EPERM) => Self::Forbidden,
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EAGAIN) => {
                Self::Exhausted
            }
            _ => Self::Other,
        }
    }
}

crate::as_fd!(TcpSocket, 0);

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    use super::*;
    use crate::poll::{Events, Interest, Poller};

    fn wait(socket: &TcpSocket, interest: Interest) {
        let poller = Poller::new().unwrap();
        poller.add(socket, 0, interest).unwrap();
        let mut events = Events::with_capacity(1);
        assert_eq!(poller.wait(&mut events, Some(Duration::from_secs(5))).unwrap(), 1);
    }

    fn pair() -> (TcpSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpSocket::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        wait(&socket, Interest::Write);
        socket.connect_result().unwrap();
        (socket, peer)
    }

    #[test]
    fn bytes_go_both_ways_and_each_half_ends_by_itself() {
        let (socket, mut peer) = pair();
        let pieces = [IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two")];
        assert_eq!(socket.write(&pieces).unwrap(), 7);
        socket.finish().unwrap();
        let mut got = String::new();
        peer.read_to_string(&mut got).unwrap();
        assert_eq!(got, "one two");

        let mut buffer = BytesMut::with_capacity(8);
        assert_eq!(socket.read(&mut buffer, 8).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        peer.write_all(b"answer").unwrap();
        wait(&socket, Interest::Read);
        assert_eq!(socket.read(&mut buffer, 4).unwrap(), 4);
        assert_eq!(socket.read(&mut buffer, 100).unwrap(), 2);
        assert_eq!(&buffer[..], b"answer");
        drop(peer);
        wait(&socket, Interest::Read);
        buffer.reserve(1);
        assert_eq!(socket.read(&mut buffer, 1).unwrap(), 0);
    }

    #[test]
    fn a_buffer_without_room_is_an_error_and_not_the_end() {
        let (socket, _peer) = pair();
        let error = socket.read(&mut BytesMut::new(), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_reset_is_seen_at_both_ends() {
        let (socket, mut peer) = pair();
        socket.reset();
        let error = peer.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);

        let (socket, peer) = pair();
        sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        wait(&socket, Interest::Nothing);
        assert_eq!(socket.take_error().unwrap().kind(), io::ErrorKind::ConnectionReset);
        assert!(socket.take_error().is_none());
        assert!(socket.write(&[IoSlice::new(b"x")]).is_err(), "and no signal ends this process");
    }

    #[test]
    fn connections_are_accepted() {
        let acceptor = TcpAcceptor::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(acceptor.accept().unwrap().is_none());
        let local = acceptor.local_addr().unwrap();
        let mut peer = TcpStream::connect(local).unwrap();
        let socket = acceptor.accept().unwrap().unwrap();
        peer.write_all(b"hello").unwrap();
        wait(&socket, Interest::Read);
        let mut buffer = BytesMut::with_capacity(8);
        assert_eq!(socket.read(&mut buffer, 8).unwrap(), 5);
        let error = TcpAcceptor::bind(local).unwrap_err().to_string();
        assert!(error.contains(&local.to_string()), "{error}");
    }

    #[test]
    fn a_port_without_listener_refuses() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        drop(listener);
        let error = match TcpSocket::connect(to) {
            Err(error) => error,
            Ok(socket) => {
                wait(&socket, Interest::Write);
                socket.connect_result().unwrap_err()
            }
        };
        assert_eq!(ConnectFailure::of(&error), ConnectFailure::Refused);
    }
}
