//! The TCP connections of this network namespace that came in, from `/proc/net/tcp` and `/proc/net/tcp6`
//! (proc(5)).

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use serde::{Deserialize, Serialize};

/// The states in which a socket has a connection that both ends may still send by: ESTABLISHED, SYN_RECV,
/// FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK and CLOSING of linux/net/tcp_states.h.
const CONNECTED: [u8; 7] = [1, 3, 4, 5, 8, 9, 11];
/// The state LISTEN.
const LISTEN: u8 = 10;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

/// Connections at a local address and port that a socket listens at: others have made them. Empty if the
/// kernel does not say.
pub(super) fn inbound_connections() -> Vec<Connection> {
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
    inbound_of(&[read("tcp"), read("tcp6")])
}

fn inbound_of(tables: &[String]) -> Vec<Connection> {
    let sockets: Vec<(u8, Connection)> =
        tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(parse).collect();
    let listening: Vec<SocketAddr> =
        sockets.iter().filter(|(state, _)| *state == LISTEN).map(|(_, socket)| socket.local).collect();
    let is_inbound = |connection: &Connection| {
        listening.iter().any(|listener| {
            // `::` also stands for IPv4, unless the socket is for IPv6 only, and then nothing of IPv4 is at
            // that port.
            listener.port() == connection.local.port()
                && (listener.ip().is_unspecified() || listener.ip() == connection.local.ip())
        })
    };
    let connected = sockets.iter().filter(|(state, _)| CONNECTED.contains(state));
    connected.map(|(_, socket)| *socket).filter(is_inbound).collect()
}

/// Parses a line: number, local address, remote address, state, …
fn parse(line: &str) -> Option<(u8, Connection)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (address(fields.next()?)?, address(fields.next()?)?);
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    Some((state, Connection { local, remote }))
}

/// Parses `IP:PORT` in hexadecimal. The address is printed as words of 32 bits in the byte order of the
/// machine.
pub(crate) fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    if !ip.is_ascii() {
        return None;
    }
    let words: Option<Vec<[u8; 4]>> = (0..ip.len() / 8)
        .map(|at| Some(u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes()))
        .collect();
    let ip = match words?.as_slice() {
        [v4] => IpAddr::V4(Ipv4Addr::from(*v4)),
        words => {
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Ipv6Addr::from(bytes).to_canonical()
        }
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[cfg(target_endian = "little")]
    #[test]
    fn connections_to_a_listening_port_are_found() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let v4 = "   0: 00000000:0016 00000000:0000 0A 00000000:00000000\n   1: 0200650A:0016 020200C0:D431 01 0:0\n   \
                  2: 0200650A:9C40 020200C0:01BB 01 0:0\n   3: 0200650A:0016 020200C0:D432 06 0:0\n";
        let v6 = "   0: B80D0120000000000000000007000000:01BB 00000000000000000000000000000000:0000 0A 0:0\n   \
                  1: B80D0120000000000000000007000000:01BB B80D0120000000000000000009000000:D000 08 0:0\n   \
                  2: 0000000000000000FFFF00000200650A:0016 0000000000000000FFFF0000020200C0:D433 01 0:0\n";
        let shown: Vec<String> = inbound_of(&[format!("{head}{v4}"), format!("{head}{v6}")])
            .iter()
            .map(|connection| format!("{} {}", connection.local, connection.remote))
            .collect();
        assert_eq!(
            shown,
            [
                "10.101.0.2:22 192.0.2.2:54321",
                "[2001:db8::7]:443 [2001:db8::9]:53248",
                "10.101.0.2:22 192.0.2.2:54323",
            ]
        );
    }

    #[test]
    fn the_connections_of_this_process_are_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let out = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_accepted, from) = listener.accept().unwrap();
        let found = inbound_connections();
        let is_it = |local: SocketAddr, remote: SocketAddr| found.contains(&Connection { local, remote });
        assert!(is_it(listener.local_addr().unwrap(), from), "{found:?}");
        assert!(!is_it(out.local_addr().unwrap(), listener.local_addr().unwrap()), "it was made here");
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC*") {
            let _ = inbound_of(&[text.clone(), format!("\n{text}")]);
            let _ = address(&text);
        }
    }
}
