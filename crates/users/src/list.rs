//! The users of a server with what they have used, for `mpvpn user list` and the dashboard.

use std::time::SystemTime;

use serde_json::{Value, json};

use crate::paths::users_file;
use crate::{
    quotas::UserQuotas,
    users::{UserEntry, Users},
};
use mpvpn_config::ServerConfig;
use mpvpn_input::Result;

/// The users of a server, and what they have used of their quotas.
#[derive(Debug)]
pub struct UserList {
    /// The users.
    pub users: Users,
    /// The used parts of their quotas.
    pub quotas: UserQuotas,
}

impl UserList {
    /// Reads the files of the server with this configuration.
    ///
    /// # Errors
    /// If a file cannot be read, or is damaged.
    pub fn load(config: &ServerConfig, now: SystemTime) -> Result<Self> {
        let users = Users::load(&users_file(config))?;
        let quotas = match users.iter().any(|entry| entry.quota.is_some()) {
            true => UserQuotas::read(&config.state_dir)?,
            false => UserQuotas::default(),
        };
        let used_up = quotas.used_up(now, &users);
        Ok(Self { users: users.with_used_up(used_up.into()), quotas })
    }

    /// The same list, with bytes of quotas that users have used as a running server has counted them.
    #[must_use]
    pub fn with_used(mut self, now: SystemTime, counted: impl IntoIterator<Item = (String, u64)>) -> Self {
        for (user, bytes) in counted {
            self.quotas.set_used(now, user, bytes);
        }
        let used_up = self.quotas.used_up(now, &self.users);
        Self { users: self.users.with_used_up(used_up.into()), quotas: self.quotas }
    }

    /// All users as JSON.
    pub fn json(&self, now: SystemTime) -> Value {
        self.users.iter().map(|entry| self.json_of(entry, now)).collect()
    }

    /// A user as JSON.
    pub fn json_of(&self, entry: &UserEntry, now: SystemTime) -> Value {
        json!({
            "user": entry.name,
            "state": self.users.state(entry, now),
            "expires": entry.expires.map(|expiry| expiry.to_string()),
            "address": entry.address,
            "route": entry.route,
            "sessions": entry.sessions,
            "up_cap_bps": entry.up.map(|rate| rate.bps()),
            "down_cap_bps": entry.down.map(|rate| rate.bps()),
            "quota_bytes": entry.quota.map(|quota| quota.bytes()),
            "quota_used_bytes": entry.quota.map(|_| self.quotas.used(now, &entry.name)),
        })
    }
}
