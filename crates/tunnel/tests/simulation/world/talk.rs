//! Helpers for TCP connections of a client that are relayed as streams.

use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientEvent, RelayId, RelayRead, TunnelMode};
use mpvpn_types::Duration;

use super::{
    MS, TOKEN, World,
    app::{check, pattern},
};

/// A relayed connection, as the edge of a client sees it.
pub struct RelayedConnection {
    pub to: Authority,
    pub relay: Option<RelayId>,
    pub opened: bool,
    pub failed: Option<ProxyError>,
    pub closed: bool,
    pub sends: u64,
    pub sent: u64,
    pub received_bytes: u64,
    pub ended: bool,
    /// Whether it reads.
    pub reads: bool,
}

impl RelayedConnection {
    /// A connection to a destination with this port (see [`Destination`](super::app::Destination)), which
    /// gets `sends` bytes.
    pub fn new(port: u16, sends: u64) -> Self {
        Self {
            to: format!("destination.example:{port}").parse().unwrap(),
            relay: None,
            opened: false,
            failed: None,
            closed: false,
            sends,
            sent: 0,
            received_bytes: 0,
            ended: false,
            reads: true,
        }
    }

    pub fn is_over(&self) -> bool {
        self.failed.is_some() || self.closed || self.ended && self.sent == self.sends
    }

    pub fn take(&mut self, event: &ClientEvent) {
        match *event {
            ClientEvent::RelayOpened(id) if self.relay == Some(id) => self.opened = true,
            ClientEvent::RelayFailed(id, failure) if self.relay == Some(id) => self.failed = Some(failure),
            ClientEvent::RelayGone(id) if self.relay == Some(id) => self.closed = true,
            _ => {}
        }
    }

    pub fn run(&mut self, world: &mut World, machine: usize) {
        let client = &mut world.machines[machine].client;
        if self.relay.is_none() {
            self.relay = client.relay_open(&self.to);
        }
        let Some(relay) = self.relay.filter(|_| self.opened && !self.closed) else { return };
        while self.reads && !self.ended {
            match client.relay_read(world.now, relay) {
                RelayRead::Data(data) => {
                    check(self.received_bytes, &data);
                    self.received_bytes += data.len() as u64;
                }
                RelayRead::Finished => self.ended = true,
                RelayRead::Blocked => break,
                RelayRead::Broken => return,
            }
        }
        while self.sent < self.sends {
            let room = client.relay_writable_bytes(relay).min((self.sends - self.sent) as usize).min(60_000);
            if room == 0 {
                break;
            }
            client.relay_write(relay, pattern(self.sent, room));
            self.sent += room as u64;
            if self.sent == self.sends {
                client.relay_finish(relay);
            }
        }
    }
}

pub fn world(mode: TunnelMode, token: &str, links: &[(u64, Duration)]) -> (World, usize) {
    let mut world = World::new();
    world.mode = mode;
    world.flow_rules = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    let client = world.add(token, Scheduler::Auto, links);
    (world, client)
}

/// A client without packets whose tunnel is up.
pub fn streams(links: &[(u64, Duration)]) -> (World, usize) {
    let (mut world, client) = world(TunnelMode::RelaysOnly, TOKEN, links);
    world.up(client);
    world.run(500 * MS);
    (world, client)
}

/// Runs the connections until all have ended, or for `timeout`; returns the duration.
pub fn play(
    world: &mut World,
    client: usize,
    connections: &mut [RelayedConnection],
    timeout: Duration,
) -> Duration {
    let start = world.now;
    while world.now < start + timeout && !connections.iter().all(RelayedConnection::is_over) {
        step(world, client, connections);
    }
    world.now - start
}

pub fn step(world: &mut World, client: usize, connections: &mut [RelayedConnection]) {
    while let Some(event) = world.machines[client].streams.pop_front() {
        connections.iter_mut().for_each(|connection| connection.take(&event));
    }
    connections.iter_mut().for_each(|connection| connection.run(world, client));
    world.run(MS);
}
