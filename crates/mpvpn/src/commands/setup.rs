//! `mpvpn setup`: makes a server or client of this machine a service, and takes it away again.

mod remove;
mod ssh;

use std::{
    io::{IsTerminal, Write, stdin, stdout},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Parser, Subcommand};
use ipnet::Ipv4Net;
use mpvpn_config::{ConfigSource, ServerConfig, ServerOptions};
use mpvpn_confine::secrets::hide_tokens;
use mpvpn_error::RunError;
use mpvpn_identity::client_ca::ClientCa;
use mpvpn_input::{dirs, role::Role};
use mpvpn_server as server;
use mpvpn_setup::{
    Action, Audience, ClientWishes, Instance, Plan, Record, ServerWishes, SiteWish, Step, execution, facts,
    passing_firewall_steps, plan_client, plan_server,
};
use mpvpn_users::{Joining, host::HostOption};

use super::{Command, client::read_link, user::give_out};
use crate::{
    failure::Failure,
    output::{ask, confirm, print},
};

const NEXT: &str = "correct the cause, and run the same command again";

const EXAMPLES: &str = "\
Examples:
  mpvpn setup server --dry-run
      what the machine has, and what would change; changes nothing
  mpvpn setup server --host vpn.example --user anna
      a server on this machine: file, firewall, service, a user; prints the join link of that user
  mpvpn setup client 'mpvpn://TOKEN@vpn.example/?pin=SHA256' --kill-switch
      a client on this machine, by the link that the server printed
  mpvpn setup remove
      takes away what setup made, and says what stays

It shows what follows and asks; `--yes` answers for you, and is needed where there is no terminal. Run again, it changes
only what differs. If a step fails, those before it are taken back. It needs root.

Exit code 0 if all is as wanted, 1 if the machine lacks something, a step failed or you said no, 2 for bad usage.";

const SERVER_EXAMPLES: &str = "\
Examples:
  mpvpn setup server
      a server at port 443 with the user `default`
  mpvpn setup server --host 203.0.113.7 --port 4433 --user anna
      behind address translation, or at another port than 443
  mpvpn setup server --site http://127.0.0.1:8080
      where a web server has port 443: after that listens at 127.0.0.1:8080 instead, visitors see its pages by mpvpn
  mpvpn setup server --site page
      visitors see one plain page; your own pages: --site /var/www/html
  mpvpn setup server --client-ca /etc/mpvpn/clients.crt --user alice@example.org
      clients with certificates of your CA instead of tokens; the user is the name in the certificate";

const CLIENT_EXAMPLES: &str = "\
Examples:
  mpvpn setup client 'mpvpn://TOKEN@vpn.example/?pin=SHA256'
  mpvpn setup client - --yes
      reads the link from standard input

Over SSH, everything is taken back after 60 s unless you confirm that you can still reach the machine: by Enter, or with
`mpvpn setup confirm` in another session. `--yes` skips that.";

/// Make a server or client of this machine a service, with file, firewall, unit and first user; or take it
/// away
#[derive(Debug, Parser)]
#[command(name = "setup", after_help = EXAMPLES)]
pub(crate) struct Setup {
    #[command(subcommand)]
    command: SetupCommand,
}

#[derive(Debug, Subcommand)]
enum SetupCommand {
    /// Make this machine a server
    Server(ServerArgs),
    /// Make this machine a client of a server, by a join link
    Client(ClientArgs),
    /// Take away what setup has made here, and say what stays
    Remove(remove::RemoveArgs),
    /// Keep the client that was set up over SSH
    Confirm(ssh::ConfirmArgs),
    /// Take back a client that nobody confirmed
    #[command(hide = true)]
    Rollback(ssh::ConfirmArgs),
    /// Add the server's rules to chains of the firewall that have forgotten them
    #[command(hide = true)]
    Firewall(Name),
}

#[derive(Args, Debug)]
#[command(after_help = SERVER_EXAMPLES)]
struct ServerArgs {
    /// Name or address, and port, at which clients reach this machine; needed behind address translation
    /// [default: an address of this machine, and the port of the server]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<HostOption>,
    /// Port of the server, UDP and TCP [default: 443]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// IPv4 network of the tunnel [default: one of 10.64.0.0/11 that this machine does not use]
    #[arg(long, value_name = "CIDR")]
    subnet: Option<Ipv4Net>,
    /// Name of the first user [default: default]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Site that visitors without a token see: the pages of the web server at this address, the files of this
    /// folder, `page` for one plain page that is made, or `none` [default: asked for a new server, `none`
    /// with --yes]
    #[arg(long, value_name = "URL|FOLDER|page|none")]
    site: Option<SiteWish>,
    /// PEM file with the CAs whose certificates clients show in place of tokens; the user mpvpn must be able
    /// to read it
    #[arg(long, value_name = "PEM")]
    client_ca: Option<PathBuf>,
    #[command(flatten)]
    name: Name,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Args, Debug)]
