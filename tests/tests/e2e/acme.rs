//! Certificates that a CA issues by ACME, here letsencrypt/pebble.

use std::{
    fs,
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    interop_peer::{InteropPeer, Program},
    ping::Ping,
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::Value;

const NAME: &str = "vpn.example.org";
/// Time for an order on a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// Where the CA, on the host behind the server, reaches it.
const SERVER_FROM_CA: &str = "198.51.100.1";

/// A server that orders certificates, and the CA.
struct Site {
    server: MpvpnProcess,
    pebble: Option<InteropPeer>,
    testbed: Testbed,
}

impl Site {
    /// Certificates last `lifetime` seconds.
    fn new(challenge: &str, lifetime: u32) -> Self {
        let testbed = Testbed::two_slow_links();
        testbed.make_certificate("pebble");
        let write =
            |name: &str, text: String| fs::write(testbed.dir().join(name), text).expect("a file to write");
        write("hosts-of-ca", format!("127.0.0.1 localhost\n{SERVER_FROM_CA} {NAME}\n"));
        write("hosts-of-client", format!("127.0.0.1 localhost\n192.0.2.1 {NAME}\n"));
        write(
            "pebble.json",
            format!(
                r#"{{"pebble": {{"listenAddress": "0.0.0.0:14000", "managementListenAddress": "0.0.0.0:15000",
                    "certificate": "pebble.crt", "privateKey": "pebble.key", "httpPort": 80, "tlsPort": 4433,
                    "keyAlgorithm": "ecdsa", "retryAfter": {{"authz": 1, "order": 1}},
                    "profiles": {{"default": {{"description": "for tests", "validityPeriod": {lifetime}}}}}}}}}"#
            ),
        );
        write(
            "server.toml",
            format!(
                "listen = '0.0.0.0:4433'\nstate-dir = 'state'\n[acme]\ndomains = '{NAME}'\nemail = 'admin@example.org'\n\
                 directory = 'https://198.51.100.2:14000/dir'\nca = 'pebble.crt'\nchallenge = '{challenge}'\n"
            ),
        );
        let pebble = Some(start_pebble(&testbed));
        let server = start_server(&testbed);
        Self { server, pebble, testbed }
    }

    /// Waits until this many certificates were issued since the server's start.
    fn wait_for_certificates(&self, count: usize) {
        eventually(SOON, "a certificate", || {
            let events = self.server.events();
            match events.iter().filter(|event| event["event"] == "certificate_issued").count() {
                issued if issued >= count => Ok(()),
                issued => Err(format!("{issued} certificates of {count}:\n{}", self.server.log())),
            }
        });
    }

    /// The certificate that the server shows on TCP to who asks for its name.
    fn presented(&self) -> String {
        let script = format!(
            "openssl s_client -connect {SERVER_FROM_CA}:4433 -servername {NAME} </dev/null 2>/dev/null \
             | openssl x509 -noout -serial -issuer -ext subjectAltName"
        );
        self.testbed.run(Host::Inet, &["sh", "-c", &script])
    }

    /// Starts a client that trusts the CA as its machine's, by a new join link.
    fn join(&self, user: &str) -> MpvpnProcess {
        let args = ["user", "add", user, "--json", "--config", "server.toml"];
        let output = self.testbed.mpvpn(Host::Server, &args);
        assert!(output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let link = said["link"].as_str().expect("a link");
        assert!(link.ends_with(&format!("@{NAME}:4433/?ca=system")), "{link}");
        let [roots, hosts] = ["roots.pem", "hosts-of-client"].map(|name| self.testbed.dir().join(name));
        let root = self.testbed.run(Host::Inet, &["curl", "-sk", "https://127.0.0.1:15000/roots/0"]);
        fs::write(&roots, root).expect("a file to write");
        let files = [
            (roots.as_path(), Path::new("/etc/ssl/certs/ca-certificates.crt")),
            (hosts.as_path(), Path::new("/etc/hosts")),
        ];
        let socket = self.testbed.file("api", Host::Client);
        let args = ["client", link, "--api-socket", socket.to_str().expect("ASCII")];
        self.testbed.start_with_files(Host::Client, &files, &args, &socket)
    }
}

