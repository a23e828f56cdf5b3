//! What the kernel's Multipath TCP (RFC 8684) may use beside the path on which a connection began: its path manager,
//! by generic netlink (family `mptcp_pm`).
//!
//! In: addresses of this machine with the interfaces that have them. Out: steps for the journal
//! ([`plan`]), after which every connection that this network namespace opens by Multipath TCP gets a subflow from each of
//! these addresses, out of its interface, whatever device its first one is bound to. Always holds: what somebody else has set up stays, and nothing is set up
//! twice; an endpoint is recognised by its address and interface, never by the number that the kernel gave it.

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
const HEADER: usize = 4;
/// linux/genetlink.h: the family that tells the numbers of the others.
const CONTROL: u16 = 0x10;
const CONTROL_VERSION: u8 = 2;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// linux/mptcp_pm.h.
const NAME: &[u8] = b"mptcp_pm\0";
const VERSION: u8 = 1;
const ADD_ADDR: u8 = 1;
const DEL_ADDR: u8 = 2;
const GET_ADDR: u8 = 3;
const SET_LIMITS: u8 = 5;
const GET_LIMITS: u8 = 6;
const ADDR: u16 = 1;
const ACCEPTED: u16 = 2;
const SUBFLOWS: u16 = 3;
const OF_FAMILY: u16 = 1;
const OF_ID: u16 = 2;
const OF_V4: u16 = 3;
const OF_V6: u16 = 4;
const OF_FLAGS: u16 = 6;
const OF_INTERFACE: u16 = 7;
const FLAG_SUBFLOW: u32 = 1 << 1;
const FLAG_BACKUP: u32 = 1 << 2;
/// Subflows that the kernel allows at most (MPTCP_PM_ADDR_MAX).
const MOST: u32 = 8;

/// An address from which connections get a further subflow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Endpoint {
    /// One of this machine's.
    pub address: IpAddr,
    /// The interface that the subflow leaves by.
    pub interface: u32,
    /// Whether it carries data only while no other subflow does.
    pub backup: bool,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of interface {}", self.address, self.interface)
    }
}

/// How many subflows a connection may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Limits {
    /// Beyond the first one (0 to 8).
    pub subflows: u32,
    /// Addresses of the far end that are taken up (0 to 8).
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
    socket: Socket<Generic>,
    family: u16,
}

impl PathManager {
    /// Opens it.
    ///
    /// # Errors
    /// Where this kernel has no Multipath TCP.
    pub fn open() -> Result<Self, OsError> {
        let mut socket = Socket::<Generic>::open(NETLINK_GENERIC)
            .map_err(|error| OsError::kernel("open", "a netlink socket", error))?;
        let request = Generic {
            family: CONTROL,
            command: GET_FAMILY,
            version: CONTROL_VERSION,
            attributes: emit(&[DefaultNla::new(FAMILY_NAME, NAME.to_vec())]),
        };
        let answers = socket.ask("find", "the path manager of Multipath TCP", request)?;
        let family = answers.iter().find_map(|answer| number(&answer.attributes, FAMILY_ID));
        let family = family.and_then(|number| u16::try_from(number).ok());
        let none = || OsError::kernel("find", "the path manager of Multipath TCP", Errno::NOENT);
        Ok(Self { socket, family: family.ok_or_else(none)? })
    }

    /// The addresses from which connections get further subflows.
    pub fn endpoints(&mut self) -> Result<Vec<Endpoint>, OsError> {
        Ok(self.listed()?.into_iter().map(|(_, endpoint)| endpoint).collect())
    }

    /// Adds one; one that is there already is fine.
    pub fn add(&mut self, endpoint: &Endpoint) -> Result<(), OsError> {
        let flags = FLAG_SUBFLOW | if endpoint.backup { FLAG_BACKUP } else { 0 };
        let mut attributes = of_address(endpoint.address);
        attributes.push(DefaultNla::new(OF_FLAGS, flags.to_ne_bytes().into()));
        attributes.push(DefaultNla::new(OF_INTERFACE, endpoint.interface.to_ne_bytes().into()));
        let request = self.request(ADD_ADDR, &[nested(&attributes)]);
        ignore_present(self.socket.change(Change::Add, "give Multipath TCP", endpoint, request))
    }

