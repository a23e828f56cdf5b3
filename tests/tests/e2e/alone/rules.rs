//! The rate with a thousand forwards, bypass rules and announced networks, beside that without them.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    percentile,
    ping::reaches,
    testbed::{Direction, Host, MpvpnProcess, Testbed, inet4},
};

use crate::users::Site;

/// Pairs of measurements, without and with the rules, and how long each takes (s).
const PAIRS: u32 = 5;
const SECONDS: u32 = 4;
/// The least rate with them, as a share of the rate without.
const BAR: f64 = 0.95;
/// How long the test waits for rules: only a failing test takes that long.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Forwards of the server, and rules and networks of the client, all but a few of them.
fn write(testbed: &Testbed, with: bool) {
    let number = |all: u32| if with { all } else { 1 };
    let forwards =
        (0..number(1000)).map(|at| format!("[[forward]]\nport = 'tcp/{}'\nto = 'anna:1'\n", 20_000 + at));
    let rules = (0..number(1000))
        .map(|at| format!("[[bypass]]\nto = '100.64.{}.{}'\nlink = 'eth1'\n", at / 250, at % 250 + 1));
    let networks: Vec<String> = (0..number(256)).map(|at| format!("'10.64.{at}.0/24'")).collect();
    let client = format!("announce = [{}]\n{}", networks.join(", "), rules.collect::<String>());
    fs::write(testbed.dir().join("client.toml"), client).expect("a file to write");
    fs::write(testbed.dir().join("server.toml"), forwards.collect::<String>()).expect("a file to write");
}

/// Has both ends use what [`write`] wrote.
fn apply(site: &Site, client: &MpvpnProcess, with: bool) {
    let testbed = &site.testbed;
    write(testbed, with);
    let socket = site.server.socket().to_str().expect("ASCII");
    let reload = testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", socket]);
    assert!(reload.status.success(), "{reload:?}");
    client.reload();
    let shows = |host, args: &[&str], last: &str| testbed.run(host, args).contains(last);
    eventually(TIMEOUT, "the rules are in force, or gone", || {
        let all = [
            shows(Host::Server, &["nft", "list", "table", "inet", "mpvpn_mpvpn0_forwards"], "dport 20999"),
            shows(Host::Server, &["ip", "route", "show"], "10.64.255.0/24"),
            shows(
                Host::Client,
                &["nft", "list", "chain", "inet", "mpvpn_mpvpn0_bypass", "output"],
                "100.64.3.250",
            ),
        ];
        if all == [with; 3] { Ok(()) } else { Err(format!("{all:?}")) }
    });
}

#[test]
#[ignore = "figures: ./dev test e2e -- --ignored alone::rules"]
fn a_thousand_rules_take_little_of_the_rate() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::unlimited();
    write(&testbed, false);
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml"];
    let site = Site { server: testbed.server(&args), testbed };
    let testbed = &site.testbed;
    let anna = site.add("anna", &["--route", "10.64.0.0/10"]);
    let client =
        site.join_with(Host::Client, &anna, &["--path", "eth1", "--config", "client.toml"]).wait_until_up();
    reaches(testbed, Host::Client, &inet4());
    let iperf = IperfServer::start(testbed, Host::Inet, 5201);
    for direction in [Direction::Down, Direction::Up] {
        let mut ratios = Vec::new();
        for pair in 0..PAIRS {
            let measure = |with| {
                apply(&site, &client, with);
                iperf.tcp(testbed, Host::Client, &inet4(), 4, direction, SECONDS).finish().megabits()
            };
            // Which comes first alternates.
            let rates = if pair % 2 == 0 { [false, true].map(measure) } else { [true, false].map(measure) };
            let [without, with] = if pair % 2 == 0 { rates } else { [rates[1], rates[0]] };
            println!("{direction:?}: {without:.0} Mbit/s without, {with:.0} with them");
            ratios.push(with / without);
        }
        ratios.sort_by(f64::total_cmp);
        let ratio = percentile(&ratios, 50);
        println!("{direction:?}: {ratio:.3}");
        assert!(ratio >= BAR, "{direction:?}: {ratios:.3?}");
    }
}
