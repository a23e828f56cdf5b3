//! Helpers for relays of a client.

use bytes::Bytes;
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClientEvent, RelayId, RelayRead, TunnelMode};
use mpvpn_types::Duration;

use super::{
    MS, TOKEN, World,
    app::{check, pattern},
};

/// One connection as the edge sees it.
pub struct Talk {
    pub to: Authority,
    pub relay: Option<RelayId>,
    pub opened: bool,
    pub failed: Option<ProxyError>,
    pub gone: bool,
    pub sends: u64,
    pub sent: u64,
    pub got: u64,
    pub ended: bool,
    /// It reads what comes.
    pub reads: bool,
}

impl Talk {
    /// To a destination that sends what this port stands for (see [`Destination`]) and takes `sends` bytes.
    pub fn new(port: u16, sends: u64) -> Self {
        Self {
            to: format!("destination.example:{port}").parse().unwrap(),
            relay: None,
            opened: false,
            failed: None,
            gone: false,
            sends,
            sent: 0,
            got: 0,
            ended: false,
            reads: true,
        }
    }

    pub fn is_over(&self) -> bool {
        self.failed.is_some() || self.gone || self.ended && self.sent == self.sends
    }

    pub fn take(&mut self, event: &ClientEvent) {
        match *event {
            ClientEvent::RelayOpened(id) if self.relay == Some(id) => self.opened = true,
            ClientEvent::RelayFailed(id, failure) if self.relay == Some(id) => self.failed = Some(failure),
            ClientEvent::RelayGone(id) if self.relay == Some(id) => self.gone = true,
            _ => {}
        }
    }

    pub fn run(&mut self, world: &mut World, machine: usize) {
        let client = &mut world.machines[machine].client;
        if self.relay.is_none() {
            self.relay = client.relay_open(&self.to);
        }
        let Some(relay) = self.relay.filter(|_| self.opened && !self.gone) else { return };
        while self.reads && !self.ended {
            match client.relay_read(world.now, relay) {
                RelayRead::Data(data) => {
                    check(self.got, &data);
                    self.got += data.len() as u64;
                }
                RelayRead::Finished => self.ended = true,
                RelayRead::Blocked => break,
                RelayRead::Broken => return,
            }
        }
        while self.sent < self.sends {
            let room = client.relay_room(relay).min((self.sends - self.sent) as usize).min(60_000);
            if room == 0 {
                break;
            }
            client.relay_write(relay, Bytes::from(pattern(self.sent, room)));
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

/// A client without packets that is up.
pub fn streams(links: &[(u64, Duration)]) -> (World, usize) {
    let (mut world, client) = world(TunnelMode::RelaysOnly, TOKEN, links);
    world.up(client);
    world.run(500 * MS);
    (world, client)
}

/// Lets all talk until they are over, or for `most`; how long that took.
pub fn play(world: &mut World, client: usize, talks: &mut [Talk], most: Duration) -> Duration {
    let start = world.now;
    while world.now < start + most && !talks.iter().all(Talk::is_over) {
        step(world, client, talks);
    }
    world.now - start
}

pub fn step(world: &mut World, client: usize, talks: &mut [Talk]) {
    while let Some(event) = world.machines[client].streams.pop_front() {
        talks.iter_mut().for_each(|talk| talk.take(&event));
    }
    talks.iter_mut().for_each(|talk| talk.run(world, client));
    world.run(MS);
}
