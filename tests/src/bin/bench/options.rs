//! The command line.

use std::{path::PathBuf, time::Duration};

use mpvpn_scenarios::Scenario;
use mpvpn_tests::system::System;

use crate::{classes, mptcp, paths::load::InnerCc, peers::Setting, stream::Part};

/// What `--list` says after the rigs.
pub(crate) const HELP: &str = "
--rounds N        of `peers`, `shards`, `stream` and `mptcp`: how often every system has its turn (5)
--seconds N       of `peers`, `shards`, `stream` and `mptcp`: how long a TCP or UDP run beside others takes (2)
--tries N         of `peers`, `shards`, `stream`, `classes` and `mptcp`: how often a run is tried that something else on
                  the machine disturbs (3)
--systems A,B     of `peers`: only these: raw, tun-copy, mpvpn, wireguard-go, openvpn, boringtun, kernel-wireguard;
                  and if named mpvpn-stream, mpvpn-tcp, mpvpn-tcp-stream, openvpn-tcp
--settings A,B    of `peers`: only these: veth, plain, gigabit, slow
SCENARIO...       of `paths` and `stream`: only these (--list names them)
--quick           of `paths` and `stream`: one run of 6 s instead of three of 10 s, 1 and 4 flows, three cuts, 15 random
                  ones; of `stream`, `pseudotcp` and `mptcp`: one round; of `classes` and `mptcp`: shorter, fewer directions
--cuts N          of `paths` and `stream`: how often a link is cut (as the scenario says: 10, 20 or 100)
--runs N          of `paths`, `stream` and `mptcp`: how often each row is measured (3); of `pseudotcp`: rounds (5)
--inner CC        of `paths`, `stream`, `classes` and `mptcp`: the congestion control of inner TCP: cubic (default) or bbr
--parts A,B       of `stream`: only these: links, veth, short, readers (all; links where scenarios are named); of
                  `classes`: only these: isolation, competition, loss, failover, striping, nine (all); of `mptcp`: only
                  these: lab, stripped, mixed, tcp (all)
--load N          of `memory`: seconds of load (60)
--against COMMIT  of every rig: with the binary of COMMIT and with this one in turn; whether each figure is better, worse
                  or not known (target/bench/against/). Exit code 1: one is worse
--pairs N         with --against: pairs of runs of each rig (as the list says), which are doubled where a figure seems worse
--threshold P     with --against: a difference of less than so many percent does not matter (5)
";

/// What was asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    /// Only name the rigs.
    pub(crate) list: bool,
    /// The rigs to run; none means all.
    pub(crate) rigs: Vec<String>,
    /// Scenarios of the paths and stream rigs; none means all.
    pub(crate) scenarios: Vec<String>,
    /// Whether the rigs that take long are to be short.
    pub(crate) quick: bool,
    /// How often the paths rig repeats events, where not as the scenario says.
    pub(crate) cuts: Option<u32>,
    /// How often the paths rig measures each row, where not as usual.
    pub(crate) runs: Option<u32>,
    /// The congestion control of inner TCP in the paths rig.
    pub(crate) inner: InnerCc,
    /// Parts of the stream rig.
    pub(crate) parts: Vec<Part>,
    /// Parts of the classes rig.
    pub(crate) class_parts: Vec<classes::Part>,
    /// Parts of the mptcp rig.
    pub(crate) mptcp_parts: Vec<mptcp::Part>,
    /// Load of the memory rig.
    pub(crate) load: Duration,
    /// Rounds of the rigs that compare in turn.
    pub(crate) rounds: u32,
    /// Seconds of one run of theirs.
    pub(crate) seconds: u32,
    /// How often a disturbed run of theirs is tried.
    pub(crate) tries: u32,
    /// Systems of the peers rig.
    pub(crate) systems: Vec<System>,
    /// Settings of the peers rig.
    pub(crate) settings: Vec<Setting>,
    /// The binary to compare with.
    pub(crate) against: Option<PathBuf>,
    /// Pairs of runs of each rig, where not as usual.
    pub(crate) pairs: Option<u32>,
    /// A relevant difference, percent.
    pub(crate) threshold: f64,
    /// Where the report goes, of a run that belongs to a comparison.
    pub(crate) report_to: Option<PathBuf>,
    /// What the runs of a comparison are told besides rigs and scenarios.
    pub(crate) passed_on: Vec<String>,
}

