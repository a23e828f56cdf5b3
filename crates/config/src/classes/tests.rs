use std::path::Path;

use mpvpn_types::BitRate;
use proptest::prelude::*;

use super::*;
use crate::{ClientOptions, file, resolve::ClientConfig};
use crate::{PacketDescription, render_classes};
use mpvpn_input::Error;

const HEAD: &str = "server = 'a'\ninsecure = true\n";

fn client(text: &str) -> Result<ClientConfig> {
    ClientConfig::resolve(file::parse(&format!("{HEAD}{text}"), Path::new("client.toml"))?)
}

fn class<'a>(config: &'a ClientConfig, name: &str) -> &'a ClassConfig {
    config.classes.iter().find(|class| class.name == name).unwrap()
}

#[test]
fn without_tables_there_are_three_classes_and_the_rules_that_every_client_has() {
    let config = client("").unwrap();
    assert_eq!(config.classes, ClassConfig::built_in());
    let found: Vec<_> = config.classes.iter().map(|class| (class.name.as_str(), class.id.0)).collect();
    assert_eq!(found, [("default", 0), ("critical", 1), ("bulk", 2)]);
    assert_eq!(config.class_rules.len(), BUILT_IN_RULES.len());
    let first: Vec<_> = config.classes.iter().filter(|class| class.priority).map(|class| class.id).collect();
    assert_eq!(first, [CRITICAL]);
}

#[test]
fn every_key_of_a_class_arrives() {
    let config = client(
        r#"
        path = ["starlink0", "starlink1", "wwan0", "eth0"]

        [[class]]
        name = "cams"
        lane = "stream"
        cc = "cubic"
        scheduler = "redundant"
        copies = 2
        fec = "10+2"
        weight = 7
        min = "10mbit"
        max = "30%"
        dscp = "af21"
        prefer = ["starlink*", "eth0"]
        exclude = "wwan0"
        tun = "cr0"
        priority = true
        pinned = true
        [[class.match]]
        protocol = ["udp", 132]
        from = ["10.0.0.0/24", "fd00::1"]
        to = "198.51.100.0/24"
        from-ports = "1000-2000"
        ports = [5060, "10000-20000"]
        dscp = [46, "cs5"]
        domain = ["Zoom.us", "*.webex.com"]
        [[class.match]]
        protocol = "icmp"

        [[class]]
        name = "bulk"
        dscp = 1
        "#,
    )
    .unwrap();
    assert_eq!(
        *class(&config, "cams"),
        ClassConfig {
            id: ClassId(3),
            name: "cams".into(),
            lane: Some(FlowMode::Stream),
            cc: Some(CongestionControl::Cubic),
            scheduler: Some(Scheduler::Redundant),
            copies: 2,
            fec: Fec::Fixed { data: 10, repair: 2 },
            weight: Weight::new(7).unwrap(),
            min: Some(Portion::Rate(BitRate::from_bps(10_000_000))),
            max: Some(Portion::Percent(30)),
            dscp: Some(18),
            prefer: vec!["starlink*".into(), "eth0".into()],
            exclude: vec!["wwan0".into()],
            only: Vec::new(),
            tun: Some("cr0".into()),
            priority: true,
            pinned: true,
            connects_at_once: true,
        }
    );
    let [_, _, bulk] = ClassConfig::built_in();
    assert_eq!(
        *class(&config, "bulk"),
        ClassConfig { dscp: Some(1), connects_at_once: true, ..bulk },
        "the rest stays"
    );
    assert_eq!(
        config.class_rules[0],
        MatchRule {
            origin: RuleOrigin::File { file: "client.toml".into(), line: 22 },
            rule: Rule {
                protocols: vec![17, 132],
                from: vec!["10.0.0.0/24".parse().unwrap(), "fd00::1/128".parse().unwrap()],
                to: vec!["198.51.100.0/24".parse().unwrap()],
                from_ports: vec![1000..=2000],
                ports: vec![5060..=5060, 10000..=20000],
                dscp: vec![46, 40],
                domains: vec!["zoom.us".parse().unwrap(), "*.webex.com".parse().unwrap()],
                class: ClassId(3),
            }
        }
    );
    assert_eq!(config.class_rules[1].origin.to_string(), "client.toml, line 30");
    assert_eq!(config.class_rules[1].rule.protocols, [1, 58]);
    assert_eq!(config.class_rules[2..], MatchRule::built_in(), "those of every client come last");
}

