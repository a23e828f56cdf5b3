//! Servers behind firewalls that drop what nobody has allowed.

use crate::{
    isolation,
    machine::Machine,
    report::step,
    site::{Site, add_user, install, join, remove, set_up_server, wait_for_tunnel},
    snapshot::Snapshot,
};

/// A firewall as people write it by hand: what is not named is dropped.
const HAND_WRITTEN: &str = "#!/usr/sbin/nft -f
flush ruleset
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept
        iifname \"lo\" accept
        icmp type echo-request accept
        icmpv6 type { echo-request, nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert } accept
        tcp dport 22 accept
    }
    chain forward {
        type filter hook forward priority filter; policy drop;
        ct state established,related accept
    }
}
";

pub(super) fn ufw() {
    behind_firewall("ufw", &["ufw"], |server| {
        server.shell("ufw default deny incoming && ufw allow 22/tcp && ufw --force enable");
    });
}

pub(super) fn firewalld() {
    behind_firewall("firewalld", &["firewalld"], |server| {
        server.shell("systemctl enable --now firewalld && firewall-cmd --state");
    });
}

pub(super) fn nftables() {
    behind_firewall("nftables", &[], |server| {
        server.write("etc/nftables.conf", HAND_WRITTEN);
        server.run(&["systemctl", "enable", "--now", "nftables"]);
    });
}

/// Sets a server up where `enable` has switched a firewall on, reboots it, and takes it away again.
fn behind_firewall(test: &str, layers: &[&str], enable: impl FnOnce(&Machine)) {
    let mut site = Site::new(test, layers, &[]);
    step("switch the firewall on, and reboot", || {
        enable(&site.server);
        // Its kernel parameters count for interfaces that come after them.
        site.server.reboot();
    });
    let before = Snapshot::take(&site.server);
    let zones = zones(&site.server);
    step("set the server up behind it, and join", || {
        install(&site.server);
        set_up_server(&site.server);
        install(&site.alpha);
        join(&site.alpha, &add_user(&site.server, "alpha"));
        wait_for_tunnel(&site.alpha);
    });
    step("TCP reaches it, too", || {
        let script =
            "timeout 5 openssl s_client -connect $0:443 -alpn h2 </dev/null 2>/dev/null | grep -q BEGIN";
        isolation::run("sh", &["-euc", script, &site.server.links()[0].address()]);
    });
    step("the firewall lets it through after a reboot", || {
        site.server.reboot();
        wait_for_tunnel(&site.alpha);
    });
    step("remove and purge: the firewall is as it was", || {
        remove(&site.server);
        site.server.run(&["apt-get", "purge", "--yes", "mpvpn"]);
        if test == "firewalld" {
            // It writes a file for each zone that was ever changed, and has chains for zones that were ever
            // used.
            site.server.run(&["firewall-cmd", "--reload"]);
        }
        let mut differences = before.differences(&Snapshot::take(&site.server));
        differences.retain(|line| !line.starts_with("+ files: /etc/firewalld/zones/"));
        assert!(differences.is_empty(), "the machine is not as it was:\n{}", differences.join("\n"));
        assert_eq!(self::zones(&site.server), zones, "the zones of firewalld have changed");
    });
}

/// The ports that firewalld opens now and after its next start, if it is there.
fn zones(server: &Machine) -> String {
    server.shell(
        "! command -v firewall-cmd >/dev/null || { firewall-cmd --list-all-zones; firewall-cmd --permanent --list-all-zones; }",
    )
}
