//! The file with the session of a client, so that a client that is started again has its addresses again.
//!
//! In: the name of a client and its server. Out: a [`KeptSession`]. Always holds: each client and server has
//! a file of its own, of mode 0600; a file that cannot be understood is moved away, and the client begins a
//! new session.

use std::path::{Path, PathBuf};

use base64::{Engine, engine::general_purpose::STANDARD};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::file;
use mpvpn_input::{Result, values::ServerAddr};

/// Most addresses in a file: those of a session with all classes. More: what somebody wrote there takes
/// memory.
const MAX_ADDRESSES: usize = 64;
/// Bytes of a secret (docs/protocol.md).
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=64;
/// Longest host name in the name of a file (bytes); the file has the whole. Longer: names that file systems
/// refuse.
const MAX_HOST_BYTES: usize = 100;

/// A session at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSession {
    /// The secret of the session.
    pub secret: Vec<u8>,
    /// The addresses of the TUN device, with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// Further addresses, for classes with TUN devices of their own.
    pub additional: Vec<Vec<IpNet>>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct SessionFile {
    server: String,
    secret: String,
    addresses: Vec<IpNet>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    additional: Vec<Vec<IpNet>>,
}

impl KeptSession {
    /// The file of the client `name` and its server.
    pub fn file(state_dir: &Path, name: &str, server: &ServerAddr) -> PathBuf {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        let host: String = server.host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        let host = &host[..host.len().min(MAX_HOST_BYTES)];
        state_dir.join(format!("session-{name}-{host}-{}.json", server.port))
    }

    /// Reads the file `path` of a client of `server`; `None` if there is none, or it is about another server.
    /// A file that cannot be understood is renamed to `*.json.bad`.
    ///
    /// # Errors
    /// If the file is there and cannot be read or moved away.
    pub fn load(path: &Path, server: &ServerAddr) -> Result<Option<Self>> {
        let kept = file::load(path, parse, "this client may get other addresses")?;
        Ok(kept.filter(|(of, _)| *of == server.to_string()).map(|(_, session)| session))
    }

    /// Writes the file `path` of a client of `server`.
    ///
    /// # Errors
    /// If the file or its folder cannot be made.
    pub fn save(&self, path: &Path, server: &ServerAddr) -> Result<()> {
        let content = SessionFile {
            server: server.to_string(),
            secret: STANDARD.encode(&self.secret),
            addresses: self.addresses.clone(),
            additional: self.additional.clone(),
        };
        file::save(path, &content)
    }
}

/// The server and the session in the content of a file.
fn parse(bytes: &[u8]) -> Result<(String, KeptSession), String> {
    let file: SessionFile = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let secret = STANDARD.decode(&file.secret).map_err(|error| format!("its secret: {error}"))?;
    if !SECRET_BYTES.contains(&secret.len()) {
        return Err(format!("its secret has {} bytes", secret.len()));
    }
    let count = file.addresses.len() + file.additional.iter().map(|more| more.len().max(1)).sum::<usize>();
    if count > MAX_ADDRESSES {
        return Err(format!("it has {count} addresses"));
    }
    Ok((file.server, KeptSession { secret, addresses: file.addresses, additional: file.additional }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn session() -> KeptSession {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<_>>();
        KeptSession {
            secret: vec![7; 16],
            addresses: nets(&["10.0.0.2/24", "fd00::2/64"]),
            additional: vec![nets(&["10.0.0.9/32"])],
        }
    }

    #[test]
    fn a_session_is_kept_for_its_client_and_server_only() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("state");
        let [a, b]: [ServerAddr; 2] =
            ["vpn.example:4433", "[2001:db8::1]:443"].map(|text| text.parse().unwrap());
        let file = KeptSession::file(&dir, "mpvpn0", &a);
        assert_eq!(file, dir.join("session-mpvpn0-vpn.example-4433.json"));
        assert_eq!(KeptSession::file(&dir, "mpvpn0", &b), dir.join("session-mpvpn0-2001_db8__1-443.json"));
        assert_eq!(KeptSession::load(&file, &a).unwrap(), None);
        session().save(&file, &a).unwrap();
        assert_eq!(KeptSession::load(&file, &a).unwrap(), Some(session()));
        assert_eq!(KeptSession::load(&file, &b).unwrap(), None);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        let long = ServerAddr { host: "ü".repeat(300), port: 1 };
        assert!(KeptSession::file(&dir, "x", &long).file_name().unwrap().len() < 255);
    }

    #[test]
    fn a_broken_file_is_kept_beside_and_the_session_is_new() {
        let server: ServerAddr = "vpn.example:4433".parse().unwrap();
        let many = format!(
            r#"{{"server":"a","secret":"{}","addresses":[{}]}}"#,
            "A".repeat(24),
            vec![r#""10.0.0.1/8""#; 99].join(",")
        );
        for broken in [
            "",
            "{",
            r#"{"server":"a","secret":"?","addresses":[]}"#,
            r#"{"server":"a","secret":"AAAA","addresses":[]}"#,
            &many,
        ] {
            let home = tempfile::tempdir().unwrap();
            let file = home.path().join("session-a-b-1.json");
            std::fs::write(&file, broken).unwrap();
            assert_eq!(KeptSession::load(&file, &server).unwrap(), None, "{broken:?}");
            assert!(!file.exists());
            assert_eq!(std::fs::read_to_string(home.path().join("session-a-b-1.json.bad")).unwrap(), broken);
        }
    }
}
