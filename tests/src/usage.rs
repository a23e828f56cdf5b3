//! Processor time and memory of a process that only tests and rigs ask for, besides [`mpvpn_os::usage`].
//!
//! In: a process ID. Out: its processor time in two parts, and its peak of memory; `None` if there is no such
//! process.

use std::{fs, time::Duration};

use mpvpn_os::usage::processor_time;

/// Processor time used so far, in user mode and in the kernel. `/proc` tells the two in steps of 10 ms, so
/// these are shares of the exact sum.
pub fn user_and_system_time(pid: u32) -> Option<(Duration, Duration)> {
    let all = processor_time(pid)?;
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    let mut ticks = after_name.split_whitespace().skip(11).map(|field| field.parse::<u32>().ok());
    let (user, system) = (ticks.next()??, ticks.next()??);
    let user = all.mul_f64(f64::from(user) / f64::from(user + system).max(1.0));
    Some((user, all.saturating_sub(user)))
}

/// Peak of resident memory since the start or the last [`reset_peak_memory`], bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
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
    fn the_peak_of_memory_is_at_least_the_present_use() {
        let me = std::process::id();
        let now = mpvpn_os::usage::resident_memory(me).expect("this process");
        assert!(peak_memory(me).expect("this process") >= now);
        assert_eq!(peak_memory(1 << 30), None);
    }

    #[test]
    fn less_than_a_tick_of_processor_time_counts_and_is_all_in_user_mode_or_in_the_kernel() {
        let me = std::process::id();
        let before = processor_time(me).expect("this process");
        let (user, system) = user_and_system_time(me).expect("this process");
        assert!(user + system > before, "{user:?} and {system:?} since {before:?}");
        assert!(processor_time(me).expect("this process") > user + system);
    }
}
