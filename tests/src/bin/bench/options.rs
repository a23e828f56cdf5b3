//! Options of `bench`.

use std::{path::PathBuf, time::Duration};

use mpvpn_scenarios::Scenario;
use mpvpn_tests::system::System;

use crate::{classes, mptcp, paths::load::InnerCc, peers::Setting, stream::Part};

/// Help text of the options, printed by `--list` after the rigs.
pub(crate) const HELP: &str = "
--rounds N        `peers`, `shards`, `stream` and `mptcp`: number of rounds in which every system is measured (5); `cost`: at
                  most 3
--seconds N       `peers`, `shards`, `stream` and `mptcp`: duration of a TCP or UDP run of a compared system, s (2); `cost`:
                  at least 4
--tries N         `peers`, `shards`, `stream`, `classes` and `mptcp`: maximum number of attempts of a run that other
                  processes disturb (3)
--systems A,B     `peers`: only these systems: raw, tun-copy, mpvpn, wireguard-go, openvpn, boringtun, kernel-wireguard
                  (default), and plain-copy, mpvpn-stream, mpvpn-tcp, mpvpn-tcp-stream, openvpn-tcp
--settings A,B    `peers`: only these links: veth, plain, gigabit, slow
SCENARIO...       `paths` and `stream`: only these scenarios (--list lists them)
--quick           `paths` and `stream`: one run of 6 s instead of three of 10 s, 1 and 4 flows, 3 cuts, 15 random cuts;
                  `stream`, `pseudotcp` and `mptcp`: one round; `classes` and `mptcp`: shorter, fewer directions;
                  `flood`: one round of 2 s instead of three of 5 s, less than a minute; `cost`: one round, 6 of 14 loads
--count N         `cut`: N cuts in all, many in each testbed, and the distribution of gaps; about 6 s a cut;
                  `sweep`: number of settings (1000; --quick: 60)
--seed N          `sweep`: the seed that settings are drawn with (1)
--only N          `sweep`: only the setting with this number, from 0, or the run of a world, from 1000000
--cuts N          `paths` and `stream`: number of cuts of a link (default: as the scenario says, 10, 20 or 100)
--runs N          `paths`, `stream` and `mptcp`: number of runs per table row (3); `pseudotcp`: number of rounds (5)
--inner CC        `paths`, `stream`, `classes` and `mptcp`: congestion control of inner TCP: cubic (default) or bbr
--parts A,B       `stream`: only these parts: links, veth, short, readers (default: all; with scenarios: links);
                  `classes`: only these parts: isolation, competition, loss, failover, striping, nine (all);
                  `mptcp`: only these parts: lab, stripped, mixed, tcp (all)
--load N          `memory`: duration of the load, s (60)
--against COMMIT  every rig: run with the binary of COMMIT and with this one in turn, and judge each figure: better, worse
                  or not known (report: target/bench/against/). Exit code 1: a figure is worse
--pairs N         with --against: pairs of runs per rig (default: see the list); doubled if a figure looks worse
--threshold P     with --against: smaller differences than P percent are irrelevant (5)
";

/// Parsed options.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    /// Whether to list the rigs instead of running them.
    pub(crate) list: bool,
    /// Rigs to run; empty: all.
    pub(crate) rigs: Vec<String>,
    /// Scenarios of the rigs `paths` and `stream`; empty: all.
    pub(crate) scenarios: Vec<String>,
    /// Whether long rigs run in a shortened form.
    pub(crate) quick: bool,
    /// Number of cuts of all kinds in the rig `cut` (`None`: one of each), or of settings in `sweep`.
    pub(crate) count: Option<u32>,
    /// Seed of the rig `sweep`.
    pub(crate) seed: u32,
    /// The only setting, or run of a world, that the rig `sweep` plays.
    pub(crate) only: Option<u32>,
    /// Number of cuts in the rigs `paths` and `stream`; `None`: as the scenario says.
    pub(crate) cuts: Option<u32>,
    /// Number of runs per table row; `None`: the rig's default.
    pub(crate) runs: Option<u32>,
    /// Congestion control of inner TCP.
    pub(crate) inner: InnerCc,
    /// Parts of the stream rig.
    pub(crate) parts: Vec<Part>,
    /// Parts of the classes rig.
    pub(crate) class_parts: Vec<classes::Part>,
    /// Parts of the mptcp rig.
    pub(crate) mptcp_parts: Vec<mptcp::Part>,
    /// Duration of the load in the rig `memory`.
    pub(crate) load: Duration,
    /// Rounds of the rigs that measure systems in turn.
    pub(crate) rounds: u32,
    /// Duration of one of their runs, seconds.
    pub(crate) seconds: u32,
    /// Maximum number of attempts of a disturbed run.
    pub(crate) tries: u32,
    /// Systems of the peers rig.
    pub(crate) systems: Vec<System>,
    /// Settings of the peers rig.
    pub(crate) settings: Vec<Setting>,
    /// Binary of the other commit, for a comparison.
    pub(crate) against: Option<PathBuf>,
    /// Pairs of runs per rig in a comparison; `None`: the default.
    pub(crate) pairs: Option<u32>,
    /// Smallest relevant difference, percent.
    pub(crate) threshold: f64,
    /// Folder of the report of a run that is a part of a comparison.
    pub(crate) report_to: Option<PathBuf>,
    /// Options that a comparison passes on to its runs.
    pub(crate) passed_on: Vec<String>,
}

