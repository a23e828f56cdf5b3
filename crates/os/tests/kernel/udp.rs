//! UDP sockets, with the real kernel.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use crate::common::{in_namespace, ip};
use mpvpn_os::{
    OsError, Outgoing, Received, RecvBatch, UdpOptions, UdpSocket,
    poll::{Events, Interest, Poller},
    udp::SendFailure,
};

fn socket(local: &str) -> UdpSocket {
    let mut options = UdpOptions::new(local.parse().unwrap());
    options.recv_buffer = Some(8 << 20);
    options.send_buffer = Some(8 << 20);
    UdpSocket::bind(&options).unwrap()
}

fn out(to: SocketAddr, data: &[u8]) -> Outgoing<'_> {
    Outgoing { to, from: None, ecn: None, dscp: 0, segment_size: None, data }
}

/// Receives until `bytes` bytes are there, at most 2 s.
fn receive(socket: &UdpSocket, batch: &mut RecvBatch, bytes: usize) -> Vec<Received> {
    let poller = Poller::new().unwrap();
    poller.add(socket, 0, Interest::Read).unwrap();
    let mut events = Events::with_capacity(1);
    let mut all: Vec<Received> = Vec::new();
    for _ in 0..200 {
        if all.iter().map(|r| r.data.len()).sum::<usize>() >= bytes {
            return all;
        }
        poller.wait(&mut events, Some(Duration::from_millis(10))).unwrap();
        socket.recv_batch(batch).unwrap();
        all.extend(batch.drain());
    }
    panic!("only {} of {bytes} bytes came", all.iter().map(|r| r.data.len()).sum::<usize>());
}

#[test]
fn a_train_arrives_as_a_train() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (a, b) = (socket(address), socket(address));
            let data: Vec<u8> = (0..40 * 1200 + 77).map(|i| (i / 1200) as u8).collect();
            let to = b.local_addr().unwrap();
            a.send(&Outgoing { segment_size: Some(1200), ecn: Some(2), ..out(to, &data) }).unwrap();
            let list = receive(&b, &mut RecvBatch::new(4), data.len());
            assert_eq!(list.len(), 1, "the train was torn");
            assert_eq!(list[0].data, data);
            assert_eq!((list[0].segment_size, list[0].ecn), (1200, 2));
            assert_eq!(list[0].remote, a.local_addr().unwrap());
            assert_eq!(list[0].local_ip, Some(to.ip()));
        }
    });
}

#[test]
fn receiving_from_an_empty_socket_is_no_error() {
    in_namespace(|| {
        let mut batch = RecvBatch::new(4);
        assert_eq!(socket("127.0.0.1:0").recv_batch(&mut batch).unwrap(), 0);
        assert_eq!(batch.drain().count(), 0);
    });
}

#[test]
fn a_datagram_has_the_time_when_the_kernel_received_it() {
    in_namespace(|| {
        let (a, b) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let before = Instant::now();
        a.send(&out(b.local_addr().unwrap(), b"early")).unwrap();
        let sent = Instant::now();
        thread::sleep(Duration::from_millis(30));
        let arrived = receive(&b, &mut RecvBatch::new(4), 5)[0].arrived;
        // The two clocks are read one after the other.
        let slack = Duration::from_millis(1);
        assert!(arrived + slack >= before && arrived <= sent + slack, "{:?} after it left", arrived - sent);
    });
}

#[test]
fn a_train_too_long_for_the_kernel_is_sent_one_by_one() {
    in_namespace(|| {
        let (a, b) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let to = b.local_addr().unwrap();
        let data = vec![1; 300 * 100];
        a.send(&Outgoing { segment_size: Some(100), ..out(to, &data) }).unwrap();
        let list = receive(&b, &mut RecvBatch::new(64), data.len());
        assert!(list.iter().all(|r| r.segment_size == 100));
        // A train that is longer than any UDP datagram can be.
        let data = vec![2; 100_000];
        a.send(&Outgoing { segment_size: Some(1000), ..out(to, &data) }).unwrap();
        receive(&b, &mut RecvBatch::new(64), data.len());
        // The failure of a long train does not disable trains.
        let data = vec![3; 40 * 100];
        a.send(&Outgoing { segment_size: Some(100), ..out(to, &data) }).unwrap();
        assert_eq!(receive(&b, &mut RecvBatch::new(64), data.len()).len(), 1, "the train was torn");
    });
}

