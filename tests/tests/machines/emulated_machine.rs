//! A machine with a kernel of its own, Debian's, in an emulator: for what the kernel of the machine that runs
//! the tests may lack.
//!
//! In: the layers `base` and `kernel` of the root file system, the program of the end-to-end stories (the
//! environment variable `MPVPN_STORIES`), and part of the names of some. Out: the stories that passed in the
//! emulated machine, or a panic with its output. Always holds: the machine has no network device; its kernel
//! has VLANs, or it runs no story; it is switched off when its boot or the stories take too long; its memory
//! and files are gone when it is dropped; if its test failed, its console and the logs of failed stories are
//! in `target/machine-failures/TEST`.
//!
//! Its root file system is a folder of this machine, which the emulator shares (9P over virtio): nothing is
//! packed before, and nothing is unpacked after. Its first process is a script, and no service runs.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{target_dir, testbed::binary};

use crate::root_file_system::{RootFileSystem, folder, write};

/// The emulator.
const EMULATOR: &str = "qemu-system-x86_64";
/// How the emulator runs the machine, its model of processor, and how long the boot may take; the next line
/// is tried after that. With virtualisation a boot takes 3 s, but not every machine has it, and in a machine
/// that is virtual itself not every kernel boots with it. With an emulated processor a boot takes 8 s on an
/// idle machine. Less: busy machines emulate the processor, which takes ten times as long, or fail. More:
/// machines on which the kernel does not boot wait. Newer models of processor have instructions that take
/// longer to emulate; older ones have none for AES.
const ACCELERATORS: [(&str, &str, Duration); 2] =
    [("kvm", "host", Duration::from_secs(15)), ("tcg,thread=multi", "Westmere", Duration::from_secs(120))];
/// How long the stories may take. Less: an emulated processor does not get to the end.
const LIMIT: Duration = Duration::from_secs(600);
/// Memory of the machine, MiB. Less: the programs, in the profile of the tests, do not stay in the cache.
const MEMORY: &str = "1536";
/// The most processors that the machine has. More: the emulator gives each a thread, and they compete.
const MAX_PROCESSORS: usize = 2;
/// The programs in the machine, and the script that starts the stories.
const PROGRAM: &str = "opt/mpvpn";
const STORIES: &str = "opt/stories";
const SCRIPT: &str = "opt/run-stories";
/// The folder in the machine for the logs of failed stories.
const LOGS: &str = "var/stories/e2e-failures";
/// The first line of the script.
const BOOTED: &str = "booted";
/// The beginning of the last line of the script; the exit code of the stories follows.
const ENDED: &str = "stories ended with ";

/// The machine.
pub(crate) struct EmulatedMachine {
    test: String,
    root: RootFileSystem,
    emulator: Option<Child>,
}

impl EmulatedMachine {
    /// A machine that is switched off. `test` names the folder for its logs.
    pub(crate) fn new(test: &str) -> Self {
        let root = RootFileSystem::new("emulated", &["base", "kernel"]);
        let stories = std::env::var_os("MPVPN_STORIES").map(PathBuf::from);
        let stories = stories
            .expect("MPVPN_STORIES names the program of the stories: `sudo ./dev test machines` sets it");
        fs::create_dir_all(root.path().join("opt")).expect("our own file system");
        for (from, to) in [(binary(), PROGRAM), (stories, STORIES)] {
            let to = root.path().join(to);
            fs::copy(&from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        }
        Self { test: test.to_owned(), root, emulator: None }
    }

    /// Boots the machine, runs the stories with `word` in their names, and waits until it is off. Returns the
    /// names of the stories.
    ///
    /// # Panics
    /// If one failed, or the machine did not get to their end.
    pub(crate) fn run_stories(&mut self, word: &str) -> Vec<String> {
        write(&self.root.path(), SCRIPT, &script(word));
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.root.path().join(SCRIPT), executable).expect("our own file");
        self.boot();
        let emulator = self.emulator.as_mut().expect("the machine has booted");
        let ended = wait_until(LIMIT, || !is_running(emulator));
        let output = output();
        assert!(ended, "the stories run after {LIMIT:?}:\n{output}\n{}", console());
        let end = output.lines().find_map(|line| line.strip_prefix(ENDED));
        let Some(end) = end else { panic!("the stories did not end:\n{output}\n{}", console()) };
        assert_eq!(end, "0", "stories failed in the emulated machine:\n{output}");
        output.lines().filter_map(passed).map(str::to_owned).collect()
    }

