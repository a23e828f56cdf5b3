//! Runs a measurement: latency, TCP, UDP, a cut, hours.
//!
//! In: a plan, a running client, the responder of its server. Out: a report; what happens meanwhile. Always
//! holds: what cannot be measured is a sentence in `missing`, and the rest goes on; after a signal the report
//! has what was measured until then; when it ends, the client has forgotten the class of the measured flows.

use std::{
    io,
    net::SocketAddr,
    ops::ControlFlow,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use mpvpn_input::Error;
use mpvpn_os::usage;
use mpvpn_status::{
    LinkState, PathState, State, Status,
    measure::{
        LatencyRow, LatencySamples, LoadDirection, MEASURE_CLASS, MeasureReport, MeasureRequest,
        MeasuredLink, Order, RatePoint, ResponderReport, Route, TcpRow, UdpStep, UdpSweep,
    },
};
use mpvpn_types::FlowMode;

use super::{
    Interrupt, PingPlan, PingResult, Pinger,
    echo_probe::{ECHO_TIMEOUT, EchoProbe, samples},
    link_lease::LinkLease,
    plan::{
        FLOWS, IDLE_INTERVAL, LOADED_INTERVAL, MAX_LOSS_PCT, MeasurePlan, UDP_BISECTIONS,
        UDP_RATE_WITHOUT_TCP, UDP_STEPS, UDP_STEPS_OF_LINK,
    },
    responder::{Responder, Target},
    tcp_load::TcpLoad,
    udp_sweep,
};

/// How long paths over other links are waited for after a change: a handshake over a link of 600 ms, several
/// times.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the status is looked at meanwhile.
const SWITCH_POLL: Duration = Duration::from_millis(100);
/// Time that queues get to drain between two loads.
const SETTLING_TIME: Duration = Duration::from_millis(500);
/// Length of an interval in the series of a load.
pub(super) const SERIES_INTERVAL: Duration = Duration::from_millis(500);

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The client cannot be asked, or refuses.
    #[error("{0}")]
    Client(#[from] Error),
    /// The responder does not answer.
    #[error("the server does not answer measurements at {address}: {source}")]
    NoResponder {
        /// Where it should be.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The page cannot be served.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// No link can be measured.
    #[error("{0}")]
    NoLinks(String),
}

/// An event of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub enum MeasureEvent {
    /// A step begins.
    Step(String),
    /// The result of a step in words.
    Result(String),
}

/// The state of a measurement.
pub(super) struct Run<'a> {
    pub(super) plan: &'a MeasurePlan,
    pub(super) interrupt: &'a Interrupt,
    pub(super) show: &'a mut dyn FnMut(MeasureEvent),
    /// For TCP.
    pub(super) responder: Responder,
    /// For datagrams. The responder answers those of hosts with a connection: one that travels as packets,
    /// as streams come from the server's own address.
    pub(super) datagrams: Responder,
    pub(super) lease: LinkLease,
    /// The process of the client.
    pub(super) client: Option<u32>,
    pub(super) report: MeasureReport,
    runs: u32,
}

/// The links of a client that can be measured: those that the plan names, or all that carry data.
pub fn links_of(status: &Status, plan: &MeasurePlan) -> Result<Vec<MeasuredLink>, MeasureError> {
    let known = || status.links.iter().map(|link| link.name.as_str()).collect::<Vec<_>>().join(", ");
    let mut links = Vec::new();
    if let Some(name) =
        plan.links.iter().chain(&plan.cut).find(|name| status.links.iter().all(|link| link.name != **name))
    {
        return Err(MeasureError::NoLinks(format!("there is no link `{name}`: known are {}", known())));
    }
    for link in &status.links {
        let is_named = plan.links.contains(&link.name);
        let works = matches!(link.state, LinkState::Up | LinkState::Standby);
        if is_named && !works {
            let reason = if link.reason.is_empty() { link.state.to_string() } else { link.reason.clone() };
            return Err(MeasureError::NoLinks(format!(
                "the link `{}` cannot be measured: {reason}",
                link.name
            )));
        }
        if works && link.tier != "never" && (is_named || plan.links.is_empty()) {
            links.push(MeasuredLink {
                name: link.name.clone(),
                tier: link.tier.clone(),
                metered: link.metered,
            });
        }
    }
    match links.is_empty() {
        true => Err(MeasureError::NoLinks("no link of the client works".to_owned())),
        false => Ok(links),
    }
}

