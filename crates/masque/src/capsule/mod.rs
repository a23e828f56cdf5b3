//! Capsules on a request stream (RFC 9297 §3) and those of CONNECT-IP (RFC 9484 §4.7).
//!
//! In: bytes of a request stream, in any pieces. Out: capsules whose contents obey every rule of RFC 9484, or
//! the reason why the stream must be aborted. Always holds: capsules of unknown types are skipped without
//! buffering; known types have a maximum length ([`MAX_CAPSULE_LEN`], [`MAX_DATAGRAM_LEN`]), so that a reader
//! that is drained after each push buffers no more than that.

mod demux;
mod link;
mod range;
mod reader;
mod sites;

pub use demux::{CapsuleDemux, CapsulePart};
pub use link::{LinkNotice, LinkPolicy};
pub use range::{IpRange, RangeError, routes_sorted};
pub use reader::CapsuleReader;
pub use sites::{Site, SiteState};

use crate::{h3::code, varint};
use bytes::{BufMut, Bytes, BytesMut};
use ipnet::IpNet;
use reader::{Fields, HostBits};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum length in bytes of the value of a capsule with addresses or routes: more than 1800 IPv6 ranges. A
/// larger maximum lets a peer use more memory; a smaller one refuses long route lists.
pub const MAX_CAPSULE_LEN: usize = 64 * 1024;

/// Maximum length in bytes of the value of a DATAGRAM capsule: the longest context ID and the largest IP
/// packet.
pub const MAX_DATAGRAM_LEN: usize = 8 + 65_535;

/// DATAGRAM (RFC 9297 §3.5).
pub const DATAGRAM: u64 = 0x00;
/// ADDRESS_ASSIGN (RFC 9484 §4.7.1).
pub const ADDRESS_ASSIGN: u64 = 0x01;
/// ADDRESS_REQUEST (RFC 9484 §4.7.2).
pub const ADDRESS_REQUEST: u64 = 0x02;
/// ROUTE_ADVERTISEMENT (RFC 9484 §4.7.3).
pub const ROUTE_ADVERTISEMENT: u64 = 0x03;
/// LINK, an extension of mpvpn: a client's policy for the link under a path (docs/protocol.md).
pub const LINK: u64 = 0x2d70_766c;
/// SITES, an extension of mpvpn: the networks behind clients (docs/protocol.md).
pub const SITES: u64 = 0x2d70_7673;
/// Maximum length in bytes of the value of a LINK capsule: its fields take up to 42, and the rest is for
/// later versions.
pub const MAX_LINK_LEN: usize = 64;

/// One capsule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capsule {
    /// An HTTP Datagram (context ID and payload), for connections without QUIC DATAGRAM frames.
    Datagram(Bytes),
    /// All addresses that the receiver of the capsule may use from now on.
    AddressAssign(Vec<AssignedAddress>),
    /// Addresses that the sender requests; never empty.
    AddressRequest(Vec<RequestedAddress>),
    /// All destinations the sender is willing to route to from now on, in the order of RFC 9484 §4.7.3.
    RouteAdvertisement(Vec<IpRange>),
    /// The sender's policy for the link under one of the paths.
    Link(LinkNotice),
    /// All networks behind clients that the receiver may reach, and those that it announced.
    Sites(Vec<Site>),
    /// An unknown capsule type. Its value is skipped, and it encodes to nothing.
    Unknown {
        /// The capsule type.
        kind: u64,
    },
}

/// An address or prefix in an ADDRESS_ASSIGN capsule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssignedAddress {
    /// Request ID of the request that this answers, or 0 for an unsolicited assignment.
    pub request_id: u64,
    /// The address with its prefix length; bits after the prefix are zero.
    pub net: IpNet,
}

impl AssignedAddress {
    /// The answer that refuses request `request_id`: the all-zero address with full prefix length (RFC 9484
    /// §4.7.1).
    pub fn refusal(request_id: u64, family: Family) -> Self {
        Self { request_id, net: family.unspecified() }
    }

    /// Whether this refuses the request instead of assigning anything.
    pub fn is_refusal(&self) -> bool {
        self.net.addr().is_unspecified() && self.net.prefix_len() == self.net.max_prefix_len()
    }
}

/// An address or prefix in an ADDRESS_REQUEST capsule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestedAddress {
    /// Identifies the request; not 0, and not reused on the stream.
    pub request_id: u64,
    /// The requested address or prefix. An all-zero address means any address of the family, with this
    /// prefix length.
    pub net: IpNet,
}

impl RequestedAddress {
    /// A request for any single address of `family`.
    pub fn any(request_id: u64, family: Family) -> Self {
        Self { request_id, net: family.unspecified() }
    }
}

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IP version 4.
    V4,
    /// IP version 6.
    V6,
}

impl Family {
    /// The family of `addr`.
    pub fn of(addr: IpAddr) -> Self {
        if addr.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    fn unspecified(self) -> IpNet {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED).into(),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED).into(),
        }
    }
}

