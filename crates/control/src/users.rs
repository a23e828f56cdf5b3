//! The users of a server: the file `users.toml`.
//!
//! In: the file, and changes of `mpvpn user`. Out: the [`Users`], and the file with a change. Always holds: the file has only
//! the SHA-256 of a token; a change is made under a lock, is atomic, and leaves comments, owner and mode of the file as they are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::SystemTime,
};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use ipnet::IpNet;
use schemars::JsonSchema;
use serde::Deserialize;
use time::{
    Date, OffsetDateTime, Time, UtcOffset, format_description::well_known::Rfc3339,
    macros::format_description,
};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, value};

use crate::{
    Error, Result,
    auth::{Denied, Token, User},
    config::{
        ServerConfig,
        limits::sessions,
        rules::UserName,
        schema,
        values::{Text, many, one},
    },
    files,
    identity::Fingerprint,
    status::{self, UserState, fit, section},
};

/// Users in a file. Chosen. More: a file that takes long to read and to write.
pub(crate) const MAX_USERS: usize = 10_000;
/// Fixed addresses of a user. Chosen. More: one user takes the addresses of others.
const MAX_ADDRESSES: usize = 16;
/// Bytes of a user's name. Chosen. More: lines of tables and logs that nobody can read.
const MAX_NAME_BYTES: usize = 64;
/// The beginning of a file that `mpvpn user` makes.
const HEAD: &str = "\
# Users of the mpvpn server on this machine. `mpvpn user` changes this file while the server runs; you may edit it, too.
# Keys of a user: `mpvpn user add --help`, and docs/reference/users.md.

";
/// What the file has.
const EXPECTED: &str = "users, each with a name and the SHA-256 of a token";
/// The key of the users in the file.
const KEY: &str = "user";

/// When the access of a user ends: a moment in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Expiry(OffsetDateTime);

impl Expiry {
    /// The end of the day that is `days` days after `now`.
    #[must_use]
    pub fn in_days(now: SystemTime, days: u16) -> Self {
        let day = OffsetDateTime::from(now).to_offset(UtcOffset::UTC).date();
        Self::end_of(day.saturating_add(time::Duration::days(days.into())))
    }

    fn end_of(day: Date) -> Self {
        let next = day.next_day().unwrap_or(Date::MAX);
        Self(next.with_time(Time::MIDNIGHT).assume_utc())
    }

    /// The moment.
    pub fn at(self) -> SystemTime {
        self.0.into()
    }
}

impl fmt::Display for Expiry {
    /// The last day of the access, or the moment if it does not end at midnight.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last_day = self.0.date().previous_day().filter(|_| self.0.time() == Time::MIDNIGHT);
        let text = match last_day {
            Some(day) => day.format(format_description!("[year]-[month]-[day]")),
            None => self.0.format(&Rfc3339),
        };
        f.write_str(&text.map_err(|_| fmt::Error)?)
    }
}

impl Text for Expiry {
    const EXPECTED: &'static str = "the last day, or a moment in UTC, in quotes";
    const EXAMPLE: &'static str = "2027-01-31";

    fn read(text: &str) -> std::result::Result<Self, String> {
        let day = Date::parse(text, format_description!("[year]-[month]-[day]")).map(Self::end_of);
        let moment = || OffsetDateTime::parse(text, &Rfc3339).map(|at| Self(at.to_offset(UtcOffset::UTC)));
        day.or_else(|_| moment()).map_err(|_| {
            format!("`{text}` is not a date: expected the last day, as in 2027-01-31, or a moment, as in 2027-01-31T18:00:00Z")
        })
    }
}

/// A date of `--expires`: a number of days from now, or as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryOption {
    /// Days from now.
    In(u16),
    /// A date.
    At(Expiry),
}

impl ExpiryOption {
    /// The date.
    pub fn resolve(self, now: SystemTime) -> Expiry {
        match self {
            Self::In(days) => Expiry::in_days(now, days),
            Self::At(expiry) => expiry,
        }
    }
}

impl FromStr for ExpiryOption {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let days = text.strip_suffix('d').and_then(|days| days.parse().ok());
        match days {
            Some(days) => Ok(Self::In(days)),
            None => Expiry::read(text).map(Self::At).map_err(|_| {
                format!("`{text}` is neither a number of days, as in 90d, nor the last day, as in 2027-01-31")
            }),
        }
    }
}

