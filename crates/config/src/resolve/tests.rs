use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;
use crate::{AcmeChallenge, BitRate, SiteContent, words::Subnet6};
use mpvpn_input::rules::Ports;

mod mistakes;

fn server(text: &str) -> Result<ServerConfig> {
    ServerConfig::resolve(file::parse(text, Path::new("server.toml"))?, Rights::ALL)
}

fn client(text: &str) -> Result<ClientConfig> {
    ClientConfig::resolve(file::parse(text, Path::new("client.toml"))?)
}

#[test]
fn an_empty_file_gives_a_server_the_defaults() {
    let defaults = ServerConfig {
        listen: vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT)],
        tcp: Tcp::On,
        old_clients: false,
        service: ServerMode::Packets,
        cert: None,
        more_certs: Vec::new(),
        acme: None,
        proxy_protocol_from: Vec::new(),
        site: Site::default(),
        subnet: Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 24),
        subnet6: Some(Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x6d70, 0x766e, 0, 0, 0, 0, 0), 64)),
        tun_name: TUN_NAME.into(),
        auth: AuthMode::Token,
        client_ca: None,
        crl: None,
        users: None,
        public: None,
        state_dir: STATE_DIR.into(),
        nat: Nat::On,
        routes: ALL_NETWORKS.into(),
        dns: ServerDns::Own,
        dns_names: DnsNames::default(),
        forwards: Vec::new(),
        max_clients: 253,
        isolate: false,
        access: Vec::new(),
        limits: Vec::new(),
        max_relays: DEFAULT_MAX_RELAYS,
        max_user_relays: DEFAULT_MAX_USER_RELAYS,
        max_memory: None,
        shards: Shards::Auto,
        name: TUN_NAME.into(),
        api_socket: default_socket(Role::Server, TUN_NAME),
        metrics: None,
        metrics_users: 0,
        dashboard: None,
        measure: false,
        qlog: None,
        confine: Confine::On,
        reload: ReloadMode::Manual,
        log_level: LogLevel::Info,
    };
    assert_eq!(server("").unwrap(), defaults);
    assert_eq!(ServerConfig::default(), defaults);
}