#[command(after_help = CLIENT_EXAMPLES)]
struct ClientArgs {
    /// The link, as `mpvpn user add` or `mpvpn setup server` printed it on the server; `-` reads it from
    /// standard input
    #[arg(value_name = "JOIN-LINK")]
    link: String,
    /// Block all packets past the tunnel, from boot on
    #[arg(long)]
    kill_switch: bool,
    #[command(flatten)]
    name: Name,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Args, Debug)]
struct Name {
    /// Name of the instance, for machines with several: its file is server-NAME.toml or client-NAME.toml
    /// [default: none]
    #[arg(long, value_name = "NAME", id = "instance_name")]
    name: Option<String>,
}

impl Name {
    fn instance(self, role: Role) -> Result<Instance, Failure> {
        Ok(Instance::new(role, self.name)?)
    }
}

/// Whether changes may be made without a question.
#[derive(Args, Clone, Copy, Debug)]
struct Consent {
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// The answer to the question whether a plan is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Yes,
    No,
    NotAsked,
}

impl Consent {
    /// Shows a plan and asks. A plan without steps is not asked about.
    fn ask(self, plan: &Plan) -> Result<Answer, Failure> {
        print(&plan.text())?;
        if self.dry_run || plan.steps.is_empty() {
            return Ok(Answer::NotAsked);
        }
        if self.yes || question("Go on?")? { Ok(Answer::Yes) } else { Ok(Answer::No) }
    }
}

/// Asks; no answer means no.
fn question(text: &str) -> Result<bool, Failure> {
    if !stdin().is_terminal() {
        return Err(Failure::usage(
            "there is no terminal to ask at",
            "add --yes, or --dry-run to see what follows",
        ));
    }
    confirm(text).map_err(unreadable)
}

fn unreadable(error: std::io::Error) -> Failure {
    Failure::runtime(format!("the terminal cannot be read: {error}"), "add --yes")
}

impl Command for Setup {
    const SUMMARY: &str = "cannot set it up";

    fn run(self) -> Result<ExitCode, Failure> {
        hide_tokens();
        if !dirs::is_root() {
            return Err(Failure::runtime(
                "it changes files and services of the machine",
                "run it as root: sudo mpvpn setup …",
            ));
        }
        match self.command {
            SetupCommand::Server(args) => args.run(),
            SetupCommand::Client(args) => args.run(),
            SetupCommand::Remove(args) => args.run(),
            SetupCommand::Confirm(args) => args.confirm(),
            SetupCommand::Rollback(args) => args.roll_back(),
            SetupCommand::Firewall(name) => add_firewall_rules(name),
        }
    }
}

fn failed_to_look(error: RunError) -> Failure {
    Failure::of(&error, NEXT)
}

impl ServerArgs {
    fn run(self) -> Result<ExitCode, Failure> {
        let Self { host, port, subnet, user, site, client_ca, name, consent } = self;
        let instance = name.instance(Role::Server)?;
        let client_ca = client_ca.map(checked_ca).transpose()?;
        let machine = facts::look(&instance, port).map_err(failed_to_look)?;
        let asks = site.is_none() && machine.file.is_none() && !consent.yes && !consent.dry_run;
        let site = if asks { ask_site()? } else { site };
        let wishes = ServerWishes { instance: instance.clone(), host, port, subnet, site, client_ca, user };
        let plan = plan_server(&machine, &wishes)?;
        let answer = consent.ask(&plan)?;
        if answer == Answer::No {
            return said_no();
        }
        if answer == Answer::Yes {
            let before = Record::load(&instance);
            let done = carry_out(&instance, &plan, before.as_ref(), machine.file.as_deref())?;
            let config = config_of(&instance)?;
            if let Some((user, token)) = done.user {
                let joining = Joining::new(&config, None)?;
                print(&give_out(&joining, &user, token, false))?;
            }
        }
        let name = instance.name_option();
        let config_option =
            instance.name().map(|_| format!(" --config {}", instance.file().display())).unwrap_or_default();
        print(&format!(
            "`mpvpn user add NAME{config_option}` adds users, `mpvpn status` shows the server, `mpvpn setup remove server{name}` takes all \
             of this away\n"
        ))
    }
}

