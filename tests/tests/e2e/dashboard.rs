//! The dashboard: who is let in, what is shown, what can be done there.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    dashboard::{Browser, DASHBOARD, login_code, login_link},
    eventually,
    ping::reaches,
    testbed::{Host, TUNNEL, Testbed},
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn a_link_logs_in_once_and_a_used_or_wrong_one_is_refused() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = testbed.server(&["--dashboard", DASHBOARD]);
    let mut browser = Browser::new(&testbed, Host::Server);
    assert_eq!(browser.get("/api/session").code, 401);
    let link = login_link(&server);
    assert!(link.starts_with(&format!("http://{DASHBOARD}/#login=")), "{link}");
    let code = login_code(&server);
    let answer = browser.log_in(&code);
    assert_eq!(answer.code, 200, "{answer:?}");
    let cookie = answer.field("set-cookie").expect("a cookie");
    assert!(cookie.contains("; HttpOnly") && cookie.contains("; SameSite=Strict"), "{cookie}");
    let about = browser.get("/api/session").ok();
    assert_eq!((&about["role"], &about["users"]), (&json!("server"), &json!(false)), "{about}");

    let mut other = Browser::new(&testbed, Host::Server);
    for wrong in [code.as_str(), "", "x", &"A".repeat(43)] {
        let answer = other.log_in(wrong);
        assert_eq!(answer.code, 403, "{answer:?}");
        assert!(
            answer.json()["error"].as_str().is_some_and(|why| why.contains("mpvpn dashboard")),
            "{answer:?}"
        );
    }
    let codes: Vec<u16> = (0..12).map(|_| other.log_in("wrong").code).collect();
    assert_eq!((codes[0], codes[11]), (403, 429), "{codes:?}");
    assert_eq!(other.log_in(&login_code(&server)).code, 200, "others cannot keep a right one out");
    let events = server.events();
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    assert_eq!((count("dashboard_login"), count("dashboard_login_refused")), (1, 1), "{events:?}");
    let refused = events.iter().find(|event| event["event"] == "dashboard_login_refused").expect("counted");
    assert_eq!(
        (&refused["kind"], &refused["network"]),
        (&json!("dashboard"), &json!("127.0.0.1")),
        "{refused}"
    );
    assert!(!server.log().contains(&code), "the code is in the log");

    assert_eq!(browser.post("/api/logout", &json!({})).code, 200);
    assert_eq!(browser.get("/api/session").code, 401);
    assert_eq!(other.get("/api/session").code, 200);
}

/// A page of another server, a name that was made to lead here, a stolen cookie.
#[test]
fn only_the_own_page_is_answered_and_only_under_its_own_name() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = testbed.server(&["--dashboard", DASHBOARD]);
    let browser = Browser::logged_in(&testbed, Host::Server, &server);
    let own = format!("http://{DASHBOARD}");
    let kind = ("Content-Type", "application/json");
    let post = |host, origin: &str| {
        browser.send("POST", "/api/logout", &[("Host", host), ("Origin", origin), kind], "{}").code
    };
    assert_eq!(post(DASHBOARD, "http://evil.example"), 403);
    assert_eq!(post(DASHBOARD, "null"), 403);
    assert_eq!(post(DASHBOARD, "http://127.0.0.1:8000"), 403, "another server of this machine");
    assert_eq!(
        browser.send("POST", "/api/logout", &[("Host", DASHBOARD), kind], "{}").code,
        403,
        "no origin"
    );
    assert_eq!(post("evil.example:9470", "http://evil.example:9470"), 421, "DNS rebinding");
    assert_eq!(browser.send("GET", "/", &[("Host", "evil.example:9470")], "").code, 421);
    let cross = [("Host", DASHBOARD), ("Sec-Fetch-Site", "cross-site")];
    assert_eq!(browser.send("GET", "/api/history", &cross, "").code, 403);
    let form = [("Host", DASHBOARD), ("Origin", &own), ("Content-Type", "text/plain")];
    assert_eq!(browser.send("POST", "/api/link", &form, "{}").code, 415);

    // Either secret of a session alone is worth nothing.
    let stranger = Browser::new(&testbed, Host::Server);
    for (name, value) in browser.session() {
        let fields = [("Host", DASHBOARD), (name.as_str(), value.as_str())];
        assert_eq!(stranger.send("GET", "/api/session", &fields, "").code, 401, "{name}");
        assert_eq!(stranger.send("GET", "/api/live", &fields, "").code, 401, "{name}");
    }
    // Requests that are too long, or of no kind.
    let long = json!({ "code": "x".repeat(10_000) });
    assert_eq!(stranger.post("/api/login", &long).code, 413);
    assert_eq!(browser.get("/api/nothing").code, 404);
    assert_eq!(browser.get("/../etc/passwd").code, 404);

    let page = stranger.get("/");
    assert_eq!(page.code, 200, "{page:?}");
    let policy = page.field("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.field("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.field("referrer-policy"), Some("no-referrer"));
    assert_eq!(browser.get("/api/session").field("cache-control"), Some("no-store"));
    assert_eq!(browser.get("/api/session").code, 200, "the session has outlived all of this");
}

