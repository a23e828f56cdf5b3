//! The paths of a connection by path ID.
//!
//! In: opened and closed paths. Out: the paths, and which of them work. Always holds: a path ID is never used
//! again (draft-ietf-quic-multipath-21), and iteration is in the order of IDs.

use mpvpn_types::{Instant, LinkId, PathId};

use super::path::PathEntry;

/// All validated paths of a connection.
#[derive(Debug)]
pub(crate) struct PathTable {
    /// In the order of path IDs. Boxed, because each packet walks along the IDs; an entry has several
    /// hundred bytes.
    paths: Vec<(PathId, Box<PathEntry>)>,
    /// The index of the only path that works, or of the only path; see [`Self::note_works`].
    sole: Option<usize>,
    /// Since when there is a choice among paths, or none is known to work although there are several.
    pub(super) several_since: Option<Instant>,
    /// When the last path was removed; the time of creation before that.
    pub(super) empty_since: Instant,
}

impl PathTable {
    pub(super) fn new(now: Instant) -> Self {
        Self { paths: Vec::with_capacity(1), sole: None, several_since: None, empty_since: now }
    }

    /// Adds a path, unless it exists.
    pub(super) fn insert(&mut self, now: Instant, id: PathId, path: PathEntry) {
        if let Err(at) = self.place_of(id) {
            self.paths.insert(at, (id, Box::new(path)));
        }
        self.note_works(now);
    }

    /// Determines anew which path is the only one that works, and passes it on; to be called when the paths
    /// have been judged.
    pub(super) fn note_works(&mut self, now: Instant) {
        let mut working = self.paths.iter().enumerate().filter(|(_, (_, path))| path.works());
        let first = working.next().map(|(index, _)| index);
        let is_only = working.next().is_none();
        self.sole = if self.paths.len() == 1 { Some(0) } else { first.filter(|_| is_only) };
        let sole = self.sole;
        let several_since = self.several_since.unwrap_or(now);
        self.several_since = (self.paths.len() > 1 && sole.is_none()).then_some(several_since);
        for (index, path) in self.values_mut().enumerate() {
            path.liveness.set_only_path(now, sole == Some(index));
        }
    }

    /// The path that has no other one beside it, or none that works.
    #[inline]
    pub(super) fn sole_mut(&mut self) -> Option<(PathId, &mut PathEntry)> {
        let (id, path) = self.paths.get_mut(self.sole?)?;
        Some((*id, path))
    }

    pub(super) fn remove(&mut self, now: Instant, id: PathId) -> Option<Box<PathEntry>> {
        let removed = self.place_of(id).ok().map(|at| self.paths.remove(at).1);
        if self.paths.is_empty() {
            self.empty_since = now;
        }
        self.note_works(now);
        removed
    }

