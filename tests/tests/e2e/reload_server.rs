//! Changes of a server's configuration while clients use it.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    http::TestPages,
    ping::{Ping, reaches},
    testbed::{Host, MpvpnProcess, SERVER, TUNNEL, Testbed, inet4},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
const URL: &str = "https://192.0.2.1:4433";
/// The same for a host that has no tunnel.
const URL_FROM_INET: &str = "https://198.51.100.1:4433";

/// Replaces the file at once, as editors do.
fn write(testbed: &Testbed, text: &str) {
    let [new, file] = ["new.toml", "server.toml"].map(|name| testbed.dir().join(name));
    fs::write(&new, text).expect("a file");
    fs::rename(new, file).expect("a file to replace");
}

fn server(testbed: &Testbed, text: &str) -> MpvpnProcess {
    write(testbed, text);
    testbed.server(&["--config", "server.toml", "--state-dir", "state"])
}

/// The exit code and the output of `mpvpn config reload`.
fn reload(testbed: &Testbed, server: &MpvpnProcess) -> (Option<i32>, String) {
    let socket = server.socket().to_str().expect("an ASCII path").to_owned();
    let output = testbed.mpvpn(Host::Server, &["config", "reload", "--api-socket", &socket]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), format!("{out}{err}"))
}

/// Gives the server another certificate, as a program that renews it does.
fn renew_certificate(testbed: &Testbed, number: u64) {
    let new = format!("new{number}");
    testbed.make_certificate(&new);
    for kind in ["key", "crt"] {
        let file = |name: &str| testbed.dir().join(format!("{name}.{kind}"));
        fs::rename(file(&new), file("server")).expect("a file to replace");
    }
}

/// The SHA-256 of the certificate that the server shows over TCP.
fn shown_pin(testbed: &Testbed) -> String {
    let script = format!(
        "curl -sSk --max-time 20 -o /dev/null -w '%{{certs}}' {URL_FROM_INET} | openssl x509 -outform der | sha256sum"
    );
    let sum = testbed.run(Host::Inet, &["sh", "-c", &script]);
    sum.split_whitespace().next().expect("a sum").to_owned()
}

/// The SHA-256 of the certificate in the file.
fn pin_of_file(testbed: &Testbed) -> String {
    let sum =
        testbed.run(Host::Server, &["sh", "-c", "openssl x509 -outform der -in server.crt | sha256sum"]);
    sum.split_whitespace().next().expect("a sum").to_owned()
}

/// How often an event happened.
fn events(process: &MpvpnProcess, name: &str) -> u64 {
    let events = process.events();
    let counts =
        events.iter().filter(|event| event["event"] == name).filter_map(|event| event["count"].as_u64());
    counts.sum()
}

/// A configuration that differs from the one before in every setting that can change.
fn variant(number: u64) -> String {
    let rules = match number % 3 {
        0 => "",
        1 => "[[access]]\nallow = false\nusers = 'anonymous'\nto = '172.16.0.0/12'\n",
        _ => "[[access]]\nallow = false\nports = '25'\n",
    };
    format!(
        "isolate = {}\ndns = '198.51.100.{number}'\nlog-level = '{}'\nroutes = ['198.51.100.0/24', '10.{number}.0.0/16']\n\
         [site]\nserver = 'server-{number}'\n[[limit]]\nmax-classes = {}\nmax-priority = '{number}%'\n{rules}",
        number.is_multiple_of(2),
        if number.is_multiple_of(2) { "info" } else { "warn" },
        number % 6 + 3,
    )
}

/// The warning in a server's log about the certificate of its start.
const LOCKED_OUT_AT_START: &str = "this start shows another certificate than before. It locks out 1 user,";

