//! TCP connections that this process opens or takes.
//!
//! In: an address to connect to or to listen on, bytes to write. Out: whether the connection stands, bytes that came. Always holds:
//! nonblocking; nothing is delayed to fill segments (TCP_NODELAY), and a far end that is gone is found by keep-alives;
//! writing never raises SIGPIPE; what is read goes into memory that was not zeroed first.

use std::{
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use bytes::BytesMut;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType, sockopt,
    },
};

use crate::error::OsError;

/// The far end is asked whether it is still there after so long without anything from it.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEP_ALIVE_PAUSE: Duration = Duration::from_secs(15);
/// So many questions without an answer end the connection.
const KEEP_ALIVE_COUNT: u32 = 5;

/// A connection, or an attempt at one.
#[derive(Debug)]
pub struct TcpSocket(OwnedFd);

impl TcpSocket {
    /// Starts to connect. The socket becomes writable when that has come to an end: [`Self::connected`] tells which.
    ///
    /// # Errors
    /// Where the kernel knows at once that it cannot be: no route, no descriptors, or a refusal of this machine.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        let family = match to.ip() {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        configure(&fd)?;
        match rustix::net::connect(&fd, &to) {
            // An interrupted call goes on by itself.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(Self(fd)),
            Err(error) => Err(error.into()),
        }
    }

    /// What became of connecting, once the socket is writable.
    ///
    /// # Errors
    /// Why there is no connection.
    pub fn connected(&self) -> io::Result<()> {
        self.take_error().map_or(Ok(()), Err)
    }

    /// The address of the far end.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = rustix::net::getpeername(&self.0)?.ok_or(io::ErrorKind::NotConnected)?;
        SocketAddr::try_from(address).map_err(io::Error::from)
    }

    /// What broke the connection, if anything did. It is told once, here or by the next call that reads or writes.
    pub fn take_error(&self) -> Option<io::Error> {
        match sockopt::socket_error(&self.0) {
            Ok(Ok(())) => None,
            Ok(Err(error)) | Err(error) => Some(error.into()),
        }
    }

    /// Reads up to `limit` bytes into what `buffer` has room for, behind what is in it, and returns how many came; 0
    /// if the far end has ended its half.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if nothing is there, or what broke the connection.
    pub fn read(&self, buffer: &mut BytesMut, limit: usize) -> io::Result<usize> {
        let spare = buffer.spare_capacity_mut();
        let room = spare.len().min(limit);
        if room == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let count = loop {
            match rustix::net::recv(&self.0, &mut spare[..room], RecvFlags::empty()) {
                Ok((_, count)) => break count.min(room),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        // SAFETY: the kernel wrote `count` bytes, at most the `room` that it was given, to the start of the spare
        // capacity.
        unsafe { buffer.set_len(buffer.len() + count) };
        Ok(count)
    }

    /// Writes the pieces in order and returns how many bytes went; at least one, if there is one.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is no room, or what broke the connection.
    pub fn write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let mut control = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.0, pieces, &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Ends our half: the far end reads to the end of what was written.
    pub fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.0, Shutdown::Write)?)
    }

    /// Ends both halves at once; the far end sees that the connection broke, and loses what was on its way.
    pub fn reset(self) {
        // Where it is refused, the far end sees an orderly end instead.
        let _ = sockopt::set_socket_linger(&self.0, Some(Duration::ZERO));
    }
}

fn configure(fd: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(fd, KEEP_ALIVE_PAUSE)?;
    sockopt::set_tcp_keepcnt(fd, KEEP_ALIVE_COUNT)
}

/// Takes connections of others.
#[derive(Debug)]
pub struct TcpAcceptor(TcpListener);

impl TcpAcceptor {
    /// Listens on `local`; port 0 lets the kernel choose.
    ///
    /// # Errors
    /// If the address is not one of this machine, or taken.
    pub fn bind(local: SocketAddr) -> Result<Self, OsError> {
        let bind = || {
            let listener = TcpListener::bind(local)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        bind().map(Self).map_err(|source| OsError::Listen { local, source })
    }

    /// The address that it listens on.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The next connection; `None` if nobody waits.
    ///
    /// # Errors
    /// If this machine has no descriptors or no memory left.
    pub fn accept(&self) -> io::Result<Option<TcpSocket>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            match rustix::net::accept_with(&self.0, flags) {
                Ok(fd) => {
                    // One that is closed again already cannot be configured; reading tells.
                    let _ = configure(&fd);
                    return Ok(Some(TcpSocket(fd)));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // Who left before it was their turn.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for TcpAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What an error of connecting means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// Nobody listens there.
    Refused,
    /// No route leads there, or the host is down.
    Unroutable,
    /// There was no answer.
    TimedOut,
    /// A firewall forbids it.
    Forbidden,
    /// This machine has no descriptors or no memory left.
    Exhausted,
    /// Something else.
    Other,
}

impl ConnectFailure {
    /// What `error` means.
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

impl AsFd for TcpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

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
        socket.connected().unwrap();
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
    fn connections_of_others_are_taken() {
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
    fn nobody_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        drop(listener);
        let error = match TcpSocket::connect(to) {
            Err(error) => error,
            Ok(socket) => {
                wait(&socket, Interest::Write);
                socket.connected().unwrap_err()
            }
        };
        assert_eq!(ConnectFailure::of(&error), ConnectFailure::Refused);
    }
}
