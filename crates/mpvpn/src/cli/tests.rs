use clap::{ArgMatches, FromArgMatches};
use mpvpn_config::AuthMode;
use mpvpn_config::{ClientConfig, ClientOptions, Rights, ServerConfig, ServerOptions};
use mpvpn_identity::trust::Trust;

use super::*;
use crate::commands::{client::Client, server::Server};

/// The name of the command in a line, and its options.
fn parse(line: &str) -> Result<(String, ArgMatches), Failure> {
    // Text in quotes is one word.
    let parts = line.split('"').enumerate();
    let words = parts.flat_map(|(at, part)| match at % 2 {
        0 => part.split_whitespace().collect::<Vec<_>>(),
        _ => vec![part],
    });
    let words = expand_mode(words.map(OsString::from).collect())?;
    let mut found = define().try_get_matches_from(words).map_err(|error| explain(&error))?;
    found.remove_subcommand().ok_or_else(missing_command)
}

fn server(line: &str) -> ServerConfig {
    let (name, words) = parse(line).unwrap();
    assert_eq!(name, "server");
    ServerConfig::resolve(Server::from_arg_matches(&words).unwrap().options, Rights::ALL).unwrap()
}

fn client(line: &str) -> ClientConfig {
    let (name, words) = parse(line).unwrap();
    assert_eq!(name, "client");
    ClientConfig::resolve(Client::from_arg_matches(&words).unwrap().args.options).unwrap()
}

fn refused(line: &str) -> String {
    parse(line).unwrap_err().about(SUMMARY).text()
}

#[test]
fn the_definition_holds_together() {
    define().debug_assert();
}

#[test]
fn the_server_command_of_old_works_word_for_word() {
    let config = server(
        "mpvpn --mode server --listen 0.0.0.0:4433 --cert server.crt --key server.key --subnet 10.0.0.0/24 --auth none",
    );
    assert_eq!(config.listen, ["0.0.0.0:4433".parse().unwrap()]);
    let cert = config.cert.unwrap();
    assert_eq!((cert.cert, cert.key), ("server.crt".into(), "server.key".into()));
    assert_eq!(config.subnet, "10.0.0.0/24".parse().unwrap());
    assert_eq!(config.auth, AuthMode::None);
}

#[test]
fn the_client_command_of_old_works_word_for_word() {
    let config = client("mpvpn --mode client --server 203.0.113.1:4433 --insecure --path eth0 --path eth1");
    assert_eq!(config.server.to_string(), "203.0.113.1:4433");
    assert_eq!(config.trust, Trust::Insecure);
    assert_eq!(config.paths, ["eth0", "eth1"]);
}

#[test]
fn the_mode_may_stand_anywhere_and_have_an_equals_sign() {
    let plain = client("mpvpn client --server a --insecure --tun-name tun7 --log-level debug");
    for line in [
        "mpvpn --mode=client --server a --insecure --tun-name tun7 --log-level debug",
        "mpvpn --server a --insecure --tun-name tun7 --log-level debug --mode client",
        "mpvpn --server a --mode client --insecure --tun-name tun7 --log-level debug",
    ] {
        assert_eq!(client(line), plain, "{line}");
    }
}

#[test]
fn a_mode_that_is_none_is_refused() {
    for line in ["mpvpn --mode", "mpvpn --mode gateway", "mpvpn --mode="] {
        assert!(refused(line).contains("is not a mode: expected --mode server or --mode client"), "{line}");
    }
}

#[test]
fn the_mode_of_a_command_run_in_a_lab_is_not_ours() {
    let words: Vec<OsString> = ["mpvpn", "lab", "up", "--", "x", "--mode", "y"].map(Into::into).into();
    assert_eq!(expand_mode(words.clone()), Ok(words));
}

#[test]
fn what_does_not_work_yet_says_so() {
    assert_eq!(
        refused("mpvpn client --server a --insecure --fec auto"),
        "mpvpn: bad usage: `--fec` is not an option\n  \
         next: set it for a class of traffic in the client's file: fec = \"auto\" in a table [[class]]"
    );
    let text = refused("mpvpn teleport");
    assert!(text.contains("is not a command"), "{text}");
    assert!(
        text.contains(
            "available are: server, client, join, setup, proxy, user, status, top, dashboard, events, ping, measure, check, bugreport, link, class, route, exec, config, kill-switch, backup, restore, reset, completions, lab"
        ),
        "{text}"
    );
    assert!(refused("mpvpn server --fec 1").contains("in a table [[class]]"));
}

