use serde_json::{Value, json};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
/// A time of day, in s.
const NOON: u64 = 1_790_000_000;

fn rates(down: f32, up: f32) -> Rates {
    Rates { down, up }
}

fn link(name: &str, down: f32, rtt_ms: Option<f32>) -> (String, LinkSample) {
    (name.to_owned(), LinkSample { rates: rates(down, 0.0), rtt_ms, loss: Some(1.239) })
}

fn answer(history: &History, span: Span, age: u64) -> Value {
    let now = UNIX_EPOCH + Duration::from_secs(NOON + age);
    serde_json::to_value(history.answer(span, Duration::from_secs(age), now)).unwrap()
}

#[test]
fn seconds_and_minutes_are_means_at_their_times() {
    let mut history = History::default();
    for second in 0..120_u16 {
        let sample = Sample {
            total: rates(f32::from(second), 7.0),
            links: vec![link("wwan0", 1e6, (second < 60).then_some(20.004))],
            classes: vec![("default".to_owned(), rates(5.0, 6.0))],
            ..Sample::default()
        };
        history.take(SECOND * u32::from(second), &sample);
    }
    let day = answer(&history, Span::Day, 120);
    assert_eq!((&day["begin_ms"], &day["step_ms"]), (&json!(NOON * 1000), &json!(60_000)));
    assert_eq!(day["total"], json!({ "down_bps": [30.0, 90.0], "up_bps": [7.0, 7.0] }));
    assert_eq!(day["links"]["wwan0"]["rtt_ms"], json!([20.0, null]));
    assert!((day["links"]["wwan0"]["loss"][0].as_f64().unwrap() - 1.24).abs() < 1e-3);
    assert_eq!(day["classes"]["default"]["up_bps"], json!([6.0, 6.0]));
    let minutes = answer(&history, Span::Minutes, 120);
    assert_eq!(minutes["total"]["down_bps"].as_array().unwrap().len(), 120);
    assert_eq!(
        (&minutes["total"]["down_bps"][0], &minutes["total"]["down_bps"][119]),
        (&json!(0.0), &json!(119.0))
    );
}

#[test]
fn where_nothing_was_measured_is_null_and_lists_are_equally_long() {
    let mut history = History::default();
    let with = |links| Sample { links, ..Sample::default() };
    history.take(SECOND, &with(vec![link("eth0", 8.0, None)]));
    // The process was suspended.
    history.take(SECOND * 5, &with(vec![link("eth0", 9.0, None), link("wwan0", 1.0, Some(1.0))]));
    history.take(SECOND * 6, &with(vec![link("wwan0", 2.0, Some(1.0))]));
    let found = answer(&history, Span::Minutes, 7);
    let down = |name: &str| found["links"][name]["down_bps"].clone();
    assert_eq!(down("eth0"), json!([null, 8.0, null, null, null, 9.0, null]));
    assert_eq!(down("wwan0"), json!([null, null, null, null, null, 1.0, 2.0]));
    assert_eq!(found["total"]["up_bps"], json!([null, 0.0, null, null, null, 0.0, 0.0]));
    assert_eq!(answer(&History::default(), Span::Day, 30)["total"]["up_bps"], json!([]));
}

#[test]
fn what_is_gone_is_forgotten_after_its_span() {
    let mut history = History::default();
    let sample = Sample { links: vec![link("eth0", 8.0, None)], ..Sample::default() };
    history.take(SECOND, &sample);
    history.take(SECOND * 299, &Sample::default());
    assert!(answer(&history, Span::Minutes, 299)["links"]["eth0"].is_object());
    history.take(SECOND * 301, &Sample::default());
    assert!(answer(&history, Span::Minutes, 301)["links"].as_object().unwrap().is_empty());
    assert!(answer(&history, Span::Day, 301)["links"]["eth0"].is_object());
    history.take(SECOND * 90_000, &Sample::default());
    assert!(history.day.links.is_empty());
}

#[test]
fn sessions_have_five_minutes_and_no_day() {
    let mut history = History::default();
    for second in 0..400 {
        let shown = second < 200;
        let sessions = shown.then(|| (9, "alice".to_owned(), rates(3.0, 4.0))).into_iter().collect();
        history.take(SECOND * second, &Sample { sessions, ..Sample::default() });
    }
    let found = answer(&history, Span::Minutes, 400);
    assert_eq!(found["sessions"]["9"]["user"], "alice");
    let down = found["sessions"]["9"]["down_bps"].as_array().unwrap();
    assert_eq!((down.len(), &down[99], &down[100]), (300, &json!(3.0), &json!(null)));
    assert!(answer(&history, Span::Day, 400).get("sessions").is_none());
    history.take(SECOND * 500, &Sample::default());
    assert!(history.sessions.is_empty());
}

/// A day of as many things as are kept, and of more, in the memory that the module says.
#[test]
fn a_day_of_everything_is_bounded() {
    let mut history = History::default();
    let sample = Sample {
        total: rates(1.0, 2.0),
        links: (0..2 * MAX_LINKS).map(|number| link(&format!("eth{number}"), 1.0, Some(2.0))).collect(),
        classes: (0..2 * MAX_CLASSES).map(|number| (format!("class{number}"), rates(1.0, 2.0))).collect(),
        sessions: (0..2 * MAX_SESSIONS as u64).map(|id| (id, format!("user{id}"), rates(1.0, 2.0))).collect(),
    };
    for second in 0..400 {
        history.take(SECOND * second, &sample);
    }
    for minute in 7..2000 {
        history.take(SECOND * 60 * minute, &sample);
    }
    for second in 120_000..120_400 {
        history.take(SECOND * second, &sample);
    }
    let of_tracks = |tracks: &Tracks| {
        let links: usize = tracks.links.values().map(Track::bytes).sum();
        links + tracks.classes.values().map(Track::bytes).sum::<usize>() + tracks.total.bytes()
    };
    let sessions: usize = history.sessions.values().map(|(_, track)| track.bytes()).sum();
    let all = of_tracks(&history.minutes) + of_tracks(&history.day) + sessions;
    assert_eq!(
        (history.minutes.links.len(), history.day.classes.len(), history.sessions.len()),
        (MAX_LINKS, MAX_CLASSES, MAX_SESSIONS)
    );
    assert_eq!(all, MAX_BYTES);
    const { assert!(MAX_BYTES < 4 << 20) };
}
