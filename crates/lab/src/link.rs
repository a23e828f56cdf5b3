//! Changing and watching one link of a running lab.

use std::{
    fmt,
    time::{Duration, Instant},
};

use mpvpn_types::word_enum;

use crate::{
    emulation::{Counters, HISTORY_STEP},
    emulator::{Remote, Wire},
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
        /// Either way.
        #[default]
        Both = "both",
    }
}

/// What both directions of a link did so far.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct LinkStats {
    /// From the client to the server.
    pub up: Counters,
    /// From the server to the client.
    pub down: Counters,
}

/// How many bytes of IP packets a link delivered, step by step.
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
    /// Bytes delivered in each 100 ms, both directions (up, down) apart.
    pub fn per_100ms(&self) -> (Vec<u64>, Vec<u64>) {
        let steps = (Duration::from_millis(100).as_nanos() / HISTORY_STEP.as_nanos()) as usize;
        let sum = |bytes: &[u64]| bytes.chunks(steps).map(|step| step.iter().sum()).collect();
        (sum(&self.up), sum(&self.down))
    }

    /// Bytes delivered to the client from `from` to `to`, to the grain of the history.
    pub fn down_between(&self, from: Instant, to: Instant) -> u64 {
        self.between(Direction::Down, from, to)
    }

    /// Bytes delivered in a direction from `from` to `to`, to the grain of the history.
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

/// One link of a lab. Copies stay valid and useless after the lab has ended.
#[derive(Clone)]
pub struct LinkHandle {
    pub(crate) index: usize,
    pub(crate) kind: Kind,
    pub(crate) client: Namespace,
    pub(crate) server: Namespace,
}

#[derive(Clone)]
pub(crate) enum Kind {
    /// The emulator, and which of its wires this is.
    Emulated { remote: Remote, wire: usize },
    /// A veth pair, where the state of the server's end makes the client's carrier.
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
        self.with(move |wire| {
            if direction != Direction::Down {
                wire.change_up(&change);
            }
            if direction != Direction::Up {
                wire.change_down(&change);
            }
        })
    }

    /// Sets the random loss of a direction, 0 to 1; 1 is silence with the carrier still on.
    pub fn loss(&self, direction: Direction, share: f64) -> Result<(), LabError> {
        self.set(direction, move |params| params.loss = share.clamp(0.0, 1.0))
    }

    /// Pulls the client's cable: its carrier goes, and what is under way is lost. The server is not told.
    pub fn down(&self) -> Result<(), LabError> {
        match &self.kind {
            Kind::Emulated { .. } => {
                self.with(Wire::pull)?.map_err(LabError::io("take the carrier away"))?;
                announce_carrier(&self.client, &self.client_device())
            }
            Kind::Veth => self.server.ip(&format!("link set {} down\n", self.server_device())),
        }
    }

    /// Plugs the client's cable in again.
    pub fn up(&self) -> Result<(), LabError> {
        match &self.kind {
            Kind::Emulated { .. } => {
                self.with(Wire::plug)?.map_err(LabError::io("give the carrier back"))?;
                announce_carrier(&self.client, &self.client_device())
            }
            Kind::Veth => self.server.ip(&format!("link set {} up\n", self.server_device())),
        }
    }

    /// Whether its cable is pulled.
    pub fn is_down(&self) -> Result<bool, LabError> {
        self.with(|wire| wire.is_pulled())
    }

    /// What both directions did so far. On a veth pair: what the client's device counted, bytes of frames.
    pub fn stats(&self) -> Result<LinkStats, LabError> {
        match &self.kind {
            Kind::Emulated { .. } => self.with(|wire| wire.stats()),
            Kind::Veth => self.device_stats(),
        }
    }

    /// When how much was delivered.
    pub fn history(&self) -> Result<History, LabError> {
        self.with(|wire| wire.history())
    }

    /// Makes both devices report that they are up, as real ones do.
    pub(crate) fn report_up(&self) -> Result<(), LabError> {
        if matches!(self.kind, Kind::Veth) {
            return Ok(());
        }
        self.with(Wire::toggle_carrier)?.map_err(LabError::io("toggle the carrier"))?;
        announce_carrier(&self.client, &self.client_device())?;
        announce_carrier(&self.server, &self.server_device())
    }

    fn with<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Wire) -> R + Send + 'static,
    ) -> Result<R, LabError> {
        match &self.kind {
            Kind::Emulated { remote, wire } => remote.with(*wire, job),
            Kind::Veth => Err(LabError::NotEmulated(self.index + 1)),
        }
    }

    /// Reads `/proc/net/dev`: after the name and a colon, 8 columns received, then 8 columns sent.
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
    fn a_history_is_summed_over_times_and_by_100_ms() {
        let start = Instant::now();
        let history = History { start, up: vec![], down: (1..=25).collect() };
        assert_eq!(history.per_100ms().1, [55, 155, 21 + 22 + 23 + 24 + 25]);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(history.down_between(at(10), at(30)), 2 + 3);
        assert_eq!(history.down_between(at(30), at(10)), 0);
        assert_eq!(history.down_between(at(240), at(9000)), 25);
    }
}
