//! The events of `mpvpn top`.
//!
//! In: lines of the event log. Out: the latest events but for details, in the order of their times. Always
//! holds: at most [`MAX_EVENTS`].

use std::collections::VecDeque;

use mpvpn_status::events::LoggedEvent;

/// Events that are kept: what a person scrolls through.
const MAX_EVENTS: usize = 500;

/// The latest events, the newest at the end.
#[derive(Debug, Default)]
pub(super) struct EventList(VecDeque<LoggedEvent>);

impl EventList {
    /// Takes a line of the log. A line about an event that is known, because it happened again or because the
    /// log is read again, replaces it.
    pub(super) fn take(&mut self, line: &str) {
        let Some(event) = LoggedEvent::parse(line) else { return };
        if event.detail {
            return;
        }
        self.0.retain(|known| (known.number, &known.first) != (event.number, &event.first));
        let at = self.0.partition_point(|known| known.last <= event.last);
        self.0.insert(at, event);
        if self.0.len() > MAX_EVENTS {
            self.0.pop_front();
        }
    }

    /// The events, the newest first.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = &LoggedEvent> {
        self.0.iter().rev()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64, second: u64, count: u64) -> String {
        format!(
            r#"{{"number":{number},"kind":"path","first":"2026-09-21T14:00:{number:02}Z","last":"2026-09-21T14:02:{second:02}Z","count":{count},"text":"eth{number} failed"}}"#
        )
    }

    #[test]
    fn an_event_that_happens_again_moves_to_the_end_and_is_not_doubled() {
        let mut events = EventList::default();
        for line in [line(1, 1, 1), line(2, 2, 1), line(1, 3, 2), line(1, 3, 2)] {
            events.take(&line);
        }
        let shown: Vec<_> = events.newest_first().map(|event| (event.text.as_str(), event.count)).collect();
        assert_eq!(shown, [("eth1 failed", 2), ("eth2 failed", 1)]);
    }

    #[test]
    fn old_events_leave_and_what_is_no_event_is_skipped() {
        let mut events = EventList::default();
        events.take("no JSON");
        for number in 0..2000 {
            events.take(&line(number, number % 60, 1));
        }
        assert_eq!(events.newest_first().count(), MAX_EVENTS);
    }
}
