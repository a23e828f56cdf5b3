//! Names are asked in the tunnel, and afterwards where they were asked before.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_tests::{
    dns::{ANSWER, NameServer},
    testbed::{Host, MpvpnProcess, Testbed, inet4},
};

const FILE: &str = "/etc/resolv.conf";
/// The far end of a link.
const ON_A_LINK: &str = "10.101.0.1";
/// The server at the host behind it.
const SERVER_THERE: &str = "198.51.100.1";
const SOON: Duration = Duration::from_secs(15);

/// The client's machine has a file with name servers of its own, as `ip netns exec` gives it one.
struct Machine<'a> {
    testbed: &'a Testbed,
    file: PathBuf,
    before: String,
}

impl<'a> Machine<'a> {
    fn new(testbed: &'a Testbed) -> Self {
        let (file, before) =
            (testbed.dir().join("resolv.conf"), format!("nameserver {ON_A_LINK}\nsearch home.example\n"));
        fs::write(&file, &before).expect("a file in the stage's directory");
        Self { testbed, file, before }
    }

    fn start(&self, more: &[&str]) -> MpvpnProcess {
        let socket = self.testbed.file("api", Host::Client);
        let mut args = vec!["client", "--server", mpvpn_tests::testbed::SERVER, "--insecure"];
        args.extend(["--path", "eth1", "--path", "eth2", "--api-socket", socket.to_str().expect("ASCII")]);
        args.extend(more);
        self.testbed.start_with_file(Host::Client, &self.file, Path::new(FILE), &args, &socket)
    }

    fn now(&self) -> String {
        fs::read_to_string(&self.file).expect("the file is there")
    }

    /// What a program of that machine finds.
    fn look_up(&self, name: &str) -> String {
        let file = self.file.to_str().expect("ASCII");
        let script = format!("mount --bind {file} {FILE} && exec getent ahostsv4 {name}");
        self.testbed.run(Host::Client, &["unshare", "--mount", "sh", "-c", &script])
    }
}

#[test]
fn names_are_asked_in_the_tunnel_and_the_file_is_put_back_however_it_ends() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let names = NameServer::start(&testbed, Host::Inet);
    let machine = Machine::new(&testbed);
    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    assert!(machine.now().contains(&format!("nameserver {}", inet4())), "{}", machine.now());
    let found = machine.look_up("a.example");
    assert!(found.contains(&ANSWER.to_string()), "{found}");
    assert_eq!(names.client_addresses(), [SERVER_THERE.parse::<std::net::IpAddr>().expect("an address")]);
    assert!(client.interrupt().success());
    assert_eq!(machine.now(), machine.before);

    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    client.kill();
    assert_ne!(machine.now(), machine.before);
    let client = machine.start(&["--dns", "off"]).wait_until_up();
    assert_eq!(machine.now(), machine.before, "the next start puts it back");
    assert!(!client.log().contains("past the tunnel"), "{}", client.log());
}

#[test]
fn what_the_server_suggests_counts_where_everything_goes_into_the_tunnel() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--dns", &inet4(), "--dns", "2001:db8:1::2"]);
    let machine = Machine::new(&testbed);
    let mut client = machine.start(&[]).wait_until_up();
    let both = format!("nameserver {}\nnameserver 2001:db8:1::2\n", inet4());
    assert!(machine.now().ends_with(&both), "{}", machine.now());
    assert!(client.terminate().success());
    for more in [["--routes", "none"], ["--dns", "off"]] {
        let _client = machine.start(&more).wait_until_up();
        assert_eq!(machine.now(), machine.before, "{more:?}");
    }
}

#[test]
fn a_name_server_on_a_link_is_told() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let machine = Machine::new(&testbed);
    let client = machine.start(&[]).wait_until_up();
    let told = format!("names are asked past the tunnel, at {ON_A_LINK}");
    let status = client.wait_for_status(SOON, "a note", |status| {
        if status["notes"].is_array() { Ok(()) } else { Err("no note".to_owned()) }
    });
    assert!(status["notes"][0].as_str().is_some_and(|note| note.contains(&told)), "{status:#}");
    assert_eq!(client.log().matches(&told).count(), 1, "{}", client.log());
    assert_eq!(machine.now(), machine.before);
}

#[test]
fn what_somebody_else_wrote_meanwhile_stays() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let machine = Machine::new(&testbed);
    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    let other = "nameserver 192.0.2.53\n";
    fs::write(&machine.file, other).expect("a file in the stage's directory");
    assert!(client.interrupt().success());
    assert_eq!(machine.now(), other);
    assert!(client.log().contains("somebody else has changed"), "{}", client.log());
}

#[test]
fn a_namespace_leaves_the_file_of_the_whole_machine_alone() {
    let testbed = Testbed::two_links();
    let before = fs::read(FILE).ok();
    let server = testbed.server(&[]);
    let mut client = testbed.start_client(&["--dns", &inet4()]);
    assert_eq!(client.wait(SOON).code(), Some(1), "{}", client.log());
    assert!(client.log().contains("is the whole machine's"), "{}", client.log());
    assert_eq!(fs::read(FILE).ok(), before);
    drop(server);
    let _server = testbed.server(&["--dns", &inet4()]);
    let client = testbed.client(&[]);
    assert!(client.log().contains("that the server suggests are not asked"), "{}", client.log());
    assert_eq!(fs::read(FILE).ok(), before);
}
