//! The text format of Prometheus, version 0.0.4.

use std::{collections::BTreeMap, fmt::Write};

use super::{
    Kind::{self, Counter, Gauge},
    Metric, SingleMetric,
    users::UserFigures,
};
use crate::{Class, ForwardedPort, Link, Path, PathState, Status};
use mpvpn_input::role::Role;

const BUILD_INFO: SingleMetric =
    single("build_info", Gauge, "Version and role of this mpvpn.", &["version", "role"]);
const UP: SingleMetric = single("up", Gauge, "Whether the tunnel works.", &[]);
const UPTIME: SingleMetric = single("uptime_seconds", Gauge, "Time since the start of the process.", &[]);
const RESIDENT: SingleMetric =
    single("resident_memory_bytes", Gauge, "Resident memory that is no file's.", &[]);
const HEAP: SingleMetric =
    single("heap_bytes", Gauge, "Memory that is allocated on the heap and not freed.", &[]);
const RESUMED: SingleMetric =
    single("session_resumed_total", Counter, "How often the session of a client was resumed.", &[]);
const FLOWS: SingleMetric = single("flows", Gauge, "Flows inside the tunnel, by how they travel.", &["lane"]);
const CLIENTS: SingleMetric = single("clients", Gauge, "Sessions at a server.", &[]);
const PATHS: SingleMetric =
    single("paths", Gauge, "Paths of all clients of a server, by their states.", &["class", "state"]);
const HANDSHAKES: SingleMetric =
    single("handshakes_total", Counter, "QUIC handshakes, by how they ended.", &["result"]);
const REFUSED: SingleMetric = single(
    "refused_requests_total",
    Counter,
    "Requests that a server refused, by HTTP status: 401 without valid credentials, 403 if a rule forbids it, 503 beyond a limit.",
    &["status"],
);
/// The metrics that are not in the tables of [`Metric`].
pub const SINGLE_METRICS: &[SingleMetric] =
    &[BUILD_INFO, UP, UPTIME, RESIDENT, HEAP, RESUMED, FLOWS, HANDSHAKES, REFUSED, CLIENTS, PATHS];
/// Statuses of refused requests that are there from the start, so that the first refusal is an increase.
const EXPECTED_REFUSALS: [u16; 3] = [401, 403, 503];

const fn single(
    name: &'static str,
    kind: Kind,
    help: &'static str,
    labels: &'static [&'static str],
) -> SingleMetric {
    SingleMetric { name, kind, help, labels }
}

/// A status in the text format, with the series of `users`. The label `path` is the number of a path among
/// those of its link, so that a path that replaces a closed one continues its series.
pub fn exposition(status: &Status, users: &BTreeMap<String, UserFigures>) -> String {
    let mut out = Exposition::default();
    let (version, role) = (status.version.as_str(), status.role.to_string());
    out.single(&BUILD_INFO, &[version, &role], 1.0);
    out.single(&UP, &[], f64::from(status.state.works()));
    out.single(&UPTIME, &[], status.uptime_s);
    if let Some(memory) = status.memory {
        out.single(&RESIDENT, &[], memory.resident_bytes as f64);
        out.single(&HEAP, &[], memory.heap_bytes as f64);
    }
    if let Some(session) = &status.session {
        out.single(&RESUMED, &[], session.resumed as f64);
    }
    let flows = &status.flows;
    out.labelled(
        &FLOWS,
        [("stream", flows.stream), ("datagram", flows.datagram), ("udp", flows.udp)]
            .map(|(lane, count)| ([lane], count as f64)),
    );
    if let Some(handshakes) = status.handshakes {
        let all = [
            ("completed", handshakes.completed),
            ("failed", handshakes.failed),
            ("retried", handshakes.retried),
            ("dropped", handshakes.dropped),
        ];
        out.labelled(&HANDSHAKES, all.map(|(result, count)| ([result], count as f64)));
    }
    if status.role == Role::Server {
        refusals(&mut out, status);
    }
    let classes: BTreeMap<_, _> =
        status.classes.iter().map(|class| (vec![("class", class.name.clone())], class)).collect();
    out.per_item(Class::METRICS, &classes);
    let links: BTreeMap<_, _> =
        status.links.iter().map(|link| (vec![("link", link.name.clone())], link)).collect();
    out.per_item(Link::METRICS, &links);
    match status.role {
        Role::Client => out.per_item(Path::METRICS, &by_labels(&status.paths)),
        Role::Server => client_totals(&mut out, status),
    }
    let forwards: BTreeMap<_, _> =
        status.forwards.iter().map(|forward| (vec![("port", forward.port.clone())], forward)).collect();
    out.per_item(ForwardedPort::METRICS, &forwards);
    let users: BTreeMap<_, _> =
        users.iter().map(|(name, figures)| (vec![("user", name.clone())], figures)).collect();
    out.per_item(UserFigures::METRICS, &users);
    out.0
}

