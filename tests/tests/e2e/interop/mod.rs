//! Tests with other MASQUE implementations. `docs/protocol.md` lists the versions, `tests/interop` has the
//! programs.

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
mod visitors;

/// Read timeout of the hosts behind the server.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Address of the host behind the server.
fn address_behind_server(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(inet(family).parse().expect("an address"), port)
}

/// Accepts `connections` connections on the host behind the server. Returns its address, and the result of
/// `serve` for the last connection.
fn listen_behind_server<T: Send + 'static>(
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
            stream.set_read_timeout(Some(READ_TIMEOUT)).expect("a socket takes a time-out");
            thread::spawn(move || serve(stream))
        };
        for _ in 1..connections {
            one();
        }
        one().join().expect("a host that does not panic")
    });
    (address_behind_server(family, port).to_string(), serving)
}

/// Echoes all bytes, and closes after the peer has closed.
fn echo(mut stream: TcpStream) {
    let mut back = stream.try_clone().expect("a second handle");
    // Clients that stay check the echo themselves; others may leave before the end.
    if io::copy(&mut stream, &mut back).is_ok() {
        let _ = back.shutdown(Shutdown::Write);
    }
}

/// Echoes every datagram on the host behind the server. Returns the address.
fn echo_udp_behind_server(testbed: &Testbed, family: Family) -> SocketAddr {
    let socket = testbed.in_namespace(Host::Inet, || UdpSocket::bind("[::]:0")).expect("a free port");
    let port = socket.local_addr().expect("a bound socket").port();
    socket.set_read_timeout(Some(READ_TIMEOUT)).expect("a socket takes a time-out");
    thread::spawn(move || {
        let mut datagram = [0; 65536];
        while let Ok((length, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..length], from);
        }
    });
    address_behind_server(family, port)
}
