//! Which paths work: both ends must know, also if one direction fails, no data moves, or a NAT on the path
//! changes its binding. In simulated time.

use crate::world::{MS, TOKEN, World};
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::{ClientState, LinkPolicy};
use mpvpn_types::{Duration, LinkId};

const SECOND: Duration = Duration::from_secs(1);
const ONE_WAY: Duration = Duration::from_millis(12);

fn with_links(count: usize) -> (World, usize) {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &vec![(50, ONE_WAY); count]);
    world.up(client);
    world.run(2 * SECOND);
    (world, client)
}

/// Sets the loss of a link (0 to 1) up and down.
fn lose(world: &mut World, client: usize, link: u16, up: f64, down: f64) {
    let link = world.machines[client].links.get_mut(&LinkId(link)).expect("a link");
    (link.up.loss, link.down.loss) = (up, down);
}

/// The links that carry data, as both ends see it.
pub(crate) fn active(world: &mut World, client: usize) -> [usize; 2] {
    let now = world.now;
    let count = |paths: &[mpvpn_tunnel::PathReport]| {
        paths.iter().filter(|path| path.state == PathState::Active).count()
    };
    let own = count(&world.machines[client].client.report(now).paths);
    let sessions = world.servers[0].report(now);
    [own, sessions.iter().map(|session| count(&session.paths)).sum()]
}

#[test]
fn a_peer_learns_of_a_lost_carrier_as_soon_as_a_packet_reaches_it() {
    // Heartbeats come once in a round trip: of reports that waited for the next one, most would be late.
    for phase in 0..10 {
        let (mut world, client) = with_links(2);
        world.send_both_ways(client, 2 * SECOND + phase * 3 * MS);
        lose(&mut world, client, 0, 1.0, 1.0);
        let now = world.now;
        world.machines[client].link_down(now, LinkId(0));
        world.send_both_ways(client, ONE_WAY + 3 * MS);
        assert_eq!(active(&mut world, client), [1, 1], "{phase}");
    }
}

#[test]
fn a_path_that_was_lost_is_found_again_while_nothing_moves() {
    for (up, down) in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)] {
        let (mut world, client) = with_links(2);
        world.send_both_ways(client, 2 * SECOND);
        lose(&mut world, client, 0, up, down);
        world.send_both_ways(client, SECOND);
        world.run(60 * SECOND);
        assert_eq!(active(&mut world, client), [1; 2], "loss {up} up, {down} down");
        lose(&mut world, client, 0, 0.0, 0.0);
        world.run(6 * SECOND);
        assert_eq!(active(&mut world, client), [2; 2], "6 idle seconds after a loss {up} up, {down} down");
    }
}

#[test]
fn a_metered_path_that_was_lost_is_found_again_with_few_packets() {
    let (mut world, client) = with_links(2);
    let now = world.now;
    let metered = LinkPolicy { metered: true, ..LinkPolicy::default() };
    world.machines[client].client.set_link(now, LinkId(0), metered);
    world.send_both_ways(client, 2 * SECOND);
    lose(&mut world, client, 0, 1.0, 1.0);
    world.send_both_ways(client, SECOND);
    world.run(120 * SECOND);
    lose(&mut world, client, 0, 0.0, 0.0);
    world.run(30 * SECOND);
    assert_eq!(active(&mut world, client), [2; 2]);
}

#[test]
fn an_idle_tunnel_with_a_lost_link_sends_little() {
    let (mut world, client) = with_links(2);
    world.send_both_ways(client, 2 * SECOND);
    lose(&mut world, client, 0, 1.0, 1.0);
    world.send_both_ways(client, SECOND);
    world.run(60 * SECOND);
    let carried = |world: &World| {
        let link = &world.machines[client].links[&LinkId(1)];
        link.up.carried + link.down.carried
    };
    let before = carried(&world);
    world.run(60 * SECOND);
    let bytes = carried(&world) - before;
    assert!(bytes < 8000, "{bytes} bytes in an idle minute on the link that works");
}

