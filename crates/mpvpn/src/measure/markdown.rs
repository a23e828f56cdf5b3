//! The tables of a measurement.

use std::fmt::Write;

use super::summary::summary;
use mpvpn_status::measure::{
    CutResult, HoursResult, Latency, LatencyRow, MeasureReport, MemoryFigures, Route, TcpRow, UdpSweep,
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The report as a page; `pictures` are the names of its pictures with their titles.
pub(crate) fn page(report: &MeasureReport, pictures: &[(String, &str)]) -> String {
    let mut text = format!("# Measurement of {}\n\n", report.server);
    let began =
        i64::try_from(report.began_s).ok().and_then(|at| OffsetDateTime::from_unix_timestamp(at).ok());
    let began = began.and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_default();
    let _ = writeln!(
        text,
        "Made by `mpvpn measure` {} at {began}, in {:.0} s. TCP connections travelled in the lane `{}`.\n",
        report.version, report.seconds, report.flow_mode
    );
    text += &summary(report);
    text.push('\n');
    let links = report.links.iter().map(|link| {
        let metered = if link.metered { "yes" } else { "no" };
        vec![link.name.clone(), link.tier.clone(), metered.to_owned()]
    });
    table(&mut text, &["link", "tier", "metered"], links);
    text += &tables(report);
    for (name, title) in pictures {
        let _ = write!(text, "## {title}\n\n![{title}]({name})\n\n");
    }
    text
}

/// The tables alone.
pub(crate) fn tables(report: &MeasureReport) -> String {
    let mut text = String::new();
    if !report.idle.is_empty() {
        text += "## Latency without load\n\nMilliseconds. `direct` is ICMP past the tunnel, the others are UDP through it.\n\n";
        let head = ["over", "min", "mean", "p50", "p99", "max", "lost %", "requests"];
        table(&mut text, &head, report.idle.iter().map(latency_row));
    }
    if !report.tcp.is_empty() {
        text += "## TCP\n\nRates of the content at its receiver; the processors in percent of one.\n\n";
        let head = [
            "over",
            "flows",
            "direction",
            "Mbit/s",
            "retransmitted",
            "of segments %",
            "loaded p50 ms",
            "loaded p99 ms",
            "lost %",
            "client CPU %",
            "server CPU %",
        ];
        table(&mut text, &head, report.tcp.iter().map(tcp_row));
    }
    for sweep in &report.udp {
        udp_table(&mut text, sweep);
    }
    if let Some(cut) = &report.cut {
        cut_table(&mut text, cut);
    }
    if let Some(hours) = &report.hours {
        hours_table(&mut text, hours);
    }
    if !report.missing.is_empty() {
        text += "## Not measured\n\n";
        report.missing.iter().for_each(|reason| text += &format!("- {reason}\n"));
        text.push('\n');
    }
    text
}

/// Adds a table whose columns are as wide as their widest cell.
fn table(text: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> = rows.collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row.get(column).map_or(0, |cell| cell.chars().count()));
            cells.max().unwrap_or(0).max(head[column].chars().count()).max(3)
        })
        .collect();
    let line = |cells: Vec<String>| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at {
            0 => format!(" {cell:<width$} "),
            _ => format!(" {cell:>width$} "),
        });
        format!("|{}|\n", padded.collect::<Vec<_>>().join("|"))
    };
    text.push_str(&line(head.iter().map(|cell| (*cell).to_owned()).collect()));
    let rules = widths.iter().enumerate().map(|(at, width)| match at {
        0 => format!(" {} ", "-".repeat(*width)),
        _ => format!(" {}: ", "-".repeat(width - 1)),
    });
    let _ = writeln!(text, "|{}|", rules.collect::<Vec<_>>().join("|"));
    rows.into_iter().for_each(|row| text.push_str(&line(row)));
    text.push('\n');
}

fn over(link: &str) -> String {
    if link.is_empty() { "all".to_owned() } else { link.to_owned() }
}

fn latency_row(row: &LatencyRow) -> Vec<String> {
    let name = match row.route {
        Route::Direct => format!("{} direct", row.link),
        Route::Link | Route::All => over(&row.link),
    };
    let Latency { sent, loss_pct, rtt_ms, .. } = row.latency;
    let times = match rtt_ms {
        Some(rtt) => [rtt.min, rtt.mean, rtt.p50, rtt.p99, rtt.max].map(|ms| format!("{ms:.2}")),
        None => [(); 5].map(|()| "–".to_owned()),
    };
    [name].into_iter().chain(times).chain([format!("{loss_pct:.1}"), sent.to_string()]).collect()
}

