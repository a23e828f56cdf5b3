//! The congestion control of the TCP that packets travel in.
//!
//! In: how the connection fares, once a second. Out: the control that it shall have. BBR begins fast and does not take every loss
//! for congestion, but every ten seconds it lets hardly anything through for 200 ms
//! (draft-cardwell-iccrg-bbr-congestion-control-00 §4.3.5), which a call hears. Where nothing is lost CUBIC does not hold back
//! what is sent at the pace of the link, and QUIC inside finds that. So it is BBR while little is sent or much is
//! lost, and CUBIC otherwise.

use std::{convert::Infallible, future::pending, os::fd::AsFd};

use mpvpn_os::tcp::{SegmentCounters, set_congestion_control};
use tokio::time::{Duration, sleep};

const EVERY: Duration = Duration::from_secs(1);
/// Segments between two looks from which on it is more than a call.
const BUSY: u32 = 64;
/// Of so many one may be lost, and a few for sure: CUBIC hardly feels it.
const SELDOM: u32 = 1000;
const FEW: u32 = 2;
/// Looks without more losses until it is CUBIC. The start is over then, and BBR has hardly ever held back already.
const QUIET: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    Bbr,
    Cubic,
}

impl Control {
    fn name(self) -> &'static str {
        match self {
            Self::Bbr => "bbr",
            Self::Cubic => "cubic",
        }
    }
}

#[derive(Debug)]
struct Choice {
    control: Control,
    quiet: u32,
    before: SegmentCounters,
}

impl Choice {
    fn new(before: SegmentCounters) -> Self {
        Self { control: Control::Bbr, quiet: 0, before }
    }

    /// Takes how the connection fares now; returns what changes.
    fn look(&mut self, now: SegmentCounters) -> Option<Control> {
        let segments = now.segments.wrapping_sub(self.before.segments);
        let retransmitted = now.retransmitted.wrapping_sub(self.before.retransmitted);
        let spurious = now.spurious.wrapping_sub(self.before.spurious);
        self.before = now;
        let lost = retransmitted.saturating_sub(spurious);
        let is_calm = segments >= BUSY && (lost <= FEW || lost <= segments / SELDOM);
        self.quiet = if is_calm { self.quiet + 1 } else { 0 };
        let control = match self.control {
            Control::Bbr if self.quiet >= QUIET => Control::Cubic,
            Control::Cubic if !is_calm => Control::Bbr,
            control => control,
        };
        (control != self.control).then(|| {
            self.control = control;
            control
        })
    }
}

/// Gives the connection behind `socket` the congestion control that is best for it at the time, and never ends. Where the kernel does
/// not have one, or does not let this process have it, it keeps the other.
pub(crate) async fn watch(socket: impl AsFd) -> Infallible {
    let set = |control: Control| {
        if let Err(error) = set_congestion_control(&socket, control.name()) {
            tracing::debug!(control = control.name(), %error, "cannot have this congestion control for TCP");
        }
    };
    set(Control::Bbr);
    if let Ok(before) = SegmentCounters::of(&socket) {
        let mut choice = Choice::new(before);
        loop {
            sleep(EVERY).await;
            let Ok(now) = SegmentCounters::of(&socket) else { break };
            choice.look(now).map(set);
        }
    }
    pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen when so many segments are sent, retransmitted and retransmitted in vain between the looks.
    fn chosen(choice: &mut Choice, looks: &[(u32, u32, u32)]) -> Vec<Option<Control>> {
        let look = |&(segments, retransmitted, spurious): &(u32, u32, u32)| {
            let before = choice.before;
            choice.look(SegmentCounters {
                segments: before.segments.wrapping_add(segments),
                retransmitted: before.retransmitted.wrapping_add(retransmitted),
                spurious: before.spurious.wrapping_add(spurious),
            })
        };
        looks.iter().map(look).collect()
    }

    fn new() -> Choice {
        Choice::new(SegmentCounters { segments: u32::MAX - 100, retransmitted: u32::MAX, spurious: u32::MAX })
    }

    #[test]
    fn a_download_without_losses_changes_to_cubic_and_its_end_back() {
        let looks = [(900, 40, 0), (900, 0, 0), (900, 1, 0), (900, 0, 0), (10, 0, 0), (10, 0, 0)];
        let wanted = [None, None, Some(Control::Cubic), None, Some(Control::Bbr), None];
        assert_eq!(chosen(&mut new(), &looks), wanted);
    }

    #[test]
    fn losses_change_back_to_bbr_at_once_and_what_was_repeated_in_vain_does_not() {
        let looks =
            [(900, 0, 0), (900, 0, 0), (900, 9, 9), (100_000, 80, 0), (900, 12, 1), (900, 9, 0), (900, 0, 0)];
        let wanted = [None, Some(Control::Cubic), None, None, Some(Control::Bbr), None, None];
        assert_eq!(chosen(&mut new(), &looks), wanted);
    }

    #[test]
    fn a_call_stays_as_it_is() {
        assert_eq!(chosen(&mut new(), &[(50, 0, 0); 5]), [None; 5]);
    }
}
