//! Processor time and memory of a process, as counted by the kernel.
//!
//! In: a process ID. Out: processor time and memory of all its threads; `None` if there is no such process.

use std::{fs, path::Path, time::Duration};

/// `PID_MAX_LIMIT` of the kernel: process IDs are smaller. The ID of a clock has no room for all 32 bits.
const MAX_PID: u32 = 1 << 22;

/// Processor time used so far, user and system, including softirqs that ran in the context of the process.
/// The kernel counts it in nanoseconds.
pub fn processor_time(pid: u32) -> Option<Duration> {
    if pid >= MAX_PID {
        return None;
    }
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: plain system calls; both variables outlive them.
    let is_known = unsafe {
        libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    is_known.then(|| Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32))
}

/// Memory of the machine, or of the control group of this process if that is less (`memory.max`), bytes.
pub fn available_memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram * u64::from(info.mem_unit)).min(control_group_memory().unwrap_or(u64::MAX))
}

/// The least `memory.max` of the control group of this process and of those above it, bytes.
fn control_group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    // Version 2 (cgroups(7)).
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = Path::new("/sys/fs/cgroup").join(own);
    let limit = |folder: &Path| fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok();
    folder.ancestors().filter_map(limit).min()
}

/// Resident memory, bytes.
pub fn resident_memory(pid: u32) -> Option<u64> {
    memory(pid, "VmRSS:")
}

/// Resident memory that is no file's, bytes.
pub fn anonymous_memory(pid: u32) -> Option<u64> {
    memory(pid, "RssAnon:")
}

/// The processor time that the calling thread has used.
pub fn thread_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(used).unwrap_or_default()
}

fn memory(pid: u32, key: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_uses_time_and_memory() {
        let me = std::process::id();
        let before = processor_time(me).expect("this process");
        let mut sum = 0_u64;
        while processor_time(me).expect("this process") < before + Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(1));
        }
        // Other tests use the time of this process, too.
        assert!(thread_time() > Duration::ZERO);
        assert!(resident_memory(me).expect("this process") > 100_000);
    }

    #[test]
    fn a_process_that_is_not_there_uses_nothing() {
        assert_eq!(processor_time(MAX_PID - 1), None);
        assert_eq!(processor_time(1 << 30), None);
        assert_eq!(resident_memory(1 << 30), None);
    }
}