#[test]
fn an_address_that_others_reach_has_tls_or_no_dashboard() {
    let testbed = Testbed::new(&["100mbit"]);
    let args = ["client", "--server", "192.0.2.1:4433", "--insecure", "--dashboard", "0.0.0.0:9470"];
    let output = testbed.mpvpn(Host::Client, &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for words in ["without TLS", "ssh -L 9470:127.0.0.1:9470", "--dashboard-cert"] {
        assert!(said.contains(words), "{words:?} is missing in:\n{said}");
    }
    testbed.make_certificate("dashboard");
    let with_certificate = ["--dashboard-cert", "dashboard.crt", "--dashboard-key", "dashboard.key"];
    let server = testbed.server(&["--dashboard", "0.0.0.0:9470"]);
    let client = testbed.client(&[&["--dashboard", "0.0.0.0:9470"][..], &with_certificate].concat());
    for (host, process) in [(Host::Server, &server), (Host::Client, &client)] {
        let link = login_link(process);
        let (url, code) = link.split_once("#login=").expect("a code");
        assert!(url.starts_with("https://"), "{link}");
        let curl = |more: &[&str]| {
            let args =
                ["curl", "-sk", "--max-time", "10", "-o", "/dev/null", "-w", "%{http_code}", "-D", "-"];
            testbed.output_of(host, SOON, &[&args[..], more].concat())
        };
        let data = json!({ "code": code }).to_string();
        let origin = format!("Origin: {}", url.trim_end_matches('/'));
        let login = format!("{url}api/login");
        let output =
            curl(&["-H", &origin, "-H", "Content-Type: application/json", "-d", &data, login.as_str()]);
        let said = String::from_utf8_lossy(&output.stdout).to_ascii_lowercase();
        assert!(said.ends_with("200"), "{link}: {said}");
        assert!(
            said.contains("set-cookie: __host-mpvpn-dashboard-9470=") && said.contains("; secure"),
            "{said}"
        );
        let plain = curl(&[&url.replace("https", "http")]);
        assert!(!String::from_utf8_lossy(&plain.stdout).ends_with("200"), "{plain:?}");
    }
}

/// 200 browsers that do not read: the first few keep a place and are served the latest when they read, the
/// others are refused, and all the rest goes on.
#[test]
fn readers_that_do_not_read_hold_up_nothing_and_nothing_grows() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = testbed.server(&["--dashboard", DASHBOARD]);
    let _client = testbed.client(&[]);
    let browsers: Vec<_> = (0..4).map(|_| Browser::logged_in(&testbed, Host::Server, &server)).collect();
    let (mut readers, mut codes) = (Vec::new(), Vec::new());
    let memory = server.memory();
    for number in 0..200 {
        let mut messages = browsers[number % browsers.len()].messages("&hz=4");
        codes.push(messages.code());
        readers.push(messages);
    }
    let open = codes.iter().filter(|code| **code == 200).count();
    assert!((4..=16).contains(&open) && codes.iter().all(|code| [200, 429].contains(code)), "{codes:?}");
    // Strangers that connect and say nothing.
    let silent: Vec<TcpStream> = testbed
        .in_namespace(Host::Server, || (0..200).filter_map(|_| TcpStream::connect(DASHBOARD).ok()).collect());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        browsers[0].get("/api/history?span=86400").ok();
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    }
    reaches(&testbed, Host::Client, TUNNEL);
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < 8 << 20, "{grown} bytes more");
    drop((readers, silent));
    eventually(SOON, "a place for a stream", || match browsers[0].messages("").code() {
        200 => Ok(()),
        code => Err(format!("code {code}")),
    });
}

