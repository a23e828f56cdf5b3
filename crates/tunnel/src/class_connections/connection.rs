//! The connection of one class, and whether there is one.
//!
//! In: that the rules put a packet into the class, what its client says, and time. Out: whether the class takes its packets
//! itself, leaves them to the default class, or has them wait. Always holds: a class that was not used for [`IDLE`], or never was and
//! does not go before others, has no connection, unless it is the default one or something would end with it; a class that
//! wakes keeps nothing waiting but what begins a TCP connection, for [`PATIENCE`] at most.

use std::collections::VecDeque;

use mpvpn_packet::{FlowKey, VnetHdr, ip, protocol, tcp::Segment, tcp_flags};
use mpvpn_quic::{LocalAddress, Transmit};
use mpvpn_types::{ClassId, Duration, Instant, target::CLASSES};
use tracing::debug;

use crate::{ClassChange, Client, ClientChange, ClientEvent, PathEvent, events::Changes};

/// A connection in which nothing has moved for this time is closed.
const IDLE: Duration = Duration::from_secs(600);
/// A TCP connection that begins while its class wakes may have to stay where it begins: so it waits, for less than TCP
/// takes to ask again (RFC 6298 §2).
const PATIENCE: Duration = Duration::from_millis(900);
/// As many of them wait at most.
const MOST_WAITING: usize = 64;
/// Flows that travel in the default class when theirs is awake follow at the latest after this time; sooner if they pause.
const MOVING: Duration = Duration::from_secs(1);
/// The paths of a new connection are probed for their MTU. What they carry for this time and a few round trips more is
/// taken for what they will carry.
const GROWING: Duration = Duration::from_millis(500);
const GROWING_ROUNDS: u32 = 4;
/// That a class is in use is noted this often.
const NOTE: Duration = Duration::from_secs(1);

/// How the connection of a class stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// There is none, as nobody uses it.
    Asleep,
    /// There is none, and one is made, since this time.
    Waking(Instant),
    /// There is none, and one is made; nobody waits for it.
    Down,
    /// There is one, whose paths may still be probed: they carry as much as they do since this time. It was wanted since
    /// this time, if somebody waits.
    Up { since: Instant, woken: Option<Instant> },
    /// It takes what belongs to it, since this time.
    Awake(Instant),
}

impl Life {
    fn name(self) -> &'static str {
        match self {
            Self::Asleep => "asleep",
            Self::Waking(_) => "waking",
            Self::Down => "down",
            Self::Up { .. } => "up",
            Self::Awake(_) => "awake",
        }
    }
}

/// Who takes a packet of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taker {
    /// The class itself.
    Own,
    /// The default class.
    Default,
    /// It waits for the class.
    Later,
}

/// One class.
pub(super) struct ClassConnection {
    pub(super) id: ClassId,
    pub(super) priority: bool,
    pub(super) client: Client,
    life: Life,
    /// When the rules put a packet into it last, or it was woken.
    used: Instant,
    /// What its connection carries (bytes), and what counts for all: a connection that is new has yet to find out, and one
    /// that is gone will carry as much again.
    says: Option<usize>,
    pub(super) mtu: Option<usize>,
    /// What begins TCP connections, as it came from the TUN.
    waiting: VecDeque<(VnetHdr, Vec<u8>)>,
    changes: Changes<ClassChange>,
}

impl ClassConnection {
    /// A class that connects at once if it is the default one or goes before others, and sleeps until it is used if not.
    pub(super) fn new(now: Instant, id: ClassId, priority: bool, client: Client) -> Self {
        let waiting = VecDeque::new();
        let (life, changes) = (Life::Down, Changes::default());
        let mut one = Self { id, priority, client, life, used: now, says: None, mtu: None, waiting, changes };
        if !priority && id != ClassId::DEFAULT {
            one.sleep(now);
        }
        one
    }

    /// Whether it takes what belongs to it.
    pub(super) fn is_awake(&self) -> bool {
        matches!(self.life, Life::Awake(_))
    }

    /// The connection of the class stands differently from now on.
    fn enter(&mut self, life: Life, reason: &str) {
        debug!(
            target: CLASSES, class = self.id.0, name = self.client.class_name(), from = self.life.name(),
            to = life.name(), waiting = self.waiting.len(), mtu = self.says, reason, "class changed"
        );
        self.life = life;
    }

    /// Closes its connection until somebody wants it.
    pub(super) fn sleep(&mut self, now: Instant) {
        self.client.sleep(now);
        self.enter(Life::Asleep, "nobody uses it");
    }

    /// Wants a connection.
    pub(super) fn wake(&mut self, now: Instant) {
        self.used = now;
        if self.life == Life::Asleep {
            self.enter(Life::Waking(now), "a packet belongs to it, or it goes before others");
            self.client.wake(now);
        }
    }

    /// A packet belongs to it, which `home` would carry.
    pub(super) fn note_use(&mut self, now: Instant, home: &Client, packet: &ip::IpPacket<'_>) {
        let due = self.life == Life::Asleep || now.saturating_duration_since(self.used) >= NOTE;
        if due && home.admits(packet) {
            if self.life == Life::Asleep {
                self.changes.push(ClassChange::Used);
            }
            self.wake(now);
        }
    }

    /// Who takes a packet of it.
    pub(super) fn taker(
        &self,
        now: Instant,
        home: &mut Client,
        flow: &FlowKey,
        packet: &ip::IpPacket<'_>,
    ) -> Taker {
        match self.life {
            // That of the default class shares its links, and may be all there is.
            Life::Awake(_) if !self.client.works() && home.works() => Taker::Default,
            Life::Awake(since) if now < since + MOVING && home.is_followed_by(now, flow) => Taker::Default,
            Life::Awake(_) => Taker::Own,
            Life::Waking(woken) | Life::Up { woken: Some(woken), .. }
                if now < woken + PATIENCE && begins_connection(packet) =>
            {
                Taker::Later
            }
            _ => Taker::Default,
        }
    }

