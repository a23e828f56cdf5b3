//! Seeds that are texts: files of people, messages in JSON, requests of programs.

use std::collections::BTreeMap;

use mpvpn_input::role::Role;
use mpvpn_os::{
    firewall::{
        AddressGuard, ClientFilter, Exit, FilterRule, MarkBits, MarkRule, Masquerade, Origin, PacketMatch,
        PortForward, Rules, SiteNetwork, SiteRules,
    },
    kill_switch::Exceptions,
    netlink::{Family, Interface, Route, Rule},
    undo::Step,
};
use mpvpn_status::{FlowList, Link, Status};
use serde_json::{Value, json};

use super::{Seed, long};

/// A client's file with keys of all kinds, but for those that exclude each other.
pub(crate) const CLIENT: &str = "server = 'vpn.example:443'\n\
    pin = ['0000000000000000000000000000000000000000000000000000000000000000']\n\
    token = 'abcdefghijklmnopqrstuvwxyz012345'\npath = ['wwan*', 'eth0']\nkill-switch = true\nkill-switch-lan = false\n\
    cc = 'bbr'\nscheduler = 'weighted'\nlane = 'auto'\npipes = 'auto'\nroutes = 'all'\nkeep-routes = ['192.168.0.0/16']\n\
    announce = ['192.168.7.0/24', { network = '192.168.1.0/24', as = '10.77.1.0/24' }]\naccept-from = ['10.0.0.0/8']\n\
    dns = ['10.1.0.1']\ndns-local = ['home.arpa']\nshare = ['lan0', '192.168.7.0/24']\nshards = 1\nname = 'home'\n\
    tun-name = 'mpvpn7'\nvia = 'http://user:p%40ss@proxy.example:3128'\ntransport = 'auto'\nreload = 'auto'\n\
    metrics = '127.0.0.1:9100'\ndashboard = '127.0.0.1:9470'\nlog-level = 'debug'\nconfine = 'on'\nqlog = '/tmp/q'\n\
    [[link]]\nname = 'wwan*'\ntier = 'backup'\nmetered = true\nup = '10mbit'\ndown = '50mbit'\nquota = '50GB'\n\
    quota-day = 3\nweight = 3\ndscp = 'ef'\npipes = 2\ntransport = 'tcp'\n\
    [[class]]\nname = 'video'\nweight = 2\nfec = '10+2'\ncopies = 2\nmin = '10%'\nmax = '50mbit'\nprefer = 'eth0'\n\
    exclude = 'wwan*'\nlane = 'datagram'\nscheduler = 'minrtt'\ncc = 'cubic'\ndscp = 34\n\
    [[class.match]]\ndomain = ['*.video.example']\nports = ['443', '8000-8010']\nprotocol = 'udp'\nfrom = '10.0.0.0/24'\n\
    [[class]]\nname = 'desk'\npriority = true\ntun = 'desk0'\n\
    [[class.match]]\nmark = ['0x10/0xff', 0x20]\nvlan = 20\ningress = 'lan0'\ndscp = ['ef', 10]\nfrom-ports = 5060\n\
    [[lane-rule]]\nlane = 'stream'\nto = ['203.0.113.0/24']\nports = ['80']\n";
/// A server's file.
pub(crate) const SERVER: &str = "listen = ['0.0.0.0:443', '[::]:443']\nsubnet = '10.1.0.0/24'\n\
    subnet6 = 'fd00:1:2:3::/64'\nroutes = ['10.0.0.0/8']\nmax-clients = 10\nmax-relays = 100\nmax-user-relays = 50\n\
    dns = ['10.1.0.1']\nauth = 'token'\nnat = 'off'\nisolate = true\nmeasure = true\nold-clients = true\n\
    public = 'vpn.example'\nproxy-protocol-from = ['192.168.1.0/24']\nmetrics = '127.0.0.1:9100'\nmetrics-users = 5\n\
    dashboard = '127.0.0.1:9470'\nname = 'edge'\nreload = 'auto'\nlog-level = 'warn'\nshards = 'auto'\n\
    [[access]]\nallow = false\nusers = ['bob']\nto = ['192.168.0.0/16', '127.0.0.0/8']\nports = ['25', '8000-9000']\n\
    [[limit]]\nusers = ['bob']\nmax-classes = 2\nmax-sessions = 3\nmax-priority = '20%'\n\
    [site]\nupstream = 'http://127.0.0.1:8080'\nserver = 'nginx'\nhide = false\n";