#[test]
fn an_idle_client_does_not_take_its_idle_time_for_silence() {
    let (mut world, client) = with_links(1);
    // After most durations, heartbeats of the idle time hide it.
    for idle in (20..60).map(|tenths| tenths * 100 * MS) {
        for _ in 0..100 {
            let packet = world.packet_to_target(client, &[1; 100]);
            world.client_sends(client, packet);
            world.run(7 * MS);
            let packet = world.packet_to_client(client, &[2; 100]);
            world.server_sends(packet);
            world.run(13 * MS);
        }
        world.run(idle);
        let carried = |world: &World| world.machines[client].links[&LinkId(0)].up.carried;
        let before = carried(&world);
        let packet = world.packet_to_target(client, &[1; 100]);
        world.client_sends(client, packet);
        world.run(40 * MS);
        let bytes = carried(&world) - before;
        assert!(bytes < 1000, "{bytes} bytes for one packet after {idle:?}: a new connection is made");
        let (a, b) = world.send_both_ways(client, SECOND);
        assert!(a.max(b) <= 30 * MS, "gaps of {a:?} and {b:?} after {idle:?}");
    }
}

#[test]
fn an_idle_client_notices_with_its_next_heartbeat_that_nothing_answers() {
    for (links, one_is_down) in [(1, false), (2, false), (2, true)] {
        let (mut world, client) = with_links(links);
        if one_is_down {
            lose(&mut world, client, 0, 1.0, 1.0);
        }
        world.send_both_ways(client, SECOND);
        world.run(20 * SECOND);
        assert_eq!(active(&mut world, client)[0], links - usize::from(one_is_down));
        (0..links).for_each(|link| lose(&mut world, client, link as u16, 1.0, 1.0));
        // A heartbeat in 15 s, and a second for its answer.
        world.run(17 * SECOND);
        assert_eq!(active(&mut world, client)[0], 0, "of {links} links, one down before: {one_is_down}");
        (0..links).for_each(|link| lose(&mut world, client, link as u16, 0.0, 0.0));
        world.run(6 * SECOND);
        assert_eq!(active(&mut world, client), [links; 2]);
    }
}

/// A link of an idle client falls silent: both ends notice with the next heartbeat, whether the other link is
/// metered or not, and little is sent from then on.
#[test]
fn an_idle_client_notices_that_one_of_its_links_is_silent() {
    let metered = LinkPolicy { metered: true, ..LinkPolicy::default() };
    for metered in [None, Some((0, metered)), Some((1, metered))] {
        for dead in 0..2 {
            let (mut world, client) = with_links(2);
            if let Some((link, policy)) = metered {
                let now = world.now;
                world.machines[client].client.set_link(now, LinkId(link), policy);
            }
            world.send_both_ways(client, SECOND);
            world.run(20 * SECOND);
            lose(&mut world, client, dead, 1.0, 1.0);
            // A heartbeat in 15 or 25 s, and a second for its answer.
            world.run(27 * SECOND);
            let metered = metered.as_ref().map(|(link, _)| *link);
            let case = format!("link {dead} is silent, metered: {metered:?}");
            assert_eq!(active(&mut world, client), [1, 1], "{case}");
            world.run(30 * SECOND);
            let later = rates(&mut world, client, 120 * SECOND, 0);
            let bar = |link| if metered == Some(link) { 0.2 } else { 1.0 };
            let is_little = (0..2).all(|link| later[usize::from(link)] <= bar(link));
            assert!(is_little, "{case}: {later:.2?} kbit/s");
            lose(&mut world, client, dead, 0.0, 0.0);
            world.run(30 * SECOND);
            assert_eq!(active(&mut world, client), [2, 2], "{case}");
        }
    }
}

/// An app asks a host behind the server so many times a second, and is answered at once. Returns the rates of
/// the first two links (kbit/s, both directions), and how many answers are missing.
fn questions(world: &mut World, client: usize, time: Duration, packets: u32) -> ([f64; 2], usize) {
    let carried = |world: &World| {
        [0, 1].map(|link| {
            let link = world.machines[client].links.get(&LinkId(link));
            link.map_or(0, |link| link.up.offered + link.down.offered)
        })
    };
    let before = carried(world);
    world.machines[client].received.clear();
    let count = (time.as_secs_f64() * f64::from(packets)) as u32;
    for _ in 0..count {
        let end = world.now + SECOND / packets;
        world.received_by_server.clear();
        let question = world.packet_to_target(client, &[1; 56]);
        world.client_sends(client, question);
        world.run(SECOND / packets / 2);
        for _ in 0..world.received_by_server.len() {
            let answer = world.packet_to_client(client, &[2; 56]);
            world.server_sends(answer);
        }
        world.run(end - world.now);
    }
    let after = carried(world);
    let missing = count as usize - world.machines[client].received.len().min(count as usize);
    ([0, 1].map(|link| (after[link] - before[link]) as f64 * 8e-3 / time.as_secs_f64()), missing)
}