fn refusals(out: &mut Exposition, status: &Status) {
    let mut counts: BTreeMap<u16, u64> = EXPECTED_REFUSALS.map(|status| (status, 0)).into();
    counts.extend(status.refused.iter().map(|refused| (refused.status, refused.count)));
    let counts: Vec<_> = counts.into_iter().map(|(status, count)| (status.to_string(), count)).collect();
    out.labelled(&REFUSED, counts.iter().map(|(status, count)| ([status.as_str()], *count as f64)));
}

/// The paths by their labels. If a path and its replacement have the same labels, the active one is kept.
fn by_labels(paths: &[Path]) -> BTreeMap<Labels, &Path> {
    let mut by_label: BTreeMap<Labels, &Path> = BTreeMap::new();
    for path in paths {
        let pipe = match path.transport.as_deref() {
            Some("tcp" | "mptcp") => "tcp".to_owned(),
            _ => path.pipe.unwrap_or(0).to_string(),
        };
        let number = match path.id.split_once('@') {
            Some((_, shard)) => format!("{pipe}@{shard}"),
            None => pipe,
        };
        let labels = vec![("class", path.class.clone()), ("link", path.link.clone()), ("path", number)];
        let is_better = |other: &Path| path.state == PathState::Active || other.state != PathState::Active;
        if by_label.get(&labels).is_none_or(|other| is_better(other)) {
            by_label.insert(labels, path);
        }
    }
    by_label
}

/// Numbers of clients and of their paths; a series for each client could be thousands.
fn client_totals(out: &mut Exposition, status: &Status) {
    out.single(&CLIENTS, &[], status.clients.len() as f64);
    let mut counts: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    let known = |name: &str| status.classes.iter().any(|class| class.name == name);
    for path in status.clients.iter().flat_map(|client| &client.paths).filter(|path| known(&path.class)) {
        *counts.entry((&path.class, path.state.as_str())).or_default() += 1;
    }
    if !counts.is_empty() {
        out.labelled(
            &PATHS,
            counts.into_iter().map(|((class, state), count)| ([class, state], count.into())),
        );
    }
}

