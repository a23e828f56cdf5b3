//! How many bytes forwarded ports have carried.
//!
//! In: the counters of the kernel (NFT_MSG_GETOBJ of linux/netfilter/nf_tables.h). Out: bytes of each port.
//! Always holds: a table that was removed and comes back begins at 0, and its bytes stay counted as far as
//! [`ForwardCounters::read`] has seen them; to read takes no program and no right but CAP_NET_ADMIN.

use std::{collections::BTreeMap, io, mem};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

use super::{forward, table_name};
use crate::netlink;

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_NEWOBJ: u16 = NFNL_SUBSYS_NFTABLES << 8 | 18;
const NFT_MSG_GETOBJ: u16 = NFNL_SUBSYS_NFTABLES << 8 | 19;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NFPROTO_INET: u8 = 1;
const NFTA_OBJ_TABLE: u16 = 1;
const NFTA_OBJ_NAME: u16 = 2;
const NFTA_OBJ_DATA: u16 = 4;
const NFTA_COUNTER_BYTES: u16 = 1;
/// Bytes of a message's header, and of the header of messages of netfilter (struct nfgenmsg).
const HEADERS_LEN: usize = 16 + 4;

/// The bytes of IP packets that a forwarded port has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwardedBytes {
    /// To the host.
    pub to_host: u64,
    /// From the host.
    pub from_host: u64,
}

/// A counter of the kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    /// The bytes of tables that were removed.
    before: u64,
    now: u64,
}

/// The counters of the forwards in one table.
#[derive(Debug)]
pub struct ForwardCounters {
    socket: Option<Socket>,
    sequence: u32,
    table: String,
    counters: BTreeMap<String, Counter>,
}

impl ForwardCounters {
    /// The counters of the server with this TUN device.
    pub fn of_server(tun: &str) -> Self {
        Self::of_table(forward::table(tun))
    }

    /// The counters of the client with this TUN device.
    pub fn of_client(tun: &str) -> Self {
        Self::of_table(table_name(&format!("{tun} site")))
    }

    fn of_table(table: String) -> Self {
        Self { socket: None, sequence: 0, table, counters: BTreeMap::new() }
    }

    /// Reads the counters. They are read before and after the table changes, too, as it may be removed.
    pub fn read(&mut self) {
        match self.ask() {
            Ok(found) => self.take(found),
            Err(error) => tracing::debug!(%error, "cannot read the counters of forwards"),
        }
    }

    /// The bytes of the forward of a protocol whose first port is `port`, as they were read last.
    pub fn of(&self, protocol: u8, port: u16) -> ForwardedBytes {
        let [to_host, from_host] = names(protocol, port).map(|name| {
            self.counters.get(&name).map_or(0, |counter| counter.before.saturating_add(counter.now))
        });
        ForwardedBytes { to_host, from_host }
    }

    fn take(&mut self, mut found: BTreeMap<String, u64>) {
        for (name, counter) in &mut self.counters {
            let before = mem::replace(&mut counter.now, found.remove(name).unwrap_or(0));
            if counter.now < before {
                counter.before = counter.before.saturating_add(before);
            }
        }
        let fresh = found.into_iter().map(|(name, now)| (name, Counter { before: 0, now }));
        self.counters.extend(fresh);
    }

