//! The kill switch from the moment at which the network is there to the end of the package, for both
//! families.

use std::{collections::BTreeSet, thread, time::Duration};

use crate::{
    machine::Machine,
    network::Capture,
    package::newer_package,
    report::step,
    site::{Site, install_file, wait_for_tunnel},
};

/// A service that sends to the internet all the time, from before the network is configured until the machine
/// is off.
const SENDER: &str = "\
[Unit]
DefaultDependencies=no
After=systemd-journald.socket
Before=network-pre.target
Wants=network-pre.target

[Service]
ExecStart=/bin/bash /usr/local/bin/sender
StandardOutput=null
StandardError=null

[Install]
WantedBy=sysinit.target
";
/// ICMP, TCP and a query for a name, by IPv4 and IPv6.
const SENDING: &str = "
while :; do curl -s -m 0.1 -g http://198.51.100.1/ http://[2001:db8:100::1]/; sleep 0.02; done &
for to in 198.51.100.1 2001:db8:100::1; do
    while :; do ping -n -c 1 -W 0.1 $to; sleep 0.02; done &
    while :; do echo query >/dev/udp/$to/53; sleep 0.02; done &
done
wait
";
/// The kinds of packets that it sends.
const KINDS: [&str; 6] = ["IPv4 ICMP", "IPv4 TCP", "IPv4 UDP", "IPv6 ICMP", "IPv6 TCP", "IPv6 UDP"];

pub(super) fn run() {
    let mut site = Site::new("kill_switch", &[], &[]);
    site.set_up();
    for client in [&site.alpha, &site.beta] {
        client.write("usr/local/bin/sender", SENDING);
        client.write("etc/systemd/system/sender.service", SENDER);
        client.run(&["systemctl", "enable", "sender.service"]);
    }
    site.alpha.shell("echo 'kill-switch = true' >>/etc/mpvpn/client.toml");
    site.alpha.run(&["systemctl", "restart", "mpvpn-client"]);
    wait_for_tunnel(&site.alpha);

    let mut capture = Capture::start();
    step("without the kill switch packets of all kinds leave past the tunnel while the client boots", || {
        site.beta.cut_power();
        capture.new_lines();
        site.beta.boot();
        wait_for_tunnel(&site.beta);
        all_kinds_leave(&mut capture);
    });
    site.beta.power_off();
    step("with it none leaves while the client boots", || {
        leaks_nothing(&mut site, &mut capture, |site| {
            site.alpha.reboot();
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the client boots after a power failure", || {
        leaks_nothing(&mut site, &mut capture, |site| {
            site.alpha.cut_power();
            site.alpha.boot();
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the service restarts and while it is stopped by a signal", || {
        leaks_nothing(&mut site, &mut capture, |site| {
            site.alpha.run(&["systemctl", "restart", "mpvpn-client"]);
            wait_for_tunnel(&site.alpha);
            site.alpha.run(&["systemctl", "kill", "--signal=KILL", "mpvpn-client"]);
            thread::sleep(Duration::from_millis(500));
            wait_for_tunnel(&site.alpha);
        });
    });
    let newer = newer_package();
    step("with it none leaves while the package is upgraded", || {
        leaks_nothing(&mut site, &mut capture, |site| {
            install_file(&site.alpha, &newer);
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the server is off", || {
        site.server.power_off();
        leaks_nothing(&mut site, &mut capture, |site| {
            site.alpha.reboot();
            thread::sleep(Duration::from_secs(3));
        });
        site.server.boot();
        wait_for_tunnel(&site.alpha);
    });
    step("a shutdown lets nothing out either", || {
        leaks_nothing(&mut site, &mut capture, |site| site.alpha.power_off());
    });
    step("with it none leaves while the package is purged, until the block is lifted; then all does", || {
        leaks_nothing(&mut site, &mut capture, |site| {
            site.alpha.boot();
            wait_for_tunnel(&site.alpha);
        });
        site.alpha.run(&["apt-get", "purge", "--yes", "mpvpn"]);
        thread::sleep(Duration::from_secs(1));
        let leaving = all_kinds_leave(&mut capture);
        let lifted = lifted_at(&site.alpha);
        let early: Vec<_> = leaving.iter().filter(|line| time_of(line) < lifted).collect();
        assert!(early.is_empty(), "the block was lifted at {lifted}, and before these left: {early:#?}");
        let tables = site.alpha.run(&["nft", "list", "tables"]);
        assert!(!tables.contains("mpvpn"), "{tables}");
    });
}

/// Runs `task`, and panics if a packet of a client has left past the tunnel meanwhile.
fn leaks_nothing(site: &mut Site, capture: &mut Capture, task: impl FnOnce(&mut Site)) {
    capture.new_lines();
    task(site);
    let leaked = capture.new_lines();
    assert!(leaked.is_empty(), "packets past the tunnel:\n{}", leaked.join("\n"));
}

/// Panics unless a packet of each kind has left past the tunnel since the last call. Returns all of them.
fn all_kinds_leave(capture: &mut Capture) -> Vec<String> {
    let lines = capture.new_lines();
    let kinds: BTreeSet<&str> = lines.iter().filter_map(|line| kind_of(line)).collect();
    println!("            {} packets", lines.len());
    assert_eq!(kinds, BTreeSet::from(KINDS), "the sender sends too little, so this test shows nothing");
    lines
}

/// The kind of packet in a line of tcpdump.
fn kind_of(line: &str) -> Option<&'static str> {
    let is = |word| line.contains(word);
    let family = if is(" IP6 ") { 3 } else { 0 };
    let kinds = ["ICMP", "Flags [", ".53: "];
    let kind = kinds.iter().position(|word| is(word))?;
    KINDS.get(family + kind).copied()
}

/// The time of a line of tcpdump, in seconds since 1970.
fn time_of(line: &str) -> f64 {
    line.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or_else(|| panic!("no time: {line}"))
}

/// When the service manager began to lift the block of the kill switch for the last time.
fn lifted_at(client: &Machine) -> f64 {
    let args = ["journalctl", "--no-pager", "--output", "short-unix", "--unit", "mpvpn-kill-switch"];
    let journal = client.run(&args);
    let line = journal.lines().rfind(|line| line.contains("Stopping "));
    time_of(line.unwrap_or_else(|| panic!("it was not lifted:\n{journal}")))
}
