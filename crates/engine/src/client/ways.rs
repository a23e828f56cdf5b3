//! By which way the packets of each link travel, and the TCP connections of those where UDP does not get through.
//!
//! In: what the tunnel hears over the links, what the kernel says about them, news of connections. Out: connections that are
//! made and given up, and links of the tunnel (the pipe [`LinkId::TCP_PATH_INDEX`]) that come and go with them. Always holds: each shard
//! decides for itself; nothing here waits.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Instant,
};

use mpvpn_control::events::{self, Event, EventSender};
use mpvpn_os::poll::PollWaker;
use mpvpn_path::{Order, Signs, TransportJudge, Way as Main};
use mpvpn_tunnel::{ClassConnections, LinkPolicy};
use mpvpn_types::{Duration, LinkId, Tier, Transport};

use crate::{
    links::Links,
    policies::Policies,
    tcp_way::carriage::{Carriage, LINGER, News, Plan, Sockets, Stable, Stands},
    turn::Turns,
};

/// Links are looked at no more often than this, unless it is time for something.
const LOOK: Duration = Duration::from_millis(20);

/// How the links of a shard travel.
pub(crate) struct Ways {
    /// `None` where there is no thread for TCP.
    stable: Option<Arc<Stable>>,
    all: BTreeMap<LinkId, Way>,
    tell: Sender<(LinkId, u64, News)>,
    news: Receiver<(LinkId, u64, News)>,
    wake: PollWaker,
    shard: u8,
    events: EventSender,
    /// When they were looked at, and when they are to be.
    looked: Instant,
    next: Option<Instant>,
    /// Numbers of attempts.
    attempts: u64,
}

/// One link.
struct Way {
    judge: TransportJudge,
    /// Which way it was when the tunnel was told.
    told: Option<(Main, bool)>,
    carriage: Option<(u64, Carriage)>,
    trying: Option<(u64, Carriage)>,
    stands: Option<Stands>,
    /// The pipes of the connection, in the order of its sockets.
    pipes: Vec<LinkId>,
    sockets: Sockets,
    /// The tunnel knows that its packets can go there.
    shown: bool,
    failures: u32,
}

/// What the tunnel is to hear, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WayChange {
    /// The pipes of a link are used in another way.
    Uses(LinkId),
    /// Packets can go by this pipe, which they enter there.
    Up(LinkId, SocketAddr),
    /// They cannot.
    Down(LinkId),
    /// There is no such pipe any more.
    Gone(LinkId),
}

/// How a pipe is to be used compared with those of the other kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// As its link.
    Main,
    /// While the others do not work.
    Spare,
    /// Not at all.
    Never,
}

impl Way {
    fn new(now: Instant, policies: &Policies, name: &str) -> Self {
        Self {
            judge: TransportJudge::new(now, policies.transport(name)).of_link(name),
            told: None,
            carriage: None,
            trying: None,
            stands: None,
            pipes: Vec::new(),
            sockets: Sockets::default(),
            shown: false,
            failures: 0,
        }
    }

    fn of(&self, id: LinkId) -> Use {
        match (id.is_tcp(), self.judge.main()) {
            (false, _) if !self.judge.allows_udp() => Use::Never,
            (true, Main::Tcp) | (false, Main::Udp) => Use::Main,
            _ => Use::Spare,
        }
    }
}

