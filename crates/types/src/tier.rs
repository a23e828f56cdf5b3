crate::word_enum! {
    /// When a link carries data, compared with the other links.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum Tier {
        /// Always.
        #[default]
        Primary = "primary",
        /// While the primary links are full or none of them works.
        Overflow = "overflow",
        /// While no primary and no overflow link works.
        Backup = "backup",
        /// Never.
        Never = "never",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_ordered_by_when_they_are_used() {
        assert!(Tier::ALL.is_sorted());
    }
}
