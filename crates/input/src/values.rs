//! The values of options: how each is parsed, and the error if it is wrong.

use std::{
    ffi::OsStr,
    fmt,
    marker::PhantomData,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use clap::builder::{PossibleValue, TypedValueParser};
use ipnet::Ipv4Net;
use serde::{
    Serializer,
    de::{DeserializeSeed, Deserializer, SeqAccess, Unexpected, Visitor},
};

/// A value that is parsed from text, in the same way on the command line and in a file.
pub trait Text: Sized {
    /// The expected text, for errors: "expected …".
    const EXPECTED: &'static str;
    /// A valid text, for the JSON schema.
    const EXAMPLE: &'static str;
    /// All valid words with their meanings, if the value is one of a few words.
    const WORDS: &'static [(&'static str, &'static str)] = &[];

    /// Parses `text`. The error is a sentence that says what is wrong with it.
    fn read(text: &str) -> Result<Self, String>;
}

/// For clap: `#[arg(value_parser = text::<T>)]`.
pub fn text<T: Text>(text: &str) -> Result<T, String> {
    T::read(text)
}

/// For clap: one of the words of an enum. clap knows these words, so that help texts list them.
pub const fn word<T: Text>() -> WordParser<T> {
    WordParser(PhantomData)
}

/// See [`word`].
#[derive(Clone)]
pub struct WordParser<T>(PhantomData<T>);

impl<T: Text + Clone + Send + Sync + 'static> TypedValueParser for WordParser<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        TypedValueParser::parse_ref(&text::<T>, command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(T::WORDS.iter().map(|(word, meaning)| PossibleValue::new(*word).help(*meaning))))
    }
}

/// For serde and schemars, as in `#[serde(with = "One::<T>")]` at an `Option<T>`: one text; a plain number,
/// too, if `NUMBERS`.
pub struct One<T, const NUMBERS: bool = false>(PhantomData<T>);

/// As [`One`]: a word in quotes, or a plain number.
pub type OneOrNumber<T> = One<T, true>;

/// As [`One`] at a `Vec`: one text, or a list of them. If `FILLED`, an empty list is refused: some users
/// would read it as all, others as none.
pub struct Many<T, const NUMBERS: bool = false, const FILLED: bool = false>(PhantomData<T>);

/// As [`Many`]: at least one text.
pub type Filled<T> = Many<T, false, true>;

/// As [`Many`]: at least one word in quotes or plain number.
pub type FilledOrNumbers<T> = Many<T, true, true>;

impl<T: Text, const NUMBERS: bool> One<T, NUMBERS> {
    /// Reads the value.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
        from.deserialize_any(Self(PhantomData)).map(Some)
    }

    /// Refuses: values are read only. schemars calls it for the default, which no schema names.
    pub fn serialize<S: Serializer, V>(_: &V, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(T::EXPECTED))
    }
}

impl<T: Text, const NUMBERS: bool, const FILLED: bool> Many<T, NUMBERS, FILLED> {
    /// Reads the values.
    pub fn deserialize<'de, D: Deserializer<'de>, V: From<T>>(from: D) -> Result<Vec<V>, D::Error> {
        let values = from.deserialize_any(Self(PhantomData))?;
        match values.is_empty() && FILLED {
            true => Err(serde::de::Error::custom("the list is empty: leave the key out to match everything")),
            false => Ok(values.into_iter().map(V::from).collect()),
        }
    }

    /// As [`One::serialize`].
    pub fn serialize<S: Serializer, V>(_: &V, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(T::EXPECTED))
    }
}

impl<T: Text, const NUMBERS: bool> Visitor<'_> for One<T, NUMBERS> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        T::read(text).map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        match NUMBERS {
            true => self.visit_str(&number.to_string()),
            false => Err(E::invalid_type(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<T, E> {
        match NUMBERS {
            true => self.visit_str(&number.to_string()),
            false => Err(E::invalid_type(Unexpected::Unsigned(number), &self)),
        }
    }
}

impl<'de, T: Text, const NUMBERS: bool> DeserializeSeed<'de> for One<T, NUMBERS> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<T, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de, T: Text, const NUMBERS: bool, const FILLED: bool> Visitor<'de> for Many<T, NUMBERS, FILLED> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, or a list of such", T::EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<T>, E> {
        T::read(text).map(|value| vec![value]).map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Vec<T>, E> {
        match NUMBERS {
            true => self.visit_str(&number.to_string()),
            false => Err(E::invalid_type(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let next = || items.next_element_seed(One::<T, NUMBERS>(PhantomData)).transpose();
        std::iter::from_fn(next).collect()
    }
}

/// Implements [`Text`] for enums whose values are words.
#[macro_export]
macro_rules! text_of_words {
    ($($name:ty),+ $(,)?) => {
        $crate::text_of_parsed! {
            $($name: Self::EXPECTED, as in Self::WORDS[0].0, one of Self::WORDS;)+
        }
    };
}

/// Implements [`Text`] for types that [`FromStr`] parses, each with
/// the expected text and an example.
#[macro_export]
macro_rules! text_of_parsed {
    ($($name:ty: $expected:expr, as in $example:expr $(, one of $words:expr)?;)+) => {$(
        impl $crate::values::Text for $name {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;
            $(const WORDS: &'static [(&'static str, &'static str)] = $words;)?

            fn read(text: &str) -> ::std::result::Result<Self, ::std::string::String> {
                <Self as ::std::str::FromStr>::from_str(text).map_err(|error| error.to_string())
            }
        }
    )+};
}

/// A server's name or address, and its UDP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddr {
    /// A host name or an IP address, without brackets.
    pub host: String,
    /// The UDP port.
    pub port: u16,
}

impl ServerAddr {
    /// The host as an IP address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// The address with its port, if the host is one.
    pub fn socket_addr(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.ip()?, self.port))
    }
}

impl fmt::Display for ServerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl FromStr for ServerAddr {
    type Err = String;

    /// `HOST`, `HOST:PORT`, `V4`, `V4:PORT`, `V6`, `[V6]`, `[V6]:PORT`; port 443 unless given.
    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = split_port(text)?;
        let port = match port {
            None => 443,
            Some(port) => match port.parse() {
                Ok(port) if port != 0 => port,
                _ => return Err(format!("`{port}` is not a port: expected a number from 1 to 65535")),
            },
        };
        if host.parse::<IpAddr>().is_err() && !is_host_name(host) {
            return Err(format!("`{host}` is neither a host name nor an IP address"));
        }
        Ok(Self { host: host.into(), port })
    }
}