/// Why a request stream with capsules must be aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleError {
    /// "If the receive side of a stream carrying capsules is terminated cleanly ... and the last capsule
    /// on the stream was truncated, this MUST be treated as if it were a malformed or incomplete message"
    /// (RFC 9297 §3.3).
    #[error("the stream ended inside a capsule")]
    Truncated,
    /// The value exceeds the maximum length of its capsule type.
    #[error("capsule of type {kind:#x} has {len} bytes, expected at most {max}")]
    TooLarge {
        /// Capsule type.
        kind: u64,
        /// Announced length in bytes.
        len: u64,
        /// Limit in bytes.
        max: usize,
    },
    /// The value ends inside an entry.
    #[error("capsule of type {kind:#x} ends inside an entry")]
    TruncatedEntry {
        /// Capsule type.
        kind: u64,
    },
    /// The IP Version field is "either 4 or 6" (RFC 9484 §4.7).
    #[error("IP version {version} in a capsule of type {kind:#x}, expected 4 or 6")]
    IpVersion {
        /// Capsule type.
        kind: u64,
        /// The received value.
        version: u8,
    },
    /// The prefix length is longer than an address.
    #[error("prefix length {len} for {addr} in a capsule of type {kind:#x}")]
    PrefixLength {
        /// Capsule type.
        kind: u64,
        /// The address.
        addr: IpAddr,
        /// The received value.
        len: u8,
    },
    /// "the lower bits of the IP Address field that are not covered by the prefix length MUST all be set
    /// to 0" (RFC 9484 §4.7.1, §4.7.2).
    #[error("{net} has bits set after its prefix in a capsule of type {kind:#x}")]
    HostBits {
        /// Capsule type.
        kind: u64,
        /// The received value.
        net: IpNet,
    },
    /// "If an endpoint receives an ADDRESS_REQUEST capsule that contains zero Requested Addresses, it
    /// MUST abort the IP proxying request stream" (RFC 9484 §4.7.2).
    #[error("ADDRESS_REQUEST without any address")]
    EmptyRequest,
    /// Request IDs in a request "MUST NOT be zero" (RFC 9484 §4.7.2).
    #[error("ADDRESS_REQUEST with request ID 0")]
    ZeroRequestId,
    /// "Request IDs MUST NOT be reused" (RFC 9484 §4.7.2), here within one capsule.
    #[error("ADDRESS_REQUEST uses request ID {id} twice")]
    RepeatedRequestId {
        /// The ID.
        id: u64,
    },
    /// A field of a LINK capsule has an invalid value.
    #[error("LINK capsule with an invalid {field}: {value}")]
    LinkField {
        /// The field.
        field: &'static str,
        /// The received value.
        value: u64,
    },
    /// A route whose addresses do not form a range.
    #[error("route: {0}")]
    Range(#[from] RangeError),
    /// Routes out of order or overlapping: "the endpoint MUST abort" (RFC 9484 §4.7.3).
    #[error("route {after} must not follow {before}")]
    RouteOrder {
        /// The earlier entry.
        before: IpRange,
        /// The later entry.
        after: IpRange,
    },
    /// A range for all protocols overlaps one for a single protocol (RFC 9484 §4.7.3).
    #[error("route {all} for all protocols overlaps {one}")]
    ProtocolOverlap {
        /// The range with protocol 0.
        all: IpRange,
        /// The range with a single protocol.
        one: IpRange,
    },
}

impl CapsuleError {
    /// The HTTP/3 code with which to abort the request stream. Malformed capsules make the message
    /// malformed (RFC 9297 §3.3).
    pub fn code(&self) -> u64 {
        match self {
            Self::TooLarge { .. } => code::EXCESSIVE_LOAD,
            _ => code::MESSAGE_ERROR,
        }
    }
}

impl Capsule {
    /// Maximum length of the value in bytes; `None` for unknown types.
    fn size_limit(kind: u64) -> Option<usize> {
        match kind {
            DATAGRAM => Some(MAX_DATAGRAM_LEN),
            ADDRESS_ASSIGN | ADDRESS_REQUEST | ROUTE_ADVERTISEMENT | SITES => Some(MAX_CAPSULE_LEN),
            LINK => Some(MAX_LINK_LEN),
            _ => None,
        }
    }

    /// Reads the value of a capsule of type `kind`.
    fn parse(kind: u64, value: Bytes, host_bits: HostBits) -> Result<Self, CapsuleError> {
        match kind {
            DATAGRAM => Ok(Self::Datagram(value)),
            ADDRESS_ASSIGN => parse_assign(&value, host_bits),
            ADDRESS_REQUEST => parse_request(&value),
            ROUTE_ADVERTISEMENT => parse_routes(&value),
            LINK => LinkNotice::parse(&value).map(Self::Link),
            SITES => sites::parse(&value).map(Self::Sites),
            kind => Ok(Self::Unknown { kind }),
        }
    }

