use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpStream, UdpSocket},
    time::Instant,
};

use mpvpn_status::measure::{DATAGRAM_BYTES, DatagramReport, Order, ResponderReport, SentDatagrams};
use serde::de::DeserializeOwned;

use super::*;

/// An address of the loopback device that no other test uses.
const RESPONDER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 94);
const TIMEOUT: Duration = Duration::from_secs(20);

fn connect() -> TcpStream {
    let stream = TcpStream::connect((RESPONDER, RESPONDER_PORT)).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn ask<T: DeserializeOwned>(stream: &TcpStream, order: Order) -> T {
    let mut stream = stream;
    stream.write_all(order.line().as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect((RESPONDER, RESPONDER_PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    socket
}

fn datagram(kind: DatagramKind, run: u32, sequence: u32) -> Vec<u8> {
    let mut bytes = Datagram { kind, run, sequence, sent_us: 9 }.encode().to_vec();
    bytes.resize(100, 0);
    bytes
}

/// One responder for all, because its port is fixed.
#[test]
fn orders_are_fulfilled_for_those_that_are_connected_and_for_nobody_else() {
    let network = IpNet::new(RESPONDER.into(), 8).unwrap();
    let Some(responder) = Responder::start("lo", &[network]) else { panic!("it does not start") };
    let udp = socket();
    udp.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut buffer = [0; 2000];
    udp.send(&datagram(DatagramKind::EchoRequest, 1, 1)).unwrap();
    assert!(udp.recv(&mut buffer).is_err(), "nobody is connected from this address");

    let control = connect();
    let first: ResponderReport = ask(&control, Order::Report);
    assert!(first.resident_bytes > 100_000);
    let udp = socket();
    udp.send(&datagram(DatagramKind::EchoRequest, 1, 5)).unwrap();
    let length = udp.recv(&mut buffer).unwrap();
    let reply = Datagram { kind: DatagramKind::EchoReply, run: 1, sequence: 5, sent_us: 9 };
    assert_eq!((length, Datagram::parse(&buffer[..length])), (100, Some(reply)));
    // Neither data nor replies are answered, and what is no datagram of ours is not, either.
    udp.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    for other in [datagram(DatagramKind::Data, 2, 0), datagram(DatagramKind::EchoReply, 1, 0), vec![1; 50]] {
        udp.send(&other).unwrap();
    }
    assert!(udp.recv(&mut buffer).is_err());
    udp.send(&datagram(DatagramKind::Data, 2, 1)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let counted: DatagramReport = ask(&control, Order::UdpReceived { run: 2 });
    assert_eq!((counted.datagrams, counted.bytes), (2, 200));

    uploads_and_downloads_are_counted(&control);
    datagrams_come_at_the_rate(&control);

    // A second order for datagrams meanwhile, orders that are none, and lines without end close the
    // connection.
    for bad in ["GET / HTTP/1.1\n".to_owned(), "x".repeat(2000), "{}\n".to_owned()] {
        let mut other = connect();
        other.write_all(bad.as_bytes()).unwrap();
        let ended = other.read(&mut buffer);
        assert!(matches!(ended, Ok(0)) || ended.is_err(), "{bad}: {ended:?}");
    }
    drop(responder);
    assert!(TcpStream::connect((RESPONDER, RESPONDER_PORT)).is_err(), "it has ended");
}

fn uploads_and_downloads_are_counted(control: &TcpStream) {
    let mut up = connect();
    up.write_all(Order::Receive.line().as_bytes()).unwrap();
    up.write_all(&vec![0; 3_000_000]).unwrap();
    drop(up);
    let mut down = connect();
    down.write_all(Order::Send.line().as_bytes()).unwrap();
    let mut got = vec![1; 2_000_000];
    down.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == 0));
    drop(down);
    let began = Instant::now();
    loop {
        let report: ResponderReport = ask(control, Order::Report);
        if report.received_bytes == 3_000_000 && report.segments > 0 {
            // A busy machine lets tail loss probes (RFC 8985) fire even here.
            assert!(report.retransmitted * 4 <= report.segments, "{report:?}");
            return;
        }
        assert!(began.elapsed() < TIMEOUT, "{report:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn datagrams_come_at_the_rate(control: &TcpStream) {
    let udp = socket();
    let order = Order::SendUdp {
        port: udp.local_addr().unwrap().port(),
        run: 8,
        bits_per_second: 500_000,
        milliseconds: 500,
    };
    let sent: SentDatagrams = ask(control, order);
    // 250 kbit in datagrams of 1200 bytes.
    assert!((10..=27).contains(&sent.datagrams), "{sent:?}");
    let mut buffer = [0; 2000];
    for sequence in 0..sent.datagrams {
        let length = udp.recv(&mut buffer).unwrap();
        let header = Datagram::parse(&buffer[..length]).unwrap();
        assert_eq!((length, header.run, u64::from(header.sequence)), (DATAGRAM_BYTES, 8, sequence));
    }
}
