use std::fmt::Write;

use mpvpn_types::{BitRate, ByteSize};

use super::{
    Budget, Confinement, FecStats, FlowList, FlowState, KillSwitchState, Link, PathFigures, Resequencing,
    ServerInUse, Session, State, Status, format_ms,
    rates::{Rate, Rates, all_paths, client_key, client_name, link_key, path_key},
    table::{Table, UNKNOWN, fit, section, wrap},
};
use mpvpn_input::role::Role;

/// The parts of a status that are shown beyond those that everybody needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sections {
    /// Each path.
    pub paths: bool,
    /// The rights that the process keeps, and the order of packets.
    pub details: bool,
}

/// Renders the status as text: sentences and tables, the most important first, in lines of at most `width`
/// columns.
pub fn render(status: &Status, rates: &Rates, sections: Sections, width: usize) -> String {
    let mut text = String::new();
    let say = |text: &mut String, label: &str, said: &str| {
        let line = if label.is_empty() { said.to_owned() } else { format!("{label:<9} {said}") };
        text.extend(wrap(&line, width).into_iter().map(|line| line + "\n"));
    };
    say(&mut text, "", &headline(status));
    if let Some(ServerInUse { address, why, others }) = &status.server {
        say(&mut text, "server", &format!("{address}: {why}; others: {}", others.join(", ")));
    }
    status.notes.iter().for_each(|note| say(&mut text, "note", note));
    match status.kill_switch {
        None | Some(KillSwitchState::Off) => {}
        Some(KillSwitchState::Armed) => say(&mut text, "kill", "armed: packets past the tunnel are blocked"),
        Some(KillSwitchState::Blocking) => {
            say(&mut text, "kill", "blocking: all packets are blocked until the tunnel is up");
        }
    }
    section(&mut text, links(&status.links, Some((status, rates))), width);
    pipe_reasons(&status.links).iter().for_each(|reason| say(&mut text, "", reason));
    section(&mut text, clients(status, rates), width);
    section(&mut text, announced(status), width);
    section(&mut text, forwards(status), width);
    section(&mut text, classes(status), width);
    if sections.paths {
        section(&mut text, paths(status, rates), width);
    }
    text.push('\n');
    if let Some(Session { server, user, resumed }) = &status.session {
        let again = match resumed {
            0 => String::new(),
            1 => ", resumed once".into(),
            n => format!(", resumed {n} times"),
        };
        say(&mut text, "session", &format!("{user} at {server}{again}"));
    }
    if !status.addresses.is_empty() {
        say(&mut text, "addresses", &join(&status.addresses));
    }
    if let Some(Budget { used_bytes, max_bytes, connections }) = status.budget {
        let (used, most) = (format_bytes(used_bytes), format_bytes(max_bytes));
        say(&mut text, "memory", &format!("{used} of {most} for {connections} connections"));
    }
    if sections.details {
        status.confinement.iter().for_each(|kept| say(&mut text, "confined", &confined(kept)));
        if let Some(counters) = &status.resequencing {
            say(&mut text, "order", &order(counters));
            repair(&counters.fec).iter().for_each(|repair| say(&mut text, "repair", repair));
        }
    }
    fit(text.trim_end_matches('\n'), width)
}

/// The rights that are left, and what protects the others.
fn confined(confinement: &Confinement) -> String {
    let capabilities = match &confinement.capabilities[..] {
        [] => "no capability".to_owned(),
        kept => format!("capability {} only", kept.join(", ")),
    };
    let system_calls =
        if confinement.system_calls { "system calls filtered" } else { "system calls not filtered" };
    let files = match confinement.landlock {
        Some(version) => format!("files by Landlock {version}"),
        None => "files not, as this kernel has no Landlock".to_owned(),
    };
    format!("{capabilities}; {system_calls}; {files}")
}

