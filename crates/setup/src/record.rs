//! The records of setup: of a whole setup, for its removal; of one over SSH, for taking it back.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    instance::Instance,
    plan::{Action, Audience, Plan},
};
use mpvpn_identity::identity::Fingerprint;
use mpvpn_input::{Error, Result, files};

/// The record of an instance's setup. The file is in the state folder, which the service may write to: it
/// says only what may be removed among the files and rules of that instance.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct Record {
    /// SHA-256 of the configuration file as setup wrote it; empty if it wrote none.
    pub file_sha256: String,
    /// The user that setup added.
    pub user: Option<String>,
}

impl Record {
    /// The record of an instance after this plan; `before` is the one that there is, `file` the configuration
    /// file.
    pub fn after(plan: &Plan, before: Option<&Self>, file: Option<&str>) -> Self {
        let mut record = before.cloned().unwrap_or_default();
        // A file that somebody else made, or changed since, stays theirs.
        let is_setups = file.is_none_or(|text| record.wrote(text));
        for step in &plan.steps {
            match &step.action {
                Action::Write { text, audience: Audience::Service, .. } if is_setups => {
                    record.file_sha256 = sha256(text);
                }
                Action::AddUser { name, .. } => record.user = Some(name.clone()),
                _ => {}
            }
        }
        record
    }

    /// Whether setup wrote a configuration file with this text.
    pub fn wrote(&self, text: &str) -> bool {
        self.file_sha256 == sha256(text)
    }

    /// The record of an instance; `None` if setup made nothing for it, or the record cannot be understood.
    pub fn load(instance: &Instance) -> Option<Self> {
        serde_json::from_slice(&files::read(&instance.record_file()).ok()?).ok()
    }

    /// The record as text.
    pub fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

fn sha256(text: &str) -> String {
    Fingerprint::of(text.as_bytes()).to_string()
}

/// How a setup over SSH is taken back that nobody confirms. Only root may read and write the file: it has the
/// token of a client.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Rollback {
    /// The configuration file before; `None` if there was none.
    pub file: Option<String>,
    /// The record before; `None` if there was none.
    pub record: Option<Record>,
    /// Whether the service ran before.
    pub was_active: bool,
    /// Units that start at boot once the setup is confirmed.
    pub enable: Vec<String>,
}

impl Rollback {
    /// The file of an instance. It does not outlive a reboot, and neither does a service that is not
    /// confirmed.
    pub fn path(instance: &Instance) -> PathBuf {
        Path::new("/run").join(format!("{}-unconfirmed.json", instance.tag()))
    }

    /// Reads the file of an instance.
    ///
    /// # Errors
    /// If there is none: everything is confirmed, or taken back.
    pub fn load(instance: &Instance) -> Result<Self> {
        let path = Self::path(instance);
        serde_json::from_slice(&files::read(&path)?)
            .map_err(|error| Error::content(path, "what `mpvpn setup client` wrote", error))
    }

    /// The file's text.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The name of the timer that takes the setup back.
    pub fn timer(instance: &Instance) -> String {
        format!("{}-rollback", instance.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::plan::Step, *};

    fn writes(text: &str) -> Plan {
        let write = Action::Write { path: "x".into(), text: text.into(), audience: Audience::Service };
        Plan { steps: vec![Step::new(write, "", None)], ..Plan::default() }
    }

    #[test]
    fn a_file_of_somebody_else_is_told_from_the_one_that_setup_wrote() {
        let record = Record::after(&writes("a = 1\n"), None, None);
        let read: Record = serde_json::from_str(&record.text()).unwrap();
        assert!(read.wrote("a = 1\n") && !read.wrote("a = 1 # mine\n"));
        assert!(!Record::default().wrote(""));

        let again = Record::after(&writes("a = 2\n"), Some(&record), Some("a = 1\n"));
        assert!(again.wrote("a = 2\n"));
        let of_others = Record::after(&writes("a = 2\n"), Some(&record), Some("a = 1 # mine\n"));
        assert!(!of_others.wrote("a = 2\n"));
        assert!(!Record::after(&writes("a = 2\n"), None, Some("b = 1\n")).wrote("a = 2\n"));
    }
}
