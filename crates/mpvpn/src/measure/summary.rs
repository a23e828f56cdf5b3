//! The closing sentences of a measurement.
//!
//! In: the results. Out: sentences with measured figures only.

use mpvpn_status::measure::{CutResult, HoursResult, MeasureReport, Route, TcpRow};

use super::markdown::megabits;

/// The results in a few sentences and a newline; empty if nothing of them was measured.
pub(crate) fn summary(report: &MeasureReport) -> String {
    let parts = [
        rates(report),
        delays(report),
        report.cut.as_ref().map(without_link),
        report.hours.as_ref().map(over_hours),
    ];
    let sentences: Vec<_> = parts.into_iter().flatten().collect();
    if sentences.is_empty() { String::new() } else { sentences.join(" ") + "\n" }
}

/// The TCP loads over one link, or all if it is empty, with the most connections.
fn loads<'a>(report: &'a MeasureReport, link: &'a str) -> impl Iterator<Item = &'a TcpRow> {
    let flows = report.tcp.iter().map(|row| row.flows).max().unwrap_or_default();
    report.tcp.iter().filter(move |row| row.link == link && row.flows == flows)
}

/// The rates over all links, and how many times those of the better link alone.
fn rates(report: &MeasureReport) -> Option<String> {
    let (subject, set) = match &report.links[..] {
        [only] => (only.name.clone(), only.name.as_str()),
        [_, _] => ("Both links together".to_owned(), ""),
        all => (format!("All {} links together", all.len()), ""),
    };
    let part = |row: &TcpRow| {
        let alone = report.links.iter().flat_map(|link| loads(report, &link.name));
        let alone = alone.filter(|other| other.direction == row.direction && other.link != row.link);
        let best = alone.max_by(|a, b| a.bits_per_second.total_cmp(&b.bits_per_second));
        let times = best.map_or(String::new(), |best| {
            format!(" ({:.2} times {} alone)", row.bits_per_second / best.bits_per_second.max(1.0), best.link)
        });
        format!("{} Mbit/s {}{times}", megabits(row.bits_per_second), row.direction)
    };
    let parts: Vec<_> = loads(report, set).map(part).collect();
    (!parts.is_empty()).then(|| format!("{subject} carried {}.", parts.join(" and ")))
}

/// How much longer round trips are under load, over each link: in the direction in which it is more.
fn delays(report: &MeasureReport) -> Option<String> {
    let added = |link: &str| {
        let idle =
            report.idle.iter().find(|row| row.route != Route::Direct && row.link == link)?.latency.rtt_ms?;
        let loaded = loads(report, link).filter_map(|row| row.loaded.rtt_ms).map(|rtt| rtt.p50);
        loaded.reduce(f64::max).map(|loaded| (loaded - idle.p50).max(0.0))
    };
    let links = report.links.iter();
    let parts: Vec<_> =
        links.filter_map(|link| Some(format!("{:.0} ms on {}", added(&link.name)?, link.name))).collect();
    (!parts.is_empty()).then(|| format!("Load adds delay: {}.", parts.join(" and ")))
}

fn without_link(cut: &CutResult) -> String {
    format!(
        "While {} was not used, a download carried {} Mbit/s, before {} Mbit/s; the longest time without a byte was {:.0} ms.",
        cut.link,
        megabits(cut.during_bits_per_second),
        megabits(cut.before_bits_per_second),
        cut.longest_silence_ms
    )
}

fn over_hours(hours: &HoursResult) -> String {
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let slowest = match &hours.series[..] {
        [] => String::new(),
        _ => format!(", in its slowest minute {} Mbit/s", megabits(hours.lowest_minute_bits_per_second)),
    };
    format!(
        "For {:.2} h a download carried {} Mbit/s{slowest}; at its end the client used {:.1} MiB of memory and the server \
         {:.1} MiB.",
        hours.hours,
        megabits(hours.bits_per_second),
        mebibytes(hours.client.end),
        mebibytes(hours.server.end)
    )
}

#[cfg(test)]
mod tests {
    use mpvpn_status::measure::{
        Latency, LatencyRow, LoadDirection, MeasuredLink, MemoryFigures, RatePoint, RttFigures,
    };

    use super::*;

    fn latency(p50: f64) -> Latency {
        let rtt_ms = Some(RttFigures { p50, ..RttFigures::default() });
        Latency { rtt_ms, ..Latency::default() }
    }

