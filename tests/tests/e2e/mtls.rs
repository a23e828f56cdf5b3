//! Clients that show certificates instead of tokens.

use std::{
    fs,
    os::unix::fs::chown,
    time::{Duration, Instant, SystemTime},
};

use mpvpn_tests::{
    eventually,
    http::TestPages,
    ping::{Ping, reaches},
    testbed::{Host, MpvpnProcess, SERVER, TUNNEL, Testbed, inet4},
    user_home::{USER, UserHome},
};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const SOON: Duration = Duration::from_secs(15);
/// The keys of the server's file.
const FILE: &str = "client-ca = 'clients.crt'\ncrl = 'crl.pem'\n";

/// A CA of clients.
pub(crate) struct Ca(Issuer<'static, KeyPair>);

impl Ca {
    /// Writes the certificate to `file` in the testbed's folder.
    pub(crate) fn new(testbed: &Testbed, file: &str) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, file);
        let certificate = params.self_signed(&key).expect("a certificate");
        fs::write(testbed.dir().join(file), certificate.pem()).expect("a file to write");
        Self(Issuer::new(params, key))
    }

    /// Writes USER.crt and USER.key for an e-mail address of the user.
    fn sign(&self, testbed: &Testbed, name: &str, serial: u64, valid_until: Option<SystemTime>) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.serial_number = Some(SerialNumber::from(serial));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "laptop");
        params.subject_alt_names = vec![SanType::Rfc822Name(name.try_into().expect("ASCII"))];
        if let Some(until) = valid_until {
            params.not_after = until.into();
        }
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        let user = name.split('@').next().unwrap_or(name);
        for (kind, text) in [("crt", certificate.pem()), ("key", key.serialize_pem())] {
            fs::write(testbed.dir().join(format!("{user}.{kind}")), text).expect("a file to write");
        }
    }

    /// Writes the list of revoked certificates to `crl.pem`.
    pub(crate) fn revoke(&self, testbed: &Testbed, serials: &[u64]) {
        let revocation_time = rcgen::date_time_ymd(2026, 1, 1);
        let entry = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time,
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: revocation_time,
            next_update: rcgen::date_time_ymd(2099, 1, 1),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.0).expect("a list").pem().expect("PEM");
        // As tools do it: the file is replaced.
        let draft = testbed.dir().join("crl.new");
        fs::write(&draft, list).expect("a file to write");
        fs::rename(&draft, testbed.dir().join("crl.pem")).expect("a file to replace");
    }
}

/// A server for certificates of `ca`, with the users alice and bob.
struct Site {
    server: MpvpnProcess,
    ca: Ca,
    testbed: Testbed,
}

impl Site {
    fn new(testbed: Testbed) -> Self {
        let ca = Ca::new(&testbed, "clients.crt");
        for (name, serial) in [("alice@example.org", 1), ("bob@example.org", 2), ("carol@example.org", 3)] {
            ca.sign(&testbed, name, serial, None);
        }
        ca.revoke(&testbed, &[]);
        fs::write(testbed.dir().join("server.toml"), FILE).expect("a file to write");
        let server = testbed.server(&["--config", "server.toml", "--auth", "mtls", "--state-dir", "state"]);
        for name in ["alice@example.org", "bob@example.org"] {
            let args = ["user", "add", name, "--json", "--host", SERVER, "--state-dir", "state"];
            let output = testbed.mpvpn(Host::Server, &args);
            assert!(output.status.success(), "{output:?}");
            let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let command = said["command"].as_str().unwrap_or_default();
            assert!(said.get("token").is_none() && command.contains("--cert CERT.pem"), "{said:#}");
        }
        Self { server, ca, testbed }
    }

    fn client(&self, user: &str, more: &[&str]) -> MpvpnProcess {
        let (cert, key) = (format!("{user}.crt"), format!("{user}.key"));
        self.testbed.start_client(&[&["--cert", &cert, "--key", &key], more].concat())
    }

    fn wait_for_log(&self, limit: Duration, text: &str) {
        eventually(limit, text, || match self.server.log().contains(text) {
            true => Ok(()),
            false => Err(self.server.log()),
        });
    }
}

/// Waits until a client has given up, and has said this and what to do.
fn refused(mut client: MpvpnProcess, said: &str) {
    let status = client.wait(SOON);
    let log = client.log();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(said) && log.contains("next:"), "no {said:?} in:\n{log}");
}

