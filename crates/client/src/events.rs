//! Reports the events of one shard of a client.
//!
//! In: changes of the tunnel, with the numbers of links and classes. Out: events with their names. Always
//! holds: memory is bounded by the number of links and classes.

use std::{collections::BTreeMap, time::Instant};

use mpvpn_input::short_text::ShortText;
use mpvpn_links::Links;
use mpvpn_report::{
    events::{millis, path_event},
    paths::path_name,
};
use mpvpn_status::events::{Event, EventSender, PathName};
use mpvpn_tunnel::{ClassChange, ClientChange, ConnectionNumber, PathChange, PathEvent, SecretSharing};
use mpvpn_types::{ClassId, LinkId};

use super::classes::Classes;

/// Reports the events of one shard.
pub(super) struct ShardEvents {
    sender: EventSender,
    member: ConnectionNumber,
    /// When the path over a link failed, by link and class. A path opened there later is reported as the
    /// recovery: a failed path is closed when streams wait for its data, and a new one is opened when
    /// the link works again.
    failed: BTreeMap<LinkId, Instant>,
}

impl ShardEvents {
    pub(super) fn new(sender: EventSender, shard: u8) -> Self {
        let member = ConnectionNumber::of(shard, ClassId::DEFAULT).unwrap_or_default();
        Self { sender, member, failed: BTreeMap::new() }
    }

    /// Reports an event.
    pub(super) fn report(&self, event: Event) {
        self.sender.report(event);
    }

    /// Reports an event that every shard sees, from shard 0 only.
    pub(super) fn report_once(&self, event: impl FnOnce() -> Event) {
        if self.member.shard() == 0 {
            self.report(event());
        }
    }

    /// Reports a change of the tunnel.
    pub(super) fn report_change(
        &mut self,
        now: Instant,
        change: ClientChange,
        links: &Links,
        classes: &Classes,
    ) {
        let class = |id| ShortText::from(classes.name(id));
        let event = match change {
            ClientChange::Path(event) => self.path_event(now, &event, links, classes),
            ClientChange::Class(id, change) => class_event(class(id), change),
            ClientChange::ConnectFailed(link, reason) => {
                let (class, reason) = (class(link.class()), reason.into());
                Event::ConnectFailed { link: link_name(links, link), class, reason }
            }
            ClientChange::Stopping(id) => Event::ServerStopping { class: class(id) },
            ClientChange::SecretShared(sharing) => {
                Event::SecretShared { client: None, kept: sharing == SecretSharing::Kept }
            }
        };
        self.report(event);
    }

    fn path_event(&mut self, now: Instant, event: &PathEvent, links: &Links, classes: &Classes) -> Event {
        let (class, link) = (classes.name(event.link.class()), link_name(links, event.link));
        let name = path_name(event.path, class, link.as_str(), Some(event.link), self.member);
        let path = PathName { client: None, class: class.into(), path: name.into(), link };
        match event.change {
            PathChange::Failed(_) => drop(self.failed.insert(event.link, now)),
            PathChange::Recovered(_) => drop(self.failed.remove(&event.link)),
            PathChange::Opened(_) => {
                if let Some(since) = self.failed.remove(&event.link) {
                    let failed_ms = millis(now.saturating_duration_since(since));
                    return Event::PathRecovered { path, failed_ms };
                }
            }
            _ => {}
        }
        path_event(path, &event.change)
    }
}

fn class_event(class: ShortText, change: ClassChange) -> Event {
    match change {
        ClassChange::Used => Event::ClassUsed { class },
        ClassChange::Connected => Event::ClassConnected { client: None, class },
        ClassChange::Idle => Event::ClassIdle { class },
        ClassChange::Disconnected(reason) => {
            Event::ClassDisconnected { client: None, class, reason: reason.into() }
        }
        ClassChange::Refused(reason) => Event::ClassRefused { class, reason: reason.into() },
    }
}

fn link_name(links: &Links, id: LinkId) -> ShortText {
    links.links.get(&id.uplink()).map_or("", |link| link.name.as_str()).into()
}
