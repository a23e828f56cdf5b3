//! `mpvpn lab classes`: three classes over one link, packet loss in the connection of one of them, and the
//! effect on each.
//!
//! In: the options. Out: a live view, a summary, `classes.svg` and `classes.json`. Always holds: every figure
//! was measured in this run, and the run ends a few seconds after the requested duration.

mod plot;
mod report;
mod traffic;

use std::{
    fs,
    process::ExitCode,
    time::{Duration, Instant},
};

use mpvpn_lab::{Direction, Lab, LabError, requirements, signals};
use serde_json::Value;

use self::{
    report::{Run, Times},
    traffic::{FLOWS, Figures, Traffic},
};
use crate::{
    commands::ClassesArgs,
    screen::Screen,
    vpn::{self, Vpn, VpnOptions},
};

/// The class whose connection loses packets.
const LOSSY_CLASS: &str = "bulk";
/// Time in which every class must have an active path. Connections come up within a second; longer delays an
/// error, shorter fails on a busy machine.
const PATHS_TIMEOUT: Duration = Duration::from_secs(10);
/// Traffic before the measured time, in which path MTUs and rates are found. Shorter lets this show in the
/// figures.
const WARM_UP: Duration = Duration::from_secs(2);
/// Time after an interval in which replies to its packets still count; later ones are shown as lost. Longer
/// delays the live view, shorter counts slow replies as lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval of the live view.
const DISPLAY_INTERVAL: Duration = Duration::from_secs(1);
/// How often the time is checked against the next event. Longer makes events late, shorter costs wake-ups.
const TICK: Duration = Duration::from_millis(50);

/// Runs the command.
pub(crate) fn run(args: &ClassesArgs) -> Result<ExitCode, LabError> {
    requirements::check(&[requirements::IP, requirements::OPENSSL])?;
    signals::catch_signals();
    println!("A link ({}), a server and a client, in namespaces of this machine.", args.link);
    let lab = Lab::builder().link(args.link.clone()).build()?;
    // A class with a table of its own has a connection also while no link is full.
    let config = lab.dir().join("client.toml");
    fs::write(&config, "[[class]]\nname = \"critical\"\n\n[[class]]\nname = \"bulk\"\n")
        .map_err(LabError::io("write the client's configuration"))?;
    let client_args = vec!["--config".to_owned(), config.display().to_string()];
    let mut vpn = vpn::start(&lab, &VpnOptions { client_args, ..VpnOptions::default() })?;
    let run = measure(&lab, &vpn, args)?;
    vpn.stop()?;
    run.print();
    let (plot, figures) = run.write(&args.output)?;
    println!("\nPlot:    {}\nFigures: {}", plot.display(), figures.display());
    Ok(ExitCode::SUCCESS)
}

fn measure(lab: &Lab, vpn: &Vpn, args: &ClassesArgs) -> Result<Run, LabError> {
    println!("The tunnel is up; the client's API is {}.\n", vpn.client.socket().display());
    let traffic = Traffic::start(lab)?;
    // Some classes have a connection only while they have traffic.
    let local_ports = local_ports(vpn)?;
    signals::sleep(WARM_UP)?;
    let begin = traffic.start.elapsed();
    let duration = Duration::from_secs(args.seconds);
    let times = Times {
        begin,
        loss_begins: begin + duration / 3,
        loss_ends: begin + duration * 2 / 3,
        end: begin + duration,
    };
    let set_loss = |share: f64| {
        let local_ports = local_ports.clone();
        lab.link(0)?.set(Direction::Both, move |params| {
            params.port_loss =
                local_ports.iter().map(|port| (*port, share)).filter(|(_, share)| *share > 0.0).collect();
        })
    };
    let mut screen = Screen::new();
    let mut second = begin;
    for (until, share) in [(times.loss_begins, 0.0), (times.loss_ends, args.loss), (times.end, 0.0)] {
        set_loss(share)?;
        while traffic.start.elapsed() < until {
            signals::sleep(TICK)?;
            if traffic.start.elapsed() >= second + DISPLAY_INTERVAL + REPLY_TIMEOUT {
                let figures = traffic.figures(second..second + DISPLAY_INTERVAL);
                let wire = path_loss_percent(&vpn.client.status()?);
                let loss_begins =
                    (times.loss_begins..times.loss_ends).contains(&(second + DISPLAY_INTERVAL / 2));
                second += DISPLAY_INTERVAL;
                let share = if loss_begins { args.loss } else { 0.0 };
                show(&mut screen, (second - begin).as_secs(), share, &figures, &wire);
            }
        }
    }
    traffic.stop_sending();
    signals::sleep(REPLY_TIMEOUT)?;
    Ok(Run { link: args.link.to_string(), loss: args.loss, times, records: traffic.records() })
}

/// The client's UDP ports of the lossy connection, once every class has an active path.
fn local_ports(vpn: &Vpn) -> Result<Vec<u16>, LabError> {
    let start = Instant::now();
    loop {
        let status = vpn.client.status()?;
        let of = |class: &str| -> Vec<u16> {
            let paths = status["paths"].as_array().into_iter().flatten();
            let own = paths.filter(|path| path["class"] == class && path["state"] == "active");
            let port = |path: &Value| path["local"].as_str()?.rsplit_once(':')?.1.parse().ok();
            own.filter_map(port).collect()
        };
        if FLOWS.iter().all(|flow| !of(flow.class).is_empty()) {
            return Ok(of(LOSSY_CLASS));
        }
        if start.elapsed() > PATHS_TIMEOUT {
            return Err(LabError::Unexpected {
                what: format!("the client's paths after {PATHS_TIMEOUT:?}\n{}", vpn.logs()),
                expected: "an active one for each class",
                got: status["paths"].to_string(),
            });
        }
        signals::sleep(TICK)?;
    }
}

/// The loss that the paths of each class measured over the last 10 s, in percent of sent packets.
fn path_loss_percent(status: &Value) -> Vec<f64> {
    let of = |class: &str| {
        let paths = status["paths"].as_array().into_iter().flatten();
        let own = paths.filter(|path| path["class"] == class).filter_map(|path| path["loss_pct"].as_f64());
        own.fold(0.0, f64::max)
    };
    FLOWS.iter().map(|flow| of(flow.class)).collect()
}

fn show(screen: &mut Screen, second: u64, share: f64, figures: &[Figures], wire: &[f64]) {
    let event = match share {
        0.0 => "no emulated loss".to_owned(),
        share => format!("{:.0} % of the packets of {LOSSY_CLASS} are lost", share * 100.0),
    };
    let ms = |value: Option<f64>| value.map_or_else(|| "    –".to_owned(), |value| format!("{value:5.1}"));
    let rows = || FLOWS.iter().zip(figures).zip(wire);
    let mut lines = vec![
        format!("  {second:3} s   {event}"),
        "  class      Mbit/s   RTT p50    p99       lost   on the wire".to_owned(),
    ];
    lines.extend(rows().map(|((flow, found), wire)| {
        let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
        let Figures { mbps, lost, sent, .. } = found;
        format!("  {:9} {mbps:7.2}  {p50} ms {p99} ms {lost:4} of {sent:4}  {wire:5.1} %", flow.class)
    }));
    let short = rows().map(|((flow, found), _)| {
        let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
        format!("{} {:5.2} Mbit/s {p50} {p99} ms, {} lost", flow.class, found.mbps, found.lost)
    });
    let line = format!("  {second:3} s  {}  ({event})", short.collect::<Vec<_>>().join(" | "));
    screen.show(&lines, &line);
}
