//! Decisions can be followed in the log alone, such as those about a cut link.

use std::{
    io::Write,
    sync::{Arc, LazyLock, Mutex},
};

use crate::world::{MS, TOKEN, WORLD_TIME, World};
use mpvpn_path::Scheduler;
use mpvpn_types::{Duration, Fec, LinkId};
use tracing::{Dispatch, subscriber::NoSubscriber};
use tracing_subscriber::{
    EnvFilter,
    fmt::{format::Writer, time::FormatTime},
};

const SECOND: Duration = Duration::from_secs(1);

/// A second subscriber, which wants nothing and never ends.
///
/// Where there is only one, `tracing` takes it for the subscriber of all threads: when a test on another
/// thread is the first to reach an event, that thread is asked, has no subscriber, and the event is off for
/// everybody.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// A log in memory.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panics while logging").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Lines begin with the seconds since their world began.
struct WorldTime;

impl FormatTime for WorldTime {
    fn format_time(&self, line: &mut Writer<'_>) -> std::fmt::Result {
        write!(line, "{:.6}", WORLD_TIME.get().as_secs_f64())
    }
}

impl Log {
    /// Returns the log lines of `work` with this filter.
    pub(crate) fn of(filter: &str, work: impl FnOnce()) -> Vec<String> {
        LazyLock::force(&SECOND_SUBSCRIBER);
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(filter))
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .with_timer(WorldTime)
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        let bytes = log.0.lock().expect("nobody panics while logging");
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }
}

/// Asserts that lines which contain all words of each entry come in this order, others in between or not.
fn assert_logged(lines: &[String], story: &[&[&str]]) {
    let mut rest = lines.iter();
    for words in story {
        let found = rest.any(|line| words.iter().all(|word| line.contains(word)));
        assert!(found, "nothing says {words:?} where it should:\n{}", lines.join("\n"));
    }
}

fn two_links() -> (World, usize) {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 12 * MS); 2]);
    world.up(client);
    world.send_both_ways(client, 2 * SECOND);
    (world, client)
}

fn lose(world: &mut World, client: usize, link: u16, loss: f64) {
    let link = world.machines[client].links.get_mut(&LinkId(link)).expect("a link");
    (link.up.loss, link.down.loss) = (loss, loss);
}

#[test]
fn a_cut_can_be_followed_in_the_log() {
    let (mut world, client) = two_links();
    let lines = Log::of("mpvpn::liveness=debug,mpvpn::scheduler=debug", || {
        lose(&mut world, client, 1, 1.0);
        world.send_both_ways(client, SECOND);
        lose(&mut world, client, 1, 0.0);
        world.send_both_ways(client, SECOND);
    });
    // The handshake over the second link was the first to succeed. Chance says which of two equal paths is
    // quicker.
    let (path, other) = ("path=0", "paths=[(1, ");
    for (end, span) in [
        ("connection{end=\"client\"", "path{id=0 link=1}"),
        ("session{id=1}:connection{end=\"server\"", "path{id=0}"),
    ] {
        assert_logged(
            &lines,
            &[
                &[end, span, "the report about the path changes", "is_heard=false", "silence="],
                &[end, "the peer's report about a path has changed", path, "heard=false"],
                &[end, "the state of a path has changed", path, "active", "down", "unheard=true"],
                &[end, "the path status sent to the peer has changed", path, "Backup"],
                &[end, "the set of usable paths has changed", "before=[", other],
                &[end, span, "silence exceeds the limit", "silence=", "limit=", "misses=3", "rtt="],
                &[end, span, "a packet arrived on a dead path", "arrivals=1", "needed=2"],
                &[end, span, "enough packets arrived: the path is alive", "dead_for="],
                &[end, "the state of a path has changed", path, "down", "active"],
                &[end, "the set of usable paths has changed", "before=[1]", "(0, "],
            ],
        );
    }
    assert!(lines.len() < 50, "{} lines about one cut:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn a_link_that_loses_and_regains_its_carrier_is_logged() {
    let (mut world, client) = two_links();
    let lines = Log::of("mpvpn::liveness=debug", || {
        let now = world.now;
        world.machines[client].link_down(now, LinkId(0));
        world.send_both_ways(client, SECOND);
        let now = world.now;
        world.machines[client].link_up(now, LinkId(0));
        world.send_both_ways(client, SECOND);
    });
    assert_logged(
        &lines,
        &[
            &["client", "path{id=1 link=0}", "the link lost its carrier"],
            &["server", "the peer's report about a path has changed", "path=1", "heard=false"],
            &["client", "path{id=1 link=0}", "the link has a carrier again"],
            &["client", "path{id=1 link=0}", "enough packets arrived: the path is alive"],
        ],
    );
}

#[test]
fn a_stall_of_the_server_is_logged_once() {
    let (mut world, client) = two_links();
    let lines = Log::of("mpvpn::liveness=debug", || {
        let now = world.now;
        world.servers[0].on_local_stall(now);
        world.send_both_ways(client, SECOND);
    });
    assert_eq!(lines.iter().filter(|line| line.contains("did not run")).count(), 1, "{lines:?}");
}

#[test]
fn repair_and_numbering_are_logged_with_the_loss_that_causes_them() {
    let mut world = World::new();
    world.fec = Fec::Auto;
    let client = world.add(TOKEN, Scheduler::Auto, &[(20, 15 * MS)]);
    world.up(client);
    world.send_both_ways(client, SECOND);
    let lines = Log::of("mpvpn::fec=debug,mpvpn::reorder=debug", || {
        lose(&mut world, client, 0, 0.06);
        world.send_both_ways(client, 4 * SECOND);
    });
    assert_logged(
        &lines,
        &[&["whether packets are numbered has changed", "on=true", "lossy=true", "loss=0.0"]],
    );
    assert_logged(&lines, &[&["the FEC share of a path has changed", "path=0", "percent=", "policy=auto"]]);
}

#[test]
fn decisions_are_not_logged_above_debug() {
    let (mut world, client) = two_links();
    let lines = Log::of("warn,mpvpn=info", || {
        lose(&mut world, client, 1, 1.0);
        world.send_both_ways(client, SECOND);
    });
    assert_eq!(lines, Vec::<String>::new());
}
