//! A shard of a client beside the first: it joins the first one's session and carries some of its
//! flows.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{
    config::ClientConfig,
    events::Event,
    status::{FlowList, Status},
};
use mpvpn_tunnel::{ClientEvent, Member};

use super::plane::Plane;
use crate::{
    EngineError,
    exchange::{Inbox, Outbox},
    policies::Policies,
    turn::{Turn, Turns},
};

/// What the shards of a client say to each other.
#[derive(Debug)]
pub(crate) enum Word {
    /// From the first shard: the server is here.
    Remotes(Vec<SocketAddr>),
    /// From the first shard: join the session with this secret.
    Join(Vec<u8>),
    /// From the first shard: use the links in this way.
    Policies(Box<Policies>),
    /// From the first shard: the classes are those of this configuration.
    Classes(Box<ClientConfig>),
    /// From the first shard: report, and name this round.
    Report(u64),
    /// From the first shard: tell which flows there are, and name this round.
    List(u64),
    /// From the first shard: say good-bye to the server and end.
    End,
    /// To the first shard: this member carries packets up to this size (bytes), or none.
    Carries(Member, Option<usize>),
    /// To the first shard: the report.
    Reported(u64, Box<Status>),
    /// To the first shard: the flows.
    Listed(u64, FlowList),
    /// To the first shard: this thread has ended.
    Ended,
}

/// A shard beside the first.
pub(super) struct Joiner {
    pub(super) member: Member,
    pub(super) config: ClientConfig,
    pub(super) plane: Plane,
    pub(super) inbox: Inbox<Word>,
    pub(super) first: Outbox<Word>,
}

impl Joiner {
    /// Runs until the first shard says that it is over.
    pub(super) fn run(mut self, turns: &mut Turns) -> Result<(), EngineError> {
        // Until there is a connection, nothing must come in here.
        self.plane.attach(turns, false)?;
        let mut turn = Turn::new();
        let mut up = false;
        let mut mtu = None;
        loop {
            self.plane.transmit(turns, turn.now);
            let before = up.then_some(mtu).flatten();
            while let Some(event) = self.plane.fleet.poll_event(turn.now) {
                match event {
                    ClientEvent::Mtu(new) => mtu = Some(new),
                    ClientEvent::Up(assignment) => {
                        up = true;
                        self.plane.assign(&assignment);
                    }
                    ClientEvent::Changed(assignment) => self.plane.assign(&assignment),
                    ClientEvent::Down(reason) => {
                        up = false;
                        let (shard, reason) = (self.member.shard(), reason.into());
                        self.plane.events.report(Event::ShardChanged { shard, connected: false, reason });
                    }
                    ClientEvent::Fatal(error) => return Err(error.into()),
                    // It opens no streams.
                    _ => {}
                }
            }
            let carries = up.then_some(mtu).flatten();
            if carries != before {
                self.plane.attach(turns, carries.is_some())?;
                self.first.tell(Word::Carries(self.member, carries));
            }
            turns.next(self.plane.poll_timeout(turn.now), &mut turn)?;
            self.plane.take(turns, &turn, &mut |_| {})?;
            while let Some(word) = self.inbox.word() {
                if self.obey(turns, turn.now, word)?.is_none() {
                    self.plane.end();
                    return Ok(());
                }
            }
        }
    }

    /// `None` if it is time to end.
    fn obey(&mut self, turns: &Turns, now: Instant, word: Word) -> Result<Option<()>, EngineError> {
        match word {
            Word::Remotes(remotes) => self.plane.set_remotes(turns, now, remotes, &mut |_| {})?,
            Word::Policies(policies) => self.plane.set_policies(now, *policies),
            Word::Classes(config) => {
                self.plane.set_classes(turns, now, &config);
                self.config = *config;
            }
            Word::Join(secret) => self.plane.fleet.join(now, &secret),
            Word::Report(round) => {
                let status = self.plane.status(now, &self.config, self.member);
                self.first.tell(Word::Reported(round, Box::new(status)));
            }
            Word::List(round) => self.first.tell(Word::Listed(round, self.plane.flows(now, &self.config))),
            Word::End => return Ok(None),
            Word::Carries(..) | Word::Reported(..) | Word::Listed(..) | Word::Ended => {}
        }
        Ok(Some(()))
    }
}
