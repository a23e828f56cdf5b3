//! Resolves names by queries with a firewall mark, which a kill switch lets pass.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use mpvpn_identity::random;
use mpvpn_os::{UdpOptions, UdpSocket};
use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, Question, ResourceRecord, TYPE, rdata::RData,
};

use super::{PORT, message};
use crate::lookup::Resolve;

/// How long one resolver is waited for: as long as the C library waits in two attempts (resolv.conf(5)) would
/// keep a client from trying the next resolver for 10 s; slow links answer within one second.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Names of a host that are known without asking anybody (hosts(5)).
const HOSTS_FILE: &str = "/etc/hosts";

/// Resolves names by these resolvers, asked with packets that have this mark.
pub fn marked_resolver(resolvers: Vec<IpAddr>, mark: u32) -> Resolve {
    Arc::new(move |name| {
        let hosts = std::fs::read_to_string(Path::new(HOSTS_FILE)).unwrap_or_default();
        let known = addresses_in_hosts(&hosts, name);
        if !known.is_empty() {
            return Ok(known);
        }
        if resolvers.is_empty() {
            return Err("no resolver of a link is known, and the kill switch lets no others be asked: give the server's address \
                        instead of its name, or name it in /etc/hosts"
                .to_owned());
        }
        let mut reasons = Vec::new();
        for resolver in &resolvers {
            match resolve(name, SocketAddr::new(*resolver, PORT), mark) {
                Ok(found) if !found.is_empty() => return Ok(found),
                Ok(_) => reasons.push(format!("{resolver}: it has no address")),
                Err(error) => reasons.push(format!("{resolver}: {error}")),
            }
        }
        Err(reasons.join(", "))
    })
}

/// IPv6 addresses first, as RFC 6724 has it for most hosts.
fn resolve(name: &str, resolver: SocketAddr, mark: u32) -> io::Result<Vec<IpAddr>> {
    let any = if resolver.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let options =
        UdpOptions { mark: (mark != 0).then_some(mark), ..UdpOptions::new(SocketAddr::new(any, 0)) };
    let socket = UdpSocket::bind(&options).map_err(io::Error::other)?;
    socket.connect(resolver)?;
    let socket = socket.into_blocking()?;
    let mut queries = Vec::new();
    for kind in [TYPE::AAAA, TYPE::A] {
        let query = query(name, kind)?;
        socket.send(&query)?;
        queries.push(query);
    }
    let mut responses: Vec<Option<Vec<IpAddr>>> = vec![None; queries.len()];
    let deadline = Instant::now() + TIMEOUT;
    let mut buffer = vec![0; super::MAX_MESSAGE];
    while responses.iter().any(Option::is_none) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        socket.set_read_timeout(Some(left))?;
        let length = match socket.recv(&mut buffer) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                break;
            }
            length => length?,
        };
        let response = &buffer[..length];
        if let Some(at) = queries.iter().position(|query| message::answers(response, query)) {
            responses[at] = Some(addresses(response).into_iter().map(|(ip, _)| ip).collect());
        }
    }
    if responses.iter().all(Option::is_none) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(responses.into_iter().flatten().flatten().collect())
}

/// A query for the records of this type that a name has.
pub(super) fn query(name: &str, kind: TYPE) -> io::Result<Vec<u8>> {
    let [high, low] = random::<2>()?;
    let mut packet = Packet::new_query(u16::from_be_bytes([high, low]));
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new(name).map_err(io::Error::other)?;
    packet.questions.push(Question::new(name, QTYPE::TYPE(kind), QCLASS::CLASS(CLASS::IN), false));
    packet.build_bytes_vec().map_err(io::Error::other)
}

/// All addresses in a response, with their times to live: those behind aliases stand there as well.
pub fn addresses(response: &[u8]) -> Vec<(IpAddr, Duration)> {
    let Ok(packet) = Packet::parse(response) else { return Vec::new() };
    let address = |data: &RData<'_>| match data {
        RData::A(a) => Some(IpAddr::V4(a.address.into())),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.address.into())),
        _ => None,
    };
    let seconds = |ttl: u32| Duration::from_secs(ttl.into());
    let of_record = |record: &ResourceRecord<'_>| Some((address(&record.rdata)?, seconds(record.ttl)));
    packet.answers.iter().filter_map(of_record).collect()
}

/// The addresses of a name in a file as hosts(5) describes it.
fn addresses_in_hosts(text: &str, name: &str) -> Vec<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split('#').next()?.split_ascii_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|word| word.eq_ignore_ascii_case(name)).then_some(address)
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_is_read_as_the_system_reads_it() {
        let text = "127.0.0.1 localhost\n# 192.0.2.9 vpn.example\n192.0.2.1 host VPN.example # ours\n2001:db8::1\tvpn.example\n";
        let expected: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        assert_eq!(addresses_in_hosts(text, "vpn.example"), expected);
        assert!(addresses_in_hosts(text, "other.example").is_empty());
    }

    #[test]
    fn a_name_has_the_addresses_that_the_resolver_says() {
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = server.local_addr().unwrap();
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 512];
            for _ in 0..2 {
                let (length, from) = server.recv_from(&mut buffer).unwrap();
                let response = super::super::tests::response(&buffer[..length], Ipv4Addr::new(192, 0, 2, 7));
                server.send_to(&response, from).unwrap();
            }
        });
        let found = resolve("vpn.example", at, 0).unwrap();
        thread.join().unwrap();
        assert!(found.contains(&"192.0.2.7".parse().unwrap()), "{found:?}");
    }
}
