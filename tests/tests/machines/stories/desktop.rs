//! A client where NetworkManager configures the links and programs ask systemd-resolved.

use std::time::Duration;

use mpvpn_tests::ping::Ping;

use crate::{
    machine::Machine,
    network::{INTERNET, Link, PREFIX_LENGTHS},
    report::step,
    site::{Site, add_user, install, join, set_up_server, wait_for_tunnel},
    snapshot::Snapshot,
};

pub(super) fn run() {
    let site = Site::new("desktop", &[], &["desktop"]);
    let Site { server, alpha, network, .. } = &site;
    step("NetworkManager takes the links over", || by_network_manager(alpha));
    step("the system asks the resolver of the links", || {
        assert!(resolves(alpha), "names are not resolved on the machine before anything is installed");
    });
    let before = Snapshot::take(alpha);
    step("install, set up and join", || {
        install(server);
        set_up_server(server);
        install(alpha);
        join(alpha, &add_user(server, "alpha"));
        wait_for_tunnel(alpha);
    });
    step("names are asked for in the tunnel", || {
        let past = network.count("queries past the tunnel");
        alpha.run(&["resolvectl", "flush-caches"]);
        assert!(resolves(alpha), "names are not resolved in the tunnel");
        let device = alpha.run(&["resolvectl", "dns", "mpvpn0"]);
        assert!(device.contains("10."), "systemd-resolved knows no resolver of the tunnel: {device}");
        assert_eq!(network.count("queries past the tunnel"), past, "queries leave past the tunnel");
        let server = server.links()[0].address();
        assert!(
            network.resolver_clients().iter().any(|it| it.contains(&server)),
            "the server asks no resolver"
        );
    });
    step(
        "NetworkManager leaves the tunnel's device alone, and a link that it reconnects is used again",
        || {
            let device = alpha.run(&["nmcli", "--terse", "--fields", "DEVICE,STATE", "device"]);
            let line = device.lines().find(|line| line.starts_with("mpvpn0:")).unwrap_or_default();
            assert!(
                !line.contains(":connected") || line.contains("externally"),
                "NetworkManager manages it: {device}"
            );
            let ping = alpha.ping(INTERNET, Duration::from_millis(20), 6);
            alpha.run(&["nmcli", "device", "disconnect", "eth1"]);
            alpha.run(&["nmcli", "device", "connect", "eth1"]);
            for pings in ping.map(Ping::finish) {
                println!("            {} of {} pings lost", pings.missing(), pings.sent);
                assert!(pings.loss_pct() < 20.0, "{:.0} % of the pings lost", pings.loss_pct());
            }
            wait_for_tunnel(alpha);
        },
    );
    step("with advertised routes only names of the server's domain are asked for in the tunnel", || {
        server.shell(
            "sed -i '1i dns-domain = \"vpn.internal\"' /etc/mpvpn/server.toml
             printf '[[dns-name]]\\nname = \"camera\"\\naddress = \"10.9.9.9\"\\n' >> /etc/mpvpn/server.toml
             systemctl restart mpvpn-server",
        );
        alpha.shell(
            "sed -i '/^routes/d; 1i routes = \"advertised\"' /etc/mpvpn/client.toml; systemctl restart mpvpn-client",
        );
        wait_for_tunnel(alpha);
        let domain = alpha.run(&["resolvectl", "domain", "mpvpn0"]);
        assert!(domain.contains("~vpn.internal"), "systemd-resolved knows no domain of the tunnel: {domain}");
        assert!(alpha.run(&["getent", "ahostsv4", "camera.vpn.internal"]).contains("10.9.9.9"));
        let past = network.count("queries past the tunnel");
        alpha.run(&["resolvectl", "flush-caches"]);
        assert!(resolves(alpha), "other names are not resolved");
        assert!(network.count("queries past the tunnel") > past, "other names are asked for in the tunnel");
    });
    step("remove and purge", || {
        alpha.run(&["apt-get", "purge", "--yes", "mpvpn"]);
        let differences = before.differences(&Snapshot::take(alpha));
        assert!(differences.is_empty(), "the machine is not as it was:\n{}", differences.join("\n"));
        alpha.run(&["resolvectl", "flush-caches"]);
        assert!(resolves(alpha), "names are not resolved after the package has gone");
    });
}

/// A name that every resolver of the tests answers.
fn resolves(machine: &Machine) -> bool {
    machine.succeeds(&["getent", "ahostsv4", "www.example.org"])
}

/// Takes the links from ifupdown, and gives NetworkManager a connection for each.
fn by_network_manager(machine: &Machine) {
    machine.shell(
        "ifdown -a; rm /etc/network/interfaces.d/links; systemctl disable --now networking.service
         systemctl restart NetworkManager",
    );
    for (index, link) in machine.links().iter().enumerate() {
        let Link { interface, .. } = link;
        let mut settings = String::new();
        let addresses = link.addresses().into_iter().zip(PREFIX_LENGTHS).zip(link.gateways());
        for (family, ((address, length), gateway)) in ["ipv4", "ipv6"].iter().zip(addresses) {
            settings += &format!(
                " {family}.method manual {family}.addresses {address}/{length} {family}.gateway {gateway} \
                 {family}.dns {gateway} {family}.route-metric {}",
                100 + index
            );
        }
        machine.shell(&format!(
            "nmcli connection add type ethernet ifname {interface} con-name {interface} {settings}"
        ));
        machine.run(&["nmcli", "connection", "up", interface]);
    }
}