#[test]
fn buffers_are_reused_when_their_datagrams_are_dropped() {
    in_namespace(|| {
        let (a, b) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let to = b.local_addr().unwrap();
        let mut batch = RecvBatch::new(1);
        let data = [5; 1200];
        let mut places = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            a.send(&out(to, &data)).unwrap();
            let list = receive(&b, &mut batch, 1200);
            places.insert(list[0].data.as_ptr() as usize / (1 << 20));
        }
        assert!(places.len() <= 2, "datagrams lay in {} different places", places.len());
    });
}

#[test]
fn a_dual_stack_socket_reports_unmapped_ipv4_addresses() {
    in_namespace(|| {
        let (server, client) = (socket("[::]:0"), socket("127.0.0.1:0"));
        let port = server.local_addr().unwrap().port();
        let mut batch = RecvBatch::new(4);
        client
            .send(&Outgoing { ecn: Some(1), ..out(SocketAddr::from(([127, 0, 0, 5], port)), b"ping") })
            .unwrap();
        let got = receive(&server, &mut batch, 4).remove(0);
        assert_eq!(got.remote, client.local_addr().unwrap());
        assert_eq!(got.local_ip, "127.0.0.5".parse().ok());
        assert_eq!(got.ecn, 1);
        // The answer leaves from the address that received the request.
        let data = [6; 600];
        server
            .send(&Outgoing {
                from: got.local_ip,
                ecn: Some(2),
                segment_size: Some(200),
                ..out(got.remote, &data)
            })
            .unwrap();
        let answer = receive(&client, &mut batch, 600).remove(0);
        assert_eq!(answer.remote, SocketAddr::from(([127, 0, 0, 5], port)));
        assert_eq!((answer.ecn, answer.segment_size), (2, 200));
    });
}

#[test]
fn a_bound_device_is_the_only_outgoing_interface() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        ip("address add 10.1.0.1/24 dev v0");
        ip("link set v0 up");
        ip("link set v1 up");
        let mut options = UdpOptions::new("0.0.0.0:0".parse().unwrap());
        options.device = Some("v0".into());
        options.mark = Some(0x6d70);
        let bound = UdpSocket::bind(&options).unwrap();
        let far = "10.1.0.2:9".parse().unwrap();
        bound.send(&out(far, b"x")).unwrap();

        let big = vec![0; 1473];
        let error = bound.send(&out(far, &big)).unwrap_err();
        assert_eq!(SendFailure::of(&error), SendFailure::TooBig, "{error}");
        ip("link set v0 down");
        let error = bound.send(&out(far, b"x")).unwrap_err();
        assert_eq!(SendFailure::of(&error), SendFailure::LinkDown, "{error}");
        ip("link delete v0");
        let error = bound.send(&out(far, b"x")).unwrap_err();
        assert_eq!(SendFailure::of(&error), SendFailure::LinkDown, "{error}");
    });
}

#[test]
fn a_closed_port_does_not_disturb_later_datagrams() {
    in_namespace(|| {
        let (a, b) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let closed = { socket("127.0.0.1:0").local_addr().unwrap() };
        for _ in 0..3 {
            a.send(&out(closed, b"nobody")).unwrap();
            a.send(&out(b.local_addr().unwrap(), b"hello")).unwrap();
        }
        receive(&b, &mut RecvBatch::new(4), 15);
        assert_eq!(a.recv_batch(&mut RecvBatch::new(1)).unwrap(), 0);
    });
}

#[test]
fn an_empty_datagram_is_received() {
    in_namespace(|| {
        let (a, b) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let to = b.local_addr().unwrap();
        for data in [&b"12"[..], b"", b"", b"x"] {
            a.send(&out(to, data)).unwrap();
        }
        let list = receive(&b, &mut RecvBatch::new(8), 3);
        let in_place: Vec<_> =
            list.iter().flat_map(|received| received.payloads().map(<[u8]>::to_vec)).collect();
        assert_eq!(in_place, [&b"12"[..], b"", b"", b"x"]);
        assert!(list.iter().all(|received| received.remote == a.local_addr().unwrap()));
        let taken: Vec<_> = list.into_iter().flat_map(Received::datagrams).collect();
        assert_eq!(taken, in_place);
    });
}

#[test]
fn bind_errors_say_what_to_do() {
    in_namespace(|| {
        let first = socket("127.0.0.1:0");
        let taken = UdpSocket::bind(&UdpOptions::new(first.local_addr().unwrap())).unwrap_err();
        assert!(taken.to_string().contains("ss -ulpn"), "{taken}");
        let mut options = UdpOptions::new("0.0.0.0:0".parse().unwrap());
        options.device = Some("nowhere0".into());
        let error = UdpSocket::bind(&options).unwrap_err();
        assert!(
            matches!(error, OsError::Bind { .. }) && error.to_string().contains("on nowhere0"),
            "{error}"
        );
    });
}
