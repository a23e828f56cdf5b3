//! All measured samples, and their medians and ratios.

use std::collections::BTreeMap;

use mpvpn_tests::{disturbance::Disturbance, system::System};
use serde_json::{Value, json};

use super::Setting;
use crate::{figure::Bar, median::median};

/// A measure of a system in a setting.
#[derive(Debug, PartialEq)]
pub(crate) struct Measure {
    pub(crate) key: &'static str,
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
}

const fn measure(key: &'static str, title: &'static str, unit: &'static str) -> Measure {
    Measure { key, title, unit }
}

impl Measure {
    /// The better direction of a measure without a bar, by its unit.
    pub(crate) fn direction(&self) -> Bar {
        match self.unit {
            "Mbit/s" | "kpps" => Bar::Higher,
            "CPU-s/GB" | "MB" | "ms" | "%" => Bar::Lower,
            _ => Bar::None,
        }
    }
}

/// All measures, in the order of the tables.
pub(crate) const MEASURES: [Measure; 35] = [
    measure("tcp1_up", "1 TCP flow up", "Mbit/s"),
    measure("tcp1_down", "1 TCP flow down", "Mbit/s"),
    measure("tcp8_up", "8 TCP flows up", "Mbit/s"),
    measure("tcp8_down", "8 TCP flows down", "Mbit/s"),
    measure("frame", "mean frame on the link, 1 TCP flow up", "bytes"),
    measure("tcp1_up_cpu_client", "client's processor time, 1 flow up", "CPU-s/GB"),
    measure("tcp1_up_cpu_server", "server's processor time, 1 flow up", "CPU-s/GB"),
    measure("tcp1_down_cpu_client", "client's processor time, 1 flow down", "CPU-s/GB"),
    measure("tcp1_down_cpu_server", "server's processor time, 1 flow down", "CPU-s/GB"),
    measure("tcp8_up_cpu_client", "client's processor time, 8 flows up", "CPU-s/GB"),
    measure("tcp8_up_cpu_server", "server's processor time, 8 flows up", "CPU-s/GB"),
    measure("tcp8_down_cpu_client", "client's processor time, 8 flows down", "CPU-s/GB"),
    measure("tcp8_down_cpu_server", "server's processor time, 8 flows down", "CPU-s/GB"),
    measure("udp64", "UDP of 64 bytes up, < 1 % loss", "kpps"),
    measure("udp512", "UDP of 512 bytes up, < 1 % loss", "kpps"),
    measure("udp1200", "UDP of 1200 bytes up, < 1 % loss", "kpps"),
    measure("rss_client", "client's peak memory, 8 flows", "MB"),
    measure("rss_server", "server's peak memory, 8 flows", "MB"),
    measure("rss_stalled_client", "client's peak memory, 32 readers that stopped", "MB"),
    measure("rss_stalled_server", "server's peak memory, 32 readers that stopped", "MB"),
    measure("direct_median", "idle link, ping past the tunnel, median", "ms"),
    measure("idle_mean", "ping, idle, added, mean", "ms"),
    measure("idle_median", "ping, idle, added, median", "ms"),
    measure("idle_p99", "ping, idle, added, p99", "ms"),
    measure("idle_lost", "pings unanswered, idle", "%"),
    measure("load_up_rate", "8 flows up meanwhile", "Mbit/s"),
    measure("load_up_mean", "ping, 8 flows up, over the idle link, mean", "ms"),
    measure("load_up_median", "ping, 8 flows up, over the idle link, median", "ms"),
    measure("load_up_p99", "ping, 8 flows up, over the idle link, p99", "ms"),
    measure("load_up_lost", "pings unanswered, 8 flows up", "%"),
    measure("load_down_rate", "8 flows down meanwhile", "Mbit/s"),
    measure("load_down_mean", "ping, 8 flows down, over the idle link, mean", "ms"),
    measure("load_down_median", "ping, 8 flows down, over the idle link, median", "ms"),
    measure("load_down_p99", "ping, 8 flows down, over the idle link, p99", "ms"),
    measure("load_down_lost", "pings unanswered, 8 flows down", "%"),
];

