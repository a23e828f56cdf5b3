//! How connections are made and kept.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    time::Duration,
};

use rustix::net::sockopt;

use crate::option::{set_bytes, set_int};

/// TCP_RTO_MAX_MS of linux/tcp.h, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// What a connection is tried as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// Multipath TCP, which becomes TCP where this kernel, the far end or somebody on the way does not know it:
    /// [`super::MptcpState::of`] tells what it became.
    Mptcp,
}

/// How to listen.
#[derive(Clone, Copy, Debug, Default)]
pub struct ListenOptions {
    /// What is offered to those who ask for it; those of TCP are taken all the same.
    pub protocol: Protocol,
    /// For an IPv6 address: whether IPv4 is left to other sockets.
    pub v6only: bool,
}

/// How to make a socket that connects.
#[derive(Clone, Debug, Default)]
pub struct TcpOptions {
    /// The address to send from; the kernel chooses the port, and without it the address.
    pub local: Option<IpAddr>,
    /// The device to bind to: what is sent leaves there, what is received came in there. The subflows that a connection
    /// of Multipath TCP gets later leave by the interfaces of their own ([`crate::netlink::mptcp`]).
    pub device: Option<String>,
    /// The firewall mark of everything sent; needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// What to try.
    pub protocol: Protocol,
    /// How it is kept.
    pub tuning: Tuning,
}

/// When the far end is asked whether it is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// After so long without anything from it (whole seconds, at least one).
    pub idle: Duration,
    /// Again after so long without an answer (whole seconds, at least one).
    pub interval: Duration,
    /// So many questions without an answer end the connection.
    pub probes: u32,
}

impl Default for KeepAlive {
    fn default() -> Self {
        Self { idle: Duration::from_secs(60), interval: Duration::from_secs(15), probes: 5 }
    }
}

/// How a connection is kept: nothing is delayed to fill segments (TCP_NODELAY), whatever else is said here.
///
/// On a socket of Multipath TCP Linux (6.18) takes all of these, also when it is connected already, and for each of its
/// subflows, but `user_timeout`, `rto_max` and, over IPv6, `dscp`: they are ignored there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// When the far end is asked whether it is still there.
    pub keep_alive: KeepAlive,
    /// The socket is writable only while no more than so many bytes wait that were not sent yet (TCP_NOTSENT_LOWAT):
    /// what is decided when a packet leaves its queue is decided late. As the kernel has it if not given.
    pub notsent_lowat: Option<u32>,
    /// The connection ends when what was sent has not been acknowledged for so long (TCP_USER_TIMEOUT, RFC 5482), rather than
    /// after a quarter of an hour. Ignored on a socket of Multipath TCP.
    pub user_timeout: Option<Duration>,
    /// What is lost is sent again after at most so long (TCP_RTO_MAX_MS; 1 to 120 s), so that a connection goes on soon after an outage.
    /// Ignored on a socket of Multipath TCP, and before Linux 6.15.
    pub rto_max: Option<Duration>,
    /// The DSCP of everything sent (RFC 2474), 0 to 63. Ignored on a socket of Multipath TCP over IPv6.
    pub dscp: u8,
}

impl TcpOptions {
    pub(super) fn apply(&self, fd: impl AsFd) -> io::Result<()> {
        let fd = fd.as_fd();
        if let Some(device) = &self.device {
            set_bytes(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())?;
        }
        if let Some(mark) = self.mark {
            set_int(fd, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())?;
        }
        self.tuning.apply(fd)
    }
}

impl Tuning {
    /// Makes it so for a socket of TCP or Multipath TCP, one that was accepted, for example.
    ///
    /// # Errors
    /// If the kernel refuses what every kernel knows: the connection has ended already.
    pub fn apply(&self, fd: impl AsFd) -> io::Result<()> {
        let fd = fd.as_fd();
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        // Sockets of Multipath TCP know these since Linux 6.10 only.
        let _ = sockopt::set_tcp_keepidle(fd, self.keep_alive.idle);
        let _ = sockopt::set_tcp_keepintvl(fd, self.keep_alive.interval);
        let _ = sockopt::set_tcp_keepcnt(fd, self.keep_alive.probes);
        let optional = |name, value: u128| {
            let value = libc::c_int::try_from(value).unwrap_or(libc::c_int::MAX);
            let _ = set_int(fd, libc::IPPROTO_TCP, name, value);
        };
        if let Some(bytes) = self.notsent_lowat {
            optional(libc::TCP_NOTSENT_LOWAT, bytes.into());
        }
        if let Some(limit) = self.user_timeout {
            optional(libc::TCP_USER_TIMEOUT, limit.as_millis());
        }
        if let Some(limit) = self.rto_max {
            optional(TCP_RTO_MAX_MS, limit.as_millis());
        }
        if self.dscp != 0 {
            let class = libc::c_int::from(self.dscp & 0x3f) << 2;
            match SocketAddr::try_from(rustix::net::getsockname(fd)?)? {
                SocketAddr::V4(_) => set_int(fd, libc::IPPROTO_IP, libc::IP_TOS, class)?,
                SocketAddr::V6(_) => {
                    let _ = set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class);
                    // What came to an IPv4 address of a listener for both.
                    let _ = set_int(fd, libc::IPPROTO_IP, libc::IP_TOS, class);
                }
            }
        }
        Ok(())
    }
}
