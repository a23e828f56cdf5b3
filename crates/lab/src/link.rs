//! Changes and counters of one link of a running lab.

use std::{
    fmt,
    time::{Duration, Instant},
};

use mpvpn_types::word_enum;

use crate::{
    emulation::{Counters, HISTORY_STEP},
    emulator::{EmulatedLink, EmulatorHandle},
    error::LabError,
    namespace::Namespace,
    spec::ChannelParams,
    tap::announce_carrier,
};

word_enum! {
    /// A direction of a link.
    pub enum Direction {
        /// From the client to the server.
        Up = "up",
        /// From the server to the client.
        Down = "down",
        /// Both directions.
        #[default]
        Both = "both",
    }
}

/// Counters of both directions of a link.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct LinkStats {
    /// From the client to the server.
    pub up: Counters,
    /// From the server to the client.
    pub down: Counters,
}

/// The bytes of IP packets that a link delivered, in steps of equal time.
#[derive(Clone, Debug)]
pub struct History {
    /// When the first step began.
    pub start: Instant,
    /// Bytes delivered to the server in each [`HISTORY_STEP`].
    pub up: Vec<u64>,
    /// Bytes delivered to the client in each [`HISTORY_STEP`].
    pub down: Vec<u64>,
}

impl History {
    /// Bytes delivered in each 100 ms: up and down.
    pub fn per_100ms(&self) -> (Vec<u64>, Vec<u64>) {
        let steps = (Duration::from_millis(100).as_nanos() / HISTORY_STEP.as_nanos()) as usize;
        let sum = |bytes: &[u64]| bytes.chunks(steps).map(|step| step.iter().sum()).collect();
        (sum(&self.up), sum(&self.down))
    }

    /// Bytes delivered to the client from `from` to `to`, with the resolution of [`HISTORY_STEP`].
    pub fn down_between(&self, from: Instant, to: Instant) -> u64 {
        self.between(Direction::Down, from, to)
    }

    /// Bytes delivered in a direction from `from` to `to`, with the resolution of [`HISTORY_STEP`].
    pub fn between(&self, direction: Direction, from: Instant, to: Instant) -> u64 {
        let sum = |bytes: &[u64]| {
            let step = |at: Instant| {
                let since = at.saturating_duration_since(self.start).as_nanos();
                usize::try_from(since / HISTORY_STEP.as_nanos()).unwrap_or(usize::MAX).min(bytes.len())
            };
            bytes[step(from).min(step(to))..step(to)].iter().sum::<u64>()
        };
        match direction {
            Direction::Up => sum(&self.up),
            Direction::Down => sum(&self.down),
            Direction::Both => sum(&self.up) + sum(&self.down),
        }
    }
}

/// A handle to one link of a lab. After the lab has ended its methods return errors.
#[derive(Clone)]
pub struct LinkHandle {
    pub(crate) index: usize,
    pub(crate) kind: Kind,
    pub(crate) client: Namespace,
    pub(crate) server: Namespace,
}

#[derive(Clone)]
pub(crate) enum Kind {
    /// The handle of the emulator, and the index of the link in it.
    Emulated { handle: EmulatorHandle, link: usize },
    /// A veth pair. Setting the server's end down removes the carrier of the client's end.
    Veth,
}

impl fmt::Debug for LinkHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LinkHandle({})", self.client_device())
    }
}

impl LinkHandle {
    /// The interface in the client's namespace, `eth1` for the first link.
    pub fn client_device(&self) -> String {
        format!("eth{}", self.index + 1)
    }

    /// The interface in the server's namespace, `up1` for the first link.
    pub fn server_device(&self) -> String {
        format!("up{}", self.index + 1)
    }

    /// Changes the settings of a direction; packets in flight are not touched.
    pub fn set(
        &self,
        direction: Direction,
        change: impl Fn(&mut ChannelParams) + Send + 'static,
    ) -> Result<(), LabError> {
        self.with(move |link| {
            if direction != Direction::Down {
                link.change_up(&change);
            }
            if direction != Direction::Up {
                link.change_down(&change);
            }
        })
    }