#[test]
fn mistakes_are_answered_with_what_to_do() {
    assert_eq!(
        refused("mpvpn client --sever a"),
        "mpvpn: bad usage: `--sever` is not an option here\n  next: did you mean `--server`?"
    );
    assert!(
        refused("mpvpn server --frobnicate").contains("`--frobnicate` is not an option here\n  next: see ")
    );
    assert!(refused("mpvpn serve").ends_with("`serve` is not a command\n  next: did you mean `server`?"));
    assert!(refused("mpvpn user lst").ends_with("next: did you mean `list`?"));
    assert!(refused("mpvpn setup remove sever").ends_with("next: did you mean `server`?"));
    assert!(
        refused("mpvpn client --scheduler minrt").contains("did you mean `minrtt`?"),
        "{}",
        refused("mpvpn client --scheduler minrt")
    );
    assert!(
        refused("mpvpn measure --lane strem").contains("did you mean `stream`?"),
        "{}",
        refused("mpvpn measure --lane strem")
    );
    assert!(
        refused("mpvpn frobnicate")
            .contains("`frobnicate` is not a command\n  next: available are: server, client")
    );
    assert!(refused("mpvpn").contains("a command is missing"));
    assert!(refused("mpvpn client --server").contains("a value is required for '--server <HOST:PORT>'"));
    assert!(refused("mpvpn server --subnet 10.0.0.1/24").contains("did you mean 10.0.0.0/24?"));
    assert!(
        refused("mpvpn server --subnet 10.0.0.0/24 --subnet 10.1.0.0/24").contains("cannot be used multiple")
    );
    assert!(refused("mpvpn status --name a --api-socket b").contains("cannot be used with"));
}

/// Options and keys of the configuration file are the same, but for --config.
#[test]
fn every_option_is_a_key() {
    for (role, parse) in [
        ("server", (|text: &str| toml::from_str::<ServerOptions>(text).map(drop)) as fn(&str) -> _),
        ("client", |text| toml::from_str::<ClientOptions>(text).map(drop)),
    ] {
        let root = define();
        let command = root.find_subcommand(role).unwrap();
        let mut options: Vec<_> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
        options.retain(|option| *option != "config" && *option != "help");
        let error = parse("no-such-key = 1").unwrap_err().to_string();
        let (_, known) = error.split_once("expected one of ").unwrap();
        let mut keys: Vec<_> = known.trim().split(", ").map(|key| key.trim_matches('`')).collect();
        // Tables have no place on a command line.
        let tables = [
            "access",
            "acme",
            "bypass",
            "certificate",
            "class",
            "dns-name",
            "forward",
            "lane-rule",
            "route",
            "limit",
            "link",
            "site",
        ];
        keys.retain(|key| !tables.contains(key));
        assert_eq!(options, keys, "{role}");
    }
}

#[test]
fn a_proxy_has_no_options_of_a_tun_and_a_client_none_of_a_proxy() {
    let help = |command: &str| define().find_subcommand_mut(command).unwrap().render_long_help().to_string();
    for (command, present, absent) in [
        (
            "proxy",
            ["--socks5 ", "--http ", "--server ", "--scheduler "],
            ["--tun-name", "--routes", "--share ", "--shards"],
        ),
        (
            "client",
            ["--tun-name ", "--routes ", "--share ", "--shards "],
            ["--socks5", "--http", "$XDG", "apps"],
        ),
    ] {
        let help = help(command);
        present.iter().for_each(|option| assert!(help.contains(option), "{command}: {option}"));
        absent.iter().for_each(|option| assert!(!help.contains(option), "{command}: {option}"));
    }
}

#[test]
fn the_examples_in_the_help_are_commands_that_work() {
    let pin = "ab".repeat(32);
    let of_commands = commands::ALL.iter().map(|entry| (entry.define)());
    for command in of_commands.chain([define()]).filter(|command| !command.is_hide_set()) {
        let name = command.get_name();
        let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert!(text.contains("  mpvpn ") || name == "lab", "`mpvpn {name} --help` has no examples");
        for line in text.lines().filter_map(|line| line.strip_prefix("  mpvpn ")) {
            let line = line.replace("SHA256", &pin).replace('\'', "");
            // The output may go into a file.
            let (line, _) = line.split_once(" > ").unwrap_or((&line, ""));
            if line.starts_with("lab") {
                continue;
            }
            assert!(parse(&format!("mpvpn {line}")).is_ok(), "{line}");
        }
    }
}
