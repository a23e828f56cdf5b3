//! The TCP connections and UDP sockets that one shard of a server opens for its clients (CONNECT, RFC 9110
//! §9.3.6; CONNECT-UDP, RFC 9298).
//!
//! In: the clients' requests ([`Egress::connect`]), readiness of their streams and of sockets, payloads,
//! resolved names, time. Out: calls of [`Relays`], which move bytes and payloads to and from the clients.
//! [`Access`] decides what is forbidden; `local_addresses` knows this machine's addresses, `name_cache`
//! resolved names; `attempts` connects, a [`Splice`] moves bytes, `udp_flow` payloads.
//!
//! Always holds:
//! - The work for one connection does not grow with the number of connections, except logarithmically in the
//!   timers.
//! - No connection leads where the rules forbid it: every address is checked after its name was resolved.
//! - A connection buffers at most 64 KiB or one chunk of its client, and reads nothing that its client's
//!   stream does not accept.
//! - Each request ends with one call of `failed`, or has one call of `opened` first; after
//!   [`Egress::on_client_gone`] nothing more is called for it.
//! - TCP connections and UDP sockets are bounded together, for all users and for each
//!   ([`UserLimiter`]), and so are name lookups.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod attempts;
mod budget;
mod local_addresses;
mod name_cache;
mod udp_flow;

use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use mpvpn_access::Access;
use mpvpn_masque::connect::{Authority, Host, ProxyError};
use mpvpn_names::resolver::ResolverClient;
use mpvpn_os::{
    RecvBatch, TcpSocket,
    poll::{Event, Interest},
};
use mpvpn_report::flows::Connection;
use mpvpn_sockets::splice::{ByteStreams, Context, Splice, SpliceBuffers};
use mpvpn_status::EffectiveFlowMode;
use slab::Slab;

use attempts::{Attempts, AttemptsState};
use budget::Permit;
pub use budget::{UserLimiter, lookup_limiter, relay_limiter};
use local_addresses::LocalAddresses;
pub use local_addresses::{ReadLocalAddresses, local_address_reader};
use name_cache::{LookupResult, NameCache};
use udp_flow::{EarlyPayloads, UdpFlow};

/// Poller tokens of the egress begin here.
pub const FIRST_EGRESS_TOKEN: u64 = 1 << 32;

/// How long resolving and connecting may take together. Longer: dead targets keep their budget. Shorter: slow
/// targets fail. Chosen; below the 30 s of proxies and the 60 s of the gateway.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The kernel's memory of a relay in which bytes wait is looked at after this time, and each time again.
/// Longer: a user takes more of it before that counts, 125 MB a second at 1 Gbit/s; shorter: system calls.
/// As often as the process measures what it has allocated.
const KERNEL_LOOK_DELAY: Duration = Duration::from_millis(250);
/// Messages of one receive call of a UDP socket.
const MAX_MESSAGES_PER_RECV: usize = 16;
/// Bits of a token: the relay's slot in the table, then the number of the attempt, then the relay's
/// generation.
const SLOT_BITS: u32 = 27;
const ATTEMPT_BITS: u32 = 5;

/// The clients' ends of relays. [`Egress::on_stream_readable`] must be called when a blocked stream has more,
/// and [`Egress::on_stream_writable`] when a full one accepts bytes again.
pub trait Relays: ByteStreams {
    /// The connection is established, so the client gets its response.
    fn opened(&mut self, now: Instant, id: Self::Id);

    /// The request failed. `reason` is text for people.
    fn failed(&mut self, now: Instant, id: Self::Id, failure: ProxyError, reason: String);

    /// Resets both halves: the target reset the connection, or it broke, or a UDP flow was idle for too long.
    fn abort(&mut self, now: Instant, id: Self::Id);

    /// The kernel holds so many bytes for the relay, which waits.
    fn in_kernel(&mut self, now: Instant, id: Self::Id, bytes: usize);

    /// Delivers a UDP payload from the target.
    fn payload(&mut self, now: Instant, id: Self::Id, payload: &[u8]);
}

/// The transport protocol that a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A connection.
    Tcp,
    /// A socket for datagrams.
    Udp,
}

/// The parts of an [`Egress`].
pub struct EgressSetup {
    /// The rules of where clients may connect.
    pub access: Arc<Access>,
    /// Reads the addresses of this machine.
    pub addresses: ReadLocalAddresses,
    /// This shard's access to the resolver.
    pub resolver: ResolverClient,
    /// The budget of sockets, shared by all shards.
    pub relays: UserLimiter,
    /// The budget of name lookups, shared by all shards.
    pub lookups: UserLimiter,
}

