//! Reboots, and failures of the power supply.

use std::time::{Duration, Instant};

use crate::{
    machine::Machine,
    network::INTERNET,
    report::{step, within},
    site::{Site, wait_for_tunnel},
};

/// From the moment at which a client's system has started to a tunnel that carries traffic.
const CLIENT_BAR: Duration = Duration::from_secs(10);
/// The same after a server has come back: its clients notice by the silence, and try again and again.
const SERVER_BAR: Duration = Duration::from_secs(20);

pub(super) fn run() {
    let mut site = Site::new("boot", &[], &[]);
    site.set_up();
    let addresses = [&site.alpha, &site.beta].map(Machine::tunnel_addresses);
    let keeps_addresses = |site: &Site| {
        let now = [&site.alpha, &site.beta].map(Machine::tunnel_addresses);
        assert_eq!(now, addresses, "clients have other addresses");
    };
    step("a client reboots", || {
        site.alpha.reboot();
        within("the tunnel is there again", wait_for_tunnel(&site.alpha), CLIENT_BAR);
        keeps_addresses(&site);
    });
    step("a client loses its power", || {
        site.alpha.cut_power();
        site.alpha.boot();
        within("the tunnel is there again", wait_for_tunnel(&site.alpha), CLIENT_BAR);
        keeps_addresses(&site);
    });
    step("the server reboots", || {
        site.server.reboot();
        comes_back(&site);
        keeps_addresses(&site);
    });
    step("the server loses its power", || {
        site.server.cut_power();
        site.server.boot();
        comes_back(&site);
        keeps_addresses(&site);
    });
    step("a client boots while the server is off", || {
        site.server.power_off();
        // The boot ends though there is no tunnel.
        site.alpha.reboot();
        assert!(!site.alpha.reaches(INTERNET) || site.alpha.status().is_ok(), "the client does not run");
        site.server.boot();
        comes_back(&site);
        keeps_addresses(&site);
    });
}

/// Waits until both clients have their tunnels after the server has started.
fn comes_back(site: &Site) {
    let began = Instant::now();
    let _ = [&site.alpha, &site.beta].map(wait_for_tunnel);
    within("both tunnels are there again", began.elapsed(), SERVER_BAR);
}