#[test]
fn a_revoked_certificate_ends_its_sessions_within_a_second_and_no_others() {
    let site = Site::new(Testbed::two_clients());
    let mut alice = site.client("alice", &[]).wait_until_up();
    let args = ["client", "--server", SERVER, "--insecure", "--cert", "bob.crt", "--key", "bob.key"];
    let bob = site.testbed.start(Host::Other, &args).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
    let users: Vec<_> = site.server.status()["clients"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|client| client["user"].clone())
        .collect();
    assert!(
        users.contains(&"alice@example.org".into()) && users.contains(&"bob@example.org".into()),
        "{users:?}"
    );

    let pings = Ping::every(&site.testbed, Host::Other, Duration::from_millis(20), TUNNEL, 4);
    let revoked = Instant::now();
    site.ca.revoke(&site.testbed, &[1]);
    site.wait_for_log(Duration::from_secs(1), "disconnected: the client's certificate was revoked");
    let took = revoked.elapsed();
    eprintln!("revoked after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    alice.wait_until_refused(SOON, "the client's certificate was revoked");
    assert!(alice.interrupt().success());
    let mut alice = site.client("alice", &[]);
    alice.wait_until_refused(SOON, "the client's certificate was revoked");
    assert!(alice.interrupt().success());
    let pings = pings.finish();
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    assert_eq!(bob.status()["session"]["resumed"], 0);

    // Another certificate of the same user.
    site.ca.sign(&site.testbed, "alice@example.org", 4, None);
    let mut alice = site.client("alice", &[]).wait_until_up();
    // The users' file counts, too; and a broken list changes nothing.
    fs::write(site.testbed.dir().join("crl.pem"), "junk").expect("a file to write");
    site.wait_for_log(SOON, "the users cannot be read, nothing changed: crl.pem: expected");
    site.ca.revoke(&site.testbed, &[1]);
    let revoke = ["user", "revoke", "alice@example.org", "--state-dir", "state"];
    assert!(site.testbed.mpvpn(Host::Server, &revoke).status.success());
    site.wait_for_log(Duration::from_secs(1), "disconnected: the access of this user was revoked");
    alice.wait_until_refused(SOON, "the access of this user was revoked");
    assert!(alice.interrupt().success());
    let rotate = ["user", "rotate", "alice@example.org", "--host", SERVER, "--state-dir", "state"];
    let restored = site.testbed.mpvpn(Host::Server, &rotate);
    let said = String::from_utf8_lossy(&restored.stdout).into_owned();
    assert!(restored.status.success() && said.contains("There is no token"), "{restored:?}");
    let _alice = site.client("alice", &[]).wait_until_up();
}

#[test]
fn a_session_ends_with_its_certificate_and_a_renewed_one_continues_it() {
    let site = Site::new(Testbed::two_clients());
    let until = SystemTime::now() + Duration::from_secs(8);
    site.ca.sign(&site.testbed, "alice@example.org", 7, Some(until));
    site.ca.sign(&site.testbed, "bob@example.org", 8, Some(until));
    let alice = site.client("alice", &[]).wait_until_up();
    let args = ["client", "--server", SERVER, "--insecure", "--cert", "bob.crt", "--key", "bob.key"];
    let mut bob = site.testbed.start(Host::Other, &args).wait_until_up();
    site.ca.sign(&site.testbed, "alice@example.org", 9, None);
    assert!(SystemTime::now() < until, "the clients took too long to begin");
    site.wait_for_log(SOON, "disconnected: the client's certificate has expired");
    // Seconds are the precision of certificates.
    let late = until.elapsed().expect("the certificate has expired");
    eprintln!("ended {late:?} after the end of the validity");
    assert!(late < Duration::from_secs(2), "{late:?}");
    assert_eq!(bob.wait(SOON).code(), Some(1), "{}", bob.log());
    assert!(
        bob.log().contains("it has expired, or is not valid yet\n  next: name with --cert"),
        "{}",
        bob.log()
    );
    alice.wait_for_status(SOON, "the same session again", |status| {
        match status["session"]["resumed"].as_u64() {
            Some(1) => Ok(()),
            _ => Err(format!("{:#}", status["session"])),
        }
    });
    reaches(&site.testbed, Host::Client, TUNNEL);
}

#[test]
fn another_ca_counts_from_a_reload_on_and_no_ping_is_lost() {
    let site = Site::new(Testbed::two_clients());
    let mut alice = site.client("alice", &[]).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
    let other = Ca::new(&site.testbed, "others.crt");
    let pings = Ping::every(&site.testbed, Host::Client, Duration::from_millis(20), TUNNEL, 3);
    fs::write(site.testbed.dir().join("server.toml"), "client-ca = 'others.crt'\n").expect("a file to write");
    let socket = site.server.socket().to_string_lossy().into_owned();
    let reload = site.testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    let said = String::from_utf8_lossy(&reload.stdout).into_owned();
    assert!(reload.status.success() && said.contains("from now on: client-ca and crl"), "{reload:?}");
    let pings = pings.finish();
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    assert!(alice.interrupt().success());
    refused(site.client("bob", &[]), "no CA that the peer trusts signed it");

    // The file of the CAs is also read again when it changes. The reload has said the same.
    const NEW: &str = "the CAs of clients' certificates are new";
    let said = || site.server.log().matches(NEW).count();
    let before = said();
    other.sign(&site.testbed, "bob@example.org", 1, None);
    fs::copy(site.testbed.dir().join("clients.crt"), site.testbed.dir().join("others.new")).expect("a copy");
    fs::rename(site.testbed.dir().join("others.new"), site.testbed.dir().join("others.crt")).expect("a file");
    eventually(SOON, NEW, || if said() > before { Ok(()) } else { Err(site.server.log()) });
    refused(site.client("bob", &[]), "no CA that the peer trusts signed it");
    let _alice = site.client("alice", &[]).wait_until_up();
}

#[test]
fn a_proxy_shows_its_certificate() {
    let site = Site::new(Testbed::two_links());
    let home = UserHome::new(&site.testbed);
    let socks = "127.0.0.1:1080";
    let mut args = vec!["proxy", "--server", SERVER, "--insecure", "--socks5", socks];
    let [cert, key] = ["alice.crt", "alice.key"].map(|file| {
        let own = home.path().join(file);
        fs::copy(site.testbed.dir().join(file), &own).expect("a copy");
        chown(&own, Some(USER), Some(USER)).expect("root may give it away");
        own.to_string_lossy().into_owned()
    });
    args.extend(["--cert", &cert, "--key", &key]);
    let _proxy = site
        .testbed
        .start_as_user(Host::Client, &home, &args, &home.file("client-proxy.sock"))
        .wait_until_up();
    let pages = TestPages::start(&site.testbed, Host::Inet);
    let url = pages.url(&inet4(), "/");
    let curl =
        ["curl", "-sS", "-m", "20", "-o", "page", "-w", "%{http_code}", "--socks5-hostname", socks, &url];
    let output = site.testbed.output_of(Host::Client, SOON, &curl);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "200", "{output:?}");
}

