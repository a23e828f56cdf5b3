//! The results of a run, as a table, as JSON and as a picture.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_lab::LabError;
use serde::Serialize;

use super::{
    LOSSY_CLASS, plot,
    traffic::{Datagram, FLOWS, Figures},
};
use crate::results;

/// The times of the events of a run, since the start of the traffic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) begin: Duration,
    pub(super) loss_begins: Duration,
    pub(super) loss_ends: Duration,
    pub(super) end: Duration,
}

/// The recording of a run.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) link: String,
    /// The share of the lossy connection's packets that was dropped, 0 to 1.
    pub(super) loss: f64,
    pub(super) times: Times,
    /// The datagrams of each flow, in the order of [`FLOWS`].
    pub(super) records: Vec<Vec<Datagram>>,
}

/// The content of `classes.json`; the names of the fields are its keys.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    link: &'a str,
    harmed_class: &'a str,
    loss_pct: f64,
    classes: Vec<ClassFigures>,
}

#[derive(Debug, Serialize)]
struct ClassFigures {
    name: &'static str,
    offered_mbps: f64,
    before: Figures,
    during: Figures,
    after: Figures,
}

impl Run {
    /// The figures of a class before, during and after the loss.
    fn parts(&self, class: usize) -> [Figures; 3] {
        let Times { begin, loss_begins, loss_ends, end } = self.times;
        let of = |time: Range<Duration>| Figures::of(&FLOWS[class], &self.records[class], time);
        [of(begin..loss_begins), of(loss_begins..loss_ends), of(loss_ends..end)]
    }

    /// Prints the figures as a table.
    pub(super) fn print(&self) {
        println!(
            "\nThere and back through the tunnel, with {:.0} % of the packets of {LOSSY_CLASS} lost in",
            self.loss * 100.0
        );
        println!("the second part ({}):\n", self.link);
        println!("  class     part       Mbit/s   RTT p50      p99         lost");
        let ms =
            |value: Option<f64>| value.map_or_else(|| "    –".to_owned(), |value| format!("{value:5.1}"));
        for (class, flow) in FLOWS.iter().enumerate() {
            for (part, found) in ["before", "during", "after"].iter().zip(self.parts(class)) {
                let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
                let Figures { mbps, lost, sent, .. } = found;
                println!("  {:9} {part:9} {mbps:7.2}  {p50} ms {p99} ms  {lost:5} of {sent}", flow.class);
            }
        }
    }

    /// Writes the picture and the figures into `dir`, and returns their paths.
    pub(super) fn write(&self, dir: &Path) -> Result<(PathBuf, PathBuf), LabError> {
        let class = |(class, flow): (usize, &super::traffic::ClassFlow)| {
            let [before, during, after] = self.parts(class);
            ClassFigures { name: flow.class, offered_mbps: flow.mbps(), before, during, after }
        };
        let summary = Summary {
            link: &self.link,
            harmed_class: LOSSY_CLASS,
            loss_pct: self.loss * 100.0,
            classes: FLOWS.iter().enumerate().map(class).collect(),
        };
        results::write(dir, ("classes.svg", plot::draw(self)), ("classes.json", &summary))
    }
}