#[test]
fn classes_are_numbered_in_the_order_of_the_file_and_rules_are_tried_in_it() {
    let config = client(
        "[[class]]\nname = 'z'\n[[class.match]]\nports = 1\n[[class]]\nname = 'default'\n[[class.match]]\nports = \
         2\n[[class]]\nname = 'a'\n[[class.match]]\nports = 3\n",
    )
    .unwrap();
    let names: Vec<_> = config.classes.iter().map(|class| class.name.as_str()).collect();
    assert_eq!(names, ["default", "critical", "bulk", "z", "a"]);
    assert!(config.classes.iter().enumerate().all(|(at, class)| usize::from(class.id.0) == at));
    let order: Vec<_> = config.class_rules[..3].iter().map(|found| found.rule.class.0).collect();
    assert_eq!(order, [3, 0, 4]);
}

#[test]
fn mistakes_in_a_table_are_told_where_they_are() {
    for (text, line, said) in [
        ("[[class]]\nweight = 3\n", 3, "missing field `name`"),
        ("[[class]]\nname = 'Calls'\n", 4, "`Calls` is not a class name: expected 1 to 16 lowercase letters"),
        ("[[class]]\nname = 'a-name-too-long-x'\n", 4, "is not a class name"),
        ("[[class]]\nname = 'a'\ncolour = 1\n", 5, "unknown key `colour`; known are: name, lane, cc"),
        ("[[class]]\nname = 'a'\nlane = 'best'\n", 5, "`best` is none of: auto, datagram, stream"),
        ("[[class]]\nname = 'a'\ncc = 'reno'\n", 5, "`reno` is none of: bbr, cubic"),
        ("[[class]]\nname = 'a'\ncopies = 5\n", 5, "`5` is not a number of copies: expected 1 to 4"),
        ("[[class]]\nname = 'a'\ncopies = 0\n", 5, "`0` is not a number of copies"),
        ("[[class]]\nname = 'a'\nfec = '65+1'\n", 5, "`65+1` is not a FEC setting: expected off, auto"),
        ("[[class]]\nname = 'a'\nfec = '10+33'\n", 5, "(1 to 64, 1 to 32)"),
        ("[[class]]\nname = 'a'\nweight = 0\n", 5, "`0` is not a weight"),
        ("[[class]]\nname = 'a'\nmin = '0%'\n", 5, "`0%` is not a part of a link"),
        ("[[class]]\nname = 'a'\nmax = 50\n", 5, "expected a part of a link in quotes"),
        ("[[class]]\nname = 'a'\ndscp = 64\n", 5, "`64` is not a DSCP: expected 0 to 63"),
        ("[[class]]\nname = 'a'\nprefer = []\n", 5, "the list is empty"),
        ("[[class]]\nname = 'a'\nprefer = 'a/b'\n", 5, "is not an interface's name"),
        ("[[class]]\nname = 'a'\ntun = 'a-name-too-long-'\n", 5, "is not an interface's name"),
        ("[[class]]\nname = 'a'\npriority = 1\n", 5, "expected a boolean"),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nport = 5\n",
            6,
            "unknown key `port`: did you mean `ports`?",
        ),
        ("[[class]]\nname = 'a'\n[[class.match]]\nprotocol = 'tpc'\n", 6, "`tpc` is not a protocol"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nprotocol = 256\n", 6, "`256` is not a protocol"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nto = '10.0.0.1/8'\n", 6, "did you mean 10.0.0.0/8?"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nports = 70000\n", 6, "`70000` is neither a port from 1"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nports = [5, '9-8']\n", 6, "`9-8` is neither a port from 1"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nports = []\n", 6, "the list is empty"),
        ("[[class]]\nname = 'a'\n[[class.match]]\ndscp = ['ef', 'best']\n", 6, "`best` is not a DSCP"),
        ("[[class]]\nname = 'a'\n[[class.match]]\ndomain = '*'\n", 6, "`*` is not a domain"),
        ("[[class]]\nname = 'a'\n[[class.match]]\nmark = '0x100000000'\n", 6, "is not a firewall mark"),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nmark = '0x11/0x10'\n",
            6,
            "the value has bits that the mask leaves out",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nmark = 0x02000000\n",
            6,
            "which mpvpn itself uses to steer packets",
        ),
        ("[[class]]\nname = 'a'\n[[class.match]]\nmark = '0/0'\n", 6, "`0/0` matches every mark"),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nvlan = 4095\n",
            6,
            "`4095` is not a VLAN: expected 1 to 4094",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\ningress = 'lan*'\n",
            6,
            "`lan*` is not an interface's name",
        ),
        ("[[class]]\nname = 'a'\n[[class.match]]\ningress = []\n", 6, "the list is empty"),
        ("class = 'critical'\n", 3, "expected a sequence"),
        ("class = ['critical']\n", 3, "a table with the head [[class]]"),
    ] {
        match client(text) {
            Err(Error::ConfigFile { line: at, why, .. }) => {
                assert!(at == line && why.contains(said), "{text}: line {at}, {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

/// Combinations that are invalid across tables: the whole text of each error.
#[test]
fn what_cannot_be_together_is_told_with_its_line() {
    for (text, expected) in [
        (
            "[[class]]\nname = 'a'\n[[class]]\nname = 'a'\n",
            "client.toml, line 6, column 8: there are two [[class]] with the name `a`: say all of it in one\n \
             6 | name = 'a'\n   |        ^^^",
        ),
        (
            "[[class]]\nname = 'a'\nmin = '60%'\n[[class]]\nname = 'bulk'\nmin = '50%'\n",
            "client.toml, line 8, column 7: 50% for bulk and 60% for a are together more than 100% of each link\n \
             8 | min = '50%'\n   |       ^^^^^",
        ),
        (
            "[[link]]\nname = 'wwan*'\nup = '10mbit'\n[[class]]\nname = 'critical'\nmin = '4mbit'\n[[class]]\nname \
             = 'bulk'\nmin = '70%'\n",
            "client.toml, line 11, column 7: 4mbit for critical and 70% for bulk are together more than the link \
             `wwan*`, which carries 10mbit\n 11 | min = '70%'\n    |       ^^^^^",
        ),
        (
            "[[link]]\nname = 'wwan0'\ndown = '10mbit'\n[[class]]\nname = 'bulk'\nmin = '11mbit'\n",
            "client.toml, line 8, column 7: 11mbit for bulk is more than the link `wwan0`, which carries 10mbit\n \
             8 | min = '11mbit'\n   |       ^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\nmin = '2mbit'\nmax = '1mbit'\n",
            "client.toml, line 5, column 7: `min` of the class `a` is 2mbit, which is more than its `max` 1mbit\n \
             5 | min = '2mbit'\n   |       ^^^^^^^",
        ),
        (
            "[[class]]\nname = 'critical'\nmin = '60%'\n",
            "client.toml, line 5, column 7: `min` of the class `critical` is 60%, which is more than its `max` 50%\n \
             5 | min = '60%'\n   |       ^^^^^",
        ),
        (
            "[[link]]\nname = 'e'\nup = '4mbit'\n[[class]]\nname = 'a'\nmin = '3mbit'\nmax = '50%'\n",
            "client.toml, line 8, column 7: `min` of the class `a` is 3mbit, which is more than its `max` 50%\n \
             8 | min = '3mbit'\n   |       ^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nprotocol = 'udp'\n[[class]]\nname = 'b'\n[[class.match]]\n\
             protocol = 'udp'\nports = 5\n",
            "client.toml, line 9, column 1: this rule never decides: the rule at client.toml, line 5 (class `a`) comes first and \
             matches all its packets\n 9 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nprotocol = 'icmp'\nports = 5\n",
            "client.toml, line 5, column 1: this rule never decides: it has ports, but its protocols \
             have none\n 5 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\nfrom = '10.0.0.0/8'\nto = 'fd00::/8'\n",
            "client.toml, line 5, column 1: this rule never decides: its sources are of one IP version and \
             its destinations of the other\n 5 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "path = ['eth0', 'wwan0']\n[[class]]\nname = 'a'\nprefer = ['eth1']\n",
            "client.toml, line 6, column 10: `prefer` names the link `eth1`, which is none of: eth0, wwan0\n \
             6 | prefer = ['eth1']\n   |          ^^^^^^^^",
        ),
        (
            "path = ['eth0', 'wwan*']\n[[class]]\nname = 'a'\nexclude = 'eth1'\n",
            "client.toml, line 6, column 11: `exclude` names the link `eth1`, which is none of: eth0, wwan*\n \
             6 | exclude = 'eth1'\n   |           ^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\nprefer = 'wwan0'\nexclude = 'wwan*'\n",
            "client.toml, line 6, column 11: the link `wwan0` is both in `prefer` and in `exclude`\n \
             6 | exclude = 'wwan*'\n   |           ^^^^^^^",
        ),
        (
            "path = ['eth0', 'eth1']\n[[class]]\nname = 'a'\nexclude = 'eth*'\n",
            "client.toml, line 6, column 11: the class `a` would have no link: `exclude` names all of eth0, eth1\n \
             6 | exclude = 'eth*'\n   |           ^^^^^^",
        ),
        (
            "[[class]]\nname = 'default'\npinned = true\n",
            "client.toml, line 5, column 10: the class `default` cannot be `pinned`: it carries the packets that no rule \
             matches\n 5 | pinned = true\n   |          ^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'mpvpn0'\n",
            "client.toml, line 5, column 7: `mpvpn0` is the TUN device of the client itself\n \
             5 | tun = 'mpvpn0'\n   |       ^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'cr0'\n[[class]]\nname = 'bulk'\ntun = 'cr0'\n",
            "client.toml, line 8, column 7: `cr0` is the TUN device of the class `a`\n \
             8 | tun = 'cr0'\n   |       ^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\n[[class.match]]\ningress = 'lan0'\n",
            "client.toml, line 5, column 1: only the kernel sees `ingress` of a packet, mpvpn does not: give the class `a` \
             a TUN device, as in tun = \"cr0\", into which the kernel steers such packets\n 5 | [[class.match]]\n   | \
             ^^^^^^^^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'cr0'\n[[class.match]]\nmark = 1\ndomain = 'a.b'\n",
            "client.toml, line 6, column 1: `domain` cannot be combined with `mark`: the kernel, which steers such \
             packets, does not know domain names\n 6 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'cr0'\n[[class.match]]\ningress = ['lan0', 'cr0']\n",
            "client.toml, line 6, column 1: `ingress` names the TUN device `cr0`: packets that come in there have left \
             the tunnel already\n 6 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'cr0'\n[[class.match]]\nvlan = 7\nprotocol = 'icmp'\nports = 1\n",
            "client.toml, line 6, column 1: this rule never decides: it has ports, but its protocols \
             have none\n 6 | [[class.match]]\n   | ^^^^^^^^^^^^^^^",
        ),
        (
            "share = 'cr0'\n[[class]]\nname = 'a'\ntun = 'cr0'\n",
            "client.toml, line 6, column 7: `cr0` is an interface of --share: choose another name for the TUN device of the class\n 6 | tun = 'cr0'\n   |       ^^^^^",
        ),
        (
            "[[class]]\nname = 'a'\ntun = 'cr*'\n",
            "client.toml, line 5, column 7: `cr*` is a pattern: expected the name of one device\n 5 | tun = 'cr*'\n   |       ^^^^^",
        ),
        (
            "path = 'eth0'\n[[class]]\nname = 'a'\ntun = 'eth0'\n",
            "client.toml, line 6, column 7: `eth0` is a link of --path: choose another name for the TUN device of the class\n 6 | tun = 'eth0'\n   |       ^^^^^^",
        ),
    ] {
        let error = client(text).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.is_usage());
    }
    let many: String = (0..6).map(|n| format!("[[class]]\nname = 'c{n}'\n")).collect();
    let error = client(&many).unwrap_err().to_string();
    assert!(
        error.starts_with("client.toml, line 14, column 8: `c5` is one class too many: 8 are"),
        "{error}"
    );
}

#[test]
fn what_may_be_together_is_taken() {
    for text in [
        "[[class]]\nname = 'a'\nmin = '50%'\n[[class]]\nname = 'bulk'\nmin = '50%'\n",
        // They do not meet.
        "[[class]]\nname = 'a'\nmin = '60%'\nexclude = 'wwan*'\n[[class]]\nname = 'bulk'\nmin = '60%'\nexclude = 'eth*'\n",
        "[[link]]\nname = 'wwan0'\nup = '1mbit'\n[[class]]\nname = 'a'\nmin = '5mbit'\nexclude = 'wwan0'\n",
        // They may come.
        "[[class]]\nname = 'a'\nprefer = 'eth7'\n",
        "path = ['eth0', 'wwan*']\n[[class]]\nname = 'a'\nprefer = ['wwan7', 'lte*']\n",
        "[[class]]\nname = 'a'\nprefer = 'wwan*'\nexclude = 'wwan0'\n",
        "path = ['eth0', 'eth1']\n[[class]]\nname = 'a'\nprefer = 'eth?'\nexclude = 'eth1'\n",
        // A rule for everything, after which none that is built in decides.
        "[[class]]\nname = 'bulk'\n[[class.match]]\n",
    ] {
        assert!(client(text).is_ok(), "{text}: {:?}", client(text));
    }
    // The default is below what is asked for: that is said, not guessed.
    let config = client("[[class]]\nname = 'critical'\nmin = '60%'\nmax = '80%'\n").unwrap();
    assert_eq!(class(&config, "critical").max, Some(Portion::Percent(80)));
}

#[test]
fn what_only_the_kernel_sees_is_steered_and_is_no_rule_of_the_tun() {
    let config = client(
        "[[class]]\nname = 'critical'\ntun = 'cr0'\n[[class.match]]\nmark = [0x10, '0x100/0xf00', '7']\nprotocol = \
         'udp'\n[[class.match]]\nvlan = [20, '30']\ningress = 'eth2'\nto = '198.51.100.0/24'\n[[class.match]]\nports = 7\n",
    )
    .unwrap();
    let [udp, vlans] = &config.class_steering[..] else { panic!("{:?}", config.class_steering) };
    assert_eq!(
        (udp.kernel_match.marks.iter().map(ToString::to_string).collect::<Vec<_>>(), &udp.rule.protocols[..]),
        (vec!["0x10".to_owned(), "0x100/0xf00".into(), "0x7".into()], &[17][..])
    );
    assert_eq!(
        vlans.kernel_match,
        KernelMatch { marks: vec![], vlans: vec![20, 30], ingress: vec!["eth2".into()] }
    );
    assert_eq!((vlans.rule.class, vlans.origin.to_string()), (CRITICAL, "client.toml, line 9".to_owned()));
    assert_eq!(config.class_rules.len(), 1 + BUILT_IN_RULES.len());
    assert_eq!(config.class_rules[0].rule.ports, [7..=7]);
    assert_eq!(
        config.class_tuns().map(|(class, tun)| (class.id, tun)).collect::<Vec<_>>(),
        [(CRITICAL, "cr0")]
    );
    let shown = render_classes(&config, 200);
    for words in ["steered into", "0x10 0x100/0xf00 0x7", "20 30", "eth2", "line 9"] {
        assert!(shown.contains(words), "{words} in\n{shown}");
    }
}

#[test]
fn a_proxy_and_an_app_have_classes_without_tuns() {
    let text = format!(
        "{HEAD}socks5 = '127.0.0.1:1'\napi-socket = 'a'\nstate-dir = 's'\n[[class]]\nname = 'a'\ntun = 'cr0'\nlane = 'datagram'\n"
    );
    let options: ClientOptions = file::parse(&text, Path::new("client.toml")).unwrap();
    let config = ClientConfig::resolve_proxy(options).unwrap();
    assert_eq!((class(&config, "a").tun.as_deref(), class(&config, "a").lane), (None, None));
    let said = "a proxy has no TUN devices: `tun` of [[class]] is ignored (`cr0`)";
    assert_eq!(config.note().as_deref(), Some(said));
    assert_eq!(client("").unwrap().note(), None);
}

fn said(config: &ClientConfig, packet: &str) -> String {
    config.class_of(&packet.parse().unwrap()).to_string()
}

#[test]
fn a_packet_in_words_gets_its_class_and_the_rule_that_says_so() {
    let config = client(
        "[[class]]\nname = 'cams'\n[[class.match]]\nprotocol = 'tcp'\nto = '198.51.100.0/24'\nports = 554\n\
         [[class.match]]\ndomain = 'cams.example'\n",
    )
    .unwrap();
    for (packet, expected) in [
        ("tcp 10.0.0.5:4000 -> 198.51.100.9:554", "cams, by rule 1: client.toml, line 5"),
        (
            "tcp 10.0.0.5:4000 -> 203.0.113.9:443 domain A.cams.example",
            "cams, by rule 2: client.toml, line 9",
        ),
        ("udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46", "critical, by rule 4: built-in `real-time`"),
        ("udp [fd00::5]:5060 -> [2001:db8::9]:9 dscp le", "bulk, by rule 3: built-in `low-effort`"),
        ("icmp 10.0.0.5 -> 1.1.1.1", "critical, by rule 5: built-in `ping`"),
        ("icmp fd00::5 -> [2001:db8::1]", "critical, by rule 5: built-in `ping`"),
        ("47 10.0.0.5 -> 1.1.1.1", "default, as no rule matches"),
        ("tcp 10.0.0.5:4000 -> 203.0.113.9:443", "default, as no rule matches"),
    ] {
        assert_eq!(said(&config, packet), expected, "{packet}");
    }
    let ruling = config.class_of(&"tcp 10.0.0.5:1 -> 198.51.100.9:554".parse().unwrap());
    assert_eq!(
        serde_json::to_string(&ruling).unwrap(),
        r#"{"packet":"tcp 10.0.0.5:1 -> 198.51.100.9:554","class":"cams","rule":1,"file":"client.toml","line":5,"built_in":null}"#
    );
}

#[test]
fn what_the_kernel_would_steer_is_said_to_be_steered() {
    let config = client(
        "[[class]]\nname = 'critical'\ntun = 'cr0'\n[[class.match]]\nmark = '0x10/0xf0'\nprotocol = 'udp'\n\
         [[class.match]]\nvlan = [20, 30]\ningress = 'eth2'\n[[class]]\nname = 'bulk'\ntun = 'bk0'\n\
         [[class.match]]\ningress = 'eth2'\n[[class.match]]\nports = 7\n",
    )
    .unwrap();
    let (udp, tcp) = ("udp 10.0.0.5:9 -> 198.51.100.9:7", "tcp 10.0.0.5:9 -> 198.51.100.9:7");
    for (packet, expected) in [
        (format!("{udp} mark 0x15"), "critical, steered into cr0: client.toml, line 6"),
        (format!("{tcp} mark 0x15"), "bulk, by rule 1: client.toml, line 17"),
        (format!("{udp} mark 32"), "bulk, by rule 1: client.toml, line 17"),
        (format!("{tcp} ingress eth2 vlan 30"), "critical, steered into cr0: client.toml, line 9"),
        (format!("{tcp} vlan 30"), "bulk, by rule 1: client.toml, line 17"),
        (format!("{tcp} ingress eth2 vlan 40"), "bulk, steered into bk0: client.toml, line 15"),
    ] {
        assert_eq!(said(&config, &packet), expected, "{packet}");
    }
    let packet = format!("{udp} mark 0x15 vlan 20 ingress eth2");
    let ruling = config.class_of(&packet.parse().unwrap());
    assert_eq!(ruling.packet, packet);
    assert_eq!((ruling.rule, ruling.line, ruling.tun.as_deref()), (None, Some(6), Some("cr0")));
}

#[test]
fn a_packet_that_makes_no_sense_is_explained() {
    for (text, said) in [
        ("", "as in \"udp 10.0.0.5:5060 -> 198.51.100.9:5060\""),
        ("udp 10.0.0.5:5060", "is not a packet: expected a protocol and two ends"),
        ("tpc 10.0.0.5:1 -> 10.0.0.6:2", "`tpc` is not a protocol"),
        ("udp 10.0.0.5 -> 10.0.0.6", "`10.0.0.6` has no port: expected one as in 10.0.0.6:5060"),
        ("udp fd00::5 -> fd00::6", "expected one as in [fd00::6]:5060"),
        ("icmp 10.0.0.5:1 -> 10.0.0.6", "has a port, and the protocol has none: expected 10.0.0.5"),
        ("udp 10.0.0.5:x -> 10.0.0.6:2", "`10.0.0.5:x` is not an address with a port"),
        ("udp 10.0.0.5:1 -> [fd00::6]:2", "are of different IP versions"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 dscp 64", "`64` is not a DSCP"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 dscp", "`dscp` is not understood"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 ttl 5", "`ttl 5` is not understood"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 domain *.zoom.us", "is not understood"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 domain 1.2.3.4", "`1.2.3.4` is not a domain"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 mark 0x10/0xff", "`0x10/0xff` is not a firewall mark of a packet"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 vlan 0", "`0` is not a VLAN"),
        ("udp 10.0.0.5:1 -> 10.0.0.6:2 ingress lan*", "`lan*` is not an interface's name"),
    ] {
        let error = text.parse::<PacketDescription>().unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
}

#[test]
fn classes_and_rules_are_shown_in_tables_without_empty_columns() {
    let config = client(
        "[[class]]\nname = 'cams'\nmin = '2mbit'\nprefer = 'eth*'\n[[class.match]]\nprotocol = ['udp', 'icmp']\nto = \
         'fd00::/8'\n",
    )
    .unwrap();
    let text = render_classes(&config, usize::MAX);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines[..5],
        [
            "class     priority    min  max  weight  lane  cc   scheduler  copies  fec    dscp  prefer",
            "default   no                         4  auto  bbr  auto            1  off  link's",
            "critical  yes              50%       4  auto  bbr  auto            1  off      46",
            "bulk      no                         1  auto  bbr  auto            1  off       8",
            "cams      no        2mbit            4  auto  bbr  auto            1  off  link's  eth*",
        ]
    );
    assert_eq!(
        lines[6].split_whitespace().collect::<Vec<_>>().join(" "),
        "rule class protocol to ports dscp defined in"
    );
    let first: Vec<_> = lines[7].split_whitespace().collect();
    assert_eq!(first, ["1", "cams", "icmp", "udp", "fd00::/8", "line", "7"]);
    assert!(text.contains("\nThe first rule that matches decides"), "{text}");
    assert!(text.ends_with("Line numbers are those of client.toml.\n"), "{text}");
}

#[test]
fn the_example_that_people_copy_is_taken_word_for_word() {
    let guide = include_str!("../../../../docs/guide/three-satellite-links.md");
    let example = guide.split("```").find(|block| block.starts_with("toml") && block.contains("[[class]]"));
    let (_, example) = example.and_then(|block| block.split_once('\n')).unwrap();
    let example = example.replace("PIN", &"ab".repeat(32));
    let options = file::parse::<ClientOptions>(&example, Path::new("client.toml")).unwrap();
    let config = ClientConfig::resolve(options).unwrap();
    assert_eq!((config.classes.len(), class(&config, "critical").copies), (4, 2));
    let ruling = said(&config, "tcp 10.0.7.9:4000 -> 192.0.2.1:8080");
    assert!(ruling.starts_with("cams, by rule 3"), "{ruling}");
    let page = include_str!("../../../../docs/guide/classes-of-traffic.md");
    for BuiltInRule { name, .. } in BUILT_IN_RULES {
        assert!(page.contains(&format!("`{name}`")), "the guide says nothing of the rule `{name}`");
    }
}

#[test]
fn who_asks_about_classes_need_name_no_server() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("client.toml");
    std::fs::write(&path, "[[class]]\nname = 'a'\n").unwrap();
    assert_eq!(ClientConfig::load_without_server(Some(&path)).unwrap().classes.len(), 4);
}

proptest! {
    #[test]
    fn any_value_of_any_key_of_a_class_is_taken_or_refused_with_its_line(
        key in "(name|lane|cc|scheduler|copies|fec|weight|min|max|dscp|prefer|exclude|tun|priority)",
        of_match in "(protocol|from|to|from-ports|ports|dscp|domain|mark|vlan|ingress)",
        values in prop::array::uniform2("['\"\\[]?[ -~é]{0,20}['\"\\]]?"),
    ) {
        let [one, other] = values;
        let text = format!("[[class]]\n{key} = {one}\nname = 'a'\n[[class.match]]\n{of_match} = {other}\n");
        if let Err(error) = client(&text) {
            prop_assert!(matches!(error, Error::ConfigFile { line: 1.., .. }), "{}", error);
        }
    }

    #[test]
    fn any_text_is_a_packet_or_an_error_and_what_is_printed_is_read_again(
        text in "(tcp|udp|icmp|[0-9]{1,3}|.{0,4}) [0-9a-f.:\\[\\]]{0,20} -> [0-9a-f.:\\[\\]]{0,20}( dscp [0-9]{1,2})?",
        v4 in any::<[u8; 4]>(), v6 in any::<[u8; 16]>(), port in any::<u16>(), dscp in 0u8..64,
    ) {
        let _ = text.parse::<PacketDescription>();
        for (from, to) in [
            (std::net::SocketAddr::from((v4, port)), "1.2.3.4:5"),
            (std::net::SocketAddr::from((v6, port)), "[::1]:5"),
        ] {
            let packet: PacketDescription = format!("udp {from} -> {to} dscp {dscp} domain a.b").parse().unwrap();
            prop_assert_eq!(packet.to_string().parse(), Ok(packet));
        }
    }
}
