//! Makes secrets, names of users and public addresses unreadable.
//!
//! In: files and texts of any kind, all of them before the first is redacted. Out: the text with `[address
//! 1]`, `[key 1]`, `[mac 1]`, `user-1` and `[server]` in their places. Always holds: secrets and users are
//! found by the key that they have anywhere in the report; the same address, key or user has the same number
//! in the whole report, so that a reader still sees what belongs together.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
};

use mpvpn_packet::public::is_public;
use mpvpn_users::credentials::FIRST_USER;
use serde_json::Value;

/// Keys whose values are names of machines. A token, or a user and a password, may stand before an `@`.
const NAME_KEYS: [&str; 5] = ["server", "public", "domains", "via", "server-name"];
/// Keys that are looked for in logs, command lines and JSON.
const TEXT_KEYS: [&str; 3] = ["token", "via", "user"];
/// Names of users that nobody has chosen.
const DEFAULT_USERS: [&str; 4] = [FIRST_USER, "anonymous", "mpvpn", "root"];

/// Length from which a word with a digit counts as a key (characters): tokens, pins and hashes are longer,
/// names shorter.
const MIN_KEY_LEN: usize = 32;
/// Length from which a name is hidden everywhere (characters): a shorter one would be found inside of other
/// words.
const MIN_NAME_LEN: usize = 4;

/// Hides what must not be published.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    numbers: HashMap<String, usize>,
    names: Vec<String>,
    users: Vec<String>,
    secrets: Vec<String>,
}

impl Redactor {
    /// Learns from a configuration or a file of users.
    pub(super) fn learn_toml(&mut self, text: &str) {
        // Text that is no TOML is read by `learn_text`.
        if let Ok(value) = toml::from_str(text) {
            self.learn("file", &value);
        }
    }

    /// Learns from the value of a key.
    pub(super) fn learn(&mut self, key: &str, value: &Value) {
        match value {
            Value::Object(all) => {
                for (inner, value) in all {
                    let names_it =
                        matches!((key, inner.as_str()), ("user" | "users", "name") | ("server", "address"));
                    self.learn(if names_it { key } else { inner }, value);
                }
            }
            Value::Array(all) => all.iter().for_each(|value| self.learn(key, value)),
            Value::String(text) => self.learn_value(key, text),
            _ => {}
        }
    }

    /// Learns from text with keys and values, and with URLs.
    pub(super) fn learn_text(&mut self, text: &str) {
        for line in text.lines() {
            for (at, slashes) in line.match_indices("://") {
                let is_end = |c: char| c.is_whitespace() || "\"'`<>".contains(c);
                let url = line[at + slashes.len()..].split(is_end).next().unwrap_or_default();
                if let Some((credentials, _)) = url.rsplit_once('@') {
                    self.hide_credentials(credentials);
                }
            }
            for key in TEXT_KEYS {
                for (at, _) in line.match_indices(key) {
                    if let Some(value) = value_of_key(&line[..at], &line[at + key.len()..]) {
                        self.learn_value(key, value);
                    }
                }
            }
        }
    }

    fn learn_value(&mut self, key: &str, text: &str) {
        match key {
            "token" => self.hide_secret(text),
            "user" | "users" | "email" => self.hide_user(text),
            key if NAME_KEYS.contains(&key) => {
                let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
                let (credentials, host) = rest.rsplit_once('@').unwrap_or(("", rest));
                self.hide_credentials(credentials);
                self.hide_name(host.split([':', '/']).next().unwrap_or_default());
            }
            _ => {}
        }
    }

    /// Hides a token, or a user and a password.
    fn hide_credentials(&mut self, credentials: &str) {
        let (user, secret) = credentials.split_once(':').unwrap_or(("", credentials));
        self.hide_user(user);
        self.hide_secret(secret);
    }

    /// Hides the name of a user where no letter or digit stands beside it.
    fn hide_user(&mut self, name: &str) {
        // The key `users` may also name the users' file.
        let is_file = name.starts_with('/') || name.ends_with(".toml");
        let is_known = DEFAULT_USERS.contains(&name) || self.users.iter().any(|known| known == name);
        if !name.is_empty() && !is_file && !is_known {
            self.users.push(name.to_owned());
        }
    }

    /// Hides this name wherever it stands: the server's.
    pub(super) fn hide_name(&mut self, name: &str) {
        let is_address = name.parse::<IpAddr>().is_ok();
        if name.chars().count() >= MIN_NAME_LEN
            && !is_address
            && !self.names.iter().any(|known| known == name)
        {
            self.names.push(name.to_owned());
        }
    }

