//! Real programs over emulated links: rates, delays and losses are those of the descriptions.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::{
    path::Path,
    process::Command,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use mpvpn_lab::{Direction, INET_V4, Lab, LabError, LinkSpec, Namespace, SERVER_V4, SERVER_V6};
use mpvpn_types::BitRate;

/// Runs one lab at a time: labs that share a processor would disturb each other's timing.
fn exclusive_lab() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn lab(links: &[&str]) -> Lab {
    Lab::builder().links(links.iter().map(|text| text.parse::<LinkSpec>().unwrap())).build().unwrap()
}

fn output(namespace: &Namespace, line: &str) -> (bool, String) {
    let mut words = line.split_whitespace();
    let output = namespace.command(words.next().unwrap()).args(words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text.into_owned())
}

fn run_ok(namespace: &Namespace, line: &str) -> String {
    let (success, text) = output(namespace, line);
    assert!(success, "{line}: {text}");
    text
}

/// The shortest round-trip time in ms (a busy machine makes others longer) in the last line of `ping`: `rtt
/// min/avg/max/mdev = 1.1/1.2/1.3/0.1 ms`.
fn shortest_rtt(ping: &str) -> f64 {
    let line = ping.lines().find(|line| line.starts_with("rtt ")).unwrap_or_else(|| panic!("{ping}"));
    line.split(['=', '/']).nth(4).unwrap().trim().parse().unwrap()
}

/// The percentage of lost packets in the line of `ping`: `10 packets transmitted, 9 received, 10% packet
/// loss, time 9ms`.
fn loss_percent(ping: &str) -> f64 {
    let end = ping.find("% packet loss").unwrap_or_else(|| panic!("{ping}"));
    ping[..end].rsplit(' ').next().unwrap().parse().unwrap()
}

/// The goodput in Mbit/s, as the receiver of iperf3 reports it.
fn iperf(lab: &Lab, arguments: &str) -> f64 {
    let mut server = lab.server().command("iperf3");
    // Without -B, it would answer UDP from the address of the link instead of the address of the request.
    server.args(["-s", "-1", "--forceflush", "-B", &SERVER_V4.to_string()]);
    let mut server = lab.spawn(lab.server(), server).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while !server.stdout().contains("listening") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let json = run_ok(lab.client(), &format!("iperf3 -J -c {SERVER_V4} {arguments}"));
    assert!(server.wait(Duration::from_secs(5)).unwrap().is_some_and(|status| status.success()));
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let received = report["end"]["sum_received"]["bits_per_second"].as_f64();
    // Older versions report one sum for UDP: the rate sent, and the share of it that was lost.
    let sum = &report["end"]["sum"];
    let udp = || {
        let (sent, lost) = (sum["bits_per_second"].as_f64(), sum["lost_percent"].as_f64());
        let (Some(sent), Some(lost)) = (sent, lost) else { panic!("{json}") };
        sent * (1.0 - lost / 100.0)
    };
    received.unwrap_or_else(udp) / 1e6
}

/// Asserts a goodput in Mbit/s. Measures up to three times, because a busy machine sends too little, never
/// too much.
#[track_caller]
fn assert_rate(lab: &Lab, arguments: &str, expected: f64) {
    let mut most: f64 = 0.0;
    for _ in 0..3 {
        most = most.max(iperf(lab, arguments));
        if most >= expected * 0.95 {
            break;
        }
    }
    assert_near(most, expected, 0.05);
}

#[track_caller]
fn assert_near(measured: f64, expected: f64, tolerance: f64) {
    let off = (measured / expected - 1.0).abs();
    assert!(off <= tolerance, "measured {measured:.3}, expected {expected:.3} ± {:.0} %", tolerance * 100.0);
}

#[test]
fn pings_take_twice_the_delay_over_ipv4_and_ipv6() {
    let _alone = exclusive_lab();
    let lab = lab(&["100mbit,12.5ms", "delay.up=30ms,delay.down=10ms"]);
    assert_near(
        shortest_rtt(&run_ok(lab.client(), &format!("ping -c 20 -i 0.02 -q {SERVER_V4}"))),
        25.0,
        0.05,
    );
    assert_near(
        shortest_rtt(&run_ok(lab.client(), &format!("ping -c 20 -i 0.02 -q {SERVER_V6}"))),
        25.0,
        0.05,
    );
    assert_near(
        shortest_rtt(&run_ok(lab.client(), &format!("ping -I eth2 -c 20 -i 0.02 -q {SERVER_V4}"))),
        40.0,
        0.05,
    );
}

