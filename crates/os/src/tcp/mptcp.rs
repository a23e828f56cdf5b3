//! The state of a connection whose socket asked for Multipath TCP (RFC 8684).

use std::{io, os::fd::AsFd};

use crate::option::{number, read_bytes};

/// SOL_MPTCP of linux/socket.h.
const SOL_MPTCP: libc::c_int = 284;
/// The option of linux/mptcp.h that reads `struct mptcp_info`.
const MPTCP_INFO: libc::c_int = 1;

/// Offset of `mptcpi_flags` in `struct mptcp_info`, in bytes.
const FLAGS_OFFSET: usize = 8;
const MPTCP_INFO_FLAG_FALLBACK: u32 = 1;
const MPTCP_INFO_FLAG_REMOTE_KEY_RECEIVED: u32 = 2;

/// Whether a connection uses Multipath TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MptcpState {
    /// The socket did not ask for Multipath TCP, this kernel has none, or the connection is not established
    /// yet.
    NotUsed,
    /// The connection fell back to TCP: the peer does not support Multipath TCP, or a middlebox removed its
    /// options.
    Fallback,
    /// The connection uses Multipath TCP.
    Active,
}

impl MptcpState {
    /// The present state of the connection behind `fd`. If a middlebox removes options only after the
    /// handshake, the connection falls back with the first bytes, so read the state again once bytes have
    /// arrived.
    ///
    /// # Errors
    /// If `fd` is no socket.
    pub fn of(fd: impl AsFd) -> io::Result<Self> {
        let mut room = [0; 256];
        let info = match read_bytes(&fd, SOL_MPTCP, MPTCP_INFO, &mut room) {
            Ok(info) => info,
            // After a fallback Linux passes the call to the only subflow, a TCP socket, which refuses it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOPROTOOPT)) => {
                return Ok(if is_mptcp_socket(&fd) { Self::Fallback } else { Self::NotUsed });
            }
            Err(error) => return Err(error),
        };
        Ok(match number(info, FLAGS_OFFSET).unwrap_or(0) {
            flags if flags & MPTCP_INFO_FLAG_FALLBACK != 0 => Self::Fallback,
            flags if flags & MPTCP_INFO_FLAG_REMOTE_KEY_RECEIVED == 0 => Self::NotUsed,
            _ => Self::Active,
        })
    }
}