/// Measures.
///
/// # Errors
/// If the client or the responder cannot be reached at all.
pub fn measure(
    plan: &MeasurePlan,
    interrupt: &Interrupt,
    show: &mut dyn FnMut(MeasureEvent),
) -> Result<MeasureReport, MeasureError> {
    let status = mpvpn_api::fetch_status(&plan.socket)?;
    let links = links_of(&status, plan)?;
    let only = links.iter().map(|link| link.name.clone()).collect();
    let request = MeasureRequest { only, lane: Some(FlowMode::Datagram), ..MeasureRequest::default() };
    let (lease, state) = LinkLease::begin(&plan.socket, request)?;
    let began = (Instant::now(), SystemTime::now());
    let datagrams = reach(&state.device, &state.responders)?;
    lease.change(|request| request.lane = plan.lane)?;
    let responder = reach(&state.device, &state.responders)?;
    let report = MeasureReport {
        version: status.version.clone(),
        began_s: began.1.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        server: status.session.as_ref().map_or_else(String::new, |session| session.server.clone()),
        flow_mode: plan.lane.unwrap_or_default().to_string(),
        links,
        ..MeasureReport::default()
    };
    let client = mpvpn_api::process_at(&plan.socket);
    let mut run = Run { plan, interrupt, show, responder, datagrams, lease, client, report, runs: 0 };
    run.all(&status);
    run.report.seconds = began.0.elapsed().as_secs_f64();
    Ok(run.report)
}

/// Connects to the responder at the first address where it answers.
pub(super) fn reach(device: &str, addresses: &[SocketAddr]) -> Result<Responder, MeasureError> {
    let mut failed = None;
    for address in addresses {
        match Responder::reach(Target { device: device.to_owned(), address: *address }) {
            Ok(responder) => return Ok(responder),
            Err(source) => {
                failed = failed.or(Some(MeasureError::NoResponder { address: *address, source }));
            }
        }
    }
    Err(failed.unwrap_or_else(|| MeasureError::NoLinks("the client has no address in the tunnel".to_owned())))
}

