//! A testbed with a client whose configuration has classes, and the traffic of each class.

use std::{fs, time::Duration};

use mpvpn_lab::Direction;
use mpvpn_tests::{
    call::{Call, CallProfile},
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::Value;

use crate::paths::load::{Iperf, IperfServer, Load, TcpKind};

/// How long all classes may take until they have paths over all links.
const PATHS_TIMEOUT: Duration = Duration::from_secs(15);

/// A class, and ten ports whose traffic belongs to it.
#[derive(Clone, Copy)]
pub(super) struct ClassTraffic {
    pub(super) class: &'static str,
    /// First port: for iperf3; the next one is for calls.
    pub(super) port: u16,
    /// Further lines of its table in the configuration.
    pub(super) more: &'static str,
}

impl ClassTraffic {
    pub(super) const fn new(class: &'static str, port: u16) -> Self {
        Self { class, port, more: "" }
    }

    /// The class with further lines in its table.
    pub(super) const fn with(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    fn table(&self) -> String {
        let Self { class, port, more } = self;
        format!("[[class]]\nname = \"{class}\"\n{more}\n[[class.match]]\nports = \"{port}-{}\"\n", port + 9)
    }

    /// Starts a call in the class.
    pub(super) fn call(&self, setup: &ClassTestbed, profile: CallProfile) -> Result<Call, String> {
        Call::start(&setup.testbed, (TUNNEL, self.port + 1), profile)
    }

    /// Starts load in the class that is measured for `seconds` after the start-up of TCP.
    pub(super) fn load(
        &self,
        setup: &ClassTestbed,
        load: Load,
        direction: Direction,
        seconds: u32,
    ) -> Result<Iperf, String> {
        Iperf::start(&setup.testbed, TcpKind::Tcp, (TUNNEL, self.port), load, direction, seconds)
    }

    /// Starts the iperf3 server of the class.
    pub(super) fn iperf(&self, setup: &ClassTestbed) -> Result<IperfServer, String> {
        IperfServer::start(&setup.testbed, TcpKind::Tcp, self.port)
    }
}

/// The built-in classes, with their ports in this rig.
pub(super) const CRITICAL: ClassTraffic = ClassTraffic::new("critical", 5300);
pub(super) const DEFAULT: ClassTraffic = ClassTraffic::new("default", 5310);
pub(super) const BULK: ClassTraffic = ClassTraffic::new("bulk", 5320);
/// The built-in classes.
pub(super) const ALL_CLASSES: [ClassTraffic; 3] = [CRITICAL, DEFAULT, BULK];

/// A testbed with a server and a client with classes.
pub(super) struct ClassTestbed {
    // Dropped before the testbed.
    pub(super) client: MpvpnProcess,
    pub(super) server: MpvpnProcess,
    pub(super) testbed: Testbed,
}

impl ClassTestbed {
    /// Starts a client over these links with these classes, and waits until all classes are up on all links.
    /// `before` is the text before the class tables of the configuration.
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

    /// Sends packets in a class until it has active or standby paths over `links` links.
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

    /// The client's UDP ports of a class.
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
