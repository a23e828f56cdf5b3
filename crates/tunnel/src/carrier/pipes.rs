//! Several paths over one link: to the scheduler they are one, under the name of the first that works.

use mpvpn_path::PathState;
use mpvpn_quic::Connection;
use mpvpn_types::PathId;

use super::{Carrier, Role, Watched};

impl Watched {
    /// What all paths over one link have in common, and no other path has. One inside TCP has a controller of its own.
    pub(super) fn bundle(&self, role: Role, id: PathId) -> u32 {
        match role {
            Role::Client if self.link.is_tcp() => self.link.0.into(),
            Role::Client => self.link.uplink().0.into(),
            Role::Server => self.policy.with.unwrap_or(id).0,
        }
    }
}

impl Carrier {
    /// Finds the paths that carry as one: of those over one link, all that are in the best state. Where the far end
    /// does not restore order each is one for itself, so that flows can stay on theirs.
    pub(super) fn join(&mut self, connection: &mut Connection) {
        let (role, ordered) = (self.role, self.sequencer.is_some());
        let bundle = |id: PathId, path: &Watched| if ordered { path.bundle(role, id) } else { id.0 };
        let mut all: Vec<(u32, u8, PathId)> =
            self.paths.iter().map(|(id, path)| (bundle(*id, path), rank(path.state), *id)).collect();
        all.sort_unstable();
        self.together.clear();
        for link in all.chunk_by(|(a, ..), (b, ..)| a == b) {
            let best = link[0].1;
            let list = link.iter().take_while(|(_, rank, _)| *rank == best).map(|(.., id)| *id);
            self.together.push(list.collect());
        }
        connection.set_together(&self.together);
    }

    /// The paths that carry what is given to this one.
    pub(super) fn carriers(&self, head: PathId) -> &[PathId] {
        self.together.iter().find(|list| list.first() == Some(&head)).map_or(&[], Vec::as_slice)
    }
}

fn rank(state: PathState) -> u8 {
    match state {
        PathState::Active => 0,
        PathState::Standby => 1,
        PathState::Probing => 2,
        PathState::Down => 3,
    }
}