#[test]
fn every_key_of_a_server_arrives() {
    let config = server(
        r#"
        listen = ["0.0.0.0:4433", "[::]:4433"]
        tcp = "off"
        old-clients = true
        cert = "server.crt"
        key = "server.key"
        subnet = "10.9.0.0/16"
        subnet6 = "fd12:3456::/48"
        tun-name = "tun7"
        auth = "mtls"
        client-ca = "clients.pem"
        crl = "revoked.pem"
        users = "/etc/mpvpn/users.toml"
            public = "vpn.example:4433"
        state-dir = "/tmp/state"
        nat = "off"
        routes = ["192.168.8.0/24", "fd00::/16", "192.168.9.7", "192.168.9.0/24"]
        dns = ["10.9.0.1", "fd12:3456::1"]
        max-clients = 100
        isolate = true
        shards = 4
        name = "edge"
        api-socket = "/tmp/edge.sock"
        metrics = "0.0.0.0:9464"
        metrics-users = 20
        dashboard = "0.0.0.0:9470"
        measure = true
        qlog = "/var/log/mpvpn"
        confine = "off"
        reload = "auto"
        log-level = "debug"
        max-relays = 1000
        max-memory = "512MB"
        max-user-relays = 10

        proxy-protocol-from = ["10.0.0.0/8", "fd00::1"]

        [site]
        upstream = "http://127.0.0.1:8080"
        server = "Apache"
        hide = true

        [[certificate]]
        cert = "other.crt"
        key = "other.key"

        [acme]
        domains = ["vpn.example.org", "www.example.org"]
        email = "admin@example.org"
        directory = "https://ca.example.org/acme"
        ca = "ca.pem"
        challenge = "http-01"

        [[access]]
        allow = false
        ports = ["25", "8000-8100"]

        [[access]]
        allow = true
        users = ["anna", "bob"]
        to = ["192.168.0.0/16", "fd00::/8", "203.0.113.7"]

        [[limit]]
        users = "anna"
        max-sessions = 3
        max-priority = "20mbit"

        [[limit]]
        max-classes = 3
        max-priority = "30%"
        "#,
    )
    .unwrap();
    assert_eq!(
        config,
        ServerConfig {
            listen: vec!["0.0.0.0:4433".parse().unwrap(), "[::]:4433".parse().unwrap()],
            tcp: Tcp::Off,
            old_clients: true,
            service: ServerMode::Packets,
            cert: Some(CertFiles { cert: "server.crt".into(), key: "server.key".into() }),
            more_certs: vec![CertFiles { cert: "other.crt".into(), key: "other.key".into() }],
            acme: Some(Acme {
                domains: vec!["vpn.example.org".into(), "www.example.org".into()],
                email: Some("admin@example.org".into()),
                directory: "https://ca.example.org/acme".into(),
                ca: Some("ca.pem".into()),
                challenge: AcmeChallenge::Http01,
            }),
            proxy_protocol_from: vec!["10.0.0.0/8".parse().unwrap(), "fd00::1/128".parse().unwrap()],
            site: Site {
                content: SiteContent::Upstream("127.0.0.1:8080".into()),
                server: "Apache".into(),
                hide: true,
            },
            subnet: "10.9.0.0/16".parse().unwrap(),
            subnet6: Some("fd12:3456::/48".parse().unwrap()),
            tun_name: "tun7".into(),
            auth: AuthMode::Mtls,
            client_ca: Some("clients.pem".into()),
            crl: Some("revoked.pem".into()),
            users: Some("/etc/mpvpn/users.toml".into()),
            public: Some("vpn.example:4433".parse().unwrap()),
            state_dir: "/tmp/state".into(),
            nat: Nat::Off,
            routes: ["192.168.8.0/23", "fd00::/16"].map(|net| net.parse().unwrap()).into(),
            dns_names: DnsNames::default(),
            forwards: Vec::new(),
            dns: ServerDns::Servers(["10.9.0.1", "fd12:3456::1"].map(|ip| ip.parse().unwrap()).into()),
            max_clients: 100,
            isolate: true,
            access: vec![
                AccessRule {
                    allow: false,
                    users: vec![],
                    to: vec![],
                    ports: vec![Ports::new(25, 25).unwrap(), Ports::new(8000, 8100).unwrap()],
                },
                AccessRule {
                    allow: true,
                    users: vec!["anna".into(), "bob".into()],
                    to: ["192.168.0.0/16", "fd00::/8", "203.0.113.7/32"]
                        .map(|net| net.parse().unwrap())
                        .into(),
                    ports: vec![],
                },
            ],
            limits: vec![
                LimitRule {
                    users: vec!["anna".into()],
                    max_sessions: Some(3),
                    max_classes: 8,
                    max_priority: Some("20mbit".parse().unwrap()),
                },
                LimitRule {
                    users: vec![],
                    max_sessions: None,
                    max_classes: 3,
                    max_priority: Some("30%".parse().unwrap()),
                },
            ],
            max_relays: 1000,
            max_user_relays: 10,
            max_memory: Some(ByteSize::from_bytes(512_000_000)),
            shards: Shards::Count(4),
            name: "edge".into(),
            api_socket: "/tmp/edge.sock".into(),
            metrics: Some("0.0.0.0:9464".parse().unwrap()),
            metrics_users: 20,
            dashboard: Some("0.0.0.0:9470".parse().unwrap()),
            measure: true,
            qlog: Some("/var/log/mpvpn".into()),
            confine: Confine::Off,
            reload: ReloadMode::Auto,
            log_level: LogLevel::Debug,
        }
    );
}

#[test]
fn a_site_with_pages_hides_what_a_server_is_unless_told_otherwise() {
    for (site, hides) in [
        ("root = '/var/www'", true),
        ("upstream = 'http://127.0.0.1:8080'", true),
        ("root = '/var/www'\nhide = false", false),
        ("hide = true", true),
        ("", false),
    ] {
        assert_eq!(server(&format!("[site]\n{site}\n")).unwrap().site.hide, hides, "{site}");
    }
}