impl Options {
    pub(crate) fn parse(args: &[String], rigs: &[&str]) -> Result<Self, String> {
        let mut options = Self {
            list: false,
            rigs: Vec::new(),
            scenarios: Vec::new(),
            quick: false,
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
            systems: System::ALL.into_iter().filter(|system| system.is_usual()).collect(),
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

    /// The parts of all rigs have names of their own.
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

/// Those of `all` that a list names, in the order of `all`.
fn chosen<T: Copy>(list: Option<&String>, all: &[T], name: fn(T) -> &'static str) -> Result<Vec<T>, String> {
    let known: Vec<&str> = all.iter().map(|item| name(*item)).collect();
    let wanted: Vec<&str> = list.map(|list| list.split(',').collect()).unwrap_or_default();
    match wanted.iter().find(|word| !known.contains(word)) {
        Some(stranger) => Err(format!("there is no {stranger}: {}", known.join(", "))),
        None if wanted.is_empty() => Err(format!("name some of {}", known.join(", "))),
        None => Ok(all.iter().copied().filter(|item| wanted.contains(&name(*item))).collect()),
    }
}

/// The one of `all` that a word names.
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
    fn help_and_the_list_are_one() {
        assert!(parse("--help").unwrap().list && parse("-h").unwrap().list && parse("--list").unwrap().list);
    }

    #[test]
    fn rigs_and_options_come_in_any_order() {
        let options = parse("--rounds 1 peers --systems wireguard-go,mpvpn --seconds 3 speed").expect("fine");
        assert_eq!((options.rounds, options.seconds), (1, 3));
        assert_eq!(options.rigs, ["peers", "speed"]);
        assert_eq!(options.systems, [System::Mpvpn, System::WireguardGo]);
        assert_eq!(options.settings, Setting::ALL);
        let options = parse("lossy --quick --cuts 3 equal --runs 2 --inner bbr").expect("fine");
        assert_eq!((options.runs, options.inner), (Some(2), InnerCc::Bbr));
        assert_eq!(
            (options.scenarios, options.quick, options.cuts),
            (vec!["lossy".to_owned(), "equal".to_owned()], true, Some(3))
        );
    }

    #[test]
    fn runs_of_a_comparison_get_all_options_but_its_own() {
        let options =
            parse("--against /b --rounds 1 speed lossy --quick --pairs 7 --threshold 3").expect("fine");
        assert_eq!((options.pairs, options.threshold), (Some(7), 3.0));
        assert_eq!(options.against, Some("/b".into()));
        assert_eq!(options.passed_on, ["--rounds", "1", "--quick"]);
        assert_eq!((options.rigs.len(), options.scenarios.len()), (1, 1));
    }

    #[test]
    fn who_names_scenarios_means_links() {
        assert_eq!(parse("").unwrap().parts, Part::ALL);
        assert_eq!(parse("equal").unwrap().parts, [Part::Links]);
        assert_eq!(parse("equal --parts readers,links").unwrap().parts, [Part::Links, Part::Readers]);
    }

    #[test]
    fn a_rig_of_which_no_part_is_named_runs_as_a_whole() {
        let options = parse("--parts nine,isolation").unwrap();
        assert_eq!(options.class_parts, [classes::Part::Isolation, classes::Part::Nine]);
        assert_eq!(options.parts, Part::ALL);
        assert_eq!(options.mptcp_parts, mptcp::Part::ALL);
        assert_eq!(parse("--parts veth").unwrap().class_parts, classes::Part::ALL);
        assert_eq!(parse("--parts mixed").unwrap().mptcp_parts, [mptcp::Part::Mixed]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
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
