//! Addresses of a server's name, and names of addresses.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use mpvpn_input::values::ServerAddr;
use tokio::{task::spawn_blocking, time::timeout};

use crate::dns;

/// Timeout of a reverse lookup. Its result is only a hint for the number of pipes, so a long timeout costs a
/// thread and nothing else. Chosen.
const REVERSE_LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);

/// An app's resolver: returns the addresses of a name, or an error text. It may block.
pub type Resolve = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync>;

/// A question for the name of an address.
#[derive(Debug)]
pub enum ReverseLookup {
    /// The system's resolver is asked.
    BySystem(IpAddr),
    /// These resolvers are asked through the tunnel's device, one after the other.
    InTunnel {
        /// The address in question.
        address: IpAddr,
        /// The resolvers, the best first.
        resolvers: Vec<IpAddr>,
        /// The tunnel's device.
        device: String,
    },
}

impl ReverseLookup {
    /// The address in question.
    pub fn address(&self) -> IpAddr {
        match self {
            Self::BySystem(address) | Self::InTunnel { address, .. } => *address,
        }
    }

    /// Its name, if it has one.
    pub async fn name(self) -> Option<String> {
        match self {
            Self::BySystem(address) => reverse_lookup(address).await,
            Self::InTunnel { address, resolvers, device } => {
                dns::name_in_tunnel(address, &resolvers, &device).await
            }
        }
    }
}

/// The addresses of a server or proxy, by an app's resolver if there is one.
pub async fn look_up(server: ServerAddr, resolve: Option<Resolve>) -> Result<Vec<SocketAddr>, String> {
    let Some(resolve) = resolve else {
        let found = tokio::net::lookup_host((server.host.as_str(), server.port)).await;
        return found.map(Iterator::collect).map_err(|error| error.to_string());
    };
    let port = server.port;
    if let Some(address) = server.socket_addr() {
        return Ok(vec![address]);
    }
    let found = spawn_blocking(move || resolve(&server.host)).await;
    let addresses = found.unwrap_or_else(|_| Err("the resolver of the app panicked".to_owned()))?;
    Ok(addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}

/// The name that the system's resolver finds for an address.
async fn reverse_lookup(address: IpAddr) -> Option<String> {
    let found = timeout(REVERSE_LOOKUP_TIMEOUT, spawn_blocking(move || dns_lookup::lookup_addr(&address)));
    let name = found.await.ok()?.ok()?.ok()?;
    // If there is no name, the system returns the address as text.
    (!name.is_empty() && name.parse::<IpAddr>().is_err()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_name_that_the_hosts_file_gives_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = runtime.block_on(reverse_lookup(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(name.as_deref(), Some("localhost"));
    }
}