#[test]
fn every_key_of_a_client_arrives() {
    let pin = "ab".repeat(32);
    let config = client(&format!(
        r#"
        server = [
            "vpn.example:4433",
            {{ address = "b.example", ca = "system", token-file = "b.token", weight = 2 }}
        ]
        choose = "nearest"
        return = "never"
        path = ["eth0", "wwan0"]
        pin = "{pin}"
        cert = "client.crt"
        key = "client.key"
        token = "mpvpn_secret"
        tun-name = "tun7"
        scheduler = "failover"
        lane = "datagram"
        cc = "cubic"
        via = "http://anna:secret@192.0.2.8:3128"
        routes = "advertised"
        dns = "192.0.2.53"
        keep-routes = "203.0.113.0/24"
        dns-local = ["lan", "Home.Arpa."]
        kill-switch = true
        kill-switch-lan = false
        share = ["lan0", "192.168.1.0/24"]
        state-dir = "/tmp/state"
        shards = "2"
        pipes = "auto"
        transport = "quic"
        name = "home"
        api-socket = "/tmp/home.sock"
        metrics = "[::1]:9465"
        dashboard = "[::]:9471"
        dashboard-cert = "dashboard.crt"
        dashboard-key = "dashboard.key"
        qlog = "qlog"
        confine = "off"
        reload = "auto"
        log-level = "warn"

        [[link]]
        name = "wwan*"
        tier = "backup"
        metered = true
        up = "20mbit"
        down = "50mbit"
        weight = 3
        quota = "50GB"
        quota_day = 15
        pipes = 4
        dscp = "ef"
        transport = "tcp"

        [[link]]
        name = "eth0"

        [[lane-rule]]
        lane = "datagram"
        to = ["192.0.2.0/24"]
        ports = ["22-23"]
        "#
    ))
    .unwrap();
    // The settings of all links.
    let for_all =
        LinkConfig { pipes: Some(Pipes::Auto), transport: Some(Transport::Quic), ..LinkConfig::default() };
    assert_eq!(
        config,
        ClientConfig {
            servers: vec![
                Server {
                    address: "vpn.example:4433".parse().unwrap(),
                    trust: Trust::Pin(vec![pin.parse().unwrap()]),
                    token: Some("mpvpn_secret".parse().unwrap()),
                    token_file: None,
                    weight: 1,
                },
                Server {
                    address: "b.example:443".parse().unwrap(),
                    trust: Trust::System,
                    token: None,
                    token_file: Some("b.token".into()),
                    weight: 2,
                },
            ],
            choose: Choose::Nearest,
            return_when: Return::Never,
            when_down: WhenDown::Block,
            server: ServerAddr { host: "vpn.example".into(), port: 4433 },
            trust: Trust::Pin(vec![pin.parse().unwrap()]),
            cert: Some(CertFiles { cert: "client.crt".into(), key: "client.key".into() }),
            token: Some("mpvpn_secret".parse().unwrap()),
            token_file: None,
            paths: vec!["eth0".into(), "wwan0".into()],
            links: vec![
                LinkConfig {
                    name: "wwan*".into(),
                    tier: mpvpn_types::Tier::Backup,
                    metered: true,
                    up: Some(BitRate::from_bps(20_000_000)),
                    down: Some(BitRate::from_bps(50_000_000)),
                    quota: Some(ByteSize::from_bytes(50_000_000_000)),
                    weight: mpvpn_types::Weight::new(3).unwrap(),
                    quota_day: 15,
                    pipes: Some(Pipes::Count(4)),
                    dscp: 46,
                    transport: Some(Transport::Tcp),
                    server: None,
                },
                LinkConfig { name: "eth0".into(), ..for_all.clone() },
                for_all,
            ],
            classes: ClassConfig::built_in().into(),
            class_steering: Vec::new(),
            static_routes: Vec::new(),
            tun_persist: false,
            tun_carrier: false,
            bypass: Vec::new(),
            ignored_class_tuns: Vec::new(),
            class_rules: MatchRule::built_in(),
            state_dir: "/tmp/state".into(),
            tun_name: "tun7".into(),
            scheduler: Scheduler::Failover,
            lane: FlowMode::Datagram,
            lane_rules: vec![LaneRule {
                streams: false,
                to: vec!["192.0.2.0/24".parse().unwrap()],
                ports: vec![Ports::new(22, 23).unwrap()],
            }],
            cc: CongestionControl::Cubic,
            via: Some("http://anna:secret@192.0.2.8:3128".parse().unwrap()),
            routes: Routes::Advertised,
            dns: Dns::Servers(vec!["192.0.2.53".parse().unwrap()]),
            keep_routes: vec!["203.0.113.0/24".parse().unwrap()],
            dns_local: vec!["lan".into(), "home.arpa".into()],
            kill_switch: KillSwitch::On { allows_lan: false },
            proxies: Proxies::default(),
            share: vec!["lan0".into(), "192.168.1.0/24".into()],
            site: SiteConfig::default(),
            shards: Shards::Count(2),
            name: "home".into(),
            api_socket: "/tmp/home.sock".into(),
            metrics: Some("[::1]:9465".parse().unwrap()),
            dashboard: ClientDashboard::of(
                "[::]:9471".parse().ok(),
                Some("dashboard.crt".into()),
                Some("dashboard.key".into())
            )
            .unwrap(),
            qlog: Some("qlog".into()),
            confine: Confine::Off,
            reload: ReloadMode::Auto,
            log_level: LogLevel::Warn,
        }
    );
}

