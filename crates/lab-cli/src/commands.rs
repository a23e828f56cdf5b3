//! The commands of the lab: their options and help, and the actions of `up` and `link`.

use std::{
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, ExitCode, ExitStatus},
    time::Duration,
};

use clap::{Args, Subcommand};
use mpvpn_lab::{INET_V4, INET_V6, Lab, LabError, LinkSpec, parse_share, signals};

use crate::{
    classes,
    control::{self, ControlSocket},
    demo,
    vpn::{self, TUNNEL_SERVER_V4, VpnOptions},
};

/// Emulated links in network namespaces of this machine.
#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Show two bonded links at work, one of them cut and restored, and draw what was measured
    Demo(DemoArgs),
    /// Show that loss in one of three classes of traffic does not affect the other two
    #[command(after_help = CLASSES_HELP)]
    Classes(ClassesArgs),
    /// Build a lab with server and client running, and run a command in the client's namespace
    #[command(after_help = UP_HELP)]
    Up(UpArgs),
    /// Change a link of a running lab
    #[command(after_help = LINK_HELP)]
    Link(LinkArgs),
}

const UP_HELP: &str = "\
Links: RATE,DELAY and settings: jitter=3ms loss=1% queue=60ms mtu=1400 count=ip|ethernet
  burst=8 (packets lost in a row) discipline=tail_drop|codel|fq_codel|policer (of the queue)
  session_rate=80mbit (limits each UDP 5-tuple) port_loss=40001:30% (of UDP from or to a port);
  a setting of one direction: loss.up=1% delay.down=30ms up=20mbit down=100mbit;
  `unlimited` is a plain veth pair. Delays are one-way. Up is from the client to the server.

Environment of the command: MPVPN_SERVER (the server's tunnel address), MPVPN_INET and MPVPN_INET6
(a host behind the server).

Examples:
  mpvpn lab up --link 100mbit,12ms --link 50mbit,30ms,loss=1% -- ping -c 5 10.0.0.1
  mpvpn lab up --link 100mbit,12ms --no-vpn -- ip addr
  mpvpn lab up --link down=100mbit,up=20mbit,12ms          stays until Ctrl-C";

const LINK_HELP: &str = "\
Examples:
  mpvpn lab link 2 down
  mpvpn lab link 2 up
  mpvpn lab link 1 loss=10% delay=80ms --direction down";

const CLASSES_HELP: &str = "\
Three classes carry one flow each over one link, each class on a connection of its own. The client's default
rules classify the flows by their DSCP: two calls (EF, critical), packets without a mark (default), and a
backup (LE, bulk). During the second third of the time, the link drops a share (--loss) of the packets of the
bulk connection, in both directions. Each packet is echoed by the server, so rates, round-trip times and
losses are those of an application; `on the wire` is the loss that the QUIC connection itself measured.

Examples:
  mpvpn lab classes
  mpvpn lab classes --loss 10% --link 20mbit,40ms,queue=100ms

To see the client's view, run `mpvpn status --api-socket PATH` in another terminal, with the path that is printed.";

/// Options of `mpvpn lab classes`.
#[derive(Debug, Args)]
pub(crate) struct ClassesArgs {
    /// Seconds of traffic; packets are lost during the second third
    #[arg(long, value_name = "N", default_value_t = 30,
    value_parser = clap::value_parser!(u64).range(6..=300))]
    pub(crate) seconds: u64,
    /// Share of the bulk connection's packets that is lost
    #[arg(long, value_name = "SHARE", default_value = "30%", value_parser = parse_share)]
    pub(crate) loss: f64,
    /// The link that the classes share; see `mpvpn lab up --help`
    #[arg(long, value_name = "SPEC", default_value = "50mbit,6.5ms,queue=60ms")]
    pub(crate) link: LinkSpec,
    /// Where the plot and the figures are written
    #[arg(long, value_name = "DIR", default_value = "target/classes")]
    pub(crate) output: PathBuf,
}

/// Options of `mpvpn lab demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Seconds of traffic over both links; link 1 is cut during the second third
    #[arg(long, value_name = "N", default_value_t = 30,
    value_parser = clap::value_parser!(u64).range(12..=50))]
    pub(crate) seconds: u64,
    /// Show the client in its dashboard, too: print a link for a browser on this machine, and wait until it
    /// is open
    #[arg(long)]
    pub(crate) dashboard: bool,
    /// The client's scheduler [default: the client's]
    #[arg(long, value_name = "S")]
    pub(crate) scheduler: Option<String>,
    /// Where the plot and the figures are written
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    pub(crate) output: PathBuf,
}