/// A user in the file.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "user")]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table with the head [[user]]")]
pub struct UserEntry {
    /// Name of the user, as in status and in `users` of `[[access]]` and `[[limit]]`
    #[schemars(schema_with = "schema::one::<UserName>")]
    pub name: String,
    /// SHA-256 of the token, as in `printf %s "$TOKEN" | sha256sum`. The token itself is stored nowhere
    #[serde(deserialize_with = "hash")]
    #[schemars(schema_with = "schema::one::<Fingerprint>")]
    pub token_sha256: Fingerprint,
    /// The user has no access any more: sessions end at once, and the token is refused [default: false]
    #[serde(default)]
    pub revoked: bool,
    /// The last day of the user's access in UTC, or the moment at which it ends, as in 2027-01-31T18:00:00Z [default: none]
    #[serde(default, deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Expiry>")]
    pub expires: Option<Expiry>,
    /// Addresses in the tunnel that this user has and nobody else; the first session that is free gets them [default: none]
    #[serde(default, deserialize_with = "addresses")]
    #[schemars(schema_with = "schema::many::<FixedAddress>")]
    pub address: Vec<IpAddr>,
    /// Number of sessions (connected clients) at once; `max-sessions` of a table `[[limit]]` counts, too, the smaller of both
    /// [default: 64]
    #[serde(default, deserialize_with = "sessions")]
    #[schemars(schema_with = "schema::one_or_number::<crate::config::limits::SessionCount>")]
    pub sessions: Option<u32>,
}

/// The file of the users of a server, `users.toml`, at most 10,000 of them.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UserTables {
    /// Users: the tables `[[user]]`
    #[serde(default)]
    user: Vec<UserEntry>,
}

/// An address of a user.
pub(crate) struct FixedAddress(IpAddr);

impl Text for FixedAddress {
    const EXPECTED: &'static str = "an address in quotes";
    const EXAMPLE: &'static str = "10.0.0.7";

    fn read(text: &str) -> std::result::Result<Self, String> {
        text.parse().map(Self).map_err(|_| format!("`{text}` is not an address, as in 10.0.0.7 or fd00::7"))
    }
}

fn addresses<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Vec<IpAddr>, D::Error> {
    Ok(many::<D, FixedAddress>(from)?.into_iter().map(|address| address.0).collect())
}

fn hash<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Fingerprint, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(serde::de::Error::custom)
}

impl UserEntry {
    /// Whether the user has access at `now`.
    pub fn state(&self, now: SystemTime) -> UserState {
        match self.refusal(now) {
            None => UserState::Active,
            Some(Denied::Expired(_)) => UserState::Expired,
            Some(_) => UserState::Revoked,
        }
    }

    /// Why the user has no access at `now`.
    fn refusal(&self, now: SystemTime) -> Option<Denied> {
        match self.expires {
            _ if self.revoked => Some(Denied::Revoked),
            Some(expiry) if expiry.at() <= now => Some(Denied::Expired(expiry)),
            _ => None,
        }
    }
}

/// The users of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// In the order of the file.
    all: Vec<UserEntry>,
    /// The place of a hash in `all`. With it a guess costs the same whether there is one user or 10,000.
    by_hash: BTreeMap<[u8; 32], usize>,
    /// The place of a name in `all`.
    by_name: BTreeMap<String, usize>,
}