#[test]
fn rates_come_out_as_described_and_follow_changes() {
    let _alone = exclusive_lab();
    let lab = lab(&["down=40mbit,up=10mbit,5ms,queue=50ms"]);
    let headers = 1200.0 / 1228.0;
    assert_rate(&lab, "-u -l 1200 -b 15M -t 2", 10.0 * headers);
    assert_rate(&lab, "-u -l 1200 -b 50M -t 2 -R", 40.0 * headers);
    let stats = lab.link(0).unwrap().stats().unwrap();
    assert!(stats.up.dropped_queue > 500 && stats.down.dropped_queue > 500, "{stats:?}");
    lab.link(0)
        .unwrap()
        .set(Direction::Up, |params| params.rate = Some(BitRate::from_bps(20_000_000)))
        .unwrap();
    assert_rate(&lab, "-u -l 1200 -b 30M -t 2", 20.0 * headers);
}

#[test]
fn losses_have_their_share_and_affect_their_direction_only() {
    let _alone = exclusive_lab();
    let lab = lab(&["loss.up=20%"]);
    let ping = run_ok(lab.client(), &format!("ping -c 1500 -i 0.002 -q {SERVER_V4}"));
    assert_near(loss_percent(&ping), 20.0, 0.2);
    let stats = lab.link(0).unwrap().stats().unwrap();
    assert_eq!(stats.down.dropped_loss, 0);
    assert_near(stats.up.dropped_loss as f64, 300.0, 0.2);
}

#[test]
fn a_cut_removes_the_carrier_at_the_client_only_until_it_ends() {
    let _alone = exclusive_lab();
    let lab = lab(&["1ms", "1ms"]);
    let link = lab.link(0).unwrap();
    let carrier = || run_ok(lab.client(), "cat /sys/class/net/eth1/carrier").trim().to_owned();
    assert_eq!(carrier(), "1");
    assert!(run_ok(lab.client(), "ip link show eth1").contains("state UP"));
    for _ in 0..3 {
        link.down().unwrap();
        let shown = run_ok(lab.client(), "ip link show eth1");
        assert!(shown.contains("NO-CARRIER") && shown.contains("state DOWN"), "{shown}");
        link.up().unwrap();
        assert!(run_ok(lab.client(), "ip link show eth1").contains("state UP"));
    }
    link.down().unwrap();
    assert_eq!(carrier(), "0");
    assert!(!run_ok(lab.server(), "ip link show up1").contains("NO-CARRIER"));
    assert!(!output(lab.client(), &format!("ping -I eth1 -c 3 -i 0.01 -W 0.2 {SERVER_V4}")).0);
    run_ok(lab.client(), &format!("ping -I eth2 -c 3 -i 0.01 -W 1 {SERVER_V4}"));
    link.up().unwrap();
    assert_eq!(carrier(), "1");
    run_ok(lab.client(), &format!("ping -I eth1 -c 3 -i 0.01 -W 1 {SERVER_V4}"));
    run_ok(lab.client(), &format!("ping -6 -I eth1 -c 3 -i 0.01 -W 1 {SERVER_V6}"));
}

#[test]
fn a_loss_of_1_keeps_carrier_and_neighbours() {
    let _alone = exclusive_lab();
    let lab = lab(&["1ms"]);
    let link = lab.link(0).unwrap();
    link.loss(Direction::Down, 1.0).unwrap();
    assert!(!output(lab.client(), &format!("ping -c 3 -i 0.01 -W 0.2 {SERVER_V4}")).0);
    run_ok(lab.client(), "ip neigh flush dev eth1");
    assert!(!output(lab.client(), &format!("ping -c 3 -i 0.01 -W 0.2 {SERVER_V4}")).0);
    assert!(run_ok(lab.client(), "ip neigh show dev eth1").contains("10.101.0.1 lladdr"));
    assert!(!run_ok(lab.client(), "ip link show eth1").contains("NO-CARRIER"));
    link.loss(Direction::Both, 0.0).unwrap();
    run_ok(lab.client(), &format!("ping -c 3 -i 0.01 -W 1 {SERVER_V4}"));
}

#[test]
fn packets_above_the_mtu_are_dropped_silently() {
    let _alone = exclusive_lab();
    let lab = lab(&["1ms,mtu=1400"]);
    run_ok(lab.client(), &format!("ping -M do -s 1372 -c 2 -i 0.01 -W 1 {SERVER_V4}"));
    assert!(!output(lab.client(), &format!("ping -M do -s 1373 -c 2 -i 0.01 -W 0.2 {SERVER_V4}")).0);
    assert_eq!(lab.link(0).unwrap().stats().unwrap().up.dropped_mtu, 2);
}

#[test]
fn the_host_behind_the_server_reaches_the_server_only() {
    let _alone = exclusive_lab();
    let lab = Lab::builder().link(LinkSpec::unlimited()).lan(true).other_client(true).build().unwrap();
    run_ok(lab.server(), &format!("ping -c 2 -i 0.01 -W 1 {INET_V4}"));
    lab.server().set_sysctl("net/ipv4/ip_forward", "1").unwrap();
    assert!(!output(lab.client(), &format!("ping -c 2 -i 0.01 -W 0.2 {INET_V4}")).0);
    run_ok(lab.lan().unwrap(), "ping -c 2 -i 0.01 -W 1 192.168.77.1");
    run_ok(lab.lan().unwrap(), "ping -c 2 -i 0.01 -W 1 fd00:77::1");
    run_ok(lab.other_client().unwrap(), &format!("ping -c 2 -i 0.01 -W 1 {SERVER_V4}"));
    run_ok(lab.other_client().unwrap(), &format!("ping -c 2 -i 0.01 -W 1 {SERVER_V6}"));
}