/// Options of `mpvpn lab up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// A link between client and server; repeat for more
    #[arg(long = "link", value_name = "SPEC", required = true)]
    pub(crate) links: Vec<LinkSpec>,
    /// An argument for the server; repeat for more
    #[arg(long = "server-arg", value_name = "X", allow_hyphen_values = true)]
    pub(crate) server_args: Vec<String>,
    /// An argument for the client; repeat for more
    #[arg(long = "client-arg", value_name = "X", allow_hyphen_values = true)]
    pub(crate) client_args: Vec<String>,
    /// The client's scheduler [default: the client's]
    #[arg(long, value_name = "S")]
    pub(crate) scheduler: Option<String>,
    /// Only namespaces and links: start neither server nor client
    #[arg(long)]
    pub(crate) no_vpn: bool,
    /// Add a host in a network of its own behind the client
    #[arg(long)]
    pub(crate) lan: bool,
    /// A name for `mpvpn lab link --lab NAME` [default: lab-PID]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The command to run in the client's namespace
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Options of `mpvpn lab link`.
#[derive(Debug, Args)]
pub(crate) struct LinkArgs {
    /// Which link, counted from 1
    pub(crate) link: usize,
    /// down, up (the cable), or settings: rate=… delay=… jitter=… loss=… queue=… mtu=…
    #[arg(required = true, value_name = "CHANGE")]
    pub(crate) changes: Vec<String>,
    /// The direction that the settings apply to; up is from the client to the server
    #[arg(long, value_name = "D", default_value = "both", value_parser = ["up", "down", "both"])]
    pub(crate) direction: String,
    /// Which lab, if several are running
    #[arg(long = "lab", value_name = "NAME")]
    pub(crate) lab: Option<String>,
}

/// Runs a subcommand to its end and returns the exit code.
pub(crate) fn run(command: LabCommand) -> Result<ExitCode, LabError> {
    match command {
        LabCommand::Demo(args) => demo::run(&args),
        LabCommand::Classes(args) => classes::run(&args),
        LabCommand::Up(args) => up(&args),
        LabCommand::Link(args) => {
            control::ask(args.lab.as_deref(), args.link, &args.direction, &args.changes)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn up(args: &UpArgs) -> Result<ExitCode, LabError> {
    signals::catch_signals();
    let lab = Lab::builder().links(args.links.iter().cloned()).lan(args.lan).build()?;
    let name = args.name.clone().unwrap_or_else(|| format!("lab-{}", std::process::id()));
    let _control_socket = ControlSocket::open(&lab, &name)?;
    let vpn_options = VpnOptions {
        server_args: args.server_args.clone(),
        client_args: args.client_args.clone(),
        scheduler: args.scheduler.clone(),
    };
    let mut vpn = if args.no_vpn { None } else { Some(vpn::start(&lab, &vpn_options)?) };
    let code = match args.command.split_first() {
        Some((program, arguments)) => run_command(&lab, program, arguments)?,
        None => wait_for_signal(&lab, &name)?,
    };
    if let Some(vpn) = &mut vpn {
        vpn.stop()?;
    }
    Ok(code)
}

fn run_command(lab: &Lab, program: &str, arguments: &[String]) -> Result<ExitCode, LabError> {
    let mut child = lab
        .client()
        .command(program)
        .args(arguments)
        .env("MPVPN_SERVER", TUNNEL_SERVER_V4)
        .env("MPVPN_INET", INET_V4.to_string())
        .env("MPVPN_INET6", INET_V6.to_string())
        .env("MPVPN_LAB", lab.prefix())
        .spawn()
        .map_err(LabError::io(format!("start {program}")))?;
    Ok(exit_code(wait(&mut child)?))
}

/// How often the end of the command is checked for. Longer delays the exit, shorter costs wake-ups.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time that the command has to end after a signal, before it is killed. Chosen: longer keeps a user waiting,
/// shorter kills programs that clean up (`docs/design/lab.md`, open questions).
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits for the command. After a signal to this process, the command gets SIGTERM and [`EXIT_TIMEOUT`] to
/// end by itself: a Ctrl-C in a terminal has reached it, too.
fn wait(child: &mut Child) -> Result<ExitStatus, LabError> {
    let ask = || LabError::io("wait for the command");
    loop {
        if let Some(status) = child.try_wait().map_err(ask())? {
            return Ok(status);
        }
        if signals::check_interrupted().is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(child);
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    for _ in 0..EXIT_TIMEOUT.as_millis() / EXIT_POLL_INTERVAL.as_millis() {
        if let Some(status) = child.try_wait().map_err(ask())? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().map_err(ask())?;
    child.wait().map_err(ask())
}

/// The exit code that a shell would report: 128 plus the number of the signal for a command that a signal
/// ended.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn wait_for_signal(lab: &Lab, name: &str) -> Result<ExitCode, LabError> {
    println!("The lab `{name}` is up; Ctrl-C ends it.");
    for (number, spec) in (1..).zip(lab.specs()) {
        println!("  link {number}: {spec}");
    }
    let places = [Some(lab.client()), Some(lab.server()), Some(lab.inet()), lab.lan()];
    for namespace in places.into_iter().flatten() {
        println!("  ip netns exec {} bash", namespace.name());
    }
    println!("  mpvpn lab link 1 down --lab {name}");
    println!("  the tunnel's server is {TUNNEL_SERVER_V4}, a host behind it {INET_V4} and {INET_V6}");
    println!("  logs: {}", lab.dir().display());
    while signals::sleep(Duration::from_secs(3600)).is_ok() {}
    Ok(ExitCode::SUCCESS)
}