/// Whether packets are numbered, and the share that was retransmitted.
fn order(counters: &Resequencing) -> String {
    let again =
        || format!("{:.1} % retransmitted", 100.0 * counters.resent as f64 / counters.numbered as f64);
    match (counters.on, counters.numbered) {
        (true, 0) => "numbered".into(),
        (true, _) => format!("numbered, {}", again()),
        (false, 0) => "not numbered".into(),
        (false, _) => format!("not numbered now; before, {}", again()),
    }
}

/// The rate of repair packets and their effect; `None` if there were none in either direction.
fn repair(fec: &FecStats) -> Option<String> {
    if *fec == FecStats::default() {
        return None;
    }
    let now = match fec.percent {
        0 => "none now".to_owned(),
        percent => format!("{percent} %"),
    };
    let FecStats { made_good, recovered, unrecoverable, .. } = fec;
    Some(format!(
        "{now}; lost packets restored: {recovered} at this end, {made_good} at the far end; {unrecoverable} groups lost too much"
    ))
}

/// The effect of repair packets in a table cell; empty if there were none.
fn repair_in_short(fec: &FecStats) -> String {
    let FecStats { percent, made_good, recovered, wasted, .. } = *fec;
    match *fec == FecStats::default() {
        true => String::new(),
        false => repair_effect(percent, made_good + recovered, wasted),
    }
}

fn repair_effect(percent: u8, restored: u64, wasted: u64) -> String {
    format!("{percent} %, {restored} restored, {wasted} wasted")
}

fn headline(status: &Status) -> String {
    let state = status.sentence();
    let clients = match (status.role, status.clients.len()) {
        (Role::Client, _) => String::new(),
        (Role::Server, 1) => ", 1 client".into(),
        (Role::Server, n) => format!(", {n} clients"),
    };
    let time = format_duration(status.uptime_s);
    format!("mpvpn {} {}: {state}, running for {time}{clients}", status.kind(), status.version)
}

/// Renders the links as a table.
pub fn render_links(all: &[Link], width: usize) -> String {
    let mut text = String::new();
    section(&mut text, links(all, None), width);
    pipe_reasons(all).into_iter().for_each(|reason| text += &(reason + "\n"));
    fit(text.trim_start_matches('\n'), width)
}

/// Renders the flows as a table.
pub fn render_flows(list: &FlowList, width: usize) -> String {
    let mut text = String::new();
    section(&mut text, flows(list), width);
    match (list.flows.len(), list.left_out) {
        (0, _) => text.push_str("no flows\n"),
        (_, 0) => {}
        (_, 1) => text.push_str("and 1 more that has been idle for longer\n"),
        (_, more) => _ = writeln!(text, "and {more} more that have been idle for longer"),
    }
    fit(text.trim_start_matches('\n'), width)
}

fn flows(list: &FlowList) -> Table {
    let is_server = list.role == Role::Server;
    let mut table = Table::new(match is_server {
        true => "flow|user|to|lane|state|>up|>down|>age|>idle",
        false => "flow|from|to|lane|why|state|>up|>down|>age|>idle",
    });
    for flow in &list.flows {
        let mut cells = vec![flow.protocol.clone()];
        cells.push(if is_server { flow.user.clone() } else { flow.from.clone() });
        cells.extend([flow.to.clone(), flow.mode.as_str().to_owned()]);
        if !is_server {
            cells.push(flow.why.clone());
        }
        cells.extend([
            flow.state.map_or("", FlowState::as_str).to_owned(),
            format_bytes(flow.up_bytes),
            format_bytes(flow.down_bytes),
            format_duration(flow.age_s),
            format_duration(flow.idle_s),
        ]);
        table.rows.push(cells);
    }
    table
}

