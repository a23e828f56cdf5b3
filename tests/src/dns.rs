//! A name server that answers every question for an IPv4 address with one address, and knows names of
//! addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::testbed::{Host, Testbed};

/// The address in every answer.
pub const ANSWER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
/// Names in this domain get no answer, as those of a zone whose name servers are gone.
pub const DEAD_ZONE: &str = "dead.example";
/// Length of a DNS header, bytes (RFC 1035 §4.1.1).
const HEADER_BYTES: usize = 12;

/// A name server at port 53; stopped when dropped.
pub struct NameServer {
    client_addresses: Arc<Mutex<BTreeSet<IpAddr>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Serves on every address of that host.
    pub fn start(testbed: &Testbed, host: Host) -> Self {
        Self::start_with_names(testbed, host, &[])
    }

    /// The same; these addresses have names.
    pub fn start_with_names(testbed: &Testbed, host: Host, names: &[(Ipv4Addr, &str)]) -> Self {
        let reverse = |ip: &Ipv4Addr| {
            let [a, b, c, d] = ip.octets();
            encoded_name(&format!("{d}.{c}.{b}.{a}.in-addr.arpa"))
        };
        let names = names.iter().map(|(ip, name)| (reverse(ip), encoded_name(name))).collect();
        Self::serve(testbed.in_namespace(host, || bind(Ipv6Addr::UNSPECIFIED.into())), names)
    }

    /// Serves at this address of that host, beside a resolver at others.
    pub fn start_at(testbed: &Testbed, host: Host, address: IpAddr) -> Self {
        Self::serve(testbed.in_namespace(host, || bind(address)), Names::new())
    }

    /// Serves on every address of the network namespace of the calling thread.
    pub fn start_here() -> Self {
        Self::serve(bind(Ipv6Addr::UNSPECIFIED.into()), Names::new())
    }

    fn serve(socket: UdpSocket, names: Names) -> Self {
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket can wait for a while");
        let (client_addresses, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (noted, stopped) = (Arc::clone(&client_addresses), Arc::clone(&stop));
        let thread = thread::spawn(move || serve(&socket, &names, &noted, &stopped));
        Self { client_addresses, stop, thread: Some(thread) }
    }

    /// The addresses that have sent questions.
    pub fn client_addresses(&self) -> Vec<IpAddr> {
        self.client_addresses.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn bind(address: IpAddr) -> UdpSocket {
    UdpSocket::bind(SocketAddr::new(address, 53)).expect("port 53 is free in a network of the tests")
}

/// Names of addresses, by the reverse domains of the addresses, both as encoded in messages.
type Names = BTreeMap<Vec<u8>, Vec<u8>>;

/// A query for the IPv4 address of a name (RFC 1035 §4.1).
pub fn query(id: u16, name: &str) -> Vec<u8> {
    // Recursion desired; one question, of type A in class IN.
    [&id.to_be_bytes()[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0], &encoded_name(name), &[0, 1, 0, 1]].concat()
}

/// A name as a message has it (RFC 1035 §3.1).
fn encoded_name(name: &str) -> Vec<u8> {
    let labels = name.split('.').flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat());
    labels.chain([0]).collect()
}

fn serve(socket: &UdpSocket, names: &Names, client_addresses: &Mutex<BTreeSet<IpAddr>>, stop: &AtomicBool) {
    let (mut query, dead) = ([0; 512], encoded_name(DEAD_ZONE));
    while !stop.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
        if query[..length].windows(dead.len()).any(|part| part == dead) {
            continue;
        }
        if let Some(answer) = answer(&query[..length], names) {
            client_addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(from.ip().to_canonical());
            // A resolver repeats a question whose answer is lost.
            let _ = socket.send_to(&answer, from);
        }
    }
}

/// The response to a query with one question (RFC 1035 §4): one record if the question is for type A, or for
/// a known name of an address, else no record.
fn answer(query: &[u8], names: &Names) -> Option<Vec<u8>> {
    let name_ends = query.get(HEADER_BYTES..)?.iter().position(|byte| *byte == 0)?;
    let question = query.get(HEADER_BYTES..HEADER_BYTES + name_ends + 5)?;
    let (name, kind) = question.split_at(name_ends + 1);
    let (kind_code, data) = match kind {
        [0, 1, 0, 1] => (1, Some(ANSWER.octets().to_vec())),
        [0, 12, 0, 1] => (12, names.get(name).cloned()),
        _ => (0, None),
    };
    let mut answer = query[..2].to_vec();
    // A response, recursion desired and available, no error; one question and perhaps one answer.
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(data.is_some()), 0, 0, 0, 0]);
    answer.extend(question);
    if let Some(data) = data {
        // A pointer to the name in the question, the type, class IN, TTL 0, length of the data.
        answer.extend([0xc0, HEADER_BYTES as u8, 0, kind_code, 0, 1, 0, 0, 0, 0, 0, data.len() as u8]);
        answer.extend(data);
    }
    Some(answer)
}
