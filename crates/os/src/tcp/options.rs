//! Options of TCP sockets.

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

/// The protocol that a socket asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// Multipath TCP, which falls back to TCP if this kernel, the peer or a middlebox does not support it;
    /// [`super::MptcpState::of`] tells whether it did.
    Mptcp,
}

/// Options of a listening socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct ListenOptions {
    /// The protocol that is offered. A socket for Multipath TCP accepts plain TCP as well.
    pub protocol: Protocol,
    /// For an IPv6 address: whether the socket takes no IPv4 connections (IPV6_V6ONLY).
    pub v6only: bool,
}

/// Options of a connecting socket.
#[derive(Clone, Debug, Default)]
pub struct TcpOptions {
    /// The address to send from; the kernel chooses the port, and without it the address.
    pub local: Option<IpAddr>,
    /// The device to bind to (SO_BINDTODEVICE): packets leave and arrive only there. Further subflows of a
    /// Multipath TCP connection use interfaces of their own.
    pub device: Option<String>,
    /// The firewall mark of all packets sent (SO_MARK); needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// The protocol to ask for.
    pub protocol: Protocol,
    /// Options of the connection.
    pub tuning: Tuning,
}

/// Keep-alive probes: how a peer that has disappeared is detected (tcp(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// Time without received segments after which the first probe is sent (TCP_KEEPIDLE; whole seconds, at
    /// least one).
    pub idle: Duration,
    /// Time between unanswered probes (TCP_KEEPINTVL; whole seconds, at least one).
    pub interval: Duration,
    /// Unanswered probes after which the connection is closed (TCP_KEEPCNT).
    pub probes: u32,
}

/// Detects a lost peer after 60 s + 5 · 15 s = 135 s. Chosen: longer keeps dead connections, shorter costs
/// packets on idle ones and closes connections after a short outage (`docs/design/machine.md`, open
/// questions).
impl Default for KeepAlive {
    fn default() -> Self {
        Self { idle: Duration::from_secs(60), interval: Duration::from_secs(15), probes: 5 }
    }
}

/// Options of an established connection. Nagle's algorithm is always off (TCP_NODELAY).
///
/// On a Multipath TCP socket Linux (6.18) applies these to every subflow, also after connecting, except
/// `user_timeout`, `rto_max` and, over IPv6, `dscp`, which it ignores there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// Keep-alive probes.
    pub keep_alive: KeepAlive,
    /// The socket is writable only while fewer than this many bytes wait unsent in it (TCP_NOTSENT_LOWAT),
    /// so that packets wait in the queues of this process, which schedule them, and not in the socket.
    /// `None`: the kernel's default.
    pub notsent_lowat: Option<u32>,
    /// Time without acknowledgement of sent data after which the connection is closed (TCP_USER_TIMEOUT, RFC
    /// 5482). `None`: the kernel's default, about a quarter of an hour. Ignored on a Multipath TCP
    /// socket.
    pub user_timeout: Option<Duration>,
    /// Longest retransmission timeout (TCP_RTO_MAX_MS; 1 to 120 s): a shorter one lets a connection continue
    /// sooner after an outage. Ignored on a Multipath TCP socket, and before Linux 6.15.
    pub rto_max: Option<Duration>,
    /// How often a SYN is repeated (TCP_SYNCNT); `None`: the kernel's default. Ignored on a Multipath TCP
    /// socket.
    pub syn_retries: Option<u8>,
    /// The DSCP of all packets sent (RFC 2474), 0 to 63. Ignored on a Multipath TCP socket over IPv6.
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
    /// Sets these options on a TCP or Multipath TCP socket, for example an accepted one.
    ///
    /// # Errors
    /// If the kernel refuses an option that every kernel knows: the connection has ended already.
    pub fn apply(&self, fd: impl AsFd) -> io::Result<()> {
        let fd = fd.as_fd();
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        // Multipath TCP sockets know these since Linux 6.10 only.
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
        if let Some(count) = self.syn_retries {
            optional(libc::TCP_SYNCNT, count.into());
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
                    // For an IPv4 connection to a listener for both IP versions.
                    let _ = set_int(fd, libc::IPPROTO_IP, libc::IP_TOS, class);
                }
            }
        }
        Ok(())
    }
}
