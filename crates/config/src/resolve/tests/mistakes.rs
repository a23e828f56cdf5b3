use super::*;

#[test]
fn mistakes_about_limits_are_told_where_they_are() {
    for (text, line, said) in [
        ("[[limit]]\nmax-classes = 0\n", 2, "`0` is not a number of classes: expected 1"),
        ("[[limit]]\nmax-sessions = 0\n", 2, "`0` is not a number of sessions: expected 1 or more"),
        ("[[limit]]\nmax-classes = 9\n", 2, "`9` is not a number of classes"),
        ("[[limit]]\nmax-priority = 'much'\n", 2, "`much` is not a part of a link"),
        ("[[limit]]\nusers = []\n", 2, "the list is empty"),
        ("[[limit]]\nmax-rate = '1mbit'\n", 2, "unknown key `max-rate`"),
    ] {
        match server(text) {
            Err(Error::ConfigFile { line: at, why, .. }) => {
                assert!(at == line && why.contains(said), "{text}: line {at}: {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn mistakes_about_links_are_told_where_they_are() {
    const HEAD: &str = "server = 'a'\ninsecure = true\n";
    for (text, line, said) in [
        ("[[link]]\ntier = 'backup'\n", 3, "missing field `name`"),
        ("[[link]]\nname = 'eth0'\ntire = 'backup'\n", 5, "unknown key `tire`"),
        (
            "[[link]]\nname = 'eth0'\ntier = 'best'\n",
            5,
            "`best` is none of: primary, overflow, backup, never",
        ),
        ("[[link]]\nname = 'eth0'\nmetered = 'yes'\n", 5, "invalid type"),
        ("[[link]]\nname = 'eth0'\nup = '1kbit'\n", 5, "1kbit is too little: expected at least 64kbit"),
        ("[[link]]\nname = 'eth0'\ndown = 20\n", 5, "expected a rate in quotes"),
        ("[[link]]\nname = 'eth0'\nquota = '5'\n", 5, "`5` is not an amount of data"),
        ("[[link]]\nname = 'eth0'\nquota-day = 32\n", 5, "32 is not a day of a month"),
        ("[[link]]\nname = 'eth0'\nweight = 0\n", 5, "0 is not a weight"),
        ("[[link]]\nname = 'eth0'\npipes = 9\n", 5, "`9` is neither auto nor a number from 1 to 8"),
        ("[[link]]\nname = 'eth0'\npipes = true\n", 5, "expected a number from 1 to 8, or \"auto\""),
        ("pipes = 'many'\n", 3, "`many` is neither auto"),
        ("transport = 'udp'\n", 3, "`udp` is none of: auto, quic, tcp"),
        ("[[link]]\nname = 'eth0'\ntransport = 2\n", 5, "expected \"auto\", \"quic\" or \"tcp\""),
        ("[[link]]\nname = 'eth0'\ndscp = 64\n", 5, "`64` is not a DSCP"),
        ("[[link]]\nname = 'eth0'\ndscp = 'cs8'\n", 5, "`cs8` is not a DSCP"),
        ("[[link]]\nname = 'a link'\n", 4, "not an interface's name"),
        ("[[link]]\nname = 'e*'\n[[link]]\nname = 'e*'\n", 5, "two [[link]] with the name `e*`"),
        ("link = 'eth0'\n", 3, "tables with the head [[link]]"),
    ] {
        match client(&format!("{HEAD}{text}")) {
            Err(Error::ConfigFile { line: at, why, .. }) => {
                assert!(at == line && why.contains(said), "{text}: line {at}, {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn mistakes_about_access_are_told_where_they_are() {
    for (text, line, said) in [
        ("[[access]]\nports = '25'\n", 1, "missing field `allow`"),
        ("[[access]]\nallow = 'yes'\n", 2, "invalid type: string \"yes\", expected a boolean"),
        ("[[access]]\nallow = true\nport = '25'\n", 3, "unknown key `port`: did you mean `ports`?"),
        ("[[access]]\nallow = true\nports = 25\n", 3, "expected a port or a range of ports in quotes"),
        ("[[access]]\nallow = true\nports = [25]\n", 3, "expected a port or a range of ports in quotes"),
        ("[[access]]\nallow = true\nports = '0'\n", 3, "`0` is neither a port from 1 to 65535"),
        ("[[access]]\nallow = true\nports = '65536'\n", 3, "`65536` is neither"),
        ("[[access]]\nallow = true\nports = '9-8'\n", 3, "`9-8` is neither"),
        ("[[access]]\nallow = true\nports = '+9'\n", 3, "`+9` is neither"),
        ("[[access]]\nallow = true\nports = ['1', '-9']\n", 3, "`-9` is neither"),
        ("[[access]]\nallow = true\nports = []\n", 3, "the list is empty"),
        ("[[access]]\nallow = true\nusers = ['']\n", 3, "the user's name is empty"),
        ("[[access]]\nallow = true\nusers = 5\n", 3, "expected a user's name in quotes"),
        ("[[access]]\nallow = true\nto = '10.0.0.1/8'\n", 3, "did you mean 10.0.0.0/8?"),
        ("[[access]]\nallow = true\nto = 'lan'\n", 3, "`lan` is neither a network"),
        ("[[access]]\nallow = true\nto = '::ffff:10.0.0.0/104'\n", 3, "is an IPv4-mapped network"),
        ("access = 'all'\n", 1, "expected a sequence"),
        ("access = ['all']\n", 1, "a table with the head [[access]]"),
    ] {
        match server(text) {
            Err(Error::ConfigFile { line: at, why, .. }) => {
                assert!(at == line && why.contains(said), "{text}: line {at}, {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

/// Each mistake with the exact words that a person reads.
#[test]
fn mistakes_in_a_file_are_shown_where_they_are() {
    for (text, expected) in [
        (
            "# ours\nlisten = \"0.0.0.0:4433\"\ntun_name = \"tun7\"\n",
            "server.toml, line 3, column 1: unknown key `tun_name`: did you mean `tun-name`?\n \
             3 | tun_name = \"tun7\"\n   | ^^^^^^^^",
        ),
        (
            "fec = 'auto'",
            "server.toml, line 1, column 1: `fec` is not a key of this table: it is a key of each [[class]] in the \
             client's file, as in fec = \"auto\"\n 1 | fec = 'auto'\n   | ^^^",
        ),
        (
            "colour = 1",
            "server.toml, line 1, column 1: unknown key `colour`; known are: \
             listen, tcp, old-clients, relay-only, cert, key, certificate, acme, proxy-protocol-from, site, subnet, subnet6, tun-name, auth, client-ca, crl, users, public, \
             state-dir, nat, routes, dns, \
             dns-domain, dns-name, forward, max-clients, isolate, access, limit, max-relays, max-user-relays, max-memory, shards, name, api-socket, metrics, metrics-users, dashboard, measure, qlog, confine, reload, log-level\n 1 | \
             colour = 1\n   | ^^^^^^",
        ),
        (
            "routes = '192.168.8.1/24'",
            "server.toml, line 1, column 10: 192.168.8.1/24 has host bits set: did you mean 192.168.8.0/24?\n \
             1 | routes = '192.168.8.1/24'\n   |          ^^^^^^^^^^^^^^^^",
        ),
        (
            "shards = 17",
            "server.toml, line 1, column 10: `17` is neither auto nor a number from 1 to 16\n \
             1 | shards = 17\n   |          ^^",
        ),
        (
            "nat = false",
            "server.toml, line 1, column 7: invalid type: boolean `false`, expected \"on\" or \"off\"\n \
             1 | nat = false\n   |       ^^^^^",
        ),
        (
            "listen = ['0.0.0.0:4433', 4433]",
            "server.toml, line 1, column 27: invalid type: integer `4433`, expected \"ADDRESS:PORT\"\n \
             1 | listen = ['0.0.0.0:4433', 4433]\n   |                           ^^^^",
        ),
        (
            "listen = 4433",
            "server.toml, line 1, column 10: invalid type: integer `4433`, expected \"ADDRESS:PORT\", \
             or a list of such\n 1 | listen = 4433\n   |          ^^^^",
        ),
        (
            "subnet = '10.0.0.1/24'",
            "server.toml, line 1, column 10: 10.0.0.1/24 has host bits set: did you mean 10.0.0.0/24?\n \
             1 | subnet = '10.0.0.1/24'\n   |          ^^^^^^^^^^^^^",
        ),
        (
            "subnet = '10.0.0.0/31'",
            "server.toml, line 1, column 10: 10.0.0.0/31 is too small: a server and a client need /30 or \
             larger\n 1 | subnet = '10.0.0.0/31'\n   |          ^^^^^^^^^^^^^",
        ),
        (
            "auth = 'ldap'",
            "server.toml, line 1, column 8: `ldap` is none of: none, token, mtls\n 1 | auth = 'ldap'\n   |        ^^^^^^",
        ),
        (
            "max-clients = -1",
            "server.toml, line 1, column 15: invalid value: integer `-1`, expected u32\n \
             1 | max-clients = -1\n   |               ^^",
        ),
        (
            "name = 'é/..'",
            "server.toml, line 1, column 8: `é/..` is not a name: expected 1 to 32 letters, digits, - _ or .\n \
             1 | name = 'é/..'\n   |        ^^^^^^",
        ),
        (
            "cert = 'a'\ncert = 'b'",
            "server.toml, line 2, column 1: duplicate key\n 2 | cert = 'b'\n   | ^^^^",
        ),
    ] {
        let error = server(text).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.is_usage());
        assert_eq!(error.next_step(), "correct server.toml and start again");
    }
}

#[test]
fn text_that_is_no_toml_is_shown_too() {
    let error = server("cert = \nkey = 'x'").unwrap_err().to_string();
    assert!(error.starts_with("server.toml, line 1, column "), "{error}");
    assert!(error.contains("\n 1 | cert ="), "{error}");
}

#[test]
fn a_contradiction_in_a_file_is_named_with_its_place() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("server.toml");
    std::fs::write(&file, "tcp = 'off'\n  max-clients = 300\ncert = 'a.crt'\nkey = 'a.key'\n").unwrap();
    let load = |cli| ServerConfig::load(Some(&file), cli, Rights::ALL).map_err(|error| error.to_string());
    let error = load(ServerOptions::default()).unwrap_err();
    assert!(error.contains("server.toml, line 2, column 3: --max-clients 300 is more than 253"), "{error}");
    assert!(load(ServerOptions { max_clients: Some(9), ..ServerOptions::default() }).is_ok());
    // The mistake is on the command line.
    let error = load(ServerOptions { max_clients: Some(0), ..ServerOptions::default() }).unwrap_err();
    assert!(error.starts_with("--max-clients 0"), "{error}");
}
