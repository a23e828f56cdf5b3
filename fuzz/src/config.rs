//! Configuration files of clients, proxies and servers, and their command lines.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, Command, FromArgMatches};
use mpvpn_config::{
    BlockWish, ClientConfig, ClientOptions, ConfigSource, FileKind, KillSwitch, LimitRule, PacketDescription,
    Rights, ServerConfig, ServerOptions, SharedNetwork, ViaProxy, is_match, render_classes, values,
};
use mpvpn_input::values::ServerAddr;

use crate::{
    input::Input,
    seeds::texts,
    users::{folder, says_what_to_do},
};

/// The text between the parts of an input that has several.
const SEPARATOR: &str = "\n---\n";

/// `kind, text`, or `kind, lines`.
pub fn config(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.below(7);
    match kind {
        5 => return client(&lines_of(&texts::client_lines(), &mut input)),
        6 => return server(&lines_of(&texts::server_lines(), &mut input)),
        _ => {}
    }
    let Ok(text) = str::from_utf8(input.0) else { return };
    match kind {
        0 => client(text),
        1 => server(text),
        2 => packets(text),
        3 => single_values(text),
        _ => command_line(text),
    }
}

/// A file of these lines, in any order: `(line, the line whose value it has)…`.
fn lines_of(lines: &[&str], input: &mut Input<'_>) -> String {
    let mut text = String::new();
    while !input.is_empty() {
        let (line, other) = (lines[input.below(lines.len())], lines[input.below(lines.len())]);
        match (line.split_once(" = "), other.split_once(" = ")) {
            (Some((key, _)), Some((_, value))) => text.extend([key, " = ", value]),
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Writes the file of a command, as far as it is worth it.
fn with_file(text: &str, read: impl FnOnce(&Path)) {
    let home = folder();
    let path = home.path().join("client.toml");
    fs::write(&path, text).expect("a file");
    read(&path);
}

/// The values that `mpvpn config show` prints have no secret.
fn shows_values(kind: FileKind, file: Option<&Path>, args: &[String], secret: Option<&str>) {
    let Ok(shown) = values(kind, file, args).inspect_err(says_what_to_do) else { return };
    assert!(shown.is_sorted_by(|a, b| a.key <= b.key));
    let Some(secret) = secret.filter(|secret| secret.len() >= 16) else { return };
    let leak = shown.iter().find(|value| value.key == "token" && value.value.contains(secret));
    assert!(leak.is_none(), "{leak:?}");
}

/// A client's file, and another one after which it is read again.
fn client(text: &str) {
    let (text, next) = text.split_once(SEPARATOR).unwrap_or((text, text));
    let Ok(options) = ClientOptions::parse(text).inspect_err(says_what_to_do) else { return };
    let _ = ClientConfig::resolve_app(options.clone()).inspect_err(says_what_to_do);
    if let Ok(proxy) = ClientConfig::resolve_proxy(options.clone()).inspect_err(says_what_to_do) {
        assert!(!proxy.proxies.is_empty());
        let _ = proxy.note();
    }
    let Ok(config) = ClientConfig::resolve(options.clone()).inspect_err(says_what_to_do) else { return };
    assert_eq!(ClientConfig::resolve(options).ok().as_ref(), Some(&config), "the same twice");
    if let Some(token) = config.token.as_ref().map(|token| token.reveal()).filter(|token| token.len() >= 16) {
        assert!(!format!("{config:?}").contains(token), "a log shows the token");
    }
    // The same is blocked while the client does not run, also if a mistake keeps it from running.
    let is_on = config.kill_switch != KillSwitch::Off;
    let wish = BlockWish { kill_switch: is_on, tun_name: config.tun_name.clone() };
    assert_eq!(BlockWish::of_text(text), wish);
    assert!(!is_on || BlockWish::of_text(&format!("{text}\n= a mistake")).kill_switch);
    // A reload of the same file changes nothing.
    let mut reloaded = config.clone();
    let report = reloaded.apply_reload(config.clone());
    assert!(
        !report.links && !report.classes && report.applied.is_empty() && report.restart.is_empty(),
        "{report:?}"
    );
    assert_eq!(reloaded, config);
    // A reload of another one says all that differs.
    if let Ok(next) = ClientConfig::parse(next, Path::new("client.toml")) {
        let is_same = next == config;
        let report = reloaded.apply_reload(next);
        let is_silent = report.applied.is_empty() && report.restart.is_empty();
        assert!(!is_same || is_silent && !report.links && !report.classes, "{report:?}");
    }
    let _ = render_classes(&config, 80);
    for link in &config.links {
        assert!(is_match(&link.name, &link.name.replace('*', "x").replace('?', "y")), "{}", link.name);
        let _ = link.policy();
    }
    assert!(config.class_tuns().all(|(class, tun)| class.tun.as_deref() == Some(tun)));
    with_file(text, |path| {
        let of_file = ConfigSource::new(Some(path.to_owned()), ClientOptions::default());
        assert!(of_file.load().is_ok(), "the file of the same text");
        assert_eq!(of_file.file_to_watch().as_deref(), Some(path));
        let _ = ConfigSource::of_proxy(Some(path.to_owned()), ClientOptions::default()).load();
        let _ = ClientConfig::load_without_server(Some(path)).inspect_err(says_what_to_do);
        let kind = FileKind::of(path, None).expect("a file that can be read");
        let token = config.token.as_ref().map(|token| token.reveal());
        shows_values(kind, Some(path), &[], token);
    });
}

/// A server's file, and another one after which it is read again.
fn server(text: &str) {
    let (text, next) = text.split_once(SEPARATOR).unwrap_or((text, text));
    let Ok(options) = ServerOptions::parse(text).inspect_err(says_what_to_do) else { return };
    let next = ServerConfig::parse(next, Path::new("server.toml"));
    for rights in [Rights::ALL, Rights { network: false, port_443: false }] {
        let Ok(config) = ServerConfig::resolve(options.clone(), rights).inspect_err(says_what_to_do) else {
            continue;
        };
        assert!(!config.listen.is_empty() && config.max_user_relays <= config.max_relays);
        assert_eq!(config.service.has_tun(), config.service.note().is_none());
        let report = config.compare(&config);
        assert!(report.at_once.is_empty() && report.restart.is_empty(), "{report:?}");
        let _ = (LimitRule::of(&config.limits, "bob"), config.site.folder());
        let Ok(next) = &next else { continue };
        let mut changed = config.clone();
        for setting in config.compare(next).at_once {
            assert!(!setting.keys().is_empty());
            changed.take(setting, next);
        }
        assert!(changed.compare(next).at_once.is_empty(), "what was taken differs no more");
    }
    with_file(text, |path| {
        let of_file = ConfigSource::of_server(Some(path.to_owned()), ServerOptions::default(), Rights::ALL);
        let _ = of_file.load().inspect_err(says_what_to_do);
        assert_eq!(of_file.file_to_watch().as_deref(), Some(path));
        shows_values(FileKind::Server, Some(path), &[], None);
    });
}

/// A line with a packet for each class that a client's file has.
fn packets(text: &str) {
    let (lines, file) = text.split_once(SEPARATOR).unwrap_or((text, ""));
    let file = format!("server = 'vpn.example'\ninsecure = true\n{file}");
    let Ok(config) = ClientConfig::parse(&file, Path::new("client.toml")) else { return };
    for line in lines.lines().take(16) {
        let Ok(packet) = line.parse::<PacketDescription>() else { continue };
        let printed = packet.to_string();
        assert_eq!(printed.parse(), Ok(packet.clone()), "{printed}");
        let class = config.class_of(&packet);
        assert!(class.to_string().starts_with(&class.class) && class.packet == printed);
    }
}

/// A printed value is read again.
fn single_values(text: &str) {
    if let Ok(server) = text.parse::<ServerAddr>() {
        assert_eq!(server.to_string().parse(), Ok(server));
    }
    if let Ok(share) = text.parse::<SharedNetwork>() {
        assert_eq!(share.to_string().parse(), Ok(share));
    }
    if let Ok(via) = text.parse::<ViaProxy>() {
        let _ = via.credentials.map(|credentials| credentials.authorization());
    }
    if let Some((pattern, name)) = text.split_once('\n') {
        assert!(!is_match(pattern, name) || pattern.contains(['*', '?']) || pattern == name);
    }
}

/// Arguments, one a line, as those of a client and of a server.
fn command_line(text: &str) {
    let args: Vec<String> = text.lines().take(64).map(str::to_owned).collect();
    // Options that print something and end are those of the program.
    let command =
        || Command::new("mpvpn").no_binary_name(true).disable_help_flag(true).color(clap::ColorChoice::Never);
    if let Ok(found) = ClientOptions::augment_args(command()).try_get_matches_from(&args) {
        let options = ClientOptions::from_arg_matches(&found).expect("what clap has found");
        let token = options.token.as_ref().map(|token| token.reveal().to_owned());
        let _ = ClientConfig::resolve_app(options.clone()).inspect_err(says_what_to_do);
        let source = ConfigSource::of_app(options);
        assert_eq!(source.file_to_watch(), None::<PathBuf>);
        let _ = source.load();
        shows_values(FileKind::Client, None, &args, token.as_deref());
    }
    if let Ok(found) = ServerOptions::augment_args(command()).try_get_matches_from(&args) {
        let options = ServerOptions::from_arg_matches(&found).expect("what clap has found");
        let _ = ServerConfig::resolve(options, Rights::ALL).inspect_err(says_what_to_do);
        shows_values(FileKind::Server, None, &args, None);
    }
}
