//! Names that a resolver answers itself: those of a domain, and the domains of their addresses (RFC 1034
//! §4.3.2).
//!
//! In: a query, the host that asks, the names. Out: the response; `None` for names that others answer. Always
//! holds: a name below the domain is never asked for elsewhere; what a host may not know does not exist for
//! it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE,
    rdata::{A, AAAA, PTR, RData},
};

use super::message::parse;

/// How long an answer may be kept (s): sessions come and go. Longer: a host is asked for at an address that
/// it has no more; shorter: more queries. Chosen.
const TTL: u32 = 10;
/// Addresses in one response: they fit into 512 bytes (RFC 1035, section 4.2.1), whatever the name.
const MAX_RECORDS: usize = 8;

/// The names of a domain.
pub trait Zone: Send + Sync {
    /// The domain, in lower case and without dots at its ends.
    fn domain(&self) -> &str;

    /// The addresses of a name below the domain, which is left out; `None` if there is no such name for the
    /// host that asks.
    fn addresses(&self, asker: IpAddr, name: &str) -> Option<Vec<IpAddr>>;

    /// The name of an address below the domain, which is left out.
    fn name(&self, asker: IpAddr, address: IpAddr) -> Option<String>;
}

/// The response to a query for a name of the zone, or for the name of one of its addresses.
pub(super) fn answer(query: &[u8], asker: IpAddr, zone: &dyn Zone) -> Option<Vec<u8>> {
    let asked = parse(query)?;
    let [question] = asked.questions.as_slice() else { return None };
    if asked.has_flags(PacketFlag::RESPONSE) {
        return None;
    }
    let wants = |kind| [QTYPE::TYPE(kind), QTYPE::ANY].contains(&question.qtype);
    let name = question.qname.to_string().to_ascii_lowercase();
    let (mut found, mut exists) = (Vec::new(), true);
    let target;
    if let Some(below) = part_below(&name, zone.domain()) {
        let addresses = if below.is_empty() { Some(Vec::new()) } else { zone.addresses(asker, below) };
        exists = addresses.is_some();
        found.extend(addresses.into_iter().flatten().filter_map(|ip| match ip {
            IpAddr::V4(ip) => wants(TYPE::A).then(|| RData::A(A::from(ip))),
            IpAddr::V6(ip) => wants(TYPE::AAAA).then(|| RData::AAAA(AAAA::from(ip))),
        }));
    } else {
        target = format!("{}.{}", zone.name(asker, address_in(&name)?)?, zone.domain());
        let name = Name::new(&target).ok()?;
        found.extend(wants(TYPE::PTR).then_some(RData::PTR(PTR(name))));
    }
    let mut response = Packet::new_reply(asked.id());
    response.set_flags(PacketFlag::AUTHORITATIVE_ANSWER | PacketFlag::RECURSION_AVAILABLE);
    if asked.has_flags(PacketFlag::RECURSION_DESIRED) {
        response.set_flags(PacketFlag::RECURSION_DESIRED);
    }
    if !exists {
        *response.rcode_mut() = RCODE::NameError;
    }
    let record = |data| ResourceRecord::new(question.qname.clone(), CLASS::IN, TTL, data);
    response.answers.extend(found.into_iter().take(MAX_RECORDS).map(record));
    response.questions.push(question.clone());
    response.build_bytes_vec_compressed().ok()
}

/// The part of a name before the domain; empty for the domain itself, `None` for others.
pub fn part_below<'a>(name: &'a str, domain: &str) -> Option<&'a str> {
    let rest = name.strip_suffix(domain)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_suffix('.') }
}

/// The address whose domain this is (RFC 1035, section 3.5; RFC 3596, section 2.5).
fn address_in(name: &str) -> Option<IpAddr> {
    if let Some(octets) = name.strip_suffix(".in-addr.arpa") {
        let octets: Vec<u8> = octets.rsplit('.').map_while(|octet| octet.parse().ok()).collect();
        let octets: [u8; 4] = octets.try_into().ok()?;
        return Some(Ipv4Addr::from(octets).into());
    }
    let nibbles = name.strip_suffix(".ip6.arpa")?.rsplit('.');
    let nibbles: Vec<&str> = nibbles.filter(|nibble| nibble.len() == 1).collect();
    let bits = u128::from_str_radix(&nibbles.concat(), 16).ok().filter(|_| nibbles.len() == 32)?;
    Some(Ipv6Addr::from(bits).into())
}

