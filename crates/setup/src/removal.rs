//! The plan that takes a server or client away again.

use std::path::{Path, PathBuf};

use super::{
    instance::Instance,
    machine::MachineFacts,
    plan::{Action, Plan, Step},
    record::Record,
    site::{PLAIN_PAGE, page_file},
};
use mpvpn_config::TUN_NAME;
use mpvpn_input::{dirs::STATE_DIR, role::Role};

/// The state that a server keeps for its users, or a client of its session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptState {
    /// The files that exist.
    pub files: Vec<PathBuf>,
    /// Whether they are removed.
    pub is_removed: bool,
}

/// The plan of a removal, and what stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// The plan.
    pub plan: Plan,
    /// The things that stay on the machine, with the reason, a sentence each.
    pub left: Vec<String>,
}

/// The plan that takes an instance away; `device` is the TUN device of its configuration.
pub fn plan_removal(
    machine: &MachineFacts,
    instance: &Instance,
    record: Option<&Record>,
    device: Option<&str>,
    state: &KeptState,
) -> Removal {
    let mut removal = Removal::default();
    let steps = &mut removal.plan.steps;
    let unit = machine.unit;
    if machine.systemd && unit.exists && (unit.enabled || unit.active) {
        steps.push(Step::new(
            Action::systemctl(&["disable", "--now"], instance),
            "it ends, and is not started again",
            None,
        ));
    }
    if instance.role() == Role::Server {
        steps.extend(machine.firewall.removal(instance, device.unwrap_or(TUN_NAME)));
    }
    if machine.drop_in.is_some() {
        steps.push(Step::new(Action::Remove(instance.drop_in()), "it added firewall rules", None));
        steps.push(Step::new(Action::run(["systemctl", "daemon-reload"]), "", None));
    }
    let was_set_up = record.is_some() || !steps.is_empty();
    match &machine.file {
        Some(text) if record.is_some_and(|record| record.wrote(text)) => {
            steps.push(Step::new(Action::Remove(instance.file()), "setup wrote it", None));
        }
        Some(_) => removal.left.push(format!(
            "{}: it was changed after setup, or setup did not write it{}; `rm {0}` removes it",
            instance.file().display(),
            if instance.role() == Role::Client { "; the token in it still gives access" } else { "" }
        )),
        None => {}
    }
    if let Some((file, page)) = page_file(instance).zip(machine.page.as_ref()) {
        match page == PLAIN_PAGE {
            true => steps.push(Step::new(Action::Remove(file), "setup wrote it", None)),
            false => {
                removal
                    .left
                    .push(format!("{}: it was changed after setup; `rm {0}` removes it", file.display()));
            }
        }
    }
    if was_set_up {
        steps.push(Step::new(
            Action::Reset,
            "routes, firewall tables and resolvers as they were; no kill switch blocks any more",
            None,
        ));
    }
    if state.is_removed {
        steps.extend(state.files.iter().map(|file| Step::new(Action::Remove(file.clone()), "", None)));
    } else if let Some(first) = state.files.first() {
        let folder = first.parent().unwrap_or(Path::new(STATE_DIR));
        removal.left.push(format!(
            "users and certificate in {}: links of these users work again after `mpvpn setup server`; `mpvpn setup remove server{} \
             --users` removes them",
            folder.display(),
            instance.name_option()
        ));
    }
    if record.is_some() {
        steps.push(Step::new(Action::Remove(instance.record_file()), "what setup remembers", None));
    }
    removal
}

#[cfg(test)]
mod tests {
    use super::{
        super::{machine::UnitState, plan::Audience},
        *,
    };

    fn texts(removal: &Removal) -> Vec<String> {
        removal.plan.steps.iter().map(|step| step.action.to_string()).collect()
    }

    fn record_of(text: &str) -> Record {
        let write = Action::Write { path: "x".into(), text: text.into(), audience: Audience::Service };
        let plan = Plan { steps: vec![Step::new(write, "", None)], ..Plan::default() };
        Record::after(&plan, None, None)
    }

    #[test]
    fn everything_that_setup_made_goes_and_users_only_if_asked_for() {
        let server = Instance::unnamed(Role::Server);
        let mut machine = MachineFacts {
            systemd: true,
            unit: UnitState { exists: true, enabled: true, active: true },
            file: Some("subnet = \"10.64.0.0/24\"\n".into()),
            drop_in: Some("x".into()),
            ..MachineFacts::default()
        };
        machine.firewall.ufw = Some("ufw allow 443/udp comment 'mpvpn-server'\n".into());
        let record = record_of(machine.file.as_deref().unwrap());
        let mut state = KeptState { files: vec!["/var/lib/mpvpn/users.toml".into()], is_removed: false };
        let removal = plan_removal(&machine, &server, Some(&record), Some("mpvpn0"), &state);
        let expected = [
            "systemctl disable --now mpvpn-server",
            "ufw delete allow 443/udp",
            "remove /etc/systemd/system/mpvpn-server.service.d/mpvpn-firewall.conf",
            "systemctl daemon-reload",
            "remove /etc/mpvpn/server.toml",
            "mpvpn reset",
            "remove /var/lib/mpvpn/setup-mpvpn-server.json",
        ];
        assert_eq!(texts(&removal), expected);
        assert!(
            removal.left[0].starts_with("users and certificate in /var/lib/mpvpn:"),
            "{:?}",
            removal.left
        );

        state.is_removed = true;
        let removal = plan_removal(&machine, &server, Some(&record), Some("mpvpn0"), &state);
        assert!(texts(&removal).contains(&"remove /var/lib/mpvpn/users.toml".to_owned()));
        assert_eq!(removal.left, Vec::<String>::new());
    }

    #[test]
    fn files_of_others_stay_and_are_said() {
        let client = Instance::unnamed(Role::Client);
        let machine =
            MachineFacts { file: Some("server = \"a\" # mine\n".into()), ..MachineFacts::default() };
        for record in [None, Some(record_of("server = \"a\"\n"))] {
            let removal = plan_removal(&machine, &client, record.as_ref(), None, &KeptState::default());
            assert!(!texts(&removal).contains(&"remove /etc/mpvpn/client.toml".to_owned()), "{removal:?}");
            let left = "/etc/mpvpn/client.toml: it was changed after setup, or setup did not write it; the token in it still \
                        gives access; `rm /etc/mpvpn/client.toml` removes it";
            assert_eq!(removal.left, [left]);
        }
        let nothing = plan_removal(&MachineFacts::default(), &client, None, None, &KeptState::default());
        assert_eq!(nothing, Removal::default(), "nothing was there");
    }
}