/// Of two links one falls silent while apps send, in one direction or in both. From the second minute on it
/// carries questions that come ever less often, and the other one no more than if there were no second link.
/// It is used again soon after it is back.
#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_link_without_an_answer_costs_little_beside_one_that_works() {
    let mut failures = Vec::new();
    for packets in [1, 100] {
        let (mut world, client) = with_links(1);
        questions(&mut world, client, 65 * SECOND, packets);
        let ([alone, _], missing) = questions(&mut world, client, 120 * SECOND, packets);
        assert_eq!(missing, 0);
        let harms: &[(f64, f64)] =
            if packets == 1 { &[(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)] } else { &[(1.0, 1.0)] };
        for metered in [None, Some(0), Some(1)] {
            for (dead, (up, down)) in (0..2).flat_map(|dead| harms.iter().map(move |harm| (dead, *harm))) {
                let (mut world, client) = with_links(2);
                if let Some(link) = metered {
                    let policy = LinkPolicy { metered: true, ..LinkPolicy::default() };
                    let now = world.now;
                    world.machines[client].client.set_link(now, LinkId(link), policy);
                }
                questions(&mut world, client, 5 * SECOND, packets);
                lose(&mut world, client, dead, up, down);
                let (minute, _) = questions(&mut world, client, 60 * SECOND, packets);
                let (later, missing) = questions(&mut world, client, 120 * SECOND, packets);
                let (silent, good) = (later[usize::from(dead)], later[usize::from(1 - dead)]);
                let most = if metered == Some(dead) { 0.2 } else { 1.0 };
                lose(&mut world, client, dead, 0.0, 0.0);
                let pause = if metered == Some(dead) { 10 } else { 2 };
                let (_, lost) = questions(&mut world, client, (pause + 1) * SECOND, packets);
                let active = active(&mut world, client);
                let case = format!(
                    "{packets} packets/s, loss of link {dead} {up} up, {down} down, metered {metered:?}: \
                     {minute:.2?}, then {later:.2?} kbit/s, {missing} lost, and {lost} at the return, \
                     {active:?} paths; {alone:.2} kbit/s over one link"
                );
                println!("{case}");
                if silent > most || good > alone + 1.0 || missing + lost > 0 || active != [2, 2] {
                    failures.push(case);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A client with two links, the second of them metered, whose server is gone after some traffic, or was never
/// there.
fn without_server(was_there: bool) -> (World, usize) {
    let metered = LinkPolicy { metered: true, ..LinkPolicy::default() };
    if was_there {
        let (mut world, client) = with_links(2);
        let now = world.now;
        world.machines[client].client.set_link(now, LinkId(1), metered);
        world.send_both_ways(client, 5 * SECOND);
        (0..2).for_each(|link| lose(&mut world, client, link, 1.0, 1.0));
        return (world, client);
    }
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, ONE_WAY); 2]);
    let now = world.now;
    world.machines[client].client.set_link(now, LinkId(1), metered);
    (0..2).for_each(|link| lose(&mut world, client, link, 1.0, 1.0));
    (world, client)
}

/// The rates at which the links send (kbit/s), on average over `time`, while an app sends so many packets a
/// second.
fn rates(world: &mut World, client: usize, time: Duration, packets: u32) -> [f64; 2] {
    let sent = |world: &World| [0, 1].map(|link| world.machines[client].links[&LinkId(link)].up.offered);
    let before = sent(world);
    match packets {
        0 => world.run(time),
        _ => {
            for _ in 0..(time.as_secs_f64() * f64::from(packets)) as u32 {
                let packet = world.packet_to_target(client, &[1; 56]);
                world.client_sends(client, packet);
                world.run(SECOND / packets);
            }
        }
    }
    let after = sent(world);
    [0, 1].map(|link| (after[link] - before[link]) as f64 * 8e-3 / time.as_secs_f64())
}

#[test]
fn a_client_whose_server_does_not_answer_sends_ever_less() {
    let mut failures = Vec::new();
    for was_there in [true, false] {
        // Without addresses no app has packets for the tunnel.
        let loads: &[u32] = if was_there { &[0, 1, 100] } else { &[0] };
        for packets in loads.iter().copied() {
            let (mut world, client) = without_server(was_there);
            // A server that is back within a minute is to be found within 5 s.
            let minute = rates(&mut world, client, 65 * SECOND, packets);
            // The session lasts for three minutes.
            let next = rates(&mut world, client, 115 * SECOND, packets);
            let later = rates(&mut world, client, 1800 * SECOND, packets);
            let case = format!(
                "there: {was_there}, {packets} packets/s: {minute:.2?}, {next:.2?}, {later:.2?} kbit/s"
            );
            println!("{case}");
            let is_little = |rates: [f64; 2]| rates[0] <= 1.0 && rates[1] <= 0.2;
            if minute.iter().any(|rate| *rate > 30.0) || !is_little(next) || !is_little(later) {
                failures.push(case);
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_client_without_a_session_whose_server_does_not_answer_seldom_wakes() {
    for was_there in [true, false] {
        let (mut world, client) = without_server(was_there);
        // Until the session of a client that had one has ended.
        world.run(240 * SECOND);
        let mut wakes = 0;
        let end = world.now + 600 * SECOND;
        while let Some(next) = world.machines[client].client.0.poll_timeout(world.now).filter(|at| *at < end)
        {
            let pause = next.saturating_duration_since(world.now).max(MS);
            world.run(pause);
            wakes += 1;
        }
        println!("was there: {was_there}: {wakes} wakes in ten minutes");
        // A probe in 25 s, one in 150 s on the metered link, and the packets of a few handshakes.
        assert!(wakes <= 100, "there before: {was_there}: {wakes} wakes in ten minutes");
    }
}

#[test]
fn a_server_that_is_back_is_found_soon_and_at_once_where_something_is_wanted() {
    for was_there in [true, false] {
        for (away, limit) in [(5, 2), (30, 5), (55, 5), (300, 30), (3000, 30)] {
            let (mut world, client) = without_server(was_there);
            world.run(away * SECOND);
            world.restart_server();
            (0..2).for_each(|link| lose(&mut world, client, link, 0.0, 0.0));
            world.run(limit * SECOND);
            assert!(works(&mut world, client), "there before: {was_there}, {limit} s after {away} s");
        }
    }
    let (mut world, client) = without_server(true);
    world.run(300 * SECOND);
    (0..2).for_each(|link| lose(&mut world, client, link, 0.0, 0.0));
    let packet = world.packet_to_target(client, &[1; 56]);
    world.client_sends(client, packet);
    world.run(SECOND);
    assert!(works(&mut world, client), "an app sends");
}

#[test]
fn a_tunnel_whose_only_link_is_back_goes_on_at_once_with_the_packets_it_promised() {
    let (mut world, client) = with_links(1);
    world.send_both_ways(client, 2 * SECOND);
    let mtu = world.machines[client].mtu.expect("an MTU");
    let full = vec![1; mtu - 28];
    // Until a new connection is tried.
    let now = world.now;
    lose(&mut world, client, 0, 1.0, 1.0);
    world.machines[client].link_down(now, LinkId(0));
    world.send_both_ways(client, 1500 * MS);
    lose(&mut world, client, 0, 0.0, 0.0);
    let back = world.now;
    world.machines[client].link_up(back, LinkId(0));
    world.machines[client].received.clear();
    world.received_by_server.clear();
    while world.now < back + 500 * MS {
        let (out, returned) = (world.packet_to_target(client, &full), world.packet_to_client(client, &full));
        world.client_sends(client, out);
        world.server_sends(returned);
        world.run(2 * MS);
    }
    // Handshake and request take a round trip each, and begin half a one late.
    for (end, received) in [&world.machines[client].received, &world.received_by_server].iter().enumerate() {
        let first = received.iter().find(|(_, packet)| packet.len() == mtu).map(|(at, _)| *at - back);
        assert!(first.is_some_and(|after| after <= 5 * 2 * ONE_WAY), "{end}: {first:?}");
        // Destination unreachable, fragmentation needed (RFC 792).
        let too_big = received.iter().filter(|(_, packet)| packet[9] == 1 && packet[20..22] == [3, 4]);
        assert_eq!(too_big.count(), 0, "{end}");
    }
    assert!(works(&mut world, client));
}

fn works(world: &mut World, client: usize) -> bool {
    let now = world.now;
    let report = world.machines[client].client.report(now);
    report.state == ClientState::Up && report.outage.is_none()
}

#[test]
fn both_ends_find_the_only_path_that_works_both_ways() {
    // The loss up and down of the failed links.
    let harms = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)];
    for good in 0..3 {
        for turn in 0..3 {
            for idle in [Duration::ZERO, 5 * SECOND, 40 * SECOND] {
                let (mut world, client) = with_links(3);
                world.send_both_ways(client, SECOND);
                // At first nothing works both ways.
                for link in 0..3 {
                    let (up, down) = harms[(usize::from(link) + turn) % 3];
                    lose(&mut world, client, link, up, down);
                }
                world.send_both_ways(client, 2 * SECOND);
                world.run(idle);
                lose(&mut world, client, good, 0.0, 0.0);
                world.send_both_ways(client, 1500 * MS);
                let (a, b) = world.send_both_ways(client, SECOND);
                assert!(
                    a.max(b) <= 100 * MS,
                    "link {good}, turn {turn}, {idle:?} idle: gaps of {a:?} and {b:?}"
                );
                assert_eq!(world.machines[client].down_count, 0, "link {good}, turn {turn}, {idle:?} idle");
            }
        }
    }
}

#[test]
fn an_address_that_changes_on_the_way_is_followed() {
    for (ip, links) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
        let (mut world, client) = with_links(links);
        world.send_both_ways(client, 2 * SECOND);
        let link = world.machines[client].links.get_mut(&LinkId(0)).expect("a link");
        link.address.set_port(6000);
        if ip {
            link.address.set_ip([203, 0, 113, 77].into());
        }
        let (a, b) = world.send_both_ways(client, 2 * SECOND);
        assert!(a.max(b) <= 300 * MS, "another IP: {ip}, {links} links: gaps of {a:?} and {b:?}");
        assert_eq!(world.machines[client].down_count, 0);
        assert_eq!(active(&mut world, client), [links; 2]);
        // Congestion control continues: the offered packets arrive, and no more are in flight.
        world.machines[client].received.clear();
        for _ in 0..1000 {
            for _ in 0..2 {
                let packet = world.packet_to_client(client, &[7; 1000]);
                world.server_sends(packet);
            }
            world.run(MS);
        }
        let packets = world.machines[client].received.len();
        assert!(packets >= 1900, "another IP: {ip}, {links} links: {packets} of 2000 packets");
        let now = world.now;
        for path in world.servers[0].report(now).iter().flat_map(|session| &session.paths) {
            assert!(path.view.in_flight <= path.view.congestion_window, "{:?}", path.view);
        }
    }
}

#[test]
fn a_path_whose_new_address_could_not_be_validated_is_opened_anew() {
    let (mut world, client) = with_links(2);
    world.send_both_ways(client, 2 * SECOND);
    lose(&mut world, client, 0, 0.0, 1.0);
    let link = world.machines[client].links.get_mut(&LinkId(0)).expect("a link");
    link.address.set_port(6000);
    world.send_both_ways(client, 10 * SECOND);
    lose(&mut world, client, 0, 0.0, 0.0);
    world.send_both_ways(client, 8 * SECOND);
    assert_eq!(active(&mut world, client), [2; 2]);
    lose(&mut world, client, 1, 1.0, 1.0);
    let (a, b) = world.send_both_ways(client, 3 * SECOND);
    assert!(a.max(b) <= 200 * MS, "gaps of {a:?} and {b:?}");
    assert_eq!(world.machines[client].down_count, 0);
}
