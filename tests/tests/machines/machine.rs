//! One machine: a Debian system that boots in a container, with a root file system and links of its own.
//!
//! In: layers of its root file system, its links. Out: results of commands in it, its journal. Always holds:
//! a boot begins with an empty network namespace, as that of a real machine; every wait is bounded;
//! processes, namespace and file system are gone when it is dropped; if its test failed, its journal of all
//! boots and its console are in `target/machine-failures/TEST`.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{eventually, ping::Ping, target_dir};
use serde_json::Value;

use crate::{
    isolation::{ControlGroup, run},
    network::{Link, PREFIX_LENGTHS},
    root_file_system::{RootFileSystem, folder, write},
};

/// How long a boot may take; it takes half a second on an idle machine, where no unit waits.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a machine may take to power off.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a command may take, unless its caller says otherwise.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// The environment of commands, as after a login of root.
const ENVIRONMENT: [&str; 5] = [
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LANG=C.UTF-8",
    "TERM=dumb",
    "DEBIAN_FRONTEND=noninteractive",
];
/// Capabilities of the systems besides the defaults of nspawn, as on a machine of their own: networks, and
/// programs of the kernel with which systemd restricts services, and Landlock, with which programs restrict
/// themselves.
const CAPABILITIES: &str = "--capability=CAP_NET_ADMIN,CAP_BPF,CAP_PERFMON";
const SYSTEM_CALLS: &str =
    "--system-call-filter=bpf landlock_create_ruleset landlock_add_rule landlock_restrict_self";

/// A machine; switched off and removed when it is dropped.
pub(crate) struct Machine {
    name: String,
    test: String,
    links: Vec<Link>,
    root: RootFileSystem,
    running: Option<Running>,
    boots: u32,
}

struct Running {
    nspawn: Child,
    leader: u32,
    group: ControlGroup,
}

impl Machine {
    /// A machine that has never been booted. `test` names the folder for its journal.
    pub(crate) fn new(test: &str, name: &str, layers: &[&str], links: &[Link]) -> Self {
        let root = RootFileSystem::new(name, layers);
        let machine = Self {
            name: name.to_owned(),
            test: test.to_owned(),
            links: links.to_vec(),
            root,
            running: None,
            boots: 0,
        };
        machine.configure();
        machine
    }

    /// Writes what an installer writes: the machine's name, number, and network.
    fn configure(&self) {
        self.write("etc/hostname", &format!("{}\n", self.name));
        self.write("etc/hosts", &format!("127.0.0.1 localhost {}\n::1 localhost\n", self.name));
        let number: String = self.name.bytes().cycle().take(16).map(|byte| format!("{byte:02x}")).collect();
        self.write("etc/machine-id", &format!("{number}\n"));
        let mut interfaces = String::new();
        for (index, link) in self.links.iter().enumerate() {
            let (interface, metric) = (&link.interface, 100 + index);
            interfaces += &format!("auto {interface}\n");
            let addresses = link.addresses().into_iter().zip(PREFIX_LENGTHS).zip(link.gateways());
            for (family, ((address, length), gateway)) in ["inet", "inet6"].iter().zip(addresses) {
                interfaces += &format!("iface {interface} {family} static\n    address {address}/{length}\n");
                interfaces += &format!("    gateway {gateway}\n    metric {metric}\n");
            }
            // Programs can send by IPv6 as soon as by IPv4, and a boot does not wait for it (RFC 4862 §5.4).
            interfaces += "    dad-attempts 0\n";
        }
        self.write("etc/network/interfaces.d/links", &interfaces);
        let [resolver, _] = self.links.first().map(Link::gateways).unwrap_or_default();
        if !self.path("etc/resolv.conf").is_symlink() {
            self.write("etc/resolv.conf", &format!("nameserver {resolver}\n"));
        }
    }

