//! The path manager of the kernel's Multipath TCP (RFC 8684), by generic netlink (family `mptcp_pm`): the addresses from which
//! a connection opens further subflows.
//!
//! In: addresses of this machine with their interfaces. Out: steps for the journal ([`plan`]), after which every
//! Multipath TCP connection that this network namespace opens gets a subflow from each of these addresses through its
//! interface, whatever device the first subflow is bound to. Always holds: endpoints of other programs stay, and none is
//! added twice; an endpoint is identified by its address and interface, never by the ID that the kernel gave it.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NLA_HEADER_SIZE, NetlinkDeserializable, NetlinkHeader,
    NetlinkSerializable, NlaBuffer, NlasIterator,
};
use netlink_sys::protocols::NETLINK_GENERIC;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{
    ignore_present,
    socket::{Change, Socket},
};
use crate::{error::OsError, undo::Step};

/// Bytes of `struct genlmsghdr`.
const GENL_HEADER_LEN: usize = 4;
/// linux/genetlink.h: the family that resolves the names of other families to their numbers.
const GENL_ID_CTRL: u16 = 0x10;
const GENL_CTRL_VERSION: u8 = 2;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// linux/mptcp_pm.h: name, version, commands, attributes and flags of the family, named as in that header.
const MPTCP_PM_NAME: &[u8] = b"mptcp_pm\0";
const MPTCP_PM_VERSION: u8 = 1;
const MPTCP_PM_CMD_ADD_ADDR: u8 = 1;
const MPTCP_PM_CMD_DEL_ADDR: u8 = 2;
const MPTCP_PM_CMD_GET_ADDR: u8 = 3;
const MPTCP_PM_CMD_SET_LIMITS: u8 = 5;
const MPTCP_PM_CMD_GET_LIMITS: u8 = 6;
const MPTCP_PM_ATTR_ADDR: u16 = 1;
const MPTCP_PM_ATTR_RCV_ADD_ADDRS: u16 = 2;
const MPTCP_PM_ATTR_SUBFLOWS: u16 = 3;
const MPTCP_PM_ADDR_ATTR_FAMILY: u16 = 1;
const MPTCP_PM_ADDR_ATTR_ID: u16 = 2;
const MPTCP_PM_ADDR_ATTR_ADDR4: u16 = 3;
const MPTCP_PM_ADDR_ATTR_ADDR6: u16 = 4;
const MPTCP_PM_ADDR_ATTR_FLAGS: u16 = 6;
const MPTCP_PM_ADDR_ATTR_IF_IDX: u16 = 7;
const MPTCP_PM_ADDR_FLAG_SUBFLOW: u32 = 1 << 1;
const MPTCP_PM_ADDR_FLAG_BACKUP: u32 = 1 << 2;
/// Most endpoints and further subflows that the kernel allows (net/mptcp/protocol.h).
const MPTCP_PM_ADDR_MAX: u32 = 8;

/// An address from which connections open a further subflow. Journals on disk have the names of the fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Endpoint {
    /// An address of this machine.
    pub address: IpAddr,
    /// The index of the interface that the subflow uses.
    pub interface: u32,
    /// Whether the subflow carries data only while no other one can (the B flag of MP_JOIN, RFC 8684 §3.2).
    pub backup: bool,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of interface {}", self.address, self.interface)
    }
}

/// Limits of each connection. Journals on disk have the names of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Limits {
    /// Subflows beyond the first one (0 to 8).
    pub subflows: u32,
    /// Addresses announced by the peer (ADD_ADDR) to which subflows are opened (0 to 8).
    pub accepted: u32,
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} subflows and {} addresses", self.subflows, self.accepted)
    }
}

/// The path manager of this thread's network namespace.
#[derive(Debug)]
pub struct PathManager {
    socket: Socket<GenericMessage>,
    family: u16,
}

