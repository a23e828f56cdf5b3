//! Where a server keeps users, what they have used, and leases: files in its state folder. Everything that
//! the server looks up, keeps or watches of them goes through [`FileStore`], so that another store, as one
//! that several servers share, can take its place.

use std::path::PathBuf;

use mpvpn_config::ServerConfig;
use mpvpn_identity::client_ca::Revocations;
use mpvpn_input::Error;
use mpvpn_state::leases::{self, KeptLease};
use mpvpn_users::{UserQuotas, Users, credentials::leases_file, users_file};

/// The files.
#[derive(Clone, Debug)]
pub(super) struct FileStore {
    users: PathBuf,
    /// The list of revoked certificates of clients.
    crl: Option<PathBuf>,
    leases: PathBuf,
    quotas: PathBuf,
}

impl FileStore {
    /// The store of a server.
    pub(super) fn new(config: &ServerConfig) -> Self {
        // Servers that share a folder, and so users, have networks of their own.
        Self {
            users: users_file(config),
            crl: config.crl.clone(),
            leases: leases_file(config),
            quotas: UserQuotas::file(&config.state_dir, &config.name),
        }
    }

    /// The users.
    pub(super) fn users(&self) -> Result<Users, Error> {
        Users::load(&self.users)
    }

    /// The certificates of clients that are revoked, if there is a list.
    pub(super) fn revocations(&self) -> Result<Option<Revocations>, Error> {
        self.crl.as_deref().map(Revocations::load).transpose()
    }

    /// Reads this list of revoked certificates from now on.
    pub(super) fn set_crl(&mut self, crl: Option<PathBuf>) {
        self.crl = crl;
    }

    /// The files that say who has access.
    pub(super) fn files_about_users(&self) -> impl Iterator<Item = PathBuf> {
        self.crl.iter().chain([&self.users]).cloned()
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
