//! Packets of a host, as tcpdump prints them.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    eventually,
    testbed::{Host, Testbed},
};

/// How long tcpdump may take to start on a busy machine. Only a failing test takes that long.
const START_TIMEOUT: Duration = Duration::from_secs(15);
/// After this time tcpdump has written what a host sent. Shorter: the last packets are missing; longer:
/// slower tests.
const WRITE_DELAY: Duration = Duration::from_millis(50);

/// tcpdump at all interfaces of a host, until it is dropped.
pub struct Tcpdump {
    child: Child,
    file: PathBuf,
    /// Bytes of the file that were returned.
    seen: usize,
}

impl Tcpdump {
    /// Starts it with a filter (pcap-filter(7)), and waits until it listens.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(testbed: &Testbed, host: Host, filter: &str) -> Self {
        let files = ["pcap.log", "tcpdump.log"].map(|kind| testbed.file(kind, host));
        Self::run(testbed.command(host, "tcpdump"), filter, files)
    }

    /// The same for a command that is tcpdump in some network namespace. Its output and its errors go to
    /// these files.
    ///
    /// # Panics
    /// If it does not start.
    pub fn run(mut tcpdump: Command, filter: &str, [file, errors]: [PathBuf; 2]) -> Self {
        let create = |path: &PathBuf| File::create(path).expect("a file to write");
        let child = tcpdump
            .args(["-nn", "-tt", "-l", "--immediate-mode", "-i", "any", filter])
            .stdout(create(&file))
            .stderr(Stdio::from(create(&errors)))
            .spawn()
            .expect("tcpdump runs");
        eventually(START_TIMEOUT, "tcpdump listens", || {
            let said = fs::read_to_string(&errors).unwrap_or_default();
            if said.contains("listening") { Ok(()) } else { Err(said) }
        });
        Self { child, file, seen: 0 }
    }

    /// The lines since the last call, as `1700000000.000000 eth1  Out IP 10.101.0.2.5 > 192.0.2.1.9: UDP,
    /// length 8`.
    ///
    /// # Panics
    /// If its output cannot be read.
    pub fn new_lines(&mut self) -> Vec<String> {
        thread::sleep(WRITE_DELAY);
        let text = fs::read_to_string(&self.file).expect("what tcpdump wrote");
        let new = text[self.seen..].rsplit_once('\n').map_or("", |(whole, _)| whole);
        self.seen += new.len();
        new.lines().map(ToOwned::to_owned).collect()
    }
}

impl Drop for Tcpdump {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
