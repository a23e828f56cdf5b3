use std::fmt::Write;

use mpvpn_types::{BitRate, ByteSize};

use super::{
    Budget, Class, Client, Confinement, FecStats, FlowList, FlowState, KillSwitchState, Link, Path,
    Resequencing, Session, State, Status,
};
use mpvpn_input::role::Role;

/// Renders the status as text: a headline and tables. Lines longer than `width` columns are cut.
pub fn render(status: &Status, width: usize) -> String {
    let mut text = headline(status);
    for note in &status.notes {
        let _ = writeln!(text, "note      {note}");
    }
    if let Some(Session { server, user, resumed }) = &status.session {
        let again = match resumed {
            0 => String::new(),
            1 => ", resumed once".into(),
            n => format!(", resumed {n} times"),
        };
        let _ = writeln!(text, "session   {user} at {server}{again}");
    }
    if !status.addresses.is_empty() {
        let _ = writeln!(text, "addresses {}", join(&status.addresses));
    }
    match status.kill_switch {
        None | Some(KillSwitchState::Off) => {}
        Some(KillSwitchState::Armed) => {
            text.push_str("kill      armed: packets past the tunnel are blocked\n")
        }
        Some(KillSwitchState::Blocking) => {
            text.push_str("kill      blocking: all packets are blocked until the tunnel is up\n");
        }
    }
    if let Some(confinement) = &status.confinement {
        let _ = writeln!(text, "confined  {}", confined(confinement));
    }
    if let Some(Budget { used_bytes, max_bytes, connections }) = status.budget {
        let (used, most) = (format_bytes(used_bytes), format_bytes(max_bytes));
        let _ = writeln!(text, "memory    {used} of {most} for {connections} connections");
    }
    if let Some(counters) = &status.resequencing {
        let _ = writeln!(text, "order     {}", order(counters));
        if let Some(repair) = repair(&counters.fec) {
            let _ = writeln!(text, "repair    {repair}");
        }
    }
    section(&mut text, classes(&status.classes));
    section(&mut text, links(&status.links));
    text.push_str(&pipe_reasons(&status.links));
    section(&mut text, paths(&status.paths));
    if status.role == Role::Server {
        section(&mut text, clients(&status.clients));
        let all: Vec<_> = status.clients.iter().flat_map(|client| client.paths.clone()).collect();
        section(&mut text, paths(&all));
    }
    fit(&text, width)
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
    format!("mpvpn {} {}: {state}, running for {time}{clients}\n", status.role, status.version)
}

/// Renders the links as a table.
pub fn render_links(all: &[Link], width: usize) -> String {
    let mut text = String::new();
    section(&mut text, links(all));
    text.push_str(&pipe_reasons(all));
    fit(text.trim_start_matches('\n'), width)
}

