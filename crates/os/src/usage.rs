//! Processor time and memory of a process, as counted by the kernel.
//!
//! In: a process ID. Out: processor time and memory of all its threads; `None` if there is no such process.

use std::{fs, time::Duration};

/// Duration of a tick in `/proc`: USER_HZ is 100 on all supported architectures.
pub const TICK: Duration = Duration::from_millis(10);

/// Processor time used so far, user and system, including softirqs that ran in the context of the process.
pub fn processor_time(pid: u32) -> Option<Duration> {
    user_and_system_time(pid).map(|(user, system)| user + system)
}

/// The same, in user mode and in the kernel.
pub fn user_and_system_time(pid: u32) -> Option<(Duration, Duration)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    let mut times =
        after_name.split_whitespace().skip(11).map(|field| Some(TICK * field.parse::<u32>().ok()?));
    Some((times.next()??, times.next()??))
}

/// Peak of resident memory since the start or the last [`reset_peak_memory`], bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    memory(pid, "VmHWM:")
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

/// Resets the peak to the current resident memory (proc(5), `clear_refs`).
pub fn reset_peak_memory(pid: u32) -> Option<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_uses_time_and_memory() {
        let me = std::process::id();
        let before = processor_time(me).expect("this process");
        let mut sum = 0_u64;
        while processor_time(me).expect("this process") < before + 2 * TICK {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(1));
        }
        // Other tests use the time of this process, too.
        assert!(thread_time() > Duration::ZERO);
        let now = resident_memory(me).expect("this process");
        assert!(now > 100_000 && peak_memory(me).expect("this process") >= now);
    }

    #[test]
    fn a_process_that_is_not_there_uses_nothing() {
        // Process IDs are below 2^22.
        assert_eq!(processor_time(1 << 30), None);
        assert_eq!(peak_memory(1 << 30), None);
    }
}
