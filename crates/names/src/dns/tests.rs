use std::{net::Ipv4Addr, time::Instant};

use proptest::prelude::*;
use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, Question, ResourceRecord, TYPE,
    rdata::{A, RData},
};

use super::*;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut packet = Packet::new_query(id);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new_unchecked(name);
    packet.questions.push(Question::new(name, QTYPE::TYPE(TYPE::A), QCLASS::CLASS(CLASS::IN), false));
    packet.build_bytes_vec().unwrap()
}

pub(super) fn response(query: &[u8], address: Ipv4Addr) -> Vec<u8> {
    let asked = Packet::parse(query).unwrap();
    let mut packet = Packet::new_reply(asked.id());
    let name = asked.questions[0].qname.clone();
    packet.questions.push(asked.questions[0].clone());
    packet.answers.push(ResourceRecord::new(name, CLASS::IN, 60, RData::A(A { address: address.into() })));
    packet.build_bytes_vec().unwrap()
}

fn address_in(response: &[u8]) -> Option<Ipv4Addr> {
    match &Packet::parse(response).unwrap().answers.first()?.rdata {
        RData::A(a) => Some(a.address.into()),
        _ => None,
    }
}

/// A resolver that answers every name with `address`, by UDP and TCP; first with a forged response where
/// `forges`.
async fn resolver(address: Ipv4Addr, forges: bool) -> SocketAddr {
    let tcp = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
    let at = tcp.local_addr().unwrap();
    let udp = UdpSocket::bind(at).await.unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            let query = &buffer[..length];
            if forges {
                let mut forged = response(query, Ipv4Addr::new(6, 6, 6, 6));
                forged[0] ^= 1;
                udp.send_to(&forged, from).await.unwrap();
            }
            udp.send_to(&response(query, address), from).await.unwrap();
        }
    });
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let query = read_message(&mut stream).await.unwrap();
            write_message(&mut stream, &response(&query, address)).await.unwrap();
        }
    });
    at
}

fn fixed(resolvers: &[SocketAddr]) -> Upstreams {
    let resolvers = resolvers.to_vec();
    Arc::new(move |_: &str| resolvers.clone().into())
}

fn by_address() -> UserOfHost {
    Arc::new(|host| host.to_string())
}

fn forwarder(upstreams: Upstreams) -> Forwarder {
    forwarder_for("127.0.0.0/8", upstreams)
}

fn forwarder_for(network: &str, upstreams: Upstreams) -> Forwarder {
    let network = network.parse().unwrap();
    // The port that is free for UDP may be taken for TCP.
    let mut attempts =
        (0..20).map(|_| Forwarder::bind(&[LOCALHOST], 0, &[network], by_address(), upstreams.clone()));
    attempts.find_map(Result::ok).expect("a port that is free for both")
}

async fn start(upstreams: Upstreams) -> SocketAddr {
    let forwarder = forwarder(upstreams);
    let at = forwarder.udp[0].local_addr().unwrap();
    tokio::spawn(forwarder.serve());
    at
}

async fn ask(at: SocketAddr, message: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind((LOCALHOST, 0)).await.unwrap();
    socket.send_to(message, at).await.unwrap();
    let mut buffer = vec![0; 2048];
    let length = timeout(Duration::from_secs(10), socket.recv(&mut buffer)).await.unwrap().unwrap();
    buffer.truncate(length);
    buffer
}

#[tokio::test]
async fn a_name_has_the_address_that_the_resolver_says() {
    let internet = resolver(Ipv4Addr::new(192, 0, 2, 1), false).await;
    let at = start(fixed(&[internet])).await;
    assert_eq!(address_in(&ask(at, &query(7, "www.example")).await), Some(Ipv4Addr::new(192, 0, 2, 1)));
}

#[tokio::test]
async fn a_response_with_another_id_is_not_believed() {
    let forger = resolver(Ipv4Addr::new(192, 0, 2, 1), true).await;
    let at = start(fixed(&[forger])).await;
    assert_eq!(address_in(&ask(at, &query(7, "www.example")).await), Some(Ipv4Addr::new(192, 0, 2, 1)));
}

