//! Parses the outputs of iperf3 and ping.

use std::{
    fs::File,
    io::Read,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use mpvpn_lab::LabError;

use super::TCP_START_UP;

/// Reads the lines that a program appends to a file.
pub(super) struct TailReader {
    file: File,
    partial: Vec<u8>,
}

impl TailReader {
    pub(super) fn open(path: &Path) -> Result<Self, LabError> {
        let file = File::open(path).map_err(LabError::io(format!("open {}", path.display())))?;
        Ok(Self { file, partial: Vec::new() })
    }

    /// The complete lines since the last call.
    fn lines(&mut self) -> Vec<String> {
        // After an error the next call continues at the same position.
        let _ = self.file.read_to_end(&mut self.partial);
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let rest = self.partial.split_off(end + 1);
        let text = std::mem::replace(&mut self.partial, rest);
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }
}

/// The goodput in one interval of iperf3.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    /// Since iperf3's start.
    from: Duration,
    to: Duration,
    mbps: f64,
}

/// The goodput over time, as the receiver of iperf3 reports it.
#[derive(Clone, Debug, Default)]
pub(super) struct Goodput {
    intervals: Vec<Interval>,
    /// The start time of iperf3. A line is read after the end of its interval, so the earliest estimate is
    /// the best.
    time_zero: Option<Instant>,
    /// The mean of the whole run, as iperf3 reports it, in Mbit/s.
    pub(super) whole_mbps: Option<f64>,
    /// Retransmitted segments.
    pub(super) retransmits: Option<u64>,
}

impl Goodput {
    /// Parses the new lines of `output`.
    pub(super) fn read(&mut self, output: &mut TailReader) {
        let now = Instant::now();
        for line in output.lines() {
            self.parse_line(&line, now);
        }
    }

    /// Parses lines such as `[SUM]   0.00-0.10   sec  2.27 MBytes  190000 Kbits/sec`; the last two end with
    /// `sender` and `receiver`.
    fn parse_line(&mut self, line: &str, now: Instant) {
        let Some(line) = line.strip_prefix("[SUM]") else { return };
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some((from, to)) = words.first().and_then(|word| word.split_once('-')) else { return };
        let time = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
        let rate = words.iter().position(|word| *word == "Kbits/sec").filter(|at| *at > 0);
        let kbps = rate.and_then(|at| words[at - 1].parse::<f64>().ok());
        let (Some(from), Some(to), Some(kbps)) = (time(from), time(to), kbps) else { return };
        match words.last() {
            Some(&"receiver") => self.whole_mbps = Some(kbps / 1e3),
            Some(&"sender") => self.retransmits = words[words.len() - 2].parse().ok(),
            _ => {
                let time_zero = now.checked_sub(to);
                self.time_zero = self.time_zero.into_iter().chain(time_zero).min();
                self.intervals.push(Interval { from, to, mbps: kbps / 1e3 });
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }

    /// The mean after [`TCP_START_UP`], in Mbit/s.
    pub(super) fn mean_after_start_up(&self) -> Option<f64> {
        mean(self.intervals.iter().filter(|interval| interval.from >= TCP_START_UP))
    }

    /// The mean of the intervals between two times, in Mbit/s.
    pub(super) fn between(&self, from: Instant, to: Instant) -> Option<f64> {
        let time_zero = self.time_zero?;
        mean(self.intervals.iter().filter(|i| time_zero + i.from >= from && time_zero + i.to <= to))
    }

    /// The rate over time: the middle of each interval, and its rate in Mbit/s.
    pub(super) fn curve(&self) -> Vec<(Instant, f64)> {
        let Some(time_zero) = self.time_zero else { return Vec::new() };
        self.intervals.iter().map(|i| (time_zero + (i.from + i.to) / 2, i.mbps)).collect()
    }
}

fn mean<'a>(intervals: impl Iterator<Item = &'a Interval>) -> Option<f64> {
    let (mut megabits, mut seconds) = (0.0, 0.0);
    for interval in intervals {
        let length = interval.to.saturating_sub(interval.from).as_secs_f64();
        megabits += interval.mbps * length;
        seconds += length;
    }
    (seconds > 0.0).then(|| megabits / seconds)
}

/// A reply to a ping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reply {
    /// When it arrived.
    pub(super) at: Instant,
    pub(super) rtt_ms: f64,
    sequence: u64,
}

/// The replies to a series of pings.
#[derive(Clone, Debug, Default)]
pub(super) struct Pings {
    pub(super) replies: Vec<Reply>,
}

impl Pings {
    /// Parses the output of `ping -D`; `now` and `wall_clock` are the same moment on both clocks.
    pub(super) fn parse(text: &str, now: Instant, wall_clock: SystemTime) -> Self {
        let wall_clock = wall_clock.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut replies: Vec<Reply> = text.lines().filter_map(|line| reply(line, now, wall_clock)).collect();
        replies.sort_by_key(|reply| reply.at);
        Self { replies }
    }

