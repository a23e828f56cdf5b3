//! The name of an address, asked for inside the tunnel.

use std::net::{IpAddr, SocketAddr};

use simple_dns::{Packet, TYPE, rdata::RData};

use super::{PORT, PathOut, exchange_by_udp, first_response, marked::query};

/// The name of an address (RFC 1035, section 3.5; RFC 3596, section 2.5), by the first of these resolvers
/// that answers. Queries leave through `device` only.
pub(crate) async fn name_in_tunnel(address: IpAddr, resolvers: &[IpAddr], device: &str) -> Option<String> {
    let query = query(&reverse_domain(address), TYPE::PTR).ok()?;
    let resolvers: Vec<_> = resolvers.iter().map(|ip| SocketAddr::new(*ip, PORT)).collect();
    let path = PathOut { device: Some(device), mark: None };
    let exchange = |resolver| exchange_by_udp(resolver, &query, path);
    name_in_response(&first_response(&resolvers, exchange).await?)
}

pub(super) fn reverse_domain(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            format!("{d}.{c}.{b}.{a}.in-addr.arpa")
        }
        IpAddr::V6(ip) => {
            let nibbles = ip.octets().into_iter().rev().flat_map(|byte| [byte & 0xf, byte >> 4]);
            nibbles.map(|nibble| format!("{nibble:x}.")).chain(["ip6.arpa".to_owned()]).collect()
        }
    }
}

/// The first name in a response, which may follow an alias (RFC 2317).
fn name_in_response(response: &[u8]) -> Option<String> {
    let packet = Packet::parse(response).ok()?;
    packet.answers.iter().find_map(|record| match &record.rdata {
        RData::PTR(name) => Some(name.0.to_string()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use simple_dns::{
        CLASS, Name, ResourceRecord,
        rdata::{CNAME, PTR},
    };

    use super::*;

    #[test]
    fn the_domains_of_addresses_are_those_of_the_rfcs() {
        for (address, domain) in [
            ("192.0.2.7", "7.2.0.192.in-addr.arpa"),
            ("::ffff:192.0.2.7", "7.2.0.192.in-addr.arpa"),
            (
                "2001:db8::567:89ab",
                "b.a.9.8.7.6.5.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa",
            ),
        ] {
            assert_eq!(reverse_domain(address.parse().unwrap()), domain);
        }
    }

    #[test]
    fn the_name_is_found_behind_an_alias() {
        let name = |text: &'static str| Name::new(text).unwrap();
        let mut response = Packet::new_reply(7);
        let record = |of, data| ResourceRecord::new(name(of), CLASS::IN, 60, data);
        response.answers.push(record("7.2.0.192.in-addr.arpa", RData::CNAME(CNAME(name("7.x.example")))));
        assert_eq!(name_in_response(&response.build_bytes_vec().unwrap()), None);
        response.answers.push(record("7.x.example", RData::PTR(PTR(name("customer.a.pop.starlinkisp.net")))));
        let bytes = response.build_bytes_vec().unwrap();
        assert_eq!(name_in_response(&bytes).as_deref(), Some("customer.a.pop.starlinkisp.net"));
        assert_eq!(name_in_response(&bytes[..20]), None);
    }
}
