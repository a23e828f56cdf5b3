//! Changes of the users' file, as `mpvpn user` makes them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use mpvpn_types::{BitRate, ByteSize};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, value};

use crate::{
    expiry::Expiry,
    users::{EXPECTED, UserAddress, Users},
};
use mpvpn_config::AuthMode;
use mpvpn_identity::{identity::Fingerprint, token::Token};
use mpvpn_input::{Error, Result, files};

/// Bytes of a user's name. Chosen. More: lines of tables and logs that nobody can read.
const MAX_NAME_BYTES: usize = 128;
/// The beginning of a file that `mpvpn user` makes.
const HEAD: &str = "\
# Users of the mpvpn server on this machine. `mpvpn user` changes this file while the server runs; you may edit it, too.
# Keys of a user: `mpvpn user add --help`, and docs/reference/users.md.

";
/// The key of the users in the file.
const KEY: &str = "user";

/// The kind of credential by which a server knows a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserCredential {
    /// A token, whose hash is in the file.
    Token,
    /// A certificate that names the user.
    Certificate,
}

impl From<AuthMode> for UserCredential {
    fn from(auth: AuthMode) -> Self {
        match auth {
            AuthMode::None | AuthMode::Token => Self::Token,
            AuthMode::Mtls => Self::Certificate,
        }
    }
}

/// The settings of a user in `mpvpn user add`, beside the name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserSettings {
    /// When the access ends.
    pub expires: Option<Expiry>,
    /// Fixed addresses and networks.
    pub address: Vec<UserAddress>,
    /// Networks that the user's clients may announce.
    pub route: Vec<IpNet>,
    /// Sessions at once.
    pub sessions: Option<u32>,
    /// Limit of the rate at which the user's clients send.
    pub up: Option<BitRate>,
    /// Limit of the rate at which they receive.
    pub down: Option<BitRate>,
    /// Bytes in a calendar month, both directions together.
    pub quota: Option<ByteSize>,
}

/// The changes that `mpvpn user set` makes to a user; a setting that is `None` stays, and `Some(None)`
/// removes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingsChange {
    /// When the access ends.
    pub expires: Option<Option<Expiry>>,
    /// Fixed addresses and networks.
    pub address: Option<Vec<UserAddress>>,
    /// Networks that the user's clients may announce.
    pub route: Option<Vec<IpNet>>,
    /// Sessions at once.
    pub sessions: Option<Option<u32>>,
    /// Limit of the rate at which the user's clients send.
    pub up: Option<Option<BitRate>>,
    /// Limit of the rate at which they receive.
    pub down: Option<Option<BitRate>>,
    /// Bytes in a calendar month, both directions together.
    pub quota: Option<Option<ByteSize>>,
}

impl From<&UserSettings> for SettingsChange {
    fn from(settings: &UserSettings) -> Self {
        let UserSettings { expires, address, route, sessions, up, down, quota } = settings.clone();
        Self {
            expires: Some(expires),
            address: Some(address),
            route: Some(route),
            sessions: Some(sessions),
            up: Some(up),
            down: Some(down),
            quota: Some(quota),
        }
    }
}

impl SettingsChange {
    /// Changes the table of a user.
    fn apply(&self, table: &mut Table) {
        let text = |key: &str, wanted: Option<Option<String>>, table: &mut Table| match wanted {
            Some(Some(text)) => table[key] = value(text),
            Some(None) => drop(table.remove(key)),
            None => {}
        };
        text("expires", self.expires.map(|expires| expires.map(|expires| expires.to_string())), table);
        let list = |key: &str, wanted: Option<Vec<String>>, table: &mut Table| match wanted {
            Some(all) if all.is_empty() => drop(table.remove(key)),
            Some(all) => table[key] = value(all.into_iter().collect::<toml_edit::Array>()),
            None => {}
        };
        list("address", self.address.as_deref().map(texts), table);
        list("route", self.route.as_deref().map(texts), table);
        match self.sessions {
            Some(Some(sessions)) => table["sessions"] = value(i64::from(sessions)),
            Some(None) => drop(table.remove("sessions")),
            None => {}
        }
        text("up", self.up.map(|rate| rate.map(|rate| rate.to_string())), table);
        text("down", self.down.map(|rate| rate.map(|rate| rate.to_string())), table);
        text("quota", self.quota.map(|size| size.map(|size| size.to_string().replace(' ', ""))), table);
    }
}

fn texts<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}

/// The users' file, locked for changes until dropped.
#[derive(Debug)]
pub struct LockedUsers {
    path: PathBuf,
    document: DocumentMut,
    users: Users,
    _lock: fs::File,
}

