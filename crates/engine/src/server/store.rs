//! Where a server keeps users, what they have used, and leases: files in its state folder. Everything that the server looks up, keeps or watches of them
//! goes through [`FileStore`], so that another store, as one that several servers share, can take its place.

use std::{io, path::PathBuf};

use mpvpn_control::{
    Error,
    config::ServerConfig,
    credentials::{leases_file, users_file},
    leases::{self, KeptLease},
    users::{UserQuotas, Users},
};
use mpvpn_os::file_watch::FileWatch;

/// The files.
#[derive(Clone, Debug)]
pub(super) struct FileStore {
    users: PathBuf,
    leases: PathBuf,
    quotas: PathBuf,
}

impl FileStore {
    /// The store of a server.
    pub(super) fn new(config: &ServerConfig) -> Self {
        // Servers that share a folder, and so users, have networks of their own.
        Self {
            users: users_file(config),
            leases: leases_file(config),
            quotas: UserQuotas::file(&config.state_dir, &config.name),
        }
    }

    /// The users.
    pub(super) fn users(&self) -> Result<Users, Error> {
        Users::load(&self.users)
    }

    /// Notices that the users may have changed.
    pub(super) fn watch_users(&self) -> io::Result<FileWatch> {
        FileWatch::new([self.users.clone()])
    }

    /// How much users have used of their quotas.
    pub(super) fn quotas(&self) -> Result<UserQuotas, Error> {
        UserQuotas::load(&self.quotas)
    }

    /// The leases that were kept.
    pub(super) fn leases(&self) -> Result<Vec<KeptLease>, Error> {
        leases::load(&self.leases)
    }

    /// Keeps these leases.
    pub(super) fn keep_leases(&self, leases: Vec<KeptLease>) -> Result<(), Error> {
        leases::save(&self.leases, leases)
    }
}