#[test]
fn who_shows_no_right_certificate_is_told_why() {
    let site = Site::new(Testbed::two_slow_links());
    refused(site.testbed.start_client(&[]), "with `--cert` and `--key`");
    let mut carol = site.client("carol", &[]);
    let reason = "the user of the client's certificate, carol@example.org, is not in the users' file";
    carol.wait_until_refused(SOON, reason);
    assert!(carol.interrupt().success());
    site.ca.sign(
        &site.testbed,
        "bob@example.org",
        5,
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30)),
    );
    refused(site.client("bob", &[]), "it has expired, or is not valid yet");
    let other = Ca::new(&site.testbed, "others.crt");
    other.sign(&site.testbed, "bob@example.org", 6, None);
    refused(site.client("bob", &[]), "no CA that the peer trusts signed it");
}

#[test]
fn certificates_count_over_tcp_too() {
    let site = Site::new(Testbed::two_slow_links());
    let mut alice = site.client("alice", &["--transport", "tcp"]).wait_until_up();
    reaches(&site.testbed, Host::Client, TUNNEL);
    assert!(alice.interrupt().success());

    // A standard client of an HTTP proxy.
    let pages = TestPages::start(&site.testbed, Host::Inet);
    let url = pages.url(&inet4(), "/");
    let fetch = |user: &str| {
        let (cert, key) = (format!("{user}.crt"), format!("{user}.key"));
        let proxy = ["-x", "https://192.0.2.1:4433", "--proxy-insecure", "--proxytunnel"];
        let own = [
            "--proxy-cert",
            &cert,
            "--proxy-key",
            &key,
            "-m",
            "20",
            "-sS",
            "-o",
            "page",
            "-w",
            "%{http_connect}",
            &url,
        ];
        let args = [&["curl"][..], &proxy, &own].concat();
        String::from_utf8_lossy(&site.testbed.output_of(Host::Client, SOON, &args).stdout).into_owned()
    };
    assert_eq!(fetch("alice"), "200");
    assert_eq!(fetch("carol"), "403");
    site.ca.revoke(&site.testbed, &[1]);
    site.wait_for_log(SOON, "users read again");
    assert_eq!(fetch("alice"), "403");
    assert_eq!(fetch("bob"), "200");
}