#[test]
fn a_certificate_that_locks_out_clients_with_pins_waits_for_force() {
    let testbed = Testbed::two_links();
    write(&testbed, "log-level = 'debug'\n");
    let args = ["--config", "server.toml", "--state-dir", "state", "--auth", "token"];
    let server = testbed.server(&args);
    let add = ["user", "add", "alice", "--json", "--host", SERVER, "--state-dir", "state"];
    let added = testbed.mpvpn(Host::Server, &add);
    let said: serde_json::Value = serde_json::from_slice(&added.stdout).expect("JSON");
    let link = said["link"].as_str().expect("a link");
    let _client = testbed.start(Host::Client, &["client", link, "--path", "eth1"]).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);
    let pings = Ping::dense_count(&testbed, Host::Client, TUNNEL, 500);
    let before = pin_of_file(&testbed);

    // A program renews the certificate: nobody is there to ask.
    renew_certificate(&testbed, 1);
    let refusals = |count| {
        eventually(TIMEOUT, "a warning", || match events(&server, "certificates_refused") {
            found if found == count => Ok(()),
            found => Err(format!("{found} of {count}")),
        });
    };
    refusals(1);
    assert_eq!(shown_pin(&testbed), before);
    // Of SIGHUP, all else counts.
    write(&testbed, "log-level = 'info'\n");
    server.reload();
    refusals(2);
    assert_eq!((events(&server, "configuration_read"), shown_pin(&testbed)), (1, before.clone()));
    write(&testbed, "log-level = 'debug'\n");
    let (code, said) = reload(&testbed, &server);
    let new = pin_of_file(&testbed);
    // `default`, whose token the first start made, and alice.
    let expected = format!(
        "it would lock out 2 users, whose join links pin another one: give their clients this pin, too (`pin` may be \
        given several times), then run `mpvpn config reload --force`: {new}"
    );
    assert!(code == Some(2) && said.contains(&expected), "{code:?}: {said}");
    assert_eq!((events(&server, "configuration_refused"), shown_pin(&testbed)), (1, before));

    let socket = server.socket().to_str().expect("an ASCII path").to_owned();
    let forced = testbed.mpvpn(Host::Server, &["config", "reload", "--force", "--api-socket", &socket]);
    assert!(forced.status.success(), "{forced:?}");
    assert_eq!(shown_pin(&testbed), new);
    assert_eq!(reload(&testbed, &server), (Some(0), "nothing has changed\n".to_owned()));
    let pings = pings.finish();
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);

    // Nobody has a link with the pin of this one, so the next one needs no question.
    renew_certificate(&testbed, 2);
    eventually(TIMEOUT, "the next certificate", || match shown_pin(&testbed) {
        pin if pin == pin_of_file(&testbed) => Ok(()),
        pin => Err(pin),
    });

    // A start cannot ask, either. It warns once.
    let added =
        testbed.mpvpn(Host::Server, &["user", "add", "bob", "--host", SERVER, "--state-dir", "state"]);
    assert!(added.status.success(), "{added:?}");
    drop(server);
    renew_certificate(&testbed, 3);
    let server = testbed.server(&args);
    assert!(server.log().contains(LOCKED_OUT_AT_START), "{}", server.log());
    drop(server);
    let server = testbed.server(&args);
    assert!(!server.log().contains(LOCKED_OUT_AT_START), "{}", server.log());
}

#[test]
fn fifty_reloads_lose_no_ping() {
    let testbed = Testbed::two_clients();
    let server = server(&testbed, &variant(1));
    let client = testbed.client(&["--lane", "datagram"]);
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--transport", "tcp"];
    let by_tcp = testbed.start(Host::Other, &[&args[..], &["--state-dir", "other"]].concat()).wait_until_up();
    for host in [Host::Client, Host::Other] {
        reaches(&testbed, host, TUNNEL);
    }

    let pings = [Host::Client, Host::Other].map(|host| Ping::dense_count(&testbed, host, TUNNEL, 1000));
    let began = Instant::now();
    for number in 1..=50 {
        write(&testbed, &variant(number + 1));
        if number.is_multiple_of(10) {
            renew_certificate(&testbed, number);
        }
        match number % 2 {
            0 => {
                server.reload();
                eventually(TIMEOUT, "the reload is done", || match events(&server, "configuration_read") {
                    count if count == number => Ok(()),
                    count => Err(format!("{count} reloads of {number}")),
                });
            }
            _ => {
                let (code, said) = reload(&testbed, &server);
                assert_eq!(code, Some(0), "{said}");
                assert!(said.contains("counts from now on: access and isolate, "), "{said}");
                assert!(
                    said.contains("dns, limit, log-level, routes, site\n") && !said.contains("restart"),
                    "{said}"
                );
            }
        }
        let due = Duration::from_millis(200) * number as u32;
        thread::sleep(due.saturating_sub(began.elapsed()));
    }
    let took = began.elapsed();
    for (pings, process) in pings.into_iter().zip([&client, &by_tcp]) {
        let pings = pings.finish();
        assert_eq!((pings.sent, pings.answers.len()), (1000, 1000));
        println!("50 reloads in {took:.1?}: 0 of {} pings lost", pings.sent);
        assert_eq!((events(process, "disconnected"), events(process, "connected")), (0, 1));
    }
    assert_eq!(shown_pin(&testbed), pin_of_file(&testbed));
}

