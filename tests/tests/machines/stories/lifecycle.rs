//! From a bare machine to a tunnel and back.

use std::time::{Duration, Instant};

use mpvpn_tests::ping::Ping;

use crate::{
    machine::Machine,
    network::INTERNET,
    package::lab_package,
    report::{at_most, step, within},
    site::{
        Site, add_user, connected_users, install, install_file, join, remove, set_up_client, set_up_server,
        side_by_side, wait_for_tunnel, wait_until_gone,
    },
    snapshot::Snapshot,
};

/// From two bare systems with the package downloaded to a tunnel that carries traffic.
const SETUP_BAR: Duration = Duration::from_secs(60);
/// From the end of `mpvpn user revoke` to the end of the session.
const REVOKE_BAR: Duration = Duration::from_secs(1);
/// Bars of `systemd-analyze security`, which rates how much a service could do from 0 (nothing) to 10.
const EXPOSURES: [(&str, f64); 2] = [("mpvpn-server.service", 2.6), ("mpvpn-client.service", 3.0)];
/// Time of a lab with a server, a client and one ping: a second, and more where others use the processors.
const LAB_TIMEOUT: Duration = Duration::from_secs(60);
/// Share of the traffic that each of two equal links carries at least, percent.
const MIN_SHARE: u64 = 20;

pub(super) fn run() {
    let site = Site::new("lifecycle", &[], &[]);
    let Site { server, alpha, beta, network } = &site;
    let machines = [server, alpha, beta];
    let before = step("look at the machines", || side_by_side(machines, Snapshot::take));

    let began = Instant::now();
    step("server: install the package", || install(server));
    let link = step("server: mpvpn setup server", || set_up_server(server));
    step("client: install the package", || install(alpha));
    step("client: mpvpn setup client LINK", || {
        set_up_client(alpha, &link);
    });
    step("client: the tunnel carries traffic", || wait_for_tunnel(alpha));
    within("from two bare systems to a tunnel with traffic, two commands each", began.elapsed(), SETUP_BAR);

    step("a second client joins by mpvpn join LINK --start", || {
        install(beta);
        join(beta, &add_user(server, "beta"));
        wait_for_tunnel(beta);
    });
    step("mpvpn lab says how to get it, and runs beside the client when its package is there", || lab(beta));
    let past = network.count("past the tunnel");
    step("traffic over both links, in both directions", || {
        for internet in INTERNET {
            uses_both_links(alpha, internet, false);
            uses_both_links(alpha, internet, true);
        }
    });
    step("reload both ends ten times", || reload(server, alpha));
    assert_eq!(network.count("past the tunnel"), past, "packets of clients left past the tunnel");
    step("revoke a user", || revoke(server, alpha, beta));
    step("ratings of the services", || {
        exposure(server, EXPOSURES[0]);
        exposure(alpha, EXPOSURES[1]);
    });
    step("rights of the processes", || {
        assert_eq!(rights(server, "mpvpn-server"), ["mpvpn 1400 of 1400", "mpvpn 1000 of 1400"]);
        assert_eq!(rights(alpha, "mpvpn-client"), ["mpvpn 1000 of 1400", "mpvpn 1000 of 1400"]);
        assert_eq!(rights(alpha, "mpvpn-dns"), ["root 0 of 0"]);
    });
    step("users without sudo, in the package's groups and in none", || {
        [server, alpha].into_iter().for_each(without_sudo);
    });
    step("the journals have neither warnings nor tokens", || machines.map(has_a_clean_journal));
    step("remove and purge", || {
        [server, alpha].into_iter().for_each(remove);
        for machine in machines {
            machine.run(&["apt-get", "purge", "--yes", "mpvpn"]);
        }
    });
    step("compare the machines with what they were", || {
        let after = side_by_side(machines, Snapshot::take);
        let mut all = Vec::new();
        for ((machine, before), after) in machines.iter().zip(&before).zip(&after) {
            let differences = before.differences(after);
            println!(
                "            {}: {} of {} lines differ",
                machine.name(),
                differences.len(),
                before.len()
            );
            all.extend(differences.iter().map(|line| format!("{}: {line}", machine.name())));
        }
        assert!(all.is_empty(), "the machines are not as they were:\n{}", all.join("\n"));
    });
}

/// Runs an emulated link with a server and a client of its own, once the package is installed.
fn lab(client: &Machine) {
    let up = ["mpvpn", "lab", "up", "--link", "20mbit,5ms", "--", "ping", "-n", "-c", "1", "10.0.0.1"];
    let missing = client.output(LAB_TIMEOUT, &up);
    let said = String::from_utf8_lossy(&missing.stderr);
    assert!(said.contains("next: install the package mpvpn-lab"), "{said}");
    install_file(client, &lab_package());
    let ran = client.output(LAB_TIMEOUT, &up);
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && out.contains("1 received"), "{out}\n{err}");
    assert_eq!(client.status().expect("the client runs")["state"], "up");
    // The folder of `ip netns` is a mount, which iproute2 leaves until the next boot.
    client.shell("umount /run/netns && rmdir /run/netns");
}

/// Downloads or uploads for a moment, and compares what the links have carried.
fn uses_both_links(client: &Machine, internet: &str, upload: bool) {
    let bytes = || {
        client.links().iter().map(|link| {
            let (received, sent) = client.interface_bytes(&link.interface);
            if upload { sent } else { received }
        })
    };
    let before: Vec<u64> = bytes().collect();
    let mut args = vec!["iperf3", "--client", internet, "--time", "3", "--parallel", "4", "--json"];
    args.extend((!upload).then_some("--reverse"));
    let output = client.run(&args);
    let report: serde_json::Value = serde_json::from_str(&output).expect("iperf3 prints JSON");
    let rate = report["end"]["sum_received"]["bits_per_second"].as_f64().expect("a rate") / 1e6;
    let carried: Vec<u64> = bytes().zip(before).map(|(after, before)| after - before).collect();
    let all: u64 = carried.iter().sum();
    let word = format!("{} {internet}", if upload { "up to" } else { "down from" });
    println!("            {word}: {rate:.0} Mbit/s, bytes of the links: {carried:?}");
    let too_little = carried.iter().any(|bytes| bytes * 100 < all * MIN_SHARE);
    assert!(!too_little, "a link carries less than {MIN_SHARE} % of what goes {word}: {carried:?}");
}

