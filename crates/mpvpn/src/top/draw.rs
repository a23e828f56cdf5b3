//! Draws a live screen.
//!
//! In: a [`Screen`]. Out: characters on a frame. Always holds: it works from 40 columns and 8 rows; colour
//! repeats what words say; control characters of names never reach the terminal (ratatui leaves them out).

use mpvpn_input::role::Role;
use mpvpn_status::{
    KillSwitchState, Status, UNKNOWN, events::LoggedEvent, format_duration, format_rate, wrap,
};
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState},
};

use super::{
    screen::Screen,
    sheet::{Health, Sheet},
    views::{View, health_of},
};

/// Rows of events below a table, where the screen has room for them.
const EVENT_ROWS: u16 = 6;
/// Rows of the screen from which events are shown below a table.
const MIN_ROWS_FOR_EVENTS: u16 = 18;
/// Rows of the sentence about a process that does not work on all its links, at most: more would leave few to
/// the table on a terminal of 24 rows.
const MAX_VERDICT_ROWS: usize = 2;
/// Characters of bars at the end of a row, at least: fewer say nothing.
const MIN_BARS: u16 = 6;

const HELP: &[(&str, &str)] = &[
    ("Tab, 1 to 6", "another view"),
    ("up, down", "select a row: the line below the table says more about it"),
    ("s, r", "sort by the next column; reverse the order"),
    ("/", "show only rows that contain a text; Esc shows all again"),
    ("p", "pause, and go on"),
    ("q", "end"),
];

/// Draws the screen.
pub(super) fn draw(screen: &Screen, frame: &mut Frame<'_>) {
    let area = frame.area();
    let events = match area.height >= MIN_ROWS_FOR_EVENTS && screen.view != View::Events {
        true => EVENT_ROWS,
        false => 0,
    };
    let verdict = verdict(screen, area.width.into());
    let [head, verdict_area, tabs, body, detail, event_area, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(verdict.len() as u16),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
        Constraint::Length(events),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(headline(screen, head.width), head);
    let style = health_style(screen, health_of(screen.shown_status().state)).add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(verdict.join("\n")).style(style), verdict_area);
    frame.render_widget(views(screen), tabs);
    if screen.view == View::Events {
        draw_events(screen, frame, body, screen.events_skipped);
    } else {
        let sheet = screen.sheet();
        let selected = screen.selected_in(&sheet);
        draw_sheet(screen, &sheet, selected, frame, body);
        let text = selected.map_or("", |at| sheet.rows[at].detail.as_str());
        frame.render_widget(Paragraph::new(Span::styled(text.to_owned(), dim())), detail);
        let [title, rows] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(event_area);
        frame.render_widget(Paragraph::new(Span::styled("events, the latest first", bold())), title);
        draw_events(screen, frame, rows, 0);
    }
    frame.render_widget(footer(screen), foot);
    if screen.shows_help {
        draw_help(frame, area);
    }
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// The state with its reason in lines, where a reason is known: the client is not up.
fn verdict(screen: &Screen, width: usize) -> Vec<String> {
    let status = screen.shown_status();
    if screen.away.is_some() || status.sentence() == status.state.as_str() {
        return Vec::new();
    }
    let mut lines = wrap(status.sentence(), width.saturating_sub(2));
    if lines.len() > MAX_VERDICT_ROWS {
        lines.truncate(MAX_VERDICT_ROWS);
        lines[MAX_VERDICT_ROWS - 1] += " …";
    }
    lines
}

/// The name, the state and the rates of the process.
fn headline(screen: &Screen, width: u16) -> Line<'static> {
    let status = screen.shown_status();
    if let Some(why) = &screen.away {
        let text = format!("mpvpn {}: no answer, trying again: {why}", status.kind());
        return Line::from(Span::styled(
            text,
            health_style(screen, Health::Fails).add_modifier(Modifier::BOLD),
        ));
    }
    let rate = screen.rates.of_process(status);
    let [down, up] = [rate.map(|rate| rate.down), rate.map(|rate| rate.up)]
        .map(|rate| rate.map_or_else(|| UNKNOWN.to_owned(), |rate| format_rate(rate as u64)));
    let rates = format!("down {down} up {up}");
    let name = format!("mpvpn {} ", status.kind());
    let state = status.state.to_string();
    let rest = format!(" {}{}", format_duration(status.uptime_s), about(status));
    let room =
        usize::from(width).saturating_sub(name.len() + state.chars().count() + rates.chars().count() + 1);
    let rest: String = rest.chars().take(room).collect();
    let gap = " ".repeat(room + 1 - rest.chars().count());
    Line::from(vec![
        Span::styled(name, bold()),
        Span::styled(state, health_style(screen, health_of(status.state)).add_modifier(Modifier::BOLD)),
        Span::raw(rest),
        Span::raw(gap),
        Span::styled(rates, bold()),
    ])
}