impl Options {
    pub(crate) fn parse(args: &[String], rigs: &[&str]) -> Result<Self, String> {
        let mut options = Self {
            list: false,
            rigs: Vec::new(),
            scenarios: Vec::new(),
            quick: false,
            count: None,
            seed: 1,
            only: None,
            cuts: None,
            runs: None,
            inner: InnerCc::default(),
            parts: Vec::new(),
            class_parts: Vec::new(),
            mptcp_parts: Vec::new(),
            load: Duration::from_secs(60),
            rounds: 5,
            seconds: 2,
            tries: 3,
            systems: System::ALL.into_iter().filter(|system| system.is_default()).collect(),
            settings: Setting::ALL.to_vec(),
            against: None,
            pairs: None,
            threshold: 5.0,
            report_to: None,
            passed_on: Vec::new(),
        };
        let mut args = args.iter();
        while let Some(word) = args.next() {
            let rest = args.as_slice();
            let mut number = || {
                let number =
                    args.next().and_then(|text| text.parse::<u32>().ok()).filter(|number| *number > 0);
                number.ok_or(format!("{word} takes a whole number above 0"))
            };
            match word.as_str() {
                "--list" | "--help" | "-h" => options.list = true,
                "--load" => options.load = Duration::from_secs(number()?.into()),
                "--rounds" => options.rounds = number()?,
                "--seconds" => options.seconds = number()?,
                "--tries" => options.tries = number()?,
                "--systems" => options.systems = chosen(args.next(), &System::ALL, System::name)?,
                "--settings" => options.settings = chosen(args.next(), &Setting::ALL, Setting::name)?,
                "--quick" => options.quick = true,
                "--runs" => options.runs = Some(number()?),
                "--inner" => options.inner = one(args.next(), &InnerCc::ALL, InnerCc::name)?,
                "--parts" => options.choose_parts(args.next())?,
                "--count" => options.count = Some(number()?),
                "--seed" => options.seed = number()?,
                "--only" => {
                    let number = args.next().and_then(|text| text.parse().ok());
                    options.only = Some(number.ok_or("--only takes the number of a setting")?);
                }
                "--cuts" => options.cuts = Some(number()?),
                "--pairs" => options.pairs = Some(number()?),
                "--threshold" => options.threshold = f64::from(number()?),
                "--against" => options.against = Some(args.next().ok_or("--against takes a binary")?.into()),
                "--report-to" => {
                    options.report_to = Some(args.next().ok_or("--report-to takes a folder")?.into())
                }
                name if rigs.contains(&name) => options.rigs.push(word.clone()),
                name if Scenario::names().any(|known| known == name) => options.scenarios.push(word.clone()),
                _ => return Err(format!("there is no rig and no option {word}")),
            }
            let is_of_the_comparison =
                ["--against", "--pairs", "--threshold", "--report-to"].contains(&&**word);
            if word.starts_with('-') && !is_of_the_comparison {
                let values = &rest[..rest.len() - args.len()];
                options.passed_on.extend([word].into_iter().chain(values).cloned());
            }
        }
        if options.rigs.is_empty() && !options.scenarios.is_empty() {
            options.rigs.push("paths".to_owned());
        }
        if options.parts.is_empty() {
            let all = if options.scenarios.is_empty() { &Part::ALL[..] } else { &[Part::Links] };
            options.parts = all.to_vec();
        }
        if options.class_parts.is_empty() {
            options.class_parts = classes::Part::ALL.to_vec();
        }
        if options.mptcp_parts.is_empty() {
            options.mptcp_parts = mptcp::Part::ALL.to_vec();
        }
        Ok(options)
    }

