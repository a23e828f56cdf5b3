//! Detects whether other load disturbed a measurement.
//!
//! In: a task that measures. Out: its result, and the processor time that foreign processes used meanwhile.
//! Own are this process, its descendants, kernel threads and interrupts. Foreign are all other processes,
//! time that the hypervisor took (steal), and time that no visible process accounts for.

use std::{
    collections::BTreeMap,
    fmt, fs,
    time::{Duration, Instant},
};

/// Duration of a tick in `/proc`: USER_HZ is 100 on all supported architectures.
const TICK: Duration = Duration::from_millis(10);
/// Foreign or stolen time above which a measurement counts as disturbed, in cores. Larger: disturbed results
/// count. Smaller: background services make every measurement fail.
pub const MAX_DISTURBANCE_CORES: f64 = 0.1;
/// `PF_KTHREAD` of the kernel's `sched.h`.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// A result and the conditions under which it was measured.
#[derive(Clone, Debug)]
pub struct Measurement<T> {
    /// Result of the least disturbed attempt.
    pub value: T,
    /// Disturbance of that attempt.
    pub disturbance: Disturbance,
    /// Number of attempts.
    pub tries: u32,
}

/// Processor time used by others during a measurement, in cores (1: one core all the time).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// Used by foreign or invisible processes.
    pub foreign: f64,
    /// Taken by the hypervisor (steal).
    pub stolen: f64,
    /// The foreign process that used most, with its process ID.
    pub top_process: Option<String>,
}

impl Disturbance {
    /// Whether the measurement should be repeated.
    pub fn exceeds_limit(&self) -> bool {
        self.total() > MAX_DISTURBANCE_CORES
    }

    /// The larger of both, in cores.
    pub fn total(&self) -> f64 {
        self.foreign.max(self.stolen)
    }
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} cores foreign, {:.2} stolen", self.foreign, self.stolen)?;
        self.top_process.as_ref().map_or(Ok(()), |name| write!(f, ", most by {name}"))
    }
}

/// Runs `task`, and repeats it while it is disturbed, at most `tries` times. The least disturbed attempt
/// counts.
pub fn measure_undisturbed<T>(tries: u32, mut task: impl FnMut() -> T) -> Measurement<T> {
    least_disturbed(tries, || {
        let before = CpuCounters::now();
        let value = task();
        (value, before.until(&CpuCounters::now()))
    })
}

fn least_disturbed<T>(tries: u32, mut attempt: impl FnMut() -> (T, Disturbance)) -> Measurement<T> {
    let mut best = attempt();
    let mut tried = 1;
    while best.1.exceeds_limit() && tried < tries {
        let next = attempt();
        tried += 1;
        if next.1.total() < best.1.total() {
            best = next;
        }
    }
    Measurement { value: best.0, disturbance: best.1, tries: tried }
}

/// The kernel's counters at one time.
#[derive(Debug)]
struct CpuCounters {
    at: Instant,
    processors: Processors,
    processes: Vec<Process>,
}

/// Ticks of all processors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Processors {
    /// In processes and kernel threads, without interrupts.
    tasks: u64,
    steal: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Process {
    pid: u32,
    parent: u32,
    kernel: bool,
    name: String,
    /// Ticks of the process itself.
    own_ticks: u64,
    /// Ticks of the process and of its ended children.
    total_ticks: u64,
}

impl CpuCounters {
    fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self { at: Instant::now(), processors: Processors::parse(&stat), processes: processes() }
    }

    fn until(&self, after: &Self) -> Disturbance {
        let time = (after.at - self.at).max(Duration::from_millis(1));
        let own_pid = std::process::id();
        let (before, now) =
            (TicksByOwner::of(&self.processes, own_pid), TicksByOwner::of(&after.processes, own_pid));
        let cores =
            |ticks: u64| (TICK * u32::try_from(ticks).unwrap_or(u32::MAX)).as_secs_f64() / time.as_secs_f64();
        let foreign_ticks = now.foreign.saturating_sub(before.foreign);
        let visible_ticks = foreign_ticks + now.ours.saturating_sub(before.ours);
        let tasks = after.processors.tasks.saturating_sub(self.processors.tasks);
        Disturbance {
            foreign: cores(foreign_ticks + tasks.saturating_sub(visible_ticks)),
            stolen: cores(after.processors.steal.saturating_sub(self.processors.steal)),
            top_process: top_process(&self.processes, &after.processes, own_pid),
        }
    }
}

impl Processors {
    /// The first line: `cpu user nice system idle iowait irq softirq steal …`
    fn parse(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let fields: Vec<u64> =
            line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        let field = |n: usize| fields.get(n).copied().unwrap_or(0);
        Self { tasks: field(0) + field(1) + field(2), steal: field(7) }
    }
}

/// Ticks of own and of foreign processes.
struct TicksByOwner {
    ours: u64,
    foreign: u64,
}

impl TicksByOwner {
    fn of(processes: &[Process], own_pid: u32) -> Self {
        let parents: BTreeMap<u32, u32> =
            processes.iter().map(|process| (process.pid, process.parent)).collect();
        let mut shares = Self { ours: 0, foreign: 0 };
        for process in processes {
            let share = if process.kernel || is_descendant(process.pid, own_pid, &parents) {
                &mut shares.ours
            } else {
                &mut shares.foreign
            };
            // An ended process is counted at the parent that waited for it, so that no tick is lost between
            // two readings.
            *share += process.total_ticks;
        }
        shares
    }
}

