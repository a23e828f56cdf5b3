//! The data plane of one shard of a server: its sockets, its queue of the TUN, its clients.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use mpvpn_control::{
    events::EventSender,
    status::{Class, FlowList, Role},
};
use mpvpn_os::{RecvBatch, Tun, poll::Interest, tun::READ_BUFFER};
use mpvpn_packet::{Joined, VNET_HDR_LEN, ip};
use mpvpn_quic::{Local, Shard, Transmit};
use mpvpn_tunnel::{Seat, Server, ServerEvent, SessionReport, Taken};

use super::{
    events::event_of,
    streams::{Asked, Streams},
};
use crate::{
    EngineError,
    egress::{EGRESS, Egress, Transport},
    exchange::{Inbox, Outbox},
    flows, status,
    turn::{SOCKETS, TUN, Turn, Turns, WAKE},
    wire::{Wire, datagrams, read_tun, serves, write_tun},
};

/// Receive calls a socket a turn.
const SOCKET_READS: usize = 4;
/// Messages a receive call.
const BATCH: usize = 16;
/// How often a turn looks again whether streams have something to send.
const ROUNDS: usize = 16;

/// A socket, and the address that it serves.
pub(super) struct Listening {
    pub(super) bound: SocketAddr,
    pub(super) wire: Wire,
}

/// What shards say to each other.
#[derive(Debug)]
pub(crate) enum Word {
    /// A tunnel of the receiver was replaced.
    Replaced(Seat),
    /// To the first shard: the MTU of the clients has changed.
    Mtu,
    /// From the first shard: report, and name this round.
    Report(u64),
    /// To the first shard: the report.
    Reported(u64, ShardReport),
    /// From the first shard: tell which flows there are, and name this round.
    List(u64),
    /// To the first shard: the flows.
    Listed(u64, FlowList),
    /// From the first shard: say good-bye to the clients and end.
    End,
    /// To the first shard: this thread has ended.
    Ended,
}

/// What a shard tells about itself.
#[derive(Debug, Default)]
pub(crate) struct ShardReport {
    /// Its connections.
    pub(super) sessions: Vec<SessionReport>,
    /// TCP connections that it has made for clients.
    pub(super) streams: usize,
    /// UDP flows that it carries for clients.
    pub(super) udp: usize,
    /// Packets for clients of other shards, or handed over by others, that were lost.
    pub(super) lost: u64,
    /// What connections that are over have come to, by class.
    pub(super) departed: Vec<Class>,
}

/// One shard.
pub(crate) struct Plane {
    shard: Shard,
    server: Server,
    pub(super) sockets: Vec<Listening>,
    /// The queues of the TUN, one a shard, in order; none if there is no TUN.
    queues: Vec<Arc<Tun>>,
    /// The TCP connections and UDP flows that clients asked for.
    egress: Egress<Asked>,
    inbox: Inbox<Word>,
    /// All shards, in order.
    peers: Vec<Outbox<Word>>,
    /// Shards that were handed packets in this turn.
    handed: Vec<bool>,
    lost: u64,
    /// What connections that are over have come to, by class.
    departed: Vec<Class>,
    pub(super) events: EventSender,
    batch: RecvBatch,
    tun_buffer: Vec<u8>,
    out: Vec<u8>,
}

impl Plane {
    /// Starts to watch the sockets and the queue of the TUN.
    pub(super) fn new(
        shard: Shard,
        server: Server,
        sockets: Vec<Listening>,
        queues: Vec<Arc<Tun>>,
        egress: Egress<Asked>,
        (inbox, peers): (Inbox<Word>, Vec<Outbox<Word>>),
        turns: &Turns,
    ) -> Result<Self, EngineError> {
        for (token, listening) in (SOCKETS..).zip(&sockets) {
            let socket = &listening.wire.socket;
            turns.poller.add(socket, token, Interest::Read).map_err(EngineError::io("watch a socket"))?;
        }
        if let Some(own) = queues.get(usize::from(shard.index())) {
            turns.poller.add(own, TUN, Interest::Read).map_err(EngineError::io("watch the TUN"))?;
        }
        Ok(Self {
            shard,
            server,
            sockets,
            queues,
            egress,
            inbox,
            handed: vec![false; peers.len()],
            peers,
            lost: 0,
            departed: Vec::new(),
            events: EventSender::default(),
            batch: RecvBatch::new(BATCH),
            tun_buffer: vec![0; READ_BUFFER],
            out: Vec::with_capacity(64 << 10),
        })
    }