impl Users {
    /// Reads a users' file.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(&files::read_secret(path)?, path)
    }

    /// Parses the content of the users' file `path`.
    pub fn parse(content: &[u8], path: &Path) -> Result<Self> {
        let bad = |found: String| Error::Content { path: path.into(), expected: EXPECTED, found };
        let text = str::from_utf8(content).map_err(|_| bad("bytes that are no UTF-8".into()))?;
        let file: UserTables = toml::from_str(text).map_err(|error| bad(error.to_string()))?;
        Self::new(file.user).map_err(bad)
    }

    /// These users, if they do not contradict each other.
    fn new(all: Vec<UserEntry>) -> std::result::Result<Self, String> {
        if all.len() > MAX_USERS {
            return Err(format!("{} users, at most {MAX_USERS} work", all.len()));
        }
        let (mut by_hash, mut by_name) = (BTreeMap::new(), BTreeMap::new());
        let mut owners: BTreeMap<IpAddr, &str> = BTreeMap::new();
        for (place, entry) in all.iter().enumerate() {
            if by_name.insert(entry.name.clone(), place).is_some() {
                return Err(format!("user `{}` twice", entry.name));
            }
            if let Some(other) = by_hash.insert(entry.token_sha256.0, place) {
                let other: &UserEntry = &all[other];
                return Err(format!("users `{}` and `{}` with the same token", other.name, entry.name));
            }
            if entry.address.len() > MAX_ADDRESSES {
                return Err(format!(
                    "user `{}` with {} addresses, at most {MAX_ADDRESSES} work",
                    entry.name,
                    entry.address.len()
                ));
            }
            for address in &entry.address {
                if let Some(other) = owners.insert(*address, &entry.name) {
                    return Err(format!("the address {address} twice, of `{other}` and `{}`", entry.name));
                }
            }
        }
        Ok(Self { all, by_hash, by_name })
    }

    /// All users, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &UserEntry> {
        self.all.iter()
    }

    /// The user with this name.
    pub fn get(&self, name: &str) -> Option<&UserEntry> {
        self.all.get(*self.by_name.get(name)?)
    }

    /// The fixed addresses of all users.
    pub fn fixed_addresses(&self) -> impl Iterator<Item = (IpAddr, String)> {
        self.all.iter().flat_map(|entry| entry.address.iter().map(|address| (*address, entry.name.clone())))
    }

    /// Whether there are no users, so that every request is refused.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The user with this token.
    pub(crate) fn user_with(&self, token: &Token, now: SystemTime) -> std::result::Result<User, Denied> {
        let hash = token.hash();
        let entry = self.by_hash.get(&hash).and_then(|place| self.all.get(*place)).ok_or(Denied::Unknown)?;
        verify_slices_are_equal(&entry.token_sha256.0, &hash).map_err(|_| Denied::Unknown)?;
        entry.refusal(now).map_or_else(|| Ok(User { name: entry.name.clone() }), Err)
    }

    /// The next moment after `now` at which the access of a user ends.
    pub fn next_expiry(&self, now: SystemTime) -> Option<SystemTime> {
        let moments = self.all.iter().filter(|entry| !entry.revoked).filter_map(|entry| entry.expires);
        moments.map(Expiry::at).filter(|at| *at > now).min()
    }

    /// The users of `before` whose sessions have to end because of what `self` says, with the reason.
    pub fn ended_since(&self, before: &Self, now: SystemTime) -> BTreeMap<String, String> {
        let ended = before.all.iter().filter_map(|old| {
            let reason = match self.get(&old.name) {
                None => "the user was removed".to_owned(),
                Some(new) => match new.refusal(now) {
                    Some(denied) => denied.to_string(),
                    None if new.token_sha256 != old.token_sha256 => "the user has a new token".to_owned(),
                    None => return None,
                },
            };
            Some((old.name.clone(), reason))
        });
        ended.collect()
    }
}

/// What `mpvpn user add` says about a user, beside the name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserSettings {
    /// When the access ends.
    pub expires: Option<Expiry>,
    /// Fixed addresses.
    pub address: Vec<IpAddr>,
    /// Sessions at once.
    pub sessions: Option<u32>,
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
        check_name(name)?;
        if self.users.get(name).is_some() {
            return Err(Error::usage(
                format!("there is a user `{name}` already"),
                format!("give this user a new token with `mpvpn user rotate {name}`, or take another name"),
            ));
        }
        let token = Token::generate()?;
        let mut table = Table::new();
        table["name"] = value(name);
        table["token-sha256"] = value(Fingerprint(token.hash()).to_string());
        if let Some(expires) = settings.expires {
            table["expires"] = value(expires.to_string());
        }
        if !settings.address.is_empty() {
            table["address"] =
                value(settings.address.iter().map(ToString::to_string).collect::<toml_edit::Array>());
        }
        if let Some(sessions) = settings.sessions {
            table["sessions"] = value(i64::from(sessions));
        }
        self.tables().push(table);
        keep(&token)?;
        self.save()?;
        Ok(token)
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

/// Whether a server with this configuration can give these addresses to a user.
///
/// # Errors
/// If one is not in the tunnel's networks, or is the server's own.
pub fn check_addresses(config: &ServerConfig, addresses: &[IpAddr]) -> Result<()> {
    let networks = [Some(IpNet::V4(config.subnet)), config.subnet6.map(IpNet::V6)];
    let networks: Vec<IpNet> = networks.into_iter().flatten().collect();
    for address in addresses {
        let network = networks.iter().find(|network| network.contains(address));
        let wrong = match network {
            None => "is not in the networks of the tunnel".to_owned(),
            Some(network) if network.hosts().next() == Some(*address) => "is the server's own".to_owned(),
            Some(network) if [network.network(), network.broadcast()].contains(address) => {
                "is no address of a host".to_owned()
            }
            Some(_) => continue,
        };
        let names: Vec<_> = networks.iter().map(ToString::to_string).collect();
        return Err(Error::usage(
            format!("--address {address} {wrong}"),
            format!("take another address of {}", names.join(" or ")),
        ));
    }
    Ok(())
}

