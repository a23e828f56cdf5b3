//! The limit of open files of the rigs' own programs, which have a socket for each of thousands of
//! connections.

use mpvpn_os::limits::raise_open_file_limit;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit of open files to `wanted`, or as far as allowed. Returns the new limit.
///
/// # Errors
///
/// If the kernel refuses to raise the soft limit to the hard limit.
pub fn allow_files(wanted: u64) -> Result<u64, String> {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < wanted) {
        // Raising the hard limit takes a privilege; without it the old hard limit stays.
        let _ = setrlimit(Resource::Nofile, Rlimit { maximum: Some(wanted), ..limit });
    }
    raise_open_file_limit().map_err(|error| format!("the number of open files cannot be raised: {error}"))
}
