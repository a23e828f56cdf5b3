//! The users of a server, by the same functions as `mpvpn user`.
//!
//! In: names and settings, as text. Out: JSON, or why nothing was done. Always holds: tokens are in one
//! answer and nowhere else.

use mpvpn_config::AuthMode;
use std::{collections::BTreeMap, str::FromStr, time::SystemTime};

use mpvpn_config::ServerConfig;
use mpvpn_identity::token::Token;
use mpvpn_input::Error;
use mpvpn_users::{
    ExpiryOption, Joining, LockedUsers, OrNone, SettingsChange, UserList, UserSettings, check_addresses,
    join::JoinLink, users_file,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The configuration of a server that has users.
#[derive(Clone, Debug)]
pub(crate) struct Config(ServerConfig);

impl Config {
    pub(crate) fn of(config: &ServerConfig) -> Option<Self> {
        (config.auth != AuthMode::None).then(|| Self(config.clone()))
    }
}

/// Why an action failed.
#[derive(Debug)]
pub(crate) struct ActionError {
    /// Cause and next step.
    pub(crate) why: String,
    /// Whether what was asked for is at fault.
    pub(crate) is_mistake: bool,
}

impl From<Error> for ActionError {
    fn from(error: Error) -> Self {
        let is_mistake = error.is_usage();
        let next = match &error {
            // A server may write into its state folder only.
            Error::File { .. } => "this server may not change that file: use `mpvpn user` as root".to_owned(),
            error => error.next_step(),
        };
        Self { why: format!("{error}: {next}"), is_mistake }
    }
}

/// Does what may wait for files, outside of the thread that serves all.
pub(crate) async fn blocking(
    work: impl FnOnce() -> Result<Value, ActionError> + Send + 'static,
) -> Result<Value, ActionError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ActionError { why: "the action was abandoned: try it again".to_owned(), is_mistake: false })
    })
}

/// All users. `connected`: the number of sessions of each.
pub(crate) fn list(config: &Config, connected: &BTreeMap<String, u32>) -> Result<Value, ActionError> {
    let now = SystemTime::now();
    let mut users = UserList::load(&config.0, now)?.json(now);
    for user in users.as_array_mut().into_iter().flatten() {
        let number = user["user"].as_str().and_then(|name| connected.get(name));
        user["connected"] = number.copied().unwrap_or(0).into();
    }
    Ok(users)
}

/// An action on a user.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum UserAction {
    Add,
    Set,
    Rotate,
    Revoke,
    Remove,
}

/// A user as a page describes it: an empty text or none is no setting.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GivenUser {
    name: String,
    up: Option<String>,
    down: Option<String>,
    quota: Option<String>,
    expires: Option<String>,
    sessions: Option<Value>,
    address: Option<Vec<String>>,
    /// How clients reach the server.
    host: Option<String>,
}

impl UserAction {
    /// Does it.
    pub(crate) fn perform(self, Config(config): &Config, given: GivenUser) -> Result<Value, ActionError> {
        let (file, name) = (users_file(config), given.name.clone());
        let joining = || Ok::<_, ActionError>(Joining::new(config, parsed("host", given.host.as_deref())?)?);
        match self {
            Self::Add => {
                let change = given.change()?;
                let settings = UserSettings {
                    expires: change.expires.flatten(),
                    address: change.address.unwrap_or_default(),
                    route: change.route.unwrap_or_default(),
                    sessions: change.sessions.flatten(),
                    up: change.up.flatten(),
                    down: change.down.flatten(),
                    quota: change.quota.flatten(),
                };
                check_addresses(config, &settings.address)?;
                let joining = joining()?;
                let token =
                    LockedUsers::open(&file)?.add_with_credential(&name, &settings, joining.credential)?;
                Ok(joined(&name, &joining, token))
            }
            Self::Set => {
                let change = given.change()?;
                check_addresses(config, change.address.as_deref().unwrap_or_default())?;
                LockedUsers::open(&file)?.set(&name, &change)?;
                Ok(json!({ "user": name }))
            }
            Self::Rotate => {
                let joining = joining()?;
                let token = LockedUsers::open(&file)?.renew(&name, joining.credential)?;
                Ok(joined(&name, &joining, token))
            }
            Self::Revoke => {
                LockedUsers::open(&file)?.revoke(&name)?;
                Ok(json!({ "user": name }))
            }
            Self::Remove => {
                LockedUsers::open(&file)?.remove(&name)?;
                Ok(json!({ "user": name }))
            }
        }
    }
}

/// How a user joins: by the link with a token, or with a certificate. Clients may not reach the server by an
/// address that was guessed.
fn joined(name: &str, joining: &Joining, token: Option<Token>) -> Value {
    if let Err(error) = joining.remember_pin_of(name) {
        tracing::warn!(%error, "nobody will be asked before another certificate locks the new user out");
    }
    let link = token.map(|token| joining.link(token));
    let command = link.as_ref().map_or_else(|| joining.certificate_command(), JoinLink::client_command);
    let link = link.map(|link| link.to_string());
    json!({ "user": name, "join_link": link, "command": command, "guessed_address": joining.is_guess })
}

