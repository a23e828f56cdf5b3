//! Takes back what killed processes have left on this machine.

use std::path::Path;

use mpvpn_error::RunError;
use mpvpn_os::{
    UndoJournal, dns, helper, kill_switch, privilege,
    undo::{DEFAULT_FOLDER, Leftover},
};

/// The changes that were found.
#[derive(Debug, Default)]
pub struct ResetReport {
    /// Instances, by the names of their TUN devices, whose changes were taken back.
    pub reverted: Vec<String>,
    /// Instances whose kill switch was lifted.
    pub lifted: Vec<String>,
    /// Instances that run, which were left alone.
    pub running: Vec<String>,
    /// The changes that could not be taken back, a sentence each.
    pub errors: Vec<String>,
}

/// Takes back the changes of all instances in this network namespace whose processes have ended, and lifts
/// their kill switches. Where the records belong to another user, this process becomes that user, for ever: a
/// record may ask for no more than its writer could have done.
///
/// # Errors
/// If the records cannot be read.
pub fn run() -> Result<ResetReport, RunError> {
    let base = Path::new(DEFAULT_FOLDER);
    let mut report = ResetReport::default();
    if privilege::is_root_at_folder_of_other(base) {
        // The service writes the file for clients of the folder's owner.
        report.errors.extend(dns::restore_after_service().err().map(|error| error.to_string()));
        helper::start(&[], true)?;
        privilege::become_owner_of(base)?;
    }
    // Records that cannot be read stop nobody from taking back the other changes.
    let found = UndoJournal::reset_all(base).unwrap_or_else(|error| {
        report.errors.push(error.to_string());
        Vec::new()
    });
    for (name, leftover) in found {
        match leftover {
            Leftover::Running => report.running.push(name),
            Leftover::Reverted(errors) => {
                report.errors.extend(errors.iter().map(ToString::to_string));
                report.reverted.push(name);
            }
        }
    }
    // Last: until then nothing leaves past the tunnels.
    report.lifted = kill_switch::reset(base)?;
    Ok(report)
}
