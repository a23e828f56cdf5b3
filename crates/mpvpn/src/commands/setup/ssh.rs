//! A client that was set up over SSH: confirmed, or taken back.

use std::{io::stdin, process::ExitCode, sync::mpsc, thread, time::Duration};

use clap::Args;
use mpvpn_input::role::Role;
use mpvpn_setup::{Action, CONFIRM_SECONDS, Instance, Rollback, execution, plan_confirmation, plan_rollback};

use super::Name;
use crate::{failure::Failure, output::print};

#[derive(Args, Debug)]
pub(super) struct ConfirmArgs {
    #[command(flatten)]
    name: Name,
}

impl ConfirmArgs {
    pub(super) fn confirm(self) -> Result<ExitCode, Failure> {
        confirm(&self.name.instance(Role::Client)?)
    }

    pub(super) fn roll_back(self) -> Result<ExitCode, Failure> {
        let instance = self.name.instance(Role::Client)?;
        let actions = plan_rollback(&instance, &load(&instance)?);
        finish(&actions, "it was not confirmed, and is taken back\n")
    }
}

/// Waits for the person to confirm. The timer that takes everything back runs apart from this process, which
/// may lose its terminal.
pub(super) fn wait_for_confirmation(instance: &Instance) -> Result<ExitCode, Failure> {
    print(&format!(
        "The client runs. If you can read this, press Enter within {CONFIRM_SECONDS} s to keep it.\n\
         Or log in once more, and run `mpvpn setup confirm{}`. Otherwise everything is taken back.\n",
        instance.name_option()
    ))?;
    let (sender, answer) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let is_line = stdin().read_line(&mut line).is_ok_and(|bytes| bytes > 0);
        // The other end is gone if the time is over.
        let _ = sender.send(is_line);
    });
    // The timer is older than this wait; who presses Enter at the last moment is told the truth by `confirm`.
    match answer.recv_timeout(Duration::from_secs(CONFIRM_SECONDS.into())) {
        Ok(true) => confirm(instance),
        Ok(false) | Err(_) => Err(Failure::runtime(
            "nobody confirmed that the machine can still be reached, so it is taken back",
            "if the tunnel works and only the confirmation was missing, run the command again with --yes",
        )),
    }
}

fn confirm(instance: &Instance) -> Result<ExitCode, Failure> {
    let rollback = load(instance)?;
    finish(&plan_confirmation(instance, &rollback), "confirmed: the client stays, and starts at each boot\n")
}

fn load(instance: &Instance) -> Result<Rollback, Failure> {
    Rollback::load(instance).map_err(|_| {
        Failure::runtime(
            "no setup waits for a confirmation: it was confirmed, or taken back",
            "see `mpvpn status`",
        )
    })
}

fn finish(actions: &[Action], text: &str) -> Result<ExitCode, Failure> {
    match execution::do_all(actions).as_slice() {
        [] => print(text),
        errors => Err(Failure::runtime(errors.join("; "), "do these steps by hand")),
    }
}
