//! Join links: all that a client needs to know about a server, in one line.
//!
//! In: `mpvpn://TOKEN@HOST[:PORT]/?pin=SHA256`, with several pins or with `ca=system` instead, and with
//! further parameters that later versions may know. Out: server, token and trust, or the mistake in the link.
//! Always holds: errors do not contain the token.

use std::{path::Path, str::FromStr};

use derive_more::Display;
use toml_edit::{Array, DocumentMut, TomlError, value};

use mpvpn_identity::{identity::Fingerprint, token::Token, trust::MAX_PINS};
use mpvpn_input::{Error, Result, files, values::ServerAddr};

/// How every link begins.
const SCHEME: &str = "mpvpn://";
/// Hexadecimal digits of a pin.
const PIN_DIGITS: usize = 64;
/// The length from which on errors hide a token (bytes): generated ones are longer. Shorter: parts of words
/// are hidden; longer: tokens that people chose are shown.
const MIN_SECRET_BYTES: usize = 16;
/// Longest link (bytes). Chosen: a link has some 200, with all pins that work 1,300. More: a pasted file is
/// read to its end.
const MAX_LINK_BYTES: usize = 4096;
/// The longest name of an interface (bytes): `IFNAMSIZ` of the kernel without the zero at its end.
const MAX_INTERFACE_BYTES: usize = 15;
/// The beginning of a client's file that `mpvpn join` makes.
const HEAD: &str = "\
# Configuration of the mpvpn client on this machine, made by `mpvpn join`. Further keys: docs/reference/client.md.

";
/// Keys of a client's file that say otherwise what each link says.
const REPLACED_KEYS: [&str; 2] = ["insecure", "token-file"];
/// The parameter of a link by which the client trusts the CAs of its machine.
const SYSTEM_CA: (&str, &str) = ("ca", "system");

/// A join link.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
#[display("{SCHEME}{}@{server}/?{trust}", token.reveal().replace('/', "%2F"))]
pub struct JoinLink {
    /// The server.
    pub server: ServerAddr,
    /// The user's token.
    pub token: Token,
    /// How the client knows the server.
    pub trust: LinkTrust,
}

/// How a client that joined by a link knows the server.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum LinkTrust {
    /// The certificate has one of these SHA-256.
    #[display("{}", pins_text("pin=", "&", _0))]
    Pins(Vec<Fingerprint>),
    /// A CA that the client's machine trusts signed the certificate for the server's name.
    #[display("{}={}", SYSTEM_CA.0, SYSTEM_CA.1)]
    System,
}

impl LinkTrust {
    /// The options of a client.
    pub fn options(&self) -> String {
        match self {
            Self::Pins(pins) => pins_text("--pin ", " ", pins),
            Self::System => format!("--{} {}", SYSTEM_CA.0, SYSTEM_CA.1),
        }
    }
}

fn pins_text(prefix: &str, separator: &str, pins: &[Fingerprint]) -> String {
    pins.iter().map(|pin| format!("{prefix}{pin}")).collect::<Vec<_>>().join(separator)
}

impl JoinLink {
    /// The command that runs a client by this link.
    pub fn client_command(&self) -> String {
        format!("mpvpn client '{self}'")
    }

    /// Writes the client's file `path`, or changes server, token and trust there. A new file is for root and
    /// the members of the group `mpvpn-admin`, if there is one.
    ///
    /// # Errors
    /// If the file is for another server, cannot be understood, or cannot be written.
    pub fn write_to(&self, path: &Path) -> Result<Joined> {
        let before = if path.exists() { Some(files::read_text(path)?) } else { None };
        let text = self.file_text(path, before.as_deref())?;
        files::write_config(path, &text)?;
        Ok(if before.is_some() { Joined::Updated } else { Joined::New })
    }