#[cfg(test)]
mod tests {
    use simple_dns::{QCLASS, Question};

    use super::{super::reverse::reverse_domain, *};

    struct Home;

    impl Zone for Home {
        fn domain(&self) -> &'static str {
            "vpn.internal"
        }

        fn addresses(&self, asker: IpAddr, name: &str) -> Option<Vec<IpAddr>> {
            let all = ["10.0.0.2", "fd00::2"].map(|ip| ip.parse().unwrap());
            (name == "anna" && asker.is_ipv4()).then(|| all.to_vec())
        }

        fn name(&self, _: IpAddr, address: IpAddr) -> Option<String> {
            (address == "10.0.0.2".parse::<IpAddr>().unwrap()
                || address == "fd00::2".parse::<IpAddr>().unwrap())
            .then(|| "anna".to_owned())
        }
    }

    fn query(name: &str, kind: TYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(7);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = Name::new_unchecked(name);
        packet.questions.push(Question::new(name, QTYPE::TYPE(kind), QCLASS::CLASS(CLASS::IN), false));
        packet.build_bytes_vec().unwrap()
    }

    /// The response code and the records for a host.
    fn response_to(from: &str, name: &str, kind: TYPE) -> Option<(RCODE, Vec<String>)> {
        let query = query(name, kind);
        let response = answer(&query, from.parse().unwrap(), &Home)?;
        assert!(super::super::message::answers(&response, &query), "{name}");
        assert!(response.len() <= 512);
        let packet = Packet::parse(&response).unwrap();
        let text = |record: &ResourceRecord<'_>| match &record.rdata {
            RData::A(a) => Ipv4Addr::from(a.address).to_string(),
            RData::AAAA(aaaa) => Ipv6Addr::from(aaaa.address).to_string(),
            RData::PTR(name) => name.0.to_string(),
            other => format!("{other:?}"),
        };
        Some((packet.rcode(), packet.answers.iter().map(text).collect()))
    }

    #[test]
    fn names_have_the_addresses_of_their_family_and_unknown_ones_do_not_exist() {
        let found = |records: &[&str]| {
            Some((RCODE::NoError, records.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()))
        };
        for (name, kind, expected) in [
            ("anna.vpn.internal", TYPE::A, found(&["10.0.0.2"])),
            ("ANNA.VPN.Internal", TYPE::AAAA, found(&["fd00::2"])),
            ("anna.vpn.internal", TYPE::MX, found(&[])),
            ("vpn.internal", TYPE::A, found(&[])),
            ("eve.vpn.internal", TYPE::A, Some((RCODE::NameError, Vec::new()))),
            ("a.anna.vpn.internal", TYPE::A, Some((RCODE::NameError, Vec::new()))),
            ("anna.example", TYPE::A, None),
            ("myvpn.internal", TYPE::A, None),
        ] {
            assert_eq!(response_to("10.0.0.3", name, kind), expected, "{name}");
        }
        assert_eq!(
            response_to("fd00::9", "anna.vpn.internal", TYPE::A),
            Some((RCODE::NameError, Vec::new()))
        );
        for address in ["10.0.0.2", "fd00::2"] {
            let domain = reverse_domain(address.parse().unwrap());
            assert_eq!(
                response_to("10.0.0.3", &domain, TYPE::PTR),
                found(&["anna.vpn.internal"]),
                "{domain}"
            );
        }
        let other = reverse_domain("10.0.0.9".parse().unwrap());
        assert_eq!(response_to("10.0.0.3", &other, TYPE::PTR), None, "others are asked for it");
    }

    #[test]
    fn the_domains_of_addresses_are_read_as_they_are_written() {
        for address in ["192.0.2.7", "2001:db8::567:89ab"] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(address_in(&reverse_domain(address)), Some(address));
        }
        for bad in
            ["1.2.3.in-addr.arpa", "1.2.3.4.5.in-addr.arpa", "x.0.0.10.in-addr.arpa", "0.ip6.arpa", "a"]
        {
            assert_eq!(address_in(bad), None, "{bad}");
        }
    }
}
