//! Reads capsules from a stream of bytes.
//!
//! In: the bytes of a stream, in any pieces. Out: capsules, or an error. Always holds: at most one incomplete
//! capsule of a known type is buffered.

use super::{Capsule, CapsuleError, DATAGRAM};
use crate::varint;
use bytes::{Buf, BytesMut};
use ipnet::IpNet;
use std::net::IpAddr;

/// Reads capsules from a stream, whatever the pieces in which it arrives.
///
/// Call [`push`](Self::push) with each piece, then [`next`](Self::next) until it returns nothing, and
/// [`finish`](Self::finish) when the stream ends cleanly. After an error the reader returns the same error
/// and buffers nothing: the stream must be aborted.
#[derive(Debug, Default)]
pub struct CapsuleReader {
    bytes: BytesMut,
    /// Remaining bytes of an unknown capsule to skip.
    skip: u64,
    host_bits: HostBits,
    /// If set, only DATAGRAM capsules are read, with values of at most this many bytes.
    datagrams_only: Option<usize>,
    failed: Option<CapsuleError>,
}

/// How to treat bits after the prefix in an assigned address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HostBits {
    #[default]
    Refuse,
    Mask,
}

impl CapsuleReader {
    /// A reader that enforces every rule.
    pub fn new() -> Self {
        Self::default()
    }

    /// A reader that clears the bits after the prefix in ADDRESS_ASSIGN instead of failing: some
    /// deployed servers (mqvpn) send their IPv6 assignment as `address/64`. All other rules hold.
    pub fn lenient() -> Self {
        Self { host_bits: HostBits::Mask, ..Self::default() }
    }

    /// A reader of DATAGRAM capsules only, for CONNECT-UDP streams: all other types are unknown. A datagram
    /// with a value of more than `max` bytes is skipped like an unknown capsule, because datagrams may be
    /// dropped (RFC 9297 §3.5).
    pub fn datagrams(max: usize) -> Self {
        Self { datagrams_only: Some(max), ..Self::default() }
    }

    /// Takes the next bytes of the stream.
    pub fn push(&mut self, mut bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        let skipped = self.skip.min(bytes.len() as u64);
        bytes.advance(skipped as usize);
        self.skip -= skipped;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete capsule; `None` until more bytes come.
    ///
    /// # Errors
    /// If the stream is malformed; the same error comes again from then on.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would end at the first None; this does not"
    )]
    pub fn next(&mut self) -> Result<Option<Capsule>, CapsuleError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.read().inspect_err(|error| {
            self.failed = Some(error.clone());
            self.bytes = BytesMut::new();
        })
    }

    /// Checks that the stream may end here, at its clean end.
    ///
    /// # Errors
    /// If it ends inside a capsule, or has failed before.
    pub fn finish(&self) -> Result<(), CapsuleError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.skip > 0 || !self.bytes.is_empty() { Err(CapsuleError::Truncated) } else { Ok(()) }
    }

    /// Number of buffered bytes of an incomplete capsule.
    pub fn buffered(&self) -> usize {
        self.bytes.len()
    }

    fn read(&mut self) -> Result<Option<Capsule>, CapsuleError> {
        let Some((kind, at)) = varint::decode(&self.bytes) else { return Ok(None) };
        let Some((len, len_len)) = varint::decode(&self.bytes[at..]) else { return Ok(None) };
        let header = at + len_len;
        let limit = Capsule::size_limit(kind).filter(|_| self.datagrams_only.is_none() || kind == DATAGRAM);
        if let Some(max) = limit.filter(|max| len > *max as u64) {
            return Err(CapsuleError::TooLarge { kind, len, max });
        }
        if limit.is_none() || self.datagrams_only.is_some_and(|max| len > max as u64) {
            self.skip_value(header, len);
            return Ok(Some(Capsule::Unknown { kind }));
        }
        if self.bytes.len() < header + len as usize {
            return Ok(None);
        }
        self.bytes.advance(header);
        let value = self.bytes.split_to(len as usize).freeze();
        Capsule::parse(kind, value, self.host_bits).map(Some)
    }

    fn skip_value(&mut self, header: usize, len: u64) {
        self.bytes.advance(header);
        let here = len.min(self.bytes.len() as u64);
        self.bytes.advance(here as usize);
        self.skip = len - here;
    }
}

#[derive(Clone, Copy)]
pub(super) enum Version {
    V4,
    V6,
}

/// Reads the fields of one capsule's value.
pub(super) struct Fields<'a> {
    pub(super) kind: u64,
    pub(super) left: &'a [u8],
}

impl Fields<'_> {
    pub(super) fn varint(&mut self) -> Result<u64, CapsuleError> {
        varint::take(&mut self.left).ok_or(self.truncated())
    }

    pub(super) fn byte(&mut self) -> Result<u8, CapsuleError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    pub(super) fn version(&mut self) -> Result<Version, CapsuleError> {
        match self.byte()? {
            4 => Ok(Version::V4),
            6 => Ok(Version::V6),
            version => Err(CapsuleError::IpVersion { kind: self.kind, version }),
        }
    }

    pub(super) fn addr(&mut self, version: Version) -> Result<IpAddr, CapsuleError> {
        Ok(match version {
            Version::V4 => IpAddr::from(self.array::<4>()?),
            Version::V6 => IpAddr::from(self.array::<16>()?),
        })
    }

    pub(super) fn net(&mut self, host_bits: HostBits) -> Result<IpNet, CapsuleError> {
        let version = self.version()?;
        let (addr, len) = (self.addr(version)?, self.byte()?);
        let net =
            IpNet::new(addr, len).map_err(|_| CapsuleError::PrefixLength { kind: self.kind, addr, len })?;
        if net.network() == addr {
            return Ok(net);
        }
        match host_bits {
            HostBits::Mask => Ok(net.trunc()),
            HostBits::Refuse => Err(CapsuleError::HostBits { kind: self.kind, net }),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CapsuleError> {
        let (array, left) = self.left.split_first_chunk::<N>().ok_or(self.truncated())?;
        self.left = left;
        Ok(*array)
    }

    fn truncated(&self) -> CapsuleError {
        CapsuleError::TruncatedEntry { kind: self.kind }
    }
}
