//! Network namespaces of a lab, and programs and closures that run in them.

use std::{
    ffi::{CStr, OsStr},
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::{error::LabError, process::run};

/// Where `ip netns` keeps its namespaces.
pub(crate) const NETNS_DIR: &str = "/run/netns";

/// A network namespace with a name that `ip netns` knows.
#[derive(Clone, Debug)]
pub struct Namespace {
    name: String,
    fd: Arc<OwnedFd>,
}

impl Namespace {
    /// Creates an empty namespace whose loopback is up and whose kernel parameters suit a multihomed host.
    pub(crate) fn create(name: String) -> Result<Self, LabError> {
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let path = PathBuf::from(NETNS_DIR).join(&name);
        let file = File::open(&path).map_err(LabError::io(format!("open {}", path.display())))?;
        let namespace = Self { name, fd: Arc::new(file.into()) };
        // No reverse path filter: replies may arrive over another link than the one the kernel would choose.
        // No duplicate address detection: addresses are usable at once. No TCP metrics: no connection
        // inherits those of an earlier test.
        for (key, value) in [
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
            ("net/ipv4/ip_forward", "0"),
            ("net/ipv4/tcp_no_metrics_save", "1"),
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/all/accept_ra", "0"),
            ("net/ipv6/conf/default/accept_ra", "0"),
            ("net/ipv6/conf/all/keep_addr_on_down", "1"),
            ("net/ipv6/conf/default/keep_addr_on_down", "1"),
        ] {
            namespace.set_sysctl(key, value)?;
        }
        namespace.ip("link set lo up\n")?;
        Ok(namespace)
    }

    /// The name of the namespace, for `ip netns exec NAME …`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A command that runs in this namespace, with a matching `/sys`.
    ///
    /// The process is killed when the thread that spawned it ends, so that no process outlives the lab.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        self.run_inside(&mut command);
        command
    }

    /// Runs `f` on a new thread in this namespace; sockets that it opens stay in the namespace.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R, LabError> {
        let run = || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&*self.fd), network)
                .map_err(LabError::sys(format!("enter the namespace {}", self.name)))?;
            Ok(f())
        };
        match std::thread::scope(|scope| scope.spawn(run).join()) {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Sets a kernel parameter of this namespace; `key` is its path below `/proc/sys`.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<(), LabError> {
        let path = format!("/proc/sys/{key}");
        self.enter(|| std::fs::write(&path, value))?
            .map_err(LabError::io(format!("set {key} to {value} in {}", self.name)))
    }

    /// Reads a kernel parameter of this namespace.
    pub fn sysctl(&self, key: &str) -> Result<String, LabError> {
        let path = format!("/proc/sys/{key}");
        let text = self
            .enter(|| std::fs::read_to_string(&path))?
            .map_err(LabError::io(format!("read {key} in {}", self.name)))?;
        Ok(text.trim().to_owned())
    }

    /// The TCP congestion controls that are available in this namespace.
    pub fn congestion_controls(&self) -> Result<Vec<String>, LabError> {
        let text = self.sysctl("net/ipv4/tcp_available_congestion_control")?;
        Ok(text.split_whitespace().map(str::to_owned).collect())
    }

    /// Sets the default TCP congestion control of new connections.
    pub fn set_congestion_control(&self, name: &str) -> Result<(), LabError> {
        self.set_sysctl("net/ipv4/tcp_congestion_control", name)
    }

    /// Runs lines of `ip -batch` in this namespace.
    pub fn ip(&self, batch: &str) -> Result<(), LabError> {
        let mut command = Command::new("ip");
        command.args(["-n", &self.name, "-batch", "-"]);
        let io_error = |source| LabError::Io { operation: "run ip".to_owned(), source };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io_error)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(batch.as_bytes()).map_err(io_error)?;
        }
        let output = child.wait_with_output().map_err(io_error)?;
        if output.status.success() {
            return Ok(());
        }
        Err(LabError::Command {
            program: format!("ip -n {} -batch", self.name),
            status: output.status.to_string(),
            stderr: format!("{}\n{batch}", String::from_utf8_lossy(&output.stderr).trim()),
        })
    }

    /// Makes `command` run in this namespace and end with the thread that spawns it.
    pub(crate) fn run_inside(&self, command: &mut Command) {
        let fd = Arc::clone(&self.fd);
        let parent = std::process::id();
        // SAFETY: between fork and exec the closure makes only system calls: no allocation, no lock.
        unsafe { command.pre_exec(move || enter_in_child(fd.as_raw_fd(), parent)) };
    }
}

/// Enters the namespace in the child, between fork and exec.
fn enter_in_child(namespace: RawFd, parent: u32) -> io::Result<()> {
    const SYSFS: &CStr = c"sysfs";
    const SYS: &CStr = c"/sys";
    // SAFETY: plain system calls; every pointer is null or a constant C string.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The parent may have ended before prctl: then no signal will come.
        if u32::try_from(libc::getppid()) != Ok(parent) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        check(libc::setns(namespace, libc::CLONE_NEWNET))?;
        // A sysfs shows the devices of the namespace in which it was mounted.
        check(libc::unshare(libc::CLONE_NEWNS))?;
        let (none, no_data) = (std::ptr::null(), std::ptr::null());
        check(libc::mount(none, c"/".as_ptr(), none, libc::MS_SLAVE | libc::MS_REC, no_data))?;
        libc::umount2(SYS.as_ptr(), libc::MNT_DETACH);
        check(libc::mount(SYSFS.as_ptr(), SYS.as_ptr(), SYSFS.as_ptr(), 0, no_data))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
