//! Whole screens, drawn on a terminal in memory.

use mpvpn_input::role::Role;
use mpvpn_status::{Link, LinkState, Path, PathState, State, Status, User};
use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
};

use super::{
    draw,
    screen::{Effect, Screen},
};

fn client(uptime_s: f64, wan_state: LinkState, megabytes: [u64; 2]) -> Status {
    let link = |name: &str, state, rx_bytes| Link { state, rx_bytes, ..Link::new(name) };
    let mut down = link("wwan0", wan_state, megabytes[1] * 1_000_000);
    if wan_state == LinkState::Down {
        down.reason = "nothing arrives for 71 ms".into();
    }
    let links = vec![link("eth0", LinkState::Up, megabytes[0] * 1_000_000), down];
    let paths = vec![path("eth0", 0.0), path("eth0", 28.0)];
    Status { state: State::Up, uptime_s, links, paths, ..Status::new(Role::Client) }
}

/// A path over a link; without a connection if its round-trip time is 0.
fn path(link: &str, rtt_ms: f64) -> Path {
    let address = "192.0.2.1:4433";
    let value = serde_json::json!({
        "id": format!("default/{link}/0"), "class": "default", "link": link, "local": address, "remote": address,
        "state": PathState::Standby, "reason": "", "rtt_ms": rtt_ms, "min_rtt_ms": 0.0, "jitter_ms": 0.0,
        "loss_pct": 0.0, "recent_packets": 100, "cwnd_bytes": 0, "in_flight_bytes": 0, "rate_bps": 0, "tx_bytes": 0, "rx_bytes": 0,
        "tx_packets": 0, "rx_packets": 0, "lost_packets": 0, "mtu": 0,
    });
    serde_json::from_value(value).unwrap()
}

/// The lines of the screen on a terminal of this size.
fn drawn(screen: &Screen, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw::draw(screen, frame)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

fn press(screen: &mut Screen, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            'v' => KeyCode::Down,
            key => KeyCode::Char(key),
        };
        assert_eq!(screen.on_key(KeyEvent::new(code, KeyModifiers::NONE)), Effect::None);
    }
}

fn with_two_links() -> Screen {
    let mut screen = Screen::new(false, false);
    screen.on_status(client(10.0, LinkState::Up, [0, 0]));
    screen.on_status(client(11.0, LinkState::Up, [3, 1]));
    screen
}

#[test]
fn each_link_has_its_rate_and_its_share_of_the_sum() {
    let lines = drawn(&with_two_links(), 80, 24);
    assert!(lines[0].starts_with("mpvpn client up 11.0 s"), "{lines:#?}");
    assert!(lines[0].ends_with("down 32.0 Mbit/s up 0 bit/s"), "{lines:#?}");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(&lines[2]), "link state down up share rtt loss tier trend");
    assert_eq!(words(&lines[3]), "eth0 up 24.0 Mbit/s 0 bit/s 75 % 28.0 ms 0.0 % primary #");
    assert_eq!(words(&lines[4]), "wwan0 up 8.0 Mbit/s 0 bit/s 25 % – – primary :");
}

#[test]
fn a_wide_terminal_shows_the_last_minutes_as_bars_that_compare() {
    let mut screen = with_two_links();
    screen.on_status(client(12.0, LinkState::Up, [6, 1]));
    let lines = drawn(&screen, 100, 24);
    assert!(lines[3].ends_with(" ##"), "{lines:#?}");
    assert!(lines[4].ends_with(" :"), "{lines:#?}");
}

#[test]
fn the_selected_row_tells_its_reason() {
    let mut screen = with_two_links();
    screen.on_status(client(12.0, LinkState::Down, [3, 1]));
    press(&mut screen, "v");
    let lines = drawn(&screen, 80, 24);
    assert!(lines[4].contains("down"), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("nothing arrives for 71 ms")), "{lines:#?}");
    // The selection stays with the link, wherever it stands.
    press(&mut screen, "sr");
    let lines = drawn(&screen, 80, 24);
    assert!(lines[3].starts_with("wwan0") && lines.iter().any(|line| line.contains("71 ms")), "{lines:#?}");
}

/// 16 links with names of 15 characters that carry a lot, and are all down.
fn many_links(uptime_s: f64, bytes: u64) -> Status {
    let mut status = client(uptime_s, LinkState::Down, [0, 0]);
    status.state = State::NoAnswer;
    let link = |at| Link {
        rx_bytes: bytes,
        tx_bytes: bytes,
        reason: "no carrier".into(),
        ..Link::new(&format!("enp0s20f0u1u2{at:02}"))
    };
    status.links = (0..16).map(link).collect();
    let last_heard =
        |link: &Link| Path { state: PathState::Down, heard_s: Some(3599.0), ..path(&link.name, 1234.0) };
    status.paths = status.links.iter().map(last_heard).collect();
    let down: Vec<_> = status.links.iter().map(|link| format!("{} down (no carrier)", link.name)).collect();
    status.verdict = format!("no answer for 59.9 s (no link can be used: {})", down.join("; "));
    status
}

