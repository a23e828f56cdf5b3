//! Join links: all that a client needs to know about a server, in one line.
//!
//! In: `mpvpn://TOKEN@HOST[:PORT]/?pin=SHA256`, with further parameters that later versions may know. Out: server, token and pin,
//! or the mistake in the link. Always holds: errors do not contain the token.

use std::{fmt, path::Path, str::FromStr};

use toml_edit::value;

use crate::{Error, Result, auth::Token, config::ServerAddr, files, identity::Fingerprint};

/// How every link begins.
const SCHEME: &str = "mpvpn://";
/// Hexadecimal digits of a pin.
const PIN_DIGITS: usize = 64;
/// Longest link (bytes). Chosen: a link has some 200. More: a pasted file is read to its end.
const MAX_LINK_BYTES: usize = 4096;
/// The beginning of a client's file that `mpvpn join` makes.
const HEAD: &str = "\
# Configuration of the mpvpn client on this machine, made by `mpvpn join`. Further keys: docs/reference/client.md.

";
/// The group whose members may read a client's file.
const GROUP: &str = "mpvpn";
/// Keys of a client's file that say otherwise what a link says.
const REPLACED_KEYS: [&str; 3] = ["ca", "insecure", "token-file"];

/// A join link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinLink {
    /// The server.
    pub server: ServerAddr,
    /// The user's token.
    pub token: Token,
    /// The SHA-256 of the server's certificate.
    pub pin: Fingerprint,
}

impl fmt::Display for JoinLink {
    /// The link, with the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of the characters of tokens only this one ends the part before the host.
        let token = self.token.reveal().replace('/', "%2F");
        write!(f, "{SCHEME}{token}@{}/?pin={}", self.server, self.pin)
    }
}

/// What became of a client's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It was made.
    New,
    /// It was for this server before; token and pin are new, and all else stays.
    Updated,
}

impl JoinLink {
    /// Writes the client's file `path`, or changes server, token and pin there. A new file is for root and the members of the
    /// group `mpvpn`, if there is one.
    ///
    /// # Errors
    /// If the file is for another server, cannot be understood, or cannot be written.
    pub fn write_to(&self, path: &Path) -> Result<Joined> {
        let exists = path.exists();
        let mut document = files::read_toml(path, HEAD, "the configuration of a client")?;
        let server = self.server.to_string();
        let before = document.get("server").and_then(|server| server.as_str()).map(str::to_owned);
        if let Some(before) =
            before.filter(|before| before.parse::<ServerAddr>().ok().as_ref() != Some(&self.server))
        {
            return Err(Error::usage(
                format!("{} is for the server {before}", path.display()),
                "join as a further client with --name NAME, or move that file away",
            ));
        }
        document["server"] = value(server);
        document["pin"] = value(self.pin.to_string());
        document["token"] = value(self.token.reveal());
        for key in REPLACED_KEYS {
            document.remove(key);
        }
        if let Some(folder) = path.parent() {
            // Others may look up which files there are, not read them.
            std::fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
        }
        files::write_secret(path, document.to_string().as_bytes())?;
        if !exists {
            files::allow_group(path, GROUP)?;
        }
        Ok(if exists { Joined::Updated } else { Joined::New })
    }
}

/// The mistake in a link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseLinkError(String);

impl FromStr for JoinLink {
    type Err = ParseLinkError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseLinkError> {
        let wrong = |what: &str| Err(ParseLinkError(what.to_owned()));
        let text = text.trim();
        if text.len() > MAX_LINK_BYTES {
            return wrong("this is too long for a join link");
        }
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return wrong("a join link begins with mpvpn://");
        };
        let Some((token, rest)) = rest.split_once('@') else {
            return wrong("the link was cut short: after the token an @ and the server are missing");
        };
        let token = token.replace("%2F", "/").replace("%2f", "/");
        let Ok(token) = token.parse() else {
            return wrong("between mpvpn:// and @ there is no token");
        };
        let (server, query) = rest.split_once("/?").unwrap_or((rest.trim_end_matches('/'), ""));
        if server.is_empty() {
            return wrong("the link was cut short: after the @ the server is missing");
        }
        let server: ServerAddr = server.parse().map_err(ParseLinkError)?;
        let mut pin = None;
        for (name, value) in query.split('&').filter_map(|parameter| parameter.split_once('=')) {
            if name == "pin" && pin.replace(value).is_some() {
                return wrong("the link has two pins, and this version knows one");
            }
        }
        let Some(pin) = pin else {
            return wrong("the link was cut short: at its end the pin is missing, as in /?pin=SHA256");
        };
        match pin.parse() {
            Ok(pin) => Ok(Self { server, token, pin }),
            Err(_) if pin.len() < PIN_DIGITS && pin.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                wrong(&format!("the link was cut short: its pin has {} of {PIN_DIGITS} digits", pin.len()))
            }
            Err(error) => wrong(&format!("the pin is wrong: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(server: &str, token: &str) -> JoinLink {
        let pin = "0123456789abcdef".repeat(4).parse().unwrap();
        JoinLink { server: server.parse().unwrap(), token: token.parse().unwrap(), pin }
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
            ("mpvpn://t@vpn.example/?pin=00&pin=00", "two pins"),
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
            crate::config::ClientConfig::load(Some(&path), crate::config::ClientOptions::default()).unwrap();
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
