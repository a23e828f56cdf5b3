//! Converts changes of the clients' connections into events.
//!
//! Always holds: a client with several connections is reported as one client: shard 0's connection of the
//! default class is the client, shard 0's other connections are its classes, and other shards' connections
//! are not reported.

use std::time::{Duration, Instant};

use mpvpn_report::{
    events::path_event,
    paths::{DEFAULT_CLASS, path_name},
};
use mpvpn_status::events::{ClientName, Event, PathName};
use mpvpn_tunnel::{ClientTag, ServerChange};
use mpvpn_types::ClassId;

/// Refused requests of each shard that are reported one by one in [`REFUSAL_INTERVAL`]. More: guesses of
/// tokens fill the log; fewer: a client that is refused is missing there.
pub(super) const MAX_REFUSALS: u32 = 10;
/// The time after which refused requests are reported again.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(60);

/// Which refused requests are reported: some in each interval. The others are counted, for one line at its
/// end.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// When the interval began, if one is under way.
    since: Option<Instant>,
    reported: u32,
    hidden: u64,
}

impl Refusals {
    /// Counts a refused request; returns whether it is reported.
    pub(super) fn is_reported(&mut self, now: Instant) -> bool {
        self.since.get_or_insert(now);
        let reported = self.reported < MAX_REFUSALS;
        match reported {
            true => self.reported += 1,
            false => self.hidden += 1,
        }
        reported
    }

    /// Ends the interval if its time is over; returns how many requests were not reported in it, if any.
    pub(super) fn take_summary(&mut self, now: Instant) -> Option<u64> {
        self.since.filter(|since| now.saturating_duration_since(*since) >= REFUSAL_INTERVAL)?;
        let Self { hidden, .. } = std::mem::take(self);
        (hidden > 0).then_some(hidden)
    }
}

/// The event for a change, if it is reported.
pub(super) fn event_of(change: ServerChange) -> Option<Event> {
    let is_first = |client: &ClientTag| client.connection.class() == ClassId::DEFAULT;
    match change {
        ServerChange::SecretShared { client } => {
            Some(Event::SecretShared { client: Some(client_name(client)), kept: true })
        }
        ServerChange::Joined { client, .. } | ServerChange::Left { client, .. }
            if client.connection.shard() != 0 =>
        {
            None
        }
        ServerChange::Joined { client, resumed } if is_first(&client) => {
            Some(Event::ClientConnected { client: client_name(client), resumed })
        }
        ServerChange::Joined { client, .. } => {
            let class = client.class.as_str().into();
            Some(Event::ClassConnected { client: Some(client_name(client)), class })
        }
        ServerChange::Left { client, reason } if is_first(&client) => {
            Some(Event::ClientDisconnected { client: client_name(client), reason: reason.into() })
        }
        ServerChange::Left { client, reason } => {
            let (class, reason) = (client.class.as_str().into(), reason.into());
            Some(Event::ClassDisconnected { client: Some(client_name(client)), class, reason })
        }
        ServerChange::Path { client, event } => {
            let class = if client.class.is_empty() { DEFAULT_CLASS } else { &client.class };
            let path = path_name(event.path, class, "", None, client.connection).into();
            let (class, link) = (class.into(), "".into());
            let path = PathName { client: Some(client_name(client)), class, link, path };
            Some(path_event(path, &event.change))
        }
        ServerChange::Refused(status, reason) => {
            Some(Event::RequestRefused { status, reason: reason.into() })
        }
    }
}

fn client_name(client: ClientTag) -> ClientName {
    ClientName { user: client.user.into(), address: client.address }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use mpvpn_tunnel::{ConnectionNumber, PathChange, PathEvent};
    use mpvpn_types::{Duration, LinkId, PathId};

    use super::*;

    fn tag(shard: u8, class: u8) -> ClientTag {
        ClientTag {
            user: "alice".to_owned(),
            address: Some(IpAddr::from([10, 0, 0, 2])),
            connection: ConnectionNumber::of(shard, ClassId(class)).unwrap(),
            class: if class == 0 { String::new() } else { "bulk".to_owned() },
        }
    }

    #[test]
    fn refused_requests_are_reported_until_there_are_many_and_the_rest_is_one_line() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let reported = |refusals: &mut Refusals, now| (0..5000).filter(|_| refusals.is_reported(now)).count();
        assert_eq!((reported(&mut refusals, at(0)), reported(&mut refusals, at(30))), (10, 0));
        assert_eq!(refusals.take_summary(at(59)), None);
        assert_eq!((refusals.take_summary(at(60)), refusals.take_summary(at(61))), (Some(9990), None));
        assert_eq!(reported(&mut refusals, at(100)), 10);
        assert_eq!(refusals.take_summary(at(160)), Some(4990));
        // A few are all reported, without a summary.
        assert!(refusals.is_reported(at(200)));
        assert_eq!(refusals.take_summary(at(300)), None);
    }

    #[test]
    fn the_connections_of_one_client_are_one_client() {
        let joined = |shard, class| {
            let event = event_of(ServerChange::Joined { client: tag(shard, class), resumed: class > 0 });
            event.map(|event| event.to_string())
        };
        assert_eq!(joined(0, 0).as_deref(), Some("alice (10.0.0.2) connected"));
        assert_eq!(joined(0, 2).as_deref(), Some("alice (10.0.0.2): class bulk is connected"));
        assert_eq!((joined(1, 0), joined(1, 2)), (None, None));
    }

    #[test]
    fn a_path_of_a_client_has_the_name_that_the_status_gives_it() {
        let change = PathChange::Recovered(Duration::from_millis(3040));
        let event = PathEvent { path: PathId(3), link: LinkId(3), change };
        let of = |client| event_of(ServerChange::Path { client, event: event.clone() }).unwrap().to_string();
        assert_eq!(of(tag(0, 0)), "alice (10.0.0.2): path default/path/3 recovered after 3.0 s");
        assert_eq!(of(tag(1, 2)), "alice (10.0.0.2): path bulk/path/3@1 recovered after 3.0 s");
    }
}
