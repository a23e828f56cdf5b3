//! The dashboard's page in a browser: what it shows of links and users, what can be done there, and that
//! everybody can use it.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    chromium::{Chromium, Scheme},
    dashboard::{DASHBOARD, login_link},
    iperf::{IperfRun, IperfServer},
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};

/// How long a test waits for an expected state. Longer than on any busy machine.
const SOON: Duration = Duration::from_secs(15);
/// Widths of the screens of phones, tablets and desks (CSS px).
const WIDTHS: [u32; 3] = [360, 768, 1280];
/// Presses of Tab with which everything on the page is reached, with room.
const MAX_TABS: usize = 60;

/// A browser that is logged in at the process.
fn logged_in(testbed: &Testbed, host: Host, process: &MpvpnProcess) -> Chromium {
    let mut browser = Chromium::start(testbed, host);
    browser.look(1280, 900, Scheme::Light);
    let shown = browser.open(&login_link(process));
    assert_eq!(shown, format!("http://{DASHBOARD}/"), "the code stays in the address");
    browser.wait_for("header", "up", SOON);
    browser
}

/// Takes pictures at all widths, and checks that everybody can use the page, dark and light.
fn inspect(browser: &mut Chromium, name: &str) {
    for scheme in [Scheme::Dark, Scheme::Light] {
        for width in WIDTHS {
            browser.look(width, 900, scheme);
            // Charts are drawn anew with the next status.
            thread::sleep(Duration::from_millis(700));
            let what = format!("{name}-{}-{width}", format!("{scheme:?}").to_lowercase());
            browser.screenshot(&what);
            let violations = browser.violations();
            assert!(violations.is_empty(), "{what}:\n  {}", violations.join("\n  "));
            let too_wide = browser.value("document.documentElement.scrollWidth - innerWidth");
            assert!(too_wide.as_i64() <= Some(0), "{what}: {too_wide} px wider than the window");
        }
    }
    browser.look(1280, 900, Scheme::Light);
    let complaints = browser.complaints();
    assert!(complaints.is_empty(), "{name}:\n  {}", complaints.join("\n  "));
}

/// The charts as a table, the paths of a link, and the 24 hours.
fn look_at_the_table_and_at_the_day(browser: &mut Chromium) {
    browser.value("document.querySelector(\"[data-key='link eth1'] .expand\").click()");
    browser.value("document.querySelector('.as-table summary').click()");
    browser.wait_for(".as-table", "eth1 down", SOON);
    browser.wait_for("[data-key^='path default/eth1/']", "down", SOON);
    browser.screenshot("client-table");
    let violations = browser.violations();
    assert!(violations.is_empty(), "the table:\n  {}", violations.join("\n  "));
    browser.click("radio", "24 h");
    let label = browser.value("document.querySelector('.chart').getAttribute('aria-label')");
    assert!(label.as_str().is_some_and(|label| label.contains("last 24 hours")), "{label}");
    browser.click("radio", "5 min");
}

/// Presses Tab until this element has the focus. Returns what had it on the way.
fn tab_to(browser: &mut Chromium, element: &str) -> Vec<String> {
    let mut reached = Vec::new();
    while reached.last().map(String::as_str) != Some(element) {
        assert!(reached.len() < MAX_TABS, "{MAX_TABS} presses of Tab do not reach {element}: {reached:#?}");
        reached.push(browser.press("Tab"));
    }
    reached
}

/// Time from `since` until a moment.
fn until(since: SystemTime, moment: SystemTime) -> Duration {
    moment.duration_since(since).unwrap_or_default()
}

/// A client with a browser at its page, and a download over both links.
pub(crate) struct WatchedDownload<'a> {
    pub(crate) browser: Chromium,
    _load: IperfRun,
    _iperf: IperfServer,
    _client: MpvpnProcess,
    _server: MpvpnProcess,
    testbed: &'a Testbed,
}