fn addresses_of(entry: &UserEntry) -> String {
    entry.address.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Renders the users as a table.
pub fn render_users(users: &Users, now: SystemTime, width: usize) -> String {
    if users.is_empty() {
        return "no users; `mpvpn user add NAME` adds one\n".to_owned();
    }
    let mut table = status::Table::new(&["user", "state", "expires", "sessions", "address"]);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
    table.rows.extend(users.iter().map(|entry| {
        vec![
            entry.name.clone(),
            entry.state(now).to_string(),
            or_none(entry.expires.map(|expiry| expiry.to_string())),
            or_none(entry.sessions.map(|sessions| sessions.to_string())),
            or_none(Some(addresses_of(entry)).filter(|text| !text.is_empty())),
        ]
    }));
    let mut text = String::new();
    section(&mut text, table);
    fit(text.trim_start_matches('\n'), width)
}

/// Renders a user, a setting a line.
pub fn render_user(entry: &UserEntry, now: SystemTime, width: usize) -> String {
    let mut text = format!("user      {}\nstate     {}\n", entry.name, entry.state(now));
    if let Some(expiry) = entry.expires {
        text += &format!("expires   {expiry}\n");
    }
    if !entry.address.is_empty() {
        text += &format!("address   {}\n", addresses_of(entry));
    }
    if let Some(sessions) = entry.sessions {
        text += &format!("sessions  {sessions} at once\n");
    }
    fit(&text, width)
}

/// Names appear in command lines, tables and log lines.
fn check_name(name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.@+".contains(c);
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(allowed) && !name.starts_with('-') {
        true => Ok(()),
        false => Err(Error::usage(
            format!("`{name}` cannot be the name of a user"),
            format!("take 1 to {MAX_NAME_BYTES} letters, digits and - _ . @ +"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, time::Duration};

    use super::*;

    fn at(text: &str) -> SystemTime {
        OffsetDateTime::parse(text, &Rfc3339).unwrap().into()
    }

    struct Home {
        folder: tempfile::TempDir,
    }

    impl Home {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap() }
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("users.toml")
        }

        fn open(&self) -> LockedUsers {
            LockedUsers::open(&self.path()).unwrap()
        }

        fn text(&self) -> String {
            fs::read_to_string(self.path()).unwrap()
        }
    }

    #[test]
    fn a_user_is_added_rotated_revoked_and_removed_and_the_file_never_has_a_token() {
        let (home, now) = (Home::new(), SystemTime::now());
        let alice = home.open().add("alice", &UserSettings::default()).unwrap();
        let bob = home.open().add("bob", &UserSettings::default()).unwrap();
        assert_eq!(fs::metadata(home.path()).unwrap().permissions().mode() & 0o777, 0o600);
        let check =
            |token: &Token| Users::load(&home.path()).unwrap().user_with(token, now).map(|user| user.name);
        assert_eq!((check(&alice), check(&bob)), (Ok("alice".into()), Ok("bob".into())));

        let new = home.open().rotate("alice").unwrap();
        assert_eq!((check(&alice), check(&new)), (Err(Denied::Unknown), Ok("alice".into())));
        home.open().revoke("bob").unwrap();
        assert_eq!(check(&bob), Err(Denied::Revoked));
        let again = home.open().rotate("bob").unwrap();
        assert_eq!((check(&bob), check(&again)), (Err(Denied::Unknown), Ok("bob".into())));
        home.open().remove("bob").unwrap();
        assert_eq!(check(&again), Err(Denied::Unknown));
        assert!([alice, bob, new, again].iter().all(|token| !home.text().contains(&token.reveal()[6..])));
    }

    #[test]
    fn what_people_wrote_into_the_file_stays() {
        let home = Home::new();
        let hash = "ab".repeat(32);
        let text = format!(
            "# ours\n\n[[user]] # the boss\nname = 'eve'\ntoken-sha256 = '{hash}'\nexpires = '2030-01-31'\n"
        );
        fs::write(home.path(), &text).unwrap();
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o640)).unwrap();
        home.open().add("alice", &UserSettings::default()).unwrap();
        assert!(home.text().starts_with(&text), "{}", home.text());
        assert_eq!(fs::metadata(home.path()).unwrap().permissions().mode() & 0o777, 0o640);
        home.open().remove("alice").unwrap();
        assert_eq!(home.text(), text);
        // The short form means the same.
        fs::write(home.path(), format!("user = [{{ name = 'eve', token-sha256 = '{hash}' }}]\n")).unwrap();
        home.open().revoke("eve").unwrap();
        assert!(home.open().users().get("eve").unwrap().revoked);
    }

    #[test]
    fn settings_are_written_and_read_again() {
        let home = Home::new();
        let settings = UserSettings {
            expires: Some(Expiry::read("2027-01-31").unwrap()),
            address: vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()],
            sessions: Some(3),
        };
        home.open().add("alice", &settings).unwrap();
        let locked = home.open();
        let entry = locked.users().get("alice").unwrap();
        let read =
            UserSettings { expires: entry.expires, address: entry.address.clone(), sessions: entry.sessions };
        assert_eq!(read, settings);
        drop(locked);
        let error = home.open().add("bob", &settings).unwrap_err().to_string();
        assert!(error.contains("the address 10.0.0.7 twice, of `alice` and `bob`"), "{error}");
        assert!(home.open().users().get("bob").is_none());
    }

    #[test]
    fn access_ends_after_the_last_day_and_the_user_is_told() {
        let home = Home::new();
        let expires = Some(Expiry::read("2027-01-31").unwrap());
        let token = home.open().add("alice", &UserSettings { expires, ..UserSettings::default() }).unwrap();
        let users = Users::load(&home.path()).unwrap();
        let (before, end) = (at("2027-01-31T23:59:59Z"), at("2027-02-01T00:00:00Z"));
        assert!(users.user_with(&token, before).is_ok());
        let denied = users.user_with(&token, end).unwrap_err();
        assert_eq!(denied.to_string(), "the access of this user ended on 2027-01-31");
        assert_eq!((users.next_expiry(before), users.next_expiry(end)), (Some(end), None));
        assert_eq!(users.ended_since(&users, before), BTreeMap::new());
        assert_eq!(users.ended_since(&users, end).len(), 1);
        let moment = Expiry::read("2027-01-31T18:00:00+02:00").unwrap();
        assert_eq!(
            (moment.at(), moment.to_string()),
            (at("2027-01-31T16:00:00Z"), "2027-01-31T16:00:00Z".into())
        );
    }

    #[test]
    fn days_count_to_the_end_of_the_last_one() {
        let now = at("2026-11-26T15:00:00Z");
        let option = |text: &str| text.parse::<ExpiryOption>().map(|option| option.resolve(now).to_string());
        assert_eq!(option("90d"), Ok("2027-02-24".into()));
        assert_eq!(option("0d"), Ok("2026-11-26".into()));
        assert_eq!(option("2027-01-31"), Ok("2027-01-31".into()));
        assert!(option("soon").unwrap_err().contains("neither a number of days, as in 90d"));
        assert!(option("2027-02-30").is_err() && option("99999d").is_err());
    }

    #[test]
    fn sessions_end_for_who_was_removed_revoked_or_has_a_new_token_and_for_nobody_else() {
        let home = Home::new();
        for name in ["alice", "bob", "carol", "dave"] {
            home.open().add(name, &UserSettings::default()).unwrap();
        }
        let (before, now) = (Users::load(&home.path()).unwrap(), SystemTime::now());
        home.open().remove("alice").unwrap();
        home.open().revoke("bob").unwrap();
        home.open().rotate("carol").unwrap();
        home.open().add("erin", &UserSettings::default()).unwrap();
        let ended = Users::load(&home.path()).unwrap().ended_since(&before, now);
        let reasons: Vec<_> = ended.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect();
        assert_eq!(
            reasons,
            [
                ("alice", "the user was removed"),
                ("bob", "the access of this user was revoked"),
                ("carol", "the user has a new token")
            ]
        );
    }

    #[test]
    fn the_table_tells_who_has_access() {
        let hash = |n: u8| format!("{n:02x}").repeat(32);
        let text = format!(
            "[[user]]\nname=\"alice\"\ntoken-sha256=\"{}\"\nsessions=2\naddress=\"10.0.0.7\"\n\
             [[user]]\nname=\"bob\"\ntoken-sha256=\"{}\"\nrevoked=true\n\
             [[user]]\nname=\"carol\"\ntoken-sha256=\"{}\"\nexpires=\"2020-01-31\"\n",
            hash(1),
            hash(2),
            hash(3)
        );
        let users = Users::parse(text.as_bytes(), "users.toml".as_ref()).unwrap();
        assert_eq!(
            render_users(&users, SystemTime::now(), 80),
            "user   state    expires     sessions  address\n\
             alice  active   –           2         10.0.0.7\n\
             bob    revoked  –           –         –\n\
             carol  expired  2020-01-31  –         –\n"
        );
        assert!(render_users(&Users::default(), SystemTime::now(), 80).contains("mpvpn user add"));
    }

    #[test]
    fn mistakes_name_what_is_wrong_and_change_nothing() {
        let home = Home::new();
        home.open().add("alice", &UserSettings::default()).unwrap();
        let text = home.text();
        let mut locked = home.open();
        for (error, said, next) in [
            (
                locked.add("alice", &UserSettings::default()).unwrap_err(),
                "there is a user `alice`",
                "rotate alice",
            ),
            (locked.add("a b", &UserSettings::default()).unwrap_err(), "`a b` cannot be", "letters"),
            (locked.add("", &UserSettings::default()).unwrap_err(), "`` cannot be", "letters"),
            (locked.revoke("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
            (locked.rotate("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
            (locked.remove("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
        ] {
            let (text, advice) = (error.to_string(), error.next_step());
            assert!(text.contains(said) && advice.contains(next), "{text} / {advice}");
        }
        assert_eq!(home.text(), text);
    }

    #[test]
    fn two_that_add_at_once_both_succeed() {
        let home = Home::new();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let path = home.path();
                scope.spawn(move || {
                    for number in 0..5 {
                        let mut users = LockedUsers::open(&path).unwrap();
                        users.add(&format!("user-{thread}-{number}"), &UserSettings::default()).unwrap();
                    }
                });
            }
        });
        assert_eq!(home.open().users().iter().count(), 40);
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let home = Home::new();
        let hash = "00".repeat(32);
        let twice = format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\n").repeat(2);
        let same_token =
            format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\n[[user]]\nname='b'\ntoken-sha256='{hash}'");
        let expires = format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\nexpires='soon'");
        for (content, said) in [
            ("user = 3", "expected"),
            ("[[user]]\nname='a'\ntoken-sha256='12'", "`12` is not a SHA-256"),
            ("[[user]]\nname='a'\npassword='12'", "unknown field `password`"),
            (&twice, "user `a` twice"),
            (&same_token, "users `a` and `b` with the same token"),
            (&expires, "`soon` is not a date"),
        ] {
            fs::write(home.path(), content).unwrap();
            for error in
                [Users::load(&home.path()).unwrap_err(), LockedUsers::open(&home.path()).unwrap_err()]
            {
                let error = error.to_string();
                assert!(error.contains(said) && error.contains("users.toml"), "{error}");
            }
            assert_eq!(home.text(), content);
        }
    }

    #[test]
    fn a_guess_costs_little_among_ten_thousand_users() {
        let entry = |number: usize| UserEntry {
            name: format!("user-{number}"),
            token_sha256: Fingerprint([number as u8; 32].map(|byte| byte ^ (number >> 8) as u8)),
            revoked: false,
            expires: None,
            address: Vec::new(),
            sessions: None,
        };
        let mut all: Vec<_> = (0..MAX_USERS - 1).map(entry).collect();
        // Different users have different tokens.
        for (number, entry) in all.iter_mut().enumerate() {
            entry.token_sha256.0[..8].copy_from_slice(&(number as u64).to_be_bytes());
        }
        let token = Token::generate().unwrap();
        all.push(UserEntry { name: "alice".into(), token_sha256: Fingerprint(token.hash()), ..entry(1) });
        let (users, now) = (Users::new(all).unwrap(), SystemTime::now());
        let guesses: Vec<Token> =
            (0..20_000).map(|number| format!("guess{number}").parse().unwrap()).collect();
        let start = std::time::Instant::now();
        assert!(guesses.iter().all(|guess| users.user_with(guess, now) == Err(Denied::Unknown)));
        // 20 microseconds each; comparing with all took some 50 times as long.
        assert!(start.elapsed() < Duration::from_millis(400), "{:?}", start.elapsed());
        assert_eq!(users.user_with(&token, now).unwrap().name, "alice");
    }
}
