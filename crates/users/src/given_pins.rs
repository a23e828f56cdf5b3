//! The pins in the join links that were given out: another certificate of the server locks these clients out.
//!
//! In: links as they are printed, and the certificate that a server shows or is about to show. Out: the users
//! whose clients know another one. Always holds: a user counts by the last link, as an earlier one is void
//! with its token; users that are gone do not count, so the file is as bounded as that of the users.

use std::{
    collections::BTreeMap,
    fmt,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{join::LinkTrust, paths::users_file, users::Users};
use mpvpn_config::ServerConfig;
use mpvpn_identity::identity::Fingerprint;
use mpvpn_input::{Error, Result, files};

/// Name of the file in the state folder.
pub(crate) const FILE: &str = "given-pins.json";

/// Why a certificate is not shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockout {
    users: usize,
    pin: Fingerprint,
}

impl Lockout {
    /// The warning of a server that starts with the certificate.
    pub fn at_start(&self) -> String {
        format!(
            "this start shows another certificate than before. It locks out {} another one: give their clients this pin, too (`pin` may \
             be given several times), or new links by `mpvpn user rotate NAME`: {}",
            self.users(),
            self.pin
        )
    }

    fn users(&self) -> String {
        match self.users {
            1 => "1 user, whose join link pins".to_owned(),
            users => format!("{users} users, whose join links pin"),
        }
    }
}

impl fmt::Display for Lockout {
    /// At most as long as the texts of events.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "it would lock out {} another one: give their clients this pin, too (`pin` may be given several times), then \
             run `mpvpn config reload --force`: {}",
            self.users(),
            self.pin
        )
    }
}

impl From<Lockout> for Error {
    fn from(lockout: Lockout) -> Self {
        let next = "give the clients the pin, then run `mpvpn config reload --force`; until then the certificate before stays";
        Self::usage(format!("another certificate is not shown: {lockout}"), next)
    }
}

/// The pins that clients were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenPins {
    by_user: BTreeMap<String, Fingerprint>,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PinsFile {
    pins: BTreeMap<String, String>,
}

impl GivenPins {
    /// Reads those of the server with this state folder. A file that cannot be understood is renamed to
    /// `*.json.bad`.
    ///
    /// # Errors
    /// If the file is there and cannot be read or moved away.
    pub fn load(state_dir: &Path) -> Result<Self> {
        let path = file(state_dir);
        let bytes = match files::read_secret(&path) {
            Ok(bytes) => bytes,
            Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        match parse(&bytes) {
            Ok(by_user) => Ok(Self { by_user }),
            Err(why) => {
                let bad = files::move_away(&path)?;
                tracing::warn!(
                    "{} cannot be understood ({why}), so nobody is warned when another certificate locks clients out; the file was \
                     renamed to {}",
                    path.display(),
                    bad.display()
                );
                Ok(Self::default())
            }
        }
    }

    /// Remembers how the clients of `user` know the server with this configuration from now on.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn remember(config: &ServerConfig, user: &str, trust: &LinkTrust) -> Result<()> {
        Self::change(config, |by_user| match trust {
            LinkTrust::Pins(pins) => by_user.extend(pins.first().map(|pin| (user.to_owned(), *pin))),
            LinkTrust::System => by_user.retain(|known, _| known != user),
        })
    }

    /// Forgets the links that pin another certificate than the one with this pin: somebody was warned of it.
    /// Their clients know this one by now, or trust a CA, whose next certificate needs no question.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn accept(config: &ServerConfig, pin: Fingerprint) -> Result<()> {
        Self::change(config, |by_user| by_user.retain(|_, known| *known == pin))
    }

    fn change(config: &ServerConfig, change: impl FnOnce(&mut BTreeMap<String, Fingerprint>)) -> Result<()> {
        let (state_dir, users) = (&config.state_dir, Users::load(&users_file(config))?);
        files::create_private_dir(state_dir)?;
        let _lock = files::lock_dir(state_dir)?;
        let before = Self::load(state_dir)?.by_user;
        let mut by_user = before.clone();
        by_user.retain(|user, _| users.get(user).is_some());
        change(&mut by_user);
        if by_user == before {
            return Ok(());
        }
        let path = file(state_dir);
        let pins = by_user.into_iter().map(|(user, pin)| (user, pin.to_string())).collect();
        files::write_secret(&path, &files::json(&path, &PinsFile { pins })?)
    }

    /// Whether the clients of this user were given a pin.
    pub fn has(&self, user: &str) -> bool {
        self.by_user.contains_key(user)
    }

    /// Whether the certificate with this pin locks out clients of some of these users.
    pub fn lockout(&self, pin: Fingerprint, users: &Users) -> Option<Lockout> {
        let unknown = |(user, known): &(&String, &Fingerprint)| **known != pin && users.get(user).is_some();
        let users = self.by_user.iter().filter(unknown).count();
        (users > 0).then_some(Lockout { users, pin })
    }
}

