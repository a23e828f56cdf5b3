//! Whole screens, drawn on a terminal in memory.

use mpvpn_input::role::Role;
use mpvpn_status::{Link, LinkState, State, Status, User};
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
    Status { state: State::Up, uptime_s, links, ..Status::new(Role::Client) }
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
    assert_eq!(words(&lines[2]), "link state tier down up share rtt loss trend");
    assert_eq!(words(&lines[3]), "eth0 up primary 24.0 Mbit/s 0 bit/s 75 % #");
    assert_eq!(words(&lines[4]), "wwan0 up primary 8.0 Mbit/s 0 bit/s 25 % :");
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
    assert!(lines.iter().any(|line| line == "nothing arrives for 71 ms"), "{lines:#?}");
    // The selection stays with the link, wherever it stands.
    press(&mut screen, "sr");
    let lines = drawn(&screen, 80, 24);
    assert!(lines[3].starts_with("wwan0") && lines.iter().any(|line| line.contains("71 ms")), "{lines:#?}");
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