    /// Runs until the first shard says that it is over.
    pub(super) fn run(mut self, turns: &mut Turns) -> Result<(), EngineError> {
        let mut turn = Turn::new();
        loop {
            if self.transmit(turns, turn.now).is_some() {
                self.peers[0].tell(Word::Mtu);
            }
            turns.next(self.poll_timeout(), &mut turn)?;
            self.take(turns, &turn);
            while let Some(word) = self.word(turn.now) {
                match word {
                    Word::Report(round) => {
                        let report = self.report(turn.now);
                        self.peers[0].tell(Word::Reported(round, report));
                    }
                    Word::List(round) => self.peers[0].tell(Word::Listed(round, self.flows(turn.now))),
                    Word::End => {
                        self.end();
                        return Ok(());
                    }
                    _ => {}
                }
            }
        }
    }

    /// When [`Self::take`] wants to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.server.poll_timeout().into_iter().chain(self.egress.poll_timeout()).min()
    }

    /// Handles what has become ready, and time that has passed.
    pub(super) fn take(&mut self, turns: &Turns, turn: &Turn) {
        let now = turn.now;
        if turn.overslept {
            self.server.forgive(now);
        }
        let mut tun_ready = false;
        for event in &turn.ready {
            match event.token {
                TUN => tun_ready = true,
                WAKE => {
                    turns.wake.drain();
                    self.parcels(now);
                    self.egress.resolved(now, &turns.poller, &mut Streams(&mut self.server));
                }
                EGRESS.. => self.egress.ready(now, &turns.poller, &mut Streams(&mut self.server), *event),
                token => self.socket(turns, now, token, event.readable, event.writable),
            }
        }
        if tun_ready {
            self.read_tun(now);
        }
        if self.server.poll_timeout().is_some_and(|at| at <= now) {
            self.server.handle_timeout(now);
        }
        if self.egress.poll_timeout().is_some_and(|at| at <= now) {
            self.egress.handle_timeout(now, &turns.poller, &mut Streams(&mut self.server));
        }
    }

    /// The next word that is not about this shard's own sessions.
    pub(super) fn word(&mut self, now: Instant) -> Option<Word> {
        loop {
            match self.inbox.word()? {
                Word::Replaced(seat) => self.server.close_replaced(now, seat),
                word => return Some(word),
            }
        }
    }

    /// Acts on what has happened to clients; returns whether anything has, and notes the MTU if it has changed.
    fn events(&mut self, turns: &Turns, now: Instant, mtu: &mut Option<usize>) -> bool {
        let (egress, poller) = (&mut self.egress, &turns.poller);
        let mut any = false;
        while let Some(event) = self.server.poll_event() {
            any = true;
            let streams = &mut Streams(&mut self.server);
            match event {
                ServerEvent::Mtu(new) => *mtu = Some(new),
                ServerEvent::Replaced(seat) => {
                    if let Some(peer) = self.peers.get(usize::from(seat.shard)) {
                        peer.tell(Word::Replaced(seat));
                    }
                }
                ServerEvent::Connect { relay, user, to } => {
                    egress.connect(now, poller, streams, Asked::Tcp(relay), (&user, to, Transport::Tcp));
                }
                ServerEvent::RelayReadable(relay) => egress.readable(now, poller, streams, Asked::Tcp(relay)),
                ServerEvent::RelayWritable(relay) => egress.writable(now, poller, streams, Asked::Tcp(relay)),
                ServerEvent::RelayGone(relay) => egress.gone(Asked::Tcp(relay)),
                ServerEvent::ConnectUdp { udp, user, to } => {
                    egress.connect(now, poller, streams, Asked::Udp(udp), (&user, to, Transport::Udp));
                }
                ServerEvent::UdpGone(udp) => egress.gone(Asked::Udp(udp)),
            }
        }
        while let Some(departed) = self.server.poll_departed() {
            status::add_departed(&mut self.departed, departed);
        }
        while let Some((udp, payload)) = self.server.poll_udp() {
            egress.payload(now, Asked::Udp(udp), &payload);
        }
        any
    }

    fn socket(&mut self, turns: &Turns, now: Instant, token: u64, readable: bool, writable: bool) {
        let Ok(number) = usize::try_from(token.wrapping_sub(SOCKETS)) else { return };
        let Some(listening) = self.sockets.get_mut(number) else { return };
        if writable {
            listening.wire.flush(&turns.poller, token, source_of);
        }
        if !readable {
            return;
        }
        for _ in 0..SOCKET_READS {
            let Some(listening) = self.sockets.get_mut(number) else { return };
            let count = match listening.wire.socket.recv_batch(&mut self.batch) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!(%error, "cannot receive");
                    return;
                }
            };
            let server = &mut self.server;
            datagrams(&mut self.batch, |got| {
                server.handle_datagram(now, got.local, got.remote, got.ecn, got.data);
            });
            self.server.handle_batch(now);
            self.write_tun();
            if count < BATCH {
                return;
            }
        }
    }

    fn write_tun(&mut self) {
        while let Some(joined) = self.server.poll_tun() {
            if let Some(queue) = self.queues.get(self.queue_for(&joined)) {
                write_tun(queue, &joined);
            }
            self.server.recycle(joined);
        }
    }

    /// The queue through which a packet goes to the kernel: this shard's own, where its answers are
    /// wanted. A packet from client to client comes back itself, and the kernel reads the answers of
    /// the other client, who may be another shard's, as a wish about the same flow. So both ends write
    /// through one queue; else the flow's packets would come back through two, out of order.
    fn queue_for(&self, joined: &Joined) -> usize {
        let own = usize::from(self.shard.index());
        if self.queues.len() < 2 {
            return own;
        }
        let mut parts = joined.io_slices();
        let Some(head) = parts.next() else { return own };
        let next = parts.next();
        // The headers of joined packets stand behind the virtio header, those of others in the next part.
        let packet = match head.get(VNET_HDR_LEN..) {
            Some(packet) if !packet.is_empty() => packet,
            _ => next.as_deref().unwrap_or_default(),
        };
        match (ip::src_of(packet), ip::dst_of(packet)) {
            (Some(src), Some(dst)) if self.server.are_clients(src, dst) => {
                (last_byte(src) + last_byte(dst)) % self.queues.len()
            }
            _ => own,
        }
    }

    fn read_tun(&mut self, now: Instant) {
        let (server, peers, handed) = (&mut self.server, &self.peers, &mut self.handed);
        let lost = &mut self.lost;
        let Some(tun) = self.queues.get(usize::from(self.shard.index())) else { return };
        read_tun(tun, &mut self.tun_buffer, |hdr, packet| {
            let Taken::By(shard) = server.handle_tun(now, hdr, packet) else { return };
            let shard = usize::from(shard);
            if peers.get(shard).is_some_and(|peer| peer.hand(hdr, packet)) {
                handed[shard] = true;
            } else {
                *lost += 1;
            }
        });
        for (peer, handed) in self.peers.iter().zip(&mut self.handed) {
            if std::mem::take(handed) {
                peer.wake();
            }
        }
    }

    /// Packets that other shards read.
    fn parcels(&mut self, now: Instant) {
        while let Some(mut parcel) = self.inbox.parcel() {
            if !self.server.handle_handed(now, parcel.hdr, &mut parcel.packet) {
                self.lost += 1;
            }
        }
    }

    /// Sends what is to be sent; returns the MTU of the clients if it has changed.
    pub(super) fn transmit(&mut self, turns: &Turns, now: Instant) -> Option<usize> {
        let mut mtu = None;
        for round in 0..ROUNDS {
            // Streams that have room again are filled, as long as the paths take it.
            if !self.events(turns, now, &mut mtu) && round > 0 {
                break;
            }
            self.send(turns, now);
        }
        self.write_tun();
        while let Some(change) = self.server.poll_change() {
            event_of(change).into_iter().for_each(|event| self.events.report(event));
        }
        mtu
    }

    fn send(&mut self, turns: &Turns, now: Instant) {
        loop {
            self.out.clear();
            let Some(transmit) = self.server.poll_transmit(now, &mut self.out) else { return };
            let local = transmit.local.map(Local::ip);
            let Some(number) =
                self.sockets.iter().position(|socket| serves(socket.bound, local, transmit.remote))
            else {
                continue;
            };
            let token = SOCKETS + number as u64;
            let wire = &mut self.sockets[number].wire;
            wire.send(&turns.poller, token, &transmit, &self.out, source_of(&transmit));
        }
    }

    /// Figures for status output.
    pub(crate) fn report(&mut self, now: Instant) -> ShardReport {
        ShardReport {
            sessions: self.server.report(now),
            streams: self.egress.open(),
            udp: self.egress.open_udp(),
            lost: self.lost,
            departed: self.departed.clone(),
        }
    }

    /// The connections that this shard has made for clients.
    pub(crate) fn flows(&self, now: Instant) -> FlowList {
        flows::of_connections(now, Role::Server, self.egress.flows())
    }

    /// Its number.
    pub(super) fn number(&self) -> u8 {
        self.shard.index()
    }

    /// Says good-bye to the clients.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.egress.end();
        self.server.close(now, "the server ends");
        loop {
            self.out.clear();
            let Some(transmit) = self.server.poll_transmit(now, &mut self.out) else { break };
            let local = transmit.local.map(Local::ip);
            let socket = self.sockets.iter().find(|socket| serves(socket.bound, local, transmit.remote));
            if let Some(socket) = socket {
                socket.wire.send_last(&transmit, &self.out, source_of(&transmit));
            }
        }
    }
}

/// The address that an answer must come from: the one that was asked.
fn source_of(transmit: &Transmit) -> Option<IpAddr> {
    transmit.local.map(Local::ip)
}

fn last_byte(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]),
        IpAddr::V6(ip) => usize::from(ip.octets()[15]),
    }
}
