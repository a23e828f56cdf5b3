//! The users' file with the changes of `mpvpn user`, and join links.

use std::{fs, path::Path, sync::LazyLock, time::SystemTime};

use mpvpn_config::{AuthMode, ClientConfig, ClientOptions, ServerConfig};
use mpvpn_identity::token::Token;
use mpvpn_input::Error;
use mpvpn_users::{
    LockedUsers, SettingsChange, UserCredential, UserSettings, Users, auth::Authenticator, check_addresses,
    credentials::Credentials, join::JoinLink, render_user, render_users,
};
use tempfile::TempDir;

use crate::input::Input;

/// A folder for files, in memory where the machine has such a place.
pub(crate) fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// `number of changes, changes, text of the file`.
pub fn users(data: &[u8]) {
    let home = folder();
    let mut input = Input(data);
    let path = home.path().join("users.toml");
    let count = input.below(8);
    let mut changes = Input(input.take(4 * count));
    fs::write(&path, input.0).expect("a file");
    let parsed = Users::parse(input.0, &path);
    let Ok(mut file) = LockedUsers::open(&path).inspect_err(says_what_to_do) else {
        // The same text is no other text.
        return assert!(parsed.is_err() || str::from_utf8(input.0).is_err());
    };
    assert_eq!(parsed.ok().as_ref(), Some(file.users()));
    look_at(file.users());
    let now = SystemTime::UNIX_EPOCH;
    for _ in 0..count {
        let before = file.users().clone();
        let known: Vec<&str> = before.iter().map(|entry| entry.name.as_str()).collect();
        let names = [&["alice", "bob", ""], known.as_slice()].concat();
        let name = names[changes.below(names.len())];
        let settings = settings(&mut changes);
        let (token, changed) = match changes.byte() % 6 {
            0 => split(file.add(name, &settings).map(Some)),
            1 => split(file.renew(name, UserCredential::Certificate)),
            2 => split(file.renew(name, UserCredential::Token)),
            3 => (None, file.set(name, &SettingsChange::from(&settings))),
            4 => (None, file.revoke(name)),
            _ => (None, file.remove(name)),
        };
        match changed {
            Ok(()) => {
                assert_eq!(Users::load(&path).expect("what was written is read"), *file.users());
                // All others stay as they were.
                for entry in before.iter().filter(|entry| entry.name != name) {
                    assert_eq!(file.users().get(&entry.name), Some(entry));
                }
            }
            Err(error) => {
                says_what_to_do(&error);
                assert_eq!(*file.users(), before, "a refused change changes nothing");
                // The text in memory has it nevertheless; a command ends here.
                return;
            }
        }
        if let Some(token) = token {
            let shown = authenticator(file.users()).check(Some(&format!("Bearer {}", token.reveal())));
            let has_access = file.users().get(name).is_some_and(|entry| {
                !entry.revoked && entry.expires.is_none_or(|expiry| expiry.at() > SystemTime::now())
            });
            assert_eq!(shown.is_ok(), has_access, "{shown:?}");
        }
        for name in file.users().ended_since(&before, now).keys() {
            assert!(before.get(name).is_some());
        }
    }
}

fn split(added: mpvpn_input::Result<Option<Token>>) -> (Option<Token>, mpvpn_input::Result<()>) {
    match added {
        Ok(token) => (token, Ok(())),
        Err(error) => (None, Err(error)),
    }
}

fn settings(input: &mut Input<'_>) -> UserSettings {
    let (flags, number) = (input.byte(), input.byte());
    let some = |bit: u8| flags & 1 << bit != 0;
    UserSettings {
        expires: some(0).then(|| mpvpn_users::Expiry::in_days(SystemTime::now(), number.into())),
        address: (0..if some(1) { number % 18 } else { 0 })
            .map(|last| {
                [format!("10.0.0.{last}"), format!("2001:db8:{last}::/48")][usize::from(last % 2)].clone()
            })
            .map(|text| text.parse().expect("an address"))
            .collect(),
        route: some(5)
            .then(|| ipnet::IpNet::new_assert([192, 168, number, 0].into(), 24))
            .into_iter()
            .collect(),
        sessions: some(2).then(|| number.into()),
        up: some(3).then(|| mpvpn_types::BitRate::from_bps(u64::from(number) << 16)),
        down: some(4).then(|| mpvpn_types::BitRate::from_bps(u64::from(number) << 32)),
        quota: None,
    }
}