fn is_descendant(mut pid: u32, ancestor: u32, parents: &BTreeMap<u32, u32>) -> bool {
    // Processes are read one after the other, so parents may form a cycle: stop after 64 steps.
    for _ in 0..64 {
        if pid == ancestor {
            return true;
        }
        match parents.get(&pid) {
            Some(&parent) => pid = parent,
            None => return false,
        }
    }
    false
}

/// The foreign process that used most between two readings, if that is more than one tick.
fn top_process(before: &[Process], after: &[Process], own_pid: u32) -> Option<String> {
    let parents: BTreeMap<u32, u32> = after.iter().map(|process| (process.pid, process.parent)).collect();
    let earlier: BTreeMap<u32, u64> = before.iter().map(|process| (process.pid, process.own_ticks)).collect();
    after
        .iter()
        .filter(|process| !process.kernel && !is_descendant(process.pid, own_pid, &parents))
        .map(|process| {
            (process.own_ticks.saturating_sub(earlier.get(&process.pid).copied().unwrap_or(0)), process)
        })
        .filter(|(ticks, _)| *ticks > 1)
        .max_by_key(|(ticks, _)| *ticks)
        .map(|(_, process)| format!("{} ({})", process.name, process.pid))
}

fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit))
        .filter_map(|entry| parse(&fs::read_to_string(entry.path().join("stat")).ok()?))
        .collect()
}

/// `/proc/PID/stat`: pid (name) state ppid … flags … utime stime cutime cstime …
fn parse(stat: &str) -> Option<Process> {
    let (pid, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |n: usize| fields.get(n)?.parse::<u64>().ok();
    let own_ticks = number(11)? + number(12)?;
    Some(Process {
        pid: pid.parse().ok()?,
        parent: fields.get(1)?.parse().ok()?,
        kernel: number(6)? & KERNEL_THREAD != 0,
        name: name.to_owned(),
        own_ticks,
        total_ticks: own_ticks + number(13)? + number(14)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, total_ticks: u64) -> Process {
        Process { pid, parent, kernel: false, name: format!("p{pid}"), own_ticks: total_ticks, total_ticks }
    }

    fn counters(at: Instant, tasks: u64, steal: u64, processes: &[Process]) -> CpuCounters {
        CpuCounters { at, processors: Processors { tasks, steal }, processes: processes.to_vec() }
    }

    #[test]
    fn a_stat_line_is_parsed_with_any_process_name() {
        let line = "17 (a) b (c) S 4 17 17 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1 0 100 0 0";
        let read = parse(line).expect("well formed");
        assert_eq!((read.pid, read.parent, read.own_ticks, read.total_ticks), (17, 4, 110, 125));
        assert_eq!(read.name, "a) b (c");
        assert!(!read.kernel);
        assert!(
            parse("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 9 0 0 20 0 1 0 2 0 0").expect("too").kernel
        );
        assert_eq!(parse("17 (cut"), None);
    }

    #[test]
    fn the_first_line_of_the_processors_counts() {
        let stat = "cpu  100 20 30 4000 5 6 70 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(Processors::parse(stat), Processors { tasks: 150, steal: 8 });
    }

    #[test]
    fn foreign_and_own_processes_are_distinguished() {
        let (own_pid, start) = (std::process::id(), Instant::now());
        let (child, other) = (own_pid + 1, own_pid + 2);
        let before = counters(
            start,
            1000,
            10,
            &[process(own_pid, 1, 5), process(child, own_pid, 0), process(other, 1, 40)],
        );
        let end = start + Duration::from_secs(1);
        let after = counters(
            end,
            1200,
            13,
            &[process(own_pid, 1, 5), process(child, own_pid, 150), process(other, 1, 70)],
        );
        let found = before.until(&after);
        // 30 ticks of the other process, and 20 of no visible process.
        assert!((found.foreign - 0.5).abs() < 1e-9, "{found}");
        assert!((found.stolen - 0.03).abs() < 1e-9, "{found}");
        assert_eq!(found.top_process, Some(format!("p{other} ({other})")));
    }

    #[test]
    fn a_foreign_child_that_ended_meanwhile_is_counted_once() {
        let (start, shell) = (Instant::now(), u32::MAX - 1);
        let before = counters(start, 0, 0, &[process(shell, 1, 10), process(shell - 1, shell, 100)]);
        let after = counters(start + Duration::from_secs(1), 0, 0, &[process(shell, 1, 130)]);
        assert!((before.until(&after).foreign - 0.2).abs() < 1e-9);
    }

    #[test]
    fn a_disturbed_run_is_repeated_and_the_least_disturbed_one_counts() {
        let run = |shares: &[f64], tries| {
            let mut list = shares.iter().enumerate();
            let measurement = least_disturbed(tries, || {
                let (number, foreign) = list.next().expect("no more tries than allowed");
                (number, Disturbance { foreign: *foreign, ..Disturbance::default() })
            });
            (measurement.value, measurement.tries)
        };
        assert_eq!(run(&[0.05], 3), (0, 1));
        assert_eq!(run(&[0.9, 0.02], 3), (1, 2));
        assert_eq!(run(&[0.9, 0.5, 0.7], 3), (1, 3));
        assert_eq!(run(&[0.9], 1), (0, 1));
    }
}
