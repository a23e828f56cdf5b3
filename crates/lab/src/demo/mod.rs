//! `mpvpn lab demo`: two links bonded, one of them cut and restored, and everything measured.
//!
//! In: the options. Out: a live view, a summary, `bonding.svg` and `summary.json`. Always holds: every figure
//! shown was measured in this run, and the run ends within 90 s.

mod live;
mod plot;
mod report;
mod traffic;

use std::{
    process::ExitCode,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::Signal;

use self::{
    live::View,
    report::{Alone, Bonding, Summary},
    traffic::{Goodput, Pings, TailReader},
};
use crate::{
    cli::DemoArgs,
    error::LabError,
    lab::Lab,
    link::History,
    process::Process,
    requirements, signals,
    spec::LinkSpec,
    vpn::{self, Side, TUNNEL_SERVER_V4, Vpn, VpnOptions},
};

/// Both links are like this.
const LINK: &str = "100mbit,12.5ms,queue=60ms";
/// The same for people.
const LINK_WORDS: &str = "100 Mbit/s, 12.5 ms one way, 60 ms of queue";
/// TCP flows at a time.
const FLOWS: &str = "8";
/// How long each link is measured alone, in seconds.
const ALONE_SECONDS: u64 = 5;
/// What TCP needs to find its rate is not counted as its rate.
const START_UP: Duration = Duration::from_secs(2);
/// How often the outputs of the programs are looked at.
const TICK: Duration = Duration::from_millis(20);
/// How long the paths may take to follow a link.
const SETTLE: Duration = Duration::from_secs(6);
/// How long a program may take beyond its time.
const GRACE: Duration = Duration::from_secs(8);
/// After this the demonstration gives up.
const WHOLE: Duration = Duration::from_secs(85);

/// Runs the demonstration.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode, LabError> {
    requirements::check(&[
        requirements::IP,
        requirements::OPENSSL,
        requirements::IPERF3,
        requirements::PING,
    ])?;
    signals::catch();
    let mut stage = Stage::set(args)?;
    let summary = stage.play(args.seconds)?;
    stage.vpn.stop()?;
    summary.print();
    let (plot, figures) = summary.write(&args.output)?;
    println!("\nPlot:    {}\nFigures: {}", plot.display(), figures.display());
    Ok(ExitCode::SUCCESS)
}

struct Stage {
    // Dropped in this order: programs before the lab in which they run.
    _iperf_server: Process,
    vpn: Vpn,
    lab: Lab,
    deadline: Instant,
}

impl Stage {
    fn set(args: &DemoArgs) -> Result<Self, LabError> {
        let deadline = Instant::now() + WHOLE;
        println!("Two links ({LINK_WORDS}), a server and a client, in namespaces of this machine.");
        let link: LinkSpec = LINK.parse()?;
        let lab = Lab::builder().link(link.clone()).link(link).build()?;
        let options = VpnOptions { scheduler: args.scheduler.clone(), ..VpnOptions::default() };
        let vpn = vpn::start(&lab, options)?;
        let mut command = lab.server().command("iperf3");
        command.args(["-s", "-B", TUNNEL_SERVER_V4]);
        let iperf_server = lab.spawn(lab.server(), command)?;
        Ok(Self { _iperf_server: iperf_server, vpn, lab, deadline })
    }

    fn play(&mut self, seconds: u64) -> Result<Summary, LabError> {
        self.wait_paths(&[State::Active, State::Active])?;
        let idle_rtt_ms = self.idle_rtt()?;
        println!(
            "The tunnel is up: {idle_rtt_ms:.1} ms there and back. Now {FLOWS} TCP downloads at a time:\n"
        );
        let alone = [self.alone(0, 1)?, self.alone(1, 0)?];
        let bonding = self.both(seconds)?;
        Ok(Summary { link: LINK.to_owned(), flows: FLOWS.to_owned(), idle_rtt_ms, alone, bonding })
    }

    /// Median round-trip time of a few pings, in ms.
    fn idle_rtt(&self) -> Result<f64, LabError> {
        let start = Instant::now();
        let mut command = self.lab.client().command("ping");
        command.args(["-D", "-n", "-c", "15", "-i", "0.05", "-W", "1", TUNNEL_SERVER_V4]);
        let mut ping = self.lab.spawn(self.lab.client(), command)?;
        self.wait_end(&mut ping, Duration::from_secs(5))?;
        let pings = Pings::parse(&ping.stdout(), Instant::now(), SystemTime::now());
        pings.median_rtt(start, Instant::now()).ok_or_else(|| self.failed("ping", &ping))
    }

    /// Goodput of one link while the other has no carrier.
    fn alone(&self, index: usize, other: usize) -> Result<Alone, LabError> {
        self.lab.link(other)?.down()?;
        let mut wanted = [State::Active; 2];
        wanted[other] = State::Away;
        self.wait_paths(&wanted)?;
        let (mut iperf, mut output) = self.iperf(ALONE_SECONDS)?;
        let (start, mut goodput) = (Instant::now(), Goodput::default());
        let limit = Duration::from_secs(ALONE_SECONDS) + GRACE;
        while iperf.exited()?.is_none() && start.elapsed() < limit {
            self.tick()?;
            goodput.read(&mut output);
        }
        goodput.read(&mut output);
        let mbps = goodput.steady().ok_or_else(|| self.failed("iperf3", &iperf))?;
        println!("  link {} alone: {mbps:6.1} Mbit/s", index + 1);
        self.lab.link(other)?.up()?;
        self.wait_paths(&[State::Active, State::Active])?;
        Ok(Alone { link: index + 1, goodput_mbps: mbps })
    }

