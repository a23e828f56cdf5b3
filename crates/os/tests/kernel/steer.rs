//! Sockets that share a port, and queues of one TUN device, with the real kernel.

use std::{
    io::{ErrorKind, IoSlice},
    net::{SocketAddr, UdpSocket as Plain},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::common::{in_namespace, ip, run};
use mpvpn_os::{
    OsError, RecvBatch, Tun, TunConfig, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
    tun::{READ_BUFFER_LEN, VNET_HEADER_LEN},
    udp::bind_reuseport_group,
};

fn received(sockets: &[UdpSocket]) -> Vec<usize> {
    let mut batch = RecvBatch::new(64);
    sockets
        .iter()
        .map(|socket| {
            let mut count = 0;
            while socket.recv_batch(&mut batch).unwrap() > 0 {
                count +=
                    batch.drain().map(|got| got.data.len().div_ceil(got.segment_size.max(1))).sum::<usize>();
            }
            count
        })
        .collect()
}

#[test]
fn datagrams_are_steered_by_connection_id_whatever_their_source() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let sockets = bind_reuseport_group(&UdpOptions::new(address.parse().unwrap()), 3).unwrap();
            let to = sockets[0].local_addr().unwrap();
            for first in 0..=u8::MAX {
                let mut wanted = vec![0; 3];
                wanted[usize::from(first & 0x0f) % 3] = 2;
                // A new socket each time: plain SO_REUSEPORT would spread these at random.
                let from = Plain::bind(SocketAddr::new(to.ip(), 0)).unwrap();
                from.send_to(&[&[0x40, first][..], &[0; 30]].concat(), to).unwrap();
                from.send_to(&[&[0xc0, 0, 0, 0, 1, 8, first][..], &[0; 40]].concat(), to).unwrap();
                assert_eq!(received(&sockets), wanted, "first byte {first:#x} to {to}");
            }
        }
    });
}

#[test]
fn a_group_can_be_bound_while_other_threads_start_programs() {
    in_namespace(|| {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Until it executes its program a child holds copies of all descriptors of this process.
                while !done.load(Ordering::Relaxed) {
                    run("true", "");
                }
            });
            let failed: Vec<_> = (0..2000)
                .filter_map(|_| {
                    bind_reuseport_group(&UdpOptions::new("127.0.0.1:0".parse().unwrap()), 3).err()
                })
                .collect();
            done.store(true, Ordering::Relaxed);
            assert!(failed.is_empty(), "{} of 2000: {}", failed.len(), failed[0]);
        });
    });
}

#[test]
fn a_port_that_another_process_shares_is_refused() {
    in_namespace(|| {
        let options = UdpOptions::new("127.0.0.1:4433".parse().unwrap());
        let _first = bind_reuseport_group(&options, 2).unwrap();
        for count in [1, 2] {
            let error = bind_reuseport_group(&options, count).unwrap_err();
            assert!(matches!(&error, OsError::Bind { .. }), "{error}");
            assert!(error.to_string().contains("ss -ulpn"), "{error}");
        }
    });
}

fn queues(count: u8) -> Vec<Tun> {
    let config = TunConfig { name: Some("q0".into()), queue_packets: Some(100), ..TunConfig::default() };
    let queues = Tun::open_queues(config, count).unwrap();
    ip("address add 10.9.0.1/24 dev q0");
    ip("link set q0 up");
    queues
}

/// UDP from 10.9.0.2 to 10.9.0.1, behind an empty virtio header.
fn packet(from: u16, to: u16) -> Vec<u8> {
    let mut packet = vec![0; VNET_HEADER_LEN];
    packet.extend([0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1]);
    let sum: u32 = packet[VNET_HEADER_LEN..]
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    packet[VNET_HEADER_LEN + 10..][..2].copy_from_slice(&sum.to_be_bytes());
    packet.extend(from.to_be_bytes());
    packet.extend(to.to_be_bytes());
    packet.extend([0, 12, 0, 0, b't', b'e', b's', b't']);
    packet
}

/// Source and destination port of the UDP packets that wait in a queue.
fn waiting(tun: &Tun) -> Vec<(u16, u16)> {
    let mut buffer = vec![0; READ_BUFFER_LEN];
    let mut ports = Vec::new();
    loop {
        match tun.read(&mut buffer) {
            Ok(_) => {
                let ip = &buffer[VNET_HEADER_LEN..];
                if ip[0] == 0x45 && ip[9] == 17 {
                    ports.push((u16::from_be_bytes([ip[20], ip[21]]), u16::from_be_bytes([ip[22], ip[23]])));
                }
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                return ports;
            }
        }
    }
}

#[test]
fn a_packet_of_a_flow_arrives_in_the_queue_that_the_flow_was_written_to() {
    in_namespace(|| {
        let queues = queues(2);
        let echo = Plain::bind("10.9.0.1:7").unwrap();
        echo.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        for port in 2000..2064u16 {
            let up = usize::from(port % 2);
            queues[up].write_vectored(&[IoSlice::new(&packet(port, 7))]).unwrap();
            let (length, from) = echo.recv_from(&mut [0; 64]).unwrap();
            echo.send_to(&[0; 64][..length], from).unwrap();
            assert_eq!(waiting(&queues[up]), [(7, port)], "port {port}");
            assert_eq!(waiting(&queues[1 - up]), [], "port {port}");
        }
    });
}

#[test]
fn a_detached_queue_gets_no_packets() {
    in_namespace(|| {
        let queues = queues(2);
        let sender = Plain::bind("10.9.0.1:0").unwrap();
        let send = |count: u16| {
            for port in 3000..3000 + count {
                sender.send_to(b"test", ("10.9.0.2", port)).unwrap();
            }
        };
        send(32);
        let both = [waiting(&queues[0]).len(), waiting(&queues[1]).len()];
        assert!(both[0] + both[1] == 32 && both[0] > 0 && both[1] > 0, "{both:?}");

        queues[1].set_attached(false).unwrap();
        send(32);
        assert_eq!(waiting(&queues[0]).len(), 32);
        assert!(queues[1].read(&mut [0; READ_BUFFER_LEN]).is_err(), "a queue that is not attached was read");

        queues[1].set_attached(true).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&queues[1], 0, Interest::Read).unwrap();
        assert_eq!(poller.wait(&mut Events::with_capacity(1), Some(Duration::ZERO)).unwrap(), 0);
        send(32);
        let both = [waiting(&queues[0]).len(), waiting(&queues[1]).len()];
        assert!(both[0] + both[1] == 32 && both[0] > 0 && both[1] > 0, "{both:?}");
    });
}

#[test]
fn queues_are_not_added_to_another_process_s_device() {
    in_namespace(|| {
        let _first = queues(2);
        let config = TunConfig { name: Some("q0".into()), ..TunConfig::default() };
        for count in [1, 2] {
            let error = Tun::open_queues(config.clone(), count).unwrap_err();
            assert!(matches!(&error, OsError::NameInUse { .. }), "{error}");
        }
    });
}