impl Run<'_> {
    fn all(&mut self, status: &Status) {
        if !self.plan.only_long {
            self.idle_directly(status);
            for set in self.sets() {
                self.over(&set);
            }
        }
        if self.plan.cut.is_some() {
            self.guarded("the cut", Self::cut);
        }
        if self.plan.hours.is_some() {
            self.guarded("the load over hours", Self::hours);
        }
        if self.interrupt.is_set() {
            self.report.missing.push("the measurement was interrupted".to_owned());
        }
    }

    /// The sets of links to measure: each alone, and all.
    fn sets(&self) -> Vec<String> {
        let names = self.report.links.iter().map(|link| link.name.clone());
        names.filter(|_| self.report.links.len() > 1).chain([self.all_links()]).collect()
    }

    /// The set of all links: the name of the only one, or the empty name of several.
    fn all_links(&self) -> String {
        match &self.report.links[..] {
            [only] => only.name.clone(),
            _ => String::new(),
        }
    }

    /// Runs a part; why it failed is in the report.
    fn guarded(&mut self, what: &str, part: impl FnOnce(&mut Self) -> io::Result<()>) {
        if self.interrupt.is_set() {
            return;
        }
        if let Err(error) = part(self) {
            let sentence = format!("{what}: {error}");
            (self.show)(MeasureEvent::Result(sentence.clone()));
            self.report.missing.push(sentence);
            // The connections for orders may be out of step.
            self.open_orders();
        }
    }

    /// Opens the connections for orders anew. If one cannot be opened, the next part says so.
    pub(super) fn open_orders(&mut self) {
        let _ = self.open_datagram_orders().and_then(|()| self.responder.reconnect());
    }

    /// Opens the connection for orders about datagrams anew: as packets, whatever the others do.
    fn open_datagram_orders(&mut self) -> io::Result<()> {
        let is_stream = self.plan.lane == Some(FlowMode::Stream);
        if is_stream {
            self.lease.change(|request| request.lane = Some(FlowMode::Datagram)).map_err(io::Error::other)?;
            self.await_links(&self.lease.links())?;
        }
        self.datagrams.reconnect()?;
        if is_stream {
            self.lease.change(|request| request.lane = self.plan.lane).map_err(io::Error::other)?;
            self.await_links(&self.lease.links())?;
        }
        Ok(())
    }

    pub(super) fn step(&mut self, text: String) {
        (self.show)(MeasureEvent::Step(text));
    }

    pub(super) fn result(&mut self, text: String) {
        (self.show)(MeasureEvent::Result(text));
    }

    /// Latency past the tunnel, over each link, at the same time.
    fn idle_directly(&mut self, status: &Status) {
        if self.interrupt.is_set() {
            return;
        }
        self.step("latency past the tunnel".to_owned());
        let (interrupt, requests) = (self.interrupt, self.plan.idle_requests());
        let ask = |link: &MeasuredLink| -> Result<LatencyRow, String> {
            let mut over = status.paths.iter().filter(|path| path.link == link.name);
            let to = over.next().ok_or("no path")?.remote.ip();
            let plan = PingPlan {
                to,
                device: Some(link.name.clone()),
                count: Some(requests.into()),
                interval: IDLE_INTERVAL,
                timeout: ECHO_TIMEOUT,
                payload_bytes: 56,
            };
            let mut samples = LatencySamples::default();
            let pinger = Pinger::open(plan).map_err(|error| error.to_string())?;
            let note = |result: PingResult| {
                samples.add(result.rtt);
                ControlFlow::Continue(())
            };
            pinger.run(interrupt, note).map_err(|error| error.to_string())?;
            Ok(LatencyRow { route: Route::Direct, link: link.name.clone(), latency: samples.summary() })
        };
        let rows: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> =
                self.report.links.iter().map(|link| (link.name.clone(), scope.spawn(|| ask(link)))).collect();
            asked.into_iter().map(|(name, row)| (name, row.join())).collect()
        });
        for (name, row) in rows {
            match row {
                Ok(Ok(row)) if row.latency.answered == 0 => self.report.missing.push(format!(
                    "latency past the tunnel over {name}: the server's public address answers no ICMP echo request"
                )),
                Ok(Ok(row)) => self.report.idle.push(row),
                Ok(Err(reason)) => {
                    self.report.missing.push(format!("latency past the tunnel over {name}: {reason}"))
                }
                Err(_) => {}
            }
        }
    }

    /// Measures over one link alone, or over all if the name is empty.
    fn over(&mut self, set: &str) {
        let name = name_of(set).to_owned();
        let mut is_ready = false;
        self.guarded(&name, |run| {
            run.use_links(set)?;
            is_ready = true;
            Ok(())
        });
        if !is_ready {
            return;
        }
        self.guarded(&format!("latency over {name}"), |run| run.idle(set));
        for flows in FLOWS {
            for direction in [LoadDirection::Down, LoadDirection::Up] {
                self.guarded(&format!("TCP {direction}, {flows} flows over {name}"), |run| {
                    run.tcp(set, flows, direction)
                });
            }
        }
        for direction in [LoadDirection::Down, LoadDirection::Up] {
            self.guarded(&format!("UDP {direction} over {name}"), |run| run.udp(set, direction));
        }
        if !set.is_empty()
            && let Err(reason) = self.is_on(&[set.to_owned()])
        {
            self.report
                .missing
                .push(format!("the figures over {name} may be those of other links: {reason}"));
        }
    }

    /// Puts the measured flows on one link, or on all, and waits until their connection uses these.
    pub(super) fn use_links(&mut self, set: &str) -> io::Result<()> {
        let all: Vec<String> = self.report.links.iter().map(|link| link.name.clone()).collect();
        let only = if set.is_empty() { all } else { vec![set.to_owned()] };
        self.lease
            .change(|request| (request.only, request.exclude) = (only.clone(), Vec::new()))
            .map_err(io::Error::other)?;
        self.await_links(&only)?;
        self.interrupt.sleep(SETTLING_TIME);
        self.responder.reconnect()
    }

    /// Waits until the connection of the measured flows uses these links.
    fn await_links(&self, links: &[String]) -> io::Result<()> {
        // It begins with the first packet.
        let probe = EchoProbe::start(&self.datagrams.target, SWITCH_POLL, None)?;
        let deadline = Instant::now() + SWITCH_TIMEOUT;
        let found = loop {
            let found = self.is_on(links);
            if found.is_ok() || self.interrupt.is_set() || Instant::now() >= deadline {
                break found;
            }
            self.interrupt.sleep(SWITCH_POLL);
        };
        probe.stop();
        found.map_err(io::Error::other)
    }

    /// Whether the connection of the measured flows works, and uses these links and no others; why not.
    fn is_on(&self, links: &[String]) -> Result<(), String> {
        let status = mpvpn_api::fetch_status(&self.plan.socket).map_err(|error| error.to_string())?;
        let class = status.classes.iter().find(|class| class.name == MEASURE_CLASS);
        let Some(class) = class else { return Err("the client has no class for it".to_owned()) };
        if class.state != Some(State::Up) {
            let state = class.state.unwrap_or_default();
            let reason = if class.reason.is_empty() { String::new() } else { format!(": {}", class.reason) };
            return Err(format!("its connection is {state}{reason}"));
        }
        let paths = || status.paths.iter().filter(|path| path.class == MEASURE_CLASS);
        let carries = |link: &String| paths().any(|path| path.link == *link && path.state != PathState::Down);
        if let Some(link) = links.iter().find(|link| !carries(link)) {
            return Err(format!("no path over {link} works"));
        }
        match paths().find(|path| !links.contains(&path.link) && path.state == PathState::Active) {
            Some(other) => Err(format!("a path over {} still carries data", other.link)),
            None => Ok(()),
        }
    }

    fn idle(&mut self, set: &str) -> io::Result<()> {
        self.step(format!("latency over {}", name_of(set)));
        let probe = EchoProbe::start(&self.datagrams.target, IDLE_INTERVAL, Some(self.plan.idle_requests()))?;
        while !probe.is_over() && !self.interrupt.is_set() {
            self.interrupt.sleep(SWITCH_POLL);
        }
        let latency = samples(&probe.stop()).summary();
        if let Some(rtt) = latency.rtt_ms {
            self.result(format!("{:.1} ms (p99 {:.1} ms), {:.1} % lost", rtt.p50, rtt.p99, latency.loss_pct));
        }
        let route = if set.is_empty() { Route::All } else { Route::Link };
        self.report.idle.push(LatencyRow { route, link: set.to_owned(), latency });
        Ok(())
    }

    fn tcp(&mut self, set: &str, flows: u32, direction: LoadDirection) -> io::Result<()> {
        let plural = if flows == 1 { "" } else { "s" };
        self.step(format!("TCP {direction}, {flows} flow{plural} over {}", name_of(set)));
        let before: ResponderReport = self.responder.orders.ask(Order::Report)?;
        let cpu_before = self.client_cpu();
        let load = TcpLoad::start(&self.responder.target, direction, flows, None)?;
        let probe = EchoProbe::start(&self.datagrams.target, LOADED_INTERVAL, None)?;
        let began = Instant::now();
        let end = began + Duration::from_secs(self.plan.load_seconds.into());
        let mut meter = Meter::begin(self, direction, &load)?;
        while Instant::now() < end && !load.has_failed() {
            if !self.interrupt.sleep_until(end.min(Instant::now() + SERIES_INTERVAL)) {
                break;
            }
            meter.note(self, &load)?;
        }
        let passed = began.elapsed().as_secs_f64();
        let cpu_after = self.client_cpu();
        let after: ResponderReport = self.responder.orders.ask(Order::Report)?;
        let has_failed = load.has_failed();
        let own = load.stop();
        let loaded = samples(&probe.stop()).summary();
        self.interrupt.sleep(SETTLING_TIME);
        let ended: ResponderReport = self.responder.orders.ask(Order::Report)?;
        if has_failed {
            return Err(io::Error::other("all connections ended early"));
        }
        let (segments, retransmitted) = match direction {
            LoadDirection::Up => (own.segments, own.retransmitted),
            LoadDirection::Down => (
                ended.segments - before.segments.min(ended.segments),
                ended.retransmitted - before.retransmitted.min(ended.retransmitted),
            ),
        };
        let percent = |used: Duration| 100.0 * used.as_secs_f64() / passed.max(0.001);
        let row = TcpRow {
            link: set.to_owned(),
            flows,
            direction,
            bits_per_second: meter.mean(),
            segments,
            retransmitted,
            loaded,
            client_cpu_pct: percent(cpu_after.saturating_sub(cpu_before)),
            server_cpu_pct: percent(Duration::from_micros(after.cpu_us.saturating_sub(before.cpu_us))),
            series: meter.series,
        };
        let rtt = row.loaded.rtt_ms.map_or_else(String::new, |rtt| format!(", {:.0} ms under load", rtt.p50));
        self.result(format!(
            "{:.1} Mbit/s{rtt}, {} retransmitted",
            row.bits_per_second / 1e6,
            row.retransmitted
        ));
        self.report.tcp.push(row);
        Ok(())
    }

    pub(super) fn client_cpu(&self) -> Duration {
        self.client.and_then(usage::processor_time).unwrap_or_default()
    }

    fn udp(&mut self, set: &str, direction: LoadDirection) -> io::Result<()> {
        let best_tcp = self.report.tcp.iter().filter(|row| row.direction == direction && row.link == set);
        let top = best_tcp.map(|row| row.bits_per_second).fold(0.0, f64::max);
        let top = if top > 0.0 { top } else { UDP_RATE_WITHOUT_TCP };
        let mut sweep = UdpSweep { link: set.to_owned(), direction, ..UdpSweep::default() };
        let steps = if set == self.all_links() { UDP_STEPS } else { UDP_STEPS_OF_LINK };
        for part in steps {
            self.udp_step(&mut sweep, top * part)?;
        }
        for _ in 0..UDP_BISECTIONS {
            let good = best_of(&sweep.steps).map_or(0.0, |step| step.sent_bits_per_second);
            let bad = sweep.steps.iter().map(|step| step.sent_bits_per_second).filter(|rate| *rate > good);
            let bad = bad.fold(f64::INFINITY, f64::min);
            if bad.is_finite() {
                self.udp_step(&mut sweep, (good + bad) / 2.0)?;
            }
        }
        sweep.steps.sort_by(|a, b| a.sent_bits_per_second.total_cmp(&b.sent_bits_per_second));
        sweep.best_bits_per_second = best_of(&sweep.steps).map(|step| step.received_bits_per_second);
        self.report.udp.push(sweep);
        Ok(())
    }

    fn udp_step(&mut self, sweep: &mut UdpSweep, rate: f64) -> io::Result<()> {
        if self.interrupt.is_set() {
            return Ok(());
        }
        self.step(format!("UDP {}, {:.1} Mbit/s over {}", sweep.direction, rate / 1e6, name_of(&sweep.link)));
        self.runs += udp_sweep::RUNS_OF_STEP;
        let wish = (self.runs, rate, self.plan.udp_step());
        let step = udp_sweep::step(&self.datagrams, sweep.direction, wish, self.interrupt)?;
        self.result(format!("{:.2} % lost, {:.2} ms jitter", step.loss_pct, step.jitter_ms));
        sweep.steps.push(step);
        Ok(())
    }
}