#[test]
fn certificates_of_clients_need_the_ca_and_the_mode() {
    for (text, said) in [
        ("auth = 'mtls'", "--auth mtls is given without --client-ca"),
        ("client-ca = 'a.pem'", "--client-ca is given with --auth token"),
        ("auth = 'none'\nclient-ca = 'a.pem'", "--client-ca is given with --auth none"),
        ("crl = 'a.pem'", "--crl is given without --client-ca"),
    ] {
        let error = server(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    assert_eq!(server("auth = 'mtls'\nclient-ca = 'a.pem'").unwrap().auth, AuthMode::Mtls);
}

#[test]
fn fewer_relays_for_all_are_fewer_for_each() {
    let config = server("max-relays = 100").unwrap();
    assert_eq!((config.max_relays, config.max_user_relays), (100, 100));
}

#[test]
fn servers_are_given_once_and_each_has_an_address_and_a_trust() {
    let servers = |servers: &str| client(&format!("server = {servers}\npin = '{}'", "ab".repeat(32)));
    for (text, said) in [
        ("[]", "no server is given"),
        ("['a.example', 'a.example:443']", "the server a.example:443 is given twice"),
        ("[{ pin = [] }]", "a server has no `address`"),
        ("{ address = 'a.example', weigth = 2 }", "did you mean `weight`?"),
        ("{ address = 'a.example', weight = -1 }", "weight"),
        ("['a.example', 7]", "expected a name or address in quotes"),
        (&format!("{:?}", (0..17).map(|n| format!("{n}.example")).collect::<Vec<_>>()), "17 servers"),
    ] {
        let error = servers(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    let mut config = servers("['a.example', { address = 'b.example', ca = 'b.pem' }]").unwrap();
    assert_eq!(config.server, config.servers[0].address);
    config.use_server(1);
    assert_eq!(config.server.host, "b.example");
    assert_eq!(config.trust, Trust::Ca("b.pem".into()));
    let both = client("server = 'a'\ninsecure = true\nwhen-down = 'direct'\nkill-switch = true");
    assert!(both.unwrap_err().to_string().contains("--when-down direct and --kill-switch contradict"));
}

#[test]
fn a_client_needs_no_more_than_a_server_and_a_trust() {
    let config = client("server = 'vpn.example'\ninsecure = true").unwrap();
    let server = ServerAddr { host: "vpn.example".into(), port: 443 };
    let trust = Trust::Insecure;
    assert_eq!(config, ClientConfig::new(server.clone(), trust.clone()));
    let defaults = ClientConfig {
        servers: vec![Server {
            address: server.clone(),
            trust: trust.clone(),
            token: None,
            token_file: None,
            weight: 1,
        }],
        choose: Choose::Order,
        return_when: Return::Idle,
        when_down: WhenDown::Block,
        server,
        trust,
        cert: None,
        token: None,
        token_file: None,
        paths: vec!["auto".into()],
        links: Vec::new(),
        classes: ClassConfig::built_in().into(),
        class_rules: MatchRule::built_in(),
        class_steering: Vec::new(),
        static_routes: Vec::new(),
        tun_persist: false,
        tun_carrier: false,
        bypass: Vec::new(),
        ignored_class_tuns: Vec::new(),
        state_dir: STATE_DIR.into(),
        tun_name: TUN_NAME.into(),
        scheduler: Scheduler::Auto,
        cc: CongestionControl::Bbr,
        via: None,
        lane: FlowMode::Auto,
        lane_rules: Vec::new(),
        routes: Routes::All,
        dns: Dns::Suggested,
        keep_routes: Vec::new(),
        dns_local: Vec::new(),
        kill_switch: KillSwitch::Off,
        share: Vec::new(),
        site: SiteConfig::default(),
        proxies: Proxies::default(),
        shards: Shards::Auto,
        name: TUN_NAME.into(),
        api_socket: default_socket(Role::Client, TUN_NAME),
        metrics: None,
        dashboard: None,
        qlog: None,
        confine: Confine::On,
        reload: ReloadMode::Manual,
        log_level: LogLevel::Info,
    };
    assert_eq!(config, defaults);
    assert_eq!(config.api_socket, Path::new("/run/mpvpn/client-mpvpn0.sock"));
}

#[test]
fn the_socket_is_named_after_the_name_or_the_tun() {
    let socket = |text| server(text).unwrap().api_socket;
    assert_eq!(socket("tun-name = 'tun7'"), Path::new("/run/mpvpn/server-tun7.sock"));
    assert_eq!(socket("tun-name = 'tun7'\nname = 'edge'"), Path::new("/run/mpvpn/server-edge.sock"));
}

#[test]
fn one_text_stands_for_a_list_of_one() {
    assert_eq!(server("listen = '127.0.0.1:4433'").unwrap().listen.len(), 1);
    assert_eq!(client("server='a'\ninsecure=true\npath='eth0'").unwrap().paths, ["eth0"]);
}

#[test]
fn no_ipv6_in_the_tunnel_can_be_asked_for() {
    assert_eq!(server("subnet6 = 'none'").unwrap().subnet6, None);
}

#[test]
fn options_that_contradict_each_other_are_explained() {
    for (text, why) in [
        ("cert = 'a'", "--cert is given without --key"),
        ("key = 'a'", "--key is given without --cert"),
        ("listen = ['1.2.3.4:5', '1.2.3.4:5']", "--listen 1.2.3.4:5 is given twice"),
        ("auth = 'none'\nusers = 'u'", "--users and --auth none contradict each other"),
        ("max-clients = 0", "--max-clients 0 would let no client connect"),
        ("max-relays = 0", "--max-relays 0 would relay nothing"),
        ("max-user-relays = 0", "--max-user-relays 0 would relay nothing"),
        ("max-memory = '63MB'", "--max-memory 63 MB would let few clients connect"),
        (
            "max-relays = 7\nmax-user-relays = 8",
            "--max-user-relays 8 is more than --max-relays 7, the limit for all users together",
        ),
        (
            "max-clients = 254",
            "--max-clients 254 is more than 253, the number of addresses for clients in 10.0.0.0/24",
        ),
    ] {
        assert_eq!(server(text).unwrap_err().to_string(), why);
    }
    let base = "server = 'a'\n";
    let pin = format!("ca = 'x'\ninsecure = true\npin = '{}'", "00".repeat(32));
    for (text, why) in [
        ("", "no option says how to verify the server"),
        ("ca = 'x'\ninsecure = true", "--ca and --insecure contradict each other"),
        (&pin, "--ca and --pin and --insecure contradict each other"),
        ("ca='x'\ntoken='t'\ntoken-file='f'", "--token and --token-file are given together"),
        ("ca='x'\npath=['eth0','eth1','eth0']", "--path eth0 is given twice"),
        ("ca='x'\npath=['eth0','auto']", "--path auto is given together with interfaces"),
        ("ca='x'\npath='mpvpn0'", "--path mpvpn0 is the TUN device of the tunnel itself"),
        ("ca='x'\nshare=['lan0','lan0']", "--share lan0 is given twice"),
        ("ca='x'\nshare='mpvpn0'", "--share mpvpn0 is the TUN device of the tunnel itself"),
    ] {
        let error = client(&format!("{base}{text}")).unwrap_err();
        assert_eq!(error.to_string(), why);
        assert!(error.is_usage() && !error.next_step().is_empty());
    }
    assert_eq!(client("insecure = true").unwrap_err().to_string(), "no server is given");
}

#[test]
fn values_that_cannot_work_are_refused() {
    for text in [
        "subnet = '127.0.0.0/8'",
        "subnet = '224.0.0.0/24'",
        "subnet = '0.0.0.0/8'",
        "subnet = '240.0.0.0/8'",
        "subnet = '10.0.0.0/4'",
        "subnet = 'fd00::/64'",
        "subnet6 = 'fe80::/64'",
        "subnet6 = 'fd00::1/64'",
        "subnet6 = 'fd00::/127'",
        "subnet6 = '::/64'",
        "listen = '0.0.0.0:0'",
        "listen = 'localhost:4433'",
        "tun-name = 'a/b'",
        "tun-name = 'tun%d'",
        "tun-name = ''",
        "tun-name = 'a-name-too-long-'",
        "name = '.hidden'",
        "cert = ''\nkey = ''",
        "log-level = 'loud'",
    ] {
        assert!(server(text).is_err(), "{text} was taken");
    }
    for text in ["share = '192.168.1.7/24'", "share = 'no such name'", "token = 'two words'", "pin = 'ab'"] {
        assert!(client(&format!("server='a'\nca='b'\n{text}")).is_err(), "{text} was taken");
    }
}

#[test]
fn servers_are_read_as_people_write_them() {
    for (text, host, port, printed) in [
        ("vpn.example", "vpn.example", 443, "vpn.example:443"),
        ("vpn.example:4433", "vpn.example", 4433, "vpn.example:4433"),
        ("203.0.113.1:4433", "203.0.113.1", 4433, "203.0.113.1:4433"),
        ("2001:db8::1", "2001:db8::1", 443, "[2001:db8::1]:443"),
        ("[2001:db8::1]", "2001:db8::1", 443, "[2001:db8::1]:443"),
        ("[2001:db8::1]:4433", "2001:db8::1", 4433, "[2001:db8::1]:4433"),
    ] {
        let server: ServerAddr = text.parse().unwrap();
        assert_eq!((server.host.as_str(), server.port), (host, port), "{text}");
        assert_eq!(server.to_string(), printed);
    }
    for bad in [
        "",
        ":4433",
        "a:",
        "a:0",
        "a:65536",
        "a:b",
        "[::1",
        "[::1]x",
        "[a]:1",
        "a b",
        "1.2.3",
        "1.2.3.256",
        "::g",
    ] {
        assert!(bad.parse::<ServerAddr>().is_err(), "{bad} was taken for a server");
    }
}

#[test]
fn the_command_line_wins_over_the_file() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client.toml");
    std::fs::write(&path, "server='a'\nca='x'\ntoken-file='f'\npath=['eth0']\ncc='cubic'").unwrap();
    let cli = ClientOptions {
        insecure: true,
        token: Some("t".parse().unwrap()),
        path: vec!["eth1".into()],
        ..ClientOptions::default()
    };
    let config = ClientConfig::load(Some(&path), cli).unwrap();
    assert_eq!(config.trust, Trust::Insecure, "one choice replaces the other");
    assert_eq!((config.token.is_some(), config.token_file), (true, None));
    assert_eq!(config.paths, ["eth1"]);
    assert_eq!(config.cc, CongestionControl::Cubic);
}

#[test]
fn a_file_that_is_named_must_be_there() {
    let error =
        ServerConfig::load(Some(Path::new("/nonexistent/s.toml")), ServerOptions::default(), Rights::ALL);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "--config names /nonexistent/s.toml, which does not exist");
}

#[test]
fn the_token_is_read_from_its_file() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("token");
    let server = ServerAddr { host: "a".into(), port: 1 };
    let config =
        ClientConfig { token_file: Some(path.clone()), ..ClientConfig::new(server, Trust::Insecure) };
    std::fs::write(&path, "mpvpn_abc\n").unwrap();
    assert_eq!(config.load_token().unwrap().unwrap().reveal(), "mpvpn_abc");
    std::fs::write(&path, "two\nlines").unwrap();
    let error = config.load_token().unwrap_err().to_string();
    assert!(error.ends_with("expected one bearer token on one line, found something else"), "{error}");
}

proptest! {
    #[test]
    fn any_file_is_a_configuration_or_an_error_with_a_place(text in "(?s).{0,200}") {
        if let Err(Error::ConfigFile { line, column, .. }) = server(&text) {
            prop_assert!(line >= 1 && column >= 1);
        }
    }

    #[test]
    fn any_value_of_any_key_is_taken_or_refused(
        key in "(listen|subnet6?|tun-name|name|cert|auth|nat|log-level|max-clients|max-relays|access|shards)",
        value in "['\"\\[]?[ -~é]{0,30}['\"\\]]?",
    ) {
        let _ = server(&format!("{key} = {value}\n"));
    }

    #[test]
    fn any_text_is_a_server_or_an_error(text in ".{0,80}") {
        if let Ok(server) = text.parse::<ServerAddr>() {
            prop_assert_eq!(server.to_string().parse(), Ok(server));
        }
    }

    #[test]
    fn what_a_share_prints_is_read_again(text in "[a-z0-9./:]{0,24}") {
        if let Ok(share) = text.parse::<SharedNetwork>() {
            prop_assert_eq!(share.to_string().parse(), Ok(share));
        }
    }
}

#[test]
fn routes_of_a_family_without_addresses_are_refused() {
    let options = |subnet6: &str| ServerOptions {
        routes: vec!["2001:db8::/32".parse().unwrap(), "10.1.0.0/16".parse().unwrap()],
        subnet6: Some(Subnet6(subnet6.parse().ok())),
        ..ServerOptions::default()
    };
    let error = ServerConfig::resolve(options("none"), Rights::ALL).unwrap_err();
    assert!(error.to_string().contains("--routes 2001:db8::/32 is an IPv6 network"), "{error}");
    let config = ServerConfig::resolve(options("fd00::/64"), Rights::ALL).unwrap();
    assert_eq!(config.routes, ["10.1.0.0/16", "2001:db8::/32"].map(|net| net.parse().unwrap()));
}

#[test]
fn not_all_routes_can_be_kept() {
    let base = "server = 'vpn.example'\ninsecure = true\n";
    let error = client(&format!("{base}keep-routes = ['10.0.0.0/8', '::/0']\n")).unwrap_err().to_string();
    assert!(error.contains("--keep-routes ::/0 would keep all routes"), "{error}");
}

#[test]
fn a_kill_switch_needs_a_tunnel() {
    let base = "server = 'vpn.example'\ninsecure = true\nkill-switch = true\n";
    let resolve = |text: &str| ClientConfig::resolve(ClientOptions::parse(text).unwrap());
    assert!(resolve(&format!("{base}via = 'http://proxy.example:3128'\n")).is_ok());
    let error = resolve("server = 'vpn.example'\ninsecure = true\nkill-switch-lan = true\n").unwrap_err();
    assert!(error.to_string().contains("without --kill-switch"), "{error}");
    let cli = ClientOptions { kill_switch: true, ..ClientOptions::default() };
    let error = ClientConfig::load_proxy(None, cli).unwrap_err().to_string();
    assert!(error.contains("--kill-switch is about a TUN device"), "{error}");
}