/// Asks what visitors see, until the answer is understood; `None` without a terminal.
fn ask_site() -> Result<Option<SiteWish>, Failure> {
    if !stdin().is_terminal() {
        return Ok(None);
    }
    print(
        "Who visits this server without a token sees a web site, if there is one: then nobody can tell it from other web servers.\n  \
         http://HOST:PORT  the pages of a web server that you have\n  \
         /FOLDER           the files of a folder\n  \
         page              one plain page, which is made\n  \
         none              no page\n",
    )?;
    loop {
        let answer = ask("Which site?", "none").map_err(unreadable)?;
        match answer.parse() {
            Ok(site) => return Ok(Some(site)),
            Err(why) => drop(print(&format!("{why}\n"))?),
        }
    }
}

/// The absolute path of a file with CAs, after a look whether it has any.
fn checked_ca(file: PathBuf) -> Result<PathBuf, Failure> {
    ClientCa::load(&file)?;
    std::path::absolute(&file).map_err(|error| Failure::runtime(format!("{}: {error}", file.display()), NEXT))
}

fn config_of(instance: &Instance) -> Result<ServerConfig, Failure> {
    let source = ConfigSource::of_server(Some(instance.file()), ServerOptions::default(), server::rights());
    Ok(source.load()?)
}

impl ClientArgs {
    fn run(self) -> Result<ExitCode, Failure> {
        let Self { link, kill_switch, name, consent } = self;
        let instance = name.instance(Role::Client)?;
        let link = read_link(&link)?;
        let machine = facts::look(&instance, None).map_err(failed_to_look)?;
        let wishes =
            ClientWishes { instance: instance.clone(), link, kill_switch, skips_confirmation: consent.yes };
        let record = Record::load(&instance);
        let plan = plan_client(&machine, &wishes, record.as_ref())?;
        match consent.ask(&plan)? {
            Answer::No => return said_no(),
            Answer::NotAsked => return Ok(ExitCode::SUCCESS),
            Answer::Yes => {}
        }
        carry_out(&instance, &plan, record.as_ref(), machine.file.as_deref())?;
        if plan.needs_confirmation {
            return ssh::wait_for_confirmation(&instance);
        }
        let name = instance.name_option();
        print(&format!(
            "`mpvpn status` shows the client, `mpvpn setup remove client{name}` takes all of this away\n"
        ))
    }
}

fn said_no() -> Result<ExitCode, Failure> {
    print("nothing was changed\n")?;
    Ok(ExitCode::FAILURE)
}

/// Carries a plan out, and remembers it first, so that a setup that is interrupted can be removed.
fn carry_out(
    instance: &Instance,
    plan: &Plan,
    before: Option<&Record>,
    file: Option<&str>,
) -> Result<execution::Done, Failure> {
    let path = instance.record_file();
    let record = Record::after(plan, before, file);
    let write =
        |record: &Record| Action::Write { path: path.clone(), text: record.text(), audience: Audience::Root };
    let undo = before.map_or_else(|| Action::Remove(path.clone()), write);
    let remember = Step { action: write(&record), why: String::new(), undo: Some(undo) };
    let mut plan = plan.clone();
    plan.steps.insert(0, remember);
    let began = Instant::now();
    let done = execution::carry_out(&plan, &mut |step| say(&step.action)).map_err(|error| {
        let mut cause = format!("{error}");
        cause += match error.not_undone.as_slice() {
            [] => "\n  everything was taken back",
            _ => "\n  the steps before were taken back, but not these: ",
        };
        cause += &error.not_undone.join("; ");
        Failure::runtime(cause, NEXT)
    })?;
    if began.elapsed() > Duration::from_secs(1) {
        print(&format!("done in {:.0} s\n", began.elapsed().as_secs_f64()))?;
    }
    Ok(done)
}

/// Says a step as it begins.
fn say(action: &Action) {
    // Without stdout, only the progress is lost.
    let _ = writeln!(stdout(), "  {action}");
}

/// Adds rules to chains that forget them, for the unit of the server.
fn add_firewall_rules(name: Name) -> Result<ExitCode, Failure> {
    let instance = name.instance(Role::Server)?;
    let config = config_of(&instance)?;
    let firewall = facts::firewall(&instance.tag(), &[]);
    let steps = passing_firewall_steps(&firewall, &config, &instance);
    let errors = execution::do_all(steps.iter().map(|step| &step.action));
    match errors.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        _ => Err(Failure::runtime(errors.join("; "), "see `nft list ruleset`")),
    }
}
