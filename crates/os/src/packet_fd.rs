//! A descriptor that carries one IP packet per read and per write, without any header: the TUN device that
//! Android's `VpnService` gives to an app, or one end of a pair of datagram sockets.
//!
//! Always holds: the descriptor is nonblocking, and writing to it never raises SIGPIPE.

use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{FileType, OFlags},
    io::retry_on_intr,
    net::{RecvFlags, SendFlags, SocketType, sockopt::socket_type},
};

use crate::error::OsError;

/// An open descriptor for packets.
#[derive(Debug)]
pub struct PacketFd {
    fd: OwnedFd,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A character device, as a TUN device.
    Device,
    /// A SOCK_SEQPACKET socket: a read of 0 bytes means that the other end is closed.
    Sequenced,
    /// A SOCK_DGRAM socket: a read of 0 bytes is an empty packet, and the end cannot be detected.
    Datagrams,
}

impl PacketFd {
    /// Takes ownership of the descriptor and makes it, and with it all its duplicates, nonblocking.
    ///
    /// # Errors
    /// If the descriptor does not keep the boundaries of packets: a stream socket, a pipe or a regular file.
    pub fn new(fd: OwnedFd) -> Result<Self, OsError> {
        let kernel = |e| OsError::kernel("use", "the descriptor for packets", e);
        let kind = match FileType::from_raw_mode(rustix::fs::fstat(&fd).map_err(kernel)?.st_mode) {
            FileType::Socket => match socket_type(&fd).map_err(kernel)? {
                SocketType::SEQPACKET => Kind::Sequenced,
                SocketType::DGRAM => Kind::Datagrams,
                _ => return Err(OsError::NotPacketOriented { kind: "a stream socket" }),
            },
            FileType::CharacterDevice => Kind::Device,
            FileType::Fifo => return Err(OsError::NotPacketOriented { kind: "a pipe" }),
            _ => return Err(OsError::NotPacketOriented { kind: "neither a device nor a socket" }),
        };
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(kernel)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(kernel)?;
        Ok(Self { fd, kind })
    }

    /// Reads one packet and returns its length in bytes. The part of a packet that does not fit into `buffer`
    /// is lost.
    ///
    /// # Errors
    /// `WouldBlock` if no packet waits, `UnexpectedEof` if the other end is closed.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = retry_on_intr(|| match self.kind {
            Kind::Device => rustix::io::read(&self.fd, &mut *buffer),
            _ => rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::empty()).map(|(length, _)| length),
        })?;
        match length {
            0 if self.kind != Kind::Datagrams => Err(io::ErrorKind::UnexpectedEof.into()),
            length => Ok(length),
        }
    }

    /// Writes one packet.
    ///
    /// # Errors
    /// `WouldBlock` if the buffer of the kernel is full.
    pub fn write(&self, packet: &[u8]) -> io::Result<()> {
        retry_on_intr(|| match self.kind {
            Kind::Device => rustix::io::write(&self.fd, packet),
            _ => rustix::net::send(&self.fd, packet, SendFlags::NOSIGNAL),
        })?;
        Ok(())
    }
}

crate::as_fd!(PacketFd, fd);

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, socketpair};

    use super::*;

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn packets_keep_their_boundaries_and_the_end_is_reported() {
        let (one, other) = pair(SocketType::SEQPACKET);
        let (one, other) = (PacketFd::new(one).unwrap(), PacketFd::new(other).unwrap());
        let mut buffer = [0; 100];
        assert_eq!(one.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        other.write(b"first").unwrap();
        other.write(b"second").unwrap();
        assert_eq!((one.read(&mut buffer).unwrap(), &buffer[..5]), (5, &b"first"[..]));
        assert_eq!((one.read(&mut buffer).unwrap(), &buffer[..6]), (6, &b"second"[..]));
        drop(other);
        assert_eq!(one.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(one.write(b"for nobody").is_err());
    }

    #[test]
    fn an_empty_datagram_is_not_the_end() {
        let (one, other) = pair(SocketType::DGRAM);
        let (one, other) = (PacketFd::new(one).unwrap(), PacketFd::new(other).unwrap());
        other.write(b"").unwrap();
        assert_eq!(one.read(&mut [0; 10]).unwrap(), 0);
    }

    #[test]
    fn a_descriptor_without_packet_boundaries_is_refused() {
        for fd in [
            pair(SocketType::STREAM).0,
            rustix::pipe::pipe().unwrap().0,
            std::fs::File::open("/proc/self/exe").unwrap().into(),
        ] {
            let error = PacketFd::new(fd).unwrap_err().to_string();
            assert!(error.contains("one packet a read"), "{error}");
        }
    }
}