    /// Hides a token or a password, however short it is: wherever it stands, or, if it would be found inside
    /// of other words, where no letter or digit stands beside it.
    pub(super) fn hide_secret(&mut self, secret: &str) {
        if !secret.is_empty() && !self.secrets.iter().any(|known| known == secret) {
            self.secrets.push(secret.to_owned());
        }
    }

    /// The text without secrets and public addresses.
    pub(super) fn redact(&mut self, text: &str) -> String {
        let mut text = text.to_owned();
        // The longest first: a shorter one may be a part of it.
        self.secrets.sort_by_key(|secret| Reverse(secret.len()));
        for secret in self.secrets.clone() {
            let is_short = secret.chars().count() < MIN_NAME_LEN;
            text = self.without(&text, "key", &secret, is_short);
        }
        for user in self.users.clone() {
            text = self.without(&text, "user", &user, true);
        }
        for name in &self.names {
            text = text.replace(name.as_str(), "[server]");
        }
        let text = replace_runs(&text, is_of_key, |run| self.key(run));
        replace_runs(&text, is_of_address, |run| self.addresses(run))
    }

    fn without(&mut self, text: &str, what: &str, secret: &str, as_word: bool) -> String {
        let mut done = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(secret) {
            let (before, after) = (&rest[..at], &rest[at + secret.len()..]);
            done.push_str(before);
            let is_word = !before.ends_with(is_of_key) && !after.starts_with(is_of_key);
            match as_word && !is_word {
                true => done.push_str(secret),
                false => done.push_str(&self.numbered(what, secret)),
            }
            rest = after;
        }
        done + rest
    }

    fn key(&mut self, run: &str) -> Option<String> {
        let is_key = run.len() >= MIN_KEY_LEN && run.contains(|c: char| c.is_ascii_digit());
        is_key.then(|| self.numbered("key", run))
    }

    fn addresses(&mut self, run: &str) -> Option<String> {
        let trimmed = run.trim_end_matches('.');
        for candidate in [trimmed, trimmed.strip_suffix(':').unwrap_or(trimmed)] {
            if let Some(shown) = self.address(candidate) {
                return Some(shown + &run[candidate.len()..]);
            }
        }
        // An address beside a colon, as in `203.0.113.1:443`.
        let mut is_changed = false;
        let parts = run.split(':').map(|part| {
            let address = part.trim_end_matches('.');
            match self.address(address) {
                Some(shown) => {
                    is_changed = true;
                    shown + &part[address.len()..]
                }
                None => part.to_owned(),
            }
        });
        let text = parts.collect::<Vec<_>>().join(":");
        is_changed.then_some(text)
    }

    fn address(&mut self, text: &str) -> Option<String> {
        if is_mac(text) {
            return Some(self.numbered("mac", text));
        }
        let address: IpAddr = text.parse().ok()?;
        is_identifying(address).then(|| self.numbered("address", &address.to_string()))
    }

    fn numbered(&mut self, what: &str, value: &str) -> String {
        let next = self.numbers.keys().filter(|known| known.starts_with(what)).count() + 1;
        let number = self.numbers.entry(format!("{what} {value}")).or_insert(next);
        if what == "user" { format!("user-{number}") } else { format!("[{what} {number}]") }
    }
}

/// The value of a key that stands between these texts, as in `key = "value"`, `"key": "value"`, `key=value`
/// and `--key value`.
fn value_of_key<'a>(before: &str, after: &'a str) -> Option<&'a str> {
    if before.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
        return None;
    }
    let after = after.strip_prefix(['"', '\'']).unwrap_or(after);
    let rest = after.trim_start();
    let value = match rest.strip_prefix(['=', ':']) {
        Some(value) => value.trim_start(),
        None if before.ends_with("--") && rest.len() < after.len() => rest,
        None => return None,
    };
    let unquoted = value.strip_prefix(['"', '\'']);
    let value = match unquoted {
        Some(unquoted) => unquoted.split(&value[..1]).next()?,
        // Sentences have colons.
        None if rest.starts_with(':') => return None,
        None => value.split_whitespace().next()?.trim_end_matches([',', ';', ')', ']', '}']),
    };
    (!value.is_empty()).then_some(value)
}

/// Replaces those maximal runs of characters for which `replace` has something else.
fn replace_runs(
    text: &str,
    is_of_run: fn(char) -> bool,
    mut replace: impl FnMut(&str) -> Option<String>,
) -> String {
    let mut done = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_of_run) {
        let (before, from_run) = rest.split_at(start);
        let (run, after) = from_run.split_at(from_run.find(|c| !is_of_run(c)).unwrap_or(from_run.len()));
        done.push_str(before);
        match replace(run) {
            Some(other) => done.push_str(&other),
            None => done.push_str(run),
        }
        rest = after;
    }
    done + rest
}