/// The measure with that key.
pub(crate) fn measure_of(key: &str) -> &'static Measure {
    MEASURES.iter().find(|measure| measure.key == key).unwrap_or_else(|| panic!("no measure {key}"))
}

/// Round, setting and system of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RunKey {
    pub(crate) round: u32,
    pub(crate) setting: Setting,
    pub(crate) system: System,
}

/// A value and its conditions.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    run_key: RunKey,
    key: &'static str,
    value: f64,
    disturbance: Disturbance,
    tries: u32,
    details: Value,
}

/// All samples of a run.
#[derive(Default)]
pub(crate) struct SampleLog {
    samples: Vec<Sample>,
    failures: Vec<(RunKey, String)>,
}

impl SampleLog {
    /// Records a value.
    pub(crate) fn note(&mut self, run_key: RunKey, key: &str, value: f64, conditions: &Conditions) {
        let measure = measure_of(key);
        eprintln!(
            "    {:<13} {}: {value:.2} {}{}",
            run_key.system.name(),
            measure.title,
            measure.unit,
            conditions.mark()
        );
        self.samples.push(Sample {
            run_key,
            key: measure.key,
            value,
            disturbance: conditions.disturbance.clone(),
            tries: conditions.tries,
            details: conditions.details.clone(),
        });
    }

    /// Records a failed run.
    pub(crate) fn fail(&mut self, run_key: RunKey, why: String) {
        eprintln!("    {:<13} failed: {why}", run_key.system.name());
        self.failures.push((run_key, why));
    }

    pub(crate) fn failures(&self) -> &[(RunKey, String)] {
        &self.failures
    }

    /// The value of a round.
    fn value(&self, round: u32, setting: Setting, system: System, key: &str) -> Option<f64> {
        let run_key = RunKey { round, setting, system };
        self.samples
            .iter()
            .find(|sample| sample.run_key == run_key && sample.key == key)
            .map(|sample| sample.value)
    }

    /// The values of all rounds.
    pub(crate) fn values(&self, setting: Setting, system: System, key: &str) -> Vec<f64> {
        self.samples
            .iter()
            .filter(|sample| {
                (sample.run_key.setting, sample.run_key.system, sample.key) == (setting, system, key)
            })
            .map(|sample| sample.value)
            .collect()
    }

    pub(crate) fn median(&self, setting: Setting, system: System, key: &str) -> Option<f64> {
        median(self.values(setting, system, key))
    }

    /// The median of the ratios within each round, which excludes drift between rounds.
    pub(crate) fn ratio(&self, setting: Setting, of: System, to: System, key: &str) -> Option<f64> {
        let last = self.samples.iter().map(|sample| sample.run_key.round).max()?;
        let ratios = (1..=last).filter_map(|round| {
            Some(self.value(round, setting, of, key)? / self.value(round, setting, to, key)?)
        });
        median(ratios.filter(|ratio| ratio.is_finite()).collect())
    }

    /// Whether a value remained disturbed after all attempts.
    pub(crate) fn is_disturbed(&self, setting: Setting, system: System, key: &str) -> bool {
        self.samples.iter().any(|sample| {
            (sample.run_key.setting, sample.run_key.system, sample.key) == (setting, system, key)
                && sample.disturbance.exceeds_limit()
        })
    }

    /// Whether the traffic generator was the limit in any of these values.
    pub(crate) fn is_sender_bound(&self, setting: Setting, system: System, key: &str) -> bool {
        self.samples.iter().any(|sample| {
            (sample.run_key.setting, sample.run_key.system, sample.key) == (setting, system, key)
                && sample.details["sender_bound"] == true
        })
    }

    /// Whether the last `count` values that depend on time are all disturbed.
    pub(crate) fn is_always_disturbed(&self, count: usize) -> bool {
        let exposed = self.samples.iter().rev().filter(|sample| measure_of(sample.key).unit != "MB");
        exposed.clone().take(count).filter(|sample| sample.disturbance.exceeds_limit()).count() == count
    }