    /// Removes one. Its subflows end.
    ///
    /// # Errors
    /// If it is not there, for example.
    pub fn remove(&mut self, endpoint: &Endpoint) -> Result<(), OsError> {
        let same =
            |other: &Endpoint| (other.address, other.interface) == (endpoint.address, endpoint.interface);
        let id = self.listed()?.into_iter().find(|(_, other)| same(other)).map(|(id, _)| id);
        let none = || OsError::kernel("take from Multipath TCP", endpoint, Errno::NOENT);
        let mut attributes = of_address(endpoint.address);
        attributes.push(DefaultNla::new(OF_ID, vec![id.ok_or_else(none)?]));
        let request = self.request(DEL_ADDR, &[nested(&attributes)]);
        self.socket.change(Change::Remove, "take from Multipath TCP", endpoint, request)
    }

    /// How many subflows connections may have.
    pub fn limits(&mut self) -> Result<Limits, OsError> {
        let request = self.request(GET_LIMITS, &[]);
        let answers = self.socket.ask("read", "the limits of Multipath TCP", request)?;
        let limits = |answer: &Generic| {
            let of = |kind| number(&answer.attributes, kind);
            Some(Limits { subflows: of(SUBFLOWS)?, accepted: of(ACCEPTED)? })
        };
        let none = || OsError::kernel("read", "the limits of Multipath TCP", Errno::NODATA);
        answers.iter().find_map(limits).ok_or_else(none)
    }

    /// Sets that, for connections of this network namespace that begin later.
    pub fn set_limits(&mut self, limits: Limits) -> Result<(), OsError> {
        let number = |kind, value: u32| DefaultNla::new(kind, value.to_ne_bytes().into());
        let attributes = [number(ACCEPTED, limits.accepted), number(SUBFLOWS, limits.subflows)];
        let request = self.request(SET_LIMITS, &attributes);
        self.socket.change(Change::Set, "limit Multipath TCP to", limits, request)
    }

    fn listed(&mut self) -> Result<Vec<(u8, Endpoint)>, OsError> {
        let request = self.request(GET_ADDR, &[]);
        let answers = self.socket.dump("list", "the addresses of Multipath TCP", request)?;
        Ok(answers.iter().filter_map(|answer| listed(&answer.attributes)).collect())
    }

    fn request(&self, command: u8, attributes: &[DefaultNla]) -> Generic {
        Generic { family: self.family, command, version: VERSION, attributes: emit(attributes) }
    }
}

/// What has to be done that connections get a subflow from each of `wanted`: what is so already is left out.
///
/// # Errors
/// Where this kernel has no Multipath TCP, or does not tell what it uses.
pub fn plan(wanted: &[Endpoint]) -> Result<Vec<Step>, OsError> {
    let mut manager = PathManager::open()?;
    let (present, before) = (manager.endpoints()?, manager.limits()?);
    let is_new = |endpoint: &&Endpoint| {
        !present
            .iter()
            .any(|other| (other.address, other.interface) == (endpoint.address, endpoint.interface))
    };
    let new: Vec<&Endpoint> = wanted.iter().filter(is_new).collect();
    let needed = u32::try_from(present.len() + new.len()).unwrap_or(MOST).min(MOST);
    let set = Limits { subflows: before.subflows.max(needed), ..before };
    let limits = (set != before).then_some(Step::MptcpLimits { before, set });
    let added = new.into_iter().map(|endpoint| Step::MptcpEndpoint { endpoint: endpoint.clone() });
    Ok(limits.into_iter().chain(added).collect())
}