    /// The index of a path; if it is missing, the one that it would have.
    fn place_of(&self, id: PathId) -> Result<usize, usize> {
        self.paths.binary_search_by_key(&id, |(id, _)| *id)
    }

    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }

    pub(crate) fn contains(&self, id: PathId) -> bool {
        self.get(id).is_some()
    }

    #[inline]
    pub(super) fn get(&self, id: PathId) -> Option<&PathEntry> {
        self.place_of(id).ok().map(|at| &*self.paths[at].1)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: PathId) -> Option<&mut PathEntry> {
        self.place_of(id).ok().map(|at| &mut *self.paths[at].1)
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = (PathId, &PathEntry)> {
        self.paths.iter().map(|(id, path)| (*id, &**path))
    }

    #[inline]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (PathId, &mut PathEntry)> {
        self.paths.iter_mut().map(|(id, path)| (*id, &mut **path))
    }

    #[inline]
    pub(super) fn values(&self) -> impl Iterator<Item = &PathEntry> {
        self.paths.iter().map(|(_, path)| &**path)
    }

    #[inline]
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut PathEntry> {
        self.paths.iter_mut().map(|(_, path)| &mut **path)
    }

    /// Returns the paths over a link.
    pub(super) fn over_mut(&mut self, link: LinkId) -> impl Iterator<Item = &mut PathEntry> {
        self.values_mut().filter(move |path| path.link() == link)
    }

    /// Returns the first path over a link.
    pub(crate) fn path_on(&self, link: LinkId) -> Option<PathId> {
        self.iter().find(|(_, path)| path.link() == link).map(|(id, _)| id)
    }

    /// Whether the first path over a link works; `None` if there is no path.
    pub(crate) fn works_on(&self, link: LinkId) -> Option<bool> {
        self.values().find(|path| path.link() == link).map(PathEntry::works)
    }

    /// Whether a path over another link works.
    pub(crate) fn works_besides(&self, link: LinkId) -> bool {
        self.values().any(|path| path.link() != link && path.works())
    }

    /// Whether any path works.
    pub(crate) fn any_works(&self) -> bool {
        self.values().any(PathEntry::works)
    }

    /// Returns since when no path works; `None` if one works.
    pub(crate) fn dead_since(&self) -> Option<Instant> {
        if self.paths.is_empty() {
            return Some(self.empty_since);
        }
        self.values().filter_map(PathEntry::dead_since).max()
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::{super::tests::path, *};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_table_without_paths_is_dead_since_the_last_one_went() {
        let start = Instant::now();
        let mut table = PathTable::new(start);
        assert_eq!(table.dead_since(), Some(start));
        table.insert(start, PathId(0), path(start, 3));
        assert_eq!((table.path_on(LinkId(3)), table.works_on(LinkId(3))), (Some(PathId(0)), Some(true)));
        assert!(table.remove(start + 5 * MS, PathId(0)).is_some_and(|path| path.link() == LinkId(3)));
        assert_eq!(table.dead_since(), Some(start + 5 * MS));
    }

    #[test]
    fn all_paths_are_dead_since_the_last_of_them_died() {
        let start = Instant::now();
        let mut table = PathTable::new(start);
        for link in [1, 2] {
            table.insert(start, PathId(link.into()), path(start, link));
            let died = start + u32::from(link) * MS;
            table.over_mut(LinkId(link)).for_each(|path| path.liveness.on_carrier(died, false));
            assert!(!table.any_works());
        }
        assert_eq!(table.dead_since(), Some(start + 2 * MS));
        table.insert(start, PathId(7), path(start, 7));
        assert!(table.any_works() && table.works_besides(LinkId(1)) && !table.works_besides(LinkId(7)));
    }

    #[test]
    fn the_only_path_that_works_is_that_of_a_connection_with_one_or_the_one_that_is_left() {
        let start = Instant::now();
        let mut table = PathTable::new(start);
        let sole = |table: &mut PathTable| {
            table.note_works(start);
            (table.sole_mut().map(|(id, _)| id.0), table.several_since.is_some())
        };
        assert_eq!(sole(&mut table), (None, false));
        table.insert(start, PathId(0), path(start, 0));
        assert_eq!(sole(&mut table), (Some(0), false));
        table.insert(start, PathId(1), path(start, 1));
        assert_eq!(sole(&mut table), (None, true));
        table.over_mut(LinkId(0)).for_each(|path| path.liveness.on_carrier(start, false));
        assert_eq!(sole(&mut table), (Some(1), false));
        table.over_mut(LinkId(1)).for_each(|path| path.is_unheard = true);
        assert_eq!(sole(&mut table), (None, true), "none works");
        table.remove(start, PathId(1));
        assert_eq!(sole(&mut table), (Some(0), false), "it may work again");
    }

    #[test]
    fn a_path_that_is_opened_twice_stays_as_it_is() {
        let start = Instant::now();
        let mut table = PathTable::new(start);
        table.insert(start, PathId(0), path(start, 1));
        table.insert(start, PathId(0), path(start, 2));
        assert_eq!((table.len(), table.path_on(LinkId(2))), (1, None));
    }
}