/// The step with the highest rate below which all steps lose less than the limit.
fn best_of(steps: &[UdpStep]) -> Option<UdpStep> {
    let mut sorted = steps.to_vec();
    sorted.sort_by(|a, b| a.sent_bits_per_second.total_cmp(&b.sent_bits_per_second));
    sorted.into_iter().take_while(|step| step.loss_pct < MAX_LOSS_PCT).last()
}

fn name_of(set: &str) -> &str {
    if set.is_empty() { "all links" } else { set }
}

/// The rate at the receiver of a load.
pub(super) struct Meter {
    direction: LoadDirection,
    first: (f64, u64),
    last: (f64, u64),
    pub(super) series: Vec<RatePoint>,
    began: Instant,
}

impl Meter {
    pub(super) fn begin(run: &Run<'_>, direction: LoadDirection, load: &TcpLoad) -> io::Result<Self> {
        let mut meter =
            Self { direction, first: (0.0, 0), last: (0.0, 0), series: Vec::new(), began: Instant::now() };
        meter.first = meter.sample(run, load)?;
        meter.last = meter.first;
        Ok(meter)
    }

    /// The time of the receiver's clock (s), and the bytes that it has read.
    fn sample(&self, run: &Run<'_>, load: &TcpLoad) -> io::Result<(f64, u64)> {
        Ok(match self.direction {
            LoadDirection::Down => (self.began.elapsed().as_secs_f64(), load.bytes()),
            LoadDirection::Up => {
                let report: ResponderReport = run.responder.orders.ask(Order::Report)?;
                (report.at_us as f64 / 1e6, report.received_bytes)
            }
        })
    }

