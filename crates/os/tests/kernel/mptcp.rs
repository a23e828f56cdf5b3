//! Multipath TCP over two links, against the kernel.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use crate::common::{Folder, in_namespace, ip};
use mpvpn_os::{
    TcpAcceptor, TcpOptions, TcpSocket, UndoJournal,
    netlink::{
        Netlink,
        mptcp::{Endpoint, Limits, PathManager, plan},
    },
    poll::{Events, Interest, Poller},
    tcp::{ListenOptions, MptcpState, Protocol},
    undo::Step,
};

const SERVER: &str = "10.7.0.1:443";

/// Whether this kernel has Multipath TCP; prints that the test is skipped if not.
fn has_mptcp() -> bool {
    let has = std::path::Path::new("/proc/sys/net/mptcp/enabled").exists();
    if !has {
        eprintln!("skipped: this kernel has no Multipath TCP");
    }
    has
}

/// Two links `link_a` and `link_b` to the namespace of the thread `far`, where the server's address is.
fn links(far: i32) {
    for (name, net) in [("link_a", 1), ("link_b", 2)] {
        ip(&format!("link add {name} type veth peer name far_{name}"));
        ip(&format!("link set far_{name} netns {far}"));
        ip(&format!("address add 10.{net}.0.2/24 dev {name}"));
        ip(&format!("link set {name} up"));
        ip(&format!("route add default via 10.{net}.0.1 dev {name} metric {net}"));
    }
}

fn far_end() {
    for (name, net) in [("far_link_a", 1), ("far_link_b", 2)] {
        ip(&format!("address add 10.{net}.0.1/24 dev {name}"));
        ip(&format!("link set {name} up"));
    }
    ip("address add 10.7.0.1/32 dev lo");
}

fn endpoints() -> Vec<Endpoint> {
    let mut netlink = Netlink::open().unwrap();
    [("link_a", "10.1.0.2"), ("link_b", "10.2.0.2")]
        .map(|(name, address)| Endpoint {
            address: address.parse().unwrap(),
            interface: netlink.index_of(name).unwrap(),
            backup: false,
        })
        .into()
}

fn connect(options: TcpOptions) -> TcpStream {
    let to: SocketAddr = SERVER.parse().unwrap();
    let socket = TcpSocket::open(to, &TcpOptions { protocol: Protocol::Mptcp, ..options }).unwrap();
    socket.start_connect(to).unwrap();
    let poller = Poller::new().unwrap();
    poller.add(&socket, 0, Interest::Write).unwrap();
    assert_eq!(poller.wait(&mut Events::with_capacity(1), Some(Duration::from_secs(5))).unwrap(), 1);
    socket.connect_result().unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    stream
}

/// The local addresses of the connection's subflows, once there are `count`.
fn sources(stream: &TcpStream, count: usize) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let MptcpState::Active(subflows) = MptcpState::of(stream.as_fd()).unwrap() else {
            panic!("fell back to TCP")
        };
        if subflows.len() >= count || Instant::now() > deadline {
            let mut all: Vec<_> = subflows.iter().map(|flow| flow.local.ip().to_string()).collect();
            all.sort();
            return all;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn connections_get_a_subflow_from_each_link_until_the_journal_reverts_the_endpoints() {
    in_namespace(|| {
        if !has_mptcp() {
            return;
        }
        let (tell_far, far) = channel();
        let (ready, wait_for_far) = channel();
        let server = thread::spawn(move || {
            in_namespace(move || {
                tell_far.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                wait_for_far.recv().unwrap();
                far_end();
                let options = ListenOptions { protocol: Protocol::Mptcp, ..ListenOptions::default() };
                let listener =
                    TcpListener::from(TcpAcceptor::listen(SERVER.parse().unwrap(), options).unwrap());
                listener.set_nonblocking(false).unwrap();
                tell_far.send(0).unwrap();
                let mut kept = Vec::new();
                for _ in 0..3 {
                    let (mut stream, _) = listener.accept().unwrap();
                    stream.read_exact(&mut [0; 4]).unwrap();
                    stream.write_all(b"pong").unwrap();
                    kept.push(stream);
                }
                // Until the client is done.
                let _ = kept[2].read(&mut [0]);
            });
        });
        links(far.recv_timeout(Duration::from_secs(5)).unwrap());
        ready.send(()).unwrap();
        far.recv_timeout(Duration::from_secs(5)).unwrap();

        let folder = Folder::new();
        let mut manager = PathManager::open().unwrap();
        // The endpoint of another program, which stays.
        let theirs = endpoints().remove(0);
        manager.add(&theirs).unwrap();
        let before = manager.limits().unwrap();
        let wanted = endpoints();
        let mut undo = UndoJournal::open(&folder.0, "mptcp").unwrap();
        let steps = plan(&wanted).unwrap();
        assert!(steps.contains(&Step::MptcpEndpoint { endpoint: wanted[1].clone() }), "{steps:?}");
        assert!(!steps.contains(&Step::MptcpEndpoint { endpoint: theirs.clone() }), "{steps:?}");
        undo.apply(&steps).unwrap();
        assert_eq!(manager.endpoints().unwrap(), wanted);
        assert_eq!(plan(&wanted).unwrap(), [], "nothing is set up twice");

        let free = connect(TcpOptions { local: Some(wanted[0].address), ..TcpOptions::default() });
        assert_eq!(sources(&free, 2), ["10.1.0.2", "10.2.0.2"]);
        let bound = connect(TcpOptions { device: Some("link_a".into()), ..TcpOptions::default() });
        assert_eq!(sources(&bound, 2), ["10.1.0.2", "10.2.0.2"], "only the first is bound to the device");

        drop(undo);
        assert_eq!(manager.endpoints().unwrap(), [theirs]);
        assert_eq!(manager.limits().unwrap(), before);
        let alone = connect(TcpOptions { local: Some(wanted[0].address), ..TcpOptions::default() });
        assert_eq!(sources(&alone, 1), ["10.1.0.2"]);
        drop(alone);
        server.join().unwrap();
    });
}

#[test]
fn limits_that_another_program_changed_since_stay() {
    in_namespace(|| {
        if !has_mptcp() {
            return;
        }
        let folder = Folder::new();
        let mut manager = PathManager::open().unwrap();
        let before = manager.limits().unwrap();
        let set = Limits { subflows: 5, ..before };
        let mut undo = UndoJournal::open(&folder.0, "limits").unwrap();
        undo.apply(&[Step::MptcpLimits { before, set }]).unwrap();
        assert_eq!(manager.limits().unwrap(), set);
        let theirs = Limits { subflows: 7, accepted: 1 };
        manager.set_limits(theirs).unwrap();
        drop(undo);
        assert_eq!(manager.limits().unwrap(), theirs);
    });
}
