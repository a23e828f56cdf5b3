//! The virtio network header before every packet of a TUN device opened with `IFF_VNET_HDR`.
//!
//! In: ten bytes in native byte order (`struct virtio_net_hdr` in linux/virtio_net.h). Out: where a checksum
//! is still to be completed, and how a super-packet is to be segmented; and the reverse.

/// Length of the header in bytes.
pub const VNET_HDR_LEN: usize = 10;

/// `flags`: the checksum at `csum_start + csum_offset` holds only the sum of the pseudo header.
pub const NEEDS_CSUM: u8 = 1;

/// `gso_type`: not a super-packet.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP datagrams of equal size.
pub const GSO_UDP_L4: u8 = 5;
/// Bit in `gso_type`: the first segment carries CWR (RFC 3168).
pub const GSO_ECN: u8 = 0x80;

/// A virtio network header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VnetHdr {
    /// [`NEEDS_CSUM`], and 2 if the kernel has verified the checksum.
    pub flags: u8,
    /// [`GSO_NONE`], [`GSO_TCPV4`], [`GSO_TCPV6`] or [`GSO_UDP_L4`], perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers in bytes; only a hint (virtio 1.2 §5.1.6.2).
    pub hdr_len: u16,
    /// Payload of each segment in bytes.
    pub gso_size: u16,
    /// Start of the bytes that the checksum covers, in bytes from the IP header.
    pub csum_start: u16,
    /// Offset of the checksum field, in bytes from `csum_start`.
    pub csum_offset: u16,
}

impl From<[u8; VNET_HDR_LEN]> for VnetHdr {
    fn from(bytes: [u8; VNET_HDR_LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }
}

/// How a super-packet is to be segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gso {
    /// Not at all: it is a single packet.
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams.
    Udp,
}

impl VnetHdr {
    /// The header of an ordinary, complete packet.
    pub const NONE: Self =
        Self { flags: 0, gso_type: GSO_NONE, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

    /// Reads the first ten bytes, if they are there.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        bytes.first_chunk::<VNET_HDR_LEN>().map(|bytes| Self::from(*bytes))
    }

    /// The header as the kernel reads it.
    pub fn to_bytes(self) -> [u8; VNET_HDR_LEN] {
        let mut bytes = [0; VNET_HDR_LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type;
        bytes[2..4].copy_from_slice(&self.hdr_len.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.gso_size.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.csum_start.to_ne_bytes());
        bytes[8..10].copy_from_slice(&self.csum_offset.to_ne_bytes());
        bytes
    }

    /// How to segment the packet; `None` for types that this program's TUN devices do not enable.
    pub fn gso(&self) -> Option<Gso> {
        match self.gso_type & !GSO_ECN {
            GSO_NONE => Some(Gso::None),
            GSO_TCPV4 => Some(Gso::Tcp4),
            GSO_TCPV6 => Some(Gso::Tcp6),
            GSO_UDP_L4 => Some(Gso::Udp),
            _ => None,
        }
    }

    /// Whether the checksum is partial and must be completed.
    pub fn needs_csum(&self) -> bool {
        self.flags & NEEDS_CSUM != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_header_reads_back_equal() {
        let hdr = VnetHdr {
            flags: NEEDS_CSUM,
            gso_type: GSO_TCPV6 | GSO_ECN,
            hdr_len: 72,
            gso_size: 1428,
            csum_start: 40,
            csum_offset: 16,
        };
        assert_eq!(VnetHdr::parse(&hdr.to_bytes()), Some(hdr));
        assert_eq!(hdr.gso(), Some(Gso::Tcp6));
        assert!(hdr.needs_csum());
        assert_eq!(VnetHdr::parse(&[0; 9]), None);
        assert_eq!(VnetHdr { gso_type: 3, ..VnetHdr::NONE }.gso(), None);
    }
}
