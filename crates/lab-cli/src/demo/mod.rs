//! `mpvpn lab demo`: two links bonded, one of them cut and restored, and everything measured.
//!
//! In: the options. Out: a live view, a summary, `bonding.svg` and `summary.json`. Always holds: every figure
//! shown was measured in this run, and the run ends within 90 s, after a browser has opened the dashboard if
//! it is wanted.

mod dashboard;
mod live;
mod plot;
mod report;
mod traffic;

use std::{
    process::ExitCode,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_lab::{History, Lab, LabError, LinkSpec, Process, requirements, signals};
use rustix::process::Signal;

use self::{
    dashboard::DashboardForwarder,
    live::View,
    report::{Bonding, SingleLink, Summary},
    traffic::{Goodput, Pings, TailReader},
};
use crate::{
    commands::DemoArgs,
    vpn::{self, Side, TUNNEL_SERVER_V4, Vpn, VpnOptions},
};

/// The description of both links, for the emulator.
const LINK_SPEC: &str = "100mbit,12.5ms,queue=60ms";
/// The description of both links, for users.
const LINK_DESCRIPTION: &str = "100 Mbit/s, 12.5 ms one way, 60 ms of queue";
/// Parallel TCP flows of iperf3.
const FLOW_COUNT: &str = "8";
/// Seconds for which each link is measured alone. Shorter lets slow start dominate, longer makes the
/// demonstration longer.
const ALONE_SECONDS: u64 = 5;
/// Time that TCP needs to find its rate; it is excluded from the means. Shorter lets slow start lower them,
/// longer leaves less to measure.
const TCP_START_UP: Duration = Duration::from_secs(2);
/// How often the outputs of programs are read. Longer makes times less exact, shorter costs wake-ups.
const TICK: Duration = Duration::from_millis(20);
/// Time in which paths must follow a change of a link. They do within a second; longer delays an error,
/// shorter fails on a busy machine.
const PATHS_TIMEOUT: Duration = Duration::from_secs(6);
/// Time that iperf3 may run beyond its duration: connection setup and teardown. Longer delays an error.
const PROGRAM_GRACE: Duration = Duration::from_secs(8);
/// Time after which the demonstration fails, so that it ends within 90 s with the removal of the lab.
const RUN_TIMEOUT: Duration = Duration::from_secs(85);

/// Runs the demonstration.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode, LabError> {
    requirements::check(&[
        requirements::IP,
        requirements::OPENSSL,
        requirements::IPERF3,
        requirements::PING,
    ])?;
    signals::catch_signals();
    let mut demo = Demo::set(args)?;
    if let Some(dashboard) = &demo.dashboard {
        dashboard.wait_for_browser()?;
        demo.deadline = Instant::now() + RUN_TIMEOUT;
    }
    let summary = demo.measure(args.seconds)?;
    demo.vpn.stop()?;
    summary.print();
    let (plot, figures) = summary.write(&args.output)?;
    println!("\nPlot:    {}\nFigures: {}", plot.display(), figures.display());
    Ok(ExitCode::SUCCESS)
}

/// The running demonstration: the lab and its programs.
struct Demo {
    // The order of fields is the order of drops: programs end before their lab is removed.
    dashboard: Option<DashboardForwarder>,
    _iperf_server: Process,
    vpn: Vpn,
    lab: Lab,
    deadline: Instant,
}

impl Demo {
    fn set(args: &DemoArgs) -> Result<Self, LabError> {
        let deadline = Instant::now() + RUN_TIMEOUT;
        println!("Two links ({LINK_DESCRIPTION}), a server and a client, in namespaces of this machine.");
        let link: LinkSpec = LINK_SPEC.parse()?;
        let lab = Lab::builder().link(link.clone()).link(link).build()?;
        let client_args = match args.dashboard {
            true => vec!["--dashboard".to_owned(), dashboard::ADDRESS.to_owned()],
            false => Vec::new(),
        };
        let options = VpnOptions { scheduler: args.scheduler.clone(), client_args, server_args: Vec::new() };
        let vpn = vpn::start(&lab, &options)?;
        let forward = || DashboardForwarder::start(lab.client(), &vpn.client);
        let dashboard = args.dashboard.then(forward).transpose()?;
        let mut command = lab.server().command("iperf3");
        command.args(["-s", "-B", TUNNEL_SERVER_V4]);
        let iperf_server = lab.spawn(lab.server(), command)?;
        Ok(Self { dashboard, _iperf_server: iperf_server, vpn, lab, deadline })
    }

    fn measure(&mut self, seconds: u64) -> Result<Summary, LabError> {
        self.wait_for_paths(&[PathState::Active, PathState::Active])?;
        let idle_rtt_ms = self.idle_rtt()?;
        println!(
            "The tunnel is up: {idle_rtt_ms:.1} ms there and back. Now {FLOW_COUNT} TCP downloads at a time:\n"
        );
        let alone = [self.measure_single(0, 1)?, self.measure_single(1, 0)?];
        let bonding = self.measure_bonded(seconds)?;
        Ok(Summary { link: LINK_SPEC.to_owned(), flows: FLOW_COUNT.to_owned(), idle_rtt_ms, alone, bonding })
    }