    /// Adds a point to the series.
    pub(super) fn note(&mut self, run: &Run<'_>, load: &TcpLoad) -> io::Result<()> {
        let now = self.sample(run, load)?;
        let (from, to) = (self.last, now);
        self.last = now;
        let second = to.0 - self.first.0;
        self.series.push(RatePoint { second, bits_per_second: rate(from, to) });
        Ok(())
    }

    /// The mean rate of all points (bit/s).
    pub(super) fn mean(&self) -> f64 {
        rate(self.first, self.last)
    }
}

fn rate(from: (f64, u64), to: (f64, u64)) -> f64 {
    to.1.saturating_sub(from.1) as f64 * 8.0 / (to.0 - from.0).max(0.001)
}

#[cfg(test)]
mod tests {
    use mpvpn_input::role::Role;
    use mpvpn_status::Link;

    use super::*;

    fn step(rate: f64, loss_pct: f64) -> UdpStep {
        UdpStep { sent_bits_per_second: rate, loss_pct, ..UdpStep::default() }
    }

    #[test]
    fn the_best_rate_is_below_every_rate_that_loses() {
        let steps = [step(3.0, 0.5), step(1.0, 0.0), step(2.0, 0.9), step(5.0, 0.0), step(4.0, 1.0)];
        assert_eq!(best_of(&steps).map(|step| step.sent_bits_per_second), Some(3.0));
        assert_eq!(best_of(&[step(1.0, 2.0)]), None);
    }