    /// The longest time without a reply that began before `to` and ended after `from`.
    pub(super) fn longest_gap(&self, from: Instant, to: Instant) -> Option<Duration> {
        let pairs = self.replies.windows(2).filter(|pair| pair[1].at > from && pair[0].at < to);
        pairs.map(|pair| pair[1].at - pair[0].at).max()
    }

    /// The median round-trip time of the replies between two times, in ms.
    pub(super) fn median_rtt(&self, from: Instant, to: Instant) -> Option<f64> {
        let within = self.replies.iter().filter(|reply| reply.at >= from && reply.at <= to);
        let mut times: Vec<f64> = within.map(|reply| reply.rtt_ms).collect();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied()
    }

    /// The number of pings without a reply and the number of pings sent, up to the last reply.
    pub(super) fn lost(&self) -> (u64, u64) {
        let sent = self.replies.iter().map(|reply| reply.sequence).max().unwrap_or(0);
        (sent.saturating_sub(self.replies.len() as u64), sent)
    }
}

/// Parses a line such as `[1700000000.123456] 64 bytes from 10.0.0.1: icmp_seq=7 ttl=64 time=25.3 ms`.
fn reply(line: &str, now: Instant, wall_clock: Duration) -> Option<Reply> {
    if line.contains("DUP!") {
        return None;
    }
    let (stamp, rest) = line.strip_prefix('[')?.split_once(']')?;
    let stamp = Duration::try_from_secs_f64(stamp.parse().ok()?).ok()?;
    let value = |key: &str| rest.split_whitespace().find_map(|word| word.strip_prefix(key));
    let at = match stamp.checked_sub(wall_clock) {
        Some(later) => now.checked_add(later)?,
        None => now.checked_sub(wall_clock - stamp)?,
    };
    Some(Reply { at, rtt_ms: value("time=")?.parse().ok()?, sequence: value("icmp_seq=")?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sums_of_iperf_are_read_and_single_flows_are_not() {
        let (mut goodput, now) = (Goodput::default(), Instant::now() + Duration::from_secs(60));
        for line in [
            "[  5]   0.00-0.10   sec   128 KBytes  10486 Kbits/sec",
            "[SUM]   0.00-1.00   sec  2.27 MBytes  100000 Kbits/sec",
            "[SUM]   2.00-3.00   sec  2.27 MBytes  180000 Kbits/sec",
            "[SUM]   3.00-4.00   sec  2.27 MBytes  190000 Kbits/sec",
            "[SUM]   0.00-4.03   sec  87 MBytes  181000 Kbits/sec  123             sender",
            "[SUM]   0.00-4.00   sec  86 MBytes  180500 Kbits/sec                  receiver",
            "[SUM]   0.00-",
        ] {
            goodput.parse_line(line, now);
        }
        assert_eq!(goodput.mean_after_start_up(), Some(185.0));
        assert_eq!((goodput.whole_mbps, goodput.retransmits), (Some(180.5), Some(123)));
        let time_zero = now - Duration::from_secs(4);
        assert_eq!(goodput.curve()[0], (time_zero + Duration::from_millis(500), 100.0));
        assert_eq!(goodput.between(time_zero, time_zero + Duration::from_secs(3)), Some(140.0));
    }

    #[test]
    fn gaps_and_losses_of_pings_are_found() {
        let now = Instant::now() + Duration::from_secs(60);
        let wall_clock = UNIX_EPOCH + Duration::from_secs(1000);
        let line = |at: f64, sequence: u32| {
            format!("[{at:.6}] 64 bytes from 10.0.0.1: icmp_seq={sequence} ttl=64 time=25.5 ms\n")
        };
        let text =
            line(999.0, 1) + &line(999.01, 2) + "[999.02] no answer yet for icmp_seq=3\n" + &line(999.05, 5);
        let pings = Pings::parse(&text, now, wall_clock);
        let at = |ms: u64| now - Duration::from_secs(1) + Duration::from_millis(ms);
        assert_eq!(pings.lost(), (2, 5));
        assert_eq!(pings.median_rtt(at(0), at(100)), Some(25.5));
        let gap = pings.longest_gap(at(15), at(20)).unwrap().as_secs_f64();
        assert!((gap - 0.04).abs() < 1e-4, "{gap}");
        assert_eq!(pings.longest_gap(at(60), at(70)), None);
    }

    proptest! {
        #[test]
        fn any_output_is_parsed_without_panic(line in ".{0,80}", at in "\\PC{0,20}") {
            let (mut goodput, now) = (Goodput::default(), Instant::now());
            goodput.parse_line(&line, now);
            goodput.parse_line(&format!("[SUM] {at}-{at} sec 1 MBytes 12 Kbits/sec"), now);
            Pings::parse(&format!("{line}\n[{at}] icmp_seq=1 time=2"), now, SystemTime::now());
        }
    }
}
