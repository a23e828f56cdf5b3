//! The server or client that a service runs: its names everywhere on the machine.

use std::path::{Path, PathBuf};

use mpvpn_config::{CLIENT_FILE, SERVER_FILE};
use mpvpn_input::{Error, Result, dirs::STATE_DIR, role::Role};

/// Bytes of a name. Chosen: it is a part of the name of a file and of a unit.
const MAX_NAME_BYTES: usize = 32;

/// A server or client of this machine. One of each has no name; others have one, which their files and units
/// have too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    role: Role,
    name: Option<String>,
}

impl Instance {
    /// The instance with this name.
    ///
    /// # Errors
    /// If the name does not fit into the name of a file or unit.
    pub fn new(role: Role, name: Option<String>) -> Result<Self> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        match &name {
            Some(bad)
                if !(1..=MAX_NAME_BYTES).contains(&bad.len())
                    || bad.starts_with('-')
                    || !bad.chars().all(allowed) =>
            {
                Err(Error::usage(
                    format!("`{bad}` cannot be the name of a {role}"),
                    format!("take 1 to {MAX_NAME_BYTES} letters, digits, - and _"),
                ))
            }
            _ => Ok(Self { role, name }),
        }
    }

    /// The one without a name.
    pub fn unnamed(role: Role) -> Self {
        Self { role, name: None }
    }

    /// Whether it is a server or a client.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Its configuration file.
    pub fn file(&self) -> PathBuf {
        let file = match self.role {
            Role::Server => Path::new(SERVER_FILE),
            Role::Client => Path::new(CLIENT_FILE),
        };
        match &self.name {
            None => file.into(),
            Some(name) => file.with_file_name(format!("{}-{name}.toml", self.role)),
        }
    }

    /// Its systemd unit, without `.service`.
    pub fn unit(&self) -> String {
        match &self.name {
            None => format!("mpvpn-{}", self.role),
            Some(name) => format!("mpvpn-{}@{name}", self.role),
        }
    }

    /// The mark of its rules in firewalls, which also begins the names of its files.
    pub fn tag(&self) -> String {
        match &self.name {
            None => format!("mpvpn-{}", self.role),
            Some(name) => format!("mpvpn-{}-{name}", self.role),
        }
    }

    /// The file with what setup did for it.
    pub fn record_file(&self) -> PathBuf {
        Path::new(STATE_DIR).join(format!("setup-{}.json", self.tag()))
    }

    /// The instance whose record has this file name; `None` if it is no record's.
    pub fn of_record(file_name: &str) -> Option<Self> {
        let tag = file_name.strip_prefix("setup-mpvpn-")?.strip_suffix(".json")?;
        let (role, name) = match tag.split_once('-') {
            None => (tag, None),
            Some((role, name)) => (role, Some(name.to_owned())),
        };
        Self::new(role.parse().ok()?, name).ok()
    }

    /// The drop-in of its unit that adds its firewall rules at each start.
    pub fn drop_in(&self) -> PathBuf {
        PathBuf::from(format!("/etc/systemd/system/{}.service.d/mpvpn-firewall.conf", self.unit()))
    }

    /// The options of commands that mean it: ` --name NAME`, or nothing.
    pub fn name_option(&self) -> String {
        self.name.as_ref().map(|name| format!(" --name {name}")).unwrap_or_default()
    }

    /// The command that runs it in a terminal.
    pub fn command(&self) -> String {
        match &self.name {
            None => format!("mpvpn {}", self.role),
            Some(_) => format!("mpvpn {} --config {}", self.role, self.file().display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_instance_has_a_file_and_a_unit_of_its_own() {
        let work = Instance::new(Role::Client, Some("work".into())).unwrap();
        assert_eq!(work.file(), Path::new("/etc/mpvpn/client-work.toml"));
        assert_eq!((work.unit().as_str(), work.tag().as_str()), ("mpvpn-client@work", "mpvpn-client-work"));
        let server = Instance::unnamed(Role::Server);
        assert_eq!((server.unit().as_str(), server.command().as_str()), ("mpvpn-server", "mpvpn server"));
        for bad in ["", "a b", "../x", "a/b", "-x", "a\"b", &"x".repeat(33)] {
            assert!(Instance::new(Role::Server, Some(bad.into())).is_err(), "{bad}");
        }
    }

    #[test]
    fn records_are_told_from_other_files() {
        for instance in [
            Instance::unnamed(Role::Server),
            Instance::unnamed(Role::Client),
            Instance::new(Role::Client, Some("a-b".into())).unwrap(),
        ] {
            let file = instance.record_file();
            let name = file.file_name().unwrap().to_str().unwrap();
            assert_eq!(Instance::of_record(name), Some(instance));
        }
        for other in
            ["users.toml", "setup-mpvpn-proxy.json", "setup-mpvpn-server-../x.json", "setup-mpvpn-.json"]
        {
            assert_eq!(Instance::of_record(other), None, "{other}");
        }
    }
}
