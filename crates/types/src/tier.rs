use std::{fmt, str::FromStr};

/// When a link is used, compared with the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Always.
    #[default]
    Primary,
    /// While the primary links are full, or none of them works.
    Overflow,
    /// While no primary and no overflow link works.
    Backup,
    /// Not at all.
    Never,
}

impl Tier {
    /// Every tier, the one that is used first first.
    pub const ALL: [Self; 4] = [Self::Primary, Self::Overflow, Self::Backup, Self::Never];

    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Overflow => "overflow",
            Self::Backup => "backup",
            Self::Never => "never",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that no tier has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of: primary, overflow, backup, never")]
pub struct ParseTierError(String);

impl FromStr for Tier {
    type Err = ParseTierError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|tier| tier.as_str() == text);
        found.ok_or_else(|| ParseTierError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tier_is_read_back() {
        for tier in Tier::ALL {
            assert_eq!(tier.to_string().parse(), Ok(tier));
        }
        assert!("spare".parse::<Tier>().unwrap_err().to_string().contains("`spare`"));
    }
}
