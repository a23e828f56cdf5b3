//! Upgrades while traffic passes.

use std::{
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::ping::Ping;

use crate::{
    machine::Machine,
    network::INTERNET,
    package::{newer_package, package, version_of},
    report::{step, within},
    site::{Site, install_file, wait_for_tunnel},
};

/// Longest time without an answered ping while one end is upgraded: its process ends and starts once.
const GAP_BAR: Duration = Duration::from_secs(2);
/// The same for a client whose TUN device stays.
const PERSISTENT_GAP_BAR: Duration = Duration::from_secs(1);
/// Time of the ping and the transfer beside an upgrade: longer than the upgrade of a busy machine.
const SECONDS: u32 = 15;

pub(super) fn run() {
    let site = Site::new("upgrade", &[], &[]);
    site.set_up();
    let Site { server, alpha, beta, .. } = &site;
    let newer = step("make a package of a higher version", newer_package);
    server.shell("echo '# a line of the administrator' >>/etc/mpvpn/server.toml");
    let addresses = [alpha, beta].map(Machine::tunnel_addresses);
    let in_tunnel = server.tunnel_addresses();
    let in_tunnel: Vec<&str> = in_tunnel.iter().filter_map(|address| address.split('/').next()).collect();
    let in_tunnel = <[&str; 2]>::try_from(in_tunnel).expect("an address of each family");
    step("upgrade the server under load", || {
        within("longest time without an answer", upgrade(server, alpha, in_tunnel, &newer), GAP_BAR);
        let _ = [alpha, beta].map(wait_for_tunnel);
        assert_eq!([alpha, beta].map(Machine::tunnel_addresses), addresses, "clients have other addresses");
    });
    let text = server.run(&["cat", "/etc/mpvpn/server.toml"]);
    assert!(text.contains("a line of the administrator"), "the upgrade replaced server.toml");
    step("upgrade a client under load, whose device stays", || {
        alpha
            .shell("sed -i '1i tun-persist = true' /etc/mpvpn/client.toml && systemctl restart mpvpn-client");
        wait_for_tunnel(alpha);
        alpha.shell("ip route add 203.0.113.0/24 dev mpvpn0");
        let gap = upgrade(alpha, alpha, in_tunnel, &newer);
        within("longest time without an answer", gap, PERSISTENT_GAP_BAR);
        wait_for_tunnel(alpha);
        assert_eq!(alpha.tunnel_addresses(), addresses[0], "the client has another address");
        let routes = alpha.run(&["ip", "route", "show", "dev", "mpvpn0"]);
        assert!(routes.contains("203.0.113.0/24"), "the route of another program is gone: {routes}");
    });
    for machine in [server, alpha] {
        let installed = machine.run(&["dpkg-query", "--show", "--showformat", "${Version}", "mpvpn"]);
        assert_eq!(installed, version_of(&newer));
        assert_ne!(installed, version_of(&package()));
    }
}

/// Upgrades a machine while a client downloads from the internet, and pings the server's addresses in the
/// tunnel, which nobody else answers. Returns the longest gap between two answers of one address.
fn upgrade(machine: &Machine, client: &Machine, in_tunnel: [&str; 2], package: &Path) -> Duration {
    let seconds = SECONDS.to_string();
    let load = ["iperf3", "--client", INTERNET[0], "--reverse", "--bitrate", "10M", "--time", &seconds];
    let mut load = client.command(Duration::from_secs(60), &load);
    let mut load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("iperf3 runs");
    let ping = client.ping(in_tunnel, Duration::from_millis(20), SECONDS);
    let last_ping = SystemTime::now() + Duration::from_secs(SECONDS.into());
    thread::sleep(Duration::from_secs(1));
    let began = SystemTime::now();
    install_file(machine, package);
    let ended = SystemTime::now();
    let pings = ping.map(Ping::finish);
    // The transfer may break where the machine itself is the client.
    let _ = load.kill();
    let _ = load.wait();
    let until = (ended + Duration::from_secs(3)).min(last_ping);
    pings.iter().map(|pings| pings.longest_gap(began, until)).max().unwrap_or_default()
}
