//! How many files the rigs' own programs may have open: each connection of thousands is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process have so many files open, or as many as are allowed. Returns how many it may have.
///
/// # Errors
///
/// If the kernel refuses even that.
pub fn allow_files(wanted: u64) -> Result<u64, String> {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(wanted);
    let allow = |files| {
        let limit = Rlimit { current: Some(files), maximum: Some(most.max(files)) };
        setrlimit(Resource::Nofile, limit).map(|()| files)
    };
    let allowed = allow(wanted).or_else(|_| allow(most.min(wanted)));
    allowed.map_err(|error| format!("the number of open files cannot be raised: {error}"))
}