/// An authenticator of these users.
fn authenticator(users: &Users) -> Authenticator {
    static TOKENS: LazyLock<Authenticator> = LazyLock::new(|| {
        let home = folder();
        let config =
            ServerConfig { auth: AuthMode::Token, state_dir: home.path().into(), ..ServerConfig::default() };
        Credentials::load(&config).expect("credentials in a new folder").authenticator
    });
    TOKENS.users().expect("users with tokens").replace(users.clone());
    TOKENS.clone()
}

/// Everything that shows users.
fn look_at(users: &Users) {
    // A schedule that has an end ends.
    let mut moment = SystemTime::UNIX_EPOCH;
    for _ in 0..=users.iter().count() {
        let Some(next) = users.next_expiry(moment) else { break };
        assert!(next > moment);
        moment = next;
    }
    assert_eq!(users.next_expiry(moment), None);
    let quotas = Default::default();
    let text = render_users(users, &quotas, moment, 80);
    for entry in users.iter() {
        assert_eq!(users.get(&entry.name), Some(entry));
        let one = render_user(users, entry, &quotas, moment, 80);
        assert!(text.lines().count() > 1 && one.lines().count() >= 2, "{text}{one}");
        let _ = check_addresses(&ServerConfig::default(), &entry.address).inspect_err(says_what_to_do);
    }
    assert!(users.ended_since(users, SystemTime::UNIX_EPOCH).keys().all(|name| users.get(name).is_some()));
}

/// Errors for people say what failed and what to do next.
pub(crate) fn says_what_to_do(error: &Error) {
    assert!(!error.to_string().is_empty() && !error.next_step().is_empty());
    if let Error::ConfigFile { line, column, .. } = error {
        assert!(*line >= 1 && *column >= 1);
    }
}

/// `name of the file, link, text of the client's file`: a link is read, and a client's file joins by it.
pub fn join_link(data: &[u8]) {
    let mut input = Input(data);
    let path = Path::new(["client.toml", "client-home.toml", "client-.toml"][input.below(3)]);
    let (text, before) = (input.long(), input.0);
    let Ok(text) = str::from_utf8(text) else { return };
    let link = match text.parse::<JoinLink>() {
        Ok(link) => link,
        Err(error) => {
            // Errors do not tell the token, which is long and has no spaces, as their own words have.
            let token = text.trim().strip_prefix("mpvpn://").and_then(|rest| rest.split('@').next());
            let is_none = |token: &&str| token.len() < 16 || token.contains(' ');
            if let Some(token) = token.filter(|token| !is_none(token)) {
                assert!(!error.to_string().contains(token), "{error}");
            }
            return assert!(!error.to_string().is_empty());
        }
    };
    let printed = link.to_string();
    assert_eq!(printed.parse(), Ok(link.clone()), "{printed}");
    assert!(link.client_command().contains(&printed));
    let before = str::from_utf8(before).ok().filter(|before| !before.is_empty());
    let Ok(file) = link.file_text(path, before).inspect_err(says_what_to_do) else { return };
    assert_eq!(link.file_text(path, Some(&file)).as_ref().ok(), Some(&file), "joined twice");
    // A new file is one that a client takes, and has what the link says.
    if before.is_some() {
        let _ = ClientOptions::parse(&file).inspect_err(says_what_to_do);
        return;
    }
    let config = ClientConfig::parse(&file, path).unwrap_or_else(|error| panic!("{error}\n{file}"));
    assert_eq!((config.server, config.token), (link.server, Some(link.token)));
}
