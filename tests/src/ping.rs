//! Runs `ping`, and evaluates replies: loss, round-trip times, and the longest gap between replies.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command},
    time::{Duration, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    percentile,
    testbed::{Host, Testbed},
};

/// A running `ping` that writes its output to a file.
pub struct Ping {
    child: Child,
    answers: PathBuf,
}

/// A reply.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Arrival time, seconds since 1970.
    pub at: f64,
    /// Round-trip time, ms.
    pub rtt_ms: f64,
    /// Number of the answered ping, from 1.
    pub number: u64,
}

/// The replies of a run.
#[derive(Clone, Debug)]
pub struct Pings {
    /// In order of arrival.
    pub answers: Vec<Answer>,
    /// Number of sent pings.
    pub sent: u64,
}

impl Ping {
    /// One ping every 10 ms for `seconds`.
    pub fn dense(testbed: &Testbed, from: Host, to: &str, seconds: u64) -> Self {
        Self::start(testbed, from, &["-i", "0.01", "-w", &seconds.to_string(), to])
    }

    /// `count` pings, one every 10 ms as far as the machine has time.
    pub fn dense_count(testbed: &Testbed, from: Host, to: &str, count: u32) -> Self {
        Self::start(testbed, from, &["-i", "0.01", "-c", &count.to_string(), to])
    }

    /// One ping every `every` for `seconds`.
    pub fn every(testbed: &Testbed, from: Host, every: Duration, to: &str, seconds: u32) -> Self {
        let interval = every.as_secs_f64().to_string();
        Self::start(testbed, from, &["-i", &interval, "-w", &seconds.to_string(), to])
    }

    /// One ping every 10 ms for `seconds`, with this TOS byte.
    pub fn dense_with_tos(testbed: &Testbed, from: Host, tos: &str, to: &str, seconds: u64) -> Self {
        Self::start(testbed, from, &["-Q", tos, "-i", "0.01", "-w", &seconds.to_string(), to])
    }

    /// One ping every 10 ms for `seconds`, through one interface.
    pub fn dense_through(testbed: &Testbed, from: Host, interface: &str, to: &str, seconds: u64) -> Self {
        Self::start(testbed, from, &["-I", interface, "-i", "0.01", "-w", &seconds.to_string(), to])
    }

    fn start(testbed: &Testbed, from: Host, args: &[&str]) -> Self {
        let mut command = testbed.command(from, "ping");
        command.args(["-n", "-D"]).args(args);
        Self::run(command, testbed.file("ping", from))
    }

    /// Runs a `ping -n -D` that writes its output to the file `answers`.
    pub fn run(mut command: Command, answers: PathBuf) -> Self {
        let file = File::create(&answers).unwrap_or_else(|error| panic!("{}: {error}", answers.display()));
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        Self { child: command.spawn().expect("ping runs"), answers }
    }

    /// Interrupts `ping`, and returns the replies so far.
    pub fn stop(self) -> Pings {
        // The process may have ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        self.finish()
    }

    /// Waits for `ping` to end.
    pub fn finish(mut self) -> Pings {
        self.child.wait().expect("our own child");
        parse(&fs::read_to_string(&self.answers).expect("its own file"))
    }
}

impl Drop for Ping {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends `count` pings, one every 100 ms, and waits for the end.
pub fn ping(testbed: &Testbed, from: Host, to: &str, count: u32) -> Pings {
    let limit = (count / 5 + 5).to_string();
    Ping::start(testbed, from, &["-i", "0.1", "-c", &count.to_string(), "-w", &limit, to]).finish()
}

/// Panics unless one of up to five pings is answered within a second.
pub fn reaches(testbed: &Testbed, from: Host, to: &str) {
    let once = || Ping::start(testbed, from, &["-c", "1", "-W", "1", to]).finish();
    let answered = (0..5).any(|_| !once().answers.is_empty());
    assert!(answered, "{from:?} does not reach {to}: none of five pings was answered");
}

impl Pings {
    /// The longest time between two moments in which a ping had no reply; the times before the first and
    /// after the last reply count. Between replies to two pings in a row `ping` may have sent nothing, as the
    /// machine had no time for it: there the round trip of the second counts at most.
    pub fn longest_gap(&self, from: SystemTime, to: SystemTime) -> Duration {
        let (from, to) = (unix(from), unix(to));
        let (mut last, mut last_number) = (from, None);
        let mut longest: f64 = 0.0;
        for Answer { at, rtt_ms, number } in
            self.answers.iter().filter(|answer| (from..to).contains(&answer.at))
        {
            let asked = if last_number == Some(number - 1) { rtt_ms / 1000.0 } else { f64::INFINITY };
            longest = longest.max((at - last).min(asked));
            (last, last_number) = (*at, Some(*number));
        }
        Duration::from_secs_f64(longest.max(to - last))
    }