impl<'a> WatchedDownload<'a> {
    pub(crate) fn start(testbed: &'a Testbed) -> Self {
        let server = testbed.server(&[]);
        let client = testbed.client(&["--dashboard", DASHBOARD]);
        for link in ["eth1", "eth2"] {
            client.wait_for_path(link, "active", SOON);
        }
        let mut browser = logged_in(testbed, Host::Client, &client);
        let iperf = IperfServer::start(testbed, Host::Server, 5201);
        let load = iperf.tcp(testbed, Host::Client, TUNNEL, 4, Direction::Down, 30);
        browser.wait_for("[data-key='link eth1']", "Mbit/s", SOON);
        browser.wait_for("[data-key='link eth1']", "up", SOON);
        thread::sleep(Duration::from_secs(3));
        Self { browser, _load: load, _iperf: iperf, _client: client, _server: server, testbed }
    }

    /// Silences link 1. Returns after what time the page shows it as down, and the event.
    pub(crate) fn cut(&mut self) -> [Duration; 2] {
        let cut = SystemTime::now();
        self.testbed.link(1).silence(Direction::Both);
        let table = until(cut, self.browser.wait_for("[data-key='link eth1']", "down", SOON));
        let list = until(cut, self.browser.wait_for("#events", r"eth1 \(path \w+/eth1/\d\) failed", SOON));
        println!("a cut link is shown down after {table:?}, its event after {list:?}");
        [table, list]
    }

    /// Ends the silence, and waits until the page shows it.
    pub(crate) fn heal(&mut self) {
        self.testbed.link(1).end_silence();
        self.browser.wait_for("[data-key='link eth1']", "up", SOON);
    }
}

#[test]
fn a_link_that_is_cut_is_shown_to_everybody() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_slow_links();
    let mut watched = WatchedDownload::start(&testbed);
    watched.cut();
    let browser = &mut watched.browser;
    // Screen readers are told in the words of the mark on the time axis.
    browser.wait_for("[aria-live]", "eth1 (silent|not heard by the far end), left after", SOON);
    inspect(browser, "client");
    look_at_the_table_and_at_the_day(browser);
    watched.heal();
}

#[test]
fn a_link_is_changed_by_the_keyboard_alone() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--dashboard", DASHBOARD]);
    let mut browser = logged_in(&testbed, Host::Client, &client);
    browser.wait_for("#links", "eth2", SOON);

    let reached = tab_to(&mut browser, "button: Change eth2");
    assert_eq!(reached[0], "a: Skip to the content");
    for name in
        ["button: Pause", "button: Log out", "input: 5 min", "summary: As a table", "button: Change eth1"]
    {
        assert!(reached.iter().any(|element| element == name), "{name} is not among {reached:#?}");
    }
    let outline = browser.value("getComputedStyle(document.activeElement).outlineStyle");
    assert_eq!(outline, "solid", "the focus is not visible");

    browser.press("Enter");
    browser.wait_for("dialog", "Change eth2", SOON);
    assert!(browser.press("ArrowDown").starts_with("select"), "the first field has the focus");
    browser.press("ArrowDown");
    // Enter in a list opens it; the button is reached by Tab.
    tab_to(&mut browser, "button: Review");
    browser.press("Enter");
    browser.wait_for("dialog", "tier: primary → backup", SOON);
    tab_to(&mut browser, "button: Change it");
    let violations = browser.violations();
    assert!(violations.is_empty(), "the question: {violations:#?}");
    browser.press("Enter");
    browser.wait_for("[data-key='link eth2']", "backup", SOON);
    client.wait_for_status(SOON, "eth2 is a backup", |status| {
        let is_backup = status["links"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|link| link["name"] == "eth2" && link["tier"] == "backup");
        if is_backup { Ok(()) } else { Err("it is not".into()) }
    });
    assert_eq!(browser.value("document.querySelectorAll('dialog').length"), 0);

    // A refusal of the daemon is shown in the dialog, and nothing changes.
    browser.click("button", "Change eth2");
    browser.fill("Limit up", "fast");
    browser.click("button", "Review");
    browser.click("button", "Change it");
    browser.wait_for("dialog [role='alert']", "fast", SOON);
    browser.press("Escape");
    browser.wait_for("[data-key='link eth2']", "backup", SOON);
}

