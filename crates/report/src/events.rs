//! Converts path changes of the tunnel into events of the log and the local API, for both ends.

use mpvpn_class::CapacityReason as Measured;
use mpvpn_status::events::{CapacityReason, Event, PathFailure, PathName};
use mpvpn_tunnel::{FailureReason, PathChange};
use mpvpn_types::{BitRate, Duration};

/// The event for a path change. A server does not know the name of the link whose capacity changed; its event
/// names the path.
pub fn path_event(path: PathName, change: &PathChange) -> Event {
    match change {
        PathChange::Opened(remote) => Event::PathOpened { path, remote: *remote },
        PathChange::Failed(failure) => Event::PathFailed {
            path,
            failure: match failure.reason {
                FailureReason::Silent(silence, heartbeats) => {
                    PathFailure::Silent { silence_ms: millis(silence), heartbeats }
                }
                FailureReason::NoCarrier => PathFailure::NoCarrier,
                FailureReason::Unheard(silence) => PathFailure::Unheard { silence_ms: millis(silence) },
            },
            reinjected_packets: failure.reinjected.packets as u64,
            reinjected_stream_bytes: failure.reinjected.stream_bytes,
            working_paths: failure.working as u64,
        },
        PathChange::Recovered(failed) => Event::PathRecovered { path, failed_ms: millis(*failed) },
        PathChange::Active => Event::PathActive { path },
        PathChange::Standby(reason) => Event::PathStandby { path, reason: (*reason).into() },
        PathChange::Closed => Event::PathClosed { path },
        PathChange::Capacity(change) => Event::CapacityChanged {
            link: if path.link.is_empty() { path.path } else { path.link },
            client: path.client,
            before_bps: change.before.map(BitRate::bps),
            bps: change.now.bps(),
            reason: match change.reason {
                Measured::Configured => CapacityReason::Given,
                Measured::FirstMeasurement => CapacityReason::Measured,
                Measured::NoQueue => CapacityReason::NoQueue,
                Measured::Queue(queue) => CapacityReason::Queue { queue_ms: queue.as_secs_f64() * 1e3 },
            },
        },
    }
}

/// A duration in whole milliseconds.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