const ACME: &str = "[acme]\ndomains = ['vpn.example']\nemail = 'a@vpn.example'\nchallenge = 'http-01'\n\
    directory = 'https://ca.example/directory'\n";
/// Keys that exclude others in the same file, and values that many keys refuse.
const MORE: &str = "insecure = true\nca = 'system'\ntoken-file = 'token'\ncert = 'cert.pem'\nkey = 'key.pem'\n\
    dashboard-cert = 'cert.pem'\ndashboard-key = 'key.pem'\nsocks5 = ['127.0.0.1:1080']\nhttp = '0.0.0.0:3128'\n\
    api-socket = 'a'\nstate-dir = '/tmp/s'\nkeep-routes = '0.0.0.0/0'\nshare = ['mpvpn7', 'lan0', 'lan0']\n\
    path = ['auto', 'eth0']\ndns = ['off', '9.9.9.9']\ndns = ['9.9.9.9', '9.9.9.9']\nfec = 'auto'\n\
    client-ca = 'ca.pem'\ncrl = 'crl.pem'\nmax-memory = '1MB'\nusers = 'users.toml'\ntcp = 'off'\nauth = 'mtls'\n\
    relay-only = true\nroot = '/srv/www'\nlog_level = 'info'\n[[certificate]]\n[[class.match]]\n[[lane-rule]]\n\
    x = 0\nx = -1\nx = 1.5\nx = ''\nx = []\nx = {}\nx = 2027-01-31\nx = '200%'\nx = '1gbit'\nx = ['fd00::/8', 'x']\n";

/// The lines of a client's file, and more.
pub(crate) fn client_lines() -> Vec<&'static str> {
    [CLIENT, MORE].into_iter().flat_map(str::lines).collect()
}

/// The lines of a server's file, and more.
pub(crate) fn server_lines() -> Vec<&'static str> {
    [SERVER, ACME, MORE].into_iter().flat_map(str::lines).collect()
}

pub(crate) const USERS: &str = "# Users\n[[user]]\nname = 'alice'\n\
    token-sha256 = '0000000000000000000000000000000000000000000000000000000000000001'\nexpires = '2027-01-31'\n\
    address = ['10.0.0.7', 'fd00::7']\nsessions = 2\nup = '10mbit'\ndown = '1gbit'\nquota = '50GB'\n\
    [[user]]\nname = 'carol'\nrevoked = true\nexpires = '2027-01-31T18:00:00Z'\n";
const LINK: &str = "mpvpn://mpvpn_abc%2Fdef@vpn.example:443/?\
    pin=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef&\
    pin=1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

pub(super) fn all() -> Vec<Seed> {
    [config(), people(), machine(), api()].concat()
}