#[test]
fn a_client_shows_a_cut_within_a_second_and_its_links_are_changed() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--dashboard", DASHBOARD]);
    reaches(&testbed, Host::Client, TUNNEL);
    let browser = Browser::logged_in(&testbed, Host::Client, &client);
    let about = browser.get("/api/session").ok();
    assert_eq!((&about["role"], &about["name"]), (&json!("client"), &json!("mpvpn0")));
    let mut messages = browser.messages("&hz=4");
    let (name, status) = messages.next_message();
    assert_eq!(name, "status");
    assert_eq!((&status["state"], &status["links"][0]["name"]), (&json!("up"), &json!("eth1")), "{status:#}");
    testbed.run(Host::Client, &["ping", "-q", "-i", "0.002", "-c", "500", "-s", "1200", TUNNEL]);
    let rates: Vec<u64> =
        (0..3).filter_map(|_| messages.next_status()["total"]["down_bps"].as_u64()).collect();
    assert!(rates.iter().any(|rate| *rate > 500_000), "{rates:?}");

    client.wait_for_path("eth2", "active", SOON);
    testbed.link(2).cut();
    let cut = Instant::now();
    let is_down = |status: &Value| {
        let links = status["links"].as_array().expect("a list");
        links.iter().any(|link| link["name"] == "eth2" && link["state"] == "down")
    };
    while !is_down(&messages.next_status()) {
        assert!(cut.elapsed() < Duration::from_secs(5), "the cut is not shown");
    }
    assert!(cut.elapsed() < Duration::from_secs(1), "shown after {:?}", cut.elapsed());
    let history = browser.get("/api/history?span=300").ok();
    let events = history["events"].as_array().expect("a list");
    assert!(
        events.iter().any(|event| event["text"].as_str().is_some_and(|text| text.contains("eth2"))),
        "{events:?}"
    );
    let down = history["links"]["eth1"]["down_bps"].as_array().expect("a list");
    assert_eq!(down.len(), history["total"]["up_bps"].as_array().expect("a list").len());
    assert!(down.iter().any(|rate| rate.as_f64().is_some_and(|rate| rate > 0.0)), "{down:?}");

    testbed.link(2).restore();
    let change = |link: &str, set: Value| browser.post("/api/link", &json!({ "link": link, "set": set }));
    assert_eq!(change("eth1", json!({ "tier": "backup", "down": "50mbit" })).ok()["tier"], "backup");
    assert_eq!(client.status()["links"][0]["down_cap_bps"], 50_000_000);
    for (link, set) in
        [("eth9", json!({ "tier": "backup" })), ("eth1", json!({})), ("eth1", json!({ "tier": "best" }))]
    {
        let answer = change(link, set);
        assert!(answer.code == 400 && answer.json()["error"].is_string(), "{answer:?}");
    }
    assert_eq!(browser.get("/api/users").code, 404);
    assert!(browser.get("/api/flows").ok()["flows"].is_array());
    // A reload keeps sessions.
    client.reload();
    eventually(SOON, "the reload", || match client.log().contains("configuration read again") {
        true => Ok(()),
        false => Err(client.log()),
    });
    assert_eq!(browser.get("/api/session").code, 200);
}

