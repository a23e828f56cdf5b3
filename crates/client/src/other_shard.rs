//! The shards 1 and up of a client: each joins shard 0's session and carries some of its flows.

use std::{net::SocketAddr, time::Instant};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_links::policies::LinkPolicies;
use mpvpn_status::{Status, events::Event};
use mpvpn_threads::{
    event_loop::{EventLoop, Iteration},
    shards::{self, OtherShard, ShardMessage},
};
use mpvpn_tunnel::{ClientEvent, ConnectionNumber};

use super::{data_plane::DataPlane, servers::ServerAccess};

/// Messages between the shards of a client.
#[derive(Debug)]
pub(crate) enum ClientMessage {
    /// From shard 0: the server's addresses.
    ServerAddresses(Vec<SocketAddr>),
    /// From shard 0: use this server from now on; its addresses follow.
    Server(Box<ServerAccess>),
    /// From shard 0: join the session with this secret.
    Join(Vec<u8>),
    /// From shard 0: the policies of the links.
    Policies(Box<LinkPolicies>),
    /// From shard 0: the classes of this configuration.
    Classes(Box<ClientConfig>),
    /// To shard 0: the MTU (bytes) of this connection, or `None` while it carries no packets.
    CarriedMtu(ConnectionNumber, Option<usize>),
}

/// Shard 0 of a client.
pub(crate) type FirstShard = shards::FirstShard<ClientMessage, Status, Status>;

/// A shard beside shard 0.
pub(super) struct JoinedShard {
    pub(super) member: ConnectionNumber,
    pub(super) config: ClientConfig,
    pub(super) data_plane: DataPlane,
    pub(super) first: OtherShard<ClientMessage, Status>,
}

impl JoinedShard {
    /// Runs until shard 0 ends it.
    pub(super) fn run(mut self, event_loop: &mut EventLoop) -> Result<(), RunError> {
        // Without a connection this shard must get no packets.
        self.data_plane.attach(event_loop, false)?;
        let mut iteration = Iteration::first();
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
                    // This shard opens no streams.
                    _ => {}
                }
            }
            let carried_mtu = is_up.then_some(mtu).flatten();
            if carried_mtu != previous_mtu {
                self.data_plane.attach(event_loop, carried_mtu.is_some())?;
                self.first.send(ClientMessage::CarriedMtu(self.member, carried_mtu));
            }
            let timeout = self.data_plane.poll_timeout(iteration.now);
            let max_delay = self.data_plane.connections.max_coalescing_delay(iteration.now);
            event_loop.wait(timeout, max_delay, &mut iteration)?;
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
                    ShardMessage::Status(..)
                    | ShardMessage::ReportOverview(..)
                    | ShardMessage::Overview(..)
                    | ShardMessage::Flows(..)
                    | ShardMessage::Ended => {}
                }
            }
        }
    }

    fn handle_message(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        message: ClientMessage,
    ) -> Result<(), RunError> {
        match message {
            ClientMessage::ServerAddresses(remotes) => {
                self.data_plane.set_remotes(event_loop, now, remotes, &mut |_| {})?
            }
            ClientMessage::Server(access) => {
                self.config.use_server(access.number);
                self.data_plane.use_server(event_loop, now, &access, &self.config);
            }
            ClientMessage::Policies(policies) => self.data_plane.set_policies(now, *policies),
            ClientMessage::Classes(config) => {
                self.data_plane.set_classes(event_loop, now, &config);
                self.config = *config;
            }
            ClientMessage::Join(secret) => self.data_plane.connections.join(now, &secret),
            // Only shard 0 receives it.
            ClientMessage::CarriedMtu(..) => {}
        }
        Ok(())
    }
}