impl PathManager {
    /// Opens a socket to the path manager.
    ///
    /// # Errors
    /// If this kernel has no Multipath TCP.
    pub fn open() -> Result<Self, OsError> {
        let mut socket = Socket::<GenericMessage>::open(NETLINK_GENERIC)
            .map_err(|error| OsError::kernel("open", "a netlink socket", error))?;
        let request = GenericMessage {
            family: GENL_ID_CTRL,
            command: CTRL_CMD_GETFAMILY,
            version: GENL_CTRL_VERSION,
            attributes: emit(&[DefaultNla::new(CTRL_ATTR_FAMILY_NAME, MPTCP_PM_NAME.to_vec())]),
        };
        let answers = socket.ask("find", "the path manager of Multipath TCP", request)?;
        let family = answers.iter().find_map(|answer| number(&answer.attributes, CTRL_ATTR_FAMILY_ID));
        let family = family.and_then(|number| u16::try_from(number).ok());
        let none = || OsError::kernel("find", "the path manager of Multipath TCP", Errno::NOENT);
        Ok(Self { socket, family: family.ok_or_else(none)? })
    }

    /// All endpoints for subflows.
    pub fn endpoints(&mut self) -> Result<Vec<Endpoint>, OsError> {
        Ok(self.list_endpoints()?.into_iter().map(|(_, endpoint)| endpoint).collect())
    }

    /// Adds an endpoint; no error if it exists already.
    pub fn add(&mut self, endpoint: &Endpoint) -> Result<(), OsError> {
        let flags = MPTCP_PM_ADDR_FLAG_SUBFLOW | if endpoint.backup { MPTCP_PM_ADDR_FLAG_BACKUP } else { 0 };
        let mut attributes = address_attributes(endpoint.address);
        attributes.push(DefaultNla::new(MPTCP_PM_ADDR_ATTR_FLAGS, flags.to_ne_bytes().into()));
        attributes.push(DefaultNla::new(MPTCP_PM_ADDR_ATTR_IF_IDX, endpoint.interface.to_ne_bytes().into()));
        let request = self.request(MPTCP_PM_CMD_ADD_ADDR, &[nested(&attributes)]);
        ignore_present(self.socket.change(Change::Add, "give Multipath TCP", endpoint, request))
    }

    /// Removes an endpoint. Its subflows are closed.
    ///
    /// # Errors
    /// If the endpoint does not exist, or the kernel refuses.
    pub fn remove(&mut self, endpoint: &Endpoint) -> Result<(), OsError> {
        let same =
            |other: &Endpoint| (other.address, other.interface) == (endpoint.address, endpoint.interface);
        let id = self.list_endpoints()?.into_iter().find(|(_, other)| same(other)).map(|(id, _)| id);
        let none = || OsError::kernel("take from Multipath TCP", endpoint, Errno::NOENT);
        let mut attributes = address_attributes(endpoint.address);
        attributes.push(DefaultNla::new(MPTCP_PM_ADDR_ATTR_ID, vec![id.ok_or_else(none)?]));
        let request = self.request(MPTCP_PM_CMD_DEL_ADDR, &[nested(&attributes)]);
        self.socket.change(Change::Remove, "take from Multipath TCP", endpoint, request)
    }

    /// The limits in force.
    pub fn limits(&mut self) -> Result<Limits, OsError> {
        let request = self.request(MPTCP_PM_CMD_GET_LIMITS, &[]);
        let answers = self.socket.ask("read", "the limits of Multipath TCP", request)?;
        let limits = |answer: &GenericMessage| {
            let of = |kind| number(&answer.attributes, kind);
            Some(Limits { subflows: of(MPTCP_PM_ATTR_SUBFLOWS)?, accepted: of(MPTCP_PM_ATTR_RCV_ADD_ADDRS)? })
        };
        let none = || OsError::kernel("read", "the limits of Multipath TCP", Errno::NODATA);
        answers.iter().find_map(limits).ok_or_else(none)
    }

