//! A shard of a client beside the first: it joins the first one's session and carries some of its
//! flows.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{config::ClientConfig, events::Event, status::Status};
use mpvpn_tunnel::{ClientEvent, ConnectionNumber};

use super::plane::Plane;
use crate::{
    EngineError,
    policies::Policies,
    shards,
    shards::{OtherShard, ShardMessage},
    turn::{Turn, Turns},
};

/// What only shards of a client say to each other.
#[derive(Debug)]
pub(crate) enum ClientMessage {
    /// From the first shard: the server is here.
    Remotes(Vec<SocketAddr>),
    /// From the first shard: join the session with this secret.
    Join(Vec<u8>),
    /// From the first shard: use the links in this way.
    Policies(Box<Policies>),
    /// From the first shard: the classes are those of this configuration.
    Classes(Box<ClientConfig>),
    /// To the first shard: this member carries packets up to this size (bytes), or none.
    Carries(ConnectionNumber, Option<usize>),
}

/// The first shard of a client, as the others know it.
pub(crate) type FirstShard = shards::FirstShard<ClientMessage, Status, Status>;

/// A shard beside the first.
pub(super) struct GroCoalescer {
    pub(super) member: ConnectionNumber,
    pub(super) config: ClientConfig,
    pub(super) plane: Plane,
    pub(super) first: OtherShard<ClientMessage, Status>,
}

impl GroCoalescer {
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
            while let Some(event) = self.plane.connections.poll_event(turn.now) {
                match event {
                    ClientEvent::Mtu(new) => mtu = Some(new),
                    ClientEvent::Up(assignment) => {
                        up = true;
                        self.plane.assign(&assignment);
                    }
                    ClientEvent::AssignmentChanged(assignment) => self.plane.assign(&assignment),
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
                self.first.tell(ClientMessage::Carries(self.member, carries));
            }
            turns.next(self.plane.poll_timeout(turn.now), &mut turn)?;
            self.plane.take(turns, &turn, &mut |_| {})?;
            while let Some(message) = self.first.next() {
                match message {
                    ShardMessage::Specific(message) => self.obey(turns, turn.now, message)?,
                    ShardMessage::ReportStatus(round) => {
                        let status = self.plane.status(turn.now, &self.config, self.member);
                        self.first.report_status(round, status);
                    }
                    ShardMessage::ReportFlows(round) => {
                        self.first.report_flows(round, self.plane.flows(turn.now, &self.config));
                    }
                    ShardMessage::End => {
                        self.plane.end();
                        return Ok(());
                    }
                    ShardMessage::Status(..) | ShardMessage::Flows(..) | ShardMessage::Ended => {}
                }
            }
        }
    }

    fn obey(&mut self, turns: &Turns, now: Instant, message: ClientMessage) -> Result<(), EngineError> {
        match message {
            ClientMessage::Remotes(remotes) => self.plane.set_remotes(turns, now, remotes, &mut |_| {})?,
            ClientMessage::Policies(policies) => self.plane.set_policies(now, *policies),
            ClientMessage::Classes(config) => {
                self.plane.set_classes(turns, now, &config);
                self.config = *config;
            }
            ClientMessage::Join(secret) => self.plane.connections.join(now, &secret),
            // Only the first shard is told so.
            ClientMessage::Carries(..) => {}
        }
        Ok(())
    }
}