/// A message of generic netlink.
#[derive(Clone, Debug)]
struct Generic {
    family: u16,
    command: u8,
    version: u8,
    attributes: Vec<u8>,
}

impl NetlinkSerializable for Generic {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer[..HEADER].copy_from_slice(&[self.command, self.version, 0, 0]);
        buffer[HEADER..self.buffer_len()].copy_from_slice(&self.attributes);
    }
}

impl NetlinkDeserializable for Generic {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let (head, attributes) = payload
            .split_at_checked(HEADER)
            .ok_or_else(|| DecodeError::from("a message without its head"))?;
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

/// The address of a request, which holds others.
fn nested(attributes: &[DefaultNla]) -> DefaultNla {
    DefaultNla::new(ADDR | NLA_F_NESTED, emit(attributes))
}

fn of_address(address: IpAddr) -> Vec<DefaultNla> {
    let (family, kind, octets) = match address {
        IpAddr::V4(ip) => (libc::AF_INET as u16, OF_V4, ip.octets().to_vec()),
        IpAddr::V6(ip) => (libc::AF_INET6 as u16, OF_V6, ip.octets().to_vec()),
    };
    vec![DefaultNla::new(OF_FAMILY, family.to_ne_bytes().into()), DefaultNla::new(kind, octets)]
}

/// The value of the attribute of this kind.
fn value(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute: &NlaBuffer<&[u8]>| attribute.kind() == kind)
        .and_then(|attribute| {
            let length = attribute.value_length();
            attribute.into_inner().get(NLA_HEADER_SIZE..NLA_HEADER_SIZE + length)
        })
}

/// The same as a number of one, two or four bytes.
fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    match *value(attributes, kind)? {
        [a] => Some(a.into()),
        [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d])),
        _ => None,
    }
}

/// An endpoint for subflows, and its number.
fn listed(attributes: &[u8]) -> Option<(u8, Endpoint)> {
    let of = value(attributes, ADDR)?;
    let v4 = value(of, OF_V4).and_then(|octets| <[u8; 4]>::try_from(octets).ok());
    let v6 = value(of, OF_V6).and_then(|octets| <[u8; 16]>::try_from(octets).ok());
    let address = v4.map(|octets| IpAddr::V4(Ipv4Addr::from(octets)));
    let address = address.or_else(|| v6.map(|octets| IpAddr::V6(Ipv6Addr::from(octets))))?;
    let flags = number(of, OF_FLAGS).unwrap_or_default();
    let endpoint = Endpoint {
        address,
        interface: number(of, OF_INTERFACE).unwrap_or_default(),
        backup: flags & FLAG_BACKUP != 0,
    };
    let id = u8::try_from(number(of, OF_ID)?).ok()?;
    (flags & FLAG_SUBFLOW != 0).then_some((id, endpoint))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_endpoint_is_read_as_it_was_written() {
        let mut attributes = of_address("2001:db8::7".parse().unwrap());
        attributes.push(DefaultNla::new(OF_ID, vec![3]));
        attributes.push(DefaultNla::new(OF_FLAGS, (FLAG_SUBFLOW | FLAG_BACKUP).to_ne_bytes().into()));
        attributes.push(DefaultNla::new(OF_INTERFACE, 7_u32.to_ne_bytes().into()));
        let bytes = emit(&[nested(&attributes)]);
        let endpoint = Endpoint { address: "2001:db8::7".parse().unwrap(), interface: 7, backup: true };
        assert_eq!(listed(&bytes), Some((3, endpoint)));
        // One that is only announced to the far end is none of ours.
        attributes[3] = DefaultNla::new(OF_FLAGS, 1_u32.to_ne_bytes().into());
        assert_eq!(listed(&emit(&[nested(&attributes)])), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            listed(&bytes);
            number(&bytes, SUBFLOWS);
            let _ = Generic::deserialize(&NetlinkHeader::default(), &bytes);
        }
    }
}