    fn both(&self, seconds: u64) -> Result<Bonding, LabError> {
        println!("  both, with link 1 cut after a third and restored after two:\n");
        let mut command = self.lab.client().command("ping");
        command.args(["-D", "-n", "-i", "0.01", TUNNEL_SERVER_V4]);
        let mut ping = self.lab.spawn(self.lab.client(), command)?;
        let (mut iperf, mut output) = self.iperf(seconds)?;
        let start = Instant::now();
        let third = Duration::from_secs(seconds) / 3;
        let mut goodput = Goodput::default();
        let mut view = View::new(start, &self.vpn.client.status()?);
        let (mut cut, mut restored) = (None, None);
        let limit = Duration::from_secs(seconds) + GRACE;
        while iperf.exited()?.is_none() && start.elapsed() < limit {
            self.tick()?;
            goodput.read(&mut output);
            if cut.is_none() && start.elapsed() >= third {
                self.lab.link(0)?.down()?;
                cut = Some(Instant::now());
            }
            if restored.is_none() && start.elapsed() >= third * 2 {
                self.lab.link(0)?.up()?;
                restored = Some(Instant::now());
            }
            if view.is_due() {
                let event = [("link 1 is back", restored), ("link 1 is cut", cut)];
                view.show(&self.vpn.client.status()?, &goodput, event);
            }
        }
        goodput.read(&mut output);
        view.end();
        let end = Instant::now();
        ping.signal(Signal::INT)?;
        self.wait_end(&mut ping, Duration::from_secs(2))?;
        let pings = Pings::parse(&ping.stdout(), Instant::now(), SystemTime::now());
        let (Some(cut), Some(restored)) = (cut, restored) else {
            return Err(self.failed("iperf3", &iperf));
        };
        if goodput.is_empty() {
            return Err(self.failed("iperf3", &iperf));
        }
        let links: Vec<History> =
            self.lab.links().iter().map(|link| link.history()).collect::<Result<_, _>>()?;
        Ok(Bonding { start, cut, restored, end, goodput, pings, links })
    }

    /// Starts downloads through the tunnel.
    fn iperf(&self, seconds: u64) -> Result<(Process, TailReader), LabError> {
        let mut command = self.lab.client().command("iperf3");
        command.args(["-c", TUNNEL_SERVER_V4, "-R", "-P", FLOWS, "-t", &seconds.to_string()]);
        command.args(["-i", "0.1", "-f", "k", "--forceflush"]);
        let process = self.lab.spawn(self.lab.client(), command)?;
        let output = TailReader::open(process.stdout_path())?;
        Ok((process, output))
    }

    /// Waits until the client's paths are as wanted, link by link.
    fn wait_paths(&self, wanted: &[State]) -> Result<(), LabError> {
        let start = Instant::now();
        loop {
            let status = self.vpn.client.status()?;
            let found = |link: &str| {
                let mut paths = status["paths"].as_array().into_iter().flatten();
                let active = paths.any(|path| path["link"] == link && path["state"] == "active");
                if active { State::Active } else { State::Away }
            };
            let fits = self
                .lab
                .links()
                .iter()
                .zip(wanted)
                .all(|(link, state)| found(&link.client_device()) == *state);
            if fits && status["state"] == "up" {
                return Ok(());
            }
            if start.elapsed() > SETTLE {
                return Err(LabError::Unexpected {
                    what: format!("the client's paths after {SETTLE:?}\n{}", self.vpn.logs()),
                    expected: "active where the link is up, and only there",
                    got: status["paths"].to_string(),
                });
            }
            self.tick()?;
        }
    }

    fn wait_end(&self, process: &mut Process, limit: Duration) -> Result<(), LabError> {
        let start = Instant::now();
        while process.exited()?.is_none() && start.elapsed() < limit {
            self.tick()?;
        }
        Ok(())
    }

    /// A moment of waiting, unless it is time to stop.
    fn tick(&self) -> Result<(), LabError> {
        if Instant::now() > self.deadline {
            return Err(LabError::Unexpected {
                what: "the demonstration".to_owned(),
                expected: "an end within 85 s",
                got: self.vpn.logs(),
            });
        }
        signals::sleep(TICK)
    }

    fn failed(&self, program: &str, process: &Process) -> LabError {
        let side = self.vpn.status(Side::Client).map(|status| status.to_string()).unwrap_or_default();
        LabError::Unexpected {
            what: format!("{program} through the tunnel"),
            expected: "figures",
            got: format!("{}\n{side}\n{}", process.log_tail(10), self.vpn.logs()),
        }
    }
}

/// What is wanted of a link's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Active,
    Away,
}
