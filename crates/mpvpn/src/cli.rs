//! The words that the program understands, and what it says about those it does not.

use std::{error::Error as _, ffi::OsString, path::PathBuf};

use clap::{
    Args, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
};
use mpvpn_control::config::{ClientOptions, LinkChange, ServerOptions};

use crate::{failure::Failure, run::LabCommand};

const WHAT: &str = "bad usage";

/// Carries a machine's traffic over all its links at once, to a server that hands it on.
#[derive(Debug, Parser)]
#[command(name = "mpvpn", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  mpvpn server
      as root on the server: makes a certificate and a token, and prints the command for clients
  mpvpn client --server 203.0.113.1 --pin SHA256 --token TOKEN
      as root on the client: that command
  mpvpn proxy --socks5 127.0.0.1:1080 --server 203.0.113.1 --pin SHA256 --token TOKEN
      as any user: a proxy for apps instead of a VPN for the machine
  mpvpn status
      which links and paths carry how much
  mpvpn lab demo
      all of it on this machine, over emulated links

`mpvpn --mode server …` and `mpvpn --mode client …` mean `mpvpn server …` and `mpvpn client …`.
Exit codes: 0 ended as asked, 1 failure, 2 bad usage or configuration.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Give clients access to this machine and the network behind it
    #[command(after_help = SERVER_EXAMPLES)]
    Server(ServerArgs),
    /// Send this machine's traffic through a server, over all links at once
    #[command(after_help = CLIENT_EXAMPLES, mut_args(hide_from_client))]
    Client(ClientArgs),
    /// Offer apps a SOCKS5 or HTTP proxy that goes through a server over all links; needs no root
    #[command(after_help = PROXY_EXAMPLES, mut_args(hide_from_proxy))]
    Proxy(ClientArgs),
    /// Show how a running server or client is
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Try every link to a server: UDP, TCP, path MTU, NAT, and the token; needs no root and no running client
    #[command(after_help = CHECK_EXAMPLES, mut_args(hide_from_check))]
    Check(CheckArgs),
    /// Show the links of a running client, or use one in another way until it ends
    #[command(after_help = LINK_EXAMPLES)]
    Link {
        #[command(subcommand)]
        command: LinkCommand,
    },
    /// Show the classes of traffic of a client, and which one a packet belongs to
    #[command(after_help = CLASS_EXAMPLES)]
    Class {
        #[command(subcommand)]
        command: ClassCommand,
    },
    /// Have a running server or client read its configuration again
    #[command(after_help = CONFIG_EXAMPLES)]
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Try it on this machine: emulated links between network namespaces
    Lab {
        #[command(subcommand)]
        command: LabCommand,
    },
}

const SERVER_EXAMPLES: &str = "\
Examples:
  mpvpn server
      with a certificate and a token of its own, kept in /var/lib/mpvpn; prints the client's command
  mpvpn server --listen 0.0.0.0:4433 --listen '[::]:4433' --cert server.crt --key server.key
      with your certificate, on another port, over IPv4 and IPv6
  mpvpn server --subnet 10.8.0.0/16 --subnet6 none --nat off
      other addresses; the network behind routes 10.8.0.0/16 back to this machine
  mpvpn server --routes 192.168.7.0/24 --routes fd00:7::/64
      clients reach these two networks only; `--routes advertised` at a client sends nothing else here

Not as root it relays TCP and UDP only, by default on port 4433, with a certificate and a token kept in
$XDG_STATE_HOME/mpvpn (~/.local/state/mpvpn), and reads no file but the one of --config.