fn split_port(text: &str) -> Result<(&str, Option<&str>), String> {
    if let Some(rest) = text.strip_prefix('[') {
        let Some((host, after)) = rest.split_once(']') else {
            return Err(format!("`{text}` has no closing bracket: expected [IPV6]:PORT"));
        };
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(format!("`{host}` is not an IPv6 address"));
        }
        return match after.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if after.is_empty() => Ok((host, None)),
            None => Err(format!("`{after}` after the bracket: expected :PORT")),
        };
    }
    if text.matches(':').count() > 1 {
        return Ok((text, None));
    }
    Ok(text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))))
}

/// Letters, digits, hyphens and underscores in labels of 1 to 63 characters (RFC 1123, section 2.1).
pub fn is_host_name(text: &str) -> bool {
    let labels = text.strip_suffix('.').unwrap_or(text);
    let label_is_good = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A last label of digits only is a mistyped IPv4 address.
    let last_is_number = labels.rsplit('.').next().is_some_and(|l| l.bytes().all(|b| b.is_ascii_digit()));
    labels.len() <= 253 && labels.split('.').all(label_is_good) && !last_is_number
}

/// Whether the kernel accepts `text` as the name of an interface (`dev_valid_name`; `%d` patterns are
/// refused).
pub fn is_link_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'))
        && text != "."
        && text != ".."
}

crate::text_of_parsed! {
    ServerAddr: "\"HOST:PORT\"", as in "vpn.example:443";
}

impl Text for SocketAddr {
    const EXPECTED: &'static str = "\"ADDRESS:PORT\"";
    const EXAMPLE: &'static str = "127.0.0.1:9464";

    fn read(text: &str) -> Result<Self, String> {
        let address: Self = text.parse().map_err(|_| match text.parse::<u16>() {
            Ok(port) => format!(
                "`{port}` is a port without an address: 127.0.0.1:{port} is for programs of this machine, 0.0.0.0:{port} for \
                 other machines, too"
            ),
            Err(_) => format!("`{text}` is not an address with a port, as in 0.0.0.0:4433 or [::]:4433"),
        })?;
        match address.port() {
            0 => Err(format!("`{text}` has port 0, which no client could connect to: expected 1 to 65535")),
            _ => Ok(address),
        }
    }
}

impl Text for Ipv4Net {
    const EXPECTED: &'static str = "an IPv4 network in quotes, as in \"10.0.0.0/24\"";
    const EXAMPLE: &'static str = "10.0.0.0/24";

    fn read(text: &str) -> Result<Self, String> {
        let net: Self =
            text.parse().map_err(|_| format!("`{text}` is not an IPv4 network, as in 10.0.0.0/24"))?;
        if net.trunc() != net {
            return Err(host_bits(text, &net.trunc()));
        }
        if net.prefix_len() > 30 {
            return Err(format!("{net} is too small: a server and a client need /30 or larger"));
        }
        if net.prefix_len() < 8 {
            return Err(format!("{net} is too large: expected /8 or smaller"));
        }
        let first = net.network();
        if first.is_loopback() || first.is_multicast() || first.is_link_local() || first.octets()[0] == 0 {
            return Err(format!(
                "{net} cannot be given to clients: choose a private network, as in 10.0.0.0/24"
            ));
        }
        if first >= Ipv4Addr::new(240, 0, 0, 0) {
            return Err(format!("{net} is reserved: choose a private network, as in 10.0.0.0/24"));
        }
        Ok(net)
    }
}

/// The error for a network in which bits of hosts are set.
pub fn host_bits(given: &str, meant: &dyn fmt::Display) -> String {
    format!("{given} has host bits set: did you mean {meant}?")
}

/// Options with the type `String` are names of interfaces.
impl Text for String {
    const EXPECTED: &'static str = "an interface's name in quotes";
    const EXAMPLE: &'static str = "wan0";

    fn read(text: &str) -> Result<Self, String> {
        match is_link_name(text) {
            true => Ok(text.into()),
            false => Err(format!(
                "`{text}` is not an interface's name: expected 1 to 15 letters, digits, - _ or ."
            )),
        }
    }
}

/// The name of an instance, which is part of the file name of its socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceName(pub String);

impl Text for InstanceName {
    const EXPECTED: &'static str = "a name in quotes";
    const EXAMPLE: &'static str = "home";

    fn read(text: &str) -> Result<Self, String> {
        let good = (1..=32).contains(&text.len())
            && !text.starts_with('.')
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        match good {
            true => Ok(Self(text.into())),
            false => Err(format!("`{text}` is not a name: expected 1 to 32 letters, digits, - _ or .")),
        }
    }
}

impl Text for PathBuf {
    const EXPECTED: &'static str = "a path in quotes";
    const EXAMPLE: &'static str = "/etc/mpvpn/file";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("the path is empty".into()),
            text => Ok(text.into()),
        }
    }
}
