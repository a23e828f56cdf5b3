//! Makes secrets and public addresses unreadable.
//!
//! In: text of any kind. Out: the text with `[address 1]`, `[key 1]`, `[mac 1]` and `[server]` in their
//! places. Always holds: the same address or key has the same number in the whole report, so that a reader
//! still sees what belongs together.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
};

use mpvpn_packet::public::is_public;

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
    secrets: Vec<String>,
}

impl Redactor {
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
        if !self.secrets.iter().any(|known| known == secret) {
            self.secrets.push(secret.to_owned());
        }
    }

    /// The text without secrets and public addresses.
    pub(super) fn redact(&mut self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in self.secrets.clone() {
            text = self.without(&text, &secret);
        }
        for name in &self.names {
            text = text.replace(name.as_str(), "[server]");
        }
        let text = replace_runs(&text, is_of_key, |run| self.key(run));
        replace_runs(&text, is_of_address, |run| self.addresses(run))
    }

    fn without(&mut self, text: &str, secret: &str) -> String {
        let is_short = secret.chars().count() < MIN_NAME_LEN;
        let mut done = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(secret) {
            let (before, after) = (&rest[..at], &rest[at + secret.len()..]);
            done.push_str(before);
            let is_word = !before.ends_with(is_of_key) && !after.starts_with(is_of_key);
            match is_short && !is_word {
                true => done.push_str(secret),
                false => done.push_str(&self.numbered("key", secret)),
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
        format!("[{what} {number}]")
    }
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
