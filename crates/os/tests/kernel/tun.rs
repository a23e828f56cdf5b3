//! The TUN device with virtio headers, with the real kernel.

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::common::{assert_becomes, in_namespace, ip};
use mpvpn_os::{
    OsError, Tun, TunConfig, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
    sysctl,
    tun::{Offload, READ_BUFFER_LEN, VNET_HEADER_LEN},
    udp::Outgoing,
};

/// Values of `gso_type` (virtio 1.2, 5.1.6).
const GSO_TCP4: u8 = 1;
const GSO_UDP_L4: u8 = 5;

fn tun(name: &str, address: &str) -> Tun {
    let config = TunConfig {
        name: Some(name.into()),
        mtu: Some(1400),
        queue_packets: Some(1000),
        ..TunConfig::default()
    };
    let tun = Tun::open(config).unwrap();
    ip(&format!("address add {address} dev {name}"));
    ip(&format!("link set {name} up"));
    tun
}

/// Waits for the next packet that is IPv4, at most 2 s.
fn next_packet(tun: &Tun, buffer: &mut [u8]) -> usize {
    let poller = Poller::new().unwrap();
    poller.add(tun, 0, Interest::Read).unwrap();
    let mut events = Events::with_capacity(1);
    for _ in 0..20 {
        match tun.read(buffer) {
            Ok(length) if buffer[VNET_HEADER_LEN] >> 4 == 4 => return length,
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                poller.wait(&mut events, Some(Duration::from_millis(100))).unwrap();
            }
        }
    }
    panic!("no packet came");
}

#[test]
fn the_device_has_the_settings_asked_for() {
    in_namespace(|| {
        let tun = tun("t0", "10.9.0.1/24");
        assert_eq!(tun.name(), "t0");
        let shown = ip("-d link show t0");
        assert!(
            shown.contains("mtu 1400") && shown.contains("qlen 1000") && shown.contains("vnet_hdr on"),
            "{shown}"
        );
        assert!(shown.starts_with(&format!("{}:", tun.ifindex())), "{shown}");
        assert!(tun.offload() >= Offload::Tcp);
        drop(tun);
        assert_becomes(&false, || ip("link").contains("t0"));
    });
}

#[test]
fn the_kernel_names_a_device_without_a_name() {
    in_namespace(|| {
        let tun = Tun::open(TunConfig::default()).unwrap();
        assert!(ip("link").contains(tun.name()) && !tun.name().is_empty());
    });
}

#[test]
fn a_name_in_use_names_its_holder() {
    in_namespace(|| {
        let _tun = tun("t0", "10.9.0.1/24");
        let error = Tun::open(TunConfig { name: Some("t0".into()), ..TunConfig::default() }).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("t0") && text.contains("--tun-name"), "{text}");
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        ip("link add v0 type veth peer name v1");
        let error = Tun::open(TunConfig { name: Some("v0".into()), ..TunConfig::default() }).unwrap_err();
        assert!(matches!(error, OsError::NameInUse { .. }), "{error}");
    });
}

#[test]
fn a_train_of_udp_datagrams_is_read_as_one_packet() {
    in_namespace(|| {
        let tun = tun("t0", "10.9.0.1/24");
        if tun.offload() < Offload::TcpAndUdp {
            eprintln!("skipped: this kernel has no USO");
            return;
        }
        let socket = UdpSocket::bind(&UdpOptions::new("10.9.0.1:0".parse().unwrap())).unwrap();
        let data = vec![7; 50 * 1200];
        let out = Outgoing {
            to: "10.9.0.2:9".parse().unwrap(),
            from: None,
            ecn: None,
            dscp: 0,
            segment_size: Some(1200),
            data: &data,
        };
        socket.send(&out).unwrap();
        let mut buffer = vec![0; READ_BUFFER_LEN];
        let length = next_packet(&tun, &mut buffer);
        assert_eq!(length, VNET_HEADER_LEN + 20 + 8 + data.len());
        assert_eq!(buffer[1] & 0x7f, GSO_UDP_L4);
        assert_eq!(u16::from_ne_bytes([buffer[4], buffer[5]]), 1200, "gso_size");
    });
}