/// The relays of one shard.
pub struct Egress<Id> {
    access: Arc<Access>,
    local_addresses: LocalAddresses,
    name_cache: NameCache<u64>,
    resolver: ResolverClient,
    relay_budget: UserLimiter,
    lookup_budget: UserLimiter,
    table: Slab<Relay<Id>>,
    slots: HashMap<Id, usize>,
    /// The one timer of each relay, with its slot in the table.
    timers: BTreeSet<(Instant, usize)>,
    /// The generation of the newest relay; it tells stale tokens from valid ones.
    generation: u32,
    /// The number of established TCP connections.
    pub open_connections: usize,
    /// The number of UDP flows.
    pub open_udp_flows: usize,
    buffers: SpliceBuffers,
    batch: RecvBatch,
}

struct Relay<Id> {
    id: Id,
    /// The upper bits of its tokens.
    generation: u32,
    since: Instant,
    /// The time of its timer; also in `timers`.
    due: Instant,
    to: Authority,
    permit: Permit,
    stage: Stage,
}

enum Stage {
    /// Resolving the name for a TCP connection, until this deadline.
    ResolvingTcp(Instant),
    /// Resolving the name for a UDP flow.
    ResolvingUdp(EarlyPayloads),
    /// Connecting, until this deadline.
    Connecting(Instant, Box<Attempts>),
    Open(Splice),
    Udp(UdpFlow),
}

impl<Id: Copy + Eq + std::hash::Hash + fmt::Debug> Egress<Id> {
    /// An egress without relays.
    ///
    /// # Errors
    /// If the addresses of this machine cannot be read.
    pub fn new(now: Instant, setup: EgressSetup) -> Result<Self, String> {
        Ok(Self {
            access: setup.access,
            local_addresses: LocalAddresses::new(now, setup.addresses)?,
            name_cache: NameCache::new(),
            resolver: setup.resolver,
            relay_budget: setup.relays,
            lookup_budget: setup.lookups,
            table: Slab::new(),
            slots: HashMap::new(),
            timers: BTreeSet::new(),
            generation: 0,
            open_connections: 0,
            open_udp_flows: 0,
            buffers: SpliceBuffers::default(),
            batch: RecvBatch::new(MAX_MESSAGES_PER_RECV),
        })
    }

    /// Changes the rules of where clients may connect, for requests from now on.
    pub fn set_access(&mut self, access: Arc<Access>) {
        self.access = access;
    }

