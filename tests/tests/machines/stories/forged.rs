//! Records that a taken-over service left in the folder that it shares with root's commands.

use std::time::Duration;

use crate::{
    machine::Machine,
    report::step,
    site::{Site, install, set_up_client, set_up_server, wait_for_tunnel},
    snapshot::Snapshot,
};

/// Files of root that nothing of this may read, change or make. One is on the file system of the records.
const VICTIMS: &str = "
mkdir /etc/victims
for file in /etc/victims/file /root/victim /run/victim; do echo 'of root' >$file; chmod 600 $file; done";
/// All about them.
const LOOK: &str = "
ls -lnR --time-style=full-iso /etc/victims; stat -c '%n %a %u:%g %s %y' /root/victim /run/victim
cat /etc/victims/file /root/victim /run/victim";
/// Runs as the user of the services, with the rights that they have.
const AS_SERVICE: [&str; 11] = [
    "setpriv",
    "--reuid",
    "mpvpn",
    "--regid",
    "mpvpn",
    "--clear-groups",
    "--inh-caps=+net_admin",
    "--ambient-caps=+net_admin",
    "sh",
    "-euc",
    FORGING,
];
/// Leaves journals that ask for changes of files, links in the places of journals, drafts, locks and folders,
/// and journals that never end.
const FORGING: &str = r#"
cd /run/mpvpn
mkdir -p netns-$(stat -L -c %i /proc/self/ns/net)/kill-switch
cd netns-*
journal() { echo "{\"pid\": 4294967295, \"start_time\": 1, \"steps\": [$2]}" >$1.json; }
for file in /etc/victims/file /root/victim /run/victim /etc/resolv.conf; do
    name=a$(echo $file | tr / _)
    text=$(sed 's/$/\\n/' $file 2>/dev/null | tr -d '\n')
    journal $name-file "{\"File\": {\"path\": \"$file\"}}"
    for before in '{"Text": "forged"}' '{"Link": "/etc/victims/made"}' '"Nothing"'; do
        journal $name-$(echo $before | tr -cd A-Z) \
            "{\"Resolver\": {\"path\": \"$file\", \"before\": $before, \"set\": \"${text:-of root\\n}\"}}"
    done
    ln -sf $file $name-link.json
    ln -sf $file $name-draft.new
    ln -sf $file $name-TFL.new
    ln -sf $file kill-switch/$name.json
    ln -f $file $name-hard.json 2>/dev/null || true
done
for name in a_lock a_lock-2; do
    journal $name ''
    ln -sf /etc/victims/$name $name.lock
done
ln -sf /etc/victims/lock kill-switch/lock
ln -sf /etc/victims/file kill-switch/installed
[ -e class-marks ] || ln -s /etc/victims class-marks
mkdir -p instances
ln -sf /etc/victims/file instances/100
for place in a_pipe.json instances/101 kill-switch/a_pipe.json; do [ -e $place ] || mkfifo $place; done
for place in an_end.json instances/102 kill-switch/an_end.json; do ln -sf /dev/zero $place; done
"#;
/// The command of root, which may take 4 GB of memory, so that a mistake does not take all of the machine,
/// and a minute.
const RESET: &str = "ulimit -v 4000000; mpvpn reset";
const RESET_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn run() {
    let site = Site::new("forged", &[], &[]);
    let (server, client) = (&site.server, &site.alpha);
    install(server);
    let link = set_up_server(server);
    client.shell(VICTIMS);
    let victims = client.shell(LOOK);
    let before = Snapshot::take(client);
    install(client);

    step("mpvpn reset takes back what a killed client left, and nothing else", || {
        start(client, &link);
        kill_and_leave_records(client);
        let output = client.output(RESET_TIMEOUT, &["sh", "-c", RESET]);
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.code().is_some_and(|code| code < 100), "{}: {said:?}", output.status);
        assert!(said[0].contains("mpvpn0"), "the changes of the client were not taken back: {said:?}");
        is_clean(client);
        assert_eq!(client.shell(LOOK), victims);
    });
    step("the service starts beside them", || {
        leave_forged_records(client);
        start(client, &link);
        assert_eq!(client.shell(LOOK), victims);
    });
    step("mpvpn setup remove", || {
        kill_and_leave_records(client);
        client.run(&["mpvpn", "setup", "remove", "--yes"]);
        is_clean(client);
        assert_eq!(client.shell(LOOK), victims);
    });
    step("apt remove, and apt purge", || {
        start(client, &link);
        kill_and_leave_records(client);
        client.run(&["apt-get", "remove", "--yes", "mpvpn"]);
        is_clean(client);
        assert_eq!(client.shell(LOOK), victims);
        leave_forged_records(client);
        client.run(&["apt-get", "purge", "--yes", "mpvpn"]);
        assert_eq!(client.shell(LOOK), victims);
        let differences = before.differences(&Snapshot::take(client));
        assert!(differences.is_empty(), "the machine is not as it was:\n{}", differences.join("\n"));
    });
}

/// Starts the client with a kill switch.
fn start(client: &Machine, link: &str) {
    if !client.path("etc/mpvpn/client.toml").exists() {
        set_up_client(client, link);
    }
    client.run(&["systemctl", "start", "mpvpn-client"]);
    wait_for_tunnel(client);
}

/// Kills the client, so that its own journal stays, and leaves the forged records beside it.
fn kill_and_leave_records(client: &Machine) {
    client.shell("systemctl kill --signal=KILL mpvpn-client; systemctl stop mpvpn-client");
    assert!(!client.shell("ls /run/mpvpn/netns-*/mpvpn0.json").is_empty(), "it has left its journal");
    leave_forged_records(client);
}

fn leave_forged_records(client: &Machine) {
    client.run(&AS_SERVICE);
}

/// Panics if rules of a client are left.
fn is_clean(client: &Machine) {
    let left = client.shell("nft list tables; ip rule; ip -6 rule");
    assert!(!left.contains("mpvpn") && !left.contains("\n28"), "{left}");
}
