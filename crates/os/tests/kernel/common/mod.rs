//! A fresh network namespace for each test.
#![allow(dead_code, reason = "not every test file uses all helpers")]

use std::{
    fmt::Debug,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use mpvpn_os::{netlink::Netlink, privilege};

/// Runs `test` in a thread with a network namespace of its own, where only `lo` is up. The namespace
/// disappears with the thread and its descriptors, also after a panic. Without privilege the test is skipped,
/// with a message.
pub(crate) fn in_namespace<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if !privilege::has_net_admin() {
        eprintln!("skipped: needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN)");
        return None;
    }
    let thread = std::thread::spawn(move || {
        // SAFETY: takes no pointer; gives this thread alone a new network namespace.
        let code = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(code, 0, "unshare: {}", std::io::Error::last_os_error());
        let mut netlink = Netlink::open().unwrap();
        let lo = netlink.index_of("lo").unwrap();
        netlink.set_up(lo).unwrap();
        test()
    });
    match thread.join() {
        Ok(value) => Some(value),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Runs `ip` with arguments separated by spaces, in the namespace of this thread.
pub(crate) fn ip(words: &str) -> String {
    run("ip", words)
}

pub(crate) fn run(program: &str, words: &str) -> String {
    let output = Command::new(program).args(words.split_whitespace()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Fails if `current` does not return `expected` within two seconds. A device may outlive its owner for a
/// moment: a child process that a test in another thread is just starting holds a copy of its descriptor
/// until it executes its program.
#[track_caller]
pub(crate) fn assert_becomes<T: PartialEq + Debug>(expected: &T, current: impl Fn() -> T) {
    let end = Instant::now() + Duration::from_secs(2);
    while current() != *expected && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(current(), *expected);
}

/// A folder that is removed when the test ends.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mpvpn-os-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn assert_empty(&self) {
        assert_eq!(std::fs::read_dir(&self.0).unwrap().count(), 0, "nothing is left on disk");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
