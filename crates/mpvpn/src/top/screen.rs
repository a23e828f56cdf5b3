//! The state of a live screen, which arrivals and keys change.

use mpvpn_input::role::Role;
use mpvpn_status::{
    FlowList, Status,
    rates::{Counters, Rates},
};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    event_list::EventList,
    sheet::{Sheet, Sorting},
    views::View,
};

/// Longest text of a filter (characters).
const MAX_FILTER_LEN: usize = 60;
/// Rates that are kept of each row, for its bars: five minutes at one a second.
const MAX_RATE_SAMPLES: usize = 300;
/// Rows that a page key moves.
const PAGE: isize = 10;

/// The effect of a key beyond the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    None,
    /// The program ends.
    End,
}

/// The state of the screen.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) status: Status,
    flows: FlowList,
    pub(super) rates: Rates,
    pub(super) events: EventList,
    /// Why there is no current status.
    pub(super) away: Option<String>,
    /// The status and the sheet at the begin of a pause, shown while paused.
    paused: Option<(Status, Sheet)>,
    pub(super) view: View,
    pub(super) sorting: Sorting,
    pub(super) filter: String,
    /// Whether keys are written into the filter.
    pub(super) is_typing: bool,
    pub(super) shows_help: bool,
    /// Name of the selected row; empty before a key has selected one.
    selected: String,
    /// First line of the events that is shown.
    pub(super) events_skipped: usize,
    /// Whether the terminal shows block characters.
    pub(super) draws_blocks: bool,
    /// Whether colours may be used.
    pub(super) uses_colour: bool,
}

impl Screen {
    pub(super) fn new(draws_blocks: bool, uses_colour: bool) -> Self {
        Self {
            status: Status::new(Role::Client),
            flows: FlowList::new(Role::Client),
            rates: Rates::new(MAX_RATE_SAMPLES),
            events: EventList::default(),
            away: None,
            paused: None,
            view: View::Links,
            sorting: Sorting::default(),
            filter: String::new(),
            is_typing: false,
            shows_help: false,
            selected: String::new(),
            events_skipped: 0,
            draws_blocks,
            uses_colour,
        }
    }

    pub(super) fn on_status(&mut self, status: Status) {
        self.away = None;
        self.rates.take(status.uptime_s, Counters::of_all(&status));
        self.status = status;
        if !View::of(self.status.role).contains(&self.view) {
            self.show(View::of(self.status.role)[0]);
        }
    }

    pub(super) fn on_flows(&mut self, flows: FlowList) {
        self.flows = flows;
    }

    pub(super) fn on_event(&mut self, line: &str) {
        self.events.take(line);
    }

    pub(super) fn on_away(&mut self, why: String) {
        self.away = Some(why);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// The status to show: that of the beginning of a pause, or the latest one.
    pub(super) fn shown_status(&self) -> &Status {
        self.paused.as_ref().map_or(&self.status, |(status, _)| status)
    }

    pub(super) fn shows_flows(&self) -> bool {
        self.view == View::Flows
    }

    /// The rows to show, filtered and sorted.
    pub(super) fn sheet(&self) -> Sheet {
        let mut sheet = match &self.paused {
            Some((_, sheet)) => sheet.clone(),
            None => self.current_sheet(),
        };
        sheet.arrange(&self.filter, self.sorting);
        sheet
    }

    fn current_sheet(&self) -> Sheet {
        self.view.sheet(&self.status, &self.flows, &self.rates)
    }

    /// Place of the selected row in a sheet; the first one where it is gone.
    pub(super) fn selected_in(&self, sheet: &Sheet) -> Option<usize> {
        let found = sheet.rows.iter().position(|row| row.key == self.selected);
        found.or((!sheet.rows.is_empty()).then_some(0))
    }

    pub(super) fn on_key(&mut self, key: KeyEvent) -> Effect {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Effect::End;
        }
        if self.is_typing {
            self.type_key(key.code);
            return Effect::None;
        }
        if self.shows_help {
            self.shows_help = false;
            return Effect::None;
        }
        match key.code {
            KeyCode::Char('q') => return Effect::End,
            KeyCode::Esc if self.filter.is_empty() => return Effect::End,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.shows_help = true,
            KeyCode::Char('p' | ' ') => self.toggle_pause(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('s') => self.sort_by_next(),
            KeyCode::Char('r') => self.sorting.is_reversed = !self.sorting.is_reversed,
            KeyCode::Tab | KeyCode::Right => self.turn(1),
            KeyCode::BackTab | KeyCode::Left => self.turn(-1),
            KeyCode::Char(digit @ '1'..='9') => {
                let at = digit as usize - '1' as usize;
                if let Some(view) = View::of(self.status.role).get(at) {
                    self.show(*view);
                }
            }
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::PageDown => self.select(PAGE),
            KeyCode::PageUp => self.select(-PAGE),
            KeyCode::Home => self.select(isize::MIN),
            KeyCode::End => self.select(isize::MAX),
            _ => {}
        }
        Effect::None
    }

    fn type_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => _ = self.filter.pop(),
            KeyCode::Char(letter) if self.filter.chars().count() < MAX_FILTER_LEN => self.filter.push(letter),
            _ => {}
        }
    }

    fn toggle_pause(&mut self) {
        self.paused = match self.paused {
            Some(_) => None,
            None => Some((self.status.clone(), self.current_sheet())),
        };
    }

    /// Sorts by the next column; after the last one by none.
    fn sort_by_next(&mut self) {
        let columns = self.sheet().columns.len();
        let next = self.sorting.column.map_or(0, |column| column + 1);
        self.sorting = Sorting { column: (next < columns).then_some(next), is_reversed: false };
    }

    fn turn(&mut self, by: isize) {
        let views = View::of(self.status.role);
        let at = views.iter().position(|view| *view == self.view).unwrap_or(0);
        let next = (at as isize + by).rem_euclid(views.len() as isize) as usize;
        self.show(views[next]);
    }

    fn show(&mut self, view: View) {
        self.view = view;
        self.sorting = Sorting::default();
        self.selected.clear();
        self.events_skipped = 0;
        if let Some((status, _)) = self.paused.take() {
            let sheet = view.sheet(&status, &self.flows, &self.rates);
            self.paused = Some((status, sheet));
        }
    }

    fn select(&mut self, by: isize) {
        if self.view == View::Events {
            let last = self.events.newest_first().count().saturating_sub(1);
            self.events_skipped = self.events_skipped.saturating_add_signed(by).min(last);
            return;
        }
        let sheet = self.sheet();
        let Some(at) = self.selected_in(&sheet) else { return };
        let next = at.saturating_add_signed(by).min(sheet.rows.len() - 1);
        self.selected.clone_from(&sheet.rows[next].key);
    }
}