#[tokio::test]
async fn the_next_resolver_answers_when_the_first_is_silent() {
    let silent = UdpSocket::bind((LOCALHOST, 0)).await.unwrap();
    let second = resolver(Ipv4Addr::new(192, 0, 2, 2), false).await;
    let at = start(fixed(&[silent.local_addr().unwrap(), second])).await;
    let began = Instant::now();
    assert_eq!(address_in(&ask(at, &query(7, "www.example")).await), Some(Ipv4Addr::new(192, 0, 2, 2)));
    assert!(began.elapsed() >= UPSTREAM_TIMEOUT);
}

#[tokio::test]
async fn where_no_resolver_answers_the_failure_is_said() {
    let at = start(fixed(&[])).await;
    let response = ask(at, &query(0x1234, "www.example")).await;
    assert_eq!(response, [0x12, 0x34, 0x81, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[tokio::test]
async fn hosts_of_other_networks_get_no_answer() {
    let internet = resolver(Ipv4Addr::new(192, 0, 2, 1), false).await;
    let forwarder = forwarder_for("10.0.0.0/24", fixed(&[internet]));
    let at = forwarder.udp[0].local_addr().unwrap();
    tokio::spawn(forwarder.serve());
    let socket = UdpSocket::bind((LOCALHOST, 0)).await.unwrap();
    socket.send_to(&query(7, "www.example"), at).await.unwrap();
    let mut stream = TcpStream::connect(at).await.unwrap();
    write_message(&mut stream, &query(7, "www.example")).await.unwrap();
    read_message(&mut stream).await.unwrap_err();
    let answer = timeout(Duration::from_millis(200), socket.recv(&mut [0; 512])).await;
    assert!(answer.is_err(), "{answer:?}");
}

#[tokio::test]
async fn queries_by_tcp_go_to_the_resolver_by_tcp() {
    let internet = resolver(Ipv4Addr::new(192, 0, 2, 1), false).await;
    let upstreams = fixed(&[internet]);
    let forwarder = forwarder(upstreams);
    let at = forwarder.tcp[0].local_addr().unwrap();
    tokio::spawn(forwarder.serve());
    let mut stream = TcpStream::connect(at).await.unwrap();
    for id in [1, 2] {
        write_message(&mut stream, &query(id, "www.example")).await.unwrap();
        let response = read_message(&mut stream).await.unwrap();
        assert_eq!(address_in(&response), Some(Ipv4Addr::new(192, 0, 2, 1)));
    }
}

/// Asks for names that nobody answers, from `from`, as often as said.
async fn ask_in_vain(at: SocketAddr, from: [u8; 4], count: u16) -> UdpSocket {
    let socket = UdpSocket::bind((IpAddr::from(from), 0)).await.unwrap();
    for id in 0..count {
        socket.send_to(&query(id, "dead.example"), at).await.unwrap();
        if id % 16 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    socket
}

#[tokio::test]
async fn hosts_that_ask_for_a_dead_zone_stop_names_for_nobody_else() {
    let answers = resolver(Ipv4Addr::new(192, 0, 2, 1), false).await;
    let silent = UdpSocket::bind((LOCALHOST, 0)).await.unwrap();
    let dead = silent.local_addr().unwrap();
    let at =
        start(Arc::new(move |name: &str| vec![if name == "dead.example" { dead } else { answers }].into()))
            .await;
    // The addresses of one session: four times 128 queries took all places.
    let mut greedy = Vec::new();
    for number in 2..6 {
        greedy.push(ask_in_vain(at, [127, 0, 0, number], 400).await);
    }
    let began = Instant::now();
    for id in 0..50 {
        let answer = timeout(Duration::from_secs(1), ask(at, &query(id, "a.example"))).await;
        assert!(address_in(&answer.expect("an answer")).is_some());
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?} for 50 names", began.elapsed());
}

proptest! {
    #[test]
    fn whatever_comes_is_a_query_or_not(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        other in prop::collection::vec(any::<u8>(), 0..600)
    ) {
        message::question(&bytes);
        message::answers(&bytes, &other);
        message::answers(&other, &query(1, "a.example"));
        if let Some(error) = message::format_error(&bytes) {
            prop_assert_eq!(&error[..2], &bytes[..2]);
        }
    }
}