fn classes(status: &Status) -> Table {
    let mut table = Table::new(
        "class|state|>down|>up|>rtt|>loss|>queue|>dropped|reason|>copies|repair|lane|scheduler, cc|tun",
    );
    for class in &status.classes {
        let (down, up) = match status.role {
            Role::Client => (class.rx_bps, class.tx_bps),
            Role::Server => (class.tx_bps, class.rx_bps),
        };
        let copies = class.resequencing.map_or(0, |counters| counters.copies);
        let rate = |bps: Option<u64>| known(bps, format_rate);
        table.row([
            class.name.clone(),
            class.state.map_or("", State::as_str).to_owned(),
            rate(down),
            rate(up),
            known(class.rtt_ms, format_ms),
            known(class.loss_pct, percent),
            format_ms(class.queue_ms),
            class.drops.to_string(),
            class.reason.clone(),
            if copies > 0 { copies.to_string() } else { String::new() },
            class.resequencing.map_or(String::new(), |counters| repair_in_short(&counters.fec)),
            class.flow_mode.clone(),
            match class.peer_cc.as_ref().filter(|peer| **peer != class.cc) {
                Some(peer) => format!("{}, {} (server: {peer})", class.scheduler, class.cc),
                None => format!("{}, {}", class.scheduler, class.cc),
            },
            class.tun.as_ref().map_or(String::new(), |tun| format!("{tun} {}", join(&class.addresses))),
        ]);
    }
    table.without_empty_columns()
}

/// A figure, or a dash where it is not known.
fn known<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), text)
}

fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

/// Both directions of a rate: down and up.
fn directions(rate: Option<Rate>) -> [String; 2] {
    [rate.map(|rate| rate.down), rate.map(|rate| rate.up)]
        .map(|bps| known(bps, |bps| format_rate(bps as u64)))
}

/// The share of a rate in the sum of all.
fn share(rate: Option<Rate>, all: Option<Rate>) -> String {
    let sum = all.map(Rate::sum).filter(|sum| *sum > 0.0);
    known(rate.zip(sum), |(rate, sum)| format!("{:.0} %", 100.0 * rate.sum() / sum))
}

/// The links; with the figures of their paths and their rates, if those are known.
fn links(links: &[Link], figures: Option<(&Status, &Rates)>) -> Table {
    let mut table = Table::new(
        "link|state|>down|>up|>rtt|>loss|>share|reason|>capacity up|tier|limits|>sent|>received|addresses",
    );
    let all = figures.and_then(|(status, rates)| rates.of_process(status));
    for link in links {
        let of_paths = figures.map(|(status, _)| status.figures_of(link)).unwrap_or_default();
        let rate = figures.and_then(|(_, rates)| rates.now(&link_key(&link.name)));
        let [down, up] = directions(rate);
        table.row([
            link.name.clone(),
            link.state.as_str().to_owned(),
            down,
            up,
            of_paths.rtt_text(),
            known(of_paths.loss_pct, percent),
            share(rate, all),
            link.reason.clone(),
            of_paths.capacity_text(),
            link.tier.clone(),
            limits(link),
            format_bytes(link.tx_bytes),
            format_bytes(link.rx_bytes),
            join(&link.addresses),
        ]);
    }
    table.without_empty_columns()
}

fn limits(link: &Link) -> String {
    let mut words = Vec::new();
    if link.metered {
        words.push("metered".to_owned());
    }
    words.extend(link.pipes.filter(|pipes| *pipes > 1).map(|pipes| format!("{pipes} pipes")));
    words.extend(link.up_cap_bps.map(|cap| format!("up {}", BitRate::from_bps(cap))));
    words.extend(link.down_cap_bps.map(|cap| format!("down {}", BitRate::from_bps(cap))));
    words.extend(link.weight.map(|weight| format!("weight {weight}")));
    words.extend(
        link.quota_bytes
            .map(|quota| used_of(link.quota_used_bytes.unwrap_or(0), ByteSize::from_bytes(quota))),
    );
    words.join(", ")
}

/// How much of a quota is used.
pub fn used_of(used: u64, quota: ByteSize) -> String {
    format!("{} of {quota}", scaled(used, 1000.0, &["B", "kB", "MB", "GB", "TB"]))
}

