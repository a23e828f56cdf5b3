//! Groups the paths over one link (option `pipes`). The scheduler sees a group as one path: its head, the
//! path with the lowest ID.
//!
//! In: the link and the state of each path. Out: groups of paths that share a link and a state. Always holds:
//! a path is in at most one group, a group is not empty, and a path in a worse state than the best one of its
//! link is in no group.

use mpvpn_path::PathState;
use mpvpn_types::PathId;

/// A path that may become part of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupCandidate {
    /// Equal for all paths over one link.
    pub(super) link_key: u32,
    pub(super) state: PathState,
    pub(super) id: PathId,
}

/// The paths that may be used, in groups that carry data as one.
#[derive(Debug, Default)]
pub(super) struct PathGroups {
    /// The groups, each in ascending order of path IDs; a field so that its allocation is reused.
    groups: Vec<Vec<PathId>>,
}

impl PathGroups {
    /// Rebuilds the groups: each contains the paths of one link that are in the best state among them.
    pub(super) fn set(&mut self, candidates: impl Iterator<Item = GroupCandidate>) {
        let mut all: Vec<(u32, PathState, PathId)> =
            candidates.map(|path| (path.link_key, path.state, path.id)).collect();
        all.sort_unstable();
        self.groups.clear();
        for link in all.chunk_by(|(a, ..), (b, ..)| a == b) {
            let best = link[0].1;
            let group = link.iter().take_while(|(_, rank, _)| *rank == best).map(|(.., id)| *id);
            self.groups.push(group.collect());
        }
    }

    /// Returns all groups.
    pub(super) fn as_lists(&self) -> &[Vec<PathId>] {
        &self.groups
    }

    /// Returns the head of each group.
    pub(super) fn heads(&self) -> impl Iterator<Item = PathId> + '_ {
        self.groups.iter().filter_map(|group| group.first().copied())
    }

    /// Returns the members of the group with this head; empty if the path is not a head.
    pub(super) fn members(&self, head: PathId) -> &[PathId] {
        self.groups.iter().find(|group| group.first() == Some(&head)).map_or(&[], Vec::as_slice)
    }

    /// Returns the head of the group to which a path belongs.
    pub(super) fn head_of(&self, id: PathId) -> Option<PathId> {
        self.groups.iter().find(|group| group.contains(&id)).and_then(|group| group.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(members: &[(u32, PathState, u32)]) -> PathGroups {
        let mut groups = PathGroups::default();
        let candidate = |(link_key, state, id): &(u32, PathState, u32)| GroupCandidate {
            link_key: *link_key,
            state: *state,
            id: PathId(*id),
        };
        groups.set(members.iter().map(candidate));
        groups
    }

    #[test]
    fn paths_over_one_link_form_a_group_headed_by_the_lowest_id() {
        use PathState::Active;
        let groups = groups(&[(7, Active, 5), (3, Active, 4), (7, Active, 2)]);
        assert_eq!(groups.heads().collect::<Vec<_>>(), [PathId(4), PathId(2)]);
        assert_eq!(groups.members(PathId(2)), [PathId(2), PathId(5)]);
        assert_eq!(groups.members(PathId(5)), [], "not a head");
        assert_eq!(groups.head_of(PathId(5)), Some(PathId(2)));
    }

    #[test]
    fn a_path_that_is_down_is_in_no_group_with_one_that_works() {
        use PathState::{Active, Down, Standby};
        let mut groups = groups(&[(1, Down, 0), (1, Active, 1), (1, Standby, 2), (2, Down, 3)]);
        assert_eq!(
            groups.as_lists(),
            [vec![PathId(1)], vec![PathId(3)]],
            "a link that is down has a group, too"
        );
        assert_eq!(groups.head_of(PathId(0)), None);
        groups.set([].into_iter());
        assert_eq!(groups.as_lists().len(), 0);
    }
}
