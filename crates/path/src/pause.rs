//! How often an end asks that gets no answer.
//!
//! In: how long nothing has been heard. Out: the pause until the next question. Always holds: the pause grows
//! with the silence, so what an outage has cost so far is repeated at most once while it doubles.

use mpvpn_types::Duration;

/// The silence divided by the pause: a peer that is back after 16 s is found within a second. Larger: more
/// packets that nobody hears; smaller: it is found later. Chosen.
const SILENCE_PER_PAUSE: u32 = 16;

/// The pause after a question, within bounds, when nothing was heard for this time.
pub fn pause_after(silence: Duration, least: Duration, most: Duration) -> Duration {
    (silence / SILENCE_PER_PAUSE).clamp(least, most.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_silence_within_bounds() {
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(25));
        let pause = |silence| pause_after(Duration::from_secs(silence), least, most).as_millis();
        assert_eq!([0, 1, 16, 80, 400, 4000].map(pause), [100, 100, 1000, 5000, 25_000, 25_000]);
        assert_eq!(pause_after(most, most, least), most, "bounds the wrong way round");
    }
}
