//! How often an end asks that gets no answer.
//!
//! In: how long nothing has been heard. Out: the pause until the next question. Always holds: the pause grows
//! with the silence, so what an outage has cost so far is repeated at most once while it doubles; a reason to
//! ask anew makes the next question due at once.

use mpvpn_types::{Duration, Instant};

/// The silence divided by the pause: a peer that is back after 16 s is found within a second. Larger: more
/// packets that nobody hears; smaller: it is found later. Chosen.
const SILENCE_PER_PAUSE: u32 = 16;
/// The longest pause between probes of a link: packets of 1228 bytes are 0.4 kbit/s, and NAT bindings live
/// on (RFC 4787 REQ-5). Longer: a link that works again is used later; shorter: a link that leads nowhere
/// costs more. Chosen.
const MAX_PROBE_PAUSE: Duration = Duration::from_secs(25);
/// The same on a metered link: with the answer of a machine whose server is dead (an ICMP error that quotes
/// 576 bytes), a TCP SYN, its answer and ARP it is 2.1 kB, 0.11 kbit/s.
const MAX_METERED_PROBE_PAUSE: Duration = Duration::from_secs(150);
/// The silence from which on pauses between probes are the longest, and no data is sent. Longer: a link that
/// leads nowhere costs more; shorter: a server that is back within a minute is found late. Chosen.
pub const LONG_SILENCE: Duration = Duration::from_secs(60);

/// The pause after a question, within bounds, when nothing was heard for this time.
pub fn pause_after(silence: Duration, least: Duration, most: Duration) -> Duration {
    (silence / SILENCE_PER_PAUSE).clamp(least, most.max(least))
}

/// The pause after what asks where perhaps nobody is: a heartbeat while no path works, a packet of full size,
/// a look-up of a name, an attempt to connect. `least` is the shortest pause.
pub fn probe_pause(silence: Duration, least: Duration, metered: bool) -> Duration {
    let most = if metered { MAX_METERED_PROBE_PAUSE } else { MAX_PROBE_PAUSE };
    longest_pause_after_long(silence, least, most)
}

/// The same as [`pause_after`], and the longest pause from [`LONG_SILENCE`] on.
pub(crate) fn longest_pause_after_long(silence: Duration, least: Duration, most: Duration) -> Duration {
    if silence >= LONG_SILENCE { most } else { pause_after(silence, least, most) }
}

/// When the next probe is due after one at `probed_at`, where nothing has been heard since `since`: at once
/// if that silence began anew after it.
pub fn next_probe_at(probed_at: Instant, since: Instant, least: Duration, metered: bool) -> Instant {
    let silence = probed_at.checked_duration_since(since);
    silence.map_or(since, |silence| probed_at + probe_pause(silence, least, metered))
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

    #[test]
    fn probes_are_rare_after_a_minute_and_due_at_once_where_the_silence_begins_anew() {
        let (start, least) = (Instant::now(), Duration::from_secs(1));
        let at = |seconds| start + Duration::from_secs(seconds);
        let next = |probed: u64, metered| {
            (next_probe_at(at(probed), start, least, metered) - at(probed)).as_millis()
        };
        assert_eq!(
            [0, 32, 59, 60, 4000].map(|probed| next(probed, false)),
            [1000, 2000, 3687, 25_000, 25_000]
        );
        assert_eq!([0, 32, 60].map(|probed| next(probed, true)), [1000, 2000, 150_000]);
        assert_eq!(next_probe_at(at(100), at(110), least, true), at(110));
    }
}
