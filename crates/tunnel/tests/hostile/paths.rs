//! Paths that are opened and abandoned, by the hundred: what they leave at both ends of an honest client, and
//! that they count for the user of a rogue one.

use mpvpn_path::Scheduler;
use mpvpn_quic::FlowControlWindows;
use mpvpn_tunnel::LinkPolicy;
use mpvpn_types::{Duration, LinkId, Tier};

use crate::{
    heap,
    rogue::{Rogue, every_extension},
    world::{MS, TOKEN, World},
};

/// Bytes that an abandoned path leaves at an end at most, for as long as the connection lasts: noq keeps a
/// table of connection IDs for each path ID, which is empty then. They count for the user.
const MAX_LEFT_BYTES: usize = 384;

/// Lets a client carry packets over two links, `count` times. If it `abandons` paths, the one over the second
/// link is another one each time. Returns the bytes of both ends, and the last path ID.
fn carry(world: &mut World, client: usize, count: usize, abandons: bool) -> (usize, u32) {
    for _ in 0..count {
        for tier in [Tier::Never, Tier::Primary] {
            let (now, policy) = (world.now, LinkPolicy { tier, ..LinkPolicy::default() });
            if abandons {
                world.machines[client].client.set_link(now, LinkId(1), policy);
            }
            world.run(200 * MS);
        }
        world.send_both_ways(client, 20 * MS);
        while world.servers[0].poll_change().is_some() {}
    }
    world.run(Duration::from_secs(10));
    let now = world.now;
    let report = world.machines[client].client.report(now);
    (heap::held(), report.paths.iter().map(|path| path.view.id.0).max().expect("a path"))
}

/// By how many bytes a client, its server and the links between them grow meanwhile, and how many path IDs
/// are used.
fn growth(abandons: bool) -> (usize, usize) {
    heap::counted(|| {
        let mut world = World::new();
        let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS), (50, 10 * MS)]);
        world.up(client);
        world.run(Duration::from_secs(1));
        let (before, first) = carry(&mut world, client, 100, abandons);
        let (after, last) = carry(&mut world, client, 1000, abandons);
        (after.saturating_sub(before), (last - first) as usize)
    })
}

#[test]
fn paths_that_were_abandoned_leave_their_ids_only() {
    // The emulated links remember what they delivered.
    let ((usual, _), (bytes, paths)) = (growth(false), growth(true));
    assert!(paths >= 1000, "{paths} paths");
    let left = bytes.saturating_sub(usual) / paths;
    println!("{left} bytes are left of each path, at both ends together");
    assert!(left <= 2 * MAX_LEFT_BYTES, "{left} bytes are left of each path, at both ends together");
}

#[test]
fn a_client_that_opens_and_abandons_paths_without_end_reaches_the_limit_of_its_user() {
    const MEMORY: usize = 1 << 20;
    let mut rogue = Rogue::in_world(World::with_memory(MEMORY), FlowControlWindows::default());
    rogue.connect();
    rogue.ask_for_tunnel(0, every_extension("rogue", 0), None);
    rogue.run(300 * MS);
    let baseline = heap::held();
    let mut paths = 0;
    while rogue.is_alive(0) && paths < 20_000 {
        rogue.open_path(LinkId(1));
        let now = rogue.world.now;
        if let Some(connection) = rogue.quic(0)
            && let Some(last) = connection.paths().max()
        {
            connection.close_path(now, last);
        }
        rogue.run(20 * MS);
        paths += 1;
    }
    let over = heap::held().saturating_sub(baseline);
    println!("{over} bytes over the baseline after {paths} paths");
    assert!(!rogue.is_alive(0), "{paths} paths, {over} bytes, and it may go on");
    assert!(rogue.peak <= baseline + MEMORY, "{} bytes, {MEMORY} are allowed", rogue.peak - baseline);
}
