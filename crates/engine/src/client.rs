//! A running client.
//!
//! Shard 0 is the main thread: it makes the session, handles signals and the local API, and changes the
//! machine. The other shards, if any, are threads with their own connection, sockets and TUN queue; they join
//! the session.
//!
//! A client for proxies, or inside an app ([`embedded`]), has one shard and no TUN device, changes nothing on
//! the machine, and needs no privilege.

mod auto_pipes;
pub mod check;
mod classes;
mod connection_factory;
mod data_plane;
mod device;
mod echoes;
pub mod embedded;
mod events;
mod kill_switch;
mod kind;
mod link_use;
mod local_names;
mod machine;
mod measured_flows;
mod other_shard;
mod proxy_streams;
mod quotas;
mod running;
mod server_name;
mod session;
mod session_keeper;
mod sockets;
mod start;
pub(crate) mod transports;

use std::sync::Arc;

use mpvpn_config::{ClientConfig, ClientOptions, ConfigSource};
use mpvpn_dashboard::Dashboard;
use mpvpn_identity::tls::{self, LastRefusal};
use mpvpn_os::privilege;
use mpvpn_tunnel::ClientError;

use crate::{
    EngineError, confine,
    event_loop::EventLoop,
    links::LinkSocketOptions,
    service_manager::ServiceManager,
    slow_thread::{Services, SlowThread},
};
use kind::ClientKind;
use machine::Machine;
pub(crate) use running::Running;
use start::{CONNECT_IP_PATH, ClientParts};

/// Keeps a tunnel up until a signal ends the process. A reload reads the configuration from `origin` again.
///
/// # Errors
/// If the client cannot start, or the server refuses it.
pub fn run(config: ClientConfig, origin: ConfigSource<ClientOptions>) -> Result<(), EngineError> {
    let is_proxy = !config.proxies.is_empty();
    if !is_proxy && !privilege::has_net_admin() {
        return Err(EngineError::Privilege);
    }
    let mut event_loop = EventLoop::new()?;
    let mut service_manager = ServiceManager::of_process();
    let slot = LastRefusal::default();
    let tls = tls::client_config_reporting(&config.trust, config.cert.as_ref(), &[b"h3"], &slot)?;
    let api = mpvpn_api::Server::bind(&config.api_socket)?;
    let metrics = config.metrics.map(|address| mpvpn_api::metrics::Server::bind(address, 0)).transpose()?;
    let dashboard = Dashboard::of_client(&config)?;
    let state_dir = Some(config.state_dir.clone());
    let token = config.load_token()?;
    confine::client(&config, origin.file())?;
    let mut resolve = None;
    let mut parts = match is_proxy {
        true => {
            let kind =
                ClientKind::Proxy(Box::new(proxy_streams::listen(&config.proxies, &event_loop.poller)?));
            ClientParts {
                kind,
                queues: Vec::new(),
                socket_options: LinkSocketOptions::default(),
                state_dir,
                token,
            }
        }
        false => {
            let (machine, queues) = Machine::open(&config)?;
            resolve = machine.server_name_resolver();
            let tuns = machine.tuns().map(str::to_owned).collect();
            let socket_options =
                LinkSocketOptions { tuns, mark: Some(machine.mark), ..LinkSocketOptions::default() };
            ClientParts {
                kind: ClientKind::Machine(Box::new(machine)),
                queues,
                socket_options,
                state_dir,
                token,
            }
        }
    };
    let slow = SlowThread::start(
        Services { api: Some(api), metrics, dashboard, ..Services::default() },
        resolve,
        event_loop.wake.clone(),
    )?;
    if let ClientKind::Machine(machine) = &mut parts.kind {
        machine.set_runtime(slow.runtime());
    }
    service_manager.watch("slow", || slow.show_activity());
    let mut running = Running::new((config, origin), &event_loop, Arc::new(tls), parts, slow)?;
    for (name, activity) in &running.shards.activities {
        service_manager.watch(name, || activity.clone());
    }
    running.service_manager = service_manager;
    let result = running.run(&mut event_loop);
    let end = running.end(result.is_ok());
    result.map_err(|error| refusal(error, &slot)).and(end)
}

/// Replaces a TLS error by the reason why the server's certificate was refused, if there is one.
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