/// Renders the flows as a table.
pub fn render_flows(list: &FlowList, width: usize) -> String {
    let mut text = String::new();
    section(&mut text, flows(list));
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

fn classes(classes: &[Class]) -> Table {
    let mut table = Table::new(
        "class|state|lane|scheduler, cc|>sends|>receives|>rtt|>loss|>queue|>dropped|>copies|repair|tun",
    );
    for class in classes {
        let optional = |value: Option<f64>, unit: &str| {
            value.map_or(String::new(), |value| format!("{value:.1} {unit}"))
        };
        let copies = class.resequencing.map_or(0, |counters| counters.copies);
        table.row([
            class.name.clone(),
            with_reason(class.state.map_or("", State::as_str), &class.reason),
            class.flow_mode.clone(),
            match class.peer_cc.as_ref().filter(|peer| **peer != class.cc) {
                Some(peer) => format!("{}, {} (server: {peer})", class.scheduler, class.cc),
                None => format!("{}, {}", class.scheduler, class.cc),
            },
            class.tx_bps.map_or(String::new(), format_rate),
            class.rx_bps.map_or(String::new(), format_rate),
            optional(class.rtt_ms, "ms"),
            optional(class.loss_pct, "%"),
            format!("{:.1} ms", class.queue_ms),
            class.drops.to_string(),
            if copies > 0 { copies.to_string() } else { String::new() },
            class.resequencing.map_or(String::new(), |counters| repair_in_short(&counters.fec)),
            class.tun.as_ref().map_or(String::new(), |tun| format!("{tun} {}", join(&class.addresses))),
        ]);
    }
    table.without_empty_columns()
}

fn links(links: &[Link]) -> Table {
    let limited = links.iter().any(|link| !limits(link).is_empty());
    let mut table = Table::new(match limited {
        true => "link|state|tier|>sent|>received|limits|addresses",
        false => "link|state|tier|>sent|>received|addresses",
    });
    for link in links {
        let mut cells = vec![
            link.name.clone(),
            with_reason(link.state.as_str(), &link.reason),
            link.tier.clone(),
            format_bytes(link.tx_bytes),
            format_bytes(link.rx_bytes),
        ];
        if limited {
            cells.push(limits(link));
        }
        cells.push(join(&link.addresses));
        table.rows.push(cells);
    }
    table
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
fn pipe_reasons(links: &[Link]) -> String {
    let mut text = String::new();
    for link in links {
        let (Some(pipes), Some(reason)) = (link.pipes, &link.pipes_reason) else { continue };
        let plural = if pipes == 1 { "" } else { "s" };
        let _ = writeln!(text, "{}: {pipes} pipe{plural}: {reason}", link.name);
    }
    text
}

/// A figure of a path; a dash where it is unknown, or one of before.
fn known(path: &Path, figure: String) -> String {
    if path.is_measured() { figure } else { "–".to_owned() }
}

fn paths(paths: &[Path]) -> Table {
    let mut table = Table::new("path|state|>rtt|>jitter|>loss|>rate|>sent|>received|>mtu|repair|remote");
    for path in paths {
        table.row([
            path.id.clone(),
            with_reason(path.state.as_str(), &path.reason),
            known(path, format!("{:.1} ms", path.rtt_ms)),
            known(path, format!("{:.1} ms", path.jitter_ms)),
            known(path, format!("{:.1} %", path.loss_pct)),
            known(path, format_rate(path.rate_bps)),
            format_bytes(path.tx_bytes),
            format_bytes(path.rx_bytes),
            known(path, path.mtu.to_string()),
            path.fec.map_or(String::new(), |fec| repair_effect(fec.percent, fec.made_good, fec.wasted)),
            path.remote.to_string(),
        ]);
    }
    table.without_empty_columns()
}

fn clients(clients: &[Client]) -> Table {
    let mut table = Table::new("client|>connected|>sent|>received|>paths|order|addresses");
    for client in clients {
        table.row([
            client.user.clone(),
            format_duration(client.connected_s),
            format_bytes(client.tx_bytes),
            format_bytes(client.rx_bytes),
            client.paths.len().to_string(),
            client.resequencing.as_ref().map_or_else(|| "not numbered".into(), order),
            join(&client.addresses),
        ]);
    }
    table
}

/// A text table with columns as wide as their widest cell. A head that starts with `>` makes its column
/// right-aligned.
pub struct Table {
    right: Vec<bool>,
    /// The cells of each row; the first row is the head.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head, names of columns separated by `|`, and no other row.
    pub fn new(head: &str) -> Self {
        let head: Vec<_> = head.split('|').collect();
        Self {
            right: head.iter().map(|name| name.starts_with('>')).collect(),
            rows: vec![head.iter().map(|name| name.trim_start_matches('>').to_owned()).collect()],
        }
    }

    /// The table without the columns that are empty in all rows.
    pub fn without_empty_columns(mut self) -> Self {
        for column in (0..self.right.len()).rev() {
            if self.rows[1..].iter().all(|row| row[column].is_empty()) {
                self.right.remove(column);
                self.rows.iter_mut().for_each(|row| drop(row.remove(column)));
            }
        }
        self
    }

    fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

/// Appends the table to `text`, after an empty line; nothing if it has no row.
pub fn section(text: &mut String, table: Table) {
    if table.rows.len() < 2 {
        return;
    }
    let widths: Vec<usize> = (0..table.right.len())
        .map(|column| table.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    text.push('\n');
    for row in &table.rows {
        let cells = row.iter().zip(&widths).zip(&table.right).map(|((cell, width), right)| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
}

/// Cuts lines to `width` columns, and replaces control characters: names come from files and from the far
/// end, and must not control the terminal.
pub fn fit(text: &str, width: usize) -> String {
    let safe = |c: char| if c.is_control() { '?' } else { c };
    let cut = |line: &str| -> String {
        match line.chars().count() {
            n if n <= width => line.chars().map(safe).collect(),
            _ => line.chars().map(safe).take(width.saturating_sub(1)).chain(['…']).collect(),
        }
    };
    text.lines().map(|line| cut(line) + "\n").collect()
}

fn with_reason(state: &str, reason: &str) -> String {
    if reason.is_empty() { state.to_owned() } else { format!("{state} ({reason})") }
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
    use crate::{EffectiveFlowMode, Flow, flows::tests::flow, tests::EXAMPLE};

    fn example() -> Status {
        let mut status: Status = serde_json::from_str(EXAMPLE).unwrap();
        status.paths[0].rate_bps = 97_400_000;
        status.paths[0].tx_bytes = 5 << 20;
        let mut second = status.paths[0].clone();
        second.id = "default/eth10/0".into();
        second.state = crate::PathState::Down;
        second.reason = "no carrier".into();
        status.paths.push(second);
        status.resequencing =
            Some(Resequencing { on: true, numbered: 1000, resent: 4, ..Resequencing::default() });
        status
    }

    #[test]
    fn a_clients_status_is_a_headline_and_aligned_tables() {
        let expected = "\
mpvpn client 0.1.0: up, running for 12.5 s
session   alice at 203.0.113.1:4433
addresses 10.0.0.2/24 fd00::2/64
order     numbered, 0.4 % retransmitted

class    lane  scheduler, cc   queue  dropped
default  auto  auto, bbr      0.1 ms        0

link  state  tier     sent  received  addresses
eth0  up     primary   0 B       0 B  192.0.2.7

path             state                  rtt  jitter   loss         rate     sent  received   mtu  remote
default/eth0/0   active             12.3 ms  0.4 ms  0.0 %  97.4 Mbit/s  5.0 MiB       0 B  1472  203.0.113.1:4433
default/eth10/0  down (no carrier)        –       –      –            –  5.0 MiB       0 B     –  203.0.113.1:4433
";
        assert_eq!(render(&example(), 200), expected);
    }

    #[test]
    fn limits_of_links_have_a_column_where_there_are_any() {
        let mut links = example().links;
        links.push(Link {
            state: crate::LinkState::Standby,
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
link   state                          tier     sent  received  limits                                         addresses
eth0   up                             primary   0 B       0 B                                                 192.0.2.7
wwan0  standby (a better link works)  backup    0 B       0 B  metered, up 20mbit, weight 3, 1.2 GB of 50 GB
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
class     state                  lane  scheduler, cc       sends  receives      rtt    loss   queue  dropped  copies  repair
critical  up                     auto  auto, bbr      4.0 Mbit/s   0 bit/s  13.1 ms   0.0 %  0.0 ms        0     300
bulk      up                     auto  auto, bbr      4.0 Mbit/s   0 bit/s  14.0 ms  30.0 %  0.0 ms        5          12 %, 40 restored, 9 wasted
default   connecting             auto  auto, bbr                                             0.0 ms        0
cams      asleep (not used yet)  auto  auto, bbr                                             0.0 ms        0
";
        let text = render(&status, 200);
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn repair_is_told_where_there_is_some() {
        let mut status = example();
        let fec = FecStats { percent: 30, recovered: 12, made_good: 7, ..FecStats::default() };
        status.resequencing = Some(Resequencing { fec, ..Resequencing::default() });
        let line = "repair    30 %; lost packets restored: 12 at this end, 7 at the far end; 0 groups lost too much\n";
        assert!(render(&status, 200).contains(line));
        status.resequencing =
            Some(Resequencing { fec: FecStats { percent: 0, ..fec }, ..Resequencing::default() });
        assert!(render(&status, 200).contains("repair    none now; lost packets restored: 12 at"));
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
        let text = render(&status, 200);
        assert!(text.contains("memory    3.0 MiB of 256.0 MiB for 2 connections\n"), "{text}");
        assert!(text.starts_with("mpvpn server 0.1.0: starting, running for 0.0 s, 1 client\n"), "{text}");
        assert!(text.contains("ali?[31mce  1 h 1 min"), "{text}");
        assert!(text.contains("1023 B"), "{text}");
        assert!(text.contains("not numbered now; before, 0.5 % retransmitted"), "{text}");
        assert!(text.contains("default/eth10/0"), "{text}");
    }

    #[test]
    fn nothing_is_wider_than_the_terminal() {
        for width in [0, 1, 20, 60, 80] {
            let text = render(&example(), width);
            assert!(text.lines().all(|line| line.chars().count() <= width.max(1)), "{width}: {text}");
        }
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