    /// The text of the client's file `path` that joins by this link, and keeps all else of `before`.
    ///
    /// # Errors
    /// If `before` is for another server, or cannot be understood.
    pub fn file_text(&self, path: &Path, before: Option<&str>) -> Result<String> {
        let is_new = before.is_none();
        let head = if is_new { HEAD } else { "" };
        let mut document: DocumentMut =
            before.unwrap_or_default().parse().map_err(|error: TomlError| Error::Content {
                path: path.into(),
                expected: "the configuration of a client",
                found: error.to_string(),
            })?;
        let server = self.server.to_string();
        let is_this = |text: &str| text.parse::<ServerAddr>().is_ok_and(|address| address == self.server);
        if let Some(before) = document.get("server").filter(|before| !before.as_str().is_some_and(is_this)) {
            return Err(Error::usage(
                format!(
                    "{} is for the server {}",
                    path.display(),
                    before.to_string().trim_matches([' ', '"', '\''])
                ),
                "join as a further client with --name NAME, or move that file away",
            ));
        }
        document["server"] = value(server);
        match &self.trust {
            LinkTrust::Pins(pins) => {
                document["pin"] = match pins.as_slice() {
                    [pin] => value(pin.to_string()),
                    pins => value(pins.iter().map(ToString::to_string).collect::<Array>()),
                };
                document.remove("ca");
            }
            LinkTrust::System => {
                document["ca"] = value(SYSTEM_CA.1);
                document.remove("pin");
            }
        }
        document["token"] = value(self.token.reveal());
        if let Some(name) = client_name(path).filter(|_| is_new) {
            // Beside another client it needs a device and a name of its own.
            document["name"] = value(name);
            document["tun-name"] = value(tun_name(name));
        }
        for key in REPLACED_KEYS {
            document.remove(key);
        }
        Ok(format!("{head}{document}"))
    }
}

/// The name of a client whose file is `client-NAME.toml`.
fn client_name(path: &Path) -> Option<&str> {
    path.file_stem()?.to_str()?.strip_prefix("client-").filter(|name| !name.is_empty())
}

/// The name of the TUN device of a client with this name, which the kernel takes: at most 15 bytes. Long
/// names are cut, and have a number of their own.
pub fn tun_name(name: &str) -> String {
    let whole = format!("mpvpn-{name}");
    if whole.len() <= MAX_INTERFACE_BYTES {
        return whole;
    }
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, name.as_bytes());
    let number: String = digest.as_ref()[..2].iter().map(|byte| format!("{byte:02x}")).collect();
    let kept = whole.floor_char_boundary(MAX_INTERFACE_BYTES - number.len());
    format!("{}{number}", &whole[..kept])
}

/// The change that joining made to a client's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It was made.
    New,
    /// It was for this server before; token and trust are new, and all else stays.
    Updated,
}

/// The mistake in a link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseLinkError(String);

impl FromStr for JoinLink {
    type Err = ParseLinkError;

    fn from_str(text: &str) -> Result<Self, ParseLinkError> {
        let wrong = |what: &str| Err(ParseLinkError(what.to_owned()));
        let text = text.trim();
        if text.len() > MAX_LINK_BYTES {
            return wrong("this is too long for a join link");
        }
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return wrong("a join link begins with mpvpn://");
        };
        let Some((shown, rest)) = rest.split_once('@') else {
            return wrong("the link was cut short: after the token an @ and the server are missing");
        };
        // The rest has the token where a link was pasted twice. A shorter one may be a part of any word.
        let is_secret = shown.len() >= MIN_SECRET_BYTES;
        let hide =
            |error: String| ParseLinkError(if is_secret { error.replace(shown, "TOKEN") } else { error });
        let token = shown.replace("%2F", "/").replace("%2f", "/");
        let Ok(token) = token.parse() else {
            return wrong("between mpvpn:// and @ there is no token");
        };
        let (server, query) = rest.split_once("/?").unwrap_or((rest.trim_end_matches('/'), ""));
        if server.is_empty() {
            return wrong("the link was cut short: after the @ the server is missing");
        }
        let server: ServerAddr = server.parse().map_err(hide)?;
        let trust = parse_trust(query).map_err(|ParseLinkError(error)| hide(error))?;
        Ok(Self { server, token, trust })
    }
}

