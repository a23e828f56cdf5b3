use std::{fmt, str::FromStr};

/// How the packets of a session are spread over its paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// Every packet takes the path on which it arrives first, another one only when waiting for that
    /// would take longer. At a peer that does not restore order, flows that need it stay on a path.
    #[default]
    Auto,
    /// Every packet takes the path with the least round-trip time that has room.
    MinRtt,
    /// Every path carries a share in proportion to the rate that it has shown.
    Balanced,
    /// Every path carries a share in proportion to the weight of its link.
    Weighted,
    /// Every packet takes all paths, and the first copy to arrive wins.
    Redundant,
    /// Every flow stays on its path while that is alive; new flows go where the fewest are for
    /// the rate of the path.
    Flow,
    /// The first link that works carries everything.
    Failover,
}

impl Scheduler {
    /// Every scheduler that there is, in the order help texts name them.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::MinRtt,
        Self::Balanced,
        Self::Weighted,
        Self::Redundant,
        Self::Flow,
        Self::Failover,
    ];

    /// The name in configuration and on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::MinRtt => "minrtt",
            Self::Balanced => "balanced",
            Self::Weighted => "weighted",
            Self::Redundant => "redundant",
            Self::Flow => "flow",
            Self::Failover => "failover",
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that no scheduler has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no scheduler: expected auto, minrtt, balanced, weighted, redundant, flow or failover")]
pub struct ParseSchedulerError(String);

impl FromStr for Scheduler {
    type Err = ParseSchedulerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|scheduler| scheduler.as_str() == text)
            .ok_or_else(|| ParseSchedulerError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for scheduler in Scheduler::ALL {
            assert_eq!(scheduler.as_str().parse(), Ok(scheduler));
        }
        assert!("fastest".parse::<Scheduler>().unwrap_err().to_string().contains("`fastest`"));
    }
}
