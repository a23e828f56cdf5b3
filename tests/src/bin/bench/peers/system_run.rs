//! Measures one system on one link.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use mpvpn_os::usage::processor_time;
use mpvpn_tests::{
    disturbance::{Measurement, measure_undisturbed},
    fallible_iperf::{IperfResult, IperfTarget, Traffic},
    ping::{Ping, Pings},
    stalled_readers::run_stalled_readers,
    system::{System, Tunnel},
    testbed::{Direction, Host, Testbed},
    usage::{peak_memory, reset_peak_memory},
};
use serde_json::{Value, json};

use super::{
    Scope, Setting,
    rate_search::{Probe, ProbeLength, SearchResult, search},
    samples::{Conditions, RunKey, SampleLog},
    setting::frames,
};
use crate::{median::median, parts::direction_name};

/// Port of iperf3.
const PORT: u16 = 5201;
/// Connections with stalled readers, half of them in each direction.
const STALLED_CONNECTIONS: usize = 32;

/// Results of earlier rate searches, datagrams per second, by setting, system and payload size.
pub(super) type KnownRates = BTreeMap<(Setting, System, u32), f64>;

/// A run of a system, and where its values are recorded.
pub(super) struct SystemRun<'a> {
    pub(super) run_key: RunKey,
    pub(super) testbed: &'a Testbed,
    pub(super) seconds: u32,
    pub(super) scope: Scope,
    /// Maximum number of attempts of a disturbed run.
    pub(super) tries: u32,
    /// Whether pings, memory and small datagrams are measured as well.
    pub(super) is_full: bool,
    pub(super) log: &'a mut SampleLog,
    pub(super) known_rates: &'a mut KnownRates,
}

