//! The names that a server answers its clients: of users, and of hosts that its configuration names.
//!
//! In: the sessions, the configuration, the client that asks. Out: addresses and names. Always holds: where
//! clients are kept from each other, a client learns its own name and those of the configuration only.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use mpvpn_config::{DnsName, ServerConfig};
use mpvpn_names::dns::Zone;
use mpvpn_tunnel::Registry;

/// The names, shared with the resolver.
#[derive(Clone)]
pub(super) struct TunnelNames {
    domain: String,
    registry: Registry,
    settings: Arc<Mutex<Settings>>,
}

#[derive(Default)]
struct Settings {
    names: Vec<DnsName>,
    is_isolated: bool,
}

impl TunnelNames {
    /// The names of a server with this configuration; `None` if it has no domain.
    pub(super) fn new(config: &ServerConfig, registry: &Registry) -> Option<Self> {
        let domain = config.dns_names.domain.as_ref()?.as_str().to_owned();
        let names = Self { domain, registry: registry.clone(), settings: Arc::default() };
        names.update(config);
        Some(names)
    }

    /// Takes the configuration as it is now.
    pub(super) fn update(&self, config: &ServerConfig) {
        let names = config.dns_names.names.clone();
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) =
            Settings { names, is_isolated: config.isolate };
    }

    /// Whether a host may know a user.
    fn may_know(&self, settings: &Settings, asker: IpAddr, user: &str) -> bool {
        !settings.is_isolated
            || self.registry.user_of(asker).is_some_and(|own| own.eq_ignore_ascii_case(user))
    }
}

impl Zone for TunnelNames {
    fn domain(&self) -> &str {
        &self.domain
    }

    fn addresses(&self, asker: IpAddr, name: &str) -> Option<Vec<IpAddr>> {
        let settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = settings.names.iter().find(|one| one.name() == name) {
            return Some(one.address.clone());
        }
        let addresses = self.registry.addresses_of(name);
        (!addresses.is_empty() && self.may_know(&settings, asker, name)).then_some(addresses)
    }

    fn name(&self, asker: IpAddr, address: IpAddr) -> Option<String> {
        let settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = settings.names.iter().find(|one| one.address.contains(&address)) {
            return Some(one.name().to_owned());
        }
        let user = self.registry.user_at(address)?;
        self.may_know(&settings, asker, &user).then(|| user.to_ascii_lowercase())
    }
}