    /// A report of links with rates down (Mbit/s) and round-trip times idle and loaded (ms); the empty name
    /// is that of all links.
    fn report(rows: &[(&str, f64, f64, f64)]) -> MeasureReport {
        let row = |(link, rate, _, loaded): &(&str, f64, f64, f64), flows, direction| TcpRow {
            link: (*link).to_owned(),
            flows,
            direction,
            bits_per_second: rate * 1e6 / f64::from(9 - flows),
            loaded: latency(*loaded),
            ..TcpRow::default()
        };
        let loads =
            rows.iter().flat_map(|set| [row(set, 1, LoadDirection::Down), row(set, 8, LoadDirection::Down)]);
        let idle = rows.iter().map(|(link, _, idle, _)| LatencyRow {
            route: if link.is_empty() { Route::All } else { Route::Link },
            link: (*link).to_owned(),
            latency: latency(*idle),
        });
        let names = rows.iter().map(|row| row.0).filter(|name| !name.is_empty());
        MeasureReport {
            links: names.map(|name| MeasuredLink { name: name.into(), ..MeasuredLink::default() }).collect(),
            idle: idle.collect(),
            tcp: loads.collect(),
            ..MeasureReport::default()
        }
    }

    #[test]
    fn links_together_are_compared_with_the_better_one() {
        let two = report(&[("eth1", 100.0, 25.0, 28.2), ("eth2", 38.0, 40.0, 52.0), ("", 131.0, 25.0, 30.0)]);
        assert_eq!(
            summary(&two),
            "Both links together carried 131.0 Mbit/s down (1.31 times eth1 alone). Load adds delay: 3 ms on eth1 and \
             12 ms on eth2.\n"
        );
        let mut both_ways = two.clone();
        let up = two.tcp.iter().map(|row| TcpRow { direction: LoadDirection::Up, ..row.clone() });
        both_ways.tcp.extend(up);
        let text = summary(&both_ways);
        let rates = "131.0 Mbit/s down (1.31 times eth1 alone) and 131.0 Mbit/s up (1.31 times eth1 alone).";
        assert!(text.contains(rates), "{text}");
    }

    #[test]
    fn one_link_is_compared_with_nothing() {
        let text = summary(&report(&[("eth1", 92.1, 25.0, 24.0)]));
        assert_eq!(text, "eth1 carried 92.1 Mbit/s down. Load adds delay: 0 ms on eth1.\n");
    }

    #[test]
    fn parts_that_were_not_measured_are_left_out() {
        assert_eq!(summary(&MeasureReport::default()), "");
        let interrupted = report(&[("eth1", 100.0, 25.0, 28.0), ("eth2", 38.0, 40.0, 52.0)]);
        assert_eq!(summary(&interrupted), "Load adds delay: 3 ms on eth1 and 12 ms on eth2.\n");
        let cut = CutResult {
            link: "eth1".into(),
            before_bits_per_second: 80e6,
            during_bits_per_second: 40e6,
            longest_silence_ms: 48.0,
            ..CutResult::default()
        };
        let text = summary(&MeasureReport { cut: Some(cut), ..MeasureReport::default() });
        let expected = "While eth1 was not used, a download carried 40.0 Mbit/s, before 80.0 Mbit/s; the longest time without a \
                        byte was 48 ms.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn hours_say_the_slowest_minute_and_the_memory_at_the_end() {
        let memory = |mebibytes: u64| MemoryFigures { end: mebibytes << 20, ..MemoryFigures::default() };
        let hours = HoursResult {
            hours: 1.0,
            bits_per_second: 89e6,
            lowest_minute_bits_per_second: 88e6,
            client: memory(22),
            server: memory(20),
            series: vec![RatePoint::default()],
            ..HoursResult::default()
        };
        let text = |hours| summary(&MeasureReport { hours: Some(hours), ..MeasureReport::default() });
        let memory = "at its end the client used 22.0 MiB of memory and the server 20.0 MiB.\n";
        let slowest = ", in its slowest minute 88.0 Mbit/s";
        let expected = format!("For 1.00 h a download carried 89.0 Mbit/s{slowest}; {memory}");
        assert_eq!(text(hours.clone()), expected);
        let interrupted = HoursResult { series: Vec::new(), ..hours };
        assert_eq!(text(interrupted), format!("For 1.00 h a download carried 89.0 Mbit/s; {memory}"));
    }
}