impl GivenUser {
    fn change(&self) -> Result<SettingsChange, ActionError> {
        let now = SystemTime::now();
        let sessions = match &self.sessions {
            Some(Value::Number(number)) => Some(number.to_string()),
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Null) | None => None,
            Some(_) => return Err(mistake("sessions", "expected a number")),
        };
        let address = match self.address.as_deref() {
            None => None,
            Some(all) => {
                let all = all.iter().map(|text| text.parse().map_err(|error| mistake("address", &error)));
                Some(all.collect::<Result<_, _>>()?)
            }
        };
        Ok(SettingsChange {
            expires: setting::<ExpiryOption>("expires", self.expires.as_deref())?
                .map(|wanted| wanted.map(|option| option.resolve_ahead(now)).transpose())
                .transpose()
                .map_err(|error| mistake("expires", &error))?,
            address,
            sessions: setting::<std::num::NonZeroU32>("sessions", sessions.as_deref())?
                .map(|wanted| wanted.map(std::num::NonZeroU32::get)),
            up: setting("up", self.up.as_deref())?,
            down: setting("down", self.down.as_deref())?,
            quota: setting("quota", self.quota.as_deref())?,
            ..SettingsChange::default()
        })
    }
}

/// A setting, or the word `none`.
fn setting<T: FromStr<Err: std::fmt::Display>>(
    field: &str,
    text: Option<&str>,
) -> Result<Option<Option<T>>, ActionError> {
    Ok(parsed::<OrNone<T>>(field, text)?.map(|wanted| wanted.0))
}

fn parsed<T: FromStr<Err: std::fmt::Display>>(
    field: &str,
    text: Option<&str>,
) -> Result<Option<T>, ActionError> {
    let text = text.map(str::trim).filter(|text| !text.is_empty());
    text.map(|text| text.parse().map_err(|error| mistake(field, &error))).transpose()
}

fn mistake(field: &str, why: &(impl std::fmt::Display + ?Sized)) -> ActionError {
    ActionError { why: format!("{field}: {why}"), is_mistake: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::word;

    fn server() -> (tempfile::TempDir, Config) {
        let folder = tempfile::tempdir().unwrap();
        let public = Some("vpn.example:4433".parse().unwrap());
        let config = ServerConfig { state_dir: folder.path().into(), public, ..ServerConfig::default() };
        (folder, Config(config))
    }

    fn list(config: &Config) -> Result<Value, ActionError> {
        super::list(config, &[("alice".to_owned(), 2)].into())
    }

    fn perform(config: &Config, action: &str, given: Value) -> Result<Value, ActionError> {
        word::<UserAction>(action).unwrap().perform(config, serde_json::from_value(given).unwrap())
    }

    #[test]
    fn a_user_is_added_changed_rotated_revoked_and_removed() {
        let (_folder, config) = server();
        let given = json!({ "name": "alice", "up": "5mbit", "down": "", "quota": "50GB", "expires": "2030-01-31", "sessions": 2 });
        let added = perform(&config, "add", given).unwrap();
        assert!(added["join_link"].as_str().unwrap().starts_with("mpvpn://mpvpn_"), "{added}");
        assert!(added["command"].as_str().unwrap().starts_with("mpvpn client 'mpvpn://"), "{added}");
        assert_eq!(added["guessed_address"], false);
        let listed = list(&config).unwrap();
        assert_eq!(
            (
                &listed[0]["user"],
                &listed[0]["up_cap_bps"],
                &listed[0]["down_cap_bps"],
                &listed[0]["sessions"]
            ),
            (&json!("alice"), &json!(5_000_000), &json!(null), &json!(2))
        );
        assert_eq!((&listed[0]["expires"], &listed[0]["connected"]), (&json!("2030-01-31"), &json!(2)));
        assert!(!listed.to_string().contains("mpvpn_"), "no token is listed");
        perform(&config, "set", json!({ "name": "alice", "up": "none", "sessions": "none" })).unwrap();
        let listed = list(&config).unwrap();
        assert_eq!(
            (&listed[0]["up_cap_bps"], &listed[0]["quota_bytes"]),
            (&json!(null), &json!(50_000_000_000_u64))
        );
        perform(&config, "revoke", json!({ "name": "alice" })).unwrap();
        assert_eq!(list(&config).unwrap()[0]["state"], "revoked");
        let rotated = perform(&config, "rotate", json!({ "name": "alice" })).unwrap();
        assert_ne!(rotated["join_link"], added["join_link"]);
        assert_eq!(list(&config).unwrap()[0]["state"], "active");
        perform(&config, "remove", json!({ "name": "alice" })).unwrap();
        assert_eq!(list(&config).unwrap(), json!([]));
    }

    #[test]
    fn mistakes_name_the_field_and_change_nothing() {
        let (_folder, config) = server();
        for (given, said) in [
            (json!({ "name": "bob", "up": "fast" }), "up: "),
            (json!({ "name": "bob", "sessions": 0 }), "sessions: "),
            (json!({ "name": "bob", "sessions": [1] }), "sessions: "),
            (json!({ "name": "bob", "address": ["x"] }), "address: "),
            (json!({ "name": "bob", "expires": "soon" }), "expires: "),
            (json!({ "name": "bob", "host": "a b" }), "host: "),
            (json!({ "name": "" }), "cannot be the name"),
            (json!({ "name": "a b" }), "cannot be the name"),
        ] {
            let error = perform(&config, "add", given).unwrap_err();
            assert!(error.is_mistake && error.why.contains(said), "{error:?}");
        }
        for action in ["set", "rotate", "revoke", "remove"] {
            let error = perform(&config, action, json!({ "name": "nobody" })).unwrap_err();
            assert!(error.is_mistake && error.why.contains("there is no user `nobody`"), "{error:?}");
        }
        let unknown = json!({ "name": "bob", "colour": "red" });
        assert!(serde_json::from_value::<GivenUser>(unknown).is_err());
        assert_eq!(word::<UserAction>("become"), None);
        assert!(Config::of(&ServerConfig { auth: AuthMode::None, ..config.0 }).is_none());
    }
}