fn is_of_key(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

fn is_of_address(c: char) -> bool {
    c.is_ascii_hexdigit() || c == ':' || c == '.'
}

/// Whether the text is a hardware address that is one device's.
fn is_mac(text: &str) -> bool {
    let is_byte = |part: &str| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit());
    let is_same = text.split(':').all(|part| part == "00")
        || text.split(':').all(|part| part.eq_ignore_ascii_case("ff"));
    text.split(':').count() == 6 && text.split(':').all(is_byte) && !is_same
}

/// Whether the address says who or where somebody is: a public one, or one made from a hardware address (RFC
/// 4291, appendix A).
fn is_identifying(address: IpAddr) -> bool {
    let is_for_documentation = match address.to_canonical() {
        IpAddr::V4(address) => address.is_documentation(),
        IpAddr::V6(address) => address.segments().starts_with(&[0x2001, 0xdb8]),
    };
    let is_from_mac = matches!(address, IpAddr::V6(address) if is_from_mac(address));
    is_from_mac || is_public(address) && !is_for_documentation
}

fn is_from_mac(address: Ipv6Addr) -> bool {
    let bytes = address.octets();
    bytes[11] == 0xff && bytes[12] == 0xfe && !address.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(text: &str) -> String {
        Redactor::default().redact(text)
    }

    #[test]
    fn public_addresses_get_numbers_and_private_ones_stay() {
        for (text, expected) in [
            ("from 9.9.9.9 to 10.0.0.2", "from [address 1] to 10.0.0.2"),
            ("9.9.9.9:443, 9.9.9.9/24, 8.8.8.8.", "[address 1]:443, [address 1]/24, [address 2]."),
            ("[2a00:1450::8a]:443 fd00::2/64 ::1", "[[address 1]]:443 fd00::2/64 ::1"),
            ("eth0:9.9.9.9: up", "eth0:[address 1]: up"),
            ("::ffff:9.9.9.9 64:ff9b::909:909 64:ff9b::a00:2", "[address 1] [address 2] 64:ff9b::a00:2"),
            ("2001:db8::1 ::ffff:192.0.2.1", "2001:db8::1 ::ffff:192.0.2.1"),
            ("fe80::5054:ff:fe12:3456 dev eth0", "[address 1] dev eth0"),
            (
                "link/ether 52:54:00:12:34:56 brd ff:ff:ff:ff:ff:ff",
                "link/ether [mac 1] brd ff:ff:ff:ff:ff:ff",
            ),
            (
                "at 14:02:03.120 of 2026-11-26, 0.1.0, 100.64.1.1",
                "at 14:02:03.120 of 2026-11-26, 0.1.0, 100.64.1.1",
            ),
            ("café: default via 192.0.2.1", "café: default via 192.0.2.1"),
        ] {
            assert_eq!(redacted(text), expected);
        }
    }

    #[test]
    fn tokens_pins_and_links_are_unreadable() {
        let pin = "90ab12cd".repeat(8);
        let token = "Zk3v_9-Qx".repeat(5);
        for secret in [&pin, &token] {
            for text in [
                format!("pin = \"{secret}\""),
                format!("--pin={secret} "),
                format!("mpvpn://{secret}@host/?pin={secret}"),
                format!("sha256:{secret}"),
            ] {
                let shown = redacted(&text);
                assert!(!shown.contains(&secret[..10]) && shown.contains("[key 1]"), "{shown}");
            }
        }
        let names = "mpvpn-client@a-rather-long-name.service /var/lib/mpvpn/leases";
        assert_eq!(redacted(names), names);
    }

    #[test]
    fn secrets_of_the_configuration_are_unreadable_however_short() {
        let mut redactor = Redactor::default();
        ["correct-horse", "ab"].iter().for_each(|secret| redactor.hide_secret(secret));
        assert_eq!(redactor.redact("token = 'ab', table"), "token = '[key 1]', table");
        assert_eq!(redactor.redact("Bearer correct-horse-1"), "Bearer [key 2]-1");
    }

    #[test]
    fn numbers_are_the_same_in_the_whole_report_and_the_server_has_no_name() {
        let mut redactor = Redactor::default();
        redactor.hide_name("vpn.example.org");
        redactor.hide_name("9.9.9.9");
        redactor.hide_name("tun");
        assert_eq!(redactor.redact("vpn.example.org is 9.9.9.9"), "[server] is [address 1]");
        assert_eq!(redactor.redact("tun0 to 8.8.8.8, 9.9.9.9"), "tun0 to [address 2], [address 1]");
    }
}
