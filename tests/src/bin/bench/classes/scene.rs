//! A stage with a client whose file has classes, and the traffic of each.

use std::{fs, time::Duration};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    call::{Call, Pace},
    stage::{Peer, Place, Stage, TUNNEL},
};
use serde_json::Value;

use crate::paths::load::{Iperf, Kind, Load, Sink};

/// How long all paths may take to be there.
const SETTLE: Duration = Duration::from_secs(15);

/// A class with a table in the file: what is for one of its ten ports belongs to it.
#[derive(Clone, Copy)]
pub(super) struct Line {
    pub(super) class: &'static str,
    /// Of iperf3; calls have the port after it.
    pub(super) port: u16,
    /// What else its table says.
    pub(super) more: &'static str,
}

impl Line {
    pub(super) const fn new(class: &'static str, port: u16) -> Self {
        Self { class, port, more: "" }
    }

    /// The same with more in its table.
    pub(super) const fn with(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    fn table(&self) -> String {
        let Self { class, port, more } = self;
        format!("[[class]]\nname = \"{class}\"\n{more}\n[[class.match]]\nports = \"{port}-{}\"\n", port + 9)
    }

    /// The class's call.
    pub(super) fn call(&self, scene: &Scene, pace: Pace) -> Result<Call, String> {
        Call::start(&scene.stage, (TUNNEL, self.port + 1), pace)
    }

    /// The class's load, in the seconds after what TCP needs to find its rate.
    pub(super) fn load(
        &self,
        scene: &Scene,
        load: Load,
        way: Direction,
        seconds: u32,
    ) -> Result<Iperf, String> {
        Iperf::start(&scene.stage, Kind::Tcp, (TUNNEL, self.port), load, way, seconds)
    }

    /// Who takes it at the server.
    pub(super) fn sink(&self, scene: &Scene) -> Result<Sink, String> {
        Sink::start(&scene.stage, Kind::Tcp, self.port)
    }
}

pub(super) const CRITICAL: Line = Line::new("critical", 5300);
pub(super) const DEFAULT: Line = Line::new("default", 5310);
pub(super) const BULK: Line = Line::new("bulk", 5320);
/// The three that are there from the start.
pub(super) const THREE: [Line; 3] = [CRITICAL, DEFAULT, BULK];

/// A stage with a server and a client.
pub(super) struct Scene {
    // Dropped before the stage they play on.
    pub(super) client: Peer,
    pub(super) server: Peer,
    pub(super) stage: Stage,
}

impl Scene {
    /// A client over these links with these classes, all of whose paths are there and none of which sleeps. `before` is
    /// what its file says before the tables of its classes.
    pub(super) fn new(links: &[&str], before: &str, lines: &[Line]) -> Result<Self, String> {
        let stage = Stage::new(links);
        let tables: String = lines.iter().map(Line::table).collect();
        let file = stage.dir().join("classes.toml");
        fs::write(&file, format!("{before}\n{tables}"))
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let server = stage.server(&[]);
        let client = stage.client(&["--config", "classes.toml"]);
        let scene = Self { client, server, stage };
        for line in lines {
            scene.until_there(line, links.len());
        }
        Ok(scene)
    }

    /// Uses a class until it has paths over so many links that carry data or wait for their turn.
    fn until_there(&self, Line { class, port, .. }: &Line, links: usize) {
        let what = format!("paths of {class} over {links} links");
        self.client.until(SETTLE, &what, |status| {
            self.stage.sends(Place::Client, (TUNNEL, *port));
            let mut classes = status["classes"].as_array().into_iter().flatten();
            let own = classes.find(|entry| entry["name"] == *class).ok_or("there is no such class")?;
            if own["state"] != "up" {
                return Err(format!("it is {}", own["state"]));
            }
            let is_there = |path: &&Value| path["state"] == "active" || path["state"] == "standby";
            let mut found: Vec<_> =
                paths(status, class).filter(is_there).map(|path| path["link"].to_string()).collect();
            found.sort_unstable();
            found.dedup();
            if found.len() == links { Ok(()) } else { Err(format!("there are {found:?}")) }
        });
    }

    /// The client's ports of a class.
    pub(super) fn ports(&self, class: &str) -> Vec<u16> {
        let status = self.client.status();
        let port = |path: &Value| path["local"].as_str()?.rsplit_once(':')?.1.parse().ok();
        paths(&status, class).filter_map(port).collect()
    }

    /// Runs `nft` with a file.
    pub(super) fn nft(&self, place: Place, text: &str) -> Result<String, String> {
        let file = self.stage.file("nft", place);
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(self.stage.run(place, &["nft", "-j", "-f", file.to_str().unwrap_or_default()]))
    }
}

fn paths<'a>(status: &'a Value, class: &str) -> impl Iterator<Item = &'a Value> {
    status["paths"].as_array().into_iter().flatten().filter(move |path| path["class"] == class)
}
