//! A shard of a client beside the first: it joins the first one's session and carries some of its
//! flows.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{config::ClientConfig, events::Event, status::Status};
use mpvpn_tunnel::{ClientEvent, ConnectionNumber};

use super::data_plane::DataPlane;
use crate::{
    EngineError,
    event_loop::{EventLoop, Iteration},
    policies::LinkPolicies,
    shards,
    shards::{OtherShard, ShardMessage},
};

/// What only shards of a client say to each other.
#[derive(Debug)]
pub(crate) enum ClientMessage {
    /// From the first shard: the server is here.
    ServerAddresses(Vec<SocketAddr>),
    /// From the first shard: join the session with this secret.
    Join(Vec<u8>),
    /// From the first shard: use the links in this way.
    Policies(Box<LinkPolicies>),
    /// From the first shard: the classes are those of this configuration.
    Classes(Box<ClientConfig>),
    /// To the first shard: this member carries packets up to this size (bytes), or none.
    CarriedMtu(ConnectionNumber, Option<usize>),
}

/// The first shard of a client, as the others know it.
pub(crate) type FirstShard = shards::FirstShard<ClientMessage, Status, Status>;

/// A shard beside the first.
pub(super) struct GroCoalescer {
    pub(super) member: ConnectionNumber,
    pub(super) config: ClientConfig,
    pub(super) data_plane: DataPlane,
    pub(super) first: OtherShard<ClientMessage, Status>,
}

impl GroCoalescer {
    /// Runs until the first shard says that it is over.
    pub(super) fn run(mut self, event_loop: &mut EventLoop) -> Result<(), EngineError> {
        // Until there is a connection, nothing must come in here.
        self.data_plane.attach(event_loop, false)?;
        let mut iteration = Iteration::new();
        let mut is_up = false;
        let mut mtu = None;
        loop {
            self.data_plane.transmit(event_loop, iteration.now);
            let previous_mtu = is_up.then_some(mtu).flatten();
            while let Some(event) = self.data_plane.connections.poll_event(iteration.now) {
                match event {
                    ClientEvent::Mtu(new) => mtu = Some(new),
                    ClientEvent::Up(assignment) => {
                        is_up = true;
                        self.data_plane.assign(&assignment);
                    }
                    ClientEvent::AssignmentChanged(assignment) => self.data_plane.assign(&assignment),
                    ClientEvent::Down(reason) => {
                        is_up = false;
                        let (shard, reason) = (self.member.shard(), reason.into());
                        self.data_plane.events.report(Event::ShardChanged {
                            shard,
                            connected: false,
                            reason,
                        });
                    }
                    ClientEvent::Fatal(error) => return Err(error.into()),
                    // It opens no streams.
                    _ => {}
                }
            }
            let carried_mtu = is_up.then_some(mtu).flatten();
            if carried_mtu != previous_mtu {
                self.data_plane.attach(event_loop, carried_mtu.is_some())?;
                self.first.send(ClientMessage::CarriedMtu(self.member, carried_mtu));
            }
            event_loop.wait(self.data_plane.poll_timeout(iteration.now), &mut iteration)?;
            self.data_plane.handle_ready(event_loop, &iteration, &mut |_| {})?;
            while let Some(message) = self.first.next() {
                match message {
                    ShardMessage::Specific(message) => {
                        self.handle_message(event_loop, iteration.now, message)?
                    }
                    ShardMessage::ReportStatus(round) => {
                        let status = self.data_plane.status(iteration.now, &self.config, self.member);
                        self.first.report_status(round, status);
                    }
                    ShardMessage::ReportFlows(round) => {
                        self.first.report_flows(round, self.data_plane.flows(iteration.now, &self.config));
                    }
                    ShardMessage::End => {
                        self.data_plane.end();
                        return Ok(());
                    }
                    ShardMessage::Status(..) | ShardMessage::Flows(..) | ShardMessage::Ended => {}
                }
            }
        }
    }

    fn handle_message(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        message: ClientMessage,
    ) -> Result<(), EngineError> {
        match message {
            ClientMessage::ServerAddresses(remotes) => {
                self.data_plane.set_remotes(event_loop, now, remotes, &mut |_| {})?
            }
            ClientMessage::Policies(policies) => self.data_plane.set_policies(now, *policies),
            ClientMessage::Classes(config) => {
                self.data_plane.set_classes(event_loop, now, &config);
                self.config = *config;
            }
            ClientMessage::Join(secret) => self.data_plane.connections.join(now, &secret),
            // Only the first shard is told so.
            ClientMessage::CarriedMtu(..) => {}
        }
        Ok(())
    }
}