/// A line for each link whose number of pipes is found by measurement, with the reason for this number.
fn pipe_reasons(links: &[Link]) -> Vec<String> {
    let reason = |link: &Link| {
        let (pipes, reason) = (link.pipes?, link.pipes_reason.as_ref()?);
        let plural = if pipes == 1 { "" } else { "s" };
        Some(format!("{}: {pipes} pipe{plural}: {reason}", link.name))
    };
    links.iter().filter_map(reason).collect()
}

fn paths(status: &Status, rates: &Rates) -> Table {
    let capacity = if status.role == Role::Server { "capacity down" } else { "capacity up" };
    let mut table = Table::new(&format!(
        "client|path|state|>down|>up|>rtt|>loss|reason|>jitter|>{capacity}|>mtu|>sent|>received|repair|remote"
    ));
    for (client, path) in all_paths(status) {
        let measured = |figure: String| known(path.is_measured().then_some(figure), |figure| figure);
        let [down, up] = directions(rates.now(&path_key(&client, path)));
        let figures = PathFigures::of([path].into_iter());
        table.row([
            client,
            path.id.clone(),
            path.state.as_str().to_owned(),
            down,
            up,
            figures.rtt_text(),
            known(path.loss(), percent),
            path.reason.clone(),
            measured(format_ms(path.jitter_ms)),
            figures.capacity_text(),
            measured(path.mtu.to_string()),
            format_bytes(path.tx_bytes),
            format_bytes(path.rx_bytes),
            path.fec.map_or(String::new(), |fec| repair_effect(fec.percent, fec.made_good, fec.wasted)),
            path.remote_text(),
        ]);
    }
    table.without_empty_columns()
}

fn announced(status: &Status) -> Table {
    let mut table = Table::new("network|behind|state|reason");
    for one in &status.announced {
        let behind = one.user.as_deref().unwrap_or("this client");
        table.row([one.text(), behind.to_owned(), one.state.as_str().to_owned(), one.reason.clone()]);
    }
    table.without_empty_columns()
}

fn forwards(status: &Status) -> Table {
    let mut table = Table::new("port|leads to|now|>to it|>back|from");
    for one in &status.forwards {
        let now =
            if one.addresses.is_empty() { "nobody: no session".to_owned() } else { join(&one.addresses) };
        let [to, back] = [one.tx_bytes, one.rx_bytes].map(format_bytes);
        table.row([one.port.clone(), one.to.clone(), now, to, back, join(&one.from)]);
    }
    table.without_empty_columns()
}

fn clients(status: &Status, rates: &Rates) -> Table {
    let mut table =
        Table::new("client|>down|>up|>rtt|>loss|>share|>paths|>connected|>sent|>received|order|addresses");
    let all = rates.of_process(status);
    for client in &status.clients {
        let of_paths = PathFigures::of(client.paths.iter());
        let rate = rates.now(&client_key(client));
        let [down, up] = directions(rate);
        table.row([
            client_name(client),
            down,
            up,
            of_paths.rtt_text(),
            known(of_paths.loss_pct, percent),
            share(rate, all),
            client.paths.len().to_string(),
            format_duration(client.connected_s),
            format_bytes(client.tx_bytes),
            format_bytes(client.rx_bytes),
            client.resequencing.as_ref().map_or_else(|| "not numbered".into(), order),
            join(&client.addresses),
        ]);
    }
    table.without_empty_columns()
}

fn join<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn scaled(value: u64, step: f64, units: &[&str]) -> String {
    let mut value = value as f64;
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", units[0]) } else { format!("{value:.1} {}", units[unit]) }
}

/// A size with its unit, as in `5.0 MiB`.
pub fn format_bytes(value: u64) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// A rate (bit/s) with its unit, as in `93.2 Mbit/s`.
pub fn format_rate(value: u64) -> String {
    scaled(value, 1000.0, &["bit/s", "kbit/s", "Mbit/s", "Gbit/s"])
}