/// The session of a client, or how many clients a server has.
fn about(status: &Status) -> String {
    match (status.role, &status.session) {
        (Role::Server, _) if status.clients.len() == 1 => "  1 client".into(),
        (Role::Server, _) => format!("  {} clients", status.clients.len()),
        (Role::Client, Some(session)) => {
            format!("  {} at {}{}", session.user, session.server, blocked(status))
        }
        (Role::Client, None) => blocked(status).to_owned(),
    }
}

fn blocked(status: &Status) -> &'static str {
    match status.kill_switch {
        Some(KillSwitchState::Blocking) => "  all packets blocked",
        Some(KillSwitchState::Armed) => "  kill switch",
        Some(KillSwitchState::Off) | None => "",
    }
}

/// The views with their keys.
fn views(screen: &Screen) -> Line<'static> {
    let mut spans = Vec::new();
    for (view, key) in View::of(screen.status.role).iter().zip(1..) {
        let style = if *view == screen.view { Style::new().add_modifier(Modifier::REVERSED) } else { dim() };
        spans.extend([Span::styled(format!(" {key} {} ", view.title()), style), Span::raw(" ")]);
    }
    if screen.is_paused() {
        spans.push(Span::styled("paused", bold()));
    }
    Line::from(spans)
}

fn draw_sheet(screen: &Screen, sheet: &Sheet, selected: Option<usize>, frame: &mut Frame<'_>, area: Rect) {
    if sheet.rows.is_empty() {
        let nothing = match screen.filter.is_empty() {
            true => format!("no {}", screen.view.title()),
            false => format!("no {} with `{}`", screen.view.title(), screen.filter),
        };
        frame.render_widget(Paragraph::new(nothing), area);
        return;
    }
    let shown = columns_that_fit(sheet, area.width);
    let taken: u16 = shown.iter().map(|(_, width)| width.saturating_add(1)).sum();
    let bars = area.width.saturating_sub(taken);
    let has_bars = bars >= MIN_BARS && sheet.rows.iter().any(|row| !row.history.is_empty());

    let head = shown.iter().map(|(at, _)| {
        let column = &sheet.columns[*at];
        let mark = if screen.sorting.column == Some(*at) { "*" } else { "" };
        aligned(format!("{}{mark}", column.title), column.is_number)
    });
    let bars_head = has_bars.then(|| aligned("trend".to_owned(), false));
    let head = Row::new(head.chain(bars_head)).style(bold());
    // The highest rate of all rows is a full bar, so that bars compare.
    let highest = sheet.rows.iter().flat_map(|row| last(&row.history, bars)).copied().fold(0.0, f64::max);
    let rows = sheet.rows.iter().map(|row| {
        let cells =
            shown.iter().map(|(at, _)| aligned(row.cells[*at].text.clone(), sheet.columns[*at].is_number));
        let bar =
            has_bars.then(|| Cell::from(bar_text(last(&row.history, bars), highest, screen.draws_blocks)));
        Row::new(cells.chain(bar)).style(health_style(screen, row.health))
    });
    let widths = shown.iter().map(|(_, width)| Constraint::Length(*width));
    let widths = widths.chain(has_bars.then_some(Constraint::Length(bars)));
    let table = Table::new(rows, widths)
        .header(head)
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(selected));
}

