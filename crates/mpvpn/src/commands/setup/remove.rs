//! Takes away what setup has made.

use std::{fs, io::IsTerminal, process::ExitCode};

use clap::{Args, ValueEnum};
use mpvpn_config::{ClientConfig, Rights, ServerConfig, ServerOptions};
use mpvpn_input::role::Role;
use mpvpn_setup::{Instance, KeptState, Plan, Record, Removal, execution, facts, plan_removal};
use mpvpn_state::{kept_session::KeptSession, quota_usage};

use super::{Answer, Consent, Name, failed_to_look, question, said_no, say};
use crate::{failure::Failure, output::print};

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleArg {
    /// The server
    Server,
    /// The client
    Client,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Server => Self::Server,
            RoleArg::Client => Self::Client,
        }
    }
}

#[derive(Args, Debug)]
pub(super) struct RemoveArgs {
    /// The part to remove [default: all that setup has made here]
    #[arg(value_name = "ROLE")]
    role: Option<RoleArg>,
    #[command(flatten)]
    name: Name,
    /// Remove the users and the certificate of the server, too: their links never work again
    #[arg(long)]
    users: bool,
    #[command(flatten)]
    consent: Consent,
}

impl RemoveArgs {
    pub(super) fn run(self) -> Result<ExitCode, Failure> {
        let Self { role, name, users, consent } = self;
        let instances = match role {
            Some(role) => vec![name.instance(role.into())?],
            None if name.name.is_some() => {
                return Err(Failure::usage(
                    "--name without server or client",
                    "say which: `mpvpn setup remove server --name NAME`",
                ));
            }
            None => instances(),
        };
        let mut removals = Vec::new();
        for instance in &instances {
            removals.push(removal_of(instance, users, consent)?);
        }
        let mut all = Removal::default();
        for removal in removals {
            all.plan.steps.extend(removal.plan.steps);
            all.left.extend(removal.left);
        }
        match consent.ask(&all.plan)? {
            Answer::No => return said_no(),
            Answer::Yes => carry_out(&all.plan)?,
            Answer::NotAsked => {}
        }
        // Where the package is, it stays.
        for left in &all.left {
            print(&format!("stays: {left}\n"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The instances with a record, and those without a name, of which something may be there without a record.
fn instances() -> Vec<Instance> {
    let mut all = facts::records();
    all.extend([Role::Server, Role::Client].map(Instance::unnamed));
    all.sort_by_key(Instance::tag);
    all.dedup();
    all
}

fn removal_of(instance: &Instance, removes_users: bool, consent: Consent) -> Result<Removal, Failure> {
    let record = Record::load(instance);
    let (device, files) = device_and_files(instance)?;
    let machine = facts::look(instance, None).map_err(failed_to_look)?;
    let can_ask = !consent.yes && !consent.dry_run && std::io::stdin().is_terminal();
    // A session is of no use without its client; users are.
    let is_removed = !files.is_empty()
        && (removes_users
            || instance.role() == Role::Client
            || can_ask
                && question(&format!(
                    "Remove the users ({}) and the certificate of the server, too? Their links never work again.",
                    machine.users.join(", ")
                ))?);
    let state = KeptState { files, is_removed };
    Ok(plan_removal(&machine, instance, record.as_ref(), device.as_deref(), &state))
}

/// The TUN device of an instance, and the files with users and certificates of a server, or with session and
/// quotas of a client.
fn device_and_files(instance: &Instance) -> Result<(Option<String>, Vec<std::path::PathBuf>), Failure> {
    let Ok(text) = fs::read_to_string(instance.file()) else {
        // A server without a name and without a file has its defaults.
        let is_default = instance.role() == Role::Server && instance.name().is_none();
        let defaults = || ServerConfig::resolve(ServerOptions::default(), Rights::ALL);
        let files = if is_default { facts::files_of_server(&defaults()?) } else { Vec::new() };
        return Ok((None, files));
    };
    match instance.role() {
        Role::Server => {
            let config = ServerConfig::parse(&text, &instance.file())?;
            let files = facts::files_of_server(&config);
            Ok((Some(config.tun_name), files))
        }
        Role::Client => {
            let Ok(config) = ClientConfig::parse(&text, &instance.file()) else {
                return Ok((None, Vec::new()));
            };
            let session = KeptSession::file(&config.state_dir, &config.name, &config.server);
            let used = quota_usage::links_file(&config.state_dir, &config.name);
            Ok((Some(config.tun_name), [session, used].into_iter().filter(|file| file.exists()).collect()))
        }
    }
}

/// Does all steps, also if some fail.
fn carry_out(plan: &Plan) -> Result<(), Failure> {
    let actions = plan.steps.iter().map(|step| {
        say(&step.action);
        &step.action
    });
    match execution::do_all(actions).as_slice() {
        [] => Ok(()),
        errors => {
            Err(Failure::runtime(errors.join("; "), "do these steps by hand, or run the command again"))
        }
    }
}