/// A duration (s) in two units, as in `2 h 3 min`.
pub fn format_duration(seconds: f64) -> String {
    let whole = if seconds.is_finite() { seconds.max(0.0) as u64 } else { 0 };
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) if seconds.is_finite() => format!("{:.1} s", seconds.max(0.0)),
        (0, 0, 0) => "0.0 s".into(),
        (0, 0, _) => format!("{minutes} min {} s", whole % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Class, Client, EffectiveFlowMode, Flow, LinkState, Path, PathState, flows::tests::flow,
        rates::Counters, tests::EXAMPLE,
    };

    const ALL: Sections = Sections { paths: true, details: true };

    /// The status in text, all of it, with the rates since its counters were 0, a second before.
    fn text_of(status: &Status, width: usize) -> String {
        rendered(status, ALL, width)
    }

    fn rendered(status: &Status, sections: Sections, width: usize) -> String {
        let mut rates = Rates::new(1);
        let before =
            Counters::of_all(status).map(|counters| Counters { down_bytes: 0, up_bytes: 0, ..counters });
        rates.take(status.uptime_s, before);
        rates.take(status.uptime_s + 1.0, Counters::of_all(status));
        render(status, &rates, sections, width)
    }

    fn example() -> Status {
        let mut status: Status = serde_json::from_str(EXAMPLE).unwrap();
        status.paths[0].rate_bps = 97_400_000;
        status.paths[0].tx_bytes = 5 << 20;
        let mut second = status.paths[0].clone();
        second.id = "default/eth10/0".into();
        second.state = PathState::Down;
        second.reason = "no carrier".into();
        status.paths.push(second);
        status.resequencing =
            Some(Resequencing { on: true, numbered: 1000, resent: 4, ..Resequencing::default() });
        status
    }

    #[test]
    fn a_clients_status_begins_with_its_state_and_its_links() {
        let mut status = example();
        status.links[0].rx_bytes = 5 << 20;
        let expected = "\
mpvpn client 0.1.0: up, running for 12.5 s

link  state         down       up      rtt   loss  share  tier     sent  received  addresses
eth0  up     41.9 Mbit/s  0 bit/s  12.3 ms  0.0 %  100 %  primary   0 B   5.0 MiB  192.0.2.7

class     queue  dropped  lane  scheduler, cc
default  0.1 ms        0  auto  auto, bbr

path             state      down           up      rtt   loss  reason      jitter   mtu     sent  received  remote
default/eth0/0   active  0 bit/s  41.9 Mbit/s  12.3 ms  0.0 %              0.4 ms  1472  5.0 MiB       0 B  203.0.113.1:4433
default/eth10/0  down    0 bit/s  41.9 Mbit/s        –      –  no carrier       –     –  5.0 MiB       0 B  203.0.113.1:4433

session   alice at 203.0.113.1:4433
addresses 10.0.0.2/24 fd00::2/64
order     numbered, 0.4 % retransmitted
";
        assert_eq!(text_of(&status, 200), expected);
        let text = rendered(&status, Sections::default(), 200);
        assert!(!text.contains("default/eth0/0") && !text.contains("order"), "{text}");
        status.proxy = true;
        assert!(text_of(&status, 200).starts_with("mpvpn proxy 0.1.0: up, running for "));
    }

    #[test]
    fn limits_of_links_have_a_column_where_there_are_any() {
        let mut links = example().links;
        links.push(Link {
            state: LinkState::Standby,
            tier: "backup".into(),
            reason: "a better link works".into(),
            metered: true,
            up_cap_bps: Some(20_000_000),
            weight: Some(3),
            quota_bytes: Some(50_000_000_000),
            quota_used_bytes: Some(1_234_000_000),
            ..Link::new("wwan0")
        });
        let expected = "\
link   state    reason               tier     limits                                         sent  received  addresses
eth0   up                            primary                                                  0 B       0 B  192.0.2.7
wwan0  standby  a better link works  backup   metered, up 20mbit, weight 3, 1.2 GB of 50 GB   0 B       0 B
";
        assert_eq!(render_links(&links, 200), expected);
    }

    #[test]
    fn where_the_number_of_pipes_is_found_out_it_is_said_why_it_is_what_it_is() {
        let found = |name: &str, pipes, why: &str| Link {
            pipes: Some(pipes),
            pipes_reason: Some(why.to_owned()),
            ..Link::new(name)
        };
        let links = [found("eth0", 1, "a second one brought 3 %"), found("wwan0", 2, "so is it")];
        let text = render_links(&links, 200);
        assert!(
            text.ends_with("\neth0: 1 pipe: a second one brought 3 %\nwwan0: 2 pipes: so is it\n"),
            "{text}"
        );
        assert!(text.contains("2 pipes  ") || text.contains("2 pipes\n"), "{text}");
    }

    #[test]
    fn flows_say_how_they_are_carried_and_why() {
        let first = flow(0.25);
        let udp = Flow {
            protocol: "udp".into(),
            from: "[fd00::2]:53000".into(),
            mode: EffectiveFlowMode::Datagram,
            why: "not TCP".into(),
            state: None,
            ..flow(3.0)
        };
        let mut list =
            FlowList { flows: vec![first.clone(), udp], left_out: 12, ..FlowList::new(Role::Client) };
        let expected = "\
flow  from             to                lane      why      state          up     down        age   idle
tcp   10.0.0.2:40001   198.51.100.9:443  stream    rule 2   up-ended  1.0 KiB  5.0 MiB  1 min 1 s  0.2 s
udp   [fd00::2]:53000  198.51.100.9:443  datagram  not TCP            1.0 KiB  5.0 MiB  1 min 1 s  3.0 s
and 12 more that have been idle for longer
";
        assert_eq!(render_flows(&list, 200), expected);
        list.role = Role::Server;
        list.flows = vec![Flow { user: "alice".into(), from: String::new(), why: String::new(), ..first }];
        list.left_out = 0;
        let expected = "\
flow  user   to                lane    state          up     down        age   idle
tcp   alice  198.51.100.9:443  stream  up-ended  1.0 KiB  5.0 MiB  1 min 1 s  0.2 s
";
        assert_eq!(render_flows(&list, 200), expected);
        assert_eq!(render_flows(&FlowList::new(Role::Client), 200), "no flows\n");
    }

    #[test]
    fn classes_stand_side_by_side() {
        let mut status = example();
        let fec = FecStats { percent: 12, recovered: 40, wasted: 9, ..FecStats::default() };
        let class = |name: &str, rtt, loss| Class {
            state: Some(State::Up),
            tx_bps: Some(4_000_000),
            rx_bps: Some(0),
            rtt_ms: Some(rtt),
            loss_pct: Some(loss),
            ..Class::new(name)
        };
        let critical = class("critical", 13.1, 0.0);
        status.classes = vec![
            Class { resequencing: Some(Resequencing { copies: 300, ..Resequencing::default() }), ..critical },
            Class {
                resequencing: Some(Resequencing { fec, ..Resequencing::default() }),
                drops: 5,
                ..class("bulk", 14.0, 30.0)
            },
            Class { state: Some(State::Connecting), ..Class::new("default") },
            Class { state: Some(State::Asleep), reason: "not used yet".into(), ..Class::new("cams") },
        ];
        let expected = "\
class     state          down          up      rtt    loss   queue  dropped  reason        copies  repair                       lane  scheduler, cc
critical  up          0 bit/s  4.0 Mbit/s  13.1 ms   0.0 %  0.0 ms        0                   300                               auto  auto, bbr
bulk      up          0 bit/s  4.0 Mbit/s  14.0 ms  30.0 %  0.0 ms        5                        12 %, 40 restored, 9 wasted  auto  auto, bbr
default   connecting        –           –        –       –  0.0 ms        0                                                     auto  auto, bbr
cams      asleep            –           –        –       –  0.0 ms        0  not used yet                                       auto  auto, bbr
";
        let text = text_of(&status, 200);
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn repair_is_told_where_there_is_some() {
        let mut status = example();
        let fec = FecStats { percent: 30, recovered: 12, made_good: 7, ..FecStats::default() };
        status.resequencing = Some(Resequencing { fec, ..Resequencing::default() });
        let line = "repair    30 %; lost packets restored: 12 at this end, 7 at the far end; 0 groups lost too much\n";
        assert!(text_of(&status, 200).contains(line));
        status.resequencing =
            Some(Resequencing { fec: FecStats { percent: 0, ..fec }, ..Resequencing::default() });
        assert!(text_of(&status, 200).contains("repair    none now; lost packets restored: 12 at"));
    }

    #[test]
    fn a_servers_status_lists_clients_and_their_paths() {
        let mut status = Status::new(Role::Server);
        status.clients.push(Client {
            user: "ali\u{1b}[31mce".into(),
            addresses: example().addresses,
            connected_s: 3700.0,
            tx_bytes: 1023,
            rx_bytes: 1024,
            classes: Vec::new(),
            resequencing: Some(Resequencing { numbered: 200, resent: 1, ..Resequencing::default() }),
            paths: example().paths,
        });
        status.budget = Some(Budget { used_bytes: 3 << 20, max_bytes: 256 << 20, connections: 2 });
        let text = text_of(&status, 200);
        assert!(text.contains("memory    3.0 MiB of 256.0 MiB for 2 connections\n"), "{text}");
        assert!(text.starts_with("mpvpn server 0.1.0: starting, running for 0.0 s, 1 client\n"), "{text}");
        assert!(text.contains("ali?[31mce 10.0.0.2") && text.contains("1 h 1 min"), "{text}");
        assert!(text.contains("1023 B"), "{text}");
        assert!(text.contains("not numbered now; before, 0.5 % retransmitted"), "{text}");
        assert!(text.contains("default/eth10/0"), "{text}");
        let text = rendered(&status, Sections::default(), 80);
        let head = "client                     down          up      rtt   loss  share  paths …";
        assert!(text.lines().nth(2) == Some(head) && !text.contains("default/eth0/0"), "{text}");
    }

    /// A client whose names, addresses and figures are as long as they get, with 16 links and 8 classes.
    fn wide() -> Status {
        let mut status = example();
        let path = status.paths.remove(0);
        let name = |at: usize| format!("enp0s20f0u1u2{at:02}");
        status.state = State::Degraded;
        let down: Vec<_> =
            (8..16).map(|at| format!("{} down for 23 h 59 min (no carrier)", name(at))).collect();
        status.verdict = format!("degraded: {}", down.join("; "));
        status.links = (0..16)
            .map(|at| Link {
                state: if at < 8 { LinkState::Standby } else { LinkState::Down },
                reason: "the transport of this link is TCP, as UDP gets no answer for 3 s".into(),
                addresses: vec!["2001:db8:1234:5678:9abc:def0:1234:5678".parse().unwrap()],
                rx_bytes: 124_987_500,
                tx_bytes: 124_987_500,
                quota_bytes: Some(50_000_000_000),
                quota_used_bytes: Some(1_234_000_000),
                ..Link::new(&name(at))
            })
            .collect();
        status.classes = (0..8)
            .map(|at| Class {
                state: Some(State::Connecting),
                tx_bps: Some(999_900_000),
                rx_bps: Some(999_900_000),
                rtt_ms: Some(4321.0),
                loss_pct: Some(100.0),
                drops: 123_456,
                reason: "the server allows no more classes: allowed are 4".into(),
                ..Class::new(&format!("class-of-15-c-{at}"))
            })
            .collect();
        let over = |class: &Class, link: &Link| Path {
            id: format!("{}/{}/12@3", class.name, link.name),
            link: link.name.clone(),
            state: if link.state == LinkState::Down { PathState::Down } else { PathState::Standby },
            reason: "its class sleeps until it is used".into(),
            rtt_ms: 4321.0,
            heard_s: Some(if link.state == LinkState::Down { 3599.0 } else { 0.1 }),
            loss_pct: 100.0,
            recent_packets: 1000,
            link_rate_bps: Some(999_900_000),
            link_rate_age_s: Some(90.0),
            remote: "[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".parse().unwrap(),
            ..path.clone()
        };
        let all = status.classes.iter().flat_map(|class| status.links.iter().map(|link| over(class, link)));
        status.paths = all.collect();
        status
    }

    #[test]
    fn eighty_columns_hold_the_state_the_links_and_the_classes() {
        let mut status = wide();
        let text = text_of(&status, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for part in [
            "mpvpn client 0.1.0: degraded: enp0s20f0u1u208 down for 23 h 59 min (no carrier);\n",
            "\nlink             state            down            up                  rtt …\n",
            "\nenp0s20f0u1u200  standby  999.9 Mbit/s  999.9 Mbit/s              4321 ms\n",
            "\nenp0s20f0u1u215  down     999.9 Mbit/s  999.9 Mbit/s  4321 ms, 59 min ago\n",
            "\nclass            state               down            up      rtt     loss …\n",
            "\nclass-of-15-c-7  connecting  999.9 Mbit/s  999.9 Mbit/s  4321 ms  100.0 %\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        // The sentence is wrapped, not cut.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&status.verdict), "{text}");
        status.links.iter_mut().for_each(|link| link.state = LinkState::Standby);
        status.paths.iter_mut().for_each(|path| path.state = PathState::Standby);
        status.paths.iter_mut().for_each(|path| path.heard_s = Some(25.0));
        let text = text_of(&status, 80);
        let row = "\nenp0s20f0u1u215  standby  999.9 Mbit/s  999.9 Mbit/s  4321 ms  100.0 %    6 %\n";
        assert!(text.contains(row), "{text}");
    }

    #[test]
    fn no_figure_is_cut_at_any_width_and_nothing_is_lost_on_a_wide_terminal() {
        for status in [example(), wide()] {
            for width in [0, 1, 20, 60, 80, 100, 200] {
                let text = text_of(&status, width);
                assert!(text.lines().all(|line| line.chars().count() <= width.max(1)), "{width}: {text}");
                for figure in ["999.9 Mbit/s", "100.0 %", "4321 ms"] {
                    let number = figure.split(' ').next().unwrap();
                    let is_whole = text.matches(number).count() == text.matches(figure).count();
                    assert!(width < 20 || is_whole, "{figure} at {width}: {text}");
                }
            }
            let text = text_of(&status, usize::MAX);
            assert!(!text.contains('…'), "{text}");
            for link in &status.links {
                let address = link.addresses[0].to_string();
                assert!(text.contains(&link.name) && text.contains(&address), "{text}");
            }
        }
        let text = text_of(&wide(), usize::MAX);
        for part in ["999.9 Mbit/s, 1 min ago", "4321 ms, 59 min ago", "its class sleeps", "1.2 GB of 50 GB"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn an_idle_link_is_not_called_slow() {
        let mut status = example();
        status.paths.truncate(1);
        let text = text_of(&status, 80);
        let row = text.lines().find(|line| line.starts_with("eth0 ")).unwrap();
        assert!(
            row.contains(" 0 bit/s ") && !text.contains("97.4"),
            "the delivery rate is no capacity: {text}"
        );
        status.paths[0].link_rate_bps = Some(100_000_000);
        status.paths[0].link_rate_age_s = Some(3600.0);
        let text = text_of(&status, 80);
        assert!(text.contains(" capacity up") && text.contains("100.0 Mbit/s, 1 h ago"), "{text}");
    }

    #[test]
    fn units_are_those_people_read() {
        assert_eq!(format_bytes(0), "0 B");
        assert_eq!(format_bytes(1536), "1.5 KiB");
        assert_eq!(format_bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(format_rate(999_940), "999.9 kbit/s");
        assert_eq!(format_rate(2_000_000_000), "2.0 Gbit/s");
        assert_eq!(format_duration(59.9), "59.9 s");
        assert_eq!(format_duration(61.0), "1 min 1 s");
        assert_eq!(format_duration(90_000.0), "1 d 1 h");
        assert_eq!(format_duration(f64::NAN), "0.0 s");
    }
}
