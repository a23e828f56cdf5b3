//! A running client.
//!
//! In: a checked configuration. Out: a client ([`run`]) that ends on SIGINT, SIGTERM, on SIGHUP in a
//! terminal, or on an error that it cannot recover from; or a client inside an app ([`embedded`]). Always
//! holds: changes to the machine are undone however the process ends; after SIGKILL, the next start undoes
//! them.
//!
//! Shard 0 is the main thread: it makes the session, handles signals and the local API, and changes the
//! machine. The other shards, if any, are threads with their own connection, sockets and TUN queue; they join
//! the session.
//!
//! A client for proxies, or inside an app ([`embedded`]), has one shard and no TUN device, changes nothing on
//! the machine, and needs no privilege.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod answers;
mod auto_pipes;
mod bypass;
pub mod check;
mod classes;
mod connection_factory;
mod data_plane;
mod device;
mod echoes;
pub mod embedded;
mod events;
pub mod hold;
mod kill_switch;
mod kind;
mod link_state;
mod link_use;
mod local_names;
mod machine;
mod measured_flows;
mod other_shard;
mod proxy_streams;
mod quotas;
mod running;
mod server_choice;
mod server_name;
mod servers;
mod session;
mod session_keeper;
mod silence_log;
mod sockets;
mod start;
mod status;
mod transports;
mod verdict;

use mpvpn_config::{ClientConfig, ClientOptions, ConfigSource};
use mpvpn_confine as confine;
use mpvpn_dashboard::Dashboard;
use mpvpn_error::RunError;
use mpvpn_identity::tls::LastRefusal;
use mpvpn_links::LinkSocketOptions;
use mpvpn_os::privilege;
use mpvpn_threads::{
    event_loop::EventLoop,
    service_manager::ServiceManager,
    slow_thread::{Services, SlowThread},
};
use mpvpn_tunnel::ClientError;

use kill_switch::ClientKillSwitch;
use kind::ClientKind;
use machine::Machine;
pub(crate) use running::Running;
use servers::Credentials;
use start::ClientParts;

/// Keeps a tunnel up until a signal ends the process. A reload reads the configuration from `origin` again.
///
/// # Errors
/// If the client cannot start, or the server refuses it.
pub fn run(config: ClientConfig, origin: ConfigSource<ClientOptions>) -> Result<(), RunError> {
    let is_proxy = !config.proxies.is_empty();
    if !is_proxy && !privilege::has_net_admin() {
        return Err(RunError::Privilege);
    }
    let mut event_loop = EventLoop::new()?;
    let mut service_manager = ServiceManager::of_process();
    let slot = LastRefusal::default();
    let credentials = Credentials::load(&config, &slot)?;
    let api = mpvpn_api::Server::bind(&config.api_socket)?;
    let metrics = config.metrics.map(|address| mpvpn_api::metrics::Server::bind(address, 0)).transpose()?;
    let dashboard = Dashboard::of_client(&config)?;
    let state_dir = Some(config.state_dir.clone());
    confine::client(&config, origin.file())?;
    let mut resolve = None;
    let (kind, queues, socket_options) = match is_proxy {
        true => {
            let proxy = proxy_streams::listen(&config.proxies, &event_loop.poller)?;
            (ClientKind::Proxy(Box::new(proxy)), Vec::new(), LinkSocketOptions::default())
        }
        false => {
            let (machine, queues) = Machine::open(&config)?;
            resolve = machine.kill_switch.as_ref().map(ClientKillSwitch::server_name_resolver);
            let tuns = machine.tuns().map(str::to_owned).collect();
            let socket_options =
                LinkSocketOptions { tuns, mark: Some(machine.mark), ..LinkSocketOptions::default() };
            (ClientKind::Machine(Box::new(machine)), queues, socket_options)
        }
    };
    let mut parts = ClientParts { kind, queues, socket_options, state_dir, credentials };
    let slow = SlowThread::start(
        Services { api: Some(api), metrics, dashboard, ..Services::default() },
        resolve,
        event_loop.wake.clone(),
    )?;
    if let ClientKind::Machine(machine) = &mut parts.kind {
        machine.runtime = slow.runtime().cloned();
    }
    service_manager.watch("slow", || slow.show_activity());
    let mut running = Running::new((config, origin), &event_loop, parts, slow)?;
    for (name, activity) in &running.shards.activities {
        service_manager.watch(name, || activity.clone());
    }
    running.service_manager = service_manager;
    let result = running.run(&mut event_loop);
    let end = running.end(result.is_ok());
    result.map_err(|error| refusal(error, &slot)).and(end)
}

/// Replaces a TLS error by the reason why the server's certificate was refused, if there is one.
fn refusal(error: RunError, slot: &LastRefusal) -> RunError {
    match error {
        RunError::Tunnel(ClientError::Tls(_)) => slot.take().map_or(error, RunError::from),
        error => error,
    }
}