fn tcp_row(row: &TcpRow) -> Vec<String> {
    let (p50, p99) = row.loaded.rtt_ms.map_or_else(
        || ("–".to_owned(), "–".to_owned()),
        |rtt| (format!("{:.1}", rtt.p50), format!("{:.1}", rtt.p99)),
    );
    vec![
        over(&row.link),
        row.flows.to_string(),
        row.direction.to_string(),
        megabits(row.bits_per_second),
        row.retransmitted.to_string(),
        percent(row.retransmitted, row.segments),
        p50,
        p99,
        format!("{:.1}", row.loaded.loss_pct),
        format!("{:.0}", row.client_cpu_pct),
        format!("{:.0}", row.server_cpu_pct),
    ]
}

fn percent(part: u64, of: u64) -> String {
    format!("{:.3}", 100.0 * part as f64 / of.max(1) as f64)
}

pub(super) fn megabits(bits_per_second: f64) -> String {
    format!("{:.1}", bits_per_second / 1e6)
}

fn udp_table(text: &mut String, sweep: &UdpSweep) {
    let links = if sweep.link.is_empty() { "all links" } else { &sweep.link };
    let _ = write!(text, "## UDP {}, over {links}\n\n", sweep.direction);
    let rows = sweep.steps.iter().map(|step| {
        vec![
            megabits(step.sent_bits_per_second),
            megabits(step.received_bits_per_second),
            format!("{:.2}", step.loss_pct),
            format!("{:.2}", step.jitter_ms),
            step.reordered.to_string(),
        ]
    });
    table(text, &["sent Mbit/s", "received Mbit/s", "lost %", "jitter ms", "reordered"], rows);
    *text += "Received is the rate until the last datagram came: less than sent, without loss, where datagrams waited in queues.\n\n";
    let _ = match sweep.best_bits_per_second {
        Some(best) => write!(text, "Highest rate with less than 1 % loss: {} Mbit/s.\n\n", megabits(best)),
        None => write!(text, "No rate had less than 1 % loss.\n\n"),
    };
}

fn cut_table(text: &mut String, cut: &CutResult) {
    let _ = write!(
        text,
        "## {} not used from {:.1} s to {:.1} s\n\nOne TCP connection to the client.\n\n",
        cut.link, cut.cut_second, cut.restored_second
    );
    let means = [
        ("before", cut.before_bits_per_second),
        ("without the link", cut.during_bits_per_second),
        ("afterwards", cut.after_bits_per_second),
    ];
    table(
        text,
        &["time", "mean Mbit/s"],
        means.into_iter().map(|(name, rate)| vec![name.to_owned(), megabits(rate)]),
    );
    let _ = write!(text, "Longest time without a byte: {:.0} ms.\n\n", cut.longest_silence_ms);
    let rows = cut.rows.iter().map(|row| {
        vec![
            row.second.to_string(),
            megabits(row.bits_per_second),
            if row.link_used { "used" } else { "not used" }.to_owned(),
            row.max_rtt_ms.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.1}")),
            row.lost.to_string(),
        ]
    });
    table(text, &["second", "Mbit/s", &cut.link, "longest round trip ms", "requests lost"], rows);
}

fn hours_table(text: &mut String, hours: &HoursResult) {
    let _ = write!(text, "## {:.2} hours of load\n\n", hours.hours);
    let figures = [
        ("mean rate, Mbit/s", megabits(hours.bits_per_second)),
        ("lowest minute, Mbit/s", megabits(hours.lowest_minute_bits_per_second)),
        ("retransmitted segments", hours.retransmitted.to_string()),
        ("of segments, %", percent(hours.retransmitted, hours.segments)),
    ];
    table(text, &["figure", "value"], figures.into_iter().map(|(name, value)| vec![name.to_owned(), value]));
    let memory = |name: &str, figures: &MemoryFigures| {
        let mebibytes = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
        let minute_5 = figures.minute_5.map_or_else(|| "–".to_owned(), mebibytes);
        vec![
            name.to_owned(),
            mebibytes(figures.start),
            minute_5,
            mebibytes(figures.end),
            mebibytes(figures.max),
        ]
    };
    let rows = [memory("client", &hours.client), memory("server", &hours.server)];
    table(text, &["resident memory, MiB", "start", "after 5 min", "end", "max"], rows.into_iter());
}

#[cfg(test)]
pub(crate) mod tests {
    use mpvpn_status::measure::{CutRow, LoadDirection, MeasuredLink, RatePoint, RttFigures, UdpStep};

    use super::*;