#[test]
fn eighty_columns_hold_whole_figures_and_the_sentence_about_an_outage() {
    let mut screen = Screen::new(true, true);
    screen.on_status(many_links(10.0, 0));
    assert!(drawn(&screen, 80, 24)[0].ends_with("  down – up –"), "no rate is known yet");
    screen.on_status(many_links(11.0, 124_987_500));
    let lines = drawn(&screen, 80, 24);
    assert!(lines[0].starts_with("mpvpn client no-answer 11.0 s"), "{lines:#?}");
    assert!(lines[0].ends_with("down 16.0 Gbit/s up 16.0 Gbit/s"), "{lines:#?}");
    assert!(lines[1].starts_with("no answer for 59.9 s (no link can be used: enp0s"), "{lines:#?}");
    assert!(lines[2].ends_with(" …") && lines[3].starts_with(" 1 links "), "{lines:#?}");
    assert_eq!(
        lines[4].split_whitespace().collect::<Vec<_>>(),
        ["link", "state", "down", "up", "share", "rtt"]
    );
    let row = &lines[5];
    assert!(row.starts_with("enp0s20f0u1u200 down "), "{lines:#?}");
    assert!(row.ends_with(" 999.9 Mbit/s 999.9 Mbit/s   6 % 1234 ms, 59 min ago"), "{lines:#?}");
    assert!(lines[23].ends_with("q end"), "{lines:#?}");
    screen.on_status(client(12.0, LinkState::Up, [1, 1]));
    assert!(drawn(&screen, 80, 24)[1].starts_with(" 1 links "), "nothing fails");
}

#[test]
fn a_proxy_is_called_one() {
    let mut screen = Screen::new(true, true);
    screen.on_status(Status { proxy: true, ..client(10.0, LinkState::Up, [0, 0]) });
    assert!(drawn(&screen, 80, 24)[0].starts_with("mpvpn proxy up 10.0 s"));
}

#[test]
fn a_filter_is_typed_kept_and_removed() {
    let mut screen = with_two_links();
    press(&mut screen, "/wwq\n");
    assert!(drawn(&screen, 80, 24)[2].contains("no links with `wwq`"));
    screen.on_key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
    press(&mut screen, "/ww\n");
    let lines = drawn(&screen, 80, 24);
    assert!(lines[3].starts_with("wwan0") && !lines[4].contains("eth0"), "{lines:#?}");
    assert_eq!(screen.on_key(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)), Effect::End);
}

#[test]
fn a_pause_keeps_the_rows_while_the_process_goes_on() {
    let mut screen = with_two_links();
    press(&mut screen, "p");
    screen.on_status(client(12.0, LinkState::Down, [9, 1]));
    let lines = drawn(&screen, 80, 24);
    assert!(lines[1].ends_with("paused") && lines[3].contains("24.0 Mbit/s"), "{lines:#?}");
    press(&mut screen, "p");
    assert!(drawn(&screen, 80, 24)[3].contains("48.0 Mbit/s"));
}

#[test]
fn a_process_that_is_away_is_named_and_its_last_rows_stay() {
    let mut screen = with_two_links();
    screen.on_away("nothing listens".into());
    let lines = drawn(&screen, 80, 24);
    assert_eq!(lines[0], "mpvpn client: no answer, trying again: nothing listens");
    assert!(lines[3].starts_with("eth0"), "{lines:#?}");
    screen.on_status(client(0.1, LinkState::Up, [0, 0]));
    assert!(drawn(&screen, 80, 24)[0].starts_with("mpvpn client up 0.1 s"));
}

#[test]
fn events_stand_below_the_table_and_have_a_view_of_their_own() {
    let mut screen = with_two_links();
    for number in 0..40 {
        screen.on_event(&format!(
            r#"{{"number":{number},"kind":"path","first":"","last":"t{number:02}","count":1,"text":"event {number}"}}"#
        ));
    }
    let lines = drawn(&screen, 80, 24);
    assert!(lines.iter().any(|line| line.contains("event 39")), "{lines:#?}");
    press(&mut screen, "5vv");
    let lines = drawn(&screen, 80, 24);
    assert!(lines[2].contains("event 37"), "{lines:#?}");
}

#[test]
fn a_server_has_views_of_clients_and_users() {
    let mut screen = Screen::new(true, true);
    let user = User { name: "alice\u{1b}[2J".into(), sessions: 2, ..User::default() };
    screen.on_status(Status { state: State::Up, users: vec![user], ..Status::new(Role::Server) });
    let lines = drawn(&screen, 80, 24);
    assert!(lines[0].contains("0 clients") && lines[2] == "no clients", "{lines:#?}");
    press(&mut screen, "5");
    let lines = drawn(&screen, 80, 24);
    // A name cannot control the terminal.
    assert!(lines[3].starts_with("alice[2J") && lines[3].contains("active"), "{lines:#?}");
}

#[test]
fn every_view_and_the_help_fit_on_small_screens() {
    for (width, height) in [(40, 8), (1, 1), (80, 24), (200, 60)] {
        let mut screen = with_two_links();
        for _ in 0..5 {
            press(&mut screen, "\t?");
            drawn(&screen, width, height);
            press(&mut screen, "x");
            drawn(&screen, width, height);
        }
    }
}
