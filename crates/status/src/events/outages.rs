//! Which events tell something new, and which are details of an outage that is reported already.
//!
//! In: events with their times. Out: whether each is a detail, and which earlier ones become details. Always
//! holds: an outage is one main event while it lasts, and by one once it is over; at most
//! [`MAX_OUTAGES`] are known.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use super::{Event, EventKind, text::milliseconds};

/// Events about a subject this soon after its outage are consequences of it: paths are validated, and
/// classes and threads connect again. Longer: a new failure is missing; shorter: one outage is several
/// events. Chosen.
const CONSEQUENCES_FOR: Duration = Duration::from_secs(5);
/// Outages known at a time: the links of a client, and the clients of a server that left it. More: memory;
/// fewer: the return of a client is listed without the time for which it was away. Chosen.
const MAX_OUTAGES: usize = 1000;
/// The subject of outages of the server at a client, which are outages of all its links.
const SERVER: &str = "";

/// The place of an event in the outages of its subject: the server, a link or a client.
enum Role {
    Main,
    Detail,
    Begins(String),
    Ends(String),
    Follows(String),
}

impl Role {
    fn of(event: &Event) -> Self {
        match event {
            Event::NoAnswer {} | Event::Disconnected { .. } | Event::ServerStopping { .. } => {
                Self::Begins(SERVER.to_owned())
            }
            Event::AnswersAgain {} | Event::Connected { .. } => Self::Ends(SERVER.to_owned()),
            Event::LinkDown { link, .. } => Self::Begins(link.to_string()),
            Event::PathFailed { path, .. } if path.client.is_none() => Self::Begins(path.link.to_string()),
            Event::LinkUp { link, .. } | Event::TransportChanged { link, .. } => Self::Ends(link.to_string()),
            Event::PathRecovered { path, .. } if path.client.is_none() => Self::Ends(path.link.to_string()),
            Event::ClientDisconnected { client, .. } => Self::Begins(client.to_string()),
            Event::ClientConnected { client, .. } => Self::Ends(client.to_string()),
            Event::ConnectFailed { link, .. } => Self::Follows(link.to_string()),
            Event::AddressesChanged { .. }
            | Event::ResolveFailed { .. }
            | Event::ServerResolved { .. }
            | Event::KillSwitchBlocking {}
            | Event::KillSwitchArmed {} => Self::Follows(SERVER.to_owned()),
            Event::MtuChanged { .. } | Event::ShardChanged { .. } => Self::Detail,
            Event::ClassRefused { .. } => Self::Main,
            _ => match event.kind() {
                EventKind::Path | EventKind::Transport | EventKind::Class | EventKind::Capacity => {
                    Self::Detail
                }
                _ => Self::Main,
            },
        }
    }
}

#[derive(Clone, Debug)]
struct Outage {
    /// The event that began or ended it, and when it happened.
    event: Event,
    at: SystemTime,
    is_over: bool,
}

impl Outage {
    fn is_recent(&self, now: SystemTime) -> bool {
        now.duration_since(self.at).unwrap_or_default() <= CONSEQUENCES_FOR
    }
}

/// The place of an event among the others.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) is_detail: bool,
    /// Earlier events that become details: its consequences, and the one that began the outage that it ends.
    pub(super) demoted: Vec<Event>,
    /// The duration and the begin of an outage that it ends, to be added to its sentence.
    pub(super) suffix: String,
}

/// The outages that last, and those that ended lately.
#[derive(Clone, Debug, Default)]
pub(super) struct Outages {
    known: BTreeMap<String, Outage>,
    /// Links that were up before.
    links: BTreeSet<String>,
}

impl Outages {
    /// Judges an event that happened at `at`.
    pub(super) fn judge(&mut self, at: SystemTime, event: &Event) -> Verdict {
        self.known.retain(|_, outage| !outage.is_over || outage.is_recent(at));
        let is_of_link = |event: &Event| matches!(event, Event::LinkDown { .. } | Event::LinkUp { .. });
        let role = Role::of(event);
        let (Role::Begins(subject) | Role::Ends(subject) | Role::Follows(subject)) = &role else {
            return Verdict { is_detail: matches!(role, Role::Detail), ..Verdict::default() };
        };
        // A failure after a link's first address is no consequence of a change.
        let is_new = matches!(event, Event::LinkUp { .. })
            && self.links.len() < MAX_OUTAGES
            && self.links.insert(subject.clone());
        let known = self.known.get(subject);
        let lasts = known.is_some_and(|known| !known.is_over);
        // A failure after the server has answered again is a new one.
        let counts = |server: &Outage| !(server.is_over && matches!(role, Role::Begins(_)));
        let of_server = subject != SERVER && self.known.get(SERVER).is_some_and(counts);
        let is_link_lost =
            |known: &Outage| matches!(known.event, Event::LinkDown { .. }) && known.is_recent(at);
        let is_detail = match event {
            Event::LinkDown { .. } | Event::LinkUp { .. } => false,
            // Without a link, nothing answers.
            Event::NoAnswer {} if self.known.values().any(is_link_lost) => true,
            Event::TransportChanged { .. } => of_server,
            Event::PathRecovered { .. } | Event::AnswersAgain {} => of_server || !lasts,
            _ if matches!(role, Role::Ends(_)) => known.is_some() && !lasts,
            _ if matches!(role, Role::Follows(_)) => {
                of_server || lasts || subject == SERVER && known.is_some()
            }
            _ => {
                let is_listed = |known: &Outage| lasts || is_of_link(&known.event);
                of_server
                    || known.is_some_and(|known| is_listed(known) && !event.is_repetition_of(&known.event))
            }
        };
        let mut verdict = Verdict { is_detail, ..Verdict::default() };
        let outage = |is_over| Outage { event: event.clone(), at, is_over };
        match &role {
            Role::Begins(subject) if !is_detail => {
                let is_silence = |known: &&Outage| {
                    subject == SERVER
                        && matches!(known.event, Event::PathFailed { .. })
                        && known.is_recent(at)
                };
                let silent = self.known.values().filter(is_silence).map(|known| known.event.clone());
                verdict.demoted = silent.collect();
                if self.known.len() >= MAX_OUTAGES {
                    self.known.pop_last();
                }
                self.known.insert(subject.clone(), outage(false));
            }
            Role::Ends(subject) if known.is_some() || is_of_link(event) && !is_new => {
                let began = self.known.insert(subject.clone(), outage(true));
                if let Some(began) = began.filter(|began| !began.is_over && !is_detail) {
                    let lasted = at.duration_since(began.at).unwrap_or_default().as_millis() as u64;
                    if !matches!(event, Event::PathRecovered { .. }) {
                        verdict.suffix = format!(", after {} ({})", milliseconds(lasted), began.event);
                    }
                    verdict.demoted.push(began.event);
                }
            }
            _ => {}
        }
        verdict
    }
}

#[cfg(test)]
mod tests;
