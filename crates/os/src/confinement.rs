//! Takes from this process what it does not need: capabilities, system calls and files.
//!
//! In: [`Needs`]. Out: a [`Confinement`], which says what holds on this kernel. Always holds: nothing that
//! was taken comes back, also in threads and processes that begin later; a system call that is not allowed
//! fails with EPERM and a line on standard error that names it. What needs more is done by the
//! [`helper`](crate::helper).

mod capabilities;
mod files;
mod system_calls;
mod user;

use std::{path::PathBuf, sync::OnceLock};

pub use files::landlock_version;
pub use system_calls::is_supported as has_seccomp;
pub use user::leave_root;

use crate::error::OsError;

/// The rights that a process needs from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// To configure the network: addresses, routes, firewall marks of sockets (CAP_NET_ADMIN).
    pub network: bool,
    /// To bind ports below 1024 (CAP_NET_BIND_SERVICE).
    pub low_ports: bool,
    /// To run other programs.
    pub programs: bool,
    /// To read files of all users (CAP_DAC_READ_SEARCH), as far as the folders below allow.
    pub any_file: bool,
    /// To make and connect UNIX sockets. Those that are open stay.
    pub unix_sockets: bool,
    /// Files and folders to read, beside those of the system's libraries and settings. Paths that do not
    /// exist are skipped.
    pub readable: Vec<PathBuf>,
    /// Folders in which files are made and changed. Paths that do not exist are skipped.
    pub writable: Vec<PathBuf>,
}

/// The restrictions of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// The capabilities that it keeps, by the names of capabilities(7) in small letters without `cap_`.
    pub capabilities: Vec<String>,
    /// Whether system calls are filtered (seccomp(2)).
    pub system_calls: bool,
    /// The version of Landlock by which files are restricted; `None` where the kernel has none.
    pub landlock: Option<u32>,
}

/// The restrictions since [`confine`].
static CONFINED: OnceLock<Confinement> = OnceLock::new();

/// Confines this process, which must have one thread only: those that begin later are confined as well.
///
/// # Errors
/// If there are other threads, or the kernel refuses a restriction that it offers.
pub fn confine(needs: &Needs) -> Result<&'static Confinement, OsError> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads > 1 {
        let error = std::io::Error::other(format!("it has {threads} threads already"));
        return Err(OsError::kernel("confine", "this process", error));
    }
    let confinement = confine_thread(needs)?;
    Ok(CONFINED.get_or_init(|| confinement))
}

/// Confines the calling thread only.
fn confine_thread(needs: &Needs) -> Result<Confinement, OsError> {
    let refused = |what| move |error| OsError::kernel("confine", what, error);
    rustix::thread::set_no_new_privs(true).map_err(|error| refused("new privileges")(error.into()))?;
    let landlock = files::restrict(needs).map_err(refused("files"))?;
    let capabilities = capabilities::keep(needs).map_err(refused("capabilities"))?;
    let system_calls = system_calls::is_supported();
    if system_calls {
        system_calls::restrict(needs).map_err(refused("system calls"))?;
    }
    Ok(Confinement { capabilities, system_calls, landlock })
}

/// The restrictions of this process; `None` if it is not confined.
pub fn current() -> Option<&'static Confinement> {
    CONFINED.get()
}

#[cfg(test)]
mod tests {
    use std::{fs, io, net::UdpSocket, process::Command, thread};

    use super::*;

    /// Runs `test` in a thread of its own, which may be confined without consequences for others.
    fn in_thread(test: impl FnOnce() + Send + 'static) {
        thread::spawn(test).join().unwrap();
    }

    #[test]
    fn what_is_not_needed_is_denied_and_what_is_needed_works() {
        if landlock_version().is_none() || !has_seccomp() {
            eprintln!("skipped: this kernel has no Landlock or no seccomp");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [allowed, forbidden] = ["allowed", "forbidden"].map(|name| folder.path().join(name));
        for folder in [&allowed, &forbidden] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("file"), "x").unwrap();
        }
        in_thread(move || {
            let needs = Needs { readable: vec![allowed.clone()], ..Needs::default() };
            let confinement = confine_thread(&needs).unwrap();
            assert!(confinement.system_calls && confinement.capabilities.is_empty(), "{confinement:?}");
            let denied =
                |result: io::Result<()>| result.unwrap_err().kind() == io::ErrorKind::PermissionDenied;
            assert_eq!(fs::read_to_string(allowed.join("file")).unwrap(), "x");
            assert!(denied(fs::read(forbidden.join("file")).map(drop)));
            assert!(denied(fs::write(allowed.join("file"), "y")));
            assert!(denied(Command::new("/bin/true").status().map(drop)));
            UdpSocket::bind("127.0.0.1:0").unwrap();
            assert!(thread::spawn(|| 7).join().unwrap() == 7, "threads begin as before");
        });
    }

    #[test]
    fn a_program_may_run_where_it_is_needed() {
        in_thread(|| {
            let needs = Needs { programs: true, ..Needs::default() };
            confine_thread(&needs).unwrap();
            assert!(Command::new("/bin/true").status().unwrap().success());
        });
    }

    #[test]
    fn capabilities_are_read_back_from_the_kernel() {
        in_thread(|| {
            let before = crate::privilege::has_net_admin();
            let kept = confine_thread(&Needs { network: true, ..Needs::default() }).unwrap().capabilities;
            assert_eq!(kept, if before { vec!["net_admin".to_owned()] } else { vec![] });
            assert_eq!(crate::privilege::has_net_admin(), before);
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = |key: &str| status.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
            assert_eq!(line("NoNewPrivs:"), "NoNewPrivs:\t1");
            assert!(line("CapEff:").ends_with(if before { "0000000000001000" } else { "0000000000000000" }));
        });
    }
}
