//! Names that a server answers its clients: the option `dns-domain` and the tables `[[dns-name]]`.

use std::net::IpAddr;

use mpvpn_input::{
    Error, Result,
    values::{Many, One, Text},
};
use mpvpn_types::Domain;
use schemars::JsonSchema;
use serde::Deserialize;

use super::dns::ServerDns;

/// Addresses of a name: as many as fit into a response. Chosen.
const MAX_ADDRESSES: usize = 8;

/// An address of a name.
#[derive(derive_more::Into)]
pub struct NameAddress(IpAddr);

impl Text for NameAddress {
    const EXPECTED: &'static str = "an address in quotes, as in \"192.168.7.2\"";
    const EXAMPLE: &'static str = "192.168.7.2";

    fn read(text: &str) -> Result<Self, String> {
        let address = text.parse::<IpAddr>().map(|ip| Self(ip.to_canonical()));
        address.map_err(|_| format!("`{text}` is not an address, as in 192.168.7.2 or fd00::7"))
    }
}

/// A name below `dns-domain`, of a host that clients reach.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "dns-name")]
#[serde(deny_unknown_fields, expecting = "a table with the head [[dns-name]]")]
pub struct DnsName {
    /// The name without the domain: `nas` is `nas.vpn.internal`
    #[serde(with = "One::<Domain>")]
    #[schemars(with = "One<Domain>")]
    name: Option<Domain>,
    /// Its addresses
    #[serde(with = "Many::<NameAddress>")]
    #[schemars(with = "Many<NameAddress>")]
    pub address: Vec<IpAddr>,
}

impl DnsName {
    /// The name, in lower case, without the domain.
    pub fn name(&self) -> &str {
        self.name.as_ref().map_or("", Domain::as_str)
    }
}

/// The names that a server answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsNames {
    /// The domain below which users and names are; `None`: there are none.
    pub domain: Option<Domain>,
    /// Names beside those of users.
    pub names: Vec<DnsName>,
}

impl DnsNames {
    pub(super) fn of(domain: Option<Domain>, names: Vec<DnsName>, dns: &ServerDns) -> Result<Self> {
        match (&domain, names.first()) {
            (None, Some(first)) => {
                return Err(Error::usage(
                    format!("[[dns-name]] {} has no domain", first.name()),
                    "add dns-domain = \"vpn.internal\"",
                ));
            }
            (Some(domain), _) if *dns != ServerDns::Own => {
                return Err(Error::usage(
                    format!(
                        "--dns-domain {domain} has no meaning with --dns: clients do not ask this server"
                    ),
                    "leave out one of the two",
                ));
            }
            _ => {}
        }
        for (at, one) in names.iter().enumerate() {
            if names[..at].iter().any(|other| other.name() == one.name()) {
                let next = "give all its addresses in one table";
                return Err(Error::usage(format!("[[dns-name]] {} is given twice", one.name()), next));
            }
            if one.address.is_empty() || one.address.len() > MAX_ADDRESSES {
                let next = format!("give one to {MAX_ADDRESSES}");
                let count = one.address.len();
                return Err(Error::usage(format!("[[dns-name]] {} has {count} addresses", one.name()), next));
            }
        }
        Ok(Self { domain, names })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Rights, ServerConfig, ServerOptions};

    fn read(text: &str) -> Result<super::DnsNames, String> {
        let options = ServerOptions::parse(text).map_err(|error| error.to_string())?;
        ServerConfig::resolve(options, Rights::ALL)
            .map(|config| config.dns_names)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn names_have_a_domain_and_addresses_and_are_given_once() {
        let names =
            "dns-domain = 'VPN.internal'\n[[dns-name]]\nname = 'NAS'\naddress = ['192.168.7.2', 'fd07::2']\n";
        let read_names = read(names).unwrap();
        assert_eq!(read_names.domain, Some("vpn.internal".parse().unwrap()));
        assert_eq!((read_names.names[0].name(), read_names.names[0].address.len()), ("nas", 2));
        for (text, why) in [
            ("[[dns-name]]\nname = 'nas'\naddress = '192.168.7.2'\n", "has no domain"),
            ("dns-domain = 'vpn.internal'\ndns = '9.9.9.9'\n", "clients do not ask this server"),
            ("dns-domain = 'a b'\n", "is not a domain"),
            ("dns-domain = 'a.b'\n[[dns-name]]\nname = 'nas'\n", "missing field `address`"),
            ("dns-domain = 'a.b'\n[[dns-name]]\nname = 'nas'\naddress = []\n", "0 addresses"),
            ("dns-domain = 'a.b'\n[[dns-name]]\nname = 'nas'\naddress = 'x'\n", "is not an address"),
            (
                "dns-domain = 'a.b'\n[[dns-name]]\nname = 'a'\naddress = '10.0.0.7'\n[[dns-name]]\nname = 'A'\naddress = '10.0.0.8'\n",
                "is given twice",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
