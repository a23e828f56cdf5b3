//! Converts changes of the clients' connections into events.
//!
//! Always holds: a client with several connections is reported as one client: shard 0's connection of the default
//! class is the client, shard 0's other connections are its classes, and other shards' connections are not reported.

use mpvpn_control::events::{ClientName, Event, PathName};
use mpvpn_tunnel::{ClientTag, ServerChange};
use mpvpn_types::ClassId;

use crate::{
    events::path_event,
    status::{DEFAULT_CLASS, path_name},
};

/// The event for a change, if it is reported.
pub(super) fn event_of(change: ServerChange) -> Option<Event> {
    let is_first = |client: &ClientTag| client.connection.class() == ClassId::DEFAULT;
    match change {
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
