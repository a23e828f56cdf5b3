//! SETTINGS (RFC 9114 §7.2.4): encodes those of this end, and parses those of the peer.
//!
//! In: [`Settings`], or the payload of a received SETTINGS frame. Out: the payload to send, or
//! [`PeerSettings`]. Always holds: unknown settings are ignored; repeated and HTTP/2 settings are errors.

use std::{
    hash::{BuildHasher, RandomState},
    sync::LazyLock,
};

use super::{H3Error, code};
use crate::varint;
use bytes::BytesMut;

const QPACK_MAX_TABLE_CAPACITY: u64 = 0x01;
const MAX_FIELD_SECTION_SIZE: u64 = 0x06;
const QPACK_BLOCKED_STREAMS: u64 = 0x07;
const ENABLE_CONNECT_PROTOCOL: u64 = 0x08;
const H3_DATAGRAM: u64 = 0x33;

/// The same for all connections of a process. It takes four bytes whatever it is.
static GREASE: LazyLock<u64> =
    LazyLock::new(|| 0x1f * (0x1_0000 + RandomState::new().hash_one(()) % 0x10_0000) + 0x21);

/// The SETTINGS and the limits of this end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Largest header section to accept, in bytes as RFC 9114 §4.2.2 counts them; also the limit for
    /// the encoded form.
    pub max_field_section_size: usize,
    /// Whether HTTP Datagrams are enabled.
    pub datagrams: Datagrams,
    /// Maximum number of concurrent peer-writable streams with state; more are H3_EXCESSIVE_LOAD. The stream
    /// limits of the transport should be lower.
    pub max_streams: usize,
    /// Maximum number of bytes of incomplete header sections over all streams; more are H3_EXCESSIVE_LOAD.
    pub max_buffered: usize,
    /// A setting without meaning, to exercise the rule that peers ignore unknown ones (RFC 9114 §7.2.4.1): an
    /// identifier of the form 0x1f * N + 0x21. Random by default: a constant would name this program to
    /// strangers.
    pub grease: u64,
}

/// Whether HTTP Datagrams may be used (SETTINGS_H3_DATAGRAM, RFC 9297 §2.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Datagrams {
    /// SETTINGS_H3_DATAGRAM = 1.
    Enabled,
    /// SETTINGS_H3_DATAGRAM = 0 or absent.
    #[default]
    Disabled,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_field_section_size: 16 * 1024,
            datagrams: Datagrams::Enabled,
            max_streams: 1024,
            max_buffered: 1024 * 1024,
            grease: *GREASE,
        }
    }
}

impl Settings {
    /// The payload of the SETTINGS frame to send. ENABLE_CONNECT_PROTOCOL has no meaning in the frame of a
    /// client (RFC 9220 §3).
    pub(super) fn payload(&self) -> BytesMut {
        let settings = [
            (QPACK_MAX_TABLE_CAPACITY, 0),
            (MAX_FIELD_SECTION_SIZE, self.max_field_section_size as u64),
            (QPACK_BLOCKED_STREAMS, 0),
            (ENABLE_CONNECT_PROTOCOL, 1),
            (H3_DATAGRAM, u64::from(self.datagrams == Datagrams::Enabled)),
            (self.grease, 1),
        ];
        let mut payload = BytesMut::new();
        for (id, value) in settings {
            varint::encode(id, &mut payload);
            varint::encode(value.min(varint::MAX), &mut payload);
        }
        payload
    }
}

/// The peer's SETTINGS; absent settings have their defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerSettings {
    /// Whether the peer supports extended CONNECT (RFC 9220 §3).
    pub enable_connect_protocol: bool,
    /// Whether the peer supports HTTP Datagrams.
    pub datagrams: Datagrams,
    /// Largest header section the peer accepts, in bytes; `None` is unlimited.
    pub max_field_section_size: Option<u64>,
    /// Maximum size in bytes of a dynamic QPACK table that the peer allows; this crate never uses one.
    pub qpack_max_table_capacity: u64,
    /// Number of streams that may wait for the dynamic table; without one it has no effect.
    pub qpack_blocked_streams: u64,
}

impl PeerSettings {
    pub(super) fn parse(mut payload: &[u8]) -> Result<Self, H3Error> {
        let mut settings = Self::default();
        let mut seen = Vec::new();
        while !payload.is_empty() {
            let cut = || H3Error::new(code::FRAME_ERROR, "SETTINGS ends inside a setting");
            let id = varint::take(&mut payload).ok_or_else(cut)?;
            let value = varint::take(&mut payload).ok_or_else(cut)?;
            seen.push(id);
            settings.set(id, value)?;
        }
        // "The same setting identifier MUST NOT occur more than once" (RFC 9114 §7.2.4).
        seen.sort_unstable();
        match seen.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(error(format!("setting {:#x} appears twice", pair[0]))),
            None => Ok(settings),
        }
    }

    fn set(&mut self, id: u64, value: u64) -> Result<(), H3Error> {
        match id {
            QPACK_MAX_TABLE_CAPACITY => self.qpack_max_table_capacity = value,
            MAX_FIELD_SECTION_SIZE => self.max_field_section_size = Some(value),
            QPACK_BLOCKED_STREAMS => self.qpack_blocked_streams = value,
            ENABLE_CONNECT_PROTOCOL => self.enable_connect_protocol = flag(id, value)?,
            // "If the SETTINGS_H3_DATAGRAM setting is received with a value that is neither 0 nor 1, the
            // receiver MUST terminate the connection with error H3_SETTINGS_ERROR" (RFC 9297 §2.1.1).
            H3_DATAGRAM if flag(id, value)? => self.datagrams = Datagrams::Enabled,
            H3_DATAGRAM => self.datagrams = Datagrams::Disabled,
            // Reserved because HTTP/2 had them: "their receipt MUST be treated as a connection error of
            // type H3_SETTINGS_ERROR" (RFC 9114 §7.2.4.1, §11.2.2).
            0x00 | 0x02..=0x05 => return Err(error(format!("setting {id:#x} belongs to HTTP/2"))),
            _ => {}
        }
        Ok(())
    }
}

fn flag(id: u64, value: u64) -> Result<bool, H3Error> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(error(format!("setting {id:#x} is {value}, expected 0 or 1"))),
    }
}

fn error(reason: String) -> H3Error {
    H3Error::new(code::SETTINGS_ERROR, reason)
}
