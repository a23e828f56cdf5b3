//! Counters of sent segments, and the choice of the kernel's congestion control.

use std::{io, os::fd::AsFd};

use rustix::net::sockopt;

use crate::option::{number, read_bytes};

/// Offsets in `struct tcp_info` of linux/tcp.h, in bytes.
const TOTAL_RETRANS_OFFSET: usize = 100;
const DATA_SEGS_OUT_OFFSET: usize = 156;
const DSACK_DUPS_OFFSET: usize = 216;

/// Segments sent since a connection began. The counters wrap around. On a Multipath TCP connection they are
/// those of its first subflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCounters {
    /// Segments with data, retransmissions included.
    pub segments: u32,
    /// Retransmitted segments.
    pub retransmitted: u32,
    /// Segments that the peer reports as duplicates (D-SACK, RFC 2883): spurious retransmissions, and
    /// packets that the network duplicated.
    pub spurious: u32,
}

impl SegmentCounters {
    /// Reads the counters of the connection behind `fd`.
    ///
    /// # Errors
    /// If `fd` is no TCP or Multipath TCP socket, or the kernel (before 4.19) does not have all counters.
    pub fn of(fd: impl AsFd) -> io::Result<Self> {
        let mut room = [0; 256];
        let info = read_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut room)?;
        let count = |at: usize| number(info, at).ok_or(io::ErrorKind::Unsupported);
        Ok(Self {
            segments: count(DATA_SEGS_OUT_OFFSET)?,
            retransmitted: count(TOTAL_RETRANS_OFFSET)?,
            spurious: count(DSACK_DUPS_OFFSET)?,
        })
    }
}

/// Sets the congestion control of the connection behind `fd` and of all its subflows (TCP_CONGESTION).
///
/// # Errors
/// If this kernel has no such congestion control, or this process must not use it
/// (net.ipv4.tcp_allowed_congestion_control).
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
    fn segments_are_counted_and_the_congestion_control_can_be_set() {
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