    /// Sets the limits for connections of this network namespace that begin later.
    pub fn set_limits(&mut self, limits: Limits) -> Result<(), OsError> {
        let number = |kind, value: u32| DefaultNla::new(kind, value.to_ne_bytes().into());
        let attributes = [
            number(MPTCP_PM_ATTR_RCV_ADD_ADDRS, limits.accepted),
            number(MPTCP_PM_ATTR_SUBFLOWS, limits.subflows),
        ];
        let request = self.request(MPTCP_PM_CMD_SET_LIMITS, &attributes);
        self.socket.change(Change::Set, "limit Multipath TCP to", limits, request)
    }

    fn list_endpoints(&mut self) -> Result<Vec<(u8, Endpoint)>, OsError> {
        let request = self.request(MPTCP_PM_CMD_GET_ADDR, &[]);
        let answers = self.socket.dump("list", "the addresses of Multipath TCP", request)?;
        Ok(answers.iter().filter_map(|answer| parse_endpoint(&answer.attributes)).collect())
    }

    fn request(&self, command: u8, attributes: &[DefaultNla]) -> GenericMessage {
        GenericMessage {
            family: self.family,
            command,
            version: MPTCP_PM_VERSION,
            attributes: emit(attributes),
        }
    }
}

/// Plans the steps after which connections get a subflow from each of `wanted`; endpoints that exist already need none.
///
/// # Errors
/// If this kernel has no Multipath TCP, or its endpoints cannot be listed.
pub fn plan(wanted: &[Endpoint]) -> Result<Vec<Step>, OsError> {
    let mut manager = PathManager::open()?;
    let (present, before) = (manager.endpoints()?, manager.limits()?);
    let is_new = |endpoint: &&Endpoint| {
        !present
            .iter()
            .any(|other| (other.address, other.interface) == (endpoint.address, endpoint.interface))
    };
    let new: Vec<&Endpoint> = wanted.iter().filter(is_new).collect();
    let needed = u32::try_from(present.len() + new.len()).unwrap_or(MPTCP_PM_ADDR_MAX).min(MPTCP_PM_ADDR_MAX);
    let set = Limits { subflows: before.subflows.max(needed), ..before };
    let limits = (set != before).then_some(Step::MptcpLimits { before, set });
    let added = new.into_iter().map(|endpoint| Step::MptcpEndpoint { endpoint: endpoint.clone() });
    Ok(limits.into_iter().chain(added).collect())
}

/// A generic netlink message.
#[derive(Clone, Debug)]
struct GenericMessage {
    family: u16,
    command: u8,
    version: u8,
    attributes: Vec<u8>,
}

impl NetlinkSerializable for GenericMessage {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        GENL_HEADER_LEN + self.attributes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer[..GENL_HEADER_LEN].copy_from_slice(&[self.command, self.version, 0, 0]);
        buffer[GENL_HEADER_LEN..self.buffer_len()].copy_from_slice(&self.attributes);
    }
}

impl NetlinkDeserializable for GenericMessage {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let (head, attributes) = payload
            .split_at_checked(GENL_HEADER_LEN)
            .ok_or_else(|| DecodeError::from("the message is shorter than its header"))?;
        Ok(Self {
            family: header.message_type,
            command: head[0],
            version: head[1],
            attributes: attributes.to_vec(),
        })
    }
}

fn emit(attributes: &[DefaultNla]) -> Vec<u8> {
    let mut bytes = vec![0; (&attributes).buffer_len()];
    (&attributes).emit(&mut bytes);
    bytes
}

/// The attribute of a request that nests the attributes of an address.
fn nested(attributes: &[DefaultNla]) -> DefaultNla {
    DefaultNla::new(MPTCP_PM_ATTR_ADDR | NLA_F_NESTED, emit(attributes))
}