fn config() -> Vec<Seed> {
    let client_reload =
        format!("{CLIENT}\n---\nserver = '192.0.2.1'\nca = 'ca.pem'\n[[link]]\nname = 'eth0'\n");
    let reload = format!("{SERVER}\n---\nlisten = '0.0.0.0:444'\n[site]\nroot = '/srv/www'\n");
    let packets = "udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46\ntcp 10.0.0.5:1 -> 203.0.113.9:443 domain a.video.example\n\
                   icmp 10.0.0.5 -> 10.0.0.1\nudp [fd00::5]:1 -> [fd00::6]:443 mark 0x10 vlan 20 ingress lan0\n---\n[[class]]\n\
                   name = 'desk'\ntun = 'desk0'\n[[class.match]]\nmark = '0x10/0xff'\n";
    let proxy = "server = '192.0.2.1'\nca = 'system'\nsocks5 = '127.0.0.1:1080'\nhttp = '0.0.0.0:3128'\ntoken-file = 't'\n";
    let client_args = "--server=vpn.example\n--insecure\n--path\neth0\n--path\nwwan*\n--scheduler\nredundant\n--lane\nstream\n\
                       --pipes\nauto\n--dns\n9.9.9.9\n--routes\nadvertised\n--share\nlan0\n--via\nhttp://p:3128\n--cc\ncubic\n\
                       --token\nabcdefghijklmnop\n--log-level\ntrace\n--transport\ntcp\n--shards\n3\n--kill-switch\n--ca\nca.pem";
    let server_args = "--listen\n[::]:443\n--auth\nmtls\n--client-ca\nca.pem\n--crl\ncrl.pem\n--nat\noff\n--subnet6\nnone\n--tcp\n\
                       off\n--dns\noff\n--relay-only\n--reload\nauto\n--confine\noff\n--shards\n2\n--routes\n10.0.0.0/8";
    [
        ("client", 0u8, CLIENT),
        ("client_reload", 0, client_reload.as_str()),
        ("proxy", 0, proxy),
        ("server", 1, SERVER),
        ("server_reload", 1, reload.as_str()),
        ("acme", 1, ACME),
        ("packets", 2, packets),
        ("value", 3, "vpn.example:443"),
        ("share", 3, "10.0.0.0/8"),
        ("via", 3, "http://user:p%40ss@[2001:db8::1]:3128"),
        ("match", 3, "wwan*\nwwan0"),
        ("client_args", 4, client_args),
        ("server_args", 4, server_args),
    ]
    .map(|(name, kind, text)| ("config", name, [&[kind], text.as_bytes()].concat()))
    .into_iter()
    .chain([("client_lines", 5, CLIENT), ("server_lines", 6, SERVER)].map(|(name, kind, text)| {
        // Each line with its own value.
        let lines = (0..text.lines().count() as u8).flat_map(|line| [line, line]);
        ("config", name, [kind].into_iter().chain(lines).collect())
    }))
    .collect()
}

fn people() -> Vec<Seed> {
    // Adds bob, gives him a new token, sets, revokes and removes.
    let changes: [[u8; 4]; 5] = [[1, 5, 30, 0], [1, 0, 0, 2], [1, 31, 2, 3], [1, 0, 0, 4], [1, 0, 0, 5]];
    let users = [&[5], &changes.concat()[..], USERS.as_bytes()].concat();
    let inline = b"\x01\x03\x00\x00\x01user = [{ name = 'a', revoked = true }, { name = 'b' }]".to_vec();
    let mut seeds = vec![("users", "changes", users), ("users", "inline", inline)];
    let before = "# mine\nserver = 'vpn.example'\ninsecure = true\npin = 'x'\n";
    let system = "mpvpn://mpvpn_abc@[2001:db8::1]/?ca=system";
    let links = [
        ("new", 0, LINK, ""),
        ("named", 1, system, ""),
        ("before", 0, LINK, before),
        ("cut", 0, &LINK[..99], ""),
    ];
    seeds.extend(links.map(|(name, file, link, before)| {
        ("join_link", name, [&[file], &long(link.as_bytes())[..], before.as_bytes()].concat())
    }));
    seeds
}

