//! How many files the rigs' own programs may have open: each connection of thousands is one.

use mpvpn_os::limits::raise_open_file_limit;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process have at least so many files open, or as many as are allowed. Returns how many it may have.
///
/// # Errors
///
/// If the kernel refuses even that.
pub fn allow_files(wanted: u64) -> Result<u64, String> {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < wanted) {
        // Who may not raise the highest limit has to do with it.
        let _ = setrlimit(Resource::Nofile, Rlimit { maximum: Some(wanted), ..limit });
    }
    raise_open_file_limit().map_err(|error| format!("the number of open files cannot be raised: {error}"))
}
