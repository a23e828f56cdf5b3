//! Samples the memory of two processes in the background, and returns the peaks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use mpvpn_os::usage::resident_memory;

/// Sampling interval. Longer: short peaks are missed. Shorter: sampling disturbs the measurement.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A running sampler of two processes.
pub(super) struct PeakMemory {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<[u64; 2]>,
}

impl PeakMemory {
    pub(super) fn start(processes: [u32; 2]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let poll = move || {
            let mut peak = [0; 2];
            while !stopped.load(Ordering::Relaxed) {
                for (peak, process) in peak.iter_mut().zip(processes) {
                    *peak = resident_memory(process).unwrap_or(0).max(*peak);
                }
                thread::sleep(POLL_INTERVAL);
            }
            peak
        };
        Self { stop, thread: thread::spawn(poll) }
    }

    /// Stops sampling, and returns the peak resident memory of both processes, bytes.
    pub(super) fn finish(self) -> [u64; 2] {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}