    /// Sets the random loss of a direction, 0 to 1. With 1 the link is silent but keeps its carrier.
    pub fn loss(&self, direction: Direction, share: f64) -> Result<(), LabError> {
        self.set(direction, move |params| params.loss = share.clamp(0.0, 1.0))
    }

    /// Cuts the link: the client's device loses its carrier, and packets in flight are lost. The server's
    /// device notices nothing.
    pub fn down(&self) -> Result<(), LabError> {
        match &self.kind {
            Kind::Emulated { .. } => {
                self.with(EmulatedLink::pull)?.map_err(LabError::io("remove the carrier"))?;
                announce_carrier(&self.client, &self.client_device())
            }
            Kind::Veth => self.server.ip(&format!("link set {} down\n", self.server_device())),
        }
    }

    /// Ends a cut.
    pub fn up(&self) -> Result<(), LabError> {
        match &self.kind {
            Kind::Emulated { .. } => {
                self.with(EmulatedLink::plug)?.map_err(LabError::io("restore the carrier"))?;
                announce_carrier(&self.client, &self.client_device())
            }
            Kind::Veth => self.server.ip(&format!("link set {} up\n", self.server_device())),
        }
    }

    /// Whether the link is cut.
    pub fn is_down(&self) -> Result<bool, LabError> {
        self.with(|link| link.is_pulled())
    }

    /// The counters of both directions. On a veth pair they are those of the client's device, with bytes of
    /// Ethernet frames.
    pub fn stats(&self) -> Result<LinkStats, LabError> {
        match &self.kind {
            Kind::Emulated { .. } => self.with(|link| link.stats()),
            Kind::Veth => self.device_stats(),
        }
    }

    /// The bytes delivered over time.
    pub fn history(&self) -> Result<History, LabError> {
        self.with(|link| link.history())
    }

    /// Makes both devices report the operational state "up", as real ones do.
    pub(crate) fn report_up(&self) -> Result<(), LabError> {
        if matches!(self.kind, Kind::Veth) {
            return Ok(());
        }
        self.with(EmulatedLink::toggle_carrier)?.map_err(LabError::io("toggle the carrier"))?;
        announce_carrier(&self.client, &self.client_device())?;
        announce_carrier(&self.server, &self.server_device())
    }

    fn with<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut EmulatedLink) -> R + Send + 'static,
    ) -> Result<R, LabError> {
        match &self.kind {
            Kind::Emulated { handle, link } => handle.with(*link, job),
            Kind::Veth => Err(LabError::NotEmulated(self.index + 1)),
        }
    }

    /// Reads `/proc/net/dev`: after the name and a colon, 8 columns about received and 8 columns about sent
    /// frames.
    fn device_stats(&self) -> Result<LinkStats, LabError> {
        let table = self
            .client
            .enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?
            .map_err(LabError::io("read /proc/net/dev"))?;
        let device = self.client_device();
        let columns: Vec<u64> = table
            .lines()
            .find_map(|line| line.trim().strip_prefix(&device)?.strip_prefix(':'))
            .map(|line| line.split_whitespace().filter_map(|word| word.parse().ok()).collect())
            .unwrap_or_default();
        let column = |n: usize| columns.get(n).copied().unwrap_or(0);
        let counters =
            |n: usize| Counters { bytes: column(n), packets: column(n + 1), ..Counters::default() };
        Ok(LinkStats { up: counters(8), down: counters(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_summed_over_intervals_and_by_100_ms() {
        let start = Instant::now();
        let history = History { start, up: vec![], down: (1..=25).collect() };
        assert_eq!(history.per_100ms().1, [55, 155, 21 + 22 + 23 + 24 + 25]);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(history.down_between(at(10), at(30)), 2 + 3);
        assert_eq!(history.down_between(at(30), at(10)), 0);
        assert_eq!(history.down_between(at(240), at(9000)), 25);
    }
}
