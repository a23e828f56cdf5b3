//! Sockets for ICMP echo requests, as of ping(8).
//!
//! In: an address, and the device through which it is asked. Out: echo requests, and the replies to them.
//! Always holds: only replies with the identifier of the socket count; a message that is not understood is
//! skipped. Calls wait.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::atomic::{AtomicU16, Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, getsockname, ipproto, recv,
        send, socket_with,
    },
};

use crate::option::set_bytes;

/// Bytes of the header of an echo message (RFC 792, RFC 4443 §4.1).
const HEADER_BYTES: usize = 8;
/// Largest message that is received: any IP packet.
const MAX_MESSAGE_BYTES: usize = 65_535;

/// A socket that asks one address.
#[derive(Debug)]
pub struct EchoSocket {
    fd: OwnedFd,
    /// Messages are received with their IP header.
    has_ip_header: bool,
    is_v4: bool,
    identifier: u16,
}

/// A reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EchoReply {
    /// The sequence number of the request.
    pub sequence: u16,
    /// When it was received.
    pub at: Instant,
}

impl EchoSocket {
    /// Opens a socket for `to`. With a `device` packets leave and arrive only there (SO_BINDTODEVICE).
    ///
    /// # Errors
    /// If this user may not send echo requests, there is no such device, or no route to the address.
    pub fn open(to: IpAddr, device: Option<&str>) -> io::Result<Self> {
        let is_v4 = to.is_ipv4();
        let (family, protocol) = match is_v4 {
            true => (AddressFamily::INET, ipproto::ICMP),
            false => (AddressFamily::INET6, ipproto::ICMPV6),
        };
        let open = |kind| socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol));
        // Sockets without privilege are for the groups of net.ipv4.ping_group_range only, by default for
        // none.
        let (fd, is_raw) = match open(SocketType::DGRAM) {
            Err(Errno::ACCESS | Errno::PERM | Errno::PROTONOSUPPORT) => (open(SocketType::RAW)?, true),
            fd => (fd?, false),
        };
        if let Some(device) = device {
            set_bytes(&fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())?;
        }
        connect(&fd, &SocketAddr::new(to, 0))?;
        let identifier = match is_raw {
            true => raw_identifier(),
            false => SocketAddr::try_from(getsockname(&fd)?)?.port(),
        };
        Ok(Self { fd, has_ip_header: is_raw && is_v4, is_v4, identifier })
    }

    /// The identifier of its requests.
    pub fn identifier(&self) -> u16 {
        self.identifier
    }

    /// Sends a request with `payload_bytes` of data.
    ///
    /// # Errors
    /// If the kernel refuses: no route, or a message that is too long.
    pub fn send(&self, sequence: u16, payload_bytes: usize) -> io::Result<()> {
        let mut message = vec![0; HEADER_BYTES + payload_bytes];
        message[0] = if self.is_v4 { 8 } else { 128 };
        message[4..6].copy_from_slice(&self.identifier.to_be_bytes());
        message[6..8].copy_from_slice(&sequence.to_be_bytes());
        if self.is_v4 {
            // The data is zero, so only the header counts (RFC 1071). The kernel computes the checksum of
            // ICMPv6.
            let sum = 0x0800 + u32::from(self.identifier) + u32::from(sequence);
            let sum = (sum & 0xffff) + (sum >> 16);
            let check = !((sum & 0xffff) + (sum >> 16)) as u16;
            message[2..4].copy_from_slice(&check.to_be_bytes());
        }
        retry_on_intr(|| send(&self.fd, &message, SendFlags::empty()))?;
        Ok(())
    }

    /// Waits for a reply until `deadline`; `None` if none comes.
    ///
    /// # Errors
    /// If the socket cannot be read any more. An ICMP error about a request is an error, too: the socket
    /// works on.
    pub fn receive(&self, deadline: Instant) -> io::Result<Option<EchoReply>> {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.wait(left)? {
                return Ok(None);
            }
            let length = match recv(&self.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, length)) => length.min(buffer.len()),
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(error) => return Err(error.into()),
            };
            let at = Instant::now();
            if let Some(sequence) = self.sequence_of(&buffer[..length]) {
                return Ok(Some(EchoReply { sequence, at }));
            }
        }
    }

    fn wait(&self, limit: Duration) -> io::Result<bool> {
        let limit = Timespec::try_from(limit).map_err(|_| ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(!limit_is_over(&limit)),
            Err(error) => Err(error.into()),
        }
    }

    /// The sequence number of a reply to this socket.
    fn sequence_of(&self, message: &[u8]) -> Option<u16> {
        let at = match self.has_ip_header {
            // The length of the header in words (RFC 791 §3.1).
            true => usize::from(message.first()? & 0xf) * 4,
            false => 0,
        };
        let header: &[u8; HEADER_BYTES] = message.get(at..)?.first_chunk()?;
        let reply = if self.is_v4 { 0 } else { 129 };
        let is_own = header[0] == reply && header[4..6] == self.identifier.to_be_bytes();
        is_own.then(|| u16::from_be_bytes([header[6], header[7]]))
    }
}

crate::as_fd!(EchoSocket, fd);

fn limit_is_over(limit: &Timespec) -> bool {
    limit.tv_sec == 0 && limit.tv_nsec == 0
}

/// An identifier for a raw socket, which the kernel does not give one: each socket of this process has
/// another, and processes begin at different ones.
fn raw_identifier() -> u16 {
    static SOCKETS: AtomicU16 = AtomicU16::new(0);
    (std::process::id() as u16).wrapping_mul(16).wrapping_add(SOCKETS.fetch_add(1, Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_answers_its_own_requests() {
        for to in ["127.0.0.1", "::1"] {
            let socket = match EchoSocket::open(to.parse().unwrap(), Some("lo")) {
                Ok(socket) => socket,
                Err(error) if error.kind() == ErrorKind::PermissionDenied => return,
                // A machine without IPv6.
                Err(error) if to == "::1" => return eprintln!("skipped: {error}"),
                Err(error) => panic!("{error}"),
            };
            for sequence in [0, 1, 256, u16::MAX] {
                socket.send(sequence, 100).unwrap();
                let reply = socket.receive(Instant::now() + Duration::from_secs(5)).unwrap();
                assert_eq!(reply.map(|reply| reply.sequence), Some(sequence), "{to}");
            }
            assert_eq!(socket.receive(Instant::now() + Duration::from_millis(10)).unwrap(), None);
        }
    }

    #[test]
    fn messages_of_others_are_passed_over() {
        let Ok(socket) = EchoSocket::open([127, 0, 0, 1].into(), None) else { return };
        let id = socket.identifier().to_be_bytes();
        let ip = if socket.has_ip_header { vec![0x45; 20] } else { Vec::new() };
        let message = |kind: u8, id: [u8; 2]| [ip.clone(), vec![kind, 0, 0, 0, id[0], id[1], 1, 2]].concat();
        assert_eq!(socket.sequence_of(&message(0, id)), Some(0x102));
        for other in [message(8, id), message(0, [id[0], !id[1]]), message(0, id)[..7].to_vec(), Vec::new()] {
            assert_eq!(socket.sequence_of(&other), None);
        }
    }
}
