//! The memory of client and server while something else goes on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use mpvpn_tests::usage::resident_memory;

/// From one look to the next.
const LOOK: Duration = Duration::from_millis(50);

/// The most memory that two processes have until it is asked for.
pub(super) struct Peaks {
    stop: Arc<AtomicBool>,
    looking: JoinHandle<[u64; 2]>,
}

impl Peaks {
    pub(super) fn start(processes: [u32; 2]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let look = move || {
            let mut most = [0; 2];
            while !seen.load(Ordering::Relaxed) {
                for (most, process) in most.iter_mut().zip(processes) {
                    *most = resident_memory(process).unwrap_or(0).max(*most);
                }
                thread::sleep(LOOK);
            }
            most
        };
        Self { stop, looking: thread::spawn(look) }
    }

    /// Bytes.
    pub(super) fn finish(self) -> [u64; 2] {
        self.stop.store(true, Ordering::Relaxed);
        self.looking.join().unwrap_or_default()
    }
}