/// Two network namespaces, each with a TUN device, and a loop that copies packets between them: TCP only
/// works if both reading and writing of unsegmented packets with unfinished checksums are right.
#[test]
fn tcp_runs_over_two_devices_in_packets_of_64_kib() {
    const BYTES: usize = 32 << 20;
    in_namespace(|| {
        let (give, take) = mpsc::channel();
        let far = std::thread::spawn(move || {
            in_namespace(move || {
                let tun = tun("tb", "10.9.0.2/24");
                let listener = TcpListener::bind("10.9.0.2:5001").unwrap();
                give.send(tun).unwrap();
                let (mut stream, _) = listener.accept().unwrap();
                let mut received = Vec::new();
                stream.read_to_end(&mut received).unwrap();
                received
            })
        });
        let near_tun = tun("ta", "10.9.0.1/24");
        let far_tun = take.recv_timeout(Duration::from_secs(10)).unwrap();
        let sent: Vec<u8> = (0..BYTES).map(|i| (i / 251) as u8).collect();
        let copy = sent.clone();
        let sender = std::thread::spawn(move || {
            let mut stream = TcpStream::connect("10.9.0.2:5001").unwrap();
            stream.write_all(&copy).unwrap();
        });
        let largest = wire(&near_tun, &far_tun, || far.is_finished());
        sender.join().unwrap();
        assert!(far.join().unwrap().unwrap() == sent, "the bytes arrived changed");
        assert!(largest > 60_000, "the largest packet had only {largest} bytes");
    });
}

/// The kernel by itself acts on carriers at most once a second (linkwatch, which all namespaces share), and
/// sends packets into a device without one until then.
#[test]
fn packets_take_the_next_route_at_once_when_a_device_loses_its_carrier() {
    in_namespace(|| {
        let devices = [tun("t0", "10.9.0.1/32"), tun("t1", "10.9.1.1/32")];
        for (name, metric) in [("t0", 10), ("t1", 20)] {
            ip(&format!("address add 2001:db8:9::{metric}/128 dev {name} nodad"));
            for (family, network) in [("ipv4", "198.51.100.0/24"), ("ipv6", "2001:db8:51::/48")] {
                let key = sysctl::interface_key(family, name, "ignore_routes_with_linkdown");
                sysctl::write(&key, "1").unwrap();
                ip(&format!("route add {network} dev {name} metric {metric}"));
            }
        }
        for (carrier, device) in [(false, "t1"), (true, "t0"), (false, "t1"), (true, "t0")] {
            devices[0].set_carrier(carrier).unwrap();
            for to in ["198.51.100.1", "2001:db8:51::1"] {
                let route = ip(&format!("route get {to}"));
                assert!(route.contains(device), "a carrier of t0: {carrier}: {route}");
            }
        }
    });
}

/// Copies packets both ways until `done`, at most 30 s; returns the size of the largest TCP packet.
fn wire(a: &Tun, b: &Tun, done: impl Fn() -> bool) -> usize {
    let poller = Poller::new().unwrap();
    poller.add(a, 0, Interest::Read).unwrap();
    poller.add(b, 1, Interest::Read).unwrap();
    let mut events = Events::with_capacity(2);
    let mut buffer = vec![0; READ_BUFFER_LEN];
    let mut largest = 0;
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "the transfer never ended");
        poller.wait(&mut events, Some(Duration::from_millis(50))).unwrap();
        for (from, to) in [(a, b), (b, a)] {
            while let Ok(length) = from.read(&mut buffer) {
                if buffer[1] & 0x7f == GSO_TCP4 {
                    largest = largest.max(length - VNET_HEADER_LEN);
                }
                let (header, packet) = buffer[..length].split_at(VNET_HEADER_LEN);
                let (first, second) = packet.split_at(packet.len() / 2);
                // A full queue drops the packet; TCP retransmits it.
                let _ = to.write_vectored(&[IoSlice::new(header), IoSlice::new(first), IoSlice::new(second)]);
            }
        }
    }
    largest
}