    #[test]
    fn links_are_those_that_work_or_that_are_named() {
        let link = |name: &str, state, tier: &str| Link { state, tier: tier.into(), ..Link::new(name) };
        let links = vec![
            link("eth1", LinkState::Up, "primary"),
            link("wwan0", LinkState::Standby, "backup"),
            link("eth2", LinkState::Up, "never"),
            Link { reason: "no carrier".into(), ..link("eth3", LinkState::Down, "primary") },
        ];
        let status = Status { links, ..Status::new(Role::Client) };
        let plan = |names: &[&str]| MeasurePlan {
            socket: "x".into(),
            links: names.iter().map(|name| (*name).to_owned()).collect(),
            lane: None,
            load_seconds: 1,
            cut: None,
            hours: None,
            rate: None,
            only_long: false,
        };
        let names = |plan: &MeasurePlan| {
            links_of(&status, plan)
                .map(|links| links.into_iter().map(|link| link.name).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(names(&plan(&[])), Ok(vec!["eth1".into(), "wwan0".into()]));
        assert_eq!(names(&plan(&["wwan0"])), Ok(vec!["wwan0".into()]));
        assert_eq!(names(&plan(&["eth3"])), Err("the link `eth3` cannot be measured: no carrier".into()));
        let unknown = "there is no link `eth9`: known are eth1, wwan0, eth2, eth3";
        assert_eq!(names(&plan(&["eth9"])), Err(unknown.into()));
        let cut = MeasurePlan { cut: Some("eth9".into()), ..plan(&[]) };
        assert_eq!(names(&cut), Err(unknown.into()));
    }
}