    /// Selects parts of all rigs by a list of names; part names are unique across rigs.
    fn choose_parts(&mut self, list: Option<&String>) -> Result<(), String> {
        let names = Part::ALL.map(Part::name).into_iter().chain(classes::Part::ALL.map(classes::Part::name));
        let names = names.chain(mptcp::Part::ALL.map(mptcp::Part::name));
        let wanted = chosen(list, &names.collect::<Vec<_>>(), |name| name)?;
        let is_wanted = |name| wanted.contains(&name);
        self.parts = Part::ALL.into_iter().filter(|part| is_wanted(part.name())).collect();
        self.class_parts = classes::Part::ALL.into_iter().filter(|part| is_wanted(part.name())).collect();
        self.mptcp_parts = mptcp::Part::ALL.into_iter().filter(|part| is_wanted(part.name())).collect();
        Ok(())
    }
}

/// The elements of `all` whose names are in a comma-separated list, in the order of `all`.
fn chosen<T: Copy>(list: Option<&String>, all: &[T], name: fn(T) -> &'static str) -> Result<Vec<T>, String> {
    let known: Vec<&str> = all.iter().map(|item| name(*item)).collect();
    let wanted: Vec<&str> = list.map(|list| list.split(',').collect()).unwrap_or_default();
    match wanted.iter().find(|word| !known.contains(word)) {
        Some(unknown) => Err(format!("there is no {unknown}: {}", known.join(", "))),
        None if wanted.is_empty() => Err(format!("name some of {}", known.join(", "))),
        None => Ok(all.iter().copied().filter(|item| wanted.contains(&name(*item))).collect()),
    }
}

/// The element of `all` with this name.
fn one<T: Copy>(word: Option<&String>, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
    match chosen(word, all, name)?[..] {
        [one] => Ok(one),
        _ => Err("name just one".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&args, &["speed", "peers"])
    }

    #[test]
    fn help_prints_the_list() {
        assert!(parse("--help").unwrap().list && parse("-h").unwrap().list && parse("--list").unwrap().list);
    }

    #[test]
    fn rigs_and_options_come_in_any_order() {
        let options = parse("--rounds 1 peers --systems wireguard-go,mpvpn --seconds 3 speed").expect("fine");
        assert_eq!((options.rounds, options.seconds), (1, 3));
        assert_eq!(options.rigs, ["peers", "speed"]);
        assert_eq!(options.systems, [System::Mpvpn, System::WireguardGo]);
        assert_eq!(options.settings, Setting::ALL);
        let options = parse("lossy --quick --cuts 3 --count 200 equal --runs 2 --inner bbr").expect("fine");
        assert_eq!((options.runs, options.inner, options.count), (Some(2), InnerCc::Bbr, Some(200)));
        assert_eq!(
            (options.scenarios, options.quick, options.cuts),
            (vec!["lossy".to_owned(), "equal".to_owned()], true, Some(3))
        );
    }

    #[test]
    fn runs_of_a_comparison_get_all_options_except_those_of_the_comparison() {
        let options =
            parse("--against /b --rounds 1 speed lossy --quick --pairs 7 --threshold 3").expect("fine");
        assert_eq!((options.pairs, options.threshold), (Some(7), 3.0));
        assert_eq!(options.against, Some("/b".into()));
        assert_eq!(options.passed_on, ["--rounds", "1", "--quick"]);
        assert_eq!((options.rigs.len(), options.scenarios.len()), (1, 1));
    }

    #[test]
    fn named_scenarios_select_the_part_links() {
        assert_eq!(parse("").unwrap().parts, Part::ALL);
        assert_eq!(parse("equal").unwrap().parts, [Part::Links]);
        assert_eq!(parse("equal --parts readers,links").unwrap().parts, [Part::Links, Part::Readers]);
    }

    #[test]
    fn a_rig_without_a_named_part_runs_all_its_parts() {
        let options = parse("--parts nine,isolation").unwrap();
        assert_eq!(options.class_parts, [classes::Part::Isolation, classes::Part::Nine]);
        assert_eq!(options.parts, Part::ALL);
        assert_eq!(options.mptcp_parts, mptcp::Part::ALL);
        assert_eq!(parse("--parts veth").unwrap().class_parts, classes::Part::ALL);
        assert_eq!(parse("--parts mixed").unwrap().mptcp_parts, [mptcp::Part::Mixed]);
    }

    #[test]
    fn unknown_options_and_values_are_errors() {
        for line in [
            "--rounds",
            "--rounds 0",
            "--rounds x",
            "nothing",
            "--systems",
            "--systems raw,x",
            "--settings lan",
            "--inner reno",
            "--parts tunnel",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
