//! The least of DNS: one question for an IPv4 address (RFC 1035), asked again until it is answered.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use smoltcp::socket::udp;

use crate::stack::Stack;

const ID: u16 = 0x6d70;
const AGAIN: Duration = Duration::from_secs(1);

/// The first address of `host`.
pub(crate) fn resolve(stack: &mut Stack, server: SocketAddr, host: &str) -> io::Result<Ipv4Addr> {
    let handle = stack.udp()?;
    let question = question(host);
    let mut asked: Option<Instant> = None;
    stack.until(|stack| {
        let socket = stack.socket::<udp::Socket<'_>>(handle);
        if asked.is_none_or(|at| at.elapsed() >= AGAIN) {
            asked = Some(Instant::now());
            socket.send_slice(&question, server).map_err(|error| io::Error::other(error.to_string()))?;
        }
        match socket.recv() {
            Ok((answer, _)) => Ok(first_address(answer)),
            Err(_) => Ok(None),
        }
    })
}

fn question(host: &str) -> Vec<u8> {
    let mut bytes = ID.to_be_bytes().to_vec();
    // Recursion is desired; one question.
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in host.split('.').filter(|label| !label.is_empty()) {
        bytes.push(label.len() as u8);
        bytes.extend(label.bytes());
    }
    // The end of the name, type A, class IN.
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// The first record A of an answer to our question.
fn first_address(answer: &[u8]) -> Option<Ipv4Addr> {
    let word = |at: usize| Some(u16::from_be_bytes([*answer.get(at)?, *answer.get(at + 1)?]));
    if word(0)? != ID {
        return None;
    }
    let mut at = after_name(answer, 12)? + 4;
    for _ in 0..word(6)? {
        at = after_name(answer, at)?;
        let (kind, length) = (word(at)?, usize::from(word(at + 8)?));
        at += 10;
        let data = answer.get(at..at + length)?;
        if let (1, Ok(ip)) = (kind, <[u8; 4]>::try_from(data)) {
            return Some(ip.into());
        }
        at += length;
    }
    None
}

fn after_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            // The rest stands elsewhere.
            0xc0.. => return Some(at + 2),
            length => at += 1 + usize::from(length),
        }
    }
}
