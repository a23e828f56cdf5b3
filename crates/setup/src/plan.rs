//! Plans: steps with reasons, and how they are undone.

use std::path::PathBuf;

use derive_more::Display;
use serde_json::Value;

use super::instance::Instance;
use mpvpn_users::UserCredential;

/// The readers of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Root and the members of the group `mpvpn-admin`, if there is one.
    Service,
    /// Root.
    Root,
    /// Everybody.
    All,
}

/// A change of the machine.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum Action {
    /// Writes a file, with its folder.
    #[display("write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Its whole text.
        text: String,
        /// The readers of a new file; one that exists keeps its mode.
        audience: Audience,
    },
    /// Removes a file. It is fine if there is none.
    #[display("remove {}", _0.display())]
    Remove(PathBuf),
    /// Runs a program: its name and arguments.
    #[display("{}", shell_line(_0))]
    Run(Vec<String>),
    /// Deletes a rule of nftables, wherever in its chain it stands now.
    #[display("nft delete the rule `{}` of {}", _0.text, _0.chain)]
    DeleteNft(NftRule),
    /// Adds a user to the server.
    #[display("add the user {name} to {}", file.display())]
    AddUser {
        /// The user.
        name: String,
        /// The file with the users.
        file: PathBuf,
        /// The credential by which the server will know the user.
        credential: UserCredential,
    },
    /// Removes a user from the server.
    #[display("remove the user {name} from {}", file.display())]
    RemoveUser {
        /// The user.
        name: String,
        /// The file with the users.
        file: PathBuf,
    },
    /// Takes back what processes that have ended left on the machine, as `mpvpn reset`.
    #[display("mpvpn reset")]
    Reset,
}

impl Action {
    /// A program with its arguments.
    pub fn run<S: AsRef<str>>(words: impl IntoIterator<Item = S>) -> Self {
        Self::Run(words.into_iter().map(|word| word.as_ref().to_owned()).collect())
    }

    /// Gives a file its earlier text, or removes it if there was none.
    pub(super) fn restore(path: PathBuf, text: Option<String>, audience: Audience) -> Self {
        match text {
            Some(text) => Self::Write { path, text, audience },
            None => Self::Remove(path),
        }
    }

    /// `systemctl VERB... UNIT`.
    pub(super) fn systemctl(verb: &[&str], instance: &Instance) -> Self {
        let unit = instance.unit();
        Self::run(["systemctl"].iter().chain(verb).copied().chain([unit.as_str()]))
    }
}

/// A command as one could type it.
fn shell_line(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// A chain of nftables.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
#[display("{family} {table} {name}")]
pub struct Chain {
    pub(crate) family: String,
    pub(crate) table: String,
    pub(crate) name: String,
}

/// A rule of nftables that has the tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NftRule {
    /// Its chain.
    pub chain: Chain,
    /// Its comment.
    pub tag: String,
    /// The rule as it is typed, without the comment.
    pub text: String,
    /// The rule as `nft --json` lists it, without counters.
    pub(crate) expr: Value,
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A change with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The change.
    pub action: Action,
    /// Its purpose: a phrase.
    pub why: String,
    /// The action that undoes it; `None` if nothing has to be undone.
    pub undo: Option<Action>,
}

impl Step {
    pub(super) fn new(action: Action, why: impl Into<String>, undo: Option<Action>) -> Self {
        Self { action, why: why.into(), undo }
    }
}

/// The facts that setup found, and the steps that it is going to take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The facts that were found, a line each.
    pub found: Vec<String>,
    /// Warnings, a sentence each.
    pub warnings: Vec<String>,
    /// The changes in their order.
    pub steps: Vec<Step>,
    /// The steps to be taken by hand afterwards, a sentence each.
    pub by_hand: Vec<String>,
    /// The last action after all steps of a failed plan were undone.
    pub after_undo: Option<Action>,
    /// Whether the changes are taken back unless somebody confirms them.
    pub needs_confirmation: bool,
}

impl Plan {
    /// The text that people see before they confirm. Tokens are hidden, and so are files that only root may
    /// read.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.found {
            text += &format!("  {line}\n");
        }
        for warning in &self.warnings {
            text += &format!("! {warning}\n");
        }
        if self.steps.is_empty() {
            text += "nothing has to change\n";
        } else {
            text += "these steps follow:\n";
        }
        for (number, step) in (1..).zip(&self.steps) {
            text += &format!("{number:3}. {}\n", step.action);
            if !step.why.is_empty() {
                text += &format!("       {}\n", step.why);
            }
            if let Action::Write { text: content, audience: Audience::Service | Audience::All, .. } =
                &step.action
            {
                let lines = content.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
                lines.for_each(|line| text += &format!("       | {}\n", without_secret(line)));
            }
        }
        for hint in &self.by_hand {
            text += &format!("by hand: {hint}\n");
        }
        text
    }
}

/// A line of a configuration file without the token in it.
fn without_secret(line: &str) -> &str {
    if line.trim_start().starts_with("token ") || line.trim_start().starts_with("token=") {
        "token = (hidden)"
    } else {
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_what_follows_and_no_secrets() {
        let write = Action::Write {
            path: "/etc/mpvpn/client.toml".into(),
            text: "# head\n\nserver = \"a\"\ntoken = \"secret\"\n".into(),
            audience: Audience::Service,
        };
        let run = Action::run(["nft", "add", "rule", "it's", ""]);
        let plan = Plan {
            found: vec!["Linux 6".into()],
            warnings: vec!["beware".into()],
            steps: vec![Step::new(write, "", None), Step::new(run, "so that it works", None)],
            by_hand: vec!["open it".into()],
            ..Plan::default()
        };
        assert_eq!(
            plan.text(),
            "  Linux 6\n! beware\nthese steps follow:\n  1. write /etc/mpvpn/client.toml\n       | server = \"a\"\n       | \
             token = (hidden)\n  2. nft add rule 'it'\\''s' ''\n       so that it works\nby hand: open it\n"
        );
        assert_eq!(Plan::default().text(), "nothing has to change\n");
    }
}