Every option but --config is a key of the configuration file, as in
  listen = [\"0.0.0.0:4433\", \"[::]:4433\"]
  subnet = \"10.8.0.0/16\"
Options given here win over the file.";

const CLIENT_EXAMPLES: &str = "\
Examples:
  mpvpn client --server 203.0.113.1 --pin SHA256 --token-file /etc/mpvpn/token
      everything through the tunnel, over every interface that has a default route
  mpvpn client --server vpn.example:4433 --ca server.crt --path eth0 --path wwan0
      over these two interfaces only
  mpvpn client --server 203.0.113.1 --pin SHA256 --token-file t --routes advertised --share lan0
      only what the server offers, and for the machines behind lan0 too

Every option but --config is a key of the configuration file, as in
  server = \"vpn.example:4433\"
  path = [\"eth0\", \"wwan0\"]
Options given here win over the file.";

const PROXY_EXAMPLES: &str = "\
Examples:
  mpvpn proxy --socks5 127.0.0.1:1080 --server 203.0.113.1 --pin SHA256 --token-file ~/token
      then, for example: curl --socks5-hostname 127.0.0.1:1080 https://example.com/
  mpvpn proxy --socks5 127.0.0.1:1080 --http 127.0.0.1:8080 --config ~/mpvpn.toml
      both kinds, and the rest from a file; then: export https_proxy=http://127.0.0.1:8080
  mpvpn proxy --http 127.0.0.1:8080 --server vpn.example --ca server.crt --path eth0 --path wwan0
      over these two interfaces only

The server makes the TCP connections and resolves the names. No TUN device, no routes and no root are
needed. Whoever reaches the addresses may use the proxy: 127.0.0.1 is for this machine only.
The file has the keys of `mpvpn client`, and
  socks5 = [\"127.0.0.1:1080\"]
  http = [\"127.0.0.1:8080\"]
Options given here win over the file.";

const STATUS_EXAMPLES: &str = "\
Examples:
  mpvpn status
  mpvpn status --flows
      which connections travel as streams and which as packets
  mpvpn status --name mpvpn0 --json
  curl --unix-socket /run/mpvpn/client-mpvpn0.sock http://localhost/v1/status";

const CHECK_EXAMPLES: &str = "\
Examples:
  mpvpn check
      with the file that `mpvpn client` reads
  mpvpn check --server 203.0.113.1 --pin SHA256 --token-file token --path eth0 --path wwan0
  mpvpn check --json --config ~/mpvpn.toml

What it is told, it is told as `mpvpn client`; the rest of the file means nothing to it.
Exit code 0 if a client would have at least one link, else 1.";

const LINK_EXAMPLES: &str = "\
Examples:
  mpvpn link show
  mpvpn link set wwan0 --tier backup --metered yes
      only while no other link works, with few heartbeats
  mpvpn link set wwan0 --up 20mbit --down 50mbit --quota 50GB
      no faster than that, and no more than that a month
  mpvpn link set wwan0 --down none --quota-reset
      as fast as it goes, and counting from 0

The tables [[link]] of the configuration file say the same for good.";

const CLASS_EXAMPLES: &str = "\
Examples:
  mpvpn class list
      the classes, and the rules in the order in which they are tried
  mpvpn class test \"udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46\"
      the class of such a packet, and the rule that says so
  mpvpn class test --config new.toml \"tcp [fd00::5]:40000 -> [2001:db8::9]:443 domain zoom.us\"
      the same with another file, and as if DNS had given the far end's address to that name
  mpvpn class test \"icmp 10.0.0.5 -> 1.1.1.1 mark 0x10 vlan 20 ingress lan0\"
      the same where the kernel steers by these into a class with a TUN of its own
  mpvpn class test --json \"icmp 10.0.0.5 -> 1.1.1.1\"
      in JSON

A packet is: a protocol (tcp, udp, icmp or a number), the client's end, an arrow, the far end; both
ends with ports if the protocol has them; then, if it matters, dscp, domain, mark, vlan and ingress. It
stands in quotes, as > means something to the shell.
The first rule that fits decides: those of the tables [[class]] of the file in order, then those that
are built in. The file is read as it is now; a running client may have read it before.";

const CONFIG_EXAMPLES: &str = "\
Examples:
  mpvpn config reload
      how links are used and the classes count at once, other keys after a restart, and it says
      which; what `mpvpn link set` said is forgotten

SIGHUP does the same; a process that was started in a terminal ends by it.";

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Read the file again; sessions go on
    Reload(Target),
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClassCommand {
    /// Show the classes and the rules in order
    List {
        /// The client's configuration file [default: /etc/mpvpn/client.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Say which class a packet belongs to, and which rule says so
    #[command(after_help = CLASS_EXAMPLES)]
    Test {
        /// The client's configuration file [default: /etc/mpvpn/client.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print it in JSON
        #[arg(long)]
        json: bool,
        /// The packet, in quotes, as in "udp 10.0.0.5:5060 -> 198.51.100.9:5060 dscp 46"
        #[arg(value_name = "PACKET", required = true)]
        packet: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum LinkCommand {
    /// Show the links and why they are in their states
    Show(Target),
    /// Use a link in another way, until the client ends
    Set {
        /// The interface
        #[arg(value_name = "NAME", id = "link")]
        link: String,
        #[command(flatten)]
        change: LinkChange,
        #[command(flatten)]
        target: Target,
    },
}

/// Which process is meant.
#[derive(Args, Debug)]
pub(crate) struct Target {
    /// Ask the client with this name [default: the only one that runs]
    #[arg(long, value_name = "NAME", conflicts_with = "api_socket")]
    pub(crate) name: Option<String>,
    /// Ask at this unix socket
    #[arg(long, value_name = "PATH")]
    pub(crate) api_socket: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct ServerArgs {
    /// Configuration file [default: /etc/mpvpn/server.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: ServerOptions,
}

#[derive(Args, Debug)]
pub(crate) struct ClientArgs {
    /// Configuration file [default: /etc/mpvpn/client.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) options: ClientOptions,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Print what was found in JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) client: ClientArgs,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// List the flows inside the tunnel one by one: how each is carried, and why
    #[arg(long)]
    pub(crate) flows: bool,
    /// Print it in JSON, as the local API gives it
    #[arg(long)]
    pub(crate) json: bool,
    /// Ask the server or client with this name [default: the only one that runs]
    #[arg(long, value_name = "NAME", conflicts_with = "api_socket")]
    pub(crate) name: Option<String>,
    /// Ask at this unix socket
    #[arg(long, value_name = "PATH")]
    pub(crate) api_socket: Option<PathBuf>,
}

/// Options that are about a TUN.
const OF_A_TUN: &[&str] = &["tun_name", "lane", "routes", "dns", "share", "shards"];

fn hide_from_proxy(arg: clap::Arg) -> clap::Arg {
    let arg = match arg.get_id().as_str() {
        "config" => arg.help("Configuration file"),
        "name" => arg.help("Name of this proxy among the mpvpn processes of this machine [default: proxy]"),
        "api_socket" => arg.help(
            "Unix socket for `mpvpn status` [default: client-NAME.sock in $XDG_RUNTIME_DIR/mpvpn, for root in /run/mpvpn]",
        ),
        "state_dir" => arg.help(
            "Folder for what links have used of their quotas [default: $XDG_STATE_HOME/mpvpn, for root /var/lib/mpvpn]",
        ),
        _ => arg,
    };
    let is_hidden = OF_A_TUN.contains(&arg.get_id().as_str());
    arg.hide(is_hidden)
}

/// What says where the server is, who asks, and how links are used.
const OF_A_CHECK: &[&str] =
    &["json", "config", "server", "path", "ca", "pin", "insecure", "token", "token_file", "via", "transport"];

fn hide_from_check(arg: clap::Arg) -> clap::Arg {
    let is_hidden = !OF_A_CHECK.contains(&arg.get_id().as_str());
    arg.hide(is_hidden)
}

fn hide_from_client(arg: clap::Arg) -> clap::Arg {
    let is_hidden = matches!(arg.get_id().as_str(), "socks5" | "http");
    arg.hide(is_hidden)
}

/// Turns `--mode server …`, wherever it stands among options, into `server …`.
pub(crate) fn unfold_mode(mut words: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let starts_with_option =
        words.get(1).and_then(|word| word.to_str()).is_some_and(|word| word.starts_with('-'));
    let is_mode =
        |word: &OsString| word.to_str().is_some_and(|word| word == "--mode" || word.starts_with("--mode="));
    let Some(at) = words.iter().position(is_mode).filter(|_| starts_with_option) else { return Ok(words) };
    let word = words.remove(at).to_string_lossy().into_owned();
    let mode = match word.split_once('=') {
        Some((_, mode)) => mode.to_owned(),
        None if at < words.len() => words.remove(at).to_string_lossy().into_owned(),
        None => String::new(),
    };
    if mode != "server" && mode != "client" {
        return Err(Failure::usage(
            WHAT,
            format!("`{mode}` is no mode: expected --mode server or --mode client"),
            "see `mpvpn --help`",
        ));
    }
    words.insert(1, mode.into());
    Ok(words)
}

/// What people look for here and is said elsewhere.
const ELSEWHERE: &[(&str, &str)] = &[(
    "--fec",
    "say it for each class of traffic in the client's file: fec = \"auto\" in a table [[class]]",
)];

/// Commands that later versions will have.
const LATER_COMMANDS: &[&str] = &["top", "ping", "user"];

/// Says in our words what is wrong with the command line.
pub(crate) fn explain(error: &clap::Error) -> Failure {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => texts.first().cloned(),
        _ => None,
    };
    let help = "see `mpvpn --help` and `mpvpn COMMAND --help`";
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let word = said(ContextKind::InvalidArg).unwrap_or_default();
            if let Some((_, place)) = ELSEWHERE.iter().find(|(option, _)| *option == word) {
                return Failure::usage(WHAT, format!("`{word}` is not an option"), *place);
            }
            let next = said(ContextKind::SuggestedArg)
                .map_or_else(|| help.to_owned(), |similar| format!("did you mean `{similar}`?"));
            Failure::usage(WHAT, format!("`{word}` is not an option here"), next)
        }
        ErrorKind::InvalidSubcommand => {
            let word = said(ContextKind::InvalidSubcommand).unwrap_or_default();
            let available = "available are: server, client, proxy, status, check, link, class, config, lab";
            if LATER_COMMANDS.contains(&word.as_str()) {
                let why = format!("`mpvpn {word}` is not available in this version yet");
                return Failure::usage(WHAT, why, available);
            }
            Failure::usage(WHAT, format!("`{word}` is not a command"), format!("{available}; {help}"))
        }
        ErrorKind::ValueValidation => {
            let option = said(ContextKind::InvalidArg).unwrap_or_default();
            let why = error.source().map_or_else(|| first_line(error), ToString::to_string);
            Failure::usage(WHAT, format!("{option}: {why}"), help)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Failure::usage(WHAT, "a command is missing", format!("{help}; `mpvpn lab demo` shows it at work"))
        }
        _ => Failure::usage(WHAT, first_line(error), help),
    }
}

/// clap's own sentence, without its head and its hints.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let sentence = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    sentence.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