impl SystemRun<'_> {
    /// Starts the system, measures it, and stops it.
    pub(super) fn run(mut self) -> Result<(), String> {
        let tunnel = self.run_key.system.start(self.testbed)?;
        if self.run_key.setting == Setting::Slow {
            return self.under_load(&tunnel);
        }
        let everything = self.is_full && self.run_key.setting == Setting::Veth;
        if everything {
            self.idle(&tunnel)?;
        }
        let address = tunnel.address().to_string();
        let mut target = IperfTarget::new(self.testbed, &address, PORT);
        for (flows, direction) in
            [(1, Direction::Up), (1, Direction::Down), (8, Direction::Up), (8, Direction::Down)]
        {
            self.tcp(&tunnel, &mut target, flows, direction)?;
        }
        if everything {
            self.memory(&tunnel, "rss");
        }
        if everything && tunnel.server().is_some() {
            self.stalled(&tunnel)?;
        }
        if self.scope == Scope::Tcp {
            return Ok(());
        }
        let sizes: &[u32] = if everything { &[64, 512, 1200] } else { &[1200] };
        sizes.iter().try_for_each(|size| self.udp(&mut target, *size))
    }

    fn note(&mut self, key: &str, value: f64, conditions: &Conditions) {
        self.log.note(self.run_key, key, value, conditions);
    }

    fn tcp(
        &mut self,
        tunnel: &Tunnel,
        target: &mut IperfTarget<'_>,
        flows: u32,
        direction: Direction,
    ) -> Result<(), String> {
        let ends = [tunnel.client(), tunnel.server()];
        let spent = || ends.map(|end| end.and_then(processor_time));
        let (testbed, seconds) = (self.testbed, self.seconds);
        let measurement = measure_undisturbed(self.tries, || {
            let (before, crossed) = (spent(), frames(testbed));
            let arrived = target.run(Traffic::Tcp { flows }, direction, seconds)?;
            let (after, now) = (spent(), frames(testbed));
            Ok::<_, String>((arrived, before, after, (now.1 - crossed.1) / (now.0 - crossed.0)))
        });
        let (result, conditions) = split(measurement, Value::Null);
        let (arrived, before, after, frame) = result?;
        if (flows, direction) == (1, Direction::Up) {
            self.note("frame", frame, &conditions);
            self.run_key.setting.check_frames(frame)?;
        }
        let key = format!("tcp{flows}_{}", direction_name(direction));
        self.note(&key, arrived.rate / 1e6, &conditions);
        for (end, (before, after)) in ["client", "server"].iter().zip(before.into_iter().zip(after)) {
            if let (Some(before), Some(after)) = (before, after) {
                let cost = (after - before).as_secs_f64() / (arrived.bytes / 1e9);
                self.note(&format!("{key}_cpu_{end}"), cost, &conditions);
            }
        }
        Ok(())
    }

    fn udp(&mut self, target: &mut IperfTarget<'_>, size: u32) -> Result<(), String> {
        let key = (self.run_key.setting, self.run_key.system, size);
        let (measure_of, seconds) = (self.known_rates.get(&key).copied(), self.seconds);
        // A search has many probes, so each is repeated once at most.
        let tries = self.tries.min(2);
        let measurement = measure_undisturbed(1, || {
            search(measure_of, |rate, length| {
                let seconds = if length == ProbeLength::Short { 1 } else { seconds };
                let probe = measure_undisturbed(tries, || {
                    target.run(Traffic::Udp { size, rate }, Direction::Up, seconds)
                });
                let arrived = probe.value.ok();
                let loss_pct = arrived.map_or(0.0, |arrived: IperfResult| arrived.loss_pct);
                Probe { offered: rate, sent: arrived.map(|arrived| arrived.sent), loss_pct }
            })
        });
        let probes = |found: &SearchResult| found.probes.iter().map(Probe::json).collect::<Vec<_>>();
        let details = measurement.value.as_ref().map_or(
            Value::Null,
            |found| json!({ "probes": probes(found), "sender_bound": found.sender_bound }),
        );
        let (found, conditions) = split(measurement, details);
        let found = found
            .ok_or_else(|| format!("no rate of UDP datagrams of {size} bytes passes with < 1 % loss"))?;
        self.known_rates.insert(key, found.rate);
        self.note(&format!("udp{size}"), found.rate / 1e3, &conditions);
        Ok(())
    }

    /// Pings through the idle tunnel, compared with pings beside it.
    fn idle(&mut self, tunnel: &Tunnel) -> Result<(), String> {
        let (testbed, seconds, address) =
            (self.testbed, u64::from(self.seconds), tunnel.address().to_string());
        let measurement = measure_undisturbed(self.tries, || {
            let direct = direct(testbed, seconds);
            (direct, Ping::dense(testbed, Host::Client, &address, seconds).finish())
        });
        let ((direct, through), conditions) = split(measurement, Value::Null);
        let base = median(times(&direct)).ok_or("no ping past the tunnel was answered")?;
        self.note("direct_median", base, &conditions);
        self.pings("idle", &through, base, &conditions)
    }

    fn pings(&mut self, what: &str, pings: &Pings, base: f64, conditions: &Conditions) -> Result<(), String> {
        let times = times(pings);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let middle = median(times.clone()).ok_or_else(|| format!("no ping was answered: {what}"))?;
        let high = pings.rtt_ms(99);
        self.note(&format!("{what}_mean"), mean - base, conditions);
        self.note(&format!("{what}_median"), middle - base, conditions);
        self.note(&format!("{what}_p99"), high - base, conditions);
        // Replies to the last pings arrive after the end; ping sends one every 10 ms.
        let under_way = (high / 10.0).ceil();
        let missing = (pings.sent as f64 - pings.answers.len() as f64 - under_way).max(0.0);
        self.note(&format!("{what}_lost"), 100.0 * missing / pings.sent.max(1) as f64, conditions);
        Ok(())
    }

    /// Pings while 8 flows fill the link.
    fn under_load(&mut self, tunnel: &Tunnel) -> Result<(), String> {
        const RAMP: Duration = Duration::from_secs(1);
        let (testbed, seconds, address) = (self.testbed, self.seconds.max(3), tunnel.address().to_string());
        let measurement = measure_undisturbed(self.tries, || direct(testbed, 2));
        let (direct, conditions) = split(measurement, Value::Null);
        let base = median(times(&direct)).ok_or("no ping past the tunnel was answered")?;
        self.note("direct_median", base, &conditions);
        for direction in [Direction::Up, Direction::Down] {
            let mut target = IperfTarget::new(testbed, &address, PORT);
            target.listen();
            let measurement = measure_undisturbed(self.tries, || {
                let began = SystemTime::now();
                let pings = Ping::dense(testbed, Host::Client, &address, u64::from(seconds) + 1);
                let arrived = target.run(Traffic::Tcp { flows: 8 }, direction, seconds + 2);
                let mut pings = pings.finish();
                let all = pings.answers.len() as u64;
                let from =
                    (began + RAMP).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                pings.answers.retain(|answer| answer.at >= from);
                // Pings before the end of the ramp count neither as sent nor as answered.
                pings.sent -= all - pings.answers.len() as u64;
                (arrived, pings)
            });
            let ((arrived, pings), conditions) = split(measurement, Value::Null);
            let what = format!("load_{}", direction_name(direction));
            self.note(&format!("{what}_rate"), arrived?.rate / 1e6, &conditions);
            self.pings(&what, &pings, base, &conditions)?;
        }
        Ok(())
    }

    fn memory(&mut self, tunnel: &Tunnel, key: &str) {
        let calm = Conditions { disturbance: Default::default(), tries: 1, details: Value::Null };
        for (end, process) in [("client", tunnel.client()), ("server", tunnel.server())] {
            if let Some(bytes) = process.and_then(peak_memory) {
                self.note(&format!("{key}_{end}"), bytes as f64 / 1e6, &calm);
            }
        }
    }

    fn stalled(&mut self, tunnel: &Tunnel) -> Result<(), String> {
        [tunnel.client(), tunnel.server()].into_iter().flatten().for_each(|process| {
            // Without this kernel feature the peak includes the previous flows.
            let _ = reset_peak_memory(process);
        });
        let time = Duration::from_secs(u64::from(self.seconds) + 1);
        run_stalled_readers(
            self.testbed,
            tunnel.address().into(),
            STALLED_CONNECTIONS,
            Direction::Both,
            time,
        )?;
        self.memory(tunnel, "rss_stalled");
        Ok(())
    }
}

fn split<T>(measurement: Measurement<T>, details: Value) -> (T, Conditions) {
    (
        measurement.value,
        Conditions { disturbance: measurement.disturbance, tries: measurement.tries, details },
    )
}

/// Pings of the server's address on the link, beside the tunnel.
fn direct(testbed: &Testbed, seconds: u64) -> Pings {
    Ping::dense_through(testbed, Host::Client, "eth1", "10.101.0.1", seconds).finish()
}

fn times(pings: &Pings) -> Vec<f64> {
    pings.answers.iter().map(|answer| answer.rtt_ms).collect()
}