fn start_pebble(testbed: &Testbed) -> InteropPeer {
    let pebble =
        InteropPeer::start(testbed, Host::Inet, Program::Pebble("hosts-of-ca"), &["-config", "pebble.json"]);
    eventually(SOON, "pebble listens", || {
        let reached = testbed.in_namespace(Host::Inet, || TcpStream::connect("127.0.0.1:14000"));
        reached.map(drop).map_err(|error| format!("{error}: {}", pebble.log()))
    });
    pebble
}

fn start_server(testbed: &Testbed) -> MpvpnProcess {
    testbed.start(Host::Server, &["server", "--config", "server.toml"]).wait_until_up()
}

#[test]
fn a_certificate_is_ordered_by_tls_alpn_and_renewed_without_a_lost_ping() {
    let started = Instant::now();
    // Renewed after 14 s.
    let site = Site::new("tls-alpn-01", 21);
    site.wait_for_certificates(1);
    eprintln!("the first certificate after {:.1} s", started.elapsed().as_secs_f64());
    let first = site.presented();
    assert!(first.contains("Pebble Intermediate") && first.contains(&format!("DNS:{NAME}")), "{first}");
    for file in ["account.json", "certificate.pem"] {
        let acme = fs::read_dir(site.testbed.dir().join("state/acme")).expect("a folder");
        let folder = acme.map(|entry| entry.expect("an entry").path()).next().expect("a folder of the CA");
        let mode = fs::metadata(folder.join(file)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }

    let mut client = site.join("alice").wait_until_up();
    let pings = Ping::every(&site.testbed, Host::Client, Duration::from_millis(20), TUNNEL, 20);
    site.wait_for_certificates(2);
    let pings = pings.finish();
    eprintln!("{} of {} pings lost while the certificate was renewed", pings.missing(), pings.sent);
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    assert_eq!(client.status()["session"]["resumed"], 0);
    assert_ne!(site.presented(), first);
    assert!(client.interrupt().success());
    // The new one is used for new connections over QUIC, too.
    let _again = site.join("bob").wait_until_up();
}

#[test]
fn by_http_01_port_80_is_open_only_while_the_ca_looks() {
    let mut site = Site::new("http-01", 90 * 24 * 3600);
    site.wait_for_certificates(1);
    let first = site.presented();
    assert!(first.contains("Pebble Intermediate"), "{first}");
    let log = site.pebble.as_ref().expect("it runs").log();
    assert!(log.contains("Attempting to validate w/ HTTP: http://vpn.example.org:80/"), "{log}");
    let port_80 = site.testbed.in_namespace(Host::Inet, || TcpStream::connect((SERVER_FROM_CA, 80)));
    assert_eq!(port_80.expect_err("closed").kind(), std::io::ErrorKind::ConnectionRefused);

    // After a restart the certificate is used without a CA.
    site.pebble.take().expect("it runs").terminate();
    assert!(site.server.terminate().success());
    site.server = start_server(&site.testbed);
    assert_eq!(site.presented(), first);
    let names: Vec<_> = site.server.events().iter().map(|event| event["event"].clone()).collect();
    assert!(!names.iter().any(|name| name == "certificate_failed"), "{names:?}");
}

#[test]
fn while_the_ca_cannot_be_reached_the_old_certificate_lasts_and_people_are_told() {
    // Renewed after 26 s.
    let mut site = Site::new("tls-alpn-01", 39);
    site.wait_for_certificates(1);
    let first = site.presented();
    let alice = site.join("alice").wait_until_up();
    site.pebble.take().expect("it runs").terminate();
    eventually(SOON, "a warning", || {
        let failed = site.server.events().into_iter().find(|event| event["event"] == "certificate_failed");
        let failed = failed.ok_or_else(|| site.server.log())?;
        assert_eq!(failed["retry_s"], 10, "{failed:#}");
        let reason = failed["reason"].as_str().expect("a reason");
        assert!(reason.contains("the CA 198.51.100.2 cannot be reached"), "{reason}");
        assert!(failed["until"].is_string(), "{failed:#}");
        Ok(())
    });
    assert!(site.server.log().contains("WARN no new certificate"), "{}", site.server.log());
    assert_eq!(site.presented(), first);
    assert_eq!(alice.status()["session"]["resumed"], 0);
    // A CA that has forgotten the account.
    site.pebble = Some(start_pebble(&site.testbed));
    site.wait_for_certificates(2);
    assert_ne!(site.presented(), first);
}
