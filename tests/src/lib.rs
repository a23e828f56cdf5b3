//! Shared by the end-to-end tests and the rigs of `bench`: a testbed (network namespaces, emulated links,
//! `mpvpn` processes whose logs are kept), real traffic over it (ping, iperf3, curl), and parsers of the
//! results.
//!
//! In: the binary (`MPVPN_BIN`), root, and the tools that `./dev` installs. Out: measured values, and
//! assertions that fail with the ends of the logs. Always holds: testbeds share only processors and memory,
//! and each declares how much it needs; every wait is bounded; processes, devices, namespaces and files of a
//! testbed are removed when it is dropped, also after a panic and when the program is interrupted.
// Edge: tests run processes, sockets and clocks.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod call;
pub mod chromium;
pub mod crowd;
pub mod cut;
pub mod dashboard;
pub mod disturbance;
pub mod dns;
mod failure_logs;
pub mod fallible_iperf;
pub mod files;
pub mod firewall;
pub mod flood;
pub mod guide;
pub mod hostile;
pub mod http;
pub mod https;
pub mod interop_peer;
pub mod iperf;
pub mod machine_folders;
pub mod machine_share;
pub mod many_connections;
pub mod persistent_http;
pub mod ping;
mod private_folders;
pub mod prometheus;
pub mod proxy;
pub mod quic_bulk;
pub mod random;
pub mod rogue;
pub mod stalled_readers;
pub mod system;
pub mod tcpdump;
pub mod terminal;
pub mod testbed;
pub mod tun_copy;
pub mod usage;
pub mod user_home;

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Calls `probe` every 20 ms until it succeeds, and returns its value. Panics with `what` and the last error
/// after `limit`.
pub fn eventually<T>(limit: Duration, what: &str, mut probe: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match probe() {
            Ok(answer) => return answer,
            Err(complaint) if Instant::now() > deadline => {
                panic!("{what}: not within {limit:?}. Last error: {complaint}")
            }
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Cargo's target directory: binaries and reports.
pub fn target_dir() -> PathBuf {
    let default_dir = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").join("target");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(default_dir, PathBuf::from)
}

/// The percentile of sorted values, by their nearest rank. NaN if there are none.
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    mpvpn_status::measure::percentile(sorted, percent as f64).unwrap_or(f64::NAN)
}
