//! A running client.
//!
//! Its first shard is the main thread: it makes the session, and has the signals, the local API and
//! what is changed on the machine. The others, if any, are threads with a connection, sockets and a
//! queue of the TUN of their own, and join the session.
//!
//! A client for proxies, or inside an app ([`embedded`]), has one shard and no TUN, changes nothing on the machine, and
//! needs no privilege.

mod apps;
pub mod check;
mod classes;
mod device;
pub mod embedded;
mod events;
mod forge;
mod kind;
mod link_use;
mod machine;
mod member;
mod names;
mod pipes;
mod plane;
mod quotas;
mod running;
mod session;
mod sockets;
mod start;
pub(crate) mod ways;

use std::sync::Arc;

use mpvpn_control::{
    api,
    config::{ClientConfig, ClientOptions, ConfigSource},
    metrics,
    tls::{self, LastRefusal},
};
use mpvpn_os::privilege;
use mpvpn_tunnel::ClientError;

use crate::{
    EngineError,
    links::Ground,
    slow::{Offers, Slow},
    turn::Turns,
};
use kind::ClientKind;
use machine::Machine;
pub(crate) use running::Running;
use start::{ClientParts, PATH};

/// Keeps a tunnel up until told to stop. What may change meanwhile is read from `origin` when asked to.
///
/// # Errors
/// If it cannot be started, or the server refuses it.
pub fn run(config: ClientConfig, origin: ConfigSource<ClientOptions>) -> Result<(), EngineError> {
    let is_proxy = !config.proxies.is_empty();
    if !is_proxy && !privilege::has_net_admin() {
        return Err(EngineError::Privilege);
    }
    let mut turns = Turns::new()?;
    let slot = LastRefusal::default();
    let tls = tls::client_config_reporting(&config.trust, &[b"h3"], &slot)?;
    let api = api::Server::bind(&config.api_socket)?;
    let metrics = config.metrics.map(metrics::Server::bind).transpose()?;
    let state_dir = Some(config.state_dir.clone());
    let parts = match is_proxy {
        true => {
            let kind = ClientKind::Proxy(Box::new(apps::listen(&config.proxies, &turns.poller)?));
            ClientParts { kind, queues: Vec::new(), ground: Ground::default(), state_dir }
        }
        false => {
            let (machine, queues) = Machine::open(&config)?;
            let tuns = machine.tuns().map(str::to_owned).collect();
            let ground = Ground { tuns, mark: Some(machine.mark), ..Ground::default() };
            ClientParts { kind: ClientKind::Machine(Box::new(machine)), queues, ground, state_dir }
        }
    };
    let slow = Slow::start(Offers { api: Some(api), metrics, front: None }, None, turns.wake.clone())?;
    let mut running = Running::new((config, origin), &turns, Arc::new(tls), parts, slow)?;
    let result = running.run(&mut turns);
    let end = running.end();
    result.map_err(|error| refusal(error, &slot)).and(end)
}

/// Why the server's certificate was refused, if that is the reason.
fn refusal(error: EngineError, slot: &LastRefusal) -> EngineError {
    match error {
        EngineError::Tunnel(ClientError::Tls(_)) => slot.take().map_or(error, EngineError::from),
        error => error,
    }
}

/// Random bytes for secrets.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], EngineError> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| EngineError::io("get random numbers")(std::io::Error::other("the generator failed")))?;
    Ok(bytes)
}
