//! Whether the traffic of this machine is blocked while a client does not run.
//!
//! In: a client's file, and which services are enabled. Out: what the file says about the kill switch, and
//! the files of the clients that start by themselves. Always holds: a file that is broken elsewhere, or in
//! its syntax, says about the kill switch what its lines say, so that a mistake opens nothing.

use std::{
    fs,
    path::{Path, PathBuf},
};

use toml::Table;

use crate::defaults::{CLIENT_FILE, TUN_NAME};
use mpvpn_input::{Result, files};

/// Where systemd keeps the links to the units that are enabled.
const UNITS: &str = "/etc/systemd/system";

/// The kill switch in a client's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockWish {
    /// Whether it has one.
    pub kill_switch: bool,
    /// The name of the client's TUN device, by which its block is known.
    pub tun_name: String,
}

impl BlockWish {
    /// Reads the files of the clients whose services start with this machine. A client without a file cannot
    /// start.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn of_enabled_clients() -> Result<Vec<Self>> {
        let files = files_of_enabled_clients().into_iter().filter(|file| file.exists());
        files.map(|file| Ok(Self::of_text(&files::read_text(&file)?))).collect()
    }

    /// The wish of a client's file with this text.
    pub fn of_text(text: &str) -> Self {
        let (kill_switch, tun_name) = match text.parse::<Table>() {
            Ok(table) => (
                table.get("kill-switch").is_some_and(|value| value.as_bool() != Some(false)),
                table.get("tun-name").and_then(|name| name.as_str()).map(str::to_owned),
            ),
            Err(_) => {
                let bare = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
                let values = |key: &'static str| {
                    let lines = text.lines().filter_map(|line| line.split_once('='));
                    lines.filter(move |(name, _)| bare(name) == key).map(|(_, value)| value)
                };
                let kill_switch = values("kill-switch").any(|value| !value.trim().starts_with("false"));
                (kill_switch, values("tun-name").next().map(bare))
            }
        };
        Self { kill_switch, tun_name: tun_name.unwrap_or_else(|| TUN_NAME.to_owned()) }
    }
}

/// The files of the clients whose services start with this machine.
fn files_of_enabled_clients() -> Vec<PathBuf> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let is_of_targets = |folder: &PathBuf| {
        folder.extension().is_some_and(|extension| extension == "wants" || extension == "requires")
    };
    let folders = entries(Path::new(UNITS)).map(|entry| entry.path()).filter(is_of_targets);
    let units = folders.flat_map(|folder| entries(&folder).collect::<Vec<_>>());
    let mut files: Vec<PathBuf> = units.filter_map(|unit| file_of_unit(unit.file_name().to_str()?)).collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// The file of a client's unit; `None` for other units.
fn file_of_unit(unit: &str) -> Option<PathBuf> {
    let unit = unit.strip_suffix(".service")?;
    let file = PathBuf::from(CLIENT_FILE);
    if unit == "mpvpn-client" {
        return Some(file);
    }
    let name = unit.strip_prefix("mpvpn-client@").filter(|name| !name.is_empty() && !name.contains('/'))?;
    Some(file.with_file_name(format!("client-{name}.toml")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_says_whether_it_blocks_also_if_it_is_broken() {
        for (text, kill_switch, tun_name) in [
            ("server = 'a'\n", false, "mpvpn0"),
            ("kill-switch = true\ntun-name = 'work0'\n", true, "work0"),
            ("kill-switch = false\n", false, "mpvpn0"),
            ("# kill-switch = true\n", false, "mpvpn0"),
            ("no-such-key = 1\nkill-switch = true\n", true, "mpvpn0"),
            ("kill-switch = \"on\"\n", true, "mpvpn0"),
            ("server = \nkill-switch = true\ntun-name = \"work0\"\n", true, "work0"),
            ("server = \n kill-switch=false\n", false, "mpvpn0"),
            ("server = \n", false, "mpvpn0"),
            ("server = \n'kill-switch' = true\n\"tun-name\" = 'work0'\n", true, "work0"),
            ("kill-switch = false\nkill-switch = true\n", true, "mpvpn0"),
        ] {
            let wish = BlockWish { kill_switch, tun_name: tun_name.to_owned() };
            assert_eq!(BlockWish::of_text(text), wish, "{text:?}");
        }
    }

    #[test]
    fn a_unit_of_a_client_has_a_file() {
        let file = |unit: &str| file_of_unit(unit).map(|path| path.to_str().unwrap().to_owned());
        assert_eq!(file("mpvpn-client.service").as_deref(), Some("/etc/mpvpn/client.toml"));
        assert_eq!(file("mpvpn-client@work.service").as_deref(), Some("/etc/mpvpn/client-work.toml"));
        for other in ["mpvpn-server.service", "mpvpn-client@.service", "mpvpn-client.socket", "ssh.service"] {
            assert_eq!(file(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(?s).{0,200}") {
            let _ = BlockWish::of_text(&text);
        }
    }
}
