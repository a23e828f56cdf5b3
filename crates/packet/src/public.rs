//! Which addresses are public, that is, globally reachable.
//!
//! In: an address. Out: whether it is public. Always holds: an IPv6 address that embeds an IPv4 address is
//! only public if that one is.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::LazyLock,
};

use ipnet::{IpNet, Ipv6Net};

/// Networks that are not public (RFC 6890), and a public address that reaches the host of a virtual machine:
/// the host agent of Azure. Other clouds use link-local or shared addresses for theirs. Those of IPv6 begin
/// with unspecified, loopback, and deprecated IPv4-compatible addresses, and those of local translation
/// (RFC 8215).
static PRIVATE_NETWORKS: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    networks(
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 \
         192.168.0.0/16 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32 \
         ::/32 64:ff9b:1::/48 fc00::/7 fe80::/10 fec0::/10 ff00::/8",
    )
});

/// The networks of a list, which are separated by spaces.
fn networks(list: &str) -> Vec<IpNet> {
    list.split(' ').filter_map(|net| net.parse().ok()).collect()
}

/// Whether an address is public: not private, loopback, link-local, multicast, carrier-grade NAT (RFC 6598),
/// unspecified, unique local or reserved, and not an IPv6 form of such an IPv4 address (mapped, translated by
/// RFC 6052, 6to4). Documentation networks count as public, because test labs use them.
pub fn is_public(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    !PRIVATE_NETWORKS.iter().any(|net| net.contains(&ip)) && embedded_ipv4(ip).is_none_or(is_public)
}

/// The IPv4 address that `ip` embeds: of a NAT64 translator (64:ff9b::/96, RFC 6052) or a 6to4 relay
/// (2002::/16, RFC 3056).
pub fn embedded_ipv4(ip: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(ip) = ip else { return None };
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into();
    match ip.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// The networks of IPv6 addresses that embed an address of `net`, as [`embedded_ipv4`] reads them; none for
/// IPv6.
pub fn embedding_networks(net: &IpNet) -> Vec<Ipv6Net> {
    let IpNet::V4(net) = net else { return Vec::new() };
    let bits = u32::from(net.network());
    let (high, low) = ((bits >> 16) as u16, bits as u16);
    let translated = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low);
    let six_to_four = Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 0);
    vec![
        Ipv6Net::new_assert(translated, 96 + net.prefix_len()),
        Ipv6Net::new_assert(six_to_four, 16 + net.prefix_len()),
    ]
}

/// Networks that a server's machine reaches with rights of its own, in all their forms: the machine itself
/// (RFC 1122, RFC 4291), hosts of its links (RFC 3927, RFC 4291, multicast), and metadata of clouds, which
/// give the rights of the machine that asks (Azure, Alibaba, AWS, Google; most are link-local).
pub static MACHINE_ONLY_NETWORKS: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    let v4 = networks("0.0.0.0/8 127.0.0.0/8 169.254.0.0/16 168.63.129.16/32 100.100.100.200/32 224.0.0.0/4");
    // The first has the IPv4 addresses that are written as IPv6 ones.
    let v6 = networks("::/32 fe80::/10 ff00::/8 fd00:ec2::254/128 fd20:ce::254/128");
    let embedding: Vec<IpNet> = v4.iter().flat_map(embedding_networks).map(IpNet::V6).collect();
    [v4, embedding, v6].concat()
});

/// Whether an address is of the [`MACHINE_ONLY_NETWORKS`].
pub fn is_machine_only(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    MACHINE_ONLY_NETWORKS.iter().any(|net| net.contains(&ip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_the_networks_that_embed_it() {
        for net in ["192.0.2.1/32", "10.0.0.0/8", "198.51.100.128/25", "0.0.0.0/0"] {
            let net: IpNet = net.parse().unwrap();
            for embedding in embedding_networks(&net) {
                assert_eq!(embedding.trunc(), embedding, "{net}");
                assert_eq!(embedded_ipv4(embedding.network().into()), Some(net.network()), "{net}");
            }
        }
        assert!(embedding_networks(&"fd00::/8".parse().unwrap()).is_empty());
        let has =
            |ip: &str| MACHINE_ONLY_NETWORKS.iter().any(|net| net.contains(&ip.parse::<IpAddr>().unwrap()));
        for ip in [
            "169.254.169.254",
            "168.63.129.16",
            "100.100.100.200",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "127.0.0.53",
            "0.0.0.0",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::1",
            "239.255.255.250",
        ] {
            let address = ip.parse().unwrap();
            assert!(has(ip) && is_machine_only(address) && !is_public(address), "{ip}");
        }
        for ip in ["168.63.129.17", "10.0.0.1", "64:ff9b::10.0.0.1", "fd00:ec2::1", "9.9.9.9", "2001:db8::1"]
        {
            assert!(!has(ip) && !is_machine_only(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn no_network_of_a_list_is_left_out() {
        let (private, machine_only) = (PRIVATE_NETWORKS.len(), MACHINE_ONLY_NETWORKS.len());
        assert_eq!((private, machine_only), (17, 6 + 2 * 6 + 5));
    }

    #[test]
    fn public_and_other_addresses_are_distinguished() {
        for ip in [
            "0.0.0.0",
            "0.1.2.3",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.8.8.8",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.168.0.1",
            "168.63.129.16",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::192.168.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2002:c0a8:101::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(ip.parse().unwrap()), "{ip} was taken for public");
        }
        for ip in [
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.2.1",
            "198.51.100.1",
            "203.0.113.1",
            "223.255.255.255",
            "2001:db8::1",
            "2606:4700::1111",
            "2002:101:101::1",
            "64:ff9b::1.1.1.1",
            "::ffff:1.1.1.1",
        ] {
            assert!(is_public(ip.parse().unwrap()), "{ip} was not taken for public");
        }
    }
}