/// The columns that fit, from the left, with their widths. Numbers are shown in full, and so are names in the
/// first column up to a third of the width; other texts are cut to the least width of their column where the
/// room is needed.
fn columns_that_fit(sheet: &Sheet, width: u16) -> Vec<(usize, u16)> {
    let widest = |at: usize| {
        let widths = sheet.rows.iter().map(|row| row.cells[at].text.chars().count());
        u16::try_from(widths.max().unwrap_or(0)).unwrap_or(u16::MAX)
    };
    // Each column but the first begins with a space.
    let mut room = width.saturating_add(1);
    let mut shown = Vec::new();
    for (at, column) in sheet.columns.iter().enumerate() {
        let least = match (at, column.is_number) {
            (_, true) => column.width.max(widest(at)),
            (0, false) => column.width.max(widest(at).min(width / 3)),
            (_, false) => column.width,
        };
        if least >= room {
            break;
        }
        shown.push((at, least));
        room -= least + 1;
    }
    for (at, width) in &mut shown {
        let more = widest(*at).saturating_sub(*width).min(room);
        *width += more;
        room -= more;
    }
    shown
}

fn aligned(text: String, to_right: bool) -> Cell<'static> {
    let line = Line::from(text);
    Cell::from(if to_right { line.alignment(Alignment::Right) } else { line })
}

/// The last `count` of values.
fn last(values: &[f64], count: u16) -> &[f64] {
    &values[values.len().saturating_sub(count.into())..]
}

const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII: [char; 5] = [' ', '.', ':', '+', '#'];

/// Values as bars of characters. A value above 0 is never an empty bar.
fn bar_text(values: &[f64], highest: f64, draws_blocks: bool) -> String {
    let levels: &[char] = if draws_blocks { &BLOCKS } else { &ASCII };
    let steps = (levels.len() - 1) as f64;
    let level = |value: f64| {
        if value > 0.0 { (value / highest * steps).ceil().clamp(1.0, steps) as usize } else { 0 }
    };
    values.iter().map(|value| levels[level(*value)]).collect()
}

fn health_style(screen: &Screen, health: Health) -> Style {
    match (health, screen.uses_colour) {
        (Health::Works, true) => Style::new().fg(Color::Green),
        (Health::Waits, true) => Style::new().fg(Color::Yellow),
        (Health::Fails, true) => Style::new().fg(Color::Red),
        (Health::Fails, false) => bold(),
        (Health::Works | Health::Waits, false) => Style::new(),
    }
}

fn draw_events(screen: &Screen, frame: &mut Frame<'_>, area: Rect, skipped: usize) {
    let filter = screen.filter.to_lowercase();
    let is_shown = |event: &&LoggedEvent| {
        screen.view != View::Events
            || filter.is_empty()
            || event.text.to_lowercase().contains(&filter)
            || event.kind.contains(&filter)
    };
    let events = screen.events.newest_first().filter(is_shown).skip(skipped).take(area.height.into());
    let lines: Vec<_> = events.map(event_line).collect();
    let text = if lines.is_empty() { vec![Line::from("no events")] } else { lines };
    frame.render_widget(Paragraph::new(text), area);
}

fn event_line(event: &LoggedEvent) -> Line<'static> {
    let times = if event.count > 1 { format!(" ({} times)", event.count) } else { String::new() };
    let time = crate::commands::events::format_local_time(&event.last);
    Line::from(vec![
        Span::styled(format!("{time}  "), dim()),
        Span::raw(format!("{:13}  {}{times}", event.kind, event.text)),
    ])
}

fn footer(screen: &Screen) -> Line<'static> {
    if screen.is_typing {
        return Line::from(format!("/{}_   Enter keeps the filter, Esc removes it", screen.filter));
    }
    let filter = match screen.filter.is_empty() {
        true => String::new(),
        false => format!("filter: {}   ", screen.filter),
    };
    Line::from(Span::styled(format!("{filter}Tab view  s sort  / filter  p pause  ? help  q end"), dim()))
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<_> =
        HELP.iter().map(|(keys, meaning)| Line::from(format!(" {keys:12} {meaning} "))).collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) as u16 + 2;
    let height = lines.len() as u16 + 2;
    let (width, height) = (width.min(area.width), height.min(area.height));
    let place = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(
        Paragraph::new(lines).block(Block::bordered().title(" keys; any key closes this ")),
        place,
    );
}