#[test]
fn a_veth_link_goes_down_and_up_and_has_no_settings() {
    let _alone = exclusive_lab();
    let lab = lab(&["unlimited"]);
    let link = lab.link(0).unwrap();
    run_ok(lab.client(), &format!("ping -c 2 -i 0.01 -W 1 {SERVER_V4}"));
    link.down().unwrap();
    assert!(run_ok(lab.client(), "ip link show eth1").contains("NO-CARRIER"));
    link.up().unwrap();
    run_ok(lab.client(), &format!("ping -c 2 -i 0.01 -W 1 {SERVER_V4}"));
    run_ok(lab.client(), &format!("ping -c 2 -i 0.01 -W 1 {SERVER_V6}"));
    assert!(link.stats().unwrap().up.packets >= 4);
    assert!(matches!(link.loss(Direction::Up, 0.5), Err(LabError::NotEmulated(1))));
    assert!(matches!(lab.link(1), Err(LabError::NoSuchLink { wanted: 2, count: 1 })));
}

#[test]
fn sixteen_links_work_side_by_side() {
    let _alone = exclusive_lab();
    let lab = lab(&["10mbit,1ms"; 16]);
    for number in 1..=16 {
        run_ok(lab.client(), &format!("ping -I eth{number} -c 1 -W 1 {SERVER_V4}"));
    }
}

#[test]
fn congestion_controls_are_listed_and_chosen() {
    let _alone = exclusive_lab();
    let lab = lab(&["1ms"]);
    let names = lab.client().congestion_controls().unwrap();
    assert!(names.iter().any(|name| name == "cubic" || name == "reno"), "{names:?}");
    lab.client().set_congestion_control(&names[0]).unwrap();
    assert_eq!(lab.client().sysctl("net/ipv4/tcp_congestion_control").unwrap(), names[0]);
}

fn namespaces_of(prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    names.filter_map(|n| n.file_name().into_string().ok()).filter(|n| n.starts_with(prefix)).collect()
}

#[test]
fn nothing_is_left_of_a_dropped_lab_not_even_daemons() {
    let _alone = exclusive_lab();
    let lab = lab(&["1ms"]);
    let (prefix, dir) = (lab.prefix().to_owned(), lab.dir().to_owned());
    let mut daemon = lab.client().command("sh");
    daemon.args(["-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!"]);
    let pid = String::from_utf8(daemon.output().unwrap().stdout).unwrap().trim().to_owned();
    let guarded = lab
        .spawn(lab.server(), {
            let mut c = Command::new("sleep");
            c.arg("300");
            c
        })
        .unwrap();
    let guarded_pid = guarded.pid().to_string();
    assert_eq!(namespaces_of(&prefix).len(), 3);
    let alive = |pid: &str| {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert!(alive(&pid) && alive(&guarded_pid));
    drop(lab);
    drop(guarded);
    assert_eq!(namespaces_of(&prefix), Vec::<String>::new());
    assert!(!dir.exists());
    assert!(!alive(&guarded_pid));
    let deadline = Instant::now() + Duration::from_secs(2);
    while alive(&pid) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!alive(&pid), "the daemon {pid} lives on");
}

/// Not a test of its own: the process that the next test starts from this binary and kills.
#[test]
#[ignore = "started by `a_killed_lab_is_removed_by_the_next`"]
fn killed_lab_process() {
    let lab = lab(&["1ms"]);
    assert!(!namespaces_of(lab.prefix()).is_empty());
    std::fs::write(std::env::var_os("LAB_PREFIX_FILE").unwrap(), lab.prefix()).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_lab_is_removed_by_the_next() {
    let _alone = exclusive_lab();
    let own = lab(&["1ms"]);
    let prefix_file = own.dir().join("prefix");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "killed_lab_process"]).env("LAB_PREFIX_FILE", &prefix_file);
    let mut process = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let prefix = loop {
        let prefix = std::fs::read_to_string(&prefix_file).unwrap_or_default();
        if !prefix.is_empty() || Instant::now() > deadline {
            break prefix;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(namespaces_of(&prefix).len(), 3, "{prefix}");
    let next = lab(&["1ms"]);
    assert_eq!(namespaces_of(&prefix), Vec::<String>::new());
    assert!(!Path::new(&format!("/run/mpvpn/lab/{prefix}.lock")).exists());
    assert_eq!(namespaces_of(own.prefix()).len(), 3, "a living lab was swept");
    run_ok(next.client(), &format!("ping -c 1 -W 1 {SERVER_V4}"));
}