    /// Boots the machine.
    fn boot(&mut self) {
        for (accelerator, processor, limit) in ACCELERATORS {
            let began = Instant::now();
            let emulator = self.command(accelerator, processor).spawn().unwrap_or_else(|error| {
                panic!("{EMULATOR}: {error}; `sudo ./dev test machines vlan` installs it")
            });
            let emulator = self.emulator.insert(emulator);
            wait_until(limit, || output().starts_with(BOOTED) || !is_running(emulator));
            if output().starts_with(BOOTED) {
                println!("  {:6.2} s  the machine boots ({accelerator})", began.elapsed().as_secs_f64());
                return;
            }
            println!("            the machine does not boot with {accelerator}");
            self.switch_off();
        }
        panic!("the machine does not boot:\n{}", console());
    }

    fn switch_off(&mut self) {
        if let Some(mut emulator) = self.emulator.take() {
            let _ = emulator.kill();
            let _ = emulator.wait();
        }
    }

    /// The emulator, with serial lines for the console and for the output of the script.
    fn command(&self, accelerator: &str, processor: &str) -> Command {
        let processors = thread::available_parallelism().map_or(1, usize::from).min(MAX_PROCESSORS);
        let kernel = self.boot_file("vmlinuz-");
        let initramfs = self.boot_file("initrd.img-");
        let root = self.root.path();
        let root = root.to_str().expect("ASCII");
        // Layers of the root folder are different file systems, whose files may have equal numbers.
        let shared = format!(
            "local,id=root,path={root},security_model=passthrough,multidevs=remap,writeout=immediate"
        );
        let line = format!("console=ttyS0 panic=-1 boot=machine init=/{SCRIPT}");
        let mut command = Command::new(EMULATOR);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(["-accel", accelerator, "-cpu", processor]);
        command.args(["-m", MEMORY, "-smp", &processors.to_string()]);
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).args(["-append", &line]);
        command.args(["-fsdev", &shared, "-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
        command.args(["-device", "virtio-rng-pci"]);
        for file in [console_file(), output_file()] {
            command.args(["-serial", &format!("file:{}", file.display())]);
        }
        command.stdin(Stdio::null());
        command
    }

    /// The one file in /boot whose name begins so.
    fn boot_file(&self, prefix: &str) -> PathBuf {
        let files = fs::read_dir(self.root.path().join("boot")).expect("the layer `kernel` has it").flatten();
        let found = files.map(|file| file.path()).find(|file| name_of(file).starts_with(prefix));
        found.unwrap_or_else(|| panic!("the layer `kernel` has no /boot/{prefix}*"))
    }

    /// Copies the console, the output of the script and the logs of failed stories to the folder of failures.
    fn keep_logs(&self) {
        let folder = target_dir().join("machine-failures").join(&self.test);
        if let Err(error) = fs::create_dir_all(&folder) {
            eprintln!("{}: {error}", folder.display());
            return;
        }
        for file in [console_file(), output_file()] {
            let _ = fs::copy(&file, folder.join(name_of(&file)));
        }
        let logs = self.root.path().join(LOGS);
        if logs.is_dir() {
            let _ = Command::new("cp").arg("-r").arg(logs).arg(&folder).status();
        }
        eprintln!("console and logs: {}", folder.display());
    }
}

impl Drop for EmulatedMachine {
    fn drop(&mut self) {
        self.switch_off();
        if thread::panicking() {
            self.keep_logs();
        }
    }
}

/// The first process in the machine. The kernel panics when it ends, so it switches the machine off.
fn script(word: &str) -> String {
    format!(
        "#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 RUST_TEST_THREADS=1
export MPVPN_BIN=/{PROGRAM} CARGO_TARGET_DIR=/var/stories
exec </dev/null >/dev/ttyS1 2>&1
echo {BOOTED}
uname -srv
mount -t tmpfs stories /tmp
ip link set lo up
modprobe tun
if ip link add parent type dummy && ip link add link parent name parent.1 type vlan id 1; then
    ip link delete parent
    /{STORIES} --color never {word}
    echo {ENDED}$?
fi
sync
echo o >/proc/sysrq-trigger
sleep 60
"
    )
}

/// The name of a story that passed, in a line of libtest.
fn passed(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... ok")
}

/// Waits until `is_met`; `false` if it is not within `limit`.
fn wait_until(limit: Duration, mut is_met: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if is_met() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn is_running(process: &mut Child) -> bool {
    process.try_wait().expect("our own child").is_none()
}

fn console_file() -> PathBuf {
    folder().join("emulated.console")
}

fn output_file() -> PathBuf {
    folder().join("emulated.output")
}

/// The text of a serial line so far.
fn text_of(line: &Path) -> String {
    let text = fs::read(line).unwrap_or_default();
    String::from_utf8_lossy(&text).replace('\r', "")
}

/// The output of the script.
fn output() -> String {
    text_of(&output_file())
}

/// The last lines of the console.
fn console() -> String {
    let text = text_of(&console_file());
    let lines: Vec<&str> = text.lines().collect();
    format!("the end of its console:\n{}", lines[lines.len().saturating_sub(25)..].join("\n"))
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
