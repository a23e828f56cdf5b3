//! The parts of DNS messages that a forwarder reads (RFC 1035, section 4), and the errors that it makes
//! itself.

use mpvpn_class::has_plausible_counts;
use simple_dns::{Packet, PacketFlag, RCODE};

/// Bytes of a message's header.
const HEADER: usize = 12;

/// The name that a query asks for, in lower case and without the last dot; `None` if the message is not a
/// query with one question.
pub fn question(query: &[u8]) -> Option<String> {
    let packet = parse(query)?;
    let [question] = packet.questions.as_slice() else { return None };
    (!packet.has_flags(PacketFlag::RESPONSE)).then(|| question.qname.to_string().to_ascii_lowercase())
}

/// Whether `response` answers `query`: it is a response with the same ID and the same question (RFC 5452,
/// section 4).
pub fn answers(response: &[u8], query: &[u8]) -> bool {
    let (Some(asked), Some(packet)) = (question(query), parse(response)) else { return false };
    let same_id = response[..2] == query[..2];
    let same_question = match packet.questions.as_slice() {
        [question] => question.qname.to_string().to_ascii_lowercase() == asked,
        // A resolver that understood nothing may leave the question out.
        [] => packet.rcode() != RCODE::NoError,
        _ => false,
    };
    same_id && packet.has_flags(PacketFlag::RESPONSE) && same_question
}

/// The message; `None` if it is malformed, or shorter than the counts in its header claim, for which memory
/// would be allocated.
pub(super) fn parse(message: &[u8]) -> Option<Packet<'_>> {
    has_plausible_counts(message).then(|| Packet::parse(message).ok()).flatten()
}

/// A response that says that the query is not understood; `None` if there is not even a header, or it is no
/// query.
pub(crate) fn format_error(query: &[u8]) -> Option<Vec<u8>> {
    error(query, 1)
}

/// A response that says that no resolver answered.
pub(crate) fn server_failure(query: &[u8]) -> Option<Vec<u8>> {
    error(query, 2)
}

/// A header alone: an error need not repeat the question.
fn error(query: &[u8], code: u8) -> Option<Vec<u8>> {
    let header = query.get(..HEADER)?;
    let is_response = header[2] & 0x80 != 0;
    // QR and RA are set; opcode and RD are those of the query (RFC 1035, section 4.1.1).
    let flags = [0x80 | header[2] & 0x79, 0x80 | code];
    (!is_response).then(|| [&header[..2], &flags, &[0; 8]].concat())
}
