//! Keeps the session of a client in a file, so that the client has its addresses again after it was started
//! again.
//!
//! In: the file of an earlier process; sessions and addresses as the server assigns them. Out: the session to
//! resume, and the file. Always holds: the file is written when it would differ, which is once for each new
//! session; a file that cannot be written is said once and is no reason to end.

use std::path::{Path, PathBuf};

use mpvpn_config::ClientConfig;
use mpvpn_input::{Error, values::ServerAddr};
use mpvpn_state::kept_session::KeptSession;
use mpvpn_tunnel::{Assignment, Client};

/// The file of a session, and what it has.
#[derive(Debug)]
pub(super) struct SessionKeeper {
    /// `None`: sessions are not kept.
    file: Option<PathBuf>,
    server: ServerAddr,
    kept: Option<KeptSession>,
    has_failed: bool,
}

impl SessionKeeper {
    /// Reads the file of a client. Without `state_dir` nothing is kept.
    ///
    /// # Errors
    /// If the file is there and cannot be read.
    pub(super) fn load(config: &ClientConfig, state_dir: Option<&Path>) -> Result<Self, Error> {
        let server = config.server.clone();
        let file = state_dir.map(|dir| KeptSession::file(dir, &config.name, &server));
        let kept = file.as_deref().map_or(Ok(None), |file| KeptSession::load(file, &server))?;
        Ok(Self { file, server, kept, has_failed: false })
    }

    /// Has the client resume the session of the file.
    pub(super) fn resume(&self, client: &mut Client) {
        let Some(KeptSession { secret, addresses, additional }) = self.kept.clone() else { return };
        tracing::debug!(?addresses, "resuming the session of the last run");
        let wanted = Assignment { addresses, additional, ..Assignment::default() };
        client.resume(secret, wanted);
    }

    /// Keeps the session that the client has now.
    pub(super) fn keep(&mut self, secret: Option<&[u8]>, assignment: &Assignment) {
        let (Some(file), Some(secret)) = (&self.file, secret) else { return };
        let Assignment { addresses, additional, .. } = assignment.clone();
        let session = KeptSession { secret: secret.to_vec(), addresses, additional };
        if self.kept.as_ref() == Some(&session) && !self.has_failed {
            return;
        }
        let saved = session.save(file, &self.server);
        self.kept = Some(session);
        if let Err(error) = &saved
            && !self.has_failed
        {
            tracing::warn!(
                %error,
                "cannot keep the session: after a restart this client may get other addresses; make room there, or choose another \
                 folder with --state-dir"
            );
        }
        self.has_failed = saved.is_err();
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_identity::trust::Trust;

    use super::*;

    #[test]
    fn a_session_is_written_once_and_read_by_the_next_process() {
        let home = tempfile::tempdir().unwrap();
        let config = ClientConfig::new("192.0.2.1:443".parse().unwrap(), Trust::Insecure);
        let mut keeper = SessionKeeper::load(&config, Some(home.path())).unwrap();
        let file = keeper.file.clone().unwrap();
        let of =
            |address: &str| Assignment { addresses: vec![address.parse().unwrap()], ..Assignment::default() };
        keeper.keep(None, &of("10.0.0.2/24"));
        assert!(!file.exists(), "the server keeps no sessions");
        keeper.keep(Some(&[1; 16]), &of("10.0.0.2/24"));
        std::fs::remove_file(&file).unwrap();
        keeper.keep(Some(&[1; 16]), &of("10.0.0.2/24"));
        assert!(!file.exists(), "nothing is new");
        keeper.keep(Some(&[1; 16]), &of("10.0.0.3/24"));
        let next = SessionKeeper::load(&config, Some(home.path())).unwrap();
        assert_eq!(next.kept, keeper.kept);
        assert_eq!(next.kept.unwrap().addresses, ["10.0.0.3/24".parse().unwrap()]);
    }

    #[test]
    fn a_full_disk_is_no_reason_to_end() {
        let home = tempfile::tempdir().unwrap();
        let config = ClientConfig::new("192.0.2.1:443".parse().unwrap(), Trust::Insecure);
        // No folder can be made below a file.
        let blocked = home.path().join("blocked");
        let mut keeper = SessionKeeper::load(&config, Some(&blocked.join("state"))).unwrap();
        std::fs::write(&blocked, "").unwrap();
        let assignment = Assignment::default();
        keeper.keep(Some(&[1; 16]), &assignment);
        assert!(keeper.has_failed);
        std::fs::remove_file(&blocked).unwrap();
        keeper.keep(Some(&[1; 16]), &assignment);
        assert!(!keeper.has_failed && keeper.file.unwrap().exists(), "it is tried again");
    }
}