/// Names and values of labels.
type Labels = Vec<(&'static str, String)>;

#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn head(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Counter => "counter",
            Gauge => "gauge",
        };
        let _ = writeln!(self.0, "# HELP mpvpn_{name} {help}\n# TYPE mpvpn_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.0, "mpvpn_{name}");
        for (at, (label, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{value}\"", if at == 0 { '{' } else { ',' });
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let value = if value.is_finite() { value } else { 0.0 };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// A metric with one sample; `values` are the values of its labels.
    fn single(&mut self, head: &SingleMetric, values: &[&str], value: f64) {
        self.head(head.name, head.kind, head.help);
        self.labelled_sample(head, values, value);
    }

    /// A metric with several samples, each with the values of its labels.
    fn labelled<'a, const N: usize>(
        &mut self,
        head: &SingleMetric,
        samples: impl IntoIterator<Item = ([&'a str; N], f64)>,
    ) {
        self.head(head.name, head.kind, head.help);
        for (values, value) in samples {
            self.labelled_sample(head, &values, value);
        }
    }

    fn labelled_sample(&mut self, head: &SingleMetric, values: &[&str], value: f64) {
        let labels: Vec<_> = head.labels.iter().copied().zip(values.iter().copied()).collect();
        self.sample(head.name, &labels, value);
    }

    fn per_item<T>(&mut self, metrics: &[Metric<T>], items: &BTreeMap<Labels, &T>) {
        for Metric { name, kind, help, value } in metrics {
            let samples: Vec<_> =
                items.iter().filter_map(|(labels, item)| Some((labels, value(item)?))).collect();
            if samples.is_empty() {
                continue;
            }
            self.head(name, *kind, help);
            for (labels, value) in samples {
                let labels: Vec<_> = labels.iter().map(|(label, value)| (*label, value.as_str())).collect();
                self.sample(name, &labels, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{super::users::UserSeries, *};
    use crate::{
        Client, FecStats, Handshakes, LinkState, Memory, PathFec, RefusedRequests, Resequencing, Session,
        User, tests::EXAMPLE,
    };

    fn exposition(status: &Status) -> String {
        super::exposition(status, &BTreeMap::new())
    }

    /// Every sample, by its name and labels; what is no exposition panics.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let mut samples = BTreeMap::new();
        let (mut family, mut kind, mut seen) = (String::new(), String::new(), BTreeSet::new());
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, words) = help.split_once(' ').expect(line);
                assert!(seen.insert(name.to_owned()), "twice: {line}");
                assert!(name.starts_with("mpvpn_") && words.ends_with('.'), "{line}");
                family = name.to_owned();
            } else if let Some(typed) = line.strip_prefix("# TYPE ") {
                let (name, word) = typed.split_once(' ').expect(line);
                assert_eq!(name, family);
                assert_eq!(word == "counter", name.ends_with("_total"), "{line}");
                kind = word.to_owned();
            } else {
                let (series, value) = line.rsplit_once(' ').expect(line);
                let name = series.split('{').next().unwrap();
                assert_eq!(name, family, "{line}");
                assert!(["counter", "gauge"].contains(&kind.as_str()), "{line}");
                assert!(series == name || series.ends_with("\"}"), "{line}");
                assert!(samples.insert(series.to_owned(), value.parse().expect(line)).is_none(), "{line}");
            }
        }
        samples
    }

    fn example() -> Status {
        let mut status: Status = serde_json::from_str(EXAMPLE).unwrap();
        status.session = Some(Session { resumed: 2, ..status.session.unwrap() });
        let fec = FecStats { percent: 30, recovered: 12, wasted: 3, ..FecStats::default() };
        status.classes.push(Class {
            tx_bytes: 9_007_199_254,
            tx_bps: Some(8000),
            rtt_ms: Some(25.0),
            loss_pct: Some(12.5),
            queue_bytes: 3000,
            resequencing: Some(Resequencing {
                copies: 7,
                waiting: 4,
                wait_ms: 1500,
                fec,
                ..Resequencing::default()
            }),
            ..Class::new("bulk")
        });
        let mut inside = status.paths[0].clone();
        (inside.id, inside.transport, inside.rtt_ms) = ("default/eth0/tcp".into(), Some("tcp".into()), 50.0);
        status.paths.push(inside);
        let mut second = status.paths[0].clone();
        (second.id, second.class, second.link) = ("bulk/wwan0/7@1".into(), "bulk".into(), "wwan0".into());
        (second.pipe, second.rtt_ms, second.tx_bytes) = (Some(3), 40.0, 5);
        second.fec =
            Some(PathFec { percent: 20, protected: 100, sent: 20, sent_bytes: 999, made_good: 9, wasted: 8 });
        second.backlog_ms = Some(2500);
        status.handshakes = Some(Handshakes { completed: 3, failed: 1, ..Handshakes::default() });
        status.memory = Some(Memory { resident_bytes: 9000, heap_bytes: 5000 });
        status.paths.push(second);
        status.links.push(Link { state: LinkState::Standby, tx_bytes: 77, ..Link::new("wwan0") });
        status
    }

    #[test]
    fn every_class_link_and_path_is_there_in_base_units() {
        let samples = parse(&exposition(&example()));
        for (series, value) in [
            ("mpvpn_up", 1.0),
            ("mpvpn_build_info{version=\"0.1.0\",role=\"client\"}", 1.0),
            ("mpvpn_session_resumed_total", 2.0),
            ("mpvpn_resident_memory_bytes", 9000.0),
            ("mpvpn_heap_bytes", 5000.0),
            ("mpvpn_class_queue_seconds{class=\"default\"}", 0.0001),
            ("mpvpn_class_transmit_bytes_total{class=\"bulk\"}", 9_007_199_254.0),
            ("mpvpn_class_transmit_bytes_per_second{class=\"bulk\"}", 1000.0),
            ("mpvpn_class_rtt_seconds{class=\"bulk\"}", 0.025),
            ("mpvpn_class_loss_ratio{class=\"bulk\"}", 0.125),
            ("mpvpn_class_copied_packets_total{class=\"bulk\"}", 7.0),
            ("mpvpn_class_fec_ratio{class=\"bulk\"}", 0.3),
            ("mpvpn_class_fec_recovered_packets_total{class=\"bulk\"}", 12.0),
            ("mpvpn_class_fec_wasted_packets_total{class=\"bulk\"}", 3.0),
            ("mpvpn_class_queue_bytes{class=\"bulk\"}", 3000.0),
            ("mpvpn_class_reorder_waiting_packets{class=\"bulk\"}", 4.0),
            ("mpvpn_class_reorder_wait_seconds_total{class=\"bulk\"}", 1.5),
            ("mpvpn_handshakes_total{result=\"completed\"}", 3.0),
            ("mpvpn_handshakes_total{result=\"dropped\"}", 0.0),
            ("mpvpn_path_fec_ratio{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 0.2),
            ("mpvpn_path_fec_repair_packets_total{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 20.0),
            ("mpvpn_path_fec_made_good_packets_total{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 9.0),
            ("mpvpn_path_fec_wasted_packets_total{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 8.0),
            ("mpvpn_path_backlog_seconds_total{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 2.5),
            ("mpvpn_link_up{link=\"eth0\"}", 1.0),
            ("mpvpn_link_transmit_bytes_total{link=\"wwan0\"}", 77.0),
            ("mpvpn_path_active{class=\"default\",link=\"eth0\",path=\"0\"}", 1.0),
            ("mpvpn_path_rtt_seconds{class=\"default\",link=\"eth0\",path=\"tcp\"}", 0.05),
            ("mpvpn_path_rtt_seconds{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 0.04),
            ("mpvpn_path_mtu_bytes{class=\"bulk\",link=\"wwan0\",path=\"3@1\"}", 1472.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series} in {samples:#?}");
        }
        let known = |name: &str| samples.keys().any(|series| series.starts_with(name));
        assert!(!known("mpvpn_class_rtt_seconds{class=\"default\"}"), "what is not known is left out");
        assert!(!known("mpvpn_link_quota_bytes"));
        assert!(!known("mpvpn_refused_requests_total"), "a client refuses nothing");
    }

    #[test]
    fn a_path_that_is_made_anew_takes_the_name_of_the_one_before() {
        let mut status = example();
        let mut old = status.paths[0].clone();
        (old.state, old.tx_bytes) = (PathState::Down, 1000);
        for at in [0, 1] {
            status.paths.insert(at, old.clone());
            let samples = parse(&exposition(&status));
            let series = "mpvpn_path_transmit_bytes_total{class=\"default\",link=\"eth0\",path=\"0\"}";
            assert_eq!(samples[series], 0.0);
            status.paths.remove(at);
        }
    }

    #[test]
    fn a_server_tells_of_all_clients_together() {
        let example = example();
        let mut status = Status { role: Role::Server, session: None, ..example.clone() };
        (status.links, status.paths) = (Vec::new(), Vec::new());
        status.refused =
            vec![RefusedRequests { status: 403, count: 4 }, RefusedRequests { status: 421, count: 2 }];
        for user in ["anna", "bob"] {
            status.clients.push(Client {
                user: user.into(),
                addresses: Vec::new(),
                connected_s: 1.0,
                tx_bytes: 0,
                rx_bytes: 0,
                classes: Vec::new(),
                resequencing: None,
                paths: example.paths.clone(),
            });
        }
        let forward = r#"[{"port":"tcp/8443","to":"anna:443","addresses":[],"tx_bytes":7,"rx_bytes":9}]"#;
        status.forwards = serde_json::from_str(forward).unwrap();
        let samples = parse(&exposition(&status));
        assert_eq!(samples["mpvpn_forward_transmit_bytes_total{port=\"tcp/8443\"}"], 7.0);
        assert_eq!(samples["mpvpn_forward_receive_bytes_total{port=\"tcp/8443\"}"], 9.0);
        assert_eq!(samples["mpvpn_clients"], 2.0);
        assert_eq!(samples["mpvpn_paths{class=\"bulk\",state=\"active\"}"], 2.0);
        for (refused, count) in [(401, 0.0), (403, 4.0), (421, 2.0)] {
            assert_eq!(samples[&format!("mpvpn_refused_requests_total{{status=\"{refused}\"}}")], count);
        }
        assert!(samples.keys().all(|series| !series.contains("anna")));
        let users = |name: &str| User { name: name.into(), tx_bytes: 5, sessions: 1, ..User::default() };
        let users = UserSeries::new(1).update(&[users("anna"), users("bob")]);
        let samples = parse(&super::exposition(&status, &users));
        assert_eq!(samples["mpvpn_user_transmit_bytes_total{user=\"anna\"}"], 5.0);
        assert_eq!(samples["mpvpn_user_sessions{user=\"other\"}"], 1.0);
        assert!(samples.keys().all(|series| !series.contains("bob")));
    }

    #[test]
    fn names_cannot_break_the_format() {
        let mut status = example();
        status.classes[0].name = "a\"b\\c\nd".into();
        assert!(exposition(&status).contains("{class=\"a\\\"b\\\\c\\nd\"}"));
    }
}
