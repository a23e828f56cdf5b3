//! Says on which paths ICMP echoes left and arrived, for `mpvpn ping`.

use std::{collections::BTreeMap, time::Instant};

use mpvpn_report::paths::path_name;
use mpvpn_status::measure::{EchoPaths, EchoReport};
use mpvpn_tunnel::ConnectionNumber;
use mpvpn_types::{LinkId, PathId};

use super::Running;

impl Running {
    /// Watches the ICMP echo requests with this identifier for a while, and reports the latest ones.
    pub(crate) fn echo_paths(&mut self, now: Instant, identifier: u16) -> Result<EchoReport, String> {
        if self.kind.machine().is_none() {
            return Err("this client has no TUN device, so that it carries no pings".to_owned());
        }
        let Some(echoes) = self.echo_watch.read(now, identifier) else {
            return Err("too many pings run at the same time: end one of them".to_owned());
        };
        let names = self.path_names(now);
        let name = |link: &LinkId| names.get(link).cloned().unwrap_or_else(|| self.link_name(*link));
        let echoes = echoes.iter().map(|echo| EchoPaths {
            sequence: echo.sequence,
            out: echo.request.iter().map(name).collect(),
            back: echo.reply.as_ref().map(name),
            answered: echo.answered,
        });
        Ok(EchoReport { device: self.config.tun_name.clone(), echoes: echoes.collect() })
    }

    /// The names of this shard's paths, as in the status.
    fn path_names(&mut self, now: Instant) -> BTreeMap<LinkId, String> {
        let reports = self.data_plane.connections.reports(now);
        let paths = reports.iter().flat_map(|(class, report)| {
            report.paths.iter().filter_map(|path| Some((path.view.id, path.link?.with_class(*class))))
        });
        let name = |(id, link): (PathId, LinkId)| {
            let class = self.config.class_name(link.class());
            let uplink = self.data_plane.sockets.links.links.get(&link.uplink());
            let uplink = uplink.map_or("", |uplink| uplink.name.as_str());
            (link, path_name(id, &class, uplink, Some(link), ConnectionNumber::INITIAL))
        };
        paths.map(name).collect()
    }

    /// The class and the link of a path that is closed, or of another shard.
    fn link_name(&self, link: LinkId) -> String {
        let uplink = self.data_plane.sockets.links.links.get(&link.uplink());
        let uplink = uplink.map_or("removed", |uplink| uplink.name.as_str());
        format!("{}/{uplink}", self.config.class_name(link.class()))
    }
}
