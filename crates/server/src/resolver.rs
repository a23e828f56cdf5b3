//! The server as a resolver for its clients.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use mpvpn_config::ServerDns;
use mpvpn_names::dns::{Forwarder, PORT};
use mpvpn_os::dns::system_resolvers;
use mpvpn_tunnel::Registry;
use tokio::runtime::Handle;

use super::names::TunnelNames;

/// Starts the server's own resolver at its addresses in the tunnel, if it is to have one. Returns where it
/// listens. A port that is taken is no reason not to serve: clients then keep their own resolvers.
pub(super) fn start(
    config: &ServerDns,
    tunnel: &[IpNet],
    (registry, names): (&Registry, Option<&TunnelNames>),
    runtime: Option<&Handle>,
) -> Vec<IpAddr> {
    match (config, runtime) {
        (ServerDns::Own, Some(runtime)) => {
            let listens = |own: &&IpNet| listen(**own, tunnel, (registry, names), runtime);
            tunnel.iter().filter(listens).map(IpNet::addr).collect()
        }
        _ => Vec::new(),
    }
}

/// The resolvers to suggest to clients. `own`: where the server's own listens.
pub(super) fn suggested(config: &ServerDns, own: &[IpAddr]) -> Vec<IpAddr> {
    match config {
        ServerDns::Servers(servers) => servers.clone(),
        ServerDns::Own => own.to_vec(),
        ServerDns::Off => Vec::new(),
    }
}

fn listen(
    own: IpNet,
    tunnel: &[IpNet],
    (registry, names): (&Registry, Option<&TunnelNames>),
    runtime: &Handle,
) -> bool {
    let own_addresses: Vec<IpAddr> = tunnel.iter().map(IpNet::addr).collect();
    let resolvers = move |_: &str| {
        // A client on this machine may have made this server the resolver of its machine.
        let others = system_resolvers().into_iter().filter(|ip| !own_addresses.contains(ip));
        others.map(|ip| SocketAddr::new(ip, PORT)).collect::<Vec<_>>().into()
    };
    let registry = registry.clone();
    let user_of = move |host| registry.user_of(host).unwrap_or_default();
    match Forwarder::bind(&[own.addr()], PORT, tunnel, Arc::new(user_of), Arc::new(resolvers)) {
        Ok(forwarder) => {
            let forwarder = match names {
                Some(names) => forwarder.with_zone(Arc::new(names.clone())),
                None => forwarder,
            };
            runtime.spawn(forwarder.serve());
            true
        }
        Err(error) => {
            tracing::warn!(
                address = %own.addr(), %error,
                "cannot answer clients' DNS queries: end the program that has port 53 there, or suggest another resolver with \
                 --dns ADDR, or none with --dns off"
            );
            false
        }
    }
}