fn rules() -> Rules {
    let packets = PacketMatch {
        marks: vec![MarkBits { value: 16, mask: 255 }, MarkBits { value: 32, mask: 255 }],
        ingress: vec!["lan0".to_owned()],
        protocols: vec![17],
        from: vec!["10.0.0.0/24".parse().expect("a network")],
        ports: vec![(443, 443), (8000, 8010)],
        dscp: vec![46],
        ..PacketMatch::default()
    };
    Rules {
        name: "mpvpn0".to_owned(),
        masquerade: vec![Masquerade {
            from: Origin::Network("10.0.0.0/24".parse().expect("a network")),
            exit: Exit::AnyBut("mpvpn0".to_owned()),
        }],
        mark_rules: vec![MarkRule { packets, set: MarkBits { value: 1 << 24, mask: 15 << 24 } }],
        exempt_mark: Some(MarkBits { value: 1, mask: 1 }),
        guards: vec![AddressGuard { interface: "mpvpn0".to_owned(), addresses: vec![[10, 0, 0, 2].into()] }],
        site: Some(Box::new(SiteRules {
            tun: "mpvpn0".to_owned(),
            networks: vec![SiteNetwork {
                network: "192.168.1.0/24".parse().expect("a network"),
                announced: "10.77.1.0/24".parse().expect("a network"),
            }],
            accept_from: vec!["10.0.0.0/8".parse().expect("a network")],
            masquerade: true,
            forwards: vec![PortForward {
                protocol: 6,
                ports: (8443, 8443),
                from: vec!["10.0.0.0/8".parse().expect("a network")],
                to: vec![[192, 168, 1, 7].into()],
                to_port: Some(443),
            }],
        })),
    }
}

fn filter() -> ClientFilter {
    let rule = FilterRule {
        allow: true,
        to: vec!["192.168.0.0/16".parse().expect("a network"), "fd00::/8".parse().expect("a network")],
        ports: vec![(25, 25), (8000, 9000)],
    };
    ClientFilter {
        tun: "mpvpn0".to_owned(),
        addresses: vec!["10.0.0.1/24".parse().expect("a network"), "fd00::1/64".parse().expect("a network")],
        is_isolated: true,
        accepts_inbound: false,
        blocked: vec!["127.0.0.0/8".parse().expect("a network")],
        forwarded: vec![(6, 8443, 8443), (17, 5000, 5010)],
        profiles: vec![vec![], vec![rule]],
    }
}

/// A message to the helper: its length, and a task in JSON.
fn message(task: &Value) -> Vec<u8> {
    let text = task.to_string().into_bytes();
    [&(text.len() as u32).to_le_bytes(), &text[..]].concat()
}