/// The trust that the parameters of a link say.
fn parse_trust(query: &str) -> Result<LinkTrust, ParseLinkError> {
    let wrong = |what: String| Err(ParseLinkError(what));
    let (mut pins, mut trusts_system) = (Vec::new(), false);
    for (name, value) in query.split('&').filter_map(|parameter| parameter.split_once('=')) {
        match name {
            "pin" => match value.parse() {
                Ok(pin) => pins.push(pin),
                Err(_) if value.len() < PIN_DIGITS && value.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                    return wrong(format!(
                        "the link was cut short: its pin has {} of {PIN_DIGITS} digits",
                        value.len()
                    ));
                }
                Err(error) => return wrong(format!("the pin is wrong: {error}")),
            },
            _ if (name, value) == SYSTEM_CA => trusts_system = true,
            "ca" if SYSTEM_CA.1.starts_with(value) => {
                return wrong("the link was cut short: at its end is a part of ca=system".into());
            }
            "ca" => return wrong("the link names a CA in a way that this version does not know".into()),
            _ => {}
        }
    }
    match (pins.len(), trusts_system) {
        (0, true) => Ok(LinkTrust::System),
        (1..=MAX_PINS, false) => Ok(LinkTrust::Pins(pins)),
        (0, false) => {
            wrong("the link was cut short: at its end the pin is missing, as in /?pin=SHA256".into())
        }
        (count, false) => wrong(format!("the link has {count} pins, and at most {MAX_PINS} work")),
        (_, true) => wrong("the link has a pin and ca=system, which contradict each other".into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use mpvpn_identity::trust::Trust;

    fn link(server: &str, token: &str) -> JoinLink {
        let trust = LinkTrust::Pins(vec!["0123456789abcdef".repeat(4).parse().unwrap()]);
        JoinLink { server: server.parse().unwrap(), token: token.parse().unwrap(), trust }
    }

    #[test]
    fn a_link_may_have_several_pins_or_trust_the_cas_of_the_machine() {
        let [old, new] = ["aa", "bb"].map(|byte| byte.repeat(32));
        let text = format!("mpvpn://t@vpn.example:443/?pin={old}&pin={new}");
        let pins = vec![old.parse().unwrap(), new.parse().unwrap()];
        let rollover = JoinLink { trust: LinkTrust::Pins(pins.clone()), ..link("vpn.example", "t") };
        assert_eq!((rollover.to_string(), text.parse()), (text.clone(), Ok(rollover.clone())));
        let text = "mpvpn://t@vpn.example:443/?ca=system";
        let system = JoinLink { trust: LinkTrust::System, ..link("vpn.example", "t") };
        assert_eq!((system.to_string().as_str(), text.parse()), (text, Ok(system.clone())));

        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("client.toml");
        let trust_after = |link: &JoinLink| {
            link.write_to(&path).unwrap();
            let options = mpvpn_config::ClientOptions::default();
            mpvpn_config::ClientConfig::load(Some(&path), options).unwrap().trust
        };
        assert_eq!(trust_after(&rollover), Trust::Pin(pins));
        assert_eq!(trust_after(&system), Trust::System);
        assert_eq!(
            trust_after(&link("vpn.example", "t")),
            Trust::Pin(vec!["0123456789abcdef".repeat(4).parse().unwrap()])
        );
    }

    #[test]
    fn a_link_that_was_pasted_twice_is_refused_without_its_token() {
        let token = "mpvpn_0123456789abcdef";
        for twice in [
            format!("mpvpn://{token}@vpn.exampl mpvpn://{token}@vpn.example:443/?ca=system"),
            format!("mpvpn://{token}@vpn.example/?pin=mpvpn://{token}@vpn.example"),
        ] {
            let error = twice.parse::<JoinLink>().unwrap_err().to_string();
            assert!(!error.contains(token), "{error}");
        }
    }

    #[test]
    fn a_link_has_server_token_and_pin() {
        let pin = "0123456789abcdef".repeat(4);
        for (server, token, text) in [
            ("vpn.example", "mpvpn_abc", format!("mpvpn://mpvpn_abc@vpn.example:443/?pin={pin}")),
            ("192.0.2.1:4433", "a+b=~", format!("mpvpn://a+b=~@192.0.2.1:4433/?pin={pin}")),
            ("[2001:db8::1]:4433", "a/b", format!("mpvpn://a%2Fb@[2001:db8::1]:4433/?pin={pin}")),
        ] {
            assert_eq!(link(server, token).to_string(), text);
            assert_eq!(text.parse(), Ok(link(server, token)));
        }
        let short = format!("  mpvpn://t@vpn.example/?later=1&pin={pin}&more=2\n");
        assert_eq!(short.parse(), Ok(link("vpn.example", "t")), "unknown parameters are ignored");
    }

    #[test]
    fn a_link_that_was_cut_says_where() {
        let whole = link("vpn.example", "mpvpn_secret").to_string();
        let part_until = |end: &str| &whole[..whole.find(end).unwrap() + end.len()];
        for (cut, said) in [
            ("https://vpn.example", "begins with mpvpn://"),
            ("mpvpn", "begins with mpvpn://"),
            (part_until("_sec"), "an @ and the server are missing"),
            (part_until("@"), "the server is missing"),
            (part_until("vpn.example"), "the pin is missing"),
            (part_until("/?pin"), "the pin is missing"),
            (part_until("=0123"), "its pin has 4 of 64 digits"),
            ("mpvpn://@vpn.example/?pin=00", "no token"),
            ("mpvpn://t@vpn.example:0/?pin=00", "`0` is not a port"),
            ("mpvpn://t@vpn example/?pin=00", "neither a host name nor an IP address"),
            ("mpvpn://t@vpn.example/?pin=xyz", "the pin is wrong"),
            ("mpvpn://t@vpn.example/?ca=sys", "a part of ca=system"),
            ("mpvpn://t@vpn.example/?ca=other", "in a way that this version does not know"),
            (&format!("{whole}&ca=system"), "contradict each other"),
            (&format!("{whole}{}", format!("&pin={}", "00".repeat(32)).repeat(16)), "17 pins"),
        ] {
            let error = cut.parse::<JoinLink>().unwrap_err().to_string();
            assert!(error.contains(said), "{cut}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_clients_file_is_made_and_changed_and_what_people_wrote_stays() {
        use std::os::unix::fs::PermissionsExt;

        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("etc/mpvpn/client.toml");
        assert_eq!(link("vpn.example", "old").write_to(&path).unwrap(), Joined::New);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o027, 0, "{mode:o}");
        let config =
            mpvpn_config::ClientConfig::load(Some(&path), mpvpn_config::ClientOptions::default()).unwrap();
        assert_eq!(
            (config.server, config.token),
            ("vpn.example".parse().unwrap(), Some("old".parse().unwrap()))
        );

        let text = std::fs::read_to_string(&path).unwrap()
            + "routes = \"advertised\" # only work\ninsecure = true\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(link("vpn.example", "new").write_to(&path).unwrap(), Joined::Updated);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.contains("routes = \"advertised\" # only work\n") && text.contains("token = \"new\""),
            "{text}"
        );
        assert!(!text.contains("insecure"), "{text}");

        let error = link("other.example", "t").write_to(&path).unwrap_err();
        assert!(error.to_string().contains("is for the server vpn.example:443"), "{error}");
        assert!(error.next_step().contains("--name NAME"), "{}", error.next_step());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn a_client_beside_another_has_a_device_and_a_name_of_its_own() {
        let home = tempfile::tempdir().unwrap();
        let [first, second] = ["a-name-of-25-letters-and-1", "a-name-of-25-letters-and-2"].map(tun_name);
        assert!(first != second && first.len() == MAX_INTERFACE_BYTES, "{first} {second}");
        let path = home.path().join("client-work.toml");
        link("vpn.example", "t").write_to(&path).unwrap();
        let config =
            mpvpn_config::ClientConfig::load(Some(&path), mpvpn_config::ClientOptions::default()).unwrap();
        assert_eq!((config.name.as_str(), config.tun_name.as_str()), ("work", "mpvpn-work"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail_badly(text in ".{0,200}", tail in ".{0,100}") {
            let _ = text.parse::<JoinLink>();
            let _ = format!("mpvpn://{text}@{tail}/?pin={text}").parse::<JoinLink>();
        }

        #[test]
        fn what_is_written_is_read_again(token in "[A-Za-z0-9._~+/=-]{1,80}", port in 1_u16..) {
            let link = link(&format!("vpn.example:{port}"), &token);
            prop_assert_eq!(link.to_string().parse(), Ok(link));
        }
    }
}