    /// The clients' connections and flows, established or not.
    pub fn flows(&self) -> impl Iterator<Item = Connection<'_>> {
        self.table.iter().map(|(_, relay)| {
            let (lane, moved) = match &relay.stage {
                Stage::Open(splice) => (EffectiveFlowMode::Stream, Some(splice.transfer_state())),
                Stage::ResolvingTcp(_) | Stage::Connecting(..) => (EffectiveFlowMode::Stream, None),
                Stage::Udp(flow) => (EffectiveFlowMode::Udp, Some(flow.transfer_state())),
                Stage::ResolvingUdp(_) => (EffectiveFlowMode::Udp, None),
            };
            Connection::of_client(relay.permit.key(), &relay.to, lane, relay.since, moved)
        })
    }

    /// Starts a relay for the stream `id` of `user` to `to`. The result is a call of `cx.streams`, possibly
    /// before this returns.
    pub fn connect<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        id: Id,
        (user, to, transport): (&str, Authority, Transport),
    ) {
        // A stream has one relay.
        self.on_client_gone(id);
        let permit = match self.relay_budget.try_acquire(user.into()) {
            Ok(permit) if self.table.len() < 1 << SLOT_BITS => permit,
            Ok(_) => return refuse(cx, id, &to, ProxyError::Busy, "the table is full"),
            Err(limit) => return refuse(cx, id, &to, ProxyError::Busy, limit),
        };
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        let until = cx.now + CONNECT_TIMEOUT;
        let stage = match transport {
            Transport::Tcp => Stage::ResolvingTcp(until),
            Transport::Udp => Stage::ResolvingUdp(EarlyPayloads::default()),
        };
        let generation = self.generation;
        let relay = Relay { id, generation, since: cx.now, due: until, to, permit, stage };
        let slot = self.table.insert(relay);
        self.slots.insert(id, slot);
        self.timers.insert((until, slot));
        self.resolve(cx, slot);
    }

    /// Sends a client's payload to the target of the flow `id`.
    pub fn send_payload(&mut self, now: Instant, id: Id, payload: &[u8]) {
        let Some(&slot) = self.slots.get(&id) else { return };
        match &mut self.table[slot].stage {
            Stage::Udp(flow) => flow.send(now, payload),
            Stage::ResolvingUdp(early) => early.keep(payload),
            _ => {}
        }
    }

    /// The stream `id` has bytes, or has ended: moves them to the target.
    pub fn on_stream_readable<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, id: Id) {
        let Some(&slot) = self.slots.get(&id) else { return };
        self.move_bytes(cx, slot, |splice, cx, buffers| splice.on_stream_readable(cx, id, buffers));
    }

    /// The stream `id` accepts bytes again.
    pub fn on_stream_writable<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, id: Id) {
        let Some(&slot) = self.slots.get(&id) else { return };
        self.move_bytes(cx, slot, |splice, cx, buffers| splice.move_to_stream(cx, id, buffers));
    }

    /// The client has reset the stream, or has disconnected: resets the connection without a further call.
    pub fn on_client_gone(&mut self, id: Id) {
        let Some(&slot) = self.slots.get(&id) else { return };
        let token = self.token(slot, 0);
        let relay = self.remove(slot);
        match relay.stage {
            Stage::Open(splice) => splice.reset(),
            Stage::ResolvingTcp(_) | Stage::ResolvingUdp(_) => {
                if let Host::Name(name) = &relay.to.host {
                    self.name_cache.remove_waiter(name, token);
                }
            }
            Stage::Connecting(..) | Stage::Udp(_) => {}
        }
    }

    /// Handles an event of a socket, whose token is at least [`FIRST_EGRESS_TOKEN`].
    pub fn on_socket_ready<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, event: Event) {
        let Some((slot, attempt)) = self.locate(event.token) else { return };
        let Some(relay) = self.table.get_mut(slot) else { return };
        let id = relay.id;
        match &mut relay.stage {
            Stage::ResolvingTcp(_) | Stage::ResolvingUdp(_) => {}
            Stage::Udp(flow) => {
                let each = |payload: &[u8]| cx.streams.payload(cx.now, id, payload);
                if let Err(error) = flow.receive(cx.now, &mut self.batch, each) {
                    self.abort_relay(cx, slot, &error);
                }
            }
            Stage::Connecting(_, attempts) => match attempts.on_socket_ready(cx.now, attempt) {
                Some(socket) => self.on_connected(cx, slot, socket, event.token),
                None => self.advance_attempts(cx, slot),
            },
            // A stale event of an attempt that lost the race.
            Stage::Open(splice) if splice.token() != event.token => {}
            Stage::Open(_) => self
                .move_bytes(cx, slot, |splice, cx, buffers| splice.on_socket_ready(cx, event, id, buffers)),
        }
    }

    /// Handles the resolver's answers, after a wake-up call.
    pub fn poll_resolver<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>) {
        while let Some(answer) = self.resolver.next() {
            let (waiting, found) = self.name_cache.complete(cx.now, &answer.name, answer.result);
            for token in waiting {
                if let Some((slot, _)) = self.locate(token) {
                    self.on_resolved(cx, slot, &found);
                }
            }
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Handles expired timers.
    pub fn handle_timeout<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>) {
        while let Some(&(_, slot)) = self.timers.first().filter(|(due, _)| *due <= cx.now) {
            match &self.table[slot].stage {
                Stage::ResolvingTcp(_) | Stage::ResolvingUdp(_) => {
                    self.fail_timed_out(cx, slot, "its name was not resolved in time")
                }
                Stage::Connecting(until, _) if *until <= cx.now => {
                    self.fail_timed_out(cx, slot, "it does not answer");
                }
                Stage::Connecting(..) => self.advance_attempts(cx, slot),
                Stage::Open(splice) => match splice.expires() {
                    expires if expires <= cx.now => {
                        self.abort_relay(cx, slot, &io::ErrorKind::TimedOut.into());
                    }
                    expires => {
                        let bytes = if splice.waits() { splice.socket().memory() } else { 0 };
                        cx.streams.in_kernel(cx.now, self.table[slot].id, bytes);
                        let next_look = (bytes > 0).then_some(cx.now + KERNEL_LOOK_DELAY);
                        self.set_timer(slot, next_look.map_or(expires, |at| at.min(expires)));
                    }
                },
                Stage::Udp(flow) => match flow.expires() {
                    expires if expires <= cx.now => {
                        self.abort_relay(cx, slot, &io::ErrorKind::TimedOut.into());
                    }
                    expires => self.set_timer(slot, expires),
                },
            }
        }
    }

    /// Resets all connections without further calls.
    pub fn end(&mut self) {
        for relay in self.table.drain() {
            if let Stage::Open(splice) = relay.stage {
                splice.reset();
            }
        }
        self.slots.clear();
        self.timers.clear();
        (self.open_connections, self.open_udp_flows) = (0, 0);
    }

    /// Starts to resolve a new relay's target.
    fn resolve<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, slot: usize) {
        let name = match &self.table[slot].to.host {
            Host::Addr(ip) => {
                let found = Ok([*ip].into());
                return self.on_resolved(cx, slot, &found);
            }
            Host::Name(name) => name.clone(),
        };
        if let Some(found) = self.name_cache.cached(cx.now, &name) {
            return self.on_resolved(cx, slot, &found);
        }
        let token = self.token(slot, 0);
        if self.name_cache.add_waiter(&name, token) {
            return;
        }
        match self.lookup_budget.try_acquire(self.table[slot].permit.key().clone()) {
            Ok(permit) if self.resolver.query(&name) => self.name_cache.start_lookup(&name, token, permit),
            Ok(_) => self.fail(cx, slot, ProxyError::Busy, "too many names are being resolved"),
            Err(limit) => self.fail(cx, slot, ProxyError::Busy, format!("too many name lookups: {limit}")),
        }
    }

    /// Handles the result of resolving a relay's target.
    fn on_resolved<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        slot: usize,
        found: &LookupResult,
    ) {
        let relay = &mut self.table[slot];
        if !matches!(relay.stage, Stage::ResolvingTcp(_) | Stage::ResolvingUdp(_)) {
            return;
        }
        let list: &[IpAddr] = match found {
            Ok(list) if list.is_empty() => {
                return self.fail(cx, slot, ProxyError::Dns, "the name has no address");
            }
            Ok(list) => list,
            Err(reason) => {
                let reason = reason.to_string();
                return self.fail(cx, slot, ProxyError::Dns, reason);
            }
        };
        let (mut allowed, mut denied) = (Vec::with_capacity(list.len()), None);
        for ip in list {
            let address = SocketAddr::new(*ip, relay.to.port);
            let local_addresses = &mut self.local_addresses;
            match self.access.check(relay.permit.key(), address, |ip| local_addresses.contains(cx.now, ip)) {
                Ok(()) => allowed.push(address),
                Err(reason) => denied = denied.or(Some(reason)),
            }
        }
        if let Some(reason) = denied.filter(|_| allowed.is_empty()) {
            return self.fail(cx, slot, ProxyError::Prohibited, reason);
        }
        match &mut relay.stage {
            Stage::ResolvingUdp(early) => {
                let early = std::mem::take(early);
                self.open_udp_flow(cx, slot, &allowed, early);
            }
            Stage::ResolvingTcp(until) => {
                relay.stage = Stage::Connecting(*until, Box::new(Attempts::new(cx.now, allowed)));
                self.advance_attempts(cx, slot);
            }
            _ => {}
        }
    }

    /// Opens the socket of a UDP flow.
    fn open_udp_flow<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        slot: usize,
        addresses: &[SocketAddr],
        early: EarlyPayloads,
    ) {
        let flow = match UdpFlow::open(cx.now, cx.poller, self.token(slot, 0), addresses, early) {
            Ok(flow) => flow,
            Err((failure, error)) => return self.fail(cx, slot, failure, error),
        };
        self.set_timer(slot, flow.expires());
        let relay = &mut self.table[slot];
        relay.stage = Stage::Udp(flow);
        self.open_udp_flows += 1;
        tracing::debug!(id = ?relay.id, to = %relay.to, user = %relay.permit.key(), "UDP flow opened");
        cx.streams.opened(cx.now, relay.id);
    }

    /// Starts the next connection attempt of a relay, if it is due.
    fn advance_attempts<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, slot: usize) {
        let token = self.token(slot, 0);
        let relay = &mut self.table[slot];
        let Stage::Connecting(until, attempts) = &mut relay.stage else { return };
        let with_number = |number| token | u64::from(number) << SLOT_BITS;
        match attempts.advance(cx.now, cx.poller, &relay.permit, with_number) {
            AttemptsState::Failed(failure, reason) => self.fail(cx, slot, failure, reason),
            AttemptsState::InProgress => {
                let due = attempts.poll_timeout().map_or(*until, |next| next.min(*until));
                self.set_timer(slot, due);
            }
        }
    }

    /// Handles an established connection.
    fn on_connected<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        slot: usize,
        socket: TcpSocket,
        token: u64,
    ) {
        let relay = &mut self.table[slot];
        // Drops the other attempts.
        relay.stage = Stage::Open(Splice::new(cx.now, socket, token, Interest::Write));
        self.open_connections += 1;
        let id = relay.id;
        tracing::debug!(?id, to = %relay.to, user = %relay.permit.key(), "TCP connection established");
        cx.streams.opened(cx.now, id);
        // The client may have sent bytes already.
        self.move_bytes(cx, slot, |splice, cx, buffers| splice.move_to_socket(cx, id, buffers));
    }

    /// Moves bytes with `transfer`, then updates poller and timer, or closes the relay.
    fn move_bytes<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        slot: usize,
        transfer: impl FnOnce(&mut Splice, &mut Context<'_, R>, &mut SpliceBuffers) -> io::Result<()>,
    ) {
        let relay = &mut self.table[slot];
        let Stage::Open(splice) = &mut relay.stage else { return };
        let moved = transfer(splice, cx, &mut self.buffers).and_then(|()| splice.update_interest(cx.poller));
        match moved {
            Err(error) => self.abort_relay(cx, slot, &error),
            Ok(()) if splice.has_ended() => drop(self.remove(slot)),
            Ok(()) => {
                // A timer that is set too early is set again when it fires; only an earlier deadline (after
                // one half has closed) must be set now.
                let due = match splice.waits() {
                    true => splice.expires().min(cx.now + KERNEL_LOOK_DELAY),
                    false => splice.expires(),
                };
                if due < relay.due {
                    self.set_timer(slot, due);
                }
            }
        }
    }

    /// Resets an established relay at both ends.
    fn abort_relay<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, slot: usize, error: &io::Error) {
        let relay = self.remove(slot);
        tracing::debug!(id = ?relay.id, to = %relay.to, %error, "relay closed by an error");
        if let Stage::Open(splice) = relay.stage {
            splice.reset();
        }
        cx.streams.abort(cx.now, relay.id);
    }

    fn fail_timed_out<R: Relays<Id = Id>>(&mut self, cx: &mut Context<'_, R>, slot: usize, reason: &str) {
        let token = self.token(slot, 0);
        let relay = &self.table[slot];
        if let (Stage::ResolvingTcp(_) | Stage::ResolvingUdp(_), Host::Name(name)) =
            (&relay.stage, &relay.to.host)
        {
            self.name_cache.remove_waiter(name, token);
        }
        self.fail(cx, slot, ProxyError::TimedOut, reason);
    }

    /// Ends a relay that was not established.
    fn fail<R: Relays<Id = Id>>(
        &mut self,
        cx: &mut Context<'_, R>,
        slot: usize,
        failure: ProxyError,
        reason: impl fmt::Display,
    ) {
        let relay = self.remove(slot);
        refuse(cx, relay.id, &relay.to, failure, reason);
    }

    /// Sets the timer of a relay.
    fn set_timer(&mut self, slot: usize, due: Instant) {
        let relay = &mut self.table[slot];
        self.timers.remove(&(relay.due, slot));
        self.timers.insert((due, slot));
        relay.due = due;
    }

    fn remove(&mut self, slot: usize) -> Relay<Id> {
        let relay = self.table.remove(slot);
        self.slots.remove(&relay.id);
        self.timers.remove(&(relay.due, slot));
        self.open_connections -= usize::from(matches!(relay.stage, Stage::Open(_)));
        self.open_udp_flows -= usize::from(matches!(relay.stage, Stage::Udp(_)));
        relay
    }

    fn token(&self, slot: usize, attempt: u8) -> u64 {
        let generation = u64::from(self.table[slot].generation);
        generation << (SLOT_BITS + ATTEMPT_BITS) | u64::from(attempt) << SLOT_BITS | slot as u64
    }

    /// The relay's slot and the attempt's number of a token, if the relay still exists.
    fn locate(&self, token: u64) -> Option<(usize, u8)> {
        let slot = (token & ((1 << SLOT_BITS) - 1)) as usize;
        let attempt = (token >> SLOT_BITS) as u8 & ((1 << ATTEMPT_BITS) - 1);
        let generation = token >> (SLOT_BITS + ATTEMPT_BITS);
        let relay = self.table.get(slot)?;
        (u64::from(relay.generation) == generation).then_some((slot, attempt))
    }
}

fn refuse<R: Relays>(
    cx: &mut Context<'_, R>,
    id: R::Id,
    to: &Authority,
    failure: ProxyError,
    reason: impl fmt::Display,
) {
    tracing::debug!(?id, %to, ?failure, %reason, "a relay request failed");
    cx.streams.failed(cx.now, id, failure, format!("no connection to {to}: {reason}"));
}

#[cfg(test)]
mod tests;
