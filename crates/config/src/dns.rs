//! The option `dns`: the resolvers of a client's machine while the tunnel is up, and those that a server
//! suggests.

use std::net::IpAddr;

use crate::defaults::first_repeated;
use mpvpn_input::values::Text;
use mpvpn_input::{Error, Result};
use mpvpn_types::Domain;

/// Resolvers that the C library uses: `MAXNS` of resolv.conf(5). It ignores further ones.
const MAX_RESOLVERS: usize = 3;

/// The resolvers that a client's machine asks while the tunnel is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Dns {
    /// Those that the server suggests, for all names if all traffic goes into the tunnel, else for names
    /// below the server's own domain.
    #[default]
    Suggested,
    /// Those of the system.
    Untouched,
    /// These, one to three, the best first.
    Servers(Vec<IpAddr>),
}

/// Which resolvers a server suggests to its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServerDns {
    /// The server itself, at its addresses in the tunnel: it asks the resolvers of its machine.
    #[default]
    Own,
    /// None.
    Off,
    /// These, at least one and at most three, the best first.
    Servers(Vec<IpAddr>),
}

/// The resolver that a server suggests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerDnsOption {
    /// To suggest none.
    Off,
    /// To suggest this one.
    Server(DnsServer),
}

/// The address of a resolver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnsServer(IpAddr);

/// A value of the client's option `dns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsOption {
    /// Ask the resolvers that the server suggests.
    Auto,
    /// Keep the resolvers of the system.
    Off,
    /// Ask this resolver.
    Server(DnsServer),
}

/// The domains of the option `dns-local`; `dns` are the values of that option.
pub(super) fn local_domains(given: Vec<Domain>, dns: &[DnsOption]) -> Result<Vec<String>> {
    match given.first() {
        Some(domain) if dns == [DnsOption::Off] => Err(Error::usage(
            format!(
                "--dns-local {domain} has no meaning with --dns off: the resolvers of the system answer all names"
            ),
            "leave out one of the two",
        )),
        _ => Ok(given.into_iter().map(String::from).collect()),
    }
}

/// The setting that results from all values of a server's option `dns`.
pub(super) fn server_dns(given: Vec<ServerDnsOption>) -> Result<ServerDns> {
    let server = |word: &ServerDnsOption| match word {
        ServerDnsOption::Server(server) => Some(server.0),
        ServerDnsOption::Off => None,
    };
    match (&given[..], given.iter().map(server).collect()) {
        ([], _) => Ok(ServerDns::Own),
        ([ServerDnsOption::Off], _) => Ok(ServerDns::Off),
        (_, Some(servers)) => Ok(ServerDns::Servers(addresses(servers)?)),
        _ => Err(Error::usage(
            "--dns off cannot be combined with other values",
            "give --dns off alone, or only addresses of resolvers",
        )),
    }
}

/// The setting that results from all values of a client's option `dns`.
pub(super) fn client_dns(given: Vec<DnsOption>) -> Result<Dns> {
    let server = |word: &DnsOption| match word {
        DnsOption::Server(server) => Some(server.0),
        DnsOption::Auto | DnsOption::Off => None,
    };
    match (&given[..], given.iter().map(server).collect()) {
        ([] | [DnsOption::Auto], _) => Ok(Dns::Suggested),
        ([DnsOption::Off], _) => Ok(Dns::Untouched),
        (_, Some(servers)) => Ok(Dns::Servers(addresses(servers)?)),
        _ => Err(Error::usage(
            "--dns auto and --dns off cannot be combined with other values",
            "give --dns once, or only addresses of resolvers",
        )),
    }
}

fn addresses(servers: Vec<IpAddr>) -> Result<Vec<IpAddr>> {
    if let Some(twice) = first_repeated(&servers) {
        return Err(Error::usage(format!("--dns {twice} is given twice"), "give every resolver once"));
    }
    match servers.len() > MAX_RESOLVERS {
        true => Err(Error::usage(
            format!("{} resolvers are given with --dns, at most {MAX_RESOLVERS} are possible", servers.len()),
            "leave some out: the C library asks no more than the first three",
        )),
        false => Ok(servers),
    }
}

impl Text for DnsServer {
    const EXPECTED: &'static str = "the address of a resolver in quotes, as in \"10.0.0.1\"";
    const EXAMPLE: &'static str = "10.0.0.1";

    fn read(text: &str) -> Result<Self, String> {
        match text.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
            Ok(ip) if !ip.is_unspecified() && !ip.is_multicast() => Ok(Self(ip)),
            _ => Err(format!("`{text}` is not the address of a resolver, as in 10.0.0.1 or fd00::1")),
        }
    }
}

impl Text for ServerDnsOption {
    const EXPECTED: &'static str = "addresses of resolvers in quotes, or \"off\"";
    const EXAMPLE: &'static str = "10.0.0.1";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            _ => DnsServer::read(text).map(Self::Server).map_err(|error| format!("{error}, nor off")),
        }
    }
}

impl Text for DnsOption {
    const EXPECTED: &'static str = "addresses of resolvers in quotes, \"auto\" or \"off\"";
    const EXAMPLE: &'static str = "auto";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => {
                DnsServer::read(text).map(Self::Server).map_err(|error| format!("{error}, nor auto, nor off"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Dns> {
        client_dns(words.iter().map(|word| DnsOption::read(word).unwrap()).collect())
    }

    #[test]
    fn a_server_suggests_itself_unless_told_otherwise() {
        let read = |words: &[&str]| {
            server_dns(words.iter().map(|word| ServerDnsOption::read(word).unwrap()).collect())
        };
        assert_eq!(read(&[]).unwrap(), ServerDns::Own);
        assert_eq!(read(&["off"]).unwrap(), ServerDns::Off);
        assert_eq!(read(&["9.9.9.9"]).unwrap(), ServerDns::Servers(vec!["9.9.9.9".parse().unwrap()]));
        assert!(read(&["off", "9.9.9.9"]).unwrap_err().to_string().contains("cannot be combined"));
    }

    #[test]
    fn local_domains_have_no_meaning_where_the_resolvers_of_the_system_answer() {
        let lan = || vec!["lan".parse().unwrap()];
        assert_eq!(local_domains(lan(), &[]).unwrap(), ["lan"]);
        let error = local_domains(lan(), &[DnsOption::Off]).unwrap_err().to_string();
        assert!(error.contains("no meaning with --dns off"), "{error}");
    }

    #[test]
    fn a_client_is_told_addresses_or_one_word() {
        assert_eq!(read(&[]).unwrap(), Dns::Suggested);
        assert_eq!(read(&["auto"]).unwrap(), Dns::Suggested);
        assert_eq!(read(&["off"]).unwrap(), Dns::Untouched);
        let servers = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(read(&["10.0.0.1", "fd00::1"]).unwrap(), Dns::Servers(servers));
        for (words, said) in [
            (&["off", "10.0.0.1"][..], "cannot be combined"),
            (&["off", "auto"], "cannot be combined"),
            (&["9.9.9.9", "9.9.9.9"], "9.9.9.9 is given twice"),
            (&["9.9.9.1", "9.9.9.2", "9.9.9.3", "9.9.9.4"], "at most 3 are possible"),
        ] {
            let error = read(words).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        for bad in ["0.0.0.0", "dns.example", "224.0.0.1", "", "10.0.0.1:53"] {
            assert!(DnsOption::read(bad).is_err(), "{bad}");
        }
    }
}
