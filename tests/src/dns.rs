//! A name server that knows one answer.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::testbed::{Host, Testbed};

/// The address of every name.
pub const ANSWER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
/// Bytes of a header (RFC 1035 §4.1.1).
const HEADER_BYTES: usize = 12;

/// Answers at port 53 until it is dropped.
pub struct NameServer {
    client_addresses: Arc<Mutex<BTreeSet<IpAddr>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Serves on every address of that host.
    pub fn start(testbed: &Testbed, host: Host) -> Self {
        let socket = testbed.in_namespace(host, || {
            let any: SocketAddr = "[::]:53".parse().expect("an address");
            UdpSocket::bind(any).expect("nobody else serves names")
        });
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket can wait for a while");
        let (client_addresses, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (noted, stopped) = (Arc::clone(&client_addresses), Arc::clone(&stop));
        let thread = thread::spawn(move || serve(&socket, &noted, &stopped));
        Self { client_addresses, stop, thread: Some(thread) }
    }

    /// Who has asked.
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

fn serve(socket: &UdpSocket, client_addresses: &Mutex<BTreeSet<IpAddr>>, stop: &AtomicBool) {
    let mut query = [0; 512];
    while !stop.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
        if let Some(answer) = answer(&query[..length]) {
            client_addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(from.ip().to_canonical());
            // Who asks does so again.
            let _ = socket.send_to(&answer, from);
        }
    }
}

/// The answer to a query with one question (RFC 1035 §4): the address if one was asked for, else none.
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let name_ends = query.get(HEADER_BYTES..)?.iter().position(|byte| *byte == 0)?;
    let question = query.get(HEADER_BYTES..HEADER_BYTES + name_ends + 5)?;
    let is_for_v4 = question[name_ends + 1..] == [0, 1, 0, 1];
    let mut answer = query[..2].to_vec();
    // A response, recursion desired and available, no error; one question and perhaps one answer.
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_for_v4), 0, 0, 0, 0]);
    answer.extend(question);
    if is_for_v4 {
        // The name of the question, type A, class IN, good for no time, 4 bytes.
        answer.extend([0xc0, HEADER_BYTES as u8, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        answer.extend(ANSWER.octets());
    }
    Some(answer)
}