/// Whether the protocol of the socket is Multipath TCP. A listener for both accepts plain connections as TCP
/// sockets.
fn is_mptcp_socket(fd: impl AsFd) -> bool {
    let mut room = [0; 4];
    let protocol = read_bytes(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, &mut room);
    protocol.is_ok_and(|bytes| bytes == libc::IPPROTO_MPTCP.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        time::Duration,
    };

    use super::*;
    use crate::{
        poll::{Events, Interest, Poller},
        tcp::{KeepAlive, ListenOptions, Protocol, TcpAcceptor, TcpOptions, TcpSocket, Tuning},
    };

    fn has_mptcp() -> bool {
        let enabled = std::fs::read_to_string("/proc/sys/net/mptcp/enabled");
        enabled.is_ok_and(|text| text.trim() == "1")
    }

    fn options(protocol: Protocol) -> TcpOptions {
        let tuning = Tuning {
            keep_alive: KeepAlive {
                idle: Duration::from_secs(10),
                interval: Duration::from_secs(3),
                probes: 3,
            },
            notsent_lowat: Some(16 << 10),
            user_timeout: Some(Duration::from_secs(20)),
            rto_max: Some(Duration::from_secs(1)),
            syn_retries: Some(2),
            dscp: 10,
        };
        TcpOptions { device: Some("lo".to_owned()), protocol, tuning, ..TcpOptions::default() }
    }

    /// A connection over loopback on which bytes went both ways: its two ends.
    fn pair(local: &str, ours: Protocol, theirs: Protocol) -> (TcpStream, TcpStream) {
        let options_of_listener = ListenOptions { protocol: theirs, v6only: false };
        let acceptor = TcpAcceptor::listen(local.parse().unwrap(), options_of_listener).unwrap();
        let to = acceptor.local_addr().unwrap();
        let socket = TcpSocket::open(to, &options(ours)).unwrap();
        assert_eq!(MptcpState::of(&socket).unwrap(), MptcpState::NotUsed);
        socket.start_connect(to).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&socket, 0, Interest::Write).unwrap();
        assert_eq!(poller.wait(&mut Events::with_capacity(1), Some(Duration::from_secs(5))).unwrap(), 1);
        socket.connect_result().unwrap();
        let listener = TcpListener::from(acceptor);
        listener.set_nonblocking(false).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        options(theirs).tuning.apply(&there).unwrap();
        let mut here = TcpStream::from(socket);
        here.set_nonblocking(false).unwrap();
        here.write_all(b"to").unwrap();
        there.read_exact(&mut [0; 2]).unwrap();
        there.write_all(b"fro").unwrap();
        here.read_exact(&mut [0; 3]).unwrap();
        (here, there)
    }

    #[test]
    fn both_ends_of_a_multipath_connection_see_that_it_is_one() {
        if !has_mptcp() {
            return println!("skipped: this kernel has no Multipath TCP");
        }
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let (here, there) = pair(local, Protocol::Mptcp, Protocol::Mptcp);
            assert_eq!(MptcpState::of(&here).unwrap(), MptcpState::Active);
            assert_eq!(MptcpState::of(&there).unwrap(), MptcpState::Active);
        }
    }

    #[test]
    fn a_peer_without_multipath_tcp_causes_a_fallback() {
        if !has_mptcp() {
            return println!("skipped: this kernel has no Multipath TCP");
        }
        let (here, there) = pair("127.0.0.1:0", Protocol::Mptcp, Protocol::Tcp);
        assert_eq!(MptcpState::of(&here).unwrap(), MptcpState::Fallback);
        assert_eq!(MptcpState::of(&there).unwrap(), MptcpState::NotUsed);
        let (here, there) = pair("127.0.0.1:0", Protocol::Tcp, Protocol::Mptcp);
        assert_eq!(MptcpState::of(&here).unwrap(), MptcpState::NotUsed);
        assert_eq!(MptcpState::of(&there).unwrap(), MptcpState::NotUsed);
    }

    #[test]
    fn options_are_applied_as_documented() {
        let number = |fd: &TcpStream, level, name| {
            let mut room = [0; 4];
            let read = read_bytes(fd, level, name, &mut room).map(<[u8]>::to_vec);
            read.ok().map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap()))
        };
        let is_multipath = |fd: &TcpStream| matches!(MptcpState::of(fd), Ok(MptcpState::Active));
        for protocol in [Protocol::Tcp, Protocol::Mptcp] {
            let ends = pair("127.0.0.1:0", protocol, protocol);
            for end in [&ends.0, &ends.1] {
                assert_eq!(number(end, libc::IPPROTO_TCP, libc::TCP_NODELAY), Some(1));
                assert_eq!(number(end, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT), Some(16 << 10));
                assert_eq!(number(end, libc::IPPROTO_IP, libc::IP_TOS), Some(10 << 2));
                assert_eq!(number(end, libc::SOL_SOCKET, libc::SO_KEEPALIVE), Some(1));
                if !is_multipath(end) {
                    assert_eq!(number(end, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE), Some(10));
                    assert_eq!(number(end, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), Some(20_000));
                    assert_eq!(number(end, libc::IPPROTO_TCP, libc::TCP_SYNCNT), Some(2));
                }
            }
        }
    }

    #[test]
    fn a_device_that_does_not_exist_is_an_error() {
        let options = TcpOptions { device: Some("none0".to_owned()), ..TcpOptions::default() };
        let error = TcpSocket::open("127.0.0.1:1".parse().unwrap(), &options).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
