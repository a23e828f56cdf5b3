//! A stage with a client whose file has classes, and the traffic of each.

use std::{fs, time::Duration};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    call::{Call, CallProfile},
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::Value;

use crate::paths::load::{Iperf, IperfServer, Load, TcpKind};

/// How long all paths may take to be there.
const PATHS_TIMEOUT: Duration = Duration::from_secs(15);

/// A class with a table in the file: what is for one of its ten ports belongs to it.
#[derive(Clone, Copy)]
pub(super) struct ClassTraffic {
    pub(super) class: &'static str,
    /// Of iperf3; calls have the port after it.
    pub(super) port: u16,
    /// What else its table says.
    pub(super) more: &'static str,
}

impl ClassTraffic {
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
    pub(super) fn call(&self, setup: &ClassTestbed, profile: CallProfile) -> Result<Call, String> {
        Call::start(&setup.testbed, (TUNNEL, self.port + 1), profile)
    }

    /// The class's load, in the seconds after what TCP needs to find its rate.
    pub(super) fn load(
        &self,
        setup: &ClassTestbed,
        load: Load,
        direction: Direction,
        seconds: u32,
    ) -> Result<Iperf, String> {
        Iperf::start(&setup.testbed, TcpKind::Tcp, (TUNNEL, self.port), load, direction, seconds)
    }

    /// Who takes it at the server.
    pub(super) fn iperf(&self, setup: &ClassTestbed) -> Result<IperfServer, String> {
        IperfServer::start(&setup.testbed, TcpKind::Tcp, self.port)
    }
}

pub(super) const CRITICAL: ClassTraffic = ClassTraffic::new("critical", 5300);
pub(super) const DEFAULT: ClassTraffic = ClassTraffic::new("default", 5310);
pub(super) const BULK: ClassTraffic = ClassTraffic::new("bulk", 5320);
/// The three that are there from the start.
pub(super) const ALL_CLASSES: [ClassTraffic; 3] = [CRITICAL, DEFAULT, BULK];

/// A stage with a server and a client.
pub(super) struct ClassTestbed {
    // Dropped before the stage they play on.
    pub(super) client: MpvpnProcess,
    pub(super) server: MpvpnProcess,
    pub(super) testbed: Testbed,
}

impl ClassTestbed {
    /// A client over these links with these classes, all of whose paths are there and none of which sleeps. `before` is
    /// what its file says before the tables of its classes.
    pub(super) fn new(links: &[&str], before: &str, lines: &[ClassTraffic]) -> Result<Self, String> {
        let testbed = Testbed::new(links);
        let tables: String = lines.iter().map(ClassTraffic::table).collect();
        let file = testbed.dir().join("classes.toml");
        fs::write(&file, format!("{before}\n{tables}"))
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let server = testbed.server(&[]);
        let client = testbed.client(&["--config", "classes.toml"]);
        let setup = Self { client, server, testbed };
        for line in lines {
            setup.wait_for_paths(line, links.len());
        }
        Ok(setup)
    }

    /// Uses a class until it has paths over so many links that carry data or wait for their turn.
    fn wait_for_paths(&self, ClassTraffic { class, port, .. }: &ClassTraffic, links: usize) {
        let what = format!("paths of {class} over {links} links");
        self.client.wait_for_status(PATHS_TIMEOUT, &what, |status| {
            self.testbed.send_empty_udp(Host::Client, (TUNNEL, *port));
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
    pub(super) fn nft(&self, host: Host, text: &str) -> Result<String, String> {
        let file = self.testbed.file("nft", host);
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(self.testbed.run(host, &["nft", "-j", "-f", file.to_str().unwrap_or_default()]))
    }
}

fn paths<'a>(status: &'a Value, class: &str) -> impl Iterator<Item = &'a Value> {
    status["paths"].as_array().into_iter().flatten().filter(move |path| path["class"] == class)
}
