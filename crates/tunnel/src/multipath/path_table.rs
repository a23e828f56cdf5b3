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
    /// When the last path was removed; the time of creation before that.
    pub(super) empty_since: Instant,
}

impl PathTable {
    pub(super) fn new(now: Instant) -> Self {
        Self { paths: Vec::with_capacity(1), empty_since: now }
    }

    /// Adds a path, unless it exists.
    pub(super) fn insert(&mut self, now: Instant, id: PathId, path: PathEntry) {
        if let Err(at) = self.place_of(id) {
            self.paths.insert(at, (id, Box::new(path)));
        }
        self.note_count(now);
    }

    /// Passes on whether there is one path only.
    fn note_count(&mut self, now: Instant) {
        let only = self.paths.len() == 1;
        self.values_mut().for_each(|path| path.liveness.set_only_path(now, only));
    }

    /// The path of a connection that has one.
    #[inline]
    pub(super) fn only_mut(&mut self) -> Option<(PathId, &mut PathEntry)> {
        match &mut *self.paths {
            [(id, path)] => Some((*id, path)),
            _ => None,
        }
    }

    pub(super) fn remove(&mut self, now: Instant, id: PathId) -> Option<Box<PathEntry>> {
        let removed = self.place_of(id).ok().map(|at| self.paths.remove(at).1);
        if self.paths.is_empty() {
            self.empty_since = now;
        }
        self.note_count(now);
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

    pub(super) fn ids(&self) -> impl Iterator<Item = PathId> + '_ {
        self.paths.iter().map(|(id, _)| *id)
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
    pub(super) fn dead_since(&self) -> Option<Instant> {
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
    fn a_path_that_is_opened_twice_stays_as_it_is() {
        let start = Instant::now();
        let mut table = PathTable::new(start);
        table.insert(start, PathId(0), path(start, 1));
        table.insert(start, PathId(0), path(start, 2));
        assert_eq!((table.len(), table.path_on(LinkId(2))), (1, None));
    }
}