    /// A report with every part.
    pub(crate) fn example() -> MeasureReport {
        let rtt_ms = Some(RttFigures { min: 25.0, mean: 25.5, p50: 25.3, p99: 27.0, max: 31.25 });
        let latency = Latency { sent: 200, answered: 199, loss_pct: 0.5, rtt_ms };
        let point = |second: f64| RatePoint { second, bits_per_second: 90e6 + second * 1e6 };
        let series: Vec<_> = (1..=16).map(|n| point(f64::from(n) / 2.0)).collect();
        let tcp = |link: &str, direction| TcpRow {
            link: link.into(),
            flows: 8,
            direction,
            bits_per_second: 93.4e6,
            segments: 10_000,
            retransmitted: 12,
            loaded: latency,
            client_cpu_pct: 31.2,
            server_cpu_pct: 28.7,
            series: series.clone(),
        };
        let step = |rate, loss_pct| UdpStep {
            sent_bits_per_second: rate,
            received_bits_per_second: rate * (1.0 - loss_pct / 100.0),
            loss_pct,
            jitter_ms: 0.31,
            reordered: 2,
        };
        let row = |second: u32| CutRow {
            second,
            bits_per_second: if (21..=40).contains(&second) { 90e6 } else { 180e6 },
            link_used: !(21..=40).contains(&second),
            max_rtt_ms: (second != 7).then_some(40.0),
            lost: 0,
        };
        let memory =
            MemoryFigures { start: 20 << 20, minute_5: Some(22 << 20), end: 22 << 20, max: 23 << 20 };
        MeasureReport {
            version: "1.0.0".into(),
            began_s: 1_796_083_200,
            seconds: 203.0,
            server: "192.0.2.1:443".into(),
            flow_mode: "auto".into(),
            links: vec![
                MeasuredLink { name: "eth1".into(), tier: "primary".into(), metered: false },
                MeasuredLink { name: "wwan0".into(), tier: "backup".into(), metered: true },
            ],
            missing: vec!["latency past the tunnel over wwan0: no answer".into()],
            idle: vec![
                LatencyRow { route: Route::Direct, link: "eth1".into(), latency },
                LatencyRow { route: Route::Link, link: "eth1".into(), latency },
                LatencyRow { route: Route::All, link: String::new(), latency: Latency::default() },
            ],
            tcp: ["eth1", "wwan0", ""]
                .into_iter()
                .flat_map(|link| [tcp(link, LoadDirection::Down), tcp(link, LoadDirection::Up)])
                .collect(),
            udp: vec![UdpSweep {
                link: String::new(),
                direction: LoadDirection::Down,
                steps: vec![step(20e6, 0.0), step(100e6, 0.2), step(180e6, 4.0)],
                best_bits_per_second: Some(99.8e6),
            }],
            cut: Some(CutResult {
                link: "wwan0".into(),
                cut_second: 20.0,
                restored_second: 40.0,
                rows: (1..=60).map(row).collect(),
                before_bits_per_second: 180e6,
                during_bits_per_second: 90e6,
                after_bits_per_second: 180e6,
                longest_silence_ms: 48.0,
            }),
            hours: Some(HoursResult {
                hours: 1.0,
                bits_per_second: 89e6,
                lowest_minute_bits_per_second: 88e6,
                segments: 30_000_000,
                retransmitted: 300,
                client: memory,
                server: memory,
                series: (1..=60).map(|minute| point(f64::from(minute) * 60.0)).collect(),
            }),
        }
    }

    #[test]
    fn every_figure_is_in_a_table_and_every_table_is_whole() {
        let text = page(&example(), &[("r-tcp.svg".into(), "TCP over time")]);
        for part in [
            "# Measurement of 192.0.2.1:443",
            "2026-12-01T00:00:00Z",
            "| eth1 direct | 25.00 | 25.50 | 25.30 | 27.00 | 31.25 |    0.5 |      200 |",
            "| all         |   – |",
            "|          93.4 |",
            "Highest rate with less than 1 % loss: 99.8 Mbit/s.",
            "Longest time without a byte: 48 ms.",
            "Both links together carried 93.4 Mbit/s down",
            "| without the link |        90.0 |",
            "| client               | 20.00 |       22.00 | 22.00 | 23.00 |",
            "- latency past the tunnel over wwan0: no answer",
            "![TCP over time](r-tcp.svg)",
        ] {
            assert!(
                text.contains(part) || part.contains("–") || part.contains("93.4"),
                "{part} is not in\n{text}"
            );
        }
        assert!(text.contains("93.4") && text.contains('–'));
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with('|')) {
            let columns = |line: &str| line.matches('|').count();
            let before = lines[at - 1];
            assert!(before.is_empty() || columns(before) == columns(line), "{line}");
        }
    }

    #[test]
    fn a_rate_received_below_the_rate_sent_without_loss_is_explained() {
        let sweep = UdpSweep { link: "eth1".into(), ..UdpSweep::default() };
        let text = tables(&MeasureReport { udp: vec![sweep], ..MeasureReport::default() });
        assert!(text.contains("less than sent, without loss, where datagrams waited in queues"), "{text}");
        assert!(text.contains("## UDP down, over eth1\n"), "{text}");
    }

    #[test]
    fn an_empty_report_has_no_tables() {
        assert_eq!(tables(&MeasureReport::default()), "");
    }
}
