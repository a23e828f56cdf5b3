//! With other people's MASQUE at the other end. `docs/protocol.md` lists the versions, `tests/interop` has the programs.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread::{self, JoinHandle},
    time::Duration,
};

use mpvpn_tests::testbed::{Family, Host, Testbed, inet};

mod aioquic;
mod connect_ip_go;
mod http2;
mod masque_go;

/// How long a host behind the server waits for bytes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a host behind the server listens.
fn at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(inet(family).parse().expect("an address"), port)
}

/// A host behind the server that takes so many connections: where it listens, and what comes of the last one.
fn far_end<T: Send + 'static>(
    testbed: &Testbed,
    family: Family,
    connections: u32,
    serve: fn(TcpStream) -> T,
) -> (String, JoinHandle<T>) {
    let listener = testbed.in_namespace(Host::Inet, || TcpListener::bind("[::]:0")).expect("a free port");
    let port = listener.local_addr().expect("a bound socket").port();
    let serving = thread::spawn(move || {
        let one = || {
            let (stream, _) = listener.accept().expect("a connection");
            stream.set_read_timeout(Some(PATIENCE)).expect("a socket takes a time-out");
            thread::spawn(move || serve(stream))
        };
        for _ in 1..connections {
            one();
        }
        one().join().expect("a host that does not panic")
    });
    (at(family, port).to_string(), serving)
}

/// Sends back what comes, and the end after the end.
fn echo(mut stream: TcpStream) {
    let mut back = stream.try_clone().expect("a second handle");
    // Some clients go away in the middle; those that do not find out themselves what is missing.
    if io::copy(&mut stream, &mut back).is_ok() {
        let _ = back.shutdown(Shutdown::Write);
    }
}

/// A host behind the server that sends every datagram back: where it listens.
fn udp_echo(testbed: &Testbed, family: Family) -> SocketAddr {
    let socket = testbed.in_namespace(Host::Inet, || UdpSocket::bind("[::]:0")).expect("a free port");
    let port = socket.local_addr().expect("a bound socket").port();
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket takes a time-out");
    thread::spawn(move || {
        let mut datagram = [0; 65536];
        while let Ok((length, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..length], from);
        }
    });
    at(family, port)
}
