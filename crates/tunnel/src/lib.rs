//! The client and the server of the tunnel, as state machines.
//!
//! In: UDP payloads with their link or local address, packets read from the TUN, link state, and the time.
//! Out: UDP payloads to send, packets for the TUN, events that the edge turns into addresses and routes, and
//! the next deadline.
//!
//! Use it in batches: any number of `handle_datagram`, then `handle_batch`, then `poll_tun` until
//! it is empty; any number of `handle_tun`; `handle_timeout` when it is time; then `poll_transmit`
//! until it is empty.
//!
//! Always holds:
//! - No I/O, no clock, no thread: a test runs two ends against each other in simulated time, and every run is
//!   the same.
//! - A client accepts only packets for its own addresses, a server only packets from the addresses that it
//!   gave to that client (BCP 38).
//! - A client that loses its connection keeps its addresses, and gets the same ones back while the server
//!   remembers it.
//! - Everything stored is bounded: by the queues of a session and the flow control of a connection.
#![forbid(unsafe_code)]
// Tests need a start time.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod accounts;
mod class;
mod class_connections;
mod client;
mod coalescing;
mod echo_watch;
mod events;
mod forward;
mod handshake;
mod http;
mod instance;
mod mtu;
mod multipath;
mod other_servers;
mod pool;
mod registry;
mod relay;
mod server;
mod session_flows;
mod shapers;
mod sites;
mod udp;
mod user_memory;
#[cfg(test)]
#[path = "../../masque/src/tests/vectors.rs"]
mod vectors;

pub use accounts::UserRates;
pub use class::{ClassProfile, UserLimits};
pub use class_connections::{ClassConnections, ClassSetup, Heard};
pub use client::{
    AddressesInUse, Assignment, Client, ClientConfig, ClientError, ClientEvent, ClientReport, ClientState,
    FlowReport, FlowTransport, Outage, TunnelMode, UdpFlowEvent,
};
pub use echo_watch::{EchoLinks, EchoWatch};
pub use events::{
    ClassChange, ClientChange, ClientTag, FailureReason, PathChange, PathEvent, PathFailure, Reinjected,
    ServerChange,
};
pub use forward::{ForwardError, ForwardEvent, Forwarder, ResponseStatus};
pub use instance::ClientInstance;
pub use mpvpn_masque::capsule::{LinkPolicy, Site, SiteState};
pub use mpvpn_quic::ProcessBytes;
pub use multipath::{
    FecCounters, PathFecCounters, PathReport, ResequencingCounters, Role, TrafficCounters, TrafficRates,
    extensions::passes_gateways,
};
pub use other_servers::{OtherServer, OtherServers, ServerAnswer};
pub use pool::{AddressPool, AddressSet, Addresses, LeaseRecord, PoolExhausted, RestoreError, SessionSecret};
pub use registry::{ConnectionNumber, ConnectionSlot, Registry, SecretSharing};
pub use relay::{RelayId, RelayRead};
pub use server::{
    Authenticate, AuthenticatedUser, CertificateId, ClosedConnection, CredentialId, FilterRequest,
    Reconfiguration, Server, ServerConfig, ServerCounters, ServerEvent, SessionReport, TunOutcome,
};
pub use sites::{MAX_NETWORKS_OF_SESSION, SiteTable};
pub use udp::UdpId;