    /// Number of samples, of repeated ones, and of disturbed ones.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        let repeated = self.samples.iter().filter(|sample| sample.tries > 1).count();
        let disturbed = self.samples.iter().filter(|sample| sample.disturbance.exceeds_limit()).count();
        (self.samples.len(), repeated, disturbed)
    }

    /// All samples, medians and failures as JSON.
    pub(crate) fn json(&self) -> Value {
        let samples: Vec<Value> = self.samples.iter().map(Sample::json).collect();
        let mut keys: BTreeMap<(Setting, System, &str), Vec<f64>> = BTreeMap::new();
        for sample in &self.samples {
            keys.entry((sample.run_key.setting, sample.run_key.system, sample.key))
                .or_default()
                .push(sample.value);
        }
        let medians: Vec<Value> = keys
            .into_iter()
            .map(|((setting, system, key), values)| {
                json!({ "setting": setting.name(), "system": system.name(), "measure": key,
                        "unit": measure_of(key).unit, "runs": values.len(), "median": median(values) })
            })
            .collect();
        let failures: Vec<Value> = self
            .failures
            .iter()
            .map(|(run_key, why)| {
                json!({ "round": run_key.round, "setting": run_key.setting.name(), "system": run_key.system.name(), "why": why })
            })
            .collect();
        json!({ "medians": medians, "runs": samples, "failures": failures })
    }
}

impl Sample {
    fn json(&self) -> Value {
        json!({ "round": self.run_key.round, "setting": self.run_key.setting.name(), "system": self.run_key.system.name(),
                "measure": self.key, "value": self.value, "unit": measure_of(self.key).unit, "tries": self.tries,
                "foreign_cores": self.disturbance.foreign, "stolen_cores": self.disturbance.stolen,
                "disturbed": self.disturbance.exceeds_limit(), "by": self.disturbance.top_process,
                "details": self.details })
    }
}

/// Conditions of a value.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    pub(crate) disturbance: Disturbance,
    pub(crate) tries: u32,
    pub(crate) details: Value,
}

impl Conditions {
    fn mark(&self) -> String {
        if self.disturbance.exceeds_limit() {
            format!("  (disturbed: {})", self.disturbance)
        } else {
            String::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measure_has_a_key_of_its_own() {
        for measure in &MEASURES {
            assert_eq!(measure_of(measure.key), measure);
        }
    }

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let mut log = SampleLog::default();
        let fine = Conditions { disturbance: Disturbance::default(), tries: 1, details: Value::Null };
        // The machine was half as fast in round 2; in round 3 the other failed.
        for (round, system, value) in [
            (1, System::Mpvpn, 6.0),
            (1, System::WireguardGo, 2.0),
            (2, System::Mpvpn, 3.0),
            (2, System::WireguardGo, 1.0),
            (3, System::Mpvpn, 6.0),
        ] {
            log.note(RunKey { round, setting: Setting::Veth, system }, "tcp1_up", value, &fine);
        }
        let ratio = log.ratio(Setting::Veth, System::Mpvpn, System::WireguardGo, "tcp1_up");
        assert_eq!(ratio, Some(3.0));
        assert_eq!(log.median(Setting::Veth, System::Mpvpn, "tcp1_up"), Some(6.0));
        assert_eq!(log.ratio(Setting::Plain, System::Mpvpn, System::WireguardGo, "tcp1_up"), None);
        assert_eq!(log.json()["medians"][0]["runs"], 3);
    }

    #[test]
    fn a_machine_that_is_always_busy_is_detected() {
        let mut log = SampleLog::default();
        let run_key = RunKey { round: 1, setting: Setting::Veth, system: System::Mpvpn };
        let mut note = |key, foreign| {
            let disturbance = Disturbance { foreign, ..Disturbance::default() };
            log.note(run_key, key, 1.0, &Conditions { disturbance, tries: 3, details: Value::Null });
            log.is_always_disturbed(3)
        };
        assert!(
            !note("tcp1_up", 0.0)
                && !note("tcp1_down", 1.0)
                && !note("tcp8_up", 1.0)
                && !note("rss_client", 0.0)
        );
        assert!(note("tcp8_down", 1.0) && !note("tcp1_up", 0.0));
    }
}