/// The file in a state folder.
fn file(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE)
}

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Fingerprint>, String> {
    let file: PinsFile = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let pin = |(user, pin): (String, String)| match pin.parse() {
        Ok(pin) => Ok((user, pin)),
        Err(_) => Err(format!("the pin of {user} is not the hash of a key (64 hex digits)")),
    };
    file.pins.into_iter().map(pin).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;
    use crate::file::{LockedUsers, UserSettings};
    use mpvpn_input::short_text::ShortText;

    const OLD: Fingerprint = Fingerprint([1; 32]);
    const NEW: Fingerprint = Fingerprint([2; 32]);

    struct Home(tempfile::TempDir);

    impl Home {
        fn new(names: &[&str]) -> Self {
            let home = Self(tempfile::tempdir().unwrap());
            for name in names {
                let mut users = LockedUsers::open(&home.0.path().join("users.toml")).unwrap();
                users.add(name, &UserSettings::default()).unwrap();
            }
            home
        }

        fn config(&self) -> ServerConfig {
            ServerConfig { state_dir: self.0.path().into(), ..ServerConfig::default() }
        }

        fn give(&self, user: &str, trust: LinkTrust) {
            GivenPins::remember(&self.config(), user, &trust).unwrap();
        }

        fn without(&self, pin: Fingerprint) -> usize {
            let users = Users::load(&users_file(&self.config())).unwrap();
            let lockout = GivenPins::load(self.0.path()).unwrap().lockout(pin, &users);
            lockout.map_or(0, |lockout| lockout.users)
        }
    }

    #[test]
    fn the_last_link_of_a_user_counts_while_there_is_such_a_user() {
        let home = Home::new(&["alice", "bob", "carol"]);
        assert_eq!((home.without(OLD), home.without(NEW)), (0, 0));
        for user in ["alice", "bob"] {
            home.give(user, LinkTrust::Pins(vec![OLD]));
        }
        home.give("carol", LinkTrust::System);
        assert_eq!((home.without(OLD), home.without(NEW)), (0, 2));
        home.give("alice", LinkTrust::Pins(vec![NEW]));
        assert_eq!((home.without(OLD), home.without(NEW)), (1, 1));
        LockedUsers::open(&home.0.path().join("users.toml")).unwrap().remove("bob").unwrap();
        assert_eq!((home.without(OLD), home.without(NEW)), (1, 0));
        home.give("alice", LinkTrust::System);
        assert_eq!((home.without(OLD), home.without(NEW)), (0, 0));
        let path = file(home.0.path());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_to_string(&path).unwrap(), r#"{"pins":{}}"#, "users that are gone are forgotten");
    }

    #[test]
    fn who_accepts_another_certificate_is_not_asked_again() {
        let home = Home::new(&["alice", "bob"]);
        home.give("alice", LinkTrust::Pins(vec![OLD]));
        GivenPins::accept(&home.config(), NEW).unwrap();
        assert_eq!((home.without(NEW), home.without(OLD)), (0, 0));
        home.give("bob", LinkTrust::Pins(vec![NEW]));
        assert_eq!((home.without(NEW), home.without(OLD)), (0, 1));
    }

    #[test]
    fn the_reason_is_short_enough_for_an_event() {
        let text = Lockout { users: 10_000, pin: NEW }.to_string();
        assert_eq!(ShortText::of(&text).as_str(), text);
    }

    #[test]
    fn a_broken_file_is_moved_away_and_counts_as_none() {
        let home = Home::new(&["alice"]);
        for broken in ["", "{", r#"{"pins":{"alice":"ab"}}"#, r#"{"pins":{},"more":1}"#] {
            fs::write(file(home.0.path()), broken).unwrap();
            assert_eq!(home.without(NEW), 0, "{broken}");
            assert!(!file(home.0.path()).exists());
        }
    }
}