    /// The counters of the table; none without it.
    fn ask(&mut self) -> io::Result<BTreeMap<String, u64>> {
        if self.socket.is_none() {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            self.socket = Some(socket);
        }
        let Some(socket) = &self.socket else { return Ok(BTreeMap::new()) };
        self.sequence = self.sequence.wrapping_add(1);
        socket.send(&request(&self.table, self.sequence), 0)?;
        let (mut found, mut buffer) = (BTreeMap::new(), Vec::new());
        loop {
            netlink::receive(socket, &mut buffer)?;
            for message in netlink::Messages(&buffer) {
                let word = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
                let kind = message.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
                match kind.filter(|_| word(8) == Some(self.sequence)) {
                    Some(NFT_MSG_NEWOBJ) => found.extend(counter(message, &self.table)),
                    Some(NLMSG_DONE) => return Ok(found),
                    Some(NLMSG_ERROR) => {
                        let code = word(16).unwrap_or(0).cast_signed().saturating_neg();
                        return Err(io::Error::from_raw_os_error(code));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// The names of the counters of a forward: to the host, and back.
pub(super) fn names(protocol: u8, first_port: u16) -> [String; 2] {
    ["to", "back"].map(|way| format!("forward_{protocol}_{first_port}_{way}"))
}

/// The request for all counters of a table.
fn request(table: &str, sequence: u32) -> Vec<u8> {
    let name_len = 4 + table.len() + 1;
    let length = HEADERS_LEN + name_len.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(NFT_MSG_GETOBJ.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend([NFPROTO_INET, 0, 0, 0]);
    bytes.extend((name_len as u16).to_ne_bytes());
    bytes.extend(NFTA_OBJ_TABLE.to_ne_bytes());
    bytes.extend(table.as_bytes());
    bytes.resize(length, 0);
    bytes
}

/// The name and the bytes of a counter of the table.
fn counter(message: &[u8], table: &str) -> Option<(String, u64)> {
    let attributes = message.get(HEADERS_LEN..)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    if text(attribute(attributes, NFTA_OBJ_TABLE)?) != table {
        return None;
    }
    let bytes = attribute(attribute(attributes, NFTA_OBJ_DATA)?, NFTA_COUNTER_BYTES)?;
    Some((text(attribute(attributes, NFTA_OBJ_NAME)?), u64::from_be_bytes(bytes.try_into().ok()?)))
}

/// The value of the first attribute of this kind (struct nlattr; the two highest bits of a kind are flags).
fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let (&[a, b, c, d], _) = attributes.split_first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([c, d]) & 0x3fff == kind {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bytes_of_a_table_that_was_removed_stay_counted() {
        let mut counters = ForwardCounters::of_server("t0");
        let [to, back] = names(6, 80);
        let found = |to_host, from_host| BTreeMap::from([(to.clone(), to_host), (back.clone(), from_host)]);
        let mut at = |found| {
            counters.take(found);
            let ForwardedBytes { to_host, from_host } = counters.of(6, 80);
            (to_host, from_host)
        };
        assert_eq!(at(found(100, 1000)), (100, 1000));
        assert_eq!(at(found(150, 1000)), (150, 1000));
        assert_eq!(at(found(0, 0)), (150, 1000), "the table was removed, and is there again");
        assert_eq!(at(BTreeMap::new()), (150, 1000), "nobody is there");
        assert_eq!(at(found(7, 9)), (157, 1009));
    }

    #[test]
    fn a_request_is_one_message_and_no_table_is_no_error() {
        let bytes = request("mpvpn_t0_forwards", 7);
        assert_eq!(netlink::Messages(&bytes).map(<[u8]>::len).collect::<Vec<_>>(), [bytes.len()]);
        let mut message = bytes;
        assert_eq!(counter(&message, "mpvpn_t0_forwards"), None, "no counter");
        let mut nested = vec![16, 0, NFTA_OBJ_DATA as u8, 0x80, 12, 0, NFTA_COUNTER_BYTES as u8, 0];
        nested.extend(4711u64.to_be_bytes());
        message.extend([6, 0, NFTA_OBJ_NAME as u8, 0, b'a', 0, 0, 0]);
        message.extend(nested);
        assert_eq!(counter(&message, "mpvpn_t0_forwards"), Some(("a".to_owned(), 4711)));
        assert_eq!(counter(&message, "mpvpn_t1_forwards"), None);
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            for message in netlink::Messages(&bytes) {
                let _ = counter(message, "t");
            }
            let _ = counter(&bytes, "t");
        }
    }
}