fn machine() -> Vec<Seed> {
    let address = "10.0.0.2";
    let exceptions = Exceptions {
        devices: vec!["mpvpn0".to_owned()],
        mark: 1,
        remotes: vec![
            "192.0.2.1:443".parse().expect("an address"),
            "[2001:db8::1]:443".parse().expect("an address"),
        ],
        lan: vec!["192.168.1.0/24".parse().expect("a network")],
        is_hold: false,
    };
    let links = BTreeMap::from([("eth0", 128), ("wwan0", 129)]);
    let tasks = [
        ("rules", vec![json!({"Firewall": {"Rules": rules()}})]),
        (
            "clients",
            vec![
                json!({"Firewall": {"Clients": [filter(), [[address, 1]]]}}),
                json!({"Firewall": {"Sessions": ["mpvpn_mpvpn0_clients", [[address, 1]], [["fd00::2", 0]]]}}),
            ],
        ),
        (
            "inbound",
            vec![
                json!({"Firewall": {"Inbound": ["mpvpn_mpvpn0_inbound", links]}}),
                json!({"Firewall": {"InboundConnections": ["mpvpn_mpvpn0_inbound", [[128,
                {"local": "10.0.0.2:22", "remote": "192.0.2.9:4000"}]]]}}),
                json!({"Firewall": {"Remove": "mpvpn_mpvpn0_inbound"}}),
                json!({"ShowTable": "mpvpn_mpvpn0"}),
            ],
        ),
        ("kill_switch", vec![json!({"Firewall": {"KillSwitch": [exceptions]}})]),
        (
            "name_servers",
            vec![
                json!({"NameServers": {"Write": [address, "fd00::1"]}}),
                json!({"NameServers": {"Restore": ["10.0.0.9"]}}),
                json!({"NameServers": {"Resolved": ["mpvpn0", [address]]}}),
                json!({"NameServers": {"Forget": "mpvpn0"}}),
                json!({"NameServers": {"Restore": []}}),
                json!({"Read": "pages/a/b.txt"}),
            ],
        ),
    ];
    let mut seeds: Vec<Seed> = tasks
        .into_iter()
        .map(|(name, tasks)| ("helper", name, tasks.iter().flat_map(message).collect()))
        .collect();
    let interface = Interface { index: 7, name: "mpvpn0".to_owned() };
    let net = || "10.0.0.0/24".parse().expect("a network");
    let mut rule = Rule::lookup(Family::V4, 100, 52);
    (rule.mark, rule.input, rule.source) = (Some((1, 1)), Some("lan0".to_owned()), Some(net()));
    let mut route = Route::through(net(), 52, 7);
    route.gateway = Some([10, 0, 0, 1].into());
    let steps = [
        Step::Address { interface: interface.clone(), address: net() },
        Step::Route { route, interface: Some(interface) },
        Step::Rule { rule },
        Step::Firewall { rules: rules() },
        Step::ClientFilter(filter()),
        Step::Sysctl { key: "net/ipv4/ip_forward".to_owned(), before: "0".to_owned(), set: "1".to_owned() },
    ];
    let mut steps: Vec<Value> = steps.iter().map(|step| json!(step)).collect();
    steps.push(json!({"Resolver": {"path": "/etc/resolv.conf", "before": {"Link": "stub"}, "set": "x"}}));
    let record = json!({"pid": 1, "start_time": 1, "steps": steps}).to_string();
    seeds.push(("journal", "record", [&[0], record.as_bytes()].concat()));
    let owner = |name: &str, set: &str| json!({"name": name, "pid": 1, "start_time": 1, "set": set});
    let setting = json!({"before": "x", "owners": [owner("a", "1"), owner("b", "2")]}).to_string();
    // b ends, c sets a value, a and c end.
    let changes: &[u8] = &[1, 4, 1, 3, 2, 4, 0, 1, 2, 5];
    seeds.push(("journal", "setting", [changes, setting.as_bytes()].concat()));
    seeds
}

fn api() -> Vec<Seed> {
    let post = |path: &str, body: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: mpvpn\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: mpvpn\r\n\r\n");
    let requests = [
        ("status", get("/v1/status")),
        ("flows", get("/v1/flows")),
        ("events", get("/v1/events")),
        ("follow", get("/v1/events?follow")),
        ("config", get("/v1/config")),
        (
            "link",
            post(
                "/v1/links/eth0",
                r#"{"tier":"backup","metered":true,"up":"10mbit","down":"none","weight":3}"#,
            ),
        ),
        ("unknown_link", post("/v1/links/eth1", "{}")),
        ("echoes", post("/v1/echoes", r#"{"identifier":7}"#)),
        ("measure", post("/v1/measure", r#"{"links":["eth0"]}"#)),
        ("dashboard", post("/v1/dashboard/link", "")),
        ("reload", post("/v1/reload?force", "")),
        ("refused", post("/v1/reload", "")),
        ("nothing", get("/v2")),
    ];
    let mut seeds: Vec<Seed> = requests
        .into_iter()
        .map(|(name, request)| ("control_api", name, [&[0], request.as_bytes()].concat()))
        .collect();
    let status = Status {
        links: vec![Link::new("eth0")],
        notes: vec!["a note".to_owned()],
        ..Status::new(Role::Client)
    };
    seeds.push(("control_api", "answer", [&[1], json!(status).to_string().as_bytes()].concat()));
    let flows = json!(FlowList::new(Role::Client)).to_string();
    seeds.push(("control_api", "flow_list", [&[2], flows.as_bytes()].concat()));
    seeds
}
