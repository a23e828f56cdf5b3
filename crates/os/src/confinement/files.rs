//! Files that this process may use, by Landlock (landlock(7)).

use std::{
    io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, Scope,
};

use super::Needs;

/// The version of Landlock whose rights this program knows: 6, of Linux 6.12, the first with signals and
/// abstract UNIX sockets. An older kernel restricts what it can.
const ABI_VERSION: ABI = ABI::V6;
/// Libraries, settings and state of the system, which the C library reads as well: names, time zones,
/// processors.
const SYSTEM: [&str; 9] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/run"];
/// Devices without state, and the one that makes TUN devices.
const DEVICES: [&str; 4] = ["/dev/null", "/dev/urandom", "/dev/random", "/dev/net/tun"];

/// Files that every process may read. The program itself is among them, for the names in a backtrace.
static READABLE: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
    let own = std::env::current_exe().ok();
    SYSTEM.iter().chain(&DEVICES).map(PathBuf::from).chain(own).collect()
});

/// The version of Landlock that this kernel offers; `None` where it has none or does not enforce it.
pub fn landlock_version() -> Option<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of landlock_create_ruleset(2).
    const VERSION: libc::c_long = 1;
    // SAFETY: with this flag the call takes no pointer and only returns a number.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0, VERSION)
    };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

/// Allows the calling thread the files of `needs` only. Returns the version of Landlock, or `None` where
/// there is none.
pub(super) fn restrict(needs: &Needs) -> io::Result<Option<u32>> {
    let Some(version) = landlock_version() else { return Ok(None) };
    let all = AccessFs::from_all(ABI_VERSION);
    let mut read = AccessFs::ReadFile | AccessFs::ReadDir;
    if needs.programs {
        read |= AccessFs::Execute;
    }
    let change = all & !AccessFs::Execute;
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    let ruleset = ruleset.handle_access(all).and_then(|ruleset| match needs.programs {
        // They may reach services of the system.
        true => Ok(ruleset),
        false => ruleset.scope(Scope::from_all(ABI_VERSION)),
    });
    let mut ruleset = ruleset.and_then(Ruleset::create).map_err(io::Error::other)?;
    for path in READABLE.iter().chain(&needs.readable) {
        ruleset = allow(ruleset, path, read)?;
    }
    let devices = DEVICES.iter().map(Path::new);
    for path in needs.writable.iter().map(PathBuf::as_path).chain(devices) {
        ruleset = allow(ruleset, path, change)?;
    }
    ruleset.restrict_self().map_err(io::Error::other)?;
    Ok(Some(version))
}

/// Adds a rule for `path`, unless nothing is there.
fn allow(ruleset: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> io::Result<RulesetCreated> {
    let Ok(opened) = PathFd::new(path) else { return Ok(ruleset) };
    // Rights of folders do not exist for files.
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(ABI_VERSION) };
    ruleset.add_rule(PathBeneath::new(opened, access)).map_err(io::Error::other)
}
