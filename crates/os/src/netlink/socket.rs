//! Requests and answers on one netlink socket (RFC 3549).
//!
//! In: requests. Out: the kernel's answers, or its error with an explanation. Always holds: an answer belongs
//! to the request with the same sequence number; others are skipped.

use std::io;

use netlink_packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NlaBuffer, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{SocketAddr, protocols::NETLINK_ROUTE};

use crate::error::OsError;

/// Bytes of the buffer for one datagram of the kernel, which puts at most 32 KiB of a list into one
/// (af_netlink.c). The part of a longer datagram would be lost.
pub(super) const MAX_DATAGRAM_BYTES: usize = 64 * 1024;
/// Bytes of a message header (struct nlmsghdr).
const HEADER_LEN: usize = 16;
/// The attribute of an acknowledgement that explains an error in words (linux/netlink.h).
const NLMSGERR_ATTR_MSG: u16 = 1;
/// How often a list is read that changes while it is read (NLM_F_DUMP_INTR). After that the caller gets an
/// inconsistent list; more attempts would keep it waiting while routes change all the time.
const MAX_DUMP_ATTEMPTS: usize = 4;

/// The kind of a change: it sets the flags of the request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    /// Creates an object; fails if it exists.
    Add,
    /// Changes an existing object.
    Set,
    /// Removes an object.
    Remove,
}

/// A socket for rtnetlink messages.
#[derive(Debug)]
pub(super) struct Socket {
    socket: netlink_sys::Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

/// Why a request failed.
struct Refusal {
    source: io::Error,
    detail: Option<String>,
}

impl From<io::Error> for Refusal {
    fn from(source: io::Error) -> Self {
        Self { source, detail: None }
    }
}

impl Socket {
    /// Opens a socket.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = netlink_sys::Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Linux before 4.12 does not explain errors in words.
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(MAX_DATAGRAM_BYTES) })
    }

    /// Reads a list (NLM_F_DUMP).
    pub(super) fn dump(
        &mut self,
        operation: &'static str,
        object: impl ToString,
        request: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, OsError> {
        self.request(request, NLM_F_DUMP).map_err(|refusal| os_error(refusal, operation, object))
    }

    /// Requests a change and waits for its acknowledgement.
    pub(super) fn change(
        &mut self,
        change: Change,
        operation: &'static str,
        object: impl ToString,
        request: RouteNetlinkMessage,
    ) -> Result<(), OsError> {
        let flags = match change {
            Change::Add => NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
            Change::Set | Change::Remove => NLM_F_ACK,
        };
        self.request(request, flags).map(drop).map_err(|refusal| os_error(refusal, operation, object))
    }

    /// Sends a request and collects the answers; reads a list again that changed meanwhile (NLM_F_DUMP_INTR).
    fn request(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<Vec<RouteNetlinkMessage>, Refusal> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        let mut answers = Vec::new();
        for _ in 0..MAX_DUMP_ATTEMPTS {
            self.sequence = self.sequence.wrapping_add(1);
            message.header.sequence_number = self.sequence;
            self.socket.send(&encode(&mut message)?, 0)?;
            answers.clear();
            if self.collect(&mut answers)? == Consistency::Complete {
                break;
            }
        }
        Ok(answers)
    }

    fn collect(&mut self, answers: &mut Vec<RouteNetlinkMessage>) -> Result<Consistency, Refusal> {
        let mut consistency = Consistency::Complete;
        loop {
            receive(&self.socket, &mut self.buffer)?;
            for bytes in Messages(&self.buffer) {
                let Some(message) = parse(bytes) else { continue };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                if message.header.flags & NLM_F_DUMP_INTR != 0 {
                    consistency = Consistency::Changed;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => answers.push(inner),
                    NetlinkPayload::Done(_) => return Ok(consistency),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(consistency),
                    NetlinkPayload::Error(error) => return Err(refusal(&error)),
                    _ => {}
                }
            }
        }
    }
}

/// Whether a list changed while it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Consistency {
    Complete,
    Changed,
}

/// Reads one datagram into `buffer`, replacing its content.
pub(crate) fn receive(socket: &netlink_sys::Socket, buffer: &mut Vec<u8>) -> io::Result<()> {
    loop {
        buffer.clear();
        buffer.reserve(MAX_DATAGRAM_BYTES);
        match socket.recv(buffer, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(drop),
        }
    }
}

/// Iterates over the messages in a datagram; stops at a message with an impossible length.
pub(crate) struct Messages<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let length = u32::from_ne_bytes(self.0.get(..4)?.try_into().ok()?) as usize;
        if length < HEADER_LEN {
            return None;
        }
        let message = self.0.get(..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    }
}

/// Parses one message; `None`, and a line in the log, if that is impossible (as for one of a newer kernel).
pub(super) fn parse(bytes: &[u8]) -> Option<NetlinkMessage<RouteNetlinkMessage>> {
    match NetlinkMessage::deserialize(bytes) {
        Ok(message) => Some(message),
        Err(error) => {
            tracing::debug!(%error, "skipped a netlink message that cannot be parsed");
            None
        }
    }
}

/// A request as it is sent.
pub(crate) fn encode(message: &mut NetlinkMessage<RouteNetlinkMessage>) -> io::Result<Vec<u8>> {
    // An attribute has its length in two bytes (struct nlattr), and those that write it do not check that.
    if message.buffer_len() > u16::MAX.into() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a name is too long for a message of the kernel",
        ));
    }
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    Ok(bytes)
}

fn refusal(error: &ErrorMessage) -> Refusal {
    let attributes = error.header.get(HEADER_LEN..).unwrap_or_default();
    let detail = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute: &NlaBuffer<&[u8]>| attribute.kind() == NLMSGERR_ATTR_MSG)
        .map(|attribute| String::from_utf8_lossy(attribute.value()).trim_end_matches('\0').to_owned());
    Refusal { source: error.to_io(), detail }
}

fn os_error(refusal: Refusal, operation: &'static str, object: impl ToString) -> OsError {
    OsError::Kernel { operation, object: object.to_string(), source: refusal.source, detail: refusal.detail }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_datagram_is_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            for message in Messages(&bytes) {
                let _ = parse(message);
            }
        }

        #[test]
        fn any_message_of_a_known_type_is_parsed_without_panic(
            kind in 16_u16..40, body in prop::collection::vec(any::<u8>(), 0..128))
        {
            let mut bytes = vec![0; HEADER_LEN];
            bytes[..4].copy_from_slice(&((HEADER_LEN + body.len()) as u32).to_ne_bytes());
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(&body);
            for message in Messages(&bytes) {
                let _ = parse(message);
            }
        }
    }

    #[test]
    fn a_refusal_has_the_explanation_of_the_kernel() {
        let mut header = vec![0; HEADER_LEN];
        header.extend_from_slice(&[10, 0, 1, 0]);
        header.extend_from_slice(b"no no\0\0\0");
        let mut error = ErrorMessage::default();
        error.code = std::num::NonZeroI32::new(-libc::EINVAL);
        error.header = header;
        let refusal = refusal(&error);
        assert_eq!(refusal.source.raw_os_error(), Some(libc::EINVAL));
        assert_eq!(refusal.detail.as_deref(), Some("no no"));
    }
}