impl LockedUsers {
    /// Waits until no other process changes the file, and reads it; a missing file has no users.
    ///
    /// # Errors
    /// If the file cannot be read, or is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        files::create_private_dir(folder)?;
        let lock = files::lock_dir(folder)?;
        let document = files::read_toml(path, HEAD, EXPECTED)?;
        let users = Users::parse(document.to_string().as_bytes(), path)?;
        Ok(Self { path: path.into(), document, users, _lock: lock })
    }

    /// The users of the file.
    pub fn users(&self) -> &Users {
        &self.users
    }

    /// Adds a user with a new token.
    ///
    /// # Errors
    /// If there is such a user, the name or an address does not fit, or the file cannot be written.
    pub fn add(&mut self, name: &str, settings: &UserSettings) -> Result<Token> {
        self.add_with(name, settings, |_| Ok(()))
    }

    /// As [`Self::add`]; `keep` gets the token before the file has its hash.
    pub(crate) fn add_with(
        &mut self,
        name: &str,
        settings: &UserSettings,
        keep: impl FnOnce(&Token) -> Result<()>,
    ) -> Result<Token> {
        let token = Token::generate()?;
        self.insert(name, settings, Some(&token))?;
        keep(&token)?;
        self.save()?;
        Ok(token)
    }

    /// Adds a user; returns the new token, if the user is known by one.
    ///
    /// # Errors
    /// As those of [`Self::add`].
    pub fn add_with_credential(
        &mut self,
        name: &str,
        settings: &UserSettings,
        credential: UserCredential,
    ) -> Result<Option<Token>> {
        match credential {
            UserCredential::Token => self.add(name, settings).map(Some),
            UserCredential::Certificate => {
                self.insert(name, settings, None)?;
                self.save()?;
                Ok(None)
            }
        }
    }

    fn insert(&mut self, name: &str, settings: &UserSettings, token: Option<&Token>) -> Result<()> {
        check_name(name)?;
        if self.users.get(name).is_some() {
            let next = match token {
                Some(_) => format!(
                    "give this user a new token with `mpvpn user rotate {name}`, or take another name"
                ),
                None => {
                    format!("`mpvpn user show {name}` shows this user; take another name for another one")
                }
            };
            return Err(Error::usage(format!("there is a user `{name}` already"), next));
        }
        let mut table = Table::new();
        table["name"] = value(name);
        if let Some(token) = token {
            table["token-sha256"] = value(Fingerprint(token.hash()).to_string());
        }
        SettingsChange::from(settings).apply(&mut table);
        self.tables().push(table);
        Ok(())
    }

    /// Writes the file even if it has no users.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn create(&mut self) -> Result<()> {
        self.save()
    }

    /// Gives a user a new token; the old one is refused from now on, also if the user was revoked.
    ///
    /// # Errors
    /// If there is no such user, or the file cannot be written.
    pub fn rotate(&mut self, name: &str) -> Result<Token> {
        let token = Token::generate()?;
        let table = self.table(name)?;
        table["token-sha256"] = value(Fingerprint(token.hash()).to_string());
        table.remove("revoked");
        self.save()?;
        Ok(token)
    }

    /// Gives a user a new token, as [`Self::rotate`], or one that is known by a certificate the access back.
    ///
    /// # Errors
    /// If there is no such user, a user with a certificate was not revoked, or the file cannot be written.
    pub fn renew(&mut self, name: &str, credential: UserCredential) -> Result<Option<Token>> {
        match credential {
            UserCredential::Token => self.rotate(name).map(Some),
            UserCredential::Certificate => self.restore(name).map(|()| None),
        }
    }

    fn restore(&mut self, name: &str) -> Result<()> {
        if self.table(name)?.remove("revoked").is_none() {
            return Err(Error::usage(
                format!("{name} was not revoked, and has no token: clients of this server show certificates"),
                "a new certificate comes from the CA of `client-ca`; the old one belongs into its revocation list (`crl`)",
            ));
        }
        self.save()
    }

    /// Changes settings of a user.
    ///
    /// # Errors
    /// If there is no such user, an address belongs to another one, or the file cannot be written.
    pub fn set(&mut self, name: &str, change: &SettingsChange) -> Result<()> {
        change.apply(self.table(name)?);
        self.save()
    }

    /// Takes the access of a user away, and keeps the entry.
    ///
    /// # Errors
    /// If there is no such user, or the file cannot be written.
    pub fn revoke(&mut self, name: &str) -> Result<()> {
        self.table(name)?["revoked"] = value(true);
        self.save()
    }

    /// Removes a user.
    ///
    /// # Errors
    /// If there is no such user, or the file cannot be written.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        self.table(name)?;
        self.tables().retain(|table| name_of(table) != Some(name));
        self.save()
    }

    fn tables(&mut self) -> &mut ArrayOfTables {
        let item = self.document.entry(KEY).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        // `user = [{ name = "a", … }]` means the same.
        if !item.is_array_of_tables() {
            let tables = std::mem::take(item).into_array_of_tables().unwrap_or_default();
            *item = Item::ArrayOfTables(tables);
        }
        item.as_array_of_tables_mut().expect("it was made one")
    }

    fn table(&mut self, name: &str) -> Result<&mut Table> {
        let known: BTreeSet<String> = self.users.iter().map(|entry| entry.name.clone()).collect();
        self.tables()
            .iter_mut()
            .find(|table| name_of(table) == Some(name))
            .ok_or_else(|| unknown(name, &known))
    }

    /// Writes the file, if the users do not contradict each other.
    fn save(&mut self) -> Result<()> {
        let text = self.document.to_string();
        let users = Users::parse(text.as_bytes(), &self.path)?;
        files::write_secret(&self.path, text.as_bytes())?;
        self.users = users;
        Ok(())
    }
}

fn name_of(table: &Table) -> Option<&str> {
    table.get("name")?.as_str()
}

fn unknown(name: &str, known: &BTreeSet<String>) -> Error {
    let next = match known.len() {
        0 => "add one with `mpvpn user add NAME`".to_owned(),
        1..=10 => format!("users are: {}", known.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
        _ => "`mpvpn user list` lists the users".to_owned(),
    };
    Error::usage(format!("there is no user `{name}`"), next)
}

/// The error for the name of a user that is not in the file.
pub fn unknown_user(users: &Users, name: &str) -> Error {
    unknown(name, &users.iter().map(|entry| entry.name.clone()).collect())
}

/// Names appear in command lines, tables and log lines.
fn check_name(name: &str) -> Result<()> {
    // Colons and slashes are in URIs, by which certificates name users.
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.@+:/".contains(c);
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(allowed) && !name.starts_with('-') {
        true => Ok(()),
        false => Err(Error::usage(
            format!("`{name}` cannot be the name of a user"),
            format!("take 1 to {MAX_NAME_BYTES} letters, digits and - _ . @ + : /"),
        )),
    }
}