    /// The machine's name, which is also its host name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its links.
    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    /// The path of a file of the machine outside of it.
    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.root.path().join(file.trim_start_matches('/'))
    }

    /// Writes a file of the machine.
    pub(crate) fn write(&self, file: &str, text: &str) {
        write(&self.root.path(), file.trim_start_matches('/'), text);
    }

    /// Copies a file into the machine.
    pub(crate) fn copy_in(&self, from: &Path, to: &str) {
        let to = self.path(to);
        fs::copy(from, &to).unwrap_or_else(|error| panic!("{} to {}: {error}", from.display(), to.display()));
    }

    /// Switches the machine on, and waits until its system has started. Panics if a unit failed.
    pub(crate) fn boot(&mut self) {
        self.switch_on();
        self.wait_until_started();
    }

    /// Switches the machine on.
    pub(crate) fn switch_on(&mut self) {
        assert!(self.running.is_none(), "{} runs already", self.name);
        self.boots += 1;
        let namespace = self.name.as_str();
        run("ip", &["netns", "add", namespace]);
        for link in &self.links {
            link.connect(namespace);
        }
        let group = ControlGroup::new(&self.name);
        let console = File::create(self.console(self.boots)).expect("our own file system");
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo 0 >"$0" && exec "$@""#]).arg(group.entry());
        command.args([
            "nsenter",
            &format!("--net=/run/netns/{namespace}"),
            "--",
            "systemd-nspawn",
            "--quiet",
        ]);
        command.args(["--boot", "--keep-unit", "--register=no", "--console=passive", "--link-journal=no"]);
        command.args(["--resolv-conf=off", "--timezone=off", CAPABILITIES, SYSTEM_CALLS]);
        command.args(["--machine", namespace, "--directory"]).arg(self.root.path());
        // The network namespace is the machine's own, though nspawn did not make it.
        command.env("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "network");
        command.stdin(Stdio::null()).stdout(console.try_clone().expect("a second handle")).stderr(console);
        let mut nspawn = command.spawn().expect("sh runs");
        let deadline = Instant::now() + BOOT_TIMEOUT;
        let leader = loop {
            if let Some(leader) = group.leader() {
                break leader;
            }
            let ended = nspawn.try_wait().expect("our own child");
            assert!(ended.is_none() && Instant::now() < deadline, "{}", self.console_text());
            thread::sleep(Duration::from_millis(10));
        };
        self.running = Some(Running { nspawn, leader, group });
    }

    /// Waits until all units have started. Panics if one failed.
    pub(crate) fn wait_until_started(&self) {
        let state = eventually(BOOT_TIMEOUT, &format!("{} starts", self.name), || {
            let output = self.output(BOOT_TIMEOUT, &["systemctl", "is-system-running", "--wait"]);
            let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            match state.as_str() {
                "running" | "degraded" => Ok(state),
                _ => Err(format!("{state} {}", String::from_utf8_lossy(&output.stderr))),
            }
        });
        if state != "running" {
            let failed = self.run(&["systemctl", "--failed", "--no-legend", "--plain"]);
            panic!("units of {} failed:\n{failed}", self.name);
        }
    }

    /// Powers the machine off as a person does, and waits until it is off.
    pub(crate) fn power_off(&mut self) {
        // The connection to the manager may end before its answer.
        self.output(COMMAND_TIMEOUT, &["systemctl", "poweroff"]);
        let Some(mut running) = self.running.take() else { return };
        eventually(POWER_OFF_TIMEOUT, &format!("{} powers off", self.name), || {
            match running.nspawn.try_wait().expect("our own child") {
                Some(_) => Ok(()),
                None => Err("its processes still run".to_owned()),
            }
        });
        drop(running);
        self.remove_namespace();
    }

    /// Ends the machine as a power failure does: no process learns of it.
    pub(crate) fn cut_power(&mut self) {
        let Some(mut running) = self.running.take() else { return };
        running.group.kill();
        let _ = running.nspawn.wait();
        drop(running);
        self.remove_namespace();
    }

    /// Powers the machine off and on again.
    pub(crate) fn reboot(&mut self) {
        self.power_off();
        self.boot();
    }

    fn remove_namespace(&self) {
        // Its processes are gone, and so are its interfaces with it.
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).status();
        for link in &self.links {
            let _ = Command::new("ip").args(["link", "delete", &format!("{}p", link.bridge)]).output();
        }
    }

    /// A command in the machine, which is killed after `limit`.
    pub(crate) fn command(&self, limit: Duration, args: &[&str]) -> Command {
        let running = self.running.as_ref().unwrap_or_else(|| panic!("{} is switched off", self.name));
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo 0 >"$0" && exec "$@""#]).arg(running.group.entry_for_commands());
        command.args(["nsenter", "--target", &running.leader.to_string()]);
        command.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--", "env", "-i"]).args(ENVIRONMENT);
        command.args(["timeout", "-k", "2", &limit.as_secs_f64().to_string()]).args(args);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a command to its end; it may fail.
    pub(crate) fn output(&self, limit: Duration, args: &[&str]) -> Output {
        self.command(limit, args).output().unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Runs a command, and panics unless it succeeds. Returns its standard output.
    pub(crate) fn run(&self, args: &[&str]) -> String {
        let output = self.output(COMMAND_TIMEOUT, args);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(
            output.status.success(),
            "{args:?} at {} ended with {}:\n{out}\n{err}",
            self.name,
            output.status
        );
        out.into_owned()
    }

    /// Runs lines of shell, and panics unless all succeed.
    pub(crate) fn shell(&self, script: &str) -> String {
        self.run(&["sh", "-euc", script])
    }

    /// Whether a command succeeds.
    pub(crate) fn succeeds(&self, args: &[&str]) -> bool {
        self.output(COMMAND_TIMEOUT, args).status.success()
    }

    /// The state of the machine's mpvpn; an error while it does not answer.
    pub(crate) fn status(&self) -> Result<Value, String> {
        let output = self.output(Duration::from_secs(5), &["mpvpn", "status", "--json"]);
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
    }

    /// The addresses of the client in the tunnel.
    pub(crate) fn tunnel_addresses(&self) -> Vec<String> {
        let status = self.status().unwrap_or_else(|error| panic!("no status of {}: {error}", self.name));
        let addresses = status["addresses"].as_array().expect("a list").iter();
        addresses.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Starts a ping to each address every `interval` that ends after `seconds`. Errors that routers report
    /// while there is no tunnel do not end it, as they would with `-w`.
    pub(crate) fn ping(&self, to: [&str; 2], interval: Duration, seconds: u32) -> [Ping; 2] {
        let count = (f64::from(seconds) / interval.as_secs_f64()).ceil().to_string();
        let interval = interval.as_secs_f64().to_string();
        to.map(|to| {
            let args = ["ping", "-n", "-D", "-i", &interval, "-c", &count, "-W", "1", to];
            let file = folder().join(format!("{}-{}.ping", self.name, to));
            Ping::run(self.command(Duration::from_secs(600), &args), file)
        })
    }

    /// Whether one ping to each address is answered within a second.
    pub(crate) fn reaches(&self, to: [&str; 2]) -> bool {
        let once = |to| self.output(Duration::from_secs(3), &["ping", "-n", "-c", "1", "-W", "1", to]);
        to.iter().all(|to| once(to).status.success())
    }

    /// Bytes that an interface has received and sent.
    pub(crate) fn interface_bytes(&self, interface: &str) -> (u64, u64) {
        let of = |way: &str| {
            let file = format!("/sys/class/net/{interface}/statistics/{way}_bytes");
            self.run(&["cat", &file]).trim().parse().expect("a number")
        };
        (of("rx"), of("tx"))
    }

    /// The journal of all boots.
    pub(crate) fn journal(&self) -> String {
        let folder = self.path("var/log/journal");
        let journal = Command::new("journalctl")
            .args(["--no-pager", "--output", "short-precise", "--directory"])
            .arg(folder)
            .output();
        journal.map_or_else(|error| error.to_string(), |it| String::from_utf8_lossy(&it.stdout).into_owned())
    }

    fn console(&self, boot: u32) -> PathBuf {
        folder().join(format!("{}-{boot}.console", self.name))
    }

    fn console_text(&self) -> String {
        let text = fs::read_to_string(self.console(self.boots)).unwrap_or_default();
        format!("the container of {} did not start:\n{text}", self.name)
    }

    /// Writes journal and console to the folder of failures.
    fn keep_logs(&self) {
        let folder = target_dir().join("machine-failures").join(&self.test);
        if let Err(error) = fs::create_dir_all(&folder) {
            eprintln!("{}: {error}", folder.display());
            return;
        }
        let journal = self.journal();
        let last: Vec<&str> = journal.lines().rev().take(25).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        eprintln!("the last lines of the journal of {}:\n{}\n", self.name, last.join("\n"));
        let _ = fs::write(folder.join(format!("{}.journal", self.name)), &journal);
        for boot in 1..=self.boots {
            let _ = fs::copy(self.console(boot), folder.join(format!("{}-{boot}.console", self.name)));
        }
        eprintln!("all of it: {}", folder.display());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if thread::panicking() {
            self.keep_logs();
        }
        self.cut_power();
    }
}