    /// Number of unanswered pings before the last answered one.
    pub fn missing(&self) -> u64 {
        let last = self.answers.iter().map(|answer| answer.number).max().unwrap_or(self.sent);
        last.saturating_sub(self.answers.len() as u64)
    }

    /// Unanswered pings, percent.
    pub fn loss_pct(&self) -> f64 {
        100.0 * (1.0 - self.answers.len() as f64 / self.sent.max(1) as f64)
    }

    /// Number of unanswered pings, including those at the end.
    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.answers.len() as u64)
    }

    /// Median of the round-trip times, ms.
    pub fn median_rtt_ms(&self) -> f64 {
        self.rtt_ms(50)
    }

    /// Percentile of the round-trip times, ms.
    pub fn rtt_ms(&self, percent: usize) -> f64 {
        let mut all: Vec<f64> = self.answers.iter().map(|answer| answer.rtt_ms).collect();
        all.sort_by(f64::total_cmp);
        percentile(&all, percent)
    }
}

fn unix(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

fn parse(text: &str) -> Pings {
    let answers = text.lines().filter_map(answer).collect();
    let sent = text.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
    Pings { answers, sent: sent.unwrap_or_else(|| panic!("ping printed no summary:\n{text}")) }
}

/// `[1700000000.123456] 64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=25.1 ms`
fn answer(line: &str) -> Option<Answer> {
    // A duplicated reply counts once.
    if line.contains("(DUP!)") {
        return None;
    }
    let (at, rest) = line.strip_prefix('[')?.split_once(']')?;
    let rtt = rest.split_once("time=")?.1.split_once(" ms")?.0;
    let number = rest.split_once("icmp_seq=")?.1.split_once(' ')?.0;
    Some(Answer { at: at.parse().ok()?, rtt_ms: rtt.parse().ok()?, number: number.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_includes_the_time_before_the_first_and_after_the_last_reply() {
        let text = "[100.5] 64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=25.5 ms\n\
                    [100.6] 64 bytes from 10.0.0.1: icmp_seq=2 ttl=64 time=27.5 ms\n\
                    [100.7] From 10.0.0.2 icmp_seq=3 Destination Host Unreachable\n\
                    3 packets transmitted, 2 received, 33% packet loss, time 11ms\n";
        let pings = parse(text);
        let at = |seconds: f64| SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
        let near = |gap: Duration, seconds: f64| (gap.as_secs_f64() - seconds).abs() < 1e-6;
        assert_eq!((pings.answers.len(), pings.sent), (2, 3));
        assert!(near(pings.longest_gap(at(100.4), at(100.65)), 0.1));
        assert!(near(pings.longest_gap(at(100.4), at(101.6)), 1.0));
        assert!(near(pings.longest_gap(at(100.0), at(100.6)), 0.5));
        assert_eq!(pings.missing(), 0, "ping 3 may have been lost, or ping may have ended before its reply");
        assert!((pings.median_rtt_ms() - 25.5).abs() < 1e-9);
        assert!((pings.loss_pct() - 33.333).abs() < 0.01);
    }

    #[test]
    fn time_in_which_ping_sent_nothing_is_no_gap() {
        let text = "[100.50] 64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=25.0 ms\n\
                    [100.80] 64 bytes from 10.0.0.1: icmp_seq=2 ttl=64 time=27.0 ms\n\
                    [101.00] 64 bytes from 10.0.0.1: icmp_seq=3 ttl=64 time=190.0 ms\n\
                    [101.15] 64 bytes from 10.0.0.1: icmp_seq=5 ttl=64 time=25.0 ms\n\
                    5 packets transmitted, 4 received, 20% packet loss, time 11ms\n";
        let pings = parse(text);
        let at = |seconds: f64| SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds);
        let gap = |from, to| (pings.longest_gap(at(from), at(to)).as_secs_f64() * 1000.0).round();
        assert_eq!(gap(100.49, 100.81), 27.0, "ping 2 was answered at once, and none was sent before");
        assert_eq!(gap(100.49, 101.01), 190.0, "ping 3 waited");
        assert_eq!(gap(101.0, 101.16), 150.0, "ping 4 was lost");
    }
}
