//! UDP sockets connected to one address, as a server opens them to the targets of its clients.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
};

use rustix::net::SendFlags;

use super::{RecvBatch, UdpOptions, address::Family, configure, is_transient, new_socket, receive_batch};
use crate::option::set_int;

/// Bytes of the receive buffer, for datagrams that arrive while the event loop serves other sockets. Chosen:
/// in a smaller one bursts are lost, larger ones take kernel memory for each flow (`docs/design/machine.md`,
/// open questions).
const RECV_BUFFER_BYTES: usize = 512 << 10;

/// A UDP socket that sends to one address and receives from that address only.
#[derive(Debug)]
pub struct ConnectedUdp(OwnedFd);

impl ConnectedUdp {
    /// Creates a socket connected to `to`. The kernel chooses the local address and port, and never fragments
    /// datagrams (IP_PMTUDISC_DO): it refuses a datagram larger than the path MTU.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        let local: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = SocketAddr::new(local, 0);
        let family = Family::of(local);
        let fd = new_socket(family)?;
        configure(
            &fd,
            family,
            &UdpOptions { v6only: true, recv_buffer: Some(RECV_BUFFER_BYTES), ..UdpOptions::new(local) },
        )?;
        match family {
            Family::V4 => set_int(&fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?,
            Family::V6 => set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?,
        }
        rustix::net::connect(&fd, &to)?;
        Ok(Self(fd))
    }

    /// Sends one datagram, which may be empty. [`super::SendFailure::of`] classifies errors.
    pub fn send(&self, data: &[u8]) -> io::Result<()> {
        match self.try_send(data) {
            // The kernel reports the fate of an earlier datagram (an ICMP error) instead of sending this one.
            Err(error) if is_transient(&error) => self.try_send(data),
            result => result,
        }
    }

    fn try_send(&self, data: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.0, data, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Like [`super::UdpSocket::recv_batch`].
    pub fn recv_batch(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        receive_batch(self.0.as_fd(), batch)
    }
}

crate::as_fd!(ConnectedUdp, 0);