#[test]
fn users_of_a_server_are_added_rotated_and_revoked_and_a_restart_ends_log_ins() {
    let testbed = Testbed::two_clients();
    let args = ["--auth", "token", "--state-dir", "state", "--dashboard", DASHBOARD];
    let mut server = testbed.server(&args);
    let browser = Browser::logged_in(&testbed, Host::Server, &server);
    let user = |action: &str, body: Value| browser.post(&format!("/api/user/{action}"), &body);
    let given = json!({ "name": "alice", "down": "20mbit", "sessions": 1, "host": "192.0.2.1:4433" });
    let added = user("add", given.clone()).ok();
    let link = added["join_link"].as_str().expect("a link");
    assert_eq!(added["command"], format!("mpvpn client '{link}'"));
    assert_eq!(user("add", given).code, 400, "there is one already");
    let mut client = testbed.start(Host::Client, &["client", link]).wait_until_up();
    reaches(&testbed, Host::Client, TUNNEL);

    let mut messages = browser.messages("&hz=2&count=5&find=ali");
    let session = eventually(SOON, "the session", || {
        let status = messages.next_status();
        let first = status["clients"][0].clone();
        if first["user"] == "alice" { Ok(first) } else { Err(format!("{status:#}")) }
    });
    assert!(session["id"].is_string() && session["paths"][0]["state"].is_string(), "{session:#}");
    assert!(session["tx_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{session:#}");
    let listed = browser.get("/api/users").ok();
    let alice =
        listed.as_array().expect("a list").iter().find(|user| user["user"] == "alice").expect("alice");
    assert_eq!((&alice["down_cap_bps"], &alice["state"]), (&json!(20_000_000), &json!("active")));
    eventually(SOON, "a history of the session", || {
        let history = browser.get("/api/history?span=300").ok();
        let of_session = &history["sessions"][session["id"].as_str().expect("text")];
        if of_session["user"] == "alice" { Ok(()) } else { Err(format!("{history:#}")) }
    });

    user("revoke", json!({ "name": "alice" })).ok();
    client.wait_until_refused(SOON, "the access of this user was revoked");
    assert!(client.interrupt().success());
    eventually(SOON, "the session is gone", || {
        let status = messages.next_status();
        if status["sessions_total"] == 0 { Ok(()) } else { Err(format!("{status:#}")) }
    });
    let rotated = user("rotate", json!({ "name": "alice", "host": "192.0.2.1:4433" })).ok();
    let link = rotated["join_link"].as_str().expect("a link");
    let _again = testbed.start(Host::Client, &["client", link]).wait_until_up();
    user("remove", json!({ "name": "alice" })).ok();
    assert_eq!(user("remove", json!({ "name": "alice" })).code, 400);
    assert!(!server.log().contains(link), "a join link is in the log");

    // Sessions are in the memory of the process.
    assert!(server.terminate().success());
    let server = testbed.server(&args);
    assert_eq!(browser.get("/api/session").code, 401);
    assert_eq!(Browser::logged_in(&testbed, Host::Server, &server).get("/api/session").code, 200);
}

#[test]
fn a_process_without_a_dashboard_says_how_to_get_one() {
    let testbed = Testbed::new(&["100mbit"]);
    let server = testbed.server(&[]);
    let socket = server.socket().to_str().expect("text");
    let output = testbed.mpvpn(Host::Server, &["dashboard", "--api-socket", socket]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("serves no dashboard") && said.contains("--dashboard 127.0.0.1:9470"), "{said}");
}