impl Way {
    /// What the tunnel is to hear of the connection.
    fn show(&mut self, now: Instant, id: LinkId, up: bool, links: &mut Links) -> Vec<WayChange> {
        let own = links.links.get(&id).map_or(&[][..], |link| &link.addresses);
        let is_gone = |stands: &Stands| up && !own.is_empty() && !own.contains(&stands.local.ip());
        if self.stands.as_ref().is_some_and(is_gone) {
            (self.carriage, self.stands) = (None, None);
            self.judge.ended(now, "its address is gone".to_owned());
        }
        match &self.stands {
            Some(stands) if up && !self.shown => {
                self.shown = true;
                let entries = self.pipes.iter().copied().zip(stands.pumps.iter().copied());
                let up = |(pipe, entry)| {
                    links.set_tcp(pipe, Some(entry));
                    WayChange::Up(pipe, entry)
                };
                entries.map(up).collect()
            }
            stands if self.shown && !(up && stands.is_some()) => {
                self.shown = false;
                let pipes: Vec<LinkId> = links.tcp(id).collect();
                pipes.iter().for_each(|pipe| links.set_tcp(*pipe, None));
                pipes.into_iter().map(WayChange::Down).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Ways {
    pub(super) fn new(shard: u8, stable: Option<Arc<Stable>>, wake: PollWaker, events: EventSender) -> Self {
        let (tell, news) = channel();
        let now = Instant::now();
        Self {
            stable,
            all: BTreeMap::new(),
            tell,
            news,
            wake,
            shard,
            events,
            looked: now,
            next: Some(now),
            attempts: 0,
        }
    }

    /// What a pipe may be used for, if its link may be used so.
    pub(super) fn policy(&self, id: LinkId, link: LinkPolicy, wanted: Transport) -> LinkPolicy {
        let first = if wanted == Transport::Tcp && !id.is_tcp() { Use::Never } else { Use::Main };
        let tier = match (self.all.get(&id.uplink()).map_or(first, |way| way.of(id)), link.tier) {
            (_, Tier::Never) | (Use::Never, _) => Tier::Never,
            (Use::Main, tier) => tier,
            (Use::Spare, _) => Tier::Backup,
        };
        LinkPolicy { tier, ..link }
    }

    /// A link is in another network, or has come back.
    pub(super) fn network_changed(&mut self, now: Instant, uplink: LinkId) {
        if let Some(way) = self.all.get_mut(&uplink) {
            way.judge.network_changed(now);
            self.next = Some(now);
        }
    }

    /// When [`Self::look`] wants to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    /// Looks at all links, if it is time; what comes of it. To be called at every turn.
    pub(super) fn look(
        &mut self,
        turns: &Turns,
        now: Instant,
        links: &mut Links,
        policies: &Policies,
        connections: &ClassConnections,
    ) -> Vec<WayChange> {
        let news = self.hear(now, links);
        if !news && now < self.looked + LOOK && self.next.is_none_or(|at| now < at) {
            self.next = Some(self.looked + LOOK);
            return Vec::new();
        }
        (self.looked, self.next) = (now, None);
        let uplinks: Vec<(LinkId, String, bool)> = links
            .uplinks()
            .map(|(id, link)| (id, link.name.clone(), link.remote.is_some() || self.is_ready(link.ready)))
            .collect();
        let mut changes = Vec::new();
        for (id, name, up) in uplinks {
            let up = up && policies.tier(&name) != Tier::Never;
            let way = self.all.entry(id).or_insert_with(|| Way::new(now, policies, &name));
            way.judge.set_wanted(now, policies.transport(&name));
            let (udp, tcp) = connections.heard(id);
            let order = way.judge.look(now, Signs { up, udp, tcp });
            match order.filter(|_| self.stable.is_some()) {
                Some(Order::Dial) => self.dial(turns, now, id, links, policies),
                Some(Order::Close) => changes.extend(self.close(id, links)),
                None => {}
            }
            let Some(way) = self.all.get_mut(&id) else { continue };
            let told = (way.judge.main(), way.judge.allows_udp());
            if way.told != Some(told) {
                if way.told.is_some_and(|(main, _)| main != told.0) || told.0 == Main::Tcp {
                    self.events.report(Event::TransportChanged {
                        link: name.as_str().into(),
                        transport: if told.0 == Main::Tcp {
                            events::Transport::Tcp
                        } else {
                            events::Transport::Quic
                        },
                        reason: way.judge.why(now).into(),
                        shard: self.shard,
                    });
                }
                way.told = Some(told);
                changes.push(WayChange::Uses(id));
            }
            changes.extend(way.show(now, id, up, links));
            self.next = self.next.into_iter().chain(way.judge.poll_timeout()).min();
        }
        changes
    }

    /// Through a proxy the server is reached also where nobody here knows its address.
    fn is_ready(&self, ready: bool) -> bool {
        ready && self.stable.as_ref().is_some_and(|stable| stable.has_proxy())
    }

    /// Takes the news of connections; whether there are any.
    fn hear(&mut self, now: Instant, links: &Links) -> bool {
        let mut any = false;
        while let Ok((id, number, news)) = self.news.try_recv() {
            let Some(way) = self.all.get_mut(&id) else { continue };
            let name = links.links.get(&id).map_or("", |link| link.name.as_str());
            let is_trying = way.trying.as_ref().is_some_and(|(trying, _)| *trying == number);
            let is_there = way.carriage.as_ref().is_some_and(|(there, _)| *there == number);
            match news {
                News::Stands(stands) if is_trying => {
                    let Stands { local, remote, multipath, .. } = stands;
                    let (link, shard) = (name.into(), self.shard);
                    self.events.report(Event::TcpConnected { link, local, remote, multipath, shard });
                    way.carriage = way.trying.take();
                    (way.stands, way.shown, way.failures) = (Some(stands), false, 0);
                    way.judge.dialled(now);
                }
                News::Failed(reason) if is_trying => {
                    self.events.report(Event::TcpFailed {
                        link: name.into(),
                        reason: reason.as_str().into(),
                        failures: way.failures,
                        shard: self.shard,
                    });
                    way.trying = None;
                    way.failures += 1;
                    way.judge.failed(now, reason);
                }
                News::Ended(reason) if is_there => {
                    let (link, shard) = (name.into(), self.shard);
                    self.events.report(Event::TcpClosed { link, reason: reason.as_str().into(), shard });
                    (way.carriage, way.stands) = (None, None);
                    way.judge.ended(now, reason);
                }
                _ => continue,
            }
            any = true;
        }
        any
    }

    fn dial(&mut self, turns: &Turns, now: Instant, id: LinkId, links: &mut Links, policies: &Policies) {
        let (Some(stable), Some(way)) = (&self.stable, self.all.get_mut(&id)) else { return };
        let (opened, footing) = (links.open_tcp(id, &turns.poller), links.footing(id));
        let (sockets, footing) = match (opened, footing) {
            (Ok(sockets), Some(footing)) => (sockets, footing),
            (Err(error), _) => return way.judge.failed(now, error.to_string()),
            (_, None) => return way.judge.failed(now, "there is no such link".to_owned()),
        };
        tracing::debug!(link = footing.name, shard = self.shard, "trying TCP");
        self.attempts += 1;
        let number = self.attempts;
        let plan = Plan {
            dscp: policies.of(&footing.name).dscp,
            footing,
            to: links.remotes().to_vec(),
            planes: sockets.iter().map(|(_, address)| *address).collect(),
            sockets: Arc::clone(&way.sockets),
            failures: way.failures,
        };
        way.pipes = sockets.into_iter().map(|(id, _)| id).collect();
        let (tell, wake) = (self.tell.clone(), self.wake.clone());
        let tell = move |news| {
            // A data plane that has ended needs no news.
            let _ = tell.send((id, number, news));
            wake.wake();
        };
        let before = way.carriage.as_ref().map(|(_, carriage)| carriage.handle());
        if before.is_some() {
            // It has gone silent: what fails next may need plain TCP.
            way.failures += 1;
        }
        way.trying = Some((number, Carriage::start(stable, plan, before, tell)));
    }

    fn close(&mut self, id: LinkId, links: &mut Links) -> Vec<WayChange> {
        let Some(way) = self.all.get_mut(&id) else { return Vec::new() };
        (way.carriage, way.trying, way.stands, way.shown) = (None, None, None, false);
        way.sockets = Sockets::default();
        links.close_tcp(id).into_iter().map(WayChange::Gone).collect()
    }

    /// Connections with other classes than there are now are made anew.
    pub(super) fn classes_changed(&mut self, now: Instant) {
        for way in self.all.values_mut() {
            if way.stands.take().is_some() {
                way.carriage = None;
                way.judge.ended(now, "the classes have changed".to_owned());
            }
        }
        self.next = Some(now);
    }

    /// The TCP connection of a link, if it stands.
    pub(crate) fn stands(&self, uplink: LinkId) -> Option<&Stands> {
        self.all.get(&uplink)?.stands.as_ref()
    }

    /// What there is to say about the way of a link; empty where that is UDP, as it should.
    pub(crate) fn why(&self, now: Instant, uplink: LinkId) -> String {
        self.all.get(&uplink).map_or(String::new(), |way| way.judge.why(now))
    }

    /// Good-byes have been sent: lets them leave.
    pub(super) fn end(&self) {
        if self.all.values().any(|way| way.stands.is_some()) {
            std::thread::sleep(LINGER);
        }
    }
}