#[test]
fn a_user_is_added_and_revoked() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let more =
        ["--auth", "token", "--state-dir", "state", "--dashboard", DASHBOARD, "--public", "192.0.2.1:4433"];
    let server = testbed.server(&more);
    let mut browser = logged_in(&testbed, Host::Server, &server);
    browser.click("button", "Add a user…");
    browser.fill("Name", "zoe");
    browser.fill("Limit down", "20mbit");
    browser.click("button", "Add");
    browser.wait_for("dialog", "zoe can join", SOON);
    let violations = browser.violations();
    assert!(violations.is_empty(), "the join link: {violations:#?}");
    let link = browser.value("document.querySelector('dialog pre').textContent");
    let link = link.as_str().expect("a link").to_owned();
    assert!(link.starts_with("mpvpn://") && link.contains("@192.0.2.1:4433"), "{link}");
    browser.click("button", "Done");
    browser.wait_for("[data-key='zoe']", "20mbit", SOON);
    let shown_again = browser.text("body").contains("mpvpn://");
    assert!(!shown_again, "the link is shown once");

    // The link works, and the session is shown.
    let mut client = testbed.start(Host::Client, &["client", &link]).wait_until_up();
    browser.wait_for("#sessions", "zoe", SOON);
    browser.wait_for("#sessions", "10.0.0.", SOON);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let _load = iperf.tcp(&testbed, Host::Client, TUNNEL, 2, Direction::Down, 20);
    browser.wait_for("#sessions", "Mbit/s", SOON);
    inspect(&mut browser, "server");

    // Limits are changed.
    browser.click("button", "Change zoe");
    browser.fill("Limit up", "5mbit");
    browser.click("button", "Change it");
    browser.wait_for("[data-key='zoe']", "5mbit", SOON);

    // Another user with this name is refused with the reason.
    browser.click("button", "Add a user…");
    browser.fill("Name", "zoe");
    browser.click("button", "Add");
    browser.wait_for("dialog [role='alert']", "zoe", SOON);
    browser.press("Escape");

    browser.click("button", "Revoke the access of zoe");
    browser.wait_for("dialog", "All sessions of zoe end at once", SOON);
    let asked = SystemTime::now();
    browser.click("button", "Revoke");
    let shown = until(asked, browser.wait_for("[data-key='zoe']", "revoked", SOON));
    let gone = until(asked, browser.wait_for("#sessions", "No sessions", SOON));
    println!("a revoked user is shown after {shown:?}, its session gone after {gone:?}");
    client.wait_until_refused(SOON, "the access of this user was revoked");
    assert!(client.interrupt().success());
    assert!(browser.complaints().is_empty());
}

#[test]
fn a_page_whose_mpvpn_restarts_says_so_and_how_to_log_in_again() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let mut client = testbed.client(&["--dashboard", DASHBOARD]);
    let mut browser = logged_in(&testbed, Host::Client, &client);
    let used = login_link(&client);
    let _ = client.terminate();
    browser.wait_for("[role='alert']", "does not answer", SOON);
    let violations = browser.violations();
    assert!(violations.is_empty(), "away: {violations:#?}");

    let client = testbed.client(&["--dashboard", DASHBOARD]);
    browser.wait_for("body", "The log-in has ended", SOON);
    browser.wait_for("pre", "mpvpn dashboard", SOON);
    // A link of the process before is not one of this process.
    browser.open(&used);
    browser.wait_for("[role='alert']", "mpvpn dashboard", SOON);
    let violations = browser.violations();
    assert!(violations.is_empty(), "logged out: {violations:#?}");
    browser.open(&login_link(&client));
    browser.wait_for("header", "up", SOON);
}
