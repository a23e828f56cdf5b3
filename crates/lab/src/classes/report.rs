//! What the run found, in words, as JSON, and as a picture.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;

use super::{
    HARMED, plot,
    traffic::{Figures, LOADS, Sent},
};
use crate::{error::LabError, results};

/// When what was done, since the traffic began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) begin: Duration,
    pub(super) harmed: Duration,
    pub(super) healed: Duration,
    pub(super) end: Duration,
}

/// The run as it was recorded.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) link: String,
    /// The share that was lost of the harmed connection's packets.
    pub(super) loss: f64,
    pub(super) times: Times,
    /// Of each of [`LOADS`].
    pub(super) records: Vec<Vec<Sent>>,
}

/// The file of figures.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    link: &'a str,
    harmed_class: &'a str,
    loss_pct: f64,
    classes: Vec<Class>,
}

#[derive(Debug, Serialize)]
struct Class {
    name: &'static str,
    offered_mbps: f64,
    before: Figures,
    during: Figures,
    after: Figures,
}

impl Run {
    /// What became of a class in each of the three parts.
    fn parts(&self, class: usize) -> [Figures; 3] {
        let Times { begin, harmed, healed, end } = self.times;
        let of = |time: Range<Duration>| Figures::of(&LOADS[class], &self.records[class], time);
        [of(begin..harmed), of(harmed..healed), of(healed..end)]
    }

    /// Prints the figures as a table.
    pub(super) fn print(&self) {
        println!(
            "\nThere and back through the tunnel, with {:.0} % of the packets of {HARMED} lost in",
            self.loss * 100.0
        );
        println!("the second part ({}):\n", self.link);
        println!("  class     part       Mbit/s   RTT p50      p99         lost");
        let ms =
            |value: Option<f64>| value.map_or_else(|| "    –".to_owned(), |value| format!("{value:5.1}"));
        for (class, load) in LOADS.iter().enumerate() {
            for (part, found) in ["before", "during", "after"].iter().zip(self.parts(class)) {
                let (p50, p99) = (ms(found.rtt_p50_ms), ms(found.rtt_p99_ms));
                let Figures { mbps, lost, sent, .. } = found;
                println!("  {:9} {part:9} {mbps:7.2}  {p50} ms {p99} ms  {lost:5} of {sent}", load.class);
            }
        }
    }

    /// Writes the picture and the figures into `dir`; where they are.
    pub(super) fn write(&self, dir: &Path) -> Result<(PathBuf, PathBuf), LabError> {
        let class = |(class, load): (usize, &super::traffic::Load)| {
            let [before, during, after] = self.parts(class);
            Class { name: load.class, offered_mbps: load.mbps(), before, during, after }
        };
        let summary = Summary {
            link: &self.link,
            harmed_class: HARMED,
            loss_pct: self.loss * 100.0,
            classes: LOADS.iter().enumerate().map(class).collect(),
        };
        results::write(dir, ("classes.svg", plot::draw(self)), ("classes.json", &summary))
    }
}
