//! Carries plans out.
//!
//! In: a plan. Out: [`Done`], or what failed. Always holds: a plan that fails is undone in reverse order;
//! every program that runs is bounded in time.

use std::time::Duration;

use mpvpn_identity::token::Token;
use mpvpn_os::program::{self, Ended};
use mpvpn_users::{LockedUsers, UserSettings};

use crate::{Action, Plan, Step, facts, firewall::handle_of, remove_file, write_file};

/// The longest that a program may take: a unit has 90 s to start (TimeoutStartSec of systemd). Less gives up
/// on slow machines.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(100);

/// The result of a plan.
#[derive(Debug, Default)]
pub struct Done {
    /// The user that was added, with the new token if there is one.
    pub user: Option<(String, Option<Token>)>,
}

/// A plan that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {why}")]
pub struct SetupError {
    /// The step that failed, as people see it.
    pub step: String,
    /// Why it failed.
    pub why: String,
    /// The steps that could not be undone, a sentence each.
    pub not_undone: Vec<String>,
}

/// Carries a plan out. `report` gets each step before it is done.
///
/// # Errors
/// If a step fails. Those before it are undone then.
pub fn carry_out(plan: &Plan, report: &mut dyn FnMut(&Step)) -> Result<Done, SetupError> {
    let mut done = Done::default();
    for (number, step) in plan.steps.iter().enumerate() {
        report(step);
        if let Err(why) = perform(&step.action, &mut done) {
            let not_undone = undo(plan, number);
            return Err(SetupError { step: step.action.to_string(), why, not_undone });
        }
    }
    Ok(done)
}

/// Does all of these, also if some fail; returns what failed.
pub fn do_all<'a>(actions: impl IntoIterator<Item = &'a Action>) -> Vec<String> {
    let try_one =
        |action: &Action| Some(format!("{action}: {}", perform(action, &mut Done::default()).err()?));
    actions.into_iter().filter_map(try_one).collect()
}

/// Undoes the first `count` steps of a plan, the last one first.
fn undo(plan: &Plan, count: usize) -> Vec<String> {
    // A program that failed may have done a part: systemctl enables a unit, and then fails to start it.
    let failed = plan.steps.get(count).filter(|step| matches!(step.action, Action::Run(_)));
    do_all(failed.and_then(|step| step.undo.as_ref()));
    let before = plan.steps[..count].iter().rev().filter_map(|step| step.undo.as_ref());
    do_all(before.chain(&plan.after_undo))
}

fn perform(action: &Action, done: &mut Done) -> Result<(), String> {
    let said = |error: mpvpn_input::Error| error.to_string();
    match action {
        Action::Write { path, text, audience } => write_file(path, text, *audience).map_err(said),
        Action::Remove(path) => remove_file(path).map_err(said),
        Action::Run(words) => run_words(words),
        Action::DeleteNft(rule) => {
            // The handle of a rule is known only once it is there.
            let Some(handle) = handle_of(&facts::ruleset(), rule) else { return Ok(()) };
            let words: Vec<String> = ["nft".to_owned(), "delete".to_owned(), "rule".to_owned()]
                .into_iter()
                .chain(rule.chain.to_string().split(' ').map(str::to_owned))
                .chain(["handle".to_owned(), handle.to_string()])
                .collect();
            run_words(&words)
        }
        Action::AddUser { name, file, credential } => {
            let settings = UserSettings::default();
            let add = |mut users: LockedUsers| users.add_with_credential(name, &settings, *credential);
            done.user = Some((name.clone(), LockedUsers::open(file).and_then(add).map_err(said)?));
            Ok(())
        }
        Action::RemoveUser { name, file } => {
            LockedUsers::open(file).and_then(|mut users| users.remove(name)).map_err(said)
        }
        // A process of its own: it may leave root.
        Action::Reset => {
            let own = std::env::current_exe().map_err(|error| error.to_string())?;
            run_words(&[own.display().to_string(), "reset".to_owned()])
        }
    }
}

fn run_words(words: &[String]) -> Result<(), String> {
    let Some((name, args)) = words.split_first() else { return Ok(()) };
    match program::run(name, args, String::new(), Some(PROGRAM_TIMEOUT)) {
        Ended::Well(_) => Ok(()),
        Ended::Badly(said) => Err(match (name.as_str(), args.last()) {
            ("systemctl", Some(unit)) => with_journal(said, unit),
            _ => said,
        }),
        Ended::Missing => Err(format!("{name} is not installed")),
        Ended::Late => Err(format!("it did not end in {} s", PROGRAM_TIMEOUT.as_secs())),
    }
}

/// The message of systemctl, with the last lines of the unit's log, which have the reason.
fn with_journal(said: String, unit: &str) -> String {
    let args = ["--unit", unit, "--lines", "5", "--output", "cat", "--no-pager"].map(str::to_owned);
    match program::run("journalctl", &args, String::new(), Some(Duration::from_secs(10))) {
        Ended::Well(log) if !log.trim().is_empty() => format!("{said}\n{}", log.trim_end()),
        _ => said,
    }
}