fn reload(server: &Machine, client: &Machine) {
    let ping = client.ping(INTERNET, Duration::from_millis(10), 6);
    for _ in 0..10 {
        server.run(&["systemctl", "reload", "mpvpn-server"]);
        client.run(&["systemctl", "reload", "mpvpn-client"]);
    }
    for pings in ping.map(Ping::finish) {
        println!("            {} of {} pings lost", pings.missing(), pings.sent);
        assert_eq!(pings.missing(), 0, "of {} pings across reloads", pings.sent);
    }
}

fn revoke(server: &Machine, alpha: &Machine, beta: &Machine) {
    assert!(connected_users(server).contains(&"beta".to_owned()), "beta is not connected");
    let ping = alpha.ping(INTERNET, Duration::from_millis(10), 4);
    server.run(&["mpvpn", "user", "revoke", "beta"]);
    within("the revoked user's session ends", wait_until_gone(server, "beta"), REVOKE_BAR);
    for pings in ping.map(Ping::finish) {
        assert_eq!(pings.missing(), 0, "of {} pings of another client", pings.sent);
    }
    let journal = beta.run(&["journalctl", "--unit", "mpvpn-client", "--no-pager"]);
    assert!(journal.contains("revoked"), "the client is not told why its session ended:\n{journal}");
}

/// The user, the capabilities and the bounding set of the unit, as hexadecimal numbers, of the process of a
/// unit and of its helper. Panics unless both can get no others, and have a filter of system calls.
fn rights(machine: &Machine, unit: &str) -> Vec<String> {
    let script = r#"
        main=$(systemctl show --property MainPID --value $0)
        for process in $main $(cat /proc/$main/task/$main/children); do
            echo $(id -nu $(sed -n 's/^Uid:\t\([0-9]*\).*/\1/p' /proc/$process/status)) \
                $(sed -n 's/^\(CapEff\|CapPrm\|CapBnd\|NoNewPrivs\|Seccomp\):\t0*\(.\)/\2/p' /proc/$process/status)
        done"#;
    let lines = machine.run(&["sh", "-euc", script, unit]);
    let rights = lines.lines().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [user, permitted, effective, bounding, "1", "2"] = words[..] else { panic!("{unit}: {line}") };
        assert_eq!(permitted, effective, "{unit}: {line}");
        format!("{user} {effective} of {bounding}")
    });
    rights.collect()
}

/// Members of the group see the status and neither change the service nor read its files; others see nothing.
fn without_sudo(machine: &Machine) {
    let as_user = |groups: &str, command: &str| {
        let args =
            ["setpriv", "--reuid=65534", "--regid=65534", groups, "--no-new-privs", "sh", "-c", command];
        let output = machine.output(Duration::from_secs(20), &args);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (member, stranger) = ("--groups=mpvpn", "--clear-groups");
    assert!(as_user(member, "mpvpn status").0, "{:?}", as_user(member, "mpvpn status"));
    for (groups, command, sentence) in [
        (stranger, "mpvpn status --wait 30", "use sudo or join the group mpvpn (sudo usermod -aG mpvpn NAME"),
        (member, "mpvpn config reload", "use sudo or join the groups mpvpn and mpvpn-admin"),
        (member, "mpvpn user list", "permission denied: use sudo"),
        (member, "cat /etc/mpvpn/*.toml", "Permission denied"),
    ] {
        let (succeeded, said) = as_user(groups, command);
        assert!(!succeeded && said.contains(sentence), "{}: {command}: {said}", machine.name());
    }
    let changed = as_user("--groups=mpvpn,mpvpn-admin", "mpvpn config reload");
    assert!(changed.0, "{changed:?}");
}

fn exposure(machine: &Machine, (unit, bar): (&str, f64)) {
    let text = machine.run(&["systemd-analyze", "security", "--no-pager", unit]);
    let line = text.lines().find(|line| line.contains("Overall exposure level")).expect("a verdict");
    let level = line.split_whitespace().find_map(|word| word.parse::<f64>().ok()).expect("a number");
    at_most(&format!("exposure of {unit}"), level, bar, "points");
}

/// A warning says that something was lost, which must not happen on a machine where nothing is wrong. Tokens
/// are for those who have them, not for those who read journals.
fn has_a_clean_journal(machine: &Machine) {
    let args = ["journalctl", "--no-pager", "--output", "cat", "--unit", "mpvpn-*"];
    let journal = machine.run(&args);
    let token = journal.split_whitespace().find(|word| word.contains("mpvpn_") && word.len() > 40);
    assert!(token.is_none(), "the journal of {} has a token: {token:?}", machine.name());
    let is_bad =
        |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ") || line.contains("panicked");
    let bad: Vec<&str> = journal.lines().filter(is_bad).collect();
    // The client of the revoked user has a reason to complain.
    let is_expected = |line: &&str| line.contains("revoked") || line.contains("refuses the token");
    let bad: Vec<&str> = bad.into_iter().filter(|line| !is_expected(line)).collect();
    assert!(bad.is_empty(), "the journal of {} has warnings:\n{}", machine.name(), bad.join("\n"));
}
