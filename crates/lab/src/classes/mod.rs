//! `mpvpn lab classes`: three classes over one link, loss in the connection of one of them, and what each of them feels.
//!
//! In: the options. Out: a live view, a summary, `classes.svg` and `classes.json`. Always holds: every figure was
//! measured in this run, and the run ends soon after the time that was asked for.

mod plot;
mod report;
mod traffic;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use serde_json::Value;

use self::{
    report::{Run, Times},
    traffic::{Figures, LOADS, Traffic},
};
use crate::{
    cli::ClassesArgs,
    error::LabError,
    lab::Lab,
    link::Direction,
    requirements,
    screen::Screen,
    signals,
    vpn::{self, Vpn, VpnOptions},
};

/// The class whose connection is harmed.
const HARMED: &str = "bulk";
/// How long the connections of all classes may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Before the time that counts: path MTUs are found, and rates.
const WARM_UP: Duration = Duration::from_secs(2);
/// An answer that comes later than this comes too late to be shown as one.
const LATE: Duration = Duration::from_secs(1);
const SECOND: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(50);

/// Runs it.
pub(crate) fn run(args: &ClassesArgs) -> Result<ExitCode, LabError> {
    requirements::check(&[requirements::IP, requirements::OPENSSL])?;
    signals::catch();
    println!("A link ({}), a server and a client, in namespaces of this machine.", args.link);
    let lab = Lab::builder().link(args.link.clone()).build()?;
    let mut vpn = vpn::start(&lab, VpnOptions::default())?;
    let run = play(&lab, &vpn, args)?;
    vpn.stop()?;
    run.print();
    let (plot, figures) = run.write(&args.output)?;
    println!("\nPlot:    {}\nFigures: {}", plot.display(), figures.display());
    Ok(ExitCode::SUCCESS)
}

fn play(lab: &Lab, vpn: &Vpn, args: &ClassesArgs) -> Result<Run, LabError> {
    println!("The tunnel is up; the client's API is {}.\n", vpn.client.socket().display());
    let traffic = Traffic::start(lab)?;
    // Some have a connection only when they are used.
    let ports = ports(vpn)?;
    signals::sleep(WARM_UP)?;
    let begin = traffic.start.elapsed();
    let whole = Duration::from_secs(args.seconds);
    let times = Times { begin, harmed: begin + whole / 3, healed: begin + whole * 2 / 3, end: begin + whole };
    let harm = |share: f64| {
        let ports = ports.clone();
        lab.link(0)?.set(Direction::Both, move |params| {
            params.port_loss =
                ports.iter().map(|port| (*port, share)).filter(|(_, share)| *share > 0.0).collect();
        })
    };
    let mut screen = Screen::new();
    let mut second = begin;
    for (until, share) in [(times.harmed, 0.0), (times.healed, args.loss), (times.end, 0.0)] {
        harm(share)?;
        while traffic.start.elapsed() < until {
            signals::sleep(TICK)?;
            if traffic.start.elapsed() >= second + SECOND + LATE {
                let figures = traffic.figures(second..second + SECOND);
                let wire = wire_loss(&vpn.client.status()?);
                let harmed = (times.harmed..times.healed).contains(&(second + SECOND / 2));
                second += SECOND;
                let share = if harmed { args.loss } else { 0.0 };
                show(&mut screen, (second - begin).as_secs(), share, &figures, &wire);
            }
        }
    }
    traffic.quiet();
    signals::sleep(LATE)?;
    Ok(Run { link: args.link.to_string(), loss: args.loss, times, records: traffic.records() })
}

/// The client's ports of the harmed connection, once every class has one.
fn ports(vpn: &Vpn) -> Result<Vec<u16>, LabError> {
    let start = Instant::now();
    loop {
        let status = vpn.client.status()?;
        let of = |class: &str| -> Vec<u16> {
            let paths = status["paths"].as_array().into_iter().flatten();
            let own = paths.filter(|path| path["class"] == class && path["state"] == "active");
            let port = |path: &Value| path["local"].as_str()?.rsplit_once(':')?.1.parse().ok();
            own.filter_map(port).collect()
        };
        if LOADS.iter().all(|load| !of(load.class).is_empty()) {
            return Ok(of(HARMED));
        }
        if start.elapsed() > PATIENCE {
            return Err(LabError::Unexpected {
                what: format!("the client's paths after {PATIENCE:?}\n{}", vpn.logs()),
                expected: "an active one for each class",
                got: status["paths"].to_string(),
            });
        }
        signals::sleep(TICK)?;
    }
}

/// What the connection of each class lost of what it sent in the last 10 s, in percent.
fn wire_loss(status: &Value) -> Vec<f64> {
    let of = |class: &str| {
        let paths = status["paths"].as_array().into_iter().flatten();
        let own = paths.filter(|path| path["class"] == class).filter_map(|path| path["loss_pct"].as_f64());
        own.fold(0.0, f64::max)
    };
    LOADS.iter().map(|load| of(load.class)).collect()
}

fn show(screen: &mut Screen, second: u64, share: f64, figures: &[Figures], wire: &[f64]) {
    let event = match share {
        0.0 => "nothing is lost on purpose".to_owned(),
        share => format!("{:.0} % of the packets of {HARMED} are lost", share * 100.0),
    };
    let ms = |value: Option<f64>| value.map_or_else(|| "    –".to_owned(), |value| format!("{value:5.1}"));
    let rows = || LOADS.iter().zip(figures).zip(wire);
    let mut lines = vec![
        format!("  {second:3} s   {event}"),
        "  class      Mbit/s   RTT p50    p99       lost   on the wire".to_owned(),
    ];
    lines.extend(rows().map(|((load, found), wire)| {
        let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
        let Figures { mbps, lost, sent, .. } = found;
        format!("  {:9} {mbps:7.2}  {p50} ms {p99} ms {lost:4} of {sent:4}  {wire:5.1} %", load.class)
    }));
    let short = rows().map(|((load, found), _)| {
        let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
        format!("{} {:5.2} Mbit/s {p50} {p99} ms, {} lost", load.class, found.mbps, found.lost)
    });
    let line = format!("  {second:3} s  {}  ({event})", short.collect::<Vec<_>>().join(" | "));
    screen.show(&lines, &line);
}