    /// Appends the encoded capsule. The caller provides legal contents: routes from [`routes_sorted`],
    /// request IDs other than 0. Host bits are cleared here.
    ///
    /// # Panics
    /// If a request ID is above 2^62 − 1.
    pub fn encode(&self, out: &mut BytesMut) {
        match self {
            Self::Datagram(payload) => put_header(DATAGRAM, payload.len(), out).extend_from_slice(payload),
            Self::AddressAssign(list) => {
                let entries = list.iter().map(|entry| (entry.request_id, entry.net));
                encode_addresses(ADDRESS_ASSIGN, entries, out);
            }
            Self::AddressRequest(list) => {
                let entries = list.iter().map(|entry| (entry.request_id, entry.net));
                encode_addresses(ADDRESS_REQUEST, entries, out);
            }
            Self::RouteAdvertisement(list) => encode_routes(list, out),
            Self::Link(notice) => notice.encode(out),
            Self::Sites(list) => sites::encode(list, out),
            Self::Unknown { .. } => {}
        }
    }

    /// The encoded capsule.
    pub fn to_bytes(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.encode(&mut out);
        out.freeze()
    }
}

/// Appends the header of a DATAGRAM capsule whose value (context ID and payload) has `len` bytes, for senders
/// that write the payload separately.
pub fn encode_datagram_header(len: usize, out: &mut BytesMut) {
    put_header(DATAGRAM, len, out);
}

fn put_header(kind: u64, len: usize, out: &mut BytesMut) -> &mut BytesMut {
    varint::encode(kind, out);
    varint::encode(len as u64, out);
    out
}

fn encode_addresses(kind: u64, entries: impl Iterator<Item = (u64, IpNet)> + Clone, out: &mut BytesMut) {
    let len = entries.clone().map(|(id, net)| varint::len(id) + 2 + addr_len(net.addr())).sum();
    put_header(kind, len, out);
    for (request_id, net) in entries {
        varint::encode(request_id, out);
        put_version(net.addr(), out);
        put_addr(net.network(), out);
        out.put_u8(net.prefix_len());
    }
}

fn encode_routes(list: &[IpRange], out: &mut BytesMut) {
    let len = list.iter().map(|range| 2 + 2 * addr_len(range.start())).sum();
    put_header(ROUTE_ADVERTISEMENT, len, out);
    for range in list {
        put_version(range.start(), out);
        put_addr(range.start(), out);
        put_addr(range.end(), out);
        out.put_u8(range.protocol());
    }
}

fn parse_assign(value: &[u8], host_bits: HostBits) -> Result<Capsule, CapsuleError> {
    let mut fields = Fields { kind: ADDRESS_ASSIGN, left: value };
    let mut list = Vec::new();
    while !fields.left.is_empty() {
        let (request_id, net) = (fields.varint()?, fields.net(host_bits)?);
        list.push(AssignedAddress { request_id, net });
    }
    Ok(Capsule::AddressAssign(list))
}

fn parse_request(value: &[u8]) -> Result<Capsule, CapsuleError> {
    let mut fields = Fields { kind: ADDRESS_REQUEST, left: value };
    let mut list = Vec::new();
    while !fields.left.is_empty() {
        let (request_id, net) = (fields.varint()?, fields.net(HostBits::Refuse)?);
        if request_id == 0 {
            return Err(CapsuleError::ZeroRequestId);
        }
        list.push(RequestedAddress { request_id, net });
    }
    if list.is_empty() {
        return Err(CapsuleError::EmptyRequest);
    }
    let mut ids: Vec<u64> = list.iter().map(|request| request.request_id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(CapsuleError::RepeatedRequestId { id: pair[0] }),
        None => Ok(Capsule::AddressRequest(list)),
    }
}

fn parse_routes(value: &[u8]) -> Result<Capsule, CapsuleError> {
    let mut fields = Fields { kind: ROUTE_ADVERTISEMENT, left: value };
    let mut list = Vec::new();
    while !fields.left.is_empty() {
        let version = fields.version()?;
        let (start, end) = (fields.addr(version)?, fields.addr(version)?);
        list.push(IpRange::new(start, end, fields.byte()?)?);
    }
    if let Some((before, after)) = range::order_violation(&list) {
        return Err(CapsuleError::RouteOrder { before, after });
    }
    if let Some((all, one)) = range::protocol_overlap(&list) {
        return Err(CapsuleError::ProtocolOverlap { all, one });
    }
    Ok(Capsule::RouteAdvertisement(list))
}

fn addr_len(addr: IpAddr) -> usize {
    if addr.is_ipv4() { 4 } else { 16 }
}

fn put_version(addr: IpAddr, out: &mut BytesMut) {
    out.put_u8(if addr.is_ipv4() { 4 } else { 6 });
}

fn put_addr(addr: IpAddr, out: &mut BytesMut) {
    match addr {
        IpAddr::V4(addr) => out.extend_from_slice(&addr.octets()),
        IpAddr::V6(addr) => out.extend_from_slice(&addr.octets()),
    }
}

#[cfg(test)]
mod tests;
