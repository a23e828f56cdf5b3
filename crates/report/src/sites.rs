//! Networks behind clients, as the local API and events show them.

use mpvpn_config::{SiteConfig, SiteNetwork};
use mpvpn_status::{AnnouncedNetwork, NetworkState};
use mpvpn_tunnel::{Assignment, Site, SiteState, SiteTable};

/// The state of an announced network, and why it is not in use.
pub fn state_of(state: SiteState) -> (NetworkState, &'static str) {
    match state {
        SiteState::OfAnother => (NetworkState::Refused, "it is behind another client"),
        SiteState::InUse => (NetworkState::InUse, ""),
        SiteState::Standby => (
            NetworkState::Standby,
            "another session of this user has it, and this one takes over when that ends",
        ),
        SiteState::NotAllowed => (
            NetworkState::Refused,
            "the user may not announce it: `mpvpn user set NAME --route NETWORK` at the server gives leave",
        ),
        SiteState::Taken => (
            NetworkState::Refused,
            "it overlaps a network behind another user: announce it as one that nobody has, \
             { network = \"…\", as = \"…\" }",
        ),
        SiteState::OfServer => (
            NetworkState::Refused,
            "it overlaps a network of the server, or has an address of a link of this client",
        ),
        SiteState::TooMany => (NetworkState::Refused, "too many networks are announced"),
    }
}

/// The networks that a client announces. `given`: what the server says about them, if it does; `is_up`: the
/// tunnel works; `contains_server`: the way to the server would lead into a network.
pub fn of_client(
    config: &SiteConfig,
    given: Option<&[Site]>,
    is_up: bool,
    contains_server: impl Fn(&SiteNetwork) -> bool,
) -> Vec<AnnouncedNetwork> {
    let of_network = |one: &SiteNetwork| {
        let own = |site: &&Site| site.state != SiteState::OfAnother && site.net.contains(&one.announced);
        let (state, reason) = match (given, given.and_then(|sites| sites.iter().find(own))) {
            _ if contains_server(one) => (NetworkState::Refused, "it contains the address of the server"),
            _ if !is_up => (NetworkState::Waiting, "the tunnel does not work"),
            (_, Some(site)) => state_of(site.state),
            (Some(_), None) => (NetworkState::Waiting, "the server has not answered yet"),
            (None, None) => (NetworkState::Unknown, "this server does not say whether it takes networks"),
        };
        AnnouncedNetwork {
            network: one.announced,
            local: (one.network != one.announced).then_some(one.network),
            user: None,
            state,
            reason: reason.to_owned(),
        }
    };
    config.networks.iter().map(of_network).collect()
}

/// The networks that a server assigned to a client, whose tunnel others share or not.
pub fn assigned(given: &Assignment, is_shared: bool) -> Vec<AnnouncedNetwork> {
    let (state, reason) = match is_shared {
        true => (NetworkState::InUse, ""),
        false => (NetworkState::Unused, "the server assigned it, and hosts of a LAN use it with --share"),
    };
    let networks = given.networks.iter().map(|network| AnnouncedNetwork {
        network: *network,
        local: None,
        user: None,
        state,
        reason: reason.to_owned(),
    });
    networks.collect()
}

/// The networks behind the clients of a server.
pub fn of_server(table: &SiteTable) -> Vec<AnnouncedNetwork> {
    let of_site = |(user, site): (&str, &Site)| {
        let (state, reason) = state_of(site.state);
        let user = Some(user.to_owned());
        AnnouncedNetwork { network: site.net, local: None, user, state, reason: reason.to_owned() }
    };
    table.announced().map(of_site).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_shows_what_the_server_says_about_each_of_its_networks() {
        let network = |network: &str, announced: &str| SiteNetwork {
            network: network.parse().unwrap(),
            announced: announced.parse().unwrap(),
        };
        let config = SiteConfig {
            networks: vec![
                network("192.168.1.0/24", "10.77.1.0/24"),
                network("192.168.7.0/24", "192.168.7.0/24"),
                network("203.0.113.0/24", "203.0.113.0/24"),
            ],
            ..SiteConfig::default()
        };
        let site = |net: &str, state| Site { net: net.parse().unwrap(), state };
        let given = [
            site("10.77.1.0/24", SiteState::Taken),
            site("192.168.7.0/24", SiteState::OfAnother),
            site("192.168.7.0/24", SiteState::InUse),
        ];
        let states = |given: Option<&[Site]>, is_up| {
            let all = of_client(&config, given, is_up, |one| one.network == config.networks[2].network);
            all.into_iter().map(|one| one.state).collect::<Vec<_>>()
        };
        use NetworkState::{InUse, Refused, Unknown, Waiting};
        assert_eq!(states(Some(&given), true), [Refused, InUse, Refused]);
        assert_eq!(states(Some(&given), false), [Waiting, Waiting, Refused]);
        assert_eq!(states(Some(&[]), true), [Waiting, Waiting, Refused]);
        assert_eq!(states(None, true), [Unknown, Unknown, Refused]);
    }
}