#[test]
fn changes_count_at_once_for_sessions_that_run() {
    let testbed = Testbed::two_links();
    let server = server(&testbed, "log-level = 'info'\n");
    let client = testbed.client(&["--lane", "datagram", "--routes", "advertised"]);
    let routes = |name: &str| {
        testbed
            .run(Host::Client, &["sh", "-c", &format!("ip route show table all | grep -c '{name}' || true")])
    };
    let forbidden = "[[access]]\nallow = false\nusers = 'anonymous'\nto = '198.51.100.0/24'\n";
    assert_eq!(routes("172.16.7.0/24 dev mpvpn0").trim(), "0");

    let changed = format!(
        "listen = ['0.0.0.0:4434']\nmax-clients = 9\nroutes = ['172.16.7.0/24', '198.51.100.0/24']\n[site]\nserver = 'mine'\n{forbidden}"
    );
    write(&testbed, &changed);
    let (code, said) = reload(&testbed, &server);
    assert_eq!(
        (code, said.as_str()),
        (
            Some(0),
            "counts from now on: access and isolate, routes, site\ncounts after a restart: max-clients\n"
        )
    );
    eventually(TIMEOUT, "the client has the new routes", || {
        match routes("172.16.7.0/24 dev mpvpn0").trim() {
            "0" => Err(client.log()),
            _ => Ok(()),
        }
    });
    let to_inet = || {
        let output =
            testbed.output_of(Host::Client, TIMEOUT, &["ping", "-n", "-c", "1", "-W", "2", &inet4()]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(to_inet().contains("Packet filtered"), "{}", to_inet());
    let page = testbed.run(Host::Client, &["curl", "-sSki", "--max-time", "20", URL]);
    assert!(page.contains("server: mine"), "{page}");

    write(&testbed, &changed.replace(forbidden, ""));
    assert_eq!(reload(&testbed, &server).0, Some(0));
    reaches(&testbed, Host::Client, &inet4());
    assert_eq!((events(&client, "disconnected"), events(&client, "connected")), (0, 1));
}

#[test]
fn a_mistake_changes_nothing_and_is_named_with_line_and_column() {
    let testbed = Testbed::two_links();
    let server = server(&testbed, "reload = 'auto'\n[site]\nserver = 'first'\n");
    let server_field = || {
        let page = testbed.run(Host::Client, &["curl", "-sSki", "--max-time", "20", URL]);
        page.lines().find_map(|line| line.strip_prefix("server: ")).unwrap_or_default().trim().to_owned()
    };
    for (mistake, place) in [
        ("reload = 'auto'\n[site]\nserver = 'second'\nroute = 1\n", "server.toml, line 4, column 1"),
        (
            "reload = 'auto'\n\n  max-clients = 0\n[site]\nserver = 'second'\n",
            "server.toml, line 3, column 3",
        ),
        ("reload = 'auto'\n[site]\nserver = 'second'\nroot = '/no/such/folder'\n", "/no/such/folder"),
    ] {
        write(&testbed, mistake);
        let (code, said) = reload(&testbed, &server);
        assert!(code == Some(2) && said.contains(place), "{code:?}: {said}");
        assert!(
            said.contains("nothing has changed") || said.contains("the running configuration stays"),
            "{said}"
        );
        assert_eq!(server_field(), "first");
    }
    // The file is read when it changes.
    write(&testbed, "reload = 'auto'\n[site]\nserver = 'third'\n");
    eventually(TIMEOUT, "the file is read again", || match server_field().as_str() {
        "third" => Ok(()),
        other => Err(format!("{other}: {}", server.log())),
    });
}

#[test]
fn a_certificate_that_is_renewed_is_shown_without_a_command() {
    let testbed = Testbed::two_links();
    let server = server(&testbed, "");
    let client = testbed.client(&[]);
    let before = shown_pin(&testbed);
    assert_eq!(before, pin_of_file(&testbed));
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 5);
    thread::sleep(Duration::from_secs(1));
    // A certificate without its key is no reason to end.
    let good = fs::read(testbed.dir().join("server.crt")).expect("a file");
    fs::write(testbed.dir().join("server.crt"), "nothing").expect("a file");
    eventually(TIMEOUT, "the mistake is said", || match events(&server, "certificates_refused") {
        0 => Err(server.log()),
        _ => Ok(()),
    });
    fs::write(testbed.dir().join("server.crt"), good).expect("a file");
    renew_certificate(&testbed, 1);
    let began = Instant::now();
    let new = pin_of_file(&testbed);
    eventually(TIMEOUT, "the new certificate is shown", || match shown_pin(&testbed) {
        shown if shown == new => Ok(()),
        shown => Err(shown),
    });
    println!("a renewed certificate is shown after {:.1?}", began.elapsed());
    assert_ne!(new, before);
    let pings = pings.finish();
    assert_eq!(pings.missing(), 0, "of {}", pings.sent);
    // A new client gets it over QUIC, and requests over TCP still reach the server's own QUIC.
    drop(client);
    let _client = testbed.client(&["--pin", &new]);
    reaches(&testbed, Host::Client, TUNNEL);
    let pages = TestPages::start(&testbed, Host::Server);
    let target = pages.url(TUNNEL, "10");
    let args = [
        "curl",
        "-sS",
        "--max-time",
        "10",
        "-x",
        URL_FROM_INET,
        "--proxy-insecure",
        "--proxytunnel",
        "-U",
        "a:b",
    ];
    let more = ["-o", "/dev/null", "-w", "%{http_connect}", target.as_str()];
    let said = testbed.output_of(Host::Inet, TIMEOUT, &[&args[..], &more].concat());
    assert!(String::from_utf8_lossy(&said.stdout).contains("200"), "{said:?}");
}
