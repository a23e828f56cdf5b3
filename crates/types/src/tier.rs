crate::word_enum! {
    /// When a link is used, compared with the others.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum Tier {
        /// Always.
        #[default]
        Primary = "primary",
        /// While the primary links are full or none of them works.
        Overflow = "overflow",
        /// While no primary and no overflow link works.
        Backup = "backup",
        /// Not at all.
        Never = "never",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tier_that_is_used_first_is_the_least() {
        assert!(Tier::ALL.is_sorted());
    }
}
