//! How a connection fares with what it sends.

use std::{io, os::fd::AsFd};

use rustix::net::sockopt;

use crate::option::{number, read_bytes};

/// Where these are in `struct tcp_info` of linux/tcp.h.
const TOTAL_RETRANS: usize = 100;
const DATA_SEGS_OUT: usize = 156;
const DSACK_DUPS: usize = 216;

/// Segments sent since a connection began; numbers wrap around. Of Multipath TCP those of its first subflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCounters {
    /// With data in them.
    pub segments: u32,
    /// Those that were sent once more.
    pub retransmitted: u32,
    /// Those of them that the far end says it had already (RFC 2883), with what the network doubled.
    pub spurious: u32,
}

impl SegmentCounters {
    /// How the connection behind `fd` fares.
    ///
    /// # Errors
    /// If it is no socket of TCP or Multipath TCP, or the kernel (before 4.19) does not count all of these.
    pub fn of(fd: impl AsFd) -> io::Result<Self> {
        let mut room = [0; 256];
        let info = read_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut room)?;
        let count = |at: usize| number(info, at).ok_or(io::ErrorKind::Unsupported);
        Ok(Self {
            segments: count(DATA_SEGS_OUT)?,
            retransmitted: count(TOTAL_RETRANS)?,
            spurious: count(DSACK_DUPS)?,
        })
    }
}

/// Lets the connection behind `fd`, with all its subflows, have the congestion control of this name from now on.
///
/// # Errors
/// If this kernel has none of the name, or this process may not have it (net.ipv4.tcp_allowed_congestion_control).
pub fn set_congestion_control(fd: impl AsFd, name: &str) -> io::Result<()> {
    Ok(sockopt::set_tcp_congestion(fd, name)?)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn what_is_sent_is_counted_and_the_control_is_as_it_was_set() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        let before = SegmentCounters::of(&here).unwrap();
        for _ in 0..10 {
            here.write_all(b"x").unwrap();
            there.read_exact(&mut [0]).unwrap();
        }
        let after = SegmentCounters::of(&here).unwrap();
        assert_eq!(after.segments.wrapping_sub(before.segments), 10, "{before:?}, {after:?}");
        assert_eq!((after.retransmitted, after.spurious), (0, 0));
        // Every kernel has this one, and everybody may.
        set_congestion_control(&here, "reno").unwrap();
        assert_eq!(sockopt::tcp_congestion(&here).unwrap(), "reno");
        assert!(set_congestion_control(&here, "none-such").is_err());
        assert!(SegmentCounters::of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