fn address_attributes(address: IpAddr) -> Vec<DefaultNla> {
    let (family, kind, octets) = match address {
        IpAddr::V4(ip) => (libc::AF_INET as u16, MPTCP_PM_ADDR_ATTR_ADDR4, ip.octets().to_vec()),
        IpAddr::V6(ip) => (libc::AF_INET6 as u16, MPTCP_PM_ADDR_ATTR_ADDR6, ip.octets().to_vec()),
    };
    vec![
        DefaultNla::new(MPTCP_PM_ADDR_ATTR_FAMILY, family.to_ne_bytes().into()),
        DefaultNla::new(kind, octets),
    ]
}

/// The value of the first attribute with this type.
fn value(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute: &NlaBuffer<&[u8]>| attribute.kind() == kind)
        .and_then(|attribute| {
            let length = attribute.value_length();
            attribute.into_inner().get(NLA_HEADER_SIZE..NLA_HEADER_SIZE + length)
        })
}

/// The value of the first attribute with this type, as an integer of one, two or four bytes.
fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    match *value(attributes, kind)? {
        [a] => Some(a.into()),
        [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d])),
        _ => None,
    }
}

/// Parses an endpoint for subflows and its ID; `None` for endpoints with other flags.
fn parse_endpoint(attributes: &[u8]) -> Option<(u8, Endpoint)> {
    let of = value(attributes, MPTCP_PM_ATTR_ADDR)?;
    let v4 = value(of, MPTCP_PM_ADDR_ATTR_ADDR4).and_then(|octets| <[u8; 4]>::try_from(octets).ok());
    let v6 = value(of, MPTCP_PM_ADDR_ATTR_ADDR6).and_then(|octets| <[u8; 16]>::try_from(octets).ok());
    let address = v4.map(|octets| IpAddr::V4(Ipv4Addr::from(octets)));
    let address = address.or_else(|| v6.map(|octets| IpAddr::V6(Ipv6Addr::from(octets))))?;
    let flags = number(of, MPTCP_PM_ADDR_ATTR_FLAGS).unwrap_or_default();
    let endpoint = Endpoint {
        address,
        interface: number(of, MPTCP_PM_ADDR_ATTR_IF_IDX).unwrap_or_default(),
        backup: flags & MPTCP_PM_ADDR_FLAG_BACKUP != 0,
    };
    let id = u8::try_from(number(of, MPTCP_PM_ADDR_ATTR_ID)?).ok()?;
    (flags & MPTCP_PM_ADDR_FLAG_SUBFLOW != 0).then_some((id, endpoint))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_endpoint_is_read_as_it_was_written() {
        let mut attributes = address_attributes("2001:db8::7".parse().unwrap());
        attributes.push(DefaultNla::new(MPTCP_PM_ADDR_ATTR_ID, vec![3]));
        attributes.push(DefaultNla::new(
            MPTCP_PM_ADDR_ATTR_FLAGS,
            (MPTCP_PM_ADDR_FLAG_SUBFLOW | MPTCP_PM_ADDR_FLAG_BACKUP).to_ne_bytes().into(),
        ));
        attributes.push(DefaultNla::new(MPTCP_PM_ADDR_ATTR_IF_IDX, 7_u32.to_ne_bytes().into()));
        let bytes = emit(&[nested(&attributes)]);
        let endpoint = Endpoint { address: "2001:db8::7".parse().unwrap(), interface: 7, backup: true };
        assert_eq!(parse_endpoint(&bytes), Some((3, endpoint)));
        // An endpoint with the flag SIGNAL only is announced to the peer, and opens no subflow.
        attributes[3] = DefaultNla::new(MPTCP_PM_ADDR_ATTR_FLAGS, 1_u32.to_ne_bytes().into());
        assert_eq!(parse_endpoint(&emit(&[nested(&attributes)])), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse_endpoint(&bytes);
            number(&bytes, MPTCP_PM_ATTR_SUBFLOWS);
            let _ = GenericMessage::deserialize(&NetlinkHeader::default(), &bytes);
        }
    }
}