    /// Median round-trip time of a few pings, in ms.
    fn idle_rtt(&self) -> Result<f64, LabError> {
        let start = Instant::now();
        let mut command = self.lab.client().command("ping");
        command.args(["-D", "-n", "-c", "15", "-i", "0.05", "-W", "1", TUNNEL_SERVER_V4]);
        let mut ping = self.lab.spawn(self.lab.client(), command)?;
        self.wait_for_exit(&mut ping, Duration::from_secs(5))?;
        let pings = Pings::parse(&ping.stdout(), Instant::now(), SystemTime::now());
        pings.median_rtt(start, Instant::now()).ok_or_else(|| self.unusable_output("ping", &ping))
    }

    /// Goodput of one link while the other has no carrier.
    fn measure_single(&self, index: usize, other: usize) -> Result<SingleLink, LabError> {
        self.lab.link(other)?.down()?;
        let mut expected = [PathState::Active; 2];
        expected[other] = PathState::NotActive;
        self.wait_for_paths(&expected)?;
        let (mut iperf, mut output) = self.iperf(ALONE_SECONDS)?;
        let (start, mut goodput) = (Instant::now(), Goodput::default());
        let limit = Duration::from_secs(ALONE_SECONDS) + PROGRAM_GRACE;
        while iperf.exited()?.is_none() && start.elapsed() < limit {
            self.sleep_tick()?;
            goodput.read(&mut output);
        }
        goodput.read(&mut output);
        let mbps = goodput.mean_after_start_up().ok_or_else(|| self.unusable_output("iperf3", &iperf))?;
        println!("  link {} alone: {mbps:6.1} Mbit/s", index + 1);
        self.lab.link(other)?.up()?;
        self.wait_for_paths(&[PathState::Active, PathState::Active])?;
        Ok(SingleLink { link: index + 1, goodput_mbps: mbps })
    }

    fn measure_bonded(&self, seconds: u64) -> Result<Bonding, LabError> {
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
        let limit = Duration::from_secs(seconds) + PROGRAM_GRACE;
        while iperf.exited()?.is_none() && start.elapsed() < limit {
            self.sleep_tick()?;
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
        self.wait_for_exit(&mut ping, Duration::from_secs(2))?;
        let pings = Pings::parse(&ping.stdout(), Instant::now(), SystemTime::now());
        let (Some(cut), Some(restored)) = (cut, restored) else {
            return Err(self.unusable_output("iperf3", &iperf));
        };
        if goodput.is_empty() {
            return Err(self.unusable_output("iperf3", &iperf));
        }
        let links: Vec<History> =
            self.lab.links().iter().map(|link| link.history()).collect::<Result<_, _>>()?;
        Ok(Bonding { start, cut, restored, end, goodput, pings, links })
    }

    /// Starts downloads through the tunnel.
    fn iperf(&self, seconds: u64) -> Result<(Process, TailReader), LabError> {
        let mut command = self.lab.client().command("iperf3");
        command.args(["-c", TUNNEL_SERVER_V4, "-R", "-P", FLOW_COUNT, "-t", &seconds.to_string()]);
        command.args(["-i", "0.1", "-f", "k", "--forceflush"]);
        let process = self.lab.spawn(self.lab.client(), command)?;
        let output = TailReader::open(process.stdout_path())?;
        Ok((process, output))
    }

    /// Waits until the client's path over each link is in the expected state.
    fn wait_for_paths(&self, expected: &[PathState]) -> Result<(), LabError> {
        let start = Instant::now();
        loop {
            let status = self.vpn.client.status()?;
            let found = |link: &str| {
                let mut paths = status["paths"].as_array().into_iter().flatten();
                let active = paths.any(|path| path["link"] == link && path["state"] == "active");
                if active { PathState::Active } else { PathState::NotActive }
            };
            let matches = self
                .lab
                .links()
                .iter()
                .zip(expected)
                .all(|(link, state)| found(&link.client_device()) == *state);
            if matches && vpn::works(&status) {
                return Ok(());
            }
            if start.elapsed() > PATHS_TIMEOUT {
                return Err(LabError::Unexpected {
                    what: format!("the client's paths after {PATHS_TIMEOUT:?}\n{}", self.vpn.logs()),
                    expected: "active where the link is up, and only there",
                    got: status["paths"].to_string(),
                });
            }
            self.sleep_tick()?;
        }
    }

    fn wait_for_exit(&self, process: &mut Process, limit: Duration) -> Result<(), LabError> {
        let start = Instant::now();
        while process.exited()?.is_none() && start.elapsed() < limit {
            self.sleep_tick()?;
        }
        Ok(())
    }

    /// Sleeps for one tick; fails after a signal or after the deadline.
    fn sleep_tick(&self) -> Result<(), LabError> {
        if Instant::now() > self.deadline {
            return Err(LabError::Unexpected {
                what: "the demonstration".to_owned(),
                expected: "an end within 85 s",
                got: self.vpn.logs(),
            });
        }
        signals::sleep(TICK)
    }

    fn unusable_output(&self, program: &str, process: &Process) -> LabError {
        let side = self.vpn.status(Side::Client).map(|status| status.to_string()).unwrap_or_default();
        LabError::Unexpected {
            what: format!("{program} through the tunnel"),
            expected: "figures",
            got: format!("{}\n{side}\n{}", process.log_tail(10), self.vpn.logs()),
        }
    }
}

/// The expected state of a link's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathState {
    Active,
    NotActive,
}
