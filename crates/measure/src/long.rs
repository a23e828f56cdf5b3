//! The long parts of a measurement: a link that is not used for a while, and a load over hours.

use std::{
    io,
    time::{Duration, Instant},
};

use mpvpn_os::usage;
use mpvpn_status::measure::{
    CutResult, CutRow, HoursResult, LoadDirection, Order, RatePoint, ResponderReport,
};

use super::{
    echo_probe::EchoProbe,
    plan::{CUT_SECONDS, HOURS_FLOWS, LOADED_INTERVAL},
    run::{Meter, Run},
    tcp_load::TcpLoad,
};

impl Run<'_> {
    /// One TCP connection over all links, while one link is not used from second 20 to 40.
    pub(super) fn cut(&mut self) -> io::Result<()> {
        let Some(link) = self.plan.cut.clone() else { return Ok(()) };
        self.use_links("")?;
        let [cut_at, restored_at, end] = CUT_SECONDS;
        self.step(format!("TCP down, 1 flow; {link} is not used from {cut_at} s to {restored_at} s"));
        let load = TcpLoad::start(&self.responder.target, LoadDirection::Down, 1, None)?;
        let probe = EchoProbe::start(&self.datagrams.target, LOADED_INTERVAL, None)?;
        let began = Instant::now();
        let mut result = CutResult { link: link.clone(), ..CutResult::default() };
        let mut before = 0;
        for second in 1..=end {
            let change = match second - 1 {
                at if at == cut_at => Some(true),
                at if at == restored_at => Some(false),
                _ => None,
            };
            if let Some(is_cut) = change {
                let excluded = if is_cut { vec![link.clone()] } else { Vec::new() };
                self.lease.change(|request| request.exclude = excluded).map_err(io::Error::other)?;
                let at = began.elapsed().as_secs_f64();
                if is_cut { result.cut_second = at } else { result.restored_second = at }
            }
            if !self.interrupt.sleep_until(began + Duration::from_secs(second.into())) {
                break;
            }
            let bytes = load.bytes();
            let row = CutRow {
                second,
                bits_per_second: (bytes - before) as f64 * 8.0,
                link_used: !(cut_at < second && second <= restored_at),
                ..CutRow::default()
            };
            before = bytes;
            let used = if row.link_used { "" } else { ", without the link" };
            self.result(format!("{second} s: {:.1} Mbit/s{used}", row.bits_per_second / 1e6));
            result.rows.push(row);
        }
        self.lease.change(|request| request.exclude.clear()).map_err(io::Error::other)?;
        result.longest_silence_ms = load.stop().longest_silence.as_secs_f64() * 1000.0;
        for echo in probe.stop() {
            let at = echo.sent.saturating_duration_since(began).as_secs() as usize;
            let Some(row) = result.rows.get_mut(at) else { continue };
            match echo.rtt {
                Some(rtt) => {
                    let rtt_ms = rtt.as_secs_f64() * 1000.0;
                    row.max_rtt_ms = Some(row.max_rtt_ms.map_or(rtt_ms, |longest| longest.max(rtt_ms)));
                }
                None => row.lost += 1,
            }
        }
        let mean = |from: u32, to: u32| {
            let rows: Vec<f64> = result
                .rows
                .iter()
                .filter(|row| (from + 1..=to).contains(&row.second))
                .map(|row| row.bits_per_second)
                .collect();
            rows.iter().sum::<f64>() / rows.len().max(1) as f64
        };
        result.before_bits_per_second = mean(0, cut_at);
        result.during_bits_per_second = mean(cut_at, restored_at);
        result.after_bits_per_second = mean(restored_at, end);
        self.report.cut = Some(result);
        Ok(())
    }

    /// Eight TCP connections over all links for hours.
    pub(super) fn hours(&mut self) -> io::Result<()> {
        let hours = self.plan.hours.unwrap_or_default();
        self.use_links("")?;
        let rate = self.plan.rate.map(|rate| rate.bps() as f64 / 8.0);
        self.step(format!("TCP down, {HOURS_FLOWS} flows, {hours} h"));
        let before: ResponderReport = self.responder.orders.ask(Order::Report)?;
        let load = TcpLoad::start(&self.responder.target, LoadDirection::Down, HOURS_FLOWS, rate)?;
        let began = Instant::now();
        let end = began + Duration::try_from_secs_f64(hours * 3600.0).map_err(io::Error::other)?;
        let mut result = HoursResult::default();
        let mut minute = Meter::begin(self, LoadDirection::Down, &load)?;
        let mut next_minute = began + Duration::from_secs(60);
        let mut last = before;
        let mut has_failed = false;
        while Instant::now() < end && !has_failed {
            let goes_on = self.interrupt.sleep_until(end.min(Instant::now() + Duration::from_secs(1)));
            let passed = began.elapsed().as_secs_f64();
            // An order that is lost with its connection is given again by the next second.
            match self.responder.orders.ask(Order::Report) {
                Ok(report) => last = report,
                Err(_) => self.open_orders(),
            }
            result.server.add(passed, last.resident_bytes);
            if let Some(bytes) = self.client.and_then(usage::resident_memory) {
                result.client.add(passed, bytes);
            }
            has_failed = load.has_failed();
            if Instant::now() >= next_minute || !goes_on || Instant::now() >= end || has_failed {
                next_minute += Duration::from_secs(60);
                minute.note(self, &load)?;
                let latest = minute.series.last().copied().unwrap_or_default();
                self.result(format!(
                    "{:.0} min: {:.1} Mbit/s, {:.1} and {:.1} MiB",
                    passed / 60.0,
                    latest.bits_per_second / 1e6,
                    mebibytes(result.client.end),
                    mebibytes(result.server.end)
                ));
            }
            if !goes_on {
                break;
            }
        }
        let own = load.stop();
        result.hours = began.elapsed().as_secs_f64() / 3600.0;
        result.bits_per_second = minute.mean();
        let minutes = minute.series.iter().map(|point: &RatePoint| point.bits_per_second);
        result.lowest_minute_bits_per_second = minutes.fold(f64::INFINITY, f64::min);
        result.segments = last.segments.saturating_sub(before.segments);
        result.retransmitted = last.retransmitted.saturating_sub(before.retransmitted);
        result.series = minute.series;
        if own.failed > 0 {
            self.report
                .missing
                .push(format!("{} of {HOURS_FLOWS} connections broke in the load over hours", own.failed));
        }
        self.report.hours = Some(result);
        Ok(())
    }
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
