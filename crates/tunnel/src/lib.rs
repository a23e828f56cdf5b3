//! The client and the server of the tunnel, as state machines.
//!
//! In: UDP payloads with the place where they arrived, packets read from the TUN, what the kernel
//! says about links, and the time. Out: UDP payloads to send, packets for the TUN, events that the
//! edge turns into addresses and routes, and the time of the next call.
//!
//! Use it in batches: any number of `handle_datagram`, then `handle_batch`, then `poll_tun` until
//! it is empty; any number of `handle_tun`; `handle_timeout` when it is time; then `poll_transmit`
//! until it is empty.
//!
//! Always holds:
//! - No I/O, no clock, no thread: two ends can be run against each other in a test, as fast as the
//!   machine goes, and every run gives the same.
//! - A client accepts only packets for its own addresses, a server only packets from the addresses
//!   that it gave to that client (BCP 38).
//! - A client that loses its connection keeps its addresses, and gets the same ones back while the
//!   server remembers it.
//! - What waits is bounded: per session by its queues, per connection by flow control.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod attempt;
mod carrier;
mod class;
mod client;
mod events;
mod fleet;
mod forward;
mod http;
mod mtu;
mod pool;
mod registry;
mod relay;
mod server;
mod shapers;
mod udp;

pub use carrier::{Counters, FecCounters, LaneCounters, PathReport, Rates, Role};
pub use class::{ClassProfile, Limits};
pub use client::{
    Assignment, Carried, Carries, Client, ClientConfig, ClientError, ClientEvent, ClientReport, ClientState,
    FlowReport, UdpNews,
};
pub use events::{
    ClassChange, ClientChange, ClientTag, FailureReason, PathChange, PathEvent, PathFailure, Reinjected,
    ServerChange,
};
pub use fleet::{ClassSetup, Fleet};
pub use forward::{Answered, ForwardError, ForwardEvent, Forwarder};
pub use mpvpn_masque::capsule::LinkPolicy;
pub use pool::{AddressSet, Addresses, Exhausted, Pool, Secret};
pub use registry::{Member, Registry, Seat};
pub use relay::{RelayId, RelayRead};
pub use server::{Authenticate, Departed, Page, Server, ServerConfig, ServerEvent, SessionReport, Taken};
pub use udp::UdpId;

/// The request header by which a client asks the server to schedule its downlink as it does its
/// uplink.
pub(crate) const SCHEDULER_HEADER: &str = "mpvpn-scheduler";

/// The request header that says which of several connections of a session this is, as a number (an
/// Integer of RFC 9651); a server that knows the field repeats it in its response.
pub(crate) const MEMBER_HEADER: &str = "mpvpn-member";

/// The request header in which a client says which class of its traffic the connection carries, see
/// [`ClassProfile`].
pub(crate) const CLASS_HEADER: &str = "mpvpn-class";

/// The request header in which a client names the congestion controller that the server is to use on this connection's paths
/// (a Token of RFC 9651). A server that has it repeats the field in its response.
pub(crate) const CC_HEADER: &str = "mpvpn-cc";

/// The request header in which a client offers numbered packets: the context ID for them, an Integer of
/// RFC 9651. A server that knows the field repeats it in its response.
pub(crate) const ORDER_HEADER: &str = "mpvpn-order";

/// The context ID that our client offers; clients allocate even ones (RFC 9484 §6), and 0 is taken.
pub(crate) const ORDER_CONTEXT: u64 = 2;

/// The request header in which a client offers heartbeats that report what is heard: the context ID for them,
/// an Integer of RFC 9651. A server that knows the field repeats it in its response.
pub(crate) const HEARTBEATS_HEADER: &str = "mpvpn-heartbeats";

/// The context ID that our client offers for them.
pub(crate) const HEARTBEATS_CONTEXT: u64 = 4;

/// The request header in which a client offers that bytes of streams which were on their way on a path that died
/// come as datagrams: the context ID for them, an Integer of RFC 9651. A server that knows the field repeats it in its
/// response.
pub(crate) const RESCUE_HEADER: &str = "mpvpn-rescue";

/// The context ID that our client offers for them.
pub(crate) const RESCUE_CONTEXT: u64 = 6;

/// The request header in which a client offers that both ends tell how far streams have come: the context ID for that, an
/// Integer of RFC 9651. A server that knows the field repeats it in its response.
pub(crate) const PROGRESS_HEADER: &str = "mpvpn-progress";

/// The context ID that our client offers for it.
pub(crate) const PROGRESS_CONTEXT: u64 = 8;

/// The request header in which a client with classes offers that both ends tell what their clocks say: the context ID for
/// that, an Integer of RFC 9651. A server that knows the field repeats it in its response.
pub(crate) const CLOCKS_HEADER: &str = "mpvpn-clocks";

/// The context ID that our client offers for it.
pub(crate) const CLOCKS_CONTEXT: u64 = 12;

/// The request header in which a client offers groups of packets with repair: the context ID for them, an Integer of
/// RFC 9651. A server that knows the field, and numbered packets, repeats it in its response.
pub(crate) const FEC_HEADER: &str = "mpvpn-fec";

/// The context ID that our client offers for them.
pub(crate) const FEC_CONTEXT: u64 = 10;

/// The request header that says how much repair the client sends and asks the server to send: `auto`, or packets and packets
/// of repair as in `10+2`.
pub(crate) const FEC_POLICY_HEADER: &str = "mpvpn-fec-policy";

/// The request header by which a client asks the server to send each packet so often, each time over another link, as it does
/// itself (an Integer of RFC 9651).
pub(crate) const COPIES_HEADER: &str = "mpvpn-copies";

/// The header with which a client offers to tell about its links by LINK capsules, and a server accepts
/// (a Boolean of RFC 9651).
pub(crate) const LINKS_HEADER: &str = "mpvpn-links";
pub(crate) const TRUE: &str = "?1";

/// The response header in which the server names its networks, so that clients know who their
/// neighbours are: comma-separated prefixes, as in `10.0.0.0/24, fd00::/64`.
pub(crate) const NETWORKS_HEADER: &str = "mpvpn-networks";

/// The response header in which the server says that it makes TCP connections for clients by CONNECT wherever it
/// would translate their packets' addresses, which is everywhere but in its networks (a Boolean of RFC 9651). With a
/// 501 it means that there are no packets, but such connections.
pub(crate) const STREAMS_HEADER: &str = "mpvpn-streams";

/// The response header in which the server says the same of UDP payloads, by CONNECT-UDP.
pub(crate) const UDP_HEADER: &str = "mpvpn-udp";

/// The response header in which the server names resolvers that it suggests: comma-separated addresses, the best
/// first, as in `10.0.0.1, fd00::1`.
pub(crate) const DNS_HEADER: &str = "mpvpn-dns";
