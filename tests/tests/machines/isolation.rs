//! Namespaces around the whole test program, so that nothing of it touches the machine on which it runs.
//!
//! In: root. Out: the same program again, as the first process of namespaces for mounts, network and
//! processes. Always holds: the kernel removes processes, mounts and interfaces with that process, also if it
//! is killed; empty control groups of killed runs are removed by the next run.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Set inside of the namespaces.
const INSIDE: &str = "MPVPN_MACHINES_INSIDE";
/// Where the version 2 of control groups is mounted inside.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";
/// The programs that the harness runs outside of the machines, and how they get there.
const PROGRAMS: [&str; 9] =
    ["systemd-nspawn", "unshare", "nsenter", "ip", "tc", "nft", "iperf3", "tcpdump", "dpkg-deb"];

/// The reason why this machine cannot run the tests, with the remedy.
pub(crate) fn what_is_missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("containers take root: sudo ./dev test machines".to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_missing =
        |program: &&&str| !std::env::split_paths(&path).any(|folder| folder.join(program).exists());
    let missing = PROGRAMS.iter().find(is_missing)?;
    Some(format!("{missing} is missing: `sudo ./dev test machines` installs it"))
}

/// Whether this process is inside of the namespaces.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Replaces this process by one that runs this program inside of namespaces, and that takes it along when it
/// is killed.
pub(crate) fn run_inside(words: &[String]) -> ExitCode {
    let program = std::env::current_exe().expect("the path of this program");
    let error = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child"])
        .arg("--mount-proc")
        .arg(program)
        .args(words)
        .env(INSIDE, "1")
        .exec();
    eprintln!("machine tests: unshare cannot be started: {error}");
    ExitCode::FAILURE
}

/// Mounts what belongs to the new namespaces: network interfaces in /sys, control groups, and names of
/// network namespaces.
pub(crate) fn prepare() {
    // The sysfs of the machine shows its own interfaces, and may have control groups of version 1.
    mount(&["-t", "sysfs", "machines", "/sys"]);
    mount(&["-t", "cgroup2", "machines", CONTROL_GROUPS]);
    fs::create_dir_all("/run/netns").expect("a folder below /run");
    mount(&["-t", "tmpfs", "machines", "/run/netns"]);
    // Otherwise nspawn looks for a service manager, and asks it for a unit.
    fs::create_dir_all("/run/systemd").expect("a folder below /run");
    mount(&["-t", "tmpfs", "machines", "/run/systemd"]);
    remove_empty_control_groups();
}

fn mount(args: &[&str]) {
    run("mount", args);
}

/// Runs a program of this machine, and panics unless it succeeds.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output =
        Command::new(program).args(args).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?} ended with {}:\n{out}\n{err}", output.status);
    out.into_owned()
}

/// A control group for the processes of a machine; they are killed and it is removed when it is dropped.
pub(crate) struct ControlGroup(PathBuf);

impl ControlGroup {
    /// A new group below a name that no other run uses.
    pub(crate) fn new(name: &str) -> Self {
        let run = run_name();
        let group = Path::new(CONTROL_GROUPS).join(run).join(name);
        fs::create_dir_all(group.join("commands"))
            .unwrap_or_else(|error| panic!("{}: {error}", group.display()));
        Self(group)
    }

    /// The file to which a process writes 0 to enter the group with all that it starts.
    pub(crate) fn entry(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// The same for processes beside the system in the container.
    pub(crate) fn entry_for_commands(&self) -> PathBuf {
        self.0.join("commands/cgroup.procs")
    }

    /// The first process of the container, if it has started.
    pub(crate) fn leader(&self) -> Option<u32> {
        let processes = fs::read_to_string(self.0.join("payload/init.scope/cgroup.procs")).ok()?;
        processes.lines().next()?.parse().ok()
    }

    /// Kills all processes in the group at once, as a power failure ends them.
    pub(crate) fn kill(&self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        self.kill();
        // Groups are empty only after the kernel has reaped the processes.
        for _ in 0..100 {
            remove_groups(&self.0);
            if !self.0.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        if let Some(run) = self.0.parent() {
            let _ = fs::remove_dir(run);
        }
    }
}

/// The number of the namespace of processes is unique on the machine.
fn run_name() -> String {
    let namespace = fs::read_link("/proc/self/ns/pid").expect("a mounted /proc");
    let number: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    format!("mpvpn-machines-{number}")
}

/// Those of killed runs. Groups with processes cannot be removed, so runs that go on keep theirs; between two
/// boots of a machine its groups may be empty, and are made again.
fn remove_empty_control_groups() {
    let groups = fs::read_dir(CONTROL_GROUPS).into_iter().flatten().flatten();
    for group in groups.filter(|group| group.file_name().to_string_lossy().starts_with("mpvpn-machines-")) {
        remove_groups(&group.path());
    }
}

/// Removes a group with the groups in it, as far as no process is in them.
fn remove_groups(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_groups(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}
