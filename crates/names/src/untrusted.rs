//! Parsers of DNS messages from strangers, without sockets, for the fuzzers (`fuzz/`).
//!
//! In: messages as they come from the network. Out: what the forwarding resolver makes of them. Nothing here
//! is different from what it does; only the sockets are missing.

use std::io;

pub use crate::dns::message::{answers as is_dns_answer, question as dns_question};
use crate::dns::{answer_bytes, message};

/// The errors that the forwarding resolver makes for a query: not understood, and not answered.
pub fn dns_errors(query: &[u8]) -> [Option<Vec<u8>>; 2] {
    [message::format_error(query), message::server_failure(query)]
}

/// The bytes that a host gets on a TCP connection on which it sends `sent`, from a forwarding resolver whose
/// own resolver sends `answer` on each connection.
///
/// # Errors
/// If the machine has no descriptors left for timers.
pub fn dns_connection(sent: &[u8], answer: &[u8]) -> io::Result<Vec<u8>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    Ok(runtime.block_on(answer_bytes(sent, answer)))
}