    /// Keeps a packet until it is decided who takes it. One that comes again takes its own place.
    pub(super) fn keep(&mut self, hdr: VnetHdr, packet: &[u8], flow: &FlowKey) {
        let is_same = |other: &[u8]| ip::parse(other).is_ok_and(|view| FlowKey::of(&view) == *flow);
        self.waiting.retain(|(_, other)| !is_same(other));
        if self.waiting.len() < MOST_WAITING {
            self.waiting.push_back((hdr, packet.to_vec()));
        }
    }

    /// What waits no longer, and who takes it.
    pub(super) fn release(&mut self, now: Instant) -> (Taker, VecDeque<(VnetHdr, Vec<u8>)>) {
        let taker = match self.life {
            Life::Awake(_) => Taker::Own,
            Life::Waking(woken) | Life::Up { woken: Some(woken), .. } if now < woken + PATIENCE => {
                return (Taker::Later, VecDeque::new());
            }
            _ => Taker::Default,
        };
        (taker, self.take_waiting())
    }

    /// All that waits.
    pub(super) fn take_waiting(&mut self) -> VecDeque<(VnetHdr, Vec<u8>)> {
        std::mem::take(&mut self.waiting)
    }

    /// Whether something waits.
    fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes what its client says. Of a connection that was closed for sleep nothing counts any more.
    pub(super) fn take_event(&mut self, now: Instant, event: &ClientEvent) {
        if let (ClientEvent::Up(_), Life::Waking(_) | Life::Down) = (event, self.life) {
            self.changes.push(ClassChange::Connected);
        }
        match (event, self.life) {
            (_, Life::Asleep) => {}
            (ClientEvent::Up(_), Life::Waking(woken)) => {
                self.enter(Life::Up { since: now, woken: Some(woken) }, "its connection stands");
            }
            (ClientEvent::Up(_), _) => {
                self.enter(Life::Up { since: now, woken: None }, "its connection stands");
            }
            (ClientEvent::Mtu(mtu), life) => {
                self.says = Some(*mtu);
                if let Life::Up { woken, .. } = life {
                    self.life = Life::Up { since: now, woken };
                }
            }
            (ClientEvent::Down(reason), _) => {
                self.enter(Life::Down, reason);
                self.changes.push(ClassChange::Disconnected(reason.clone()));
            }
            _ => {}
        }
    }

    /// Lets it take its packets if they fit as those of all do, or will not any more; `mtu` is that of all.
    pub(super) fn settle(&mut self, now: Instant, mtu: Option<usize>) {
        if let Life::Up { since, .. } = self.life
            && (self.says >= mtu || now >= since + self.growing())
        {
            let fits = self.says >= mtu;
            let reason =
                if fits { "it carries packets of the tunnel's MTU" } else { "its MTU grows no more" };
            self.enter(Life::Awake(now), reason);
        }
        if matches!(self.life, Life::Awake(_)) {
            self.mtu = self.says;
        }
    }

    fn growing(&mut self) -> Duration {
        GROWING + self.client.rtt().unwrap_or_default() * GROWING_ROUNDS
    }

    /// Sleeps if it is time to.
    pub(super) fn rest(&mut self, now: Instant) {
        if self.sleeps_at().is_some_and(|at| now >= at) {
            self.changes.push(ClassChange::Idle);
            self.sleep(now);
        }
    }

    fn sleeps_at(&self) -> Option<Instant> {
        let may = self.id != ClassId::DEFAULT && self.life != Life::Asleep && !self.client.has_flows();
        may.then(|| self.client.moved().map_or(self.used, |at| at.max(self.used)) + IDLE)
    }

    /// When something is to be decided here.
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let change = match self.life {
            Life::Waking(woken) => self.has_waiting().then_some(woken + PATIENCE),
            Life::Up { since, woken } => {
                let waits = woken.filter(|_| self.has_waiting()).map(|woken| woken + PATIENCE);
                waits.into_iter().chain([since + self.growing()]).min()
            }
            Life::Asleep | Life::Down | Life::Awake(_) => None,
        };
        [self.client.poll_timeout(now), self.sleeps_at(), change].into_iter().flatten().min()
    }

    /// The next change of its connection or paths.
    pub(super) fn poll_change(&mut self) -> Option<ClientChange> {
        if let Some(change) = self.changes.pop() {
            return Some(ClientChange::Class(self.id, change));
        }
        Some(match self.client.poll_change()? {
            ClientChange::Path(event) => {
                ClientChange::Path(PathEvent { link: event.link.with_class(self.id), ..event })
            }
            ClientChange::ConnectFailed(link, reason) => {
                ClientChange::ConnectFailed(link.with_class(self.id), reason)
            }
            change => change,
        })
    }

    pub(super) fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        let mut transmit = self.client.poll_transmit(now, buf)?;
        let link = transmit.local.and_then(LocalAddress::as_link);
        transmit.local = link.map(|link| LocalAddress::link(link.with_class(self.id))).or(transmit.local);
        Some(transmit)
    }
}

/// Whether a packet asks for a TCP connection (RFC 9293 §3.5).
fn begins_connection(packet: &ip::IpPacket<'_>) -> bool {
    packet.protocol() == protocol::TCP
        && Segment::of(packet)
            .is_some_and(|segment| segment.has(tcp_flags::SYN) && !segment.has(tcp_flags::ACK))
}
